"""Calibration: a model's calls are captured and measured, its layers get the cheapest recipes that are good enough, and these are applied."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as attention_by_another_name

from bench.cases import recent
from fp8attn import PRECISE, AttentionCall, Calibration, Recipe, calibrate, capture
from fp8attn.calibration import HeadErrors, LayerChoice, names, replacing
from fp8attn.calibration.errors import WORST, merged
from fp8attn.calibration.selection import Selection
from fp8attn.recipe import DEFAULT_RECIPE


class Layer(nn.Module):
    """Attention with two heads of 32. The first channels of its keys are about `bias`."""

    def __init__(self, bias: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192, bias=False)
        self.bias = bias

    def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 32)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        k = k + self.bias * (torch.arange(32, device=x.device) < 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if twice:
            out = out + F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device))
        return out.transpose(1, 2).flatten(2)


class Calls(nn.Module):
    """Calls one function with its arguments."""

    def __init__(self, function: Callable = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs) -> torch.Tensor:
        return self.function(*args, **kwargs)


def model_and_input(device: torch.device | str = "cpu", twice: bool = False) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(0.0), nn.LayerNorm(64), Layer(30.0)).to(device)
    if twice:
        model[0].forward = lambda x, forward=model[0].forward: forward(x, True)
    return model.eval().requires_grad_(False), 2 * torch.randn(1, 60, 64, device=device)


def captured(device: torch.device | str = "cpu", twice: bool = False) -> tuple[nn.Sequential, torch.Tensor, list[AttentionCall]]:
    model, x = model_and_input(device, twice)
    with capture(model) as recorded:
        out = model(x)
    assert torch.equal(model(x), out), "a captured model computes what it always computes"
    return model, x, recorded


def qkv(*shape: int, seed: int = 1, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator).to(device) for _ in range(3))
    return q, k, v


def choice(recipe: Recipe | None, masked: Recipe | None = None) -> LayerChoice:
    return LayerChoice(recipe, masked, True, ())


def calibrated(*layers: str, recipe: Recipe = DEFAULT_RECIPE, masked: Recipe | None = DEFAULT_RECIPE) -> Calibration:
    """A calibration for which nothing was measured."""
    return Calibration(0.06, (DEFAULT_RECIPE,), {layer: choice(recipe, masked) for layer in layers})


@contextlib.contextmanager
def recipes_used() -> Iterator[list[Recipe]]:
    """The recipes of the calls that fp8attn computes inside."""
    used: list[Recipe] = []

    def spy(*args, recipe, **kwargs):
        out = sdpa(*args, recipe=recipe, **kwargs)
        used.append(recipe)
        return out

    sdpa = replacing.sdpa
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replacing, "sdpa", spy)
        yield used


@contextlib.contextmanager
def warned_once(match: str) -> Iterator[None]:
    """Exactly one warning is given inside, and it matches."""
    with pytest.warns(UserWarning, match=match) as found:
        yield
    assert len(found) == 1


@pytest.fixture(autouse=True)
def _no_trace_left() -> Iterator[None]:
    yield
    assert torch._C._len_torch_function_stack() == 0
    assert torch.backends.mha.get_fastpath_enabled()


# ---- capture


def test_capture_names_layers_and_their_calls(device: torch.device) -> None:
    _, _, recorded = captured(device, twice=True)
    assert [call.layer for call in recorded] == ["0", "0#1", "2"]
    assert [call.is_causal for call in recorded] == [True, False, True]
    assert recorded[1].attn_mask is not None and recorded[0].query.shape == (1, 2, 60, 32)
    assert all(call.device == torch.device(device.type, call.device.index) and call.query.device.type == "cpu" for call in recorded)


def test_capture_ends() -> None:
    model, x, recorded = captured()
    model(x)
    assert len(recorded) == 2
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    "function",
    (
        attention_by_another_name,
        torch._C._nn.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    ),
)
def test_every_name_of_the_function(function: Callable) -> None:
    q, k, v = qkv(1, 2, 8, 16)
    model = Calls(function)
    with capture(model) as recorded:
        model(q, k, v, None, 0.0, True)
    assert [call.is_causal for call in recorded] == [True] and torch.equal(recorded[0].value, v)
    with calibrated("").applied(model, backend="reference") as report:
        model(q, k, v, None, 0.0, True)
    assert report.replaced == {"": 1}


def test_tensors_are_copies_of_what_the_model_had() -> None:
    q, k, v = qkv(1, 2, 8, 16)
    mask = torch.zeros(8, 8)
    with capture(model := Calls()) as recorded:
        model(q.requires_grad_(), k, v, mask)
    before = [x.clone() for x in recorded[0].tensors]
    for x in (q.detach(), k, v, mask):
        x.add_(1.0)
    assert all(torch.equal(x, y) and not x.requires_grad for x, y in zip(recorded[0].tensors, before, strict=True))


@pytest.mark.parametrize(
    "bias, lengths, causal",
    (
        (causal_upper_left, (5, 9), "top_left"),
        (causal_lower_right, (5, 9), "bottom_right"),
        (causal_upper_left, (9, 5), "top_left"),
    ),
)
def test_a_causal_bias_is_a_causal_mask(bias: Callable, lengths: tuple[int, int], causal: str) -> None:
    q, k, v = qkv(1, 2, 9, 16)
    q, k, v = q[:, :, : lengths[0]], k[:, :, : lengths[1]], v[:, :, : lengths[1]]
    with capture(model := Calls()) as recorded:
        out = model(q, k, v, bias(*lengths))
    (call,) = recorded
    assert call.attn_mask is None and call.is_causal and call.causal_alignment == causal
    assert call.checked().causal == causal
    with calibrated("", recipe=Recipe(recent=128), masked=None).applied(model, backend="reference") as report:
        torch.testing.assert_close(model(q, k, v, bias(*lengths)), out)
    assert report.replaced == {"": 1}
    by_bias = calibrate([AttentionCall("", q, k, v, attn_mask=bias(*lengths))], recipes=(Recipe(),))
    assert by_bias == calibrate(recorded, recipes=(Recipe(),))


def test_capture_records_what_autocast_casts_to() -> None:
    q, k, v = qkv(1, 2, 8, 16)
    model = Calls()
    with torch.autocast("cpu", torch.bfloat16), capture(model) as recorded:
        model(q, k.half(), v, torch.zeros(8, 8))
        with torch.autocast("cpu", enabled=False):
            model(q, k, v)
        model(q.double(), k.double(), v.double())
    assert [x.dtype for x in recorded[0].tensors] == [torch.bfloat16] * 4
    assert [x.dtype for x in recorded[1].tensors] == [torch.float32] * 3
    assert "query is torch.float64" in str(recorded.report) and len(recorded) == 2


@pytest.mark.parametrize(
    "arguments, reason",
    (
        (lambda q, k, v: {"dropout_p": 0.5}, "dropout_p is 0.5; it must be 0"),
        (lambda q, k, v: {"query": q[..., :12], "key": k[..., :12]}, "query has head_dim 12; it must be a multiple of 8 from 16 to 256"),
        (lambda q, k, v: {"query": q[0], "key": k[0], "value": v[0]}, r"query has shape \(2, 8, 16\); it must be \(batch, heads, length, head_dim\)"),
        (lambda q, k, v: {"query": q.double(), "key": k.double(), "value": v.double()}, "query is torch.float64; it must be one of"),
        (lambda q, k, v: {"key": k.mT.contiguous().mT}, r"key has strides .*; the last must be 1"),
        (lambda q, k, v: {"query": q[:, :, :0]}, r"query has shape \(1, 2, 0, 16\) and key \(1, 2, 8, 16\); no dimension may be 0"),
    ),
)
def test_calls_that_sdpa_does_not_take(arguments: Callable, reason: str) -> None:
    """They aren't recorded, and they go to F.scaled_dot_product_attention, with sdpa's reason; strict, they raise."""
    tensors = qkv(1, 2, 8, 16)
    call = dict(zip(("query", "key", "value"), tensors, strict=True)) | arguments(*tensors)
    model = Calls()
    with pytest.warns(UserWarning, match=f"capture recorded no call. Likely cause: {reason}"), capture(model) as recorded:
        expected = model(**call)
    assert recorded == [] and list(recorded.report.left_out) == [""]
    if "no dimension" in reason:
        return  # sdpa takes it
    calibration = calibrated("")
    with pytest.warns(UserWarning, match=reason), calibration.applied(model) as report:
        out = model(**call)
    assert out.shape == expected.shape and (call.get("dropout_p") or torch.equal(out, expected))
    assert report.fallbacks[""].total() == 1 and not report.replaced
    with pytest.raises((TypeError, ValueError), match=reason), calibration.applied(model, strict=True):
        model(**call)


def test_calls_that_need_gradients_get_them() -> None:
    q, k, v = qkv(1, 2, 8, 16)
    model, calibration = Calls(), calibrated("")
    with warned_once("query requires grad; fp8attn has no backward"), calibration.applied(model, backend="reference") as report:
        model(q.requires_grad_(), k, v).sum().backward()
        with torch.no_grad():
            model(q, k, v)
    assert q.grad is not None and report.replaced == {"": 1}
    with pytest.raises(RuntimeError, match="query requires grad"), calibration.applied(model, strict=True):
        model(q, k, v)
    with capture(model) as recorded:
        model(q, k, v)
    assert len(recorded) == 1


# ---- whose calls they are


class Node(nn.Module):
    """Calls attention, then each child and attention again; a child may be used in several places, and call itself."""

    def __init__(self, children: list[nn.Module], depth: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.depth = depth

    def forward(self, path: tuple[str, ...], depth: int | None = None) -> None:
        depth = self.depth if depth is None else depth
        self.attend(path, 0)
        if depth:
            self(path, depth - 1)
        for i, child in enumerate(self.parts):
            child((*path, f"parts.{i}"))
            self.attend(path, i + 1)

    def attend(self, path: tuple[str, ...], number: int) -> None:
        """The call's query says by whom it should be found: name and number, as an index into `EXPECTED`."""
        name = ".".join(path)
        with EXPECTED_LOCK:
            EXPECTED.append(name if number == 0 else f"{name}#{number}")
            x = torch.full((1, 1, 1, 16), float(len(EXPECTED) - 1))
        F.scaled_dot_product_attention(x, x, x)


