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
  experts; the norm is ours (`ShardedEngine.judge`).
- A unit whose weights are used by some ranks only would pair collectives wrongly and silently; the
  experts of a layer are one unit whose forward always runs, with zero rows too.
- A sharding by experts leaves ranks empty when there are fewer experts than ranks; expert weights
  are matrices of E·H rows here, which divide evenly.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from parallel.engines.base import Outcome
from parallel.engines.optimizer import DENSE, EXPERT, ROUTER, Group, Optimizer
from parallel.engines.sharded import SHARD_GROUP, ShardedEngine, Sharding, prepare
from parallel.expert_parallel import ParallelExperts
from parallel.mesh import Mesh


class Fsdp2Engine(ShardedEngine):
    """See `parallel.engines.base.Engine`."""

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Group],
        optimizer: Optimizer,
        sharding: Sharding,
        *,
        num_terms: int,
        seed: int,
    ) -> None:
        places = prepare(model, groups, sharding, flat_experts=True)
        super().__init__(groups, optimizer, sharding, places, num_terms=num_terms, seed=seed)
        self.model = model
        meta = any(parameter.is_meta for parameter in model.parameters())
        wrap(model, sharding, [model.get_parameter(name) for name in self.named(ROUTER)])
        if meta:
            _to_empty(model, torch.device("cpu") if self.on_host else self.device)
            for module in model.modules():
                for key, buffer in module._buffers.items():
                    module._buffers[key] = buffer if buffer is None else buffer.to(self.device)
        self._parameters = {name: model.get_parameter(name) for name in places}
        routers = {name: self._parameters[name] for name in self.named(ROUTER)}
        for router in routers.values():  # FSDP has moved the others
            router.data = router.data.to(self.device)
        for name in self.named(DENSE, EXPERT):
            parameter, place = self._parameters[name], places[name]
            weight = _local(parameter)
            states = self.new_states(place.group, weight)
            self.hold(name, weight, states, *self._rows(parameter, place.kind, weight.numel()))
        self.hold_routers(routers)

    def _rows(self, parameter: nn.Parameter, kind: str, held: int) -> tuple[int, int]:
        """First element of this rank's shard in the (split) parameter, and elements of a shard."""
        if not isinstance(parameter, DTensor):
            return 0, held
        group = SHARD_GROUP[kind]
        rows, width = parameter.shape[0], parameter.shape[1:].numel()
        per_rank = -(-rows // len(dist.get_process_group_ranks(self.mesh.group(group))))
        first = min(self.mesh.place(group) * per_rank, rows)
        assert held == min(per_rank, rows - first) * width, (kind, held, per_rank, first)
        return first * width, per_rank * width

    # --- a step -----------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        super().zero_grad()
        for name in self.named(DENSE, EXPERT):
            self._parameters[name].grad = None
            self.pieces[name].gradient = self.pieces[name].weight.new_empty(0)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        # Sharded gradients add up after every micro-batch; nodes are summed once.
        self.model.set_requires_all_reduce(last)
        self.model.set_is_last_backward(last)
        yield

    def find_gradients(self) -> None:
        for name in self.named(DENSE, EXPERT):
            piece, grad = self.pieces[name], self._parameters[name].grad
            if grad is not None:
                piece.gradient = _local(grad)
            elif piece.gradient.shape != piece.weight.shape:
                # A part that took no part in this step still decays and still counts it.
                piece.gradient = torch.zeros_like(piece.weight)

    @torch.no_grad()
    def update(self) -> Outcome:
        outcome = self.judge()
        self.apply(list(self.pieces))
        return outcome

    # --- state ------------------------------------------------------------------------------------

    def loaded(self) -> None:
        # The root keeps its weights gathered for a backward; after an evaluation none has come.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def wrap(model: nn.Module, sharding: Sharding, routers: Sequence[nn.Parameter]) -> None:
    """Make units of a model whose experts are split; sums instead of means, and prefetching.

    Args:
        routers: parameters that stay whole.
    """
    mesh, units, dtype = sharding.mesh, sharding.units, sharding.dtype
    master = next(p.dtype for p in model.parameters() if not any(p is r for r in routers))
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == master else dtype,
        reduce_dtype=None if dtype == master else torch.float32,
        # Gates are float32 and must stay so; modules cast what they want cast.
        cast_forward_inputs=False,
    )
    common: dict[str, Any] = {"mp_policy": policy, "ignored_params": set(routers)}
    if sharding.offload.state != "none":
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
    # the experts of a block and the next block are gathered while its attention runs. A block that
    # is compiled as a whole needs its experts at its start: those of the next one come along.
    for unit, after in zip(units, [*units[1:], None]):
        unit.set_modules_to_forward_prefetch(_with(unit, after, inner, sharding.whole_blocks))
    for unit, before in zip(units, [None, *units[:-1]]):
        unit.set_modules_to_backward_prefetch(_with(unit, before, inner, sharding.whole_blocks))
    if sharding.whole_blocks:
        for experts in itertools.chain(*inner.values()):
            register_fsdp_forward_method(experts, "around")


def _with(
    unit: nn.Module,
    next_: nn.Module | None,
    inner: dict[nn.Module, list[FSDPModule]],
    whole_blocks: bool,
) -> list[FSDPModule]:
    """What is gathered while a unit computes: its experts, the next unit, and its experts too
    where that is a whole block."""
    if next_ is None:
        return inner[unit]
    return [*inner[unit], next_, *(inner[next_] if whole_blocks else [])]


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
    """What this rank holds of a parameter or its gradient, as a flat view."""
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return own.detach().view(-1)
