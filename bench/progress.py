"""How far a command is and how long it will still take, on standard error: a bar on a terminal, elsewhere a line now and then."""

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
"""Seconds between two lines where there is no terminal; a run of hours waits longer, a twentieth of what it has taken."""

Tick = Callable[[str, float], object]
"""What is told of work as it is done: what is at work, and how much of a task's total has been done since the last time."""


def no_tick(doing: str, done: float) -> None:
    """For work that nobody watches."""


def seconds_left(completed: float, total: float | None, elapsed: float, guess: float | None = None) -> float | None:
    """An estimate from the work that is done, which is in any unit; before any is from a guess of how long all takes, None without one."""
    if total is not None and completed > 0 and elapsed > 0:
        return max(elapsed * (total - completed) / completed, 0.0)
    return None if guess is None else max(guess - elapsed, 0.0)


def clock_time(seconds: float) -> str:
    """Minutes and seconds, or hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def times(task: Task) -> str:
    """How long it has taken, and how long it will."""
    elapsed = task.elapsed or 0.0
    left = seconds_left(task.completed, task.total, elapsed, task.fields.get("guess"))
    return f"{clock_time(elapsed)} so far, {'no estimate yet' if left is None else f'about {clock_time(left)} left'}"


class _Times(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(times(task), no_wrap=True)


class Progress:
    """The progress of a command's tasks, one after the other.

    Args:
        command: its name, which lines begin with.
        terminal: whether standard error is one, where a bar is drawn; None to look.
    """

    def __init__(self, command: str, terminal: bool | None = None, interval: float = INTERVAL, clock: Callable[[], float] = time.monotonic) -> None:
        console = Console(stderr=True)
        self.command, self.interval, self.clock = command, interval, clock
        description = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"), markup=False)
        columns = (description, BarColumn(bar_width=12), TaskProgressColumn(), _Times())
        # what a task has taken is looked up in every line, too; without a terminal nothing of this is drawn
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
        """
        Args:
            total: work, in any unit; None if nobody knows how much there is.
            seconds: a guess of how long all of it takes.
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
        """What advances a task, and names what is at work after a prefix."""

        def tick(doing: str, done: float) -> None:
            self._bar.update(task, description=f"{prefix}{doing}", advance=done)

        return tick

    def line(self) -> str | None:
        """How far the task at work is, None if there is none or it is done."""
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
