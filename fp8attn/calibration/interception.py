"""Intercepts calls of scaled dot-product attention in a model's modules, and hands them to a handler with the module's
name.

While a model is intercepted, each of its modules, but for basic ones of torch.nn, has an instance attribute `forward`
that calls the module's own forward. It maintains a stack, one per thread, of the modules that are in their forward. The
outermost module also enters a TorchFunctionMode, which receives the calls of attention.

Reasons for this design:
- Function modes belong to a thread, so every thread that runs the model must enter one.
- try/finally restores the stack after every exception. Forward hooks don't run after all of them.
- torch.compile guards on an instance attribute `forward`, so it compiles the model again. It doesn't guard on hooks.
- Nothing outside of the model changes. A patched F.scaled_dot_product_attention would reach other models and break
  torch's CausalBias.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ..recipe import DEFAULT_RECIPE
from ..validate import Arguments
from .names import layer_names, name_in

INTERCEPTED = dict.fromkeys(
    (
        F.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
        # it calls attention where no function mode is active
        F.multi_head_attention_forward,
    )
)
"""The functions that the function mode handles itself. It calls all other functions unchanged."""

UNFLATTEN = torch.Tensor.unflatten
"""torch.compile can't trace this method inside a function mode; it can trace torch.unflatten."""

RETURNS_WEIGHTS = "nn.MultiheadAttention computes attention itself if need_weights is True; pass need_weights=False"
NOT_COMPILED = "fp8attn.capture records calls outside of graphs; for capture, compile the model without fullgraph=True"


