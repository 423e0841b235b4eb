"""The checks of gpu_checks.py by topic, and the page that gpu.py makes of all results."""
