"""Times whole models of real sizes, with random weights: attention by PyTorch, by fp8attn, and by other libraries."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import importlib
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8attn
from fp8attn import PRECISE, Recipe
from fp8attn.calibration.interception import intercepted
from fp8attn.validate import Arguments

from . import adapters, command_line, report
from .cases import SEED
from .command_line import UsageError, at_least, input_file, more_than_zero
from .machine import machine
from .plot import BLUE, GREY, VERMILLION, legend_below, load_pyplot, results_of, save
from .progress import Tick, no_tick
from .sheet import Sheet
from .timing import in_turn

HELP = "whole models of real sizes: milliseconds a forward, speed beside PyTorch's attention, and the error of the output"

Inputs = dict[str, Any]
"""Keyword arguments of a model's forward."""


@dataclass(frozen=True)
class Size:
    """The sizes of a model. `tiny` are those for a CPU.

    Attributes:
        layers: of each kind of layer, for models with several kinds.
        length: tokens, or rows and columns of latents.
    """

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    length: tuple[int, ...]
    kv_heads: int = 0
    width: int = 0
    batch: int = 1

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


Build = Callable[[Any, Size], nn.Module]
"""Builds a model of a library's module, on the default device, in the default dtype."""

Draw = Callable[[Size, nn.Module], Inputs]
"""Draws its inputs, likewise."""


@dataclass(frozen=True)
class Case:
    """A model and its inputs.

    Attributes:
        library: what it is built from, `diffusers` or `transformers`.
    """

    name: str
    library: str
    build: Build
    draw: Draw
    size: Size
    tiny: Size

    @property
    def lacking(self) -> str | None:
        """What is missing to build the model, or None."""
        return None if importlib.util.find_spec(self.library) else f"the package {self.library}"


def wan(diffusers: Any, size: Size) -> nn.Module:
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=size.heads, attention_head_dim=size.head_dim, in_channels=16, out_channels=16,
        text_dim=size.width // 2, freq_dim=256, ffn_dim=size.width, num_layers=size.layers[0], cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=1024,
    )  # fmt: skip


def wan_inputs(size: Size, model: nn.Module) -> Inputs:
    """Latents of a video, and 512 tokens of text."""
    text = torch.randn(size.batch, 512, size.width // 2)
    latents = torch.randn(size.batch, 16, *size.length)
    return {"hidden_states": latents, "timestep": torch.tensor([500]), "encoder_hidden_states": text}


def flux(diffusers: Any, size: Size) -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=size.layers[0], num_single_layers=size.layers[1], attention_head_dim=size.head_dim,
        num_attention_heads=size.heads, joint_attention_dim=size.width, pooled_projection_dim=768,
        axes_dims_rope=(size.head_dim // 4, size.head_dim * 3 // 8, size.head_dim * 3 // 8),
    )  # fmt: skip


def flux_inputs(size: Size, model: nn.Module) -> Inputs:
    """A packed image, and 512 tokens of text."""
    rows, columns = size.length
    text, ids = torch.randn(size.batch, 512, size.width), torch.zeros(rows, columns, 3)
    ids[..., 1], ids[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)
    return {
        "hidden_states": torch.randn(size.batch, rows * columns, 64),
        "encoder_hidden_states": text,
        "pooled_projections": torch.randn(size.batch, 768),
        "timestep": torch.tensor([0.5]),
        "img_ids": ids.flatten(0, 1),
        "txt_ids": torch.zeros(512, 3),
    }


def sd3(diffusers: Any, size: Size) -> nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=size.length[0], patch_size=2, in_channels=16, out_channels=16, num_layers=size.layers[0], attention_head_dim=size.head_dim,
        num_attention_heads=size.heads, joint_attention_dim=size.width, caption_projection_dim=size.hidden, pooled_projection_dim=2048,
        pos_embed_max_size=size.length[0], qk_norm="rms_norm",
    )  # fmt: skip


