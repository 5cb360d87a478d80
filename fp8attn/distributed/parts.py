"""A rank's keys and values as they travel: quantized once, or as they are where attention is exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .. import ops, rotation
from ..ambient import shielded
from ..layout import padded_length
from ..quantization import (
    TOKEN_CHUNK,
    PartialStatistics,
    Statistics,
    partial_statistics,
    quantize_kv,
    quantize_q,
    row_scales,
    row_type,
    sampled_before,
    scale_shape,
    statistics,
)
from ..recipe import E4M3, SCALE_BLOCK, Granularity, Quantized, Recipe
from ..validate import Backend
from .sharding import Span, Spans
from .wire import Form, concatenated_rows, unpacked


@dataclass(frozen=True)
class Format:
    """What the bytes that travel mean: the same on all ranks.

    Attributes:
        batch, q_heads, kv_heads, head_dim, value_dim: of a rank's tensors.
        dtype: theirs.
        recipe: how they are quantized.
        backend: as of `sdpa`. `reference` quantizes nothing, `modelled` quantizes in plain torch.
        shared: all parts are quantized by the statistics of the sequence. Otherwise the statistics of every part travel
            with it.
        float_queries: queries travel as they are, and are quantized where they attend.
    """

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    recipe: Recipe
    backend: Backend
    shared: bool
    float_queries: bool

    @property
    def exact(self) -> bool:
        """Whether nothing is quantized."""
        return self.backend == "reference"

    @property
    def rotated(self) -> int:
        """`Quantized.rotated` of q and k."""
        return 0 if self.exact else rotation.part_of(self.head_dim, self.recipe.rotate)

    @property
    def k_granularity(self) -> Granularity:
        """Of keys as they travel: every head has a scale of its own."""
        return "head" if self.recipe.k == "tensor" else self.recipe.k

    def of_heads(self, ranks: int) -> Format:
        """The format of one of `ranks` equal shares of the heads."""
        return replace(self, q_heads=self.q_heads // ranks, kv_heads=max(self.kv_heads // ranks, 1))

    def q_forms(self, length: int) -> list[Form]:
        """Of a rank's queries: their rows, and a scale for every row if they are quantized."""
        shape = (self.batch, self.q_heads, length, self.head_dim)
        if self.float_queries:
            return [Form(shape, self.dtype)]
        return [Form(shape, row_type(self.recipe.qk), padded=True), Form(shape[:3], torch.float32)]

    def kv_forms(self, spans: Sequence[Span]) -> list[Form]:
        """Of keys and values, span by span: K's rows and scales, V, and their statistics unless these are shared; or K
        and V as they are."""
        forms = []
        for span in spans:
            rows = (self.batch, self.kv_heads, span.length)
            if self.exact:
                forms += [Form((*rows, self.head_dim), self.dtype), Form((*rows, self.value_dim), self.dtype)]
                continue
            scales = scale_shape(self.k_granularity, *rows, self.head_dim)
            values = (self.batch, self.kv_heads, self.value_dim, padded_length(span.length))
            forms += [Form((*rows, self.head_dim), row_type(self.recipe.qk), padded=True), Form(scales, torch.float32), Form(values, E4M3)]
            if not self.shared:
                scales = (*rows[:2], self.value_dim if self.recipe.v == "channel" else 1)
                shapes = [(*rows[:2], self.head_dim)] * self.recipe.smooth_k + [scales] + [(*rows[:2], self.value_dim)] * self.recipe.smooth_v
                forms += [Form(shape, torch.float32) for shape in shapes]
        return forms

    def statistics_forms(self, spans: Sequence[Span], total: int) -> list[Form]:
        """Of the partial statistics of a rank's spans, of a sequence of `total` tokens."""
        forms = []
        for span in spans:
            rows = (self.batch, self.kv_heads)
            values = Form((*rows, self.value_dim), torch.float32)
            sampled = sampled_before(span.first + span.length, total) - sampled_before(span.first, total) if self.recipe.smooth_k else 0
            sums = Form((*rows, -(-span.length // TOKEN_CHUNK), self.value_dim), torch.float32)
            forms += [Form((*rows, sampled, self.head_dim), self.dtype), sums, values, values]
        return forms


def _cut(x: torch.Tensor, spans: Sequence[Span]) -> list[torch.Tensor]:
    """A rank's rows (B, H, S, D), span by span."""
    return list(x.split([span.length for span in spans], 2))


def held(spans: Sequence[Spans]) -> Spans:
    """The spans of several ranks that hold tokens, in the order of the sequence."""
    return tuple(sorted((span for one in spans for span in one if span.length), key=lambda span: span.first))


def statistics_tensors(k: torch.Tensor, v: torch.Tensor, spans: Spans, total: int, form: Format) -> list[torch.Tensor]:
    """The partial statistics of a rank's keys and values, as `Format.statistics_forms` says."""
    found = []
    of_part = partial_statistics if form.backend == "modelled" else ops.partial_statistics
    for keys, values, span in zip(_cut(k, spans), _cut(v, spans), spans, strict=True):
        if span.length:
            part = shielded(of_part)(keys, values, span.first, total)
            sample = part.k_sample if form.recipe.smooth_k else part.k_sample[:, :, :0]
            found += [sample, part.v_sums, part.v_low, part.v_high]
    return found


def joined_statistics(found: Sequence[tuple[Span, Sequence[torch.Tensor]]], total: int, form: Format) -> Statistics:
    """The statistics of the whole sequence.

    Args:
        found: spans with the four tensors of their partial statistics, in any order.
    """
    parts = [PartialStatistics(*tensors) for _, tensors in sorted(found, key=lambda one: one[0].first)]
    return shielded(statistics)(parts, total, form.recipe)


def quantized_queries(q: torch.Tensor, form: Format) -> Quantized:
    """Queries (B, Hq, S, D), quantized once, with a scale for every row."""
    x = shielded(quantize_q)(q, form.recipe) if form.backend == "modelled" else shielded(ops.quantized)(q, None, None, form.recipe)[0]
    assert x is not None
    scale = row_scales(x.scale, x.granularity, x.length).expand(q.shape[:3])
    return Quantized(x.data, scale, "token", "rows", x.length, None, x.rotated)


def kv_tensors(k: torch.Tensor, v: torch.Tensor, spans: Spans, found: Statistics | None, form: Format) -> list[list[torch.Tensor]]:
    """A rank's keys and values, as `Format.kv_forms` says, for each of its spans that hold tokens."""
    tensors = []
    for keys, values, span in zip(_cut(k, spans), _cut(v, spans), spans, strict=True):
        if not span.length:
            continue
        if form.exact:
            tensors.append([keys, values])
            continue
        if form.backend == "modelled":
            key, value = shielded(quantize_kv)(keys, values, form.recipe, found)
        else:
            _, some_key, some_value = shielded(ops.quantized)(None, keys, values, form.recipe, given=found)
            assert some_key is not None and some_value is not None
            key, value = some_key, some_value
        scale = key.scale.expand(*keys.shape[:2], 1) if key.granularity == "tensor" else key.scale
        tensors.append([key.data, scale, value.data])
        if not form.shared:
            v_scale = value.scale.expand(*keys.shape[:2], 1) if value.granularity == "tensor" else value.scale
            tensors[-1] += [x for x in (key.mean, v_scale, value.mean) if x is not None]
    return tensors


@dataclass(frozen=True, eq=False)
class Part:
    """Keys and values that attention takes in one call.

    Attributes:
        span: which tokens they are.
        key, value: `Quantized`, the key without its mean; or (B, H, S, D) and (B, H, S, Dv) where attention is exact.
        k_mean: float32 (B, H, D), the key's mean if it isn't that of all parts.
    """

    span: Span
    key: Quantized | torch.Tensor
    value: Quantized | torch.Tensor
    k_mean: torch.Tensor | None = None

    def first_keys(self, count: int) -> tuple[Quantized | torch.Tensor, Quantized | torch.Tensor]:
        """Key and value of the first `count` tokens. Values are copied if these aren't all."""
        key, value = self.key, self.value
        if count == self.span.length:
            return key, value
        if isinstance(key, torch.Tensor) or isinstance(value, torch.Tensor):
            assert isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
            return key[:, :, :count], value[:, :, :count]
        scales = scale_shape(key.granularity, 1, 1, count, key.shape[3])[2]
        data = value.data[..., : padded_length(count)].contiguous()
        return (
            replace(key, data=key.data[:, :, :count], scale=key.scale[..., :scales], length=count),
            replace(value, data=data, length=count),
        )


def parts_of(buffer: torch.Tensor, spans: Spans, found: Statistics | None, form: Format) -> list[Part]:
    """The parts in a buffer of `Format.kv_forms`.

    Args:
        found: the statistics of the heads in the buffer, if they are shared.
    """
    tensors = iter(unpacked(buffer, form.kv_forms(spans)))
    shared_scale = None
    if found is not None:  # one tensor for all parts: merged_parts looks for it
        shared_scale = found.v_scale.expand(form.batch, form.kv_heads, 1) if form.recipe.v == "tensor" else found.v_scale
    parts = []
    for span in spans:
        if form.exact:
            parts.append(Part(span, next(tensors), next(tensors)))
            continue
        key = Quantized(next(tensors), next(tensors), form.k_granularity, "rows", span.length, None, form.rotated)
        v_data, k_mean = next(tensors), None
        if found is not None and shared_scale is not None:
            v_scale, v_mean = shared_scale, found.v_mean
        else:
            k_mean = next(tensors) if form.recipe.smooth_k else None
            v_scale, v_mean = next(tensors), next(tensors) if form.recipe.smooth_v else None
        v_granularity: Granularity = "head" if form.recipe.v == "tensor" else form.recipe.v
        parts.append(Part(span, key, Quantized(v_data, v_scale, v_granularity, "values", span.length, v_mean), k_mean))
    return parts


def of_heads(found: Statistics | None, heads: slice) -> Statistics | None:
    """The statistics of some heads."""
    if found is None:
        return None
    v_scale = found.v_scale if found.v_scale.shape[1] == 1 and found.v_scale.shape[2] == 1 else found.v_scale[:, heads].contiguous()
    k_mean, v_mean = (None if mean is None else mean[:, heads].contiguous() for mean in (found.k_mean, found.v_mean))
    return Statistics(k_mean, v_mean, v_scale)


def merged_parts(parts: Sequence[Part]) -> list[Part]:
    """Parts that follow each other, as one, where their scales and paddings allow it: one call then attends to them."""
    found: list[Part] = []
    runs: list[list[Part]] = []
    for part in parts:
        before = runs[-1][-1] if runs else None
        if before is not None and before.span.first + before.span.length == part.span.first and _continues(before, part):
            runs[-1].append(part)
        else:
            runs.append([part])
    for run in runs:
        found.append(run[0] if len(run) == 1 else _concatenated(run))
    return found


def _continues(part: Part, following: Part) -> bool:
    """Whether the next part can follow in the same tensors."""
    if not isinstance(part.key, Quantized) or not isinstance(part.value, Quantized) or not isinstance(following.value, Quantized):
        return True
    whole_blocks = part.span.length % SCALE_BLOCK == 0 and part.key.granularity in ("block", "token")
    return whole_blocks and part.value.scale is following.value.scale


def _concatenated(parts: Sequence[Part]) -> Part:
    span = Span(parts[0].span.first, sum(part.span.length for part in parts))
    key, value = parts[0].key, parts[0].value
    keys, values = [part.key for part in parts], [part.value for part in parts]
    if isinstance(key, torch.Tensor) or isinstance(value, torch.Tensor):
        return Part(
            span, torch.cat([x for x in keys if isinstance(x, torch.Tensor)], 2), torch.cat([x for x in values if isinstance(x, torch.Tensor)], 2)
        )
    quantized_keys, quantized_values = ([x for x in some if isinstance(x, Quantized)] for some in (keys, values))
    rows = concatenated_rows([x.data for x in quantized_keys])
    data = torch.cat([x.data.view(torch.uint8) for x in quantized_values], 3).view(E4M3)
    return Part(
        span,
        replace(key, data=rows, scale=torch.cat([x.scale for x in quantized_keys], 2), length=span.length),
        replace(value, data=data, length=span.length),
    )
