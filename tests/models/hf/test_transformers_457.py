"""transformers 4.57 computes from an exported folder what we compute: it reads other keys of a
config.json than 5.x does. scripts/test.sh installs it beside the environment's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.build import build_model
from models.hf import export_hf
from models.hf.check import round_weights
from tests.models.tiny import randomise_buffers_and_norms, tiny_config, tokens

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("qwen3_moe", {"rope_scaling": YARN}),
    "llama3": ("glm4_moe", {"rope_scaling": LLAMA3, "rope_theta": 1000.0}),
    "dynamic": ("mixtral", {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}),
    "latent": ("deepseek_v3", {"rope_theta": 500.0}),
    "latent_plain": ("deepseek_v3_plain", {}),
}
ASK = """
import json, sys, torch, transformers
from safetensors.torch import load_file, save_file
place = sys.argv[1]
told = {"version": transformers.__version__, "info": {}}
out = {}
tokens = load_file(place + "/tokens.safetensors")
for name, tokens_BL in tokens.items():
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        place + "/" + name, dtype=torch.float32, output_loading_info=True
    )
    told["info"][name] = {key: sorted(map(str, value)) for key, value in info.items() if value}
    with torch.no_grad():
        out[name] = model.eval()(input_ids=tokens_BL).logits.contiguous()
save_file(out, place + "/logits.safetensors")
print(json.dumps(told))
"""


def test_exported_folders_compute_the_same(tmp_path: Path) -> None:
    asked = os.environ.get("TESSERA_TRANSFORMERS_457")
    place = Path(asked or Path(sys.prefix) / "transformers-4.57")
    if asked is None and not place.is_dir():
        pytest.skip(f"{place} is missing: scripts/test.sh installs transformers 4.57 there")
    expected, given = {}, {}
    for name, (case, changes) in MODELS.items():
        model = build_model(tiny_config(case, **changes), seed=3)
        randomise_buffers_and_norms(model)
        export_hf(model, tmp_path / name, dtype="bfloat16")
        round_weights(model, "bfloat16")
        given[name] = tokens(model.config, 1, 80)  # beyond max_position_embeddings
        with torch.no_grad():
            expected[name] = model.eval()(given[name], logits=True).logits
    save_file(given, tmp_path / "tokens.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(tmp_path)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(place)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["version"].startswith("4.57.")
    assert not any(told["info"].values()), told["info"]
    for name, logits in load_file(tmp_path / "logits.safetensors").items():
        torch.testing.assert_close(logits, expected[name], rtol=1e-4, atol=1e-4)
