"""ZeRO-3 by PyTorch's FSDP2 (`torch.distributed.fsdp.fully_shard`).

    dense weights    one unit per block: sharded over the node, replicated over nodes (HSDP);
                     reduce-scattered after every micro-batch, summed over nodes once a step
    experts          one unit per layer: sharded over the ranks that share them
    routers          outside: whole, float32, summed once a step
    offloaded        shards, which are the master weights, gradients and moments in host memory

Known traps (torch 2.13) and how they are met:

- Means over ranks are replaced by sums: divide factor 1 with forced sums. Any other factor with
  forced sums is applied twice when the shard group has one rank, and without them asks for
  PREMUL_SUM, which gloo does not have (related: github.com/pytorch/pytorch/issues/167178).
- `clip_grad_norm_` refuses parameters of two meshes, and a plain norm would count only this rank's
  experts; the norm is ours (`engine.GlobalSums`).
- A unit whose weights are used by some ranks only would pair collectives wrongly and silently; the
  experts of a layer are one unit whose forward always runs, with zero rows too.
- A sharding by experts leaves ranks empty when there are fewer experts than ranks; expert weights
  are matrices of E·H rows here, which divide evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from parallel.engine import AdamSettings, GlobalSums, Group, Guard, ShardedAdamW, prepare
from parallel.expert_parallel import ExpertParallelOptions, ParallelExperts
from parallel.flat_shard import FlatShard
from parallel.mesh import Mesh
from parallel.offload import Offload


class Fsdp2Engine:
    """See `parallel.engine.Engine`."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        groups: Sequence[Group],
        units: Sequence[nn.Module],
        guard: Guard,
        *,
        num_terms: int,
        settings: AdamSettings,
        options: ExpertParallelOptions,
        dtype: torch.dtype,
        offload: Offload,
    ) -> None:
        self.model, self.mesh, self.guard, self.settings = model, mesh, guard, settings
        self.groups = groups
        self.places = prepare(model, mesh, groups, options, flat_experts=True)
        meta = any(parameter.is_meta for parameter in model.parameters())
        routers = [model.get_parameter(name) for name in self._named("router")]
        on_host = offload.state != "none"
        wrap(model, mesh, units, routers, dtype, on_host)
        if meta:
            _to_empty(model, torch.device("cpu") if on_host else mesh.device)
            for module in model.modules():
                for key, buffer in module._buffers.items():
                    module._buffers[key] = buffer if buffer is None else buffer.to(mesh.device)
        for name in self._named("router"):  # FSDP has moved the others
            router = model.get_parameter(name)
            router.data = router.data.to(mesh.device)
        self._parameters = {name: model.get_parameter(name) for name in self.places}
        local = {name: _local(parameter) for name, parameter in self._parameters.items()}
        self.optimizer = ShardedAdamW(
            {name: (flat, self.places[name]) for name, flat in local.items()}, settings
        )
        self._starts = {
            name: self.places[name].start + self._row_start(name) for name in self.places
        }
        # Gradients of the routers lie together, so that one all-reduce sums them.
        routers = self._named("router")
        sizes = [local[name].numel() for name in routers]
        wide = local[routers[0]].dtype if routers else torch.float32
        self._router_grads = torch.zeros(sum(sizes), dtype=wide, device=mesh.device)
        for name, piece in zip(routers, self._router_grads.split(sizes)):
            self._parameters[name].grad = piece.view_as(self._parameters[name])
        self.terms = torch.zeros(num_terms, device=mesh.device)
        self.routers_frozen = False
        self._lr = 0.0
        self._sums = GlobalSums(mesh, self.terms, groups)
        self.group_norms = self._sums.group_norms

    def _named(self, kind: str) -> list[str]:
        return [name for name, place in self.places.items() if place.kind == kind]

    def _row_start(self, name: str) -> int:
        """First element of this rank's shard in the (split) parameter."""
        parameter = self._parameters[name]
        if not isinstance(parameter, DTensor):
            return 0
        group = {"dense": "shard", "expert": "expert_shard"}[self.places[name].kind]
        rows = parameter.shape[0]
        per_rank = -(-rows // len(dist.get_process_group_ranks(self.mesh.group(group))))
        first = min(self.mesh.place(group) * per_rank, rows)
        width = parameter.shape[1:].numel()
        held = parameter.to_local().numel()
        assert held == min(per_rank, rows - first) * width, (name, held, per_rank, first)
        return first * width

    # --- a step -----------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        for name, parameter in self._parameters.items():
            if self.places[name].kind != "router":
                parameter.grad = None
        self._router_grads.zero_()
        self.terms.zero_()

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        # Sharded gradients add up after every micro-batch; nodes are summed once.
        self.model.set_requires_all_reduce(last)
        self.model.set_is_last_backward(last)
        yield

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    @torch.no_grad()
    def gradients(self) -> dict[str, FlatShard]:
        found = {}
        for name, parameter in self._parameters.items():
            place = self.places[name]
            part = self.optimizer.parts[name]
            grad = torch.zeros_like(part) if parameter.grad is None else _flat(parameter.grad)
            grad = grad.clone()  # the fused update scales gradients in place
            if place.kind == "router" and self.mesh.plan.world > 1:
                dist.all_reduce(grad)  # in `step` all together
            total = torch.Size(place.shape).numel()
            found[place.name] = FlatShard(grad, self._starts[name], total)
        return found

    @torch.no_grad()
    def step(self, lr: float) -> Any:
        self.set_lr(lr)
        return self.update()

    def set_lr(self, lr: float) -> None:
        self._lr = lr

    def update(self) -> Any:
        if self.mesh.plan.world > 1 and self._router_grads.numel():
            dist.all_reduce(self._router_grads)
        gradients = []
        for name, part in self.optimizer.parts.items():
            grad = self._parameters[name].grad
            # A part that took no part in this step still decays and still counts it.
            part.grad = torch.zeros_like(part) if grad is None else _flat(grad)
            gradients.append((self.places[name], part.grad))
        norm = self._sums.reduce(gradients)
        outcome = self.guard.judge(norm, self.terms)
        scale = torch.ones_like(norm)
        if self.settings.clip_norm is not None:
            scale = torch.clamp(norm / self.settings.clip_norm, min=1.0)
        self.optimizer.step(self._lr, scale, outcome.skipped, self.routers_frozen)
        return outcome

    def lrs(self, lr: float) -> tuple[float, float | None]:
        routers = [self.places[name].group.lr_multiplier for name in self._named("router")]
        if not routers:
            return lr, None
        return lr, 0.0 if self.routers_frozen else lr * routers[0]

    # --- state ------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Any]:
        found: dict[str, Any] = dict(self.optimizer.tensors(self._starts))
        found["adam_step"] = self.optimizer.counter()
        return found | {f"guard/{name}": value for name, value in self.guard.state().items()}

    def shapes(self) -> dict[str, list[int]]:
        return {place.name: list(place.shape) for place in self.places.values()}

    def loaded(self) -> None:
        self.optimizer.spread_counter()
        self._forget_gathered()

    def _forget_gathered(self) -> None:
        # The root keeps its weights gathered for a backward; after an evaluation none has come.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def fill(self, values: Callable[[str, range | None], Tensor]) -> None:
        for name, part in self.optimizer.parts.items():
            place = self.places[name]
            place.fill(part.detach(), self._starts[name] - place.start, values)
        self._forget_gathered()

    def all_finite(self) -> Tensor:
        return self._sums.all_finite(self.optimizer.buffers())


def wrap(
    model: nn.Module,
    mesh: Mesh,
    units: Sequence[nn.Module],
    routers: Sequence[nn.Parameter],
    dtype: torch.dtype,
    on_host: bool = False,
) -> None:
    """Make units of a model whose experts are split; sums instead of means, and prefetching.

    Args:
        units: see `parallel.engines.make_engine`.
        routers: parameters that stay whole.
        on_host: keep shards and their gradients in host memory.
    """
    master = next(p.dtype for p in model.parameters() if not any(p is r for r in routers))
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == master else dtype,
        reduce_dtype=None if dtype == master else torch.float32,
        # Gates are float32 and must stay so; modules cast what they want cast.
        cast_forward_inputs=False,
    )
    common: dict[str, Any] = {"mp_policy": policy, "ignored_params": set(routers)}
    if on_host:
        common["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    dense, expert = (_shard_mesh(mesh, kind) for kind in ("dense", "expert"))
    inner: dict[nn.Module, list[FSDPModule]] = {}
    for unit in units:
        inner[unit] = [m for m in unit.modules() if isinstance(m, ParallelExperts)]
        for experts in inner[unit]:
            fully_shard(experts, mesh=expert, **common)
        fully_shard(unit, mesh=dense, **common)
    outside = [
        name
        for name, module in model.named_modules()
        if isinstance(module, ParallelExperts) and not isinstance(module, FSDPModule)
    ]
    assert not outside, f"experts outside of all units: {outside}"
    fully_shard(model, mesh=dense, **common)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # By name, as the host's wait for the sizes of an exchange would hold back FSDP's own prefetch:
    # the experts of a block and the next block are gathered while its attention runs.
    for unit, after in zip(units, [*units[1:], None]):
        unit.set_modules_to_forward_prefetch([*inner[unit], *([after] if after else [])])
    for unit, before in zip(units, [None, *units[:-1]]):
        unit.set_modules_to_backward_prefetch([*inner[unit], *([before] if before else [])])


def _to_empty(model: nn.Module, device: torch.device) -> None:
    """Give a model on meta its memory; weights that modules share stay shared."""
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            users.setdefault(id(parameter), []).append((module, key))
    model.to_empty(device=device)
    for (first, name), *others in users.values():
        for module, key in others:
            module._parameters[key] = first._parameters[name]


def _shard_mesh(mesh: Mesh, kind: str) -> DeviceMesh:
    """(replica, shard), or (shard,) when there is one replica and nothing to sum over."""
    full = mesh.meshes[kind]
    if full.size(0) > 1:
        return full
    assert full.mesh_dim_names is not None
    return full[full.mesh_dim_names[1]]


def _local(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter, as a flat view."""
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return own.detach().view(-1)


def _flat(grad: Tensor) -> Tensor:
    own = grad.to_local() if isinstance(grad, DTensor) else grad
    return own.reshape(-1)
