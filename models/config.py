"""The architecture of a model, in the words of a Hugging Face `config.json`.

    ModelConfig(family="qwen3_moe", hidden_size=256, ...)  # what is missing: transformers' default
    ModelConfig.from_hf("folder/config.json")  # a public model's config, 4.x or 5.x style
    config.to_hf(dtype="bfloat16")  # config.json for transformers 4.57 to 5.x, vLLM, llama.cpp

Only what defines the function computed is here. How it is computed (kernels, precision, token
rounding) is chosen when the model is built. What a family cannot express is refused by name, never
dropped: a lost `norm_topk_prob` or RoPE base gives fluent nonsense (lablup/mlxcel#391,
huggingface/nanotron#188).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from models.errors import UserError, allowed_by

if TYPE_CHECKING:
    from moe.layer import MoEConfig

Family = Literal["qwen3_moe", "olmoe", "mixtral", "glm4_moe"]

Positive = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1, le=100_000_000)]  # of a tensor: beyond it, a mistyped number
Count = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    """No unknown keys, no silent conversions, no changes after it is made."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


# Values that transformers (4.57 and 5.x agree) takes for keys missing from a config.json. A key
# that is in no dict of a family is not a field of that family. None: no fixed default, derived in
# `_derive`.
_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "num_key_value_heads": None,
    "head_dim": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": _COMMON
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "olmoe": _COMMON
    | {
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    "mixtral": _COMMON
    | {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,  # no key of its own in config.json: Mixtral always renormalises
    },
    "glm4_moe": _COMMON
    | {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
    },
}
# Families whose tied embeddings other engines load wrongly.
UNTIED = ("olmoe", "glm4_moe")
# Fields that no family has: what they say is exact in the weights of an exported folder.
_OWN = ("moe_expert_widths",)
# Token ids of the families' public tokenizers. They are meant for those tokenizers only, so they
# count for keys missing from a config.json and not for a model described here.
_HF_TOKEN_IDS: dict[str, dict[str, int]] = {
    "olmoe": {"pad_token_id": 1, "eos_token_id": 50279},
    "mixtral": {"bos_token_id": 1, "eos_token_id": 2},
}


