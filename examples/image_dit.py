"""Denoising steps of an image transformer of Flux's sizes, with random weights: PyTorch's attention, then fp8attn's, by fp8attn.patch.

An image of 1024 x 1024 pixels and 512 tokens of text are 4,608 tokens. On a CPU the default sizes are tiny.
"""

from __future__ import annotations

import torch
import whole_model

import fp8attn


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = whole_model.parser(__doc__)
    parser.add_argument("--size", type=int, default=64 if gpu else 8, help="rows and columns of the packed latents (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=19 if gpu else 1, help="double layers, and half of the single ones (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=24 if gpu else 2, help="default: %(default)s")
    parser.add_argument("--head-dim", type=int, default=128 if gpu else 32, help="default: %(default)s")
    options = parser.parse_args()
    whole_model.needs("diffusers")
    from diffusers import FluxTransformer2DModel

    device = torch.device(options.device)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    text_dim, text_length, dim = (4096, 512, options.head_dim) if gpu else (32, 16, options.head_dim)
    with device:
        model = FluxTransformer2DModel(
            num_layers=options.layers, num_single_layers=2 * options.layers, attention_head_dim=dim, num_attention_heads=options.heads,
            joint_attention_dim=text_dim, axes_dims_rope=(dim // 4, dim * 3 // 8, dim * 3 // 8), guidance_embeds=False,
        )  # fmt: skip
        model.eval().requires_grad_(False)
        noise, text, pooled = torch.randn(1, options.size**2, 64), torch.randn(1, text_length, text_dim), torch.randn(1, 768)
        positions = torch.zeros(options.size, options.size, 3)
        positions[..., 1], positions[..., 2] = torch.arange(options.size)[:, None], torch.arange(options.size)
        timesteps = torch.linspace(1, 0, options.steps + 1)
        text_positions = torch.zeros(text_length, 3)

    latents = start = noise.float()

    def denoise(step: int) -> torch.Tensor:
        """A step of Euler's method, of which step 0 starts from noise. Returns what all steps changed."""
        nonlocal latents
        latents = start if step == 0 else latents
        velocity = model(
            hidden_states=latents.bfloat16(), encoder_hidden_states=text, pooled_projections=pooled, timestep=timesteps[step : step + 1],
            img_ids=positions.flatten(0, 1), txt_ids=text_positions, return_dict=False,
        )[0]  # fmt: skip
        latents = latents + velocity.float() / options.steps
        return latents - start

    def switch(recipe: fp8attn.Recipe) -> object:
        return fp8attn.patch(model, recipe, **whole_model.switch_options(device)).report

    whole_model.compare(options.attn, denoise, switch, options)


if __name__ == "__main__":
    main()
