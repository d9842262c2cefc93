"""The tokenizer gives a text's own ids, and is kept so that transformers reads it alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import processors

from tests.training.data.helpers import (
    BOS,
    EOS,
    NUMBERS,
    PAD,
    make_store,
    number_tokenizer,
    rows_of,
    write_jsonl,
    write_tokenizer,
)
from training.data import DataConfig, DataError, SourceConfig, build_data, load_tokenizer
from training.data.tokenizer import TextTokenizer, read_tokenizer, train_tokenizer

SAMPLE = (
    'Ahab said: "Aye, aye!"\n\n  \tIt\'s 1851; naïve Größe — 東京 😀\r\n'
    "a document about <|endoftext|> and <s>\n"
)


def bundled_text() -> list[str]:
    config = DataConfig()
    from training.data.tokenizer.train import sample_texts

    return list(sample_texts(config))


def test_bundled_tokenizer_is_the_one_trained_on_the_bundled_text() -> None:
    bundled = read_tokenizer("bundled:moby-dick")
    assert (bundled.vocab_size, bundled.eos_id, bundled.bos_id, bundled.pad_id) == (4096, 0, 1, 2)
    assert train_tokenizer(bundled_text(), 4096).hash == bundled.hash


def test_bytes_come_back_as_they_were() -> None:
    tokenizer = read_tokenizer("bundled:moby-dick")
    assert tokenizer.decode(tokenizer.encode(SAMPLE)) == SAMPLE
    assert tokenizer.decode([0, *tokenizer.encode("whale"), 0, 2]) == "whale"


def test_saved_folder_loads_in_transformers_with_the_same_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = train_tokenizer(bundled_text()[:5], 500)
    tokenizer.save(tmp_path)
    # An exported model's folder has a config.json too, by which transformers could choose a class.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    text = SAMPLE.replace("<|endoftext|>", "the end")
    assert theirs(text)["input_ids"] == tokenizer.encode(text).tolist()
    assert theirs.decode(tokenizer.encode(text)) == text
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id) == (EOS, BOS, PAD)
    again = read_tokenizer(tmp_path)
    assert again.hash == tokenizer.hash
    assert (again.eos_id, again.bos_id, again.pad_id) == (EOS, BOS, PAD)


def test_a_special_token_in_the_text_is_text() -> None:
    tokenizer = read_tokenizer("bundled:moby-dick")
    ids = tokenizer.encode("so <|endoftext|> it goes <|pad|>")
    assert not {0, 1, 2} & set(ids.tolist())
    assert tokenizer.decode(ids) == "so <|endoftext|> it goes <|pad|>"


def test_documents_written_with_begin_and_end_tokens_lose_them() -> None:
    tokenizer = read_tokenizer("bundled:moby-dick")
    plain = tokenizer.encode("whale").tolist()
    assert tokenizer.encode("<|startoftext|>whale<|endoftext|>").tolist() == plain
    assert tokenizer.encode("<|endoftext|>").tolist() == []


def add_post_processor(folder: Path) -> Path:
    """Let a tokenizer add its own begin and end token, as Llama's and others do."""
    from tokenizers import Tokenizer

    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A <|endoftext|>",
        special_tokens=[("<|startoftext|>", BOS), ("<|endoftext|>", EOS)],
    )
    tokenizer.save(file)
    assert Tokenizer.from_file(file).encode("7").ids == [BOS, NUMBERS + 7, EOS]
    return folder


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_exactly_one_begin_and_end_token(tmp_path: Path, add_bos: bool, own: bool) -> None:
    """google/tunix#822, jingyaogong/minimind#185, instructlab/training#672."""
    folder = write_tokenizer(tmp_path / "tokenizer")
    if own:
        add_post_processor(folder)
    texts = ["1 2 3", "<|startoftext|>4<|endoftext|>", "5 6"]
    path = write_jsonl(tmp_path / "data.jsonl", texts)
    config = DataConfig(
        sources=[SourceConfig(path=str(path))],
        cache_dir=str(tmp_path / "cache"),
        seq_len=5,
        add_bos=add_bos,
        shuffle=False,
    )
    data = build_data(config, read_tokenizer(folder), seed=0)
    batches = next(data.steps(global_batch_size=4, micro_batch_size=4))
    rows = [t for row in rows_of(batches)[: data.rows_per_epoch] for t in row]
    n = NUMBERS
    expected = [[n + 1, n + 2, n + 3], [n + 4], [n + 5, n + 6]]
    assert rows == [t for ids in expected for t in [BOS] * add_bos + ids + [EOS]]


