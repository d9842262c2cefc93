"""AdamW with float32 master weights, moments and gradients, for models of any dtype.

Every parameter group lives in flat buffers:

    gradient   float32, one buffer for all groups: one all-reduce, one norm, one fill with zeros
    master     one per group: what AdamW updates. A float32 parameter *is* a piece of it; a bfloat16
               one is a rounded copy of a float32 master (a step of 6e-4 is lost on a bfloat16
               weight of 1), or with `States(weights=bfloat16)` its own master, and every update is
               rounded up or down at random so that its mean is exact
    moments    two per group, float32, or bfloat16 rounded likewise

Parameters that are float32 in a bfloat16 model (the routers) always keep float32 states. Bytes per
parameter of a bfloat16 model: 2 + 4 + 8 + 4 of gradient; with bfloat16 weights and moments 2 + 4
+ 4 of gradient.

Gradients of micro-batches are added in float32: a hook moves each bfloat16 gradient into the buffer
as soon as autograd has finished it, so never more than a layer's gradients exist twice. The first
one of a step overwrites the buffer, so nothing is filled with zeros that is written anyway. Where a
step is a single micro-batch (`accumulates=False`) there is nothing to add: bfloat16 gradients stay
where autograd put them until the update reads them there, and the buffer has no place for them.

Whether a step is applied is decided on the device (`StepGuard`): `training.optim.adamw` then leaves
weights and moments alone, and the count of updates stays. No value is read back to the host.

Shape letters: P elements of one group's flat buffer, padded so that every parameter starts at a
multiple of `ALIGN`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from training.optim.adamw import Rates, adamw, buffer_seed, rates_numbers
from training.optim.gradients import collect, norm

# Elements; 256 bytes in float32, 128 in bfloat16: the most that TMA and vector loads ask for.
ALIGN = 64

# The rule of weight decay, by kind of parameter (`models.parameter_kinds`). Matrices that multiply
# activations decay; what scales, shifts or looks up does not: a norm's scale and a bias have no
# scale freedom to keep in check, an embedding row that does not occur in the batch would shrink for
# nothing, and routers have their own setting.
DECAYED = {
    "attention": True,
    "mlp": True,
    "expert": True,
    "head": True,
    "embedding": False,
    "norm": False,
    "bias": False,
}
ROUTER, EXPERT = "router", "expert"

# Loss terms of a step.
TERMS = ("loss", "balance_loss", "z_loss")


@dataclass(frozen=True)
class Group:
    """Parameters that share learning rate, weight decay and dtype."""

    name: str
    parameters: dict[str, nn.Parameter]
    lr_multiplier: float
    weight_decay: float

    @property
    def count(self) -> int:
        return sum(p.numel() for p in self.parameters.values())

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.parameters.values())).dtype

    @property
    def metric(self) -> str:
        """Name of the norm of its gradients in metrics.jsonl."""
        return f"grad_norm/{self.name.partition(' (')[0].replace(' ', '_')}"


def parameter_groups(
    model: nn.Module,
    kinds: Mapping[str, str],
    *,
    weight_decay: float,
    router_weight_decay: float = 0.0,
    router_lr_multiplier: float = 1.0,
) -> list[Group]:
    """Every trainable parameter in exactly one group, by the rule `DECAYED`.

    Args:
        kinds: parameter name → kind; must name every parameter of the model.

    Raises:
        ValueError: a parameter without a kind, or of a kind the rule does not know.
    """
    rows: dict[tuple[str, torch.dtype], dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = kinds.get(name)
        if kind != ROUTER and kind not in DECAYED:
            known = ", ".join([*DECAYED, ROUTER])
            raise ValueError(f"parameter {name} is of kind {kind!r}; the decay rule knows {known}")
        label = "experts" if kind == EXPERT else "decayed" if DECAYED.get(kind) else "not decayed"
        label = ROUTER if kind == ROUTER else label
        rows.setdefault((label, parameter.dtype), {})[name] = parameter
    settings = {
        "decayed": (1.0, weight_decay),
        "experts": (1.0, weight_decay if DECAYED[EXPERT] else 0.0),
        "not decayed": (1.0, 0.0),
        ROUTER: (router_lr_multiplier, router_weight_decay),
    }
    groups = []
    for (label, dtype), parameters in sorted(rows.items(), key=lambda row: str(row[0])):
        several = sum(other == label for other, _ in rows) > 1
        name = f"{label} ({str(dtype).removeprefix('torch.')})" if several else label
        groups.append(Group(name, parameters, *settings[label]))
    return groups


def group_table(
    groups: Iterable[Group], lr: float, placement: Callable[[str], str]
) -> list[dict[str, object]]:
    """One row per group, as printed at the start of a run.

    Args:
        placement: name of a group → where its parameters lie.
    """
    return [
        {
            "group": group.name,
            "tensors": len(group.parameters),
            "parameters": group.count,
            "placement": placement(group.name),
            "dtype": str(group.dtype).removeprefix("torch."),
            "lr": lr * group.lr_multiplier,
            "weight_decay": group.weight_decay,
        }
        for group in groups
    ]


class Outcome(NamedTuple):
    """What a step did; float32 scalars on the device."""

    grad_norm: Tensor  # before clipping
    skipped: Tensor  # 0 applied, 1 skipped
    reason: Tensor  # 0 none, 1 not finite, 2 spike, 3 after a stop


class StepGuard:
    """Decides on the device, the same on every process, whether a step is applied.

    A step is skipped when its loss or the norm of its gradients is not finite, and, with
    `spike_factor`, when the norm exceeds that multiple of its running mean once `HISTORY` steps
    were seen. A spike enters the mean cut to the limit, so a lasting change of scale is followed
    within some steps and not refused for ever; a step that is not finite leaves the mean alone.

    With `stop` (`optim.on_nonfinite=stop`) everything after the first step that is not finite is
    left out as well, so the weights stay those before it until the host learns of it at the next
    log step.
    """

    HISTORY = 20
    DECAY = 0.98

    def __init__(
        self, device: torch.device, spike_factor: float | None = None, stop: bool = False
    ) -> None:
        self.spike_factor = spike_factor
        self.stop = stop
        self.mean_norm = torch.zeros((), device=device)
        self.seen = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)  # in all, over attempts
        self.halted = torch.zeros((), device=device)

    def state(self) -> dict[str, Tensor]:
        return {"mean_norm": self.mean_norm, "seen": self.seen, "skipped": self.skipped}

    def judge(self, norm: Tensor, terms: Tensor) -> Outcome:
        """The outcome for a step with this gradient norm and these loss terms."""
        bad = ~torch.isfinite(norm + terms.sum())
        limit = torch.full_like(norm, float("inf"))
        if self.spike_factor is not None:
            ready = self.seen >= self.HISTORY
            limit = torch.where(ready, self.mean_norm * self.spike_factor, limit)
        spike = ~bad & (norm > limit)
        halted = self.halted > 0
        reason = torch.where(halted, 3.0, torch.where(bad, 1.0, torch.where(spike, 2.0, 0.0)))
        reason = reason.to(norm.dtype)
        if self.stop:
            self.halted.copy_(torch.maximum(self.halted, bad.to(norm.dtype)))
        counts = ~bad & ~halted
        norm_cut = torch.minimum(norm, limit)
        first = self.seen == 0
        mean = torch.where(
            first, norm_cut, self.DECAY * self.mean_norm + (1 - self.DECAY) * norm_cut
        )
        # torch.where, not a product: 0 * NaN is NaN.
        self.mean_norm.copy_(torch.where(counts, mean, self.mean_norm))
        self.seen.add_(counts)
        skipped = (reason > 0).to(norm.dtype)
        self.skipped.add_(skipped)
        return Outcome(norm, skipped, reason)


@dataclass(frozen=True)
class States:
    """Precision of what AdamW keeps of a bfloat16 model; bfloat16: stochastically rounded."""

    weights: torch.dtype = torch.float32
    """bfloat16: no master weights beside the model's own."""
    moments: torch.dtype = torch.float32


