"""Denoising steps of a video transformer of Wan 1.3B's sizes, with random weights: PyTorch's attention, then fp8attn's, by diffusers.

81 frames of 480 x 832 pixels are 32,760 tokens. On a CPU the default sizes are tiny. With several GPUs the tokens are sharded over them:

    torchrun --nproc-per-node 2 examples/video_dit.py
"""

from __future__ import annotations

import torch
import whole_model

import fp8attn


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = whole_model.parser(__doc__)
    parser.add_argument("--frames", type=int, default=21 if gpu else 2, help="of the latents (default: %(default)s)")
    parser.add_argument("--height", type=int, default=60 if gpu else 12, help="of the latents (default: %(default)s)")
    parser.add_argument("--width", type=int, default=104 if gpu else 12, help="of the latents (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=30 if gpu else 2, help="default: %(default)s")
    parser.add_argument("--heads", type=int, default=12 if gpu else 2, help="default: %(default)s")
    parser.add_argument("--head-dim", type=int, default=128 if gpu else 32, help="default: %(default)s")
    options = parser.parse_args()
    whole_model.needs("diffusers")
    from diffusers import ContextParallelConfig, WanTransformer3DModel

    ranks = whole_model.ranks_of_torchrun(options)
    device = torch.device(options.device)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    text_dim = 4096 if gpu else 32
    with device:
        model = WanTransformer3DModel(
            num_attention_heads=options.heads, attention_head_dim=options.head_dim, text_dim=text_dim, num_layers=options.layers,
            ffn_dim=8960 if gpu else 64,
        )  # fmt: skip
        model.eval().requires_grad_(False)
        noise, text = torch.randn(1, 16, options.frames, options.height, options.width), torch.randn(1, 512, text_dim)
        timesteps = torch.linspace(1000, 0, options.steps + 1)

    if ranks > 1:
        model.set_attention_backend("_native_cudnn")  # diffusers' default has no LSE, which its ring needs
        model.enable_parallelism(config=ContextParallelConfig(ring_degree=ranks))

    latents = start = noise.float()

    def denoise(step: int) -> torch.Tensor:
        """A step of Euler's method, of which step 0 starts from noise. Returns what all steps changed."""
        nonlocal latents
        latents = start if step == 0 else latents
        velocity = model(hidden_states=latents.bfloat16(), timestep=timesteps[step : step + 1], encoder_hidden_states=text, return_dict=False)[0]
        latents = latents + velocity.float() / options.steps
        return latents - start

    def switch(recipe: fp8attn.Recipe) -> object:
        report = fp8attn.integrations.diffusers.register(recipe=recipe, **whole_model.switch_options(device))
        model.set_attention_backend("fp8attn")
        return report

    whole_model.compare(options.attn, denoise, switch, options)


if __name__ == "__main__":
    main()
