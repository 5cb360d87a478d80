"""python -m bench: checks the gates, then times all peers side by side."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import get_args

import torch

from fp8attn.cuda.build import BuildError
from fp8attn.device import INTERPRETING

from . import (
    accuracy,
    adapters,
    cases,
    command_line,
    commits,
    compare,
    decode,
    distributed,
    document,
    first_calls,
    ladder,
    masks,
    model,
    models,
    needle,
    overhead,
    plot,
    price,
    profile,
    quantize,
    readme,
    report,
    sanitize,
    search,
    varlen,
)
from .command_line import Parser, UsageError, at_least, chosen, input_file, more_than_zero, output_file, output_folder, replacing
from .compare import Comparison
from .compiling import compile_all
from .gates import Gates, Verdict, all_green, compiles, judge
from .machine import PROGRAM, machine
from .peers import OWN, device_here
from .run import Result, effort, side_by_side
from .timing import Cache, Launch, Protocol
from .worker import Worker

DEFAULT = "run"

MODULES: dict[str, ModuleType] = {
    "accuracy": accuracy,
    "needle": needle,
    "model": model,
    "models": models,
    "price": price,
    "masks": masks,
    "varlen": varlen,
    "decode": decode,
    "overhead": overhead,
    "first-calls": first_calls,
    "distributed": distributed,
    "ladder": ladder,
    "profile": profile,
    "sanitize": sanitize,
    "search": search,
    "plot": plot,
    "report": document,
}
"""Commands that are separate modules. Each has HELP, add_arguments(parser) and main(arguments, device) -> exit code."""

LARGEST_COMPILED = 1 << 30
"""Largest cases, in bytes, that run once for compilation, in parallel with other cases. Larger ones use the same
kernels as smaller ones."""


FIRST_PEERS = ("fp8attn cuda", "SDPA flash", "SDPA cuDNN", "FA3 bf16")
"""Parts of the names of the peers in the first answer, used if neither a suite nor a peer is named."""

LAUNCHED: dict[Launch, str] = {"graph": "in a CUDA graph", "eager": "eager"}

PROTOCOL = ("rounds", "milliseconds", "lead_in", "cache", "launch")
"""Options that are fields of `Protocol`. Their defaults are the protocol's."""


def protocol_of(arguments: argparse.Namespace) -> Protocol:
    given = {name: getattr(arguments, name) for name in PROTOCOL}
    return dataclasses.replace(Protocol(), **{name: value for name, value in given.items() if value is not None})


def markdown_file(text: str) -> Path | str:
    """The type of an option that names a file, or standard output by `-`."""
    return text if text == "-" else output_file(text)


