"""A rank's keys and values as they travel: quantized once, or as they are where attention is exact."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .. import eager, ops, rotation
from ..ambient import shielded
from ..layout import padded_length
from ..quantization import (
    TOKEN_CHUNK,
    PartialStatistics,
    Statistics,
    chunk_statistics,
    k_sample,
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
from .wire import Form, size_of, unpacked


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
        apart: every run of tokens is a part of its own.
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
    apart: bool = False

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

    @property
    def v_granularity(self) -> Granularity:
        """Of values as they travel, likewise."""
        return "head" if self.recipe.v == "tensor" else self.recipe.v

    def of_heads(self, ranks: int) -> Format:
        """The format of one of `ranks` equal shares of the heads."""
        return replace(self, q_heads=self.q_heads // ranks, kv_heads=max(self.kv_heads // ranks, 1))

    def q_forms(self, length: int) -> list[Form]:
        """Of a rank's queries: their rows, and a scale for every row if they are quantized."""
        shape = (self.batch, self.q_heads, length, self.head_dim)
        if self.float_queries:
            return [Form(shape, self.dtype)]
        return [Form(shape, row_type(self.recipe.qk), padded=True), Form(shape[:3], torch.float32)]

    def kv_forms(self, length: int) -> list[Form]:
        """Of a part's keys and values: K's rows and scales, V, and their statistics unless these are shared; or K and V
        as they are."""
        rows = (self.batch, self.kv_heads, length)
        if self.exact:
            return [Form((*rows, self.head_dim), self.dtype), Form((*rows, self.value_dim), self.dtype)]
        scales = scale_shape(self.k_granularity, *rows, self.head_dim)
        values = (self.batch, self.kv_heads, self.value_dim, padded_length(length))
        forms = [Form((*rows, self.head_dim), row_type(self.recipe.qk), padded=True), Form(scales, torch.float32), Form(values, E4M3)]
        if not self.shared:
            scales = (*rows[:2], self.value_dim if self.recipe.v == "channel" else 1)
            shapes = [(*rows[:2], self.head_dim)] * self.recipe.smooth_k + [scales] + [(*rows[:2], self.value_dim)] * self.recipe.smooth_v
            forms += [Form(shape, torch.float32) for shape in shapes]
        return forms

    def forms_of(self, parts: Sequence[Spans]) -> tuple[Form, ...]:
        """Of a buffer that holds these parts."""
        return _forms_of(self, tuple(parts))

    def statistics_forms(self, spans: Spans, total: int) -> tuple[Form, ...]:
        """Of the partial statistics of a rank's spans, of a sequence of `total` tokens: the sample of K, and sums and
        extremes of V's token chunks."""
        return _statistics_forms(self, spans, total)

    def split_statistics(self, tensors: Sequence[torch.Tensor], spans: Spans, total: int) -> list[tuple[Span, PartialStatistics]]:
        """The partial statistics of every span, of tensors as `statistics_forms` says."""
        if len(spans) == 1:
            return [(spans[0], PartialStatistics(*tensors))]
        samples, chunks = _counts(self.recipe.smooth_k, spans, total)
        parts = zip(*(x.split(counts, 2) for x, counts in zip(tensors, (samples, chunks, chunks), strict=True)), strict=True)
        return [(span, PartialStatistics(*part)) for span, part in zip(spans, parts, strict=True)]


# What follows from shapes alone is computed once: all calls of a model have the same few.


@functools.lru_cache(1024)
def _forms_of(form: Format, parts: tuple[Spans, ...]) -> tuple[Form, ...]:
    return tuple(one for spans in parts for one in form.kv_forms(tokens_of(spans)))


@functools.lru_cache(1024)
def _statistics_forms(form: Format, spans: Spans, total: int) -> tuple[Form, ...]:
    heads = (form.batch, form.kv_heads)
    sampled, chunks = map(sum, _counts(form.recipe.smooth_k, spans, total))
    return (
        Form((*heads, sampled, form.head_dim), form.dtype),
        Form((*heads, chunks, form.value_dim), torch.float32),
        Form((*heads, chunks, 2, form.value_dim), torch.float32),
    )


