"""The general CUDA quantizer and the kernel for the LSE: the definition's bytes, on a CPU too; which calls they take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emulation
import fp8attn
from forked import in_another_process
from fp8attn import Quantized, Recipe, ops, reference, rotation
from fp8attn.call import HALVES
from fp8attn.cuda import build, general_quantize, run
from fp8attn.cuda.build import BuildError
from fp8attn.device import ARCHITECTURES, INTERPRETER, device_of
from fp8attn.quantization import TOKEN_CHUNK, quantize
from fp8attn.recipe import ProductType
from quantizing import BAD_PLACES, MAGNITUDES, Problem, assert_same, cancelling, codes, normal
from strategies import FINITE, Case

H100 = ARCHITECTURES[90]

LENGTHS = (1, 31, 32, 127, 128, 129, 300, 512, 513, 1100)

RECIPES = tuple(
    Recipe(q=q, k=k, smooth_k=smooth_k, smooth_v=smooth_v, rotate=rotate, qk=qk)
    for q in general_quantize.ROW_GRANULARITIES
    for k in general_quantize.ROW_GRANULARITIES
    for smooth_k in (False, True)
    for smooth_v in (False, True)
    for rotate in (0, 16, 64, 256)
    for qk in ("e4m3", "int8")
)

Operands = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
Results = tuple[Quantized | None, Quantized | None, Quantized | None]
Quantizer = Callable[[Operands, Recipe], Results]

SENTINEL = 0x5A


class Surroundings:
    """Outputs in larger buffers, and whether anything around them was written."""

    def __init__(self) -> None:
        self.buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def put(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """An output like x, with the same strides, alignment and surroundings of SENTINEL."""
        if x is None:
            return None
        size = x.element_size()
        count = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        buffer = torch.full((256 + count * size,), SENTINEL, dtype=torch.uint8, device=x.device)
        inside = buffer[128 : 128 + count * size].view(x.dtype).as_strided(x.shape, x.stride())
        self.buffers.append((buffer, inside))
        return inside

    def surround(self, results: Results) -> Results:
        return tuple(
            None if x is None else dataclasses.replace(x, **{name: self.put(getattr(x, name)) for name in ("data", "scale", "mean")}) for x in results
        )  # type: ignore[return-value]

    def check(self) -> None:
        for buffer, inside in self.buffers:
            inside.view(torch.uint8).fill_(SENTINEL)
            assert (buffer == SENTINEL).all(), f"{int((buffer != SENTINEL).sum())} bytes differ around an output"


def by(library: build.Library) -> Quantizer:
    """Quantization by a library's kernels, which write nothing but their outputs."""

    def quantizer(operands: Operands, recipe: Recipe) -> Results:
        assert general_quantize.unsupported_call(*operands, recipe, H100) is None
        around = Surroundings()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "load_with", lambda *_: library)
            patch.setattr(general_quantize, "empty", lambda *x, original=general_quantize.empty: around.surround(original(*x)))
            results = run.quantize_any(*operands, recipe, H100)
        kept = tuple(
            None if x is None else dataclasses.replace(x, data=x.data.clone(), scale=x.scale.clone(), mean=None if x.mean is None else x.mean.clone())
            for x in results
        )
        around.check()
        return kept  # type: ignore[return-value]

    return quantizer


@pytest.fixture(scope="module")
def emulated() -> Quantizer:
    """fp8attn.cuda.run.quantize_any, emulated."""
    return by(emulation.general_quantizer())


def by_cuda(operands: Operands, recipe: Recipe) -> Results:
    first = operands[1] if operands[0] is None else operands[0]
    assert first is not None
    device = device_of(first.device)
    reason = general_quantize.unsupported_device(device)
    if reason is not None:
        pytest.skip(reason)
    assert general_quantize.unsupported_call(*operands, recipe, device) is None
    return run.quantize_any(*operands, recipe, device)


def check(quantizer: Quantizer, operands: Operands, recipe: Recipe) -> None:
    """Bit for bit."""
    for actual, expected in zip(quantizer(operands, recipe), quantize(*operands, recipe), strict=True):
        assert_same(actual, expected)


