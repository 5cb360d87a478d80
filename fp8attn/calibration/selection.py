"""Selects the calls of a layer that `capture` records."""

from __future__ import annotations

from collections.abc import Hashable

Place = tuple[Hashable, int]
"""Identifies a call: its kind, and the number of calls of this kind before it."""


class _Kind:
    """The calls of one kind.

    Attributes:
        seen: the number of calls so far.
        stride: a call is recorded if its number is a multiple of this.
        kept: the numbers of the recorded calls.
    """

    def __init__(self) -> None:
        self.seen = 0
        self.stride = 1
        self.kept: list[int] = []


class Selection:
    """Selects at most `limit` calls: the first of each kind, and then further calls at even distances.

    So calls of a diffusion model come from all of its steps, and calls of a language model from prefill and decode.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.kinds: dict[Hashable, _Kind] = {}

    def offer(self, kind: Hashable) -> tuple[Place | None, list[Place]]:
        """Decide about the next call.

        Returns:
            The call's place if it is recorded, else None; and the places of earlier calls that are dropped now.
        """
        of_kind = self.kinds.setdefault(kind, _Kind())
        number = of_kind.seen
        of_kind.seen += 1
        if number % of_kind.stride:
            return None, []
        of_kind.kept.append(number)
        dropped: list[Place] = []
        while sum(len(each.kept) for each in self.kinds.values()) > self.limit:
            largest_kind, largest = max(self.kinds.items(), key=lambda item: len(item[1].kept))
            if len(largest.kept) == 1:
                of_kind.kept.remove(number)  # there are more kinds than the limit
                break
            largest.stride *= 2
            dropped += [(largest_kind, i) for i in largest.kept if i % largest.stride]
            largest.kept = [i for i in largest.kept if i % largest.stride == 0]
        place = (kind, number)
        return (place if number in of_kind.kept else None), [other for other in dropped if other != place]

    def forget(self, place: Place) -> None:
        """Remove a call that the caller doesn't record."""
        kind, number = place
        self.kinds[kind].kept.remove(number)
