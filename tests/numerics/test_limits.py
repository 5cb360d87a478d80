"""How large a call may be: no launch exceeds what a grid has room for, and what kernels can't count is refused in the user's words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Attention

import fp8attn
from closeness import relative
from fp8attn import Recipe, reference
from fp8attn.call import GROUPS, Call, HalfKeys, Problem
from fp8attn.cuda import build, configs, early, general_quantize, one_launch, portable, run
from fp8attn.cuda import quantize as cuda_quantize
from fp8attn.cuda.one_launch import OneLaunch
from fp8attn.device import ARCHITECTURES, Device, device_of
from fp8attn.quantization import import_values, quantize
from fp8attn.recipe import E4M3
from fp8attn.schedule import LEAST_ROWS, MOST_CHANNELS, MOST_TILES, MOST_TOKENS
from fp8attn.triton import bias, forward, half_keys, hopper, lse
from fp8attn.triton import configs as triton_configs
from fp8attn.triton import quantize as triton_quantize
from fp8attn.triton import run as triton_run

H100, L40S = ARCHITECTURES[90], ARCHITECTURES[89]

LARGEST_GRID = (2**31 - 1, 65_535, 65_535)
"""CUDA C++ Programming Guide, compute capabilities: the largest x, y and z of a grid of thread blocks."""

LAUNCHING = (triton_quantize, bias, forward, half_keys, hopper, lse)
"""Triton's modules with kernels."""

Shape = tuple[int, int, int, int]

SHAPES: dict[str, tuple[Shape, Shape]] = {
    "many batches": ((70_000, 1, 16, 32), (70_000, 1, 16, 32)),
    "many heads": ((1, 70_000, 1, 64), (1, 70_000, 300, 64)),
    "many of both": ((3_000, 3_000, 20, 128), (3_000, 1_000, 20, 128)),
    "long": ((1, 16, 1 << 24, 64), (1, 1, 1 << 24, 64)),
    "longest": ((1, 1, MOST_TOKENS - 1, 16), (1, 1, MOST_TOKENS - 1, 16)),
    "most tiles": ((1, MOST_TILES - 1, 1, 16), (1, MOST_TILES - 1, 1, 16)),
    "most tiles that TMA takes": ((1, 100_000_000, 80, 16), (1, 100_000_000, 1, 16)),
}
"""Of q and k, each at a limit or beyond 65,535 of something."""

