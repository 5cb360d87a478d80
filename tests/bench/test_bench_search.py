"""The search: where it moves, what it keeps, what it writes. Times come from an injected function, except in one run of the interpreter."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from conftest import GPU

from bench import __main__ as command
from bench import candidates, cases, search, space
from bench.candidates import Measured
from bench.search import Journal, Outcome
from fp8attn.cuda import portable
from fp8attn.cuda.configs import SPEEDS
from fp8attn.cuda.configs import HopperConfig as CudaConfig
from fp8attn.cuda.portable import PortableConfig as CudaPortableConfig
from fp8attn.device import ARCHITECTURES
from fp8attn.prepare import call_of
from fp8attn.triton.configs import HopperConfig, PortableConfig
from fp8attn.triton.tune import from_json

H100 = ARCHITECTURES[90]
KEY = {"case": "x", "backend": "cuda", "gpu": "y", "sources": "z"}


def a_call(dim: int = 64):
    q = torch.zeros(1, 2, 40, dim)
    return call_of(q, q, q)


def speed(config: CudaConfig) -> float:
    """Microseconds with one smallest value, at 3 consumers, overlap, 5 stages, 136 registers."""
    return 100 + 10 * abs(config.consumers - 3) + 5 * (not config.overlap) + 2 * abs(config.stages - 5) + abs(config.registers - 136) / 8


class Evaluator:
    """Counts what it is asked, and says that configs with 2 stages are wrong."""

    def __init__(self) -> None:
        self.asked: list[CudaConfig] = []

    def __call__(self, configs: Sequence[CudaConfig]) -> list[Outcome]:
        self.asked += configs
        return [
            Outcome(config, "correct", "two stages")
            if config.stages == 2
            else Outcome(config, "timed", None, speed(config), speed(config) / speed(next(iter(SPEEDS))))
            for config in configs
        ]


def run(journal: Journal, evaluate: Evaluator, seconds: float, dim: int = 64) -> list[Outcome]:
    call, ticks = a_call(dim), itertools.count()
    candidates = search.Candidates(
        space.spaces("cuda", call, H100), space.shipped("cuda", call, H100), lambda config: space.unsupported_config(config, call, H100)
    )
    return search.search(candidates, evaluate, journal, search.Effort(seconds, random.Random(0), lambda: float(next(ticks))))


def test_the_best_is_found_and_bad_ones_are_kept_out(tmp_path: Path) -> None:
    evaluate, journal = Evaluator(), Journal(tmp_path / "journal.jsonl", KEY)
    elite = run(journal, evaluate, seconds=40)
    call = a_call()
    best = min((c for c in space.spaces("cuda", call, H100)[0].everything() if space.unsupported_config(c, call, H100) is None), key=speed)
    assert elite[0].config == best and len(elite) == search.ELITE == 3
    assert [one.score for one in elite] == sorted(one.score for one in elite)
    assert len(evaluate.asked) == len(set(evaluate.asked))
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    by_gate = {gate: [line for line in lines if line["gate"] == gate] for gate in ("fits", "correct", "timed")}
    assert all(by_gate.values()) and all(line["reason"] for line in (*by_gate["fits"], *by_gate["correct"]))
    assert all("registers" in line["reason"] or "shared memory" in line["reason"] for line in by_gate["fits"])
    assert not any(line["config"]["stages"] == 2 for line in by_gate["timed"])


def test_a_search_goes_on_where_its_journal_ends(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = Evaluator()
    run(Journal(path, KEY), first, seconds=3)
    assert 0 < len(first.asked) <= len(space.shipped("cuda", a_call(), H100)) + 2 * search.BATCH
    second, resumed = Evaluator(), Journal(path, KEY)
    assert set(first.asked) <= set(resumed.outcomes)
    elite = run(resumed, second, seconds=3)
    assert second.asked and not set(first.asked) & set(second.asked)
    assert elite[0].score <= search.elite_of(Journal(path, KEY).outcomes.values())[0].score
    assert not Journal(path, {**KEY, "sources": "other"}).outcomes


def test_a_search_ends_when_everything_was_tried() -> None:
    evaluate, journal = Evaluator(), Journal(None, KEY)
    run(journal, evaluate, seconds=10_000, dim=256)
    everything = set(space.spaces("cuda", a_call(256), H100)[0].everything())
    assert everything <= set(journal.outcomes)


@pytest.mark.parametrize("backend", space.BACKENDS)
def test_children_lie_in_the_space_and_what_ships_in_one(backend: str) -> None:
    call, dice = a_call(), random.Random(1)
    found = space.spaces(backend, call, H100)
    parents = space.shipped(backend, call, H100)
    for one in found:
        inside = set(one.everything())
        children = [child for _ in range(50) for child in one.bred(parents, dice)]
        assert len(set(children)) > 20 and sum(child in inside for child in children) > len(children) // 2
        assert all(one.owns(child) for child in children)
    assert any(one.owns(parents[0]) for one in found)
    assert all(space.from_json(json.loads(json.dumps(space.to_json(config)))) == config for config in parents)


def test_numerics_are_not_searched() -> None:
    (one,) = space.spaces("cuda", a_call(), H100)
    assert {config.exact for config in one.everything()} == {2} and "exact" in one.fixed and "general" in one.fixed


def test_a_crash_costs_the_one_that_was_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = (PortableConfig(64, 64, 4, stages) for stages in (1, 2, 3))
    asked: list[list[PortableConfig]] = []

    def ask(self: Measured, configs: Sequence[PortableConfig]):
        asked.append(list(configs))
        good = {config: ("timed", None, 1.0, 1.0) for config in configs if config != b}
        return ({a: good[a]} if a in configs and b in configs else good), (b if b in configs else None), "its process ended, exit code -11"

    monkeypatch.setattr(Measured, "_ask", ask)
    found = dict(Measured(cases.TINY[0], "triton", a)([a, b, c]))
    assert found[a][0] == found[c][0] == "timed" and found[b] == ("correct", "its process ended, exit code -11", None, None)
    assert asked == [[a, b, c], [c]]


@pytest.mark.thorough
@pytest.mark.skipif(GPU, reason="times mean nothing here, and on a GPU this takes a minute")
def test_the_interpreter_can_be_searched(capsys: pytest.CaptureFixture) -> None:
    """A process of its own checks against the oracle and takes the time; a config that answers wrongly is rejected there."""
    case, good, other = cases.TINY[0], PortableConfig(64, 64, 4, 1), PortableConfig(32, 64, 2, 1)
    found = dict(Measured(case, "triton", good, dataclasses.replace(candidates.PROTOCOL, rounds=1))([good, other]))
    assert {result[0] for result in found.values()} == {"timed"} and found[good][3] == 1.0 and found[other][3] != 1.0
    words = ["search", "--case", "tiny full", "--minutes", "0"]
    assert command.main(words) == 0
    printed = capsys.readouterr()
    assert "PortableConfig(block_m=64,block_n=64,num_warps=4,num_stages=1)" in folded_cell(printed.out, "PortableConfig")
    assert "search: searches: 1" in printed.err
    assert command.main([*words, "--write"]) == 2
    assert "needs a GPU" in capsys.readouterr().err


def folded_cell(table: str, word: str) -> str:
    """The first cell of the row that begins with a word, without what it was folded at."""
    lines = [line.split("│")[1] for line in table.splitlines() if line.startswith("│")]
    first = next(i for i, line in enumerate(lines) if word in line)
    return "".join("".join(lines[first:]).split())


def test_what_differs_from_the_oracle_is_told(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    config = PortableConfig(64, 64, 4, 1)
    assert candidates.differs(cases.TINY[0], config, device) is None
    original = candidates.run_of
    monkeypatch.setattr(candidates, "run_of", lambda *args: lambda i: original(*args)(i) * 0.97)
    assert (candidates.differs(cases.TINY[0], config, device) or "").startswith("rows differ from the oracle by 0.0")


def test_writing_tritons_table(tmp_path: Path) -> None:
    """Other GPUs' entries stay, and what is written is read again."""
    path = tmp_path / "shipped.json"
    path.write_text(
        json.dumps({"other": {"d64 dv64 e4m3 full": {"kernel": "portable", "block_m": 64, "block_n": 64, "num_warps": 2, "num_stages": 2}}})
    )
    search.write_triton({"d128 dv128 e4m3 full": HopperConfig(2, 128, 2, 240)}, "one", path)
    table = json.loads(path.read_text())
    assert from_json(table["other"]["d64 dv64 e4m3 full"]) == PortableConfig(64, 64, 2, 2)
    assert from_json(table["one"]["d128 dv128 e4m3 full"]) == HopperConfig(2, 128, 2, 240)


