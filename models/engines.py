"""Where other engines differ from transformers on an exported folder: the one table of facts.

`scripts/export_hf.py` prints its notes from here, docs/huggingface.md shows `markdown_table()`, and
`scripts/check_engines.py` runs every row in the engines that are installed and fails where a
verdict is not what it sees. Versions: vLLM 0.32.0, llama.cpp of October 2026, mistral.rs 0.9.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from models.config import ModelConfig

ENGINES = ("vLLM", "llama.cpp", "mistral.rs")


@dataclass(frozen=True)
class Verdict:
    """What an engine makes of a folder."""

    kind: Literal["yes", "wrong", "no"]
    """The same tokens; other tokens without an error; or it does not load."""
    words: str = ""
    """What it does, as the end of the sentence "ENGINE ..."; empty for yes."""

    def __str__(self) -> str:
        return "yes" if self.kind == "yes" else f"**{self.kind}**: {self.words}"


YES = Verdict("yes")


def wrong(words: str) -> Verdict:
    return Verdict("wrong", words)


def no(words: str = "does not load it") -> Verdict:
    return Verdict("no", words)


@dataclass(frozen=True)
class Feature:
    """One row: a family as it usually is (`name` empty), or one feature on top of that."""

    family: str
    name: str
    """The setting, as in config.json."""
    has: Callable[[ModelConfig], bool]
    """Whether a model of the family has the feature."""
    example: dict[str, Any]
    """Fields of `ModelConfig` that give a model the feature."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """By engine; one that is not there says yes."""

    def verdict(self, engine: str) -> Verdict:
        return self.verdicts.get(engine, YES)


def _linear_rope(c: ModelConfig) -> bool:
    return c.rope_scaling is not None


LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
NO_OLMOE = no("has no olmoe")

FEATURES: tuple[Feature, ...] = (
    Feature("qwen3_moe", "", lambda c: True, {}),
    Feature(
        "qwen3_moe",
        "norm_topk_prob: false",
        lambda c: not c.norm_topk_prob,
        {"norm_topk_prob": False},
        {"llama.cpp": wrong("renormalises the gates of a qwen3_moe all the same")},
    ),
    Feature(
        "qwen3_moe",
        "dense layers",
        lambda c: len(c.moe_layers) < c.num_hidden_layers,
        {"mlp_only_layers": [1]},
        {"llama.cpp": no("does not convert a qwen3_moe with dense layers")},
    ),
    Feature(
        "qwen3_moe",
        "attention_bias: true",
        lambda c: bool(c.attention_bias),
        {"attention_bias": True},
        {
            "vLLM": wrong("drops the bias of o_proj of a qwen3_moe"),
            "llama.cpp": no("does not load a qwen3_moe with attention biases"),
            "mistral.rs": wrong("drops all attention biases of a qwen3_moe"),
        },
    ),
    Feature(
        "qwen3_moe",
        "linear RoPE scaling",
        _linear_rope,
        LINEAR,
        {"mistral.rs": wrong("ignores linear RoPE scaling")},
    ),
    Feature("olmoe", "", lambda c: True, {}, {"mistral.rs": NO_OLMOE}),
    Feature(
        "olmoe",
        "norm_topk_prob: true",
        lambda c: bool(c.norm_topk_prob),
        {"norm_topk_prob": True},
        {
            "vLLM": wrong("ignores norm_topk_prob of an olmoe"),
            "llama.cpp": wrong("ignores norm_topk_prob of an olmoe"),
            "mistral.rs": NO_OLMOE,
        },
    ),
    Feature(
        "olmoe",
        "fewer key/value heads than heads",
        lambda c: c.num_key_value_heads != c.num_attention_heads,
        {"num_key_value_heads": 2},
        {
            "llama.cpp": no("does not load an olmoe with fewer key/value heads than heads"),
            "mistral.rs": NO_OLMOE,
        },
    ),
    Feature(
        "olmoe",
        "clip_qkv",
        lambda c: c.clip_qkv is not None,
        {"clip_qkv": 0.5},
        {
            "vLLM": wrong("ignores clip_qkv of an olmoe"),
            "llama.cpp": wrong("ignores clip_qkv of an olmoe"),
            "mistral.rs": NO_OLMOE,
        },
    ),
    Feature(
        "olmoe",
        "attention_bias: true",
        lambda c: bool(c.attention_bias),
        {"attention_bias": True},
        {
            "vLLM": wrong("drops all attention biases of an olmoe"),
            "llama.cpp": no("does not load an olmoe with attention biases"),
            "mistral.rs": NO_OLMOE,
        },
    ),
    Feature(
        "olmoe",
        "rms_norm_eps other than 1e-5",
        lambda c: c.rms_norm_eps != 1e-5,
        {"rms_norm_eps": 0.05},
        {
            "vLLM": wrong("computes an olmoe with rms_norm_eps 1e-5 whatever its config says"),
            "llama.cpp": wrong("computes an olmoe with rms_norm_eps 1e-5 whatever its config says"),
            "mistral.rs": NO_OLMOE,
        },
    ),
    Feature("olmoe", "linear RoPE scaling", _linear_rope, LINEAR, {"mistral.rs": NO_OLMOE}),
    Feature("mixtral", "", lambda c: True, {}),
    Feature(
        "mixtral",
        "head_dim other than hidden_size / heads",
        lambda c: c.head_dim * c.num_attention_heads != c.hidden_size,
        {"head_dim": 64},
        {"mistral.rs": no("does not load a mixtral whose head_dim is not hidden_size / heads")},
    ),
    Feature(
        "mixtral",
        "linear RoPE scaling",
        _linear_rope,
        LINEAR,
        {"mistral.rs": wrong("ignores linear RoPE scaling")},
    ),
    Feature("glm4_moe", "", lambda c: True, {}),
    Feature(
        "glm4_moe",
        "norm_topk_prob: false",
        lambda c: not c.norm_topk_prob,
        {"norm_topk_prob": False},
    ),
    Feature(
        "glm4_moe",
        "attention_bias: true",
        lambda c: bool(c.attention_bias),
        {"attention_bias": True},
    ),
    Feature("glm4_moe", "use_qk_norm: true", lambda c: bool(c.use_qk_norm), {"use_qk_norm": True}),
    Feature(
        "glm4_moe",
        "expert groups",
        lambda c: c.n_group > 1,
        {"n_group": 4, "topk_group": 2},
    ),
    Feature(
        "glm4_moe",
        "n_shared_experts above 1",
        lambda c: c.n_shared_experts > 1,
        {"n_shared_experts": 2},
        {"mistral.rs": no("does not load a glm4_moe with more than one shared expert")},
    ),
    Feature(
        "glm4_moe",
        "linear RoPE scaling",
        _linear_rope,
        LINEAR,
        {"mistral.rs": wrong("ignores linear RoPE scaling")},
    ),
)


def notes(config: ModelConfig) -> list[str]:
    """One line for each engine and feature of this model where the engine is known to differ."""
    found = {}
    for feature in FEATURES:
        if feature.family == config.family and feature.has(config):
            for engine in ENGINES:
                verdict = feature.verdict(engine)
                if verdict.kind != "yes":
                    found[f"{engine} {verdict.words}"] = None  # each once, in order
    return list(found)


def markdown_table() -> str:
    """The table of docs/huggingface.md."""
    lines = [f"| family | with | {' | '.join(ENGINES)} |", "|---|" + "---|" * (len(ENGINES) + 1)]
    for feature in FEATURES:
        cells = [str(feature.verdict(engine)) for engine in ENGINES]
        lines.append(f"| {feature.family} | {feature.name or '–'} | {' | '.join(cells)} |")
    return "\n".join(lines)
