"""Where progress is shown: a bar of rich on a terminal, plain lines on standard error elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any, Union

_REFRESH_SECONDS = 0.1


class PlainDisplay:
    """One line every `interval` steps (none when ``None``) on standard error."""

    def __init__(self, interval: int | None) -> None:
        self._interval = interval
        self._title, self._steps, self._last = "", 0, 0

    def begin_run(self, title: str) -> None:
        """Say that a run begins; its first epoch may begin much later."""
        self.line(f"{title} runs")

    def begin_epoch(self, title: str, steps: int) -> None:
        """Start an epoch of ``steps`` steps, with a title."""
        self._title, self._steps, self._last = title, steps, 0

    def step(self, step: int, text: str) -> None:
        """Show a text, and that ``step`` steps of the epoch are done."""
        # Division instead of remainder: in sink mode the count jumps.
        if self._interval and step // self._interval > self._last // self._interval:
            self.line(f"{self._title}  step {step}/{self._steps}  {text}")
        self._last = step

    def line(self, text: str) -> None:
        """Write a line that stays."""
        try:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        except (AttributeError, OSError, ValueError):
            pass  # standard error is absent, broken or closed: training matters more

    def close(self) -> None:
        """Remove the display."""


class RichDisplay:
    """One progress bar for each epoch; the lines of earlier epochs stay above it."""

    def __init__(self, console: Any) -> None:
        from rich import progress

        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[text]}", markup=False),
            console=console,
            transient=True,
            # No refresh thread: data loaders fork while the bar is shown.
            auto_refresh=False,
            # Else the user's own prints, perhaps sent to a file, would end up on this console.
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
        )
        self._task: Any = None
        self._drawn = 0.0
        self._gone = False  # whether the terminal is gone

    def begin_run(self, title: str) -> None:
        """Say that a run begins; its first epoch may begin much later."""
        self.begin_epoch(title, None)

    def begin_epoch(self, title: str, steps: int | None) -> None:
        """Start an epoch of ``steps`` steps, with a title."""
        self._draw(lambda: self._begin(title, steps))

    def _begin(self, title: str, steps: int | None) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(title, total=steps, text="")
        self._progress.start()

    def step(self, step: int, text: str) -> None:
        """Show a text, and that ``step`` steps of the epoch are done."""
        now = time.perf_counter()
        due = now - self._drawn >= _REFRESH_SECONDS
        self._draw(
            lambda: self._progress.update(self._task, completed=step, text=text, refresh=due)
        )
        self._drawn = now if due else self._drawn

    def line(self, text: str) -> None:
        """Write a line that stays."""
        write = self._progress.console.print
        self._draw(lambda: write(text, markup=False, highlight=False, soft_wrap=True))

    def close(self) -> None:
        """Remove the display."""
        self._draw(self._progress.stop)

    def _draw(self, draw: Callable[[], object]) -> None:
        """Draw; after an error never again: training matters more."""
        if self._gone:
            return
        try:
            draw()
        except (OSError, ValueError, Warning):  # a script may turn warnings into errors
            self._gone = True
            # Releases the user's own prints. A bar that could not start raises an IndexError.
            with contextlib.suppress(OSError, ValueError, IndexError):
                self._progress.stop()


Display = Union[PlainDisplay, RichDisplay]


def make_display(interval: int | None) -> Display:
    """Return a rich bar if rich is installed and standard error can show it, else plain lines.

    A notebook can show it only with ipywidgets.
    """
    with contextlib.suppress(ImportError):
        from rich.console import Console

        console, widgets = Console(stderr=True), importlib.util.find_spec("ipywidgets")
        is_live = console.is_terminal and not console.is_dumb_terminal
        if is_live or (console.is_jupyter and widgets is not None):
            return RichDisplay(console)
    return PlainDisplay(interval)
