"""What each pass times, with a clock that moves inside forward and backward; and that gradients start from None."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from attn_zoo.matrix.cell import workload
from attn_zoo.measure.passes import MOST_REPLAYED, grad_like, make_pass, num_unlike
from attn_zoo.measure.timing import Sampling
from tests.measure.fake_clock import FakeClock

FORWARD_MS, BACKWARD_MS = 10.0, 30.0


class Costly:
    """Doubles x; forward and backward move the clock and leave notes."""

    def __init__(self) -> None:
        self.clock = clock = FakeClock()
        self.notes: list[str] = []
        self.x = torch.ones(3, requires_grad=True)
        notes, x = self.notes, self.x

        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: Tensor) -> Tensor:
                clock.spend(FORWARD_MS)
                notes.append("forward with graph" if value.requires_grad and torch.is_grad_enabled() else "forward")
                return 2 * value

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                clock.spend(BACKWARD_MS)
                notes.append("backward" if x.grad is None else "backward onto an old gradient")
                assert torch.equal(grad, grad_like(grad))
                return 2 * grad

        self._double = Double

    def forward(self) -> Tensor:
        result: Tensor = self._double.apply(self.x)
        return result


@pytest.mark.parametrize(("pass_", "expected_ms"), [("infer", 10.0), ("fwd", 10.0), ("bwd", 30.0), ("fwd_bwd", 40.0)])
def test_each_pass_times_its_own_part(pass_, expected_ms):
    costly = Costly()
    call, setup = make_pass(costly.forward, [costly.x], pass_)
    timing = Sampling(call, setup=setup, budget_s=0.2, stopwatch=costly.clock.stopwatch()).run()
    assert timing.samples_ms == pytest.approx([expected_ms] * len(timing.samples_ms))
    assert timing.first_ms == pytest.approx(expected_ms)
    num_calls = timing.num_warmup + len(timing.samples_ms) * timing.inner_loops
    expected_notes = {
        "infer": {"forward": num_calls},
        "fwd": {"forward": num_calls},
        "bwd": {"forward": 1, "backward": num_calls},
        "fwd_bwd": {"forward": num_calls, "backward": num_calls},
    }[pass_]
    seen = [note.removesuffix(" with graph") for note in costly.notes]
    assert {note: seen.count(note) for note in seen} == expected_notes
    assert "backward onto an old gradient" not in costly.notes


def test_infer_builds_no_graph_and_the_others_do():
    x = torch.ones(2, requires_grad=True)
    for pass_, has_graph in (("infer", False), ("fwd", True), ("fwd_bwd", True)):
        call, _ = make_pass(lambda: x * x, [x], pass_)  # type: ignore[arg-type]
        output = call()
        assert isinstance(output, Tensor)
        assert output.requires_grad is has_graph
        assert not output.is_inference()  # what a module caches must stay usable for training


def test_gradients_are_cleared_between_calls_not_added():
    x = torch.ones(2, requires_grad=True)
    call, setup = make_pass(lambda: 3 * x, [x], "fwd_bwd")
    assert setup is not None
    for _ in range(3):
        setup()
        assert x.grad is None
        call()
        assert torch.equal(torch.as_tensor(x.grad), 3 * grad_like(x))


def test_a_gpu_has_calls_to_settle_where_it_may_replay_them():
    replay = pytest.importorskip("attn_zoo.kernels.replay", reason="replays need triton", exc_type=ImportError)
    assert replay.MOST_NUMBERS == MOST_REPLAYED
    assert num_unlike(torch.ones(3)) == 0
    counts = [num_unlike(Mock(is_cuda=True, numel=lambda size=size: size)) for size in (2**26, 2**26 + 1)]
    assert counts == [3, 0]


def test_calls_that_run_otherwise_are_settled_before_any_is_timed(monkeypatch):
    monkeypatch.setattr(workload, "num_unlike", lambda _: 2)
    said: list[str] = []
    work = Mock(inputs=[torch.ones(3)], make_call=lambda: (lambda: said.append("call"), lambda: said.append("setup")))
    workload.settle_calls(work)
    assert said == ["setup", "call"] * 2


def test_grad_like_is_the_same_noise_every_time():
    like = torch.zeros(1000, dtype=torch.bfloat16)
    noise = grad_like(like)
    assert torch.equal(noise, grad_like(like))
    assert noise.dtype == torch.bfloat16
    assert 0.9 < noise.float().std() < 1.1


def test_what_has_no_gradient_is_refused():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="at least one that requires"):
        make_pass(lambda: x, [torch.ones(2)], "bwd")
    with pytest.raises(ValueError, match="cut off"):
        make_pass(lambda: x.detach() * 2, [x], "fwd")[0]()
    with pytest.raises(ValueError, match="not results"):
        make_pass(lambda: x, [x * 2], "fwd")
    with pytest.raises(ValueError, match="expected one of infer, fwd, bwd, fwd_bwd; got 'backward'"):
        make_pass(lambda: x, [x], "backward")  # type: ignore[arg-type]
    assert torch.equal(make_pass(lambda: torch.ones(2), [torch.ones(2)], "infer")[0](), torch.ones(2))