EXPECTED: list[str] = []
EXPECTED_LOCK = threading.Lock()


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    made: list[Node] = []
    for _ in range(draw(st.integers(1, 4))):
        chosen = draw(st.lists(st.sampled_from(made), max_size=3, unique_by=id)) if made else []
        made.append(Node(chosen, draw(st.integers(0, 1))))
    return made[-1]


@given(model=nodes(), threads=st.integers(1, 3), contexts=st.integers(1, 2))
def test_calls_are_their_layers_in_every_thread(model: Node, threads: int, contexts: int) -> None:
    """Threads that run at once, nested contexts, modules that are used in several places and modules that call themselves."""
    EXPECTED.clear()
    barrier = threading.Barrier(threads)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            barrier.wait()
            model(())
        except BaseException as error:
            errors.append(error)

    with contextlib.ExitStack() as stack:
        recorded = [stack.enter_context(capture(model, calls_per_layer=1000)) for _ in range(contexts)]
        workers = [threading.Thread(target=run) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not errors
    for of_context in recorded:
        assert sorted(int(call.query[0, 0, 0, 0]) for call in of_context) == list(range(len(EXPECTED)))
        assert all(call.layer == EXPECTED[int(call.query[0, 0, 0, 0])] for call in of_context)


@pytest.mark.parametrize("error", (ValueError, KeyboardInterrupt))
@pytest.mark.parametrize("where", ("forward", "pre_hook", "hook"))
def test_an_exception_leaves_nothing_behind(where: str, error: type[BaseException]) -> None:
    model, x, _ = captured()

    def fail(*_: object) -> None:
        raise error("on purpose")

    with capture(model) as recorded:
        if where == "forward":
            model[2].qkv.register_forward_pre_hook(fail)
        elif where == "pre_hook":
            handle = model[2].register_forward_pre_hook(fail)
        else:
            handle = model[0].register_forward_hook(fail)
        with pytest.raises(error, match="on purpose"):
            model(x)
        assert torch._C._len_torch_function_stack() == 0
        first = [call.layer for call in recorded]
        (model[2].qkv._forward_pre_hooks.clear if where == "forward" else handle.remove)()
        model(x)
    assert first == ["0"] and [call.layer for call in recorded] == ["0", "0", "2"]
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_innermost_context_gets_a_call_first() -> None:
    model, x = model_and_input()
    calibration = calibrated("0", "2")
    with calibration.applied(model, backend="reference") as report, capture(model) as recorded:
        model(x)
    assert report.replaced == {"0": 1, "2": 1} and len(recorded) == 2
    with pytest.warns(UserWarning, match="recorded no call"), capture(model) as recorded, calibration.applied(model, backend="reference") as report:
        model(x)
    assert report.replaced == {"0": 1, "2": 1} and not recorded


def test_contexts_end_in_any_order() -> None:
    model, x = model_and_input()
    first, second = capture(model), capture(model)
    calls_of_first = first.__enter__()
    calls_of_second = second.__enter__()
    model(x)
    first.__exit__(None, None, None)
    model(x)
    second.__exit__(None, None, None)
    model(x)
    assert len(calls_of_first) == 2 and len(calls_of_second) == 4
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_copy_of_the_model_is_a_model_of_its_own() -> None:
    model, x = model_and_input()
    with capture(model):
        model(x)
        other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].qkv.weight.zero_()
    assert not torch.equal(other(x), model(x))
    with capture(other) as recorded:
        other(x)
    assert [call.layer for call in recorded] == ["0", "2"] and float(recorded[0].query.abs().max()) == 0


