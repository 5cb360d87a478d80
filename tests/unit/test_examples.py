"""The examples run as a user runs them, on a CPU, and print what they promise."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.anywhere

ROOT = Path(__file__).resolve().parents[2]


def printed(name: str, *options: str) -> str:
    """What an example prints, in small sizes and without Triton's interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, str(ROOT / "examples" / name), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def numbers(text: str, pattern: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


@pytest.mark.parametrize("causal", (False, True))
def test_quickstart(causal: bool) -> None:
    text = printed("quickstart.py", "--device", "cpu", "--length", "192", "--calls", "1", *(["--causal"] if causal else []))
    assert "runs: modelled pipeline, computes in e4m3" in text
    bf16, default, precise = numbers(text, r"relative L2 error of .*: ([\d.]+)")
    assert bf16 < 0.005 < precise < default < 0.06
    assert all(us > 0 for us in numbers(text, r" ([\d.]+) µs"))


def test_prequantized_cache() -> None:
    text = printed("prequantized_cache.py", "--device", "cpu", "--keys", "512", "--steps", "2")
    before, after = numbers(text, r"(\d+) bytes in bf16, \d+ quantized")[0], numbers(text, r"bytes in bf16, (\d+) quantized")[0]
    assert 0.5 < after / before < 0.53, "e4m3 is half of bf16, and scales and means are little beside it"
    errors = numbers(text, r"relative L2 error ([\d.]+)")
    assert len(errors) == 2 and all(0.02 < error < 0.06 for error in errors)
    assert "largest difference between the two: 0.0e+00" in text


def test_engine_steps() -> None:
    text = printed("engine_steps.py", "--device", "cpu", "--prompts", "70", "9", "130", "--chunk", "64", "--steps", "3", "--page", "8")
    assert re.findall(r"new tokens (\[[\d, ]+\])", text) == ["[64, 9, 64]", "[6, 1, 64]", "[1, 1, 2]", "[1, 1, 1]", "[1, 1, 1]"]
    errors = numbers(text, r"relative L2 error ([\d.]+)")
    assert len(errors) == 5 and all(0.02 < error < 0.08 for error in errors)


def test_calibrate_model(tmp_path: Path) -> None:
    file = tmp_path / "model.fp8attn.json"
    text = printed("calibrate_model.py", "--device", "cpu", "--length", "128", "--save", str(file))
    assert "captured: 2 calls of 2 layers recorded" in text
    assert "0: Recipe()\n1: Recipe(qk='int8')\n" in text, "the layer whose queries have means needs a more exact recipe"
    assert file.exists() and "saved and loaded: model.fp8attn.json, 2 layers" in text
    assert "applied: 2 calls of 2 layers by fp8attn" in text
    assert 0 < numbers(text, r"difference of the model's output: ([\d.]+)")[0] < 0.05


WHOLE = {"llm_prefill.py": "transformers", "video_dit.py": "diffusers", "image_dit.py": "diffusers", "encoder.py": "torch"}
"""The examples of whole models, and what they are built from."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if library == "diffusers" else ()) for name, library in WHOLE.items()]
)
@pytest.mark.one_in(2)
def test_whole_models(name: str) -> None:
    """The time of both, and the error of FP8's numerics; the report names calls by fp8attn and none by PyTorch."""
    pytest.importorskip(WHOLE[name], reason=f"needs the package {WHOLE[name]}")
    text = printed(name, "--device", "cpu", "--steps", "2", "--attn", "fp8attn-int8")
    assert all(ms > 0 for ms in numbers(text, r"([\d.]+) ms a step")) and len(numbers(text, r"([\d.]+) ms a step")) == 2
    (error,) = numbers(text, r"relative error of the output beside bf16: ([\d.]+)")
    assert 0 < error < 0.05
    assert re.search(r"^layer +calls +computed by", text, re.MULTILINE) and "fp8attn" in text and "PyTorch" not in text


@pytest.mark.thorough
def test_an_example_with_pytorchs_attention_alone() -> None:
    text = printed("encoder.py", "--device", "cpu", "--steps", "1", "--attn", "sdpa")
    assert text.startswith("sdpa: ") and "relative error" not in text


def test_comfyui_node() -> None:
    """The node copies the model and puts the override into the copy's options; loaded as ComfyUI loads packages."""
    path = ROOT / "examples" / "comfyui_fp8attn" / "__init__.py"
    spec = importlib.util.spec_from_file_location("comfyui_fp8attn", path)
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    node = package.NODE_CLASS_MAPPINGS["Fp8Attention"]
    options = node.INPUT_TYPES()["required"]
    model = SimpleNamespace(model_options={"transformer_options": {"other": 1}})
    model.clone = lambda: SimpleNamespace(model_options={name: dict(value) for name, value in model.model_options.items()})
    (patched,) = getattr(node(), node.FUNCTION)(model, options["recipe"][1]["default"], options["min_keys"][1]["default"])
    override = patched.model_options["transformer_options"].pop("optimized_attention_override")
    assert patched.model_options == model.model_options == {"transformer_options": {"other": 1}}
    q = torch.randn(1, 20, 64)
    assert override(lambda q, k, v, heads, **options: "ComfyUI's", q, q, q, 4) == "ComfyUI's", "20 keys are few"
    assert "fewer than min_keys=2048" in str(override.report)


@pytest.mark.parametrize("name", ("quickstart.py", "prequantized_cache.py", "calibrate_model.py", "encoder.py"))
@pytest.mark.one_in(3)
def test_help(name: str) -> None:
    text = printed(name, "--help")
    assert text.startswith("usage: ") and "--device" in text