RECIPES = {
    "default": Recipe(),
    "statistics of heads": Recipe(q="head", k="head", v="head"),
    "of tokens": Recipe(q="token", k="token", qk="int8"),
    "smoothed queries": Recipe(smooth_q=True),
}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Of such a shape, of nothing."""
    return torch.empty(shape, dtype=dtype, device="meta")


def kernels() -> set[str]:
    """Of the launching modules, by name."""
    return {name for module in LAUNCHING for name in vars(module) if name.endswith("_kernel")}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """Names of Triton kernels and grids, instead of launches."""
    found: list[tuple[str, tuple[int, ...]]] = []

    def record(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        function = getattr(kernel, "fn", kernel)
        found.append((function.__name__, grid))

    for module in LAUNCHING:
        monkeypatch.setattr(module, "launch", record)
    return found


def call_on_meta(q_shape: Shape, k_shape: Shape, recipe: Recipe, smoothed: bool = False) -> Call:
    """Of quantized tensors."""
    batch, heads, length, dim = k_shape
    numbers = torch.float32
    groups = {"tensor": 1, "head": 1, "block": -(-q_shape[2] // 128), "token": q_shape[2]}
    q_scale = meta(*q_shape[:2], groups[recipe.q], dtype=numbers)
    k_scale = meta(batch, heads, {**groups, "block": -(-length // 128), "token": length}[recipe.k], dtype=numbers)
    row_type = torch.int8 if recipe.qk == "int8" else E4M3
    return Call(
        meta(*q_shape, dtype=row_type), q_scale, GROUPS[recipe.q], meta(*k_shape, dtype=row_type), k_scale, GROUPS[recipe.k],
        meta(batch, heads, dim, -(-length // 128) * 128, dtype=E4M3), meta(batch, heads, dim, dtype=numbers), None, None,
        meta(*q_shape[:2], -(-q_shape[2] // 64), -(-length // 4) * 4, dtype=numbers) if smoothed else None,
        length, dim**-0.5, "none", recipe.compute, recipe.two_level, torch.bfloat16, True,
    )  # fmt: skip


def assert_fits(grid: tuple[int, ...], what: str) -> None:
    assert all(1 <= size <= most for size, most in zip(grid, LARGEST_GRID, strict=False)), f"{what}: grid {grid}"


def test_no_triton_kernel_has_a_larger_grid_than_there_is(launches: list) -> None:
    """Every kernel, and every shape of a user's."""
    for q_shape, k_shape in SHAPES.values():
        for recipe in RECIPES.values():
            q, k, v = meta(*q_shape), meta(*k_shape), meta(*k_shape)
            q_quantized, k_quantized, _ = triton_quantize.quantize(q, k, v, recipe, H100)
            triton_quantize.quantize(None, k, v, recipe, H100)
            triton_quantize.quantize(q, None, None, recipe, H100)
            if recipe.smooth_q:
                assert q_quantized is not None and k_quantized is not None
                bias.with_bias(q_quantized, k, k_quantized, H100)
            call = call_on_meta(q_shape, k_shape, recipe, smoothed=recipe.smooth_q)
            for config in (triton_configs.portable_config(call, H100), triton_configs.PortableConfig(16, 32, 1, 2)):
                forward.run(call, config, H100)
            if triton_configs.unsupported_arch(call) is None:
                hopper.run(call, triton_configs.hopper_config(call, H100), H100)
        triton_quantize.import_values(meta(*k_shape, dtype=E4M3), H100)
        half_keys.half_keys(HalfKeys(q, k, v, 4, 128, 1.0, 0, torch.bfloat16, True), H100)
        lse.unsmoothed_lse(meta(*q_shape[:3], dtype=torch.float32), q, meta(*k_shape[:2], k_shape[3], dtype=torch.float32), 1.0, 0, H100)
    triton_quantize.quantize(*(meta(1, 2, 100, 64) for _ in range(3)), Recipe(), H100)  # in one launch
    for name, grid in launches:
        assert_fits(grid, name)
    assert {name for name, _ in launches} == kernels()


def test_programs_find_their_heads(device: torch.device) -> None:
    """Of grids that count heads, and what there is of each, in one number: several of all of it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 256, generator=generator).to(device) for heads, n in ((4, 600), (2, 700), (2, 700)))
    expected = quantize(q, k, v, Recipe(smooth_q=True, rotate=0))
    actual = triton_quantize.quantize(q, k, v, Recipe(smooth_q=True, rotate=0), device_of(device))
    for x, y in zip(actual, expected, strict=True):
        assert x is not None and y is not None
        assert torch.equal(x.data.view(torch.uint8), y.data.view(torch.uint8))
    assert actual[0] is not None and actual[1] is not None and expected[0] is not None
    found = bias.with_bias(actual[0], k, actual[1], device_of(device)).bias
    torch.testing.assert_close(found, expected[0].bias, rtol=0, atol=1e-3)
    codes = v[..., :40].to(E4M3)
    for x, y in zip(triton_quantize.import_values(codes, device_of(device)), import_values(codes), strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_no_cuda_kernel_has_a_larger_grid_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the binding is told, which has no more than 31 bits for a number of CTAs; and in their sources kernels know of x only."""
    found: list[tuple[str, int]] = []

    def operator(name: str, *places: int) -> SimpleNamespace:
        def note(*arguments: Any) -> None:
            flat = [x for argument in arguments for x in (argument if isinstance(argument, list) else [argument])]
            found.extend((name, flat[place]) for place in places)

        return SimpleNamespace(default=note)

    places = {
        "forward": (5,),
        "quantize_and_attend": (5, 13),
        "forward_from_fp16": (1,),
        "quantize": (1,),
        "quantize_general": (1,),
        "unsmooth_lse": (1,),
    }
    operators = SimpleNamespace(**{name: operator(name, *of_ctas) for name, of_ctas in places.items()})
    launchers = type("Launchers", (), {"__getitem__": lambda *_: 0})()
    monkeypatch.setattr(build, "load_with", lambda *_: SimpleNamespace(operators=operators, launchers=launchers))

    def attend(call: Call, device: Device) -> None:
        if not isinstance(run.plan(call, device), str):
            run.forward(call, device)

    for q_shape, k_shape in SHAPES.values():
        for recipe in RECIPES.values():
            call = call_on_meta(q_shape, k_shape, recipe, smoothed=recipe.smooth_q)
            for device in (H100, L40S):
                attend(call, device)
        q, k, v = meta(*q_shape), meta(*k_shape), meta(*k_shape)
        for recipe in RECIPES.values():
            for operands in ((q, k, v), (None, k, v), (q, None, None)):
                if general_quantize.unsupported_call(*operands, recipe, H100) is None:
                    run.quantize_any(*operands, recipe, H100)
        some_lse, mean = meta(*q_shape[:3], dtype=torch.float32), meta(*k_shape[:2], k_shape[3], dtype=torch.float32)
        if general_quantize.unsupported_lse(some_lse, q, H100) is None:
            run.unsmoothed_lse(some_lse, q, mean, 1.0, 0, H100)
        if cuda_quantize.unsupported_call(k, v, Recipe(), H100) is None:
            run.quantize_kv(k, v, "e4m3", H100)
            if configs.unsupported_q_quant(q, v.shape[3], 1.0, "e4m3", H100) is None:
                early.quantize_and_attend(Problem(q, k, v, 1.0), H100)
        if isinstance(planned := one_launch.plan(q, k, v, 1.0, H100), OneLaunch):
            run.forward_from_fp16(Problem(q, k, v, 1.0), H100, planned)
    attend(call_on_meta((1, 1, 64, 64), (1, 1, 1 << 20, 64), Recipe()), L40S)  # CTAs share keys
    small = [meta(1, 4, 300, 64) for _ in range(3)]
    planned = one_launch.plan(*small, 1.0, H100)
    assert isinstance(planned, OneLaunch)
    run.forward_from_fp16(Problem(*small, 1.0), H100, planned)
    for name, ctas in found:
        assert_fits((ctas,), name)
    assert {name for name, _ in found} == places.keys()
    for path in build.source_files():
        assert not re.search(r"\b(blockIdx|gridDim)\.[yz]\b", path.read_text()), f"{path.name} counts something in y or z"


