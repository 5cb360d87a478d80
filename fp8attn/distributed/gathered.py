"""Full attention to gathered keys: those of all ranks in one call, for some heads after the others.

Every rank quantizes its keys and values into its slot of tensors that have one for each rank. The slots of a few heads
are gathered first, those of the other heads while attention to the first ones runs. Nothing is merged, so a rank's rows
are those of one process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from .. import eager, ops
from ..ambient import shielded
from ..api import sdpa
from ..call import empty_lse, empty_output
from ..cuda.build import BuildError
from ..layout import padded_length
from ..prepare import Prepared, call_from, kernel_quantizes_query
from ..quantization import Statistics
from ..recipe import SCALE_BLOCK, Quantized
from ..validate import Checked
from .parts import Format, of_heads, quantize_part, quantized_part
from .transport import Lanes, Transfer, let_transfers_start, start_gather_slots
from .wire import concatenated_rows, layout_of

MOST_RANKS = 8
"""The most ranks with which `auto` gathers the keys and values of all tokens. With 8 ranks, these take twice the memory
of a rank's own q, k, v and output in bfloat16, if all have as many heads."""

HIDING_ROWS = 4096
"""Query rows per key/value head from which attention to a key takes longer than its transfer: 2·D FLOP a row at
10^15 FLOP/s, and 2·D bytes at 2·10^11 bytes/s with a margin of two."""


def unsupported(form: Format, lengths: Sequence[int]) -> str | None:
    """Why ranks with so many keys can't attend to all in one call, or None if they can: the same on all ranks."""
    if len(lengths) == 1:
        return "there is one rank"
    if min(lengths) < max(lengths):
        return f"ranks have {min(lengths)} to {max(lengths)} keys; they must have as many"
    if not lengths[0] or lengths[0] % SCALE_BLOCK:
        return f"ranks have {lengths[0]} keys; they must have a multiple of {SCALE_BLOCK}"
    if form.exact or not form.shared or form.k_granularity != "block":
        return "K and V aren't quantized by statistics of the sequence, with K's scales per block"
    return None if form.kv_heads > 1 else "there is one head, so that no other one hides its transfer"


def _first_heads(form: Format, rows: int, ranks: int) -> int:
    """How many heads are gathered first: as few as hide the transfer of the others.

    Args:
        rows: query rows of a rank per key/value head.
    """
    share = HIDING_ROWS * (ranks - 1) / (ranks * max(rows, 1))  # of a head's transfer in the time of its attention
    return min(math.ceil(form.kv_heads * share / (1 + share)), form.kv_heads - 1)


