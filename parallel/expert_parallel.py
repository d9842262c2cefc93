"""Expert parallelism: an MoE layer whose experts live on several ranks.

    layer = expert_parallel(layer, mesh, AllToAll())

The router and the shared expert stay on every rank; `layer.experts` holds this rank's experts and
runs dispatch, experts and combine in one forward. One module that owns the weights and uses all of
them at once is one unit of ZeRO-3 or FSDP: one gather of weights per pass, however many chunks, and
no rank can ask for other weights than its neighbours, the cause of most hangs of that kind
(github.com/deepspeedai/DeepSpeed/issues/4966).

What computes while rows travel, in forward (backward is the mirror image):

    dispatch 0      own tokens with own experts
    dispatch i + 1  experts on the rows of step i
    combine i       experts on the rows of step i + 1
    last combine    shared expert

Every rank runs the same exchanges whatever its tokens, with zero rows too; a rank or an expert
without tokens gets zero gradients, not none.

Shape letters: T tokens, D model width, E experts of this rank, H columns of the up-projection, N
expert width, C rows sent, Q rows received, P pairs of token and expert.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe import MoE, MoEConfig, Routing
from moe.experts import autocast_as_linear, experts
from moe.kernels.common.backend import pick_backend
from moe.types import RouterStats
from parallel.config import AllGather, AllToAll, Pairwise
from parallel.exchange.all_gather import AllGatherExchange
from parallel.exchange.all_to_all import Float8, Plain, WithIds, collect, issue, spread, wait
from parallel.exchange.bounded import bounded_routing, bounds_of, plan_bounded
from parallel.exchange.dispatch import (
    DispatchPlan,
    exchange_counts,
    plan_dispatch,
    received_routing,
    sort_pairs,
)
from parallel.exchange.operator import experts_operator, number_of
from parallel.exchange.pull import Pull, SymmetricMemory
from parallel.exchange.transport import Collective, RingTransport, Transport
from parallel.mesh import Mesh, MeshPlan
from parallel.world import ParallelError

Exchanging = AllToAll | Pairwise | AllGather
"""How tokens travel; none of it changes which numbers are summed, or in which order."""


def check_exchange(exchange: Exchanging, plan: MeshPlan, device_type: str) -> None:
    """Refuse what cannot work on this device, or has no effect in this layout.

    Raises:
        ParallelError: setting, value and what is allowed.
    """
    if _pulls(exchange) and device_type != "cuda":
        raise ParallelError(
            f"parallel.exchange.transport=pull needs CUDA devices, this run is on {device_type}; "
            "allowed here: collective"
        )
    if plan.expert > 1 or plan.world == 1:
        return  # one process runs any layout's config
    default = {"kind": "all_to_all", **AllToAll().model_dump(exclude={"kind"})}
    given = {"kind": exchange.kind, **exchange.model_dump(exclude={"kind"})}
    key = next((key for key, value in given.items() if value != default.get(key, value)), None)
    if key is not None:
        raise ParallelError(
            f"parallel.exchange.{key}={getattr(exchange, key)} has no effect while the experts are "
            "not split (parallel.expert is 1 here); leave it out"
        )


def _pulls(exchange: Exchanging) -> bool:
    return getattr(exchange, "transport", "collective") == "pull"


def make_transport(exchange: Exchanging, mesh: Mesh) -> Transport | None:
    """What moves rows in the expert group; None when nothing has to move. Layers can share it."""
    if mesh.plan.expert == 1:
        return None
    group = mesh.group("expert")
    assert group is not None, f"no expert group in a world of {mesh.plan.world}"
    if _pulls(exchange):
        check_exchange(exchange, mesh.plan, mesh.device.type)
        hosts: list[str] = [""] * mesh.plan.expert
        dist.all_gather_object(hosts, socket.gethostname(), group=group)
        if len(set(hosts)) > 1:
            raise ParallelError(
                "parallel.exchange.transport=pull needs all ranks of an expert group on one host, "
                f"they are on {', '.join(sorted(set(hosts)))}; allowed here: collective"
            )
        return Pull(SymmetricMemory(group, mesh.device), group)
    return RingTransport(group) if exchange.kind == "pairwise" else Collective(group)


class ParallelExperts(nn.Module):
    """This rank's experts, and the exchange that brings tokens to them.

    Attributes:
        w1, w2: `MoE.w1` [E, H, D] and `MoE.w2` [E, D, N] of this rank's experts; with `flat` as
            matrices [E·H, D] and [E·D, N], so that a sharding by rows is balanced whatever the
            number of experts. (A sharding that swaps the memory of gathered weights, as ZeRO-3
            does, needs them unflattened: the view that is saved for backward would keep it.)
        first_expert: number of the first of them in the whole layer.
    """

    def __init__(
        self,
        config: MoEConfig,
        w1_EHD: Tensor,
        w2_EDN: Tensor,
        mesh: Mesh,
        exchange: Exchanging,
        transport: Transport | None,
        flat: bool,
    ) -> None:
        super().__init__()
        self.config = config
        self.mesh = mesh
        self.exchange = exchange
        self.transport = transport
        mine = mesh.local_experts(config.num_experts)
        self.first_expert, self.num_experts = mine.start, len(mine)
        self.plan = DispatchPlan(
            mesh.plan.expert,
            self.num_experts,
            getattr(exchange, "chunks", 1),
            exchange.kind,
        )
        self.all_gather = None
        if exchange.kind == "all_gather" and transport is not None:
            self.all_gather = AllGatherExchange(
                transport,
                None if exchange.equal_tokens else _host_group(mesh),
                mesh.place("expert"),
                mesh.plan.expert,
                self.num_experts,
                self.first_expert,
                self.plan.chunks,
                exchange.payload == "float8",
                config.kernels,
            )
        for name, weight in (("w1", w1_EHD), ("w2", w2_EDN)):
            own = weight.detach()[mine.start : mine.stop].clone()
            own = own.flatten(0, 1) if flat else own
            self.register_parameter(name, nn.Parameter(own, weight.requires_grad))

    def forward(
        self,
        x_TD: Tensor,
        routing: Routing,
        shared: Callable[[Tensor], Tensor] | None = None,
        output_sums: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`compute` with the weights of this module."""
        return self.compute(x_TD, routing, self.w1, self.w2, shared, output_sums)

    def around(self, function: Callable, *arguments: Any, **named: Any) -> Any:
        """`function(*arguments, **named)`: what a sharding engine can take for a forward of this
        module, so that its weights are there while `function` runs."""
        return function(*arguments, **named)

    def compute(
        self,
        x_TD: Tensor,
        routing: Routing,
        w1: Tensor,
        w2: Tensor,
        shared: Callable[[Tensor], Tensor] | None = None,
        output_sums: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Routed experts of this rank's tokens, plus `shared(x)`; in the dtype of `moe.experts`.

        Args:
            x_TD: this rank's tokens, any number.
            routing: their experts, numbered over the whole layer.
            w1, w2: the weights of this module, or copies of them.
            shared: the expert that every token uses.
            output_sums: give also the sums of outputs [experts of the layer, D] over the rows that
                this rank's experts computed, for whomever, float32; 0 for experts of other ranks.
        """
        config = self.config
        weights = [
            weight if weight.dim() == 3 else weight.view(self.num_experts, -1, weight.shape[1])
            for weight in (w1, w2)
        ]

        wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        sums_ED = x_TD.new_zeros(config.num_experts, config.hidden_size, dtype=wide)
        mine_ED = sums_ED[self.first_expert : self.first_expert + self.num_experts]

        def compute(rows: Tensor, routing: Routing) -> Tensor:
            found = experts(
                rows, *weights, routing,
                activation=config.activation, save=config.save, backend=config.kernels,
                output_sums=output_sums,
            )  # fmt: skip
            if not output_sums:
                return found
            mine_ED.add_(found[1])
            return found[0]

        def finish(y_TD: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            return (y_TD, sums_ED) if output_sums else y_TD

        if self.transport is None:
            y_TD = compute(x_TD, routing)
            return finish(y_TD if shared is None else y_TD + shared(x_TD))

        rank = self.mesh.place("expert")
        # Rows travel in the dtype in which the experts would read them.
        (rows_TD,) = autocast_as_linear(x_TD)
        backend = pick_backend(config.kernels, rows_TD)
        if self.all_gather is not None:
            all_gather = replace(self.all_gather, transport=self.transport)
            y_TD = all_gather(
                rows_TD, routing, compute, None if shared is None else lambda: shared(x_TD), backend
            )
            return finish(y_TD)
        pairs = sort_pairs(routing, self.plan, rank, config.kernels)
        bounds = None
        if getattr(self.exchange, "sizes", "exact") == "bounded":
            bounds = bounds_of(routing, self.plan)
            plan = plan_bounded(pairs, self.plan, rank, bounds, backend)
        else:
            counts_NB2 = exchange_counts(pairs.counts_B2, self.transport_group)
            plan = plan_dispatch(pairs, counts_NB2, self.plan, rank, backend)
        gates, ids = plan.gates(routing.gates_S), plan.ids()
        rows_CD = spread(rows_TD, plan.copies)
        parts = list(rows_CD.split([sum(step.rows.send) for step in plan.steps]))
        del rows_CD

        def dispatch(i: int):
            step, id_P = plan.steps[i], WithIds(ids[i])
            payload = Float8() if self.exchange.payload == "float8" else Plain()
            return (
                id_P,
                issue(gates[i], self.transport, step.pairs, id_P),
                issue(parts[i], self.transport, step.rows, payload),
            )

        sent = dispatch(0)
        y_TD = compute(
            rows_TD, plan.local(gates[-1], x_TD.shape[0], self.num_experts, config.kernels)
        )
        returning = []
        for i, step in enumerate(plan.steps):
            id_P, *flights = sent
            if i + 1 < len(plan.steps):
                sent = dispatch(i + 1)
            gate_P, rows_QD = (wait(*flight) for flight in flights)
            if bounds is None:
                received = received_routing(
                    id_P.ids, gate_P, rows_QD.shape[0], self.num_experts, config.kernels
                )
            else:
                received = bounded_routing(
                    id_P.ids, gate_P, bounds, self.num_experts, config.kernels
                )
            y_QD = compute(rows_QD, received)
            returning.append(issue(y_QD, self.transport, step.rows.reversed()))
        if shared is not None:
            y_TD = y_TD + shared(x_TD)
        back_CD = torch.cat([wait(*flight) for flight in returning])
        return finish(collect(back_CD, plan.copies) + y_TD)

    @property
    def transport_group(self):
        return self.mesh.group("expert")

    def extra_repr(self) -> str:
        last = self.first_expert + self.num_experts - 1
        experts = f"experts {self.first_expert} to {last} of {self.config.num_experts}"
        return f"{experts}, exchange {self.exchange}"


class ExpertParallelMoE(MoE):
    """An `MoE` whose experts are split over the expert group of a mesh.

    Attributes:
        router, shared, routing_hook: those of the layer it was made from.
        experts: `ParallelExperts`, in place of w1 and w2.
    """

    def __init__(
        self,
        layer: MoE,
        mesh: Mesh,
        exchange: Exchanging,
        transport: Transport | None = None,
        flat: bool = True,
    ) -> None:
        nn.Module.__init__(self)
        self.config = layer.config
        self.router, self.shared = layer.router, layer.shared
        self.routing_hook = layer.routing_hook
        self.experts = ParallelExperts(
            layer.config, layer.w1, layer.w2, mesh, exchange, transport, flat
        )
        self.train(layer.training)

    @torch.compiler.disable
    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, RouterStats]:
        # As a whole outside compiled blocks: the order of exchanges in backward is that of eager
        # autograd, and Dynamo of torch 2.11 cannot break a graph where a `Routing` is alive.
        return super().forward(x, valid)

    def reset_parameters(self) -> None:
        raise RuntimeError("weights are drawn for the whole layer, before it is split")

    def compute(
        self, x_TD: Tensor, routing: Routing, output_sums: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        return self.experts(x_TD, routing, self.shared, output_sums)


class WholeMoE(ExpertParallelMoE):
    """An `ExpertParallelMoE` for blocks that are compiled as a whole: the compiler sees router and
    experts, and the experts with their exchange as one operator.

    Whoever shards the experts must have gathered them before the block runs
    (`ParallelExperts.around`); nothing calls their module's hooks here.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.number = number_of(self)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, RouterStats]:
        return MoE.forward(self, x, valid)

    def compute(
        self, x_TD: Tensor, routing: Routing, output_sums: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        experts = self.experts
        if not torch.compiler.is_compiling() or experts.transport is None:
            return experts.forward(x_TD, routing, self.shared, output_sums)
        shared = [] if self.shared is None else list(self.shared.parameters())
        weights = [experts.w1, experts.w2, *shared]
        return experts_operator(self.number, x_TD, routing, weights, output_sums)


def expert_parallel(
    layer: MoE,
    mesh: Mesh,
    exchange: Exchanging | None = None,
    transport: Transport | None = None,
    flat: bool = True,
    whole: bool = False,
) -> ExpertParallelMoE:
    """The distributed form of a layer; all ranks must have built the same layer.

    Its statistics are of this rank's tokens, as those of every layer; whoever needs them for the
    whole step adds them up over the ranks.

    Args:
        layer: the whole layer; its router and shared expert are taken over, its experts copied.
        transport: shared with other layers; a new one when None.
        flat: see `ParallelExperts`.
        whole: as `WholeMoE`.

    Raises:
        ValueError: experts that the expert ranks do not divide, or a transport that cannot work.
    """
    exchange = exchange or AllToAll()
    ranks = mesh.plan.expert
    if layer.config.num_experts % ranks:
        raise ParallelError(
            f"parallel.expert={ranks} does not divide num_experts={layer.config.num_experts}"
        )
    if transport is None:
        transport = make_transport(exchange, mesh)
    kind = WholeMoE if whole else ExpertParallelMoE
    return kind(layer, mesh, exchange, transport, flat)


@dataclass(frozen=True)
class ExpertRange:
    """Where a rank's part of an expert weight lies in the whole tensor, flattened."""

    name: str
    """Logical name, the same in every layout: `…w1` or `…w2` of the `MoE`."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """First element."""


def split_experts(
    model: nn.Module,
    mesh: Mesh,
    exchange: Exchanging | None = None,
    flat: bool = True,
    whole: bool = False,
) -> dict[str, ExpertRange]:
    """Replace every MoE layer of a model by its distributed form, in place.

    Args:
        flat: see `ParallelExperts`.
        whole: as `WholeMoE`.

    Returns:
        name of each expert parameter, as the model now has it, → its place in the whole tensor.
    """
    exchange = exchange or AllToAll()
    transport = make_transport(exchange, mesh)
    ranges = {}
    for name, layer in [(n, m) for n, m in model.named_modules() if type(m) is MoE]:
        parent, _, child = name.rpartition(".")
        parallel = expert_parallel(layer, mesh, exchange, transport, flat, whole)
        setattr(model.get_submodule(parent), child, parallel)
        prefix = f"{name}." if name else ""
        for weight in ("w1", "w2"):
            shape = tuple(getattr(layer, weight).shape)
            start = parallel.experts.first_expert * shape[1] * shape[2]
            ranges[f"{prefix}experts.{weight}"] = ExpertRange(f"{prefix}{weight}", shape, start)
    return ranges


def _host_group(mesh: Mesh) -> dist.ProcessGroup:
    """The expert group over gloo, for sizes that only hosts know; its members call it together."""
    if "expert_hosts" not in mesh.groups:
        ranks = dist.get_process_group_ranks(mesh.group("expert"))
        mesh.groups["expert_hosts"] = dist.new_group(
            ranks, backend="gloo", use_local_synchronization=True, group_desc="tessera_hosts"
        )
    return mesh.groups["expert_hosts"]
