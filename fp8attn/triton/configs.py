"""Configs of the Triton kernels: their fields, the conditions under which they fit, and the rules that choose one
without measurement."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from ..call import Call, unsupported_tma
from ..device import Device
from ..recipe import QUERY_GROUP, SCALE_BLOCK
from ..schedule import unsupported_boxes

ROWS = 64
"""Query rows of one Hopper warpgroup."""


@dataclass(frozen=True)
class PortableConfig:
    """Tile sizes and resources of the portable kernel."""

    exact: ClassVar[None] = None
    """As of reference.Arithmetic."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class HopperConfig:
    """Tile sizes and resources of the Hopper kernel.

    Attributes:
        consumers: warpgroups of 64 query rows, 1 to 3. One more warp per team loads.
        block_n: keys per block.
        stages: blocks of K and V in flight.
        registers: registers of a consumer's thread.
        teams: groups of consumers that share a tile's stream of K and V. Each team has its own producer and stages. One
            team loads least; several teams drift apart, so that the start and end of one team's tile overlap with the
            work of another.
    """

    exact: ClassVar[int] = 0
    """As of reference.Arithmetic: all P are direct codes."""

    consumers: int
    block_n: int
    stages: int
    registers: int
    teams: int = 1

    @property
    def members(self) -> int:
        """Consumers of one team."""
        return self.consumers // self.teams

    @property
    def tile_rows(self) -> int:
        """Query rows that one team works on at a time."""
        return ROWS * self.members


Config = PortableConfig | HopperConfig


def split_dim(dim: int, smallest: int) -> tuple[int, int]:
    """One or two powers of two, at least `smallest` each, that cover `dim` with the least padding; (256, 0) for 256."""
    whole = max(smallest, 1 << (dim - 1).bit_length())
    low = whole // 2
    high = max(smallest, 1 << max(dim - low - 1, 0).bit_length())
    return (low, high) if low >= smallest and low + high < whole else (whole, 0)


def head_parts(call: Call) -> tuple[int, int]:
    """The parts of D. Tensor cores take 32 e4m3 or 16 half-precision channels at a time."""
    return split_dim(call.head_dim, 32)


def value_parts(call: Call) -> tuple[int, int]:
    """The parts of Dv. 256 is halved, so that only one half's fresh accumulator is live at a time."""
    parts = split_dim(call.value_dim, 16)
    return (128, 128) if parts == (256, 0) else parts


@dataclass(frozen=True)
class Traits:
    """Everything that a kernel knows at compile time: its one constexpr argument.

    Attributes:
        d0, d1: the parts of D; d1 may be 0.
        dv0, dv1: the parts of Dv.
        window: rows have a first key.
        softcap: scores have a soft cap.
        q_group, k_group: rows under one scale; 0 for all rows of a head.
        int8: Q and K are int8.
        half: P and the operands are half precision, not e4m3.
        native: the compiler supports e4m3. If not, e4m3 is stored as bytes and decoded in the kernel.
        two_level: P·V of every key block gets a fresh accumulator.
        positive: softmax_scale > 0.
        folded: scores are scaled inside the FMA of the exponent. This requires a positive factor, and that nothing is
            done to the scores.
    """

    config: Config
    head_dim: int
    value_dim: int
    d0: int
    d1: int
    dv0: int
    dv1: int
    q_group: int
    k_group: int
    causal: bool
    window: bool
    softcap: bool
    int8: bool
    half: bool
    native: bool
    two_level: bool
    positive: bool
    folded: bool

    @classmethod
    def of(cls, call: Call, config: Config, device: Device) -> Traits:
        half = call.compute == "f16" or not device.has_fp8_units
        two_level = device.has_short_accumulators if call.two_level is None else call.two_level
        additive = call.bias is not None or (call.attn_mask is not None and call.attn_mask.dtype.is_floating_point)
        return cls(
            config,
            call.head_dim,
            call.value_dim,
            *head_parts(call),
            *value_parts(call),
            call.q_group,
            call.k_group,
            causal=call.causal != "none",
            window=call.has_first_key,
            softcap=call.softcap > 0,
            int8=call.int8,
            half=half,
            native=device.has_fp8_units and not device.emulated,
            two_level=two_level and not half,
            positive=call.softmax_scale > 0,
            folded=call.softmax_scale > 0 and not additive and not call.softcap,
        )


ACCUMULATOR_REGISTERS = 208
"""Registers of a thread that accumulators may take. The rest of 255 is for addresses and row statistics."""

REGISTER_FILE = 65_536
"""32-bit registers of one SM."""


def portable_shared_memory(config: PortableConfig, call: Call, device: Device) -> int:
    """Upper bound of the bytes of shared memory that the compiler allocates for a portable kernel."""
    element = 1 if call.compute == "e4m3" and device.has_fp8_units else 2
    head_dim, value_dim = sum(head_parts(call)), sum(value_parts(call))
    tile = config.block_m * config.block_n
    mask = 0 if call.attn_mask is None else call.attn_mask.element_size()
    # bytes of a key block in flight; values per key are float32
    codes = config.block_n * (head_dim + value_dim)
    loads = codes + tile * mask + 4 * config.block_n * ((call.k_group == 1) + (call.bias is not None)) + 16
    queries = config.block_m * head_dim * element
    # P changes its layout; so do scores to which a mask or the NaN of int8 keys is applied
    layouts = tile * (4 if mask or call.int8 else 2)
    # from sm_90 on, there may be two copies of Q; warpgroups multiply K and V in shared memory, and hold them there
    # until they are done
    newer = device.arch >= 90
    kept = newer * (queries + (config.num_warps % 4 == 0) * codes * element)
    loop = loads * max(config.num_stages - 1, 1) + queries + layouts + kept
    return max(loop, 4 * config.block_m * max(value_parts(call)))  # or the output, which is staged after the loop


