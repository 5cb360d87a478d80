"""An encoder of PyTorch's own modules, with random weights: PyTorch's attention, then fp8attn's, by PyTorch's dispatcher.

Nothing of the model is touched: integrations.torch.activate() reaches every module of the process. On a CPU the default sizes are tiny.
"""

from __future__ import annotations

import torch
import whole_model

import fp8attn


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = whole_model.parser(__doc__)
    parser.add_argument("--batch", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--length", type=int, default=8192 if gpu else 96, help="tokens (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=24 if gpu else 2, help="default: %(default)s")
    parser.add_argument("--heads", type=int, default=16 if gpu else 2, help="default: %(default)s")
    parser.add_argument("--head-dim", type=int, default=64 if gpu else 32, help="default: %(default)s")
    options = parser.parse_args()
    device, width = torch.device(options.device), options.heads * options.head_dim
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        layer = torch.nn.TransformerEncoderLayer(width, options.heads, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        model = torch.nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False).eval().requires_grad_(False)
        x = torch.randn(options.batch, options.length, width)

    def switch(recipe: fp8attn.Recipe) -> object:
        return fp8attn.integrations.torch.activate(recipe, **whole_model.switch_options(device))

    whole_model.compare(options.attn, lambda step: model(x), switch, options)


if __name__ == "__main__":
    main()
