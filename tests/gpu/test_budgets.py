"""What nvcc makes of every shipped instance: registers, stack, spills, no wgmma made synchronous. The default tier has one of a kind."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from compiling import compiled, numbers
from fp8attn.cuda import append, decode, decode_tensors, fused_head, fused_small, general_quantize, portable, prefill, quantize
from fp8attn.cuda.append import AppendConfig
from fp8attn.cuda.configs import GROUPS, REGISTER_FILE, HopperConfig, round_up
from fp8attn.cuda.decode import DecodeConfig
from fp8attn.cuda.decode_tensors import DecodeTensorsConfig
from fp8attn.cuda.fused_head import FusedHeadConfig
from fp8attn.cuda.fused_small import FusedSmallConfig
from fp8attn.cuda.general_quantize import GeneralQuantizeConfig, UnsmoothLseConfig
from fp8attn.cuda.portable import DIMS, PortableConfig
from fp8attn.cuda.prefill import PrefillConfig
from fp8attn.cuda.quantize import QuantizeConfig
from fp8attn.device import ARCHITECTURES, SHARED_MEMORY
from instances import QUANTIZED, VARLEN, VARLEN_FUSED_Q

pytestmark = pytest.mark.anywhere

FUSED_Q = tuple(config for (_, _, fuse_q_quant), group in GROUPS.items() if fuse_q_quant for config in group)

RESERVED_SHARED = 1024
"""Bytes of every CTA that the system keeps (CUDA C++ Programming Guide, compute capability 9.0)."""

STACK = {
    HopperConfig(192, 192, 2, 3, 232, False, 2, True): 16,
    HopperConfig(192, 192, 2, 3, 232, False, 2, True, True): 16,
    HopperConfig(256, 256, 2, 2, 232, False, 2, True): 16,
    HopperConfig(256, 256, 2, 2, 232, False, 2, True, True): 16,
    HopperConfig(192, 192, 2, 3, 232, False, 2, True, added=True): 16,
    HopperConfig(192, 192, 2, 3, 232, False, 2, True, True, added=True): 16,
    HopperConfig(256, 256, 2, 2, 232, False, 2, True, added=True): 16,
    HopperConfig(256, 256, 2, 2, 232, False, 2, True, True, added=True): 16,
    HopperConfig(64, 64, 4, 4, 112, False, 2, False, False, True, masked=True): 32,
    HopperConfig(64, 64, 4, 4, 112, False, 0, False, True, True, masked=True): 56,
    HopperConfig(256, 256, 2, 2, 224, False, 2, False, False, True, masked=True): 48,
    HopperConfig(256, 256, 2, 2, 224, False, 2, False, True, True, masked=True): 64,
    HopperConfig(64, 64, 4, 4, 112, False, 2, False, masked=True): 56,
    HopperConfig(64, 64, 4, 4, 112, False, 0, False, True, masked=True): 64,
    HopperConfig(192, 192, 2, 3, 232, False, 2, False, masked=True): 16,
    HopperConfig(192, 192, 2, 3, 232, False, 2, False, True, masked=True): 16,
    HopperConfig(256, 256, 2, 2, 224, False, 2, False, True, masked=True): 16,
    HopperConfig(64, 64, 4, 4, 112, False, 0, False, True): 8,
    HopperConfig(128, 128, 3, 4, 160, False, 1, False, True): 16,
    HopperConfig(64, 64, 4, 4, 112, False, 0, False, True, True): 8,
    HopperConfig(128, 128, 3, 4, 160, False, 1, False, True, True): 16,
    HopperConfig(64, 64, 4, 4, 112, False, 2, False, False, False, window=True): 8,
    HopperConfig(64, 64, 4, 4, 112, False, 0, False, False, False, window=True, softcap=True): 32,
    HopperConfig(128, 128, 3, 4, 160, False, 0, False, False, False, window=True, softcap=True): 16,
    HopperConfig(256, 256, 1, 2, 240, False, 0, False, False, False, window=True, softcap=True): 8,
    HopperConfig(64, 64, 4, 4, 112, False, 0, False, True, False, window=True): 32,
    HopperConfig(128, 128, 3, 4, 160, False, 1, False, True, False, window=True): 16,
    HopperConfig(64, 64, 4, 4, 112, False, 0, False, True, False, window=True, softcap=True): 48,
    HopperConfig(128, 128, 3, 4, 160, False, 0, False, True, False, window=True, softcap=True): 24,
    HopperConfig(64, 64, 4, 4, 112, False, 2, False, False, True, window=True): 8,
    HopperConfig(64, 64, 4, 4, 112, False, 0, False, False, True, window=True, softcap=True): 32,
    HopperConfig(128, 128, 3, 4, 160, False, 0, False, False, True, window=True, softcap=True): 16,
    HopperConfig(256, 256, 1, 2, 240, False, 0, False, False, True, window=True, softcap=True): 16,
    HopperConfig(128, 128, 3, 4, 160, False, 2, False, False, True, window=True): 16,
    HopperConfig(64, 64, 4, 4, 112, False, 0, False, True, True, window=True): 32,
    HopperConfig(128, 128, 3, 4, 160, False, 1, False, True, True, window=True): 48,
    HopperConfig(64, 64, 4, 4, 112, False, 0, False, True, True, window=True, softcap=True): 40,
    HopperConfig(128, 128, 3, 4, 160, False, 0, False, True, True, window=True, softcap=True): 32,
    HopperConfig(256, 256, 1, 2, 240, False, 2, False, True, True, window=True): 8,
    HopperConfig(128, 128, 3, 4, 160, False, 2, False, window=True): 8,
    HopperConfig(256, 256, 1, 2, 240, False, 2, False, False, True, window=True): 8,
    **dict(zip(VARLEN, (0, 0, 0, 0, 0, 8, 0, 16, 0, 0, 8, 0, 8, 0, 32, 0, 16, 0, 32, 16, 0, 40, 24, 0), strict=True)),
    **dict(zip(VARLEN_FUSED_Q, (0, 0, 0, 80, 16, 32, 8, 8, 0, 80, 8, 48, 40, 16, 72, 232, 104, 32), strict=True)),
}
"""Bytes of it that an instance has; the others have none."""

CAPPED_256 = {False: (16, [64, 16]), True: (24, [96, 40])}
"""Portable instances of sm_90 with 256 channels and a soft cap, for e4m3 and int8: bytes of the stack, and bytes stored
to it and loaded."""


def one_of(default: int, instances: tuple, *others: object) -> list[Any]:
    """Parameters of a test: of each instance, the default tier having that of a number."""
    return [pytest.param(*others, c, id=c.name, marks=() if i == default else pytest.mark.thorough) for i, c in enumerate(instances)]


def shipped(arch: int) -> tuple[PortableConfig, ...]:
    """The portable kernel's instances for an architecture."""
    groups = itertools.product(DIMS, (False, True), portable.GROUPS)
    return tuple(c for dim, int8, scores in groups for c in portable.group(dim, ARCHITECTURES[arch], int8, scores))


