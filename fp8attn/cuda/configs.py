"""How the CUDA kernels run: their configs, which of them a call gets, and why none does."""

from __future__ import annotations

import functools
import math
from dataclasses import astuple, dataclass, replace
from typing import Literal, get_args

import torch

from ..call import HALVES, Call, unsupported_tma
from ..device import Device
from ..recipe import ProductType
from ..schedule import unsupported_boxes, unsupported_size
from . import stream_k

ROWS = 64
"""Query rows of a consumer warpgroup."""

KEYS = 128
"""Keys of a block."""

ONES = 8
"""Channels of ones behind V's: the tensor core sums P's rows through them."""

VALUE_PART = 64
"""Channels of V that P is multiplied with at a time where there are more than 128 and one such product is added while the next is in the making."""

OUTPUT_BYTES = 128
"""Of a row of the output in shared memory; there are two where there are more than 64 channels."""

REGISTER_FILE = 65_536


Scores = Literal["plain", "masked", "general", "added"]
"""What is done to scores beside their softmax; each of these does what those before it do."""

SCORES: tuple[Scores, ...] = get_args(Scores)


@dataclass(frozen=True)
class HopperConfig:
    """One instance of the Hopper kernel; the fields of C++'s HopperConfig, in order.

    Attributes:
        head_dim: of Q and K in shared memory; the call's or more.
        value_dim: of V in shared memory; the call's or more.
        consumers: warpgroups of 64 query rows.
        stages: of K and V in shared memory.
        registers: of a consumer's thread.
        overlap: whether the next block's scores are issued behind this block's P·V.
        exact: of every eight groups of 16 keys, those whose exponentials are exact to float32 rounding. The e4m3 codes of the
            others are written directly, 2^f taken as 1 + f: 0.042 code steps² more than rounding's 0.083, no MUFU instruction.
        general: boolean masks, means of queries, scales by key, softmax scales that aren't positive; an instance without has none of them.
        int8: Q and K are int8, not e4m3.
        fuse_q_quant: Q is bfloat16 or float16, and becomes e4m3 or int8 in the kernel, every row with a scale of its own.
        masked: boolean masks.
        added: masks that are added to scores; of general instances.
    """

    head_dim: int
    value_dim: int
    consumers: int
    stages: int
    registers: int
    overlap: bool
    exact: int
    general: bool
    int8: bool = False
    fuse_q_quant: bool = False
    masked: bool = False
    added: bool = False

    @property
    def tile_rows(self) -> int:
        """Query rows of a tile."""
        return self.consumers * ROWS

    @property
    def value_widths(self) -> tuple[int, ...]:
        """Channels of one product of P with V and its ones: of all, or of each of its parts."""
        if self.value_dim <= 128:
            return (self.value_dim + ONES,)
        if self.int8 and not self.skips_blocks:
            return (VALUE_PART, VALUE_PART + ONES)
        return (128, self.value_dim - 128 + ONES)

    @property
    def stream_k(self) -> bool:
        """Whether CTAs may share tiles. Where registers are scarcest it would spill, and tiles of more than 128 channels gain nothing that pays for
        int8's spills."""
        return not self.skips_blocks and self.consumers < 4 and not (self.int8 and self.value_dim > 128)

    @property
    def skips_blocks(self) -> bool:
        """Whether only those blocks of keys are loaded in which a mask shows something."""
        return self.general or self.masked

    @property
    def scores(self) -> Scores:
        """What it is made for."""
        return "added" if self.added else "general" if self.general else "masked" if self.masked else "plain"

    @property
    def added_slots(self) -> int:
        """Blocks of an additive mask, of numbers of 16 bits, that a consumer has in shared memory; where there is no room it loads them itself."""
        return 2 if self.added and self.head_dim <= 128 else 0

    @property
    def producer_registers(self) -> int:
        """Of a thread of the producer's warpgroup; what there is of single keys takes what consumers leave."""
        return self.launched_with - self.consumers * self.registers if self.skips_blocks else 24

    @property
    def launched_with(self) -> int:
        """Registers of a thread of each warpgroup together, which they then divide among themselves."""
        return min(REGISTER_FILE // self.threads // 8 * 8, 255) * (self.consumers + 1)

    @property
    def panel(self) -> int:
        """Bytes of a row of Q and K that lie together in shared memory, spanned by a swizzle."""
        return 128 if self.head_dim % 128 == 0 else 64 if self.head_dim % 64 == 0 else 32

    @property
    def threads(self) -> int:
        """Of a CTA: the consumers' and the producer's warpgroup."""
        return 128 * (self.consumers + 1)

    @property
    def shared_bytes(self) -> int:
        """sizeof(SharedStorage)."""
        q = self.consumers * ROWS * self.head_dim
        kv = self.stages * KEYS * (self.head_dim + self.value_dim + ONES)
        shown = self.stages * (16 * ROWS * self.consumers + 16) if self.skips_blocks else 0
        key_facts = self.stages * 4 * KEYS * (1 + self.consumers) if self.general else 0
        added = self.added_slots * self.consumers * 2 * ROWS * KEYS + (1024 if self.added_slots else 0)
        work_tiles = 0 if self.skips_blocks else 4 * 32
        output = self.consumers * ROWS * OUTPUT_BYTES * (2 if self.value_dim > 64 else 1)
        facts = 4 * self.consumers * (2 * self.value_dim + 2 * ROWS) + 8 * self.stages
        tiles, barriers = 32 * 4, 8 * (2 * self.consumers + 4 * self.stages)
        # swizzled boxes start at multiples of 1024
        return q + kv + round_up(128 + work_tiles + shown + key_facts, 1024) + added + output + round_up(facts + tiles + barriers, 1024)

    def does(self, call: Call) -> bool:
        """Whether it has all that is done to a call's scores."""
        return SCORES.index(self.scores) >= SCORES.index(scores_of(call))

    @property
    def partial_bytes(self) -> int:
        """sizeof(Partial), of all consumers: sums of P·V, and m and sums of P of each thread's two rows. 0 where CTAs share no tiles."""
        return self.consumers * 128 * (2 * self.value_dim + 16) if self.stream_k else 0

    @property
    def name(self) -> str:
        return "hopper_" + "_".join(str(int(x)) for x in astuple(self))


def round_up(size: int, multiple: int) -> int:
    """To the next multiple."""
    return -(-size // multiple) * multiple


def unsupported_arch(device: Device) -> str | None:
    """Why kernels of sm_90a can't run on a device, or None if they can."""
    if device.emulated or device.arch // 10 != 9:
        return f"it needs sm_90; this is {'an emulation' if device.emulated else f'sm_{device.arch}'}, {device.name}"
    return None


def unsupported_shared_memory(size: int, device: Device) -> str | None:
    """Why so many bytes of shared memory are too many, or None if they aren't."""
    return f"it takes {size} bytes of shared memory; there are {device.shared_memory}" if size > device.shared_memory else None


def unsupported_config(config: HopperConfig, device: Device) -> str | None:
    """Why a config can't run on a device, or None if it can."""
    reason = unsupported_arch(device)
    if reason is not None:
        return reason
    if config.head_dim % 32 or config.value_dim % 32:
        return f"head dims are {config.head_dim} and {config.value_dim}; they must be multiples of 32"
    reason = unsupported_shared_memory(config.shared_bytes, device)
    if reason is not None:
        return reason
    wanted, given = config.consumers * config.registers + max(config.producer_registers, 24), config.launched_with
    if config.registers % 8 or wanted > given:
        return f"it takes {128 * wanted} registers; a CTA of {config.threads} threads gets {128 * given}, and each thread a multiple of 8"
    return None


def fits(config: HopperConfig, device: Device) -> bool:
    return unsupported_config(config, device) is None


SPEEDS = {
    HopperConfig(64, 64, 4, 4, 112, False, 2, False): 1.0,
    HopperConfig(64, 64, 2, 4, 240, True, 2, False): 0.87,
    HopperConfig(64, 64, 1, 4, 240, True, 2, False): 0.65,
    HopperConfig(96, 96, 3, 4, 160, False, 2, False): 1.0,
    HopperConfig(96, 96, 2, 4, 240, True, 2, False): 0.93,
    HopperConfig(128, 128, 3, 4, 160, False, 2, False): 1.0,
    HopperConfig(128, 128, 2, 4, 240, True, 2, False): 0.93,
    HopperConfig(128, 128, 1, 4, 240, False, 2, False): 0.5,
    HopperConfig(192, 128, 2, 3, 240, True, 2, False): 1.0,
    HopperConfig(192, 192, 2, 3, 240, False, 2, False): 1.0,
    HopperConfig(256, 256, 2, 2, 240, False, 2, False): 1.0,
    HopperConfig(256, 256, 1, 2, 240, False, 2, False): 0.6,
    HopperConfig(64, 64, 3, 4, 152, False, 2, True): 1.0,
    HopperConfig(96, 96, 3, 4, 152, False, 2, True): 1.0,
    HopperConfig(128, 128, 2, 4, 224, False, 2, True): 1.0,
    HopperConfig(192, 128, 2, 3, 224, False, 2, True): 1.0,
    HopperConfig(192, 192, 2, 3, 232, False, 2, True): 1.0,
    HopperConfig(256, 256, 2, 2, 232, False, 2, True): 1.0,
    HopperConfig(64, 64, 4, 4, 112, False, 2, False, False, False, True): 1.0,
    HopperConfig(96, 96, 3, 4, 152, False, 2, False, False, False, True): 1.0,
    HopperConfig(128, 128, 2, 4, 224, False, 2, False, False, False, True): 1.0,
    HopperConfig(192, 128, 2, 3, 224, False, 2, False, False, False, True): 1.0,
    HopperConfig(192, 192, 2, 3, 232, False, 2, False, False, False, True): 1.0,
    HopperConfig(256, 256, 2, 2, 224, False, 2, False, False, False, True): 1.0,
    HopperConfig(64, 64, 3, 4, 152, False, 2, True, False, False, False, True): 1.0,
    HopperConfig(96, 96, 2, 4, 224, False, 2, True, False, False, False, True): 1.0,
    HopperConfig(128, 128, 2, 3, 224, False, 2, True, False, False, False, True): 1.0,
    HopperConfig(192, 128, 2, 3, 224, False, 2, True, False, False, False, True): 1.0,
    HopperConfig(192, 192, 2, 3, 232, False, 2, True, False, False, False, True): 1.0,
    HopperConfig(256, 256, 2, 2, 232, False, 2, True, False, False, False, True): 1.0,
}
"""What is compiled, and how fast each is beside the fastest of its head dims where there are plenty of tiles (H100, 16k tokens)."""

INSTANCES = tuple(config for config in SPEEDS if not config.masked and not config.added)


def _with_int8(configs: tuple[HopperConfig, ...]) -> tuple[HopperConfig, ...]:
    """Sums' start leaves fewer issue slots, and the fewest at head dim 64, where all codes are direct: 3 to 7 % faster, errors 2 % larger. Up to 128
    half as many are exact as of e4m3: 2 to 4 % faster, errors 1 % larger."""

    def exact(config: HopperConfig) -> int:
        return 0 if config.head_dim == 64 else config.exact // 2 if config.head_dim <= 128 else config.exact

    return tuple(replace(config, int8=True, exact=exact(config)) for config in configs)


INT8_INSTANCES = _with_int8(INSTANCES)
"""The same for int8, compiled by themselves on their first use."""


def _with_fused_q(configs: tuple[HopperConfig, ...]) -> tuple[HopperConfig, ...]:
    """Of head dims whose rows a warpgroup's threads can share."""
    return tuple(replace(config, fuse_q_quant=True) for config in configs if config.head_dim == config.value_dim and 256 % config.head_dim == 0)


FUSED_Q_INSTANCES = _with_fused_q(tuple(config for config in INSTANCES if not config.general))
"""The same for Q that isn't quantized yet, likewise."""

INT8_FUSED_Q_INSTANCES = _with_int8(FUSED_Q_INSTANCES)
"""And for such Q that becomes int8."""

MASKED_INSTANCES = tuple(config for config in SPEEDS if config.masked)
"""For boolean masks, likewise."""

INT8_MASKED_INSTANCES = _with_int8(MASKED_INSTANCES)

ADDED_INSTANCES = tuple(config for config in SPEEDS if config.added)
"""For masks that are added to scores, likewise."""

INT8_ADDED_INSTANCES = _with_int8(ADDED_INSTANCES)

Group = tuple[Scores, bool, bool]
"""What instances that are compiled together have in common: scores, where "plain" has general ones, too, int8, fuse_q_quant."""

GROUPS: dict[Group, tuple[HopperConfig, ...]] = {
    ("plain", False, False): INSTANCES,
    ("plain", True, False): INT8_INSTANCES,
    ("plain", False, True): FUSED_Q_INSTANCES,
    ("plain", True, True): INT8_FUSED_Q_INSTANCES,
    ("masked", False, False): MASKED_INSTANCES,
    ("masked", True, False): INT8_MASKED_INSTANCES,
    ("masked", False, True): _with_fused_q(MASKED_INSTANCES),
    ("masked", True, True): _with_fused_q(INT8_MASKED_INSTANCES),
    ("added", False, False): ADDED_INSTANCES,
    ("added", True, False): INT8_ADDED_INSTANCES,
    ("added", False, True): _with_fused_q(ADDED_INSTANCES[:-1]),  # that of head dim 256 would spill in its loop
    ("added", True, True): _with_fused_q(INT8_ADDED_INSTANCES[:-1]),
}

FUSED_Q_DIMS = frozenset(config.head_dim for config in FUSED_Q_INSTANCES)


def scores_of(call: Call) -> Scores:
    """The least that an instance must do to a call's scores."""
    of_mask = scores_of_mask(call.attn_mask)
    general = call.bias is not None or call.k_group == 1 or not call.softmax_scale > 0
    return "general" if general and of_mask != "added" else of_mask


def scores_of_mask(attn_mask: torch.Tensor | None) -> Scores:
    """Likewise, by its mask."""
    return "plain" if attn_mask is None else "masked" if attn_mask.dtype == torch.bool else "added"


def instances(scores: Scores, int8: bool, fuse_q_quant: bool) -> tuple[HopperConfig, ...]:
    """Those that are compiled together with such ones."""
    return GROUPS["plain" if scores == "general" else scores, int8, fuse_q_quant]


Kind = tuple[Scores, bool, bool, int, int]
"""What an instance must be made for: scores, int8, fuse_q_quant, head_dim, value_dim."""


def kind(call: Call) -> Kind:
    return scores_of(call), call.int8, call.fuse_q_quant, call.head_dim, call.value_dim


@functools.cache
def _serving(of: Kind) -> tuple[HopperConfig, ...]:
    scores, int8, fuse_q_quant, head_dim, value_dim = of
    able = [c for c in instances(scores, int8, fuse_q_quant) if c.scores == scores and head_dim <= c.head_dim and value_dim <= c.value_dim]
    smallest = min(((c.head_dim, c.value_dim) for c in able), default=None)
    return tuple(c for c in able if (c.head_dim, c.value_dim) == smallest)


def serving(call: Call) -> tuple[HopperConfig, ...]:
    """The instances of the smallest head dims that take a call's, with what it needs."""
    return _serving(kind(call))


def unsupported_call(call: Call, device: Device) -> str | None:
    """Why no instance runs a call, or None if one does."""
    if call.compute != "e4m3":
        return f"the CUDA kernel multiplies e4m3, the recipe computes in {call.compute}"
    if call.two_level is False:
        return "the CUDA kernel accumulates in two levels, the recipe says two_level=False"
    reason = unsupported_boxes(call) or unsupported_tma(call.q, "query") or unsupported_tma(call.k, "key")
    if reason is not None:
        return reason
    return _unsupported_kind(kind(call), device)


def may_quantize(q: torch.Tensor, value_dim: int) -> bool:
    """Whether an instance may quantize q on its way, by what torch.compile knows of it."""
    return q.dtype in HALVES and q.shape[3] == value_dim and value_dim in FUSED_Q_DIMS


def unsupported_q_quant(
    q: torch.Tensor, value_dim: int, softmax_scale: float, qk: ProductType, device: Device, attn_mask: torch.Tensor | None = None
) -> str | None:
    """Why no instance quantizes q on its way to attention as recipe.FUSED_RECIPES[qk] says, or None if one does."""
    if not may_quantize(q, value_dim):
        dims = " or ".join(str(dim) for dim in sorted(FUSED_Q_DIMS))
        return f"query is {q.dtype}, head dims are {q.shape[3]} and {value_dim}; it takes bfloat16 or float16, and {dims} for both"
    if not softmax_scale > 0:
        return f"scale is {softmax_scale}; it takes positive ones"
    return (
        unsupported_size("query", q)
        or unsupported_tma(q, "query")
        or _unsupported_kind((scores_of_mask(attn_mask), qk == "int8", True, q.shape[3], value_dim), device)
    )


@functools.cache
def _unsupported_kind(of: Kind, device: Device) -> str | None:
    able = _serving(of)
    if not able:
        return f"head dims are {of[-2]} and {of[-1]}; the CUDA kernel has no instance as large for such a query and mask"
    return unsupported_config(able[0], device)


def choose(call: Call, device: Device) -> HopperConfig:
    """The instance that runs a call, `unsupported_call` having said that there is one: which is done first, by rows and speed.

    Where all tiles are as long, the last round of them takes as long as any, unless CTAs share it; tiles of causal calls go to whoever is free.
    """
    return _fastest(kind(call), call.batch * call.q_heads, call.q_length, -(-call.kv_length // KEYS), call.causal != "none", device.sm_count)


def _measured(config: HopperConfig) -> HopperConfig:
    """The same for e4m3 that is quantized before it comes."""
    plain = replace(config, int8=False, fuse_q_quant=False)
    return next(measured for measured in SPEEDS if replace(measured, exact=config.exact) == plain)


@functools.lru_cache(4096)
def _fastest(of: Kind, heads: int, q_length: int, blocks: int, is_causal: bool, sm_count: int) -> HopperConfig:
    def rounds(config: HopperConfig) -> float:
        tiles = heads * -(-q_length // config.tile_rows)
        if is_causal:
            return max(tiles / sm_count, 1.0)
        return stream_k.rounds(tiles, blocks, sm_count) if config.stream_k else math.ceil(tiles / sm_count)

    def time(config: HopperConfig) -> float:
        return rounds(config) * config.tile_rows / SPEEDS[_measured(config)]

    return min(_serving(of), key=time)


def stream_k_ctas(call: Call, config: HopperConfig, device: Device) -> int:
    """CTAs that share the call's last tiles; 1: each is one CTA's."""
    if not config.stream_k or call.causal != "none":
        return 1
    return stream_k.split_ctas(call.tiles(config.tile_rows), -(-call.kv_length // KEYS), device.sm_count)
