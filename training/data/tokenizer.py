"""The tokenizer of a run: loaded, or trained as a byte-level BPE, and kept in HF's format.

Token ids come from the `tokenizers` library alone, without special tokens: begin- and end-of-
document ids are added where rows are cut, so that there is exactly one of each whatever the
tokenizer's own post-processor would add (google/tunix#822, jingyaogong/minimind#185).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.data.config import BUNDLED, DataConfig, DataError
from training.data.encode import encode_texts
from training.data.hub import quiet_hub
from training.data.lock import disk_errors, run_once, temporary_name

logger = logging.getLogger(__name__)

BUNDLED_FOLDER = Path(__file__).resolve().parent / "bundled"
EOS, BOS, PAD = "<|endoftext|>", "<|startoftext|>", "<|pad|>"
DEFAULT_VOCAB_SIZE = 4096
TRAIN_BYTES = 100_000_000
"""Text that a tokenizer is trained on at most; more changes the merges of rare words alone."""

_SIDE_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_KNOWN_EOS = (EOS, "</s>", "<eos>", "<|end_of_text|>", "[EOS]")
_KNOWN_BOS = (BOS, "<s>", "<bos>", "<|begin_of_text|>", "[BOS]")
_KNOWN_PAD = (PAD, "<pad>", "[PAD]")

_PROBE = (
    "Call me Ishmael. Some years ago—never mind how long precisely—having little money, 1851.\n\n"
    "  def f(x):\n\treturn x**2  # 3.14159 != 22/7\r\n"
    "Größe, naïve, Ελλάδα, Москва, 東京, 서울, العربية, हिन्दी, 😀👩‍👩‍👧 … <|endoftext|> <s> </s> "
    "https://example.org/a_b?c=d&e=%20f I'll they've CAN'T 1,234,567.89 internationalisation"
)


@dataclass(frozen=True)
class TextTokenizer:
    """Text to ids and back, with the ids that mark documents.

    `vocab_size` counts ids up to the largest: a model needs at least as many embeddings. `hash` is
    of the vocabulary and of the ids of a probe text, so that it does not change with the version
    of the library that wrote the file.
    """

    backend: Tokenizer
    eos_id: int
    bos_id: int | None
    pad_id: int
    vocab_size: int
    hash: str
    side_files: dict[str, bytes] = field(repr=False, default_factory=dict)

    def encode(self, text: str) -> np.ndarray:
        """int64 ids of a text, without begin or end token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """int64 ids of each text. Special tokens written out in a text stay text."""
        ids, ends = encode_texts(self.backend, texts, self.edges)
        return [part.astype(np.int64) for part in np.split(ids, ends[:-1])]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special tokens are left out."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    @property
    def edges(self) -> tuple[str | None, str]:
        """Begin and end token as text: a document that was written with them loses them."""
        bos = None if self.bos_id is None else self.backend.id_to_token(self.bos_id)
        return bos, self.backend.id_to_token(self.eos_id)

    def save(self, folder: str | Path) -> None:
        """Write a folder that transformers' AutoTokenizer loads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.side_files.items():
            (folder / name).write_bytes(content)
        # The backend's own flag is not written to the file, so the file behaves as it was loaded.
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        config = json.loads(self.side_files.get("tokenizer_config.json", b"{}"))
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        config.setdefault("clean_up_tokenization_spaces", False)
        config["eos_token"] = self.backend.id_to_token(self.eos_id)
        config.setdefault("pad_token", self.backend.id_to_token(self.pad_id))
        if self.bos_id is not None:
            config.setdefault("bos_token", self.backend.id_to_token(self.bos_id))
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


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
    if not file.is_file():
        return _through_transformers(name, eos_token, bos_token)
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise DataError(f"{file} is no tokenizer.json ({first_line(error)})") from None
    side_files = {
        side: (file.parent / side).read_bytes()
        for side in _SIDE_FILES
        if (file.parent / side).is_file()
    }
    return _make(backend, side_files, name, eos_token, bos_token)


def _through_transformers(name: str, eos_token: str | None, bos_token: str | None) -> TextTokenizer:
    """A hub name, or a folder in another format (tokenizer.model), converted by transformers."""
    if name.endswith(".json") or (name.startswith((".", "/", "~")) and not Path(name).is_dir()):
        raise DataError(f"data.tokenizer={name!r}: there is no such file or folder")
    from transformers import AutoTokenizer

    try:
        with quiet_hub():
            loaded = AutoTokenizer.from_pretrained(name, use_fast=True, trust_remote_code=False)
        with tempfile.TemporaryDirectory() as folder:
            loaded.save_pretrained(folder)
            if not (Path(folder) / "tokenizer.json").is_file():
                raise DataError(f"data.tokenizer={name!r} has no fast (tokenizer.json) form")
            return read_tokenizer(folder, eos_token=eos_token, bos_token=bos_token)
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"data.tokenizer={name!r} is no file or folder with a tokenizer here, and the hub did "
            f"not give it ({first_line(error)}); name a folder or tokenizer.json that is here, or "
            "train one on the text with data.tokenizer=null"
        ) from None


def first_line(error: BaseException) -> str:
    """Kind and first line of an error, for a message of one line."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _bundled_names() -> str:
    folders = sorted(path.parent.name for path in BUNDLED_FOLDER.glob("*/tokenizer.json"))
    return ", ".join(BUNDLED + name for name in folders)


