"""Reading a Hugging Face config.json.

Both 4.x files (rope_theta, rope_scaling, num_experts) and 5.x files (rope_parameters,
num_local_experts) are read. `ModelConfig.to_hf` writes one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from models.config import FAMILIES, ModelConfig
from models.errors import UserError
from models.hf.quantized import quantised_format
from models.moe_config import KEPT_FACTOR
from models.rope import normal_rope_scaling

# Names of one quantity over families and versions.
_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")

# Keys that do not change the function computed: book-keeping, generation, outputs of training.
_BOOKKEEPING = frozenset([
    "architectures", "transformers_version", "_name_or_path", "model_type", "dtype",
    "torch_dtype", "use_cache", "output_router_logits", "router_aux_loss_coef",
    "output_attentions", "output_hidden_states", "return_dict", "torchscript", "pruned_heads",
    "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "cross_attention_hidden_size",
    "add_cross_attention", "tie_encoder_decoder", "finetuning_task", "id2label", "label2id",
    "task_specific_params", "problem_type", "tokenizer_class", "prefix", "sep_token_id",
    "decoder_start_token_id", "max_length", "min_length", "do_sample", "early_stopping",
    "num_beams", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "num_beam_groups", "diversity_penalty",
    "tf_legacy_loss", "use_bfloat16", "attn_implementation", "_attn_implementation",
    "max_window_layers", "num_nextn_predict_layers", "num_mtp_layers",
])  # fmt: skip

# Features of other families, by the values that switch them off. Tools that write one config.json
# for many families leave such keys behind.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "use_qk_norm": (False,),
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


def config_from_hf(
    source: dict[str, Any] | str | Path, *, ignore_keys: tuple[str, ...] = ()
) -> ModelConfig:
    """Read a Hugging Face config: a dict, a config.json, or a folder that holds one (a Hugging
    Face folder, a checkpoint, or a run).

    Every key must be understood, known to be bookkeeping, or named in `ignore_keys`; a feature
    that this model does not compute is a UserError that names it.
    """
    return ModelConfig.of_user(fields_from_hf(source, ignore_keys))


def fields_from_hf(
    source: dict[str, Any] | str | Path, ignore_keys: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Arguments of `ModelConfig` from a Hugging Face config: its content, its path, or a folder,
    whose generation_config.json says what generation stops at.

    Raises:
        UserError: naming what is not understood.
    """
    raw = read_config_json(source)
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"model_type={name!r} is not supported; allowed: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    raw = family.read_hf({key: value for key, value in raw.items() if key not in ignore_keys})
    _refuse_unsupported(raw, name, family)

    fields: dict[str, Any] = {"family": name, **family.hf_token_ids}
    unknown = []
    for key, value in raw.items():
        if key in _ROPE_KEYS:
            continue  # _rope_fields reads them
        if key in _EXPERT_COUNT_KEYS and "num_experts" in family.model_fields:
            continue  # _one_of reads them
        if key == KEPT_FACTOR:
            fields["routed_scaling_factor"] = value
        elif key == "routed_scaling_factor" and not family.has_scaling_factor:
            if not _changes_nothing(key, value, family):
                unknown.append(key)
        elif key in family.model_fields and key != "family":
            fields[key] = value
        elif key in _CHECKED:
            continue  # _refuse_unsupported reads them
        elif key not in _BOOKKEEPING and not _changes_nothing(key, value, family):
            unknown.append(key)
    if fields.get("tie_word_embeddings") is True and not family.can_tie:
        fields["tie_word_embeddings"] = False  # load_weights gives both matrices the same values
    if unknown:
        names = ", ".join(sorted(unknown))
        raise UserError(
            f"config.json has keys that are not understood: {names}; if they do not change what "
            "the model computes, import it with scripts/import_hf.py FOLDER OUT --ignore-key KEY"
        )
    if "num_experts" in family.model_fields:
        fields["num_experts"] = _one_of(raw, _EXPERT_COUNT_KEYS)
    fields.update(_rope_fields(raw, name, family))
    if (ends := end_tokens(source)) is not None:
        fields["eos_token_id"] = ends
    return fields


def _changes_nothing(key: str, value: Any, family: type[ModelConfig]) -> bool:
    """Whether a key that the family does not have says only that a feature is as the family has
    it.
    """
    if value is None:
        return True
    allowed = family.hf_neutral.get(key, _NEUTRAL.get(key, ()))
    return any(type(value) is type(neutral) and value == neutral for neutral in allowed)


def _one_of(raw: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The value that the given keys share; None when none is there."""
    given = {key: raw[key] for key in keys if raw.get(key) is not None}
    values = list(given.values())
    if any(value != values[0] for value in values):
        raise UserError(f"config.json contradicts itself: {given}")
    return values[0] if values else None


def _rope_fields(raw: dict[str, Any], name: str, family: type[ModelConfig]) -> dict[str, Any]:
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
    longest = (family.defaults | raw).get("max_position_embeddings")
    scaling_new = normal_rope_scaling({k: v for k, v in new.items() if k not in own}, longest)
    scaling_old = normal_rope_scaling(raw.get("rope_scaling") or {}, longest)
    if new and raw.get("rope_scaling") and scaling_new != scaling_old:
        raise UserError(
            f"config.json contradicts itself: rope_scaling={raw['rope_scaling']}, "
            f"rope_parameters={new}"
        )
    fields: dict[str, Any] = {"rope_scaling": scaling_new or scaling_old}
    if theta is not None:
        fields["rope_theta"] = float(theta)
    if "partial_rotary_factor" in family.model_fields:
        fields["partial_rotary_factor"] = None if share is None else float(share)
    elif share not in (None, 1.0):
        raise UserError(f"partial_rotary_factor={share} is not supported for {name}; allowed: 1.0")
    return fields


# Features that transformers has and this model does not compute; each entry is read in
# _refuse_unsupported.
_CHECKED = frozenset([
    "sliding_window", "use_sliding_window", "layer_types", "attention_dropout",
    "router_jitter_noise", "quantization_config", "auto_map", "scoring_func", "topk_method",
    "rope_interleave", "mlp_bias",
])  # fmt: skip


def _refuse_unsupported(raw: dict[str, Any], name: str, family: type[ModelConfig]) -> None:
    def refuse(key: str, allowed: str) -> None:
        raise UserError(f"{key}={raw[key]!r} is not supported for {name}; allowed: {allowed}")

    filled = family.defaults | raw
    longest = filled.get("max_position_embeddings")
    if raw.get("use_sliding_window"):
        refuse("use_sliding_window", "false")
    if not family.window_switch and raw.get("sliding_window") is not None:
        window = raw["sliding_window"]
        if not isinstance(window, int) or (isinstance(longest, int) and window < longest):
            refuse("sliding_window", f"null, or at least max_position_embeddings={longest}")
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        refuse("layer_types", "full_attention only")
    for key in ("attention_dropout", "router_jitter_noise"):
        if raw.get(key):
            refuse(key, "0")
    quantised_format(raw)  # refuses those that cannot be read
    for key in ("auto_map", "rope_interleave", "mlp_bias"):
        if raw.get(key) and key not in family.model_fields:
            refuse(key, "none")
    if raw.get("scoring_func") not in (None, family.router_score):
        refuse("scoring_func", "the family's own")
    if raw.get("topk_method") not in (None, family.topk_method):
        refuse("topk_method", "the family's own")
