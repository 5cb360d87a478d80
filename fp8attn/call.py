"""One attention call after validation: the input of every backend's forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .layout import units_of
from .recipe import DEFAULT_RECIPE, FUSED_RECIPES, SCALE_BLOCK, ComputeType, Granularity, Packed, ProductType, Quantized, Recipe, frozen
from .reference import CAUSAL_WINDOW, Causal, Scoring, Window, window_offsets

GROUPS: dict[Granularity, int] = {"tensor": 0, "head": 0, "block": SCALE_BLOCK, "token": 1}
"""Rows of q or k under one scale, by granularity. 0: all rows of a head."""

GRANULARITIES: dict[int, Granularity] = {0: "head", SCALE_BLOCK: "block", 1: "token"}
"""The granularity of a number of rows under one scale. Scales are (B, H, n)."""

HALVES = (torch.bfloat16, torch.float16)
"""Dtypes of q that kernels can quantize themselves."""


@frozen
class Varlen:
    """The sequences of a call of packed operands.

    Attributes:
        q, k: where they lie in q and o, and in k and v.
        longest_q, longest_k: the most tokens of a sequence, as far as the caller knows. Only speed depends on them.
    """

    q: Packed
    k: Packed
    longest_q: int
    longest_k: int

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int, int]:
        """What operators take in place of it."""
        return self.q.cu_seqlens, self.k.cu_seqlens, self.k.seqused, self.longest_q, self.longest_k


class Geometry:
    """What follows from the sizes of q and k, and from which keys rows see."""

    q: torch.Tensor
    k: torch.Tensor
    causal: Causal
    window: Window
    varlen: Varlen | None

    if TYPE_CHECKING:

        @property
        def kv_length(self) -> int: ...
        @property
        def value_dim(self) -> int: ...

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def q_heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def q_length(self) -> int:
        return self.q.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def longest_q(self) -> int:
        """The most queries of a sequence, as far as the host knows."""
        return self.q_length if self.varlen is None else self.varlen.longest_q

    @property
    def longest_k(self) -> int:
        """The most keys of a sequence, as far as the host knows."""
        return self.kv_length if self.varlen is None else self.varlen.longest_k

    def tiles(self, rows: int) -> int:
        """Number of tiles of `rows` query rows, over all heads; of packed sequences an upper bound."""
        batch, heads, length, _ = self.q.shape
        if self.varlen is not None:
            return heads * units_of(self.varlen.q, rows)
        return batch * heads * -(-length // rows)

    @property
    def window_offsets(self) -> tuple[int, int]:
        """(first, last): row i sees the keys j with i + first <= j <= i + last.

        Packed sequences have different offsets. For them, this is the window that kernels compute offsets from; -1 is
        unlimited. Its sides are cut where they are as good as unlimited, so that sums of lengths fit into 32 bits.
        """
        if self.varlen is not None:
            left, right = (-1, -1) if self.causal == "none" else self.window
            return min(left, self.kv_length), min(right, self.q_length)
        return window_offsets(self.causal, self.window, self.q_length, self.kv_length)

    @property
    def has_first_key(self) -> bool:
        """Whether rows have a first key, as sliding windows do and causal masks don't."""
        return self.window[0] >= 0

    def visible_keys(self, rows: int) -> int:
        """The most keys that a tile of `rows` query rows sees."""
        first, last = self.window_offsets
        if self.varlen is not None:
            return self.longest_k if first < 0 or last < 0 else min(first + last + rows, self.longest_k)
        return min(max(last - first + rows, 0), self.kv_length)


