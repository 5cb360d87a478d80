"""Repeated calls on a GPU have the bits of calls that aren't repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8attn
from fp8attn import PRECISE, Recipe, eager

pytestmark = pytest.mark.gpu

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "one launch": dict(shape=(2, 4, 300, 64)),
    "causal": dict(is_causal=True),
    "LSE": dict(return_lse=True),
    "LSE of float32": dict(return_lse=True, dtype=torch.float32),
    "GQA": dict(group=4, is_causal=True),
    "bool mask": dict(mask=torch.bool),
    "added mask": dict(mask=torch.bfloat16),
    "PRECISE": dict(recipe=PRECISE),
    "no rotation": dict(recipe=Recipe(rotate=0)),
    "rotation of 256": dict(recipe=Recipe(rotate=256), return_lse=True),
    "smoothed queries": dict(recipe=Recipe(smooth_q=True)),
    "recent keys": dict(recipe=Recipe(recent=256), is_causal=True),
    "sinks and recent keys": dict(recipe=Recipe(sinks=128, recent=128), return_lse=True),
    "token scales": dict(recipe=Recipe(k="token")),
    "head dim 80": dict(shape=(2, 6, 700, 80)),
    "head dim 40 of float16": dict(shape=(2, 6, 700, 40), dtype=torch.float16),
    "head dim 256": dict(shape=(1, 4, 900, 256)),
    "one query": dict(queries=1),
    "long": dict(shape=(1, 3, 9000, 128)),
    "Triton": dict(backend="triton", recipe=Recipe(compute="f16")),
}


def call(kind: dict[str, Any], seed: int) -> tuple[torch.Tensor, ...]:
    """Outputs of a call with new tensors."""
    options = dict(kind)
    batch, heads, length, dim = options.pop("shape", (2, 6, 1111, 128))
    group, queries = options.pop("group", 1), options.pop("queries", length)
    dtype, mask = options.pop("dtype", torch.bfloat16), options.pop("mask", None)
    generator = torch.Generator("cuda").manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device="cuda", generator=generator)

    q, k, v = drawn(batch, heads * group, queries, dim), drawn(batch, heads, length, dim), drawn(batch, length, heads, dim).transpose(1, 2)
    if mask is not None:
        added = drawn(batch, 1, queries, length)
        options["attn_mask"] = added > 0 if mask == torch.bool else added.to(mask)
    found = fp8attn.sdpa(q, k, v, enable_gqa=group > 1, **options)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", KINDS)
def test_has_the_bits_of_the_first_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hits: list[bool] = []
    repeat = eager.repeat

    def noted(*arguments: Any) -> Any:
        found = repeat(*arguments)
        hits.append(found is not None)
        return found

    monkeypatch.setattr(eager, "repeat", noted)
    eager.forget()
    firsts = [call(KINDS[name], seed) for seed in (0, 1)]  # the second is recorded
    again = [call(KINDS[name], seed) for seed in (0, 1, 2)]
    assert hits == [False] * 2 + [True] * 3
    eager.forget()
    firsts.append(call(KINDS[name], 2))
    for first, repeated in zip(firsts, again, strict=True):
        assert len(first) == len(repeated) and all(map(torch.equal, first, repeated))


@pytest.mark.parametrize("name", ("default", "recent keys", "no rotation", "bool mask"))
def test_in_a_graph(name: str) -> None:
    """Captured, and replayed with other contents."""
    eager.forget()
    for seed in (0, 1):
        call(KINDS[name], seed)
    stream = torch.cuda.Stream()
    tensors = [torch.randn(2, 6, 1111, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    options = {key: value for key, value in KINDS[name].items() if key != "mask"}
    if "mask" in KINDS[name]:
        options["attn_mask"] = torch.rand(2, 1, 1111, 1111, device="cuda") > 0.5
    with torch.cuda.stream(stream):
        for _ in range(3):
            fp8attn.sdpa(*tensors, **options)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = fp8attn.sdpa(*tensors, **options)
    for x in tensors:
        x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    eager.forget()
    assert torch.equal(out, fp8attn.sdpa(*tensors, **options))