def sd3_inputs(size: Size, model: nn.Module) -> Inputs:
    """Latents of an image, and 333 tokens of text."""
    text = torch.randn(size.batch, 333, size.width)
    latents = torch.randn(size.batch, 16, *size.length)
    pooled = torch.randn(size.batch, 2048)
    return {"hidden_states": latents, "encoder_hidden_states": text, "pooled_projections": pooled, "timestep": torch.tensor([500.0])}


def _decoder(kind: str) -> Build:
    """A language model without its head."""

    def build(transformers: Any, size: Size) -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=32000, hidden_size=size.width, intermediate_size=7 * size.width // 2 if kind == "Llama" else 8 * size.width,
            num_hidden_layers=size.layers[0], num_attention_heads=size.heads, num_key_value_heads=size.kv_heads, head_dim=size.head_dim,
            max_position_embeddings=size.length[0],
        )  # fmt: skip
        return getattr(transformers, f"{kind}Model")(config)

    return build


def tokens(size: Size, model: nn.Module) -> Inputs:
    return {"input_ids": torch.randint(3, 32000, (size.batch, size.length[0])), "use_cache": False}


def vit(transformers: Any, size: Size) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=size.hidden, num_hidden_layers=size.layers[0], num_attention_heads=size.heads, intermediate_size=4 * size.hidden,
        image_size=size.length[0], patch_size=16,
    )  # fmt: skip
    return transformers.ViTModel(config, add_pooling_layer=False)


def images(size: Size, model: nn.Module) -> Inputs:
    return {"pixel_values": torch.randn(size.batch, 3, size.length[0], size.length[0])}


SHORT = Size((1,), 2, 64, (160,), kv_heads=1, width=128)

CASES = (
    Case("Wan-1.3B 32760", "diffusers", wan, wan_inputs, Size((30,), 12, 128, (21, 60, 104), width=8960), Size((1,), 2, 32, (2, 8, 8), width=64)),
    Case("Flux 4608", "diffusers", flux, flux_inputs, Size((19, 38), 24, 128, (64, 64), width=4096), Size((1, 1), 2, 32, (4, 8), width=32)),
    Case("SD3.5 4429", "diffusers", sd3, sd3_inputs, Size((38,), 38, 64, (128, 128), width=4096), Size((1,), 2, 32, (8, 8), width=32)),
    Case("Llama-8B 8k", "transformers", _decoder("Llama"), tokens, Size((32,), 32, 128, (8192,), 8, 4096), SHORT),
    Case("Llama-8B 32k", "transformers", _decoder("Llama"), tokens, Size((32,), 32, 128, (32768,), 8, 4096), SHORT),
    Case("Gemma-7B 8k D256", "transformers", _decoder("Gemma"), tokens, Size((28,), 16, 256, (8192,), 16, 3072), SHORT),
    Case("ViT-L 577", "transformers", vit, images, Size((24,), 16, 64, (384,), batch=8), Size((1,), 2, 32, (64,), batch=2)),
)
"""Models of published sizes. Wan's and Flux's queries and keys are normalized by RMS, Llama's are of standard deviation
1.3 by the initial weights: scores are as large as trained models have."""

EXACT = "exact attention"
SDPA = "SDPA"
NOTHING = "no attention"

Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float | None], torch.Tensor]
"""Attention of q (B, Hq, Sq, D), k and v (B, Hkv, Sk, D), perhaps causal, with a scale or the default one."""


def by_sage(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None) -> torch.Tensor:
    """SageAttention, as its users call it."""
    return importlib.import_module("sageattention").sageattn(q, k, v, tensor_layout="HND", is_causal=causal, sm_scale=scale)


def by_fa3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None) -> torch.Tensor:
    """FlashAttention-3 in bfloat16."""
    out = adapters.flash3().flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), softmax_scale=scale, causal=causal)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def by_nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None) -> torch.Tensor:
    """Something of the answer's shape that costs nothing."""
    return q[..., : v.shape[3]]


