"""Translation between `ModelConfig` and a Hugging Face config.json.

Reading takes 4.x files (rope_theta, rope_scaling, num_experts) and 5.x files (rope_parameters,
num_local_experts). Writing gives both spellings, as 4.57 silently ignores the RoPE base of a file
that has only `rope_parameters`, and other engines still look for the old keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from models.config import (
    _HF_TOKEN_IDS,
    _OWN,
    FAMILY_DEFAULTS,
    UNTIED,
    Family,
    _normal_rope_scaling,
    end_tokens,
    read_config_json,
)
from models.errors import UserError

if TYPE_CHECKING:
    from models.config import ModelConfig

ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}
# Names of one quantity over families and versions.
_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")

# Keys that do not change the function computed: book-keeping, generation, outputs of training.
_BOOKKEEPING = frozenset(
    [
        "architectures",
        "transformers_version",
        "_name_or_path",
        "model_type",
        "dtype",
        "torch_dtype",
        "use_cache",
        "output_router_logits",
        "router_aux_loss_coef",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torchscript",
        "pruned_heads",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "is_decoder",
        "cross_attention_hidden_size",
        "add_cross_attention",
        "tie_encoder_decoder",
        "finetuning_task",
        "id2label",
        "label2id",
        "task_specific_params",
        "problem_type",
        "tokenizer_class",
        "prefix",
        "sep_token_id",
        "decoder_start_token_id",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "num_beam_groups",
        "diversity_penalty",
        "tf_legacy_loss",
        "use_bfloat16",
        "attn_implementation",
        "_attn_implementation",
        "max_window_layers",
        "num_nextn_predict_layers",
        "num_mtp_layers",
    ]
)
# Features of other families, by the values that switch them off. Tools that write one config.json
# for many families leave such keys behind.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "use_qk_norm": (False,),
    "norm_topk_prob": (True,),  # of mixtral, which always renormalises
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "first_k_dense_replace": (0,),
    "moe_layer_freq": (1,),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
    "shared_expert_intermediate_size": (0,),
    "n_group": (1,),
    "topk_group": (1,),
    "routed_scaling_factor": (1, 1.0),
}
# A family that always norms queries and keys says so with true.
_FAMILY_NEUTRAL: dict[tuple[str, str], tuple[Any, ...]] = {
    ("qwen3_moe", "use_qk_norm"): (True,),
    ("olmoe", "use_qk_norm"): (True,),
}


def fields_from_hf(
    source: dict[str, Any] | str | Path, ignore_keys: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Arguments of `ModelConfig` from a Hugging Face config: its content, its path, or a folder,
    whose generation_config.json says what generation stops at.

    Raises:
        UserError: naming what is not understood.
    """
    raw = read_config_json(source)
    family = raw.get("model_type")
    if family not in get_args(Family):  # which need not be text
        raise UserError(
            f"model_type={family!r} is not supported; allowed: {', '.join(get_args(Family))}"
        )
    own = FAMILY_DEFAULTS[family]
    raw = {key: value for key, value in raw.items() if key not in ignore_keys}
    _refuse_unsupported(raw, family)

    fields: dict[str, Any] = {"family": family, **_HF_TOKEN_IDS.get(family, {})}
    unknown = []
    for key, value in raw.items():
        if key in _EXPERT_COUNT_KEYS or key in _ROPE_KEYS or key in _CHECKED:
            continue  # _one_of, _rope_fields and _refuse_unsupported read them
        if key in own or key in _OWN:
            fields[key] = value
        elif key not in _BOOKKEEPING and not _changes_nothing(key, value, family):
            unknown.append(key)
    if fields.get("tie_word_embeddings") is True and family in UNTIED:
        fields["tie_word_embeddings"] = False  # load_weights gives both matrices the same values
    if unknown:
        names = ", ".join(sorted(unknown))
        raise UserError(
            f"config.json has keys that are not understood: {names}; if they do not change what "
            "the model computes, import it with scripts/import_hf.py FOLDER OUT --ignore-key KEY"
        )
    fields["num_experts"] = _one_of(raw, _EXPERT_COUNT_KEYS)
    fields.update(_rope_fields(raw, family))
    for key in ("initializer_range", "rms_norm_eps", "routed_scaling_factor", "clip_qkv"):
        if isinstance(fields.get(key), int) and not isinstance(fields[key], bool):
            fields[key] = float(fields[key])
    if (ends := end_tokens(source)) is not None:
        fields["eos_token_id"] = ends
    return fields


def _changes_nothing(key: str, value: Any, family: str) -> bool:
    """Whether a key that the family does not have says only that a feature is as the family has
    it.
    """
    if value is None:
        return True
    allowed = _FAMILY_NEUTRAL.get((family, key), _NEUTRAL.get(key, ()))
    return any(type(value) is type(neutral) and value == neutral for neutral in allowed)


