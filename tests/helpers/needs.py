"""Marks of tests that need a package which is not there on every machine."""

from importlib.util import find_spec

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
