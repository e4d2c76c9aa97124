"""Padding made countable, for kernels that take no mask: interpreted against float64, compiled, and on a card."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo.attention.masks import score_bias
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.kernels.exact import sdpa
from attn_zoo.kernels.exact.operators import OPERATORS, Operator
from attn_zoo.kernels.trace import recording
from tests.kernels.interpreter import IS_INTERPRETING, mend_interpreter
from tests.test_host_time import script

triton = pytest.importorskip("triton", reason="the package triton is not installed")

interpreted = [
    pytest.mark.triton,
    pytest.mark.skipif(not IS_INTERPRETING, reason="run by test_few_keys_gradient.py, in a process of its own"),
]


def forward(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, needs_grad: bool):
    assert needs_grad, "the log-sum-exp is wanted, whether a gradient is or not"
    assert all(bool(x.isfinite().all()) for x in (key, value)), "nothing that padding held may come here"
    output, lse = torch._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal)
    return output, lse.contiguous()


def backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, output: Tensor, lse: Tensor):
    of_query, *others = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, output, lse, dropout_p, False
    )
    return of_query, *others


ON_CPU = Operator(forward, backward)
"""Torch's kernel of a CPU as kernels of a GPU are given."""


def draw(
    query_len: int,
    key_len: int,
    head_dim: int = 64,
    *,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    shared_bias: float = 0.0,
    spread: float = 1.0,
    is_interleaved: bool = False,
    sequences: tuple[int, int] = (4, 2),
) -> list[Tensor]:
    """Return the gradient of the output, query, key and value; `shared_bias` is what all keys of a head have alike."""
    generator = torch.Generator().manual_seed(query_len + key_len)
    drawn = []
    for length, scale in ((query_len, 1.0), (query_len, spread), (key_len, 1.0), (key_len, 1.0)):
        drawn.append(torch.randn(*sequences, length, head_dim, generator=generator) * scale)
    drawn[2] += shared_bias * torch.randn(1, sequences[1], 1, head_dim, generator=generator)
    drawn = [x.to(dtype).to(device) for x in drawn]
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in drawn] if is_interleaved else drawn


