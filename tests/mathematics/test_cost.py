"""The choice of a solver by a device's rates in the table `RATES`, and the seconds predicted for each solver."""

import pytest
import torch

from salaad.spectral import cost
from salaad.spectral.cost import RATES, cheapest, rates_of, seconds
from salaad.spectral.gpu_names import known_name


def test_seconds_by_hand():
    h100 = RATES["h100"]
    # In products of 1024×1024 matrices: 32 for 16 steps of the sign, 24 for 8 steps of the roots, 8 more; 97 with 64
    # columns; 5 µs for each of 446 calls.
    by_hand = (64 * 2 * 1024**3 + 97 * 2 * 64 * 1024**2) / (0.4 * 67e12) + 446 * 5e-6
    assert seconds("products", 1024, 1024, h100) == pytest.approx(by_hand)
    # Four kernels a column and twenty calls after the wait, 5 µs each; 9n³ operations at 3 % of the peak, 6n²m at 40 %.
    by_hand = (4 * 1024 + 20) * 5e-6 + 9 * 1024**3 / (0.03 * 67e12) + 6 * 1024**3 / (0.4 * 67e12)
    assert seconds("gram", 1024, 1024, h100) == pytest.approx(by_hand)


@pytest.fixture
def named(monkeypatch):
    """A function that returns the rates of a GPU whose driver reports the given name."""

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


@pytest.mark.parametrize("name", ["NVIDIA RTX A1000 Laptop GPU", "NVIDIA RTX A10000", "NVIDIA GeForce RTX 40900"])
def test_a_gpu_whose_number_begins_like_that_of_another_is_not_known(name):
    known_name.cache_clear()
    with pytest.warns(UserWarning, match="is not among the GPUs whose rates are known"):
        assert known_name(name) == "a100"


def test_other_devices_than_a_cpu_are_waited_for():
    assert rates_of(torch.device("cpu")) is RATES["cpu"] and not RATES["cpu"].waits
    assert rates_of(torch.device("mps")) is RATES["a100"]
    assert all(rates.waits for name, rates in RATES.items() if name != "cpu")


@pytest.mark.parametrize("device", ["h100", "h200", "a100", "4090"])
@pytest.mark.parametrize("shape", [(512, 512), (512, 1376), (768, 2048), (1024, 2736), (2048, 2048), (2048, 5461)])
def test_products_are_the_cheapest_for_all_blocks_of_the_paper_on_every_gpu(device, shape):
    assert cheapest(*shape, RATES[device]) == "products"
    assert cheapest(*shape, RATES["cpu"]) == "ladder"


def test_a_device_that_is_slow_at_products_takes_eigenvectors():
    assert cheapest(1024, 2736, cost.Rates(1e9, eigenvectors=0.3)) == "gram"
