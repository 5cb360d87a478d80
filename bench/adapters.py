"""Attention of other libraries, called through their documented interfaces if they are installed. No library is
required, and none is copied here.

Inputs are converted to a library's layout, FP8 format and scales outside of the timed part. Per-tensor scales are
amax / 448.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from fp8attn.recipe import E4M3, E4M3_MAX

from . import command_line
from .cases import Tensors
from .command_line import UsageError
from .peers import END_TO_END, KERNEL, OWN, PYTORCH, Attention, Peer, Problem, needs_gpu

WORKSPACE_BYTES = 256 << 20


FLASH3 = ("flash_attn_interface", "fa3_fwd_interface")
"""The modules that FlashAttention-3 may have: that of its repository's folder hopper, and that of the wheel fa3-fwd."""


def installed(modules: Sequence[str]) -> str | None:
    """The first of some modules that is installed, or None."""
    return next((name for name in modules if name in sys.modules or importlib.util.find_spec(name.split(".")[0]) is not None), None)


def lacking(how: str, *modules: str) -> Callable[[], str | None]:
    """A function that returns what is missing (a GPU, or all of some modules) and how to get it, or None."""

    def needs() -> str | None:
        there = installed(modules) is not None
        return ", and ".join(part for part in (needs_gpu(), None if there else how) if part is not None) or None

    return needs


def flash3() -> Any:
    """FlashAttention-3.

    Raises:
        ImportError: it isn't installed.
    """
    return importlib.import_module(installed(FLASH3) or FLASH3[0])


needs_flash3 = lacking("FlashAttention-3: pip install fa3-fwd, or its repository's folder hopper, installed from source", *FLASH3)
needs_vllm = lacking("pip install vllm, whose FlashAttention-3 it is", "vllm")


def vllm_flash3() -> Callable[..., torch.Tensor]:
    """flash_attn_varlen_func of vLLM's FlashAttention-3, which accumulates P·V of e4m3 in two levels.

    Raises:
        ImportError: vLLM isn't installed.
    """
    return functools.partial(importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func, fa_version=3)