def moved(x: torch.Tensor, distance: int) -> torch.Tensor:
    """The same elements, `distance` elements further: rows that don't start at multiples of 16 bytes."""
    if distance == 0:
        return x
    buffer = torch.full((*x.shape[:3], x.shape[3] + 9), 7.0, dtype=x.dtype, device=x.device)
    buffer[..., distance : distance + x.shape[3]].copy_(x)
    return buffer[..., distance : distance + x.shape[3]]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A problem, how far each operand is moved, and which operands are given."""

    problem: Problem
    distances: tuple[int, int, int]
    given: str

    def operands(self, device: torch.device) -> Operands:
        tensors = (moved(x, n) for x, n in zip(self.problem.tensors(device), self.distances, strict=True))
        return tuple(x if name in self.given else None for name, x in zip("qkv", tensors, strict=True))  # type: ignore[return-value]


@st.composite
def problems(draw, most: int) -> Drawn:
    """Of lengths up to `most`."""
    dims, lengths = st.integers(2, 32).map(lambda n: 8 * n), st.one_of(st.sampled_from([n for n in LENGTHS if n <= most]), st.integers(1, most))
    dim = draw(dims)
    case = Case(
        batch=draw(st.integers(1, 2)), kv_heads=draw(st.integers(1, 2)), group=draw(st.integers(1, 2)), q_length=draw(lengths),
        kv_length=draw(lengths), head_dim=dim, value_dim=draw(st.one_of(st.just(dim), dims)), dtype=draw(st.sampled_from(general_quantize.DTYPES)),
        layout=draw(st.sampled_from(("bhsd", "bshd", "padded"))), mask="none", distribution=draw(st.sampled_from(FINITE)),
        recipe=draw(st.sampled_from(RECIPES)), scale=None, out_dtype=torch.float32, seed=draw(st.integers(0, 1000)),
    )  # fmt: skip
    problem = Problem(case, draw(st.sampled_from(MAGNITUDES)), draw(st.tuples(*[st.sampled_from(BAD_PLACES)] * 3)))
    return Drawn(problem, draw(st.tuples(*[st.sampled_from((0, 0, 1, 4, 7))] * 3)), draw(st.sampled_from(("qkv", "kv", "q"))))


@pytest.mark.anywhere
@emulation.emulates
@given(drawn=problems(1100))
def test_emulated_it_writes_the_bytes_of_the_definition(emulated: Quantizer, drawn: Drawn) -> None:
    check(emulated, drawn.operands(torch.device("cpu")), drawn.problem.case.recipe)


@pytest.mark.gpu
@given(drawn=problems(5000))
def test_writes_the_bytes_of_the_definition(device: torch.device, drawn: Drawn) -> None:
    check(by_cuda, drawn.operands(device), drawn.problem.case.recipe)


def of_shapes(dim: int, value_dim: int, length: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Operands:
    """Operands with non-finite numbers in several token chunks, slices of channels, and the last tokens."""
    q = normal((2, 4, max(length // 2, 1), dim), dtype, device)[0]
    k, v = normal((2, 2, length, dim), dtype, device)[0], normal((2, 2, length, value_dim), dtype, device)[1]
    q[0, 0, 0, 1], q[-1, -1, -1, dim - 1] = torch.nan, torch.inf
    k[0, 0, 3 % length, 5], k[0, 0, 99 % length, 7], k[0, -1, length - 1, 0], k[-1, 0, 300 % length, 2] = torch.nan, torch.inf, -torch.inf, torch.inf
    v[0, 0, 7 % length, 3], v[0, 0, 70 % length, value_dim - 2], v[0, -1, length - 1, value_dim - 1] = torch.inf, torch.nan, -torch.inf
    v[-1, -1, :, 9], v[-1, 0, 200 % length] = torch.nan, torch.nan
    return q, k, v


SHAPES = ((64, 64, 513), (72, 40, 300), (128, 128, 1100), (192, 128, 127), (256, 16, 600), (16, 256, 31), (96, 96, 1))


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("dim, value_dim, length", SHAPES)
@pytest.mark.parametrize("dtype", general_quantize.DTYPES)
@pytest.mark.one_in(3)
def test_emulated_what_is_not_finite(emulated: Quantizer, dtype: torch.dtype, dim: int, value_dim: int, length: int) -> None:
    """With every granularity, product type and rotation."""
    for i, recipe in enumerate(RECIPES):
        if i % 31 == length % 31:
            check(emulated, of_shapes(dim, value_dim, length, dtype), recipe)


@pytest.mark.gpu
@pytest.mark.parametrize("dim, value_dim, length", (*SHAPES, (128, 128, 8192), (64, 64, 20_000), (256, 256, 4097)))
@pytest.mark.parametrize("dtype", (torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.compiles), torch.float32))
def test_what_is_not_finite(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int, length: int) -> None:
    operands = of_shapes(dim, value_dim, length, dtype, device)
    for i, recipe in enumerate(RECIPES):
        if length < 2000 or i % 5 == length % 5:
            check(by_cuda, operands, recipe)


def wide_keys(length: int, dtype: torch.dtype, device: torch.device | str, shape: tuple[int, int, int]) -> Operands:
    """Keys of `wide`; values with means that are large enough to be removed."""
    batch, heads, dim = shape
    return None, wide((batch, heads, length, dim), dtype, device)[0], normal((batch, heads, length, dim), dtype, device)[1]


def wide(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    """Numbers whose sums depend on their order."""
    generator = torch.Generator().manual_seed(sum(shape))
    return tuple((x * 2.0 ** torch.randint(-20, 20, shape, generator=generator)).to(device, dtype) for x in normal(shape, torch.float32))


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("length", (1, 33, 512, 513, 4097, 20_000))
def test_emulated_the_order_of_sums(emulated: Quantizer, length: int) -> None:
    """Also of more token chunks than lanes, and of a rotation that rounds."""
    for rotate in (0, 16):
        check(emulated, wide_keys(length, torch.float32, "cpu", (1, 1, 16)), Recipe(k="token", rotate=rotate))


@pytest.mark.gpu
@pytest.mark.parametrize("length", (1, 33, 512, 513, 4097, 40_000))
@pytest.mark.parametrize("dim", (16, pytest.param(72, marks=pytest.mark.compiles), 128))
def test_the_order_of_sums(device: torch.device, dim: int, length: int) -> None:
    for dtype in general_quantize.DTYPES:
        for recipe in (Recipe(), Recipe(k="token", rotate=256), Recipe(qk="int8", rotate=16)):
            check(by_cuda, wide_keys(length, dtype, device, (2, 3, dim)), recipe)


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("granularity", general_quantize.ROW_GRANULARITIES)
def test_emulated_rotations_of_every_size(emulated: Quantizer, granularity: str) -> None:
    """Of numbers whose rotation rounds."""
    for i, dim in enumerate((16, 24, 40, 64, 96, 136, 192, 256)):
        for rotate in (0, 16, 64, 256):
            for qk in ("e4m3", "int8"):
                for dtype in (torch.float32, HALVES[i % 2]):
                    q = wide((1, 2, 33, dim), dtype)[0]
                    check(emulated, (q, None, None), Recipe(q=granularity, rotate=rotate, qk=qk))


def conversions_before_sm_89() -> list[emulation.Mutation]:
    """Conversions to and from e4m3 as convert.h has them for GPUs without the instructions, in place of the emulation's."""
    real, emulated = (build.SOURCES / "ptx" / "convert.h").read_text(), emulation.sources()["ptx/convert.h"]
    _, *branch = real.split("#else  // before sm_89")[1].split("#endif")[0].split("\n")
    pair = real[real.index("__device__ inline uint32_t pair") : real.index("#if __CUDA_ARCH__")]
    pair = f"{pair.split('{')[0]}{{ return uint32_t(high) << 16 | low; }}\n"
    first, last = emulated.index("// Rounds to nearest even."), emulated.index("inline uint32_t half2(")
    end = emulated.index("inline void halves_of_e4m3(")
    return [
        ("ptx/convert.h", emulated[end : emulated.index("}  // namespace fp8attn::ptx")], ""),
        ("ptx/convert.h", emulated[first:last], "\n".join((pair, *branch, ""))),
    ]


