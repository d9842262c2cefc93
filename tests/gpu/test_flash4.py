"""FlashAttention-4 on a GPU that it supports, against float64 and beside PyTorch's kernels."""

import pytest
import torch

from models.attention import packed_attention, row_attention
from models.attention.flash4 import fits, installed
from models.documents import Documents
from tests.gpu.test_models import error

pytestmark = pytest.mark.skipif(
    installed() is None or not torch.cuda.is_available(), reason="needs flash-attn-4 and a GPU"
)
LENGTHS = [1, 700, 323, 1024, 512, 512, *[1] * 24, 1000]  # 4 rows of 1024


def inputs(heads: int, kv_heads: int, width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(heads + kv_heads + width)
    shapes = [(4, 1024, count, width) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def run(parts: list[torch.Tensor], choice: str, documents: Documents | None):
    parts = [part.detach().clone().requires_grad_() for part in parts]
    if documents is None:
        y = row_attention(*parts, choice)
    else:
        y = packed_attention(*parts, documents.cu_seqlens_N1, documents.lengths_N, choice)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (y * weights.to(y)).sum().backward()
    return [y.detach(), *(part.grad for part in parts)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(8, 8, 64), (8, 2, 128), (4, 1, 96)])
@pytest.mark.parametrize("packed", [True, False])
def test_flash4_equals_float64(heads, dtype, packed):
    exact = inputs(*heads)
    rounded = [part.to("cuda", dtype) for part in exact]
    documents = Documents.from_lengths(LENGTHS) if packed else None
    want = run([part.double().cpu() for part in rounded], "pytorch", documents)
    moved = None if documents is None else documents.to("cuda")
    assert fits(torch.device("cuda"), dtype, heads[2])
    got, theirs = run(rounded, "flash4", moved), run(rounded, "pytorch", moved)
    for mine, other, reference in zip(got, theirs, want, strict=True):
        assert mine.dtype == dtype
        # as good as PyTorch's, up to a little
        assert error(mine, reference) < 1.2 * error(other, reference) + 1e-4


def test_flash4_gives_the_same_bits_again():
    parts = [part.to("cuda", torch.bfloat16) for part in inputs(8, 2, 128)]
    documents = Documents.from_lengths(LENGTHS).to("cuda")
    first = run(parts, "flash4", documents)
    for _ in range(5):
        for before, after in zip(first, run(parts, "flash4", documents), strict=True):
            assert torch.equal(before, after)


def test_flash4_compiles_without_a_break_and_without_a_sync():
    parts = [part.to("cuda", torch.bfloat16) for part in inputs(8, 2, 64)]
    documents = Documents.from_lengths(LENGTHS).to("cuda")
    plain = run(parts, "flash4", documents)
    ends, lengths = documents.cu_seqlens_N1, documents.lengths_N
    compiled = torch.compile(
        lambda q, k, v: packed_attention(q, k, v, ends, lengths, "flash4") * 1.0, fullgraph=True
    )
    leaves = [part.detach().clone().requires_grad_() for part in parts]
    compiled(*leaves)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = compiled(*leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(y.detach(), plain[0])


def test_flash4_in_a_cuda_graph():
    parts = [part.to("cuda", torch.bfloat16) for part in inputs(4, 4, 64)]
    documents = Documents.from_lengths(LENGTHS).to("cuda")
    ends, lengths = documents.cu_seqlens_N1, documents.lengths_N
    want = packed_attention(*parts, ends, lengths, "flash4")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = packed_attention(*parts, ends, lengths, "flash4")
    y.zero_()
    graph.replay()
    assert torch.equal(y, want)


def test_it_takes_no_float32():
    assert not fits(torch.device("cuda"), torch.float32, 64)
