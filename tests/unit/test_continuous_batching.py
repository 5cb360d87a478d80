"""transformers' engine for continuous batching on fp8attn: the tokens of `generate`, by all of the engine's ways to call attention."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import GPU
from torch import nn

import fp8attn
from fp8attn.integrations import continuous_batching as batching
from models import decoder, with_continuous_batching

KINDS = ("Llama", "Mistral", "Gemma2", "Gemma3Text", "GptOss")
LENGTHS = (5, 40, 150)
NEW = 6

pytestmark = [
    pytest.mark.filterwarnings("ignore:fp8attn.sdpa computes attention of CPU tensors exactly"),
    pytest.mark.skipif(GPU, reason="attention is exact on a CPU, and the engine takes a GPU if there is one"),
]

transformers = pytest.fixture(with_continuous_batching, scope="module", name="transformers")


def prompts() -> list[list[int]]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (length,), generator=g).tolist() for length in LENGTHS]


def generated(transformers: ModuleType, model: nn.Module, **options: Any) -> list[list[int]]:
    """The engine's tokens. Prompts come in chunks, beside decode steps of others."""
    plan = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    page = "page_size" if hasattr(transformers.ContinuousBatchingConfig, "page_size") else "block_size"
    engine = transformers.ContinuousBatchingConfig(**{page: 32, "num_blocks": 64, "max_batch_tokens": 64, **options})
    found = model.generate_batch(inputs=prompts(), generation_config=plan, continuous_batching_config=engine, progress_bar=False)
    assert len(found) == len(LENGTHS)
    return [found[f"req_{i}"].generated_tokens for i in range(len(LENGTHS))]


