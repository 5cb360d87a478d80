"""A needle in a haystack, for one attention head and lengths that no small model is trained for.

Every token holds one word of a vocabulary: its value is the word's code, |N(0, 1)| in every channel. A query is N(0, 1); the keys are, too, but
for one, the query's needle, which lies along it so that its softmax weight is a set share. What the head gives is then share · (the needle's
code) + (1 - share) · (the mean of all codes), up to the draw, and the word is read as a next layer can, by a linear map: the code whose share, on
top of that mean, is nearest. All sums are of one sign, so an accumulator that cuts its terms off shrinks the haystack; what is read is then off
by the same part of the mean code, and the smaller the needle's share, the earlier that hides the word.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from . import report
from .adapters import here
from .cases import SEED, Case
from .compiling import compile_first
from .errors import Errors
from .gates import Gates
from .machine import machine
from .peers import Peer, Problem, answer
from .readme import Record
from .rows import chosen

HELP = "retrieval of one key among up to 512k by a constructed attention head: every recipe, and others' FP8 kernels"

WORDS = 1024
SHARES = (1 / 4, 1 / 16)
LENGTHS = (1024, 4096, 16384, 65536, 131072, 262144, 524288)
LENGTHS_ON_CPU = (256, 1024)


@dataclass(frozen=True)
class Haystack:
    """A problem and what should be found.

    Attributes:
        codes: float32 (WORDS, D), one row a word.
        share: of a query's softmax weight that its needle has.
        words: int64 (1, H, Sq), the word that each query's needle holds.
    """

    problem: Problem
    codes: torch.Tensor
    share: float
    words: torch.Tensor

    def found(self, out: torch.Tensor) -> float:
        """The share of queries whose word can be read from `out` (1, H, Sq, D)."""
        above = out.float() - (1 - self.share) * self.codes.mean(0)
        likelihood = 2 * above @ (self.share * self.codes).T - (self.share * self.codes).square().sum(-1)
        return float((likelihood.argmax(-1) == self.words).double().mean())


def case_of(keys: int, heads: int = 4, queries: int = 256, dim: int = 128) -> Case:
    return Case(f"{keys // 1024}k" if keys >= 1024 else str(keys), 1, heads, heads, queries, keys, dim, dim, causal=False)


def haystack(case: Case, share: float, device: torch.device) -> Haystack:
    """Needles lie at random places, one for each query; to other queries they are hay.

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
    # the hay's scores are N(0, |q|²/D): their exponentials are exp(|q|²/2D) on average
    score = math.log(share / (1 - share) * (keys - 1)) + squares / (2 * dim)
    k.scatter_(2, places.unsqueeze(-1).expand(-1, -1, -1, dim), q * (score * dim**0.5 / squares))
    tensors = (q.bfloat16(), k.bfloat16(), codes.bfloat16()[held])
    return Haystack(Problem(case, "needle", device, (tensors,)), codes.bfloat16().float(), share, held.gather(2, places))


@dataclass(frozen=True)
class Result:
    """What one row found, as a share of the needles, and its errors."""

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


def measure(hay: Haystack, rows: Sequence[Peer], gates: Gates) -> list[Result]:
    problem, expected, results = hay.problem, hay.problem.expected(), []
    about = (problem.case.kv_length, hay.share)
    results.append(Result(*about, "exact, float32", hay.words.numel(), hay.found(expected), Errors.of(expected, expected, gates.bad), None))
    for row in rows:
        given = answer(row, problem, expected, gates.bad)
        if not given.unavailable:
            found = None if given.attention is None else hay.found(row.restored(problem, given.attention(0)))
            results.append(Result(*about, row.name, hay.words.numel(), found, given.errors, given.refused))
    return results


def table(results: Sequence[Result]) -> Table:
    """Needles found, by length; a row of the table for each share and each of the benchmark's rows."""
    lengths = list(dict.fromkeys(result.keys for result in results))
    made = report.table_of(
        "Needles found", ("share", "row"), [f"{keys} keys" for keys in lengths], f"Of {results[0].trials}; guessing finds 1 in {WORDS}."
    )
    for share in dict.fromkeys(result.share for result in results):
        made.add_section()
        mine = [result for result in results if result.share == share]
        for i, row in enumerate(dict.fromkeys(result.row for result in mine)):
            cells = {result.keys: report.number_of(result.found, ".1%") for result in mine if result.row == row}
            name = f"1/{1 / share:.0f}" if i == 0 else ""
            made.add_row(name, row, *(cells.get(keys, "–") for keys in lengths), style="bold" if row.startswith("fp8attn") else None)
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", type=int, action="append", help=f"repeatable; default: {LENGTHS}, without a GPU {LENGTHS_ON_CPU}")
    parser.add_argument("--peer", action="append", metavar="SUBSTRING", help="only rows with this in their names; repeatable")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines")


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    gpu, gates, about = device.type == "cuda", Gates.load(), machine(device)
    try:
        rows = chosen(arguments.peer)
    except ValueError as error:
        print(f"needle: {error}", file=sys.stderr)
        return 2
    rows = here(rows)
    results: list[Result] = []
    wanted = [case_of(keys) if gpu else case_of(keys, heads=1, queries=32) for keys in arguments.keys or (LENGTHS if gpu else LENGTHS_ON_CPU)]
    with report.progress() as bar:
        if gpu:
            compile_first(wanted, rows, bar)
        task = bar.add_task("", total=len(wanted) * len(SHARES))
        for case in wanted:
            for share in SHARES:
                bar.update(task, description=f"{case.kv_length} keys, share 1/{1 / share:.0f}")
                found = measure(haystack(case, share, device), rows, gates)
                report.append(arguments.json, (report.json_line("needle", result.record(), about) for result in found))
                results += found
                bar.advance(task)
    report.console().print(table(results))
    return 0
