"""Calls of packed sequences with one wrong argument each, and the errors that they must raise."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch

import fp8attn
from fp8attn import Recipe, ops
from fp8attn.ops import library_ops

Sample = tuple[Callable[[], object], type[Exception], str]

META = torch.device("meta")


def starts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


STARTS_Q, STARTS_K = starts(0, 3, 7), starts(0, 5, 9)
ARGUMENTS = {
    "q": torch.zeros(7, 4, 32, dtype=torch.bfloat16),
    "k": torch.zeros(9, 2, 32, dtype=torch.bfloat16),
    "v": torch.zeros(9, 2, 16, dtype=torch.bfloat16),
    "cu_seqlens_q": STARTS_Q,
    "cu_seqlens_k": STARTS_K,
}
Q, K, V = (ARGUMENTS[name] for name in "qkv")
with mock.patch.object(ops, "has_kernels", return_value=False):  # interpreted kernels take a second in every worker
    QUANTIZED_Q = fp8attn.quantize(Q, cu_seqlens_q=STARTS_Q)
    QUANTIZED_K, QUANTIZED_V = fp8attn.quantize(None, K, V, cu_seqlens_k=STARTS_K)
    DENSE = fp8attn.quantize(Q.transpose(0, 1)[None])

FORWARD = {
    "q": QUANTIZED_Q.data,
    "q_scale": QUANTIZED_Q.scale,
    "k": QUANTIZED_K.data,
    "k_scale": QUANTIZED_K.scale,
    "k_group": 128,
    "v": QUANTIZED_V.data,
    "v_scale": QUANTIZED_V.scale,
    "v_mean": QUANTIZED_V.mean,
    "cu_seqlens_q": STARTS_Q,
    "cu_seqlens_k": STARTS_K,
    "seqused_k": None,
    "longest_q": 4,
    "longest_k": 5,
    "softmax_scale": 0.1,
    "causal": "none",
    "compute": "e4m3",
    "two_level": None,
    "out_dtype": torch.bfloat16,
    "return_lse": True,
}


def call(**fields) -> Callable[[], object]:
    """A call of varlen_sdpa, with some arguments replaced."""
    return lambda: fp8attn.varlen_sdpa(**(ARGUMENTS | {"backend": "modelled"} | fields))


def forward(name: str = "modelled", **fields) -> Callable[[], object]:
    """A call of a forward operator, with some fields replaced."""
    return lambda: getattr(library_ops, f"{name}_varlen_forward")(*(FORWARD | fields).values())


def quantize(**fields) -> Callable[[], object]:
    return lambda: fp8attn.quantize(**({"query": Q, "key": K, "value": V, "cu_seqlens_q": STARTS_Q, "cu_seqlens_k": STARTS_K} | fields))


def needs_grad(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


VARLEN_ERRORS: list[Sample] = [
    (call(q=[1.0]), TypeError, r"q is a list; it must be a torch.Tensor or a fp8attn.Quantized"),
    (call(q=Q[None]), ValueError, r"q has shape \(1, 7, 4, 32\); it must be \(tokens, heads, head_dim\)"),
    (call(q=Q.double()), TypeError, "q is torch.float64; it must be one of"),
    (call(k=K.transpose(0, 2)), ValueError, "k has strides .*; the last must be 1"),
    (call(v=V[..., :12]), ValueError, "v has head_dim 12; it must be a multiple of 8 from 16 to 256"),
    (call(q=DENSE), ValueError, "q is Quantized without cu_seqlens; it must be packed"),
    (lambda: fp8attn.sdpa(QUANTIZED_Q, QUANTIZED_K, QUANTIZED_V), ValueError, "query is Quantized with cu_seqlens; it must be quantized without"),
    (call(k=QUANTIZED_K), TypeError, "k is torch.float8_e4m3fn and v torch.bfloat16; both must be float, or both Quantized"),
    (call(k=K.to(META)), ValueError, "k is on meta; it must be on q's device, cpu"),
    (call(k=K.half()), TypeError, "k is torch.float16; it must be q's torch.bfloat16"),
    (call(v=V[:8]), ValueError, "v has 8 tokens and 2 heads; it must have k's, 9 and 2"),
    (call(k=torch.zeros(9, 2, 64).bfloat16()), ValueError, "k has head_dim 64; it must be q's, 32"),
    (call(q=torch.zeros(7, 3, 32).bfloat16()), ValueError, "q has 3 heads; they must be a multiple of k's 2"),
    (call(cu_seqlens_q=None), TypeError, r"cu_seqlens_q is None; it must be int32 \(N \+ 1\)"),
    (call(cu_seqlens_q=STARTS_Q.long()), TypeError, "cu_seqlens_q is torch.int64; it must be torch.int32"),
    (call(cu_seqlens_k=STARTS_K[:1]), ValueError, r"cu_seqlens_k has shape \(1,\); it must be \(sequences \+ 1,\), of one sequence at least"),
    (call(cu_seqlens_k=starts(0, 0, 5, 5, 9)[::2]), ValueError, r"cu_seqlens_k has strides \(2,\); it must be contiguous"),
    (call(cu_seqlens_k=starts(0, 9)), ValueError, "cu_seqlens_k is of 1 sequences; it must be of as many as cu_seqlens_q, 2"),
    (call(seqused_k=starts(1, 2, 3)), ValueError, r"seqused_k has shape \(3,\); it must be \(2,\)"),
    (call(seqused_k=starts(1, 1, 2, 2)[::2]), ValueError, r"seqused_k has strides \(2,\); it must be contiguous"),
    (call(max_seqlen_q=4.0), TypeError, "max_seqlen_q is a float; it must be an int or None"),
    (call(max_seqlen_k=-1), ValueError, "max_seqlen_k is -1; it must be 0 or more"),
    (
        call(k=QUANTIZED_K, v=QUANTIZED_V, cu_seqlens_k=STARTS_K.clone()),
        ValueError,
        "cu_seqlens_k isn't the tensor that k was quantized with; it must be that tensor, or None",
    ),
    (call(is_causal=1), TypeError, "is_causal is a int; it must be a bool"),
    (call(window=(1, 2, 3)), TypeError, r"window is \(1, 2, 3\); it must be \(left, right\)"),
    (call(scale="1"), TypeError, "scale is a str; it must be a number"),
    (call(out_dtype=torch.int8), TypeError, "out_dtype is torch.int8; it must be float16, bfloat16 or float32"),
    (call(sinks=torch.zeros(3)), ValueError, r"sinks has shape \(3,\); it must be \(4,\)"),
    (call(v=needs_grad(V)), RuntimeError, "v requires grad"),
    (call(recipe="fast"), TypeError, "recipe is a str; it must be a fp8attn.Recipe"),
    (call(recipe=Recipe(k="head")), ValueError, "recipe.k is 'head'; it must be 'block' or 'token'"),
    (call(recipe=Recipe(smooth_q=True)), ValueError, "recipe.smooth_q is True; it must be False"),
    (call(recipe=Recipe(recent=128)), ValueError, r"recipe keeps keys \(sinks=0, recent=128\); it must keep none"),
    (quantize(query=QUANTIZED_Q), TypeError, "query is quantized already; it must be float16, bfloat16 or float32"),
    (quantize(query=None), ValueError, "cu_seqlens_q is given; it must be None, as query is"),
    (quantize(cu_seqlens_q=None), ValueError, "cu_seqlens_q is None; it must be given, as query is"),
    (quantize(value=None), ValueError, "value is None; key and value are quantized together"),
    (quantize(value=V[:, :1]), ValueError, "value has 9 tokens and 1 heads; it must have key's, 9 and 2"),
    (lambda: fp8attn.quantize(Q[None], seqused_k=STARTS_K), ValueError, "seqused_k is given and cu_seqlens_k is None; it must be None, too"),
    (forward(q=FORWARD["q"].expand(2, -1, -1, -1)), ValueError, r"q has shape \(2, 4, 7, 32\); packed, it must have 1 as its first size"),
    (forward(k_group=0), ValueError, "k_group is 0; packed, it must be 1 or 128"),
    (forward(causal="top_left"), ValueError, "causal is 'top_left'; packed, it must be 'none' or 'bottom_right'"),
    (forward(longest_q=-1), ValueError, "longest_q is -1; it must be 0 or more"),
    (forward(cu_seqlens_k=starts(0, 9)), ValueError, "cu_seqlens_k is of 1 sequences; it must be of as many as cu_seqlens_q, 2"),
    (forward(v_scale=torch.ones(1, 2, 16)), ValueError, r"v_scale has shape \(1, 2, 16\); it must be \(2, 2, 16\)"),
    (forward(v=FORWARD["v"][..., :128].contiguous()), ValueError, r"v has shape \(1, 2, 16, 128\); it must be \(1, 2, 16, 256\)"),
    (
        lambda: library_ops.varlen_dequantize(
            QUANTIZED_K.data.expand(2, -1, -1, -1), QUANTIZED_K.scale, "block", "rows", QUANTIZED_K.mean, STARTS_K, None, 9
        ),
        ValueError,
        r"x.data has shape \(2, 2, 9, 32\); packed, it must have 1 as its first size",
    ),
    (
        lambda: library_ops.varlen_unsmoothed_lse(
            torch.zeros(1, 7, 4).transpose(1, 2), Q.transpose(0, 1)[None], torch.zeros(2, 2, 32), STARTS_Q, 1.0, 32
        ),
        ValueError,
        "lse has strides .*; it must be contiguous",
    ),
]
