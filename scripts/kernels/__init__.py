"""The measurements of inspect_kernels.py: errors and resources of the GPU kernels, without a GPU."""
