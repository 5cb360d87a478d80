"""Which calls of a switched model fp8attn computes, and the report of those that it doesn't."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..calibration.calibrated import Calibration
from ..calibration.choice import layers_at
from ..calibration.reasons import Reasons
from ..calibration.replacing import NOT_FINITE, NOT_MASKED, UNCALIBRATED, by_fp8attn, refusal
from ..recipe import DEFAULT_RECIPE, Recipe
from ..validate import Arguments, Backend, check_backend, is_causal_bias

MIN_KEYS = 2048
"""The fewest keys that fp8attn is called for by default. From bf16, calls of 1k tokens have 0.71 to 0.82 times the
speed of cuDNN's bf16, and calls of 4k tokens 1.30 to 1.43 times (H100, D 128, CUDA graphs, commit a40cd4d)."""

Decode = Literal["sdpa", "fp8attn"]


@dataclass(frozen=True)
class Policy:
    """Which calls fp8attn computes.

    Attributes:
        recipe: of every call, or a calibration, which has a recipe for each layer. Recipes with half-precision keys
            take no mask; calls with a mask then run without them.
        min_keys: calls with fewer keys go to PyTorch.
        decode: who computes calls of one query.
        backend: as of `fp8attn.sdpa`.

    Raises:
        TypeError, ValueError: a field isn't as above.
    """

    recipe: Recipe | Calibration = DEFAULT_RECIPE
    min_keys: int = MIN_KEYS
    decode: Decode = "sdpa"
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, (Recipe, Calibration)):
            raise TypeError(f"recipe is a {type(self.recipe).__name__}; it must be a Recipe or a Calibration")
        if type(self.min_keys) is not int or self.min_keys < 0:
            raise ValueError(f"min_keys is {self.min_keys!r}; it must be an integer of 0 or more")
        if self.decode not in ("sdpa", "fp8attn"):
            raise ValueError(f"decode is {self.decode!r}; it must be 'sdpa' or 'fp8attn'")
        check_backend(self.backend)

    @property
    def needs_names(self) -> bool:
        """Whether what happens to a call depends on its layer."""
        return isinstance(self.recipe, Calibration)

    def reason_for_pytorch(self, a: Arguments) -> str | None:
        """Why PyTorch computes a call of tensors (B, H, S, D), or None."""
        if a.dropout_p:
            return f"dropout_p is {a.dropout_p}"
        if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (a.query, a.key, a.value)):
            return "gradients are recorded"
        if a.query.shape[2] == 1 and self.decode == "sdpa":
            return "one query; decode='fp8attn' computes it in FP8"
        return self.reason_for_few_keys(a)

    def reason_for_few_keys(self, a: Arguments) -> str | None:
        """Why PyTorch computes a call, whatever else it is, or None."""
        return f"fewer than min_keys={self.min_keys} keys" if a.key.shape[2] < self.min_keys else None

    def recipe_for(self, layer: str, is_masked: bool, timestep: float | None = None) -> Recipe | str:
        """The recipe of a call with or without a mask, or the reason why there is none.

        Args:
            is_masked: whether keys are hidden otherwise than causally. Windows are masks in calibrations.
            timestep: of a diffusion model, if it is known.
        """
        if isinstance(self.recipe, Recipe):
            return self.recipe.of_call(is_masked, True)
        choice = layers_at(self.recipe.by_step, self.recipe.layers, timestep).get(layer)
        if choice is None:
            return UNCALIBRATED
        recipe = choice.masked if is_masked else choice.recipe
        if recipe is None:
            return NOT_MASKED if is_masked and choice.recipe is not None else NOT_FINITE
        # torch.compile doesn't guard on an object that it also finds as a global
        return replace(recipe) if torch.compiler.is_compiling() else recipe


def check_one_recipe(recipe: object) -> None:
    """Check that a recipe isn't a calibration, for integrations that don't know layers.

    Raises:
        TypeError: it isn't a Recipe.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is a {type(recipe).__name__}; it must be a Recipe: layers aren't known here, but fp8attn.patch takes calibrations")


class Report:
    """Which calls fp8attn computed and which it didn't, by layer. `print` shows a table.

    Calls inside graphs of torch.compile aren't counted.

    Attributes:
        replaced: for each layer, the number of calls that fp8attn computed.
        fallbacks: for each layer, the number of calls that went elsewhere, by reason.

    Args:
        likely_cause: says why there may be no call.
    """

    def __init__(self, likely_cause: Callable[[], str | None] | None = None) -> None:
        self._likely_cause = likely_cause
        self._lock = threading.Lock()
        self.replaced: Counter[str] = Counter()
        self.fallbacks = Reasons()

    def count(self, layer: str, reason: str | None) -> None:
        """Count a call of a layer: one by fp8attn if `reason` is None."""
        if torch.compiler.is_compiling():
            return
        with self._lock:
            if reason is None:
                self.replaced[layer] += 1
            else:
                self.fallbacks.count(layer, reason)

    def clear(self) -> None:
        """Forget all calls."""
        with self._lock:
            self.replaced.clear()
            self.fallbacks.clear()

    def __str__(self) -> str:
        rows = [(layer, str(count), "fp8attn", "") for layer, count in self.replaced.items()]
        rows += [(layer, str(count), "PyTorch", reason) for layer, reasons in self.fallbacks.items() for reason, count in reasons.items()]
        if not rows:
            cause = None if self._likely_cause is None else self._likely_cause()
            return "no call of attention" + ("" if cause is None else f". Likely cause: {cause}")
        rows = [("layer", "calls", "computed by", "because"), *sorted(rows)]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("  ".join((*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3])).rstrip() for row in rows)


Compute = Callable[[Arguments, Recipe, Backend], torch.Tensor]
"""Computes a call by a recipe and a backend."""


def attempted(
    policy: Policy, report: Report, layer: str, a: Arguments, compute: Compute = by_fp8attn, timestep: float | None = None
) -> torch.Tensor | None:
    """A call by fp8attn, through `compute`, if the policy says so and `fp8attn.sdpa` takes it.

    Otherwise None, and the report gets the reason.

    Args:
        timestep: of a diffusion model, if it is known.
    """
    reason: str | None = policy.reason_for_pytorch(a)
    is_masked = a.window is not None or (a.attn_mask is not None and not is_causal_bias(a.attn_mask))
    recipe = reason if reason is not None else policy.recipe_for(layer, is_masked, timestep)
    if isinstance(recipe, str):
        reason = recipe
    else:
        recipe = recipe.of_call(a.softcap != 0 or a.sinks is not None, a.is_causal or is_causal_bias(a.attn_mask))
        if torch.compiler.is_compiling():
            reason = refusal(a, recipe)
        if reason is None:
            try:
                out = compute(a, recipe, policy.backend)
            except (TypeError, ValueError, RuntimeError) as error:
                if torch.compiler.is_compiling() or refusal(a, recipe) is None:
                    raise
                reason = str(error)
            else:
                report.count(layer, None)
                return out
    report.count(layer, reason)
    return None
