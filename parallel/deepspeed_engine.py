"""ZeRO-3 by DeepSpeed, its offload to host memory, and its Adam kernels.

DeepSpeed partitions, gathers and reduces; layout, norm, clipping, skipping, routers and checkpoints
are ours, the same as with FSDP2. What is taken from DeepSpeed 0.19.8, partly undocumented, hence
the exact version:

- `param.ds_zero_partition_process_group`: the group that a parameter is partitioned over. Dense
  weights are partitioned over their node, experts over the ranks that share them. The two must be
  different group objects, since gradient buckets are kept apart by object identity.
- `deepspeed.zero.Init(...)._convert_to_zero_parameters([parameter])`: parameters are partitioned
  one by one, from meta if they are there, and before `deepspeed.initialize`, which would otherwise
  broadcast rank 0's experts over all others.
- `optimizer.partition_grads(parameters, partitions)`: called with the reduced partitions of a
  bucket. Here means over the partition group are made sums, and replicas are added.
- `optimizer._get_norm_groups()`: replaced by the norm of the whole model.
- `grad_position`, `fp32_partitioned_groups_flat`, `fp16_partitioned_groups_flat`,
  `averaged_gradients`: where things lie. Tensors of the flat lists are given other memory for
  parallel.offload=nvme (`parallel.offload.Disk`).

No `deepspeed.moe`, no AutoEP, no DeepSpeed checkpoints: its universal conversion finishes on such
layouts without an error and writes wrong tensors.

DeepSpeed reads the norm back to the host once a step.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from moe import Router
from parallel.deepspeed_adam import make_adam
from parallel.engine import AdamSettings, GlobalSums, Group, Guard, Place, ShardedAdamW, prepare
from parallel.expert_parallel import ExpertParallelOptions
from parallel.flat_shard import FlatShard
from parallel.mesh import Mesh
from parallel.offload import Disk, Offload
from parallel.world import ParallelError

VERSION = "0.19.8"


class DeepSpeedEngine:
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
        del units  # ZeRO-3 gathers module by module and learns what to prefetch
        if deepspeed.__version__.split("+")[0] != VERSION:
            raise ParallelError(
                f"parallel.engine=deepspeed is made for deepspeed {VERSION}, found "
                f"{deepspeed.__version__}: pip install deepspeed=={VERSION}, or use fsdp2"
            )
        self.mesh, self.guard, self.settings = mesh, guard, settings
        self.on_host = offload.state != "none"
        """Whether gradients, master weights and moments are outside of the device."""
        self.groups = groups
        self.places = prepare(model, mesh, groups, options, flat_experts=False)
        self._names = {
            kind: [name for name, place in self.places.items() if place.kind == kind]
            for kind in ("dense", "expert", "router")
        }
        self._parameters = {name: model.get_parameter(name) for name in self.places}
        routers = _detach_routers(model, mesh.device)
        self._parameters |= {name: routers[name] for name in self._names["router"]}
        config = _config(dtype, offload)
        masters = self._partition(model, config, dtype)
        self._engine = self._initialise(model, config, offload)
        self._zero = self._engine.optimizer
        self._place(offload)
        self._link(masters)
        self.terms = torch.zeros(num_terms, device=mesh.device)
        self.routers_frozen = False
        self._sums = GlobalSums(mesh, self.terms, groups)
        self.group_norms = self._sums.group_norms
        self._routers = ShardedAdamW(
            {
                name: (self._parameters[name].detach().view(-1), self.places[name])
                for name in self._names["router"]
            },
            settings,
        )
        sizes = [self._parameters[name].numel() for name in self._names["router"]]
        self._router_grads = torch.zeros(sum(sizes), device=mesh.device)
        for name, piece in zip(self._names["router"], self._router_grads.split(sizes)):
            self._parameters[name].grad = piece.view_as(self._parameters[name])
            self._routers.parts[name].grad = piece
        self._outcome: Any = None

    @property
    def model(self) -> nn.Module:
        return self._engine

    # --- building ---------------------------------------------------------------------------------

    def _sharded(self) -> list[str]:
        return self._names["dense"] + self._names["expert"]

    def _partition(
        self, model: nn.Module, config: dict[str, Any], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Partition all parameters; returns this rank's float32 part of those that had values."""
        _quiet()
        # zero.Init finds the device by it, and only a launcher sets it.
        os.environ.setdefault("LOCAL_RANK", str(self.mesh.device.index or 0))
        deepspeed.init_distributed(dist.get_backend(), verbose=False)
        init = deepspeed.zero.Init(
            module=nn.Module(),
            data_parallel_group=self.mesh.group("shard"),
            config_dict_or_path=config,
            dtype=dtype,
        )
        group_of = {"dense": "shard", "expert": "expert_shard"}
        masters = {}
        for name in self._sharded():
            parameter, group = self._parameters[name], group_of[self.places[name].kind]
            count = parameter.numel()
            if parameter.is_meta:
                parameter = _replace(model, parameter, dtype, self.mesh.device)
                self._parameters[name] = parameter
            else:
                ranks = dist.get_world_size(self.mesh.group(group))
                size = -(-count // ranks)
                start = min(self.mesh.place(group) * size, count)
                flat = parameter.detach().view(-1)
                masters[name] = flat[start : start + size].float().clone()
                parameter.data = parameter.data.to(self.mesh.device, dtype)
            parameter.ds_zero_partition_process_group = self.mesh.group(group)
            init._convert_to_zero_parameters([parameter])
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[key] = torch.empty_like(buffer, device=self.mesh.device)
                elif buffer is not None:
                    module._buffers[key] = buffer.to(self.mesh.device)
        return masters

    def _initialise(self, model: nn.Module, config: dict[str, Any], offload: Offload) -> Any:
        rows: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name in self._sharded():
            group = self.places[name].group
            key = (group.lr_multiplier, group.weight_decay)
            rows.setdefault(key, []).append(self._parameters[name])
        groups = [
            {"params": members, "weight_decay": decay, "multiplier": multiplier}
            for (multiplier, decay), members in rows.items()
        ]
        how: dict[str, Any] = {"betas": self.settings.betas, "eps": self.settings.eps}
        # A count that DeepSpeed's kernels, which want a number, are given before each update.
        self._count: Tensor | None = None
        if offload.adam == "deepspeed":
            on_device = not self.on_host and self.mesh.device.type == "cuda"
            self._adamw = make_adam(groups, "cuda" if on_device else "cpu", **how)
            self._count = torch.zeros(())
        else:
            self._adamw = torch.optim.AdamW(groups, fused=True, **how)
        engine, *_ = deepspeed.initialize(model=model, optimizer=self._adamw, config=config)
        return engine

    def _place(self, offload: Offload) -> None:
        """Give master weights and moments, and weights, the memory that they are to lie in."""
        zero, disk = self._zero, None if offload.path is None else Disk(offload.path)
        for flat in zero.fp32_partitioned_groups_flat:
            if offload.state == "nvme":
                flat.data = disk.take(flat)
            # Now, as a checkpoint is loaded into them.
            state = self._adamw.state[flat] = {
                "exp_avg": torch.zeros_like(flat, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(flat, requires_grad=False),
            }
            if offload.state == "nvme":
                for kind, zeros in list(state.items()):
                    state[kind] = disk.take(zeros)
            state["step"] = torch.zeros((), device=flat.device) if self._count is None else 0
        if offload.weights == "nvme":
            for i, flat in enumerate(zero.fp16_partitioned_groups_flat):
                zero.fp16_partitioned_groups_flat[i] = disk.take(flat)
                zero._unflatten_partitioned_parameters(i)
            zero.param_groups_fp16_flat_cpu_memory = []

    def _link(self, masters: dict[str, Tensor]) -> None:
        """Find the parts of every parameter in ZeRO's flat buffers, and put in our hooks."""
        zero = self._zero
        self._parts: dict[str, tuple[int, int, int, int]] = {}
        """name → flat buffer, place in it, elements held, first element of the parameter."""
        for name in self._sharded():
            parameter = self._parameters[name]
            buffer, place, size = zero.grad_position[zero.get_param_id(parameter)]
            start = min(parameter.ds_zero_partition_rank * size, parameter.ds_numel)
            held = min(size, parameter.ds_numel - start)
            self._parts[name] = (buffer, place, held, start)
        for name, master in masters.items():
            self._piece(name, "weights").copy_(master)
        self._refresh()
        hooks = zero.parameter_offload
        for when in ("pre", "post"):
            name = f"{when}_sub_module_forward_function"
            setattr(hooks, name, _unseen(getattr(hooks, name)))
        self._partition_grads = zero.partition_grads
        zero.partition_grads = self._sum_partitions
        zero._get_norm_groups = self._judge
        if self._count is not None:
            zero.unscale_and_clip_grads = self._clip

    def _piece(self, name: str, kind: str) -> Tensor:
        """This rank's flat float32 part: weights, exp_avg or exp_avg_sq."""
        buffer, place, held, _ = self._parts[name]
        flat = self._zero.fp32_partitioned_groups_flat[buffer]
        source = flat if kind == "weights" else self._adamw.state[flat][kind]
        return source.detach().narrow(0, place, held)

    def _refresh(self) -> None:
        """Make the weights that are computed with follow the float32 ones."""
        zero = self._zero
        zero._partition_all_parameters()  # small ones stay gathered, with the values of then
        for i in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(i)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    # --- a step -----------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        self._router_grads.zero_()
        self.terms.zero_()

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self._last = last
        self._engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)

    @torch.no_grad()
    def _sum_partitions(self, parameters: list[nn.Parameter], parts: list[Tensor]) -> list[Tensor]:
        """ZeRO's `partition_grads`, with sums instead of means, and over the replicas too."""
        kinds = {
            id(self.mesh.group("shard")): "replica",
            id(self.mesh.group("expert_shard")): "expert_replica",
        }
        group = parameters[0].ds_process_group
        replicas = self.mesh.group(kinds[id(group)])
        shards = dist.get_world_size(group)
        if shards > 1:
            for part in parts:
                part.mul_(shards)
        several = dist.get_world_size(replicas) > 1
        if several and self.on_host:
            # Here, as the gradient then leaves for host memory.
            _all_reduce_together(parts, replicas)
        held = self._partition_grads(parameters, parts)
        if several and not self.on_host and self._last:
            _all_reduce_together(held, replicas)  # once a step, on what the micro-batches added up
        return held

    def _gradient(self, name: str) -> Tensor:
        """This rank's part of a summed gradient, between the last backward and the update."""
        buffer, place, held, _ = self._parts[name]
        if self.on_host:
            return self._zero.fp32_partitioned_groups_flat[buffer].grad.narrow(0, place, held)
        partition, _ = self._zero._get_fp32_grad_state_partition(
            self._parameters[name], release_swap_buffers=False
        )
        return partition.view(-1).narrow(0, 0, held)

    @torch.no_grad()
    def gradients(self) -> dict[str, FlatShard]:
        found = {}
        for name in self._sharded():
            place = self.places[name]
            start, total = place.start + self._parts[name][3], torch.Size(place.shape).numel()
            found[place.name] = FlatShard(self._gradient(name).clone(), start, total)
        sums = self._router_grads.clone()
        dist.all_reduce(sums)
        sizes = [self._parameters[name].numel() for name in self._names["router"]]
        for name, piece in zip(self._names["router"], sums.split(sizes)):
            found[self.places[name].name] = FlatShard(piece, 0, piece.numel())
        return found

    @torch.no_grad()
    def _judge(self) -> list[Tensor]:
        """ZeRO's `_get_norm_groups`: the norm of the whole model; also asks the guard."""
        if self.mesh.plan.world > 1 and self._router_grads.numel():
            dist.all_reduce(self._router_grads)
        gradients = [(self.places[name], self._gradient(name)) for name in self._sharded()]
        gradients += [(self.places[name], part.grad) for name, part in self._routers.parts.items()]
        norm = self._sums.reduce(gradients)
        self._outcome = self.guard.judge(norm, self.terms)
        scale = torch.ones_like(norm)
        if self.settings.clip_norm is not None:
            scale = torch.clamp(norm / self.settings.clip_norm, min=1.0)
        skip = self._outcome.skipped
        self._routers.step(self._lr, scale, skip, self.routers_frozen)
        flats = self._zero.fp32_partitioned_groups_flat
        if self._count is None:
            device = flats[0].device
            self._adamw.grad_scale, self._adamw.found_inf = scale.to(device), skip.to(device)
            return [norm]
        if bool(skip):
            return [torch.full_like(norm, float("inf"))]  # ZeRO then leaves everything alone
        self._scale = scale.to(flats[0].device)
        for flat in flats:
            self._adamw.state[flat]["step"] = int(self._count)
        self._count += 1
        return [norm]

    def _clip(self, group: int, norm: Tensor) -> None:
        """ZeRO's `unscale_and_clip_grads`, for an Adam that takes no scale."""
        del norm
        self._zero.fp32_partitioned_groups_flat[group].grad.div_(self._scale)

    def step(self, lr: float) -> Any:
        self.set_lr(lr)
        return self.update()

    def set_lr(self, lr: float) -> None:
        self._lr = lr
        for group in self._adamw.param_groups:
            group["lr"] = lr * group["multiplier"]

    def update(self) -> Any:
        # ZeRO leaves everything alone by itself when the norm is not finite.
        self._engine.step()
        return self._outcome

    def lrs(self, lr: float) -> tuple[float, float | None]:
        routers = [self.places[name].group.lr_multiplier for name in self._names["router"]]
        if not routers:
            return lr, None
        return lr, 0.0 if self.routers_frozen else lr * routers[0]

    # --- state ------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in self._sharded():
            place: Place = self.places[name]
            start = place.start + self._parts[name][3]
            total = torch.Size(place.shape).numel()
            for kind in ("weights", "exp_avg", "exp_avg_sq"):
                found[f"{kind}/{place.name}"] = FlatShard(self._piece(name, kind), start, total)
        starts = {name: self.places[name].start for name in self._names["router"]}
        found |= self._routers.tensors(starts)
        found["adam_step"] = self._counters()[0]
        return found | {f"guard/{name}": value for name, value in self.guard.state().items()}

    def _counters(self) -> list[Tensor]:
        if self._count is not None:
            counters = [self._count]
        else:
            flats = self._zero.fp32_partitioned_groups_flat
            counters = [self._adamw.state[flat]["step"] for flat in flats]
        if self._routers.parts:
            counters.append(self._routers.counter())
        return counters

    def shapes(self) -> dict[str, list[int]]:
        return {place.name: list(place.shape) for place in self.places.values()}

    @torch.no_grad()
    def loaded(self) -> None:
        first, *others = self._counters()
        for counter in others:
            counter.copy_(first)
        if self._routers.parts:
            self._routers.spread_counter()
        self._refresh()

    @torch.no_grad()
    def fill(self, values: Callable[[str, range | None], Tensor]) -> None:
        pieces = {name: self._piece(name, "weights") for name in self._sharded()}
        pieces |= {name: part.detach() for name, part in self._routers.parts.items()}
        starts = {name: self._parts[name][3] for name in self._sharded()}
        for name, piece in pieces.items():
            self.places[name].fill(piece, starts.get(name, 0), values)
        self._refresh()

    def all_finite(self) -> Tensor:
        buffers = self._routers.buffers()
        for flat in self._zero.fp32_partitioned_groups_flat:
            state = self._adamw.state[flat]
            buffers += [flat.detach(), state["exp_avg"], state["exp_avg_sq"]]
        return self._sums.all_finite(buffers)


def _config(dtype: torch.dtype, offload: Offload) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    zero: dict[str, Any] = {"stage": 3, "overlap_comm": cuda}
    # Files are ours (`_place`); to ZeRO both are host memory.
    for key, place in (("optimizer", offload.state), ("param", offload.weights)):
        if place != "none":
            zero[f"offload_{key}"] = {"device": "cpu", "pin_memory": cuda}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # the boundary is set by hand, see `micro_batch`
        "gradient_clipping": 0.0,
        "steps_per_print": 1 << 60,
        "bf16": {"enabled": dtype == torch.bfloat16},
        # DeepSpeed would reduce and add up bf16 gradients in bf16.
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": ["*router*"]},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # torch's AdamW
        "zero_force_ds_cpu_optimizer": False,
    }


