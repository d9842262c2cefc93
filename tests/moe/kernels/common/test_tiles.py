"""Row tiles, configuration tables, descriptors and the choice between TMA and pointers."""

from __future__ import annotations

import pytest
import torch

from moe.kernels.common import tiles, tuning
from moe.kernels.common.backend import HAVE_TRITON, INTERPRET, tl, triton
from moe.kernels.common.row_tiles import RowTiles
from moe.kernels.common.tuning import Config
from moe.kernels.grouped import configs
from moe.kernels.products import row_tiles, up_forward
from tests.moe.kernels.grouped_cases import offsets_of

needs_interpreter = pytest.mark.skipif(
    not (HAVE_TRITON and INTERPRET), reason="needs Triton's interpreter"
)
KERNELS = ["up", "rows", "down_backward", "outer"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_configuration_can_run(kernel: str):
    for c in configs.all_configs(kernel):
        for size in (c.bm, c.bn, c.bk, c.split, c.warps):
            assert size & (size - 1) == 0, f"{kernel} {c}: {size} is no power of two"
        assert c.bn // c.split >= 32, f"{kernel} {c}: too many parts"
        if c.ctas > 1:
            assert c.warps * c.ctas * 32 * 255 <= 65536 + 32 * 255, f"{kernel} {c}: registers"


def test_row_products_of_one_call_share_their_tiles():
    """The tile list is made once: for each size of tile every row product has configurations."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for rows in (1, 100, 10_000, 1_000_000):
            bm = configs.tile_rows(dtype, rows, 16)
            for kernel in ("up", "rows", "down_backward"):
                assert {c.bm for c in configs.candidates(kernel, dtype, bm)} == {bm}


def test_few_rows_take_small_tiles():
    assert configs.tile_rows(torch.bfloat16, 16 * 64, 16) == 128
    assert configs.tile_rows(torch.bfloat16, 16 * 64 - 1, 16) == 64
    assert configs.tile_rows(torch.float32, 10**6, 16) == 64


def test_forced_configurations():
    small, cpu = Config(32, 64, 32), torch.device("cpu")

    def picked():
        return tuning.pick("up", ("x",), configs.candidates("up", torch.float32, 64), print, cpu)

    with tuning.forced(up=small):
        assert picked() == small
        assert configs.tile_rows(torch.bfloat16, 10**6, 2) == 32
        with tuning.forced(outer=Config(16, 32, 16)):
            assert configs.tile_rows(torch.bfloat16, 10**6, 2) == 32
        with tuning.forced(rows=Config(64, 64, 32)), pytest.raises(ValueError, match="disagree"):
            configs.tile_rows(torch.bfloat16, 10**6, 2)
    assert picked() != small


@needs_interpreter
def test_tiles_survive_a_custom_op():
    """Made before, or in the operator: the same tiles, so the same H."""
    offsets = offsets_of([5, 0, 200])
    made = row_tiles(offsets, 205, torch.float32, "triton")
    x, w1 = torch.randn(205, 8), torch.randn(3, 8, 8)
    options = {"activation": "swiglu", "backend": "triton"}
    h, _ = up_forward(x, w1, None, None, offsets, tiles=made, **options)
    again, _ = up_forward(x, w1, None, None, offsets, **options)
    assert torch.equal(h, again)
    halved = RowTiles(*(t // 2 for t in made[:4]), made.rows)
    other, _ = up_forward(x, w1, None, None, offsets, tiles=halved, **options)
    assert not torch.equal(h, other), "given tiles are used"


def test_what_tma_can_address():
    x = torch.empty(8, 16)
    assert tiles.aligned(x)
    assert tiles.aligned(x[::2])
    assert tiles.aligned(x[:, :5])
    assert not tiles.aligned(x[:, 1:5]), "base"
    assert not tiles.aligned(x.T), "last stride"
    assert not tiles.aligned(torch.empty(8, 15)), "row stride"
    assert not tiles.aligned(x[:1].expand(8, 16)), "stride 0"
    assert not tiles.aligned(torch.empty(8 * 16 + 1)[1:].view(8, 16)), "flat buffer"
    assert tiles.aligned(torch.empty(8, 24, dtype=torch.float16))
    assert not tiles.aligned(torch.empty(8, 20, dtype=torch.float16))


@needs_interpreter
def test_pointers_can_be_forced():
    assert tiles.tma_serves(torch.empty(8, 16))
    with tuning.forced(pointers=True):
        assert not tiles.tma_serves(torch.empty(8, 16))
    assert tiles.tma_serves(torch.empty(8, 16))


def test_copies_only_where_needed():
    x = torch.empty(8, 16)
    assert tiles.with_unit_stride(x) is x
    assert tiles.with_unit_stride(x[::2]).data_ptr() == x.data_ptr()
    assert tiles.with_unit_stride(x.T).is_contiguous()
    assert tiles.with_unit_stride(torch.ones(()).expand(4, 8)).is_contiguous()


def test_grid_is_bounded_by_the_tiles():
    cpu = torch.device("cpu")
    assert tiles.grid_size(cpu, Config(64, 64, 32, ctas=2), 100) == 2
    assert tiles.grid_size(cpu, Config(64, 64, 32, ctas=2), 1) == 1
    assert tiles.grid_size(cpu, Config(64, 64, 32), 0) == 1


@triton.jit
def _order_kernel(out_ptr, row_tiles, col_tiles, GROUP: tl.constexpr):
    for t in tl.range(0, row_tiles * col_tiles):
        row, col = tiles.tile_of(t, row_tiles, col_tiles, GROUP)
        tl.store(out_ptr + t, row * 1000 + col)


@needs_interpreter
@pytest.mark.parametrize(("row_tiles", "col_tiles"), [(1, 1), (5, 3), (8, 2), (3, 7)])
def test_every_tile_comes_once_and_columns_share_rows(row_tiles: int, col_tiles: int):
    out = torch.full((row_tiles * col_tiles,), -1, dtype=torch.int32)
    _order_kernel[(1,)](out, row_tiles, col_tiles, GROUP=4)
    want = sorted(r * 1000 + c for r in range(row_tiles) for c in range(col_tiles))
    assert sorted(out.tolist()) == want
    first_group = out[: min(4, row_tiles)].tolist()
    assert first_group == [r * 1000 for r in range(min(4, row_tiles))], "rows first"


@triton.jit
def _look_up_kernel(t, count, row_tiles, expert_ptr, start_ptr, end_ptr, out_ptr):
    e, start, end, col = tiles.look_up(t, count, row_tiles, 2, expert_ptr, start_ptr, end_ptr, 8)
    tl.store(out_ptr, e)
    tl.store(out_ptr + 1, start)
    tl.store(out_ptr + 2, end)
    tl.store(out_ptr + 3, col)


@needs_interpreter
@pytest.mark.parametrize(
    ("counts", "t", "want"),
    [([5, 9], 0, [0, 0, 5, 0]), ([5, 9], 99, [1, 13, 14, 1]), ([0, 0], 0, [-1, 0, 0, 0])],
)
def test_looking_ahead_stays_inside(counts: list[int], t: int, want: list[int]):
    """Past the last tile, and where there is none, the look-up reads no foreign memory."""
    offsets = offsets_of(counts)
    with tuning.forced(up=Config(8, 32, 16)):
        made = row_tiles(offsets, max(sum(counts), 4), torch.float32)
    out = torch.zeros(4, dtype=torch.int32)
    count = int(made.count)
    _look_up_kernel[(1,)](t, 2 * count, count, made.expert_B, made.start_B, made.end_B, out)
    assert out.tolist() == want


@triton.jit
def _ragged_kernel(in_desc, out_desc, start, end, BR: tl.constexpr, BC: tl.constexpr):
    tile = tiles.ragged_load(in_desc, start, end, 0, 8, BR, BC)
    tiles.ragged_store(out_desc, tile + 1, start, end, 8, BR, BC)


@needs_interpreter
def test_ragged_descriptors_stop_at_the_end():
    x = torch.arange(10 * 24, dtype=torch.float32).view(10, 24)
    out = torch.full((10, 24), float("nan"))
    _ragged_kernel[(1,)](
        tiles.ragged_descriptor(x, [8, 8]), tiles.ragged_descriptor(out, [8, 8]), 2, 5, BR=8, BC=8
    )
    assert torch.equal(out[2:5, 8:16], x[2:5, 8:16] + 1)
    out[2:5, 8:16] = float("nan")
    assert out.isnan().all()
