"""ZeRO-3 by DeepSpeed, and its offload to host memory.

DeepSpeed partitions, gathers and reduces; layout, norm, clipping, skipping, update, routers and
checkpoints are ours, the same as with FSDP2. What is taken from DeepSpeed 0.19.8, partly
undocumented, hence the exact version:

- `param.ds_zero_partition_process_group`: the group that a parameter is partitioned over. Dense
  weights are partitioned over their node, experts over the ranks that share them. The two must be
  different group objects, since gradient buckets are kept apart by object identity.
- `deepspeed.zero.Init(...)._convert_to_zero_parameters([parameter])`: parameters are partitioned
  one by one, from meta if they are there, and before `deepspeed.initialize`, which would otherwise
  broadcast rank 0's experts over all others.
- `optimizer.partition_grads(parameters, partitions)`: called with the reduced partitions of a
  bucket. Here means over the partition group are made sums, and replicas are added.
- `optimizer._get_norm_groups()`: replaced by the norm of the whole model.
- `optimizer._optimizer_step(buffer)`: replaced by the update of a flat buffer.
- `grad_position`, `fp32_partitioned_groups_flat`, `fp16_partitioned_groups_flat`,
  `averaged_gradients`, `sub_group_to_group_id`: where things lie. Tensors of the flat lists are
  given other memory for parallel.offload=nvme (`parallel.offload.Disk`).

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
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from moe import Router
from parallel.engines.base import Outcome
from parallel.engines.optimizer import DENSE, EXPERT, ROUTER, Group, Optimizer, Piece
from parallel.engines.rounding import buffer_seed
from parallel.engines.sharded import (
    REPLICA_GROUP,
    SHARD_GROUP,
    ShardedEngine,
    Sharding,
    prepare,
)
from parallel.offload import Disk, Offload
from parallel.world import ParallelError

VERSION = "0.19.8"


class DeepSpeedEngine(ShardedEngine):
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
        import deepspeed

        # `sharding.units` is not used: ZeRO-3 gathers module by module and learns what to prefetch
        if deepspeed.__version__.split("+")[0] != VERSION:
            raise ParallelError(
                f"parallel.engine=deepspeed is made for deepspeed {VERSION}, found "
                f"{deepspeed.__version__}: pip install deepspeed=={VERSION}, or use fsdp2"
            )
        places = prepare(model, groups, sharding, flat_experts=False)
        super().__init__(groups, optimizer, sharding, places, num_terms=num_terms, seed=seed)
        routers = _detach_routers(model, self.device)
        self._parameters = {name: model.get_parameter(name) for name in self.named(DENSE, EXPERT)}
        config = _config(sharding.dtype, sharding.offload)
        masters = self._partition(model, config, sharding.dtype)
        self.model = self._initialise(model, config)
        self._zero = self.model.optimizer
        self._flats = self._place(sharding.offload)
        self._hold()
        self.hold_routers({name: routers[name] for name in self.named(ROUTER)})
        for name, master in masters.items():
            self.pieces[name].weight.copy_(master)
        self.loaded()
        self._hook()

    # --- building ---------------------------------------------------------------------------------

    def _partition(
        self, model: nn.Module, config: dict[str, Any], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Partition all parameters; returns this rank's float32 part of those that had values."""
        import deepspeed

        _quiet()
        # zero.Init finds the device by it, and only a launcher sets it.
        os.environ.setdefault("LOCAL_RANK", str(self.device.index or 0))
        deepspeed.init_distributed(dist.get_backend(), verbose=False)
        init = deepspeed.zero.Init(
            module=nn.Module(),
            data_parallel_group=self.mesh.group("shard"),
            config_dict_or_path=config,
            dtype=dtype,
        )
        masters = {}
        for name, parameter in self._parameters.items():
            group, count = SHARD_GROUP[self.places[name].kind], parameter.numel()
            if parameter.is_meta:
                parameter = _replace(model, parameter, dtype, self.device)
                self._parameters[name] = parameter
            else:
                ranks = dist.get_world_size(self.mesh.group(group))
                size = -(-count // ranks)
                start = min(self.mesh.place(group) * size, count)
                flat = parameter.detach().view(-1)
                masters[name] = flat[start : start + size].float().clone()
                parameter.data = parameter.data.to(self.device, dtype)
            parameter.ds_zero_partition_process_group = self.mesh.group(group)
            init._convert_to_zero_parameters([parameter])
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[key] = torch.empty_like(buffer, device=self.device)
                elif buffer is not None:
                    module._buffers[key] = buffer.to(self.device)
        return masters

    def _initialise(self, model: nn.Module, config: dict[str, Any]) -> Any:
        import deepspeed

        rows: dict[int, list[nn.Parameter]] = {}
        for name, parameter in self._parameters.items():
            rows.setdefault(self.places[name].group, []).append(parameter)
        self._numbers = list(rows)
        # DeepSpeed makes its flat buffers by the groups of an optimizer; the update is ours.
        groups = [{"params": members} for members in rows.values()]
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(groups, lr=0.0), config=config
        )
        return engine

    def _place(self, offload: Offload) -> list[Piece]:
        """Give master weights and states, and weights, the memory that they are to lie in; ZeRO's
        flat buffers, each with its states."""
        zero, disk = self._zero, None if offload.path is None else Disk(offload.path)
        found = []
        for i, flat in enumerate(zero.fp32_partitioned_groups_flat):
            states = self.new_states(self._numbers[zero.sub_group_to_group_id[i]], flat.detach())
            if offload.state == "nvme":
                flat.data = disk.take(flat)
                states = {name: disk.take(zeros) for name, zeros in states.items()}
            weight = flat.detach()
            found.append(Piece(weight, weight, states, seed=buffer_seed(self._seed, i)))
        if offload.weights == "nvme":
            for i, flat in enumerate(zero.fp16_partitioned_groups_flat):
                zero.fp16_partitioned_groups_flat[i] = disk.take(flat)
                zero._unflatten_partitioned_parameters(i)
            zero.param_groups_fp16_flat_cpu_memory = []
        return found

    def _hold(self) -> None:
        """Find the parts of every parameter in ZeRO's flat buffers."""
        self._spans: dict[str, tuple[int, int, int]] = {}
        """name → flat buffer, place in it, elements held."""
        for name, parameter in self._parameters.items():
            zero = self._zero
            buffer, place, size = zero.grad_position[zero.get_param_id(parameter)]
            start = min(parameter.ds_zero_partition_rank * size, parameter.ds_numel)
            held = min(size, parameter.ds_numel - start)
            self._spans[name] = (buffer, place, held)
            flat = self._flats[buffer]
            states = {key: state.narrow(0, place, held) for key, state in flat.states.items()}
            self.hold(name, flat.weight.narrow(0, place, held), states, start, size)

    def _hook(self) -> None:
        zero, hooks = self._zero, self._zero.parameter_offload
        for when in ("pre", "post"):
            name = f"{when}_sub_module_forward_function"
            setattr(hooks, name, _unseen(getattr(hooks, name)))
        self._partition_grads = zero.partition_grads
        zero.partition_grads = self._sum_partitions
        zero._get_norm_groups = self._norm_groups
        zero._optimizer_step = self._update_flat

    # --- a step -----------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self._last = last
        self.model.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss, scale_wrt_gas=False)

    @torch.no_grad()
    def _sum_partitions(self, parameters: list[nn.Parameter], parts: list[Tensor]) -> list[Tensor]:
        """ZeRO's `partition_grads`, with sums instead of means, and over the replicas too."""
        group = parameters[0].ds_process_group
        kind = next(k for k, name in SHARD_GROUP.items() if self.mesh.group(name) is group)
        replicas = self.mesh.group(REPLICA_GROUP[kind])
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

    def find_gradients(self) -> None:
        for name, (buffer, place, held) in self._spans.items():
            if self.on_host:
                flat = self._zero.fp32_partitioned_groups_flat[buffer].grad
                self.pieces[name].gradient = flat.narrow(0, place, held)
            else:
                part, _ = self._zero._get_fp32_grad_state_partition(
                    self._parameters[name], release_swap_buffers=False
                )
                self.pieces[name].gradient = part.view(-1).narrow(0, 0, held)

    @torch.no_grad()
    def _norm_groups(self) -> list[Tensor]:
        """ZeRO's `_get_norm_groups`: the norm of the whole model; also asks the guard."""
        self._outcome = self.judge()
        self.apply(self.named(ROUTER))
        return [self._outcome.grad_norm]

    @torch.no_grad()
    def _update_flat(self, buffer: int) -> None:
        """ZeRO's `_optimizer_step`, on one of its flat buffers."""
        number = self._numbers[self._zero.sub_group_to_group_id[buffer]]
        gradient = self._zero.fp32_partitioned_groups_flat[buffer].grad
        if self.rule.of(self.groups[number]).granularity == "elements":
            pieces = [replace(self._flats[buffer], gradient=gradient)]
        else:
            pieces = [
                replace(self.pieces[name], gradient=gradient.narrow(0, place, held))
                for name, (of, place, held) in self._spans.items()
                if of == buffer
            ]
        self._apply(number, pieces)

    def update(self) -> Outcome:
        # ZeRO leaves everything alone by itself when the norm is not finite.
        self.model.step()
        return self._outcome

    # --- state ------------------------------------------------------------------------------------

    @torch.no_grad()
    def loaded(self) -> None:
        # The weights that are computed with follow the float32 ones.
        zero = self._zero
        zero._partition_all_parameters()  # small ones stay gathered, with the values of then
        for i in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(i)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


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
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _quiet() -> None:
    import deepspeed

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
