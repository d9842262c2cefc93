"""A function of whole matrices whose parts lie on several ranks, each matrix computed by one rank.

    updates = on_matrices(pieces, momenta, orthogonalised)

A matrix that one rank holds whole, as experts mostly are, stays where it is. Any other one goes to
an owner, which computes it for all; its parts come from the ranks that hold them and go back there:
two all-to-alls, of which each rank sends and receives about its share. Owners are chosen so that
all ranks have about as much to compute. One process takes the same way and sends nothing.

Matrices of one shape are given to the function together, so the number of launches depends on the
number of shapes, not of matrices.

Shape letters: B matrices of one shape, M rows, N columns, P elements of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe.matrices import Matrices
from parallel.engines.optimizer import Piece

Function = Callable[[Tensor], Tensor]

# Elements of a process in one batch of pieces (128 MiB in float32): what lies beside the model
# while they are updated is some of these.
BATCH = 1 << 25


class _Form(NamedTuple):
    """What blocks must have in common to be computed together."""

    rows: int
    columns: int
    interleaved: int


class _Run(NamedTuple):
    """Blocks of one form behind one another, which this rank holds whole."""

    piece: int
    start: int
    """First element in this rank's part."""
    count: int
    form: _Form


class _Share(NamedTuple):
    """What a rank holds of a block that is cut."""

    rank: int
    start: int
    """First element in that rank's part."""
    size: int


@dataclass(frozen=True)
class _Cut:
    """A block that several ranks hold parts of."""

    piece: int
    form: _Form
    owner: int
    shares: tuple[_Share, ...]
    """In the order of the elements."""

    def of(self, rank: int) -> _Share | None:
        return next((share for share in self.shares if share.rank == rank), None)


class _Plan(NamedTuple):
    runs: tuple[_Run, ...]
    cuts: tuple[_Cut, ...]
    """The same on all ranks."""