def test_writing_cudas_table(tmp_path: Path) -> None:
    """Head dims that weren't searched and general instances stay; rendering the table that ships changes nothing."""
    for kind, shipped in ((CudaConfig, SPEEDS), (CudaPortableConfig, portable.MEASURED)):
        path, name = search.CUDA_TABLES[kind]
        assert search.with_speeds(path.read_text(), shipped, name) == path.read_text()
    source = search.CUDA_TABLES[CudaConfig][0].read_text()
    fast, slow = CudaConfig(64, 64, 3, 5, 136, True, 1, False), CudaConfig(64, 64, 3, 4, 136, True, 1, False)
    small, lost = CudaConfig(64, 64, 1, 4, 240, True, 1, False), CudaConfig(64, 64, 2, 4, 240, True, 1, False)
    timed = [
        [Outcome(c, "timed", None, 1.0, ratio) for c, ratio in ((fast, 0.8), (slow, 0.9), (small, 1.6))],
        [*(Outcome(c, "timed", None, 1.0, ratio) for c, ratio in ((fast, 0.8), (slow, 0.7), (small, 1.6))), Outcome(lost, "timed", None, 1.0, 0.5)],
    ]
    found = search.speeds_from(timed)
    assert found == {slow: 1.0, small: round((0.9 * 0.7) ** 0.5 / 1.6, 2)}  # 0.794 beats 0.8; `lost` has one case only
    path = tmp_path / "configs.py"
    path.write_text(source)
    other = tmp_path / "portable.py"
    other.write_text(search.CUDA_TABLES[CudaPortableConfig][0].read_text())
    tables = {CudaConfig: (path, "SPEEDS"), CudaPortableConfig: (other, "MEASURED")}
    search.write_cuda([found], tables)
    assert other.read_text() == search.CUDA_TABLES[CudaPortableConfig][0].read_text()
    written: dict = {}
    text = path.read_text()
    exec(table_in(text, "SPEEDS"), {"HopperConfig": CudaConfig}, written)
    others = {c: s for c, s in SPEEDS.items() if (c.head_dim, c.skips_blocks) != (64, False)}
    assert written["SPEEDS"] == {**others, **found}
    with pytest.raises(ValueError, match="no table SPEEDS"):
        search.with_speeds("x = 1\n", SPEEDS)


