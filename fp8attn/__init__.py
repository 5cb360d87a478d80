"""FP8 (e4m3) attention forward for PyTorch inference."""

from .ahead import warmup
from .api import cuda_sdpa, import_kv, quantize, reference_sdpa, sdpa, triton_sdpa, varlen_sdpa
from .cache import KVCache
from .calibration import AttentionCall, Calibration, calibrate, capture
from .explaining import Plan, explain, explain_paged, explain_varlen
from .info import info
from .integrations import patch
from .page_table import PageTable
from .paged import paged_sdpa, rotary_embedding, write_to_pages
from .paged_tensors import PagedTensors
from .pages import PagedBatch
from .recipe import PRECISE, Quantized, Recipe
from .validate import BackendUnavailable

__all__ = [
    "PRECISE",
    "AttentionCall",
    "BackendUnavailable",
    "Calibration",
    "KVCache",
    "PageTable",
    "PagedBatch",
    "PagedTensors",
    "Plan",
    "Quantized",
    "Recipe",
    "calibrate",
    "capture",
    "cuda_sdpa",
    "explain",
    "explain_paged",
    "explain_varlen",
    "import_kv",
    "info",
    "paged_sdpa",
    "patch",
    "quantize",
    "reference_sdpa",
    "rotary_embedding",
    "sdpa",
    "triton_sdpa",
    "varlen_sdpa",
    "warmup",
    "write_to_pages",
]
__version__ = "0.1.0"
