"""Kernels broken on purpose: the parity test must see each of them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from conftest import GPU

import fp8attn
from closeness import assert_matches_pipeline
from emulated import ROW_KINDS, low_mask, normal
from fp8attn import reference
from fp8attn.device import device_of
from fp8attn.prepare import call_of
from fp8attn.quantization import TOKEN_CHUNK, quantize, quantize_kv
from fp8attn.triton import bias, configs, feedback, forward, quantize_steps, tile
from fp8attn.triton import quantize as triton_quantize

pytestmark = pytest.mark.skipif(GPU, reason="compiled kernels keep the functions they were compiled with")

BLOCKS = reference.Arithmetic(32)
"""Those of the kernels, which are in e4m3."""

original_softmax, original_bias_row, original_feed_back = tile.softmax_step, tile.bias_row, feedback.feed_back
original_hide, original_whole_blocks = tile.hide, tile.whole_blocks
original_cap, original_sink = tile.cap_scores, tile.add_sink


@triton.jit
def mask_off_by_one(
    x, rows, start, columns, q_length, kv_length, offsets, mask, mask_strides, WINDOW: tl.constexpr, BY_ARITHMETIC: tl.constexpr
):  # fmt: skip
    limit = tl.minimum(rows + offsets[1] + 1, kv_length - 1) - start
    return tl.where(columns > limit, -float("inf"), x)


@triton.jit
def forgets_the_end(
    x, rows, start, columns, q_length, kv_length, offsets, mask, mask_strides, WINDOW: tl.constexpr, BY_ARITHMETIC: tl.constexpr
):  # fmt: skip
    return tl.where(columns > rows + offsets[1] - start, -float("inf"), x)


@triton.jit
def forgets_the_first_key(
    x, rows, start, columns, q_length, kv_length, offsets, mask, mask_strides, WINDOW: tl.constexpr, BY_ARITHMETIC: tl.constexpr
):  # fmt: skip
    return original_hide(x, rows, start, columns, q_length, kv_length, offsets, mask, mask_strides, False, BY_ARITHMETIC)


@triton.jit
def first_keys_whole(first, last, offsets, kv_length, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    return original_whole_blocks(first, first, offsets, kv_length, N, CAUSAL, WINDOW)


@triton.jit
def first_blocks_left_out(first, last, offsets, kv_length, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    begin, whole, end_whole, end = original_whole_blocks(first, last, offsets, kv_length, N, CAUSAL, WINDOW)
    return whole, whole, end_whole, end


@triton.jit
def caps_nothing(x, shift, softcap):
    return x


@triton.jit
def caps_without_the_mean(x, shift, softcap):
    return original_cap(x, shift * 0, softcap)


@triton.jit
def sink_without_weight(m, l, sink):
    return m, l, l, l * 0 + 1


@triton.jit
def sink_beside_stale_sums(m, l, sink):
    m_new, kept, total, alpha = original_sink(m, l, sink)
    return m_new, kept, total, alpha * 0 + 1


@triton.jit
def lets_the_lowest_overflow(
    x, rows, start, columns, q_length, kv_length, offsets, mask, mask_strides, WINDOW: tl.constexpr, BY_ARITHMETIC: tl.constexpr
):  # fmt: skip
    limit = tl.minimum(rows + offsets[1], kv_length - 1) - start
    if mask is not None:
        pointers = mask + rows * mask_strides[2] + (start + columns) * mask_strides[3]
        x += tl.load(pointers, mask=(rows < q_length) & (start + columns < kv_length), other=0).to(tl.float32) * tile.LOG2E
    return tl.where(columns > limit, -float("inf"), x)


@triton.jit
def always_offset(m, FOLDED: tl.constexpr):
    return m - tile.P_OFFSET


@triton.jit
def never_rescales(x, factor, m, FOLDED: tl.constexpr):
    p, m_new, alpha, lanes = original_softmax(x, factor, m, FOLDED)
    return p, m_new, alpha * 0 + 1, lanes


@triton.jit
def keeps_the_old_maximum(x, factor, m, FOLDED: tl.constexpr):
    p, m_new, alpha, lanes = original_softmax(x, factor, m, FOLDED)
    return p, tl.where(m == tile.NOTHING, m_new, m), alpha, lanes


@triton.jit
def never_falls(x, factor, m, FOLDED: tl.constexpr):
    p, m_new, alpha, lanes = original_softmax(x, factor, m, FOLDED)
    kept = tl.maximum(m, m_new)
    fall = tl.exp2(m_new - kept)[:, None]
    return p * fall, kept, tl.exp2(m - kept), lanes * fall


@triton.jit
def falls_for_ever(x, factor, m, FOLDED: tl.constexpr):
    p, m_new, alpha, lanes = original_softmax(x, factor, m * 0 + tile.NOTHING, FOLDED)
    return p, m_new, tl.exp2(m - m_new), lanes


@triton.jit
def wrong_scale(row_factor, key_scale, POSITIVE: tl.constexpr):
    return row_factor


@triton.jit
def unpermuted(p):
    return p


@triton.jit
def truncates(p, HALF: tl.constexpr, NATIVE: tl.constexpr):
    bits = p.to(tl.uint32, bitcast=True) & 0xFFF00000
    return bits.to(tl.float32, bitcast=True).to(tl.float16)


@triton.jit
def forgets_the_mean_of_queries(x, bias, factor, keys, kv_length):
    return x


@triton.jit
def mean_of_the_first_queries(bias, index, row, q_length, kv_length):
    return original_bias_row(bias, index, 0, q_length, kv_length)


@triton.jit
def owes_nothing(x, residual, gain, NATIVE: tl.constexpr):
    code, _ = original_feed_back(x, residual, gain, NATIVE)
    return code, residual


@triton.jit
def owes_the_last_token_only(x, residual, gain, NATIVE: tl.constexpr):
    code, left = original_feed_back(x, residual, gain, NATIVE)
    return code, (left.to(tl.float32) - residual.to(tl.float32)).to(tl.float16)


@triton.jit
def pays_the_wrong_way(x, residual, gain, NATIVE: tl.constexpr):
    code, left = original_feed_back(x, -residual, gain, NATIVE)
    return code, left + residual + residual


@triton.jit
def no_signs(channel):
    return channel * 0


@triton.jit
def no_vector(vector, stride, behind, DIM: tl.constexpr, WIDTH: tl.constexpr):
    return tl.zeros([WIDTH], tl.float32)


@triton.jit
def all_finite(x):
    return (x == x) | True


MUTANTS = {
    "mask off by one": ("hide", mask_off_by_one),
    "end of keys forgotten": ("hide", forgets_the_end),
    "first key forgotten": ("hide", forgets_the_first_key),
    "first keys seen by all rows": ("whole_blocks", first_keys_whole),
    "first blocks left out": ("whole_blocks", first_blocks_left_out),
    "scores not capped": ("cap_scores", caps_nothing),
    "capped without K's mean": ("cap_scores", caps_without_the_mean),
    "a sink without weight": ("add_sink", sink_without_weight),
    "keys' sums not rescaled beside a sink": ("add_sink", sink_beside_stale_sums),
    "missing rescale": ("softmax_step", never_rescales),
    "stale maximum": ("softmax_step", keeps_the_old_maximum),
    "m never falls": ("softmax_step", never_falls),
    "m falls for ever": ("softmax_step", falls_for_ever),
    "wrong scale": ("score_factor", wrong_scale),
    "unpermuted V": ("permute_keys", unpermuted),
    "P truncated, not rounded": ("probabilities", truncates),
    "mean of queries forgotten": ("add_bias", forgets_the_mean_of_queries),
    "mean of other queries": ("bias_row", mean_of_the_first_queries),
}


def check() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=generator) for n in (70, 150, 150))
    # later keys score higher, so that the maximum moves; scales of blocks differ
    k = k * torch.linspace(0.2, 3, 150)[:, None]
    q[:, :, 40:] += 1  # groups of queries have different means
    for is_causal, smooth_q in ((False, False), (True, False), (False, True)):
        quantized = fp8attn.quantize(q, k, v, recipe=fp8attn.Recipe(smooth_q=smooth_q))
        call = call_of(*quantized, is_causal=is_causal, causal_alignment="bottom_right", out_dtype=torch.float32)
        out, _ = forward.run(call, configs.PortableConfig(32, 32, 1, 1), device_of(q.device))
        oracle, _ = reference.pipeline(*quantized, arithmetic=BLOCKS, causal="bottom_right" if is_causal else "none")
        assert_matches_pipeline(out, oracle, emulated=True)
    quantized = fp8attn.quantize(q, k, v)
    call = call_of(*quantized, window=(50, 10), causal_alignment="bottom_right", out_dtype=torch.float32)
    out, _ = forward.run(call, configs.PortableConfig(32, 32, 1, 1), device_of(q.device))
    assert_matches_pipeline(out, reference.pipeline(*quantized, arithmetic=BLOCKS, causal=call.causal, scoring=call.scoring)[0], emulated=True)
    quantized = fp8attn.quantize(q, k + 1, v + 1)
    for options in (dict(softcap=5.0), dict(sinks=torch.full((1,), 6.0))):
        call = call_of(*quantized, out_dtype=torch.float32, **options)
        out, _ = forward.run(call, configs.PortableConfig(32, 32, 1, 1), device_of(q.device))
        oracle, _ = reference.pipeline(*quantized, arithmetic=BLOCKS, scoring=call.scoring, mean_scores=call.mean_scores)
        assert_matches_pipeline(out, oracle, emulated=True)
    falling = -4 * torch.arange(450.0).expand(1, 1, 70, -1)
    quantized = fp8attn.quantize(q, k.repeat(1, 1, 3, 1), v.repeat(1, 1, 3, 1))
    call = call_of(*quantized, attn_mask=falling, out_dtype=torch.float32)
    out, _ = forward.run(call, configs.PortableConfig(32, 32, 1, 1), device_of(q.device))
    assert_matches_pipeline(out, reference.pipeline(*quantized, falling, arithmetic=BLOCKS)[0], emulated=True)


def check_low_masks() -> None:
    """Numbers from where on P's offset is rounded, to the lowest."""
    q, k, v = normal((1, 1, 70, 64), (1, 1, 150, 64))
    quantized = fp8attn.quantize(q, k, v)
    for mask in (low_mask(ROW_KINDS, 70, 150, torch.float32, 1), torch.linspace(-1e8, -1.1e8, 70)[:, None].repeat(1, 150)):
        call = call_of(*quantized, attn_mask=mask, out_dtype=torch.float32)
        out, _ = forward.run(call, configs.PortableConfig(32, 32, 1, 1), device_of(q.device))
        assert_matches_pipeline(out, reference.pipeline(*quantized, mask, arithmetic=BLOCKS)[0], emulated=True)


