"""Records what a call launches, so that the binding can repeat the call with a single operator.

While a call is recorded, its tensors have addresses but no memory, and launches are kept instead of made. So a
recording takes no time on the GPU. A call can be recorded if it does nothing with tensors but allocate them, view them
and launch kernels on them.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

Tensors = Sequence[torch.Tensor | None]


class NotRecordable(Exception):
    """A call does something that a plan can't repeat."""


_of_thread = threading.local()


def current() -> Recorder | None:
    """This thread's recorder, while it records."""
    return getattr(_of_thread, "recorder", None)


def contiguous_strides(sizes: Sequence[int]) -> list[int]:
    strides = [1] * len(sizes)
    for i in range(len(sizes) - 1, 0, -1):
        strides[i - 1] = strides[i] * max(sizes[i], 1)
    return strides


@functools.cache
def _makes_views(function: Any) -> bool:
    """Whether an operator does nothing but view its tensor. To find out takes longer than a view."""
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")
    return function.is_view and not composite


class Recorder(TorchDispatchMode):
    """Inside, tensors are allocated without memory.

    Args:
        operators: the binding's operators.
        device: of all tensors.
        implementations: those of fp8attn's own operators, by name. Inside an operator, allocations would not be seen.
    """

    def __init__(self, operators: Any, device: torch.device, implementations: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self._operators = operators
        self._device = device
        self._implementations = implementations
        self._factories: dict[Any, Callable[..., torch.Tensor]] = {
            aten.empty.memory_format: self._empty,
            aten.empty_strided.default: lambda size, stride, **options: self._empty(size, strides=stride, **options),
            aten.zeros.default: lambda size, **options: self._empty(size, zero=True, **options),
            aten.new_empty.default: self._new,
            aten.new_zeros.default: lambda like, size, **options: self._new(like, size, zero=True, **options),
            aten.empty_like.default: lambda like, **options: self._new(like, like.shape, strides=_strides_like(like), **options),
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports torch._dynamo, which takes seconds, only to keep it out of here."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        options = kwargs or {}
        if function.namespace == "fp8attn":
            with self:
                return self._implementations[function._opname](*args, **options)
        if function.namespace.startswith("fp8attn_"):
            return function(*args, **options)
        make = self._factories.get(function)
        if make is not None:
            return make(*args, **options)
        if _makes_views(function):
            return function(*args, **options)
        with self:  # reshape, contiguous and the like are views or copies: this tells which
            made = function.decompose(*args, **options)
        if made is not NotImplemented:
            return made
        raise NotRecordable(f"it calls {function}")

    def tensor(self, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, remainder: int = 0, zero: bool = False) -> torch.Tensor:
        """A tensor without memory.

        Args:
            remainder: its address modulo 16, in bytes.
            zero: whether it is 0 before the first launch of a call.
        """
        return self._operators.recorded_tensor.default(sizes, strides, dtype, remainder, zero)

    def like(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """A tensor without memory in place of an input."""
        return None if x is None else self.tensor(x.shape, x.stride(), x.dtype, x.data_ptr() % 16)

    def _empty(
        self, size: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device | None = None, zero: bool = False,
        strides: Sequence[int] | None = None, **others: Any,
    ) -> torch.Tensor:  # fmt: skip
        if device is not None and device.type == "meta":  # of a plan, which looks at shapes
            return torch.empty_strided(size, contiguous_strides(size) if strides is None else strides, dtype=dtype, device=device)
        if device != self._device or any(x is not None and x is not False and x != torch.strided for x in others.values()):
            raise NotRecordable(f"it makes a tensor on {device} with {others}")
        return self.tensor(size, contiguous_strides(size) if strides is None else strides, dtype or torch.get_default_dtype(), zero=zero)

    def _new(
        self, like: torch.Tensor, size: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device | None = None, **options: Any
    ) -> torch.Tensor:
        return self._empty(size, dtype=dtype or like.dtype, device=device or like.device, **options)

    def kernel(self, compiled: Any, grid: tuple[int, ...], arguments: tuple, dependent: bool) -> None:
        """Record a launch of a kernel that Triton compiled.

        Raises:
            NotRecordable: the kernel takes something other than addresses and numbers.
        """
        compiled.run  # noqa: B018  # loads it
        metadata = compiled.metadata
        if metadata.num_ctas != 1 or metadata.launch_cooperative_grid or metadata.global_scratch_size or metadata.profile_scratch_size:
            raise NotRecordable(f"{metadata.name} is launched in a way of its own")
        words: list[int] = []
        pointers: list[int] = []
        for kind, argument in zip(compiled.src.signature.values(), arguments, strict=True):
            _pack(kind, argument, words, pointers)
        words += (0, 0)  # scratch memory of the kernel and of the profiler: none
        shape = (*grid, 1, 1)[:3]
        self._operators.record_function.default(compiled.function, (*shape, 32 * metadata.num_warps, metadata.shared), dependent, words, pointers)


def _strides_like(x: torch.Tensor) -> list[int]:
    if not x.is_contiguous():
        raise NotRecordable("it makes a tensor like one that isn't contiguous")
    return list(x.stride())


_FORMATS = {
    "i1": "<?", "i8": "<b", "u8": "<B", "i16": "<h", "u16": "<H", "i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q", "fp32": "<f", "fp64": "<d",
}  # fmt: skip
"""How struct packs Triton's types of numbers."""


def _pack(kind: Any, argument: Any, words: list[int], pointers: list[int]) -> None:
    """Append an argument of Triton type `kind` to the words of a launch, an address also to `pointers`."""
    if isinstance(kind, tuple):
        for part, value in zip(kind, argument, strict=True):
            _pack(part, value, words, pointers)
    elif kind == "constexpr":
        return
    elif kind[0] == "*":
        pointers.append(len(words))
        words.append(argument.data_ptr())
    elif kind in _FORMATS:
        words.append(int.from_bytes(struct.pack(_FORMATS[kind], argument).ljust(8, b"\0"), "little", signed=True))
    else:
        raise NotRecordable(f"a kernel takes a {kind}")


def record(
    operators: Any,
    implementations: Mapping[str, Callable[..., Any]],
    number: int,
    operands: Tensors,
    attend: Callable[[Tensors], Sequence[torch.Tensor]],
) -> bool:
    """Record a call. The binding's `repeat(number, operands)` repeats it from then on, if the result is True.

    Args:
        operators, implementations: as of `Recorder`.
        number: stands for all that the call depends on beside its operands.
        operands: the call's tensors.
        attend: makes the call with other operands, and returns its outputs.
    """
    device = next(x.device for x in operands if x is not None)
    recorder = _of_thread.recorder = Recorder(operators, device, implementations)
    operators.record.default(device)
    try:
        inputs = [recorder.like(x) for x in operands]
        with recorder:
            outputs = attend(inputs)
        return operators.keep.default(number, operands, outputs)
    except NotRecordable:
        return False
    finally:
        _of_thread.recorder = None
        operators.discard.default()
