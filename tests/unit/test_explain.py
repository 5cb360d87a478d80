"""explain, explain_varlen and explain_paged name what a call launches: backend, config and quantizers.

CPU tensors are an H100's here, and launches are noted.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8attn
from fp8attn import BackendUnavailable, Plan, Recipe, api, explaining, ops, paged_copies, paged_ops, paged_tensors_ops, prepare, problem_ops
from fp8attn import quantization as quantize_ref
from fp8attn import triton as triton_kernels
from fp8attn.call import empty_lse, empty_output
from fp8attn.cuda import build, configs, prefill, quantize
from fp8attn.cuda import run as cuda_run
from fp8attn.device import ARCHITECTURES
from fp8attn.recipe import FUSED_RECIPES
from fp8attn.triton import run as triton_run

pytestmark = pytest.mark.anywhere

H100 = ARCHITECTURES[90]

QUANTIZERS = {"hopper": "the CUDA quantizer for Hopper", "general": "by the general CUDA quantizer", "triton": "quantized by Triton"}
"""What `Plan.because` says, by the quantizer that is launched."""


class Launches:
    """Notes what would be launched.

    Attributes:
        attention: backend and config of each launch of attention.
        quantizers: keys of QUANTIZERS.
        overlapped: whether attention began before quantization had ended.
    """

    def __init__(self) -> None:
        self.attention: list[tuple[str, Any]] = []
        self.quantizers: set[str] = set()
        self.overlapped = False

    def attend(self, backend: str, config: Any, q: torch.Tensor, value_dim: int, out_dtype: torch.dtype, return_lse: bool) -> tuple:
        self.attention.append((backend, config))
        return empty_output(q, value_dim, out_dtype), empty_lse(q, return_lse)

    def quantize(self, quantizer: str, *arguments: Any) -> tuple:
        self.quantizers.add(quantizer)
        return quantize_ref.quantize(*arguments)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    seen = Launches()

    def of_call(backend: str, config: Any, call: Any) -> tuple:
        return seen.attend(backend, config, call.q, call.value_dim, call.out_dtype, call.return_lse)

    def library_of(config: Any, device: Any) -> SimpleNamespace:
        def both(*arguments: Any) -> None:
            writers = arguments[12][-1]
            seen.attention.append(("cuda", config))
            seen.quantizers.add("hopper")
            seen.overlapped = writers > 0

        operators = SimpleNamespace(quantize_and_attend=SimpleNamespace(default=both))
        return SimpleNamespace(launchers=collections.defaultdict(int), operators=operators)

    def packed(*arguments: Any) -> tuple:
        seen.quantizers.add("triton")
        return quantize_ref.quantize_packed(*arguments[:4])

    def packed_by_cuda(k: Any, v: Any, qk: Any, packed: Any, device: Any, longest: int) -> tuple:
        seen.quantizers.add("hopper")
        return quantize_ref.quantize_packed(k, v, FUSED_RECIPES[qk], packed)

    def by_general(q: Any, k: Any, v: Any, recipe: Any, device: Any, packed: Any = None) -> tuple:
        if packed is None:
            return seen.quantize("general", q, k, v, recipe)
        query, _, _ = seen.quantize("general", q, None, None, recipe)
        return query, *quantize_ref.quantize_packed(k, v, recipe, packed)

    def with_bias(q: Any, k: Any, key: Any, device: Any) -> Any:
        return dataclasses.replace(q, bias=quantize_ref.score_bias(q.mean, quantize_ref.dequantize(key)))

    def half_keys(call: Any, device: Any) -> tuple:
        return empty_output(call.q, call.v.shape[3], call.out_dtype), empty_lse(call.q, call.return_lse)

    quantizer = SimpleNamespace(operators=SimpleNamespace(quantize=SimpleNamespace(default=lambda *_: seen.quantizers.add("hopper"))))
    for module in (prepare, explaining, ops, problem_ops, paged_ops):
        monkeypatch.setattr(module, "device_of", lambda device: H100)
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    for module in (api, explaining):
        monkeypatch.setattr(module, "choose_backend", lambda backend, device: backend)
    monkeypatch.setattr(build, "unavailable", lambda *_: None)
    monkeypatch.setattr(cuda_run, "forward", lambda call, device, config, **_: of_call("cuda", config, call))
    monkeypatch.setattr(cuda_run, "forward_from_fp16", lambda p, device, launch: seen.attend(
        "cuda", launch.config, p.q, p.v.shape[3], p.out_dtype, p.return_lse))  # fmt: skip
    monkeypatch.setattr(cuda_run, "prefill_from_pages", lambda call, device, tiling, out_dtype, *_: seen.attend(
        "cuda", tiling.config, call.q, call.storage.v.shape[3], out_dtype, True))  # fmt: skip
    monkeypatch.setattr(cuda_run, "library_of", library_of)
    monkeypatch.setattr(cuda_run, "quantizer_of", lambda k, *_: (quantizer, quantize.choose(k), (0, 0, 0, 0)))
    monkeypatch.setattr(cuda_run, "quantize_packed", packed_by_cuda)
    monkeypatch.setattr(cuda_run, "quantize_any", by_general)
    monkeypatch.setattr(cuda_run, "unsmoothed_lse", lambda lse, *_: lse.clone())
    monkeypatch.setattr(triton_run, "forward", lambda call, device: of_call("triton", triton_run.choose(call, device), call))
    monkeypatch.setattr(triton_kernels.quantize, "quantize", lambda q, k, v, recipe, device, given: seen.quantize("triton", q, k, v, recipe, given))
    monkeypatch.setattr(triton_kernels.quantize, "quantize_packed", packed)
    monkeypatch.setattr(triton_kernels.bias, "with_bias", with_bias)
    monkeypatch.setattr(triton_kernels.varlen, "table_of", lambda *_: None)
    monkeypatch.setattr(triton_kernels.half_keys, "half_keys", half_keys)
    monkeypatch.setattr(triton_kernels.lse, "unsmoothed_lse", lambda lse, *_, **__: lse.clone())
    return seen


def operands(*shape: int, value_dim: int | None = None, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    return q, k, v if value_dim is None else torch.randn(*shape[:3], value_dim, generator=generator).to(dtype)


SMALL, MANY = (1, 2, 300, 64), (2, 40, 513, 64)
CALLS: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {
    "one launch": (operands(*SMALL), {}),
    "two launches": (operands(1, 3, 700, 128), {}),
    "two launches that overlap": (operands(*MANY), dict(is_causal=True, return_lse=True)),
    "int8": (operands(1, 3, 700, 128), dict(recipe=fp8attn.PRECISE)),
    "soft cap": (operands(1, 30, 700, 128), dict(softcap=30.0)),
    "soft cap, not fused": (operands(1, 2, 300, 96), dict(softcap=30.0, return_lse=True)),
    "sinks": (operands(1, 2, 300, 128), dict(sinks=torch.zeros(2), is_causal=True)),
    "window": (operands(1, 2, 300, 128), dict(window=(64, 0), is_causal=True)),
    "window and mask, Triton's": (operands(1, 2, 300, 64), dict(softcap=30.0, attn_mask=torch.ones(300, 300, dtype=torch.bool))),
    "mask": (operands(1, 2, 300, 64), dict(attn_mask=torch.ones(300, 300, dtype=torch.bool))),
    "additive mask": (operands(1, 2, 300, 128), dict(attn_mask=torch.zeros(300, 300, dtype=torch.bfloat16))),
    "float32": (operands(1, 2, 300, 128, dtype=torch.float32), {}),
    "odd head dim": (operands(1, 2, 300, 72), {}),
    "two head dims": (operands(1, 2, 300, 192, value_dim=128), {}),
    "f16": (operands(1, 2, 300, 128), dict(recipe=Recipe(compute="f16"))),
    "scales per head": (operands(1, 2, 300, 128), dict(recipe=Recipe(q="head", k="head"))),
    "smoothed queries": (operands(1, 2, 300, 128), dict(recipe=Recipe(smooth_q=True))),
    "shifted rows": (tuple(x[..., 4:] for x in operands(1, 2, 300, 68)), {}),
    "quantized": (quantize_ref.quantize(*operands(1, 2, 300, 128), Recipe()), {}),  # type: ignore[dict-item]
    "quantized keys": ((operands(1, 2, 300, 128)[0], *quantize_ref.quantize(*operands(1, 2, 300, 128), Recipe(qk="int8"))[1:]), {}),  # type: ignore[dict-item]
    "queries beside quantized keys": ((operands(1, 2, 300, 128)[0], *quantize_ref.quantize(*operands(1, 2, 300, 128), Recipe())[1:]), {}),  # type: ignore[dict-item]
    "queries beside quantized keys, sinks": (
        (operands(1, 2, 300, 128)[0], *quantize_ref.quantize(*operands(1, 2, 300, 128), Recipe())[1:]),  # type: ignore[dict-item]
        dict(sinks=torch.zeros(2), return_lse=True),
    ),
    "negative scale": (operands(1, 2, 300, 64), dict(scale=-0.1)),
    "half keys": (operands(1, 2, 500, 64), dict(recipe=Recipe(sinks=128, recent=128), is_causal=True)),
    "only half keys": (operands(1, 2, 100, 64), dict(recipe=Recipe(recent=128), is_causal=True)),
    "pages": (operands(1, 2, 300, 64), dict(recipe=Recipe(statistics="page"), is_causal=True)),
}

LENGTHS = torch.tensor((0, 100, 300), dtype=torch.int32)
PACKED: dict[str, dict[str, Any]] = {
    "e4m3": {},
    "window": dict(window=(64, 0), is_causal=True),
    "soft cap": dict(softcap=30.0, return_lse=True),
    "int8": dict(recipe=fp8attn.PRECISE),
    "scales per key": dict(recipe=Recipe(k="token")),
    "negative scale": dict(scale=-0.1),
}


def plan_or_refusal(explain: Callable[..., Plan], *arguments: Any, **options: Any) -> Plan | str:
    try:
        return explain(*arguments, **options)
    except BackendUnavailable as error:
        return str(error)


def assert_explained(launches: Launches, plan: Plan | str, call: Callable[[], Any]) -> None:
    """That the call launches what the plan says, or is refused in the same words."""
    launches.__init__()  # type: ignore[misc]
    if isinstance(plan, str):
        with pytest.raises(BackendUnavailable) as refused:
            call()
        assert str(refused.value) == plan
        return
    call()
    # of several ranges of rows, the first one's
    assert launches.attention[:1] == ([] if plan.kernel == "half_keys" else [(plan.backend, plan.config)])
    said = "\n".join(plan.because)
    assert launches.overlapped == ("attention begins with heads" in said)
    assert {name for name, words in QUANTIZERS.items() if words in said} == launches.quantizers, plan.because


@pytest.mark.parametrize("backend", ("auto", "cuda", "triton"))
@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_its_plan(name: str, backend: str, launches: Launches) -> None:
    tensors, options = CALLS[name]
    plan = plan_or_refusal(fp8attn.explain, *tensors, **options, backend=backend)
    if name == "pages":
        assert isinstance(plan, Plan) and (plan.config in prefill.INSTANCES) == (backend == "cuda")
        if backend != "cuda":  # Triton's aren't noted, and `auto` has no kernels for tensors on a CPU
            return
    assert_explained(launches, plan, lambda: fp8attn.sdpa(*tensors, **options, backend=backend))


@pytest.mark.parametrize("batch, queries, kernel", ((1, 1, "decode"), (1, 2, "decode"), (1, 150, "prefill"), (0, 1, "none")))
@pytest.mark.usefixtures("launches")
def test_few_queries_of_pages_are_decoded(batch: int, queries: int, kernel: str) -> None:
    q, k, v = operands(batch, 2, 300, 64)
    options: dict[str, Any] = dict(recipe=Recipe(statistics="page"), is_causal=True, causal_alignment="bottom_right", backend="cuda")
    plan = fp8attn.explain(q[:, :, :queries], k, v, **options)
    assert plan.kernel == kernel
    assert any("new tokens are appended by" in reason for reason in plan.because) == (batch > 0)


@pytest.mark.parametrize("backend", ("auto", "cuda", "triton"))
@pytest.mark.parametrize("name", PACKED)
def test_a_packed_call_runs_its_plan(name: str, backend: str, launches: Launches) -> None:
    q, k, v = (x[0].transpose(0, 1) for x in operands(1, 2, 300, 128))
    arguments, options = (q, k, v, LENGTHS, LENGTHS), PACKED[name] | {"backend": backend}
    plan = plan_or_refusal(fp8attn.explain_varlen, *arguments, **options)
    assert_explained(launches, plan, lambda: fp8attn.varlen_sdpa(*arguments, **options))
    groups = {"e4m3": ("plain", False, True), "window": ("window", False, True), "soft cap": ("softcap", False, True), "int8": ("plain", True, True)}
    if name in groups and backend != "triton":
        assert isinstance(plan, Plan) and plan.config in configs.VARLEN_GROUPS[groups[name]]
    else:
        words = plan if isinstance(plan, str) else "\n".join(plan.because)
        assert backend == "triton" or "cuda: packed sequences are given; the CUDA kernel takes them with one scale" in words


@pytest.mark.parametrize("backend", ("auto", "cuda", "triton"))
def test_queries_beside_quantized_keys_are_quantized_where_they_attend(backend: str, launches: Launches) -> None:
    for name in ("queries beside quantized keys", "queries beside quantized keys, sinks"):
        tensors, options = CALLS[name]
        plan = fp8attn.explain(*tensors, **options, backend=backend)
        assert getattr(plan.config, "fuse_q_quant", False) == (backend != "triton") == ("query is quantized where it attends" in plan.because)
    query, key, value = tensors
    plan = fp8attn.explain(query, dataclasses.replace(key, rotated=0), value, backend=backend)  # type: ignore[type-var]
    assert not getattr(plan.config, "fuse_q_quant", False), "the kernel rotates what it quantizes"


def test_a_measured_config_names_its_kernel(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table may prefer Triton's portable kernel on Hopper."""
    portable = triton_kernels.configs.PortableConfig(64, 64, 4, 2)
    monkeypatch.setattr(triton_run.tune, "measured", lambda *_: portable)
    plan = fp8attn.explain(*operands(1, 2, 300, 128), backend="triton")
    assert (plan.kernel, plan.config) == ("portable", portable)


