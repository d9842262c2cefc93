"""Text to ids and back, and the folder in which a run keeps its tokenizer.

The folder that `TextTokenizer.save` writes is the only place that says how a run reads text:
export, import, generation and validation take it from there. Its post-processor is the training
convention, and its tokenizer_config.json is written from known facts: transformers rebuilds a
tokenizer from other keys, by class and model type, and then gives other ids (transformers#45920).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from training.data.config import DataError
from training.data.encode import encode_texts

CHAT_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class TextTokenizer:
    """Text to ids and back, with the ids that mark documents.

    `vocab_size` counts ids up to the largest: a model needs at least as many embeddings. `hash` is
    of all that decides which ids a document gets, begin token aside; the version of the library
    that wrote the file does not change it.
    """

    backend: Tokenizer
    eos_id: int
    bos_id: int | None
    pad_id: int
    vocab_size: int
    hash: str
    add_bos: bool = False
    """Whether documents, and so prompts, begin with `bos_id`."""
    hub_name: str | None = None
    chat_template: Any = field(repr=False, default=None)
    """As in tokenizer_config.json."""
    chat_template_file: bytes | None = field(repr=False, default=None)

    def encode(self, text: str) -> np.ndarray:
        """int64 ids of a text, without begin or end token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """int64 ids of each text. Special tokens written out in a text stay text."""
        ids, ends = encode_texts(self.backend, texts, self.bos_eos)
        return [part.astype(np.int64) for part in np.split(ids, ends[:-1])]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special tokens are left out."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    @property
    def bos_eos(self) -> tuple[str | None, str]:
        """Begin and end token as text: a document that was written with them loses them."""
        bos = None if self.bos_id is None else self.backend.id_to_token(self.bos_id)
        return bos, self.backend.id_to_token(self.eos_id)

    def encode_with_bos(self, text: str) -> list[int]:
        """Ids of a text, after the begin token if documents begin with it."""
        return [self.bos_id] * self.add_bos + self.encode(text).tolist()

    def prompt(self, text: str) -> list[int]:
        """Ids that a model continues; where a text has none, those of a new document."""
        return self.encode_with_bos(text) or [self.eos_id]

    def token_to_id(self, token: str) -> int | None:
        """Id of a token by its name."""
        return self.backend.token_to_id(token)

    def with_bos(self, bos: bool) -> TextTokenizer:
        """The same tokenizer for documents that begin with the begin token, or without."""
        if bos and self.bos_id is None:
            raise DataError(
                "data.add_bos=true, but the tokenizer names no begin-of-document token; name it: "
                "data.tokenizer={path: …, bos_token: …}"
            )
        return replace(self, add_bos=bos)

    def describe(self) -> str:
        """How texts begin and end, for the console."""
        bos, eos = self.bos_eos
        begin = f"begin with {bos!r} (id {self.bos_id})" if self.add_bos else "have no begin token"
        return f"texts {begin}, documents end with {eos!r} (id {self.eos_id})"

    def save(self, folder: str | Path) -> None:
        """Write a folder from which transformers' AutoTokenizer gives the same ids."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        bos, eos = self.bos_eos
        content = json.loads(self.backend.to_str())
        content["post_processor"] = _begin(bos, self.bos_id) if self.add_bos else None
        _write_json(folder / "tokenizer.json", content)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self.add_bos,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            # Without it transformers 4.57 adds token_type_ids, which no decoder takes.
            "model_input_names": ["input_ids", "attention_mask"],
            "eos_token": eos,
            "pad_token": self.backend.id_to_token(self.pad_id),
        }
        if bos is not None:
            config["bos_token"] = bos
        if self.hub_name is not None:
            config["name_or_path"] = self.hub_name
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        _write_json(folder / "tokenizer_config.json", config)
        if self.chat_template_file is not None:
            (folder / CHAT_TEMPLATE).write_bytes(self.chat_template_file)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _begin(token: str, index: int) -> dict[str, Any]:
    """The post-processor that puts one begin token before a text and nothing else."""
    begin = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, begin, second],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }
