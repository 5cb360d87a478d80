"""Attention of packed sequences that are sharded over ranks.

The packed tokens are sharded as one sequence is, wherever sequences begin. A rank attends to what it has of each
sequence by one call of `varlen_sdpa`. Keys and values of the sequences that other ranks have tokens of, too, are
quantized and passed around a ring, and attention to them is merged.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..ambient import autocast_dtype
from ..api import varlen_sdpa
from ..backends import choose_backend
from ..recipe import DEFAULT_RECIPE, Recipe
from ..reference import Window
from ..validate import Backend, Checked, VarlenArguments, cast, check_varlen
from . import agreement
from .agreement import CHECKS, Check
from .merge import Accumulator
from .part_calls import PartCalls, finished
from .parts import Format, packed_kv, parts_of
from .sharding import Sharding, Span, Spans, check_sharding, groups_of, spans_of
from .transport import Ring, ring_steps
from .visibility import Visible, pieces
from .wire import size_of


@dataclass(frozen=True)
class Fragment:
    """Consecutive tokens of a sequence that a rank has.

    Attributes:
        sequence: its number.
        span: the tokens, by their places among all packed tokens.
        row: the first one's row on the rank.
        is_whole: whether they are all tokens of the sequence.
    """

    sequence: int
    span: Span
    row: int
    is_whole: bool


def fragments_of(spans: Spans, starts: Sequence[int]) -> list[Fragment]:
    """What a rank has of the sequences, in the order of its rows.

    Args:
        spans: the rank's tokens.
        starts: where each sequence starts, and the end.
    """
    found, row = [], 0
    for run in spans:
        first, stop = run.first, run.first + run.length
        while first < stop:
            sequence = bisect.bisect_right(starts, first) - 1
            end = min(stop, starts[sequence + 1])
            is_whole = (first, end) == (starts[sequence], starts[sequence + 1])
            found.append(Fragment(sequence, Span(first, end - first), row, is_whole))
            first, row = end, row + end - first
    return found


def context_parallel_varlen_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: Sequence[int] | torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    is_causal: bool = False,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    sharding: Sharding = "contiguous",
    recipe: Recipe = DEFAULT_RECIPE,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
    check_ranks: Check = "calls",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`fp8attn.varlen_sdpa` of packed sequences whose tokens are sharded over the ranks of a group. All ranks call it
    together.

    Each sequence attends to itself. Only keys and values of sequences that lie on several ranks travel, in FP8. What a
    rank has of such a sequence is quantized with a mean and scales of its own.

    Args:
        q: (T of this rank, Hq, D), float16, bfloat16 or float32, unit last stride.
        k, v: (T of this rank, Hkv, D) and (T of this rank, Hkv, Dv), in q's dtype.
        cu_seqlens: ints (N + 1) of the whole batch, from 0 to the tokens of all ranks: a sequence of ints or a tensor
            on the CPU, the same on all ranks. The host needs them to know which ranks share a sequence.
        group, mesh: as of `context_parallel_sdpa`; a mesh has one dimension.
        is_causal: a token sees the tokens of its sequence up to itself.
        window, softcap, scale, out_dtype, return_lse, backend: as of `fp8attn.varlen_sdpa`.
        sinks: float (Hq,), the same on all ranks.
        sharding: of all packed tokens, as of `context_parallel_sdpa`: shard(x, dim=0, sharding=sharding).
        recipe: as of `fp8attn.varlen_sdpa`.
        check_ranks: as of `context_parallel_sdpa`.

    Returns:
        out (T of this rank, Hq, Dv); with `return_lse` also LSE (Hq, T of this rank) float32.

    Raises:
        TypeError, ValueError, BackendUnavailable: on all ranks, if an argument of one of them isn't as above.
        Disagreement: on all ranks, if the arguments of two ranks don't fit together.
        RuntimeError: an argument requires grad; there is no group; or a rank didn't come within the group's timeout.
    """
    groups = groups_of(group, mesh)
    if len(groups) != 1:
        raise ValueError(f"mesh has {len(groups)} dimensions; it must have 1: packed sequences are passed around a ring")
    device = getattr(q, "device", None)
    if isinstance(device, torch.device) and (dtype := autocast_dtype(device)) is not None:
        q, k, v = (cast(x, dtype) for x in (q, k, v))
        out_dtype = out_dtype or dtype
    with agreement.refused_together(groups):
        starts = _checked_starts(cu_seqlens)
        agreement.check_choice("check_ranks", check_ranks, CHECKS)
        check_sharding(sharding)
        own = _starts_on(q.device, (0, len(q))) if isinstance(q, torch.Tensor) and q.dim() else None
        arguments = VarlenArguments(
            q, k, v, own, own, is_causal=is_causal, window=window, softcap=softcap, sinks=sinks, scale=scale, recipe=recipe, out_dtype=out_dtype,
            return_lse=return_lse, backend=backend,
        )  # fmt: skip
        checked = check_varlen(arguments)
        if not checked.is_float:
            raise TypeError("q, k or v is quantized; they must be float16, bfloat16 or float32: each rank quantizes its own")
        if len(k) != len(q):
            raise ValueError(f"k has {len(k)} tokens; it must have q's, {len(q)}: a sequence attends to itself")
        computing = choose_backend(backend, q.device)
        fields = agreement.fields_of(checked, arguments, ("q", "k", "v"), computing)
        message = agreement.described(fields | {"cu_seqlens": _summary(starts), "sharding": sharding, "check_ranks": check_ranks})
    lengths = agreement.agree(message, groups, check_ranks).q_lengths
    if sum(lengths) != starts[-1]:
        raise ValueError(f"cu_seqlens ends at {starts[-1]}; it must end at {sum(lengths)}, the tokens of all ranks")
    fragments = [fragments_of(spans, starts) for spans in spans_of(lengths, sharding, "q")]
    parts = [[fragment for fragment in some if not fragment.is_whole] for some in fragments]
    own_fragments = fragments[groups[0].rank()]
    call = _Call(checked, recipe, computing, groups[0], own_fragments, parts, Visible.of(window, is_causal))
    out, lse = call.run(arguments)
    return (out, lse) if return_lse else out


