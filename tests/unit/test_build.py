"""What can stop the CUDA kernels from being compiled or loaded: each is a BuildError that names the environment variable or the path, what it was and
what it must be. Compilers are shell scripts here: no CUDA toolkit is needed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fp8attn.cuda import build, general_quantize, render
from fp8attn.cuda.build import BuildError, Kernels
from fp8attn.cuda.configs import INSTANCES
from machines import CACHES, COMPILER, INSTANCE, Machine, fails, program


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_machine_without_a_fault_compiles(machine: Machine) -> None:
    assert build.obstacle() is None and not machine.calls()
    folder = machine.build()
    assert folder.parent == machine.cache and build.obstacle() is None
    called = [Path(words[0]).name for words in machine.calls()]
    assert sorted(set(called)) == ["c++", "nvcc"]
    meta = json.loads((folder / "build_meta.json").read_text())
    assert meta["library_bytes"] == (folder / f"{Kernels(INSTANCE, 90).name}.so").stat().st_size
    assert machine.build() == folder and len(machine.calls()) == len(called)
    assert build.built(INSTANCE) == meta and build.built_folder(Kernels(INSTANCE, 90)) == folder


# environment variables


@pytest.mark.parametrize(
    "name, value, must",
    (
        *(("MAX_JOBS", value, "must be a positive integer") for value in ("auto", "0", "-3", "1.5", " 4", "4 4", "1e3", "²", "9" * 5000)),
        *(("FP8ATTN_COMPILE_TIMEOUT", value, "must be a positive number of seconds") for value in ("soon", "0", "0.0", "-1", "nan", "inf", "1_0")),
        ("CXX", '"g++', "must be a command"),
        ("CXX", "no-such-compiler -m64", "to the command of a C++ compiler"),
        ("PYTORCH_NVCC", "'nvcc", "must be a command"),
        ("PYTORCH_NVCC", "no-such-cache nvcc", "must be the command of an nvcc"),
    ),
)
def test_a_wrong_value_is_named(machine: Machine, name: str, value: str, must: str) -> None:
    machine.patch.setenv(name, value)
    for words in (machine.failure(), build.obstacle()):
        assert words is not None and name in words and repr(value) in words and must in words, words


@pytest.mark.parametrize("name", ("MAX_JOBS", "FP8ATTN_COMPILE_TIMEOUT", "CXX", "PYTORCH_NVCC", "XDG_CACHE_HOME"))
def test_an_empty_value_is_none(machine: Machine, name: str) -> None:
    machine.patch.setenv("PATH", str(machine.cxx.parent), prepend=os.pathsep)
    machine.patch.setenv(name, "")
    assert build.obstacle() is None
    assert machine.build().parent == machine.cache


def test_jobs_and_timeout_are_what_was_set(machine: Machine) -> None:
    assert build.jobs() == os.cpu_count() and build.timeout() == 3600
    machine.patch.setenv("MAX_JOBS", "07")
    machine.patch.setenv("FP8ATTN_COMPILE_TIMEOUT", "2.5")
    assert build.jobs() == 7 and build.timeout() == 2.5


@pytest.mark.parametrize(
    "prebuilt, commit, why",
    (
        (None, "a" * 40, "this checkout of fp8attn has no prebuilt kernels"),
        (None, None, "this installation of fp8attn has no prebuilt kernels"),
        (("kernels_80_01234567", "kernels_89_01234567", "binding"), None, "there are prebuilt kernels for sm_80, sm_89, and none for sm_90"),
        (("binding",), None, "there are prebuilt kernels for no GPU, and none for sm_90"),
        (("kernels_90_01234567",), None, "they aren't among the prebuilt kernels"),
        ((Kernels(INSTANCE, 90).name,), None, "the prebuilt ones are of other sources"),
    ),
)
def test_a_line_says_what_is_compiled_and_why(
    machine: Machine, prebuilt: tuple[str, ...] | None, commit: str | None, why: str, capsys: pytest.CaptureFixture
) -> None:
    machine.patch.setattr(build, "commit", lambda: commit)
    for name in prebuilt or ():
        folder = build.PREBUILT / name
        folder.mkdir(parents=True)
        (folder / "build_meta.json").write_text('{"content": "of another version"}')
    machine.build()
    line = f"fp8attn: compiling 1 CUDA kernels (hopper, sm_90), once, about {build.COMPILE_SECONDS} s on 1 core: {why}\n"
    assert capsys.readouterr().err == line
    machine.build()
    assert capsys.readouterr().err == "", "it is compiled already"


def test_the_estimate_follows_instances_and_cores(machine: Machine) -> None:
    group, seconds = Kernels(INSTANCES, 90), build.COMPILE_SECONDS
    for cores, jobs, further in ((1, "", 17), (4, "", 4), (64, "", 0), (4, "2", 8), (2, "64", 8)):
        machine.patch.setattr(os, "cpu_count", lambda cores=cores: cores)
        machine.patch.setenv("MAX_JOBS", jobs)
        assert len(group.instances) == 18 and group.seconds == seconds + further * build.NEXT_SECONDS, (cores, jobs)
    assert build.Binding().seconds == seconds
    assert Kernels(general_quantize.INSTANCES, 80).announcement == "2 CUDA kernels (general_quantize, unsmooth_lse, sm_80)"


def test_a_compiler_takes_several_instances(machine: Machine) -> None:
    """As many compilers as cores; every instance is in the library once."""
    machine.patch.setattr(os, "cpu_count", lambda: 4)
    rendered = {name for name in render.files(INSTANCES) if name.endswith(".cu")}
    Kernels(INSTANCES, 90).compile_into(machine.folder)
    *compiled, linked = machine.calls()
    names = [words[words.index("-c") + 1] for words in compiled]
    included = [source for name in names for source in re.findall('#include "(.*)"', (machine.folder / name).read_text())]
    assert len(names) == 4 and len(included) == len(rendered) and {*included} == rendered
    assert {name.replace(".cu", ".o") for name in names} == {word for word in linked if word.endswith(".o")}


def test_each_instance_has_its_own_report() -> None:
    """Of kernels of several instances in one output of ptxas; one's name may end like another's."""
    entry = "ptxas info    : Compiling entry function '{}' for 'sm_90a'\nptxas info    : Used {} registers\n"
    names = ("_Z7forwardI5a_1_0E", "_Z7measureI7b_a_1_0E", "_Z5writeI7b_a_1_0E", "_Z7combine")
    report = "ptxas info    : 0 bytes gmem\n" + "".join(entry.format(name, 10 + i) for i, name in enumerate(names))
    found = {name: re.findall(r"Used (\d+)", build.report_of(name, report)) for name in ("a_1_0", "b_a_1_0", "c")}
    assert found == {"a_1_0": ["10"], "b_a_1_0": ["11", "12"], "c": []}


def test_compiling_ahead_says_so(machine: Machine, capsys: pytest.CaptureFixture) -> None:
    build.prebuild(machine.folder / "wheel", 90, (INSTANCE,))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.endswith(": ahead of time") for line in lines)


def test_compilers_may_be_commands_of_several_words(machine: Machine) -> None:
    """As `ccache g++`: the wrapper gets the compiler and its words, from nvcc, too, which takes one program."""
    wrapper = program(machine.folder / "bin" / "wrapper", f'#!/bin/sh\necho "wrapper $*" >> "{machine.log}"\nexec "$@"\n')
    machine.patch.setenv("CXX", f"'{wrapper}' {machine.cxx} -m64")
    machine.patch.setenv("PYTORCH_NVCC", f"{wrapper} {machine.nvcc}")
    assert build.missing() is None and build.obstacle() is None
    build.make_in(machine.folder, Kernels(INSTANCE, 90))
    wrapped = [words[1:] for words in machine.calls() if words[0] == "wrapper"]
    compiled = [words for words in wrapped if words[0] == str(machine.nvcc)]
    assert compiled and [words for words in wrapped if words[:2] == [str(machine.cxx), "-m64"]]
    for words in compiled:
        host = words[words.index("-ccbin") + 1]
        before = len(machine.calls())
        subprocess.run([host, "-c", "it's.cpp"], check=True)
        assert machine.calls()[before:] == [["wrapper", str(machine.cxx), "-m64", "-c", "it's.cpp"], [str(machine.cxx), "-m64", "-c", "it's.cpp"]]


def test_compilers_of_one_word_are_nvccs_own(machine: Machine) -> None:
    build.make_in(machine.folder, Kernels(INSTANCE, 90))
    compiled = [words for words in machine.calls() if words[0] == str(machine.nvcc)]
    assert compiled and all(words[words.index("-ccbin") + 1] == str(machine.cxx) for words in compiled)


def test_relative_paths_are_of_the_folder_python_is_in(machine: Machine) -> None:
    """Compilers run in another one."""
    machine.patch.chdir(machine.folder)
    machine.patch.setenv("CXX", "bin/c++")
    machine.patch.setenv("FP8ATTN_CACHE", "cache")
    assert build.cache_folder() == machine.cache
    assert machine.build().parent == machine.cache and build.cxx() == [str(machine.cxx)]


@pytest.mark.parametrize(
    "environment, place",
    (
        ({"FP8ATTN_CACHE": "~/own", "XDG_CACHE_HOME": "xdg"}, "home/own"),
        ({"XDG_CACHE_HOME": "~/xdg"}, "home/xdg/fp8attn"),
        ({"FP8ATTN_CACHE": ""}, "home/.cache/fp8attn"),
    ),
)
def test_where_the_cache_is(machine: Machine, environment: dict[str, str], place: str) -> None:
    machine.patch.delenv("FP8ATTN_CACHE")
    for name, value in {"HOME": str(machine.folder / "home"), **environment}.items():
        machine.patch.setenv(name, value)
    assert build.cache_folder() == machine.folder / place


def without_home(patch: pytest.MonkeyPatch) -> None:
    """A user who isn't in the list of users, as in many containers."""
    patch.delenv("HOME")
    patch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    with pytest.raises(RuntimeError):
        Path.home()


