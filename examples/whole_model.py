"""What the examples of whole models share: options, timing, and what they print."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

import fp8attn

RECIPES = {"fp8attn": fp8attn.Recipe(), "fp8attn-int8": fp8attn.PRECISE}
CHOICES = ("sdpa", *RECIPES)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--attn", choices=CHOICES, default="fp8attn", help="to compare with sdpa, PyTorch's in bfloat16 (default: %(default)s)")
    made.add_argument("--steps", type=int, default=4, help="steps that are timed (default: %(default)s)")
    return made


def ranks_of_torchrun(options: argparse.Namespace) -> int:
    """Processes that torchrun started, which can talk to each other after this; 1 without torchrun. Each takes its own
    GPU, and the first one prints."""
    if not dist.is_torchelastic_launched():
        return 1
    gpu = torch.device(options.device).type == "cuda"
    dist.init_process_group("nccl" if gpu else "gloo")
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return dist.get_world_size()


@dataclass(frozen=True)
class Run:
    """One run: its output, seconds a step, and the largest number of allocated bytes, or None on a CPU."""

    output: torch.Tensor
    seconds: float
    peak_bytes: int | None


def timed(forward: Callable[[int], torch.Tensor], steps: int, device: torch.device) -> Run:
    """Runs steps after one that warms up. `forward` gets the number of the step; the last step's answer is the output."""
    gpu = device.type == "cuda"

    def wait() -> None:
        if gpu:
            torch.cuda.synchronize(device)

    with torch.inference_mode():
        forward(0)
        wait()
        if gpu:
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        for step in range(steps):
            output = forward(step)
        wait()
    return Run(output, (time.perf_counter() - start) / steps, torch.cuda.max_memory_allocated(device) if gpu else None)


def switch_options(device: torch.device) -> dict:
    """Options of fp8attn's integrations. On a CPU every call has the numerics of the FP8 kernels, modelled."""
    return {} if device.type == "cuda" else {"min_keys": 0, "backend": "modelled"}


def compare(attn: str, forward: Callable[[int], torch.Tensor], switch: Callable[[fp8attn.Recipe], object], options: argparse.Namespace) -> None:
    """Run the model with PyTorch's attention, switch it, run it again, and print both.

    Args:
        switch: switches the model to a recipe, and returns the report.
    """
    device = torch.device(options.device)
    before = timed(forward, options.steps, device)
    show("sdpa", before)
    if attn != "sdpa":
        report = switch(RECIPES[attn])
        after = timed(forward, options.steps, device)
        show(attn, after)
        error = (after.output.float() - before.output.float()).norm() / before.output.float().norm()
        print(f"{attn}: {before.seconds / after.seconds:.2f} times as fast as sdpa")
        print(f"{attn}: relative error of the output beside bf16: {error.item():.4f}")
        print(f"\n{report}\n")
    if device.type == "cpu":
        print("the numerics are modelled on a CPU: its times say nothing of a GPU")


def show(name: str, run: Run) -> None:
    """Print a run's time and memory."""
    memory = "" if run.peak_bytes is None else f", {run.peak_bytes / 2**30:.2f} GiB at most"
    print(f"{name}: {run.seconds * 1e3:.2f} ms a step{memory}")


def needs(library: str) -> None:
    """End the script if a library can't be imported."""
    try:
        __import__(library)
    except ImportError as error:
        print(f"this example needs {library}: pip install {library} ({error})", file=sys.stderr)
        sys.exit(2)
