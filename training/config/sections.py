"""The sections of a run's config: typed fields, each with its meaning below it.

An option with settings of its own is `null` or one of a few kinds, each a class beside the code
that reads it (moe/config.py, parallel/config.py, training/optim/config.py, …/surgery/config.py).
The `model` section takes the field names of a Hugging Face config.json (models/config.py) beside
its own. `training.config.build` loads a config and checks what goes together.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator

from models.config import ModelConfig, Positive
from models.errors import UserError
from models.first_weights import FirstWeights
from models.hf.config import fields_from_hf
from models.rope import normal_rope_scaling
from moe.config import RouterConfig
from moe.settings import Settings, one_of
from parallel.config import AllToAll, Exchange, Offloading
from training.config.load import ConfigError, PathText, expand_home
from training.config.messages import first_line, shown
from training.data.config import DataConfig
from training.optim.adamw import AdamW
from training.optim.muon import Muon
from training.report.trackers import AnyTracker
from training.surgery.config import ExpertsConfig


class RunConfig(Settings):
    """Name, place and repeatability of the run."""

    name: str | None = None
    """Folder of the run inside `run.dir`. `null`: the config file's name without its ending."""
    dir: PathText = "runs"
    """Folder that holds all runs, relative to where the command is typed."""
    seed: Annotated[int, Field(ge=0, le=10**12)] = 0
    """Seed of initial weights and of the order of the data."""
    resume: Literal["auto", "never"] = "auto"
    """auto: resume from the last good checkpoint of this run folder, if any. never: refuse a
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


class ModelSection(Settings):
    """The model: fields of a Hugging Face config.json, and how it is built and computed here."""

    hf_config: PathText | None = None
    """Path of a Hugging Face config.json (or its folder) to take the fields from; fields given
    beside it win."""
    init_from: PathText | None = None
    """Hugging Face folder, checkpoint or run whose weights are continued from, with a new
    optimizer; it also gives all fields. `rope_theta`, `rope_scaling` and `max_position_embeddings`
    given beside it win, to continue on longer texts."""
    kernels: Literal["auto", "hopper", "triton", "reference", "spmm"] = "auto"
    """Implementation of the expert layers. auto: on CUDA Triton, or kernels for Hopper where they
    can run; plain PyTorch elsewhere; spmm: products of sparse matrices, for comparison."""
    attention: Literal["auto", "flash4", "pytorch"] = "auto"
    """Who computes attention. auto: FlashAttention-4 where its package is installed (`pip install
    -e .[gpu]`) and has been tried with the GPU (Hopper), else PyTorch's own kernels."""
    save: Literal["h", "fp8_h", "x"] = "h"
    """What an expert layer keeps for its backward pass: its pre-activations (h), a float8 copy of
    them (fp8_h: half the memory, gradients 3 to 4 % off, bfloat16 only), or only its input (x),
    which is least memory and one more matrix product."""
    init: FirstWeights | None = None
    """How the weights of a new model are drawn; `null`: as the fields' defaults below say."""
    config: SerializeAsAny[ModelConfig] = Field(repr=False)
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
            fixed = full.keys() - CONTINUED_OTHERWISE
            wrong = [key for key, value in rest.items() if key in fixed and full[key] != value]
            if wrong:
                raise ValueError(
                    f"model.{wrong[0]}={shown(rest[wrong[0]])} contradicts model.init_from, whose "
                    f"config has {shown(full[wrong[0]])}; leave it out, or give "
                    + " ".join(f"model.{key}={shown(full[key])}" for key in wrong)
                )
            if isinstance(rest.get("rope_scaling"), dict):
                length = (full["rope_scaling"] or {}).get("original_max_position_embeddings")
                rest["rope_scaling"] = normal_rope_scaling(
                    rest["rope_scaling"], length or full["max_position_embeddings"]
                )
        return own | {"config": {**given, **rest}}

    def continued_otherwise(self) -> list[str]:
        """What differs from the model of `init_from`, as "key: old → new"."""
        if self.init_from is None:
            return []
        old = ModelConfig(**_hugging_face_fields(self.init_from, "model.init_from"))
        values = (
            (key, getattr(old, key), getattr(self.config, key))
            for key in ModelConfig.model_fields
            if key in CONTINUED_OTHERWISE
        )
        return [f"{key}: {shown(a)} → {shown(b)}" for key, a, b in values if a != b]