def test_a_user_without_a_home_needs_a_cache(machine: Machine) -> None:
    without_home(machine.patch)
    machine.patch.delenv("FP8ATTN_CACHE")
    for words in (machine.failure(), build.obstacle()):
        assert words is not None and "HOME isn't set" in words and "FP8ATTN_CACHE must be the absolute path of a folder of your own" in words


@pytest.mark.parametrize("name", ("FP8ATTN_CACHE", "XDG_CACHE_HOME"))
def test_a_user_with_a_cache_needs_no_home(machine: Machine, name: str) -> None:
    without_home(machine.patch)
    machine.patch.delenv("FP8ATTN_CACHE")
    machine.patch.setenv(name, str(machine.folder / "mine"))
    assert build.obstacle() is None and machine.build().is_relative_to(machine.folder / "mine")


# the toolkit and the compilers


@pytest.mark.parametrize("name", ("CUDA_HOME", "CUDA_PATH"))
def test_a_toolkit_without_nvcc_is_named(machine: Machine, name: str) -> None:
    machine.patch.setenv(name, str(machine.toolkit))
    machine.nvcc.chmod(0o644)
    for words in (machine.failure(), build.missing()):
        assert words is not None and f"{machine.nvcc} is no program" in words
        assert f"set {name}, which is {str(machine.toolkit)!r}, to its folder" in words


