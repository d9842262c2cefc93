"""Hugging Face folders: what we write loads in transformers, what transformers writes loads
here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from models.build import build_model
from models.errors import UserError
from models.hf import INDEX, HfWeights, export_hf, load_hf, load_weights, tensor_files
from models.transformer import Decoder
from tests.models.tiny import (
    CASES,
    MOE_FAMILIES,
    randomise_buffers_and_norms,
    tiny_config,
    tokens,
    transformers_model,
)


def random_model(case: str, **changes) -> Decoder:
    model = build_model(tiny_config(case, **changes), seed=3)
    randomise_buffers_and_norms(model)
    return model


def assert_same_weights(ours: Decoder, others: Decoder) -> None:
    for model, reference in ((ours, others), (others, ours)):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            same = dict([*reference.named_parameters(), *reference.named_buffers()])[name]
            assert torch.equal(tensor, same), name


def logits_of(model: torch.nn.Module, tokens_BL: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if isinstance(model, Decoder):
            return model.eval()(tokens_BL, logits=True).logits
        return model.eval()(input_ids=tokens_BL).logits


def from_pretrained(folder: Path) -> torch.nn.Module:
    """transformers' model of a folder; a tensor that it did not use or had to invent is an
    error.
    """
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    problems = {key: value for key, value in info.items() if value}
    assert not problems, problems
    return model


# ------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_same(case: str, tmp_path: Path) -> None:
    """Also both settings of norm_topk_prob: olmoe, glm4_moe and qwen3_moe have a case of each."""
    model = random_model(case, max_position_embeddings=128)
    export_hf(model, tmp_path / "out")
    theirs = from_pretrained(tmp_path / "out")
    tokens_BL = tokens(model.config, 2, 100)
    torch.testing.assert_close(
        logits_of(theirs, tokens_BL), logits_of(model, tokens_BL), rtol=1e-4, atol=1e-4
    )
    assert_same_weights(load_hf(tmp_path / "out"), untied(model))


def untied(model: Decoder) -> Decoder:
    """The same model with an output matrix of its own, as it is exported."""
    if not model.config.tie_word_embeddings:
        return model
    other = build_model(model.config.model_copy(update={"tie_word_embeddings": False}))
    other.load_state_dict(model.state_dict())
    return other


def test_dropped_norm_topk_prob_would_show() -> None:
    """K = 2 of logits (2, 1, 0, -1): .6439/.2369 as they are, .7311/.2689 renormalised."""
    gates = {}
    for norm in (False, True):
        config = tiny_config("olmoe", num_experts=4, norm_topk_prob=norm)
        moe = build_model(config, dtype=torch.float64).layers[0].moe
        gating, _ = moe.router.choose(torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64))
        gates[norm] = gating.gate_TK[0].tolist()
    assert gates[False] == pytest.approx([0.6439, 0.2369], abs=1e-4)
    assert gates[True] == pytest.approx([0.7311, 0.2689], abs=1e-4)


def test_generation_goes_on_alike_and_stops(tmp_path: Path) -> None:
    """RoPE base, end-of-text and padding travel along."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    from models.generate import generate

    model = random_model(
        "qwen3_moe", rope_theta=500_000.0, eos_token_id=2, pad_token_id=1, bos_token_id=0
    )
    export_hf(model, tmp_path / "out", generation={"temperature": 0.7, "do_sample": False})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = tokens(model.config, 1, 8)
    ours = [step[0] for step in generate(model, prompt.tolist(), max_new_tokens=20)]
    theirs_ids = theirs.generate(prompt, max_new_tokens=20, do_sample=False)[0, 8:].tolist()
    assert ours == theirs_ids
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["rope_theta"], config["eos_token_id"]) == (500_000.0, 2)
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    ids = (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id)
    assert ids == (0, 2, 1) and generation.temperature == 0.7
    # a token that comes first at the third place or later as end-of-text: both stop there
    place = next(i for i in range(2, 20) if ours.index(ours[i]) == i)
    end, expected = ours[place], ours[: place + 1]
    model.config = model.config.model_copy(update={"eos_token_id": end})
    export_hf(model, tmp_path / "stop")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "stop")
    assert [step[0] for step in generate(model, prompt.tolist(), max_new_tokens=20)] == expected
    assert theirs.generate(prompt, max_new_tokens=20)[0, 8:].tolist() == expected


