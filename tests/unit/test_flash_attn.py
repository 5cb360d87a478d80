"""FlashAttention's functions and packed batches of transformers, by attention of packed sequences."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch

import fp8attn
from fp8attn import Recipe, integrations
from fp8attn.integrations import continuous_batching, flash_attn
from fp8attn.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from fp8attn.integrations.short_packed import MIN_PACKED_KEYS, VarlenAttn
from models import DECODERS, decoder

SIGNATURES = {
    flash_attn_func: "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs",
    flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size softcap"
    " alibi_slopes deterministic return_attn_probs block_table",
    flash_attn_with_kvcache: "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table softmax_scale"
    " causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse",
}
"""FlashAttention 2.8's, in order."""


@pytest.mark.parametrize("function", SIGNATURES)
def test_signatures_are_those_of_flash_attention(function: Any) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert [x.name for x in parameters if x.kind != x.KEYWORD_ONLY] == SIGNATURES[function].split()
    defaults = {x.name: x.default for x in parameters if x.default is not x.empty}
    own = {"softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None}
    if function is flash_attn_with_kvcache:
        own |= {"rotary_interleaved": True, "num_splits": 0, "return_softmax_lse": False}
    else:
        own |= {"dropout_p": 0.0, "deterministic": False, "return_attn_probs": False}
    assert {name: defaults[name] for name in own} == own


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
        ({"block_table": torch.zeros(1, 1)}, "block_table is torch.float32; it must be torch.int32"),
        ({"block_table": torch.zeros(1, 1).int(), "seqused_k": torch.ones(1).int()}, "cu_seqlens_k and seqused_k are given; with block_table one of"),
        ({"k_descale": 1.0}, "k_descale is given; without block_table it must be None"),
        ({"recipe": None}, "recipe is None; without block_table it must be a fp8attn.Recipe"),
    ),
)
def test_what_is_unsupported_is_named(options: dict[str, Any], message: str) -> None:
    q, k, v = tensors(20, 30)
    starts = [torch.tensor([0, n], dtype=torch.int32) for n in (20, 30)]
    with pytest.raises((TypeError, ValueError), match=message):
        flash_attn_varlen_func(q, k, v, *starts, 20, 30, **options)
    if not options.keys() & {"block_table", "k_descale", "recipe"}:
        with pytest.raises(ValueError, match=message):
            flash_attn_func(*(x[None] for x in (q, k, v)), **options)


LENGTHS_OF_CACHE = (28, 9)


