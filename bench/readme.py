"""The documents' tables, from the committed results: rendered between markers, so that no number in them was typed."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from . import instances as compiled
from .cases import square
from .command_line import UsageError, checkout
from .distributed import Result, link_of, simulated_us
from .machine import ROOT
from .report import number_of
from .summary import SUMMARY, SUMMED, summaries

README = ROOT / "README.md"
DOCS = ROOT / "docs"
SPEED_PAGE = DOCS / "benchmark-tables.md"
ACCURACY_PAGE = DOCS / "accuracy-tables.md"
INSTANCES_PAGE = DOCS / "instances.md"
RESULTS = ROOT / "bench" / "results"

Record = dict[str, Any]


def _lines(name: str) -> list[Record]:
    """
    Raises:
        UsageError: the results file isn't there, or isn't one.
    """
    path = RESULTS / f"{name}.jsonl"
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UsageError(f"{path.name} can't be read: {error}") from error


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """A Markdown table whose first `words` columns hold words, the others numbers."""
    ruler = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ruler, *rows))


def _machine(records: Sequence[Record]) -> str:
    """On what all of them were measured: one line."""
    first = records[0]
    if any(record[key] != first[key] for record in records for key in ("commit", "gpu")):
        raise UsageError("these are results of more than one commit or GPU, which have no table together")
    if first["gpu"] is None:
        return f"The pipeline's oracle on a CPU, torch {first['torch']}, {first['date'][:10]}, commit {first['commit'][:7]}"
    cudnn = f"{first['cudnn'] // 10000}.{first['cudnn'] // 100 % 100}"
    driver = "" if first["driver"] is None else f", driver {first['driver']}"  # nvidia-smi may be hidden
    return (
        f"{first['gpu']}{driver}, torch {first['torch']}, cuDNN {cudnn}, Triton {first['triton']}, {first['date'][:10]}, commit {first['commit'][:7]}"
    )


def _machines(records: Sequence[Record], what: Callable[[Record], str]) -> str:
    """On what they were measured, where some are of later commits; of those, `what` they are of."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(record["commit"], []).append(record)
    if any(record["gpu"] != records[0]["gpu"] for record in records):
        raise UsageError("these are results of more than one GPU, which have no table together")
    first, *later = sorted(runs.values(), key=lambda run: min(record["date"] for record in run))
    return "; ".join([_machine(first), *(f"{', '.join(dict.fromkeys(map(what, run)))}: commit {run[0]['commit'][:7]}" for run in later)])


def _by_case(records: Sequence[Record], *keys: str) -> dict[tuple, dict[str, Record]]:
    """Records by case, and of each by backend, in the order of the file."""
    found: dict[tuple, dict[str, Record]] = {}
    for record in records:
        found.setdefault(tuple(record[key] for key in keys), {})[record["backend"]] = record
    return found


SMALL = {"small", "mission", "mission-256", "long", "B2 H8 S512 D64 causal", "B1 H8 S512 D64 full"}
"""Cases that are only in the results file, not in the tables."""


def speed() -> str:
    """Kernels alone beside cuDNN, and the whole path from bf16."""
    records = _lines("side_by_side")
    rows = []
    for (case,), by in _by_case(records, "case").items():
        if case in SMALL:
            continue
        kernel, triton, whole, cudnn = (by[name] for name in ("fp8attn cuda", "fp8attn triton", "fp8attn cuda end to end", "SDPA cuDNN"))
        flops = [f"{record['tflops']:.0f}" for record in (kernel, triton, cudnn)]
        ratio = kernel["tflops"] / cudnn["tflops"], cudnn["p50_us"] / whole["p50_us"]
        rows.append([case, *flops, f"{ratio[0]:.2f}", f"{whole['p50_us']:.0f}", f"{ratio[1]:.2f}", f"{kernel['relative_l2']:.4f}"])
    head = ("case", "CUDA, TFLOP/s", "Triton, TFLOP/s", "cuDNN bf16, TFLOP/s", "CUDA × cuDNN", "end to end, µs", "× cuDNN", "relative L2")
    return f"{_machine(records)}:\n\n{markdown_table(head, rows, 1)}"


