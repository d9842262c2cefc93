"""The sort behind the Hopper router's top-K, with bit words made here, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from moe.kernels.common.backend import HAVE_TRITON, INTERPRET
from moe.kernels.routing.routing_metadata import RoutingMetadata, routing_metadata_ref

if not (HAVE_TRITON and INTERPRET):
    pytest.skip("kernels on a CPU need Triton's interpreter", allow_module_level=True)

from moe.kernels.hopper.placing import place_pairs


def _bits(expert_TK, padded, groups):
    """words, tile counts: what `gating._gate` leaves of a choice."""
    tile = 32 * groups
    tiles = -(-len(expert_TK) // tile)
    chosen = torch.zeros(tiles * tile, padded, dtype=torch.int64)
    token, k = (expert_TK >= 0).nonzero(as_tuple=True)
    chosen[token, expert_TK[token, k].long()] = 1
    words = (chosen.view(-1, 32, padded) << torch.arange(32)[:, None]).sum(dim=1)
    return words.to(torch.int32), chosen.view(tiles, tile, padded).sum(dim=1).to(torch.uint8)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(
    ("T", "E", "k", "skew"),
    [(300, 128, 8, 0.0), (257, 64, 2, 4.0), (131, 256, 7, 1.0), (128, 96, 4, 9.0), (1, 200, 3, 0)],
)
@pytest.mark.parametrize("masked", [False, True])
def test_places_of_pairs(T, E, k, skew, groups, masked):
    padded = {64: 64, 96: 128, 128: 128}.get(E, 256)
    likely = torch.randn(T, E) + skew * torch.arange(E).flip(0) / E
    expert = likely.topk(k, dim=1).indices.to(torch.int32)
    if masked:
        expert[torch.rand(T) < 0.3] = -1
    words, tile_counts = _bits(expert, padded, groups)
    prob = torch.rand(*tile_counts.shape)
    odd = torch.arange(len(prob), dtype=torch.int32)
    counts, prob_sum, nonfinite, *meta = place_pairs(
        expert, words, tile_counts, prob, odd, E, True, clear=masked
    )
    right = routing_metadata_ref(expert.view(-1), E, k)
    for name, x, y in zip(RoutingMetadata._fields, meta, right, strict=True):
        assert torch.equal(x, y), name
    assert torch.equal(counts, right.offsets_E1.diff())
    torch.testing.assert_close(prob_sum, prob.sum(dim=0)[:E])
    assert nonfinite == odd.sum()
    sums = place_pairs(expert, words, tile_counts, prob, odd, E, False, clear=masked)
    assert torch.equal(sums[0], counts) and len(sums) == 3
