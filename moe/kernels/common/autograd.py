"""Hand-written backwards that must not be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the backward of an autograd.Function, or of a custom operator, whose own operations
    autograd does not see.

    `torch.autograd.function.once_differentiable` hangs its error on the incoming gradients alone.
    What is saved has no edge to it, so `torch.autograd.grad(..., inputs=w)` prunes the error and
    gives numbers without the terms that pass through saved tensors. Autograd's engine runs a
    backward in grad mode under `create_graph=True` and at no other time, activation checkpointing
    included; that is known before any number is made, and cannot be pruned.

    In code that torch.compile traces the mode is not the engine's; AOTAutograd refuses double
    backward of compiled code itself.

    Raises:
        RuntimeError: (from the backward) called with create_graph=True.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"{backward.__module__}.{backward.__qualname__} cannot be differentiated again: "
                "its derivatives are written by hand; create_graph=True is not supported"
            )
        with torch.no_grad():
            return backward(ctx, *grads)

    checked.first_order = True  # type: ignore[attr-defined]
    return checked