def table_in(source: str, name: str) -> str:
    """The assignment of a table in a module's source."""
    start = source.index(f"{name} = {{\n")
    return source[start : source.index("\n}\n", start) + 3]


def test_writing_the_portable_kernels_table(tmp_path: Path) -> None:
    """What was found for one head dim and kind of operands takes the place of those; a field behind one with its default is written."""
    path, name = search.CUDA_TABLES[CudaPortableConfig]
    copy = tmp_path / "portable.py"
    copy.write_text(path.read_text())
    (old,) = (c for c in portable.MEASURED if c.drift)
    new = dataclasses.replace(old, stages=4, ctas=1, drift=True)
    search.write_cuda([{new: 1.0}], {CudaConfig: search.CUDA_TABLES[CudaConfig], CudaPortableConfig: (copy, name)})
    written: dict = {}
    text = copy.read_text()
    exec(table_in(text, "MEASURED"), {"PortableConfig": CudaPortableConfig}, written)
    same = {c for c in portable.MEASURED if (c.head_dim, c.operands, c.general) == (128, "registers", False)}
    assert old in same and written["MEASURED"] == {c: s for c, s in portable.MEASURED.items() if c not in same} | {new: 1.0}


@pytest.mark.parametrize("arch", (80, 89))
def test_other_gpus_search_the_portable_kernel(arch: int) -> None:
    call, device, dice = a_call(), ARCHITECTURES[arch], random.Random(2)
    assert space.unsupported_call("cuda", call, device) is None
    (one,) = space.spaces("cuda", call, device)
    shipped = space.shipped("cuda", call, device)
    assert all(isinstance(c, CudaPortableConfig) and one.owns(c) for c in shipped)
    children = {child for _ in range(300) for child in one.bred(shipped, dice)}
    fitting = [child for child in children if space.unsupported_config(child, call, device) is None]
    assert len(fitting) > 20 and {c.operands for c in fitting} == {"native" if arch == 89 else "registers"}
    assert all(space.from_json(json.loads(json.dumps(space.to_json(config)))) == config for config in fitting)
