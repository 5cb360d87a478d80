"""Hugging Face diffusers: an attention backend, also for its context parallelism.

fp8attn.integrations.diffusers.register()
pipe.transformer.set_attention_backend("fp8attn")
pipe.transformer.enable_parallelism(config=ContextParallelConfig(ring_degree=2))  # under torchrun
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..api import reference_sdpa, sdpa
from ..recipe import DEFAULT_RECIPE, Recipe
from ..validate import Arguments, Backend
from .switching import MIN_KEYS, Policy, Report, attempted, check_one_recipe

OLDEST = "0.35"
"""The first release of diffusers with attention backends."""

UNREACHED = "processors that call F.scaled_dot_product_attention themselves, as SD3's do; fp8attn.patch(model) switches them"
"""Why there may be no call by the backend."""


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
    check_one_recipe(recipe)
    policy, report = Policy(recipe, min_keys, "fp8attn", backend), Report(lambda: UNREACHED)
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
            call = _Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse)
            return _parallel(policy, recipe, report, call, _parallel_config)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None, :]
        layer = f"{query.shape[1]} queries, {key.shape[1]} keys"
        if return_lse:
            of_call = recipe.of_call(attn_mask is not None, is_causal)
            out, lse = sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, recipe=of_call, return_lse=True, backend=backend)
            report.count(layer, None)
            return out.transpose(1, 2), lse.transpose(1, 2)
        arguments = Arguments(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, recipe=recipe)
        done = attempted(policy, report, layer, arguments)
        if done is None:
            done = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return done.transpose(1, 2)

    parallel = {"supports_context_parallel": True} if "supports_context_parallel" in inspect.signature(registry.register).parameters else {}
    registry.register(member, **parallel)(fp8attn_attention)
    return report


class _Call(NamedTuple):
    """A call of diffusers' context parallelism: query, key and value are (B, S of this rank, H, D)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    return_lse: bool


def _parallel(policy: Policy, recipe: Recipe, report: Report, a: _Call, parallel_config: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A call of diffusers' context parallelism: tokens are sharded over the ring's ranks and Ulysses'.

    Calls without a mask go to context_parallel_sdpa: what travels is FP8. Calls with a mask go through diffusers' own
    templates, with fp8attn on every rank. Calls with few keys, and those with dropout, do too, and are exact.

    Args:
        recipe: the policy's.
        parallel_config: diffusers' ParallelConfig.
    """
    from ..distributed import context_parallel_sdpa

    config = parallel_config.context_parallel_config
    ring, ulysses = config.ring_degree, config.ulysses_degree
    layer = f"{a.query.shape[1]} queries and {a.key.shape[1]} keys of each rank"
    reason = _reason_for_exact(
        policy, a, ring * ulysses, any_shards=getattr(config, "ulysses_anything", False) or getattr(config, "ring_anything", False)
    )
    if a.attn_mask is not None or reason is not None:
        report.count(layer, reason)
        return _by_templates(
            a, parallel_config, _forward_op(recipe.of_call(a.attn_mask is not None, a.is_causal), policy.backend, exact=reason is not None)
        )
    if ring > 1 and ulysses > 1:
        where: dict[str, Any] = {"mesh": config._mesh["ring", "ulysses"], "mode": "ring"}
    elif ring > 1:
        where = {"group": config._ring_mesh.get_group(), "mode": "ring"}
    else:
        heads = (a.query.shape[2], a.key.shape[2])
        where = {"group": config._ulysses_mesh.get_group(), "mode": "auto" if any(count % ulysses for count in heads) else "ulysses"}
    q, k, v = (x.transpose(1, 2) for x in (a.query, a.key, a.value))
    out, lse = context_parallel_sdpa(
        q, k, v, is_causal=a.is_causal, scale=a.scale, enable_gqa=a.enable_gqa, recipe=recipe.of_fp8_keys, return_lse=True,
        backend=policy.backend, **where,
    )  # fmt: skip
    report.count(layer, None)
    return (out.transpose(1, 2), lse.transpose(1, 2)) if a.return_lse else out.transpose(1, 2)


def _reason_for_exact(policy: Policy, a: _Call, ranks: int, any_shards: bool) -> str | None:
    """Why a call of context parallelism isn't computed in FP8, or None. All ranks come to the same answer.

    Args:
        any_shards: whether ranks may have different numbers of tokens. Then these don't decide.
    """
    if a.dropout_p:
        return f"dropout_p is {a.dropout_p}"
    if not any_shards and a.key.shape[1] * ranks < policy.min_keys:
        return f"fewer than min_keys={policy.min_keys} keys"
    return None


def _arrived(x: torch.Tensor) -> torch.Tensor:
    """A tensor that a collective may still be filling, as a plain tensor."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x


def _forward_op(recipe: Recipe, backend: Backend, exact: bool):
    """Attention of one rank for diffusers' templates."""

    def forward(ctx, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, return_lse=False,
                _save_ctx=True, _parallel_config=None):  # fmt: skip
        """out (B, S, H, D), and with `return_lse` the LSE (B, S, H)."""
        q, k, v = (_arrived(x).transpose(1, 2) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None, :]
        if exact and not return_lse:
            return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa).transpose(1, 2)
        if exact:
            out, lse = reference_sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse=True)
        else:
            out, lse = sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, recipe=recipe, return_lse=True, backend=backend)
        return (out.transpose(1, 2), lse.transpose(1, 2)) if return_lse else out.transpose(1, 2)

    return forward


def _by_templates(a: _Call, parallel_config: Any, forward_op: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A call by diffusers' own context parallelism."""
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention

    return _templated_context_parallel_attention(*a, forward_op=forward_op, backward_op=None, _parallel_config=parallel_config)


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
