"""Fixtures of the tests of the reproduction: rows of every item, and what is judged from them."""

import pytest

from tests.helpers.reproduced import all_rows


@pytest.fixture
def rows() -> dict[str, list[dict]]:
    """Item → rows with which each claim holds."""
    return all_rows()
