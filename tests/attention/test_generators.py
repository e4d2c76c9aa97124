"""Seeding does what torch's own does, and does not pile up what to seed when a device is first used."""

import pytest
import torch

from attn_zoo.attention.generators import seed_generators


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63])
def test_it_is_torch_s_own(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        expected = torch.randn(4)
        torch.randn(1)
        seed_generators(seed)
        assert torch.equal(torch.randn(4), expected)
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        seed_generators(seed)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_nothing_is_kept_for_devices_that_are_not_there():
    queues = torch.cuda._queued_calls, torch.xpu._queued_calls, torch.mtia._queued_calls
    before = [len(queue) for queue in queues]
    with torch.random.fork_rng(devices=[]):
        seed_generators(3)
    assert [len(queue) for queue in queues] == before


@pytest.mark.gpu
def test_cuda_is_seeded_too():
    with torch.random.fork_rng():
        torch.manual_seed(7)
        expected = torch.randn(4, device="cuda")
        seed_generators(7)
        assert torch.equal(torch.randn(4, device="cuda"), expected)
