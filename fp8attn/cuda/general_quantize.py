"""The CUDA quantizer of any Q, K and V, and the kernel that adds to the LSE what K's mean adds to scores, sm_80 and
later: their configs, the calls that they support, and the quantizer's outputs.

The bytes are those of fp8attn.quantize, as with Triton's quantizer. It takes every float dtype, head dim, stride and
alignment by the same instance, so that a new shape compiles nothing. For keys and values that fp8attn.cuda.quantize
takes, that is faster.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from .. import quantization as quantize_ref
from ..call import GROUPS
from ..device import Device
from ..layout import GROUP, padded_length, units_of
from ..quantization import LANES, RUN, TOKEN_CHUNK
from ..recipe import E4M3, SCALE_BLOCK, Granularity, Packed, Quantized, Recipe
from ..rotation import part_of
from ..schedule import unsupported_size
from .configs import round_up
from .quantize import PACKED_UNIT_BYTES

MEASURED_CHANNELS = 32
"""Channels of a token chunk that a CTA measures."""

MEASURED_CHUNK_BYTES = 4 * (3 * MEASURED_CHANNELS + TOKEN_CHUNK // LANES)
"""sizeof(MeasuredChunk): sums, minima and maxima of channels, and a bit for each token."""

MEASURERS = 128
"""Threads of a CTA that measures."""

WRITERS = 256
"""Threads of a CTA that writes codes."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

DIM_STEP = 8
"""Channels of a row that a thread has. Head dims are multiples."""

LEAST_DIM, LARGEST_DIM = 16, 256

ROW_GRANULARITIES: tuple[Granularity, ...] = ("token", "block")

MOST_CTAS = 1 << 31
"""A grid has fewer CTAs."""


