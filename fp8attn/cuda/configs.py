"""Configs of the CUDA Hopper kernel: their fields, the compiled instances, the choice for a call, and reasons why none
fits."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import astuple, dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch

from ..call import HALVES, AnyCall, Call, unsupported_tma
from ..device import Device
from ..recipe import ProductType
from ..schedule import unsupported_boxes, unsupported_size
from . import stream_k

ROWS = 64
"""Query rows of a consumer warpgroup."""

KEYS = 128
"""Keys of a block."""

ONES = 8
"""Channels of ones after V's channels: with them, the tensor core sums the rows of P."""

VALUE_PART = 64
"""Channels of V in one product with P, for int8 with more than 128 channels. One such product is added to the output
while the next one is computed."""

OUTPUT_BYTES = 128
"""Bytes of a row of the output in a shared-memory buffer. There are two buffers if there are more than 64 channels."""

REGISTER_FILE = 65_536


Scores = Literal["plain", "masked", "general", "added", "window", "softcap"]
"""Operations on scores. Up to `added`, each value includes the operations of the values before it. `window` includes
those of `plain`, and hides keys before a row's first one. `softcap` includes those of `window`, and always caps scores.
All of them add sinks."""

SCORES: tuple[Scores, ...] = get_args(Scores)


@dataclass(frozen=True)
class HopperConfig:
    """One instance of the Hopper kernel. The fields of C++'s HopperConfig, in order.

    Attributes:
        head_dim: channels of Q and K in shared memory; at least the call's.
        value_dim: channels of V in shared memory; at least the call's.
        consumers: warpgroups of 64 query rows.
        stages: stages of K and V in shared memory.
        registers: registers of a consumer's thread.
        overlap: whether the next block's scores are issued after this block's P·V, while it runs.
        exact: in every eight groups of 16 keys, the number of groups with exponentials that are exact to float32
            rounding. The e4m3 codes of the other groups are computed directly, with 2^f approximated by 1 + f. This
            adds 0.042 code steps² to the 0.083 of rounding, and needs no MUFU instruction.
        general: supports boolean masks, score bias of smoothed queries, scales per key, and softmax scales that aren't
            positive.
        int8: Q and K are int8, not e4m3.
        fuse_q_quant: Q is bfloat16 or float16, and the kernel quantizes it to e4m3 or int8 with one scale per row.
        masked: supports boolean masks.
        added: supports masks that are added to scores. Only general instances have it.
        window: supports windows that begin at a key of each row's own. No instance has it beside masks and what is
            general.
        softcap: caps scores. Only instances with windows have it.
        varlen: takes packed sequences, and only these. Tiles come from a table.
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
    window: bool = False
    softcap: bool = False
    varlen: bool = False

    @functools.cached_property
    def tile_rows(self) -> int:
        """Query rows of a tile."""
        return self.consumers * ROWS

    @property
    def value_widths(self) -> tuple[int, ...]:
        """Channels of each product of P with V, including the ones: one product with all of V, or one with each of its
        parts."""
        if self.value_dim <= 128:
            return (self.value_dim + ONES,)
        if self.int8 and not self.skips_blocks:
            return (VALUE_PART, VALUE_PART + ONES)
        return (128, self.value_dim - 128 + ONES)

    @functools.cached_property
    def stream_k(self) -> bool:
        """Whether CTAs may share tiles.

        Not with four consumers, which have the fewest registers and would spill; and not for int8 with more than 128
        channels of V, where the gain doesn't make up for spills. Tiles of windows differ in length, and so do those of
        packed sequences.
        """
        return not self.skips_blocks and not self.window and not self.varlen and self.consumers < 4 and not (self.int8 and self.value_dim > 128)

    @property
    def skips_blocks(self) -> bool:
        """Whether the kernel skips blocks of keys that the mask hides completely."""
        return self.general or self.masked

    @functools.cached_property
    def scores(self) -> Scores:
        """The most general operations on scores that the instance supports."""
        if self.window:
            return "softcap" if self.softcap else "window"
        return "added" if self.added else "general" if self.general else "masked" if self.masked else "plain"

    @property
    def added_slots(self) -> int:
        """Blocks of a 16-bit additive mask that a consumer has in shared memory. 0 if there is no room: then consumers
        load the mask themselves."""
        return 2 if self.added and self.head_dim <= 128 else 0

    @property
    def producer_registers(self) -> int:
        """Registers of a producer's thread.

        If the producer loads masks, values per key or lengths, it gets all registers that the consumers leave.
        """
        return self.launched_with - self.consumers * self.registers if self.skips_blocks or self.varlen else 24

    @property
    def launched_with(self) -> int:
        """Sum over all warpgroups of the registers of a thread at launch.

        The warpgroups redistribute these registers.
        """
        return min(REGISTER_FILE // self.threads // 8 * 8, 255) * (self.consumers + 1)

    @functools.cached_property
    def panel(self) -> int:
        """Bytes of a row of Q or K that are contiguous in shared memory: the span of a swizzle."""
        return 128 if self.head_dim % 128 == 0 else 64 if self.head_dim % 64 == 0 else 32

    @property
    def threads(self) -> int:
        """Threads of a CTA: those of the consumers and of the producer's warpgroup."""
        return 128 * (self.consumers + 1)

    @property
    def shared_bytes(self) -> int:
        """sizeof(SharedStorage), in bytes."""
        q = self.consumers * ROWS * self.head_dim
        kv = self.stages * KEYS * (self.head_dim + self.value_dim + ONES)
        shown = self.stages * (16 * ROWS * self.consumers + 16) if self.skips_blocks else 0
        key_facts = self.stages * 4 * KEYS * (1 + self.consumers) if self.general else 0
        added = self.added_slots * self.consumers * 2 * ROWS * KEYS + (1024 if self.added_slots else 0)
        work_tiles = 0 if self.skips_blocks else 4 * 32
        output = self.consumers * ROWS * OUTPUT_BYTES * (2 if self.value_dim > 64 else 1)
        facts = 4 * self.consumers * (2 * self.value_dim + (3 if self.fuse_q_quant else 2) * ROWS) + 8 * self.stages
        # K's mean of two tiles, four barriers and sinks
        facts += 2 * 2 * self.head_dim + 4 * 8 + 4 * self.consumers if self.mean_by_products else 0
        tiles, barriers = (128 if self.varlen else 32) * 4, 8 * (2 * self.consumers + 4 * self.stages)
        # swizzled boxes start at multiples of 1024 bytes
        return q + kv + round_up(128 + work_tiles + shown + key_facts, 1024) + added + output + round_up(facts + tiles + barriers, 1024)

    @property
    def mean_by_products(self) -> bool:
        """Whether tensor cores multiply queries by K's mean. C++'s Shape says why not."""
        return self.fuse_q_quant and not self.skips_blocks

    def does(self, call: Call) -> bool:
        """Whether the instance supports all operations on a call's scores."""
        wanted = scores_of(call)
        if self.varlen != (call.varlen is not None):
            return False
        if self.softcap or wanted == "softcap":
            return self.scores == wanted
        if self.window or wanted == "window":
            return wanted in (self.scores, "plain") and self.window
        return SCORES.index(self.scores) >= SCORES.index(wanted)

    @functools.cached_property
    def partial_bytes(self) -> int:
        """sizeof(Partial) of all consumers, in bytes: sums of P·V, and m and sums of P of each thread's two rows. 0 if
        CTAs share no tiles."""
        return self.consumers * 128 * (2 * self.value_dim + 16) if self.stream_k else 0

    @property
    def name(self) -> str:
        return "hopper_" + "_".join(str(int(x)) for x in astuple(self))


