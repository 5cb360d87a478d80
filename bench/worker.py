"""A process that holds one prepared call and times it on request, so that two versions of fp8attn can take turns on one
GPU.

Requests and replies are lines of JSON on standard input and output. Output of libraries goes to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import fp8attn

from . import adapters
from .cases import Case
from .errors import Bad
from .machine import ROOT, Sensors
from .peers import Problem, answer
from .timing import Protocol, Turns, turns_of


class Worker:
    """The client's end: a process that imports fp8attn from a folder.

    Args:
        tree: a folder that contains the folder fp8attn; bench is this process's.
        name: name of the process, for messages.
    """

    def __init__(self, tree: Path, name: str) -> None:
        self.name = name
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree), str(ROOT)))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.worker"], cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        where = Path(self.ask(do="hello")["fp8attn"]).resolve().parent.parent
        if where != tree.resolve():
            self.close()
            raise ValueError(f"{name}: fp8attn was imported from {where}, not from {tree}")

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return its reply.

        Raises:
            ValueError: the process ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(f"{self.name}: its process ended with exit code {self._process.wait()}; its last words are above")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Held:
    """The state of the process between requests."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self.sensors = Sensors(self.device)
        self.turns: Turns | None = None

    def hello(self) -> dict[str, Any]:
        return {"fp8attn": fp8attn.__file__}

    def prepare(self, case: dict[str, Any], distribution: str, peer: str, protocol: dict[str, Any], bad: dict[str, float]) -> dict[str, Any]:
        """Prepare a peer's turns. Returns the errors of its answer, or the reason why there is none."""
        self.release()
        how = Protocol(**protocol)
        problem = Problem.of(Case(**case), distribution, self.device, rotate=how.cache == "rotate")
        one = next(one for one in adapters.PEERS if one.name == peer)
        given = answer(one, problem, problem.expected(), Bad(**bad))
        if given.attention is not None:
            self.turns = turns_of(given.attention, len(problem.sets), how, self.device)
        return {
            "errors": None if given.errors is None else dataclasses.asdict(given.errors),
            "refused": given.refused,
            "unavailable": given.unavailable,
            "calls": self.turns.calls if self.turns else None,
            "method": self.turns.method if self.turns else None,
        }

    def turn(self) -> dict[str, Any]:
        assert self.turns is not None
        readings: list[dict[str, float | None]] = []
        microseconds = self.turns.take(lambda: readings.append(self.sensors.read()) if self.sensors.quick else None)
        return {"us": microseconds, "readings": readings[0] if readings else None}

    def release(self) -> dict[str, Any]:
        self.turns = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output from here on isn't a reply
    held = Held()
    do: dict[str, Callable[..., dict[str, Any]]] = {name: getattr(held, name) for name in ("hello", "prepare", "turn", "release")}
    for line in sys.stdin:
        request = json.loads(line)
        reply = do[request.pop("do")](**request)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
