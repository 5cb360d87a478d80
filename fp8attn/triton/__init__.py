"""The attention pipeline as Triton kernels.

Triton's import takes longer than that of the rest of fp8attn, and CUDA's kernels don't need it. So the modules of this
package are imported when they are first used, as its attributes.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import bias, half_keys, lse, merge, paged_append, paged_attention, paged_copies, paged_tensors, probe, quantize, rotary, run, varlen

__all__ = [
    "bias",
    "half_keys",
    "lse",
    "merge",
    "paged_append",
    "paged_attention",
    "paged_copies",
    "paged_tensors",
    "probe",
    "quantize",
    "rotary",
    "run",
    "varlen",
]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name == "triton":
            raise ImportError("Triton isn't installed, and what was called needs its kernels: pip install triton") from error
        if error.name != "numpy":
            raise
        raise ImportError(
            "TRITON_INTERPRET is set and NumPy isn't installed; Triton's interpreter needs it: pip install 'fp8attn[interpreter]'"
        ) from error
