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
