"""The loss's GPU kernel, run by Triton's interpreter."""

from pathlib import Path

from tests.helpers.interpreted import needs_triton, passes_interpreted


@needs_triton
def test_the_loss_is_computed_by_an_interpreted_kernel():
    assert passes_interpreted(Path(__file__).with_name("interpreted_gpu_kernels.py"))
