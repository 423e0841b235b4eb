"""Which kernels are in the recorded rows of which dtype."""

TRAINED_ONLY = {"divide_kernel", "penalty_kernel"}  # nothing is trained in float16


def taken_by(dtype: str, cases: set[tuple[str, str]]) -> set[str]:
    """Return the kernels among `cases` (kernel, case) that take a dtype."""
    return {kernel for kernel, _ in cases} - (TRAINED_ONLY if dtype == "float16" else set())
