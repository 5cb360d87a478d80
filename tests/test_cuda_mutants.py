"""The CUDA kernel broken on purpose, in its source: the parity test must see each of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from closeness import assert_matches_pipeline

import fp8attn
from fp8attn import reference
from fp8attn.api import call_of, cuda_missing
from fp8attn.cuda import build
from fp8attn.cuda import run as cuda
from fp8attn.cuda.configs import INSTANCES, KEYS
from fp8attn.device import device_of

TESTS = Path(__file__).resolve().parent

SEEN = "the parity test saw it"

MUTANTS = {
    "mask off by one": ("tile/mask.h", "min(row, q_length - 1) + causal_offset + 1)", "min(row, q_length - 1) + causal_offset + 2)"),
    "end of keys forgotten": ("tile/mask.h", "max(min(kv_length, min(row", "max(min(1 << 30, min(row"),
    "missing rescale": ("tile/softmax.h", "alpha[r] = ptx::exp2_approx(m[r] - origin[r]);", "alpha[r] = 1.0f;"),
    "stale maximum": ("tile/softmax.h", "m[r] = m_new;", "if (m[r] == -INFINITE) m[r] = m_new;"),
    "wrong scale": ("hopper.cuh", "(by_key ? 1.0f : shared.k_scale[stage])", "1.0f"),
    "scale of another block": ("hopper.cuh", "*(k_scale += scale_step)", "*k_scale"),
    "scale of another row": ("hopper.cuh", "facts.row_scale[f.row + 8 * r]", "facts.row_scale[f.row]"),
    "unpermuted V": ("tile/softmax.h", "0x6420", "0x4620"),
    "P truncated, not rounded": ("ptx/convert.h", "cvt.rn.relu.f16x2.f32", "cvt.rz.relu.f16x2.f32"),
    "sums of the wrong ones": ("hopper.cuh", "0x38383838", "0x38383839"),
    "output of the wrong lane": ("tile/output.h", "exchange(w[0], w[2], high, 2);", ""),
}
"""File, what stands there, what it is broken into."""


def mutated(name: str | None, folder: Path) -> Path:
    """A copy of the kernel's sources, broken unless `name` is None."""
    sources = folder / "cuda"
    shutil.copytree(build.SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
    if name is not None:
        file, right, wrong = MUTANTS[name]
        text = (sources / file).read_text()
        assert text.count(right) == 1, f"{file} has {right!r} {text.count(right)} times"
        (sources / file).write_text(text.replace(right, wrong))
    return sources


def check(sources: str) -> None:
    """In a process of its own: the parity test on kernels compiled from `sources`."""
    config = INSTANCES[0]
    build.SOURCES = Path(sources)
    build.INSTANCES = (config,)
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=generator).to(device) for n in (150, 300, 300))
    # later keys score higher, so that the maximum moves; scales of blocks differ
    k = k * torch.linspace(0.2, 3, 300, device=device)[:, None]
    quantized = fp8attn.quantize(q, k, v)
    for is_causal in (False, True):
        call = call_of(*quantized, is_causal=is_causal, causal_alignment="bottom_right", out_dtype=torch.float32)
        out, _ = cuda.forward(call, device_of(device), config)
        oracle, _ = reference.pipeline(*quantized, block_n=KEYS, causal="bottom_right" if is_causal else "none", exact=config.exact)
        try:
            assert_matches_pipeline(out, oracle, emulated=False)
        except AssertionError as error:
            print(SEEN, error)


def run_check(sources: Path, cache: Path) -> str:
    environment = os.environ | {"FP8ATTN_CACHE": str(cache), "PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS)))}
    program = f"import test_cuda_mutants; test_cuda_mutants.check({str(sources)!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_change_what_is_there(name: str, tmp_path: Path) -> None:
    """On any machine: what a mutant breaks is in the source."""
    mutated(name, tmp_path)


@pytest.fixture
def hopper(device: torch.device) -> None:
    missing = cuda_missing(device)
    if missing is not None:
        pytest.skip(missing)


@pytest.mark.gpu
def test_the_kernel_itself_passes(hopper: None, tmp_path: Path) -> None:
    assert SEEN not in run_check(mutated(None, tmp_path), tmp_path / "cache")


@pytest.mark.gpu
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_seen(hopper: None, name: str, tmp_path: Path) -> None:
    assert SEEN in run_check(mutated(name, tmp_path), tmp_path / "cache")
