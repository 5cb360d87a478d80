"""Attention by the kernels of a backend, beside the oracle that models them."""

from __future__ import annotations

from typing import Any

import torch

from fp8attn import reference
from fp8attn.call import Call
from fp8attn.cuda import oracle as cuda_oracle
from fp8attn.cuda import run as cuda_run
from fp8attn.device import Device
from fp8attn.triton import run
from fp8attn.triton.configs import Config


def arithmetic_of(config: Config, call: Call) -> reference.Arithmetic:
    """How a Triton kernel of this config computes a call."""
    return reference.Arithmetic(config.block_n, call.compute, config.exact)


def run_call(quantized: tuple, call: Call, device: Device, sdpa: Any, config: Any = None) -> tuple[torch.Tensor, ...]:
    """out, lse and the pipeline oracle's, which gets how they were computed.

    Args:
        sdpa: conftest.Attention.
        config: one of the backend's; None: the one that is chosen for the call.
    """
    if sdpa.backend == "cuda":
        instance = cuda_run.choose(call, device) if config is None else config
        return *cuda_run.forward(call, device, instance), *cuda_oracle.oracle(quantized, call, instance, cuda_run.splits_of(call, instance, device))
    config = run.choose(call, device) if config is None else config
    expected = reference.pipeline(
        *quantized, call.attn_mask, arithmetic=arithmetic_of(config, call), causal=call.causal, scoring=call.scoring, mean_scores=call.mean_scores
    )  # fmt: skip
    return *run.forward(call, device, config), *expected
