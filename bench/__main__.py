"""python -m bench: gates first, then everyone side by side."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import get_args

import torch

from . import (
    accuracy,
    adapters,
    cases,
    commits,
    compare,
    document,
    ladder,
    masks,
    model,
    needle,
    plot,
    price,
    profile,
    quantize,
    readme,
    report,
    sanitize,
    search,
)
from .compare import Comparison
from .compiling import compile_all
from .gates import Gates, all_green, compiles, judge
from .machine import machine
from .peers import OWN, Peer
from .run import Result, side_by_side
from .timing import Cache, Launch, Protocol
from .worker import Worker

DEFAULT = "run"


MODULES: dict[str, ModuleType] = {
    "accuracy": accuracy,
    "needle": needle,
    "model": model,
    "price": price,
    "masks": masks,
    "ladder": ladder,
    "profile": profile,
    "sanitize": sanitize,
    "search": search,
    "plot": plot,
    "report": document,
}
"""Commands that are modules of their own: HELP, add_arguments(parser), main(arguments, device) -> exit code."""

LARGEST_COMPILED = 1 << 30
"""Bytes of a case that is run once to compile it, beside others: larger ones use the same kernels as smaller ones."""


def protocol_of(arguments: argparse.Namespace) -> Protocol:
    return Protocol(arguments.rounds, arguments.milliseconds, arguments.lead_in, arguments.cache, arguments.launch)


def parser() -> argparse.ArgumentParser:
    """The command line; without a command it is `run`."""
    top = argparse.ArgumentParser(prog="python -m bench", description=f"Benchmarks of fp8attn. Without a command: {DEFAULT}.")
    commands = top.add_subparsers(dest="command", required=True)

    filtered = argparse.ArgumentParser(add_help=False)
    filtered.add_argument("--case", default="", metavar="SUBSTRING", help="only cases with this in their names")
    recorded = argparse.ArgumentParser(add_help=False)
    recorded.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines")
    timed = argparse.ArgumentParser(add_help=False)
    timed.add_argument("--rounds", type=int, default=5, help="turns that every peer gets (default: %(default)s)")
    timed.add_argument("--milliseconds", type=float, default=25.0, help="length of a turn on a GPU (default: %(default)s)")
    timed.add_argument(
        "--lead-in", type=float, default=25.0, metavar="MILLISECONDS",
        help="of the same work before a turn, untimed, so that the clock is the peer's own (default: %(default)s)",
    )  # fmt: skip
    timed.add_argument(
        "--cache", choices=get_args(Cache), default="rotate",
        help="what calls find in L2: other inputs' bytes (rotate), nothing (cold: a sample is one call), their own (warm); default: %(default)s",
    )  # fmt: skip
    timed.add_argument(
        "--launch", choices=get_args(Launch), default="graph", help="CUDA graphs, or one by one with the CPU's time counted (default: %(default)s)"
    )
    peered = argparse.ArgumentParser(add_help=False)
    peered.add_argument("--peer", action="append", metavar="SUBSTRING", help="only peers with this in their names; repeatable")

    side_by_side = commands.add_parser(
        "run", parents=[filtered, peered, timed, recorded], help="speed and errors, side by side with whoever is installed"
    )
    side_by_side.add_argument("--suite", action="append", choices=cases.NAMES, help="repeatable; default: seeds and prefill, tiny without a GPU")
    side_by_side.add_argument("--distribution", default="normal", choices=cases.DISTRIBUTIONS, help="of the inputs (default: %(default)s)")
    side_by_side.add_argument("--markdown", nargs="?", const="-", metavar="FILE", help="write Markdown tables, to standard output without FILE")
    commands.add_parser("peers", help="who can be compared on this machine, and what the others need")
    commands.add_parser("quantize", parents=[filtered, timed, recorded], help="the quantizer's bandwidth")
    comparing = commands.add_parser(
        "compare", parents=[filtered, timed], help="two results files or two commits, case by case: what is faster, what slower, what noise"
    )
    comparing.add_argument("before", metavar="BEFORE", help="a results file, or with --commits a git revision")
    comparing.add_argument("after", metavar="AFTER", help="likewise")
    comparing.add_argument("--commits", action="store_true", help="measure two commits now, in turns: a process each, on the one GPU")
    comparing.add_argument("--suite", action="append", choices=cases.NAMES, help="of --commits; repeatable; default: prefill, tiny without a GPU")
    comparing.add_argument("--to", type=Path, metavar="FOLDER", help="of --commits: keep before.jsonl and after.jsonl there")
    comparing.add_argument("--backend", default="", metavar="SUBSTRING", help="only backends with this in their names; of --commits: of fp8attn's")
    comparing.add_argument("--require", type=float, metavar="RATIO", help="fail unless every row is this many times as fast as before")
    comparing.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    for name, module in MODULES.items():
        module.add_arguments(commands.add_parser(name, help=module.HELP, description=f"{module.HELP}."))
    commands.add_parser("readme", help="fill the tables of README.md and docs/accuracy.md from bench/results")
    return top


def peers_of(arguments: argparse.Namespace) -> tuple[Peer, ...]:
    """Those asked for that are here; what the others need is printed."""
    return adapters.here(adapters.chosen(arguments.peer))


def run_side_by_side(arguments: argparse.Namespace, device: torch.device) -> int:
    gpu = device.type == "cuda"
    console, gates = report.console(), Gates.load()
    names = arguments.suite or (["seeds", "prefill"] if gpu else ["tiny"])
    chosen = [work for work in cases.workloads(names, arguments.distribution, gpu) if arguments.case in work[0].name]
    peers = peers_of(arguments)
    gated, own = cases.suite("seeds", gpu), [peer for peer in peers if peer.own] or OWN
    verdicts = []
    with report.progress() as bar:
        if gpu:
            everything = (*gated, *(case for case, _ in chosen if case.least_bytes <= LARGEST_COMPILED))
            verdicts += [compiles(*done) for done in compile_all(everything, [*own, *(peer for peer in peers if not peer.own)], bar)]
        if all(verdict.green for verdict in verdicts):
            task = bar.add_task("gates", total=len(gated))
            for case in gated:
                verdicts += judge(case, gates, device, own)
                bar.advance(task)
    console.print(report.gate_table([verdict for verdict in verdicts if verdict.errors or not verdict.green], gates))
    if not all_green(verdicts):
        console.print("[red]A gate is red: no speed is reported.[/]")
        return 1
    about, protocol = machine(device), protocol_of(arguments)
    results: list[Result] = []
    with report.progress() as bar:
        task = bar.add_task("", total=len(chosen))
        for case, distribution in chosen:
            bar.update(task, description=case.name)
            found = side_by_side(case, distribution, peers, protocol, gates, device)
            record_protocol = {"cache": protocol.cache, "launch": protocol.launch, "lead_in_ms": protocol.lead_in}
            report.append(arguments.json, (report.json_line("run", result.record() | record_protocol, about) for result in found))
            results += found
            bar.advance(task)
    for table in report.speed_tables(results, gpu):
        console.print(table)
    if arguments.markdown:
        text = document.markdown([result.record() | about for result in results])
        if arguments.markdown == "-":
            print(text)
        else:
            Path(arguments.markdown).write_text(text)
    reds = [result for result in results if result.broken]
    for result in reds:
        console.print(f"[red]red, no speed: {result.case.name}, {result.distribution}, {result.backend}: {', '.join(result.broken)}[/]")
    return 1 if reds else 0


def run_peers(arguments: argparse.Namespace, device: torch.device) -> int:
    report.console().print(report.peer_table({peer.name: peer.needs() for peer in adapters.PEERS}))
    return 0


def run_quantize(arguments: argparse.Namespace, device: torch.device) -> int:
    gpu, about = device.type == "cuda", machine(device)
    chosen = [case for case in quantize.cases(gpu) if arguments.case in case.name]
    results: list[quantize.Result] = []
    with report.progress() as bar:
        task = bar.add_task("", total=len(chosen))
        for case in chosen:
            bar.update(task, description=case.name)
            results.append(quantize.measure(case, protocol_of(arguments), device))
            report.append(arguments.json, [report.json_line("quantize", results[-1].record(), about)])
            bar.advance(task)
    report.console().print(report.quantize_table(results, gpu))
    return 0


def compared_commits(arguments: argparse.Namespace, device: torch.device) -> tuple[Comparison, list[str]]:
    """Two commits' changes, and what is red."""
    gpu, gates, protocol = device.type == "cuda", Gates.load(), protocol_of(arguments)
    names = arguments.suite or (["prefill"] if gpu else ["tiny"])
    chosen = [work for work in cases.workloads(names, "normal", gpu) if arguments.case in work[0].name]
    peers = [peer for peer in OWN if arguments.backend in peer.name]
    revisions = [commits.resolved(revision) for revision in (arguments.before, arguments.after)]
    changes, reds = [], []
    with contextlib.ExitStack() as stack:
        trees = [stack.enter_context(commits.tree_of(revision)) for revision in revisions]
        workers = [stack.enter_context(Worker(tree, name)) for tree, name in zip(trees, (arguments.before, arguments.after), strict=True)]
        abouts = [machine(device) | {"commit": revision} for revision in revisions]
        files = [None, None] if arguments.to is None else [arguments.to / f"{name}.jsonl" for name in ("before", "after")]
        if arguments.to is not None:
            arguments.to.mkdir(parents=True, exist_ok=True)
        bar = stack.enter_context(report.progress())
        task = bar.add_task("taking turns", total=None)
        for pair in commits.interleaved(workers[0], workers[1], chosen, peers, protocol, gates):
            records = [pair.before.record(), pair.after.record()]
            for file, record, about in zip(files, records, abouts, strict=True):
                report.append(file, [report.json_line("run", record, about)])
            for result, name in ((pair.before, arguments.before), (pair.after, arguments.after)):
                if result.broken:
                    reds.append(f"{name}: {result.case.name}, {result.backend}: {', '.join(result.broken)}")
            if pair.before.timing and pair.after.timing:
                changes.append(compare.paired((pair.before.case.name, pair.before.backend, pair.before.distribution), *records))
            bar.advance(task)
    return Comparison(tuple(changes), (), ()), reds