def test_no_toolkit_at_all(machine: Machine) -> None:
    machine.patch.setattr(build, "cuda_home", lambda: None)
    assert machine.failure() == build.missing() == "nvcc isn't here; install the CUDA toolkit 12.8 or newer and set CUDA_HOME to its folder"


def test_torch_that_cannot_look_for_the_toolkit(machine: Machine) -> None:
    """Its module for extensions imports setuptools, which not every environment has."""
    machine.patch.undo()
    machine.patch.setattr(torch.version, "cuda", "13.0")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        machine.patch.delenv(name, raising=False)
    machine.patch.setitem(sys.modules, "torch.utils.cpp_extension", None)
    with pytest.raises(BuildError) as caught:
        build.binding_command(Path("a.cpp"))
    for words in (str(caught.value), build.missing.__wrapped__()):
        assert words is not None and "torch.utils.cpp_extension can't be imported" in words and "setuptools" in words


BROKEN: dict[str, tuple[str, str]] = {
    "fails": ("#!/bin/sh\necho 'nothing works' >&2; exit 3\n", "failed with exit code 3: nothing works"),
    "fails silently": ("#!/bin/sh\nexit 1\n", "failed with exit code 1: no output"),
    "is killed": ("#!/bin/sh\nkill -9 $$\n", "was killed by SIGKILL"),
    "isn't a program": ("\x00\x01\x02", "Exec format error"),
    "is in another language": ("#!/bin/sh\nprintf 'caf\\351' >&2; exit 1\n", "caf\ufffd"),
    "waits": ("#!/bin/sh\nexec sleep 60\n", "0.5 s"),
}