def unsupported_config(config: Config, call: Call, device: Device) -> str | None:
    """The reason why `config` can't run `call` on `device`, or None if it can."""
    head_dim, value_dim = sum(head_parts(call)), sum(value_parts(call))
    live = max(config.block_n, *value_parts(call))  # scores and fresh P·V are live one after the other
    if isinstance(config, HopperConfig):
        rows, warps = ROWS, 4
        if config.teams not in (1, config.consumers):
            return f"{config.consumers} consumers in {config.teams} teams: there must be one team, or one consumer in each"
        if config.consumers > 1 and call.attn_mask is not None and (call.k_group == 1 or call.int8 or call.bias is not None):
            # an assertion in Triton's axis analysis fails if a worker partition loads both
            return "several consumers that load a mask and, of every key, a scale, int8's mark or a bias: Triton 3.6 can't compile it"
        shared_memory = config.teams * config.stages * config.block_n * (head_dim + value_dim) + config.consumers * ROWS * head_dim + 2048
        if (config.registers * config.consumers + 24) * 128 > REGISTER_FILE:
            return f"{config.consumers} consumers of {config.registers} registers a thread: an SM has {REGISTER_FILE} in all"
        available = config.registers - 32
    else:
        rows, warps = config.block_m, config.num_warps
        shared_memory = portable_shared_memory(config, call, device)
        if call.bias is not None and rows > QUERY_GROUP:
            return f"tiles of {rows} rows: a tile of smoothed queries has one mean, which {QUERY_GROUP} have"
        if rows < 16 * warps:
            return f"{warps} warps of 16 rows for {rows} rows"
        available = ACCUMULATOR_REGISTERS
    if SCALE_BLOCK % config.block_n:
        return f"key blocks of {config.block_n} straddle scale blocks of {SCALE_BLOCK}"
    if shared_memory > device.shared_memory:
        return f"{shared_memory} bytes of shared memory, of which {device.name} has {device.shared_memory}"
    registers = rows * (value_dim + live) // (warps * 32)
    if registers > available:
        return f"{registers} accumulator registers a thread, of which there are {available}"
    return None


def fits(config: Config, call: Call, device: Device) -> bool:
    return unsupported_config(config, call, device) is None


def candidates(call: Call, device: Device) -> list[Config]:
    """The autotuning space for `call`, pruned by `fits`."""
    portable = product((16, 32, 64, 128), (32, 64, 128), (1, 2, 4, 8), (2, 3, 4))
    space: list[Config] = [PortableConfig(*point) for point in portable]
    if device.arch // 10 == 9 and not device.emulated and unsupported_arch(call) is None:
        space += [
            HopperConfig(consumers, block_n, stages, HOPPER_REGISTERS[consumers], teams)
            for consumers, block_n, stages, teams in product((1, 2, 3), (64, 128), (2, 4), (1, 2, 3))
        ]
    return [config for config in space if fits(config, call, device)]


def unsupported_arch(call: Call) -> str | None:
    """The reason why the Hopper kernel can't run a call on any device, or None if it can."""
    if call.compute != "e4m3":
        return f"the Hopper kernel multiplies e4m3, the recipe computes in {call.compute}"
    if call.kv_length == 0:
        return "the Hopper kernel needs at least one key"
    return unsupported_boxes(call) or unsupported_tma(call.q, "query") or unsupported_tma(call.k, "key")


HOPPER_REGISTERS = {1: 240, 2: 240, 3: 160}
"""Registers of a consumer's thread, by number of consumers: the register file without 24 registers for each producer
thread."""


SHORT_CAUSAL = 1024
"""Keys up to which causal calls take teams of one consumer. Two teams load all keys twice."""


def hopper_config(call: Call, device: Device) -> HopperConfig:
    """The default Hopper config: two consumers, of up to 64 channels of e4m3 three in teams of one, or one where they
    don't fit or leave SMs idle; and as many stages as fit.

    Three consumers spill where P·V has 128 channels, or scores are converted from int8. Teams of one have tiles of 64
    rows, of which short causal calls see fewer hidden keys.
    """
    token_chunks = call.batch * call.q_heads * -(-call.q_length // ROWS)
    is_small = sum(value_parts(call)) <= 64 and not call.int8
    is_short = call.causal != "none" and call.varlen is None and call.kv_length <= SHORT_CAUSAL
    for consumers, teams in (*[(3, 3)] * is_small, *[(2, 2)] * is_short, (2, 1), (1, 1)):
        if consumers > 1 and token_chunks < device.sm_count * consumers:
            continue
        for stages in (4, 3, 2):
            config = HopperConfig(consumers, 128, stages, HOPPER_REGISTERS[consumers], teams)
            if fits(config, call, device):
                return config
    return HopperConfig(1, 64, 2, HOPPER_REGISTERS[1])


def portable_config(call: Call, device: Device) -> PortableConfig:
    """The default portable config: the first of a few good configs that fits, from large tiles to small ones."""
    if device.emulated:
        return PortableConfig(64, 64, 4, 1)
    block_m = 64 if call.longest_q > 32 else max(16, 1 << (call.longest_q - 1).bit_length())
    warps = max(block_m // 16, 1)
    for block_n, stages in ((128, 3), (128, 2), (64, 3), (64, 2), (32, 2)):
        config = PortableConfig(block_m, block_n, warps, stages)
        if fits(config, call, device):
            return config
    return PortableConfig(16, 32, 1, 2)
