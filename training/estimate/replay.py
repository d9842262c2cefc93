"""Replays one micro-batch without computing anything, and counts what memory it would take.

The model is built from tensors that have shapes and no content (`FakeTensorMode`), forward and
backward go through the real code, and every allocation is counted while it lives. So what autograd
keeps, activation checkpointing, the loss's chunks, and when gradients come to be are those of the
code as it is. For a GPU the tensors are still on the CPU but go the way of CUDA tensors
(`moe.kernels.common.backend.as_on_gpu`): nothing of CUDA is needed.

Compiled blocks are traced and divided as torch.compile does it (AOTAutograd with the min-cut
partitioner, which decides what is kept for backward); of the operations in between, those that
Inductor would fuse into their readers take no memory.

Not seen: what kernels allocate inside themselves, and memory lost to fragmentation.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from models import loss
from models.build import build_model
from models.config import ModelConfig
from models.documents import Documents
from models.execution import apply_checkpointing, products_are_kept
from models.transformer import Block
from moe.control import begin_step
from moe.kernels.common.autograd import first_order
from moe.kernels.common.backend import as_on_gpu

RMS_NORM = F.rms_norm
ADD_PRODUCT = loss.add_product


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that operators return, while those tensors live.

    Views share their storage and are counted once; storages that were there before count nothing.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.fused = False
        """True: what operators return now is never in memory."""
        self._known: set[int] = set()

    def ignore(self, tensors: Any) -> None:
        """Leave these out: they are counted elsewhere."""
        for tensor in pytree.tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._known.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, 0 if self.fused else storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def replay(
    model_config: ModelConfig,
    *,
    rows: int,
    seq_len: int,
    dtype: torch.dtype,
    options: Mapping[str, Any] | None = None,
    checkpointing: str = "none",
    gpu: bool = False,
    compiled: bool = False,
    keep_gradients: bool = False,
) -> int:
    """Bytes of activations and of gradients beside buffers, at the worst moment of a micro-batch.

    Args:
        rows, seq_len: of the micro-batch.
        dtype: of weights and activations.
        options: of `models.build.build_model`: save, kernels, and how the run routes.
        checkpointing: as in the config.
        gpu: whether the run is on one.
        compiled: whether its blocks are.
        keep_gradients: whether those that are not float32 stay where autograd put them
            (`parallel.engines.local`, a step of one micro-batch); else they are added to buffers,
            which are counted elsewhere, as soon as they exist.
    """
    options = dict(options or {})
    if gpu and options.get("kernels") == "hopper":  # which allocates as Triton's kernels do
        options["kernels"] = "auto"
    model = build_model(model_config, dtype=dtype, device="meta", **options)
    begin_step(model, 1)  # a schedule of experts per token starts with most of them
    with contextlib.ExitStack() as stack:
        if gpu:
            stack.enter_context(as_on_gpu())
            stack.enter_context(mock.patch.object(F, "rms_norm", _rms_norm))
            stack.enter_context(mock.patch.object(loss, "add_product", _add_product))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        _give_shapes_without_content(model)
        apply_checkpointing(model, checkpointing)
        for parameter in {id(p): p for p in model.parameters()}.values():
            if parameter.dtype == torch.float32 or not keep_gradients:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        tokens_BL = torch.zeros(rows, seq_len, dtype=torch.int64)
        valid_BL = torch.ones(rows, seq_len, dtype=torch.bool)
        borders_N1 = torch.zeros(rows + 1, dtype=torch.int32)
        documents = Documents(borders_N1, (seq_len,) * rows)
        beside = {"positions_BL": tokens_BL, "documents": documents, "valid_BL": valid_BL}
        allocations = Allocations()
        if compiled:
            _compile(model, allocations)
            # Traced here, where nothing counts.
            x_BLD = torch.zeros(rows, seq_len, model_config.hidden_size, dtype=dtype)
            for block in model.layers:
                block(
                    x_BLD.requires_grad_(), block.attn.rope(tokens_BL), borders_N1,
                    documents.lengths_N, valid_BL,
                )  # fmt: skip
            del x_BLD
        with allocations:
            allocations.ignore([list(model.parameters()), list(model.buffers())])
            allocations.ignore([tokens_BL, valid_BL, borders_N1, documents.lengths_N])
            out = model(tokens_BL, labels_BL=tokens_BL, **beside)
            out.loss_sum.backward()
        return allocations.peak


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    """`F.rms_norm` on CUDA: one operator, in eager code; a compiler makes several of it."""
    return (_FusedNorm.apply if get_proxy_mode() is None else RMS_NORM)(x, shape, weight, eps)


class _FusedNorm(torch.autograd.Function):
    """What `aten::_fused_rms_norm` allocates and keeps on CUDA: of a CPU's tensors PyTorch makes
    several operators of it, too, which keep the normalized values beside their input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
        rstd = x.new_empty((*x.shape[: -len(shape)], *[1] * len(shape)), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None, torch.empty_like(weight), None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`models.loss.add_product`: what a GPU adds in place takes no memory, and PyTorch 2.11 cannot
    do it with fake tensors."""
    if a.dtype == total.dtype:
        ADD_PRODUCT(total, a, b)


def _give_shapes_without_content(model: nn.Module) -> None:
    """Replace meta tensors by fake ones on the CPU, tied ones by the same one."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake: Tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_parameter = tensors is module._parameters
                    made[id(tensor)] = nn.Parameter(fake) if is_parameter else fake
                tensors[name] = made[id(tensor)]


# --- compiled blocks ----------------------------------------------------------------------------


def _compile(model: nn.Module, allocations: Allocations) -> None:
    """Blocks run as their graphs would, divided into forward and backward; blocks whose parameters
    have the same shapes share a graph."""
    graphs: dict[Any, Callable] = {}
    for block in model.layers:
        tensors = dict(block.named_parameters()) | dict(block.named_buffers())
        form = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
        if form not in graphs:
            graphs[form] = aot_function(
                _Functional(block),
                fw_compiler=lambda graph, _: _Fused(graph, allocations),
                bw_compiler=lambda graph, _: _Fused(graph, allocations),
                partition_fn=min_cut_rematerialization_partition,
                decompositions=select_decomp_table(),
            )
        block.forward = _Compiled(block, graphs[form])


class _Functional:
    """A block as a function of its parameters and buffers, without the module's own."""

    def __init__(self, block: Block) -> None:
        self.block = block

    def __call__(self, tensors: dict[str, Tensor], arguments: Sequence[Any]) -> Any:
        compiled = self.block.__dict__.pop("forward")
        try:
            with mock.patch("models.transformer.selective_attention", _tag):
                return torch.func.functional_call(self.block, tensors, tuple(arguments))
        finally:
            self.block.forward = compiled


class _Compiled:
    """What stands in the place of a block's `forward`."""

    def __init__(self, block: Block, graph: Callable) -> None:
        self.tensors = dict(block.named_parameters()) | dict(block.named_buffers())
        self.graph = graph

    def __call__(
        self, x_BLD, rotation, borders_N1, lengths_N, valid_BL, cache=None, positions_BL=None
    ) -> Any:  # the last two are for generation
        return self.graph(self.tensors, (x_BLD, rotation, borders_N1, lengths_N, valid_BL))


def _tag(function: Callable, *arguments: Any) -> Any:
    """`models.execution.selective_attention` as the compiler sees it: its operations are marked to
    be kept or computed again, and the partitioner obeys."""
    mode = get_proxy_mode()
    if mode is None:
        return function(*arguments)
    graph = mode.tracer.graph
    before = set(graph.nodes)
    out = function(*arguments)
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node not in before:
            node.meta["recompute"] = products_are_kept(None, node.target)
            node.meta["ac_graph_id"] = 1
    return out


class _Fused:
    """Goes through a graph without content; what Inductor would fuse takes no memory."""

    _boxed_call = True

    def __init__(self, graph: fx.GraphModule, allocations: Allocations) -> None:
        self.graph = graph
        self.allocations = allocations
        self.unseen = set(_never_in_memory(graph))
        last: dict[fx.Node, fx.Node] = {}
        for node in graph.graph.nodes:
            for used in node.all_input_nodes:
                last[used] = node
        self.ends: dict[fx.Node, list[fx.Node]] = {}
        for used, node in last.items():
            self.ends.setdefault(node, []).append(used)

    def __call__(self, arguments: list[Any]) -> Any:
        given = iter(list(arguments))
        values: dict[fx.Node, Any] = {}
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = getattr(self.graph, node.target)
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], values.__getitem__)
            else:
                self.allocations.fused = node in self.unseen
                args = fx.node.map_arg(node.args, values.__getitem__)
                named = fx.node.map_arg(node.kwargs, values.__getitem__)
                values[node] = node.target(*args, **named)
                if node.target is auto_functionalized_v2:  # Inductor writes into the originals
                    written = named["_all_bases"]
                    values[node] = (*values[node][: -len(written)], *written)
                self.allocations.fused = False
                del args, named
                for used in self.ends.get(node, ()):
                    values.pop(used, None)


# Operators of PyTorch that Inductor does not generate, so that what they read is in memory.
_CALLED = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "sort", "topk", "scatter_add", "index_put"}
    | {"embedding_dense_backward", "segment_reduce", "searchsorted"}
)


def _called(node: fx.Node) -> bool:
    """Whether a node is a call of a kernel that stands by itself."""
    op = node.target
    if op is auto_functionalized_v2:
        return True
    if node.op != "call_function" or not isinstance(op, torch._ops.OpOverload):
        return False
    name = op._schema.name.split("::")[1]
    return op.namespace not in ("aten", "prims") or name in _CALLED


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _never_in_memory(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """Pointwise operations and reductions that only such read, in kernels of theirs; and copies of
    what a kernel writes into, which Inductor does not make."""

    def read(node: fx.Node) -> bool:
        return any(
            user.op == "output" or _called(user) or (_is_view(user) and read(user))
            for user in node.users
        )

    for node in graph.graph.nodes:
        op = node.target
        if op is auto_functionalized_v2:
            yield node
        elif isinstance(op, torch._ops.OpOverload) and not (_called(node) or _is_view(node)):
            if not read(node):
                yield node
