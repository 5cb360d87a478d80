"""Trains a small byte-level language model, then measures its perplexity on held-out text, with attention in bfloat16
and with every recipe.

The text is the source code of Python's standard library, which every machine has. Every twentieth file is held out.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fp8attn
from fp8attn.cuda.build import cache_folder

from . import command_line, report
from .adapters import here
from .cases import SEED, Case
from .command_line import UsageError, at_least, more_than_zero
from .machine import machine
from .peers import Peer, Problem
from .progress import Tick, no_tick
from .readme import Record
from .rows import BASELINE, chosen
from .sheet import Sheet

HELP = "perplexity of a small transformer, trained here on real text: attention in bfloat16 beside every recipe, and others' FP8 kernels"

BYTES = 256
HELD_OUT = 20
"""One of this many files is held out."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal attention of q, k and v (B, H, S, D)."""


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of its training."""

    layers: int = 6
    heads: int = 8
    head_dim: int = 64
    context: int = 2048
    batch: int = 16
    steps: int = 1000
    learning_rate: float = 1.5e-3

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def in_bfloat16(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def rotary(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions (arXiv:2104.09864) on x (B, H, S, D)."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[2], device=x.device).unsqueeze(-1) * frequency
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        self.attention_norm, self.mlp_norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width, bias=False), nn.Linear(size.width, size.width, bias=False)
        self.up, self.down = nn.Linear(size.width, 4 * size.width, bias=False), nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(rotary(q), rotary(k), v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    """Logits of the next byte, (B, S, 256), for bytes (B, S)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, BYTES, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: torch.Tensor, attend: Attend = in_bfloat16) -> torch.Tensor:
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(self.norm(x))


