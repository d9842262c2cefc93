"""Building a model with initial weights that depend on seed and name only.

Every parameter draws from a random stream of its own, experts one by one, always on the CPU in
fp32. So any process can draw just the part it holds, and weights are the same for any device,
number of processes or layout.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from models.attention.sdpa import Choice
from models.config import ModelConfig
from models.first_weights import DEFAULT, FirstWeights
from models.transformer import Decoder
from moe import Router
from moe.kernels.grouped.ragged import Widths
from moe.rules.base import Rule

Kind = Literal["embedding", "norm", "bias", "router", "expert", "attention", "mlp", "head"]


def build_model(
    config: ModelConfig,
    *,
    kernels: str = "auto",
    attention: Choice = "pytorch",
    save: str = "h",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int | None = 0,
    first: FirstWeights = DEFAULT,
    **moe_options: Any,
) -> Decoder:
    """A `Decoder` with initial weights.

    Args:
        config: the architecture.
        kernels: implementation of the expert layers: auto, hopper, triton or reference.
        attention: who computes attention, see `models.attention.packed_backend`.
        save: what expert layers keep for backward: "h" pre-activations, "fp8_h" the same in
            float8, "x" only their input.
        dtype: of the weights. Routers stay fp32 whatever it is (fp64 in an fp64 model).
        device: "meta" gives a model without memory, e.g. to count parameters.
        seed: of the initial weights; None leaves memory as it comes, for weights loaded next.
        first: how they are drawn.
        moe_options: further run-time fields of `moe.MoEConfig` (rounding, sequence_stats ...).
    """
    moe_configs = [
        config.moe_config(layer, kernels=kernels, save=save, **moe_options)
        for layer in range(config.num_hidden_layers)
    ]
    # First without memory: otherwise each layer would fill its weights once just to be overwritten.
    with torch.device("meta"):
        model = Decoder(config, moe_configs).to(dtype)
    for block in model.layers:
        if hasattr(block.attn, "choice"):
            block.attn.choice = attention
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    if config.tie_word_embeddings:
        model.head.weight = model.embed.weight
    reset_buffers(model)
    if seed is not None:
        init_weights(model, seed, first)
        start_routers(model)
    return model


def meta_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Parameters and buffers of a model by name, without memory."""
    model = build_model(config, device="meta")
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def reset_buffers(model: Decoder) -> None:
    """Put the state of the routers to its start values; nothing else may have buffers."""
    for name, module in model.named_modules():
        if isinstance(module, Router):
            module.reset_state()  # and that of its rules
        elif not isinstance(module, Rule) and any(True for _ in module.buffers(recurse=False)):
            raise AssertionError(f"{name} has buffers: say here how they start")


def start_routers(model: Decoder, loaded: Collection[str] = ()) -> None:
    """What the routers derive from their weights; after these were drawn or loaded.

    Args:
        loaded: names of tensors that stay as they are.
    """
    for name, module in model.named_modules():
        if isinstance(module, Router):
            rules = f"{name}.rules."
            keys = {key for key in module.rules if any(n.startswith(rules + key) for n in loaded)}
            module.start_state(loaded=keys)


@torch.no_grad()
def init_weights(model: Decoder, seed: int, first: FirstWeights = DEFAULT) -> None:
    """Fill all parameters: matrices from N(0, std²) by `FirstWeights.std`, norms 1, biases 0."""
    for name, kind in parameter_kinds(model).items():
        parameter = model.get_parameter(name)
        values = partial(initial_values, model.config, name, kind, parameter.shape, seed)
        if kind != "expert" or _widths(model.config, name) is not None:
            parameter.copy_(values(first=first))
            continue
        for start in range(0, len(parameter), _threads()):  # not all: they are large together
            some = range(start, min(start + _threads(), len(parameter)))
            parameter[start : some.stop].copy_(values(some, first))


def _widths(config: ModelConfig, name: str) -> Widths | None:
    """Of the experts that a parameter of this name holds, where they differ."""
    sizes = config.expert_widths(int(name.split(".")[1]))
    return None if sizes is None else Widths(sizes)


def _mixed_values(std: float, name: str, shape: Sequence[int], widths: Widths, seed: int) -> Tensor:
    """Experts of different widths, which lie behind one another in the parameter. Where all are
    equal the values are those of experts of one width."""
    found = torch.empty(torch.Size(shape))
    rows = shape[0] // widths.total
    for expert, size in enumerate(widths.sizes):
        one = torch.Size((size * rows, shape[1]))
        if name.endswith("w2"):
            values = draw(std, name, torch.Size(one[::-1]), seed, expert).T
        else:
            values = draw(std, name, one, seed, expert)
        found[widths.of(expert, rows)] = values
    return found


def initial_values(
    config: ModelConfig,
    name: str,
    kind: Kind,
    shape: Sequence[int],
    seed: int,
    experts: range | None = None,
    first: FirstWeights = DEFAULT,
) -> Tensor:
    """Initial fp32 values of the parameter `name` of that kind and shape on the CPU, or of some of
    its experts, stacked."""
    if kind == "norm":
        return torch.ones(shape)
    if kind == "bias":
        return torch.zeros(shape)
    std = first.std(config, name, kind)
    if kind != "expert":
        return draw(std, name, torch.Size(shape), seed)
    widths = _widths(config, name)
    if widths is not None:
        return _mixed_values(std, name, shape, widths, seed)
    experts = range(shape[0]) if experts is None else experts
    one = partial(draw, std, name, torch.Size(shape[1:]), seed)
    with ThreadPoolExecutor(_threads()) as pool:  # a stream is drawn by one core
        return torch.stack(list(pool.map(one, experts)))


def _threads() -> int:
    """Cores for each process of this host, within reason."""
    return max(1, min(16, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def draw(std: float, name: str, shape: torch.Size, seed: int, expert: int | None = None) -> Tensor:
    """fp32 draws from N(0, std²) for the parameter `name`, or one expert's slice of it, on the CPU.

    The stream depends on seed, name and expert alone.
    """
    digest = hashlib.sha256(f"{seed}/{name}/{expert}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.empty(shape, dtype=torch.float32)
    return values.normal_(0.0, std, generator=generator)


def parameter_kinds(model: nn.Module) -> dict[str, Kind]:
    """What each parameter is: for optimizer groups, initial values and reports.

    A module says it of its parameters and of those inside it (`parameter_kind`), unless these say
    something else themselves; a `bias` is a bias. A tied output matrix appears once, as the
    embedding. ValueError for a parameter of no known kind, so that a new one cannot end up in a
    group by accident.
    """
    of_module: dict[str, Kind | None] = {}
    for path, module in model.named_modules():
        inherited = of_module[path.rpartition(".")[0]] if path else None
        of_module[path] = getattr(module, "parameter_kind", inherited)
    kinds: dict[str, Kind] = {}
    for name, _ in model.named_parameters():
        path, _, last = name.rpartition(".")
        kind = "bias" if last == "bias" else of_module[path]
        if kind not in get_args(Kind):
            raise ValueError(f"parameter {name} is of no known kind")
        kinds[name] = kind
    return kinds
