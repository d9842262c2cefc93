"""Families of models, one file each: a subclass of `ModelConfig` with all that is its own, of
`MoEModelConfig` where it has experts.

`FAMILIES` is looked up when a config is made, so a file outside this package adds a family with
`FAMILIES["mine"] = Mine` (docs/huggingface.md, "Adding a family").
"""

from models.config import FAMILIES
from models.families.deepseek_v3 import DeepseekV3
from models.families.flex_olmo import FlexOlmo
from models.families.glm4_moe import Glm4Moe
from models.families.llama import Llama
from models.families.mixtral import Mixtral
from models.families.olmo2 import Olmo2
from models.families.olmoe import Olmoe
from models.families.qwen2 import Qwen2
from models.families.qwen2_moe import Qwen2Moe
from models.families.qwen3 import Qwen3
from models.families.qwen3_moe import Qwen3Moe

__all__ = [
    "FAMILIES",
    "DeepseekV3",
    "FlexOlmo",
    "Glm4Moe",
    "Llama",
    "Mixtral",
    "Olmo2",
    "Olmoe",
    "Qwen2",
    "Qwen2Moe",
    "Qwen3",
    "Qwen3Moe",
]

FAMILIES |= {
    "qwen3_moe": Qwen3Moe,
    "olmoe": Olmoe,
    "mixtral": Mixtral,
    "glm4_moe": Glm4Moe,
    "deepseek_v3": DeepseekV3,
    "qwen2_moe": Qwen2Moe,
    "flex_olmo": FlexOlmo,
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "olmo2": Olmo2,
}