@pytest.mark.parametrize("which", ("c++", "nvcc"))
@pytest.mark.parametrize("fault", BROKEN)
def test_a_compiler_that_does_not_run(machine: Machine, which: str, fault: str) -> None:
    """Neither says its version."""
    path = machine.cxx if which == "c++" else machine.nvcc
    path.write_text(BROKEN[fault][0])
    machine.patch.setattr(build, "VERSION_SECONDS", 0.5)
    expected = {"waits": "said nothing"}.get(fault, BROKEN[fault][1])
    for words in (machine.failure(), build.obstacle()):
        assert words is not None and f"{path} --version" in words and expected in words and "must be a compiler that runs here" in words, words


@pytest.mark.parametrize("which", ("c++", "nvcc"))
@pytest.mark.parametrize("fault", BROKEN)
def test_a_compiler_that_does_not_compile(machine: Machine, which: str, fault: str) -> None:
    """It says its version."""
    path = machine.cxx if which == "c++" else machine.nvcc
    text = BROKEN[fault][0]
    if text.startswith("#!"):
        path.write_text(text.replace("#!/bin/sh\n", '#!/bin/sh\nif [ "$1" = --version ]; then echo 1.0; exit; fi\n'))
    else:
        version = build.version_of
        machine.patch.setattr(build, "version_of", lambda *command: "1.0" if command[0] == str(path) else version(*command))
        path.write_text(text)
    machine.patch.setenv("FP8ATTN_COMPILE_TIMEOUT", "0.5")
    assert build.obstacle() is None
    words = machine.failure()
    assert words.startswith("the CUDA kernels don't compile here: ") and str(path) in words and BROKEN[fault][1] in words
    assert ("FP8ATTN_COMPILE_TIMEOUT" in words) == (fault == "waits") and ("MAX_JOBS" in words) == (fault == "is killed")
    assert not [path for path in machine.cache.iterdir() if path.is_dir()]


def test_a_compiler_that_makes_nothing(machine: Machine) -> None:
    machine.cxx.write_text("#!/bin/sh\necho 1.0\n")
    words = machine.failure()
    assert str(machine.cxx) in words and "ended without an error, and made no" in words


def test_compilers_do_not_wait_for_input(machine: Machine) -> None:
    reading = program(machine.folder / "reading", "#!/bin/sh\ncat\n")
    assert build.compile_by([str(reading)], machine.folder) == ""


def test_nobody_needs_to_read_that_it_compiles(machine: Machine) -> None:
    with open(machine.folder / "closed", "w") as closed:
        machine.patch.setattr(sys, "stderr", closed)
    assert machine.build().exists()


def test_a_library_needs_no_git(machine: Machine) -> None:
    program(machine.folder / "bin" / "git", "#!/bin/sh\nexec sleep 60\n")
    machine.patch.setenv("PATH", str(machine.folder / "bin"), prepend=os.pathsep)
    machine.patch.setattr(build, "VERSION_SECONDS", 0.5)
    assert build.commit() is None
    (machine.folder / "bin" / "git").write_bytes(b"\0")
    machine.patch.setenv("PATH", str(machine.folder / "bin"))  # where there is another, that is run
    assert build.commit() is None


# the cache folder


