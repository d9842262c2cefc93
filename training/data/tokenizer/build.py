"""From a backend of the `tokenizers` library to a `TextTokenizer`: its control tokens and its hash.

A control token marks where a document begins or ends, or padding. Ordinary text never becomes one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from typing import Any

from tokenizers import Tokenizer

from training.data.config import DataError
from training.data.tokenizer.text_tokenizer import CHAT_TEMPLATE, TextTokenizer

logger = logging.getLogger(__name__)

EOS, BOS, PAD = "<|endoftext|>", "<|startoftext|>", "<|pad|>"
_KNOWN_EOS = (EOS, "</s>", "<eos>", "<|end_of_text|>", "[EOS]")
_KNOWN_BOS = (BOS, "<s>", "<bos>", "<|begin_of_text|>", "[BOS]")
_KNOWN_PAD = (PAD, "<pad>", "[PAD]")


def build_tokenizer(
    backend: Tokenizer,
    side_files: dict[str, bytes],
    name: str,
    eos_token: str | None,
    bos_token: str | None,
) -> TextTokenizer:
    """A tokenizer whose end, begin and padding tokens are known.

    Args:
        side_files: content of tokenizer_config.json, special_tokens_map.json and the chat template.
        name: of the tokenizer, in messages.
        eos_token, bos_token: win over what the files name.

    Raises:
        DataError: no end token is known, or ordinary text becomes a control token.
    """
    config = json.loads(side_files.get("tokenizer_config.json", b"{}"))
    named = _named_tokens(side_files)
    eos_id = _token_id(backend, name, "eos_token", eos_token, named, _KNOWN_EOS)
    if eos_id is None:
        raise DataError(
            f"data.tokenizer={name!r} names no end-of-document token; name it: "
            f"data.tokenizer={{path: {name}, eos_token: …}}"
        )
    eos = backend.id_to_token(eos_id)
    if eos not in (eos_token, named.get("eos_token")):
        logger.warning(
            f"the tokenizer {name} names no end-of-document token: documents end with {eos!r} "
            f"(id {eos_id}); data.tokenizer={{path: …, eos_token: …}} names another"
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
        chat_template_file=side_files.get(CHAT_TEMPLATE),
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
                "end or begin of a document; name another as eos_token or bos_token of "
                f"data.tokenizer={{path: {name}, …}}"
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
            raise DataError(f"data.tokenizer.{key}={given!r} is no token of {name!r}")
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
