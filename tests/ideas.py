"""The ideas of docs/extending.md, as files of one's own: the page is the only place where they are
written."""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from models.config import FAMILIES, ModelConfig
from moe.config import BALANCES, BIASES, NOISES, SELECTIONS
from moe.kernels.common.activations import ACTIVATIONS
from training.config.sections import OPTIMIZERS

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
TABLES: tuple[dict[str, Any], ...] = (
    BALANCES, BIASES, SELECTIONS, NOISES, ACTIVATIONS, ModelConfig.activations, FAMILIES,
    OPTIMIZERS,
)  # fmt: skip


def blocks() -> dict[str, str]:
    """Heading of the page → the Python below it."""
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    found = {}
    for section in sections:
        (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
        found[section.partition("\n")[0]] = code
    return found


@contextmanager
def tables_restored() -> Iterator[None]:
    """Outside of it no table knows what was entered inside."""
    before = [dict(table) for table in TABLES]
    try:
        yield
    finally:
        for table, entries in zip(TABLES, before):
            table.clear()
            table.update(entries)


def load(heading: str, folder: Path) -> ModuleType:
    """The block below a heading, written to a file in `folder` and imported from there."""
    path = folder / "my_idea.py"
    path.write_text(blocks()[heading], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("my_idea", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def own(heading: str, name: str) -> Any:
    """A class of a block, which no table knows."""
    with tables_restored(), tempfile.TemporaryDirectory() as folder:
        return getattr(load(heading, Path(folder)), name)