def beside() -> str:
    """Kernels alone beside other FP8 kernels, speed and error on the same inputs."""
    records = _lines("side_by_side")
    ours = {"fp8attn cuda": "CUDA", "fp8attn triton": "Triton"}
    theirs = {"cuDNN e4m3": "cuDNN e4m3", "FA3 e4m3": "FA3", "FA3 e4m3 two-level": "FA3 two-level", "Sage2": "Sage2"}
    names = ours | {name: column for name, column in theirs.items() if any(record["backend"] == name for record in records)}
    rows = []
    for (case,), by in _by_case(records, "case").items():
        if case in SMALL or not any(name in by for name in theirs):
            continue
        others = max(record["tflops"] or 0.0 for name, record in by.items() if not name.startswith("fp8attn"))
        flops, wrong = ([number_of(by.get(name, {}).get(key), form) for name in names] for key, form in (("tflops", ".0f"), ("relative_l2", ".4f")))
        rows.append([case, *flops, f"{by['fp8attn cuda']['tflops'] / others:.2f}", *wrong])
    first, *kernels = names.values()
    head = ("case", f"{first}, TFLOP/s", *kernels, f"{first} × fastest other", f"{first}, relative L2", *kernels)
    return f"{_machine(records)}:\n\n{markdown_table(head, rows, 1)}"


COLUMNS = {
    "fp8attn cuda end to end": "CUDA",
    "fp8attn cuda rotated end to end": "rotated",
    "fp8attn cuda int8 end to end": "`PRECISE`",
    "fp8attn cuda int8 rotated end to end": "`PRECISE` rotated",
    "fp8attn triton end to end": "Triton",
    "cuDNN e4m3": "cuDNN e4m3",
    "FA3 e4m3": "FA3",
    "FA3 e4m3 two-level": "FA3 two-level",
    "Sage2 end to end": "Sage2",
    "SDPA cuDNN": "SDPA cuDNN bf16",
}
"""Rows of `accuracy` that are columns of means over draws, if they were measured."""


def accuracy() -> str:
    """Relative L2 of everything that was asked and gave an answer."""
    records = _lines("accuracy")
    return _by_input(records, {r["backend"]: r["backend"].removeprefix("fp8attn ") for r in records if r["relative_l2"] is not None})


def draws() -> str:
    """Means over many draws of the inputs, ± their standard errors; some columns may be of a later run."""
    records = _lines("draws")
    columns = {name: COLUMNS[name] for name in COLUMNS if any(r["backend"] == name for r in records)}
    rows = []
    for key, by in _by_case(records, "distribution", "case", "seeds").items():
        found = [by.get(name, {}) for name in columns]
        cells = ("–" if x.get("relative_l2") is None else f"{x['relative_l2']:.4f} ± {x['standard_error']:.4f}" for x in found)
        rows.append([*map(str, key), *cells])
    head = ("inputs", "keys", "draws", *columns.values())
    return f"{_machines(records, lambda record: COLUMNS[record['backend']])}:\n\n{markdown_table(head, rows, 2)}"


def recent() -> str:
    """The same where queries look back a little way."""
    records = [r for r in _lines("recent") if r["causal"] or r["head_dim"] == 128]
    names = dict.fromkeys(r["backend"] for r in records if r["relative_l2"] is not None and not r["backend"].endswith("modelled"))
    return _by_input(records, {name: name.removeprefix("fp8attn ") for name in names})


def _by_input(records: Sequence[Record], columns: dict[str, str]) -> str:
    rows = []
    for key, by in _by_case(records, "distribution", "case").items():
        found = (by.get(name, {}).get("relative_l2") for name in columns)
        rows.append([*key, *("–" if x is None else f"{x:.4f}" for x in found)])
    return f"{_machine(records)}:\n\n{markdown_table(('inputs', 'keys', *columns.values()), rows, 2)}"


CACHED = {
    "SDPA flash": "bf16",
    "fp8attn modelled, direct codes": "`sdpa`, default recipe",
    "fp8attn KV cache": "`KVCache`",
    "fp8attn KV cache int8": "`KVCache`, `PRECISE`",
}
"""Rows of `accuracy` that are columns of a cache's errors."""


def cache_accuracy() -> str:
    """Relative L2 of attention to a KV cache: prefill of causal cases, decoding of others."""
    return _by_input(_lines("cache_accuracy"), CACHED)


def needle(name: str = "needle") -> str:
    """Needles found, by their share and the row, over length."""
    records = _lines(name)
    lengths = list(dict.fromkeys(record["keys"] for record in records))
    found = {(r["share"], r["backend"], r["keys"]): r["found"] for r in records}
    rows = []
    for share, name in dict.fromkeys((share, name) for share, name, _ in found):
        by_length = (found.get((share, name, keys)) for keys in lengths)
        rows.append([f"1/{1 / share:.0f}", name, *("–" if x is None else f"{x:.1%}" for x in by_length)])
    return (
        f"{_machine(records)}; {records[0]['trials']} needles:\n\n{markdown_table(('share', '', *(f'{keys // 1024}k' for keys in lengths)), rows, 2)}"
    )


