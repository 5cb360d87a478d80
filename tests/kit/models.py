"""Models of transformers and diffusers that tests share: tiny, with random weights, and their inputs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn


def with_continuous_batching() -> Iterator[ModuleType]:
    """transformers, whose attention functions and cache are afterwards as they were; skips where it has no continuous
    batching."""
    found = pytest.importorskip("transformers", reason="needs the package transformers")
    if not hasattr(found, "ContinuousBatchingConfig"):
        pytest.skip("transformers has no continuous batching, or an older one")
    loader, engine = found.modeling_flash_attention_utils, importlib.import_module("transformers.generation.continuous_batching.continuous_api")
    before = loader._lazy_imports, engine.PagedAttentionCache
    yield found
    (loader._lazy_imports, engine.PagedAttentionCache), loader._loaded_implementation = before, None


TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "intermediate_size": 64,
}
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 1, "head_dim": 16},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 4},
    "Gemma3Text": {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "Gemma2": {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 4, "attn_logit_softcapping": 5.0},
    "GptOss": {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 4},
}


ENCODERS = ("bert", "vit", "whisper", "t5")
DIFFUSERS = ("wan", "flux", "sd3")


def prompt(length: int, padding: int = 0) -> dict[str, torch.Tensor]:
    """Two sequences of `length` tokens; the first has `padding` fewer, on the left."""
    ids = torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :padding] = mask[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def decoder(transformers: ModuleType, kind: str, seed: int = 0) -> nn.Module:
    """A language model."""
    torch.manual_seed(seed)
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    name = {"Gemma3Text": "Gemma3"}.get(kind, kind)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **TOKENS, **DECODERS[kind])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    with torch.no_grad():  # weights so small as initial ones give scores that no cap or sink changes
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


def encoder(transformers: ModuleType, kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model that isn't a decoder, and its inputs."""
    torch.manual_seed(0)
    ids = prompt(12, 5)
    sides = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    if kind == "bert":
        return transformers.BertModel(transformers.BertConfig(**SIZES)), ids
    if kind == "vit":
        config = transformers.ViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8)
        return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}
    if kind == "whisper":
        config = transformers.WhisperConfig(
            vocab_size=64, d_model=64, max_source_positions=20, max_target_positions=20, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8,
            decoder_start_token_id=1, **sides, **TOKENS,
        )  # fmt: skip
        return transformers.WhisperModel(config), {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": ids["input_ids"]}
    config = transformers.T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return transformers.T5Model(config), {**ids, "decoder_input_ids": ids["input_ids"]}


def transformer_of(diffusers: ModuleType, kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A diffusion transformer, tiny, and its inputs."""
    torch.manual_seed(0)
    if kind == "wan":
        model = diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32,
            num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
        )  # fmt: skip
        inputs = {"hidden_states": torch.randn(1, 4, 2, 8, 8), "timestep": torch.tensor([1]), "encoder_hidden_states": torch.randn(1, 7, 16)}
    elif kind == "flux":
        model = diffusers.FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
            pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
        )  # fmt: skip
        inputs = {
            "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 7, 32), "pooled_projections": torch.randn(1, 32),
            "timestep": torch.tensor([1.0]), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(7, 3),
        }  # fmt: skip
    else:
        model = diffusers.SD3Transformer2DModel(
            sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
            caption_projection_dim=32, pooled_projection_dim=32, out_channels=4,
        )  # fmt: skip
        inputs = {
            "hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 7, 32), "pooled_projections": torch.randn(1, 32),
            "timestep": torch.tensor([1.0]),
        }  # fmt: skip
    return model.eval().requires_grad_(False), inputs


def model_of(transformers: ModuleType, diffusers: ModuleType, kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model of any kind, and its inputs, with padding where it takes a mask."""
    if kind in DECODERS:
        return decoder(transformers, kind), {**prompt(12, 5), "use_cache": False}
    model, inputs = encoder(transformers, kind) if kind in ENCODERS else transformer_of(diffusers, kind)
    return model.eval().requires_grad_(False), inputs


def output(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The first output of a model: of tokens that aren't padding, if it has one output a token."""
    with torch.no_grad():
        out = model(**inputs, return_dict=False)[0]
    mask = inputs.get("attention_mask")
    return out if mask is None or out.shape[:2] != mask.shape else out[mask.bool()]


def attention_layers(model: nn.Module) -> set[str]:
    """The names of a model's innermost modules that are called attention."""
    named = {name for name, module in model.named_modules() if "Attention" in type(module).__name__}
    return {name for name in named if not any(other.startswith(f"{name}.") for other in named)}