def test_a_forward_that_other_code_sets_stays() -> None:
    """As libraries do that move weights: before a context, and inside of one, until after it."""
    model, x = model_and_input()
    order: list[str] = []

    def wrap(name: str) -> None:
        own = model[0].forward
        model[0].forward = lambda *args: (order.append(name), own(*args))[1]

    wrap("before")
    with capture(model) as recorded:
        wrap("inside")
        model(x)
        with capture(model) as recorded_again:
            model(x)
    model(x)
    assert order == ["inside", "before"] * 3
    assert [call.layer for call in recorded] == ["0", "2"] * 2 and [call.layer for call in recorded_again] == ["0", "2"]


def test_multi_head_attention() -> None:
    """torch's own modules call attention where no function mode is active, and have a path that doesn't call it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 64, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)
    x, padding = torch.randn(2, 9, 64), torch.arange(9).expand(2, -1) > 6
    expected = model(x)
    with capture(model) as recorded:
        torch.testing.assert_close(model(x), expected)
        with torch.device("cpu"):  # another function mode
            model(x, src_key_padding_mask=padding)
    assert [call.layer for call in recorded] == ["layers.0.self_attn", "layers.1.self_attn"] * 2
    assert [call.attn_mask is None for call in recorded] == [True, True, False, False]
    with calibrated("layers.0.self_attn", "layers.1.self_attn").applied(model, backend="reference") as report:
        torch.testing.assert_close(model(x), expected)
    assert report.replaced.total() == 2


def test_multi_head_attention_that_returns_weights_is_reported() -> None:
    model = nn.MultiheadAttention(64, 2, batch_first=True).eval()
    x = torch.randn(1, 9, 64)
    with pytest.warns(UserWarning, match="need_weights is True; pass need_weights=False"), capture(model) as recorded:
        model(x, x, x)
    assert "(the model itself): 1 call not recorded: nn.MultiheadAttention" in str(recorded.report)
    with torch.no_grad(), calibrated("").applied(model, backend="reference") as report:
        model(x, x, x)
        model(x, x, x, need_weights=False)
    assert report.replaced == {"": 1} and report.fallbacks[""].total() == 1


# ---- limits


@given(limit=st.integers(1, 9), kinds=st.lists(st.integers(0, 3), max_size=150))
def test_a_selection_is_of_every_kind_and_even(limit: int, kinds: list[int]) -> None:
    selection, kept = Selection(limit), set()
    for kind in kinds:
        place, dropped = selection.offer(kind)
        assert kept.issuperset(dropped)
        kept -= set(dropped)
        if place is not None:
            kept.add(place)
        assert len(kept) <= limit
    if len(set(kinds)) <= limit:
        assert {(kind, 0) for kind in kinds} <= kept
    for kind in set(kinds):
        numbers = sorted(number for of_kind, number in kept if of_kind == kind)
        distances = {b - a for a, b in itertools.pairwise(numbers)}
        assert len(distances) <= 1, "calls are at even distances"
        if distances and len(set(kinds)) == 1:
            assert kinds.count(kind) - numbers[-1] <= distances.pop(), "up to the last one"
            assert len(numbers) > min(limit, len(kinds)) / 2 - 1


def test_many_calls_are_recorded_from_the_first_to_the_last() -> None:
    """Prefill and decode: a call of each kind, and decode from beginning to end."""
    model = Calls()
    q, k, v = qkv(1, 1, 40, 16)
    with warned_once("calls_per_layer is 4, some calls aren't recorded"), capture(model, calls_per_layer=4) as recorded:
        model(q[:, :, :20], k[:, :, :20], v[:, :, :20], is_causal=True)
        for length in range(20, 40):
            model(q[:, :, length : length + 1], k[:, :, : length + 1], v[:, :, : length + 1])
    assert [(call.query.shape[2], call.key.shape[2]) for call in recorded] == [(20, 20), (1, 21), (1, 29), (1, 37)]
    assert recorded.report.left_out[""] == {"calls_per_layer is 4": 17} and recorded.report.recorded == {"": 4}
    assert "4 calls of 1 layers recorded" in str(recorded.report)


def test_bytes_are_limited() -> None:
    """The first call of a layer takes the place of later calls of others, and what doesn't fit is counted."""
    model, x = model_and_input()
    size = 3 * 60 * 64 * 4
    with warned_once("max_bytes is .*, some layers may have no recorded call"), capture(model, max_bytes=3 * size) as recorded:
        for _ in range(3):
            model[0](x)
        assert recorded.report.nbytes == 3 * size
        model[2](x)
        model[2](x)
    assert recorded.report.nbytes == 3 * size
    assert [call.layer for call in recorded] == ["0", "0", "2"]
    assert {layer: reasons.total() for layer, reasons in recorded.report.left_out.items()} == {"0": 1, "2": 1}


def test_layers_share_a_mask_and_expanded_masks_are_small() -> None:
    model = nn.ModuleList([Calls(), Calls()])
    q, k, v = qkv(2, 4, 8, 16)
    with capture(model) as recorded:
        for layer in model:
            layer(q, k, v, (torch.arange(8) < 5).expand(2, 4, 8, 8))
    masks = [call.attn_mask for call in recorded]
    assert masks[0] is masks[1] is not None and masks[0].shape == (1, 1, 1, 8)
    assert recorded[0].checked().attn_mask.shape == (2, 4, 8, 8)


@pytest.mark.parametrize("limits", ({"calls_per_layer": 0}, {"max_bytes": -1}, {"calls_per_layer": True}, {"max_bytes": 1e9}))
def test_limits_are_positive_integers(limits: dict) -> None:
    ((name, value),) = limits.items()
    with pytest.raises(ValueError, match=f"{name} is {value!r}; it must be a positive integer"), capture(nn.Identity(), **limits):
        pass