def _checked_starts(cu_seqlens: Sequence[int] | torch.Tensor) -> tuple[int, ...]:
    """cu_seqlens as ints."""
    if isinstance(cu_seqlens, torch.Tensor):
        if cu_seqlens.device.type != "cpu":
            raise ValueError(f"cu_seqlens is on {cu_seqlens.device}; it must be on the CPU, or a sequence of ints: ranks plan by it")
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
            raise TypeError(f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; it must be ints (N + 1)")
        cu_seqlens = cu_seqlens.tolist()
    if not isinstance(cu_seqlens, Sequence) or not all(isinstance(x, int) and not isinstance(x, bool) for x in cu_seqlens):
        raise TypeError(f"cu_seqlens is {cu_seqlens!r}; it must be a sequence of ints, or a tensor of ints on the CPU")
    starts = tuple(cu_seqlens)
    if len(starts) < 2:
        raise ValueError(f"cu_seqlens has {len(starts)} numbers; it must have two at least")
    if starts[0] != 0:
        raise ValueError(f"cu_seqlens starts at {starts[0]}; it must start at 0")
    fall = next((i for i, (a, b) in enumerate(itertools.pairwise(starts)) if a > b), None)
    if fall is not None:
        raise ValueError(f"cu_seqlens falls from {starts[fall]} to {starts[fall + 1]} at sequence {fall}; it must never fall")
    return starts


def _starts_on(device: torch.device, starts: Sequence[int]) -> torch.Tensor:
    """int32 on the device. The host doesn't wait for a GPU, as it would for a copy from pageable memory."""
    return torch.tensor(starts, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _summary(starts: tuple[int, ...]) -> str:
    """What a rank says of cu_seqlens."""
    return f"{len(starts) - 1} sequences with the hash {hashlib.sha256(repr(starts).encode()).hexdigest()[:16]}"


@dataclass(frozen=True, eq=False)
class _Call:
    """A call that all ranks agree on.

    Attributes:
        checked: this rank's arguments.
        recipe, backend: how it computes.
        group: the ranks.
        fragments: of this rank.
        parts: the fragments that travel, of every rank.
        visible: which keys a query sees.
    """

    checked: Checked
    recipe: Recipe
    backend: Backend
    group: dist.ProcessGroup
    fragments: list[Fragment]
    parts: list[list[Fragment]]
    visible: Visible

    @property
    def _rank(self) -> int:
        return self.group.rank()

    @property
    def _form(self) -> Format:
        q, k, v = self.checked.floats
        return Format(1, q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype, self.recipe, self.backend, False, True, True)

    def _rows_of(self, rank: int, part: Fragment) -> list[Fragment]:
        """The fragments of a rank that attend to a part."""
        others = (fragment for fragment in self.parts[rank] if fragment.sequence == part.sequence and fragment.span != part.span)
        return [fragment for fragment in others if pieces([fragment.span], (part.span,), self.visible)]

    def _sees(self, rank: int, other: int) -> bool:
        """Whether a rank attends to a part of another rank, or of its own."""
        return any(self._rows_of(rank, part) for part in self.parts[other])

    def _own(self, form: Format) -> torch.Tensor:
        """The buffer with this rank's parts."""
        _, k, v = self.checked.floats
        buffers = [k.new_empty(0, dtype=torch.uint8)]
        for part in self.parts[self._rank]:
            rows = slice(part.row, part.row + part.span.length)
            buffers.append(packed_kv(k[:, :, rows], v[:, :, rows], (part.span,), None, None, form))
        return torch.cat(buffers)

    def run(self, arguments: VarlenArguments) -> tuple[torch.Tensor, torch.Tensor]:
        """out (T, Hq, Dv) and LSE (Hq, T)."""
        form, q, size = self._form, self.checked.floats[0], self.group.size()
        calls, steps = PartCalls(self.checked, form, self.visible), ring_steps(size, self._sees)
        order = [(self._rank - step) % size for step in range(steps)]
        sizes = [size_of(form.forms_of([(part.span,) for part in self.parts[rank]])) for rank in order]
        buffers = iter(Ring(self._own(form), sizes, self.group)) if steps else iter(())
        total = Accumulator(q, form.value_dim)
        alone = not any(self._sees(self._rank, rank) for rank in order)
        sinks = self.checked.sinks
        total.add(0, q.shape[2], *self._alone(arguments, self.checked.out_dtype if alone and sinks is None else calls.part_dtype))
        for rank, buffer in zip(order, buffers, strict=True):
            its = self.parts[rank]
            for part, fragment in zip(parts_of(buffer, [(one.span,) for one in its], None, form), its, strict=True):
                for rows in self._rows_of(self._rank, fragment):
                    calls.attend(total, q, [rows.span], part, rows.row)
        out, lse = total.result(self.checked.out_dtype if sinks is None else torch.float32)
        out, lse = finished(out, lse, sinks, self.checked.out_dtype)
        return out.squeeze(0).transpose(0, 1), lse.squeeze(0)

    def _alone(self, a: VarlenArguments, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of each fragment to itself: out (1, Hq, T, Dv) of `dtype`, and LSE (1, Hq, T)."""
        ends = [fragment.row + fragment.span.length for fragment in self.fragments]
        longest = max((fragment.span.length for fragment in self.fragments), default=0)
        starts = _starts_on(self.checked.device, [0, *ends] if ends else [0, 0])
        out, lse = varlen_sdpa(
            a.q, a.k, a.v, starts, starts, max_seqlen_q=longest, max_seqlen_k=longest, is_causal=a.is_causal, window=a.window, softcap=a.softcap,
            scale=self.checked.softmax_scale, recipe=a.recipe, out_dtype=dtype, return_lse=True, backend=self.backend,
        )  # fmt: skip
        return out.transpose(0, 1)[None], lse[None]
