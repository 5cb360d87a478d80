"""Arguments of rotary_embedding: what is wrong is named, and torch.compile sees one operator."""

from __future__ import annotations

import pytest
import torch
from test_ops import CHECKS, COMPILER
from torch.library import opcheck

import fp8attn
from fp8attn.ops import library_ops
from operator_errors import Sample
from rotary_errors import ROTARY_ERRORS, arguments


@pytest.mark.parametrize("sample", ROTARY_ERRORS, ids=lambda sample: sample[2][:40])
def test_errors_name_the_argument(sample: Sample) -> None:
    action, kind, message = sample
    with pytest.raises(kind, match=message):
        action()


def test_opcheck(device: torch.device) -> None:
    given = arguments(device)
    table, lengths, *_ = given["batch"].tensors()
    for key in (given["key"], None):
        opcheck(library_ops.auto_rotary, (given["query"], key, given["cos"], given["sin"], table, lengths, None, None, False), test_utils=CHECKS)


def test_compiled_whole(device: torch.device) -> None:
    """fullgraph=True: the same bits as eager."""
    torch._dynamo.reset()
    given = arguments(device)

    def turn(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fp8attn.rotary_embedding(**given | {"query": query, "key": key})

    compiled = torch.compile(turn, fullgraph=True, backend=COMPILER)
    for mine, expected in zip(compiled(given["query"], given["key"]), turn(given["query"], given["key"]), strict=True):
        assert torch.equal(mine, expected)
