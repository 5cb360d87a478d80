"""Evolutionary search over kernel configs: an outer layer of structure, an inner layer of tiles, and an elite of three
per case.

Every candidate passes four gates in turn: it fits; it compiles; it agrees with the oracle; it is timed, in turns with
the shipped config. A journal records all candidates and their outcomes. A search that finds its journal continues where
it ends.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import fp8attn
from fp8attn.call import Call
from fp8attn.cuda import configs as cuda_configs
from fp8attn.cuda import portable
from fp8attn.device import Device, device_of
from fp8attn.prepare import call_of
from fp8attn.triton import tune
from fp8attn.triton.configs import HopperConfig, PortableConfig

from . import cases, command_line, report
from .candidates import FINALS, PROTOCOL, Gate, Measured
from .cases import Case
from .command_line import UsageError, at_least
from .machine import PROGRAM
from .sheet import Sheet
from .space import BACKENDS, Config, CudaConfig, Space, from_json, shipped, spaces, to_json, unsupported_call, unsupported_config
from .timing import Protocol

HELP = "search for better kernel configs, evolving what ships; resumable, every try is in its journal"

ELITE = 3
BATCH = 12
"""Candidates of a generation that fit. They are compiled in parallel, then timed in turns."""

PATIENCE = 200
"""Number of draws without a new candidate after which the rest of the space is listed."""

LENGTH = 4096
"""Length of the case that represents its kind: long enough to fill a GPU, and not so long that starts and ends of tiles
don't matter."""

CASES = tuple(case for case in cases.PREFILL if case.q_length == LENGTH)
CUDA_TABLES: dict[type, tuple[Path, str]] = {
    cuda_configs.HopperConfig: (Path(cuda_configs.__file__), "SPEEDS"),
    portable.PortableConfig: (Path(portable.__file__), "MEASURED"),
}
"""For each CUDA kernel, the file and the name of the shipped table."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a candidate.

    Attributes:
        gate: the last gate that it reached.
        reason: why it didn't pass that gate, or None.
        us: median of a call, in microseconds.
        ratio: `us` divided by the shipped config's in the same turns; less than 1 is faster.
    """

    config: Config
    gate: Gate
    reason: str | None = None
    us: float | None = None
    ratio: float | None = None

    @property
    def score(self) -> float:
        return math.inf if self.ratio is None or self.reason is not None else self.ratio


Evaluate = Callable[[Sequence[Config]], Iterable[Outcome]]
"""A function that gives the outcomes of candidates that fit."""


def elite_of(outcomes: Iterable[Outcome], count: int = ELITE) -> list[Outcome]:
    """The fastest outcomes."""
    return sorted((one for one in outcomes if one.score < math.inf), key=lambda one: one.score)[:count]


def fingerprint() -> str:
    """Hash of the package's sources without the tables. Times of other kernels aren't valid for these."""
    root = Path(fp8attn.__file__).parent
    tables = [path for path, _ in CUDA_TABLES.values()]
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".h", ".cuh", ".cpp", ".cu") and path not in tables)
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:12]


class Journal:
    """A file of JSON lines: every candidate of every search, with its outcome.

    Lines for another case, GPU or source stay and are ignored.
    """

    def __init__(self, path: Path | None, key: dict[str, str]) -> None:
        self.path, self.key = path, key
        self.outcomes: dict[Config, Outcome] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                if all(entry.get(name) == value for name, value in key.items()):
                    outcome = Outcome(from_json(entry["config"]), entry["gate"], entry["reason"], entry["us"], entry["ratio"])
                    self.outcomes[outcome.config] = outcome

    def add(self, outcome: Outcome, generation: int) -> None:
        self.outcomes[outcome.config] = outcome
        entry = {"gate": outcome.gate, "reason": outcome.reason, "us": outcome.us, "ratio": outcome.ratio}
        line = {**self.key, "generation": generation, "config": to_json(outcome.config), **entry, "time": round(time.time())}
        report.append(self.path, [json.dumps(line) + "\n"])


