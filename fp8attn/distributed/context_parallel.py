"""Attention of a sequence that is sharded over ranks: ring, all-gather, Ulysses, and Ulysses inside of a ring.

1. The ranks agree on the arguments (`agreement`).
2. Statistics of K and V over all tokens are gathered once. Every rank quantizes its own tokens by them.
3. Ulysses: an all-to-all trades tokens for heads, inside the inner group.
4. Ring or all-gather: the keys and values of other ranks come. Attention to each is merged in float32 by its LSE.
5. Ulysses: an all-to-all brings the outputs back.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import ops, problem_ops
from ..ambient import autocast_dtype
from ..backends import choose_backend
from ..call import Problem
from ..device import device_of
from ..prepare import is_fused_recipe
from ..quantization import PartialStatistics, Statistics
from ..recipe import DEFAULT_RECIPE, Quantized, Recipe
from ..reference import Window
from ..validate import Arguments, Backend, Checked, cast, check, half_keys_of
from . import agreement
from .agreement import CHECKS, Check
from .gathered import HIDING_ROWS, MOST_RANKS, GatheredAttention
from .gathered import unsupported as unsupported_gathered
from .merge import Accumulator
from .part_calls import PartCalls, finished
from .parts import (
    Format,
    assembled,
    held,
    joined_statistics,
    measured,
    of_heads,
    packed_kv,
    parts_in,
    parts_of,
    quantized_queries,
    tokens_of,
)
from .sharding import SHARDINGS, Sharding, Span, Spans, groups_of, spans_of
from .transport import Lanes, Ring, Transfer, exchange, let_transfers_start, ring_steps, start_gather
from .visibility import Visible, pieces
from .wire import Form, concatenated_rows, packed, size_of, unpacked

Mode = Literal["auto", "ring", "ulysses", "all_gather"]
MODES: tuple[Mode, ...] = ("auto", "ring", "ulysses", "all_gather")
Scope = Literal["sequence", "shard"]
SCOPES: tuple[Scope, ...] = ("sequence", "shard")

FUSED_RANKS = 2
"""Most ranks of a ring in which the attention kernel quantizes queries, in every step again. 32k rows of 24 heads take
0.10 ms of a step, and 0.21 to 0.25 in a pass of their own (H100)."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """The groups of this rank.

    Attributes:
        outer: the ranks that pass keys and values to each other, by ring or all-gather; None: nobody else.
        inner: the ranks that trade tokens for heads, by Ulysses; None: nobody else.
        groups: all groups that the sequence is sharded over, the innermost one first.
    """

    outer: dist.ProcessGroup | None
    inner: dist.ProcessGroup | None
    groups: tuple[dist.ProcessGroup, ...]

    @property
    def outer_rank(self) -> int:
        return 0 if self.outer is None else self.outer.rank()

    @property
    def outer_size(self) -> int:
        return 1 if self.outer is None else self.outer.size()

    @property
    def inner_rank(self) -> int:
        return 0 if self.inner is None else self.inner.rank()

    @property
    def inner_size(self) -> int:
        return 1 if self.inner is None else self.inner.size()

    @property
    def size(self) -> int:
        return self.outer_size * self.inner_size

    @property
    def rank(self) -> int:
        """This rank's place in the sequence."""
        return self.outer_rank * self.inner_size + self.inner_rank


