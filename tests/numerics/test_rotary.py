"""Rotary position embeddings of a batch's new tokens: the definition, and the kernel, which gives its bits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from conftest import GPU
from hypothesis import given
from hypothesis import strategies as st

import fp8attn
from fp8attn import PagedBatch
from fp8attn.ops import has_kernels

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Turning:
    """A batch, and what is turned. `counts`: new tokens of each row; `before`: tokens that were there."""

    counts: tuple[int, ...]
    before: tuple[int, ...]
    heads: tuple[int, int]
    dim: int
    pairs: int
    interleaved: bool
    dtype: torch.dtype
    float_angles: bool
    has_keys: bool
    seed: int

    def tensors(self, device: torch.device, *shape: int) -> list[torch.Tensor]:
        """Queries and keys (…, H, D), whose first dimensions are `shape`."""
        r = torch.Generator().manual_seed(self.seed)
        return [torch.randn(*shape, heads, self.dim, generator=r).to(device, self.dtype) for heads in self.heads]

    def angles(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        r = torch.Generator().manual_seed(self.seed + 1)
        angles = torch.rand(60, self.pairs, generator=r) * 7
        return tuple(x.to(device, torch.float32 if self.float_angles else self.dtype) for x in (angles.cos(), angles.sin()))  # type: ignore[return-value]

    def batch(self, device: torch.device, packed: bool) -> PagedBatch:
        def numbers(*x: int) -> torch.Tensor:
            return torch.tensor(x, dtype=torch.int32, device=device)

        table = torch.zeros(len(self.counts), 1, dtype=torch.int32, device=device)
        lengths = numbers(*(count + before for count, before in zip(self.counts, self.before, strict=True)))
        if not packed:
            return PagedBatch(table, lengths, numbers(*self.counts))
        return PagedBatch(table, lengths, cu_seqlens=numbers(0, *(sum(self.counts[: i + 1]) for i in range(len(self.counts)))))


@st.composite
def turnings(draw) -> Turning:
    rows = draw(st.integers(1, 4))
    dim = draw(st.sampled_from((16, 64, 72, 128)))
    counts, before = (tuple(draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows))) for most in (20, 45))
    heads, pairs = draw(st.sampled_from(((1, 1), (4, 2), (5, 1), (6, 3)))), draw(st.sampled_from((dim // 2, dim // 4, 1)))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))
    return Turning(counts, before, heads, dim, pairs, draw(st.booleans()), dtype, draw(st.booleans()), draw(st.booleans()), seed)


def turned(case: Turning, x: list[torch.Tensor], batch: PagedBatch, backend: str) -> list[torch.Tensor]:
    options = dict(interleaved=case.interleaved, backend=backend)
    found = fp8attn.rotary_embedding(x[0], x[1] if case.has_keys else None, batch, *case.angles(x[0].device), **options)  # type: ignore[type-var, arg-type]
    return [y for y in found if y is not None]


def by_complex_numbers(case: Turning, x: torch.Tensor, position: int) -> torch.Tensor:
    """One token (H, D), in float64."""
    cos, sin = (y[position].double() for y in case.angles(x.device))
    y = x.double().clone()
    first = slice(0, 2 * case.pairs, 2) if case.interleaved else slice(0, case.pairs)
    second = slice(1, 2 * case.pairs, 2) if case.interleaved else slice(case.pairs, 2 * case.pairs)
    new = torch.complex(y[:, first], y[:, second]) * torch.complex(cos, sin)
    y[:, first], y[:, second] = new.real, new.imag
    return y


@given(case=turnings())
def test_tokens_are_turned_by_their_positions(case: Turning, device: torch.device) -> None:
    """Beside complex numbers in float64; without angles NaN; tokens of no row as they were. Packed or not."""
    most, total = max(case.counts), sum(case.counts)
    given_ = [x.transpose(1, 2) for x in case.tensors(device, len(case.counts), most + 2)]
    found = turned(case, given_, case.batch(device, False), "modelled")
    rows = [(row, i) for row, count in enumerate(case.counts) for i in range(count)]
    flat = [torch.stack([x[row, :, i] for row, i in rows] + [x[0, :, most]]) for x in given_]
    packed = turned(case, flat, case.batch(device, True), "modelled")
    for x, out, of_packed, tokens in zip(given_, found, packed, flat, strict=False):
        assert out.is_contiguous() and of_packed.is_contiguous() and out.dtype == x.dtype
        for n, (row, i) in enumerate(rows):
            position = case.before[row] + i
            assert torch.equal(out[row, :, i].nan_to_num(9.0), of_packed[n].nan_to_num(9.0))
            if position >= 60:
                assert out[row, :, i, : 2 * case.pairs].isnan().all()
                continue
            expected = by_complex_numbers(case, x[row, :, i], position)
            torch.testing.assert_close(out[row, :, i].double(), expected, rtol=2 * torch.finfo(x.dtype).eps, atol=1e-6)
        assert torch.equal(of_packed[total], tokens[total])
        assert all(torch.equal(out[row, :, count:], x[row, :, count:]) for row, count in enumerate(case.counts))


@pytest.mark.skipif(not has_kernels(torch.device("cuda" if GPU else "cpu")), reason="needs a GPU or Triton's interpreter")
@given(case=turnings(), packed=st.booleans())
def test_the_kernel_has_the_bits_of_the_definition(case: Turning, packed: bool, device: torch.device) -> None:
    shape = (sum(case.counts) + 3,) if packed else (len(case.counts), max(case.counts) + 1)
    given_ = [x if packed else x.transpose(1, 2) for x in case.tensors(device, *shape)]
    batch = case.batch(device, packed)
    for mine, expected in zip(*(turned(case, given_, batch, backend) for backend in ("triton", "modelled")), strict=True):
        assert mine.is_contiguous() and mine.dtype == expected.dtype
        assert torch.equal(mine.nan_to_num(9.0), expected.nan_to_num(9.0))


@given(case=turnings())
def test_scores_depend_on_distances_alone(case: Turning, device: torch.device) -> None:
    """Of one query and one key, turned at positions as far apart, with angles that grow with the position."""
    angle = torch.arange(60, device=device)[:, None] / 30.0 ** (torch.arange(case.pairs, device=device) / case.pairs)
    q, k = (x[:, :1] for x in case.tensors(device, 1, 1))
    found = []
    for position in (20, 40):
        ends = torch.tensor([position + 1], dtype=torch.int32, device=device)
        table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        (query, _), (key, _) = (
            fp8attn.rotary_embedding(
                x.float().transpose(1, 2), None, PagedBatch(table, ends - back), angle.cos(), angle.sin(), interleaved=case.interleaved
            )
            for x, back in ((q, 0), (k, 13))
        )
        found.append((query * key[:, :1]).sum(-1))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_as_transformers_turns(device: torch.device) -> None:
    """Llama's own function, in float32."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = (torch.randn(2, heads, 5, 64, device=device) for heads in (4, 2))
    position = torch.tensor([[3, 4, 5, 6, 7], [20, 21, 22, 23, 24]], device=device)
    angle = torch.arange(40, device=device)[:, None] / 10000.0 ** (torch.arange(32, device=device) / 32)
    cos, sin = (torch.cat((x, x), -1)[position] for x in (angle.cos(), angle.sin()))
    batch = PagedBatch(torch.zeros(2, 1, dtype=torch.int32, device=device), torch.tensor([8, 25], dtype=torch.int32, device=device))
    for x, expected in zip(fp8attn.rotary_embedding(q, k, batch, angle.cos(), angle.sin()), llama.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(x, expected, rtol=1e-6, atol=1e-6)


def test_numbers_out_of_range_are_no_index(device: torch.device) -> None:
    """Counts above lengths, negative lengths and cu_seqlens that fall: no error, and rows that make sense are right."""
    q, cos = torch.randn(3, 2, 4, 16, device=device), torch.ones(9, 8, device=device)
    table = torch.zeros(3, 1, dtype=torch.int32, device=device)

    def numbers(*x: int) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.int32, device=device)

    backends = ("modelled", *(["triton"] if has_kernels(device) else []))
    batches = (PagedBatch(table, numbers(2, -5, 7), numbers(4, 4, 900)), PagedBatch(table, numbers(2, -5, 7), cu_seqlens=numbers(3, 1, -2, 99)))
    for batch in batches:
        x = q if batch.counts is not None else q[0].transpose(0, 1)
        found = [fp8attn.rotary_embedding(x, None, batch, cos, torch.zeros_like(cos), backend=backend)[0] for backend in backends]
        assert all(torch.equal(y, x) for y in found), "by angles of 0"


