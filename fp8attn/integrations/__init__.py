"""Switches models of other libraries over to fp8attn. No module here imports its library before it is asked to.

fp8attn.patch(model)                              # any module that calls F.scaled_dot_product_attention
fp8attn.integrations.transformers.register()      # then model.set_attn_implementation("fp8attn")
fp8attn.integrations.paged.register()             # then model.set_attn_implementation("fp8attn_paged"), and a cache
fp8attn.integrations.diffusers.register()         # then pipe.transformer.set_attention_backend("fp8attn")
fp8attn.integrations.torch.activate()             # all modules and threads of the process
fp8attn.integrations.comfyui.override()           # for the transformer options of a model of ComfyUI
fp8attn.integrations.flash_attn.flash_attn_func   # in place of FlashAttention's
"""

from . import comfyui, continuous_batching, diffusers, flash_attn, paged, torch, transformers
from .patching import Patched, patch
from .switching import Report

__all__ = ["Patched", "Report", "comfyui", "continuous_batching", "diffusers", "flash_attn", "paged", "patch", "torch", "transformers"]