class _By:
    """A handler of calls of attention: those without a mask go to a function."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def attention(self, layer: str, a: Arguments, original: Callable[[], torch.Tensor]) -> torch.Tensor:
        query, key, value = a.query, a.key, a.value
        assert isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
        return original() if a.attn_mask is not None else self.function(query, key, value, a.is_causal, a.scale)

    def unseen(self, layer: str, reason: str) -> None:
        pass


@dataclass(frozen=True)
class Row:
    """A way to compute a model's attention.

    Attributes:
        switch: a context in which a model's attention is computed so.
        around: a context around each forward.
        modules: of another library, one of which must be installed.
        backend: a backend of PyTorch, among which the fastest is what others are compared with.
    """

    name: str
    switch: Callable[[nn.Module], contextlib.AbstractContextManager]
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    modules: tuple[str, ...] = ()
    backend: bool = False

    @property
    def lacking(self) -> str | None:
        """What is missing, or None."""
        return None if not self.modules or adapters.installed(self.modules) else f"the package {' or '.join(self.modules)}"


def _unchanged(model: nn.Module) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


def _registered(name: str, recipe: Recipe) -> Callable[[nn.Module], contextlib.AbstractContextManager]:
    """As the model's library switches it: by a name that fp8attn registers with it."""

    @contextlib.contextmanager
    def switch(model: nn.Module) -> Iterator[object]:
        on_cpu = next(model.parameters()).device.type == "cpu"
        options: dict[str, Any] = {"min_keys": 0, "backend": "modelled"} if on_cpu else {}
        any_model: Any = model
        if hasattr(model, "set_attn_implementation"):  # of transformers
            report = fp8attn.integrations.transformers.register(name, recipe, **options)
            any_model.set_attn_implementation(name)
            yield report
        elif not is_dispatched(model):
            with fp8attn.patch(model, recipe, **options) as report:
                yield report
        else:
            report = fp8attn.integrations.diffusers.register(name, recipe, **options)
            any_model.set_attention_backend(name)
            try:
                yield report
            finally:
                any_model.set_attention_backend(NATIVE)

    return switch


NATIVE = "native"
"""diffusers' name of F.scaled_dot_product_attention."""


def is_dispatched(model: nn.Module) -> bool:
    """Whether diffusers' attention backends reach a model. Processors such as SD3's call F.scaled_dot_product_attention
    themselves."""
    return any(hasattr(getattr(module, "processor", None), "_attention_backend") for module in model.modules())


def _by(function: Function) -> Callable[[nn.Module], contextlib.AbstractContextManager]:
    return lambda model: intercepted(model, _By(function), traceable=True, names_in_graphs=False)


