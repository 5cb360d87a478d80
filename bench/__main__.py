"""python -m bench: gates first, then everyone side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from . import accuracy, cases, compare, ladder, plot, quantize, readme, report, tune
from .gates import Gates, all_green, judge
from .machine import machine
from .peers import compile_all
from .run import Result, side_by_side

DEFAULT = "run"


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

    side_by_side = commands.add_parser("run", parents=[filtered, timed, recorded], help="speed and errors beside PyTorch's SDPA backends")
    side_by_side.add_argument("--suite", action="append", choices=cases.SUITES, help="repeatable; default: seeds and headline, tiny without a GPU")
    side_by_side.add_argument("--distribution", default="normal", choices=cases.DISTRIBUTIONS, help="of the inputs (default: %(default)s)")
    side_by_side.add_argument("--markdown", nargs="?", const="-", metavar="FILE", help="write Markdown tables, to standard output without FILE")
    commands.add_parser("accuracy", parents=[filtered, recorded], help="errors by distribution and length")
    commands.add_parser("quantize", parents=[filtered, timed, recorded], help="the quantizer's bandwidth")
    climbing = commands.add_parser("ladder", parents=[filtered, recorded], help="what each feature of the portable CUDA kernel is worth")
    climbing.add_argument("--rounds", type=int, default=5, help="turns that every rung gets (default: %(default)s)")
    climbing.add_argument("--milliseconds", type=float, default=130.0, help="length of a turn (default: %(default)s)")
    climbing.add_argument("--picture", type=Path, metavar="FILE", help=f"draw a bar chart, {ladder.PICTURE.name} for the README")
    tuning = commands.add_parser("tune", parents=[filtered], help="time the candidate configs of every kind of call; takes long")
    tuning.add_argument("--write", action="store_true", help="put the best into fp8attn/triton/shipped.json")
    tuning.add_argument("--shown", type=int, default=10, help="candidates to print (default: %(default)s)")
    comparing = commands.add_parser("compare", help="two results files, case by case: what is faster, what slower, what noise")
    comparing.add_argument("before", type=Path, metavar="BEFORE.jsonl")
    comparing.add_argument("after", type=Path, metavar="AFTER.jsonl")
    comparing.add_argument("--backend", default="", metavar="SUBSTRING", help="only backends with this in their names")
    comparing.add_argument("--require", type=float, metavar="RATIO", help="fail unless every row is this many times as fast as before")
    comparing.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    drawing = commands.add_parser("plot", help="speed over length, from a results file")
    drawing.add_argument("--source", type=Path, default=plot.SOURCE, metavar="FILE.jsonl", help="default: %(default)s")
    drawing.add_argument("--to", type=Path, default=plot.PICTURE, metavar="FILE", help="its suffix is the format (default: %(default)s)")
    commands.add_parser("readme", help="fill the README's tables from bench/results")
    return top


def run_side_by_side(arguments: argparse.Namespace, device: torch.device) -> int:
    gpu = device.type == "cuda"
    console, gates = report.console(), Gates.load()
    names = arguments.suite or (["seeds", "headline"] if gpu else ["tiny"])
    chosen = [case for name in names for case in cases.suite(name, gpu) if arguments.case in case.name]
    gated = cases.suite("seeds", gpu)
    with report.progress() as bar:
        if gpu:
            everything = list(dict.fromkeys((*gated, *chosen)))
            task = bar.add_task("compiling", total=len(everything))
            for _ in compile_all(everything):
                bar.advance(task)
        task = bar.add_task("gates", total=len(gated))
        verdicts = []
        for case in gated:
            verdicts += judge(case, gates, device)
            bar.advance(task)
    console.print(report.gate_table(verdicts, gates))
    if not all_green(verdicts):
        console.print("[red]A gate is red: no speed is reported.[/]")
        return 1
    about = machine(device)
    results: list[Result] = []
    with report.progress() as bar:
        task = bar.add_task("", total=len(chosen))
        for case in chosen:
            bar.update(task, description=case.name)
            found = side_by_side(case, arguments.distribution, arguments.rounds, arguments.milliseconds, gates.bad, device)
            report.append(arguments.json, (report.json_line("run", result.record(), about) for result in found))
            results += found
            bar.advance(task)
    for table in report.speed_tables(results, gpu):
        console.print(table)
    if arguments.markdown:
        text = report.markdown(results, str(about["gpu"] or "Triton's interpreter: times mean nothing for speed"))
        if arguments.markdown == "-":
            print(text)
        else:
            Path(arguments.markdown).write_text(text)
    return 0


def run_accuracy(arguments: argparse.Namespace, device: torch.device) -> int:
    gpu, gates, about = device.type == "cuda", Gates.load(), machine(device)
    chosen = [problem for problem in accuracy.problems(gpu) if arguments.case in problem[0].name]
    results: list[Result] = []
    with report.progress() as bar:
        task = bar.add_task("", total=len(chosen))
        for case, distribution in chosen:
            bar.update(task, description=f"{distribution}, {case.name}")
            found = accuracy.accuracy(case, distribution, gates.bad, device)
            report.append(arguments.json, (report.json_line("accuracy", result.record(), about) for result in found))
            results += found
            bar.advance(task)
    report.console().print(report.accuracy_table(results, gpu))
    return 0


def run_quantize(arguments: argparse.Namespace, device: torch.device) -> int:
    gpu, about = device.type == "cuda", machine(device)
    chosen = [case for case in quantize.cases(gpu) if arguments.case in case.name]
    results: list[quantize.Result] = []
    with report.progress() as bar:
        task = bar.add_task("", total=len(chosen))
        for case in chosen:
            bar.update(task, description=case.name)
            results.append(quantize.measure(case, arguments.rounds, arguments.milliseconds, device))
            report.append(arguments.json, [report.json_line("quantize", results[-1].record(), about)])
            bar.advance(task)
    report.console().print(report.quantize_table(results, gpu))
    return 0


def run_ladder(arguments: argparse.Namespace, device: torch.device) -> int:
    reason = ladder.lacking(device)
    if reason is not None:
        print(f"ladder: {reason}", file=sys.stderr)
        return 2
    gates, about = Gates.load(), machine(device)
    chosen = [case for case in ladder.CASES if arguments.case in case.name]
    records = []
    with report.progress() as bar:
        task = bar.add_task("", total=len(chosen))
        for case in chosen:
            bar.update(task, description=case.name)
            results = ladder.measure(case, gates.bad, arguments.rounds, arguments.milliseconds, device)
            report.append(arguments.json, (report.json_line("ladder", result.record(), about) for result in results))
            records += [result.record() | about for result in results]
            report.console().print(report.ladder_table(results))
            bar.advance(task)
    if arguments.picture is not None:
        ladder.draw(records, arguments.picture)
    return 0


def run_tune(arguments: argparse.Namespace, device: torch.device) -> int:
    if device.type != "cuda":
        print("tune: needs an NVIDIA GPU, and torch sees none", file=sys.stderr)
        return 2
    console = report.console()
    best = {}
    for case in tune.CASES:
        if arguments.case in case.name:
            kind, times = tune.candidates(case, device)
            console.print(report.tune_table(kind, case.flops, times, arguments.shown))
            if times:
                best[kind] = times[0][1]
    if arguments.write and best:
        tune.write(best, torch.cuda.get_device_name(device))
        console.print(f"written: {', '.join(sorted(best))}")
    return 0


def run_compare(arguments: argparse.Namespace, device: torch.device) -> int:
    try:
        found = compare.compare(arguments.before, arguments.after, arguments.backend)
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
    return 1 if short or (arguments.require is not None and not found.changes) else 0


def run_plot(arguments: argparse.Namespace, device: torch.device) -> int:
    try:
        plot.draw(arguments.to, arguments.source)
    except (OSError, ValueError) as error:
        print(f"plot: {error}", file=sys.stderr)
        return 2
    return 0


def run_readme(arguments: argparse.Namespace, device: torch.device) -> int:
    readme.write()
    return 0


RUN = {
    "run": run_side_by_side,
    "compare": run_compare,
    "accuracy": run_accuracy,
    "quantize": run_quantize,
    "ladder": run_ladder,
    "tune": run_tune,
    "plot": run_plot,
    "readme": run_readme,
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
