"""Which rows of a rank's queries attend to which of a part's keys, as calls that every attention kernel takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..reference import Causal
from .sharding import Span


@dataclass(frozen=True)
class Piece:
    """One call of attention.

    Attributes:
        start, stop: the rows of this rank's queries.
        keys: how many of the part's keys the call gets, from the first one on.
        causal: the mask of these rows and keys.
    """

    start: int
    stop: int
    keys: int
    causal: Causal


def _of_run(row: int, queries: Span, keys: Span, shift: int) -> list[Piece]:
    """The pieces of one run of queries, which starts at `row` and sees keys up to its position plus `shift`."""
    ahead = queries.first + shift - keys.first
    """Row i of the run sees the part's keys j <= i + ahead."""
    stop = row + queries.length
    if ahead >= keys.length - 1:
        return [Piece(row, stop, keys.length, "none")]
    if ahead <= 0:  # the first rows see no key
        return [Piece(row - ahead, stop, keys.length, "top_left")] if row - ahead < stop else []
    aligned = keys.length - ahead
    """Rows with which the mask is aligned to the bottom right."""
    if queries.length < aligned:
        return [Piece(row, stop, queries.length + ahead, "bottom_right")]
    pieces = [Piece(row, row + aligned, keys.length, "bottom_right"), Piece(row + aligned, stop, keys.length, "none")]
    return [piece for piece in pieces if piece.start < piece.stop]


def _joined(first: Piece, second: Piece) -> Piece | None:
    """One piece for two, or None."""
    if first.stop != second.start or first.keys != second.keys or second.causal != "none":
        return None
    # rows from the last key on see all keys, also with a mask that is aligned to the top left
    sees_all = first.causal == "none" or (first.causal == "top_left" and first.stop - first.start >= first.keys - 1)
    return replace(first, stop=second.stop) if sees_all else None


def pieces(queries: Sequence[Span], keys: Span, shift: int | None) -> list[Piece]:
    """The calls that make all rows attend to a part's keys. Rows in none of them see none of these keys.

    Args:
        queries: the runs of this rank's rows, in their order.
        keys: the part's keys.
        shift: the query at position i sees keys at positions up to i + shift; None: all keys.
    """
    found: list[Piece] = []
    row = 0
    for run in queries:
        if run.length and keys.length:
            whole = [Piece(row, row + run.length, keys.length, "none")]
            for piece in whole if shift is None else _of_run(row, run, keys, shift):
                joined = _joined(found[-1], piece) if found else None
                if joined is not None:
                    found[-1] = joined
                else:
                    found.append(piece)
        row += run.length
    return found
