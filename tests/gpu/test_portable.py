"""The portable CUDA kernel: its configs and what says no to them, budgets and instructions where nvcc is here, every rung where a GPU is."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import GPU
from hypothesis import given
from hypothesis import strategies as st

from closeness import assert_matches_pipeline
from compiling import compiled
from fp8attn import Recipe
from fp8attn.backends import cuda_unavailable
from fp8attn.call import Call
from fp8attn.cuda import build, configs, portable
from fp8attn.cuda import run as cuda_run
from fp8attn.cuda.oracle import oracle
from fp8attn.cuda.portable import BEST, DIMS, INSTANCES, LADDER, PortableConfig
from fp8attn.device import ARCHITECTURES, Device, device_of
from fp8attn.prepare import call_of
from fp8attn.quantization import quantize
from instances import call
from strategies import Case, cases

H100, L40S, A100 = (ARCHITECTURES[arch] for arch in (90, 89, 80))
RUNGS = {**LADDER[64], **BEST[64]}


@pytest.mark.parametrize("dim", LADDER)
def test_every_rung_adds_one_feature(dim: int) -> None:
    rungs = list(LADDER[dim].values())
    assert [int(name.split()[0]) for name in LADDER[dim]] == list(range(11))
    assert len({c.name for c in rungs}) == len(rungs)
    for before, after in pairwise(rungs):
        changed = [field.name for field in dataclasses.fields(after) if getattr(before, field.name) != getattr(after, field.name)]
        assert len(changed) == 1, f"{changed} change at once"


@pytest.mark.parametrize("dim", LADDER)
def test_all_rungs_fit_an_h100(dim: int) -> None:
    assert [portable.unsupported_config(c, H100) for c in (*LADDER[dim].values(), *BEST[dim].values())] == [None] * (
        len(LADDER[dim]) + len(BEST[dim])
    )


@pytest.mark.parametrize(
    "rung, change, device, reason",
    (
        ("10 native e4m3", {}, A100, "takes sm_89"),
        ("10 native e4m3", {}, dataclasses.replace(A100, arch=75), "needs sm_80"),
        ("0 scalar", dict(head_dim=96), H100, "must be among"),
        ("0 scalar", dict(keys=48), H100, "48 keys"),
        ("0 scalar", dict(warp_rows=32), H100, "where scores meet in shared memory it has 16"),
        ("3 wmma-pv", dict(swizzle=True), H100, "wmma"),
        ("3 wmma-pv", dict(producers=2), H100, "producers need consumers"),
        ("3 wmma-pv", dict(operands="registers"), H100, "halves in shared memory"),
        ("4 fused softmax", dict(tensor_pv=False), H100, "tensor_qk and tensor_pv"),
        ("6 swizzle", dict(keys=256), H100, "a scale covers 128"),
        ("10 native e4m3", dict(e4m3_p=False), L40S, "P must be rounded"),
        ("9 fast exp", dict(int8=True), H100, "in registers or native"),
        ("9 fast exp", dict(half_sums=True), H100, "those of e4m3, native"),
        ("3 wmma-pv", dict(int8=True), H100, "scores fused"),
        ("9 fast exp", dict(producers=1, head_dim=256, value_dim=256), H100, "by eights of rows"),
        ("7 warp-specialised", dict(producers=3), H100, "producers 0, 1, 2 or 4"),
        ("7 warp-specialised", dict(stages=12), L40S, "bytes of shared memory"),
        ("6 swizzle", dict(warps=16, keys=128), H100, "accumulators take"),
        ("6 swizzle", dict(splits=3), H100, "share rows"),
        ("8 persistent", dict(splits=2), H100, "no producers"),
        ("9 fast exp", dict(drift=True), H100, "warps that drift"),
        ("6 swizzle", dict(drift=True), H100, "warps that drift"),
        ("9 fast exp", dict(producers=0, operands="registers", stages=1, splits=2, warps=16), H100, "exchange"),
    ),
)
def test_what_does_not_fit_says_why(rung: str, change: dict, device: Device, reason: str) -> None:
    config = dataclasses.replace(LADDER[64][rung], **change)
    assert reason in (portable.unsupported_config(config, device) or "") and not portable.fits(config, device)


@pytest.mark.parametrize("device", (A100, L40S, H100, ARCHITECTURES[100], ARCHITECTURES[120]), ids=lambda device: f"sm_{device.arch}")
@pytest.mark.parametrize("dim", (16, 64, 72, 128, 136, 256))
@pytest.mark.parametrize(
    "options",
    (
        {},
        dict(is_causal=True),
        dict(scale=-0.1),
        dict(recipe=Recipe(compute="f16")),
        dict(recipe=Recipe(k="token", two_level=False)),
        dict(recipe=Recipe(qk="int8")),
        dict(recipe=Recipe(smooth_q=True)),
        dict(recipe=Recipe(qk="int8", k="token", compute="f16")),
    ),
)
def test_every_gpu_gets_an_instance(device: Device, dim: int, options: dict) -> None:
    problem = call(dim, **options)
    config = portable.choose(problem, device)
    assert portable.unsupported_call(problem, device) is None and portable.fits(config, device) and portable.takes(config, problem)
    assert config in portable.group(config.head_dim, device, problem.int8) and config.head_dim == min(d for d in DIMS if d >= dim)
    native = device.has_fp8_units and problem.compute == "e4m3" and problem.two_level is not False
    assert config.operands == ("native" if native and device.arch != 90 and config.head_dim < 256 else "registers")


def test_the_hopper_kernel_goes_first() -> None:
    assert isinstance(cuda_run.choose(call(), H100), configs.HopperConfig)
    for problem, device in ((call(), L40S), (call(recipe=Recipe(compute="f16")), H100), (call(recipe=Recipe(two_level=False)), H100)):
        assert isinstance(cuda_run.plan(problem, device), PortableConfig) and isinstance(cuda_run.plan(problem, device, first=True), str)


@pytest.mark.parametrize(
    "batch, heads, kv_heads, length, kv_length, expected",
    (
        (1, 8, 8, 64, 65536, 16),
        (1, 8, 8, 64, 600, 1),
        (8, 32, 32, 64, 65536, 1),
        (1, 1, 1, 1, 1 << 20, 64),
        (1, 32, 8, 1, 65536, 16),
        (1, 32, 8, 128, 65536, 2),
    ),
)
def test_keys_are_shared_where_sms_are_empty(batch: int, heads: int, kv_heads: int, length: int, kv_length: int, expected: int) -> None:
    """Each of 132 SMs has a CTA if there are keys enough; query heads of a key head are one tile if they are short."""
    k = torch.zeros(1, 1, 1, 64).expand(batch, kv_heads, kv_length, 64)
    q, q_scale = torch.zeros(batch, heads, length, 64), torch.ones(batch, heads, 1)
    problem = dataclasses.replace(call(), q=q, q_scale=q_scale, q_group=0, k=k, kv_length=kv_length)
    assert cuda_run.splits_of(problem, RUNGS["11 register operands"], H100) == expected
    assert cuda_run.splits_of(problem, RUNGS["8 persistent"], H100) == 1


def test_small_problems_get_small_tiles() -> None:
    few = call(length=512, recipe=Recipe(compute="f16"))
    many = dataclasses.replace(few, q=torch.zeros(1, 1, 4096, 64).expand(8, 32, 4096, 64))
    assert portable.choose(few, H100).tile_rows < portable.choose(many, H100).tile_rows


@pytest.fixture(scope="module")
def cuobjdump() -> str:
    """CUDA's, or the one that Triton brings."""
    import triton

    brought = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = str(brought) if brought.exists() else shutil.which("cuobjdump")
    if found is None:
        pytest.skip("cuobjdump isn't here")
    return found


