"""Hugging Face folders: config.json, names of tensors, strict reading, atomic writing, and a check
of what was written by transformers. What a family has there of its own is in `models.families`.
"""

from models.hf.config import config_from_hf
from models.hf.files import INDEX, tensor_files
from models.hf.reading import HfWeights, load_hf, load_weights, says_tied
from models.hf.writing import DTYPES, Exported, SavedTokenizer, check_vocabulary, export_hf

__all__ = [
    "DTYPES",
    "INDEX",
    "Exported",
    "HfWeights",
    "SavedTokenizer",
    "check_vocabulary",
    "config_from_hf",
    "export_hf",
    "load_hf",
    "load_weights",
    "says_tied",
    "tensor_files",
]
