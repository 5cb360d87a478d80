"""Which recipe every attention layer of a model needs: its calls are captured, each recipe is tried on them, the cheapest good one is kept.

with fp8attn.capture(model) as calls:
    model(sample)
calibration = fp8attn.calibrate(calls, tolerance=0.06)
calibration.save("model.fp8attn.json")
with calibration.applied(model):
    model(input)  # its calls of F.scaled_dot_product_attention are fp8attn.sdpa's, each with its layer's recipe
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from . import hybrid, reference
from .api import quantize, sdpa
from .quantize import dequantize
from .recipe import PRECISE, QUERY_GROUP, SCALE_BLOCK, Quantized, Recipe
from .validate import Operand, check_kept

CANDIDATES = (
    Recipe(),
    PRECISE,
    Recipe(rotate=256),
    Recipe(rotate=256, qk="int8"),
    Recipe(qk="int8", recent=256),
    Recipe(k="token", rotate=256, qk="int8"),
    Recipe(compute="f16", k="token", rotate=256),
)
"""Recipes from the cheapest on, from half to answer on an H100 (docs/accuracy.md, prices): rotation of other than 64 channels takes other quantizers,
keys in half precision another kernel, which is dear where attention is short, scales of single keys the kernels' general instances, half tensor
cores half the rate and more."""

MASS_ROWS = 128
"""Rows of queries, evenly spaced, that `attention_mass` looks at."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of scaled dot-product attention; the fields are its arguments.

    Attributes:
        layer: the module that made it, `name`, or `name#1`, `name#2` … for the module's further calls.
    """

    layer: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    is_causal: bool = False
    scale: float | None = None

    @property
    def causal(self) -> reference.Causal:
        """As the oracles call it."""
        return "top_left" if self.is_causal else "none"

    @property
    def mask(self) -> torch.Tensor | None:
        """attn_mask as (B, Hq, Sq, Sk)."""
        return None if self.attn_mask is None else self.attn_mask.expand(*self.query.shape[:3], self.key.shape[2])


@dataclass(frozen=True)
class HeadErrors:
    """What a recipe does to a layer's answers, one number for every query head, the worst batch entry's.

    Attributes:
        relative_l2: ‖error‖ / ‖exact‖.
        relative_l1: the same of sums of magnitudes.
        sqnr_db: 10 log10(‖exact‖² / ‖error‖²).
        cosine: of the angle between answer and exact answer.
        attention_mass: the share of a row's probability that lies on other keys than it should, mean over rows: half of Σ|P − P̂|.
    """

    relative_l2: tuple[float, ...]
    relative_l1: tuple[float, ...]
    sqnr_db: tuple[float, ...]
    cosine: tuple[float, ...]
    attention_mass: tuple[float, ...]


@dataclass(frozen=True)
class LayerChoice:
    """A layer's recipe, and what every recipe that was tried did to its heads, in the order of `Calibration.recipes`."""

    recipe: Recipe
    within: bool
    tried: tuple[HeadErrors, ...]