def some_padding(key_len: int, device: str = "cpu", *, share: float = 0.5) -> Tensor:
    """Return a mask of four sequences: without padding, at its end, scattered, and nothing but padding."""
    mask = torch.zeros(4, key_len, dtype=torch.bool)
    mask[1, key_len - key_len // 3 :] = True
    mask[2] = torch.rand(key_len, generator=torch.Generator().manual_seed(5)) < share
    mask[3] = True
    return mask.to(device)


def much_padding(key_len: int, device: str = "cpu") -> Tensor:
    """Return the same with one key in ten where it is scattered."""
    return some_padding(key_len, device, share=0.9)


def nearly_all(key_len: int, device: str = "cpu") -> Tensor:
    """Return a mask of four sequences that leaves few keys: one, one, two at the ends, and a forty-fifth of all."""
    mask = torch.ones(4, key_len, dtype=torch.bool)
    mask[0, 0] = mask[1, -1] = mask[2, 0] = mask[2, -1] = False
    mask[3, ::45] = False
    return mask.to(device)


def with_gradients(attend: Any, grad: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    output = attend(*leaves)
    return (output.detach(), *torch.autograd.grad(output, leaves, grad.to(output.dtype)))


def truth(grad: Tensor, tensors: list[Tensor], mask: Tensor) -> tuple[Tensor, ...]:
    """Return output and gradients in float64."""
    clean = [tensors[0], *(x.masked_fill(mask[:, None, :, None], 0.0) for x in tensors[1:])]
    return with_gradients(
        lambda *x: softmax_attention(*x, is_causal=False, key_padding_mask=mask), grad, [x.double() for x in clean]
    )


def check(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float, *, is_alike: bool = True) -> None:
    """Compare the norm of each sequence's error with its own norm, or with the largest of any sequence."""
    for mine, right in zip(got, want, strict=True):
        error, norm = (x.flatten(1).norm(dim=1) for x in (mine.double() - right, right))
        assert (error <= tolerance * (norm if is_alike else norm.max())).all(), (error / norm).tolist()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return our module, where what is allocated is full of NaN: nothing may depend on memory that was not written."""
    from attn_zoo.kernels.exact import unmasked

    for kept in ("_made", "_finished", "_blanked"):
        monkeypatch.setattr(unmasked, kept, {})
    if IS_INTERPRETING:
        mend_interpreter(monkeypatch)
        monkeypatch.setattr(unmasked, "_PART", 128)  # so that few keys are several parts, of several steps
        monkeypatch.setattr(unmasked, "_SUM_NUMBERS", 1 << 12)
        torch.use_deterministic_algorithms(True)
        yield unmasked
        torch.use_deterministic_algorithms(False)
    else:
        yield unmasked


def attending(kernel: Any, mask: Tensor, operator: Operator = ON_CPU, dropout_p: float = 0.0) -> Any:
    return lambda *tensors: kernel.attend(*tensors, key_padding_mask=mask, operator=operator, dropout_p=dropout_p)


class TestInterpreted:
    """The interpreter cuts bfloat16 off instead of rounding it: that dtype is for the card."""

    pytestmark = interpreted

    @pytest.mark.parametrize("make_mask", [some_padding, much_padding, nearly_all])
    @pytest.mark.parametrize(
        ("query_len", "key_len", "head_dim"), [(100, 100, 64), (30, 300, 40), (1, 70, 128), (5, 300, 64)]
    )
    def test_equals_float64(self, kernel, make_mask, query_len, key_len, head_dim):
        grad, *tensors = draw(query_len, key_len, head_dim, sequences=(4, 1))
        mask = make_mask(key_len)
        got, want = with_gradients(attending(kernel, mask), grad, tensors), truth(grad, tensors, mask)
        check(got[:1], want[:1], 2e-3)
        check(got[1:], want[1:], 4e-3, is_alike=make_mask is not nearly_all)  # those of one key's scores are zero

    @pytest.mark.parametrize("options", [{"shared_bias": 5.0}, {"spread": 6.0}, {"is_interleaved": True}], ids=str)
    def test_what_keys_share_and_peaked_weights(self, kernel, options):
        grad, *tensors = draw(90, 130, **options)
        mask = some_padding(130)
        check(with_gradients(attending(kernel, mask), grad, tensors), truth(grad, tensors, mask), 4e-3)

    @pytest.mark.parametrize("length", [300.0, 30_000.0])
    def test_a_few_long_keys_take_no_digits_from_the_others(self, kernel, length):
        grad, *tensors = draw(60, 100)
        direction = torch.nn.functional.normalize(torch.randn(64, generator=torch.Generator().manual_seed(9)), dim=0)
        tensors[1][:, :, 5] = (length * direction).half()
        seen = (tensors[0].float() @ direction)[..., None]
        tensors[0] -= ((seen + 3.0) * direction).half()  # so that queries see the others
        mask = some_padding(100)
        check(with_gradients(attending(kernel, mask), grad, tensors), truth(grad, tensors, mask), 4e-3)

    def test_padding_may_hold_anything_and_gets_no_gradient(self, kernel):
        (grad, *tensors), mask, found = draw(40, 70), some_padding(70), []
        for garbage in (0.0, math.nan, math.inf):
            given = [tensors[0], *(x.masked_fill(mask[:, None, :, None], garbage) for x in tensors[1:])]
            found.append(with_gradients(attending(kernel, mask), grad, given))
        for each in found:
            assert all(torch.equal(x, y) for x, y in zip(each, found[0], strict=True))
            assert not any(x.masked_select(mask[:, None, :, None]).any() for x in each[2:])

    def test_what_is_given_stays_as_it_is(self, kernel):
        (grad, *tensors), mask = draw(40, 70), some_padding(70)
        before = [x.clone() for x in tensors]
        with_gradients(attending(kernel, mask), grad, tensors)
        assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))

    def test_a_forward_alone_gives_the_same(self, kernel):
        (grad, *tensors), mask = draw(40, 70), some_padding(70)
        output = attending(kernel, mask)(*tensors)
        assert not output.requires_grad
        assert torch.equal(output, with_gradients(attending(kernel, mask), grad, tensors)[0])

    def test_keys_that_are_the_values(self, kernel):
        grad, query, key, _ = draw(40, 70)
        mask = some_padding(70)
        attend, want = attending(kernel, mask), truth(grad, [query, key, key], mask)
        got = with_gradients(lambda q, k: attend(q, k, k), grad, [query, key])
        check(got, (*want[:2], want[2] + want[3]), 4e-3)

    def test_a_mask_that_all_sequences_share(self, kernel):
        grad, *tensors = draw(40, 70)
        mask = some_padding(70)[1:2].expand(4, -1)
        check(with_gradients(attending(kernel, mask), grad, tensors), truth(grad, tensors, mask), 4e-3)

    def test_exact_attention_takes_it(self, kernel, monkeypatch):
        monkeypatch.setattr(sdpa, "_remembered", {})
        monkeypatch.setattr(sdpa, "select", lambda *_: ("unmasked", None))
        monkeypatch.setattr(sdpa, "choose_without_mask", lambda _: "cudnn")
        monkeypatch.setitem(OPERATORS, "cudnn", ON_CPU)
        (grad, *tensors), mask = draw(40, 70), some_padding(70)
        spread = [torch.stack((x, x), -1)[..., 0] for x in tensors]  # whose features do not lie side by side
        with recording() as paths, script.Enqueued() as enqueued:
            got = with_gradients(
                lambda *x: sdpa.exact_attention(*x, score_bias=score_bias, key_padding_mask=mask), grad, spread
            )
        assert paths == ["unmasked.cudnn"]
        assert enqueued.launches == 4, "the mean, what stands for keys and values, the end of each pass"
        check(got, truth(grad, tensors, mask), 4e-3)

    def test_there_is_one_derivative(self, kernel):
        _, *tensors = draw(40, 70)
        leaves = [x.requires_grad_() for x in tensors]
        output = attending(kernel, some_padding(70))(*leaves)
        (gradient,) = torch.autograd.grad(output.sum(), leaves[0], create_graph=True)
        with pytest.raises(RuntimeError, match="expected one derivative"):
            gradient.sum().backward()


@pytest.mark.triton
@pytest.mark.skipif(IS_INTERPRETING, reason="nothing is compiled here")
@pytest.mark.parametrize("head_dim", [64, 128, 40])
def test_the_kernels_compile_for_hopper_without_spills(kernel, head_dim, tmp_path):
    from tests.kernels.blocks.test_triton_compiled import compiled, spilled_bytes

    block_d = triton.next_power_of_2(head_dim)
    sizes, parts = {"head_dim": head_dim, "block_d": block_d}, {"num_parts": 16}
    for each, more, num_warps in (
        (kernel.sum_kernel, {**parts, "block_k": kernel._SUM_NUMBERS // block_d}, 8),
        (kernel.centre_kernel, {**parts, "block_k": kernel._TILE}, 4),
        (kernel.finish_kernel, {**parts, "block_q": kernel._TILE, "block_k": kernel._TILE, "least_share": 0.01}, 4),
        (kernel.blank_kernel, {"block_k": kernel._TILE}, 4),
    ):
        built = compiled(each, "bf16", {**sizes, **more}, {"num_warps": num_warps})
        assert spilled_bytes(built, tmp_path) == 0, each.fn.__name__


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cudnn", "flash"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make_mask", [some_padding, much_padding, nearly_all])
def test_on_a_card(kernel, make_mask, dtype, name):
    tolerance = 1.5e-2 if dtype == torch.bfloat16 else 4e-3
    sizes: list[tuple[int, int, int, dict[str, Any]]] = [
        (1000, 1000, 64, {"shared_bias": 5.0, "is_interleaved": True}),
        (200, 3000, 128, {"spread": 4.0}),
        (100, 70, 40, {}),
    ]
    for query_len, key_len, head_dim, options in sizes:
        grad, *tensors = draw(query_len, key_len, head_dim, dtype=dtype, device="cuda", **options)
        mask = make_mask(key_len, "cuda")
        want = truth(grad, tensors, mask)
        tensors[1:] = [x.masked_fill(mask[:, None, :, None], math.nan) for x in tensors[1:]]
        got = with_gradients(attending(kernel, mask, OPERATORS[name]), grad, tensors)
        check(got, want, tolerance, is_alike=make_mask is not nearly_all)


@pytest.mark.gpu
def test_captured_as_a_graph(kernel):
    (grad, *tensors), mask = draw(1024, 1024, dtype=torch.bfloat16, device="cuda"), some_padding(1024, "cuda")
    attend = attending(kernel, mask, OPERATORS["cudnn"])
    want = with_gradients(attend, grad, tensors)  # compiles and plans
    leaves = [x.requires_grad_() for x in tensors]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(*leaves)
        got = (output, *torch.autograd.grad(output, leaves, grad))
    graph.replay()
    torch.cuda.synchronize()
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_dropout_drops_weights_of_the_keys_that_are_there(kernel):
    """With ones for values each row's result is the sum of what is left of its weights: one on average."""
    _, query, key, _ = draw(512, 2048, dtype=torch.bfloat16, device="cuda")
    mask, value = some_padding(2048, "cuda"), torch.ones_like(key)
    for p in (0.0, 0.25):
        rows = attending(kernel, mask, OPERATORS["cudnn"], p)(query, key, value)[:3].float().mean(-1)
        assert abs(float(rows.mean()) - 1) < 0.01
        assert (float(rows.std()) > 0.005) == (p > 0)
