"""A Mixture-of-Experts model from a dense Hugging Face checkpoint.

    dense = load_dense("Qwen3-0.6B/")
    model, exact = upcycle(dense, num_experts=8, num_experts_per_tok=2)

The dense Qwen3 is a qwen3_moe all of whose layers are dense, so one `Decoder` holds either. See
`moe.upcycle` for what is done to a layer.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from models.build import build_model, start_routers
from models.config import ModelConfig
from models.errors import UserError
from models.hf import load_weights
from models.hf.config import config_from_hf, end_tokens, read_config_json
from models.transformer import Decoder
from moe.upcycle import upcycle_layer

# model_type of a dense checkpoint -> family whose dense layers are the same
SPARSE_FAMILY = {"qwen3": "qwen3_moe"}


def load_dense(folder: str | Path) -> Decoder:
    """The model in a dense folder, float32 on the CPU.

    Raises:
        UserError: another model_type, or what `config_from_hf` and `load_weights` refuse.
    """
    raw = read_config_json(Path(folder) / "config.json")
    kind = raw.get("model_type")
    if kind not in SPARSE_FAMILY:
        raise UserError(
            f"model_type={kind!r} cannot be upcycled; allowed: {', '.join(SPARSE_FAMILY)}"
        )
    count = raw.get("num_hidden_layers", 0)
    layers = list(range(count)) if isinstance(count, int) else []  # from_hf names what is wrong
    raw = raw | {"model_type": SPARSE_FAMILY[kind], "mlp_only_layers": layers}
    raw |= {"eos_token_id": eos} if (eos := end_tokens(folder)) is not None else {}
    config = config_from_hf(raw)
    model = build_model(config, seed=None)
    load_weights(model, folder)
    return model


@torch.no_grad()
def upcycle(
    dense: Decoder,
    *,
    num_experts: int,
    num_experts_per_tok: int,
    granularity: int = 1,
    sparse_step: int = 1,
    seed: int = 0,
) -> tuple[Decoder, bool]:
    """The model with experts in every `sparse_step`-th layer, and whether it computes the same.

    Args:
        dense: from `load_dense`.
        granularity: shards into which each copy of a dense network is cut.
        seed: of the routers.

    Raises:
        UserError: numbers that do not fit, by name.
    """
    width = dense.config.intermediate_size
    divided = {
        "intermediate_size": width,
        "num_experts": num_experts,
        "num_experts_per_tok": num_experts_per_tok,
    }
    for name, value in divided.items():
        if granularity < 1 or value % granularity:
            raise UserError(f"granularity={granularity} must divide {name}={value}")
    fields = dense.config.model_dump() | {
        "num_experts": num_experts,
        "num_experts_per_tok": num_experts_per_tok,
        "moe_intermediate_size": width // granularity,
        "norm_topk_prob": True,  # gates that sum to 1: what preserves the function
        "decoder_sparse_step": sparse_step,
        "mlp_only_layers": [],
    }
    config = ModelConfig.of_user(fields)
    if not config.moe_layers:
        raise UserError(
            f"sparse_step={sparse_step} leaves none of {config.num_hidden_layers} layers to upcycle"
        )
    model = build_model(config, seed=seed)
    theirs = dict(dense.named_parameters())
    for name, parameter in model.named_parameters():
        if name in theirs:
            parameter.copy_(theirs[name])
    exact = True
    for layer in config.moe_layers:
        mlp = dense.layers[layer].mlp
        weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        moe = model.layers[layer].moe
        exact &= upcycle_layer(moe, *weights, granularity=granularity)
    start_routers(model)
    return model, exact


@torch.no_grad()
def mean_loss(model: Decoder, tokens_BL: Tensor, rows: int = 1) -> float:
    """Mean cross-entropy of the next token, summed in float64, `rows` rows at a time."""
    total = 0.0
    for part_BL in tokens_BL.split(rows):
        logits_BLV = model(part_BL, logits=True).logits[:, :-1]
        for logits_LV, targets_L in zip(logits_BLV, part_BL[:, 1:]):
            for some_LV, some_L in zip(logits_LV.split(64), targets_L.split(64)):
                total += F.cross_entropy(some_LV.double(), some_L, reduction="sum").item()
    return total / (tokens_BL.shape[0] * (tokens_BL.shape[1] - 1))
