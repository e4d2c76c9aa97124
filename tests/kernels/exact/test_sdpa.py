"""The dispatcher of exact attention: which kernel runs, what is refused, chunking, memory."""

from __future__ import annotations

import itertools
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attn_zoo import UnsupportedError
from attn_zoo.attention.masks import alibi_slopes, causal_keep, score_bias
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.kernels.exact import backends, flex_attention, row_chunks, sdpa, varlen, xformers
from attn_zoo.kernels.exact.backends import PREFERENCES, ExactCall, choose, why_not
from attn_zoo.kernels.exact.operators import OPERATORS
from attn_zoo.kernels.exact.sdpa import exact_attention
from attn_zoo.kernels.trace import recording
from tests.exactness import assert_exact

H, D = 2, 16


def draw(query_len, key_len=None, *, dtype=torch.float32, num_kv_heads=H, device="cpu", grad=True):
    generator = torch.Generator().manual_seed(1)
    lengths = (query_len, key_len or query_len, key_len or query_len)
    return tuple(
        torch.randn(2, h, n, D, generator=generator).to(device=device, dtype=dtype).requires_grad_(grad)
        for h, n in zip((H, num_kv_heads, num_kv_heads), lengths, strict=True)
    )


def half_padded(key_len, device="cpu"):
    mask = torch.zeros(2, key_len, dtype=torch.bool, device=device)
    mask[1, key_len // 2 :] = True
    return mask


def attend(query, key, value, *, is_causal=False, key_padding_mask=None, alibi=False, **options):
    slopes = alibi_slopes(H, query.device) if alibi else None
    said = {"is_causal": is_causal, "key_padding_mask": key_padding_mask, "slopes": slopes}
    return exact_attention(query, key, value, score_bias=score_bias, **said, **options)


def oracle(query, key, value, *, is_causal=False, key_padding_mask=None, alibi=False):
    slopes = alibi_slopes(H, query.device, torch.float64) if alibi else None
    lengths = query.shape[2], key.shape[2]
    bias = score_bias(range(lengths[0]), *lengths, slopes=slopes, dtype=torch.float64, device=query.device)
    return softmax_attention(query, key, value, is_causal=is_causal, key_padding_mask=key_padding_mask, bias=bias)


def call(**changes):
    query, key, value = draw(8)
    plain = ExactCall(
        query=query,
        key=key,
        value=value,
        is_causal=False,
        key_padding_mask=None,
        slopes=None,
        dropout_p=0.0,
        score_bias=score_bias,
    )
    return plain._replace(**changes)


# --- the rule ---


def test_the_table_is_complete_and_has_sources():
    for row in PREFERENCES:
        assert row.source
        assert row.order[-1] == "math", "the dense path serves everything, so every search must end there"
    assert {row.device for row in PREFERENCES} == {"cpu", "cuda"}


def cuda_tensor(length, num_heads=H):
    """Return what the rule looks at of a tensor on a GPU."""
    like = {"device": torch.device("cuda"), "is_cuda": True, "dtype": torch.bfloat16, "requires_grad": False}
    return SimpleNamespace(shape=(2, num_heads, length, D), numel=lambda: length, **like)


def test_cudnn_has_dropout_in_sixteenths_only(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(backends, "_gate", lambda *_: None)
    tensor = cuda_tensor(4096)
    taken = {p: choose(call(query=tensor, key=tensor, value=tensor, dropout_p=p)) for p in (0.0, 0.1, 0.125, 0.5, 0.9)}
    assert taken == {0.0: "cudnn", 0.1: "flash", 0.125: "cudnn", 0.5: "cudnn", 0.9: "flash"}
    tenth = call(query=tensor, key=tensor, value=tensor, dropout_p=0.1)
    assert "multiples of 1/16, and this one is 0.1" in str(backends.why_not("cudnn", tenth))


def test_a_compiler_asks_about_a_rate_of_the_same_kind(monkeypatch):
    asked, select = [], backends.select

    def asking(backend, of_kind, **more):
        asked.append(of_kind.dropout_p)
        return select(backend, of_kind, **more)

    monkeypatch.setattr(backends, "select", asking)
    compiled = torch.compile(lambda x, p: attend(x, x, x, dropout_p=p), backend="eager", fullgraph=True)
    for rate, kind in ((0.1, 0.1), (0.2, 0.1), (0.25, 0.5), (0.0, 0.0)):
        compiled(draw(4)[0], rate)
        assert asked[-1] == kind


@pytest.mark.parametrize("served", [True, False])
def test_on_a_gpu_padding_is_counted_or_packed_where_it_can_be(monkeypatch, served):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(backends, "_HAS_TRITON", True)
    monkeypatch.setattr(varlen, "why_not", lambda *_, **__: None if served else "not here")
    for name in ("cudnn", "flash", "efficient"):
        monkeypatch.setitem(backends._WHY_NOT, name, lambda _: None)

    long, few = cuda_tensor(8192), cuda_tensor(4096)
    packed = "varlen" if served else "cudnn"
    plain = call(query=long, key=long, value=long)
    padded = plain._replace(key_padding_mask=half_padded(8192))
    grouped = padded._replace(key=cuda_tensor(8192, 1), value=cuda_tensor(8192, 1))
    assert choose(padded) == "unmasked"
    assert choose(grouped) == packed
    assert choose(padded._replace(is_causal=True)) == "efficient"
    assert choose(plain) == "cudnn"
    assert choose(plain._replace(query=cuda_tensor(1))) == "flash", "cuDNN would plan for every token"
    assert choose(plain._replace(query=few, is_causal=True)) == ("varlen" if served else "efficient")
    short = padded._replace(query=few, key=few, value=few, key_padding_mask=half_padded(4096))
    small = short._replace(query=cuda_tensor(64))
    assert choose(short) == "unmasked"
    assert choose(small) == "efficient", "packing, or a plan of cuDNN, would take longer than it saves"
    assert choose(small._replace(key_padding_mask=None)) == "cudnn", "which torch takes there too"
    assert choose(short._replace(query=cuda_tensor(64)), is_compiled=True) == packed
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)
    assert choose(grouped) == "cudnn", "who switches flash off gets none"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert choose(padded) == "efficient", "a mask makes cuDNN slow there"
    assert choose(plain) == choose(plain._replace(query=cuda_tensor(1))) == "flash"


@pytest.mark.parametrize("name", ["efficient", "cudnn"])
def test_cuda_kernels_are_refused_on_cpu(name):
    with pytest.raises(UnsupportedError, match=f"'{name}' cannot serve this call: it runs on CUDA devices only") as got:
        attend(*draw(4), backend=name)
    assert got.value.capability == "backend"


def test_flash_on_cpu_is_refused_with_dropout_and_chosen_without():
    assert choose(call()) == "flash"
    assert choose(call(dropout_p=0.5)) == "math"
    with pytest.raises(UnsupportedError, match="no dropout"):
        attend(*draw(4), backend="flash", dropout_p=0.1)


def test_xformers_is_tried_on_the_device_it_is_wanted_on(capfd):
    reason = xformers.why_not(draw(4)[0], needs_grad=False)
    assert reason is not None
    assert "xformers" in reason
    assert "\n" not in reason
    with pytest.raises(UnsupportedError, match="xformers"):
        attend(*draw(4), backend="xformers")
    with pytest.raises(UnsupportedError, match="without key_padding_mask"):
        attend(*draw(4), key_padding_mask=half_padded(4), backend="xformers")
    assert "xFormers" not in capfd.readouterr().err, "the package's warnings must not reach the user"


def test_a_missing_xformers_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "xformers.ops", None)
    xformers._probe.cache_clear()
    assert "attn-zoo[xformers]" in str(xformers.why_not(draw(4)[0], needs_grad=False))
    xformers._probe.cache_clear()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("1 / 0", "cannot be imported (ZeroDivisionError: division by zero)"),
        ("raise OSError('libcudart.so.12: no such file')", "cannot be imported (OSError: libcudart.so.12"),
        ("", "has no memory_efficient_attention"),
        ("def memory_efficient_attention(*_): raise TypeError('unexpected')", "failed on cpu"),
    ],
    ids=["raises", "library missing", "hollow", "refuses oddly"],
)
def test_a_half_broken_xformers_is_a_reason(content, words, tmp_path, monkeypatch):
    (tmp_path / "xformers").mkdir()
    (tmp_path / "xformers" / "__init__.py").touch()
    (tmp_path / "xformers" / "ops.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("xformers", "xformers.ops"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    xformers._probe.cache_clear()
    assert words in str(xformers.why_not(draw(4)[0], needs_grad=False))
    xformers._probe.cache_clear()
    for name in ("xformers", "xformers.ops"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"dropout_p": 0.1}, "no dropout"), ({}, "no backward"), ({"query": draw(8, dtype=torch.float64)[0]}, "float64")],
)
def test_flex_on_cpu_refuses(changes, reason):
    assert reason in str(why_not("flex", call(**changes)))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ["sdpa.flash"]),
        ({"is_causal": True}, ["sdpa.flash"]),
        ({"key_padding_mask": half_padded(40)}, ["sdpa.flash"]),
        ({"is_causal": True, "key_padding_mask": half_padded(40)}, ["sdpa.flash"]),
        ({"alibi": True}, ["chunked", "sdpa.flash"]),
        ({"dropout_p": 0.1}, ["dropout.dense", "chunked"]),
        ({"backend": "math"}, ["sdpa.math"]),
        ({"backend": "math", "alibi": True}, ["sdpa.math"]),
    ],
)
def test_the_path_that_runs_is_noted(monkeypatch, arguments, expected):
    monkeypatch.setattr(row_chunks, "CHUNK_SCORES", 1)
    with recording() as paths:
        attend(*draw(40), **arguments)
    assert paths == expected