def alone(model: nn.Module) -> list[list[int]]:
    """The tokens of plain `generate` with the model's own attention."""
    model.set_attn_implementation("eager")
    found = []
    for ids in prompts():
        out = model.generate(input_ids=torch.tensor([ids], device=model.device), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        found.append(out[0, len(ids) :].tolist())
    return found


class Calls:
    """Which functions attention is computed by."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        for name in ("varlen_sdpa", "paged_sdpa", "flash_attn_with_kvcache", "sdpa"):
            patch.setattr(batching, name, self._noted(name, getattr(batching, name)))

    def _noted(self, name: str, function: Any) -> Any:
        def noted(*arguments: Any, **options: Any) -> Any:
            self.names.append(name)
            return function(*arguments, **options)

        return noted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(2)
def test_tokens_are_those_of_generate(transformers: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Windows, soft caps and sinks too. Attention of float32 on a CPU is exact."""
    if kind == "Gemma2" and f"{batching.PAGED}flash_attention_2" in transformers.AttentionInterface._global_mapping:
        pytest.skip("the engine of this release drops soft caps")
    model = decoder(transformers, kind)
    expected, calls = alone(model), Calls(monkeypatch)
    batching.register(model=model)
    model.set_attn_implementation(batching.NAME)
    assert generated(transformers, model) == expected
    assert {*calls.names} == {"varlen_sdpa"}


@pytest.mark.parametrize("kind", ("Llama", "Mistral"))
def test_decode_steps_read_what_the_engine_keeps(transformers: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """In the model's dtype. Prefills of enough keys run in FP8, which costs no more than a token here."""
    model = decoder(transformers, kind).to(torch.bfloat16)
    expected, calls = alone(model), Calls(monkeypatch)
    batching.register(min_keys=33, backend="modelled")
    model.set_attn_implementation(batching.NAME)
    found = generated(transformers, model, max_batch_tokens=100)
    assert {*calls.names} == {"varlen_sdpa", "paged_sdpa"}
    pairs = zip(itertools.chain(*found), itertools.chain(*expected), strict=True)
    assert sum(x == y for x, y in pairs) >= len(LENGTHS) * NEW // 2


def test_block_tables_give_the_tokens_of_packed_calls(transformers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's way for decode steps on a GPU, which it takes here, too."""
    initialization = pytest.importorskip("transformers.generation.continuous_batching.initialization", reason="an older engine")
    model = decoder(transformers, "Llama").to(torch.bfloat16)
    batching.register()
    model.set_attn_implementation(batching.NAME)
    expected = generated(transformers, model)
    calls = Calls(monkeypatch)
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
    assert generated(transformers, model, max_blocks_per_request=8) == expected
    assert "flash_attn_with_kvcache" in calls.names


@pytest.mark.parametrize("kind", ("Llama", "Mistral", "GptOss"))
@pytest.mark.parametrize("scales", ((1.0, 1.0), (0.25, 2.0)))
@pytest.mark.one_in(3)
def test_blocks_in_e4m3(transformers: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str, scales: tuple[float, float]) -> None:
    """The tokens of plain `generate` from a cache whose keys and values are rounded alike."""
    model = decoder(transformers, kind)
    update = transformers.DynamicCache.update

    def rounded(self: Any, key: torch.Tensor, value: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        both = ((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale for x, scale in zip((key, value), scales, strict=True))
        return update(self, *both, *arguments, **options)

    exact = alone(model)
    with monkeypatch.context() as patch:
        patch.setattr(transformers.DynamicCache, "update", rounded)
        expected = alone(model)
    assert expected != exact
    batching.register(model=model, kv_scales=scales)
    model.set_attn_implementation(batching.NAME)
    assert generated(transformers, model) == expected
    batching.register(model=model)
    model.set_attn_implementation(batching.NAME)
    assert generated(transformers, model) == exact


def test_block_tables_of_e4m3(transformers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have half of the bytes, and decode steps read them as they are."""
    initialization = pytest.importorskip("transformers.generation.continuous_batching.initialization", reason="an older engine")
    model, kinds = decoder(transformers, "Llama").to(torch.bfloat16), []
    inner = batching.flash_attn_with_kvcache

    def noted(q: torch.Tensor, k_cache: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        kinds.append((k_cache.dtype, options["k_descale"], options["v_descale"]))
        return inner(q, k_cache, *arguments, **options)

    monkeypatch.setattr(batching, "flash_attn_with_kvcache", noted)
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
    batching.register(kv_scales=(0.5, 1.0))
    model.set_attn_implementation(batching.NAME)
    found, expected = generated(transformers, model, max_blocks_per_request=8), alone(model)
    assert {*kinds} == {(torch.uint8, 0.5, 1.0)}
    pairs = zip(itertools.chain(*found), itertools.chain(*expected), strict=True)
    assert sum(x == y for x, y in pairs) >= len(LENGTHS) * NEW // 3


@pytest.mark.parametrize("kind", KINDS)
def test_plain_calls_of_a_model(transformers: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A batch with padding, which transformers packs, and one without. Windows, soft caps and sinks are the model's."""
    model = decoder(transformers, kind)
    ids = torch.tensor([prompts()[1], [0] * 7 + prompts()[1][7:]])
    mask = (ids != 0).long()
    model.set_attn_implementation("eager")
    expected = [model(input_ids=ids[:1]).logits, model(input_ids=ids, attention_mask=mask).logits]
    calls = Calls(monkeypatch)
    batching.register(model=model)
    model.set_attn_implementation(batching.NAME)
    found = [model(input_ids=ids[:1]).logits, model(input_ids=ids, attention_mask=mask).logits]
    assert {*calls.names} == {"sdpa", "varlen_sdpa"}
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1][mask.bool()], expected[1][mask.bool()], rtol=1e-4, atol=1e-4)


def test_a_vision_tower_attends_to_all_images_at_once(transformers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2.5-VL's, whose layers have windows of an image or whole images: one call for each layer, without masks."""
    config = transformers.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(
        depth=3, hidden_size=160, num_heads=2, intermediate_size=64, out_hidden_size=32, window_size=112, fullatt_block_indexes=[1]
    )
    torch.manual_seed(0)
    tower = transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel(config).eval().requires_grad_(False)
    grid = torch.tensor([[1, 12, 16], [1, 8, 8]])  # two images of 192 and 64 patches
    patches = torch.randn(256, 3 * 2 * config.patch_size**2)
    tower.set_attn_implementation("eager")
    expected = tower(patches, grid)
    calls = Calls(monkeypatch)
    batching.register()
    tower.set_attn_implementation(batching.NAME)
    found = tower(patches, grid)
    assert calls.names == ["varlen_sdpa"] * 3
    for x, y in zip(*(value if isinstance(value, tuple) else (value,) for value in (found[0], expected[0])), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_what_it_refuses(transformers: ModuleType) -> None:
    for name in ("fp8attn", "flash_attention_2", "fp8attn_flash", 3):
        with pytest.raises(ValueError, match="name is"):
            batching.register(name=name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="recipe"):
        batching.register(fp8attn.Recipe(recent=128))
    with pytest.raises(TypeError, match="recipe is a str"):
        batching.register("int8")  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="Linear has softcap, which the engine of this release of transformers drops"):
        batching._with_window(lambda module: None)(nn.Linear(1, 1), softcap=50.0)
    for scales, error, message in (
        ((1.0,), TypeError, "kv_scales is"), (1.0, TypeError, "kv_scales is 1.0"), ((1.0, 0.0), ValueError, "positive"),
        ((True, 1.0), TypeError, "keys"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            batching.register(kv_scales=scales)  # type: ignore[arg-type]
    x = torch.zeros(1, 4, 2, 16)
    with pytest.raises(ValueError, match=r"dropout_p is 0.1; it must be 0"):
        batching._Flash(fp8attn.PRECISE, 1, "auto").func(x, x, x, 0.1)
    before = transformers.modeling_flash_attention_utils._lazy_imports
    batching.register(name="other_flash2")
    after = transformers.modeling_flash_attention_utils._lazy_imports
    assert isinstance(after, batching._Loader) and not isinstance(after.before, batching._Loader) and "other_flash2" in after.known
    others: list[str] = []
    batching._Loader(lambda name, *_: (others.append(name),), after.known)("nobody/has_flash2", None)
    assert before is not after and others == ["nobody/has_flash2"]
