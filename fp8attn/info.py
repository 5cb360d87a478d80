"""Diagnosis: what is installed, what works and, where something doesn't, why and what to do."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import warnings
from collections.abc import Callable

import torch

from . import triton as triton_kernels
from .api import sdpa
from .backends import cuda_unavailable, triton_unavailable
from .cuda import build, configs, portable
from .device import Device, device_of
from .ops import has_kernels
from .validate import Backend

LONGEST = 2000
"""Maximum characters of a line. A compiler's message can be many pages."""


def _check_attention(backend: Backend) -> None:
    """Attend on the CPU to 16 keys with equal scores and the values 0 to 15.

    Raises:
        Exception: the backend's own error, if it can't run.
        RuntimeError: the result isn't the mean of the values.
    """
    with torch.autocast("cpu", enabled=False):
        q = torch.zeros(1, 1, 16, 16, dtype=torch.float32, device="cpu").to(torch.float8_e4m3fn)
        v = torch.arange(16, dtype=torch.float32, device="cpu").view(1, 1, 16, 1).expand(1, 1, 16, 16).to(torch.float8_e4m3fn)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter warns of divisions by zero
            out = sdpa(q, q, v.contiguous(), q_scale=1.0, k_scale=1.0, v_scale=1.0, backend=backend)
    if not (out == 7.5).all():
        raise RuntimeError(f"the mean of 0 to 15 came out as {out.flatten()[0].item()}")


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _triton_version() -> str:
    for name in ("triton", "pytorch-triton"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return "isn't installed"


def _interpreter_fault(check: Callable[[], None]) -> str | None:
    """The reason why a check fails in Triton's interpreter, with a remedy; or None if it passes."""
    try:
        check()
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # Triton wraps it
            cause = cause.__cause__
        said = f"Triton's interpreter fails: {type(cause).__name__}: {cause}"
    else:
        return None
    try:
        numpy = importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        return f"{said}; it needs NumPy, which isn't here: pip install 'numpy<2.4'"
    if _release(numpy) >= (2, 4) and _release(_triton_version()) < (3, 7):
        return f"{said}; Triton {_triton_version()} needs NumPy below 2.4, this is {numpy}: pip install 'numpy<2.4', or Triton 3.7 or newer"
    return f"{said}; Triton is {_triton_version()}, NumPy {numpy}"


def _triton_backend(device: torch.device) -> str:
    """Try Triton: on a GPU, a tiny kernel, which shows that Triton can compile; in the interpreter, attention
    itself."""
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return "not tried while a CUDA graph is being captured"
        triton_kernels.probe.check_sum(device)
        return "works"
    if has_kernels(device):
        return _interpreter_fault(lambda: _check_attention("triton")) or "works, in Triton's interpreter"

    fault = _interpreter_fault(lambda: triton_kernels.probe.check_sum(device, interpreted=True))
    return f"{triton_unavailable(device)}{'' if fault is None else f'; but {fault}'}"


def _cuda_backend(device: torch.device) -> str:
    """Try the CUDA kernels: load them if they are compiled already, else look for known obstacles to compiling them."""
    reason = cuda_unavailable(device)
    if reason is not None:
        return reason
    properties = device_of(device)
    instances = configs.INSTANCES if properties.arch // 10 == 9 else portable.group(portable.DIMS[1], properties)
    try:
        parts: tuple[build.Part, ...] = build.Kernels(instances, properties.arch), build.Binding()
        if all(build.built_folder(part) is not None for part in parts):
            build.load(instances, properties.arch)
            return "works, compiled already"
        obstacle = build.obstacle()
    except build.BuildError as error:
        obstacle = str(error)
    return f"works, is compiled on first use, in {build.cache_folder()}" if obstacle is None else f"cuda: {obstacle}"


def _reference_backend() -> str:
    _check_attention("reference")
    return "works"


def _cuda_version() -> str:
    if torch.version.cuda is not None:
        return torch.version.cuda
    return "none: this is a ROCm build of torch" if torch.version.hip is not None else "none: this is a CPU build of torch"


def _no_gpu() -> str:
    """State that there is no GPU, and why torch can't use one."""
    try:
        torch.cuda.init()
    except Exception as error:
        return f"none that torch can use: {error}"
    return "none that torch can use"


def _gpu(device: Device) -> str:
    units = "FP8 tensor cores" if device.has_fp8_units else "no FP8 tensor cores: FP8 storage, half compute"
    return f"{device.name}, sm_{device.arch}, {device.sm_count} SMs, {units}"


def _hopper_kernel(device: Device) -> str:
    return "needs sm_90" if device.arch // 10 != 9 else triton_kernels.run.hopper_unavailable or "works, is compiled on first use"


def _cuda_kernels(device: Device) -> str:
    """Which CUDA kernels a GPU gets, and what they multiply."""
    if device.arch < 80:
        return "need sm_80"
    operands = "e4m3 as it is" if device.has_fp8_units else "e4m3 as half"
    return f"{'fused_small, fused_head, hopper, and for what they refuse ' if device.arch // 10 == 9 else ''}portable, which multiplies {operands}"


def _line(tell: Callable[[], str]) -> str:
    """The text that a function returns, or the error that it raises, on one line.

    A machine under diagnosis may have any fault.
    """
    try:
        text = tell()
    except Exception as error:
        text = f"fails: {type(error).__name__}: {error}"
    words = " ".join(text.split())
    return words if len(words) <= LONGEST else f"{words[:LONGEST]} … ({len(words) - LONGEST} more characters)"


def info() -> dict[str, str]:
    """Versions, GPUs and backends, each as one line of text. A backend's line starts with `works` or says what is
    missing or fails.

    Every backend is tried: Triton runs a tiny kernel, on the GPU or in the interpreter, and compiled CUDA kernels are
    loaded. CUDA kernels that aren't compiled yet are not compiled here. The function never raises.
    """
    lines = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _line(_triton_version),
        "cuda": _line(_cuda_version),
    }
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    for index in gpus:

        def of_gpu(tell: Callable[[Device], str], index: int = index) -> str:
            return _line(lambda: tell(device_of(torch.device("cuda", index))))

        lines[f"gpu {index}"] = of_gpu(_gpu)
        lines[f"triton hopper kernel, gpu {index}"] = of_gpu(_hopper_kernel)
        lines[f"cuda kernels, gpu {index}"] = of_gpu(_cuda_kernels)
    if not gpus:
        lines["gpu"] = _line(_no_gpu)
    device = torch.device("cuda" if gpus else "cpu")
    lines["backend triton"] = _line(lambda: _triton_backend(device))
    lines["backend cuda"] = _line(lambda: _cuda_backend(device))
    lines["backend reference"] = _line(_reference_backend)
    return lines
