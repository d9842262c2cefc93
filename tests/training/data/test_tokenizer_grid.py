"""Ids of training, generation and export are one, for many kinds of tokenizers and both
transformers 4.57 and 5.x."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import trainers as train

from models.hf.check import SPECIAL, TRICKY
from training.data.encode import encode_texts, open_tokenizer
from training.data.tokenizer import TextTokenizer, read_tokenizer

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
SPELLED = [text.replace("{}", token) for token in (BOS, EOS, PAD) for text in SPECIAL]
MORE = (
    "\t\t\n", "x\n\ny", "x\n \n y", "a\r\rb", "007 0x1F 1e-5", "١٢٣ ۴۵ 六七", "A.B.C.", "<s", "/s>",
    "< /s > <|pad|>", "ÅÅ Å", "x" * 50, "…—–", "don't—can't", "\ufeffa",
)  # fmt: skip
TEXTS = [*TRICKY, *SPELLED, *MORE]
assert len(TEXTS) == 40
GPT4 = r"\p{L}+|\p{N}{1,3}|[\r\n]+|[^\S\r\n]+|[^\s\p{L}\p{N}]+"
# Run under each transformers: ids of every folder's AutoTokenizer; prints the differences.
ASK = """
import json, sys
import transformers
from transformers import AutoTokenizer
texts, spelled, cases = json.load(open(sys.argv[1]))
wrong, count = [], 0
for folder, wanted in cases.items():
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, ids in zip(texts, wanted):
        inputs = tokenizer(text, split_special_tokens=text in spelled)
        assert set(inputs) == {"input_ids", "attention_mask"}, set(inputs)
        count += 1
        if inputs["input_ids"] != ids:
            wrong.append((folder, text, inputs["input_ids"], ids))
print(json.dumps({"version": transformers.__version__, "count": count, "wrong": wrong}))
"""


def byte_level(split: pre_tokenizers.PreTokenizer | None) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    backend.pre_tokenizer = level if split is None else pre_tokenizers.Sequence([split, level])
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = train.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*TRICKY, *SPELLED] * 3, trainer)
    return backend


def unigram() -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = train.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", BOS, EOS, PAD], unk_token="<unk>",
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(TRICKY, trainer)
    return backend


def word_piece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # leaves "</s>" whole
    backend.decoder = decoders.WordPiece()
    trainer = train.WordPieceTrainer(
        vocab_size=400, special_tokens=["<unk>", BOS, EOS, PAD], show_progress=False
    )
    backend.train_from_iterator(TRICKY, trainer)
    return backend


KINDS = {
    "gpt2": lambda: byte_level(None),
    "digits": lambda: byte_level(pre_tokenizers.Split(Regex(GPT4), "isolated")),
    "lines": lambda: byte_level(pre_tokenizers.Split(Regex(r"\n"), "isolated")),
    "unigram": unigram,
    "wordpiece": word_piece,
}


def write(folder: Path, backend: Tokenizer, own: bool, special: bool) -> None:
    """A repository whose other files mislead: a class, and a model type of other tokenizers."""
    backend.add_special_tokens([BOS, EOS, PAD])
    bos = backend.token_to_id(BOS)
    eos = backend.token_to_id(EOS)
    if own:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A {EOS}", special_tokens=[(BOS, bos), (EOS, eos)]
        )
    content = json.loads(backend.to_str())
    for token in content["added_tokens"]:
        token["special"] = special or token["content"] == "<unk>"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict) and "merges" in content["model"]:
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        merges = content["model"]["merges"]
        (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in merges))
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    misleading = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(misleading))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))


@pytest.fixture(scope="module")
def grid(tmp_path_factory) -> dict[str, TextTokenizer]:
    """Each saved tokenizer by its exported folder."""
    from huggingface_hub import constants

    root = tmp_path_factory.mktemp("grid")
    made: dict[str, TextTokenizer] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(root / "hub"))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        backends = {kind: make().to_str() for kind, make in KINDS.items()}  # Unigram's draws differ
        for kind, own, special in product(KINDS, (False, True), (False, True)):
            name = f"{kind}-{own}-{special}"
            cache = root / "hub" / f"models--whale--{name}"
            folder = cache / "snapshots" / ("0" * 40)
            write(folder, Tokenizer.from_str(backends[kind]), own, special)
            (cache / "refs").mkdir()
            (cache / "refs/main").write_text("0" * 40)
            named = (str(folder), str(folder / "tokenizer.json"), f"whale/{name}")
            for way, add_bos in product(range(3), (False, True)):
                run, out = (root / f"{part}/{name}-{way}-{add_bos}" for part in ("run", "out"))
                read_tokenizer(named[way]).with_bos(add_bos).save(run)
                tokenizer = read_tokenizer(run)  # as a checkpoint's, by export and generate.py
                assert tokenizer.add_bos == add_bos
                tokenizer.save(out)
                model = "olmoe" if way else "qwen3_moe"
                (out / "config.json").write_text(json.dumps({"model_type": model}))
                made[str(out)] = tokenizer
    return made


def test_b2_b4_training_ids_are_those_of_generation(grid) -> None:
    assert len(grid) == 120
    sources = {}
    for folder, tokenizer in grid.items():
        file = Path(folder.replace("/out/", "/run/")) / "tokenizer.json"
        ids, ends = encode_texts(open_tokenizer(file), TEXTS, tokenizer.bos_eos)
        begin = [tokenizer.bos_id] * tokenizer.add_bos
        starts = [0, *ends[:-1].tolist()]
        rows = [begin + ids[a:b].tolist() for a, b in zip(starts, ends, strict=True)]
        assert rows == [tokenizer.encode_with_bos(text) for text in TEXTS], folder
        # However it was named, with and without a post-processor of its own: the same ids.
        kind = Path(folder).name.split("-")[0]
        assert sources.setdefault((kind, tokenizer.add_bos), rows) == rows
        assert sources.setdefault(kind, tokenizer.hash) == tokenizer.hash


def test_b5_ordinary_text_gives_no_control_id(grid) -> None:
    for folder, tokenizer in grid.items():
        controls = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
        for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
            assert not controls & set(ids.tolist()), (folder, text)


def ask(grid, tmp_path: Path, **environment: str) -> dict:
    """What a transformers in a process of its own makes of the exported folders."""
    cases = {folder: [t.encode_with_bos(text) for text in TEXTS] for folder, t in grid.items()}
    (tmp_path / "cases.json").write_text(json.dumps([TEXTS, SPELLED, cases]))
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(tmp_path / "cases.json")],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "USE_TORCH": "0", **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_b3_f3_installed_transformers_gives_the_same_ids(grid, tmp_path) -> None:
    answer = ask(grid, tmp_path)
    assert answer["count"] == 4800 and answer["wrong"][:3] == []


def test_b3_f3_transformers_457_gives_the_same_ids(grid, tmp_path) -> None:
    """scripts/test.sh installs it beside the environment's own."""
    asked = os.environ.get("TESSERA_TRANSFORMERS_457")
    folder = Path(asked or Path(sys.prefix) / "transformers-4.57")
    if asked is None and not folder.is_dir():
        pytest.skip(f"{folder} is missing: scripts/test.sh installs transformers 4.57 there")
    answer = ask(grid, tmp_path, PYTHONPATH=str(folder))
    assert answer["version"].startswith("4.57.")
    assert answer["count"] == 4800 and answer["wrong"][:3] == []
