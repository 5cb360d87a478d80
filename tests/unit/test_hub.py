"""The package for the kernels hub, loaded by the hub's own tool."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fp8attn.cuda import build, hub

pytestmark = pytest.mark.anywhere


def test_the_hubs_tool_loads_it(tmp_path: Path) -> None:
    """In a process of its own, from a folder without fp8attn; and attention runs."""
    pytest.importorskip("kernels", reason="kernels isn't installed")
    variant = hub.make(tmp_path / "repository", [])
    program = (
        "import sys; from pathlib import Path; import torch; import kernels;"
        "found = kernels.get_local_kernel(Path(sys.argv[1]), backend='cpu');"
        "q = torch.randn(1, 2, 40, 64);"
        "out, expected = found.sdpa(q, q, q, backend='modelled'), torch.nn.functional.scaled_dot_product_attention(q, q, q);"
        "assert 'fp8attn' not in sys.modules and found.__file__.startswith(sys.argv[2]), found.__file__;"
        "print(float((out - expected).norm() / expected.norm()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "repository"), str(variant)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert 0.001 < float(done.stdout) < 0.08


def test_what_it_says_of_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Path, int]] = []
    monkeypatch.setattr(build, "prebuild", lambda folder, arch: made.append((folder, arch)))
    monkeypatch.setattr(build, "version_of", lambda *_: "Cuda compilation tools, release 13.0, V13.0.48")
    variant = hub.make(tmp_path, [80, 90])
    assert variant.name.startswith("torch-stable-abi210-cu130-") and variant.parent == tmp_path / "build"
    assert made == [(variant / "fp8attn/cuda/prebuilt", arch) for arch in (80, 90)]
    said = json.loads((variant / "metadata.json").read_text())
    assert said["name"] == "fp8attn" and said["backend"] == {"type": "cuda", "archs": ["8.0", "9.0a"]} and said["id"].isidentifier()
    packed = {str(path.relative_to(variant / "fp8attn")) for path in (variant / "fp8attn").rglob("*.*")}
    assert {"__init__.py", "cuda/binding.cpp", "cuda/tile/mask.h"} <= packed and not [name for name in packed if "__pycache__" in name]
    with pytest.raises(ValueError, match="it must not have torch-stable-abi210"):
        hub.make(tmp_path, [80, 90])


@pytest.mark.parametrize("archs", ("90,", "ninety", "70"))
def test_wrong_architectures(archs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "prebuild", lambda folder, arch: pytest.fail("it compiles"))
    monkeypatch.setattr(build, "version_of", lambda *_: "nothing")
    with pytest.raises(SystemExit):
        hub.main([str(tmp_path), "--archs", archs])
    said = capsys.readouterr().err
    assert "must be" in said or "doesn't say its release" in said


def test_its_abi_is_the_bindings() -> None:
    target = (build.SOURCES / "torch_abi.h").read_text()
    assert "#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 10) << 48))" in target and hub.STABLE_ABI == "210"
