"""Who runs the Hopper kernels: what they can do, what is refused, what is noticed once."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch

from moe.experts import experts
from moe.kernels import hopper
from tests.moe.kernels.grouped_cases import random, topk_routing, weights

BF16 = torch.bfloat16


def _operands(D: int = 64, N: int = 32, dtype=BF16):
    w1, w2, b1, b2 = weights(2, D, N, dtype=dtype)
    return [random(8, D, dtype=dtype), w1, w2, None, None, "swiglu"], b1, b2


def test_operands_they_can_do():
    fits, b1, b2 = _operands()
    assert hopper.why_not(*fits) is None
    for index, value, word in ((3, b1, "bias"), (4, b2, "bias"), (5, "geglu", "geglu")):
        other = list(fits)
        other[index] = value
        assert word in hopper.why_not(*other)
    for (D, N), word in {(60, 32): "D=60", (64, 12): "N=12"}.items():
        assert word in hopper.why_not(*_operands(D, N)[0])
    many = torch.empty(2**28, 64, dtype=BF16, device="meta")
    assert "numbers in x" in hopper.why_not(many, *_operands()[0][1:])
    assert "float16" in hopper.why_not(*_operands(dtype=torch.float16)[0])


def test_auto_leaves_them_on_a_cpu():
    fits, *_ = _operands()
    assert not hopper.prefers(*fits, 10_000)


def test_named_backend_is_refused_with_the_reason(monkeypatch):
    fits, b1, _ = _operands()
    monkeypatch.setattr(hopper, "missing", lambda: None)
    hopper.require(*fits)
    with pytest.raises(ValueError, match="backend='hopper' cannot run this: bias"):
        hopper.require(*fits[:3], b1, None, "swiglu")
    monkeypatch.setattr(hopper, "missing", lambda: "Triton 3.5 is installed")
    with pytest.raises(ValueError, match=r"Triton 3\.5 is installed"):
        hopper.require(*fits)


def test_named_backend_on_a_cpu():
    routing = topk_routing(8, 2, 1)
    w1, w2, *_ = weights(2, 64, 32, dtype=BF16)
    with pytest.raises(ValueError, match="compute capability 9"):
        experts(random(8, 64, dtype=BF16), w1, w2, routing, backend="hopper")


def test_a_whole_missing_tier_is_noticed_once(monkeypatch):
    """On a Hopper GPU whose Triton has no Gluon, auto falls back with one notice."""
    monkeypatch.setattr(hopper, "_here", lambda device: True)
    monkeypatch.setattr(hopper, "missing", lambda: "Triton 3.5 is installed")
    hopper._notice.cache_clear()
    fits, *_ = _operands()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert not hopper.prefers(*fits, 1000)
        assert not hopper.prefers(*fits, 1000)
    assert ["Triton 3.5" in str(w.message) for w in seen] == [True]
    hopper._notice.cache_clear()
    monkeypatch.setattr(hopper, "missing", lambda: None)
    assert hopper.prefers(*fits, 1000)
    assert not hopper.prefers(*fits, 127)  # fewer than 64 rows for each of 2 experts


def test_versions(monkeypatch):
    for version, fine in (("3.5.1", False), ("3.6.0", True), ("3.8.0", True), ("3.9.0", False)):
        hopper.missing.cache_clear()
        monkeypatch.setattr(hopper, "HAVE_TRITON", True)
        monkeypatch.setattr(hopper, "INTERPRET", False)
        monkeypatch.setattr(hopper.triton, "__version__", version)
        monkeypatch.setattr(hopper.importlib, "import_module", lambda name: None)
        assert (hopper.missing() is None) == fine, version
    hopper.missing.cache_clear()


def test_resolved_while_compiling(monkeypatch):
    """torch.compile sees the choice as a constant: no graph break."""
    monkeypatch.setattr(hopper, "_here", torch.compiler.assume_constant_result(lambda d: True))
    monkeypatch.setattr(hopper, "missing", lambda: None)
    fits, *_ = _operands()

    def choose(x, w1, w2):
        return x + 1.0 if hopper.prefers(x, w1, w2, None, None, "swiglu", 1000) else x - 1.0

    compiled = torch.compile(choose, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*fits[:3]), fits[0] + 1.0)


def _checking(monkeypatch, errors: dict) -> tuple:
    """The module of configurations with `rows` having those of `errors`, and what was checked."""
    pytest.importorskip("triton.experimental.gluon")
    _configs = pytest.importorskip("moe.kernels.hopper.configs")
    from moe.kernels.hopper import selftest as _selftest

    checked = []

    def error(kernel, config, gather, device):
        checked.append((config, gather))
        return errors[config]

    monkeypatch.setitem(_configs.CONFIGS, "rows", list(errors))
    monkeypatch.setattr(_configs, "_errors", {})
    monkeypatch.setattr(_configs, "_picked", {})
    monkeypatch.setattr(hopper, "checked", set())
    monkeypatch.setattr(_selftest, "error", error)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return _configs, checked


def _config(group: int):
    _configs = pytest.importorskip("moe.kernels.hopper.configs")
    return _configs.Config(128, 256, group=group)


CPU = torch.device("cpu")


def test_a_wrong_configuration_is_never_chosen(monkeypatch):
    """The self-test stands before the clock: a candidate with a large error is left out."""
    wrong, right, odd = map(_config, (2, 4, 6))
    errors = {wrong: 0.5, right: 2e-3, odd: float("nan")}
    _configs, _ = _checking(monkeypatch, errors)
    measured = []

    def best(name, key, configs, run, device):
        for config in configs:
            with contextlib.suppress(RuntimeError):
                run(config)
        return measured[0]

    monkeypatch.setattr(_configs._tuning, "best", best)
    picked = _configs.pick_config("rows", ("test",), measured.append, CPU, gather=False)
    assert (picked, measured) == (right, [right])


def test_c16_a_default_that_was_not_tuned_is_checked_once(monkeypatch):
    wrong, right = map(_config, (2, 4))
    _configs, checked = _checking(monkeypatch, {wrong: 0.5, right: 2e-3})
    launched = []
    for key in ("a", "a", "b"):  # on a CPU nothing is tuned, as with TESSERA_TUNE=0
        found = _configs.pick_config("rows", (key,), launched.append, CPU, gather=False)
        assert found == right
    assert checked == [(wrong, False), (right, False)]
    _configs.pick_config("rows", ("a",), launched.append, CPU, gather=True)
    assert checked[2:] == [(wrong, True), (right, True)]
    assert not launched


@pytest.mark.parametrize("count", [1, 2])
def test_c16_without_a_right_configuration_nothing_runs(monkeypatch, count: int):
    _configs, _ = _checking(monkeypatch, dict.fromkeys(map(_config, range(2, 2 + count)), 0.5))
    with pytest.raises(RuntimeError, match=r"relative error 5.0e-01 .*use kernels='triton'"):
        _configs.pick_config("rows", ("a",), print, CPU, gather=False)


def test_c16_a_capture_runs_what_was_checked_before_it(monkeypatch):
    first, second = map(_config, (2, 4))
    _configs, checked = _checking(monkeypatch, {first: 0.5, second: 2e-3})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="captured before this kernel was checked"):
        _configs.pick_config("rows", ("a",), print, CPU, gather=False)
    assert not checked  # nothing may wait for the device now
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    _configs.pick_config("rows", ("a",), print, CPU, gather=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert _configs.pick_config("rows", ("b",), print, CPU, gather=False) == second
    assert len(checked) == 2


def test_c16_auto_takes_triton_in_a_capture_without_a_check(monkeypatch):
    card = torch.device("cuda", 0)
    monkeypatch.setattr(hopper, "missing", lambda: None)
    monkeypatch.setattr(hopper, "checked", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not hopper._usable(card)
    hopper.checked.add(card)
    assert hopper._usable(card)
    hopper.checked.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert hopper._usable(card)
