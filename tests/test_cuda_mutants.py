"""The CUDA kernel broken on purpose, in its source: the parity test must see each of them."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from closeness import E4M3_STEP, assert_matches_pipeline
from emulated import ROW_KINDS, low_mask
from emulation import mutate

from fp8attn import Recipe
from fp8attn.api import call_of, cuda_missing
from fp8attn.call import Call, empty_lse, empty_output
from fp8attn.cuda import build, configs, short
from fp8attn.cuda import early as early_launch
from fp8attn.cuda import run as cuda
from fp8attn.cuda.configs import ADDED_INSTANCES, INSTANCES, INT8_INSTANCES, MASKED_INSTANCES
from fp8attn.cuda.oracle import oracle
from fp8attn.cuda.portable import BEST, LADDER
from fp8attn.device import device_of
from fp8attn.quantize import quantize
from fp8attn.reference import Causal

STALE = ("tile/softmax.h", "m = m_new;\n  return alpha;", "if (m == NOTHING) m = m_new;\n  return alpha;")

MUTANTS = {
    "mask off by one": ("tile/mask.h", "min(row, q_length - 1) + causal_offset + 1)", "min(row, q_length - 1) + causal_offset + 2)"),
    "end of keys forgotten": ("tile/mask.h", "max(min(kv_length, min(row", "max(min(1 << 30, min(row"),
    "missing rescale": ("tile/softmax.h", "alpha = ptx::exp2_approx(m - m_new);", "alpha = 1.0f;"),
    "stale maximum": STALE,
    "m never falls": ("tile/softmax.h", "* factor[r];", "* factor[r], m_new[r] = fmaxf(m_new[r], m[r]);"),
    "m falls below zero": ("tile/softmax.h", "__vimax3_s32(bits(0), bits(1), 0)", "max(bits(0), bits(1))"),
    "wrong scale": ("hopper.cuh", "(by_key ? 1.0f : C.int8 ? fabsf(k_scale) : k_scale)", "1.0f"),
    "scale of another block": ("hopper.cuh", "scale_at(k_scale += (after - n) * scale_step)", "scale_at(k_scale)"),
    "scale of the block before": ("hopper.cuh", "read(shared.k_scale[ring.stage].next)", "read(shared.k_scale[ring.stage].own)"),
    "scale of another row": ("hopper.cuh", "facts.row_scale[f.row + 8 * r]", "facts.row_scale[f.row]"),
    "unpermuted V": ("tile/softmax.h", "0x6420", "0x4620"),
    "P truncated, not rounded": ("ptx/convert.h", "cvt.rn.relu.f16x2.f32", "cvt.rz.relu.f16x2.f32"),
    "sums of the wrong ones": ("hopper.cuh", "0x38383838", "0x38383839"),
    "output in the wrong place": ("tile/staged_output.h", "(2 * j + lane % 4 / 2) ^ row % 8", "(2 * j + lane % 4 / 2) ^ row % 4"),
    "mean of the wrong channel": ("tile/staged_output.h", "fmaf(b * inverse[r], scale.y, mean.y)", "fmaf(b * inverse[r], scale.y, mean.x)"),
}
"""Of the Hopper kernel: file, what stands there, what it is broken into."""

SPLIT, NATIVE, SPECIALISED, FUSED, SCALAR, WMMA = (
    "11 register operands",
    "10 native e4m3",
    "7 warp-specialised",
    "4 fused softmax",
    "0 scalar",
    "3 wmma-pv",
)

NEVER_FALLS = ("tile/softmax.h", "fabsf(m) >= FALL ? m : m >= 0.0f ? 0.0f : -FALL", "m")

RUNG_MUTANTS = {
    "scores that no lane wrote": (SCALAR, "tile/unfused.h", "for (int j = 0; j < keys; ++j) shared.s", "for (int j = 0; j < keys - 1; ++j) shared.s"),
    "end of keys forgotten, unfused": (SCALAR, "tile/unfused.h", "if (key >= end)\n", "if (key >= end + 1)\n"),
    "missing rescale, unfused": (
        SCALAR,
        "tile/unfused.h",
        "\n        shared.l[row] = fmaf(shared.l[row], alpha, sum)",
        "\n        shared.l[row] = shared.l[row] + sum",
    ),
    "missing rescale of fragments": (WMMA, "tile/unfused.h", "columns.x[i] *= alpha.x[i];", "columns.x[i] *= 1.0f;"),
    "half a row": (WMMA, "tile/unfused.h", "sum += __shfl_xor_sync(~0u, sum, 16);", ""),
    "channels of another fragment": (WMMA, "tile/unfused.h", "v.at(channel, key / 8)", "v.at(channel ^ 16, key / 8)"),
    "halves in the wrong order": (
        FUSED,
        "tile/shared_tile.h",
        "halves_of_e4m3(codes.y, first.y, second.y)",
        "halves_of_e4m3(codes.y, second.y, first.y)",
    ),
    "scale of another block": (FUSED, "tile/fused.h", "key / SCALE_BLOCK * p", "start / (2 * SCALE_BLOCK) * p"),
    "scale of another row": (FUSED, "tile/fused.h", "shared.facts.row_scale[f.row + 8 * r]", "shared.facts.row_scale[f.row]"),
    "missing rescale": (FUSED, "tile/online_softmax.h", "l[r] *= alpha[r];", ""),
    "stale maximum": (FUSED, *STALE),
    "m never falls": (FUSED, *NEVER_FALLS),
    "m never falls, unfused": (SCALAR, *NEVER_FALLS),
    "unrounded P": (FUSED, "tile/products.h", "constexpr (E4M3)", "constexpr (false)"),
    "mask off by one": (FUSED, "tile/mask.h", "min(row, q_length - 1) + causal_offset + 1)", "min(row, q_length - 1) + causal_offset + 2)"),
    "a stage too early": (
        FUSED,
        "portable.cuh",
        "stage == 0 ? ahead : stage - 1);\n    ptx::cp_async_commit();\n    if",
        "stage);\n    ptx::cp_async_commit();\n    if",
    ),
    "producers a stage too early": (
        SPECIALISED,
        "portable.cuh",
        "stage == 0 ? ahead : stage - 1);\n      ptx::cp_async_commit();\n      ptx",
        "stage);\n      ptx::cp_async_commit();\n      ptx",
    ),
    "swizzle of another row": (SPECIALISED, "tile/shared_tile.h", "lane_offset ^ 16 * chunks :", "lane_offset + 16 * chunks :"),
    "unpermuted V": (
        NATIVE,
        "tile/products.h",
        "a[2 * h + r] = ptx::e4m3x4(x[0], x[1], x[4], x[5])",
        "a[2 * h + r] = ptx::e4m3x4(x[0], x[4], x[1], x[5])",
    ),
    "output not rescaled": (NATIVE, "tile/fused.h", "alpha[t][i / 2 % 2], fresh", "1.0f, fresh"),
    "a part's weight": (SPLIT, "tile/softmax.h", "theirs = ptx::exp2_approx(their_m - m_new);", "theirs = 1.0f;"),
    "a part's sum": (SPLIT, "tile/softmax.h", "fmaf(sum, mine, their_sum * theirs)", "sum * mine"),
    "values of another part": (SPLIT, "tile/fused.h", "0, first_key / 16 * (", "0, 0 * ("),
}
"""Of the portable kernel: the rung that shows it, and the same."""

SHORT = "short"

SHORT_MUTANTS = {
    "scale of another block": (SHORT, "short.cuh", "&shared.k_largest[block], {", "&shared.k_largest[BLOCKS - 1 - block], {"),
    "mean of another slice": (SHORT, "short.cuh", "&shared.key_mean[part.slice * QUADS + quad]", "&shared.key_mean[(3 - part.slice) * QUADS + quad]"),
    "means not awaited": (SHORT, "short.cuh", "  ptx::mbarrier_wait(&shared.means_full, 0);\n", ""),
    "bytes of another token": (SHORT, "short.cuh", "upper ? 0x3276 : 0x5410", "upper ? 0x7632 : 0x1054"),
    "columns of another slice": (SHORT, "short.cuh", "keys + 2 * step * (S::block_bytes / 16)", "keys + step * (S::block_bytes / 16)"),
    "mean not added back": (SHORT, "short.cuh", "desk.facts.mean[c] = desk.shift[c] = mean;", "desk.facts.mean[c] = 0, desk.shift[c] = mean;"),
    "a NaN unseen": (SHORT, "short.cuh", "hidden >> key % LANES & 1 ? NAN_CODES<false> : codes", "codes"),
    "tokens that don't exist": (SHORT, "short.cuh", "if (exists(pair, i % 2)) largest = fmaxf", "largest = fmaxf"),
    "scale of another row": (SHORT, "tile/quantize.h", "scale[row(member())] = largest", "scale[row(0)] = largest"),
    "queries not divided as keys are": (SHORT, "tile/quantize.h", "restores * PART", "restores"),
    "signs of other channels": (SHORT, "tile/rotate.h", "uint32_t(SIGNS >> from) ^ parity(to", "parity(to"),
}
"""Of the kernel that quantizes, likewise."""

INT8 = "int8"

INT8_MUTANTS = {
    "sums taken for scores": ("tile/subnormal_softmax.h", "s[i] = float(sums[i] - start);", "s[i] = float(sums[i]);"),
    "converted sums taken for subnormals": ("tile/subnormal_softmax.h", "s[i] = __int_as_float(sums[i]);", "s[i] = float(sums[i]);"),
    "sums that start at zero": ("hopper.cuh", "(shared.side.ones)[threadIdx.x] = ~0u;", "(shared.side.ones)[threadIdx.x] = 0;"),
    "maxima of sums": ("tile/subnormal_softmax.h", "__fmul_rn(float(top - BEGIN), factor[r])", "__fmul_rn(float(top), factor[r])"),
    "maxima of sums, not easy": ("tile/subnormal_softmax.h", "-INFINITE : float(top - BEGIN) * factor[r]", "-INFINITE : float(top) * factor[r]"),
    "a largest sum below the start": ("tile/subnormal_softmax.h", "shfl_xor_sync(~0u, largest, 2), least)", "shfl_xor_sync(~0u, largest, 2), 0)"),
    "a sum that isn't its row's": ("tile/subnormal_softmax.h", "peak[r] = __int_as_float(top);", "peak[r] = __int_as_float(top - 4096);"),
    "a mark taken for a sign": ("hopper.cuh", "C.int8 ? fabsf(k_scale) : k_scale", "k_scale"),
    "keys that aren't finite forgotten": ("hopper.cuh", "if (poisoned >= row_end[f.row + 8 * r]) continue;", "continue;"),
    "the key before": ("tile/poison.h", "return start + i + __ffs(poisoned) - 1;", "return start + i + __ffs(poisoned) - 2;"),
    "queries that aren't finite forgotten": ("hopper.cuh", "r), poisoned[r]);", "r), false);"),
}
"""Of the Hopper kernel on int8."""

READY = "ready"

READY_MUTANTS = {
    "keys that aren't there yet": ("hopper.cuh", "if (C.half_q && p.ready != nullptr) wait_until_ready(p, tile);", ""),
    "keys of another head": ("hopper.cuh", "tile.batch * p.kv_heads + tile.kv_head) < p.ready_ctas", "0 * tile.batch) < p.ready_ctas"),
    "a part of the keys": ("hopper.cuh", "< p.ready_ctas", "< p.ready_ctas - 1"),
}
"""Of attention that begins while keys and values are still being quantized."""

GENERAL = "general"

GENERAL_MUTANTS = {
    "mean of queries forgotten": ("hopper.cuh", "if (p.bias != nullptr) keys.add_bias(", "if (false) keys.add_bias("),
    "mean of other queries": ("tile/key_facts.h", "tile.head, row) + start", "tile.head, tile.first_row) + start"),
    "means of the next key": ("tile/key_facts.h", "factor[r], pair.y)", "factor[r], pair.x)"),
    "means without the softmax scale": ("tile/key_facts.h", "factor[0] = factor[1] = unit;", "factor[0] = factor[1] = 1.0f;"),
    "means times the scale twice": ("hopper.cuh", "!C.general || p.bias != nullptr ? 1.0f : p.score_scale", "p.score_scale"),
    "keys' own scales forgotten": ("hopper.cuh", "if (by_key) keys.scale_scores(s, f);", ""),
    "scales of the next key": ("tile/key_facts.h", "*= pair.y;", "*= pair.x;"),
    "scales of other keys": ("tile/key_facts.h", "at + (start + i) * p.k_scale_strides[2]", "at + i * p.k_scale_strides[2]"),
}
"""Of the Hopper kernel's general instances on smoothed queries and keys with scales of their own."""

