"""Work side by side in threads, of which nothing more begins after an error or Ctrl-C."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

Submit = Callable[..., Future]


@contextmanager
def side_by_side(jobs: int) -> Iterator[Submit]:
    """Yield a function that submits a function and its arguments to `jobs` threads and returns the future.

    After an error in one of them or in the block, what has begun is waited for, and all else fails with that error.
    """
    errors: list[BaseException] = []

    def unless_failed(work: Callable[..., Any], *arguments: Any) -> Any:
        if errors:
            raise errors[0]
        try:
            return work(*arguments)
        except BaseException as error:
            errors.append(error)
            raise

    with ThreadPoolExecutor(jobs) as pool:
        try:
            yield partial(pool.submit, unless_failed)
        except BaseException as error:
            errors.append(error)
            raise