def test_autocast_is_explained(launches: Launches) -> None:
    """float32 is cast before anything is planned."""
    tensors = operands(1, 3, 700, 128, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = fp8attn.explain(*tensors)
        assert_explained(launches, plan, lambda: fp8attn.sdpa(*tensors))
    assert plan.config.fuse_q_quant and not fp8attn.explain(*tensors).config.fuse_q_quant


@pytest.fixture
def paged_launches(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that would be launched on caches, in order."""
    found: list[str] = []

    def noted(name: str, attends: bool = True) -> Callable[..., Any]:
        def launch(*arguments: Any) -> Any:
            found.append(name)
            q = arguments[0] if isinstance(arguments[0], torch.Tensor) else getattr(arguments[0], "q", None)
            return (q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)) if attends and q is not None else None

        return launch

    monkeypatch.setattr(paged_tensors_ops, "device_of", lambda device: H100)
    monkeypatch.setattr(paged_ops, "has_kernels", lambda device: True)
    for name, function in (("decode", "attend_to_pages"), ("prefill", "prefill_from_pages"), ("decode_tensors", "attend_to_tensors")):
        monkeypatch.setattr(cuda_run, function, noted(name))
    monkeypatch.setattr(cuda_run, "append_to_pages", noted("appended by the CUDA kernel", attends=False))
    monkeypatch.setattr(triton_kernels.paged_append, "append", noted("appended by Triton", attends=False))
    monkeypatch.setattr(triton_kernels.paged_attention, "attend", noted("paged"))
    monkeypatch.setattr(triton_kernels.paged_tensors, "append", noted("written by Triton", attends=False))
    monkeypatch.setattr(triton_kernels.paged_tensors, "attend", noted("paged_tensors"))
    return found


def cache_call(kind: str, tokens: int, dtype: torch.dtype = torch.bfloat16, dim: int = 64) -> tuple[torch.Tensor, Any, fp8attn.PagedBatch, Any]:
    """Query, cache, batch and new tokens of two sequences. kind: `KVCache`, `int8`, or the dtype of another engine's."""
    table, lengths = torch.zeros(2, 16, dtype=torch.int32), torch.full((2,), 300, dtype=torch.int32)
    query, key = (torch.zeros(2, heads, tokens, dim, dtype=dtype) for heads in (8, 2))
    batch = fp8attn.PagedBatch(table, lengths)
    if kind in ("KVCache", "int8"):
        recipe = fp8attn.PRECISE if kind == "int8" else Recipe()
        return query, fp8attn.KVCache(2, 8, 2, dim, recipe=recipe, dtype=dtype, device="cpu"), batch, (key, key)
    k = torch.zeros(8, 32, 2, dim).to(torch.float8_e4m3fn if kind == "e4m3" else dtype)
    return query, fp8attn.PagedTensors(k, k, *((1.0, 1.0) if kind == "e4m3" else (None, None))), batch, (key, key)


@pytest.mark.parametrize("backend", ("cuda", "triton"))
@pytest.mark.parametrize(
    "kind, tokens, new, options, said",
    (
        ("KVCache", 1, True, {}, "new tokens are appended by"),
        ("KVCache", 4, False, {"return_lse": True}, "backend="),
        ("KVCache", 200, True, {"window": (50, 0)}, "new tokens are appended by"),
        ("int8", 1, False, {}, "backend="),
        ("e4m3", 1, True, {"softcap": 3.0}, "new tokens are written by Triton"),
        ("bf16", 3, False, {"window": (50, 2)}, "backend="),
    ),
)
def test_what_a_call_on_a_cache_runs(
    kind: str, tokens: int, new: bool, options: dict[str, Any], said: str, backend: str, paged_launches: list[str]
) -> None:  # fmt: skip
    query, cache, batch, pair = cache_call(kind, tokens)
    given = pair if new else None
    plan = fp8attn.explain_paged(query, cache, batch, given, backend=backend, **options)
    assert not paged_launches and plan.backend == backend and any(reason.startswith(said) for reason in plan.because)
    fp8attn.paged_sdpa(query, cache, batch, given, backend=backend, **options)
    attention = {"decode", "prefill", "decode_tensors", "paged", "paged_tensors"}
    assert [name for name in paged_launches if name in attention] == [plan.kernel]
    assert ("int8" in plan.compute) == (kind == "int8") and (plan.config is None) == (backend == "triton")
    for name in set(paged_launches) - attention:
        assert f"new tokens are {name}" in " ".join(plan.because)


@pytest.mark.parametrize("counts, options, few", (((1, 200), {}, 4), ((200, 200), {}, 0), ((1, 200), {"window": (50, 0)}, 4)))
def test_decode_steps_beside_prompts(
    counts: tuple[int, ...], options: dict[str, Any], few: int, paged_launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Two kernels share a packed batch."""
    tables: list[int] = []
    monkeypatch.setattr(triton_kernels.varlen, "table_of_rows", lambda call, rows, few, device: tables.append(few))
    _, cache, batch, _ = cache_call("KVCache", 1)
    q, k = (torch.zeros(sum(counts), heads, 64, dtype=torch.bfloat16) for heads in (8, 2))
    starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
    call = q, cache, dataclasses.replace(batch, cu_seqlens=starts, max_count=max(counts)), (k, k)
    plan = fp8attn.explain_paged(*call, backend="cuda", **options)
    assert plan.kernel == "prefill" and (f"rows of at most {few} packed queries are the decode kernel's" in plan.because) == (few > 0)
    fp8attn.paged_sdpa(*call, backend="cuda", **options)
    attention = [name for name in paged_launches if name in ("decode", "prefill", "paged")]
    assert attention == ["decode"] * (few > 0) + ["prefill"] and tables == [few]


@pytest.mark.parametrize(
    "counts, few, passes", (((1, 200), 2, 1), ((5, 200), 8, 1), ((90, 200), 2, 1), ((200, 200), 0, 1), ((1, 200), 2, 3), (None, 0, 1))
)
@pytest.mark.parametrize("recipe", (None, Recipe(), fp8attn.PRECISE), ids=("e4m3", "half", "half by int8"))
def test_prompts_of_caches_of_other_engines(
    recipe: Recipe | None, counts: tuple[int, ...] | None, few: int, passes: int, paged_launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Rows of many queries are copied, beside rows of few ones, in as many passes as it takes."""

    for module, name, launch in (
        (triton_kernels.paged_copies, "place", lambda *_: paged_launches.append("placed")),
        (triton_kernels.paged_copies, "copy", lambda *_: paged_launches.append("copied")),
        (triton_kernels.paged_copies, "store_lse", lambda *_: paged_launches.append("LSE")),
        (triton_kernels.varlen, "table_of", lambda *_: None),
        (cuda_run, "quantize_any", lambda *_, into: paged_launches.append("quantized")),
        (cuda_run, "quantize_pages", lambda *_: paged_launches.append("pages")),
        (cuda_run, "forward", lambda *_, **results: paged_launches.append("hopper")),
    ):
        monkeypatch.setattr(module, name, launch)
    monkeypatch.setattr(paged_tensors_ops, "device_of", lambda device: dataclasses.replace(H100, sm_count=12))
    monkeypatch.setattr(paged_tensors_ops, "PACKED_ROWS", {True: 384, False: 384})
    query, cache, batch, _ = cache_call("bf16" if recipe else "e4m3", 200)
    cache = dataclasses.replace(cache, recipe=recipe)
    if counts is not None:
        query = torch.zeros(sum(counts), 8, 64, dtype=torch.bfloat16)
        starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
        batch = dataclasses.replace(batch, cu_seqlens=starts, max_count=max(counts))
    if passes > 1:
        monkeypatch.setattr(paged_copies, "MOST_BYTES", 2 * 512 * 2 * 2 * 64 - 1)
        monkeypatch.setattr(paged_copies, "QUERIES_OF_PASS", 1)
    plan = fp8attn.explain_paged(query, cache, batch, backend="cuda")
    compute = "int8 and e4m3" if recipe and recipe.qk == "int8" else "e4m3"
    assert not paged_launches and (plan.backend, plan.kernel, plan.compute) == ("cuda", "hopper", compute)
    assert any("rows are quantized by the cache's recipe" in said for said in plan.because) == (recipe is not None)
    assert (f"rows of at most {few} packed queries are the decode kernel's" in plan.because) == (few > 0)
    assert (f"in {passes} passes" in " ".join(plan.because)) == (passes > 1)
    if counts is None:  # stored as (B, S, Hq, D)
        plan = fp8attn.explain_paged(query.transpose(1, 2).contiguous().transpose(1, 2), cache, batch, backend="cuda")
        assert any("query is copied first" in said for said in plan.because) == (recipe is not None)
    monkeypatch.setattr(paged_tensors_ops, "device_of", lambda device: H100)
    not_copied = fp8attn.explain_paged(query, cache, batch, backend="cuda")
    assert not_copied.kernel == "decode_tensors" and "it takes one for each two SMs" in not_copied.because[-1]
    monkeypatch.setattr(paged_tensors_ops, "device_of", lambda device: dataclasses.replace(H100, sm_count=12))
    fp8attn.paged_sdpa(query, cache, batch, backend="cuda")
    of_pass = ["placed"] + ["copied" if recipe is None else "pages"] + ["hopper"] + ["LSE"] * (counts is None)
    assert paged_launches == ["decode_tensors"] * (few > 0) + ["quantized"] * (recipe is None) + of_pass * passes


def test_why_triton_attends_to_a_cache(paged_launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_ops, "asks_cuda", lambda backend, device: backend in ("auto", "cuda"))
    monkeypatch.setattr(paged_ops, "runs_kernels", lambda backend, device: True)
    for call, options, reason in (
        (cache_call("KVCache", 20, torch.float32), {}, "cuda: query is torch.float32"),
        (cache_call("e4m3", 1, dim=40), {}, "cuda: head dims are [40]"),
        (cache_call("e4m3", 1, torch.float32), {}, "cuda: query is torch.float32"),
    ):
        query, cache, batch, new = call
        plan = fp8attn.explain_paged(query, cache, batch, new, **options)
        assert plan.backend == "triton" and plan.config is None and any(said.startswith(reason) for said in plan.because), plan
    query, cache, batch, _ = cache_call("e4m3", 40)
    of_many = fp8attn.explain_paged(query, cache, batch)
    assert (of_many.backend, of_many.kernel) == ("cuda", "decode_tensors") and of_many.config is not None and of_many.config.rows == 128
    assert any(said.startswith("not as packed sequences: rows of the batch have up to 40 queries") for said in of_many.because)
    of_few = fp8attn.explain_paged(query[:, :, :1], cache, batch)
    assert of_few.config is not None and of_few.config.rows < 64
    query, cache, batch, _ = cache_call("e4m3", 1, dim=40)
    with pytest.raises(BackendUnavailable, match="cuda: head dims are"):
        fp8attn.explain_paged(query, cache, batch, backend="cuda")
    with pytest.raises(TypeError, match="cache is a str"):
        fp8attn.explain_paged(query, "cache", batch)
    with pytest.raises(TypeError, match="unexpected keyword argument 'masks'"):
        fp8attn.explain_paged(query, cache, batch, masks=1)


def test_caches_on_a_cpu_are_modelled() -> None:
    for kind in ("KVCache", "e4m3"):
        query, cache, batch, _ = cache_call(kind, 1)
        assert fp8attn.explain_paged(query, cache, batch).backend == "modelled"
