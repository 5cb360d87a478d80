"""What the Hopper kernel knows of a mask before it runs, which blocks of keys it shows to which queries, and its bits; and attention with it.
And that finite numbers of a mask are scores, however low they are."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator

import pytest
import torch
from conftest import Attention
from hypothesis import given
from hypothesis import strategies as st

import emulation
import fp8attn
from closeness import E4M3_STEP, assert_matches_pipeline, relative
from emulated import ROW_KINDS, low_mask, lse_of_scores, normal, quantized
from fp8attn import Recipe, reference
from fp8attn.cuda import configs, run
from fp8attn.cuda.configs import KEYS, HopperConfig
from fp8attn.cuda.oracle import oracle
from fp8attn.device import device_of
from fp8attn.prepare import call_of
from fp8attn.quantization import quantize
from fp8attn.recipe import ProductType
from fp8attn.triton import run as triton_run
from fp8attn.triton.configs import PortableConfig
from instances import QUANTIZED

NOTHING, ANY_VISIBLE, ANY_HIDDEN, ANY_ADDED = 0, 1, 2, 4


@pytest.fixture(scope="module")
def reader() -> ctypes.CDLL:
    """The kernel that reads masks, compiled for the CPU."""
    return emulation.library("block_mask.cpp")


def documents(q_length: int, kv_length: int, seed: int) -> torch.Tensor:
    """bool (Sq, Sk): queries see the keys of their own document."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.rand(5, generator=generator).sort().values
    rows, keys = (torch.bucketize((torch.arange(n) + 0.5) / n, ends) for n in (q_length, kv_length))
    return rows[:, None] == keys


def drawn_mask(kind: str, batch: int, heads: int, q_length: int, kv_length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Of a kind, bool or added, broadcastable to (B, Hq, Sq, Sk)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, q_length, kv_length)
    shown = {
        "random": lambda: torch.rand(shape, generator=generator) < 0.7,
        "documents": lambda: documents(q_length, kv_length, seed),
        "keys": lambda: torch.rand((batch, 1, 1, kv_length), generator=generator) < 0.5,
        "rows": lambda: torch.rand((1, heads, q_length, 1), generator=generator) < 0.5,
        "padding": lambda: (torch.arange(kv_length) < kv_length - 130).expand(batch, 1, 1, kv_length),
        "nothing": lambda: torch.zeros(shape, dtype=torch.bool),
        "numbers": lambda: documents(q_length, kv_length, seed).expand(heads, q_length, kv_length),
        "numbers everywhere": lambda: torch.ones(heads, q_length, kv_length, dtype=torch.bool),
    }[kind]()
    if "numbers" in kind:
        added = torch.randn(shown.shape, generator=generator)
        added *= torch.rand(shown.shape, generator=generator) < (1 if "everywhere" in kind else 1e-4)
        return added.masked_fill(~shown, -torch.inf).to(torch.bfloat16 if dtype == torch.bool else dtype)
    if dtype == torch.bool:
        return shown
    # the lowest number hides nothing: beside others it only weighs nothing
    return torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, -torch.inf if seed % 2 else torch.finfo(dtype).min)


KINDS = ("random", "documents", "keys", "rows", "padding", "nothing", "numbers", "numbers everywhere")
DTYPES = (torch.bool, torch.bfloat16, torch.float16, torch.float32)


