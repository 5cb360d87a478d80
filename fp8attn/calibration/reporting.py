"""Shows a calibration: as a table, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from os import PathLike
from typing import TYPE_CHECKING

from ..recipe import Recipe
from .choice import LayerChoice
from .names import shown

if TYPE_CHECKING:
    from .calibrated import Calibration


def described(recipe: Recipe | None) -> str:
    """A recipe as text, without fields that have their defaults."""
    if recipe is None:
        return "F.scaled_dot_product_attention"
    default = Recipe()
    changed = {f.name: getattr(recipe, f.name) for f in fields(recipe) if getattr(recipe, f.name) != getattr(default, f.name)}
    return f"Recipe({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


def worst_errors(choice: LayerChoice) -> list[float | None]:
    """The largest relative L2 error of a head by each recipe, with and without a mask; None for recipes that weren't
    tried."""
    both = [tried for tried in (choice.tried, choice.tried_masked) if tried]
    found: list[float | None] = []
    for several in zip(*both, strict=True):
        numbers = [x for errors in several if errors is not None for x in errors.relative_l2]
        found.append(max(numbers) if numbers else None)
    return found


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def table(calibration: Calibration) -> str:
    """A row for each layer, and for each part of the steps: the chosen recipe, the largest error by each recipe, and
    the predicted time of all calls by the chosen recipe and by PyTorch."""
    numbers = [f"[{i}]" for i in range(len(calibration.recipes))]
    timed = any(cost.sdpa is not None for cost in calibration.costs.values())
    rows = [["layer", "timesteps", "chosen", *numbers, *(("ms", "ms by PyTorch") if timed else ())]]
    parts = [("all", calibration.layers), *((f"{one.first:g} to {one.last:g}", one.layers) for one in calibration.by_step)]
    for name, layers in parts:
        for layer, choice in layers.items():
            errors = ["–" if error is None else f"{error:.4f}" for error in worst_errors(choice)]
            index = None if choice.recipe is None else calibration.recipes.index(choice.recipe) if choice.recipe in calibration.recipes else None
            chosen = "PyTorch" if choice.recipe is None else described(choice.recipe) if index is None else numbers[index]
            row = [shown(layer), name, chosen + ("" if choice.within else ", above the tolerance"), *(errors or ["–"] * len(numbers))]
            if timed:
                cost = calibration.costs.get(layer)
                ms = None if cost is None else cost.sdpa if index is None else cost.milliseconds[index]
                row += ["" if name != "all" or x is None else f"{x:.2f}" for x in (ms, None if cost is None else cost.sdpa)]
            rows.append(row)
    legend = [f"{number} {described(recipe)}" for number, recipe in zip(numbers, calibration.recipes, strict=True)]
    return "\n".join((f"largest relative L2 error of a head, tolerance {calibration.tolerance}", aligned(rows), *legend))


def plot(calibration: Calibration, path: str | PathLike[str]) -> None:
    """Draw the errors of all layers by all recipes, and if they were measured the times.

    Raises:
        ImportError: matplotlib isn't installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Calibration.plot needs matplotlib: pip install matplotlib") from error
    layers = list(calibration.layers)
    timed = [layer for layer in layers if (cost := calibration.costs.get(layer)) is not None and cost.sdpa is not None]
    figure = Figure(figsize=(max(6.0, 0.25 * len(layers)), 7.0 if timed else 4.5), layout="constrained")
    axes = figure.subplots(2 if timed else 1, 1, squeeze=False)[:, 0]
    for i, recipe in enumerate(calibration.recipes):
        errors = {layer: worst for layer in layers if (found := worst_errors(calibration.layers[layer])) and (worst := found[i]) is not None}
        axes[0].plot([layers.index(layer) for layer in errors], list(errors.values()), "o", label=described(recipe), fillstyle="none")
        chosen = [layer for layer in errors if calibration.layers[layer].recipe == recipe]
        axes[0].plot([layers.index(layer) for layer in chosen], [errors[layer] for layer in chosen], "k.", markersize=4)
    axes[0].axhline(calibration.tolerance, color="black", linestyle="--", linewidth=1, label="tolerance")
    axes[0].set_yscale("log")
    axes[0].set_ylabel("relative L2 error of the worst head")
    axes[0].legend(fontsize=7)
    if timed:
        for i, recipe in enumerate(calibration.recipes):
            times = {layer: calibration.costs[layer].milliseconds[i] for layer in timed}
            there = {layer: ms for layer, ms in times.items() if ms is not None}
            axes[1].plot([layers.index(layer) for layer in there], list(there.values()), "o", label=described(recipe), fillstyle="none")
        axes[1].plot([layers.index(layer) for layer in timed], [calibration.costs[layer].sdpa for layer in timed], "k_", label="PyTorch")
        axes[1].set_ylabel("ms of all calls")
    axes[-1].set_xticks(range(len(layers)), [shown(layer) for layer in layers], rotation=90, fontsize=6)
    figure.savefig(path)
