"""How the weights of a new model are drawn: the standard deviation of each parameter.

Embeddings are the one place where the deviation decides how training goes. Every block reads its
input through an RMSNorm, whose gradient grows with one over the input's size. Embeddings of
deviation 0.02 are so small beside what the blocks add to them that hidden states of all tokens
share one direction, and gradients grow tenfold from layer to layer downwards: routers then send
all tokens to the same experts for the first hundred steps, and single steps have gradients tens of
times larger than their neighbours (large shortcuts and small branches: Takase et al., "Spike No
More", arXiv 2312.16903). LOG.md has our measurements. Nothing of this reaches an export: only
weights do.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from models.config import ModelConfig
from moe.settings import Settings

Deviation = Annotated[float, Field(ge=0, le=100)]


class FirstWeights(Settings):
    """Standard deviations of the first weights, `model.initializer_range` unless said otherwise."""

    embedding: Deviation | None = None
    """Of the token embeddings. `null`: 1, or `model.initializer_range` where they are the output
    matrix too (`model.tie_word_embeddings`)."""
    router: Deviation | None = None
    """Of the router weights."""
    branches: Literal["equal", "by_depth"] = "equal"
    """by_depth: the matrices that write into the residual stream (attention output, down
    projections) are divided by √(2 · layers), as in GPT-2."""

    def std(self, config: ModelConfig, name: str, kind: str) -> float:
        """Standard deviation of the parameter `name`, of that kind (`models.parameter_kinds`)."""
        if kind == "router" and self.router is not None:
            return self.router
        if kind == "embedding":
            if self.embedding is not None:
                return self.embedding
            if not config.tie_word_embeddings:
                return 1.0
        writes = name.endswith(("attn.o.weight", ".w2", "down_proj.weight"))
        if writes and self.branches == "by_depth":
            return config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
        return config.initializer_range


DEFAULT = FirstWeights()
