"""Benchmarks: `python -m bench --help`."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before a kernel is decorated, that is, before fp8attn is imported
