"""Checkpoints and data from somebody else are data: nothing in them is run."""

import hashlib
import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import train
from parallel.flat_shard import ShardLoadPlanner
from scripts import export_hf
from training.checkpoint.files import CheckpointError
from training.checkpoint.metadata import read_metadata
from training.checkpoint.tensors import read_weights, stored_tensors, unreadable
from training.config.build import ConfigError, load_config

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Call:
    """Pickles as a call that makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def trained(tiny_config, tmp_path_factory) -> Path:
    """Checkpoint folder of a short run."""
    folder = tmp_path_factory.mktemp("untrusted")
    before = Path.cwd()
    os.chdir(folder)
    try:
        changed = (
            "train.steps=2",
            "run.name=r",
            "optim.schedule.warmup_steps=1",
            "eval.every_steps=2",
        )
        assert train.main([str(tiny_config), *changed]) == 0
    finally:
        os.chdir(before)
    return folder / "runs" / "r" / "checkpoints" / "step_00000002"


@pytest.fixture
def folder(trained, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(trained, tmp_path / "step_00000002"))


def replace(folder: Path, name: str, content: bytes) -> None:
    """Other content for a file, and a manifest that agrees with it."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = hashlib.sha256(content).hexdigest()
    manifest["files"][name] = {"bytes": len(content), "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_c18_crafted_metadata_is_refused_before_anything_runs(folder, tmp_path, capsys):
    mark = tmp_path / "ran"
    real = read_metadata(folder)
    real.planner_data = Call(mark)  # still a Metadata, whose tensors would load
    replace(folder, ".metadata", pickle.dumps(real))
    with pytest.raises(CheckpointError, match=r"refused: its \.metadata refers to posix\.mkdir"):
        read_weights(folder)
    with pytest.raises(SystemExit) as ended:
        export_hf.main([str(folder), str(tmp_path / "out")])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ".metadata refers to posix.mkdir" in line and str(folder) in line
    assert not mark.exists() and not (tmp_path / "out").exists()
    # the same bytes would have run in torch's own reader
    dcp.FileSystemReader(folder).read_metadata()
    assert mark.exists()


def test_c18_metadata_may_list_tensors_in_this_folder_alone(folder):
    real = read_metadata(folder)
    name = next(iter(real.state_dict_metadata))
    whole = dict(real.state_dict_metadata)
    # an object instead of a tensor: torch would read it by a plain torch.load
    real.state_dict_metadata = whole | {name: BytesStorageMetadata()}
    replace(folder, ".metadata", pickle.dumps(real))
    with pytest.raises(CheckpointError, match=r"BytesStorageMetadata"):
        stored_tensors(folder)
    real.state_dict_metadata = whole | {name: 5}
    replace(folder, ".metadata", pickle.dumps(real))
    with pytest.raises(CheckpointError, match=f"lists '{name}', which is no tensor"):
        stored_tensors(folder)
    real.state_dict_metadata = whole
    place = next(iter(real.storage_data.values()))
    object.__setattr__(place, "relative_path", "../elsewhere.distcp")
    replace(folder, ".metadata", pickle.dumps(real))
    with pytest.raises(CheckpointError, match=r"names the file '\.\./elsewhere\.distcp' outside"):
        stored_tensors(folder)
    for content in (b"", b"{}", pickle.dumps([1, 2])):
        replace(folder, ".metadata", content)
        with pytest.raises(CheckpointError, match=r"refused: its \.metadata"):
            stored_tensors(folder)


def test_c18_crafted_tensors_and_random_states_do_not_run(folder, tmp_path, capsys):
    mark, root = tmp_path / "ran", tmp_path / "r" / "checkpoints"
    crafted = io.BytesIO()
    torch.save(Call(mark), crafted)
    replace(folder, "rng_00000.pt", crafted.getvalue())
    shutil.copytree(folder, root / folder.name)
    words = [f"run.dir={tmp_path}", "train.steps=3", "run.name=r"]
    assert train.main([str(folder / "config.yaml"), *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: random states of process 0 of checkpoint" in line and "UnpicklingError" in line
    data = next(folder.glob("*.distcp"))
    spoiled = bytearray(data.read_bytes())
    for place in read_metadata(folder).storage_data.values():
        part = slice(place.offset, place.offset + place.length)
        spoiled[part] = crafted.getvalue().ljust(place.length, b"\0")
    replace(folder, data.name, bytes(spoiled))
    with pytest.raises(CheckpointError, match=r"tensors of checkpoint .* cannot be read"):
        read_weights(folder)
    assert not mark.exists()


def test_only_what_a_file_holds_is_told_as_unreadable(folder, monkeypatch):
    """Memory, a device, or a fault of the program is not the file's."""
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        IndexError("of ours"),
    ):

        def fails(*_, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(ShardLoadPlanner, "resolve_tensor", fails)
            with pytest.raises(type(error), match=str(error)):
                read_weights(folder)


def test_c18_pickled_data_sets_are_refused_by_name(tiny_config):
    with pytest.raises(ConfigError, match="hub=pandas reads pickles, which can run code"):
        load_config(tiny_config, ["data.sources=[{hub: pandas, files: x.pkl}]"])


def test_c18_an_error_without_words_is_told_by_its_kind(tmp_path):
    assert str(unreadable(tmp_path, "tensors", EOFError())).endswith("cannot be read (EOFError)")