# ---- calibrate


def test_cheapest_recipe_within_the_tolerance(device: torch.device) -> None:
    _, _, recorded = captured(device)
    recipes = (Recipe(q="tensor", k="tensor", smooth_k=False, rotate=0), Recipe(), Recipe(k="token", rotate=256))
    found = calibrate(recorded, tolerance=0.07, recipes=recipes)
    worst = {name: [max(errors.relative_l2) for errors in layer.tried] for name, layer in found.layers.items()}
    for name, layer in found.layers.items():
        good = [recipe for recipe, error in zip(recipes, worst[name], strict=True) if error <= 0.07]
        assert layer.within == bool(good) and layer.recipe == (good[0] if good else recipes[worst[name].index(min(worst[name]))])
    # the layers aren't alike: one needs its keys' mean removed
    assert worst["2"][0] > 1.5 * worst["2"][1] and worst["0"][0] < 1.5 * worst["0"][1]
    strict = calibrate(recorded, tolerance=1e-4, recipes=recipes[:1])
    assert not any(layer.within for layer in strict.layers.values())
    assert calibrate(recorded, tolerance=10.0, recipes=recipes[:1]).recipe_for("2") == recipes[0]


def test_errors_mean_what_they_say(device: torch.device) -> None:
    _, _, recorded = captured(device)
    for layer in calibrate(recorded, recipes=(Recipe(),)).layers.values():
        errors = layer.tried[0]
        for l2, db, cosine in zip(errors.relative_l2, errors.sqnr_db, errors.cosine, strict=True):
            assert db == pytest.approx(-20 * math.log10(l2), abs=1e-6)
            assert 1 - l2**2 <= cosine < 1  # the angle's sine is at most the relative error
        assert all(0 < mass < 0.2 for mass in errors.attention_mass) and all(0 < l1 < 0.2 for l1 in errors.relative_l1)
        assert len(errors.relative_l2) == 2


def test_errors_are_those_of_applied() -> None:
    """What is measured is what the model then computes."""
    q, k, v = qkv(1, 2, 50, 32)
    model = Calls()
    with capture(model) as recorded:
        exact = model(q, k, v, is_causal=True)
    calibration = calibrate(recorded, recipes=(Recipe(q="tensor", k="tensor"),))
    with calibration.applied(model, backend="modelled"):
        out = model(q, k, v, is_causal=True)
    error = (out - exact).flatten(2).norm(dim=-1) / exact.flatten(2).norm(dim=-1)
    assert calibration.layers[""].tried[0].relative_l2 == pytest.approx(error[0].tolist(), rel=1e-3)


def test_heads_are_told_apart_and_the_worst_call_counts(device: torch.device) -> None:
    """One head's keys have an outlier channel, in one of a layer's two calls."""
    q, k, v = qkv(1, 2, 80, 64, device=device)
    rough = k.clone()
    rough[:, 1, ::7, 3] += 40
    coarse = (Recipe(q="tensor", k="tensor", smooth_k=False),)
    both = calibrate([AttentionCall("x", q, k, v), AttentionCall("x", q, rough, v)], recipes=coarse).layers["x"].tried[0]
    plain = calibrate([AttentionCall("x", q, k, v)], recipes=coarse).layers["x"].tried[0]
    assert both.relative_l2[1] > 1.5 * plain.relative_l2[1]
    assert all(a >= b for a, b in zip(both.relative_l2, plain.relative_l2, strict=True))


def test_smoothed_queries_are_judged_by_what_is_attended_with(device: torch.device) -> None:
    """Their means' part of the scores is exact, in the answers and in the mass."""
    q, k, v = qkv(1, 2, 80, 64, seed=2, device=device)
    q[..., :2] += 40
    plain, smooth = calibrate([AttentionCall("x", q, k, v)], recipes=(Recipe(), Recipe(smooth_q=True))).layers["x"].tried
    for field in ("relative_l2", "attention_mass"):
        assert all(0 < a < 0.6 * b for a, b in zip(getattr(smooth, field), getattr(plain, field), strict=True))