def round_up(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple of `multiple`."""
    return -(-size // multiple) * multiple


def unsupported_arch(device: Device) -> str | None:
    """The reason why kernels for sm_90a can't run on a device, or None if they can."""
    if device.emulated or device.arch // 10 != 9:
        return f"it needs sm_90; this is {'an emulation' if device.emulated else f'sm_{device.arch}'}, {device.name}"
    return None


def unsupported_shared_memory(size: int, device: Device) -> str | None:
    """The reason why `size` bytes of shared memory don't fit, or None if they do."""
    return f"it takes {size} bytes of shared memory; there are {device.shared_memory}" if size > device.shared_memory else None


def unsupported_config(config: HopperConfig, device: Device) -> str | None:
    """The reason why a config can't run on a device, or None if it can."""
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
"""The compiled instances, and the speed of each relative to the fastest one of its head dims, with plenty of tiles
(H100, 16k tokens)."""

INSTANCES = tuple(config for config in SPEEDS if not config.masked and not config.added)


def _with_int8(configs: tuple[HopperConfig, ...]) -> tuple[HopperConfig, ...]:
    """The int8 variants of configs, with fewer exact exponentials.

    int8 accumulators start from a constant, which takes issue slots. Fewest are left at head dim 64, where all codes
    are computed directly: 3 to 7 % faster, errors 2 % larger. Up to head dim 128, half as many groups are exact as for
    e4m3: 2 to 4 % faster, errors 1 % larger.
    """

    def exact(config: HopperConfig) -> int:
        return 0 if config.head_dim == 64 else config.exact // 2 if config.head_dim <= 128 else config.exact

    return tuple(replace(config, int8=True, exact=exact(config)) for config in configs)


INT8_INSTANCES = _with_int8(INSTANCES)
"""The same for int8, compiled separately on first use."""


def _with_fused_q(configs: tuple[HopperConfig, ...]) -> tuple[HopperConfig, ...]:
    """The fused-query variants of configs, for head dims whose rows the threads of a warpgroup can divide."""
    return tuple(replace(config, fuse_q_quant=True) for config in configs if config.head_dim == config.value_dim and 256 % config.head_dim == 0)


FUSED_Q_INSTANCES = _with_fused_q(tuple(config for config in INSTANCES if not config.general))
"""The same for Q that isn't quantized yet, compiled separately on first use."""

INT8_FUSED_Q_INSTANCES = _with_int8(FUSED_Q_INSTANCES)
"""The same for Q that the kernel quantizes to int8."""

MASKED_INSTANCES = tuple(config for config in SPEEDS if config.masked)
"""Instances for boolean masks, compiled separately on first use."""

INT8_MASKED_INSTANCES = _with_int8(MASKED_INSTANCES)

WINDOW_INSTANCES = tuple(replace(config, window=True) for config in INSTANCES if not config.general)
"""Instances for windows, compiled separately on first use."""

INT8_WINDOW_INSTANCES = _with_int8(WINDOW_INSTANCES)

SOFTCAP_INSTANCES = tuple(replace(config, softcap=True, exact=0) for config in WINDOW_INSTANCES)
"""Instances for soft caps, compiled separately on first use."""

INT8_SOFTCAP_INSTANCES = _with_int8(SOFTCAP_INSTANCES)

ADDED_INSTANCES = tuple(config for config in SPEEDS if config.added)
"""Instances for masks that are added to scores, compiled separately on first use."""

INT8_ADDED_INSTANCES = _with_int8(ADDED_INSTANCES)

Group = tuple[Scores, bool, bool]
"""What instances that are compiled together have in common: (scores, int8, fuse_q_quant). The "plain" groups contain
the general instances, too."""

GROUPS: dict[Group, tuple[HopperConfig, ...]] = {
    ("plain", False, False): INSTANCES,
    ("plain", True, False): INT8_INSTANCES,
    ("plain", False, True): FUSED_Q_INSTANCES,
    ("plain", True, True): INT8_FUSED_Q_INSTANCES,
    ("masked", False, False): MASKED_INSTANCES,
    ("masked", True, False): INT8_MASKED_INSTANCES,
    ("masked", False, True): _with_fused_q(MASKED_INSTANCES),
    ("masked", True, True): _with_fused_q(INT8_MASKED_INSTANCES),
    ("window", False, False): WINDOW_INSTANCES,
    ("window", True, False): INT8_WINDOW_INSTANCES,
    ("window", False, True): _with_fused_q(WINDOW_INSTANCES),
    ("window", True, True): _with_fused_q(INT8_WINDOW_INSTANCES),
    ("softcap", False, False): SOFTCAP_INSTANCES,
    ("softcap", True, False): INT8_SOFTCAP_INSTANCES,
    ("softcap", False, True): _with_fused_q(SOFTCAP_INSTANCES),
    ("softcap", True, True): _with_fused_q(INT8_SOFTCAP_INSTANCES),
    ("added", False, False): ADDED_INSTANCES,
    ("added", True, False): INT8_ADDED_INSTANCES,
    ("added", False, True): _with_fused_q(ADDED_INSTANCES[:-1]),  # without head dim 256, whose loop would spill
    ("added", True, True): _with_fused_q(INT8_ADDED_INSTANCES[:-1]),
}


VARLEN_TILES: dict[Scores, tuple[tuple[int, int, int], ...]] = {
    "plain": ((64, 64, 4), (96, 96, 3), (128, 128, 3), (192, 128, 2), (256, 256, 2)),
    "window": ((64, 64, 4), (96, 96, 3), (128, 128, 3), (256, 256, 2)),
    "softcap": ((64, 64, 4), (128, 128, 3), (256, 256, 2)),
}
"""Head dims of K and V and consumers of the instances for packed sequences: those that models have, with the most
consumers."""

VARLEN_GROUPS: dict[tuple[Scores, bool, bool], tuple[HopperConfig, ...]] = {
    (scores, int8, fuse_q_quant): tuple(
        replace(c, varlen=True) for c in GROUPS[scores, int8, fuse_q_quant] if not c.general and (c.head_dim, c.value_dim, c.consumers) in tiles
    )
    for scores, tiles in VARLEN_TILES.items()
    for int8, fuse_q_quant in itertools.product((False, True), repeat=2)
}
"""Instances for packed sequences by (scores, int8, fuse_q_quant), compiled separately on first use."""

FUSED_Q_DIMS = frozenset(config.head_dim for config in FUSED_Q_INSTANCES)


def scores_of(call: AnyCall) -> Scores:
    """The operations on scores that an instance must support for a call."""
    of_options = scores_of_options(call.has_first_key, call.softcap)
    if of_options != "plain":
        return of_options
    of_mask = scores_of_mask(call.attn_mask)
    return "general" if is_general(call) and of_mask != "added" else of_mask


def scores_of_options(has_first_key: bool, softcap: float) -> Scores:
    """The operations on scores that a call's window and soft cap require."""
    return "softcap" if softcap else "window" if has_first_key else "plain"


def is_general(call: AnyCall) -> bool:
    """Whether scores have a bias or scales per key, or the softmax scale isn't positive."""
    return call.bias is not None or call.k_group == 1 or not call.softmax_scale > 0


def unsupported_window(call: Call) -> str | None:
    """The reason why no CUDA instance can run a call with a window or a soft cap, or None if one can or there is
    none."""
    if scores_of(call) in ("window", "softcap") and has_mask_or_is_general(call):
        return f"window or softcap is given beside {MASKS}; the CUDA kernels take it alone"
    return None


MASKS = "attn_mask, scales per key, smoothed queries, or a scale that isn't positive"


def has_mask_or_is_general(call: AnyCall) -> bool:
    """Whether a call has one of MASKS."""
    return is_general(call) or call.attn_mask is not None


def scores_of_mask(attn_mask: torch.Tensor | None) -> Scores:
    """The operations on scores that a call's mask requires."""
    return "plain" if attn_mask is None else "masked" if attn_mask.dtype == torch.bool else "added"


def instances(scores: Scores, int8: bool, fuse_q_quant: bool, varlen: bool = False) -> tuple[HopperConfig, ...]:
    """All instances of a group, which are compiled together."""
    if varlen:
        return VARLEN_GROUPS.get((scores, int8, fuse_q_quant), ())
    return GROUPS["plain" if scores == "general" else scores, int8, fuse_q_quant]


Kind = tuple[Scores, bool, bool, bool, int, int]
"""Properties that an instance must have: (scores, int8, fuse_q_quant, varlen, head_dim, value_dim)."""


def kind(call: AnyCall) -> Kind:
    return scores_of(call), call.int8, call.fuse_q_quant, call.varlen is not None, call.head_dim, call.value_dim


@functools.cache
def _serving(of: Kind) -> tuple[HopperConfig, ...]:
    scores, int8, fuse_q_quant, varlen, head_dim, value_dim = of
    able = [c for c in instances(scores, int8, fuse_q_quant, varlen) if c.scores == scores and head_dim <= c.head_dim and value_dim <= c.value_dim]
    smallest = min(((c.head_dim, c.value_dim) for c in able), default=None)
    return tuple(c for c in able if (c.head_dim, c.value_dim) == smallest)


def serving(call: AnyCall) -> tuple[HopperConfig, ...]:
    """The instances that support a call, with the smallest head dims that are large enough."""
    return _serving(kind(call))


def unsupported_call(call: Call, device: Device) -> str | None:
    """The reason why no instance can run a call, or None if one can."""
    if call.compute != "e4m3":
        return f"the CUDA kernel multiplies e4m3, the recipe computes in {call.compute}"
    if call.two_level is False:
        return "the CUDA kernel accumulates in two levels, the recipe says two_level=False"
    reason = unsupported_window(call) or unsupported_boxes(call) or unsupported_tma(call.q, "query") or unsupported_tma(call.k, "key")
    if reason is None and call.fuse_q_quant:
        reason = _unsupported_q_dims(call.q, call.value_dim)
    reason = reason or unsupported_shards(call)
    if reason is not None:
        return reason
    return _unsupported_kind(kind(call), device)


def unsupported_shards(call: Call) -> str | None:
    """The reason why no instance can run a call whose keys lie in shards, or None if one can or they don't."""
    if call.shards <= 1:
        return None
    if call.batch > 1 or call.varlen is not None or has_mask_or_is_general(call):
        return f"keys lie in shards beside several batches, packed sequences, {MASKS}; the CUDA kernel takes them alone"
    length = call.k.shape[2]
    return f"shards have {length} keys; the CUDA kernel takes multiples of {KEYS}" if length % KEYS else None


def may_quantize(q: torch.Tensor, value_dim: int) -> bool:
    """Whether an instance may quantize q inside the kernel, judged by the properties that torch.compile knows."""
    return q.dtype in HALVES and q.shape[3] == value_dim and value_dim in FUSED_Q_DIMS


def _unsupported_q_dims(q: torch.Tensor, value_dim: int) -> str | None:
    if may_quantize(q, value_dim):
        return None
    dims = " or ".join(str(dim) for dim in sorted(FUSED_Q_DIMS))
    return f"query is {q.dtype}, head dims are {q.shape[3]} and {value_dim}; it takes bfloat16 or float16, and {dims} for both"


def unsupported_q_quant(
    q: torch.Tensor, value_dim: int, softmax_scale: float, qk: ProductType, device: Device, attn_mask: torch.Tensor | None = None,
    scores: Scores = "plain", packed: bool = False,
) -> str | None:  # fmt: skip
    """The reason why no instance can quantize q inside the kernel by recipe.FUSED_RECIPES[qk], or None if one can.

    Args:
        scores: of `scores_of_options`.
        packed: q has packed sequences.
    """
    if scores != "plain" and attn_mask is not None:
        return "attn_mask is given beside window or softcap; it takes one of them"
    if not softmax_scale > 0:
        return f"scale is {softmax_scale}; it takes positive ones"
    of_scores = scores_of_mask(attn_mask) if scores == "plain" else scores
    return (
        _unsupported_q_dims(q, value_dim)
        or unsupported_size("query", q)
        or unsupported_tma(q, "query")
        or _unsupported_kind((of_scores, qk == "int8", True, packed, q.shape[3], value_dim), device)
    )


@functools.cache
def _unsupported_kind(of: Kind, device: Device) -> str | None:
    able = _serving(of)
    if not able and of[3]:
        return "packed sequences are given; the CUDA kernel takes them with one scale per 128 keys and a positive softmax scale"
    if not able:
        return f"head dims are {of[-2]} and {of[-1]}; the CUDA kernel has no instance as large for such a query and mask"
    return unsupported_config(able[0], device)


def choose(call: AnyCall, device: Device) -> HopperConfig:
    """The instance for a call: the one that is done first, estimated by rows and speed. `unsupported_call` must have
    returned None.

    If all tiles take the same time, the last round of tiles takes as long as any other, unless CTAs share it. Tiles of
    causal calls are assigned to CTAs dynamically.
    """
    able = _measured(kind(call))
    if len(able) == 1:
        return able[0].config
    heads, length, blocks, sm_count = call.batch * call.q_heads, call.q_length, -(-call.kv_length // KEYS), device.sm_count
    found, least = able[0], math.inf
    for one in able:
        tiles = heads * -(-length // one.tile_rows)
        if call.causal != "none":
            rounds = max(tiles / sm_count, 1.0)
        else:
            rounds = stream_k.rounds(tiles, blocks, sm_count) if one.stream_k else math.ceil(tiles / sm_count)
        time = rounds * one.tile_rows / one.speed
        if time < least:
            found, least = one, time
    return found.config


class _Measured(NamedTuple):
    """An instance, and what its time follows from."""

    config: HopperConfig
    tile_rows: int
    stream_k: bool
    speed: float


@functools.cache
def _measured(of: Kind) -> tuple[_Measured, ...]:
    """Of the instances of `_serving`."""
    return tuple(_Measured(config, config.tile_rows, config.stream_k, _speed(config)) for config in _serving(of))


def _speed(config: HopperConfig) -> float:
    """Of the measured config that corresponds to a variant: e4m3, with Q quantized before the kernel."""
    plain = replace(config, int8=False, fuse_q_quant=False, window=False, softcap=False, varlen=False)
    return next(speed for measured, speed in SPEEDS.items() if replace(measured, exact=config.exact) == plain)


def stream_k_ranges(call: AnyCall, config: HopperConfig, device: Device) -> int:
    """Number of ranges into which the call's last tiles are split; 1: each tile has one CTA."""
    if not config.stream_k or call.causal != "none":
        return 1
    return stream_k.ranges(call.tiles(config.tile_rows), -(-call.kv_length // KEYS), device.sm_count)
