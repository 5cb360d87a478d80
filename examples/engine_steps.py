"""Steps of an engine that has a paged KV cache of its own, in e4m3: prompts in chunks and decode steps in one call, by FlashAttention's
signature with a block table. Queries and keys get rotary embeddings first.

On a GPU the default sizes are a model's; on a CPU they are small, and the numerics are modelled in plain torch.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import dataclass, field

import torch

import fp8attn
from fp8attn.integrations.flash_attn import flash_attn_varlen_func

SCALE = 4.0 / 448.0
"""Scale of keys and values: numbers up to 4 fit into e4m3."""


def parsed() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--heads", type=int, default=32 if gpu else 4, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8 if gpu else 2, help="key/value heads")
    parser.add_argument("--head-dim", type=int, default=128 if gpu else 64, help="a multiple of 8 from 16 to 256")
    parser.add_argument("--page", type=int, default=16, help="slots of a page")
    parser.add_argument("--prompts", type=int, nargs="+", default=[4000, 1500, 700, 9000] if gpu else [70, 9, 130], help="tokens of each")
    parser.add_argument("--chunk", type=int, default=2048 if gpu else 64, help="tokens of a prompt that a step takes")
    parser.add_argument("--steps", type=int, default=64 if gpu else 6, help="decode steps behind the last prompt")
    return parser.parse_args()


@dataclass
class Sequence:
    """A sequence that grows.

    Attributes:
        prompt: tokens of its prompt.
        keys, values: those of its tokens, (n, Hkv, D) each, kept only to compute the error.
        pages: the numbers of its pages.
        length: tokens that the cache has.
    """

    prompt: int
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    length: int = 0

    def next_tokens(self, chunk: int) -> int:
        """Of the prompt as many as a step takes, behind it one."""
        return min(self.prompt - self.length, chunk) if self.length < self.prompt else 1


class Engine:
    """One layer's cache, and what the engine tells attention about a step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        self.sequences = [Sequence(n) for n in options.prompts]
        prefills = -(-max(options.prompts) // options.chunk)  # steps, in which short prompts' sequences decode already
        self.most = [-(-(n + prefills + options.steps) // options.page) for n in options.prompts]
        shape = (2, sum(self.most), options.page, options.kv_heads, options.head_dim)
        self.k, self.v = torch.zeros(shape, dtype=torch.uint8, device=self.device).view(torch.float8_e4m3fn)
        self.free = list(range(shape[1]))
        self.cache = fp8attn.PagedTensors(self.k, self.v, SCALE, SCALE)
        pairs = options.head_dim // 2
        angles = torch.arange(max(self.most) * options.page)[:, None] / 10000.0 ** (torch.arange(pairs) / pairs)
        self.cos, self.sin = angles.cos().to(self.device), angles.sin().to(self.device)

    def step(self) -> tuple[torch.Tensor, list[int], float]:
        """One step of all sequences: the output (T, Hq, D), each sequence's tokens, and the seconds of embedding, writing and attention."""
        options, page = self.options, self.options.page
        counts = [s.next_tokens(options.chunk) for s in self.sequences]
        q, k, v = (self.drawn(sum(counts), heads) for heads in (options.heads, options.kv_heads, options.kv_heads))
        slots = []
        for s, n in zip(self.sequences, counts, strict=True):
            positions = range(s.length, s.length + n)
            while len(s.pages) * page < s.length + n:
                s.pages.append(self.free.pop())
            slots += [s.pages[i // page] * page + i % page for i in positions]
            s.length += n
        table = torch.zeros(len(counts), max(self.most), dtype=torch.int32)
        for row, s in enumerate(self.sequences):
            table[row, : len(s.pages)] = torch.tensor(s.pages, dtype=torch.int32)
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        used = torch.tensor([s.length for s in self.sequences], dtype=torch.int32)
        table, starts, used, mapping = (x.to(self.device) for x in (table, starts, used, torch.tensor(slots)))
        self.synchronize()
        start = time.perf_counter()
        q, k = fp8attn.rotary_embedding(q, k, fp8attn.PagedBatch(table, used, cu_seqlens=starts), self.cos, self.sin)
        fp8attn.write_to_pages(k, v, self.cache, mapping)
        out = flash_attn_varlen_func(
            q, self.k, self.v, starts, None, max(counts), int(used.max()), causal=True, block_table=table, seqused_k=used,
            k_descale=SCALE, v_descale=SCALE,
        )  # fmt: skip
        self.synchronize()
        assert isinstance(out, torch.Tensor)
        seconds = time.perf_counter() - start
        for s, keys, values in zip(self.sequences, k.split(counts), v.split(counts), strict=True):
            s.keys.append(keys)
            s.values.append(values)
        self.q = q
        return out, counts, seconds

    def drawn(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, self.options.head_dim, device=self.device, dtype=torch.bfloat16)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def error(self, out: torch.Tensor, counts: list[int]) -> float:
        """The relative L2 error of a step's output, beside exact attention of each sequence."""
        exact, first = [], 0
        for s, n in zip(self.sequences, counts, strict=True):
            k, v = (torch.cat(x).transpose(0, 1)[None] for x in (s.keys, s.values))
            q = self.q[first : first + n].transpose(0, 1)[None]
            answer = fp8attn.reference_sdpa(q, k, v, is_causal=True, causal_alignment="bottom_right", enable_gqa=True, out_dtype=torch.float32)
            exact.append(answer[0].transpose(0, 1))
            first += n
        wanted = torch.cat(exact)
        return float((out.float() - wanted).norm() / wanted.norm())


def main() -> None:
    torch.manual_seed(0)
    engine = Engine(parsed())
    decoded = 0
    for number in itertools.count():
        out, counts, seconds = engine.step()
        decodes = max(counts) == 1
        decoded += decodes
        if not decodes or decoded in (1, engine.options.steps):
            print(f"step {number}: new tokens {counts}, {seconds * 1e6:.0f} µs, relative L2 error {engine.error(out, counts):.4f}")
        if decoded == engine.options.steps:
            break
    print(f"cache: {engine.k.nbytes + engine.v.nbytes} bytes of {sum(engine.most)} pages")
    if engine.device.type == "cpu":
        print("the numerics are modelled on a CPU: its times say nothing of a GPU")


if __name__ == "__main__":
    main()