def _first(backend: SDPBackend) -> Callable[[], contextlib.AbstractContextManager]:
    """A context in which PyTorch prefers a backend. What that doesn't take goes to others."""
    return lambda: sdpa_kernel([backend, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True)


ROWS = (
    Row(SDPA, _unchanged, backend=True),
    Row("SDPA flash", _unchanged, _first(SDPBackend.FLASH_ATTENTION), backend=True),
    Row("SDPA cuDNN", _unchanged, _first(SDPBackend.CUDNN_ATTENTION), backend=True),
    Row("fp8attn", _registered("fp8attn", Recipe())),
    Row("fp8attn int8", _registered("fp8attn_int8", PRECISE)),
    Row("SageAttention", _by(by_sage), modules=("sageattention",)),
    Row("FA3 bf16", _by(by_fa3), modules=adapters.FLASH3),
    Row(NOTHING, _by(by_nothing)),
)
"""`no attention` shows what of the time isn't attention: answers are wrong."""


@dataclass(frozen=True)
class Result:
    """One row's forwards of a model.

    Attributes:
        launch: `eager` or `compiled`.
        ms: median over all forwards of all rounds; None if the row was refused.
        round_ms: the median of each round.
        relative_l2: of the output, against exact attention in the same model.
        against_sdpa: the fastest PyTorch row's median over this one's.
        peak_bytes: the largest allocation during a forward, weights included.
        calls: calls of attention by fp8attn in a forward, and those that went to PyTorch.
    """

    case: str
    row: str
    launch: str
    ms: float | None = None
    round_ms: tuple[float, ...] = ()
    relative_l2: float | None = None
    against_sdpa: float | None = None
    peak_bytes: int | None = None
    calls: tuple[int, int] | None = None
    refused: str | None = None

    def record(self) -> dict[str, Any]:
        """One flat JSON object."""
        return dataclasses.asdict(self)


@contextlib.contextmanager
def _defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """The default device and dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def built(case: Case, size: Size, device: torch.device) -> tuple[nn.Module, Inputs]:
    """A model in bfloat16 with random weights, and its inputs."""
    torch.manual_seed(SEED)
    with _defaults(device, torch.bfloat16):
        model = case.build(importlib.import_module(case.library), size)
        inputs = case.draw(size, model)
    model = model.to(device, torch.bfloat16).eval().requires_grad_(False)
    choose = getattr(model, "set_attn_implementation", None)  # of transformers
    if callable(choose):
        choose("sdpa")
    choose = getattr(model, "set_attention_backend", None)  # of diffusers; unset, it is the one that any model set last
    if callable(choose):
        choose(NATIVE)
    return model, inputs


def with_the_same_weights(model: nn.Module) -> nn.Module:
    """A copy of a model's modules. Parameters and buffers are shared."""
    return copy.deepcopy(model, {id(x): x for x in itertools.chain(model.parameters(), model.buffers())})


def compile_layers(model: nn.Module) -> None:
    """Compile each layer of a model's lists of layers. Layers of one class share a graph."""

    def backend(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Any:
        # TorchInductor by a function of the model's own: graphs of other rows, which call other attention, aren't reused
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, examples)

    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len({type(layer) for layer in module}) == 1 and any(next(iter(module)).children()):
            for layer in module:
                layer.compile(backend=backend, dynamic=False)


def output_of(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    """The first output of a forward."""
    with torch.inference_mode():
        return model(**inputs, return_dict=False)[0]


def milliseconds_of(forward: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """The time of each of several forwards, one after the other."""
    if device.type != "cuda":
        times = []
        for _ in range(count):
            start = time.perf_counter()
            forward()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    forward()  # untimed: the clock, and the launch of the next ones
    events[0].record()
    for event in events[1:]:
        forward()
        event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def relative_l2(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected.float()).norm() / expected.float().norm())


@dataclass(frozen=True)
class Protocol:
    """How everything is timed: turns of each row, and the length of a turn."""

    rounds: int = 5
    milliseconds: float = 300.0


def measure(case: Case, size: Size, rows: Sequence[Row], launch: str, protocol: Protocol, device: torch.device, tick: Tick = no_tick) -> list[Result]:
    """All rows' forwards of a model, from one interleaved run.

    Args:
        tick: called for every turn, and once when a row is ready, which count as 1.
    """
    model, inputs = built(case, size, device)
    with fp8attn.patch(model, min_keys=0, decode="fp8attn", backend="reference"):
        expected = output_of(model, inputs)
    refused: dict[str, str] = {}
    found: dict[str, Result] = {}
    forwards: dict[str, Callable[[], object]] = {}
    with contextlib.ExitStack() as stack:
        for row in rows:
            tick(f"{row.name}, made ready", 0.0)
            copied = with_the_same_weights(model)
            calls = None
            try:
                entered = stack.enter_context(row.switch(copied))
                if launch == "compiled":
                    compile_layers(copied)
                forward = _forward(row, copied, inputs)
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                out = forward()
                if isinstance(entered, fp8attn.integrations.Report) and launch == "eager":
                    calls = (entered.replaced.total(), sum(reasons.total() for reasons in entered.fallbacks.values()))
                forward()
                peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
                error = None if row.name == NOTHING else relative_l2(out, expected)
                forwards[row.name] = forward
                found[row.name] = Result(case.name, row.name, launch, relative_l2=error, peak_bytes=peak, calls=calls)
            except Exception as why:  # other libraries refuse by errors of all kinds
                refused[row.name] = f"{type(why).__name__}: {why}".splitlines()[0]
            tick(row.name, 1.0)
        samples = _timed(forwards, protocol, device, tick)
    medians = {name: statistics.median(itertools.chain(*of_rounds)) for name, of_rounds in samples.items()}
    fastest = min((medians[row.name] for row in rows if row.backend and row.name in medians), default=None)
    results = []
    for row in rows:
        if row.name in refused:
            results.append(Result(case.name, row.name, launch, refused=refused[row.name]))
            continue
        ms, rounds = medians[row.name], tuple(statistics.median(one) for one in samples[row.name])
        results.append(dataclasses.replace(found[row.name], ms=ms, round_ms=rounds, against_sdpa=None if fastest is None else fastest / ms))
    return results


def _forward(row: Row, model: nn.Module, inputs: Inputs) -> Callable[[], torch.Tensor]:
    def forward() -> torch.Tensor:
        with row.around():
            return output_of(model, inputs)

    return forward


def _timed(forwards: dict[str, Callable[[], object]], protocol: Protocol, device: torch.device, tick: Tick) -> dict[str, list[list[float]]]:
    """Milliseconds of each row's forwards, by round."""
    counts = {name: max(round(protocol.milliseconds / milliseconds_of(forward, 1, device)[0]), 1) for name, forward in forwards.items()}
    samples: dict[str, list[list[float]]] = {name: [] for name in forwards}
    for i in range(protocol.rounds):
        for name in in_turn(list(forwards), i):
            tick(f"{name}, round {i + 1} of {protocol.rounds}", 0.0)
            samples[name].append(milliseconds_of(forwards[name], min(counts[name], 50), device))
            tick(name, 1.0)
    return samples


CAPTION = (
    "Medians of one interleaved run. × SDPA: the fastest PyTorch row's median over this one's. × attention: the same without the time of `no"
    " attention`. relative L2: of the output, against exact attention. calls: by fp8attn, and of these models' calls those that went to PyTorch."
)


ON_CPU = "Tiny models on a CPU: times mean nothing. Errors are those of FP8's numerics, modelled, in models of this size."


def attention_ratio(result: Result, results: Sequence[Result]) -> float | None:
    """The time of attention in the fastest PyTorch row over that in this one, from the times without attention."""
    nothing = next((one.ms for one in results if one.row == NOTHING), None)
    if nothing is None or result.ms is None or result.against_sdpa is None or result.ms <= nothing:
        return None
    return (result.ms * result.against_sdpa - nothing) / (result.ms - nothing)


def table(results: Sequence[Result], gpu: bool) -> Sheet:
    """A row for every row of every model."""
    headers = ("ms", "× SDPA", "× attention", "relative L2", "peak GiB") if gpu else ("ms", "relative L2")
    title, caption = f"Whole models, {results[0].launch}", CAPTION if gpu else ON_CPU
    made = report.table_of(title, ("model, attention",), headers, caption, optional=("peak GiB", "× attention"), words=("calls",))
    for case in dict.fromkeys(result.case for result in results):
        made.add_group(case)
        group = [result for result in results if result.case == case]
        for result in group:
            peak = None if result.peak_bytes is None else result.peak_bytes / 2**30
            cells = [report.number_of(result.ms, ".2f"), report.number_of(result.against_sdpa, ".3f")]
            cells += [report.number_of(attention_ratio(result, group), ".2f"), report.number_of(result.relative_l2, ".4f")]
            cells.append(report.number_of(peak, ".1f"))
            calls = result.refused or ("" if result.calls is None else f"{result.calls[0]} + {result.calls[1]}")
            made.add_row(result.row, *(cells if gpu else (cells[0], cells[3])), calls, style="bold" if result.row.startswith("fp8attn") else None)
    return made


PICTURE = "models.svg"

BARS = {"fp8attn": VERMILLION, "fp8attn int8": BLUE}
"""Rows in the picture, and their colours."""


def records_of(source: Path) -> list[dict[str, Any]]:
    """The timed records of a results file of this command.

    Raises:
        UsageError: the file isn't one.
    """
    return [record for record in results_of(source, "models", ("case", "row", "launch", "against_sdpa")) if record["against_sdpa"] is not None]


def figure_of(records: Sequence[dict[str, Any]]) -> Any:
    """A figure of every model's speed over PyTorch's fastest attention, eager and compiled.

    Raises:
        UsageError: there is nothing to draw.
    """
    there = [r for r in records if r["row"] in BARS]
    cases = list(dict.fromkeys(r["case"] for r in there))
    launches = [launch for launch in ("eager", "compiled") if any(r["launch"] == launch for r in there)]
    if not cases:
        raise UsageError("no row of fp8attn")
    figure, axes = load_pyplot().subplots(1, len(launches), figsize=(5 * len(launches), 4.4), sharey=True, squeeze=False, layout="constrained")
    for axis, launch in zip(axes[0], launches, strict=True):
        for i, (row, colour) in enumerate(BARS.items()):
            found = {r["case"]: r["against_sdpa"] for r in there if (r["row"], r["launch"]) == (row, launch)}
            places = [place + 0.38 * (i - 0.5) for place, case in enumerate(cases) if case in found]
            bars = axis.barh(places, [found[case] for case in cases if case in found], 0.36, color=colour, label=row)
            axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
        axis.axvline(1.0, color=GREY, linewidth=1, label="PyTorch's fastest attention")
        axis.set_xlim(0, 1.15 * max(r["against_sdpa"] for r in there))
        axis.set_yticks(range(len(cases)), cases)
        axis.set_title(launch, fontsize=11)
        axis.set_xlabel("speed of a forward")
    axes[0][0].invert_yaxis()
    legend_below(figure, axes[0], 3)
    figure.suptitle(f"Whole models, random weights: {there[0]['gpu']}", fontsize=11)
    return figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_case(parser)
    command_line.add_peer(parser)
    parser.add_argument("--launch", choices=("eager", "compiled"), action="append", help="repeatable; default: both, eager without a GPU")
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="at most this many layers of each kind")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="turns that every row gets (default: %(default)s)")
    parser.add_argument("--milliseconds", type=more_than_zero, default=300.0, help="length of a turn (default: %(default)s)")
    command_line.add_json(parser)
    parser.add_argument("--draw", type=input_file, metavar="FILE.jsonl", help=f"measure nothing: draw such a file as {PICTURE} beside it")


