"""Exact attention: ours beside every kernel it can be told to take, and torch called plainly, for pytest-benchmark.

One group for each setting (plain, with key padding, with dropout in training, with projections), pass and length. A
kernel that is not installed or refuses the call is skipped with its reason (`-rs` shows it). Records with intervals,
memory and figures come from `make peers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import BATCH_SIZE, HEAD_DIM, NUM_HEADS, Case
from test_variants import PASSES, work

from attn_zoo import UnsupportedError
from attn_zoo.kernels.trace import recording

SEQ_LENS = (1024, 4096)
DROPOUT_P = 0.1

BACKENDS = ("math", "flash", "efficient", "cudnn", "flex", "xformers")
ATTENTION: dict[str, tuple[str, dict[str, Any]]] = {
    "ours": ("full", {}),
    "torch": ("plain_sdpa", {}),
    **{f"only {backend}": ("full", {"backend": backend}) for backend in BACKENDS},
}
MIXERS: dict[str, tuple[str, dict[str, Any]]] = {"ours": ("full", {}), "torch": ("torch_multihead", {})}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"has_padding": True},
    "dropout": {"dropout_p": DROPOUT_P},
    "padding and dropout": {"has_padding": True, "dropout_p": DROPOUT_P},
}
CASES = [(form, label) for form, labels in (("heads", ATTENTION), ("projections", MIXERS)) for label in labels]
WORK = [  # dropout acts in training only, and training has a backward
    (setting, pass_) for setting in SETTINGS for pass_ in PASSES if "dropout" not in setting or pass_ != "forward"
]


@pytest.mark.parametrize(("form", "label"), CASES)
@pytest.mark.parametrize(("setting", "pass_"), WORK)
def test_exact(
    benchmark: Any,
    make_case: Callable[..., Case],
    device: str,
    form: str,
    label: str,
    setting: str,
    seq_len: int,
    pass_: str,
) -> None:
    name, options = (ATTENTION if form == "heads" else MIXERS)[label]
    dtype = "bfloat16" if device == "cuda" else "float32"
    try:
        case = make_case(
            name, seq_len, is_mixer=form == "projections", options=options, dtype=dtype, **SETTINGS[setting]
        )
        run = work(case, pass_, device)
        with recording() as kernels:
            run()
    except UnsupportedError as error:
        pytest.skip(error.reason)
    benchmark.group = f"exact, {form}, {setting}: {pass_}, {seq_len} tokens"
    benchmark.extra_info.update(
        variant=name,
        options=options,
        setting=setting,
        seq_len=seq_len,
        batch_size=BATCH_SIZE,
        num_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        device=device,
        kernels=kernels,
    )
    benchmark.pedantic(run, rounds=7, warmup_rounds=1)
