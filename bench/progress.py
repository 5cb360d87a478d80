"""Progress of a command and its remaining time, on standard error: a bar on a terminal, otherwise a line from time to
time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

INTERVAL = 10.0
"""Seconds between two lines if there is no terminal. A long run waits longer: a twentieth of the time that has
passed."""

Tick = Callable[[str, float], object]
"""A function that is called as work is done, with what is being done now, and how much of a task's total has been done
since the last call."""


def no_tick(doing: str, done: float) -> None:
    """A tick that does nothing."""


def seconds_left(completed: float, total: float | None, elapsed: float, guess: float | None = None) -> float | None:
    """An estimate from the finished work, in any unit.

    Before any work is finished, it comes from a guess of the total duration; None without one.
    """
    if total is not None and completed > 0 and elapsed > 0:
        return max(elapsed * (total - completed) / completed, 0.0)
    return None if guess is None else max(guess - elapsed, 0.0)


def clock_time(seconds: float) -> str:
    """Minutes and seconds, or hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def times(task: Task) -> str:
    """The elapsed and the remaining time of a task."""
    elapsed = task.elapsed or 0.0
    left = seconds_left(task.completed, task.total, elapsed, task.fields.get("guess"))
    return f"{clock_time(elapsed)} so far, {'no estimate yet' if left is None else f'about {clock_time(left)} left'}"


class _Times(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(times(task), no_wrap=True)


class Progress:
    """The progress of a command's tasks, one after the other.

    Args:
        command: its name, with which lines begin.
        terminal: whether standard error is a terminal, on which a bar is drawn; None to detect it.
    """

    def __init__(self, command: str, terminal: bool | None = None, interval: float = INTERVAL, clock: Callable[[], float] = time.monotonic) -> None:
        console = Console(stderr=True)
        self.command, self.interval, self.clock = command, interval, clock
        description = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"), markup=False)
        columns = (description, BarColumn(bar_width=12), TaskProgressColumn(), _Times())
        # lines read a task's elapsed time from the bar, too; without a terminal the bar isn't drawn
        self._bar = Bar(*columns, console=console, transient=True, expand=True, get_time=clock, redirect_stdout=False)
        self._terminal = sys.stderr.isatty() and not console.is_dumb_terminal if terminal is None else terminal
        self._over = threading.Event()
        self._lines = threading.Thread(target=self._print_lines, daemon=True)

    def __enter__(self) -> Progress:
        if self._terminal:
            self._bar.start()
        else:
            self._lines.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._terminal:
            self._bar.stop()
        self._over.set()
        if self._lines.is_alive():
            self._lines.join()

    def add_task(self, description: str, total: float | None, seconds: float | None = None) -> TaskID:
        """Start a task.

        Args:
            total: work, in any unit; None if it isn't known.
            seconds: a guess of the total duration.
        """
        task = self._bar.add_task(description, total=total, guess=seconds)
        if not self._terminal:
            self._print(f"{self.command}: {description}")
        return task

    def update(self, task: TaskID, *, description: str | None = None, completed: float | None = None) -> None:
        self._bar.update(task, description=description, completed=completed)

    def advance(self, task: TaskID, amount: float = 1.0) -> None:
        self._bar.advance(task, amount)

    def ticks(self, task: TaskID, prefix: str = "") -> Tick:
        """A tick that advances a task, and describes the current work after a prefix."""

        def tick(doing: str, done: float) -> None:
            self._bar.update(task, description=f"{prefix}{doing}", advance=done)

        return tick

    def line(self) -> str | None:
        """A line about the current task, or None if there is none or it is done."""
        if not self._bar.tasks or self._bar.tasks[-1].finished:
            return None
        task = self._bar.tasks[-1]
        share = "" if not task.total else f"{100 * task.completed / task.total:.0f} %, "
        return f"{self.command}: {share}{times(task)}: {task.description}"

    def _print_lines(self) -> None:
        began = self.clock()
        while not self._over.wait(max(self.interval, (self.clock() - began) / 20)):
            line = self.line()
            if line is not None:
                self._print(line)

    @staticmethod
    def _print(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
