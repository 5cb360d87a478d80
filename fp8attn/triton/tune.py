"""The table of measured configs, and the measurement.

A first call never tunes: known GPUs have a shipped table, other GPUs use the heuristics of `configs`. Tuning is
explicit: `python -m bench search` prints configs, and `--write` ships them. With FP8ATTN_AUTOTUNE=1, a process times
the candidates for every kind of call when it first meets it.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict
from pathlib import Path

import triton

from ..call import Call
from ..device import Device
from . import configs
from .configs import Config, HopperConfig, PortableConfig

SHIPPED = Path(__file__).with_name("shipped.json")

_tuned: dict[tuple[str, str], Config] = {}


def kind(call: Call) -> str:
    """The properties of a call on which its measured config depends, as a key of the table."""
    mask = "masked" if call.attn_mask is not None or call.bias is not None else "full" if call.causal == "none" else "causal"
    return f"d{sum(configs.head_parts(call))} dv{sum(configs.value_parts(call))} {call.compute} {mask}"


def to_json(config: Config) -> dict[str, str | int]:
    return {"kernel": "hopper" if isinstance(config, HopperConfig) else "portable", **asdict(config)}


def from_json(entry: dict) -> Config:
    fields = dict(entry)
    return HopperConfig(**fields) if fields.pop("kernel") == "hopper" else PortableConfig(**fields)


@functools.cache
def table() -> dict[str, dict[str, Config]]:
    """The shipped table: GPU name -> kind of call -> config."""
    return {name: {k: from_json(e) for k, e in kinds.items()} for name, kinds in json.loads(SHIPPED.read_text()).items()}


def measured(call: Call, device: Device) -> Config | None:
    """The config that was measured to be best for this kind of call, if there is one and it fits and fills the GPU."""
    config = _tuned.get((device.name, kind(call))) or table().get(device.name, {}).get(kind(call))
    if config is None or not configs.fits(config, call, device) or not fills(config, call, device):
        return None
    if isinstance(config, HopperConfig) and configs.unsupported_arch(call) is not None:
        return None
    return config


def fills(config: Config, call: Call, device: Device) -> bool:
    """Whether there is a tile for every SM. Measurements on large calls say little about smaller ones."""
    if isinstance(config, HopperConfig):
        return call.tiles(config.tile_rows) >= device.sm_count * config.teams
    return call.tiles(config.block_m) >= device.sm_count


def tune(call: Call, device: Device, run) -> list[tuple[float, Config]]:
    """Time every candidate, and remember the best config for the process.

    Args:
        run: callable (call, device, config).

    Returns:
        (milliseconds, config) of every candidate, the best one first.
    """
    times = []
    for config in configs.candidates(call, device):
        try:
            times.append((triton.testing.do_bench(lambda c=config: run(call, device, c), warmup=5, rep=20, return_mode="median"), config))
        except triton.runtime.errors.OutOfResources:
            continue  # `fits` estimates; the compiler decides
    times.sort(key=lambda pair: pair[0])
    if times:
        _tuned[device.name, kind(call)] = times[0][1]
    return times


def wanted() -> bool:
    return os.environ.get("FP8ATTN_AUTOTUNE") == "1"


def known(call: Call, device: Device) -> bool:
    return (device.name, kind(call)) in _tuned or kind(call) in table().get(device.name, {})
