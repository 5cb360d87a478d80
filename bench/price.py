"""The cost of recipes: quantization, attention alone, and both from bfloat16, relative to the default recipe and to
PyTorch in bfloat16."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import fp8attn
from fp8attn import Recipe

from . import command_line, report
from .cases import HIDDEN, TOKENS, Case, square
from .command_line import NO_GPU, UsageError, at_least
from .compare import round_ratios
from .errors import Bad, Errors, standard_error
from .gates import Gates
from .machine import machine
from .peers import END_TO_END, Attention, Peer, Problem, answer
from .progress import Tick, no_tick
from .rows import FLASH_AND_CUDNN, RECIPES, by_recipe
from .sheet import Sheet
from .summary import BFLOAT16, DEFAULT, SUMMARY, sentence, summaries
from .timing import Protocol, Timing, time_all

HELP = "what each recipe costs: quantizing, attention alone, and both from bfloat16"

SHAPES = ((64, 4096, False), (64, 16384, True), (128, 4096, False), (128, 4096, True), (128, 16384, True), (256, 4096, False))
"""Head dims, lengths, and whether they are causal."""

CASES = tuple(
    square(f"D{dim} {'causal' if causal else 'full'} {length // 1024}k", TOKENS // length, HIDDEN // dim, length, dim, causal=causal)
    for dim, length, causal in SHAPES
)
PARTS = ("quantize", "kernel", "whole")
"""Parts of a call: quantization of q, k and v; attention to them; both in one call, which may fuse them."""

SETTLE = 600.0
"""Milliseconds of uncounted turns before two are compared to a percent. A card that was idle for 0.1 s during graph
capture is 8 % faster for up to 100 ms."""


class Ratio(NamedTuple):
    """A part's time divided by the default's, from rounds of these two alone; and the SM clocks of both, MHz, None if
    they can't be read."""

    mean: float
    standard_error: float
    clock_mhz: float | None = None
    default_clock_mhz: float | None = None


@dataclass(frozen=True)
class Price:
    """One recipe on one case; or PyTorch's fastest backend in bfloat16, which only has the part "whole".

    Attributes:
        plan: the backend, the kernel, and whether the instance is a general one.
        timings: by part.
        against_default: by part, this recipe's time divided by the default recipe's. It is from rounds of these two
            alone, because in larger rounds a result depends on the neighbours. More than 1 costs more.
        against_bfloat16: PyTorch's median divided by the median of this recipe's "whole"; more than 1 is faster.
        refused: why there are no timings, or None.
    """

    case: Case
    recipe: str
    plan: str | None = None
    errors: Errors | None = None
    timings: dict[str, Timing] = dataclasses.field(default_factory=dict)
    against_default: dict[str, Ratio] = dataclasses.field(default_factory=dict)
    against_bfloat16: float | None = None
    refused: str | None = None

    def us(self, part: str) -> float | None:
        """The part's median."""
        return self.timings[part].p50_us if part in self.timings else None

    def ratio_record(self, part: str) -> dict[str, float | None]:
        ratio = self.against_default.get(part)
        names = ("against_default", "standard_error", "clock_mhz", "default_clock_mhz")
        return dict.fromkeys(names) if ratio is None else dict(zip(names, ratio, strict=True))

    def record(self) -> dict[str, Any]:
        """One flat JSON object; fields that don't apply are null."""
        return {
            **self.case.record(),
            "recipe": self.recipe,
            "plan": self.plan,
            **{f"{part}_us": self.us(part) for part in PARTS},
            **{f"{part}_{name}": value for part in PARTS for name, value in self.ratio_record(part).items()},
            "against_bfloat16": self.against_bfloat16,
            "relative_l2": None if self.errors is None else self.errors.relative_l2,
            "refused": self.refused,
        }


def plan_of(plan: fp8attn.Plan) -> str:
    """A plan in a few words."""
    return f"{plan.backend} {plan.kernel}{', general' if getattr(plan.config, 'general', False) else ''}"


def parts_of(problem: Problem, recipe: Recipe) -> dict[str, Callable[[int], Any]]:
    """A recipe's runs by part, without "whole", which `answer` has.

    A recipe with half-precision keys has no other part.
    """
    if recipe.has_half_keys:
        return {}
    sets, options = problem.sets, problem.case.options | {"recipe": recipe, "out_dtype": torch.bfloat16}
    operands = [fp8attn.quantize(*tensors, recipe=recipe) for tensors in sets]
    return {
        "quantize": lambda i: fp8attn.quantize(*sets[i % len(sets)], recipe=recipe),
        "kernel": lambda i: fp8attn.sdpa(*operands[i % len(sets)], **options),
    }


