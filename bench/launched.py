"""The process that a CUDA tool observes.

It runs instances of the CUDA kernels on small problems, or the ladder's rungs. bench.sanitize and bench.ladder start
it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import cast

import torch

import fp8attn
from fp8attn import Quantized, Recipe, ops, problem_ops
from fp8attn.call import Call
from fp8attn.cuda import build, configs, portable
from fp8attn.cuda import run as cuda_run
from fp8attn.cuda.one_launch import OneLaunch
from fp8attn.device import Device, device_of
from fp8attn.prepare import call_of
from fp8attn.quantization import quantize as quantize_ref
from fp8attn.recipe import FUSED_RECIPES

from . import ladder
from .cases import Case, Tensors
from .peers import Problem

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict]] = {
    "full": ((1, 2, 200, 64), (1, 2, 300, 64), {}),
    "causal, GQA": ((2, 4, 150, 128), (2, 2, 150, 128), dict(is_causal=True)),
    "odd head dim": ((1, 1, 70, 72), (1, 1, 65, 72), {}),
    "head dim 256": ((1, 1, 100, 256), (1, 1, 130, 256), {}),
    "mask": ((1, 2, 40, 64), (1, 2, 600, 64), dict(attn_mask=(1, 2, 40, 600))),
    "mask of blocks": ((1, 2, 150, 128), (1, 2, 700, 128), dict(attn_mask=(150, 700), shown_from=300)),
    "added mask": ((2, 2, 150, 64), (2, 2, 600, 64), dict(attn_mask=(2, 150, 600), mask_dtype=torch.bfloat16)),
    "added mask, float32": ((1, 2, 70, 128), (1, 2, 601, 128), dict(attn_mask=(70, 601), mask_dtype=torch.float32)),
    "one row": ((2, 8, 1, 128), (2, 2, 1100, 128), dict(is_causal=True, causal_alignment="bottom_right")),
    "nothing visible": ((1, 1, 200, 64), (1, 1, 20, 64), dict(is_causal=True, causal_alignment="bottom_right")),
    "int8, shared": ((2, 4, 3, 64), (2, 2, 1100, 64), dict(recipe=Recipe(qk="int8"))),
    "int8, causal": ((1, 2, 200, 128), (1, 2, 300, 128), dict(recipe=Recipe(qk="int8"), is_causal=True)),
    "keys beyond a cluster": ((1, 2, 70, 256), (1, 1, 2100, 256), {}),
    "int8, keys beyond a cluster": ((1, 1, 70, 128), (1, 1, 4200, 128), dict(recipe=Recipe(qk="int8"))),
    "a head a CTA": ((1, 4, 70, 64), (1, 4, 600, 64), {}),
    "smoothed queries": ((1, 2, 150, 64), (1, 1, 201, 64), dict(recipe=Recipe(smooth_q=True))),
}
"""One problem of every shape class: the shapes of q and of k, and options. A mask of the given shape is drawn, with
visible keys from some key on, and with numbers if it has a dtype. Of the keys beyond a cluster, the CUDA quantizer
takes three launches."""


def problem(shape: str, device: torch.device) -> tuple[Tensors, dict]:
    """q, k and v of a shape class, bfloat16, N(0, 1); and options."""
    q_shape, kv_shape, given = SHAPES[shape]
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(size, generator=generator).to(device, torch.bfloat16) for size in (q_shape, kv_shape, kv_shape))
    options = dict(given, enable_gqa=q_shape[1] != kv_shape[1], return_lse=True)
    if "attn_mask" in given:
        mask = drawn_mask(given["attn_mask"], options.pop("shown_from", 0), options.pop("mask_dtype", torch.bool), generator)
        options["attn_mask"] = mask.to(device)
    return (q, k, v), options


def drawn_mask(shape: tuple[int, ...], shown_from: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """A mask with seven of ten keys from `shown_from` on.

    If it has numbers, they are N(0, 1) for these keys and -inf for all other keys.
    """
    shown = (torch.rand(shape, generator=generator) > 0.3) & (torch.arange(shape[-1]) >= shown_from)
    return shown if dtype == torch.bool else torch.randn(shape, generator=generator).masked_fill(~shown, -torch.inf).to(dtype)


def quantized(tensors: Tensors, options: dict) -> Call:
    """A problem's call.

    CUDA kernels quantize if they support all operands. Otherwise the definition does, because Triton's kernels aren't
    observed and would have to be compiled.
    """
    q, k, v = tensors
    recipe = options.get("recipe", Recipe())
    if ops.unsupported_general_quantize(q, k, v, recipe) is not None:
        return call_of(*cast(tuple[Quantized, Quantized, Quantized], quantize_ref(q, k, v, recipe)), **options)
    return call_of(*fp8attn.quantize(q, k, v, recipe=recipe), **options)


def on_the_way(tensors: Tensors, options: dict) -> bool:
    """Whether only CUDA kernels quantize a problem's tensors."""
    q, k, v = tensors
    recipe = options.get("recipe", Recipe())
    if recipe != FUSED_RECIPES[recipe.qk]:
        return False
    problem = fp8attn.call.Problem(q, k, v, q.shape[3] ** -0.5, recipe.qk, attn_mask=options.get("attn_mask"))
    way = problem_ops.way_of(problem, device_of(q.device))
    return isinstance(way, OneLaunch) or way == "two launches"


