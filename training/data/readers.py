"""Documents out of files and hub data sets, one after the other, each with where to go on from.

A reader is an iterator of `Item`s in a fixed order. `Item.next` is plain JSON: a reader started
there yields exactly the items that follow. What is wrong with a line is an item too; the policy
(stop or skip) belongs to whoever reads.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from training.data.config import DataError, SourceConfig
from training.data.files import format_of
from training.data.hub import quiet_hub

_PARQUET_ROWS = 1024
_NO_FIELD = "no text field"


class Item(NamedTuple):
    """A document, or what was wrong in its place."""

    text: str | None
    size: int
    """bytes of the text in UTF-8"""
    next: dict[str, Any]
    """where reading goes on after this item"""
    problem: str | None = None
    """kind of problem, for counting"""
    place: str = ""
    """file:line (or file, row) and detail, for the message"""

    def check(self, on_bad_line: str) -> None:
        """Raise DataError if something was wrong, unless that shall be skipped."""
        if self.problem is not None and on_bad_line == "stop":
            # A field by another name is missing everywhere: leaving such lines out leaves nothing.
            skip = " (data.on_bad_line=skip leaves such lines out)"
            raise DataError(f"{self.problem} at {self.place}{skip * (self.problem != _NO_FIELD)}")


# --- files --------------------------------------------------------------------------------------


class FileReader:
    """Documents of files, in order. `start`: an `Item.next`, or None for the beginning.

    Args:
        told: lines about which files these are.
    """

    def __init__(self, files: list[Path], source: SourceConfig, told: Sequence[str] = ()):
        self.files, self.told = files, list(told)
        self.text_field = source.text_field or "text"
        self.formats = [format_of(path, source.format) for path in files]
        self.format_given = source.format

    @property
    def total_bytes(self) -> int:
        """Size on disk."""
        return sum(path.stat().st_size for path in self.files)

    def identity(self) -> dict[str, Any]:
        """What the documents depend on: a changed file is another identity."""
        stats = [(str(path), path.stat()) for path in self.files]
        return {
            "files": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats],
            "formats": self.formats,
            "text_field": self.text_field,
        }

    def items(self, start: dict[str, Any] | None = None) -> Iterator[Item]:
        """Items from `start` on."""
        first = start["file"] if start else 0
        for index in range(first, len(self.files)):
            inside = start if start and index == first else None
            read = {
                "jsonl": self._jsonl,
                "json": self._json,
                "lines": self._lines,
                "text": self._text,
                "parquet": self._parquet,
            }[self.formats[index]]
            yield from read(index, inside)

    def snapshot(self, position: dict[str, Any]) -> dict[str, Any]:
        """`next` as it is to be kept: already all that is needed."""
        return position

    def fraction(self, position: dict[str, Any]) -> float:
        """Rough share of the bytes before `position`, for a progress bar."""
        sizes = [path.stat().st_size for path in self.files]
        index = position["file"]
        inside = min(position.get("offset", 0), sizes[index]) if index < len(sizes) else 0
        return (sum(sizes[:index]) + inside) / max(sum(sizes), 1)

    # Each of the following yields the items of one file.

    def _raw_lines(
        self, index: int, start: dict | None
    ) -> Iterator[tuple[bytes | Item, int, dict]]:
        """(line, its number, where the next one starts) of a plain or compressed file."""
        path = self.files[index]
        number = start["line"] if start else 0
        offset = start["offset"] if start else 0
        after = {"file": index + 1, "line": 0, "offset": 0}
        try:
            with _open(path, offset) as file:
                for line in file:
                    number += 1
                    offset += len(line)
                    if number == 1:
                        line = line.removeprefix(b"\xef\xbb\xbf")
                    yield line, number, {"file": index, "line": number, "offset": offset}
        except (EOFError, zlib.error, OSError) as error:
            if getattr(error, "errno", None) is not None:  # of the disk, not of what is in the file
                raise
            kind = "zstd" if path.suffix.lower() == ".zst" else "gzip"
            detail = f"{path}:{number + 1}: {error}"
            yield Item(None, 0, after, f"truncated or damaged {kind}", detail), number, after

    def _jsonl(self, index: int, start: dict | None) -> Iterator[Item]:
        path = self.files[index]
        for line, number, position in self._raw_lines(index, start):
            if isinstance(line, Item):
                yield line
            elif line.strip():
                yield _parse_object(line, self.text_field, f"{path}:{number}", position)

    def _json(self, index: int, start: dict | None) -> Iterator[Item]:
        """An array of objects; or an object a line, which is often named so too."""
        path = self.files[index]
        if start is None or "element" not in start:
            first = next((line for line, _, _ in self._raw_lines(index, None)), b"")
            if isinstance(first, Item) or not first.lstrip().startswith(b"["):
                yield from self._jsonl(index, start)
                return
        lines = [line for line, _, _ in self._raw_lines(index, None)]
        after = {"file": index + 1, "line": 0, "offset": 0}
        if isinstance(lines[-1], Item):
            yield lines[-1]
            return
        try:
            rows = json.loads(b"".join(lines).decode("utf-8"))
        except UnicodeDecodeError as error:
            yield Item(None, 0, after, "invalid UTF-8", f"{path}: {_line(error)}")
            return
        except (ValueError, RecursionError) as error:
            yield Item(None, 0, after, "malformed JSON", f"{path}: {_line(error)}")
            return
        for number in range((start or {}).get("element", 0), len(rows)):
            position = {"file": index, "element": number + 1}
            place = f"{path}, element {number + 1}"
            yield _check_object(rows[number], self.text_field, place, position)

    def _lines(self, index: int, start: dict | None) -> Iterator[Item]:
        path = self.files[index]
        for line, number, position in self._raw_lines(index, start):
            if isinstance(line, Item):
                yield line
            elif line.strip():
                yield _decode(line.rstrip(b"\r\n"), f"{path}:{number}", position)

    def _text(self, index: int, start: dict | None) -> Iterator[Item]:
        parts, item_file = [], str(self.files[index])
        after = {"file": index + 1, "line": 0, "offset": 0}
        for line, _, _ in self._raw_lines(index, None):
            if isinstance(line, Item):
                yield line
                return
            parts.append(line)
        item = _decode(b"".join(parts), item_file, after)
        # a whole file that holds nothing is told by its name
        yield item if item.text is None or item.text.strip() else item._replace(place=item_file)

    def _parquet(self, index: int, start: dict | None) -> Iterator[Item]:
        import pyarrow
        import pyarrow.parquet

        path, name = self.files[index], self.text_field
        first, skip = (start["group"], start["row"]) if start and "group" in start else (0, 0)
        after = {"file": index + 1, "line": 0, "offset": 0}
        try:
            file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            yield Item(None, 0, after, "unreadable parquet", f"{path}: {_line(error)}")
            return
        with file:
            schema = file.schema_arrow
            if name not in schema.names:
                raise DataError(
                    f"{path} has no column {name!r} (text_field); it has {', '.join(schema.names)}"
                )
            kind = schema.field(name).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise DataError(f"{path}: column {name!r} (text_field) is {kind}, not string")
            for group in range(first, file.num_row_groups):
                row = 0
                for batch in file.iter_batches(_PARQUET_ROWS, row_groups=[group], columns=[name]):
                    for value in batch.column(0):
                        row += 1
                        if group == first and row <= skip:
                            continue
                        place = f"{path}, row group {group}, row {row}"
                        position = {"file": index, "group": group, "row": row}
                        yield _check_cell(value, place, position)


@contextlib.contextmanager
def _open(path: Path, offset: int) -> Iterator[BinaryIO]:
    """What a file holds, unpacked, from byte `offset` on."""
    suffix = path.suffix.lower()
    if suffix == ".zst":
        import pyarrow

        with pyarrow.input_stream(str(path), compression="zstd") as packed:
            file = io.BufferedReader(packed)
            while offset > 0 and (passed := file.read(min(offset, 1 << 20))):
                offset -= len(passed)
            yield file
    else:
        with gzip.open(path, "rb") if suffix == ".gz" else open(path, "rb") as file:
            file.seek(offset)  # a gzip file has no shortcut: this decompresses up to there
            yield file


def _decode(line: bytes, place: str, position: dict) -> Item:
    try:
        return Item(line.decode("utf-8"), len(line), position)
    except UnicodeDecodeError as error:
        return Item(None, 0, position, "invalid UTF-8", f"{place}: {_line(error)}")


def _parse_object(line: bytes, field: str, place: str, position: dict) -> Item:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Item(None, 0, position, "invalid UTF-8", f"{place}: {_line(error)}")
    except (ValueError, RecursionError) as error:  # JSON's own, or a number of 4,300 digits
        return Item(None, 0, position, "malformed JSON", f"{place}: {_line(error)}")
    return _check_object(row, field, place, position)


def _check_object(row: Any, field: str, place: str, position: dict) -> Item:
    if not isinstance(row, dict):
        detail = f"{place}: a {type(row).__name__}, not an object"
        return Item(None, 0, position, "not an object", detail)
    return check_row(row, field, place, position)


def check_row(row: dict, field: str, place: str, position: dict) -> Item:
    """The item of one object: its text, or what is wrong with it."""
    if field not in row:
        names = ", ".join(map(str, list(row)[:10]))
        likely = max(
            (name for name, value in row.items() if isinstance(value, str)),
            key=lambda name: len(row[name]),
            default=None,
        )
        remedy = f"; give the source text_field: {likely}" if likely else ""
        detail = f"{place}: no field {field!r}; it has {names or 'none'}{remedy}"
        return Item(None, 0, position, _NO_FIELD, detail)
    text = row[field]
    if not isinstance(text, str):
        detail = f"{place}: field {field!r} is {type(text).__name__}, not a string"
        return Item(None, 0, position, "text is not a string", detail)
    try:
        return Item(text, len(text.encode("utf-8")), position)
    except UnicodeEncodeError as error:  # "\ud800" in JSON: half a character
        return Item(None, 0, position, "invalid UTF-8", f"{place}: {_line(error)}")


def _check_cell(value: Any, place: str, position: dict) -> Item:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        return Item(None, 0, position, "invalid UTF-8", f"{place}: {_line(error)}")
    if text is None:
        return Item(None, 0, position, "text is not a string", f"{place}: null")
    return Item(text, len(text.encode("utf-8")), position)


def _line(error: BaseException) -> str:
    return str(error).split("\n")[0][:200]


# --- hub ----------------------------------------------------------------------------------------


class HubReader:
    """Documents of a data set read through `datasets` as a stream, never copied to Arrow files.

    `datasets` restores a plain stream exactly from its state_dict. Its shuffle buffer it does not
    (rows in the buffer are lost on resuming), so shuffling is done by index on the tokens instead.
    """

    total_bytes = None
    told: Sequence[str] = ()

    def __init__(self, source: SourceConfig, key: str):
        self.source, self.key = source, key
        self.text_field = source.text_field or "text"
        self.label = source.hub if source.subset is None else f"{source.hub}/{source.subset}"
        self._stream = None

    def identity(self) -> dict[str, Any]:
        """What the documents depend on; local data files count with size and time."""
        files = self.source.files
        stats = []
        for pattern in [files] if isinstance(files, str) else files or ():
            for path in sorted(glob.glob(pattern, recursive=True)):
                stat = Path(path).stat()
                stats.append([str(Path(path).resolve()), stat.st_size, stat.st_mtime_ns])
        return {
            "hub": self.source.hub,
            "subset": self.source.subset,
            "split": self.source.split or "train",
            "files": stats or files,
            "text_field": self.text_field,
        }

    def open(self) -> None:
        """Open the stream.

        Raises:
            DataError: no such data set here or on the hub, no such split, or no such column.
        """
        import datasets

        try:
            with quiet_hub():
                self._stream = datasets.load_dataset(
                    self.source.hub,
                    self.source.subset,
                    split=self.source.split or "train",
                    data_files=self.source.files,
                    streaming=True,
                )
        except Exception as error:  # datasets and its network stack raise many kinds
            raise DataError(
                f"{self.key}={self.source.hub!r} cannot be opened ({type(error).__name__}: "
                f"{_line(error)}); is the name right and the hub reachable? Local files go under "
                "path"
            ) from None
        columns = self._stream.column_names
        if columns is not None and self.text_field not in columns:
            raise DataError(
                f"{self.key}={self.source.hub!r} has no column {self.text_field!r} (text_field); "
                f"it has {', '.join(columns)}"
            )

    def items(self, start: dict[str, Any] | None = None) -> Iterator[Item]:
        """Items from `start` on; their `next` is whole only through `snapshot`."""
        if self._stream is None:
            self.open()
        row = 0
        if start:
            row = start["row"]
            self._stream.load_state_dict(start["state"])
        try:
            for values in self._stream:
                row += 1
                position = {"row": row}
                yield check_row(values, self.text_field, f"{self.label}, row {row}", position)
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"{self.key}={self.source.hub!r} failed after row {row} ({type(error).__name__}: "
                f"{_line(error)}); what is tokenised so far is kept"
            ) from None

    def snapshot(self, position: dict[str, Any]) -> dict[str, Any]:
        """A full `next` for the item just yielded: too dear to make for every row."""
        return {**position, "state": self._stream.state_dict()}

    def fraction(self, position: dict[str, Any]) -> None:
        """Unknown: a stream does not tell its length."""
        return None
