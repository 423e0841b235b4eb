"""Pictures of a script's runs: what they show can be seen."""

import json

import matplotlib.pyplot as plt

from scripts.run_figures import training_figure


def test_two_curves_that_coincide_are_both_seen(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "loss": 9 - step / 10}) for step in range(50)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    training_figure({name: tmp_path / name for name in ("one", "other")}, tmp_path / "drawn.png")
    red, _, blue = plt.imread(tmp_path / "drawn.png")[..., :3].transpose(2, 0, 1)
    # Each line of the legend has about a hundred pixels, and the curve many times as many.
    assert (blue - red > 0.15).sum() > 1000 and (red - blue > 0.5).sum() > 500
