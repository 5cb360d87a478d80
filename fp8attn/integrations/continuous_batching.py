"""Hugging Face transformers: continuous batching (`generate_batch`) with fp8attn as its flash attention.

fp8attn.integrations.continuous_batching.register()
model.set_attn_implementation("fp8attn_flash2")
model.generate_batch(inputs, generation_config=generation_config)

The engine keeps keys and values in blocks of its own, in the model's dtype or in e4m3, and calls functions of
FlashAttention's signatures: one for packed sequences, and one for decode steps, which reads and writes blocks by a
block table. It takes an attention implementation for one that needs no masks if its name has `flash`, and for one with
block tables if a 2 or a 3 follows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..api import sdpa, varlen_sdpa
from ..paged import paged_sdpa
from ..paged_tensors import PagedTensors
from ..pages import PagedBatch
from ..quantization import encode
from ..recipe import E4M3, PRECISE, Recipe
from ..reference import Window
from ..validate import HALVES, Backend, check_recipe, check_scale, unsupported_varlen_recipe
from .flash_attn import MOST_STEP, flash_attn_with_kvcache
from .short_packed import MIN_PACKED_KEYS, VarlenAttn

NAME = "fp8attn_flash2"
"""The attention implementation's name."""

OLDEST = "5.17"
"""The first release of transformers whose engine was run with it."""

PADDED_STEP = 64
"""Queries to a multiple of which the engine pads for CUDA graphs. The most queries of a sequence are not known then."""

UNLIMITED: Window = (-1, -1)

PAGED = "paged|"
"""What releases before 5.20 put before the names of implementations for the engine."""


def register(
    recipe: Recipe = PRECISE, *, model: torch.nn.Module | None = None, kv_scales: tuple[float, float] | None = None,
    min_keys: int = MIN_PACKED_KEYS, backend: Backend = "auto", name: str = NAME,
) -> None:  # fmt: skip
    """Register fp8attn with transformers as a flash attention, for `generate_batch` and for other calls.

    Windows, soft caps and sinks are those of the model. If it is registered again, the new registration replaces the
    old one.

    Args:
        recipe: of packed calls in FP8, one that `varlen_sdpa` takes.
        model: a model that takes few flash attentions, such as gpt-oss: its list gets the name. None: the model has no
            such list.
        kv_scales: the engine's blocks are e4m3, and these multipliers restore keys and values: (1.0, 1.0) if nothing is
            known of them. Numbers of more than 448 times a scale saturate. None: blocks have the model's dtype.
        min_keys: packed sequences of which none has as many keys are attended to in the model's dtype: on a GPU by
            PyTorch's `varlen_attn`, unless they have soft caps or sinks; on a CPU by `paged_sdpa` if they are causal.
        backend: of `varlen_sdpa`, and of `paged_sdpa` if it has it.
        name: that `attn_implementation` takes. It must have `flash`, and behind it a 2.

    Raises:
        ImportError: transformers isn't installed, or is too old.
        TypeError, ValueError: an argument isn't as above.
    """
    check_recipe(recipe)
    reason = unsupported_varlen_recipe(recipe)
    if reason is not None:
        raise ValueError(reason)
    if kv_scales is not None:
        if not isinstance(kv_scales, tuple) or len(kv_scales) != 2:
            raise TypeError(f"kv_scales is {kv_scales!r}; it must be two numbers, of keys and values, or None")
        for of, scale in zip(("keys", "values"), kv_scales, strict=True):
            check_scale(f"kv_scales, of {of},", scale)
            if not scale > 0:
                raise ValueError(f"kv_scales is {kv_scales}; it must be positive numbers")
    if not isinstance(name, str) or "2" not in name.partition("flash")[2] or name.startswith("flash_attention_"):
        raise ValueError(f"name is {name!r}; it must have 'flash', a 2 behind it, and no name of transformers' own")
    try:
        from transformers import AttentionInterface
        from transformers import modeling_flash_attention_utils as loader
        from transformers.generation.continuous_batching import continuous_api
        from transformers.integrations.flash_attention import flash_attention_forward
        from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
    except ImportError as error:
        raise ImportError(
            f"fp8attn.integrations.continuous_batching needs transformers {OLDEST} or newer: pip install 'transformers>={OLDEST}'"
        ) from error
    AttentionInterface.register(name, flash_attention_forward)
    AttentionMaskInterface.register(name, flash_attention_mask)
    paged: Any = AttentionInterface._global_mapping.get(f"{PAGED}flash_attention_2")
    if paged is not None:
        AttentionInterface.register(PAGED + name, _with_window(paged))
    flash = _Flash(recipe, min_keys, backend, kv_scales)
    loader._lazy_imports = _Loader.on(loader._lazy_imports, name, flash)
    engine: Any = continuous_api
    engine.PagedAttentionCache = _Caches.on(engine.PagedAttentionCache, name, flash)
    if loader._loaded_implementation in (name, PAGED + name):
        loader._loaded_implementation = None  # it is loaded again, with the new options
    compatible = getattr(model, "_compatible_flash_implementations", None)
    if model is not None and compatible is not None and name not in compatible:
        model._compatible_flash_implementations = [*compatible, name]  # type: ignore[assignment]