def per_tensor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x in e4m3, and the float32 multiplier that restores it."""
    scale = (x.abs().amax().float() / E4M3_MAX).clamp(min=1e-12)
    return (x / scale).to(E4M3), scale


def sequence_first(x: torch.Tensor) -> torch.Tensor:
    """(B, H, S, D) as (B, S, H, D), contiguous."""
    return x.transpose(1, 2).contiguous()


def _flex(problem: Problem) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case = problem.case
    torch._dynamo.reset()  # after eight shapes it would fall back to uncompiled code
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask = None
    if case.causal:
        mask = create_block_mask(
            lambda b, h, query, key: query >= key, B=None, H=None, Q_LEN=case.q_length, KV_LEN=case.kv_length, device=str(problem.device)
        )
    gqa = case.q_heads != case.kv_heads
    return lambda i: compiled(*problem.sets[i % len(problem.sets)], block_mask=mask, enable_gqa=gqa)


def _cudnn(problem: Problem) -> Attention:
    """cuDNN's graph operation sdpa_fp8.

    On Hopper its output is e4m3, in units of V's scale. It is in range, because it is a mean of V's rows.
    """
    cudnn = importlib.import_module("cudnn")
    case = problem.case
    types = cudnn.data_type
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(io_data_type=types.FP8_E4M3, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, handle=handle)
    sets = [[per_tensor(x) for x in tensors] for tensors in problem.sets]
    operands = {
        name: graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()), data_type=types.FP8_E4M3)
        for name, (x, _) in zip("qkv", sets[0], strict=True)
    }
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scales = {name: graph.tensor(name=name, dim=[1] * 4, stride=[1] * 4, data_type=types.FLOAT) for name in names}
    out, _, *amax = graph.sdpa_fp8(
        **operands, **scales, attn_scale=1 / math.sqrt(case.head_dim), use_causal_mask=case.causal, generate_stats=False, name="sdpa"
    )
    shape = (case.batch, case.q_heads, case.q_length, case.value_dim)
    out.set_output(True).set_dim(list(shape)).set_stride(list(torch.empty(shape, device="meta").stride()))
    for one in amax:
        one.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(types.FLOAT)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=problem.device)

    def number(x: torch.Tensor | float) -> torch.Tensor:
        return torch.as_tensor(x, dtype=torch.float32, device=problem.device).reshape(1, 1, 1, 1)

    # S is a probability, so the factor 448 fills e4m3's range
    constants = {scales["scale_s"]: number(E4M3_MAX), scales["descale_s"]: number(1 / E4M3_MAX)}
    constants |= {one: number(0.0) for one in amax}
    packs = []
    for (q8, q_scale), (k8, k_scale), (v8, v_scale) in sets:
        restores = {scales["descale_q"]: number(q_scale), scales["descale_k"]: number(k_scale), scales["descale_v"]: number(v_scale)}
        packs.append({operands["q"]: q8, operands["k"]: k8, operands["v"]: v8, scales["scale_o"]: number(1 / v_scale), **restores, **constants})

    def attention(i: int) -> torch.Tensor:
        result = torch.empty(shape, dtype=E4M3, device=problem.device)
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(problem.device).cuda_stream)
        graph.execute({**packs[i % len(packs)], out: result}, workspace, handle=handle)
        return result

    return attention


def _in_v_scales(problem: Problem, out: torch.Tensor) -> torch.Tensor:
    return out.float() * per_tensor(problem.sets[0][2])[1]


def _flash3(fp8: bool, problem: Problem) -> Attention:
    """flash_attn_func of FlashAttention-3: (B, S, H, D); in FP8, one scale per batch entry and key/value head."""
    function = flash3().flash_attn_func
    causal = problem.case.causal
    per_head = (problem.case.batch, problem.case.kv_heads)

    def arguments(tensors: Tensors) -> tuple[list[torch.Tensor], dict[str, Any]]:
        if not fp8:
            return [sequence_first(x) for x in tensors], {}
        quantized = [per_tensor(sequence_first(x)) for x in tensors]
        scales = {f"{name}_descale": scale.expand(per_head) for name, (_, scale) in zip("qkv", quantized, strict=True)}
        return [x for x, _ in quantized], scales

    sets = [arguments(tensors) for tensors in problem.sets]

    def attention(i: int) -> torch.Tensor:
        tensors, scales = sets[i % len(sets)]
        found = function(*tensors, causal=causal, **scales)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)  # the first versions return the LSE, too

    return attention


def packed(x: torch.Tensor) -> torch.Tensor:
    """(B, H, S, D) as (B · S, H, D), contiguous: the packed layout, one request after the other."""
    return sequence_first(x).flatten(0, 1)


def starts(problem: Problem, length: int) -> torch.Tensor:
    """Start offsets of requests of one length, and the end of the last one: int32 (B + 1,)."""
    return torch.arange(problem.case.batch + 1, dtype=torch.int32, device=problem.device) * length


def unpacked(problem: Problem, out: torch.Tensor) -> torch.Tensor:
    """(B · Sq, Hq, Dv) as (B, Hq, Sq, Dv)."""
    return out.unflatten(0, (problem.case.batch, problem.case.q_length)).transpose(1, 2)


def _flash3_two_level(problem: Problem) -> Attention:
    """vLLM's FlashAttention-3 with two-level accumulation of P·V.

    Requests are packed, and scales are expanded from one number.
    """
    function, case = vllm_flash3(), problem.case
    q_starts, k_starts = starts(problem, case.q_length), starts(problem, case.kv_length)

    def arguments(tensors: Tensors) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        quantized = [per_tensor(packed(x)) for x in tensors]
        scales = {f"{name}_descale": scale.expand(case.batch, case.kv_heads) for name, (_, scale) in zip("qkv", quantized, strict=True)}
        return [x for x, _ in quantized], scales

    sets = [arguments(tensors) for tensors in problem.sets]

    def attention(i: int) -> torch.Tensor:
        tensors, scales = sets[i % len(sets)]
        out = function(
            *tensors, max_seqlen_q=case.q_length, cu_seqlens_q=q_starts, max_seqlen_k=case.kv_length, cu_seqlens_k=k_starts,
            causal=case.causal, **scales,
        )  # fmt: skip
        return unpacked(problem, out)

    return attention


def _sage(problem: Problem) -> Attention:
    """sageattention.sageattn, which chooses the GPU's kernel, quantizes and attends."""
    function = importlib.import_module("sageattention").sageattn
    return lambda i: function(*problem.sets[i % len(problem.sets)], tensor_layout="HND", is_causal=problem.case.causal)


