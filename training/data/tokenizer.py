"""The tokenizer of a run: loaded, or trained as a byte-level BPE, and kept in HF's format.

Token ids come from the `tokenizers` library alone, without special tokens: begin- and end-of-
document ids are added where rows are cut, so that there is exactly one of each whatever the
tokenizer's own post-processor would add (google/tunix#822, jingyaogong/minimind#185).

The folder that `TextTokenizer.save` writes is the only place that says how a run reads text:
export, import, generation and validation take it from there. Its post-processor is the training
convention, and its tokenizer_config.json is written from known facts: transformers rebuilds a
tokenizer from other keys, by class and model type, and then gives other ids (transformers#45920).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from models.errors import brief
from training.data.config import BUNDLED, DataConfig, DataError
from training.data.encode import encode_texts
from training.data.hub import download, quiet_hub
from training.data.lock import disk_errors, run_once, temporary_name

logger = logging.getLogger(__name__)

BUNDLED_FOLDER = Path(__file__).resolve().parent / "bundled"
EOS, BOS, PAD = "<|endoftext|>", "<|startoftext|>", "<|pad|>"
DEFAULT_VOCAB_SIZE = 4096
TRAIN_BYTES = 100_000_000
"""Text that a tokenizer is trained on at most; more changes the merges of rare words alone."""

_CHAT_TEMPLATE = "chat_template.jinja"
_SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json", _CHAT_TEMPLATE)
_KNOWN_EOS = (EOS, "</s>", "<eos>", "<|end_of_text|>", "[EOS]")
_KNOWN_BOS = (BOS, "<s>", "<bos>", "<|begin_of_text|>", "[BOS]")
_KNOWN_PAD = (PAD, "<pad>", "[PAD]")


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

    def begun(self, text: str) -> list[int]:
        """Ids of a text that begins as documents do in training."""
        return [self.bos_id] * self.add_bos + self.encode(text).tolist()

    def prompt(self, text: str) -> list[int]:
        """Ids that a model continues; where a text has none, those of a new document."""
        return self.begun(text) or [self.eos_id]

    def special_id(self, token: str) -> int | None:
        """Id of a token by its name."""
        return self.backend.token_to_id(token)

    def begin_with(self, bos: bool) -> TextTokenizer:
        """The same tokenizer for documents that begin with the begin token, or without."""
        if bos and self.bos_id is None:
            raise DataError(
                "data.add_bos=true, but the tokenizer names no begin-of-document token; give it "
                "as data.bos_token"
            )
        return replace(self, add_bos=bos)

    def describe(self) -> str:
        """How texts begin and end, for the console."""
        bos, eos = self.edges
        begin = f"begin with {bos!r} (id {self.bos_id})" if self.add_bos else "have no begin token"
        return f"texts {begin}, documents end with {eos!r} (id {self.eos_id})"

    def save(self, folder: str | Path) -> None:
        """Write a folder from which transformers' AutoTokenizer gives the same ids."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        bos, eos = self.edges
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
            (folder / _CHAT_TEMPLATE).write_bytes(self.chat_template_file)


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
    return _make(backend, side_files, name, eos_token, bos_token)