def model() -> str:
    """Perplexities."""
    records = _lines("model")
    one = records[0]
    rows = []
    for r in records:
        if r["perplexity"] is not None:
            rows.append([r["backend"], f"{r['perplexity']:.5f}", f"{r['gap']:+.4%}", f"{r['gap_error']:.4%}", f"{r['agreement']:.3%}"])
    about = (
        f"{one['parameters'] / 1e6:.1f} M parameters, {one['layers']} layers of {one['heads']} heads, D {one['head_dim']};"
        f" {one['windows']} held-out windows of {one['context']} bytes"
    )
    head = ("attention", "perplexity", "gap to bfloat16", "± standard error", "same likeliest byte")
    return f"{_machine(records)}; {about}:\n\n{markdown_table(head, rows, 1)}"


def _prices(results: str) -> list[Record]:
    """Lines of recipes and cases, without summaries."""
    return [record for record in _lines(results) if record.get("benchmark", "price") == "price"]


def price(results: str = "price") -> str:
    """What each recipe costs: of each case the kernel, quantizing and all of it from bfloat16."""
    records = _prices(results)
    forms = {f"{part}_{key}": form for part in ("kernel", "quantize", "whole") for key, form in (("us", ".0f"), ("against_default", ".2f"))}
    forms |= {"against_bfloat16": ".2f", "relative_l2": ".4f"}

    def cell(record: Record, key: str, form: str) -> str:
        error = record.get(key.replace("against_default", "standard_error")) if "against_default" in key else None
        return number_of(record[key], form) + ("" if error is None else f" ± {error:.2f}")

    rows = [[r["case"], r["recipe"], r["refused"] or r["plan"], *(cell(r, key, form) for key, form in forms.items())] for r in records]
    parts = ("kernel, µs", "× default", "quantizing, µs", "× default", "from bf16, µs", "× default")
    return f"{_machine(records)}:\n\n{markdown_table(('case', 'recipe', 'runs', *parts, '× as fast as bf16', 'relative L2'), rows, 3)}"


def span(numbers: Sequence[float], form: str = ".2f") -> str:
    """The least and the largest of some numbers."""
    least, most = (format(x, form) for x in (min(numbers), max(numbers)))
    return least if least == most else f"{least} to {most}"


def recipe_price(recipe: str, name: str, results: str) -> str:
    """What one recipe costs over the default, by one run: a sentence and a table.

    Args:
        name: what the sentence calls the recipe; results: of the file of the run.

    Raises:
        UsageError: the run hasn't measured the recipe, or what it says in short isn't what it measured.
    """
    records = _prices(results)
    summary = next((one for one in summaries(records) if one["recipe"] == recipe), None)
    if summary is None or not summary["kernel"] or not summary["whole"]:
        raise UsageError(f"{results}.jsonl doesn't have the price of {recipe!r}; python -m bench price --recipe {recipe} measures it")
    for line in _lines(results):
        if line.get("benchmark") == SUMMARY and line["recipe"] == recipe and any(line[key] != value for key, value in summary.items()):
            raise UsageError(f"{results}.jsonl: the summary of {recipe!r} isn't of the lines above it")
    dims = {record["case"]: record["head_dim"] for record in records}

    def by_dim(part: str) -> str:
        found: dict[str, list[str]] = {}
        for dim in dict.fromkeys(dims.values()):
            ratios = [mean for case, (mean, _) in summary[part].items() if dims[case] == dim]
            if ratios:
                found.setdefault(span(ratios), []).append(f"D {dim}")
        return ", ".join(f"{ratio} at {' and '.join(names)}" for ratio, names in found.items())

    noise = [mean for part in SUMMED for mean, _ in summary[f"{part}_noise"].values()]
    faster = summary["against_bfloat16"]
    text = (
        f"The time of {name} over the default's: the kernel alone {by_dim('kernel')}; from bfloat16, quantization included, {by_dim('whole')}."
        f" From bfloat16 it is {span(list(faster.values()))} times as fast as PyTorch's fastest backend in bfloat16."
        f" Each ratio is the mean over rounds in which the two take turns, ± its standard error; the default beside itself: {span(noise)}."
        f" {_machine(records)}:"
    )
    rows = []
    for case in dims:
        if case in summary["kernel"] or case in summary["whole"]:
            ratios = (summary[part].get(case) for part in SUMMED)
            rows.append([case, *("–" if x is None else f"{x[0]:.3f} ± {x[1]:.3f}" for x in ratios), number_of(faster.get(case), ".2f")])
    head = ("case", "kernel, × default", "from bf16, × default", "from bf16, × as fast as bf16")
    return f"{text}\n\n{markdown_table(head, rows, 1)}"


