"""The benchmarks' command lines: what is asked for and isn't there is an error of one line before any work, in a checkout and installed."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fp8attn
from bench import __main__ as command
from bench import (
    adapters,
    candidates,
    cases,
    command_line,
    commits,
    compare,
    gates,
    machine,
    masks,
    peers,
    plot,
    profile,
    readme,
    report,
    rows,
    sanitize,
    search,
)
from bench.command_line import UsageError
from bench.peers import Peer

ROOT = Path(__file__).resolve().parents[2]
FILES = [str(plot.SOURCE), str(plot.SOURCE)]
POSITIONAL = {"compare": FILES, "report": [str(plot.SOURCE), "--to", "."]}
TYPO = "no-such-thing"


def parsers() -> dict[str, argparse.ArgumentParser]:
    (commands,) = [action for action in command.parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(commands.choices)


def options() -> Iterator[tuple[str, argparse.Action]]:
    for name, parser in parsers().items():
        for action in parser._actions:
            if action.dest != "help" and action.option_strings:
                yield name, action


FILTERS = [(name, action.option_strings[0]) for name, action in options() if action.choices or action.metavar in ("SUBSTRING", "NAME")]
TO_WRITE = (command_line.output_file, command_line.picture_file, command_line.output_folder, command.markdown_file, search.journal_file)
WRITTEN = [(name, action) for name, action in options() if action.type in TO_WRITE]
TO_READ = [(name, action) for name, action in options() if action.type is command_line.input_file]


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever begins to work fails."""

    def fail(*args: object, **options: object) -> None:
        raise AssertionError("work has begun")

    monkeypatch.setattr(report, "progress", fail)
    monkeypatch.setattr(subprocess, "run", fail)
    monkeypatch.setattr(cases, "inputs", fail)


def error_of(words: list[str], capsys: pytest.CaptureFixture) -> str:
    """The one line that a refused command prints."""
    assert command.main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    assert printed.err.startswith(f"python -m bench {words[0]}: ")
    return printed.err


def test_filters_are_known() -> None:
    """Every command that has cases, rows or recipes has filters for them."""
    found = {(name, option) for name, option in FILTERS}
    assert found >= {
        (name, "--case")
        for name in ("run", "quantize", "compare", "accuracy", "price", "masks", "overhead", "first-calls", "ladder", "profile", "search")
    }
    assert found >= {(name, "--peer") for name in ("run", "accuracy", "needle", "model", "masks", "profile")}
    assert found >= {("price", "--recipe"), ("masks", "--mask"), ("compare", "--backend"), ("sanitize", "--tool"), ("run", "--distribution")}


@pytest.mark.parametrize("name, option", FILTERS)
def test_a_filter_that_matches_nothing_is_an_error(name: str, option: str, no_work: None, capsys: pytest.CaptureFixture) -> None:
    """It says what was given and what there is; `--case typo` printed empty tables, `--peer typo` a traceback."""
    line = error_of([name, *POSITIONAL.get(name, ()), option, TYPO], capsys)
    assert repr(TYPO) in line and (option in line or name == "profile")
    action = next(action for one, action in options() if (one, action.option_strings[0]) == (name, option))
    there = list(action.choices or ()) or {"--recipe": list(rows.RECIPES), "--mask": list(masks.MASKS)}.get(
        option, ["fp8attn", "D128", "tiny", "Flux 4608", "4609 keys", "32 × 4k"]
    )
    assert any(one in line for one in there), line


@pytest.mark.parametrize("name, option", [(name, option) for name, option in FILTERS if option in ("--peer", "--recipe") and name != "profile"])
def test_one_of_several_that_matches_nothing_is_an_error(name: str, option: str, no_work: None, capsys: pytest.CaptureFixture) -> None:
    assert repr(TYPO) in error_of([name, option, "int8" if option == "--recipe" else "fp8attn", option, TYPO], capsys)