def context_parallel_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    mode: Mode = "auto",
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_alignment: str = "top_left",
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    sharding: Sharding = "contiguous",
    recipe: Recipe = DEFAULT_RECIPE,
    statistics: Scope = "sequence",
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
    check_ranks: Check = "calls",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`fp8attn.sdpa` of a sequence whose tokens are sharded over the ranks of a group. All ranks call it together.

    Every rank quantizes its own keys and values once. What travels are FP8 bytes and scales. Outputs of parts, in the
    output's dtype if query has it and in float32 otherwise, are merged in float32 by their LSE, in an order that
    doesn't depend on who is faster.

    Args:
        query: (B, Hq, Sq of this rank, D), float16, bfloat16 or float32, unit last stride.
        key, value: (B, Hkv, Sk of this rank, D) and (B, Hkv, Sk of this rank, Dv), in query's dtype. The numbers of
            tokens may differ between ranks, and be 0.
        group: the ranks, in the order of the sequence; the default group if None.
        mesh: instead of a group. With one dimension, its group. With two, Ulysses along the second dimension and `mode`
            along the first; the sequence is sharded over the flattened mesh.
        mode: `ring` passes keys and values from rank to rank, each transfer hidden behind attention. `all_gather` gets
            all of them at once. `ulysses` trades tokens for heads: the ranks must divide Hq, and divide Hkv or be a
            multiple of it. `auto` chooses by shapes.
        is_causal: the query at position i of the sequence sees keys at positions j <= i, or j <= i + Sk - Sq if
            `causal_alignment` is `bottom_right`. Sq and Sk are of the whole sequence.
        window: as of `fp8attn.sdpa`, of positions in the whole sequence. A ring of contiguous shards ends when no rank
            sees more keys.
        softcap: as of `fp8attn.sdpa`.
        sinks: float (Hq,), the same on all ranks: one more logit of each row, whose value is zero.
        scale, enable_gqa, recipe: as of `fp8attn.sdpa`. The recipe keeps no keys in half precision. Scales of q or k
            with the granularity `tensor` or `head` are those of a rank's own tokens.
        statistics: `sequence`: K's mean, and V's means and scales, are those of the whole sequence, as in one process.
            Shards that begin at multiples of 512 tokens, and have more, are then quantized to the same bytes as by one
            process. `shard`: each shard has its own. This needs no exchange before quantization. Errors are the same,
            or smaller where the values drift along the sequence, but answers depend on the number of ranks.
        sharding: `contiguous`: rank r has the r-th run of tokens. `zigzag`: as `fp8attn.distributed.shard` deals them,
            so that ranks have the same work with a causal mask.
        out_dtype: float16, bfloat16 or float32; query's dtype by default.
        return_lse: also return the natural log of the sum of exponentials of each row's scores.
        backend: as of `fp8attn.sdpa`. `auto` is exact on CPU tensors; then K and V travel as they are.
        check_ranks: `calls`: in each call the ranks tell each other their arguments, in a collective on the CPU.
            `shapes`: only in the first call with these arguments. Then ranks that change their arguments apart from
            each other end in the group's timeout.

    Returns:
        out (B, Hq, Sq of this rank, Dv); with `return_lse` also LSE (B, Hq, Sq of this rank) float32.

    Raises:
        TypeError, ValueError, BackendUnavailable: on all ranks, if an argument of one of them isn't as above.
        Disagreement: on all ranks, if the arguments of two ranks don't fit together.
        RuntimeError: an argument requires grad; there is no group; or a rank didn't come within the group's timeout.
    """
    groups = groups_of(group, mesh)
    device = getattr(query, "device", None)
    if isinstance(device, torch.device) and (dtype := autocast_dtype(device)) is not None:
        query, key, value = (cast(x, dtype) for x in (query, key, value))
        out_dtype = out_dtype or dtype
    arguments = Arguments(
        query, key, value, None, 0.0, is_causal, scale, enable_gqa, causal_alignment=causal_alignment, window=window, softcap=softcap,
        sinks=sinks, recipe=recipe, out_dtype=out_dtype, return_lse=return_lse, backend=backend,
    )  # fmt: skip
    with agreement.refused_together(groups):
        checked, fields = _checked(arguments, groups, mode=mode, sharding=sharding, check_ranks=check_ranks, statistics=statistics)
        message = agreement.described(fields)
    question = agreement.Question(message, groups, check_ranks)
    options = Options(mode, is_causal, causal_alignment, window, sharding, recipe, statistics == "sequence", choose_backend(backend, query.device))
    presumed, call = question.presumed, None
    if presumed is not None:
        with contextlib.suppress(ValueError):  # lengths that don't fit together: the answer may have others
            call = _call_of(checked, presumed, groups, options)
    measured = None if call is None else call.measure()  # while the answer is on its way
    agreed = question.answer()
    if call is None or measured is None or agreed != presumed:
        call = _call_of(checked, agreed, groups, options)
        measured = call.measure()
    out, lse = call.run(measured, return_lse)
    return (out, lse) if return_lse else out


class Options(NamedTuple):
    """What a call follows from beside its tensors.

    Attributes:
        shared: whether statistics are those of the sequence.
        computing: the backend, chosen.
    """

    mode: Mode
    is_causal: bool
    causal_alignment: str
    window: Window | None
    sharding: Sharding
    recipe: Recipe
    shared: bool
    computing: Backend


def _call_of(checked: Checked, agreed: agreement.Agreed, groups: tuple[dist.ProcessGroup, ...], o: Options) -> _Call:
    """The call of ranks that agree."""
    q, k, v = checked.floats
    kv_lengths = agreed.kv_lengths
    aligned = sum(kv_lengths) - sum(agreed.q_lengths) if o.causal_alignment == "bottom_right" else 0
    visible = Visible.of(o.window, o.is_causal, aligned)
    unbalanced = o.is_causal and o.sharding == "contiguous" and not visible.has_window
    form = Format(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype, o.recipe, o.computing, o.shared, False, visible.has_window)
    can_attend_to_gathered = visible.sees_all and len(groups) == 1 and unsupported_gathered(form, kv_lengths) is None
    chosen = _mode(o.mode, (q.shape[1], k.shape[1]), max(agreed.q_lengths), unbalanced, groups, can_attend_to_gathered)
    ranks = _ranks(chosen, groups)
    gathers = chosen == "all_gather"
    attends_to_gathered = gathers and can_attend_to_gathered
    # K's mean is multiplied by queries as they are: under a soft cap, and in the LSE of a shard with a mean of its own
    float_queries = (
        attends_to_gathered or o.computing == "reference" or o.recipe.smooth_q or bool(checked.softcap) or (not o.shared and ranks.inner is not None)
    )
    if ranks.inner is None and ranks.outer_size <= FUSED_RANKS:  # queries that don't travel may differ from rank to rank
        float_queries = float_queries or _kernel_quantizes_queries(checked, o.recipe, o.computing)
    q_spans, kv_spans = (
        [_joined_spans(spans) for spans in spans_of(lengths, o.sharding, name)]
        for lengths, name in ((agreed.q_lengths, "query"), (kv_lengths, "key"))
    )
    return _Call(checked, replace(form, float_queries=float_queries), ranks, q_spans, kv_spans, visible, gathers, attends_to_gathered)


def _kernel_quantizes_queries(checked: Checked, recipe: Recipe, computing: Backend) -> bool:
    """Whether the attention kernel quantizes queries beside quantized keys, so that they need no pass of their own."""
    if computing not in ops.FUSING or not is_fused_recipe(recipe) or checked.device.type != "cuda":
        return False
    problem = Problem(*checked.floats, checked.softmax_scale, recipe.qk, window=checked.window)
    return problem_ops.unsupported_fused_q(problem, device_of(checked.device)) is None


def _checked(a: Arguments, groups: Sequence[dist.ProcessGroup], **options: object) -> tuple[Checked, dict[str, Any]]:
    """This rank's arguments, checked, and what it tells the others.

    Raises:
        TypeError, ValueError, RuntimeError, BackendUnavailable: an argument isn't as `context_parallel_sdpa` says.
    """
    allowed = {"mode": MODES, "sharding": SHARDINGS, "check_ranks": CHECKS, "statistics": SCOPES}
    for name, option in options.items():
        agreement.check_choice(name, option, allowed[name])
    mode = options["mode"]
    if mode == "ulysses" and len(groups) == 2:
        raise ValueError("mode is 'ulysses' and mesh has 2 dimensions; it must be 'ring' or 'all_gather', along the first: the second is Ulysses'")
    checked = check(a)
    if not checked.is_float:
        raise TypeError("query, key or value is quantized; they must be float16, bfloat16 or float32: each rank quantizes its own")
    if a.recipe.has_half_keys:
        raise ValueError(f"recipe keeps keys ({half_keys_of(a.recipe)}); it must keep none")
    q, k, _ = checked.floats
    ulysses = groups[0].size() if mode == "ulysses" or len(groups) == 2 else 1
    reason = _unsupported_ulysses(q.shape[1], k.shape[1], ulysses)
    if reason is not None:
        raise ValueError(reason)
    fields = agreement.fields_of(checked, a, ("query", "key", "value"), choose_backend(a.backend, q.device))
    fields |= {"batch of query": q.shape[0], **options, "causal_alignment": a.causal_alignment}
    return checked, fields


def _unsupported_ulysses(q_heads: int, kv_heads: int, ranks: int) -> str | None:
    """Why heads can't be shared by so many ranks, or None."""
    if q_heads % ranks:
        return f"query has {q_heads} heads; with Ulysses they must be a multiple of the {ranks} ranks"
    if kv_heads % ranks and ranks % kv_heads:
        return f"key has {kv_heads} heads; with Ulysses they must be a multiple of the {ranks} ranks, or divide them"
    return None


