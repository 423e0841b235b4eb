"""Weights of a cut's errors, against NumPy; cuts in their norm, against dense SVDs; and the stored second moments."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from salaad import Salaad, SalaadConfig
from salaad.common.errors import UserError
from salaad.compression.cut import Whole, cut
from salaad.compression.opening import open_deployment
from salaad.compression.sensitivity import weights_from
from salaad.compression.variants import Variant
from salaad.factored import SlrLinear
from salaad.factored.slr import Slr
from salaad.model.second_moments import read_second_moments, second_moments
from salaad.runs.model_on_disk import ModelOnDisk
from tests.helpers.deploying import compress
from tests.helpers.models import open_folder


def drawn(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def low_rank(X: np.ndarray) -> Slr:
    return Slr.from_parts(torch.from_numpy(X), torch.zeros(*X.shape, dtype=torch.float64), min(X.shape))


X = {"a": drawn(6, 9, seed=0), "b": 20 * drawn(8, 5, seed=1), "c": 0.1 * drawn(7, 7, seed=2)}
V = {"a": drawn(6, 9, seed=3) ** 2, "b": 1e-3 * drawn(8, 5, seed=4) ** 2}
PARTS = {name: low_rank(matrix) for name, matrix in X.items()}
MOMENTS = {name: (torch.from_numpy(v.mean(1)), torch.from_numpy(v.mean(0))) for name, v in V.items()}


def by_hand(name: str, exponent: float = 1 / 3) -> np.ndarray:
    """The weights w of a block, up to a factor common to all blocks; c, without a known gradient, gets the median."""
    felt = {key: V[key].mean() * (X[key] ** 2).mean() for key in V}
    felt["c"] = np.median(list(felt.values()))
    v = V.get(name, np.ones((7, 7)))
    r, c = (0.05 + 0.95 * v.mean(axis) / v.mean() for axis in (1, 0))
    felt[name] /= np.median([felt["a"], felt["b"]])
    return np.sqrt(felt[name] ** exponent / (X[name] ** 2).mean() * np.sqrt(np.outer(r, c)))


def test_weights_are_those_of_the_formula():
    found = weights_from(MOMENTS, PARTS)
    assert set(found) == set(X)
    w = {name: (weights.rows * weights.columns).numpy() for name, weights in found.items()}
    factor = w["a"][0, 0] / by_hand("a")[0, 0]
    for name in X:
        np.testing.assert_allclose(w[name], factor * by_hand(name), rtol=1e-6)  # float32 where nothing is known


def test_the_head_counts_as_much_as_the_loss_feels_it():
    """The sensitivity of the head counts with exponent 1, that of every other block with exponent 1/3."""
    named = {"a": "lm_head", "b": "b", "c": "c"}
    found = weights_from({named[k]: m for k, m in MOMENTS.items()}, {named[k]: slr for k, slr in PARTS.items()})
    w = {name: (weights.rows * weights.columns).numpy() for name, weights in found.items()}
    factor = w["b"][0, 0] / by_hand("b")[0, 0]
    np.testing.assert_allclose(w["lm_head"], factor * by_hand("a", exponent=1), rtol=1e-6)


def test_where_no_gradient_is_known_nothing_is_weighed():
    assert weights_from({}, PARTS) == {}
    assert weights_from({"a": (torch.zeros(6), torch.zeros(9))}, PARTS) == {}


def test_a_cut_is_the_best_in_the_norm_of_the_weights():
    """Without S, the kept terms are the leading singular terms of diag(r)·X·diag(c), by value per parameter."""
    weights = weights_from(MOMENTS, PARTS)
    whole = Whole(PARTS, 0, lambda name: PARTS[name].dense(), weights)
    small = cut(whole, Variant("small", 60))
    kept = {name: slr.rank for name, slr in small.items()}
    assert all(slr.parameters < X[name].size for name, slr in small.items())  # else it would be dense, and whole
    least, most = [], []  # values per parameter of terms that are kept, and of others
    for name, slr in small.items():
        w = (weights[name].rows * weights[name].columns).numpy()
        U, s, Vh = np.linalg.svd(w * X[name], full_matrices=False)
        r = slr.rank
        np.testing.assert_allclose(slr.dense().numpy(), ((U[:, :r] * s[:r]) @ Vh[:r]) / w, atol=1e-9)
        values = s**2 / sum(X[name].shape)
        least += list(values[:r])
        most += list(values[r:])
    assert 0 < sum(kept.values()) < 18
    assert min(least) > 0.9 * max(most)  # values are compared by their leading bits, in steps of 3 to 6 %


def test_refinement_comes_nearer_in_that_norm():
    parts = {name: Slr.from_parts(torch.from_numpy(X[name]), torch.from_numpy(X[name]), 3) for name in X}
    weights = weights_from(MOMENTS, parts)
    whole = Whole(parts, 0, lambda name: parts[name].dense(), weights)

    def distance(refine: int) -> float:
        small = cut(whole, Variant("small", 60, refine=refine))
        return sum(float(weights[n].of(slr.dense() - parts[n].dense()).square().sum()) for n, slr in small.items())

    assert distance(10) < 0.99 * distance(0)


def test_a_checkpoint_holds_the_means_of_the_moments_of_its_optimizer(runs):
    for method in ("salaad", "full_rank"):
        [checkpoint] = (runs / method / "checkpoints").glob("step-*")
        found = load_file(checkpoint / "state" / "second_moments.safetensors")
        saved = torch.load(checkpoint / "state" / "optimizer.pt", weights_only=True)["state"]
        model = LlamaForCausalLM.from_pretrained(checkpoint / "model")
        for (name, parameter), i in zip(model.named_parameters(), saved, strict=True):
            if parameter.ndim == 2:
                square = saved[i]["exp_avg_sq"].double()
                for side, axis in (("rows", 1), ("columns", 0)):
                    part = found[f"{name.removesuffix('.weight')}/{side}"].double()
                    torch.testing.assert_close(part, square.mean(axis), rtol=1e-5, atol=0)


def test_energy_goes_by_them_and_the_papers_way_does_not(runs):
    deployment = open_deployment(ModelOnDisk.open(runs / "salaad"))
    budget = (deployment.fixed + deployment.dense) // 2
    assert set(deployment.weights(Variant("a", budget))) == set(deployment.shapes)
    assert deployment.weights(Variant("a", budget, 0.5)) == {}


def test_a_broken_file_is_refused_in_a_sentence(tmp_path):
    path = tmp_path / "second_moments.safetensors"
    path.write_bytes(b"no tensors")
    with pytest.raises(UserError, match="cannot be read"):
        read_second_moments(path, {})


@pytest.mark.parametrize("damage", [-1.0, float("nan")])
def test_numbers_that_are_no_squares_are_refused(tmp_path, damage):

    path = tmp_path / "second_moments.safetensors"
    save_file({"a/rows": torch.full((3,), damage), "a/columns": torch.ones(4)}, path)
    with pytest.raises(UserError, match="no second moments of a"):
        read_second_moments(path, {"a": (3, 4)})


def trained(folder):
    """Train a model for six steps in a plain loop and save it in `folder`; return model, Salaad and optimizer."""
    torch.manual_seed(0)
    sizes = {"intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=16, **sizes))
    salaad, optimizer = Salaad(model, SalaadConfig(every=2)), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(6):
        tokens = torch.randint(3, 40, (4, 10))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        salaad.step()
    salaad.save(folder)
    return model, salaad, optimizer


def test_a_folder_from_a_loop_of_ones_own_holds_them_too_and_both_ways_to_cut_agree(tmp_path):
    model, salaad, optimizer = trained(tmp_path / "saved")
    source = ModelOnDisk.open(tmp_path / "saved")
    shapes = {name: tuple(block.shape) for name, block in salaad.weights.items()}
    found = read_second_moments(source.second_moments, shapes)
    for name in shapes:
        square = optimizer.state[model.get_submodule(name).weight]["exp_avg_sq"]
        torch.testing.assert_close(found[name][0], square.mean(1))
    deployment = open_deployment(source)
    # `fixed` includes embedding and head, 640 parameters each; the budget can only be met if both are cut.
    budget = deployment.fixed - 640 - 400
    compress(tmp_path / "saved", tmp_path / "small", budget=budget, dtype="float32")
    written = open_folder(tmp_path / "small").dequantize(torch.float32).state_dict()
    opened = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    # The first takes the moments from its optimizer, the second reads them from the folder.
    for one in (salaad, Salaad.load(opened, tmp_path / "saved")):
        small = one.compress(budget)
        assert isinstance(small.lm_head, SlrLinear)
        for name, X in small.dequantize(torch.float32).state_dict().items():
            torch.testing.assert_close(X, written[name], rtol=1e-4, atol=1e-5)


def test_an_optimizer_that_keeps_none_leaves_none():
    layer = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert second_moments(layer, optimizer) == {}
    assert second_moments(layer, torch.optim.Adam(layer.parameters())) == {}  # before its first step


def test_a_size_of_an_elastic_folder_is_the_cut_of_that_size(runs, tmp_path, own_caches):
    compress(runs / "salaad", tmp_path / "every", elastic=True, dtype="float32")
    compress(runs / "salaad", tmp_path / "one", budget="0.6", refine=0, dtype="float32")
    one = open_folder(tmp_path / "one").state_dict()
    every = open_folder(tmp_path / "every", budget="0.6").state_dict()
    assert one.keys() == every.keys()
    assert all(torch.equal(one[key], every[key]) for key in one)