def parser() -> argparse.ArgumentParser:
    """The command line. Without a command it is `run`."""
    top = Parser(prog=PROGRAM, description=f"Benchmarks of fp8attn. Without a command: {DEFAULT}.")
    commands = top.add_subparsers(dest="command", required=True)

    filtered, recorded, timed, peered = (Parser(add_help=False) for _ in range(4))
    command_line.add_case(filtered)
    command_line.add_json(recorded)
    command_line.add_peer(peered, "peer")
    default = Protocol()
    timed.add_argument("--rounds", type=at_least(1), metavar="N", help=f"turns that every peer gets (default: {default.rounds})")
    timed.add_argument("--milliseconds", type=more_than_zero, metavar="MS", help=f"length of a turn on a GPU (default: {default.milliseconds})")
    timed.add_argument(
        "--lead-in", type=at_least(0, float), metavar="MS",
        help=f"of the same work before a turn, untimed, so that the clock is the peer's own (default: {default.lead_in})",
    )  # fmt: skip
    timed.add_argument(
        "--cache", choices=get_args(Cache),
        help=f"what calls find in L2: other inputs' bytes (rotate), nothing (cold: a sample is one call), their own (warm); default: {default.cache}",
    )  # fmt: skip
    timed.add_argument(
        "--launch", choices=get_args(Launch), help=f"CUDA graphs, or one by one with the CPU's time counted (default: {default.launch})"
    )

    side_by_side = commands.add_parser(
        "run", parents=[filtered, peered, timed, recorded], help="speed and errors, side by side with whoever is installed"
    )
    side_by_side.add_argument("--suite", action="append", choices=cases.NAMES, help="repeatable; default: models, tiny without a GPU")
    side_by_side.add_argument("--distribution", choices=cases.DISTRIBUTIONS, help="of the inputs; default: normal, the suite accuracy has its own")
    side_by_side.add_argument(
        "--markdown", nargs="?", const="-", type=markdown_file, metavar="FILE", help="write Markdown tables, to standard output without FILE"
    )
    commands.add_parser("peers", help="who can be compared on this machine, and what the others need")
    commands.add_parser("quantize", parents=[filtered, timed, recorded], help="the quantizer's bandwidth")
    comparing = commands.add_parser(
        "compare", parents=[filtered, timed], help="two results files or two commits, case by case: what is faster, what slower, what noise"
    )
    comparing.add_argument("before", metavar="BEFORE", help="a results file, or with --commits a git revision")
    comparing.add_argument("after", metavar="AFTER", help="likewise")
    comparing.add_argument("--commits", action="store_true", help="measure two commits now, in turns: a process each, on the one GPU")
    comparing.add_argument("--suite", action="append", choices=cases.NAMES, help="of --commits; repeatable; default: prefill, tiny without a GPU")
    comparing.add_argument("--to", type=output_folder, metavar="FOLDER", help="of --commits: write before.jsonl and after.jsonl there")
    comparing.add_argument("--backend", metavar="SUBSTRING", help="only backends with this in their names; of --commits: of fp8attn's")
    comparing.add_argument("--require", type=more_than_zero, metavar="RATIO", help="fail unless every row is this many times as fast as before")
    comparing.add_argument("--markdown", type=output_file, metavar="FILE", help="write the table as Markdown")
    for name, module in MODULES.items():
        module.add_arguments(commands.add_parser(name, help=module.HELP, description=f"{module.HELP}."))
    commands.add_parser("readme", help="fill the tables of README.md and docs/ from bench/results, in a checkout")
    return top


def workloads_of(arguments: argparse.Namespace, default: Sequence[str], gpu: bool) -> list[cases.Workload]:
    """The workloads of the requested suites, filtered by the requested cases.

    Raises:
        UsageError: there are none; or --distribution is given and the only suite has its own distributions.
    """
    names = arguments.suite or default
    distribution = getattr(arguments, "distribution", None)
    if distribution is not None and set(names) == {"accuracy"}:
        raise UsageError(f"--distribution is {distribution}; the suite accuracy has inputs of its own, and there is no other suite")
    found = cases.workloads(names, distribution or "normal", gpu)
    return chosen(arguments.case, found, "--case", f"case of the suites {', '.join(names)}", lambda work: work[0].name)


