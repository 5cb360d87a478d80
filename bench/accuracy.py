"""Errors by distribution and length, without timing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .cases import Case
from .errors import Bad
from .peers import END_TO_END, Peer, Problem, answer
from .run import Result


def accuracy(case: Case, distribution: str, peers: Sequence[Peer], bad: Bad, device: torch.device) -> list[Result]:
    """A result without timing for every peer that starts from bfloat16."""
    problem = Problem.of(case, distribution, device, rotate=False)
    expected = problem.expected()
    results = []
    for peer in peers:
        if END_TO_END in peer.stages:
            given = answer(peer, problem, expected, bad)
            results.append(Result(case, peer.name, peer.stages, distribution, given.errors, refused=given.refused, unavailable=given.unavailable))
    return results
