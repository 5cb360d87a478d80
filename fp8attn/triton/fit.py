"""Codes of rows of Q or K with `token` scales, and the factors that fit these scales to them: quantization.fit."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import quantization as quantize_ref
from .tile import ROUNDER, e4m3_code, half_of_code

FIT_STEP: tl.constexpr = tl.constexpr(quantize_ref.FIT_STEP)
BASES: tl.constexpr = tl.constexpr(0x7A007A00)  # the half 1.5 * 2^15, twice; halves around it are FIT_STEP apart

FIT_PTX: tl.constexpr = tl.constexpr(f"""{{
    .reg .b32 low, high, first, second, square, eighth, base;
    .reg .b16 codes, more;
    mov.b32 base, {BASES.value};
    mov.b32 eighth, 0x30003000;
    cvt.rn.satfinite.e4m3x2.f32 codes, $6, $5;
    cvt.rn.satfinite.e4m3x2.f32 more, $8, $7;
    mov.b32 $0, {{codes, more}};
    cvt.rn.f16x2.f32 low, $6, $5;
    cvt.rn.f16x2.f32 high, $8, $7;
    cvt.rn.f16x2.e4m3x2 first, codes;
    cvt.rn.f16x2.e4m3x2 second, more;
    sub.rn.f16x2 low, low, first;
    sub.rn.f16x2 high, high, second;
    fma.rn.f16x2 low, first, low, base;
    fma.rn.f16x2 high, second, high, base;
    mul.rn.f16x2 square, first, eighth;
    fma.rn.f16x2 first, first, square, base;
    mul.rn.f16x2 square, second, eighth;
    fma.rn.f16x2 second, second, square, base;
    prmt.b32 $1, low, first, 0x5410;
    prmt.b32 $2, low, first, 0x7632;
    prmt.b32 $3, high, second, 0x5410;
    prmt.b32 $4, high, second, 0x7632;
}}""")
"""PTX for four numbers, $5 to $8. $0: their codes. $1 to $4: for each number the bits of two halves, 1.5 * 2^15 plus
its product and 1.5 * 2^15 plus its square, both rounded to FIT_STEP."""


@triton.jit
def fit_steps(a, b):
    """quantization.fit_steps of halves, int32; 0 for NaN."""
    steps = (a.to(tl.float32) * b.to(tl.float32) * (1 / FIT_STEP) + ROUNDER) - ROUNDER
    return tl.where(steps == steps, steps, 0.0).to(tl.int32)


@triton.jit
def fitted_codes(y, NATIVE: tl.constexpr, CAREFUL: tl.constexpr):
    """The e4m3 bytes of float32 rows y (M, N), already divided by their scales, as in e4m3_code; and the factors (M,)
    for the scales.

    NATIVE: the architecture has conversion instructions, called by PTX as in feedback.feed_back, for the same reasons.
    CAREFUL: y may hold NaN.
    """
    if NATIVE:
        types: tl.constexpr = (tl.uint8, tl.int32)
        codes, steps = tl.inline_asm_elementwise(FIT_PTX, "=r,=r,=r,=r,=r,r,r,r,r", [y], dtype=types, is_pure=True, pack=4)
        both = tl.sum(steps - BASES, 1)
        product = (both << 16) >> 16  # |product| < 2^15, and so is the square
        square = (both - product) >> 16
    else:
        codes = e4m3_code(y, False)
        code = half_of_code(codes)
        product = tl.sum(fit_steps(code, y.to(tl.float16) - code), 1)
        square = tl.sum(fit_steps(code, code * 0.125), 1)
    square *= 8
    fit = tl.where(square > 0, tl.div_rn((square + product).to(tl.float32), square.to(tl.float32)), 1.0)
    if CAREFUL:
        fit = tl.where(tl.max(tl.where(y == y, 0, 1), 1) > 0, 1.0, fit)
    return codes, fit
