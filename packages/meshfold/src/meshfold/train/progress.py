"""Progress of a training run: a bar on a terminal (if rich is installed), else plain lines."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from typing import Any

# Print at most every 2 seconds, at least every 30 seconds, and about 30 lines per run.
_LEAST_S, _MOST_S, _LINES = 2.0, 30.0, 30


class Progress:
    """Display of a run; this one shows nothing, as on every rank except rank 0."""

    def say(self, text: str) -> None:
        """Show one or more lines."""

    def step(self, step: int, numbers: dict[str, float]) -> None:
        """Show an optimizer step: its number, from 1, and its metrics."""

    def close(self) -> None:
        """End the display."""


class _Pace:
    """Chooses the steps that get a line: the first, the last, and some in between."""

    def __init__(self, steps: int) -> None:
        self._steps, self._step, self._time = steps, -steps, 0.0

    def due(self, step: int) -> bool:
        """Return True if this step should be printed."""
        waited, made = time.monotonic() - self._time, step - self._step
        often = waited >= _LEAST_S and made >= self._steps / _LINES
        if not (often or waited >= _MOST_S or step in (1, self._steps)):
            return False
        self._step, self._time = step, time.monotonic()
        return True


class _Clock:
    """Estimates the remaining time from the pace so far; no estimate for runs under a minute."""

    def __init__(self) -> None:
        self._began: tuple[int, float] | None = None

    def left(self, step: int, steps: int) -> str:
        """``  1:02:03 left``, or nothing."""
        now = time.monotonic()
        if self._began is None:
            self._began = step, now
            return ""
        seconds = (now - self._began[1]) / (step - self._began[0]) * (steps - step)
        if seconds < 60:
            return ""
        minutes, second = divmod(round(seconds), 60)
        return f"  {minutes // 60}:{minutes % 60:02}:{second:02} left"


class Lines(Progress):
    """Display of plain lines."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._pace = _Pace(steps)
        self._clock = _Clock()

    def say(self, text: str) -> None:
        """Show one or more lines."""
        print(text, flush=True)

    def step(self, step: int, numbers: dict[str, float]) -> None:
        """Show a line, if the step gets one."""
        left = self._clock.left(step, self._steps)
        if self._pace.due(step):
            self.say(line(step, self._steps, numbers) + left)


class JsonLines(Progress):
    """Display of a JSON line per step on standard output, for scripts; messages go to standard error."""

    def say(self, text: str) -> None:
        """Show one or more lines."""
        print(text, file=sys.stderr, flush=True)

    def step(self, step: int, numbers: dict[str, float]) -> None:
        """Print a line of JSON."""
        print(json.dumps({"step": step, **numbers}), flush=True)


class Bar(Progress):
    """Display of a bar at the bottom of the terminal, with occasional lines above it."""

    def __init__(self, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._steps = steps
        self._pace = _Pace(steps)
        self._rich: Any = RichProgress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        )
        self._task: Any = None

    def say(self, text: str) -> None:
        """Show one or more lines above the bar."""
        self._rich.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int, numbers: dict[str, float]) -> None:
        """Move the bar."""
        if self._task is None:
            self._task = self._rich.add_task("train", total=self._steps, numbers="")
            self._rich.start()
        self._rich.update(self._task, completed=step, numbers=short(numbers))
        if self._pace.due(step):
            self.say(line(step, self._steps, numbers))

    def close(self) -> None:
        """Leave the bar on the screen."""
        if self._task is not None:
            self._rich.stop()


def make_progress(steps: int, *, show: bool, as_json: bool = False) -> Progress:
    """Return the progress display that suits standard output."""
    if not show:
        return Progress()
    if as_json:
        return JsonLines()
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        return Bar(steps)
    return Lines(steps)


def line(step: int, steps: int, numbers: dict[str, float]) -> str:
    """``step  12/200  loss 5.1234  1,234 tokens/s  512 MiB  lr 3.0e-04  grad norm 1.23``."""
    width = len(str(steps))
    parts = [f"step {step:>{width}}/{steps}", short(numbers)]
    if "lr" in numbers:
        parts.append(f"lr {numbers['lr']:.1e}")
    if "grad_norm" in numbers:
        parts.append(f"grad norm {numbers['grad_norm']:.2f}")
    if numbers.get("skipped"):
        parts.append(f"skipped (gradient not finite), loss scale {numbers['loss_scale']:.0f}")
    return "  ".join(parts)


def short(numbers: dict[str, float]) -> str:
    """Return loss, speed and memory, and MFU if the device's peak is known."""
    speed, memory = numbers["tokens_per_s"], numbers["memory_bytes"] / 2**20
    mfu = f"MFU {numbers['mfu']:.1%}  " if "mfu" in numbers else ""
    return f"loss {numbers['loss']:.4f}  {speed:,.0f} tokens/s  {mfu}{memory:,.0f} MiB"