def ladder() -> str:
    """Rungs of the portable kernel, then peers, on the mission shape and on the larger case, whose kernels' resources these are."""
    records = _lines("ladder")
    mission, large = ([r for r in records if r["case"] == case] for case in dict.fromkeys(r["case"] for r in records))
    forms = {"p50_us": ".1f", "against_previous": ".2f", "against_first": ".1f"}
    rows = []
    for small, big in zip(mission, large, strict=True):
        assert small["rung"] == big["rung"]
        times = [number_of(r[key], form) for r in (small, big) for key, form in forms.items()]
        shared = None if big["config"] is None else big["shared_bytes"] / 1024
        built = number_of(big["registers"], "d"), number_of(shared, ".0f"), number_of(big["spills"], "d"), number_of(big["conflicts"], ".1f")
        rows.append([big["rung"], *times, number_of(big["tflops"], ".0f"), *built, number_of(big["relative_l2"], ".4f")])
    speedups = ("× rung before", "× rung 0")
    resources = ("registers", "shared, KiB", "spilled, bytes", "bank conflicts, %")
    head = ("rung", f"{mission[0]['case']}, µs", *speedups, f"{large[0]['case']}, µs", *speedups, "TFLOP/s", *resources, "relative L2")
    return f"{_machine(records)}:\n\n{markdown_table(head, rows, 1)}"


def masks() -> str:
    """Attention with every kind of mask, beside who else takes one; some kinds may be of a later run."""
    records = _lines("masks")
    names = ("fp8attn cuda", "fp8attn cuda end to end", "FlexAttention", "SDPA cuDNN", "SDPA efficient")
    rows = []
    for (case, mask), by in _by_case(records, "case", "mask").items():
        own = by["fp8attn cuda"]
        times = [number_of(by[name]["p50_us"], ".0f") for name in names]
        rows.append([case, mask, f"{own['blocks']:.0%}", times[0], number_of(own["against_without"], ".2f"), *times[1:], f"{own['relative_l2']:.4f}"])
    head = ("case", "mask", "blocks", "CUDA, µs", "× no mask", "end to end, µs", "FlexAttention, µs", "cuDNN, µs", "efficient, µs", "relative L2")
    return f"{_machines(records, lambda record: record['mask'])}:\n\n{markdown_table(head, rows, 2)}"


def decode() -> str:
    """Decoding from paged KV caches: microseconds, and the share of the memory's bandwidth."""
    records = _lines("decode")
    names = (
        "fp8attn cuda", "fp8attn triton", "fp8attn tensors e4m3", "fp8attn tensors e4m3 by token", "fp8attn tensors bf16", "FA3 e4m3 two-level",
        "FA3 bf16 of vLLM", "SDPA bf16", "fp8attn append",
    )  # fmt: skip
    rows = []
    for (case,), by in _by_case(records, "case").items():
        cells = []
        for name in names:
            found = by.get(name, {})
            share = found.get("share_of_peak")
            cells.append(number_of(found.get("p50_us"), ".1f") + ("" if share is None else f" ({share:.0%})"))
        rows.append([case, *cells, number_of(by.get(names[0], {}).get("relative_l2"), ".4f")])
    return f"{_machines(records, lambda record: record['backend'])}:\n\n{markdown_table(('case', *names, 'relative L2'), rows, 1)}"


def prefill() -> str:
    """Prefill of KV caches: microseconds, beside the dense kernel and FlashAttention-3's."""
    records = _lines("prefill")
    names = ("fp8attn dense, quantized", "fp8attn cuda, appended", "fp8attn cuda", "fp8attn triton", "FA3 e4m3 two-level", "FA3 bf16 of vLLM")
    rows = []
    for (case,), by in _by_case(records, "case").items():
        times = [by.get(name, {}).get("p50_us") for name in names]
        dense, paged = times[:2]
        over = None if dense is None or paged is None else paged / dense
        append = by.get("fp8attn append", {})
        share = "" if append.get("share_of_peak") is None else f" ({append['share_of_peak']:.0%})"
        cells = [number_of(us, ".0f") for us in times]
        rows.append([case, *cells[:2], number_of(over, ".2f"), number_of(append.get("p50_us"), ".0f") + share, *cells[2:]])
    head = ("case", "dense kernel", "kernel over pages", "×", "append", "both", *names[3:])
    return f"{_machines(records, lambda record: record['backend'])}:\n\n{markdown_table(head, rows, 1)}"


