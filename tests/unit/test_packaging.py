"""What is packed: the source distribution has the repository, and its tests run from there; the wheel has the package and the benchmark, as
fp8attn.bench; each extra brings what it is for."""

from __future__ import annotations

import email
import email.message
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fp8attn

pytestmark = pytest.mark.anywhere

ROOT = Path(fp8attn.__file__).resolve().parent.parent
QUICK = ROOT / "tests" / "kit" / "quick.py"
PACKED = ("fp8attn", "bench", "tests", "docs", "examples", ".ci")
ALONE = ("pyproject.toml", "setup.py", "MANIFEST.in", "mkdocs.yml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md")


def repository() -> set[str]:
    """Files that are tracked or would be, if this is a checkout; of an unpacked source distribution all but caches."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKED]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    else:
        listed = [str(path.relative_to(ROOT)) for folder in PACKED for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    return {name for name in listed if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository: to build something leaves traces."""
    folder = tmp_path_factory.mktemp("tree")
    for name in (*repository(), *ALONE):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python, in a folder, that finds no fp8attn but what is there or in `environment`."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET", "FP8ATTN_PREBUILD")}
    return subprocess.run([sys.executable, *words], cwd=folder, env=inherited | environment, capture_output=True, text=True, check=False)


def built(tree: Path, to: Path, what: str) -> Path:
    """A distribution, built as pip does it, without its isolation."""
    program = f"import sys; from setuptools import build_meta; open(sys.argv[2], 'w').write(build_meta.build_{what}(sys.argv[1]))"
    done = run(tree, "-c", program, str(to), str(to / "name"))
    assert done.returncode == 0, done.stderr[-3000:]
    return to / (to / "name").read_text()


@pytest.fixture(scope="module")
def unpacked(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built(tree, folder, "sdist")) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"fp8attn-{fp8attn.__version__}"


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the source distribution, unpacked, as it lies in site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    path = built(unpacked, folder, "wheel")
    assert path.name == f"fp8attn-{fp8attn.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "site-packages")
    return folder / "site-packages"


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    return email.message_from_string((wheel / f"fp8attn-{fp8attn.__version__}.dist-info" / "METADATA").read_text())


def test_the_source_distribution_has_the_repository(unpacked: Path) -> None:
    wanted = repository()
    assert {"tests/conftest.py", "tests/kit/emulation/cta.h", "tests/bench/ncu_h100.csv", "bench/gates.json", ".ci/run"} <= wanted
    assert not [name for name in (*sorted(wanted), *ALONE) if not (unpacked / name).exists()]
    assert all((unpacked / name).read_bytes() == (ROOT / name).read_bytes() for name in wanted)
    assert os.access(unpacked / ".ci" / "run", os.X_OK)


