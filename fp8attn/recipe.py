"""Definitions that all modules share: scale granularities, the numeric choices of a recipe, and quantized tensors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

import torch

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: object) -> Callable[[Callable], Callable]:
        return lambda function: function


Class = TypeVar("Class", bound=type)

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
"""Code of the largest element under a scale of Q or K. Large elements have the largest errors, and e4m3's relative
error is smallest right below a power of two: steps are 16 between 128 and 256, and 32 between 256 and 448
(docs/accuracy.md)."""

INT8_MAX = 127.0
INT8_NAN = -128
"""Every element of an int8 row that holds a non-finite element. No other row holds this code."""

SCALE_BLOCK = 128
"""Rows that one `block` scale covers. A kernel's key block divides it, so a block scale is one scalar per key block."""

QUERY_GROUP = 64
"""Queries that share one mean: the rows of a warpgroup, so that the mean adds one number per key to their scores."""

BIAS_ALIGNMENT = 4
"""Rows of the score bias that these means cause start at multiples of this many float32 elements."""

Coverage = Literal["sequence", "page"]

HALF_KEY_COUNTS = tuple(range(0, 1025, SCALE_BLOCK))
"""Numbers of keys that a recipe may leave in half precision at each end (`sinks`, `recent`)."""

ROW_ALIGNMENT = 16
"""Rows of quantized q and k start at multiples of this many bytes, as TMA requires."""


@dataclass_transform(frozen_default=True, eq_default=False)
def frozen(cls: Class) -> Class:
    """A dataclass whose objects are never changed nor compared: several are made in each call.

    A type checker enforces it. `dataclass(frozen=True)` enforces it at run time, too, and takes four times as long to
    make an object.
    """
    return dataclass(eq=False)(cls)  # type: ignore[return-value]