def size_of(case: Case, layers: int | None, gpu: bool) -> Size:
    """The size of a case here, with at most so many layers."""
    size = case.size if gpu else case.tiny
    return size if layers is None else dataclasses.replace(size, layers=tuple(min(count, layers) for count in size.layers))


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    if arguments.draw is not None:
        save(figure_of(records_of(arguments.draw)), command_line.sibling(arguments.draw, PICTURE))
        return 0
    works = command_line.chosen(arguments.case, CASES, "--case")
    rows = command_line.chosen(arguments.peer, ROWS, "--peer", "row")
    lacking = {case.lacking for case in works if case.lacking is not None}
    for what in sorted(lacking):
        report.say(f"left out: {', '.join(case.name for case in works if case.lacking == what)}: needs {what}")
    works = [case for case in works if case.lacking is None]
    if not works:
        raise UsageError(f"every model needs {' or '.join(sorted(lacking))}")
    rows = [row for row in rows if row.lacking is None or arguments.peer]
    missing = next((row for row in rows if row.lacking is not None), None)
    if missing is not None:
        raise UsageError(f"{missing.name} needs {missing.lacking}")
    gpu = device.type == "cuda"
    launches = arguments.launch or (["eager", "compiled"] if gpu else ["eager"])
    protocol, about = Protocol(arguments.rounds, arguments.milliseconds), machine(device)
    results: list[Result] = []
    with report.progress("models") as bar:
        turns = (protocol.rounds + 1) * len(rows)
        task = bar.add_task(f"models: {len(works)}", total=turns * len(works) * len(launches))
        for i, (case, launch) in enumerate(itertools.product(works, launches)):
            bar.update(task, completed=i * turns, description=f"{case.name}, {launch}")
            size = size_of(case, arguments.layers, gpu)
            found = measure(case, size, rows, launch, protocol, device, bar.ticks(task, f"{case.name}, {launch}, "))
            sizes = {"layers": list(size.layers)}
            report.append(arguments.json, (report.json_line("models", result.record() | sizes, about) for result in found))
            results += found
            torch._dynamo.reset()
            if gpu:
                torch.cuda.empty_cache()
    for launch in launches:
        report.console().print(table([result for result in results if result.launch == launch], gpu))
    return 0