def proposed(
    space: Sequence[Space], parents: Sequence[Config], tried: set[Config], fits: Callable[[Config], str | None], dice: random.Random, count: int
) -> tuple[list[Config], list[Outcome]]:
    """At most `count` new candidates that fit, none if the space is exhausted; and the candidates that were drawn and
    don't fit."""
    fresh: list[Config] = []
    rejected: list[Outcome] = []
    seen = set(tried)

    def take(config: Config) -> None:
        if config in seen or len(fresh) == count:
            return
        seen.add(config)
        reason = fits(config)
        if reason is None:
            fresh.append(config)
        else:
            rejected.append(Outcome(config, "fits", reason))

    for _ in range(PATIENCE):
        for config in dice.choice(space).bred(parents, dice):
            take(config)
        if len(fresh) == count:
            return fresh, rejected
    left = [config for one in space for config in one.everything() if config not in seen]
    dice.shuffle(left)
    for config in left:
        take(config)
    return fresh, rejected


@dataclass(frozen=True)
class Candidates:
    """The configs that a search tries.

    Attributes:
        space: all of them.
        seeds: the first generation.
        fits: the reason why a config can't run, or None if it can.
    """

    space: Sequence[Space]
    seeds: Sequence[Config]
    fits: Callable[[Config], str | None]


@dataclass(frozen=True)
class Effort:
    """How long a search goes on, and by which dice.

    Attributes:
        deadline: of `clock`; a generation that has started is finished.
        batch: candidates of a generation.
    """

    deadline: float
    dice: random.Random
    clock: Callable[[], float] = time.monotonic
    batch: int = BATCH


def search(
    candidates: Candidates,
    evaluate: Evaluate,
    journal: Journal,
    effort: Effort,
    progress: Callable[[list[Outcome], int], object] = lambda elite, tried: None,
) -> list[Outcome]:
    """The elite when the time is up or everything has been tried, the fastest first."""
    generation = 0
    fresh = [config for config in candidates.seeds if config not in journal.outcomes]
    rejected: list[Outcome] = []
    while effort.clock() < effort.deadline:
        for outcome in (*rejected, *(evaluate(fresh) if fresh else ())):
            journal.add(outcome, generation)
        elite = elite_of(journal.outcomes.values())
        progress(elite, len(journal.outcomes))
        generation += 1
        parents, tried = [one.config for one in elite], set(journal.outcomes)
        fresh, rejected = proposed(candidates.space, parents, tried, candidates.fits, effort.dice, effort.batch)
        if not fresh:
            for outcome in rejected:
                journal.add(outcome, generation)
            break
    return elite_of(journal.outcomes.values())


