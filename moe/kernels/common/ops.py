"""Registration of custom operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe.kernels.common.backend import check_resolved

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list, tuple))


def is_eager(*arguments: Any) -> bool:
    """Whether a launcher may be called with these directly, past the dispatcher.

    An operator call costs tens of microseconds of Python, as much as a router's kernels take. It is
    needed where something looks at operators: torch.compile, fake tensors, tensor subclasses,
    dispatch modes (selective checkpointing, FLOP counters).
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return _PLAIN.issuperset(map(type, arguments))


_LIBRARY = torch.library.Library("tessera", "FRAGMENT")


def define_op(schema: str, run: Callable, fake: Callable) -> Callable:
    """Registers `tessera::NAME` for all devices and returns what calls it.

    The dispatcher and its Python glue cost tens of microseconds a call, which shows when a layer is
    nine launches long: on plain tensors the call goes past it (see `is_eager`).

    Raises:
        ValueError: (from a call) an argument `backend` that `pick_backend` does not give.
    """
    name, _, arguments = schema.partition("->")[0].strip().removesuffix(")").partition("(")
    types = [argument.partition("=")[0].strip() for argument in arguments.split(", ")]
    backend_at = types.index("str backend") if "str backend" in types else None
    _LIBRARY.define(schema)

    def without_grad(*args):
        with torch.no_grad():
            return run(*args)

    _LIBRARY.impl(name, without_grad, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tessera::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.tessera, name).default

    def call(*args):
        if backend_at is not None:
            check_resolved(name, args[backend_at])
        if not is_eager(*args):
            return op(*args)
        return without_grad(*args) if torch.is_grad_enabled() else run(*args)

    call.backend_at = backend_at  # type: ignore[attr-defined]
    return call
