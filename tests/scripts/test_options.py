"""Options of scripts: none is taken and then ignored, and --help does nothing else."""

import re
import sys

import pytest

from salaad.common.errors import UserError
from scripts import bench_inference, demo, reproduce, update_results


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        (bench_inference, "--checkpoint runs/x --roundss 3", "--roundss 3: with --checkpoint there is no model to"),
        (reproduce, "--scale nano table1 --json", "--json is a form of the list; give --list with it"),
        (demo, "--quick --record", "--record keeps the results of the whole demo; leave out --quick"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(script, words, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script.__file__, *words.split()])
    with pytest.raises(UserError, match=re.escape(said)):
        script.main()


def test_the_help_of_the_results_writes_no_page(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["update_results.py", "--help"])
    monkeypatch.setattr(update_results.nano, "draw_pictures", lambda: pytest.fail("draws"))
    with pytest.raises(SystemExit) as left:
        update_results.main()
    assert left.value.code == 0 and "nothing is typed by hand" in capsys.readouterr().out
