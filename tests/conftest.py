"""Where the tests run, how many examples hypothesis draws, and the record of a green run on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import math
import os
import platform
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

gc.set_threshold(50_000, 20, 20)  # torch's modules and the tests are a million objects, which stay

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
THREADS = max((os.cpu_count() or 1) // WORKERS, 1)
"""Of torch on the CPU: a worker's would wait for another's."""
if WORKERS > 1 or "OMP_NUM_THREADS" not in os.environ:  # workers inherit what the process that started them has set for itself
    os.environ["OMP_NUM_THREADS"] = str(THREADS)  # of processes that tests start, too
if WORKERS > 1:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch  # noqa: E402

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))  # a plugin may have imported it before; a number for each level

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything is decorated

import pytest  # noqa: E402
import triton  # noqa: E402
from hypothesis import HealthCheck, Phase, settings  # noqa: E402

import emulation  # noqa: E402
import fp8attn  # noqa: E402
import interpreter  # noqa: E402
import sharing  # noqa: E402
import tiers  # noqa: E402
from bench.machine import commit, keep_triton_cache  # noqa: E402
from emulated import Emulated  # noqa: E402
from fp8attn import Recipe, eager  # noqa: E402
from fp8attn.backends import cuda_unavailable  # noqa: E402
from fp8attn.cuda import build  # noqa: E402
from fp8attn.cuda.build import BuildError, Kernels  # noqa: E402
from fp8attn.device import device_of  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "bench" / "results" / "gpu_tests.json"
SECONDS = ROOT / "bench" / "results" / "gpu_test_seconds.json"
"""How long the long tests of the recorded run took."""
LONG = 3.0
"""Seconds of a test that is long."""

common = dict(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.register_profile("default", max_examples=8, **common)
# kernels are compiled for most examples there: shrinking one would take longer than all the tests
on_gpu = dict(phases=[Phase.explicit, Phase.reuse, Phase.generate], **common)
# and again for other examples: here they are the same in every run, and in the thorough tier and without a GPU they are not
settings.register_profile("gpu", max_examples=16, derandomize=True, **on_gpu)
settings.register_profile("thorough", max_examples=200, **common)
settings.register_profile("thorough gpu", max_examples=10_000 // WORKERS, **on_gpu)

if GPU:
    sharing.compile_once()
else:
    interpreter.quicken()

keep_triton_cache()  # workers would compile what others have


PART, PARTS = (int(x) for x in os.environ.get("FP8ATTN_TESTS", "1/1").split("/"))
"""Of the tests every PARTS-th, from the PART-th on: where no run may take as long as all of them take."""

started = pytest.StashKey[float]()
deadline = pytest.StashKey[tiers.Deadline]()
collected = pytest.StashKey[list[pytest.Item]]()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if GPU else "cpu")


@pytest.fixture(autouse=True)
def no_calls_before() -> None:
    """What a test pretends isn't what another one keeps."""
    eager.forget()


@dataclasses.dataclass(frozen=True)
class Attention:
    """fp8attn.sdpa by one backend."""

    backend: str

    def __call__(self, *args, recipe: Recipe | None = None, **kwargs):
        return fp8attn.sdpa(*args, recipe=recipe or Recipe(), backend=self.backend, **kwargs)


@pytest.fixture(scope="session", params=("triton", "cuda"))
def sdpa(request: pytest.FixtureRequest, device: torch.device) -> Attention:
    if request.param == "cuda":
        missing = cuda_unavailable(device)
        if missing is not None:
            pytest.skip(missing)
    return Attention(request.param)


@pytest.fixture
def whole_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For tests that take tens of gigabytes: one at a time among all workers, who give back what they don't use."""
    base = tmp_path_factory.getbasetemp()
    with sharing.exclusive((base.parent if WORKERS > 1 else base) / "whole_gpu.lock"):
        yield
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def nvcc() -> str:
    """The CUDA compiler."""
    path = Path(build.cuda_home() or "/usr/local/cuda") / "bin" / "nvcc"
    if not path.exists():
        pytest.skip("nvcc isn't here")
    return str(path)


@pytest.fixture(scope="session")
def emulated() -> Emulated:
    reason = emulation.missing()
    if reason is not None:
        pytest.skip(reason)
    return Emulated()


@pytest.fixture(scope="session")
def share(request: pytest.FixtureRequest) -> int:
    """Of a test's examples, which part."""
    return request.param


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers", "tests of fp8attn")
    group.addoption("--thorough", action="store_true", help="all tests, with 10,000 drawn examples each on a GPU and 200 without")
    group.addoption("--tenth", type=int, metavar="N", help=f"the default tier, and of the thorough one the part N of 0 to {tiers.TENTHS - 1}")
    group.addoption("--minutes", type=float, metavar="M", help="begin no thorough test later than M minutes after the start")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Thorough, every worker draws its share of a test's examples."""
    if GPU and metafunc.config.option.thorough and is_drawn(metafunc.function):
        metafunc.fixturenames.append("share")
        metafunc.parametrize("share", range(WORKERS), indirect=True)


def is_drawn(test: object) -> bool:
    return getattr(test, "is_hypothesis_test", False)


def pytest_configure(config: pytest.Config) -> None:
    tenth = config.option.tenth
    if tenth is not None and not 0 <= tenth < tiers.TENTHS:
        raise pytest.UsageError(f"--tenth is {tenth}; it must be 0 to {tiers.TENTHS - 1}")
    config.stash[started] = time.time()
    config.stash[deadline] = tiers.Deadline(config.option.minutes)
    name = "thorough" if config.option.thorough else "default"
    settings.load_profile({"thorough": "thorough gpu", "default": "gpu"}[name] if GPU else name)