CONTINUED_OTHERWISE = frozenset({"rope_theta", "rope_scaling", "max_position_embeddings"})
"""Fields in which a continued model may differ from the one that its weights are of."""


def _hugging_face_fields(path: str, key: str) -> dict[str, Any]:
    """The fields that the Hugging Face config at `path` gives; `key` is who asked, for errors."""
    try:
        given = fields_from_hf(path)
        ModelConfig(**given)  # so that a mistake in the file is told as one of the file
        return given
    except ValidationError as error:
        raise ConfigError(f"{key}={path!r}: {first_line(error, {})}") from None
    except UserError as error:
        raise ConfigError(f"{key}={path!r}: {error}") from None


class _Masks(Settings):
    density: Annotated[float, Field(gt=0, lt=1)]
    """Share of the weights of every expert's matrices that is kept; the others become zero, also in
    an export."""
    block: Positive = 1
    """Side of the square blocks that are kept or hidden as a whole."""
    start: Positive = 1
    """Step after which the first mask is made."""
    every: Positive = 100
    """Steps from one mask to the next."""
    end: Positive | None = None
    """Step at which the density is reached, on a cubic path from 1; `null`: with the first mask."""
    until: Positive | None = None
    """Step of the last mask: from then on it stays, and hidden weights are zero. `null`: at three
    quarters of the run."""

    def steps(self, steps: int) -> tuple[int, int, int]:
        """First mask, density reached, last mask: after which of a run's `steps` they are made."""
        end = self.start if self.end is None else self.end
        return self.start, end, self.until or steps * 3 // 4


class StraightThrough(_Masks):
    """The largest weights are computed with, and all learn until `until`."""

    kind: Literal["straight_through"] = "straight_through"


class Regrow(_Masks):
    """Hidden weights are zero, and at every new mask some of the smallest give way to those with
    the largest gradients (RigL, arXiv 1911.11134)."""

    kind: Literal["regrow"] = "regrow"
    regrow: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of what is kept that the first mask exchanges; it falls to zero until `until`."""


SPARSITIES: dict[str, type[Settings]] = {"straight_through": StraightThrough, "regrow": Regrow}
Sparsity = one_of(SPARSITIES, default="straight_through")


class TrainConfig(Settings):
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
    """torch.compile of the blocks. auto: on CUDA, but not under DeepSpeed; experts of other
    processes, and their exchange, stay outside of the compiled code. true: under FSDP2 they are
    part of it, each block without a break."""
    cuda_graph: bool = False
    """Replay the device's work of a step as one CUDA graph instead of launching every kernel: for
    small models, whose steps wait for the host. Keeps the activations' memory between steps."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass instead of keeping them."""
    sparsity: Sparsity | None = None
    """Masks of the experts' weights. Products are not faster for it: see docs/sparse.md."""

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                f"train.steps={shown(self.steps)} and train.epochs={shown(self.epochs)}: give one "
                "of the two, and one only (null unsets the other)"
            )
        return self


