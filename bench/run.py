"""Side by side: every peer's speed and error on one case, from one interleaved run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from . import machine
from .cases import Case
from .errors import Bad, Errors
from .peers import PEERS, PYTORCH, Answer, Problem, answer
from .timing import Timing, tflops, time_all


@dataclass(frozen=True)
class Result:
    """One case and one backend.

    Attributes:
        against_sdpa: median of the case's fastest PyTorch backend over this one's; more than 1 is faster.
        refused: why there is no timing, or None.
        clocks: as they were right after the case was timed.
    """

    case: Case
    backend: str
    stages: tuple[str, ...]
    distribution: str
    errors: Errors | None
    timing: Timing | None = None
    against_sdpa: float | None = None
    refused: str | None = None
    clocks: dict[str, float | None] = dataclasses.field(default_factory=dict)

    @property
    def tflops(self) -> float | None:
        return None if self.timing is None else tflops(self.case.flops, self.timing.p50_us)

    def record(self) -> dict[str, Any]:
        """One flat JSON object; fields that don't apply are null."""
        errors: dict[str, Any] = dict.fromkeys(Errors.__dataclass_fields__) if self.errors is None else dataclasses.asdict(self.errors)
        timing: dict[str, Any] = dict.fromkeys(Timing.__dataclass_fields__) if self.timing is None else dataclasses.asdict(self.timing)
        case = dataclasses.asdict(self.case)
        return {
            "case": case.pop("name"),
            **case,
            "backend": self.backend,
            "stages": list(self.stages),
            "distribution": self.distribution,
            **timing,
            "tflops": self.tflops,
            "against_sdpa": self.against_sdpa,
            **errors,
            "refused": self.refused,
            **self.clocks,
        }


def side_by_side(case: Case, distribution: str, rounds: int, milliseconds: float, bad: Bad, device: torch.device) -> list[Result]:
    """A result for every peer, in the peers' order."""
    problem = Problem.of(case, distribution, device, rotate=True)
    answers = ask_all(problem, bad)
    runs = {name: given.attention for name, given in answers.items() if given.attention is not None}
    timings = time_all(runs, len(problem.sets), rounds, milliseconds, device)
    clocks = machine.clocks(device)
    fastest = min((timings[peer.name].p50_us for peer in PYTORCH if peer.name in timings), default=None)
    results = []
    for peer in PEERS:
        given, timing = answers[peer.name], timings.get(peer.name)
        ratio = None if fastest is None or timing is None else fastest / timing.p50_us
        results.append(Result(case, peer.name, peer.stages, distribution, given.errors, timing, ratio, given.refused, clocks))
    return results


def ask_all(problem: Problem, bad: Bad) -> dict[str, Answer]:
    """Every peer's answer, by its name."""
    expected = problem.expected()
    return {peer.name: answer(peer, problem, expected, bad) for peer in PEERS}
