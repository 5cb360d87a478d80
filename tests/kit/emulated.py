"""Attention by emulated instances of the CUDA kernels, and the results that they must give."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence

import pytest
import torch

import emulation
import fp8attn
from closeness import assert_matches_pipeline
from fp8attn import Recipe
from fp8attn.call import Call, Problem, empty_lse, empty_output
from fp8attn.cuda import oracle as cuda_oracle
from fp8attn.cuda import run as cuda_run
from fp8attn.cuda.configs import HopperConfig
from fp8attn.cuda.one_launch import OneLaunch
from fp8attn.cuda.portable import PortableConfig
from fp8attn.device import ARCHITECTURES, Device
from fp8attn.prepare import call_of
from fp8attn.quantization import quantize
from fp8attn.reference import Causal
from late import Launch

H100 = ARCHITECTURES[90]

Config = HopperConfig | PortableConfig
Operands = tuple[fp8attn.Quantized, fp8attn.Quantized, fp8attn.Quantized]


class Emulated:
    """The launches of fp8attn.cuda.run for emulated instances.

    An instance is compiled on first use, with `mutations` of its sources.
    """

    def __init__(self, *mutations: emulation.Mutation) -> None:
        self.library = functools.cache(lambda config: emulation.library_of(config, *mutations))

    def __call__(self, call: Call, config: Config, splits: int | None = 1, device: Device = H100) -> tuple[torch.Tensor, torch.Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_run, "library_of", lambda config, _: self.library(config))
            return cuda_run.forward(call, device, config, splits)

    def when_ready(self, call: Call, config: HopperConfig, device: Device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of a call with unquantized queries.

        Keys, values, scales and means arrive part by part while it runs.
        """
        heads = call.k.shape[0] * call.k.shape[1]
        out, lse = empty_output(call.q, call.value_dim, call.out_dtype), empty_lse(call.q, True)
        names = ("k", "k_scale", "v", "v_scale", "v_mean", "lse_mean")
        given = {name: getattr(call, name).contiguous() for name in names}
        late = {name: torch.full_like(x.view(torch.uint8), 0xFF).view(x.dtype) for name, x in given.items()}
        parts = [(name, head) for name in names for head in range(heads)]
        random.Random(seed).shuffle(parts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_run, "library_of", lambda config, _: self.library(config))
            launch = Launch(call, config, device)
        for name, head in parts:
            to, source = (x.flatten(0, 1)[head] for x in (late[name], given[name]))
            emulation.bring(self.library(config), call.q.dtype == torch.float16, to, source, launch.ready[head])
        launch.attend(dataclasses.replace(call, **late), out, lse, len(names))
        assert (launch.ready == len(names)).all()
        return out, lse

    def from_fp16(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: Causal, out_dtype: torch.dtype, launch: OneLaunch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of quantization and attention in one launch."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_run.build, "load_with", lambda config, *_: self.library(config))
            return cuda_run.forward_from_fp16(Problem(q, k, v, softmax_scale, "e4m3", causal, out_dtype, True), H100, launch)


def _apart(shards: tuple[torch.Tensor, ...], rows: int) -> torch.Tensor:
    """Shards (1, H, M, N) as one tensor, with `rows` rows of NaN between them."""
    first = shards[0].view(torch.uint8)
    size, gap = first.numel(), rows * first.shape[3]
    room = torch.full((len(shards), size + gap), 0xFF, dtype=torch.uint8, device=first.device)
    for slot, shard in zip(room, shards, strict=True):
        slot[:size] = shard.contiguous().view(torch.uint8).flatten()
    return room[:, :size].unflatten(1, first.shape[1:]).view(shards[0].dtype)


def in_shards(call: Call, n: int) -> Call:
    """The same keys and values in n shards."""
    scale = torch.cat([x.repeat(1, 1, 2) for x in call.k_scale.chunk(n, 2)])[..., : call.k_scale.shape[2] // n]
    return dataclasses.replace(call, k=_apart(call.k.chunk(n, 2), 16), k_scale=scale, v=_apart(call.v.chunk(n, 3), 3))


def normal(q_shape: tuple, k_shape: tuple, value_dim: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v in float32. q is scaled differently in each head, so that the heads' scales differ."""
    generator = torch.Generator().manual_seed(sum(q_shape) + sum(k_shape))
    v_shape = (*k_shape[:3], value_dim or k_shape[3])
    q, k, v = (torch.randn(shape, generator=generator) for shape in (q_shape, k_shape, v_shape))
    return q * torch.arange(1, q_shape[1] + 1)[:, None, None], k, v


ROW_KINDS = ("numbers", "lowest", "low", "lowest but one", "runs", "any", "hidden")
"""Kinds of rows of masks in `low_mask`."""


def low_mask(kinds: Sequence[str], rows: int, keys: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """An additive mask (rows, keys). Row i has the kind `kinds[i % len(kinds)]`.

    Kinds: numbers; the dtype's lowest number, or a low one, for every key; the lowest number for every key but one;
    runs of 64 keys with numbers, the lowest number or -inf; any of these for each key; -inf.
    """
    generator = torch.Generator().manual_seed(seed)
    lowest = torch.finfo(dtype).min
    low = -30_000.0 if dtype == torch.float16 else (-1e9, -1e12, -1e30)[seed % 3]
    numbers = torch.randn(rows, keys, generator=generator)
    choices = torch.stack((numbers, torch.full_like(numbers, lowest), torch.full_like(numbers, -torch.inf)))
    of_runs, of_keys = (torch.randint(3, (rows, -(-keys // n)), generator=generator).repeat_interleave(n, 1)[:, :keys] for n in (64, 1))
    one = torch.randint(keys, (rows, 1), generator=generator) == torch.arange(keys)
    of_kind = {
        "numbers": numbers,
        "lowest": choices[1],
        "low": torch.full_like(numbers, low),
        "lowest but one": torch.where(one, 0.0, choices[1]),
        "runs": choices.gather(0, of_runs[None])[0],
        "any": choices.gather(0, of_keys[None])[0],
        "hidden": choices[2],
    }
    return torch.stack([of_kind[kinds[i % len(kinds)]][i] for i in range(rows)]).to(dtype)


def lse_of_scores(lse: torch.Tensor) -> torch.Tensor:
    """An LSE with zeros for rows that see low numbers only. Their scores are exact, and say nothing about rounding."""
    return lse.masked_fill(lse < -1e4, 0.0)


def quantized(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: Recipe) -> Operands:
    """Operands quantized by the definition. Triton's interpreter would take longer."""
    operands = quantize(q, k, v, recipe)
    assert all(x is not None for x in operands)
    return operands  # type: ignore[return-value]


def expected_of(operands: Operands, call: Call, config: Config, splits: int | None, device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of the oracle for a config on `device`, with its number of SMs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_oracle, "device_of", lambda _: device)
        return cuda_oracle.oracle(operands, call, config, splits or cuda_run.splits_of(call, config, device))


def check(
    emulated: Emulated,
    config: Config,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    splits: int | None = 1,
    moved: int = 0,
    device: Device = H100,
    exact: bool = False,
    **options,
) -> torch.Tensor:
    """Check that output and LSE are the oracle's. Returns the output.

    Args:
        tensors: q, k, v, not quantized yet.
        moved: distance in bytes of rows of Q and K from multiples of 16.
        exact: whether results differ from the oracle only by the order of a few float32 sums.
    """
    recipe = options.pop("recipe", Recipe())
    if config.int8:
        recipe = dataclasses.replace(recipe, qk="int8")
    operands = quantized(*tensors, recipe)
    gqa = tensors[0].shape[1] != tensors[1].shape[1]
    call = call_of(*operands, recipe=recipe, return_lse=True, enable_gqa=gqa, **{"out_dtype": torch.float32, **options})
    if isinstance(config, HopperConfig) and config.fuse_q_quant:
        call = dataclasses.replace(call, q=tensors[0], q_scale=None)
    if moved:
        call = dataclasses.replace(call, q=emulation.elsewhere(call.q, moved), k=emulation.elsewhere(call.k, moved))
    out, lse = emulated(call, config, splits, device)
    expected, expected_lse = expected_of(operands, call, config, splits, device)
    assert_matches_pipeline(out, expected, exact, lse_of_scores(expected_lse))
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=5e-3, equal_nan=True)
    return out
