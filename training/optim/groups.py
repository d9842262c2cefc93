"""Which parameters share learning rate and weight decay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from moe import MoE
from moe.matrices import Matrices
from parallel.engines.optimizer import DENSE, EXPERT, ROUTER, Group, Kind
from training.optim.config import OptimConfig

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
INSIDE = ("attention", "mlp", "expert")
"""Kinds of weights inside of layers; of two dimensions and more they are matrices."""


def parameter_groups(
    model: nn.Module,
    kinds: Mapping[str, str],
    *,
    weight_decay: float,
    router_weight_decay: float = 0.0,
    router_lr_multiplier: float = 1.0,
    by_matrix: bool = False,
) -> list[Group]:
    """Every trainable parameter in exactly one group, by the rule `DECAYED`.

    Args:
        kinds: parameter name → kind; must name every parameter of the model.
        by_matrix: dense matrices inside of layers are a group of their own, for an optimizer that
            treats them as matrices.

    Raises:
        ValueError: a parameter without a kind, or of a kind the rule does not know.
    """
    rows: dict[tuple[str, torch.dtype], dict[str, nn.Parameter]] = {}
    matrices = _matrices(model, kinds)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = kinds.get(name)
        if kind != ROUTER and kind not in DECAYED:
            known = ", ".join([*DECAYED, ROUTER])
            raise ValueError(f"parameter {name} is of kind {kind!r}; the decay rule knows {known}")
        label = "experts" if kind == EXPERT else "decayed" if DECAYED.get(kind) else "not decayed"
        label = "matrices" if by_matrix and kind != EXPERT and name in matrices else label
        label = ROUTER if kind == ROUTER else label
        rows.setdefault((label, parameter.dtype), {})[name] = parameter
    settings = {
        "decayed": (1.0, weight_decay, DENSE),
        "matrices": (1.0, weight_decay, DENSE),
        "experts": (1.0, weight_decay if DECAYED[EXPERT] else 0.0, EXPERT),
        "not decayed": (1.0, 0.0, DENSE),
        ROUTER: (router_lr_multiplier, router_weight_decay, ROUTER),
    }
    groups = []
    for (label, dtype), parameters in sorted(rows.items(), key=lambda row: str(row[0])):
        several = sum(other == label for other, _ in rows) > 1
        name = f"{label} ({str(dtype).removeprefix('torch.')})" if several else label
        own = {name: matrices[name] for name in parameters if name in matrices}
        groups.append(Group(name, parameters, *settings[label], own))
    return groups


def _matrices(model: nn.Module, kinds: Mapping[str, str]) -> dict[str, Matrices]:
    """How each weight that is inside of a layer and no vector divides into matrices."""
    found = {
        name: Matrices.of(parameter.shape)
        for name, parameter in model.named_parameters()
        if kinds.get(name) in INSIDE and parameter.dim() > 1
    }
    for path, module in model.named_modules():
        if isinstance(module, MoE):
            own = module.matrices().items()
            found |= {f"{path}.{name}" if path else name: matrices for name, matrices in own}
    return found


def group_table(
    groups: Iterable[Group], optim: OptimConfig, placement: Callable[[Kind], str]
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
            "optimizer": optim.of(group).kind,
            "lr": optim.lr * group.lr_multiplier,
            "weight_decay": group.weight_decay,
        }
        for group in groups
    ]
