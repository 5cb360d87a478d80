"""torch.compile and torch.export: one graph for all lengths, batch sizes and scales, of every backend, with the bits of eager calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import GPU
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

import fp8attn
from fp8attn import Recipe

COMPILER = "inductor" if GPU else "aot_eager"
"""Without a GPU there may be no C++ compiler; what is under test, tracing with fake tensors, is the same."""

BACKENDS = ("auto", "triton", "cuda", "modelled") if GPU else ("auto", "modelled")
SHAPES = [(3, 70, 200, 0.1), (5, 71, 201, 0.2), (7, 300, 90, 0.3), (6, 33, 129, 0.11), (9, 130, 500, 0.5)]
"""Batch, lengths and scale; the first two make all of them dynamic."""

OPTIONS: dict[str, dict] = {
    "plain": {},
    "lse": {"return_lse": True},
    "causal": {"is_causal": True, "causal_alignment": "bottom_right"},
    "smoothed": {"recipe": Recipe(smooth_q=True)},
}


def inputs(device: torch.device, batch: int, q_length: int, kv_length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    shapes = ((batch, 4, q_length, 64), (batch, 2, kv_length, 64), (batch, 2, kv_length, 48))
    return tuple(torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes)  # type: ignore[return-value]


def assert_same(actual, expected) -> None:
    for x, y in zip(actual if isinstance(actual, tuple) else (actual,), expected if isinstance(expected, tuple) else (expected,), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.one_in(2)
def test_one_graph_for_all_lengths_scales_and_batches(device: torch.device, backend: str, options: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(COMPILER)

    def attention(q, k, v, scale):
        return fp8attn.sdpa(q, k, v, scale=scale, enable_gqa=True, backend=backend, **OPTIONS[options])

    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    graphs = []
    for batch, q_length, kv_length, scale in SHAPES:
        operands = inputs(device, batch, q_length, kv_length)
        assert_same(compiled(*operands, scale), attention(*operands, scale))
        graphs.append(counter.frame_count)
    # the first call is compiled as it is, the second for all; where torch makes a size dynamic only once it has changed, one more
    assert graphs[-1] == graphs[1] == 2


def test_a_scale_that_is_not_finite_is_refused_by_a_graph_for_any(device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v, scale: fp8attn.sdpa(q, k, v, scale=scale, enable_gqa=True), fullgraph=True, backend=COMPILER)
    operands = inputs(device, 3, 70, 200)
    for scale in (0.1, 0.2):
        compiled(*operands, scale)
    with pytest.raises(ValueError, match="softmax_scale is nan; it must be a finite number"):
        compiled(*operands, float("nan"))


def test_recipes_are_told_apart(device: torch.device) -> None:
    """Also where they are objects that the library has under names of its own."""
    torch._dynamo.reset()
    operands = inputs(device, 3, 70, 200)

    def attention(q, k, v, first, second):
        return [fp8attn.sdpa(q, k, v, enable_gqa=True, backend="modelled", recipe=recipe) for recipe in (first, second)]

    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    coarse, fine = Recipe(q="tensor"), Recipe(k="token")
    for recipes in ((coarse, fp8attn.PRECISE), (coarse, fine), (fp8attn.PRECISE, coarse), (Recipe(), fine)):
        for actual, expected in zip(compiled(*operands, *recipes), attention(*operands, *recipes), strict=True):
            assert_same(actual, expected)


def test_keys_quantized_before_are_compiled(device: torch.device) -> None:
    torch._dynamo.reset()
    q, k, v = inputs(device, 3, 70, 200)
    keys, values = fp8attn.quantize(None, k, v)

    def attention(q):
        return fp8attn.sdpa(q, keys, values, enable_gqa=True)

    assert_same(torch.compile(attention, fullgraph=True, backend=COMPILER)(q), attention(q))


def test_autocast_is_compiled(device: torch.device) -> None:
    torch._dynamo.reset()
    operands = tuple(x.float() for x in inputs(device, 3, 70, 200))

    def attention(q, k, v):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return fp8attn.sdpa(q, k, v, enable_gqa=True)

    out = torch.compile(attention, fullgraph=True, backend=COMPILER)(*operands)
    assert out.dtype == torch.bfloat16
    assert_same(out, attention(*operands))


class Attention(torch.nn.Module):
    def __init__(self, backend: str, options: dict) -> None:
        super().__init__()
        self.backend, self.options = backend, options

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        return fp8attn.sdpa(q, k, v, enable_gqa=True, backend=self.backend, **self.options)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("backend", [pytest.param(name, marks=pytest.mark.thorough if GPU and name != "auto" else ()) for name in BACKENDS])
def test_exported_for_all_lengths(device: torch.device, backend: str, options: str) -> None:
    """Across 64 and 128 tokens, of which a group of queries and a block of keys have one scale each."""
    model = Attention(backend, OPTIONS[options])
    batch, q_length, kv_length = (Dim(name, min=2, max=8192) for name in ("batch", "q_length", "kv_length"))
    shapes = ({0: batch, 2: q_length}, {0: batch, 2: kv_length}, {0: batch, 2: kv_length})
    exported = export(model, inputs(device, 3, 70, 200), dynamic_shapes=shapes).module()
    for sizes in ((2, 33, 64), (5, 200, 700), (4, 128, 128)):
        operands = inputs(device, *sizes)
        assert_same(exported(*operands), model(*operands))


def test_an_exported_file_names_what_it_needs(device: torch.device, tmp_path: Path) -> None:
    """It runs where fp8attn is imported; where it isn't, the loader names the library whose operator it lacks."""
    file = tmp_path / "attention.pt2"
    operands = inputs(device, 3, 70, 200)
    torch.export.save(export(Attention("auto", {}), operands), file)
    assert_same(torch.export.load(file).module()(*operands), fp8attn.sdpa(*operands, enable_gqa=True))
    program = f"import torch; torch.export.load({str(file)!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "torch.ops.fp8attn." in done.stderr


@pytest.mark.parametrize("options", ("plain", "lse", "window"))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.one_in(2)
def test_one_graph_for_packed_sequences_of_all_lengths(device: torch.device, backend: str, options: str) -> None:
    """And for all numbers of sequences."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(COMPILER)
    kwargs: dict = {"plain": {}, "lse": {"return_lse": True, "is_causal": True}, "window": {"window": (50, 0), "softcap": 3.0}}[options]

    def attention(q, k, v, starts_q, starts_k, longest_q, longest_k):
        return fp8attn.varlen_sdpa(q, k, v, starts_q, starts_k, max_seqlen_q=longest_q, max_seqlen_k=longest_k, backend=backend, **kwargs)

    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    graphs = []
    for lengths in (((70, 130), (30, 20)), ((20, 50), (80, 100), (9, 2)), ((100, 150), (3, 4), (5, 60), (7, 70)), ((33, 44), (55, 66), (77, 88))):
        generator = torch.Generator().manual_seed(len(lengths))
        queries, keys = zip(*lengths, strict=True)
        shapes = ((sum(queries), 4, 64), (sum(keys), 2, 64), (sum(keys), 2, 48))
        q, k, v = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes)
        starts = [torch.tensor([0, *x], dtype=torch.int32, device=device).cumsum(0).int() for x in (queries, keys)]
        arguments = (q, k, v, *starts, max(queries), max(keys))
        assert_same(compiled(*arguments), attention(*arguments))
        graphs.append(counter.frame_count)
    assert graphs[-1] == graphs[1] == 2
