"""The how-to page of the layer runs as it stands."""

import re
from pathlib import Path

import moe

PAGE = Path(__file__).parents[2] / "docs" / "moe.md"


def test_blocks_of_the_page_run_in_order(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 8
    names: dict = {}
    for number, block in enumerate(blocks):
        try:
            exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
        except Exception as error:
            raise AssertionError(f"block {number} of {PAGE.name} fails:\n{block}") from error
    assert "makes every gate the constant 1" in capsys.readouterr().out


def test_every_public_name_is_explained():
    text = PAGE.read_text()
    missing = [name for name in moe.__all__ if name not in text]
    assert missing == []
