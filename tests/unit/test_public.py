"""The public functions as a user meets them: drawn calls with and without faults, a table of calls that all backends take, the process's settings."""

from __future__ import annotations

import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import GPU
from hypothesis import given, note
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import fp8attn
import fuzz
from fp8attn import Quantized, Recipe, api
from fp8attn.backends import cuda_unavailable
from fp8attn.ops import library_ops
from fp8attn.quantization import dequantize, quantize, quantize_kv, quantize_q

E4M3 = torch.float8_e4m3fn


@given(r=st.randoms(use_true_random=False))
def test_drawn_calls(r: random.Random, device: torch.device) -> None:
    """Right, or refused by an error that names the argument."""
    call = fuzz.draw(r, device)
    note(str(call))
    assert fuzz.check(call, device) is None


@pytest.mark.anywhere
def test_many_drawn_calls_without_the_interpreter() -> None:
    """In a process of its own, as a user has it: nothing but the definition quantizes."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(fp8attn.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).parents[1] / "kit" / "fuzz.py"), "--calls", "300", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "300 calls on cpu" in done.stdout and "0 answered wrongly" in done.stdout


def test_the_fuzz_sees_a_wrong_answer(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """And an error without a name, a fault that is accepted, and a good call that is refused."""
    call = fuzz.Drawn("sdpa", {name: torch.ones(1, 1, 3, 16, device=device) for name in ("query", "key", "value")})
    assert fuzz.check(call, device) is None
    monkeypatch.setattr(fp8attn, "sdpa", lambda query, key, value: value * 2)
    assert "relative error" in (fuzz.check(call, device) or "")
    call.fault = "recipe='fast'"
    assert fuzz.check(call, device) == "accepted a call with a fault"

    def fails(message: str):
        def attention(query, key, value):
            raise ValueError(message)

        return attention

    monkeypatch.setattr(fp8attn, "sdpa", fails("query is wrong"))
    assert fuzz.check(call, device) is None
    call.fault = None
    assert "refused a call without a fault" in (fuzz.check(call, device) or "")
    monkeypatch.setattr(fp8attn, "sdpa", fails("zip() argument 2 is shorter"))
    assert "doesn't name its argument" in (fuzz.check(call, device) or "")


def tensors(seed: int = 0, dim: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, heads, n, dim, generator=generator).bfloat16() for heads, n in ((4, 70), (2, 200), (2, 200)))  # type: ignore[return-value]


def calls() -> dict[str, dict]:
    """Calls that every backend takes, by name: keyword arguments of sdpa."""
    q, k, v = tensors()
    plain = {"query": q, "key": k, "value": v, "enable_gqa": True}
    shown = torch.rand(2, 1, 70, 200, generator=torch.Generator().manual_seed(1)) < 0.7
    one_head = {"query": q[:, :2], "key": k, "value": v}
    found = {
        "plain": plain,
        "causal": plain | {"is_causal": True},
        "bottom right": plain | {"is_causal": True, "causal_alignment": "bottom_right"},
        "upper left bias": plain | {"attn_mask": causal_upper_left(70, 200)},
        "lower right bias": plain | {"attn_mask": causal_lower_right(70, 200)},
        "bool mask": plain | {"attn_mask": shown},
        "float mask": plain | {"attn_mask": torch.where(shown, 0.5, -torch.inf)},
        "half mask": plain | {"attn_mask": torch.where(shown, 0.5, -torch.inf).bfloat16()},
        "mask of keys": plain | {"attn_mask": shown[0, 0, 0]},
        "mask of nothing": plain | {"attn_mask": torch.tensor(False)},
        "mask of one number": plain | {"attn_mask": torch.tensor(0.5)},
        "batch 1 of keys": plain | {"key": k[:1], "value": v[:1]},
        "batch 1 of values": plain | {"value": v[:1]},
        "batch 1 of queries": plain | {"query": q[:1]},
        "one head of keys": {"query": q, "key": k[:, :1], "value": v[:, :1]},
        "one head of values": one_head | {"value": v[:, :1]},
        "one head of queries": one_head | {"query": q[:, :1]},
        "expanded": one_head | {"key": k[:1, :1].expand(2, 2, 200, 64)},
        "scale": plain | {"scale": 0.3},
        "negative scale": plain | {"scale": -0.1},
        "float16": {name: x.half() if isinstance(x, torch.Tensor) else x for name, x in plain.items()},
        "float32": {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in plain.items()},
        "bfloat16 out": {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in plain.items()} | {"out_dtype": torch.bfloat16},
        "recent": plain | {"recipe": Recipe(recent=128), "is_causal": True},
        "sinks": plain | {"recipe": Recipe(sinks=128, qk="int8")},
    }
    for name, recipe in {
        "int8": fp8attn.PRECISE, "not rotated": Recipe(rotate=0), "rotated whole": Recipe(rotate=256), "smoothed": Recipe(smooth_q=True),
        "half products": Recipe(compute="f16"), "per tensor": Recipe(q="tensor", k="tensor", v="tensor", smooth_k=False, smooth_v=False),
    }.items():  # fmt: skip
        found[name] = plain | {"recipe": recipe}
        keys, values = quantize_kv(k, v, recipe)
        found[f"{name}, keys quantized before"] = plain | {"key": keys, "value": values}
        found[f"{name}, query quantized before"] = plain | {"query": quantize_q(q, recipe)}
    found["all quantized before"] = dict(zip(("query", "key", "value"), quantize(q, k, v, Recipe()), strict=True)) | {"enable_gqa": True}
    stored = {"key": (k * 8).to(E4M3), "value": v.to(E4M3), "k_scale": 0.125, "v_scale": torch.ones(2, 2)}
    found["keys of the user's own"] = plain | stored
    found["keys of the user's own, batch 1"] = plain | stored | {"key": stored["key"][:1], "value": stored["value"][:1], "v_scale": torch.ones(1, 2)}
    codes = (k.float() * 30).round().clamp(-127, 127).to(torch.int8)
    found["int8 keys of the user's own"] = plain | stored | {"key": codes, "k_scale": 1 / 30}
    found["all of the user's own"] = plain | stored | {"query": q.to(E4M3), "q_scale": torch.ones(2, 4, 70)}
    return found


def moved(x: object, device: torch.device) -> object:
    if type(x) is torch.Tensor:
        return x.to(device)
    if isinstance(x, Quantized):
        fields = {name: None if (t := getattr(x, name)) is None else t.to(device) for name in ("data", "scale", "mean", "bias")}
        return Quantized(fields["data"], fields["scale"], x.granularity, x.layout, x.length, fields["mean"], x.rotated, fields["bias"])
    return x


CALLS = calls()
INTERPRETED = ("batch 1 of values", "mask of keys", "not rotated, keys quantized before", "int8, query quantized before", "all of the user's own")
"""Calls that Triton's kernels take part in without a GPU, where the interpreter takes seconds for each."""

