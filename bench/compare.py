"""Compares two results files case by case: what got faster, what got slower, and what is noise."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .command_line import UsageError, chosen
from .machine import PROGRAM

LEAST_NOISE = 0.02
"""Smallest noise of two commits that took turns. A smaller difference is never called a change."""

BETWEEN_RUNS = 0.05
"""Smallest noise of two separate runs. 28 rows that were measured twice in a row on an H100 differed by up to 4.1 %,
because of the card's clock and temperature."""

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Change:
    """One row of both runs.

    Attributes:
        before_us, after_us: medians in microseconds.
        ratio: before divided by after; more than 1 is faster than before.
        noise: largest distance of the ratio from 1 that means nothing.
    """

    case: str
    backend: str
    distribution: str
    before_us: float
    after_us: float
    ratio: float
    noise: float

    @property
    def verdict(self) -> str:
        """`faster`, `slower` or `no change`."""
        if self.ratio > 1 + self.noise:
            return "faster"
        return "slower" if self.ratio < 1 / (1 + self.noise) else "no change"


def uncertainty(rounds: Sequence[float]) -> float:
    """Three standard errors of the median of the rounds' numbers, relative to the median.

    They are those of a normal distribution with the same quartiles, so that one outlier in five rounds doesn't count.
    """
    lower, median, upper = np.percentile(rounds, (25, 50, 75))
    return float(3 * 1.25 * (upper - lower) / 1.35 / math.sqrt(len(rounds)) / median)


def round_ratios(these: Sequence[float], those: Sequence[float]) -> list[float]:
    """For two runs that took turns, the ratio of their times in every round.

    The card's clock, which changes between rounds, cancels.
    """
    return [a / b for a, b in zip(these, those, strict=True)]


def change(key: Key, old: dict[str, Any], new: dict[str, Any]) -> Change:
    """The change between rows of two separate runs: the ratio of their medians, and noise from the rounds of both runs,
    or from p90 over p50 if a file has no rounds."""
    if old.get("round_us") and new.get("round_us"):
        noise = math.hypot(uncertainty(old["round_us"]), uncertainty(new["round_us"]))
    else:
        noise = spread(old) + spread(new)
    return Change(*key, old["p50_us"], new["p50_us"], old["p50_us"] / new["p50_us"], max(noise, BETWEEN_RUNS))


def paired(key: Key, old: dict[str, Any], new: dict[str, Any]) -> Change:
    """The change between two rows that took turns: the median of their rounds' ratios, and its uncertainty."""
    ratios = round_ratios(old["round_us"], new["round_us"])
    return Change(*key, old["p50_us"], new["p50_us"], statistics.median(ratios), max(uncertainty(ratios), LEAST_NOISE))


@dataclass(frozen=True)
class Comparison:
    """All rows that both files time, and the keys of rows that only one file has."""

    changes: tuple[Change, ...]
    only_before: tuple[Key, ...]
    only_after: tuple[Key, ...]

    @property
    def mean_ratio(self) -> float:
        """Geometric mean of the ratios; 1 if there are no rows."""
        logs = [math.log(change.ratio) for change in self.changes]
        return math.exp(sum(logs) / len(logs)) if logs else 1.0


def timed(path: Path) -> dict[Key, dict[str, Any]]:
    """The timed rows of a results file.

    Raises:
        UsageError: a line isn't a timed result, or two lines are for the same row.
    """
    rows: dict[Key, dict[str, Any]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            key = (record["case"], record.get("backend", record["benchmark"]), record.get("distribution", ""))
            median = record["p50_us"]
            if median is not None and not record.get("round_us") and "p90_us" not in record:
                raise KeyError("p90_us")
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UsageError(f"{path}, line {number}, isn't a result of {PROGRAM}: {error!r}") from error
        if key in rows:
            raise UsageError(f"{path}, line {number}: {' / '.join(key)} stands there twice")
        if median is not None:
            rows[key] = record
    return rows


def spread(record: dict[str, Any]) -> float:
    """p90 over p50, minus 1."""
    return record["p90_us"] / record["p50_us"] - 1


def compare(before: Path, after: Path, backend: str | None = None, case: str | Sequence[str] | None = None) -> Comparison:
    """Compare rows of `after` with rows of `before`.

    Args:
        backend, case: substrings; only rows with these in their names are compared.

    Raises:
        UsageError: a file has no timed results, or nothing matches the filters.
    """
    files = [timed(path) for path in (before, after)]
    keys = list(dict.fromkeys(key for file in files for key in file))
    if not keys:
        raise UsageError(f"there is no timed row in {before}, nor in {after}")
    keys = chosen(backend, keys, "--backend", "backend", lambda key: key[1])
    keys = chosen(case, keys, "--case", "case", lambda key: key[0])
    wanted = set(keys)
    old, new = ({key: row for key, row in file.items() if key in wanted} for file in files)
    changes = tuple(change(key, old[key], new[key]) for key in new if key in old)
    return Comparison(changes, tuple(key for key in old if key not in new), tuple(key for key in new if key not in old))


def markdown(comparison: Comparison) -> str:
    """A Markdown table and the mean."""
    rows = ["| case | backend | before, µs | after, µs | × | noise | |", "| --- | --- | ---: | ---: | ---: | ---: | --- |"]
    rows += [
        f"| {c.case} | {c.backend} | {c.before_us:.1f} | {c.after_us:.1f} | {c.ratio:.3f} | ±{c.noise * 100:.1f} % | {c.verdict} |"
        for c in comparison.changes
    ]
    return "\n".join([*rows, "", summary(comparison), ""])


def summary(comparison: Comparison) -> str:
    """One line: the numbers of rows that are faster, slower and unchanged, and the geometric mean."""
    verdicts = [change.verdict for change in comparison.changes]
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in ("faster", "slower", "no change"))
    return f"{len(verdicts)} rows: {counts}; geometric mean × {comparison.mean_ratio:.3f}"


def short_of(comparison: Comparison, required: float) -> Sequence[Change]:
    """Rows whose ratio is below the required one."""
    return [change for change in comparison.changes if change.ratio < required]