def prefill_tensors() -> str:
    """Prefill of the caches of other engines: microseconds, beside a `KVCache` and FlashAttention-3, and the error."""
    records = _lines("prefill_tensors")
    names = (
        "fp8attn tensors e4m3", "FA3 e4m3 two-level", "fp8attn tensors bf16 by a recipe", "FA3 bf16 of vLLM", "fp8attn tensors bf16",
        "fp8attn cuda, appended",
    )  # fmt: skip
    rows = []
    for (case,), by in _by_case(records, "case").items():
        times = [by.get(name, {}).get("p50_us") for name in names]
        ratios = [None if own is None or other is None else other / own for own, other in (times[:2], times[2:4])]
        us, over = ([number_of(x, digits) for x in of] for of, digits in ((times, ".0f"), (ratios, ".2f")))
        errors = [number_of(by.get(name, {}).get("relative_l2"), ".4f") for name in names[:3]]
        rows.append([case, *us[:2], over[0], *us[2:4], over[1], *us[4:], *errors])
    head = ("case", *names[:2], "×", *names[2:4], "×", names[4], "`KVCache`", "relative L2 of e4m3", "of FA3 e4m3", "by a recipe")
    return f"{_machines(records, lambda record: record['backend'])}:\n\n{markdown_table(head, rows, 1)}"


def models() -> str:
    """Whole models: milliseconds of a forward, and speed over PyTorch's fastest attention."""
    records = _lines("models")
    rows = []
    for case, launch in dict.fromkeys((record["case"], record["launch"]) for record in records):
        by = {record["row"]: record for record in records if (record["case"], record["launch"]) == (case, launch) and record["refused"] is None}
        fastest = min((record for record in by.values() if record["row"].startswith("SDPA")), key=lambda record: record["ms"])
        ours = [by["fp8attn"], by["fp8attn int8"]]
        times = [f"{record['ms']:.1f} ({record['against_sdpa']:.2f})" for record in ours]
        errors = [f"{record['relative_l2']:.4f}" for record in (fastest, *ours)]
        rows.append([case, launch, f"{fastest['ms']:.1f}", *times, f"{by['no attention']['ms']:.1f}", *errors])
    head = ("model", "", "SDPA, ms", "fp8attn, ms", "int8, ms", "no attention, ms", "SDPA, relative L2", "fp8attn", "int8")
    machines = _machines(records, lambda record: f"{record['case']}, {record['launch']}")
    return f"{machines}:\n\n{markdown_table(head, rows, 2)}"


def distributed() -> str:
    """Context parallelism: milliseconds, and speed over one GPU and over a bf16 ring."""
    records = _lines("distributed")
    rows = []
    for (case, ranks), by in _by_ranks(records).items():
        one, auto, ring, bf16 = by["fp8attn, one GPU"], by["fp8attn auto"], by["fp8attn ring"], by["bf16 ring"]
        names = ("fp8attn, one GPU", "fp8attn auto", "fp8attn ring", "fp8attn Ulysses", "fp8attn all-gather", "bf16 ring")
        times = [number_of(None if by[name]["us"] is None else by[name]["us"] / 1e3, ".1f") for name in names]
        ratios = [f"{x['us'] / y['us']:.2f}" for x, y in ((one, auto), (bf16, auto), (one, ring), (bf16, ring))]
        others = [f"{auto['idle_us'] / 1e3:.1f}", f"{ring['overlap']:.0%}", f"{auto['sent'] / bf16['sent']:.0%}"]
        rows.append([case, str(ranks), *times, *ratios, *others, f"{one['relative_l2']:.4f}", f"{auto['relative_l2']:.4f}"])
    head = (
        "case", "GPUs", "one GPU, ms", "auto, ms", "ring, ms", "Ulysses, ms", "all-gather, ms", "bf16 ring, ms", "auto × one GPU", "auto × bf16 ring",
        "ring × one GPU", "ring × bf16 ring", "auto behind a pause, ms", "overlap", "bytes of bf16's", "one GPU, relative L2", "auto, relative L2",
    )  # fmt: skip
    return f"{_machines(records, lambda record: record['case'])}:\n\n{markdown_table(head, rows, 1)}"