@pytest.mark.parametrize("rows, tokens", ((0, 3), (0, 0), (2, 0)))
@pytest.mark.parametrize("packed", (False, True))
def test_nothing_to_turn(rows: int, tokens: int, packed: bool, device: torch.device) -> None:
    """No sequences, or no tokens: what there is comes back as it was."""
    numbers = torch.zeros(rows + 1, dtype=torch.int32, device=device)
    batch = PagedBatch(numbers[:rows, None], numbers[:rows], cu_seqlens=numbers if packed else None)
    q = torch.randn((tokens, 2, 16) if packed else (rows, 2, tokens, 16), device=device)
    for backend in ("modelled", *(["triton"] if has_kernels(device) else [])):
        out, _ = fp8attn.rotary_embedding(q, None, batch, numbers.new_ones(9, 8).float(), numbers.new_ones(9, 8).float(), backend=backend)
        assert torch.equal(out, q)


@pytest.mark.gpu
def test_repeated_and_in_a_graph(device: torch.device) -> None:
    """Lengths are read on the device: they change between replays, and between calls that are repeated."""
    q, k = (torch.randn(3, heads, 2, 128, device=device, dtype=torch.bfloat16) for heads in (8, 2))
    angle = torch.rand(99, 64, device=device)
    batch = PagedBatch(torch.zeros(3, 1, dtype=torch.int32, device=device), torch.tensor([2, 50, 70], dtype=torch.int32, device=device))

    def both(backend: str) -> torch.Tensor:
        return torch.cat(fp8attn.rotary_embedding(q, k, batch, angle.cos(), angle.sin(), backend=backend), 1)

    both("auto")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = both("auto")
    for _ in range(4):
        batch.lengths.add_(3)
        graph.replay()
        expected = both("modelled")
        assert torch.equal(out, expected) and torch.equal(both("auto"), expected)
