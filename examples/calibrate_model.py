"""A recipe for every layer of a model: capture its calls of attention, calibrate, save, load, apply.

The model is a small transformer with random weights. In layer 1, four channels of Q have large means, which the default recipe rounds coarsely.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import fp8attn


class Block(torch.nn.Module):
    """Pre-norm attention and MLP. The first four channels of every query get means, if `biased`."""

    def __init__(self, width: int, heads: int, biased: bool) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        torch.nn.init.normal_(self.qkv.weight, std=width**-0.5)  # q, k and v are like N(0, 1)
        self.register_buffer("means", torch.zeros(width // heads))
        if biased:
            self.means[:4] = torch.tensor([10.0, -20.0, 30.0, -50.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q + self.means, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def parsed() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--layers", type=int, default=4 if gpu else 2)
    parser.add_argument("--heads", type=int, default=16 if gpu else 2)
    parser.add_argument("--head-dim", type=int, default=128 if gpu else 64, help="a multiple of 8 from 16 to 256")
    parser.add_argument("--length", type=int, default=4096 if gpu else 256, help="tokens")
    parser.add_argument("--tolerance", type=float, default=0.06, help="largest relative L2 error of a head")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the calibration in this file")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    cpu = torch.device(options.device).type == "cpu"
    torch.manual_seed(0)
    width = options.heads * options.head_dim
    blocks = [Block(width, options.heads, biased=i == 1) for i in range(options.layers)]
    model = torch.nn.Sequential(*blocks).to(options.device, torch.bfloat16).eval()
    x = torch.randn(1, options.length, width, device=options.device, dtype=torch.bfloat16)

    with torch.inference_mode():
        expected = model(x)

        with fp8attn.capture(model) as calls:
            model(x)
        print(f"captured: {calls.report}")

        calibration = fp8attn.calibrate(calls, tolerance=options.tolerance, device=options.device)
        print(f"calibration: {calibration}")

        with tempfile.TemporaryDirectory() as folder:
            file = options.save or Path(folder) / "model.fp8attn.json"
            calibration.save(file)
            calibration = fp8attn.Calibration.load(file)
            print(f"saved and loaded: {file.name}, {len(calibration.layers)} layers")

        # on a CPU, "auto" is exact: "modelled" has the numerics of the FP8 kernels
        with calibration.applied(model, backend="modelled" if cpu else "auto") as report:
            out = model(x)
        print(f"applied: {report}")

    error = (out.float() - expected.float()).norm() / expected.float().norm()
    print(f"relative L2 difference of the model's output: {error:.4f}")


if __name__ == "__main__":
    main()
