"""Names of files are short, say what differs, and no two panels of a report share one."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

from attn_zoo.report.wording import panel_name
from tests.report.synthetic import MACHINE, analysed, scaling

SETTING = {
    "pass": "fwd_bwd",
    "dtype": "bfloat16",
    "device": "cuda",
    "scope": "mixer",
    "is_causal": True,
    "has_padding": True,
    "dropout_p": 0.1,
    "head_dim": 128,
    "num_heads": 8,
    "threads": None,
}


def test_a_name_has_what_differs_and_nothing_else():
    assert panel_name(SETTING, {}, set()) == "fwd_bwd"
    assert panel_name(SETTING, {}, {"dtype", "head_dim"}) == "fwd_bwd-bfloat16-d128"
    assert panel_name(SETTING, {}, {"has_padding", "dropout_p", "device"}) == "fwd_bwd-padded-dropout0-1-cuda"
    none = {"has_padding": False, "dropout_p": 0.0}
    assert panel_name(SETTING | none, {}, set(none)) == "fwd_bwd"
    assert panel_name(SETTING, {}, {"threads"}) == "fwd_bwd"


def test_a_machine_is_named_and_two_alike_by_their_environments():
    machines = {
        digest: dataclasses.replace(MACHINE, gpu=None, cpu=cpu)
        for digest, cpu in (("1a", "Intel(R) Xeon(R) Processor"), ("2b", "AMD EPYC"), ("3c", "AMD EPYC"))
    }
    names = [panel_name({**SETTING, "environment": digest}, machines, {"environment"}) for digest in machines]
    assert names == ["fwd_bwd-intel-xeon", "fwd_bwd-2b", "fwd_bwd-3c"]


def test_no_two_panels_of_a_report_share_a_name(tmp_path):
    axes: dict[str, list[Any]] = {
        "is_causal": [False, True],
        "has_padding": [False, True],
        "head_dim": [64, 128],
        "batch_size": [1, 2],
    }
    records = [
        scaling("full", 512, **dict(zip(axes, values, strict=True)), protocol_version=version)
        for values in product(*axes.values())
        for version in (3, 4)  # which no name says
    ]
    names = [panel.name for panel in analysed(tmp_path, records).panels]
    assert len(set(names)) == len(names) == len(records)
    assert max(map(len, names)) < 40
