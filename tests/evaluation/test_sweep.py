"""The κ sweep's tables and its band on rows made by hand."""

import math
import random

import pytest

from salaad.compression.variants import Variant
from salaad.evaluation.figures import elastic_figure, sweep_figure
from salaad.evaluation.sweep import best, elastic_table, grid, grid_table, measure, stable_band

GRID = {
    3_000_000: {0.0: 21.5, 0.5: 20.25, 1.0: 22.0},
    1_500_000: {0.0: 90.0, 0.5: 50.126, 1.0: 40.0},
    2_000_000: {0.0: 30.0, 0.5: 29.996, 1.0: 31.0},
}


def row(
    variant: str, perplexity: float, parameters: int, budget: int | None = None, kappa: float | None = None
) -> dict:
    return {
        "variant": variant,
        "budget": budget,
        "kappa": kappa,
        "perplexity": perplexity,
        "parameters": parameters,
    }


def rows(shift: float = 0.0, seed: int = 0) -> list[dict]:
    """X, L + S and the grid, shuffled; `shift` is added to every perplexity."""
    cells = [
        row(f"{budget} @ {kappa}", perplexity + shift, budget - 7, budget, kappa)
        for budget, line in GRID.items()
        for kappa, perplexity in line.items()
    ]
    whole = [row("X", 19.0 + shift, 4_200_000), row("L+S", 19.5 + shift, 3_456_789)]
    return random.Random(seed).sample(whole + cells, len(whole + cells))


def table(markdown: str) -> list[list[str]]:
    """The cells of a Markdown table, without its rule."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]
    assert all(set(cell) <= set("-:") for cell in lines[1])
    return [lines[0], *lines[2:]]


def test_the_grid_is_x_and_l_plus_s_and_then_every_kappa_of_every_budget():
    assert grid([3_000_000, 1_500_000], [0.0, 0.15, 1.0]) == [
        Variant("X"),
        Variant("L+S"),
        Variant("3M@0", 3_000_000, 0.0),
        Variant("3M@0.15", 3_000_000, 0.15),
        Variant("3M@1", 3_000_000, 1.0),
        Variant("1.5M@0", 1_500_000, 0.0),
        Variant("1.5M@0.15", 1_500_000, 0.15),
        Variant("1.5M@1", 1_500_000, 1.0),
    ]


def test_every_model_is_measured_at_every_variant_once_and_in_order():
    asked = []

    def evaluation(label: str):
        def measured(variant: Variant) -> dict:
            asked.append((label, variant))
            return row(variant.name, 10.0 + len(asked), 1, variant.budget, variant.kappa)

        return measured

    variants = grid([2, 1], [0.0, 1.0])
    measured = measure({"a": evaluation("a"), "b": evaluation("b")}, variants)
    assert asked == [(label, variant) for label in "ab" for variant in variants]
    assert {label: [cell["variant"] for cell in cells] for label, cells in measured.items()} == {
        label: [variant.name for variant in variants] for label in "ab"
    }
    assert [cell["perplexity"] for cell in measured["b"]] == [17.0, 18.0, 19.0, 20.0, 21.0, 22.0]


def test_the_best_cell_of_every_budget_the_largest_first_whatever_the_order_of_rows():
    for seed in range(5):
        winners = [(cell["budget"], cell["kappa"], cell["perplexity"]) for cell in best(rows(seed=seed))]
        assert winners == [(3_000_000, 0.5, 20.25), (2_000_000, 0.5, 29.996), (1_500_000, 1.0, 40.0)]


def test_there_is_no_best_without_budgets():
    assert best([row("X", 19.0, 5), row("L+S", 20.0, 4)]) == []


def test_the_band_runs_from_the_least_best_kappa_to_the_greatest():
    assert stable_band(rows()) == (0.5, 1.0)
    assert stable_band([cell for cell in rows() if cell["budget"] != 1_500_000]) == (0.5, 0.5)
    away = [row("a", 2.0, 1, 10, 0.9), row("b", 1.0, 1, 10, 0.2), row("c", 1.0, 1, 5, 0.7), row("d", 2.0, 1, 5, 0.0)]
    assert stable_band(away) == (0.2, 0.7)
    fallen = [{**cell, "kappa": 1 - cell["kappa"]} for cell in rows() if cell["budget"] is not None]
    assert stable_band(fallen) == (0.0, 0.5)


def test_the_grid_has_a_line_per_budget_a_column_per_kappa_and_the_best_in_bold():
    assert table(grid_table(rows())) == [
        ["budget", "κ = 0", "κ = 0.5", "κ = 1", "κ*"],
        ["3.00 M", "21.50", "**20.25**", "22.00", "0.5"],
        ["2.00 M", "30.00", "**30.00**", "31.00", "0.5"],
        ["1.50 M", "90.00", "50.13", "**40.00**", "1"],
    ]


def test_the_grid_does_not_depend_on_the_order_of_rows_and_shows_one_model_only_by_its_cells():
    cells = [cell for cell in rows() if cell["budget"] is not None]
    assert len({grid_table(some) for some in (rows(), rows(seed=1), rows(seed=2), cells)}) == 1


def test_the_elastic_curve_has_x_and_l_plus_s_and_every_budget_at_its_best_kappa():
    assert table(elastic_table({"SALAAD": rows()})) == [
        ["size", "SALAAD", "size or κ*"],
        ["X", "19.00", "4.20 M"],
        ["L+S", "19.50", "3.46 M"],
        ["3.00 M", "20.25", "κ* = 0.5"],
        ["2.00 M", "30.00", "κ* = 0.5"],
        ["1.50 M", "40.00", "κ* = 1"],
    ]


def test_two_models_stand_side_by_side_each_at_its_own_best_kappa():
    other = [
        *(cell for cell in rows(shift=1.0) if cell["budget"] != 2_000_000),
        row("2 @ 0", 25.0, 1_999_999, 2_000_000, 0.0),
        row("2 @ 0.5", 26.0, 1_999_999, 2_000_000, 0.5),
    ]
    both = table(elastic_table({"SALAAD": rows(), "vanilla + RPCA": other}))
    assert both[0] == ["size", "SALAAD", "size or κ*", "vanilla + RPCA", "size or κ*"]
    assert [line[:3] for line in both[1:]] == table(elastic_table({"SALAAD": rows()}))[1:]
    assert [line[3:] for line in both[1:]] == [
        ["20.00", "4.20 M"],
        ["20.50", "3.46 M"],
        ["21.25", "κ* = 0.5"],
        ["25.00", "κ* = 0"],
        ["41.00", "κ* = 1"],
    ]


@pytest.mark.parametrize(
    "bad", [("X",), ("X", "L+S", *(f"{budget} @ {kappa}" for budget in GRID for kappa in GRID[budget]))]
)
def test_pictures_leave_out_what_is_not_finite(tmp_path, bad):
    mine = [one | {"perplexity": math.nan} if one["variant"] in bad else one for one in rows()]
    sweep_figure(mine, tmp_path / "sweep.png")
    elastic_figure({"model": mine}, tmp_path / "elastic.png")
    assert all((tmp_path / name).stat().st_size for name in ("sweep.png", "elastic.png"))
