"""The compiled CUDA instances, for the tables of docs/instances.md: which calls choose each group, why the group and
each field of a config are compiled, and the size of the code.

`python -m bench.instances FOLDER` prints the sizes of the libraries in a folder of `fp8attn.cuda.build.prebuild`: what
bench/results/instance_sizes.json has.
"""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8attn.cuda import append, build, decode, decode_tensors, fused_head, fused_small, general_quantize, portable, prefill, quantize
from fp8attn.cuda.configs import GROUPS, VARLEN_GROUPS, HopperConfig, Scores
from fp8attn.cuda.portable import PortableConfig
from fp8attn.cuda.render import Config
from fp8attn.device import ARCHITECTURES

ARCHS = (80, 89, 90)
"""Architectures with a column of counts: those of a wheel."""

SIZED = 90
"""The architecture whose code has its size in the table."""

Library = tuple[Config, ...]


@dataclass(frozen=True)
class Row:
    """Instances that the same calls choose.

    Attributes:
        kernel: the kernel's name.
        calls: the calls that choose one of them.
        why: why this is decided when the kernel is compiled, and not by a parameter.
        libraries: by architecture, the groups of instances that are compiled together.
    """

    kernel: str
    calls: str
    why: str
    libraries: dict[int, tuple[Library, ...]]

    def count(self, arch: int) -> int:
        """Number of instances."""
        return sum(map(len, self.libraries.get(arch, ())))

    def library_names(self, arch: int) -> list[str]:
        """Names of the compiled libraries."""
        return [build.Kernels(library, arch).name for library in self.libraries.get(arch, ())]


HOPPER: dict[Scores, tuple[str, str]] = {
    "plain": (
        "no mask, or `is_causal`. General: scales per key, `smooth_q`, a scale that isn't positive",
        "the loop tests nothing; CTAs share tiles. General: a second producer warp brings scales and means of keys into shared memory",
    ),
    "masked": ("a boolean mask", "bits of the mask lie in shared memory; the loop skips blocks"),
    "window": (
        "a window with a first key; sinks",
        "the loop hides first keys, too, and tiles differ in length; sinks take registers at the end of a tile",
    ),
    "softcap": ("a soft cap", "codes from distances to the largest score; near the cap, a tanh for each score"),
    "added": ("an additive mask", "a ring of mask blocks in shared memory, which costs a stage of K and V or a consumer"),
}
"""Calls and reasons of the Hopper kernel's instances, by scores."""

PORTABLE: dict[Scores, tuple[str, str]] = {
    "plain": (
        "`backend=\"cuda\"` where the Hopper kernel doesn't run. General: masks, scales per key, `smooth_q`, a scale that isn't positive",
        "the loop tests nothing. General: a test for each score, and smaller tiles, for registers",
    ),
    "window": ("the same, with a window that has a first key, or sinks", "the loop hides first keys, too"),
    "softcap": ("the same, with a soft cap", "a tanh for each score"),
}
"""The same of the portable kernel."""


def _portable(scores: Scores) -> dict[int, tuple[Library, ...]]:
    return {
        arch: tuple(group for dim in portable.DIMS for int8 in (False, True) if (group := portable.group(dim, ARCHITECTURES[arch], int8, scores)))
        for arch in ARCHS
    }


def rows() -> list[Row]:
    """All instances of ARCHS, in the order of the table."""

    def hopper_only(*libraries: Library) -> dict[int, tuple[Library, ...]]:
        return {90: libraries}

    found = [
        Row("Hopper", calls, why, hopper_only(*(group for (of, *_), group in GROUPS.items() if of == scores)))
        for scores, (calls, why) in HOPPER.items()
    ]
    return [
        *found,
        Row(
            "Hopper, packed",
            "`varlen_sdpa` with scales of K per block: " + ", ".join(dict.fromkeys(scores for scores, *_ in VARLEN_GROUPS)),
            "tiles come from a table, with lengths of their own; lanes copy the last rows of a sequence",
            hopper_only(*VARLEN_GROUPS.values()),
        ),
        Row("fused small", "bf16 or fp16, default recipe, few keys, few heads", "one launch does all", hopper_only(fused_small.INSTANCES)),
        Row("fused head", "the same with more keys or more heads", "one launch does all; a CTA keeps a head", hopper_only(fused_head.INSTANCES)),
        Row(
            "quantizer of K and V",
            "K and V in bf16 or fp16, default recipe or `PRECISE`; pages of a `PagedTensors` with a recipe",
            "registers and shared memory by the token chunks of a cluster; longer heads take three launches; tokens of a cache lie in pages",
            hopper_only(quantize.INSTANCES),
        ),
        Row(
            "decode",
            "few queries of a KV cache",
            "accumulators by head dim; e4m3 and int8 are multiplied otherwise; windows, soft caps and sinks take registers in the loop over pages",
            hopper_only(*decode.GROUPS),
        ),
        Row(
            "other engines' caches",
            "queries of a `PagedTensors`",
            "accumulators by head dim; scales per token are loaded and multiplied beside the tokens; e4m3 is converted, bf16 and fp16 are not; "
            "few queries are columns of mma.sync, more are rows of wgmma",
            hopper_only(*decode_tensors.GROUPS),
        ),
        Row(
            "prefill",
            "many queries of a KV cache",
            "accumulators by head dim; blocks in half precision among pages in the ring; e4m3 and int8 are multiplied otherwise; "
            "packed queries have tiles from a table, and last rows that lanes copy; "
            "a soft cap takes a tanh for each score; few tiles take fewer consumers",
            hopper_only(*prefill.GROUPS),
        ),
        Row(
            "general quantizer, LSE",
            "any Q, K and V; `return_lse=True` after it",
            "one instance of each kernel serves all calls",
            dict.fromkeys(ARCHS, (general_quantize.INSTANCES,)),
        ),
        Row(
            "append",
            "tokens of a KV cache in bf16 or fp16",
            "registers and shared memory by the head dim; each instance has a kernel for bf16 and fp16, e4m3 and int8",
            dict.fromkeys(ARCHS, (append.INSTANCES,)),
        ),
        *(Row("portable", calls, why, _portable(scores)) for scores, (calls, why) in PORTABLE.items()),
    ]


