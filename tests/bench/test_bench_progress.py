"""How far a benchmark is: lines where there is no terminal, an estimate of what is left, and work that adds up to what was announced."""

from __future__ import annotations

import functools
import inspect
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from bench import __main__ as command
from bench import accuracy, cases, gates, masks, model, needle, peers, price, progress, report, run
from bench.errors import Bad
from bench.peers import END_TO_END, KERNEL, Attention, Peer, Problem
from bench.progress import Progress, Tick
from bench.timing import Protocol
from fp8attn import Recipe

CPU = torch.device("cpu")
CASE = cases.square("small", 1, 2, 128, 64)
BAD = Bad(0.05, 0.2)


def exact(problem: Problem) -> Attention:
    return lambda i: F.scaled_dot_product_attention(*problem.sets[0], **problem.case.options)


def refused(problem: Problem) -> Attention:
    raise ValueError("no")


PEERS = [Peer("fp8attn exact", (KERNEL, END_TO_END), exact, own=True), Peer("refused", (KERNEL,), refused), Peer("SDPA math", (KERNEL,), exact)]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    "completed, total, elapsed, guess, left",
    (
        (0.0, 10.0, 5.0, None, None),
        (0.0, 10.0, 5.0, 60.0, 55.0),
        (0.0, 10.0, 90.0, 60.0, 0.0),
        (2.5, 10.0, 5.0, 60.0, 15.0),
        (10.0, 10.0, 5.0, None, 0.0),
        (12.0, 10.0, 5.0, None, 0.0),
        (3.0, None, 5.0, None, None),
    ),
)
def test_what_is_left(completed: float, total: float | None, elapsed: float, guess: float | None, left: float | None) -> None:
    assert progress.seconds_left(completed, total, elapsed, guess) == left


@pytest.mark.parametrize("seconds, text", ((0.4, "0:00"), (59.6, "1:00"), (61, "1:01"), (3599.4, "59:59"), (3600, "1:00:00"), (36061, "10:01:01")))
def test_times_are_minutes_and_seconds(seconds: float, text: str) -> None:
    assert progress.clock_time(seconds) == text


def test_a_line_says_what_is_at_work_and_how_long_it_takes(capsys: pytest.CaptureFixture) -> None:
    clock = Clock()
    with Progress("run", terminal=False, interval=1000.0, clock=clock) as bar:
        assert bar.line() is None
        first = bar.add_task("compiling", total=None)
        clock.now += 7
        assert bar.line() == "run: 0:07 so far, no estimate yet: compiling"
        bar.update(first, completed=0)
        task = bar.add_task("gates", total=40, seconds=80)
        clock.now += 10
        assert bar.line() == "run: 0 %, 0:10 so far, about 1:10 left: gates"
        tick = bar.ticks(task, "tiny full, ")
        tick("fp8attn triton", 0.0)
        tick("SDPA math", 10.0)
        assert bar.line() == "run: 25 %, 0:10 so far, about 0:30 left: tiny full, SDPA math"
        bar.update(task, completed=20, description="[half]")
        bar.advance(task, 10)
        assert bar.line() == "run: 75 %, 0:10 so far, about 0:03 left: [half]"
        bar.advance(task, 10)
        assert bar.line() is None
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == "run: compiling\nrun: gates\n"


def test_a_silent_step_shows_life(capsys: pytest.CaptureFixture) -> None:
    said, deadline = "", time.monotonic() + 10
    with Progress("accuracy", terminal=False, interval=0.02) as bar:
        bar.add_task("one long case", total=3)
        while said.count("accuracy: 0 %, 0:0") < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
            said += capsys.readouterr().err
    assert said.count("accuracy: 0 %, 0:0") > 1
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == "", "a line after the end"


def test_lines_get_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one in ten seconds, and none more often than after a twentieth of what has passed."""
    clock, waits = Clock(), []
    bar = Progress("run", terminal=False, clock=clock)

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        clock.now += seconds
        return clock.now > 100 + 3600

    monkeypatch.setattr(bar._over, "wait", wait)
    bar._print_lines()
    assert waits[:20] == [10.0] * 20 and min(waits) == 10.0 and 170 < max(waits) < 190 and len(waits) < 100


def test_a_terminal_gets_a_bar_and_no_lines(capsys: pytest.CaptureFixture) -> None:
    with Progress("run", terminal=True, interval=0.01) as bar:
        task = bar.add_task("gates", total=1)
        time.sleep(0.05)
        bar.advance(task)
    printed = capsys.readouterr()
    assert printed.out == "" and "run: " not in printed.err and not bar._lines.is_alive()


def test_every_command_that_measures_shows_how_far_it_is() -> None:
    """`peers`, `readme` and a comparison of files are a matter of a second."""
    for name, run_it in command.RUN.items():
        source = inspect.getsource(inspect.getmodule(run_it) if name in command.MODULES else run_it)
        if name == "compare":
            source = inspect.getsource(command.compared_commits)
        if name not in ("peers", "readme"):
            assert re.search(rf'report\.progress\("{name}"\)', source), name
    assert "redirect_stdout=False" in inspect.getsource(Progress), "tables would go where the bar is"


def test_works_are_measured_one_after_another(tmp_path: Path) -> None:
    """Each one's results are in the file before the next one begins; its ticks advance the whole."""
    file, seen = tmp_path / "x.jsonl", []

    def measure(number: int, tick: Tick) -> list[SimpleNamespace]:
        seen.append(len(file.read_text().splitlines()) if file.exists() else 0)
        for _ in range(3):
            tick("turn", 1.0)
        return [SimpleNamespace(record=lambda part=part: {"number": number, "part": part}) for part in range(2)]

    with report.progress("masks") as bar:
        works = [(f"work {i}", functools.partial(measure, i)) for i in range(2)]
        results = report.measure_each(bar, "works: 2", works, 3, file, {"gpu": None})
        (task,) = bar._bar.tasks
        assert (task.total, task.completed) == (6, 6) and task.description == "work 1, turn"
    wanted = [{"benchmark": "masks", "number": number, "part": part, "gpu": None} for number in range(2) for part in range(2)]
    assert seen == [0, 2] and list(map(json.loads, file.read_text().splitlines())) == wanted and len(results) == 4


