"""The trainings, tables and diagrams of the reproduction, against the paper and sums by hand."""

from itertools import combinations

import pytest

from salaad.common.budgets import parse_budget
from salaad.config.command_line import read_command_line
from salaad.config.commands import DEFAULT_TASKS
from salaad.model.build import describe_model, outline
from salaad.model.parameters import count_parameters
from salaad.model.roles import find_blocks
from scripts.reproduction import trainings
from scripts.reproduction.appendix_c import memory_and_operations
from scripts.reproduction.deployments import accuracies
from scripts.reproduction.grid import SCALES, distinct
from scripts.reproduction.tables import ablation_table, paper
from tests.helpers.reproduced import NANO


def test_the_same_training_asked_for_in_two_ways_is_one():
    same = [trainings.SALAAD, trainings.scaled(1, 1, 1), trainings.WITH_EMBEDDING]  # nano includes the embedding
    assert distinct([*same, trainings.VANILLA], NANO) == [trainings.SALAAD, trainings.VANILLA]
    assert len(distinct(same, SCALES["350m"])) == 2


def test_a_training_is_called_that_of_table_1_only_where_it_is():
    for scale in SCALES.values():
        for name, run in trainings.embedding_why(scale).items():
            assert ("Table 1" in name) == (run.name(scale) == trainings.SALAAD.name(scale)), (scale.name, name)


@pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
def test_every_budget_of_a_scale_is_above_what_is_never_compressed(scale):
    config = scale.config
    model = outline(describe_model(config.model, config.data.sequence_length))
    dense = count_parameters(model)
    for run, budgets in (
        (trainings.SALAAD, (*scale.budgets, scale.table_budget)),
        (trainings.WITH_EMBEDDING, (scale.embedding_budget or scale.table_budget,)),
        (trainings.SALAAD_BF16, (scale.bf16_budget or scale.embedding_budget or scale.table_budget,)),
    ):
        salaad = read_command_line([*run.command(scale)[1:]])[0].salaad
        floor = dense - sum(weight.numel() for weight in find_blocks(model, salaad).values())
        assert floor < min(parse_budget(budget, dense) for budget in budgets) < dense


@pytest.mark.parametrize(
    ("table", "scale", "runs"),
    [
        ("ablation350m", "350m", (*trainings.BETAS_350M, *trainings.ALPHAS_350M)),
        ("ablation350m_rho", "350m", trainings.RHO_PAIRS_350M),
        ("ablation130m", "130m", (*trainings.BETAS_130M, *trainings.ALPHAS_130M)),
        ("ablation130m_pairs", "130m", trainings.PAIRS_130M),
    ],
)
def test_every_training_of_an_ablation_has_its_number_in_the_paper(table, scale, runs):
    printed, mine = paper(table, SCALES[scale]), runs
    assert len(printed) == len(mine)
    # Where the paper prints one setting twice, it trained it twice: the numbers differ by little.
    for (one, a), (other, b) in combinations(zip(mine, printed, strict=True), 2):
        if one == other:
            assert abs(a[0] - b[0]) < 0.05 and a[2] == b[2]
    # A larger ρ alone never has more parameters, as the paper says.
    sizes = {tuple(dict(run.factors).values()): numbers[2] for run, numbers in zip(mine, printed, strict=True)}
    for (alpha, beta, rho), size in sizes.items():
        assert all(size >= other for (a, b, r), other in sizes.items() if (a, b) == (alpha, beta) and r > rho)


