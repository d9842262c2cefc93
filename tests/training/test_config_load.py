"""YAML without surprises, overrides typed like the file, and the nearest name."""

import math

import pytest

from training.config.build import load_config, write_resolved
from training.config.load import (
    ConfigError,
    apply_overrides,
    parse_yaml,
    read_words,
    read_yaml,
)
from training.config.messages import nearest, unknown_key_message
from training.surgery.config import Copies

SCALARS = [
    # text, value: what a person means by it (rules of YAML 1.2, and whole numbers written 3e8)
    ("1e-4", 1e-4),
    ("1E-4", 1e-4),
    ("-2.5e-3", -2.5e-3),
    ("3e8", 300_000_000),
    ("1e4", 10_000),
    ("3.5e8", 350_000_000.0),
    ("1.e3", 1000.0),
    (".5", 0.5),
    ("+1.5", 1.5),
    ("-7", -7),
    ("0", 0),
    ("1_000_000", 1_000_000),
    ("0x10", 16),
    ("0o17", 15),
    ("true", True),
    ("False", False),
    ("null", None),
    ("~", None),
    ("", None),
    # words and text, never booleans, base-8 or base-60 numbers, or dates
    ("off", "off"),
    ("on", "on"),
    ("yes", "yes"),
    ("no", "no"),
    ("n", "n"),
    ("010", "010"),
    ("-08", "-08"),
    ("1:30", "1:30"),
    ("2026-01-31", "2026-01-31"),
    ("1e", "1e"),
    ("e5", "e5"),
    ("1.2.3", "1.2.3"),
    ("'1e-4'", "1e-4"),
    ('"true"', "true"),
    # flow collections
    ("[0.9, 95e-2]", [0.9, 0.95]),
    ("[]", []),
    ("{a: 1e-3, b: [off, 010]}", {"a": 1e-3, "b": ["off", "010"]}),
]


@pytest.mark.parametrize(("text", "value"), SCALARS, ids=[repr(text) for text, _ in SCALARS])
def test_value_is_what_is_meant_in_file_and_on_command_line(tmp_path, text, value):
    file = tmp_path / "x.yaml"
    file.write_text(f"s:\n  k: {text}\n")
    from_file = read_yaml(file)["s"]["k"]
    from_word = apply_overrides({}, [f"s.k={text}"], {})["s"]["k"]
    for got in (from_file, from_word):
        assert got == value
        assert type(got) is type(value), f"{text!r} became {got!r}"


def test_infinity_and_nan_are_numbers():
    assert parse_yaml("-.inf", "x") == -math.inf
    assert math.isnan(parse_yaml(".nan", "x"))


def test_a_key_given_twice_is_an_error_with_its_line(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("optim:\n  lr: 1e-3\n  eps: 1e-8\n  lr: 1e-4\n")
    with pytest.raises(ConfigError, match=r"x\.yaml: key 'lr' is given twice .*line 4"):
        read_yaml(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2", "not valid YAML in line"),
        ("a:\n\t- 1\n", "not valid YAML in line 2"),
        ("- 1\n- 2\n", "must hold sections.*not a list"),
        ("just words\n", "must hold sections.*not text"),
        ("run: {name: {{NAME}}}", "x.yaml: a key must be text .line 1.; put quotes around"),
        ("a: 1\n[a]: 2\n", "a key must be text .line 2."),
        ("a: " + "[" * 5000, "x.yaml is nested too deep"),
        ("b: 1\na: !!bool maybe", "x.yaml: 'maybe' in line 2 cannot be read as bool"),
        ("b: 1\na: !!int abc", "x.yaml: 'abc' in line 2 cannot be read as int"),
        ("b: 1\na: !!float abc", "x.yaml: 'abc' in line 2 cannot be read as float"),
        ("a: !!timestamp x", "'x' in line 1 cannot be read as timestamp"),
    ],
)
def test_broken_files_say_what_and_where(tmp_path, text, message):
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_yaml(file)
    assert "\n" not in str(caught.value)


def test_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "quickstart.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"does not exist; did you mean .*quickstart\.yaml"):
        read_yaml(tmp_path / "quickstrat.yaml")
    assert read_yaml(tmp_path / "quickstart.yaml") == {}


