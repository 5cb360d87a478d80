"""Hugging Face diffusers: an attention backend.

fp8attn.integrations.diffusers.register()
pipe.transformer.set_attention_backend("fp8attn")
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..api import sdpa
from ..recipe import DEFAULT_RECIPE, Recipe
from ..validate import Arguments, Backend
from .switching import MIN_KEYS, Policy, Report, attention

OLDEST = "0.35"
"""The first release of diffusers with attention backends."""


def register(name: str = "fp8attn", recipe: Recipe = DEFAULT_RECIPE, *, min_keys: int = MIN_KEYS, backend: Backend = "auto") -> Report:
    """Register fp8attn with diffusers as an attention backend. Registering again replaces it.

    Calls that fp8attn doesn't take, or that have few keys, as cross attention to a text, go to
    F.scaled_dot_product_attention. The report counts them; diffusers doesn't say of which layer they are.

    Args:
        name: that `set_attention_backend` takes, in lower case.
        recipe, min_keys, backend: as of `fp8attn.patch`.

    Raises:
        ImportError: diffusers isn't installed, or its registry of backends looks different.
        TypeError, ValueError: an argument isn't as above.
    """
    if not isinstance(name, str) or not name.isidentifier() or name != name.lower():
        raise ValueError(f"name is {name!r}; it must be a word in lower case")
    policy, report = Policy(recipe, min_keys, "fp8attn", backend), Report()
    member, registry = _member(name)

    def fp8attn_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: object = None,
    ):
        """Attention of (B, S, H, D). The LSE is (B, S, H)."""
        if _parallel_config is not None:
            raise ValueError("_parallel_config is given; fp8attn's backend of diffusers takes no context parallelism")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None, :]
        layer = f"{query.shape[1]} queries, {key.shape[1]} keys"
        if return_lse:
            out, lse = sdpa(
                q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, recipe=policy.recipe_for(attn_mask), return_lse=True, backend=backend
            )
            report.count(layer, None)
            return out.transpose(1, 2), lse.transpose(1, 2)
        arguments = Arguments(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, recipe=recipe)

        def original() -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

        return attention(policy, report, layer, arguments, original).transpose(1, 2)

    registry.register(member)(fp8attn_attention)
    return report


def _member(name: str):
    """The member of diffusers' closed enumeration of backends, which is added if it isn't there, and the registry.

    Raises:
        ImportError: diffusers isn't installed, or looks different.
        ValueError: it is a backend of diffusers itself.
    """
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

        members, by_value, names = AttentionBackendName._member_map_, AttentionBackendName._value2member_map_, AttentionBackendName._member_names_
        _ = _AttentionBackendRegistry.register, _AttentionBackendRegistry._backends
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"fp8attn.integrations.diffusers needs diffusers {OLDEST} or newer, with its registry of attention backends:"
            f" pip install 'diffusers>={OLDEST}'"
        ) from error
    member = by_value.get(name)
    if member is None:
        member = str.__new__(AttentionBackendName, name)
        member._name_, member._value_ = name.upper(), name
        members[name.upper()], by_value[name] = member, member
        names.append(name.upper())
    elif getattr(_AttentionBackendRegistry._backends.get(member), "__module__", "") != __name__:
        raise ValueError(f"name is {name!r}; it must be a name that diffusers doesn't have itself")
    return member, _AttentionBackendRegistry
