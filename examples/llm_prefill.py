"""Prefill of a language model of Llama 3 8B's sizes, with random weights: PyTorch's attention, then fp8attn's, by transformers.

On a CPU the default sizes are tiny.
"""

from __future__ import annotations

import torch
import whole_model

import fp8attn


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = whole_model.parser(__doc__)
    parser.add_argument("--length", type=int, default=8192 if gpu else 160, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=32 if gpu else 2, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=4096 if gpu else 128, help="of the hidden state (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=32 if gpu else 4, help="query heads; a fourth as many key/value heads (default: %(default)s)")
    options = parser.parse_args()
    whole_model.needs("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    device = torch.device(options.device)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128256 if gpu else 64, hidden_size=options.width, intermediate_size=options.width * 7 // 2, num_hidden_layers=options.layers,
        num_attention_heads=options.heads, num_key_value_heads=max(options.heads // 4, 1), max_position_embeddings=options.length,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        ids = torch.randint(config.vocab_size, (1, options.length))
    model.set_attn_implementation("sdpa")

    def switch(recipe: fp8attn.Recipe) -> object:
        report = fp8attn.integrations.transformers.register(recipe=recipe, model=model, **whole_model.switch_options(device))
        model.set_attn_implementation("fp8attn")
        return report

    # the logits of the last token, as generation needs them
    whole_model.compare(options.attn, lambda step: model(input_ids=ids, use_cache=False, logits_to_keep=1).logits, switch, options)


if __name__ == "__main__":
    main()
