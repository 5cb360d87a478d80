"""Hugging Face transformers: an attention implementation, with the mask function that it needs.

fp8attn.integrations.transformers.register()
model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fp8attn")

For a model that is loaded already, call model.set_attn_implementation("fp8attn").
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..api import varlen_sdpa
from ..calibration.calibrated import Calibration
from ..calibration.names import layer_names
from ..recipe import DEFAULT_RECIPE, PRECISE, Quantized, Recipe
from ..reference import Window
from ..validate import Arguments, Backend, unsupported_varlen_recipe
from .short_packed import MIN_PACKED_KEYS, VarlenAttn
from .switching import MIN_KEYS, Decode, Policy, Report, attempted

OLDEST = "4.54"
"""The first release of transformers with mask functions and `set_attn_implementation`."""

LAYER = "_fp8attn_layer"
"""The attribute of a module that holds its name, where `register` gets the model."""

WINDOW = "_fp8attn_window"
"""The attribute of a mask that hides what a window hides, and nothing else: the window of `fp8attn.sdpa`, and the
mask's version. What a model makes of the mask doesn't have it."""


def register(
    name: str = "fp8attn",
    recipe: Recipe | Calibration = PRECISE,
    *,
    model: torch.nn.Module | None = None,
    min_keys: int = MIN_KEYS,
    decode: Decode = "sdpa",
    backend: Backend = "auto",
) -> Report:
    """Register fp8attn with transformers as an attention implementation, for all models.

    If it is registered again, the new registration replaces the old one.

    Causal attention, padding, sliding windows, static and dynamic caches, grouped keys (not repeated), cross attention,
    position biases, learned sinks and soft caps go to fp8attn. Soft caps beside padding go to FlexAttention on a GPU,
    and short calls with soft caps or sinks to the model's own eager attention. One query with a soft cap or sinks is
    computed in the model's dtype by PyTorch's products, without repeated keys. Other calls that fp8attn doesn't take go
    to transformers' SDPA. The report counts them. Windows without padding are windows of `fp8attn.sdpa`, outside of
    graphs of torch.compile: their masks aren't read. Packed batches, with cu_seq_lens_q and cu_seq_lens_k, go to
    fp8attn.varlen_sdpa with all of these: no mask of all tokens by all tokens is read. On a GPU, PyTorch's varlen_attn
    computes those of which no sequence has 512 keys, without soft cap and sinks.

    Args:
        name: that `attn_implementation` takes.
        model: one whose layers the report names as the model does, such as "model.layers.3.self_attn". The layers of
            other models are class and index, as in "LlamaAttention 3".
        recipe: of every call. By default Q and K are int8: over a language model's layers, errors are about half of
            those of e4m3, in the same time. A calibration needs `model`; of one with parts of a diffusion model's
            steps, the choices for all steps count.
        min_keys, decode, backend: as of `fp8attn.patch`.

    Returns:
        the report of all calls.

    Raises:
        ImportError: transformers isn't installed, or is too old.
        TypeError, ValueError: an argument isn't as above.
    """
    if not isinstance(name, str) or not name or name in ("eager", "sdpa", "flex_attention"):
        raise ValueError(f"name is {name!r}; it must be a name that transformers doesn't have itself")
    try:
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as error:
        raise ImportError(f"fp8attn.integrations.transformers needs transformers {OLDEST} or newer: pip install 'transformers>={OLDEST}'") from error
    if isinstance(recipe, Calibration) and model is None:
        raise TypeError("recipe is a Calibration, and model is None; model must be the one that was calibrated: its layers have the recipes' names")
    implementation = _Implementation(Policy(recipe, min_keys, decode, backend), sdpa_attention_forward)
    for module, names in {} if model is None else layer_names(model).items():
        module.__dict__[LAYER] = names[0]

    def fp8attn_forward(module, query, key, value, attention_mask, **options):
        return implementation(_Call(module, query, key, value, attention_mask, options))

    AttentionInterface.register(name, fp8attn_forward)
    AttentionMaskInterface.register(name, functools.partial(_mask_with_window, sdpa_mask))
    return implementation.report


def _mask_with_window(sdpa_mask: Callable[..., torch.Tensor | None], *arguments: Any, **options: Any) -> torch.Tensor | None:
    """The mask that transformers makes for SDPA, with its window where that is all it hides."""
    width, of_chunks = options.get("local_size"), getattr(options.get("config"), "attention_chunk_size", None) is not None
    skips = options.get("allow_is_causal_skip", True) or options.get("allow_is_bidirectional_skip", False)
    function = options.get("mask_function")
    if width is None or function is None or of_chunks or not skips or torch.compiler.is_compiling():
        return sdpa_mask(*arguments, **options)
    # without local_size there is no mask if nothing but the window hides keys, and else the same one
    mask = sdpa_mask(*arguments, **options | {"local_size": None})
    if mask is not None:
        return mask
    mask = sdpa_mask(*arguments, **options)
    if mask is not None and 1 < mask.shape[2] <= mask.shape[3]:
        setattr(mask, WINDOW, (_window_of(function, width), _version_of(mask)))
    return mask


def _version_of(mask: torch.Tensor) -> int | None:
    """A number that changes when the mask does. Masks that are made in inference mode have none."""
    return None if mask.is_inference() else mask._version


def _window_of(mask_function: Callable[..., torch.Tensor], width: int) -> Window:
    """The window of a mask function, which a row in the middle shows. It is no wider than `width`."""
    zero = torch.zeros((), dtype=torch.int64)
    shown = mask_function(zero, zero, torch.tensor(width), torch.arange(2 * width + 1)).nonzero()
    return width - int(shown[0]), int(shown[-1]) - width


Answer = tuple[torch.Tensor, torch.Tensor | None]
"""out (B, Sq, Hq, Dv), and None or the weights of the model's eager attention."""


