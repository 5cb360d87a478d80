"""The CUDA kernels on a CPU: g++ compiles their sources, and PTX instructions are replaced by C++ definitions
(tests/kit/emulation).

The results are those of a GPU, except for the order of sums inside one tensor-core instruction. The emulation detects
deadlocks, and reads of memory that no instruction has written, copied or multiplied.

It also runs the binding on a CPU, with a launcher that records the Params that it gets.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from fp8attn import schedule
from fp8attn.cuda import append, build, decode, decode_tensors, general_quantize, prefill, quantize, render
from fp8attn.cuda.configs import KEYS, OUTPUT_BYTES, ROWS, HopperConfig
from fp8attn.cuda.fused_head import FusedHeadConfig
from fp8attn.cuda.fused_small import FusedSmallConfig
from fp8attn.cuda.portable import PortableConfig

HERE = Path(__file__).parent / "emulation"
TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

Config = HopperConfig | PortableConfig | FusedSmallConfig | FusedHeadConfig

MAIN = {HopperConfig: "hopper.cpp", PortableConfig: "grid.cpp", FusedSmallConfig: "fused_small.cpp", FusedHeadConfig: "fused_head.cpp"}
"""The source that runs an instance."""


_pointers = ("q", "k", "v", "q_scale", "k_scale", "v_scale", "v_mean", "mask", "out", "lse", "counter")
_strides = (("q_scale", 3), ("k_scale", 3), ("v_scale", 3), ("mask", 4), ("out", 3), ("q", 3), ("k", 3))
_numbers = (
    "batches",
    "q_heads",
    "kv_heads",
    "q_length",
    "kv_length",
    "head_dim",
    "value_dim",
    "q_group",
    "k_group",
    "causal_offset",
    "heads_in_l2",
)


MAP = 128
"""Bytes of a tensor map. The first eight are an address, as in binding_on_cpu.cpp."""

OUTPUT_ROWS = 16
"""Rows of a box of the output; see fp8attn/cuda/params.h."""

MAPS = 5 * MAP
"""Bytes before the first pointer of C++'s Params: tensor maps of q, k, v, the output and a mask."""


class Params(ctypes.Structure):
    """C++'s Params, from its first pointer on."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _pointers),
        *((f"{name}_strides", ctypes.c_int64 * count) for name, count in _strides),
        ("v_pitch", ctypes.c_int64),
        *((name, ctypes.c_int) for name in _numbers),
        ("score_scale", ctypes.c_float),
        ("out_type", ctypes.c_int),
        ("mask_type", ctypes.c_int),
        ("q_aligned", ctypes.c_bool),
        ("k_aligned", ctypes.c_bool),
        ("mask_in_boxes", ctypes.c_bool),
        ("key_splits", ctypes.c_int),
        ("parts", ctypes.c_void_p),
        ("part_rows", ctypes.c_void_p),
        ("half", ctypes.c_bool),
        ("v_strides", ctypes.c_int64 * 3),
        ("lse_mean", ctypes.c_void_p),
        ("inverse_length", ctypes.c_float),
        ("splits", ctypes.c_int),
        ("bias", ctypes.c_void_p),
        ("stream_k_ranges", ctypes.c_int),
        ("partials_ready", ctypes.c_void_p),
        ("ready", ctypes.c_void_p),
        ("ready_ctas", ctypes.c_int),
        ("mask_bits", ctypes.c_void_p),
        ("block_mask", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("mask_batches", "mask_heads", "mask_groups", "mask_rows", "first_offset")),
        ("softcap", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
        ("mean_scores", ctypes.c_void_p),
        ("tile_table", ctypes.c_void_p),
        ("inverse_softcap", ctypes.c_float),
        ("shard_blocks", ctypes.c_int),
        ("shard_rows", ctypes.c_int),
        ("next_shard_scales", ctypes.c_int64),
    ]


_RESULTS = ("q_data", "q_scale", "k_data", "k_scale", "k_mean", "v_data", "v_scale", "v_mean")


class QuantizeParams(ctypes.Structure):
    """C++'s QuantizeParams."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("k", "v", "k_data", "k_scale", "k_mean", "v_data", "v_scale", "v_mean")),
        *((f"{name}_strides", ctypes.c_int64 * 3) for name in ("k", "v", "k_data")),
        ("padded", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("heads", "length", "head_dim")),
        ("inverse_length", ctypes.c_float),
        ("inverse_sample", ctypes.c_float),
        ("half", ctypes.c_bool),
        ("int8", ctypes.c_bool),
        ("ready", ctypes.c_void_p),
        ("cleared", ctypes.c_int),
        ("chunk_stats", ctypes.c_void_p),
        ("v_sums", ctypes.c_void_p),
        ("v_extremes", ctypes.c_void_p),
        ("step", ctypes.c_int),
        ("cu_seqlens", ctypes.c_void_p),
        ("seqused", ctypes.c_void_p),
        ("sequences", ctypes.c_int),
        ("units", ctypes.c_int),
        ("cluster_chunks", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("page_table", "firsts", "ends")),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("pages", "page", "page_log")),
    ]


class GeneralQuantizeParams(ctypes.Structure):
    """C++'s GeneralQuantizeParams."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", *_RESULTS, "measured")),
        *((f"{name}_strides", ctypes.c_int64 * 3) for name in ("q", "k", "v", "q_data", "k_data")),
        ("padded", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("batches", "q_heads", "kv_heads", "q_length", "kv_length", "head_dim", "value_dim")),
        *((name, ctypes.c_int) for name in ("q_group", "k_group", "part")),
        *((name, ctypes.c_float) for name in ("inverse_part", "inverse_length", "inverse_sample")),
        ("type", ctypes.c_int),
        *((name, ctypes.c_bool) for name in ("int8", "q_aligned", "k_aligned", "v_aligned")),
        *((name, ctypes.c_void_p) for name in ("cu_seqlens", "seqused")),
        *((name, ctypes.c_int) for name in ("sequences", "tokens")),
    ]


class UnsmoothLseParams(ctypes.Structure):
    """C++'s UnsmoothLseParams."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k_mean", "lse", "out")),
        ("q_strides", ctypes.c_int64 * 3),
        *((name, ctypes.c_int) for name in ("q_heads", "kv_heads", "q_length", "head_dim", "part")),
        ("softmax_scale", ctypes.c_float),
        ("type", ctypes.c_int),
        ("q_aligned", ctypes.c_bool),
    ]


