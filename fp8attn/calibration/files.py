"""The file format of a calibration: JSON with a version.

    {"format": "fp8attn.calibration", "version": 3, "tolerance": 0.06, "recipes": [recipe, …], "layers": {name: layer,
    …}, "by_step": [{"first": number, "last": number, "layers": {name: layer, …}}, …], "costs": {name: cost, …}}

    layer: {"recipe": recipe | null, "masked": recipe | null, "within": bool, "tried": [errors, …],
            "tried_masked": [errors | null, …]}
    cost: {"calls": number, "sdpa": number | null, "milliseconds": [number | null, …]}

A recipe is an object with fields of `Recipe`. Errors are an object with the fields of `HeadErrors`, each a list of
numbers. The strings "inf" and "-inf" represent infinite numbers. Version 1 had no "format", "version", "masked" and
"tried_masked"; its "tried" covered all calls of the layer. Version 2 had no "by_step" and "costs".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from os import PathLike
from pathlib import Path
from typing import Any

from ..recipe import Recipe
from .choice import LayerChoice, LayerCost, StepRange, Tried, cheapest, without_half_keys
from .errors import HeadErrors
from .names import unwrapped_name

FORMAT = "fp8attn.calibration"
VERSION = 3

Layers = dict[str, LayerChoice]

Parts = tuple[float, tuple[Recipe, ...], Layers, tuple[StepRange, ...], dict[str, LayerCost]]
"""Tolerance, recipes, layers, layers by step, costs."""


def written(
    tolerance: float, recipes: Sequence[Recipe], layers: Mapping[str, LayerChoice], by_step: Sequence[StepRange], costs: Mapping[str, LayerCost]
) -> str:
    """The text of a file."""
    found = {
        "format": FORMAT,
        "version": VERSION,
        "tolerance": tolerance,
        "recipes": [asdict(recipe) for recipe in recipes],
        "layers": {name: asdict(choice) for name, choice in layers.items()},
        "by_step": [asdict(one) for one in by_step],
        "costs": {name: asdict(cost) for name, cost in costs.items()},
    }
    return json.dumps(_finite(found), indent=1, allow_nan=False) + "\n"


def _finite(x: Any) -> Any:
    """A copy with strings for numbers that JSON doesn't have."""
    if isinstance(x, dict):
        return {name: _finite(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_finite(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def read(path: str | PathLike[str]) -> Parts:
    """Read a file.

    Raises:
        ValueError: the file isn't a calibration.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: the file isn't JSON ({error}); it must be one that Calibration.save wrote") from error
    try:
        return _parts(found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parts(found: Any) -> Parts:
    _must(isinstance(found, dict), "the file", found, "an object, as Calibration.save writes it")
    if "format" in found or "version" in found:
        _must(found.get("format") == FORMAT, "format", found.get("format"), repr(FORMAT))
        version = found.get("version")
        _must(isinstance(version, int) and not isinstance(version, bool) and version >= 1, "version", version, "a positive integer")
        _must(version <= VERSION, "version", version, f"{VERSION} or less: this fp8attn is older than the file, update it")
    else:
        version = 1
    tolerance = _number("tolerance", _field(found, "", "tolerance"))
    _must(0 < tolerance < math.inf, "tolerance", tolerance, "positive and finite")
    recipes = tuple(_recipe(f"recipes[{i}]", recipe) for i, recipe in enumerate(_list("recipes", _field(found, "", "recipes"))))
    _must(len(recipes) > 0, "recipes", [], "a list of one recipe at least")

    def layers_of(where: str, named: Any) -> Layers:
        _must(isinstance(named, dict), where, named, "an object, with a layer under each name")
        read_layer = _layer_1 if version == 1 else _layer
        return {unwrapped_name(name): read_layer(f"{where}[{name!r}]", layer, recipes, tolerance) for name, layer in named.items()}

    layers = layers_of("layers", _field(found, "", "layers"))
    if version < 3:
        return tolerance, recipes, layers, (), {}
    by_step = []
    for i, one in enumerate(_list("by_step", _field(found, "", "by_step"))):
        first, last = (_number(f"by_step[{i}].{name}", _field(one, f"by_step[{i}]", name)) for name in ("first", "last"))
        by_step.append(StepRange(first, last, layers_of(f"by_step[{i}].layers", _field(one, f"by_step[{i}]", "layers"))))
    costs = _field(found, "", "costs")
    _must(isinstance(costs, dict), "costs", costs, "an object, with a cost under each name")
    return tolerance, recipes, layers, tuple(by_step), {name: _cost(f"costs[{name!r}]", cost, len(recipes)) for name, cost in costs.items()}


def _cost(where: str, found: Any, recipes: int) -> LayerCost:
    calls = _field(found, where, "calls")
    _must(isinstance(calls, int) and not isinstance(calls, bool) and calls >= 0, f"{where}.calls", calls, "an integer of 0 or more")
    entries = _list(f"{where}.milliseconds", _field(found, where, "milliseconds"))
    _must(len(entries) == recipes, f"{where}.milliseconds", f"a list of {len(entries)}", f"a list of {recipes}, one for each of recipes")
    sdpa, *times = (None if ms is None else _number(f"{where}.milliseconds", ms) for ms in (_field(found, where, "sdpa"), *entries))
    return LayerCost(calls, sdpa, tuple(times))


def _layer(where: str, found: Any, recipes: tuple[Recipe, ...], tolerance: float) -> LayerChoice:
    recipe, masked = (_recipe_or_none(f"{where}.{name}", _field(found, where, name)) for name in ("recipe", "masked"))
    _must(masked is None or not masked.has_half_keys, f"{where}.masked", _field(found, where, "masked"), "a recipe without sinks and recent")
    within = _within(where, found)
    tried, tried_masked = (_tried(f"{where}.{name}", _field(found, where, name), len(recipes)) for name in ("tried", "tried_masked"))
    return LayerChoice(recipe, masked, within, tried, tried_masked)


def _layer_1(where: str, found: Any, recipes: tuple[Recipe, ...], tolerance: float) -> LayerChoice:
    """A layer in version 1. Its errors decide about the recipe for calls with a mask."""
    recipe, within = _recipe(f"{where}.recipe", _field(found, where, "recipe")), _within(where, found)
    tried = _tried(f"{where}.tried", _field(found, where, "tried"), len(recipes))
    masked = cheapest(recipes, tolerance, without_half_keys(recipes, tried))[0] if recipe.has_half_keys and tried else recipe
    return LayerChoice(recipe, None if masked is not None and masked.has_half_keys else masked, within, tried)


def _within(where: str, found: Any) -> bool:
    within = _field(found, where, "within")
    _must(isinstance(within, bool), f"{where}.within", within, "true or false")
    return within


def _recipe_or_none(where: str, found: Any) -> Recipe | None:
    return None if found is None else _recipe(where, found)


def _recipe(where: str, found: Any) -> Recipe:
    _must(isinstance(found, dict), where, found, "an object of Recipe's fields")
    known = [field.name for field in fields(Recipe)]
    unknown = [name for name in found if name not in known]
    _must(not unknown, f"fields of {where}", unknown, f"{known}: this fp8attn is older than the file, update it")
    try:
        return Recipe(**found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _tried(where: str, found: Any, recipes: int) -> Tried:
    entries = _list(where, found)
    _must(len(entries) in (0, recipes), where, f"a list of {len(entries)}", f"a list of {recipes}, one for each of recipes, or empty")
    return tuple(None if errors is None else _errors(f"{where}[{i}]", errors) for i, errors in enumerate(entries))


def _errors(where: str, found: Any) -> HeadErrors:
    known = [field.name for field in fields(HeadErrors)]
    _must(isinstance(found, dict) and sorted(found) == sorted(known), where, found, f"an object of {known}")
    numbers = {name: tuple(_number(f"{where}.{name}", x) for x in _list(f"{where}.{name}", found[name])) for name in known}
    lengths = {name: len(of_name) for name, of_name in numbers.items()}
    _must(len(set(lengths.values())) == 1 and 0 not in lengths.values(), f"the number of heads in {where}", lengths, "equal and not 0")
    return HeadErrors(**numbers)


def _field(found: Any, where: str, name: str) -> Any:
    _must(isinstance(found, dict), where, found, "an object")
    _must(name in found, f"{where}.{name}" if where else name, "missing", "there")
    return found[name]


def _list(where: str, found: Any) -> list:
    _must(isinstance(found, list), where, found, "a list")
    return found


def _number(where: str, found: Any) -> float:
    if found in ("inf", "-inf"):
        return float(found)
    _must(isinstance(found, (int, float)) and not isinstance(found, bool) and not math.isnan(found), where, found, "a number")
    return float(found)


def _must(holds: bool, where: str, was: Any, must: str) -> None:
    """Raise a ValueError unless the condition holds."""
    if not holds:
        text = was if isinstance(was, str) and was == "missing" else repr(was)
        raise ValueError(f"{where} is {text if len(text) <= 80 else text[:80] + '…'}; it must be {must}")
