"""The Hopper kernel's instances for packed sequences where there is no GPU: each sequence has the bits that it has alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import emulation
import fp8attn
from emulated import H100, Emulated
from fp8attn import Recipe, schedule
from fp8attn.call import Call
from fp8attn.cuda import configs
from fp8attn.cuda import run as cuda_run
from fp8attn.cuda.configs import VARLEN_GROUPS, HopperConfig
from fp8attn.device import device_of
from fp8attn.layout import first_unit, padded_length
from fp8attn.quantization import quantize_packed
from fp8attn.recipe import DEFAULT_RECIPE, PRECISE, SCALE_BLOCK, Packed
from fp8attn.triton import varlen
from mutants import VARLEN_FUSED_Q_MUTANTS, VARLEN_MUTANTS, WITHOUT_KEYS
from ragged import TYPICAL, Ragged, alone, same_lse, varlen_call

pytestmark = pytest.mark.anywhere

TWO_SMS = dataclasses.replace(H100, sm_count=2)
"""So that a CTA has several tiles."""

CPU = torch.device("cpu")
LENGTHS = ((70, 300), (0, 5), (3, 0), (300, 150), (1, 130), (10, 520))
NONFINITE = (200, 445, 715, 1085)
"""Keys of three of these sequences, which not all of their queries see. int8 has no NaN."""
CASES = {
    "plain": dict(is_causal=False),
    "causal": dict(is_causal=True),
    "window": dict(window=(100, 3), is_causal=False),
    "open window": dict(window=(40, -1), is_causal=False),
    "sinks": dict(is_causal=True, sinks=True),
    "softcap": dict(is_causal=True, softcap=4.0, sinks=True),
}


def case_of(config: HopperConfig, group: int = 2, **fields) -> Ragged:
    return dataclasses.replace(TYPICAL, lengths=LENGTHS, dim=config.head_dim, value_dim=config.value_dim, kv_heads=1, group=group, **fields)


def call_of_case(
    case: Ragged, out_dtype: torch.dtype = torch.float32, fuse_q_quant: bool = False, recipe: Recipe = DEFAULT_RECIPE, nonfinite: tuple[int, ...] = ()
) -> Call:
    """The call of a case, whose operands the definition has quantized; with `fuse_q_quant` all but q.

    Args:
        nonfinite: tokens of k with a NaN.
    """
    q, k, v = case.tensors(CPU)
    k[list(nonfinite), 0, 3] = torch.nan
    starts_q, starts_k, used = case.starts(CPU)
    query = fp8attn.quantize(q, recipe=recipe, cu_seqlens_q=starts_q)
    key, value = quantize_packed(*(x.transpose(0, 1)[None] for x in (k, v)), recipe, Packed(starts_k, used, k.shape[0]))
    pages = torch.ones(value.data.shape[3] // SCALE_BLOCK, dtype=torch.bool)
    for i, (begin, length) in enumerate(Packed(starts_k, used, k.shape[0]).spans()):
        first = first_unit(begin, i, SCALE_BLOCK)
        pages[first : first + padded_length(length) // SCALE_BLOCK] = False
    # a quantizer writes nothing to pages without tokens: what was there may be NaN
    value.data.view(torch.uint8)[..., pages.repeat_interleave(SCALE_BLOCK)] = 0x7F
    key.scale[..., pages] = torch.nan
    call = varlen_call((query, key, value), q, {**case.options(CPU), "recipe": recipe})
    if fuse_q_quant:
        assert key.mean is not None
        key.mean[[length == 0 for _, length in Packed(starts_k, used, k.shape[0]).spans()]] = torch.nan
        call = dataclasses.replace(call, q=q.transpose(0, 1)[None], q_scale=None, mean_scores=None, lse_mean=key.mean)
    return dataclasses.replace(call, out_dtype=out_dtype)


def forward(emulated: Emulated, call: Call, config: HopperConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """By an emulated instance. What it doesn't write is 7."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_run, "library_of", lambda config, _: emulated.library(config))
        for name in ("empty_output", "empty_lse"):
            original = getattr(cuda_run, name)
            patch.setattr(cuda_run, name, lambda *args, original=original: original(*args).fill_(7.0))
        table = None if call.varlen is None else varlen.table_of(call, configs.ROWS, device_of(CPU), config.consumers)
        return cuda_run.forward(call, TWO_SMS, config, 1, table)


