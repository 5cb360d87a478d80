"""Which calls of a switched model fp8attn computes, and the report of those that it doesn't."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from ..api import sdpa
from ..calibration.reasons import Reasons
from ..calibration.replacing import by_fp8attn, refusal
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
        recipe: of every call. Recipes with half-precision keys take no mask; calls with a mask then run without them.
        min_keys: calls with fewer keys go to PyTorch.
        decode: who computes calls of one query.
        backend: as of `fp8attn.sdpa`.

    Raises:
        TypeError, ValueError: a field isn't as above.
    """

    recipe: Recipe = DEFAULT_RECIPE
    min_keys: int = MIN_KEYS
    decode: Decode = "sdpa"
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Recipe):
            raise TypeError(f"recipe is a {type(self.recipe).__name__}; it must be a Recipe")
        if type(self.min_keys) is not int or self.min_keys < 0:
            raise ValueError(f"min_keys is {self.min_keys!r}; it must be an integer of 0 or more")
        if self.decode not in ("sdpa", "fp8attn"):
            raise ValueError(f"decode is {self.decode!r}; it must be 'sdpa' or 'fp8attn'")
        check_backend(self.backend)

    def reason_for_pytorch(self, a: Arguments) -> str | None:
        """Why PyTorch computes a call of tensors (B, H, S, D), or None."""
        if a.dropout_p:
            return f"dropout_p is {a.dropout_p}"
        if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (a.query, a.key, a.value)):
            return "gradients are recorded"
        if a.query.shape[2] == 1 and self.decode == "sdpa":
            return "one query; decode='fp8attn' computes it in FP8"
        if a.key.shape[2] < self.min_keys:
            return f"fewer than min_keys={self.min_keys} keys"
        return None

    def recipe_for(self, attn_mask: object) -> Recipe:
        """The recipe of a call with such a mask."""
        return self.recipe if attn_mask is None or is_causal_bias(attn_mask) else self.recipe.of_fp8_keys


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


def with_lse(a: Arguments, recipe: Recipe, backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    """A model's call (B, Hq, Sq, Dv) and its LSE (B, Hq, Sq), float32, by fp8attn.sdpa."""
    return sdpa(
        a.query, a.key, a.value, a.attn_mask, a.dropout_p, a.is_causal, a.scale, a.enable_gqa, recipe=recipe, backend=backend, return_lse=True
    )  # fmt: skip


def attempted(policy: Policy, report: Report, layer: str, a: Arguments, compute: Compute = by_fp8attn) -> torch.Tensor | None:
    """A call by fp8attn, through `compute`, if the policy says so and `fp8attn.sdpa` takes it.

    Otherwise None, and the report gets the reason.
    """
    reason = policy.reason_for_pytorch(a)
    recipe = policy.recipe_for(a.attn_mask)
    if reason is None and torch.compiler.is_compiling():
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


def attention(policy: Policy, report: Report, layer: str, a: Arguments, original: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A call by fp8attn as of `attempted`, or else by `original`."""
    out = attempted(policy, report, layer, a)
    return original() if out is None else out