def total(told: list[tuple[str, float]]) -> float:
    return sum(done for _, done in told)


def test_what_a_run_tells_is_what_was_announced() -> None:
    told: list[tuple[str, float]] = []
    protocol = Protocol(rounds=3)
    run.side_by_side(CASE, "normal", PEERS, protocol, gates.Gates.load(), CPU, lambda *what: told.append(what))
    assert total(told) == pytest.approx(sum(sum(run.effort(CASE, peer, protocol, False)) for peer in PEERS))
    assert ("fp8attn exact, its answer", 0.0) in told and ("SDPA math, round 3 of 3", 0.0) in told
    assert {name for name, done in told if done} == {peer.name for peer in PEERS}


def test_gates_accuracy_and_needle_tell_of_every_row() -> None:
    told: list[tuple[str, float]] = []
    efforts = sum(peer.effort(CASE, False) for peer in PEERS)
    gates.judge(CASE, gates.Gates.load(), CPU, PEERS, lambda *what: told.append(what))
    assert total(told) == pytest.approx(efforts)
    told.clear()
    accuracy.measure(CASE, "normal", PEERS, gates.Gates.load(), CPU, 2, lambda *what: told.append(what))
    assert total(told) == pytest.approx(accuracy.effort(CASE, PEERS, False, 2)) and total(told) == pytest.approx(2 * efforts)
    told.clear()
    hay = needle.haystack(needle.case_of(64, heads=1, queries=8), 0.25, CPU)
    needle.measure(hay, PEERS, gates.Gates.load(), lambda *what: told.append(what))
    assert total(told) == pytest.approx(sum(peer.effort(hay.problem.case, False) for peer in PEERS))


def test_masks_and_prices_tell_of_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float]] = []
    protocol = Protocol(rounds=2, milliseconds=1.0, lead_in=3.0, settle=1.0)
    monkeypatch.setattr(masks, "OWN", (Peer("kernel", (KERNEL,), exact),))
    masks.measure(CASE, "padding", [PEERS[0], PEERS[2]], BAD, protocol, CPU, lambda *what: told.append(what))
    assert total(told) == protocol.rounds * 3
    told.clear()
    monkeypatch.setattr(price, "by_recipe", lambda recipe, problem: exact(problem))

    def parts_of(problem: Problem, recipe: Recipe) -> dict:
        return {} if recipe.has_half_keys else dict.fromkeys(("quantize", "kernel"), exact(problem))

    monkeypatch.setattr(price, "parts_of", parts_of)
    monkeypatch.setattr(price, "FLASH_AND_CUDNN", tuple(peer for peer in peers.PYTORCH if peer.name == "SDPA math"))
    recipes = {price.DEFAULT: Recipe(), "recent 128": Recipe(recent=128)}
    price.measure(CASE, recipes, BAD, protocol, CPU, lambda *what: told.append(what))
    assert total(told) == pytest.approx(price.effort(recipes, protocol))
    assert ("recent 128: whole, beside the default's", 0.0) in told


def test_a_training_tells_of_its_steps_and_the_time() -> None:
    told: list[tuple[str, float]] = []
    size = model.Size(layers=1, heads=1, head_dim=8, context=16, batch=1, steps=4)
    text = torch.randint(256, (500,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    trained = model.train(size, text, CPU, 60.0, lambda line: None, lambda *what: told.append(what))
    assert [doing for doing, _ in told] == [f"step {step} of 4 at most" for step in range(4)] and 0.75 <= total(told) < 1
    told.clear()
    windows = text[: 2 * 17].view(2, 17).long()
    assert len(list(model.evaluate(trained, windows, [PEERS[0]], 2, lambda *what: told.append(what)))) == 2
    assert told[0] == ("bfloat16", 0.0) and told[1] == ("fp8attn exact", 1.0)


def test_the_bar_of_a_command_is_its_own() -> None:
    assert report.progress("needle").command == "needle"