def names_of(recipes: Mapping[str, Recipe]) -> list[str]:
    """Names of the timed runs of recipes: "recipe: part"."""
    return [f"{name}: {part}" for name, recipe in recipes.items() for part in (("whole",) if recipe.has_half_keys else PARTS)]


def effort(recipes: Mapping[str, Recipe], protocol: Protocol) -> float:
    """Estimated seconds of a case."""
    names = names_of(recipes)
    beside = protocol.settle / 1e3 + 2 * protocol.rounds * protocol.turn_seconds
    return len(names) * beside + (len(names) + len(FLASH_AND_CUDNN)) * protocol.rounds * protocol.turn_seconds


def measure(case: Case, recipes: dict[str, Recipe], bad: Bad, protocol: Protocol, device: torch.device, tick: Tick = no_tick) -> list[Price]:
    """Every recipe on a case, then PyTorch in bfloat16, from one interleaved run.

    Args:
        tick: called for every turn; in total, turns count as `effort`.
    """
    problem = Problem.of(case, "normal", device, rotate=True)
    expected = problem.expected()
    runs: dict[str, Attention] = {}
    prices: list[Price] = []
    for name, recipe in recipes.items():
        tick(f"{name}, its answer", 0.0)
        given = answer(Peer(name, (END_TO_END,), functools.partial(by_recipe, recipe), own=True), problem, expected, bad)
        if given.attention is None:
            prices.append(Price(case, name, errors=given.errors, refused=given.refused))
            continue
        plan = plan_of(fp8attn.explain(*problem.sets[0], **case.options, recipe=recipe))
        prices.append(Price(case, name, plan, given.errors))
        runs |= {f"{name}: {part}": run for part, run in (parts_of(problem, recipe) | {"whole": given.attention}).items()}
    peers = {peer.name: answer(peer, problem, expected, bad) for peer in FLASH_AND_CUDNN}
    runs |= {name: given.attention for name, given in peers.items() if given.attention is not None}

    def turns(doing: str, done: float) -> None:
        tick(doing, done * protocol.turn_seconds)

    timed = {name: found.timing for name, found in time_all(runs, len(problem.sets), protocol, device, turns).items()}
    ratios = {}
    for name in timed:
        tick(f"{name}, beside the default's", 0.0)
        ratio = by_twos(runs, name, len(problem.sets), protocol, device)
        if ratio is not None:
            ratios[name] = ratio
            tick(name, protocol.settle / 1e3 + 2 * protocol.rounds * protocol.turn_seconds)
    fastest = min((name for name in peers if name in timed), key=lambda name: timed[name].p50_us, default=None)
    if fastest is not None:
        prices.append(Price(case, BFLOAT16, fastest, peers[fastest].errors))
        timed[f"{BFLOAT16}: whole"] = timed[fastest]
    return compared(prices, timed, ratios)


def by_twos(runs: Mapping[str, Attention], name: str, sets: int, protocol: Protocol, device: torch.device) -> Ratio | None:
    """The ratio of a recipe's part to the default's, from rounds of these two alone. For the default's own part, it is
    the noise.

    None if the default has no such part, or there isn't enough memory.
    """
    default = f"{DEFAULT}: {name.rpartition(': ')[2]}"
    if default not in runs:
        return None
    found = time_all({"default": runs[default], "this": runs[name]}, sets, protocol, device)
    if len(found) < 2:
        return None
    clocks = [found[side].readings.get("sm_clock_mhz") for side in ("this", "default")]
    return Ratio(*over(found["this"].timing, found["default"].timing), *clocks)


def over(this: Timing, default: Timing) -> tuple[float, float]:
    """The mean of the rounds' ratios and its standard error, which is 0 for one round."""
    ratios = round_ratios(this.round_us, default.round_us)
    return statistics.fmean(ratios), standard_error(ratios) if len(ratios) > 1 else 0.0


