"""Other libraries' attention as the bench calls it: stand-ins with their signatures, computed exactly, show layouts and scales to be right."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from bench import adapters, cases, run
from bench.errors import Bad
from bench.gates import Gates
from bench.limits import limit_from, limit_of
from bench.peers import END_TO_END, KERNEL, Answer, Peer, Problem, answer
from bench.timing import Protocol
from fp8attn.device import ARCHITECTURES, CEILINGS, INTERPRETER

CASES = (cases.square("full", 1, 4, 128, 64, kv_heads=2), cases.square("causal", 2, 4, 128, 64, True, kv_heads=2))
CPU = torch.device("cpu")


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """(B, S, H, D) in, (B, S, H, D) bfloat16 out."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2).bfloat16()


def flash_attn_interface() -> ModuleType:
    module = ModuleType("flash_attn_interface")

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None):
        tensors = []
        for x, descale in ((q, q_descale), (k, k_descale), (v, v_descale)):
            assert (x.dtype == torch.float8_e4m3fn) == (descale is not None) and x.stride(-1) == 1
            if descale is not None:
                assert descale.shape == (x.shape[0], k.shape[2]) and descale.dtype == torch.float32
            x = x.float()
            tensors.append(x if descale is None else x * descale[:, :1].reshape(-1, 1, 1, 1))
        return exact(*tensors, causal)

    module.flash_attn_func = flash_attn_func
    return module


def one_by_one(q, k, v, q_starts: torch.Tensor, k_starts: torch.Tensor, causal: bool) -> torch.Tensor:
    """Requests that lie one after the other."""
    a, b = q_starts.tolist(), k_starts.tolist()
    parts = [exact(q[None, a[i] : a[i + 1]], *(x[None, b[i] : b[i + 1]] for x in (k, v)), causal)[0] for i in range(len(a) - 1)]
    return torch.cat(parts)


def vllm() -> dict[str, ModuleType]:
    module = ModuleType("vllm.vllm_flash_attn")

    def flash_attn_varlen_func(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, causal=False,
        q_descale=None, k_descale=None, v_descale=None, fa_version=2,
    ):  # fmt: skip
        assert fa_version == 3 and max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k == int(cu_seqlens_k.diff().max())
        for descale in (q_descale, k_descale, v_descale):
            assert descale.shape == (len(cu_seqlens_q) - 1, k.shape[1]) and sum(descale.stride()) == 0 and descale.dtype == torch.float32
        tensors = [x.float() * descale[0, 0] for x, descale in ((q, q_descale), (k, k_descale), (v, v_descale))]
        return one_by_one(*tensors, cu_seqlens_q, cu_seqlens_k, causal)

    module.flash_attn_varlen_func = flash_attn_varlen_func
    return {"vllm": ModuleType("vllm"), "vllm.vllm_flash_attn": module}


def sageattention() -> ModuleType:
    module = ModuleType("sageattention")

    def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False):
        assert tensor_layout == "HND"
        return exact(*(x.transpose(1, 2) for x in (q, k, v)), is_causal).transpose(1, 2)

    module.sageattn = sageattn
    return module


SAGE_PLACES = ("_qattn_sm90", "core._qattn_sm90", "sm90_compile")
"""Where versions of SageAttention have their Hopper kernel."""


def sageattention_inside(place: str | None) -> dict[str, ModuleType]:
    """Its modules: the kernel in one of these places or nowhere, other functions in the others."""
    package, core = (ModuleType(name) for name in ("sageattention", "sageattention.core"))
    package.__path__ = []

    def per_thread_int8_triton(q, k, km=None, BLKQ=128, WARPQ=32, BLKK=64, WARPK=64, sm_scale=None, tensor_layout="HND"):
        assert (BLKQ, WARPQ, BLKK, WARPK, tensor_layout) == (64, 16, 128, 128, "HND") and km.shape == (*k.shape[:2], 1, k.shape[3])
        scales = [x.abs().amax(dim=-1, keepdim=True).float() / 127 for x in (q, k - km)]
        q8, k8 = ((x / scale).round().to(torch.int8) for x, scale in zip((q, k - km), scales, strict=True))
        return q8, scales[0], k8, scales[1]

    def per_channel_fp8(v, tensor_layout="HND", scale_max=448.0, smooth_v=True):
        assert tensor_layout == "HND" and not smooth_v
        scale = v.abs().amax(dim=2).float() / scale_max
        return (v / scale[:, :, None]).to(torch.float8_e4m3fn).transpose(2, 3).contiguous(), scale, None

    def kernel(query, key, value, output, query_scale, key_scale, value_scale, tensor_layout, is_causal, qk_quant_gran, sm_scale, return_lse):
        assert (tensor_layout, qk_quant_gran, return_lse) == (1, 3, 0) and sm_scale == query.shape[-1] ** -0.5
        q, k, v = query * query_scale, key * key_scale, value.float().transpose(2, 3) * value_scale[:, :, None]
        output.copy_(exact(*(x.transpose(1, 2) for x in (q, k, v)), bool(is_causal)).transpose(1, 2))
        return torch.empty(0)

    core.per_thread_int8_triton, core.per_channel_fp8 = per_thread_int8_triton, per_channel_fp8
    found = {"sageattention": package, "sageattention.core": core}
    for one in SAGE_PLACES:
        module = ModuleType(f"sageattention.{one}")
        module.qk_int8_sv_f8_accum_f32_attn_inst_buf = None
        if one == place:
            module.qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf = kernel
        if one.startswith("core."):
            core._qattn_sm90 = module
        else:
            found[f"sageattention.{one}"] = module
    return found


