"""Loading the config of a run, checking it, and planning it for a number of processes.

    config = load_config("configs/quickstart.yaml", ["train.steps=50", "run.name=try"])
    plan = make_plan(config, world_size=4)

A file holds only what differs from the defaults. Every mistake that can be seen without a model
(an unknown key, a wrong type, an impossible combination) is a ConfigError of one line. The fields
are in `training.config.sections`, what cannot be together in `training.config.validate`.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import BaseModel, ValidationError

from models.config import known_fields
from moe.settings import OneOf
from training.config.layout import plan_layout
from training.config.load import ConfigError, apply_overrides, fail, read_yaml
from training.config.messages import first_line, kind, models_in, option_in
from training.config.plan import Plan
from training.config.sections import Config, ModelSection
from training.config.validate import check_config, check_plan
from training.data.lock import atomic_file
from training.surgery.checks import dormant_copies
from training.surgery.config import ExpertsConfig

__all__ = [
    "Config",
    "ConfigError",
    "Plan",
    "default_config_path",
    "fail",
    "field_names",
    "load_config",
    "make_plan",
    "write_resolved",
]

ROOT = Path(__file__).resolve().parents[2]


def field_names() -> dict[str, list[str]]:
    """Every place of a config file ("" is the top level) → the keys that are valid there; of an
    option those of all its kinds."""
    names: dict[str, list[str]] = {}

    def walk(place: str, model: type[BaseModel]) -> None:
        keys = names.setdefault(place, [])
        for key, field in model.model_fields.items():
            if model is ModelSection and key == "config":
                keys += known_fields()
                continue
            keys += [key] * (key not in keys)
            for inner in models_in(field):
                walk(f"{place}.{key}".lstrip("."), inner)

    walk("", Config)
    return names


def option_kinds() -> dict[str, OneOf]:
    """Every place of a config file where one of several kinds can stand."""
    found: dict[str, OneOf] = {}

    def walk(place: str, model: type[BaseModel]) -> None:
        for key, field in model.model_fields.items():
            inner = f"{place}.{key}".lstrip(".")
            if (option := option_in(field)) is not None:
                found[inner] = option
            for nested in models_in(field):
                walk(inner, nested)

    walk("", Config)
    return found


def default_config_path() -> Path:
    """configs/quickstart.yaml of this repository."""
    return ROOT / "configs" / "quickstart.yaml"


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The config in a YAML file (default: the quickstart's) with `section.key=value` overrides.

    Raises:
        ConfigError: any mistake, in one line: key, value, what is allowed, nearest valid name.
    """
    path = Path(path) if path is not None else default_config_path()
    values = apply_overrides(read_yaml(path), overrides, field_names(), option_kinds())
    # A section whose keys are all commented out reads as empty, not as a mapping.
    values = {key: {} if value is None else value for key, value in values.items()}
    run = values.setdefault("run", {})
    if isinstance(run, dict) and run.get("name") is None:
        run["name"] = re.sub(r"[^A-Za-z0-9_.+-]", "_", path.stem).lstrip(".+-") or "run"
    return build_config(values)


