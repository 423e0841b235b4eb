"""Which signals ask a run to stop."""

import os
import signal

import pytest

from salaad.common.signals import StopRequest


@pytest.mark.parametrize(
    ("before", "stops"), [(signal.SIG_IGN, False), (lambda *_: None, True)], ids=["nohup", "a handler"]
)
def test_the_end_of_a_terminal_stops_unless_nohup_has_it_ignored(before, stops):
    own = signal.signal(signal.SIGHUP, before)
    try:
        with StopRequest() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.asked == stops
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, own)