@functools.lru_cache(1024)
def _counts(smooth_k: bool, spans: Spans, total: int) -> tuple[list[int], list[int]]:
    """The sampled keys of each span, and its token chunks."""
    sampled = [sampled_before(span.first + span.length, total) - sampled_before(span.first, total) for span in spans]
    return sampled if smooth_k else [0] * len(spans), [-(-span.length // TOKEN_CHUNK) for span in spans]


def tokens_of(spans: Spans) -> int:
    return sum(span.length for span in spans)


def held(spans: Sequence[Spans]) -> Spans:
    """The spans of several ranks that hold tokens, in the order of the sequence."""
    return tuple(sorted((span for one in spans for span in one if span.length), key=lambda span: span.first))


def parts_in(spans: Sequence[Spans], form: Format) -> list[Spans]:
    """The parts in a buffer that holds the keys and values of several ranks, each in the order of the sequence.

    They are one part if blocks of scales, and of values, don't reach from one rank's tokens into another's; otherwise
    one for each rank that has tokens. A rank quantizes its own tokens as one part. If parts are `apart`, there is one
    for each run.
    """
    return [*_parts_in(tuple(spans), form)]


@functools.lru_cache(1024)
def _parts_in(spans: tuple[Spans, ...], form: Format) -> list[Spans]:
    ordered, of_ranks = held(spans), [held([some]) for some in spans]
    if form.apart:
        return [(run,) for some in of_ranks for run in some]
    blocks_end = form.shared and form.k_granularity in ("block", "token") and all(span.length % SCALE_BLOCK == 0 for span in ordered[:-1])
    if ordered and (form.exact or blocks_end):
        return [ordered]
    return [some for some in of_ranks if some]


def measured(k: torch.Tensor, v: torch.Tensor, spans: Spans, total: int, form: Format) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A buffer with the partial statistics of a rank's keys and values, as `Format.statistics_forms` says; and
    `careful` as of ChunkStatistics, of its token chunks, None if some of these lie in two spans."""
    forms, lengths = form.statistics_forms(spans, total), [span.length for span in spans]
    buffer = torch.empty(size_of(forms), dtype=torch.uint8, device=k.device)
    sample, sums, extremes = unpacked(buffer, forms)
    if form.recipe.smooth_k:
        counts, _ = _counts(True, spans, total)
        for span, keys, into in zip(spans, k.split(lengths, 2), sample.split(counts, 2), strict=True):
            into.copy_(k_sample(keys, span.first, total))
    if all(length % TOKEN_CHUNK == 0 for length in lengths[:-1]):
        return buffer, _measure(k, v, (sums, extremes), form)
    _, chunks = _counts(True, spans, total)
    for keys, values, *into in zip(k.split(lengths, 2), v.split(lengths, 2), sums.split(chunks, 2), extremes.split(chunks, 2), strict=True):
        found = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in into)
        _measure(keys, values, (found[0], found[1]), form)
        for x, y in zip(into, found, strict=True):
            x.copy_(y)
    return buffer, None


def _measure(k: torch.Tensor, v: torch.Tensor, into: tuple[torch.Tensor, torch.Tensor], form: Format) -> torch.Tensor | None:
    """Write sums and extremes of V's token chunks. Returns `careful` as of ChunkStatistics."""
    if form.backend != "modelled":

        @shielded
        def measure(k: torch.Tensor, v: torch.Tensor, sums: torch.Tensor, extremes: torch.Tensor) -> torch.Tensor | None:
            return ops.chunk_statistics(k, v, form.recipe, (sums, extremes)).careful

        careful = eager.kept(("chunk_statistics", form.recipe.text), (k, v), into, measure)
        assert not isinstance(careful, tuple)
        return careful
    found = shielded(chunk_statistics)(v)
    for x, y in zip(into, (found.sums, found.extremes), strict=True):
        x.copy_(y)
    return None


def joined_statistics(found: Sequence[tuple[Span, PartialStatistics]], total: int, form: Format) -> Statistics:
    """The statistics of the whole sequence, from those of its spans in any order."""
    parts = [part for _, part in sorted(found, key=lambda one: one[0].first)]
    return shielded(statistics if form.backend == "modelled" else ops.statistics)(parts, total, form.recipe)


def quantized_queries(q: torch.Tensor, form: Format) -> Quantized:
    """Queries (B, Hq, S, D), quantized once, with a scale for every row."""
    x = shielded(quantize_q)(q, form.recipe) if form.backend == "modelled" else shielded(ops.quantized)(q, None, None, form.recipe)[0]
    assert x is not None
    scale = row_scales(x.scale, x.granularity, x.length).expand(q.shape[:3])
    return Quantized(x.data, scale, "token", "rows", x.length, None, x.rotated)


def packed_kv(k: torch.Tensor, v: torch.Tensor, spans: Spans, found: Statistics | None, careful: torch.Tensor | None, form: Format) -> torch.Tensor:
    """A buffer with a rank's keys and values, quantized into it as one part, or each run as one if parts are `apart`.

    Args:
        found: the statistics of the sequence, if they are shared.
        careful: as `measured` returns it.
    """
    if form.apart and len(spans) > 1:
        runs, whole = [span.length for span in spans], replace(form, apart=False)
        ordered = sorted(zip(spans, k.split(runs, 2), v.split(runs, 2), strict=True), key=lambda one: one[0].first)
        return torch.cat([packed_kv(keys, values, (span,), found, None, whole) for span, keys, values in ordered])
    forms = form.forms_of(parts_in([spans], form))
    buffer = torch.empty(size_of(forms), dtype=torch.uint8, device=k.device)
    if not forms:
        return buffer
    tensors = unpacked(buffer, forms)
    if form.exact:
        tensors[0].copy_(k)
        tensors[1].copy_(v)
    elif found is not None:
        quantize_part(quantized_part(tensors, tokens_of(spans), found, form), (k, v), found, careful, form)
    else:
        if form.backend == "modelled":
            key, value = shielded(quantize_kv)(k, v, form.recipe)
        else:
            _, some_key, some_value = shielded(ops.quantized)(None, k, v, form.recipe)
            assert some_key is not None and some_value is not None
            key, value = some_key, some_value
        of_part = [x for x in (key.data, key.scale, value.data, key.mean, value.scale, value.mean) if x is not None]
        for place, x in zip(tensors, of_part, strict=True):
            place.copy_(x)  # scales of the granularity `tensor` are repeated for every head
    return buffer


def quantized_part(tensors: Sequence[torch.Tensor], length: int, found: Statistics, form: Format) -> tuple[Quantized, Quantized]:
    """Key, without its mean, and value, of a part's first three tensors as `Format.kv_forms` says.

    Args:
        length: tokens of the part.
        found: the statistics of these heads.
    """
    v_scale = found.v_scale.expand(form.batch, form.kv_heads, 1) if form.recipe.v == "tensor" else found.v_scale
    rows, scale, values = tensors[:3]
    key = Quantized(rows, scale, form.k_granularity, "rows", length, None, form.rotated)
    return key, Quantized(values, v_scale, form.v_granularity, "values", length, found.v_mean)


def quantize_part(
    part: tuple[Quantized, Quantized], floats: tuple[torch.Tensor, torch.Tensor], found: Statistics, careful: torch.Tensor | None, form: Format
) -> None:
    """Quantize keys and values into a part's tensors.

    Args:
        part: as `quantized_part` returns it.
        floats: keys and values.
        careful: as `measured` returns it.
    """
    (key, value), (k, v) = part, floats
    if form.backend == "modelled":
        new_key, new_value = shielded(quantize_kv)(k, v, form.recipe, found)
        for into, x in ((key.data, new_key.data), (key.scale, new_key.scale), (value.data, new_value.data)):
            into.copy_(x)
        return

    @shielded
    def quantize(k: torch.Tensor, v: torch.Tensor, key: Quantized, value: Quantized, careful: torch.Tensor | None) -> None:
        ops.quantize_into(key, value, k, v, careful, form.recipe)

    eager.kept(("quantize_into", form.recipe.text), (k, v, replace(key, mean=found.k_mean), value), (careful,), quantize)


def tokens_between(tensors: Sequence[torch.Tensor], start: int, length: int, form: Format) -> list[torch.Tensor]:
    """Rows, scales and values of some tokens of a part, whose tensors are as `Format.kv_forms` says; views.

    `start` is a multiple of SCALE_BLOCK if there are blocks.
    """
    stop = start + length
    if form.exact:
        return [x[:, :, start:stop] for x in tensors[:2]]
    rows, scale, values = tensors[:3]
    if form.k_granularity == "token":
        scale = scale[:, :, start:stop]
    elif form.k_granularity == "block":
        scale = scale[:, :, start // SCALE_BLOCK : -(-stop // SCALE_BLOCK)]
    return [rows[:, :, start:stop], scale, values[..., start : start + padded_length(length)]]


def assembled(ranks: Sequence[tuple[Spans, Sequence[torch.Tensor]]], form: Format, like: torch.Tensor) -> torch.Tensor:
    """A buffer with the keys and values of several ranks, as `parts_in` says.

    Args:
        ranks: the spans of each rank that hold tokens, and its tensors as `Format.kv_forms` says.
        like: on the device.
    """
    parts = parts_in([spans for spans, _ in ranks], form)
    forms = form.forms_of(parts)
    buffer = torch.empty(size_of(forms), dtype=torch.uint8, device=like.device)
    places = iter(unpacked(buffer, forms))
    for part in parts:
        into = [next(places) for _ in form.kv_forms(0)]
        starts = {span.first: start for span, start in zip(part, _starts(part), strict=True)}
        for spans, tensors in ranks:
            if spans == part:
                for place, x in zip(into, tensors, strict=True):
                    place.copy_(x)
                continue
            for span, start in zip(spans, _starts(spans), strict=True):
                if span.first in starts:
                    to = tokens_between(into, starts[span.first], span.length, form)
                    for place, x in zip(to, tokens_between(tensors, start, span.length, form), strict=True):
                        place.copy_(x)
    return buffer


def _starts(spans: Spans) -> list[int]:
    """The place of each span's first token among all."""
    return [sum(span.length for span in spans[:i]) for i in range(len(spans))]


@dataclass(frozen=True, eq=False)
class Part:
    """Keys and values that attention takes in one call.

    Attributes:
        spans: which tokens they are, in the order of the sequence.
        key, value: `Quantized`, the key without its mean; or (B, H, S, D) and (B, H, S, Dv) where attention is exact.
        k_mean: float32 (B, H, D), the key's mean if it isn't that of all parts.
    """

    spans: Spans
    key: Quantized | torch.Tensor
    value: Quantized | torch.Tensor
    k_mean: torch.Tensor | None = None

    def without_v_mean(self) -> Part:
        """The part, whose outputs lack the mean of values. Without it, rounding them to half precision is a small part
        of FP8's error, whatever the mean."""
        assert isinstance(self.value, Quantized)
        return replace(self, value=replace(self.value, mean=None))

    def first_keys(self, count: int, form: Format) -> tuple[Quantized | torch.Tensor, Quantized | torch.Tensor]:
        """Key and value of the first `count` tokens. Quantized values keep those of all."""
        key, value = self.key, self.value
        if isinstance(key, torch.Tensor) or isinstance(value, torch.Tensor):
            assert isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
            return key[:, :, :count], value[:, :, :count]
        rows, scale, _ = tokens_between((key.data, key.scale, value.data), 0, count, form)
        return replace(key, data=rows, scale=scale, length=count), replace(value, length=count)


def parts_of(buffer: torch.Tensor, parts: Sequence[Spans], found: Statistics | None, form: Format) -> list[Part]:
    """The parts in a buffer of `Format.forms_of`.

    Args:
        found: the statistics of the heads in the buffer, if they are shared.
    """
    tensors = iter(unpacked(buffer, form.forms_of(parts)))
    made = []
    for spans in parts:
        if form.exact:
            made.append(Part(spans, next(tensors), next(tensors)))
            continue
        length = tokens_of(spans)
        of_part, k_mean = [next(tensors) for _ in range(3)], None
        statistics_of_part = found
        if statistics_of_part is None:
            k_mean = next(tensors) if form.recipe.smooth_k else None
            v_scale, v_mean = next(tensors), next(tensors) if form.recipe.smooth_v else None
            statistics_of_part = Statistics(None, v_mean, v_scale)
        made.append(Part(spans, *quantized_part(of_part, length, statistics_of_part, form), k_mean))
    return made


def of_heads(found: Statistics | None, heads: slice) -> Statistics | None:
    """The statistics of some heads."""
    if found is None:
        return None
    v_scale = found.v_scale if found.v_scale.shape[1] == 1 and found.v_scale.shape[2] == 1 else found.v_scale[:, heads].contiguous()
    k_mean, v_mean = (None if mean is None else mean[:, heads].contiguous() for mean in (found.k_mean, found.v_mean))
    return Statistics(k_mean, v_mean, v_scale)
