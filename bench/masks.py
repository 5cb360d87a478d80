"""The cost of masks: attention with documents, windows, padding, arbitrary and additive masks, relative to no mask, and
next to PyTorch."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fp8attn.cuda.configs import KEYS, ROWS

from . import adapters, command_line, report
from .cases import HIDDEN, TOKENS, Case, square
from .command_line import NO_GPU, UsageError
from .errors import Bad, Errors
from .gates import Gates
from .machine import machine
from .peers import KERNEL, OWN, PYTORCH, Attention, Peer, Problem, answer, needs_gpu
from .progress import Tick, no_tick
from .sheet import Sheet
from .timing import Protocol, Timing, time_all

HELP = "what masks cost, by kind: over the default without one, and beside PyTorch"

CASES = tuple(
    square(f"D{dim} full {length // 1024}k", TOKENS // length, HIDDEN // dim, length, dim)
    for dim, length in ((64, 4096), (128, 4096), (256, 4096), (128, 16384))
)
WITHOUT = "fp8attn cuda, no mask"
SEED = 20


@dataclass(frozen=True)
class MaskedCase(Case):
    """A case with a mask, broadcastable to (B, Hq, Sq, Sk), bool or added to scores."""

    attn_mask: torch.Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        return super().options | {"attn_mask": self.attn_mask}


def documents(case: Case, device: torch.device) -> torch.Tensor:
    """Eight consecutive documents of random lengths, causal: bool (Sq, Sk)."""
    generator = torch.Generator().manual_seed(SEED)
    ends = (torch.rand(7, generator=generator).sort().values * case.kv_length).to(device)
    row, key = (torch.arange(n, device=device) for n in (case.q_length, case.kv_length))
    return (torch.bucketize(row, ends)[:, None] == torch.bucketize(key, ends)) & (key <= row[:, None])


def window(case: Case, device: torch.device) -> torch.Tensor:
    """A window of the last 1024 keys: bool (Sq, Sk)."""
    distance = torch.arange(case.q_length, device=device)[:, None] - torch.arange(case.kv_length, device=device)
    return (distance >= 0) & (distance < 1024)


def padding(case: Case, device: torch.device) -> torch.Tensor:
    """Padding: each sequence has between half and all of the keys: bool (B, 1, 1, Sk)."""
    lengths = torch.linspace(0.5, 1.0, case.batch, device=device) * case.kv_length
    return torch.arange(case.kv_length, device=device) < lengths.view(-1, 1, 1, 1)


def anywhere(case: Case, device: torch.device) -> torch.Tensor:
    """Seven of ten keys at random: bool (Sq, Sk)."""
    generator = torch.Generator(device).manual_seed(SEED)
    return torch.rand(case.q_length, case.kv_length, device=device, generator=generator) < 0.7


def added(shown: torch.Tensor) -> torch.Tensor:
    """A boolean mask as an additive one: bfloat16, 0 and -inf."""
    return torch.zeros(shown.shape, dtype=torch.bfloat16, device=shown.device).masked_fill_(~shown, -torch.inf)


def distances(case: Case, device: torch.device) -> torch.Tensor:
    """ALiBi's bias (arXiv:2108.12409), symmetric: bfloat16 (1, Hq, Sq, Sk), because PyTorch's fused backends don't take
    3D masks."""
    slopes = 2.0 ** (-8.0 * torch.arange(1, case.q_heads + 1, device=device) / case.q_heads)
    row, key = (torch.arange(n, device=device) for n in (case.q_length, case.kv_length))
    distance = (row[:, None] - key).abs_().neg_().to(torch.bfloat16)
    return distance * slopes.to(torch.bfloat16).view(1, -1, 1, 1)


MASKS: dict[str, Callable[[Case, torch.device], torch.Tensor]] = {
    "documents": documents,
    "window of 1k": window,
    "padding": padding,
    "70 % anywhere": anywhere,
    "documents, added": lambda case, device: added(documents(case, device)),
    "ALiBi": distances,
}


def _flex(problem: Problem) -> Attention:
    """FlexAttention as its users call it: with a block mask that is made beforehand.

    Other values than 0 and -inf are added to scores.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case, mask = problem.case, problem.case.options["attn_mask"]
    mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
    hides = mask.dtype == torch.bool or bool(((mask == 0) | (mask == -torch.inf)).all())
    shown = mask if mask.dtype == torch.bool else mask == 0
    batched, headed, rowed = (int(size > 1) for size in mask.shape[:3])

    def shows(b, h, query, key):
        return shown[b * batched, h * headed, query * rowed, key]

    def adds(score, b, h, query, key):
        return score + mask[b * batched, h * headed, query * rowed, key]

    torch._dynamo.reset()  # after eight shapes it would fall back to uncompiled code
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    options: dict[str, Any] = {"score_mod": adds}
    if hides:
        batch, heads = case.batch if batched else None, case.q_heads if headed else None
        options = {"block_mask": create_block_mask(shows, batch, heads, case.q_length, case.kv_length, device=str(problem.device))}
    return lambda i: compiled(*problem.sets[i % len(problem.sets)], **options)


ROWS_OF_TABLE = (
    *(peer for peer in OWN if peer.name in ("fp8attn cuda", "fp8attn triton", "fp8attn cuda end to end")),
    *(peer for peer in PYTORCH if peer.name in ("SDPA cuDNN", "SDPA efficient")),
    Peer("FlexAttention", (KERNEL,), _flex, jit=True, needs=needs_gpu),
)