def test_kept_keys_are_judged_as_they_are(device: torch.device) -> None:
    """A layer that looks back. Its calls with a mask get another recipe, because a recipe that keeps keys takes no mask."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = recent(*(torch.randn(1, 2, 260, 32, generator=generator) for _ in range(3)), generator)
    q, k, v = (x.to(device) for x in (q, k, v))
    recipes = (Recipe(recent=128), Recipe())
    without = AttentionCall("x", q, k, v, is_causal=True)
    found = calibrate([without], recipes=recipes).layers["x"]
    kept, plain = found.tried
    for field in ("relative_l2", "relative_l1", "attention_mass"):
        assert all(0 < a < 0.5 * b for a, b in zip(getattr(kept, field), getattr(plain, field), strict=True))
    assert found.recipe == recipes[0] and found.masked == recipes[1] and found.tried_masked == ()
    with_mask = AttentionCall("x", q, k, v, attn_mask=torch.ones(260, 260, dtype=torch.bool, device=device).tril())
    masked = calibrate([with_mask], recipes=recipes).layers["x"]
    assert masked.recipe == masked.masked == Recipe() and masked.tried == () and masked.tried_masked[0] is None
    assert masked.tried_masked[1].relative_l2 == pytest.approx(plain.relative_l2, rel=0.05)
    both = calibrate([without, with_mask], recipes=recipes)
    assert both.layers["x"] == replace(found, tried_masked=masked.tried_masked, within=masked.within)
    assert both.recipe_for("x") == recipes[0] and both.recipe_for("x", masked=True) == recipes[1]
    assert calibrate([without], recipes=recipes[:1]).layers["x"].masked is None


def test_keys_and_values_are_broadcast() -> None:
    """A batch of 1 and a head of 1 stand for as many as the query has, and masks for all that they are expanded to."""
    q, k, v = qkv(3, 4, 40, 32)
    short, causal = (Recipe(), Recipe(recent=128)), {"is_causal": True}
    narrow = calibrate([AttentionCall("x", q, k[:1], v[:1], **causal)], recipes=short)
    wide = calibrate([AttentionCall("x", q, k[:1].expand(3, -1, -1, -1).clone(), v[:1].expand(3, -1, -1, -1).clone(), **causal)], recipes=short)
    assert narrow == wide and narrow.layers["x"].within
    narrow = calibrate([AttentionCall("x", q, k[:, :1], v[:, :1], attn_mask=torch.arange(40) < 30)], recipes=short[:1])
    wide = calibrate(
        [AttentionCall("x", q, k[:, :1].repeat(1, 4, 1, 1), v[:, :1].repeat(1, 4, 1, 1), attn_mask=(torch.arange(40) < 30).expand(3, 4, 40, 40))],
        recipes=short[:1],
    )
    assert narrow == wide


def test_calls_of_a_layer_may_have_different_numbers_of_heads() -> None:
    """As those of generate: some libraries pass the query heads of one key/value head as its queries where there is one query."""
    q, k, v = qkv(2, 6, 30, 32)
    k, v = k[:, :2], v[:, :2]
    prefill = AttentionCall("x", q, k, v, is_causal=True)
    one_query = q[:, :, :1]
    decode, packed = AttentionCall("x", one_query, k, v), AttentionCall("x", one_query.reshape(2, 2, 3, 32), k, v)
    of = [calibrate([call], recipes=(Recipe(),)).layers["x"].tried[0] for call in (prefill, decode, packed)]
    assert [len(errors.relative_l2) for errors in of] == [6, 6, 2]
    together = calibrate([prefill, packed], recipes=(Recipe(),)).layers["x"].tried[0]
    assert together == merged([of[0], of[2]])
    for head in range(2):
        group = slice(3 * head, 3 * head + 3)
        assert together.relative_l2[head] == max(*of[0].relative_l2[group], of[2].relative_l2[head])
        assert together.cosine[head] == min(*of[0].cosine[group], of[2].cosine[head])
    # a packed call's error is that of its heads together; each is the largest of the batch, so the batch is one here
    first = [AttentionCall("x", x[:1], k[:1], v[:1]) for x in (decode.query, packed.query)]
    of_heads, of_groups = (calibrate([call], recipes=(Recipe(),)).layers["x"].tried[0].relative_l2 for call in first)
    assert all(min(of_heads[3 * i : 3 * i + 3]) <= of_groups[i] <= max(of_heads[3 * i : 3 * i + 3]) for i in range(2))


@pytest.mark.parametrize("value", (math.inf, -math.inf, math.nan))
def test_what_is_not_finite_is_never_within(value: float) -> None:
    q, k, v = qkv(1, 2, 30, 32)
    v[0, 1, 3, 5] = value
    calibration = calibrate([AttentionCall("", q, k, v)], recipes=(Recipe(), Recipe(recent=128)))
    choice = calibration.layers[""]
    assert not choice.within and choice.recipe is None and choice.masked is None
    assert choice.tried[0].relative_l2[1] == math.inf and choice.tried[0].cosine[1] == -1 and choice.tried[0].relative_l2[0] < 0.1
    q, k, v = qkv(1, 2, 30, 32)
    with pytest.warns(UserWarning, match="found no recipe with finite answers"), calibration.applied(model := Calls()) as report:
        model(q, k, v)
    assert report.fallbacks[""] == {replacing.NOT_FINITE: 1}
    with pytest.raises(ValueError, match="layer is ''; the calibration found no recipe"), calibration.applied(model, strict=True):
        model(q, k, v)


@contextlib.contextmanager
def setting(name: str) -> Iterator[None]:
    """A setting of the process that changes what torch computes."""
    if name == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            yield
    elif name == "default device":
        torch.set_default_device("meta")
        try:
            yield
        finally:
            torch.set_default_device(None)
    elif name == "default dtype":
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
    elif name == "deterministic":
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
    elif name == "matmul precision":
        torch.set_float32_matmul_precision("medium")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision("highest")
    else:
        with torch.inference_mode():
            yield


@pytest.mark.parametrize("name", ("autocast", "default device", "default dtype", "deterministic", "matmul precision", "inference mode"))
def test_settings_of_the_process_change_nothing(name: str) -> None:
    q, k, v = qkv(1, 4, 50, 32)
    recorded = [
        AttentionCall("x", q, k[:, :2], v[:, :2], is_causal=True),
        AttentionCall("x", q, k, v, attn_mask=torch.zeros(50, 50)),
        AttentionCall("y", q.bfloat16(), k.bfloat16(), v.bfloat16()),
    ]
    recipes = (Recipe(), Recipe(qk="int8", recent=128), Recipe(smooth_q=True, compute="f16"))
    expected = calibrate(recorded, recipes=recipes)
    with setting(name):
        found = calibrate(recorded, recipes=recipes)
    for layer, choice in expected.layers.items():
        for tried, tried_inside in zip(
            (*choice.tried, *choice.tried_masked), (*found.layers[layer].tried, *found.layers[layer].tried_masked), strict=True
        ):
            if tried is not None:
                # float32 is rounded elsewhere where products, or numbers without a dtype, are float64
                rel = {"matmul precision": 1e-3, "default dtype": 1e-5}.get(name, 1e-9)
                assert tried_inside.relative_l2 == pytest.approx(tried.relative_l2, rel=rel)
        assert (found.layers[layer].recipe, found.layers[layer].masked) == (choice.recipe, choice.masked)


def test_errors_of_arguments() -> None:
    q, k, v = qkv(1, 2, 8, 16)
    recorded = [AttentionCall("x", q, k, v)]
    with pytest.raises(ValueError, match="calls is empty"):
        calibrate([])
    with pytest.raises(ValueError, match="recipes is empty"):
        calibrate(recorded, recipes=())
    with pytest.raises(TypeError, match=r"calls\[1\] is a Tensor; it must be an AttentionCall"):
        calibrate([*recorded, q])
    with pytest.raises(TypeError, match=r"recipe is a str; it must be a fp8attn\.Recipe"):
        calibrate(recorded, recipes=(Recipe(), "fast"))
    for tolerance in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"tolerance is {tolerance}; it must be positive and finite"):
            calibrate(recorded, tolerance=tolerance)
    with pytest.raises(ValueError, match="call of layer 'x': key has head_dim 32; it must be query's, 16"):
        calibrate([AttentionCall("x", q, torch.cat((k, k), -1), v)])
    with pytest.raises(TypeError, match=r"call of layer 'x': query is torch.float64"):
        calibrate([AttentionCall("x", q.double(), k.double(), v.double())])
    with pytest.raises(ValueError, match=r"call of layer 'x': query has shape .* no dimension may be 0"):
        calibrate([AttentionCall("x", q, k[:, :, :0], v[:, :, :0])])
    with pytest.raises(KeyError, match="layer is '1'; it must be one of the calibration: 0, 2"):
        calibrated("0", "2").recipe_for("1")
    assert calibrated("0", "2").recipe_for("_orig_mod.2") == Recipe()


# ---- applied


def test_applied_and_its_report() -> None:
    """Each layer's calls by its recipes, with and without a mask; the report says which, and what was left."""
    model, x = model_and_input(twice=True)
    model.append(Layer())
    by_layer = {"0": choice(Recipe(recent=128), Recipe()), "0#1": choice(Recipe(recent=128), Recipe(rotate=256)), "2": choice(Recipe(rotate=16))}
    calibration = Calibration(0.06, (Recipe(),), by_layer | {"2#1": choice(Recipe())})
    expected = model(x)
    warning = warned_once("a call of layer '3': the layer isn't in the calibration")
    with recipes_used() as used, warning, calibration.applied(model, backend="reference") as report:
        out = model(x)
        model(x)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert used == [Recipe(recent=128), Recipe(rotate=256), Recipe(rotate=16)] * 2
    assert report.replaced == {"0": 2, "0#1": 2, "2": 2} and report.never_called == ["2#1"]
    assert str(report).splitlines() == [
        "6 calls of 3 layers by fp8attn",
        "3: 2 calls by F.scaled_dot_product_attention: the layer isn't in the calibration",
        "calibrated but never called: 2#1",
    ]
    missing = pytest.raises(KeyError, match="layer is '3'; it must be one of the calibration: 0, 0#1, 2, 2#1")
    with missing, calibration.applied(model, strict=True, backend="reference"):
        model(x)
    assert model[3].forward.__func__ is Layer.forward


