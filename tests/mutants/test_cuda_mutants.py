"""The CUDA kernel broken on purpose, in its source: the parity test must see each of them."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from caps import capped_calls
from closeness import E4M3_STEP, assert_matches_pipeline
from emulated import ROW_KINDS, low_mask
from emulation import mutate
from forked import server
from fp8attn import Recipe, reference, rotation
from fp8attn.backends import cuda_unavailable
from fp8attn.call import Call, Problem, empty_lse, empty_output
from fp8attn.cuda import build, configs, fused_small, one_launch
from fp8attn.cuda import run as cuda_run
from fp8attn.cuda.configs import ADDED_INSTANCES, INSTANCES, INT8_INSTANCES, MASKED_INSTANCES, SOFTCAP_INSTANCES, WINDOW_INSTANCES
from fp8attn.cuda.oracle import oracle
from fp8attn.cuda.portable import BEST, LADDER
from fp8attn.device import device_of
from fp8attn.prepare import call_of
from fp8attn.quantization import quantize
from fp8attn.reference import Causal
from late import Launch
from mutants import (
    ADDED,
    EVERY,
    FUSED,
    FUSED_SMALL,
    GENERAL,
    INT8,
    MASKED,
    NATIVE,
    READY,
    SCALAR,
    SOFTCAP,
    SPECIALISED,
    SPLIT,
    WINDOW,
    WMMA,
)


def mutated(name: str | None, folder: Path) -> Path:
    """A copy of the kernel's sources, broken unless `name` is None."""
    sources = folder / "cuda"
    shutil.copytree(build.SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
    if name is not None:
        _, file, right, wrong = EVERY[name]
        broken = mutate((sources / file).read_text(), right, wrong, file)
        (sources / file).write_text(broken)
    return sources


def check(sources: str, cache: str, rung: str | None) -> list[str]:
    """In a process of its own: the parity test of a rung, or of the Hopper kernel, on kernels compiled from `sources` into a cache of their own.

    Returns:
        what it saw.
    """
    build.load_binding()  # no mutant's: everybody's
    build.SOURCES = Path(sources)
    os.environ["FP8ATTN_CACHE"] = cache
    if rung == FUSED_SMALL:
        return check_fused_small()
    if rung == READY:
        configs.FUSED_Q_INSTANCES = configs.FUSED_Q_INSTANCES[:1]
        return check_ready()
    hopper = {None: INSTANCES[0], GENERAL: next(c for c in INSTANCES if c.general), INT8: INT8_INSTANCES[0]}
    hopper |= {MASKED: MASKED_INSTANCES[0], ADDED: ADDED_INSTANCES[0], WINDOW: WINDOW_INSTANCES[0], SOFTCAP: SOFTCAP_INSTANCES[0]}
    config = (hopper | LADDER[64] | BEST[64])[rung]
    for name in ("INSTANCES", "INT8_INSTANCES", "MASKED_INSTANCES", "ADDED_INSTANCES", "WINDOW_INSTANCES", "SOFTCAP_INSTANCES"):
        setattr(configs, name, (config,))
    build.INSTANCES = (config,)
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
        if rung in (WINDOW, SOFTCAP):
            shift = reference.smoothing_shift(rotation.rotate_queries(queries, quantized[1].rotated), quantized[1].mean, call.softmax_scale)
            options: dict = dict(sinks=torch.full((1,), 2.0, device=device), mean_scores=shift, softcap=7.5 if rung == SOFTCAP else 0.0)
            call = dataclasses.replace(call, causal="bottom_right", window=(130, 0 if causal != "none" else 40), **options)
        if mask is not None:
            call = dataclasses.replace(call, attn_mask=mask.expand(1, 1, 150, 700))
        seen += compare(cuda_run.forward(call, device_of(device), config), oracle(quantized, call, config))
    for nonfinite in (False, True) if rung == SOFTCAP else ():
        for operands, capped in capped_calls(config, device, nonfinite=nonfinite, caps=((50.0, 1.0),)):
            seen += compare(cuda_run.forward(capped, device_of(device), config), oracle(operands, capped, config))
    return seen


def check_fused_small() -> list[str]:
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
        out, lse = cuda_run.forward_from_fp16(
            Problem(q, k, v, call.softmax_scale, "e4m3", causal, torch.float32, True), device_of(device), one_launch.small(q, k)
        )
        expected, expected_lse = oracle(quantized, call, fused_small.INSTANCES[0])
        expected_lse = reference.unsmoothed_lse(expected_lse, q, quantized[1].mean, call.softmax_scale, quantized[1].rotated)
        seen += compare((out, lse), (expected, expected_lse))
    return seen


def check_ready() -> list[str]:
    """Heads of K and V whose bytes come when the call has long begun, and whose last CTA then says so, one after another."""
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 64, generator=generator).to(device, torch.bfloat16) for n in (100, 700, 700))
    quantized = quantize(q, k, v, Recipe())
    call = call_by(quantized, "none")
    config = configs.FUSED_Q_INSTANCES[0]
    expected, expected_lse = oracle(quantized, call, config)
    mean = quantized[1].mean
    expected_lse = reference.unsmoothed_lse(expected_lse, q, mean, call.softmax_scale, quantized[1].rotated)
    late = replace(
        call, q=q, q_scale=None, k=torch.full_like(call.k.view(torch.uint8), 0x7F).view(call.k.dtype), v=torch.zeros_like(call.v),
        lse_mean=torch.full_like(mean, 100.0),
    )  # fmt: skip

    def arrive(k: torch.Tensor, v: torch.Tensor, lse_mean: torch.Tensor, ready: torch.Tensor) -> None:
        ready += 1  # a CTA of each head
        for head in range(4):
            torch.cuda._sleep(10_000_000)
            for to, source in ((k, call.k), (v, call.v), (lse_mean, mean)):
                to.view(torch.uint8).flatten(0, 1)[head].copy_(source.view(torch.uint8).flatten(0, 1)[head])
            ready[head] += 1

    loading, launch = (Launch(late, config, device_of(device)) for _ in range(2))
    # CUDA loads a kernel on its first launch, and no kernel while one runs that waits for it
    arrive(*(torch.empty_like(x) for x in (late.k, late.v, late.lse_mean)), loading.ready)
    actual = empty_output(q, 64, torch.float32), empty_lse(q, True)
    loading.attend(late, *actual, 2)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        launch.attend(late, *actual, 2)
    arrive(late.k, late.v, late.lse_mean, launch.ready)
    torch.cuda.synchronize()
    return compare(actual, (expected, expected_lse))


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
    # in another process: a kernel that crashes takes no other test with it
    with server() as context, ProcessPoolExecutor(1, context) as process:
        return process.submit(check, str(sources), str(cache), rung).result()