def refused() -> Iterator[tuple[str, Call]]:
    """Calls that have too much of something, and what is said of it."""
    few = (1, 1, 16, 64)

    def call(q_shape: Shape, k_shape: Shape) -> Call:
        return call_on_meta(q_shape, k_shape, Recipe())

    yield f"query has {MOST_TOKENS} tokens; kernels take fewer than {MOST_TOKENS}", call((1, 1, MOST_TOKENS, 64), few)
    yield f"key has {MOST_TOKENS} tokens", call(few, (1, 1, MOST_TOKENS, 64))
    yield f"query has {MOST_TILES} tiles of {LEAST_ROWS} tokens in 1 x {MOST_TILES} heads", call((1, MOST_TILES, 1, 64), few)
    yield f"key has {MOST_TILES} tiles", call((MOST_TILES - 1, 1, 1, 64), (MOST_TILES, 1, 1, 64))


@pytest.mark.parametrize("words, call", list(refused()), ids=lambda x: x.split(";")[0] if isinstance(x, str) else "")
def test_what_cannot_be_counted_is_refused(words: str, call: Call, launches: list) -> None:
    """By every kernel's predicate, and where none is left by an error."""
    reasons = [
        triton_configs.unsupported_arch(call),
        triton_run.unsupported_arch(call, H100),
        configs.unsupported_call(call, H100),
        portable.unsupported_call(call, L40S),
        run.plan(call, H100),
    ]
    for reason in reasons:
        assert isinstance(reason, str) and words in reason
    with pytest.raises(ValueError, match=re.escape(words)):
        triton_run.forward(call, L40S)
    assert launches == []


def test_what_tma_cannot_count_is_left_to_others(launches: list) -> None:
    heads = MOST_CHANNELS // 256
    call = call_on_meta((1, heads, 1, 256), (1, heads, 1, 256), Recipe())
    for reason in (triton_configs.unsupported_arch(call), configs.unsupported_call(call, H100)):
        assert reason == f"value has {MOST_CHANNELS} channels in 1 x {heads} heads; TMA takes fewer than {MOST_CHANNELS}"
    assert portable.unsupported_call(call, H100) is None and isinstance(run.plan(call, H100), portable.PortableConfig)
    assert isinstance(triton_run.choose(call, H100), triton_configs.PortableConfig)


