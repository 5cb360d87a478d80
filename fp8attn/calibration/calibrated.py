"""Finds recipes for the layers of a model, stores them and applies them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path

import torch

from ..recipe import PRECISE, Recipe
from ..validate import Backend, check_recipe
from . import files
from .calls import AttentionCall
from .choice import LayerChoice, choose
from .errors import HeadErrors, errors_of, merged
from .names import shown, unwrapped_name
from .replacing import AppliedReport, applied

CANDIDATES = (
    Recipe(),
    PRECISE,
    Recipe(rotate=256),
    Recipe(rotate=256, qk="int8"),
    Recipe(qk="int8", recent=256),
    Recipe(k="token", rotate=256, qk="int8"),
    Recipe(compute="f16", k="token", rotate=256),
)
"""Candidate recipes, the cheapest one first. Times are from half-precision inputs to the output on an H100
(docs/benchmark-tables.md). Rotating other than 64 channels needs other quantizers. Half-precision keys need another
kernel, which is expensive for small problems. One scale per key needs the kernels' general instances. Half-precision
tensor cores have half the rate or less."""


@dataclass(frozen=True)
class Calibration:
    """The recipes of a model's layers. `print` shows them.

    Attributes:
        tolerance: the largest relative L2 error of a head.
        recipes: the recipes that were tried, the cheapest one first.
        layers: the choice for each layer, by name.
    """

    tolerance: float
    recipes: tuple[Recipe, ...]
    layers: dict[str, LayerChoice]

    def recipe_for(self, layer: str, *, masked: bool = False) -> Recipe | None:
        """The recipe for a layer's calls without attn_mask, or with it. None: F.scaled_dot_product_attention computes
        them.

        Raises:
            KeyError: the calibration doesn't have the layer.
        """
        layer = unwrapped_name(layer)
        if layer not in self.layers:
            raise KeyError(f"layer is {layer!r}; it must be one of the calibration: {', '.join(self.layers)}")
        return self.layers[layer].masked if masked else self.layers[layer].recipe

    def applied(self, model: torch.nn.Module, *, strict: bool = False, backend: Backend = "auto") -> contextlib.AbstractContextManager[AppliedReport]:
        """Inside, `sdpa` computes the model's calls of F.scaled_dot_product_attention, each with the recipe of its
        layer.

        F.scaled_dot_product_attention still computes calls that `sdpa` doesn't take (dropout, gradients, float64, other
        head dims) and calls of layers without a recipe; the report says why. See `capture` for the calls that are seen.

        torch.compile compiles the model again inside, with `sdpa` in its graphs.

        Args:
            model: the module that was captured, or one with the same layers. torch.compile, DistributedDataParallel or
                FSDP may wrap it.
            strict: raise an error for calls that F.scaled_dot_product_attention would compute.
            backend: as in `sdpa`.

        Yields:
            An `AppliedReport`.

        Raises:
            TypeError: `model` isn't a module.
            ValueError: `model` has none of the layers, or is or contains a DataParallel; or there is no such backend.
            KeyError: inside, if strict: a layer that isn't in the calibration makes a call.
        """
        return applied(self.layers, model, strict=strict, backend=backend)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a JSON file."""
        Path(path).write_text(files.written(self.tolerance, self.recipes, self.layers), encoding="utf-8")

    @staticmethod
    def load(path: str | PathLike[str]) -> Calibration:
        """Read a file that `save` wrote, of this version or an earlier one.

        Raises:
            ValueError: the file isn't a calibration. The message names the path, what is wrong and what it must be.
        """
        return Calibration(*files.read(path))

    def __str__(self) -> str:
        lines = [f"{len(self.layers)} layers, tolerance {self.tolerance}"]
        for layer, choice in self.layers.items():
            recipe, masked = self._described(choice.recipe), self._described(choice.masked)
            with_mask = "" if masked == recipe else f", with attn_mask {masked}"
            lines.append(f"{shown(layer)}: {recipe}{with_mask}{'' if choice.within else ' (above the tolerance)'}")
        return "\n".join(lines)

    @staticmethod
    def _described(recipe: Recipe | None) -> str:
        """A recipe as text, without fields that have their defaults."""
        if recipe is None:
            return "F.scaled_dot_product_attention"
        default = Recipe()
        changed = {f.name: getattr(recipe, f.name) for f in fields(recipe) if getattr(recipe, f.name) != getattr(default, f.name)}
        return f"Recipe({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


def calibrate(
    calls: Sequence[AttentionCall], *, tolerance: float = 0.06, recipes: Sequence[Recipe] = CANDIDATES, device: torch.device | str | None = None
) -> Calibration:  # fmt: skip
    """Choose for each layer the cheapest recipes with which no head exceeds the tolerance. If there are none, choose
    those with the smallest error.

    On a GPU, errors are measured with the kernels; elsewhere, with the oracle that models the kernels. Autocast and
    other settings of the process don't affect them.

    Args:
        calls: calls of one model, from `capture`; several of a layer if possible.
        tolerance: the largest relative L2 error of a head, compared with exact attention in float32.
        recipes: the recipes to try, the cheapest one first. Calls with attn_mask get a separate recipe, without
            half-precision keys.
        device: the device for the measurement, by default the one on which the model made the call.

    Raises:
        ValueError: there are no calls or no recipes, or the tolerance isn't positive and finite.
        TypeError, ValueError: `sdpa` doesn't take an argument of a call.
    """
    calls, recipes = tuple(calls), tuple(recipes)
    if not calls or not recipes:
        raise ValueError(f"{'recipes' if calls else 'calls'} is empty; there must be one at least")
    for i, call in enumerate(calls):
        if not isinstance(call, AttentionCall):
            raise TypeError(f"calls[{i}] is a {type(call).__name__}; it must be an AttentionCall")
    for recipe in recipes:
        check_recipe(recipe)
    if not 0 < tolerance < math.inf:
        raise ValueError(f"tolerance is {tolerance}; it must be positive and finite")
    names = [unwrapped_name(call.layer) for call in calls]
    unmasked: dict[str, list[list[HeadErrors | None]]] = {name: [] for name in names}
    masked: dict[str, list[list[HeadErrors | None]]] = {name: [] for name in names}
    for name, call in zip(names, calls, strict=True):
        call = call.moved(device)
        of_kind = unmasked if call.checked().attn_mask is None else masked
        of_kind[name].append(errors_of(call, recipes))
    layers = {
        layer: choose(recipes, tolerance, _tried(unmasked[layer], len(recipes)), _tried(masked[layer], len(recipes))) for layer in unmasked
    }  # fmt: skip
    return Calibration(tolerance, recipes, layers)


def _tried(by_call: list[list[HeadErrors | None]], recipes: int) -> tuple[HeadErrors | None, ...]:
    """The largest errors of each recipe, from those of each call."""
    if not by_call:
        return ()
    by_recipe = ([errors[i] for errors in by_call] for i in range(recipes))
    return tuple(None if None in several else merged([errors for errors in several if errors is not None]) for several in by_recipe)