@dataclass(frozen=True)
class Recipe:
    """Every numeric choice of the pipeline.

    Attributes:
        q: granularity of Q's scales: `tensor | head | block | token`.
        k: granularity of K's scales: `tensor | head | block | token`. All but `token` are free in the kernel.
        v: granularity of V's scales: `tensor | head | channel`. V is always rounded so that errors of neighbouring keys
            cancel (fp8attn.quantization.encode_values).
        smooth_k: subtract K's mean over tokens before quantizing. Of more than 512 tokens it is estimated from at most
            128. Softmax doesn't change, and channels with a large common part no longer use up e4m3's precision
            (SageAttention, arXiv:2410.02367, section 4.2).
        smooth_v: subtract V's mean over tokens before quantizing, unless it is small, and add it back after
            normalisation. This is exact because the probabilities of a row sum to one.
        smooth_q: subtract the mean of every 64 queries before quantizing, and add the product of that mean with K to
            the scores in float32 (SageAttention 2, arXiv:2411.10958, section 3). Use it where Q's channels have large
            common parts: these use up Q's precision and multiply K's rounding errors. It costs a pass over Q, a product
            with K that is a 64th of Q·Kᵀ, memory for that product (4 bytes per 64 scores), and kernels that add masks.
        rotate: multiply Q and K by one orthonormal matrix before quantizing, which spreads outliers of single channels
            or tokens over several channels (fp8attn.rotation). The number of channels is the largest power of two that
            divides the head dim and is at most this value: 16, 64, or 256 for the maximum; 0 doesn't rotate. Scores
            don't change, nor does the kernel's time (docs/accuracy.md).
        qk: type in which Q and K are stored and multiplied. `int8` has uniform steps: its rounding error of a row like
            N(0, 1) is a third of e4m3's, and its products are exact (SageAttention 2, arXiv:2411.10958). P and V stay
            e4m3.
        compute: `e4m3` multiplies the stored bytes on FP8 tensor cores. `f16` dequantizes them to half in the kernel;
            it doesn't affect int8 Q and K.
        sinks, recent: numbers of keys in half precision: the first `sinks` keys, and the last `recent` keys that each
            query sees. They are neither quantized nor smoothed; all other keys are. For layers that attend to recent
            keys or to sinks. Multiples of 128 up to 1024. Queries, keys and values must not be quantized yet, and
            attn_mask must be None (sinks and window: StreamingLLM, arXiv:2309.17453; residual: KIVI, arXiv:2402.02750).
        statistics: what means and scales of K and V are computed from. `sequence`: from all keys of a call, so a later
            key changes the answer of an earlier query a little. `page`: from pages of 128 keys (docs/cache.md), so a
            later key changes no bit of it, and a KV cache gives the same answers. The keys of a query's own page stay
            in half precision. Causal calls only, with operands as for `recent`, and the default granularities.
        two_level: accumulate P·V of every key block in a fresh accumulator and add that to the running float32 output
            outside the tensor core. `None` does so where the hardware's FP8 accumulators are narrower than float32.

    The default is the most accurate recipe that is free in the kernel. `text` holds the fields in order, separated by
    spaces, for operators, which take no objects.

    Raises:
        ValueError: a field has none of the values above.
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
    statistics: Coverage = "sequence"
    text: ClassVar[str]
    _of_fp8_keys: ClassVar[Recipe]

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
            "sinks": HALF_KEY_COUNTS,
            "recent": HALF_KEY_COUNTS,
            "statistics": get_args(Coverage),
        }
        for field in fields(self):
            value = getattr(self, field.name)
            # compare types too, because True == 1 and 16.0 == 16
            if not any((isinstance(a, str) or type(value) is type(a)) and value == a for a in allowed[field.name]):
                raise ValueError(f"Recipe.{field.name} is {value!r}; it must be one of {allowed[field.name]}")
        # computed here, because torch.compile may replace a field's number by a symbol
        object.__setattr__(self, "text", " ".join(str(getattr(self, field.name)) for field in fields(self)))
        if self.has_half_keys:
            object.__setattr__(self, "_of_fp8_keys", replace(self, sinks=0, recent=0, statistics="sequence"))

    @staticmethod
    @functools.cache
    def of_text(text: str) -> Recipe:
        """The recipe with this `text`.

        Raises:
            ValueError: the text isn't that of a recipe.
        """
        words: dict[str, Any] = {"True": True, "False": False, "None": None}
        values: list[Any] = [words[word] if word in words else int(word) if word.isdecimal() else word for word in text.split()]
        if len(values) != len(fields(Recipe)):
            raise ValueError(f"recipe is {text!r}; it must be the text of a Recipe")
        return Recipe(**dict(zip((field.name for field in fields(Recipe)), values, strict=True)))

    @property
    def has_half_keys(self) -> bool:
        """Whether some keys stay in half precision."""
        return self.sinks > 0 or self.recent > 0 or self.statistics == "page"

    @property
    def of_fp8_keys(self) -> Recipe:
        """The recipe of the keys that don't stay in half precision."""
        return self._of_fp8_keys if self.has_half_keys else self

    def of_call(self, masked: bool, causal: bool) -> Recipe:
        """This recipe, or without keys in half precision where it doesn't take a call.

        Args:
            masked: whether the call has an attn_mask.
            causal: whether it is causal.
        """
        return self.of_fp8_keys if self.has_half_keys and (masked or (self.statistics == "page" and not causal)) else self


DEFAULT_RECIPE = Recipe()

PRECISE = Recipe(qk="int8")
"""For layers that need a more exact answer: Q and K are int8, at 1.00 to 1.07 times the default's time on an H100. Two
options lower the error further, by 1 % each: `rotate=256`, which other quantizers run, and `k="token"`, one scale per
key, at 1.2 to 1.6 times the time (docs/benchmark-tables.md).

Relative L2 error of the pipeline oracle with exact exponentials, 1k keys, D 64 and 128; the default's in brackets:
N(0, 1) 0.034 and 0.035 (0.050, 0.051), outliers 0.030 and 0.030 (0.060, 0.053), biased channels of K 0.034 and 0.035
(0.051, 0.051), attention sinks 0.025 and 0.026 (0.045, 0.031), heavy-tailed 0.026 and 0.027 (0.042, 0.044), V of one
sign 0.0019 and 0.0019 (0.0024, 0.0024), one-hot 0.027 (0.027). The rest is the rounding of V and P.
"""

FUSED_RECIPES: dict[ProductType, Recipe] = {recipe.qk: recipe for recipe in (DEFAULT_RECIPE, PRECISE)}
"""Recipes that the fused kernels support: they quantize inside the attention kernel or right before it."""