MASKED = "masked"

MASKED_MUTANTS = {
    "nothing hidden": ("tile/key_facts.h", "if (!(seen >> i & 1))", "if (false)"),
    "bits of another row": ("tile/key_facts.h", "min(f.row + 8 * r, p.mask_rows - 1)", "f.row"),
    "what others are shown": ("tile/shown.h", "shown >> SHOWN_BITS * consumer;", "shown;"),
    "bits that others are shown": ("tile/key_facts.h", "tile.first_row / ROWS + consumer", "tile.first_row / ROWS"),
    "blocks left out that show something": ("tile/shown.h", "shown_ != 0", "(shown_ & 15) != 0"),
    "scale of a block that is left out": ("hopper.cuh", "k_scale += (after - n) * scale_step", "k_scale += scale_step"),
    "values of a block that is left out": ("hopper.cuh", "&shared.v_full[stage], n * KEYS,", "&shared.v_full[stage], (after - 1) * KEYS,"),
    "all is shown": ("read_mask.cuh", "hides |= exists && !visible", "hides |= false"),
}
"""Of the Hopper kernel's instances for boolean masks."""

ADDED = "added"

ADDED_MUTANTS = {
    "nothing added": ("tile/added_mask.h", "fmaf(at[0], factor[i % 2], two.x)", "at[0] * factor[i % 2]"),
    "numbers of the next key": ("tile/added_mask.h", "fmaf(at[1], factor[i % 2], two.y)", "fmaf(at[1], factor[i % 2], two.x)"),
    "chunks where they would lie unswizzled": ("tile/added_mask.h", "(chunk ^ row % 8)", "chunk"),
    "numbers of other keys": ("tile/added_mask.h", "2 * (visit.block * KEYS + i * SLOT_KEYS)", "2 * i * SLOT_KEYS"),
    "numbers of other queries": ("tile/added_mask.h", "row = tile.first_row + consumer * ROWS;", "row = tile.first_row;"),
    "numbers taken for exponents": ("hopper.cuh", "factor[0] = factor[1] = LOG2E;", "factor[0] = factor[1] = 1.0f;"),
    "what is added isn't seen": ("read_mask.cuh", "adds |= exists && visible && value != 0.0f", "adds |= false"),
    "the next key's from memory": ("tile/added_mask.h", "mask_value(two.of[i])", "mask_value(two.of[0])"),
    "any others from memory": ("tile/added_mask.h", "key < row.keys ? row.at[key * apart]", "key < row.keys ? row.at[0]"),
    "the lowest numbers hide": ("read_mask.cuh", "visible = value != -INFINITE", "visible = value * LOG2E != -INFINITE"),
    "the lowest numbers overflow": (
        "tile/softmax.h",
        "ptx::max_nan(__fmul_rn(s[i], factor[i / 2 % 2]), LOWEST_SCORE)",
        "__fmul_rn(s[i], factor[i / 2 % 2])",
    ),
    "an offset lost next to low numbers": (
        "tile/softmax.h",
        "any_large(m)) make_relative(factor, m, origin, s);",
        "any_large(m)) scale_by_row(factor, s);",
    ),
}
"""Of the Hopper kernel's instances for masks that are added."""

