"""Attention: documents do not see each other, positions rotate, the cache continues."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models import Documents
from models.attention import causal_attention, packed_attention
from models.build import build_model
from models.norm import RMSNorm
from models.rope import rotate
from moe.config import RouterConfig
from tests.models.tiny import CASES, DENSE_FAMILIES, FAMILIES, next_tokens, tiny_config, tokens


def qkv(rows: int, length: int, dtype=torch.float64, heads=4, kv_heads=2, width=8) -> list[Tensor]:
    shapes = [(rows, length, h, width) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


# ------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_packed_attention_is_a_masked_softmax(dtype: torch.dtype) -> None:
    q, k, v = qkv(2, 9, dtype)
    lengths_N = torch.tensor([4, 1, 4, 9])
    y = packed_attention(q, k, v, None, lengths_N)
    document_T = torch.arange(4).repeat_interleave(lengths_N)
    place_T = torch.arange(18)
    seen_TT = (document_T[:, None] == document_T) & (place_T[:, None] >= place_T)
    flat = [part.flatten(0, 1).transpose(0, 1) for part in (q, k, v)]
    flat[1:] = [part.repeat_interleave(2, dim=0) for part in flat[1:]]
    scores = (flat[0] @ flat[1].transpose(1, 2) / math.sqrt(8)).masked_fill(~seen_TT, -math.inf)
    expected = (scores.softmax(-1) @ flat[2]).transpose(0, 1).view(q.shape)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)

    weights = torch.randn_like(y)
    mine = torch.autograd.grad((y * weights).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_document_operator_is_registered_fully() -> None:
    q, k, v = (part.flatten(0, 1) for part in qkv(1, 7))
    torch.library.opcheck(
        torch.ops.tessera.document_attention,
        (q, k, v, torch.tensor([3, 4])),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("case", CASES)
def test_routed_documents_are_isolated(case: str) -> None:
    """With K experts per token: equal to rounding, and equal to the document alone."""
    config = tiny_config(case)
    model = build_model(config, dtype=torch.float64, seed=5)
    documents = Documents.from_lengths([5, 11])
    tokens_BL = tokens(config, 1, 16)
    changed_BL = tokens_BL.clone()
    changed_BL[0, :5] = tokens(config, 1, 5, seed=9)
    with torch.no_grad():
        packed = model(tokens_BL, documents=documents, logits=True).logits[:, 5:]
        after = model(changed_BL, documents=documents, logits=True).logits[:, 5:]
        alone = model(tokens_BL[:, 5:], logits=True).logits
    torch.testing.assert_close(after, packed, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(alone, packed, rtol=1e-11, atol=1e-11)


def test_whole_rows_as_documents_are_plain_causal_attention() -> None:
    q, k, v = qkv(3, 6)
    packed = packed_attention(q, k, v, None, torch.tensor([6, 6, 6]))
    assert torch.equal(packed, causal_attention(q, k, v))


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_are_isolated(family: str) -> None:
    """Two documents in one row; changing the first leaves every bit of the second.

    Every token uses all experts here: with fewer, the first document changes how many tokens share
    an expert's matrix product with the second, and with that the product's last bits.
    """
    more = {} if family in DENSE_FAMILIES else {"num_experts_per_tok": 8}
    grouped = family in ("glm4_moe", "deepseek_v3")
    more |= {"n_group": 1, "topk_group": 1} if grouped else {}
    config = tiny_config(family, **more)
    # so no bias has anything to balance
    model = build_model(config, seed=5, router=RouterConfig(bias=None))
    documents = Documents.from_lengths([5, 11])
    tokens_BL = tokens(config, 1, 16)
    changed_BL = tokens_BL.clone()
    changed_BL[0, :5] = tokens(config, 1, 5, seed=9)
    with torch.no_grad():
        packed = model(tokens_BL, documents=documents, logits=True).logits
        after = model(changed_BL, documents=documents, logits=True).logits
        alone = model(tokens_BL[:, 5:], logits=True).logits
        leaking = model(changed_BL, logits=True).logits  # positions alone would not do
    assert torch.equal(packed[:, 5:], after[:, 5:])
    assert not torch.equal(packed[:, :5], after[:, :5])
    torch.testing.assert_close(packed[:, 5:], alone, rtol=1e-5, atol=1e-5)
    assert (packed[:, 5:] - leaking[:, 5:]).abs().max() > 1e-3


def test_gradient_of_one_document_does_not_reach_another() -> None:
    config = tiny_config("mixtral")
    model = build_model(config, dtype=torch.float64)
    tokens_BL = torch.arange(3, 19)[None]
    labels_BL = torch.full_like(tokens_BL, -100)
    labels_BL[0, 8:15] = tokens_BL[0, 9:16]
    model(
        tokens_BL, labels_BL=labels_BL, documents=Documents.from_lengths([8, 8])
    ).loss_sum.backward()
    grad = model.embed.weight.grad
    assert torch.equal(grad[3:11], torch.zeros_like(grad[3:11]))
    assert (grad[11:18].norm(dim=1) > 0).all()


def test_loss_counts_only_targets_inside_documents() -> None:
    """Documents [5, 6, 7] and [8, 9] in one row: 5→6, 6→7 and 8→9, each shifted once."""
    config = tiny_config("olmoe")
    model = build_model(config)
    row = torch.tensor([[5, 6, 7, 8, 9]])
    labels = torch.tensor([[6, 7, -100, 9, -100]])
    out = model(row, labels_BL=labels, documents=Documents.from_lengths([3, 2]), logits=True)
    logp = out.logits.log_softmax(-1)[0]
    expected = -(logp[0, 6] + logp[1, 7] + logp[3, 9])
    torch.testing.assert_close(out.loss_sum, expected)


def test_positions_restart_with_every_document() -> None:
    documents = Documents.from_lengths([3, 1, 4])
    assert documents.positions().tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert documents.cu_seqlens_N1.tolist() == [0, 3, 4, 8]
    assert documents.cu_seqlens_N1.dtype == torch.int32


def test_wrong_documents_are_refused() -> None:
    model = build_model(tiny_config("mixtral"))
    two_rows = tokens(model.config, 2, 6)
    with pytest.raises(ValueError, match="at least one token"):
        Documents.from_lengths([3, 0, 3])
    with pytest.raises(ValueError, match="hold 5 tokens, the batch 2 x 6"):
        model(two_rows, documents=Documents.from_lengths([5]))
    with pytest.raises(ValueError, match="crosses from row 0 into row 1"):
        model(two_rows, documents=Documents.from_lengths([5, 7]))


# ------------------------------------------------------------------------------------- cache


@pytest.mark.parametrize("case", CASES)
def test_cache_continues_where_it_stopped(case: str) -> None:
    config = tiny_config(case)
    model = build_model(config, dtype=torch.float64).eval()
    tokens_BL = tokens(config, 2, 12)
    with torch.no_grad():
        whole = model(tokens_BL, logits=True).logits
        cache = model.new_cache(2, 12, "cpu", torch.float64)
        parts = [
            model(tokens_BL[:, start:end], cache=cache, logits=True).logits
            for start, end in ((0, 5), (5, 6), (6, 9), (9, 12))
        ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="holds 12 tokens per row; 12 are used"):
        model(tokens_BL[:, :1], cache=cache)


def test_prompts_of_different_lengths_share_a_cache() -> None:
    config = tiny_config("qwen3_moe")
    model = build_model(config, dtype=torch.float64).eval()
    tokens_BL = tokens(config, 2, 9)
    lengths = (3, 6)
    valid_BL = torch.arange(6) < torch.tensor(lengths)[:, None]
    cache = model.new_cache(2, 9, "cpu", torch.float64)
    with torch.no_grad():
        last = [
            model(tokens_BL[:, :6], cache=cache, valid_BL=valid_BL, logits="last").logits,
        ]
        for step in range(3):
            place_B1 = torch.tensor(lengths)[:, None] + step
            last.append(model(tokens_BL.gather(1, place_B1), cache=cache, logits="last").logits)
        for row, length in enumerate(lengths):
            alone = model(tokens_BL[row : row + 1, : length + 3], logits=True).logits[0]
            mine = torch.stack([part[row] for part in last])
            torch.testing.assert_close(mine, alone[length - 1 :], rtol=1e-10, atol=1e-10)


def test_documents_and_cache_exclude_each_other() -> None:
    model = build_model(tiny_config("mixtral"))
    cache = model.new_cache(1, 8, "cpu", torch.float32)
    with pytest.raises(ValueError, match="cannot be packed"):
        model(
            torch.ones(1, 4, dtype=torch.int64), documents=Documents.from_lengths([4]), cache=cache
        )


# ------------------------------------------------------------------------------------- rope, norm


def test_rotation_depends_on_distance_only() -> None:
    config = tiny_config("mixtral", rope_theta=100.0)
    rope = config.attention(0).rope
    x = torch.randn(1, 1, 1, 16, dtype=torch.float64)
    y = torch.randn(1, 1, 1, 16, dtype=torch.float64)

    def score(at: int, other: int) -> Tensor:
        moved = [rotate(v, rope(torch.tensor([[p]]))) for v, p in ((x, at), (y, other))]
        return (moved[0] * moved[1]).sum()

    torch.testing.assert_close(score(7, 3), score(14, 10), rtol=1e-6, atol=1e-6)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3
    torch.testing.assert_close(score(5, 5), (x * y).sum(), rtol=1e-6, atol=1e-6)


def test_linear_scaling_divides_positions() -> None:
    plain = tiny_config("qwen3_moe").attention(0).rope
    scaling = {"rope_type": "linear", "factor": 4}
    scaled = tiny_config("qwen3_moe", rope_scaling=scaling).attention(0).rope
    positions = torch.arange(8)[None]
    torch.testing.assert_close(scaled(positions * 4), plain(positions))


def test_partial_rotation_leaves_the_rest() -> None:
    config = tiny_config("glm4_moe")
    x = torch.randn(1, 5, 2, 16)
    y = rotate(x, config.attention(0).rope(torch.arange(5)[None]))
    assert torch.equal(y[..., 8:], x[..., 8:])
    assert not torch.equal(y[:, 1:, :, :8], x[:, 1:, :, :8])


def test_rotation_of_bf16_is_computed_wide() -> None:
    x = torch.randn(1, 60, 2, 16).bfloat16()
    rotation = tiny_config("mixtral").attention(0).rope(torch.arange(60)[None] + 30_000)
    y = rotate(x, rotation)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, rotate(x.double(), rotation).bfloat16(), rtol=1e-2, atol=1e-2)
    assert (y == rotate(x.double(), rotation).bfloat16()).float().mean() > 0.999


def test_norm_sums_squares_wide() -> None:
    norm = RMSNorm(64, 1e-6)
    x = torch.full((1, 64), 3e-3)
    x[0, 0] = 300.0
    y = norm(x.bfloat16())
    assert y.dtype == torch.bfloat16
    wide = x.bfloat16().double()
    expected = wide / (wide.square().mean() + 1e-6).sqrt()
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=0)
    # weights in fp32, activations in bf16, as under autocast: only the result is rounded
    with torch.no_grad():
        norm.weight.uniform_(1.001, 1.003)
    x = torch.randn(50, 64).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
    assert (norm(x) == exact.bfloat16()).float().mean() > 0.99
    assert norm(x.half()).dtype == torch.float16
    assert norm.double()(x.double()).dtype == torch.float64


def test_clipping_bounds_queries_keys_and_values() -> None:
    config = tiny_config("olmoe", clip_qkv=0.01)
    attention = config.attention(0).double()
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    y = attention(x, attention.rope(torch.arange(6)[None]))
    mixed = F.linear(torch.full((1, 32), 0.01, dtype=torch.float64), attention.o.weight.abs())
    assert (y.abs() <= mixed + 1e-12).all()


def test_padding_at_the_end_changes_nothing() -> None:
    """Neither the other tokens' logits nor the statistics depend on padding or its content."""
    config = tiny_config("glm4_moe")
    model = build_model(config, dtype=torch.float64)
    tokens_BL = tokens(config, 2, 10)
    padded = torch.cat([tokens_BL, tokens(config, 2, 6, seed=4)], dim=1)
    other = torch.cat([tokens_BL, tokens(config, 2, 6, seed=5)], dim=1)
    valid_BL = (torch.arange(16) < 10).expand(2, 16)
    outs = []
    for row_tokens, valid in ((tokens_BL, None), (padded, valid_BL), (other, valid_BL)):
        labels = F.pad(next_tokens(tokens_BL), (0, row_tokens.shape[1] - 10), value=-100)
        out = model(row_tokens, labels_BL=labels, valid_BL=valid, logits="last")
        outs.append(out)
    for out in outs[1:]:
        torch.testing.assert_close(out.loss_sum, outs[0].loss_sum, rtol=1e-12, atol=0)
        torch.testing.assert_close(out.logits, outs[0].logits, rtol=1e-10, atol=1e-10)
        assert torch.equal(out.router.counts_E, outs[0].router.counts_E)
        torch.testing.assert_close(out.router.prob_sum_E, outs[0].router.prob_sum_E)
