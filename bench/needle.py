"""A needle in a haystack, for one attention head and lengths for which no small model is trained.

Every token holds one word of a vocabulary: its value is the word's code, |N(0, 1)| in every channel. Queries and keys
are N(0, 1), except for one key per query, the query's needle. It lies along the query, so that its softmax weight is a
given share. The head's output is then share · (the needle's code) + (1 - share) · (the mean of all codes), up to the
draw. The word is read with a linear map, as a next layer can: it is the code that, times the share and added to that
mean, is nearest.

All sums have one sign, so an accumulator that truncates its terms makes the haystack's part too small. The result is
then off by the same fraction of the mean code. The smaller the needle's share, the fewer keys are enough to hide the
word.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import command_line, report
from .adapters import here
from .cases import SEED, Case
from .command_line import UsageError, at_least
from .compiling import compile_first
from .errors import Errors
from .gates import Gates
from .machine import machine
from .peers import Peer, Problem, answer
from .progress import Tick, no_tick
from .readme import Record
from .rows import chosen
from .sheet import Sheet

HELP = "retrieval of one key among up to 512k by a constructed attention head: every recipe, and others' FP8 kernels"

WORDS = 1024
SHARES = (1 / 4, 1 / 16)
LENGTHS = (1024, 4096, 16384, 65536, 131072, 262144, 524288)
LENGTHS_ON_CPU = (256, 1024)


@dataclass(frozen=True)
class Haystack:
    """A problem and its solution.

    Attributes:
        codes: float32 (WORDS, D), one row per word.
        share: a needle's part of its query's softmax weight.
        words: int64 (1, H, Sq), the word that each query's needle holds.
    """

    problem: Problem
    codes: torch.Tensor
    share: float
    words: torch.Tensor

    def found(self, out: torch.Tensor) -> float:
        """Fraction of queries whose word can be read from `out` (1, H, Sq, D)."""
        above = out.float() - (1 - self.share) * self.codes.mean(0)
        likelihood = 2 * above @ (self.share * self.codes).T - (self.share * self.codes).square().sum(-1)
        return float((likelihood.argmax(-1) == self.words).double().mean())


def case_of(keys: int, heads: int = 4, queries: int = 256, dim: int = 128) -> Case:
    return Case(f"{keys // 1024}k" if keys >= 1024 else str(keys), 1, heads, heads, queries, keys, dim, dim, causal=False)


def haystack(case: Case, share: float, device: torch.device) -> Haystack:
    """Place one needle per query at random. For other queries, a needle is hay.

    Raises:
        ValueError: there are more queries than keys.
    """
    heads, queries, keys, dim = case.q_heads, case.q_length, case.kv_length, case.head_dim
    if queries > keys:
        raise ValueError(f"queries is {queries}; it must be at most keys, {keys}, since each has a needle of its own")
    generator = torch.Generator(device).manual_seed(SEED)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    codes = drawn(WORDS, dim).abs()
    q, k = drawn(1, heads, queries, dim), drawn(1, heads, keys, dim)
    held = torch.randint(WORDS, (1, heads, keys), generator=generator, device=device)
    places = torch.stack([torch.randperm(keys, generator=generator, device=device)[:queries] for _ in range(heads)]).unsqueeze(0)
    squares = q.square().sum(-1, keepdim=True)
    # the hay's scores are N(0, |q|²/D), and the mean of their exponentials is exp(|q|²/2D)
    score = math.log(share / (1 - share) * (keys - 1)) + squares / (2 * dim)
    k.scatter_(2, places.unsqueeze(-1).expand(-1, -1, -1, dim), q * (score * dim**0.5 / squares))
    tensors = (q.bfloat16(), k.bfloat16(), codes.bfloat16()[held])
    return Haystack(Problem(case, "needle", device, (tensors,)), codes.bfloat16().float(), share, held.gather(2, places))


@dataclass(frozen=True)
class Result:
    """The fraction of needles that one row found, and its errors."""

    keys: int
    share: float
    row: str
    trials: int
    found: float | None
    errors: Errors | None
    refused: str | None

    def record(self) -> Record:
        """One flat JSON object."""
        record = {name: getattr(self, name) for name in ("keys", "share", "trials", "found", "refused")}
        return record | {"backend": self.row, "relative_l2": None if self.errors is None else self.errors.relative_l2}


def measure(hay: Haystack, rows: Sequence[Peer], gates: Gates, tick: Tick = no_tick) -> list[Result]:
    """The results of every row.

    Args:
        tick: called for every row, which counts as its `effort`.
    """
    problem, expected, results = hay.problem, hay.problem.expected(), []
    about = (problem.case.kv_length, hay.share)
    results.append(Result(*about, "exact, float32", hay.words.numel(), hay.found(expected), Errors.of(expected, expected, gates.bad), None))
    for row in rows:
        tick(row.name, 0.0)
        given = answer(row, problem, expected, gates.bad)
        tick(row.name, row.effort(problem.case, problem.device.type == "cuda"))
        if not given.unavailable:
            found = None if given.attention is None else hay.found(row.restored(problem, given.attention(0)))
            results.append(Result(*about, row.name, hay.words.numel(), found, given.errors, given.refused))
    return results


def table(results: Sequence[Result]) -> Sheet:
    """A table of needles found by length, with a row for each share and each of the benchmark's rows."""
    lengths = list(dict.fromkeys(result.keys for result in results))
    caption = f"Of {results[0].trials}; guessing finds 1 in {WORDS}."
    made = report.table_of("Needles found", ("share, row",), [f"{keys} keys" for keys in lengths], caption)
    for share in dict.fromkeys(result.share for result in results):
        made.add_group(f"share 1/{1 / share:.0f}")
        mine = [result for result in results if result.share == share]
        for row in dict.fromkeys(result.row for result in mine):
            cells = {result.keys: report.number_of(result.found, ".1%") for result in mine if result.row == row}
            made.add_row(row, *(cells.get(keys, "–") for keys in lengths), style="bold" if row.startswith("fp8attn") else None)
    return made