def test_truncation_and_padding_saved_in_the_file_are_not_obeyed(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    loaded = read_tokenizer(folder)
    assert len(loaded.encode(" ".join("1" * 20))) == 20
    assert len(loaded.encode("1")) == 1


def test_end_token_is_found_in_the_files_or_given(tmp_path: Path) -> None:
    named = write_tokenizer(tmp_path / "a", tokenizer_config={"eos_token": {"content": "99"}})
    assert read_tokenizer(named).eos_id == NUMBERS + 99
    named = write_tokenizer(tmp_path / "b", special_tokens_map={"eos_token": "88"})
    assert read_tokenizer(named).eos_id == NUMBERS + 88
    assert read_tokenizer(named, eos_token="77").eos_id == NUMBERS + 77
    with pytest.raises(DataError, match="eos_token='nine' is no token"):
        read_tokenizer(named, eos_token="nine")
    from tokenizers import Tokenizer, models

    (tmp_path / "c").mkdir()
    Tokenizer(models.WordLevel({"a": 0})).save(str(tmp_path / "c/tokenizer.json"))
    with pytest.raises(DataError, match=r"no end-of-document token.*eos_token: …"):
        read_tokenizer(tmp_path / "c")
    # A choice made by the user is kept with the run.
    read_tokenizer(named, eos_token="77").save(tmp_path / "kept")
    assert read_tokenizer(tmp_path / "kept").eos_id == NUMBERS + 77


def test_hash_tells_tokenizers_apart(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, pre_tokenizers

    one = number_tokenizer(tmp_path / "a")
    assert number_tokenizer(tmp_path / "b").hash == one.hash
    assert read_tokenizer(write_tokenizer(tmp_path / "c", numbers=20)).hash != one.hash
    # The same vocabulary, but another way of splitting text.
    tokenizer = Tokenizer.from_file(str(tmp_path / "b/tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "b/tokenizer.json"))
    assert read_tokenizer(tmp_path / "b").hash != one.hash


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    for given, message in [
        (str(tmp_path / "none.json"), "no such file"),
        (str(tmp_path / "bad.json"), "no tokenizer.json"),
        ("bundled:ahab", "bundled are bundled:moby-dick"),
        ("nobody/no-such-tokenizer", "no file or folder .* hub did not give it .*tokenizer=null"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            read_tokenizer(given)
        assert "\n" not in str(caught.value)
        assert given in str(caught.value)


def test_trained_tokenizer_is_kept_with_the_run(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", bundled_text()[:3])
    config = DataConfig(
        sources=[SourceConfig(path=str(path))], tokenizer={"kind": "bpe", "vocab_size": 400}
    )
    first = load_tokenizer(config, tmp_path / "run/tokenizer")
    assert first.vocab_size == 400
    write_jsonl(path, ["the text is another one by now"])
    assert load_tokenizer(config, tmp_path / "run/tokenizer").hash == first.hash
    assert load_tokenizer(config, tmp_path / "other/tokenizer").hash != first.hash


def test_a_run_keeps_to_its_tokenizer(tmp_path: Path) -> None:
    config = DataConfig(tokenizer=str(write_tokenizer(tmp_path / "a")))
    first = load_tokenizer(config, tmp_path / "run/tokenizer")
    assert load_tokenizer(config, tmp_path / "run/tokenizer").hash == first.hash
    other = DataConfig(tokenizer=str(write_tokenizer(tmp_path / "b", numbers=20)))
    with pytest.raises(DataError, match=r"another tokenizer than .*; choose another run\.name"):
        load_tokenizer(other, tmp_path / "run/tokenizer")


def test_a_folder_that_is_no_whole_tokenizer(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "run/tokenizer"
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text("{}")
    config = DataConfig(tokenizer=str(write_tokenizer(tmp_path / "a")))
    assert load_tokenizer(config, folder).vocab_size == 3003
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(
        DataError, match=r"run/tokenizer/tokenizer\.json is no token.*remove .*run/tokenizer"
    ) as told:
        load_tokenizer(DataConfig(), folder)
    assert "data.tokenizer" not in str(told.value)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TextTokenizer, "save", full)
    with pytest.raises(DataError, match=r"no space left for .*new/tokenizer .* set run\.dir"):
        load_tokenizer(config, tmp_path / "new/tokenizer")


def test_bad_lines_stop_the_training_of_a_tokenizer(tmp_path: Path) -> None:
    """A wrong text field is told as when a tokenizer is there, and not as an empty text."""
    path = write_jsonl(tmp_path / "a.jsonl", ["the whale and the sea"] * 3)
    path.write_text(path.read_text() + '{"content": "x"}\n')
    source = {
        "sources": [SourceConfig(path=str(path))],
        "tokenizer": {"kind": "bpe", "vocab_size": 260},
    }
    with pytest.raises(DataError, match=r"no text field at .*a.jsonl:4: no field 'text'; it has c"):
        load_tokenizer(DataConfig(**source), tmp_path / "tokenizer")
    assert not (tmp_path / "tokenizer").exists()
    skipping = DataConfig(**source, on_bad_line="skip")
    assert load_tokenizer(skipping, tmp_path / "tokenizer").vocab_size == 260


def test_a_token_store_trains_no_tokenizer(tmp_path: Path) -> None:
    own = number_tokenizer(tmp_path / "tokenizer")
    store = make_store(tmp_path / "store", [[[3, 4, 5]]], tokenizer=own.hash)
    own.save(store.folder / "tokenizer")
    source = [SourceConfig(path=str(store.folder))]
    assert load_tokenizer(DataConfig(sources=source)).hash == own.hash
    trained = DataConfig(sources=source, tokenizer={"kind": "bpe"})
    with pytest.raises(DataError, match=r"kind=bpe trains on text, but .*store is a token store"):
        load_tokenizer(trained)


def test_fewer_merges_than_asked_for_are_told(caplog) -> None:
    assert train_tokenizer(["a whale"], 5000).vocab_size < 300
    assert "of 5,000 tokens: the text has no more merges" in caplog.text
    caplog.clear()
    train_tokenizer(bundled_text()[:1], 300)
    assert caplog.text == ""


def test_no_text_to_train_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("")
    config = DataConfig(sources=[SourceConfig(path=str(path))])
    with pytest.raises(DataError, match=r"data\.sources\[0\]: .*a\.jsonl holds no text"):
        load_tokenizer(config, tmp_path / "tokenizer")
    assert not (tmp_path / "tokenizer").exists()


def weights_tokenizer(folder: Path, numbers: int) -> tuple[Path, TextTokenizer]:
    write_tokenizer(folder, numbers=numbers)
    return folder, read_tokenizer(folder)


def test_b1_initial_weights_bring_their_tokenizer(tmp_path: Path) -> None:
    own, tokenizer = weights_tokenizer(tmp_path / "own", 40)
    text = SourceConfig(path=str(write_jsonl(tmp_path / "a.jsonl", ["1 2 3"] * 9)))
    start = {"init_from": own, "init_name": "out/"}
    taken = load_tokenizer(DataConfig(sources=[text]), tmp_path / "r1/tokenizer", **start)
    assert taken.hash == tokenizer.hash
    copy = DataConfig(sources=[text], tokenizer=str(write_tokenizer(tmp_path / "copy", 40)))
    assert load_tokenizer(copy, tmp_path / "r2/tokenizer", **start).hash == tokenizer.hash
    other = DataConfig(sources=[text], tokenizer=str(write_tokenizer(tmp_path / "other", 30)))
    with pytest.raises(DataError, match=r"other' is another tokenizer than .*init_from='out/'"):
        load_tokenizer(other, tmp_path / "r3/tokenizer", **start)
    trained = DataConfig(sources=[text], tokenizer={"kind": "bpe", "vocab_size": 300})
    with pytest.raises(DataError, match=r"tokenizer\.kind=bpe trains a tokenizer, but"):
        load_tokenizer(trained, tmp_path / "r4/tokenizer", **start)
    without = {"init_from": None, "init_name": "out/"}
    with pytest.raises(DataError, match=r"init_from='out/' has no tokenizer; give the one"):
        load_tokenizer(DataConfig(sources=[text]), tmp_path / "r5/tokenizer", **without)


def test_b1_e19_a_hub_name_is_checked_when_a_run_resumes(tmp_path: Path) -> None:
    load_tokenizer(DataConfig(tokenizer=str(write_tokenizer(tmp_path / "a"))), tmp_path / "run/t")
    with pytest.raises(DataError, match="'nobody/none' is no file or folder with a tokenizer"):
        load_tokenizer(DataConfig(tokenizer="nobody/none"), tmp_path / "run/t")


def test_b5_what_cannot_be_kept_out_of_text_is_no_end_token(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"ordinary text becomes '7'.* eos_token"):
        read_tokenizer(folder, eos_token="7")
    with pytest.raises(DataError, match="ordinary text becomes '0'"):  # unknown words
        read_tokenizer(folder, bos_token="0")


def test_b6_bundled_tokenizer_with_other_text_is_told(tmp_path: Path, caplog) -> None:
    config = DataConfig(tokenizer="bundled:moby-dick")
    load_tokenizer(config)
    assert caplog.text == ""
    other = SourceConfig(path=str(write_jsonl(tmp_path / "a.jsonl", ["x"])))
    load_tokenizer(config.model_copy(update={"sources": [other]}))
    assert "bundled:moby-dick was made for the bundled text" in caplog.text


def test_b8_a_guessed_end_token_is_told_once(tmp_path: Path, caplog) -> None:
    read_tokenizer(write_tokenizer(tmp_path / "a")).save(tmp_path / "b")
    assert "documents end with '<|endoftext|>' (id 0)" in caplog.text
    assert "data.tokenizer={path: …, eos_token: …} names another" in caplog.text
    caplog.clear()
    assert "documents end with '<|endoftext|>'" in read_tokenizer(tmp_path / "b").describe()
    assert caplog.text == ""
