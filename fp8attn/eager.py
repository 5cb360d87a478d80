"""Repeats calls like an earlier one, with a single operator.

What a call launches follows from its options and from its tensors' dtypes, shapes, strides, devices and alignment. The
binding keeps recorded launches under these as a key: a call whose key it finds costs one operator. A call is recorded
if one with its options and shapes has come to its end before. Calls that torch.compile, modes, transforms or tracers
see always use the operators of fp8attn.ops.

All functions that attend or append keep their calls here: sdpa, varlen_sdpa, paged_sdpa, KVCache.append and
write_to_pages. What kernels read on the device, lengths, page tables or masks, is no part of a key.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from . import ops, recording
from .cuda import build
from .cuda.build import BuildError
from .ops import is_plain
from .recipe import Quantized
from .validate import Operand

MOST = 4096
"""Combinations of options and shapes that are kept; then all are forgotten."""

IMMUTABLE = frozenset((type(None), bool, int, float, str, torch.dtype))

Attention = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Output, or output and LSE."""

Tensors = recording.Tensors

Operands = tuple[Operand | None, ...]

TENSORS = ("data", "scale", "mean", "bias")
"""The fields of a Quantized that are tensors."""

_launches: dict[tuple, Callable[[Tensors], list[torch.Tensor] | None]] = {}
"""For each combination of options, the function that repeats such calls, those of shapes that the binding has kept."""

_seen: dict[tuple, Literal["once", "kept", "never"]] = {}
"""For each combination of options and shapes, whether its calls are kept. The first call isn't, so that calls whose
lengths always differ cost nothing. The second one is recorded in place of being made, and then repeated."""
_numbers = itertools.count()


def forget() -> None:
    """As if no call had been made."""
    _launches.clear()
    _seen.clear()


class Likeness:
    """What calls that are repeated have in common with a call.

    Attributes:
        name: options, and what else the function that repeats such calls is kept by.
        launch: that function, or None.
        operands: of the call.
        tensors: of the call: those of the operands and the others.
    """

    __slots__ = ("_kind", "launch", "name", "operands", "tensors")

    def __init__(self, name: tuple, launch: Callable[[Tensors], list[torch.Tensor] | None] | None, operands: Operands, tensors: list[Any]) -> None:
        self.name, self.launch, self.operands, self.tensors = name, launch, operands, tensors
        self._kind: tuple | None = None

    @property
    def kind(self) -> tuple:
        """The combination of options and shapes, by which calls are counted. A call like one that passed all checks may
        only have wrong strides, or wrong other tensors."""
        if self._kind is None:
            self._kind = self.name, tuple((x.shape, x.dtype, x.device) if isinstance(x, torch.Tensor) else None for x in self.operands)
        return self._kind


def likeness_of(options: tuple, operands: Operands, others: Tensors) -> Likeness | None:
    """By what calls like this one are found; None of calls that aren't plain torch.

    The binding looks at shapes, and at which tensors there are.

    Args:
        options: what the call depends on beside its tensors. The first is the name of the function.
        operands: tensors and `Quantized`, by whose shapes calls are kept.
        others: the other tensors of the call.
    """
    if not is_plain():
        return None
    kinds: tuple = ()
    tensors: list[Any] = [*operands, *others]
    if Quantized in map(type, operands):
        kinds, tensors = _parts(operands, others)
    for tensor in tensors:
        if tensor is not None and (type(tensor) is not torch.Tensor or tensor.requires_grad):
            return None
    # types, too: 1, 1.0 and True are equal, and not all of them are valid
    name = options, tuple(map(type, options)), kinds
    try:
        return Likeness(name, _launches.get(name), operands, tensors)
    except TypeError:  # an option that can't be hashed is an error, or about to be one
        return None


