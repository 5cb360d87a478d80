"""Random calls of the public functions, with and without a fault, compared with torch's own attention in float64.

A call without a fault must return what torch returns, within the backend's rounding, under any settings of the process.
A call with a fault must raise an error that names the argument. Anything else, and above all a crash, is a defect.
`python tests/kit/fuzz.py --calls 2000` runs without pytest, also on a GPU under compute-sanitizer. With
TRITON_INTERPRET=1, Triton's kernels run on a CPU, too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import fp8attn
from fp8attn import Quantized, Recipe
from fp8attn.quantization import dequantize, quantize_kv, quantize_q

E4M3 = torch.float8_e4m3fn
NAMES = (
    *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "causal_alignment", "recipe", "q_scale", "k_scale"),
    *("v_scale", "q", "k", "v", "out_dtype", "return_lse", "backend", "dtype", "window", "softcap", "sinks"),
)
NAMED = re.compile(rf"^({'|'.join(NAMES)})(\.\w+)? ")
"""Matches an error message that names its argument."""

CPU_BACKENDS = ("reference", "modelled", "auto", "modelled", "reference", "triton")
GPU_BACKENDS = ("auto", "cuda", "triton", "auto", "cuda", "modelled", "reference")
RECIPES = (Recipe(), Recipe(), fp8attn.PRECISE, Recipe(rotate=0), Recipe(smooth_q=True), Recipe(k="token", rotate=256), Recipe(compute="f16"))


class Subclass(torch.Tensor):
    pass


@dataclasses.dataclass
class Drawn:
    """A call, its state of the process, and its fault, if it has one."""

    function: str
    arguments: dict[str, Any]
    state: str = "plain"
    fault: str | None = None

    def __str__(self) -> str:
        def shown(x: object) -> str:
            if isinstance(x, torch.Tensor):
                return f"{type(x).__name__}({x.dtype}, {tuple(x.shape) if not x.is_nested else 'nested'}, {x.device.type})"
            return f"Quantized({x.granularity}, {tuple(x.data.shape)})" if isinstance(x, Quantized) else repr(x)

        words = ", ".join(f"{name}={shown(x)}" for name, x in self.arguments.items())
        return f"{self.function}({words}) in {self.state!r}, fault: {self.fault}"


def drawn_call(r: random.Random, device: torch.device) -> Drawn:
    """A random call. This function itself adds no fault."""
    function = r.choice(("sdpa",) * 6 + ("reference_sdpa", "quantize", "import_kv", "explain", "triton_sdpa"))
    generator = torch.Generator().manual_seed(r.randrange(2**31))
    gpu = device.type == "cuda"  # every kind of call is compiled there
    dtype = r.choice((torch.bfloat16, torch.float32) if gpu else (torch.bfloat16, torch.float16, torch.float32))
    batch, kv_heads, group = r.randint(1, 3), r.randint(1, 3), r.choice((1, 1, 2, 3))
    q_length, kv_length = r.choice((1, 70) if gpu else (1, 2, 17, 33, 70)), r.choice((33, 130) if gpu else (1, 3, 33, 64, 130))
    dim, value_dim = 64 if gpu else r.choice((16, 24, 32, 64, 72)), r.choice((64, 64, 24) if gpu else (16, 24, 64))
    shapes = {
        "query": (batch, kv_heads * group, q_length, dim),
        "key": (batch, kv_heads, kv_length, dim),
        "value": (batch, kv_heads, kv_length, value_dim),
    }
    layouts = LAYOUTS if function in ("quantize", "import_kv") else (*LAYOUTS, "batch 1", "heads 1")
    tensors = {name: _laid_out(r.choice(layouts), torch.randn(shape, generator=generator).to(device, dtype)) for name, shape in shapes.items()}
    if function == "quantize":
        return Drawn(function, tensors | {"recipe": r.choice(RECIPES)})
    if function == "import_kv":
        stored = {name: tensors[name].to(E4M3) for name in ("key", "value")}
        return Drawn(function, stored | {"k_scale": _scale(r, stored["key"], False), "v_scale": _scale(r, stored["value"], True)})
    arguments: dict[str, Any] = tensors | {"enable_gqa": group > 1}
    if function in ("sdpa", "explain"):
        arguments["backend"] = r.choice(GPU_BACKENDS if device.type == "cuda" else CPU_BACKENDS)
        if device.type != "cuda" and function == "explain" and arguments["backend"] == "triton":
            arguments["backend"] = "auto"
    if function != "reference_sdpa":
        arguments["recipe"] = r.choice(RECIPES[:5] if gpu else RECIPES)
    kind = r.choice(("none", "none", "causal", "bottom right", "bias", "bool", "float", "row", "one", "finfo.min"))
    full = (max(x.shape[0] for x in tensors.values()), kv_heads * group, q_length, kv_length)
    arguments |= _mask(kind, generator, full, device)
    if r.random() < 0.3:
        arguments["scale"] = r.choice((0.2, np.float32(0.25), 1, -0.1))
    if function != "explain" and r.random() < 0.3:
        arguments["return_lse"] = True
    if r.random() < 0.3:
        arguments["out_dtype"] = r.choice((torch.float32, torch.bfloat16, torch.float16))
    if r.random() < 0.4:
        _quantized(r, arguments)
    return Drawn(function, arguments)


LAYOUTS = ("contiguous", "bshd", "padded", "parameter")


def _laid_out(kind: str, x: torch.Tensor) -> torch.Tensor:
    """The same numbers in a layout that models use; or a part of them, for all batch entries or heads."""
    if kind == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "padded":
        return F.pad(x, (0, 8, 0, 3))[:, :, : x.shape[2], : x.shape[3]]
    if kind == "batch 1":
        return x[:1]
    if kind == "heads 1":
        return x[:, :1].expand(x.shape)
    return torch.nn.Parameter(x, requires_grad=False) if kind == "parameter" else x


def _scale(r: random.Random, x: torch.Tensor, for_values: bool) -> object:
    batch, heads, length, dim = x.shape
    rows = [(batch, heads, dim)] if for_values else [(batch, heads, length), (batch, heads, -(-length // 128))]
    shape = r.choice([None, (1,), (batch, heads), *rows])
    return r.choice((0.5, 2, np.float32(0.75))) if shape is None else torch.full(shape, 0.5, device=x.device)


def _mask(kind: str, generator: torch.Generator, full: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    batch, heads, q_length, kv_length = full
    if kind == "none":
        return {}
    if kind in ("causal", "bottom right"):
        return {"is_causal": True} if kind == "causal" else {"is_causal": True, "causal_alignment": "bottom_right"}
    if kind == "bias":
        return {"attn_mask": (causal_upper_left if batch % 2 else causal_lower_right)(q_length, kv_length)}
    shown = torch.rand((batch, 1, q_length, kv_length), generator=generator) < 0.7
    if kind == "bool":
        return {"attn_mask": shown.to(device)}
    if kind == "row":
        return {"attn_mask": torch.randn(kv_length, generator=generator).to(device)}
    if kind == "one":
        return {"attn_mask": torch.tensor(True, device=device)}
    lowest = torch.finfo(torch.float32).min if kind == "finfo.min" else -torch.inf
    return {"attn_mask": torch.randn(shown.shape, generator=generator).masked_fill(~shown, lowest).to(device)}


def _quantized(r: random.Random, arguments: dict[str, Any]) -> None:
    """Quantize operands before the call, with fp8attn or as users do."""
    q, k, v = (arguments[name] for name in ("query", "key", "value"))
    kind = r.choice(("kv", "kv", "q", "user's kv", "user's"))
    recipe = arguments.get("recipe", Recipe())
    recipe = dataclasses.replace(recipe, smooth_q=False) if recipe.smooth_q else recipe
    if "user" in kind:
        arguments["key"], arguments["value"] = k.to(E4M3), v.to(E4M3)
        arguments["k_scale"], arguments["v_scale"] = _scale(r, k, False), _scale(r, v, True)
        if kind == "user's":
            arguments["query"], arguments["q_scale"] = q.to(E4M3), _scale(r, q, False)
    elif kind == "q" and q.shape[0] == max(x.shape[0] for x in (q, k, v)):
        arguments["query"] = quantize_q(q, recipe)
    elif kind == "kv" and k.shape[:2] == v.shape[:2] and k.shape[0] >= q.shape[0]:
        arguments["key"], arguments["value"] = quantize_kv(k, v, recipe)


Fault = Callable[[random.Random, Drawn], None]


def _change_size(r: random.Random, call: Drawn) -> None:
    name, axis = r.choice(("query", "key", "value")), r.randrange(4)
    x = call.arguments.get(name)
    if not isinstance(x, torch.Tensor):
        return
    shape = list(x.shape)
    shape[axis] = max(shape[axis] + r.choice((-1, 1, 2, 8)), 0)
    call.arguments[name] = torch.ones(shape, device=x.device).to(x.dtype)
    call.fault = f"size {axis} of {name}"


def _change_tensor(r: random.Random, call: Drawn) -> None:
    name = r.choice([name for name, x in call.arguments.items() if isinstance(x, torch.Tensor)] or ["query"])
    x = call.arguments.get(name)
    if not isinstance(x, torch.Tensor) or type(x) not in (torch.Tensor, torch.nn.Parameter):
        return
    dtypes = (torch.float64, torch.int32, torch.complex64)
    kinds: dict[str, Callable[[], object]] = {
        "dtype": lambda: x.to(r.choice(dtypes)),
        "subclass": lambda: x.detach().as_subclass(Subclass),
        "device": lambda: x.to("meta"),
        "list": lambda: [1.0],
        "grad": lambda: x.detach().float().requires_grad_() if name.endswith("scale") else x.detach().clone().requires_grad_(),
        "sparse": lambda: x.float().to_sparse(),
        "rank": lambda: x[None, None] if x.dim() >= 3 else x.expand(1, 1, 1, 1, 1, *x.shape),
        "strides": lambda: x.repeat_interleave(2, -1)[..., ::2],
    }
    kind = r.choice(list(kinds))
    if kind == "strides" and (name not in ("query", "key", "value") or x.shape[-1] == 1):
        return
    if (kind in ("grad", "sparse") and not x.is_floating_point()) or (kind == "sparse" and x.dtype == E4M3):
        return
    if (kind == "grad" and x.dtype == E4M3) or (kind == "rank" and name.endswith("scale") and x.numel() == 1):
        return
    call.arguments[name] = kinds[kind]()
    call.fault = f"{kind} of {name}"


def _change_option(r: random.Random, call: Drawn) -> None:
    if call.function in ("quantize", "import_kv"):
        name, value = ("recipe", "fast") if call.function == "quantize" else ("k_scale", r.choice((None, "1", torch.ones(7), True)))
    else:
        options: list[tuple[str, Any]] = [
            ("scale", float("nan")), ("scale", "1"), ("dropout_p", 0.1), ("is_causal", 1), ("enable_gqa", None), ("out_dtype", torch.int8),
            ("causal_alignment", "left"), ("attn_mask", [1.0]), ("return_lse", 2), ("q_scale", "x"), ("k_scale", torch.ones(7)), ("v_scale", None),
        ]  # fmt: skip
        options += [("recipe", None)] if call.function != "reference_sdpa" else []
        options += [("backend", "metal")] if call.function in ("sdpa", "explain") else []
        name, value = r.choice(options)
        if name == "v_scale" and "v_scale" not in call.arguments:
            return
    call.arguments[name] = value
    call.fault = f"{name}={value!r}"


def _change_quantized(r: random.Random, call: Drawn) -> None:
    names = [name for name in ("query", "key", "value") if isinstance(call.arguments.get(name), Quantized)]
    if not names:
        return
    name = r.choice(names)
    x: Quantized = call.arguments[name]
    field, value = r.choice(
        (
            ("scale", x.scale[..., :0]), ("scale", x.scale.double()), ("data", x.data[:, :, :, :-8]), ("length", x.length + 200), ("rotated", 128),
            ("granularity", "row"), ("data", x.data[0]), ("scale", x.scale.detach().clone().requires_grad_()), ("data", x.data.float()),
            ("layout", "values" if x.layout == "rows" else "rows"), ("mean", torch.zeros(1, 2, 3)),
        )
    )  # fmt: skip
    if field == "data" and value.dim() == 4 and value.dtype == x.data.dtype and x.layout == "rows":
        return  # a smaller head dim, which the other operand may have, too
    call.arguments[name] = dataclasses.replace(x, **{field: value})
    call.fault = f"{'grad of ' if isinstance(value, torch.Tensor) and value.requires_grad else ''}{name}.{field}"


FAULTS: tuple[Fault, ...] = (_change_size, _change_tensor, _change_tensor, _change_option, _change_quantized)

STATES = (
    "plain",
    "plain",
    "autocast bfloat16",
    "autocast float16",
    "float64 by default",
    "meta by default",
    "deterministic",
    "TF32",
    "inference",
    "no grad",
)


@contextlib.contextmanager
def state(name: str, device: torch.device) -> Iterator[None]:
    """Settings of the process that a user may have made."""
    with contextlib.ExitStack() as stack:
        if name.startswith("autocast"):
            stack.enter_context(torch.autocast(device.type, dtype=getattr(torch, name.split()[1])))
        elif name == "float64 by default":
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        elif name == "meta by default":
            stack.enter_context(torch.device("meta"))
        elif name == "deterministic":
            stack.callback(torch.use_deterministic_algorithms, False)
            torch.use_deterministic_algorithms(True, warn_only=device.type == "cuda")
        elif name == "TF32":
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("medium")
        elif name in ("inference", "no grad"):
            stack.enter_context(torch.inference_mode() if name == "inference" else torch.no_grad())
        yield


def restored(x: object, scale: object = None) -> torch.Tensor:
    """The numbers of an operand, float64 (B, H, S, D), in the basis in which it is stored."""
    if isinstance(x, Quantized):
        return dequantize(x).double()
    assert isinstance(x, torch.Tensor)
    if scale is None:
        return x.detach().double()
    scale = torch.as_tensor(scale, dtype=torch.float64, device=x.device)
    if scale.numel() == 1:
        return x.double() * scale.reshape(())
    scale = scale if scale.dim() == 3 else scale.unsqueeze(-1)
    if scale.shape[-1] == x.shape[3] and scale.shape[-1] != x.shape[2]:
        return x.double() * scale.unsqueeze(-2)
    rows = scale.shape[-1]
    return x.double() * (scale if rows in (1, x.shape[2]) else scale.repeat_interleave(128, -1)[..., : x.shape[2]]).unsqueeze(-1)


def expected(call: Drawn) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Output and LSE in float64, and the largest magnitude of a score.

    Raises:
        RuntimeError, ValueError: torch doesn't take the call.
    """
    a = call.arguments
    q, k, v = (restored(a[name], a.get(f"{name[0]}_scale")) for name in ("query", "key", "value"))
    # if only one of query and key is rotated, rotate the other by the definition
    for mine, other in (("query", "key"), ("key", "query")):
        if isinstance(a[mine], Quantized) and a[mine].rotated and not isinstance(a[other], Quantized):
            part = a[mine].rotated
            x = fp8attn.rotation.rotate((k if other == "key" else q).float(), part).double()
            q, k = (q, x) if other == "key" else (x * part, k)
    mask, causal = a.get("attn_mask"), a.get("is_causal", False)
    q_length, kv_length = q.shape[2], k.shape[2]
    if mask is not None and type(mask) is not torch.Tensor:
        mask = mask._materialize(q.device)
        mask = torch.where(mask, 0.0, -torch.inf).double() if mask.dtype == torch.bool else mask.double()
    elif mask is not None:
        mask = mask.reshape((1,) * (2 - mask.dim()) + tuple(mask.shape)) if mask.dim() < 2 else mask
        mask = (
            torch.zeros(mask.shape, dtype=torch.float64, device=mask.device).masked_fill(~mask, -torch.inf)
            if mask.dtype == torch.bool
            else mask.double()
        )
    if causal:
        offset = kv_length - q_length if a.get("causal_alignment") == "bottom_right" else 0
        seen = torch.ones(q_length, kv_length, dtype=torch.bool, device=q.device).tril(offset)
        mask = torch.zeros(q_length, kv_length, dtype=torch.float64, device=q.device).masked_fill(~seen, -torch.inf)
    scale = float(a["scale"]) if a.get("scale") is not None else q.shape[3] ** -0.5
    if a.get("enable_gqa"):
        heads = torch.broadcast_shapes((k.shape[1],), (v.shape[1],))[0]
        if heads > 1 and q.shape[1] % heads == 0:
            k, v = (x.expand(-1, heads, -1, -1).repeat_interleave(q.shape[1] // heads, 1) for x in (k, v))
    batch = torch.broadcast_shapes((q.shape[0],), (k.shape[0],), (v.shape[0],))[0]
    q = q.expand(batch, *q.shape[1:])  # torch broadcasts a mask to q, not to k
    F.scaled_dot_product_attention(q, k, v, mask, scale=scale)  # whether torch takes it
    scores = q @ k.transpose(-2, -1) * scale
    scores = scores if mask is None else scores + mask
    lse = scores.logsumexp(-1) if kv_length else scores.new_full(scores.shape[:-1], -torch.inf)
    out = scores.softmax(-1).nan_to_num(nan=0.0) @ v
    largest = scores.masked_fill(scores < -1e6, 0.0).abs().amax() if scores.numel() else scores.new_zeros(())
    return out, lse.expand(out.shape[:3]), float(largest)


def tolerance(call: Drawn) -> float:
    """Largest relative L2 error.

    Up to 0.25: the rounding of FP8 in each operand and in P, with few keys. 0.02: the output's bfloat16 rounding.
    """
    exact = call.function == "reference_sdpa" or call.arguments.get("backend") in ("reference",)
    exact = exact or (call.arguments.get("backend") == "auto" and call.arguments["value"].device.type == "cpu")
    return 0.02 if exact else 0.25


def check(call: Drawn, device: torch.device) -> str | None:
    """What is wrong with fp8attn's answer to a call, or None."""
    function = getattr(fp8attn, call.function)
    grad = not call.state.startswith(("inference", "no grad"))
    if call.fault is not None and call.fault.startswith("grad") and not grad:
        call.fault = None
    if call.fault is not None and call.fault.startswith("strides") and call.state.startswith("autocast"):
        return None  # autocast may copy to a tensor with a unit stride
    try:
        with state(call.state, device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(**call.arguments)
            times = 2 if device.type == "cuda" and call.fault is None and call.function.endswith("sdpa") else 0
            again = [function(**call.arguments) for _ in range(times)]  # the last of which is repeated from a plan
    except (TypeError, ValueError, RuntimeError) as error:
        if not NAMED.match(str(error)) and not isinstance(error, fp8attn.BackendUnavailable):
            return f"{type(error).__name__} doesn't name its argument: {error}"
        if call.fault is None and not isinstance(error, fp8attn.BackendUnavailable):
            return f"refused a call without a fault: {error}"
        return None
    if call.fault is not None and not call.fault.startswith("size"):
        return "accepted a call with a fault"
    if not all(_have_same_bits(result, other) for other in again):
        return "gave other bits when it was called again"
    if call.function in ("quantize", "import_kv", "explain"):
        return _check_others(call, result)
    try:
        out, lse, largest = expected(call)
    except (RuntimeError, ValueError, IndexError) as error:
        return f"accepted what torch refuses: {error}"
    return _compare(call, result, out, lse, largest)


def _have_same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_have_same_bits, a, b))
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _compare(call: Drawn, result: Any, out: torch.Tensor, lse: torch.Tensor, largest: float) -> str | None:
    actual, actual_lse = result if call.arguments.get("return_lse") else (result, None)
    wanted = call.arguments.get("out_dtype")
    if wanted is None and call.state.startswith("autocast") and call.function != "reference_sdpa":
        wanted = getattr(torch, call.state.split()[1])
    query = call.arguments["query"]
    if wanted is None:
        wanted = query.dtype if isinstance(query, torch.Tensor) and query.dtype != E4M3 else torch.bfloat16
    if actual.dtype != wanted or actual.shape != out.shape:
        return f"gave {actual.dtype} {tuple(actual.shape)}; it must be {wanted} {tuple(out.shape)}"
    error = float((actual.double() - out).norm() / out.norm().clamp(min=1e-30)) if out.numel() else 0.0
    if not error <= tolerance(call):
        return f"relative error {error:.3g}, at most {tolerance(call)}"
    if actual_lse is not None and lse.numel():
        if not torch.equal(actual_lse == -torch.inf, lse == -torch.inf):
            return "LSE is -inf for other rows"
        finite = lse.isfinite() & (lse.abs() < 1e6)
        worst = float((actual_lse.double() - lse)[finite].abs().max()) if finite.any() else 0.0
        if not worst <= tolerance(call) * max(largest, 1.0) / 2:
            return f"LSE is off by {worst:.3g}, of scores up to {largest:.3g}"
    return None


def _check_others(call: Drawn, result: Any) -> str | None:
    a = call.arguments
    if call.function == "explain":
        return None if isinstance(result, fp8attn.Plan) and result.because else "explain gave no plan"
    names = ("query", "key", "value") if call.function == "quantize" else ("key", "value")
    for name, x in zip(names, result, strict=True):
        wanted = restored(a[name], a.get(f"{name[0]}_scale"))
        if x.shape != wanted.shape:
            return f"{name} has shape {tuple(x.shape)}; it must be {tuple(wanted.shape)}"
        actual = dequantize(x).double()
        if x.rotated:
            part = x.rotated * (x.rotated if name == "query" else 1)
            actual = fp8attn.rotation.rotate(actual.float(), x.rotated).double()  # signs and butterflies, undone below
            wanted = fp8attn.rotation.rotate(fp8attn.rotation.rotate(wanted.float(), x.rotated), x.rotated).double() * (part / x.rotated)
        error = float((actual - wanted).norm() / wanted.norm().clamp(min=1e-30)) if wanted.numel() else 0.0
        if not error <= 0.06:
            return f"{name} is off by {error:.3g}"
    return None


def draw(r: random.Random, device: torch.device) -> Drawn:
    """A random call. Half of all calls have a fault."""
    call = drawn_call(r, device)
    call.state = r.choice(STATES)
    if call.state == "meta by default":
        bias = call.arguments.get("attn_mask")
        if bias is not None and type(bias) is not torch.Tensor:
            call.state = "plain"
    if r.random() < 0.5:
        r.choice(FAULTS)(r, call)
    return call


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="0/1", help="I/N: every N-th call, from the I-th on, of several processes")
    words = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    counts = {"answered": 0, "refused": 0}
    wrong = 0
    part, parts = (int(x) for x in words.part.split("/"))
    for i in range(part, words.calls, parts):
        call = draw(random.Random(f"{words.seed}/{i}"), device)
        said = check(call, device)
        counts["answered" if call.fault is None else "refused"] += 1
        if i // parts % 10 == 0:
            print(f"{i} of {words.calls}", file=sys.stderr, flush=True)
        if said is not None:
            wrong += 1
            print(f"{i}: {call}\n    {said}", flush=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(f"{sum(counts.values())} calls on {device}: {counts['answered']} without a fault, {counts['refused']} with one, {wrong} answered wrongly")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
