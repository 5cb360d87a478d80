"""Compiled instances: none is dead, and the tables of docs/instances.md have them all."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import instances, readme
from fp8attn.call import Call, Varlen
from fp8attn.cuda import build, configs, portable
from fp8attn.cuda.configs import HopperConfig, Scores
from fp8attn.cuda.portable import PortableConfig
from fp8attn.device import ARCHITECTURES, Device
from fp8attn.recipe import E4M3, SCALE_BLOCK, Packed

pytestmark = pytest.mark.anywhere

OPTIONS: dict[Scores, dict[str, Any]] = {
    "plain": {},
    "masked": dict(attn_mask=torch.zeros((), dtype=torch.bool)),
    "added": dict(attn_mask=torch.zeros(())),
    "general": dict(k_group=1),
    "window": dict(window=(7, 0), causal="bottom_right"),
    "softcap": dict(softcap=30.0),
}
"""What makes a call need instances for these scores; a mask is expanded."""

DRAWS = 2000
"""Calls that are drawn for an instance at most."""


def drawn(r: random.Random, scores: Scores, dims: tuple[int, int], q_dtype: torch.dtype, int8: bool, varlen: bool = False, **options) -> Call:
    """A call of any size, whose tensors have no memory."""
    heads, length, keys = r.choice((1, 2, 8, 32, r.randint(1, 300))), r.choice((r.randint(1, 700), r.randint(1, 70_000))), r.randint(1, 60_000)

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros((), dtype=dtype).expand(shape)

    tokens = torch.tensor((0, length), dtype=torch.int32), torch.tensor((0, keys), dtype=torch.int32)
    of_tokens = Varlen(Packed(tokens[0], None, length), Packed(tokens[1], None, keys), length, keys)
    fields = dict(compute="e4m3", two_level=None, attn_mask=None, bias=None, k_group=SCALE_BLOCK, causal=r.choice(("none", "bottom_right")))
    fields |= OPTIONS[scores] | options
    if fields["attn_mask"] is not None:
        fields["attn_mask"] = fields["attn_mask"].expand(1, heads, length, keys)
    return Call(
        zeros(1, heads, length, dims[0], dtype=q_dtype), zeros(1, heads, length), 1,
        zeros(1, heads, keys, dims[0], dtype=torch.int8 if int8 else E4M3), zeros(1, heads, 1), v=zeros(1, heads, dims[1], keys, dtype=E4M3),
        v_scale=zeros(1, heads, dims[1]), v_mean=None, kv_length=keys, softmax_scale=1.0, out_dtype=torch.bfloat16, return_lse=False,
        varlen=of_tokens if varlen else None, **fields,
    )  # fmt: skip


def call_for(config: HopperConfig | PortableConfig, r: random.Random) -> Call:
    """A call of the kind that an instance is for."""
    if isinstance(config, HopperConfig):
        q_dtype = torch.bfloat16 if config.fuse_q_quant else torch.int8 if config.int8 else E4M3
        return drawn(r, config.scores, (config.head_dim, config.value_dim), q_dtype, config.int8, config.varlen)
    options = dict(compute="e4m3" if config.e4m3_p else "f16", two_level=None if config.operands == "native" else r.choice((None, False)))
    scores: Scores = "general" if config.general else config.scores
    return drawn(r, scores, (config.head_dim, config.value_dim), torch.int8 if config.int8 else E4M3, config.int8, **options)


def dead(library: tuple, choose: Callable[[Call, Device], Any], device: Device) -> list[str]:
    """The instances of a library that no drawn call chooses."""
    r = random.Random(0)
    return [config.name for config in library if not any(choose(call_for(config, r), device) == config for _ in range(DRAWS))]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_instance_is_chosen_by_some_call(arch: int) -> None:
    for library in build.groups(arch):
        if isinstance(library[0], HopperConfig):
            assert not dead(library, configs.choose, ARCHITECTURES[arch])
        elif isinstance(library[0], PortableConfig):
            assert not dead(library, portable.choose, ARCHITECTURES[arch])


def test_the_walk_finds_a_dead_instance() -> None:
    never = HopperConfig(64, 64, 4, 3, 112, False, 2, False)
    assert dead((never,), configs.choose, ARCHITECTURES[90]) == [never.name]


def test_the_table_has_every_library() -> None:
    rows = instances.rows()
    for arch in instances.ARCHS:
        listed = [library for row in rows for library in row.libraries.get(arch, ())]
        assert len(listed) == len(set(listed)) and set(listed) == set(build.groups(arch))


def test_a_field_without_a_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(instances.FIELDS[HopperConfig], "varlen")
    with pytest.raises(readme.UsageError, match=r"HopperConfig\.varlen has no reason"):
        readme.instance_fields()


@pytest.mark.skipif(shutil.which("readelf") is None, reason="binutils aren't installed")
def test_sizes_of_sections() -> None:
    library = next(Path(sysconfig.get_path("platlib")).rglob("*.so"))
    told = subprocess.run(["readelf", "-SW", str(library)], capture_output=True, text=True, check=True).stdout
    for name in (".text", ".dynstr"):
        size = re.search(rf"\] {re.escape(name)} +\w+ +\w+ \w+ (\w+)", told)
        assert size and instances.section_bytes(library, name.encode()) == int(size[1], 16)
    assert instances.section_bytes(library, b".nv_fatbin") == 0