# --- once for each signature ---


@pytest.fixture
def selections(monkeypatch):
    """Forget what is remembered, and list what is selected from now on."""
    monkeypatch.setattr(sdpa, "_remembered", {})
    made = []

    def select(backend, call):
        made.append(backend)
        return backends.select(backend, call)

    monkeypatch.setattr(sdpa, "select", select)
    return made


def test_a_kernel_is_selected_once_for_each_signature(selections):
    tensors = draw(8)
    for _ in range(3):
        attend(*tensors)
        attend(*draw(8))  # other tensors, same signature
    assert selections == ["auto"]


@pytest.mark.parametrize(
    "other",
    [
        lambda: attend(*draw(9)),
        lambda: attend(*draw(8, 9)),
        lambda: attend(*draw(8, num_kv_heads=1)),
        lambda: attend(*draw(8, dtype=torch.float64)),
        lambda: attend(*draw(8, grad=False)),
        lambda: attend(*draw(8), is_causal=True),
        lambda: attend(*draw(8), key_padding_mask=half_padded(8)),
        lambda: attend(*draw(8), alibi=True),
        lambda: attend(*draw(8), dropout_p=0.5),
        lambda: attend(*draw(8), backend="math"),
    ],
)
def test_whatever_may_decide_the_kernel_is_in_the_signature(selections, other):
    attend(*draw(8))
    other()
    assert len(selections) == 2


