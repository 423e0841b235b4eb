"""The norm that identifies a loaded weight: exact, and without a float64 copy of a weight that fills a device."""

import torch
from torch.profiler import ProfilerActivity, profile

from salaad.methods.salaad.storage import _AT_ONCE, norm_of


def test_a_norm_is_summed_in_float64_without_a_copy_of_the_weight():
    X = torch.randn(3000, 2000, generator=torch.Generator().manual_seed(0)).mT
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        norm = norm_of(X)
    assert abs(norm / float((X.double() ** 2).sum().sqrt()) - 1) < 1e-12
    assert max(event.cpu_memory_usage for event in seen.events()) <= 8 * _AT_ONCE < 8 * X.numel() / 5


def test_a_row_longer_than_what_is_summed_at_once_is_summed_too():
    X = torch.ones(2, 2 * _AT_ONCE)
    assert norm_of(X) == 2 * _AT_ONCE**0.5
