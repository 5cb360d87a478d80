"""The CUDA kernels where there is no GPU: which instance a call gets, what is rendered, how it is built; and budgets, if nvcc is here."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import GPU, Attention

import emulation
from caps import TENSOR_CORE_CAPS, capped_calls
from closeness import E4M3_STEP, assert_matches_pipeline
from fp8attn import Recipe, reference
from fp8attn.backends import cuda_unavailable
from fp8attn.cuda import append, build, configs, fused_head, fused_small, general_quantize, portable, render, run
from fp8attn.cuda import quantize as cuda_quantize
from fp8attn.cuda.build import Binding, BuildError, Kernels
from fp8attn.cuda.configs import (
    ADDED_INSTANCES,
    INSTANCES,
    INT8_FUSED_Q_INSTANCES,
    INT8_INSTANCES,
    INT8_MASKED_INSTANCES,
    HopperConfig,
)
from fp8attn.cuda.oracle import oracle
from fp8attn.cuda.portable import PortableConfig
from fp8attn.device import ARCHITECTURES, SHARED_MEMORY, device_of
from fp8attn.prepare import call_of
from fp8attn.quantization import quantize
from instances import EVERY, H100, QUANTIZED, call


@pytest.mark.parametrize("config", EVERY, ids=lambda c: c.name)
def test_every_instance_fits_an_h100(config: HopperConfig) -> None:
    assert configs.unsupported_config(config, H100) is None
    assert config.shared_bytes <= SHARED_MEMORY[90]


def test_instances_are_told_apart_by_name() -> None:
    assert len({c.name for c in EVERY}) == len(EVERY) == len(set(EVERY))


@pytest.mark.parametrize("name", render.CONSTANTS)
def test_a_constant_is_written_once(name: str) -> None:
    """In Python; the kernels use it, and none defines it."""
    sources = [path.read_text() for path in build.source_files()]
    assert not [text for text in sources if re.search(rf"constexpr \w+ {name} =", text)]
    assert any(re.search(rf"\b{name}\b", text) for text in sources)


def test_constants_are_those_of_python_in_float32() -> None:
    lines = dict(re.findall(r"constexpr (?:int|float) (\w+) = (\S+);", render.constants()))
    assert lines.keys() == render.CONSTANTS.keys()
    for name, x in render.CONSTANTS.items():
        text = lines[name]
        assert int(text) == x if isinstance(x, int) else torch.tensor(float.fromhex(text.removesuffix("f"))).item() == torch.tensor(x).item()


@pytest.mark.parametrize(
    "change, reason",
    (
        (dict(stages=40), "shared memory"),
        (dict(registers=168), "registers"),
        (dict(registers=111), "registers"),
        (dict(head_dim=72), "multiples of 32"),
    ),
)
def test_what_does_not_fit_says_why(change: dict, reason: str) -> None:
    config = dataclasses.replace(INSTANCES[0], **change)
    assert reason in (configs.unsupported_config(config, H100) or "") and not configs.fits(config, H100)
    assert "needs sm_90" in (configs.unsupported_config(INSTANCES[0], ARCHITECTURES[89]) or "")


@pytest.mark.parametrize(
    "dim, value_dim, expected",
    (
        (16, 16, (64, 64)), (64, 64, (64, 64)), (72, 40, (96, 96)), (96, 96, (96, 96)), (96, 104, (128, 128)), (128, 128, (128, 128)),
        (192, 128, (192, 128)), (192, 192, (192, 192)), (136, 136, (192, 192)), (256, 256, (256, 256)),
    ),
)  # fmt: skip
def test_the_smallest_instance_serves(dim: int, value_dim: int, expected: tuple[int, int]) -> None:
    chosen = configs.choose(call(dim, value_dim), H100)
    assert (chosen.head_dim, chosen.value_dim) == expected and not chosen.general
    assert configs.unsupported_call(call(dim, value_dim), H100) is None


@pytest.mark.parametrize(
    "heads, length, causal, consumers",
    ((16, 512, False, 1), (30, 512, False, 2), (512, 1024, False, 4), (512, 1024, True, 4), (2, 16384, False, 4)),
)
def test_tiles_are_as_large_as_leaves_no_sm_idle(heads: int, length: int, causal: bool, consumers: int) -> None:
    q = torch.zeros(1, 1, length, 64).expand(1, heads, length, 64)
    problem = dataclasses.replace(call(), q=q, causal="top_left" if causal else "none")
    assert configs.choose(problem, H100).consumers == consumers


@pytest.mark.parametrize(
    "options, does",
    (
        ({}, "plain"),
        (dict(is_causal=True), "plain"),
        (dict(attn_mask=torch.ones(40, 40).bool()), "masked"),
        (dict(attn_mask=torch.ones(40, 40)), "added"),
        (dict(attn_mask=torch.ones(40, 40), scale=-0.1), "added"),
        (dict(attn_mask=torch.ones(40, 40).bool(), recipe=Recipe(k="token")), "general"),
        (dict(recipe=Recipe(k="token")), "general"),
        (dict(recipe=Recipe(smooth_q=True)), "general"),
        (dict(scale=-0.1), "general"),
        (dict(scale=0.0), "general"),
        (dict(recipe=Recipe(qk="int8")), "plain"),
        (dict(attn_mask=torch.ones(40, 40), recipe=Recipe(qk="int8")), "added"),
        (dict(attn_mask=torch.ones(40, 40).bool(), recipe=Recipe(qk="int8")), "masked"),
        (dict(recipe=Recipe(qk="int8", k="token")), "general"),
    ),
)
def test_instances_do_what_a_call_needs(options: dict, does: str) -> None:
    chosen = configs.choose(call(**options), H100)
    assert chosen.scores == does and chosen.does(call(**options))
    assert chosen.int8 == (options.get("recipe", Recipe()).qk == "int8")


@pytest.mark.parametrize(
    "options, reason",
    (
        (dict(recipe=Recipe(compute="f16")), "computes in f16"),
        (dict(recipe=Recipe(two_level=False)), "two_level=False"),
    ),
)
def test_refusals_say_why(options: dict, reason: str) -> None:
    assert reason in (configs.unsupported_call(call(**options), H100) or "")
    assert "sm_90" in (configs.unsupported_call(call(), ARCHITECTURES[100]) or "")


def test_direct_codes() -> None:
    """The e4m3 numbers nearest to 2^y when 2^f is taken as 1 + f: exact at integers, never off by more than a tenth, no bias."""
    assert torch.equal(reference.direct_code(torch.arange(-6.0, 9.0)), torch.exp2(torch.arange(-6.0, 9.0)))
    y = torch.linspace(-6, 8, 100_001)
    ratio = reference.direct_code(y) / torch.exp2(y)
    assert float(ratio.min()) > 0.9 and float(ratio.max()) < 1.1 and abs(float(ratio.mean()) - 1) < 2e-3
    exact = torch.exp2(y).to(torch.float8_e4m3fn).float() / torch.exp2(y)
    assert float((ratio - 1).square().mean().sqrt()) <= 1.22 * float((exact - 1).square().mean().sqrt())
    assert reference.direct_code(torch.tensor([-torch.inf, -40.0])).tolist() == [0.0, 0.0]
    assert reference.direct_code(torch.tensor([torch.nan])).isnan().all()


def test_everything_rendered_is_compiled_once() -> None:
    files = render.files(INSTANCES)
    assert {f"{c.name}.cu" for c in INSTANCES} | {"wgmma_shapes.h", "constants.h", "config.h", "build_block_mask.cu"} == files.keys()
    for c in INSTANCES:
        assert re.findall(r'^extern "C" cudaError_t launch_(\w+)\(', files[f"{c.name}.cu"], re.MULTILINE) == [c.name]


@pytest.mark.parametrize("n", (64, 72, 136))
def test_wgmma_wrappers_name_every_register_once(n: int) -> None:
    for text in re.findall(r"asm volatile\((.*?)\);", render.wgmma_shapes([n], [n]), re.DOTALL):
        outputs = re.split('"\\+[fr]"', text)
        assert len(outputs) == n // 2 + 1
        operands = [int(x) for x in re.findall(r"%(\d+)", text)]
        count = n // 2 + len(re.findall(r'"[rln]"\(', text))
        assert sorted(operands) == list(range(count))


def test_fingerprint_follows_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, binding = Kernels(INSTANCES, 90), Binding()
    before = build.fingerprint(kernels), build.fingerprint(binding)
    assert before == (build.fingerprint(Kernels(INSTANCES, 90)), build.fingerprint(Binding()))
    assert len({*before, build.fingerprint(Kernels(INSTANCES[:1], 90)), build.fingerprint(Kernels(INSTANCES, 89))}) == 4
    monkeypatch.setattr(torch, "__version__", "2.10.0+cu128")
    monkeypatch.setattr(torch.version, "cuda", "12.8")  # the stable ABI is that of any torch, and the CUDA runtime their own
    assert (build.fingerprint(kernels), build.fingerprint(binding)) == before


@pytest.mark.parametrize("name", ("binding.cpp", "params.h", "tensor_map.h", "hopper.cuh", "tile/mask.h"))
def test_fingerprint_follows_sources(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Kernels(INSTANCES, 90), Binding()
    before = [part.content() for part in parts]
    shutil.copytree(build.SOURCES, tmp_path / "cuda")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "cuda")
    assert [part.content() for part in parts] == before
    with open(tmp_path / "cuda" / name, "a") as file:
        file.write("// another\n")
    changed = [part.content() != text for part, text in zip(parts, before, strict=True)]
    assert changed == [name == "params.h" or name not in build.BINDING_SOURCES, name in build.BINDING_SOURCES]


def test_what_the_binding_includes_is_in_its_hash() -> None:
    included = {name for file in build.BINDING_SOURCES for name in re.findall(r'#include "(.*)"', (build.SOURCES / file).read_text())}
    assert included - {"constants.h"} | {"binding.cpp"} == set(build.BINDING_SOURCES), "constants.h is rendered"


def test_cache_folder_is_refused_if_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8ATTN_CACHE", str(tmp_path / "own"))
    assert build.cache_folder() == tmp_path / "own" and (tmp_path / "own").stat().st_mode & 0o077 == 0
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("FP8ATTN_CACHE", str(shared))
    with pytest.raises(BuildError, match="set FP8ATTN_CACHE to a folder of your own"):
        build.cache_folder()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(build, "cuda_home", lambda: str(tmp_path))
    assert "nvcc isn't here" in (build.missing.__wrapped__() or "")
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "'no-such-compiler' isn't here" in (build.missing.__wrapped__() or "")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "CPU build" in (build.missing.__wrapped__() or "")


def race(folder: str, barrier, log: str) -> None:
    """In a process of its own: build with a compiler that takes its time and leaves a trace."""
    import time

    kernels = Kernels(INSTANCES, 90)

    def slow(staging: Path, part: Kernels) -> None:
        with open(log, "a") as file:
            file.write("compiled\n")
        (staging / f"{part.name}.so").write_text("half")
        time.sleep(0.5)
        (staging / f"{part.name}.so").write_text("whole")

    os.environ["FP8ATTN_CACHE"] = folder
    build.PREBUILT = Path(folder) / "nothing"
    build.missing = lambda: None
    build.make_in = slow
    barrier.wait()
    made = build.build(kernels) / f"{kernels.name}.so"
    with open(log, "a") as file:
        file.write(made.read_text() + "\n")


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    """One compiles, all find what it made, whole."""
    log = tmp_path / "log"
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    processes = [context.Process(target=race, args=(str(tmp_path / "cache"), barrier, str(log))) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(log.read_text().split()) == ["compiled", "whole", "whole", "whole"]
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir() and "." in path.name]


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that can compile and has not: its cache."""
    monkeypatch.setenv("FP8ATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "missing", lambda: None)
    monkeypatch.setattr(build, "missing_compiler", lambda: None)
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "nothing")
    for name in ("_failures", "_libraries", "_having"):
        monkeypatch.setattr(build, name, {})
    monkeypatch.setattr(build, "NAMESPACE", f"fp8attn_{tmp_path.name}")
    return tmp_path / "cache"


