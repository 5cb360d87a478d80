"""fp8attn.sdpa beside F.scaled_dot_product_attention: the kernel that runs, the error and the time.

On a GPU the default sizes are a model's; on a CPU they are small, and the FP8 numerics are modelled in plain torch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import fp8attn


def parsed() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16 if gpu else 2)
    parser.add_argument("--length", type=int, default=16384 if gpu else 512, help="queries and keys")
    parser.add_argument("--head-dim", type=int, default=128 if gpu else 64, help="a multiple of 8 from 16 to 256")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--calls", type=int, default=20 if gpu else 3, help="calls that are timed")
    return parser.parse_args()


def relative_l2(out: torch.Tensor, exact: torch.Tensor) -> float:
    return ((out.float() - exact.float()).norm() / exact.float().norm()).item()


def microseconds(function: Callable[[], object], calls: int, device: str) -> float:
    """The mean time of a call, after three that warm up."""

    def wait() -> None:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        function()
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    wait()
    return (time.perf_counter() - start) / calls * 1e6


def main() -> None:
    options = parsed()
    cpu = torch.device(options.device).type == "cpu"
    backend = "modelled" if cpu else "auto"  # "auto" is exact on a CPU
    torch.manual_seed(0)
    shape = (options.batch, options.heads, options.length, options.head_dim)
    q, k, v = (torch.randn(shape, device=options.device, dtype=torch.bfloat16) for _ in range(3))
    print(f"q, k, v: {shape} {q.dtype} on {options.device}{', causal' if options.causal else ''}")

    plan = fp8attn.explain(q, k, v, is_causal=options.causal, backend=backend)
    print(f"runs: {plan.backend} {plan.kernel}, computes in {plan.compute}")
    for reason in plan.because:
        print(f"  because: {reason}")

    exact = fp8attn.reference_sdpa(q, k, v, is_causal=options.causal, out_dtype=torch.float32)
    bf16 = F.scaled_dot_product_attention(q, k, v, is_causal=options.causal)
    print(f"relative L2 error of F.scaled_dot_product_attention: {relative_l2(bf16, exact):.4f}")
    for name, recipe in (("the default recipe", fp8attn.Recipe()), ("fp8attn.PRECISE", fp8attn.PRECISE)):
        out = fp8attn.sdpa(q, k, v, is_causal=options.causal, recipe=recipe, backend=backend)
        print(f"relative L2 error of {name}: {relative_l2(out, exact):.4f}")

    theirs = microseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=options.causal), options.calls, options.device)
    ours = microseconds(lambda: fp8attn.sdpa(q, k, v, is_causal=options.causal, backend=backend), options.calls, options.device)
    print(f"time of a call: F.scaled_dot_product_attention {theirs:.0f} µs, fp8attn.sdpa {ours:.0f} µs, quantization included")
    if cpu:
        print("the numerics are modelled on a CPU: its times say nothing of a GPU")


if __name__ == "__main__":
    main()
