"""Which pages each sequence has: an allocator on the host, whose table is on the device."""

from __future__ import annotations

import torch

from .pages import PAGE, PagedBatch


class PageTable:
    """The pages and lengths of some sequences, shared by the KV caches of all layers.

    A convenience for `PagedBatch`: engines that already have tables of pages don't need it. Only page numbers are
    allocated on the host. Lengths are on the device alone; change them there, for example by `lengths += 1`.

    Args:
        sequences: N, the number of sequences. They are numbered from 0 and start empty.
        num_pages: P, the number of pages of all sequences together. Forks share them.
        max_pages: M, the largest number of pages of a sequence; None: num_pages.
        device: of both tensors.

    Attributes:
        table: int32 (N, M): the numbers of each sequence's pages; -1 where it has none.
        lengths: int32 (N): the sequences' tokens.

    Raises:
        ValueError: an argument isn't as above.
    """

    def __init__(self, sequences: int, num_pages: int, max_pages: int | None = None, device: torch.device | str = "cuda") -> None:
        max_pages = num_pages if max_pages is None else max_pages
        for name, number in (("sequences", sequences), ("num_pages", num_pages), ("max_pages", max_pages)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"{name} is {number!r}; it must be an int of at least 1")
        self.table = torch.full((sequences, max_pages), -1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device=device)
        self._held: list[list[int]] = [[] for _ in range(sequences)]
        self._holders = [0] * num_pages  # sequences that hold each page
        self._free = [*range(num_pages)][::-1]

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def batch(
        self, counts: torch.Tensor | None = None, max_length: int | None = None, cu_seqlens: torch.Tensor | None = None, max_count: int | None = None,
        batch_invariant: bool = False,
    ) -> PagedBatch:  # fmt: skip
        """All sequences as a batch, with the tensors of this object: later changes show in it."""
        return PagedBatch(self.table, self.lengths, counts, None, max_length, cu_seqlens, max_count, batch_invariant)

    def reserve(self, sequence: int, length: int) -> None:
        """Give a sequence the pages that it needs to grow to a length. A page is needed when it becomes complete.

        Raises:
            ValueError: the sequence isn't there, or the length needs more than M pages.
            RuntimeError: there are too few free pages. Nothing is reserved then.
        """
        held = self._pages_of("sequence", sequence)
        self._check_length(length)
        missing = max(length // PAGE - len(held), 0)
        if missing > len(self._free):
            raise RuntimeError(f"{len(self._free)} pages of {PAGE} tokens are free; {missing} are needed: release sequences, or have more pages")
        if missing == 0:
            return
        first = len(held)
        held += [self._free.pop() for _ in range(missing)]
        for number in held[first:]:
            self._holders[number] = 1
        self._write(sequence, first)

    def truncate(self, sequence: int, length: int) -> None:
        """Give back a sequence's pages that its first `length` tokens don't fill, and set its length.

        Without pages to give back, `lengths[sequence] = length` does the same, also on the device. A length inside a
        page that was complete needs that page's tokens in half precision: the caches have the last 192 tokens. So a
        sequence can be cut back by 65 tokens after any append, and always to a multiple of 128.

        Raises:
            ValueError: the sequence isn't there, or the length is out of range.
        """
        held = self._pages_of("sequence", sequence)
        self._check_length(length)
        for number in held[length // PAGE :]:
            self._holders[number] -= 1
            if self._holders[number] == 0:
                self._free.append(number)
        del held[length // PAGE :]
        self.table[sequence, length // PAGE :] = -1
        self.lengths[sequence] = length

    def fork(self, source: int, target: int, length: int) -> None:
        """Make a sequence that holds no pages a copy of another one, of which `length` is the length.

        Both hold the same complete pages, which are never written again. `KVCache.fork` copies the rest, for each
        layer.

        Raises:
            ValueError: a sequence isn't there, `target` holds pages, or `source` holds fewer than `length` takes.
        """
        held, empty = self._pages_of("source", source), self._pages_of("target", target)
        self._check_length(length)
        if empty or source == target:
            raise ValueError(f"target is {target}, which holds {len(empty)} pages; it must be another sequence, without pages: truncate(target, 0)")
        if length // PAGE > len(held):
            raise ValueError(f"length is {length}; source holds {len(held)} pages, so it must be less than {(len(held) + 1) * PAGE}")
        empty += held[: length // PAGE]
        for number in empty:
            self._holders[number] += 1
        self._write(target, 0)
        self.lengths[target] = length

    def _pages_of(self, name: str, sequence: object) -> list[int]:
        if not isinstance(sequence, int) or not 0 <= sequence < len(self._held):
            raise ValueError(f"{name} is {sequence!r}; it must be an int from 0 to {len(self._held) - 1}")
        return self._held[sequence]

    def _check_length(self, length: object) -> None:
        most = (self.table.shape[1] + 1) * PAGE - 1
        if not isinstance(length, int) or not 0 <= length <= most:
            raise ValueError(f"length is {length!r}; it must be an int from 0 to {most}, for {self.table.shape[1]} pages of a sequence")

    def _write(self, sequence: int, first: int) -> None:
        """Copy page numbers to the table, from page `first` of a sequence on. The device isn't waited for."""
        on_gpu = self.table.device.type == "cuda"
        numbers = torch.tensor(self._held[sequence][first:], dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self.table[sequence, first : first + len(numbers)].copy_(numbers, non_blocking=on_gpu)
