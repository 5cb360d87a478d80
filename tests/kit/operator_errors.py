"""Direct calls of operators with one wrong argument each, and the errors that they must raise."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fp8attn.ops import library_ops

E4M3 = torch.float8_e4m3fn


Sample = tuple[Callable[[], object], type[Exception], str]


def e4m3(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=E4M3)


FORWARD = {
    "q": e4m3(2, 4, 70, 32),
    "q_scale": torch.ones(2, 4, 70),
    "q_group": 1,
    "k": e4m3(2, 2, 200, 32),
    "k_scale": torch.ones(2, 2, 2),
    "k_group": 128,
    "v": e4m3(2, 2, 16, 256),
    "v_scale": torch.ones(2, 2, 16),
    "v_mean": torch.zeros(2, 2, 16),
    "attn_mask": None,
    "bias": None,
    "kv_length": 200,
    "softmax_scale": 0.1,
    "causal": "none",
    "compute": "e4m3",
    "two_level": None,
    "out_dtype": torch.bfloat16,
    "return_lse": True,
}


FLOATS = {"q": torch.zeros(2, 4, 70, 32), "k": torch.zeros(2, 2, 200, 32), "v": torch.zeros(2, 2, 200, 16)}


QUANTIZE = ("token", "block", "channel", True, True, False, 64, "e4m3")


def forward(name: str = "modelled", **fields) -> Callable[[], object]:
    """A call of a forward operator, with some fields replaced."""
    return lambda: getattr(library_ops, f"{name}_forward")(*(FORWARD | fields).values())


def plain(**fields) -> Callable[[], object]:
    """A call of the reference's operator."""
    tensors = FLOATS | {"attn_mask": None} | {name: x for name, x in fields.items() if name in ("q", "k", "v", "attn_mask")}
    others = {"softmax_scale": 0.1, "causal": "none", "dtype": torch.float32, "out_dtype": torch.float32}
    return lambda: library_ops.reference_forward(*tensors.values(), *(others | {n: x for n, x in fields.items() if n in others}).values())


def half_keys(**fields) -> Callable[[], object]:
    arguments = {**FLOATS, "fp8_out": torch.zeros(2, 4, 70, 16), "fp8_lse": torch.zeros(2, 4, 70), "k_mean": torch.zeros(2, 2, 32)}
    arguments |= fields
    return lambda: library_ops.modelled_half_keys(*arguments.values(), 32, 128, 128, 0.1, "none", torch.float32, False)