def flashinfer() -> ModuleType:
    module = ModuleType("flashinfer")

    def single_prefill_with_kv_cache(q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, causal=False, kv_layout="NHD"):
        assert [scale.shape[0] for scale in (scale_q, scale_k, scale_v)] == [x.shape[1] for x in (q, k, v)] and o_dtype == torch.bfloat16
        tensors = [(x.float() * scale[:, None])[None] for x, scale in ((q, scale_q), (k, scale_k), (v, scale_v))]
        return exact(*tensors, causal)[0]

    class BatchPrefillWithRaggedKVCacheWrapper:
        def __init__(self, float_workspace_buffer, kv_layout="NHD"):
            assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"

        def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, causal=False, **dtypes):
            assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
            self.starts, self.causal = (qo_indptr, kv_indptr), causal

        def run(self, q, k, v):
            return one_by_one(q, k, v, *self.starts, self.causal)

    module.single_prefill_with_kv_cache = single_prefill_with_kv_cache
    module.BatchPrefillWithRaggedKVCacheWrapper = BatchPrefillWithRaggedKVCacheWrapper
    return module


def transformer_engine() -> dict[str, ModuleType]:
    import contextlib

    pytorch, recipe = ModuleType("transformer_engine.pytorch"), ModuleType("transformer_engine.common.recipe")
    inside: list[object] = []

    class DotProductAttention(torch.nn.Module):
        def __init__(self, heads, channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="causal"):
            super().__init__()
            assert qkv_format == "bshd" and attn_mask_type in ("causal", "no_mask")
            self.causal = attn_mask_type == "causal"

        def forward(self, q, k, v):
            assert inside and inside[-1].fp8_dpa
            return exact(q, k, v, self.causal).flatten(2)

    @contextlib.contextmanager
    def fp8_autocast(enabled=True, fp8_recipe=None):
        inside.append(fp8_recipe)
        yield
        inside.pop()

    pytorch.DotProductAttention, pytorch.fp8_autocast = DotProductAttention, fp8_autocast
    recipe.Format = SimpleNamespace(HYBRID=1)
    recipe.DelayedScaling = lambda fp8_format, fp8_dpa: SimpleNamespace(fp8_dpa=fp8_dpa)
    return {"transformer_engine.pytorch": pytorch, "transformer_engine.common.recipe": recipe}


