"""2^x as PTX, some of it on the FMA pipe, because MUFU, where ex2.approx runs, takes four times as long."""

from __future__ import annotations

import functools
import struct

PACK = 8
"""Numbers that one work_tile of assembly takes."""

CONSTRAINTS = ",".join(["=f"] * PACK + ["f"] * PACK)

COEFFICIENTS = (0.9999280735404958, 0.6932609854573365, 0.2426111221943299, 0.055171669074862734)
"""2^f on [-1/2, 1/2] as a cubic c0 + c1 f + …, minimax in relative error, which is 7.5e-5."""

LOWEST = -126.0
"""Below, the polynomial gives 2^-126."""

ROUNDER = 1.5 * 2.0**23 + 127
"""x + ROUNDER has x, rounded to an integer and biased as an exponent is, in its lowest bits."""


def _literal(value: float) -> str:
    """A float32 as PTX writes it."""
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"


def _polynomial(out: str, x: str) -> list[str]:
    """Cody and Waite's scheme: 2^round(x) is put together as bits, 2^(the rest) is a polynomial. NaN stays NaN."""
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
    """2 to the power of PACK numbers, `polynomials` of them, spread evenly, as polynomials; None if none is.

    The idea is FlashAttention-4's (Zadouri et al., 2026: exponentials emulated on the FMA units), for another balance of units.
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
