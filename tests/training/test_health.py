"""Counters of bad steps, alarms that sound once, and what a log step reads."""

import torch

from moe.types import RouterStats
from training.health import ALARM_DEAD, ALARM_STEPS, Alarms, HealthCounters, RoutingHealth


def stats_of(counts_LE):
    counts_LE = torch.as_tensor(counts_LE, dtype=torch.int32)
    zero = torch.zeros(counts_LE.shape[0])
    fields = dict.fromkeys(RouterStats._fields, zero)
    fields |= {"counts_E": counts_LE, "tokens": counts_LE.sum(1).float(), "active_sum_E": None}
    return RouterStats(**fields)


APPLIED = torch.tensor(1.0)
GOOD = [100] * 16
DEAD = [9, *[106] * 14, 107]  # a tenth of the mean is 10
# 110 of a mean of 25.6: violation 3.3, and an entropy above 0.8
UNEVEN = [110, *[20] * 15]
# two of sixteen experts have nearly everything: entropy 0.3
NARROW = [792, 792, *[1] * 14]


def test_counters_follow_and_start_again():
    health = RoutingHealth(2, 16)
    for counts in (DEAD, DEAD, UNEVEN):
        health.after_update(stats_of([counts, GOOD]), APPLIED)
    assert health.dead_LE[0, 0] == 0
    assert health.uneven_L.tolist() == [1, 0]
    assert health.narrow_L.tolist() == [0, 0]
    for _ in range(3):
        health.after_update(stats_of([DEAD, NARROW]), APPLIED)
    assert health.dead_LE[0].tolist() == [3, *[0] * 15]
    assert health.dead_LE[1].tolist() == [0, 0, *[3] * 14]
    assert health.uneven_L.tolist() == [0, 3]
    assert health.narrow_L.tolist() == [0, 3]
    assert health.metrics()["dead_steps"].tolist() == [3, 3]


def test_steps_that_were_skipped_or_empty_count_as_neither():
    health = RoutingHealth(1, 16)
    health.after_update(stats_of([DEAD]), APPLIED)
    before = {name: t.clone() for name, t in health.tensors().items()}
    health.after_update(stats_of([GOOD]), torch.tensor(0.0))
    health.after_update(stats_of([[0] * 16]), APPLIED)
    assert all(torch.equal(before[name], t) for name, t in health.tensors().items())
    health.after_update(stats_of([DEAD]), APPLIED)
    assert health.dead_LE[0, 0] == 2


def test_early_alarms_say_that_it_often_heals_and_sound_again_if_it_did_not():
    alarms, quiet_LE = Alarms(), torch.zeros(2, 16)
    bad = torch.tensor([0.0, ALARM_STEPS])
    (alarm,) = alarms.new(HealthCounters(quiet_LE, 0 * bad, bad), early=True)
    assert alarm["early"] and alarm["fault"] == "load_entropy"
    assert alarm["text"].startswith("early, often heals by itself: MoE layer 1: load_entropy")
    assert alarms.new(HealthCounters(quiet_LE, 0 * bad, bad + 9), early=True) == []
    (alarm,) = alarms.new(HealthCounters(quiet_LE, 0 * bad, bad + 10))
    assert not alarm["early"] and alarm["text"].startswith("MoE layer 1: load_entropy")
    assert alarms.new(HealthCounters(quiet_LE, 0 * bad, bad + 11)) == []


def test_alarms_sound_once_and_again_after_a_pause():
    alarms, quiet_L, quiet_LE = Alarms(), torch.zeros(2), torch.zeros(2, 16)
    just = torch.tensor([0.0, ALARM_STEPS - 1])
    assert alarms.new(HealthCounters(quiet_LE, just, just)) == []
    (alarm,) = alarms.new(HealthCounters(quiet_LE, just + 1, just))
    assert (alarm["fault"], alarm["layers"], alarm["steps"]) == ("max_violation", [1], ALARM_STEPS)
    assert "max_violation has been above 3" in alarm["text"]
    (alarm,) = alarms.new(HealthCounters(quiet_LE, just + 2, just + 2))
    assert alarm["fault"] == "load_entropy"
    assert alarms.new(HealthCounters(quiet_LE, just + 3, just + 3)) == []
    assert alarms.new(HealthCounters(quiet_LE, quiet_L, just + 4)) == []
    assert [a["fault"] for a in alarms.new(HealthCounters(quiet_LE, just + 5, just + 5))] == [
        "max_violation"
    ]

    dead_LE = quiet_LE.clone()
    dead_LE[0, 3] = dead_LE[0, 5] = ALARM_DEAD
    (alarm,) = alarms.new(HealthCounters(dead_LE, quiet_L, quiet_L))
    assert (alarm["fault"], alarm["layers"]) == ("dead_experts", [0])
    assert alarm["experts"] == {"0": [3, 5]}


def test_a3_one_alarm_for_all_layers_and_early_one_for_all_that_follow():
    alarms, quiet_L, quiet_LE = Alarms(), torch.zeros(12), torch.zeros(12, 16)
    steps_L = torch.tensor([60.0, 61, 62, 0, 70, 0, 0, 0, 0, 0, 51, 50])
    (alarm,) = alarms.new(HealthCounters(quiet_LE, quiet_L, steps_L), early=True)
    assert alarm["layers"] == [0, 1, 2, 4, 10, 11] and alarm["steps"] == 70
    assert "MoE layers 0 to 2, 4, 10, 11: load_entropy" in alarm["text"]
    assert (
        alarms.new(HealthCounters(quiet_LE, quiet_L, steps_L + 50), early=True) == []
    )  # layer 3 now too
    (alarm,) = alarms.new(HealthCounters(quiet_LE, quiet_L, steps_L + 51))
    assert alarm["layers"] == list(range(12))
    assert alarms.new(HealthCounters(quiet_LE, quiet_L, steps_L + 52)) == []
