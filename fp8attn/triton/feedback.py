"""Error feedback, one token of V at a time: quantize.encode_values."""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from .. import quantize as definition
from .tile import e4m3_code, half_of_code

LARGEST_PUSH: tl.constexpr = tl.constexpr(definition.LARGEST_PUSH)
_TWO = 2 * struct.pack(">e", definition.LARGEST_PUSH).hex()

PTX: tl.constexpr = tl.constexpr(f"""{{
    .reg .b32 z, most, push, rest, codes;
    .reg .b16 code;
    cvt.rn.f16x2.f32 z, $4, $3;
    and.b32 most, z, 0x7FFF7FFF;
    mov.b32 push, 0x{_TWO};
    mul.rn.f16x2 most, most, push;
    and.b32 push, $5, 0x7FFF7FFF;
    min.f16x2 most, most, push;
    and.b32 push, $5, 0x80008000;
    or.b32 push, push, most;
    add.rn.f16x2 push, z, push;
    cvt.rn.satfinite.e4m3x2.f16x2 code, push;
    cvt.rn.f16x2.e4m3x2 rest, code;
    sub.rn.f16x2 rest, z, rest;
    fma.rn.f16x2 $2, rest, $6, $5;
    cvt.u32.u16 codes, code;
    and.b32 $0, codes, 255;
    shr.u32 $1, codes, 8;
}}""")
"""Two channels. Codes $0 and $1, owed $2; x in $3 and $4, owed $5, gain $6."""


@triton.jit
def feed_back(x, owed, gain, NATIVE: tl.constexpr):
    """Round a token of each group: its codes, int32, and what is owed then.

    Args:
        x: float32 values over their scales. owed: float16. gain: float16, quantize.feedback.
        NATIVE: the architecture converts to e4m3 by itself. Then by PTX, for Triton doesn't take two halves at a time; and of its own conversions
            back and forth, whose codes are packed then, ptxas 12.8 made some that read R1.
    """
    if NATIVE:
        return tl.inline_asm_elementwise(PTX, "=r,=r,=r,r,r,r,r", [x, owed, gain], dtype=(tl.int32, tl.float16), is_pure=True, pack=2)
    else:
        z = x.to(tl.float16)
        most = tl.minimum(tl.abs(z) * LARGEST_PUSH, tl.abs(owed))
        push = (most.to(tl.uint16, bitcast=True) | (owed.to(tl.uint16, bitcast=True) & 0x8000)).to(tl.float16, bitcast=True)
        code = e4m3_code((z + push).to(tl.float32), False)
        rest = (z - half_of_code(code)).to(tl.float32)
        return code.to(tl.int32), (owed.to(tl.float32) + rest * gain.to(tl.float32)).to(tl.float16)
