"""Documents of a data set of the Hugging Face hub, or of files that `datasets` reads."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from training.data.config import DataError, SourceConfig
from training.data.hub import quiet_hub
from training.data.items import Item, Position, first_line, item_from_row


class HubReader:
    """Documents of a data set read through `datasets` as a stream, never copied to Arrow files.

    `datasets` restores a plain stream exactly from its state_dict. Its shuffle buffer it does not
    (rows in the buffer are lost on resuming), so shuffling is done by index on the tokens instead.
    """

    total_bytes = None
    notes: Sequence[str] = ()

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
                f"{first_line(error)}); is the name right and the hub reachable? Local files go "
                "under path"
            ) from None
        columns = self._stream.column_names
        if columns is not None and self.text_field not in columns:
            raise DataError(
                f"{self.key}={self.source.hub!r} has no column {self.text_field!r} (text_field); "
                f"it has {', '.join(columns)}"
            )

    def items(self, start: Position | None = None) -> Iterator[Item]:
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
                yield item_from_row(values, self.text_field, f"{self.label}, row {row}", position)
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"{self.key}={self.source.hub!r} failed after row {row} ({type(error).__name__}: "
                f"{first_line(error)}); what is tokenised so far is kept"
            ) from None

    def snapshot(self, position: Position) -> Position:
        """A full `next` for the item just yielded: too dear to make for every row."""
        return {**position, "state": self._stream.state_dict()}

    def fraction(self, position: Position) -> None:
        """Unknown: a stream does not tell its length."""
        return None
