"""Records the calls of attention that a model makes."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from ..ambient import autocast_dtype
from ..validate import Arguments, Checked, cast, check, is_causal_bias
from .interception import intercepted
from .reasons import Reasons, calls, likely_causes
from .selection import Place, Selection


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of scaled dot-product attention.

    Attributes:
        layer: the name of the module that made the call; `name#1`, `name#2` and so on for further calls in one forward
            of the module.
        query, key, value, attn_mask, is_causal, scale: as in F.scaled_dot_product_attention, with enable_gqa=True.
        causal_alignment: `top_left` or `bottom_right`, as in `sdpa`.
        device: the device on which the model made the call, if the tensors are on another one.
    """

    layer: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    causal_alignment: str = "top_left"
    device: torch.device | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The arguments that are tensors."""
        return tuple(x for x in (self.query, self.key, self.value, self.attn_mask) if x is not None)

    def moved(self, device: torch.device | str | None = None) -> AttentionCall:
        """The call with its tensors on a device, by default the one on which the model made the call."""
        device = torch.device(device or self.device or self.query.device)
        query, key, value = (x.to(device) for x in (self.query, self.key, self.value))
        # a CausalBias has no elements
        mask = self.attn_mask if self.attn_mask is None or is_causal_bias(self.attn_mask) else self.attn_mask.to(device)
        return replace(self, query=query, key=key, value=value, attn_mask=mask, device=device)

    def checked(self) -> Checked:
        """The arguments in the form that all backends take.

        Raises:
            TypeError, ValueError: `sdpa` doesn't take an argument, or there is nothing to attend to.
        """
        arguments = Arguments(
            self.query, self.key, self.value, self.attn_mask, is_causal=self.is_causal, scale=self.scale, enable_gqa=True,
            causal_alignment=self.causal_alignment,
        )  # fmt: skip
        try:
            with torch.no_grad():
                return checked_call(arguments)
        except (TypeError, ValueError) as error:
            raise type(error)(f"call of layer {self.layer!r}: {error}") from None


class CaptureReport:
    """What `capture` recorded and what it didn't. `print` shows it.

    Attributes:
        left_out: for each layer, the number of calls that weren't recorded or were dropped again, by reason.
    """

    def __init__(self, recorded: list[AttentionCall]) -> None:
        self._calls = recorded
        self.left_out = Reasons()

    @property
    def recorded(self) -> dict[str, int]:
        """For each layer, the number of calls that are recorded."""
        return dict(Counter(call.layer for call in self._calls))

    @property
    def nbytes(self) -> int:
        """The size of the recorded tensors."""
        return sum({x.data_ptr(): x.nbytes for call in self._calls for x in call.tensors}.values())

    def __str__(self) -> str:
        first = f"{calls(len(self._calls))} of {len(self.recorded)} layers recorded, {self.nbytes / 2**20:.1f} MiB"
        return "\n".join([first, *self.left_out.lines("not recorded")])


class CapturedCalls(list[AttentionCall]):
    """The recorded calls, in the order in which the model made them.

    Attributes:
        report: a `CaptureReport`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.report = CaptureReport(self)