def shares_shown(case: Case, mask: torch.Tensor) -> tuple[float, float]:
    """The visible fractions of a mask: of (query, key) pairs, and of blocks of 64 queries and 128 keys (the last ones
    may be smaller)."""
    pairs = blocks = count = 0.0
    for plane in mask.reshape(-1, *mask.shape[-2:]):  # one at a time, because all of ALiBi's take gigabytes
        full = (plane if mask.dtype == torch.bool else plane != -torch.inf).expand(case.q_length, case.kv_length)
        whole = F.pad(full, (0, -case.kv_length % KEYS, 0, -case.q_length % ROWS))
        pairs += float(full.float().mean())
        blocks += float(whole.unflatten(-1, (-1, KEYS)).unflatten(0, (-1, ROWS)).transpose(1, 2).flatten(-2).any(-1).float().mean())
        count += 1
    return pairs / count, blocks / count


@dataclass(frozen=True)
class Result:
    """One row's attention with one mask; or the default kernel's without a mask.

    Attributes:
        pairs, blocks: `shares_shown`.
        against_without: median divided by that of the default kernel without a mask; more than 1 costs more.
    """

    case: Case
    mask: str
    row: str
    pairs: float
    blocks: float
    errors: Errors | None = None
    timing: Timing | None = None
    against_without: float | None = None
    refused: str | None = None

    @property
    def us(self) -> float | None:
        """The median."""
        return None if self.timing is None else self.timing.p50_us

    def record(self) -> dict[str, Any]:
        """One flat JSON object; fields that don't apply are null."""
        return {
            **self.case.record(),
            "mask": self.mask,
            "backend": self.row,
            "pairs": self.pairs,
            "blocks": self.blocks,
            "p50_us": self.us,
            "against_without": self.against_without,
            "relative_l2": None if self.errors is None else self.errors.relative_l2,
            "refused": self.refused,
        }


def measure(case: Case, name: str, rows: Sequence[Peer], bad: Bad, protocol: Protocol, device: torch.device, tick: Tick = no_tick) -> list[Result]:
    """Every row with a mask, and the default kernel without one, from one interleaved run.

    Args:
        tick: called for every turn, which counts as 1.
    """
    mask = MASKS[name](case, device)
    fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(Case)}
    plain = Problem.of(case, "normal", device, rotate=True)
    problem = dataclasses.replace(plain, case=MaskedCase(**fields, attn_mask=mask))
    expected = problem.expected()
    given = {row.name: answer(row, problem, expected, bad) for row in rows}
    runs = {row: one.attention for row, one in given.items() if one.attention is not None}
    without = OWN[0].prepare(plain)
    timed = {row: found.timing for row, found in time_all(runs | {WITHOUT: without}, len(plain.sets), protocol, device, tick).items()}
    shares = shares_shown(case, mask)
    results = [Result(case, name, WITHOUT, *shares, timing=timed[WITHOUT], against_without=1.0)]
    for row, one in given.items():
        timing = timed.get(row)
        over = None if timing is None else timing.p50_us / timed[WITHOUT].p50_us
        lacking = "out of memory beside the others" if row in runs and timing is None else None
        results.append(Result(case, name, row, *shares, one.errors, timing, over, one.refused or lacking))
    return results


def table(results: Sequence[Result]) -> Sheet:
    """A table of microseconds: a row for each kind of mask, a column for each row of the results."""
    names = list(dict.fromkeys(result.row for result in results))
    headers = ("pairs", "blocks", *names, "cuda × no mask", "relative L2")
    made = report.table_of(f"Masks, {results[0].case.name}, µs", ("mask",), headers, "Medians of one interleaved run each; –: refused.")
    for kind in dict.fromkeys(result.mask for result in results):
        by = {result.row: result for result in results if result.mask == kind}
        first, own = by[WITHOUT], by.get("fp8attn cuda")
        cells = [f"{first.pairs:.0%}", f"{first.blocks:.0%}"]
        cells += [report.us_of(by[name].us) for name in names]
        cells.append(report.number_of(None if own is None else own.against_without, ".2f"))
        cells.append(report.number_of(None if own is None or own.errors is None else own.errors.relative_l2, ".4f"))
        made.add_row(kind, *cells)
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_case(parser)
    parser.add_argument("--mask", metavar="SUBSTRING", help="only masks with this in their names")
    command_line.add_peer(parser)
    command_line.add_turns(parser)
    command_line.add_json(parser)


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    works = command_line.chosen(arguments.case, CASES, "--case")
    kinds = command_line.chosen(arguments.mask, list(MASKS), "--mask", "mask", str)
    rows = adapters.chosen(arguments.peer, ROWS_OF_TABLE, "row")
    if device.type != "cuda":
        raise UsageError(NO_GPU)
    rows, lacking = adapters.here(rows), OWN[0].needs()
    if lacking is not None:
        raise UsageError(f"{OWN[0].name}, which masks are compared with, needs {lacking}")
    gates, about = Gates.load(), machine(device)
    protocol = Protocol(arguments.rounds, arguments.milliseconds, arguments.milliseconds)
    calls = [
        (f"{case.name}, {name}", functools.partial(measure, case, name, rows, gates.bad, protocol, device))
        for case, name in itertools.product(works, kinds)
    ]
    doing = f"cases: {len(works)}, masks: {len(kinds)}"
    with report.progress("masks") as bar:
        results = report.measure_each(bar, doing, calls, protocol.rounds * (len(rows) + 1), arguments.json, about)
    for case in works:
        report.console().print(table([result for result in results if result.case == case]))
    return 0