def scaling() -> str:
    """Context parallelism on two and four GPUs: milliseconds and efficiency of every mode, beside the model of a ring."""
    records = _lines("scaling")
    modes = ("ring", "Ulysses", "2-D", "all-gather")
    rows = []
    for (case, ranks), by in _by_ranks(records).items():
        one, ring = by["fp8attn, one GPU"], by["fp8attn ring"]
        cells = [case, str(ranks), number_of(one["us"] / 1e3, ".1f")]
        for mode in modes:
            us = by[f"fp8attn {mode}"]["us"]
            cells.append("–" if us is None else f"{us / 1e3:.1f} ({one['us'] / us / ranks:.0%})")
        cells.append(f"{_simulated_us(ring, one['us']) / 1e3:.1f}")
        sent = [by[f"fp8attn {mode}"]["sent"] for mode in modes[:3]]
        cells += [number_of(None if x is None else x / 1e6, ".0f") for x in sent]
        bf16 = by.get("bf16 ring", {}).get("us")
        cells += [f"{ring['overlap']:.0%}", number_of(None if bf16 is None else bf16 / 1e3, ".1f")]
        rows.append([*cells, f"{one['relative_l2']:.4f}", f"{ring['relative_l2']:.4f}"])
    head = (
        "case", "GPUs", "one GPU, ms", *(f"{mode}, ms" for mode in modes), "ring by the model, ms", *(f"{mode}, MB" for mode in modes[:3]), "overlap",
        "bf16 ring, ms", "one GPU, relative L2", "ring, relative L2",
    )  # fmt: skip
    return f"{_machine(records)}:\n\n{markdown_table(head, rows, 1)}"


def _simulated_us(ring: Record, one_us: float) -> float:
    """What `distributed.simulated_us` expects of a ring, with the link that its transfers reached."""
    case = square(ring["case"], ring["batch"], ring["q_heads"], ring["q_length"], ring["head_dim"], ring["causal"])
    link = link_of(Result(case, ring["backend"], ring["ranks"], transfer_us=ring["transfer_us"]))
    assert link is not None
    return simulated_us(case, ring["ranks"], one_us, link)


def _by_ranks(records: Sequence[Record]) -> dict[tuple[str, int], dict[str, Record]]:
    """Records by case and number of ranks, and of each by backend; those of one GPU with every number."""
    found: dict[tuple[str, int], dict[str, Record]] = {}
    for case in dict.fromkeys(record["case"] for record in records):
        mine = [record for record in records if record["case"] == case]
        alone = {record["backend"]: record for record in mine if record["ranks"] == 1}
        for ranks in sorted({record["ranks"] for record in mine} - {1}):
            found[case, ranks] = alone | {record["backend"]: record for record in mine if record["ranks"] == ranks}
    return found


def varlen() -> str:
    """Packed sequences: TFLOP/s of the kernel alone and from bf16, beside the dense kernel and FlashAttention-3."""
    records = _lines("varlen")
    names = (
        "fp8attn, kernel alone", "fp8attn, from bf16", "fp8attn auto, dense", "fp8attn triton, dense", "FA3 e4m3", "FA3 e4m3 two-level", "FA3 bf16",
        "FA3 bf16 of vLLM",
    )  # fmt: skip
    rows = []
    for (batch,), by in _by_case(records, "batch").items():
        rows.append([batch, *(number_of(by.get(name, {}).get("tflops"), ".0f") for name in names)])
    head = ("batch", "kernel alone", "from bf16", "dense kernel alone", "Triton's dense", *names[4:])
    return f"{_machine(records)}:\n\n{markdown_table(head, rows, 1)}"


def overhead() -> str:
    """Calls of real lengths: the CPU's time, and the time one after another and in a CUDA graph, beside F.sdpa."""
    records = _lines("overhead")
    names = ("cpu_us", "new_length_us", "second_us", "eager_us", "graph_us", "sdpa_cpu_us", "sdpa_eager_us")
    rows = []
    for one in records:
        over = None if one["sdpa_eager_us"] is None else one["sdpa_eager_us"] / one["eager_us"]
        forms = (".1f", ".0f", ".0f", ".1f" if one["eager_us"] < 100 else ".0f", ".1f" if one["graph_us"] < 100 else ".0f", ".1f", ".0f")
        rows.append([one["kind"], *(number_of(one.get(name), form) for name, form in zip(names, forms, strict=True)), number_of(over, ".2f")])
    head = ("call", "CPU, µs", "new length", "second", "eager", "graph", "F.sdpa, CPU", "F.sdpa, eager", "over F.sdpa")
    return f"{_machine(records)}:\n\n{markdown_table(head, rows, 1)}"


