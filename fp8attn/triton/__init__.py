"""The attention pipeline as Triton kernels."""

try:
    import triton  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "numpy":
        raise
    raise ImportError(
        "TRITON_INTERPRET is set and NumPy isn't installed; Triton's interpreter needs it: pip install 'fp8attn[interpreter]'"
    ) from error