def _with_window(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Attention of releases whose function for the engine finds windows at modules alone, and knows no soft caps."""

    def paged_forward(module: Any, *arguments: Any, sliding_window: int | None = None, softcap: float | None = None, **options: Any) -> Any:
        if softcap is not None:
            raise NotImplementedError(f"{type(module).__name__} has softcap, which the engine of this release of transformers drops; 5.24 takes it")
        if sliding_window is not None and getattr(module, "sliding_window", None) is None:
            module.sliding_window = sliding_window
        return forward(module, *arguments, **options)

    return paged_forward


@dataclass(frozen=True)
class _Loader:
    """What transformers loads flash attentions by: by ours, those of `known`, and others as before."""

    before: Callable[..., tuple]
    known: dict[str, _Flash]

    @classmethod
    def on(cls, before: Callable[..., tuple], name: str, flash: _Flash) -> _Loader:
        """`before`, and one flash attention more."""
        if isinstance(before, cls):
            return cls(before.before, {**before.known, name: flash})
        return cls(before, {name: flash})

    def __call__(self, implementation: str | None, *arguments: Any, **options: Any) -> tuple:
        flash = self.known.get((implementation or "").removeprefix(PAGED))
        if flash is None:
            return self.before(implementation, *arguments, **options)
        from transformers.modeling_flash_attention_utils import _pad_input, _unpad_input

        return flash.func, flash.varlen_func, flash.with_kvcache, _pad_input, _unpad_input


@dataclass(frozen=True)
class _Caches:
    """What the engine makes its cache by: one in e4m3 for those of `known` that have scales, and others as before."""

    before: type
    known: dict[str, _Flash]

    @classmethod
    def on(cls, before: Any, name: str, flash: _Flash) -> _Caches:
        """`before`, and one flash attention more."""
        if isinstance(before, cls):
            return cls(before.before, {**before.known, name: flash})
        return cls(before, {name: flash})

    def __call__(self, *, config: Any, dtype: torch.dtype, **options: Any) -> Any:
        flash = self.known.get((config._attn_implementation or "").removeprefix(PAGED))
        if flash is None or flash.kv_scales is None:
            return self.before(config=config, dtype=dtype, **options)
        return _fp8_cache(self.before)(flash.kv_scales, dtype, config=config, **options)


@functools.cache
def _fp8_cache(base: type) -> type:
    """The engine's cache, a subclass of `base`, whose blocks are bytes of e4m3 codes."""

    class Fp8PagedAttentionCache(base):  # type: ignore[misc, valid-type]
        """The cache of transformers' engine in e4m3. What attention gets is what it holds."""

        def __init__(self, scales: tuple[float, float], kept: torch.dtype, **options: Any) -> None:
            super().__init__(dtype=torch.uint8, **options)
            self.scales, self.kept = scales, kept

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *arguments: Any, **options: Any) -> Any:
            """Write new tokens, and return all that the sequences have; by a block table, nothing of both."""
            if (options.get("kwargs") or {}).get("block_table") is not None:
                return super().update(key_states, value_states, layer_idx, *arguments, **options)
            scales = [torch.full((1,), scale, device=key_states.device) for scale in self.scales]
            codes = [encode(x.float(), scale).view(torch.uint8) for x, scale in zip((key_states, value_states), scales, strict=True)]
            found = super().update(*codes, layer_idx, *arguments, **options)
            return tuple((x.view(E4M3).float() * scale).to(self.kept) for x, scale in zip(found, scales, strict=True))

    return Fp8PagedAttentionCache


