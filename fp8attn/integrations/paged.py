"""Hugging Face transformers: generation from an FP8 KV cache in pages.

fp8attn.integrations.paged.register()
model.set_attn_implementation("fp8attn_paged")
model.generate(**inputs, past_key_values=fp8attn.integrations.paged.cache(max_length=8192))
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..cache import KVCache
from ..paged import paged_sdpa
from ..paged_ops import BACKENDS
from ..pages import PAGE, RECENT_QUERIES, PagedBatch
from ..recipe import DEFAULT_RECIPE, Recipe
from ..reference import CAUSAL_WINDOW

OLDEST = "4.56"
"""The first release of transformers whose caches are made of given layers."""

LAYER = "_fp8attn_layer_of_cache"
"""The attribute by which keys that a layer of the cache returns lead to that layer."""

UNSUPPORTED = "position_bias"
"""An option of attention functions that changes scores, and that a cache doesn't take."""


def register(name: str = "fp8attn_paged") -> None:
    """Register attention to caches of `cache` with transformers, as an attention implementation.

    Raises:
        ImportError: transformers isn't installed, or is too old.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise _too_old() from error
    AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(name, _padding)


def cache(max_length: int, recipe: Recipe = DEFAULT_RECIPE, *, backend: str = "auto") -> Any:
    """A transformers cache for `generate`: as `past_key_values`, or as `cache` in releases that call it so.

    Keys and values of complete pages of 128 tokens are kept in FP8, the last 192 tokens also as they came. Batches may
    be padded on the left. Tokens may be rejected, as assisted generation does, up to 65 at a time.

    Args:
        max_length: the largest number of tokens of a sequence, its prompt and padding included. Memory is allocated for
            as many when the first tokens come.
        recipe: of `KVCache`.
        backend: of `paged_sdpa`.

    Returns:
        a transformers.Cache.

    Raises:
        ImportError: transformers isn't installed, or is too old.
        ValueError: an argument isn't as above.
    """
    if not isinstance(max_length, int) or isinstance(max_length, bool) or max_length < 1:
        raise ValueError(f"max_length is {max_length!r}; it must be an int of at least 1")
    if backend not in BACKENDS["attention"]:
        raise ValueError(f"backend is {backend!r}; it must be one of {BACKENDS['attention']}")
    cache_class, layer_class = _classes()
    return cache_class(layer_class_to_replicate=functools.partial(layer_class, max_length, recipe, backend))


def _too_old() -> ImportError:
    return ImportError(f"fp8attn.integrations.paged needs transformers {OLDEST} or newer: pip install 'transformers>={OLDEST}'")


@functools.cache
def _classes() -> tuple[type, type]:
    """The classes of the cache and of its layers, whose bases are transformers'.

    Raises:
        ImportError: transformers isn't installed, or is too old.
    """
    try:
        from transformers.cache_utils import Cache, CacheLayerMixin
    except ImportError as error:
        raise _too_old() from error

    class PagedLayer(CacheLayerMixin):
        """One layer's keys and values."""

        is_sliding = False
        is_croppable = True

        def __init__(self, max_length: int, recipe: Recipe, backend: str) -> None:
            super().__init__()
            self.max_length, self.recipe, self.backend, self.seen = max_length, recipe, backend, 0
            self.longest = 0  # tokens since the last reset; those that were removed again overwrote older ones

        def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
            batch, heads, _, dim = key_states.shape
            self.dtype, self.device = key_states.dtype, key_states.device
            pages = max(self.max_length // PAGE, 1)
            self.cache = KVCache(batch, batch * pages, heads, dim, value_states.shape[3], self.recipe, self.dtype, self.device)
            self.page_table = torch.arange(batch * pages, dtype=torch.int32, device=self.device).view(batch, pages)
            self.is_initialized = True

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
            """The new tokens alone. `attend` appends them, because it knows which of them are padding."""
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self.seen += key_states.shape[2]
            if self.seen > self.max_length:
                raise ValueError(f"max_length is {self.max_length}; it must be at least {self.seen}, the tokens so far")
            self.longest = max(self.longest, self.seen)
            setattr(key_states, LAYER, self)
            return key_states, value_states

        def attend(
            self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shown: torch.Tensor | None, scores: dict[str, Any]
        ) -> torch.Tensor:
            """Append tokens and attend to all. Returns (B, Hq, Sq, Dv).

            Args:
                shown: bool (B, Sk), False for padding; or None without.
                scores: options of `paged_sdpa`.
            """
            rows, length = query.shape[0], query.shape[2]
            if shown is None:
                lengths = torch.full((rows,), self.seen, dtype=torch.int32, device=self.device)
                batch = PagedBatch(self.page_table, lengths, max_length=self.seen)
                return self._attend(query, key, value, batch, scores)
            shown = shown[:, : self.seen]
            lengths, counts = shown.sum(1, dtype=torch.int32), shown[:, -length:].sum(1, dtype=torch.int32)
            batch = PagedBatch(self.page_table, lengths, counts, max_length=self.seen)
            # padding goes behind the tokens, and back
            order = torch.arange(length, device=self.device)
            padding = (length - counts).unsqueeze(1)
            to, back = ((order + shift) % length for shift in (padding, -padding))
            out = self._attend(_in_order(query, to), _in_order(key, to), _in_order(value, to), batch, scores)
            return _in_order(out, back)

        def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch, scores: dict[str, Any]) -> torch.Tensor:
            out = paged_sdpa(query, self.cache, batch, (key, value), backend=self.backend, **scores)
            assert isinstance(out, torch.Tensor)
            return out

        def get_seq_length(self) -> int:
            return self.seen

        def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
            count = query_length if isinstance(query_length, int) else query_length.shape[0]
            return self.seen + count, 0

        def get_max_length(self) -> int:
            return self.max_length

        def get_max_cache_shape(self) -> int:
            """`get_max_length` of older releases."""
            return self.max_length

        def crop(self, tokens: int) -> None:
            """Remove -`tokens` last tokens; or, in older releases, all but the first `tokens`."""
            left = max(self.seen + tokens, 0) if tokens <= 0 else min(tokens, self.seen)
            if left and self.longest - left > RECENT_QUERIES:
                raise ValueError(f"{self.longest - left} of the last tokens are to be removed; it must be at most {RECENT_QUERIES}, or all tokens")
            self.seen = left
            self.longest = self.longest if left else 0

        def reset(self) -> None:
            self.crop(-self.seen)

        def offload(self) -> None:
            raise NotImplementedError("fp8attn's cache isn't offloaded")

        prefetch = offload

        def reorder_cache(self, beam_idx: torch.Tensor) -> None:
            raise NotImplementedError("fp8attn's cache has no beams: sequences that share pages would write to them")

        def batch_repeat_interleave(self, repeats: int) -> None:
            raise NotImplementedError("fp8attn's cache has a fixed batch; repeat the prompt instead")

        def batch_select_indices(self, indices: torch.Tensor) -> None:
            raise NotImplementedError("fp8attn's cache has a fixed batch")

    class PagedCache(Cache):
        """An FP8 KV cache in pages."""

        def __repr__(self) -> str:
            return f"PagedCache({len(self.layers)} layers, {self.get_seq_length()} tokens)"

    return PagedCache, PagedLayer


def _in_order(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Tokens of x (B, H, S, D) in the order (B, S)."""
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _padding(*_: object, attention_mask: torch.Tensor | None = None, **options: object) -> torch.Tensor | None:
    """A mask function of transformers: the mask of padding, bool (B, Sk), as it is; or None without."""
    return attention_mask


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers, for keys that come from a layer of the cache."""
    layer = getattr(key, LAYER, None)
    if layer is None:
        raise TypeError("the model has no cache of fp8attn.integrations.paged.cache; it must get one as past_key_values")
    if options.get(UNSUPPORTED) is not None:
        raise NotImplementedError(f"{type(module).__name__} has {UNSUPPORTED}, which attention to the cache doesn't take")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise NotImplementedError(f"attention_mask has shape {tuple(attention_mask.shape)}; attention to the cache takes (B, Sk), False for padding")
    window, sinks = options.get("sliding_window"), options.get("s_aux")
    scores = {
        "scale": options.get("scaling"),
        "window": CAUSAL_WINDOW if window is None else (window - 1, 0),
        "softcap": options.get("softcap") or 0.0,
        "sinks": None if sinks is None else sinks.float().contiguous(),
    }
    return layer.attend(query, key, value, attention_mask, scores).transpose(1, 2), None