def defined(mask: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a mask (batches, heads, rows, Sk), in groups of so many rows: what it shows (batches, heads, groups, blocks), bits (…, group, 4), int64."""
    batches, heads, rows, kv_length = mask.shape
    blocks = -(-kv_length // KEYS)
    groups = -(-rows // group)
    added = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask.float()
    tiles = torch.full((batches, heads, groups * group, blocks * KEYS), torch.nan)  # of what doesn't exist
    tiles[:, :, :rows, :kv_length] = added
    tiles = tiles.unflatten(3, (blocks, KEYS)).unflatten(2, (groups, group)).transpose(3, 4)
    exists = torch.zeros(groups * group, blocks * KEYS, dtype=torch.bool)
    exists[:rows, :kv_length] = True
    exists = exists.unflatten(1, (blocks, KEYS)).unflatten(0, (groups, group)).transpose(1, 2)
    visible = exists & (tiles != -torch.inf)
    hidden, adds = (exists & (tiles == -torch.inf)).flatten(4).any(-1), (visible & (tiles != 0)).flatten(4).any(-1)
    shows = visible.flatten(4).any(-1)
    shown = torch.where(shows, ANY_VISIBLE + ANY_HIDDEN * hidden + ANY_ADDED * adds, NOTHING)
    # bit 2j + i of word c is of key 8j + 2c + i
    words = (visible.unflatten(-1, (16, 4, 2)).transpose(-3, -2).flatten(-2).long() << torch.arange(32)).sum(-1)
    return shown, words


def read(reader: ctypes.CDLL, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the kernel, of a mask (B, Hq, Sq, Sk) in which a stride may be 0."""
    p = emulation.Params()
    p.mask, p.mask_strides = mask.data_ptr(), (ctypes.c_int64 * 4)(*mask.stride())
    p.batches, p.q_heads, p.q_length, p.kv_length = mask.shape
    p.mask_type = 0 if mask.dtype == torch.bool else 1 + emulation.TYPES[mask.dtype]
    p.mask_batches, p.mask_heads, p.mask_groups, p.mask_rows = planes = emulation.mask_planes(mask)
    blocks = -(-mask.shape[3] // KEYS)
    bits = torch.full((*planes[:3], blocks, planes[3], 4), 0x55, dtype=torch.int32)
    shown = torch.full((*planes[:3], blocks), 0x55, dtype=torch.uint8)
    p.mask_bits, p.block_mask = bits.data_ptr(), shown.data_ptr()
    assert reader.build_block_mask(ctypes.byref(p), ctypes.sizeof(p), ctypes.c_int64(shown.numel())) & 0xFF
    return shown.long(), bits.long() & 0xFFFFFFFF


def assert_as_defined(reader: ctypes.CDLL, mask: torch.Tensor) -> None:
    """`mask`: (B, Hq, Sq, Sk)."""
    shown, bits = read(reader, mask)
    once = mask[tuple(slice(1) if stride == 0 else slice(None) for stride in mask.stride()[:3])]
    expected_shown, expected_bits = defined(once, bits.shape[-2])
    assert torch.equal(shown, expected_shown), "what is shown differs"
    assert torch.equal(bits, expected_bits), "bits differ"


def laid_out(mask: torch.Tensor, layout: str) -> torch.Tensor:
    """The same mask with other strides."""
    if layout == "columns":
        return mask.transpose(-2, -1).contiguous().transpose(-2, -1)
    if layout == "cut":
        wider = torch.nn.functional.pad(mask.to(torch.uint8) if mask.dtype == torch.bool else mask, (3, 2))
        return (wider.bool() if mask.dtype == torch.bool else wider)[..., 3:-2]
    return mask.contiguous()


@pytest.mark.anywhere
@given(
    kind=st.sampled_from(KINDS), dtype=st.sampled_from(DTYPES), layout=st.sampled_from(("contiguous", "columns", "cut")),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 200), st.integers(1, 600)), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_mask_is_read_as_defined(
    reader: ctypes.CDLL, kind: str, dtype: torch.dtype, layout: str, shape: tuple[int, int, int, int], seed: int
) -> None:
    assert_as_defined(reader, laid_out(drawn_mask(kind, *shape, dtype, seed), layout).expand(shape))


def assert_masks_of_all_kinds(reader: ctypes.CDLL) -> None:
    for kind in KINDS:
        for layout, kv_length in (("contiguous", 300), ("cut", 300), ("cut", 256)):
            mask = laid_out(drawn_mask(kind, 2, 2, 150, kv_length, torch.bfloat16, 1), layout)
            assert_as_defined(reader, mask.expand(2, 2, 150, kv_length))


@pytest.mark.anywhere
def test_masks_of_all_kinds(reader: ctypes.CDLL) -> None:
    assert_masks_of_all_kinds(reader)


MUTANTS = {
    "odd lanes": ("lane % 2 == 0 ? visible_lanes[0] : visible_lanes[2]", "visible_lanes[0]"),
    "halves of eight keys": ("visible_lanes[2]) >> lane / 2, high", "visible_lanes[2]), high"),
    "rows that don't exist": ("const bool exists = first + i < rows &&", "const bool exists ="),
    "keys that don't exist": ("(!CAREFUL || n < exist), visible", "true, visible"),
    "numbers": ("adds |= exists && visible && value != 0.0f", "adds |= false"),
    "hidden ones": ("hides |= exists && !visible", "hides |= false"),
    "groups": ("int64_t(group) * ROWS * p.mask_strides[2]", "int64_t(group) * p.mask_strides[2]"),
    "aligned or not": ("reinterpret_cast<uintptr_t>(mask) % sizeof(Four<T>) == 0;", "true;"),
    "heads": ("plane % p.mask_heads * p.mask_strides[1]", "plane / p.mask_heads * p.mask_strides[1]"),
}


def test_mutants_change_what_is_there() -> None:
    emulation.assert_anchored(("block_mask.cuh", *mutation) for mutation in MUTANTS.values())


@pytest.mark.anywhere
@pytest.mark.thorough
@emulation.emulates
@pytest.mark.parametrize("name", MUTANTS)
def test_the_emulation_sees_what_is_wrong(name: str) -> None:
    mutations = [MUTANTS[name]]
    if name == "aligned or not":  # g++ may copy four numbers from anywhere: as a GPU, which may not
        mutations.append(("*reinterpret_cast<const Four<T>*>(at);", "*reinterpret_cast<const Four<T>*>(uintptr_t(at) & -sizeof(Four<T>));"))
    mutant = emulation.library("block_mask.cpp", *(("block_mask.cuh", *mutation) for mutation in mutations))
    with pytest.raises(AssertionError, match="differ"):
        assert_masks_of_all_kinds(mutant)


def masks_of(config: HopperConfig, kinds: tuple[str, ...], heads: int, q_length: int, kv_length: int) -> Iterator[torch.Tensor]:
    """Those that an instance is made for, broadcastable to (B, Hq, Sq, Sk): of each kind; of numbers every type, and rows from any byte on."""
    for number, kind in enumerate(kinds):
        adds = "numbers" in kind
        if adds and not config.added:
            continue
        dtypes = DTYPES[1:] if adds else (DTYPES[1 + number % 3],) if config.added else (torch.bool,)
        for dtype in dtypes:
            mask = drawn_mask(kind, 1, heads if kind == "random" or adds else 1, q_length, kv_length, dtype, number)
            yield mask
            if adds:
                yield torch.nn.functional.pad(mask, (0, -kv_length % 8))[..., :kv_length]


@pytest.mark.gpu
@pytest.mark.parametrize("q_length, kv_length, kinds", ((500, 701, KINDS), (130, 4501, ("documents", "numbers"))), ids=("short", "long"))
@pytest.mark.parametrize("config", [c for c in QUANTIZED if c.skips_blocks], ids=lambda c: c.name)
def test_attention_with_masks(config: HopperConfig, q_length: int, kv_length: int, kinds: tuple[str, ...], device: torch.device) -> None:
    """Short: over several tiles of a CTA; long: of more blocks of keys than a warp looks at together. Which of them are left out is told through
    shared memory: a bit that moves is a race."""
    reason = configs.unsupported_config(config, device_of(device))
    if reason is not None:
        pytest.skip(reason)
    generator = torch.Generator(device).manual_seed(9)
    heads = 1 + device_of(device).sm_count // 4
    q, k, v = (
        torch.randn(2, heads, n, dim, device=device, generator=generator)
        for n, dim in ((q_length, config.head_dim), (kv_length, config.head_dim), (kv_length, config.value_dim))
    )
    q += torch.linspace(-1, 1, q_length, device=device)[:, None]
    qk: ProductType = "int8" if config.int8 else "e4m3"
    recipes = [Recipe(qk=qk)] + [Recipe(qk=qk, k="token", smooth_q=True)] * config.general
    operands = [quantize(q, k, v, recipe) for recipe in recipes]
    for number, mask in enumerate(masks_of(config, kinds, heads, q_length, kv_length)):
        given = operands[number % len(operands)]
        call = call_of(*given, attn_mask=mask.to(device), return_lse=True, out_dtype=torch.float32)
        out, lse = run.forward(call, device_of(device), config)
        expected, expected_lse = oracle(given, call, config)
        assert out.isfinite().all()
        assert_matches_pipeline(out, expected, False, lse_of_scores(expected_lse))
        torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=E4M3_STEP)
        different = sum((run.forward(call, device_of(device), config)[0] != out).sum() for _ in range(20))
        assert int(different) == 0


