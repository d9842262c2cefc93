"""How the blocks are run: what is kept for the backward pass, and compilation.

    apply_checkpointing(model, "selective")
    compile_blocks(model)

Both leave parameter names and values alone, and both may be used together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Checkpointing = Literal["none", "full", "selective"]


def apply_checkpointing(model: nn.Module, mode: Checkpointing) -> None:
    """Choose what the backward pass of a `Decoder` recomputes instead of keeping.

    - none: nothing.
    - selective: the norms, rotations and casts of attention; results of its matrix products and of
      the attention itself are kept. The experts are left alone: they keep only their input and
      pre-activations anyway (`save="x"` when the model is built: only their input).
    - full: everything inside each block but its input, for about a third more arithmetic.

    Router statistics are outputs of the forward pass, so recomputing cannot count them twice.
    """
    if mode not in get_args(Checkpointing):
        raise ValueError(
            f"checkpointing={mode!r} is unknown; allowed: {', '.join(get_args(Checkpointing))}"
        )
    model.checkpointing = mode
    for block in model.layers:
        block.recompute_attention = mode == "selective"


def compile_blocks(
    model: nn.Module, *, changes: int = 0, whole: bool = False, **options: Any
) -> None:
    """Compile every block of a `Decoder` in place with `torch.compile(**options)`; they share code.

    The number of documents in a batch is marked as dynamic, so packing does not recompile.

    The compiler does not choose by timing what changes the order of sums: otherwise two starts
    whose measurements fell out differently would train different bits (seen: two runs of the
    quickstart on one GPU, each with an empty compile cache, parted in their first step).

    Args:
        changes: how often the computation will be another (experts per token by a schedule, a
            limit that ends). PyTorch stops compiling after eight and would go on slowly.
        whole: with experts that are split over processes inside of the compiled code
            (`Sharding.whole_blocks` of the engine).
    """
    model.compiled = True
    torch._inductor.config.deterministic = True
    # training, the pass that counts loads, and evaluation are computations of their own
    torch._dynamo.config.recompile_limit = max(
        torch._dynamo.config.recompile_limit, 8 + 3 * changes
    )
    for block in model.layers:
        if not whole:
            block.compile(**options)
            continue
        # Hooks of the block, which gather its weights, stay outside of the compiled code.
        compiled = torch.compile(block.forward, **options)
        moe = getattr(block, "moe", None)
        block.forward = compiled if moe is None else partial(moe.experts.around, compiled)


def mark_dynamic(*tensors: Tensor) -> None:
    """Tell the compiler that the first dimension of these changes from step to step."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def run_checkpointed(function: Callable, *arguments: Any) -> Any:
    """`function(*arguments)`, keeping only the arguments, and the random states if experts are
    chosen with noise: the recomputation must choose the same."""
    moe = getattr(function, "moe", None)
    draws = moe is not None and moe.draws
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=draws)


_KEPT = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "tessera::document_attention"})


def products_are_kept(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of "selective", for an operator inside of attention."""
    name = op.name().split(".")[0] if hasattr(op, "name") else ""
    if name in _KEPT or "attention_" in name or "_attn" in name:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective_attention(function: Callable, *arguments: Any) -> Tensor:
    """Run the attention half of a block, keeping products and attention, recomputing the rest."""
    contexts = partial(create_selective_checkpoint_contexts, products_are_kept)
    return checkpoint(
        function, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )
