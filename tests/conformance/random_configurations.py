"""Configurations drawn at random, one for each number, to see that no sound variant is blamed.

    python -m tests.conformance.random_configurations FIRST COUNT [VARIANT ...]

prints the blames among the numbers FIRST to FIRST + COUNT - 1. A refusal is an answer; a failed check or gate and any
other exception is a blame, and a bug of the check or of the variant.
"""

from __future__ import annotations

import random
import sys
import time
import traceback
import types
import typing
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Union

from attn_zoo.attention import BuildContext
from attn_zoo.conformance import CHECKS, gate, run_checks
from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.metadata import FLOAT_DTYPES, Form
from attn_zoo.registry import VariantConfig, make_config, variants

_COUNTS = (1, 1, 2, 2, 3, 4, 5, 7, 8, 8, 12, 16, 16, 17, 31, 32, 33, 64, 100, 128)
_REALS = (1e-6, 1e-3, 0.1, 0.5, 1.0, 2.0)
_HEADS = (1, 2, 2, 3, 4, 5, 6, 8)
_WIDTHS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 16, 17, 24, 32, 64)
_COMPILED = ("flex", "path_ran")  # a backend, and a check that asks for it: half a minute for each new shape
_FEWEST_TOKENS = 64  # that checks are given to choose lengths from
_MOST_NUMBERS = 2**21  # in one tensor of a call

Outcome = Literal["held", "refused", "blamed"]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What is asked: the gate of a cell, or some checks by name.

    Args:
        name: of the variant.
        options: of the variant.
        build: of the cell.
        dtype: of the cell.
        form: of the cell.
        seq_len: of the cell.
        has_padding: of the cell.
        checks: run these with the sizes of `build` instead of the gate.
    """

    name: str
    options: dict[str, Any]
    build: BuildContext
    dtype: str
    form: Form
    seq_len: int
    has_padding: bool
    checks: tuple[str, ...] = ()


def _value(kind: Any, rng: random.Random) -> Any:
    """Draw a value of an annotated type."""
    if typing.get_origin(kind) is Literal:
        return rng.choice([value for value in typing.get_args(kind) if value not in _COMPILED])
    if typing.get_origin(kind) in (Union, types.UnionType):
        return _value(rng.choice(typing.get_args(kind)), rng)
    if typing.get_origin(kind) is tuple:
        return tuple(_value(typing.get_args(kind)[0], rng) for _ in range(rng.randint(1, 4)))
    return {bool: rng.random() < 0.5, int: rng.choice(_COUNTS), float: rng.choice(_REALS)}[kind]


def draw_options(config: type[VariantConfig], rng: random.Random) -> dict[str, Any]:
    """Draw options that the config accepts; each field keeps its default half of the time."""
    kinds = typing.get_type_hints(config)
    while True:
        options = {item.name: _value(kinds[item.name], rng) for item in fields(config) if rng.random() < 0.5}
        try:
            make_config(config, options, "drawn")
        except ConfigError:
            continue
        return options


def draw(number: int, names: Sequence[str] = ()) -> Configuration:
    """Return the configuration with this number of some variants; the same on every machine.

    One in eight asks for what the variant may not offer.
    """
    rng = random.Random(number)
    name = rng.choice(sorted(names or variants))
    variant = variants[name]
    options = draw_options(variant.config, rng)
    can = variant.capabilities_of(make_config(variant.config, options, name))
    if rng.random() < 0.125:
        can = replace(can, cross_attention=True, grouped_query=True, positions=("none", "rotary", "alibi"))
        can = replace(can, attention_dropout=True, causal=True, variable_seq_len=True)
    num_heads, head_dim = rng.choice(_HEADS), rng.choice(_WIDTHS)
    divisors = [count for count in range(1, num_heads + 1) if num_heads % count == 0]
    most = max(1, min(900, _MOST_NUMBERS // (2 * num_heads * head_dim)))
    seq_len = -(-int(most ** rng.random()) // can.seq_len_multiple) * can.seq_len_multiple
    is_longer = can.variable_seq_len and rng.random() < 0.5
    is_causal = bool(can.causal) and (not can.bidirectional or rng.random() < 0.5)
    num_layers = rng.randint(1, 6)
    build = BuildContext(
        embed_dim=num_heads * head_dim if rng.random() < 0.5 else 2 * rng.choice(_WIDTHS),
        num_heads=num_heads,
        num_kv_heads=rng.choice(divisors) if can.grouped_query and rng.random() < 0.5 else num_heads,
        head_dim=head_dim,
        max_seq_len=seq_len + is_longer * can.seq_len_multiple * rng.randint(0, 100),
        is_causal=is_causal,
        is_cross=can.cross_attention and not is_causal and rng.random() < 0.3,
        dropout_p=rng.choice((0.0, 0.0, 0.1, 0.5)) if can.attention_dropout else 0.0,
        position=rng.choice(("none", *can.positions)),
        layer_index=rng.randrange(num_layers),
        num_layers=num_layers,
        seed=rng.randrange(5),
    )
    forms: list[Form] = ["mixer"] if variant.attention is None else ["attention", "mixer"]
    checks = [check.name for check in CHECKS if check.name not in _COMPILED]
    return Configuration(
        name=name,
        options=options,
        build=build,
        dtype=rng.choice([dtype for dtype in FLOAT_DTYPES if dtype in can.dtypes]),
        form=rng.choice(forms),
        seq_len=seq_len,
        has_padding=can.key_padding_mask and rng.random() < 0.7,
        checks=tuple(rng.sample(checks, 3)) if rng.random() < 0.25 else (),
    )


def outcome(asked: Configuration) -> tuple[Outcome, str]:
    """Return what became of a configuration, and for a blame who says what."""
    build = asked.build
    try:
        if not asked.checks:
            gate(
                asked.name,
                asked.options,
                build,
                dtype=asked.dtype,
                seq_len=asked.seq_len,
                form=asked.form,
                has_padding=asked.has_padding,
            )
            return "held", ""
        results = run_checks(
            asked.name,
            asked.options,
            checks=asked.checks,
            embed_dim=build.num_heads * build.head_dim,
            num_heads=build.num_heads,
            max_seq_len=max(_FEWEST_TOKENS, build.max_seq_len),
            seed=build.seed,
        )
    except (UnsupportedError, ConfigError) as error:
        return "refused", str(error)
    except Exception:  # of whatever kind: that is what is looked for
        return "blamed", traceback.format_exc()
    bad = [f"{result.check}: {result.message} ({result.example})" for result in results if result.is_bad]
    return ("blamed", "\n".join(bad)) if bad else ("held", "")


def main(first: int, count: int, names: Sequence[str]) -> None:
    """Print every blame as it is found, and at last how often what became of the configurations."""
    found: Counter[str] = Counter()
    for number in range(first, first + count):
        asked = draw(number, names)
        begin = time.perf_counter()
        what, text = outcome(asked)
        found[f"{asked.name} {what}"] += 1
        seconds = time.perf_counter() - begin
        if what == "blamed" or seconds > 20:
            sys.stdout.write(f"--- {number}, {seconds:.1f} s: {asked}\n{text}\n")
        if (number + 1 - first) % 100 == 0:
            sys.stdout.write(f"... {number + 1}: {dict(sorted(found.items()))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
