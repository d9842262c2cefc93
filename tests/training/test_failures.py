"""The interval between checkpoints, by formula and by drawn failures."""

from __future__ import annotations

import pytest

from training.estimate.failures import Failures

HOUR, MONTH = 3600.0, 30 * 24 * 3600.0
# 128 hosts that fail every 2,000 hours each; 1,024 of every 20,000 hours; a small run that hardly
# ever fails. Saves that stop the training, and saves in the background.
CASES = {
    "128 hosts": Failures(2000 * HOUR / 128, save=30, restart=300),
    "1024 hosts, saved beside training": Failures(20000 * HOUR / 1024, 5, 600, write=120),
    "2 hosts": Failures(2000 * HOUR / 2, save=60, restart=300),
    "failing all the time": Failures(HOUR / 2, save=60, restart=240),
}


@pytest.mark.parametrize("name", CASES)
def test_a_month_of_failures_agrees_with_the_formula(name):
    """A mean of many months, with a thousand failures, as single ones scatter: at most 2 % of the
    time from the formula, and where little is lost at most a tenth of that."""
    failures = CASES[name]
    count = max(10, round(1000 * failures.between / MONTH))
    best = failures.best()
    for interval in (best / 2, best, 3 * best):
        months = [failures.simulate(interval, MONTH, seed) for seed in range(count)]
        found, told = sum(months) / len(months), failures.lost(interval)
        assert found == pytest.approx(told, abs=min(0.02, 0.1 * told)), interval


@pytest.mark.parametrize("name", CASES)
def test_no_other_interval_loses_less(name):
    failures = CASES[name]
    best = failures.best()
    least = failures.lost(best)
    assert all(failures.lost(best * factor) > least for factor in (0.8, 0.95, 1.05, 1.25))


def test_youngs_interval_is_the_best_one_where_saving_is_short():
    failures = Failures(100 * HOUR, save=4, restart=200)
    assert failures.young() == pytest.approx((2 * 4 * 100 * HOUR) ** 0.5)
    assert failures.best() == pytest.approx(failures.young(), rel=0.01)
    # a save as long as the time between failures: Daly's interval is the longer one by far
    rough = Failures(HOUR, save=HOUR, restart=60)
    assert rough.best() < 0.7 * rough.young()


def test_the_loss_of_a_failure_is_half_an_interval_a_restart_and_the_write():
    """To first order in the failures, of which there is one in 1,000 hours."""
    failures = Failures(1000 * HOUR, save=10, restart=100, write=50)
    interval = HOUR
    first_order = 10 / interval + (interval / 2 + 100 + 50) / (1000 * HOUR)
    assert failures.lost(interval) == pytest.approx(first_order, rel=0.01)


def test_a_run_that_gets_nowhere_is_told_so():
    assert Failures(60, save=30, restart=3600).lost(600) > 0.999
