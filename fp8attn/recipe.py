"""The vocabulary of FP8 attention: what a scale covers, which numeric choices a recipe makes, and what a quantized tensor is."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, get_args

import torch

Granularity = Literal["tensor", "head", "block", "token", "channel"]
ProductType = Literal["e4m3", "int8"]
ComputeType = Literal["e4m3", "f16"]
Layout = Literal["rows", "values"]
Rotation = Literal[0, 16, 64, 256]

ROW_GRANULARITIES: tuple[Granularity, ...] = ("tensor", "head", "block", "token")
VALUE_GRANULARITIES: tuple[Granularity, ...] = ("tensor", "head", "channel")

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E4M3_NAN = 0x7F

E4M3_LARGEST = 256.0
"""What the largest element under a scale of Q or K is stored as. Large elements have the large errors, and beside the number an error of e4m3's is
smallest right below a power of two: from 256 down to 128 steps are 16, from 448 down to 256 they are 32 (docs/accuracy.md)."""

INT8_MAX = 127.0
INT8_NAN = -128
"""What all of a row of int8 holds that has an element that isn't finite: no other row holds it."""

SCALE_BLOCK = 128
"""Rows that one `block` scale covers. A kernel's key block divides it, so a block scale is one scalar per key block."""

QUERY_GROUP = 64
"""Queries that one mean covers: a warpgroup's rows, so that what it adds to scores is one number per key there."""

BIAS_ALIGNMENT = 4
"""Rows of what these means add to scores start at multiples of so many float32."""

KEPT_KEYS = tuple(range(0, 1025, SCALE_BLOCK))
"""How many keys of each end a recipe may keep in half precision."""

ROW_ALIGNMENT = 16
"""Rows of quantized q and k start at multiples of this many bytes, which is what TMA asks for."""


@dataclass(frozen=True)
class Recipe:
    """Every numeric choice of the pipeline.

    Attributes:
        q: granularity of Q's scales, one of `tensor | head | block | token`. A single row's, `token`, of e4m3 and up to 64 channels, is fitted to the
            row's codes for the least squared error (fp8attn.quantize.fit), and so is K's.
        k: granularity of K's scales, one of `tensor | head | block | token`. All but `token` cost the kernel nothing.
        v: granularity of V's scales, one of `tensor | head | channel`. V is rounded so that errors of neighbouring keys cancel
            (fp8attn.quantize.encode_values), whatever the recipe.
        smooth_k: subtract K's mean over tokens, estimated from 512 of them, before quantizing. Softmax doesn't change; channels
            with a large common part no longer eat e4m3's precision (SageAttention, arXiv:2410.02367, section 4.2).
        smooth_v: subtract V's mean over tokens, where it isn't small, before quantizing and add it back after normalisation, which is exact
            because the probabilities of a row sum to one.
        smooth_q: subtract the mean of every 64 queries before quantizing, and add its product with K to the scores, in float32 (SageAttention 2,
            arXiv:2411.10958, section 3). For a Q whose channels have large common parts: they no longer eat its precision, nor K's, whose
            rounding they would multiply. Takes a pass over Q, a product with K a 64th as large as Q·Kᵀ, which lies in memory (4 bytes for
            every 64 scores), and kernels that add masks.
        rotate: multiply Q and K by one orthonormal matrix before quantizing, so that outliers of single channels or tokens spread over so many
            channels, the largest power of two at most that divides the head dim (fp8attn.rotation): 16, 64, 256 for all that can be, 0 for none.
            Scores don't change, nor does the kernel's time (docs/accuracy.md).
        qk: what Q and K are stored and multiplied as. `int8` has uniform steps: of a row like N(0, 1) a third of e4m3's rounding error, and exact
            products (SageAttention 2, arXiv:2411.10958). P and V stay e4m3.
        compute: `e4m3` multiplies the stored bytes on FP8 tensor cores; `f16` dequantizes them to half in the kernel, all but int8.
        sinks, recent: the first keys, and of every query the last ones that it sees, so many of each, stay what they were and are attended to in
            half precision, all others as above: for layers that look back a little way, or at sinks. Multiples of 128 up to 1024. Of keys, values
            and queries that aren't quantized yet, without attn_mask (StreamingLLM's sinks and window, arXiv:2309.17453; KIVI's residual,
            arXiv:2402.02750).
        two_level: accumulate P·V of every key block in a fresh accumulator that is added to the running float32 output
            outside the tensor core. `None` means: where the hardware's FP8 accumulators are shorter than float32.

    The default is the most accurate recipe that costs the kernel nothing. `text` has the fields in order, as an operator takes them.

    Raises:
        ValueError: a field isn't one of the values above.
    """

    q: Granularity = "token"
    k: Granularity = "block"
    v: Granularity = "channel"
    smooth_k: bool = True
    smooth_v: bool = True
    smooth_q: bool = False
    rotate: Rotation = 64
    qk: ProductType = "e4m3"
    compute: ComputeType = "e4m3"
    two_level: bool | None = None
    sinks: int = 0
    recent: int = 0
    text: ClassVar[str]

    def __post_init__(self) -> None:
        allowed: dict[str, tuple] = {
            "q": ROW_GRANULARITIES,
            "k": ROW_GRANULARITIES,
            "v": VALUE_GRANULARITIES,
            "smooth_k": (False, True),
            "smooth_v": (False, True),
            "smooth_q": (False, True),
            "rotate": get_args(Rotation),
            "qk": get_args(ProductType),
            "compute": get_args(ComputeType),
            "two_level": (None, False, True),
            "sinks": KEPT_KEYS,
            "recent": KEPT_KEYS,
        }
        for field in fields(self):
            value = getattr(self, field.name)
            # True == 1 and 16.0 == 16
            if not any((isinstance(a, str) or type(value) is type(a)) and value == a for a in allowed[field.name]):
                raise ValueError(f"Recipe.{field.name} is {value!r}; it must be one of {allowed[field.name]}")
        # made here, because torch.compile may make a field's number a symbol
        object.__setattr__(self, "text", " ".join(str(getattr(self, field.name)) for field in fields(self)))

    @staticmethod
    @functools.cache
    def of_text(text: str) -> Recipe:
        """The recipe that has this `text`.

        Raises:
            ValueError: none has.
        """
        words: dict[str, Any] = {"True": True, "False": False, "None": None}
        values: list[Any] = [words[word] if word in words else int(word) if word.isdecimal() else word for word in text.split()]
        if len(values) != len(fields(Recipe)):
            raise ValueError(f"recipe is {text!r}; it must be the text of a Recipe")
        return Recipe(**dict(zip((field.name for field in fields(Recipe)), values, strict=True)))

    @property
    def keeps_keys(self) -> bool:
        """Whether some keys stay in half precision."""
        return self.sinks > 0 or self.recent > 0

    @property
    def of_others(self) -> Recipe:
        """What becomes of all other keys."""
        return replace(self, sinks=0, recent=0)


