"""FP8 (e4m3) attention forward for PyTorch inference."""

from .api import Plan, cuda_sdpa, explain, import_kv, quantize, reference_sdpa, sdpa, triton_sdpa
from .info import info
from .recipe import Quantized, Recipe
from .validate import BackendUnavailable

__all__ = [
    "BackendUnavailable",
    "Plan",
    "Quantized",
    "Recipe",
    "cuda_sdpa",
    "explain",
    "import_kv",
    "info",
    "quantize",
    "reference_sdpa",
    "sdpa",
    "triton_sdpa",
]
__version__ = "0.1.0"