def test_three_shards_and_their_index(tmp_path: Path) -> None:
    model = random_model("glm4_moe")
    total = sum(t.numel() for t in [*model.parameters(), *model.buffers()])
    report = export_hf(model, tmp_path / "out", dtype="bfloat16", max_shard_size=total * 2 * 2 // 5)
    assert len(report.files) == 3 and report.tensors > 50
    folder = tmp_path / "out"
    assert sorted(f.name for f in folder.glob("*.safetensors")) == sorted(report.files)
    index = json.loads((folder / INDEX).read_text())
    assert set(index["weight_map"].values()) == set(report.files)
    inside = {name: file for file in report.files for name in load_file(folder / file)}
    assert inside == index["weight_map"]
    size = sum(t.nbytes for file in report.files for t in load_file(folder / file).values())
    assert size == index["metadata"]["total_size"] == report.bytes
    # every tensor has the dtype that config.json tells, but the bias that must not be rounded
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    for file in report.files:
        for name, tensor in load_file(folder / file).items():
            narrow = not name.endswith("e_score_correction_bias")
            assert tensor.dtype == (torch.bfloat16 if narrow else torch.float32), name
    loaded = load_hf(folder)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).bfloat16().float()), name
    with safe_open(folder / report.files[0], framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    from_pretrained(folder)


def test_one_huge_tensor_gets_a_shard_of_its_own(tmp_path: Path) -> None:
    model = random_model("mixtral")
    report = export_hf(model, tmp_path / "out", max_shard_size="1KB")
    sizes = [len(load_file(tmp_path / "out" / file)) for file in report.files]
    assert min(sizes) == 1 and sum(sizes) == report.tensors
    assert_same_weights(load_hf(tmp_path / "out"), model)


@pytest.mark.parametrize("expert_size", [32, 20])
@pytest.mark.parametrize("case", MOE_FAMILIES)
def test_each_expert_keeps_its_own_values(case: str, expert_size: int, tmp_path: Path) -> None:
    """Expert i filled with i, asymmetric inside; also with square matrices, where a transposed one
    would fit."""
    key = (
        "intermediate_size"
        if case in ("olmoe", "mixtral", "flex_olmo")
        else "moe_intermediate_size"
    )
    model = random_model(case, **{key: expert_size})
    layer = model.config.moe_layers[-1]
    moe = model.layers[layer].moe
    width = model.config.hidden_size
    with torch.no_grad():
        for expert in range(8):
            rows = torch.arange(2 * expert_size)[:, None] * 100
            moe.w1[expert] = expert * 1e5 + rows + torch.arange(width)
            moe.w2[expert] = (
                expert * 1e5 + torch.arange(width)[:, None] * 100 + torch.arange(expert_size)
            )
    export_hf(model, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    prefix = f"model.layers.{layer}."
    names = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
    if case == "mixtral":
        names = tuple(f"block_sparse_moe.experts.{{}}.{w}" for w in ("w1", "w3", "w2"))
    for expert in (0, 3, 7):
        gate, up, down = (stored[f"{prefix}{n.format(expert)}.weight"] for n in names)
        assert gate.shape == up.shape == (expert_size, width)
        assert down.shape == (width, expert_size)
        # unit j: gate row 2j, up row 2j + 1 of the interleaved matrix
        assert gate[3, 5] == expert * 1e5 + 600 + 5
        assert up[3, 5] == expert * 1e5 + 700 + 5
        assert down[3, 5] == expert * 1e5 + 300 + 5
    assert_same_weights(load_hf(tmp_path / "out"), model)


def test_tied_matrix_is_written_unless_asked(tmp_path: Path) -> None:
    model = random_model("qwen3_moe_sparse_step")
    export_hf(model, tmp_path / "untied")
    stored = load_file(tmp_path / "untied" / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    assert not json.loads((tmp_path / "untied" / "config.json").read_text())["tie_word_embeddings"]
    export_hf(model, tmp_path / "tied", keep_tied=True)
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    loaded = load_hf(tmp_path / "tied")
    assert loaded.head.weight is loaded.embed.weight
    assert_same_weights(loaded, model)


def test_mapping_of_tensors_is_exported_too(tmp_path: Path) -> None:
    """As a checkpoint holds them: each asked for once, a tied matrix listed twice."""
    model = random_model("qwen3_moe_sparse_step")
    asked = []

    class Lazy(dict):
        def __getitem__(self, name):
            asked.append(name)
            return super().__getitem__(name)

    export_hf(Lazy(model.state_dict()), tmp_path / "out", config=model.config)
    assert_same_weights(load_hf(tmp_path / "out"), untied(model))
    assert set(asked) == {name for name, _ in model.named_parameters()}
    assert len(asked) == len(set(asked)) + 1  # the embedding again, as the output matrix
    with pytest.raises(ValueError, match="needs config="):
        export_hf(model.state_dict(), tmp_path / "more")
    state = model.state_dict()
    state["layers.0.attn.surplus"] = state.pop("layers.0.attn.q.weight")
    with pytest.raises(ValueError, match=r"1 missing: layers\.0\.attn\.q\.weight; 1 unk"):
        export_hf(state, tmp_path / "more", config=model.config)
    assert not (tmp_path / "more").exists()


def test_folder_in_use_is_refused_by_name(tmp_path: Path) -> None:
    model = random_model("olmoe")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    export_hf(model, folder, max_shard_size="20KB")  # other files are no obstacle
    assert (folder / "README.md").read_text() == "mine"
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(ValueError, match=r"model-00001-of-\d+\.safetensors"):
        export_hf(model, folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    export_hf(model, folder, overwrite=True)
    left = sorted(file.name for file in folder.iterdir())
    assert left == ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert_same_weights(load_hf(folder), model)
    with pytest.raises(ValueError, match="is no folder"):
        export_hf(model, folder / "README.md")


def test_failed_export_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    model = random_model("olmoe")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("models.hf.writing.save_file", full)
    with pytest.raises(OSError, match="No space"):
        export_hf(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(ValueError, match=r"0\.00 GB free"):
        export_hf(model, tmp_path / "out")
    with pytest.raises(ValueError, match="dtype='fp8' is unknown"):
        export_hf(model, tmp_path / "out", dtype="fp8")
    with pytest.raises(ValueError, match="max_shard_size='5 apples'"):
        export_hf(model, tmp_path / "out", max_shard_size="5 apples")
    with pytest.raises(ValueError, match="eos_token_id=7 contradicts the model's 2"):
        export_hf(model, tmp_path / "out", generation={"eos_token_id": 7})


def test_tokenizer_travels_along(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers import models as kinds
    from transformers import AutoTokenizer

    from training.data.tokenizer import read_tokenizer

    vocabulary = {"<|pad|>": 0, "<|startoftext|>": 1, "<|end|>": 2, "a": 3, "b": 4}
    tokenizer = Tokenizer(kinds.WordLevel(vocabulary, unk_token="a"))
    source = tmp_path / "tokenizer"
    source.mkdir()
    model = random_model("mixtral", pad_token_id=0, bos_token_id=1)
    tokenizer.save(str(source / "tokenizer.json"))
    export_hf(model, tmp_path / "out", tokenizer=read_tokenizer(source, eos_token="<|end|>"))
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.eos_token_id == 2 and loaded.pad_token_id == 0 and loaded.bos_token_id == 1
    assert loaded.convert_tokens_to_ids(["a", "b"]) == [3, 4]
    tokenizer.add_tokens([f"t{i}" for i in range(100)])
    tokenizer.save(str(source / "tokenizer.json"))
    with pytest.raises(ValueError, match="105 tokens, the model vocab_size=96"):
        export_hf(model, tmp_path / "more", tokenizer=read_tokenizer(source, eos_token="<|end|>"))


# ------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("layout", ["per expert", "sharded", "fused"])
@pytest.mark.parametrize("case", CASES)
def test_folders_of_transformers_load(case: str, layout: str, tmp_path: Path) -> None:
    """As 4.x and 5.x write by default, sharded, and as 5.x writes with its in-memory names."""
    theirs = transformers_model(tiny_config(case))
    randomise_buffers_and_norms(theirs)
    options = {"sharded": {"max_shard_size": "30KB"}, "fused": {"save_original_format": False}}
    theirs.save_pretrained(tmp_path, **options.get(layout, {}))
    names = set(tensor_files(tmp_path))
    fused = layout == "fused" and bool(tiny_config(case).moe_layers)
    assert any("gate_up_proj" in name for name in names) == fused
    assert (tmp_path / INDEX).exists() == (layout == "sharded")
    ours = load_hf(tmp_path)
    assert ours.config == tiny_config(case)
    tokens_BL = tokens(ours.config, 2, 24)
    torch.testing.assert_close(
        logits_of(ours, tokens_BL), logits_of(theirs, tokens_BL), rtol=1e-4, atol=1e-4
    )
    # What a process reads that holds only some of the experts.
    weights = HfWeights(ours.config, tmp_path)
    for name, parameter in ours.named_parameters():
        assert torch.equal(weights.values(name), parameter), name
        if name.endswith((".w1", ".w2")):
            assert torch.equal(weights.values(name, range(1, 3)), parameter[1:3]), name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An exported qwen3_moe, to be damaged."""
    export_hf(random_model("qwen3_moe"), tmp_path / "out")
    return tmp_path / "out"


def rewrite(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


def test_missing_and_surplus_tensors_are_all_named(folder: Path) -> None:
    def change(tensors):
        tensors["model.layers.2.mlp.experts.9.up_proj.weight"] = tensors.pop(EXPERT)
        del tensors["model.norm.weight"]
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :-1].contiguous()

    rewrite(folder, change)
    with pytest.raises(ValueError) as error:
        load_hf(folder)
    text = str(error.value)
    assert f"2 missing: {EXPERT}, model.norm.weight" in text
    assert "1 unknown: model.layers.2.mlp.experts.9.up_proj.weight" in text
    assert "1 wrong: lm_head.weight [96, 31] instead of [96, 32]" in text


@pytest.mark.parametrize("name", ["model.layers.2.mlp.experts.8.up_proj.weight", "model.extra"])
def test_one_surplus_tensor_is_refused(folder: Path, name: str) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: tensors[EXPERT].clone()}))
    with pytest.raises(ValueError, match=f"out: 1 unknown: {name}$"):
        load_hf(folder)


def test_prefix_too_many_is_refused(folder: Path) -> None:
    def change(tensors):
        for name in list(tensors):
            tensors["model." + name] = tensors.pop(name)

    rewrite(folder, change)
    with pytest.raises(ValueError, match=r"\d+ missing: .* and \d+ more; \d+ unknown: model\.lm_"):
        load_hf(folder)


def test_two_layouts_in_one_layer_are_refused(folder: Path) -> None:
    def change(tensors):
        tensors["model.layers.2.mlp.experts.down_proj"] = torch.zeros(8, 32, 20)

    rewrite(folder, change)
    with pytest.raises(ValueError, match=r"missing: model\.layers\.2\.mlp\.experts\.gate_up_proj"):
        load_hf(folder)


def test_transposed_experts_are_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].t().contiguous()}))
    with pytest.raises(ValueError, match=r"\[32, 20\] instead of \[20, 32\]"):
        load_hf(folder)


def test_quantised_weights_are_refused(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({EXPERT: t[EXPERT].to(torch.float8_e4m3fn)}))
    with pytest.raises(ValueError, match="F8_E4M3: quantised weights are not read"):
        load_hf(folder)


def test_failed_load_leaves_the_model_alone(folder: Path) -> None:
    model = random_model("qwen3_moe")
    before = {name: p.clone() for name, p in model.named_parameters()}
    rewrite(folder, lambda tensors: tensors.pop(EXPERT))
    with pytest.raises(ValueError, match=EXPERT.replace(".", r"\.")):
        load_weights(model, folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def assert_copy_must_be_equal(folder: Path, model: Decoder) -> None:
    """A folder that ties its output matrix may also hold a copy of it, and no other matrix."""

    def add(tensors, by=0.0):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + by

    rewrite(folder, add)
    assert_same_weights(load_hf(folder), model)
    rewrite(folder, lambda tensors: add(tensors, 1.0))
    with pytest.raises(UserError, match="differs from model"):
        load_hf(folder)


def test_copy_of_a_tied_matrix_must_be_equal(tmp_path: Path) -> None:
    model = random_model("qwen3_moe_sparse_step")
    export_hf(model, tmp_path / "out", keep_tied=True)
    assert_copy_must_be_equal(tmp_path / "out", model)


@pytest.mark.parametrize("family", ["olmoe", "glm4_moe"])
def test_f9_tied_folder_is_untied_exactly(family: str, tmp_path: Path) -> None:
    """As transformers writes it, without an output matrix; also with one, which must be equal."""
    theirs = transformers_model(tiny_config(family))
    theirs.config.tie_word_embeddings = True
    theirs.tie_weights()
    theirs.save_pretrained(tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    ours = load_hf(tmp_path / "out")
    assert not ours.config.tie_word_embeddings
    assert ours.head.weight is not ours.embed.weight
    assert torch.equal(ours.head.weight, ours.embed.weight)
    tokens_BL = tokens(ours.config, 2, 16)
    with torch.no_grad():
        expected = theirs.eval()(input_ids=tokens_BL).logits
        torch.testing.assert_close(
            ours.eval()(tokens_BL, logits=True).logits, expected, rtol=1e-4, atol=1e-4
        )
    assert_copy_must_be_equal(tmp_path / "out", ours)


def test_missing_output_matrix_is_not_tied_silently(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"1 missing: lm_head\.weight"):
        load_hf(folder)


def test_prediction_layers_are_dropped_only_when_asked(tmp_path: Path) -> None:
    export_hf(random_model("glm4_moe"), tmp_path / "out")
    extra = {"model.layers.3.eh_proj.weight": torch.zeros(3, 3)}
    rewrite(tmp_path / "out", lambda tensors: tensors.update(extra))
    with pytest.raises(ValueError, match=r"layers\.3\.eh_proj.*--drop-mtp"):
        load_hf(tmp_path / "out")
    load_hf(tmp_path / "out", drop_mtp=True)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    model = random_model("olmoe")
    report = export_hf(model, tmp_path / "out", max_shard_size="40KB")
    folder = tmp_path / "out"
    stray = folder / "model-00009-of-00009.safetensors"  # an older export's, not in the index
    save_file({"model.norm.weight": torch.zeros(32)}, stray)
    assert_same_weights(load_hf(folder), model)
    shutil.copy(stray, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"both model\.safetensors and"):
        load_hf(folder)
    (folder / "model.safetensors").unlink()
    index = json.loads((folder / INDEX).read_text())
    some = next(iter(index["weight_map"]))
    changed = {**index["weight_map"], some: report.files[0]}
    (folder / INDEX).write_text(json.dumps({"weight_map": changed}))
    with pytest.raises(ValueError, match=f"unknown: {some}"):
        load_hf(folder)
    (folder / INDEX).write_text(json.dumps(index))
    (folder / report.files[1]).unlink()
    with pytest.raises(ValueError, match=f"not there: {report.files[1]}"):
        load_hf(folder)
    (folder / INDEX).write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        load_hf(folder)


def test_unreadable_folders_are_explained(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not readable as safetensors"):
        load_hf(folder)
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor .*pytorch_model\.bin"):
        load_hf(folder)


def test_values_are_cast_and_routers_stay_wide(tmp_path: Path) -> None:
    model = random_model("glm4_moe")
    export_hf(model, tmp_path / "out", dtype="bfloat16")
    loaded = load_hf(tmp_path / "out", dtype=torch.bfloat16)
    assert loaded.layers[1].moe.w1.dtype == torch.bfloat16
    router = loaded.layers[1].moe.router
    assert router.weight.dtype == router.selection_bias.dtype == torch.float32
    assert torch.equal(router.selection_bias, model.layers[1].moe.router.selection_bias)
