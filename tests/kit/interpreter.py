"""Makes Triton's interpreter do once what it does in every operation: the same results in a third of the time.

The interpreter patches `triton.language` at every call of a device function. It derives dtypes, block types and types
of tuples anew for every value. It computes every integer sum and product twice, the second time with 64 bits, to detect
overflows.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

from triton.language import core
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
    _remember_dtypes()
    _remember_block_types()
    _remember_tuple_types()
    _remember_shapes()


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
