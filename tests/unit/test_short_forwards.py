"""Forwards of a patched model in which all calls have few keys aren't intercepted again, and are counted as if they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp8attn
from fp8attn.calibration.interception import _Mode
from fp8attn.integrations import patching

FEW = "fewer than min_keys=8 keys"
OPTIONS: dict = dict(min_keys=8, backend="modelled", decode="fp8attn")


class Attending(nn.Module):
    """Attention of x (1, 2, S, 16) to itself, and to tokens that it keeps if it keeps some."""

    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        self.keeps, self.kept = keeps, torch.zeros(1, 2, 0, 16)

    def forward(self, x: torch.Tensor, cache: object = None) -> torch.Tensor:
        keys = torch.cat((self.kept, x), 2)
        if self.keeps:
            self.kept = keys
        return F.scaled_dot_product_attention(x, keys, keys)


class Model(nn.Module):
    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        self.first, self.second = Attending(keeps), Attending()

    def forward(self, x: torch.Tensor, cache: object = None, fails: bool = False) -> torch.Tensor:
        x = self.second(self.first(x))
        if fails:
            raise RuntimeError("the forward fails")
        return x


@pytest.fixture
def intercepted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The functions that function modes see."""
    seen: list[object] = []
    original = _Mode.__torch_function__

    def record(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(_Mode, "__torch_function__", record)
    return seen


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def tokens(length: int) -> torch.Tensor:
    return torch.randn(1, 2, length, 16)


def test_short_forwards_are_intercepted_once(intercepted: list[object]) -> None:
    model, x = Model(), tokens(5)
    expected = model(x)
    with fp8attn.patch(model, **OPTIONS) as report:
        for count in range(1, 5):
            assert torch.equal(model(x), expected)
            assert {layer: dict(reasons) for layer, reasons in report.fallbacks.items()} == {"first": {FEW: count}, "second": {FEW: count}}
            assert bool(intercepted) == (count == 1)
            intercepted.clear()
        assert not report.replaced
        long = model(tokens(9))
        assert report.replaced == {"first": 1, "second": 1} and long.shape[2] == 9
        assert torch.equal(model(x), expected) and report.fallbacks["first"][FEW] == 5


def test_other_arguments_are_other_forwards(intercepted: list[object]) -> None:
    model = Model()
    with fp8attn.patch(model, **OPTIONS):
        for x in (tokens(5), tokens(6), tokens(5).double(), tokens(7)):
            intercepted.clear()
            model.second(x)
            assert intercepted
            intercepted.clear()
            model.second(x)
            assert not intercepted
        model.first(tokens(5))  # another module
        assert intercepted
    with torch.enable_grad(), fp8attn.patch(model, **OPTIONS):
        for _ in range(2):
            intercepted.clear()
            model(tokens(5).requires_grad_())
            assert intercepted  # these go to PyTorch for another reason


def test_what_may_change_is_always_intercepted(intercepted: list[object]) -> None:
    """A cache as an argument, of which nobody knows how many keys it has."""
    model = Model()
    with fp8attn.patch(model, **OPTIONS):
        for cache in (object(), [object()], {"a": object()}):
            for _ in range(2):
                intercepted.clear()
                model(tokens(5), cache)
                assert intercepted
        for _ in range(2):
            intercepted.clear()
            model(tokens(5), [1, ("a", 2.0, None), {"b": torch.zeros(2)}])
        assert not intercepted


def test_modules_that_keep_keys_are_noticed() -> None:
    """Forwards with the same arguments whose keys become more: after a while they are long enough."""
    model = Model(keeps=True)
    with fp8attn.patch(model, **OPTIONS) as report:
        for _ in range(patching.CHECKED + 2):
            model(tokens(1))
    assert report.replaced["first"] == 2 and report.fallbacks["first"][FEW] + report.replaced["first"] == patching.CHECKED + 2


def test_a_forward_that_fails_leaves_nothing(intercepted: list[object]) -> None:
    model = Model()
    with fp8attn.patch(model, **OPTIONS) as report:
        for _ in range(3):
            intercepted.clear()
            with pytest.raises(RuntimeError, match="the forward fails"):
                model(tokens(5), fails=True)
            assert intercepted
        model(tokens(5)), model(tokens(5))
        with pytest.raises(RuntimeError, match="the forward fails"):
            model(tokens(9), fails=True)
        assert model(tokens(9)) is not None and report.replaced == {"first": 2, "second": 2}


def test_not_too_many_kinds_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "MOST_KNOWN", 3)
    known = patching._ShortForwards()
    for kind in range(10):
        known.learn(kind, [("layer", FEW)])
        assert known.refusals(kind) == [("layer", FEW)] and len(known._known) <= 3
    known.learn(9, None)
    assert known.refusals(9) is None


def test_skipped_layers_and_calls_without_attention(intercepted: list[object]) -> None:
    model = Model()
    with fp8attn.patch(model, skip=("second",), **OPTIONS) as report:
        for count in (1, 2):
            intercepted.clear()
            model(tokens(5))
            assert intercepted and report.fallbacks["second"]["skip names it"] == count
    linear = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    with fp8attn.patch(linear, **OPTIONS):
        for _ in range(2):
            intercepted.clear()
            linear(torch.zeros(4))
            assert intercepted  # nothing is known of it