@frozen
class Call(Geometry):
    """Operands and options of one forward pass. B batch, Hq and Hkv heads, Sq and Sk lengths, D and Dv head dims.

    Attributes:
        q: (B, Hq, Sq, D) e4m3 or int8. Some kernels also take bfloat16 or float16: they quantize it per token, to k's
            dtype.
        q_scale: float32 (B, Hq, n), one per `q_group` rows; None if q isn't quantized.
        k: (B, Hkv, Sk, D), e4m3 or int8, the same as q.
        k_scale: float32 (B, Hkv, n), one per `k_group` rows. For int8, negative if a key under it is non-finite.
        v: (B, Hkv, Dv, S_padded) e4m3 in the layout of quantized V. It may hold blocks of further keys.
        v_scale: float32 (B, Hkv, Dv).
        v_mean: float32 (B, Hkv, Dv) or None.
        attn_mask: (B, Hq, Sq, Sk), bool or float, any strides, or None.
        bias: float32 (B, Hq, ceil(Sq / 64), Sk rounded up to a multiple of 4), contiguous, or None. It is multiplied by
            the softmax scale and added to the scores of every 64 queries, whose mean causes it.
        kv_length: Sk. It is n times k's length if the keys of a call of one batch lie in n shards, which k, v and
            k_scale then have as batches. Shards of v are whole rows apart. Only the CUDA Hopper kernel takes them.
        causal: the alignment of the window; `none` if every row sees all keys.
        window: keys that a row sees before and after the key that it is aligned to; -1 is unlimited.
        softcap: scores become softcap · tanh(score / softcap); 0 caps nothing.
        sinks: float32 (Hq,), contiguous, one more logit of each row, which has no value; or None.
        mean_scores: float32 (B, Hq, Sq), contiguous, what K's mean adds to the scores of each row of a quantized q; or
            None. It is given with a softcap or sinks, to which it matters, and then the LSE includes it.
        return_lse: whether to return the LSE of the scores of the stored q and k, and of `lse_mean`.
        lse_mean: float32 (B, Hkv, D), contiguous, K's mean as `Quantized.mean` has it; or None. Kernels that quantize q
            find mean_scores with it. It is given with a softcap, sinks or an LSE.
        varlen: the sequences of packed operands, or None. B is then 1, Sq and Sk are the tokens of all sequences, and
            k, v, k_scale, v_scale, v_mean and lse_mean are laid out as `Quantized.packed` says. `causal` is `none` or
            `bottom_right`, of each sequence. There is no attn_mask or bias.
    """

    q: torch.Tensor
    q_scale: torch.Tensor | None
    q_group: int
    k: torch.Tensor
    k_scale: torch.Tensor
    k_group: int
    v: torch.Tensor
    v_scale: torch.Tensor
    v_mean: torch.Tensor | None
    attn_mask: torch.Tensor | None
    bias: torch.Tensor | None
    kv_length: int
    softmax_scale: float
    causal: Causal
    compute: ComputeType
    two_level: bool | None
    out_dtype: torch.dtype
    return_lse: bool
    window: Window = CAUSAL_WINDOW
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    mean_scores: torch.Tensor | None = None
    lse_mean: torch.Tensor | None = None
    varlen: Varlen | None = None

    @property
    def arguments(self) -> tuple:
        """The fields, in the order of the arguments of the operators that attend."""
        numbers = self.softmax_scale, self.causal, self.compute, self.two_level, self.out_dtype, self.return_lse
        options = self.window, self.softcap, self.sinks, self.mean_scores
        if self.varlen is None:
            queries, keys = (self.q, self.q_scale, self.q_group), (self.k, self.k_scale, self.k_group)
            masks = self.attn_mask, self.bias
            return *queries, *keys, self.v, self.v_scale, self.v_mean, *masks, self.kv_length, *numbers, *options, self.lse_mean
        operands = self.q, self.q_scale, self.k, self.k_scale, self.k_group, self.v, self.v_scale, self.v_mean
        return *operands, *self.varlen.arguments, *numbers, *options

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.softmax_scale, self.window, self.softcap, self.sinks)

    @property
    def int8(self) -> bool:
        """Whether Q·Kᵀ is computed in int8."""
        return self.k.dtype == torch.int8

    @property
    def fuse_q_quant(self) -> bool:
        """Whether the kernel must quantize q."""
        return self.q.dtype in HALVES

    @property
    def mask_bytes(self) -> torch.Tensor | None:
        """attn_mask as kernels read it, with bool viewed as bytes."""
        if self.attn_mask is not None and self.attn_mask.dtype == torch.bool:
            return self.attn_mask.view(torch.uint8)
        return self.attn_mask

    @property
    def value_dim(self) -> int:
        return self.v.shape[2]

    @property
    def shards(self) -> int:
        """Of k and v: 1 if they don't lie in shards."""
        return self.k.shape[0] // max(self.batch, 1)


