"""Where the tests run, how many examples hypothesis draws, and the record of a green run on a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import time
from pathlib import Path

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything is decorated

import pytest  # noqa: E402
import triton  # noqa: E402
from hypothesis import HealthCheck, Phase, settings  # noqa: E402

import fp8attn  # noqa: E402
from bench.machine import commit  # noqa: E402
from fp8attn import Recipe  # noqa: E402
from fp8attn.api import cuda_missing  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "bench" / "results" / "gpu_tests.json"

common = dict(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.register_profile("dev", max_examples=15, **common)
settings.register_profile("ci", max_examples=25, **common)
# kernels are compiled for most examples there: shrinking one would take longer than all the tests
on_gpu = dict(phases=[Phase.explicit, Phase.reuse, Phase.generate], **common)
settings.register_profile("gpu", max_examples=64, **on_gpu)
settings.register_profile("thorough", max_examples=10_000, **on_gpu)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("gpu" if GPU else "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if GPU else "cpu")


@dataclasses.dataclass(frozen=True)
class Attention:
    """fp8attn.sdpa by one backend."""

    backend: str

    def __call__(self, *args, recipe: Recipe | None = None, **kwargs):
        return fp8attn.sdpa(*args, recipe=recipe or Recipe(), backend=self.backend, **kwargs)


@pytest.fixture(scope="session", params=("triton", "cuda"))
def sdpa(request: pytest.FixtureRequest, device: torch.device) -> Attention:
    if request.param == "cuda":
        missing = cuda_missing(device)
        if missing is not None:
            pytest.skip(missing)
    return Attention(request.param)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[started] = time.time()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if not GPU and "gpu" in item.keywords:
            item.add_marker(skip)


started = pytest.StashKey[float]()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A green run of everything on a GPU leaves a record."""
    everything = not session.config.option.keyword and not session.config.option.markexpr and len(session.config.args) == 1
    if not GPU or exitstatus != 0 or not everything or hasattr(session.config, "workerinput"):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    counts = {outcome: len(reporter.stats.get(outcome, [])) for outcome in ("passed", "failed", "skipped")}
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    record = {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.stdout.strip().splitlines()[0] if driver.stdout else "unknown",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(time.time() - session.config.stash[started]),
        "hypothesis_examples": settings.default.max_examples if settings.default else None,
        **counts,
    }
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
