"""What a user is told: mistakes in the words of the config file, and what a run says of itself."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import train
from moe.config import SignBias
from tests.training.tiny import documents
from training.config.build import ConfigError, field_names, load_config
from training.config.load import expand_home, read_words
from training.optim.schedule import learning_rate, warmup_steps
from training.report.plots import figures
from training.report.record import read_run
from training.surgery.config import Resize

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ROOT = Path(__file__).resolve().parents[2]


def told(config: Path, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(config, words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- paths --------------------------------------------------------------------------------------


def test_e1_a_tilde_in_a_path_is_the_home_folder(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    given = load_config(
        tiny_config,
        [
            "run.dir=~/runs",
            "data.cache_dir=~",
            "data.cache_dir=~/cache",
            "data.tokenizer=~/tokenizer",
            "data.sources=[{path: ~/a.txt}, {path: [~/b.txt, c.txt], name: b}]",
            "parallel.offload={kind: nvme, path: ~/nvme}",
        ],
    )
    assert given.run.dir == str(tmp_path / "runs")
    assert given.data.cache_dir == str(tmp_path / "cache")
    assert given.data.tokenizer.path == str(tmp_path / "tokenizer")
    assert given.data.sources[0].path == str(tmp_path / "a.txt")
    assert given.data.sources[1].path == [str(tmp_path / "b.txt"), "c.txt"]
    assert given.parallel.offload.path == str(tmp_path / "nvme")
    assert str(tmp_path) in told(tiny_config, "model.init_from=~/nowhere")
    assert str(tmp_path) in told(tiny_config, "model.hf_config=~/nowhere")
    copied = tmp_path / "copied.yaml"
    copied.write_text(tiny_config.read_text())
    assert load_config("~/copied.yaml").run.name == "copied"
    assert "there is no user 'nobody-of-that-name'" in told(
        tiny_config, "run.dir=~nobody-of-that-name/x"
    )


def test_e1_every_script_expands_a_tilde_in_its_paths():
    """Every argument of a script that is called a folder or file has a type that expands it."""
    kinds = ("config", "checkpoint", "model", "folder", "out", "run", "inputs", "files", "text")
    kinds += ("tokenizer", "json", "traces", "check")
    forgotten = []
    for file in sorted((ROOT / "scripts").glob("*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            if not (
                isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"
            ):
                continue
            name = ast.literal_eval(call.args[0]).lstrip("-")
            keywords = {word.arg: word.value for word in call.keywords}
            if name not in kinds or "action" in keywords or file.name == "doctor.py":
                continue
            if getattr(keywords.get("type"), "id", "") not in ("expand_home", "user_path"):
                forgotten.append(f"{file.name}: {name}")
    assert not forgotten


def test_e1_only_a_leading_tilde_counts(monkeypatch):
    monkeypatch.setenv("HOME", "/base/me")
    assert expand_home("~/x") == "/base/me/x"
    assert [expand_home(path) for path in ("./~/x", "a~", "bundled:x")] == [
        "./~/x",
        "a~",
        "bundled:x",
    ]


# --- keys and values by other names -------------------------------------------------------------


def test_e3_the_device_gpu_is_cuda(tiny_config):
    assert told(tiny_config, "run.device=gpu").endswith("did you mean cuda?")
    assert told(tiny_config, "train.dtype=bf16").endswith("did you mean bfloat16?")


def test_e17_other_programs_names_and_the_same_section_first(tiny_config):
    assert told(tiny_config, "optim.learning_rate=1").endswith("did you mean optim.lr?")
    assert told(tiny_config, "train.learning_rate=1").endswith("did you mean optim.lr?")
    assert told(tiny_config, "train.batch_size=1").endswith("did you mean train.global_batch_size?")
    for section in ("log", "eval", "checkpoint"):
        assert told(tiny_config, f"{section}.every=1").endswith(f"mean {section}.every_steps?")
    # a name that is another section's in full, and like nothing here, still is found there
    assert told(tiny_config, "train.lr=1").endswith("did you mean optim.lr?")
    with pytest.raises(ConfigError, match=r"did you mean log\.every_steps=3\?"):
        read_words(["--log.every", "3"], field_names())
    with pytest.raises(ConfigError, match=r"did you mean optim\.lr=3\?"):
        read_words(["--learning-rate", "3"], field_names())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train.steps 20", "train.steps is a setting; write train.steps=20"),
        ("x.yaml train.steps 20", "write train.steps=20"),
        ("x.yaml train.step 20 run.name=a", "write train.steps=20"),
        ("x.yaml steps 20", "write train.steps=20"),
        ("x.yaml train.steps run.name=a", "write train.steps=…"),
    ],
)
def test_e20_a_setting_without_its_equals_sign(words, message):
    with pytest.raises(ConfigError) as caught:
        read_words(words.split(), field_names())
    assert message in str(caught.value)


def test_e20_a_file_is_still_a_file():
    names = field_names()
    for file in ("configs/steps", "train.yaml", "steps.yml", "my.config"):
        assert read_words([file, "train.steps=2"], names) == (file, ["train.steps=2"])


# --- switches and lengths -----------------------------------------------------------------------


def test_e4_switching_off_on_the_command_line_takes_the_rest_along(tiny_config, tmp_path):
    config = load_config(tiny_config, ["eval.every_steps=null"])  # the file has eval.rows
    assert config.eval.every_steps is None
    file = tmp_path / "more.yaml"
    file.write_text(
        tiny_config.read_text()
        + "\nrouter: {bias: {kind: quantile, ema: 0.5}, end_steps: 2}"
        + "\nexperts: {policy: {kind: replace, every: 7}}\n"
    )
    config = load_config(file, ["router.bias=null", "experts.policy=null"])
    assert (config.router.bias, config.expert_changes.policy) == (None, None)
    # another kind starts from its own defaults, but for what the command line says and for what
    # the two kinds have from one class
    config = load_config(file, ["router.bias.kind=sign", "experts.policy.kind=resize"])
    assert (config.router.bias, config.expert_changes.policy) == (SignBias(), Resize(every=7))
    for order in (1, -1):
        words = ["router.bias.rate=0.5", "router.bias.kind=sign"][::order]
        assert load_config(file, words).router.bias == SignBias(rate=0.5)
    assert load_config(file, ["router.bias.kind=quantile"]).router.bias.ema == 0.5
    assert "router.bias.ema=0.5 is no key of kind sign" in told(
        file, "router.bias.ema=0.5", "router.bias.kind=sign"
    )


def test_e13_a_warm_up_longer_than_the_run_is_cut_and_told(
    tiny_config, tmp_path, monkeypatch, capsys
):
    optim = load_config(tiny_config, ["optim.schedule.warmup_steps=40", "train.steps=20"]).optim
    assert (warmup_steps(40, 20), warmup_steps(40, 40), warmup_steps(40, 41)) == (2, 4, 40)
    assert [learning_rate(optim, step, 20) / optim.lr for step in (0, 1)] == [0.5, 1.0]
    monkeypatch.chdir(tmp_path)
    words = ["optim.schedule.warmup_steps=40", "train.steps=2", "eval.every_steps=null"]
    assert train.main([str(tiny_config), *words, "run.name=short"]) == 0
    assert (
        "warm-up takes 0 of the 2 steps, a tenth: optim.schedule.warmup_steps=40 is not below "
        "their number" in capsys.readouterr().out
    )


# --- errors of the settings -----------------------------------------------------------------------


def raised_texts(file: Path) -> list[str]:
    """The texts that a module raises or puts into errors, without their values."""
    texts = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Raise):
            parts = [part for part in ast.walk(node) if isinstance(part, ast.Constant)]
            texts.append("".join(str(part.value) for part in parts))
    return texts


def test_e21_no_error_names_a_key_that_no_config_has():
    known = {f"{place}.{key}" for place, keys in field_names().items() for key in keys}
    files = ["moe/config.py", "training/config/validate.py", "training/config/export_compat.py"]
    sections = "|".join(key for key in field_names()[""])
    seen = 0
    for file in [*files, "training/surgery/checks.py", "training/optim/schedule.py"]:
        for text in raised_texts(ROOT / file):
            for place in re.findall(rf"(?<![\w./])(?:{sections})(?:\.[a-z]\w*)+(?!\w*[./])", text):
                seen += 1
                assert place in known, f"{file}: {place}"
    assert seen > 40


# --- train.py -----------------------------------------------------------------------------------


def test_e7_train_without_arguments_says_how_it_is_used(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main([]) == 2
    printed = capsys.readouterr()
    assert "python train.py CONFIG [section.key=value ...]" in printed.err and not printed.out
    assert train.main(["train.steps=20"]) == 2
    assert "needs a config file, for example: python train.py configs/" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_e10_an_example_config_asks_for_your_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["run.device=cpu", "model.num_hidden_layers=1", "model.vocab_size=32768"]
    assert train.main([str(ROOT / "configs/tessera_1b_a200m.yaml"), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "give your own text: data.sources='[{path: FILE_OR_FOLDER}]'" in line


# --- runs ---------------------------------------------------------------------------------------


@pytest.fixture
def run(tiny_config, tmp_path, monkeypatch):
    """run(*overrides) → exit code; runs lie in tmp_path/runs."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: train.main([str(tiny_config), "train.steps=2", *words])