def pytest_sessionstart(session: pytest.Session) -> None:
    if GPU and not hasattr(session.config, "workerinput") and cuda_unavailable(torch.device("cuda")) is None:
        os.environ.setdefault("MAX_JOBS", "1")  # a compiler that takes all instances of a library needs the least CPU time
        threading.Thread(target=compile_ahead, daemon=True).start()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str | None:
    return f"compiling {len(build.groups(device_of(torch.device('cuda')).arch))} libraries of CUDA kernels, beside the tests" if GPU else None


def compile_ahead() -> None:
    """All libraries that the GPU may load, several at a time; a test that needs one earlier waits for it, or compiles it."""
    arch = device_of(torch.device("cuda")).arch
    with contextlib.suppress(BuildError), ThreadPoolExecutor() as pool:
        list(pool.map(build.build, [Kernels(group, arch) for group in build.groups(arch)]))


def pytest_itemcollected(item: pytest.Item) -> None:
    if GPU and item.get_closest_marker("compiles"):
        item.add_marker(pytest.mark.thorough)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if tiers.is_thorough(item) and item.config.stash[deadline].has_passed():
        pytest.skip(f"it would begin more than {item.config.option.minutes:g} minutes after the start")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[collected] = [*items]
    for item in [] if GPU else tiers.left_out(items):
        item.add_marker(pytest.mark.thorough)
    items[:] = tiers.chosen(items, config.option.thorough, config.option.tenth)[PART - 1 :: PARTS]
    kept = {*items}
    config.hook.pytest_deselected(items=[item for item in config.stash[collected] if item not in kept])
    for item in items:
        if not GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if GPU and item.get_closest_marker("anywhere") and not config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="needs no GPU: machines without one run it, and here `-m anywhere`"))
    if GPU:
        items[:] = dealt(items, WORKERS, json.loads(SECONDS.read_text()) if SECONDS.exists() else {})


def dealt(items: list[pytest.Item], workers: int, seconds: dict[str, float]) -> list[pytest.Item]:
    """Long tests first in each of the equal parts of the list that xdist's worksteal starts its workers with; then the others.

    The first part has all tests that take the whole GPU, which would otherwise wait for each other, and no other long test if there are more
    parts. Neighbours among the others stay together: they share kernels.

    Args:
        seconds: of tests that took LONG in an earlier run. Of others, those that hypothesis draws compile most, then
            those that need the GPU.
    """

    def length(item: pytest.Item) -> float:
        return seconds.get(item.nodeid) or (2 if is_drawn(getattr(item, "obj", None)) else int(item.get_closest_marker("gpu") is not None))

    alone = [item for item in items if "whole_gpu" in item.fixturenames]
    rest = [item for item in items if "whole_gpu" not in item.fixturenames]
    long = sorted(filter(length, rest), key=length, reverse=True)
    others = [item for item in rest if not length(item)]
    sharing = max(workers - 1, 1) if alone else workers
    parts: list[pytest.Item] = []
    for i in range(workers):
        mine = long[workers - 1 - i :: sharing] if i >= workers - sharing else []
        if i == 0:
            mine = alone + mine
        size = (len(items) + i) // workers - len(mine)
        parts += [*mine, *others[: max(size, 0)]]
        others = others[max(size, 0) :]
    return parts + others


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A green run of everything on a GPU leaves a record, or of a part, beside other parts of the same commit."""
    everything = not session.config.option.keyword and not session.config.option.markexpr and len(session.config.args) == 1
    if not GPU or exitstatus != 0 or not everything or hasattr(session.config, "workerinput"):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    counts = {outcome: len(reporter.stats.get(outcome, [])) for outcome in ("passed", "failed", "skipped")}
    counts["seconds"] = round(time.time() - session.config.stash[started])
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.stdout.strip().splitlines()[0] if driver.stdout else "unknown",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "tier": "thorough" if session.config.option.thorough else "default",
        "hypothesis_examples": settings.default.max_examples if settings.default else None,
    }
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    RECORD.write_text(json.dumps(recorded(before, facts, f"{PART}/{PARTS}", counts), indent=2) + "\n")
    if PARTS == 1:
        reports = itertools.chain(*(reporter.stats.get(outcome, []) for outcome in ("", "passed")))  # "": setups
        SECONDS.write_text(json.dumps(long_tests((report.nodeid, report.duration) for report in reports), indent=1) + "\n")


def long_tests(durations: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Seconds of the long tests, the longest first, of the durations of all parts of tests."""
    total: Counter[str] = Counter()
    for name, seconds in durations:
        total[name] += seconds  # type: ignore[assignment]
    return {name: round(seconds, 1) for name, seconds in total.most_common() if seconds >= LONG}


def residues(part: str, modulus: int) -> set[int]:
    """Which tests a part is of, by their number modulo a multiple of its denominator."""
    first, step = (int(x) for x in part.split("/"))
    return set(range(first - 1, modulus, step))


def recorded(before: dict[str, Any], facts: dict[str, Any], part: str, counts: dict[str, int]) -> dict[str, Any]:
    """A record with one more part: beside those of the record before that are of other tests, if they are of the same facts, and what they count
    together."""
    parts = {}
    if all(before.get(name) == fact for name, fact in facts.items()):
        for name, one in before.get("parts", {}).items():
            modulus = math.lcm(*(int(x.split("/")[1]) for x in (name, part)))
            if residues(name, modulus).isdisjoint(residues(part, modulus)):
                parts[name] = one
    parts[part] = counts
    total = {name: sum(one[name] for one in parts.values()) for name in counts}
    return {**facts, "date": time.strftime("%Y-%m-%d", time.gmtime()), **total, "parts": dict(sorted(parts.items()))}
