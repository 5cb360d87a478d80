"""The search space: the configs of every kernel, split into structure and tiles."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fp8attn.call import Call
from fp8attn.cuda import configs as cuda_configs
from fp8attn.cuda import portable as cuda_portable
from fp8attn.cuda import run as cuda_run
from fp8attn.cuda.configs import HopperConfig as CudaHopperConfig
from fp8attn.cuda.portable import PortableConfig as CudaPortableConfig
from fp8attn.device import Device
from fp8attn.triton import configs as triton_configs
from fp8attn.triton import run as triton
from fp8attn.triton.configs import HopperConfig as TritonHopperConfig
from fp8attn.triton.configs import PortableConfig as TritonPortableConfig

CudaConfig = CudaHopperConfig | CudaPortableConfig
Config = TritonPortableConfig | TritonHopperConfig | CudaConfig
KERNELS: dict[str, type] = {
    "triton portable": TritonPortableConfig,
    "triton hopper": TritonHopperConfig,
    "cuda hopper": CudaHopperConfig,
    "cuda portable": CudaPortableConfig,
}
BACKENDS = ("triton", "cuda")


def to_json(config: Config) -> dict[str, Any]:
    kernel = next(name for name, kind in KERNELS.items() if isinstance(config, kind))
    return {"kernel": kernel, **dataclasses.asdict(config)}


def from_json(entry: dict[str, Any]) -> Config:
    fields = dict(entry)
    return KERNELS[fields.pop("kernel")](**fields)


@dataclass(frozen=True)
class Space:
    """One kernel's configs.

    Attributes:
        kernel: their class.
        fixed: fields that aren't searched: requirements of the call, and fields that would change an answer beyond
            rounding.
        structure: fields of the outer layer and their values: switches, roles, stages.
        tiles: fields of the inner layer: sizes and counts.
    """

    kernel: type
    fixed: dict[str, Any]
    structure: dict[str, tuple[Any, ...]]
    tiles: dict[str, tuple[Any, ...]]

    def config(self, structure: dict[str, Any], tiles: dict[str, Any]) -> Config:
        return self.kernel(**self.fixed, **structure, **tiles)

    def layers(self, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
        """A config's structure and tiles."""
        return {name: getattr(config, name) for name in self.structure}, {name: getattr(config, name) for name in self.tiles}

    def owns(self, config: Config) -> bool:
        """Whether a config is in this space."""
        return type(config) is self.kernel and all(getattr(config, name) == value for name, value in self.fixed.items())

    def everything(self) -> Iterator[Config]:
        values = {**self.structure, **self.tiles}
        for point in itertools.product(*values.values()):
            yield self.kernel(**self.fixed, **dict(zip(values, point, strict=True)))

    def bred(self, parents: Sequence[Config], dice: random.Random) -> Iterator[Config]:
        """A child structure with a few tiles.

        The outer layer mutates one field of a parent's structure, crosses the structures of two parents, or draws a new
        one. The inner layer takes the parent's tiles, and all single steps from them in one field.
        """
        mine = [parent for parent in parents if self.owns(parent)]
        if not mine or dice.random() < 0.25:
            structure = {name: dice.choice(values) for name, values in self.structure.items()}
            tiles = {name: dice.choice(values) for name, values in self.tiles.items()}
        else:
            structure, tiles = self.layers(dice.choice(mine))
            other, _ = self.layers(dice.choice(mine))
            structure = {name: dice.choice((value, other[name])) for name, value in structure.items()}
            if dice.random() < 0.75:
                name = dice.choice(list(self.structure))
                structure[name] = dice.choice(self.structure[name])
        yield self.config(structure, tiles)
        for name, values in self.tiles.items():
            at = values.index(tiles[name]) if tiles[name] in values else 0
            for near in {max(at - 1, 0), min(at + 1, len(values) - 1)} - {at}:
                yield self.config(structure, tiles | {name: values[near]})


def spaces(backend: str, call: Call, device: Device) -> list[Space]:
    """The spaces that may contain a call's config."""
    if backend == "cuda":
        return [_cuda_space(cuda_run.choose(call, device))]
    found = [
        Space(
            TritonPortableConfig,
            {},
            {"num_warps": (1, 2, 4, 8), "num_stages": (1, 2, 3, 4)},
            {"block_m": (16, 32, 64, 128), "block_n": (32, 64, 128)},
        )
    ]
    if triton.unsupported_arch(call, device) is None:
        structure = {"consumers": (1, 2, 3, 4), "teams": (1, 2, 3), "stages": (2, 3, 4)}
        found.append(Space(TritonHopperConfig, {}, structure, {"block_n": (64, 128), "registers": (112, 136, 160, 200, 240)}))
    return found


def _cuda_space(shipped: CudaConfig) -> Space:
    """The space around the instance that runs a call: of the Hopper kernel if that runs it, else of the portable
    kernel."""
    if isinstance(shipped, CudaHopperConfig):
        fixed = {name: getattr(shipped, name) for name in ("head_dim", "value_dim", "exact", "general", "int8", "fuse_q_quant", "masked", "added")}
        structure = {"consumers": (1, 2, 3, 4), "overlap": (False, True), "stages": (2, 3, 4, 5, 6)}
        return Space(CudaHopperConfig, fixed, structure, {"registers": tuple(range(88, 248, 8))})
    names = ("head_dim", "value_dim", "tensor_qk", "tensor_pv", "fused", "fast_exp", "operands", "e4m3_p", "general", "int8")
    return Space(
        CudaPortableConfig,
        {name: getattr(shipped, name) for name in names},
        {
            "drift": (False, True), "swizzle": (False, True), "producers": (0, 1, 2, 4),
            "persistent": (False, True), "splits": (1, 2, 4), "stages": (1, 2, 3, 4),
        },
        {"warps": (2, 4, 8, 16), "warp_rows": (16, 32), "keys": (32, 64, 128, 256), "ctas": (1, 2, 3, 4)},
    )  # fmt: skip


def unsupported_config(config: Config, call: Call, device: Device) -> str | None:
    """The reason why a config can't run a call on a device, or None if it can."""
    if isinstance(config, CudaHopperConfig):
        return cuda_configs.unsupported_config(config, device)
    if isinstance(config, CudaPortableConfig):
        return cuda_portable.unsupported_config(config, device)
    return triton_configs.unsupported_config(config, call, device)


def shipped(backend: str, call: Call, device: Device) -> list[Config]:
    """The config that runs a call now, then all other configs that tables and rules have for it."""
    if backend == "cuda":
        first = cuda_run.choose(call, device)
        others = cuda_configs.serving(call) if isinstance(first, CudaHopperConfig) else cuda_portable.serving(call, device)
        return [first, *(config for config in others if config != first)]
    rules: list[Config] = [triton.choose(call, device), triton_configs.portable_config(call, device)]
    if triton.unsupported_arch(call, device) is None:
        rules.append(triton_configs.hopper_config(call, device))
    return list(dict.fromkeys(rules))


def unsupported_call(backend: str, call: Call, device: Device) -> str | None:
    """The reason why a backend has no config for a call, or None if it has one."""
    planned = cuda_run.plan(call, device) if backend == "cuda" else None
    return planned if isinstance(planned, str) else None