@dataclass(frozen=True)
class _Flash:
    """FlashAttention's functions, with transformers' names of their arguments. They return outputs alone."""

    recipe: Recipe
    min_keys: int
    backend: Backend
    kv_scales: tuple[float, float] | None = None
    varlen_attn: VarlenAttn = field(default_factory=VarlenAttn.find)

    @property
    def paged_backend(self) -> str:
        """Of `paged_sdpa`, for the engine's cache."""
        return self.backend if self.backend in ("triton", "modelled") else "auto"

    def func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = UNLIMITED,
        softcap: float = 0.0,
        s_aux: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of q (B, Sq, Hq, D) to k and v (B, Sk, Hkv, D or Dv). Returns (B, Sq, Hq, Dv)."""
        _check_dropout(dropout_p)
        out = sdpa(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=softmax_scale, is_causal=causal, enable_gqa=True,
            causal_alignment="bottom_right", window=_window(window_size, causal), softcap=softcap, sinks=_sinks(s_aux), recipe=self.recipe,
            backend=self.backend,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out.transpose(1, 2)

    def varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = UNLIMITED,
        softcap: float = 0.0,
        s_aux: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of packed sequences, q (Tq, Hq, D) to k and v (Tk, Hkv, D or Dv). Returns (Tq, Hq, Dv)."""
        _check_dropout(dropout_p)
        sequences, sinks, window = cu_seqlens_q.shape[0] - 1, _sinks(s_aux), _window(window_size, causal)
        # steps would quantize all keys for each token
        is_step = max_seqlen_q <= MOST_STEP or q.shape[0] <= max(2 * sequences, PADDED_STEP)
        is_short = max_seqlen_k < self.min_keys and self.backend != "reference"
        if is_short and not (is_step and causal) and self.varlen_attn.takes(q, k, v, softcap, sinks):
            return self.varlen_attn((q, k, v), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), causal, window, softmax_scale)
        if (is_step or (is_short and not q.is_cuda)) and causal and k.dtype in HALVES and self.backend != "reference":
            # one slot is a page: sequences begin at any token
            starts = cu_seqlens_k[:-1]
            table = starts.unsqueeze(1) + torch.arange(max_seqlen_k, dtype=torch.int32, device=q.device)
            batch = PagedBatch(table, cu_seqlens_k[1:] - starts, max_length=max_seqlen_k, cu_seqlens=cu_seqlens_q.contiguous())
            cache = PagedTensors(k.unsqueeze(1), v.unsqueeze(1))
            out = paged_sdpa(q, cache, batch, window=window or (-1, 0), softcap=softcap, sinks=sinks, scale=softmax_scale, backend=self.paged_backend)
        else:
            out = varlen_sdpa(
                q, k, v, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
                is_causal=causal, window=window, softcap=softcap, sinks=sinks, scale=softmax_scale, recipe=self.recipe, backend=self.backend,
            )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    def with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = UNLIMITED,
        softcap: float = 0.0,
        s_aux: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write k and v (B, n, Hkv, D or Dv) behind cache_seqlens to blocks (N, S, Hkv, D or Dv), and attend to them.

        Returns (B, n, Hq, Dv).
        """
        k_descale, v_descale = self.kv_scales or (None, None)
        out = flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens.to(torch.int32), block_table=block_table, softmax_scale=softmax_scale,
            causal=causal, window_size=window_size, softcap=softcap, k_descale=k_descale, v_descale=v_descale, sinks=_sinks(s_aux),
            recipe=None, backend=self.paged_backend,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out


def _check_dropout(dropout_p: float) -> None:
    if dropout_p != 0:
        raise ValueError(f"dropout_p is {dropout_p}; it must be 0: fp8attn is for inference")


def _window(window_size: Window, causal: bool) -> Window | None:
    """A window of FlashAttention as `window` of fp8attn's functions; None for none."""
    left, right = window_size
    return None if (left, right) == UNLIMITED else (left, 0 if causal else right)


def _sinks(s_aux: torch.Tensor | None) -> torch.Tensor | None:
    """Sinks of a model, of any dtype."""
    return None if s_aux is None else s_aux.float().contiguous()
