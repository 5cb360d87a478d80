"""Hypothesis strategies: they draw shapes, layouts, recipes, masks, distributions and seeds, but never tensor
elements."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from conftest import GPU
from hypothesis import given, note, settings
from hypothesis import strategies as st

from fp8attn import Recipe
from fp8attn.recipe import ROW_GRANULARITIES, VALUE_GRANULARITIES

SEVERAL = 8 if GPU else 1
"""Cases of one example. Compiling Triton kernels for the first case takes most of the time; cases that share its
kernels cost almost nothing."""

DIMS = (16, 24, 40, 64, 72, 96, 128, 136, 192, 256)
FINITE = ("normal", "outliers", "channel bias", "biased queries", "one sign", "tiny", "huge", "zeros", "constant", "duplicated keys")
MASKS = ("none", "causal", "bottom right", "bool", "float", "half", "bool broadcast", "float broadcast", "hides all")


@dataclass(frozen=True)
class Case:
    """One attention problem. It is small enough to print and complete enough to repeat."""

    batch: int
    kv_heads: int
    group: int
    q_length: int
    kv_length: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    layout: str
    mask: str
    distribution: str
    recipe: Recipe
    scale: float | None
    out_dtype: torch.dtype
    seed: int

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v, the same on every device."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = (
            (self.batch, self.q_heads, self.q_length, self.head_dim),
            (self.batch, self.kv_heads, self.kv_length, self.head_dim),
            (self.batch, self.kv_heads, self.kv_length, self.value_dim),
        )
        q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
        if self.distribution == "outliers":
            q, k, v = (x + 10 * torch.randn(x.shape, generator=generator) * (torch.rand(x.shape, generator=generator) < 0.01) for x in (q, k, v))
        elif self.distribution == "channel bias":
            k[..., :4] += torch.tensor([10.0, -20.0, 30.0, -50.0])
            v += 3
        elif self.distribution == "biased queries":
            q[..., :4] += torch.tensor([10.0, -20.0, 30.0, -50.0]) / 4
        elif self.distribution == "one sign":
            v = v.abs()
        elif self.distribution == "tiny":
            q, k, v = q * 1e-6, k * 1e-6, v * 1e-6
        elif self.distribution == "huge":
            q, k, v = q * 30, k * 30, v * 1e4
        elif self.distribution == "zeros":
            q, k, v = q * 0, k * (torch.rand(k.shape[:2], generator=generator) < 0.5)[..., None, None], v * 0
        elif self.distribution == "constant":
            q, k, v = q * 0 + 1.25, k * 0 - 0.75, v * 0 + 1.1
        elif self.distribution == "duplicated keys" and self.kv_length > 1:
            half = self.kv_length // 2
            k[:, :, half : 2 * half] = k[:, :, :half]
        return tuple(self._laid_out(x.to(device, self.dtype)) for x in (q, k, v))  # type: ignore[return-value]

    def _laid_out(self, x: torch.Tensor) -> torch.Tensor:
        if self.layout == "bshd":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if self.layout == "padded":
            buffer = torch.full((x.shape[0], x.shape[1] + 1, x.shape[2] + 3, x.shape[3] + 8), 7.0, dtype=x.dtype, device=x.device)
            view = buffer[:, 1:, 2 : 2 + x.shape[2], : x.shape[3]]
            view.copy_(x)
            return view
        return x

    def attn_mask(self, device: torch.device) -> torch.Tensor | None:
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.batch, self.q_heads, self.q_length, self.kv_length)
        if self.mask == "bool":
            return (torch.rand(shape, generator=generator) < 0.7).to(device)
        if self.mask == "bool broadcast":
            return (torch.rand((self.q_length, self.kv_length), generator=generator) < 0.7).to(device)
        if self.mask in ("float", "half"):
            bias = torch.randn(shape, generator=generator)
            bias = bias.masked_fill(torch.rand(shape, generator=generator) < 0.2, -torch.inf).to(device)
            # in half precision, rows start at multiples of 16 bytes
            return bias if self.mask == "float" else torch.nn.functional.pad(bias.to(torch.bfloat16), (0, -shape[3] % 8))[..., : shape[3]]
        if self.mask == "float broadcast":
            return torch.randn((self.batch, 1, 1, self.kv_length), generator=generator).to(device, torch.float16)
        if self.mask == "hides all":
            return torch.zeros((1, 1, self.q_length, 1), dtype=torch.bool, device=device)
        return None

    def options(self, device: torch.device) -> dict:
        """Keyword arguments of sdpa besides q, k, v."""
        return dict(
            attn_mask=self.attn_mask(device),
            is_causal=self.mask in ("causal", "bottom right"),
            causal_alignment="bottom_right" if self.mask == "bottom right" else "top_left",
            scale=self.scale,
            enable_gqa=True,
        )

    @property
    def scale_is_positive(self) -> bool:
        return self.scale is None or self.scale > 0

    def like(self, first: Case) -> Case:
        """This case with the properties that kernels are compiled for of another: all but sizes and numbers."""
        return replace(
            first,
            batch=self.batch,
            q_length=self.q_length,
            kv_length=self.kv_length,
            mask=self.mask if self.causal != "none" != first.causal else first.mask,
            distribution=self.distribution,
            scale=self.scale if self.scale_is_positive == first.scale_is_positive else first.scale,
            seed=self.seed,
        )

    def of_kind(self, kind: Case) -> Case:
        """This case, changed so that it is quantized by the kernels compiled for `kind`; with its own mask."""
        return replace(self.like(kind), mask=self.mask)

    @property
    def causal(self) -> str:
        return {"causal": "top_left", "bottom right": "bottom_right"}.get(self.mask, "none")


T = TypeVar("T")

RECIPES: dict[str, tuple] = {
    "q": ROW_GRANULARITIES,
    "k": ROW_GRANULARITIES,
    "v": VALUE_GRANULARITIES,
    "smooth_k": (False, True),
    "smooth_v": (False, True),
    "smooth_q": (False, False, True),
    "rotate": (0, 16, 64, 64, 256),
    "qk": ("e4m3", "e4m3", "int8"),
    "compute": ("e4m3", "e4m3", "f16"),
    "two_level": (None, True, False),
}
"""What a field of a recipe may be; twice what is drawn twice as often."""

PROBLEMS: dict[str, tuple] = {
    "group": (1, 1, 2, 3),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "layout": ("bhsd", "bshd", "padded"),
    "scale": (None, None, 0.2, -0.1),
    "out_dtype": (torch.float32, torch.float32, torch.bfloat16, torch.float16),
}
"""The same for fields of a case."""

recipes = st.builds(Recipe, **{name: st.sampled_from(choices) for name, choices in RECIPES.items()})

lengths = st.one_of(st.integers(1, 40), st.integers(41, 300), st.sampled_from((64, 128, 256)))


@st.composite
def any_cases(draw, distributions: tuple[str, ...] = FINITE, masks: tuple[str, ...] = MASKS) -> Case:
    head_dim = draw(st.sampled_from(DIMS))
    return Case(
        batch=draw(st.integers(1, 2)),
        kv_heads=draw(st.integers(1, 2)),
        q_length=draw(lengths),
        kv_length=draw(lengths),
        head_dim=head_dim,
        value_dim=draw(st.one_of(st.just(head_dim), st.sampled_from(DIMS))),
        mask=draw(st.sampled_from(masks)),
        distribution=draw(st.sampled_from(distributions)),
        recipe=draw(recipes),
        seed=draw(st.integers(0, 2**31)),
        **{name: draw(st.sampled_from(choices)) for name, choices in PROBLEMS.items()},
    )


FEW = GPU and settings().derandomize
"""Whether this is the default tier on a GPU."""

KINDS = 16


@functools.cache
def kinds() -> tuple[Case, ...]:
    """What cases of the default tier on a GPU are like: KINDS of them, the same in every run. Every fourth has the default recipe; the other
    fields have each of their choices equally often."""
    r = random.Random(1)

    def balanced(choices: tuple) -> list:
        found = [choices[i % len(choices)] for i in range(KINDS)]
        r.shuffle(found)
        return found

    fields = {name: balanced(choices) for name, choices in PROBLEMS.items()}
    fields |= {
        "head_dim": balanced(DIMS),
        "value_dim": balanced(DIMS),
        "q_length": balanced((1, 40, 33, 200, 128)),
        "kv_length": balanced((150, 40, 256, 33)),
    }
    parts = {name: balanced(choices) for name, choices in RECIPES.items()}
    found = []
    for i in range(KINDS):
        case = {name: values[i] for name, values in fields.items()}
        recipe = Recipe(**{name: values[i] for name, values in parts.items()})
        if i % 4 == 0:
            case["head_dim"], recipe = (64, 128, 256, 72)[i // 4], Recipe()
        if i % 2 == 0:
            case["value_dim"] = case["head_dim"]
        found.append(Case(batch=1, kv_heads=1 + i % 2, mask="none", distribution="normal", recipe=recipe, seed=i, **case))
    return tuple(found)


def of_few_kinds(free: st.SearchStrategy[T], of_kind: Callable[[T, T], T], kinds: Sequence[T]) -> st.SearchStrategy[T]:
    """Any cases; in the default tier on a GPU those of a few kinds, so that all tests share their kernels.

    Args:
        of_kind: a case, changed so that it runs the kernels that are compiled for a kind.
    """
    return st.builds(of_kind, free, st.sampled_from(kinds)) if FEW else free


def cases(distributions: tuple[str, ...] = FINITE, masks: tuple[str, ...] = MASKS) -> st.SearchStrategy[Case]:
    """See `of_few_kinds`."""
    return of_few_kinds(any_cases(distributions, masks), Case.of_kind, kinds())


def given_several(one: st.SearchStrategy, part: int = 1, **others: st.SearchStrategy) -> Callable[[Callable], Callable]:
    """@given with `drawn`, a tuple of SEVERAL cases.

    The total number of cases is that of other tests' examples, divided by `part`. Use `part` where each case compiles
    or interprets much.
    """
    examples = max(settings().max_examples // (SEVERAL * part), 1)
    return lambda test: settings(max_examples=examples)(given(drawn=st.tuples(*[one] * SEVERAL), **others)(test))


def alike(drawn: tuple) -> tuple[Any, ...]:
    first, *others = drawn
    return first, *(case.like(first) for case in others)


def noted(drawn: tuple) -> Iterator[Any]:
    """Yield one case after the other, and note it. The last case that is printed is the one that failed."""
    for case in drawn:
        if len(drawn) > 1:
            note(repr(case))
        yield case