QUERIES, QUERIES_ON_CPU = 256, 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = f"repeatable, {QUERIES} or more, without a GPU {QUERIES_ON_CPU}; default: {LENGTHS}, without a GPU {LENGTHS_ON_CPU}"
    parser.add_argument("--keys", type=at_least(QUERIES_ON_CPU), action="append", help=words)
    command_line.add_peer(parser)
    command_line.add_json(parser)


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    gpu, gates = device.type == "cuda", Gates.load()
    queries = QUERIES if gpu else QUERIES_ON_CPU
    lengths = arguments.keys or (LENGTHS if gpu else LENGTHS_ON_CPU)
    if min(lengths) < queries:
        raise UsageError(f"--keys is {min(lengths)}; it must be {queries} or more, the number of queries, each of which has a needle of its own")
    rows, about = here(chosen(arguments.peer)), machine(device)
    results: list[Result] = []
    wanted = [case_of(keys, queries=queries) if gpu else case_of(keys, heads=1, queries=queries) for keys in dict.fromkeys(lengths)]
    with report.progress("needle") as bar:
        if gpu:
            compile_first(wanted, rows, bar)
        efforts = [(case, share, sum(row.effort(case, gpu) for row in rows)) for case in wanted for share in SHARES]
        total = sum(one for *_, one in efforts)
        task = bar.add_task(f"haystacks: {len(efforts)}, rows: {len(rows)}", total=total, seconds=total)
        for i, (case, share, _) in enumerate(efforts):
            about_it = f"{case.kv_length} keys, share 1/{1 / share:.0f}"
            bar.update(task, completed=sum(one for *_, one in efforts[:i]), description=about_it)
            found = measure(haystack(case, share, device), rows, gates, bar.ticks(task, f"{about_it}, "))
            report.append(arguments.json, (report.json_line("needle", result.record(), about) for result in found))
            results += found
    report.console().print(table(results))
    return 0