@pytest.mark.anywhere
@emulation.emulates
def test_emulated_conversions_before_sm_89() -> None:
    quantizer = by(emulation.general_quantizer(*conversions_before_sm_89()))
    for dtype in general_quantize.DTYPES:
        for length in (300, 700):
            check(quantizer, of_shapes(64, 40, length, dtype), Recipe(k="token"))
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).view(1, 1, -1, 64)
    check(quantizer, (halves, halves, halves), Recipe(rotate=0, smooth_k=False, smooth_v=False))


@pytest.mark.gpu
@pytest.mark.parametrize("dim, length", ((64, 300), (128, 2048), (72, 5000)))
@pytest.mark.parametrize("qk", ("e4m3", "int8"))
def test_same_bits_a_hundred_times(device: torch.device, qk: ProductType, dim: int, length: int) -> None:
    """A bit that moves is a race."""
    operands = of_shapes(dim, dim, length, torch.bfloat16, device)

    def all_bytes() -> torch.Tensor:
        found = by_cuda(operands, Recipe(qk=qk))
        return torch.cat([x.reshape(-1).view(torch.uint8) for y in found if y is not None for x in (y.data, y.scale, y.mean) if x is not None])

    first, different = all_bytes(), torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(100):
        different += (all_bytes() != first).sum()
    assert int(different) == 0


