"""How often long work is saved, by a clock of the test's own."""

import time

import pytest

from salaad.common.save_pace import SavePace


@pytest.mark.parametrize(("save", "wait"), [(0.5, 60), (3, 60), (30, 600)])
def test_a_save_is_due_after_a_minute_or_when_it_takes_a_twentieth_of_the_time(monkeypatch, save, wait):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pace = SavePace(60)
    now[0] += 59
    assert not pace.is_due()
    now[0] += 2
    assert pace.is_due()
    with pace.save():
        now[0] += save
    now[0] += wait - 1
    assert not pace.is_due()
    now[0] += 2
    assert pace.is_due()
