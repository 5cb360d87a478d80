"""Wrong arguments of rotary_embedding: what is done, the error, and what it says."""

from __future__ import annotations

import functools
from typing import Any

import torch

import fp8attn
from fp8attn import PagedBatch
from operator_errors import Sample


def arguments(device: torch.device) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    q, k, cos, sin = (torch.randn(shape, generator=g).to(device) for shape in ((2, 4, 3, 64), (2, 2, 3, 64), (40, 32), (40, 32)))
    table, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0], [0]], [20, 32]))
    return dict(query=q, key=k, batch=PagedBatch(table, lengths), cos=cos, sin=sin)


X = torch.zeros(2, 4, 3, 64)
TABLE = torch.zeros(2, 1, dtype=torch.int32)
ENDS = torch.tensor([3, 3], dtype=torch.int32)

WRONG: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"query": [1.0]}, TypeError, "query is a list; it must be a torch.Tensor"),
    ({"query": X.double()}, TypeError, "query is torch.float64; it must be one of"),
    ({"query": X[0]}, ValueError, r"query has shape \(4, 3, 64\); without cu_seqlens it must be \(batch, heads, length, head_dim\)"),
    ({"query": X.transpose(2, 3)}, ValueError, "query has strides"),
    ({"query": torch.zeros(2, 4, 3, 12)}, ValueError, "query has head_dim 12; it must be a multiple of 8"),
    ({"query": torch.zeros(3, 4, 3, 64)}, ValueError, "query has batch 3; it must be 2"),
    ({"query": X.clone().requires_grad_()}, RuntimeError, "query requires grad"),
    ({"key": X[:, :2].half()}, TypeError, "key is torch.float16; it must be query's torch.float32"),
    ({"key": X[:, :2, :2]}, ValueError, "key has length 2; it must be 3"),
    ({"key": X[:, :2, :, :32].contiguous()}, ValueError, "key has head_dim 32; it must be 64"),
    ({"batch": None}, TypeError, "batch is a NoneType; it must be a fp8attn.PagedBatch"),
    ({"batch": PagedBatch(TABLE, ENDS.long())}, TypeError, "lengths is torch.int64; it must be torch.int32"),
    ({"cos": 1.0}, TypeError, "cos is a float; it must be a torch.Tensor"),
    ({"cos": torch.zeros(40, 32).half()}, TypeError, "cos is torch.float16; it must be torch.float32"),
    ({"cos": torch.zeros(40, 33)}, ValueError, r"cos has shape \(40, 33\); it must be \(positions, pairs of channels\), of at most 32 pairs"),
    ({"cos": torch.zeros(32)}, ValueError, r"cos has shape \(32,\)"),
    ({"cos": torch.zeros(32, 40).T}, ValueError, "cos has strides"),
    ({"cos": torch.zeros(40, 64)[:, ::2]}, ValueError, r"cos has strides \(64, 2\); it must be contiguous"),
    ({"sin": torch.zeros(39, 32)}, ValueError, r"sin is \(39, 32\), torch.float32; it must be as cos, \(40, 32\), torch.float32"),
    ({"interleaved": 1}, TypeError, "interleaved is a int; it must be a bool"),
    ({"backend": "cuda"}, ValueError, "backend is 'cuda'; it must be one of"),
)


def turning(wrong: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """rotary_embedding with other arguments."""
    return fp8attn.rotary_embedding(**arguments(torch.device("cpu")) | wrong)


ROTARY_ERRORS: tuple[Sample, ...] = tuple((functools.partial(turning, wrong), error, message) for wrong, error, message in WRONG)