@pytest.mark.parametrize("config", (*one_of(5, QUANTIZED), *one_of(1, VARLEN)))
def test_hopper(nvcc: str, tmp_path: Path, config: HopperConfig) -> None:
    report = compiled(nvcc, config, 90, tmp_path)
    registers, stack = numbers(report)
    assert "wgmma" not in report, report
    assert stack <= STACK.get(config, 0), report
    assert registers * config.threads <= REGISTER_FILE, report


def entries_of(report: str, kernels: int = 1) -> list[str]:
    """What ptxas says of so many kernels, of either dtype each."""
    entries = report.split("Compiling entry function")[1:]
    assert len(entries) == 2 * kernels and "wgmma" not in report, report
    return entries


@pytest.mark.parametrize("config", one_of(-1, FUSED_Q + VARLEN_FUSED_Q))
def test_hopper_that_quantizes_queries(nvcc: str, tmp_path: Path, config: HopperConfig) -> None:
    for entry in entries_of(compiled(nvcc, config, 90, tmp_path)):
        assert numbers(entry)[1] <= STACK.get(config, 0), entry


@pytest.mark.parametrize("config", one_of(0, fused_small.INSTANCES + fused_head.INSTANCES))
def test_one_launch(nvcc: str, tmp_path: Path, config: FusedSmallConfig | FusedHeadConfig) -> None:
    for entry in entries_of(compiled(nvcc, config, 90, tmp_path)):
        registers, stack = numbers(entry)
        assert stack == 0 and registers * config.threads <= REGISTER_FILE, entry