def nan_as_nine(x: torch.Tensor) -> torch.Tensor:
    """x, in which NaN equals NaN."""
    return x.nan_to_num(9.0, torch.inf, -torch.inf)


def assert_as_alone(
    packed: Emulated, dense: Emulated, config: HopperConfig, case: Ragged, out_dtype: torch.dtype = torch.float32, nonfinite: tuple[int, ...] = ()
) -> None:
    call = call_of_case(case, out_dtype, config.fuse_q_quant, PRECISE if config.int8 else DEFAULT_RECIPE, nonfinite)
    out, lse = forward(packed, call, config)
    written = torch.zeros(out.shape[2], dtype=torch.bool)
    nan_rows = 0
    for rows, one in alone(call):
        expected, expected_lse = forward(dense, one, dataclasses.replace(config, varlen=False))
        nan_rows += int(expected_lse.isnan().sum())
        found, expected, found_lse, expected_lse = (nan_as_nine(x) for x in (out[:, :, rows], expected, lse[:, :, rows], expected_lse))
        assert torch.equal(found, expected), f"{int((found != expected).sum())} of {expected.numel()} outputs in {rows}"
        assert same_lse(found_lse, expected_lse, one), f"LSE in {rows}"
        written[rows] = True
    assert (out[:, :, ~written] == 7).all() and (lse[:, :, ~written] == 7).all(), "rows of no sequence were written"
    assert bool(nan_rows) == bool(nonfinite)


def instances_for(name: str, fuse_q_quant: bool = False, int8: bool = False) -> tuple[HopperConfig, ...]:
    return VARLEN_GROUPS["softcap" if name == "softcap" else "window" if name in ("window", "open window") else "plain", int8, fuse_q_quant]


@pytest.fixture(scope="module")
def emulated() -> Emulated:
    return Emulated()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("name", CASES)
def test_a_sequence_has_the_output_that_it_has_alone(emulated: Emulated, name: str, dim: int) -> None:
    config = next(c for c in instances_for(name) if c.head_dim == dim)
    case = case_of(config, **CASES[name])
    assert_as_alone(emulated, emulated, config, case)
    if name == "causal":
        assert_as_alone(emulated, emulated, config, dataclasses.replace(case, unused=3, dim=dim - 8, value_dim=dim - 16), torch.bfloat16)
        assert_as_alone(emulated, emulated, config, dataclasses.replace(case, kv_heads=2, lengths=((20, 20),) * 9), torch.float16)
    if name in ("causal", "window"):
        assert_as_alone(emulated, emulated, config, case_of(config, 1 if dim == 64 else 5, **CASES[name]))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "config"), [pytest.param(name, config, id=f"{name}-{config.head_dim}") for name in CASES for config in instances_for(name, int8=True)]
)
def test_a_sequence_has_the_output_that_it_has_alone_in_int8(emulated: Emulated, name: str, config: HopperConfig) -> None:
    assert_as_alone(emulated, emulated, config, case_of(config, **CASES[name]))
    assert_as_alone(emulated, emulated, config, case_of(config, **CASES[name]), nonfinite=NONFINITE)
    if name == "causal":
        assert_as_alone(emulated, emulated, config, dataclasses.replace(case_of(config, 5, **CASES[name]), unused=3), torch.bfloat16)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("recipe", (DEFAULT_RECIPE, PRECISE), ids=("e4m3", "int8"))
def test_queries_that_the_kernel_quantizes(emulated: Emulated, recipe: Recipe, name: str, dim: int) -> None:
    """The bits of the sequence alone, and those of queries that were quantized before, but for what K's mean adds."""
    config = next(c for c in instances_for(name, True, recipe == PRECISE) if c.head_dim == dim)
    case = case_of(config, **CASES[name], dtype=torch.bfloat16)
    assert_as_alone(emulated, emulated, config, case)
    out, lse = forward(emulated, call_of_case(case, fuse_q_quant=True, recipe=recipe), config)
    call = call_of_case(case, recipe=recipe)
    expected, expected_lse = forward(emulated, call, dataclasses.replace(config, fuse_q_quant=False))
    if call.mean_scores is None:
        assert torch.equal(out, expected)
    else:
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