def _mode(
    mode: Mode, heads: tuple[int, int], q_length: int, unbalanced: bool, groups: Sequence[dist.ProcessGroup], can_attend_to_gathered: bool
) -> Mode:
    """The mode of a call.

    Args:
        heads: of query and of key.
        q_length: the most queries of a rank.
        unbalanced: whether ranks of a ring would have different work.
        can_attend_to_gathered: whether `all_gather` attends to the keys of all ranks in one call.
    """
    if mode != "auto":
        return mode
    rows, ranks = q_length * heads[0] // max(heads[1], 1), groups[-1].size()
    hidden = rows >= HIDING_ROWS
    if hidden and can_attend_to_gathered and ranks <= MOST_RANKS:
        return "all_gather"
    # the own shard hides a whole all-gather, whose buffers take no more memory than the ring's
    few = 2 < ranks <= Ring.SLOTS + 1 and rows >= (ranks - 1) * HIDING_ROWS
    passing: Mode = "ring" if hidden and not few else "all_gather"
    if len(groups) == 2 or (hidden and not unbalanced):
        return passing
    return "ulysses" if _unsupported_ulysses(*heads, groups[0].size()) is None else passing


def _ranks(mode: Mode, groups: tuple[dist.ProcessGroup, ...]) -> Ranks:
    if len(groups) == 2:
        return Ranks(groups[1], groups[0], groups)
    return Ranks(None, groups[0], groups) if mode == "ulysses" else Ranks(groups[0], None, groups)