def test_a_mask_where_all_recipes_keep_keys() -> None:
    q, k, v = qkv(1, 2, 8, 16)
    calibration, model = calibrated("", recipe=Recipe(recent=128), masked=None), Calls()
    with pytest.warns(UserWarning, match="attn_mask is given, and all recipes of the calibration keep keys"), calibration.applied(model) as report:
        model(q, k, v, torch.ones(8, 8, dtype=torch.bool))
    assert report.fallbacks[""].total() == 1
    with pytest.raises(ValueError, match="layer is ''; attn_mask is given"), calibration.applied(model, strict=True):
        model(q, k, v, torch.ones(8, 8, dtype=torch.bool))


def test_reasons_of_a_layer_are_limited() -> None:
    model = Calls()
    with warnings.catch_warnings(), calibrated("").applied(model) as report:
        warnings.simplefilter("ignore")
        for length in range(1, 30):
            model(*qkv(2, length, 16))
    assert len(report.fallbacks[""]) == 9 and report.fallbacks[""].total() == 29 and report.fallbacks[""]["other reasons"] == 21


def test_errors_that_are_not_refusals_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a launch failed")

    monkeypatch.setattr(replacing, "sdpa", broken)
    with pytest.raises(RuntimeError, match="a launch failed"), calibrated("").applied(model := Calls()):
        model(*qkv(1, 2, 8, 16))


def test_applied_casts_as_autocast_does() -> None:
    q, k, v = qkv(1, 2, 8, 16)
    with torch.autocast("cpu", torch.bfloat16), calibrated("").applied(model := Calls(), backend="reference") as report:
        out = model(q, k.half(), v)
        expected = F.scaled_dot_product_attention(q, k.half(), v)
    assert out.dtype == expected.dtype == torch.bfloat16 and report.replaced == {"": 1}
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def test_nothing_happens_silently() -> None:
    """Warnings name the likely cause where no call was seen."""
    calibration = calibrated("0")
    flash = nn.Sequential(nn.Linear(4, 4))
    flash.config = SimpleNamespace(_attn_implementation="flash_attention_2")
    xformers = nn.Sequential(nn.Identity())
    xformers[0].processor = type("XFormersAttnProcessor", (), {})()
    for model, run, cause in (
        (flash, True, "_attn_implementation is 'flash_attention_2'; load the model with attn_implementation='sdpa'"),
        (xformers, True, "an attention processor is a XFormersAttnProcessor"),
        (nn.Sequential(nn.Identity()), True, "matrix products of their own, or by kernels of another library"),
        (nn.Sequential(nn.Identity()), False, "no module of the model ran its forward inside the context"),
    ):
        for context in (capture(model), calibration.applied(model)):
            with warned_once(cause), context:
                if run:
                    model(torch.ones(4))


class Wrapper(nn.Module):
    """As DistributedDataParallel, which needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.module(*args)


@pytest.mark.parametrize("outside", (torch.compile, Wrapper, checkpoint_wrapper, lambda m: torch.compile(Wrapper(m)), lambda m: m))
@pytest.mark.parametrize("inside", (torch.compile, Wrapper, checkpoint_wrapper, lambda m: m))
def test_names_are_those_of_the_model_without_wrappers(outside: Callable, inside: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(names.WRAPPERS, f"{Wrapper.__module__}.Wrapper", "module")
    model, _ = model_and_input()
    plain = list(names.layer_names(model).values())
    model[0] = inside(model[0])
    assert list(names.layer_names(outside(model)).values()) == plain
    assert names.unwrapped(outside(model)) is model
    assert names.unwrapped_name("_orig_mod.layers.0._checkpoint_wrapped_module.module.attention") == "layers.0.module.attention"


def test_models_that_cannot_be_intercepted() -> None:
    model, _ = model_and_input()
    calibration = calibrated("encoder.0", "encoder.1")
    for context in (capture, calibration.applied):
        with pytest.raises(TypeError, match=r"model is a SimpleNamespace; it must be a torch.nn.Module: of a pipeline"), context(SimpleNamespace()):
            pass
        parallel = nn.ModuleDict({"part": nn.DataParallel(model)})
        with pytest.raises(ValueError, match=r"model has a torch.nn.DataParallel at 'part'; .*: pass its .module"), context(parallel):
            pass
    with pytest.raises(ValueError, match=r"model has none of the calibration's layers: 'encoder.0', 'encoder.1'"), calibration.applied(model):
        pass
    with pytest.raises(ValueError, match="backend is 'fast'; it must be"), calibrated("0").applied(model, backend="fast"):
        pass


# ---- torch.compile


class Graphs:
    """A backend of torch.compile that keeps what the graphs call."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable:
        self.calls.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    def new(self) -> dict[str, int]:
        """How often the graphs since the last time call fp8attn, and torch's attention."""
        calls = [name for graph in self.calls for name in graph]
        self.calls.clear()
        counts = {"torch": sum("scaled_dot_product" in name for name in calls)}
        counts["fp8attn"] = sum(name.startswith("fp8attn.") and "quantize" not in name for name in calls)
        return {name: count for name, count in counts.items() if count}


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch.compiler.reset()
    yield Graphs()
    torch.compiler.reset()


