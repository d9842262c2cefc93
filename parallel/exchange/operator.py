"""Experts of several ranks and their exchange as one operator, for blocks compiled as a whole.

torch.compile sees two operators for a layer, one for each direction, with shapes that follow from
the tokens alone. What travels between them, and the sizes of it, are not part of the graph: the
forward operator runs the layer as uncompiled code does, records what autograd records of it (a
*tape*), and the backward operator plays the tape. So the exchanges of a layer come in the same
order as uncompiled, on every rank and in both directions, and the sums are the same bits.

A tape is known by its number, which the compiled code keeps for its backward in a tensor. When that
tensor is freed, with or without a backward, so is the tape. It holds copies of what the compiler
makes (tokens, gates, choices), since compiled code uses the memory of such tensors again; weights
are not of its making. It holds no output, whose memory the compiler may use again too.

Shape letters: T tokens, S slots, D model width, E experts of the layer.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call

from moe.kernels.common.autograd import first_order
from moe.kernels.common.ops import define_op
from moe.routing import Routing

_layers: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_tapes: dict[int, _Tape] = {}
_numbers = itertools.count()


@dataclass(frozen=True)
class _Tape:
    """Where the output stands in autograd's graph, and what its gradients are wanted of."""

    inputs: list[Tensor]
    output: GradientEdge


def number_of(layer: nn.Module) -> Tensor:
    """A layer's number, by which the operators find it: int64, in host memory. A tensor, since a
    number would be a constant of the compiled code, which layers could then not share."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number)


def _keep(tape: _Tape) -> Tensor:
    """The number of a tape, which lives as long as the memory of that tensor."""
    number = next(_numbers)
    _tapes[number] = tape
    memory = np.array(number)
    weakref.finalize(memory, _tapes.pop, number, None).atexit = False
    return torch.from_numpy(memory)


@contextmanager
def _recording(record: bool) -> Iterator[None]:
    """Autograd as in uncompiled code, also where a compiler's runtime has turned it off: it does so
    by the dispatcher's keys too, not by the grad mode alone."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.set_grad_enabled(record):
        yield


# --- operators ------------------------------------------------------------------------------------