def test_a_refusal_is_not_remembered_as_an_answer(selections):
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="'cudnn' cannot serve"):
            attend(*draw(8), backend="cudnn")
    assert selections == ["cudnn", "cudnn"]


def test_few_signatures_are_remembered(selections, monkeypatch):
    monkeypatch.setattr(sdpa, "MAX_SIGNATURES", 4)
    for length in range(1, 20):
        attend(*draw(length))
        assert len(sdpa._remembered) <= 4
    assert len(selections) == 19


@pytest.mark.parametrize("backend", ["auto", "math", "flash", "efficient", "varlen", "flex", "xformers"])
def test_the_compilers_probe_is_answered_as_the_call(backend):
    for changes in (
        {},
        {"is_causal": True},
        {"key_padding_mask": half_padded(8)},
        {"slopes": alibi_slopes(H)},
        {"dropout_p": 0.1},
        dict(zip(("query", "key", "value"), draw(8, dtype=torch.float64, grad=False), strict=True)),
        dict(zip(("query", "key", "value"), draw(8, 9, num_kv_heads=1), strict=True)) | {"is_causal": True},
    ):
        given = call(**changes)
        assert backends.select_while_compiling(backend, given) == backends.select(backend, given)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"is_causal": True}, {"has_padding": True}, {"alibi": True}, {"backend": "math"}, {"dropout_p": 0.25}],
    ids=str,
)
def test_a_graph_serves_several_lengths(arguments):
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    given = {name: value for name, value in arguments.items() if name != "has_padding"}
    try:
        for length in (9, 11):
            tensors = draw(length, grad=False, num_kv_heads=1)
            mask = half_padded(length) if "has_padding" in arguments else None
            outputs = []
            for function in (compiled, attend):
                torch.manual_seed(0)
                outputs.append(function(*tensors, key_padding_mask=mask, **given))
            torch.testing.assert_close(*outputs)
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_compiler_takes_the_choice_for_a_constant(monkeypatch, dynamic):
    """Torch's own checks cannot be traced on every release: a graph would break there, and here it may not."""
    asked = []

    def why_not(call):
        torch._dynamo.graph_break()
        asked.append(call.query.shape)

    monkeypatch.setitem(backends._WHY_NOT, "flash", why_not)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    try:
        for length in (9, 11):
            tensors = draw(length, grad=False)
            torch.testing.assert_close(compiled(*tensors, is_causal=True), attend(*tensors, is_causal=True))
    finally:
        torch.compiler.reset()
    assert asked
    assert all(shape[2] == 128 for shape in asked if shape[0] == 1), "a probe stands for all lengths"