def run_side_by_side(arguments: argparse.Namespace, device: torch.device) -> int:
    gpu, gates, protocol = device.type == "cuda", Gates.load(), protocol_of(arguments)
    works = workloads_of(arguments, ["models"] if gpu else ["tiny"], gpu)
    first = gpu and arguments.suite is None and arguments.peer is None
    peers = adapters.here(adapters.chosen(FIRST_PEERS if first else arguments.peer))
    launches: list[Launch] = ["graph", "eager"] if first and arguments.launch is None else [protocol.launch]
    gated, own = cases.suite("seeds", gpu), [peer for peer in peers if peer.own] or adapters.present(OWN)[0]
    if not gpu:
        print(f"run: no NVIDIA GPU: Triton's interpreter, {len(works)} small cases; times will mean nothing for speed", file=sys.stderr, flush=True)
    about = machine(device) | {"cache": protocol.cache, "lead_in_ms": protocol.lead_in}
    verdicts: list[Verdict] = []
    results: dict[Launch, list[Result]] = {launch: [] for launch in launches}
    with report.progress("run") as bar:
        if gpu:
            everything = (*gated, *(case for case, _ in works if case.least_bytes <= LARGEST_COMPILED))
            verdicts += [compiles(*done) for done in compile_all(everything, [*own, *(peer for peer in peers if not peer.own)], bar)]
        if all(verdict.green for verdict in verdicts):
            gating = sum(peer.effort(case, gpu) for case in gated for peer in own)
            rows = [(case, distribution, launch) for case, distribution in works for launch in launches]
            efforts = [sum(sum(effort(case, peer, protocol, gpu)) for peer in peers) for case, _, _ in rows]
            task = bar.add_task("gates", total=gating + sum(efforts), seconds=gating + sum(efforts))
            for case in gated:
                verdicts += judge(case, gates, device, own, bar.ticks(task, f"gates, {case.name}, "))
            for i, (case, distribution, launch) in enumerate(rows if all_green(verdicts) else ()):
                bar.update(task, completed=gating + sum(efforts[:i]))
                launched = dataclasses.replace(protocol, launch=launch)
                found = side_by_side(case, distribution, peers, launched, gates, device, bar.ticks(task, f"{case.name}, {LAUNCHED[launch]}, "))
                report.append(arguments.json, (report.json_line("run", result.record(), about | {"launch": launch}) for result in found))
                results[launch] += found
    console = report.console()
    console.print(report.gate_table([verdict for verdict in verdicts if verdict.errors or not verdict.green], gates))
    if not all_green(verdicts):
        report.say("A gate is red: no speed is reported.", "red")
        return 1
    for launch, found in results.items():
        for table in report.speed_tables(found, gpu, LAUNCHED[launch] if gpu else ""):
            console.print(table)
    if first:
        report.say(f"More: --suite {', '.join(cases.NAMES)}; --peer for others; python -m bench --help for other commands.")
    if arguments.markdown:
        texts = {launch: document.markdown([result.record() | about | {"launch": launch} for result in found]) for launch, found in results.items()}
        text = "\n".join(texts.values() if len(texts) == 1 else (f"## Calls {LAUNCHED[launch]}\n\n{one}" for launch, one in texts.items()))
        if arguments.markdown == "-":
            print(text)
        else:
            arguments.markdown.write_text(text)
    reds = [result for found in results.values() for result in found if result.broken]
    for result in reds:
        report.say(f"red, no speed: {result.case.name}, {result.distribution}, {result.backend}: {', '.join(result.broken)}", "red")
    return 1 if reds else 0


def run_peers(arguments: argparse.Namespace, device: torch.device) -> int:
    report.console().print(report.peer_table({peer.name: peer.needs() for peer in adapters.PEERS}))
    return 0


def run_quantize(arguments: argparse.Namespace, device: torch.device) -> int:
    gpu, protocol = device.type == "cuda", protocol_of(arguments)
    works, about = chosen(arguments.case, quantize.cases(gpu), "--case"), machine(device)
    results: list[quantize.Result] = []
    with report.progress("quantize") as bar:
        task = bar.add_task(f"cases: {len(works)}", total=len(works))
        for case in works:
            bar.update(task, description=case.name)
            results.append(quantize.measure(case, protocol, device))
            report.append(arguments.json, [report.json_line("quantize", results[-1].record(), about)])
            bar.advance(task)
    report.console().print(report.quantize_table(results, gpu))
    return 0


def compared_commits(arguments: argparse.Namespace, device: torch.device) -> tuple[Comparison, list[str]]:
    """The changes between two commits, and descriptions of red rows."""
    gpu, gates, protocol = device.type == "cuda", Gates.load(), protocol_of(arguments)
    revisions = [commits.resolved(revision) for revision in (arguments.before, arguments.after)]
    works = workloads_of(arguments, ["prefill"] if gpu else ["tiny"], gpu)
    peers = adapters.here(chosen(arguments.backend, OWN, "--backend", "backend of fp8attn's"))
    changes, reds = [], []
    with contextlib.ExitStack() as stack:
        files: list[Path | None] = [None, None]
        if arguments.to is not None:
            arguments.to.mkdir(parents=True, exist_ok=True)
            files = [stack.enter_context(replacing(arguments.to / f"{name}.jsonl")) for name in ("before", "after")]
        bar = stack.enter_context(report.progress("compare"))
        task = bar.add_task("starting a process for each commit", total=len(works) * len(peers))
        trees = [stack.enter_context(commits.tree_of(revision)) for revision in revisions]
        workers = [stack.enter_context(Worker(tree, name)) for tree, name in zip(trees, (arguments.before, arguments.after), strict=True)]
        abouts = [machine(device) | {"commit": revision} for revision in revisions]
        for pair in commits.interleaved(workers[0], workers[1], works, peers, protocol, gates, bar.ticks(task)):
            records = [pair.before.record(), pair.after.record()]
            for file, record, about in zip(files, records, abouts, strict=True):
                report.append(file, [report.json_line("run", record, about)])
            for result, name in ((pair.before, arguments.before), (pair.after, arguments.after)):
                if result.broken:
                    reds.append(f"{name}: {result.case.name}, {result.backend}: {', '.join(result.broken)}")
            if pair.before.timing and pair.after.timing:
                changes.append(compare.paired((pair.before.case.name, pair.before.backend, pair.before.distribution), *records))
    return Comparison(tuple(changes), (), ()), reds


