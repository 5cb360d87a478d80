"""Replaces a model's calls of attention by calls of fp8attn, each with the recipe of its layer."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from ..api import sdpa
from ..recipe import Recipe
from ..validate import Arguments, Backend, check, check_backend, is_causal_bias
from .calls import as_cast
from .choice import LayerChoice
from .interception import intercepted
from .names import layer_names, shown, unwrapped
from .reasons import Reasons, calls, likely_causes

UNCALIBRATED = "the layer isn't in the calibration"
NOT_FINITE = "the calibration found no recipe with finite answers for the layer"
NOT_MASKED = "attn_mask is given, and all recipes of the calibration keep keys"
REFUSED_IN_GRAPH = "fp8attn.sdpa doesn't take the arguments; call the model without torch.compile to see why"

Compiled = dict[str, set[str | None]]
"""For each layer that torch.compile traced, the reasons why calls go to F.scaled_dot_product_attention; None for calls
that go to fp8attn."""

_compiled: weakref.WeakKeyDictionary[torch.nn.Module, Compiled] = weakref.WeakKeyDictionary()
"""By model, because a later context with equal recipes uses the graphs of an earlier one."""


class AppliedReport:
    """Which calls fp8attn computed, and which it didn't. `print` shows it.

    Attributes:
        replaced: for each layer, the number of calls that fp8attn computed. Calls inside graphs of torch.compile aren't
            counted.
        fallbacks: for each layer, the number of calls that F.scaled_dot_product_attention computed, by reason. Calls
            inside graphs of torch.compile aren't counted.
        compiled: the layers inside graphs of torch.compile, of this context and of earlier ones with the same model.
            For each layer, the reasons why F.scaled_dot_product_attention computes calls, and None if fp8attn computes
            calls.
    """

    def __init__(self, calibrated: Mapping[str, LayerChoice], compiled: Compiled) -> None:
        self._calibrated = calibrated
        self._lock = threading.Lock()
        self.replaced: Counter[str] = Counter()
        self.fallbacks = Reasons()
        self.compiled = compiled

    @property
    def compiled_by_fp8attn(self) -> list[str]:
        """The layers for which graphs of torch.compile contain fp8attn's operators."""
        return [layer for layer, reasons in self.compiled.items() if None in reasons]

    @property
    def never_called(self) -> list[str]:
        """The calibrated layers that made no call."""
        return [layer for layer in self._calibrated if layer not in {*self.replaced, *self.fallbacks, *self.compiled}]

    def __str__(self) -> str:
        lines = [f"{calls(self.replaced.total())} of {len(self.replaced)} layers by fp8attn"]
        lines += self.fallbacks.lines("by F.scaled_dot_product_attention")
        if self.compiled_by_fp8attn:
            lines.append(f"graphs of torch.compile: {len(self.compiled_by_fp8attn)} layers by fp8attn; their calls aren't counted")
        for layer, reasons in self.compiled.items():
            of_layer = f"graphs of torch.compile: {shown(layer)} by F.scaled_dot_product_attention"
            lines += [f"{of_layer}: {reason}" for reason in reasons if reason is not None]
        if self.never_called:
            lines.append(f"calibrated but never called: {', '.join(map(shown, self.never_called))}")
        return "\n".join(lines)

    def count_replaced(self, layer: str) -> None:
        """Count a call that fp8attn computed."""
        with self._lock:
            self.replaced[layer] += 1

    def count_fallback(self, layer: str, reason: str) -> bool:
        """Count a call that F.scaled_dot_product_attention computes. Returns whether it is the first one."""
        with self._lock:
            is_first = not self.fallbacks
            self.fallbacks.count(layer, reason)
        return is_first

    def note_traced(self, layer: str, reason: str | None) -> None:
        """Note a call that torch.compile traces. It runs while torch.compile traces, not when the graph runs."""
        self.compiled.setdefault(layer, set()).add(reason)

    # does what torch._dynamo.assume_constant_result does, without importing torch._dynamo, which takes seconds
    note_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Replacer:
    """The handler of `Calibration.applied`."""

    def __init__(self, layers: Mapping[str, LayerChoice], backend: Backend, strict: bool, report: AppliedReport) -> None:
        self.layers = layers
        # torch.compile doesn't guard on an object that it also finds as a global, such as fp8attn.PRECISE: it would
        # reuse a graph for other recipes
        self.copies = {layer: replace(choice, recipe=_copied(choice.recipe), masked=_copied(choice.masked)) for layer, choice in layers.items()}
        self.backend = backend
        self.strict = strict
        self.report = report

    def attention(self, layer: str, arguments: Arguments, original: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Compute a call by fp8attn if possible."""
        if layer not in self.layers:
            if self.strict:
                raise KeyError(f"layer is {layer!r}; it must be one of the calibration: {', '.join(self.layers)}")
            return self.fall_back(layer, UNCALIBRATED, original)
        choice = (self.copies if torch.compiler.is_compiling() else self.layers)[layer]
        is_masked = arguments.attn_mask is not None and not is_causal_bias(arguments.attn_mask)
        recipe = choice.masked if is_masked else choice.recipe
        if recipe is None:
            reason = NOT_MASKED if is_masked and choice.recipe is not None else NOT_FINITE
            if self.strict:
                raise ValueError(f"layer is {layer!r}; {reason}")
            return self.fall_back(layer, reason, original)
        if torch.compiler.is_compiling():
            return self.trace(layer, arguments, recipe, original)
        try:
            out = by_fp8attn(arguments, recipe, self.backend)
        except (TypeError, ValueError, RuntimeError) as error:
            # after the call, so that calls that succeed aren't checked twice
            if self.strict or refusal(arguments, recipe) is None:
                raise
            return self.fall_back(layer, str(error), original)
        self.report.count_replaced(layer)
        return out

    def trace(self, layer: str, arguments: Arguments, recipe: Recipe, original: Callable[[], torch.Tensor]) -> torch.Tensor:
        """`attention` while torch.compile traces."""
        if not self.strict and refusal(arguments, recipe) is not None:
            return self.fall_back(layer, REFUSED_IN_GRAPH, original)
        self.report.note_traced(layer, None)
        return by_fp8attn(arguments, recipe, self.backend)

    def fall_back(self, layer: str, reason: str, original: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Make the call as the model made it."""
        if torch.compiler.is_compiling():
            self.report.note_traced(layer, reason)
        elif self.report.count_fallback(layer, reason):
            warnings.warn(
                f"fp8attn: F.scaled_dot_product_attention computes a call of layer {layer!r}: {reason}. The report that Calibration.applied yields"
                " counts all such calls; with strict=True they are errors.",
                stacklevel=2,
            )
        return original()

    def unseen(self, layer: str, reason: str) -> None:
        """Count attention that the layer computed without a call."""
        if torch.compiler.is_compiling():
            self.report.note_traced(layer, reason)
        else:
            self.report.count_fallback(layer, reason)


def _copied(recipe: Recipe | None) -> Recipe | None:
    return None if recipe is None else replace(recipe)


def by_fp8attn(a: Arguments, recipe: Recipe, backend: Backend) -> torch.Tensor:
    """A model's call, by fp8attn.sdpa."""
    out = _by_sdpa(a, recipe, backend, return_lse=False)
    assert isinstance(out, torch.Tensor)
    return out


def with_lse(a: Arguments, recipe: Recipe, backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    """A model's call (B, Hq, Sq, Dv) and its LSE (B, Hq, Sq), float32, by fp8attn.sdpa."""
    found = _by_sdpa(a, recipe, backend, return_lse=True)
    assert isinstance(found, tuple)
    return found


def _by_sdpa(a: Arguments, recipe: Recipe, backend: Backend, return_lse: bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return sdpa(
        a.query, a.key, a.value, a.attn_mask, a.dropout_p, a.is_causal, a.scale, a.enable_gqa, window=a.window, softcap=a.softcap, sinks=a.sinks,
        recipe=recipe, return_lse=return_lse, backend=backend,
    )  # fmt: skip


def refusal(a: Arguments, recipe: Recipe) -> str | None:
    """Why fp8attn.sdpa doesn't take the arguments, or None if it does.

    Other errors, such as a failed launch, aren't a reason to fall back.
    """
    a = as_cast(a)
    try:
        check(replace(a, recipe=recipe))
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return None


@contextlib.contextmanager
def applied(layers: Mapping[str, LayerChoice], model: torch.nn.Module, *, strict: bool, backend: Backend) -> Iterator[AppliedReport]:
    """See `Calibration.applied`."""
    check_backend(backend)
    names = {name for of_module in layer_names(model).values() for name in of_module}
    if not any(layer.partition("#")[0] in names for layer in layers):
        raise ValueError(f"model has none of the calibration's layers: {', '.join(map(repr, layers))}; it must be the module that was captured")
    report = AppliedReport(layers, _compiled.setdefault(unwrapped(model), {}))
    with intercepted(model, _Replacer(layers, backend, strict, report), traceable=True) as interception:
        yield report
    if not report.replaced and not report.compiled_by_fp8attn:
        warnings.warn(f"fp8attn computed no call of the model. Likely cause: {likely_causes(model, interception, report.fallbacks)}", stacklevel=3)