@pytest.mark.parametrize(
    ("scale", "runs", "rhos"),
    [
        ("350m", trainings.RHO_PAIRS_350M, {5e-8, 1e-7}),
        ("130m", trainings.PAIRS_130M, {1e-8, 1e-7, 1e-6}),
        ("60m", trainings.HEADS, {1e-7, 1e-6}),
    ],
)
def test_the_papers_scales_train_its_absolute_settings_and_ours_the_same_factors(scale, runs, rhos):
    configs = [read_command_line(run.command(SCALES[scale])[1:])[0].salaad for run in runs]
    assert {float(f"{config.rho:.6g}") for config in configs} == rhos
    if scale == "350m":  # Δα 0.1, Δβ 0.01 and 0.05
        assert [(c.delta_alpha, c.delta_beta) for c in configs] == [(0.1, 0.01)] * 2 + [(0.1, 0.05)] * 2
    if scale == "130m":
        assert {c.delta_alpha for c in configs} == {0.005, 0.05, 0.5}
        assert {c.delta_beta for c in configs} == {0.0005, 0.005, 0.05}
    own = NANO.config.salaad.rho_constant
    at_nano = [read_command_line(run.command(NANO)[1:])[0].salaad for run in runs]
    assert all(config.rho is None for config in at_nano)
    ratios = sorted({round(config.rho_constant / own, 6) for config in at_nano})
    assert [ratio / ratios[0] for ratio in ratios] == pytest.approx([rho / min(rhos) for rho in sorted(rhos)], rel=1e-4)


def test_the_study_of_k_has_the_embedding_among_its_blocks_as_the_papers():
    for run in trainings.FREQUENCIES:
        assert read_command_line(run.command(SCALES["1b"])[1:])[0].salaad.embedding


def test_the_costs_of_the_admm_are_the_papers_where_it_prints_them():
    measured = memory_and_operations(NANO)
    blocks = [row for row in measured.rows if "block" in row]
    for row in blocks:
        assert row["svd_flops"] == pytest.approx(row["printed_svd_flops"], rel=0.05)  # two digits are printed
        n, m = row["shape"]
        assert row["bytes"] >= 2 * 4 * n * m  # two matrices in float32
    seventy = next(row for row in measured.rows if row.get("size") == "70b")
    assert seventy["blocks"] == 560 and 6e10 < seventy["parameters"] < 8e10
    # With a GPU for every block, a GPU holds at most the largest block's matrices.
    assert seventy["bytes_many"] == max(row["bytes"] for row in blocks)
    small = next(row for row in measured.rows if row.get("size") == "60m")
    assert small["step_flops"] == pytest.approx(6 * 58.07e6 * 512 * 256, rel=0.1)


def test_tables_hold_the_papers_numbers_beside_ours():
    row = {"alpha": 1, "beta": 0.6, "rho": 1, "X": 20.0, "L+S": 21.0, "parameters": 3e6, "paper": [18.62, 18.43, 241]}
    row["own"] = {"alpha": 0.2, "beta": 0.002}
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in ablation_table([row], "beta").split("\n")
    ]
    assert dict(lines[2:])["paper PPL (X)"] == "18.62" and dict(lines[2:])["PPL (L+S)"] == "21.00"
    assert dict(lines)["Δβ ×"] == "0.6" and dict(lines)["Δβ"] == "0.0012"
    scores = [{"variant": "X", "task": task, "acc": 0.25} for task in DEFAULT_TASKS]
    shown = accuracies(scores, paper("downstream", SCALES["1b"])).split("\n")
    assert [line.split("|")[1].strip() for line in shown[2:]] == ["X", "paper X", "paper L̃+S̃", "paper Vanilla"]
    assert "25.0" in shown[2] and "71.0" in shown[3]


def test_the_small_dense_models_of_a_scale_have_the_sizes_of_its_cuts():
    scale = SCALES["micro"]
    runs = trainings.small_dense(scale)
    assert list(runs) == list(scale.budgets)
    whole = scale.config.model
    dense = count_parameters(outline(describe_model(whole, 256)))
    for budget, run in runs.items():
        words = run.command(scale)
        config, _ = read_command_line(words[1:])
        count = count_parameters(outline(describe_model(config.model, 256)))
        assert count == pytest.approx(parse_budget(budget, dense), rel=0.002)
        assert (config.method, config.model.vocab_size) == ("full_rank", whole.vocab_size)
        assert run.name(scale) == f"full_rank,like=micro,parameters={budget}"
        assert run.flops(scale) < trainings.VANILLA.flops(scale)
