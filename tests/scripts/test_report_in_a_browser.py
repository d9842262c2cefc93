"""The report in a real browser, on a screen and on a phone: nothing sticks out of the page.

Screenshots stay in the folder that TESSERA_SCREENSHOTS names, to be looked at.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")

WIDTHS = (1440, 500)  # Chromium has no narrower window

# Every part of the page that is wider than the window, if its own box does not scroll.
PROBE = """<script>addEventListener("load", () => {
  const wide = [...document.querySelectorAll("body *")].filter(part => {
    const box = part.getBoundingClientRect();
    const scrolls = part.closest("figure.wide, pre");
    return !scrolls && box.right > innerWidth + 1;
  });
  document.title = `${innerWidth} ` + (wide.map(part => part.tagName).join() || "fits");
});</script>"""


def browse(page: Path, width: int, *words: str) -> str:
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},3000", *words]
    done = subprocess.run(
        [*command, page.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


@pytest.mark.parametrize("width", WIDTHS)
def test_the_report_fits(script, trained, tmp_path, width):
    page = tmp_path / "report.html"
    assert script("report").main([str(trained), "--out", str(page)]) == 0
    kept = Path(os.environ.get("TESSERA_SCREENSHOTS", tmp_path))
    browse(page, width, f"--screenshot={kept / f'report-{width}.png'}")
    assert (kept / f"report-{width}.png").stat().st_size > 20_000
    page.write_text(page.read_text().replace("</head>", f"{PROBE}</head>"))
    title = re.search("<title>(.*)</title>", browse(page, width, "--dump-dom")).group(1)
    assert title == f"{width} fits"