@frozen
class HalfKeys:
    """Attention to the half-precision keys of a recipe, merged with FP8 attention to the other keys.

    Attributes:
        q: (B, Hq, Sq, D), bfloat16, float16 or float32.
        k, v: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), likewise.
        sinks, recent: numbers of first and of last keys of a row, as of `Recipe`.
        causal_offset: row i sees the keys j with j <= i + causal_offset.
        out_dtype, return_lse: as of `Call`.
        fp8_out, fp8_lse: (B, Hq, Sq, Dv) and float32 (B, Hq, Sq), FP8 attention to the other keys; or None if there are
            none.
        k_mean: float32 (B, Hkv, D), the mean that was removed from K before it was quantized, which `fp8_lse` doesn't
            include; or None.
        rotated: channels that were rotated together in k_mean.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: int
    recent: int
    softmax_scale: float
    causal_offset: int
    out_dtype: torch.dtype
    return_lse: bool
    fp8_out: torch.Tensor | None = None
    fp8_lse: torch.Tensor | None = None
    k_mean: torch.Tensor | None = None
    rotated: int = 0


@frozen
class Problem(Geometry):
    """A call of plain tensors by a recipe that the attention kernel may quantize by.

    Attributes:
        q: (B, Hq, Sq, D), bfloat16 or float16.
        k, v: (B, Hkv, Sk, D), likewise.
        qk: names the recipe, one of recipe.FUSED_RECIPES.
        attn_mask: broadcastable to (B, Hq, Sq, Sk), or None.
        varlen: as of `Call`.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_scale: float
    qk: ProductType = "e4m3"
    causal: Causal = "none"
    out_dtype: torch.dtype = torch.bfloat16
    return_lse: bool = False
    attn_mask: torch.Tensor | None = None
    window: Window = CAUSAL_WINDOW
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    varlen: Varlen | None = None

    # of the `Call` to which it leads where the attention kernel quantizes q
    q_group, k_group, bias, fuse_q_quant = GROUPS[DEFAULT_RECIPE.q], GROUPS[DEFAULT_RECIPE.k], None, True

    @property
    def recipe(self) -> Recipe:
        return FUSED_RECIPES[self.qk]

    @property
    def kv_length(self) -> int:
        return self.k.shape[2]

    @property
    def value_dim(self) -> int:
        return self.v.shape[3]

    @property
    def int8(self) -> bool:
        """Whether Q·Kᵀ is computed in int8."""
        return self.qk == "int8"

    @property
    def adds_mean(self) -> bool:
        """Whether it matters what K's mean adds to the scores of a row."""
        return self.return_lse or self.softcap != 0 or self.sinks is not None

    @property
    def arguments(self) -> tuple:
        """The fields, in the order of the operators' arguments. Those of packed sequences have no qk and attn_mask."""
        tensors, options = (self.q, self.k, self.v), (self.window, self.softcap, self.sinks)
        results = self.causal, self.out_dtype, self.return_lse
        if self.varlen is not None:
            return *tensors, *self.varlen.arguments, self.softmax_scale, *results, *options
        return *tensors, self.softmax_scale, self.qk, *results, self.attn_mask, *options

    def call_of(self, key: Quantized, value: Quantized, query: Quantized | None = None, mean_scores: torch.Tensor | None = None) -> Call:
        """Attention to k and v that were quantized by the recipe; with q as it is if it wasn't.

        A kernel that quantizes q finds what K's mean adds to its scores. Other kernels are given it.
        """
        mask = None if self.attn_mask is None else self.attn_mask.expand(*self.q.shape[:3], key.length)
        q, q_scale = (self.q, None) if query is None else (query.data, query.scale)
        return Call(
            q, q_scale, self.q_group, key.data, key.scale, self.k_group, value.data, value.scale, value.mean,
            mask, None, key.length, self.softmax_scale, self.causal, DEFAULT_RECIPE.compute, DEFAULT_RECIPE.two_level, self.out_dtype,
            self.return_lse, self.window, self.softcap, self.sinks, mean_scores,
            key.mean if query is None and self.adds_mean else None, self.varlen,
        )  # fmt: skip


AnyCall = Call | Problem


def unsupported_tma(x: torch.Tensor, name: str) -> str | None:
    """The reason why TMA can't load from x (B, H, S, D), or None if it can (CUDA driver API,
    cuTensorMapEncodeTiled)."""
    if x.data_ptr() % 16:
        return f"{name} doesn't start at a multiple of 16 bytes"
    of_batch, of_head, of_row, _ = strides = x.stride()
    bytes_of_element = x.element_size()
    if of_batch and of_head and of_row and (of_batch | of_head | of_row) * bytes_of_element % 16 == 0:
        return None  # most calls end here: the loop below takes as long as a small check can
    for size, stride in zip(x.shape[:3], strides[:3], strict=True):
        if stride * bytes_of_element % 16 or (stride == 0 and size > 1):
            return f"{name} has a stride of {stride} bytes, TMA needs multiples of 16"
    return None


def empty_output(q: torch.Tensor, value_dim: int, out_dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised (B, Hq, Sq, Dv), stored as (B, Sq, Hq, Dv) if q is stored like that, else contiguous."""
    batch, heads, length, _ = q.shape
    strides = q.stride()
    if strides[1] < strides[2]:
        return q.new_empty(batch, length, heads, value_dim, dtype=out_dtype).transpose(1, 2)
    return q.new_empty(batch, heads, length, value_dim, dtype=out_dtype)


def empty_lse(q: torch.Tensor, return_lse: bool) -> torch.Tensor:
    """An uninitialised float32 (B, Hq, Sq), or an empty tensor if the LSE isn't returned."""
    return q.new_empty(q.shape[:3] if return_lse else 0, dtype=torch.float32)
