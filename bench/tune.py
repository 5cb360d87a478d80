"""Timing the candidate configs of the suite prefill's kinds of calls, and shipping the best."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from fp8attn.api import call_of
from fp8attn.device import device_of
from fp8attn.triton import run, tune
from fp8attn.triton.configs import Config

from .cases import PREFILL, Case, inputs

LENGTH = 4096
"""Of the case that stands for its kind: long enough to fill a GPU, short enough that starts and ends of tiles count."""

CASES = tuple(case for case in PREFILL if case.q_length == LENGTH)


def candidates(case: Case, device: torch.device) -> tuple[str, list[tuple[float, Config]]]:
    """The kind of call that a case is, and milliseconds and config of every candidate, best first."""
    call = call_of(*inputs(case, "normal", device), **case.options)
    properties = device_of(device)
    return tune.kind(call), tune.tune(call, properties, run.forward)


def rendered(table: dict[str, dict[str, dict]]) -> str:
    """The shipped table as text: GPU name -> kind of call -> config, keys sorted, a line for each kind."""
    blocks = []
    for gpu, kinds in sorted(table.items()):
        lines = ",\n".join(f"    {json.dumps(kind)}: {json.dumps(config)}" for kind, config in sorted(kinds.items()))
        blocks.append(f"  {json.dumps(gpu)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def write(best: dict[str, Config], gpu: str, path: Path = tune.SHIPPED) -> None:
    """Put the best configs of one GPU, by kind of call, into the shipped table; other GPUs and other kinds stay."""
    table = json.loads(path.read_text())
    table.setdefault(gpu, {}).update({kind: tune.to_json(config) for kind, config in best.items()})
    path.write_text(rendered(table))
    tune.table.cache_clear()