def test_torchs_checks_are_asked_in_silence():
    """Asked for their reasons they print them, at every step of a training."""
    asked = []

    def can_use(params, debug):
        asked.append((params.enable_gqa, debug))
        return False

    grouped = dict(zip(("query", "key", "value"), draw(8, num_kv_heads=1), strict=True))
    for name in ("cudnn", "efficient"):
        assert name in str(backends._gate(call(**grouped), name, can_use))
    assert asked == [(True, False), (False, False)]


def test_a_refusal_carries_torchs_own_reason(capfd):
    assert "dropout" in str(backends.torch_reason(call(dropout_p=0.5), "flash"))
    assert backends.torch_reason(call(), "flash") is None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_autocast_means_what_it_means_for_torchs_own_function(backend):
    tensors = draw(40)
    for arguments in ({}, {"is_causal": True}, {"key_padding_mask": half_padded(40), "is_causal": True}):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = attend(*tensors, backend=backend, **arguments)
            theirs = torch.nn.functional.scaled_dot_product_attention(*tensors)
            exact = attend(*draw(40, dtype=torch.float64), backend=backend, **arguments)
        assert output.dtype == theirs.dtype == torch.bfloat16
        assert exact.dtype == torch.float64
        torch.testing.assert_close(output.double(), oracle(*tensors, **arguments), rtol=0.02, atol=0.02)


def test_math_is_really_dense_and_flash_is_not():
    """The autograd graph holds what the kernel saved: dense weights [B, H, L, S], or only one number for each row."""
    sizes = {}
    for backend in ("math", "flash"):
        saved: list[int] = []

        def note(tensor, saved=saved):
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            attend(*draw(64), backend=backend)
        sizes[backend] = max(saved)
    assert sizes == {"math": 2 * H * 64 * 64, "flash": 2 * H * 64 * D}


# --- kernels of CUDA devices are run by code that a CPU can run too ---


@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "torch_choice"])
@pytest.mark.parametrize("num_kv_heads", [H, 1])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"is_causal": True},
        {"key_padding_mask": half_padded(24)},
        {"is_causal": True, "key_padding_mask": half_padded(24).flip(1)},  # whose first rows see nothing
        {"is_causal": True, "slopes": alibi_slopes(H)},
    ],
)
def test_kernels_that_take_no_flags_for_it_are_given_a_bias(is_pinned, num_kv_heads, arguments):
    tensors = draw(24, num_kv_heads=num_kv_heads)
    given = call(**dict(zip(("query", "key", "value"), tensors, strict=True)), **arguments)
    chosen = partial(sdpa._torch_choice, "sdpa.flash", given.is_grouped)
    with recording() as paths:
        output = sdpa._with_kernel(partial(sdpa._pinned, "flash") if is_pinned else chosen, given)(given)
    assert paths == ["sdpa.flash"]
    names = {
        "is_causal": given.is_causal,
        "key_padding_mask": given.key_padding_mask,
        "alibi": given.slopes is not None,
    }
    plain, exact = attend(*tensors, backend="math", **names), oracle(*tensors, **names)
    assert_exact(output, plain, exact)
    grads = [torch.autograd.grad(x.sum(), tensors) for x in (output, plain, exact)]
    for actual, roughly, true in zip(*grads, strict=True):
        assert_exact(actual, roughly, true, what="gradient")


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_kernel_may_be_run_by_its_operator(is_causal, monkeypatch):
    cpu = torch._scaled_dot_product_flash_attention_for_cpu
    operator = OPERATORS["flash"]._replace(forward=lambda q, k, v, p, causal, _: cpu(q, k, v, p, causal))
    monkeypatch.setitem(OPERATORS, "flash", operator)
    given = call(is_causal=is_causal)
    for enabled, expected in ((False, torch.float32), (True, torch.bfloat16)):
        with recording() as paths, torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            output = sdpa._with_kernel(partial(sdpa._operator, "flash"), given)(given)
        assert paths == ["sdpa.flash"]
        assert output.dtype == expected
        tolerance = 0.02 if enabled else 1e-5
        want = oracle(given.query, given.key, given.value, is_causal=is_causal)
        torch.testing.assert_close(output.double(), want, rtol=tolerance, atol=tolerance)


