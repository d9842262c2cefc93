"""Record which experts a model's tokens went to, and send the same tokens there again.

    trace = RoutingTrace(model)
    with trace.record():
        model(x)
    with trace.replay():
        model(x)                     # same experts, whatever changed in between
    with trace.replay(other_model):  # same layers by name; other kernels, dtype or device
        other_model(x)

A rounding error in a logit can move a token to another expert, and everything behind it is then
another computation. Under a replay two models that should agree differ by their arithmetic alone.

Shape letters: T tokens, E experts, K experts per token, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from moe.kernels.common.gating import Gating
from moe.layer import MoE
from moe.routing import CompactRouting, Routing
from moe.rules.rounding import rounded_gates
from moe.scores import gates_at

# attribute names that torch.compile and activation checkpointing put into a module's path
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class TraceEntry:
    """One forward of one layer."""

    choice: CompactRouting
    """The router's top-K choice, which the statistics count."""
    realised: CompactRouting | None
    """What the experts computed, where token rounding or a capacity limit made it differ from the
    choice."""

    def to(self, device: torch.device | str) -> TraceEntry:
        realised = None if self.realised is None else self.realised.to(device)
        return TraceEntry(self.choice.to(device), realised)


@dataclass
class _Cursor:
    """Where a layer is in its entries while a trace is replayed."""

    next: int = 0
    # forwards since the last recomputation that built a graph: the ones a recomputation could be of
    pending: list[int] = field(default_factory=list)


class RoutingTrace:
    """The routing of every MoE layer of a model, forward by forward.

    Attributes:
        entries: layer name -> one `TraceEntry` per forward, on the device it was made on.
    """

    def __init__(self, model: nn.Module, gate_dtype: torch.dtype = torch.float32) -> None:
        """
        Args:
            model: its `MoE` layers are traced under their names in `named_modules`.
            gate_dtype: of the stored gates; bfloat16 halves them, float32 makes a frozen replay
                exact.
        """
        self.model = model
        self.gate_dtype = gate_dtype
        self.entries: dict[str, list[TraceEntry]] = {name: [] for name in _layers(model)}

    @contextmanager
    def record(self) -> Iterator[RoutingTrace]:
        """Record all forwards in this context, in place of what was recorded before.

        The second forward that activation checkpointing runs inside the backward is not recorded.
        """
        layers = _layers(self.model)
        entries: dict[str, list[TraceEntry]] = {name: [] for name in layers}

        def hook(name: str) -> Callable[..., tuple[Gating, Routing]]:
            def keep(
                layer: MoE, logits_TE: Tensor, gating: Gating, routing: Routing
            ) -> tuple[Gating, Routing]:
                if not _in_backward():
                    entries[name].append(_entry_of(layer, gating, routing, self.gate_dtype))
                return gating, routing

            return keep

        with _hooked(layers, hook):
            yield self
        self.entries = entries

    @contextmanager
    def replay(self, model: nn.Module | None = None, gates: str = "live") -> Iterator[RoutingTrace]:
        """Send tokens where they went in the recorded forwards, from the first one on.

        Args:
            model: the recorded model when None; else one with MoE layers of the same names and
                sizes.
            gates: "live" takes the gates of the recorded experts from the present logits, with
                their gradient to the router; "frozen" takes the recorded gates, as constants.

        The statistics (counts, probabilities, z) are the present router's, with the recorded
        choice as counts.

        A recomputation by activation checkpointing replays the forward that it
        repeats; for that each backward must follow its forward, before the next forward that
        builds a graph.

        Raises:
            ValueError: unknown `gates`, layers that were not recorded, or a forward with another
                number of tokens than the recorded one.
            RuntimeError: more forwards than were recorded, or a recomputation that could be of
                several.
        """
        if gates not in ("live", "frozen"):
            raise ValueError(f"gates={gates!r} is unknown; allowed: live, frozen")
        layers = _layers(self.model if model is None else model)
        if set(layers) != set(self.entries):
            raise ValueError(
                f"the trace holds layers {sorted(self.entries)}, the model has {sorted(layers)}"
            )

        def hook(name: str) -> Callable[..., tuple[Gating, Routing]]:
            cursor = _Cursor()

            def reroute(
                layer: MoE, logits_TE: Tensor, gating: Gating, routing: Routing
            ) -> tuple[Gating, Routing]:
                entry = _next_entry(name, self.entries[name], cursor)
                return _rerouted(name, entry, layer, logits_TE, gating, gates)

            return reroute

        with _hooked(layers, hook):
            yield self

    def state_dict(self) -> dict[str, list[dict[str, Any]]]:
        """The trace as plain dicts of CPU tensors, ids in one or two bytes: for `torch.save`."""
        return {
            name: [asdict(entry.to("cpu")) for entry in entries]
            for name, entries in self.entries.items()
        }

    def load_state_dict(self, state: dict[str, list[dict[str, Any]]]) -> None:
        """Take over a trace saved by `state_dict`.

        Raises:
            ValueError: layers that are not the model's.
        """
        if set(state) != set(self.entries):
            raise ValueError(
                f"the saved trace holds layers {sorted(state)}, "
                f"the model has {sorted(self.entries)}"
            )
        self.entries = {
            name: [
                TraceEntry(
                    CompactRouting(**entry["choice"]),
                    entry["realised"] and CompactRouting(**entry["realised"]),
                )
                for entry in entries
            ]
            for name, entries in state.items()
        }


