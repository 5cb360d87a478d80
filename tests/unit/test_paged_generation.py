"""Generation with transformers from an FP8 KV cache: the tokens of PyTorch's attention, padding, rejected tokens, and what it refuses."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn

from closeness import relative
from fp8attn.integrations import paged
from models import decoder


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    found = pytest.importorskip("transformers", reason="needs the package transformers")
    try:
        paged.register()
        paged.cache(1)
    except ImportError as error:
        pytest.skip(str(error))
    return found


@pytest.fixture(scope="module")
def model(transformers: ModuleType, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=2048, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False).to(device)


def prompt(device: torch.device, length: int, padding: int) -> dict[str, torch.Tensor]:
    """Two sequences, of which the second is padded on the left."""
    ids = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(length)).to(device)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits(model: nn.Module, implementation: str, inputs: dict[str, torch.Tensor], cache: object = None) -> torch.Tensor:
    """Of the tokens that `generate` adds: (B, n, V)."""
    model.set_attn_implementation(implementation)
    options = {} if cache is None else {"past_key_values": cache}
    found = model.generate(**inputs, **options, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return torch.stack(found.logits, 1)


@pytest.mark.parametrize("backend", ("auto", "triton"))
@pytest.mark.parametrize("length, padding, error", ((40, 0, 1e-3), (40, 13, 1e-3), (150, 0, 0.02), (300, 37, 0.02), (127, 126, 0.02)))
@pytest.mark.one_in(2)
def test_logits_are_those_of_exact_attention(model: nn.Module, device: torch.device, length: int, padding: int, error: float, backend: str) -> None:
    """But for FP8's error in complete pages. The first page is in half precision."""
    inputs = prompt(device, length, padding)
    exact = logits(model, "sdpa", inputs)
    found = logits(model, "fp8attn_paged", inputs, paged.cache(length + 6, backend=backend))
    same = (exact.argmax(-1) == found.argmax(-1)).int().cumprod(1).roll(1, 1)  # up to the first other token, which is followed by others
    same[:, 0] = 1
    assert int(same.sum()) >= 6
    assert relative(found * same[..., None], exact * same[..., None]) < error


@pytest.mark.parametrize("kind", ("Mistral", "Gemma2", "Gemma3Text", "GptOss"))
@pytest.mark.parametrize("length, padding, error", ((40, 13, 1e-3), (300, 37, 0.03)))
def test_windows_soft_caps_and_sinks_are_the_models_own(
    transformers: ModuleType, device: torch.device, kind: str, length: int, padding: int, error: float
) -> None:
    """The logits of eager attention, with windows that are shorter than the prompt."""
    model = decoder(transformers, kind).to(device)
    inputs = prompt(device, length, padding)
    exact = logits(model, "eager", inputs)
    found = logits(model, "fp8attn_paged", inputs, paged.cache(length + 6, backend="modelled"))
    assert relative(found[:, 0], exact[:, 0]) < error


def step(model: nn.Module, ids: torch.Tensor, cache: object) -> torch.Tensor:
    return model(input_ids=ids, past_key_values=cache, use_cache=True).logits


def test_rejected_tokens_leave_no_trace(model: nn.Module, device: torch.device) -> None:
    ids = prompt(device, 300, 0)["input_ids"]
    model.set_attn_implementation("fp8attn_paged")
    caches = [paged.cache(400, backend="modelled") for _ in range(2)]
    for cache in caches:
        step(model, ids[:, :250], cache)
    step(model, ids.flip(1)[:, :10], caches[0])
    caches[0].crop(-10)
    found, expected = (step(model, ids[:, 250:], cache) for cache in caches)
    assert torch.equal(found, expected)
    assert caches[0].get_seq_length() == 300 and "2 layers, 300 tokens" in repr(caches[0])


def test_what_it_refuses(model: nn.Module, device: torch.device) -> None:
    ids = prompt(device, 140, 0)["input_ids"]
    model.set_attn_implementation("fp8attn_paged")
    with pytest.raises(TypeError, match=r"the model has no cache of fp8attn\.integrations\.paged\.cache"):
        model(input_ids=ids)
    cache = paged.cache(140, backend="modelled")
    step(model, ids, cache)
    with pytest.raises(ValueError, match="max_length is 140; it must be at least 141"):
        step(model, ids[:, :1], cache)
    cache = paged.cache(140, backend="modelled")
    step(model, ids, cache)
    for layer in cache.layers:
        layer.crop(-60)
    with pytest.raises(ValueError, match="70 of the last tokens are to be removed; it must be at most 65"):
        cache.layers[0].crop(-10)
    cache.layers[0].reset()
    assert cache.layers[0].get_seq_length() == 0 and cache.layers[1].get_max_length() == 140
    for action in (
        lambda: cache.layers[0].reorder_cache(ids),
        lambda: cache.layers[0].batch_repeat_interleave(2),
        lambda: cache.layers[0].batch_select_indices(ids),
        lambda: cache.layers[0].offload(),
    ):
        with pytest.raises(NotImplementedError, match="fp8attn's cache"):
            action()
    with pytest.raises(ValueError, match="max_length is 0"):
        paged.cache(0)
    with pytest.raises(ValueError, match="backend is 'fast'"):
        paged.cache(1, backend="fast")


@pytest.mark.parametrize(
    "options, message",
    (
        (dict(position_bias=torch.zeros(1, 4, 9, 9)), "Linear has position_bias"),
        (dict(attention_mask=torch.zeros(2, 1, 9, 9)), "attention_mask has shape"),
    ),
)
def test_options_that_it_refuses(transformers: ModuleType, device: torch.device, options: dict, message: str) -> None:
    layer = paged.cache(64, backend="modelled")
    k = torch.zeros(2, 2, 9, 16, device=device)
    key, value = layer.update(k, k, 0)
    with pytest.raises(NotImplementedError, match=message):
        paged._attend(nn.Linear(1, 1), torch.zeros(2, 4, 9, 16, device=device), key, value, **{"attention_mask": None, **options})
