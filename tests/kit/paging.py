"""Causal calls on one sequence, drawn by hypothesis, for page-local quantization and the KV cache."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import strategies as st

from fp8attn import Recipe, pages
from fp8attn.pages import PAGE, Pages

RECIPES = st.builds(
    Recipe, smooth_k=st.booleans(), smooth_v=st.booleans(), rotate=st.sampled_from((0, 16, 64, 256)), qk=st.sampled_from(("e4m3", "int8"))
)
DIMS = st.sampled_from((16, 40, 64, 128))
DISTRIBUTIONS = ("normal", "outliers", "biased", "one sign", "grows", "falls", "zeros first")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A causal call on one sequence."""

    length: int
    kv_heads: int
    group: int
    dim: int
    value_dim: int
    dtype: torch.dtype
    distribution: str
    recipe: Recipe
    seed: int

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(self.seed)
        heads = self.kv_heads * self.group
        q, k = (torch.randn(h, self.length, self.dim, generator=g) for h in (heads, self.kv_heads))
        v = torch.randn(self.kv_heads, self.length, self.value_dim, generator=g)
        tokens = torch.arange(self.length)[:, None]
        if self.distribution == "outliers":
            k, v = (x + 10 * torch.randn(x.shape, generator=g) * (torch.rand(x.shape, generator=g) < 0.01) for x in (k, v))
        elif self.distribution == "biased":
            k[..., :4] += torch.tensor([10.0, -20.0, 30.0, -50.0])
            v += 3
        elif self.distribution == "one sign":
            v = v.abs()
        elif self.distribution in ("grows", "falls"):
            v = v * 2.0 ** ((3 if self.distribution == "grows" else -3) * (tokens // PAGE))
        elif self.distribution == "zeros first":
            k, v = k * (tokens >= PAGE), v * (tokens >= PAGE)
        return tuple(x.to(self.dtype) for x in (q, k, v))  # type: ignore[return-value]


problems = st.builds(
    Problem, st.integers(1, 560), st.integers(1, 2), st.sampled_from((1, 1, 3)), DIMS, DIMS,
    st.sampled_from((torch.float16, torch.bfloat16, torch.float32)), st.sampled_from(DISTRIBUTIONS), RECIPES, st.integers(0, 2**31),
)  # fmt: skip


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def assert_equal_pages(actual: Pages, expected: Pages) -> None:
    for name in Pages.__dataclass_fields__:
        assert torch.equal(bits(getattr(actual, name)), bits(getattr(expected, name))), name


def modelled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = pages.modelled(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), recipe)
    return out[0], lse[0]
