"""Every kernel compiles for every architecture, on a machine without a GPU and without Triton's interpreter."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent

TENSOR_CORES = {
    80: ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"),
    89: ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"),
    90: ("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3", "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16"),
    100: ("tcgen05.mma", "tcgen05.mma"),
    120: ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"),
}
"""Instructions that kernels multiply with, by architecture: compute type e4m3, and f16 or an FP8 recipe without FP8 units."""

INT8_SCORES = dict.fromkeys(TENSOR_CORES, "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32") | {
    90: "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8"
}
"""The same for Q·Kᵀ of int8."""


QUANTIZERS = ("fused_small_kernel", "gather_kernel", "finish_kernel", "write_kernel", "bias_kernel")

CONVERTS_STACK_POINTER = re.compile(r"F2FP\S*UNPACK_B R\d+, R1\b")


def disassembled(cubin: bytes) -> str:
    """The SASS of a cubin, by Triton's own disassembler."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([triton.knobs.nvidia.nvdisasm.path, "-c", file.name], capture_output=True, text=True, check=True).stdout


Problem = tuple[int, int, str, str]
"""Head dims of Q and K and of V, what is computed, and the mask."""

PROBLEMS: dict[str, tuple[Problem, ...]] = {
    "e4m3": ((128, 128, "e4m3", "full"),),
    "rotations": ((128, 128, "e4m3", "full"), (256, 256, "e4m3", "full")),
    "causal": ((128, 128, "e4m3", "causal"), (128, 128, "e4m3", "one key")),
    "window": ((128, 128, "e4m3", "window"), (256, 256, "e4m3 int8", "window"), (72, 40, "e4m3 smoothed", "window")),
    "softcap": ((128, 128, "e4m3", "softcap"), (64, 64, "e4m3", "sinks")),
    "masks": ((72, 40, "e4m3", "bool"), (128, 128, "f16", "float")),
    "int8": ((128, 128, "e4m3 int8", "causal"), (128, 128, "e4m3 int8", "bool"), (128, 128, "f16 int8", "bool")),
    "smoothed": ((128, 128, "e4m3 smoothed", "causal"), (72, 40, "e4m3 smoothed", "bool"), (128, 128, "e4m3 int8 smoothed", "full")),
    "head dims": ((64, 64, "e4m3", "full"), (192, 128, "e4m3", "full"), (256, 256, "e4m3", "full")),
}
"""What is compiled in one process. Other head dims are the Hopper kernel's business."""

OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": (60, 5)},
    "softcap": {"softcap": 50.0, "is_causal": True},
    "sinks": {"sinks": torch.zeros(512), "is_causal": True},
    "causal": {"is_causal": True},
}
"""Options of sdpa, by what stands in the mask's place."""

BESIDE = {
    "e4m3": {
        "import_values_kernel",
        "half_keys_kernel",
        "unsmooth_lse_kernel",
        "fused_small_kernel",
        "gather_kernel",
        "finish_kernel",
        "write_kernel",
    },
    "smoothed": {"bias_kernel"},
    "rotations": {"gather_kernel", "finish_kernel", "write_kernel"},
}
"""Kernels that are compiled beside attention's; of rotations, attention's aren't."""