def _is_json_object(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), dict)
    except ValueError:
        return False


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
    config = json.loads(side_files.get("tokenizer_config.json", b"{}"))
    named = _named_tokens(side_files)
    eos_id = _token_id(backend, name, "eos_token", eos_token, named, _KNOWN_EOS)
    if eos_id is None:
        raise DataError(
            f"data.tokenizer={name!r} names no end-of-document token; give it as data.eos_token"
        )
    eos = backend.id_to_token(eos_id)
    if eos not in (eos_token, named.get("eos_token")):
        logger.warning(
            f"the tokenizer {name} names no end-of-document token: documents end with {eos!r} "
            f"(id {eos_id}); data.eos_token names another"
        )
    bos_id = _token_id(backend, name, "bos_token", bos_token, named, _KNOWN_BOS)
    pad_id = _token_id(backend, name, "pad_token", None, named, _KNOWN_PAD)
    pad_id = eos_id if pad_id in (None, _unknown_id(backend)) else pad_id
    begun = backend.encode("a", add_special_tokens=True).ids[:1]
    controls = {i: backend.id_to_token(i) for i in (eos_id, bos_id, pad_id) if i is not None}
    backend = _without_control_ids(backend, controls, name)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return TextTokenizer(
        backend=backend,
        eos_id=eos_id,
        bos_id=bos_id,
        pad_id=pad_id,
        vocab_size=max(vocabulary.values()) + 1,
        hash=_hash(backend, eos_id),
        add_bos=bos_id is not None and begun == [bos_id],
        hub_name=config.get("name_or_path"),
        chat_template=config.get("chat_template"),
        chat_template_file=side_files.get(_CHAT_TEMPLATE),
    )


def _unknown_id(backend: Tokenizer) -> int | None:
    """The id that ordinary text gets where the vocabulary has nothing for it."""
    model = json.loads(backend.to_str())["model"]
    if model.get("unk_token") is not None:
        return backend.token_to_id(model["unk_token"])
    return model.get("unk_id")


def _without_control_ids(backend: Tokenizer, controls: dict[int, str], name: str) -> Tokenizer:
    """The same tokenizer, from which ordinary text never gets a control id.

    Control tokens become special, so that text which spells one is text (the web is full of
    "<|endoftext|>"). A model whose own vocabulary holds the token as a word could still give its
    id: a splitting rule cuts the spelling after its first character then.

    Raises:
        DataError: a control token is what ordinary text becomes.
    """
    backend.add_special_tokens(list(controls.values()))
    content = json.loads(backend.to_str())
    # A file saved with truncation would silently cut every document.
    content |= {"truncation": None, "padding": None, "post_processor": None}
    for token in content["added_tokens"]:
        token["special"] = token["special"] or token["id"] in controls
    made = _ordinary(content)
    reached = [token for index, token in controls.items() if _reaches(made, index, token)]
    rules = [
        {
            "type": "Split",
            "pattern": {"Regex": re.escape(token[0]) + f"(?={re.escape(token[1:])})"},
            "behavior": "Isolated",
            "invert": False,
        }
        for token in reached
    ]
    if rules:
        own = content["pre_tokenizer"]
        own = own["pretokenizers"] if own and own["type"] == "Sequence" else [own] if own else []
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*rules, *own]}
        made = _ordinary(content)
    unknown = _unknown_id(made)
    for index, token in controls.items():
        if index == unknown or _reaches(made, index, token):
            raise DataError(
                f"data.tokenizer={name!r}: ordinary text becomes {token!r}, which is to mark the "
                "end or begin of a document; name another token as data.eos_token or "
                "data.bos_token"
            )
    return made


def _ordinary(content: dict[str, Any]) -> Tokenizer:
    backend = Tokenizer.from_str(json.dumps(content))
    backend.encode_special_tokens = True
    return backend


def _reaches(backend: Tokenizer, index: int, token: str) -> bool:
    texts = [token, f" {token}", f"{token} a", f"a{token}a", f"a {token}\n", token + token]
    found = backend.encode_batch(texts, add_special_tokens=False)
    return any(index in encoding.ids for encoding in found)


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


