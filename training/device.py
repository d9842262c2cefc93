"""The device of a run: seeds and random states, determinism, memory, peak speed."""

from __future__ import annotations

import io
import os
import random
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# Dense bfloat16 peak in FLOP/s, by part of torch.cuda.get_device_name; NVIDIA data sheets, without
# sparsity. The first match counts, so longer names stand first.
PEAK_FLOPS = (
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
)


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 peak of a known GPU; None otherwise (then no MFU is shown)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS if part in name), None)


def open_device(kind: str, local_rank: int) -> torch.device:
    """This process's device, "cpu" or "cuda", ready for use and with its memory peak at zero.

    CUDA is initialised here: until then its memory statistics cannot be reset (PyTorch answers
    "Invalid device argument").
    """
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device(kind, local_rank)
    torch.cuda.set_device(device)
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats(device)  # a process may have had other runs
    return device


def setup_determinism() -> None:
    """Ask PyTorch for deterministic algorithms; an operation that has none raises by name."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def seed_all(seed: int, rank: int) -> None:
    """Seed Python, NumPy and PyTorch; every process draws its own numbers."""
    random.seed(seed * 1_000_003 + rank)
    np.random.seed((seed * 1_000_003 + rank) % 2**32)  # noqa: NPY002 - what libraries use
    torch.manual_seed(seed * 1_000_003 + rank)  # all devices


# --- random states ------------------------------------------------------------------------------


def _rng_state() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    state = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    numpy_state = (kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss)
    np.random.set_state(numpy_state)  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def rng_bytes() -> bytes:
    """The random states of this process and its current device."""
    buffer = io.BytesIO()
    torch.save(_rng_state(), buffer)
    return buffer.getvalue()


def restore_rng(content: bytes) -> None:
    """Set the random states that `rng_bytes` returned."""
    _set_rng_state(torch.load(io.BytesIO(content), weights_only=True))


@contextmanager
def untouched_rng() -> Iterator[None]:
    """Random states are afterwards what they were before."""
    state = _rng_state()
    try:
        yield
    finally:
        _set_rng_state(state)


# --- memory -------------------------------------------------------------------------------------


def max_memory_gib(device: torch.device) -> float:
    """Most memory taken so far: by tensors on a GPU, by the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def no_memory(error: RuntimeError) -> bool:
    """Whether memory ran out; for the host's PyTorch has no error of its own."""
    texts = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in texts)
