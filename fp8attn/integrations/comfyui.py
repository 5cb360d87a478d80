"""ComfyUI: the function that a model's transformer options call instead of ComfyUI's attention.

model = model.clone()
override = fp8attn.integrations.comfyui.override()
model.model_options["transformer_options"]["optimized_attention_override"] = override

The node package examples/comfyui_fp8attn does this in a workflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..recipe import DEFAULT_RECIPE, Recipe
from ..validate import Arguments, Backend
from .switching import MIN_KEYS, Policy, Report, attempted, check_one_recipe

COMPUTED = frozenset(("mask", "attn_precision", "skip_reshape", "skip_output_reshape", "scale", "enable_gqa"))
"""Keyword arguments of ComfyUI's attention functions that change the answer, and that fp8attn takes."""

IGNORED = frozenset(("transformer_options", "_inside_attn_wrapper", "low_precision_attention"))
"""Keyword arguments that don't change the answer, but for `low_precision_attention`, which refuses FP8."""


class Override:
    """An attention function of ComfyUI that computes calls in FP8.

    Attributes:
        report: which calls fp8attn computed, and which not. It names calls by their lengths.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy, self.report = policy, Report()

    def __call__(self, func: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, *args, **options) -> Any:
        """
        Args:
            func: ComfyUI's own attention function, for calls that fp8attn doesn't compute.
            q: (B, Sq, heads · D), or (B, heads, Sq, D) if `skip_reshape` is given.
            k, v: (B, Sk, heads · D), or (B, heads, Sk, D), likewise.
            heads: number of heads.
            args, options: mask, attn_precision, skip_reshape and skip_output_reshape, by place or by name, and what
                else ComfyUI passes.

        Returns:
            (B, Sq, heads · D), or (B, heads, Sq, D) if `skip_output_reshape` is given.
        """
        options = dict(zip(("mask", "attn_precision", "skip_reshape", "skip_output_reshape"), args, strict=False)) | options

        split = bool(options.get("skip_reshape"))
        query, key, value = (q, k, v) if split else (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        layer = f"{query.shape[2]} queries, {key.shape[2]} keys, {heads} heads of {query.shape[3]}"
        reason = _reason_for_comfyui(options)
        if reason is not None:
            self.report.count(layer, reason)
            return func(q, k, v, heads, **options)
        mask = options.get("mask")
        if mask is not None:
            mask = mask[None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask
        arguments = Arguments(query, key, value, mask, 0.0, False, options.get("scale"), query.shape[1] != key.shape[1], recipe=DEFAULT_RECIPE)
        out = attempted(self.policy, self.report, layer, arguments)
        if out is None:
            return func(q, k, v, heads, **options)
        return out if options.get("skip_output_reshape") else out.transpose(1, 2).flatten(2)


def _reason_for_comfyui(options: dict[str, Any]) -> str | None:
    """Why ComfyUI computes a call with such keyword arguments, or None."""
    if options.get("low_precision_attention") is False:
        return "low_precision_attention is False"
    if options.get("attn_precision") == torch.float32:
        return "attn_precision is float32"
    unknown = sorted(name for name, value in options.items() if value is not None and value is not False and name not in COMPUTED | IGNORED)
    return f"unknown argument {unknown[0]}" if unknown else None


def override(recipe: Recipe = DEFAULT_RECIPE, *, min_keys: int = MIN_KEYS, backend: Backend = "auto") -> Override:
    """The value for transformer_options["optimized_attention_override"] of a model of ComfyUI.

    Calls that ask for float32, that have few keys, as cross attention to a text, or that fp8attn doesn't take go to
    ComfyUI's own attention. The report counts them.

    Args:
        recipe, min_keys, backend: as of `fp8attn.patch`.

    Raises:
        TypeError, ValueError: an argument isn't as above.
    """
    check_one_recipe(recipe)
    return Override(Policy(recipe, min_keys, "fp8attn", backend))
