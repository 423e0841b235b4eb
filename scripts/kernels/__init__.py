"""What inspect_kernels.py finds out about the kernels for a GPU without one."""
