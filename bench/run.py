"""Side by side: every peer's speed and error on one case, from one interleaved run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8attn.device import device_of

from .cases import Case
from .errors import Bad, Errors
from .gates import Gates
from .limits import Limit, limit_of
from .peers import PYTORCH, Answer, Peer, Problem, answer
from .progress import Tick, no_tick
from .timing import Protocol, Timing, tflops, time_all


@dataclass(frozen=True)
class Result:
    """One case and one backend.

    Attributes:
        against_sdpa: median of the case's fastest PyTorch backend divided by this one's; more than 1 is faster.
        limit: the least time that the hardware needs for the case in e4m3, with any backend; None if the GPU's ceilings
            weren't measured.
        refused: why there is no timing, or None.
        unavailable: this machine can't run the backend, which is no error.
        first_s: seconds of the first answer, with compilation; None if there is none.
        broken: limits of gates.json that one of fp8attn's own rows exceeds. Such a row is red, and has no timing.
        readings: the GPU's clocks, power and temperature in the backend's turns.
    """

    case: Case
    backend: str
    stages: tuple[str, ...]
    distribution: str
    errors: Errors | None
    timing: Timing | None = None
    against_sdpa: float | None = None
    limit: Limit | None = None
    refused: str | None = None
    unavailable: bool = False
    first_s: float | None = None
    broken: tuple[str, ...] = ()
    readings: dict[str, float | None] = dataclasses.field(default_factory=dict)

    @property
    def tflops(self) -> float | None:
        return None if self.timing is None else tflops(self.case.flops, self.timing.p50_us)

    @property
    def share_of_limit(self) -> float | None:
        """The hardware's least time divided by the median."""
        return None if self.timing is None or self.limit is None else self.limit.us / self.timing.p50_us

    def record(self) -> dict[str, Any]:
        """One flat JSON object; fields that don't apply are null."""
        errors: dict[str, Any] = dict.fromkeys(Errors.__dataclass_fields__) if self.errors is None else dataclasses.asdict(self.errors)
        timing: dict[str, Any] = dict.fromkeys(Timing.__dataclass_fields__) if self.timing is None else dataclasses.asdict(self.timing)
        return {
            **self.case.record(),
            "backend": self.backend,
            "stages": list(self.stages),
            "distribution": self.distribution,
            **timing,
            "tflops": self.tflops,
            "against_sdpa": self.against_sdpa,
            "limit_us": None if self.limit is None else self.limit.us,
            "limited_by": None if self.limit is None else self.limit.by,
            "share_of_limit": self.share_of_limit,
            **errors,
            "first_s": self.first_s,
            "refused": self.refused,
            "broken": list(self.broken),
            **self.readings,
        }


def effort(case: Case, peer: Peer, protocol: Protocol, gpu: bool) -> tuple[float, float]:
    """Estimated seconds of a peer's answer, and of its turns."""
    once = peer.effort(case, gpu)
    return once, protocol.rounds * protocol.turn_seconds if gpu else (1 + protocol.rounds) * once


def side_by_side(
    case: Case, distribution: str, peers: Sequence[Peer], protocol: Protocol, gates: Gates, device: torch.device, tick: Tick = no_tick
) -> list[Result]:
    """A result for every peer, in the peers' order.

    Args:
        tick: called for every answer and turn; in total, they count as the peers' `effort`.
    """
    gpu = device.type == "cuda"
    problem = Problem.of(case, distribution, device, rotate=protocol.cache == "rotate")
    answers = ask_all(problem, peers, gates.bad, tick)
    broken = {peer.name: red(peer, answers[peer.name], distribution, gates) for peer in peers}
    runs = {name: given.attention for name, given in answers.items() if given.attention is not None and not broken[name]}
    turn_effort = {peer.name: effort(case, peer, protocol, gpu)[1] / protocol.rounds for peer in peers}
    for name in turn_effort.keys() - runs.keys():
        tick(name, turn_effort[name] * protocol.rounds)
    timed = time_all(runs, len(problem.sets), protocol, device, lambda doing, turns: tick(doing, turns * turn_effort[doing] if turns else 0.0))
    fastest = min((timed[peer.name].timing.p50_us for peer in PYTORCH if peer.name in timed), default=None)
    limit = limit_of(case, device_of(device))
    results = []
    for peer in peers:
        given, found = answers[peer.name], timed.get(peer.name)
        ratio = None if fastest is None or found is None else fastest / found.timing.p50_us
        timing, readings = (None, {}) if found is None else (found.timing, found.readings)
        wrong = broken[peer.name]
        lacking = "out of memory beside the others" if peer.name in runs and found is None else None
        refused = given.refused or (f"red: {', '.join(wrong)}" if wrong else lacking)
        first = None if given.attention is None else given.seconds
        result = Result(
            case, peer.name, peer.stages, distribution, given.errors, timing, ratio, limit, refused, given.unavailable, first, wrong, readings
        )
        results.append(result)
    return results


def red(peer: Peer, given: Answer, distribution: str, gates: Gates) -> tuple[str, ...]:
    """What is wrong with the answer of one of fp8attn's own rows. Such a row isn't timed.

    It is: exceeded limits that mean the same at any length, for the inputs for which they were set; a non-finite
    answer; or an exception, unless it says that this machine can't run the row.
    """
    if not peer.own or given.unavailable:
        return ()
    if given.refused is not None:
        return (given.refused,)
    assert given.errors is not None
    return gates.broken(given.errors, scale_free=True) if distribution == "normal" else ()


def ask_all(problem: Problem, peers: Sequence[Peer], bad: Bad, tick: Tick = no_tick) -> dict[str, Answer]:
    """Every peer's answer, by the peer's name."""
    tick("the exact answer", 0.0)
    expected = problem.expected()
    answers = {}
    for peer in peers:
        tick(f"{peer.name}, its answer", 0.0)
        answers[peer.name] = answer(peer, problem, expected, bad)
        tick(peer.name, peer.effort(problem.case, problem.device.type == "cuda"))
    return answers