def corpus(limit: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 bytes for training and held-out bytes: the standard library's sources, ordered by name.

    Args:
        limit: of the total number of bytes.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    files = [name for name in names if not {"test", "tests", "site-packages", "dist-packages"} & set(name.parts)]
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for i, name in enumerate(files):
        text = (root / name).read_bytes()
        parts[i % HELD_OUT == 0].append(text)
        total += len(text)
        if limit is not None and total > limit:
            break
    train, held_out = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return train, held_out


def train(size: Size, text: torch.Tensor, device: torch.device, seconds: float, log: Callable[[str], None], tick: Tick = no_tick) -> Transformer:
    """Train a model in bfloat16 for `size.steps` steps or `seconds`, whichever is over first. The learning rate falls
    to zero by that end.

    Args:
        tick: called for every step; in total, steps count as 1.
    """
    torch.manual_seed(SEED)
    model = Transformer(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    text = text.to(device)
    generator = torch.Generator(device).manual_seed(SEED)
    offsets = torch.arange(size.context + 1, device=device)
    began, told = time.monotonic(), 0.0
    for step in range(size.steps):
        gone = max(step / size.steps, (time.monotonic() - began) / seconds)
        tick(f"step {step} of {size.steps} at most", gone - told)
        told = gone
        if gone >= 1:
            log(f"{seconds:.0f} s are over after {step} steps")
            break
        optimizer.param_groups[0]["lr"] = size.learning_rate * min(1.0, (step + 1) / 50, 2 * (1 - gone))
        starts = torch.randint(len(text) - size.context - 1, (size.batch, 1), generator=generator, device=device)
        window = text[starts + offsets].long()
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            log(f"step {step}: {float(loss.detach()):.4f} nats a byte, {time.monotonic() - began:.0f} s")
    return model.eval().requires_grad_(False)


def trained(size: Size, text: torch.Tensor, device: torch.device, seconds: float, log: Callable[[str], None], tick: Tick = no_tick) -> Transformer:
    """The model of `train`, from the cache folder if one of the same size was trained on the same bytes for as long."""
    key = repr((asdict(size), seconds, device.type, torch.__version__)).encode()
    path = cache_folder() / f"model-{hashlib.sha256(key + text.numpy().tobytes()).hexdigest()[:16]}.pt"
    model = Transformer(size).to(device)
    if path.exists():
        model.load_state_dict(torch.load(path, map_location=device, weights_only=True))
        return model.eval().requires_grad_(False)
    model = train(size, text, device, seconds, log, tick)
    torch.save(model.state_dict(), path)
    return model


def attend_with(row: Peer) -> Attend:
    """Attention by one of the benchmark's rows."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch, heads, length, dim = q.shape
        problem = Problem(Case("model", batch, heads, heads, length, length, dim, dim, causal=True), "model", q.device, ((q, k, v),))
        with torch.autocast(q.device.type, enabled=False):  # it would round what models compute in float32
            return row.restored(problem, row.prepare(problem)(0)).to(q.dtype)

    return attend


@dataclass(frozen=True)
class Predictions:
    """Predictions for held-out windows: float64 nats (N, S) of every byte, and the likeliest byte (N, S)."""

    nats: torch.Tensor
    likeliest: torch.Tensor


@torch.inference_mode()
def predictions(model: Transformer, windows: torch.Tensor, attend: Attend, batch: int) -> Predictions:
    """Predictions of every byte but the first of windows (N, S + 1)."""
    nats, likeliest = [], []
    for part in windows.split(batch):
        with torch.autocast(part.device.type, torch.bfloat16):
            logits = model(part[:, :-1], attend)
        nats.append(F.cross_entropy(logits.transpose(1, 2).double(), part[:, 1:], reduction="none"))
        likeliest.append(logits.argmax(-1))
    return Predictions(torch.cat(nats), torch.cat(likeliest))


@dataclass(frozen=True)
class Result:
    """One row's predictions.

    Attributes:
        perplexity: e to the power of the mean nats of a byte.
        gap: perplexity divided by the baseline's, minus 1.
        gap_error: standard error of the gap, with windows as independent draws.
        agreement: fraction of bytes with the same likeliest next byte as the baseline.
    """

    row: str
    perplexity: float | None
    gap: float | None
    gap_error: float | None
    agreement: float | None
    refused: str | None = None

    @classmethod
    def of(cls, row: str, mine: Predictions, baseline: Predictions) -> Result:
        by_window = (mine.nats - baseline.nats).mean(-1)
        error = float(by_window.std()) / math.sqrt(len(by_window)) if len(by_window) > 1 else math.nan
        agreement = float((mine.likeliest == baseline.likeliest).double().mean())
        return cls(row, math.exp(mine.nats.mean()), math.expm1(by_window.mean()), error, agreement)

    def record(self) -> Record:
        """One flat JSON object."""
        names = ("perplexity", "gap", "gap_error", "agreement", "refused")
        return {"backend": self.row, **{name: getattr(self, name) for name in names}}


def evaluate(model: Transformer, windows: torch.Tensor, rows: Sequence[Peer], batch: int, tick: Tick = no_tick) -> Iterator[Result]:
    """Evaluate the baseline, then all rows. A row that raises is refused.

    Args:
        tick: called for every row, which counts as 1, and for the baseline.
    """
    tick("bfloat16", 0.0)
    baseline = predictions(model, windows, in_bfloat16, batch)
    yield Result.of("bfloat16", baseline, baseline)
    for row in rows:
        tick(row.name, 1.0)
        try:
            yield Result.of(row.name, predictions(model, windows, attend_with(row), batch), baseline)
        except fp8attn.BackendUnavailable:
            continue
        except Exception as error:
            yield Result(row.name, None, None, None, None, f"{type(error).__name__}: {error}")


def table(results: Sequence[Result], title: str) -> Sheet:
    caption = "gap: of perplexity, to bfloat16's; ±: its standard error. same byte: how often the likeliest next byte is the same."
    made = report.table_of(title, ("attention",), ("perplexity", "gap", "±", "same byte"), caption)
    for r in results:
        cells = (report.number_of(r.perplexity, ".5f"), *(report.number_of(x, form) for x, form in ((r.gap, "+.4%"), (r.gap_error, ".4%"))))
        made.add_row(r.row, *cells, report.number_of(r.agreement, ".3%"), style="bold" if r.row.startswith("fp8attn") else None)
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default in asdict(Size()).items():
        kind = at_least(1) if isinstance(default, int) else more_than_zero
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help="default: %(default)s")
    parser.add_argument("--seconds", type=more_than_zero, default=100.0, help="of training, at most (default: %(default)s)")
    parser.add_argument("--windows", type=at_least(1), default=48, help="of held-out text, each a context long (default: %(default)s)")
    parser.add_argument("--text", type=at_least(1), metavar="BYTES", help="use no more of the text than this")
    command_line.add_peer(parser)
    command_line.add_json(parser)


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    size = Size(**{name: getattr(arguments, name) for name in asdict(Size())})
    if size.head_dim % 2:
        raise UsageError(f"--head-dim is {size.head_dim}; it must be even, for rotary positions")
    rows = chosen(arguments.peer)
    text, held_out = corpus(arguments.text)
    count = min(arguments.windows, (len(held_out) - 1) // size.context)
    if count < 1 or len(text) < size.context + 2:
        raise UsageError(f"{len(text)} bytes to train on and {len(held_out)} held out; there must be more than {size.context} of each")
    rows = here(rows)
    rows = tuple(row for row in rows if row.name != BASELINE)
    results: list[Result] = []
    with report.progress("model") as bar:
        task = bar.add_task("training, unless it was trained before", total=1.0, seconds=arguments.seconds)
        model = trained(size, text, device, arguments.seconds, lambda line: print(line, file=sys.stderr, flush=True), bar.ticks(task, "training, "))
        starts = torch.linspace(0, len(held_out) - size.context - 1, count).long().unsqueeze(-1)
        windows = held_out[starts + torch.arange(size.context + 1)].long().to(device)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        about = asdict(size) | {"parameters": parameters, "trained_on": len(text), "windows": count} | machine(device)
        bar.update(task, completed=1.0)
        task = bar.add_task(f"perplexity, rows: {len(rows) + 1}", total=len(rows) + 1)
        for result in evaluate(model, windows, rows, size.batch, bar.ticks(task)):
            report.append(arguments.json, [report.json_line("model", result.record(), about)])
            results.append(result)
    heads = f"{size.layers} layers of {size.heads} heads, D {size.head_dim}, context {size.context}"
    report.console().print(table(results, f"{parameters / 1e6:.1f} M parameters, {heads}; {count * size.context} held-out bytes"))
    return 0
