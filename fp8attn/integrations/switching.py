"""Which calls of a switched model fp8attn computes, and the report of those that it doesn't."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from ..calibration.reasons import Reasons
from ..calibration.replacing import by_fp8attn, refusal
from ..recipe import DEFAULT_RECIPE, Recipe
from ..validate import Arguments, Backend, BackendUnavailable, check_backend, is_causal_bias

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
    """

    def __init__(self) -> None:
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
            return "no call of attention"
        rows = [("layer", "calls", "computed by", "because"), *sorted(rows)]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("  ".join((*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3])).rstrip() for row in rows)


def attention(policy: Policy, report: Report, layer: str, a: Arguments, original: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A call by fp8attn if the policy says so and `fp8attn.sdpa` takes it.

    Otherwise the call goes to `original`, and the report gets the reason.
    """
    reason = policy.reason_for_pytorch(a)
    recipe = policy.recipe_for(a.attn_mask)
    if reason is None and torch.compiler.is_compiling():
        reason = refusal(a, recipe)
    if reason is None:
        try:
            out = by_fp8attn(a, recipe, policy.backend)
        except (TypeError, ValueError, BackendUnavailable) as error:
            if torch.compiler.is_compiling() or refusal(a, recipe) is None:
                raise
            reason = str(error)
        else:
            report.count(layer, None)
            return out
    report.count(layer, reason)
    return original()