@dataclass(frozen=True, eq=False)
class _Call:
    """The arguments of an attention function of transformers.

    Attributes:
        query: (B, Hq, Sq, D).
        key, value: (B, Hkv, Sk, D).
        attention_mask: None; or (B, 1, Sq, Sk), bool, True for keys that are attended to, or additive.
        options: dropout, scaling, is_causal, position_bias, softcap, s_aux and what else transformers passes.
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attention_mask: torch.Tensor | None
    options: dict[str, Any]

    @property
    def layer(self) -> str:
        """The module's name if `register` got the model, else its class and index."""
        name = self.module.__dict__.get(LAYER)
        if name is not None:
            return name
        index = getattr(self.module, "layer_idx", None)
        return type(self.module).__name__ if index is None else f"{type(self.module).__name__} {index}"

    @property
    def is_causal(self) -> bool:
        """Whether a call without a mask is causal, as transformers' SDPA decides it."""
        given = self.options.get("is_causal")
        causal = getattr(self.module, "is_causal", True) if given is None else given
        return bool(self.query.shape[2] > 1 and self.attention_mask is None and causal)

    @property
    def is_one_query(self) -> bool:
        """Whether it is one that `_of_one_query` takes: a step of decoding."""
        return self.query.shape[2] == 1 and not self.options.get("dropout") and self.options.get("position_bias") is None

    @property
    def window(self) -> Window | None:
        """The window that is all that the mask hides, or None. torch.compile knows no attributes of tensors."""
        mask = self.attention_mask
        if mask is None or torch.compiler.is_compiling() or self.options.get("position_bias") is not None:
            return None
        fits = mask.dim() == 4 and mask.shape[2:] == (self.query.shape[2], self.key.shape[2])
        window, version = getattr(mask, WINDOW, (None, None))
        return window if fits and version == _version_of(mask) else None

    @property
    def packing(self) -> _Packing | None:
        """The lengths of a packed batch, of a module whose mask is causal, a window, or none; else None."""
        starts_q, starts_k = (self.options.get(f"cu_seq_lens_{x}") for x in "qk")
        if starts_q is None or starts_k is None or self.query.shape[0] != 1 or self.query.shape[2] != self.key.shape[2]:
            return None
        chunked = getattr(getattr(self.module, "config", None), "attention_chunk_size", None) is not None
        if chunked or self.options.get("position_bias") is not None:
            return None
        given, width = self.options.get("is_causal"), self.options.get("sliding_window")
        causal = bool(getattr(self.module, "is_causal", True) if given is None else given)
        # max_length_q may be a tensor, which the host would wait for
        longest_q, longest_k = (x if isinstance(x, int) else None for x in (self.options.get(f"max_length_{x}") for x in "qk"))
        window = None if width is None else (width - 1, 0 if causal else width - 1)
        return _Packing(starts_q.to(torch.int32), starts_k.to(torch.int32), longest_q, longest_k, causal, window)

    def by(self, function: Callable[..., Answer], attention_mask: torch.Tensor | None) -> Answer:
        """The call by another attention function of transformers."""
        return function(self.module, self.query, self.key, self.value, attention_mask, **self.options)


