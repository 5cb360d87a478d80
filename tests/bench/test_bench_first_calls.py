"""python -m bench first-calls: what the measuring process says, and the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from bench import __main__ as command
from bench import first_calls, first_calls_child
from bench.first_calls import FirstCall, Start

CPU = torch.device("cpu")


def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """In place of the process that measures: a script."""
    (tmp_path / "child.py").write_text(text)
    original = first_calls.subprocess.Popen
    monkeypatch.setattr(first_calls.subprocess, "Popen", lambda words, **rest: original([sys.executable, str(tmp_path / "child.py")], **rest))


def test_what_the_process_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caches are empty folders of its own, and fp8attn is the one that asks."""
    text = """
import json, os, fp8attn
from pathlib import Path
assert all(list(Path(os.environ[name]).iterdir()) == [] for name in ("FP8ATTN_CACHE", "TRITON_CACHE_DIR"))
print(json.dumps({"torch_s": 2.0, "import_s": 0.25}))
print(json.dumps({"kind": "4096", "milliseconds": 20.5, "compiled": 3, "again_ms": 0.5}))
"""
    child(tmp_path, monkeypatch, text)
    start, call = first_calls.measure(["4096"])
    assert (start, call) == (Start(2.0, 0.25), FirstCall("4096", 20.5, 3, 0.5))
    assert isinstance(start, Start) and isinstance(call, FirstCall)
    assert first_calls.table(start, [call]).row_count == 1


def test_a_process_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(tmp_path, monkeypatch, "raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="exit code 3"):
        list(first_calls.measure(["4096"]))


def test_what_is_compiled_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, files in zip(first_calls_child.FOLDERS, (("a/binding.so", "a/build_meta.json"), ("b/kernel.cubin", "b/launcher.so")), strict=True):
        monkeypatch.setenv(name, str(tmp_path / name))
        for file in files:
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).touch()
    assert first_calls_child.compiled() == 3


def test_the_command(device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)  # nothing else waits so long
    words = ["first-calls", "--case", "4096", "--json", str(tmp_path / "first.jsonl")]
    if device.type != "cuda":
        assert command.main(words) == 2 and "needs an NVIDIA GPU" in capsys.readouterr().err
        return
    assert command.main(words) == 0
    start, call = map(json.loads, (tmp_path / "first.jsonl").read_text().splitlines())
    assert start["import_s"] > 0 and call["kind"] == "4096"
    assert call["milliseconds"] > 0 and 0 < call["again_ms"] < 1000