FIELDS: dict[type, dict[str, str]] = {
    HopperConfig: {
        "head_dim": "accumulators are registers; panels of shared memory",
        "value_dim": "accumulators are registers; above 128, P·V is in two parts",
        "consumers": "threads of a CTA; fewer for calls with few tiles, many where registers allow it",
        "stages": "as many as shared memory holds",
        "registers": "an immediate of `setmaxnreg`",
        "overlap": "order of the loop's instructions",
        "exact": "which instructions the unrolled loop has",
        "general": "a branch per score, and metadata in shared memory",
        "int8": "another wgmma, with integer accumulators",
        "fuse_q_quant": "Q comes through registers, not by TMA; a kernel for bf16 and one for fp16, as one for both spills",
        "masked": "a branch per block, and bits in shared memory",
        "added": "a branch per block, and a ring in shared memory",
        "window": "compares before a row's first key",
        "softcap": "codes from distances",
        "varlen": "lengths come from shared memory; rows that lanes copy; no shared tiles",
    },
    PortableConfig: {
        "head_dim": "accumulators are registers",
        "value_dim": "accumulators are registers",
        "warps": "threads of a CTA",
        "warp_rows": "accumulators are registers",
        "splits": "warps that share rows meet in shared memory",
        "keys": "accumulators are registers",
        "stages": "as many as shared memory holds",
        "ctas": "bound of a thread's registers",
        "tensor_qk": "for the ladder",
        "tensor_pv": "for the ladder",
        "fused": "for the ladder",
        "swizzle": "for the ladder",
        "producers": "for the ladder",
        "persistent": "for the ladder",
        "fast_exp": "for the ladder",
        "operands": "another `mma.sync`; conversions",
        "e4m3_p": "a rounding per element of P: e4m3 or, by compute type f16, half",
        "general": "a branch per score",
        "drift": "barriers of the loop",
        "int8": "another `mma.sync`",
        "half_sums": "another `mma.sync`; no call chooses it",
        "window": "compares before a row's first key",
        "softcap": "a tanh per score",
    },
}
"""Why a field of a config is compiled."""


def values_of(kind: type, field: str) -> list[Any]:
    """The values of a field of a kind of config, among the instances of ARCHS."""
    every = (c for row in rows() for libraries in row.libraries.values() for library in libraries for c in library)
    return sorted({getattr(c, field) for c in every if type(c) is kind})


def section_bytes(library: Path, name: bytes) -> int:
    """Bytes of the sections called `name` of a 64-bit ELF file (ELF-64 Object File Format, 1.5)."""
    data = library.read_bytes()
    at, size, count, names = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, at + i * size) for i in range(count)]
    strings = headers[names][4]
    return sum(length for offset, *_, length in headers if data.startswith(name + b"\0", strings + offset))


def sizes(*folders: Path) -> dict[str, Any]:
    """The compilers of the libraries of SIZED in folders, and for each library the bytes of its GPU code."""
    found, compilers = {}, set()
    for part in (build.Kernels(library, SIZED) for library in build.groups(SIZED)):
        for path in (folder / part.name / f"{part.name}.so" for folder in folders):
            if path.exists():
                found[part.name] = section_bytes(path, b".nv_fatbin")
                compilers |= {*(build.read_meta(path.parent) or {}).get("nvcc", [])}
    return {"nvcc": sorted(compilers), "code_bytes": found}


if __name__ == "__main__":
    print(json.dumps(sizes(*map(Path, sys.argv[1:])), indent=2))
