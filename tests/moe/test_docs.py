"""The how-to pages of the layer and of the sparse matrices run as they stand."""

import re
from pathlib import Path

import pytest

import moe
import moe.sparse

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "least", "printed"),
    [
        ("moe.md", 8, "makes every gate the constant 1"),
        ("sparse.md", 6, "8 0.3"),
        ("surgery.md", 1, "[0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]"),
    ],
)
def test_blocks_of_the_page_run_in_order(page, least, printed, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    assert len(blocks) >= least
    names: dict = {}
    for number, block in enumerate(blocks):
        try:
            exec(compile(block, f"{page}, block {number}", "exec"), names)
        except Exception as error:
            raise AssertionError(f"block {number} of {page} fails:\n{block}") from error
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pages", "package"), [(("moe.md", "routing.md"), moe), (("sparse.md",), moe.sparse)]
)
def test_every_public_name_is_explained(pages, package):
    text = "".join((DOCS / page).read_text() for page in pages)
    missing = [name for name in package.__all__ if name not in text]
    assert missing == []
