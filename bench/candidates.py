"""Compiles, checks and times candidate configs in a separate process, which may crash or hang without ending the
search."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import selectors
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Literal

import torch

import fp8attn
from fp8attn import reference
from fp8attn.call import Call
from fp8attn.cuda import build
from fp8attn.cuda import oracle as cuda_oracle
from fp8attn.cuda import run as cuda_run
from fp8attn.device import device_of
from fp8attn.prepare import call_of
from fp8attn.triton import run as triton

from .cases import Case, inputs
from .compare import round_ratios
from .errors import Errors
from .gates import Gates
from .machine import module, module_folder
from .peers import Problem
from .space import Config, CudaConfig, from_json, to_json
from .timing import Protocol, time_all

CHECKED_LENGTH = 300
"""Queries and keys of the problem for the oracle: three key blocks of 128, with the last one incomplete."""

TYPICAL, WORST = 0.01, 0.15
"""Largest relative error of the median row and of the worst row against the pipeline oracle. A tensor core keeps 13
bits of its sums. This moves one P in a hundred to the next e4m3 number, an eighth off. The output is rounded to
bfloat16."""

SILENCE_SECONDS = 120.0
"""Seconds without output after which a process is killed, because it hangs."""

PROTOCOL = Protocol(rounds=3, milliseconds=10.0, lead_in=5.0)

FINALS = Protocol(rounds=9, milliseconds=20.0, lead_in=30.0)
"""Protocol for candidates with small differences. The power draw of other turns changes a power-capped card's clock by
several percent, for tens of milliseconds."""

Gate = Literal["fits", "compiles", "correct", "timed"]
Result = tuple[Gate, str | None, float | None, float | None]
"""(the last gate, the reason why it wasn't passed or None, microseconds, their ratio to the anchor's)."""


class Measured:
    """Outcomes of candidates on one case, each timed in turns with an anchor.

    Args:
        anchor: the config with which all candidates are compared.
    """

    def __init__(self, case: Case, backend: str, anchor: Config, protocol: Protocol = PROTOCOL) -> None:
        self.case, self.backend, self.anchor, self.protocol = case, backend, anchor, protocol

    def __call__(self, configs: Sequence[Config]) -> Iterator[tuple[Config, Result]]:
        """Yield each config's result.

        A crash or a hang is attributed to the candidate that was running; the rest are run again.
        """
        waiting = list(configs)
        while waiting:
            results, culprit, words = self._ask(waiting)
            yield from results.items()
            waiting = [config for config in waiting if config not in results]
            if not waiting:
                return
            if culprit is None or culprit not in waiting:
                if len(waiting) > 1:  # the culprit is unknown: run them one by one
                    for config in waiting:
                        yield from self([config])
                    return
                culprit = waiting[0]
            yield culprit, ("correct", words, None, None)
            waiting.remove(culprit)

    def _ask(self, configs: Sequence[Config]) -> tuple[dict[Config, Result], Config | None, str]:
        """Results; the config that was running when the process ended before its time; and the process's last
        output."""
        request = {
            "case": dataclasses.asdict(self.case),
            "backend": self.backend,
            "anchor": to_json(self.anchor),
            "configs": [to_json(config) for config in configs],
            "protocol": dataclasses.asdict(self.protocol),
        }
        results: dict[Config, Result] = {}
        at_work: Config | None = None
        with subprocess.Popen(
            [sys.executable, *module("candidates")],
            cwd=module_folder(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None and process.stderr is not None
            process.stdin.write(json.dumps(request))
            process.stdin.close()
            words = []
            for line, is_reply in _lines(process, SILENCE_SECONDS):
                if not is_reply:
                    words.append(line)
                    continue
                reply = json.loads(line)
                config = configs[reply["number"]] if reply["number"] is not None else None
                if "at_work" in reply:
                    at_work = config
                elif config is not None:
                    results[config] = (reply["gate"], reply["reason"], reply["us"], reply["ratio"])
        hung = f"it said nothing for {SILENCE_SECONDS:.0f} s" if process.returncode == -9 else f"exit code {process.returncode}"
        return results, at_work, f"its process ended, {hung}: {''.join(words)[-300:].strip()}"


def _lines(process: subprocess.Popen, silence: float) -> Iterator[tuple[str, bool]]:
    """Lines of standard output (True) and standard error (False) as they arrive.

    The process is killed after `silence` seconds without any.
    """
    assert process.stdout is not None and process.stderr is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, True)
        selector.register(process.stderr, selectors.EVENT_READ, False)
        rest = {True: b"", False: b""}
        while selector.get_map():
            ready = selector.select(silence)
            if not ready:
                process.kill()
                return
            for key, _ in ready:
                part = os.read(key.fd, 1 << 16)
                if not part:
                    selector.unregister(key.fileobj)
                    continue
                *whole, rest[key.data] = (rest[key.data] + part).split(b"\n")
                for line in whole:
                    yield line.decode(errors="replace") + "\n", key.data


def run_of(call: Call, config: Config, device: torch.device) -> Callable[[int], torch.Tensor]:
    """A function that runs a call with a config."""
    properties = device_of(device)
    if isinstance(config, CudaConfig):
        return lambda i: cuda_run.forward(call, properties, config)[0]
    return lambda i: triton.forward(call, properties, config)[0]


def checked_case(case: Case) -> Case:
    """A small problem of the same kind as a case."""
    return dataclasses.replace(
        case, name="checked", batch=1, q_heads=case.q_heads // case.kv_heads * 2, kv_heads=2, q_length=CHECKED_LENGTH, kv_length=CHECKED_LENGTH
    )


def differs(case: Case, config: Config, device: torch.device) -> str | None:
    """How a config's answer to a small problem differs from the pipeline oracle by more than rounding, or None if it
    doesn't."""
    small = checked_case(case)
    tensors = inputs(small, "normal", device)
    quantized = fp8attn.quantize(*tensors)
    call = call_of(*quantized, is_causal=small.causal, enable_gqa=small.q_heads != small.kv_heads)
    out = run_of(call, config, device)(0).float()
    if isinstance(config, CudaConfig):
        expected, _ = cuda_oracle.oracle(quantized, call, config, cuda_run.splits_of(call, config, device_of(device)))
    else:
        expected, _ = reference.pipeline(*quantized, arithmetic=reference.Arithmetic(config.block_n), causal=call.causal)
    rows = (out - expected).norm(dim=-1) / expected.norm(dim=-1)
    typical, worst = float(rows.median()), float(rows.max())
    if typical <= TYPICAL and worst <= WORST:  # False for NaN
        return None
    return f"rows differ from the oracle by {typical:.3g} typically and {worst:.3g} at worst; rounding explains {TYPICAL} and {WORST}"