class ModelConfig(Strict):
    """Architecture of one decoder-only MoE model; field names and defaults are the family's in
    transformers.

    A field left out (or null) takes the family's default; a field that the family does not have
    must be left out. After construction every field that the family has holds its value. ValueError
    (pydantic's) names key, value and what is allowed.
    """

    family: Family
    """Which transformers model this is; fixes the attention variant and the router."""

    vocab_size: Size | None = None
    """Rows of the embedding. Never padded silently: what is trained is what is exported."""
    hidden_size: Size | None = None
    """Width of the residual stream."""
    intermediate_size: Size | None = None
    """Width of dense MLP layers; for olmoe and mixtral the width of each expert."""
    moe_intermediate_size: Size | None = None
    """Width of each expert (qwen3_moe, glm4_moe)."""
    moe_expert_widths: list[Size] | list[list[Size]] | None = None
    """Width of each expert, where they differ: one list for all MoE layers, or a list for each. The
    width above is then that of the widest, to which an exported folder pads the others with zeros.
    Empty: all the same."""
    num_hidden_layers: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Decoder layers."""
    num_attention_heads: Size | None = None
    """Query heads."""
    num_key_value_heads: Size | None = None
    """Key/value heads (GQA); must divide the query heads."""
    head_dim: Size | None = None
    """Width of one head; default hidden_size / num_attention_heads."""
    hidden_act: str | None = None
    """Activation of the gated MLPs; only silu."""
    max_position_embeddings: Positive | None = None
    """Longest sequence the model is meant for."""
    initializer_range: Annotated[float, Field(gt=0)] | None = None
    """Standard deviation of the initial weights."""
    rms_norm_eps: Annotated[float, Field(gt=0)] | None = None
    """Added to the mean square inside every RMSNorm."""
    tie_word_embeddings: bool | None = None
    """Use the embedding as output matrix (qwen3_moe and mixtral only: other engines mishandle the
    rest).
    """
    rope_theta: Annotated[float, Field(gt=1)] | None = None
    """Base of the rotary frequencies."""
    rope_scaling: dict[str, Any] | None = None
    """None, or {rope_type: linear, factor: f}: positions divided by f."""
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of each head that is rotated (glm4_moe)."""
    attention_bias: bool | None = None
    """Biases in q, k, v (and o, except glm4_moe)."""
    use_qk_norm: bool | None = None
    """RMSNorm on each query and key head (glm4_moe; always on in qwen3_moe and olmoe)."""
    clip_qkv: Annotated[float, Field(gt=0)] | None = None
    """Clamp queries, keys and values to ±clip_qkv before RoPE (olmoe)."""

    num_experts: Size | None = None
    """Routed experts per MoE layer (n_routed_experts / num_local_experts in some config.json
    files).
    """
    num_experts_per_tok: Size | None = None
    """Experts that each token uses (K)."""
    norm_topk_prob: bool | None = None
    """Divide the K gates of a token by their sum (always true for mixtral)."""
    decoder_sparse_step: Positive | None = None
    """Every so many layers one is MoE, counted from 1 (qwen3_moe)."""
    mlp_only_layers: list[Count] | None = None
    """Layers that are dense all the same (qwen3_moe)."""
    first_k_dense_replace: Count | None = None
    """The first so many layers are dense (glm4_moe)."""
    n_shared_experts: Size | None = None
    """Experts that every token uses, as one MLP of that many expert widths (glm4_moe)."""
    n_group: Positive | None = None
    """Groups of experts for group-limited selection (glm4_moe)."""
    topk_group: Positive | None = None
    """Groups that a token may choose from (glm4_moe)."""
    routed_scaling_factor: Annotated[float, Field(gt=0)] | None = None
    """Multiplies the gates after normalisation (glm4_moe)."""

    bos_token_id: Count | None = None
    """Begin-of-text token, if the tokenizer has one."""
    eos_token_id: Count | list[Count] | None = None
    """End-of-text token(s): generation stops there."""
    pad_token_id: Count | None = None
    """Padding token, if the tokenizer has one."""

    @model_validator(mode="before")
    @classmethod
    def _fill_family_defaults(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        family = raw.get("family")
        if not isinstance(family, str) or family not in FAMILY_DEFAULTS:
            return raw  # pydantic names the missing or wrong family
        defaults = FAMILY_DEFAULTS[family]
        for key, value in raw.items():
            if key in cls.model_fields and key not in (*defaults, "family", *_OWN):
                if value is not None:
                    raise ValueError(
                        f"{key}={value!r} is no field of the family {family}, leave it out"
                    )
        given = {key: value for key, value in raw.items() if value is not None}
        filled = {**defaults, **given}
        if isinstance(filled["rope_scaling"], dict):
            filled["rope_scaling"] = _normal_rope_scaling(filled["rope_scaling"])
        return _derive(filled)

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        for problem in _problems(self):
            raise ValueError(problem)
        return self

    # ------------------------------------------------------- what the fields mean together

    @property
    def expert_size(self) -> int:
        """Width of one routed expert, of the widest where they differ."""
        own = self.moe_intermediate_size
        return self.intermediate_size if own is None else own

    def expert_widths(self, layer: int) -> tuple[int, ...] | None:
        """Width of each expert of decoder layer `layer`; None where all have `expert_size`."""
        given = self.moe_expert_widths
        if given is None or not self.is_moe_layer(layer):
            return None
        return tuple(given[self.moe_layers.index(layer)] if isinstance(given[0], list) else given)

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of each head."""
        share = self.partial_rotary_factor
        return self.head_dim if share is None else int(self.head_dim * share)

    @property
    def qk_norm(self) -> Literal["none", "head", "full"]:
        """RMSNorm of queries and keys: per head, over the whole projection (olmoe), or none."""
        if self.family == "olmoe":
            return "full"
        return "head" if self.family == "qwen3_moe" or self.use_qk_norm else "none"

    @property
    def output_bias(self) -> bool:
        """Whether the attention's output projection has a bias."""
        return bool(self.attention_bias) and self.family != "glm4_moe"

    @property
    def router_score(self) -> str:
        """How the family's routers make scores of logits."""
        return "sigmoid" if self.family == "glm4_moe" else "softmax"

    @property
    def has_selection_bias(self) -> bool:
        """Whether the family adds a bias to the scores for the selection of experts."""
        return self.family == "glm4_moe"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-text tokens; empty when none is known."""
        ids = self.eos_token_id
        return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` (from 0) holds experts; otherwise it holds a dense MLP."""
        if self.family == "qwen3_moe":
            sparse = (layer + 1) % self.decoder_sparse_step == 0
            return sparse and layer not in self.mlp_only_layers
        if self.family == "glm4_moe":
            return layer >= self.first_k_dense_replace
        return True

    @property
    def moe_layers(self) -> list[int]:
        """Numbers of the layers with experts, ascending; their order is the order of stacked
        statistics.
        """
        return [layer for layer in range(self.num_hidden_layers) if self.is_moe_layer(layer)]

    def moe_config(self, layer: int, **options: Any) -> MoEConfig | None:
        """Config of layer `layer`'s experts and router, or None for a dense layer.

        `options`: fields of MoEConfig that are no architecture (kernels, save, rounding ...); one
        that is, say `selection_bias`, makes a layer that the family does not have.
        """
        from moe.layer import MoEConfig

        if not self.is_moe_layer(layer):
            return None
        glm, widths = self.family == "glm4_moe", self.expert_widths(layer)
        fields = {
            "hidden_size": self.hidden_size,
            "expert_size": self.expert_size if widths is None else max(widths),
            "expert_widths": widths,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "score": self.router_score,
            "norm": "topk_sum" if self.norm_topk_prob else "none",
            "route_scale": self.routed_scaling_factor if glm else 1.0,
            "selection_bias": self.has_selection_bias,
            "groups": self.n_group if glm else 1,
            "groups_kept": self.topk_group if glm else 1,
            "shared_expert_size": self.expert_size * self.n_shared_experts if glm else 0,
            "activation": "swiglu",
            "init_std": self.initializer_range,
        }
        return MoEConfig(**{**fields, **options})

    # ------------------------------------------------------------------ config.json

    @classmethod
    def from_hf(
        cls, source: dict[str, Any] | str | Path, *, ignore_keys: tuple[str, ...] = ()
    ) -> ModelConfig:
        """Read a Hugging Face config: a dict, a config.json, or a folder that holds one (a Hugging
        Face folder, a checkpoint, or a run).

        Every key must be understood, known to be bookkeeping, or named in `ignore_keys`; a feature
        that this model does not compute is a UserError that names it.
        """
        from models.config_hf import fields_from_hf

        return cls.of_user(fields_from_hf(source, ignore_keys))

    @classmethod
    def of_user(cls, fields: dict[str, Any]) -> ModelConfig:
        """The config of fields that a user gave.

        Raises:
            UserError: the first thing that is wrong with them, in one line.
        """
        try:
            return cls(**fields)
        except ValidationError as error:
            first, *more = error.errors(include_url=False)
            if first["type"] == "value_error":  # of our own checks: whole sentences
                raise UserError(str(first["ctx"]["error"])) from None
            key = first["loc"][0]
            same = [first, *(e for e in more if e["loc"][:1] == (key,))]  # the members of a union
            allowed = " or ".join(dict.fromkeys(map(allowed_by, same)))
            raise UserError(f"{key}={fields.get(key)!r} must be {allowed}") from None

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """The complete config.json content, in the spellings of transformers 4.57 and 5.x at
        once.
        """
        from models.config_hf import fields_to_hf

        return fields_to_hf(self, dtype)


# Where a folder keeps its config.json: a Hugging Face folder, a checkpoint, a checkpoints folder, a
# run.
_PLACES = (".", "model", "latest/model", "checkpoints/latest/model")


def read_generation_config(source: dict[str, Any] | str | Path) -> dict[str, Any]:
    """generation_config.json of a Hugging Face folder; empty without one."""
    if isinstance(source, dict) or not (path := Path(source) / "generation_config.json").is_file():
        return {}
    return read_config_json(path)


def end_tokens(source: dict[str, Any] | str | Path) -> Any:
    """What generation stops at by a folder's generation_config.json; None where it says nothing."""
    ends = read_generation_config(source).get("eos_token_id")
    return ends[0] if isinstance(ends, list) and len(ends) == 1 else ends


def read_config_json(source: dict[str, Any] | str | Path) -> dict[str, Any]:
    """The JSON object in `source` (a dict is returned as it is).

    ValueError when missing or no JSON object.
    """
    if isinstance(source, dict):
        return source
    path = Path(source)
    if path.is_dir():
        places = [path / place / "config.json" for place in _PLACES]
        path = next((place for place in places if place.is_file()), places[0])
    if not path.is_file():
        hub = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) and not Path(source).exists():
            hub = (
                "; if that is a name on the Hugging Face hub, download it first: "
                f"hf download {source} --local-dir FOLDER, and give FOLDER"
            )
        raise UserError(f"there is no file {path}{hub}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds a {type(raw).__name__}, expected a JSON object")
    return raw


