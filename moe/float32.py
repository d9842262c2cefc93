"""Modules whose parameters and state stay float32 whatever the model's dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Float32Module(nn.Module):
    """A module that moves with its model but is never cast down, by `model.to(bfloat16)`, a bf16
    default dtype or the loading of a bf16 checkpoint; a float64 model makes it float64."""

    def __init__(self) -> None:
        super().__init__()
        self._starts: dict[str, float] = {}

    def add_state(
        self,
        name: str,
        shape: Sequence[int] | None,
        device: torch.device | str | None = None,
        start: float = 0.0,
    ) -> None:
        """A buffer that is saved and starts as `start`; None if there is no shape."""
        buffer = None
        if shape is not None:
            # dtype by name: under a bf16 default dtype a bare torch.full would be bf16
            buffer = torch.full(tuple(shape), start, dtype=torch.float32, device=device)
            self._starts[name] = start
        self.register_buffer(name, buffer)

    @torch.no_grad()
    def reset_state(self) -> None:
        """Put every buffer back to its start value."""
        for name, start in self._starts.items():
            getattr(self, name).fill_(start)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float32Module:
        """Every move and cast of a module comes through here: moves are done, narrowing is not."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if _narrow(moved) and not _narrow(tensor) else moved

        return super()._apply(move, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # load_state_dict(assign=True) would put a checkpoint's bf16 tensor in the parameter's place
        for name in (*self._parameters, *self._starts):
            tensor = state_dict.get(prefix + name)
            if isinstance(tensor, Tensor) and _narrow(tensor):
                state_dict[prefix + name] = tensor.float()
        super()._load_from_state_dict(state_dict, prefix, *args)


def _narrow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64)
