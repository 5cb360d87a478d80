"""The ranks tell each other what they were called with, before anything else travels.

The exchange is one collective of CPU tensors for each group, of MESSAGE bytes a rank. A rank whose arguments are wrong
takes part in it, so that every rank gets the error and none waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..validate import Arguments, Backend, BackendUnavailable, Checked, VarlenArguments

MESSAGE = 2048
"""Bytes of a rank's description."""

CPU = torch.device("cpu")

ERRORS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError, "BackendUnavailable": BackendUnavailable}
"""Errors that are raised on all ranks with the type that they have on the first rank that has one."""

LENGTHS = ("query length", "key length")
"""What may differ between ranks."""

Check = Literal["calls", "shapes"]
CHECKS: tuple[Check, ...] = ("calls", "shapes")


class Disagreement(ValueError):
    """The ranks were called with arguments that don't fit together. The message names the argument and two ranks."""


@dataclass(frozen=True)
class Agreed:
    """What all ranks say.

    Attributes:
        q_lengths, kv_lengths: tokens of every rank.
    """

    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]


_controls: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()
"""For groups without a CPU backend, gloo's connections between the same ranks."""


def control(group: dist.ProcessGroup) -> Any:
    """Gloo's connections between the ranks of a group, made once: messages on the CPU, for which no rank waits for its
    GPU.

    torch.distributed.new_group would need all ranks of the job, or names that depend on other groups of a rank.
    """
    if group not in _controls:
        timeout = group._get_backend(group._device_types[0]).options._timeout
        store = dist.PrefixStore(f"fp8attn/{group.group_name}", dist.distributed_c10d._get_default_store())
        _controls[group] = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
    return _controls[group]


class Gathering:
    """A CPU tensor of every rank, on its way."""

    def __init__(self, x: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._found = [torch.empty_like(x) for _ in range(group.size())]
        if CPU in group._device_types:
            self._work = dist.all_gather(self._found, x, group=group, async_op=True)
        else:
            self._work = control(group).allgather([self._found], [x])

    def wait(self) -> list[torch.Tensor]:
        self._work.wait()
        return self._found


def described(fields: dict[str, Any]) -> bytes:
    """A description as MESSAGE bytes. The values are numbers, strings, booleans or None."""
    message = json.dumps(fields).encode()
    assert len(message) <= MESSAGE
    return message.ljust(MESSAGE)


def described_error(error: Exception) -> bytes:
    """The description of a rank that refuses its own arguments."""
    text = str(error)
    while len(message := json.dumps({"error": type(error).__name__, "text": text}).encode()) > MESSAGE:
        text = text[: len(text) * 3 // 4]
    return message.ljust(MESSAGE)


def exchanged(message: bytes, groups: Sequence[dist.ProcessGroup]) -> bytes:
    """The messages of all ranks, one after another.

    Args:
        groups: this rank's group along every dimension of the mesh, the innermost one first.
    """
    return _finished(Gathering(_tensor_of(message), groups[0]), groups)


def _tensor_of(message: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _finished(gathering: Gathering, groups: Sequence[dist.ProcessGroup]) -> bytes:
    """`exchanged`, where the exchange inside of the first group has begun."""
    found = torch.cat(gathering.wait())
    for group in groups[1:]:
        found = torch.cat(Gathering(found, group).wait())
    return found.numpy().tobytes()


@functools.lru_cache(256)
def agreed(messages: bytes) -> Agreed:
    """What the descriptions of all ranks agree on.

    Raises:
        TypeError, ValueError, BackendUnavailable: a rank refuses its own arguments.
        Disagreement: the ranks' arguments don't fit together.
    """
    ranks = [json.loads(messages[i : i + MESSAGE]) for i in range(0, len(messages), MESSAGE)]
    for rank, fields in enumerate(ranks):
        if "error" in fields:
            raise ERRORS.get(fields["error"], RuntimeError)(f"on rank {rank}: {fields['text']}")
    first = ranks[0]
    for rank, fields in enumerate(ranks):
        for name, value in fields.items():
            if name not in LENGTHS and value != first[name]:
                raise Disagreement(f"{name} is {first[name]!r} on rank 0 and {value!r} on rank {rank}; it must be the same on all ranks")
    q_lengths, kv_lengths = (tuple(fields[name] for fields in ranks) for name in LENGTHS)
    return Agreed(q_lengths, kv_lengths)


_known: dict[tuple[bytes, tuple[dist.ProcessGroup, ...]], Agreed] = {}
"""What all ranks agreed on, by what this one said."""

MOST_KNOWN = 1024
"""Descriptions whose answers are kept; then all are forgotten."""


class Question:
    """What this rank tells the others, and what they agree on.

    Attributes:
        presumed: what they agreed on when this rank said the same before; None if it never did. What needs no other
            rank can begin with it while the answer is on its way.
    """

    def __init__(self, message: bytes, groups: tuple[dist.ProcessGroup, ...], check_ranks: Check) -> None:
        """`message`: this rank's description."""
        self._said, self._groups = (message, groups), groups
        self.presumed = _known.get(self._said)
        asks = self.presumed is None or check_ranks == "calls"
        self._gathering = Gathering(_tensor_of(message), groups[0]) if asks else None

    def answer(self) -> Agreed:
        """What the ranks agree on.

        Raises:
            TypeError, ValueError, BackendUnavailable, Disagreement: as of `agreed`.
        """
        if self._gathering is None:
            assert self.presumed is not None
            return self.presumed
        found = agreed(_finished(self._gathering, self._groups))
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[self._said] = found
        return found


def agree(message: bytes, groups: tuple[dist.ProcessGroup, ...], check_ranks: Check) -> Agreed:
    """What the ranks agree on. `message`: this rank's description."""
    return Question(message, groups, check_ranks).answer()


@contextlib.contextmanager
def refused_together(groups: Sequence[dist.ProcessGroup]) -> Iterator[None]:
    """Inside, this rank checks its arguments. An error is raised on all ranks."""
    try:
        yield
    except Exception as error:
        exchanged(described_error(error), groups)
        raise


def check_choice(name: str, option: object, allowed: Sequence[str]) -> None:
    """Check that an option is one of those that are allowed."""
    if option not in allowed:
        raise ValueError(f"{name} is {option!r}; it must be one of {allowed}")


def fields_of(checked: Checked, a: Arguments | VarlenArguments, names: tuple[str, str, str], backend: Backend) -> dict[str, Any]:
    """What a rank says of a call of plain tensors. `names`: of its query, key and value."""
    (q, k, v), (query, key, value) = checked.floats, names
    return {
        "query length": q.shape[2], "key length": k.shape[2], f"heads of {query}": q.shape[1], f"head_dim of {query}": q.shape[3],
        f"heads of {key}": k.shape[1], f"head_dim of {value}": v.shape[3], f"dtype of {query}": str(q.dtype), f"device of {query}": q.device.type,
        "is_causal": a.is_causal, "window": None if a.window is None else list(a.window), "softcap": a.softcap,
        "sinks": None if a.sinks is None else "given", "scale": checked.softmax_scale, "recipe": a.recipe.text, "out_dtype": str(checked.out_dtype),
        "return_lse": a.return_lse, "backend": backend,
    }  # fmt: skip
