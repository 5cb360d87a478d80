"""Benchmarks: `python -m bench --help` in a checkout, `python -m fp8attn.bench --help` where fp8attn is installed."""

import importlib.util
import os
import sys

if sys.argv[0] == "-m" and "-m" in sys.orig_argv and sys.orig_argv[sys.orig_argv.index("-m") + 1] == __name__:
    # Python is about to run this package; argv[0] is "-m" until then. Importing torch takes seconds
    lacking = [name for name in ("rich", "numpy") if importlib.util.find_spec(name) is None]
    if lacking:
        print(f"python -m {__name__} needs {' and '.join(lacking)}: pip install 'fp8attn[bench]'", file=sys.stderr)
        sys.exit(2)
    print(f"python -m {__name__}: loading PyTorch and fp8attn", file=sys.stderr, flush=True)

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before a kernel is decorated, that is, before fp8attn is imported
