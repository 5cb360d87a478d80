"""The KV cache: pages of quantized keys and values, and the last tokens of each sequence in half precision."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Numbers

import torch

from . import pages, validate
from .ambient import shielded
from .device import device_of
from .ops import current, has_kernels
from .pages import PAGE, RECENT, Pages, Step, Storage
from .quantization import row_type
from .recipe import DEFAULT_RECIPE, E4M3, Recipe
from .triton import paged_append
from .validate import FLOATS, BackendUnavailable

BACKENDS = ("auto", "triton", "modelled")


def by_kernels(backend: object, device: torch.device) -> bool:
    """Whether Triton's kernels serve a cache on `device`: with `auto` on GPUs.

    Raises:
        ValueError: there is no such backend.
        BackendUnavailable: it can't run here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {BACKENDS}")
    if backend == "triton" and not has_kernels(device):
        raise BackendUnavailable(f"triton: the cache is on {device}; it must be on a GPU, or TRITON_INTERPRET=1 be set before Triton is imported")
    return backend == "triton" or (backend == "auto" and device.type == "cuda")


class KVCache:
    """An FP8 KV cache of several sequences, for one layer.

    A page has 128 tokens of one sequence. It is quantized once, when it is complete, from its own tokens and from the
    statistics of the sequence's first page. The last 192 tokens of each sequence are also kept as they came: queries
    attend to the keys of their own page in half precision, and a sequence can be cut back without loss. Later tokens
    never change what earlier queries saw, and chunks of any sizes write the same bytes.

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

    The public tensors `storage.page_table` int32 (N, P) and `storage.lengths` int32 (N) are on the device, and kernels
    read them there. The cache also counts on the host, so that no function waits for the device.

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
        for name, number, least in (("sequences", sequences, 1), ("num_pages", num_pages, 0), ("kv_heads", kv_heads, 1)):
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise ValueError(f"{name} is {number!r}; it must be an int of at least {least}")
        validate.check_dims(head_dim, value_dim)
        validate.check_recipe(recipe)
        reason = pages.unsupported_recipe(recipe)
        if reason is not None:
            raise ValueError(reason)
        if dtype not in FLOATS:
            raise TypeError(f"dtype is {dtype}; it must be one of {FLOATS}")
        self.recipe = recipe
        new = functools.partial(torch.zeros, device=device)
        heads, rows = (num_pages, kv_heads), (sequences, kv_heads)
        self.storage = Storage(
            Pages(
                new(*heads, PAGE, head_dim, dtype=row_type(recipe.qk)),
                new(*heads, dtype=torch.float32),
                new(*heads, value_dim, PAGE, dtype=torch.uint8).view(E4M3),
                new(*heads, dtype=torch.float32),
            ),
            new(*rows, head_dim, dtype=torch.float32),
            new(*rows, value_dim, dtype=torch.float32),
            new(*rows, value_dim, dtype=torch.float32),
            new(*rows, RECENT, head_dim, dtype=dtype),
            new(*rows, RECENT, value_dim, dtype=dtype),
            new(sequences, num_pages, dtype=torch.int32),
            new(sequences, dtype=torch.int32),
            new(sequences, 1 + kv_heads, dtype=torch.int32),
        )
        self._lengths = [0] * sequences
        self._oldest = [0] * sequences  # position of the first token that is kept in half precision
        self._held: list[list[int]] = [[] for _ in range(sequences)]  # numbers of the pages of each sequence
        self._holders = [0] * num_pages  # sequences that hold each page
        self._free = [*range(num_pages)][::-1]
        self._tensors: dict[tuple[int, ...], torch.Tensor] = {}

    @property
    def sequences(self) -> int:
        """N."""
        return len(self._lengths)

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
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each sequence, as the host counts them."""
        return tuple(self._lengths)

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self.storage.tensors())

    def append(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        sequences: Numbers[int] | None = None,
        counts: Numbers[int] | None = None,
        backend: str = "auto",
    ) -> None:
        """Append new tokens to some sequences: a prompt, a chunk of it, a decoded token, several tokens to verify.

        Args:
            key: (B, Hkv, S, D), the cache's dtype and device, unit last stride.
            value: (B, Hkv, S, Dv), likewise.
            sequences: the B sequences that the rows belong to, each at most once; None: all, in order.
            counts: how many of the S tokens are real, from the first on, for each of the B; None: all S.
            backend: `auto` (Triton on a GPU, else modelled), `triton`, or `modelled`: the definition in plain torch.

        Raises:
            BackendUnavailable: the backend can't run here.
            TypeError, ValueError: an argument isn't as above.
            RuntimeError: there are too few free pages, or an argument requires grad. Nothing is appended then.
        """
        kernels = by_kernels(backend, self.device)
        self.checked_append(key, value, self.checked_rows(key, sequences, counts), kernels)

    def checked_rows(self, x: object, sequences: Numbers[int] | None, counts: Numbers[int] | None, name: str = "key") -> list[tuple[int, int]]:
        """Sequence and number of new tokens of each row of x (B, H, S, D), from the arguments of the same names."""
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            raise TypeError(f"{name} must be a torch.Tensor of shape (B, H, S, D)")
        chosen = [*range(self.sequences)] if sequences is None else [*sequences]
        given = [x.shape[2]] * len(chosen) if counts is None else [*counts]
        if not all(isinstance(n, int) and 0 <= n < self.sequences for n in chosen) or len({*chosen}) != len(chosen):
            raise ValueError(f"sequences is {chosen}; it must be different ints from 0 to {self.sequences - 1}")
        if len(chosen) != x.shape[0]:
            raise ValueError(f"{name} has batch {x.shape[0]}; it must be the number of sequences, {len(chosen)}")
        if len(given) != len(chosen) or not all(isinstance(n, int) and 0 <= n <= x.shape[2] for n in given):
            raise ValueError(f"counts is {given}; it must be {len(chosen)} ints from 0 to {name}'s length, {x.shape[2]}")
        return [*zip(chosen, given, strict=True)]

    def checked_append(self, key: torch.Tensor, value: torch.Tensor, rows: list[tuple[int, int]], kernels: bool) -> Step:
        """`append` of rows (sequence, number of tokens) that `checked_rows` gave."""
        like = (self.dtype, self.device)
        validate.check_tokens("key", key, like, (None, self.kv_heads, None, self.head_dim))
        validate.check_tokens("value", value, like, (*key.shape[:3], self.value_dim))
        self.reserve([(sequence, self._lengths[sequence] + count) for sequence, count in rows])
        step = self.step(rows, key, value)
        if kernels:
            with current(self.device):
                shielded(paged_append.append)(self.storage, step, self.recipe, device_of(self.device))
        else:
            shielded(pages.append)(self.storage, step, self.recipe)
        for sequence, count in rows:
            self._lengths[sequence] += count
            self._oldest[sequence] = max(self._oldest[sequence], self._lengths[sequence] - RECENT)
        return step

    def step(self, rows: list[tuple[int, int]], key: torch.Tensor | None = None, value: torch.Tensor | None = None) -> Step:
        """The `Step` of rows (sequence, number of tokens)."""
        sequences, counts = zip(*rows, strict=True)
        return Step(self._on_device(sequences), self._on_device(counts), key, value)

    def _on_device(self, numbers: tuple[int, ...]) -> torch.Tensor:
        """int32 numbers on the device. The last few are kept, because a decoder asks for the same ones at every
        step."""
        if numbers not in self._tensors:
            if len(self._tensors) >= 16:
                self._tensors.clear()
            self._tensors[numbers] = self._copied(numbers, torch.int32)
        return self._tensors[numbers]

    def _copied(self, numbers: object, dtype: torch.dtype) -> torch.Tensor:
        """Numbers of the host on the device, which isn't waited for."""
        on_gpu = self.device.type == "cuda"
        return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=on_gpu).to(self.device, non_blocking=on_gpu)

    def reserve(self, wanted: Numbers[tuple[int, int]]) -> None:
        """Give sequences the pages that they need to grow to some lengths.

        Args:
            wanted: pairs of a sequence and its length.

        Raises:
            RuntimeError: there are too few free pages. Nothing is reserved then.
        """
        missing = [(sequence, max(length // PAGE - len(self._held[sequence]), 0)) for sequence, length in wanted]
        total = sum(count for _, count in missing)
        if total > len(self._free):
            raise RuntimeError(
                f"the cache has {len(self._free)} free pages of {PAGE} tokens; {total} are needed: truncate sequences, or make it larger"
            )
        if total == 0:
            return
        at: list[tuple[int, int]] = []
        numbers = []
        for sequence, count in missing:
            for _ in range(count):
                number = self._free.pop()
                self._holders[number] = 1
                at.append((sequence, len(self._held[sequence])))
                self._held[sequence].append(number)
                numbers.append(number)
        # sequence, index and number in one copy to the device
        table = self._copied([[*where, number] for where, number in zip(at, numbers, strict=True)], torch.int64)
        self.storage.page_table[table[:, 0], table[:, 1]] = table[:, 2].int()

    def oldest_page(self, sequence: int) -> int:
        """The first page of a sequence of which all tokens are still kept in half precision."""
        return -(-self._oldest[sequence] // PAGE)

    def truncate(self, sequence: int, length: int) -> None:
        """Cut a sequence back to its first `length` tokens, and give back its pages behind them.

        A length inside a page that was quantized needs that page's tokens in half precision again. The cache has the
        last 192 tokens, so a sequence can be cut back by 65 tokens after any append, and always to a multiple of 128.

        Raises:
            ValueError: the sequence isn't there, or has fewer tokens, or the page's tokens in half precision are gone.
        """
        self._check_sequence("sequence", sequence)
        if not isinstance(length, int) or not 0 <= length <= self._lengths[sequence]:
            raise ValueError(f"length is {length!r}; it must be an int from 0 to the sequence's length, {self._lengths[sequence]}")
        if length % PAGE and length // PAGE < self.oldest_page(sequence):
            raise ValueError(
                f"length is {length}, inside a page whose tokens in half precision are gone; it must be a multiple of {PAGE},"
                f" or at least {self.oldest_page(sequence) * PAGE}"
            )
        self._lengths[sequence] = length
        self._oldest[sequence] = min(self._oldest[sequence], length)
        for number in self._held[sequence][length // PAGE :]:
            self._holders[number] -= 1
            if self._holders[number] == 0:
                self._free.append(number)
        del self._held[sequence][length // PAGE :]
        self.storage.lengths[sequence] = length

    def fork(self, source: int, target: int) -> None:
        """Make an empty sequence a copy of another one. Both hold the same pages; only the last tokens are copied.

        Pages are never written again once they are complete, so either sequence may be cut back and go on on its own.

        Raises:
            ValueError: a sequence isn't there, or `target` isn't empty.
        """
        self._check_sequence("source", source)
        self._check_sequence("target", target)
        if self._lengths[target] != 0 or self._held[target]:
            raise ValueError(f"target is {target}, which has {self._lengths[target]} tokens; it must be empty: truncate(target, 0)")
        held = self._held[source][: self._lengths[source] // PAGE]
        for number in held:
            self._holders[number] += 1
        self._held[target] = [*held]
        self._lengths[target], self._oldest[target] = self._lengths[source], self._oldest[source]
        s = self.storage
        for x in (s.k_mean, s.v_mean, s.v_scale, s.k, s.v, s.page_table, s.lengths):
            x[target] = x[source]

    def _check_sequence(self, name: str, sequence: object) -> None:
        if not isinstance(sequence, int) or not 0 <= sequence < self.sequences:
            raise ValueError(f"{name} is {sequence!r}; it must be an int from 0 to {self.sequences - 1}")