def _sage_hopper() -> Callable[..., object]:
    """SageAttention 2's Hopper kernel, wherever this version has it.

    Raises:
        ImportError: it has none.
    """
    name = "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf"
    places = ("sageattention._qattn_sm90", "sageattention.core._qattn_sm90", "sageattention.sm90_compile")  # the last one wraps it as an operator
    for place in places:
        package, _, module = place.rpartition(".")
        try:
            found: Any = importlib.import_module(place)
        except ImportError:
            found = getattr(importlib.import_module(package), module, None)
        if hasattr(found, name):
            return getattr(found, name)
    raise ImportError(f"none of {', '.join(places)} has {name}; SageAttention was built for another GPU, or is another version")


def _sage_kernel(problem: Problem) -> Attention:
    """SageAttention 2's Hopper kernel alone, called as in sageattn_qk_int8_pv_fp8_cuda_sm90.

    No public function leaves quantization out.
    """
    core = importlib.import_module("sageattention.core")
    case = problem.case
    if case.kv_length % 128:
        raise ValueError(f"{case.kv_length} keys; without its own padding the kernel takes multiples of 128")
    if case.head_dim not in (64, 128):  # its own error ends the process where its exceptions don't cross libraries
        raise ValueError(f"head dim is {case.head_dim}; it takes 64 or 128")
    kernel = _sage_hopper()

    def quantized(tensors: Tensors) -> tuple[torch.Tensor, ...]:
        q, k, v = tensors
        mean = k.mean(dim=2, keepdim=True)
        blocks = {"BLKQ": 64, "WARPQ": 16, "BLKK": 128, "WARPK": 128}
        q8, q_scale, k8, k_scale = core.per_thread_int8_triton(q, k, mean, tensor_layout="HND", **blocks)
        v8, v_scale, _ = core.per_channel_fp8(v, tensor_layout="HND", smooth_v=False)
        return q8, k8, v8, q_scale, k_scale, v_scale

    sets = [quantized(tensors) for tensors in problem.sets]
    heads_first, per_thread, no_lse = 1, 3, 0

    def attention(i: int) -> torch.Tensor:
        q8, k8, v8, q_scale, k_scale, v_scale = sets[i % len(sets)]
        out = torch.empty_like(problem.sets[0][0])
        softmax_scale = case.head_dim**-0.5
        kernel(q8, k8, v8, out, q_scale, k_scale, v_scale, heads_first, int(case.causal), per_thread, softmax_scale, no_lse)
        return out

    return attention


def _flashinfer(problem: Problem) -> Attention:
    """flashinfer.BatchPrefillWithRaggedKVCacheWrapper, planned once: (tokens, H, D)."""
    flashinfer = importlib.import_module("flashinfer")
    case = problem.case
    sets = [tuple(packed(x) for x in tensors) for tensors in problem.sets]
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=problem.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        starts(problem, case.q_length), starts(problem, case.kv_length), case.q_heads, case.kv_heads, case.head_dim,
        head_dim_vo=case.value_dim, causal=case.causal, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda i: unpacked(problem, wrapper.run(*sets[i % len(sets)]))


def _flashinfer_fp8(problem: Problem) -> Attention:
    """flashinfer.single_prefill_with_kv_cache in e4m3: one request, one scale per head."""
    function = importlib.import_module("flashinfer").single_prefill_with_kv_cache
    case = problem.case
    if case.batch != 1:
        raise ValueError(f"batch {case.batch}; its FP8 call takes one request")

    def arguments(tensors: Tensors) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        quantized = [per_tensor(sequence_first(x)[0]) for x in tensors]
        scales = {f"scale_{name}": scale.expand(x.shape[1]).contiguous() for name, (x, scale) in zip("qkv", quantized, strict=True)}
        return [x for x, _ in quantized], scales

    sets = [arguments(tensors) for tensors in problem.sets]

    def attention(i: int) -> torch.Tensor:
        tensors, scales = sets[i % len(sets)]
        return function(*tensors, **scales, o_dtype=torch.bfloat16, causal=case.causal)[None].transpose(1, 2)

    return attention


