"""Problems of packed sequences of different lengths, and each of their sequences alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from fp8attn import Quantized, Recipe, prepare
from fp8attn.call import Call, Varlen
from fp8attn.device import device_of
from fp8attn.ops import quantized_of
from fp8attn.quantization import sequences_of
from fp8attn.recipe import ComputeType, Packed, ProductType
from fp8attn.triton import varlen
from fp8attn.validate import VarlenArguments, check_varlen
from fp8attn.varlen_ops import forward_by


@dataclass(frozen=True)
class Ragged:
    """A problem. Between sequences and behind the last one, tensors hold NaN.

    Attributes:
        lengths: (queries, keys) of each sequence.
        unused: keys of each sequence that lie in its part of the tensor, but don't exist: seqused_k.
        behind: tokens behind the last sequence.
    """

    lengths: tuple[tuple[int, int], ...]
    unused: int
    behind: int
    kv_heads: int
    group: int
    dim: int
    value_dim: int
    dtype: torch.dtype
    is_causal: bool
    window: tuple[int, int] | None
    softcap: float
    sinks: bool
    qk: ProductType
    k_granularity: str
    compute: ComputeType
    seed: int

    @property
    def recipe(self) -> Recipe:
        return Recipe(qk=self.qk, k=self.k_granularity, compute=self.compute)  # type: ignore[arg-type]

    @property
    def spans(self) -> tuple[list[slice], list[slice]]:
        """The tokens of each sequence, in q and in k."""
        q_starts = [0, *itertools.accumulate(q for q, _ in self.lengths)]
        k_starts = [0, *itertools.accumulate(k + self.unused for _, k in self.lengths)]
        pairs = zip(q_starts, k_starts, self.lengths, strict=False)
        parts = [(slice(q, q + q_length), slice(k, k + k_length)) for q, k, (q_length, k_length) in pairs]
        return [q for q, _ in parts], [k for _, k in parts]

    def starts(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """cu_seqlens_q, cu_seqlens_k and seqused_k."""
        q = [0, *itertools.accumulate(q for q, _ in self.lengths)]
        k = [0, *itertools.accumulate(k + self.unused for _, k in self.lengths)]
        used = torch.tensor([k for _, k in self.lengths], dtype=torch.int32, device=device) if self.unused else None
        return *(torch.tensor(x, dtype=torch.int32, device=device) for x in (q, k)), used  # type: ignore[return-value]

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v. What a sequence holds depends on its own number and length only."""
        spans, heads = self.spans, self.kv_heads
        found = []
        for number, (of, count, dim) in enumerate(((0, heads * self.group, self.dim), (1, heads, self.dim), (1, heads, self.value_dim))):
            rows = max((x.stop for x in spans[of]), default=0) + self.unused * of + self.behind
            x = torch.full((rows, count, dim), torch.nan)
            for i, span in enumerate(spans[of]):
                generator = torch.Generator().manual_seed(self.seed + 3 * i + number)
                x[span] = torch.randn(span.stop - span.start, count, dim, generator=generator) * (1 + i / 4) + number
            found.append(x.to(device, self.dtype))
        return tuple(found)  # type: ignore[return-value]

    def options(self, device: torch.device) -> dict:
        """Keyword arguments of varlen_sdpa, and of sdpa with `causal_alignment="bottom_right"`."""
        sinks = torch.randn(self.kv_heads * self.group, generator=torch.Generator().manual_seed(self.seed)).to(device) if self.sinks else None
        return dict(is_causal=self.is_causal, window=self.window, softcap=self.softcap, sinks=sinks, recipe=self.recipe)

    def mask(self, sequence: int, device: torch.device) -> torch.Tensor:
        """The keys that the rows of a sequence see, by their definition: bool (Sq, Sk)."""
        rows, keys = self.lengths[sequence]
        distance = torch.arange(keys, device=device) - (torch.arange(rows, device=device) + keys - rows)[:, None]
        left, right = (-1, -1) if self.window is None else self.window
        right = 0 if self.is_causal else right
        return (distance >= (-left if left >= 0 else -(1 << 40))) & (distance <= (right if right >= 0 else 1 << 40))


SIDES = (-1, 0, 1, 20, 64, 150, 10_000)
LENGTHS = st.one_of(st.just(0), st.integers(1, 20), st.integers(21, 200), st.sampled_from((64, 127, 128, 129)))

any_ragged = st.builds(
    Ragged,
    lengths=st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=4).map(tuple),
    unused=st.sampled_from((0, 0, 5)),
    behind=st.sampled_from((0, 3)),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from((1, 2)),
    dim=st.sampled_from((64, 40, 128)),
    value_dim=st.sampled_from((64, 24, 96)),
    dtype=st.sampled_from((torch.float32, torch.float16)),
    is_causal=st.booleans(),
    window=st.one_of(st.none(), st.none(), st.tuples(st.sampled_from(SIDES), st.sampled_from(SIDES))),
    softcap=st.sampled_from((0.0, 0.0, 3.0)),
    sinks=st.booleans(),
    qk=st.sampled_from(("e4m3", "e4m3", "int8")),
    k_granularity=st.sampled_from(("block", "block", "token")),
    compute=st.sampled_from(("e4m3", "e4m3", "f16")),
    seed=st.integers(0, 2**31),
)