@pytest.mark.parametrize("shape", ((1, 1, MOST_TOKENS, 64), (1, MOST_TILES, 1, 64)), ids=("tokens", "tiles"))
def test_quantizers_refuse_what_they_cannot_count(shape: Shape, launches: list) -> None:
    large, few = meta(*shape), meta(1, 1, 16, 64)
    for operands, name in (((large, few, few), "query"), ((few, large, large), "key")):
        with pytest.raises(ValueError, match=f"{name} has "):
            triton_quantize.quantize(*operands, Recipe(), H100)
        with pytest.raises(ValueError, match=f"{name} has "):
            half_keys.half_keys(HalfKeys(*operands, 4, 128, 1.0, 0, torch.bfloat16, True), H100)
    with pytest.raises(ValueError, match="value has "):
        triton_quantize.import_values(large.to(E4M3), H100)
    assert launches == []
    assert "query has " in str(configs.unsupported_q_quant(large, 64, 1.0, "e4m3", H100))


def assert_some_heads_are_right(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: list[int]) -> None:
    """Of (B, H, S, D) the (b · H + h)-th ones."""
    picked = [x.flatten(0, 1)[heads].unsqueeze(1) for x in (out, q, k, v)]
    exact, _ = reference.attention(*picked[1:])
    for i, head in enumerate(heads):
        error = relative(picked[0][i], exact[i])
        assert error <= 0.12, f"head {head}: {error:.3f}"
    assert out.isfinite().all()


PAIRS = 70_000
"""Batch x heads beyond what a grid has in y and z."""

SOME = [0, 1, 65_534, 65_535, 65_536, PAIRS - 1]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe",
    [
        *(pytest.param(r, id=name, marks=[] if name in ("default", "of tokens") else [pytest.mark.compiles]) for name, r in RECIPES.items()),
        pytest.param(Recipe(sinks=128, recent=128), id="half keys"),
    ],
)
def test_seventy_thousand_batches(sdpa: Attention, device: torch.device, recipe: Recipe) -> None:
    q, k, v = (torch.randn(PAIRS, 1, 16, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    assert_some_heads_are_right(sdpa(q, k, v, recipe=recipe), q, k, v, SOME)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ((PAIRS, 1), (1, PAIRS), (700, 100)), ids=("batches", "heads", "both"))
def test_seventy_thousand_heads_by_default(device: torch.device, shape: tuple[int, int]) -> None:
    """Of a head dim that CUDA's quantizer and attention of plain queries take, too."""
    q, k, v = (torch.randn(*shape, 16, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    assert_some_heads_are_right(fp8attn.sdpa(q, k, v), q, k, v, SOME)
    assert_some_heads_are_right(fp8attn.sdpa(q, k, v, is_causal=True)[:, :, -1:], q[:, :, -1:], k, v, SOME)


@pytest.mark.gpu
def test_seventy_thousand_heads_are_imported(sdpa: Attention, device: torch.device) -> None:
    q, k, v = (torch.randn(PAIRS, 1, 16, 32, device=device) for _ in range(3))
    codes = [(x * 8).to(E4M3) for x in (k, v)]
    out = sdpa(q, *fp8attn.import_kv(*codes, 0.125, 0.125))
    assert_some_heads_are_right(out, q, *(x.float() / 8 for x in codes), SOME)


@pytest.mark.gpu
@pytest.mark.usefixtures("whole_gpu")
def test_heads_beyond_2_31_elements(sdpa: Attention, device: torch.device) -> None:
    """66,000 heads of 2^15 elements each: offsets of the last ones don't fit 32 bits."""
    heads = 66_000
    q, k, v = (torch.randn(1, heads, 256, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
    assert_some_heads_are_right(sdpa(q, k, v), q, k, v, [0, 32_767, 32_768, 65_535, 65_536, heads - 1])


@pytest.mark.gpu
@pytest.mark.usefixtures("whole_gpu")
def test_masks_beyond_2_31_elements(sdpa: Attention, device: torch.device) -> None:
    """Every row is shown one key."""
    length = 47_000
    q, k, v = (torch.randn(1, 1, length, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    shown = torch.zeros(length, length, dtype=torch.bool, device=device)
    rows = torch.arange(length, device=device)
    shown[rows, length - 1 - rows] = True
    out = sdpa(q, k, v, attn_mask=shown)
    assert relative(out, v.flip(2)) <= 0.05