def test_the_kernel_itself_passes() -> None:
    check()
    check_low_masks()


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.one_in(2)
def test_mutant_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attribute, mutant = MUTANTS[name]
    monkeypatch.setattr(forward, attribute, mutant)
    with pytest.raises(AssertionError):
        check()


LOW_MUTANTS = {"the lowest overflow": (forward, "hide", lets_the_lowest_overflow), "a rounded offset": (tile, "origin_of", always_offset)}
"""Of what becomes of scores next to a mask's low numbers."""


@pytest.mark.parametrize("name", LOW_MUTANTS)
def test_mutant_next_to_low_numbers_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*LOW_MUTANTS[name])
    with pytest.raises(AssertionError):
        check_low_masks()


QUANTIZER_MUTANTS = {
    "nothing is residual": owes_nothing,
    "the last token's alone": owes_the_last_token_only,
    "paid the wrong way": pays_the_wrong_way,
}
"""Of error feedback."""


@pytest.mark.parametrize("name", QUANTIZER_MUTANTS)
def test_mutant_of_the_quantizer_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 1, TOKEN_CHUNK + 40, 16, generator=generator) for _ in range(2))
    expected = quantize_kv(k, v, fp8attn.Recipe())[1].data.view(torch.uint8)

    def is_right() -> bool:
        return torch.equal(triton_quantize.quantize(None, k, v, fp8attn.Recipe(), device_of(v.device))[2].data.view(torch.uint8), expected)

    assert is_right()
    monkeypatch.setattr(quantize_steps, "feed_back", QUANTIZER_MUTANTS[name])
    assert not is_right()


BIAS_MUTANTS = {
    "signs forgotten": (quantize_steps, "sign_bit", no_signs),
    "mean of keys forgotten": (bias, "load_vector", no_vector),
    "keys that aren't finite": (bias, "is_finite", all_finite),
    "means as they are stored": (bias, "unrotated", lambda y, PART: y),
}
"""Of what means of queries add to scores."""


@pytest.mark.parametrize("name", BIAS_MUTANTS)
def test_mutant_of_the_bias_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=generator) + 1 for n in (70, 150, 150))
    k = k.half()
    k[0, 0, 3, 5] = torch.inf
    smoothed, keys, _ = quantize(q, k, v, fp8attn.Recipe(smooth_q=True))
    assert smoothed.bias is not None

    def is_right() -> bool:
        added = bias.with_bias(smoothed, k, keys, device_of(k.device)).bias
        return torch.allclose(added, smoothed.bias, rtol=0, atol=1e-4)

    assert is_right()
    monkeypatch.setattr(*BIAS_MUTANTS[name])
    assert not is_right()