def first_calls() -> str:
    """What a process waits for, by kind of call."""
    start, *calls = _lines("first_calls")
    rows = [[one["kind"], f"{one['milliseconds']:.1f}", str(one["compiled"]), f"{one['again_ms']:.1f}"] for one in calls]
    table = markdown_table(("call", "first, ms", "compiled", "second, ms"), rows, 1)
    imported = f"`import torch` takes {start['torch_s']:.1f} s, then `import fp8attn` {start['import_s']:.2f} s"
    return f"{_machine(calls)}; {imported}:\n\n{table}"


def instances() -> str:
    """Compiled CUDA instances by the calls that choose them, with the size of their code in a wheel. A group has no size
    if a library of it hasn't."""
    sizes = json.loads((RESULTS / "instance_sizes.json").read_text())
    rows, counts, total = [], dict.fromkeys(compiled.ARCHS, 0), 0.0
    for group in compiled.rows():
        parts = [sizes["code_bytes"].get(name) for name in group.library_names(compiled.SIZED)]
        code = None if None in parts else sum(parts) / 1e6
        rows.append([group.kernel, group.calls, group.why, *(str(group.count(arch) or "–") for arch in counts), number_of(code, ".1f")])
        counts = {arch: count + group.count(arch) for arch, count in counts.items()}
        total += code or 0.0
    rows.append(["all", "", "", *map(str, counts.values()), f"{total:.1f}"])
    head = ("kernel", "calls that choose one", "why it is compiled apart", *(f"sm_{arch}" for arch in counts), f"sm_{compiled.SIZED} code, MB")
    return f"Sizes by nvcc, {', '.join(sizes['nvcc'])}:\n\n{markdown_table(head, rows, 3)}"


def instance_fields() -> str:
    """Fields of the attention kernels' configs, with the values that instances have."""
    rows = []
    for kind, reasons in compiled.FIELDS.items():
        for field in fields(kind):
            if field.name not in reasons:
                raise UsageError(f"{kind.__name__}.{field.name} has no reason; bench/instances.py must have one in FIELDS")
            values = (("no", "yes")[x] if isinstance(x, bool) else str(x) for x in compiled.values_of(kind, field.name))
            rows.append([kind.__name__, f"`{field.name}`", ", ".join(values), reasons[field.name]])
    return markdown_table(("config", "field", "values", "why it is compiled"), rows, 4)


def if_measured(name: str, table: Callable[[], str]) -> Callable[[], str]:
    """The table of a results file, or how to get one."""
    missing = f"Not measured on a GPU yet: `python -m bench {name} --json bench/results/{name}.jsonl && python -m bench readme`."
    return lambda: table() if (RESULTS / f"{name}.jsonl").exists() else missing


def recipes() -> str:
    """Three recipes at D 128: errors of 4k keys, and what a causal call from bfloat16 costs."""
    rows, used = [], []
    for name, backend, errors, recipe, prices in (
        ("`Recipe()`, the default", "fp8attn cuda end to end", "draws", "default", "price_int8"),
        ("`PRECISE`: Q and K in int8", "fp8attn cuda int8 end to end", "draws", "int8", "price_int8"),
        ("`Recipe(recent=128)`: last 128 keys in half precision", "fp8attn recent 128", "recent", "recent 128", "price"),
    ):
        found = {(r["distribution"], r["case"]): r for r in _lines(errors) if r["backend"] == backend}
        inputs = ("normal", "4k keys D128"), ("outliers", "4k keys D128"), ("recent", "4k keys D128 causal")
        measured = [found[key] for key in inputs if key in found]
        cells = [number_of(found[key]["relative_l2"] if key in found else None, ".4f") for key in inputs]
        by_case = {r["case"]: r for r in _prices(prices) if r["recipe"] == recipe}
        if not {"D128 causal 4k", "D128 causal 16k"} <= by_case.keys():
            raise UsageError(f"{prices}.jsonl doesn't have the price of {recipe!r}; python -m bench price --recipe {recipe!r} measures it")
        short, long = by_case["D128 causal 4k"], by_case["D128 causal 16k"]
        times = (short["whole_against_default"], long["whole_against_default"], long["against_bfloat16"])
        rows.append([name, *cells, *(number_of(x, ".2f") for x in times)])
        used += [*measured, short, long]
    commits = ", ".join(dict.fromkeys(r["commit"][:7] for r in used))
    if any(record["gpu"] != used[0]["gpu"] for record in used):
        raise UsageError("these are results of more than one GPU, which have no table together")
    head = ("recipe", "N(0, 1)", "outliers", "recent keys", "causal 4k, × default", "causal 16k, × default", "causal 16k, × as fast as bf16")
    return f"{used[0]['gpu']}, D 128, commits {commits}:\n\n{markdown_table(head, rows, 1)}"


