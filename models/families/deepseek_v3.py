"""DeepSeek-V3 (arXiv 2412.19437): multi-head latent attention, and experts chosen by sigmoid scores
with a selection bias, within groups, beside shared ones; the first layers are dense."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from models.attention.mla import EPS, MultiHeadLatentAttention, Widths
from models.config import FUSED_NAMES, TENSOR_NAMES, Count, Positive, Size
from models.engines import (
    ROPE_SCALINGS,
    YES,
    Feature,
    Verdict,
    no,
    scaled_by,
    untried,
    wrong,
)
from models.errors import UserError
from models.moe_config import MoEModelConfig
from models.rope import Yarn

MOE_NAMES = {
    "moe.router.selection_bias": "mlp.gate.e_score_correction_bias",
    "moe.shared.gate_proj": "mlp.shared_experts.gate_proj",
    "moe.shared.up_proj": "mlp.shared_experts.up_proj",
    "moe.shared.down_proj": "mlp.shared_experts.down_proj",
}
OWN_NAMES = MOE_NAMES | {
    "attn.q_a": "self_attn.q_a_proj",
    "attn.q_a_norm": "self_attn.q_a_layernorm",
    "attn.q_b": "self_attn.q_b_proj",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_a_norm": "self_attn.kv_a_layernorm",
    "attn.kv_b": "self_attn.kv_b_proj",
}


NOT_READ = no("does not load a deepseek_v3 of this kind")
YARN = {"rope_type": "yarn", **ROPE_SCALINGS["yarn"]}
USUAL = {
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
}


def _row(
    name: str, has: Callable[[Any], bool], example: dict[str, Any], llama_cpp: Verdict = YES
) -> Feature:
    """A row of the engines' table."""
    verdicts = {"vLLM": untried("a deepseek_v3"), "llama.cpp": llama_cpp}
    verdicts["mistral.rs"] = no("does not run a deepseek_v3 with values narrower than its keys")
    return Feature(name, has, example, verdicts)


def _weighs_alike(config: MoEModelConfig) -> bool:
    scaling = config.rope_scaling
    return bool(scaling.get("mscale")) and scaling["mscale"] == scaling.get("mscale_all_dim")


