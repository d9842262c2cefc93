"""How much memory a run needs, by replaying its first micro-batch without computing anything.

The model is built from tensors that have shapes and no content (`FakeTensorMode`), one forward and
backward pass goes through the real code, and every allocation is counted while it lives. So what
autograd keeps, activation checkpointing and the loss's chunks are those of the code as it is. Only
small models are replayed: the memory is linear in the number of layers of a kind, so two replays
give the slope.

Not seen: what kernels allocate inside themselves, memory that the allocator loses to
fragmentation, and what torch.compile saves by fusing (it makes the true figure smaller).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from models.build import build_model, parameter_kinds
from models.config import ModelConfig
from models.execution import apply_checkpointing
from moe.control import begin_step
from training.assemble import DTYPES, router_options
from training.optim import ALIGN

if TYPE_CHECKING:
    from training.config import Config, Plan


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that operators return, while those tensors live.

    Views share their storage and are counted once; storages that were there before count nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
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
        key, size = storage._cdata, storage.nbytes()
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
    save: str = "h",
    checkpointing: str = "none",
    router: Mapping[str, Any] | None = None,
) -> int:
    """Bytes of activations and passing gradients at the worst moment of one micro-batch.

    Args:
        rows, seq_len: of the micro-batch.
        dtype: of weights and activations.
        save, checkpointing: as in the config.
        router: how the run routes, `training.assemble.router_options`; None: as the family does.
    """
    model = build_model(
        model_config, kernels="reference", save=save, dtype=dtype, device="meta", **(router or {})
    )
    begin_step(model, 1)  # a schedule of experts per token starts with most of them
    with FakeTensorMode(allow_non_fake_inputs=True):
        _give_shapes_without_content(model)
        apply_checkpointing(model, checkpointing)
        for parameter in {id(p): p for p in model.parameters()}.values():
            # Real gradients are added into the optimizer's buffer as soon as they exist.
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        tokens_BL = torch.zeros(rows, seq_len, dtype=torch.int64)
        with Allocations() as allocations:
            allocations.ignore([list(model.parameters()), list(model.buffers()), tokens_BL])
            out = model(tokens_BL, labels_BL=tokens_BL)
            out.loss_sum.backward()
        return allocations.peak


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


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


def _with_layers(config: ModelConfig, moe: int, dense: int) -> ModelConfig:
    """The same model with so many layers of each kind."""
    change: dict[str, Any] = {"num_hidden_layers": moe + dense}
    given = config.moe_expert_widths
    if given is not None and isinstance(given[0], list):  # no layer needs more than this one
        change["moe_expert_widths"] = max(given, key=lambda widths: (max(widths), sum(widths)))
    if config.family == "qwen3_moe":
        change |= {"decoder_sparse_step": 1, "mlp_only_layers": list(range(dense))}
    elif config.family == "glm4_moe":
        change["first_k_dense_replace"] = dense
    return ModelConfig(**{**config.model_dump(), **change})


def activation_bytes(config: Config, plan: Plan) -> int:
    """Peak of activations of one micro-batch of a run, by replays of models of few layers."""
    model = config.model.config
    # Where epochs make the length, any that no schedule is too long for does.
    router = router_options(config, model, config.train.steps or 1_000_000)

    def peak(moe: int, dense: int) -> int:
        return replay(
            _with_layers(model, moe, dense),
            rows=plan.micro_batch_size,
            seq_len=config.data.seq_len,
            dtype=DTYPES[plan.dtype],
            save=config.model.save,
            checkpointing=config.train.checkpointing,
            router=router,
        )

    moe = len(model.moe_layers)
    dense = model.num_hidden_layers - moe
    if not moe:
        two = peak(0, 2)
        return two + (dense - 2) * (peak(0, 3) - two)
    two = peak(2, 0)
    total = two + (moe - 2) * (peak(3, 0) - two)
    if dense:
        total += dense * (peak(2, 1) - two)
    return max(total, 0)


@dataclass(frozen=True)
class Memory:
    """Bytes of one process, by what they hold."""

    weights: int
    """In the dtype of the products; of several processes, those of the blocks that are gathered at
    a time."""
    gradients: int
    masters: int
    """float32 weights that are kept beside those."""
    moments: int
    activations: int
    context: int
    """CUDA's own, and communication buffers with several processes."""
    host: int = 0
    """What is offloaded to host memory, beside all that."""
    disk: int = 0
    """What is offloaded to files."""

    @property
    def states(self) -> int:
        """What is there between steps, whatever the micro-batch."""
        return self.weights + self.gradients + self.masters + self.moments

    @property
    def total(self) -> int:
        return self.states + self.activations + self.context


