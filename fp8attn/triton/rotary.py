"""Rotary position embeddings of a batch's new tokens in one launch: `rotary.turned` by a kernel, bit for bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import INTERPRETING
from ..pages import PagedBatch, tokens_of
from ..rotary import Angles
from .launch import ceil_div, launch
from .paged_append import row_strides
from .paged_tensors import position_of_token
from .quantize_steps import power_of_2

TOKENS = 16
"""Tokens of a program."""

HEADS = 4
"""Heads of a program, which share angles."""


@triton.jit
def turn_head(
    x, strides, out, out_strides, head, row, own, here, exists, cos, sin, DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Turn one head of tokens (N,): those that are `here`, at `row` and `own` of x. cos, sin: (N, PAIRS rounded up)."""
    WIDTH: tl.constexpr = cos.shape[1]
    pair = tl.arange(0, WIDTH)
    first = pair * 2 if INTERLEAVED else pair
    apart: tl.constexpr = 1 if INTERLEAVED else PAIRS
    head = head.to(tl.int64)
    row = row.to(tl.int64)
    own = own.to(tl.int64)
    at = x + (row * strides[0] + head * strides[1] + own * strides[2])[:, None]
    to = out + (row * out_strides[0] + head * out_strides[1] + own * out_strides[2])[:, None]
    inside = here[:, None] & (pair < PAIRS)[None, :]
    a = tl.load(at + first[None, :], mask=inside, other=0.0)
    b = tl.load(at + first[None, :] + apart, mask=inside, other=0.0)
    y = a.to(tl.float32)
    z = b.to(tl.float32)
    turned = exists[:, None]
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(to + first[None, :], tl.where(turned, (y * cos - z * sin).to(kind), a.to(kind)), mask=inside)
    tl.store(to + first[None, :] + apart, tl.where(turned, (z * cos + y * sin).to(kind), b.to(kind)), mask=inside)
    if 2 * PAIRS < DIM:
        REST: tl.constexpr = triton.next_power_of_2(DIM - 2 * PAIRS)
        channel = 2 * PAIRS + tl.arange(0, REST)
        others = here[:, None] & (channel < DIM)[None, :]
        tl.store(to + channel[None, :], tl.load(at + channel[None, :], mask=others).to(kind), mask=others)


@triton.jit(do_not_specialize=["tokens", "length", "q_heads", "kv_heads", "rows_of_batch", "positions"])
def rotary_kernel(
    q, q_strides, k, k_strides, q_out, q_out_strides, k_out, k_out_strides, cos, sin, lengths, counts, cu_seqlens, tokens, length, q_heads,
    kv_heads, rows_of_batch, positions, TOKENS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
    WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Grid: chunks of TOKENS tokens x groups of HEADS heads, those of queries before those of keys, in one dimension.

    Args:
        q, k, q_out, k_out: strides of (B, H, S, D), or of packed (1, H, T, D) with stride 0 of rows; k may be None.
        tokens, length: B * S and S, or T.
        positions: rows of cos and sin.
    """
    groups = tl.cdiv(q_heads + kv_heads, HEADS)
    token = tl.program_id(0) // groups * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    _, position, exists = position_of_token(token, lengths, counts, cu_seqlens, rows_of_batch, length)
    exists &= here
    pair = tl.arange(0, WIDTH)
    angle = position.to(tl.int64)[:, None] * PAIRS + pair[None, :]
    has_angle = (exists & (position < positions))[:, None] & (pair < PAIRS)[None, :]
    c = tl.load(cos + angle, mask=has_angle, other=float("nan")).to(tl.float32)
    s = tl.load(sin + angle, mask=has_angle, other=float("nan")).to(tl.float32)
    row = token // length
    own = token % length
    for i in tl.static_range(HEADS):
        head = tl.program_id(0) % groups * HEADS + i
        if head < q_heads:
            turn_head(q, q_strides, q_out, q_out_strides, head, row, own, here, exists, c, s, DIM, PAIRS, INTERLEAVED)
        if k is not None:  # noqa: SIM102  # known when it is compiled
            if (head >= q_heads) & (head < q_heads + kv_heads):
                turn_head(k, k_strides, k_out, k_out_strides, head - q_heads, row, own, here, exists, c, s, DIM, PAIRS, INTERLEAVED)


def by_heads(x: torch.Tensor | None) -> tuple[torch.Tensor | None, tuple[int, ...]]:
    """A tensor (B, H, S, D), or packed (T, H, D), and its strides as the kernel takes them."""
    if x is None:
        return None, (0, 0, 0, 1)
    return x, row_strides(x if x.dim() == 4 else x.transpose(0, 1).unsqueeze(0))


def turn(q: torch.Tensor, k: torch.Tensor | None, batch: PagedBatch, angles: Angles, *, warmup: bool = False) -> list[torch.Tensor]:
    """`rotary.turned` of queries, and of keys if there are any, contiguous. `warmup`: compile only."""
    # the interpreter truncates to bfloat16 instead of rounding
    dtype = torch.float32 if INTERPRETING else q.dtype
    outs = [None if x is None else x.new_empty(x.shape, dtype=dtype) for x in (q, k)]
    length, pairs, kv_heads = tokens_of(q), angles.cos.shape[1], 0 if k is None else k.shape[1]
    tokens = length if q.dim() == 3 else length * q.shape[0]
    if tokens > 0:
        launch(
            rotary_kernel, (ceil_div(tokens, TOKENS) * ceil_div(q.shape[1] + kv_heads, HEADS),),
            *by_heads(q), *by_heads(k), *by_heads(outs[0]), *by_heads(outs[1]), angles.cos, angles.sin, batch.lengths, batch.counts,
            batch.cu_seqlens, tokens, length, q.shape[1], kv_heads, batch.lengths.shape[0], angles.cos.shape[0], TOKENS, HEADS, q.shape[-1],
            pairs, power_of_2(pairs), angles.interleaved,
            num_warps=4, enable_fp_fusion=False, warmup=warmup,
        )  # fmt: skip
    return [x.to(q.dtype) for x in outs if x is not None]
