"""The choice of a solver by the rates of a device, as they stand in the table."""

import pytest
import torch

from salaad.spectral import cost
from salaad.spectral.cost import RATES, cheapest, rates_of, seconds
from salaad.spectral.products import width_of


def test_seconds_by_hand():
    h100 = RATES["h100"]
    # In products of 1024×1024 matrices: 32 for the sign, 27 for the roots and 6 more, q columns beside them.
    assert seconds("products", 1024, 1024, 224, h100) > 65 * 2 * 1024**3 / (0.4 * 67e12)
    # Four kernels a column and twenty calls after the wait, 5 µs each; 9n³ operations at 3 % of the peak, 6n²m at 40 %.
    by_hand = (4 * 1024 + 20) * 5e-6 + 9 * 1024**3 / (0.03 * 67e12) + 6 * 1024**3 / (0.4 * 67e12)
    assert seconds("gram", 1024, 1024, 0, h100) == pytest.approx(by_hand)


@pytest.fixture
def named(monkeypatch):
    """The rates of a GPU by the name that its driver gives."""

    def rates(name: str) -> cost.Rates:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        rates_of.cache_clear()
        return rates_of(torch.device("cuda", 0))

    yield rates
    rates_of.cache_clear()


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("Tesla V100-SXM2-32GB", "a100"),  # not in the table
    ],
)
def test_a_gpu_is_known_by_its_name_and_one_that_is_not_is_an_a100(named, name, known):
    assert named(name) is RATES[known]


def test_other_devices_than_a_cpu_are_waited_for():
    assert rates_of(torch.device("cpu")) is RATES["cpu"] and not RATES["cpu"].waits
    assert rates_of(torch.device("mps")) is RATES["a100"]
    assert all(rates.waits for name, rates in RATES.items() if name != "cpu")


# Short side → the part of its singular values up to which products are taken, of those that the paper's models show
# early, in the middle and late in a training (results/admm/spectra.json).
EARLY, MIDDLE, LATE = 0.96, 0.38, 0.13
UP_TO = {
    "h100": {512: EARLY, 768: EARLY, 1024: MIDDLE, 2048: MIDDLE},
    "a100": {512: MIDDLE, 768: MIDDLE, 1024: MIDDLE, 2048: LATE},
}


@pytest.mark.parametrize("device", list(UP_TO))
@pytest.mark.parametrize("part", [EARLY, MIDDLE, LATE])
@pytest.mark.parametrize("shape", [(512, 512), (512, 1376), (768, 2048), (1024, 2736), (2048, 2048), (2048, 5461)])
def test_the_solver_of_every_shape_on_every_device(device, part, shape):
    n, m = shape
    expected = "products" if part <= UP_TO[device][n] else "gram"
    assert cheapest(n, m, width_of(round(part * n), n), RATES[device]) == expected
    assert cheapest(n, m, width_of(round(part * n), n), RATES["cpu"]) == "ladder"


def test_a_device_that_is_slow_at_products_takes_eigenvectors():
    assert cheapest(1024, 2736, 1024, cost.Rates(1e9, eigenvectors=0.3)) == "gram"
