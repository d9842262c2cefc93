"""Decoder-only Mixture-of-Experts language models: config, layers, loss, Hugging Face folders,
generation.

Experts and routers are not here (package `moe`), nor data and optimizers (package `training`).
"""

from models.config import ModelConfig
from models.documents import Documents
from models.families import FAMILIES

__all__ = ["FAMILIES", "Documents", "ModelConfig"]