@pytest.mark.anywhere
def test_ada_multiplies_e4m3_as_it_is(nvcc: str, cuobjdump: str, tmp_path: Path) -> None:
    """The native rung on sm_89: e4m3 tensor-core instructions for both products, no half ones, and nothing dequantized."""
    native = LADDER[64]["10 native e4m3"]
    half = dataclasses.replace(native, half_sums=True)
    scores, values = native.keys // 8 * native.head_dim // 32, native.value_dim // 8 * native.keys // 32
    for config, of_float, of_half in ((native, scores + values, 0), (half, scores, values)):
        compiled(nvcc, config, 89, tmp_path)
        done = subprocess.run([cuobjdump, "-sass", str(tmp_path / f"{config.name}.cubin")], capture_output=True, text=True, check=False)
        text = done.stdout
        if "QMMA" not in text and "MMA" not in text:
            pytest.skip("cuobjdump doesn't read this CUDA version's files")
        found = [len(re.findall(rf"QMMA\.16832\.{kind}\.E4M3\.E4M3", text)) for kind in ("F32", "F16")]
        blocks = found[0] // of_float
        assert blocks > 0 and found == [blocks * of_float, blocks * of_half] and "HMMA" not in text and "UNPACK_B" not in text


def every_config(device: Device) -> tuple[PortableConfig, ...]:
    """All rungs, for calls of every kind, and what is shipped: one library."""
    rungs = (config for dim in LADDER for config in (*LADDER[dim].values(), *BEST[dim].values()))
    everything = [
        dataclasses.replace(c, general=general, e4m3_p=e4m3_p, int8=int8, half_sums=half_sums)
        for c in rungs
        for general in ((False, True) if c.fused else (False,))
        for e4m3_p in ((True, False) if c.operands != "native" else (True,))
        for int8 in ((False, True) if c.operands != "shared" and e4m3_p else (False,))
        for half_sums in ((False, True) if c.operands == "native" else (False,))
    ]
    return tuple(c for c in dict.fromkeys((*everything, *INSTANCES)) if portable.fits(c, device))


@pytest.fixture(scope="module")
def rungs(device: torch.device, request: pytest.FixtureRequest) -> tuple[PortableConfig, ...]:
    """Those that calls choose; thorough, all."""
    if not GPU:
        pytest.skip("needs an NVIDIA GPU")
    missing = cuda_unavailable(device)
    if missing is not None:
        pytest.skip(missing)
    found = every_config(device_of(device))
    # those have libraries of their own
    shipped = {config for dim in DIMS for int8 in (False, True) for config in portable.group(dim, device_of(device), int8)}
    if not request.config.option.thorough:
        return tuple(config for config in found if config in shipped)
    build.load(tuple(config for config in found if config not in shipped), device_of(device).arch)
    return found