def build_config(values: dict[str, Any]) -> Config:
    """The config of plain nested values.

    Raises:
        ConfigError: any mistake, in one line.
    """
    for section in ("model", "data", "train"):
        values.setdefault(section, {})
    wrong = next((key for key in values if not isinstance(key, str)), None)
    if wrong is not None:
        raise ConfigError(f"section name {wrong!r} is {kind(wrong)}, not text")
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(first_line(error, field_names())) from None
    config = resolved(config)
    try:
        check_config(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def resolved(config: Config) -> Config:
    """The config with everything that is `auto` by its family spelled out."""
    model = config.model.config
    router = config.router.resolved(model.router_score, model.has_selection_bias)
    if not model.moe_layers:  # nothing to balance
        left = {key: None for key in ("bias", "balance") if getattr(config.router, key) == "auto"}
        router = router.model_copy(update=left)
    config = config.model_copy(update={"router": router})
    if config.experts in (None, ExpertsConfig()):
        return config.model_copy(update={"experts": None})
    copies = config.experts.copies
    if copies.kind == "auto":
        kind = "dormant" if dormant_copies(config) else "copy"
        copies = copies.model_copy(update={"kind": kind})
    experts = config.experts.model_copy(update={"copies": copies})
    return config.model_copy(update={"experts": experts})


def versions() -> dict[str, str]:
    """What this run is made with: Python, the packages that matter, and the git commit."""
    found = {"python": platform.python_version()}
    for package in (
        "tessera-moe",
        "torch",
        "triton",
        "transformers",
        "numpy",
        "flash-attn-4",
    ):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["git"] = git_commit()
    return found


def git_commit() -> str:
    """Commit of the repository this file is in, with "+changes" if files differ.

    TESSERA_COMMIT says it for a copy whose own repository does not know. "none" if nothing does.
    """
    if given := os.environ.get("TESSERA_COMMIT"):
        return given
    git = ["git", "-C", str(ROOT)]
    options = {"capture_output": True, "text": True, "timeout": 20}
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], **options, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], **options, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return commit + ("+changes" if changed.stdout.strip() else "")


def write_resolved(config: Config, path: str | Path) -> None:
    """Write a config with every field spelled out; versions and commit stand in comments above, so
    the file loads again as it is."""
    head = ["# Every setting of this run; it loads again as it is.", f"# command: {_command()}"]
    head += [f"# {name}: {version}" for name, version in versions().items()]
    body = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True, width=100)
    with atomic_file(Path(path), "run.dir") as temporary:
        temporary.write_text("\n".join(head) + "\n\n" + body, encoding="utf-8")


def _command() -> str:
    return " ".join(sys.argv).replace("\n", " ")


def make_plan(
    config: Config, world_size: int = 1, cuda: bool | None = None, hosts: int = 1
) -> Plan:
    """Resolve everything `auto`, and divide model and batch over processes.

    Args:
        world_size: number of processes.
        cuda: whether there is a CUDA device; None asks PyTorch.
        hosts: machines that the processes run on.

    Raises:
        ConfigError: fewer rows than processes, a layout that does not divide, an engine that is not
            installed, or a device that is not there.
    """
    train = config.train
    if train.global_batch_size < world_size:
        raise ConfigError(
            f"train.global_batch_size={train.global_batch_size} leaves some of the {world_size} "
            f"processes without a row; allowed: {world_size} or more"
        )
    rows = -(-train.global_batch_size // world_size)
    most = min(train.micro_batch_size, rows)
    micro_batch = next(size for size in range(most, 0, -1) if rows % size == 0)
    if cuda is None:
        cuda = torch.cuda.is_available()
    device = config.run.device
    if device == "cuda" and not cuda:
        raise ConfigError("run.device='cuda', but PyTorch sees no CUDA device; allowed here: 'cpu'")
    if device == "auto":
        device = "cuda" if cuda else "cpu"
    on_gpu = device == "cuda"
    kernels = config.model.kernels
    interpreted = kernels == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if kernels in ("triton", "hopper") and not on_gpu and not interpreted:
        raise ConfigError(
            f"model.kernels={kernels!r} needs a CUDA device, this run is on {device}; allowed "
            "here: auto, reference, spmm"
        )
    dtype = train.dtype if train.dtype != "auto" else ("bfloat16" if on_gpu else "float32")
    mesh, engine, exchange, offload = plan_layout(
        config, world_size, device, hosts, micro_batch, rows // micro_batch
    )
    plan = Plan(
        world_size=world_size,
        device=device,
        dtype=dtype,
        # DeepSpeed's hooks cut a block into pieces: minutes of compiling, and little gained.
        compile=on_gpu and engine != "deepspeed" if train.compile == "auto" else train.compile,
        whole_blocks=train.compile is True and engine == "fsdp2",
        mesh=mesh,
        engine=engine,
        exchange=exchange,
        offload=offload,
        micro_batch_size=micro_batch,
        accumulation=rows // micro_batch,
        rows_per_rank=rows,
        tokens_per_step=train.global_batch_size * config.data.seq_len,
    )
    check_plan(config, plan)
    return plan