EVERY = {name: (None, *mutant) for name, mutant in MUTANTS.items()}
EVERY |= {f"{mutant[0]}: {name}": mutant for name, mutant in (RUNG_MUTANTS | SHORT_MUTANTS).items()}
EVERY |= {f"{READY}: {name}": (READY, *mutant) for name, mutant in READY_MUTANTS.items()}
EVERY |= {f"{INT8}: {name}": (INT8, *mutant) for name, mutant in INT8_MUTANTS.items()}
EVERY |= {f"{GENERAL}: {name}": (GENERAL, *mutant) for name, mutant in GENERAL_MUTANTS.items()}
EVERY |= {f"{MASKED}: {name}": (MASKED, *mutant) for name, mutant in MASKED_MUTANTS.items()}
EVERY |= {f"{ADDED}: {name}": (ADDED, *mutant) for name, mutant in ADDED_MUTANTS.items()}


def mutated(name: str | None, folder: Path) -> Path:
    """A copy of the kernel's sources, broken unless `name` is None."""
    sources = folder / "cuda"
    shutil.copytree(build.SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
    if name is not None:
        _, file, right, wrong = EVERY[name]
        mutate(sources / file, right, wrong)
    return sources


def check(sources: str, cache: str, rung: str | None) -> list[str]:
    """In a process of its own: the parity test of a rung, or of the Hopper kernel, on kernels compiled from `sources` into a cache of their own.

    Returns:
        what it saw.
    """
    build.load_binding()  # no mutant's: everybody's
    build.SOURCES = Path(sources)
    os.environ["FP8ATTN_CACHE"] = cache
    if rung == SHORT:
        return check_short()
    if rung == READY:
        configs.HALF_Q_INSTANCES = configs.HALF_Q_INSTANCES[:1]
        return check_ready()
    hopper = {None: INSTANCES[0], GENERAL: next(c for c in INSTANCES if c.general), INT8: INT8_INSTANCES[0]}
    hopper |= {MASKED: MASKED_INSTANCES[0], ADDED: ADDED_INSTANCES[0]}
    config = (hopper | LADDER[64] | BEST[64])[rung]
    build.INSTANCES = configs.INSTANCES = configs.INT8_INSTANCES = configs.MASKED_INSTANCES = configs.ADDED_INSTANCES = (config,)
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=generator).to(device) for n in (150, 700, 700))
    # later keys score higher, so that the maximum moves; scales of blocks differ
    k = k * torch.linspace(0.2, 3, 700, device=device)[:, None]
    if rung == INT8:
        q[0, 0, 20, 3], k[0, 0, 600, 5] = torch.nan, torch.inf
    if rung == GENERAL:
        q += torch.linspace(-2, 2, 150, device=device)[:, None]  # groups of queries have different means
    recipe = Recipe(qk="int8" if rung == INT8 else "e4m3", smooth_q=rung == GENERAL, k="token" if rung == GENERAL else "block")
    with_means = v + torch.linspace(-3, 3, 64, device=device)  # large ones, which are removed, but beside which other errors are small
    # blocks of keys whose scores are all negative, after others of which some aren't; no key there hides the answers of all
    common = q.nan_to_num(0.0).mean(2, keepdim=True).sign()
    against = k.nan_to_num(posinf=0.0) + 0.4 * (torch.arange(700, device=device) // 128 % 2 * -2 + 1)[:, None] * common
    seen = []
    problems = [(q, k, v, "none"), (q, k, v, "bottom_right"), (q, k, with_means, "none"), (q + common, against, v, "none")]
    masks: list[torch.Tensor | None] = [None]
    if rung == MASKED:  # of blocks of keys the first queries see one whole and some of three, the others some of three; nobody sees any of one
        first, block = torch.arange(150, device=device)[:, None] < 64, torch.arange(700, device=device) // 128
        mask = (torch.rand(150, 700, generator=generator).to(device) < 0.7) & torch.where(first, block >= 3, block % 5 < 2)
        masks = [mask | first & (block == 1)]
    if rung == ADDED:  # to some blocks of either group of queries; from shared memory, from memory in pairs, one by one
        block = torch.arange(704, device=device) // 128
        mask = torch.randn(150, 704, generator=generator).to(device) * torch.where(
            torch.arange(150, device=device)[:, None] < 64, block > 1, block != 3
        )
        mask = mask.masked_fill(torch.rand(150, 704, generator=generator).to(device) < 0.2, -torch.inf)
        masks = [mask.to(torch.bfloat16)[:, :700], mask[:, :700], torch.nn.functional.pad(mask.to(torch.bfloat16), (1, 0))[:, 1:701]]
        masks += [low_mask(ROW_KINDS, 150, 704, dtype, 1).to(device)[:, :700] for dtype in (torch.bfloat16, torch.float32)]
    if rung == INT8:
        # too large to stay sums; of a block whose scale is largest, and so what sums start at, no key is looked at
        away = torch.where(torch.arange(700, device=device) // 128 == 1, -20.0, 0.0)[:, None] * common
        problems.append((100 * (q + common), torch.randn(k.shape, generator=generator).to(device) + away, v, "none"))
        # a block's scores so far below those before it that 2^(m - m_new) isn't finite if m follows them
        problems.append((q + common, k.nan_to_num(posinf=0.0) + 0.8 * away, v, "none"))
    for (queries, keys, values, causal), mask in itertools.product(problems, masks):
        quantized = quantize(queries, keys, values, recipe)
        call = call_by(quantized, causal)
        if mask is not None:
            call = dataclasses.replace(call, attn_mask=mask.expand(1, 1, 150, 700))
        seen += compare(cuda.forward(call, device_of(device), config), oracle(quantized, call, config))
    return seen


def check_short() -> list[str]:
    """The same for the kernel that quantizes: bfloat16 whose last block is ragged, and a value that isn't finite."""
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 64, generator=generator).to(device) for n in (150, 500, 500))
    # later keys score higher, so that scales of blocks differ; K's mean is larger than what is left of any key
    k = 40 + k * torch.linspace(0.2, 3, 500, device=device)[:, None]
    v[0, 1, 77, 5] = torch.nan  # and the answers of one head, which hide what else is wrong
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v + 2))
    quantized = quantize(q, k, v, Recipe())
    seen = []
    for causal in ("none", "top_left"):
        call = call_by(quantized, causal)
        out, lse, _ = cuda.forward_from_half(q, k, v, call.softmax_scale, causal, torch.float32, True, device_of(device))
        seen += compare((out, lse), oracle(quantized, call, short.INSTANCES[0]))
    return seen


