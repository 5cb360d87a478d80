"""Recipes with some keys in half precision. FP8 kernels attend to the other keys, another kernel attends to the
half-precision keys, and the results are merged by their LSE.

The FP8 keys of a row are one contiguous range: from the first key that isn't a sink to some keys before the last one
that the row sees. This is a causal mask, aligned to the bottom right, on a slice of K and V. So every FP8 attention
kernel serves unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from . import pages, reference, rotation
from .quantization import quantize
from .recipe import SCALE_BLOCK, Recipe
from .reference import Causal, Scoring, causal_offset
from .validate import Checked

Fp8Attention = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""FP8 attention to the keys that aren't in half precision: out (B, Hq, Sq, Dv); LSE (B, Hq, Sq) for K without its mean;
that mean (B, Hkv, D), rotated, or None."""


def parts(q_length: int, kv_length: int, causal: Causal) -> Iterator[tuple[slice, Causal]]:
    """Ranges of query rows with their masks. In each, the last row sees the last key, or all rows see all keys."""
    if causal != "top_left" or q_length <= kv_length:
        yield slice(0, q_length), causal
    else:
        yield slice(0, kv_length), causal
        yield slice(kv_length, q_length), "none"


def fp8_keys(q_length: int, kv_length: int, causal: Causal, recipe: Recipe) -> tuple[slice, Causal]:
    """The slice of K (it may be empty) to which FP8 kernels attend, and its mask."""
    end = kv_length if causal == "none" else min(q_length + causal_offset(causal, q_length, kv_length), kv_length)
    keys = slice(recipe.sinks, max(end - recipe.recent, recipe.sinks))
    return keys, "none" if causal == "none" else "bottom_right"


def ranges(q_length: int, kv_length: int, causal: Causal, recipe: Recipe) -> Iterator[tuple[slice, Causal, slice, Causal]]:
    """Ranges of query rows with their masks; of each, the slice of K to which FP8 kernels attend, and its mask.

    FP8 kernels don't attend if there are no rows or the slice is empty.
    """
    for rows, part_causal in parts(q_length, kv_length, causal):
        yield rows, part_causal, *fp8_keys(rows.stop - rows.start, kv_length, part_causal, recipe)


def tokens_of(x: torch.Tensor, tokens: slice) -> torch.Tensor:
    """Some tokens of x (B, H, S, D); x itself if they are all."""
    length = tokens.stop - tokens.start
    return x if length == x.shape[2] else x.narrow(2, tokens.start, length)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Causal, recipe: Recipe,
    to_fp8_keys: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Causal], Fp8Attention],
    to_half_keys: Callable[[torch.Tensor, Fp8Attention | tuple[None, None, None], Causal], tuple[torch.Tensor, torch.Tensor | None]],
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Attention with some keys in half precision, one range of query rows at a time.

    Args:
        to_fp8_keys: FP8 attention of queries to keys and values, with `recipe.of_fp8_keys`.
        to_half_keys: attention of queries to the half-precision keys, merged with the result of `to_fp8_keys`, or with
            None if there are no FP8 keys.

    Returns:
        out (B, Hq, Sq, Dv) and LSE (B, Hq, Sq), as `to_half_keys` returns them.
    """
    found = []
    for rows, part_causal, keys, fp8_causal in ranges(q.shape[2], k.shape[2], causal, recipe):
        part = tokens_of(q, rows)
        fp8_out: Fp8Attention | tuple[None, None, None] = (None, None, None)
        if keys.start < keys.stop and part.numel() > 0:
            fp8_out = to_fp8_keys(part, tokens_of(k, keys), tokens_of(v, keys), fp8_causal)
        found.append(to_half_keys(part, fp8_out, part_causal))
    if len(found) == 1:
        return found[0]
    of_rows = [lse for _, lse in found if lse is not None]
    return torch.cat([out for out, _ in found], 2), torch.cat(of_rows, -1) if of_rows else None


def by_kernels(
    checked: Checked,
    recipe: Recipe,
    return_lse: bool,
    to_fp8_keys: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Causal], Fp8Attention],
    half_keys: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attend` with an operator for the half-precision keys: half_keys or modelled_half_keys.

    LSE is empty or None unless `return_lse`.
    """
    q, k, v = checked.floats
    rotated = rotation.part_of(q.shape[3], recipe.rotate)

    def to_half_keys(
        part: torch.Tensor, fp8_out: Fp8Attention | tuple[None, None, None], part_causal: Causal
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return half_keys(
            part, k, v, *fp8_out, rotated, recipe.sinks, recipe.recent, checked.softmax_scale, part_causal, checked.out_dtype, return_lse,
            scale=checked.scale,
        )  # fmt: skip

    return attend(q, k, v, checked.causal, recipe, to_fp8_keys, to_half_keys)


def modelled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: Recipe, *, causal: Causal = "none", softmax_scale: float | None = None,
    exact: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The oracle: `reference.pipeline` for the FP8 keys, quantized by definition, then `reference.with_half_keys`.

    Args:
        exact: see `reference.Arithmetic`.

    Returns:
        out (B, Hq, Sq, Dv) and LSE (B, Hq, Sq), float32.
    """
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    if recipe.statistics == "page":
        length = q.shape[2] if causal == "top_left" else k.shape[2]
        return pages.modelled(q, k[:, :, :length], v[:, :, :length], recipe, Scoring(scale))

    def to_fp8_keys(part: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, fp8_causal: Causal) -> Fp8Attention:
        query, key, value = quantize(part, keys, values, recipe.of_fp8_keys)
        assert query is not None and key is not None and value is not None
        arithmetic = reference.Arithmetic(SCALE_BLOCK, recipe.compute, exact)
        out, lse = reference.pipeline(query, key, value, arithmetic=arithmetic, causal=fp8_causal, scoring=reference.Scoring(scale))
        return out, lse, key.mean

    def to_half_keys(part: torch.Tensor, fp8_out: Fp8Attention | tuple[None, None, None], part_causal: Causal) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, k_mean = fp8_out
        if lse is not None and k_mean is not None:
            lse = reference.unsmoothed_lse(lse, part, k_mean, scale, rotation.part_of(part.shape[3], recipe.rotate))
        fp8 = None if out is None or lse is None else (out, lse)
        counts = reference.HalfKeyCounts(recipe.sinks, recipe.recent)
        return reference.with_half_keys(part, k, v, fp8, counts, causal=part_causal, softmax_scale=scale)

    out, lse = attend(q, k, v, causal, recipe, to_fp8_keys, to_half_keys)
    assert lse is not None
    return out, lse
