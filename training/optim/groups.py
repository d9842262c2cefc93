"""Which parameters share learning rate and weight decay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from parallel.engines.optimizer import DENSE, EXPERT, ROUTER, Group, Kind

# The rule of weight decay, by kind of parameter (`models.parameter_kinds`). Matrices that multiply
# activations decay; what scales, shifts or looks up does not: a norm's scale and a bias have no
# scale freedom to keep in check, an embedding row that does not occur in the batch would shrink for
# nothing, and routers have their own setting.
DECAYED = {
    "attention": True,
    "mlp": True,
    "expert": True,
    "head": True,
    "embedding": False,
    "norm": False,
    "bias": False,
}


def parameter_groups(
    model: nn.Module,
    kinds: Mapping[str, str],
    *,
    weight_decay: float,
    router_weight_decay: float = 0.0,
    router_lr_multiplier: float = 1.0,
) -> list[Group]:
    """Every trainable parameter in exactly one group, by the rule `DECAYED`.

    Args:
        kinds: parameter name → kind; must name every parameter of the model.

    Raises:
        ValueError: a parameter without a kind, or of a kind the rule does not know.
    """
    rows: dict[tuple[str, torch.dtype], dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = kinds.get(name)
        if kind != ROUTER and kind not in DECAYED:
            known = ", ".join([*DECAYED, ROUTER])
            raise ValueError(f"parameter {name} is of kind {kind!r}; the decay rule knows {known}")
        label = "experts" if kind == EXPERT else "decayed" if DECAYED.get(kind) else "not decayed"
        label = ROUTER if kind == ROUTER else label
        rows.setdefault((label, parameter.dtype), {})[name] = parameter
    settings = {
        "decayed": (1.0, weight_decay, DENSE),
        "experts": (1.0, weight_decay if DECAYED[EXPERT] else 0.0, EXPERT),
        "not decayed": (1.0, 0.0, DENSE),
        ROUTER: (router_lr_multiplier, router_weight_decay, ROUTER),
    }
    groups = []
    for (label, dtype), parameters in sorted(rows.items(), key=lambda row: str(row[0])):
        several = sum(other == label for other, _ in rows) > 1
        name = f"{label} ({str(dtype).removeprefix('torch.')})" if several else label
        groups.append(Group(name, parameters, *settings[label]))
    return groups


def group_table(
    groups: Iterable[Group], lr: float, placement: Callable[[Kind], str]
) -> list[dict[str, object]]:
    """One row per group, as printed at the start of a run.

    Args:
        placement: kind of a group → where its parameters lie.
    """
    return [
        {
            "group": group.name,
            "tensors": len(group.parameters),
            "parameters": group.count,
            "placement": placement(group.kind),
            "dtype": str(group.dtype).removeprefix("torch."),
            "lr": lr * group.lr_multiplier,
            "weight_decay": group.weight_decay,
        }
        for group in groups
    ]
