"""Gates: no speed without correctness.

There are three gates in a row. Everything compiles. fp8attn's answers to the suite `seeds` are within the limits in
gates.json. In every timed case, fp8attn's rows are within those limits that mean the same at any length. A red row has
no speed.

The limits are for N(0, 1) inputs, where FP8's rounding alone gives a relative L2 error of 0.050 to 0.055:
- max_abs, mean_abs: maximum and mean of |error|. They bound what a user sees for few keys. Beyond a few thousand keys,
  zeros would nearly pass.
- relative_l2: that error plus a fifth. It is scale-free, so it means the same at any length.
- bad_share: fraction of elements with |error| > rtol · |expected| + atol_rms · rms(expected), with rtol and atol_rms
  from "bad". The right answer has less than 0.001 of them. Zeros have over 0.8. An answer that is a fifth too small
  everywhere has 0.18.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .cases import Case
from .errors import Bad, Errors
from .peers import OWN, Peer, Problem, answer
from .progress import Tick, no_tick

FILE = Path(__file__).with_name("gates.json")

SCALE_FREE = ("relative_l2", "bad_share")


@dataclass(frozen=True)
class Gates:
    """The limits: names of `Errors`' fields and their largest allowed values."""

    limits: dict[str, float]
    bad: Bad

    @classmethod
    def load(cls, path: Path = FILE) -> Gates:
        """Read the limits.

        Raises:
            ValueError: a limit isn't for a field of `Errors`, or isn't finite.
        """
        content = json.loads(path.read_text())
        limits = {name: float(limit) for name, limit in content["limits"].items()}
        for name, limit in limits.items():
            if name not in Errors.__dataclass_fields__ or name == "sqnr_db" or not math.isfinite(limit):
                raise ValueError(f"{path}: the limit {name} = {limit}")
        return cls(limits, Bad(**content["bad"]))

    def broken(self, errors: Errors, scale_free: bool = False) -> tuple[str, ...]:
        """Names of the limits that `errors` exceeds. NaN exceeds every limit.

        Args:
            scale_free: only limits that mean the same at any length.
        """
        judged = {name: limit for name, limit in self.limits.items() if name in SCALE_FREE or not scale_free}
        return tuple(name for name, limit in judged.items() if not getattr(errors, name) <= limit)


@dataclass(frozen=True)
class Verdict:
    """One gate: a case and one of fp8attn's rows, or its compilation. `broken` names the exceeded limits, or says why
    there was no answer."""

    case: Case
    backend: str
    errors: Errors | None
    broken: tuple[str, ...]

    @property
    def green(self) -> bool:
        return not self.broken


def compiles(case: Case, wrong: str | None) -> Verdict:
    """The verdict on compilation, before the first answer."""
    return Verdict(case, "compiler", None, () if wrong is None else (wrong,))


def judge(case: Case, gates: Gates, device: torch.device, peers: Sequence[Peer] = OWN, tick: Tick = no_tick) -> list[Verdict]:
    """A verdict on each of fp8attn's rows in `peers` that this machine can run.

    Args:
        tick: called for every answer, which counts as the peer's `effort`.
    """
    problem = Problem.of(case, "normal", device, rotate=False)
    expected = problem.expected()
    verdicts = []
    for peer in peers:
        tick(peer.name, 0.0)
        given = answer(peer, problem, expected, gates.bad)
        tick(peer.name, peer.effort(case, device.type == "cuda"))
        if given.unavailable:
            continue
        broken = () if given.errors is None else gates.broken(given.errors)
        verdicts.append(Verdict(case, peer.name, given.errors, broken + ((given.refused,) if given.refused else ())))
    return verdicts


def all_green(verdicts: Sequence[Verdict]) -> bool:
    """Whether every gate is green. False if there is none."""
    return bool(verdicts) and all(verdict.green for verdict in verdicts)