DEFAULT_RECIPE = Recipe()

PRECISE = Recipe(qk="int8")
"""For layers that need a more exact answer: Q and K as int8, for 1.0 to 1.2 times the default's time. `rotate=256`, which other quantizers do, takes
another 1 % of the error on average, and scales of single keys, k="token", 1 % more, for three times the time (docs/accuracy.md).

By the oracle, exponentials exact, relative L2 at 1k keys, D 64 and 128, in brackets the default's: N(0, 1) 0.034 and 0.035 (0.050, 0.051), outliers
0.030 and 0.030 (0.060, 0.053), biased channels of K 0.034 and 0.035 (0.051, 0.051), attention sinks 0.025 and 0.026 (0.045, 0.031), heavy tails 0.026
and 0.027 (0.042, 0.044), V of one sign 0.0019 and 0.0019 (0.0024, 0.0024), one-hot 0.027 (0.027). What is left is V's and P's rounding.
"""

FUSED_RECIPES: dict[ProductType, Recipe] = {recipe.qk: recipe for recipe in (DEFAULT_RECIPE, PRECISE)}
"""Recipes that kernels quantize with as they attend, or right before."""


@dataclass(frozen=True, eq=False)
class Quantized:
    """An e4m3 or int8 tensor with the scales that restore it.

    Attributes:
        data: float8_e4m3fn, or int8, which only rows can be. Layout `rows`: (B, H, S, D), unit last stride. Layout `values`: (B, H, D, S_padded), V
            transposed, its keys permuted by `fp8attn.layout.key_of_slot` and padded with zeros to whole groups.
        scale: float32 multiplier that restores values. Its shape says what it covers: (1, 1, 1) `tensor`, (B, H, 1)
            `head`, (B, H, ceil(S / 128)) `block`, (B, H, S) `token`; for values (1, 1, 1), (B, H, 1) or (B, H, D) `channel`.
            int8 has no NaN: the scale of a key that isn't finite is NaN if it is the token's own, else it is negative, and the key INT8_NAN.
        granularity: what one scale covers.
        layout: `rows` for q and k, `values` for v.
        length: S, the number of tokens.
        mean: float32 (B, H, D) that was subtracted before quantizing; of queries (B, H, ceil(S / 64), D), of every 64 of them; or None.
        rotated: 2^k, the channels that were rotated together if it stands for rows of q or k times fp8attn.rotation's matrix: of k over sqrt(2^k),
            of q times as much. Else 0.
        bias: of queries whose means were subtracted, what these add to the scores of the keys that they were quantized with, over the softmax
            scale: float32 (B, H, ceil(S / 64), Sk rounded up to a multiple of 4). Else None.
    """

    data: torch.Tensor
    scale: torch.Tensor
    granularity: Granularity
    layout: Layout
    length: int
    mean: torch.Tensor | None = None
    rotated: int = 0
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The logical shape (B, H, S, D), whatever the layout."""
        if self.layout == "rows":
            return self.data.shape
        batch, heads, dim, _ = self.data.shape
        return torch.Size((batch, heads, self.length, dim))

    @property
    def multiplier(self) -> torch.Tensor:
        """The scale without the sign that says that an int8 key under it isn't finite."""
        return self.scale.abs() if self.data.dtype == torch.int8 else self.scale

    @property
    def device(self) -> torch.device:
        return self.data.device