OPERATOR_ERRORS: list[Sample] = [
    (forward(q=e4m3(4, 70, 32)), ValueError, r"q has shape \(4, 70, 32\); it must have 4 dimensions"),
    (forward(q=torch.zeros(2, 4, 70, 32)), TypeError, "q is torch.float32; it must be torch.float8_e4m3fn or torch.int8"),
    (forward(k=e4m3(2, 2, 32, 200).transpose(2, 3)), ValueError, "k has strides .*; the last must be 1"),
    (forward(k=e4m3(1, 2, 200, 32)), ValueError, r"k has shape \(1, 2, 200, 32\); it must be \(2, 2, 200, 32\)"),
    (forward(k=e4m3(2, 3, 200, 32)), ValueError, "q has 4 heads; they must be a multiple of k's 3"),
    (forward(kv_length=199), ValueError, "kv_length is 199; it must be k's, 200"),
    (forward(v=e4m3(2, 2, 16, 128)), ValueError, r"v has shape \(2, 2, 16, 128\); it must be \(2, 2, 16, 256\)"),
    (forward(v=e4m3(2, 2, 12, 256)), ValueError, "head_dim is 12; it must be a multiple of 8 from 16 to 256"),
    (forward(q_scale=None), TypeError, "q_scale is None and q is torch.float8_e4m3fn; quantized q has scales, others have none"),
    (forward("auto", q=torch.zeros(2, 4, 70, 32, dtype=torch.bfloat16)), TypeError, "q_scale is given and q is torch.bfloat16; quantized q has"),
    (
        forward(window=(-1, 0), softcap=0.0, sinks=None, mean_scores=None, lse_mean=torch.zeros(2, 2, 16)),
        ValueError,
        r"lse_mean has shape \(2, 2, 16\); it must be \(2, 2, 32\)",
    ),
    (forward(q_group=7), ValueError, r"q_group is 7; it must be 0 \(a head's rows\), 1 or 128"),
    (forward(k_scale=torch.ones(2, 2, 1)), ValueError, r"k_scale has shape \(2, 2, 1\); it must be \(2, 2, 2\)"),
    (forward(attn_mask=torch.ones(70, 200)), ValueError, r"attn_mask has shape \(70, 200\); it must be \(2, 4, 70, 200\)"),
    (forward(attn_mask=torch.ones(2, 4, 70, 200), causal="top_left"), ValueError, "attn_mask is given and causal is 'top_left'; it must be 'none'"),
    (forward(v=e4m3(2, 2, 16, 512)[..., :256]), ValueError, "v has strides .*; it must be contiguous"),
    (forward(bias=torch.zeros(2, 4, 1, 200)), ValueError, r"bias has shape \(2, 4, 1, 200\); it must be \(2, 4, 2, 200\)"),
    (forward(bias=torch.zeros(2, 4, 2, 400)[..., ::2]), ValueError, "bias has strides .*; it must be contiguous"),
    (forward(causal="left"), ValueError, "causal is 'left'; it must be one of"),
    (forward(window=(-1, 0), softcap=-1.0), ValueError, "softcap is -1.0; it must be 0"),
    (forward(window=(-1, 0), softcap=0.0, sinks=torch.zeros(8)[::2]), ValueError, "sinks has strides .*; it must be contiguous"),
    (
        forward(window=(-1, 0), softcap=0.0, sinks=None, mean_scores=torch.zeros(2, 4, 69)),
        ValueError,
        r"mean_scores has shape \(2, 4, 69\); it must be \(2, 4, 70\)",
    ),
    (
        lambda: library_ops.reference_forward(*FLOATS.values(), None, 0.1, "none", torch.float32, torch.float32, (1, 1)),
        ValueError,
        r"window is \(1, 1\) and causal is 'none'; it must be \(-1, 0\)",
    ),
    (forward(softmax_scale=float("nan")), ValueError, "softmax_scale is nan; it must be a finite number"),
    (forward(out_dtype=torch.int8), TypeError, "out_dtype is torch.int8; it must be one of"),
    (plain(k=torch.zeros(2, 3, 200, 32)), ValueError, "q has 4 heads; they must be a multiple of k's 3"),
    (plain(v=torch.zeros(2, 2, 199, 16)), ValueError, r"v has shape \(2, 2, 199, 16\); it must be \(2, 2, 200, 16\)"),
    (half_keys(fp8_out=None), ValueError, "fp8_out is None; fp8_out and fp8_lse go together"),
    (half_keys(fp8_out=torch.zeros(2, 4, 70, 8)), ValueError, r"fp8_out has shape \(2, 4, 70, 8\); it must be \(2, 4, 70, 16\)"),
    (half_keys(fp8_lse=torch.zeros(2, 70, 4).transpose(1, 2)), ValueError, "fp8_lse has strides .*; it must be contiguous"),
    (half_keys(k_mean=torch.zeros(2, 32, 2).transpose(1, 2)), ValueError, "k_mean has strides .*; it must be contiguous"),
    (lambda: library_ops.quantize(*FLOATS.values(), "row", *QUANTIZE[1:]), ValueError, "Recipe.q is 'row'; it must be one of"),
    (lambda: library_ops.quantize(FLOATS["q"][:1], FLOATS["k"], FLOATS["v"], *QUANTIZE), ValueError, "query has batch 1; it must be key's, 2"),
    (
        lambda: library_ops.score_bias(torch.zeros(2, 3, 2, 32), FORWARD["k"], FORWARD["k_scale"], "block"),
        ValueError,
        r"q_mean has shape \(2, 3, 2, 32\); it must be \(2, a multiple of 2, groups of queries, 32\)",
    ),
    (
        lambda: library_ops.import_kv(FORWARD["k"], FORWARD["k_scale"], "block", e4m3(2, 2, 100, 16)),
        ValueError,
        r"v has shape \(2, 2, 100, 16\); it must be \(2, 2, 200, 16\)",
    ),
    (
        lambda: library_ops.unsmoothed_lse(torch.zeros(2, 4, 70), FLOATS["q"], torch.zeros(2, 3, 32), 0.1, 32),
        ValueError,
        r"k_mean has shape \(2, 3, 32\); it must be \(2, a divisor of 4, 32\)",
    ),
    (
        lambda: library_ops.auto_forward_from_fp16(*FLOATS.values(), 0.1, "int4", "none", torch.float32, False),
        ValueError,
        r"qk is 'int4'; it must be one of \('e4m3', 'int8'\)",
    ),
    (
        lambda: library_ops.modelled_sdpa(*FLOATS.values(), None, 0.1, "none", "fast", torch.float32, False),
        ValueError,
        "recipe is 'fast'; it must be",
    ),
    (lambda: library_ops.rotate(FLOATS["q"], 24, 1.0), ValueError, "part is 24; it must be 0 or a power of two that divides x's last size, 32"),
]
