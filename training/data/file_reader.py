"""Documents of files, one after the other, each with the position where reading resumes.

A reader yields `Item`s in a fixed order; started at an item's `next`, it yields exactly those that
follow.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from training.data.config import DataError, SourceConfig
from training.data.files import format_of
from training.data.items import (
    Item,
    Position,
    bad_item,
    item_from_bytes,
    item_from_json,
    item_from_row,
)

_PARQUET_ROWS = 1024


class FileReader:
    """Documents of files, in order.

    Args:
        notes: lines about which files these are.
    """

    def __init__(self, files: list[Path], source: SourceConfig, notes: Sequence[str] = ()):
        self.files, self.notes = files, list(notes)
        self.text_field = source.text_field or "text"
        self.formats = [format_of(path, source.format) for path in files]

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

    def items(self, start: Position | None = None) -> Iterator[Item]:
        """Items from `start` on, an item's `next`; None: from the beginning."""
        read = {
            "jsonl": self._jsonl,
            "json": self._json,
            "lines": self._lines,
            "text": self._text,
            "parquet": self._parquet,
            "arrow": self._arrow,
        }
        first = start["file"] if start else 0
        for index in range(first, len(self.files)):
            inside = start if start and index == first else None
            yield from read[self.formats[index]](index, inside)

    def snapshot(self, position: Position) -> Position:
        """`next` as it is to be kept: already all that is needed."""
        return position

    def fraction(self, position: Position) -> float:
        """Rough share of the bytes before `position`, for a progress bar."""
        sizes = [path.stat().st_size for path in self.files]
        index = position["file"]
        inside = min(position.get("offset", 0), sizes[index]) if index < len(sizes) else 0
        return (sum(sizes[:index]) + inside) / max(sum(sizes), 1)

    # Each of the following yields the items of one file.

    def _raw_lines(
        self, index: int, start: Position | None
    ) -> Iterator[tuple[bytes | Item, int, Position]]:
        """(line, its number, where the next one starts) of a plain or compressed file."""
        path = self.files[index]
        number = start["line"] if start else 0
        offset = start["offset"] if start else 0
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
            after, place = _start_of(index + 1), f"{path}:{number + 1}"
            item = bad_item(f"truncated or damaged {kind}", place, str(error), after)
            yield item, number, after

    def _jsonl(self, index: int, start: Position | None) -> Iterator[Item]:
        path = self.files[index]
        for line, number, position in self._raw_lines(index, start):
            if isinstance(line, Item):
                yield line
            elif line.strip():
                yield item_from_json(line, self.text_field, f"{path}:{number}", position)

    def _json(self, index: int, start: Position | None) -> Iterator[Item]:
        """An array of objects; or an object a line, which is often named so too."""
        path = self.files[index]
        if start is None or "element" not in start:
            first = next((line for line, _, _ in self._raw_lines(index, None)), b"")
            if isinstance(first, Item) or not first.lstrip().startswith(b"["):
                yield from self._jsonl(index, start)
                return
        content = self._whole(index)
        if isinstance(content, Item):
            yield content
            return
        try:
            rows = json.loads(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            yield bad_item("invalid UTF-8", str(path), error, _start_of(index + 1))
            return
        except (ValueError, RecursionError) as error:
            yield bad_item("malformed JSON", str(path), error, _start_of(index + 1))
            return
        for number in range((start or {}).get("element", 0), len(rows)):
            position = {"file": index, "element": number + 1}
            place = f"{path}, element {number + 1}"
            yield item_from_row(rows[number], self.text_field, place, position)

    def _lines(self, index: int, start: Position | None) -> Iterator[Item]:
        path = self.files[index]
        for line, number, position in self._raw_lines(index, start):
            if isinstance(line, Item):
                yield line
            elif line.strip():
                yield item_from_bytes(line.rstrip(b"\r\n"), f"{path}:{number}", position)

    def _text(self, index: int, start: Position | None) -> Iterator[Item]:
        content = self._whole(index)
        if isinstance(content, Item):
            yield content
            return
        place = str(self.files[index])
        item = item_from_bytes(content, place, _start_of(index + 1))
        # a whole file that holds nothing is told by its name
        yield item if item.text is None or item.text.strip() else item._replace(place=place)

    def _whole(self, index: int) -> bytes | Item:
        """All of a file, or what is wrong with it."""
        lines = [line for line, _, _ in self._raw_lines(index, None)]
        if lines and isinstance(lines[-1], Item):
            return lines[-1]
        return b"".join(lines)

    def _parquet(self, index: int, start: Position | None) -> Iterator[Item]:
        path, name = self.files[index], self.text_field
        first, skip = (start["group"], start["row"]) if start and "group" in start else (0, 0)
        try:
            file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            yield bad_item("unreadable parquet", str(path), error, _start_of(index + 1))
            return
        with file:
            _check_column(path, file.schema_arrow, name)
            for group in range(first, file.num_row_groups):
                row = 0
                for batch in file.iter_batches(_PARQUET_ROWS, row_groups=[group], columns=[name]):
                    for cell in batch.column(0):
                        row += 1
                        if group == first and row <= skip:
                            continue
                        place = f"{path}, row group {group}, row {row}"
                        yield _from_cell(cell, place, {"file": index, "group": group, "row": row})

    def _arrow(self, index: int, start: Position | None) -> Iterator[Item]:
        """Arrow's file or stream format, as `datasets` writes it; a batch of records at a time."""
        path, name = self.files[index], self.text_field
        first, skip = (start["group"], start["row"]) if start and "group" in start else (0, 0)
        group = 0
        try:
            with pyarrow.memory_map(str(path)) as mapped:
                reader = _arrow_reader(mapped)
                _check_column(path, reader.schema, name)
                for group, batch in enumerate(_record_batches(reader, first), first):
                    for row, cell in enumerate(batch.column(name), 1):
                        if group > first or row > skip:
                            place = f"{path}, batch {group}, row {row}"
                            yield _from_cell(
                                cell, place, {"file": index, "group": group, "row": row}
                            )
        except (pyarrow.ArrowException, OSError) as error:
            place = f"{path}, after batch {group}"
            yield bad_item("unreadable arrow", place, error, _start_of(index + 1))


def _check_column(path: Path, schema: pyarrow.Schema, name: str) -> None:
    """DataError where there is no such column, or one that holds no text."""
    if name not in schema.names:
        raise DataError(
            f"{path} has no column {name!r} (text_field); it has {', '.join(schema.names)}"
        )
    kind = schema.field(name).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise DataError(f"{path}: column {name!r} (text_field) is {kind}, not string")


def _arrow_reader(mapped: pyarrow.MemoryMappedFile) -> Any:
    """A reader of the file format, which begins with ARROW1, or of the stream format."""
    is_file = mapped.read(6) == b"ARROW1"
    mapped.seek(0)
    return pyarrow.ipc.open_file(mapped) if is_file else pyarrow.ipc.open_stream(mapped)


def _record_batches(reader: Any, first: int) -> Iterator[pyarrow.RecordBatch]:
    """Batches from number `first` on."""
    if isinstance(reader, pyarrow.ipc.RecordBatchFileReader):
        yield from map(reader.get_batch, range(first, reader.num_record_batches))
    else:
        yield from itertools.islice(reader, first, None)


def _start_of(index: int) -> Position:
    """The beginning of a file."""
    return {"file": index, "line": 0, "offset": 0}


@contextlib.contextmanager
def _open(path: Path, offset: int) -> Iterator[BinaryIO]:
    """What a file holds, unpacked, from byte `offset` on."""
    suffix = path.suffix.lower()
    if suffix == ".zst":
        with pyarrow.input_stream(str(path), compression="zstd") as packed:
            file = io.BufferedReader(packed)
            while offset > 0 and (passed := file.read(min(offset, 1 << 20))):
                offset -= len(passed)
            yield file
    else:
        with gzip.open(path, "rb") if suffix == ".gz" else open(path, "rb") as file:
            file.seek(offset)  # a gzip file has no shortcut: this decompresses up to there
            yield file


def _from_cell(cell: pyarrow.Scalar, place: str, position: Position) -> Item:
    """The item of a cell of a parquet file."""
    try:
        text = cell.as_py()
    except UnicodeDecodeError as error:
        return bad_item("invalid UTF-8", place, error, position)
    if text is None:
        return bad_item("text is not a string", place, "null", position)
    return Item(text, len(text.encode("utf-8")), position)