def _make(
    backend: Tokenizer,
    side_files: dict[str, bytes],
    name: str,
    eos_token: str | None,
    bos_token: str | None,
) -> TextTokenizer:
    # A file saved with truncation would silently cut every document.
    backend.no_truncation()
    backend.no_padding()
    # Text that spells a special token is text: the web is full of "<|endoftext|>".
    backend.encode_special_tokens = True
    named = _named_tokens(side_files)
    eos_id = _token_id(backend, name, "eos_token", eos_token, named, _KNOWN_EOS)
    if eos_id is None:
        raise DataError(
            f"data.tokenizer={name!r} names no end-of-document token; give it as data.eos_token"
        )
    bos_id = _token_id(backend, name, "bos_token", bos_token, named, _KNOWN_BOS)
    pad_id = _token_id(backend, name, "pad_token", None, named, _KNOWN_PAD)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return TextTokenizer(
        backend=backend,
        eos_id=eos_id,
        bos_id=bos_id,
        pad_id=eos_id if pad_id is None else pad_id,
        vocab_size=max(vocabulary.values()) + 1,
        hash=_hash(backend, vocabulary),
        side_files=side_files,
    )


def _named_tokens(side_files: dict[str, bytes]) -> dict[str, str]:
    """eos_token, bos_token, pad_token as the files beside tokenizer.json name them."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        values = json.loads(side_files.get(file, b"{}"))
        for key in ("eos_token", "bos_token", "pad_token"):
            value = values.get(key)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[key] = value
    return found


def _token_id(
    backend: Tokenizer,
    name: str,
    key: str,
    given: str | None,
    named: dict[str, str],
    known: tuple[str, ...],
) -> int | None:
    if given is not None:
        found = backend.token_to_id(given)
        if found is None:
            raise DataError(f"data.{key}={given!r} is no token of data.tokenizer={name!r}")
        return found
    for token in (named.get(key), *known):
        if token is not None and (found := backend.token_to_id(token)) is not None:
            return found
    return None


def _hash(backend: Tokenizer, vocabulary: dict[str, int]) -> str:
    digest = hashlib.sha256()
    for token, index in sorted(vocabulary.items(), key=lambda item: item[1]):
        digest.update(f"{index}\t{token}\n".encode("utf-8", "surrogatepass"))
    digest.update(str(backend.encode(_PROBE, add_special_tokens=False).ids).encode())
    return digest.hexdigest()


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train a byte-level BPE (GPT-2's splitting) of `vocab_size` tokens, three of them special.

    Raises:
        DataError: the texts are empty.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, BOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    total = 0

    def limited() -> Iterable[str]:
        nonlocal total
        for text in texts:
            total += len(text)
            yield text
            if total >= TRAIN_BYTES:
                return

    backend.train_from_iterator(limited(), trainer)
    if total == 0:
        raise DataError("there is no text to train a tokenizer on (0 characters)")
    if (size := backend.get_vocab_size()) < vocab_size:
        logger.warning(
            f"the tokenizer has {size:,} of {vocab_size:,} tokens: the text has no more merges"
        )
    return _make(backend, {}, "trained here", EOS, BOS)


def load_tokenizer(
    config: DataConfig,
    folder: str | Path | None = None,
    *,
    place: str = "run.name",
    timeout_s: float = 1800.0,
) -> TextTokenizer:
    """The tokenizer of a run, kept in `folder` (the run's) for resuming, export and generation.

    Any number of processes may call this at once; one of them trains or writes.

    Args:
        config: data section; `tokenizer`, or None to take that of the token stores among the
            sources or else to train one on the sources' text.
        folder: where to keep it; what lies there already is used and must agree with `config`.
        place: the setting that chooses the folder, for the message.

    Raises:
        DataError: no such tokenizer, or the folder holds another one.
    """
    if folder is None:
        return _configured(config)
    folder = Path(folder)

    def write() -> None:
        tokenizer = _configured(config)
        temporary = temporary_name(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            with disk_errors(folder, "run.dir" if place == "run.name" else place):
                tokenizer.save(temporary)
                shutil.rmtree(folder, ignore_errors=True)  # without its tokenizer.json
                os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    run_once(
        folder.with_name(f".{folder.name}.lock"),
        (folder / "tokenizer.json").is_file,
        write,
        timeout_s=timeout_s,
        what=f"the tokenizer {folder}",
    )
    try:
        tokenizer = read_tokenizer(folder, eos_token=config.eos_token, bos_token=config.bos_token)
    except DataError as error:
        raise DataError(f"{error}; if it is damaged, remove {folder}: it is made again") from None
    given = config.tokenizer
    if given is not None and (given.startswith(BUNDLED) or Path(given).exists()):
        wanted = read_tokenizer(given, eos_token=config.eos_token, bos_token=config.bos_token)
        if wanted.hash != tokenizer.hash:
            raise DataError(
                f"data.tokenizer={given!r} is another tokenizer than the one kept in {folder}; "
                f"choose another {place}"
            )
    return tokenizer


def _configured(config: DataConfig) -> TextTokenizer:
    if config.tokenizer is not None:
        return read_tokenizer(
            config.tokenizer, eos_token=config.eos_token, bos_token=config.bos_token
        )
    from training.data.sources import sample_texts, store_tokenizers  # imports this module

    stores = store_tokenizers(config)
    if stores:
        first, *others = (
            read_tokenizer(path, eos_token=config.eos_token, bos_token=config.bos_token)
            for path in stores
        )
        if any(other.hash != first.hash for other in others):
            raise DataError(
                "data.sources: the token stores were made with different tokenizers: "
                + ", ".join(str(path.parent) for path in stores)
            )
        return first
    return train_tokenizer(sample_texts(config), config.tokenizer_vocab_size or DEFAULT_VOCAB_SIZE)