LOWEST_LSE = reference.LOWEST_SCORE / reference.LOG2E
"""Of a row that sees the lowest numbers only. Where the mask isn't multiplied by log2 e the LSE is lower."""

low_masks = functools.partial(
    st.builds,
    low_mask,
    kinds=st.lists(st.sampled_from(ROW_KINDS), min_size=1, max_size=7),
    dtype=st.sampled_from(DTYPES[1:]),
    seed=st.integers(0, 99),
)


def low_problem(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of two heads for a mask (Sq, Sk)."""
    return normal((1, 2, mask.shape[0], 64), (1, 2, mask.shape[1], 64))


@given(mask=low_masks(rows=st.integers(1, 30), keys=st.integers(1, 200)))
def test_low_numbers_are_the_scores_that_pytorch_makes_of_them(mask: torch.Tensor) -> None:
    q, k, v = low_problem(mask)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask.float())
    out, lse = reference.attention(q, k, v, mask)
    sees = (mask > -torch.inf).any(-1)
    torch.testing.assert_close(out[:, :, sees], expected[:, :, sees], rtol=0, atol=2e-5)
    assert (out[:, :, ~sees] == 0).all()
    assert torch.equal(lse.isfinite(), sees.expand(1, 2, -1))


@given(mask=low_masks(rows=st.integers(1, 30), keys=st.integers(1, 200)), block_n=st.sampled_from((32, 64, 128)))
def test_the_pipeline_takes_low_numbers_for_scores(mask: torch.Tensor, block_n: int) -> None:
    """All rows together are as close to the exact ones as FP8 allows, and each, as many keys as it sees; its LSE no less than the lowest score.

    FP8's own error of a row has a long tail: 0.034 on average, over 0.15 in 5 of 10,901 drawn rows, 0.21 at most; 0.12 of all rows of a mask at most.
    Without its mask, a row of numbers is off by 0.7 on average (0.21 at least), and all rows of a mask by 0.59 at least.
    """
    q, k, v = low_problem(mask)
    out, lse = reference.pipeline(*quantized(q, k, v, Recipe(smooth_k=False)), mask, arithmetic=reference.Arithmetic(block_n))
    expected, expected_lse = reference.attention(q, k, v, mask)
    assert relative(out, expected) <= 0.15
    for row in range(mask.shape[0]):
        assert relative(out[:, :, row], expected[:, :, row]) <= 0.25
    torch.testing.assert_close(lse, torch.where(expected_lse.isfinite(), expected_lse.clamp(min=LOWEST_LSE), expected_lse), rtol=1e-6, atol=0.3)


@pytest.mark.compiles
@given(
    mask=low_masks(rows=st.just(20), keys=st.sampled_from((1, 64, 150))),
    compute=st.sampled_from(("e4m3", "f16")),
    qk=st.sampled_from(("e4m3", "int8")),
)
def test_triton_takes_low_numbers_for_scores(mask: torch.Tensor, compute: str, qk: ProductType, device: torch.device) -> None:
    recipe = Recipe(compute=compute, qk=qk)
    operands = quantized(*(x.to(device) for x in low_problem(mask)), recipe)
    call = call_of(*operands, recipe=recipe, attn_mask=mask.to(device), return_lse=True, out_dtype=torch.float32)
    out, lse = triton_run.forward(call, device_of(device), PortableConfig(32, 32, 2, 1))
    expected, expected_lse = reference.pipeline(*operands, call.attn_mask, arithmetic=reference.Arithmetic(32, compute))
    emulated = device_of(device).emulated
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6 if emulated else 1e-3, atol=1e-4 if emulated else E4M3_STEP)
    if emulated or mask.dtype != torch.float16:
        assert_matches_pipeline(out, expected, emulated, lse_of_scores(expected_lse))
    else:  # next to float16's low numbers scores are rounded, but differ
        assert relative(out, expected) <= 0.03


@pytest.mark.parametrize("number", (-1e6, -3e7, -9.3e7, -1e8, -1.8e8, -1e9, -1e12, -1e30))
def test_triton_next_to_any_low_number(number: float, device: torch.device) -> None:
    """Scores are rounded next to a number that P's offset of 8 may be rounded off from, or up to 16. P's sums are those of the P that V is multiplied
    with: rows of ones stay ones."""
    mask = number * torch.linspace(1, 1.02, 20, device=device)[:, None].repeat(1, 150)
    q, k, v = (x.to(device) for x in low_problem(mask))
    v[..., 0] = 1
    operands = quantized(q, k, v, Recipe(smooth_v=False))
    call = call_of(*operands, attn_mask=mask, return_lse=True, out_dtype=torch.float32)
    out, _ = triton_run.forward(call, device_of(device), PortableConfig(32, 32, 2, 1))
    torch.testing.assert_close(out[..., 0], torch.ones_like(out[..., 0]), rtol=0, atol=0.05)
    if device_of(device).emulated or number <= -1e9:  # a tensor core's sum in another order may go to the next multiple of what a score is rounded to
        expected, _ = reference.pipeline(*operands, call.attn_mask, arithmetic=reference.Arithmetic(32))
        # where scores are multiples of 16, those one step below the largest weigh 2^-16, too little for P of 1
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-6 + 150 * 2.0**-16 * (9e7 < -number < 2e8))


@pytest.mark.gpu
def test_every_backend_takes_low_numbers_for_scores(sdpa: Attention, device: torch.device) -> None:
    """Real kernels: of several head dims and dtypes, from plain tensors and quantized ones, masks that boxes can be had of and others."""
    shapes = ((64, 200, 1000), (128, 100, 704), (256, 20, 300), (80, 70, 333))
    for (dim, q_length, kv_length), dtype in zip(shapes, 2 * (torch.bfloat16, torch.float16), strict=True):
        generator = torch.Generator(device).manual_seed(dim)
        q, k, v = (torch.randn(2, 3, n, dim, device=device, dtype=dtype, generator=generator) for n in (q_length, kv_length, kv_length))
        v += 1
        for mask_dtype in (dtype, torch.float32):
            mask = low_mask(ROW_KINDS, q_length, kv_length, mask_dtype, 1).to(device)
            exact, _ = reference.attention(q, k, v, mask)
            for operands in ((q, k, v), fp8attn.quantize(q, k, v)):
                out = sdpa(*operands, attn_mask=mask, out_dtype=torch.float32)
                for row, kind in enumerate(ROW_KINDS):
                    error = relative(out[:, :, row :: len(ROW_KINDS)], exact[:, :, row :: len(ROW_KINDS)])
                    assert error <= 0.08, f"{kind}: {error:.3f}"