def _quiet() -> None:
    # On a CPU, init_distributed would compile a C++ operator; a run that is killed meanwhile leaves
    # a lock behind for which every later run waits without a word.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # It calls collectives by names that torch 2.13 has newer ones for, and would say so each time.
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        warnings.filterwarnings("ignore", message=f".*{name}.* is deprecated")


def _replace(
    model: nn.Module, parameter: nn.Parameter, dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """A parameter with memory in place of one without, wherever the model uses it."""
    made = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device))
    for module in model.modules():
        for key, value in module._parameters.items():
            if value is parameter:
                module._parameters[key] = made
    return made


def _detach_routers(model: nn.Module, device: torch.device) -> dict[str, nn.Parameter]:
    """Take router weights out of the registered parameters, so that ZeRO leaves them whole."""
    found = {}
    for path, module in model.named_modules():
        if not isinstance(module, Router):
            continue
        for name in list(module._parameters):
            parameter = module._parameters.pop(name)
            if parameter.is_meta:
                parameter = nn.Parameter(torch.empty_like(parameter, device=device))
            else:
                parameter.data = parameter.data.to(device)
            module.__dict__[name] = parameter
            found[f"{path}.{name}" if path else name] = parameter
    return found


def _unseen(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A gathering or releasing hook whose operations recomputation does not see.

    What is gathered where is another thing in forward than when a block is computed again, and
    torch 2.13's selective checkpointing refuses operations that forward has not had.
    """

    def run(*arguments: Any) -> Any:
        if not torch._C._len_torch_dispatch_stack():
            return hook(*arguments)
        with _disable_current_modes():
            return hook(*arguments)

    return run


def _all_reduce_together(parts: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    if not parts:
        return
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat, group=group)
    for part, summed in zip(parts, flat.split([part.numel() for part in parts])):
        part.copy_(summed.view_as(part))
