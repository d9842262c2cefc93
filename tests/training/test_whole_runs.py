"""What a whole run comes to: how long it is, what it is measured on, and when it is given up."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest

import train
from models.hf import export_hf
from models.transformer import Decoder
from tests.training.test_train import before_step, break_loss, by_step, events
from tests.training.tiny import DENSE
from training.checkpoint.files import read_state
from training.checkpoint.weights import load_model
from training.data.tokenizer import read_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("limit", ["5", "null"])
def test_c4_validation_rows_do_not_depend_on_micro_batch(run, tmp_path, monkeypatch, limit):
    seen: list[tuple] = []
    validate = train.validate

    def watched(model, sources, **options):
        batches = {name: list(rows) for name, rows in sources.items()}
        found = [row for rows in batches.values() for b in rows for row in b.rows if row[0] >= 0]
        seen.append((sorted(found), sum(b.num_targets for rows in batches.values() for b in rows)))
        return validate(model, batches, **options)

    monkeypatch.setattr(train, "validate", watched)
    settings = ("train.steps=1", "optim.schedule.warmup_steps=0", f"eval.rows={limit}")
    for batch, micro in ((4, 1), (4, 2), (4, 4), (6, 3), (1, 1)):
        sizes = (f"train.global_batch_size={batch}", f"train.micro_batch_size={micro}")
        assert run(f"run.name=v{limit}-{batch}-{micro}", *settings, *sizes) == 0
    assert all(rows == seen[0] for rows in seen[1:])
    assert limit == "null" or len(seen[0][0]) == 5
    loss = [by_step(tmp_path / f"runs/v{limit}-4-{n}", "val_loss")[1][0] for n in (1, 2, 4)]
    assert loss == pytest.approx([loss[0]] * 3, rel=1e-5)


@pytest.mark.parametrize(
    ("setting", "cause"),
    [("model.initializer_range=1e20", "or model.initializer_range=1e+20"), ("optim.lr=1e12", "")],
)
def test_c2_a_run_whose_steps_are_all_skipped_fails_early(run, tmp_path, capsys, setting, cause):
    settings = (setting, "train.steps=60", "log.every_steps=10", "checkpoint.every_steps=40")
    settings += ("eval.every_steps=null", "eval.rows=128", "optim.schedule.warmup_steps=0")
    assert run("run.name=lost", *settings) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "steps up to step 30 were skipped" in line or "up to step 20 were skipped" in line
    assert "loss or gradients are not finite" in line and "Lower optim.lr=" in line
    assert cause in line
    folder = tmp_path / "runs/lost"
    assert not (folder / "checkpoints").exists() and not events(folder, "done")
    # a run that ends before it is sure
    assert run("run.name=short", *settings, "train.steps=6") == 1
    assert "steps up to step 6 were skipped" in capsys.readouterr().err
    assert not (tmp_path / "runs/short/checkpoints").exists()


def test_c2_some_skipped_steps_do_not_fail_a_run(run, monkeypatch):
    break_loss(monkeypatch, {3, 4, 5, 6, 7, 10, 11, 12}, float("nan"))
    assert run("run.name=some") == 0


@pytest.mark.parametrize(("first", "then"), [(4, 8), (8, 4), (4, 1)])
def test_c3_epochs_are_those_of_the_rows_whatever_the_batch(
    run, tmp_path, monkeypatch, first, then
):
    epoch: list[int] = []
    count = train.total_steps

    def counted(config, rows_per_epoch, **options):
        epoch.append(rows_per_epoch)
        return count(config, rows_per_epoch, **options)

    monkeypatch.setattr(train, "total_steps", counted)
    words = (
        "run.name=epochs",
        "train.steps=null",
        "train.epochs=2",
        "optim.schedule.warmup_steps=1",
    )
    words += ("train.micro_batch_size=1", "eval.every_steps=null", "eval.rows=128")
    root = tmp_path / "runs/epochs/checkpoints"
    with monkeypatch.context() as patch:
        before_step(patch, 3, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        assert run(*words, f"train.global_batch_size={first}") == 75
    assert read_state((root / "latest").resolve())["data"]["rows"] == 3 * first < epoch[0] * 2
    assert run(*words, f"train.global_batch_size={then}") == 0
    state = read_state((root / "latest").resolve())
    taken = state["data"]["rows"]
    assert taken == 3 * first + (state["step"] - 3) * then
    assert 2 * epoch[0] <= taken < 2 * epoch[0] + then
    assert run(*words, f"train.global_batch_size={then}") == 0, "finished: no step more"
    assert read_state((root / "latest").resolve()) == state


def test_c14_a_run_with_damaged_checkpoints_alone_is_refused(run, tmp_path, capsys):
    settings = ("run.name=damaged", "train.steps=6", "eval.every_steps=null", "eval.rows=128")
    assert run(*settings) == 0
    root = tmp_path / "runs/damaged/checkpoints"
    folders = [path for path in root.glob("step_*") if not path.is_symlink()]
    assert len(folders) == 2
    for folder in folders:
        data = next(folder.glob("*.distcp"))
        data.write_bytes(b"x" * data.stat().st_size)
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    capsys.readouterr()
    for _ in range(2):
        assert run(*settings) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "holds no checkpoint that can be used" in line and "give another run.name" in line
        assert "step_00000006" in line and "does not match its checksum" in line
    assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*")) == before
    # a save that never ended is no checkpoint: such a run starts
    unfinished = tmp_path / "runs/unfinished/checkpoints/step_00000003.tmp"
    shutil.copytree(folders[0], unfinished)
    assert run(*settings, "run.name=unfinished") == 0


@pytest.mark.parametrize(
    "place", ["load_tokenizer", "build_data", "make_train_state", "make_probe"]
)
@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_c12_a_fault_during_the_start_shows_its_traceback(
    run, tmp_path, monkeypatch, capsys, place, kind
):
    def fault(*_, **__):
        raise kind("of a library")

    monkeypatch.setattr(train, place, fault)
    assert run("run.name=fault") == 1
    told = capsys.readouterr().err
    assert "Traceback" in told and f"{kind.__name__}: of a library" in told and "in fault" in told
    assert not (tmp_path / "runs/fault").exists(), "a start that failed leaves nothing"


def test_c12_a_fault_of_a_thread_that_tokenises_shows_its_traceback(run, monkeypatch, capsys):
    def fault(*_, **__):
        raise ValueError("in a thread")

    monkeypatch.setattr("training.data.encode.encode_texts", fault)
    assert run("run.name=fault", "data.cache_dir=elsewhere") == 1
    told = capsys.readouterr().err
    assert "Traceback" in told and "ValueError: in a thread" in told


@pytest.mark.parametrize(
    ("settings", "environ", "message"),
    [
        (("model.init_from=nowhere",), {}, "model.init_from='nowhere'"),
        (("model.save=fp8_h",), {}, "model.save='fp8_h'"),
        (("model.kernels=spmm", "model.save=x"), {}, "save='x' does not go with kernels='spmm'"),
        (("model.num_experts_per_tok=5",), {}, "num_experts_per_tok=5"),
        (("router.bias.below=2",), {}, "min_load"),
        (
            ("router.top_k.kind=steps",),
            {},
            "router.top_k.start is missing",
        ),
        (
            ("train.steps=null", "train.epochs=1", "router.freeze_at=999"),
            {},
            "router.freeze_at=999",
        ),
        (
            (
                "train.steps=null",
                "train.epochs=1",
                "router.bias.kind=sign",
                "router.end_steps=99",
            ),
            {},
            "router.end_steps=99 must be less than half",
        ),
        (("parallel.expert=3",), {}, "parallel.expert=3"),
        (
            ("parallel.offload.path=x",),
            {},
            "parallel.offload.kind is missing; allowed with path: nvme",
        ),
        ((), {"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is no whole number"),
        ((), {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "3"}, "equally many"),
        (("data.tokenizer=nowhere.json",), {}, "data.tokenizer='nowhere.json'"),
    ],
)
def test_c12_mistakes_of_the_user_are_one_line(
    run, monkeypatch, capsys, settings, environ, message
):
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    assert run("run.name=mistake", *settings) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


BROKEN = {
    "model.safetensors": "model.safetensors is not readable as safetensors",
    "config.json": "config.json is not valid JSON",
    "tokenizer.json": "tokenizer.json is no tokenizer.json",
    "tokenizer_config.json": "tokenizer_config.json holds no JSON object",
    "generation_config.json": "generation_config.json is not valid JSON",
}
WRONG = {
    "hidden_size": "wide",
    "num_experts": -1,
    "rope_scaling": "linear",
    "layer_types": 1,
    "bos_token_id": "begin",
}


def test_c12_folders_of_weights_that_do_not_fit_are_one_line(run, tmp_path, capsys):
    assert run("run.name=first", "train.steps=2", "optim.schedule.warmup_steps=1") == 0
    out = tmp_path / "out"
    first = tmp_path / "runs/first"
    tokenizer = read_tokenizer(first / "tokenizer")
    settings = ("run.name=second", f"model.init_from={out}", "data.tokenizer=null")
    export_hf(load_model(first), out, tokenizer=tokenizer)
    assert run(*settings, "train.steps=1", "optim.schedule.warmup_steps=0", "run.name=whole") == 0
    config = json.loads((out / "config.json").read_text())

    def told() -> str:
        capsys.readouterr()
        assert run(*settings) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and not (tmp_path / "runs/second").exists()
        return line

    for file, words in BROKEN.items():
        content = (out / file).read_bytes()
        (out / file).write_bytes(content[: len(content) // 2])
        assert words in told(), file
        (out / file).write_bytes(content)
    for key, value in WRONG.items():
        (out / "config.json").write_text(json.dumps(config | {key: value}))
        assert key in told()
    (out / "config.json").write_text(json.dumps(config))
    (out / "model.safetensors").unlink()
    assert "neither model.safetensors nor" in told()


def test_f5_a_run_stops_generation_where_the_folder_says(run, tmp_path):
    """The list of generation_config.json, as scripts/import_hf.py takes it."""
    assert run("run.name=first", "train.steps=1", "optim.schedule.warmup_steps=0") == 0
    out, first = tmp_path / "out", tmp_path / "runs/first"
    export_hf(load_model(first), out, tokenizer=read_tokenizer(first / "tokenizer"))
    (out / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    settings = (f"model.init_from={out}", "data.tokenizer=null", "optim.schedule.warmup_steps=0")
    assert run("run.name=second", *settings, "train.steps=1") == 0
    assert load_model(tmp_path / "runs/second").config.eos_token_id == [0, 2]


def test_c10_the_start_says_which_files_of_a_folder_are_taken(run, tmp_path, capsys):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "README.md").write_text("about " * 500)
    line = '{"text": "' + "the old whale saw the sailor " * 40 + '"}\n'
    (folder / "a.jsonl").write_text(line * 3)
    (folder / "b.csv").write_text("x")
    source = f"data.sources=[{{path: {folder}}}]"
    assert run("run.name=folder", source, "train.steps=1", "optim.schedule.warmup_steps=0") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "1 file taken: a.jsonl; left out: README.md (about the data); b.csv (ending" in told
    assert "corpus: 3 documents" in told


def test_c11_a_dense_model_runs_each_micro_batch_once(run, monkeypatch):
    """No pass that counts loads, whatever the accumulation; a model with experts has one."""
    calls = []
    real = Decoder.forward

    def counted(self, *arguments, **keywords):
        if self.training:
            calls.append(1)
        return real(self, *arguments, **keywords)

    monkeypatch.setattr(Decoder, "forward", counted)
    words = ("train.global_batch_size=4", "train.micro_batch_size=1", "train.steps=2")
    passes = {}
    for name, dense in (
        ("experts", ()),
        ("dense", DENSE),
    ):
        calls.clear()
        assert run(f"run.name={name}", *words, *dense, "optim.schedule.warmup_steps=1") == 0
        passes[name] = len(calls)
    assert passes == {"experts": 2 * 8, "dense": 2 * 4}
