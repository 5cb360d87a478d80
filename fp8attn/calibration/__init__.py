"""Finds recipes for the layers of a model: tries recipes on its attention calls, chooses the cheapest within a
tolerance.

calibration = fp8attn.calibrate(model, inputs, tolerance=0.06)  # measures calls while the model runs
fp8attn.patch(model, calibration)

Or with calls that are recorded first:

with fp8attn.capture(model) as calls:
    model(sample)
calibration = fp8attn.calibrate(calls, tolerance=0.06)
calibration.save("model.fp8attn.json")
with calibration.applied(model) as report:
    model(input)  # fp8attn.sdpa computes its calls of F.scaled_dot_product_attention, each with the recipe of its layer
print(report)
"""

from .calibrated import CANDIDATES, Calibration, calibrate
from .calls import AttentionCall, CapturedCalls, CaptureReport, capture
from .choice import LayerChoice, LayerCost, StepRange
from .errors import HeadErrors
from .replacing import AppliedReport

__all__ = [
    "CANDIDATES",
    "AppliedReport",
    "AttentionCall",
    "Calibration",
    "CaptureReport",
    "CapturedCalls",
    "HeadErrors",
    "LayerChoice",
    "LayerCost",
    "StepRange",
    "calibrate",
    "capture",
]
