"""What Triton's kernels are compiled for: few of the properties of strides, and never one that the strides of a call lack."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

import fp8attn
from fp8attn.device import INTERPRETING, device_of
from fp8attn.recipe import Recipe
from fp8attn.triton import launch
from fp8attn.triton import quantize as triton_quantize

strides = st.one_of(st.integers(0, 40), st.sampled_from((16, 64, 128, 4096, 2**31 - 1, 2**31, 2**31 + 16, 2**40)))
tuples = st.one_of(st.tuples(strides, strides, strides), st.tuples(strides, strides, strides, strides))


def key_of(*arguments: object) -> list:
    found: list = []
    launch.specialize(arguments, found)
    return found


@given(actual=tuples)
def test_what_a_kernel_is_compiled_for_holds_for_the_call(actual: tuple[int, ...]) -> None:
    assumed = launch.representative(actual)
    assert len(assumed) == len(actual) and key_of(assumed) == key_of(actual)
    for supposed, stride in zip(assumed, actual, strict=True):
        assert supposed % 16 or not stride % 16
        assert supposed != 1 or stride == 1
        assert supposed >= 2**31 or stride < 2**31


@given(first=tuples, second=tuples)
def test_strides_with_one_key_share_a_kernel(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    assert (key_of(first) == key_of(second)) == (launch.representative(first) == launch.representative(second))


def test_other_arguments_are_compiled_for_as_they_are() -> None:
    x = torch.ones(3)
    assert launch.representative((x, None, (1, 577, 1))) == (x, None, (17, 17, 1))
    assert launch.representative(577) == 577


@pytest.mark.parametrize("dim", (64, 72))
def test_a_length_changes_no_key(dim: int) -> None:
    """Of tensors (B, H, S, D), contiguous, and of their scales; where rows of 72 elements start at no multiple of 16, too."""
    keys = []
    for batch, heads, length in ((1, 24, 4608), (2, 12, 577), (3, 5, 1), (1, 16, 100)):
        x = torch.empty(batch, heads, length, dim, device="meta")
        scale = torch.empty(batch, heads, length, device="meta")
        keys.append(key_of(x.stride(), scale.stride()))
    assert all(key == keys[0] for key in keys)


@pytest.mark.gpu
def test_a_length_compiles_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first."""
    compiled: list[str] = []
    compiled_for = launch.compiled_for
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "compiled_for", lambda kernel, *others: (compiled.append(kernel.fn.__name__), compiled_for(kernel, *others))[1])
    for length in (600, 577, 1000):
        q, k, v = (torch.randn(1, 2, length, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
        triton_quantize.quantize(q, k, v, Recipe(), device_of(device))
    assert compiled == ["fused_small_kernel"]


def test_a_page_table_compiles_nothing() -> None:
    """Batches have page tables of other widths, and so other strides of rows."""
    found = []
    for path in sorted(Path(launch.__file__).parent.glob("paged_*.py")):
        for kernel in ast.walk(ast.parse(path.read_text())):
            if not isinstance(kernel, ast.FunctionDef) or not kernel.name.endswith("_kernel"):
                continue
            for name in {"table_stride", "table_width"} & {x.arg for x in kernel.args.args}:
                (decorator,) = kernel.decorator_list
                found.append(kernel.name)
                assert isinstance(decorator, ast.Call) and name in ast.literal_eval(decorator.keywords[0].value), f"{found[-1]}: {name}"
    assert len(found) == 10


def test_triton_interprets_where_fp8attn_says_so() -> None:
    assert triton.knobs.runtime.interpret == INTERPRETING


def test_triton_is_imported_when_it_is_used() -> None:
    """Its import takes longer than that of the rest."""
    program = "import sys, fp8attn; assert 'triton' not in sys.modules; fp8attn.triton.quantize; assert 'triton' in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("missing, message", (("triton", "Triton isn't installed"), ("numpy", "NumPy isn't installed")))
def test_what_triton_needs_is_named(missing: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ImportError, match=message):
        fp8attn.triton.__getattr__("quantize")
    with pytest.raises(AttributeError, match="has no attribute 'fast'"):
        _ = fp8attn.triton.fast