BACKENDS = ("reference", "modelled", "triton", "cuda", "auto")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.one_in(3)
def test_every_backend_takes_every_call(name: str, device: torch.device) -> None:
    """Of the same shape and dtype, within FP8's rounding of torch's own answer in float64. An LSE is off by no more than half a step of e4m3 of the
    largest score, which is about the largest LSE."""
    arguments = {key: moved(x, device) for key, x in CALLS[name].items()}
    expected, lse, _ = fuzz.expected(fuzz.Drawn("sdpa", arguments))
    backends = [backend for backend in BACKENDS if backend != "cuda" or cuda_unavailable(device) is None]
    if not GPU and name not in INTERPRETED:
        backends.remove("triton")
    for backend in backends:
        try:
            out, out_lse = fp8attn.sdpa(**arguments, backend=backend, return_lse=True)
        except fp8attn.BackendUnavailable:
            assert backend == "cuda"  # which has no kernel for some
            continue
        query = arguments["query"]
        dtype = arguments.get("out_dtype", query.dtype if isinstance(query, torch.Tensor) and query.dtype != E4M3 else torch.bfloat16)
        assert out.dtype == dtype and out.shape == expected.shape and out_lse.shape == lse.shape and out_lse.dtype == torch.float32
        exact = backend == "reference" or (backend == "auto" and not GPU)
        error = float((out.double() - expected).norm() / expected.norm().clamp(min=1e-6))
        assert error < (0.01 if exact else 0.12), backend
        assert torch.equal(out_lse == -torch.inf, lse == -torch.inf)
        seen = lse > -torch.inf
        assert not seen.any() or float((out_lse.double() - lse)[seen].abs().max()) < (0.01 if exact else 2**-5 * lse[seen].abs().max()), backend
        assert fp8attn.explain(**arguments, backend=backend).because


