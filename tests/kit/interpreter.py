"""Makes Triton's interpreter do once what it does in every operation: the same results in less time.

The interpreter patches `triton.language` at every call of a device function. It derives dtypes, block types and types
of tuples anew for every value. It checks the types of operands as a compiler does, and copies a scalar to every element
of a block before it adds the two. It computes every integer sum and product twice, the second time with 64 bits, to
detect overflows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def quicken() -> None:
    """Apply this for the rest of the process.

    No kernel can be compiled afterwards, because `triton.language` stays patched.
    """
    patch, patched = interpreter._patch_lang, set()

    def patch_once(fn: Any) -> SimpleNamespace:
        if fn not in patched:
            patch(fn)  # patches what the function's globals name
            patched.add(fn)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once
    interpreter.interpreter_builder.options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    _call_builtins_directly()
    _unwrap_constants_quickly()
    _remember_conversions()
    _validate_sizes_quickly()
    _remember_dtypes()
    _remember_block_types()
    _remember_tuple_types()
    _remember_shapes()


def _call_builtins_directly() -> None:
    """Without the check that a builtin gets a `_semantic`, which it does; and operators by `_remembered`."""

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = TritonSemantic(builder)
        function: Callable[..., Any] = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        is_operator = name in OPERATORS if obj is core.tensor else name in FUNCTIONS
        scope.set_attr(obj, name, _remembered(call) if is_operator else call)

    interpreter._patch_attr = patch


OPERATORS = frozenset(
    f"__{reverse}{name}__"
    for name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "lshift", "rshift", "lt", "le", "gt", "ge", "eq", "ne")
    for reverse in ("", "r")
)
FUNCTIONS = frozenset(("minimum", "maximum", "where"))


def _type_of(x: Any) -> Any:
    """A key of what an operator looks at: the type of a tensor, or a number itself."""
    kind = type(x)
    return x.type.name if kind is core.tensor else (kind, x)


def _remembered(call: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that looks at its operands' types once, if all it does with their data is one call of a NumPy function."""
    known: dict[Any, Any] = {}

    def operator(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            return call(*args, **kwargs)
        try:
            key = tuple([_type_of(x) for x in args])
            found = known.get(key)
        except TypeError:  # what can't be hashed
            return call(*args)
        if found is None:
            tensors = [id(x.handle.data) for x in args if type(x) is core.tensor]
            if len(tensors) > len({*tensors}):  # which of them is which operand can't be told
                return call(*args)
            result, known[key] = _observed(call, args)
            return result
        if found is False:
            return call(*args)
        function, order, dtype, of, size = found
        data = function(*[args[i].handle.data if constant is None else constant for i, constant in order])
        if data.itemsize > size:
            data = data.astype(interpreter._get_np_dtype(dtype))
        return core.tensor(interpreter.TensorHandle(data, dtype), of)

    return operator


def _observed(call: Callable[..., Any], args: tuple) -> tuple[Any, Any]:
    """The result of an operator, and how to repeat it: its NumPy function, the operands' order or values, and the result's types. False: it
    does more."""
    calls: list[tuple] = []
    builder = interpreter.InterpreterBuilder
    originals = builder.binary_op, builder.ternary_op

    def observe(original: Callable[..., Any]) -> Callable[..., Any]:
        def observed(self: Any, *handles_and_function: Any) -> Any:
            *handles, function = handles_and_function
            found = original(self, *handles, function)
            calls.append((function, [handle.data for handle in handles], found))
            return found

        return observed

    builder.binary_op, builder.ternary_op = (observe(original) for original in originals)
    try:
        result = call(*args)
    finally:
        builder.binary_op, builder.ternary_op = originals
    if len(calls) != 1 or type(result) is not core.tensor or result.handle is not calls[0][2]:
        return result, False
    function, operands, handle = calls[0]
    tensors = {id(x.handle.data): i for i, x in enumerate(args) if type(x) is core.tensor}
    order: list[tuple[int, Any]] = []
    for data in operands:
        if id(data) in tensors:
            order.append((tensors.pop(id(data)), None))
        elif data.size == 1:
            order.append((0, data.copy()))
        else:
            return result, False
    is_signed_shift = function is np.right_shift and result.dtype.is_int_signed()  # which first converts what it shifts
    if tensors or is_signed_shift:  # or an operand was converted
        return result, False
    return result, (function, tuple(order), handle.dtype, result.type, max(handle.dtype.primitive_bitwidth, 8) // 8)


def _unwrap_constants_quickly() -> None:
    unwrap = core._unwrap_if_constexpr
    plain = frozenset((core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)))
    core._unwrap_if_constexpr = lambda x: x if type(x) in plain else unwrap(x)


def _remember_conversions() -> None:
    """How operands of two types are converted. NumPy broadcasts them itself: a scalar's handle, or one of a shape with
    ones, is given the type of the result, and its data stay as they are."""
    convert, to_tensor = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.to_tensor
    known: dict[tuple, tuple] = {}

    def handle_of(self: Any, x: Any, dtype: Any) -> Any:
        return (self.scalar_constant(x, dtype) if type(x) is not core.tensor else self.cast(x, dtype)).handle

    def operands(self: Any, lhs: Any, rhs: Any, *may_be: bool, **may: bool) -> tuple[Any, Any]:
        key = (_type_of(lhs), _type_of(rhs), may_be, *may.items())
        found = known.get(key)
        if found is None:
            left, right = convert(self, lhs, rhs, *may_be, **may)
            constants = [None if type(x) is core.tensor else handle_of(self, x, to.type.scalar) for x, to in ((lhs, left), (rhs, right))]
            known[key] = (left.type, right.type, *constants)
            return left, right
        left, right, constant, other_constant = found
        return as_type(self, lhs, left, constant), as_type(self, rhs, right, other_constant)

    def as_type(self: Any, x: Any, of: Any, constant: Any) -> Any:
        if constant is not None:
            return core.tensor(interpreter.TensorHandle(constant.data, constant.dtype), of)
        if x.type.name == of.name:
            return x
        return core.tensor(x.handle if x.type.scalar.name == of.scalar.name else self.cast(x, of.scalar).handle, of)

    TritonSemantic.binary_op_type_checking_impl = operands
    TritonSemantic.to_tensor = lambda self, x, check_type=True: x if type(x) is core.tensor else to_tensor(self, x, check_type)


def _validate_sizes_quickly() -> None:
    bytes_of: dict[str, int] = {}  # of a number, by the name of its type

    def size(dtype: Any) -> int:
        found = bytes_of.get(dtype.name)
        if found is None:
            found = bytes_of[dtype.name] = 8 if isinstance(dtype, core.pointer_type) else max(dtype.primitive_bitwidth, 8) // 8
        return found

    def init(self: Any, data: Any, dtype: Any, attr: dict | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > size(dtype):
            raise ValueError(f"numbers of {data.itemsize} bytes aren't {dtype}")

    interpreter._validate_np_data_size = lambda data, dtype: data.itemsize <= size(dtype)
    interpreter.TensorHandle.__init__ = init


def _remember_dtypes() -> None:
    derive, known = interpreter._get_np_dtype, {}

    def remembered(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = derive(dtype)
        return known[name]

    interpreter._get_np_dtype = remembered


def _remember_block_types() -> None:
    init = core.block_type.__init__
    known: dict[tuple, dict[str, Any]] = {}  # by the element's name, because a pointer's type can't be hashed

    def remembered(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *map(core._unwrap_if_constexpr, shape))
        if key not in known:
            init(self, element_ty, shape)
            known[key] = vars(self)
        else:
            vars(self).update(known[key])

    def of_elements(self: Any, element_ty: Any) -> Any:
        types = vars(self).setdefault("remembered_types", {})
        if element_ty.name not in types:
            types[element_ty.name] = core.block_type(element_ty, self.shape)
        return types[element_ty.name]

    core.block_type.__init__ = remembered
    core.block_type.with_element_ty = of_elements


def _remember_tuple_types() -> None:
    type_of = core._type_for_tuple_values
    of_numbers = functools.lru_cache(maxsize=None)(lambda *values: type_of(values))

    def remembered(values: list, fields: Any = None) -> Any:
        if fields is None and all(type(x) is int for x in values):
            return of_numbers(*values)
        return type_of(values, fields)

    core._type_for_tuple_values = remembered


def _remember_shapes() -> None:
    init = core.tensor.__init__

    def remembered(self: Any, handle: Any, type: Any) -> None:
        shape = vars(type).get("remembered_shape")
        if shape is None:
            init(self, handle, type)
            type.remembered_shape = {"shape": self.shape, "numel": self.numel, "type": self.type, "dtype": self.dtype}
        else:
            vars(self).update(shape, handle=handle)

    core.tensor.__init__ = remembered