@pytest.mark.parametrize("fault", CACHES)
def test_a_cache_that_cannot_be_used(machine: Machine, fault: str) -> None:
    sabotage, expected = CACHES[fault]
    sabotage(machine)
    for words in (machine.failure(), build.obstacle()):
        assert words is not None and expected in words and "set FP8ATTN_CACHE to a folder" in words and str(machine.folder) in words, words


@pytest.mark.skipif(os.getuid() == 0, reason="root can write anywhere")
def test_a_cache_without_the_right_to_write(machine: Machine) -> None:
    machine.cache.mkdir(0o500)
    for words in (machine.failure(), build.obstacle()):
        assert words is not None and "Permission denied" in words and "FP8ATTN_CACHE" in words


def test_what_is_built_needs_no_right_to_write(machine: Machine) -> None:
    """A cache that was filled and then made read-only."""
    folder = machine.build()
    for name in ("mkdtemp", "NamedTemporaryFile"):
        machine.patch.setattr(tempfile, name, fails(errno.EROFS))
    machine.patch.setattr(fcntl, "flock", fails(errno.EROFS))
    assert machine.build() == folder


def test_a_cache_that_is_deleted_meanwhile(machine: Machine) -> None:
    machine.nvcc.write_text(COMPILER.format(log=machine.log) + f'if [ "$1" != --version ]; then rm -rf "{machine.cache}"; fi\n')
    words = machine.failure()
    assert str(machine.cache) in words
    shutil.rmtree(machine.cache, ignore_errors=True)
    build._failures.clear()
    program(machine.nvcc, COMPILER.format(log=machine.log))
    assert machine.build().exists()


def test_the_probe_leaves_nothing(machine: Machine) -> None:
    assert build.obstacle() is None
    assert not list(machine.cache.iterdir()) and stat.S_IMODE(machine.cache.stat().st_mode) == 0o700


@contextlib.contextmanager
def holding(path: Path) -> Iterator[None]:
    """Inside, somebody else has the lock."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_a_lock_that_is_held_forever(machine: Machine) -> None:
    machine.patch.setenv("FP8ATTN_COMPILE_TIMEOUT", "0.3")
    path = machine.cache / f"{build.fingerprint(Kernels(INSTANCE, 90))}.lock"
    with holding(path):
        words = machine.failure()
    assert f"another process has held {path} for 0.3 s" in words and "FP8ATTN_COMPILE_TIMEOUT" in words


def test_a_lock_that_is_let_go_is_waited_for(machine: Machine) -> None:
    path = machine.cache / f"{build.fingerprint(Kernels(INSTANCE, 90))}.lock"
    got = threading.Event()

    def holds() -> None:
        with holding(path):
            got.set()
            time.sleep(0.3)

    other = threading.Thread(target=holds)
    other.start()
    assert got.wait(30)
    started = time.monotonic()
    machine.build()
    assert time.monotonic() - started > 0.1
    other.join()


# what was built


def meta_of(folder: Path) -> Path:
    return folder / "build_meta.json"


RECORDS: dict[str, tuple[bytes | None, str]] = {
    "half": (b'{"arch": 90, ', "can't be read"),
    "nothing": (b"", "can't be read"),
    "not text": (b"\xff\xfe\x00", "can't be read"),
    "a list": (b"[]", "is no record of a build"),
    "another's": (b'{"arch": 90}', "is no record of a build"),
    "a folder": (None, "can't be read"),
}


def spoil(path: Path, text: bytes | None) -> None:
    """Write something else there; None makes it a folder."""
    path.unlink()
    if text is None:
        path.mkdir()
    else:
        path.write_bytes(text)


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_that_is_not_whole(machine: Machine, record: str) -> None:
    folder = machine.build()
    spoil(meta_of(folder), RECORDS[record][0])
    words = machine.failure()
    assert f"{meta_of(folder)} {RECORDS[record][1]}" in words and f"delete {folder}" in words
    with pytest.raises(BuildError, match=re.escape(str(meta_of(folder)))):
        build.built(INSTANCE)


@pytest.mark.parametrize("record", RECORDS)
def test_a_wheels_record_that_is_not_whole(machine: Machine, record: str) -> None:
    """Also on a machine that couldn't compile."""
    build.prebuild(build.PREBUILT, 90, (INSTANCE,))
    folder = build.build(Kernels(INSTANCE, 90))
    assert folder.parent == build.PREBUILT
    spoil(meta_of(folder), RECORDS[record][0])
    machine.nvcc.unlink()
    words = machine.failure()
    assert f"{meta_of(folder)} {RECORDS[record][1]}" in words and "install fp8attn again" in words