@pytest.mark.parametrize("config", one_of(0, quantize.INSTANCES))
def test_quantizer(nvcc: str, tmp_path: Path, config: QuantizeConfig) -> None:
    """Registers and shared memory for as many CTAs as a config says; no stack, no spills."""
    # those that write keys are for e4m3 or int8; of long heads, two more measure and finish; packed ones have clusters, too
    for entry in entries_of(compiled(nvcc, config, 90, tmp_path), 2 + 2 * config.is_long + 2 * config.packed):
        registers, stack = numbers(entry)
        assert stack == 0 and "0 bytes spill stores, 0 bytes spill loads" in entry, entry
        assert registers * config.threads * config.ctas <= REGISTER_FILE, entry
    assert config.ctas * (config.shared_bytes + RESERVED_SHARED) <= SHARED_MEMORY[90] + RESERVED_SHARED  # of an SM


@pytest.mark.parametrize(
    "arch, config",
    [
        parameter
        for arch in ARCHITECTURES
        for parameter in one_of(general_quantize.INSTANCES.index(general_quantize.UNSMOOTHER) if arch == 90 else -1, general_quantize.INSTANCES, arch)
    ],
)
def test_general_quantizer(nvcc: str, tmp_path: Path, arch: int, config: GeneralQuantizeConfig | UnsmoothLseConfig) -> None:
    """Of every dtype: registers for as many CTAs as a config says; no stack, no spills. But a thread that rotates 64
    channels spills some numbers that the loop over blocks doesn't change, and elsewhere than on Hopper others spill two
    that one thread of a CTA needs for each block."""
    entries = compiled(nvcc, config, arch, tmp_path).split("Compiling entry function")[1:]
    # that measures and those that write e4m3 and int8, for each dtype; one that finishes; of both halves, one that writes
    # values, and those that write rows of each part, or of none, in e4m3 and int8
    assert len(entries) == (10 + 2 * (1 + 2 * 5) if isinstance(config, GeneralQuantizeConfig) else 3)
    for entry in entries:
        registers, stack = numbers(entry)
        if "general_write_rows" in entry and ("ILi64" in entry or arch != 90):
            assert stack <= (32 if "ILi64" in entry else 8), entry
        else:
            assert stack == 0 and "0 bytes spill stores, 0 bytes spill loads" in entry, entry
        if "general_write_rows" in entry:
            assert registers <= (80 if "ILi64" in entry else 64), entry
            continue
        threads = general_quantize.MEASURERS if "general_measure" in entry or "general_finish" in entry else config.threads
        assert registers * threads * config.ctas <= REGISTER_FILE, entry


STACK_OF_DECODE = {False: 8, True: 24}
"""Bytes of a thread's stack, without and with windows, soft caps and sinks: it keeps what a tile needs beside its blocks."""


@pytest.mark.parametrize("config", one_of(0, decode.INSTANCES))
def test_decode(nvcc: str, tmp_path: Path, config: DecodeConfig) -> None:
    check_decode(compiled(nvcc, config, 90, tmp_path), config, STACK_OF_DECODE[config.any_scores])


STACK_OF_TENSORS = {64: 56, 128: 56, 256: 80}
"""The same of caches of other engines, by head dim. Most is of four groups of rows, and of many rows with scales per token."""


@pytest.mark.parametrize("config", one_of(1, decode_tensors.INSTANCES))
def test_decode_of_tensors(nvcc: str, tmp_path: Path, config: DecodeTensorsConfig) -> None:
    check_decode(compiled(nvcc, config, 90, tmp_path), config, STACK_OF_TENSORS[config.head_dim])


