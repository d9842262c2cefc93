"""Latent attention: kernels that know one head width, a cache of latents, heads of two widths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.attention import packed_attention, row_attention, sdpa
from models.attention.mla import MultiHeadLatentAttention
from models.build import build_model
from tests.models.tiny import randomise_buffers_and_norms, tiny_config, tokens

LENGTHS = torch.tensor([4, 2, 6])
ENDS = torch.tensor([0, 4, 6, 12], dtype=torch.int32)


def qkv(key: int, value: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 6, 3, key), (2, 6, 3, key), (2, 6, 3, value)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def one_width(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float | None) -> Tensor:
    """What a kernel does that takes heads of one width only."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    return torch.ops.tessera.document_attention(q, k, v, ends.diff().long(), scale)


def pick_flash4(monkeypatch) -> None:
    def kernel(q, k, v, ends, longest, scale=None):
        assert longest >= ends.diff().max()
        return one_width(q, k, v, ends, scale)

    monkeypatch.setattr(sdpa, "flash4", kernel)
    monkeypatch.setattr(sdpa, "packed_backend", lambda *_: "flash4")


def pick_varlen(monkeypatch, options: tuple[str, ...]) -> None:
    """PyTorch's kernel with the options that it has in one version."""

    def kernel(q, k, v, ends, same_ends, longest, same_longest, **given):
        assert set(given) <= set(options) and given.get("window_size", (-1, 0)) == (-1, 0)
        return one_width(q, k, v, ends, given.get("scale"))

    monkeypatch.setattr(sdpa, "varlen_attn", kernel)
    monkeypatch.setattr(sdpa, "_VARLEN", frozenset(options))
    monkeypatch.setattr(sdpa, "packed_backend", lambda *_: "flash")


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize(("key", "value"), [(8, 5), (5, 8), (8, 8)])
@pytest.mark.parametrize("kernel", ["flash4", "varlen", "varlen of PyTorch 2.10"])
def test_kernels_of_one_width_compute_two(monkeypatch, kernel, key, value, scale) -> None:
    parts, weights = qkv(key, value), torch.randn(2, 6, 3, value, dtype=torch.float64)

    def results() -> tuple[Tensor, ...]:
        y = packed_attention(*parts, ENDS, LENGTHS, scale=scale)
        return (y, *torch.autograd.grad((y * weights).sum(), parts))

    expected = results()
    if kernel == "flash4":
        pick_flash4(monkeypatch)
    else:
        new = ("scale", "enable_gqa", "window_size")
        pick_varlen(monkeypatch, new if kernel == "varlen" else ("is_causal",))
    assert expected[0].shape == (2, 6, 3, value)
    torch.testing.assert_close(results(), expected, rtol=1e-12, atol=1e-12)


def test_rows_go_through_a_kernel_of_one_width(monkeypatch) -> None:
    parts = qkv(8, 5)
    expected = row_attention(*parts, scale=0.3)
    assert (expected - row_attention(*parts)).abs().max() > 1e-3
    pick_flash4(monkeypatch)
    torch.testing.assert_close(row_attention(*parts, "flash4", 0.3), expected)


def test_the_operator_of_documents_takes_two_widths() -> None:
    q, k, v = (part.flatten(0, 1) for part in qkv(8, 5))
    torch.library.opcheck(
        torch.ops.tessera.document_attention,
        (q, k, v, LENGTHS, 0.4),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("case", ["deepseek_v3", "deepseek_v3_plain"])
def test_generation_keeps_latents_alone(case: str) -> None:
    """Token by token as all at once, from what is as wide as a latent and one rotated part."""
    model = build_model(tiny_config(case), dtype=torch.float64, seed=3).eval()
    randomise_buffers_and_norms(model)
    config, tokens_BL = model.config, tokens(model.config, 2, 12)
    cache = model.new_cache(2, 12, "cpu", torch.float64)
    wide = config.kv_lora_rank + config.qk_rope_head_dim
    assert {entry.latents_BSR.shape for entry in cache.entries} == {(2, 12, wide)}
    with torch.no_grad():
        expected = model(tokens_BL, logits=True).logits
        parts = [tokens_BL[:, :5], tokens_BL[:, 5:6], tokens_BL[:, 6:9], tokens_BL[:, 9:]]
        found = [model(part, cache=cache, logits=True).logits for part in parts]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-10, atol=1e-10)


def test_attention_is_picked_where_there_are_kinds(monkeypatch) -> None:
    model = build_model(tiny_config("deepseek_v3"), device="meta", attention="flash4")
    kinds = [m for m in model.modules() if isinstance(m, MultiHeadLatentAttention)]
    assert [m.choice for m in kinds] == ["flash4"] * 3