@pytest.mark.parametrize("name", EVERY)
def test_mutants_change_what_is_there(name: str, tmp_path: Path) -> None:
    """On any machine: what a mutant breaks is in the source."""
    mutated(name, tmp_path)


def require(rung: str | None, device: torch.device) -> None:
    """Skip where a GPU can't run it."""
    reason = cuda_unavailable(device)
    if reason is None and rung in (None, GENERAL, INT8, MASKED, ADDED, WINDOW, SOFTCAP, FUSED_SMALL, READY):
        reason = configs.unsupported_config(INSTANCES[0], device_of(device))
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.thorough
@pytest.mark.parametrize(
    "rung", (None, GENERAL, INT8, MASKED, ADDED, WINDOW, SOFTCAP, FUSED_SMALL, READY, SCALAR, WMMA, FUSED, SPECIALISED, NATIVE, SPLIT)
)
def test_the_kernel_itself_passes(device: torch.device, rung: str | None, tmp_path: Path) -> None:
    require(rung, device)
    assert run_check(mutated(None, tmp_path), tmp_path / "cache", rung) == []


@pytest.mark.gpu
@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY)
def test_mutant_is_seen(device: torch.device, name: str, tmp_path: Path) -> None:
    require(EVERY[name][0], device)
    assert run_check(mutated(name, tmp_path), tmp_path / "cache", EVERY[name][0])