class DecodeParams(ctypes.Structure):
    """C++'s DecodeParams."""

    _fields_ = [
        ("maps", ctypes.c_uint8 * (4 * MAP)),
        *((name, ctypes.c_void_p) for name in ("k", "v", "recent_k", "recent_v", "q")),
        *((name, ctypes.c_void_p) for name in ("k_scale", "v_page_scale", "k_mean", "v_mean", "v_scale")),
        *((name, ctypes.c_void_p) for name in ("page_table", "lengths", "counts", "sequences", "cu_seqlens")),
        *((name, ctypes.c_void_p) for name in ("out", "lse", "parts", "part_rows", "tickets", "group_tickets")),
        ("q_strides", ctypes.c_int64 * 3),
        ("table_stride", ctypes.c_int64),
        ("out_strides", ctypes.c_int * 3),
        ("lse_strides", ctypes.c_int * 2),
        *((name, ctypes.c_int) for name in ("batches", "q_heads", "kv_heads", "q_length", "table_width", "every_page", "every_sequence", "tokens")),
        ("group", ctypes.c_int),
        ("group_inverse", ctypes.c_uint32),
        *((name, ctypes.c_int) for name in ("ctas", "part_height", "tickets_of_head")),
        *((name, ctypes.c_int) for name in ("tiles_of_group", "ctas_of_group", "ctas_of_group_inverse", "part")),
        *((name, ctypes.c_float) for name in ("inverse_part", "score_scale")),
        ("out_type", ctypes.c_int),
        *((name, ctypes.c_bool) for name in ("half", "leaves_longer")),
        ("part_log", ctypes.c_int),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("left", "right")),
        ("softcap", ctypes.c_float),
        *((f"{name}_scale_strides", ctypes.c_int64 * 4) for name in "kv"),
        *((name, ctypes.c_int) for name in ("page", "copied_tokens", "capacity")),
    ]


class PrefillParams(ctypes.Structure):
    """C++'s PrefillParams, behind its Params and tensor maps."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("v_page_scale", "page_table", "lengths", "counts", "sequences")),
        *((name, ctypes.c_void_p) for name in ("recent_k", "recent_v", "new_k", "new_v")),
        *((f"{name}_strides", ctypes.c_int64 * 3) for name in ("new_k", "new_v")),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("table_width", "every_page", "every_sequence", "left", "most", "unit_log")),
    ]


class AppendParams(ctypes.Structure):
    """C++'s AppendParams."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("k", "v", "k_pages", "v_pages", "k_scale", "v_page_scale", "k_mean", "v_mean", "v_scale")),
        *((name, ctypes.c_void_p) for name in ("recent_k", "recent_v", "page_table", "lengths", "counts", "sequences", "cu_seqlens")),
        *((f"{name}_strides", ctypes.c_int64 * 3) for name in ("k", "v")),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("rows", "kv_heads", "length", "most_pages", "table_width", "every_page", "every_sequence")),
        *((name, ctypes.c_int) for name in ("head_dim", "value_dim", "part")),
        ("inverse_part", ctypes.c_float),
        ("step", ctypes.c_int),
        ("most", ctypes.c_int),
        *((name, ctypes.c_bool) for name in ("pages", "tokens", "smooth_k", "smooth_v", "half", "int8")),
    ]


def cuda_headers() -> Path | None:
    """The folder of cuda_fp16.h, or None."""
    folders = (Path(build.cuda_home() or "/usr/local/cuda") / "include", Path("/usr/local/cuda/include"))
    return next((folder for folder in folders if (folder / "cuda_fp16.h").exists()), None)


def missing() -> str | None:
    """What the emulation needs and this machine doesn't have, or None."""
    if shutil.which("g++") is None:
        return "g++ isn't here"
    return "CUDA's headers aren't here" if cuda_headers() is None else None


emulates = pytest.mark.skipif(missing() is not None, reason=str(missing()))


Mutation = tuple[str, str, str]
"""A change of a kernel source: the file, the text that it contains once, and the replacement."""


def mutate(text: str, right: str, wrong: str, name: str) -> str:
    """A source with a change in one place, which must exist."""
    assert text.count(right) == 1, f"{name} has {right!r} {text.count(right)} times"
    return text.replace(right, wrong)


def assert_anchored(mutations: Iterable[Mutation]) -> None:
    """Each mutation changes a source: what it breaks is there, once."""
    for file, right, wrong in mutations:
        assert mutate(sources()[file], right, wrong, file) != sources()[file]


@functools.cache
def sources() -> dict[str, str]:
    """The kernels' files by their path in fp8attn/cuda, with definitions in place of PTX.

    Launches and inline assembly are removed, because g++ doesn't know their syntax. Every CTA of a cluster gets its own
    shared memory.
    """
    found = {str(path.relative_to(HERE)): path.read_text() for path in HERE.rglob("*.*")}
    found |= {"constants.h": render.constants(), "config.h": render.structs()}
    for path in build.source_files():
        name = str(path.relative_to(build.SOURCES))
        if path.suffix != ".cpp" and name not in found:
            text = re.sub(r"\n[^\n]*(?:\n[^\n]+)*<<<.*?\n}\n", "\n", path.read_text(), flags=re.DOTALL)
            text = re.sub(r"\ntemplate <class Instance>\ncudaError_t launch\(.*?\n}\n", "\n", text, flags=re.DOTALL)
            assert path.parent.name != "ptx" or "asm" not in text, f"{name} is an instruction that has no definition here"
            text = re.sub(r"asm volatile\([^;]*\);", ";", text)
            found[name] = text.replace("*>(bytes)", "*>(cta::shared_memory(bytes))")
    return found


@functools.cache
def _includes(text: str) -> list[str]:
    return re.findall(r'#include ["<]([^">]+)[">]', text)


def included(name: str, files: dict[str, str]) -> dict[str, str]:
    """A file and all files that it includes, directly or indirectly."""
    found: dict[str, str] = {}
    names = [name, "cta.h"]
    while names:
        name = names.pop()
        if name in found:
            continue
        found[name] = files[name]
        for other in _includes(files[name]):
            beside = os.path.normpath(os.path.join(os.path.dirname(name), other))
            names += [path for path in dict.fromkeys((beside, other)) if path in files]
    return found


def mutated(name: str, mutations: Sequence[Mutation], instance: str) -> dict[str, str]:
    """The sources with mutations, each of a file that the file `name` includes, and with an instance.h."""
    files = sources() | {"instance.h": instance}
    for file, right, wrong in mutations:
        files[file] = mutate(files[file], right, wrong, file)
    assert {file for file, _, _ in mutations} <= included(name, files).keys(), f"{name} doesn't include what is broken"
    return files


