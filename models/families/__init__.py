"""Families of models, one file each: a subclass of `ModelConfig` with all that is its own.

`FAMILIES` is looked up when a config is made, so a file outside this package adds a family with
`FAMILIES["mine"] = Mine` (docs/huggingface.md, "Adding a family").
"""

from models.config import FAMILIES
from models.families.deepseek_v3 import DeepseekV3
from models.families.glm4_moe import Glm4Moe
from models.families.mixtral import Mixtral
from models.families.olmoe import Olmoe
from models.families.qwen3_moe import Qwen3Moe

__all__ = ["FAMILIES", "DeepseekV3", "Glm4Moe", "Mixtral", "Olmoe", "Qwen3Moe"]

FAMILIES |= {
    "qwen3_moe": Qwen3Moe,
    "olmoe": Olmoe,
    "mixtral": Mixtral,
    "glm4_moe": Glm4Moe,
    "deepseek_v3": DeepseekV3,
}