def test_an_operator_is_run_where_it_takes_the_call_as_it_is(monkeypatch):
    monkeypatch.setattr(sdpa, "_is_torchs_choice", lambda *_: False)
    cuda = [x.to("meta").requires_grad_() for x in draw(8)]
    narrow = [x[..., :4] for x in cuda]
    padding = half_padded(8, device="meta")

    def kernel(query, key, value, **changes):
        found = sdpa._kernel_of("flash", call(query=query, key=key, value=value, **changes))
        assert isinstance(found, partial)
        return found.func

    assert kernel(*cuda) is sdpa._operator
    assert kernel(*cuda, is_causal=True) is sdpa._operator
    assert kernel(*narrow) is sdpa._pinned
    assert kernel(cuda[0], *(x[:, :1] for x in cuda[1:])) is sdpa._pinned
    assert kernel(*cuda, key_padding_mask=padding) is sdpa._pinned


def test_torchs_own_choice_is_recognised():
    assert sdpa._is_torchs_choice("flash", call())
    assert sdpa._is_torchs_choice("flash", call(key_padding_mask=half_padded(8)))
    assert not sdpa._is_torchs_choice("math", call())
    assert sdpa._is_torchs_choice("math", call(dropout_p=0.5))
    assert not sdpa._is_torchs_choice("flash", call(slopes=alibi_slopes(H))), "its bias is made for some rows at a time"
    strided = draw(8)[0].detach().mT.contiguous().mT
    assert not sdpa._is_torchs_choice("flash", call(query=strided)), "it is copied first"


def test_switches_of_cuda_are_part_of_the_signature():
    plain = sdpa.cuda_switches()
    hash(plain)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert sdpa.cuda_switches() != plain
    torch.use_deterministic_algorithms(True)
    try:
        assert sdpa.cuda_switches() != plain
    finally:
        torch.use_deterministic_algorithms(False)
    assert sdpa.cuda_switches() == plain


# --- chunks ---


@pytest.mark.parametrize("num_kv_heads", [H, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("key_len", "arguments"),
    [
        (53, {"is_causal": True, "alibi": True}),
        (53, {"alibi": True, "key_padding_mask": half_padded(53)}),
        (70, {"is_causal": True}),
        (70, {"is_causal": True, "key_padding_mask": half_padded(70)}),
    ],
)
def test_chunks_equal_the_oracle(monkeypatch, key_len, arguments, dtype, num_kv_heads):
    tensors = draw(53, key_len, dtype=dtype, num_kv_heads=num_kv_heads)
    at_once = attend(*tensors, **arguments)
    monkeypatch.setattr(row_chunks, "CHUNK_SCORES", 1)  # chunks of the least length
    with recording() as paths:
        in_chunks = attend(*tensors, **arguments)
    assert "chunked" in paths
    plain = attend(*tensors, **arguments, backend="math")
    exact = oracle(*tensors, **arguments)
    assert_exact(in_chunks, plain, exact)
    direction = torch.randn(exact.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    grads = [
        torch.autograd.grad(output, tensors, direction.to(output.dtype))
        for output in (in_chunks, at_once, plain, exact)
    ]
    for name, actual, whole, roughly, true in zip("qkv", *grads, strict=True):
        assert_exact(actual, roughly, true, what=f"gradient of {name}, in chunks")
        assert_exact(whole, roughly, true, what=f"gradient of {name}, at once")


def test_a_chunk_draws_the_same_dropout_in_backward(monkeypatch):
    monkeypatch.setattr(row_chunks, "CHUNK_SCORES", 1)
    tensors = draw(40, dtype=torch.float64)

    def run(*tensors):
        torch.manual_seed(5)
        return attend(*tensors, is_causal=True, dropout_p=0.3)

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


def test_chunks_of_rows_drop_different_weights(monkeypatch):
    monkeypatch.setattr(row_chunks, "CHUNK_SCORES", 1)
    uniform = torch.zeros(1, H, 64, 64)
    weights = attend(uniform, uniform, torch.eye(64).expand(1, H, 64, 64), dropout_p=0.5)
    first, second = (weights[:, :, at : at + row_chunks.MIN_CHUNK_LEN] for at in (0, row_chunks.MIN_CHUNK_LEN))
    assert not torch.equal(first, second)
    assert 0.4 < (weights == 0).float().mean() < 0.6


def test_chunks_under_autocast_compute_alike_in_both_directions(monkeypatch):
    monkeypatch.setattr(row_chunks, "CHUNK_SCORES", 1)
    tensors = draw(40)
    results = []
    for is_on in (False, True):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            output = attend(*tensors, dropout_p=0.2)
        results.append((output, *torch.autograd.grad(output.float().sum(), tensors)))
    for without, within in zip(*results, strict=True):
        torch.testing.assert_close(within.to(without.dtype), without)


def test_tensors_without_consecutive_features_are_served():
    query, key, value = (x.detach().transpose(-1, -2).contiguous().transpose(-1, -2) for x in draw(9))
    assert query.stride(-1) != 1
    for arguments in ({}, {"is_causal": True, "key_padding_mask": half_padded(9)}):
        output = attend(query, key, value, backend="flash", **arguments)
        torch.testing.assert_close(output.double(), oracle(query, key, value, **arguments), rtol=1e-5, atol=1e-6)


def test_fused_kernels_get_rows_of_stride_one_even_of_a_single_number():
    single = torch.randn(1, 1, 1, 2)[..., ::2]
    assert single.stride(-1) == 2
    assert [x.stride(-1) for x in sdpa._contiguous_rows(single, single, single)] == [1, 1, 1]
    torch.testing.assert_close(attend(single, single, single, backend="flash"), single.contiguous())


def empty_batch_gives_an_empty_result(backend, device):
    query, key, value = (x[:0].detach().requires_grad_() for x in draw(9, 12, device=device))
    mask = half_padded(12, device)[:0]
    for arguments in ({}, {"is_causal": True}, {"key_padding_mask": mask}, {"alibi": True, "key_padding_mask": mask}):
        output = attend(query, key, value, backend=backend, **arguments)
        assert output.shape == query.shape
        assert [x.shape[0] for x in torch.autograd.grad(output.sum(), (query, key, value))] == [0, 0, 0]


@pytest.mark.parametrize("backend", ["auto", "flash", "math"])
def test_an_empty_batch_gives_an_empty_result(backend):
    empty_batch_gives_an_empty_result(backend, "cpu")
    dropped = attend(*(x[:0] for x in draw(9)), dropout_p=0.5)
    assert dropped.shape == (0, H, 9, D)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "math"])