@dataclass(frozen=True)
class GeneralQuantizeConfig:
    """One instance of the quantizer. The fields of C++'s GeneralQuantizeConfig, in order.

    Attributes:
        ctas: CTAs per SM that registers of the kernel that writes codes must leave room for, at least.
    """

    ctas: int

    @property
    def threads(self) -> int:
        """Threads of a CTA that writes codes."""
        return WRITERS

    @property
    def shared_bytes(self) -> int:
        """sizeof(GeneralQuantizeStorage), in bytes."""
        warps = MEASURERS // LANES * MEASURED_CHUNK_BYTES
        return round_up(warps + 4 * (WRITERS // LANES) + 4 * (1 + SCALE_BLOCK // LANES), 128)

    @property
    def name(self) -> str:
        return "general_quantize_" + "_".join(str(x) for x in astuple(self))


@dataclass(frozen=True)
class UnsmoothLseConfig:
    """One instance of the kernel for the LSE. The fields of C++'s UnsmoothLseConfig, in order.

    Attributes:
        rows: queries of a CTA.
        ctas: CTAs per SM that registers must leave room for, at least.
    """

    rows: int
    ctas: int

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WRITERS

    @property
    def shared_bytes(self) -> int:
        return 0

    @property
    def name(self) -> str:
        return "unsmooth_lse_" + "_".join(str(x) for x in astuple(self))


QUANTIZER = GeneralQuantizeConfig(3)
UNSMOOTHER = UnsmoothLseConfig(128, 3)

INSTANCES: tuple[GeneralQuantizeConfig | UnsmoothLseConfig, ...] = (QUANTIZER, UNSMOOTHER)
"""The compiled instances, which are compiled together."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def unsupported_device(device: Device) -> str | None:
    """The reason why the kernels can't run on a device, or None if they can."""
    if device.emulated or device.arch < 80:
        return f"it needs sm_80 or later; this is {'an emulation' if device.emulated else f'sm_{device.arch}'}, {device.name}"
    return None


def unsupported_tensor(name: str, x: torch.Tensor) -> str | None:
    """The reason why the kernels can't read x (B, H, S, D), or None if they can."""
    if x.dtype not in DTYPES:
        return f"{name} is {x.dtype}; it takes {', '.join(str(dtype) for dtype in DTYPES)}"
    dim = x.shape[3]
    if dim % DIM_STEP or not LEAST_DIM <= dim <= LARGEST_DIM:
        return f"{name} has head dim {dim}; it takes multiples of {DIM_STEP} from {LEAST_DIM} to {LARGEST_DIM}"
    if x.stride(3) != 1:
        return f"{name} has a last stride of {x.stride(3)}; it takes 1"
    if x.numel() == 0:
        return f"{name} has shape {tuple(x.shape)}; it takes no empty ones"
    return unsupported_size(name, x)


def unsupported_call(
    q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, recipe: Recipe, device: Device, packed: Packed | None = None
) -> str | None:
    """The reason why this quantizer doesn't support operands (B, H, S, D), of which `q`, or `k` and `v`, may be None;
    or None if it does.

    Args:
        packed: the sequences of k and v, or None.
    """
    reason = unsupported_device(device)
    if reason is not None:
        return reason
    given = {name: x for name, x in (("query", q), ("key", k), ("value", v)) if x is not None}
    if not given or (k is None) != (v is None):
        return f"there are {', '.join(given) or 'no operands'}; it takes query, key with value, or all three"
    if q is not None and recipe.smooth_q:
        return "recipe.smooth_q is True; it takes False"
    for name, x in (("q", q), ("k", k)):
        granularity = getattr(recipe, name)
        if x is not None and granularity not in ROW_GRANULARITIES:
            return f"recipe.{name} is {granularity!r}; it takes {' or '.join(map(repr, ROW_GRANULARITIES))}"
    if v is not None and recipe.v != "channel":
        return f"recipe.v is {recipe.v!r}; it takes 'channel'"
    for name, x in given.items():
        reason = unsupported_tensor(name, x)
        if reason is not None:
            return reason
    if len({x.dtype for x in given.values()}) > 1:
        return f"{', '.join(f'{name} is {x.dtype}' for name, x in given.items())}; it takes the same of all"
    if q is not None and k is not None and (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        return f"query has shape {tuple(q.shape)}, key {tuple(k.shape)}; it takes the same batch and head dim of both"
    if k is not None and v is not None and k.shape[:3] != v.shape[:3]:
        return f"key has shape {tuple(k.shape)}, value {tuple(v.shape)}; it takes the same but for the head dim"
    ctas = max(ctas_of(q, k, v, packed), measuring_ctas(k, v, packed))
    if ctas >= MOST_CTAS:
        return f"it would take {ctas} CTAs; a grid has fewer than {MOST_CTAS}"
    return None


def unsupported_lse(lse: torch.Tensor, q: torch.Tensor, device: Device) -> str | None:
    """The reason why the kernel can't add what K's mean adds to scores of q (B, Hq, Sq, D) to `lse`, or None if it
    can."""
    if not lse.is_contiguous():
        return f"lse has strides {lse.stride()}; it takes contiguous ones"
    return unsupported_device(device) or unsupported_tensor("query", q)


def unsmoothing_ctas(q: torch.Tensor) -> int:
    """CTAs of the kernel for the LSE."""
    return q.shape[0] * q.shape[1] * ceil_div(q.shape[2], UNSMOOTHER.rows)


def _units(x: torch.Tensor, size: int, packed: Packed | None) -> int:
    """Units of `size` tokens of a head of x (B, H, S, D); of packed sequences their places."""
    return ceil_div(x.shape[2], size) if packed is None else units_of(packed, size)


def ctas_of(q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, packed: Packed | None = None) -> int:
    """CTAs of the kernel that writes codes. C++'s GeneralGrid says what each does."""
    ctas = 0 if q is None else q.shape[0] * q.shape[1] * ceil_div(q.shape[2], SCALE_BLOCK)
    if k is None or v is None:
        return ctas
    blocks = _units(k, SCALE_BLOCK, packed)
    runs = blocks * SCALE_BLOCK // (GROUP if packed is None and k.shape[2] <= TOKEN_CHUNK else RUN)
    return ctas + k.shape[0] * k.shape[1] * (ceil_div(runs * (v.shape[3] // 2), WRITERS) + blocks)


def _measured_chunks(v: torch.Tensor, packed: Packed | None) -> int:
    """The number of C++'s MeasuredChunk of V."""
    return v.shape[0] * v.shape[1] * _units(v, TOKEN_CHUNK, packed) * ceil_div(v.shape[3], MEASURED_CHANNELS)


def measuring_ctas(k: torch.Tensor | None, v: torch.Tensor | None, packed: Packed | None = None) -> int:
    """CTAs of the kernel that measures, if K has a mean."""
    if k is None or v is None:
        return 0
    sequences, pages = (k.shape[0], 0) if packed is None else (packed.sequences, _units(k, SCALE_BLOCK, packed))
    return ceil_div(pages, MEASURERS // LANES) + _measured_chunks(v, packed) + sequences * k.shape[1] * ceil_div(k.shape[3], MEASURED_CHANNELS)


def measured_bytes(v: torch.Tensor, packed: Packed | None = None) -> int:
    """Bytes of what one kernel measures of V for the next."""
    pages = 0 if packed is None else _units(v, SCALE_BLOCK, packed)
    return pages * PACKED_UNIT_BYTES + _measured_chunks(v, packed) * MEASURED_CHUNK_BYTES


def _empty_rows(x: torch.Tensor, granularity: Granularity, recipe: Recipe, mean: torch.Tensor | None) -> Quantized:
    """Uninitialised q or k for the kernel to fill."""
    scale = x.new_empty(quantize_ref.scale_shape(granularity, *x.shape), dtype=torch.float32)
    rows = quantize_ref.empty_rows(x, quantize_ref.row_type(recipe.qk))
    return Quantized(rows, scale, granularity, "rows", x.shape[2], mean, part_of(x.shape[3], recipe.rotate))


def empty(
    q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, recipe: Recipe
) -> tuple[Quantized | None, Quantized | None, Quantized | None]:
    """Uninitialised query, key and value for the kernel to fill; None for an operand that isn't given."""
    query = None if q is None else _empty_rows(q, recipe.q, recipe, None)
    if k is None or v is None:
        return query, None, None

    def numbers(*shape: int) -> torch.Tensor:
        return k.new_empty(shape, dtype=torch.float32)

    batch, heads, length, dim = v.shape
    key = _empty_rows(k, recipe.k, recipe, numbers(batch, heads, k.shape[3]) if recipe.smooth_k else None)
    values = v.new_empty((batch, heads, dim, padded_length(length)), dtype=E4M3)
    value = Quantized(values, numbers(batch, heads, dim), "channel", "values", length, numbers(batch, heads, dim) if recipe.smooth_v else None)
    return query, key, value


def numbers_of(k: torch.Tensor | None, v: torch.Tensor | None, recipe: Recipe, dim: int, packed: Packed | None = None) -> list[int]:
    """What the binding's quantize_general takes as `numbers`. `dim`: channels of Q and K."""
    sampled = 0 if k is None else quantize_ref.sample_size(k.shape[2])
    groups = [GROUPS[granularity] for granularity in (recipe.q, recipe.k)]
    return [part_of(dim, recipe.rotate), *groups, sampled, 0 if v is None else measured_bytes(v, packed)]


def filled(query: Quantized | None, key: Quantized | None, value: Quantized | None) -> list[torch.Tensor | None]:
    """The tensors of query, key and value, in the order in which the binding takes them."""
    found: list[torch.Tensor | None] = [None, None] if query is None else [query.data, query.scale]
    for x in (key, value):
        found += [None] * 3 if x is None else [x.data, x.scale, x.mean]
    return found
