"""Context parallelism: processes of a gloo group against one process, and their parts one by one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import GPU
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fp8attn
import fp8attn.distributed.agreement as agreement
from closeness import relative
from fp8attn import PRECISE, KVCache, PagedBatch, Recipe, ops, reference
from fp8attn.device import device_of
from fp8attn.distributed import (
    PageShares,
    context_parallel_paged_sdpa,
    context_parallel_sdpa,
    context_parallel_varlen_sdpa,
    page_shard,
    page_share,
    shard,
    shard_lengths,
    unshard,
)
from fp8attn.distributed.gathered import HIDING_ROWS, _first_heads
from fp8attn.distributed.gathered import unsupported as unsupported_gathered
from fp8attn.distributed.merge import MOST_PARTS, Accumulator
from fp8attn.distributed.paged import _share as of_pages
from fp8attn.distributed.part_calls import with_sinks
from fp8attn.distributed.parts import Format, Part, joined_statistics, measured
from fp8attn.distributed.sharding import Span, Spans, spans_of
from fp8attn.distributed.visibility import Piece, Visible, pieces
from fp8attn.distributed.wire import ALIGNMENT, Form, packed, size_of, unpacked
from fp8attn.layout import padded_length
from fp8attn.quantization import TOKEN_CHUNK, PartialStatistics, chunk_statistics, k_sample, quantize_kv, rows_layout, statistics
from fp8attn.recipe import Quantized
from fp8attn.triton import quantize as triton_quantize
from ranks import Failed, Ranks

MOST = 4
N = int | tuple[int, int]
"""A number of ranks, or the shape of a mesh."""

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Four processes on the CPU, each with one thread."""
    if GPU:
        pytest.skip("needs no GPU: machines without one run it")
    pool = Ranks(MOST)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    """A process for every GPU, four at most."""
    pool = Ranks(min(torch.cuda.device_count(), MOST), "nccl")
    yield pool
    pool.stop()


