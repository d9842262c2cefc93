"""Attention: one file for each kind, and what they share (products, the cache).

A kind is a module made of a config and the number of its layer, which a family chooses
(`ModelConfig.attention`). It has

- `rope`: its `models.rope.Rope`; the decoder computes the angles once for all layers that have the
  same `rope.key`, and hands them to `forward`;
- `cache_entry(rows, capacity, device, dtype)`: what it keeps of earlier tokens, in its own form;
- `cost()`: its counts for FLOPs and estimates (`models.attention.cost`);
- `forward(x_BLD, rotation, cu_seqlens_N1, lengths_N, cache, positions_BL)` → [B, L, D];
- `choice`, if more than one package computes it;
- `parameter_kind`, and names of its parameters in the family's `tensor_names`.
"""

from models.attention.cache import KeysValues, KVCache
from models.attention.cost import AttentionCost
from models.attention.gqa import GroupedQueryAttention
from models.attention.mla import MultiHeadLatentAttention
from models.attention.sdpa import (
    cached_attention,
    causal_attention,
    packed_attention,
    packed_backend,
    row_attention,
)

__all__ = [
    "AttentionCost",
    "GroupedQueryAttention",
    "KVCache",
    "KeysValues",
    "MultiHeadLatentAttention",
    "cached_attention",
    "causal_attention",
    "packed_attention",
    "packed_backend",
    "row_attention",
]
