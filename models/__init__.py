"""Decoder-only Mixture-of-Experts language models: config, layers, loss, Hugging Face folders,
generation.

Experts and routers are not here (package `moe`), nor data and optimizers (package `training`).
"""

from typing import Any

from models.config import ModelConfig

__all__ = ["Documents", "ModelConfig"]


def __getattr__(name: str) -> Any:
    """Import `Documents` on first use: reading a config must not wait for torch."""
    if name != "Documents":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from models.documents import Documents

    return Documents
