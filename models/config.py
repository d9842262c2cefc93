"""The architecture of a model, in the words of a Hugging Face `config.json`.

    ModelConfig(family="qwen3_moe", hidden_size=256, ...)  # what is missing: transformers' default
    config_from_hf("folder/")                   # a public model's config (models/hf/config.py)
    config.to_hf(dtype="bfloat16")              # config.json for transformers, vLLM, llama.cpp

`ModelConfig` holds what all families have, `models.moe_config.MoEModelConfig` also what those with
experts have; a family is a subclass in a file of its own (`models.families`), which adds its
fields, its attention, its router and its tensor names.

Only what defines the function computed is here. How it is computed (kernels, precision, token
rounding) is chosen when the model is built. What a family cannot express is refused by name, never
dropped: a lost `norm_topk_prob` or RoPE base gives fluent nonsense (lablup/mlxcel#391,
huggingface/nanotron#188).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticKnownError
from torch import nn

from models.errors import UserError, allowed_by
from models.rope import SCALINGS, Rope, normal_rope_scaling
from moe.config import MoEConfig
from moe.settings import Settings

Positive = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1, le=100_000_000)]  # of a tensor: beyond it, a mistyped number
Count = Annotated[int, Field(ge=0)]

FAMILIES: dict[str, type[ModelConfig]] = {}
"""`model_type` → family. `models.families` puts ours here; a file of your own can add another."""

Names = dict[str, str | tuple[str, str]]

# Where parameters of a `Decoder` (or all of a module) lie in a folder, as most families have it:
# first the model's, then a layer's, behind the family's `layer_prefix`. `{}` is the number of the
# expert; of a pair, the first holds the gate and the second the up projection.
TENSOR_NAMES: Names = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
    "moe.router.weight": "mlp.gate.weight",
    "moe.w1": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "moe.w2": "mlp.experts.{}.down_proj.weight",
}
# The layout that transformers 5 holds in memory: all experts of a layer in one tensor.
FUSED_NAMES: Names = TENSOR_NAMES | {
    "moe.w1": "mlp.experts.gate_up_proj",
    "moe.w2": "mlp.experts.down_proj",
}


class ModelConfig(Settings):
    """Architecture of one decoder-only model; field names and defaults are the family's in
    transformers.

    `ModelConfig(family=...)` makes the subclass that `FAMILIES` has for it. A field left out (or
    null) takes the family's default; a field that the family does not have must be left out.
    ValueError (pydantic's) names key, value and what is allowed.
    """

    family: str
    """Which transformers model this is; fixes the attention variant and the router."""

    vocab_size: Size
    """Rows of the embedding. Never padded silently: what is trained is what is exported."""
    hidden_size: Size
    """Width of the residual stream."""
    intermediate_size: Size
    """Width of dense MLP layers; of each expert in families without `moe_intermediate_size`."""
    num_hidden_layers: Annotated[int, Field(ge=1, le=10_000)]
    """Decoder layers."""
    num_attention_heads: Size
    """Query heads."""
    num_key_value_heads: Size
    """Key/value heads (GQA); must divide the query heads. Default: as many as those."""
    head_dim: Size
    """Width of one head; default hidden_size / num_attention_heads."""
    hidden_act: str = "silu"
    """Activation of the gated MLPs and experts, in transformers' word: silu (SwiGLU), gelu (GeGLU)
    or relu (ReGLU)."""
    max_position_embeddings: Positive
    """Longest sequence the model is meant for."""
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of the initial weights."""
    rms_norm_eps: Annotated[float, Field(gt=0)]
    """Added to the mean square inside every RMSNorm."""
    tie_word_embeddings: bool = False
    """Use the embedding as output matrix, in families that other engines tie rightly (not olmoe and
    glm4_moe)."""
    rope_theta: Annotated[float, Field(gt=1)] = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: dict[str, Any] | None = None
    """`null`, or {rope_type: …, factor: f, …} for texts f times longer, with the keys that
    transformers has for linear, dynamic, yarn and llama3. yarn and llama3 take
    `max_position_embeddings` for an `original_max_position_embeddings` that is not given."""

    bos_token_id: Count | None = None
    """Begin-of-text token, if the tokenizer has one."""
    eos_token_id: Count | list[Count] | None = None
    """End-of-text token(s): generation stops there."""
    pad_token_id: Count | None = None
    """Padding token, if the tokenizer has one."""

    # ---------------------------------------------------------- what a family says of itself

    defaults: ClassVar[dict[str, Any]]
    """Values that transformers (4.57 and 5.x agree) takes for fields above that are missing."""
    null_fields: ClassVar[tuple[str, ...]] = ()
    """Fields whose `null` means something; that of others means the default."""
    hf_class: ClassVar[str]
    """Class in transformers."""
    hf_token_ids: ClassVar[dict[str, int]] = {}
    """Token ids of the family's public tokenizer. They are meant for that tokenizer only, so they
    count for keys missing from a config.json and not for a model described here."""
    hf_omitted: ClassVar[tuple[str, ...]] = ()
    """Fields that are no key of the family's config.json."""
    hf_neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Keys that the family does not have, by the values that say what it does anyway."""
    topk_method: ClassVar[str] = "greedy"
    """How experts are chosen, in the word of DeepSeek's config.json."""
    window_switch: ClassVar[bool] = False
    """Whether `use_sliding_window` decides about the `sliding_window` in a config.json."""
    can_tie: ClassVar[bool] = True
    """Whether other engines load tied embeddings of the family rightly."""
    fixed_head_dim: ClassVar[bool] = False
    """Whether heads are hidden_size / num_attention_heads wide, and config.json does not say it."""
    post_norm: ClassVar[bool] = False
    """Whether the norms stand behind attention and feed-forward, before what these give is added,
    and not in front of them."""
    activations: ClassVar[dict[str, str]] = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}
    """`hidden_act` → activation of `moe`'s table `ACTIVATIONS`."""
    router_score: ClassVar[str] = "softmax"
    """How the family's routers make scores of logits."""
    has_selection_bias: ClassVar[bool] = False
    """Whether the family adds a bias to the scores for the selection of experts."""
    has_scaling_factor: ClassVar[bool] = False
    """Whether the family's config.json has `routed_scaling_factor`."""
    layer_prefix: ClassVar[str] = "model.layers.{}."
    """Of the names of a layer's tensors."""
    tensor_names: ClassVar[Names] = TENSOR_NAMES
    """Where each parameter lies in a folder (`models.hf.names`)."""
    small: ClassVar[dict[str, int]] = {}
    """Widths of the family's own for a model that is to be small, with heads of width 16."""
    engine_rows: ClassVar[tuple] = ()
    """Rows (`models.engines.Feature`) of the table of what other engines make of a folder."""

    def attention(self, layer: int) -> nn.Module:
        """The attention of decoder layer `layer`; see `models.attention` for what it must have."""
        raise NotImplementedError(f"{type(self).__name__}.attention")

    @classmethod
    def derived(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Fields with what follows from others where it is missing; wrong types are left to
        pydantic."""
        heads, width = fields.get("num_attention_heads"), fields.get("hidden_size")
        if not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
            return fields
        fields.setdefault("num_key_value_heads", heads)
        if "head_dim" not in fields:
            if width % heads:
                raise ValueError(
                    f"hidden_size={width} is no multiple of num_attention_heads={heads}: give "
                    "head_dim"
                )
            fields["head_dim"] = width // heads
        return fields

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` (from 0) holds experts; otherwise it holds a dense MLP."""
        return False

    def all_dense(self) -> dict[str, Any] | None:
        """Fields that make every layer dense; None where the family cannot."""
        return None

    def moe_config(self, layer: int, **options: Any) -> MoEConfig | None:
        """Config of layer `layer`'s experts and router, or None for a dense layer.

        `options`: fields of MoEConfig that are no architecture (kernels, save, rounding ...); one
        that is, say `selection_bias`, makes a layer that the family does not have.
        """
        return None

    def expert_widths(self, layer: int) -> tuple[int, ...] | None:
        """Width of each expert of decoder layer `layer`; None where all are equal, or none."""
        return None

    def hf_constants(self) -> dict[str, Any]:
        """Keys of the family's config.json that are no fields here."""
        return {}

    @classmethod
    def read_hf(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """A config.json without what only repeats other keys or changes nothing.

        Raises:
            UserError: a key that contradicts others.
        """
        return raw

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of each head."""
        return self.head_dim

    @property
    def widest_head(self) -> int:
        """Width of a head in the products of attention: the widest of queries, keys and values."""
        return self.head_dim

    def rope(self) -> Rope:
        """The rotary embedding that these fields describe."""
        return Rope(
            self.rotary_dim, self.rope_theta, self.rope_scaling, self.max_position_embeddings
        )

    @property
    def qk_norm(self) -> Literal["none", "head", "full"]:
        """RMSNorm of queries and keys: per head, over the whole projection, or none."""
        return "none"

    def problems(self) -> Iterator[str]:
        """What makes this config impossible, most basic first."""
        if self.hidden_act not in self.activations:
            yield (
                f"hidden_act={self.hidden_act!r} is not supported for {self.family}; allowed: "
                f"{', '.join(self.activations)}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            yield (
                f"num_key_value_heads={self.num_key_value_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.fixed_head_dim and self.head_dim * self.num_attention_heads != self.hidden_size:
            yield (
                f"head_dim={self.head_dim}: {self.family} needs hidden_size/num_attention_heads="
                f"{self.hidden_size / self.num_attention_heads:g}"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            yield (
                f"head_dim={self.head_dim} rotates {self.rotary_dim} dimensions; RoPE needs an "
                "even number of at least 2"
            )
        scaling = self.rope_scaling
        if scaling is not None and self.rotary_dim < SCALINGS[scaling["rope_type"]].smallest:
            yield (
                f"rope_scaling of type {scaling['rope_type']} needs at least "
                f"{SCALINGS[scaling['rope_type']].smallest} rotated dimensions per head; these are "
                f"{self.rotary_dim}"
            )
        if self.tie_word_embeddings and not self.can_tie:
            yield (
                f"tie_word_embeddings=true: vLLM and SGLang load a tied {self.family} wrongly; "
                "allowed: false"
            )
        ids = {"bos_token_id": self.bos_token_id, "pad_token_id": self.pad_token_id}
        named = [(key, value) for key, value in ids.items() if value is not None]
        for key, value in named + [("eos_token_id", value) for value in self.eos_token_ids]:
            if value >= self.vocab_size:
                yield f"{key}={value} must be below vocab_size={self.vocab_size}"

    # ------------------------------------------------------- what the fields mean together

    @property
    def activation(self) -> str:
        """Activation of experts and dense MLPs, by its name in `moe`."""
        return self.activations[self.hidden_act]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-text tokens; empty when none is known."""
        ids = self.eos_token_id
        return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)

    @property
    def moe_layers(self) -> list[int]:
        """Numbers of the layers with experts, ascending; their order is the order of stacked
        statistics.
        """
        return [layer for layer in range(self.num_hidden_layers) if self.is_moe_layer(layer)]

    @property
    def mixed_widths(self) -> bool:
        """Whether experts of a layer have different widths."""
        return False

    @property
    def folded_factor(self) -> float:
        """What an exported folder has in the experts' down projections: the gates' factor, where
        the family's config.json has no key for it."""
        return 1.0

    # ------------------------------------------------------------------ making one

    def __new__(cls, *args: Any, **fields: Any) -> ModelConfig:
        family = fields.get("family")
        if cls is ModelConfig and isinstance(family, str):
            cls = FAMILIES.get(family, cls)
        return super().__new__(cls)

    @model_validator(mode="wrap")
    @classmethod
    def _as_its_family(cls, raw: Any, validate: Any) -> ModelConfig:
        """Where a field of another config is a `ModelConfig`."""
        family = raw.get("family") if isinstance(raw, dict) else None
        if cls is ModelConfig and isinstance(family, str) and family in FAMILIES:
            return FAMILIES[family].model_validate(raw)
        return validate(raw)

    @field_validator("family", mode="before")
    @classmethod
    def _is_known(cls, family: Any) -> str:
        if not isinstance(family, str) or family not in FAMILIES:
            allowed = ", ".join(map(repr, FAMILIES))
            raise PydanticKnownError("literal_error", {"expected": allowed})
        return family

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        if cls is ModelConfig:  # only the missing or wrong family is to be named
            return {key: value for key, value in raw.items() if key == "family"}
        given = {k: value for k, value in raw.items() if value is not None or k in cls.null_fields}
        foreign = [key for key in given if key not in cls.model_fields and key in known_fields()]
        if foreign:
            told = ", ".join(f"{key}={given[key]!r}" for key in foreign)
            what = "is no field" if len(foreign) == 1 else "are no fields"
            raise ValueError(
                f"{told} {what} of the family {raw.get('family')}, leave "
                f"{'it' if len(foreign) == 1 else 'them'} out"
            )
        filled = {**cls.defaults, **given}
        if isinstance(filled.get("rope_scaling"), dict):
            longest = filled.get("max_position_embeddings")
            filled["rope_scaling"] = normal_rope_scaling(filled["rope_scaling"], longest)
        return cls.derived(filled)

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        for problem in self.problems():
            raise ValueError(problem)
        return self

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

    # ------------------------------------------------------------------ config.json

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """The complete config.json content, in the spellings of transformers 4.57 and 5.x at once:
        4.57 silently ignores the RoPE base of a file that has only `rope_parameters`, and other
        engines still look for the old keys.
        """
        out: dict[str, Any] = {
            "architectures": [self.hf_class],
            "model_type": self.family,
            "torch_dtype": dtype,
            "dtype": dtype,
            "use_cache": True,
            "attention_dropout": 0.0,
        }
        skip = {"family", *self.hf_omitted, *(["head_dim"] if self.fixed_head_dim else [])}
        out |= {key: getattr(self, key) for key in type(self).model_fields if key not in skip}
        if self.window_switch:
            out |= {"use_sliding_window": False, "sliding_window": None}
            out["max_window_layers"] = self.num_hidden_layers
        out |= self.hf_constants()
        rope = dict(self.rope_scaling or {"rope_type": "default"})
        if self.rope_scaling is not None:
            out["rope_scaling"] = rope | {"type": rope["rope_type"]}
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in out:
                rope[key] = out[key]
        return out | {"rope_parameters": rope}


def known_fields() -> dict[str, None]:
    """Every field that some family has, in order."""
    models = (ModelConfig, *FAMILIES.values())
    return dict.fromkeys(key for model in models for key in model.model_fields)
