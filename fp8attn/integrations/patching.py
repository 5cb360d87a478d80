"""Switches any module that calls F.scaled_dot_product_attention."""

from __future__ import annotations

import fnmatch
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch

from ..calibration.calibrated import Calibration
from ..calibration.interception import intercept
from ..calibration.names import module_of
from ..calibration.reasons import Reasons, likely_causes
from ..calibration.streaming import timestep_of
from ..recipe import DEFAULT_RECIPE, Recipe
from ..validate import Arguments, Backend
from .switching import MIN_KEYS, Decode, Policy, Report, attempted


class Patched:
    """A switched model: until `undo`, or inside `with`.

    Attributes:
        report: which calls fp8attn computed, and which not.
    """

    def __init__(self, model: torch.nn.Module, handler: _Switch) -> None:
        interception, self._end = intercept(model, handler, traceable=True, names_in_graphs=handler.needs_names)
        reference = weakref.ref(model)

        def likely_cause() -> str | None:
            there = reference()
            return None if there is None else likely_causes(there, interception, Reasons())

        self.report = handler.report = Report(likely_cause)

    def undo(self) -> None:
        """The model calls PyTorch's attention again. Nothing happens if it already does."""
        self._end()

    def __enter__(self) -> Report:
        return self.report

    def __exit__(self, *_: object) -> None:
        self.undo()


class _Switch:
    """The handler of the intercepted calls."""

    def __init__(self, policy: Policy, skip: Collection[str]) -> None:
        self.policy, self.skip = policy, tuple(skip)
        self.report = Report()

        self._current = threading.local()

    @property
    def needs_names(self) -> bool:
        """Whether what happens to a call depends on its layer."""
        return bool(self.skip) or self.policy.needs_names

    def began(self, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note the timestep of a diffusion model's forward, if recipes depend on it."""
        if isinstance(self.policy.recipe, Calibration) and self.policy.recipe.by_step:
            self._current.timestep = timestep_of(forward, args, kwargs)

    def attention(self, layer: str, arguments: Arguments, original: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A call by fp8attn if the policy and `skip` say so, or else by `original`."""
        if any(fnmatch.fnmatchcase(layer, pattern) for pattern in self.skip):
            self.report.count(layer, "skip names it")
            return original()
        # in a graph, choices can't depend on a tensor's value
        timestep = None if torch.compiler.is_compiling() else getattr(self._current, "timestep", None)
        out = attempted(self.policy, self.report, layer, arguments, timestep=timestep)
        return original() if out is None else out

    def unseen(self, layer: str, reason: str) -> None:
        self.report.count(layer, reason)


def patch(
    model: Any,
    recipe: Recipe | Calibration = DEFAULT_RECIPE,
    *,
    min_keys: int = MIN_KEYS,
    skip: Collection[str] = (),
    decode: Decode = "sdpa",
    backend: Backend = "auto",
) -> Patched:
    """Switch a model's calls of F.scaled_dot_product_attention to fp8attn, in all threads.

    This includes the calls of nn.MultiheadAttention. `fp8attn.patch(model)` switches the model for good, and
    `with fp8attn.patch(model) as report:` switches it inside the block.

    Args:
        model: any module; or a pipeline of diffusers, of which the modules are switched that run in every step.
        recipe: of every call. Recipes with half-precision keys take no mask; calls with a mask then run without them.
            Or a calibration of the model, which has a recipe for each layer. Its choices for parts of a diffusion
            model's steps count in eager calls; graphs of torch.compile have those for all steps.
        min_keys: calls with fewer keys go to PyTorch.
        skip: patterns of layer names, as of `fnmatch`, whose calls go to PyTorch.
        decode: who computes calls of one query.
        backend: as of `fp8attn.sdpa`.

    Returns:
        an object with the `report` and with `undo()`.

    Raises:
        TypeError, ValueError: an argument isn't as above; `model` contains a DataParallel.
    """
    if isinstance(skip, str) or not all(isinstance(pattern, str) for pattern in skip):
        raise TypeError(f"skip is {skip!r}; it must be a collection of patterns of layer names")
    return Patched(module_of(model), _Switch(Policy(recipe, min_keys, decode, backend), skip))