def warm_triton(case: Case, config: dict[str, Any]) -> str | None:
    """Compile a config into Triton's disk cache. Returns the compiler's message on failure."""
    device = torch.device("cuda", torch.cuda.current_device())
    found = from_json(config)
    assert not isinstance(found, CudaConfig)
    try:
        for one in (checked_case(case), case):  # lengths divisible by 16 have separate kernels
            triton.forward(call_of(*inputs(one, "normal", device), **one.options), device_of(device), found, warmup=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def compiled_triton(case: Case, configs: Sequence[Config]) -> dict[Config, str]:
    """Compile configs in parallel. Returns the failures with their reasons."""
    workers = min(len(configs), os.cpu_count() or 1, 12)
    wrong = {}
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        started = {config: pool.submit(warm_triton, case, to_json(config)) for config in configs}
        for config, done in started.items():
            try:
                reason = done.result()
            except Exception as error:  # the process died
                reason = f"{type(error).__name__}: {error}"
            if reason is not None:
                wrong[config] = reason
    return wrong


def compiled_cuda(configs: Sequence[CudaConfig]) -> dict[Config, str]:
    """Build and load one library of all configs that compile.

    Configs that don't are found by bisection, and returned with their reasons.
    """
    good, wrong = _that_compile(list(configs))
    if good:
        build.load(tuple(good), _arch())
    return wrong


def _that_compile(configs: list[CudaConfig]) -> tuple[list[CudaConfig], dict[Config, str]]:
    """The configs that compile, and the reasons for the rest. Compiles in another process, because it may die."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        reason = pool.submit(_builds, tuple(configs)).result()
    if reason is None:
        return configs, {}
    if len(configs) == 1:
        return [], {configs[0]: reason}
    half = len(configs) // 2
    first, first_wrong = _that_compile(configs[:half])
    second, second_wrong = _that_compile(configs[half:])
    return first + second, {**first_wrong, **second_wrong}


def _arch() -> int:
    return device_of(torch.device("cuda", torch.cuda.current_device())).arch


def _builds(configs: tuple[CudaConfig, ...]) -> str | None:
    try:
        build.build(build.Kernels(configs, _arch()))
    except build.BuildError as error:
        return str(error)
    return None


def main() -> None:
    """Evaluate candidates from standard input.

    Prints a line of JSON for each candidate's last gate, and before each step that may crash.
    """
    request = json.loads(sys.stdin.read())
    case, backend, anchor = Case(**request["case"]), request["backend"], from_json(request["anchor"])
    configs = [from_json(entry) for entry in request["configs"]]
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**line: Any) -> None:
        replies.write(json.dumps(line) + "\n")
        replies.flush()

    def end(config: Config, gate: Gate, reason: str | None = None, us: float | None = None, ratio: float | None = None) -> None:
        if config in configs:
            say(number=configs.index(config), gate=gate, reason=reason, us=us, ratio=ratio)

    everyone = list(dict.fromkeys([anchor, *configs]))
    wrong: dict[Config, str] = {}
    if backend == "cuda":
        wrong = compiled_cuda([config for config in everyone if isinstance(config, CudaConfig)])
    elif device.type == "cuda":
        wrong = compiled_triton(case, everyone)
    for config, reason in wrong.items():
        end(config, "compiles", reason)

    gates = Gates.load()
    problem = Problem.of(case, "normal", device, rotate=False)
    call = call_of(*problem.sets[0], **case.options)
    expected = problem.expected()
    runs: dict[Config, Callable[[int], torch.Tensor]] = {}
    for config in (config for config in everyone if config not in wrong):
        say(number=configs.index(config) if config in configs else None, at_work=True)
        try:
            difference = differs(case, config, device)
            run = run_of(call, config, device)
            broken = gates.broken(Errors.of(run(0)[:, :, -problem.checked_rows :], expected, gates.bad), scale_free=True)
        except Exception as error:
            end(config, "correct", f"{type(error).__name__}: {error}")
            continue
        if difference is None and not broken:
            runs[config] = run
        else:
            end(config, "correct", difference or f"gates: {', '.join(broken)}")
    say(number=None, at_work=True)
    named = {str(number): run for number, run in enumerate(runs.values())}
    timed = time_all(named, 1, Protocol(**request["protocol"]), device) if runs else {}
    times = {config: timed[str(number)].timing for number, config in enumerate(runs)}
    for config, timing in times.items():
        if anchor in times:
            ratios = round_ratios(timing.round_us, times[anchor].round_us)
            end(config, "timed", None, timing.p50_us, statistics.median(ratios))
        else:
            end(config, "timed", "the shipped config failed", timing.p50_us)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
