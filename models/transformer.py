"""The decoder: embedding, blocks of attention and experts or an MLP, output layer with its loss.

    model = build_model(config)                     # models/build.py
    out = model(tokens_BL, labels_BL=labels_BL)     # out.loss_sum / number of targets = mean loss
    out.router                                      # RouterStats of the MoE layers, [L, ...]

Labels are those of the same position (label of position i = token i + 1 of the same document): they
are shifted once, where the data is packed, and not again here. Auxiliary losses of the router are
not added here either; whoever trains adds them from `out.router`.

Shape letters: B rows, L tokens per row, T = B*L, D model width, V vocabulary, N documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import KVCache
from models.config import ModelConfig
from models.documents import Documents
from models.execution import Checkpointing, mark_dynamic, run_checkpointed, selective_attention
from models.loss import linear_cross_entropy
from models.norm import RMSNorm
from models.rope import Rotation
from moe.layer import MoE, MoEConfig, SharedExpert
from moe.types import RouterStats


@dataclass
class Output:
    """What one forward pass gives; fields not asked for are None."""

    loss_sum: Tensor | None = None
    """fp32 scalar: cross-entropy summed over the labels that are not -100."""
    logits: Tensor | None = None
    """[B, L, V], or [B, V] for the last valid position of each row."""
    router: RouterStats | None = None
    """Statistics of the MoE layers, stacked in the order of `config.moe_layers`; None without
    any.
    """
    cache: KVCache | None = None
    """The cache that was given, now holding these tokens too."""


class Head(nn.Module):
    """Output matrix [V, D], with the loss computed inside its forward.

    A module of its own so that a sharding engine gathers the weight when this is called; the loss
    must read the weight itself, as it never makes all logits.
    """

    parameter_kind = "head"

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))

    def forward(self, x: Tensor, labels_T: Tensor | None = None) -> Tensor:
        """Logits [..., V] of x [..., D]; with labels the summed loss of x [T, D]."""
        if labels_T is None:
            return F.linear(x, self.weight)
        return linear_cross_entropy(x, self.weight, labels_T)


class Embedding(nn.Embedding):
    """The rows of the tokens."""

    parameter_kind = "embedding"


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)); experts or a dense MLP. With
    `post_norm` x + norm(attention(x)), then x + norm(feed-forward(x))."""

    def __init__(self, config: ModelConfig, layer: int, moe_config: MoEConfig | None) -> None:
        super().__init__()
        self.recompute_attention = False  # set by apply_checkpointing(model, "selective")
        self.post_norm = config.post_norm
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = config.attention(layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if moe_config is not None:
            self.moe = MoE(moe_config)
        else:
            self.mlp = SharedExpert(config.hidden_size, config.intermediate_size, config.activation)

    def forward(
        self,
        x_BLD: Tensor,
        rotation: Rotation,
        cu_seqlens_N1: Tensor | None = None,
        lengths_N: Tensor | None = None,
        valid_BL: Tensor | None = None,
        cache: KVCache | None = None,
        positions_BL: Tensor | None = None,
    ) -> tuple[Tensor, RouterStats | None]:
        if self.recompute_attention and torch.is_grad_enabled() and cache is None:
            x_BLD = selective_attention(self._attend, x_BLD, rotation, cu_seqlens_N1, lengths_N)
        else:
            x_BLD = self._attend(x_BLD, rotation, cu_seqlens_N1, lengths_N, cache, positions_BL)
        inner_BLD = x_BLD if self.post_norm else self.mlp_norm(x_BLD)
        if hasattr(self, "mlp"):
            y_BLD, stats = self.mlp(inner_BLD), None
        else:
            y_BLD, stats = self.moe(inner_BLD, valid_BL)
        return x_BLD + (self.mlp_norm(y_BLD) if self.post_norm else y_BLD), stats

    def _attend(
        self,
        x_BLD: Tensor,
        rotation: Rotation,
        cu_seqlens_N1: Tensor | None,
        lengths_N: Tensor | None,
        cache: KVCache | None = None,
        positions_BL: Tensor | None = None,
    ) -> Tensor:
        inner_BLD = x_BLD if self.post_norm else self.attn_norm(x_BLD)
        y_BLD = self.attn(inner_BLD, rotation, cu_seqlens_N1, lengths_N, cache, positions_BL)
        return x_BLD + (self.attn_norm(y_BLD) if self.post_norm else y_BLD)


class Decoder(nn.Module):
    """Decoder-only language model of one `ModelConfig`. Build it with `build_model`."""

    def __init__(self, config: ModelConfig, moe_configs: list[MoEConfig | None]) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, layer, moe_config) for layer, moe_config in enumerate(moe_configs)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Head(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.head.weight = self.embed.weight
        self.ropes = {block.attn.rope.key: block.attn.rope for block in self.layers}
        self.checkpointing: Checkpointing = "none"  # set by apply_checkpointing
        self.compiled = False  # set by compile_blocks
        self.compute_dtype: torch.dtype | None = None
        """Of activations, where it is not that of the weights: a sharding engine casts them."""

    def new_cache(
        self, rows: int, capacity: int, device: torch.device | str, dtype: torch.dtype
    ) -> KVCache:
        """An empty cache of `capacity` tokens for each of `rows` rows."""
        layers = (block.attn for block in self.layers)
        return KVCache(layers, rows, capacity, device, dtype)

    def forward(
        self,
        tokens_BL: Tensor,
        *,
        labels_BL: Tensor | None = None,
        positions_BL: Tensor | None = None,
        documents: Documents | None = None,
        valid_BL: Tensor | None = None,
        cache: KVCache | None = None,
        logits: bool | Literal["last"] = False,
    ) -> Output:
        """Run the model.

        Args:
            tokens_BL: int64 token ids.
            labels_BL: int64, the next token of each position, or -100; asks for the loss.
            positions_BL: int64 positions for RoPE; default: restarting with every document (row).
            documents: borders of packed documents; without it each row is one document.
            valid_BL: bool; False marks padding, which chooses no expert and counts in no
                statistic. Padding stands at the end of its row.
            cache: keys and values of earlier tokens; the new ones are added. Not with `documents`.
            logits: True for all positions, "last" for each row's last valid position.

        Raises:
            ValueError: shapes that do not fit, or `documents` together with `cache`.
        """
        if tokens_BL.dim() != 2:
            raise ValueError(f"tokens must be [B, L], got {tuple(tokens_BL.shape)}")
        rows, length = tokens_BL.shape
        for name, given in (
            ("labels", labels_BL),
            ("positions", positions_BL),
            ("valid", valid_BL),
        ):
            if given is not None and given.shape != tokens_BL.shape:
                raise ValueError(
                    f"{name} has shape {tuple(given.shape)}, tokens {tuple(tokens_BL.shape)}"
                )
        cu_seqlens_N1 = lengths_N = None
        if documents is not None:
            if cache is not None:
                raise ValueError("documents cannot be packed into rows that have a cache")
            documents.check(rows, length)
            cu_seqlens_N1, lengths_N = documents.cu_seqlens_N1, documents.lengths_N
            if self.compiled:
                mark_dynamic(cu_seqlens_N1, lengths_N)
        if positions_BL is None:
            positions_BL = _positions(tokens_BL, documents, cache)
        rotations = {key: rope(positions_BL) for key, rope in self.ropes.items()}

        x_BLD = self.embed(tokens_BL)
        if torch.is_autocast_enabled(x_BLD.device.type):
            # The residual stream in the dtype of the matrix products, as under mixed-precision
            # sharding, where all weights are cast: otherwise it would stay fp32 here and only here.
            x_BLD = x_BLD.to(torch.get_autocast_dtype(x_BLD.device.type))
        stats: list[RouterStats] = []
        for block in self.layers:
            rotation = rotations[block.attn.rope.key]
            arguments = (x_BLD, rotation, cu_seqlens_N1, lengths_N, valid_BL)
            if self.checkpointing == "full" and torch.is_grad_enabled() and cache is None:
                x_BLD, layer_stats = run_checkpointed(block, *arguments)
            elif cache is not None and self.compiled:
                # Every new length would be compiled anew.
                with torch.compiler.set_stance("force_eager"):
                    x_BLD, layer_stats = block(*arguments, cache, positions_BL)
            else:
                x_BLD, layer_stats = block(*arguments, cache, positions_BL)
            if layer_stats is not None:
                stats.append(layer_stats)
        x_BLD = self.norm(x_BLD)
        if cache is not None:
            cache.advance(length, valid_BL)

        out = Output(cache=cache, router=RouterStats.stack(stats) if stats else None)
        if labels_BL is not None:
            out.loss_sum = self.head(x_BLD.flatten(0, 1), labels_BL.flatten())
        if logits == "last":
            last_B = x_BLD.new_full((rows,), length - 1, dtype=torch.int64)
            if valid_BL is not None:
                last_B = valid_BL.sum(1) - 1
            out.logits = self.head(x_BLD[torch.arange(rows, device=x_BLD.device), last_B])
        elif logits:
            out.logits = self.head(x_BLD)
        return out


def _positions(tokens_BL: Tensor, documents: Documents | None, cache: KVCache | None) -> Tensor:
    length = tokens_BL.shape[1]
    if cache is not None:
        return cache.positions(length)
    if documents is not None:
        return documents.positions().to(tokens_BL.device).view(tokens_BL.shape)
    return torch.arange(length, device=tokens_BL.device).expand(tokens_BL.shape)