class Handler(Protocol):
    """Handles the intercepted calls."""

    def attention(self, layer: str, arguments: Arguments, original: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the result of a call. `original` makes the call as the model made it."""

    def unseen(self, layer: str, reason: str) -> None:
        """Note that a layer computed attention without a call."""


class Began(Protocol):
    """A handler that sees the arguments of forwards, too."""

    def began(self, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> bool | None:
        """Note that the outermost of the model's modules begins its forward. False: it isn't intercepted. Not called
        while torch.compile traces."""


class Ended(Protocol):
    """A handler that learns when forwards end, too."""

    def ended(self) -> None:
        """Note that the forward has ended that began last in this thread, intercepted and without an error."""


class Invocation:
    """One run of a module's forward.

    Attributes:
        layer: the module's name.
        calls: the number of calls of attention so far.
    """

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.calls = 0

    def next_call(self) -> str:
        """The name of the next call: `layer`, then `layer#1`, `layer#2` and so on."""
        name = self.layer if self.calls == 0 else f"{self.layer}#{self.calls}"
        self.calls += 1
        return name


class _Stack(threading.local):
    """The running forwards of a thread, the innermost one last; or `idle` during a forward that isn't intercepted."""

    def __init__(self) -> None:
        self.running: list[Invocation] = []
        self.idle = False


class Interception:
    """One context in which a model is intercepted.

    Attributes:
        traceable: whether torch.compile may trace the handler. If not, the model runs eagerly.
        names_in_graphs: whether the handler gets the layers' names while torch.compile traces. Without them, blocks
            that are compiled one by one share a graph.
        run: runs the forward of a module, for torch.compile to trace or to skip.
        ran: whether a module of the model ran its forward.
    """

    def __init__(self, handler: Handler, *, traceable: bool, names_in_graphs: bool) -> None:
        self.handler = handler
        self.traceable = traceable
        self.names_in_graphs = names_in_graphs
        self.began, self.ended = getattr(handler, "began", None), getattr(handler, "ended", None)
        self.ran = False
        self.stack = _Stack()
        self.mode = _Mode(self)
        # torch.compiler.disable imports torch._dynamo, which takes seconds
        self._handle = handler.attention if traceable else torch.compiler.disable(handler.attention, reason=NOT_COMPILED)
        self.run = _run if traceable else torch.compiler.disable(_run, reason=NOT_COMPILED)
        self._multi_head = _with_globals(
            F.multi_head_attention_forward,
            scaled_dot_product_attention=lambda *args, **kwargs: self.call(F.scaled_dot_product_attention, args, kwargs),
            has_torch_function=lambda _: False,
        )

    def call(self, function: Callable[..., torch.Tensor], args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        """A call of attention."""
        running = self.stack.running
        if not running:
            return function(*args, **kwargs)
        # torch.compile can't trace the default of `recipe`, an object
        arguments = Arguments(*args, **kwargs, recipe=DEFAULT_RECIPE)
        # in a graph, a name would be a guard
        layer = running[-1].next_call() if self.names_in_graphs or not torch.compiler.is_compiling() else ""
        return self._handle(layer, arguments, lambda: function(*args, **kwargs))

    def call_multi_head(self, args: tuple, kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A call of F.multi_head_attention_forward."""
        running = self.stack.running
        if not running or (torch.compiler.is_compiling() and not self.names_in_graphs):
            return self._multi_head(*args, **kwargs)
        before = running[-1].calls
        result = self._multi_head(*args, **kwargs)
        if running[-1].calls == before:
            self.handler.unseen(running[-1].layer, RETURNS_WEIGHTS)
        return result


def _with_globals(function: Callable, **changed: object) -> Callable:
    """A copy of a function in which some of its global names are replaced."""
    names = {**function.__globals__, **changed}
    del names["__name__"]  # torch.compile looks up globals in the module of this name, where they aren't changed
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _Mode(TorchFunctionMode):
    """Receives the calls of torch's functions. Several threads enter the same instance."""

    def __init__(self, interception: Interception) -> None:
        super().__init__()
        self.interception = interception

    def __torch_function__(self, func, types, args=(), kwargs=None):
        # all functions and attributes of tensors come here
        if func not in INTERCEPTED:
            if func is UNFLATTEN and torch.compiler.is_compiling():
                func = torch.unflatten
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if func is not F.multi_head_attention_forward:
            return self.interception.call(func, args, kwargs)
        if all(kind in (torch.Tensor, nn.Parameter) for kind in types):
            return self.interception.call_multi_head(args, kwargs)
        return func(*args, **kwargs)


OWN = "_fp8attn_forward"
"""The attribute of a function that holds its `_Forward`."""

Link = tuple[Interception, tuple[str, ...]]
"""A context that intercepts a module, and the module's names in it."""


class _Forward:
    """The attribute `forward` of an intercepted module.

    Attributes:
        module: the module.
        links: the contexts, the outermost one first. A tuple, because other threads may read it while it is replaced.
        before: the attribute that the module had before, or None.
        during: the attribute that it has now.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.links: tuple[Link, ...] = ()
        self.before = module.__dict__.get("forward")
        inner = type(module).forward if self.before is None else self.before

        # without inner.__dict__: torch.compile would find inner through its attributes, and skip this function
        @functools.wraps(inner, updated=())
        def forward(*args, **kwargs):
            links = self.links
            run = _run
            for interception, _ in links:
                if not interception.traceable:
                    run = interception.run
            return run(links, inner, args, kwargs)

        # not in a dictionary by module: the module, which this object keeps, could never be freed
        setattr(forward, OWN, self)
        # copy.deepcopy binds a method to the copy of the module
        self.during = types.MethodType(forward, module) if self.before is None else forward


def _run(links: tuple[Link, ...], inner: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a module's own forward in its contexts.

    The mode of the innermost context is entered last, so it receives calls first.
    """
    if not links:
        return inner(*args, **kwargs)
    interception, names = links[0]
    stack = interception.stack
    running = stack.running
    if stack.idle or (running and not interception.names_in_graphs and torch.compiler.is_compiling()):
        return _run(links[1:], inner, args, kwargs)
    if running:
        running.append(Invocation(name_in(running[-1].layer, names)))
        try:
            return _run(links[1:], inner, args, kwargs)
        finally:
            running.pop()
    interception.ran = True
    began = None if torch.compiler.is_compiling() else interception.began
    if began is not None and began(inner, args, kwargs) is False:
        stack.idle = True
        try:
            return _run(links[1:], inner, args, kwargs)
        finally:
            stack.idle = False
    running.append(Invocation(names[0]))
    try:
        with interception.mode:
            result = _run(links[1:], inner, args, kwargs)
    finally:
        running.pop()
    if began is not None and interception.ended is not None:
        interception.ended()
    return result


_lock = threading.RLock()


def _forward_of(module: nn.Module) -> _Forward | None:
    """The module's attribute `forward` if it is ours. Other code may have wrapped it, or copied it with the module."""
    current = module.__dict__.get("forward")
    forward = getattr(getattr(current, "__func__", current), OWN, None)
    return forward if forward is not None and forward.during is current and forward.module() is module else None


def intercept(model: nn.Module, handler: Handler, *, traceable: bool, names_in_graphs: bool = True) -> tuple[Interception, Callable[[], None]]:
    """From now on, calls of attention by a model's modules, in any thread, go to the handler.

    Args:
        traceable, names_in_graphs: as of `Interception`.

    Returns:
        the interception, and a function that ends it. Without a call of that, it lasts as long as the model.

    Raises:
        TypeError: `model` isn't a module.
        ValueError: `model` is or contains a DataParallel.
    """
    names = layer_names(model)
    interception = Interception(handler, traceable=traceable, names_in_graphs=names_in_graphs)
    forwards = [_link(module, (interception, of_module)) for module, of_module in names.items() if module is model or not _is_basic(module)]
    has_fast_path = any(isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) for module in names)
    if has_fast_path:
        _fast_path.switch_off()
    del names, model  # the function below must not keep the model

    def end() -> None:
        nonlocal has_fast_path
        while forwards:
            _unlink(forwards.pop(), interception)
        if has_fast_path:
            has_fast_path = False
            _fast_path.restore()

    return interception, end


@contextlib.contextmanager
def intercepted(model: nn.Module, handler: Handler, *, traceable: bool, names_in_graphs: bool = True) -> Iterator[Interception]:
    """Inside, calls of attention by a model's modules go to the handler. Arguments and errors: see `intercept`."""
    interception, end = intercept(model, handler, traceable=traceable, names_in_graphs=names_in_graphs)
    try:
        yield interception
    finally:
        end()


def _is_basic(module: nn.Module) -> bool:
    """Whether a module is one of torch's that calls no attention and no other module, such as nn.Linear."""
    return type(module).__module__.startswith("torch.nn.modules.") and not module._modules and "forward" not in module.__dict__


def _link(module: nn.Module, link: Link) -> _Forward:
    with _lock:
        forward = _forward_of(module)
        if forward is None:
            forward = _Forward(module)
            module.__dict__["forward"] = forward.during
        forward.links = (*forward.links, link)
    return forward


def _unlink(forward: _Forward, interception: Interception) -> None:
    """Remove a context.

    A forward without contexts only calls the module's own, so it may stay where other code wrapped it.
    """
    with _lock:
        forward.links = tuple(link for link in forward.links if link[0] is not interception)
        module = forward.module()
        if module is None or forward.links or _forward_of(module) is not forward:
            return
        del module.__dict__["forward"]
        if forward.before is not None:
            module.__dict__["forward"] = forward.before


@dataclass
class _FastPath:
    """torch's switch for the fast path of nn.MultiheadAttention and nn.TransformerEncoderLayer.

    The fast path makes no attention call, and torch.compile takes it even inside a function mode. The switch belongs to
    the process, so the fast path is off for other models, too.

    Attributes:
        users: number of those that need it to be off.
        before: its value before the first of them.
    """

    users: int = 0
    before: bool = True

    def switch_off(self) -> None:
        """Switch off the fast path, for one more user."""
        with _lock:
            if self.users == 0:
                self.before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self.users += 1

    def restore(self) -> None:
        """One user less."""
        with _lock:
            self.users -= 1
            if self.users == 0:
                torch.backends.mha.set_fastpath_enabled(self.before)


_fast_path = _FastPath()


@contextlib.contextmanager
def no_fast_path() -> Iterator[None]:
    """Inside, the fast path is off, for all models of the process."""
    _fast_path.switch_off()
    try:
        yield
    finally:
        _fast_path.restore()
