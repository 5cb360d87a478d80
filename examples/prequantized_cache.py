"""Keys and values quantized once, attended to by many queries: what it saves in memory and time, and what it costs in accuracy.

On a GPU the default sizes are a model's; on a CPU they are small, and the FP8 numerics are modelled in plain torch.
"""

from __future__ import annotations

import argparse
import time

import torch

import fp8attn


def parsed() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--heads", type=int, default=32 if gpu else 4, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8 if gpu else 2, help="key/value heads")
    parser.add_argument("--keys", type=int, default=65536 if gpu else 1024)
    parser.add_argument("--queries", type=int, default=128 if gpu else 16, help="queries of a step")
    parser.add_argument("--steps", type=int, default=32 if gpu else 4)
    parser.add_argument("--head-dim", type=int, default=128 if gpu else 64, help="a multiple of 8 from 16 to 256")
    return parser.parse_args()


def tensor_bytes(*quantized: fp8attn.Quantized) -> int:
    """Of the stored bytes, scales and means."""
    return sum(x.nbytes for one in quantized for x in (one.data, one.scale, one.mean) if x is not None)


def main() -> None:
    options = parsed()
    cpu = torch.device(options.device).type == "cpu"
    backend = "modelled" if cpu else "auto"  # "auto" is exact on a CPU
    torch.manual_seed(0)

    def drawn(heads: int, length: int) -> torch.Tensor:
        return torch.randn(1, heads, length, options.head_dim, device=options.device, dtype=torch.bfloat16)

    def synchronize() -> None:
        if not cpu:
            torch.cuda.synchronize()

    k, v = drawn(options.kv_heads, options.keys), drawn(options.kv_heads, options.keys)
    steps = [drawn(options.heads, options.queries) for _ in range(options.steps)]
    key, value = fp8attn.quantize(None, k, v)  # once
    print(f"{options.keys} keys of {options.kv_heads} heads: {k.nbytes + v.nbytes} bytes in bf16, {tensor_bytes(key, value)} quantized")

    times, outputs = {}, {}
    for name, (keys, values) in {"from bf16": (k, v), "quantized once": (key, value)}.items():
        for _ in range(3):  # compiles, and fills the launch cache
            fp8attn.sdpa(steps[0], keys, values, enable_gqa=True, backend=backend)
        synchronize()
        start = time.perf_counter()
        outputs[name] = [fp8attn.sdpa(q, keys, values, enable_gqa=True, backend=backend) for q in steps]
        synchronize()
        times[name] = (time.perf_counter() - start) / len(steps)
        exact = fp8attn.reference_sdpa(steps[0], k, v, enable_gqa=True)
        error = (outputs[name][0].float() - exact.float()).norm() / exact.float().norm()
        print(f"{name}: {times[name] * 1e6:.0f} µs a step of {options.queries} queries, relative L2 error {error:.4f}")

    largest = max((a.float() - b.float()).abs().max().item() for a, b in zip(*outputs.values(), strict=True))
    print(f"largest difference between the two: {largest:.1e}")
    if cpu:
        print("the numerics are modelled on a CPU: its times say nothing of a GPU")


if __name__ == "__main__":
    main()