SIZES = [((2, 4), keys) for keys in ((2, 4), (1, 4), (2, 1), (3, 4), (2, 2))] + [((1, 4), (2, 4)), ((2, 1), (2, 4))]


@pytest.mark.parametrize("gqa", (False, True))
@pytest.mark.parametrize("values", (None, (1, 1), (2, 4), (2, 2)))
@pytest.mark.parametrize("queries, keys", SIZES)
def test_sizes_are_taken_as_torch_takes_them(queries: tuple, keys: tuple, values: tuple | None, gqa: bool) -> None:
    """Batch sizes and heads: the same are broadcast, the same refused. But with enable_gqa torch takes no single heads, and other groups of keys than
    of values."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*sizes, n, 16, generator=generator) for sizes, n in ((queries, 5), (keys, 7), (values or keys, 7)))
    if gqa and (k.shape[1] != v.shape[1] or 1 in (q.shape[1], k.shape[1])):
        pytest.skip("with enable_gqa torch differs")
    try:
        expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)
    except RuntimeError:
        with pytest.raises(ValueError, match=r"^(query|key|value) has"):
            fp8attn.reference_sdpa(q, k, v, enable_gqa=gqa)
        return
    torch.testing.assert_close(fp8attn.reference_sdpa(q, k, v, enable_gqa=gqa), expected)


def test_nothing_is_copied_to_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    seen = []
    monkeypatch.setattr(api, "_by_reference", lambda checked, *_: seen.append(checked))
    fp8attn.reference_sdpa(q, k[:1], v[:1, :1], enable_gqa=True)
    assert seen[0].key.shape == seen[0].value.shape == (2, 2, 200, 64)
    assert seen[0].key.data_ptr() == k.data_ptr() and seen[0].value.data_ptr() == v.data_ptr()


STATES = [state for state in dict.fromkeys(fuzz.STATES) if state != "plain" and not state.startswith("autocast")]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("backend", ("reference", "modelled", "auto"))
def test_settings_do_not_reach_the_numerics(state: str, backend: str, device: torch.device) -> None:
    """The same bits as without, of a call and of quantization."""
    if state == "TF32" and not (GPU and backend == "auto"):
        pytest.skip("plain torch multiplies in float64 then, which has other bits: test_float32_products_stay_exact")
    q, k, v = (x.float().to(device) for x in tensors())
    recipe = Recipe(smooth_q=True)
    options = {"enable_gqa": True, "recipe": recipe, "return_lse": True, "backend": backend}
    fields = ("token", "block", "channel", True, True, True, 64, "e4m3")
    quantizer = library_ops.quantize if GPU else library_ops.modelled_quantize
    expected, stored = fp8attn.sdpa(q, k, v, **options), quantizer(q, k, v, *fields)
    with fuzz.state(state, device):
        found, others = fp8attn.sdpa(q, k, v, **options), quantizer(q, k, v, *fields)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    for x, y in zip(others, stored, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x.view(torch.uint8), y.view(torch.uint8), rtol=0, atol=0)


def test_float32_products_stay_exact(device: torch.device) -> None:
    """Where the process allows TF32, or bfloat16 on a CPU, and under autocast."""
    q, k, v = (x.float().to(device) for x in tensors())
    exact = fp8attn.reference_sdpa(q, k, v, enable_gqa=True, dtype=torch.float64, out_dtype=torch.float32)
    for state in ("TF32", "autocast bfloat16", "plain"):
        with fuzz.state(state, device):
            out = fp8attn.reference_sdpa(q, k, v, enable_gqa=True)
            bias = library_ops.score_bias(q, k.to(E4M3), torch.ones(2, 2, 2, device=device), "block")
        assert float((out - exact).norm() / exact.norm()) < 1e-6, state
        wanted = q.double() @ k.to(E4M3).double().repeat_interleave(2, 1).transpose(2, 3)
        assert float((bias.double() - wanted).norm() / wanted.norm()) < 1e-6, state


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast_gives_its_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """As F.scaled_dot_product_attention does, mixed dtypes included; what is asked for by name stays."""
    q, k, v = (x.to(device) for x in tensors())
    mixed = (q, k.float(), v.float())
    with torch.autocast(device.type, dtype=dtype):
        for operands in (mixed, tuple(x.float() for x in mixed)):
            wanted = F.scaled_dot_product_attention(*operands, enable_gqa=True)
            for backend in ("auto", "reference", "modelled"):
                out = fp8attn.sdpa(*operands, enable_gqa=True, backend=backend)
                assert out.dtype == wanted.dtype == dtype
                assert float((out.float() - wanted.float()).norm() / wanted.float().norm()) < 0.1
            assert fp8attn.sdpa(*operands, enable_gqa=True, out_dtype=torch.float32).dtype == torch.float32
        assert torch.is_autocast_enabled(device.type)
    with pytest.raises(TypeError, match=r"key is torch.float32; it must be query's torch.bfloat16"):
        fp8attn.sdpa(*mixed, enable_gqa=True)


def test_says_once_that_a_cpu_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_said", set())
    q, k, v = tensors()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            fp8attn.sdpa(q, k, v, enable_gqa=True, recipe=fp8attn.PRECISE)
        fp8attn.sdpa(q, k, v, enable_gqa=True, backend="modelled")
    words = [str(x.message) for x in said if "fp8attn" in str(x.message)]
    assert len(words) == 1 and "backend='modelled'" in words[0] and "exactly" in words[0]
    assert said[0].filename == __file__


def test_the_model_has_the_numerics_of_fp8() -> None:
    """An error like the kernels', which a recipe changes."""
    q, k, v = tensors(dim=128)
    exact = fp8attn.reference_sdpa(q, k, v, enable_gqa=True, out_dtype=torch.float32)
    errors = {}
    for name, recipe in {"default": Recipe(), "int8": fp8attn.PRECISE}.items():
        out = fp8attn.sdpa(q, k, v, enable_gqa=True, recipe=recipe, backend="modelled", out_dtype=torch.float32)
        errors[name] = float((out - exact).norm() / exact.norm())
    assert 0.04 < errors["default"] < 0.07 and 0.02 < errors["int8"] < 0.045


def test_quantized_tensors_are_compared_by_identity() -> None:
    q, k, v = tensors()
    a, b = quantize_q(q, Recipe()), quantize_q(q, Recipe())
    assert a == a and a != b and len({a, b}) == 2
    assert torch.equal(dequantize(a), dequantize(b))


def test_explain_takes_what_sdpa_takes() -> None:
    q, k, v = tensors()
    with pytest.raises(TypeError, match="is_casual"):
        fp8attn.explain(q, k, v, enable_gqa=True, is_casual=True)
    with pytest.raises(ValueError, match="value has length 3"):
        fp8attn.explain(q, k, v[:, :, :3], enable_gqa=True)
    assert fp8attn.explain(q, k, v, enable_gqa=True, backend="modelled").kernel == "pipeline"