@lru_cache(maxsize=4096)
def _plan(forms: tuple[tuple[Matrices, int], ...], ranks: int, rank: int) -> _Plan:
    """
    Args:
        forms: of each piece: its parameter's matrices, and the elements of each rank's part.
    """
    runs: list[_Run] = []
    cuts: list[tuple[int, _Form, tuple[_Share, ...]]] = []
    for piece, (matrices, per_rank) in enumerate(forms):
        first = 0
        for rows, size in zip(matrices.rows, matrices.sizes):
            form = _Form(rows, matrices.columns, matrices.interleaved)
            holders = range(first // per_rank, (first + size - 1) // per_rank + 1)
            if len(holders) > 1:
                edges = [max(first, holder * per_rank) for holder in holders] + [first + size]
                shares = tuple(
                    _Share(holder, a - holder * per_rank, b - a)
                    for holder, a, b in zip(holders, edges, edges[1:])
                )
                cuts.append((piece, form, shares))
            elif holders[0] == rank:
                start, last = first - rank * per_rank, runs[-1] if runs else None
                if last is not None and (last.piece, last.form) == (piece, form):
                    if last.start + last.count * size == start:
                        runs[-1] = last._replace(count=last.count + 1)
                        first += size
                        continue
                runs.append(_Run(piece, start, 1, form))
            first += size
    owners = _owners([form for _, form, _ in cuts], ranks)
    found = [_Cut(piece, form, owner, shares) for (piece, form, shares), owner in zip(cuts, owners)]
    return _Plan(tuple(runs), tuple(found))


def _owners(forms: Sequence[_Form], ranks: int) -> list[int]:
    """The rank of each block: the largest first, always to the rank with the least work so far."""

    def work(form: _Form) -> int:
        rows = form.rows // form.interleaved
        return form.rows * form.columns * min(rows, form.columns)

    loads, owners = [0] * ranks, [0] * len(forms)
    for number in sorted(range(len(forms)), key=lambda number: -work(forms[number])):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += work(forms[number])
    return owners


def batches(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """Pieces behind one another, at most about `BATCH` elements of a process in each; the same on
    all ranks that share the parameters. A piece that is larger and that no other rank shares is cut
    between its blocks."""
    pieces = [part for piece in pieces for part in _cut_in_parts(piece)]
    first, elements = 0, 0
    for number, piece in enumerate(pieces):
        if number > first and elements + piece.per_rank > BATCH:
            yield pieces[first:number]
            first, elements = number, 0
        elements += piece.per_rank
    if pieces:
        yield pieces[first:]


def _cut_in_parts(piece: Piece) -> Iterator[Piece]:
    if piece.ranks is not None or piece.per_rank <= BATCH:
        yield piece
        return
    sizes, first = piece.matrices.sizes, 0
    while first < len(sizes):
        last, start = first + 1, sum(sizes[:first])
        while last < len(sizes) and sum(sizes[first : last + 1]) <= BATCH:
            last += 1
        count = sum(sizes[first:last])
        part = slice(start, start + count)
        yield replace(
            piece,
            weight=piece.weight[part],
            gradient=piece.gradient[part],
            states={name: state[part] for name, state in piece.states.items()},
            copy=None if piece.copy is None else piece.copy[part],
            first=piece.first + start,
            start=piece.start + start,
            matrices=piece.matrices._replace(rows=piece.matrices.rows[first:last]),
            per_rank=count,
        )
        first = last


def on_matrices(
    pieces: Sequence[Piece],
    parts: Sequence[Tensor],
    function: Function,
    live: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """`function` of the matrices of some pieces; all ranks that share them call it alike.

    Args:
        pieces: of one group, on one device; no more than `batches` gives at once.
        parts: [P] of each piece, in one dtype: this rank's elements of the matrices.
        function: [B, M, N] → [B, M, N], each matrix by itself; called with matrices of zeros too.
        live: [P] of each piece. A block of matrices whose elements here are all zero gives zeros:
            what got no gradient is not moved.

    Returns:
        [P] of each piece in the dtype that the function gives, where the parts are.
    """
    group = pieces[0].ranks
    ranks = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    forms = tuple((piece.matrices, piece.per_rank) for piece in pieces)
    plan = _plan(forms, ranks, rank)
    home, device = parts[0].device, pieces[0].device or parts[0].device
    parts = [part.to(device) for part in parts]
    live = None if live is None else [elements.to(device) for elements in live]

    rows: dict[_Form, list[tuple[Tensor, Tensor | None]]] = {}
    for run in plan.runs:
        size = run.form.rows * run.form.columns
        place = slice(run.start, run.start + run.count * size)
        alive = None if live is None else live[run.piece][place].view(run.count, size).any(dim=1)
        rows.setdefault(run.form, []).append((parts[run.piece][place].view(run.count, size), alive))
    alive_F = None if live is None or not plan.cuts else _alive(plan.cuts, live, rank, group)
    own = [number for number, cut in enumerate(plan.cuts) if cut.owner == rank]
    for number, block in zip(own, _to_owners(plan.cuts, parts, rank, ranks, group)):
        alive = None if alive_F is None else alive_F[number : number + 1]
        rows.setdefault(plan.cuts[number].form, []).append((block.view(1, -1), alive))

    results = {form: iter(_computed(form, blocks, function)) for form, blocks in rows.items()}
    found: list[list[tuple[int, Tensor]]] = [[] for _ in pieces]
    for run in plan.runs:
        found[run.piece].append((run.start, next(results[run.form]).reshape(-1)))
    blocks = [next(results[plan.cuts[number].form]).reshape(-1) for number in own]
    for piece, start, share in _to_holders(plan.cuts, blocks, parts[0], rank, ranks, group):
        found[piece].append((start, share))
    whole = []
    for these, part in zip(found, parts):
        flats = [flat for _, flat in sorted(these, key=lambda item: item[0])]
        whole.append((torch.cat(flats) if flats else part).to(home))
    return whole


def _computed(
    form: _Form, blocks: Sequence[tuple[Tensor, Tensor | None]], function: Function
) -> Sequence[Tensor]:
    """`function` of all blocks [count, elements] of a form at once; as they came."""
    turns, rows = form.interleaved, form.rows // form.interleaved
    counts = [len(block) for block, _ in blocks]
    x = torch.cat([block for block, _ in blocks]) if len(blocks) > 1 else blocks[0][0]
    x = x.view(-1, rows, turns, form.columns).transpose(1, 2).reshape(-1, rows, form.columns)
    y = function(x).view(-1, turns, rows, form.columns)
    if blocks[0][1] is not None:
        y = y * torch.cat([alive for _, alive in blocks]).view(-1, 1, 1, 1)
    return y.transpose(1, 2).reshape(sum(counts), -1).split(counts)


def _alive(
    cuts: Sequence[_Cut], live: Sequence[Tensor], rank: int, group: dist.ProcessGroup | None
) -> Tensor:
    """Whether each cut block has an element other than zero, on any rank."""
    none = torch.zeros((), dtype=torch.bool, device=live[0].device)
    seen = []
    for cut in cuts:
        share = cut.of(rank)
        seen.append(none if share is None else live[cut.piece].narrow(0, *share[1:]).any())
    alive_F = torch.stack(seen).float()
    dist.all_reduce(alive_F, dist.ReduceOp.MAX, group=group)
    return alive_F > 0


def _to_owners(
    cuts: Sequence[_Cut],
    parts: Sequence[Tensor],
    rank: int,
    ranks: int,
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """Whole, the cut blocks that this rank owns, flat."""
    if not cuts:
        return []
    send: list[list[Tensor]] = [[] for _ in range(ranks)]
    receive: list[list[int]] = [[] for _ in range(ranks)]
    for cut in cuts:
        mine = cut.of(rank)
        if mine is not None:
            send[cut.owner].append(parts[cut.piece].narrow(0, *mine[1:]))
        if cut.owner == rank:
            for share in cut.shares:
                receive[share.rank].append(share.size)
    shares = _exchange(send, receive, parts[0], group)
    return [
        torch.cat([next(shares[share.rank]) for share in cut.shares])
        for cut in cuts
        if cut.owner == rank
    ]


def _to_holders(
    cuts: Sequence[_Cut],
    blocks: Sequence[Tensor],
    like: Tensor,
    rank: int,
    ranks: int,
    group: dist.ProcessGroup | None,
) -> Iterator[tuple[int, int, Tensor]]:
    """(piece, first element in this rank's part, elements) of what this rank holds of the cut
    blocks; `blocks` are those that it owns."""
    if not cuts:
        return
    send: list[list[Tensor]] = [[] for _ in range(ranks)]
    receive: list[list[int]] = [[] for _ in range(ranks)]
    of_owner = iter(blocks)
    for cut in cuts:
        if cut.owner == rank:
            sizes = [share.size for share in cut.shares]
            for share, elements in zip(cut.shares, next(of_owner).split(sizes)):
                send[share.rank].append(elements)
        mine = cut.of(rank)
        if mine is not None:
            receive[cut.owner].append(mine.size)
    shares = _exchange(send, receive, blocks[0] if blocks else like, group)
    for cut in cuts:
        mine = cut.of(rank)
        if mine is not None:
            yield cut.piece, mine.start, next(shares[cut.owner])


def _exchange(
    send: Sequence[Sequence[Tensor]],
    receive: Sequence[Sequence[int]],
    like: Tensor,
    group: dist.ProcessGroup | None,
) -> list[Iterator[Tensor]]:
    """Flat tensors to every rank, and those of given sizes from every rank."""
    into, out = [sum(sizes) for sizes in receive], [tensor for row in send for tensor in row]
    flat = torch.cat(out) if out else like.new_empty(0)
    got = flat.new_empty(sum(into))
    splits = [sum(tensor.numel() for tensor in row) for row in send]
    dist.all_to_all_single(got, flat, into, splits, group=group)
    return [iter(part.split(list(sizes))) for part, sizes in zip(got.split(into), receive)]