@dataclass(frozen=True, eq=False)
class _Packing:
    """Where the sequences of a packed batch lie, and what their rows see: arguments of fp8attn.varlen_sdpa."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    is_causal: bool
    window: Window | None

    def attend_if_short(self, call: _Call, min_keys: int, varlen_attn: VarlenAttn) -> torch.Tensor | None:
        """Attention (1, T, Hq, D) in the model's dtype, if no sequence has so many keys and PyTorch takes the call."""
        options, longest_q, longest_k = call.options, self.max_seqlen_q, self.max_seqlen_k
        if longest_q is None or longest_k is None or longest_k >= min_keys or options.get("dropout"):
            return None
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (call.query, call.key, call.value))
        if not varlen_attn.takes(q, k, v, options.get("softcap") or 0.0, options.get("s_aux")):
            return None
        lengths, longest = (self.cu_seqlens_q, self.cu_seqlens_k), (longest_q, longest_k)
        return varlen_attn((q, k, v), lengths, longest, self.is_causal, self.window, options.get("scaling")).unsqueeze(0)

    def attend(self, options: dict[str, Any], a: Arguments, recipe: Recipe, backend: Backend) -> torch.Tensor:
        """Attention (1, Hq, T, Dv) of a call of the batch with `options` of transformers."""
        sinks = options.get("s_aux")
        assert not isinstance(a.query, Quantized) and not isinstance(a.key, Quantized) and not isinstance(a.value, Quantized)
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (a.query, a.key, a.value))
        out = varlen_sdpa(
            q, k, v, self.cu_seqlens_q, self.cu_seqlens_k, max_seqlen_q=self.max_seqlen_q, max_seqlen_k=self.max_seqlen_k,
            is_causal=self.is_causal, window=self.window, softcap=options.get("softcap") or 0.0, sinks=None if sinks is None else sinks.float(),
            scale=a.scale, recipe=recipe, backend=backend,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out.transpose(0, 1).unsqueeze(0)


class _Implementation:
    """An attention function of transformers."""

    def __init__(self, policy: Policy, by_sdpa: Callable[..., Answer]) -> None:
        self.policy, self.by_sdpa, self.report, self.varlen_attn = policy, by_sdpa, Report(), VarlenAttn.find()

    def __call__(self, call: _Call) -> Answer:
        # calls in graphs aren't counted, and a name would be a guard
        layer = "" if torch.compiler.is_compiling() and not self.policy.needs_names else call.layer
        query, key, value, options, causal = call.query, call.key, call.value, call.options, call.is_causal
        packing = call.packing
        short = None if packing is None else packing.attend_if_short(call, min(self.policy.min_keys, MIN_PACKED_KEYS), self.varlen_attn)
        if short is not None:
            self.report.count(layer, f"packed sequences of fewer than {MIN_PACKED_KEYS} keys: PyTorch's varlen_attn")
            return short, None
        if packing is not None and self.packs(layer):
            packed = Arguments(
                query, key, value, None, options.get("dropout", 0.0), False, options.get("scaling"), True, recipe=DEFAULT_RECIPE
            )  # fmt: skip
            out = attempted(self.policy, self.report, layer, packed, functools.partial(packing.attend, options))
            if out is not None:
                return out.transpose(1, 2).contiguous(), None
        mask, window, softcap, sinks = call.attention_mask, call.window, options.get("softcap") or 0.0, options.get("s_aux")
        if window is not None:
            mask, causal = None, window[1] == 0
        if causal and key.shape[2] > query.shape[2]:  # the rest of a static cache
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        if options.get("position_bias") is not None:
            mask, causal = _biased(options["position_bias"], mask, causal, key.shape[2]), False
        if softcap and mask is not None and not call.is_one_query:
            by = "FlexAttention" if self.flexes(call) else "the model's own eager attention"
            self.report.count(layer, f"a soft cap beside a mask: {by}")
            return self.with_soft_cap(call)
        arguments = Arguments(
            query, key, value, mask, options.get("dropout", 0.0), causal, options.get("scaling"), query.shape[1] != key.shape[1],
            window=window, softcap=softcap, sinks=None if sinks is None else sinks.float(),
            recipe=DEFAULT_RECIPE,  # torch.compile can't trace this default
        )  # fmt: skip
        out = attempted(self.policy, self.report, layer, arguments)
        if out is not None:
            return out.transpose(1, 2).contiguous(), None
        if (softcap or sinks is not None) and call.is_one_query:
            return _of_one_query(call), None
        if softcap:
            return self.with_soft_cap(call)
        return call.by(self.by_sdpa, call.attention_mask) if sinks is None else _eager(call)  # SDPA has no sinks

    def packs(self, layer: str) -> bool:
        """Whether a layer's recipe is made for packed sequences."""
        recipe = self.policy.recipe_for(layer, False)
        return isinstance(recipe, Recipe) and unsupported_varlen_recipe(recipe) is None

    def flexes(self, call: _Call) -> bool:
        """Whether FlexAttention computes a call with a soft cap that fp8attn doesn't. With a mask, too, Triton's kernel
        could, in 1.1 to 1.6 times its time."""
        long = call.query.shape[2] > 1 and call.key.shape[2] >= self.policy.min_keys
        return long and call.query.device.type == "cuda" and not call.options.get("dropout") and call.options.get("s_aux") is None

    def with_soft_cap(self, call: _Call) -> Answer:
        """A call with a soft cap that fp8attn doesn't compute."""
        if not self.flexes(call):
            return _eager(call)
        from transformers.integrations.flex_attention import compile_friendly_flex_attention

        return _flex(call, functools.partial(compile_friendly_flex_attention, training=call.module.training))


def _biased(position_bias: torch.Tensor, attention_mask: torch.Tensor | None, causal: bool, keys: int) -> torch.Tensor:
    """The sum of a position bias (1 or B, Hq, Sq, Sk or more) and of a mask, with -inf for hidden keys."""
    bias = position_bias[..., :keys]
    if attention_mask is None and causal:
        attention_mask = _lower_triangle(bias.shape[2], keys, bias.device)
    if attention_mask is None:
        return bias
    return bias.masked_fill(~attention_mask, -torch.inf) if attention_mask.dtype == torch.bool else bias + attention_mask


def _lower_triangle(rows: int, keys: int, device: torch.device) -> torch.Tensor:
    """A causal mask aligned to the top left: bool (1, 1, Sq, Sk)."""
    return (torch.arange(keys, device=device) <= torch.arange(rows, device=device)[:, None])[None, None]


def _of_one_query(call: _Call) -> torch.Tensor:
    """Attention (B, 1, Hq, Dv) of one query of each sequence, with a mask, a soft cap and sinks.

    The rows of a product are the query heads that share keys, so that keys and values are read once. The softmax is in
    float32, and scores and weights are in the model's dtype.
    """
    query, key, value, options, mask = call.query, call.key, call.value, call.options, call.attention_mask
    batch, heads, _, dim = query.shape
    rows = query.reshape(batch, key.shape[1], -1, dim)
    given = options.get("scaling")
    scores = torch.matmul(rows, key.transpose(2, 3)).float() * (dim**-0.5 if given is None else given)
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:  # (B, 1, 1, Sk) or of heads; there may be keys behind those of the mask
        mask = mask[..., : key.shape[2]]
        mask = mask if mask.shape[1] == 1 else mask.reshape(batch, *rows.shape[1:3], -1)
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(1, *rows.shape[1:3], 1).expand(*scores.shape[:3], 1)), -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[2]].to(value.dtype)
    return torch.matmul(weights, value).reshape(batch, 1, heads, -1)


