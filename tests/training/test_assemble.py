"""Models and optimizers as a run starts with them."""

from __future__ import annotations

import pytest
import torch

from models.build import build_model
from models.hf import export_hf
from moe import RouterConfig
from moe.control import routers_of
from parallel import World
from tests.training.tiny import write_inputs
from training.assemble import make_train_state, model_config, pick_attention
from training.checkpoint.weights import save_weights
from training.config.build import ConfigError, load_config, make_plan
from training.data import load_tokenizer

CPU = torch.device("cpu")


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("source", ["drawn", "folder"])
def test_first_master_weights_are_not_rounded(tmp_path, source, weights):
    """Those of a sharded run are float32 values too; a start from rounded ones is another run."""
    words = ["train.dtype=bfloat16", f"optim.storage.weights={weights}"]
    file = write_inputs(tmp_path / "run")
    config = load_config(file, words)
    tokenizer = load_tokenizer(config.data, tmp_path / "tokenizer")
    architecture = model_config(config, tokenizer)
    wide = build_model(architecture, seed=config.run.seed if source == "drawn" else 5)
    if source == "folder":
        export_hf(wide, tmp_path / "hf")
        config = load_config(file, [*words, f"model.init_from={tmp_path / 'hf'}"])
    plan = make_plan(config, cuda=False)
    state = make_train_state(config, architecture, plan, World(), CPU, steps=8)
    tensors = state.optimizer.tensors()
    for name, value in wide.named_parameters():
        parameter = state.model.get_parameter(name)
        kept = torch.float32 if ".router." in name else getattr(torch, weights)
        master = tensors[f"weights/{name}"]
        assert torch.equal(master, value.detach().flatten().to(kept)), name
        assert torch.equal(parameter.detach(), value.detach().to(parameter.dtype)), name
        assert parameter.dtype == (torch.float32 if ".router." in name else torch.bfloat16)


@pytest.mark.parametrize("source", ["average", "none", "folder"])
def test_averaged_router_weights_go_on_or_start_at_the_weight(tmp_path, source):
    file = write_inputs(tmp_path / "run")
    config = load_config(file)
    architecture = model_config(config, load_tokenizer(config.data, tmp_path / "tokenizer"))
    ema = {"kind": "ema", "decay": 0.9} if source == "average" else None
    theirs = build_model(architecture, seed=5, router=RouterConfig(selection=ema))
    if source == "average":
        for router in routers_of(theirs):
            router.rules.selection.weight_ema.mul_(3)
    if source == "folder":
        folder = tmp_path / "hf"
        export_hf(theirs, folder)
    else:
        folder = save_weights(theirs, tmp_path / "source")
    words = [
        f"model.init_from={folder}",
        "router.selection.kind=ema",
        "router.selection.decay=0.9",
        "router.exportable=false",
    ]
    config = load_config(file, words)
    plan = make_plan(config, cuda=False)
    ours = make_train_state(config, architecture, plan, World(), CPU, steps=8).model
    for router, before in zip(routers_of(ours), routers_of(theirs), strict=True):
        assert torch.equal(router.weight, before.weight)
        averaged = source == "average"
        expected = before.rules.selection.weight_ema if averaged else before.weight
        assert torch.equal(router.rules.selection.weight_ema, expected)


def test_flash_attention_that_cannot_be_is_refused_before_a_model_is_built():
    with pytest.raises(ConfigError, match=r"model\.attention='flash4' needs the package") as error:
        pick_attention("flash4", torch.device("cpu"), torch.float32, 32)
    assert "on cpu in float32 with heads of 32; allowed here: auto, pytorch" in str(error.value)
    assert pick_attention("auto", torch.device("cpu"), torch.float32, 32) == "pytorch"