def check_ready() -> list[str]:
    """Heads of K and V whose bytes come when the call has long begun, and whose last CTA then says so, one after another."""
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 64, generator=generator).to(device, torch.bfloat16) for n in (100, 700, 700))
    quantized = quantize(q, k, v, Recipe())
    call = call_by(quantized, "none")
    config = configs.HALF_Q_INSTANCES[0]
    expected = oracle(quantized, call, config)
    early = replace(call, q=q, q_scale=None, k=torch.full_like(call.k.view(torch.uint8), 0x7F).view(call.k.dtype), v=torch.zeros_like(call.v))

    def arrive(k: torch.Tensor, v: torch.Tensor, ready: torch.Tensor) -> None:
        ready += 1  # a CTA of each head
        for head in range(4):
            torch.cuda._sleep(10_000_000)
            for to, source in ((k, call.k), (v, call.v)):
                to.view(torch.uint8).flatten(0, 1)[head].copy_(source.view(torch.uint8).flatten(0, 1)[head])
            ready[head] += 1

    counter, ready, *others = (torch.zeros(n, dtype=torch.int32, device=device) for n in (1, 4, 4))
    # CUDA loads a kernel on its first launch, and no kernel while one runs that waits for it
    arrive(torch.empty_like(early.k), torch.empty_like(early.v), *others)
    actual = empty_output(q, 64, torch.float32), empty_lse(q, True)
    early_launch.forward_when_ready(early, device_of(device), config, *actual, counter.clone(), others[0], 2)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        early_launch.forward_when_ready(early, device_of(device), config, *actual, counter, ready, 2)
    arrive(early.k, early.v, ready)
    torch.cuda.synchronize()
    return compare(actual, expected)


