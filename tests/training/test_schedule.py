"""Learning-rate schedules: values by hand, shape, independence from interruptions."""

import math

import pytest

from training.optim.schedule import SCHEDULES, lr_factor


def course(kind: str, steps: int, **settings) -> list[float]:
    return [lr_factor(step, steps=steps, kind=kind, **settings) for step in range(steps)]


def test_warm_up_is_linear_and_reaches_the_peak_with_its_last_step():
    for kind in SCHEDULES:
        assert course(kind, 100, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_values_by_hand():
    wsd = course("wsd", 10, warmup_steps=2, decay_fraction=0.4, min_ratio=0.1)
    decay = [0.1 + 0.9 * (1 - math.sqrt(i / 4)) for i in range(4)]
    assert wsd == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, *decay])
    assert course("linear", 5) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert course("cosine", 4, min_ratio=0.5) == pytest.approx(
        [1.0, 0.5 + 0.25 * (1 + math.sqrt(0.5)), 0.75, 0.5 + 0.25 * (1 - math.sqrt(0.5))]
    )
    assert course("constant", 3, min_ratio=0.5) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 7, 50])
@pytest.mark.parametrize("warmup", [0, 1, 5, 60])
def test_every_step_has_a_usable_rate(kind, steps, warmup):
    values = course(kind, steps, warmup_steps=warmup, decay_fraction=0.3)
    assert all(0.0 < value <= 1.0 for value in values), values
    peak = min(warmup, steps)
    assert values[peak:] == sorted(values[peak:], reverse=True), "only warm-up may rise"


def test_the_stable_part_of_wsd_does_not_depend_on_the_length():
    short = course("wsd", 100, warmup_steps=10, decay_fraction=0.2)
    long = course("wsd", 1000, warmup_steps=10, decay_fraction=0.2)
    assert short[:80] == long[:80]
    assert short[81] < long[81] == 1.0


def test_a_run_cut_short_stays_at_the_end_of_its_decay():
    assert lr_factor(30, steps=20, kind="cosine", min_ratio=0.1) == pytest.approx(0.1)


@pytest.mark.parametrize("stop_after", range(20))
@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_rates_after_an_interruption_are_those_of_an_uninterrupted_run(kind, stop_after):
    """THUDM/slime#1547: stopped after any of 20 steps, a run goes on with the same rates."""
    settings = {"steps": 40, "kind": kind, "warmup_steps": 20}
    whole = [lr_factor(step, **settings) for step in range(40)]
    first = [lr_factor(step, **settings) for step in range(stop_after + 1)]
    saved_step = len(first)
    assert first + [lr_factor(step, **settings) for step in range(saved_step, 40)] == whole


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"optim\.schedule\.kind='cosin' must be one of wsd"):
        lr_factor(0, steps=10, kind="cosin")
    with pytest.raises(ValueError, match="step=-1"):
        lr_factor(-1, steps=10)
    with pytest.raises(ValueError, match="steps=0"):
        lr_factor(0, steps=0)
