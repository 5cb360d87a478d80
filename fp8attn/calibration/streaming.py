"""Measures the errors of recipes while a model runs, call by call. No call is kept."""

from __future__ import annotations

import functools
import inspect
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..ambient import shielded
from ..api import sdpa
from ..recipe import Recipe
from ..validate import Arguments
from .calls import AttentionCall, as_cast, call_of, checked_call, kind_of
from .errors import HeadErrors, errors_of
from .reasons import Reasons
from .selection import Place, Selection

TIMED_CALLS = 3
"""Calls of which the median time counts, after one that isn't timed."""


@dataclass(frozen=True)
class Measured:
    """The errors and times of every recipe on one call.

    Attributes:
        timestep: of the forward that made the call, if the model's forward has an argument of this name.
        is_masked: whether the call has an attn_mask.
        errors: by recipe; None for recipes that don't take the call.
        sdpa: milliseconds of F.scaled_dot_product_attention, on a GPU.
        milliseconds: of fp8attn.sdpa, by recipe, on a GPU.
    """

    timestep: float | None
    is_masked: bool
    errors: list[HeadErrors | None]
    sdpa: float | None
    milliseconds: tuple[float | None, ...]


class Meter:
    """A handler of intercepted calls that measures some of each layer's calls.

    Attributes:
        measured: by layer and place, the first call of each kind and then calls at even distances.
        counts: the number of calls of each layer.
        left_out: for each layer, the number of calls that couldn't be measured, by reason.
    """

    def __init__(self, recipes: Sequence[Recipe], calls_per_layer: int) -> None:
        self.recipes, self.calls_per_layer = tuple(recipes), calls_per_layer
        self.measured: dict[tuple[str, Place], Measured] = {}
        self.counts: dict[str, int] = {}
        self.left_out = Reasons()
        self._selections: dict[str, Selection] = {}
        self._lock = threading.Lock()
        self._current = threading.local()

    def began(self, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note the timestep of a forward."""
        self._current.timestep = timestep_of(forward, args, kwargs)

    def attention(self, layer: str, arguments: Arguments, original: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Measure a call if it is selected, and make it."""
        arguments = as_cast(arguments)
        try:
            with torch.no_grad():
                checked = checked_call(arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            self.unseen(layer, str(error))
            return original()
        with self._lock:
            self.counts[layer] = self.counts.get(layer, 0) + 1
            place, dropped = self._selections.setdefault(layer, Selection(self.calls_per_layer)).offer(kind_of(checked))
            for other in dropped:
                self.measured.pop((layer, other), None)
        if place is not None:
            found = self.measure(call_of(layer, arguments), checked.attn_mask is not None)
            with self._lock:
                self.measured[layer, place] = found
        return original()

    def unseen(self, layer: str, reason: str) -> None:
        """Count a call that can't be measured."""
        with self._lock:
            self.left_out.count(layer, reason)

    def measure(self, call: AttentionCall, is_masked: bool) -> Measured:
        """The errors of all recipes on a call, and on a GPU their times."""
        errors = errors_of(call, self.recipes)
        by_pytorch: float | None = None
        times: list[float | None] = [None] * len(self.recipes)
        if call.query.device.type == "cuda":
            by_pytorch = _milliseconds(functools.partial(_by_pytorch, call))
            times = [
                None if found is None else _milliseconds(functools.partial(_by_fp8attn, call, recipe))
                for recipe, found in zip(self.recipes, errors, strict=True)
            ]  # fmt: skip
        return Measured(getattr(self._current, "timestep", None), is_masked, errors, by_pytorch, tuple(times))


def timestep_of(forward: Callable, args: tuple, kwargs: dict[str, Any]) -> float | None:
    """The first element of the argument `timestep` of a forward, or None if it has none."""
    found = kwargs.get("timestep")
    if found is None and args:
        place = _place_of_timestep(forward)
        found = args[place] if place is not None and place < len(args) else None
    if isinstance(found, torch.Tensor):
        return float(found.flatten()[0]) if found.numel() else None
    return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None


@functools.lru_cache(maxsize=64)
def _place_of_timestep(forward: Callable) -> int | None:
    """The index of the argument among a forward's positional ones."""
    try:
        names = list(inspect.signature(forward).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("timestep") if "timestep" in names else None


@shielded
def _by_pytorch(call: AttentionCall) -> torch.Tensor:
    causal = call.is_causal and call.causal_alignment == "top_left"
    return F.scaled_dot_product_attention(call.query, call.key, call.value, call.attn_mask, 0.0, causal, scale=call.scale, enable_gqa=True)


@shielded
def _by_fp8attn(call: AttentionCall, recipe: Recipe) -> object:
    return sdpa(
        call.query, call.key, call.value, call.attn_mask, is_causal=call.is_causal, scale=call.scale, enable_gqa=True,
        causal_alignment=call.causal_alignment, recipe=recipe,
    )  # fmt: skip


def _milliseconds(run: Callable[[], object]) -> float:
    """The median time of a call on a GPU."""
    with torch.no_grad():
        run()
        times = []
        for _ in range(TIMED_CALLS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return statistics.median(times)