def test_overrides_reach_new_sections_lists_and_list_items():
    values = {"data": {"sources": [{"path": "a"}, {"path": "b"}]}, "eval": None}
    apply_overrides(
        values,
        [
            "data.sources.1.path=c",
            "--optim.betas=[0.8, 0.9]",
            "eval.rows=3",
            "a.b=x=y",
            "a.c={k: 1}",
            "b.list.0.k=1",
            "b.list.1.k=2",
        ],
        {},
    )
    assert values == {
        "data": {"sources": [{"path": "a"}, {"path": "c"}]},
        "optim": {"betas": [0.8, 0.9]},
        "eval": {"rows": 3},
        "a": {"b": "x=y", "c": {"k": 1}},
        "b": {"list": [{"k": 1}, {"k": 2}]},
    }


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.steps", "'train.steps' is not an override; write section.key=value"),
        ("=5", "is not an override"),
        ("steps=5", "must name section.key; did you mean train.steps=5\\?"),
        ("--step=5", "must name section.key; did you mean train.steps=5\\?"),
        ("lr=5", "must name section.key; for example train.steps=50"),
        ("train..steps=5", "must name section.key"),
        ("data.sources.3.path=c", "data.sources is a list of 2, so '3' must be a number up to 2"),
        ("data.sources.path=c", "data.sources is a list of 2, so 'path' must be a number"),
        ("data.sources.²=c", "so '²' must be a number"),
        ("train.steps={{a: 1}: 1}", "override 'train.steps=.*: a key must be text"),
        ("data.seq_len.x=c", "data.seq_len is a number and holds no keys"),
        ("data.seq_len=[1", "the value of override 'data.seq_len=\\[1' is not valid YAML"),
    ],
)
def test_bad_overrides(word, message):
    values = {"data": {"sources": [{}, {}], "seq_len": 8}}
    with pytest.raises(ConfigError, match=message) as caught:
        apply_overrides(values, [word], {"": ["train", "a"], "train": ["steps"], "a": ["steps"]})
    assert "\n" not in str(caught.value)


def test_words_of_a_command_line():
    names = {
        "": ["run", "train", "data"],
        "run": ["name"],
        "train": ["steps", "micro_batch_size"],
        "data.sources": ["name"],
    }
    assert read_words([], names) == (None, [])
    assert read_words(["--a.b=1", "x.yaml", "c.d=2"], names) == ("x.yaml", ["--a.b=1", "c.d=2"])
    for words, message in (
        ("a.yaml b", "one config file, please, not 2: a.yaml b"),
        ("a.yaml data.sources=[{path: b.txt}]", "b.txt}] is no config file; put quotes around"),
        ("--steps 4", "--steps is no option; settings are section.key=value; did you mean train."),
        ("a.yaml --train.step 4", "did you mean train.steps=4?"),
        ("--micro-batch run.name=x", "did you mean train.micro_batch_size=…?"),
        ("--name", "did you mean run.name=…?"),
        ("--zzz", "--zzz is no option; settings are section.key=value"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_words(words.split(), names)
        assert message in str(caught.value)
    assert str(caught.value).endswith("section.key=value")


NAMES = {
    "": ["train", "optim", "eval"],
    "train": ["steps", "num_epochs", "compile"],
    "optim": ["lr", "weight_decay"],
    "eval": ["every_steps", "rows"],
    "data.sources": ["path", "weight"],
}


@pytest.mark.parametrize(
    ("section", "key", "expected"),
    [
        ("train", "num-epochs", "unknown key train.num-epochs=1; did you mean train.num_epochs?"),
        ("train", "Steps", "did you mean train.steps?"),
        ("optim", "weight_decy", "did you mean optim.weight_decay?"),
        ("", "lr", "unknown section or key 'lr'; did you mean optim.lr?"),
        ("", "optm", "did you mean optim?"),
        ("", "weight-decay", "did you mean optim.weight_decay?"),
        ("train", "lr", "unknown key train.lr=1; did you mean optim.lr?"),
        ("train", "row", "did you mean eval.rows?"),
        ("data.sources", "pth", "did you mean data.sources.path?"),
        ("optim", "zzzz", "valid names in optim: lr, weight_decay"),
    ],
)
def test_unknown_key_names_section_value_and_nearest(section, key, expected):
    assert expected in unknown_key_message(section, key, 1, NAMES)


def test_nearest_gives_nothing_rather_than_nonsense():
    assert nearest("qqqqq", ["lr", "steps"]) is None


def test_how_copies_begin_is_spelled_out(tiny_config, tmp_path):
    words = ["experts.events=[{step: 3, kind: retire, expert: 1}]", "experts.copies.noise=0.5"]
    config = load_config(tiny_config, words)
    write_resolved(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config
    assert config.experts.copies == Copies(kind="copy", noise=0.5)
