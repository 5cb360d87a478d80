"""The KV cache: pages of quantized keys and values, and the last tokens of each sequence in half precision."""

from __future__ import annotations

import copy
import functools

import torch
from torch.compiler import is_compiling

from . import eager, pages, recording, validate
from .paged_ops import operator_of, runs_kernels
from .pages import PAGE, RECENT, PagedBatch, Pages, Stage, Storage
from .quantization import row_type
from .recipe import DEFAULT_RECIPE, E4M3, Recipe
from .validate import FLOATS


class KVCache:
    """An FP8 KV cache of several sequences, for one layer.

    A page has 128 tokens of one sequence. It is quantized once, when it is complete, from its own tokens and from the
    statistics of the sequence's first page. The last 192 tokens of each sequence are also kept as they came: queries
    attend to the keys of their own page in half precision, and a sequence can be cut back without loss. Later tokens
    never change what earlier queries saw, and chunks of any sizes write the same bytes.

    Which pages a sequence has and how long it is stands in a `PagedBatch`, which the caller owns. `PageTable` is one
    way to have one.

    Args:
        sequences: N, the number of sequences. They are numbered from 0 and start empty.
        num_pages: P, the number of pages of all sequences together. A sequence of n tokens holds n // 128 pages; forks
            share them.
        kv_heads: Hkv.
        head_dim: D, a multiple of 8 from 16 to 256.
        value_dim: Dv, the same; None for D.
        recipe: the default, `PRECISE`, or another of their granularities: smooth_k, smooth_v, rotate and qk may differ.
        dtype: of keys, values and queries: bfloat16, float16 or float32.
        device: of all tensors.

    Bytes per token and head are D + Dv, and for a sequence of n tokens 384 (D + Dv) / n for its last tokens, in half
    precision, and less than 0.5 % for scales and statistics from 1k tokens on: 1.05 (D + Dv) at 8k.

    Raises:
        TypeError, ValueError: an argument isn't as above.
    """

    def __init__(
        self,
        sequences: int,
        num_pages: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        recipe: Recipe = DEFAULT_RECIPE,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        for name, number in (("sequences", sequences), ("num_pages", num_pages), ("kv_heads", kv_heads)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"{name} is {number!r}; it must be an int of at least 1")
        validate.check_dims(head_dim, value_dim)
        validate.check_recipe(recipe)
        reason = pages.unsupported_recipe(recipe)
        if reason is not None:
            raise ValueError(reason)
        if dtype not in FLOATS:
            raise TypeError(f"dtype is {dtype}; it must be one of {FLOATS}")
        self.recipe = recipe
        new = functools.partial(torch.zeros, device=device)
        of_pages, of_sequences = (num_pages, kv_heads), (sequences, kv_heads)
        self.storage = Storage(
            Pages(
                new(*of_pages, PAGE, head_dim, dtype=row_type(recipe.qk)),
                new(*of_pages, dtype=torch.float32),
                new(*of_pages, value_dim, PAGE, dtype=torch.uint8).view(E4M3),
                new(*of_pages, dtype=torch.float32),
            ),
            new(*of_sequences, head_dim, dtype=torch.float32),
            new(*of_sequences, value_dim, dtype=torch.float32),
            new(*of_sequences, value_dim, dtype=torch.float32),
            new(*of_sequences, RECENT, head_dim, dtype=dtype),
            new(*of_sequences, RECENT, value_dim, dtype=dtype),
            new(*of_sequences, dtype=torch.int32),
        )

    @property
    def sequences(self) -> int:
        """N."""
        return self.storage.k.shape[0]

    @property
    def num_pages(self) -> int:
        """P."""
        return self.storage.pages.k.shape[0]

    @property
    def kv_heads(self) -> int:
        """Hkv."""
        return self.storage.k.shape[1]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.storage.k.shape[3]

    @property
    def value_dim(self) -> int:
        """Dv."""
        return self.storage.v.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys, values and queries."""
        return self.storage.k.dtype

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.storage.k.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self.storage.tensors())

    def append(self, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch, *, backend: str = "auto") -> None:
        """Append new tokens to some sequences: a prompt, a chunk of it, a decoded token, several tokens to verify.

        The lengths of the batch include these tokens.

        Args:
            key: (B, Hkv, S, D), the cache's dtype and device, unit last stride. If the batch has `cu_seqlens`,
                (T, Hkv, D).
            value: (B, Hkv, S, Dv) or (T, Hkv, Dv), likewise.
            batch: the B sequences that the rows belong to.
            backend: `auto` (kernels on a GPU, else modelled), `cuda`, `triton`, or `modelled`: the definition in plain
                torch. `cuda` takes bfloat16 and float16.

        Raises:
            BackendUnavailable: the backend can't run here.
            TypeError, ValueError: an argument isn't as above.
            RuntimeError: an argument requires grad; or `backend` is `cuda`, and the kernel can't be compiled here.
        """
        options, others = ("append", self.recipe.text, backend), self.tensors_with(batch)
        again = functools.partial(self._append_to, backend)
        like = None if others is None else eager.likeness_of(options, (key, value), others)
        if eager.repeat(like, again) is not None:
            return
        self.append_stage(key, value, batch, backend, Stage())
        if runs_kernels(backend, self.device):
            eager.remember(like)

    def append_stage(self, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch, backend: str, stage: Stage) -> None:
        """A part of `append`, which the launch cache doesn't keep."""
        r = self.recipe
        operator = operator_of("append", backend, batch)
        operator(key, value, self.storage.tensors(), *batch.tensors(), r.rotate, r.smooth_k, r.smooth_v, *stage)

    def _append_to(self, backend: str, key: torch.Tensor, value: torch.Tensor, *others: torch.Tensor | None) -> None:
        """`append` with other tensors: `others` are those of `tensors_with`."""
        cache, batch = self.with_tensors(others)
        cache.append(key, value, batch, backend=backend)

    def tensors_with(self, batch: PagedBatch) -> recording.Tensors | None:
        """The tensors of a batch and of the cache, for the launch cache; None if calls with them aren't kept."""
        if type(self) is not KVCache or type(batch) is not PagedBatch or is_compiling():
            return None
        return *batch.tensors(), *self.storage.tensors()

    def with_tensors(
        self, tensors: recording.Tensors, max_length: int | None = None, max_count: int | None = None, batch_invariant: bool = False
    ) -> tuple[KVCache, PagedBatch]:
        """A cache like this one and a batch, with other tensors: the inverse of `tensors_with`. The others are
        `PagedBatch.options`."""
        other = copy.copy(self)
        table, lengths, counts, sequences, cu_seqlens, *storage = tensors
        assert table is not None and lengths is not None
        other.storage = Storage.of([x for x in storage if x is not None])
        return other, PagedBatch(table, lengths, counts, sequences, max_length, cu_seqlens, max_count, batch_invariant)

    def fork(self, source: int, target: int) -> None:
        """Copy what a sequence has beside its pages to another one. The page table shares the pages.

        Raises:
            ValueError: a sequence isn't there.
        """
        for name, sequence in (("source", source), ("target", target)):
            if not isinstance(sequence, int) or not 0 <= sequence < self.sequences:
                raise ValueError(f"{name} is {sequence!r}; it must be an int from 0 to {self.sequences - 1}")
        s = self.storage
        for x in (s.k_mean, s.v_mean, s.v_scale, s.k, s.v):
            x[target] = x[source]

    def check(self, batch: PagedBatch, length: int) -> None:
        """Check the numbers of a batch for calls of S or T = `length` tokens. It waits for the device; no other call
        does.

        Raises:
            TypeError, ValueError: the batch isn't as `PagedBatch` says; or a sequence, a length, a count, cu_seqlens or
                the number of a complete page is out of range; or two rows have the same sequence.
        """
        validate.check_batch(batch, self.device)
        validate.check_numbers_of_batch(batch, length, self.sequences, self.num_pages)
