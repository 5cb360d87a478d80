"""Configs of the portable kernel: their fields, the optimisation ladder, the instances for a GPU, and reasons why a
config or a call can't run."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..call import Call
from ..device import Device
from ..recipe import E4M3_MAX, SCALE_BLOCK
from ..reference import CAUSAL_WINDOW, P_OFFSET
from ..schedule import unsupported_sizes
from . import configs
from .configs import MASKS, REGISTER_FILE, Scores, has_mask_or_is_general, round_up, unsupported_window

Operands = Literal["shared", "registers", "native"]

LANES = 32
HARD_LIMIT = 255
"""Maximum registers of a thread."""

HALF_MAX = 65504.0
"""Largest half-precision number."""


@dataclass(frozen=True)
class PortableConfig:
    """One instance of the portable kernel. The fields of C++'s PortableConfig, in order.

    Attributes:
        head_dim: channels of Q and K in shared memory; at least the call's.
        value_dim: channels of V in shared memory; at least the call's.
        warps: warps that attend, each to its own query rows.
        warp_rows: query rows of a warp.
        splits: warps that share rows, each with a part of every block's keys. Their results are combined by their LSE
            at the end of the tile.
        keys: keys of a block.
        stages: stages of bytes of K and V in flight; 1 waits for each block.
        ctas: CTAs per SM that registers must leave room for.
        tensor_qk: Q·Kᵀ on tensor cores.
        tensor_pv: P·V on tensor cores.
        fused: scores and P stay in the registers of `mma.sync`. Otherwise, they go through shared memory, and tensor
            cores are used through `nvcuda::wmma`.
        swizzle: avoid bank conflicts by an XOR of addresses; otherwise, by padding.
        producers: warps that only load and convert. 0: all warps do everything.
        persistent: as many CTAs as the GPU has room for, each of which processes several tiles.
        fast_exp: one multiply-add and `ex2.approx.ftz`; otherwise, an exact difference and `exp2f`.
        operands: where e4m3 becomes half: in `shared` memory, once for a CTA; in `registers`, on the way to the tensor
            core; nowhere, `native`.
        e4m3_p: P is rounded to e4m3, even if it is multiplied as half. True for recipes with compute type e4m3, false
            for f16.
        general: supports masks, score bias of smoothed queries, scales per key, and softmax scales that aren't
            positive. Fused instances without it support none of these.
        drift: warps wait for stages of K and V, not for one another, and may be one block apart.
        int8: Q and K are int8, and are multiplied as int8.
        half_sums: P·V of a block is summed in half precision. It has twice the rate on GPUs with slower float32 sums
            (GeForce's Ada). P is scaled down so that sums don't overflow.
        window: supports windows that begin at a key of each row's own, and sinks. Fused instances that aren't general
            have it.
        softcap: caps scores. Only instances with windows have it.
    """

    head_dim: int
    value_dim: int
    warps: int
    warp_rows: int
    splits: int
    keys: int
    stages: int
    ctas: int
    tensor_qk: bool
    tensor_pv: bool
    fused: bool
    swizzle: bool
    producers: int
    persistent: bool
    fast_exp: bool
    operands: Operands
    e4m3_p: bool
    general: bool
    drift: bool = False
    int8: bool = False
    half_sums: bool = False
    window: bool = False
    softcap: bool = False

    @property
    def tile_rows(self) -> int:
        """Query rows of a tile."""
        return self.warps // self.splits * self.warp_rows

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return LANES * (self.warps + self.producers)

    @property
    def exchange_bytes(self) -> int:
        """Bytes that warps that share rows exchange."""
        return 4 * (self.splits // 2) * self.tile_rows * (self.value_dim + 8)

    @property
    def p_offset(self) -> int:
        """Binary logarithm of the largest P.

        With half_sums, the sum over a warp's keys of a block stays below 65504, even if all P and V have the largest
        value.
        """
        return math.floor(math.log2(HALF_MAX / (E4M3_MAX * (self.keys // self.splits)))) if self.half_sums else int(P_OFFSET)

    @property
    def registers(self) -> int:
        """Registers that a thread may have, so that `ctas` CTAs fit an SM."""
        return min(REGISTER_FILE // (self.threads * self.ctas) // 8 * 8, HARD_LIMIT)

    @property
    def shared_bytes(self) -> int:
        """sizeof(PortableStorage), in bytes."""

        def tile(rows: int, width: int, swizzle: bool) -> int:
            return round_up(rows * (width if swizzle else width + 16), 128) or 1

        halves = self.operands == "shared"
        slots = (2 if self.producers else 1) if halves else self.stages
        rows, s = self.tile_rows, self.swizzle
        total = tile(rows, self.head_dim * (1 if self.operands == "native" or self.int8 else 2), s)
        total += self.stages * (tile(self.keys, self.head_dim, s) + tile(self.value_dim, self.keys, s))
        half_tiles = tile(self.keys if halves else 0, 2 * self.head_dim, s) + tile(self.value_dim if halves else 0, 2 * self.keys, s)
        total += (slots if halves else 1) * half_tiles
        met = 0 if self.fused else rows
        total += tile(met, 4 * self.keys, False) + tile(met, 2 * self.keys, False)
        total = round_up(total, 4) + 3 * 4 * (met or 4)
        total += 4 * (2 * self.value_dim + 2 * rows)
        total = round_up(total, 8) + 8 * 2 * slots + 6 * 4 + 3 * 8
        return round_up(total, 128)

    @property
    def scores(self) -> Scores:
        """What `group` tells apart."""
        return "softcap" if self.softcap else "window" if self.window else "plain"

    @property
    def name(self) -> str:
        values = (getattr(self, name) for name in self.__dataclass_fields__)
        return "portable_" + "_".join(x if isinstance(x, str) else str(int(x)) for x in values)


DIMS = (64, 128, 256)
"""Head dims of instances. A call's head dims are rounded up."""

GROUPS: tuple[Scores, ...] = ("plain", "window", "softcap")
"""Scores whose instances are compiled apart."""


def unsupported_config(config: PortableConfig, device: Device) -> str | None:
    """The reason why a config can't run on a device, or None if it can."""
    c = config
    if device.emulated or device.arch < 80:
        return f"it needs sm_80 or later; this is {'an emulation' if device.emulated else f'sm_{device.arch}'}, {device.name}"
    if c.operands == "native" and not device.has_fp8_units:
        return f"it multiplies e4m3, which takes sm_89; {device.name} is sm_{device.arch}"
    if c.operands == "native" and not c.e4m3_p:
        return "it multiplies e4m3, so P must be rounded to it"
    if c.half_sums and c.operands != "native":
        return f"operands are {c.operands}; sums of products in half precision are those of e4m3, native"
    if c.int8 and (not c.fused or c.operands == "shared"):
        return "int8 is multiplied as it is by fused products of bytes; operands must be in registers or native, and scores fused"
    if c.window and (not c.fused or c.general):
        return "windows take fused scores, and aren't general"
    if c.softcap and not c.window:
        return "soft caps come with windows"
    if c.head_dim not in DIMS or c.value_dim not in DIMS:
        return f"head dims are {c.head_dim} and {c.value_dim}; they must be among {DIMS}"
    if c.keys not in (32, 64, 128, 256) or c.warp_rows not in (16, 32) or c.stages < 1:
        return f"{c.keys} keys, {c.warp_rows} rows of a warp, {c.stages} stages; they must be 32, 64, 128 or 256, 16 or 32, and 1 at least"
    if c.splits not in (1, 2, 4) or c.warps % c.splits or c.keys < 32 * c.splits:
        return f"{c.splits} of {c.warps} warps share rows and {c.keys} keys; they must be 1, 2 or 4, divide the warps, and have 32 keys each"
    if c.keys // c.splits > SCALE_BLOCK:
        return f"a warp has {c.keys // c.splits} keys of a block; a scale covers {SCALE_BLOCK}"
    if c.splits > 1 and (not c.fused or c.producers):
        return "warps that share rows have fused scores and no producers"
    if c.drift and (not c.fused or c.producers or c.operands == "shared" or c.stages < 3):
        return f"{c.stages} stages, {c.producers} producers, operands {c.operands}; warps that drift need 3, 0, and not `shared`, and fused scores"
    if c.exchange_bytes > c.stages * c.keys * (c.head_dim + c.value_dim):
        return f"warps that share rows exchange {c.exchange_bytes} bytes, more than lie where K and V were"
    if c.fused and not (c.tensor_qk and c.tensor_pv):
        return "fused scores live in the registers of tensor cores; tensor_qk and tensor_pv must be on"
    if not c.fused:
        if c.warp_rows != 16:
            return f"a warp has {c.warp_rows} rows; where scores meet in shared memory it has 16"
        if c.operands != "shared":
            return f"operands are {c.operands}; where scores meet in shared memory they are halves in shared memory"
        if c.swizzle and (c.tensor_qk or c.tensor_pv):
            return "nvcuda::wmma reads rows at one distance, and so no swizzled tile"
        if c.producers:
            return "producers need consumers that are fused"
    if c.threads > 1024 or c.producers not in (0, 1, 2, 4):
        return f"{c.warps} warps and {c.producers} producers; they must be 1024 threads at most, and producers 0, 1, 2 or 4"
    loaders = LANES * (c.producers or c.warps)
    for width in (c.head_dim, c.keys):
        if loaders * 16 % width or loaders * 16 // width % 8:
            return f"{loaders} threads can't share out rows of {width} bytes by eights of rows"
    if c.shared_bytes > device.shared_memory:
        return f"it takes {c.shared_bytes} bytes of shared memory; there are {device.shared_memory}"
    if c.fused:
        # output, scores, and P as it is packed from them
        accumulators = c.warp_rows // 16 * (c.value_dim // 2 + c.keys // c.splits // 2)
        if accumulators + 40 > c.registers:
            return f"accumulators take {accumulators} registers of a thread; it has {c.registers}"
    return None


def fits(config: PortableConfig, device: Device) -> bool:
    return unsupported_config(config, device) is None


def _rungs(dim: int) -> dict[str, PortableConfig]:
    scalar = PortableConfig(dim, dim, 4, 16, 1, 64, 1, 1, False, False, False, False, 0, False, False, "shared", True, False)
    wmma_qk = replace(scalar, tensor_qk=True)
    asynchronous = replace(wmma_qk, stages=2)
    wmma_pv = replace(asynchronous, tensor_pv=True)
    fused = replace(wmma_pv, fused=True)
    three = replace(fused, stages=3)
    swizzled = replace(three, swizzle=True)
    specialised = replace(swizzled, producers=2)
    persistent = replace(specialised, persistent=True)
    fast = replace(persistent, fast_exp=True)
    native = replace(fast, operands="native")
    return {
        "0 scalar": scalar,
        "1 wmma-qk": wmma_qk,
        "2 cp.async": asynchronous,
        "3 wmma-pv": wmma_pv,
        "4 fused softmax": fused,
        "5 three stages": three,
        "6 swizzle": swizzled,
        "7 warp-specialised": specialised,
        "8 persistent": persistent,
        "9 fast exp": fast,
        "10 native e4m3": native,
    }


LADDER = {dim: _rungs(dim) for dim in (64, 128)}
"""The rungs of the optimisation ladder by head dim. Each rung adds one feature to the one before."""


def _best(fastest: PortableConfig) -> dict[str, PortableConfig]:
    return {"11 register operands": fastest, "12 int8 qk": replace(fastest, int8=True)}


BEST = {
    64: _best(PortableConfig(64, 64, 8, 16, 2, 256, 2, 1, True, True, True, True, 0, False, True, "registers", True, False)),
    128: _best(PortableConfig(128, 128, 8, 16, 1, 128, 3, 1, True, True, True, True, 0, False, True, "registers", True, False, drift=True)),
}
"""By head dim, the combination of features that is fastest on an H100; then the same with Q and K in int8. Every GPU
from sm_80 on multiplies int8 directly, so K needs no conversion, which is half of all conversions."""


MEASURED = {
    PortableConfig(64, 64, 4, 32, 1, 64, 3, 2, True, True, True, True, 0, False, True, "registers", True, False): 1.0,
    PortableConfig(64, 64, 8, 16, 2, 256, 2, 1, True, True, True, True, 0, False, True, "registers", True, False): 0.84,
    PortableConfig(64, 64, 4, 16, 1, 64, 3, 2, True, True, True, True, 0, False, True, "registers", True, True): 1.0,
    PortableConfig(128, 128, 8, 16, 1, 128, 3, 1, True, True, True, True, 0, False, True, "registers", True, False, True): 1.0,
    PortableConfig(128, 128, 4, 16, 1, 128, 2, 2, True, True, True, True, 0, False, True, "registers", True, False): 0.94,
    PortableConfig(128, 128, 4, 16, 1, 64, 2, 2, True, True, True, True, 0, False, True, "registers", True, True): 1.0,
    PortableConfig(256, 256, 8, 16, 1, 64, 2, 1, True, True, True, True, 0, False, True, "registers", True, False): 1.0,
    PortableConfig(256, 256, 4, 16, 1, 32, 3, 2, True, True, True, True, 0, False, True, "registers", True, False): 0.8,
    PortableConfig(256, 256, 4, 16, 1, 32, 3, 2, True, True, True, True, 0, False, True, "registers", True, True): 1.0,
    PortableConfig(64, 64, 4, 16, 1, 64, 3, 3, True, True, True, True, 0, False, True, "native", True, False): 1.0,
    PortableConfig(64, 64, 8, 16, 2, 128, 3, 1, True, True, True, True, 0, False, True, "native", True, False): 0.9,
    PortableConfig(64, 64, 4, 16, 1, 64, 3, 2, True, True, True, True, 0, False, True, "native", True, True): 1.0,
    PortableConfig(128, 128, 4, 16, 1, 64, 2, 2, True, True, True, True, 0, False, True, "native", True, False): 1.0,
    PortableConfig(128, 128, 4, 16, 1, 64, 2, 2, True, True, True, True, 0, False, True, "native", True, True): 1.0,
}
"""The compiled instances, and the speed of each relative to the fastest one of its head dims and operands, with plenty
of tiles (H100, 4k tokens). Not measured: `native`, and int8 except for head dim 128. There are no native instances of
head dim 256: their accumulators need more registers than there are."""


def _variants(config: PortableConfig, speed: float) -> dict[PortableConfig, float]:
    """Variants of a config: with P in half, except for eight warps of head dim 256, which would spill on sm_80; and
    with int8 for the fastest config; and with windows for the fastest, unless it is general."""
    halves = config.operands != "native" and (config.head_dim, config.warps) != (256, 8)
    found = [config, replace(config, e4m3_p=False)] if halves else [config]
    found += [replace(c, int8=True) for c in found if speed == 1.0]
    found += [replace(c, window=True, softcap=x) for x in (False, True) for c in found if speed == 1.0 and not (c.general or c.window)]
    return dict.fromkeys(found, speed)


SPEEDS = {variant: speed for config, fastest in MEASURED.items() for variant, speed in _variants(config, fastest).items()}

INSTANCES = tuple(SPEEDS)


def scores_of(call: Call) -> Scores:
    """The operations on scores that an instance must support for a call: those with windows add sinks."""
    scores = configs.scores_of(call)
    return "window" if call.sinks is not None and scores == "plain" else scores


def takes(config: PortableConfig, call: Call) -> bool:
    """Whether an instance supports a call."""
    if config.head_dim < call.head_dim or config.value_dim < call.value_dim or config.int8 != call.int8:
        return False
    if config.e4m3_p != (call.compute == "e4m3") or (config.operands == "native" and call.two_level is False):
        return False
    scores = scores_of(call)
    if config.softcap or scores == "softcap":
        return config.softcap and scores == "softcap"
    if config.window or scores == "window":
        return config.window and scores in ("window", "plain")
    return config.general or not config.fused or scores == "plain"


@functools.cache
def group(dim: int, device: Device, int8: bool = False, scores: Scores = "plain") -> tuple[PortableConfig, ...]:
    """The instances that are compiled together for a head dim (the larger of a call's, rounded up), for int8 or not,
    and that a GPU needs.

    Args:
        scores: `window` or `softcap` for those; any other: for all other scores.
    """
    kind = dim, int8, scores in ("window", "softcap"), scores == "softcap"
    able = (c for c in INSTANCES if (c.head_dim, c.int8, c.window, c.softcap) == kind and fits(c, device))
    return tuple(c for c in able if c.operands != "native" or multiplies_e4m3(device))


def multiplies_e4m3(device: Device) -> bool:
    """Whether the GPU has an `mma.sync` instruction for e4m3.

    Hopper's tensor cores take e4m3 only by wgmma. There, `mma.sync` of e4m3 is compiled to conversions of both operands
    and products of halves, which cost more than converting once.
    """
    return device.has_fp8_units and device.arch // 10 != 9


def padded_dim(call: Call) -> int:
    """The head dim of the instances for a call."""
    return next(dim for dim in DIMS if dim >= max(call.head_dim, call.value_dim))


@functools.cache
def _serving(dim: int, scores: Scores, e4m3_p: bool, native: bool, int8: bool, device: Device) -> tuple[PortableConfig, ...]:
    general = scores not in ("plain", "window", "softcap")
    able = [c for c in group(dim, device, int8, scores) if c.general >= general and c.e4m3_p == e4m3_p]
    units = [c for c in able if c.operands == "native" and native] or [c for c in able if c.operands == "registers"]
    exact = [c for c in units if c.general == general]
    return tuple(exact or units)


def serving(call: Call, device: Device) -> tuple[PortableConfig, ...]:
    """The shipped instances for a call. They use e4m3 tensor cores if the GPU has them and the recipe allows them."""
    e4m3_p = call.compute == "e4m3"
    return _serving(padded_dim(call), scores_of(call), e4m3_p, e4m3_p and call.two_level is not False, call.int8, device)


def unsupported_call(call: Call, device: Device) -> str | None:
    """The reason why no instance can run a call, or None if one can."""
    if device.emulated or device.arch < 80:
        return unsupported_config(INSTANCES[0], device)
    if call.fuse_q_quant:
        return f"query is {call.q.dtype}; the portable kernel takes what is quantized"
    if call.shards > 1:
        return "keys lie in shards; the portable kernel takes them in one tensor"
    if call.v.data_ptr() % 16 or not call.v.is_contiguous():
        return "quantized values aren't contiguous from a multiple of 16 bytes on"
    reason = unsupported_window(call)
    if reason is not None:
        return reason
    if call.sinks is not None and has_mask_or_is_general(call):
        return f"sinks is given beside {MASKS}; the portable kernel takes it alone"
    if not serving(call, device):
        return f"no instance of head dim {padded_dim(call)} fits {device.name}"
    return unsupported_sizes(call)


MOST_KEY_SPLITS = 64
"""Largest number of key splits of a tile. The combine kernel reads as many parts of every row."""


LEAST_KEYS = 512
"""Fewest keys of a CTA if several share a tile. At 3 µs per block of 128 keys (H100), its work then takes longer than
the launch of the combine kernel."""


def key_splits(call: Call, config: PortableConfig, device: Device) -> int:
    """Number of CTAs that share a tile, each with a range of its keys: enough to occupy every SM, but each with at
    least LEAST_KEYS. Flash-Decoding (Dao et al., 2023)."""
    if config.persistent or call.sinks is not None:  # every part of a row's keys would add its sink
        return 1
    return max(min(device.sm_count // call.tiles(config.tile_rows), call.kv_length // LEAST_KEYS, MOST_KEY_SPLITS), 1)


SHORT = 64
"""Rows of the smallest tile. In calls with fewer query rows, a tile has room for rows of several heads."""


def rows_of_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, H, S, D) as (B, H / heads, heads · S, D), without a copy: the rows of `heads` heads, one head after the
    other."""
    batch, all_heads, length, dim = x.shape
    step = x.stride(1) if length == 1 else x.stride(2)
    return x.as_strided((batch, all_heads // heads, heads * length, dim), (x.stride(0), heads * x.stride(1), step, 1))


def packed(call: Call) -> Call:
    """A call with few queries, in which the query heads of one key/value head become rows of one head, so that keys are
    read once for all of them.

    The call itself if those rows don't see the same keys, or aren't evenly spaced in memory.
    """
    heads = call.q_heads // call.kv_heads
    assert call.q_scale is not None
    per_head = call.q_scale.shape[2] == 1
    if heads == 1 or call.q_length >= SHORT or call.attn_mask is not None or call.bias is not None or not (per_head or call.q_group == 1):
        return call
    if call.has_first_key or call.sinks is not None or call.mean_scores is not None:
        return call
    if call.q_length > 1 and (call.causal != "none" or call.q.stride(1) != call.q_length * call.q.stride(2)):
        return call
    return replace(
        call,
        q=rows_of_heads(call.q, heads),
        q_scale=call.q_scale.reshape(call.batch, call.kv_heads, -1),
        q_group=call.q_length if per_head else 1,
        kv_length=min(call.kv_length, call.window_offsets[1] + 1),
        causal="none",
        window=CAUSAL_WINDOW,
    )


def choose(call: Call, device: Device) -> PortableConfig:
    """The instance for a call: the one that is done first, estimated by rows and speed, with `ctas` tiles at a time on
    an SM."""
    call = packed(call)

    def time(config: PortableConfig) -> float:
        rounds = call.tiles(config.tile_rows) / device.sm_count
        at_once = min(config.ctas, max(rounds, 1.0))
        return math.ceil(rounds / at_once) * at_once * config.tile_rows / SPEEDS[config]

    return min(serving(call, device), key=time)