def test_compiled_models_call_fp8attn(graphs: Graphs) -> None:
    """Compiled before, inside one graph, in another thread, by other recipes, and as before after it."""
    model, x = model_and_input()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    before = compiled(x)
    assert graphs.new() == {"torch": 2}
    calibration = calibrated("0", "2")
    with calibration.applied(model, backend="modelled") as report:
        expected = model(x)
        first = compiled(x)
        assert graphs.new() == {"fp8attn": 2}
        answers: list[torch.Tensor] = []

        def run() -> None:
            with torch.no_grad():
                answers.append(compiled(x))

        worker = threading.Thread(target=run)
        worker.start()
        worker.join()
    assert torch.equal(first, expected) and torch.equal(answers[0], expected) and not torch.equal(before, expected)
    assert report.replaced == {"0": 1, "2": 1} and report.compiled_by_fp8attn == ["0", "2"]
    graphs.new()
    with calibration.applied(compiled, backend="modelled") as report:
        assert torch.equal(compiled(x), expected)
    assert not graphs.new(), "equal recipes share a graph"
    assert "2 layers by fp8attn; their calls aren't counted" in str(report) and not report.never_called
    assert torch.equal(compiled(x), before)


def test_compiled_models_follow_every_layers_recipe(graphs: Graphs) -> None:
    """Also where recipes are objects that torch.compile finds as globals, too."""
    model, x = model_and_input()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for first, second in ((DEFAULT_RECIPE, PRECISE), (Recipe(q="tensor"), PRECISE), (Recipe(q="tensor"), Recipe())):
        layers = {"0": choice(first), "2": choice(second)}
        with Calibration(0.06, (DEFAULT_RECIPE,), layers).applied(model, backend="modelled"):
            assert torch.equal(compiled(x), model(x)) and graphs.new() == {"fp8attn": 2}


def test_compiled_models_with_calls_that_go_to_torch(graphs: Graphs) -> None:
    model, x = model_and_input()
    model[0].qkv.weight.requires_grad_()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    with pytest.warns(UserWarning, match="computed no call of the model"), calibrated("0").applied(model, backend="reference") as report:
        compiled(x)
    assert graphs.new() == {"torch": 2}
    assert report.compiled == {"0": {replacing.REFUSED_IN_GRAPH}, "2": {replacing.UNCALIBRATED}} and not report.replaced
    assert f"graphs of torch.compile: 2 by F.scaled_dot_product_attention: {replacing.UNCALIBRATED}" in str(report)


def test_compiled_models_with_graph_breaks(graphs: Graphs) -> None:
    model, x = model_and_input()
    for i in (0, 2):
        model[i].qkv.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    with calibrated("0", "2").applied(model, backend="modelled") as report:
        expected = model(x)
        assert torch.equal(torch.compile(model, backend=graphs)(x), expected)
    assert graphs.new() == {"fp8attn": 2} and report.replaced == {"0": 1, "2": 1}


def test_compiled_multi_head_attention(graphs: Graphs) -> None:
    model = nn.TransformerEncoderLayer(64, 2, 64, batch_first=True, dropout=0.0).eval().requires_grad_(False)
    compiled, x = torch.compile(model, backend=graphs, fullgraph=True), torch.randn(1, 9, 64)
    expected = compiled(x)
    assert not graphs.new(), "torch's fast path calls no attention"
    with calibrated("self_attn").applied(model, backend="reference") as report:
        torch.testing.assert_close(compiled(x), expected, atol=1e-5, rtol=1e-5)
    assert report.compiled_by_fp8attn == ["self_attn"]


def test_capture_of_compiled_models(graphs: Graphs) -> None:
    """They run eagerly. With fullgraph=True torch.compile says why it can't."""
    model, x = model_and_input()
    compiled = torch.compile(model, backend=graphs)
    expected = compiled(x)
    with capture(compiled) as recorded:
        assert torch.equal(compiled(x), expected)
    assert [call.layer for call in recorded] == ["0", "2"]
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile the model without fullgraph=True"), capture(model):
        torch.compile(model, backend=graphs, fullgraph=True)(x)


def test_capture_of_a_compiled_function_in_a_model(graphs: Graphs) -> None:
    model = Calls(torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v) + 1, backend=graphs))
    q, k, v = qkv(1, 2, 8, 16)
    expected = model(q, k, v)
    with capture(model) as recorded:
        assert torch.equal(model(q, k, v), expected)
    assert len(recorded) == 1
    with calibrated("").applied(model, backend="reference") as report:
        torch.testing.assert_close(model(q, k, v), expected)
    assert report.compiled_by_fp8attn == [""]


# ---- files


def errors(*numbers: float) -> HeadErrors:
    return HeadErrors(numbers, numbers, numbers, numbers, numbers)


STORED = Calibration(
    0.05,
    (Recipe(), Recipe(recent=128)),
    {
        "a": LayerChoice(Recipe(recent=128), Recipe(), True, (errors(0.1, 0.2), errors(0.01, 0.02)), (errors(0.01, 0.02), None)),
        "b": LayerChoice(None, None, False, (errors(math.inf, -math.inf), errors(math.inf, 0.5))),
    },
)


def test_saved_and_loaded(tmp_path: Path) -> None:
    STORED.save(tmp_path / "c.json")
    text = (tmp_path / "c.json").read_text()
    assert Calibration.load(tmp_path / "c.json") == STORED
    assert json.loads(text, parse_constant=pytest.fail)["version"] == 3, "other programs can read it"
    assert str(STORED).splitlines() == [
        "2 layers, tolerance 0.05",
        "a: Recipe(recent=128), with attn_mask Recipe()",
        "b: F.scaled_dot_product_attention (above the tolerance)",
    ]


def test_files_of_version_1(tmp_path: Path) -> None:
    """One recipe a layer: its errors choose the recipe for masks. With Infinity, which isn't JSON, and with names of wrappers."""
    recipes = (Recipe(recent=128), Recipe(), Recipe(qk="int8"))

    def loaded(chosen: int, *tried: float) -> LayerChoice:
        layer = {"recipe": asdict(recipes[chosen]), "within": True, "tried": [asdict(errors(each)) for each in tried]}
        found = {"tolerance": 0.05, "recipes": [asdict(recipe) for recipe in recipes], "layers": {"_orig_mod.a": layer}}
        (tmp_path / "c.json").write_text(json.dumps(found))
        return Calibration.load(tmp_path / "c.json").layers["a"]

    assert loaded(0, 0.01, 0.2, 0.04) == LayerChoice(recipes[0], recipes[2], True, (errors(0.01), errors(0.2), errors(0.04)))
    assert loaded(0, 0.01, 0.2, 0.1).masked == recipes[2]
    assert loaded(0, 0.01, math.inf, math.inf).masked is None
    assert loaded(1, math.inf, 0.04, 0.03).masked == loaded(1, math.inf, 0.04, 0.03).recipe == recipes[1]