def _one_of(raw: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The value that the given keys share; None when none is there."""
    given = {key: raw[key] for key in keys if raw.get(key) is not None}
    values = list(given.values())
    if any(value != values[0] for value in values):
        raise UserError(f"config.json contradicts itself: {given}")
    return values[0] if values else None


def _rope_fields(raw: dict[str, Any], family: str) -> dict[str, Any]:
    """rope_theta, rope_scaling and partial_rotary_factor from either style; both styles must
    agree.
    """
    new = raw.get("rope_parameters") or {}
    if not isinstance(new, dict) or any(isinstance(value, dict) for value in new.values()):
        raise UserError(f"rope_parameters={new!r} is not supported; expected one flat object")
    theta = _one_of(
        {"rope_theta": raw.get("rope_theta"), "rope_parameters.rope_theta": new.get("rope_theta")},
        ("rope_theta", "rope_parameters.rope_theta"),
    )
    share = _one_of(
        {
            "partial_rotary_factor": raw.get("partial_rotary_factor"),
            "rope_parameters.partial_rotary_factor": new.get("partial_rotary_factor"),
        },
        ("partial_rotary_factor", "rope_parameters.partial_rotary_factor"),
    )
    own = ("rope_theta", "partial_rotary_factor")
    scaling_new = _normal_rope_scaling({k: v for k, v in new.items() if k not in own})
    scaling_old = _normal_rope_scaling(raw.get("rope_scaling") or {})
    if new and raw.get("rope_scaling") and scaling_new != scaling_old:
        raise UserError(
            f"config.json contradicts itself: rope_scaling={raw['rope_scaling']}, "
            f"rope_parameters={new}"
        )
    fields: dict[str, Any] = {"rope_scaling": scaling_new or scaling_old}
    if theta is not None:
        fields["rope_theta"] = float(theta)
    if "partial_rotary_factor" in FAMILY_DEFAULTS[family]:
        fields["partial_rotary_factor"] = None if share is None else float(share)
    elif share not in (None, 1.0):
        raise UserError(
            f"partial_rotary_factor={share} is not supported for {family}; allowed: 1.0"
        )
    return fields


# Features that transformers has and this model does not compute; each entry is read in
# _refuse_unsupported.
_CHECKED = frozenset(
    [
        "sliding_window",
        "use_sliding_window",
        "layer_types",
        "attention_dropout",
        "router_jitter_noise",
        "quantization_config",
        "auto_map",
        "scoring_func",
        "topk_method",
        "rope_interleave",
        "mlp_bias",
    ]
)


def _refuse_unsupported(raw: dict[str, Any], family: str) -> None:
    def refuse(key: str, allowed: str) -> None:
        raise UserError(f"{key}={raw[key]!r} is not supported for {family}; allowed: {allowed}")

    longest = raw.get("max_position_embeddings", FAMILY_DEFAULTS[family]["max_position_embeddings"])
    if raw.get("use_sliding_window"):
        refuse("use_sliding_window", "false")
    # Qwen3 writes a sliding_window that only use_sliding_window turns on; the others use it when it
    # is there.
    if family != "qwen3_moe" and raw.get("sliding_window") is not None:
        window = raw["sliding_window"]
        if not isinstance(window, int) or (isinstance(longest, int) and window < longest):
            refuse("sliding_window", f"null, or at least max_position_embeddings={longest}")
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        refuse("layer_types", "full_attention only")
    for key in ("attention_dropout", "router_jitter_noise"):
        if raw.get(key):
            refuse(key, "0")
    for key in ("quantization_config", "auto_map", "rope_interleave", "mlp_bias"):
        if raw.get(key):
            refuse(key, "none")
    if raw.get("scoring_func") not in (None, "sigmoid" if family == "glm4_moe" else "softmax"):
        refuse("scoring_func", "the family's own")
    if raw.get("topk_method") not in (None, "noaux_tc" if family == "glm4_moe" else "greedy"):
        refuse("topk_method", "the family's own")


def fields_to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The content of config.json; see `ModelConfig.to_hf`."""
    family = config.family
    out: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "torch_dtype": dtype,
        "dtype": dtype,
        "use_cache": True,
        "attention_dropout": 0.0,
        "output_router_logits": False,
    }
    skip = {"num_experts", "rope_scaling", "rope_theta", "partial_rotary_factor"}
    if family == "olmoe":
        skip.add("head_dim")  # no key of its family
    if family == "mixtral":
        skip.add("norm_topk_prob")
    for key in FAMILY_DEFAULTS[family]:
        if key not in skip:
            out[key] = getattr(config, key)
    out |= {key: getattr(config, key) for key in _OWN if getattr(config, key) is not None}

    if family == "glm4_moe":
        out["n_routed_experts"] = config.num_experts
        out["num_nextn_predict_layers"] = 0
    else:
        out["num_local_experts"] = config.num_experts
    if family in ("qwen3_moe", "olmoe"):
        out["num_experts"] = config.num_experts
    if family == "qwen3_moe":
        out |= {"use_sliding_window": False, "sliding_window": None}
        out["max_window_layers"] = config.num_hidden_layers
    if family == "mixtral":
        out |= {"sliding_window": None, "router_jitter_noise": 0.0}

    rope = dict(config.rope_scaling or {"rope_type": "default"})
    out["rope_scaling"] = (
        None if config.rope_scaling is None else rope | {"type": rope["rope_type"]}
    )
    out["rope_theta"] = config.rope_theta
    out["rope_parameters"] = rope | {"rope_theta": config.rope_theta}
    if config.partial_rotary_factor is not None:
        out["partial_rotary_factor"] = config.partial_rotary_factor
        out["rope_parameters"]["partial_rotary_factor"] = config.partial_rotary_factor
    return out
