"""Measures the error of a recipe on a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from .. import hybrid, reference
from ..ambient import product, shielded
from ..api import quantize, sdpa
from ..pages import PAGE
from ..quantization import dequantize
from ..quantization import quantize as quantize_ref
from ..recipe import QUERY_GROUP, SCALE_BLOCK, Quantized, Recipe
from ..validate import Checked
from .calls import AttentionCall

Operands = tuple[Quantized, Quantized, Quantized]

MASS_ROWS = 128
"""Rows of queries, evenly spaced, that `attention_mass` looks at."""


@dataclass(frozen=True)
class HeadErrors:
    """The errors of a recipe on a layer. For each query head, the largest error of all calls and batch entries.

    If the calls of a layer differ in their number of heads, each number is for a group of neighbouring heads. There are
    as many groups as the greatest common divisor of the numbers of heads. This happens in decode: some libraries pass
    the query heads of one key/value head as its queries.

    Attributes:
        relative_l2: ‖error‖ / ‖exact‖; infinite if an answer is non-finite.
        relative_l1: the same with sums of magnitudes.
        sqnr_db: 10 log10(‖exact‖² / ‖error‖²).
        cosine: cosine of the angle between answer and exact answer.
        attention_mass: the part of a row's probability that lies on other keys than in exact attention, mean over rows:
            half of Σ|P − P̂|.
    """

    relative_l2: tuple[float, ...]
    relative_l1: tuple[float, ...]
    sqnr_db: tuple[float, ...]
    cosine: tuple[float, ...]
    attention_mass: tuple[float, ...]


WORST: dict[str, tuple[Callable[..., float], float]] = {
    "relative_l2": (max, math.inf),
    "relative_l1": (max, math.inf),
    "sqnr_db": (min, -math.inf),
    "cosine": (min, -1.0),
    "attention_mass": (max, 1.0),
}
"""For each field of HeadErrors, how to choose the worst of several numbers, and what replaces a non-finite number."""


def merged(several: Sequence[HeadErrors]) -> HeadErrors:
    """The largest errors of several calls, by head; see HeadErrors for calls that differ in their number of heads."""
    groups = math.gcd(*(len(errors.relative_l2) for errors in several))

    def worst(field: str) -> tuple[float, ...]:
        choose, _ = WORST[field]
        of_calls = [_grouped(getattr(errors, field), groups) for errors in several]
        return tuple(choose(x for numbers in of_group for x in numbers) for of_group in zip(*of_calls, strict=True))

    return HeadErrors(*(worst(field.name) for field in fields(HeadErrors)))


def _grouped(numbers: tuple[float, ...], groups: int) -> list[tuple[float, ...]]:
    length = len(numbers) // groups
    return [numbers[i : i + length] for i in range(0, len(numbers), length)]


@shielded
def errors_of(call: AttentionCall, recipes: Sequence[Recipe]) -> list[HeadErrors | None]:
    """The errors of each recipe on a call, measured with the kernels on a GPU, elsewhere with the oracle that models
    them.

    None: the recipe has half-precision keys and the call has a mask, or isn't causal and the recipe has pages.
    Autocast, the default device and the precision of float32 products have no effect.

    Raises:
        TypeError, ValueError: `sdpa` doesn't take an argument of the call.
    """
    checked = call.checked()
    with torch.no_grad():
        out, _ = reference.attention(*checked.floats, checked.attn_mask, causal=checked.causal, scoring=reference.Scoring(checked.softmax_scale))
        exact = out.double().flatten(2)
        masked, causal = checked.attn_mask is not None, checked.causal != "none"
        return [_errors(checked, recipe, exact) if recipe.of_call(masked, causal) is recipe else None for recipe in recipes]


def _errors(checked: Checked, recipe: Recipe, exact: torch.Tensor) -> HeadErrors:
    """The errors on one call, whose exact answer is given as (B, Hq, Sq · Dv)."""
    on_gpu = checked.device.type == "cuda"
    quantized = quantize(*checked.floats, recipe=recipe.of_fp8_keys) if on_gpu else _defined(checked, recipe)
    out = _by_kernels(checked, quantized, recipe) if on_gpu else _by_oracle(checked, quantized, recipe)
    out = out.double().flatten(2)
    error = out - exact
    tiny = torch.finfo(torch.float64).tiny
    l2 = error.norm(dim=-1) / exact.norm(dim=-1).clamp(min=tiny)
    found = {
        "relative_l2": l2,
        "relative_l1": error.abs().sum(-1) / exact.abs().sum(-1).clamp(min=tiny),
        "sqnr_db": -20 * l2.clamp(min=tiny).log10(),
        "cosine": (out * exact).sum(-1) / (out.norm(dim=-1) * exact.norm(dim=-1)).clamp(min=tiny),
        "attention_mass": _attention_mass(checked, quantized[0], quantized[1], recipe),
    }
    return HeadErrors(*(_worst_entry(found[field.name], *WORST[field.name]) for field in fields(HeadErrors)))


def _defined(checked: Checked, recipe: Recipe) -> Operands:
    """The operands, quantized by the definition. The kernels give the same bytes."""
    q, k, v = quantize_ref(*checked.floats, recipe.of_fp8_keys)
    assert q is not None and k is not None and v is not None
    return q, k, v


def _by_kernels(checked: Checked, quantized: Operands, recipe: Recipe) -> torch.Tensor:
    query, key, value = checked.floats if recipe.has_half_keys else quantized
    return sdpa(
        query, key, value, checked.attn_mask, is_causal=checked.causal != "none", scale=checked.softmax_scale, enable_gqa=True,
        causal_alignment="top_left" if checked.causal == "none" else checked.causal, recipe=recipe, out_dtype=torch.float32,
    )  # fmt: skip


def _by_oracle(checked: Checked, quantized: Operands, recipe: Recipe) -> torch.Tensor:
    causal, scale = checked.causal, checked.softmax_scale
    if recipe.has_half_keys:
        return hybrid.modelled(*checked.floats, recipe, causal=causal, softmax_scale=scale)[0]
    arithmetic = reference.Arithmetic(SCALE_BLOCK, recipe.compute)
    return reference.pipeline(*quantized, checked.attn_mask, arithmetic=arithmetic, causal=causal, scoring=reference.Scoring(scale))[0]


def _worst_entry(x: torch.Tensor, choose: Callable[..., float], worst: float) -> tuple[float, ...]:
    """(B, H) -> H, the worst of all batch entries."""
    rows = x.double().nan_to_num(nan=worst, posinf=math.inf, neginf=-math.inf).t().tolist()
    return tuple(choose(row) for row in rows)


def _attention_mass(checked: Checked, q: Quantized, k: Quantized, recipe: Recipe) -> torch.Tensor:
    """HeadErrors.attention_mass of one call, (B, Hq)."""
    query, key, _ = checked.floats
    length, kv_length = query.shape[2], key.shape[2]
    rows = torch.linspace(0, length - 1, min(length, MASS_ROWS), device=query.device, dtype=torch.float64).round().long()
    exact = _scores(checked, query, key, rows)
    approximate = _scores(checked, dequantize(replace(q, mean=None)), dequantize(k), rows, q.bias)
    if recipe.has_half_keys:
        keys = torch.arange(kv_length, device=rows.device)
        if recipe.statistics == "page":
            own = rows + reference.causal_offset(checked.causal, length, kv_length)
            kept = keys // PAGE == own[:, None] // PAGE
        else:
            kept = reference.half_key_mask(rows, keys, checked.causal, length, kv_length, recipe.sinks, recipe.recent)
        approximate = torch.where(kept, exact, approximate)
    return (_probabilities(checked, approximate, rows) - _probabilities(checked, exact, rows)).abs().sum(-1).mean(-1) / 2


def _scores(checked: Checked, q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Scores (B, Hq, len(rows), Sk), float32, without masks. `bias` is Quantized.bias of q."""
    k = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = product(q[:, :, rows].float(), k.transpose(-2, -1))
    if bias is not None:
        scores = scores + bias[:, :, rows // QUERY_GROUP, : k.shape[2]]
    return scores * checked.softmax_scale


def _probabilities(checked: Checked, scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Softmax of the scores that `_scores` returns, with masks applied; zeros for rows without visible keys."""
    mask = None if checked.attn_mask is None else checked.attn_mask[:, :, rows]
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.float()
    keys = torch.arange(scores.shape[3], device=scores.device)
    assert isinstance(checked.query, torch.Tensor)
    hidden = reference.hidden_keys(mask, checked.causal, rows, keys, checked.query.shape[2], scores.shape[3])
    return scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(nan=0.0)
