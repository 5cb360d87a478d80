"""Chooses the recipes of a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..recipe import Recipe
from .errors import HeadErrors

Tried = tuple[HeadErrors | None, ...]
"""The errors of every recipe that was tried, in their order. None: the recipe doesn't support such calls. Empty: there
was no such call."""


@dataclass(frozen=True)
class LayerChoice:
    """The recipes of a layer, and the errors of every recipe that was tried.

    Attributes:
        recipe: for calls without attn_mask. None: no recipe gave finite answers, and F.scaled_dot_product_attention
            computes the calls.
        masked: for calls with attn_mask. It has no half-precision keys, because such recipes take no mask. None: as for
            `recipe`.
        within: whether these recipes meet the tolerance on the calls that were measured. Otherwise they are those with
            the smallest error.
        tried: errors on calls without attn_mask, in the order of `Calibration.recipes`; empty if no such call was
            measured.
        tried_masked: errors on calls with attn_mask, in the same order; empty if no such call was measured. None for
            recipes with half-precision keys.
    """

    recipe: Recipe | None
    masked: Recipe | None
    within: bool
    tried: Tried
    tried_masked: Tried = ()


@dataclass(frozen=True)
class StepRange:
    """The choices for a part of a diffusion model's steps.

    Attributes:
        first, last: the largest and the smallest timestep, as the model's forward gets it.
        layers: the choice for each layer, by name.
    """

    first: float
    last: float
    layers: dict[str, LayerChoice]


def layers_at(ranges: Sequence[StepRange], layers: dict[str, LayerChoice], timestep: float | None) -> dict[str, LayerChoice]:
    """The choices for a timestep.

    Args:
        ranges: those of large timesteps first. A timestep between two of them is in the later one.
        layers: the choices if there are no ranges, or if the timestep isn't known.
    """
    if timestep is None or not ranges:
        return layers
    return next((one.layers for one in ranges if timestep >= one.last), ranges[-1].layers)


@dataclass(frozen=True)
class LayerCost:
    """Times of a layer's calls, in milliseconds of all its calls in the calibration's inputs.

    Attributes:
        calls: number of calls.
        sdpa: predicted time of F.scaled_dot_product_attention; None if it wasn't measured, as on a CPU.
        milliseconds: of `fp8attn.sdpa`, in the order of `Calibration.recipes`; None likewise.
    """

    calls: int
    sdpa: float | None
    milliseconds: tuple[float | None, ...]


def choose(recipes: Sequence[Recipe], tolerance: float, tried: Tried, tried_masked: Tried) -> LayerChoice:
    """The cheapest recipes within the tolerance.

    If no call with a mask was measured, calls without one decide, and the other way round.
    """
    recipe, within = cheapest(recipes, tolerance, tried or tried_masked)
    masked, masked_within = cheapest(recipes, tolerance, without_half_keys(recipes, tried_masked or tried))
    return LayerChoice(recipe, masked, (within or not tried) and (masked_within or not tried_masked), tried, tried_masked)


def cheapest(recipes: Sequence[Recipe], tolerance: float, tried: Tried) -> tuple[Recipe | None, bool]:
    """The first recipe within the tolerance, and True; else the one with the smallest finite error if there is one, and
    False."""
    worst = [math.inf if errors is None else max(errors.relative_l2) for errors in tried]
    finite = [i for i, error in enumerate(worst) if math.isfinite(error)]
    if not finite:
        return None, False
    chosen = next((i for i in finite if worst[i] <= tolerance), min(finite, key=lambda i: worst[i]))
    return recipes[chosen], worst[chosen] <= tolerance


def without_half_keys(recipes: Sequence[Recipe], tried: Tried) -> Tried:
    """The errors, with None for recipes with half-precision keys."""
    return tuple(None if recipe.has_half_keys else errors for recipe, errors in zip(recipes, tried, strict=True))