OF_COMMITS = ("suite", "to", *PROTOCOL)
"""Options of `compare` that determine how commits are measured."""


def compared_files(arguments: argparse.Namespace) -> Comparison:
    """The changes between two results files.

    Raises:
        UsageError: an option is only for --commits; a file doesn't exist; or a filter matches nothing.
    """
    given = [name for name in OF_COMMITS if getattr(arguments, name) is not None]
    if given:
        option, value = given[0].replace("_", "-"), getattr(arguments, given[0])
        raise UsageError(f"--{option} is {value}; it says how --commits measures, and results files are measured already")
    try:
        before, after = input_file(arguments.before), input_file(arguments.after)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{error}; git revisions are compared with --commits") from error
    return compare.compare(before, after, arguments.backend, arguments.case)


def run_compare(arguments: argparse.Namespace, device: torch.device) -> int:
    reds: list[str] = []
    if arguments.commits:
        found, reds = compared_commits(arguments, device)
    else:
        found = compared_files(arguments)
    report.console().print(report.compare_table(found))
    for name, keys in (("before", found.only_before), ("after", found.only_after)):
        if keys:
            report.say(f"only {name}: {'; '.join(' / '.join(part for part in key if part) for key in keys)}")
    if arguments.markdown is not None:
        arguments.markdown.write_text(compare.markdown(found))
    short = [] if arguments.require is None else compare.short_of(found, arguments.require)
    for change in short:
        report.say(f"short of × {arguments.require}: {change.case}, {change.backend}: × {change.ratio:.3f}")
    for line in reds:
        report.say(f"red, not compared: {line}", "red")
    return 1 if short or reds or (arguments.require is not None and not found.changes) else 0


def run_readme(arguments: argparse.Namespace, device: torch.device) -> int:
    readme.write()
    return 0


RUN = {
    "run": run_side_by_side,
    "peers": run_peers,
    "compare": run_compare,
    "quantize": run_quantize,
    "readme": run_readme,
    **{name: module.main for name, module in MODULES.items()},
}


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The parsed command line.

    Raises:
        UsageError: there is no such command or option, or an argument has a wrong value.
    """
    if words and not words[0].startswith("-") and words[0] not in RUN:
        raise UsageError(f"there is no command {words[0]!r}; there are {', '.join(RUN)}")
    arguments = parser().parse_args(words if words and words[0] in (*RUN, "-h", "--help") else [DEFAULT, *words])
    beyond = [name for name in getattr(arguments, "suite", None) or () if name in cases.NEEDS_GPU and not torch.cuda.is_available()]
    if beyond:
        raise UsageError(f"--suite {beyond[0]} needs an NVIDIA GPU; the interpreter would take hours")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0; 1 if a gate is red or a row is slower than required; 2 if the request
    can't be done here."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words and words[0] in RUN else DEFAULT
    try:
        arguments = parsed(words)
        if INTERPRETING:  # NumPy warns about what hardware computes silently
            warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
        with replacing(getattr(arguments, "json", None)) as file:
            arguments.json = file
            return RUN[command](arguments, device_here())
    except (UsageError, BuildError) as error:
        print(f"{PROGRAM} {command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    if not torch.cuda.is_available() and not INTERPRETING:
        # fp8attn.bench is imported after fp8attn, whose kernels are decorated already
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    sys.exit(main())