def cached(paged: bool) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """A cache of two sequences of up to 32 tokens, as arguments; and keys and values (2, 32, 2, 32) of their tokens, all of which it has."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 32, 2, 32, generator=generator) for _ in range(2))
    if not paged:
        rows = torch.tensor([2, 0], dtype=torch.int32)
        caches = [torch.full((3, 32, 2, 32), torch.nan) for _ in range(2)]
        for cache, x in zip(caches, (k, v), strict=True):
            cache[rows.long()] = x
        return dict(k_cache=caches[0].half(), v_cache=caches[1].half(), cache_batch_idx=rows), k, v
    table = torch.tensor([[3, 1], [0, 4]], dtype=torch.int32)
    caches = [torch.full((5, 16, 2, 32), torch.nan) for _ in range(2)]
    for cache, x in zip(caches, (k, v), strict=True):
        cache[table.long()] = x.unflatten(1, (2, 16))
    return dict(k_cache=caches[0].half(), v_cache=caches[1].half(), block_table=table), k, v


@pytest.mark.parametrize("paged", (False, True))
@pytest.mark.parametrize(
    "options", ({}, {"causal": True}, {"causal": True, "window_size": (6, 3), "softcap": 3.0}, {"window_size": (4, 2), "softmax_scale": 0.3})
)
@pytest.mark.parametrize("new, queries", ((0, 4), (2, 4), (4, 4), (0, 20), (4, 20), (20, 20)))
def test_a_cache_is_read_and_written_as_by_flash_attention(paged: bool, options: dict[str, Any], new: int, queries: int) -> None:
    """Against exact attention: with pages and without, with and without new tokens, which are written. Many queries are packed."""
    arguments, k, v = cached(paged)
    lengths = LENGTHS_OF_CACHE if queries == 4 else (28, 21) if new < 20 else (12, 3)
    before = torch.tensor(lengths, dtype=torch.int32)
    q = torch.randn(2, queries, 4, 32, generator=torch.Generator().manual_seed(1)).half()
    tokens: dict[str, Any] = {}
    if new:
        tokens = {"k": torch.stack([k[row, n : n + new] * 2 for row, n in enumerate(lengths)]).half(), "v": torch.ones(2, new, 2, 32).half()}
    out, lse = flash_attn_with_kvcache(q, **arguments, **tokens, cache_seqlens=before, return_softmax_lse=True, **options)
    assert lse.is_contiguous() and (out.is_contiguous() or queries == 4)
    left, right = options.get("window_size", (-1, -1))
    for row, length in enumerate(lengths):
        key, value = k[row].clone(), v[row].clone()
        if new:
            key[length : length + new], value[length : length + new] = tokens["k"][row].float(), 1.0
        key, value = (x[None, : length + new].half().float().transpose(1, 2) for x in (key, value))
        expected, expected_lse = fp8attn.reference_sdpa(
            q[row : row + 1].transpose(1, 2).float(), key, value, enable_gqa=True, window=(left, 0 if options.get("causal") else right),
            causal_alignment="bottom_right", softcap=options.get("softcap", 0.0), scale=options.get("softmax_scale"), return_lse=True,
        )  # fmt: skip
        torch.testing.assert_close(out[row].float(), expected[0].transpose(0, 1), rtol=3e-3, atol=3e-3)
        torch.testing.assert_close(lse[row], expected_lse[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("options", ({}, {"causal": True}, {"window_size": (6, 3)}))
@pytest.mark.parametrize("queries, new", ((1, 1), (3, 3), (2, 4), (4, 1), (18, 3)))
def test_rotary_embeddings_are_applied_first(queries: int, new: int, options: dict[str, Any], interleaved: bool) -> None:
    """To new keys from cache_seqlens on, and to queries likewise; without a mask, all queries have the first position."""
    r = torch.Generator().manual_seed(queries)
    before = torch.tensor(LENGTHS_OF_CACHE, dtype=torch.int32)
    q, key, value = (torch.randn(2, n, heads, 32, generator=r).half() for n, heads in ((queries, 4), (new, 2), (new, 2)))
    angles = torch.arange(48)[:, None] / 10.0 ** torch.arange(8)
    cos, sin = angles.cos().half(), angles.sin().half()
    found, caches = [], []
    for by_hand in (False, True):
        arguments, _, _ = cached(True)
        tokens: dict[str, Any] = dict(k=key, v=value, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
        query = q
        if by_hand:
            at = before[:, None] + torch.arange(new)
            of_queries = before[:, None] + torch.arange(queries) * bool(options)
            query, turned = (by_position(x, y, cos, sin, interleaved) for x, y in ((q, of_queries), (key, at)))
            tokens = dict(k=turned, v=value)
        found.append(flash_attn_with_kvcache(query, **arguments, **tokens, cache_seqlens=before, **options))
        caches.append(arguments["k_cache"])
    assert torch.equal(*found) and torch.equal(*(x.nan_to_num(9.0) for x in caches))  # type: ignore[call-overload]


def by_position(x: torch.Tensor, position: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x (B, S, H, D) by complex numbers, at `position` (B, S)."""
    pairs = cos.shape[1]
    turns = torch.complex(cos.float(), sin.float())[position.long()].unsqueeze(2)
    parts = x[..., : 2 * pairs].float().unflatten(-1, (pairs, 2) if interleaved else (2, pairs))
    if not interleaved:
        parts = parts.transpose(-2, -1)
    turned = torch.view_as_real(torch.view_as_complex(parts.contiguous()) * turns)
    turned = turned.flatten(-2) if interleaved else turned.transpose(-2, -1).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., 2 * pairs :]], -1)