def compile_all(arch: int, problems: str) -> list[dict]:
    """In a process of its own: launch everything with warmup=True; what was compiled, for the test to look at."""
    import triton

    import fp8attn
    from fp8attn import Recipe
    from fp8attn.call import HalfKeys
    from fp8attn.device import ARCHITECTURES
    from fp8attn.prepare import call_of
    from fp8attn.triton import configs, run
    from fp8attn.triton import quantize as triton_quantize
    from fp8attn.triton.bias import with_bias
    from fp8attn.triton.half_keys import half_keys
    from fp8attn.triton.lse import unsmoothed_lse
    from offline import architecture

    device = ARCHITECTURES[arch]
    compiled: list[dict] = []
    original = triton.runtime.jit.JITFunction.run

    def recording(self, *args, **kwargs):
        kernel = original(self, *args, **kwargs)
        quantizes = self.__name__ in QUANTIZERS
        converts = quantizes and bool(CONVERTS_STACK_POINTER.search(disassembled(kernel.asm["cubin"])))
        ptx, shared = kernel.asm["ptx"], kernel.metadata.shared
        fuses = kernel.metadata.enable_fp_fusion or bool(re.search(r"\b(mul|add|sub)\.f32", ptx))  # without .rn ptxas may, too
        compiled.append({"case": case, "kernel": self.__name__, "shared": shared, "ptx": ptx, "converts stack pointer": converts, "fuses": fuses})
        return kernel

    triton.runtime.jit.JITFunction.run = recording
    for dim, value_dim, computes, mask in PROBLEMS[problems]:
        compute, *others = computes.split()
        int8 = "int8" in others
        keys = 1 if mask == "one key" else 200
        # enough tiles that the configs for a full GPU are chosen
        shapes = ((1, 512, 64, dim), (1, 1, keys, dim), (1, 1, keys, value_dim))
        q, k, v = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
        attn_mask = ({"float": torch.zeros(64, keys), "full": None} | dict.fromkeys(OPTIONS)).get(mask, torch.ones(64, keys, dtype=torch.bool))
        case = f"D {dim} Dv {value_dim} {computes} {mask}"
        recipe = Recipe(compute=compute, qk="int8" if int8 else "e4m3", smooth_q="smoothed" in others)
        many = torch.zeros(1, 1, triton_quantize.SHORT + 1, max(dim, value_dim), dtype=torch.bfloat16)
        if problems == "rotations":
            for rotate in (0, 256) if arch == 90 and dim == 128 else (256,):
                case, rotated = f"D {dim} Dv {value_dim} {computes} {mask} rotate {rotate}", dataclasses.replace(recipe, rotate=rotate)
                with architecture(arch):
                    triton_quantize.quantize(q, many[..., :dim], many[..., :value_dim], rotated, device, warmup=True)
            continue
        quantized = fp8attn.quantize(q, k, v, recipe=recipe)  # on the CPU, outside of the architecture
        call = call_of(*quantized, attn_mask, enable_gqa=True, recipe=recipe, return_lse=True, **OPTIONS.get(mask, {}))
        with architecture(arch):
            # Hopper has a kernel of its own, beside which the portable one doubles the time: there for what takes most shared memory
            portable = () if arch == 90 and mask != "bool" and dim != 256 else (configs.portable_config(call, device),)
            for config in dict.fromkeys((run.choose(call, device), *portable)):
                case = f"D {dim} Dv {value_dim} {computes} {mask} {config}"
                run.forward(call, device, config, warmup=True)
                if isinstance(config, configs.PortableConfig):
                    compiled[-1]["at most"] = configs.portable_shared_memory(config, call, device)
            case = f"D {dim} Dv {value_dim} {computes} {mask}"
            if recipe.smooth_q:
                with_bias(quantized[0], k, quantized[1], device, warmup=True)
            # what is made for a head dim is the same for others but for its size
            quantizes = mask == "full" and dim in (128, 256)
            if quantizes:
                triton_quantize.quantize(q[:, :1], k, v, recipe, device, warmup=True)
                triton_quantize.quantize(q, many[..., :dim], many[..., :value_dim], recipe, device, warmup=True)
            if mask == "full" and not others:
                lse, mean = torch.zeros(1, 512, 64), torch.zeros(1, 1, dim)
                half_keys(HalfKeys(q, k, v, 128, 128, 0.1, 200, q.dtype, True, q[..., :value_dim], lse, mean, 16), device, warmup=True)
                unsmoothed_lse(lse, q, mean, 0.1, 16, device, warmup=True)
                unsmoothed_lse(lse, quantized[0], mean, 0.1, 0, device, warmup=True)
            if quantizes and not others:
                triton_quantize.import_values(quantized[2].data, device, warmup=True)
    return compiled