def cache() -> Path:
    """The folder of compiled libraries. Workers share it, and it persists between runs."""
    folder = Path(os.environ.get("FP8ATTN_TEST_CACHE") or Path(tempfile.gettempdir()) / f"fp8attn-emulated-{os.getuid()}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Inside, no other process makes this folder. Yields whether it already exists."""
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder.exists()


FLAGS = ("-std=c++20", "-O1", "-fno-omit-frame-pointer", "-w", "-fPIC", "-U_FORTIFY_SOURCE")
"""Where _FORTIFY_SOURCE is on, as in Ubuntu's g++ at -O1, longjmp aborts when it enters another stack."""


@functools.cache
def _compiler() -> str:
    """The version text of the compiler."""
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def _compile(*arguments: str | Path) -> None:
    command = ["g++", *FLAGS, f"-isystem{cuda_headers()}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:  # no AssertionError: a mutant that doesn't compile is not a mutant that is seen
        raise RuntimeError(done.stderr[:4000])


def _made(key: object, make: Callable[[Path], None]) -> Path:
    """The folder that `make` fills, once for every `key`."""
    digest = hashlib.sha256(repr((key, FLAGS, _compiler())).encode()).hexdigest()[:32]
    folder = cache() / digest
    if not folder.exists():
        with alone(folder) as made, tempfile.TemporaryDirectory(dir=cache()) as temporary:
            if not made:
                make(Path(temporary))
                shutil.copytree(temporary, cache() / f"{digest}.new", dirs_exist_ok=True)
                (cache() / f"{digest}.new").rename(folder)
    return folder


COMMON = ("cta.h", "run.h", *(f"ptx/{name}.h" for name in ("cluster", "convert", "cp_async", "flag", "grid", "mma", "tma", "wgmma")))
"""Headers that are precompiled."""

RUNTIME = ("run.cpp", "engines.cpp")
"""What all kernels have in common, compiled once."""


def _written(files: dict[str, str], folder: str | Path) -> Path:
    """The folder, with the files in it."""
    for file, text in files.items():
        (Path(folder) / file).parent.mkdir(exist_ok=True)
        (Path(folder) / file).write_text(text)
    return Path(folder)


def _precompiled(files: dict[str, str]) -> Path:
    """The folder of the header that a source includes first, precompiled: COMMON."""
    needed = {name: text for header in COMMON for name, text in included(header, files).items()}

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            text = "".join(f'#include "{name}"\n' for name in COMMON)
            _written(needed | {"common.h": text}, temporary)
            _compile("-x", "c++-header", "-I", temporary, Path(temporary) / "common.h", "-o", folder / "common.h.gch")

    return _made((COMMON, sorted(needed.items())), make)


def _runtime() -> Path:
    """The folder of the objects of RUNTIME."""
    files = sources()
    needed = {file: text for name in RUNTIME for file, text in included(name, files).items()}

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            _written(needed, temporary)
            for name in RUNTIME:
                _compile("-O3", "-c", "-I", temporary, Path(temporary) / name, "-o", folder / f"{name}.o")

    return _made(sorted(needed.items()), make)


@functools.cache
def _digest_of_runtime() -> str:
    """Of the files that COMMON and RUNTIME include."""
    files = [sorted(included(file, sources()).items()) for file in (*COMMON, *RUNTIME)]
    return hashlib.sha256(repr(files).encode()).hexdigest()


def library(name: str, *mutations: Mutation, instance: str = "") -> ctypes.CDLL:
    """The library of a .cpp file in tests/kit/emulation, with the given `instance.h` and with `mutations` of the
    sources."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    files = mutated(name, mutations, instance)
    needed = included(name, files)

    def make(folder: Path) -> None:
        precompiled, runtime = _precompiled(files), _runtime()
        with tempfile.TemporaryDirectory() as temporary:
            _written(needed, temporary)
            folders, objects = ("-I", precompiled, "-I", temporary), (runtime / f"{file}.o" for file in RUNTIME)
            _compile("-shared", *folders, "-include", "common.h", Path(temporary) / name, *objects, "-o", folder / "kernel.so")

    return ctypes.CDLL(str(_made((name, sorted(needed.items()), _digest_of_runtime()), make) / "kernel.so"))


def instance_of(config: render.Config) -> str:
    """The instance.h of one instance."""
    header = render.KINDS[type(config)][0]
    fields = ", ".join(render.literal(x) for x in astuple(config))
    return (
        f'#pragma once\n#include "{header}"\n'
        f"namespace fp8attn {{\nstruct Instance {{\n  static constexpr {type(config).__name__} config{{{fields}}};\n}};\n"
        f"{render.storage_check(config, 'Instance')}}}\n"
    )


@dataclasses.dataclass(frozen=True)
class Source:
    """A .cpp file in tests/kit/emulation, with the instance.h of a config and with mutations of the sources."""

    name: str
    config: render.Config
    mutations: tuple[Mutation, ...] = ()

    def __post_init__(self) -> None:
        if self.mutations:  # here, and not where a test expects an assertion to fail
            mutated(self.name, self.mutations, instance_of(self.config))

    @functools.cache  # noqa: B019
    def variant(self, **numbers: int) -> ctypes.CDLL:
        """The library with these numbers in C++'s Variant. Each is compiled on first use."""
        members = "".join(f"  static constexpr int {name} = {int(number)};\n" for name, number in numbers.items())
        return library(self.name, *self.mutations, instance=f"{instance_of(self.config)}namespace fp8attn {{\nstruct Variant {{\n{members}}};\n}}\n")


def guarded(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that is followed by an unreadable page, so that a read past its end ends the process."""
    size = x.numel() * x.element_size()
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    behind = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + pages * mmap.PAGESIZE
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), mmap.PAGESIZE, 0) == 0
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=pages * mmap.PAGESIZE - size).view(x.dtype).view(x.shape)
    copy.view(torch.uint8).copy_(x.contiguous().view(torch.uint8))
    return copy


def elsewhere(x: torch.Tensor, distance: int) -> torch.Tensor:
    """The same elements, moved so that they can't be copied in units of 16 bytes."""
    buffer = torch.full((*x.shape[:3], x.shape[3] + 5), 0x55, dtype=torch.uint8)
    buffer[..., distance : distance + x.shape[3]].copy_(x.view(torch.uint8))
    return buffer[..., distance : distance + x.shape[3]].view(x.dtype)


def _aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and all(x.size(i) == 1 or x.stride(i) * x.element_size() % 16 == 0 for i in range(3))


def mask_planes(mask: torch.Tensor) -> tuple[int, int, int, int]:
    """Numbers of batches, heads, row groups and rows per group that a mask (B, Hq, Sq, Sk) has without broadcasting.

    See room_for_mask in binding.cpp.
    """
    sizes = (*mask.shape[:2], -(-mask.shape[2] // ROWS), ROWS)
    batches, heads, groups, rows = (1 if mask.stride(i) == 0 else size for i, size in zip((0, 1, 2, 2), sizes, strict=True))
    return batches, heads, groups, rows


def has_boxes(mask: torch.Tensor) -> bool:
    """Whether TMA can load boxes of a mask (B, Hq, Sq, Sk): it has rows of 16-bit numbers at multiples of 16 bytes."""
    return mask.element_size() == 2 and mask.stride(2) > 0 and (mask.stride(3) == 1 or mask.shape[3] == 1) and _aligned(mask)


def _params_of(tensors: dict[str, torch.Tensor | None], softmax_scale: float, causal_offset: int) -> Params:
    """The Params that all instances have in common, for these tensors: addresses, strides, shapes."""
    p = Params()
    for name, x in tensors.items():
        setattr(p, name, None if x is None else x.data_ptr())
    for name, count in _strides:
        x = tensors.get(name)
        if x is not None:
            setattr(p, f"{name}_strides", (ctypes.c_int64 * count)(*x.stride()[:count]))
    q, k, out = tensors["q"], tensors["k"], tensors["out"]
    assert q is not None and k is not None and out is not None
    p.batches, p.q_heads, p.q_length, p.head_dim = q.shape
    p.kv_heads, p.half = k.size(1), q.dtype == torch.float16
    p.causal_offset = max(min(causal_offset, 1 << 30), -(1 << 30))
    p.score_scale, p.out_type = softmax_scale * 1.4426950408889634, TYPES[out.dtype]
    return p


def params_from_fp16(arguments: Sequence[Any]) -> Params:
    """The Params that binding.cpp's forward_from_fp16 makes from its arguments."""
    _launcher, _ctas, splits, softmax_scale, causal_offset, q, k, v, out, lse = arguments
    p = _params_of(dict(q=q, k=k, v=v, out=out, lse=lse), softmax_scale, causal_offset)
    p.kv_length, p.value_dim, p.splits, p.inverse_length = k.size(2), v.size(3), splits, 1.0 / k.size(2)
    p.v_strides = (ctypes.c_int64 * 3)(*v.stride()[:3])
    return p


class ForwardArguments(NamedTuple):
    """The arguments of binding.cpp's forward."""

    launcher: int
    rows: int
    keys: int
    panel: int
    value_rows: int
    ctas: int
    heads_in_l2: int
    q_group: int
    k_group: int
    kv_length: int
    softmax_scale: float
    causal_offset: int
    q: torch.Tensor
    q_scale: torch.Tensor | None
    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor
    v_scale: torch.Tensor
    v_mean: torch.Tensor | None
    mask: torch.Tensor | None
    bias: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    lse_mean: torch.Tensor | None
    counter: torch.Tensor | None
    parts: torch.Tensor | None
    part_rows: torch.Tensor | None
    first_offset: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    mean_scores: torch.Tensor | None = None
    tile_table: torch.Tensor | None = None
    ready: torch.Tensor | None = None
    ready_ctas: int = 0


POINTERS = (*_pointers, "lse_mean", "bias", "parts", "part_rows", "sinks", "mean_scores", "tile_table", "ready")
"""Arguments of binding.cpp's forward whose addresses are in Params."""


def params(a: ForwardArguments) -> Params:
    """The Params that binding.cpp's forward makes from its arguments."""
    p = _params_of({name: getattr(a, name) for name in POINTERS}, a.softmax_scale, a.causal_offset)
    p.v_pitch = a.v.size(3)
    p.kv_length, p.value_dim, p.q_group, p.k_group, p.heads_in_l2 = a.kv_length, a.v.size(2), a.q_group, a.k_group, a.heads_in_l2
    p.mask_type = 0 if a.mask is None or a.mask.dtype == torch.bool else 1 + TYPES[a.mask.dtype]
    if a.mask is not None and a.rows > 0:
        p.mask_batches, p.mask_heads, p.mask_groups, p.mask_rows = mask_planes(a.mask)
        p.mask_in_boxes = has_boxes(a.mask)
    p.ready_ctas = a.ready_ctas
    p.shard_blocks = 1 << 30
    if a.k.size(0) > a.q.size(0):
        p.shard_blocks, p.shard_rows = a.k.size(2) // a.keys, a.v.stride(0) // a.v.size(3)
        p.next_shard_scales = a.k_scale.stride(0) - (p.shard_blocks * a.k_scale.stride(2) if a.k_group == a.keys else 0)
    p.softcap, p.inverse_softcap = a.softcap, 1.0 / a.softcap if a.softcap else torch.inf
    p.first_offset = max(min(a.first_offset, 1 << 30), -(1 << 30))
    p.q_aligned, p.k_aligned, p.key_splits = _aligned(a.q), _aligned(a.k), 1 if a.parts is None else a.parts.size(0)
    if a.rows > 0 and a.parts is not None:  # partial results of the tiles that CTAs share
        p.stream_k_ranges, p.partials_ready, p.part_rows = p.key_splits, p.part_rows, None
    return p


def quantize_params(
    tensors: Sequence[torch.Tensor], sampled: int, words: torch.Tensor | None = None, chunk_stats: torch.Tensor | None = None
) -> QuantizeParams:
    """The QuantizeParams that binding.cpp's quantize makes from its arguments; `chunk_stats` it allocates.

    Args:
        tensors: k and v, and what they are quantized to.
    """
    p = QuantizeParams()
    named = dict(zip(("k", "v", "k_data", "k_scale", "k_mean", "v_data", "v_scale", "v_mean"), tensors, strict=True))
    for name, x in named.items():
        setattr(p, name, x.data_ptr())
    for name in ("k", "v", "k_data"):
        setattr(p, f"{name}_strides", (ctypes.c_int64 * 3)(*named[name].stride()[:3]))
    k, k_data, v_data = named["k"], named["k_data"], named["v_data"]
    p.padded, p.heads, p.length, p.head_dim = v_data.size(3), k.size(1), k.size(2), k.size(3)
    if words is not None:
        p.cleared = words.numel() - k.size(0) * k.size(1)
        p.ready = words[p.cleared :].data_ptr()
    p.chunk_stats = None if chunk_stats is None else chunk_stats.data_ptr()
    p.inverse_length, p.inverse_sample = 1.0 / k.size(2), 1.0 / sampled
    p.half, p.int8 = k.dtype == torch.float16, k_data.dtype == torch.int8
    return p


def quantize_packed_params(
    ctas: int, cluster_chunks: int, chunk_stats: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor,
    seqused: torch.Tensor | None, *results: torch.Tensor,
) -> QuantizeParams:  # fmt: skip
    """The QuantizeParams that binding.cpp's quantize_packed makes from its arguments; `chunk_stats` it allocates."""
    p = quantize_params((k, v, *results), 1, chunk_stats=chunk_stats)
    p.inverse_length, p.inverse_sample = 0.0, 0.0
    p.units, p.cluster_chunks = ctas, cluster_chunks
    p.cu_seqlens, p.seqused, p.sequences = cu_seqlens.data_ptr(), None if seqused is None else seqused.data_ptr(), cu_seqlens.shape[0] - 1
    return p


def quantize_pages_params(
    ctas: int, chunk_stats: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Sequence[torch.Tensor], *results: torch.Tensor
) -> QuantizeParams:  # fmt: skip
    """The QuantizeParams that binding.cpp's quantize_pages makes from its arguments; `chunk_stats` it allocates."""
    table, starts, used, firsts, ends = batch
    p = quantize_packed_params(ctas, 0, chunk_stats, k, v, starts, used, *results)
    p.length, p.page_table, p.firsts, p.ends = results[0].size(2), table.data_ptr(), firsts.data_ptr(), ends.data_ptr()
    p.table_stride, p.pages, p.page = table.stride(0), k.size(0), k.size(2)
    p.page_log = p.page.bit_length() - 1 if p.page & (p.page - 1) == 0 else -1
    return p


MEASURE, WRITE = 1, 2
"""Steps of C++'s QuantizeStep."""


def measure_part_params(v: torch.Tensor, sums: torch.Tensor, extremes: torch.Tensor, chunk_stats: torch.Tensor) -> QuantizeParams:
    """The QuantizeParams that binding.cpp's measure_part makes from its arguments."""
    p = QuantizeParams()
    for name, x in dict(v=v, v_sums=sums, v_extremes=extremes, chunk_stats=chunk_stats).items():
        setattr(p, name, x.data_ptr())
    p.v_strides = (ctypes.c_int64 * 3)(*v.stride()[:3])
    p.heads, p.length, p.head_dim, p.half, p.step = v.size(1), v.size(2), v.size(3), v.dtype == torch.float16, MEASURE
    return p


def write_part_params(k: torch.Tensor, v: torch.Tensor, chunk_stats: torch.Tensor, *results: torch.Tensor) -> QuantizeParams:
    """The QuantizeParams that binding.cpp's write_part makes from its arguments."""
    p = quantize_params((k, v, *results), 1, chunk_stats=chunk_stats)
    p.inverse_length, p.inverse_sample, p.step = 0.0, 0.0, WRITE
    return p


def general_quantize_params(numbers, operands, results, measured: torch.Tensor | None) -> GeneralQuantizeParams:
    """The GeneralQuantizeParams that binding.cpp's quantize_general makes from its arguments; `measured` it
    allocates."""
    p = GeneralQuantizeParams()
    tensors = dict(zip(("q", "k", "v", "cu_seqlens", "seqused", *_RESULTS), (*operands, *results), strict=True)) | {"measured": measured}
    for name, x in tensors.items():
        setattr(p, name, None if x is None else x.data_ptr())
        if x is not None and hasattr(p, f"{name}_strides"):
            setattr(p, f"{name}_strides", (ctypes.c_int64 * 3)(*x.stride()[:3]))
        if x is not None and hasattr(p, f"{name}_aligned"):
            setattr(p, f"{name}_aligned", _aligned(x))
    q, k, v, cu_seqlens, _ = operands
    first = k if q is None else q
    p.batches, p.head_dim, p.type = first.size(0), first.size(3), TYPES[first.dtype]
    p.part, p.q_group, p.k_group, sampled, _ = numbers
    p.inverse_part, p.int8 = 1.0 / max(p.part, 1), next(x.dtype for x in results if x is not None) == torch.int8
    if q is not None:
        p.q_heads, p.q_length = q.shape[1:3]
    if k is not None:
        p.kv_heads, p.kv_length, p.value_dim, p.padded = k.size(1), k.size(2), v.size(3), results[5].size(3)
        p.inverse_length, p.inverse_sample = 1.0 / k.size(2), 1.0 / sampled
    if cu_seqlens is not None:
        p.sequences, p.tokens = cu_seqlens.size(0) - 1, k.size(2)
    return p


def unsmooth_lse_params(part, softmax_scale, q, k_mean, lse, out) -> UnsmoothLseParams:
    """The UnsmoothLseParams that binding.cpp's unsmooth_lse makes from its arguments."""
    p = UnsmoothLseParams(*(x.data_ptr() for x in (q, k_mean, lse, out)), (ctypes.c_int64 * 3)(*q.stride()[:3]))
    p.q_heads, p.kv_heads, p.q_length, p.head_dim = q.size(1), k_mean.size(1), q.size(2), q.size(3)
    p.part, p.softmax_scale, p.type, p.q_aligned = part, softmax_scale, TYPES[q.dtype], _aligned(q)
    return p


def _decode_params_of(numbers: tuple[int, int, float, int], q: torch.Tensor, maps: bytes, tensors, batch, results) -> DecodeParams:
    """The DecodeParams that both decode kernels' functions in binding.cpp make. numbers: ctas, the most queries of a row, softmax_scale, and
    key/value heads. tensors: by their names."""
    ctas, most, softmax_scale, kv_heads = numbers
    p = DecodeParams((ctypes.c_uint8 * (4 * MAP))(*maps))
    tensors = tensors | dict(q=q) | dict(zip(("page_table", "lengths", "counts", "sequences", "cu_seqlens"), batch, strict=True))
    tensors |= dict(zip(("out", "lse", "parts", "part_rows", "tickets"), results, strict=True))
    for name, x in tensors.items():
        setattr(p, name, None if x is None else x.data_ptr())
    table = batch[0]
    p.table_stride, p.table_width = table.stride(0), table.size(1)
    p.batches, p.q_heads, p.kv_heads, p.q_length = table.size(0), q.size(1), kv_heads, most
    if batch[4] is None:
        queries = q.size(2)
        strides = (*q.stride()[:3], p.q_heads * queries, queries, 1, p.q_heads * queries, queries)
    else:
        p.tokens = q.size(0)
        strides = (0, q.stride(1), q.stride(0), 0, 1, p.q_heads, 0, q.size(0))
    p.q_strides, p.out_strides, p.lse_strides = (
        (ctypes.c_int64 * 3)(*strides[:3]),
        (ctypes.c_int * 3)(*strides[3:6]),
        (ctypes.c_int * 2)(*strides[6:]),
    )
    p.group = p.q_heads // p.kv_heads
    p.group_inverse = ((1 << 32) - 1) // p.group
    tiles = p.batches * p.kv_heads
    p.tiles_of_group, p.ctas_of_group = -(-tiles // ctas), min(max(ctas // tiles, 1), schedule.MOST_PARTS)
    p.ctas_of_group_inverse = -(-(1 << 16) // p.ctas_of_group)
    p.ctas, p.part_height, p.inverse_part = ctas, results[2].size(1), 1.0
    p.tickets_of_head = 1
    p.score_scale, p.out_type, p.half = softmax_scale * 1.4426950408889634, TYPES[results[0].dtype], q.dtype == torch.float16
    return p


def decode_params(ctas: int, numbers, softmax_scale: float, softcap: float, tokens, storage, batch, results) -> DecodeParams:
    """The DecodeParams that binding.cpp's decode makes from its arguments."""
    names = ("k", "k_scale", "v", "v_page_scale", "k_mean", "v_mean", "v_scale", "recent_k", "recent_v")
    q, sinks = tokens
    tensors = dict(zip(names, storage[:-1], strict=True)) | {"sinks": sinks}
    k, v, recent_k, recent_v = (tensors[name] for name in ("k", "v", "recent_k", "recent_v"))
    dim = k.size(3)
    boxes = ((k, KEYS, min(dim, 128)), (v, dim, KEYS), (recent_k, KEYS // 2, 128), (recent_v, KEYS // 2, 128))
    maps = b"".join(matrix_map(*box) for box in boxes)
    most, part, leaves_longer, left, part_log = numbers
    p = _decode_params_of((ctas, most, softmax_scale, k.size(1)), q, maps, tensors, batch, results)
    p.leaves_longer, p.left, p.part_log, p.softcap = leaves_longer, left, part_log, softcap
    p.every_page, p.every_sequence = k.size(0), recent_k.size(0)
    p.part, p.inverse_part = part, 1.0 / max(part, 1)
    return p


def decode_tensors_params(ctas: int, queries, numbers, softmax_scale: float, softcap: float, q: torch.Tensor, *tensors_of_call) -> DecodeParams:
    """The DecodeParams that binding.cpp's decode_tensors makes from its arguments. tensors_of_call: its cache, batch and results."""
    cache, batch, results = tensors_of_call
    tensors = dict(zip(("k", "v", "k_scale", "v_scale", "sinks"), cache, strict=True))
    k, v = cache[:2]
    maps = b"".join(_slots_map(x, numbers[1]) for x in (k, v)) + bytes(2 * MAP)
    most, leaves_longer = queries
    p = _decode_params_of((ctas, most, softmax_scale, k.size(2)), q, maps, tensors, batch, results)
    p.leaves_longer = leaves_longer
    p.page, p.copied_tokens, p.capacity, p.left, p.right, p.part_log, p.tickets_of_head, *strides = numbers
    p.group_tickets = p.tickets + 4 * p.batches * p.kv_heads * p.tickets_of_head
    p.softcap = softcap
    p.k_scale_strides, p.v_scale_strides = (ctypes.c_int64 * 4)(*strides[:4]), (ctypes.c_int64 * 4)(*strides[4:])
    p.every_page, p.every_sequence = k.size(0), p.batches
    return p


def _slots_map(x: torch.Tensor, rows: int) -> bytes:
    """A tensor map of boxes of `rows` slots of x (P, page, Hkv, D)."""
    size = x.element_size()
    width = size * x.size(3)
    strides = tuple(width if x.size(i) == 1 else size * x.stride(i) for i in (1, 0, 2))
    return tensor_map(x, (width, x.size(1), x.size(0), x.size(2)), strides, (min(width, 128), rows, 1, 1))


def prefill_params(numbers, softmax_scale: float, softcap: float, tokens, storage, batch, results) -> bytes:
    """The PrefillParams that binding.cpp's prefill makes from its arguments."""
    k, k_scale, v, v_page_scale, k_mean, v_mean, v_scale, recent_k, recent_v, _ = storage
    (q, new_k, new_v, sinks), (table, lengths, counts, sequences, tile_table), (out, lse, counter) = tokens, batch, results
    dim = q.size(3)
    tensors = dict(q=q, k=k, v=v, v_scale=v_scale, v_mean=v_mean, out=out, lse=lse, counter=counter, sinks=sinks)
    call = _params_of(tensors | dict(lse_mean=k_mean, tile_table=tile_table), softmax_scale, 0)
    call.k_scale, call.value_dim, call.heads_in_l2, call.key_splits = k_scale.data_ptr(), dim, numbers[0], numbers[4]
    if call.key_splits > 1:
        call.part_rows, call.lse = call.lse, None
    call.softcap, call.inverse_softcap = softcap, 1.0 / softcap if softcap else torch.inf
    maps = (
        _rows_map(q, 1 << numbers[3], 128),
        matrix_map(k, KEYS, min(dim, 128)),
        matrix_map(v, dim, KEYS),
        _rows_map(out, OUTPUT_ROWS, OUTPUT_BYTES),
        bytes(MAP),
    )
    p = PrefillParams()
    of_pages = dict(
        v_page_scale=v_page_scale, page_table=table, lengths=lengths, counts=counts, sequences=sequences, recent_k=recent_k, recent_v=recent_v
    )
    for name, x in (of_pages | dict(new_k=new_k, new_v=new_v)).items():
        setattr(p, name, None if x is None else x.data_ptr())
    for name, x in (("new_k", new_k), ("new_v", new_v)):
        if x is not None:
            setattr(p, f"{name}_strides", (ctypes.c_int64 * 3)(*x.stride()[:3]))
    p.table_stride, p.table_width, p.every_page, p.every_sequence = table.stride(0), table.size(1), k.size(0), recent_k.size(0)
    p.left, p.most, p.unit_log = numbers[1:4]
    described = b"".join(maps) + bytes(call)
    of_new = [bytes(MAP) if x is None else _rows_map(x, KEYS // 2, 128) for x in (new_k, new_v)]
    # tensor maps, and so Params, are aligned to the size of one
    return b"".join((described, bytes(-len(described) % MAP), *of_new, bytes(p)))


FEW, PAGES = 0, 2
"""Steps of C++'s AppendStep."""


def append_params(numbers, tokens, storage, batch) -> AppendParams:
    """The AppendParams that binding.cpp's append makes from its arguments."""
    names = ("k_pages", "k_scale", "v_pages", "v_page_scale", "k_mean", "v_mean", "v_scale", "recent_k", "recent_v")
    (k, v), (table, lengths, counts, sequences, cu_seqlens) = tokens, batch
    tensors = dict(zip(names, storage[:-1], strict=True)) | dict(k=k, v=v, page_table=table, lengths=lengths, counts=counts)
    p = AppendParams()
    for name, x in (tensors | dict(sequences=sequences, cu_seqlens=cu_seqlens)).items():
        setattr(p, name, None if x is None else x.data_ptr())
    for name, x in (("k", k), ("v", v)):
        strides = x.stride()[:3] if cu_seqlens is None else (0, *x.stride()[1:3])
        setattr(p, f"{name}_strides", (ctypes.c_int64 * 3)(*strides))
    p.table_stride, p.table_width, p.rows = table.stride(0), table.size(1), lengths.size(0)
    (_, p.kv_heads, p.length, p.head_dim), p.value_dim = k.shape, v.size(3)
    p.every_page, p.every_sequence = storage[0].size(0), storage[7].size(0)
    p.part, p.most_pages, p.most, few, p.pages, p.tokens, p.smooth_k, p.smooth_v = numbers
    p.inverse_part, p.step = 1.0 / max(p.part, 1), FEW if few else PAGES
    p.half, p.int8 = k.dtype == torch.float16, storage[0].dtype == torch.int8
    return p


def _rows_map(x: torch.Tensor, rows: int, width: int) -> bytes:
    """A tensor map of boxes of `rows` rows x `width` bytes of x (B, H, S, D)."""
    size = x.element_size()
    return tensor_map(x, (size * x.size(3), x.size(2), x.size(1), x.size(0)), tuple(size * x.stride(i) for i in (2, 1, 0)), (width, rows, 1, 1))


def matrix_map(x: torch.Tensor, rows: int, width: int) -> bytes:
    """A tensor map of boxes of `rows` rows x `width` bytes of a contiguous tensor, as one matrix of rows of its last size."""
    pitch = x.element_size() * x.size(-1)
    return tensor_map(x, (pitch, x.numel() // x.size(-1)), (pitch,), (width, rows))


def tensor_map(x: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> bytes:
    """A tensor map of byte boxes in x, in the format of tests/kit/emulation/tensor_map_on_cpu.h.

    Innermost dimension first; its stride is omitted.
    """
    swizzle = {128: 3, 64: 2, 32: 1}[box[0]]
    unused = (0,) * (4 - len(sizes))
    words = (x.data_ptr(), 0, len(sizes), swizzle, *sizes, *unused, *(size << 32 | 1 for size in box), *unused, *strides, *unused, 0)
    return b"".join(word.to_bytes(8, sys.byteorder) for word in words)


def tensor_maps(a: ForwardArguments) -> bytes:
    """The tensor maps before the first pointer of Params, from the arguments of `params`."""
    if a.rows == 0:
        return bytes(MAPS)
    v, mask = a.v, a.mask

    rows = v.size(1) * v.size(2)
    apart = v.stride(0) // v.size(3) if a.k.size(0) > a.q.size(0) else rows
    of_v = tensor_map(v, (v.size(3), (v.size(0) - 1) * apart + rows), (v.size(3),), (a.keys, a.value_rows))
    of_mask = bytes(MAP)
    if mask is not None and has_boxes(mask):
        planes = mask_planes(mask)
        strides = (max(2 * mask.stride(i) // 16 * 16, 16) for i in (2, 1, 0))
        of_mask = tensor_map(mask, (2 * mask.size(3), mask.size(2), planes[1], planes[0]), tuple(strides), (128, a.rows, 1, 1))
    return _rows_map(a.q, a.rows, a.panel) + _rows_map(a.k, a.keys, a.panel) + of_v + _rows_map(a.out, OUTPUT_ROWS, OUTPUT_BYTES) + of_mask


@contextlib.contextmanager
def kept_back(library: ctypes.CDLL, *written: torch.Tensor | None) -> Iterator[None]:
    """What grids before write: the kernel finds zeros until it waits for them."""
    contents = [(x, x.clone()) for x in written if x is not None and x.is_contiguous()]
    for x, content in contents:
        x.zero_()
        library.keep_back(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(content.data_ptr()), ctypes.c_size_t(x.nbytes))
    yield
    assert all(bool(x.any()) == bool(content.any()) for x, content in contents), "the kernel did not wait for the grids before"


def _run(library: ctypes.CDLL, described: bytes, ctas: int) -> None:
    assert library.forward(described, len(described), ctas) & 0xFF, "the emulated kernel doesn't come to an end"


def _forward(source: Source, *arguments) -> None:
    """binding.cpp's forward for the portable kernel."""
    a = ForwardArguments(*arguments)
    _run(source.variant(), bytes(params(a)), a.ctas)


def _forward_hopper(source: Source, *arguments) -> None:
    """binding.cpp's forward for the Hopper kernel."""
    a = ForwardArguments(*arguments)
    p = params(a)
    if p.mask_rows:
        blocks = p.mask_batches * p.mask_heads * p.mask_groups * -(-p.kv_length // KEYS)
        room = torch.full((4 * p.mask_rows * blocks + -(-blocks // 4),), 0x55555555, dtype=torch.int32)
        p.mask_bits, p.block_mask = room.data_ptr(), room[4 * p.mask_rows * blocks :].data_ptr()
    library = source.variant(half=a.q.dtype == torch.float16)
    with kept_back(library, a.tile_table):
        _run(library, tensor_maps(a) + bytes(p), a.ctas)


def bring(library: build.Library, half: bool, to: torch.Tensor, source: torch.Tensor, ready: torch.Tensor) -> None:
    """Schedule work of the previous grid that happens while the next launch runs: copy `source`, contiguous, to `to`,
    and increment `ready`.

    The work that was scheduled last is done first.

    Args:
        half: whether the queries of the next launch are halves.
    """
    size = source.numel() * source.element_size()
    assert source.is_contiguous() and to.is_contiguous() and size == to.numel() * to.element_size()
    kernel = library.operators.on_cpu.variant(half=half)
    kernel.bring(*(ctypes.c_void_p(x.data_ptr()) for x in (to, source)), ctypes.c_int64(size), ctypes.c_void_p(ready.data_ptr()))


def _forward_from_fp16(source: Source, *arguments) -> None:
    """binding.cpp's forward_from_fp16."""
    p = params_from_fp16(arguments)
    _run(source.variant(half=p.half), bytes(MAPS) + bytes(p), arguments[1])


def library_of(config: Config, *mutations: Mutation) -> build.Library:
    """The library that fp8attn.cuda.run launches in place of a compiled one."""
    emulated = Source(MAIN[type(config)], config, mutations)

    def operator(launch: Callable[..., None]) -> SimpleNamespace:
        return SimpleNamespace(default=functools.partial(launch, emulated))

    operators = SimpleNamespace(
        forward=operator(_forward if isinstance(config, PortableConfig) else _forward_hopper),
        forward_from_fp16=operator(_forward_from_fp16),
        on_cpu=emulated,
    )
    return build.Library(operators, {config: 0})


def _quantize(instances: Sequence[Source], launcher: int, ctas: int, sampled: int, stats_bytes: int, *tensors: torch.Tensor | None) -> None:
    """binding.cpp's quantize."""
    stats = torch.full((stats_bytes // 4,), torch.nan) if stats_bytes else None
    _run_quantizer(instances, launcher, ctas, quantize_params(tensors[:-1], sampled, tensors[-1], stats))


def _run_quantizer(instances: Sequence[Source], launcher: int, ctas: int, p: QuantizeParams) -> None:
    library = instances[launcher].variant(int8=p.int8, half=p.half)
    assert library.quantize(ctypes.byref(p), ctypes.sizeof(p), ctas) & 0xFF, "the emulated kernel doesn't come to an end"


def _quantize_packed(instances: Sequence[Source], launcher: int, ctas: int, cluster_chunks: int, stats_bytes: int, *tensors) -> None:
    """binding.cpp's quantize_packed."""
    stats = torch.full((stats_bytes // 4,), torch.nan)
    _run_quantizer(instances, launcher, ctas, quantize_packed_params(ctas, cluster_chunks, stats, *tensors))


def _quantize_pages(instances: Sequence[Source], launcher: int, ctas: int, stats_bytes: int, *tensors) -> None:
    """binding.cpp's quantize_pages."""
    stats = torch.full((stats_bytes // 4,), torch.nan)
    _run_quantizer(instances, launcher, ctas, quantize_pages_params(ctas, stats, *tensors))


def assert_quantizer_told(library: ctypes.CDLL, ctas: int, expected: QuantizeParams, has_stats: bool = True) -> None:
    """The binding launched the quantizer with these parameters, and allocated `chunk_stats`, or didn't. library: of
    `binding`."""
    told = QuantizeParams()
    assert library.recorded_quantize(ctypes.byref(told)) == ctas
    assert (told.chunk_stats is not None) == has_stats
    told.chunk_stats = expected.chunk_stats = None
    assert bytes(told) == bytes(expected)


def _measure_part(instances: Sequence[Source], launcher: int, ctas: int, *tensors: torch.Tensor) -> None:
    """binding.cpp's measure_part."""
    for x in tensors[1:]:
        x.view(torch.uint8).fill_(0xFF)
    _run_quantizer(instances, launcher, ctas, measure_part_params(*tensors))


def _write_part(instances: Sequence[Source], launcher: int, ctas: int, *tensors: torch.Tensor) -> None:
    """binding.cpp's write_part."""
    _run_quantizer(instances, launcher, ctas, write_part_params(*tensors))


def quantizer(*mutations: Mutation) -> build.Library:
    """The library that fp8attn.cuda.run launches in place of the compiled quantizer."""
    instances = [Source("quantize.cpp", config, mutations) for config in quantize.INSTANCES]
    launches = {
        "quantize": _quantize,
        "quantize_packed": _quantize_packed,
        "quantize_pages": _quantize_pages,
        "measure_part": _measure_part,
        "write_part": _write_part,
    }
    operators = SimpleNamespace(**{name: SimpleNamespace(default=functools.partial(launch, instances)) for name, launch in launches.items()})
    return build.Library(operators, {c: i for i, c in enumerate(quantize.INSTANCES)})


def _quantize_general(source: Source, launcher: int, ctas: int, numbers, operands, results) -> None:
    """binding.cpp's quantize_general."""
    measured = torch.full((numbers[4] // 4,), torch.nan) if operands[1] is not None else None
    p = general_quantize_params(numbers, operands, results, measured)
    library = source.variant(type=p.type, int8=p.int8)
    assert library.quantize(ctypes.byref(p), ctypes.sizeof(p), ctas) & 0xFF, "the emulated kernel doesn't come to an end"


def _unsmooth_lse(library: ctypes.CDLL, launcher: int, ctas: int, *arguments) -> None:
    """binding.cpp's unsmooth_lse."""
    p = unsmooth_lse_params(*arguments)
    assert library.unsmooth(ctypes.byref(p), ctypes.sizeof(p), ctas) & 0xFF, "the emulated kernel doesn't come to an end"


def general_quantizer(*mutations: Mutation) -> build.Library:
    """The library that fp8attn.cuda.run launches in place of the compiled general quantizer."""
    emulated = Source("general_quantize.cpp", general_quantize.QUANTIZER, mutations)
    operators = SimpleNamespace(quantize_general=SimpleNamespace(default=functools.partial(_quantize_general, emulated)))
    return build.Library(operators, dict.fromkeys(general_quantize.INSTANCES, 0))


def unsmoother(*mutations: Mutation) -> build.Library:
    """The library that fp8attn.cuda.run launches in place of the compiled kernel for the LSE."""
    emulated = library("unsmooth_lse.cpp", *mutations, instance=instance_of(general_quantize.UNSMOOTHER))
    operators = SimpleNamespace(unsmooth_lse=SimpleNamespace(default=functools.partial(_unsmooth_lse, emulated)))
    return build.Library(operators, dict.fromkeys(general_quantize.INSTANCES, 0))


def _decode(source: Source, launcher: int, *arguments) -> None:
    """binding.cpp's decode."""
    p = decode_params(*arguments)
    library = source.variant(half=p.half)
    table, lengths, *_ = arguments[-2]
    with kept_back(library, table, lengths):
        assert library.decode(ctypes.byref(p), ctypes.sizeof(p)) & 0xFF, "the emulated kernels don't come to an end"


def decoder(config: decode.DecodeConfig, *mutations: Mutation) -> build.Library:
    """The library that fp8attn.cuda.run launches in place of the compiled decode kernel."""
    emulated = Source("decode.cpp", config, mutations)
    return build.Library(SimpleNamespace(decode=SimpleNamespace(default=functools.partial(_decode, emulated))), {config: 0})


def _decode_tensors(source: Source, launcher: int, *arguments) -> None:
    """binding.cpp's decode_tensors."""
    p = decode_tensors_params(*arguments)
    assert source.variant(half=p.half).decode_tensors(ctypes.byref(p), ctypes.sizeof(p)) & 0xFF, "the emulated kernel doesn't come to an end"


def tensors_decoder(config: decode_tensors.DecodeTensorsConfig, *mutations: Mutation) -> build.Library:
    """The library that fp8attn.cuda.run launches in place of the compiled decode kernel for caches of other engines."""
    emulated = Source("decode_tensors.cpp", config, mutations)
    return build.Library(SimpleNamespace(decode_tensors=SimpleNamespace(default=functools.partial(_decode_tensors, emulated))), {config: 0})


def _prefill(source: Source, launcher: int, ctas: int, *arguments) -> None:
    """binding.cpp's prefill."""
    library = source.variant(half=arguments[3][0].dtype == torch.float16)
    described = prefill_params(*arguments)
    _, lengths, *_, tile_table = arguments[-2]
    with kept_back(library, lengths, tile_table):
        assert library.prefill(described, len(described), ctas) & 0xFF, "the emulated kernel doesn't come to an end"


def prefiller(config: prefill.PrefillConfig, *mutations: Mutation) -> build.Library:
    """The library that fp8attn.cuda.run launches in place of the compiled prefill kernel."""
    emulated = Source("prefill.cpp", config, mutations)
    return build.Library(SimpleNamespace(prefill=SimpleNamespace(default=functools.partial(_prefill, emulated))), {config: 0})


def _append(source: Source, launcher: int, ctas: int, *arguments) -> None:
    """binding.cpp's append."""
    p = append_params(*arguments)
    library = source.variant(int8=p.int8, half=p.half)
    assert library.append(ctypes.byref(p), ctypes.sizeof(p), ctas) & 0xFF, "the emulated kernels don't come to an end"


def appender(config: append.AppendConfig, *mutations: Mutation) -> build.Library:
    """The library that fp8attn.cuda.run launches in place of the compiled append kernel."""
    emulated = Source("append.cpp", config, mutations)
    return build.Library(SimpleNamespace(append=SimpleNamespace(default=functools.partial(_append, emulated))), {config: 0})


@functools.cache
def binding_library() -> Path:
    """The library of `binding`, which the workers share."""
    headers = cuda_headers()
    assert headers is not None
    files = {str(path.relative_to(build.SOURCES)): path.read_text() for path in (*build.SOURCES.rglob("*.h"), build.SOURCES / "binding.cpp")}
    files |= {name: (HERE / name).read_text() for name in ("binding_on_cpu.cpp", "tensor_map_on_cpu.h")} | {"constants.h": render.constants()}
    # another namespace, because on a machine with a GPU the binding itself is loaded, too
    assert len(re.findall(r"STABLE_TORCH_LIBRARY\w*\(fp8attn_cuda,", files["binding.cpp"])) == 3
    files["binding.cpp"] = files["binding.cpp"].replace("(fp8attn_cuda,", "(fp8attn_on_cpu,")
    # torch's CPU builds have no stream
    stream = r"inline cudaStream_t current_stream\(.*?\n}\n"
    without = "inline cudaStream_t current_stream(int32_t) { return nullptr; }\n"
    files["torch_abi.h"] = re.sub(stream, without, files["torch_abi.h"], flags=re.DOTALL)

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "cuda_home", lambda: str(headers.parent))
            command = build.binding_command(_written(files, temporary) / "binding_on_cpu.cpp")
            build.compile_by([*command, "-I", temporary, "-shared", "-Wl,-Bsymbolic", "-o", str(folder / "binding.so")], Path(temporary))

    return _made(("binding", sorted(files.items()), torch.__version__), make) / "binding.so"


@functools.cache
def binding() -> tuple[Any, ctypes.CDLL]:
    """binding.cpp's operators for CPU tensors, and the library with the additions of
    tests/kit/emulation/binding_on_cpu.cpp."""
    torch.ops.load_library(str(binding_library()))
    loaded = ctypes.CDLL(str(binding_library()))
    loaded.launched_function.restype = ctypes.POINTER(ctypes.c_int64)
    return torch.ops.fp8attn_on_cpu, loaded