@pytest.mark.parametrize("options", ({}, {"causal": True}, {"causal": True, "window_size": (6, 3), "softcap": 3.0}))
def test_packed_queries_attend_to_pages(options: dict[str, Any]) -> None:
    """Of sequences whose lengths either argument has; tokens of no sequence are zeros."""
    arguments, k, v = cached(True)
    counts, used = (1, 3), torch.tensor(LENGTHS_OF_CACHE, dtype=torch.int32)
    q = torch.randn(6, 4, 32, generator=torch.Generator().manual_seed(1)).half()
    starts, ends = torch.tensor([0, 1, 4], dtype=torch.int32), torch.tensor([0, 28, 37], dtype=torch.int32)
    caches, table = (arguments["k_cache"], arguments["v_cache"]), arguments["block_table"]
    out, lse, nothing = flash_attn_varlen_func(
        q, *caches, starts, None, 3, 28, block_table=table, seqused_k=used, return_attn_probs=True, **options
    )  # type: ignore[misc]  # fmt: skip
    again = flash_attn_varlen_func(q, *caches, starts, ends, 3, 28, block_table=table, **options)
    assert nothing is None and torch.equal(out, again) and not out[4:].any() and lse.shape == (4, 6)  # type: ignore[arg-type]
    left, right = options.get("window_size", (-1, -1))
    for row, length in enumerate(LENGTHS_OF_CACHE):
        mine = slice(int(starts[row]), int(starts[row]) + counts[row])
        key, value = (x[row][None, :length].half().float().transpose(1, 2) for x in (k, v))
        expected, expected_lse = fp8attn.reference_sdpa(
            q[None, mine].transpose(1, 2).float(), key, value, enable_gqa=True, window=(left, 0 if options.get("causal") else right),
            causal_alignment="bottom_right", softcap=options.get("softcap", 0.0), return_lse=True,
        )  # fmt: skip
        torch.testing.assert_close(out[mine].float(), expected[0].transpose(0, 1), rtol=3e-3, atol=3e-3)
        torch.testing.assert_close(lse[:, mine], expected_lse[0], rtol=1e-3, atol=1e-3)
    short = flash_attn_varlen_func(q, *caches, starts, None, 2, 28, block_table=table, seqused_k=used, **options)
    assert isinstance(short, torch.Tensor) and torch.equal(short[:1], out[:1]) and bool(short[1:4].isnan().all())


def test_packed_queries_attend_to_pages_of_e4m3() -> None:
    arguments, k, v = cached(True)
    caches = [arguments[name].div(0.03).to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")]
    q, starts, used = torch.randn(2, 4, 32), torch.arange(3, dtype=torch.int32), torch.tensor([32, 32], dtype=torch.int32)
    options: dict[str, Any] = dict(block_table=arguments["block_table"], seqused_k=used, k_descale=0.03, v_descale=torch.full((2,), 0.03))
    out = flash_attn_varlen_func(q, *caches, starts, None, 1, 32, **options)
    expected = fp8attn.reference_sdpa(q[:, None].transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True)[:, :, 0]
    assert isinstance(out, torch.Tensor) and float((out - expected).norm() / expected.norm()) < 0.08


def test_an_int_is_the_length_of_all_and_none_the_whole_cache() -> None:
    arguments, _, _ = cached(True)
    q = torch.randn(2, 1, 4, 32).half()
    lengths = torch.full((2,), 32, dtype=torch.int32)
    found = [flash_attn_with_kvcache(q, **arguments, cache_seqlens=x) for x in (None, 32, lengths)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])  # type: ignore[arg-type]


def test_one_split_is_the_same_in_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, _, _ = cached(True)
    q, asked = torch.randn(2, 1, 4, 32).half(), list[bool]()
    attend = flash_attn.paged_sdpa
    monkeypatch.setattr(flash_attn, "paged_sdpa", lambda *x, **y: asked.append(x[2].batch_invariant) or attend(*x, **y))
    usual, fixed = (flash_attn_with_kvcache(q, **arguments, cache_seqlens=30, num_splits=n) for n in (0, 1))
    assert asked == [False, True] and torch.equal(usual, fixed)  # type: ignore[arg-type]