CONTEXT = 600 * 2**20
COMMUNICATION = 400 * 2**20


def process_memory(config: Config, plan: Plan) -> Memory:
    """Memory of one process (the largest one): what the optimizer or the engine keeps, and the
    replayed activations."""
    context = 0
    if plan.device == "cuda":
        context = CONTEXT + (COMMUNICATION if plan.world_size > 1 else 0)
    kept = _whole(config, plan) if plan.engine is None else _sharded(config, plan)
    activations = activation_bytes(config, plan)
    if plan.engine is not None and plan.exchange.schedule == "whole":
        activations += _foreign_bytes(config, plan)
    return Memory(**kept, activations=activations, context=context)


def _foreign_bytes(config: Config, plan: Plan) -> int:
    """schedule=whole: pre-activations of the experts for every row that the other ranks send, as if
    all K experts of its token were here, in the layers that keep theirs for backward; and the rows.
    """
    model, width = config.model.config, DTYPES[plan.dtype].itemsize
    tokens = plan.micro_batch_size * config.data.seq_len * (plan.mesh.expert - 1)
    layers = 1 if config.train.checkpointing == "full" else len(model.moe_layers)
    columns = 2 * model.expert_size
    kept = {"h": columns * width, "fp8_h": columns, "x": 0}[config.model.save]
    rows = model.num_experts_per_tok * kept + model.hidden_size * width
    return layers * tokens * rows


def _whole(config: Config, plan: Plan) -> dict[str, int]:
    """One process: training/optim.py's flat buffers."""
    model = build_model(config.model.config, dtype=DTYPES[plan.dtype], device="meta")
    padded = [(-(-p.numel() // ALIGN) * ALIGN, p) for p in model.parameters()]
    elements = sum(size for size, _ in padded)
    narrow = sum(size for size, p in padded if p.dtype != torch.float32)
    optim = config.optim
    return {
        "weights": sum(size * parameter.element_size() for size, parameter in padded),
        "gradients": 4 * elements - (2 * narrow if plan.accumulation == 1 else 0),
        "masters": 4 * narrow if optim.weights == "float32" else 0,
        "moments": 8 * (elements - narrow) + 2 * DTYPES[optim.moments].itemsize * narrow,
    }


def _sharded(config: Config, plan: Plan) -> dict[str, int]:
    """Several: shards of float32 weights, gradients and moments, and what is whole for a while.

    While a block computes, its weights and those of the next one are gathered; its gradient is
    whole once in the dtype of the products and once in float32 for the reduction. What is offloaded
    is on the device for moments only.
    """
    model, mesh = build_model(config.model.config, device="meta"), plan.mesh
    kinds = parameter_kinds(model)
    held = 0
    blocks: dict[str, int] = {}  # elements of a block as this process computes with them
    for name, parameter in model.named_parameters():
        kind, count = kinds[name], parameter.numel()
        if kind == "router":
            held += count
            continue
        if kind == "expert":
            count //= mesh.expert
        held += -(-count // (mesh.expert_shard if kind == "expert" else mesh.local))
        block = ".".join(name.split(".")[:2])
        blocks[block] = blocks.get(block, 0) + count
    width, largest = DTYPES[plan.dtype].itemsize, max(blocks.values())
    offload, deepspeed = plan.offload, plan.engine == "deepspeed"
    places = {"none": 0, "cpu": 0, "nvme": 0}
    # DeepSpeed keeps weights for the products beside the float32 ones, which FSDP2 casts anew.
    places[offload.weights] += width * held if deepspeed else 0
    shards = places["none"]
    places[offload.state] += 12 * held
    on_device = offload.state == "none"
    if not on_device:
        # DeepSpeed: as they are added up, and as the update reads them.
        places["cpu"] += (8 if deepspeed else 4) * held
    return {
        "weights": shards + 2 * width * largest,
        "gradients": 4 * held * on_device + (width + 4) * largest,
        "masters": 4 * held * on_device,
        "moments": 8 * held * on_device,
        "host": places["cpu"],
        "disk": places["nvme"],
    }
