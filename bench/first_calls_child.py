"""Run as a script by `first_calls`, in a process of its own: times what comes first, in lines of JSON. Its arguments are
some of KINDS.

It imports nothing of the benchmarks, because they import fp8attn, which is timed here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

FOLDERS = ("FP8ATTN_CACHE", "TRITON_CACHE_DIR")
"""Environment variables: folders of what is compiled."""

KINDS: dict[str, dict[str, Any]] = {
    "4096": {},
    "4608": {"length": 4608},
    "4609 keys": {"keys": 4609},
    "5000 queries, 77 keys": {"length": 5000, "keys": 77},
    "causal 2000": {"length": 2000, "is_causal": True},
    "GQA 6000": {"length": 6000, "kv_heads": 2},
    "bool mask": {"mask": True},
    "LSE": {"return_lse": True},
    "fp16": {"dtype": "float16"},
    "D 64": {"dim": 64},
    "D 80": {"dim": 80},
    "D 256": {"dim": 256},
    "PRECISE": {"recipe": "PRECISE"},
    "PRECISE 6000": {"length": 6000, "recipe": "PRECISE"},
    "1 query, 5000 keys": {"length": 1, "keys": 5000},
}
"""Kinds of calls, by how they differ from the first, in the order in which they are called."""


def compiled() -> int:
    """Number of libraries and GPU binaries in the folders."""
    files = (path for name in FOLDERS for path in Path(os.environ[name]).rglob("*"))
    return sum(path.suffix in (".so", ".cubin") for path in files)


def main() -> None:
    del sys.path[0]  # this script's folder, in which a module is named like one of Python's
    start = time.perf_counter()
    import torch

    torch_s = time.perf_counter() - start
    wait = torch.cuda.synchronize
    torch.zeros(1, device="cuda")  # makes CUDA's context, which is PyTorch's own time
    wait()
    start = time.perf_counter()
    import fp8attn

    print(json.dumps({"torch_s": torch_s, "import_s": time.perf_counter() - start}), flush=True)

    def call(length: int = 4096, keys: int = 0, heads: int = 8, kv_heads: int = 8, dim: int = 128, dtype: str = "bfloat16", mask: bool = False,
             recipe: str = "", **options: Any) -> dict[str, float]:  # fmt: skip
        shapes = (heads, length), (kv_heads, keys or length), (kv_heads, keys or length)
        q, k, v = (torch.randn(1, *shape, dim, device="cuda", dtype=getattr(torch, dtype)) for shape in shapes)
        if mask:
            options["attn_mask"] = torch.arange(k.shape[2], device="cuda").view(1, 1, 1, -1) < k.shape[2] * 9 // 10
        if recipe:
            options["recipe"] = getattr(fp8attn, recipe)
        before = compiled()
        wait()
        start = time.perf_counter()
        fp8attn.sdpa(q, k, v, enable_gqa=heads != kv_heads, **options)
        wait()
        return {"milliseconds": (time.perf_counter() - start) * 1e3, "compiled": compiled() - before}

    for name in sys.argv[1:]:
        options = KINDS[name]
        print(json.dumps({"kind": name, **call(**options), "again_ms": call(**options)["milliseconds"]}), flush=True)


if __name__ == "__main__":
    main()
