"""Which tests run in which tier: none is lost between them."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace

import conftest
import pytest
from conftest import collected

import tiers


@pytest.mark.anywhere
def test_every_test_is_in_the_default_tier_or_in_one_tenth(request: pytest.FixtureRequest) -> None:
    """Of what this run has collected."""
    everything = request.config.stash[collected]
    default = {*tiers.chosen(everything, thorough=False, tenth=None)}
    runs = Counter(item.nodeid for item in default)
    for tenth in range(tiers.TENTHS):
        runs.update(item.nodeid for item in tiers.chosen(everything, thorough=False, tenth=tenth) if item not in default)
    assert runs == dict.fromkeys((item.nodeid for item in everything), 1)
    assert len(tiers.chosen(everything, thorough=True, tenth=None)) == len(everything)


def drawn(count: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(nodeid=f"test[{i}]", get_closest_marker=lambda name, i=i: (name == "thorough" and i % 2) or None) for i in range(count)]


def test_one_in_so_many_stays() -> None:
    marks = {"a": SimpleNamespace(args=(3,)), "b": None, "c": SimpleNamespace(args=(5,))}
    tests = [SimpleNamespace(nodeid=f"{name}[{i}]", get_closest_marker=lambda _, name=name: marks[name]) for i in range(5) for name in marks]
    kept = [test.nodeid for test in tests if test not in tiers.left_out(tests)]
    assert kept == ["a[0]", "b[0]", "c[0]", "b[1]", "b[2]", "a[3]", "b[3]", "b[4]"]


def test_what_compiles_much_is_thorough_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu in (False, True):
        monkeypatch.setattr(conftest, "GPU", gpu)
        for marked in (False, True):
            added: list[pytest.MarkDecorator] = []
            item = SimpleNamespace(get_closest_marker=lambda name, marked=marked: (marked and name == "compiles") or None, add_marker=added.append)
            conftest.pytest_itemcollected(item)  # type: ignore[arg-type]
            assert [mark.name for mark in added] == ["thorough"] * (gpu and marked)


def test_tenths_are_alike_and_come_last() -> None:
    tests = drawn(2000)
    for tenth in range(tiers.TENTHS):
        chosen = tiers.chosen(tests, thorough=False, tenth=tenth)
        assert chosen[:1000] == tests[::2] and 60 <= len(chosen) - 1000 <= 140
        assert all(tiers.tenth_of(test) == tenth for test in chosen[1000:])


def test_where_a_test_is_depends_on_its_name_alone() -> None:
    assert [tiers.tenth_of(test) for test in drawn(50)] == [tiers.tenth_of(test) for test in drawn(100)[:50]]


def test_a_deadline_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, deadline, none = time.monotonic(), tiers.Deadline(2), tiers.Deadline(None)
    for minutes, passed in ((1, False), (3, True)):
        monkeypatch.setattr(time, "monotonic", lambda minutes=minutes: begun + 60 * minutes + 1)
        assert deadline.has_passed() == passed and not none.has_passed()
