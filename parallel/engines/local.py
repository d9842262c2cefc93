"""One process that holds a whole model: float32 master weights, states and gradients.

Every parameter group lives in flat buffers:

    gradient   float32, one buffer for all groups: one norm, one fill with zeros
    master     one per group: what the optimizer updates. A float32 parameter *is* a piece of it; a
               bfloat16 one is a rounded copy of a float32 master (a step of 6e-4 is lost on a
               bfloat16 weight of 1), or with `optim.storage.weights=bfloat16` its own master,
               and every update is rounded up or down at random so that its mean is exact
    states     those of the optimizer, per group

Parameters that are float32 in a bfloat16 model (the routers) always keep float32 states. Bytes per
parameter of a bfloat16 model with AdamW: 2 + 4 + 8 + 4 of gradient; with bfloat16 weights and
moments 2 + 4 + 4 of gradient.

Gradients of micro-batches are added in float32: a hook moves each bfloat16 gradient into the buffer
as soon as autograd has finished it, so never more than a layer's gradients exist twice. The first
one of a step overwrites the buffer, so nothing is filled with zeros that is written anyway. Where a
step is a single micro-batch (`accumulates=False`) there is nothing to add: bfloat16 gradients stay
where autograd put them until the update reads them there, and the buffer has no place for them.

Shape letters: P elements of one group's flat buffer, padded so that every parameter starts at a
multiple of `ALIGN`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from parallel.engines.base import Engine, Outcome, Values, any_not_finite
from parallel.engines.gradients import collect, norm
from parallel.engines.optimizer import Group, Optimizer, Piece
from parallel.engines.rounding import buffer_seed

# Elements; 256 bytes in float32, 128 in bfloat16: the most that TMA and vector loads ask for.
ALIGN = 64


class _Flat:
    """The flat buffers of one group and the place of each parameter in them."""

    def __init__(self, group: Group, optimizer: Optimizer, seed: int) -> None:
        self.group, self.seed = group, seed
        self.by_matrix = optimizer.granularity == "matrices"
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
        narrow = first.dtype == torch.bfloat16 and optimizer.weights == "bfloat16"
        if first.dtype == torch.float32 or narrow:
            self.master = own
        else:
            self.copy = own
            self.master = own.float()
        self.states = {
            name: torch.zeros(size, dtype=dtype, device=first.device)
            for name, dtype in optimizer.states(group).items()
        }
        self.gradient: Tensor | None = None  # a piece of the buffer for all groups, if there is one

    def gradients(self) -> dict[str, Tensor]:
        """Name → that parameter's summed gradient, flat."""
        if self.gradient is not None:
            return self.pieces(self.gradient)
        found = {}
        for name, parameter in self.group.parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found[name] = parameter.grad.reshape(-1)
        return found

    def pieces(self, flat: Tensor) -> dict[str, Tensor]:
        """Name → that parameter's piece of a flat tensor of this group, one-dimensional."""
        return {name: flat[start : start + count] for name, (start, count) in self.places.items()}

    def update_pieces(self) -> list[Piece]:
        """What the optimizer updates: all parameters as one piece where their gradients lie
        together, else one for each."""
        if self.gradient is not None and not self.by_matrix:
            whole = (self.master, self.gradient, self.states, self.copy)
            return [Piece(*whole, seed=self.seed)]
        found = []
        for name, gradient in self.gradients().items():
            start, count = self.places[name]
            place = slice(start, start + count)
            found.append(
                Piece(
                    self.master[place],
                    gradient,
                    {key: state[place] for key, state in self.states.items()},
                    None if self.copy is None else self.copy[place],
                    self.seed,
                    first=start,
                    matrices=self.group.matrices.get(name),
                    per_rank=count,
                )
            )
        return found


