"""Tables for people that fit any width. No number is ever cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

BETWEEN = 3
"""Terminal columns that each table column takes in addition to its content: a space on both sides and a line. The table
has one more line."""

NAME = 25
"""Terminal columns that a name gets, if it needs them, before numbers are left out."""

FOLDED = 16
"""Terminal columns to which a long word can be folded."""


def _lines_width(cell: object) -> int:
    return max((cell_len(line) for line in str(cell).splitlines()), default=0)


def _word_width(text: object) -> int:
    return min(max((cell_len(word) for word in str(text).split()), default=0), FOLDED)


@dataclass(frozen=True)
class _Width:
    """Widths of a column: the least that its cells need, and the best for cells and header."""

    least: int
    best: int


def _width(column: Column, name: int) -> _Width:
    """The widths of a column.

    Args:
        name: least width of words, if they need it.
    """
    cells = list(column.cells)
    best = max(map(_lines_width, (column.header, *cells)), default=0)
    if column.justify == "right":  # numbers
        return _Width(max(_word_width(column.header), *map(_lines_width, cells), 0), best)
    return _Width(max(min(best, name), *map(_word_width, (column.header, *cells))), best)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + BETWEEN * len(widths) + 1


class Sheet(Table):
    """A table in which right-justified columns are numbers and all other columns are words.

    If there isn't enough room, headers and words are folded first. Then columns in `optional` are left out, and a note
    names them. Then the table is split into several, one below the other.

    Args:
        caption: what numbers mean, below the table.
        optional: headers of columns that may be left out, the least important first.
    """

    def __init__(self, title: str, caption: str | None = None, optional: Sequence[str] = ()) -> None:
        super().__init__()
        self.heading, self.notes, self.optional = title, caption, tuple(optional)

    def add_group(self, name: str) -> None:
        """Add a row with a name for the rows below it."""
        self.add_section()
        self.add_row(name, style="bold cyan")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.heading, style="bold")
        parts, left_out, full = self._fitted(options.max_width)
        for columns, widths in parts:
            yield self._part(columns, widths)
        notes = [] if self.notes is None else [self.notes]
        if left_out:
            notes.append(f"Left out for want of room: {', '.join(left_out)}; {full} columns would show all (COLUMNS={full}), and --json has them.")
        if notes:
            yield Text(" ".join(notes), style="italic")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(FOLDED, options.max_width), options.max_width)

    def _fitted(self, room: int) -> tuple[list[tuple[list[int], list[int]]], list[str], int]:
        """The columns and widths of each part; headers of columns that are left out; and the least width for all
        columns."""
        everything, full = list(range(len(self.columns))), 0
        widths: list[_Width] = []

        def least(columns: Sequence[int]) -> int:
            return _total([widths[i].least for i in columns])

        for name in (NAME, 0):
            widths, kept = [_width(column, name) for column in self.columns], everything
            full = full or least(everything)
            for header in self.optional:
                if least(kept) <= room:
                    break
                kept = [i for i in kept if self.columns[i].header != header]
            if least(kept) <= room:
                break
        left_out = [str(column.header) for i, column in enumerate(self.columns) if i not in kept]
        labels = [i for i in kept if i < self._first_number()]
        parts = [labels]
        for i in kept[len(labels) :]:
            if parts[-1] != labels and least([*parts[-1], i]) > room:
                parts.append(labels)
            parts[-1] = [*parts[-1], i]
        return [(part, self._grown(part, [widths[i] for i in part], room)) for part in parts], left_out, full

    def _first_number(self) -> int:
        return next((i for i, column in enumerate(self.columns) if column.justify == "right"), len(self.columns))

    def _grown(self, columns: Sequence[int], widths: Sequence[_Width], room: int) -> list[int]:
        """The least widths, plus the remaining room for the columns that need most, words first."""
        found = [width.least for width in widths]
        words = [self.columns[i].justify != "right" for i in columns]
        for _ in range(room - _total(found)):
            lacking = [width.best - now for width, now in zip(widths, found, strict=True)]
            most = max(range(len(found)), key=lambda i: (lacking[i] > 0, words[i], lacking[i]))
            if lacking[most] <= 0:
                break
            found[most] += 1
        return found

    def _part(self, columns: Sequence[int], widths: Sequence[int]) -> Table:
        part = Table()
        for i, width in zip(columns, widths, strict=True):
            column = self.columns[i]
            part.add_column(_shown(column.header), justify=column.justify, width=width, overflow="fold")
        cells = [[_shown(cell) for cell in self.columns[i].cells] for i in columns]
        for number, row in enumerate(self.rows):
            part.add_row(*(column[number] for column in cells), style=row.style, end_section=row.end_section)
        return part


def _shown(cell: object) -> Text:
    """A cell's text unchanged: brackets in a name or in an error aren't markup."""
    return cell if isinstance(cell, Text) else Text(str(cell))