@dataclass(frozen=True)
class Calibration:
    """A recipe for each layer.

    Attributes:
        tolerance: largest relative L2 error of a head.
        recipes: what was tried, from the cheapest on.
        layers: by name; `within` says whether the recipe meets the tolerance, else it is the one with the smallest error.
    """

    tolerance: float
    recipes: tuple[Recipe, ...]
    layers: dict[str, LayerChoice]

    def recipe_for(self, layer: str) -> Recipe:
        """The layer's recipe.

        Raises:
            KeyError: the layer made no call when it was calibrated.
        """
        if layer not in self.layers:
            raise KeyError(f"layer is {layer!r}; it must be one that was calibrated: {', '.join(self.layers)}")
        return self.layers[layer].recipe

    def applied(self, model: torch.nn.Module, **options: Any) -> contextlib.AbstractContextManager[None]:
        """Inside, calls of F.scaled_dot_product_attention that the model makes are `sdpa`'s, each with its layer's recipe.

        Args:
            options: further ones of `sdpa`, as backend.

        Raises:
            KeyError: inside, a layer calls that wasn't calibrated.
        """
        return _applied(self, model, options)

    def save(self, path: str | PathLike[str]) -> None:
        """Write JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: str | PathLike[str]) -> Calibration:
        """Read what `save` wrote.

        Raises:
            ValueError: a recipe in it isn't one.
        """
        found = json.loads(Path(path).read_text())
        layers = {}
        for name, layer in found["layers"].items():
            tried = tuple(HeadErrors(**{field: tuple(numbers) for field, numbers in errors.items()}) for errors in layer["tried"])
            layers[name] = LayerChoice(Recipe(**layer["recipe"]), layer["within"], tried)
        return Calibration(found["tolerance"], tuple(Recipe(**recipe) for recipe in found["recipes"]), layers)


class _Intercepting(TorchFunctionMode):
    """Calls of F.scaled_dot_product_attention go to `instead`, with the name of the module that is in its forward."""

    def __init__(self, model: torch.nn.Module, instead: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.instead = instead
        self.stack: list[tuple[str, list[int]]] = []
        self.hooks: list[Any] = []

        def leave(*_) -> None:
            self.stack.pop()  # what a hook returns would be the module's output

        for name, module in model.named_modules():
            self.hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self.stack.append((name, [0]))))
            self.hooks.append(module.register_forward_hook(leave, always_call=True))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.scaled_dot_product_attention or not self.stack:
            return func(*args, **(kwargs or {}))
        name, calls = self.stack[-1]
        layer = name if calls[0] == 0 else f"{name}#{calls[0]}"
        calls[0] += 1
        return self.instead(layer, *args, **(kwargs or {}))

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


@contextlib.contextmanager
def capture(model: torch.nn.Module) -> Iterator[list[AttentionCall]]:
    """Inside, calls of F.scaled_dot_product_attention that the model makes are recorded, and made.

    Yields:
        The calls so far; their tensors are copies.
    """
    calls: list[AttentionCall] = []

    def record(layer, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        copies = [x.detach().clone() for x in (query, key, value)]
        calls.append(AttentionCall(layer, *copies, None if attn_mask is None else attn_mask.detach().clone(), is_causal, scale))
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )  # fmt: skip

    mode = _Intercepting(model, record)
    try:
        with mode:
            yield calls
    finally:
        mode.remove()


@contextlib.contextmanager
def _applied(calibration: Calibration, model: torch.nn.Module, options: dict[str, Any]) -> Iterator[None]:
    def instead(layer, *args, **kwargs):
        return sdpa(*args, **kwargs, recipe=calibration.recipe_for(layer), **options)

    mode = _Intercepting(model, instead)
    try:
        with mode:
            yield
    finally:
        mode.remove()


Operands = tuple[Quantized, Quantized, Quantized]


def _answer(call: AttentionCall, operands: Operands, recipe: Recipe) -> torch.Tensor:
    """What fp8attn gives, float32: by its kernels, on a CPU by the oracle that models them."""
    if call.query.is_cuda:
        given: tuple[Operand, Operand, Operand] = (call.query, call.key, call.value) if recipe.keeps_keys else operands
        out = sdpa(
            *given, call.attn_mask, is_causal=call.is_causal, scale=call.scale, enable_gqa=True,
            recipe=recipe, out_dtype=torch.float32,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out
    if recipe.keeps_keys:
        kept = check_kept(call.query, call.key, call.value, call.attn_mask, recipe)
        return hybrid.modelled(*kept, recipe, causal=call.causal, softmax_scale=call.scale)[0]
    return reference.pipeline(*operands, call.mask, block_n=SCALE_BLOCK, causal=call.causal, softmax_scale=call.scale, compute=recipe.compute)[0]


def _scores(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """(B, Hq, len(rows), Sk), float32, without masks. `bias`: Quantized's."""
    scale = q.shape[3] ** -0.5 if call.scale is None else call.scale
    k = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q[:, :, rows].float() @ k.transpose(-2, -1)
    if bias is not None:
        scores = scores + bias[:, :, rows // QUERY_GROUP, : k.shape[2]]
    return scores * scale


def _probabilities(call: AttentionCall, scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Of such scores; of rows that see nothing, zeros."""
    mask = None if call.mask is None else call.mask[:, :, rows]
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.float()
    keys = torch.arange(call.key.shape[2], device=scores.device)
    hidden = reference.hidden_keys(mask, call.causal, rows, keys, call.query.shape[2], call.key.shape[2])
    return scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(nan=0.0)


def _attention_mass(call: AttentionCall, q: Quantized, k: Quantized, recipe: Recipe) -> torch.Tensor:
    """HeadErrors.attention_mass, (B, Hq)."""
    length = call.query.shape[2]
    rows = torch.linspace(0, length - 1, min(length, MASS_ROWS), device=call.query.device).round().long()
    exact = _scores(call, call.query, call.key, rows)
    approximate = _scores(call, dequantize(replace(q, mean=None)), dequantize(k), rows, q.bias)
    if recipe.keeps_keys:
        keys = torch.arange(call.key.shape[2], device=rows.device)
        kept = reference.kept_keys(rows, keys, call.causal, length, len(keys), recipe.sinks, recipe.recent)
        approximate = torch.where(kept, exact, approximate)
    return (_probabilities(call, approximate, rows) - _probabilities(call, exact, rows)).abs().sum(-1).mean(-1) / 2


def _errors(call: AttentionCall, recipe: Recipe, expected: torch.Tensor) -> HeadErrors:
    """Of one call; `expected` (B, Hq, Sq, Dv) is exact. A recipe that keeps keys doesn't take masks: the worst there are."""
    if recipe.keeps_keys and call.attn_mask is not None:
        worst = (math.inf,) * call.query.shape[1]
        return HeadErrors(worst, worst, tuple(-x for x in worst), (-1.0,) * len(worst), (1.0,) * len(worst))
    operands = quantize(call.query, call.key, call.value, recipe=recipe.of_others)
    out = _answer(call, operands, recipe).double().flatten(2)
    exact = expected.double().flatten(2)
    error = out - exact
    tiny = torch.finfo(torch.float64).tiny
    l2 = error.norm(dim=-1) / exact.norm(dim=-1).clamp(min=tiny)
    l1 = error.abs().sum(-1) / exact.abs().sum(-1).clamp(min=tiny)
    cosine = (out * exact).sum(-1) / (out.norm(dim=-1) * exact.norm(dim=-1)).clamp(min=tiny)
    sqnr = -20 * l2.clamp(min=tiny).log10()

    def heads(x: torch.Tensor) -> tuple[float, ...]:
        return tuple(x.nan_to_num(nan=math.inf).tolist())

    mass = _attention_mass(call, operands[0], operands[1], recipe)
    return HeadErrors(heads(l2.amax(0)), heads(l1.amax(0)), tuple(sqnr.amin(0).tolist()), tuple(cosine.amin(0).tolist()), heads(mass.amax(0)))


def _worst(several: Sequence[HeadErrors]) -> HeadErrors:
    """Head by head, of several calls."""

    def over(field: str, choose: Callable[..., float]) -> tuple[float, ...]:
        return tuple(choose(numbers) for numbers in zip(*(getattr(errors, field) for errors in several), strict=True))

    return HeadErrors(
        over("relative_l2", max), over("relative_l1", max), over("sqnr_db", min), over("cosine", min), over("attention_mass", max)
    )  # fmt: skip


def calibrate(calls: Sequence[AttentionCall], *, tolerance: float = 0.06, recipes: Sequence[Recipe] = CANDIDATES) -> Calibration:
    """The cheapest recipe for every layer whose worst head stays within the tolerance; where none does, the one with the smallest error.

    Args:
        calls: of one model, several of a layer if there are: `capture` makes them. Tensors (B, H, S, D) as `sdpa` takes them.
        tolerance: largest relative L2 error of a head's answers against exact attention in float32.
        recipes: from the cheapest on. Those that keep keys are tried on calls without a mask.

    Raises:
        ValueError: calls or recipes are empty, or the tolerance isn't positive.
    """
    if not calls or not recipes:
        raise ValueError(f"{'recipes' if calls else 'calls'} is empty; there must be one at least")
    if not tolerance > 0:
        raise ValueError(f"tolerance is {tolerance}; it must be positive")
    tried: dict[str, list[list[HeadErrors]]] = {}
    for call in calls:
        expected, _ = reference.attention(call.query, call.key, call.value, call.mask, causal=call.causal, softmax_scale=call.scale)
        of_layer = tried.setdefault(call.layer, [[] for _ in recipes])
        for found, recipe in zip(of_layer, recipes, strict=True):
            found.append(_errors(call, recipe, expected))
    layers = {}
    for layer, by_recipe in tried.items():
        errors = tuple(_worst(several) for several in by_recipe)
        worst = [max(e.relative_l2) for e in errors]
        chosen = next((i for i, x in enumerate(worst) if x <= tolerance), worst.index(min(worst)))
        layers[layer] = LayerChoice(recipes[chosen], worst[chosen] <= tolerance, errors)
    return Calibration(tolerance, tuple(recipes), layers)