class ParallelConfig(Settings):
    """How several processes share one model (docs/parallel.md); one process needs none of it."""

    nodes: Positive | None = None
    """Nodes that the processes form: dense weights are sharded inside a node and replicated over
    nodes. `null`: the number of hosts; a multiple of it cuts hosts into several nodes."""
    expert: Positive | None = None
    """Ranks that the experts are split over. `null`: the number that a model of the costs finds
    fastest among those whose weights and moments fit the GPUs (docs/scaling.md)."""
    expert_placement: Literal["across_nodes", "within_node"] = "across_nodes"
    """across_nodes: a node's ranks share the node's experts and tokens travel between nodes.
    within_node: tokens travel between the ranks of a node, and every node holds all experts."""
    engine: Literal["auto", "fsdp2", "deepspeed"] = "auto"
    """ZeRO-3 by PyTorch's FSDP2 or by DeepSpeed. auto: none for one process; of several, deepspeed
    where something is offloaded, else fsdp2. One that is named is used by one process too."""
    offload: Offloading | None = None
    """What lies in host memory or on a disk instead of on the device."""
    exchange: Exchange = AllToAll()
    """How tokens travel to experts of other ranks."""
    timeout_s: Annotated[float, Field(gt=0, le=1e6)] = 600.0
    """Seconds after which a collective operation that hangs ends the run."""


class Keep(Settings):
    """Which checkpoints stay when a newer one is complete."""

    last: Positive | None = 3
    """So many of the newest; `null`: all."""
    every: Positive | None = None
    """For good: those of steps that are a multiple of it, which `checkpoint.every_steps` divides;
    `null`: none."""


class CheckpointConfig(Settings):
    """When the run is saved and how much is kept."""

    every_steps: Positive | None = 500
    """Steps between checkpoints; `null`: only at the end and on request. The last step is always
    saved."""
    keep: Keep | None = None
    """Which checkpoints stay; `null`: the last three."""
    async_save: bool = True
    """Write in the background while training goes on."""
    stop_after_hours: Annotated[float, Field(gt=0)] | None = None
    """Hours from the start of the command after which the run saves and stops with exit code 75,
    for machines that are lent for a time; the same command resumes. `null`: never."""

    @model_validator(mode="after")
    def _kept_are_saved(self) -> CheckpointConfig:
        every = self.keep and self.keep.every
        if every is not None and (self.every_steps is None or every % self.every_steps):
            raise ValueError(
                f"checkpoint.keep.every={every} must be a multiple of checkpoint.every_steps="
                f"{shown(self.every_steps)}: other steps have no checkpoint"
            )
        return self


class SampleConfig(Settings):
    """A text that the model continues at every validation."""

    prompt: str
    """Its beginning."""
    tokens: Positive = 64
    """Tokens that the model adds."""


class EvalConfig(Settings):
    """Validation and samples during training."""

    every_steps: Positive | None = 250
    """Steps between validations; `null`: never."""
    rows: Positive | None = 128
    """Rows of `data.seq_len` tokens that one validation reads of each source, over all processes
    together; `null`: all."""
    sample: SampleConfig | None = None
    """A sample of the model's text at every validation."""


class LogConfig(Settings):
    """What is told while training."""

    every_steps: Positive = 10
    """Steps between log lines; only these read values back from the device."""
    trackers: list[AnyTracker] = Field(default_factory=list)
    """Where metrics go besides the run folder; none of them can stop or slow the run."""
    activation_threshold: Annotated[float, Field(ge=0)] | None = None
    """Measure at log steps, on a few fixed rows, which share of the experts' activations a product
    could not skip, for tiles of 1 to 128 rows, if absolute values up to this count as zero. `null`:
    do not."""
    plots: bool = True
    """Draw plots/*.png at validations and at the end."""


OPTIMIZERS: dict[str, type[Settings]] = {"adamw": AdamW, "muon": Muon}


class Config(Settings):
    """A whole run. Build it with `load_config`."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelSection
    router: RouterConfig = Field(default_factory=RouterConfig)
    experts: ExpertsConfig | None = None
    data: DataConfig
    optim: one_of(OPTIMIZERS, default="adamw") = Field(default_factory=AdamW)
    train: TrainConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    log: LogConfig = Field(default_factory=LogConfig)

    @property
    def expert_changes(self) -> ExpertsConfig:
        """The section `experts`; where there is none, no expert comes or goes."""
        return self.experts or ExpertsConfig()

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `load_config` reads back to an equal config."""
        values = self.model_dump(mode="json")
        model = values["model"]
        model["hf_config"] = None  # all that it gave is spelled out
        values["model"] = {**model.pop("config"), **model}
        return values