def compared(prices: Iterable[Price], timed: dict[str, Timing], ratios: Mapping[str, Ratio]) -> list[Price]:
    """The prices with timings and ratios to the default (both by "recipe: part"), and with the ratio of "whole" to
    PyTorch's."""
    found = []
    bfloat16 = timed.get(f"{BFLOAT16}: whole")
    for price in prices:
        timings = {part: timed[f"{price.recipe}: {part}"] for part in PARTS if f"{price.recipe}: {part}" in timed}
        against = {part: ratios[f"{price.recipe}: {part}"] for part in timings if f"{price.recipe}: {part}" in ratios}
        faster = bfloat16.p50_us / timings["whole"].p50_us if bfloat16 is not None and "whole" in timings else None
        found.append(dataclasses.replace(price, timings=timings, against_default=against, against_bfloat16=faster))
    return found


def table(prices: Sequence[Price]) -> Sheet:
    """A table with a row for each recipe."""
    shown = {"kernel": "kernel", "quantize": "quantize", "whole": "from bf16"}
    headers = (*(f"{name} {what}" for name in shown.values() for what in ("µs", "× default")), "× bfloat16", "relative L2")
    made = report.table_of(
        f"Prices, {prices[0].case.name}",
        ("recipe",),
        headers,
        "Medians of one interleaved run; × default: of rounds of these two alone, more costs more.",
        optional=("relative L2", "quantize µs", "quantize × default", "kernel µs", "from bf16 µs"),
        words=("runs",),
    )
    for price in prices:
        cells = []
        for part in shown:
            ratio = price.against_default.get(part)
            cells += [report.us_of(price.us(part)), "–" if ratio is None else f"{ratio.mean:.3f} ± {ratio.standard_error:.3f}"]
        error = None if price.errors is None else price.errors.relative_l2
        cells += [report.number_of(price.against_bfloat16, ".2f"), report.number_of(error, ".4f"), price.refused or price.plan or ""]
        made.add_row(price.recipe, *cells)
    return made


def is_meant(name: str, words: str) -> bool:
    """Whether `words` select a recipe: they are its name, or a part of it that isn't another recipe's whole name."""
    return name == words or (words not in RECIPES and words in name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_case(parser)
    parser.add_argument(
        "--recipe",
        action="append",
        metavar="SUBSTRING",
        help="only the recipe of this name, or those with this in theirs, and the default; repeatable",
    )
    command_line.add_turns(parser, "part")
    parser.add_argument(
        "--settle", type=at_least(0, float), default=SETTLE, help="milliseconds of turns that don't count before the first (default: %(default)s)"
    )
    command_line.add_json(parser)


def chosen_recipes(wanted: Sequence[str] | None) -> dict[str, Recipe]:
    """The default recipe and the selected recipes.

    Raises:
        UsageError: an element of `wanted` selects no recipe.
    """
    for words in wanted or ():
        if not any(is_meant(name, words) for name in RECIPES):
            raise UsageError(f"no recipe has {words!r} in its name (--recipe); there are {', '.join(RECIPES)}")
    meant = {name: recipe for name, recipe in RECIPES.items() if wanted is None or any(is_meant(name, words) for words in wanted)}
    return {DEFAULT: Recipe()} | meant


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    works, recipes = command_line.chosen(arguments.case, CASES, "--case"), chosen_recipes(arguments.recipe)
    if device.type != "cuda":
        raise UsageError(NO_GPU)
    gates = Gates.load()
    protocol = Protocol(arguments.rounds, arguments.milliseconds, arguments.milliseconds, settle=arguments.settle)
    how = {"rounds": protocol.rounds, "milliseconds": protocol.milliseconds, "lead_in_ms": protocol.lead_in, "settle_ms": protocol.settle}
    about: dict[str, Any] = machine(device) | how
    measured: list[list[Price]] = []
    with report.progress("price") as bar:
        one = effort(recipes, protocol)
        task = bar.add_task(f"cases: {len(works)}, recipes: {len(recipes)}", total=one * len(works), seconds=one * len(works))
        for i, case in enumerate(works):
            bar.update(task, completed=i * one, description=case.name)
            measured.append(measure(case, recipes, gates.bad, protocol, device, bar.ticks(task, f"{case.name}, ")))
            report.append(arguments.json, (report.json_line("price", price.record(), about) for price in measured[-1]))
    for prices in measured:
        report.console().print(table(prices))
    for summary in summaries([price.record() for prices in measured for price in prices]):
        report.say(sentence(summary))
        report.append(arguments.json, [report.json_line(SUMMARY, summary, about)])
    return 0