def rendered(table: dict[str, dict[str, dict]]) -> str:
    """Triton's shipped table as text: GPU name -> kind of call -> config, with sorted keys and one line per kind."""
    blocks = []
    for gpu, kinds in sorted(table.items()):
        lines = ",\n".join(f"    {json.dumps(kind)}: {json.dumps(config)}" for kind, config in sorted(kinds.items()))
        blocks.append(f"  {json.dumps(gpu)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def write_triton(best: dict[str, HopperConfig | PortableConfig], gpu: str, path: Path = tune.SHIPPED) -> None:
    """Write the best configs of one GPU, by kind of call, into the shipped table.

    Other GPUs and other kinds don't change.
    """
    table = json.loads(path.read_text())
    table.setdefault(gpu, {}).update({kind: tune.to_json(config) for kind, config in best.items()})
    path.write_text(rendered(table))
    tune.table.cache_clear()


CudaSpeeds = dict[CudaConfig, float]


def speeds_from(outcomes: Sequence[Sequence[Outcome]]) -> CudaSpeeds:
    """Relative speeds of configs that were timed in all of some cases with the same head dims.

    For each tile height, it has the fastest config by the geometric mean of its ratios, and its speed relative to the
    fastest of all.
    """
    ratios: dict[CudaConfig, list[float]] = {}
    for case in outcomes:
        for one in case:
            if isinstance(one.config, CudaConfig) and one.score < math.inf:
                ratios.setdefault(one.config, []).append(one.score)
    mean = {config: statistics.geometric_mean(found) for config, found in ratios.items() if len(found) == len(outcomes)}
    best: dict[int, CudaConfig] = {}
    for config in sorted(mean, key=lambda config: mean[config]):
        best.setdefault(config.tile_rows, config)
    return {config: round(min(mean.values()) / mean[config], 2) for config in best.values()}


def merged(table: CudaSpeeds, found: CudaSpeeds) -> CudaSpeeds:
    """CUDA's shipped table, with `found` in place of the entries with the same head dims that support the same
    calls."""

    def group(c: CudaConfig) -> tuple:
        does = (c.operands, c.general) if isinstance(c, portable.PortableConfig) else ("", c.scores)
        return *does, c.head_dim, c.value_dim

    replaced = {group(c) for c in found}
    kept = {c: speed for c, speed in table.items() if group(c) not in replaced}
    return dict(sorted({**kept, **found}.items(), key=lambda entry: (group(entry[0]), -entry[0].tile_rows)))


def written_as(config: CudaConfig) -> str:
    """The Python expression that makes a config, without trailing fields that have their defaults."""
    fields = dataclasses.fields(config)
    values = [getattr(config, field.name) for field in fields]
    while fields[len(values) - 1].default == values[-1]:
        values.pop()
    return f"{type(config).__name__}({', '.join(json.dumps(x) if isinstance(x, str) else str(x) for x in values)})"


def with_speeds(source: str, speeds: CudaSpeeds, name: str = "SPEEDS") -> str:
    """The text of a module of CUDA configs with the table `name` replaced.

    Raises:
        ValueError: it has no such table.
    """
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            lines = source.splitlines(keepends=True)
            entries = "".join(f"    {written_as(config)}: {speed},\n" for config, speed in speeds.items())
            assert node.end_lineno is not None
            return "".join((*lines[: node.lineno - 1], f"{name} = {{\n", entries, "}\n", *lines[node.end_lineno :]))
    raise ValueError(f"there is no table {name} in it")


def write_cuda(found: Sequence[CudaSpeeds], tables: dict[type, tuple[Path, str]] | None = None) -> None:
    """Write the results, one for each pair of head dims, into CUDA's shipped tables (default: `CUDA_TABLES`).

    They take effect at the next start of Python.
    """
    shipped: dict[type, CudaSpeeds] = {
        cuda_configs.HopperConfig: dict(cuda_configs.SPEEDS.items()),
        portable.PortableConfig: dict(portable.MEASURED.items()),
    }
    for kind, (path, name) in (CUDA_TABLES if tables is None else tables).items():
        table = shipped[kind]
        for speeds in found:
            if isinstance(next(iter(speeds), None), kind):
                table = merged(table, speeds)
        if table != shipped[kind]:
            path.write_text(with_speeds(path.read_text(), table, name))


def table_of(title: str, elite: Sequence[Outcome], flops: int) -> Sheet:
    made = report.table_of(title, ("config",), ("µs", "TFLOP/s", "× shipped"))
    for one in elite:
        assert one.us is not None and one.ratio is not None
        made.add_row(str(one.config), report.us_of(one.us), f"{flops / one.us / 1e6:.0f}", f"{1 / one.ratio:.3f}")
    return made


FINAL_SHARE = 0.1
"""Approximate fraction of a search's time that the finals take at its end."""


def journal_file(text: str) -> Path:
    """The type of an option that names a journal: a file that can be written and, if it exists, was written by a
    search."""
    path = command_line.output_file(text)
    if path.is_file():
        try:
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                from_json(entry["config"]), entry["gate"], entry["reason"], entry["us"], entry["ratio"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise argparse.ArgumentTypeError(f"{text!r} isn't a journal of {PROGRAM} search: {error!r}") from error
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="repeatable; default: both, without a GPU triton")
    command_line.add_case(parser)
    parser.add_argument("--minutes", type=at_least(0, float), default=10.0, help="for each case and backend (default: %(default)s)")
    parser.add_argument("--batch", type=at_least(1), default=BATCH, help="candidates of a generation (default: %(default)s)")
    parser.add_argument("--journal", type=journal_file, metavar="FILE.jsonl", help="of everything tried, appended to; a search goes on where it ends")
    parser.add_argument("--seed", type=int, default=0, help="of the dice (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="put the elite's best into the shipped tables, in a checkout")


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    gpu, properties = device.type == "cuda", device_of(device)
    if arguments.write:
        command_line.checkout("search --write")
        if not gpu:
            raise UsageError("--write needs a GPU: the interpreter's times mean nothing")
    works = command_line.chosen(arguments.case, CASES if gpu else cases.TINY, "--case")
    jobs: list[tuple[str, Case, Call]] = []
    for backend in dict.fromkeys(arguments.backend or (BACKENDS if gpu else ("triton",))):
        for case in works:
            call = call_of(*cases.inputs(case, "normal", device), **case.options)
            reason = unsupported_call(backend, call, properties)
            if reason is None:
                jobs.append((backend, case, call))
            else:
                print(f"search: {backend}, {case.name}: {reason}", file=sys.stderr, flush=True)
    if not jobs:
        raise UsageError("no backend that was asked for runs a case that was")
    triton: dict[str, HopperConfig | PortableConfig] = {}
    cuda: dict[tuple[int, int], list[list[Outcome]]] = {}
    tables = []
    with report.progress("search") as bar:
        task = bar.add_task(f"searches: {len(jobs)}", total=len(jobs), seconds=60 * arguments.minutes * len(jobs) / (1 - FINAL_SHARE))
        for i, (backend, case, call) in enumerate(jobs):
            journal = Journal(arguments.journal, {"case": case.name, "backend": backend, "gpu": properties.name, "sources": fingerprint()})

            def show(doing: str, done: float, i: int = i) -> None:
                bar.update(task, completed=i + done, description=doing)

            elite = one_search(arguments, backend, case, call, properties, journal, show)
            tables.append(table_of(f"{backend}, {case.name}: the best of {len(journal.outcomes)} candidates", elite, case.flops))
            if elite and backend == "triton":
                assert isinstance(elite[0].config, (HopperConfig, PortableConfig))
                triton[tune.kind(call)] = elite[0].config
            elif elite:
                cuda.setdefault((case.head_dim, case.value_dim), []).append(list(journal.outcomes.values()))
    for made in tables:
        report.console().print(made)
    if not triton and not cuda:
        raise UsageError("nothing was found")
    if arguments.write:
        if triton:
            write_triton(triton, properties.name)
        if cuda:
            write_cuda([speeds_from(outcomes) for outcomes in cuda.values()])
        report.say(f"written: {', '.join((*sorted(triton), *(f'cuda d{dim}' for dim, _ in sorted(cuda))))}")
    return 0


def one_search(
    arguments: argparse.Namespace, backend: str, case: Case, call: Call, device: Device, journal: Journal, show: Callable[[str, float], None]
) -> list[Outcome]:
    """The elite of one case and backend. At the end, it is decided by longer turns with the shipped config alone.

    Args:
        show: called with the current work and the approximate finished fraction.
    """
    seeds = shipped(backend, call, device)
    began, seconds = time.monotonic(), 60 * arguments.minutes

    def evaluate(configs: Sequence[Config], protocol: Protocol = PROTOCOL) -> Iterable[Outcome]:
        return [Outcome(config, *result) for config, result in Measured(case, backend, seeds[0], protocol)(configs)]

    def progress(elite: list[Outcome], tried: int) -> None:
        best = f", best × {1 / elite[0].score:.3f}" if elite else ""
        share = min((time.monotonic() - began) / seconds, 1.0) if seconds else 1.0
        show(f"{backend}, {case.name}: {tried} candidates{best}", (1 - FINAL_SHARE) * share)

    show(f"{backend}, {case.name}: what ships", 0.0)
    candidates = Candidates(spaces(backend, call, device), seeds, lambda config: unsupported_config(config, call, device))
    effort = Effort(began + seconds, random.Random(arguments.seed), batch=arguments.batch)
    elite = search(candidates, evaluate, journal, effort, progress)
    finalists = list(dict.fromkeys([seeds[0], *(one.config for one in elite)]))
    # in pairs, because in larger rounds a result depends on the neighbours
    again: list[Outcome] = []
    for i, config in enumerate(finalists):
        show(f"{backend}, {case.name}: finals, {i + 1} of {len(finalists)}", 1 - FINAL_SHARE * (1 - i / len(finalists)))
        again += evaluate([config], FINALS)
    return elite_of(again, len(finalists)) or elite
