"""Causal self-attention with grouped queries (Ainslie et al., arXiv 2305.13245), QK-norm and RoPE.

Shape letters: B rows, L tokens per row, D model width, H query heads, G key/value heads, C head
width, N documents.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from models.attention.cache import KeysValues, KVCache
from models.attention.cost import AttentionCost
from models.attention.sdpa import Choice, cached_attention, packed_attention, row_attention
from models.config import ModelConfig
from models.norm import RMSNorm
from models.rope import Rotation, rotate


class GroupedQueryAttention(nn.Module):
    """The attention of one layer.

    Args:
        layer: its number in the model, which is that of its entry in a cache.
        qk_norm: RMSNorm of queries and keys: on each head, over the whole projection, or none.
        bias: of the query, key and value projections.
        output_bias: of the output projection.
        clip: clamp queries, keys and values to ±clip before RoPE.

    Attributes:
        choice: who computes it, see `models.attention.packed_backend`.
    """

    parameter_kind = "attention"

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        qk_norm: Literal["none", "head", "full"] = "none",
        bias: bool = False,
        output_bias: bool = False,
        clip: float | None = None,
    ) -> None:
        super().__init__()
        width = config.hidden_size
        self.layer, self.qk_norm, self.clip = layer, qk_norm, clip
        self.choice: Choice = "pytorch"
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.rope = config.rope()
        self.q = nn.Linear(width, self.heads * self.head_dim, bias=bias)
        self.k = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o = nn.Linear(self.heads * self.head_dim, width, bias=output_bias)
        if qk_norm != "none":
            full, eps = qk_norm == "full", config.rms_norm_eps
            self.q_norm = RMSNorm(self.q.out_features if full else self.head_dim, eps)
            self.k_norm = RMSNorm(self.k.out_features if full else self.head_dim, eps)

    def cache_entry(
        self, rows: int, capacity: int, device: torch.device | str, dtype: torch.dtype
    ) -> KeysValues:
        """An empty entry of `KVCache` for this layer."""
        shape = (rows, capacity, self.kv_heads, self.head_dim)
        keys, values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        return KeysValues(keys, values)

    def cost(self) -> AttentionCost:
        """What it costs in training."""
        turned = (self.heads + self.kv_heads) * self.head_dim
        return AttentionCost(
            weights=sum(linear.weight.numel() for linear in (self.q, self.k, self.v, self.o)),
            scores=self.heads * self.head_dim,
            values=self.heads * self.head_dim,
            normed=turned if self.qk_norm != "none" else 0,
            moved=turned,
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
        rows, length, _ = x_BLD.shape
        q, k, v = self.q(x_BLD), self.k(x_BLD), self.v(x_BLD)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.clip is not None:
            q, k, v = (part.clamp(-self.clip, self.clip) for part in (q, k, v))
        q_BLHC = q.view(rows, length, self.heads, self.head_dim)
        k_BLGC = k.view(rows, length, self.kv_heads, self.head_dim)
        v_BLGC = v.view(rows, length, self.kv_heads, self.head_dim)
        if self.qk_norm == "head":
            q_BLHC, k_BLGC = self.q_norm(q_BLHC), self.k_norm(k_BLGC)
        q_BLHC, k_BLGC = rotate(q_BLHC, rotation), rotate(k_BLGC, rotation)

        entry = None if cache is None else cache.entries[self.layer]
        if entry is not None:
            entry.write(positions_BL, k_BLGC, v_BLGC)
        if entry is not None and cache.filled > 0:
            end = cache.filled + length
            y_BLHC = cached_attention(
                q_BLHC, entry.keys_BSGC[:, :end], entry.values_BSGC[:, :end], positions_BL
            )
        elif lengths_N is not None:
            y_BLHC = packed_attention(q_BLHC, k_BLGC, v_BLGC, cu_seqlens_N1, lengths_N, self.choice)
        else:
            y_BLHC = row_attention(q_BLHC, k_BLGC, v_BLGC, self.choice)
        return self.o(y_BLHC.reshape(rows, length, self.heads * self.head_dim))
