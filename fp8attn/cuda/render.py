"""Renders C++: constants and config structs that Python and C++ share, wrappers of wgmma, and the instances of kernels.

wgmma has a different list of registers for every width.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import astuple, fields
from typing import Any, get_args

from .. import layout, pages, recipe, reference, schedule
from .. import quantization as quantize_ref
from .append import OF_WORD, AppendConfig
from .configs import KEYS, ONES, ROWS, VALUE_PART, HopperConfig
from .decode import MOST_FIXED_PARTS, TILES_OF_TICKET, DecodeConfig
from .decode_tensors import BESIDE_BLOCKS, MANY_ROWS, DecodeTensorsConfig
from .fused_head import FusedHeadConfig
from .fused_small import FusedSmallConfig
from .general_quantize import MEASURED_CHANNELS, MEASURED_CHUNK_BYTES, GeneralQuantizeConfig, UnsmoothLseConfig
from .portable import Operands, PortableConfig
from .prefill import HALF_BLOCK, PrefillConfig
from .quantize import CHUNK_STATS_BYTES, PACKED_UNIT_BYTES, PORTABLE_CLUSTER, QuantizeConfig

Attending = HopperConfig | PortableConfig | FusedSmallConfig | FusedHeadConfig
Config = Attending | QuantizeConfig | GeneralQuantizeConfig | UnsmoothLseConfig | DecodeConfig | DecodeTensorsConfig | PrefillConfig | AppendConfig

RENDERED = "// Rendered by fp8attn/cuda/render.py."

CONSTANTS: dict[str, int | float] = {
    "ROWS": ROWS,
    "KEYS": KEYS,
    "ONES": ONES,
    "VALUE_PART": VALUE_PART,
    "SCALE_BLOCK": recipe.SCALE_BLOCK,
    "RECENT": pages.RECENT,
    "HALF_BLOCK": HALF_BLOCK,
    "BIAS_ALIGNMENT": recipe.BIAS_ALIGNMENT,
    "E4M3_MAX": recipe.E4M3_MAX,
    "E4M3_LARGEST": recipe.E4M3_LARGEST,
    "INT8_LARGEST": recipe.INT8_MAX,
    "LOG2E": reference.LOG2E,
    "P_OFFSET": reference.P_OFFSET,
    "FALL": reference.FALL,
    "LARGEST_FACTOR": reference.LARGEST_FACTOR,
    "LARGEST_SCORE": reference.LARGEST_SCORE,
    "LOWEST_SCORE": reference.LOWEST_SCORE,
    "NOTHING": -quantize_ref.FLOAT_MAX,
    "CODE_ROUND": reference.CODE_ROUND,
    "CODE": reference.CODE,
    "CAP_CODES": reference.CAP_CODES,
    "CAP_CUBIC": reference.CAP_CUBIC,
    "CAP_LEAST": reference.CAP_LEAST,
    "CAP_LEAST_FALL": reference.CAP_LEAST_FALL,
    "CAP_LEAST_CURVE": reference.CAP_LEAST_CURVE,
    "CAP_LARGEST_ORIGIN": reference.CAP_LARGEST_ORIGIN,
    "LANES": quantize_ref.LANES,
    "TOKEN_CHUNK": quantize_ref.TOKEN_CHUNK,
    "SAMPLE": quantize_ref.SAMPLE,
    "GROUP": layout.GROUP,
    "TILE_PITCH": schedule.TILE_PITCH,
    "MOST_PARTS": schedule.MOST_PARTS,
    "MOST_FIXED_PARTS": MOST_FIXED_PARTS,
    "TILES_OF_TICKET": TILES_OF_TICKET,
    "MANY_ROWS": MANY_ROWS,
    "BESIDE_BLOCKS": BESIDE_BLOCKS,
    "RUN": quantize_ref.RUN,
    "SMALLEST_SCALE": quantize_ref.SMALLEST_SCALE,
    "LARGEST_MEAN": quantize_ref.LARGEST_MEAN,
    "MEAN_STEP": quantize_ref.MEAN_STEP,
    "MEAN_STEPS": quantize_ref.MEAN_STEPS,
    "ROUNDER": quantize_ref.ROUNDER,
    "FEEDBACK": quantize_ref.FEEDBACK,
    "LARGEST_CORRECTION": quantize_ref.LARGEST_CORRECTION,
    "LEAST_CHANNEL": pages.LEAST_CHANNEL,
    "LARGEST_EXPONENT": pages.LARGEST_EXPONENT,
    "OF_WORD": OF_WORD,
    "CHUNK_STATS_BYTES": CHUNK_STATS_BYTES,
    "PORTABLE_CLUSTER": PORTABLE_CLUSTER,
    "MEASURED_CHANNELS": MEASURED_CHANNELS,
    "MEASURED_CHUNK_BYTES": MEASURED_CHUNK_BYTES,
    "PACKED_UNIT_BYTES": PACKED_UNIT_BYTES,
}
"""Constants of C++ that Python defines, with the docstrings there: int, or float in float32."""


def float32(x: float) -> float:
    """The float32 next to x. nvcc warns of constants that aren't one."""
    return struct.unpack("f", struct.pack("f", x))[0]


