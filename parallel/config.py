"""The options of the `parallel` section of a config: where states lie, and how tokens travel."""

from __future__ import annotations

import os.path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from moe.settings import Settings, one_of

# --- what lies outside of the device --------------------------------------------------------------


def _folder(text: str) -> str:
    if not text:
        raise ValueError("parallel.offload.path='' must name a folder on a local disk")
    return os.path.expanduser(text)


class _Offload(Settings):
    states: bool = True
    """Master weights, moments and the update."""
    weights: bool = False
    """A process's part of the weights between their uses."""

    @model_validator(mode="after")
    def _something(self) -> _Offload:
        if not self.states and not self.weights:
            raise ValueError("states=false and weights=false leave nothing to offload")
        return self


class CpuOffload(_Offload):
    """In host memory, gradients too."""

    kind: Literal["cpu"] = "cpu"


class NvmeOffload(_Offload):
    """In files on a local disk; gradients in host memory."""

    kind: Literal["nvme"] = "nvme"
    path: Annotated[str, AfterValidator(_folder)]
    """Folder on a local disk of every host."""


OFFLOADS: dict[str, type[Settings]] = {"cpu": CpuOffload, "nvme": NvmeOffload}
Offloading = one_of(OFFLOADS)

# --- how tokens travel ----------------------------------------------------------------------------


class _Exchange(Settings):
    payload: Literal["model", "float8"] = "model"
    """Form of tokens on their way to experts: the model's dtype, or E4M3 with scales."""


class _Chunked(_Exchange):
    transport: Literal["collective", "pull"] = "collective"
    """collective: NCCL or gloo. pull: copies out of the peers' memory, for GPUs of one host."""


class AllToAll(_Chunked):
    """Tokens go to the ranks of their experts, all at once."""

    kind: Literal["all_to_all"] = "all_to_all"
    chunks: Annotated[int, Field(ge=1)] = 2
    """Parts of a micro-batch that travel while others are computed."""
    sizes: Literal["exact", "bounded"] = "exact"
    """exact: ranks tell each other how many tokens they send, which the host waits for. bounded:
    room for all that can be sent, every token or, with `router.capacity`, those that a rank's
    experts can take; nothing is read back. Ranks must have equally many tokens, as in training."""


class Pairwise(_Exchange):
    """Tokens go to one rank after the other, in ring order."""

    kind: Literal["pairwise"] = "pairwise"


class AllGather(_Chunked):
    """All tokens go to all ranks, whatever their experts, so that no size is read back from the
    device."""

    kind: Literal["all_gather"] = "all_gather"
    chunks: Annotated[int, Field(ge=1)] = 1
    """Parts of a micro-batch that travel while others are computed."""
    equal_tokens: bool = False
    """Take it that every rank has as many tokens as this one, as in training and validation,
    instead of having the hosts tell each other in every layer."""


EXCHANGES: dict[str, type[Settings]] = {
    "all_to_all": AllToAll,
    "pairwise": Pairwise,
    "all_gather": AllGather,
}
Exchange = one_of(EXCHANGES, default="all_to_all")
