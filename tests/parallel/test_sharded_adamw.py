"""The update of an engine's shards: routers can stand still while the rest moves."""

import torch

from parallel.engine import AdamSettings, Place, ShardedAdamW
from training.optim.master import Group


def parts():
    weights = torch.nn.Parameter(torch.empty(0))
    same = {"lr_multiplier": 1.0, "weight_decay": 0.1}  # so that nothing but the kind differs
    groups = {kind: Group(kind, {kind: weights}, **same) for kind in ("dense", "router")}
    torch.manual_seed(0)
    return {
        kind: (torch.randn(8), Place(kind, (8,), 0, kind, group)) for kind, group in groups.items()
    }


def test_frozen_routers_stay_bit_for_bit():
    found = {}
    for frozen in (False, True):
        optimizer = ShardedAdamW(parts(), AdamSettings())
        seen = []
        for step in range(4):
            for part in optimizer.parts.values():
                part.grad = torch.ones_like(part)
            zero = torch.zeros(())
            optimizer.step(0.1, torch.ones(()), zero, routers_frozen=frozen and step >= 2)
            seen.append({name: part.detach().clone() for name, part in optimizer.parts.items()})
        found[frozen] = seen
    for step in range(4):
        assert torch.equal(found[True][step]["dense"], found[False][step]["dense"])
        same = torch.equal(found[True][step]["router"], found[False][step]["router"])
        assert same == (step < 2)
    assert torch.equal(found[True][3]["router"], found[True][1]["router"])
