"""Compares two commits of fp8attn in one interleaved run on one GPU: one process per commit, which take turns case by
case."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .cases import Case, Workload
from .command_line import UsageError, checkout
from .errors import Errors
from .gates import Gates
from .machine import ROOT, typical
from .peers import Answer, Peer
from .progress import Tick, no_tick
from .run import Result, red
from .timing import Protocol, Timing
from .worker import Worker


def resolved(revision: str) -> str:
    """The commit of a revision.

    Raises:
        UsageError: git knows no such commit, or there is no git or no repository.
    """
    checkout("compare --commits")
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"{revision!r} is no commit of the repository at {ROOT}") from error
    return done.stdout.strip()


@contextlib.contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """A temporary folder with the package fp8attn as it was at a commit."""
    archive = subprocess.run(["git", "archive", "--format=tar", commit, "fp8attn"], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="fp8attn-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


@dataclasses.dataclass(frozen=True)
class Pair:
    """One row of both commits, or the reason why there is none. `broken` names the red gates."""

    before: Result
    after: Result

    @property
    def red(self) -> bool:
        return bool(self.before.broken or self.after.broken)


def interleaved(
    before: Worker, after: Worker, chosen: Sequence[Workload], peers: Sequence[Peer], protocol: Protocol, gates: Gates, tick: Tick = no_tick
) -> Iterator[Pair]:
    """Time every case and peer that both commits have. They take turns in the order A B, B A, A B, …

    Args:
        tick: called for every case and peer, which count as 1.

    Raises:
        ValueError: a process ended.
    """
    for case, distribution in chosen:
        for peer in peers:
            tick(f"{case.name}, {peer.name}", 0.0)
            asked = {
                "case": dataclasses.asdict(case),
                "distribution": distribution,
                "peer": peer.name,
                "protocol": dataclasses.asdict(protocol),
                "bad": dataclasses.asdict(gates.bad),
            }
            given = [worker.ask(do="prepare", **asked) for worker in (before, after)]
            results = [_judged(one, case, distribution, peer, gates) for one in given]
            if all(result.refused is None for result in results):
                turns: list[list[dict[str, Any]]] = [[], []]
                for i in range(protocol.rounds):
                    for side in (0, 1) if i % 2 == 0 else (1, 0):
                        turns[side].append((before, after)[side].ask(do="turn"))
                results = [_timed(result, one, mine) for result, one, mine in zip(results, given, turns, strict=True)]
            for worker in (before, after):
                worker.ask(do="release")
            tick(f"{case.name}, {peer.name}", 1.0)
            if not all(result.unavailable for result in results):
                yield Pair(*results)


def _judged(given: dict[str, Any], case: Case, distribution: str, peer: Peer, gates: Gates) -> Result:
    errors = None if given["errors"] is None else Errors(**given["errors"])
    broken = red(peer, Answer(errors, refused=given["refused"], unavailable=given["unavailable"]), distribution, gates)
    refused = given["refused"] or (f"red: {', '.join(broken)}" if broken else None)
    return Result(case, peer.name, peer.stages, distribution, errors, refused=refused, unavailable=given["unavailable"], broken=broken)


def _timed(result: Result, given: dict[str, Any], turns: Sequence[dict[str, Any]]) -> Result:
    timing = Timing.of([turn["us"] for turn in turns], given["calls"], given["method"])
    readings = [turn["readings"] for turn in turns if turn["readings"] is not None]
    return dataclasses.replace(result, timing=timing, readings=typical(readings) if readings else {})