def run_compare(arguments: argparse.Namespace, device: torch.device) -> int:
    reds: list[str] = []
    try:
        if arguments.commits:
            found, reds = compared_commits(arguments, device)
        else:
            found = compare.compare(Path(arguments.before), Path(arguments.after), arguments.backend)
    except (OSError, ValueError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    console = report.console()
    console.print(report.compare_table(found))
    for name, keys in (("before", found.only_before), ("after", found.only_after)):
        if keys:
            console.print(f"only {name}: {'; '.join(' / '.join(part for part in key if part) for key in keys)}")
    if arguments.markdown is not None:
        arguments.markdown.write_text(compare.markdown(found))
    short = [] if arguments.require is None else compare.short_of(found, arguments.require)
    for change in short:
        console.print(f"short of × {arguments.require}: {change.case}, {change.backend}: × {change.ratio:.3f}")
    for line in reds:
        console.print(f"[red]red, not compared: {line}[/]")
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


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0; 1 if a gate is red or a row short of what was required; 2 if what was asked for can't be done here."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in (*RUN, "-h", "--help"):
        words.insert(0, DEFAULT)
    command_line = parser()
    arguments = command_line.parse_args(words)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    beyond = [name for name in getattr(arguments, "suite", None) or () if name in cases.NEEDS_GPU and device.type != "cuda"]
    if beyond:
        command_line.error(f"--suite {beyond[0]} needs an NVIDIA GPU; the interpreter would take hours")
    if getattr(arguments, "json", None) is not None:
        arguments.json.unlink(missing_ok=True)
    return RUN[arguments.command](arguments, device)


if __name__ == "__main__":
    sys.exit(main())