def constants() -> str:
    """constants.h."""
    lines = [f"constexpr {type(x).__name__} {name} = {x if isinstance(x, int) else f'{float32(x).hex()}f'};" for name, x in CONSTANTS.items()]
    for name, numbers in (("TableHeader", schedule.TABLE_HEADER), ("TileField", schedule.TILE_FIELDS)):
        lines.append(f"enum class {name} : int {{ {', '.join(numbers)} }};")
    nan = f"constexpr uint8_t INT8_NAN = {recipe.INT8_NAN & 0xFF:#x};"
    return "\n".join((RENDERED, "#pragma once\n", "#include <cstdint>\n", "namespace fp8attn {\n", *lines, nan, "\n}  // namespace fp8attn\n"))


def structs() -> str:
    """config.h: the config of each kernel, its one template parameter; the fields are explained in Python."""
    text = f"{RENDERED}\n#pragma once\n\nnamespace fp8attn {{\n\nenum class Operands : int {{ {', '.join(get_args(Operands))} }};\n"
    for kind in KINDS:
        members = "".join(f"  {field.type} {field.name};\n" for field in fields(kind))
        text += f"\nstruct {kind.__name__} {{\n{members}}};\n"
    return text + "\n}  // namespace fp8attn\n"


WRAPPER = """
template <>
struct Wgmma<{n}> {{
  // d = a * b, or d += a * b; a (64, 32) and b (32, {n}) in shared memory
  template <bool ADD>
  __device__ static void run(float (&d)[{half}], uint64_t a, uint64_t b) {{
    asm volatile(
        "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{flag_ss}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{registers}}}, %{first}, %{second}, add, 1, 1;\\n}}\\n"
        : {outputs}
        : "l"(a), "l"(b), "n"(int(ADD)));
  }}

  // the same with a in registers
  template <bool ADD>
  __device__ static void run(float (&d)[{half}], const uint32_t (&a)[4], uint64_t b) {{
    asm volatile(
        "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{flag_rs}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{registers}}}, {{{a_registers}}}, %{fifth}, add, 1, 1;\\n}}\\n"
        : {outputs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(ADD)));
  }}
}};
"""


INT8_WRAPPER = """
template <>
struct Wgmma{kind}<{n}> {{
  // d = a * b, or d += a * b; a (64, 32) and b (32, {n}) in shared memory
  template <bool ADD>
  __device__ static void run(int32_t (&d)[{half}], uint64_t a, uint64_t b) {{
    asm volatile(
        "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{flag}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k32.s32.{operand}.{operand} {{{registers}}}, %{first}, %{second}, add;\\n}}\\n"
        : {outputs}
        : "l"(a), "l"(b), "n"(int(ADD)));
  }}
}};
"""