def instances(call: Call, device: Device) -> list[cuda_run.Config]:
    """The shipped instances that can run a call, and the rungs of its head dim."""
    portables = (*portable.group(portable.padded_dim(call), device, call.int8), *ladder.rungs(128 if call.head_dim > 64 else 64).values())
    found: list[cuda_run.Config] = [c for c in dict.fromkeys(portables) if portable.fits(c, device) and portable.takes(c, call)]
    if configs.unsupported_call(call, device) is None:
        found += configs.serving(call)
    return found


def loaded(device: torch.device) -> dict[str, tuple[Call, list[cuda_run.Config]]]:
    """A problem of each shape class with all instances that can run it, compiled and loaded. Rungs are in one library,
    shipped instances in their own.

    Problems that CUDA kernels can quantize also run once from bfloat16.
    """
    properties = device_of(device)
    found: dict[str, tuple[Call, list[cuda_run.Config]]] = {}
    for shape in SHAPES:
        tensors, options = problem(shape, device)
        call = quantized(tensors, options)
        found[shape] = call, instances(call, properties)
        if on_the_way(tensors, options):
            fp8attn.cuda_sdpa(*tensors, **options)
    build.load(ladder.configs(properties), properties.arch)
    for config in dict.fromkeys(config for _, several in found.values() for config in several):
        cuda_run.library_of(config, properties)
    return found


def every_shape(device: torch.device) -> None:
    """Run each shape class with all instances that can run it."""
    for shape, (call, several) in loaded(device).items():
        for config in several:
            cuda_run.forward(call, device_of(device), config)
        torch.cuda.synchronize()
        print(f"{shape}: {len(several)} instances", flush=True)


def rungs(case: Case, device: torch.device) -> None:
    """Run each rung once, between the profiler's start and stop."""
    properties = device_of(device)
    build.load(ladder.configs(properties), properties.arch)
    tensors = Problem.of(case, "normal", device, rotate=False).sets[0]
    able = [c for c in ladder.rungs(case.head_dim).values() if portable.fits(c, properties)]
    calls = {config: call_of(*tensors, recipe=ladder.recipe_of(config), **case.options) for config in able}
    for config, call in calls.items():
        cuda_run.forward(call, properties, config)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for config, call in calls.items():
        cuda_run.forward(call, properties, config)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main(words: Sequence[str]) -> None:
    """Run all shape classes, or the rungs of a case.

    Args:
        words: empty for all shape classes; or a JSON object with the fields of a case, for its rungs.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    if words:
        rungs(Case(**json.loads(words[0])), device)
    else:
        every_shape(device)


if __name__ == "__main__":
    main(sys.argv[1:])
