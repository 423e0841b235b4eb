"""What gpu_checks.py compares on a device, a file per kind, and the page that gpu.py makes of all results."""