def test_a_failed_build_leaves_nothing_and_says_why(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fails(staging: Path, part: build.Part) -> None:
        tried.append(part)
        (staging / "half").touch()
        raise BuildError("the CUDA kernels don't compile here: error: expected a ';'")

    monkeypatch.setattr(build, "make_in", fails)
    monkeypatch.setattr(build, "load_binding", lambda: None)
    for _ in range(2):  # the second time from memory
        with pytest.raises(BuildError, match="expected a ';'"):
            build.load()
    assert tried == [Kernels(INSTANCES, 90)]
    # kernels of other libraries may compile all the same
    assert "expected a ';'" in (build.unavailable(INSTANCES[0]) or "") and build.unavailable(INT8_INSTANCES[0]) is None
    assert build.unavailable(INSTANCES[0], 89) is None and "expected a ';'" in (build.unavailable() or "")
    assert not [path for path in fresh.iterdir() if path.is_dir()]


@pytest.mark.parametrize("step", ("compile", "load"))
def test_without_its_binding_no_library_is_of_use(fresh: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    tried = []

    def make_in(staging: Path, part: build.Part) -> None:
        tried.append(part)
        if step == "compile" and part == Binding():
            raise BuildError("the CUDA kernels don't compile here: no space left")

    def refuses(path: str) -> None:
        raise OSError(f"{path}: no space left")

    monkeypatch.setattr(build, "make_in", make_in)
    monkeypatch.setattr(torch.ops, "load_library", refuses)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: None)
    for instances in (INSTANCES, INT8_INSTANCES):
        with pytest.raises(BuildError, match="no space left"):
            build.load(instances)
        assert "no space left" in (build.unavailable(instances[0]) or "")
    assert sorted(str(part.name) for part in tried) == sorted(part.name for part in (Binding(), Kernels(INSTANCES, 90), Kernels(INT8_INSTANCES, 90)))


def test_what_does_not_load_says_why(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "make_in", lambda staging, part: (staging / f"{part.name}.so").write_text("no library"))
    monkeypatch.setattr(build, "load_binding", lambda: None)
    for _ in range(2):
        with pytest.raises(BuildError, match=rf"{len(INSTANCES)} CUDA kernels \(hopper, sm_90\) can't be loaded here: .*(ELF|short)"):
            build.load()


def test_the_binding_is_compiled_while_kernels_are(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all libraries; each waits for the other to be under way."""
    both = threading.Barrier(2, timeout=30)
    loaded = []

    def make_in(staging: Path, part: build.Part) -> None:
        loaded.append(part)
        if part in (Binding(), Kernels(INSTANCES, 90)):
            both.wait()

    # not defined in torch, where of an operator that is taken back its name stays, and torch.compile stumbles over it (torch 2.11)
    operators = SimpleNamespace()

    def load_library(path: str) -> None:
        operators.forward = operators.forward_from_fp16 = None

    monkeypatch.setattr(torch.ops, build.NAMESPACE, operators, raising=False)
    launcher = ctypes.CFUNCTYPE(None)(lambda: None)
    monkeypatch.setattr(build, "make_in", make_in)
    monkeypatch.setattr(torch.ops, "load_library", load_library)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: defaultdict(lambda: launcher))
    library = build.load()
    assert set(library.launchers) == set(INSTANCES) and build.load() is library
    assert build.load_with(INSTANCES[1], INSTANCES, 90) is library
    build.load(INT8_INSTANCES)
    assert loaded.count(Binding()) == 1 and len(loaded) == 3 and len(list(fresh.glob("*.lock"))) == 3


REPORT = """ptxas info    : Compiling entry function '_Zfoo' for 'sm_90a'
    24 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 24 bytes cumulative stack size, 12 bytes smem, 1248 bytes cmem[0]
"""


def test_resources_are_read_from_ptxas() -> None:
    expected = {"registers": 128, "stack": 24, "spill_stores": 16, "spill_loads": 8, "static_shared_bytes": 12}
    assert build.resources(REPORT) == expected


def pretended(staging: Path, part: build.Part) -> None:
    """What make_in leaves, without a compiler."""
    (staging / f"{part.name}.so").write_text("library")
    facts = part.facts({config.name: REPORT for config in part.instances}) if isinstance(part, Kernels) else {}
    build.write_meta(staging, part, 1.0, facts)


def test_build_meta_says_what_was_built(tmp_path: Path) -> None:
    pretended(tmp_path, Kernels(INSTANCES, 90))
    meta = json.loads((tmp_path / "build_meta.json").read_text())
    assert meta["arch"] == 90 and meta["content"] == Kernels(INSTANCES, 90).content() and "-std=c++20" in meta["cuda_flags"]
    assert meta["torch"] == torch.__version__ and meta["commit"] == build.commit()
    assert list(meta["instances"]) == list(meta["resources"]) == [c.name for c in INSTANCES]
    first = INSTANCES[0]
    assert meta["instances"][first.name] == dataclasses.asdict(first)
    assert meta["resources"][first.name] == build.resources(REPORT) | {"shared_bytes": first.shared_bytes}
    pretended(tmp_path, Binding())
    of_binding = json.loads((tmp_path / "build_meta.json").read_text())
    assert of_binding["content"] == Binding().content() and of_binding.keys() == meta.keys() - {
        "arch",
        "instances",
        "cuda_flags",
        "nvcc",
        "resources",
    }


def test_the_commit_is_the_checkouts_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"([0-9a-f]{40}(-dirty)?)?", build.commit() or "")
    around = tmp_path / "somebody"
    subprocess.run(["git", "init", "-q", str(around)], check=True)
    (around / "build.py").touch()
    monkeypatch.setattr(build, "SOURCES", around)
    assert build.commit() is None


@pytest.fixture
def brought(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with the Hopper kernel compiled ahead, on a machine without a compiler."""
    monkeypatch.setattr(build, "make_in", pretended)
    build.prebuild(tmp_path / "prebuilt", 90, (INSTANCES,))
    monkeypatch.setattr(build, "missing", lambda: "nvcc isn't here")
    monkeypatch.setattr(build, "make_in", lambda *_: pytest.fail("it compiles"))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")


@pytest.mark.usefixtures("brought")
def test_what_a_wheel_brings_needs_no_compiler() -> None:
    for part in (Kernels(INSTANCES, 90), Binding()):
        folder = build.build(part)
        assert {path.name for path in folder.iterdir()} == {f"{part.name}.so", "build_meta.json"} and folder.parent == build.PREBUILT
    assert build.unavailable() is None and (build.built() or {})["arch"] == 90


@pytest.mark.usefixtures("brought")
@pytest.mark.parametrize(
    "change, useless", (("sources", (True, False)), ("torch", (False, False)), ("cuda", (False, False)), ("arch", (True, False)))
)
def test_what_a_wheel_brings_is_of_these_sources_and_any_torch(change: str, useless: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    if change == "sources":
        monkeypatch.setattr(build, "source_files", lambda: [])
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "2.10.0+cu128")
    if change == "cuda":
        monkeypatch.setattr(torch.version, "cuda", "12.8")
    for part, refused in zip((Kernels(INSTANCES, 89 if change == "arch" else 90), Binding()), useless, strict=True):
        with pytest.raises(BuildError, match="nvcc isn't here") if refused else contextlib.nullcontext():
            build.build(part)


def test_a_wheels_binding_is_compiled_once(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again for each architecture."""
    compiled_parts: list[build.Part] = []
    monkeypatch.setattr(build, "make_in", lambda staging, part: compiled_parts.append(part) or pretended(staging, part))
    for arch in (80, 90):
        build.prebuild(tmp_path / "prebuilt", arch, (INSTANCES,))
    assert compiled_parts == [Binding(), Kernels(INSTANCES, 80), Kernels(INSTANCES, 90)]


def test_libraries_of_an_architecture() -> None:
    by_themselves = fused_small.INSTANCES, fused_head.INSTANCES, cuda_quantize.INSTANCES, general_quantize.INSTANCES
    groups = build.groups(90)
    assert set(by_themselves) < set(groups) and len({config for group in groups for config in group}) == sum(map(len, groups))
    assert all(
        configs.instances(c.scores, c.int8, c.fuse_q_quant) in groups and c in configs.instances(c.scores, c.int8, c.fuse_q_quant) for c in EVERY
    )
    for arch in (80, 89):
        assert {c for group in build.groups(arch) for c in group if not isinstance(c, PortableConfig)} == {
            *general_quantize.INSTANCES,
            *append.INSTANCES,
        }
    # of each head dim one of e4m3 and one of int8, each for plain scores, windows and soft caps; the general quantizer;
    # append; on Hopper of prefill over pages eight of each head dim, half of packed queries and half under soft caps, four
    # of decoding, half with windows, soft caps and sinks, six of other engines' caches, half of them for many rows, and
    # twelve of packed sequences, half of which quantize queries
    assert all(len(build.groups(arch)) == count and all(build.groups(arch)) for arch, count in ((80, 20), (89, 16), (90, 89)))


@pytest.mark.gpu
def test_a_prebuilt_library_loads_without_nvcc(device: torch.device, tmp_path: Path) -> None:
    """One instance, compiled ahead and loaded by a process that can't compile."""
    missing = cuda_unavailable(device)
    if missing is not None:
        pytest.skip(missing)
    config = portable.BEST[64]["11 register operands"]
    build.prebuild(tmp_path, device_of(device).arch, ((config,),))
    script = (
        "import pathlib, sys, torch, fp8attn\n"
        "from fp8attn.cuda import build, portable\n"
        "build.PREBUILT, build.missing = pathlib.Path(sys.argv[1]), lambda: 'no compiler'\n"
        "print(build.load((portable.BEST[64]['11 register operands'],), int(sys.argv[2])).operators.forward.default)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), str(device_of(device).arch)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "forward" in done.stdout, done.stderr


def test_a_library_of_kernels_knows_no_torch(nvcc: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled and linked as on a GPU's machine, with a CUDA runtime of its own; without a GPU it says that it can't run."""
    monkeypatch.setattr(build, "cuda_home", lambda: str(Path(nvcc).parent.parent))
    config = portable.LADDER[64]["0 scalar"]
    kernels = Kernels((config,), 80)
    path = build.build(kernels) / f"{kernels.name}.so"
    listed = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=True).stdout
    needed = " ".join(line.split()[0] for line in listed.splitlines())  # without addresses, which may have a "c10" in them
    assert not [name for name in ("cudart", "torch", "c10") if name in needed]
    monkeypatch.setattr(build, "load_binding", lambda: emulation.binding()[0])
    library = build.load((config,), 80)
    if not GPU:
        rows, floats = torch.zeros(1, 1, 16, 64, dtype=torch.uint8), torch.zeros(1, 1, 16, 64)
        tensors = (rows, floats, rows, floats, rows, floats, None, None, None, floats, *[None] * 5)
        with pytest.raises(RuntimeError, match="the CUDA kernel wasn't launched"):
            library.operators.forward.default(library.launchers[config], 0, 0, 0, 0, 1, 1, 1, 1, 16, 1.0, 0, *tensors, 0, 0.0, None, None)


KINDS: tuple[render.Config, ...] = (
    INSTANCES[0],
    next(c for c in INSTANCES if c.general),
    INT8_MASKED_INSTANCES[0],
    ADDED_INSTANCES[0],
    INT8_INSTANCES[0],
    INT8_FUSED_Q_INSTANCES[0],
    fused_small.INSTANCES[0],
    fused_head.INSTANCES[0],
    cuda_quantize.INSTANCES[0],
    *general_quantize.INSTANCES,
    append.INSTANCES[0],
)


@pytest.mark.parametrize("config", [pytest.param(c, id=c.name, marks=() if c is INSTANCES[0] else pytest.mark.thorough) for c in KINDS])
def test_the_host_compiler_takes_an_instance(config: render.Config, nvcc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each kind as an object, as a library is made of: what nvcc hands it isn't what was written, and budgets are of device code alone."""
    monkeypatch.setattr(build, "cuda_home", lambda: str(Path(nvcc).parent.parent))
    kernels = Kernels((config,), 90)
    assert kernels.compile_into(tmp_path)["instances"].keys() == {config.name}
    objects = [*tmp_path.glob("*.o")]
    assert objects and all(path.stat().st_size for path in (*objects, tmp_path / f"{kernels.name}.so"))


@pytest.mark.gpu
def test_same_bits_a_thousand_times(device: torch.device, sdpa: Attention) -> None:
    """A bit that moves is a race."""
    generator = torch.Generator(device).manual_seed(6)
    q, k, v = (torch.randn(2, 4, 777, 64, device=device, generator=generator, dtype=torch.bfloat16) for _ in range(3))
    operands = quantize(q, k, v, Recipe())
    expected = sdpa(*operands, is_causal=True)
    different = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(1000):
        different += (sdpa(*operands, is_causal=True) != expected).sum()
    assert int(different) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("config", INSTANCES, ids=lambda c: c.name)
def test_tiles_after_a_ctas_first(config: HopperConfig, device: torch.device) -> None:
    """More tiles than SMs, so that CTAs go from one to the next, in every dtype of the output."""
    reason = configs.unsupported_config(config, device_of(device))
    if reason is not None:
        pytest.skip(reason)
    generator = torch.Generator(device).manual_seed(7)
    heads = 1 + device_of(device).sm_count // 2
    q, k, v = (torch.randn(1, heads, 700, dim, device=device, generator=generator) for dim in (config.head_dim, config.head_dim, config.value_dim))
    operands = quantize(q, k, v, Recipe())
    for is_causal in (False, True):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            call = call_of(*operands, is_causal=is_causal, return_lse=True, out_dtype=dtype)
            out, lse = run.forward(call, device_of(device), config)
            expected, expected_lse = oracle(operands, call, config)
            assert_matches_pipeline(out, expected, emulated=False)
            torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=E4M3_STEP)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [c for c in QUANTIZED if c.general], ids=lambda c: c.name)
def test_what_there_is_of_single_keys(config: HopperConfig, device: torch.device) -> None:
    """Scales of keys, means of queries, and a mask that says the same to all rows and hides a key that isn't finite: each alone and all together,
    over several tiles of a CTA. It comes by copies that only a barrier orders: a bit that moves is a race."""
    reason = configs.unsupported_config(config, device_of(device))
    if reason is not None:
        pytest.skip(reason)
    generator = torch.Generator(device).manual_seed(8)
    heads = 1 + device_of(device).sm_count // 2
    q, k, v = (
        torch.randn(1, heads, n, dim, device=device, generator=generator)
        for n, dim in ((500, config.head_dim), (701, config.head_dim), (701, config.value_dim))
    )
    q += torch.linspace(-2, 2, 500, device=device)[:, None]  # groups of queries have different means
    k *= torch.linspace(0.3, 2, 701, device=device)[:, None]
    k[:, :, 300, 3] = torch.nan
    hides = torch.rand(1, 1, 1, 701, device=device, generator=generator) < 0.3
    hides[..., 300] = True
    masks = {"bool": ~hides, "half": torch.randn(hides.shape, device=device, generator=generator).half().masked_fill(hides, -torch.inf)}
    recipe = Recipe(qk="int8" if config.int8 else "e4m3")
    every = dict(k="token", smooth_q=True), "half" if config.added else "bool"
    for options, mask in ((dict(), "bool"), (dict(k="token"), None), (dict(smooth_q=True), None), every):
        operands = quantize(q, k if mask else k.nan_to_num(0.0), v, dataclasses.replace(recipe, **options))
        call = call_of(*operands, attn_mask=None if mask is None else masks[mask], return_lse=True, out_dtype=torch.float32)
        out, lse = run.forward(call, device_of(device), config)
        expected, expected_lse = oracle(operands, call, config)
        assert out.isfinite().all()
        assert_matches_pipeline(out, expected, emulated=False)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=E4M3_STEP)
        different = sum((run.forward(call, device_of(device), config)[0] != out).sum() for _ in range(20))
        assert int(different) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("config", [c for c in QUANTIZED if c.softcap], ids=lambda c: c.name)
def test_soft_caps(config: HopperConfig, device: torch.device) -> None:
    """Rows near the cap and far below it, and exactly the rows that see a key that isn't finite are NaN."""
    reason = configs.unsupported_config(config, device_of(device))
    if reason is not None:
        pytest.skip(reason)
    for nonfinite in (False, True):
        for operands, capped in capped_calls(config, device, 70 + 2 * config.tile_rows, nonfinite, TENSOR_CORE_CAPS):
            out, lse = run.forward(capped, device_of(device), config)
            expected, expected_lse = oracle(operands, capped, config)
            assert nonfinite == bool(expected.isnan().any())
            assert_matches_pipeline(out, expected, False, expected_lse)
            torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=E4M3_STEP, equal_nan=True)
            different = sum((run.forward(capped, device_of(device), config)[0] != out).logical_and(out.isfinite()).sum() for _ in range(5))
            assert int(different) == 0
