"""Loading a config: what is accepted, and that every mistake is one line with a way out of it."""

import json
import re
import subprocess
import sys

import pytest
import yaml

from training.config.build import (
    Config,
    ConfigError,
    default_config_path,
    field_names,
    load_config,
    make_plan,
    write_resolved,
)

MODEL = {
    "family": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.yaml"
    values = {"model": MODEL, "data": {"seq_len": 64}, "train": {"steps": 200}}
    path.write_text(yaml.safe_dump(values))
    return path


def one_line(caught) -> str:
    text = str(caught.value)
    assert "\n" not in text, text
    assert len(text) < 400, text
    return text


def test_defaults_and_overrides(file):
    config = load_config(
        file,
        [
            "optim.lr=3e-3",
            "train.micro_batch_size=4",
            "run.device=cpu",
            "checkpoint.keep.last=null",
        ],
    )
    assert config.optim.lr == 3e-3
    assert config.train.micro_batch_size == 4
    assert config.run.device == "cpu"
    assert config.checkpoint.keep.last is None
    assert config.model.config.hidden_size == 64
    assert config.model.config.head_dim == 16, "a derived field of the architecture"
    assert config.optim.betas == [0.9, 0.95]


def test_name_comes_from_the_file_unless_given(file):
    assert load_config(file).run.folder.as_posix() == "runs/tiny"
    config = load_config(file, ["run.name=try", "run.dir=/tmp/x"])
    assert config.run.folder.as_posix() == "/tmp/x/try"


MISTAKES = [
    # overrides, what the line must hold
    ("optim.learning_rat=1", "unknown key optim.learning_rat=1"),
    ("optim.weight_decy=1", "unknown key optim.weight_decy=1; did you mean optim.weight_decay?"),
    ("train.lr=1", "unknown key train.lr=1; did you mean optim.lr?"),
    ("train.global-batch-size=8", "did you mean train.global_batch_size?"),
    ("trian.steps=8", "unknown section or key 'trian'; did you mean train?"),
    ("model.num_expert=8", "unknown key model.num_expert=8; did you mean model.num_experts?"),
    ("data.sources.0.pth=x", "unknown key data.sources.pth='x'; did you mean data.sources.path?"),
    ("model.config=1", "model.config is no key"),
    ("train.steps=1.5", "train.steps=1.5 must be a whole number"),
    ("train.steps=010", "train.steps='010' must be a whole number (a leading 0 is ambiguous"),
    ("train.steps=true", "train.steps=true must be a whole number"),
    (
        "run.seed=99999999999999999999",
        "run.seed=99999999999999999999 must be a whole number <= 1e+12",
    ),
    ("parallel.timeout_s=1e20", "must be a number <= 1e+06"),
    ("train.steps=0", "train.steps=0 must be a whole number >= 1"),
    ("optim.lr=fast", "optim.lr='fast' must be a number"),
    ("optim.lr=.nan", "optim.lr=nan must be"),
    ("optim.lr=-1", "optim.lr=-1 must be a number > 0"),
    ("optim.lr=null", "optim.lr=null must be a number"),
    ("optim.betas=[0.9]", "optim.betas=[0.9] must be a list of exactly 2"),
    ("optim.betas=[0.9, 1]", "optim.betas.1=1 must be a number < 1"),
    ("log.trackers=[{kind: wandb, mode: on}]", "log.trackers.0.mode='on' must be one of 'offline'"),
    ("router.bias.kind=quantil", "='quantil' is unknown; allowed: quantile, sign, min_load; did "),
    (
        "data.sources=a.txt",
        "data.sources='a.txt' must be a list of mappings, for example [{path: a",
    ),
    ("data.sources=[a.txt]", "for example [{path: a.txt}], with a space after path:"),
    ("data.sources=[{path:/a, name: b}]", "for example [{path: /a}], with a space after path:"),
    ("data.sources={path: a.txt}", "for example [{path: a.txt}], with a space after path:"),
    (
        "data.validation={kind: sources, sources: a.txt}",
        "data.validation.sources='a.txt' must be a list of mappings",
    ),
    ("data.sources=5", "data.sources=5 must be a list"),
    ("log.plots=off", "log.plots='off' must be true or false"),
    ("train.compile=off", "train.compile='off' must be one of 'auto' or true or false"),
    ("run.name=5", "run.name=5 must be text"),
    ("run.name=../up", "run.name='../up' must be a plain folder name"),
    ("model.family=gpt2", "model.family='gpt2' must be one of 'qwen3_moe', 'olmoe'"),
    ("model.num_experts_per_tok=9", "num_experts_per_tok=9 must not exceed num_experts=8"),
    ("model.num_experts_per_tok=1", "norm_topk_prob"),
    ("model.clip_qkv=8", "clip_qkv=8 is no field of the family qwen3_moe"),
    ("train.epochs=1", "train.steps=200 and train.epochs=1.0: give one of the two, and one only"),
    (
        "train.steps=null",
        "train.steps=null and train.epochs=null: give one of the two, and one only",
    ),
    ("model.family=[qwen3_moe]", "model.family=['qwen3_moe'] must be one of 'qwen3_moe', 'olmoe'"),
    ("model.num_hidden_layers=99999999999", "must be a whole number <= 10000"),
    ("model.head_dim=3", "model.head_dim=3 rotates 3 dimensions; RoPE needs an even number"),
    ("model.clip_qkv=3", "model.clip_qkv=3 is no field of the family qwen3_moe, leave it out"),
    (
        "data.sources=[{path: a, split: train}]",
        "data.sources.0.split='train' is read only with hub",
    ),
    (
        "model.moe_expert_widths=[32,8,8,8,8,8,8,4] experts.policy.kind=revive",
        "experts.policy.kind='revive' takes all experts for equally wide, which they are not with "
        "model.moe_expert_widths; allowed: experts.policy=null",
    ),
    (
        "experts.policy.kind=replace train.sparsity.density=0.5",
        "train.sparsity does not go with experts that come and go (experts); allowed: null",
    ),
    ("data.seq_len=512", "data.seq_len=512 must not exceed model.max_position_embeddings=256"),
    ("model.hf_config=nowhere", "model.hf_config='nowhere': there is no file"),
    ("model.init_from=nowhere", "model.init_from='nowhere': there is no file"),
    (
        "router.rounding.to=nearest router.rounding.max_tiles=1",
        "router.rounding.max_tiles=1 must be a number",
    ),
    (
        "router.rounding.to=up router.rounding.tile=1",
        "router.rounding.tile=1 must be a whole number >= 2",
    ),
    # keys of an option that is null, of another kind, or of none
    ("router.rounding.tile=64", "router.rounding.to is missing"),
    ("router.rounding.til=64 router.rounding.to=up", "did you mean router.rounding.tile?"),
    ("router.bias.rate=0.1", "router.bias.kind is missing; allowed with rate: sign, min_load"),
    (
        "router.bias={kind: sign, rat: 0.1}",
        "unknown key router.bias.rat=0.1; did you mean router.bias.rate?",
    ),
    (
        "router.bias={kind: sign, zz: 0.1}",
        "unknown key router.bias.zz=0.1; valid names in router.bias: freeze_at, calibrate, rate",
    ),
    (
        "router.bias.kind=quantile router.bias.rate=0.1",
        "router.bias.rate=0.1 is no key of kind quantile, which has freeze_at, calibrate, ema; it "
        "is one of kind sign, min_load",
    ),
    ("router.selection.kind=ema", "router.selection.decay is missing"),
    ("router.selection.decay=0.9", "router.selection.kind is missing; allowed with decay: ema"),
    ("router.bias=quantile", "router.bias='quantile' must be auto or a mapping: {kind: quantile"),
    ("router.balance.kind=sequence router.balance.load=flops", "one of kind global, lagged, micro"),
    ("eval.sample=Hello", "eval.sample='Hello' must be null or a mapping of its keys: prompt, "),
    ("optim.kind=adam", "optim.kind='adam' is unknown; allowed: adamw, muon; did you mean adamw?"),
    ("router.bias_update=sign", "unknown key router.bias_update='sign'; did you mean router.bias?"),
    ("model.top_k=2", "did you mean model.num_experts_per_tok?"),
    (
        "router.capacity.factor=4.5 router.end_steps=2",
        "no expert can get more than 4 times",
    ),
    ("router.capacity.factor=1.5 router.end_steps=2 router.rounding.to=nearest", "both decide"),
    (
        "router.selection.kind=sample router.selection.temperature=1 model.num_experts_per_tok=8",
        "does not go with num_experts_per",
    ),
    (
        "router.selection.kind=sample router.selection.temperature=1 router.bias.kind=sign "
        "router.exportable=false",
        "with router.bias.kind=sign",
    ),
    (
        "router.noise.kind=dropout router.noise.probability=0.5 model.num_experts_per_tok=8",
        "router.noise.probability=0.5 needs",
    ),
    (
        "router.rounding.to=nearest router.rounding.min_tiles=0 router.balance=null",
        "router.rounding.min_tiles=0 takes all tokens from an expert",
    ),
    ("router.bias.kind=sign router.end_steps=1 model.num_experts_per_tok=8", "cannot balance"),
    (
        "optim.schedule.kind=constant optim.schedule.min_lr_ratio=0.1",
        "optim.schedule.min_lr_ratio=0.1 is no key of kind constant, which has warmup_steps; it is",
    ),
    (
        "optim.schedule.kind=cosine optim.schedule.decay_fraction=0.5",
        "optim.schedule.decay_fraction=0.5 is no key of kind cosine, which has warmup_steps, min",
    ),
    ("eval.sample.tokens=9", "eval.sample.prompt is missing"),
    (
        "checkpoint.keep.every=10 checkpoint.every_steps=4",
        "checkpoint.keep.every=10 must be a multiple of checkpoint.every_steps=4",
    ),
    ("log.trackers=[{kind: wandb, project: x}]", "log.trackers.0.mode is missing"),
    ("experts.policy.every=5", "experts.policy.kind is missing; allowed with every: replace, res"),
    (
        "experts.policy.kind=replace experts.policy.clone_above=2",
        "experts.policy.clone_above=2 is no key of kind replace",
    ),
    (
        "experts.policy.kind=replace experts.copies.kind=dormant",
        "experts.copies.kind='dormant' needs router.bias",
    ),
    (
        "experts.policy.kind=replace experts.copies.kind=family",
        "experts.copies.kind=family cannot be exported: qwen3_moe has no choice within families. "
        "Give router.end_steps",
    ),
    (
        "experts.policy.kind=replace experts.copies.kind=family experts.copies.noise=0",
        "experts.copies.noise=0 does not go",
    ),
    (
        "experts.policy.kind=replace experts.copies.kind=family router.selection.kind=ema "
        "router.selection.decay=0.9 router.end_steps=9",
        "router.selection.kind='ema' does not go with experts.copies.kind='family'",
    ),
    ("experts.policy.kind=replace experts.start=9", "experts.start=9 must be from 2 to"),
    (
        "experts.policy.kind=replace experts.start=5",
        "experts.start=5 leaves slots free that nothing ever fills; allowed without "
        "experts.policy.kind=resize or events of kind clone: 8 (model.num_experts), or leave it "
        "out",
    ),
    (
        "experts.events=[{step: 5, kind: revive}] experts.start=5",
        "experts.start=5 leaves slots free that nothing ever fills",
    ),
    (
        "experts.policy.kind=replace router.gradient.kind=default",
        "router.gradient does not go with",
    ),
    (
        "experts.policy.kind=resize",
        "experts.policy.kind=resize cannot be exported: qwen3_moe has no different numbers of "
        "experts in its layers. Give router.end_steps: the last so many steps train without it "
        "(levelled",
    ),
    (
        "experts.policy.kind=resize experts.policy.min_experts=6 experts.policy.max_experts=5",
        "experts.policy.min_experts=6 must be from 2 to 5 here",
    ),
    (
        "experts.events=[{step: 5, kind: retire, layer: 0}]",
        "experts.events cannot be exported: qwen3_moe has no different numbers",
    ),
    (
        "experts.events=[{step: 5, kind: clone}]",
        "experts.events.0.kind='clone' would leave MoE layer 0 with 9 experts; allowed: 2 to 8",
    ),
    (
        "experts.events=[{step: 5, kind: retire, expert: 3}, {step: 7, kind: clone, expert: 3}]",
        "experts.events.1.expert=3: that slot is free after step 7 of MoE layer 0",
    ),
    (
        "experts.events=[{step: 5, kind: retire, expert: 3}, {step: 7, kind: clone, slot: 2}]",
        "experts.events.1.slot=2: that slot holds an expert after step 7",
    ),
    (
        "experts.events=[{step: 5, kind: revive, expert: 3, slot: 3}]",
        "experts.events.0.slot=3 is that of its own parent",
    ),
    (
        "experts.events=[{step: 7, kind: retire}, {step: 5, kind: clone}]",
        "experts.events are at the steps [7, 5]; they must stand in order",
    ),
    (
        "experts.events=[{step: 5, kind: retire, slot: 1}]",
        "experts.events.0.slot=1: nothing is put in a slot by a retirement",
    ),
    (
        "experts.events=[{step: 5, kind: retire, layer: 7}]",
        "experts.events.0.layer=7 is none of the 2 MoE layers",
    ),
    (
        "experts.events=[{step: 5, kind: retire, expert: 8}]",
        "experts.events.0.expert=8 is none of the 8 slots",
    ),
    (
        "experts.events=[{step: 5, kind: split}]",
        "experts.events.0.kind='split' must be one of 'clone', 'retire' or 'revive'",
    ),
    (
        "experts.events=[{step: 5, kind: retire, exprt: 1}]",
        "did you mean experts.events.expert?",
    ),
    (
        "router.top_k.kind=linear router.top_k.start=9",
        "router.top_k.start=9 must be above num_experts_per_tok=2 and at most the 8 experts",
    ),
    ("router.top_k.kind=cosine router.top_k.start=2", "router.top_k.start=2 must be above"),
    (
        "router.top_k.kind=linear router.top_k.start=3 router.top_k.soft=true "
        "router.rounding.to=up router.rounding.tile=16 router.rounding.gates=rounded",
        "router.rounding.gates=rounded makes gates anew",
    ),
    (
        "router.rounding.to=up router.rounding.tile=16 router.rounding.gates=none "
        "model.norm_topk_prob=true",
        "gates of a token sum to 1 in evaluation",
    ),
    (
        "router.rounding.to=up router.rounding.tile=16 router.rounding.gates=rounded "
        "model.norm_topk_prob=false",
        "do not sum to 1 in evaluation",
    ),
    (
        "router.bias.kind=sign router.exportable=false router.bias.freeze_at=1",
        "router.bias.freeze_at=1 never lets",
    ),
    (
        "model.mlp_only_layers=[0,1] router.balance.kind=lagged",
        "router.balance has no effect: no layer of this model has experts; leave it out",
    ),
    (
        "model.mlp_only_layers=[0,1] router.noise.kind=jitter router.noise.size=0.1",
        "router.noise has no effect: no layer of this model has experts",
    ),
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_one_line(file, words, expected):
    # "a=[0.9, 1]" holds a space of its own
    overrides = re.split(r" (?=[\w.]+=)", words)
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    assert expected in one_line(caught)


# What only shows once the length of the run, the processes and the device are known.
PLANLESS = [
    (
        "router.top_k.kind=linear router.top_k.start=8 router.top_k.over=0.001",
        "router.top_k.over gives 0 steps",
    ),
    (
        "router.top_k.kind=steps router.top_k.start=3 router.top_k.levels=[[201,2]]",
        "router.top_k.levels reach model.num_experts_per_tok=2 at step 201, after the 200 steps",
    ),
    ("router.freeze_at=201", "router.freeze_at=201 has no effect: the run has 200 steps"),
    (
        "experts.policy.kind=revive experts.policy.after=201",
        "experts.policy.after=201 has no effect",
    ),
    (
        "router.bias.kind=sign router.end_steps=50 router.bias.freeze_at=101",
        "brings the bias to zero from step 101 on; allowed: 1 to 100",
    ),
    ("router.rounding.to=nearest", "gives an expert 1 tiles of router.rounding.tile=128"),
    (
        "router.rounding.to=up router.rounding.tile=16 router.rounding.min_tiles=40",
        "router.rounding.min_tiles=40 is more than an expert can get",
    ),
    ("model.kernels=spmm model.save=x", "save='x' does not go with kernels='spmm'"),
    ("model.kernels=spmm model.moe_intermediate_size=24", "must be a multiple of 16"),
    (
        "experts.policy.kind=replace experts.policy.every=200",
        "experts.policy.every=200 has no effect: the run has 200",
    ),
    (
        "experts.events=[{step: 200, kind: revive}]",
        "experts.events.0.step=200 is too late: the run has 200 steps; allowed: 1 to 199",
    ),
    ("model.kernels=triton", "model.kernels='triton' needs a CUDA device, this run is on cpu"),
    ("model.kernels=hopper", "allowed here: auto, reference, spmm"),
    (
        "model.save=fp8_h",
        "model.save='fp8_h' needs train.dtype='bfloat16', this run's is 'float32'",
    ),
]


@pytest.mark.parametrize(("words", "expected"), PLANLESS, ids=[words for words, _ in PLANLESS])
def test_a_mistake_that_the_plan_shows_is_one_line(file, words, expected, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError) as caught:
        make_plan(load_config(file, [words] if "{" in words else words.split()), cuda=False)
    assert expected in one_line(caught)


def test_processes_that_leave_too_few_rows_for_rounding_are_refused(file):
    words = ["router.rounding.to=up", "router.rounding.tile=64", "train.global_batch_size=8"]
    config = load_config(file, words)
    assert make_plan(config, 1, cuda=False).micro_batch_size == 8
    with pytest.raises(ConfigError, match=r"a micro-batch of 128 tokens gives an expert"):
        make_plan(config, 4, cuda=False)


@pytest.mark.parametrize("section", ["num_hidden_layers: 3", "lr: 1e-3", "learning-rate: 1"])
def test_a_key_one_level_too_high_names_its_section(tmp_path, file, section):
    path = tmp_path / "high.yaml"
    path.write_text(file.read_text() + section + "\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    key = section.split(":")[0]
    assert f"unknown section or key {key!r}" in one_line(caught)
    if key != "learning-rate":
        place = {"lr": "optim.lr", "num_hidden_layers": "model.num_hidden_layers"}[key]
        assert f"did you mean {place}?" in one_line(caught)


@pytest.mark.parametrize("text", ["model: 5\n", "model: [1]\n", "1: {a: 2}\n", "optim: fast\n"])
def test_sections_must_be_mappings(tmp_path, file, text):
    path = tmp_path / "x.yaml"
    kept = yaml.safe_load(file.read_text())
    kept.pop(text.split(":")[0], None)
    path.write_text(yaml.safe_dump(kept) + text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    one_line(caught)


def test_empty_sections_are_defaults(tmp_path, file):
    path = tmp_path / "tiny.yaml"
    path.write_text(file.read_text() + "eval:\n  # rows: 3\nlog:\n")
    assert load_config(path).eval.rows == load_config(file).eval.rows == 128


def test_what_is_missing_is_named(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    with pytest.raises(ConfigError, match=r"model\.family is missing"):
        load_config(path)


def test_resolved_config_loads_again_and_tells_versions(file, tmp_path):
    words = [
        "optim.lr=1e-9",
        "log.trackers=[{kind: wandb, mode: offline}]",
        "run.name=010",
        "router.rounding.to=nearest",
    ]
    words += ["router.rounding.tile=32"]
    config = load_config(file, [*words, "eval.sample.prompt=\"no: way # to, quote 'this'\""])
    out = tmp_path / "resolved.yaml"
    write_resolved(config, out)
    again = load_config(out)
    assert again == config
    assert again.optim.lr == 1e-9
    assert again.run.name == "010"
    head = out.read_text().splitlines()
    assert any(line.startswith("# torch: 2.") for line in head)
    assert any(line.startswith("# git: ") for line in head)
    # Other YAML readers understand it too.
    plain = yaml.safe_load(out.read_text())
    assert plain["log"]["trackers"] == [{"kind": "wandb", "mode": "offline", "project": "tessera"}]
    # What was auto is spelled out, and an option begins with its kind.
    assert list(plain["router"]["balance"].items())[:2] == [("kind", "global"), ("coef", 0.01)]
    assert (plain["router"]["bias"], plain["router"]["score"]) == (None, "softmax")
    assert plain["experts"] is None
    assert plain["optim"]["lr"] == 1e-9
    assert plain["model"]["hidden_size"] == 64


def test_hf_config_gives_fields_and_what_stands_beside_it_wins(file, tmp_path):
    hf = {
        "model_type": "olmoe",
        "architectures": ["OlmoeForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 512,
        "max_position_embeddings": 128,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(hf))
    path = tmp_path / "from_hf.yaml"
    values = {"model": {"hf_config": str(tmp_path)}, "data": {"seq_len": 64}}
    path.write_text(yaml.safe_dump({**values, "train": {"steps": 200}}))
    config = load_config(path, ["model.hidden_size=64", "model.kernels=reference"])
    model = config.model.config
    assert (model.family, model.num_hidden_layers, model.num_experts) == ("olmoe", 3, 4)
    assert model.hidden_size == 64
    assert model.head_dim == 16, "derived from the new hidden_size"
    assert config.model.kernels == "reference"

    # The resolved config spells everything out and needs the file no more.
    write_resolved(config, tmp_path / "out.yaml")
    (tmp_path / "config.json").unlink()
    again = load_config(tmp_path / "out.yaml", ["run.name=from_hf"])
    assert again.model.config == model

    (tmp_path / "config.json").write_text(json.dumps({**hf, "num_experts_per_tok": 5}))
    with pytest.raises(ConfigError, match=r"model\.hf_config=.*num_experts_per_tok=5") as caught:
        load_config(path)
    one_line(caught)
    (tmp_path / "config.json").write_text(json.dumps({**hf, "model_type": "gpt2"}))
    with pytest.raises(ConfigError, match=r"model\.hf_config=.*gpt2") as caught:
        load_config(path)
    one_line(caught)


def test_init_from_gives_the_architecture_alone(tmp_path):
    from models.config import ModelConfig

    (tmp_path / "config.json").write_text(json.dumps(ModelConfig(**MODEL).to_hf()))
    path = tmp_path / "more.yaml"
    values = {"model": {"init_from": str(tmp_path)}, "data": {"seq_len": 64}}
    path.write_text(yaml.safe_dump({**values, "train": {"steps": 200}}))
    config = load_config(path)
    assert config.model.config == ModelConfig(**MODEL)
    assert load_config(path, ["model.hidden_size=64"]) == config
    with pytest.raises(
        ConfigError, match=r"model\.num_experts=4 contradicts model\.init_from"
    ) as e:
        load_config(path, ["model.num_experts=4", "model.hidden_size=32"])
    told = "whose config has 8; leave it out, or give model.num_experts=8 model.hidden_size=64"
    assert told in str(e.value)
    assert load_config(path, told.split("give ")[1].split()) == config
    with pytest.raises(ConfigError, match=r"model\.hf_config is useless beside model\.init_from"):
        load_config(path, [f"model.hf_config={tmp_path}"])
    write_resolved(config, tmp_path / "out.yaml")
    assert load_config(tmp_path / "out.yaml", ["run.name=more"]) == config


def test_every_field_tells_what_it_means():
    from training.config.messages import models_in

    def walk(model, place):
        for key, field in model.model_fields.items():
            inner = models_in(field)
            named = model.__doc__ if key == "kind" else place == "" and inner[0].__doc__
            assert field.description or named, f"{place}{key}"
            for other in inner:
                walk(other, f"{place}{key}.")

    walk(Config, "")


def test_field_names_cover_the_architecture_and_lists_of_sources():
    names = field_names()
    assert {"hidden_size", "kernels", "hf_config"} <= set(names["model"])
    assert "config" not in names["model"]
    assert {"path", "hub", "weight"} <= set(names["data.sources"])


def test_the_quickstart_is_the_default():
    assert load_config() == load_config(default_config_path())


def test_mistakes_end_a_program_with_code_2_in_one_line(file):
    code = (
        "import sys\n"
        "from training.config.build import ConfigError, fail, load_config\n"
        "try: load_config(sys.argv[1], sys.argv[2:])\n"
        "except ConfigError as error:\n"
        "    fail(error)\n"
    )
    command = [sys.executable, "-c", code, str(file), "optim.lr=x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == "error: optim.lr='x' must be a number\n"
    assert done.stdout == ""


@pytest.mark.parametrize("importance", ["taylor", "reap"])
def test_what_needs_whole_experts_is_refused_on_several_processes(importance, tiny_config):
    words = [
        f"experts.importance.kind={importance}",
        "experts.policy.kind=replace",
        "experts.policy.every=2",
    ]
    config = load_config(tiny_config, words)
    make_plan(config, world_size=1, cuda=False)
    wanted = f"experts.importance.kind='{importance}' works in one process only"
    with pytest.raises(ConfigError, match=wanted):
        make_plan(config, world_size=2, cuda=False)