def test_e2_a_field_by_another_name_is_asked_for(run, tmp_path, capsys):
    lines = [json.dumps({"id": f"{i}", "content": "the whale " * 9}) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert run("data.sources=[{path: a.jsonl}]") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no field 'text'; it has id, content; give the source text_field: content" in line
    assert "on_bad_line" not in line, "which would leave out every line"
    assert run("data.sources=[{path: a.jsonl, text_field: content}]") == 0


def test_e6_a_finished_run_says_so(run, tmp_path, capsys):
    assert run("run.name=a") == 0
    assert "done: 2 steps" in capsys.readouterr().out
    assert run("run.name=a") == 0
    out = capsys.readouterr().out
    assert "nothing to do: this run was finished already, with all its 2 steps; raise train" in out
    assert "done:" not in out
    assert run("run.name=a", "train.steps=3") == 0
    assert "done: 3 steps" in capsys.readouterr().out


def test_e8_a_folder_in_use_is_told_at_once(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("training.run.LOCK_WAIT_S", 20.0)
    (tmp_path / "runs/taken").mkdir(parents=True)
    held = open(tmp_path / "runs/taken/.lock", "w")  # noqa: SIM115
    fcntl.flock(held, fcntl.LOCK_EX)
    told = []

    def sleep(seconds):  # the first wait: what stands on the screen by now?
        told.append(capsys.readouterr().err)
        held.close()

    monkeypatch.setattr("training.run.time.sleep", sleep)
    assert run("run.name=taken") == 0
    assert told[0].startswith("another process uses runs/taken; waiting up to 20 s")


def test_e9_text_that_has_grown_is_refused_with_a_way_forward(run, tmp_path, capsys):
    source = "data.sources=[{path: a.txt, format: lines, name: text}]"
    text = tmp_path / "a.txt"
    text.write_text("\n".join(documents(40)))
    assert run("run.name=a", source) == 0
    with text.open("a") as file:
        file.write("\n" + "\n".join(documents(5, seed=3)))
    capsys.readouterr()
    assert run("run.name=a", source, "train.steps=4") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "(grown or changed)" in line
    assert "run.name=NEW model.init_from=FOLDER_OF_THIS_RUN" in line
    assert run("run.name=b", source, "train.steps=4", "model.init_from=runs/a") == 0


def test_e9_a_hub_name_is_told_how_to_download(tiny_config):
    assert "hf download Qwen/Qwen3-30B-A3B --local-dir FOLDER" in told(
        tiny_config, "model.init_from=Qwen/Qwen3-30B-A3B"
    )
    assert "hf download" not in told(tiny_config, "model.init_from=runs/a/b")


def test_e11_weights_and_biases_leaves_the_end_of_the_run_on_the_screen(run, capfd):
    assert run("run.name=a", "log.trackers=[{kind: wandb, mode: offline}]") == 0
    printed = capfd.readouterr()
    assert "wandb:" not in printed.out + printed.err
    assert re.search(
        r"Weights & Biases: offline; wandb sync \S+/offline-run-\S+ sends", printed.out
    )
    assert "  next " in printed.out.splitlines()[-1]


def test_e12_each_source_has_its_numbers(run, tmp_path, capsys):
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.txt").write_text("\n".join(documents(40, seed=seed)))
    sources = "[{path: a.txt, format: lines, weight: 3}, {path: b.txt, format: lines, weight: 1}]"
    held = "[{path: a.txt, format: lines}, {path: b.txt, format: lines}]"
    assert (
        run(
            "run.name=a",
            f"data.sources={sources}",
            f"data.validation={{kind: sources, sources: {held}}}",
        )
        == 0
    )
    out = capsys.readouterr().out
    assert re.search(r"data: a: .*; 75\.0% of the rows\n", out)
    assert re.search(r"validation at step 2: loss .*; loss of a \d\.\d+, b \d\.\d+\n", out)
    record = read_run("runs/a")
    _, _, figure = next(figures(record))
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["training", "validation", "validation, a", "validation, b"]


def test_e15_an_empty_text_is_named(run, tmp_path, capsys):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "some.txt").write_text("\n".join(documents(60)))
    new = ("data.tokenizer={kind: bpe, vocab_size: 280}",)
    for words in ((), new):
        assert run("data.sources=[{path: empty.txt}]", *words) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
        assert "data.sources[0]" in line and "empty.txt" in line
    assert run("data.sources=[{path: [some.txt, empty.txt], name: text}]") == 0
    out = capsys.readouterr().out
    assert re.search(
        r"data: text: 1 documents, .*; left out 1 empty \(empty: \S+/empty\.txt\)", out
    )
    assert run("data.sources=[{path: [some.txt, empty.txt], name: text}]", "run.name=again") == 0


def test_a_start_says_what_runs(run, capsys):
    assert run("run.name=a") == 0
    printed = capsys.readouterr()
    assert not printed.err, "a healthy start warns of nothing"
    lines = printed.out.splitlines()
    for beginning in (
        r"data: text: 14 documents, \S+ tokens",
        r"tokenizer: \S+/tokenizer, 288 tokens, hash [0-9a-f]{12}",
        "kernels: experts reference, loss reference",
        "attention: scaled_dot_product_attention",
        "engine: none, one process",
    ):
        assert len([line for line in lines if re.match(beginning, line)]) == 1, beginning


def test_f7_an_import_error_is_one_line(tmp_path, capsys):
    import_hf = runpy.run_path(str(ROOT / "scripts" / "import_hf.py"))["main"]
    config = {"model_type": "qwen3_moe", "num_experts": -3, "hidden_size": "wide"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as ended:
        import_hf([str(tmp_path), str(tmp_path / "out")])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line == "error: hidden_size='wide' must be a whole number"


def test_a_sample_is_one_line(run, monkeypatch, capsys):
    monkeypatch.setattr(train, "sample_text", lambda *_, **__: "\n\nand on")
    assert run("run.name=lines", "eval.sample.prompt=the whale", "eval.every_steps=12") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "sample:" in line] == ["sample: the whale⏎ ⏎ and on"]


def test_a_python_without_torch_is_told_which_to_take(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')")
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", "configs/quickstart.yaml"],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: this Python has no PyTorch; type . .venv/bin/activate first (docs/install.md)"
    ]