def assert_no_mean_without_keys(emulated: Emulated, dim: int) -> None:
    """Rows of a sequence without keys, behind tiles of queries that aren't finite."""
    config = next(c for c in instances_for("plain", True) if c.head_dim == dim)
    call = call_of_case(case_of(config, is_causal=False, dtype=torch.bfloat16), fuse_q_quant=True)
    q, rows = torch.full_like(call.q, torch.nan), slice(70, 73)
    q[:, :, rows.start + 1 : rows.stop] = 1.0
    out, lse = forward(emulated, dataclasses.replace(call, q=q), config)
    assert not out[:, :, rows].any() and (lse[:, :, rows] == -torch.inf).all()
    assert lse[:, :, : rows.start].isnan().all()


@pytest.mark.parametrize("dim", (64, 256))
def test_no_mean_without_keys(emulated: Emulated, dim: int) -> None:
    assert_no_mean_without_keys(emulated, dim)


BEFORE = ("hopper_mainloop.h", "p.lse_mean != nullptr && has_keys(tile) ? float2", "p.lse_mean != nullptr ? float2")
"""A mutant that adds what K's mean adds in the tile before."""


@pytest.mark.thorough
def test_a_mean_of_the_tile_before_is_seen() -> None:
    with pytest.raises(AssertionError, match="lse"):
        assert_no_mean_without_keys(Emulated(BEFORE), 256)


def assert_all_as_alone(packed: Emulated, dense: Emulated) -> None:
    """Of 128 channels, whose output takes several boxes: causal and not, and groups of heads that come one after the
    other. As many heads as consumers share keys, more, and fewer."""
    config = next(c for c in VARLEN_GROUPS["plain", False, False] if c.head_dim == 128)
    for is_causal, group in ((False, 3), (True, 4)):
        assert_as_alone(packed, dense, config, case_of(config, group, is_causal=is_causal))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "L2_BYTES", 0)
        assert_as_alone(packed, dense, config, dataclasses.replace(case_of(config), kv_heads=2, lengths=LENGTHS[:4]))


def test_groups_of_heads(emulated: Emulated) -> None:
    assert_all_as_alone(emulated, emulated)


def test_mutants_change_what_is_there() -> None:
    emulation.assert_anchored((*VARLEN_MUTANTS.values(), *VARLEN_FUSED_Q_MUTANTS.values(), WITHOUT_KEYS, BEFORE))


@pytest.mark.parametrize("name", VARLEN_MUTANTS)
@pytest.mark.one_in(6)
def test_mutants_are_seen(emulated: Emulated, name: str) -> None:
    broken = Emulated(VARLEN_MUTANTS[name])
    with pytest.raises(AssertionError):
        assert_all_as_alone(broken, emulated)


@pytest.mark.thorough
@pytest.mark.parametrize("name", VARLEN_FUSED_Q_MUTANTS)
def test_mutants_that_quantize_queries_are_seen(emulated: Emulated, name: str) -> None:
    config = next(c for c in instances_for("sinks", True) if c.head_dim == 64)
    with pytest.raises(AssertionError):
        assert_as_alone(Emulated(VARLEN_FUSED_Q_MUTANTS[name]), emulated, config, case_of(config, **CASES["sinks"], dtype=torch.bfloat16))


def test_values_of_no_sequence_are_not_read(emulated: Emulated) -> None:
    config = next(c for c in instances_for("sinks") if c.head_dim == 64)
    with pytest.raises(AssertionError):
        assert_as_alone(Emulated(WITHOUT_KEYS), emulated, config, case_of(config, **CASES["sinks"]))


def test_which_calls_they_take() -> None:
    """Those with one scale per 128 keys and a positive scale, of any head dim; others say what they take."""
    config = VARLEN_GROUPS["plain", False, False][0]
    for fields, wanted in ((dict(is_causal=True), "plain"), (dict(window=(5, 0)), "window"), (dict(softcap=3.0), "softcap")):
        call = call_of_case(dataclasses.replace(case_of(config), dim=72, value_dim=40, **fields))
        assert configs.unsupported_call(call, H100) is None and configs.choose(call, H100).scores == wanted
        assert configs.choose(call, H100).varlen and configs.choose(call, H100).head_dim == (128 if "softcap" in fields else 96)
        assert not configs.choose(call, H100).does(dataclasses.replace(call, varlen=None))
    call = call_of_case(case_of(config))
    for changed in (dataclasses.replace(call, k_group=1), dataclasses.replace(call, softmax_scale=-1.0)):
        reason = configs.unsupported_call(changed, H100)
        assert reason is not None and "packed sequences are given" in reason and cuda_run.plan(changed, H100) == reason