def test_filters_that_match_nothing_together(tmp_path: Path, no_work: None, capsys: pytest.CaptureFixture) -> None:
    lines = [
        json.dumps({"benchmark": "run", "case": case, "backend": backend, "p50_us": 1.0, "p90_us": 1.0})
        for case, backend in (("a", "fp8attn cuda"), ("b", "SDPA cuDNN"))
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    words = ["compare", str(tmp_path / "x.jsonl"), str(tmp_path / "x.jsonl"), "--backend", "sdpa"]
    assert "no case has 'a' in its name (--case); there are b" in error_of([*words, "--case", "a"], capsys)
    found = compare.compare(tmp_path / "x.jsonl", tmp_path / "x.jsonl", case="A")
    assert [change.backend for change in found.changes] == ["fp8attn cuda"], "a file's --case was ignored"


def test_who_is_asked_for_and_not_here_is_an_error(no_work: None, capsys: pytest.CaptureFixture) -> None:
    if adapters.present(adapters.chosen(["FA3"]))[0]:
        pytest.skip("FlashAttention-3 is installed")
    assert "FA3 bf16 isn't here: it needs" in error_of(["run", "--peer", "FA3"], capsys)


def test_suites_without_a_case(no_work: None, capsys: pytest.CaptureFixture) -> None:
    line = error_of(["run", "--suite", "seeds", "--case", "tiny"], capsys)
    assert "no case of the suites seeds has 'tiny' in its name (--case); there are small" in line
    line = error_of(["run", "--suite", "accuracy", "--distribution", "outliers"], capsys)
    assert "--distribution is outliers; the suite accuracy has inputs of its own" in line


def test_a_command_that_there_isnt(no_work: None, capsys: pytest.CaptureFixture) -> None:
    assert command.main([TYPO]) == 2
    line = capsys.readouterr().err
    assert f"there is no command {TYPO!r}; there are run, peers" in line and line.count("\n") == 1


def test_all_paths_are_checked() -> None:
    """Every option that names a file or folder has a type that looks whether it can be read or written."""
    for name, parser in parsers().items():
        for action in parser._actions:
            if (action.metavar or "").startswith(("FILE", "FOLDER")):
                assert action.type in (*TO_WRITE, command_line.input_file), f"{name} {action.option_strings}"
    assert {name for name, _ in WRITTEN} >= {"run", "quantize", "compare", "report", "plot", *command.MODULES} - {"search", "plot", "report"}


def bad_paths(kind: object, folder: Path) -> list[tuple[Path, str]]:
    """Where nothing can be written, and what is said of it."""
    (folder / "file").write_text("kept")
    (folder / "folder").mkdir()
    if kind is command_line.output_folder:
        return [(folder / "file", "is a file"), (folder / "file" / "below", "is a file"), (Path("/proc/nowhere"), "no file can be made")]
    suffix = ".svg" if kind is command_line.picture_file else ".jsonl"
    missing = folder / "missing" / f"x{suffix}"
    return [(missing, "isn't a folder that exists"), (folder / "folder", "is a folder"), (Path(f"/proc/x{suffix}"), "no file can be made in '/proc'")]


@pytest.mark.parametrize("name, action", [pytest.param(name, action, id=f"{name} {action.option_strings[0]}") for name, action in WRITTEN])
def test_what_cant_be_written_is_an_error_before_any_work(
    name: str, action: argparse.Action, tmp_path: Path, no_work: None, capsys: pytest.CaptureFixture
) -> None:
    if action.type is command_line.picture_file:
        pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    option = action.option_strings[0]
    for path, why in bad_paths(action.type, tmp_path):
        if not path.is_relative_to("/proc") or Path("/proc/self").exists():
            line = error_of([name, *POSITIONAL.get(name, ()), option, str(path)], capsys)
            assert f"argument {option}: {str(path)!r}" in line and why in line
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder"] and (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("name, action", [pytest.param(name, action, id=f"{name} {action.option_strings[0]}") for name, action in TO_READ])
def test_what_cant_be_read_is_an_error(name: str, action: argparse.Action, tmp_path: Path, no_work: None, capsys: pytest.CaptureFixture) -> None:
    option = action.option_strings[0]
    for path, why in ((tmp_path / "missing", "doesn't exist"), (tmp_path, "is a folder; it must be a file")):
        assert f"argument {option}: {str(path)!r} {why}" in error_of([name, option, str(path)], capsys)


def test_files_to_compare(tmp_path: Path, no_work: None, capsys: pytest.CaptureFixture) -> None:
    assert "doesn't exist; git revisions are compared with --commits" in error_of(["compare", "HEAD", FILES[0]], capsys)
    assert "--rounds is 3; it says how --commits measures" in error_of(["compare", *FILES, "--rounds", "3"], capsys)
    assert "--to is" in error_of(["compare", *FILES, "--to", str(tmp_path)], capsys)
    (tmp_path / "empty.jsonl").write_text("")
    assert "there is no timed row in" in error_of(["compare", str(tmp_path / "empty.jsonl"), str(tmp_path / "empty.jsonl")], capsys)


def test_what_says_how_to_measure_and_nothing_is_measured(no_work: None, capsys: pytest.CaptureFixture) -> None:
    recorded = str(Path(__file__).with_name("ncu_h100.csv"))
    assert "--nvtx says how to measure; with --from nothing is" in error_of(["profile", "--from", recorded, "--nvtx", "forward"], capsys)


@pytest.mark.parametrize(
    "words, said",
    (
        (["run", "--rounds", "0"], "'0' isn't an integer of 1 or more"),
        (["run", "--rounds", "1.5"], "'1.5' isn't an integer of 1 or more"),
        (["quantize", "--milliseconds", "0"], "'0' isn't a number above 0"),
        (["run", "--lead-in", "-1"], "'-1' isn't a number of 0 or more"),
        (["masks", "--milliseconds", "nan"], "'nan' isn't a number of 0 or more"),
        (["price", "--settle", "inf"], "'inf' isn't a number of 0 or more"),
        (["accuracy", "--seeds", "0"], "'0' isn't an integer of 1 or more"),
        (["needle", "--keys", "8"], "'8' isn't an integer of 32 or more"),
        (["model", "--windows", "0"], "'0' isn't an integer of 1 or more"),
        (["model", "--head-dim", "7"], "--head-dim is 7; it must be even"),
        (["search", "--batch", "0"], "'0' isn't an integer of 1 or more"),
        (["search", "--minutes", "x"], "'x' isn't a number of 0 or more"),
        (["sanitize", "--timeout", "0"], "'0' isn't a number above 0"),
        (["plot", "--to", "picture.txt"], "its suffix must be .svg or .png"),
    ),
)
def test_numbers_that_cant_be(words: list[str], said: str, no_work: None, capsys: pytest.CaptureFixture) -> None:
    if words[0] == "plot":
        pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    assert said in error_of(words, capsys)


def test_a_journal_of_something_else_is_an_error(tmp_path: Path, no_work: None, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"case": "x"}\n')
    assert "isn't a journal of python -m bench search" in error_of(["search", "--journal", str(path)], capsys)
    path.write_text("")
    assert search.journal_file(str(path)) == path


def test_pictures_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_work: None, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(command_line, "matplotlib_lacks", lambda: "pictures need matplotlib")
    assert "pictures need matplotlib" in error_of(["ladder", "--picture", str(tmp_path / "x.png")], capsys)
    assert "pictures need matplotlib" in error_of(["accuracy", "--draw", str(plot.SOURCE.with_name("accuracy.jsonl"))], capsys)


class Cut(Exception):
    """As if a run were cut short."""


def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`run` asks one peer, which answers at once, for one case."""
    case = cases.square("small", 1, 2, 128, 64)
    exact = next(peer for peer in peers.PYTORCH if peer.name == "SDPA math")
    own = Peer("fp8attn exact", (peers.KERNEL,), exact.prepare, own=True)
    monkeypatch.setattr(adapters, "PEERS", (own,))
    monkeypatch.setattr(adapters.chosen, "__defaults__", ((own,), "peer"))
    monkeypatch.setattr(cases, "suite", lambda name, gpu: (case,))
    monkeypatch.setattr(command, "compile_all", lambda cases, peers, bar: iter(()))
    return ["run", "--suite", "tiny", "--rounds", "1"]


def test_old_results_stay_until_new_ones_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A refused run, one whose gates are red and one that is cut short keep them; the last one's results lie beside."""
    file, partial = tmp_path / "results.jsonl", tmp_path / "results.jsonl.partial"
    file.write_text("old\n")
    words = [*quick(monkeypatch), "--json", str(file)]
    assert command.main([*words, "--case", TYPO]) == 2 and file.read_text() == "old\n"
    with monkeypatch.context() as red:
        red.setattr(gates.Gates, "broken", lambda *args, **options: ("max_abs",))
        assert command.main(words) == 1 and file.read_text() == "old\n" and not partial.exists()
    measured = command.side_by_side

    def cut_short(*args: object, **options: object) -> object:
        found = measured(*args, **options)
        report.append(partial, [report.json_line("run", found[0].record(), {})])
        raise Cut

    with monkeypatch.context() as cut:
        cut.setattr(command, "side_by_side", cut_short)
        with pytest.raises(Cut):
            command.main(words)
    assert file.read_text() == "old\n" and json.loads(partial.read_text())["backend"] == "fp8attn exact"
    assert f"cut short: what was measured is in {partial}, and {file} is as it was" in capsys.readouterr().err
    assert command.main(words) == 0 and not partial.exists()
    (line,) = file.read_text().splitlines()
    assert json.loads(line)["case"] == "small"


def test_devices_are_written_as_they_are() -> None:
    path = Path(os.devnull)
    with command_line.replacing(path) as found:
        assert found == path
    with command_line.replacing(None) as found:
        assert found is None


def test_an_installed_package_says_what_needs_a_checkout(monkeypatch: pytest.MonkeyPatch, no_work: None, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(command_line, "IS_CHECKOUT", False)
    for words in (["readme"], ["plot"], ["compare", "HEAD", "HEAD", "--commits"], ["search", "--write"]):
        assert "needs a checkout of the fp8attn repository" in error_of(words, capsys)


def test_who_looks_for_the_checkout_asks_for_it() -> None:
    """No module of the bench but these knows where the repository begins."""
    users = {path.stem for path in (ROOT / "bench").glob("*.py") if "ROOT" in path.read_text().split('"""', 2)[-1]}
    assert users == {"machine", "command_line", "commits", "worker", "readme"}
    assert "checkout(" in inspect.getsource(commits.resolved) and "checkout(" in inspect.getsource(readme.write)


INSTALLED = """
import sys
from fp8attn.bench import __main__ as command
from fp8attn.bench import candidates, machine, profile, sanitize
assert not machine.IS_CHECKOUT and machine.commit() == "unknown" and machine.module_folder() is None
assert command.parser().prog == "python -m fp8attn.bench"
assert sanitize.command("tool", "memcheck")[-1] == "fp8attn.bench.launched"
assert [command.main(words) for words in (["readme"], ["plot"], ["run", "--case", "nothing"])] == [2, 2, 2]
sys.exit(command.main(["peers"]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with fp8attn as a wheel has it, the bench inside."""
    folder = tmp_path_factory.mktemp("site")
    ignored = shutil.ignore_patterns("__pycache__", "results")
    shutil.copytree(Path(fp8attn.__file__).parent, folder / "fp8attn", ignore=ignored)
    shutil.copytree(ROOT / "bench", folder / "fp8attn" / "bench", ignore=ignored)
    return folder


def test_the_bench_works_inside_the_package(site: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "FP8ATTN_COMMIT"} | {"PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", INSTALLED], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fp8attn triton" in done.stdout and done.stderr.count("needs a checkout of the fp8attn repository") == 2
    assert "python -m fp8attn.bench run: no case of the suites" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU nothing is interpreted")
def test_the_installed_bench_interprets_without_a_gpu(site: Path, tmp_path: Path) -> None:
    """The package is imported before the bench can say that kernels are to be interpreted: Python starts again."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(site), "COLUMNS": "120"}
    words = [sys.executable, "-m", "fp8attn.bench", "peers"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split("│")[2].strip() for line in done.stdout.splitlines() if "│ fp8attn triton " in line] == ["yes", "yes"]


def test_modules_that_are_started_are_this_packages() -> None:
    for path in (ROOT / "bench").glob("*.py"):
        text = path.read_text()
        assert not re.search(r"^\s*(from|import) bench\b", text, re.MULTILINE), f"{path.name} imports the bench by a name"
        assert '"bench.' not in text or path.stem == "worker", f"{path.name} starts a module by a name"
    assert machine.module("profiled") == ["-m", "bench.profiled"] and machine.module_folder() == machine.ROOT == ROOT
    assert profile.target(cases.TINY[0], "fp8attn cuda", "normal")[:2] == ["-m", "bench.profiled"]
    assert sanitize.command("tool", "memcheck")[-1] == "bench.launched" and candidates.module is machine.module


def test_it_says_at_once_what_it_does(tmp_path: Path) -> None:
    """Before torch is imported, which takes seconds: here half a minute."""
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(30)\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-m", "bench"], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert process.stderr.readline() == "python -m bench: loading PyTorch and fp8attn\n"
            assert time.monotonic() - began < 10
        finally:
            process.kill()


def test_importing_the_bench_says_nothing() -> None:
    words = [sys.executable, "-c", "import bench"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


NEEDS_GPU = {
    "fp8attn cuda", "fp8attn cuda int8", "fp8attn cuda end to end", "fp8attn cuda rotated end to end", "fp8attn cuda int8 end to end",
    "fp8attn cuda int8 rotated end to end", "SDPA cuDNN", "SDPA efficient",
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_what_needs_one_isnt_here(capsys: pytest.CaptureFixture) -> None:
    everyone = {peer.name: peer for peer in (*adapters.PEERS, *rows.ROWS, *masks.ROWS_OF_TABLE)}
    lacking = {name for name, peer in everyone.items() if "an NVIDIA GPU" in (peer.needs() or "")}
    assert lacking == NEEDS_GPU | {peer.name for peer in adapters.OTHERS} | {"e4m3 one level"}
    assert {name for name, peer in everyone.items() if peer.needs() is None} == set(everyone) - lacking
    assert command.main(["peers"]) == 0
    found = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in capsys.readouterr().out.splitlines() if line.count("│") == 4}
    assert found["fp8attn cuda"] == "no" and found["fp8attn triton"] == found["SDPA math"] == "yes"


def test_needs_say_what_is_missing_and_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    there = adapters.lacking("pip install json", "no_such_module", "json")
    missing = adapters.lacking("pip install no_such_module", "no_such_module")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert there() == "an NVIDIA GPU" and missing() == "an NVIDIA GPU, and pip install no_such_module"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert there() is None and missing() == "pip install no_such_module"
    monkeypatch.setattr(peers, "device_here", lambda: torch.device("cpu"))
    monkeypatch.setattr(peers, "cuda_unavailable", lambda device: "cuda: nvcc isn't here")
    assert {peer.needs() for peer in peers.OWN if "cuda" in peer.name} == {"nvcc isn't here"}
    monkeypatch.setattr(peers, "triton_unavailable", lambda device: "triton: no kernels")
    assert {peer.needs() for peer in peers.OWN if "triton" in peer.name} == {"no kernels"}


def test_who_needs_the_same_is_named_together(capsys: pytest.CaptureFixture) -> None:
    def needing(name: str, need: str | None) -> Peer:
        return Peer(name, (), lambda problem: lambda i: torch.zeros(1), needs=lambda: need)

    found = adapters.here([needing("a", "x"), needing("b", "y"), needing("c", "x"), needing("d", None)])
    assert [peer.name for peer in found] == ["d"]
    assert capsys.readouterr().err == "not here: a, c: they need x\nnot here: b: it needs y\n"
    with pytest.raises(UsageError, match="a isn't here: it needs x; b isn't here: it needs y"):
        adapters.here([needing("a", "x"), needing("b", "y")])