int8_price = functools.partial(recipe_price, "int8", '`Recipe(qk="int8")`', "price_int8")

README_TABLES: dict[str, Callable[[], str]] = {"recipes": recipes}
TABLES: dict[str, Callable[[], str]] = {
    "int8_price": int8_price,
    "speed": speed,
    "beside": beside,
    "draws": draws,
    "masks": if_measured("masks", masks),
    "decode": if_measured("decode", decode),
    "prefill": if_measured("prefill", prefill),
    "prefill_tensors": if_measured("prefill_tensors", prefill_tensors),
    "models": models,
    "distributed": distributed,
    "scaling": scaling,
    "varlen": varlen,
    "overhead": overhead,
    "first_calls": first_calls,
    "ladder": ladder,
    "price": if_measured("price", price),
    "price_int8": functools.partial(price, "price_int8"),
}
ACCURACY_TABLES: dict[str, Callable[[], str]] = {
    "accuracy": accuracy,
    "needle": if_measured("needle", needle),
    "cache_accuracy": if_measured("cache_accuracy", cache_accuracy),
    "cache_needle": if_measured("cache_needle", functools.partial(needle, "cache_needle")),
    "model": if_measured("model", model),
    "recent": recent,
}
INSTANCE_TABLES: dict[str, Callable[[], str]] = {"instances": instances, "instance_fields": instance_fields}
DOCUMENTS: dict[Path, dict[str, Callable[[], str]]] = {
    README: README_TABLES,
    SPEED_PAGE: TABLES,
    ACCURACY_PAGE: ACCURACY_TABLES,
    INSTANCES_PAGE: INSTANCE_TABLES,
}
DOCUMENTS |= {path: {} for path in sorted(DOCS.glob("*.md")) if path not in DOCUMENTS}
"""Of each document the tables that it must have; it may have others. The journal (docs/journal) is never filled again."""

MARKER = re.compile(r"^<!-- table: (.*) -->$", re.MULTILINE)


def _filling(content: str) -> Callable[[re.Match[str]], str]:
    """What stands between a pair of markers, replaced."""
    return lambda match: f"{match[1]}\n{content}\n\n{match[2]}"


def rendered(text: str, tables: dict[str, Callable[[], str]] = TABLES) -> str:
    """A document with every `<!-- table: name -->` … `<!-- end -->` filled from the results.

    Args:
        tables: that it must have.

    Raises:
        UsageError: one of them has no place in it; a table has more than one; or there is no such table.
    """
    every = {**TABLES, **ACCURACY_TABLES, **README_TABLES, **INSTANCE_TABLES, **tables}
    for name in dict.fromkeys((*tables, *MARKER.findall(text))):
        if name not in every:
            raise UsageError(f"the document has a place for the table {name!r}; there are {', '.join(every)}")
        place = re.compile(rf"(<!-- table: {re.escape(name)} -->\n)(?:(?!<!--).)*(<!-- end -->)", re.DOTALL)  # no further than the next marker
        if len(place.findall(text)) != 1:
            count = len(place.findall(text))
            raise UsageError(f"the document has {count} places for the table {name!r}; it must have one, <!-- table: {name} --> … <!-- end -->")
        text = place.sub(_filling(every[name]()), text)
    return text


def write() -> None:
    """Fill all documents, or none.

    Raises:
        UsageError: there are no documents here, or one can't be filled.
    """
    checkout("readme")
    found = {}
    for path, tables in DOCUMENTS.items():
        try:
            found[path] = rendered(path.read_text(), tables)
        except UsageError as error:
            raise UsageError(f"{path.relative_to(ROOT)}: {error}") from error
    for path, text in found.items():
        path.write_text(text)
