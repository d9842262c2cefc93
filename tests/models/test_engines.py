"""models/engines.py: the one table that export notes, documentation and the check come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.engines import ENGINES, markdown_table, notes, rows
from models.families import FAMILIES
from tests.models.tiny import tiny_config


def test_f6_documentation_shows_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "huggingface.md"
    assert markdown_table() in page.read_text(encoding="utf-8")
    assert "mistral.rs" in ENGINES


@pytest.mark.parametrize(("family", "feature"), rows(), ids=lambda f: getattr(f, "name", f))
def test_f6_each_row_is_noted_for_its_own_feature(family, feature) -> None:
    from scripts.check_engines import small_config

    base = small_config(family, FAMILIES[family].engine_rows[0])
    config = small_config(family, feature)
    assert feature.has(config) and (feature.has(base) == (not feature.name))
    told = notes(config)
    for engine in ENGINES:
        verdict = feature.verdict(engine)
        assert (f"{engine} {verdict.words}" in told) == (verdict.kind != "yes")
    assert set(feature.verdicts) <= set(ENGINES) and len(set(told)) == len(told)


def test_f1_attention_biases_of_qwen3_moe_are_noted() -> None:
    told = notes(tiny_config("qwen3_moe", mlp_only_layers=[]))
    assert [note.split(" ")[0] for note in told] == ["vLLM", "llama.cpp", "mistral.rs"]
    assert all("bias" in note for note in told) and "o_proj" in told[0]
    assert notes(tiny_config("qwen3_moe", mlp_only_layers=[], attention_bias=False)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"clip_qkv": 1.0}, "clip_qkv"),
        ({"attention_bias": True}, "attention biases"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps"),
    ],
)
def test_f2_what_vllm_drops_of_an_olmoe_is_noted(changes: dict, words: str) -> None:
    plain = {"clip_qkv": None, "num_key_value_heads": 4}
    assert not any("vLLM" in note for note in notes(tiny_config("olmoe", **plain)))
    told = notes(tiny_config("olmoe", **(plain | changes)))
    assert [words in note for note in told if note.startswith("vLLM")] == [True]
