"""The config of a run: eleven sections of typed fields, each with its meaning below it.

    config = load_config("configs/quickstart.yaml", ["train.steps=50", "run.name=try"])

A file holds only what differs from the defaults. Every mistake that can be seen without a model
(an unknown key, a wrong type, an impossible or a useless combination) is a ConfigError of one line.
What the numbers mean together for a given number of processes is a `Plan`. The `model` section
takes the field names of a Hugging Face config.json (models/config.py) beside its own.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from models.config import Count, ModelConfig, Positive, Strict, read_config_json
from models.config_hf import fields_from_hf
from models.first_weights import FirstWeights
from training.config_checks import (
    check_combinations,
    check_graph,
    check_rounding,
    check_states,
    drop_idle,
    refuse_sharded,
    refuse_useless,
    router_defaults,
)
from training.config_load import (
    ConfigError,
    PathText,
    apply_overrides,
    expand_home,
    fail,
    first_line,
    kind,
    models_in,
    read_yaml,
    shown,
    split_override,
)
from training.config_router import RouterConfig
from training.config_surgery import SurgeryConfig, clone_default
from training.data.config import DataConfig
from training.data.lock import atomic_file

if TYPE_CHECKING:
    from parallel.expert_parallel import ExpertParallelOptions
    from parallel.mesh import MeshPlan
    from parallel.offload import Offload

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

ROOT = Path(__file__).resolve().parent.parent

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class RunConfig(Strict):
    """Name, place and repeatability of the run."""

    name: str | None = None
    """Folder of the run inside `run.dir`. Empty: the config file's name without its ending."""
    dir: PathText = "runs"
    """Folder that holds all runs, relative to where the command is typed."""
    seed: Annotated[int, Field(ge=0, le=10**12)] = 0
    """Seed of initial weights and of the order of the data."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the last good checkpoint of this run folder, if any. never: refuse a
    folder that holds a run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where there is one."""
    deterministic: bool = False
    """Ask PyTorch for deterministic algorithms everywhere, and fail where there is none."""

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", name):
            raise ValueError(
                f"run.name={name!r} must be a plain folder name of letters, digits, _ - + ."
            )
        return name

    @property
    def folder(self) -> Path:
        """Where everything of this run lies."""
        return Path(self.dir) / (self.name or "run")