def able(rungs: tuple[PortableConfig, ...], problem: Call) -> list[PortableConfig]:
    """Those that take a call."""
    return [c for c in rungs if portable.takes(c, problem)]


def check(quantized: tuple, problem: Call, config: PortableConfig, device: Device) -> None:
    """A config against the oracle that models it."""
    out, lse = cuda_run.forward(problem, device, config)
    expected, expected_lse = oracle(quantized, problem, config, cuda_run.splits_of(problem, config, device))
    assert_matches_pipeline(out, expected, False, expected_lse)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=5e-3)


@pytest.mark.gpu
@given(case=cases(), data=st.data())
def test_every_rung_matches_the_pipeline(case: Case, data: st.DataObject, device: torch.device, rungs: tuple[PortableConfig, ...]) -> None:
    quantized = quantize(*case.tensors(device), case.recipe)
    problem = call_of(*quantized, **case.options(device), recipe=case.recipe, out_dtype=case.out_dtype, return_lse=True)
    check(quantized, problem, data.draw(st.sampled_from(able(rungs, problem))), device_of(device))


def quantized_normal(device: torch.device, q_length: int, kv_length: int, dim: int = 64) -> tuple:
    generator = torch.Generator().manual_seed(q_length + kv_length)
    shapes = ((1, 2, q_length, dim), (1, 2, kv_length, dim), (1, 2, kv_length, dim))
    return quantize(*(torch.randn(shape, generator=generator).to(device) for shape in shapes), Recipe())


@pytest.mark.gpu
@pytest.mark.parametrize("kv_length", (1, 33, 65))
def test_nothing_is_read_that_nobody_wrote(device: torch.device, rungs: tuple[PortableConfig, ...], kv_length: int) -> None:
    """After a call that leaves NaN wherever scores, P and operands lie, one with few keys: what it doesn't write itself must not count."""
    nan = (torch.full((1, 264, 128, 64), torch.nan, device=device) for _ in range(3))
    poison = call_of(*quantize(*nan, Recipe()), out_dtype=torch.float32)
    quantized = quantized_normal(device, 20, kv_length)
    problem = call_of(*quantized, out_dtype=torch.float32, return_lse=True)
    for config in able(rungs, problem):
        cuda_run.forward(poison, device_of(device), config)
        check(quantized, problem, config, device_of(device))


@pytest.mark.gpu
def test_a_zero_tensor_has_scale_one(device: torch.device, rungs: tuple[PortableConfig, ...]) -> None:
    """A tiny scale instead, to divide by something, would come back as a factor of scores or values that aren't zero."""
    q, k = torch.zeros(1, 2, 70, 64, device=device), torch.zeros(1, 2, 90, 64, device=device)
    v = torch.randn(1, 2, 90, 64, device=device)
    for recipe in (Recipe(), Recipe(q="tensor", k="tensor", v="tensor", smooth_k=False, smooth_v=False)):
        quantized = quantize(q, k, v, recipe)
        assert (quantized[0].scale == 1).all() and (quantized[1].scale == 1).all()
        zero = quantize(None, k, v * 0, recipe)[2]
        assert (zero.scale == 1).all()
        problem = call_of(*quantized, out_dtype=torch.float32, recipe=recipe, return_lse=True)
        for config in able(rungs, problem):
            check(quantized, problem, config, device_of(device))


@pytest.mark.gpu
def test_rows_that_start_anywhere(device: torch.device, rungs: tuple[PortableConfig, ...]) -> None:
    """Strides that no copy of 16 bytes can follow change no bit."""
    quantized = quantized_normal(device, 100, 200, 72)
    problem = call_of(*quantized, out_dtype=torch.float32)

    def moved(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.full((*x.shape[:3], x.shape[3] + 5), 0x55, dtype=torch.uint8, device=x.device)
        buffer[..., 3:-2].copy_(x.view(torch.uint8))
        return buffer[..., 3:-2].view(x.dtype)

    elsewhere = dataclasses.replace(problem, q=moved(problem.q), k=moved(problem.k))
    for config in able(rungs, problem):
        assert torch.equal(cuda_run.forward(problem, device_of(device), config)[0], cuda_run.forward(elsewhere, device_of(device), config)[0])


@pytest.mark.gpu
def test_same_bits_every_time(device: torch.device, rungs: tuple[PortableConfig, ...]) -> None:
    """A bit that moves is a race."""
    quantized = quantized_normal(device, 777, 777)
    problem = call_of(*quantized, is_causal=True, out_dtype=torch.float32)
    for config in able(rungs, problem):
        expected, _ = cuda_run.forward(problem, device_of(device), config)
        different = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(30):
            different += (cuda_run.forward(problem, device_of(device), config)[0] != expected).sum()
        assert int(different) == 0, config.name
