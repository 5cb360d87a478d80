"""Operators that are called directly: wrong arguments are errors that name the argument, and no kernel sees them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fp8attn.layout import padded_length
from operator_errors import FORWARD, OPERATOR_ERRORS, Sample, forward, half_keys, plain


@pytest.mark.parametrize("sample", OPERATOR_ERRORS, ids=lambda sample: sample[2][:40])
def test_errors_name_the_argument(sample: Sample) -> None:
    action, kind, message = sample
    with pytest.raises(kind, match=message):
        action()


SIZES = [(name, axis) for name, x in FORWARD.items() if isinstance(x, torch.Tensor) for axis in range(x.dim())]


@given(name_and_axis=st.sampled_from(SIZES), change=st.sampled_from((-1, 1, 8, 128)), backend=st.sampled_from(("modelled", "triton", "auto", "cuda")))
def test_every_size_of_a_call_is_checked(name_and_axis: tuple[str, int], change: int, backend: str) -> None:
    """One size of one tensor is another. None fits: the other tensors have it, or its padding, too. But values may hold
    further blocks."""
    assume((*name_and_axis, change) != ("v", 3, 128))
    name, axis = name_and_axis
    shape = list(FORWARD[name].shape)
    shape[axis] += change
    if name == "q" and axis == 1 and change == 8:
        shape[axis] = 5
    with pytest.raises((ValueError, TypeError), match=rf"^({'|'.join(FORWARD)}|head_dim) "):
        forward(backend, **{name: torch.zeros(shape, dtype=FORWARD[name].dtype)})()


def test_the_call_without_a_fault_is_right() -> None:
    """So that what the others raise for is the fault."""
    out, lse = forward()()
    assert out.shape == (2, 4, 70, 16) and lse.shape == (2, 4, 70) and not out.any()
    assert FORWARD["v"].shape[3] == padded_length(FORWARD["kv_length"])
    assert not plain()()[0].any() and not half_keys()()[0].any()
