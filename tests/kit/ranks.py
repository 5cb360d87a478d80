"""Processes that are ranks of torch.distributed: started once, and asked many times."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from forked import server

PATIENCE = 60.0
"""Seconds that a test waits for an answer."""

TIMEOUT = datetime.timedelta(seconds=20)
"""Of the groups."""

SHORT_TIMEOUT = datetime.timedelta(seconds=1)
"""Of the group "hasty", of two ranks."""

Where = int | tuple[int, int] | str
"""A number of ranks, the shape of a mesh, or the name of a group."""


class Failed(Exception):
    """What a rank raised: the type's name and the message."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind, self.message = kind, message


def _serve(rank: int, ranks: int, port: int, backend: str, connection: Connection) -> None:
    """A rank's process: runs functions until it is told to stop. Each function gets the group of the first n ranks."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, timeout=TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    places: dict[Any, Any] = {n: dist.new_group(list(range(n)), timeout=TIMEOUT) for n in range(1, ranks + 1)}
    if ranks == 4:
        places[2, 2] = dist.init_device_mesh(device.type, (2, 2), mesh_dim_names=("ring", "ulysses"))
    if ranks > 1:
        places["hasty"] = dist.new_group([0, 1], timeout=SHORT_TIMEOUT)
    connection.send("ready")
    while (asked := connection.recv()) is not None:
        function, n, arguments = asked
        try:
            answer = function(rank, places[n], device, *arguments)
        except Exception as error:
            connection.send(("failed", (type(error).__name__, str(error), traceback.format_exc())))
            continue
        connection.send(("answer", answer))
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Ranks:
    """A pool of `count` ranks."""

    def __init__(self, count: int, backend: str = "gloo") -> None:
        self.count = count
        with server() if backend == "gloo" else contextlib.nullcontext(multiprocessing.get_context("spawn")) as context:
            port = _free_port()
            pairs = [context.Pipe() for _ in range(count)]
            self._processes = [
                context.Process(target=_serve, args=(rank, count, port, backend, theirs), daemon=True) for rank, (_, theirs) in enumerate(pairs)
            ]
            for process in self._processes:
                process.start()
        self._connections = [mine for mine, _ in pairs]
        for connection in self._connections:
            assert self._received(connection) == "ready"

    @staticmethod
    def _received(connection: Connection) -> Any:
        if not connection.poll(PATIENCE):
            raise TimeoutError(f"a rank has said nothing for {PATIENCE} s")
        return connection.recv()

    def outcomes(self, function: Callable[..., Any], n: Where, arguments: Sequence[tuple]) -> list[Any]:
        """What a function returns on each of the first ranks, or a `Failed`.

        Args:
            function: of a module; it is called with the rank, the group (or mesh), the device and its arguments.
            n: which group or mesh of the first ranks.
            arguments: of every rank.
        """
        count = len(arguments)
        for connection, some in zip(self._connections[:count], arguments, strict=True):
            connection.send((function, n, some))
        found = []
        for connection in self._connections[:count]:
            kind, what = self._received(connection)
            found.append(Failed(*what) if kind == "failed" else what)
        return found

    def run(self, function: Callable[..., Any], n: Where, arguments: Sequence[tuple]) -> list[Any]:
        """`outcomes`, none of which may be a failure."""
        found = self.outcomes(function, n, arguments)
        for one in found:
            if isinstance(one, Failed):
                raise one
        return found

    def stop(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
