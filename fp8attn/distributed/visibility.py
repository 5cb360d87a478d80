"""Which rows of a rank's queries attend to which of a part's keys, as calls that every attention kernel takes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..reference import Causal, Window
from .sharding import Span, Spans


@dataclass(frozen=True)
class Piece:
    """One call of attention.

    Attributes:
        start, stop: the rows of this rank's queries.
        keys: how many of the part's keys the call gets, from the first one on.
        causal: the mask of these rows and keys; with a window only its alignment.
        window: as of `fp8attn.sdpa`, of these rows and keys; or None.
    """

    start: int
    stop: int
    keys: int
    causal: Causal
    window: Window | None = None


@dataclass(frozen=True)
class _Rows:
    """Consecutive rows that see a prefix of a part's keys.

    Attributes:
        start, stop: the rows.
        first, last: how many keys the first and the last row see. Each row sees one more than the row before, or all
            see the same.
    """

    start: int
    stop: int
    first: int
    last: int

    @property
    def is_causal(self) -> bool:
        return self.first < self.last


def _of_run(row: int, queries: Span, keys: Spans, shift: int) -> list[_Rows]:
    """The rows of one run of queries, which starts at `row`, that see a key. A query sees keys up to its position plus
    `shift`."""
    found: list[_Rows] = []
    last, stop = queries.first + shift, row + queries.length
    """The last position that row `row` sees."""
    while row < stop:
        before = sum(min(max(last - run.first, 0), run.length) for run in keys)
        """How many keys lie before `last`."""
        inside = next((run for run in keys if run.first <= last < run.first + run.length), None)
        if inside is not None:
            count = min(inside.first + inside.length - last, stop - row)
            found.append(_Rows(row, row + count, before + 1, before + count))
        else:
            count = min([run.first - last for run in keys if run.first > last] + [stop - row])
            if before:
                found.append(_Rows(row, row + count, before, before))
        row, last = row + count, last + count
    return found


def _joined(first: _Rows, second: _Rows) -> _Rows | None:
    """The rows of two as one, or None if these aren't as `_Rows` says."""
    if first.stop != second.start:
        return None
    both = replace(first, stop=second.stop, last=second.last)
    if first.last == second.first:
        return None if first.is_causal or second.is_causal else both
    single = [rows.stop - rows.start == 1 for rows in (first, second)]
    causal = all(rows.is_causal or one for rows, one in zip((first, second), single, strict=True))
    return both if causal and first.last + 1 == second.first else None


def _pieces_of(rows: Sequence[_Rows]) -> list[Piece]:
    """The calls of rows that follow each other."""
    found: list[Piece] = []
    for some in rows:
        before = found[-1] if found else None
        if not some.is_causal:
            # rows behind those of a mask that is aligned to the top left see all of its keys
            if before is not None and before.causal == "top_left" and before.stop == some.start and some.last == before.keys:
                found[-1] = replace(before, stop=some.stop)
            else:
                found.append(Piece(some.start, some.stop, some.last, "none"))
        elif some.first == 1:
            found.append(Piece(some.start, some.stop, some.last, "top_left"))
        else:
            found.append(Piece(some.start, some.stop, some.last, "bottom_right"))
    return found


@dataclass(frozen=True)
class Visible:
    """Which keys a query sees: with i for its position plus `shift`, those at positions from i - left to i + right.

    Attributes:
        shift: of causal masks and windows.
        left, right: -1 is unlimited.
    """

    shift: int = 0
    left: int = -1
    right: int = -1

    @classmethod
    def of(cls, window: Window | None, is_causal: bool, shift: int = 0) -> Visible:
        """By the arguments of a call."""
        left, right = (-1, -1) if window is None else window
        return cls(shift, left, 0 if is_causal else right)

    @property
    def sees_all(self) -> bool:
        """Whether every row sees all keys."""
        return self.left < 0 and self.right < 0

    @property
    def has_window(self) -> bool:
        """Whether a row doesn't see a prefix of the keys that follow each other without gaps."""
        return self.left >= 0 or self.right > 0


def _in_window(row: int, queries: Span, keys: Span, visible: Visible) -> list[Piece]:
    """The call of one run of queries, which starts at `row`, and one run of keys; none if no row sees one of them."""
    left, right = visible.left, visible.right
    ahead = queries.first + visible.shift - keys.first
    """Row r sees the run's keys from r + ahead - left to r + ahead + right."""
    first = 0 if right < 0 else max(0, -(ahead + right))
    last = queries.length if left < 0 else min(queries.length, keys.length + left - ahead)
    count, ahead = last - first, ahead + first
    if count <= 0 or not keys.length:
        return []
    used = keys.length if right < 0 else min(keys.length, count + ahead + right)
    alignment: Causal = "top_left" if left < 0 or left >= ahead else "bottom_right"
    ahead -= used - count if alignment == "bottom_right" else 0
    window = left if left < 0 else left - ahead, right if right < 0 else right + ahead
    return [Piece(row + first, row + last, used, alignment, window)]


def pieces(queries: Sequence[Span], keys: Spans, visible: Visible) -> list[Piece]:
    """The calls that make all rows attend to a part's keys. Rows in none of them see none of these keys.

    No row is in two of them. With a window a part has one run of keys. Otherwise keys are in the order of the sequence,
    so every row sees a prefix of them.

    Args:
        queries: the runs of this rank's rows, in their order.
        keys: the runs of the part's keys, in the order of the sequence.
    """
    return [*_pieces(tuple(queries), keys, visible)]


@functools.lru_cache(1024)
def _pieces(queries: Spans, keys: Spans, visible: Visible) -> list[Piece]:
    """`pieces`, computed once for the shapes of a model."""
    if visible.has_window:
        return _pieces_in_window(queries, keys, visible)
    shift = None if visible.right < 0 else visible.shift
    found: list[_Rows] = []
    row, total = 0, sum(run.length for run in keys)
    for run in queries:
        if run.length and total:
            for rows in [_Rows(row, row + run.length, total, total)] if shift is None else _of_run(row, run, keys, shift):
                joined = _joined(found[-1], rows) if found else None
                if joined is not None:
                    found[-1] = joined
                else:
                    found.append(rows)
        row += run.length
    return _pieces_of(found)


def _pieces_in_window(queries: Sequence[Span], keys: Spans, visible: Visible) -> list[Piece]:
    found: list[Piece] = []
    row = 0
    assert len(keys) <= 1
    for run in queries:
        for of_keys in keys:
            found += _in_window(row, run, of_keys, visible)
        row += run.length
    return found