def _weakly(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """A hook that does not keep its engine alive: Python's collector does not see the way from a
    parameter to its hooks, and would keep all that both hold forever."""
    reference = weakref.WeakMethod(method)

    def hook(parameter: nn.Parameter) -> None:
        found = reference()
        if found is not None:
            found(parameter)

    return hook


class LocalEngine(Engine):
    """See `parallel.engines.base.Engine`.

    Building it moves every parameter into the flat buffers (`parameter.data` is replaced), so the
    model must be on its device already and must not be moved or cast afterwards.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Group],
        optimizer: Optimizer,
        *,
        num_terms: int,
        seed: int = 0,
        accumulates: bool = True,
    ) -> None:
        """
        Args:
            groups: disjoint; their parameters may be float32 or bfloat16.
            num_terms: loss terms of a step.
            seed: of stochastic rounding, where weights or states are bfloat16.
            accumulates: False promises that a step is one micro-batch; see the head of the file.

        Raises:
            ValueError: groups that share a parameter.
        """
        device = next(iter(groups[0].parameters.values())).device
        super().__init__(groups, optimizer, device, num_terms)
        self.model = model
        self.flats = [
            _Flat(group, optimizer.of(group), buffer_seed(seed, number))
            for number, group in enumerate(groups)
        ]
        buffered = [f for f in self.flats if accumulates or f.group.dtype == torch.float32]
        self.gradient = torch.zeros(sum(flat.size for flat in buffered), device=device)
        self._stale: dict[nn.Parameter, Tensor] = {}
        """Pieces of the gradient that hold the last step's, by parameters without one in this."""
        self._narrow: dict[nn.Parameter, Tensor | None] = {}
        """Parameters whose gradients are moved to a piece of the buffer, or stay (None)."""
        start = 0
        for flat in self.flats:
            if flat in buffered:
                flat.gradient = self.gradient[start : start + flat.size]
                start += flat.size
            self._collect_gradients(flat)

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
                "a second micro-batch in a step: this engine was made with accumulates=False"
            )

    # --- a step -----------------------------------------------------------------------------------

    def zero_grad(self) -> None:
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

    def gradients(self) -> dict[str, Tensor]:
        self._clear_stale()
        return {name: part for flat in self.flats for name, part in flat.gradients().items()}

    @torch.no_grad()
    def update(self) -> Outcome:
        self._clear_stale()
        pieces = [flat.update_pieces() for flat in self.flats]
        norms = [norm([piece.gradient for piece in these]) for these in pieces]
        torch.stack(norms, out=self.group_norms)
        outcome = self._judge(torch.linalg.vector_norm(self.group_norms))
        for number, these in enumerate(pieces):
            self._apply(number, these)
        for parameter, piece in self._narrow.items():
            if piece is None:
                parameter.grad = None  # its memory is for the next activations
        return outcome

    # --- state ------------------------------------------------------------------------------------

    def parts(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for flat in self.flats:
            for kind, buffer in {"weights": flat.master, **flat.states}.items():
                found |= {f"{kind}/{name}": piece for name, piece in flat.pieces(buffer).items()}
        return found

    def shapes(self) -> dict[str, list[int]]:
        return {
            name: list(parameter.shape)
            for group in self.groups
            for name, parameter in group.parameters.items()
        }

    @torch.no_grad()
    def loaded(self) -> None:
        for flat in self.flats:
            if flat.copy is not None:
                flat.copy.copy_(flat.master)

    @torch.no_grad()
    def fill(self, values: Values) -> None:
        # The masters, without rounding: weights that start on the grid of bfloat16 would lose their
        # first updates, and several processes would not train the same model as one.
        for flat in self.flats:
            for name, master in flat.pieces(flat.master).items():
                master.copy_(values(name, None).reshape(-1))
        self.loaded()

    def check_replicas(self) -> None:
        pass  # there are none

    def all_finite(self) -> Tensor:
        buffers = [b for flat in self.flats for b in (flat.master, *flat.states.values())]
        return ~any_not_finite(buffers, self.device)
