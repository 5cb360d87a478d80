"""The operators of rotary position embeddings. See `ops` for what all operators have in common."""

from __future__ import annotations

import torch

from . import triton as triton_kernels
from . import validate
from .ops import current, register
from .paged_ops import runs_triton
from .pages import PagedBatch
from .rotary import Angles, turned

BACKENDS = ("auto", "triton", "modelled")


def check_backend(backend: object) -> None:
    """Check the backend that is to turn queries and keys.

    Raises:
        ValueError: there is no such backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {BACKENDS}")


def _turn_by(backend: str):
    def turn(
        query: torch.Tensor, key: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, page_table: torch.Tensor, lengths: torch.Tensor,
        counts: torch.Tensor | None, cu_seqlens: torch.Tensor | None, interleaved: bool,
    ) -> list[torch.Tensor]:  # fmt: skip
        batch, angles = PagedBatch(page_table, lengths, counts, None, None, cu_seqlens), Angles(cos, sin, interleaved)
        validate.check_turned(query, key, batch, angles)
        if runs_triton(backend, query.device):
            with current(query.device):
                return triton_kernels.rotary.turn(query, key, batch, angles)
        return [turned(x, batch, angles).contiguous() for x in (query, key) if x is not None]

    return turn


def _fake_turn(query, key, cos, sin, page_table, lengths, counts, cu_seqlens, interleaved):
    return [x.new_empty(x.shape) for x in (query, key) if x is not None]


for _name in BACKENDS:
    register(
        f"{_name}_rotary(Tensor query, Tensor? key, Tensor cos, Tensor sin, Tensor page_table, Tensor lengths, Tensor? counts, Tensor? cu_seqlens,"
        " bool interleaved) -> Tensor[]",
        _turn_by(_name),
        _fake_turn,
    )
