"""Keys and values that lie in shards: the Hopper kernel has the bits of keys in one tensor, and calls that it doesn't take say why."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import emulation
from emulated import Emulated, in_shards, normal
from fp8attn import Recipe
from fp8attn.call import Call
from fp8attn.cuda import configs, portable
from fp8attn.cuda import run as cuda_run
from fp8attn.cuda.configs import GROUPS, KEYS, HopperConfig
from fp8attn.device import ARCHITECTURES, device_of
from fp8attn.prepare import call_of
from fp8attn.quantization import quantize
from fp8attn.recipe import FUSED_RECIPES

H100 = ARCHITECTURES[90]
TAKING = tuple(c for group in GROUPS.values() for c in group if not c.skips_blocks)
KINDS = ((64, 4, "window", False), (128, 3, "plain", False), (128, 2, "plain", True), (256, 2, "softcap", False))
"""Head dim, consumers, scores, and whether Q and K are int8, of instances that are emulated. On a GPU all are run."""
SOME = tuple(c for kind in KINDS for c in TAKING if c.fuse_q_quant and (c.head_dim, c.consumers, c.scores, c.int8) == kind)


def call_for(config: HopperConfig, rows: int, keys: int, device: torch.device) -> Call:
    """Two query heads share a key/value head. Blocks of keys have different scales. The last two heads see a key of the
    second half that isn't finite."""
    q, k, v = normal((1, 4, rows, config.head_dim), (1, 2, keys, config.head_dim), config.value_dim)
    k *= torch.arange(1, keys // KEYS + 1).repeat_interleave(KEYS)[:, None]
    k[0, 1, keys // 2 + 3, 5] = torch.nan
    q, k, v = (x.to(device, torch.bfloat16) for x in (q, k, v))
    recipe = FUSED_RECIPES["int8" if config.int8 else "e4m3"]
    options = {"softcap": 5.0} if config.softcap else {"window": (KEYS // 2, -1)} if config.window else {}
    call = call_of(*quantize(q, k, v, recipe), enable_gqa=True, return_lse=True, **options)
    mean = None if not config.fuse_q_quant else quantize(None, k, v, recipe)[1]
    return dataclasses.replace(call, q=q, q_scale=None, mean_scores=None, lse_mean=mean.mean) if mean is not None else call


def assert_same_bits(emulated: Emulated, config: HopperConfig, n: int, splits: int = 1) -> None:
    call = call_for(config, config.tile_rows + 5, 6 * KEYS, torch.device("cpu"))
    assert configs.unsupported_call(in_shards(call, n), H100) is None
    found, expected = emulated(in_shards(call, n), config, splits), emulated(call, config, splits)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    assert expected[1][:, 2:].isnan().any() and not expected[1][:, :2].isnan().any()


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("n", (2, 3, 6))
@pytest.mark.parametrize("config", SOME, ids=lambda c: c.name)
def test_shards_have_the_bits_of_one_tensor(config: HopperConfig, n: int) -> None:
    assert_same_bits(Emulated(), config, n)


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("n", (2, 3))
def test_ctas_that_share_a_tile_begin_in_any_shard(n: int) -> None:
    (config,) = (c for c in SOME if c.consumers == 3)
    assert_same_bits(Emulated(), config, n, 5)


MUTANTS = {
    "keys of the first shard": ("tile.batch + shard.index)", "tile.batch)"),
    "values of the first shard": ("* p.value_dim + shard.index * p.shard_rows", "* p.value_dim"),
    "values without a gap": ("shard.index * p.shard_rows", "shard.index * p.kv_heads * p.value_dim"),
    "the scales of the first shard": ("if (sharded && shard.ends_before(after)) k_scale += p.next_shard_scales;", ""),
    "the scales of a tile's first shard": ("if (sharded) k_scale += shard.index * p.next_shard_scales;", ""),
    "keys behind a shard": ("first_key(tile) + (n - shard.first()) * KEYS", "first_key(tile) + n * KEYS"),
    "values behind a shard": ("first_value(tile) + (n - shard.first()) * KEYS", "first_value(tile) + n * KEYS"),
    "a block late": ("block >= (index + 1) * p.shard_blocks", "block > (index + 1) * p.shard_blocks"),
}


def test_mutants_change_what_is_there() -> None:
    emulation.assert_anchored(("hopper_producer.h", *mutation) for mutation in MUTANTS.values())


@pytest.mark.anywhere
@pytest.mark.thorough
@emulation.emulates
@pytest.mark.parametrize("name", MUTANTS)
def test_the_emulation_sees_what_is_wrong(name: str) -> None:
    (config,) = (c for c in SOME if c.scores == "window")
    with pytest.raises(AssertionError):
        assert_same_bits(Emulated(("hopper_producer.h", *MUTANTS[name])), config, 6)


@pytest.mark.gpu
@pytest.mark.parametrize("n", (2, 4))
@pytest.mark.parametrize("config", TAKING, ids=lambda c: c.name)
def test_shards_on_a_gpu(device: torch.device, config: HopperConfig, n: int) -> None:
    """With tiles that CTAs take from a counter or share; into tensors that are given."""
    if configs.unsupported_config(config, device_of(device)) is not None:
        pytest.skip("needs sm_90")
    rows = (device_of(device).sm_count // 4 + 3) * config.tile_rows - 5
    call = call_for(config, rows, 16 * KEYS, device)
    expected = cuda_run.forward(call, device_of(device), config)
    room = torch.full((call.batch, call.q_heads + 2, rows, config.value_dim), 7.0, dtype=call.out_dtype, device=device)
    into = room[:, 1:-1], torch.empty_like(expected[1])
    cuda_run.forward(in_shards(call, n), device_of(device), config, into=into)
    for x, y in zip(into, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    assert (room[:, (0, -1)] == 7).all()


def test_calls_that_no_kernel_takes_say_why() -> None:
    q, k, v = normal((1, 2, 64, 64), (1, 2, 512, 64))
    call = call_of(*quantize(q, k, v, Recipe()))
    assert configs.unsupported_call(in_shards(call, 2), H100) is None
    short = dataclasses.replace(call, k=call.k[:, :, :320], kv_length=320)
    assert "shards have 160 keys; the CUDA kernel takes multiples of 128" in (configs.unsupported_call(in_shards(short, 2), H100) or "")
    several = dataclasses.replace(in_shards(call, 4), q=call.q.repeat(2, 1, 1, 1))
    assert "keys lie in shards beside several batches" in (configs.unsupported_call(several, H100) or "")
    masked = dataclasses.replace(in_shards(call, 2), attn_mask=torch.ones(1, 2, 64, 512, dtype=torch.bool))
    assert "keys lie in shards beside" in (configs.unsupported_call(masked, H100) or "")
    assert "the portable kernel takes them in one tensor" in (portable.unsupported_call(in_shards(call, 2), ARCHITECTURES[80]) or "")