@dataclass(frozen=True, eq=False)
class Packed:
    """Where sequences of different lengths lie in a packed tensor, one after the other.

    The GPU reads `cu_seqlens` and `seqused`, and the host doesn't: a call needs no synchronisation.

    Attributes:
        cu_seqlens: int32 (N + 1), contiguous. Sequence i has the tokens from cu_seqlens[i] to cu_seqlens[i + 1] - 1.
        seqused: int32 (N,), contiguous, the number of these tokens that exist, the first ones; or None: all exist.
        tokens: T, the tokens of the packed tensor. Whatever the numbers above are, nothing outside is read.
    """

    cu_seqlens: torch.Tensor
    seqused: torch.Tensor | None
    tokens: int

    @property
    def sequences(self) -> int:
        """N."""
        return self.cu_seqlens.shape[0] - 1

    def spans(self) -> list[tuple[int, int]]:
        """The first token and the number of tokens of each sequence. For plain torch only: the host waits for the
        GPU."""
        ends = [min(max(x, 0), self.tokens) for x in self.cu_seqlens.tolist()]
        lengths = [max(end - begin, 0) for begin, end in itertools.pairwise(ends)]
        if self.seqused is not None:
            lengths = [min(max(used, 0), length) for used, length in zip(self.seqused.tolist(), lengths, strict=True)]
        return list(zip(ends, lengths, strict=False))


@dataclass(frozen=True, eq=False)
class Quantized:
    """An e4m3 or int8 tensor with the scales that restore it.

    Attributes:
        data: float8_e4m3fn, or int8 (layout `rows` only). Layout `rows`: (B, H, S, D), unit last stride. Layout
            `values`: (B, H, D, S_padded): V transposed, its keys permuted by `fp8attn.layout.key_of_slot` and padded
            with zeros to whole groups. It may hold blocks of 128 keys beyond these, which attention doesn't read.
        scale: float32 multiplier that restores values. Its shape depends on `granularity`: (1, 1, 1) `tensor`,
            (B, H, 1) `head`, (B, H, ceil(S / 128)) `block`, (B, H, S) `token`; for values (1, 1, 1), (B, H, 1) or
            (B, H, D) `channel`. int8 has no NaN: a non-finite key is stored as INT8_NAN. Its scale is NaN with `token`,
            and negative with any other granularity.
        granularity: what one scale covers.
        layout: `rows` for q and k, `values` for v.
        length: S, the number of tokens.
        mean: float32 (B, H, D) that was subtracted before quantizing; for queries (B, H, ceil(S / 64), D), one mean for
            every 64 of them; or None. Before it is rotated, a mean of keys has numbers of bfloat16.
        rotated: number of channels that were rotated together, a power of two; 0 if the rows aren't rotated. With R =
            fp8attn.rotation's matrix and n = `rotated`, `data` and `scale` represent k · R / sqrt(n) or
            q · R · sqrt(n).
        bias: for queries whose means were subtracted: what these means add to the scores of the keys that they were
            quantized with, divided by the softmax scale. float32 (B, H, ceil(S / 64), Sk rounded up to a multiple of
            4). Else None.
        packed: the sequences of a packed tensor, or None. B is then 1 and S is T, the tokens of all N sequences.
            Sequence i has its own pages of 128 tokens: page j is page cu_seqlens[i] // 128 + i + j of all T // 128 + N.
            `block` scales are (1, H, T // 128 + N), `values` are (1, H, D, 128 · (T // 128 + N)), and what each
            sequence has one of, means and `channel` scales, is (N, H, D). Pages without tokens hold anything.
    """

    data: torch.Tensor
    scale: torch.Tensor
    granularity: Granularity
    layout: Layout
    length: int
    mean: torch.Tensor | None = None
    rotated: int = 0
    bias: torch.Tensor | None = None
    packed: Packed | None = None

    @property
    def shape(self) -> torch.Size:
        """The logical shape (B, H, S, D), whatever the layout."""
        if self.layout == "rows":
            return self.data.shape
        batch, heads, dim, _ = self.data.shape
        return torch.Size((batch, heads, self.length, dim))

    @property
    def multiplier(self) -> torch.Tensor:
        """The scales without the sign that says that an int8 key under the scale is non-finite."""
        return self.scale.abs() if self.data.dtype == torch.int8 else self.scale

    @property
    def device(self) -> torch.device:
        return self.data.device