def test_prebuilding_tells_what_the_wheel_contains(machine: Machine) -> None:
    """What was there already, too: whatever else is in the folder is of other sources."""
    first = build.prebuild(build.PREBUILT, 90, (INSTANCE,))
    assert len(first) == 2 and set(first) == set(build.PREBUILT.iterdir())
    assert build.prebuild(build.PREBUILT, 90, (INSTANCE,)) == first


@pytest.mark.parametrize("left", (0, 100, 5000, None))
def test_half_a_library_is_not_loaded(machine: Machine, left: int | None) -> None:
    """To load one whose record says more bytes would end the process by a bus error. None: it isn't there."""
    folder = machine.build()
    library = folder / f"{Kernels(INSTANCE, 90).name}.so"
    shutil.copy(Path(torch.__file__).parent / "lib" / "libshm.so", library)
    meta_of(folder).write_text(json.dumps(json.loads(meta_of(folder).read_text()) | {"library_bytes": library.stat().st_size}))
    build._check_whole(folder, Kernels(INSTANCE, 90))
    size = library.stat().st_size
    if left is None:
        library.unlink()
    else:
        os.truncate(library, left)
    words = machine.failure()
    assert str(library) in words and f"delete {folder}" in words
    assert ("No such file" in words) if left is None else (f"has {left} bytes; it must have {size}" in words)


def test_a_library_without_its_launchers(machine: Machine) -> None:
    machine.patch.setattr(ctypes, "CDLL", lambda path, own=ctypes.CDLL: own(None))
    words = machine.failure()
    assert "1 CUDA kernels (hopper, sm_90) can't be loaded here: AttributeError" in words and f"launch_{INSTANCE[0].name}" in words


def test_no_thread_can_be_started(machine: Machine) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    machine.patch.setattr(build.ThreadPoolExecutor, "submit", refused)
    assert "RuntimeError: can't start new thread" in machine.failure()


def test_sources_that_cannot_be_read(machine: Machine) -> None:
    shutil.copytree(build.SOURCES, machine.folder / "sources")
    machine.patch.setattr(build, "SOURCES", machine.folder / "sources")
    (machine.folder / "sources" / "hopper.cuh").write_bytes(b"\xff")
    assert "can't be loaded here: UnicodeDecodeError" in machine.failure()


def test_interrupting_is_no_failure(machine: Machine) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    machine.patch.setattr(build, "make_in", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build.load(INSTANCE)
    assert build.unavailable(INSTANCE[0]) is None and not [path for path in machine.cache.iterdir() if path.is_dir()]


@pytest.mark.skipif(shutil.which("nvcc") is None or shutil.which("g++") is None, reason="needs nvcc and g++")
def test_nvcc_takes_a_compiler_of_several_words(machine: Machine) -> None:
    """The real nvcc, with a wrapper around the real g++: both compile a kernel, and the wrapper was asked."""
    real = shutil.which("nvcc")
    assert real is not None
    wrapper = program(machine.folder / "bin" / "wrapper", f'#!/bin/sh\necho "wrapper $*" >> "{machine.log}"\nexec "$@"\n')
    machine.patch.setenv("CXX", f"{wrapper} g++")
    machine.patch.setenv("PYTORCH_NVCC", f"{wrapper} {real}")
    (machine.folder / "one.cu").write_text("__global__ void one(int* x) { *x = 1; }\n")
    build.compile_kernels(machine.folder, ["one"], 90)
    assert (machine.folder / "one.o").stat().st_size > 0
    assert {tuple(words[:2]) for words in machine.calls()} >= {("wrapper", "g++"), ("wrapper", real)}
