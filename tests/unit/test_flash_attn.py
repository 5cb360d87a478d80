"""FlashAttention's functions and packed batches of transformers, by attention of packed sequences."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch

import fp8attn
from fp8attn import Recipe, integrations
from fp8attn.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from models import DECODERS, decoder

SIGNATURES = {
    flash_attn_func: "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs",
    flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size softcap"
    " alibi_slopes deterministic return_attn_probs block_table",
}
"""FlashAttention 2.8's, in order."""


@pytest.mark.parametrize("function", SIGNATURES)
def test_signatures_are_those_of_flash_attention(function: Any) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert [x.name for x in parameters if x.kind != x.KEYWORD_ONLY] == SIGNATURES[function].split()
    defaults = {x.name: x.default for x in parameters if x.default is not x.empty}
    own = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None}
    assert {name: defaults[name] for name in own} == own and defaults["deterministic"] is defaults["return_attn_probs"] is False


def tensors(*lengths: int, heads: tuple[int, ...] = (4, 2, 2)) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return tuple(torch.randn(n, h, 32, generator=generator) for n, h in zip((lengths[0], lengths[1], lengths[1]), heads, strict=True))


@pytest.mark.parametrize(
    "options", ({}, {"causal": True}, {"window_size": (7, 2)}, {"causal": True, "window_size": (5, -1), "softcap": 3.0, "softmax_scale": 0.3})
)
def test_dense_and_packed_calls_agree(options: dict[str, Any]) -> None:
    """A batch of one length is a packed batch; and both are exact attention, aligned to the bottom right."""
    q, k, v = tensors(3 * 20, 3 * 30)
    starts_q, starts_k = (torch.arange(4, dtype=torch.int32) * n for n in (20, 30))
    out, lse, probabilities = flash_attn_varlen_func(q, k, v, starts_q, starts_k, 20, 30, return_attn_probs=True, backend="reference", **options)  # type: ignore[misc]
    dense, dense_lse, _ = flash_attn_func(*(x.unflatten(0, (3, -1)) for x in (q, k, v)), return_attn_probs=True, backend="reference", **options)  # type: ignore[misc]
    assert probabilities is None and out.shape == q.shape and lse.shape == (4, 60) and dense.shape == (3, 20, 4, 32)
    torch.testing.assert_close(dense.flatten(0, 1), out)
    torch.testing.assert_close(dense_lse.transpose(0, 1).flatten(1), lse)
    distance = torch.arange(30) - (torch.arange(20) + 10)[:, None]
    left, right = options.get("window_size", (-1, -1))
    right = 0 if options.get("causal") else right
    mask = (distance >= (-left if left >= 0 else -99)) & (distance <= (right if right >= 0 else 99))
    expected = fp8attn.reference_sdpa(
        *(x[:n].transpose(0, 1)[None] for x, n in ((q, 20), (k, 30), (v, 30))), mask, enable_gqa=True, softcap=options.get("softcap", 0.0),
        scale=options.get("softmax_scale"),
    )  # type: ignore[arg-type]  # fmt: skip
    torch.testing.assert_close(out[:20].transpose(0, 1)[None], expected)


def test_they_are_computed_in_fp8() -> None:
    q, k, v = tensors(20, 30)
    starts = [torch.tensor([0, n], dtype=torch.int32) for n in (20, 30)]
    out = flash_attn_varlen_func(q, k, v, *starts, 20, 30, recipe=Recipe(qk="int8"), backend="modelled")
    assert torch.equal(out, fp8attn.varlen_sdpa(q, k, v, *starts, recipe=Recipe(qk="int8"), backend="modelled"))
    used = torch.tensor([25], dtype=torch.int32)
    found = flash_attn_varlen_func(q, k, v, *starts, 20, 30, seqused_k=used, sinks=torch.ones(4), backend="modelled")
    expected = fp8attn.varlen_sdpa(q, k, v, *starts, seqused_k=used, sinks=torch.ones(4), backend="modelled")
    assert isinstance(found, torch.Tensor) and torch.equal(found, expected)


@pytest.mark.parametrize(
    "options, message",
    (
        ({"dropout_p": 0.1}, "dropout_p is 0.1; it must be 0"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes is given; it must be None"),
        ({"block_table": torch.zeros(1, 1)}, "block_table is given; it must be None"),
    ),
)
def test_what_is_unsupported_is_named(options: dict[str, Any], message: str) -> None:
    q, k, v = tensors(20, 30)
    starts = [torch.tensor([0, n], dtype=torch.int32) for n in (20, 30)]
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(q, k, v, *starts, 20, 30, **options)
    if "block_table" not in options:
        with pytest.raises(ValueError, match=message):
            flash_attn_func(*(x[None] for x in (q, k, v)), **options)


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    return pytest.importorskip("transformers", reason="needs the package transformers")


LENGTHS = (5, 9, 3)


def packed_inputs() -> dict[str, Any]:
    """A batch of sequences without padding, as transformers.DataCollatorWithFlattening makes it."""
    ids = torch.randint(3, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    most = max(LENGTHS)
    return dict(input_ids=ids, position_ids=positions, cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=most, max_length_k=most)


@pytest.mark.parametrize("kind", DECODERS)
def test_packed_batches_are_their_sequences(transformers: ModuleType, kind: str) -> None:
    """Also with windows, soft caps and sinks. No call goes elsewhere."""
    model = decoder(transformers, kind)
    report = integrations.transformers.register("fp8attn_packed", min_keys=0, decode="fp8attn", backend="reference")
    model.set_attn_implementation("fp8attn_packed")
    inputs = packed_inputs()
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
    assert report.replaced.total() == 2 and not report.fallbacks, str(report)
    model.set_attn_implementation("eager")
    start = 0
    for length in LENGTHS:
        part = slice(start, start + length)
        with torch.no_grad():
            expected = model(input_ids=inputs["input_ids"][:, part], use_cache=False).logits
        torch.testing.assert_close(logits[:, part], expected, rtol=1e-3, atol=1e-3)
        start += length


def test_recipes_that_are_not_made_for_packed_batches_read_the_mask(transformers: ModuleType) -> None:
    model = decoder(transformers, "Llama")
    inputs, found = packed_inputs(), []
    for recipe in (Recipe(), Recipe(v="head")):
        integrations.transformers.register("fp8attn_packed", recipe, min_keys=0, decode="fp8attn", backend="reference")
        model.set_attn_implementation("fp8attn_packed")
        with torch.no_grad():
            found.append(model(**inputs, use_cache=False).logits)
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


def test_few_tokens_go_to_pytorch(transformers: ModuleType) -> None:
    model = decoder(transformers, "Llama")
    report = integrations.transformers.register("fp8attn_packed", backend="reference")
    model.set_attn_implementation("fp8attn_packed")
    with torch.no_grad():
        model(**packed_inputs(), use_cache=False)
    assert not report.replaced and {reason for x in report.fallbacks.values() for reason in x} == {"fewer than min_keys=2048 keys"}