TYPICAL = Ragged(
    ((70, 130), (0, 5), (3, 0), (1, 200), (130, 70)), 0, 3, 2, 2, 64, 64, torch.float32, True, None, 0.0, False, "e4m3", "block", "e4m3", 0
)
"""A problem with sequences of all kinds."""


def like(case: Ragged, first: Ragged) -> Ragged:
    """`case` with the properties that kernels are compiled for of `first`."""
    window = first.window if None in (case.window, first.window) else case.window
    return replace(first, lengths=case.lengths, unused=case.unused if first.unused else 0, behind=case.behind, seed=case.seed, window=window)


PLAIN = replace(TYPICAL, unused=5, dtype=torch.float16, is_causal=False)

KINDS = (
    PLAIN,
    replace(PLAIN, dim=128, value_dim=128, is_causal=True),
    replace(PLAIN, dim=128, value_dim=64, window=(20, 0), qk="int8", kv_heads=1, group=1, sinks=True),
    replace(PLAIN, dim=128, value_dim=128, softcap=3.0, window=(64, 20), sinks=True),
    replace(PLAIN, dim=40, value_dim=24, dtype=torch.float32, unused=0, qk="int8", k_granularity="token"),
    replace(PLAIN, value_dim=96, compute="f16", is_causal=True, softcap=3.0),
)
"""What problems of the default tier on a GPU are like."""


def head_first(x: torch.Tensor, span: slice) -> torch.Tensor:
    """A sequence of a packed tensor (T, H, D) as (1, H, S, D)."""
    return x[span].transpose(0, 1).unsqueeze(0)


def varlen_call(quantized: tuple[Quantized, Quantized, Quantized], floats: torch.Tensor, options: dict) -> Call:
    """The `Call` that backends get for packed operands.

    Args:
        floats: q (T, H, D) before it was quantized.
        options: of varlen_sdpa.
    """
    q, k, v = quantized
    checked = check_varlen(VarlenArguments(floats, k, v, q.packed.cu_seqlens if q.packed else None, None, out_dtype=torch.float32, **options))
    prepared = prepare.Prepared(q, k, v, checked, options["recipe"])
    found: list[Call] = []

    def keep(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        found.append(call)
        return call.q, call.q

    forward_by(keep)(*prepare.call_from(prepared, True).arguments)
    return found[0]


def alone(call: Call) -> Iterator[tuple[slice, Call]]:
    """The rows of each sequence of a call of packed operands, and the call of the sequence alone."""
    assert call.varlen is not None
    scales = call.q_scale if call.q_scale is not None else torch.empty(call.q.shape[:3])
    _, *quantized = quantized_of(replace(call, q_scale=scales))
    for i, ((begin, length), k, v) in enumerate(zip(call.varlen.q.spans(), *map(sequences_of, quantized), strict=True)):
        rows = slice(begin, begin + length)
        q, q_scale = call.q[:, :, rows], None if call.q_scale is None else call.q_scale[:, :, rows]
        mean_scores = None if call.mean_scores is None else call.mean_scores[:, :, rows].contiguous()
        yield (
            rows,
            replace(
                call, q=q, q_scale=q_scale, k=k.data, k_scale=k.scale, v=v.data.contiguous(), v_scale=v.scale, v_mean=v.mean,
                kv_length=k.length, mean_scores=mean_scores, lse_mean=None if call.lse_mean is None else call.lse_mean[i : i + 1], varlen=None,
            ),
        )  # fmt: skip


def same_lse(found: torch.Tensor, expected: torch.Tensor, one: Call) -> bool:
    """Whether the LSE has the bits of the sequence alone.

    Alone, a sequence without keys isn't launched, and its LSE is the sink itself. A kernel's is rounded in base 2.
    """
    return torch.equal(found, expected) if one.kv_length > 0 else torch.allclose(found, expected, rtol=1e-6, atol=1e-6)


def call_of_lengths(q: Packed, k: Packed, causal: str, window: tuple[int, int], longest: int | None = None, sharing: int = 1) -> Call:
    """A call of packed sequences of one key/value head, of which all but lengths is made up."""
    x, y = (torch.empty(1, heads, n.tokens, 16, device=n.cu_seqlens.device) for n, heads in ((q, sharing), (k, 1)))
    lengths = Varlen(q, k, *((q.tokens, k.tokens) if longest is None else (longest, longest)))
    return Call(
        x, None, 1, y, y, 128, y, y, None, None, None, k.tokens, 1.0, causal, "e4m3", None, torch.float32, False, window, varlen=lengths,
    )  # type: ignore[arg-type]  # fmt: skip


def table(
    q: Packed, k: Packed, rows: int, causal: str, window: tuple[int, int], device: torch.device, sharing: int = 1, units: int | None = None
) -> torch.Tensor:  # fmt: skip
    """The table of tiles that attention kernels get. They know no more of a call than its lengths and heads."""
    found = varlen.table_of(call_of_lengths(q, k, causal, window, sharing=sharing), rows, device_of(device), units)
    assert found is not None
    return found.cpu()