@pytest.mark.thorough
def test_its_tests_are_collected(unpacked: Path) -> None:
    """As many as in the repository's own files."""
    done = run(unpacked, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    files = {line.split("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert files == {name for name in repository() if re.search(r"(^|/)test_\w+\.py$", name)}


def test_the_wheel_has_the_package_and_no_more(wheel: Path) -> None:
    """Of fp8attn everything; of bench the modules and the gates, not what was measured."""
    files = {str(path.relative_to(wheel)) for path in wheel.rglob("*") if path.is_file() and ".dist-info" not in str(path)}
    package = {name for name in repository() if name.startswith("fp8attn/")}
    bench = {f"fp8attn/{name}" for name in repository() if re.fullmatch(r"bench/(\w+/)*\w+\.py|bench/gates\.json", name)}
    assert "fp8attn/bench/gates.json" in bench and "fp8attn/py.typed" in package
    assert files == package | bench


def test_the_version_is_written_once(metadata: email.message.Message) -> None:
    assert metadata["Version"] == fp8attn.__version__
    assert fp8attn.__version__ not in (ROOT / "pyproject.toml").read_text()


def test_the_metadata_say_what_it_is(metadata: email.message.Message) -> None:
    assert metadata["Author"] and metadata["Keywords"] and metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    classifiers = set(metadata.get_all("Classifier", []))
    assert {"Typing :: Typed", "Environment :: GPU :: NVIDIA CUDA", "Operating System :: POSIX :: Linux"} <= classifiers
    lowest = re.fullmatch(r">=3\.(\d+)", metadata["Requires-Python"])
    assert lowest and f"Programming Language :: Python :: 3.{lowest[1]}" in classifiers
    assert f"Programming Language :: Python :: 3.{int(lowest[1]) - 1}" not in classifiers


def requirements(metadata: email.message.Message, extra: str) -> dict[str, Requirement]:
    """What an extra installs, by name, with what it takes from others; what is installed without any, for ''."""
    found: dict[str, Requirement] = {}
    for one in map(Requirement, metadata.get_all("Requires-Dist", [])):
        if one.marker is not None and not one.marker.evaluate({"extra": extra, "platform_system": "Linux"}):
            continue
        if one.name == "fp8attn":
            for other in one.extras:
                found |= requirements(metadata, other)
        else:
            found[one.name] = one
    return found


@pytest.mark.parametrize("extra", ("interpreter", "bench", "test"))
def test_who_interprets_gets_a_numpy_that_triton_goes_with(metadata: email.message.Message, extra: str) -> None:
    numpy = requirements(metadata, extra)["numpy"].specifier
    assert "2.3.5" in numpy and "1.26" in numpy and "2.4" not in numpy and "2.4.1" not in numpy


def test_extras_have_what_they_import(metadata: email.message.Message) -> None:
    assert set(requirements(metadata, "")) == {"torch", "triton"}
    assert {"numpy", "rich", "matplotlib"} <= set(requirements(metadata, "bench"))
    assert {"pytest", "hypothesis", "ruff", "mypy", "setuptools", "numpy", "rich", "matplotlib"} <= set(requirements(metadata, "test"))


def test_the_benchmark_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """As fp8attn.bench, where no checkout is. Its kernels run in the interpreter. .ci/extras runs more of it."""
    out = tmp_path / "lines.jsonl"
    done = run(tmp_path, str(QUICK), "fp8attn.bench", "quantize", "--rounds", "1", "--json", str(out), PYTHONPATH=str(wheel))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert '"benchmark": "quantize"' in out.read_text()


HIDING = """
import sys
from importlib.machinery import PathFinder

class Hiding:
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] == {name!r} else PathFinder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(PathFinder, name)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding()
"""


@pytest.mark.parametrize("name", ("rich", "numpy"))
def test_the_benchmark_says_what_it_lacks(wheel: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDING.format(name=name))
    done = run(tmp_path, "-W", "ignore", "-m", "fp8attn.bench", "peers", PYTHONPATH=os.pathsep.join((str(tmp_path), str(wheel))))
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.splitlines()[-1]
    assert name in last and "pip install" in last and "fp8attn[bench]" in last


@pytest.mark.parametrize("value", ("ninety", "90,", "80 90", "-90", "true"))
def test_compiling_ahead_for_no_architecture(tree: Path, value: str) -> None:
    done = run(tree, "setup.py", "--version", FP8ATTN_PREBUILD=value)
    assert done.returncode != 0
    assert f"FP8ATTN_PREBUILD is {value!r}; it must be 0, 1, or architectures with commas between them" in done.stderr.splitlines()[-1]


def test_compiling_ahead_for_an_unknown_architecture(tree: Path, tmp_path: Path) -> None:
    done = run(tree, "setup.py", "build_py", "--build-lib", str(tmp_path), FP8ATTN_PREBUILD="90,70")
    assert done.returncode != 0 and "FP8ATTN_PREBUILD names 70; it must name some of 80, 89, 90" in done.stderr


def test_a_wheel_with_kernels_is_of_a_platform_and_of_every_python(unpacked: Path, tmp_path: Path) -> None:
    """Its kernels are a folder here, that says what it stands for. Those of an earlier build are not in it."""
    program = """
import sys; sys.path.insert(0, '.')
from pathlib import Path
from fp8attn.cuda import build
def prebuild(folder, arch):
    for name in (str(arch), 'earlier'):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / 'kernels.so').write_text('kernels')
    return [folder / str(arch)]
build.prebuild = prebuild
from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))
"""
    done = run(unpacked, "-c", program, str(tmp_path), FP8ATTN_PREBUILD="80,90")
    name = done.stdout.splitlines()[-1]
    assert done.returncode == 0 and re.fullmatch(rf"fp8attn-{fp8attn.__version__}-py3-none-manylinux_2_\d+_\w+\.whl", name), done.stderr[-2000:]
    with zipfile.ZipFile(tmp_path / name) as archive:
        compiled = {name for name in archive.namelist() if name.endswith(".so")}
        assert compiled == {f"fp8attn/cuda/prebuilt/{arch}/kernels.so" for arch in (80, 90)}