HALF_WRAPPER = """
template <>
struct WgmmaHalf<{dtype}, {n}> {{
  // d = a * b, or d += a * b; a (64, 16) and b (16, {n}) in shared memory
  template <bool ADD>
  __device__ static void run(float (&d)[{half}], uint64_t a, uint64_t b) {{
    asm volatile(
        "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{flag_ss}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{operand}.{operand} {{{registers}}}, %{first}, %{second}, add, 1, 1, 0, 0;\\n}}\\n"
        : {outputs}
        : "l"(a), "l"(b), "n"(int(ADD)));
  }}

  // the same with a in registers, and rows of b that have all columns
  template <bool ADD>
  __device__ static void run_transposed(float (&d)[{half}], const uint32_t (&a)[4], uint64_t b) {{
    asm volatile(
        "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{flag_rs}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{operand}.{operand} {{{registers}}}, {{{a_registers}}}, %{fifth}, add, 1, 1, 1;\\n}}\\n"
        : {outputs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(ADD)));
  }}
}};
"""

HALF_TYPES = {"__nv_bfloat16": "bf16", "__half": "f16"}
"""C++'s types of operands in half precision, and PTX's names of them."""


def wgmma_shapes(widths: Sequence[int], int8_widths: Sequence[int] = (), half_widths: Sequence[int] = ()) -> str:
    """Specialisations of `Wgmma`, `WgmmaInt8` and `WgmmaHalf` for the widths N of (64, N) accumulators.

    PTX ISA, wgmma.mma_async, .e4m3, .s8, .bf16 and .f16.
    """
    text = f"{RENDERED}\n"

    def accumulator(n: int, constraint: str) -> dict[str, Any]:
        half = n // 2
        registers = ", ".join(f"%{i}" for i in range(half))
        outputs = ", ".join(f'"{constraint}"(d[{i}])' for i in range(half))
        return dict(n=n, half=half, registers=registers, outputs=outputs, first=half, second=half + 1)

    def either_operand(n: int) -> dict[str, Any]:
        """Of products whose A is in shared memory, or in registers."""
        half = n // 2
        a_registers = ", ".join(f"%{half + i}" for i in range(4))
        return dict(**accumulator(n, "+f"), a_registers=a_registers, fifth=half + 4, flag_ss=half + 2, flag_rs=half + 5)

    for n in sorted(set(widths)):
        text += WRAPPER.format(**either_operand(n))
    for n in sorted(set(half_widths)):
        for dtype, operand in HALF_TYPES.items():
            text += HALF_WRAPPER.format(**either_operand(n), dtype=dtype, operand=operand)
    for n in sorted(set(int8_widths)):
        for kind, operand in (("Int8", "s8"), ("Uint8", "u8")):
            text += INT8_WRAPPER.format(**accumulator(n, "+r"), flag=n // 2 + 2, kind=kind, operand=operand)
    return text


INSTANCE = """{rendered}
#include "{header}"

namespace fp8attn {{

struct {name} {{
  static constexpr {kind} config{{{fields}}};
{checked}}};
{storage_check}
extern "C" cudaError_t launch_{name}(const {params}& p, int ctas, cudaStream_t stream) {{ return launch<{name}>(p, ctas, stream); }}

}}  // namespace fp8attn
"""


KINDS = {
    HopperConfig: ("hopper.cuh", "SharedStorage", "Params"),
    PortableConfig: ("portable.cuh", "PortableStorage", "Params"),
    FusedSmallConfig: ("fused_small.cuh", "FusedSmallStorage", "Params"),
    FusedHeadConfig: ("fused_head.cuh", "FusedHeadStorage", "Params"),
    QuantizeConfig: ("quantize.cuh", "QuantizeStorage", "QuantizeParams"),
    GeneralQuantizeConfig: ("general_quantize.cuh", "GeneralQuantizeStorage", "GeneralQuantizeParams"),
    UnsmoothLseConfig: ("unsmooth_lse.cuh", "", "UnsmoothLseParams"),
    DecodeConfig: ("decode.cuh", "DecodeStorage", "DecodeParams"),
    DecodeTensorsConfig: ("decode_tensors.cuh", "DecodeTensorsStorage", "DecodeParams"),
    PrefillConfig: ("prefill.cuh", "PrefillStorage", "PrefillParams"),
    AppendConfig: ("append.cuh", "AppendStorage", "AppendParams"),
}
"""The header of each kind of kernel, its type of shared storage, empty if it has none, and its parameters."""


def literal(value: bool | int | str) -> str:
    """A field's value as a C++ literal."""
    return f"Operands::{value}" if isinstance(value, str) else str(value).lower()


def storage_check(config: Config, instance: str = "") -> str:
    """The C++ assertion that an instance's shared storage has the size that Python says. `instance`: its struct, if not
    that of the config's name."""
    storage = KINDS[type(config)][1]
    return f"static_assert(sizeof({storage}<{instance or config.name}::config>) == {config.shared_bytes});\n" if storage else ""


def instance(config: Config) -> str:
    """The translation unit of one instance."""
    header, storage, params = KINDS[type(config)]
    checked = ""
    if isinstance(config, HopperConfig):
        checked = f"  static constexpr int partial_bytes = {config.partial_bytes};\n"
    return INSTANCE.format(
        rendered=RENDERED,
        header=header,
        kind=type(config).__name__,
        params=params,
        name=config.name,
        fields=", ".join(literal(x) for x in astuple(config)),
        storage_check=storage_check(config),
        checked=checked,
    )


def widths(configs: Sequence[Config]) -> list[int]:
    """Widths of the wgmma accumulators that instances use."""
    found: set[int] = set()
    for c in configs:
        if isinstance(c, FusedSmallConfig | FusedHeadConfig):
            found |= {KEYS, c.head_dim + ONES}
        elif isinstance(c, HopperConfig):
            found |= {KEYS, *c.value_widths}
        elif isinstance(c, DecodeConfig | DecodeTensorsConfig):
            found |= {*c.widths}
        elif isinstance(c, PrefillConfig):
            found |= {KEYS, c.value_part, c.value_part + ONES}
    return sorted(found)


def half_widths(configs: Sequence[Config]) -> list[int]:
    """The same of operands in half precision."""
    found: set[int] = set()
    for c in configs:
        if isinstance(c, PrefillConfig):
            found |= {HALF_BLOCK, c.value_part}
        elif isinstance(c, DecodeTensorsConfig):
            found |= {*c.half_widths}
    return sorted(found)


def int8_widths(configs: Sequence[Config]) -> list[int]:
    """The same of int8 operands."""
    found: set[int] = set()
    for c in configs:
        if isinstance(c, HopperConfig) and c.int8:
            found.add(KEYS)
        elif isinstance(c, DecodeConfig) and c.int8:
            found |= {*c.widths}
        elif isinstance(c, PrefillConfig) and c.int8:
            found.add(KEYS)
    return sorted(found)


def files(configs: Sequence[Config]) -> dict[str, str]:
    """All rendered files, by name."""
    found = {
        "wgmma_shapes.h": wgmma_shapes(widths(configs), int8_widths(configs), half_widths(configs)),
        "constants.h": constants(),
        "config.h": structs(),
    }
    found |= {f"{c.name}.cu": instance(c) for c in configs}
    if any(isinstance(c, PortableConfig) for c in configs):
        found["combine.cu"] = f'{RENDERED}\n#include "combine.cuh"\n'
    if any(isinstance(c, HopperConfig) and c.skips_blocks for c in configs):
        found["build_block_mask.cu"] = f'{RENDERED}\n#include "block_mask.cuh"\n'
    return found
