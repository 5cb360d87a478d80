"""Times transformers' continuous batching with random weights: tokens per second with fp8attn, and with other attention.

python -m bench.engine --sequences 32 --length 8192 --new 256
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fp8attn

from .machine import machine

IMPLEMENTATIONS = ("fp8attn_flash2", "fp8attn_e4m3_flash2", "flash_attention_3", "flash_attention_2", "sdpa")
"""In the order in which they are timed. Those that the machine lacks are left out, with their error."""


@dataclass(frozen=True)
class Size:
    """A Llama's sizes, those of 8B parameters."""

    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    width: int = 14336
    vocabulary: int = 128256


TINY = Size(2, 4, 2, 16, 64, 64)


def model_of(size: Size, length: int, device: torch.device) -> nn.Module:
    """A Llama with random weights, in bfloat16."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.heads * size.head_dim, intermediate_size=size.width, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.kv_heads, head_dim=size.head_dim, max_position_embeddings=2 * length,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def seconds(model: Any, prompts: list[list[int]], new: int, options: dict[str, Any]) -> float:
    """Of `generate_batch` with `new` tokens for each prompt."""
    import transformers

    plan = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    engine = transformers.ContinuousBatchingConfig(**options)
    start = time.perf_counter()
    found = model.generate_batch(inputs=prompts, generation_config=plan, continuous_batching_config=engine, progress_bar=False)
    took = time.perf_counter() - start
    if len(found) != len(prompts) or any(len(x.generated_tokens) != new for x in found.values()):
        raise RuntimeError(f"the engine answered {len(found)} of {len(prompts)} prompts")
    return took


def row_of(model: Any, implementation: str, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """What one implementation takes. All runs are warm: one of few tokens, and one of all prompts, come before them."""
    length = max(map(len, prompts)) + new
    blocks = -(-length // 256) + 1  # of a request; without num_blocks the cache takes what CUDA graphs need
    options = {"max_blocks_per_request": blocks, "max_batch_tokens": min(8192, len(prompts) * length), "allow_block_sharing": False}
    options |= {"num_blocks": len(prompts) * (blocks + 1)}
    model.set_attn_implementation(implementation)
    seconds(model, prompts[:2], 4, options)
    seconds(model, prompts, 1, options)
    # prompts end one after another, and the engine captures a graph for each number of sequences that decode: only the
    # second half of the tokens is decoding alone
    first, half, whole = (seconds(model, prompts, count, options) for count in (1, new // 2, new))
    return {
        "implementation": implementation, "prefill_s": first, "half_s": half, "whole_s": whole,
        "prompt_tokens_per_s": sum(map(len, prompts)) / first, "new_tokens_per_s": len(prompts) * (new - new // 2) / max(whole - half, 1e-9),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Print a row of JSON for each implementation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--layers", type=int, default=Size.layers)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--implementations", nargs="+", default=IMPLEMENTATIONS)
    found = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = TINY if found.tiny else Size(layers=found.layers)
    model = model_of(size, found.length + found.new, device)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, size.vocabulary, (found.length,), generator=generator).tolist() for _ in range(found.sequences)]
    fp8attn.integrations.continuous_batching.register()
    fp8attn.integrations.continuous_batching.register(kv_scales=(1.0, 1.0), name="fp8attn_e4m3_flash2")
    for implementation in found.implementations:
        try:
            row = row_of(model, implementation, prompts, found.new)
        except (ImportError, ValueError, RuntimeError, MemoryError) as error:
            row = {"implementation": implementation, "error": str(error)[:300]}
        print(json.dumps(row | {"sequences": found.sequences, "length": found.length, "new": found.new, "machine": machine(device)}), flush=True)


if __name__ == "__main__":
    main()