class _Recorder:
    """The handler of `capture`.

    Attributes:
        kept: the recorded calls by layer and place.
        nbytes: the size of their tensors.
        uses: for each tensor's address, the number of calls that have the tensor.
        warned: the limits for which there was a warning.
    """

    def __init__(self, calls_per_layer: int, max_bytes: int, device: torch.device | None) -> None:
        self.calls = CapturedCalls()
        self.calls_per_layer = calls_per_layer
        self.max_bytes = max_bytes
        self.device = device
        self.selections: dict[str, Selection] = {}
        self.kept: dict[tuple[str, Place], AttentionCall] = {}
        self.nbytes = 0
        self.uses: Counter[int] = Counter()
        self.lock = threading.Lock()
        self.warned: set[str] = set()

    def attention(self, layer: str, arguments: Arguments, original: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Record a call, and make it."""
        arguments = as_cast(arguments)
        try:
            with torch.no_grad():
                checked = checked_call(arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            self.unseen(layer, str(error))
        else:
            with self.lock:
                self.record(layer, arguments, checked)
        return original()

    def unseen(self, layer: str, reason: str) -> None:
        """Count a call that can't be recorded."""
        with self.lock:
            self.calls.report.left_out.count(layer, reason)

    def record(self, layer: str, arguments: Arguments, checked: Checked) -> None:
        """Copy a call if the limits allow it."""
        selection = self.selections.setdefault(layer, Selection(self.calls_per_layer))
        place, dropped = selection.offer(kind_of(checked))
        for other in dropped:
            self.drop(layer, other, "calls_per_layer", self.calls_per_layer)
        if place is None:
            self.leave_out(layer, "calls_per_layer", self.calls_per_layer)
            return
        call = call_of(layer, arguments)
        if not self.make_room(sum(x.nbytes for x in call.tensors), is_first=place[1] == 0):
            selection.forget(place)
            self.leave_out(layer, "max_bytes", self.max_bytes)
            return
        query, key, value = (self.copied(x) for x in (call.query, call.key, call.value))
        mask = None if call.attn_mask is None else self.shared(self.copied(call.attn_mask))
        self.kept[layer, place] = call = replace(call, query=query, key=key, value=value, attn_mask=mask)
        self.calls.append(call)
        for x in call.tensors:
            self.nbytes += x.nbytes if self.uses[x.data_ptr()] == 0 else 0
            self.uses[x.data_ptr()] += 1

    def make_room(self, nbytes: int, is_first: bool) -> bool:
        """Whether a call of this size fits.

        For the first call of a kind, calls that aren't the first are dropped, the latest one first.
        """
        repeats = [(layer, place) for layer, place in self.kept if place[1] > 0] if is_first else []
        while self.nbytes + nbytes > self.max_bytes:
            if not repeats:
                return False
            layer, place = repeats.pop()
            self.selections[layer].forget(place)
            self.drop(layer, place, "max_bytes", self.max_bytes)
        return True

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        """A copy on the device that the user chose."""
        return x.to(self.device or x.device, copy=True)

    def shared(self, mask: torch.Tensor) -> torch.Tensor:
        """The mask recorded last if it is equal: layers often get the same mask."""
        last = next((call.attn_mask for call in reversed(self.calls) if call.attn_mask is not None), None)
        if last is None or last.dtype != mask.dtype or last.shape != mask.shape or last.device != mask.device or not torch.equal(last, mask):
            return mask
        return last

    def drop(self, layer: str, place: Place, limit: str, value: int) -> None:
        """Remove a recorded call because of a limit."""
        gone = self.kept.pop((layer, place))
        self.calls[:] = [call for call in self.calls if call is not gone]
        for x in gone.tensors:
            self.uses[x.data_ptr()] -= 1
            self.nbytes -= x.nbytes if self.uses[x.data_ptr()] == 0 else 0
        self.leave_out(layer, limit, value)

    def leave_out(self, layer: str, limit: str, value: int) -> None:
        """Count a call that a limit excludes, and warn at the first one."""
        self.calls.report.left_out.count(layer, f"{limit} is {value}")
        if limit in self.warned:
            return
        self.warned.add(limit)
        effect = "some calls aren't recorded" if limit == "calls_per_layer" else "some layers may have no recorded call, and so no recipe"
        warnings.warn(f"fp8attn.capture: {limit} is {value}, {effect}; the report of the yielded list has the numbers", stacklevel=2)


@contextlib.contextmanager
def capture(
    model: torch.nn.Module, *, calls_per_layer: int = 4, max_bytes: int = 16 << 30, device: torch.device | str | None = "cpu"
) -> Iterator[CapturedCalls]:
    """Inside, the calls of F.scaled_dot_product_attention that the model makes are recorded. The model's results don't
    change.

    Calls are recorded if they happen in the forward of one of the model's modules: in any thread, under any name of the
    function, also inside nn.MultiheadAttention, with the dtypes to which autocast casts. Calls that `sdpa` doesn't
    support are only counted in the report.

    Not seen are attention by other functions (flash_attn, xFormers, FlexAttention, matrix products), methods other than
    forward that no forward calls, torch.jit modules, forwards that are generators, other processes, and CUDA graphs
    that were captured before. A model that torch.compile compiled runs eagerly inside; torch.compile raises an error if
    it was called with fullgraph=True.

    Args:
        calls_per_layer: the largest number of calls of a layer. Of each kind of call (prefill or decode, with or
            without a mask), the first call is recorded, and then further calls at even distances. Calls are dropped
            from the yielded list as more are made.
        max_bytes: the largest size of all copies together, in bytes. The first call of a kind replaces calls that
            aren't the first of their kind.
        device: where copies are stored. None: on the device of the model's tensors.
    Yields:
        The list of recorded calls. Its attribute `report` says what was recorded and what wasn't.

    Raises:
        TypeError: `model` isn't a module.
        ValueError: `model` is or contains a DataParallel, or a limit isn't positive.
    """
    for name, limit in (("calls_per_layer", calls_per_layer), ("max_bytes", max_bytes)):
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise ValueError(f"{name} is {limit!r}; it must be a positive integer")
    recorder = _Recorder(calls_per_layer, max_bytes, None if device is None else torch.device(device))
    with intercepted(model, recorder, traceable=False) as interception:
        yield recorder.calls
    if not recorder.calls:
        warnings.warn(
            f"fp8attn.capture recorded no call. Likely cause: {likely_causes(model, interception, recorder.calls.report.left_out)}", stacklevel=3
        )


def as_cast(a: Arguments) -> Arguments:
    """The arguments with the dtypes that F.scaled_dot_product_attention computes with: autocast casts them."""
    dtype = autocast_dtype(a.query.device) if isinstance(a.query, torch.Tensor) else None
    if dtype is None:
        return a
    query, key, value, attn_mask = (cast(x, dtype) for x in (a.query, a.key, a.value, a.attn_mask))
    return replace(a, query=query, key=key, value=value, attn_mask=attn_mask)


def checked_call(a: Arguments) -> Checked:
    """The arguments of a call that has something to attend to, checked.

    Raises:
        TypeError, ValueError, RuntimeError: `sdpa` doesn't take an argument, or a dimension is 0.
    """
    checked = check(a)
    if 0 in (*checked.query.shape, *checked.key.shape):
        raise ValueError(f"query has shape {tuple(checked.query.shape)} and key {tuple(checked.key.shape)}; no dimension may be 0")
    return checked


def call_of(layer: str, a: Arguments) -> AttentionCall:
    """A call with the model's own tensors. The arguments were checked."""
    query, key, value, mask = a.query, a.key, a.value, a.attn_mask
    assert isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
    is_causal, alignment = a.is_causal, a.causal_alignment
    if is_causal_bias(mask):
        is_causal, alignment, mask = True, "top_left" if mask.variant.name == "UPPER_LEFT" else "bottom_right", None
    if mask is not None:
        # dimensions that are expanded shrink to 1
        mask = mask.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]
    return AttentionCall(layer, query.detach(), key.detach(), value.detach(), mask, is_causal, a.scale, alignment, query.device)


def kind_of(checked: Checked) -> tuple:
    """A value that is equal for calls that differ only in lengths.

    Calls with one query, fewer queries than keys, as many, and more are different kinds.
    """
    (_, heads, q_length, _), (_, kv_heads, kv_length, _) = checked.query.shape, checked.key.shape
    lengths = "one query" if q_length == 1 else (q_length > kv_length) - (q_length < kv_length)
    return lengths, heads, kv_heads, checked.causal, checked.attn_mask is not None