class DeepseekMoE(MoEModelConfig):
    """The experts of DeepSeek-V3, which GLM-4.5 has too."""

    moe_intermediate_size: Size
    """Width of each expert."""
    first_k_dense_replace: Count
    """The first so many layers are dense."""
    n_shared_experts: Size
    """Experts that every token uses, as one MLP of that many expert widths."""
    n_group: Positive
    """Groups of experts for group-limited selection."""
    topk_group: Positive
    """Groups that a token may choose from."""

    hf_expert_counts = ("n_routed_experts",)
    topk_method = "noaux_tc"
    can_tie = False
    router_score = "sigmoid"
    has_selection_bias = True
    has_scaling_factor = True
    expert_width_field = "moe_intermediate_size"

    def is_moe_layer(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    def all_dense(self) -> dict[str, Any]:
        return {"first_k_dense_replace": self.num_hidden_layers}

    def moe_fields(self) -> dict[str, Any]:
        return {"shared_expert_size": self.expert_size * self.n_shared_experts}

    def hf_constants(self) -> dict[str, Any]:
        return {"num_nextn_predict_layers": 0}

    @property
    def expert_groups(self) -> tuple[int, int]:
        return self.n_group, self.topk_group

    def problems(self) -> Iterator[str]:
        """Of groups and dense layers too."""
        yield from super().problems()
        if self.num_experts % self.n_group:
            yield f"n_group={self.n_group} must divide num_experts={self.num_experts}"
        if self.topk_group > self.n_group:
            yield f"topk_group={self.topk_group} must not exceed n_group={self.n_group}"
        per_group = self.num_experts // self.n_group
        if per_group < 2:
            yield (
                f"n_group={self.n_group} leaves {per_group} experts per group; {self.family} ranks "
                "groups by their two best experts and needs at least 2"
            )
        if self.topk_group * per_group < self.num_experts_per_tok:
            yield (
                f"topk_group={self.topk_group} groups of {per_group} experts are fewer than "
                f"num_experts_per_tok={self.num_experts_per_tok}"
            )
        if self.first_k_dense_replace > self.num_hidden_layers:
            yield (
                f"first_k_dense_replace={self.first_k_dense_replace} exceeds "
                f"num_hidden_layers={self.num_hidden_layers}"
            )


class DeepseekV3(DeepseekMoE):
    """Multi-head latent attention, with and without a latent of the queries, RoPE on a part of each
    head; sigmoid router with selection bias, groups and scaling, `norm_topk_prob` either way; dense
    layers by `first_k_dense_replace`; shared experts."""

    family: Literal["deepseek_v3"] = "deepseek_v3"

    q_lora_rank: Size | None = 1536
    """Width of the latent that queries are made of. `null`: they are made of the layer's input."""
    kv_lora_rank: Size = 512
    """Width of the latent that keys and values are made of, and that generation keeps."""
    qk_nope_head_dim: Size = 128
    """Width of a query or key head that is not rotated."""
    qk_rope_head_dim: Size = 64
    """Width that is rotated, beside that; all heads share the key's. `head_dim` is the same."""
    v_head_dim: Size = 128
    """Width of a head of the values."""
    rope_interleave: bool = True
    """The rotated pairs are neighbours and not halves."""
    attention_bias: bool = False
    """Biases in the projections to the latents and in o."""

    hf_class = "DeepseekV3ForCausalLM"
    defaults = {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    }
    null_fields = ("q_lora_rank",)
    hf_token_ids = {"bos_token_id": 0, "eos_token_id": 1}
    hf_omitted = ("head_dim",)
    hf_neutral = {"moe_layer_freq": (1,), "pretraining_tp": (1,), "ep_size": (1,)}
    tensor_names = TENSOR_NAMES | OWN_NAMES
    fused_names = FUSED_NAMES | OWN_NAMES
    small = {
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    }

    def attention(self, layer: int) -> MultiHeadLatentAttention:
        return MultiHeadLatentAttention(
            self,
            layer,
            self._widths,
            bias=self.attention_bias,
            interleaved=self.rope_interleave,
            scale=self._score_scale,
        )

    @property
    def _widths(self) -> Widths:
        return Widths(
            query_latent=self.q_lora_rank,
            latent=self.kv_lora_rank,
            plain=self.qk_nope_head_dim,
            rotated=self.qk_rope_head_dim,
            value=self.v_head_dim,
        )

    @property
    def _score_scale(self) -> float:
        """YaRN's amplitude is for what it rotates; `mscale_all_dim` is for whole heads."""
        scaling, scale = self.rope().scaling, self._widths.key**-0.5
        if isinstance(scaling, Yarn) and scaling.mscale_all_dim:
            scale *= scaling.growth(scaling.mscale_all_dim) ** 2
        return scale

    @property
    def widest_head(self) -> int:
        return max(self._widths.key, self.v_head_dim)

    @classmethod
    def derived(cls, fields: dict[str, Any]) -> dict[str, Any]:
        rotated = fields.get("qk_rope_head_dim", cls.model_fields["qk_rope_head_dim"].default)
        return super().derived({"head_dim": rotated} | fields)

    @classmethod
    def read_hf(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """`auto_map` names code of the folder for what transformers has itself by now; it is not
        run. The balance losses of the public file are of its training."""
        skipped = {"auto_map", "seq_aux", "aux_loss_alpha", "qk_head_dim"}
        parts, given = ("qk_nope_head_dim", "qk_rope_head_dim"), raw.get("qk_head_dim")
        widths = [raw.get(key, cls.model_fields[key].default) for key in parts]
        total = sum(width for width in widths if isinstance(width, int))
        if given not in (None, total):
            raise UserError(
                f"config.json contradicts itself: qk_head_dim={given!r} beside {' + '.join(parts)} "
                f"= {total}"
            )
        return {key: value for key, value in raw.items() if key not in skipped}

    def hf_constants(self) -> dict[str, Any]:
        """With what engines look for that have several DeepSeek models in one class."""
        more = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
        return super().hf_constants() | more

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        heads, rotated = self.num_attention_heads, self.qk_rope_head_dim
        if self.num_key_value_heads != heads:
            yield (
                f"num_key_value_heads={self.num_key_value_heads}: every head of deepseek_v3 has "
                f"keys and values of its own; allowed: num_attention_heads={heads}"
            )
        if self.head_dim != rotated:
            yield (
                f"head_dim={self.head_dim}: in deepseek_v3 it is the rotated width; allowed: "
                f"qk_rope_head_dim={rotated}, or leave it out"
            )

    engine_rows = (
        _row("", lambda c: True, USUAL),
        _row("q_lora_rank: null", lambda c: c.q_lora_rank is None, {"q_lora_rank": None}, NOT_READ),
        _row("norm_topk_prob: false", lambda c: not c.norm_topk_prob, {"norm_topk_prob": False}),
        _row(
            "attention_bias: true", lambda c: c.attention_bias, {"attention_bias": True}, NOT_READ
        ),
        _row("expert groups", lambda c: c.n_group > 1, {"n_group": 4, "topk_group": 2}),
        _row("n_shared_experts above 1", lambda c: c.n_shared_experts > 1, {"n_shared_experts": 2}),
        _row(
            "rope_interleave: false",
            lambda c: not c.rope_interleave,
            {"rope_interleave": False},
            wrong("rotates neighbours whatever the rope_interleave of a deepseek_v3 says"),
        ),
        _row(
            "rms_norm_eps other than 1e-6",
            lambda c: c.rms_norm_eps != EPS,
            {"rms_norm_eps": 0.05},
            wrong("takes the rms_norm_eps of a deepseek_v3 for its latents too"),
        ),
        _row(
            "yarn RoPE scaling, mscale as mscale_all_dim",
            lambda c: scaled_by("yarn")(c) and _weighs_alike(c),
            {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        ),
        _row(
            "yarn RoPE scaling otherwise",
            lambda c: scaled_by("yarn")(c) and not _weighs_alike(c),
            {"rope_scaling": YARN},
            wrong("computes the yarn of a deepseek_v3 otherwise unless mscale is mscale_all_dim"),
        ),
        *(
            _row(
                f"{kind} RoPE scaling",
                scaled_by(kind),
                {"rope_scaling": {"rope_type": kind, **ROPE_SCALINGS[kind]}},
                verdict,
            )
            for kind, verdict in (
                ("linear", wrong("computes linear RoPE scaling of a deepseek_v3 otherwise")),
                ("llama3", wrong("computes llama3 RoPE scaling of a deepseek_v3 otherwise")),
                ("dynamic", YES),
            )
        ),
        _row(
            "hidden_act other than silu",
            lambda c: c.hidden_act != "silu",
            {"hidden_act": "gelu"},
            wrong("computes a deepseek_v3 with silu whatever its hidden_act says"),
        ),
    )
