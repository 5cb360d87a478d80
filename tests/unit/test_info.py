"""fp8attn.info() and python -m fp8attn: they try what they say works, and on a machine that is broken they say how, on as many lines."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
from conftest import GPU

import fp8attn
from fp8attn.cuda import build
from fp8attn.cuda.configs import INSTANCES
from fp8attn.device import ARCHITECTURES
from fp8attn.triton import probe, run
from machines import CACHES, Machine

module = importlib.import_module("fp8attn.info")  # the package has a function of this name

BACKENDS = ("backend triton", "backend cuda", "backend reference")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One with an H100, as far as info() is told, that can compile; Triton isn't tried on it."""
    made = Machine(tmp_path, monkeypatch)
    for name, value in {"is_available": True, "device_count": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(module, "device_of", lambda device: ARCHITECTURES[90])
    monkeypatch.setattr(module, "cuda_unavailable", lambda device: None)
    monkeypatch.setattr(probe, "check_sum", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def test_what_works_was_tried() -> None:
    lines = fp8attn.info()
    assert lines["backend reference"] == "works"
    assert lines["backend triton"] == ("works" if GPU else "works, in Triton's interpreter")
    assert all(isinstance(text, str) and "\n" not in text for text in lines.values())


def test_the_callers_random_numbers_and_settings_stay() -> None:
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", torch.bfloat16):
            assert fp8attn.info()["backend reference"] == "works"
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(torch.randn(3), expected)


@pytest.mark.parametrize("backend", ("triton", "reference"))
@pytest.mark.skipif(GPU, reason="the interpreter's")
def test_a_wrong_answer_does_not_work(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = module.sdpa
    monkeypatch.setattr(module, "sdpa", lambda *args, **options: own(*args, **options) + (0.5 if options["backend"] == backend else 0))
    lines = fp8attn.info()
    assert "the mean of 0 to 15 came out as 8.0" in lines[f"backend {backend}"] and "works" not in lines[f"backend {backend}"]


@pytest.mark.filterwarnings("error:Conversion of an array with ndim > 0")  # NumPy 2.4 refuses what earlier ones warn of
@pytest.mark.skipif(GPU, reason="the interpreter's")
@pytest.mark.skipif(module._release(triton.__version__) >= (3, 7), reason="Triton 3.7 goes with every NumPy")
@pytest.mark.parametrize("interpreting", (True, False))
def test_an_interpreter_that_its_numpy_breaks(interpreting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said with its cure, also before TRITON_INTERPRET is set, which alone wouldn't help."""
    own = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.4.6" if name == "numpy" else own(name))
    if not interpreting:
        monkeypatch.setattr(module, "has_kernels", lambda device: False)
        monkeypatch.setattr("fp8attn.ops.INTERPRETING", False)
    line = fp8attn.info()["backend triton"]
    assert "Triton's interpreter fails: " in line and f"Triton {triton.__version__} needs NumPy below 2.4, this is 2.4.6" in line
    assert "pip install 'numpy<2.4'" in line and "works" not in line
    assert ("TRITON_INTERPRET=1" in line) is not interpreting


@pytest.mark.skipif(GPU, reason="the interpreter's")
def test_before_the_interpreter_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_kernels", lambda device: False)
    monkeypatch.setattr("fp8attn.ops.INTERPRETING", False)
    line = fp8attn.info()["backend triton"]
    assert "set TRITON_INTERPRET=1 before Python starts" in line and "fails" not in line


@pytest.mark.parametrize("version, cure", ((None, "needs NumPy, which isn't here: pip install 'numpy<2.4'"), ("2.3.5", "NumPy 2.3.5")))
def test_other_faults_of_the_interpreter(version: str | None, cure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    def check() -> None:
        try:
            raise ValueError("the reason")
        except ValueError as error:
            raise RuntimeError("InterpreterError") from error

    monkeypatch.setattr(importlib.metadata, "version", told)
    said = module._interpreter_fault(check)
    assert said is not None and said.startswith("Triton's interpreter fails: ValueError: the reason; ") and cure in said
    assert module._interpreter_fault(lambda: None) is None


def test_the_tried_kernel_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    probe.check_sum(torch.device("cuda" if GPU else "cpu"))

    class Wrong:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda x, count, out: out.fill_(5.0)

    monkeypatch.setattr(probe, "_sum_kernel", Wrong())
    with pytest.raises(RuntimeError, match=r"a kernel that adds 1, 2 and 3 gave 5\.0"):
        probe.check_sum(torch.device("cpu"))


def test_a_gpu_whose_triton_cannot_compile(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    assert fp8attn.info()["backend triton"] == "works"
    monkeypatch.setattr(probe, "check_sum", no_compiler)
    assert fp8attn.info()["backend triton"] == "fails: RuntimeError: Failed to find C compiler. Please specify via CC environment variable."
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "not tried" in fp8attn.info()["backend triton"]


def test_a_triton_whose_gluon_is_another(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fp8attn.info()["triton hopper kernel, gpu 0"].startswith("works")
    monkeypatch.setattr(run, "hopper_unavailable", "this Triton's Gluon can't build it: no module")
    assert fp8attn.info()["triton hopper kernel, gpu 0"] == "this Triton's Gluon can't build it: no module"


# the CUDA kernels


def test_kernels_that_are_not_compiled_yet(machine: Machine) -> None:
    assert fp8attn.info()["backend cuda"] == f"works, is compiled on first use, in {machine.cache}"
    assert not list(machine.cache.iterdir())


@pytest.fixture
def compiled(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the kernels that it would load, if a fake compiler could make them; their binding is there, too."""
    monkeypatch.setattr(build.Binding, "compile_into", lambda part, folder: dict([(folder / "binding.so").touch()][:0]))
    folder = build.build(build.Kernels(INSTANCES, 90))
    assert "compiled on first use" in fp8attn.info()["backend cuda"]  # the binding isn't
    build.build(build.Binding())
    return folder


def test_compiled_kernels_are_loaded(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = fp8attn.info()["backend cuda"]
    assert line.startswith("cuda: ") and "can't be loaded here" in line and str(compiled) in line
    monkeypatch.setattr(build, "load", lambda *_: None)
    assert fp8attn.info()["backend cuda"] == "works, compiled already"


def test_a_spoiled_record_is_a_line(compiled: Path) -> None:
    (compiled / "build_meta.json").write_text("{")
    line = fp8attn.info()["backend cuda"]
    assert line.startswith("cuda: ") and f"{compiled / 'build_meta.json'} can't be read" in line and f"delete {compiled}" in line


@pytest.mark.parametrize("fault", CACHES)
def test_a_cache_that_cannot_be_used_is_a_line(machine: Machine, fault: str) -> None:
    sabotage, expected = CACHES[fault]
    sabotage(machine)
    line = fp8attn.info()["backend cuda"]
    assert line.startswith("cuda: ") and expected in line and "set FP8ATTN_CACHE to a folder" in line


@pytest.mark.parametrize("name, value", (("MAX_JOBS", "auto"), ("FP8ATTN_COMPILE_TIMEOUT", "soon"), ("CXX", "'g++"), ("PYTORCH_NVCC", "none nvcc")))
def test_a_wrong_value_is_a_line(machine: Machine, name: str, value: str) -> None:
    machine.patch.setenv(name, value)
    line = fp8attn.info()["backend cuda"]
    assert line.startswith("cuda: ") and name in line and repr(value) in line


def test_a_compiler_that_does_not_run_is_a_line(machine: Machine) -> None:
    machine.nvcc.write_text("#!/bin/sh\necho 'wrong\narchitecture'; exit 1\n")
    line = fp8attn.info()["backend cuda"]
    assert line.startswith("cuda: ") and "failed with exit code 1: wrong architecture" in line


def test_long_words_are_cut_and_say_so() -> None:
    assert module._line(lambda: "a\n b ") == "a b"
    line = module._line(lambda: "x" * (module.LONGEST + 7))
    assert line == "x" * module.LONGEST + " … (7 more characters)"


BROKEN = """
import runpy, sys, torch
def broken(*args, **options):
    raise OSError(5, "Input/output error ×")
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 2
import fp8attn
from fp8attn import api, ops, device
module = sys.modules["fp8attn.info"]
for name in ("device_of", "cuda_unavailable", "triton_unavailable", "has_kernels", "sdpa", "_cuda_version"):
    setattr(module, name, broken)
from fp8attn.triton import probe
probe.check_sum = broken
torch.cuda.is_current_stream_capturing = broken
runpy.run_module("fp8attn", run_name="__main__")
"""


@pytest.mark.parametrize("encoding", ("utf-8", "ascii"))
def test_on_a_broken_machine_every_line_is_printed(encoding: str) -> None:
    """Also to a terminal that can't print all characters."""
    root = str(Path(fp8attn.__file__).resolve().parent.parent)
    environment = os.environ | {"PYTHONPATH": root, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode(encoding).splitlines()
    names = ["python", "torch", "triton", "cuda"]
    names += [f"{name}gpu {index}" for index in range(2) for name in ("", "triton hopper kernel, ", "cuda kernels, ")]
    assert [re.split(r"  +", line)[0] for line in lines] == [*names, *BACKENDS]
    sign = "×" if encoding == "utf-8" else r"\xd7"
    assert all(line.endswith(f"fails: OSError: [Errno 5] Input/output error {sign}") for line in lines[3:])


def test_interpreting_without_numpy_says_what_to_install() -> None:
    """Where kernels are decorated: Triton's own error names no cure."""
    script = "import sys; sys.modules['numpy'] = None; import fp8attn; fp8attn.triton.quantize"
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "NumPy isn't installed" in done.stderr.splitlines()[-1] and "fp8attn[interpreter]" in done.stderr