STANDINS = {
    "FA3 bf16": lambda: {"flash_attn_interface": flash_attn_interface()},
    "FA3 e4m3": lambda: {"flash_attn_interface": flash_attn_interface()},
    "FA3 e4m3 two-level": vllm,
    "Sage2": lambda: sageattention_inside("_qattn_sm90"),
    "Sage2 end to end": lambda: {"sageattention": sageattention()},
    "FlashInfer bf16": lambda: {"flashinfer": flashinfer()},
    "FlashInfer e4m3": lambda: {"flashinfer": flashinfer()},
    "Transformer Engine e4m3": transformer_engine,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", STANDINS)
def test_adapters_hand_over_what_the_library_takes(name: str, case: cases.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, content in STANDINS[name]().items():
        monkeypatch.setitem(sys.modules, module, content)
    peer = next(peer for peer in adapters.PEERS if peer.name == name)
    problem = Problem.of(case, "normal", CPU, rotate=False)
    given = answer(peer, problem, problem.expected(), Bad(0.05, 0.2))
    if name == "FlashInfer e4m3" and case.batch > 1:
        assert given.refused and "one request" in given.refused
        return
    assert given.refused is None, given.refused
    assert given.errors is not None and given.errors.relative_l2 < (0.06 if name == "Sage2" or ("e4m3" in name and "Engine" not in name) else 0.005)


def sage2(case: cases.Case, modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> Answer:
    for module, content in modules.items():
        monkeypatch.setitem(sys.modules, module, content)
    peer = next(peer for peer in adapters.PEERS if peer.name == "Sage2")
    problem = Problem.of(case, "normal", CPU, rotate=False)
    return answer(peer, problem, problem.expected(), Bad(0.05, 0.2))


@pytest.mark.parametrize("place", SAGE_PLACES)
def test_sages_kernel_is_found_where_its_version_has_it(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = sage2(CASES[1], sageattention_inside(place), monkeypatch)
    assert given.refused is None and given.errors is not None and given.errors.relative_l2 < 0.04


@pytest.mark.parametrize("there", [True, False], ids=["modules without it", "no modules"])
def test_a_sage_without_its_hopper_kernel_is_refused(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = sageattention_inside(None)
    if not there:
        del modules["sageattention.core"]._qattn_sm90
        modules = {name: modules[name] for name in ("sageattention", "sageattention.core")}
    given = sage2(CASES[0], modules, monkeypatch)
    assert given.attention is None and given.refused is not None and given.refused.startswith("ImportError: none of sageattention._qattn_sm90, ")
    assert "has qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf; SageAttention was built for another GPU" in given.refused


def test_sages_kernel_is_not_asked_for_keys_it_would_pad(monkeypatch: pytest.MonkeyPatch) -> None:
    given = sage2(cases.square("odd", 1, 2, 130, 64), sageattention_inside("sm90_compile"), monkeypatch)
    assert given.refused == "ValueError: 130 keys; without its own padding the kernel takes multiples of 128"


def test_a_missing_peer_says_what_it_needs() -> None:
    assert all(peer.needs() is None for peer in adapters.PEERS if peer.name in ("fp8attn triton", "SDPA flash", "SDPA math"))
    here, needs = adapters.present(adapters.PEERS)
    assert {peer.name for peer in here} | set(needs) == {peer.name for peer in adapters.PEERS}
    assert all(needs.values())
    assert [peer.name for peer in adapters.chosen(["cudnn"])] == ["SDPA cuDNN", "cuDNN e4m3"]
    with pytest.raises(ValueError, match="no peer has 'nobody'"):
        adapters.chosen(["nobody"])


def test_only_the_last_rows_of_large_problems_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those rows of the whole answer, causal or not."""
    for case in CASES:
        whole = Problem.of(case, "normal", CPU, rotate=False).expected()
        monkeypatch.setattr("bench.peers.MOST_CHECKED", 1)
        monkeypatch.setattr("bench.peers.CHECKED_ROWS", 32)
        part = Problem.of(case, "normal", CPU, rotate=False).expected()
        monkeypatch.undo()
        assert part.shape[2] == 32 and torch.allclose(part, whole[:, :, -32:], atol=1e-6)


def test_a_red_row_of_a_timed_case_has_no_speed() -> None:
    wrong = Peer("fp8attn wrong", (KERNEL,), lambda problem: lambda i: problem.sets[0][0] * 0.1, own=True)
    other = Peer("other's wrong", (END_TO_END,), lambda problem: lambda i: problem.sets[0][0] * 0.1)
    case = cases.square("x", 1, 2, 128, 64)
    red, foreign = run.side_by_side(case, "normal", [wrong, other], Protocol(rounds=1), Gates.load(), CPU)
    assert red.broken == ("relative_l2", "bad_share") and red.timing is None and red.refused and red.refused.startswith("red: ")
    assert foreign.timing is not None and not foreign.broken and foreign.errors and foreign.errors.relative_l2 > 0.5


def test_who_runs_out_of_memory_is_refused_and_the_others_timed() -> None:
    """A call that worked once may not find the memory that its capture keeps."""
    asked = []

    def greedy(i: int) -> torch.Tensor:
        asked.append(i)
        if len(asked) > 1:
            raise torch.OutOfMemoryError("tried to allocate 16 GiB")
        return problem_q

    problem_q = torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16)
    peers = [Peer("greedy", (KERNEL,), lambda problem: greedy), Peer("other", (KERNEL,), lambda problem: lambda i: problem_q)]
    case = cases.square("x", 1, 2, 128, 64)
    refused, timed = run.side_by_side(case, "normal", peers, Protocol(rounds=1), Gates.load(), CPU)
    assert refused.timing is None and refused.refused == "out of memory beside the others"
    assert timed.timing is not None and timed.refused is None


def test_the_limit_is_the_busiest_units_time() -> None:
    ceilings = CEILINGS["NVIDIA H100 80GB HBM3"]
    prefill = cases.square("D128", 1, 16, 16384, 128)
    limit = limit_from(prefill, ceilings, 132)
    assert limit.by == "tensor" and prefill.flops / limit.us / 1e6 == pytest.approx(1630)
    # LIMITS: 4 D / 8192 clk a score, against one of 57 codes a clk
    assert limit.tensor_us / limit.exponential_us == pytest.approx(4 * 128 / 8192 * 57)
    decode = limit_from(cases.DECODE_LIKE[0], ceilings, 132)
    assert (
        decode.by == "memory" and decode.us == pytest.approx(decode.memory_us) and math.isclose(decode.us, cases.DECODE_LIKE[0].least_bytes / 3.1e6)
    )
    assert limit_of(prefill, ARCHITECTURES[90]) == limit
    assert limit_of(prefill, ARCHITECTURES[80]) is None and limit_of(prefill, INTERPRETER) is None
