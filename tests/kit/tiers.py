"""Which tests run: the default tier, the thorough one, or a tenth of it."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable
from typing import Protocol

TENTHS = 10


class Test(Protocol):
    """What pytest collects of a test."""

    nodeid: str

    def get_closest_marker(self, name: str) -> object: ...


def is_thorough(test: Test) -> bool:
    """Whether a test is in the thorough tier only."""
    return test.get_closest_marker("thorough") is not None


def tenth_of(test: Test) -> int:
    """The tenth of the thorough tier that a test is in, from 0 on: by its name, so that it stays there when others come and go."""
    return zlib.crc32(test.nodeid.encode()) % TENTHS


def chosen(tests: Iterable[Test], thorough: bool, tenth: int | None) -> list[Test]:
    """The tests of a tier, the thorough ones last.

    Args:
        thorough: whether all of them run.
        tenth: else, the tenth of the thorough ones that runs beside the others; None: none of them.
    """
    tests = list(tests)
    more = [test for test in tests if is_thorough(test) and (thorough or tenth_of(test) == tenth)]
    return [*(test for test in tests if not is_thorough(test)), *more]


class Deadline:
    """Up to when thorough tests are begun."""

    def __init__(self, minutes: float | None) -> None:
        self.end = None if minutes is None else time.monotonic() + 60 * minutes

    def has_passed(self) -> bool:
        return self.end is not None and time.monotonic() > self.end