class Slots:
    """A buffer with a slot of a part's keys and values for every rank.

    Attributes:
        buffer: uint8 (ranks, bytes of a slot).
        tensors: (ranks, B, …), as `Format.kv_forms` says: K's rows and scales, and V, whose slots are whole rows apart.
    """

    def __init__(self, form: Format, length: int, ranks: int, like: torch.Tensor) -> None:
        layout = layout_of(tuple(form.kv_forms(length)))
        size = -(-layout.bytes // padded_length(length)) * padded_length(length)
        self.buffer = torch.empty(ranks, size, dtype=torch.uint8, device=like.device)
        self.tensors = [
            self.buffer.view(dtype).as_strided((ranks, *shape), (size // dtype.itemsize, *strides), first)
            for dtype, shape, strides, first in layout.places
        ]


@dataclass(frozen=True, eq=False)
class _Heads:
    """What is gathered of some key/value heads.

    Attributes:
        q_heads: the query heads that they serve.
        slots: of their keys and values.
        found: their statistics.
        form: of the tensors of a slot.
        transfer: brings the slots of the other ranks.
    """

    q_heads: slice
    slots: Slots
    found: Statistics
    form: Format
    transfer: Transfer

    def of_batch(self, index: int) -> tuple[Quantized, Quantized]:
        """Key and value of one batch, in shards."""
        tensors = [x[:, index] for x in self.slots.tensors]
        one = slice(index, index + 1)
        v_scale = self.found.v_scale if self.found.v_scale.shape[0] == 1 else self.found.v_scale[one]
        k_mean, v_mean = (None if mean is None else mean[one] for mean in (self.found.k_mean, self.found.v_mean))
        length = tensors[0].shape[0] * tensors[0].shape[2]
        key, value = quantized_part(tensors, length, Statistics(k_mean, v_mean, v_scale), replace(self.form, batch=1))
        return replace(key, mean=k_mean), value

    def copied(self) -> tuple[Quantized, Quantized]:
        """Key and value of all batches, in tensors that aren't in shards."""
        rows, scale, values = (x.unbind(0) for x in self.slots.tensors)
        tensors = concatenated_rows(rows), torch.cat(scale, 2), torch.cat([x.view(torch.uint8) for x in values], 3).view(values[0].dtype)
        key, value = quantized_part(tensors, tensors[0].shape[2], self.found, self.form)
        return replace(key, mean=self.found.k_mean), value


@dataclass(frozen=True, eq=False)
class GatheredAttention:
    """A call in which the ranks attend to gathered keys.

    Attributes:
        checked: this rank's arguments.
        form: what its tensors are.
        group: the ranks.
        found: the statistics of the sequence.
        careful: as of ChunkStatistics, of this rank's values, or None.
    """

    checked: Checked
    form: Format
    group: dist.ProcessGroup
    found: Statistics
    careful: torch.Tensor | None

    def run(self, rows: int, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """out (B, Hq, Sq of this rank, Dv) and LSE (B, Hq, Sq of this rank), empty if not asked for.

        Args:
            rows: the most queries of a rank.
        """
        q, form = self.checked.floats[0], self.form
        first = _first_heads(form, rows * form.q_heads // form.kv_heads, self.group.size())
        gathered = [self._gather(slice(0, first)), self._gather(slice(first, form.kv_heads))]
        results = empty_output(q, form.value_dim, self.checked.out_dtype), empty_lse(q, return_lse)
        lanes = Lanes(q.device)
        for i, some in enumerate(gathered):
            with lanes.lane(i):
                some.transfer.wait()
                if i == 0:
                    let_transfers_start(q.device)
                self._attend(some, *results, return_lse)
        lanes.join()
        return results

    def _gather(self, heads: slice) -> _Heads:
        """Quantize this rank's keys and values of some heads, and begin to gather those of the others."""
        _, k, v = self.checked.floats
        rank, length, form = self.group.rank(), k.shape[2], replace(self.form, kv_heads=heads.stop - heads.start)
        found, slots = of_heads(self.found, heads), Slots(form, length, self.group.size(), k)
        assert found is not None
        careful = None if self.careful is None else self.careful[:, heads].contiguous()
        own = quantized_part([x[rank] for x in slots.tensors], length, found, form)
        quantize_part(own, (k[:, heads], v[:, heads]), found, careful, form)
        shared = self.form.q_heads // self.form.kv_heads
        transfer = start_gather_slots(slots.buffer, self.group)
        return _Heads(slice(heads.start * shared, heads.stop * shared), slots, found, form, transfer)

    def _attend(self, some: _Heads, out: torch.Tensor, lse: torch.Tensor, return_lse: bool) -> None:
        """Write the results of some heads."""
        q, sinks = self.checked.floats[0][:, some.q_heads], self.checked.sinks
        if not q.numel():
            return
        into = out[:, some.q_heads], lse[:, some.q_heads] if return_lse else lse
        checked = replace(self.checked, query=q, sinks=None if sinks is None else sinks[some.q_heads])
        if all(self._by_shards(checked, some, into, batch, return_lse) for batch in range(q.shape[0])):
            return
        found = sdpa(
            q, *some.copied(), scale=checked.softmax_scale, enable_gqa=True, softcap=checked.softcap, sinks=checked.sinks,
            recipe=self.form.recipe, out_dtype=checked.out_dtype, return_lse=return_lse, backend=self.form.backend,
        )  # fmt: skip
        for x, y in zip(into, found if isinstance(found, tuple) else (found,), strict=False):
            x.copy_(y)

    def _by_shards(self, checked: Checked, some: _Heads, into: tuple[torch.Tensor, torch.Tensor], batch: int, return_lse: bool) -> bool:
        """Attention of one batch by a kernel that takes keys and values in shards and quantizes queries. False if there
        is none."""
        backend, recipe, one = self.form.backend, self.form.recipe, slice(batch, batch + 1)
        query, (key, value) = checked.floats[0][one], some.of_batch(batch)

        @shielded
        def attend(q: torch.Tensor, key: Quantized, value: Quantized, sinks: torch.Tensor | None, *into: torch.Tensor) -> None:
            call = call_from(Prepared(q, key, value, replace(checked, query=q, sinks=sinks), recipe), return_lse)
            planned = ops.plan_backend(backend, call)
            assert not isinstance(planned, str)
            with ops.current(q.device):
                ops.forward_by_cuda(call, planned, (into[0], into[1]))

        options = ("gathered", backend, recipe.text, checked.softmax_scale, checked.softcap, checked.out_dtype, return_lse)
        operands, others = (query, key, value), (checked.sinks, into[0][one], into[1][one] if return_lse else into[1])
        like = eager.likeness_of(options, operands, others)
        if eager.repeat(like, attend) is not None:
            return True
        if not kernel_quantizes_query(Prepared(query, key, value, checked, recipe), backend):
            return False
        try:
            attend(*operands, *others)
        except BuildError:
            if backend == "cuda":
                raise
            return False  # sdpa says so, and goes on with Triton
        eager.remember(like)
        return True