def check_decode(report: str, config: DecodeConfig | DecodeTensorsConfig, most_stack: int) -> None:
    """Registers and shared memory for as many CTAs on each SM as a config says."""
    for entry in entries_of(report):
        registers, stack = numbers(entry)
        assert stack <= most_stack, entry
        warps = -(-config.ctas * config.threads // (4 * 32))  # of a quarter of an SM, which has a quarter of the registers
        assert round_up(registers, 8) * 32 * warps <= REGISTER_FILE // 4, entry
    assert config.ctas * (config.shared_bytes + RESERVED_SHARED) <= SHARED_MEMORY[90] + RESERVED_SHARED


STACK_OF_PREFILL = {
    (64, False): (16, 16), (64, True): (16, 32), (128, False): (32, 40), (128, True): (56, 72), (256, False): (32, 32), (256, True): (32, 32),
}  # fmt: skip
"""Bytes of a thread's stack of instances with as many consumers as registers allow, by head dim and whether there is a soft cap: in e4m3 and int8.
Much of it is the producer's, which has 24 to 40 registers."""
STACK_OF_TWO_CONSUMERS = 8
"""The same of instances with two of three consumers. Others have none."""


@pytest.mark.parametrize("config", one_of(2, prefill.INSTANCES))
def test_prefill(nvcc: str, tmp_path: Path, config: PrefillConfig) -> None:
    """Shared memory and stack; no wgmma made synchronous, in e4m3 or half precision."""
    most_consumers = max(c.consumers for c in prefill.INSTANCES if c.head_dim == config.head_dim)
    fewer = STACK_OF_TWO_CONSUMERS if config.consumers == 2 else 0
    stack = STACK_OF_PREFILL[config.head_dim, config.capped][config.int8] if config.consumers == most_consumers else fewer
    for entry in entries_of(compiled(nvcc, config, 90, tmp_path)):
        assert numbers(entry)[1] <= stack, entry
    assert config.shared_bytes <= SHARED_MEMORY[90] and config.consumers * config.registers + 24 <= REGISTER_FILE // 128


@pytest.mark.parametrize("arch, config", [*one_of(-1, append.INSTANCES, 80), *one_of(-1, append.INSTANCES, 89), *one_of(0, append.INSTANCES, 90)])
def test_append(nvcc: str, tmp_path: Path, arch: int, config: AppendConfig) -> None:
    """Of both dtypes, in e4m3 and int8: registers and shared memory for as many CTAs as it says; no stack, no spills."""
    for entry in entries_of(compiled(nvcc, config, arch, tmp_path), 2):
        registers, stack = numbers(entry)
        assert stack == 0 and "0 bytes spill stores, 0 bytes spill loads" in entry, entry
        assert round_up(registers, 8) * config.threads * config.ctas <= REGISTER_FILE, entry
    # of an SM; those that a CTA of 256 channels doesn't fit, the kernel doesn't support
    assert config.ctas * (config.shared_bytes + RESERVED_SHARED) <= SHARED_MEMORY[90] + RESERVED_SHARED


@pytest.mark.parametrize("arch, config", [*one_of(-1, shipped(80), 80), *one_of(0, shipped(89), 89), *one_of(-1, shipped(90), 90)])
def test_portable(nvcc: str, tmp_path: Path, arch: int, config: PortableConfig) -> None:
    """No spills, no stack, and the registers that let as many CTAs as it says into an SM; 256 channels with a soft cap
    spill on sm_90."""
    report = compiled(nvcc, config, arch, tmp_path)
    registers, stack = numbers(report)
    spills = [int(x) for x in re.findall(r"(\d+) bytes spill", report)]
    capped = arch == 90 and config.head_dim == 256 and config.softcap
    allowed = CAPPED_256[config.int8] if capped else (0, [0, 0])
    assert stack <= allowed[0] and spills <= allowed[1] and registers <= config.registers, report


def test_every_instance_has_a_budget() -> None:
    """Of the Hopper kernel, once; and those that may have a stack are shipped."""
    assert {*QUANTIZED, *FUSED_Q} == {config for group in GROUPS.values() for config in group} and not {*QUANTIZED} & {*FUSED_Q}
    assert STACK.keys() <= {*QUANTIZED, *FUSED_Q, *VARLEN, *VARLEN_FUSED_Q}
    assert all({c.head_dim for c in shipped(arch)} == {*DIMS} for arch in (80, 89, 90))