def test_an_empty_batch_gives_an_empty_result_on_the_gpu(backend):
    empty_batch_gives_an_empty_result(backend, "cuda")


def unused_queries_get_no_gradient(backend, dtype, device):
    """Rows whose output is not used, such as padded queries, get exact zeros: a check asks it of every variant."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, 7 if i == 0 else 256, 4, 64, generator=generator) for i in range(3)]
    query, key, value = (x.to(device, dtype).requires_grad_() for x in drawn)
    output = attend(*(x.transpose(1, 2) for x in (query, key, value)), backend=backend)
    is_unused = torch.tensor([[1, 0, 0, 0, 0, 0, 0], [1, 0, 1, 0, 0, 1, 0]], dtype=torch.bool, device=device)
    (grad,) = torch.autograd.grad(output.masked_fill(is_unused[:, None, :, None], 0.0).float().square().sum(), query)
    assert not grad[is_unused].any()
    assert grad[~is_unused].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["flash", "math"])
def test_unused_queries_get_no_gradient(backend, dtype):
    unused_queries_get_no_gradient(backend, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["math", "flash", "efficient", "cudnn"])
def test_unused_queries_get_no_gradient_on_the_gpu(backend, dtype):
    unused_queries_get_no_gradient(backend, dtype, "cuda")


# --- memory ---


def peak_bytes(function):
    """Return how far the resident memory of this process rose above its state before the call."""

    def kilobytes(field):
        return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0])

    Path("/proc/self/clear_refs").write_text("5")  # resets the high water mark
    before = kilobytes("VmRSS")
    function()
    return (kilobytes("VmHWM") - before) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high water mark is read from Linux /proc")
@pytest.mark.parametrize(
    ("key_len", "arguments"),
    [
        (3072, {"key_padding_mask": half_padded(3072)}),
        (3072, {"is_causal": True, "key_padding_mask": half_padded(3072)}),
        (3200, {"is_causal": True}),
        (3072, {"is_causal": True, "alibi": True}),
        (3072, {"dropout_p": 0.1}),
        (3072, {"dropout_p": 0.1, "is_causal": True}),
    ],
)
def test_no_path_of_auto_stores_the_scores(monkeypatch, key_len, arguments):
    """Dense weights alone would take 2 * H * L * S * 4 bytes = 151 MB, and training with them three times that."""
    monkeypatch.setattr(row_chunks, "CHUNK_SCORES", 1 << 17)
    tensors = draw(3072, key_len)
    attend(*(x[:, :, :64] for x in tensors), is_causal=True).sum().backward()  # start threads and libraries
    grown = peak_bytes(lambda: attend(*tensors, **arguments).sum().backward())
    assert grown < 2 * H * 3072 * key_len * 4 / 3


# --- FlexAttention ---


@pytest.mark.parametrize(
    ("query_len", "key_len"),
    [(1, 1), (128, 128), (130, 130), (300, 300), (200, 333), (256, 1000), (100, 300), (255, 256)],
)
def test_block_lists_say_what_the_causal_mask_says(query_len, key_len):
    partial_blocks, full_blocks = flex_attention.causal_blocks(query_len, key_len)
    assert flex_attention.has_full_blocks(query_len, key_len) == bool(full_blocks.any())
    keep = causal_keep(query_len, key_len)
    size = flex_attention.BLOCK_SIZE
    for row, column in torch.cartesian_prod(*(torch.arange(n) for n in full_blocks.shape)).tolist():
        block = keep[row * size : (row + 1) * size, column * size : (column + 1) * size]
        is_whole = tuple(block.shape) == (size, size)
        assert bool(full_blocks[row, column]) == (is_whole and bool(block.all()))
        assert bool(partial_blocks[row, column]) == (bool(block.any()) and not bool(full_blocks[row, column]))


@pytest.mark.slow
def test_compiled_flex_equals_the_oracle_on_cpu():
    cases = [
        (200, 200, {}),  # each takes seconds to compile: what is hidden and what is added are written apart
        (200, 300, {"is_causal": True, "key_padding_mask": half_padded(300)}),
        (200, 200, {"is_causal": True, "alibi": True}),
    ]
    with torch.no_grad():
        for query_len, key_len, arguments in cases:
            tensors = draw(query_len, key_len, num_kv_heads=1)
            with recording() as paths:
                output = attend(*tensors, backend="flex", **arguments)
            assert paths == ["flex"]
            assert_exact(output, attend(*tensors, backend="math", **arguments), oracle(*tensors, **arguments))
    with pytest.raises(UnsupportedError, match="no backward"):
        attend(*draw(200), backend="flex")


# --- what padding holds ---


def given_to_a_kernel(key, value, query=None):
    query = torch.randn(1, 2, 4, 8, dtype=key.dtype) if query is None else query
    padding = torch.tensor([[False] * (key.shape[2] - 1) + [True]])
    seen = []

    def kernel(given):
        seen.append(given)
        return given.query

    sdpa._harmless(kernel, call(query=query, key=key, value=value, key_padding_mask=padding))
    return seen[0].key, seen[0].value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_ordinary_padding_is_not_copied(dtype):
    key, value = torch.randn(2, 1, 2, 4, 8, dtype=dtype).unbind()
    assert given_to_a_kernel(key, value) == (key, value)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e20])
@pytest.mark.parametrize("which", [0, 1])
def test_padding_that_could_do_harm_is_zeroed(which, garbage):
    # 1e20 is finite, but its square is not: a score could overflow, and minus infinity added to infinity is NaN.
    spoilt = torch.randn(2, 1, 2, 4, 8)
    spoilt[which][:, :, 3:] = garbage
    for heads, before in zip(given_to_a_kernel(*spoilt.unbind()), spoilt, strict=True):
        assert not heads[:, :, 3:].any()
        assert torch.equal(heads[:, :, :3], before[:, :, :3])


def test_large_queries_and_keys_together_could_do_harm():
    query, key, value = torch.full((1, 1, 1, 4), 1e19), torch.full((1, 1, 2, 4), 1e19), torch.zeros(1, 1, 2, 4)
    assert not given_to_a_kernel(key, value, query)[0][:, :, 1].any()


def test_keys_that_are_the_values_are_blanked_once():
    both = torch.randn(1, 2, 4, 8)
    both[:, :, 3:] = float("nan")
    key, value = given_to_a_kernel(both, both)
    assert key is value


@pytest.mark.parametrize(
    ("backend", "arguments"),
    [
        *itertools.product(("math", "flash"), ({}, {"is_causal": True})),
        *itertools.product(("auto", "math"), ({"dropout_p": 0.25}, {"dropout_p": 0.25, "is_causal": True})),
    ],
    ids=str,
)
def test_what_padding_holds_reaches_neither_output_nor_gradients(backend, arguments):
    mask, found = half_padded(8), []
    for garbage in (0.0, float("nan")):
        tensors = [x.detach().clone() for x in draw(8)]
        for x in tensors[1:]:
            x.masked_fill_(mask[:, None, :, None], garbage)
        tensors = [x.requires_grad_() for x in tensors]
        torch.manual_seed(0)
        output = attend(*tensors, key_padding_mask=mask, backend=backend, **arguments)
        found.append((output, *torch.autograd.grad(output.square().sum(), tensors)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(("key_len", "alibi"), [(40, True), (48, False)])
def test_large_padding_reaches_no_gradient_where_rows_see_nothing_else(key_len, alibi):
    # Backward computes exp(score - log-sum-exp) again: of scores of 1e10, rounding leaves too much for that.
    mask, found = half_padded(key_len).flip(1), []  # whose first rows see nothing
    flags = {"is_causal": True, "key_padding_mask": mask, "alibi": alibi}
    for garbage in (0.0, 1e10):
        tensors = [x[..., :8].detach().clone() for x in draw(40, key_len)]  # of 16 features, forward and backward agree
        for x in tensors[1:]:
            x.masked_fill_(mask[:, None, :, None], garbage)
        tensors = [x.requires_grad_() for x in tensors]
        found.append(torch.autograd.grad(attend(*tensors, **flags).square().sum(), tensors))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# --- GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize(
    "backend", ["auto", "math", "flash", "efficient", "cudnn", "unmasked", "varlen", "flex", "xformers"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_kernels_on_gpu_equal_the_oracle_or_refuse(backend, dtype):
    served = 0
    for key_len in (256, 320):
        for arguments in (
            {},
            {"is_causal": True},
            {"key_padding_mask": half_padded(key_len, "cuda")},
            {"is_causal": True, "key_padding_mask": half_padded(key_len, "cuda")},
            {"is_causal": True, "alibi": True},
        ):
            for num_kv_heads in (H, 1):
                tensors = draw(256, key_len, dtype=dtype, device="cuda", num_kv_heads=num_kv_heads)
                try:
                    with recording() as paths:
                        output = attend(*tensors, backend=backend, **arguments)
                except UnsupportedError:
                    if backend in ("auto", "math"):  # these serve everything
                        raise
                    continue
                served += 1
                is_masked = "key_padding_mask" in arguments
                wanted = "cudnn" if backend == "unmasked" and not is_masked else backend  # without padding, as it is
                assert backend == "auto" or any(wanted in path for path in paths)
                plain, exact = attend(*tensors, backend="math", **arguments), oracle(*tensors, **arguments)
                assert_exact(output, plain, exact, what=f"{backend} {arguments}")
                grads = [torch.autograd.grad(x.sum(), tensors) for x in (output, plain, exact)]
                for actual, roughly, true in zip(*grads, strict=True):
                    assert_exact(actual, roughly, true, what=f"{backend} {arguments}: gradient")
    assert served or backend not in ("auto", "math")


@pytest.mark.gpu
def test_auto_on_gpu_takes_a_fused_kernel_in_half_precision():
    tensors = draw(256, dtype=torch.bfloat16, device="cuda")
    for arguments in ({}, {"is_causal": True}, {"dropout_p": 0.125}, {"key_padding_mask": half_padded(256, "cuda")}):
        with recording() as paths:
            attend(*tensors, **arguments).sum().backward()
        assert paths[0] in {"sdpa.cudnn", "sdpa.flash", "sdpa.efficient"}
    tensors = draw(6144, dtype=torch.bfloat16, device="cuda")
    with recording() as paths:
        attend(*tensors, key_padding_mask=half_padded(6144, "cuda")).sum().backward()
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    assert paths == ["unmasked.cudnn" if is_hopper else "varlen.flash"], "there is enough to compute for it to pay"


def test_every_backend_has_its_check():
    named = set(backends.Backend.__args__) - {"auto"}  # type: ignore[attr-defined]
    assert set(backends._WHY_NOT) == named


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_that_autocast_would_make_infinite_does_no_harm(is_causal):
    query, key, value = draw(40)
    mask = half_padded(40)
    spoilt = [x.detach().masked_fill(mask[:, None, :, None], 1e6).requires_grad_() for x in (key, value)]
    with torch.autocast("cpu", dtype=torch.float16):
        output = attend(query, *spoilt, key_padding_mask=mask, is_causal=is_causal)
    want = oracle(query, key, value, key_padding_mask=mask, is_causal=is_causal)
    torch.testing.assert_close(output.double(), want, rtol=4e-3, atol=4e-3)
    assert all(x.isfinite().all() for x in torch.autograd.grad(output.sum(), (query, *spoilt)))


def test_under_autocast_chunks_give_the_dtype_and_gradients_of_one_call(monkeypatch):
    tensors, results = draw(40), []
    for scores in (row_chunks.CHUNK_SCORES, 1):
        monkeypatch.setattr(row_chunks, "CHUNK_SCORES", scores)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = attend(*tensors, is_causal=True, alibi=True, backend="flash")
        results.append((output, *torch.autograd.grad(output.float().sum(), tensors)))
    assert results[1][0].dtype == torch.bfloat16
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=0.02, atol=0.02)


def test_without_a_mask_is_not_offered_in_float16():
    given = call(query=torch.zeros(2, H, 8, 8, dtype=torch.float16))
    assert "it is for bfloat16" in (backends.why_not("unmasked", given) or "")