def _transformer_engine(problem: Problem) -> Attention:
    """transformer_engine.pytorch.DotProductAttention under fp8_autocast with fp8_dpa.

    It quantizes with scales from previous calls.
    """
    te = importlib.import_module("transformer_engine.pytorch")
    recipe = importlib.import_module("transformer_engine.common.recipe")
    case = problem.case
    module = te.DotProductAttention(
        case.q_heads, case.head_dim, num_gqa_groups=case.kv_heads, attention_dropout=0.0, qkv_format="bshd",
        attn_mask_type="causal" if case.causal else "no_mask",
    ).eval()  # fmt: skip
    scaling = recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, fp8_dpa=True)
    sets = [tuple(sequence_first(x) for x in tensors) for tensors in problem.sets]

    def attention(i: int) -> torch.Tensor:
        with torch.no_grad(), te.fp8_autocast(enabled=True, fp8_recipe=scaling):
            out = module(*sets[i % len(sets)])
        return out.view(case.batch, case.q_length, case.q_heads, case.value_dim).transpose(1, 2)

    for _ in range(2):
        attention(0)  # fills the history from which scales are computed
    return attention


_SAGE = lacking("SageAttention 2, installed from source; module sageattention", "sageattention")
_FLASHINFER = lacking("pip install flashinfer-python", "flashinfer")

OTHERS = (
    Peer("FlexAttention", (KERNEL, END_TO_END), _flex, jit=True, needs=needs_gpu),
    Peer("cuDNN e4m3", (KERNEL,), _cudnn, needs=lacking("pip install nvidia-cudnn-frontend", "cudnn"), restored=_in_v_scales),
    Peer("FA3 bf16", (KERNEL, END_TO_END), functools.partial(_flash3, False), needs=needs_flash3),
    Peer("FA3 e4m3", (KERNEL,), functools.partial(_flash3, True), needs=needs_flash3),
    Peer("FA3 e4m3 two-level", (KERNEL,), _flash3_two_level, needs=needs_vllm),
    Peer("Sage2", (KERNEL,), _sage_kernel, needs=_SAGE),
    Peer("Sage2 end to end", (END_TO_END,), _sage, needs=_SAGE),
    Peer("FlashInfer bf16", (KERNEL, END_TO_END), _flashinfer, needs=_FLASHINFER),
    Peer("FlashInfer e4m3", (KERNEL,), _flashinfer_fp8, needs=_FLASHINFER),
    Peer(
        "Transformer Engine e4m3",
        (END_TO_END,),
        _transformer_engine,
        needs=lacking("pip install transformer-engine[pytorch]", "transformer_engine"),
    ),
)
PEERS = OWN + PYTORCH + OTHERS


def chosen(substrings: Sequence[str] | None, among: Sequence[Peer] = PEERS, kind: str = "peer") -> tuple[Peer, ...]:
    """Peers with one of the substrings in their names; all peers without substrings.

    Args:
        kind: name for a peer in error messages.

    Raises:
        UsageError: no peer's name contains one of the substrings.
    """
    return tuple(command_line.chosen(substrings, among, "--peer", kind))


class Needing(Protocol):
    """A peer, or a row of a command's own."""

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> Callable[[], str | None]: ...


AnyPeer = TypeVar("AnyPeer", bound=Needing)


def present(peers: Sequence[AnyPeer]) -> tuple[tuple[AnyPeer, ...], dict[str, str]]:
    """The peers that this machine has, and what the missing ones need, by name."""
    needs = {peer.name: peer.needs() for peer in peers}
    return tuple(peer for peer in peers if needs[peer.name] is None), {name: need for name, need in needs.items() if need is not None}


def here(peers: Sequence[AnyPeer]) -> tuple[AnyPeer, ...]:
    """The peers that this machine has. What the missing ones need is printed to standard error.

    Raises:
        UsageError: it has none of them.
    """
    found, needs = present(peers)
    if not found:
        raise UsageError("; ".join(f"{name} isn't here: it needs {need}" for name, need in needs.items()))
    by_need: dict[str, list[str]] = {}
    for name, need in needs.items():
        by_need.setdefault(need, []).append(name)
    for need, names in by_need.items():
        print(f"not here: {', '.join(names)}: {'it needs' if len(names) == 1 else 'they need'} {need}", file=sys.stderr, flush=True)
    return found