class ModelSection(Strict):
    """The model: fields of a Hugging Face config.json, and how it is built and computed here."""

    hf_config: PathText | None = None
    """Path of a Hugging Face config.json (or its folder) to take the fields from; fields given
    beside it win."""
    init_from: PathText | None = None
    """Hugging Face folder, checkpoint or run whose weights are continued from, with a new
    optimizer; it also gives all fields."""
    kernels: Literal["auto", "hopper", "triton", "reference", "spmm"] = "auto"
    """Implementation of the expert layers. auto: on CUDA Triton, or kernels for Hopper where they
    can run; plain PyTorch elsewhere; spmm: products of sparse matrices, for comparison."""
    save: Literal["h", "fp8_h", "x"] = "h"
    """What an expert layer keeps for its backward pass: its pre-activations (h), a float8 copy of
    them (fp8_h: half the memory, gradients 3 to 4 % off, bfloat16 only), or only its input (x),
    which is least memory and one more matrix product."""
    init: FirstWeights = Field(default_factory=FirstWeights)
    """How the weights of a new model are drawn."""
    config: ModelConfig = Field(repr=False)
    """The architecture, resolved from the remaining keys, `hf_config` and `init_from`."""

    @model_validator(mode="before")
    @classmethod
    def _collect_architecture(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        own = {key: value for key, value in raw.items() if key in cls.model_fields}
        rest = {key: value for key, value in raw.items() if key not in cls.model_fields}
        if isinstance(own.get("config"), ModelConfig):
            return raw
        if "config" in own:
            raise ValueError("model.config is no key; write the model's fields right under model")
        source = "init_from" if own.get("init_from") is not None else "hf_config"
        path = own.get(source)
        if not isinstance(path, str):
            return own | {"config": rest}
        if source == "init_from" and own.get("hf_config") is not None:
            raise ValueError("model.hf_config is useless beside model.init_from, which gives it")
        given = _hugging_face_fields(expand_home(path), f"model.{source}")
        if source == "init_from":
            full = ModelConfig(**given).model_dump()
            wrong = [key for key, value in rest.items() if key in full and full[key] != value]
            if wrong:
                raise ValueError(
                    f"model.{wrong[0]}={shown(rest[wrong[0]])} contradicts model.init_from, whose "
                    f"config has {shown(full[wrong[0]])}; leave it out, or give "
                    + " ".join(f"model.{key}={shown(full[key])}" for key in wrong)
                )
        return own | {"config": {**given, **rest}}


def _hugging_face_fields(path: str, key: str) -> dict[str, Any]:
    """The fields that the Hugging Face config at `path` gives; `key` is who asked, for errors."""
    try:
        given = fields_from_hf(read_config_json(path))
        ModelConfig(**given)  # so that a mistake in the file is told as one of the file
        return given
    except ValidationError as error:
        raise ValueError(f"{key}={path!r}: {first_line(error, {})}") from None
    except ValueError as error:
        raise ValueError(f"{key}={path!r}: {error}") from None


class OptimConfig(Strict):
    """Optimizer, learning-rate schedule and what happens to bad steps."""

    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate of AdamW."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default_factory=lambda: [0.9, 0.95])
    """Decay of AdamW's first and second moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    schedule: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    """Course of the learning rate after warm-up. wsd: constant, then down at the end."""
    warmup_steps: Count = 100
    """Steps of linear warm-up from zero; in a run of no more steps than that, a tenth of them."""
    decay_fraction: Fraction = 0.2
    """Last part of the run in which wsd lowers the learning rate."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end, as a part of the peak."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of all gradients together; empty: no clipping."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """What AdamW updates of a bfloat16 model: float32 master weights, or the model's own weights,
    with updates rounded up or down at random so that they are right in the mean."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Form of AdamW's two moments of a bfloat16 model; bfloat16 is rounded at random likewise."""
    router_lr_multiplier: Annotated[float, Field(gt=0)] = 1.0
    """Learning rate of the routers, as a multiple of `optim.lr`."""
    router_weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of the routers."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """What to do with a step whose loss or gradient is NaN or infinite."""
    spike_factor: Annotated[float, Field(gt=1)] | None = None
    """Skip a step whose gradient norm exceeds this multiple of its running mean; empty: never."""

    @field_validator("betas")
    @classmethod
    def _two(cls, betas: list[float]) -> list[float]:
        if len(betas) != 2:
            raise ValueError(f"optim.betas={betas} must be a list of exactly 2 numbers")
        return betas


class TrainConfig(Strict):
    """Length, batch and precision."""

    steps: Positive | None = None
    """Optimizer steps of the run; this or `epochs`."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training data; this or `steps`."""
    global_batch_size: Positive = 32
    """Rows of `data.seq_len` tokens in one optimizer step, over all processes."""
    micro_batch_size: Positive = 8
    """Most rows of one forward pass in one process; where few rows are left for each, fewer."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the model's weights and of matrix products. auto: bfloat16 on CUDA."""
    compile: Literal["auto"] | bool = "auto"
    """torch.compile of the blocks. auto: on CUDA, but not under DeepSpeed."""
    cuda_graph: bool = False
    """Replay the device's work of a step as one CUDA graph instead of launching every kernel: for
    small models, whose steps wait for the host. Keeps the activations' memory between steps."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass instead of keeping them."""
    sparse_density: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the weights of every expert's matrices that is kept; the others become zero, also in
    an export. Empty: all. Products are not faster for it: see docs/sparse.md."""
    sparse_method: Literal["straight_through", "regrow"] = "straight_through"
    """straight_through: the largest weights are computed with, and all learn until
    `train.sparse_until`. regrow (RigL): hidden weights are zero, and at every new mask some of the
    smallest give way to those with the largest gradients."""
    sparse_block: Positive = 1
    """Side of the square blocks that are kept or hidden as a whole."""
    sparse_start: Positive = 1
    """Step after which the first mask is made."""
    sparse_every: Positive = 100
    """Steps from one mask to the next."""
    sparse_end: Positive | None = None
    """Step at which the density is reached, on a cubic path from 1; empty: with the first mask."""
    sparse_until: Positive | None = None
    """Step of the last mask: from then on it stays, and hidden weights are zero. Empty: at three
    quarters of the run."""
    sparse_regrow: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of what is kept that the first mask of the method regrow exchanges; it falls to zero
    until `train.sparse_until`."""


class ParallelConfig(Strict):
    """How several processes share one model (docs/parallel.md); one process needs none of it."""

    nodes: Positive | None = None
    """Nodes that the processes form: dense weights are sharded inside a node and replicated over
    nodes. Empty: the number of hosts; a multiple of it cuts hosts into several nodes."""
    expert: Positive | None = None
    """Ranks that the experts are split over. Empty: the number that a model of the costs finds
    fastest among those whose weights and moments fit the GPUs (docs/scaling.md)."""
    expert_placement: Literal["across_nodes", "within_node"] = "across_nodes"
    """across_nodes: a node's ranks share the node's experts and tokens travel between nodes.
    within_node: tokens travel between the ranks of a node, and every node holds all experts."""
    engine: Literal["auto", "fsdp2", "deepspeed"] = "auto"
    """ZeRO-3 by PyTorch's FSDP2 or by DeepSpeed. auto: none for one process; of several, deepspeed
    where something is offloaded or its Adam is asked for, else fsdp2. One that is named is used by
    one process too."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where gradients, master weights and moments lie and the update runs: on the device, in host
    memory, or, but for gradients, in files of `offload_path`."""
    offload_weights: Literal["none", "cpu", "nvme"] = "none"
    """Where a process keeps its part of the weights between their uses, likewise."""
    offload_path: PathText | None = None
    """Folder on a local disk of every host, for nvme."""
    adam: Literal["torch", "deepspeed"] = "torch"
    """PyTorch's fused AdamW or DeepSpeed's kernels (deepspeed), which are compiled on first use."""
    chunks: Positive | None = None
    """Parts of a micro-batch that travel while others are computed; empty: 2, or 1 with
    schedule=whole."""
    schedule: Literal["all", "pairwise", "whole"] = "all"
    """Exchange with all ranks at once, or with one after the other; whole: send all tokens to all
    ranks, whatever their experts, so that no size is read back from the device."""
    deduplicate: bool = True
    """Send a token once to each rank, not once for each of its experts."""
    payload: Literal["model", "float8"] = "model"
    """Form of tokens on their way to experts: the model's dtype, or E4M3 with scales."""
    transport: Literal["collective", "pull"] = "collective"
    """collective: NCCL or gloo. pull: copies out of the peers' memory, for GPUs of one host."""
    timeout_s: Annotated[float, Field(gt=0, le=1e6)] = 600.0
    """Seconds after which a collective operation that hangs ends the run."""


class CheckpointConfig(Strict):
    """When the run is saved and how much is kept."""

    every_steps: Positive | None = 500
    """Steps between checkpoints; empty: only at the end and on request. The last step is always
    saved."""
    keep_last: Positive | None = 3
    """Checkpoints that stay; empty: all."""
    async_save: bool = True
    """Write in the background while training goes on."""


class EvalConfig(Strict):
    """Validation and samples during training."""

    every_steps: Positive | None = 250
    """Steps between validations; empty: never, and then `sample_prompt` must be empty too."""
    rows: Positive | None = 128
    """Rows of `data.seq_len` tokens that one validation reads of each source, over all processes
    together; empty: all."""
    sample_prompt: str | None = None
    """Text that the model goes on with at every validation; empty: none."""
    sample_tokens: Positive = 64
    """Tokens of a sample."""


class LogConfig(Strict):
    """What is told while training."""

    every_steps: Positive = 10
    """Steps between log lines; only these read values back from the device."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases beside the run folder's own metrics.jsonl."""
    wandb_project: str = "tessera"
    """Project there."""
    activation_threshold: Annotated[float, Field(ge=0)] | None = None
    """Measure at log steps, on a few fixed rows, which share of the experts' activations a product
    could not skip, for tiles of 1 to 128 rows, if absolute values up to this count as zero. Empty:
    do not."""
    plots: bool = True
    """Draw plots/*.png at validations and at the end."""


class Config(Strict):
    """A whole run. Build it with `load_config`."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelSection
    router: RouterConfig = Field(default_factory=RouterConfig)
    surgery: SurgeryConfig = Field(default_factory=SurgeryConfig)
    data: DataConfig
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: TrainConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    log: LogConfig = Field(default_factory=LogConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `load_config` reads back to an equal config."""
        values = self.model_dump(mode="json")
        model = values["model"]
        model["hf_config"] = None  # all that it gave is spelled out
        values["model"] = {**model.pop("config"), **model}
        return values

    @model_validator(mode="after")
    def _filled_and_checked(self) -> Config:
        router = self.router.model_copy(update=router_defaults(self))
        object.__setattr__(self, "router", router)
        if self.surgery.clone is None:
            surgery = self.surgery.model_copy(update={"clone": clone_default(self)})
            object.__setattr__(self, "surgery", surgery)
        refuse_useless(self)
        check_combinations(self)
        return self


# --- loading ------------------------------------------------------------------------------------


def field_names() -> dict[str, list[str]]:
    """Every place of a config file ("" is the top level) → the keys that are valid there."""
    names: dict[str, list[str]] = {"": list(Config.model_fields)}

    def walk(place: str, model: type[BaseModel]) -> None:
        keys = names.setdefault(place, [])
        for key, field in model.model_fields.items():
            if model is ModelSection and key == "config":
                walk(place, ModelConfig)
                continue
            keys.append(key)
            for inner in models_in(field.annotation):
                walk(f"{place}.{key}", inner)

    for key, field in Config.model_fields.items():
        for section in models_in(field.annotation):
            walk(key, section)
    return names


def default_config_path() -> Path:
    """configs/quickstart.yaml of this repository, or its copy in an installed package."""
    for base in (ROOT, Path(sys.prefix) / "share" / "tessera"):
        path = base / "configs" / "quickstart.yaml"
        if path.is_file():
            return path
    raise ConfigError("configs/quickstart.yaml is missing from this installation")


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The config in a YAML file (default: the quickstart's) with `section.key=value` overrides.

    Raises:
        ConfigError: any mistake, in one line: key, value, what is allowed, nearest valid name.
    """
    path = Path(path) if path is not None else default_config_path()
    values = apply_overrides(read_yaml(path), overrides, field_names())
    drop_idle(values, [place for place, _ in map(split_override, overrides)])
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
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(first_line(error, field_names())) from None


def versions() -> dict[str, str]:
    """What this run is made with: Python, the packages that matter, and the git commit."""
    found = {"python": platform.python_version()}
    for package in ("tessera-moe", "torch", "triton", "transformers", "numpy", "liger-kernel"):
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


# --- the plan -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What the numbers of a config mean together for a number of processes."""

    world_size: int
    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """"float32" or "bfloat16"."""
    compile: bool
    mesh: MeshPlan
    """Who holds what."""
    engine: str | None
    """"fsdp2" or "deepspeed"; None for one process that names none."""
    exchange: ExpertParallelOptions
    """How tokens travel to experts of other processes."""
    offload: Offload
    """What lies outside of the device."""
    micro_batch_size: int
    """Rows of one forward pass in one process: the largest divisor of its rows up to the
    setting."""
    accumulation: int
    """Forward passes of one process in one optimizer step."""
    rows_per_rank: int
    """Rows of one process in one optimizer step; where they do not divide, the last ones have one
    less and an empty row instead."""
    tokens_per_step: int
    """Positions of one optimizer step over all processes."""


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
        import torch  # here, so that mistakes are told before the two seconds this takes

        cuda = torch.cuda.is_available()
    from training.config_routers import check_routers  # which imports it too
    from training.layout import plan_layout

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
    if engine is not None:
        several = f"{world_size} processes"
        refuse_sharded(config, several if world_size > 1 else f"parallel.engine={engine}")
    check_states(config, dtype)
    if config.model.save == "fp8_h" and dtype != "bfloat16":
        raise ConfigError(
            f"model.save='fp8_h' needs train.dtype='bfloat16', this run's is {dtype!r}; allowed "
            "here: h, x"
        )
    check_rounding(config, micro_batch)
    if train.cuda_graph:
        check_graph(config, device, dtype, rows // micro_batch)
    if train.steps is not None:
        check_routers(config, train.steps)
    return Plan(
        world_size=world_size,
        device=device,
        dtype=dtype,
        # DeepSpeed's hooks cut a block into pieces: minutes of compiling, and little gained.
        compile=on_gpu and engine != "deepspeed" if train.compile == "auto" else train.compile,
        mesh=mesh,
        engine=engine,
        exchange=exchange,
        offload=offload,
        micro_batch_size=micro_batch,
        accumulation=rows // micro_batch,
        rows_per_rank=rows,
        tokens_per_step=train.global_batch_size * config.data.seq_len,
    )
