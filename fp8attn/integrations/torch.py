"""PyTorch's own dispatcher: fp8attn instead of its flash and cuDNN attention, for all models of the process.

fp8attn.integrations.torch.activate()
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..calibration.interception import no_fast_path
from ..calibration.replacing import by_fp8attn, with_lse
from ..recipe import DEFAULT_RECIPE, Recipe
from ..validate import Arguments, Backend
from .switching import MIN_KEYS, Decode, Policy, Report, attempted, check_one_recipe

NAME = "FP8ATTN"
"""The name for torch.nn.attention.activate_flash_attention_impl."""

ON_GPU = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention")
"""The operators of CUDA tensors to which F.scaled_dot_product_attention hands calls that fp8attn takes."""

ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
"""The operator of CPU tensors."""

Call = dict[str, Any]
"""The arguments of an operator by name."""

NOT_SQUARE = "causal attention with other numbers of queries than keys"


def activate(
    recipe: Recipe = DEFAULT_RECIPE, *, min_keys: int = MIN_KEYS, decode: Decode = "sdpa", backend: Backend = "auto", logsumexp: bool = False
) -> Report:
    """Replace the operators behind F.scaled_dot_product_attention, for every module and thread of the process.

    Calls of half precision without a mask on a GPU go to fp8attn: in eager code, in graphs of torch.compile and in
    nn.MultiheadAttention. CPU tensors go to fp8attn, in float32, too, if `backend` is `modelled` or `reference`. Other
    calls go to PyTorch's kernels as before: masks, head dims of value that differ from those of query, gradients,
    dropout and few keys. Activating again replaces the earlier activation. Another implementation that is activated by
    torch.nn.attention.activate_flash_attention_impl ends it.

    The fast path of nn.MultiheadAttention and nn.TransformerEncoderLayer, which may call no attention operator, is off
    until `deactivate`.

    Args:
        recipe: of every call.
        min_keys, decode, backend: as of `fp8attn.patch`.
        logsumexp: whether to compute the log-sum-exp (B, Hq, Sq) for code that calls the operators directly, such as
            ring attention. F.scaled_dot_product_attention doesn't use it. Without it, it is NaN.

    Returns:
        the report. It names calls by their lengths, because operators don't know layers.

    Raises:
        RuntimeError: this torch has no torch.nn.attention.activate_flash_attention_impl.
        TypeError, ValueError: an argument isn't as above.
    """
    if type(logsumexp) is not bool:
        raise TypeError(f"logsumexp is {logsumexp!r}; it must be a bool")
    check_one_recipe(recipe)
    policy, registry = Policy(recipe, min_keys, decode, backend), torch.nn.attention
    if not hasattr(registry, "activate_flash_attention_impl") or not hasattr(torch.library, "get_kernel"):
        raise RuntimeError(f"torch is {torch.__version__}; it must have torch.nn.attention.activate_flash_attention_impl, as torch 2.11 has")
    report = Report()
    registry.register_flash_attention_impl(NAME, register_fn=lambda: _Activation(policy, report, logsumexp))
    registry.activate_flash_attention_impl(NAME)
    return report


def deactivate() -> None:
    """PyTorch's own kernels compute attention again. Nothing happens if fp8attn isn't active."""
    registry = torch.nn.attention
    if hasattr(registry, "current_flash_attention_impl") and registry.current_flash_attention_impl() == NAME:
        registry.restore_flash_attention_impl()


class _Activation:
    """The replaced operators, until `remove`."""

    def __init__(self, policy: Policy, report: Report, logsumexp: bool) -> None:
        self.policy, self.report, self.logsumexp = policy, report, logsumexp
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(no_fast_path())
        library = torch.library.Library("aten", "IMPL")
        self._stack.callback(library._destroy)
        if torch.cuda.is_available():
            for name in ON_GPU:
                self._replace(library, name, "CUDA", self.on_gpu)
        if policy.backend in ("modelled", "reference"):
            self._replace(library, ON_CPU, "CPU", self.on_cpu)

    def remove(self) -> None:
        """Restore PyTorch's kernels."""
        self._stack.close()

    @staticmethod
    def _replace(library: torch.library.Library, name: str, key: str, by: Callable[[Call], tuple | None]) -> None:
        """Replace an operator's kernel by a function that returns its results, or None for calls that it leaves."""
        before = torch.library.get_kernel(f"aten::{name}", key)
        parameters = getattr(torch.ops.aten, name).default._schema.arguments
        defaults = {x.name: x.default_value if x.has_default_value() else None for x in parameters}

        def kernel(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> tuple:
            results = by(defaults | dict(zip(defaults, args, strict=False)) | kwargs)
            return before.call_boxed(keys, *args, **kwargs) if results is None else results

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"[\s\S]*Overriding a previously registered kernel")
            library.impl(name, kernel, key, with_keyset=True)

    def on_gpu(self, call: Call) -> tuple | None:
        """The results of the flash or of the cuDNN operator."""
        if call.get("attn_bias") is not None or call["return_debug_mask"]:
            self.report.count(_name(call), "a mask, or a debug mask is wanted")
            return None
        done = self.attention(call, None, call.get("compute_log_sumexp", True))
        if done is None:
            return None
        out, lse = done
        seed = torch.empty(0, dtype=torch.int64, device=out.device)
        return out, lse, None, None, call["query"].shape[2], call["key"].shape[2], seed, seed.new_empty(()), out.new_empty(0)

    def on_cpu(self, call: Call) -> tuple | None:
        """The results of the operator of CPU tensors, which takes masks."""
        return self.attention(call, call["attn_mask"], True)

    def attention(self, call: Call, attn_mask: torch.Tensor | None, wants_lse: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The answer (B, Hq, Sq, D) and the LSE (B, Hq, Sq), or None if PyTorch computes the call."""
        q, k, v, causal = call["query"], call["key"], call["value"], call["is_causal"]
        a = Arguments(q, k, v, attn_mask, call["dropout_p"], causal, call["scale"], q.shape[1] != k.shape[1])
        layer, wants_lse = _name(call), wants_lse and self.logsumexp
        if causal and q.shape[2] != k.shape[2]:
            # these operators align such a mask to another corner than F.scaled_dot_product_attention
            self.report.count(layer, NOT_SQUARE)
            return None
        found: list[torch.Tensor] = []

        def computed(a: Arguments, recipe: Recipe, backend: Backend) -> torch.Tensor:
            out, lse = with_lse(a, recipe, backend) if wants_lse else (by_fp8attn(a, recipe, backend), None)
            found.append(torch.full(q.shape[:3], torch.nan, dtype=torch.float32, device=q.device) if lse is None else lse)
            return out

        out = attempted(self.policy, self.report, layer, a, computed)
        return None if out is None else (out, found[0])


def _name(call: Call) -> str:
    (_, heads, q_length, dim), kv_length = call["query"].shape, call["key"].shape[2]
    return f"{q_length} queries, {kv_length} keys, {heads} heads of {dim}"
