"""Hugging Face transformers: an attention implementation, with the mask function that it needs.

fp8attn.integrations.transformers.register()
model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fp8attn")

For a model that is loaded already, call model.set_attn_implementation("fp8attn").
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..recipe import DEFAULT_RECIPE, Recipe
from ..validate import Arguments, Backend
from .switching import MIN_KEYS, Decode, Policy, Report, attention

OLDEST = "4.53"
"""The first release of transformers with mask functions by attention implementation."""


def register(
    name: str = "fp8attn", recipe: Recipe = DEFAULT_RECIPE, *, min_keys: int = MIN_KEYS, decode: Decode = "sdpa", backend: Backend = "auto"
) -> Report:
    """Register fp8attn with transformers as an attention implementation, for all models.

    If it is registered again, the new registration replaces the old one.

    Causal attention, padding, sliding windows, static and dynamic caches, grouped keys (not repeated), cross attention
    and position biases go to fp8attn. Soft caps and learned sinks go to the model's own eager attention. Other calls
    that fp8attn doesn't take go to transformers' SDPA. The report counts them.

    Args:
        name: that `attn_implementation` takes.
        recipe, min_keys, decode, backend: as of `fp8attn.patch`.

    Returns:
        the report of all calls. Its layers are class and index, as in "LlamaAttention 3".

    Raises:
        ImportError: transformers isn't installed, or is too old.
        TypeError, ValueError: an argument isn't as above.
    """
    if not isinstance(name, str) or not name or name in ("eager", "sdpa", "flex_attention"):
        raise ValueError(f"name is {name!r}; it must be a name that transformers doesn't have itself")
    try:
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as error:
        raise ImportError(f"fp8attn.integrations.transformers needs transformers {OLDEST} or newer: pip install 'transformers>={OLDEST}'") from error
    implementation = _Implementation(Policy(recipe, min_keys, decode, backend), sdpa_attention_forward)

    def fp8attn_forward(module, query, key, value, attention_mask, **options):
        return implementation(module, query, key, value, attention_mask, **options)

    AttentionInterface.register(name, fp8attn_forward)
    AttentionMaskInterface.register(name, sdpa_mask)
    return implementation.report


class _Implementation:
    """An attention function of transformers."""

    def __init__(self, policy: Policy, by_sdpa: Any) -> None:
        self.policy, self.by_sdpa, self.report = policy, by_sdpa, Report()

    def __call__(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, **options
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            query: (B, Hq, Sq, D).
            key, value: (B, Hkv, Sk, D).
            attention_mask: None, or bool (B, 1, Sq, Sk), True for keys that are attended to.
            options: dropout, scaling, is_causal, position_bias, softcap, s_aux and what else transformers passes.

        Returns:
            out (B, Sq, Hq, Dv), and None or the weights of the model's eager attention.
        """
        layer = f"{type(module).__name__} {index}" if (index := getattr(module, "layer_idx", None)) is not None else type(module).__name__
        for option, what in (("softcap", "a soft cap"), ("s_aux", "learned sinks")):
            if options.get(option) is not None:
                self.report.count(layer, f"{what}: the model's own eager attention")
                return _eager(module, query, key, value, attention_mask, options)
        if options.get("position_bias") is not None:
            self.report.count(layer, "a position bias")
            return self.by_sdpa(module, query, key, value, attention_mask, **options)
        causal = _is_causal(module, query, attention_mask, options)
        k, v = (key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]) if causal and key.shape[2] > query.shape[2] else (key, value)
        arguments = Arguments(
            query, k, v, attention_mask, options.get("dropout", 0.0), causal, options.get("scaling"), query.shape[1] != key.shape[1],
            recipe=self.policy.recipe,
        )  # fmt: skip

        def original() -> torch.Tensor:
            return self.by_sdpa(module, query, key, value, attention_mask, **options)[0].transpose(1, 2)

        return attention(self.policy, self.report, layer, arguments, original).transpose(1, 2).contiguous(), None


def _is_causal(module: torch.nn.Module, query: torch.Tensor, attention_mask: torch.Tensor | None, options: dict[str, Any]) -> bool:
    """Whether a call without a mask is causal, as transformers' SDPA decides it."""
    given = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if given is None else given
    return bool(query.shape[2] > 1 and attention_mask is None and causal)


def _eager(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The model's eager attention, which takes additive masks.

    Raises:
        NotImplementedError: the model has none.
    """
    forward = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if forward is None:
        raise NotImplementedError(f"{type(module).__name__} has no eager attention; use attn_implementation='flex_attention' for this model")
    if attention_mask is None and _is_causal(module, query, None, options):
        rows, keys = (torch.arange(n, device=query.device) for n in (query.shape[2], key.shape[2]))
        attention_mask = (keys[None, :] <= rows[:, None])[None, None]
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
    return forward(module, query, key, value, attention_mask, **options)
