"""Finds recipes for the layers of a model, stores them and applies them."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ..recipe import PRECISE, Recipe
from ..validate import Backend, check_recipe
from . import files, reporting
from .calls import AttentionCall
from .choice import LayerChoice, LayerCost, StepRange, choose, layers_at
from .errors import HeadErrors, errors_of, merged
from .interception import intercepted
from .names import module_of, shown, unwrapped_name
from .reasons import likely_causes
from .replacing import AppliedReport, applied
from .streaming import Measured, Meter

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
        by_step: for a diffusion model, the choices for parts of its steps, those of large timesteps first.
        costs: the time of each layer's calls, by name, if a model was run.
    """

    tolerance: float
    recipes: tuple[Recipe, ...]
    layers: dict[str, LayerChoice]
    by_step: tuple[StepRange, ...] = ()
    costs: dict[str, LayerCost] = field(default_factory=dict)

    def recipe_for(self, layer: str, *, masked: bool = False, timestep: float | None = None) -> Recipe | None:
        """The recipe for a layer's calls without attn_mask, or with it. None: F.scaled_dot_product_attention computes
        them.

        Args:
            timestep: of a diffusion model; without it, the recipe for all steps.

        Raises:
            KeyError: the calibration doesn't have the layer.
        """
        layer = unwrapped_name(layer)
        layers = layers_at(self.by_step, self.layers, timestep)
        if layer not in layers:
            raise KeyError(f"layer is {layer!r}; it must be one of the calibration: {', '.join(layers)}")
        return layers[layer].masked if masked else layers[layer].recipe

    def table(self) -> str:
        """The largest error of each layer by each recipe, what was chosen, and predicted times."""
        return reporting.table(self)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the errors of all layers by all recipes. The suffix of the path, such as .png or .svg, is the format.

        Raises:
            ImportError: matplotlib isn't installed.
        """
        reporting.plot(self, path)

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
        Path(path).write_text(files.written(self.tolerance, self.recipes, self.layers, self.by_step, self.costs), encoding="utf-8")

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
            recipe, masked = reporting.described(choice.recipe), reporting.described(choice.masked)
            with_mask = "" if masked == recipe else f", with attn_mask {masked}"
            lines.append(f"{shown(layer)}: {recipe}{with_mask}{'' if choice.within else ' (above the tolerance)'}")
        return "\n".join(lines)


def calibrate(
    model: Any,
    inputs: Any = None,
    *,
    tolerance: float = 0.06,
    recipes: Sequence[Recipe] = CANDIDATES,
    device: torch.device | str | None = None,
    step_ranges: int = 1,
    calls_per_layer: int = 4,
) -> Calibration:
    """Choose for each layer the cheapest recipes with which no head exceeds the tolerance. If there are none, choose
    those with the smallest error.

    A model or a pipeline is run on the inputs, and its calls of attention are measured as they are made: nothing of
    them is kept. Or calls that `capture` recorded are measured.

    On a GPU, errors are measured with the kernels, and times, too; elsewhere, with the oracle that models the kernels.
    Autocast and other settings of the process don't affect them.

    Args:
        model: a module, or a pipeline of diffusers, of which the modules are calibrated that run in every step. Or
            calls of one model, from `capture`; several of a layer if possible.
        inputs: of a module or a pipeline: a dict of keyword arguments, a tuple of positional ones, one tensor, a
            function that is called with it, or a list of such inputs.
        tolerance: the largest relative L2 error of a head, compared with exact attention in float32.
        recipes: the recipes to try, the cheapest one first. Calls with attn_mask get a separate recipe, without
            half-precision keys.
        device: the device for the measurement of recorded calls, by default the one on which the model made the call.
        step_ranges: into how many parts a diffusion model's steps are divided, each with choices of its own. The
            model's forward must have an argument `timestep`.
        calls_per_layer: the largest number of calls of a layer and a part of the steps that are measured: the first of
            each kind (prefill or decode, with or without a mask), and then others at even distances.

    Raises:
        ValueError: there are no calls or no recipes, or the tolerance isn't positive and finite; the model makes no
            call that can be measured; there are fewer timesteps than `step_ranges`.
        TypeError, ValueError: `sdpa` doesn't take an argument of a recorded call, or an argument isn't as above.
    """
    recipes = tuple(recipes)
    if not recipes:
        raise ValueError("recipes is empty; there must be one at least")
    for recipe in recipes:
        check_recipe(recipe)
    if not 0 < tolerance < math.inf:
        raise ValueError(f"tolerance is {tolerance}; it must be positive and finite")
    for name, number in (("step_ranges", step_ranges), ("calls_per_layer", calls_per_layer)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name} is {number!r}; it must be a positive integer")
    if isinstance(model, Sequence):
        if inputs is not None:
            raise TypeError("inputs is given, and model is a list of calls; calls have their inputs")
        return _of_calls(tuple(model), tolerance, recipes, device)
    return _of_model(model, inputs, tolerance, recipes, step_ranges, calls_per_layer)


def _of_calls(calls: tuple[AttentionCall, ...], tolerance: float, recipes: tuple[Recipe, ...], device: torch.device | str | None) -> Calibration:
    """A calibration by recorded calls."""
    if not calls:
        raise ValueError("calls is empty; there must be one at least")
    for i, call in enumerate(calls):
        if not isinstance(call, AttentionCall):
            raise TypeError(f"calls[{i}] is a {type(call).__name__}; it must be an AttentionCall")
    measured: list[tuple[str, bool, list[HeadErrors | None]]] = []
    for call in calls:
        moved = call.moved(device)
        measured.append((unwrapped_name(call.layer), moved.checked().attn_mask is not None, errors_of(moved, recipes)))
    return Calibration(tolerance, recipes, _choices(tolerance, recipes, measured))


def _of_model(model: Any, inputs: Any, tolerance: float, recipes: tuple[Recipe, ...], step_ranges: int, calls_per_layer: int) -> Calibration:
    """A calibration by running a model or a pipeline."""
    module = module_of(model)
    if inputs is None:
        raise TypeError("inputs is None; it must be what the model is called with, or model must be a list of calls")
    meter = Meter(recipes, calls_per_layer * step_ranges)
    with torch.no_grad(), intercepted(module, meter, traceable=False) as interception:
        for one in inputs if isinstance(inputs, list) else [inputs]:
            _run(model, one)
    if not meter.measured:
        raise ValueError(f"model made no call that can be measured. Likely cause: {likely_causes(module, interception, meter.left_out)}")
    found = [(unwrapped_name(layer), one) for (layer, _), one in meter.measured.items()]
    layers = _choices(tolerance, recipes, [(layer, one.is_masked, one.errors) for layer, one in found])
    by_step: list[StepRange] = []
    for steps in _parts({one.timestep for _, one in found}, step_ranges) if step_ranges > 1 else ():
        of_steps = [(layer, one.is_masked, one.errors) for layer, one in found if one.timestep in steps]
        by_step.append(StepRange(max(steps), min(steps), _choices(tolerance, recipes, of_steps)))
    costs = {
        unwrapped_name(layer): _cost(count, [one for name, one in found if name == unwrapped_name(layer)]) for layer, count in meter.counts.items()
    }
    return Calibration(tolerance, recipes, layers, tuple(by_step), costs)


def _run(model: Any, inputs: Any) -> None:
    """Call a model with its inputs."""
    if isinstance(inputs, dict):
        model(**inputs)
    elif isinstance(inputs, (tuple, torch.Tensor)):
        model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    elif callable(inputs):
        inputs(model)
    else:
        raise TypeError(f"inputs has a {type(inputs).__name__}; it must be a dict, a tuple, a tensor, a function, or a list of them")


def _parts(timesteps: set[float | None], count: int) -> list[list[float]]:
    """Timesteps in so many parts of equal size, the largest first.

    Raises:
        ValueError: there are fewer, or a forward had none.
    """
    known = sorted((step for step in timesteps if step is not None), reverse=True)
    if len(known) < count or None in timesteps:
        raise ValueError(f"step_ranges is {count}; the model's forward must have an argument timestep, with as many values: it had {len(known)}")
    edges = [round(i * len(known) / count) for i in range(count + 1)]
    return [known[start:stop] for start, stop in itertools.pairwise(edges)]


def _cost(calls: int, measured: list[Measured]) -> LayerCost:
    """The predicted time of all calls of a layer, from those that were measured."""

    def total(times: list[float | None]) -> float | None:
        there = [ms for ms in times if ms is not None]
        return statistics.fmean(there) * calls if there and len(there) == len(times) else None

    by_recipe = zip(*(one.milliseconds for one in measured), strict=True)
    return LayerCost(calls, total([one.sdpa for one in measured]), tuple(total(list(times)) for times in by_recipe))


def _choices(tolerance: float, recipes: tuple[Recipe, ...], measured: Sequence[tuple[str, bool, list[HeadErrors | None]]]) -> dict[str, LayerChoice]:
    """The choice for each layer.

    Args:
        measured: the layer of a call, whether it has an attn_mask, and the errors of each recipe.
    """
    by_layer: dict[str, tuple[list[list[HeadErrors | None]], list[list[HeadErrors | None]]]] = {}
    for layer, is_masked, errors in measured:
        by_layer.setdefault(layer, ([], []))[is_masked].append(errors)
    return {
        layer: choose(recipes, tolerance, _tried(unmasked, len(recipes)), _tried(masked, len(recipes)))
        for layer, (unmasked, masked) in by_layer.items()
    }


def _tried(by_call: list[list[HeadErrors | None]], recipes: int) -> tuple[HeadErrors | None, ...]:
    """The largest errors of each recipe, from those of each call."""
    if not by_call:
        return ()
    by_recipe = ([errors[i] for errors in by_call] for i in range(recipes))
    return tuple(None if None in several else merged([errors for errors in several if errors is not None]) for several in by_recipe)
