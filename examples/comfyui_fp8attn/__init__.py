"""A node for ComfyUI that computes a model's attention in FP8. Put this folder into ComfyUI's custom_nodes."""

from __future__ import annotations

from typing import Any

import fp8attn

RECIPES = {"default": fp8attn.Recipe(), "precise": fp8attn.PRECISE}


class Fp8Attention:
    """Gives a model whose attention fp8attn computes. Short calls stay with ComfyUI's own attention."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "model_patches/attention"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {
            "required": {
                "model": ("MODEL",),
                "recipe": (list(RECIPES), {"default": "default"}),
                "min_keys": ("INT", {"default": 2048, "min": 0, "max": 1 << 20, "tooltip": "Calls with fewer keys stay with ComfyUI's attention."}),
            }
        }

    def patch(self, model: Any, recipe: str, min_keys: int) -> tuple[Any]:
        """A copy of the model with the override in its transformer options."""
        override = fp8attn.integrations.comfyui.override(RECIPES[recipe], min_keys=min_keys)
        model = model.clone()
        model.model_options.setdefault("transformer_options", {})["optimized_attention_override"] = override
        return (model,)


NODE_CLASS_MAPPINGS = {"Fp8Attention": Fp8Attention}
NODE_DISPLAY_NAME_MAPPINGS = {"Fp8Attention": "FP8 attention (fp8attn)"}
