"""The figures of a reproduction: each is a PNG that is not blank, and draws the numbers given."""

import json
from itertools import pairwise

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.figure import Figure

from salaad.common.errors import UserError
from salaad.config.methods import SalaadConfig
from salaad.evaluation.figures import loss_curve
from salaad.evaluation.structure import RpcaRow
from salaad.methods.salaad.storage import index_of, save_surrogates
from salaad.methods.salaad.surrogate import Surrogate
from scripts.reproduction import pictures

KINDS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj")
LAYERS = [f"model.layers.{depth}.{kind}" for depth in range(5) for kind in KINDS]
GATE = "model.layers.2.mlp.gate_proj"  # of the middle layer
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    """Every figure that is saved, in order; a closed one still holds what it drew."""
    figures, savefig = [], Figure.savefig

    def keep(figure, *args, **kwargs):
        figures.append(figure)
        return savefig(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def make_run(folder, blocks=LAYERS, steps=40, every=5, shift=0.0):
    """Write the records of a run, in which all values are distinguishable, and return its folder."""
    folder.mkdir()
    losses = [{"step": step, "loss": 8 - step / 10 + shift} for step in range(10, steps + 1, 10)]
    updates = [
        {
            "step": step,
            "block": name,
            "rank_ratio": 0.9 - step / 100 + i / 1000 + shift,
            "density": 0.5 - step / 200 + i / 1000 + shift,
            "delta": step + i + shift,
        }
        for step in range(every, steps + 1, every)
        for i, name in enumerate(blocks)
    ]
    for name, rows in (("metrics", losses), ("blocks", updates)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def save_checkpoint(run, X) -> Surrogate:
    """Write a checkpoint whose only surrogate is that of block GATE, with weight X; return the surrogate."""
    surrogate = Surrogate(X, 1.0, SalaadConfig(rank_ratio=0.5))
    folder = run / "checkpoints" / "step-0000040"
    for part in ("surrogate", "state"):
        (folder / part).mkdir(parents=True)
    save_surrogates({GATE: surrogate}, folder / "surrogate", index_of({GATE: surrogate}))
    (folder / "state" / "trainer.json").write_text("{}")
    (folder.parent / "latest").write_text(folder.name)
    return surrogate


def lines(panel) -> dict[str, tuple[list, list]]:
    """Return label, up to any " (ends", → x and y of each line in a panel."""
    return {
        line.get_label().partition(" (ends")[0]: (list(line.get_xdata()), list(line.get_ydata()))
        for line in panel.lines
    }


def bars(panel) -> dict[str, list[float]]:
    """Return label → heights of its bars in a panel, from left to right."""
    return {group.get_label(): pytest.approx([bar.get_height() for bar in group]) for group in panel.containers}


def records(run, block, key) -> tuple[list, list]:
    rows = [row for line in (run / "blocks.jsonl").open() if (row := json.loads(line))["block"] == block]
    return [row["step"] for row in rows], [row[key] for row in rows]


def looks_drawn(path) -> bool:
    image = plt.imread(path)
    return image.shape[1] >= 1100 and len({tuple(color) for row in image[::7, ::7] for color in row}) > 5


def test_embedding_draws_both_runs_their_middle_gate_and_its_singular_values(tmp_path, drawn):
    with_it = make_run(tmp_path / "with", [EMBEDDING, *LAYERS])
    without = make_run(tmp_path / "without", shift=0.05)
    first = save_checkpoint(with_it, torch.randn(30, 60))
    second = save_checkpoint(without, torch.randn(160, 120))
    pictures.embedding(with_it, without, tmp_path / "it.png")
    loss, ends, block, spectrum = drawn[0].axes
    assert lines(loss) == {"with embedding": loss_curve(with_it), "without": loss_curve(without)}
    assert lines(ends) == {
        "rank ratio Γ(L)": records(with_it, EMBEDDING, "rank_ratio"),
        "density Υ(S)": records(with_it, EMBEDDING, "density"),
    }
    assert lines(block)["density Υ(S), without"] == records(without, GATE, "density")
    assert lines(block)["rank ratio Γ(L), with embedding"] == records(with_it, GATE, "rank_ratio")
    assert block.get_title() == "layer 2, gate_proj"
    for run, surrogate in (("with embedding", first), ("without", second)):
        numbers, values = lines(spectrum)[run]
        assert values == surrogate.sigma[:50].tolist() and numbers == [*range(1, len(values) + 1)]
        assert all(a >= b for a, b in pairwise(values))
    assert len(lines(spectrum)["without"][1]) == 50 and len(first.sigma) < 50
    assert looks_drawn(tmp_path / "it.png")


def test_time_breakdown_stacks_minutes_and_leaves_evaluations_out(tmp_path, drawn):
    seconds = {"train": 600, "admm": 120, "sync": 60, "save": 20, "evaluate": 9999}
    runs = {"a": {"seconds": seconds}, "b": {"seconds": dict.fromkeys(seconds, 60)}}
    pictures.time_breakdown(runs, tmp_path / "it.png")
    (panel,) = drawn[0].axes
    widths = [[bar.get_width() for bar in group] for group in panel.containers]
    assert widths == [pytest.approx(row) for row in ([10, 1], [2, 1], [1, 1], [20 / 60, 1])]
    assert [bar.get_x() for bar in panel.containers[-1]] == [13, 3]
    assert [text.get_text() for text in panel.texts] == ["13.3 min, ADMM 15.0%", "4.0 min, ADMM 25.0%"]
    assert looks_drawn(tmp_path / "it.png")


def test_learning_dynamics_draws_the_mean_and_one_block(tmp_path, drawn):
    run = make_run(tmp_path / "run")
    pictures.learning_dynamics(run, tmp_path / "it.png")
    loss, mean, structure, error = drawn[0].axes
    assert lines(loss) == {"X": loss_curve(run)}
    updates = list(range(5, 41, 5))
    assert lines(mean) == {"mean over 15 blocks": (updates, [step + 7 for step in updates])}
    assert lines(structure)["density Υ(S)"] == records(run, GATE, "density")
    assert lines(error) == {"layer 2, gate_proj": records(run, GATE, "delta")}
    assert looks_drawn(tmp_path / "it.png")


def test_blocks_that_are_updated_in_turn_share_a_round(tmp_path, drawn):
    run = make_run(tmp_path / "run", [GATE, HEAD])
    rows = [json.loads(line) for line in (run / "blocks.jsonl").open()]
    for row in rows:
        row["step"] -= 3 * (row["block"] == GATE)
    unfinished = [row for row in rows if row["step"] < 40]  # the last round has one of its two blocks
    (run / "blocks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in unfinished))
    pictures.update_frequency({5: run}, tmp_path / "it.png")
    assert lines(drawn[0].axes[1]) == {"K/J = 5": ([*range(1, 8)], [step + 0.5 for step in range(5, 36, 5)])}


def test_records_without_their_end_are_one_sentence(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "summary.json").write_text(json.dumps({"blocks": {GATE: {"step": 40}}}))
    assert len(pictures.blocks_of(run)[GATE]) == 8
    lines = (run / "blocks.jsonl").read_text().splitlines(keepends=True)
    (run / "blocks.jsonl").write_text("".join(lines[: len(lines) // 2]))
    with pytest.raises(
        UserError, match=r"blocks.jsonl lacks the update of block model.layers.2.mlp.gate_proj after st"
    ):
        pictures.blocks_of(run)
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"metrics.jsonl has no losses; give the folder of a run that has logged some"):
        loss_curve(run)


def test_steps_without_a_loss_are_left_out(tmp_path, drawn):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 50, "loss": None}) + "\n")
    pictures.learning_dynamics(run, tmp_path / "it.png")
    assert lines(drawn[0].axes[0])["X"][0] == [10, 20, 30, 40]


def test_lm_head_draws_every_rho_of_the_head_and_of_the_embedding(tmp_path, drawn):
    heads = {f: make_run(tmp_path / f"head{f}", [EMBEDDING, HEAD], shift=f / 100) for f in (0.1, 1)}
    others = {f: make_run(tmp_path / f"other{f}", [EMBEDDING], shift=f / 50) for f in (0.1, 1)}
    pictures.lm_head(heads, others, tmp_path / "it.png")
    loss, head, embedding = drawn[0].axes
    assert lines(loss) == {
        **{f"LM head, {f:g}·ρ": loss_curve(run) for f, run in heads.items()},
        **{f"embedding, {f:g}·ρ": loss_curve(run) for f, run in others.items()},
    }
    for panel, runs, block in ((head, heads, HEAD), (embedding, others, EMBEDDING)):
        assert lines(panel) == {
            f"{name}, {f:g}·ρ": records(run, block, key)
            for f, run in runs.items()
            for name, key in (("rank ratio Γ(L)", "rank_ratio"), ("density Υ(S)", "density"))
        }
    styles = {line.get_label().split(", ")[1]: line.get_linestyle() for line in head.lines}
    assert styles["1·ρ"] != styles["0.1·ρ"]
    assert looks_drawn(tmp_path / "it.png")


def test_update_frequency_counts_updates_not_steps(tmp_path, drawn):
    runs = {K: make_run(tmp_path / str(K), every=K, shift=K / 100) for K in (5, 10, 20)}
    pictures.update_frequency(runs, tmp_path / "it.png")
    loss, error = drawn[0].axes
    for K, run in runs.items():
        steps, values = loss_curve(run)
        assert lines(loss)[f"K/J = {K}"] == ([step / K for step in steps], values)
        updates, deltas = lines(error)[f"K/J = {K}"]
        assert updates == [*range(1, 40 // K + 1)]
        assert deltas == pytest.approx([K * update + 7 + K / 100 for update in updates])
    assert looks_drawn(tmp_path / "it.png")


def test_rpca_draws_three_layers_and_the_noise_of_each_bar(tmp_path, drawn):
    rows = [
        RpcaRow(name, name.rpartition(".")[2], int(name.split(".")[2]), i / 20, i / 30, i / 25, i / 35, 0.0)
        for i, name in enumerate(LAYERS)
    ]
    whole = [RpcaRow(EMBEDDING, "embed_tokens", None, 1.0, 1.0, 1.0, 1.0, 0.0), *rows]
    pictures.rpca(whole, tmp_path / "it.png")
    panels = drawn[0].axes
    assert [panel.get_title() for panel in panels] == ["shallow: layer 0", "middle: layer 2", "deep: layer 4"]
    for panel, first in zip(panels, (0, 6, 12), strict=True):
        mine = range(first, first + 3)
        assert bars(panel) == {"rank ratio Γ(L)": [i / 20 for i in mine], "density Υ(S)": [i / 30 for i in mine]}
        marks = [[segment[0][1] for segment in group.get_segments()] for group in panel.collections]
        assert marks == [[i / 25 for i in mine], [i / 35 for i in mine]]
        for bar, segment in zip(panel.patches, [s for g in panel.collections for s in g.get_segments()], strict=True):
            assert segment[0][0] < bar.get_x() and segment[1][0] > bar.get_x() + bar.get_width()
    assert "all 15 matrices" in drawn[0].get_suptitle() and "rank ratio 35.0 ± 21.6%" in drawn[0].get_suptitle()
    assert looks_drawn(tmp_path / "it.png")


def test_rpca_truth_draws_what_was_found_beside_what_was_trained(tmp_path, drawn):
    keys = ("rank_ratio", "true_rank_ratio", "density", "true_density")
    rows = [{"block": name, **{key: (i + k) / 20 for k, key in enumerate(keys)}} for i, name in enumerate(LAYERS)]
    pictures.rpca_truth([{"block": HEAD, **dict.fromkeys(keys, 1.0)}, *reversed(rows)], tmp_path / "it.png")
    for panel, first in zip(drawn[0].axes, (0, 6, 12), strict=True):
        expected = [[(i + k) / 20 for i in range(first, first + 3)] for k in range(4)]
        assert list(bars(panel).values()) == expected
    assert [label.get_text() for label in panel.get_xticklabels()] == ["q", "o", "gate"]
    assert "35.0% found, 40.0% its own; density 45.0% found, 50.0% its own" in drawn[0].get_suptitle()
    assert looks_drawn(tmp_path / "it.png")


def test_hpa_blocks_draws_what_is_kept_and_removed_in_the_order_of_the_model(tmp_path, drawn):
    before = {
        HEAD: (100, 10, 4, 300),
        "model.layers.1.mlp.down_proj": (20, 10, 5, 80),
        "model.layers.0.mlp.down_proj": (10, 10, 4, 20),
        "model.layers.0.self_attn.q_proj": (10, 10, 2, 10),
        EMBEDDING: (100, 10, 10, 100),
    }
    after = {name: (rank // 2, nnz * 7 // 10) for name, (_, _, rank, nnz) in before.items()}
    pictures.hpa_blocks(before, after, tmp_path / "it.png")
    (panel,) = drawn[0].axes
    assert [label.get_text() for label in panel.get_xticklabels()] == ["embed", "0 q", "0 down", "1 down", "lm_head"]
    assert bars(panel) == {
        "L, kept": [0.55, 0.2, 0.4, 0.3, 0.22],
        "L, removed": [0.55, 0.2, 0.4, 0.45, 0.22],
        "S, kept": [0.07, 0.07, 0.14, 0.28, 0.21],
        "S, removed": [0.03, 0.03, 0.06, 0.12, 0.09],
    }
    for lower, upper in pairwise(panel.containers):
        for below, above in zip(lower, upper, strict=True):
            assert above.get_y() == pytest.approx(below.get_y() + below.get_height())
    removed = (1100 - 550) + (40 - 20) + (80 - 40) + (150 - 60) + (440 - 220)
    assert f"$\\phi_L$ = {removed / 1810:.1%}" in panel.get_title() and "$\\phi_S$ = 30.0%" in panel.get_title()
    assert looks_drawn(tmp_path / "it.png")


def test_hpa_of_a_deep_model_names_its_layers(tmp_path, drawn):
    names = [EMBEDDING, *(f"model.layers.{depth}.{kind}" for depth in range(24) for kind in KINDS)]
    pictures.hpa_blocks(dict.fromkeys(names, (9, 9, 2, 9)), dict.fromkeys(names, (1, 3)), tmp_path / "it.png")
    labels = [label.get_text().strip() for label in drawn[0].axes[0].get_xticklabels()]
    assert labels == ["embed", *(str(depth) for depth in range(24))]


def test_ablation_draws_every_setting_in_its_color_marker_and_size(tmp_path, drawn):
    settings = [(rho, alpha, beta) for rho in (0.1, 1, 10) for alpha in (0.5, 1) for beta in (1, 10)]
    rows = [
        {"rho": rho, "alpha": alpha, "beta": beta, "X": 20 + i / 10, "L+S": 21 + i / 10, "parameters": i * 10**6}
        for i, (rho, alpha, beta) in enumerate(settings)
    ]
    rows[5]["L+S"] = 4000.0
    pictures.ablation(rows, tmp_path / "it.png")
    looks = {}
    for panel, variant in zip(drawn[0].axes, ("X", "L+S"), strict=True):
        points = {(*line.get_xdata(), *line.get_ydata()): line for line in panel.lines}
        assert set(points) == {(row["parameters"] / 1e6, row[variant]) for row in rows}
        for row in rows:
            line = points[row["parameters"] / 1e6, row[variant]]
            for key, look in (
                ("rho", tuple(line.get_color())),
                ("alpha", line.get_marker()),
                ("beta", line.get_markersize()),
            ):
                looks.setdefault((key, look), set()).add(row[key])
    assert len(looks) == 3 + 2 + 2 and all(len(factors) == 1 for factors in looks.values())
    titles = [panel.get_title() for panel in drawn[0].axes]
    assert titles == ["perplexity of X", "perplexity of L + S (1 above the frame)"]
    assert drawn[0].axes[0].get_ylim()[1] < 25
    pictures.ablation([{**rows[0], "X": float("nan")}, *rows], tmp_path / "diverged.png")
    assert drawn[1].axes[0].get_title() == "perplexity of X (1 above the frame)"
    legend = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert legend == ["factor on ρ", "0.1", "1", "10", "factor on Δα", "0.5", "1", "factor on Δβ", "1", "10"]
    assert looks_drawn(tmp_path / "it.png")


def test_kappa_share_draws_every_cell(tmp_path, drawn):
    rows = [{"share": 0.1 * i, "kappa": 0.05 * i, "kept": kept} for i in range(1, 8) for kept in (0.8, 0.65)]
    pictures.kappa_share(rows, tmp_path / "it.png")
    (panel,) = drawn[0].axes
    *cells, diagonal = panel.lines
    points = [(*point, line.get_label()[:2]) for line in cells for point in zip(*line.get_data(), strict=True)]
    assert sorted(points) == sorted((row["share"], row["kappa"], f"{row['kept']:.0%}"[:2]) for row in rows)
    assert [list(data) for data in diagonal.get_data()] == [[0, 1], [0, 1]]
    assert looks_drawn(tmp_path / "it.png")


def test_rpca_limit_draws_every_block_and_cut(tmp_path, drawn):
    rows = [{"true_rank_ratio": r, "true_density": d, "density": d + r} for r in (0.1, 0.3) for d in (0.05, 0.2, 0.6)]
    pictures.rpca_limit(rows, tmp_path / "it.png")
    (cloud,) = drawn[0].axes[0].collections
    assert cloud.get_offsets().tolist() == [[row["true_rank_ratio"], row["true_density"]] for row in rows]
    assert cloud.get_array().tolist() == pytest.approx([row["true_rank_ratio"] for row in rows])
    assert looks_drawn(tmp_path / "it.png")


def test_a_run_without_what_a_picture_shows_is_refused(tmp_path):
    run, headless, empty = make_run(tmp_path / "run"), make_run(tmp_path / "other"), make_run(tmp_path / "vanilla", [])
    with pytest.raises(UserError, match="no ADMM updates"):
        pictures.learning_dynamics(empty, tmp_path / "it.png")
    with pytest.raises(UserError, match="no block is named lm_head"):
        pictures.lm_head({1: headless}, {}, tmp_path / "it.png")
    with pytest.raises(UserError, match="no checkpoint"):
        pictures.embedding(run, headless, tmp_path / "it.png")


def test_one_training_draws_every_model_by_its_size(tmp_path, drawn):
    curves = {"one": {1.0: 120.0, 1.8: 101.0}, "cut": {1.0: 900.0, 1.8: 99.0}, "each": {1.0: 110.0, 1.8: 99.0}}
    rows = [
        {"label": label, "parameters": 1e6 * size, "perplexity": perplexity}
        for label, curve in curves.items()
        for size, perplexity in reversed(curve.items())
    ]
    pictures.one_training(rows, tmp_path / "one_training.png")
    [panel] = drawn[0].axes
    shown = {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in panel.lines}
    assert shown == curves
    assert panel.get_ylim()[1] < 900  # an unusable model does not flatten the other curves
