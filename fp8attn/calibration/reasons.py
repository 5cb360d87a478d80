"""Reasons why calls of attention weren't recorded or replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from .interception import Interception
from .names import scripted_modules, shown

MAX_REASONS = 8
OTHER_REASONS = "other reasons"

NO_SDPA = ("AttnProcessor", "AttnAddedKVProcessor", "SlicedAttnProcessor", "SlicedAttnAddedKVProcessor")
"""Attention processors of diffusers that don't call F.scaled_dot_product_attention, in addition to those named after
xFormers."""


class Reasons(dict[str, Counter[str]]):
    """For each layer, the number of calls by reason.

    A layer has at most MAX_REASONS of them. Messages may contain lengths, which differ between calls, so further
    reasons count as OTHER_REASONS.
    """

    def count(self, layer: str, reason: str) -> None:
        """Count a call."""
        reasons = self.setdefault(layer, Counter())
        reasons[reason if reason in reasons or len(reasons) < MAX_REASONS else OTHER_REASONS] += 1

    def lines(self, what: str) -> list[str]:
        """One line per layer and reason; `what` says what happened to the calls."""
        return [f"{shown(layer)}: {calls(count)} {what}: {reason}" for layer, reasons in self.items() for reason, count in reasons.items()]


def calls(count: int) -> str:
    """A number of calls, in words."""
    return f"{count} call{'' if count == 1 else 's'}"


def likely_causes(model: nn.Module, interception: Interception, known: Reasons) -> str:
    """Why no call was recorded or replaced."""
    by_reason: dict[str, list[str]] = {}
    for layer, reasons in known.items():
        for reason in reasons:
            by_reason.setdefault(reason, []).append(shown(layer))
    causes = [f"{reason} ({len(layers)} layers: {layers[0]}{' …' if len(layers) > 1 else ''})" for reason, layers in by_reason.items()]
    if not interception.ran:
        causes.append(
            "no module of the model ran its forward inside the context: another object was called, or a method other than forward, or the model ran"
            " in another process, or as a CUDA graph that was captured before"
        )
    causes += [f"module {name!r} is a torch.jit.ScriptModule, which doesn't run in Python" for name in scripted_modules(model)[:1]]
    causes += dict.fromkeys(cause for module in model.modules() for cause in _causes_in_settings(module))
    return "; ".join(causes) or "the model's modules compute attention by matrix products of their own, or by kernels of another library"


def _causes_in_settings(module: nn.Module) -> Iterator[str]:
    """Reasons in the attention settings of a module of transformers or diffusers."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if isinstance(implementation, str) and "sdpa" not in implementation:
        yield f"model.config._attn_implementation is {implementation!r}; load the model with attn_implementation='sdpa'"
    processor = getattr(module, "processor", None)
    name = type(processor).__name__
    if name in NO_SDPA or "XFormers" in name:
        yield f"an attention processor is a {name}, which doesn't call F.scaled_dot_product_attention"
    backend = getattr(processor, "_attention_backend", None)
    backend = getattr(backend, "value", backend)
    if isinstance(backend, str) and "native" not in backend:
        yield f"the backend of an attention processor is {backend!r}; call model.set_attention_backend('native')"