def test_a_recipe_is_of_caches_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, _, _ = cached(True)
    codes = {name: arguments[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    q, recipes = torch.randn(2, 1, 4, 32).half(), list[Recipe | None]()
    attend = flash_attn.paged_sdpa
    monkeypatch.setattr(flash_attn, "paged_sdpa", lambda *x, **y: recipes.append(x[1].recipe) or attend(*x, **y))
    lengths, starts = torch.full((2,), 32, dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    for change in ({}, codes):
        given = {**arguments, **change}
        caches, table = (given["k_cache"], given["v_cache"]), given["block_table"]
        flash_attn_with_kvcache(q, **given, cache_seqlens=lengths)
        flash_attn_with_kvcache(q, **given, cache_seqlens=lengths, recipe=None)
        for recipe in (fp8attn.PRECISE, None):
            flash_attn_varlen_func(q[:, 0], *caches, starts, None, 1, 32, block_table=table, seqused_k=lengths, recipe=recipe)
    assert recipes == [Recipe(), None, fp8attn.PRECISE, None, *[None] * 4]


def test_e4m3_caches_have_descales() -> None:
    arguments, k, v = cached(True)
    scales = [0.02 + 0.01 * torch.rand(2, 2) for _ in range(2)]
    for name, scale in zip(("k_cache", "v_cache"), scales, strict=True):
        pages = arguments[name].float()
        for row, numbers in enumerate(arguments["block_table"].long()):
            pages[numbers] /= scale[row].view(2, 1)
        arguments[name] = pages.to(torch.float8_e4m3fn)
    q, used = torch.randn(2, 1, 4, 32), torch.tensor([32, 32], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, **arguments, cache_seqlens=used, k_descale=scales[0], v_descale=scales[1])
    expected = fp8attn.reference_sdpa(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True).transpose(1, 2)
    assert isinstance(out, torch.Tensor) and float((out - expected).norm() / expected.norm()) < 0.08
    plain = flash_attn_with_kvcache(q, **arguments, cache_seqlens=used)
    assert torch.equal(plain, flash_attn_with_kvcache(q, **arguments, cache_seqlens=used, k_descale=1.0, v_descale=1.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options, message",
    (
        ({"rotary_cos": torch.ones(40, 16)}, "rotary_sin is None; rotary_cos and rotary_sin go together"),
        ({"rotary_sin": torch.ones(40, 16)}, "rotary_cos is None"),
        ({"rotary_cos": torch.ones(40, 16), "rotary_sin": torch.ones(40, 16)}, "rotary_cos is given and k is None"),
        ({"cache_leftpad": torch.ones(1)}, "cache_leftpad is given"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes is given"),
        ({"num_splits": 3}, "num_splits is 3; it must be 0, or 1 for the same bits in every batch"),
        ({"cache_batch_idx": torch.zeros(2, dtype=torch.int32)}, "cache_batch_idx and block_table are given"),
        ({"k": torch.zeros(2, 1, 2, 32)}, "v is None; k and v go together"),
        ({"k": torch.zeros(2, 1, 2, 32), "v": torch.zeros(2, 1, 2, 32)}, "cache_seqlens is None and k is given"),
        ({"block_table": torch.zeros(2, 2)}, "block_table is torch.float32; it must be torch.int32"),
        ({"cache_seqlens": torch.zeros(2).long()}, "cache_seqlens is torch.int64"),
        ({"k_cache": "cache"}, "k_cache is a str"),
        ({"k": torch.zeros(2, 2, 32), "v": torch.zeros(2, 2, 2, 32), "cache_seqlens": 3}, r"k is \(2, 2, 32\); it must be \(B, n, Hkv"),
        ({"k": torch.zeros(2, 2, 2, 64)[..., ::2], "v": torch.zeros(2, 2, 2, 32), "cache_seqlens": 3}, "key has strides"),
    ),
)
def test_what_a_cache_does_not_support_is_named(options: dict[str, Any], message: str) -> None:
    arguments, _, _ = cached(True)
    with pytest.raises((TypeError, ValueError), match=message):
        flash_attn_with_kvcache(torch.zeros(2, 1, 4, 32).half(), **{**arguments, **options})


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


SHORT = "packed sequences of fewer than 512 keys: PyTorch's varlen_attn"


def by_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *lengths: Any, scale: float | None, window_size: tuple, enable_gqa: bool):
    """PyTorch's varlen_attn, which has no kernel for CPUs."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return fp8attn.varlen_sdpa(
        q, k, v, *lengths[:2], max_seqlen_q=lengths[2], max_seqlen_k=lengths[3], scale=scale, window=window_size, backend="reference"
    )


def packed_logits(model: torch.nn.Module, **policy: Any) -> tuple[torch.Tensor, integrations.switching.Report]:
    report = integrations.transformers.register("fp8attn_packed", **policy)
    model.set_attn_implementation("fp8attn_packed")
    with torch.no_grad():
        return model(
            **{name: x.to(model.device) if isinstance(x, torch.Tensor) else x for name, x in packed_inputs().items()}, use_cache=False
        ).logits, report


@pytest.mark.parametrize("kind", ("Llama", "Mistral", "GptOss"))
def test_short_packed_sequences_go_to_pytorch(transformers: ModuleType, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With windows; calls with sinks don't. So do all with a longest sequence that the host doesn't know."""
    model = decoder(transformers, kind)
    expected, before = packed_logits(model, min_keys=0, decode="fp8attn", backend="reference")
    assert before.replaced.total() == 2
    monkeypatch.setattr(VarlenAttn, "find", lambda: VarlenAttn(by_reference, True))
    monkeypatch.setattr(VarlenAttn, "takes", lambda self, q, k, v, softcap, sinks: softcap == 0 and sinks is None)
    found, report = packed_logits(model, min_keys=10, backend="reference")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert {reason for x in report.fallbacks.values() for reason in x} == (set() if kind == "GptOss" else {SHORT})
    _, report = packed_logits(model, min_keys=9, backend="reference")
    assert report.replaced.total() == 2 and not report.fallbacks


@pytest.mark.parametrize(
    ("causal", "most", "name"), ((True, 100, "varlen_attn"), (False, 100, "varlen_attn"), (True, 600, "varlen_sdpa"), (True, 1, "paged_sdpa"))
)
def test_who_computes_packed_sequences_of_the_engine(causal: bool, most: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Called(Exception):
        pass

    def call(*_: Any, **__: Any) -> None:
        raise Called

    monkeypatch.setattr(VarlenAttn, "takes", lambda *_: True)
    monkeypatch.setattr(*((VarlenAttn, "__call__") if name == "varlen_attn" else (continuous_batching, name)), call)
    starts = torch.tensor([0, most, 2 * most], dtype=torch.int32)
    q, k, v = (torch.zeros(2 * most, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
    flash = continuous_batching._Flash(Recipe(), MIN_PACKED_KEYS, "auto")
    with pytest.raises(Called):
        flash.varlen_func(q, k, v, starts, starts, most, most, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ("Llama", "Mistral"))
def test_short_packed_sequences_by_pytorch(transformers: ModuleType, kind: str, device: torch.device) -> None:
    model = decoder(transformers, kind).to(device, torch.bfloat16)
    expected, _ = packed_logits(model, min_keys=0, decode="fp8attn", backend="reference")
    if VarlenAttn.find().function is None:
        pytest.skip(f"torch {torch.__version__} has no varlen_attn with windows and scales")
    found, report = packed_logits(model)
    assert {reason for x in report.fallbacks.values() for reason in x} == {SHORT} and not report.replaced
    assert float((found.float() - expected.float()).norm() / expected.float().norm()) < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("window", ((-1, -1), (20, 5)))
def test_short_packed_sequences_of_the_engine(is_causal: bool, window: tuple[int, int], device: torch.device) -> None:
    """Grouped keys, more keys than queries, sequences without queries, and without keys."""
    torch.manual_seed(0)
    starts_q, starts_k = (torch.tensor([0, *x], device=device).cumsum(0).to(torch.int32) for x in ((70, 0, 100, 40), (90, 8, 300, 40)))
    q, k, v = (torch.randn(n, heads, 64, dtype=torch.bfloat16, device=device) for n, heads in ((210, 4), (438, 2), (438, 2)))
    if VarlenAttn.find().function is None:
        pytest.skip(f"torch {torch.__version__} has no varlen_attn with windows and scales")
    flash = continuous_batching._Flash(Recipe(), MIN_PACKED_KEYS, "auto")
    found = flash.varlen_func(q, k, v, starts_q, starts_k, 100, 300, causal=is_causal, window_size=window)
    seen = None if window == (-1, -1) else window
    expected = fp8attn.varlen_sdpa(q, k, v, starts_q, starts_k, is_causal=is_causal, window=seen, backend="reference")
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
