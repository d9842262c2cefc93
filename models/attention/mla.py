"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are made of one narrow latent of each token. A head's key has a second
part, which alone is rotated, and which all heads share. Training expands the latent and is plain
attention, whose keys are wider than its values. Generation keeps only latents and rotated parts; it
multiplies queries by the keys' expansion, and what comes out by the values', and so attends to the
latents themselves as to one head (ibid., appendix C).

Shape letters: B rows, L tokens per row, D model width, H heads, C key width, V value width,
R width of the latent, P rotated width, S places of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.cache import KVCache
from models.attention.cost import AttentionCost
from models.attention.sdpa import Choice, cached_attention, packed_attention, row_attention
from models.config import ModelConfig
from models.norm import RMSNorm
from models.rope import Rotation, rotate

EPS = 1e-6
"""Of the norms of latents, in transformers as in DeepSeek's own code, whatever `rms_norm_eps`."""


class Widths(NamedTuple):
    """Of the parts of one layer."""

    query_latent: int | None
    """Of the latent that queries are made of; None: they are made of the input."""
    latent: int
    plain: int
    """Of a head's query and key, what is not rotated."""
    rotated: int
    value: int

    @property
    def key(self) -> int:
        """Of a head's query and key."""
        return self.plain + self.rotated


@dataclass(frozen=True)
class Latents:
    """Entry of `KVCache`: latent and rotated part of every token, side by side."""

    latents_BSR: Tensor

    def write(self, positions_BL: Tensor, latents_BLR: Tensor) -> None:
        """Store latents at their positions."""
        rows_B1 = torch.arange(positions_BL.shape[0], device=positions_BL.device)[:, None]
        self.latents_BSR[rows_B1, positions_BL] = latents_BLR.to(self.latents_BSR.dtype)


class Expansion(nn.Linear):
    """Latent [..., R] → keys and values of all heads [..., H * (plain + V)], and parts of it alone.

    A module of its own so that a sharding engine gathers the weight whichever way it is used.
    """

    def __init__(self, heads: int, widths: Widths) -> None:
        super().__init__(widths.latent, heads * (widths.plain + widths.value), bias=False)
        self.split = (heads, widths.plain)

    def forward(self, x: Tensor, part: Literal["all", "queries", "values"] = "all") -> Tensor:
        """
        Args:
            part: all: of latents; queries: the unrotated part of queries [B, L, H, plain] to what
                multiplies latents [B, L, H, R]; values: sums of latents [B, L, H, R] to sums of
                values [B, L, H, V].
        """
        if part == "all":
            return F.linear(x, self.weight)
        heads, plain = self.split
        keys_HCR, values_HVR = self.weight.unflatten(0, (heads, -1)).tensor_split((plain,), dim=1)
        if part == "queries":
            return torch.einsum("blhc,hcr->blhr", x, keys_HCR.to(x.dtype))
        return torch.einsum("blhr,hvr->blhv", x, values_HVR.to(x.dtype))


class MultiHeadLatentAttention(nn.Module):
    """The attention of one layer.

    Args:
        layer: its number in the model, which is that of its entry in a cache.
        bias: of the projections to the latents and to the output.
        interleaved: the rotated pairs are neighbours, see `models.rope.rotate`.
        scale: multiplies the scores; None: one over the root of the key width.

    Attributes:
        choice: who computes it, see `models.attention.packed_backend`.
    """

    parameter_kind = "attention"

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        widths: Widths,
        *,
        bias: bool = False,
        interleaved: bool = True,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.layer, self.widths = layer, widths
        self.interleaved = interleaved
        self.scale = widths.key**-0.5 if scale is None else scale
        self.choice: Choice = "pytorch"
        self.rope = config.rope()
        if widths.query_latent is None:
            self.q = nn.Linear(width, self.heads * widths.key, bias=False)
        else:
            self.q_a = nn.Linear(width, widths.query_latent, bias=bias)
            self.q_a_norm = RMSNorm(widths.query_latent, EPS)
            self.q_b = nn.Linear(widths.query_latent, self.heads * widths.key, bias=False)
        self.kv_a = nn.Linear(width, widths.latent + widths.rotated, bias=bias)
        self.kv_a_norm = RMSNorm(widths.latent, EPS)
        self.kv_b = Expansion(self.heads, widths)
        self.o = nn.Linear(self.heads * widths.value, width, bias=bias)

    def cache_entry(
        self, rows: int, capacity: int, device: torch.device | str, dtype: torch.dtype
    ) -> Latents:
        """An empty entry of `KVCache` for this layer."""
        shape = (rows, capacity, self.widths.latent + self.widths.rotated)
        return Latents(torch.zeros(shape, device=device, dtype=dtype))

    def cost(self) -> AttentionCost:
        """What it costs in training."""
        w, heads = self.widths, self.heads
        linear = [m for m in self.modules() if isinstance(m, nn.Linear)]
        return AttentionCost(
            weights=sum(m.weight.numel() for m in linear),
            scores=heads * w.key,
            values=heads * w.value,
            normed=(w.query_latent or 0) + w.latent,
            moved=2 * heads * w.key,
        )

    def forward(
        self,
        x_BLD: Tensor,
        rotation: Rotation,
        cu_seqlens_N1: Tensor | None = None,
        lengths_N: Tensor | None = None,
        cache: KVCache | None = None,
        positions_BL: Tensor | None = None,
    ) -> Tensor:
        """[B, L, D] → [B, L, D]. `positions_BL` are only read together with `cache`."""
        w = self.widths
        q = self.q(x_BLD) if w.query_latent is None else self.q_b(self.q_a_norm(self.q_a(x_BLD)))
        plain_BLHC, turned_BLHP = q.unflatten(-1, (self.heads, w.key)).split(
            (w.plain, w.rotated), dim=-1
        )
        turned_BLHP = rotate(turned_BLHP, rotation, interleaved=self.interleaved)
        latent_BLR, key_BLP = self.kv_a(x_BLD).split((w.latent, w.rotated), dim=-1)
        latent_BLR = self.kv_a_norm(latent_BLR)
        key_BL1P = rotate(key_BLP[:, :, None], rotation, interleaved=self.interleaved)

        entry = None if cache is None else cache.entries[self.layer]
        if entry is not None:
            entry.write(positions_BL, torch.cat([latent_BLR, key_BL1P[:, :, 0]], dim=-1))
        if entry is not None and cache.filled > 0:
            q_BLHR = torch.cat([self.kv_b(plain_BLHC, "queries"), turned_BLHP], dim=-1)
            kept_BS1R = entry.latents_BSR[:, : cache.filled + x_BLD.shape[1], None]
            y_BLHR = cached_attention(
                q_BLHR, kept_BS1R, kept_BS1R[..., : w.latent], positions_BL, self.scale
            )
            y_BLHV = self.kv_b(y_BLHR, "values")
        else:
            keys_BLHC, v_BLHV = (
                self.kv_b(latent_BLR)
                .unflatten(-1, (self.heads, w.plain + w.value))
                .split((w.plain, w.value), dim=-1)
            )
            q_BLHC = torch.cat([plain_BLHC, turned_BLHP], dim=-1)
            k_BLHC = torch.cat([keys_BLHC, key_BL1P.expand(-1, -1, self.heads, -1)], dim=-1)
            if lengths_N is not None:
                y_BLHV = packed_attention(
                    q_BLHC, k_BLHC, v_BLHV, cu_seqlens_N1, lengths_N, self.choice, self.scale
                )
            else:
                y_BLHV = row_attention(q_BLHC, k_BLHC, v_BLHV, self.choice, self.scale)
        return self.o(y_BLHV.flatten(2))
