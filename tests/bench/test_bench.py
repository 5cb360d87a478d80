"""The benchmark: what it counts, what its gates stop, what it prints and writes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import GPU

from bench import __main__ as command
from bench import adapters, cases, compare, ladder, launched, peers, plot, profile, readme, sanitize, timing
from bench.errors import Bad, Errors
from bench.gates import Gates, all_green, judge
from fp8attn import Recipe, eager
from fp8attn.cuda import configs, early, portable
from fp8attn.cuda import quantize as cuda_quantize
from fp8attn.cuda import run as cuda_run
from fp8attn.device import ARCHITECTURES
from fp8attn.triton import run

ROOT = Path(__file__).resolve().parents[2]
QUICK = ROOT / "tests" / "kit" / "quick.py"


def test_gates_are_at_least_as_strict_as_promised() -> None:
    limits = Gates.load().limits
    assert limits["max_abs"] <= 0.06 and limits["mean_abs"] <= 0.02 and limits["bad_share"] <= 0.01


def test_suites() -> None:
    seeds = {case.name: case for case in cases.SUITES["seeds"]}
    mission = seeds["mission"]
    assert (mission.batch, mission.q_heads, mission.q_length, mission.head_dim) == (2, 8, 512, 64)
    assert (seeds["mission-256"].batch, seeds["mission-256"].q_heads, seeds["mission-256"].q_length) == (2, 8, 256)
    for case in cases.PREFILL:
        assert case.batch * case.q_length == 16384 and case.q_heads * case.head_dim == 2048
    names = [case.name for suite in cases.SUITES.values() for case in suite]
    assert len(names) == len(set(names))
    assert max(case.kv_length for case in cases.LONG) == 524288
    lengths = [case.kv_length for case in cases.DIFFUSION]
    assert min(lengths) <= 17_776 and max(lengths) >= 118_000 and not any(case.causal for case in cases.DIFFUSION)
    assert all(case.q_length <= 128 < case.kv_length for case in cases.DECODE_LIKE)


def test_workloads_are_listed_once_and_accuracy_brings_its_distributions() -> None:
    found = cases.workloads(["tiny", "accuracy", "tiny"], "outliers", gpu=False)
    assert found == [*((case, "outliers") for case in cases.TINY), *cases.ACCURACY_ON_CPU]


def test_flops() -> None:
    full = cases.Case("x", 2, 8, 2, 128, 256, 192, 128, causal=False)
    assert full.flops == 2 * 2 * 8 * 128 * 256 * (192 + 128)
    assert cases.square("y", 1, 1, 128, 64, causal=True).flops == cases.square("z", 1, 1, 128, 64).flops // 2 == 128 * 128 * 64 * 2
    assert timing.tflops(2_000_000_000, 1000.0) == 2.0


def test_errors_by_hand() -> None:
    expected = torch.tensor([3.0, -4.0, 0.0, 0.0])
    errors = Errors.of(torch.tensor([3.0, -4.0, 0.5, 0.0]), expected, Bad(rtol=0.1, atol_rms=0.1))
    assert errors.max_abs == 0.5 and errors.mean_abs == 0.125 and errors.relative_l2 == pytest.approx(0.1)
    assert errors.bad_share == 0.25  # 0.5 > 0.1 * rms = 0.25
    assert errors.sqnr_db == pytest.approx(20.0)
    assert Errors.of(torch.tensor([3.0, -4.0, math.nan, 0.0]), expected, Bad(0.1, 0.1)).bad_share == 0.25
    assert not Errors.of(torch.tensor([3.0, -4.0, math.nan, 0.0]), expected, Bad(0.1, 0.1)).finite


def test_percentiles() -> None:
    found = timing.Timing.of([[1.0, 2.0, 3.0], [4.0, 5.0]], 1, "by hand")
    assert found.p50_us == 3.0 and found.p90_us == pytest.approx(4.6) and found.p99_us == pytest.approx(4.96) and found.samples == 5
    assert found.mean_us == 3.0 and found.std_us == pytest.approx(math.sqrt(2)) and found.round_us == (2.0, 4.5)


def test_every_pytorch_backend_is_named() -> None:
    assert [peer.name for peer in peers.PYTORCH] == ["SDPA flash", "SDPA cuDNN", "SDPA efficient", "SDPA math"]
    assert {stage for peer in peers.OWN for stage in peer.stages} == {peers.KERNEL, peers.END_TO_END}


@pytest.mark.parametrize("broken", ("shifted", "scaled", "NaN"))
@pytest.mark.one_in(3)
def test_a_red_gate_reports_no_speed(broken: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    case = cases.square("small", 1, 2, 128, 64)
    assert all_green(judge(case, Gates.load(), device))

    def wrong(original, *args, **kwargs):
        out, *rest = original(*args, **kwargs)
        return {"shifted": out + 0.1, "scaled": out * 0.8, "NaN": out.masked_fill(out > 0.3, math.nan)}[broken], *rest

    for module, name in ((run, "forward"), (cuda_run, "forward"), (cuda_run, "forward_from_fp16"), (early, "quantize_and_attend")):
        monkeypatch.setattr(module, name, functools.partial(wrong, getattr(module, name)))
    monkeypatch.setattr(eager, "repeat", lambda *args: None)  # what the binding remembers goes by none of them
    assert not any(verdict.green for verdict in judge(case, Gates.load(), device))
    monkeypatch.setattr(cases, "suite", lambda name, gpu: (case,))
    monkeypatch.setattr(command, "compile_all", lambda cases, peers, bar: iter(()))
    assert command.main(["run", "--suite", "tiny"]) == 1
    printed = capsys.readouterr().out
    assert "no speed is reported" in printed and "TFLOP/s" not in printed


def test_no_gate_is_not_green() -> None:
    assert not all_green([])


@pytest.mark.skipif(GPU, reason="a GPU's default suites take minutes")
@pytest.mark.parametrize("case", ("causal GQA", pytest.param("tiny", marks=pytest.mark.thorough)))
def test_the_command_without_a_gpu(tmp_path: Path, case: str) -> None:
    """Prints both tables, says that the interpreter ran, writes a line for every case and backend."""
    out = tmp_path / "lines.jsonl"
    done = subprocess.run(
        [sys.executable, str(QUICK), "bench", "--suite", "tiny", "--case", case, "--rounds", "1", "--json", str(out)],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for expected in ("Gates", "Kernel alone", "End to end", "interpreter", "SDPA flash", "SDPA math", "fp8attn triton end to end"):
        assert expected in done.stdout, expected
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    count = sum(case in one.name for one in cases.TINY)
    assert len(lines) == count * len(adapters.present(adapters.PEERS)[0])
    assert done.stderr.startswith("not here: fp8attn cuda, ")
    assert "not here: FA3 bf16, FA3 e4m3: they need an NVIDIA GPU" in done.stderr
    assert f"run: no NVIDIA GPU: Triton's interpreter, {count} small cases" in done.stderr and "\nrun: gates\n" in done.stderr
    for line in lines:
        assert {"case", "backend", "p50_us", "p90_us", "p99_us", "tflops", "against_sdpa", "max_abs", "commit", "torch", "date"} <= line.keys()
        assert (line["refused"] is None) == (line["p50_us"] is not None)


def test_committed_results_are_whole() -> None:
    """Every line that the repository shows as measured names its GPU, versions and commit; errors of the oracle have no
    GPU, and no time."""
    of_the_oracle = "cache_accuracy.jsonl", "cache_needle.jsonl"
    for path in (ROOT / "bench" / "results").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            assert record["torch"] and record["triton"] and record["commit"] and record["date"], path.name
            assert "p50_us" not in record if path.name in of_the_oracle else record["gpu"], path.name


def test_the_readmes_tables_are_the_results() -> None:
    """No number in them was typed: filling them again changes nothing."""
    for path, tables in readme.DOCUMENTS.items():
        assert readme.rendered(path.read_text(), tables) == path.read_text()
    text = readme.SPEED_PAGE.read_text()
    changed = text.replace("| D128 full 16k | 1", "| D128 full 16k | 2")
    assert changed != text and readme.rendered(changed) == text
    assert (
        readme.rendered("<!-- table: a -->\n<!-- end -->\nb\n<!-- end -->", {"a": lambda: "c"})
        == "<!-- table: a -->\n\nc\n\n<!-- end -->\nb\n<!-- end -->"
    )
    with pytest.raises(ValueError, match="0 places for the table 'speed'"):
        readme.rendered(text.replace("<!-- table: speed -->", ""))
    with pytest.raises(ValueError, match="2 places for the table 'a'"):
        readme.rendered("<!-- table: a -->\n<!-- end -->\n" * 2, {"a": lambda: "c"})
    with pytest.raises(ValueError, match="a place for the table 'no such'; there are int8_price, speed, "):
        readme.rendered("<!-- table: no such -->\n<!-- end -->", {})
    also = readme.rendered("<!-- table: ladder -->\n<!-- end -->\n", {})
    assert readme.ladder() in also and readme.rendered(also, {}) == also, "a document may have tables that it needn't have"


def results(path: Path, medians: dict[str, float], p90: float = 1.01) -> Path:
    """A results file with these cases, each a backend's."""
    lines = [
        {"benchmark": "run", "case": case, "backend": "fp8attn cuda", "distribution": "normal", "p50_us": us, "p90_us": us * p90}
        for case, us in medians.items()
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def test_comparing_a_run_with_itself_says_no_change() -> None:
    found = compare.compare(plot.SOURCE, plot.SOURCE)
    assert len(found.changes) > 100 and {change.verdict for change in found.changes} == {"no change"} and found.mean_ratio == 1


def test_changes_beyond_noise_and_rows_that_only_one_run_has(tmp_path: Path) -> None:
    before = results(tmp_path / "a.jsonl", {"faster": 100.0, "slower": 100.0, "same": 100.0, "gone": 1.0})
    after = results(tmp_path / "b.jsonl", {"faster": 50.0, "slower": 200.0, "same": 101.0, "new": 1.0})
    found = compare.compare(before, after)
    assert {change.case: change.verdict for change in found.changes} == {"faster": "faster", "slower": "slower", "same": "no change"}
    assert found.mean_ratio == pytest.approx((2 * 0.5 / 1.01) ** (1 / 3))
    assert [key[0] for key in found.only_before] == ["gone"] and [key[0] for key in found.only_after] == ["new"]
    noisy = compare.compare(before, results(tmp_path / "c.jsonl", {"faster": 80.0}, p90=1.3))
    assert noisy.changes[0].verdict == "no change"
    assert "| slower | fp8attn cuda | 100.0 | 200.0 | 0.500 | ±5.0 % | slower |" in compare.markdown(found)


def test_rows_that_took_turns_are_compared_round_by_round() -> None:
    """A clock that falls by a third in the middle of the run is no noise: it falls for both. Nor is one odd round."""
    old, new = {"p50_us": 120.0, "round_us": [100.0, 100.0, 100.0, 150.0, 150.0]}, {"p50_us": 100.0, "round_us": [80.0, 81.0, 99.0, 120.0, 119.0]}
    found = compare.paired(("case", "backend", "normal"), old, new)
    assert found.ratio == 1.25 and 0.02 <= found.noise < 0.03 and found.verdict == "faster"
    assert compare.change(("case", "backend", "normal"), old, new).verdict == "no change"
    noisy = compare.paired(("case", "backend", "normal"), old, new | {"round_us": [80.0, 130.0, 60.0, 120.0, 170.0]})
    assert noisy.ratio == 1.25 and noisy.noise > 0.3 and noisy.verdict == "no change"


def test_uncertainty_is_three_standard_errors_of_a_median() -> None:
    """Of medians of five numbers from N(1, 0.01), 99 % and more lie within it on average; a single odd one hardly counts."""
    draws = torch.randn(2000, 5, generator=torch.Generator().manual_seed(0)).mul(0.01).add(1).tolist()
    typical = sum(map(compare.uncertainty, draws)) / len(draws)
    inside = sum(abs(sorted(draw)[2] - 1) <= typical for draw in draws) / len(draws)
    assert inside > 0.97 and typical == pytest.approx(3 * 1.25 * 0.01 / math.sqrt(5), rel=0.35)
    assert compare.uncertainty([1.0, 1.0, 1.0, 1.0, 9.0]) == 0.0


in_git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode == 0


@pytest.mark.anywhere
@pytest.mark.thorough
@pytest.mark.skipif(not in_git, reason="compares commits: needs the repository's history")
def test_comparing_a_commit_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Two processes take turns; which fp8attn each imports is checked there."""
    words = ["compare", "HEAD", "HEAD", "--commits", "--case", "tiny full", "--suite", "tiny", "--backend", "fp8attn triton", "--rounds", "2"]
    assert command.main([*words, "--milliseconds", "5", "--to", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "2 rows" in printed and "geometric mean" in printed
    lines = [json.loads(line) for name in ("before", "after") for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    assert len(lines) == 4 and len({line["commit"] for line in lines}) == 1 and all(len(line["round_us"]) == 2 for line in lines)
    assert command.main(["compare", "nowhere", "HEAD", "--commits"]) == 2
    assert "'nowhere' is no commit" in capsys.readouterr().err


def test_the_compare_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    before, after = results(tmp_path / "a.jsonl", {"x": 120.0, "y": 120.0}), results(tmp_path / "b.jsonl", {"x": 100.0, "y": 110.0})
    words = ["compare", str(before), str(after)]
    assert command.main(words) == 0
    assert command.main([*words, "--require", "1.05"]) == 0
    assert command.main([*words, "--require", "1.15"]) == 1
    assert "short of × 1.15: y, fp8attn cuda: × 1.091" in capsys.readouterr().out
    assert command.main([*words, "--require", "1.0", "--backend", "nobody"]) == 2
    assert "no backend has 'nobody' in its name (--backend); there are fp8attn cuda" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text('{"case": "x"}\n')
    assert command.main(["compare", str(before), str(tmp_path / "bad.jsonl")]) == 2
    assert "line 1, isn't a result" in capsys.readouterr().err
    before.write_text(before.read_text() * 2)
    with pytest.raises(ValueError, match="stands there twice"):
        compare.compare(before, after)


def test_the_picture_is_of_the_committed_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    plot.draw(tmp_path / "speed.svg")
    drawn, committed = (tmp_path / "speed.svg").read_text(), plot.PICTURE.read_text()
    for text in ("fp8attn cuda", "SDPA cuDNN", "head dim 128, causal", "TFLOP/s"):
        assert text in drawn
    commit = json.loads(plot.SOURCE.read_text().splitlines()[0])["commit"][:7]
    assert f"commit {commit}" in drawn and f"commit {commit}" in committed
    lengths, speeds = plot.series([json.loads(line) for line in plot.SOURCE.read_text().splitlines()], "fp8attn cuda", 128, False)
    assert lengths == [1024, 2048, 4096, 16384] and all(speed > 100 for speed in speeds)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="no row of 16k tokens"):
        plot.draw(tmp_path / "x.png", tmp_path / "empty.jsonl")


@pytest.mark.anywhere
def test_the_report_of_the_committed_results(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Every kind of picture, in both formats; the tables' numbers are the file's."""
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    assert command.main(["report", str(plot.SOURCE), "--to", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"report.md", *(f"{kind}.{suffix}" for kind in plot.KINDS for suffix in ("svg", "png"))}
    text = (tmp_path / "report.md").read_text()
    records = [json.loads(line) for line in plot.SOURCE.read_text().splitlines()]
    record = next(r for r in records if (r["case"], r["backend"]) == ("D128 full 16k", "fp8attn cuda"))
    refused = next(r for r in records if r["refused"])
    assert f"| {record['p50_us']:.1f} ({record['tflops']:.0f}) |" in text and "![roofline](roofline.svg)" in text
    assert "**Not timed**" in text and f"{refused['backend']}: {refused['refused']}" in text
    roofline = (tmp_path / "roofline.svg").read_text()
    assert "e4m3 tensor cores, 1630 TFLOP/s sustained" in roofline and "exact exponentials, D 64: 815" in roofline
    assert (tmp_path / "error.png").read_bytes()[:4] == b"\x89PNG"
    (tmp_path / "bad.jsonl").write_text('{"case": "x"}\n')
    assert command.main(["report", str(tmp_path / "bad.jsonl"), "--to", str(tmp_path)]) == 2
    assert "isn't a results file" in capsys.readouterr().err


def test_every_kernel_that_can_be_timed_can_be_drawn() -> None:
    """Each in a style of its own."""
    kernels = [peer.name for peer in adapters.PEERS if peers.KERNEL in peer.stages]
    assert set(kernels) - set(plot.STYLES) == {"SDPA efficient", "SDPA math"}
    assert len({plot.STYLES[name] for name in kernels if name in plot.STYLES}) == len(kernels) - 2


def test_the_ladder_without_a_gpu_says_so(device: torch.device, capsys: pytest.CaptureFixture) -> None:
    if device.type == "cuda":
        pytest.skip("there is a GPU")
    assert command.main(["ladder"]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


def test_rungs_are_compared_with_the_one_before_and_the_first(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    case = ladder.CASES[0]
    names = ("0 scalar", "1 wmma-qk", "2 cp.async")
    results = [ladder.Result(case, name, ladder.rungs(64)[name]) for name in names] + [ladder.Result(case, "SDPA flash", None)]
    times = {"0 scalar": 100.0, "2 cp.async": 25.0, "SDPA flash": 50.0}  # one was refused
    found = ladder._compared(results, {name: timing.Timing.of([[us]], 1, "by hand") for name, us in times.items()})
    assert [r.against_previous for r in found] == [None, None, 4.0, None]
    assert [r.against_first for r in found] == [None, None, 4.0, 2.0]
    assert ladder.table(found).row_count == 4
    records = [r.record() | {"gpu": "a GPU", "commit": "0123456789"} for r in found]
    ladder.draw(records, tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no rung was timed"):
        ladder.draw(records[1:2], tmp_path / "none.png")


def test_conflicts_are_those_of_the_rungs_kernel() -> None:
    rungs = ladder.rungs(64)
    names = ("5 three stages", "6 swizzle")
    [example, *_] = profile.parse((Path(__file__).with_name("ncu_h100.csv")).read_text())
    counted = [
        dataclasses.replace(example, kernel=f"void portable_forward<fp8attn::{rungs[name].name}>(fp8attn::Params)", conflicts=percent)
        for name, percent in zip(reversed(names), (0.0, 12.5), strict=True)
    ]
    results = [ladder.Result(ladder.CASES[0], name, rungs[name]) for name in names] + [ladder.Result(ladder.CASES[0], "SDPA flash", None)]
    assert [r.conflicts for r in ladder.with_conflicts(results, counted)] == [12.5, 0.0, None]


def test_a_graph_without_the_kernel_is_noticed() -> None:
    answer = torch.zeros(2, 4, 8, dtype=torch.bfloat16).transpose(0, 1)
    assert timing.writes(lambda: answer.fill_(1), answer)
    assert not timing.writes(lambda: None, answer)


@pytest.mark.gpu
def test_what_does_not_run_on_its_stream_is_not_timed_as_a_graph(device: torch.device) -> None:
    x = torch.ones(4, device=device)

    def elsewhere(i: int) -> torch.Tensor:
        return x  # and nothing that a graph could hold

    with pytest.raises(RuntimeError, match="doesn't write the answer"):
        timing.captured(elsewhere, 1)


@pytest.mark.parametrize(
    "code, output, findings",
    (
        (0, "full: 3 instances\n========= ERROR SUMMARY: 0 errors", 0),
        (9, "========= Invalid __shared__ read\n========= ERROR SUMMARY: 1 error", 1),
        (9, "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)", 2),
        (1, "Traceback\nBuildError: no\n========= ERROR SUMMARY: 0 errors", None),
        (0, "", None),
    ),
)
def test_a_sanitizer_that_did_not_finish_is_not_clean(code: int, output: str, findings: int | None) -> None:
    assert sanitize.judged(code, output)[0] == findings


def test_findings_are_counted_by_kernel() -> None:
    finding = """========= Uninitialized __global__ memory read of size 4 bytes
=========     at void scale<float>(float *)+0x{0}40 in scale.cu:7
=========     by thread ({0},0,0) in block (0,0,0)
=========     Access at 0x7f00000{0} is 4 bytes
"""
    race = """========= Error: Race reported between Write access at quantize(char *)+0x90
=========     and Read access at quantize(char *)+0xd0 [16 hazards]
"""
    counted = sanitize.kinds("full: 3 instances\n" + finding.format(1) + finding.format(2) + race + "========= ERROR SUMMARY: 3 errors\n")
    assert sorted(counted.values()) == [1, 2]
    assert counted["Uninitialized __global__ memory read of size 4 bytes at void scale<float>(float *) in scale.cu:7"] == 2


@pytest.mark.parametrize("shape", launched.SHAPES)
def test_sanitizers_see_every_kind_of_instance(shape: str) -> None:
    found = launched.instances(launched.quantized(*launched.problem(shape, torch.device("cpu"))), ARCHITECTURES[90])
    assert {type(c) for c in found} >= {configs.HopperConfig, portable.PortableConfig}


@pytest.mark.parametrize("shape", [shape for shape, (*_, options) in launched.SHAPES.items() if "attn_mask" in options])
def test_sanitizers_see_masks_of_calls_that_are_quantized_on_the_way(shape: str) -> None:
    """Queries where they are attended with, keys and values by CUDA's quantizer."""
    (q, k, v), options = launched.problem(shape, torch.device("cpu"))
    assert configs.unsupported_q_quant(q, v.shape[3], 1.0, "e4m3", ARCHITECTURES[90], options["attn_mask"]) is None
    assert cuda_quantize.unsupported_call(k, v, Recipe(), ARCHITECTURES[90]) is None


def test_sanitize_without_a_gpu_says_so(device: torch.device, capsys: pytest.CaptureFixture) -> None:
    if device.type == "cuda":
        pytest.skip("there is a GPU")
    assert command.main(["sanitize"]) == 2
    assert "sanitize: needs an NVIDIA GPU" in capsys.readouterr().err


def test_a_card_settles_by_whole_rounds_that_nobody_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, taken = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: seconds[0])

    def turns(name: str) -> timing.Turns:
        def take(busy: object) -> list[float]:
            assert busy is None, "sensors are read in turns that count"
            seconds[0] += 0.002
            taken.append(name)
            return [1.0]

        return timing.Turns(take, 1, "fake")

    both = [turns("a"), turns("b")]
    timing.settled(both, 0.0)
    assert taken == []
    timing.settled(both, 9.0)  # rounds take 4 ms
    assert taken == ["a", "b"] * 3
    timing.settled([], 1.0)


@pytest.mark.parametrize("count", range(16))
def test_turns(count: int) -> None:
    """Everyone has one a round; of three or more nobody two in a row; of two the rounds go back and forth."""
    names = [str(i) for i in range(count)]
    rounds = [timing.in_turn(names, i) for i in range(10)]
    assert all(sorted(one) == sorted(names) for one in rounds)
    turns = [name for one in rounds for name in one]
    if count > 2:
        assert all(a != b for a, b in itertools.pairwise(turns))
        neighbours = set(itertools.pairwise(turns))
        assert all(len({a for a, b in neighbours if b == name}) >= min(count - 1, 3) for name in names), "someone comes after the same few"
    elif count == 2:
        assert turns[:8] == ["0", "1", "1", "0", "0", "1", "1", "0"]
