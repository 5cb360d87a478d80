"""Errors by distribution and length: where FP8 attention is known to go wrong."""

from __future__ import annotations

import torch

from .cases import Case, square
from .errors import Bad
from .peers import END_TO_END, PEERS, Problem, answer
from .run import Result


def _few_queries(keys: int, queries: int) -> Case:
    return Case(f"{keys // 1024}k keys D128", 1, 1, 1, queries, keys, 128, 128, causal=False)


ON_GPU: tuple[tuple[Case, str], ...] = (
    *((square(f"{length // 1024}k keys D128", 1, 4, length, 128), "normal") for length in (1024, 16384)),
    *((_few_queries(keys, 1024), "one-sign") for keys in (16384, 131072, 524288)),
    *((square(f"4k keys D{dim}", 1, 4, 4096, dim), name) for name in ("outliers", "channel-bias") for dim in (64, 128)),
)

IN_INTERPRETER: tuple[tuple[Case, str], ...] = (
    (square("256 keys D128", 1, 1, 256, 128), "normal"),
    (_few_queries(1024, 64), "one-sign"),
    *((square("256 keys D64", 1, 1, 256, 64), name) for name in ("outliers", "channel-bias")),
)


def problems(gpu: bool) -> tuple[tuple[Case, str], ...]:
    """Cases and the distributions of their inputs."""
    return ON_GPU if gpu else IN_INTERPRETER


def accuracy(case: Case, distribution: str, bad: Bad, device: torch.device) -> list[Result]:
    """A result without timing for every peer that starts from bfloat16."""
    problem = Problem.of(case, distribution, device, rotate=False)
    expected = problem.expected()
    results = []
    for peer in PEERS:
        if END_TO_END in peer.stages:
            given = answer(peer, problem, expected, bad)
            results.append(Result(case, peer.name, peer.stages, distribution, given.errors, refused=given.refused))
    return results