def changed(*path: str | int, to: object = None, remove: bool = False) -> Callable[[dict], object]:
    """A change of one entry of a file."""

    def change(found: dict) -> dict:
        place = found
        for step in path[:-1]:
            place = place[step]
        if remove:
            del place[path[-1]]
        else:
            place[path[-1]] = to
        return found

    return change


LAYER = ("layers", "a")
MALFORMED: list[tuple[str | Callable[[dict], object], str]] = [
    ("", r"the file isn't JSON \(.*\); it must be one that Calibration.save wrote"),
    ('{"tolerance": 0.05', "the file isn't JSON"),
    ("\x00\xff", "the file isn't JSON"),
    ("[" * 100_000, "the file isn't JSON"),
    (lambda found: [found], "the file is .*; it must be an object, as Calibration.save writes it"),
    (lambda found: None, "the file is None; it must be an object"),
    (lambda found: {"layers": {}}, "tolerance is missing; it must be there"),
    (changed("format", to="other"), "format is 'other'; it must be 'fp8attn.calibration'"),
    (changed("format", remove=True), "format is None; it must be 'fp8attn.calibration'"),
    (changed("version", to=4), "version is 4; it must be 3 or less: this fp8attn is older than the file, update it"),
    (changed("version", to="2"), "version is '2'; it must be a positive integer"),
    (changed("version", to=True), "version is True; it must be a positive integer"),
    (changed("version", remove=True), "version is None; it must be a positive integer"),
    (changed("tolerance", to="0.05"), "tolerance is '0.05'; it must be a number"),
    (changed("tolerance", to=True), "tolerance is True; it must be a number"),
    (changed("tolerance", to=-1), "tolerance is -1.0; it must be positive and finite"),
    (changed("tolerance", to="inf"), "tolerance is inf; it must be positive and finite"),
    (changed("recipes", to={}), r"recipes is \{\}; it must be a list"),
    (changed("recipes", to=[]), r"recipes is \[\]; it must be a list of one recipe at least"),
    (changed("recipes", remove=True), "recipes is missing; it must be there"),
    (changed("recipes", 1, to="default"), r"recipes\[1\] is 'default'; it must be an object of Recipe's fields"),
    (changed("recipes", 1, "rotate", to=True), r"recipes\[1\]: Recipe.rotate is True; it must be one of \(0, 16, 64, 256\)"),
    (changed("recipes", 1, "q", to=["token"]), r"recipes\[1\]: Recipe.q is \['token'\]; it must be one of"),
    (changed("recipes", 1, "pages", to=128), r"fields of recipes\[1\] is \['pages'\]; it must be .*: this fp8attn is older than the file, update it"),
    (changed("layers", to=[]), r"layers is \[\]; it must be an object, with a layer under each name"),
    (changed(*LAYER, to=7), r"layers\['a'\] is 7; it must be an object"),
    (changed(*LAYER, "recipe", remove=True), r"layers\['a'\].recipe is missing; it must be there"),
    (changed(*LAYER, "masked", remove=True), r"layers\['a'\].masked is missing; it must be there"),
    (changed(*LAYER, "masked", to={"recent": 128}), r"layers\['a'\].masked is .*; it must be a recipe without sinks and recent"),
    (changed(*LAYER, "within", to=1), r"layers\['a'\].within is 1; it must be true or false"),
    (changed(*LAYER, "tried", to=None), r"layers\['a'\].tried is None; it must be a list"),
    (changed(*LAYER, "tried", to=[None]), r"layers\['a'\].tried is 'a list of 1'; it must be a list of 2, one for each of recipes, or empty"),
    (changed(*LAYER, "tried", 0, "cosine", remove=True), r"layers\['a'\].tried\[0\] is .*; it must be an object of \['relative_l2'"),
    (changed(*LAYER, "tried", 0, "cosine", to=0.5), r"layers\['a'\].tried\[0\].cosine is 0.5; it must be a list"),
    (changed(*LAYER, "tried", 0, "cosine", to=[0.5, None]), r"layers\['a'\].tried\[0\].cosine is None; it must be a number"),
    (changed(*LAYER, "tried", 0, "cosine", to=[0.5]), r"the number of heads in layers\['a'\].tried\[0\] is .*; it must be equal and not 0"),
    (changed(*LAYER, "tried", 0, "cosine", to=[0.5, math.nan]), r"layers\['a'\].tried\[0\].cosine is nan; it must be a number"),
]


@pytest.mark.parametrize("content, message", MALFORMED)
def test_files_that_are_no_calibration(content: str | Callable[[dict], object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    STORED.save(path)
    if callable(content):
        path.write_text(json.dumps(content(json.loads(path.read_text()))))
    else:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=message) as raised:
        Calibration.load(path)
    assert str(raised.value).startswith(f"{path}: ")


@given(data=st.data())
def test_files_with_anything_in_them(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any entry replaced by anything, or removed: the file loads or is refused by a ValueError that names it."""
    path = tmp_path_factory.mktemp("files") / "c.json"
    STORED.save(path)
    found = place = json.loads(path.read_text())
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.sampled_from(("recipe", "tried")), inner, max_size=3),
        max_leaves=5,
    )
    if data.draw(st.booleans()):
        del place[key]
    else:
        place[key] = data.draw(values)
    path.write_text(json.dumps(found))
    try:
        calibration = Calibration.load(path)
    except ValueError as error:
        refusal = str(error)
    else:
        calibration.save(path)
        assert Calibration.load(path) == calibration and str(calibration)
        return
    assert refusal.startswith(f"{path}: ") and "it must be" in refusal


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "c.json")


def test_calls_are_equal_if_they_are_the_same() -> None:
    q, k, v = qkv(1, 2, 8, 16)
    call = AttentionCall("x", q, k, v)
    assert call != AttentionCall("x", q, k, v) and [call].index(call) == 0


def test_every_error_has_a_worst() -> None:
    assert [field.name for field in fields(HeadErrors)] == list(WORST)
