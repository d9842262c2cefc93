"""The `data` section of a run's config: which text, which tokenizer, how rows are cut."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from models.errors import UserError
from moe.settings import Settings, one_of
from training.config.load import PathText

BUNDLED = "bundled:"
"""Prefix of the texts and tokenizers that ship with the package: `bundled:moby-dick`."""
BUNDLED_FOLDER = Path(__file__).resolve().parent / "bundled"


_BUILDERS = ("json", "csv", "parquet", "arrow", "text", "webdataset")


class DataError(UserError):
    """A mistake in the data or in the `data` section; its message is one line for the user."""


class SourceConfig(Settings):
    """One named body of text."""

    path: PathText | list[PathText] | None = None
    """File, glob, folder or a list of them; a token store made by scripts/prepare_data.py; a folder
    that `datasets` saved (save_to_disk); or `bundled:moby-dick`. Relative to the working
    directory."""
    hub: str | None = None
    """Data set for the `datasets` library, or one of its builders (`json` …) with `files`."""
    name: str | None = None
    """Name in logs and metrics; default: the file, folder or data set's own."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the rows, relative to the other sources; default: in proportion to its size."""
    format: Literal["auto", "jsonl", "json", "parquet", "arrow", "text", "lines", "store"] = "auto"
    """auto goes by the file's ending. json: an array of objects, or an object a line. text: a file
    is one document; lines: a line is one."""
    text_field: str | None = None
    """Field or column with the document's text (all but text and lines); default `text`."""
    subset: str | None = None
    """Configuration name of a hub data set."""
    split: str | None = None
    """Split of a hub data set; default `train`."""
    files: PathText | list[PathText] | None = None
    """`data_files` for the hub data set or builder."""

    @model_validator(mode="after")
    def _consistent(self) -> SourceConfig:
        if (self.path is None) == (self.hub is None):
            raise ValueError("a source needs exactly one of path and hub")
        if self.path is not None:
            if not self.path:
                raise ValueError("path is empty")
            for key in ("subset", "split", "files"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key} is read only with hub, and this source has a path")
        elif self.hub == "pandas":
            raise ValueError("hub=pandas reads pickles, which can run code; save them as parquet")
        elif self.hub in _BUILDERS and self.files is None:
            raise ValueError(f"hub={self.hub} is a file format of `datasets`: name its files")
        elif self.format != "auto":
            raise ValueError(f"format={self.format} is read only with path, not with hub")
        if self.text_field is not None and self.format in ("text", "lines", "store"):
            raise ValueError(f"text_field has no use with format={self.format}")
        return self


def _are_mappings(place: str, given: Any) -> Any:
    """Show how a source is written to who gives its path alone, or no space after `path:`."""
    found = given.get("path") if isinstance(given, dict) else None
    for item in given if isinstance(given, list) else [given]:
        keys = item if isinstance(item, dict) else [f"path:{item}"] * isinstance(item, str)
        glued = [key for key in keys if isinstance(key, str) and key.startswith("path:")]
        found = glued[0].removeprefix("path:") if glued else found
    if found is not None:
        raise ValueError(
            f"{place}={given!r} must be a list of mappings, for example "
            f"[{{path: {found}}}], with a space after path:"
        )
    return given


def _sources(place: str) -> Any:
    """The type of a list of sources at a place in the config."""
    check = BeforeValidator(partial(_are_mappings, place))
    return Annotated[list[SourceConfig], check, Field(min_length=1)]


class TokenizerFile(Settings):
    """A tokenizer that is there; its path alone may stand for it."""

    kind: Literal["file"] = "file"
    path: PathText
    """tokenizer.json, a folder with one, a hub name or `bundled:moby-dick`."""
    eos_token: str | None = None
    """End-of-document token, when the tokenizer's own files do not name one."""
    bos_token: str | None = None
    """Begin-of-document token for `data.add_bos`, when the tokenizer's own files name none."""


class TrainedBpe(Settings):
    """A byte-level BPE that is trained on the sources, once."""

    kind: Literal["bpe"] = "bpe"
    vocab_size: Annotated[int, Field(ge=260)] = 4096
    """Tokens, three of them special; a small text gives fewer."""


TOKENIZERS: dict[str, type[Settings]] = {"file": TokenizerFile, "bpe": TrainedBpe}


class HeldOutFraction(Settings):
    """Documents kept out of training. The choice does not depend on run.seed, so that runs with
    different seeds compare."""

    kind: Literal["fraction"] = "fraction"
    fraction: Annotated[float, Field(gt=0, lt=1)]
    """Share of each source's documents; of a source of one document, the last share of its
    tokens."""


class ValidationSources(Settings):
    """Text for validation alone, each source reported by its name."""

    kind: Literal["sources"] = "sources"
    sources: _sources("data.validation.sources")
    """As `data.sources`, without weights."""

    @field_validator("sources")
    @classmethod
    def _have_no_weight(cls, sources: list[SourceConfig]) -> list[SourceConfig]:
        if any(source.weight is not None for source in sources):
            raise ValueError("data.validation.sources: weight is read only for training sources")
        return sources


VALIDATIONS: dict[str, type[Settings]] = {
    "fraction": HeldOutFraction,
    "sources": ValidationSources,
}


def _path_is_a_file(given: Any) -> Any:
    return {"kind": "file", "path": given} if isinstance(given, str) else given


class DataConfig(Settings):
    """What the model reads. Rows are a pure function of (seed, epoch, index): see docs/data.md."""

    sources: _sources("data.sources") = Field(
        default_factory=lambda: [SourceConfig(path=BUNDLED + "moby-dick")]
    )
    """Training text; several sources are interleaved row by row by weight."""
    validation: one_of(VALIDATIONS, default="fraction") | None = None
    """Text to validate on: a part of the training text, or text of its own. `null`: none."""
    tokenizer: Annotated[
        one_of(TOKENIZERS, default="file") | None, BeforeValidator(_path_is_a_file)
    ] = None
    """The path of a tokenizer, or one to train. `null`: that of the weights with
    `model.init_from`; else that of the token store when the sources are stores; else a BPE trained
    on the sources. With `model.init_from` another one is refused."""
    add_bos: bool = False
    """Put one begin-of-document token before each document (one EOS always ends it)."""
    seq_len: Annotated[int, Field(ge=2)] = 512
    """Tokens a row."""
    packing: bool = True
    """Fill rows with documents one after the other; false: a row holds one document's tokens."""
    shuffle: bool = True
    """Permute the documents anew in every epoch; false: in the order of the files."""
    stream: bool = False
    """Train while the text is still being tokenised in the background. Shuffles inside blocks of
    documents in the first epoch, as the later ones are not there yet."""
    on_bad_line: Literal["stop", "skip"] = "stop"
    """A malformed line, invalid UTF-8, a missing text field or a truncated file: stop with its
    place, or skip it, count it and log it."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Processes that read batches ahead of each rank; 0 reads in the training process."""
    tokenize_workers: Annotated[int, Field(ge=0)] = 0
    """Processes that tokenise; 0: one a core."""
    cache_dir: PathText | None = None
    """Where tokenised sources are kept and found again; default ~/.cache/tessera/data."""

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        weighted = [source.weight is not None for source in self.sources]
        if any(weighted) and not all(weighted):
            raise ValueError("sources: give a weight to every source or to none")
        if len(self.sources) == 1 and weighted[0]:
            raise ValueError("sources: weight has no use with a single source")
        if self.stream and len(self.sources) > 1 and not all(weighted):
            raise ValueError("sources: stream=true needs a weight for each of several sources")
        return self
