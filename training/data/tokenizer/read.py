"""Tokenizers out of files, folders, the bundled texts and the Hugging Face hub."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from models.errors import brief
from training.data.config import BUNDLED, BUNDLED_FOLDER, DataError
from training.data.hub import download, quiet_hub
from training.data.tokenizer.build import build_tokenizer
from training.data.tokenizer.text_tokenizer import CHAT_TEMPLATE, TextTokenizer

_SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json", CHAT_TEMPLATE)


def read_tokenizer(
    path: str | Path, *, eos_token: str | None = None, bos_token: str | None = None
) -> TextTokenizer:
    """Load a tokenizer.json, a folder that holds one, `bundled:NAME`, or a hub name.

    Raises:
        DataError: nothing usable there, or no end-of-document token is known.
    """
    name = str(path)
    if name.startswith(BUNDLED):
        folder = BUNDLED_FOLDER / name.removeprefix(BUNDLED)
        if not (folder / "tokenizer.json").is_file():
            raise DataError(f"data.tokenizer={name!r}: bundled are {_bundled_names()}")
        return read_tokenizer(folder, eos_token=eos_token, bos_token=bos_token)
    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if file.is_file():
        return _from_file(file, name, eos_token, bos_token)
    if name.endswith(".json") or (name.startswith((".", "/", "~")) and not Path(name).is_dir()):
        raise DataError(f"data.tokenizer={name!r}: there is no such file or folder")
    try:
        with quiet_hub(), tempfile.TemporaryDirectory() as folder:
            on_hub = not Path(path).is_dir()
            # Never through AutoTokenizer, which may rebuild the tokenizer by its class.
            found = download(name, "tokenizer.json", _SIDE_FILES) if on_hub else None
            found = found or _converted(name, Path(folder))
            tokenizer = _from_file(found, name, eos_token, bos_token)
            return replace(tokenizer, hub_name=name) if on_hub else tokenizer
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"data.tokenizer={name!r} is no file or folder with a tokenizer here, and the hub did "
            f"not give it ({brief(error)}); name a folder or tokenizer.json that is here, or "
            "train one on the text with data.tokenizer=null"
        ) from None


def _converted(name: str, folder: Path) -> Path:
    """A tokenizer in another format (tokenizer.model), converted by transformers into `folder`."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(name, use_fast=True, trust_remote_code=False)
    loaded.save_pretrained(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"data.tokenizer={name!r} has no fast (tokenizer.json) form")
    return file


def _from_file(
    file: Path, name: str, eos_token: str | None, bos_token: str | None
) -> TextTokenizer:
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise DataError(f"{file} is no tokenizer.json ({brief(error)})") from None
    side_files = {
        side: (file.parent / side).read_bytes()
        for side in _SIDE_FILES
        if (file.parent / side).is_file()
    }
    for side, content in side_files.items():
        if side.endswith(".json") and not _is_json_object(content):
            raise DataError(f"{file.parent / side} holds no JSON object")
    return build_tokenizer(backend, side_files, name, eos_token, bos_token)


def _is_json_object(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), dict)
    except ValueError:
        return False


def _bundled_names() -> str:
    folders = sorted(path.parent.name for path in BUNDLED_FOLDER.glob("*/tokenizer.json"))
    return ", ".join(BUNDLED + name for name in folders)
