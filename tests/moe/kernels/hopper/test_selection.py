"""Who runs the Hopper kernels: what they can do, what is refused, what is noticed once."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import pytest
import torch

from moe.experts import experts
from moe.kernels import tiers
from moe.kernels.common import tuning
from moe.kernels.hopper import configs, selftest
from tests.moe.kernels.grouped_cases import random, topk_routing, weights

BF16 = torch.bfloat16


def _operands(D: int = 64, N: int = 32, dtype=BF16):
    """(x, w2, activation) and a bias."""
    _, w2, _, b2 = weights(2, D, N, dtype=dtype)
    return (random(8, D, dtype=dtype), w2, "swiglu"), b2


def test_operands_they_can_do():
    fits, bias = _operands()
    assert tiers.why_not_hopper(*fits) is None
    assert "bias" in tiers.why_not_hopper(*fits, bias)
    assert "geglu" in tiers.why_not_hopper(*fits[:2], "geglu")
    for (D, N), word in {(60, 32): "D=60", (64, 12): "N=12"}.items():
        assert word in tiers.why_not_hopper(*_operands(D, N)[0])
    many = torch.empty(2**28, 64, dtype=BF16, device="meta")
    assert "numbers in x" in tiers.why_not_hopper(many, *fits[1:])
    assert "float16" in tiers.why_not_hopper(*_operands(dtype=torch.float16)[0])


def test_auto_leaves_them_on_a_cpu():
    fits, _ = _operands()
    assert tiers.pick_products("auto", *fits, 10_000) == "reference"


def _on_a_card(monkeypatch, picked: str) -> None:
    """As on a Hopper GPU where `pick_backend` gives `picked`."""
    monkeypatch.setattr(tiers, "pick_backend", lambda *args, **options: picked)
    monkeypatch.setattr(tiers, "_on_hopper", lambda device: True)
    monkeypatch.setattr(tiers, "hopper_missing", lambda: None)


def test_named_backend_is_refused_with_the_reason(monkeypatch):
    fits, bias = _operands()
    _on_a_card(monkeypatch, "hopper")
    assert tiers.pick_products("hopper", *fits, 1) == "hopper"
    with pytest.raises(ValueError, match="backend='hopper' cannot run this: bias"):
        tiers.pick_products("hopper", *fits, 1, bias)
    monkeypatch.setattr(tiers, "hopper_missing", lambda: "Triton 3.5 is installed")
    with pytest.raises(ValueError, match=r"Triton 3\.5 is installed"):
        tiers.pick_products("hopper", *fits, 1)


def test_named_backend_on_a_cpu():
    routing = topk_routing(8, 2, 1)
    w1, w2, *_ = weights(2, 64, 32, dtype=BF16)
    with pytest.raises(ValueError, match="compute capability 9"):
        experts(random(8, 64, dtype=BF16), w1, w2, routing, backend="hopper")


def test_a_whole_missing_tier_is_noticed_once(monkeypatch):
    """On a Hopper GPU whose Triton has no Gluon, auto falls back with one notice."""
    _on_a_card(monkeypatch, "triton")
    monkeypatch.setattr(tiers, "hopper_missing", lambda: "Triton 3.5 is installed")
    tiers._notice.cache_clear()
    fits, bias = _operands()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert tiers.pick_products("auto", *fits, 1000) == "triton"
        assert tiers.pick_products("auto", *fits, 1000) == "triton"
    assert ["Triton 3.5" in str(w.message) for w in seen] == [True]
    tiers._notice.cache_clear()
    monkeypatch.setattr(tiers, "hopper_missing", lambda: None)
    assert tiers.pick_products("auto", *fits, 1000) == "hopper"
    assert tiers.pick_products("auto", *fits, 1000, bias) == "triton"
    # fewer than 64 rows for each of 2 experts
    assert tiers.pick_products("auto", *fits, 127) == "triton"


def test_versions(monkeypatch):
    monkeypatch.setattr(tiers, "HAVE_TRITON", True)
    monkeypatch.setattr(tiers, "INTERPRET", False)
    monkeypatch.setattr(tiers.hopper, "LACKING", None)
    for version, fine in (("3.5.1", False), ("3.6.0", True), ("3.8.0", True), ("3.9.0", False)):
        tiers.hopper_missing.cache_clear()
        monkeypatch.setattr(tiers.triton, "__version__", version)
        assert (tiers.hopper_missing() is None) == fine, version
    tiers.hopper_missing.cache_clear()
    monkeypatch.setattr(tiers.triton, "__version__", "3.8.0")
    monkeypatch.setattr(tiers.hopper, "LACKING", "cannot import name 'tma'")
    assert "cannot import name 'tma'" in tiers.hopper_missing()
    tiers.hopper_missing.cache_clear()


def test_resolved_while_compiling(monkeypatch):
    """torch.compile sees the choice as a constant: no graph break."""
    monkeypatch.setattr(tiers, "_on_hopper", torch.compiler.assume_constant_result(lambda d: True))
    monkeypatch.setattr(tiers, "hopper_missing", lambda: None)
    monkeypatch.setattr(tiers, "pick_backend", lambda *args, **options: "triton")
    (x, w2, _), _ = _operands()

    def choose(x, w2):
        hopper = tiers.pick_products("auto", x, w2, "swiglu", 1000) == "hopper"
        return x + 1.0 if hopper else x - 1.0

    compiled = torch.compile(choose, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, w2), x + 1.0)


def _checking(monkeypatch, errors: dict) -> Callable:
    """`pick` among configurations of `rows` that have those errors, and what was checked."""
    monkeypatch.setitem(configs.CONFIGS, "rows", list(errors))
    monkeypatch.setattr(selftest, "_errors", {})
    monkeypatch.setattr(tuning, "_picked", {})
    monkeypatch.setattr(selftest, "checked", set())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    checked = []

    def pick(key, run, gather=False):
        def error(config):
            checked.append((config, gather))
            return errors[config]

        return configs.pick_right("rows", (key,), run, error, CPU, gather=gather)

    return pick, checked


def _config(group: int) -> tuning.Config:
    return tuning.Config(128, 256, 64, group=group)


CPU = torch.device("cpu")


def test_a_wrong_configuration_is_never_chosen(monkeypatch):
    """The self-test stands before the clock: a candidate with a large error is left out."""
    wrong, right, odd = map(_config, (2, 4, 6))
    errors = {wrong: 0.5, right: 2e-3, odd: float("nan")}
    pick, _ = _checking(monkeypatch, errors)
    measured = []

    def best(name, key, configs, run, *, device):
        for config in configs:
            with contextlib.suppress(RuntimeError):
                run(config)
        return measured[0]

    monkeypatch.setattr(tuning, "best", best)
    picked = pick("test", measured.append)
    assert (picked, measured) == (right, [right])


def test_c16_a_default_that_was_not_tuned_is_checked_once(monkeypatch):
    wrong, right = map(_config, (2, 4))
    pick, checked = _checking(monkeypatch, {wrong: 0.5, right: 2e-3})
    launched = []
    for key in ("a", "a", "b"):  # on a CPU nothing is tuned, as with TESSERA_TUNE=0
        found = pick(key, launched.append)
        assert found == right
    assert checked == [(wrong, False), (right, False)]
    pick("a", launched.append, gather=True)
    assert checked[2:] == [(wrong, True), (right, True)]
    assert not launched


@pytest.mark.parametrize("count", [1, 2])
def test_c16_without_a_right_configuration_nothing_runs(monkeypatch, count: int):
    pick, _ = _checking(monkeypatch, dict.fromkeys(map(_config, range(2, 2 + count)), 0.5))
    with pytest.raises(RuntimeError, match=r"relative error 5.0e-01 .*use kernels='triton'"):
        pick("a", print)


def test_c16_a_capture_runs_what_was_checked_before_it(monkeypatch):
    first, second = map(_config, (2, 4))
    pick, checked = _checking(monkeypatch, {first: 0.5, second: 2e-3})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="captured before this kernel was checked"):
        pick("a", print)
    assert not checked  # nothing may wait for the device now
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    pick("a", print)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert pick("b", print) == second
    assert len(checked) == 2


def test_c16_auto_takes_triton_in_a_capture_without_a_check(monkeypatch):
    card = torch.device("cuda", 0)
    monkeypatch.setattr(tiers, "hopper_missing", lambda: None)
    monkeypatch.setattr(tiers.hopper, "checked", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not tiers._usable(card)
    tiers.hopper.checked.add(card)
    assert tiers._usable(card)
    tiers.hopper.checked.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tiers._usable(card)