@pytest.mark.gpu
def test_in_a_graph_and_on_a_stream(device: torch.device) -> None:
    """Replayed with other numbers in the same place; twice at a time."""
    recipe, shape = Recipe(k="token", qk="int8"), (2, 4, 1500, 72)
    operands, others = (tuple(normal(shape, dtype, device)[0] for _ in range(3)) for dtype in (torch.float32, torch.float16))
    others = tuple(x.float() for x in others)
    expected, stream = quantize(*others, recipe), torch.cuda.Stream(device)
    by_cuda(operands, recipe)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = by_cuda(operands, recipe)
    for x, y in zip(operands, others, strict=True):
        x.copy_(y)
    for _ in range(3):
        graph.replay()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
        beside = by_cuda(operands, recipe)
    torch.cuda.synchronize(device)
    for actual in (captured, beside):
        for x, y in zip(actual, expected, strict=True):
            assert_same(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("dim, length", ((128, 300), *(pytest.param(*shape, marks=pytest.mark.compiles) for shape in ((64, 1500), (256, 700)))))
def test_quantizers_agree(device: torch.device, dim: int, length: int) -> None:
    """With that of keys and values for Hopper, with Triton's; and it is this one that quantizes where it should."""
    q, k, v = (normal((2, 4, length, dim), device=device)[i] for i in (0, 0, 1))
    reason = ops.unsupported_general_quantize(q, k, v, Recipe(k="token"))
    if reason is not None:
        pytest.skip(reason)
    for recipe in (Recipe(), Recipe(qk="int8"), Recipe(k="token", rotate=16)):
        for actual, expected in zip(ops.quantized(q, k, v, recipe), ops.quantized(q, k, v, recipe, by_triton=True), strict=True):
            assert actual is not None and expected is not None
            assert (codes(actual) != codes(expected)).float().mean() < 1e-4


def read_guarded() -> None:
    """Where nothing behind the operands can be read."""
    quantizer = by(emulation.general_quantizer())
    for dtype, shape, value_dim in zip(general_quantize.DTYPES, ((1, 2, 601, 72), (2, 1, 1100, 128), (1, 2, 33, 256)), (64, 72, 256), strict=True):
        q, k = (emulation.guarded(x) for x in normal(shape, dtype))
        v = emulation.guarded(normal((*shape[:3], value_dim), dtype)[1])
        check(quantizer, (q, k, v), Recipe(k="token"))
        check(quantizer, (q[..., 8:], k[..., 8:], v[..., 8:]), Recipe(q="block"))
        check(quantizer, (q[:, :, 1:, 1 : 9 if shape[3] < 17 else 17], None, None), Recipe())


@pytest.mark.anywhere
@emulation.emulates
def test_reads_nothing_behind_its_tensors() -> None:
    """In a process of its own, which such a read ends."""
    in_another_process("import test_general_quantize as test; test.read_guarded()")


MUTANTS = {
    "sums of all warps": ("general_quantize.cuh", "  __syncthreads();\n  const int mine", "  const int mine"),
    "token chunks of all warps": ("general_quantize.cuh", "  __syncthreads();\n  const int channel = slice", "  const int channel = slice"),
    "magnitudes of all warps": ("general_quantize.cuh", "    __syncthreads();\n    for (int i = 0; i < WRITER", "    for (int i = 0; i < WRITER"),
    "non-finite tokens of all slices": ("general_quantize.cuh", "  __syncthreads();\n  write_rows<", "  write_rows<"),
    "non-finite tokens before": ("general_quantize.cuh", "  __syncthreads();\n  if (word < BLOCK", "  if (word < BLOCK"),
    "lanes of a warp": ("general_quantize.cuh", "% 32 / (32 / OF_WARP) * MEASURER_WARPS", "% 32 / (32 / OF_WARP)"),
    "finite elements": ("general_quantize.cuh", "  if (!found.are_finite()) {", "  if (false) {"),
    "a sum that overflowed": ("general_quantize.cuh", "    found = {};\n", ""),
    "more token chunks than lanes": ("general_quantize.cuh", "sums[i] += more.sum[mine]", "sums[i] = more.sum[mine]"),
    "the sample": ("general_quantize.cuh", "item.of_keys ? sample_step(length) : 1", "1"),
    "rows that don't exist": ("general_quantize.cuh", "if (!exists || !team.has_channels) chunk.largest = 0.0f;", ""),
    "tokens that don't exist": ("general_grid.h", ": float2{NAN, NAN}", ": float2{}"),
    "feedback": ("general_grid.h", "block.sequence.length > TOKEN_CHUNK ? FEEDBACK : 0.0f", "FEEDBACK"),
    "runs": ("general_grid.h", "run(p.kv_length > TOKEN_CHUNK || packed ? RUN : GROUP)", "run(GROUP)"),
    "keys of non-finite tokens": ("general_quantize.cuh", "(block.is_key && exists && shared.nonfinite[1 + row / 32] >> row % 32 & 1)", "false"),
    "teams of a warp": ("general_quantize.cuh", "threadIdx.x / 32 * team.of_warp + team.number", "threadIdx.x / 32 * team.of_warp"),
    "lanes without a row": ("general_quantize.cuh", "if (!exists || !team.has_channels) return;", "if (!exists) return;"),
    "the largest of a team": ("tile/row_team.h", "if (member + distance < lanes) x = fmaxf(x, other);", "x = fmaxf(x, other);"),
    "int8's hidden rows": ("general_quantize.cuh", "hidden = has_nan ||", "hidden ="),
    "int8's marks of blocks with a NaN": ("general_quantize.cuh", "if (INT8 && nonfinite) shared.nonfinite[0] = 1;", ""),
    "int8's marks of tokens": ("general_quantize.cuh", "INT8 && block.is_key && hidden ? NAN : kept", "kept"),
    "the scale of queries": ("general_grid.h", "          float(max(p.part, 1))};", "          1.0f};"),
    "a mean that isn't rotated": ("general_quantize.cuh", "  rotation.rotate(y);\n  __syncwarp();", "  __syncwarp();"),
    "infinities": ("tile/row_team.h", "  if (found < INFINITE) return found;", "  return found;"),
    "signs of channels": ("tile/row_team.h", "sign_bit((team.channel + i) & (part - 1))", "sign_bit(i & (part - 1))"),
    "parts among lanes": ("tile/row_team.h", "distance * CHUNK < part; distance *= 2", "distance * CHUNK < part / 2; distance *= 2"),
    "negative zeros": ("tile/row_team.h", "    for (int i = 0; i < CHUNK; ++i) y[i] += 0.0f;", "    for (int i = 0; i < CHUNK; ++i) y[i] += -0.0f;"),
    "order of lanes": ("tile/quantize.h", "lanes[i] + lanes[i + N / 2]", "lanes[2 * i] + lanes[2 * i + 1]"),
    "staged rows of all threads": ("general_staged.cuh", "    __syncthreads();  // also: nobody reads", "    // nobody reads"),
    "magnitudes of all staged warps": ("general_staged.cuh", "    __syncthreads();  // the rows have been read, too", ""),
    "codes of all threads": ("general_staged.cuh", "    __syncthreads();\n    rows.store_codes", "    rows.store_codes"),
    "a block for each round": (
        "general_staged.cuh",
        "at(blockIdx.x + (round + STAGES) * gridDim.x",
        "at(blockIdx.x + (round + STAGES + 1) * gridDim.x",
    ),
    "means of the next head": ("general_staged.cuh", "&shared.mean[stage][channel + c]", "&shared.mean[0][channel + c]"),
    "rows that were hidden before": ("general_staged.cuh", "shared.hidden[(round + 1) % STAGES][threadIdx.x] = 0;", "{}"),
    "keys of non-finite tokens in staged blocks": ("general_staged.cuh", "if (tokens != 0) atomicOr(&hidden", "if (false) atomicOr(&hidden"),
    "all slices of tokens": ("general_staged.cuh", "slice * (sizeof(MeasuredChunk) / 4) + word", "word"),
    "staged rows that don't exist": ("general_staged.cuh", "    if (!exists) largest = 0.0f;\n", ""),
    "staged rows with a NaN": ("general_staged.cuh", "if (INT8 && exists && nonfinite) atomicOr", "if (false) atomicOr"),
    "marks of staged blocks": (
        "general_staged.cuh",
        "*block.scale = marked ? -kept : kept;\n    }\n    __sync",
        "*block.scale = kept;\n    }\n    __sync",
    ),
    "marks of staged tokens": ("general_staged.cuh", "INT8 && block.is_key && is_hidden ? NAN : kept", "kept"),
    "units of all groups": ("tile/staged_rows.h", "return group() + i * groups;", "return i;"),
    "signs of staged channels": ("tile/staged_rows.h", "(sign_bit(channel) ? -1.0f : 1.0f) / PART", "1.0f / PART"),
    "parts in a thread": ("tile/row_team.h", "distance < N; distance *= 2", "2 * distance < N; distance *= 2"),
    "order of additions": (
        "tile/row_team.h",
        "y[i] = low + high, y[i + distance] = low - high;",
        "y[i] = high + low, y[i + distance] = high - low;",
    ),
    "negative zeros of staged rows": ("tile/staged_rows.h", "  if constexpr (INT8 || PART == 0)", "  if constexpr (true)"),
    "negative zeros that aren't rotated": ("tile/staged_rows.h", "  if constexpr (INT8 || PART == 0)", "  if constexpr (INT8)"),
    "groups of a run": ("general_staged.cuh", "    wait_for_copies(group);\n", ""),
    "staged tokens that don't exist": (
        "general_staged.cuh",
        "bool careful = run.exists && grid.run > run.left;",
        "bool careful = false;",
    ),
    "staged tokens that aren't finite": ("general_staged.cuh", "careful |= nonfinite[", "careful |= 0 & nonfinite["),
    "codes of both channels": ("general_staged.cuh", "of_run + channel % 2 * p.padded", "of_run"),
    "unaligned rows": ("tile/channels.h", "bits[2 * i] | uint32_t(bits[2 * i + 1]) << 16", "bits[2 * i + 1] | uint32_t(bits[2 * i]) << 16"),
}
"""Lines of the kernels, and what is there without them."""


def test_mutants_change_what_is_there() -> None:
    emulation.assert_anchored(MUTANTS.values())


@pytest.mark.anywhere
@pytest.mark.thorough
@emulation.emulates
@pytest.mark.parametrize("name", MUTANTS)
def test_the_emulation_sees_what_is_missing(name: str) -> None:
    quantizer = by(emulation.general_quantizer(MUTANTS[name]))

    def check_several() -> None:
        for qk in ("e4m3", "int8"):
            for granularity in general_quantize.ROW_GRANULARITIES:
                for i, length in enumerate((300, 513, 1100)):
                    q, k, v = of_shapes((64, 72, 64)[i], 40, length, general_quantize.DTYPES[i])
                    rotate = (64, 16, 0)[i]
                    check(quantizer, (q, 40 + k, v), Recipe(q=granularity, k=granularity, qk=qk, rotate=rotate))
                    check(quantizer, (moved(q, 1), moved(k, 1), moved(v, 1)), Recipe(q=granularity, k=granularity, qk=qk, rotate=rotate))
        for length in (3000, 20_000):
            check(quantizer, wide_keys(length, torch.float32, "cpu", (1, 1, 16)), Recipe(k="token"))
        check(quantizer, (None, *cancelling((1, 1, 700, 64), 2)), Recipe(k="token"))  # of warps
        q = torch.zeros(1, 1, 4, 64)
        q[..., 0::2] = -1e-45
        check(quantizer, (q, None, None), Recipe())
        for rotate in (64, 0):
            check(quantizer, (torch.full((1, 1, 4, 64), -0.0, dtype=torch.bfloat16), None, None), Recipe(rotate=rotate))

    with pytest.raises(AssertionError, match=r"differ|come to an end"):
        check_several()


def unsmoothed(library: build.Library, lse: torch.Tensor, q: torch.Tensor, mean: torch.Tensor, rotated: int) -> torch.Tensor:
    assert general_quantize.unsupported_lse(lse, q, H100) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_with", lambda *_: library)
        return run.unsmoothed_lse(lse, q, mean, 0.1, rotated, H100)


def check_lse(unsmooth: Callable[..., torch.Tensor], dtype: torch.dtype, dim: int, rotated: int, device: torch.device | str) -> None:
    """As exact as float32, also of a mean that is much larger than queries; the same bits from any layout."""
    generator = torch.Generator().manual_seed(dim)
    q = torch.randn(2, 6, 130, dim, generator=generator).to(dtype)
    mean = 30 * torch.randn(2, 3, dim, generator=generator)
    lse = torch.randn(2, 6, 130, generator=generator)
    lse[1, 2, 7] = -torch.inf
    exact = lse.double() + 0.1 * (q.double() * mean.double().repeat_interleave(2, 1).unsqueeze(2)).sum(-1)
    stored = rotation.rotate(mean, rotated).to(device)
    found = unsmooth(lse.to(device), q.to(device), stored, rotated)
    size = 0.1 * (q.double().abs() * mean.double().abs().repeat_interleave(2, 1).unsqueeze(2)).sum(-1)
    assert torch.equal(found.isinf().cpu(), exact.isinf()), "infinities differ"
    assert ((found.cpu().double() - exact).nan_to_num(nan=0.0).abs() <= 2.0**-20 * (size + 1)).all(), "LSE differ"
    shifted = torch.nn.functional.pad(q, (1, 2, 0, 1)).to(device)[:, :, :130, 1 : dim + 1]
    assert torch.equal(unsmooth(lse.to(device), shifted, stored, rotated), found), "layouts differ"
    some = unsmooth(lse[1:, 4:].contiguous().to(device), q[1:, 4:].to(device), stored[1:, 2:], rotated)
    assert torch.equal(some, found[1:, 4:]), "heads differ"
    q[0, 1, 3, 2] = torch.nan
    expected = reference.unsmoothed_lse(lse.to(device), q.to(device), stored, 0.1, rotated)
    assert torch.equal(unsmooth(lse.to(device), q.to(device), stored, rotated).isnan(), expected.isnan()), "NaN differ"


LSE_CASES = ((16, 0), (64, 64), (72, 8), (128, 64), (192, 64), (256, 256))


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("dtype", general_quantize.DTYPES)
@pytest.mark.parametrize("dim, rotated", LSE_CASES)
def test_emulated_the_lse_of_keys_with_their_mean(dim: int, rotated: int, dtype: torch.dtype) -> None:
    library = emulation.unsmoother()
    check_lse(lambda *x: unsmoothed(library, *x), dtype, dim, rotated, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", general_quantize.DTYPES)
@pytest.mark.parametrize("dim, rotated", LSE_CASES)
def test_the_lse_of_keys_with_their_mean(device: torch.device, dim: int, rotated: int, dtype: torch.dtype) -> None:
    reason = general_quantize.unsupported_device(device_of(device))
    if reason is not None:
        pytest.skip(reason)
    check_lse(lambda lse, q, mean, part: run.unsmoothed_lse(lse, q, mean, 0.1, part, device_of(device)), dtype, dim, rotated, device)


LSE_MUTANTS = {
    "queries of the next CTA": ("unsmooth_lse.cuh", "end = min(begin + Instance::config.rows, p.q_length)", "end = min(begin + 64, p.q_length)"),
    "the mean of another head": ("unsmooth_lse.cuh", "q_head / (p.q_heads / p.kv_heads)", "0"),
    "a rotated mean": ("unsmooth_lse.cuh", "  rotation.unrotate(mean);\n", ""),
    "queries of other lanes": ("tile/row_team.h", "distance > 0; distance /= 2) x += __shfl", "distance > 1; distance /= 2) x += __shfl"),
}


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("name", LSE_MUTANTS)
def test_the_emulation_sees_what_is_missing_of_the_lse(name: str) -> None:
    library = emulation.unsmoother(LSE_MUTANTS[name])
    with pytest.raises(AssertionError, match="differ"):
        check_lse(lambda *x: unsmoothed(library, *x), torch.float16, 64, 64, "cpu")


@pytest.mark.parametrize("device", ARCHITECTURES.values(), ids=lambda device: f"sm_{device.arch}")
def test_takes(device) -> None:
    for dtype in general_quantize.DTYPES:
        q, k, v = (
            torch.zeros(1, 6, 5, 72, dtype=dtype)[..., :48],
            torch.zeros(1, 2, 9, 56, dtype=dtype)[..., 3:51],
            torch.zeros(1, 2, 9, 136, dtype=dtype),
        )
        for recipe in RECIPES:
            for operands in ((q, k, v), (None, k, v), (q, None, None)):
                assert general_quantize.unsupported_call(*operands, recipe, device) is None
        assert general_quantize.unsupported_call(None, k, v, Recipe(q="tensor", smooth_q=True), device) is None
        assert general_quantize.unsupported_lse(torch.zeros(1, 6, 5), q, device) is None


def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(1, dtype=dtype).expand(shape)


@pytest.mark.parametrize(
    "q, kv, recipe, reason",
    (
        ((1, 2, 60, 64), None, Recipe(smooth_q=True), "recipe.smooth_q is True; it takes False"),
        ((1, 2, 60, 64), None, Recipe(q="tensor"), "recipe.q is 'tensor'; it takes 'token' or 'block'"),
        (None, (1, 2, 60, 64), Recipe(k="head"), "recipe.k is 'head'; it takes 'token' or 'block'"),
        (None, (1, 2, 60, 64), Recipe(v="head"), "recipe.v is 'head'; it takes 'channel'"),
        ((1, 2, 60, 12), None, Recipe(), "query has head dim 12; it takes multiples of 8 from 16 to 256"),
        (None, (1, 2, 60, 264), Recipe(), "key has head dim 264"),
        ((1, 2, 60, 8), None, Recipe(), "query has head dim 8"),
        ((1, 0, 60, 64), None, Recipe(), "query has shape (1, 0, 60, 64); it takes no empty ones"),
        ((1, 2, 60, 64), (1, 2, 60, 72), Recipe(), "it takes the same batch and head dim of both"),
        (None, (1, 1, 1 << 30, 64), Recipe(), "tokens; kernels take fewer than"),
        (None, (1 << 14, 1 << 14, 1, 256), Recipe(), "CTAs; a grid has fewer than"),
    ),
)
def test_refusals_say_why(q: tuple[int, ...] | None, kv: tuple[int, ...] | None, recipe: Recipe, reason: str) -> None:
    def like(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty_strided(shape, (0, 0, 0, 1), dtype=torch.float16)

    operands = (None if q is None else like(q), *(None if kv is None else like(kv) for _ in range(2)))
    assert reason in (general_quantize.unsupported_call(*operands, recipe, H100) or "")


def test_refusals_of_tensors_say_why() -> None:
    q, k = torch.zeros(1, 2, 60, 64), torch.zeros(1, 2, 60, 64, dtype=torch.float16)
    for operands, device, reason in (
        ((None, None, None), H100, "there are no operands; it takes query, key with value, or all three"),
        ((None, k, None), H100, "there are key; it takes query, key with value, or all three"),
        ((q, k, k), H100, "it takes the same of all"),
        ((None, k, k[:, :1]), H100, "it takes the same but for the head dim"),
        ((q.double(), None, None), H100, "query is torch.float64; it takes"),
        ((q.mT.contiguous().mT, None, None), H100, "query has a last stride of 60; it takes 1"),
        ((q, None, None), dataclasses.replace(H100, arch=75), "it needs sm_80 or later; this is sm_75"),
        ((q, None, None), INTERPRETER, "an emulation"),
    ):
        assert reason in (general_quantize.unsupported_call(*operands, Recipe(), device) or ""), reason
    assert "lse has strides" in (general_quantize.unsupported_lse(torch.zeros(1, 60, 2).mT, q, H100) or "")


def test_what_it_fills_is_like_the_definitions() -> None:
    """Stored as operands are, rows at multiples of 16 bytes."""
    k, v = normal((2, 3, 140, 72))
    for x in (k, k.transpose(1, 2).contiguous().transpose(1, 2)):
        for recipe in RECIPES[::9]:
            for actual, expected in zip(general_quantize.empty(x, x, v, recipe), quantize(x, x, v, recipe), strict=True):
                assert actual is not None and expected is not None
                for name in ("data", "scale", "mean"):
                    one, other = getattr(actual, name), getattr(expected, name)
                    assert (one is None) == (other is None)
                    if one is not None:
                        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
                for name in ("granularity", "layout", "length", "rotated"):
                    assert getattr(actual, name) == getattr(expected, name)


def test_who_quantizes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quantizer of keys and values for Hopper first, then the general one, in one call if it takes all; Triton the rest."""
    q, k, v = (torch.randn(1, 1, 40, 32, device=device, dtype=torch.float16) for _ in range(3))
    expected = quantize(q, k, v, Recipe())
    made: list[str] = []
    takes = {"qkv", "kv", "q"}

    def by_definition(q, k, v, recipe, device, packed=None) -> Results:
        made.append("".join(name for name, x in zip("qkv", (q, k, v), strict=True) if x is not None))
        return quantize(q, k, v, recipe)

    def unsupported(q, k, v, recipe, packed=None) -> str | None:
        return None if "".join(name for name, x in zip("qkv", (q, k, v), strict=True) if x is not None) in takes else "the test says so"

    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    monkeypatch.setattr(ops, "unsupported_general_quantize", unsupported)
    monkeypatch.setattr(run, "quantize_any", by_definition)
    monkeypatch.setattr(run, "quantize_kv", lambda k, v, qk, device: made.append("special") or quantize(None, k, v, Recipe())[1:])
    monkeypatch.setattr(ops.triton_kernels.quantize, "quantize", lambda *x, given=None: made.append("triton") or by_definition(*x))
    for special, taken, steps in (
        (False, {"qkv"}, ["qkv"]),
        (True, {"qkv", "q"}, ["special", "q"]),
        (False, {"kv", "q"}, ["kv", "q"]),
        (False, {"kv"}, ["kv", "triton", "q"]),
        (False, {"q"}, ["q", "triton", "kv"]),
        (True, set(), ["special", "triton", "q"]),
        (False, set(), ["triton", "qkv"]),
    ):
        takes = taken
        made.clear()
        monkeypatch.setattr(ops, "unsupported_cuda_quantize", lambda *_, special=special: None if special else "the test says so")
        for actual, wanted in zip(ops.quantized(q, k, v, Recipe()), expected, strict=True):
            assert_same(actual, wanted)
        assert made == steps
    made.clear()
    takes = {"qkv", "kv", "q"}
    ops.quantized(q, k, v, Recipe(), by_triton=True)
    assert made == ["triton", "qkv"]
    made.clear()
    assert ops.quantized(None, k, v, Recipe())[0] is None and ops.quantized(q, None, None, Recipe())[1:] == (None, None)
    assert made == ["kv", "q"]

    def fails(*_) -> None:
        raise BuildError("no compiler")

    monkeypatch.setattr(run, "quantize_any", fails)
    with pytest.warns(UserWarning, match="goes on with Triton: no compiler"):
        results = ops.quantized(q, k, v, Recipe())
    for actual, wanted in zip(results, expected, strict=True):
        assert_same(actual, wanted)


def test_who_adds_to_the_lse(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    lse, q, mean = torch.zeros(1, 2, 40, device=device), torch.zeros(1, 2, 40, 32, device=device), torch.zeros(1, 2, 32, device=device)
    made: list[str] = []
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    monkeypatch.setattr(run, "unsmoothed_lse", lambda *_: made.append("cuda") or lse)
    monkeypatch.setattr(ops.triton_kernels.lse, "unsmoothed_lse", lambda *_: made.append("triton") or lse)
    for reason, who in ((None, "cuda"), ("the test says so", "triton")):
        monkeypatch.setattr(ops, "unsupported_cuda_lse", lambda *_, reason=reason: reason)
        ops.unsmoothed_lse(lse, q, mean, 0.1, 32)
        assert made.pop() == who

    def fails(*_) -> None:
        raise BuildError("no compiler")

    monkeypatch.setattr(run, "unsmoothed_lse", fails)
    monkeypatch.setattr(ops, "unsupported_cuda_lse", lambda *_: None)
    with pytest.warns(UserWarning, match="goes on with Triton: no compiler"):
        ops.unsmoothed_lse(lse, q, mean, 0.1, 32)
    assert made == ["triton"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.compiles)))
def test_attention_is_the_same(device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sdpa, whoever quantizes and adds to the LSE; bfloat16 rows that TMA can't load."""
    q, k, v = (normal((2, 4, 700, 65), dtype, device)[i][..., 1:] for i in (0, 0, 1))
    reason = ops.unsupported_general_quantize(q, k, v, Recipe())
    if reason is not None:
        pytest.skip(reason)
    actual, lse = fp8attn.sdpa(q, k, v, is_causal=True, return_lse=True)
    monkeypatch.setattr(ops, "unsupported_general_quantize", lambda *_: "the test wants Triton's")
    monkeypatch.setattr(ops, "unsupported_cuda_lse", lambda *_: "the test wants Triton's")
    expected, expected_lse = fp8attn.sdpa(q, k, v, is_causal=True, return_lse=True)
    assert torch.equal(actual, expected)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_one_chunk_is_measured_once() -> None:
    """Bytes that kernels pass on: those of MeasuredChunk for every token chunk and slice."""
    for length in (1, TOKEN_CHUNK, TOKEN_CHUNK + 1):
        v = torch.zeros(2, 3, length, 72)
        assert general_quantize.measured_bytes(v) == 2 * 3 * (1 + (length > TOKEN_CHUNK)) * 3 * general_quantize.MEASURED_CHUNK_BYTES