def _normal_rope_scaling(raw: dict[str, Any]) -> dict[str, Any] | None:
    """{"rope_type": "linear", "factor": f}, or None for the default type. 4.x files say `type`."""
    if not isinstance(raw, dict):
        raise UserError(f"rope_scaling={raw!r} is not supported; expected one flat object")
    kind = raw.get("rope_type", raw.get("type", "default"))
    # transformers reads the original length for other types only
    own = ("rope_type", "type", "factor", "original_max_position_embeddings")
    rest = {key: value for key, value in raw.items() if key not in own}
    if kind == "default":
        if rest or raw.get("factor") not in (None, 1):
            said = ", ".join(f"{key}={value!r}" for key, value in raw.items())
            raise UserError(
                f"rope_scaling with {said} scales nothing without rope_type: linear; allowed: "
                "{rope_type: linear, factor: f}, or null"
            )
        return None
    if kind != "linear":
        raise UserError(f"rope_scaling type {kind!r} is not supported; allowed: default, linear")
    factor = raw.get("factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor < 1:
        raise UserError(f"rope_scaling.factor={factor!r} must be a number of at least 1")
    if rest:
        raise UserError(f"rope_scaling has unknown keys {sorted(rest)}; allowed: rope_type, factor")
    return {"rope_type": "linear", "factor": float(factor)}


def _derive(fields: dict[str, Any]) -> dict[str, Any]:
    """Fill what follows from other fields; leave wrong types to pydantic."""
    heads, width = fields["num_attention_heads"], fields["hidden_size"]
    if not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
        return fields
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = heads
    if fields["head_dim"] is None:
        if width % heads:
            raise ValueError(
                f"hidden_size={width} is no multiple of num_attention_heads={heads}: give head_dim"
            )
        fields["head_dim"] = width // heads
    return fields


def _problems(c: ModelConfig):
    """Yield what makes this config impossible, most basic first."""
    if c.hidden_act != "silu":
        yield f"hidden_act={c.hidden_act!r} is not supported; allowed: silu"
    if c.num_attention_heads % c.num_key_value_heads:
        yield (
            f"num_key_value_heads={c.num_key_value_heads} must divide "
            f"num_attention_heads={c.num_attention_heads}"
        )
    if c.rotary_dim < 2 or c.rotary_dim % 2:
        part = "" if c.partial_rotary_factor is None else f" times {c.partial_rotary_factor:g}"
        yield (
            f"head_dim={c.head_dim}{part} rotates {c.rotary_dim} dimensions; RoPE needs an even "
            "number of at least 2"
        )
    if c.family == "olmoe" and c.head_dim * c.num_attention_heads != c.hidden_size:
        yield (
            f"head_dim={c.head_dim}: olmoe needs hidden_size/num_attention_heads="
            f"{c.hidden_size / c.num_attention_heads:g}"
        )
    if c.num_experts_per_tok > c.num_experts:
        yield (
            f"num_experts_per_tok={c.num_experts_per_tok} must not exceed "
            f"num_experts={c.num_experts}"
        )
    if c.family == "mixtral" and not c.norm_topk_prob:
        yield "norm_topk_prob=false: mixtral always renormalises; allowed: true"
    if c.num_experts_per_tok == 1 and c.norm_topk_prob:
        if c.family == "mixtral":
            yield (
                "num_experts_per_tok=1: mixtral renormalises, which makes every gate 1 and gives "
                "the router no gradient; allowed: at least 2, or family=qwen3_moe with "
                "norm_topk_prob=false"
            )
        else:
            yield (
                "num_experts_per_tok=1 with norm_topk_prob=true makes every gate 1 and gives the "
                "router no gradient; set norm_topk_prob=false or more experts per token"
            )
    if c.family == "glm4_moe":
        yield from _group_problems(c)
    if c.moe_expert_widths is not None:
        yield from _width_problems(c)
    if c.tie_word_embeddings and c.family in UNTIED:
        yield (
            f"tie_word_embeddings=true: vLLM and SGLang load a tied {c.family} wrongly; "
            "allowed: false"
        )
    for layer in c.mlp_only_layers or []:
        if layer >= c.num_hidden_layers:
            yield f"mlp_only_layers names layer {layer}; there are {c.num_hidden_layers}, from 0"
    if (c.first_k_dense_replace or 0) > c.num_hidden_layers:
        yield (
            f"first_k_dense_replace={c.first_k_dense_replace} exceeds "
            f"num_hidden_layers={c.num_hidden_layers}"
        )
    ids = {"bos_token_id": c.bos_token_id, "pad_token_id": c.pad_token_id}
    named = [(key, value) for key, value in ids.items() if value is not None]
    for key, value in named + [("eos_token_id", value) for value in c.eos_token_ids]:
        if value >= c.vocab_size:
            yield f"{key}={value} must be below vocab_size={c.vocab_size}"


def _width_problems(c: ModelConfig):
    given, layers = c.moe_expert_widths, len(c.moe_layers)
    if not layers:
        yield f"moe_expert_widths={given} has no effect: no layer of this model has experts"
        return
    each = bool(given) and isinstance(given[0], list)
    by_layer = given if each else [given]
    if each and len(given) != layers:
        yield (
            f"moe_expert_widths has {len(given)} lists for {layers} layers with experts; allowed: "
            "a list for each, or one list of numbers for all"
        )
        return
    for widths in by_layer:
        if len(widths) != c.num_experts:
            yield (
                f"moe_expert_widths={widths} has {len(widths)} widths for "
                f"num_experts={c.num_experts}"
            )
            return
    widest = max(max(widths) for widths in by_layer)
    if widest != c.expert_size:
        name = "intermediate_size" if c.moe_intermediate_size is None else "moe_intermediate_size"
        yield f"{name}={c.expert_size} must be the widest of moe_expert_widths, {widest}"


def _group_problems(c: ModelConfig):
    if c.num_experts % c.n_group:
        yield f"n_group={c.n_group} must divide num_experts={c.num_experts}"
    if c.topk_group > c.n_group:
        yield f"topk_group={c.topk_group} must not exceed n_group={c.n_group}"
    per_group = c.num_experts // c.n_group
    if per_group < 2:
        yield (
            f"n_group={c.n_group} leaves {per_group} experts per group; glm4_moe ranks groups by "
            "their two best experts and needs at least 2"
        )
    if c.topk_group * per_group < c.num_experts_per_tok:
        yield (
            f"topk_group={c.topk_group} groups of {per_group} experts are fewer than "
            f"num_experts_per_tok={c.num_experts_per_tok}"
        )