def _hash(backend: Tokenizer, eos_id: int) -> str:
    content = json.loads(backend.to_str())
    del content["version"], content["post_processor"]
    text = json.dumps([_canonical(content), eos_id], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical(value: Any) -> Any:
    """Without settings that are off: one version of the library writes them, another does not."""
    if isinstance(value, dict):
        return {key: _canonical(v) for key, v in value.items() if v is not None and v is not False}
    return [_canonical(item) for item in value] if isinstance(value, list) else value


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
    init_from: Path | None = None,
    init_name: str | None = None,
) -> TextTokenizer:
    """The tokenizer of a run, kept in `folder` (the run's) for resuming, export and generation.

    Any number of processes may call this at once; one of them trains or writes.

    Args:
        config: data section; `tokenizer`, or None to take that of the token stores among the
            sources or else to train one on the sources' text.
        folder: where to keep it; what lies there already is used and must agree with `config`.
        place: the setting that chooses the folder, for the message.
        init_from: folder of the tokenizer that the initial weights were trained with: it is taken,
            and another one refused.
        init_name: what the weights are called in messages.

    Raises:
        DataError: no such tokenizer, or the folder holds another one.
    """
    if folder is None:
        return _configured(config, init_from, init_name)
    folder = Path(folder)

    def write() -> None:
        tokenizer = _configured(config, init_from, init_name)
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
    if given is not None and (given != tokenizer.hub_name or Path(given).exists()):
        wanted = read_tokenizer(given, eos_token=config.eos_token, bos_token=config.bos_token)
        if wanted.hash != tokenizer.hash:
            raise DataError(
                f"data.tokenizer={given!r} is another tokenizer than the one kept in {folder}; "
                f"choose another {place}"
            )
    return tokenizer.begin_with(config.add_bos)


def _configured(config: DataConfig, init_from: Path | None, init_name: str | None) -> TextTokenizer:
    tokens = {"eos_token": config.eos_token, "bos_token": config.bos_token}
    if init_name is None:
        tokenizer, _ = _of_data(config)
        return tokenizer.begin_with(config.add_bos)
    from training.data.sources import store_tokenizers  # imports this module

    given = config.tokenizer is not None or bool(store_tokenizers(config))
    if init_from is None:
        if not given:
            raise DataError(
                f"model.init_from={init_name!r} has no tokenizer; give the one that its weights "
                "were trained with as data.tokenizer"
            )
        return _of_data(config)[0].begin_with(config.add_bos)
    own = read_tokenizer(init_from, **tokens)
    if own.add_bos != config.add_bos:
        logger.warning(
            f"model.init_from={init_name!r} was trained {'with' if own.add_bos else 'without'} "
            f"begin tokens, this run is with data.add_bos={str(config.add_bos).lower()}"
        )
    if given:
        other, name = _of_data(config)
        if other.hash != own.hash:
            raise DataError(
                f"{name} is another tokenizer than that of model.init_from={init_name!r}, whose "
                "weights know other ids; leave data.tokenizer out (null) to take the weights' own"
            )
    elif config.tokenizer_vocab_size is not None:
        raise DataError(
            f"data.tokenizer_vocab_size={config.tokenizer_vocab_size} trains a tokenizer, but "
            f"model.init_from={init_name!r} brings its own; leave it out"
        )
    return own.begin_with(config.add_bos)


def _of_data(config: DataConfig) -> tuple[TextTokenizer, str]:
    """The tokenizer that the data section asks for, and its name in messages."""
    tokens = {"eos_token": config.eos_token, "bos_token": config.bos_token}
    if config.tokenizer is not None:
        other = [s for s in config.sources if not str(s.path).startswith(BUNDLED)]
        if config.tokenizer.startswith(BUNDLED) and other:
            logger.warning(
                f"data.tokenizer={config.tokenizer} was made for the bundled text: other text may "
                "need twice as many tokens; data.tokenizer=null trains one on data.sources"
            )
        return read_tokenizer(config.tokenizer, **tokens), f"data.tokenizer={config.tokenizer!r}"
    from training.data.sources import sample_texts, store_tokenizers  # imports this module

    stores = store_tokenizers(config)
    if stores:
        first, *others = (read_tokenizer(path, **tokens) for path in stores)
        if any(other.hash != first.hash for other in others):
            raise DataError(
                "data.sources: the token stores were made with different tokenizers: "
                + ", ".join(str(path.parent) for path in stores)
            )
        return first, f"the token store {stores[0].parent}"
    size = config.tokenizer_vocab_size or DEFAULT_VOCAB_SIZE
    return train_tokenizer(sample_texts(config), size), "the tokenizer trained here"