def _flex(call: _Call, flex_attention: Callable[..., Any]) -> Answer:
    """Attention with a soft cap by FlexAttention."""
    cap, mask, causal = call.options["softcap"], call.attention_mask, call.is_causal

    def score_mod(score, batch, head, row, key):
        score = cap * torch.tanh(score / cap)
        if mask is None:
            return torch.where(key <= row, score, -torch.inf) if causal else score
        return torch.where(mask[batch, 0, row, key], score, -torch.inf) if mask.dtype == torch.bool else score + mask[batch, 0, row, key]

    out: torch.Tensor = flex_attention(
        call.query, call.key, call.value, score_mod=score_mod, scale=call.options.get("scaling"), enable_gqa=call.query.shape[1] != call.key.shape[1]
    )
    return out.transpose(1, 2).contiguous(), None


def _eager(call: _Call) -> Answer:
    """The model's eager attention, which takes additive masks.

    Raises:
        NotImplementedError: the model has none.
    """
    forward = getattr(sys.modules[type(call.module).__module__], "eager_attention_forward", None)
    if forward is None:
        raise NotImplementedError(f"{type(call.module).__name__} has no eager attention; use attn_implementation='flex_attention' for this model")
    mask = call.attention_mask
    if mask is None and call.is_causal:
        mask = _lower_triangle(call.query.shape[2], call.key.shape[2], call.query.device)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=call.query.dtype).masked_fill(~mask, torch.finfo(call.query.dtype).min)
    return call.by(forward, mask)