class _Flat:
    """The flat buffers of one group and the place of each parameter in them."""

    def __init__(self, group: Group, states: States) -> None:
        self.group = group
        self.places: dict[str, tuple[int, int]] = {}  # name → first element, count
        size = 0
        for name, parameter in group.parameters.items():
            self.places[name] = (size, parameter.numel())
            size += -(-parameter.numel() // ALIGN) * ALIGN
        self.size = size
        first = next(iter(group.parameters.values()))
        self.copy: Tensor | None = None  # the parameters themselves, where a master is kept beside
        own = torch.zeros(size, dtype=first.dtype, device=first.device)
        for name, parameter in group.parameters.items():
            start, count = self.places[name]
            piece = own[start : start + count]
            piece.copy_(parameter.detach().reshape(-1))
            parameter.data = piece.view(parameter.shape)
        narrow = first.dtype == torch.bfloat16
        if first.dtype == torch.float32 or (narrow and states.weights == torch.bfloat16):
            self.master = own
        else:
            self.copy = own
            self.master = own.float()
        moments = states.moments if narrow else torch.float32
        self.exp_avg = torch.zeros(size, dtype=moments, device=first.device)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self.gradient: Tensor | None = None  # a piece of the buffer for all groups, if there is one

    def gradients(self) -> list[tuple[slice, Tensor]]:
        """Where in the flat buffers gradients lie, and these, flat: one piece, or one for every
        parameter."""
        if self.gradient is not None:
            return [(slice(0, self.size), self.gradient)]
        found = []
        for name, parameter in self.group.parameters.items():
            start, count = self.places[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found.append((slice(start, start + count), parameter.grad.reshape(-1)))
        return found

    def pieces(self, flat: Tensor) -> dict[str, Tensor]:
        """Name → that parameter's piece of a flat tensor of this group, one-dimensional."""
        return {name: flat[start : start + count] for name, (start, count) in self.places.items()}


def _weakly(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """A hook that does not keep its optimizer alive: Python's collector does not see the way from a
    parameter to its hooks, and would keep all that both hold for ever."""
    reference = weakref.WeakMethod(method)

    def hook(parameter: nn.Parameter) -> None:
        found = reference()
        if found is not None:
            found(parameter)

    return hook


class MasterAdamW:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) over flat float32 buffers.

    The optimizer of one process, with the interface of a sharding engine (`parallel.engine`):
    `zero_grad()`, any number of micro-batches, `step(lr)`.

    Building it moves every parameter into the flat buffers (`parameter.data` is replaced), so the
    model must be on its device already and must not be moved or cast afterwards.
    """

    def __init__(
        self,
        groups: list[Group],
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        clip_norm: float | None = 1.0,
        spike_factor: float | None = None,
        on_nonfinite: str = "skip",
        states: States = States(),
        seed: int = 0,
        accumulates: bool = True,
    ) -> None:
        """
        Args:
            states: precision of master weights and moments.
            seed: of stochastic rounding.
            accumulates: whether a step may have several micro-batches.

        Raises:
            ValueError: no groups, or a parameter that is in two of them.
        """
        owners = [id(p) for group in groups for p in group.parameters.values()]
        if not owners or len(set(owners)) != len(owners):
            raise ValueError(
                f"{len(owners)} parameters in {len(groups)} groups, {len(set(owners))} different "
                f"ones: each must be in exactly one group"
            )
        self.groups = groups
        self.betas, self.eps = (betas[0], betas[1]), eps
        self.clip_norm = clip_norm
        self.routers_frozen = False  # True: steps leave the routers' weights alone
        self.flats = [_Flat(group, states) for group in groups]
        self.seeds = [buffer_seed(seed, number) for number in range(len(groups))]
        device = self.flats[0].master.device
        buffered = [f for f in self.flats if accumulates or f.group.dtype == torch.float32]
        size = sum(flat.size for flat in buffered)
        # Gradients of the groups, then the loss terms.
        self.gradient = torch.zeros(size + len(TERMS), device=device)
        self.terms = self.gradient[size:]
        self._stale: dict[nn.Parameter, Tensor] = {}
        """Pieces of the gradient that hold the last step's, by parameters without one in this."""
        self._narrow: dict[nn.Parameter, Tensor | None] = {}
        """Parameters whose gradients are moved to a piece of the buffer, or stay (None)."""
        self.group_norms = torch.zeros(len(groups), device=device)
        """Norm of each group's gradient in the last step, before clipping."""
        self.updates = torch.zeros((), device=device)
        """Steps that were applied."""
        self.group_lrs = torch.zeros(len(groups), device=device)
        """Learning rate of each group in the next update: on the device, so that a captured step
        finds it there."""
        start = 0
        for flat in self.flats:
            if flat in buffered:
                flat.gradient = self.gradient[start : start + flat.size]
                start += flat.size
            self._collect_gradients(flat)
        self.guard = StepGuard(device, spike_factor, stop=on_nonfinite == "stop")

    def _collect_gradients(self, flat: _Flat) -> None:
        pieces = {} if flat.gradient is None else flat.pieces(flat.gradient)
        for name, parameter in flat.group.parameters.items():
            piece = pieces[name].view(parameter.shape) if pieces else None
            if parameter.dtype == torch.float32:
                parameter.grad = piece  # autograd adds into it in place
            else:
                self._narrow[parameter] = piece
                parameter.register_post_accumulate_grad_hook(_weakly(self._collect))
        self._stale = dict(self._narrow)

    def _collect(self, parameter: nn.Parameter) -> None:
        first = parameter in self._stale
        piece = self._stale.pop(parameter, None)
        if self._narrow[parameter] is not None:
            collect(self._narrow[parameter], parameter.grad, add=piece is None)
            parameter.grad = None
        elif not first:
            raise RuntimeError(
                "a second micro-batch in a step: this optimizer was made with accumulates=False"
            )

    def zero_grad(self) -> None:
        """Forget gradients and loss terms of the last step."""
        self._stale = dict(self._narrow)
        for parameter, piece in self._narrow.items():
            if piece is None:
                parameter.grad = None
        for flat in self.flats:
            if flat.group.dtype == torch.float32:
                flat.gradient.zero_()
        self.terms.zero_()

    def _clear_stale(self) -> None:
        """Zeros for parameters that got no gradient in this step."""
        for piece in self._stale.values():
            if piece is not None:
                piece.zero_()
        self._stale = {}

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch, as sharding engines need it; nothing
        here."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss that is divided by the step's global count already."""
        loss.backward()

    def weights_and_gradients(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Name → views of the master weight and of its summed gradient, flat, between the last
        backward and `step`."""
        gradients = self.gradient_views()
        return {
            name: (weight, gradients[name])
            for flat in self.flats
            for name, weight in flat.pieces(flat.master).items()
        }

    def gradients(self) -> dict[str, Tensor]:
        """float32 copies of the summed gradients by name, flat, between the last backward and
        `step`."""
        views = self.gradient_views()
        return {name: view.to(torch.float32, copy=True) for name, view in views.items()}

    def gradient_views(self) -> dict[str, Tensor]:
        """The summed gradients themselves by name, flat, to change between the last backward and
        `step`."""
        self._clear_stale()
        found: dict[str, Tensor] = {}
        for flat in self.flats:
            if flat.gradient is not None:
                found |= flat.pieces(flat.gradient)
            else:
                found |= zip(flat.places, (gradient for _, gradient in flat.gradients()))
        return found

    def step(self, lr: float) -> Outcome:
        """Clip by the global norm and update, unless the guard says no; no host sync.

        Args:
            lr: learning rate before the groups' multipliers.
        """
        self.set_lr(lr)
        return self.update()

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next `update`."""
        for number, group in enumerate(self.groups):
            frozen = self.routers_frozen and group.name.startswith(ROUTER)
            self.group_lrs[number].fill_(0.0 if frozen else lr * group.lr_multiplier)

    @torch.no_grad()
    def update(self) -> Outcome:
        """`step` with the learning rate that was set; the same work on the device every time."""
        self._clear_stale()
        gradients = [flat.gradients() for flat in self.flats]
        norms = [norm([piece for _, piece in pieces]) for pieces in gradients]
        torch.stack(norms, out=self.group_norms)
        total = torch.linalg.vector_norm(self.group_norms)
        outcome = self.guard.judge(total, self.terms)
        keep = 1 - outcome.skipped
        self.updates.add_(keep)
        divisor = torch.ones_like(total)
        if self.clip_norm is not None:
            divisor = torch.clamp(total / self.clip_norm, min=1.0)
        for flat, pieces, lr, seed in zip(self.flats, gradients, self.group_lrs, self.seeds):
            numbers = rates_numbers(
                lr, flat.group.weight_decay, self.betas, self.updates, divisor, keep
            )
            rates = Rates(numbers, self.betas, self.eps, seed)
            for place, gradient in pieces:
                adamw(
                    flat.master[place],
                    None if flat.copy is None else flat.copy[place],
                    flat.exp_avg[place],
                    flat.exp_avg_sq[place],
                    gradient,
                    rates,
                    first=place.start,
                )
        for parameter, piece in self._narrow.items():
            if piece is None:
                parameter.grad = None  # its memory is for the next activations
        return outcome

    def lrs(self, lr: float) -> tuple[float, float | None]:
        """Learning rate of the weights and of the routers (None without routers)."""
        router = [g.lr_multiplier for g in self.groups if g.name.startswith(ROUTER)]
        if not router:
            return lr, None
        return lr, 0.0 if self.routers_frozen else lr * router[0]

    # --- checkpoints ----------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Everything to save, by logical names that know nothing of groups; views to load into.

        `weights/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`: one-dimensional (the tensor of the whole
        model flattened, whichever part of it a process holds), in the dtype they are kept in.
        `adam_step` and `guard/…`: scalars.
        """
        found: dict[str, Tensor] = {}
        for flat in self.flats:
            for kind, buffer in (
                ("weights", flat.master),
                ("exp_avg", flat.exp_avg),
                ("exp_avg_sq", flat.exp_avg_sq),
            ):
                found |= {f"{kind}/{name}": piece for name, piece in flat.pieces(buffer).items()}
        found["adam_step"] = self.updates
        return found | {f"guard/{name}": tensor for name, tensor in self.guard.state().items()}

    def shapes(self) -> dict[str, list[int]]:
        """Parameter name → shape, to undo the flattening of `tensors`."""
        return {
            name: list(parameter.shape)
            for group in self.groups
            for name, parameter in group.parameters.items()
        }

    @contextmanager
    def master_weights(self) -> Iterator[None]:
        """Inside, the model's parameters are their masters, to be filled without rounding: weights
        that start on the grid of bfloat16 would lose their first updates, and several processes,
        whose masters are not rounded, would not train the same model as one."""
        own = [(p, p.data) for group in self.groups for p in group.parameters.values()]
        for flat in self.flats:
            for name, master in flat.pieces(flat.master).items():
                parameter = flat.group.parameters[name]
                parameter.data = master.view(parameter.shape)
        try:
            yield
        finally:
            for parameter, data in own:
                parameter.data = data
            self.loaded()

    @torch.no_grad()
    def loaded(self) -> None:
        """Call it after the tensors of `tensors` were filled: the rest follows them."""
        for flat in self.flats:
            if flat.copy is not None:
                flat.copy.copy_(flat.master)

    def all_finite(self) -> Tensor:
        """Whether all weights and moments are finite: a boolean scalar on the device."""
        # A sum is finite only if every element is (or it overflows, as bad); no mask is built.
        sums = [
            buffer.sum(dtype=torch.float32)
            for flat in self.flats
            for buffer in (flat.master, flat.exp_avg, flat.exp_avg_sq)
        ]
        return torch.isfinite(torch.stack(sums)).all()