def packed_call(dim: int, recipe: Any, options: dict[str, Any]) -> tuple[Any, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A call of packed sequences, quantized on the CPU, and its operands, (1, H, T, D)."""
    import fp8attn
    from ragged import varlen_call

    starts = torch.tensor([0, 30, 300], dtype=torch.int32)
    q, k, v = (torch.zeros(300, heads, dim, dtype=torch.bfloat16) for heads in (8, 2, 2))
    quantized = fp8attn.quantize(q, k, v, recipe=recipe, cu_seqlens_q=starts, cu_seqlens_k=starts)
    return varlen_call(quantized, q, {**options, "recipe": recipe}), tuple(x.transpose(0, 1)[None] for x in (q, k, v))  # type: ignore[return-value]


def chunk_call(dim: int, recipe: Any) -> Any:
    """A call of packed queries of a cache."""
    import fp8attn
    from fp8attn.pages import PagedCall

    cache = fp8attn.KVCache(2, 4, 2, dim, recipe=recipe, device="cpu")
    starts, table = torch.tensor([0, 30, 300], dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
    batch = fp8attn.PagedBatch(table, torch.tensor([30, 270], dtype=torch.int32), cu_seqlens=starts)
    return PagedCall(torch.zeros(300, 8, dim, dtype=torch.bfloat16), cache.storage, None, batch, recipe, 0.1)


PACKED: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (128, "e4m3", {}),
    (64, "int8", {"is_causal": True}),
    (256, "e4m3", {"window": (60, 5), "softcap": 5.0, "sinks": torch.zeros(8)}),
)


def compile_packed(arch: int, half: int) -> list[str]:
    """In a process of its own: compile what every second problem of packed sequences needs. The names of the kernels."""
    import triton

    from fp8attn import Quantized, Recipe
    from fp8attn.device import ARCHITECTURES
    from fp8attn.triton import configs, lse, quantize, run, varlen
    from offline import architecture

    device, names = ARCHITECTURES[arch], []
    original = triton.runtime.jit.JITFunction.run

    def recording(self, *args, **kwargs):
        kernel = original(self, *args, **kwargs)
        names.append(self.__name__)
        fused = kernel.metadata.enable_fp_fusion or re.search(r"\b(mul|add|sub)\.f32", kernel.asm["ptx"])
        assert not (fused and self.__name__ in QUANTIZERS), f"{self.__name__} fuses"
        assert kernel.metadata.shared <= device.shared_memory
        return kernel

    triton.runtime.jit.JITFunction.run = recording
    for dim, qk, options in PACKED[half::2]:
        recipe = Recipe(qk=qk)  # type: ignore[arg-type]
        call, (q, k, v) = packed_call(dim, recipe, options)
        with architecture(arch):
            for config in dict.fromkeys((run.choose(call, device), configs.portable_config(call, device))):
                run.forward(call, device, config, warmup=True)
            quantize.quantize_packed(k, v, recipe, call.varlen.k, device, warmup=True)
            varlen.table_of_rows(chunk_call(dim, recipe), (64, 4, 2), 4, device, warmup=True)
            mean = torch.zeros(2, 2, dim)
            stored = Quantized(call.q, call.q_scale, "token", "rows", call.q.shape[2])
            for query, rotated in ((q, 64), (stored, 0)):
                lse.unsmoothed_lse(torch.zeros(q.shape[:3]), query, mean, 0.1, rotated, device, packed=call.varlen.q, warmup=True)
    return names


@pytest.mark.anywhere
@pytest.mark.thorough
@pytest.mark.parametrize("arch", TENSOR_CORES)
@pytest.mark.parametrize("half", (0, 1))
def test_packed_sequences_compile(arch: int, half: int, tmp_path: Path) -> None:
    names = {*by_itself(f"compile_packed({arch}, {half})", tmp_path)}
    kernels = {"gather_kernel", "finish_kernel", "write_kernel", "unsmooth_lse_kernel", "table_kernel", "forward_kernel"}
    assert names == kernels | ({"hopper_kernel"} if arch == 90 else set())


def ambiguous_names() -> list[str]:
    """In a process of its own: names that modules of one kernel give to different numbers."""
    from triton.runtime.jit import JITFunction

    from fp8attn.triton import bias, forward, half_keys, hopper, lse, merge, paged_tensors, quantize, varlen

    kernels = {
        f.__name__: f
        for module in (quantize, bias, forward, half_keys, hopper, lse, merge, varlen, paged_tensors)
        for f in vars(module).values()
        if isinstance(f, JITFunction)
    }
    assert {*QUANTIZERS, "forward_kernel", "half_keys_kernel", "hopper_kernel", "table_kernel"} <= {*kernels}
    found = set()
    for kernel in kernels.values():
        assert kernel.cache_key
        values: dict[str, object] = {}
        for (name, _), (value, _) in kernel.used_global_vals.items():
            if values.setdefault(name, value) != value:
                found.add(f"{kernel.__name__}: {name}")
    return sorted(found)


def compiled_from_now_on() -> list[str]:
    """Names and hashes of the kernels that Triton is to compile. It compiles none."""
    import triton.compiler

    found = []

    def record(source: Any, *others: Any, **options: Any) -> object:
        found.append(f"{source.name} {source.hash()}")
        return object()

    triton.compiler.compile = record
    return found


def hashes(backwards: bool) -> list[str]:
    """In a process of its own: of kernels of every module, launched in one order or the other, what they would be found by on disk."""
    import fp8attn
    from fp8attn import Recipe
    from fp8attn.call import HalfKeys
    from fp8attn.device import ARCHITECTURES
    from fp8attn.prepare import call_of
    from fp8attn.triton import bias, configs, forward, half_keys, hopper, lse, quantize
    from offline import architecture

    found = compiled_from_now_on()
    device = ARCHITECTURES[90]
    q, k, v = (torch.randn(1, 2, 300, 64) for _ in range(3))
    smoothed = fp8attn.quantize(q, k, v, recipe=Recipe(smooth_q=True))
    call = call_of(*smoothed, out_dtype=torch.bfloat16, return_lse=True)
    packed, (_, keys, values) = packed_call(64, Recipe(), {})
    launches = [
        lambda: quantize.quantize_packed(keys, values, Recipe(), packed.varlen.k, device, warmup=True),
        lambda: forward.run(packed, configs.portable_config(packed, device), device, warmup=True),
        lambda: hopper.run(packed, configs.hopper_config(packed, device), device, warmup=True),
        lambda: quantize.quantize(q, k, v, Recipe(), device, warmup=True),
        lambda: quantize.quantize(q, k, v, Recipe(k="head"), device, warmup=True),
        lambda: bias.with_bias(smoothed[0], k, smoothed[1], device, warmup=True),
        lambda: forward.run(call, configs.portable_config(call, device), device, warmup=True),
        lambda: hopper.run(call, configs.hopper_config(call, device), device, warmup=True),
        lambda: lse.unsmoothed_lse(torch.empty(1, 2, 300), q, torch.empty(1, 2, 64), 1.0, 64, device, warmup=True),
        lambda: half_keys.half_keys(HalfKeys(q, k, v, 4, 128, 1.0, 0, torch.bfloat16, True), device, warmup=True),
    ]
    with architecture(90):
        for launch in reversed(launches) if backwards else launches:
            launch()
    return sorted(found)


def variants(dim: int, smooth_q: bool) -> dict[str, int]:
    """In a process of its own: how many kernels 200 drawn calls compile. They are of one dtype, recipe and head dim, and have no mask."""
    import random

    from fp8attn import Recipe
    from fp8attn.device import ARCHITECTURES
    from fp8attn.prepare import call_of
    from fp8attn.triton import bias, configs, forward, hopper, lse, quantize
    from offline import architecture

    r, device, found = random.Random(0), ARCHITECTURES[90], compiled_from_now_on()

    def rows(batch: int, heads: int, length: int) -> torch.Tensor:
        layout = r.choice(("heads first", "tokens first", "padded"))
        if layout == "tokens first":
            return torch.empty(batch, length, heads, dim, dtype=torch.bfloat16, device="meta").transpose(1, 2)
        if layout == "padded":
            return torch.empty(batch, heads, length + 3, dim + 8, dtype=torch.bfloat16, device="meta")[:, :, 2 : 2 + length, :dim]
        return torch.empty(batch, heads, length, dim, dtype=torch.bfloat16, device="meta")

    recipe = Recipe(smooth_q=smooth_q)
    with architecture(90):
        for _ in range(200):
            batch, heads, group = r.randint(1, 3), r.randint(1, 8), r.choice((1, 2, 4, 8))
            q_length, kv_length = (r.choice((1, r.randint(1, 300), r.randint(1, 5000), 577, 4608, 128)) for _ in range(2))
            q, k, v = rows(batch, heads * group, q_length), rows(batch, heads, kv_length), rows(batch, heads, kv_length)
            query, key, value = quantize.quantize(q, k, v, recipe, device, warmup=True)
            assert query is not None and key is not None and value is not None
            if smooth_q:
                query = bias.with_bias(query, k, key, device, warmup=True)
            call = call_of(query, key, value, enable_gqa=True, out_dtype=torch.bfloat16, return_lse=r.random() < 0.5)
            if configs.unsupported_arch(call) is None:
                hopper.run(call, configs.hopper_config(call, device), device, warmup=True)
            forward.run(call, configs.portable_config(call, device), device, warmup=True)
            if call.return_lse:
                plain, mean = torch.empty(batch, heads * group, q_length, device="meta"), torch.empty(batch, heads, dim, device="meta")
                lse.unsmoothed_lse(plain, q, mean, call.softmax_scale, 64, device, warmup=True)
    names = [line.split()[0] for line in {*found}]
    return {name: names.count(name) for name in {*names}}


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread of a kernel, and bytes of its stack."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def paged(arch: int, part: int) -> list[dict]:
    """In a process of its own: compile the kernels of a KV cache, and of those of other engines, for every third problem;
    their resources."""
    import triton

    import fp8attn
    from fp8attn.device import ARCHITECTURES
    from fp8attn.paged_copies import Copies, Room, Spans
    from fp8attn.pages import PagedCall, Stage
    from fp8attn.reference import Scoring
    from fp8attn.rotary import Angles
    from fp8attn.triton import paged_append, paged_attention, paged_copies, paged_tensors, rotary
    from offline import architecture

    device, compiled = ARCHITECTURES[arch], []
    original = triton.runtime.jit.JITFunction.run

    def recording(self, *args, **kwargs):
        kernel = original(self, *args, **kwargs)
        fuses = kernel.metadata.enable_fp_fusion
        registers, stack = resources(kernel.asm["cubin"])
        facts = {"kernel": self.__name__, "dim": dim, "int8": recipe.qk == "int8", "length": length, "registers": registers, "stack": stack}
        compiled.append(facts | {"shared": kernel.metadata.shared, "fuses": fuses})
        return kernel

    triton.runtime.jit.JITFunction.run = recording
    problems = (
        (128, 1, fp8attn.Recipe()),
        (128, 200, fp8attn.Recipe()),
        (256, 64, fp8attn.Recipe()),
        (64, 16, fp8attn.PRECISE),
        (40, 16, fp8attn.Recipe()),
    )
    for dim, length, recipe in problems[part::4]:
        cache, table = fp8attn.KVCache(2, 8, 2, dim, recipe=recipe, device="cpu"), fp8attn.PageTable(2, 8, device="cpu")
        q, k = (torch.zeros(2, heads, length, dim, dtype=torch.bfloat16) for heads in (8, 2))
        some = dataclasses.replace(table.batch(table.lengths), sequences=table.lengths)
        with architecture(arch):
            for batch, new, splits in ((table.batch(), (k, k), 1), (some, None, 4)):
                paged_append.append(cache.storage, k, k, batch, recipe, device, warmup=True)
                call = PagedCall(q, cache.storage, new, batch, recipe, 0.1)
                paged_attention.attend(call, device, q.dtype, splits=splits, warmup=True)
            packed = table.batch(cu_seqlens=torch.zeros(3, dtype=torch.int32))
            packed_q, packed_k = (x[:1].squeeze(0).transpose(0, 1) for x in (q, k))
            stage = Stage(tokens=False) if length > 128 else Stage()
            paged_append.append(cache.storage, packed_k, packed_k, packed, recipe, device, stage, warmup=True)
            scores = (100, 0), 3.0, torch.zeros(8)
            for new in ((packed_k, packed_k), None):
                call = PagedCall(packed_q, cache.storage, new, packed, recipe, 0.1, *scores)
                paged_attention.attend(call, device, q.dtype, splits=1 if new else 4, warmup=True)
    e4m3, recipe = torch.float8_e4m3fn, fp8attn.Recipe()
    one, by_token = torch.ones(2), torch.ones(8, 16, 2)
    tensors_problems = (
        (128, 1, e4m3, by_token, 0.0),
        (128, 200, e4m3, one, 0.0),
        (256, 64, e4m3, by_token, 0.0),
        (128, 1, torch.bfloat16, None, 3.0),
    )
    for dim, length, dtype, scale, softcap in tensors_problems[part::4]:
        q, k = torch.zeros(2, 8, length, dim, dtype=torch.bfloat16), torch.zeros(8, 16, 2, dim).to(dtype)
        foreign, batch = fp8attn.PagedTensors(k, k, scale, scale), fp8attn.PageTable(2, 8, device="cpu").batch()
        how = Scoring(0.1, (100, 0), softcap, torch.zeros(8) if softcap else None)
        with architecture(arch):
            paged_tensors.attend(q, foreign, batch, how, device, q.dtype, splits=4, warmup=True)
            of_packed = dataclasses.replace(batch, cu_seqlens=torch.zeros(3, dtype=torch.int32))
            paged_tensors.attend(q[0].transpose(0, 1), foreign, of_packed, how, device, q.dtype, splits=1, warmup=True)
            new = torch.zeros(length, 2, dim, dtype=torch.bfloat16)
            paged_tensors.write(foreign, new, new, torch.zeros(length, dtype=torch.int64), device, warmup=True)
            paged_tensors.append(foreign, new, new, of_packed, device, warmup=True)
            counted = dataclasses.replace(batch, counts=torch.zeros(2, dtype=torch.int32))
            paged_tensors.append(foreign, q[:, :2], q[:, :2], counted, device, warmup=True)
            angles = Angles(torch.zeros(9, dim // 2), torch.zeros(9, dim // 2), interleaved=length > 1)
            rotary.turn(q, q[:, :2], counted, angles, warmup=True)
            copied = fp8attn.PagedTensors(k.to(e4m3), k.to(e4m3), one, one)
            for queries, of_queries in ((q, counted), (q[0].transpose(0, 1), of_packed)):
                results = queries.new_empty(queries.shape), queries.new_empty(queries.shape[:2], dtype=torch.float32)
                room = Room.of(queries, copied, of_queries, (-1, 0), 1)
                spans, copies = Spans.empty(2, queries.device), Copies.empty(copied, 2, room, queries.device)
                paged_copies.place(queries, copied, of_queries, room, spans, results, warmup=True)
                paged_copies.copy(copied, of_queries, room, spans, copies, warmup=True)
            paged_copies.store_lse(torch.zeros(1, 8, 9), counted.lengths, torch.zeros(2, 8, length), warmup=True)
            rotary.turn(q[0].transpose(0, 1), None, of_packed, angles, warmup=True)
    return compiled


STACK_OF_FEW_TOKENS = 1600
"""Bytes of a thread's stack of the kernel that appends few tokens, and so seldom a page."""

MOST_STACK = {
    "append_kernel": 160,
    "attention_kernel": 200,
    "combine_kernel": 0,
    "place_kernel": 0,
    "copy_kernel": 0,
    "lse_kernel": 0,
    "tensors_attention_kernel": 144,
    "write_tokens_kernel": 0,
    "rotary_kernel": 0,
}
"""Bytes of a thread's stack that a cache's kernels may have on Hopper, for registers that are spilled. Those of
tensors_attention_kernel are of packed queries, of keys with a scale each: 25 of 2296 instructions of its loop."""


@pytest.mark.anywhere
@pytest.mark.thorough
@pytest.mark.parametrize("arch", TENSOR_CORES)
@pytest.mark.parametrize("part", range(4))
def test_kernels_of_a_cache_compile(arch: int, part: int, tmp_path: Path) -> None:
    from fp8attn.device import SHARED_MEMORY
    from fp8attn.triton.paged_append import FEW_REGISTERS, FEW_TOKENS

    compiled = by_itself(f"paged({arch}, {part})", tmp_path)
    assert {entry["kernel"] for entry in compiled} == {*MOST_STACK}
    for entry in compiled:
        assert entry["shared"] <= SHARED_MEMORY[arch], entry
        few = entry["kernel"] == "append_kernel" and entry["length"] <= FEW_TOKENS
        assert arch != 90 or entry["stack"] <= (STACK_OF_FEW_TOKENS if few else MOST_STACK[entry["kernel"]]), entry
        assert arch != 90 or entry["registers"] <= (FEW_REGISTERS if few else 255), entry
        assert not (entry["fuses"] and entry["kernel"] in ("append_kernel", "rotary_kernel")), (
            "its bytes are the definition's only if nothing is fused"
        )


def by_itself(call: str, cache: Path) -> Any:
    """What a function of this module returns in a process without a GPU, without the interpreter and with an empty cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folders = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent / "kit", HERE)))
    environment |= {"TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": folders}
    program = f"import json, test_compile; print(json.dumps(test_compile.{call}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_are_found_in_the_cache_by_every_process(tmp_path: Path) -> None:
    """Triton hashes constants that a kernel reads in the order of their names, and of one name by the address of its module: with two numbers
    by one name, a process finds what another one has compiled by chance."""
    assert by_itself("ambiguous_names()", tmp_path) == []


def test_kernels_are_found_in_the_cache_whichever_came_first(tmp_path: Path) -> None:
    """Triton's hash of a function lacks the constants of functions that it calls and that weren't hashed before."""
    found = by_itself("hashes(False)", tmp_path)
    names = {line.split()[0] for line in found}
    assert names >= {*QUANTIZERS, "forward_kernel", "half_keys_kernel", "hopper_kernel", "unsmooth_lse_kernel", "table_kernel"}
    assert by_itself("hashes(True)", tmp_path) == found


MOST_VARIANTS = {
    "fused_small_kernel": 8,
    "gather_kernel": 8,
    "finish_kernel": 1,
    "write_kernel": 4,
    "bias_kernel": 2,
    "unsmooth_lse_kernel": 2,
    "hopper_kernel": 6,
    "forward_kernel": 6,
}
"""Of a dtype, recipe and head dim, without masks: rows of q, k and v aligned or not; of attention, a config for few, more and many tiles, with LSE or
without."""


@pytest.mark.parametrize("dim, smooth_q", (pytest.param(128, False, marks=pytest.mark.thorough), (64, True), (72, False)))
def test_lengths_heads_and_layouts_compile_little(dim: int, smooth_q: bool, tmp_path: Path) -> None:
    found = by_itself(f"variants({dim}, {smooth_q})", tmp_path)
    assert {"gather_kernel", "finish_kernel", "write_kernel", "hopper_kernel", "forward_kernel"} <= {*found}
    assert all(count <= MOST_VARIANTS[name] for name, count in found.items()), found


@pytest.mark.anywhere
@pytest.mark.parametrize(
    "arch, problems",
    [
        pytest.param(arch, problems, marks=() if (arch, problems) == (90, "e4m3") else pytest.mark.thorough)
        for arch in TENSOR_CORES
        for problems in PROBLEMS
        if arch == 90 or problems != "head dims"
    ],
)
def test_compiles(arch: int, problems: str, tmp_path: Path) -> None:
    compiled = by_itself(f"compile_all({arch}, {problems!r})", tmp_path)

    from fp8attn.device import SHARED_MEMORY

    names = {entry["kernel"] for entry in compiled}
    attends = set() if problems == "rotations" else {"hopper_kernel" if arch == 90 else "forward_kernel"}
    assert names >= BESIDE.get(problems, set()) | attends
    assert arch == 90 or "hopper_kernel" not in names
    for entry in compiled:
        assert entry["shared"] <= entry.get("at most", SHARED_MEMORY[arch]) <= SHARED_MEMORY[arch], (entry["case"], entry["kernel"])
        e4m3, half = TENSOR_CORES[arch]
        if entry["kernel"] in ("forward_kernel", "hopper_kernel"):
            instruction = half if " f16 " in entry["case"] else e4m3
            assert instruction in entry["ptx"], f"{entry['case']}: {entry['kernel']} doesn't use {instruction}"
            assert (INT8_SCORES[arch] in entry["ptx"]) == (" int8 " in entry["case"]), f"{entry['case']}: {entry['kernel']}"
        for registers in re.findall(r"wgmma\.mma_async[^;]*\}, \{([^}]*)\}", entry["ptx"]):
            # ptxas 12.8 loses half of a register that holds the same pair of e4m3 twice, which only a P known in advance does
            assert len(set(registers.split(","))) == 4, f"{entry['case']}: parts of P are the same number: a length was compiled in"
        assert not entry["converts stack pointer"], f"{entry['case']}: {entry['kernel']} has a conversion by ptxas 12.8 that reads R1"
        # a rotation's first products are rounded before they are added up, which shows where they are subnormal
        assert not (entry["kernel"] in QUANTIZERS and entry["fuses"]), f"{entry['case']}: {entry['kernel']} fuses"
        writes_e4m3 = ("fused_small_kernel", "write_kernel") if " int8 " in entry["case"] else ("fused_small_kernel", "gather_kernel", "write_kernel")
        if entry["kernel"] in writes_e4m3 and arch >= 89:
            assert "cvt.rn.satfinite.e4m3x2" in entry["ptx"]
        if entry["kernel"] == "bias_kernel":
            assert ".tf32" in entry["ptx"] and " smoothed " in entry["case"]
        if entry["kernel"] in (*QUANTIZERS, "half_keys_kernel", "unsmooth_lse_kernel"):
            # a dependent that doesn't wait reads what isn't there yet
            assert ("griddepcontrol.wait" in entry["ptx"]) == (arch >= 90)