def call_by(quantized: tuple, causal: Causal) -> Call:
    alignment = "top_left" if causal == "none" else causal
    return call_of(*quantized, is_causal=causal != "none", causal_alignment=alignment, out_dtype=torch.float32, return_lse=True)


def compare(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> list[str]:
    """What the parity test says of output and LSE."""
    try:
        assert_matches_pipeline(actual[0], expected[0], emulated=False)
        torch.testing.assert_close(actual[1], expected[1], rtol=1e-3, atol=E4M3_STEP, equal_nan=True)
    except AssertionError as error:
        return [str(error)]
    return []


def run_check(sources: Path, cache: Path, rung: str | None) -> list[str]:
    # forked from a process that has imported what takes long and never touches a GPU: a kernel that crashes takes no other test with it
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton", "fp8attn"])
    with ProcessPoolExecutor(1, context) as process:
        return process.submit(check, str(sources), str(cache), rung).result()


@pytest.mark.parametrize("name", EVERY)
def test_mutants_change_what_is_there(name: str, tmp_path: Path) -> None:
    """On any machine: what a mutant breaks is in the source."""
    mutated(name, tmp_path)


def require(rung: str | None, device: torch.device) -> None:
    """Skip where a GPU can't run it."""
    reason = cuda_missing(device)
    if reason is None and rung in (None, GENERAL, INT8, MASKED, ADDED, SHORT, READY):
        reason = configs.misfit(INSTANCES[0], device_of(device))
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("rung", (None, GENERAL, INT8, MASKED, ADDED, SHORT, READY, SCALAR, WMMA, FUSED, SPECIALISED, NATIVE, SPLIT))
def test_the_kernel_itself_passes(device: torch.device, rung: str | None, tmp_path: Path) -> None:
    require(rung, device)
    assert run_check(mutated(None, tmp_path), tmp_path / "cache", rung) == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", EVERY)
def test_mutant_is_seen(device: torch.device, name: str, tmp_path: Path) -> None:
    require(EVERY[name][0], device)
    assert run_check(mutated(name, tmp_path), tmp_path / "cache", EVERY[name][0])