def _forward(
    layer: Tensor,
    inputs: list[Tensor],
    routing: list[Tensor],
    numbers: list[int],
    output_sums: bool,
    autocast: torch.dtype | None,
    record: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output of the experts, sums of their outputs, number of the tape.

    Args:
        inputs: tokens, gates, w1, w2, and the parameters of the shared expert.
        routing: the other tensors of a `Routing`.
        numbers: its slots for each token and most rows of an expert; -1 for None.
        autocast: dtype of an autocast around the layer.
        record: whether a backward may come.
    """
    module: Any = _layers[int(layer)]
    device = inputs[0].device.type
    casting = torch.autocast(
        device, dtype=autocast, enabled=autocast is not None, cache_enabled=False
    )
    with _recording(record), casting:
        if record:
            made = [tensor.detach().clone() for tensor in inputs[:2]]
            weights = [tensor.detach() for tensor in inputs[2:]]
            inputs = [tensor.requires_grad_() for tensor in (*made, *weights)]
            routing = [tensor.clone() for tensor in routing]
        x_TD, gates_S, w1, w2, *shared = inputs
        expert_S, row_S, token_R, slot_R, offsets_E1, *slot_offsets = routing
        slots_per_token, most = (None if number < 0 else number for number in numbers)
        given = Routing(
            gates_S, expert_S, row_S, token_R, slot_R, offsets_E1, x_TD.shape[0], slots_per_token,
            *(slot_offsets or [None]), most_per_expert=most,
        )  # fmt: skip
        names = [] if module.shared is None else [n for n, _ in module.shared.named_parameters()]
        parameters = dict(zip(names, shared))

        def shared_expert(x_TD: Tensor) -> Tensor:
            return functional_call(module.shared, parameters, (x_TD,))

        found = module.experts.compute(
            x_TD, given, w1, w2, shared_expert if names else None, output_sums
        )
    y_TD, sums_ED = found if output_sums else (found, w1.new_empty(0, dtype=torch.float32))
    if not record:
        return y_TD, sums_ED.detach(), torch.tensor(-1)
    return y_TD.detach(), sums_ED.detach(), _keep(_Tape(inputs, get_gradient_edge(y_TD)))


def _width(x_TD: Tensor, autocast: torch.dtype | None) -> torch.dtype:
    """Dtype of the output: that of a linear layer."""
    return x_TD.dtype if autocast is None or x_TD.dtype == torch.float64 else autocast


def _fake_forward(
    layer: Tensor,
    inputs: list[Tensor],
    routing: list[Tensor],
    numbers: list[int],
    output_sums: bool,
    autocast: torch.dtype | None,
    record: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    x_TD, experts = inputs[0], routing[4].shape[0] - 1
    wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    shape = (experts, x_TD.shape[1]) if output_sums else (0,)
    return (
        x_TD.new_empty(x_TD.shape, dtype=_width(x_TD, autocast)),
        x_TD.new_empty(shape, dtype=wide if output_sums else torch.float32),
        torch.empty((), dtype=torch.int64, device="cpu"),
    )


_forward_op = define_op(
    "experts_forward(Tensor layer, Tensor[] inputs, Tensor[] routing, int[] numbers, "
    "bool output_sums, ScalarType? autocast, bool record) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)


def _backward(
    tape: Tensor, grad_TD: Tensor, dtype: torch.dtype, others: list[Tensor]
) -> list[Tensor]:
    """Gradients of the tokens, which have this dtype, and of the other inputs."""
    kept = _tapes.pop(int(tape), None)
    if kept is None:
        raise RuntimeError(
            "the experts of a compiled block have no second backward pass: what the first one "
            "needed is gone (retain_graph=True is not supported)"
        )
    with _recording(False):
        found = torch.autograd.grad(
            [kept.output], kept.inputs, [grad_TD], allow_unused=True, materialize_grads=True
        )
    return list(found)


def _fake_backward(
    tape: Tensor, grad_TD: Tensor, dtype: torch.dtype, others: list[Tensor]
) -> list[Tensor]:
    return [torch.empty_like(grad_TD, dtype=dtype), *(torch.empty_like(t) for t in others)]


_backward_op = define_op(
    "experts_backward(Tensor tape, Tensor grad_TD, ScalarType dtype, Tensor[] others) -> Tensor[]",
    _backward,
    _fake_backward,
)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: Tensor,
        numbers: list[int],
        output_sums: bool,
        autocast: torch.dtype | None,
        record: bool,
        count: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        inputs, routing = list(tensors[:count]), list(tensors[count:])
        y_TD, sums_ED, tape = _forward_op(
            layer, inputs, routing, numbers, output_sums, autocast, record
        )
        ctx.others, ctx.dtype = len(routing), inputs[0].dtype
        ctx.save_for_backward(tape, *inputs[1:])  # for their shapes
        ctx.mark_non_differentiable(sums_ED)
        return y_TD, sums_ED

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_TD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        tape, *others = ctx.saved_tensors
        grads = _backward_op(tape, grad_TD.contiguous(), ctx.dtype, others)
        return (None, None, None, None, None, None, *grads, *[None] * ctx.others)


def experts_operator(
    layer: Tensor,
    x_TD: Tensor,
    routing: Routing,
    weights: list[Tensor],
    output_sums: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """What `ParallelExperts.compute` gives, as one operator in each direction.

    Args:
        layer: `number_of` an `ExpertParallelMoE`.
        x_TD: this rank's tokens.
        routing: their experts, numbered over the whole layer.
        weights: w1 and w2 of this rank's experts, and the shared expert's parameters in order.
        output_sums: give also the sums of outputs [experts of the layer, D].
    """
    device = x_TD.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    inputs = [x_TD, routing.gates_S, *weights]
    others = [
        routing.expert_S, routing.row_S, routing.token_R, routing.slot_R, routing.offsets_E1,
    ]  # fmt: skip
    if routing.slot_offsets_T1 is not None:
        others.append(routing.slot_offsets_T1)
    given = (routing.slots_per_token, routing.most_per_expert)
    numbers = [-1 if number is None else number for number in given]
    y_TD, sums_ED = _Experts.apply(
        layer,
        numbers,
        output_sums,
        autocast,
        torch.is_grad_enabled(),
        len(inputs),
        *inputs,
        *others,
    )
    return (y_TD, sums_ED) if output_sums else y_TD