def _layers(model: nn.Module) -> dict[str, MoE]:
    """The MoE layers of a model by name, without the marks of compile and checkpoint wrappers."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            parts = [part for part in name.split(".") if part not in WRAPPERS]
            layers[".".join(parts)] = module
    if not layers:
        raise ValueError(f"{type(model).__name__} has no MoE layer to trace")
    return layers


@contextmanager
def _hooked(layers: dict[str, MoE], hook: Callable[[str], Any]) -> Iterator[None]:
    busy = [name for name, layer in layers.items() if layer.routing_hook is not None]
    if busy:
        raise RuntimeError(f"layers {busy} are being recorded or replayed already")
    try:
        for name, layer in layers.items():
            layer.routing_hook = hook(name)
        yield
    finally:
        for layer in layers.values():
            layer.routing_hook = None


def _in_backward() -> bool:
    """Whether autograd is running a backward on this thread: a forward here is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _entry_of(layer: MoE, gating: Gating, routing: Routing, gate_dtype: torch.dtype) -> TraceEntry:
    limited = layer.training and bool(layer.router.acting("limit_routing"))
    if routing.slots_per_token is not None and not limited:
        return TraceEntry(routing.compact(gate_dtype), None)
    config = layer.config
    choice = Routing.from_topk(gating.expert_TK, gating.gate_TK, config.num_experts, config.kernels)
    return TraceEntry(choice.compact(gate_dtype), routing.compact(gate_dtype))


def _next_entry(name: str, entries: list[TraceEntry], cursor: _Cursor) -> TraceEntry:
    if _in_backward():
        if len(cursor.pending) != 1:
            raise RuntimeError(
                f"{name}: a recomputation could be of any of {len(cursor.pending)} replayed "
                "forwards; run each backward before the next forward, or replay without "
                "activation checkpointing"
            )
        return entries[cursor.pending.pop()]
    if cursor.next == len(entries):
        raise RuntimeError(f"{name}: {len(entries)} forwards were recorded, this is one more")
    if torch.is_grad_enabled():
        cursor.pending.append(cursor.next)
    cursor.next += 1
    return entries[cursor.next - 1]


def _rerouted(
    name: str, entry: TraceEntry, layer: MoE, logits_TE: Tensor, gating: Gating, gates: str
) -> tuple[Gating, Routing]:
    c = layer.config
    tokens, device = logits_TE.shape[0], logits_TE.device
    choice, realised = entry.choice, entry.realised
    slots = layer.router.active_k
    found = (tokens, c.num_experts, slots)
    recorded = (choice.num_tokens, choice.num_experts, choice.slots_per_token)
    if found != recorded:
        raise ValueError(
            f"{name}: (tokens, num_experts, num_experts_per_tok) was {recorded} when recorded, "
            f"is {found} now"
        )
    limited = realised is not None and realised.slots_per_token is not None  # by a capacity
    rounding = c.router.rounding
    if realised is not None and not limited and rounding is None and gates == "live":
        raise ValueError(
            f"{name}: recorded with token rounding, but router.rounding=null now does not say how "
            "live gates are normalised; use gates='frozen'"
        )
    expert_TK = choice.ids_S().to(device).view(tokens, slots)
    gate_S = None
    if gates == "live":
        gate_TK = gates_at(logits_TE, expert_TK, c.score, c.norm, c.route_scale)
        gate_S = layer.router.gates(gate_TK).reshape(-1)
    routing = choice.expand(gate_S, device, c.kernels)
    gating = gating._replace(
        expert_TK=expert_TK, gate_TK=routing.gates_S.view_as(expert_TK), counts_E=routing.counts_E
    )
    if limited and gates == "live":
        kept_S = realised.ids_S().to(device) >= 0
        routing = realised.expand(torch.where(kept_S, gate_S, 0.0), device, c.kernels)
    elif realised is not None:
        routing = realised.expand(None, device, c.kernels)
        if gates == "live":
            gate_S = rounded_gates(rounding, layer.router.form, logits_TE, gating, routing)
            routing = replace(routing, gates_S=gate_S)
    return gating, routing
