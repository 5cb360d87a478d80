"""The pipeline as Triton kernels."""
