"""2^x as PTX. Some exponentials run on the FMA pipe, because MUFU, which runs ex2.approx, takes four times as long."""

from __future__ import annotations

import functools
import struct

PACK = 8
"""Numbers that one block of inline assembly processes."""

CONSTRAINTS = ",".join(["=f"] * PACK + ["f"] * PACK)

COEFFICIENTS = (0.9999280735404958, 0.6932609854573365, 0.2426111221943299, 0.055171669074862734)
"""Coefficients of the cubic c0 + c1 f + … for 2^f on [-1/2, 1/2]. Minimax in relative error, which is 7.5e-5."""

LOWEST = -126.0
"""Below this x, the polynomial gives 2^-126."""

ROUNDER = 1.5 * 2.0**23 + 127
"""The lowest bits of x + ROUNDER are x, rounded to an integer and biased like an exponent."""


def _literal(value: float) -> str:
    """A float32 in PTX syntax."""
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"


def _polynomial(out: str, x: str) -> list[str]:
    """PTX of Cody and Waite's scheme: 2^round(x) is assembled from bits, 2^(x - round(x)) is a polynomial.

    NaN stays NaN.
    """
    c = [_literal(value) for value in COEFFICIENTS]
    return [
        f"max.NaN.f32 x, {x}, {_literal(LOWEST)};",
        f"add.rn.f32 t, x, {_literal(ROUNDER)};",
        f"sub.rn.f32 f, t, {_literal(ROUNDER)};",
        "sub.rn.f32 f, x, f;",
        f"fma.rn.f32 y, f, {c[3]}, {c[2]};",
        f"fma.rn.f32 y, y, f, {c[1]};",
        f"fma.rn.f32 y, y, f, {c[0]};",
        "mov.b32 e, t;",
        "shl.b32 e, e, 23;",
        "mov.b32 t, e;",
        f"mul.rn.f32 {out}, y, t;",
    ]


@functools.cache
def assembly(polynomials: int) -> str | None:
    """PTX that computes 2 to the power of PACK numbers. `polynomials` of them, evenly spread, are polynomials. None if
    there are none.

    The idea is from FlashAttention-4 (Zadouri et al., 2026: exponentials emulated on the FMA units), for another
    balance of units.
    """
    if polynomials == 0:
        return None
    lines = ["{ .reg .f32 x, t, f, y; .reg .b32 e;"]
    for i in range(PACK):
        out, x = f"${i}", f"${PACK + i}"
        if (i + 1) * polynomials // PACK > i * polynomials // PACK:
            lines += _polynomial(out, x)
        else:
            lines.append(f"ex2.approx.ftz.f32 {out}, {x};")
    return " ".join([*lines, "}"])