@dataclasses.dataclass(frozen=True)
class Problem:
    """Whole tensors that every rank makes for itself."""

    heads: int = 4
    kv_heads: int = 2
    q_length: int = 300
    kv_length: int = 300
    dim: int = 32
    value_dim: int = 32
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    nonfinite: tuple[int, ...] = ()
    """Tokens of key that hold a NaN."""
    seed: int = 0
    v_mean: float = 1.0

    def tensors(self, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        q = normal(self.batch, self.heads, self.q_length, self.dim)
        k = normal(self.batch, self.kv_heads, self.kv_length, self.dim) + normal(self.batch, self.kv_heads, 1, self.dim) * 2
        v = normal(self.batch, self.kv_heads, self.kv_length, self.value_dim) + normal(self.batch, self.kv_heads, 1, self.value_dim) * self.v_mean
        for token in self.nonfinite:
            k[:, :, token, 0] = torch.nan
        return tuple(x.to(self.dtype).to(device) for x in (q, k, v))  # type: ignore[return-value]


def mine(x: torch.Tensor, lengths: tuple[int, ...], sharding: str, rank: int) -> torch.Tensor:
    return torch.cat([x[:, :, span.first : span.first + span.length] for span in spans_of(lengths, sharding)[rank]], 2)


def whole(parts: list[torch.Tensor], lengths: tuple[int, ...], sharding: str) -> torch.Tensor:
    found = {}
    for spans, part in zip(spans_of(lengths, sharding), parts, strict=True):
        for span, piece in zip(spans, part.split([span.length for span in spans], 2), strict=True):
            if span.length:
                found[span.first] = piece
    return torch.cat([found[first] for first in sorted(found)], 2)


def where_of(where: dist.ProcessGroup | DeviceMesh) -> dict[str, Any]:
    return {"mesh": where} if isinstance(where, DeviceMesh) else {"group": where}


def attend(
    rank: int,
    where: Any,
    device: torch.device,
    problem: Problem,
    q_lengths: tuple[int, ...],
    kv_lengths: tuple[int, ...],
    sharding: str,
    options: dict,
) -> tuple[torch.Tensor, torch.Tensor]:
    """On a rank: out and LSE of its tokens, on the CPU."""
    q, k, v = problem.tensors(device)
    options = {"sharding": sharding, "enable_gqa": True, "return_lse": True, **where_of(where), **options}
    if options.get("sinks") is not None:
        options["sinks"] = options["sinks"].to(device)
    out, lse = context_parallel_sdpa(
        mine(q, q_lengths, sharding, rank), mine(k, kv_lengths, sharding, rank), mine(v, kv_lengths, sharding, rank), **options
    )
    return out.cpu(), lse.cpu()


def count_of(n: N) -> int:
    return n[0] * n[1] if isinstance(n, tuple) else n


def parallel(
    pool: Ranks, n: N, problem: Problem, *, lengths: tuple[int, ...] | None = None, kv_lengths: tuple[int, ...] | None = None,
    sharding: str = "contiguous", **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out and LSE of all tokens, of n ranks."""
    count = count_of(n)
    lengths = lengths or tuple(shard_lengths(problem.q_length, count, sharding))  # type: ignore[arg-type]
    kv_lengths = kv_lengths or (lengths if problem.q_length == problem.kv_length else tuple(shard_lengths(problem.kv_length, count, sharding)))  # type: ignore[arg-type]
    found = pool.run(attend, n, [(problem, lengths, kv_lengths, sharding, options)] * count)
    outs, lses = ([one[i] for one in found] for i in range(2))
    return whole(outs, lengths, sharding), whole(lses, lengths, sharding)


@functools.cache
def alone(problem: Problem, device: torch.device | str = "cpu", **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE of all tokens, of this process."""
    out, lse = fp8attn.sdpa(*problem.tensors(device), enable_gqa=True, return_lse=True, **options)
    return out.cpu(), lse.cpu()


MODES = [
    *((n, mode) for n in (1, 2, 3, 4) for mode in ("ring", "all_gather")), (2, "ulysses"), (4, "ulysses"), ((2, 2), "ring"), ((2, 2), "all_gather"),
    (3, "auto"), ((2, 2), "auto"),
]  # fmt: skip


@pytest.mark.parametrize("n, mode", MODES, ids=str)
@pytest.mark.one_in(2)
def test_exact_attention_is_that_of_one_process(ranks: Ranks, n: N, mode: str) -> None:
    """Contiguous and zig-zag, full and causal, with equal shards and unequal ones, of which one is empty; K and V travel as they are."""
    problem, options = Problem(), dict(mode=mode, backend="reference", out_dtype=torch.float32)
    uneven = {1: (300,), 2: (17, 283), 3: (150, 0, 150), 4: (1, 127, 172, 0)}[count_of(n)]
    for causal in (False, True):
        expected = alone(problem, is_causal=causal, backend="reference", out_dtype=torch.float32)
        for sharding, lengths in (("contiguous", None), ("zigzag", None), ("contiguous", uneven)):
            found = parallel(ranks, n, problem, sharding=sharding, lengths=lengths, is_causal=causal, **options)
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alignment", ("top_left", "bottom_right"))
@pytest.mark.parametrize("q_length, kv_length", ((70, 300), (300, 70), (1, 200), (130, 129)), ids=str)
def test_causal_masks_of_other_lengths(ranks: Ranks, q_length: int, kv_length: int, alignment: str) -> None:
    """Queries and keys are sharded differently, so the masks of pairs of shards have any offset."""
    problem = Problem(q_length=q_length, kv_length=kv_length)
    options: dict[str, Any] = dict(is_causal=True, causal_alignment=alignment, backend="reference", out_dtype=torch.float32)
    expected = alone(problem, **options)
    for n, mode in ((3, "ring"), (2, "ulysses"), ((2, 2), "all_gather")):
        for x, y in zip(parallel(ranks, n, problem, mode=mode, **options), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


SINKS = (0.5, -1.0, 2.0, 1.5)
SCORES: dict[str, dict[str, Any]] = {
    "window": dict(window=(40, 25)),
    "causal window": dict(window=(64, -1), is_causal=True),
    "window to the right": dict(window=(-1, 33)),
    "window of itself": dict(window=(0, 0)),
    "window, aligned to the end": dict(window=(100, 7), causal_alignment="bottom_right"),
    "softcap": dict(softcap=2.0),
    "sinks": dict(sinks=torch.tensor(SINKS), is_causal=True),
    "all": dict(window=(90, 0), softcap=1.5, sinks=torch.tensor(SINKS)),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.one_in(2)
def test_windows_caps_and_sinks_are_those_of_one_process(ranks: Ranks, name: str) -> None:
    """Exactly, for shards of any lengths, of which one is empty, also where queries are fewer; and with FP8's error."""
    for problem in (Problem(), Problem(q_length=170)):
        of_scores: dict[str, Any] = SCORES[name]
        exact = alone.__wrapped__(problem, backend="reference", out_dtype=torch.float32, **of_scores)
        for n, mode, sharding in (
            (3, "ring", "contiguous"),
            (3, "ring", "zigzag"),
            (2, "ulysses", "zigzag"),
            ((2, 2), "all_gather", "zigzag"),
            (4, "auto", "contiguous"),
        ):
            options: dict[str, Any] = dict(mode=mode, sharding=sharding, out_dtype=torch.float32, **of_scores)
            for x, y in zip(parallel(ranks, n, problem, backend="reference", **options), exact, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        uneven = (150, 0, problem.q_length - 150)
        found = parallel(
            ranks, 3, problem, lengths=uneven, kv_lengths=(17, 283, 0), mode="ring", backend="reference", out_dtype=torch.float32, **of_scores
        )
        for x, y in zip(found, exact, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    of_scores = of_scores | dict(backend="modelled", out_dtype=torch.float32)
    expected, expected_lse = alone.__wrapped__(problem, **of_scores)
    for scope in ("sequence", "shard"):
        out, lse = parallel(ranks, 2, problem, mode="ring", sharding="zigzag", statistics=scope, **of_scores)
        assert relative(out, exact[0]) < 1.1 * relative(expected, exact[0])
        assert relative(lse, exact[1]) < 1.3 * relative(expected_lse, exact[1])


SCORINGS = st.fixed_dictionaries(
    dict(
        is_causal=st.booleans(),
        window=st.tuples(*[st.one_of(st.just(-1), st.integers(0, 150))] * 2),
        softcap=st.sampled_from((0.0, 2.0)),
        sinks=st.sampled_from((None, torch.tensor(SINKS))),
    )
)


def drawn_parts(draw: st.DrawFn, total: int, n: int) -> tuple[int, ...]:
    """Lengths of n parts, of which some may be empty."""
    edges = [0, *sorted(draw(st.lists(st.integers(0, total), min_size=n - 1, max_size=n - 1))), total]
    return tuple(end - start for start, end in itertools.pairwise(edges))


@st.composite
def sharded_calls(draw: st.DrawFn) -> tuple[int, Problem, dict[str, Any]]:
    """Ranks, whole tensors, and arguments of `parallel`. Lengths are multiples of each other, too."""
    q_length, n = draw(st.integers(1, 300)), draw(st.integers(1, 4))
    kv_length = draw(st.one_of(st.integers(1, 300), st.sampled_from((1, 2, 3)).map(lambda times: max(q_length // times, 1))))
    modes = ("ring", "all_gather", "auto") if n == 3 else ("ring", "all_gather", "auto", "ulysses")  # which shares out heads equally
    options = dict(mode=draw(st.sampled_from(modes)), sharding=draw(st.sampled_from(("zigzag", "contiguous"))))
    if options["sharding"] == "contiguous" and draw(st.booleans()):
        options |= dict(lengths=drawn_parts(draw, q_length, n), kv_lengths=drawn_parts(draw, kv_length, n))
    return n, Problem(q_length=q_length, kv_length=kv_length), options


@given(call=sharded_calls(), alignment=st.sampled_from(("top_left", "bottom_right")), of_scores=SCORINGS)
def test_any_call_is_that_of_one_process(ranks: Ranks, call: tuple[int, Problem, dict[str, Any]], alignment: str, of_scores: dict) -> None:
    n, problem, shards = call
    options: dict[str, Any] = dict(backend="reference", causal_alignment=alignment, out_dtype=torch.float32, **of_scores)
    found = parallel(ranks, n, problem, **shards, **options)
    for x, y in zip(found, alone.__wrapped__(problem, **options), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=4).filter(any),
    n=st.integers(1, 4),
    sharding=st.sampled_from(("zigzag", "contiguous")),
    of_scores=SCORINGS,
)
def test_any_packed_call_is_that_of_one_process(ranks: Ranks, lengths: list[int], n: int, sharding: str, of_scores: dict) -> None:
    edges = (0, *itertools.accumulate(lengths))
    problem = Problem(q_length=edges[-1], kv_length=edges[-1])
    options: dict[str, Any] = dict(backend="reference", out_dtype=torch.float32, **of_scores)
    found = packed_parallel(ranks, n, problem, torch.tensor(edges), sharding, **options)
    for x, y in zip(found, packed_alone(problem, edges, **options), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_a_ring_ends_where_windows_do(ranks: Ranks) -> None:
    """Of four shards of 75 tokens, a window of 80 keys reaches two back; one of all keys, all."""
    for window, steps in (((80, 0), 2), ((0, 0), 0), ((300, 0), 3), ((-1, 0), 3)):
        options = dict(mode="ring", backend="reference", window=window)
        assert all(len(sizes) == steps for sizes in ranks.run(sent_bytes, 4, [(Problem(), options)] * 4)), window


STARTS = (0, 40, 40, 110, 300, 301, 420)


def attend_packed(
    rank: int, where: Any, device: torch.device, problem: Problem, starts: Any, sharding: str, options: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """On a rank: out (1, H, S, Dv) and LSE of its tokens of packed sequences, on the CPU."""
    lengths = options.get("lengths") or tuple(shard_lengths(problem.q_length, where.size(), sharding))  # type: ignore[arg-type]
    q, k, v = (mine(x, lengths, sharding, rank)[0].transpose(0, 1) for x in problem.tensors(device))
    options = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in options.items() if key != "lengths"}
    out, lse = context_parallel_varlen_sdpa(q, k, v, starts, group=where, sharding=sharding, return_lse=True, **options)
    return out.transpose(0, 1)[None].cpu(), lse[None].cpu()


def packed_parallel(
    pool: Ranks, n: int, problem: Problem, starts: Any, sharding: str = "contiguous", **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE of all tokens of packed sequences, of n ranks."""
    lengths = options.get("lengths") or tuple(shard_lengths(problem.q_length, n, sharding))  # type: ignore[arg-type]
    found = pool.run(attend_packed, n, [(problem, starts, sharding, options)] * n)
    outs, lses = ([one[i] for one in found] for i in range(2))
    return whole(outs, lengths, sharding), whole(lses, lengths, sharding)


def packed_alone(problem: Problem, starts: tuple[int, ...], device: torch.device | str = "cpu", **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (x[0].transpose(0, 1) for x in problem.tensors(device))
    lengths = torch.tensor(starts, dtype=torch.int32, device=device)
    out, lse = fp8attn.varlen_sdpa(q, k, v, lengths, lengths, return_lse=True, **options)
    return out.transpose(0, 1)[None].cpu(), lse[None].cpu()


PACKED_SCORES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": dict(is_causal=True),
    "causal window, sinks": dict(is_causal=True, window=(50, -1), sinks=torch.tensor(SINKS)),
    "window, softcap": dict(window=(30, 60), softcap=2.0),
}


@pytest.mark.parametrize("name", PACKED_SCORES)
def test_packed_sequences_are_those_of_one_process(ranks: Ranks, name: str) -> None:
    """Sequences that one rank has, that two or all share, that both runs of a rank in zig-zag order share, and an empty one."""
    problem, of_scores = Problem(q_length=420, kv_length=420), PACKED_SCORES[name]
    options: dict[str, Any] = dict(out_dtype=torch.float32, **of_scores)
    exact = packed_alone(problem, STARTS, backend="reference", **options)
    shards = (1, "contiguous", None), (3, "contiguous", (100, 0, 320)), (4, "contiguous", None), (2, "zigzag", None), (4, "zigzag", None)
    for n, sharding, lengths in shards:
        found = packed_parallel(ranks, n, problem, torch.tensor(STARTS), sharding, lengths=lengths, backend="reference", **options)
        for x, y in zip(found, exact, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    expected, expected_lse = packed_alone(problem, STARTS, backend="modelled", **options)
    out, lse = packed_parallel(ranks, 2, problem, STARTS, "zigzag", backend="modelled", **options)
    assert relative(out, exact[0]) < 1.1 * relative(expected, exact[0])
    assert relative(lse, exact[1]) < 1.3 * relative(expected_lse, exact[1])


def ring_bytes(module: Any, attend: Callable[[], object]) -> list[int]:
    """Sizes of the buffers that this rank passes on in the ring of a module's call."""
    sent, ring = [], module.Ring
    module.Ring = lambda own, sizes, group: (sent.extend(sizes[:-1]), ring(own, sizes, group))[1]
    try:
        attend()
    finally:
        module.Ring = ring
    return sent


def packed_bytes(rank: int, where: Any, device: torch.device, starts: tuple[int, ...], options: dict) -> list[int]:
    """On a rank: sizes of the buffers of the ring."""
    import fp8attn.distributed.varlen as module

    problem = Problem(q_length=400, kv_length=400)
    return ring_bytes(module, lambda: attend_packed(rank, where, device, problem, starts, "contiguous", options))


def test_only_sequences_of_several_ranks_travel(ranks: Ranks) -> None:
    """Causal, four shards of 100 tokens: no sequence crosses an edge; one crosses one; one lies on all ranks."""
    token = 2 * 2 * 32 * 2  # bytes of K and V
    cases = ((0, 50, 100, 200, 300, 400), [0] * 4), ((0, 80, 120, 200, 300, 400), [20, 20, 0, 0]), ((0, 400), [300] * 4)
    for starts, tokens in cases:
        found = ranks.run(packed_bytes, 4, [(starts, dict(backend="reference", is_causal=True))] * 4)
        assert [sum(sizes) for sizes in found] == [token * count for count in tokens], starts


WRONG_PACKED: dict[str, tuple[tuple[Any, ...], str]] = {
    "starts": (((0, 400), (0, 399, 400)), "cu_seqlens is '1 sequences with the hash"),
    "an end": (((0, 401),) * 2, "cu_seqlens ends at 401; it must end at 400"),
    "no start": (((1, 400),) * 2, "cu_seqlens starts at 1; it must start at 0"),
    "a fall": (((0, 300, 200, 400),) * 2, "cu_seqlens falls from 300 to 200 at sequence 1"),
    "one number": (((0,),) * 2, "cu_seqlens has 1 numbers"),
    "floats": ((torch.zeros(2),) * 2, "cu_seqlens is torch.float32 of shape"),
    "text": (("01",) * 2, "cu_seqlens is '01'; it must be a sequence of ints"),
}


@pytest.mark.parametrize("name", WRONG_PACKED)
def test_wrong_starts_of_packed_sequences(ranks: Ranks, name: str) -> None:
    starts, message = WRONG_PACKED[name]
    problem = Problem(q_length=400, kv_length=400)
    found = ranks.outcomes(attend_packed, 2, [(problem, some, "contiguous", dict(backend="reference")) for some in starts])
    for one in found:
        with pytest.raises(Failed, match=message):
            raise one


def attend_wrongly(rank: int, where: Any, device: torch.device, what: str) -> None:
    """On a rank: packed operands that aren't right on rank 1."""
    q, k = torch.zeros(10, 2, 16, device=device), torch.zeros(10 - (what == "tokens" and rank), 2, 16, device=device)
    query: Any = fp8attn.quantize(q, cu_seqlens_q=torch.tensor([0, 10], dtype=torch.int32)) if what == "quantized" and rank else q
    context_parallel_varlen_sdpa(query if what != "text" or not rank else "q", k, k, (0, 20), group=where)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "what, message",
    [("tokens", "on rank 1: k has 9 tokens; it must have q's, 10"), ("quantized", "on rank 1: "), ("text", "on rank 1: q is a str; it must be a")],
)
def test_wrong_packed_operands(ranks: Ranks, what: str, message: str) -> None:
    first, second = ranks.outcomes(attend_wrongly, 2, [(what,)] * 2)
    assert (
        isinstance(first, Failed) and isinstance(second, Failed) and first.message.startswith(message) and first.kind in ("TypeError", "ValueError")
    )


def test_sinks_beside_rows_that_see_nothing() -> None:
    """Zeros and the sink; with a sink of -inf, as without one."""
    out, lse = torch.zeros(1, 2, 3, 4), torch.full((1, 2, 3), -math.inf)
    out[:, :, 2], lse[:, :, 2] = 1.0, 0.5
    found, found_lse = with_sinks(out, lse, torch.tensor([-math.inf, 2.0]))
    assert not found[:, :, :2].any() and torch.equal(found[:, 0, 2], out[:, 0, 2])
    assert torch.equal(found_lse[0, 0], lse[0, 0]) and found_lse[0, 1, :2].eq(2.0).all()
    torch.testing.assert_close(found[0, 1, 2, 0], torch.tensor(0.5).exp() / (torch.tensor(0.5).exp() + torch.tensor(2.0).exp()))


def decode(rank: int, where: Any, device: torch.device, problem: Problem, prompt: int, steps: tuple[int, ...], options: dict) -> list[tuple]:
    """On a rank: out and LSE of each step of some tokens behind a prompt, by a cache whose pages the ranks share; on the CPU."""
    q, k, v = problem.tensors(device)
    options = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    rows, heads = problem.batch, problem.kv_heads
    pages = -(-problem.kv_length // 128)
    cache = KVCache(rows, rows * pages, heads, problem.dim, problem.value_dim, dtype=problem.dtype, device=device)
    table = torch.arange(rows * pages, dtype=torch.int32, device=device).view(rows, pages)
    backend = options.get("backend", "auto")

    def whole_length(length: int) -> torch.Tensor:
        return torch.full((rows,), length, dtype=torch.int32, device=device)

    own = page_share(whole_length(prompt), group=where)
    keys, values = (page_shard(x[:, :, :prompt], group=where) for x in (k, v))
    assert keys.shape[2] == page_share(prompt, group=where) == int(own[0])
    cache.append(keys, values, PagedBatch(table, own), backend=backend)
    found, start = [], prompt
    for count in steps:
        tokens = slice(start, start + count)
        start += count
        batch: PagedBatch | PageShares = PagedBatch(table, whole_length(start))
        if count == 4:
            batch = PageShares.of(batch, count, group=where)
        some = context_parallel_paged_sdpa(
            q[:, :, tokens], cache, batch, (k[:, :, tokens], v[:, :, tokens]), group=where, return_lse=True, out_dtype=torch.float32, **options
        )
        found.append(tuple(x.cpu() for x in some))
    return found


DECODED = Problem(heads=4, kv_heads=2, q_length=420, kv_length=420, batch=2)
STEPS = 1, 4, 30, 1
"""Tokens of each call behind a prompt of 375: two steps end in page 2, one begins there and ends in page 3."""


@pytest.mark.parametrize("options", ({}, {"softcap": 2.0, "sinks": torch.tensor(SINKS)}), ids=("plain", "softcap and sinks"))
def test_pages_that_ranks_share(ranks: Ranks, options: dict) -> None:
    """The error of one rank, and the same bits on all ranks, also where a rank has no token."""
    exact, exact_lse = alone.__wrapped__(DECODED, is_causal=True, backend="reference", out_dtype=torch.float32, **options)
    for prompt in (375, 5):
        errors = []
        for n in (1, 2, 3):
            found = ranks.run(decode, n, [(DECODED, prompt, STEPS, dict(backend="modelled", **options))] * n)
            for other in found[1:]:
                assert all(torch.equal(x, y) for mine, its in zip(found[0], other, strict=True) for x, y in zip(mine, its, strict=True))
            rows = slice(prompt, prompt + sum(STEPS))
            out, lse = (torch.cat([step[i] for step in found[0]], 2) for i in range(2))
            errors.append(relative(out, exact[:, :, rows]))
            torch.testing.assert_close(lse, exact_lse[:, :, rows], rtol=2e-2, atol=5e-2)
        assert max(errors) < 1.15 * errors[0], errors


def test_shares_of_pages() -> None:
    """Pages are dealt in turns, and every token to one rank."""
    lengths = torch.arange(0, 1200)
    for count in (1, 2, 3, 5):
        owners = torch.arange(1200) // 128 % count
        for rank in range(count):
            expected = torch.cat([torch.zeros(1, dtype=torch.int64), (owners == rank).cumsum(0)])[:1200]
            assert torch.equal(of_pages(lengths, rank, count), expected) and of_pages(700, rank, count) == expected[700]


WRONG_PAGES: dict[str, tuple[dict[str, Any], str]] = {
    "softcap": ({"softcap": 3.0}, "softcap is 0.0 on rank 0 and 3.0 on rank 1"),
    "scale": ({"scale": "1"}, "scale is a str"),
    "check_ranks": ({"check_ranks": "never"}, "check_ranks is 'never'; it must be one of"),
    "sinks": ({"sinks": torch.zeros(3)}, "sinks has shape"),
}


def test_wrong_shares_of_pages(ranks: Ranks) -> None:
    """The error names what it is."""
    for what, message in WRONG_SHARES.items():
        (found,) = ranks.outcomes(share_wrongly, 1, [(what,)])
        assert isinstance(found, Failed) and found.message.startswith(message)


WRONG_SHARES = {
    "counts": "batch.counts is given; it must be None",
    "tokens": "tokens is 66; it must be an int from 1 to 65",
    "others": "on rank 0: batch is of 2 new tokens; it must be of query's, 1",
    "table": "batch is a Tensor; it must be a fp8attn.PagedBatch",
}


def share_wrongly(rank: int, where: Any, device: torch.device, what: str) -> None:
    """On a rank."""
    numbers = torch.tensor([10], dtype=torch.int32, device=device)
    batch: Any = PagedBatch(numbers[:, None], numbers, numbers if what == "counts" else None)
    tokens = {"tokens": 66, "others": 2}.get(what, 1)
    shares = PageShares.of(numbers if what == "table" else batch, tokens, group=where)  # type: ignore[arg-type]
    cache = KVCache(1, 1, 1, 16, device=device)
    try:
        context_parallel_paged_sdpa(torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16, device=device), cache, shares, group=where)
    except ValueError as error:
        raise ValueError(f"on rank {rank}: {error}") from error


@pytest.mark.parametrize("name", WRONG_PAGES)
def test_wrong_arguments_of_shared_pages(ranks: Ranks, name: str) -> None:
    changed, message = WRONG_PAGES[name]
    options = {"backend": "modelled", "check_ranks": "calls"}
    for one in ranks.outcomes(decode, 2, [(DECODED, 5, (1,), options), (DECODED, 5, (1,), options | changed)]):
        with pytest.raises(Failed, match=message):
            raise one


ALIGNED = Problem(heads=2, kv_heads=2, q_length=2048, kv_length=2048)


@pytest.mark.parametrize("recipe, causal", ((Recipe(), True), (PRECISE, False)), ids=("default causal", "precise full"))
def test_shards_of_whole_chunks_give_the_bytes_of_one_process(ranks: Ranks, recipe: Recipe, causal: bool) -> None:
    """Shards that begin at multiples of 512 tokens, and have more: the quantized bytes are the same. What is left is the order of float32
    additions, and P's rounding in the first key block of a shard, whose scores are relative to nothing before them."""
    options: dict[str, Any] = dict(is_causal=causal, recipe=recipe, backend="modelled", out_dtype=torch.float32)
    expected, expected_lse = alone(ALIGNED, **options)
    exact, _ = alone(ALIGNED, is_causal=causal, backend="reference", out_dtype=torch.float32)
    own = relative(expected, exact)
    for mode, bound in (("ring", own / 100), ("all_gather", own / 100), ("ulysses", 1e-6)):
        out, lse = parallel(ranks, 2, ALIGNED, mode=mode, **options)
        assert relative(out, expected) < bound, mode
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", (True, False), ids=("causal", "full"))
def test_outputs_of_parts_in_half_precision(ranks: Ranks, causal: bool) -> None:
    """The error of one process, whose output is rounded once, also where V's mean is 20 times as large as what varies."""
    problem = dataclasses.replace(ALIGNED, dtype=torch.float16, v_mean=20.0)
    exact, _ = alone(problem, is_causal=causal, backend="reference", out_dtype=torch.float32)
    expected, _ = alone(problem, is_causal=causal, backend="modelled")
    for mode in ("ring", "ulysses"):
        out, _ = parallel(ranks, 2, problem, mode=mode, sharding="zigzag", is_causal=causal, backend="modelled")
        assert out.dtype == torch.float16 and relative(out, exact) < 1.005 * relative(expected, exact)


GATHERED: dict[str, tuple[int, Problem, dict]] = {
    "plain": (2, ALIGNED, {}),
    "four ranks, two batches": (4, dataclasses.replace(ALIGNED, heads=4, q_length=600, kv_length=4096, batch=2), {"recipe": PRECISE}),
    "zigzag": (2, ALIGNED, {"sharding": "zigzag"}),
    "three ranks, softcap and sinks": (
        3, dataclasses.replace(ALIGNED, heads=6, kv_length=3 * 1024, q_length=5), {"softcap": 2.0, "sinks": torch.linspace(-1, 2, 6)}
    ),
    "a scale of V for all heads": (2, ALIGNED, {"recipe": Recipe(v="tensor", smooth_v=False)}),
    "means of queries": (2, ALIGNED, {"recipe": Recipe(smooth_q=True)}),
    "triton": (2, Problem(2, 2, 64, 2048, 32, 32), {"backend": "triton"}),
}  # fmt: skip
"""Full attention to gathered keys: ranks, problem and options."""


def gathers(rank: int, where: Any, device: torch.device, *arguments: Any) -> tuple[int, torch.Tensor, torch.Tensor]:
    """How often a rank gathers slots, and what `attend` returns."""
    from fp8attn.distributed import gathered

    count, gather = [0], gathered.start_gather_slots

    def counted(*given: Any) -> Any:
        count[0] += 1
        return gather(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathered, "start_gather_slots", counted)
        out, lse = attend(rank, where, device, *arguments)
    return count[0], out, lse


@pytest.mark.parametrize("name", GATHERED)
def test_gathered_keys_give_what_one_process_gives(ranks: Ranks, name: str) -> None:
    """Nothing is merged: what is left is how plain torch rounds products of other shapes. Some heads come first, the others behind them."""
    n, problem, options = GATHERED[name]
    sharding = options.get("sharding", "contiguous")
    options = {"backend": "modelled"} | {key: x for key, x in options.items() if key != "sharding"}
    expected = alone.__wrapped__(problem, **options)
    lengths, kv_lengths = (tuple(shard_lengths(x, n, sharding)) for x in (problem.q_length, problem.kv_length))
    found = ranks.run(gathers, n, [(problem, lengths, kv_lengths, sharding, options | {"mode": "all_gather"})] * n)
    assert [count for count, *_ in found] == [2] * n
    out, lse = (whole([one[i] for one in found], lengths, sharding) for i in (1, 2))
    assert relative(out, expected[0]) < (3e-3 if "means" in name else 1e-3 if sharding == "contiguous" else 0.02)
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=2e-3 if "means" in name else 1e-4 if sharding == "contiguous" else 1e-2)


def test_which_calls_attend_to_gathered_keys(ranks: Ranks) -> None:
    """As many whole blocks of keys on all ranks, all of them visible, and statistics of the sequence; else parts are merged."""
    small = dataclasses.replace(ALIGNED, q_length=32, kv_length=512)
    others: dict[str, tuple[Problem, dict]] = {
        "causal": (small, {"is_causal": True}),
        "window": (small, {"window": (5, 5)}),
        "no whole blocks": (dataclasses.replace(small, kv_length=514), {}),
        "one head": (dataclasses.replace(small, heads=2, kv_heads=1), {}),
        "scales of tokens": (small, {"recipe": Recipe(k="token")}),
        "statistics of shards": (small, {"statistics": "shard"}),
        "exact": (small, {"backend": "reference"}),
        "ring": (small, {"mode": "ring"}),
    }
    for name, (problem, options) in others.items():
        options = {"backend": "modelled", "mode": "all_gather"} | options
        lengths, kv_lengths = (tuple(shard_lengths(x, 2)) for x in (problem.q_length, problem.kv_length))
        found = ranks.run(gathers, 2, [(problem, lengths, kv_lengths, "contiguous", options)] * 2)
        assert [count for count, *_ in found] == [0, 0], name
    assert unsupported_gathered(FORMAT, (512, 384)) == "ranks have 384 to 512 keys; they must have as many"
    assert unsupported_gathered(FORMAT, (512, 512)) is None and unsupported_gathered(FORMAT, (512,)) == "there is one rank"


FORMAT = Format(1, 8, 8, 128, 128, torch.bfloat16, Recipe(), "cuda", True, False)


@given(rows=st.integers(0, 10**6), heads=st.integers(2, 64), n=st.integers(2, 8))
def test_the_first_heads_hide_the_transfer_of_the_others(rows: int, heads: int, n: int) -> None:
    """Attention to a head's keys takes rows · n, and its transfer HIDING_ROWS · (n - 1), in the time of one row's attention to a shard."""
    first = _first_heads(dataclasses.replace(FORMAT, q_heads=heads, kv_heads=heads), rows, n)
    assert 1 <= first < heads

    def hides(count: int) -> bool:
        return count * rows * n >= (heads - count) * HIDING_ROWS * (n - 1)

    assert hides(first) or first == heads - 1
    assert first == 1 or not hides(first - 1)


KINDS_OF_SHARDS = (
    (2, "ring", "zigzag"), (3, "ring", "contiguous"), (3, "all_gather", "zigzag"), (4, "ulysses", "contiguous"), ((2, 2), "ring", "zigzag"),
)  # fmt: skip


@pytest.mark.parametrize("n, mode, sharding", KINDS_OF_SHARDS, ids=str)
@pytest.mark.one_in(2)
def test_any_shards_have_the_error_of_one_process(ranks: Ranks, n: N, mode: str, sharding: str) -> None:
    """Within 8 %, and the same bits every time: blocks of K's scales and runs of V's feedback begin at other tokens, and parts of up to 512
    tokens have no feedback."""
    problem = Problem(q_length=601, kv_length=601)
    for causal in (False, True):
        exact, exact_lse = alone(problem, is_causal=causal, backend="reference", out_dtype=torch.float32)
        out, lse = alone(problem, is_causal=causal, backend="modelled", out_dtype=torch.float32)
        options: dict[str, Any] = dict(sharding=sharding, mode=mode, is_causal=causal, backend="modelled", out_dtype=torch.float32)
        found, found_lse = parallel(ranks, n, problem, **options)
        assert relative(found, exact) < 1.08 * relative(out, exact)
        assert relative(found_lse, exact_lse) < 1.2 * relative(lse, exact_lse)
    again, again_lse = parallel(ranks, n, problem, **options)
    assert torch.equal(found, again) and torch.equal(found_lse, again_lse)


@pytest.mark.parametrize("n, mode", ((2, "ring"), (4, "ulysses"), ((2, 2), "all_gather")), ids=str)
@pytest.mark.parametrize("recipe", (Recipe(), Recipe(smooth_q=True, v="tensor"), Recipe(smooth_k=False, k="tensor", smooth_v=False)), ids=str)
@pytest.mark.one_in(2)
def test_shards_with_statistics_of_their_own(ranks: Ranks, recipe: Recipe, n: N, mode: str) -> None:
    """The error of one process; the LSE has each shard's mean, which is large."""
    problem = Problem(q_length=500, kv_length=500)
    exact, exact_lse = alone(problem, is_causal=True, backend="reference", out_dtype=torch.float32)
    options: dict[str, Any] = dict(is_causal=True, recipe=recipe, backend="modelled", out_dtype=torch.float32)
    out, lse = alone(problem, **options)
    found, found_lse = parallel(ranks, n, problem, mode=mode, statistics="shard", **options)
    assert relative(found, exact) < 1.1 * relative(out, exact)
    assert relative(found_lse, exact_lse) < 1.3 * relative(lse, exact_lse)


RECIPES = {
    "precise": PRECISE,
    "Q smoothed": Recipe(smooth_q=True),
    "token": Recipe(k="token", q="block"),
    "head": Recipe(q="head", k="head", v="head"),
    "tensor, not smoothed": Recipe(q="tensor", k="tensor", v="tensor", smooth_k=False, smooth_v=False, rotate=0),
    "int8, tensor": Recipe(qk="int8", k="tensor", v="tensor"),
    "f16": Recipe(compute="f16"),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.one_in(2)
def test_recipes(ranks: Ranks, name: str) -> None:
    """Head dims whose rows are padded; fewer key/value heads than ranks of Ulysses; the output's default dtype."""
    problem = Problem(q_length=270, kv_length=270, dim=24, value_dim=40, dtype=torch.float16)
    recipe = RECIPES[name]
    exact, exact_lse = alone(problem, is_causal=True, backend="reference")
    out, lse = alone(problem, is_causal=True, recipe=recipe, backend="modelled")
    for n, mode in ((3, "ring"), (4, "ulysses"), ((2, 2), "ring")):
        found, found_lse = parallel(ranks, n, problem, mode=mode, is_causal=True, recipe=recipe, backend="modelled")
        assert found.dtype == torch.float16 and found_lse.dtype == torch.float32
        assert relative(found, exact) < 1.15 * relative(out, exact), (n, mode)
        assert relative(found_lse, exact_lse) < 1.3 * relative(lse, exact_lse)


@pytest.mark.parametrize("n, mode", ((3, "ring"), (2, "ulysses"), (4, "all_gather")), ids=str)
@pytest.mark.parametrize("backend", ("reference", "modelled"))
def test_a_token_that_is_not_finite_spoils_the_rows_that_see_it(ranks: Ranks, backend: str, n: N, mode: str) -> None:
    problem = Problem(nonfinite=(211,))
    for sharding in ("contiguous", "zigzag"):
        out, _ = parallel(ranks, n, problem, mode=mode, sharding=sharding, is_causal=True, backend=backend)
        bad = out.isnan()
        assert bool(bad[:, :, 211:].all()) and not bool(bad[:, :, :211].any())


def test_no_keys_and_no_queries(ranks: Ranks) -> None:
    for backend in ("reference", "modelled"):
        out, lse = parallel(ranks, 2, Problem(kv_length=0), mode="ring", backend=backend)
        assert not bool(out.any()) and bool((lse == -math.inf).all())
        for n, mode in ((2, "ulysses"), (3, "all_gather")):
            found = parallel(ranks, n, Problem(q_length=1), mode=mode, backend=backend, out_dtype=torch.float32)
            for x, y in zip(found, alone(Problem(q_length=1), backend=backend, out_dtype=torch.float32), strict=True):
                torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def test_the_kernels_in_the_interpreter(ranks: Ranks) -> None:
    """Triton's statistics, quantizer into a buffer, attention, and merging of outputs in half precision."""
    problem = Problem(heads=2, kv_heads=1, q_length=200, kv_length=200)
    for options in (dict(out_dtype=torch.float32), dict(sharding="zigzag", is_causal=True)):
        expected, expected_lse = parallel(ranks, 2, problem, mode="ring", backend="modelled", **options)
        out, lse = parallel(ranks, 2, problem, mode="ring", backend="triton", **options)
        assert out.dtype == expected.dtype and relative(out, expected) < 5e-3
        torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


def in_torch_s_ring(rank: int, where: Any, device: torch.device, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """On a rank: attention to its shard by torch's ring, with fp8attn.sdpa as its operation."""
    from torch.distributed.tensor.experimental import _attention

    lengths = tuple(shard_lengths(problem.q_length, where.size(), "zigzag"))
    q, k, v = (mine(x, lengths, "zigzag", rank) for x in problem.tensors(device))
    operation = functools.partial(fp8attn.sdpa, return_lse=True, backend="reference", out_dtype=torch.float32)
    out, lse = _attention._templated_ring_attention(where, 2, operation, q, k, v, is_causal=True)
    return out, lse


def test_torch_s_ring_takes_sdpa(ranks: Ranks) -> None:
    problem = Problem(heads=2, q_length=320, kv_length=320)
    found = ranks.run(in_torch_s_ring, 2, [(problem,)] * 2)
    expected = alone(problem, is_causal=True, backend="reference", out_dtype=torch.float32)
    lengths = tuple(shard_lengths(320, 2, "zigzag"))
    for i in range(2):
        torch.testing.assert_close(whole([one[i] for one in found], lengths, "zigzag"), expected[i], rtol=1e-4, atol=1e-4)


def test_the_kernels_of_packed_sequences_in_the_interpreter(ranks: Ranks) -> None:
    problem, starts = Problem(heads=2, kv_heads=1, q_length=160, kv_length=160), (0, 30, 140, 160)
    options: dict[str, Any] = dict(is_causal=True, out_dtype=torch.float32)
    expected, expected_lse = packed_parallel(ranks, 2, problem, starts, "zigzag", backend="modelled", **options)
    out, lse = packed_parallel(ranks, 2, problem, starts, "zigzag", backend="triton", **options)
    assert relative(out, expected) < 5e-3
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


def sent_bytes(rank: int, where: Any, device: torch.device, problem: Problem, options: dict) -> list[int]:
    """On a rank: sizes of the buffers that it passes on in the ring."""
    import fp8attn.distributed.context_parallel as module

    lengths, kv_lengths = ((length // where.size(),) * where.size() for length in (problem.q_length, problem.kv_length))
    return ring_bytes(module, lambda: attend(rank, where, device, problem, lengths, kv_lengths, "contiguous", options))


def test_half_the_bytes_of_bfloat16_travel(ranks: Ranks) -> None:
    problem = Problem(q_length=1024, kv_length=1024, dim=64, value_dim=64)
    exact, quantized = (ranks.run(sent_bytes, 2, [(problem, dict(mode="ring", backend=backend))] * 2) for backend in ("reference", "modelled"))
    assert all(sizes == [2 * 2 * 512 * 64 * 2] for sizes in exact)
    assert all(len(sizes) == 1 and 0.5 * exact[0][0] < sizes[0] < 0.505 * exact[0][0] for sizes in quantized)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "is_causal": ({"is_causal": True}, "is_causal is False on rank 0 and True on rank 2"),
    "scale": ({"scale": 0.25}, "scale is "),
    "mode": ({"mode": "all_gather"}, "mode is 'ring' on rank 0 and 'all_gather' on rank 2"),
    "recipe": ({"recipe": PRECISE}, "recipe is "),
    "sharding": ({"sharding": "zigzag"}, "sharding is "),
    "out_dtype": ({"out_dtype": torch.float32}, "out_dtype is "),
    "return_lse": ({"return_lse": False}, "return_lse is "),
    "backend": ({"backend": "modelled"}, "backend is "),
    "shape": ({"problem": Problem(heads=2)}, "heads of query is 4 on rank 0 and 2 on rank 2"),
    "head_dim": ({"problem": Problem(dim=64)}, "head_dim of query is 32 on rank 0 and 64 on rank 2"),
    "dtype": ({"problem": Problem(dtype=torch.float16)}, "dtype of query is 'torch.bfloat16' on rank 0 and 'torch.float16' on rank 2"),
    "window": ({"window": (64, 0)}, r"window is None on rank 0 and \[64, 0\] on rank 2"),
    "softcap": ({"softcap": 30.0}, "softcap is 0.0 on rank 0 and 30.0 on rank 2"),
    "sinks": ({"sinks": torch.zeros(4)}, "sinks is None on rank 0 and 'given' on rank 2"),
    "no window": ({"window": (-2, 0)}, r"window is \(-2, 0\); its numbers must be -1"),
    "error": ({"problem": Problem(dim=20)}, "query has head_dim 20; it must be a multiple of 8"),
    "half keys": ({"recipe": Recipe(recent=128)}, r"recipe keeps keys \(sinks=0, recent=128\); it must keep none"),
    "statistics": ({"statistics": "shard"}, "statistics is 'sequence' on rank 0 and 'shard' on rank 2"),
    "no mode": ({"mode": "star"}, "mode is 'star'; it must be one of"),
    "heads": ({"mode": "ulysses"}, "query has 4 heads; with Ulysses they must be a multiple of the 3 ranks"),
    "type": ({"scale": "1"}, "scale is a str; it must be a number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_ranks_that_disagree_all_get_the_error(ranks: Ranks, name: str) -> None:
    """One of three ranks has another argument, or a wrong one. Afterwards they work together again."""
    options = {"mode": "ring", "backend": "reference"}
    changed, message = dict(WRONG[name][0]), WRONG[name][1]
    problem = changed.pop("problem", Problem())
    lengths, sharding = (100, 100, 100), changed.pop("sharding", "contiguous")
    right, wrong = (Problem(), lengths, lengths, "contiguous", options), (problem, lengths, lengths, sharding, options | changed)
    found = ranks.outcomes(attend, 3, [right, right, wrong])
    assert all(isinstance(one, Failed) for one in found)
    with pytest.raises(Failed, match=message):
        raise found[0]
    with pytest.raises(Failed, match=message):
        raise found[2]
    assert found[0].message == found[1].message
    assert found[0].kind == ("Disagreement" if "rank 2" in message or message.endswith("is ") else found[2].kind)
    parallel(ranks, 3, Problem(), **options)


def attend_to_own(rank: int, where: Any, device: torch.device, length: int) -> None:
    """On a rank: as if so many tokens were its shard in zig-zag order."""
    x = torch.zeros(1, 1, length, 16, device=device)
    context_parallel_sdpa(x, x, x, group=where, sharding="zigzag", backend="reference")


def test_zigzag_shards_are_those_that_shard_makes(ranks: Ranks) -> None:
    for one in ranks.outcomes(attend_to_own, 2, [(100,), (200,)]):
        assert isinstance(one, Failed) and "query has [100, 200] tokens on the ranks; in zig-zag order it must have [150, 150]" in one.message


def exchanges(rank: int, where: Any, device: torch.device, check_ranks: str) -> int:
    """On a rank: how often three calls ask the others."""
    before, count = agreement.Gathering, []
    agreement.Gathering = lambda *arguments: (count.append(1), before(*arguments))[1]  # type: ignore[misc,assignment]
    try:
        for _ in range(3):
            attend(rank, where, device, Problem(), (200, 100), (200, 100), "contiguous", dict(check_ranks=check_ranks, backend="reference"))
    finally:
        agreement.Gathering = before  # type: ignore[misc]
    return len(count)


def test_how_often_ranks_ask_each_other(ranks: Ranks) -> None:
    assert ranks.run(exchanges, 2, [("calls",)] * 2) == [3, 3]
    assert ranks.run(exchanges, 2, [("shapes",)] * 2) == [1, 1]


def attend_to_lengths(rank: int, where: Any, device: torch.device, problem: Problem, lengths: tuple[int, ...], options: dict) -> torch.Tensor:
    """On a rank: its output, of so many of the first tokens."""
    q, k, v = (x[:, :, : lengths[rank]].contiguous() for x in problem.tensors(device))
    return context_parallel_sdpa(q, k, v, enable_gqa=True, **where_of(where), **options)  # type: ignore[return-value]


def test_another_rank_has_other_lengths_the_next_time(ranks: Ranks) -> None:
    """A rank that says the same as before begins with the answer that it got before, and begins again if the answer is another one."""
    options: dict[str, Any] = dict(backend="modelled", is_causal=True, out_dtype=torch.float32)
    for other in (700, 90, 700):
        problem = Problem(q_length=600 + other, kv_length=600 + other)
        expected = alone(problem, **options)
        for x, y in zip(parallel(ranks, 2, problem, lengths=(600, other), mode="ring", **options), expected, strict=True):
            assert relative(x, y) < 0.06
    options |= {"sharding": "zigzag", "mode": "ring"}
    for other, fits in ((100, False), (300, True), (100, False)):
        problem = Problem(q_length=300 + other, kv_length=300 + other)
        found = ranks.outcomes(attend_to_lengths, 2, [(problem, (300, other), options)] * 2)
        assert [isinstance(one, Failed) for one in found] == [not fits] * 2
        assert fits or all("in zig-zag order it must have [200, 200]" in one.message for one in found)


def absent(rank: int, where: Any, device: torch.device) -> None:
    """On rank 1: nothing. Rank 0 calls, and waits as long as its group does."""
    if rank == 0:
        attend(rank, where, device, Problem(), (150, 150), (150, 150), "contiguous", dict(backend="reference"))


def test_a_rank_that_does_not_come_is_an_error_within_the_timeout(ranks: Ranks) -> None:
    failed, nothing = ranks.outcomes(absent, "hasty", [()] * 2)
    assert isinstance(failed, Failed) and failed.kind in ("RuntimeError", "DistBackendError", "DistStoreError") and nothing is None


def told(rank: int, where: Any, device: torch.device) -> list[int]:
    """On a rank: what all say, by connections of its own, as for a group that has no CPU backend."""
    before, agreement.CPU = agreement.CPU, torch.device("meta")
    try:
        return [int(x) for _ in range(2) for x in agreement.Gathering(torch.tensor([rank]), where).wait()]
    finally:
        agreement.CPU = before


def test_groups_without_a_cpu_backend_agree_on_the_cpu(ranks: Ranks) -> None:
    for n in (2, 3):
        assert ranks.run(told, n, [()] * n) == [[*range(n), *range(n)]] * n


def round_trip(rank: int, where: Any, device: torch.device, length: int, sharding: str, dim: int) -> tuple[list[int], torch.Tensor]:
    x = torch.arange(length * 6, device=device).view(2, 3, length).movedim(2, dim)
    part = shard(x, group=where, dim=dim, sharding=sharding)
    return list(part.shape), unshard(part, group=where, dim=dim, sharding=sharding).cpu()


@pytest.mark.parametrize("sharding", ("contiguous", "zigzag"))
def test_unshard_is_the_inverse_of_shard(ranks: Ranks, sharding: str) -> None:
    for length, n, dim in ((13, 3, 2), (2, 4, 0), (16, 2, 1)):
        found = ranks.run(round_trip, n, [(length, sharding, dim)] * n)
        assert [shape[dim] for shape, _ in found] == shard_lengths(length, n, sharding)
        for _, x in found:
            assert torch.equal(x, torch.arange(length * 6).view(2, 3, length).movedim(2, dim))


def test_zigzag_is_balanced() -> None:
    """Work of a rank: pairs of a query and a key that it sees."""
    for total, n in ((4096, 2), (4096, 4), (1000, 3)):
        work = [
            sum(span.first + i + 1 for span in spans for i in range(span.length)) for spans in spans_of(shard_lengths(total, n, "zigzag"), "zigzag")
        ]
        assert max(work) < 1.01 * min(work)
    with pytest.raises(ValueError, match="sharding is 'striped'; it must be one of"):
        shard_lengths(8, 2, "striped")


CAUSAL = Visible(right=0)


def assert_pieces_make_the_mask(runs: list[Span], part: Spans, visible: Visible) -> None:
    """Every visible pair is in exactly one piece, no hidden one is, and no row is in two pieces."""
    rows, keys = ([run.first + i for run in some for i in range(run.length)] for some in (runs, part))
    left, right = (1000 if limit < 0 else limit for limit in (visible.left, visible.right))
    seen = [[-left <= key - row - visible.shift <= right for key in keys] for row in rows]
    expected = torch.tensor(seen, dtype=torch.int64).view(len(rows), len(keys))
    found = torch.zeros_like(expected)
    before = 0
    for piece in pieces(runs, part, visible):
        assert before <= piece.start < piece.stop <= len(rows) and 0 < piece.keys <= len(keys)
        assert (piece.window is not None) == visible.has_window and min(piece.window or (0,)) >= -1
        before, count = piece.stop, piece.stop - piece.start
        window = piece.window or reference.CAUSAL_WINDOW
        hidden = reference.hidden_keys(None, piece.causal, torch.arange(count), torch.arange(piece.keys), count, piece.keys, window)
        found[piece.start : piece.stop, : piece.keys] += ~hidden
    assert torch.equal(found, expected)


def test_pieces_make_the_mask() -> None:
    """Of one run of queries, or two, and one run of keys, or two, at every offset."""
    for queries, keys, first in itertools.product(range(5), range(5), range(9)):
        assert_pieces_make_the_mask([Span(first, queries)], (Span(4, keys),), CAUSAL)
        for gap in range(3):
            two = [Span(first, queries), Span(first + queries + gap, 2)]
            assert_pieces_make_the_mask(two, (Span(4, keys),), CAUSAL)
            assert_pieces_make_the_mask(two, (Span(1, keys), Span(1 + keys + gap, 3)), CAUSAL)


@pytest.mark.parametrize("n, q_length, kv_length", [*itertools.product((2, 3, 4), (1, 35, 72, 106, 108), (1, 24, 36, 70))])
def test_pieces_of_zigzag_shards_of_other_lengths_make_the_mask(n: int, q_length: int, kv_length: int) -> None:
    """Also where a run of queries sees a whole run of keys, and is as long as both of the rank's: 106 queries, 36 keys, 3 ranks."""
    of_queries, of_keys = (spans_of(shard_lengths(length, n, "zigzag"), "zigzag") for length in (q_length, kv_length))
    for queries, keys, shift in itertools.product(of_queries, of_keys, (0, kv_length - q_length)):
        assert_pieces_make_the_mask([*queries], keys, Visible(shift, right=0))


RUNS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), min_size=1, max_size=3)


def runs_of(gaps: list[tuple[int, int]]) -> list[Span]:
    """Spans by their lengths, and by the gaps before them."""
    runs, position = [], 0
    for gap, tokens in gaps:
        runs.append(Span(position + gap, tokens))
        position += gap + tokens
    return runs


@given(RUNS, RUNS, st.one_of(st.none(), st.integers(-12, 12)))
def test_pieces_of_several_runs_make_the_mask(queries: list[tuple[int, int]], keys: list[tuple[int, int]], shift: int | None) -> None:
    visible = Visible() if shift is None else Visible(shift, right=0)
    assert_pieces_make_the_mask(runs_of(queries), tuple(runs_of(keys)), visible)


@given(RUNS, st.tuples(st.integers(0, 12), st.integers(0, 9)), st.integers(-12, 12), st.integers(-1, 14), st.integers(-1, 14))
def test_pieces_in_a_window_make_the_mask(queries: list[tuple[int, int]], keys: tuple[int, int], shift: int, left: int, right: int) -> None:
    """Of several runs of queries and one of keys. Without a limit on the left, and none or 0 on the right, it is no window."""
    assert_pieces_make_the_mask(runs_of(queries), tuple(runs_of([keys])), Visible(shift, left, right))


@pytest.mark.parametrize("n", (2, 4))
def test_a_zigzag_rank_attends_once_to_the_keys_of_each_rank(n: int) -> None:
    """To its own with a causal mask; to the first half of those of earlier ranks; by its later half to those of later ones."""
    shards, rows = spans_of(shard_lengths(400 * n, n, "zigzag"), "zigzag"), 400
    for rank, other in itertools.product(range(n), range(n)):
        start, keys, causal = (0, rows, "top_left") if other == rank else (0, rows // 2, "none") if other < rank else (rows // 2, rows, "none")
        assert pieces(shards[rank], shards[other], CAUSAL) == [Piece(start, rows, keys, causal)]  # type: ignore[arg-type]


@pytest.mark.parametrize("by_kernel", (True, False), ids=("kernel", "plain"))
@given(count=st.integers(1, 2 * MOST_PARTS), seed=st.integers(0, 2**31), dtype=st.sampled_from((torch.float32, torch.float16)))
def test_the_accumulator_combines(by_kernel: bool, count: int, seed: int, dtype: torch.dtype, device: torch.device) -> None:
    """More sets than one kernel merges, of all rows or of some, in float64: rows that saw nothing, and rows that
    aren't numbers. Values lack means. In another dtype, float32's bits, rounded."""
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(count, 1, 2, 39, 5, generator=generator)
    lses = torch.randn(count, 1, 2, 39, generator=generator) * 20
    lses[torch.rand(lses.shape, generator=generator) < 0.2] = -math.inf
    outs[lses == -math.inf] = 0.0
    lses[0, 0, 0, 0] = outs[0, 0, 0, 0] = torch.nan
    outs, lses = outs.to(device), lses.to(device)
    v_mean = (torch.randn(1, 1 + seed // 2 % 2, 5, generator=generator) * 10).to(device) if seed % 3 else None
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "has_kernels", lambda _: by_kernel)
        for of in (torch.float32, dtype):
            total = Accumulator(torch.zeros(1, 2, 39, 8, device=device), 5, v_mean)
            for i in range(count):
                start, stop = (0, 39) if (i + seed) % 2 else (3, 37)
                lses[i, :, :, :start] = lses[i, :, :, stop:] = -math.inf
                outs[i, :, :, :start] = outs[i, :, :, stop:] = 0.0
                total.add(start, stop, outs[i, :, :, start:stop].clone(), lses[i, :, :, start:stop].clone())
            found.append(total.result(of))
    expected, expected_lse = reference.combine(outs.double(), lses.double())
    if v_mean is not None:
        expected += torch.where(expected_lse == -math.inf, 0.0, 1.0).unsqueeze(-1) * v_mean.unsqueeze(2).double()
    (out, lse), (rounded, same_lse) = found
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(rounded.nan_to_num(7.0), out.to(dtype).nan_to_num(7.0)) and torch.equal(lse.nan_to_num(7.0), same_lse.nan_to_num(7.0))


@pytest.mark.parametrize("by_kernel", (True, False), ids=("kernel", "plain"))
def test_rows_of_one_set_stay_where_they_are(by_kernel: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision: the first set's output is the result's memory, and rows that no other set has aren't touched. Without sets, zeros."""
    monkeypatch.setattr(ops, "has_kernels", lambda _: by_kernel)
    outs, lses = torch.randn(2, 1, 2, 50, 24, device=device).half(), torch.randn(2, 1, 2, 50, device=device)
    q = torch.zeros(1, 2, 50, 8, device=device)
    total, first = Accumulator(q, 24), outs[0].clone()
    total.add(0, 50, first, lses[0].clone())
    total.add(33, 50, outs[1, :, :, 33:], lses[1, :, :, 33:])
    out, lse = total.result(torch.float16)
    assert out.data_ptr() == first.data_ptr() and torch.equal(out[:, :, :33], outs[0, :, :, :33]) and torch.equal(lse[:, :, :33], lses[0, :, :, :33])
    expected, expected_lse = reference.combine(outs.double(), lses.double())
    torch.testing.assert_close(out[:, :, 33:].double(), expected[:, :, 33:], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse[:, :, 33:].double(), expected_lse[:, :, 33:], rtol=1e-5, atol=1e-5)
    nothing, no_lse = Accumulator(q, 24).result(torch.float16)
    assert nothing.dtype == torch.float16 and not bool(nothing.any()) and bool((no_lse == -math.inf).all())


@pytest.mark.gpu
def test_sets_of_many_rows_are_combined(device: torch.device) -> None:
    """Six sets of 4,096 rows, in every row and every time."""
    if device.type != "cuda":
        pytest.skip("needs a GPU: programs of the interpreter have one warp")
    outs, lses = torch.randn(6, 1, 4, 4096, 128, device=device), torch.randn(6, 1, 4, 4096, device=device) * 3
    expected, expected_lse = reference.combine(outs.double(), lses.double())
    for _ in range(5):
        total = Accumulator(torch.zeros(1, 4, 4096, 8, device=device), 128)
        for out, lse in zip(outs, lses, strict=True):
            total.add(0, 4096, out.clone(), lse.clone())
        out, lse = total.result()
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_buffers_hold_what_was_packed() -> None:
    form = Format(2, 4, 2, 24, 40, torch.bfloat16, Recipe(), "modelled", True, False)
    forms = [*form.forms_of([(Span(0, 5),), (Span(9, 70), Span(100, 60))]), Form((3,), torch.float32)]
    tensors = [torch.randn(one.shape).to(one.dtype) for one in forms]
    buffer = packed(tensors, forms)
    assert buffer.numel() == size_of(forms)
    for x, found, one in zip(tensors, unpacked(buffer, forms), forms, strict=True):
        assert torch.equal(x.view(torch.uint8), found.contiguous().view(torch.uint8))
        assert (found.data_ptr() - buffer.data_ptr()) % ALIGNMENT == 0
        assert not one.padded or found.stride(2) == 32


def test_statistics_that_travelled_are_joined_in_the_order_of_the_sequence() -> None:
    """Zig-zag ranks hold parts that aren't neighbours. The buffers are as long as every rank expects."""
    _, k, v = Problem(q_length=1, kv_length=2100, dtype=torch.float32).tensors()
    form = Format(1, 4, 2, 32, 32, k.dtype, Recipe(), "modelled", True, False)
    found = []
    for spans in spans_of(shard_lengths(2100, 2, "zigzag"), "zigzag"):
        own = [torch.cat([x[:, :, span.first : span.first + span.length] for span in spans], 2) for x in (k, v)]
        (buffer, _), forms = measured(*own, spans, 2100, form), form.statistics_forms(spans, 2100)
        assert buffer.numel() == size_of(forms)
        found += form.split_statistics(unpacked(buffer, forms), spans, 2100)
    expected, _ = quantize_kv(k, v, Recipe())
    assert torch.equal(joined_statistics(found, 2100, form).k_mean, expected.mean)  # type: ignore[arg-type]


def empty_like_quantized(x: Quantized) -> Quantized:
    """With x's statistics, rows and values of noise, and K's scales of noise."""
    noise = torch.randint(0, 120, x.data.shape, dtype=torch.uint8, device=x.device).view(x.data.dtype)
    return dataclasses.replace(x, data=noise, scale=x.scale if x.layout == "values" else torch.rand_like(x.scale))


@pytest.mark.parametrize(
    "recipe",
    (
        *(Recipe(), PRECISE, Recipe(v="tensor", k="token", smooth_k=False), Recipe(k="head")),
        pytest.param(Recipe(v="head", smooth_v=False), marks=pytest.mark.compiles),
    ),
    ids=str,
)
def test_statistics_of_parts_are_those_of_the_whole(device: torch.device, recipe: Recipe) -> None:
    """By definition and by kernels; the bytes of parts of whole chunks, longer than one, are those of the whole."""
    _, k, v = Problem(q_length=1, kv_length=1600, value_dim=16, nonfinite=(5,)).tensors(device)
    v[0, 1, 1100, 3] = torch.inf
    expected_k, expected_v = quantize_kv(k, v, recipe)
    for cuts in ((0, 1024, 1600), (0, 77, 700, 1600)):
        spans = list(itertools.pairwise(cuts))
        of_chunks = functools.partial(ops.chunk_statistics, k, recipe=recipe)
        of_parts = functools.partial(triton_quantize.statistics, device=device_of(device))
        for by, of_all in ((chunk_statistics, statistics), (of_chunks, of_parts)):
            parts = []
            for a, b in spans:
                chunks = by(v[:, :, a:b])
                parts.append(PartialStatistics(k_sample(k[:, :, a:b], a, 1600), chunks.sums, chunks.extremes))
            found = of_all(parts, 1600, recipe)
            if cuts[1] % TOKEN_CHUNK == 0:
                assert torch.equal(found.v_scale, expected_v.scale)
                assert found.v_mean is None or torch.equal(found.v_mean, expected_v.mean)
            torch.testing.assert_close(found.v_scale, expected_v.scale, rtol=1e-6, atol=0.0)
            assert found.k_mean is None or torch.equal(found.k_mean, expected_k.mean)
        for a, b in spans:
            key, value = quantize_kv(k[:, :, a:b], v[:, :, a:b], recipe, found)
            if cuts[1] % TOKEN_CHUNK == 0:
                if recipe.k != "head":  # a part's scale is that of its own keys
                    assert torch.equal(key.data.view(torch.uint8), expected_k.data[:, :, a:b].view(torch.uint8))
                rows, all_rows = rows_layout(value.data, b - a).view(torch.uint8), rows_layout(expected_v.data, 1600).view(torch.uint8)
                assert torch.equal(rows, all_rows[:, :, a:b])
            if b - a > TOKEN_CHUNK + 200 or cuts[1] == TOKEN_CHUNK * 2:
                continue  # the interpreter takes long
            by_key, by_value = (empty_like_quantized(x) for x in (key, value))
            careful = None if a else of_chunks(v[:, :, a:b]).careful
            ops.quantize_into(by_key, by_value, k[:, :, a:b], v[:, :, a:b], careful, recipe)
            for x, y in ((by_key.data, key.data), (by_value.data, value.data)):
                assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
            torch.testing.assert_close(by_key.scale, key.scale, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("backend", ("modelled", "triton", *(("cuda",) if GPU else ())))
def test_the_first_keys_of_a_part(backend: str, device: torch.device) -> None:
    """Values of further keys, that aren't zeros, change no bit."""
    problem = Problem(q_length=50, kv_length=300, dim=64, value_dim=64)
    q, k, v = problem.tensors(device)
    key, value = quantize_kv(k, v, Recipe())
    form = Format(1, 4, 2, 64, 64, q.dtype, Recipe(), "auto", True, False)
    part = Part((Span(0, 300),), dataclasses.replace(key, mean=None), value)
    for count, causal in itertools.product((128, 130), (False, True)):
        options: dict[str, Any] = dict(is_causal=causal, enable_gqa=True, return_lse=True, backend=backend)
        some_key, some_value = part.first_keys(count, form)
        assert isinstance(some_value, Quantized) and some_value.data.data_ptr() == value.data.data_ptr()
        alone = dataclasses.replace(some_value, data=some_value.data[..., : padded_length(count)].contiguous())
        for x, y in zip(fp8attn.sdpa(q, some_key, some_value, **options), fp8attn.sdpa(q, some_key, alone, **options), strict=True):
            assert torch.equal(x, y)


def wan(rank: int, where: Any, device: torch.device, degrees: dict[str, int], tokens: int, backend: str, min_keys: int) -> tuple[torch.Tensor, dict]:
    """On a rank: the output of a tiny Wan transformer, tokens sharded by diffusers, and the number of calls that fp8attn computed and of others."""
    import diffusers

    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32,
        num_layers=1, rope_max_seq_len=32,
    )  # fmt: skip
    model.eval().requires_grad_(False).to(device)
    inputs = {
        "hidden_states": torch.randn(1, 4, tokens, 8, 8, generator=torch.Generator().manual_seed(1)).to(device),
        "timestep": torch.tensor([1], device=device),
        "encoder_hidden_states": torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(2)).to(device),
    }
    report = fp8attn.integrations.diffusers.register(f"fp8attn_{backend}", min_keys=min_keys, backend=backend)  # type: ignore[arg-type]
    model.set_attention_backend(f"fp8attn_{backend}")
    if degrees:
        if device.type == "cpu":  # diffusers asks which accelerator is this rank's
            torch.accelerator.device_count = lambda: dist.get_world_size()  # type: ignore[method-assign]
        model.enable_parallelism(config=diffusers.ContextParallelConfig(**degrees))
    with torch.no_grad():
        out = model(**inputs, return_dict=False)[0]
    calls = {"fp8attn": report.replaced.total(), "others": sum(reasons.total() for reasons in report.fallbacks.values())}
    return out.cpu(), calls


DEGREES = (
    {"ring_degree": 2, "ulysses_degree": 2},
    pytest.param({"ring_degree": 4}, marks=pytest.mark.thorough),
    pytest.param({"ulysses_degree": 4}, marks=pytest.mark.thorough),
)


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_a_transformer_of_diffusers_by_one_line_more(ranks: Ranks, degrees: dict[str, int]) -> None:
    """Exactly; with FP8's error; and calls with few keys exactly, through diffusers' own templates."""
    pytest.importorskip("diffusers", reason="needs the package diffusers")
    ((expected, _),) = ranks.run(wan, 1, [({}, 2, "reference", 0)])
    for backend, min_keys, error in (("reference", 0, 1e-5), ("modelled", 0, 0.1), ("modelled", 10_000, 1e-5)):
        for out, calls in ranks.run(wan, 4, [(degrees, 2, backend, min_keys)] * 4):
            assert relative(out, expected) < error
            assert calls == ({"fp8attn": 0, "others": 2} if min_keys else {"fp8attn": 2, "others": 0})


def by_shards(rank: int, where: Any, device: torch.device, placed: dict[str, tuple], options: dict) -> tuple[torch.Tensor, ...]:
    """On a rank: attention of DTensors of a mesh (2, 2), whole."""
    problem = Problem(batch=3, q_length=40, kv_length=50)
    q, k, v = problem.tensors(device)
    mask = torch.arange(50, device=device) < torch.tensor([50, 20, 7], device=device).view(3, 1, 1, 1)
    tensors = {"query": q, "key": k, "value": v, "attn_mask": mask}
    tensors = {
        name: tensor if placed[name] is None else distribute_tensor(tensor, where, placed[name]) for name, tensor in tensors.items() if name in placed
    }
    found = fp8attn.sdpa(**tensors, enable_gqa=True, backend="reference", return_lse=True, **options)
    assert all(isinstance(x, DTensor) and x.placements == tensors["query"].placements for x in found)
    return tuple(x.full_tensor().cpu() for x in found)


BATCH, HEADS, ALL = Shard(0), Shard(1), Replicate()


@pytest.mark.parametrize("placements", ((BATCH, HEADS), (HEADS, BATCH), (ALL, HEADS), (BATCH, ALL)), ids=str)
def test_dtensors_sharded_by_batch_and_heads(ranks: Ranks, placements: tuple) -> None:
    """Grouped keys, three sequences on two ranks, and a mask of every sequence's keys."""
    problem = Problem(batch=3, q_length=40, kv_length=50)
    mask = torch.arange(50) < torch.tensor([50, 20, 7]).view(3, 1, 1, 1)
    of_mask = tuple(ALL if placement == HEADS else placement for placement in placements)
    of_scores = {"is_causal": True, "window": (9, 0), "softcap": 2.0}
    for options, own in (({}, {"attn_mask": of_mask}), ({"is_causal": True}, {}), (of_scores, {})):
        expected = fp8attn.sdpa(*problem.tensors(), mask if own else None, enable_gqa=True, backend="reference", return_lse=True, **options)
        placed = {"query": placements, "key": placements, "value": placements, **own}
        for found in ranks.run(by_shards, (2, 2), [(placed, options)] * 4):
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)


REFUSED = {
    "tokens": (
        {"query": (BATCH, Shard(2))},
        "ValueError",
        r"query has the placement .* along dimension 1 of the mesh; it must be Shard\(0\), Shard\(1\)",
    ),
    "unlike": ({"key": (BATCH, ALL)}, "ValueError", r"key has the placement .* along dimension 1 of the mesh; it must be query's, Shard\(1\)"),
    "plain": ({"value": None}, "TypeError", "value is a Tensor and query a DTensor; all three must be DTensors"),
    "mask": ({"attn_mask": None}, "TypeError", r"attn_mask is a Tensor of shape \(3, 1, 1, 50\); it must be a DTensor"),
    "mask unlike": ({"attn_mask": (ALL, ALL)}, "ValueError", r"attn_mask has the placement .* along dimension 0 of the mesh; it must be Shard\(0\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_dtensors_that_are_refused(ranks: Ranks, name: str) -> None:
    changed, kind, message = REFUSED[name]
    placed = dict.fromkeys(("query", "key", "value"), (BATCH, HEADS)) | changed
    for one in ranks.outcomes(by_shards, (2, 2), [(placed, {})] * 4):
        assert isinstance(one, Failed) and one.kind == kind and re.search(message, one.message)


def test_sinks_of_dtensors_are_refused(ranks: Ranks) -> None:
    placed = dict.fromkeys(("query", "key", "value"), (BATCH, HEADS))
    for one in ranks.outcomes(by_shards, (2, 2), [(placed, {"sinks": torch.zeros(4)})] * 4):
        assert isinstance(one, Failed) and one.kind == "ValueError" and one.message.startswith("sinks is a Tensor and query a DTensor")


LARGE = Problem(heads=8, kv_heads=4, q_length=8192, kv_length=8192, dim=128, value_dim=128)


def peer_count() -> int:
    """GPUs of the tests with NCCL."""
    return min(torch.cuda.device_count(), MOST)


@TWO_GPUS
@pytest.mark.gpu
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("recipe", (Recipe(), PRECISE), ids=("default", "precise"))
def test_gpus_have_the_error_of_one_gpu(gpus: Ranks, recipe: Recipe, causal: bool) -> None:
    """Every mode and sharding: within 1 % of one GPU's error, and the same bits every time. In zig-zag order, parts have the output's dtype."""
    exact, exact_lse = alone(LARGE, "cuda", is_causal=causal, backend="reference", out_dtype=torch.float32)
    for sharding, mode in itertools.product(("contiguous", "zigzag"), ("ring", "all_gather", "ulysses", "auto")):
        dtype = torch.float32 if sharding == "contiguous" else torch.bfloat16
        options: dict[str, Any] = dict(is_causal=causal, recipe=recipe, out_dtype=dtype)
        out, lse = alone(LARGE, "cuda", **options)
        n = 2 if mode == "ulysses" else peer_count()
        found, found_lse = parallel(gpus, n, LARGE, mode=mode, sharding=sharding, **options)
        assert relative(found, exact) < 1.01 * relative(out, exact), (sharding, mode)
        assert relative(found_lse, exact_lse) < 1.5 * relative(lse, exact_lse)
        again, again_lse = parallel(gpus, n, LARGE, mode=mode, sharding=sharding, **options)
        assert torch.equal(found, again) and torch.equal(found_lse, again_lse)


@TWO_GPUS
@pytest.mark.gpu
@pytest.mark.parametrize("name", ("plain", "two batches, float16", "softcap and sinks"))
def test_gpus_attend_to_gathered_keys(gpus: Ranks, name: str) -> None:
    """As one GPU does, but for tiles that CTAs share; the third call is a repeated one."""
    problem = dataclasses.replace(LARGE, batch=2, dtype=torch.float16, q_length=3000) if name.startswith("two") else LARGE
    of_scores = {"softcap": 5.0, "sinks": torch.linspace(-1, 2, LARGE.heads)} if "softcap" in name else {}
    expected = alone.__wrapped__(problem, "cuda", **{key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in of_scores.items()})
    n = peer_count()
    lengths, kv_lengths = (tuple(shard_lengths(x, n)) for x in (problem.q_length, problem.kv_length))
    for _ in range(3):
        found = gpus.run(gathers, n, [(problem, lengths, kv_lengths, "contiguous", {"mode": "all_gather"} | of_scores)] * n)
        assert [count for count, *_ in found] == [2] * n
        for x, y in zip((whole([one[i] for one in found], lengths, "contiguous") for i in (1, 2)), expected, strict=True):
            assert relative(x.float(), y.float()) < 1e-3


@TWO_GPUS
@pytest.mark.gpu
def test_gpus_of_uneven_shards(gpus: Ranks) -> None:
    problem = dataclasses.replace(LARGE, q_length=3001, kv_length=3001)
    lengths = tuple([1] + [0] * (peer_count() - 2) + [3000])
    for causal in (False, True):
        exact, _ = alone(problem, "cuda", is_causal=causal, backend="reference", out_dtype=torch.float32)
        out, _ = alone(problem, "cuda", is_causal=causal, out_dtype=torch.float32)
        for mode in ("ring", "all_gather"):
            found, _ = parallel(gpus, peer_count(), problem, lengths=lengths, mode=mode, is_causal=causal, out_dtype=torch.float32)
            assert relative(found, exact) < 1.02 * relative(out, exact)


@TWO_GPUS
@pytest.mark.gpu
@pytest.mark.parametrize("name", ("causal window", "softcap", "sinks"))
def test_gpus_have_windows_caps_and_sinks(gpus: Ranks, name: str) -> None:
    heads = LARGE.heads
    of_scores = {
        "causal window": dict(window=(1000, 0)),
        "softcap": dict(softcap=5.0),
        "sinks": dict(sinks=torch.linspace(-1, 2, heads, device="cuda")),
    }
    options: dict[str, Any] = of_scores[name] | dict(is_causal=True)
    exact, exact_lse = alone.__wrapped__(LARGE, "cuda", backend="reference", out_dtype=torch.float32, **options)
    out, lse = alone.__wrapped__(LARGE, "cuda", out_dtype=torch.float32, **options)
    options = {key: x.cpu() if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    for sharding, mode in (("contiguous", "ring"), ("zigzag", "ring"), ("zigzag", "ulysses")):
        n = 2 if mode == "ulysses" else peer_count()
        found, found_lse = parallel(gpus, n, LARGE, mode=mode, sharding=sharding, out_dtype=torch.float32, **options)
        assert relative(found, exact) < 1.02 * relative(out, exact), (sharding, mode)
        assert relative(found_lse, exact_lse) < 1.5 * relative(lse, exact_lse)


@TWO_GPUS
@pytest.mark.gpu
@pytest.mark.parametrize("name", PACKED_SCORES)
def test_gpus_of_packed_sequences(gpus: Ranks, name: str) -> None:
    """The error of one GPU, and the same bits every time."""
    problem, starts = LARGE, (0, 100, LARGE.q_length // 2 + 7, LARGE.q_length - 300, LARGE.q_length)
    options: dict[str, Any] = PACKED_SCORES[name] | dict(out_dtype=torch.float32)
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 2, problem.heads)
    on_gpu = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    exact, exact_lse = packed_alone(problem, starts, "cuda", backend="reference", **on_gpu)
    out, lse = packed_alone(problem, starts, "cuda", **on_gpu)
    for sharding in ("contiguous", "zigzag"):
        found, found_lse = packed_parallel(gpus, peer_count(), problem, starts, sharding, **options)
        assert relative(found, exact) < 1.02 * relative(out, exact), sharding
        assert relative(found_lse, exact_lse) < 1.5 * relative(lse, exact_lse)
        again, again_lse = packed_parallel(gpus, peer_count(), problem, starts, sharding, **options)
        assert torch.equal(found, again) and torch.equal(found_lse, again_lse)


@TWO_GPUS
@pytest.mark.gpu
def test_gpus_that_share_pages(gpus: Ranks) -> None:
    """The error of one GPU, and the same bits on all."""
    problem, prompt, steps = dataclasses.replace(LARGE, batch=3), 8000, (1, 4, 60, 1)
    exact, _ = alone.__wrapped__(problem, "cuda", is_causal=True, backend="reference", out_dtype=torch.float32)
    rows, errors = slice(prompt, prompt + sum(steps)), []
    for n in (1, peer_count()):
        found = gpus.run(decode, n, [(problem, prompt, steps, {})] * n)
        for other in found[1:]:
            assert all(torch.equal(x, y) for mine, its in zip(found[0], other, strict=True) for x, y in zip(mine, its, strict=True))
        errors.append(relative(torch.cat([step[0] for step in found[0]], 2), exact[:, :, rows]))
    assert errors[1] < 1.05 * errors[0], errors


@TWO_GPUS
@pytest.mark.gpu
def test_gpus_that_disagree_all_get_the_error(gpus: Ranks) -> None:
    lengths, problem = (4096, 4096), LARGE
    found = gpus.outcomes(attend, 2, [(problem, lengths, lengths, "contiguous", {"is_causal": rank == 1}) for rank in range(2)])
    assert all(isinstance(one, Failed) and one.message.startswith("is_causal is False on rank 0 and True on rank 1") for one in found)
    parallel(gpus, 2, problem)


@TWO_GPUS
@pytest.mark.gpu
def test_gpus_shard_and_unshard(gpus: Ranks) -> None:
    for shape, x in gpus.run(round_trip, 2, [(13, "zigzag", 2)] * 2):
        assert shape[2] in (6, 7) and torch.equal(x, torch.arange(13 * 6).view(2, 3, 13))
