"""The factor of the gates in families whose config.json has no key for it.

The output of a token's experts is linear in both their gates and their down projections, so a
folder with multiplied down projections and a factor of 1 computes the same: bit for bit where the
factor is a power of two, within the rounding of a weight otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from models.config import ModelConfig


def is_folded(name: str) -> bool:
    """Whether a parameter of this name is multiplied: the routed experts' down projections."""
    return name.endswith(".moe.w2")


def with_folded_factor(
    config: ModelConfig, source: Mapping[str, Tensor]
) -> tuple[ModelConfig, Mapping[str, Tensor]]:
    """A model's config and tensors with the factor in the weights, where its family needs that; the
    same ones if there is nothing to fold."""
    if config.folded_factor == 1:
        return config, source
    folded = config.model_copy(update={"routed_scaling_factor": 1.0})
    return folded, _Folded(source, config.folded_factor)


class _Folded(Mapping[str, Tensor]):
    """The tensors of a model, some multiplied when they are asked for."""

    def __init__(self, source: Mapping[str, Tensor], factor: float) -> None:
        self.source, self.factor = source, factor

    def __getitem__(self, name: str) -> Tensor:
        value = self.source[name]
        # In float32: a bfloat16 weight is rounded once, as it is written.
        return value.float() * self.factor if is_folded(name) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)
