"""Selects the tests to run: the default tier, the thorough tier, or a tenth of it."""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

TENTHS = 10


class Test(Protocol):
    """The part of pytest's test items that this module uses."""

    nodeid: str

    def get_closest_marker(self, name: str) -> Any: ...


def left_out(tests: Iterable[Test]) -> list[Test]:
    """Of functions that are marked `one_in(n)`, all tests but the first of every n."""
    counts: Counter[str] = Counter()
    found = []
    for test in tests:
        mark = test.get_closest_marker("one_in")
        if mark is None:
            continue
        function = test.nodeid.split("[")[0]
        if counts[function] % mark.args[0]:
            found.append(test)
        counts[function] += 1
    return found


def is_thorough(test: Test) -> bool:
    """Whether a test is only in the thorough tier."""
    return test.get_closest_marker("thorough") is not None


def tenth_of(test: Test) -> int:
    """The tenth, from 0 on, of the thorough tier that contains a test.

    It depends on the test's name only, and not on other tests.
    """
    return zlib.crc32(test.nodeid.encode()) % TENTHS


def chosen(tests: Iterable[Test], thorough: bool, tenth: int | None) -> list[Test]:
    """The tests of a tier, with the thorough ones last.

    Args:
        thorough: whether all thorough tests run.
        tenth: if not `thorough`, the tenth of the thorough tests that runs, too; None for none of them.
    """
    tests = list(tests)
    more = [test for test in tests if is_thorough(test) and (thorough or tenth_of(test) == tenth)]
    return [*(test for test in tests if not is_thorough(test)), *more]


class Deadline:
    """The time after which no more thorough tests start."""

    def __init__(self, minutes: float | None) -> None:
        self.end = None if minutes is None else time.monotonic() + 60 * minutes

    def has_passed(self) -> bool:
        return self.end is not None and time.monotonic() > self.end