class Measured(NamedTuple):
    """What a rank finds of its keys and values.

    Attributes:
        statistics: a buffer as `parts.measured` returns it, empty without keys; None if no statistics are shared.
        careful: as of `parts.measured`.
    """

    statistics: torch.Tensor | None
    careful: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class _Call:
    """A call that all ranks agree on.

    Attributes:
        checked: this rank's arguments.
        form: what its tensors are.
        q_spans, kv_spans: tokens of every rank.
        visible: which keys a query sees.
        gathers: whether keys and values are gathered, not passed on.
        attends_to_gathered: whether one call of attention takes all of them: see `gathered`.
    """

    checked: Checked
    form: Format
    ranks: Ranks
    q_spans: list[Spans]
    kv_spans: list[Spans]
    visible: Visible
    gathers: bool
    attends_to_gathered: bool

    def run(self, measured: Measured, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """out (B, Hq, Sq of this rank, Dv) and LSE (B, Hq, Sq of this rank).

        Args:
            measured: what `measure` returned.
        """
        q, k, v = self.checked.floats
        form, ranks = self.form, self.ranks
        mine = self.kv_spans[ranks.rank]
        pending, careful = self._start_gathering(measured.statistics), measured.careful
        queries = None if ranks.inner is None else self._queries()  # while statistics are on their way
        found = self._statistics(pending)
        if self.attends_to_gathered:
            assert ranks.outer is not None and found is not None
            attention = GatheredAttention(self.checked, form, ranks.outer, found, careful)
            return attention.run(max(map(tokens_of, self.q_spans)), return_lse)
        own = packed_kv(k, v, mine, found, careful, form)
        share, size = form.of_heads(ranks.inner_size), ranks.inner_size
        parts = [parts_in(self.kv_spans[o * size : (o + 1) * size], share) for o in range(ranks.outer_size)]
        steps, needs_lse = self._steps(parts), return_lse or self.checked.sinks is not None
        if queries is None:
            runs: Spans = self.q_spans[ranks.rank]
            buffers = self._buffers(own, parts, share, steps)
            queries = self._queries()  # while transfers begin: see Ring
            if isinstance(queries, torch.Tensor) and ranks.outer_size > 1:
                let_transfers_start(q.device)
            out, lse = self._attended(queries, runs, buffers, parts, found, share, steps)
        else:
            queries, runs, own, order = self._traded(queries, own)
            heads = _kv_heads(form, ranks.inner_rank, ranks.inner_size)
            out, lse = self._attended(queries, runs, self._buffers(own, parts, share, steps), parts, of_heads(found, heads), share, steps)
            out, lse = self._returned(out, lse, order, needs_lse)
        if needs_lse and found is not None and found.k_mean is not None and not self.checked.softcap:
            lse = ops.library_ops.unsmoothed_lse(lse.contiguous(), q, found.k_mean, self.checked.softmax_scale, form.rotated)
        return finished(out, lse, self.checked.sinks, self.checked.out_dtype)

    def _total(self) -> int:
        return sum(map(tokens_of, self.kv_spans))

    def measure(self) -> Measured:
        """Measure this rank's keys and values, which needs no other rank."""
        total = self._total()
        if self.form.exact or not self.form.shared or not total:
            return Measured(None, None)
        _, k, v = self.checked.floats
        mine = held([self.kv_spans[self.ranks.rank]])
        return Measured(*measured(k, v, mine, total, self.form)) if mine else Measured(k.new_empty(0, dtype=torch.uint8), None)

    def _start_gathering(self, gathered: torch.Tensor | None) -> Transfer | None:
        """Begin to gather the partial statistics of all ranks; None if there are none that all share."""
        if gathered is None:
            return None
        ranks, form, total = self.ranks, self.form, self._total()
        size = max(size_of(form.statistics_forms(some, total)) for some in (held([spans]) for spans in self.kv_spans) if some)
        for group in ranks.groups[:-1]:
            gathered = start_gather(gathered, size, group).wait()
            size = gathered.numel()
        return start_gather(gathered, size, ranks.groups[-1])

    def _statistics(self, gathering: Transfer | None) -> Statistics | None:
        """The statistics of the sequence, of what `_start_statistics` gathers."""
        if gathering is None:
            return None
        gathered = gathering.wait()
        total, form = self._total(), self.form
        found: list[tuple[Span, PartialStatistics]] = []
        for spans, buffer in zip(self.kv_spans, gathered.chunk(self.ranks.size), strict=True):
            if some := held([spans]):
                found += form.split_statistics(unpacked(buffer, form.statistics_forms(some, total)), some, total)
        return joined_statistics(found, total, form)

    def _queries(self) -> torch.Tensor | Quantized:
        q = self.checked.floats[0]
        return q if self.form.float_queries else quantized_queries(q, self.form)

    def _buffers(self, own: torch.Tensor, parts: list[list[Spans]], form: Format, steps: int) -> Iterable[tuple[int, torch.Tensor]]:
        """Begin the transfers of the outer group. Returns the rank's keys and values, and then those of the others.

        Args:
            own: this rank's keys and values.
            parts: the parts in the buffer of every rank.
            form: of the tensors in the buffers.
            steps: of a ring.
        """
        outer, size, rank = self.ranks.outer, self.ranks.outer_size, self.ranks.outer_rank
        if outer is None or size == 1:
            return [(rank, own)]
        sizes = [size_of(form.forms_of(some)) for some in parts]
        if self.gathers:
            return _gathered(own, sizes, rank, start_gather(own, max(sizes), outer))
        order = [(rank - step) % size for step in range(steps)]
        return zip(order, Ring(own, [sizes[index] for index in order], outer), strict=True)

    def _steps(self, parts: list[list[Spans]]) -> int:
        """Steps in which keys and values come, the first with a rank's own. A ring ends where a window does."""
        size, inner = self.ranks.outer_size, self.ranks.inner_size
        if self.gathers or not self.visible.has_window:
            return size

        def sees(rank: int, other: int) -> bool:
            runs = [span for spans in self.q_spans[rank * inner : (rank + 1) * inner] for span in spans]
            return any(pieces(runs, part, self.visible) for part in parts[other])

        return max(ring_steps(size, sees), 1)

    def _attended(
        self,
        q: torch.Tensor | Quantized,
        runs: Spans,
        buffers: Iterable[tuple[int, torch.Tensor]],
        parts: list[list[Spans]],
        found: Statistics | None,
        form: Format,
        steps: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of queries to all keys.

        Args:
            buffers: keys and values of the ranks of the outer group, as `_buffers` returns them.
            parts: the parts in the buffer of every rank.
            form: of the tensors in the buffers.
            steps: how many buffers come.

        Returns:
            out (B, H, S, Dv) in the call's output dtype, and LSE (B, H, S), for K without its mean.
        """
        like = q.data if isinstance(q, Quantized) else q
        v_mean = found.v_mean if found is not None and sum(map(len, parts)) > 1 else None
        total, lanes = Accumulator(like, form.value_dim, v_mean), Lanes(like.device)
        calls = PartCalls(self.checked, self.form, self.visible)
        arriving = iter(buffers)
        for step in range(steps):
            with lanes.lane(self._lane(step)):
                index, buffer = next(arriving)
                for part in parts_of(buffer, parts[index], found, form):
                    if self.checked.softcap and found is not None:
                        part = replace(part, k_mean=found.k_mean)
                    calls.attend(total, q, runs, part if v_mean is None else part.without_v_mean())
        return total.result(torch.float32 if self.checked.sinks is not None else self.checked.out_dtype)

    def _lane(self, step: int) -> int:
        """Of `Lanes`, where a step attends. Steps on different lanes overlap, so that the last tiles of a step do not
        leave multiprocessors idle. But a transfer that becomes ready during a step on lane 1 would wait for its end:
        only steps behind the last transfer take turns."""
        settled = 1 if self.gathers else self.ranks.outer_size - 1
        return (step - settled + 1) % 2 if 0 < settled <= step else 0

    def _traded(
        self, q: torch.Tensor | Quantized, own: torch.Tensor
    ) -> tuple[torch.Tensor | Quantized, Spans, torch.Tensor, list[tuple[int, int, Span]]]:
        """Tokens traded for heads.

        Args:
            own: the buffer of this rank's keys and values.

        Returns:
            queries of this rank's heads, of all tokens of the inner group in the order of the sequence; their runs; the
            buffer of keys and values, in the same order; and for each run before adjacent ones were joined, the rank
            that it came from, its first row there, and its tokens.
        """
        form, ranks, inner = self.form, self.ranks, self.ranks.inner
        assert inner is not None
        share, size = form.of_heads(ranks.inner_size), ranks.inner_size
        first = ranks.outer_rank * size
        peers_q, peers_kv = self.q_spans[first : first + size], [held([some]) for some in self.kv_spans[first : first + size]]

        def forms_of(peer: int) -> list[Form]:
            return [*share.q_forms(tokens_of(peers_q[peer])), *share.forms_of(parts_in([peers_kv[peer]], share))]

        mine, buffers = forms_of(ranks.inner_rank), []
        q_tensors = [q.data, q.scale] if isinstance(q, Quantized) else [q]
        kv_tensors = unpacked(own, form.forms_of(parts_in([peers_kv[ranks.inner_rank]], form)))
        for peer in range(size):
            q_heads, kv_heads = _q_heads(form, peer, size), _kv_heads(form, peer, size)
            buffers.append(packed([x[:, q_heads] for x in q_tensors] + [x[:, kv_heads] for x in kv_tensors], mine))
        received_sizes = [size_of(forms_of(peer)) for peer in range(size)]
        received = exchange(torch.cat(buffers), [x.numel() for x in buffers], received_sizes, inner)
        q_runs: list[tuple[Span, int, int, list[torch.Tensor]]] = []
        of_peers: list[tuple[Spans, list[torch.Tensor]]] = []
        count = len(q_tensors)
        for peer, buffer in enumerate(received):
            found = unpacked(buffer, forms_of(peer))
            row = 0
            for span in peers_q[peer]:
                if span.length:
                    q_runs.append((span, peer, row, [x[:, :, row : row + span.length] for x in found[:count]]))
                row += span.length
            width = len(share.kv_forms(0))
            for i, part in enumerate(parts_in([peers_kv[peer]], share)):
                of_peers.append((part, found[count + i * width : count + (i + 1) * width]))
        q_runs.sort(key=lambda one: one[0].first)
        queries = _joined_queries(q, [some for *_, some in q_runs], share)
        order = [(peer, row, span) for span, peer, row, _ in q_runs]
        return queries, _joined_spans([span for span, *_ in q_runs]), assembled(of_peers, share, own), order

    def _returned(
        self, out: torch.Tensor, lse: torch.Tensor, order: list[tuple[int, int, Span]], return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of this rank's heads traded for those of its tokens."""
        ranks, inner = self.ranks, self.ranks.inner
        assert inner is not None
        size, first = ranks.inner_size, ranks.outer_rank * ranks.inner_size
        lengths = [sum(span.length for span in self.q_spans[first + peer]) for peer in range(size)]
        batch, heads = out.shape[:2]
        rows: list[list[tuple[int, int, int]]] = [[] for _ in range(size)]
        start = 0
        for peer, row, span in order:
            rows[peer].append((row, start, span.length))
            start += span.length

        def traded(x: torch.Tensor) -> torch.Tensor:
            """x (B, H, S of all, …) as (B, H of all, S of this rank, …)."""
            sent = []
            for peer in range(size):
                parts = [x[:, :, at : at + length] for _, at, length in sorted(rows[peer])]
                sent.append((torch.cat(parts, 2) if parts else x[:, :, :0]).contiguous().view(-1).view(torch.uint8))
            shape = (batch, heads, lengths[ranks.inner_rank], *x.shape[3:])
            found = exchange(torch.cat(sent), [one.numel() for one in sent], [math.prod(shape) * x.element_size()] * size, inner)
            return torch.cat([one.view(x.dtype).view(shape) for one in found], 1)

        return traded(out), traded(lse) if return_lse else lse


def _gathered(own: torch.Tensor, sizes: Sequence[int], rank: int, gathering: Transfer) -> Iterator[tuple[int, torch.Tensor]]:
    """This rank's buffer, and then those of the other ranks, which are `sizes` bytes long."""
    yield rank, own
    received, pitch = gathering.wait(), max(sizes)
    for index, size in enumerate(sizes):
        if index != rank:
            yield index, received[index * pitch : index * pitch + size]


def _q_heads(form: Format, rank: int, ranks: int) -> slice:
    """The query heads of one of `ranks` ranks."""
    each = form.q_heads // ranks
    return slice(rank * each, (rank + 1) * each)


def _kv_heads(form: Format, rank: int, ranks: int) -> slice:
    """The key/value heads that serve the query heads of a rank."""
    if form.kv_heads % ranks == 0:
        each = form.kv_heads // ranks
        return slice(rank * each, (rank + 1) * each)
    index = rank * form.kv_heads // ranks
    return slice(index, index + 1)


def _joined_queries(like: torch.Tensor | Quantized, runs: list[list[torch.Tensor]], form: Format) -> torch.Tensor | Quantized:
    """Queries of several runs, one after another.

    Args:
        like: what they were made of.
        runs: for each run, its rows, and their scales if they are quantized.
    """
    if isinstance(like, torch.Tensor):
        return torch.cat([rows for (rows,) in runs], 2) if runs else like[:, : form.q_heads, :0]
    if not runs:
        return Quantized(like.data[:, : form.q_heads, :0], like.scale[:, : form.q_heads, :0], "token", "rows", 0, None, like.rotated)
    data = concatenated_rows([rows for rows, _ in runs])
    return Quantized(data, torch.cat([scales for _, scales in runs], 2), "token", "rows", data.shape[2], None, like.rotated)


def _joined_spans(spans: Sequence[Span]) -> Spans:
    """Spans with adjacent ones joined."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].first + found[-1].length == span.first:
            found[-1] = Span(found[-1].first, found[-1].length + span.length)
        else:
            found.append(span)
    return tuple(found)
