"""The CUDA kernels: configs, rendering, build, launch."""
