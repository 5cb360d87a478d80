"""Summaries of the cost of a recipe, from the lines of `price`: for the command's output, the last line of its file,
and the documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SUMMARY = "price summary"
"""`benchmark` of lines that summarise the lines of their file for one recipe."""

DEFAULT, BFLOAT16 = "default", "bfloat16"
"""Recipes with which all other recipes are compared."""

SUMMED = ("kernel", "whole")
"""Parts in a recipe's summary."""


def summaries(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The cost of every recipe relative to the default, from `Price.record`s of one run.

    For each part it has a ratio and its standard error for each case, and the least and the largest ratio. The ratios
    of the default to itself are the noise.
    """
    found = []
    for recipe in dict.fromkeys(record["recipe"] for record in records if record["recipe"] not in (DEFAULT, BFLOAT16)):
        one: dict[str, Any] = {"recipe": recipe}
        for part in SUMMED:
            ratios = {name: _ratios(records, name, part) for name in (recipe, DEFAULT)}
            values = [mean for mean, _ in ratios[recipe].values()]
            one[part] = ratios[recipe]
            one |= {f"{part}_least": min(values, default=None), f"{part}_most": max(values, default=None), f"{part}_noise": ratios[DEFAULT]}
        one["against_bfloat16"] = {
            record["case"]: record["against_bfloat16"] for record in records if record["recipe"] == recipe and record["against_bfloat16"] is not None
        }
        found.append(one)
    return found


def _ratios(records: Sequence[Mapping[str, Any]], recipe: str, part: str) -> dict[str, list[float]]:
    """Ratio and standard error by case. Older files have no standard errors, so they give none."""
    found = {}
    for record in records:
        ratio, error = record.get(f"{part}_against_default"), record.get(f"{part}_standard_error")
        if record["recipe"] == recipe and ratio is not None and error is not None:
            found[record["case"]] = [float(ratio), float(error)]
    return found


def sentence(summary: Mapping[str, Any]) -> str:
    """A summary in one line."""
    words = {"kernel": "kernel", "whole": "from bf16"}
    parts = []
    for part in SUMMED:
        cases = ", ".join(f"{case} {mean:.3f} ± {error:.3f}" for case, (mean, error) in summary[part].items())
        if cases:
            parts.append(f"{words[part]} × {summary[f'{part}_least']:.3f} to {summary[f'{part}_most']:.3f} ({cases})")
    noise = [mean for part in SUMMED for mean, _ in summary[f"{part}_noise"].values()]
    if noise:
        parts.append(f"the default beside itself × {min(noise):.3f} to {max(noise):.3f}")
    return f"{summary['recipe']} over the default: {'; '.join(parts) or 'nothing was timed'}"
