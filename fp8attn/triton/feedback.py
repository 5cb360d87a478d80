"""Error feedback of quantization.encode_values, for one token of V at a time."""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from .. import quantization as quantize_ref
from .tile import e4m3_code, half_of_code

LARGEST_CORRECTION: tl.constexpr = tl.constexpr(quantize_ref.LARGEST_CORRECTION)
_TWO = 2 * struct.pack(">e", quantize_ref.LARGEST_CORRECTION).hex()

FEEDBACK_PTX: tl.constexpr = tl.constexpr(f"""{{
    .reg .b32 z, most, correction, rest, codes;
    .reg .b16 code;
    cvt.rn.f16x2.f32 z, $4, $3;
    and.b32 most, z, 0x7FFF7FFF;
    mov.b32 correction, 0x{_TWO};
    mul.rn.f16x2 most, most, correction;
    and.b32 correction, $5, 0x7FFF7FFF;
    min.f16x2 most, most, correction;
    and.b32 correction, $5, 0x80008000;
    or.b32 correction, correction, most;
    add.rn.f16x2 correction, z, correction;
    cvt.rn.satfinite.e4m3x2.f16x2 code, correction;
    cvt.rn.f16x2.e4m3x2 rest, code;
    sub.rn.f16x2 rest, z, rest;
    fma.rn.f16x2 $2, rest, $6, $5;
    cvt.u32.u16 codes, code;
    and.b32 $0, codes, 255;
    shr.u32 $1, codes, 8;
}}""")
"""PTX for two channels. Outputs: codes $0 and $1, new residual $2. Inputs: x $3 and $4, residual $5, gain $6."""


@triton.jit
def feed_back(x, residual, gain, NATIVE: tl.constexpr):
    """Round one token of each run: its codes, int32, and the new residual, float16.

    Args:
        x: float32 values divided by their scales.
        residual: float16, accumulated rounding error of the run.
        gain: float16, quantization.feedback.
        NATIVE: the architecture has instructions that convert to e4m3. They are called by PTX for two reasons. Triton
            doesn't process two halves at a time. And ptxas 12.8 miscompiled some of Triton's own conversions to e4m3
            and back, followed by packing of the codes: the result read R1.
    """
    if NATIVE:
        return tl.inline_asm_elementwise(FEEDBACK_PTX, "=r,=r,=r,r,r,r,r", [x, residual, gain], dtype=(tl.int32, tl.float16), is_pure=True, pack=2)
    else:
        z = x.to(tl.float16)
        most = tl.minimum(tl.abs(z) * LARGEST_CORRECTION, tl.abs(residual))
        correction = (most.to(tl.uint16, bitcast=True) | (residual.to(tl.uint16, bitcast=True) & 0x8000)).to(tl.float16, bitcast=True)
        code = e4m3_code((z + correction).to(tl.float32), False)
        rest = (z - half_of_code(code)).to(tl.float32)
        return code.to(tl.int32), (residual.to(tl.float32) + rest * gain.to(tl.float32)).to(tl.float16)
