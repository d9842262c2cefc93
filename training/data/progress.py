"""A progress bar of one line on a terminal; a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time


class Progress:
    """Shows text read, tokens made, speed and time left. Without a label it shows nothing."""

    def __init__(self, label: str):
        self.label = label
        self._start: tuple[float, int, float | None] | None = None
        self._terminal = sys.stderr.isatty()
        # Short work ends before the first line is due.
        self._due = time.monotonic() + (0.5 if self._terminal else 10.0)
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def show(self, text_bytes: int, tokens: int, fraction: float | None) -> None:
        """Tell where the work stands; called as often as the caller likes."""
        now = time.monotonic()
        if self._start is None:
            # What was done before this process counts for the share, not for the speed.
            self._start = (now, text_bytes, fraction)
        if not self.label or now < self._due:
            return
        self._due = now + (0.2 if self._terminal else 10.0)
        began, first_bytes, first_fraction = self._start
        seconds = max(now - began, 1e-9)
        line = f"{self.label}: {text_bytes / 1e6:.0f} MB of text, {tokens / 1e6:.1f} M tokens"
        line += f", {(text_bytes - first_bytes) / 1e6 / seconds:.1f} MB/s"
        if fraction is not None and fraction > first_fraction:
            left = seconds * (1 - fraction) / (fraction - first_fraction)
            line += f", {fraction:.0%}, {left:.0f} s left"
        self._shown = True
        print("\r" + line.ljust(90) if self._terminal else line, end="", file=sys.stderr)
        print(end="" if self._terminal else "\n", file=sys.stderr, flush=True)

    def __exit__(self, *exc_info: object) -> None:
        if self._shown and self._terminal:
            print(file=sys.stderr)