def _parts(operands: Operands, others: Tensors) -> tuple[tuple, list[Any]]:
    """What calls of quantized operands depend on beside their tensors, and these."""
    kinds: list[tuple | None] = []
    tensors: list[Any] = []
    for x in operands:
        if isinstance(x, Quantized):
            packed = x.packed
            kinds.append((x.granularity, x.layout, x.length, x.rotated, None if packed is None else packed.tokens))
            tensors += x.data, x.scale, x.mean, x.bias
            if packed is not None:
                tensors += packed.cu_seqlens, packed.seqused
        else:
            kinds.append(None)
            tensors.append(x)
    return tuple(kinds), [*tensors, *others]


def _with_tensors(x: Operand | None, tensors: Iterator[Any]) -> Operand | None:
    """An operand with the next of `tensors`, in the order that `likeness_of` gives them, in place of its own."""
    if not isinstance(x, Quantized):
        return next(tensors)
    fields = {name: next(tensors) for name in TENSORS}
    packed = None if x.packed is None else replace(x.packed, cu_seqlens=next(tensors), seqused=next(tensors))
    return replace(x, **fields, packed=packed)


def repeat(like: Likeness | None, attend: Callable[..., Attention | None] | None = None) -> list[torch.Tensor] | None:
    """The outputs of a call, if a call like it was kept; or, with `attend`, if one like it came once.

    Args:
        like: of the call; None of calls that aren't repeated.
        attend: as of `record`.
    """
    if like is None:
        return None
    found = None if like.launch is None else like.launch(like.tensors)
    return record(like, attend) if found is None and attend is not None else found


def kept(options: tuple, operands: Operands, others: Tensors, function: Callable[..., Attention | None]) -> Attention | None:
    """Make a call, on a GPU by repeating an earlier one where that was kept.

    Args:
        options, operands, others: as of `likeness_of`. The first operand is a tensor.
        function: makes the call with operands and other tensors, in this order. It may write to them.
    """
    if not isinstance(operands[0], torch.Tensor) or not operands[0].is_cuda:
        return function(*operands, *others)
    like = likeness_of(options, operands, others)
    repeated = repeat(like, function)
    if repeated is not None:
        return attention_of(repeated) if repeated else None
    found = function(*operands, *others)
    remember(like)
    return found


def attention_of(outputs: list[torch.Tensor]) -> Attention:
    """The outputs of a repeated call, as the call returns them."""
    return outputs[0] if len(outputs) == 1 else (outputs[0], outputs[1])


def remember(like: Likeness | None) -> None:
    """Note a call that has come to its end. The next one with its options and shapes is recorded."""
    # a tensor, say, may be another number the next time
    if like is None or not IMMUTABLE.issuperset(like.name[1]):
        return
    if len(_seen) >= MOST:
        forget()
    _seen.setdefault(like.kind, "once")


def record(like: Likeness | None, attend: Callable[..., Attention | None]) -> list[torch.Tensor] | None:
    """The outputs of a call that is recorded and then repeated; None of calls that aren't kept.

    Args:
        like: of the call; None of calls that aren't repeated.
        attend: makes the call with other operands and other tensors, in this order. Nothing is launched then.
    """
    if like is None:
        return None
    seen = _seen.get(like.kind)
    if seen is None or seen == "never":
        return None
    given = [x for x in like.tensors if x is not None]
    if any(x.device != given[0].device or x.layout is not torch.strided for x in given):
        return None
    launch = _launches.get(like.name)  # another thread may have kept one since
    number = launch.args[0] if isinstance(launch, partial) else next(_numbers)

    def outputs(inputs: Tensors) -> tuple[torch.Tensor, ...]:
        remaining = iter(inputs)
        found = attend(*[_with_tensors(x, remaining) for x in like.operands], *remaining)
        if found is None:
            return ()
        return found if isinstance(found, tuple) else (found,)

    try:
        operators = build.load_binding()
    except BuildError:  # Triton goes on
        _seen[like.kind] = "never"
        return None
    if not recording.record(operators, ops.implementations, number, like.tensors, outputs):
        if seen == "once":
            _seen[like.kind] = "never"
        return None
    launch = _launches[like.name] = partial(operators.repeat.default, number)
    _seen[like.kind] = "kept"
    return launch(like.tensors)
