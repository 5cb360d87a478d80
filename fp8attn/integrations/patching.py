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


CHECKED = 64
"""Of the forwards that are known to be short, each that is so many after the last one is intercepted."""

MOST_KNOWN = 64
"""Kinds of forwards that are known."""

Refusals = list[tuple[str, str]]
"""The calls of a forward that went to PyTorch: layers and reasons."""


def kind_of(x: object) -> Any:
    """What alike arguments have in common: numbers and texts, and shapes, dtypes and devices of tensors.

    Raises:
        TypeError: an argument is something else, as a cache is, whose contents may change.
    """
    if type(x) is torch.Tensor:
        return x.shape, x.dtype, x.device
    if x is None or isinstance(x, (bool, int, float, str, torch.dtype)):
        return type(x), x
    if type(x) in (tuple, list):
        return tuple(kind_of(one) for one in x)  # type: ignore[attr-defined]
    if type(x) is dict:
        return tuple((name, kind_of(one)) for name, one in x.items())
    raise TypeError(f"{type(x).__name__} may change")


def kind_of_forward(forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The module, and `kind_of` its arguments; None if these may change."""
    own = isinstance(args[0], torch.nn.Module) if args else False  # forward is a function of the module's class
    try:
        return id(args[0] if own else forward), torch.is_grad_enabled(), kind_of((args[1:] if own else args, kwargs))
    except TypeError:
        return None


class _ShortForwards:
    """Kinds of forwards of which all calls have few keys, and go to PyTorch.

    A function mode costs the CPU 60 to 100 µs a layer. So these forwards aren't intercepted again, but for some: a
    module may keep keys of its own, of which there are more and more.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Refusals, int]] = {}

    def refusals(self, kind: Any) -> Refusals | None:
        """The refused calls of a kind of forwards that needn't be intercepted, or None."""
        found, count = self._known.get(kind, (None, 0))
        if found is None or count + 1 == CHECKED:
            return None
        self._known[kind] = found, count + 1
        return found

    def learn(self, kind: Any, refusals: Refusals | None) -> None:
        """Note the calls of a forward; None: not all of them were short."""
        self._known.pop(kind, None)
        if refusals:
            if len(self._known) == MOST_KNOWN:
                self._known.clear()
            self._known[kind] = refusals, 0


class _Current(threading.local):
    """The forward of a thread.

    Attributes:
        timestep: of a diffusion model.
        kind: of `kind_of`, or None if there is none.
        refusals: of its calls so far; None if one wasn't short.
    """

    timestep: float | None = None
    kind: Any = None
    refusals: Refusals | None = None


class _Switch:
    """The handler of the intercepted calls."""

    def __init__(self, policy: Policy, skip: Collection[str]) -> None:
        self.policy, self.skip = policy, tuple(skip)
        self.report = Report()
        self._current, self._short = _Current(), _ShortForwards()

    @property
    def needs_names(self) -> bool:
        """Whether what happens to a call depends on its layer."""
        return bool(self.skip) or self.policy.needs_names

    def began(self, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Note the timestep of a diffusion model, if recipes depend on it. Returns whether to intercept the forward."""
        if isinstance(self.policy.recipe, Calibration) and self.policy.recipe.by_step:
            self._current.timestep = timestep_of(forward, args, kwargs)
        kind = self._current.kind = kind_of_forward(forward, args, kwargs)
        self._current.refusals = []
        known = None if kind is None else self._short.refusals(kind)
        for layer, reason in known or ():
            self.report.count(layer, reason)
        return known is None

    def ended(self) -> None:
        if self._current.kind is not None:
            self._short.learn(self._current.kind, self._current.refusals)

    def attention(self, layer: str, arguments: Arguments, original: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A call by fp8attn if the policy and `skip` say so, or else by `original`."""
        if any(fnmatch.fnmatchcase(layer, pattern) for pattern in self.skip):
            self._current.refusals = None
            self.report.count(layer, "skip names it")
            return original()
        # in a graph, choices can't depend on a tensor's value
        timestep = None if torch.compiler.is_compiling() else self._current.timestep
        out = attempted(self.policy, self.report, layer, arguments, timestep=timestep)
        if out is None and not torch.compiler.is_compiling():
            self._note_refusal(layer, arguments)
        elif not torch.compiler.is_compiling():
            self._current.refusals = None
        return original() if out is None else out

    def _note_refusal(self, layer: str, arguments: Arguments) -> None:
        """Note a call of the forward that goes to PyTorch."""
        reason, refusals = self.policy.reason_for_pytorch(arguments), self._current.refusals
        if reason is None or reason != self.policy.reason_for_few_keys(arguments):
            self._current.refusals = None
        elif refusals is not None:
            refusals.append((layer, reason))

    def unseen(self, layer: str, reason: str) -> None:
        self._current.refusals = None
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
