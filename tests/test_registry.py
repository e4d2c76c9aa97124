"""The registry: names, duplicates, wrong classes, and configs checked with all problems at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from enum import Enum
from threading import Event, Thread
from typing import Any, ClassVar, Literal

import pytest
import torch

from attn_zoo import AbstractAttention, AbstractMixer, Capabilities, Complexity, ConfigError, Reference, VariantConfig
from attn_zoo.discovery.providers import LoadFailure
from attn_zoo.errors import UnknownNameError
from attn_zoo.registry import (
    Origin,
    Registry,
    config_digest,
    make_config,
    option_fields,
    register_attention,
    register_mixer,
    register_task,
    tasks,
    variants,
)
from attn_zoo.tasks import AbstractTask
from attn_zoo.tasks.mqar import MultiQueryRecall, RecallLevel

CARD: dict[str, Any] = {
    "capabilities": Capabilities(bidirectional=True, causal=True, cross_attention=True, key_padding_mask=True),
    "complexity": Complexity(
        time="1", memory="1", time_exponent=0, memory_exponent=0, sequential_ops="1", max_path="1"
    ),
    "reference": Reference(title="t", authors="a", year=2020, url="https://example.org"),
}


pytestmark = pytest.mark.usefixtures("registry_kept")


class Copying(AbstractAttention):
    def forward(self, query, key, value, *, key_padding_mask=None):
        return query


def new_registry(failures=()):
    calls = []

    def discover():
        calls.append(1)
        return list(failures)

    return Registry("thing", "things list", discover), calls


# --- names ---


@pytest.mark.parametrize("name", ["", "Full", "two words", "a-b", "größe", "a.b", "a/b", 7, None])
def test_bad_names_are_refused(name):
    registry, _ = new_registry()
    with pytest.raises(ConfigError, match="lower-case letters, digits and '_'"):
        registry.add(name, object(), Origin("me"))


@pytest.mark.parametrize("name", [None, 7, ["full"]])
def test_what_is_no_text_names_nothing(name):
    registry, _ = new_registry()
    with pytest.raises(ConfigError, match=r"^expected the name of a thing, a text; got "):
        _ = registry[name]


def test_a_taken_name_names_both_providers():
    registry, _ = new_registry()
    registry.add("one", 1, Origin("first_package"))
    with pytest.raises(ConfigError, match="second_package: thing 'one' is already registered by first_package"):
        registry.add("one", 2, Origin("second_package"))
    assert registry["one"] == 1


def test_unknown_names_name_near_matches_and_the_command():
    registry, _ = new_registry()
    registry.add("linformer", 1, Origin("me"))
    with pytest.raises(UnknownNameError, match=r"did you mean 'linformer'\?  \(things list shows all 1\)"):
        _ = registry["linfromer"]
    with pytest.raises(UnknownNameError):
        registry.remove("other")


def test_an_unknown_name_may_be_that_of_a_file_here_that_nobody_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    registry, _ = new_registry()
    with pytest.raises(UnknownNameError, match=r"; mine\.py here is not loaded: --variant-file mine\.py, in Python"):
        _ = registry["mine"]
    registry.add("other", 1, Origin("me", plain_file=str(tmp_path / "mine.py")))
    with pytest.raises(UnknownNameError, match=r"; mine\.py registers 'other'\)"):
        _ = registry["mine"]


def test_an_unknown_name_may_be_that_of_a_provider_that_could_not_be_loaded():
    registry, _ = new_registry([LoadFailure(provider="broken (broken.one)", reason="ValueError: no")])
    with pytest.raises(UnknownNameError, match=r"things list shows all 0, and why broken \(broken\.one\) could not be"):
        _ = registry["mine"]


def test_names_are_listed_sorted_and_discovered_once():
    registry, calls = new_registry([LoadFailure(provider="broken", reason="ValueError: no")])
    for name in ("b", "a"):
        registry.add(name, name.upper(), Origin("me"))
    assert not calls
    assert list(registry) == ["a", "b"]
    assert len(registry) == 2
    assert "a" in registry
    assert "c" not in registry
    registry.remove("a")
    assert list(registry) == ["b"]
    assert len(calls) == 1
    assert registry.failures == [LoadFailure(provider="broken", reason="ValueError: no")]


def test_a_failed_discovery_is_not_taken_for_an_empty_registry():
    def discover():
        raise RuntimeError("our own module is broken")

    registry: Registry[int] = Registry("thing", "things list", discover)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="our own module"):
            len(registry)


def test_a_thread_waits_for_what_another_discovers():
    has_begun = Event()

    def discover():
        has_begun.set()
        time.sleep(0.1)
        registry.add("one", 1, Origin("me"))
        return []

    registry: Registry[int] = Registry("thing", "things list", discover)
    other = Thread(target=lambda: len(registry))
    other.start()
    has_begun.wait()
    assert registry["one"] == 1
    other.join()


def test_threads_that_discover_registries_which_ask_each_other_do_not_wait_for_ever():
    have_begun = Event(), Event()

    def asks(own: int) -> Registry[int]:
        def discover() -> list[LoadFailure]:
            have_begun[own].set()
            have_begun[1 - own].wait(0.2)
            len(registries[1 - own])
            return []

        return Registry("thing", "things list", discover)

    registries = [asks(0), asks(1)]
    threads = [Thread(target=len, args=(registry,), daemon=True) for registry in registries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2)
    assert not any(thread.is_alive() for thread in threads)


# --- registration ---


def test_a_registered_class_knows_its_variant():
    cls = register_attention("copying", **CARD)(Copying)
    assert cls is Copying
    entry = variants["copying"]
    assert Copying.variant is entry
    assert (entry.attention, entry.mixer) == (Copying, None)
    assert entry.source == __file__
    assert entry.provider == "tests"
    assert len(entry.digest) == 16


def test_wrong_base_classes_are_refused():
    class Mixer(AbstractMixer):
        def forward(self, hidden, *, context=None, key_padding_mask=None):
            return hidden

    class Nothing:
        pass

    for register, wrong in ((register_attention, Mixer), (register_mixer, Copying), (register_attention, Nothing)):
        with pytest.raises(ConfigError, match=f"{wrong.__name__} must derive from Abstract"):
            register("wrong", **CARD)(wrong)
    assert "wrong" not in variants
    register_mixer("mixing", **CARD)(Mixer)
    assert variants["mixing"].mixer is Mixer


def test_methods_without_the_keywords_of_the_contract_are_refused():
    class Routing(Copying):
        def route(self, query, key, *, key_padding_mask=None):
            return key.argmax(-1)

    class Dense(Routing):
        def reference(self, query, key, value, *, key_padding_mask=None):
            return query

    class Carrying(AbstractMixer):
        def forward(self, hidden, *, context=None, key_padding_mask=None):
            return hidden

    with pytest.raises(ConfigError, match=r"Dense\.reference: expected the keyword routing, as route is overridden"):
        register_attention("dense", **CARD)(Dense)
    card = {**CARD, "capabilities": replace(CARD["capabilities"], has_carry=True)}
    with pytest.raises(ConfigError, match=r"Carrying\.forward: expected the keyword carry, as has_carry is declared"):
        register_mixer("carrying", **card)(Carrying)
    assert not {"dense", "carrying"} & set(variants)
    register_attention("routing", **CARD)(Routing)  # forward is its reference
    assert variants["routing"].attention is Routing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": "x"}, "config: expected a class derived from VariantConfig; got 'x'"),
        ({"capabilities": None}, r"capabilities: expected Capabilities\(\.\.\.\); got None"),
        (
            {"capabilities": replace(CARD["capabilities"], causal="yes")},
            r"capabilities\.causal: expected true or false, or 'masked'; got 'yes'",
        ),
        ({"complexity": replace(CARD["complexity"], time_exponent="2")}, r"complexity\.time_exponent: .*; got '2'"),
        ({"complexity": replace(CARD["complexity"], flops=12)}, r"complexity\.flops: .*callable; got 12"),
        ({"reference": replace(CARD["reference"], year="2026")}, r"reference\.year: .*integer; got '2026'"),
    ],
)
def test_what_is_said_of_a_variant_has_its_type(change, message):
    with pytest.raises(ConfigError, match=message):
        register_attention("said_wrong", **{**CARD, **change})(Copying)
    assert "said_wrong" not in variants


def test_a_class_that_could_never_be_called_and_options_that_nobody_would_see_are_refused():
    class Empty(AbstractAttention):
        pass

    class Blind(AbstractAttention):
        def forward(self, query, key, value):  # type: ignore[override]
            return query

    class Undecorated(VariantConfig):
        proj_len: int = 8

    for cls, card, message in (
        (Empty, CARD, "Empty: expected a method forward, which AbstractAttention leaves to it"),
        (Blind, CARD, r"Blind\.forward: expected the keyword key_padding_mask, as every call gives it"),
        (Copying, {**CARD, "config": Undecorated}, r"Undecorated: expected @dataclass\(frozen=True"),
    ):
        with pytest.raises(ConfigError, match=message):
            register_attention("uncalled", **card)(cls)
    assert "uncalled" not in variants


def test_a_config_with_constants_only_needs_no_decorator():
    class Constants(VariantConfig):
        largest: ClassVar[int] = 8

    register_attention("constant", **{**CARD, "config": Constants})(Copying)
    assert variants["constant"].config is Constants


@dataclass(frozen=True, kw_only=True, slots=True)
class Raising(VariantConfig):
    """What can be wrong in the code of a config; `wrong` says what is."""

    wrong: str = ""

    def __post_init__(self) -> None:
        assert self.wrong != "assert"
        if self.wrong == "type":
            raise TypeError("no such type")

    def narrow(self, capabilities: Capabilities) -> Capabilities:
        if self.wrong == "name":
            return capabilities.without(casual="a letter is in the wrong place")
        return {} if self.wrong == "narrow" else capabilities  # type: ignore[return-value]

    def claim(self, complexity: Complexity) -> Complexity:
        claims = {"": complexity}
        return claims["claim" if self.wrong == "claim" else ""]

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        return ("wrong",)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("assert", r"raising: AssertionError.* \(test_registry\.py:\d+\)"),
        ("type", r"raising: TypeError: no such type \(test_registry\.py:\d+\)"),
        ("name", r"raising: narrow: UnknownNameError: unknown capability 'casual'; did you mean 'causal'\?"),
        ("narrow", r"raising: narrow: expected to return Capabilities; got \{\}"),
        ("claim", r"raising: claim: KeyError: 'claim' \(test_registry\.py:\d+\)"),
        ("", r"raising: check_options: expected dicts of options; got 'wrong' among them"),
    ],
)
def test_what_the_code_of_a_config_raises_is_a_mistake_in_it(wrong, message):
    register_attention("raising", config=Raising, **CARD)(Copying)
    variant = variants["raising"]

    def ask() -> object:
        config = make_config(Raising, {"wrong": wrong}, "raising")
        return variant.capabilities_of(config), variant.complexity_of(config), variant.option_sets

    with pytest.raises(ConfigError, match=message):
        ask()


def test_annotations_that_mean_nothing_are_named():
    @dataclass(frozen=True, kw_only=True)
    class Config(VariantConfig):
        width: "Undefined" = 1  # type: ignore[name-defined]  # noqa: F821, UP037

    text = "Config: its annotations cannot be read: NameError: name 'Undefined'"
    with pytest.raises(ConfigError, match=f"mine: {text}"):
        make_config(Config, {}, "mine")
    with pytest.raises(ConfigError, match=text):
        register_attention("unreadable", config=Config, **CARD)(Copying)
    assert "unreadable" not in variants


@pytest.mark.parametrize(("wrong", "error"), [("gpu", UnknownNameError), (None, ValueError)])
@pytest.mark.parametrize("name", ["dtype", "device"])
def test_unknown_dtypes_and_devices_are_refused_where_they_are_said(name, wrong, error):
    with pytest.raises(error, match=name):
        replace(CARD["capabilities"], **{f"{name}s": (wrong,) if wrong else ()})


def test_a_taken_variant_name_is_refused():
    with pytest.raises(ConfigError, match="'full' is already registered by attn_zoo"):
        register_attention("full", **CARD)(Copying)


def test_tasks_have_a_registry_of_their_own():
    @register_task("a_task_for_this_test")
    class Task(MultiQueryRecall):  # type: ignore[misc]
        pass

    assert tasks["a_task_for_this_test"] is Task
    assert "a_task_for_this_test" not in variants


def test_what_is_no_whole_task_is_refused():
    class Nothing:
        pass

    class Half(AbstractTask):
        spec = None  # type: ignore[assignment]

    wrong: Any
    for wrong, message in (
        (Nothing, "Nothing must derive from AbstractTask to be registered as 'wrong'"),
        (Half, r"(?s)Half: expected a method floors, which AbstractTask leaves to it; .* split, which"),
        (len, "expected a class to be registered as 'wrong'; got <built-in function len>"),
    ):
        with pytest.raises(ConfigError, match=message):
            register_task("wrong")(wrong)
    with pytest.raises(ConfigError, match="expected a class to be registered as 'wrong'; got <built-in function len>"):
        register_attention("wrong", **CARD)(wrong)
    assert "wrong" not in tasks


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ({}, r"levels: expected a dataclass for each level, by its name, and at least one; got \{\}"),
        (["short"], r"levels: expected a dataclass for each level.* got \['short'\]"),
        ({"short": {"seq_len": 8}}, r"levels.short: expected an instance of a dataclass; got \{'seq_len': 8\}"),
        ({"short": RecallLevel}, "levels.short: expected an instance of a dataclass; got <class"),
        ({1: RecallLevel(parts=())}, "levels: expected names of levels; got 1"),
        ({"short": RecallLevel(parts=(), seed={0})}, r"levels.short: expected fields that JSON can hold; got Recall"),  # type: ignore[arg-type]
    ],
)
def test_levels_of_another_type_are_refused_where_they_are_said(levels: Any, message: str):
    class Wrong(MultiQueryRecall):  # type: ignore[misc]
        pass

    Wrong.levels = levels
    with pytest.raises(ConfigError, match=message):
        register_task("wrong")(Wrong)
    assert "wrong" not in tasks


# --- configs ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(VariantConfig):
    proj_len: int = 256
    eps: float = 1e-6
    sharing: Literal["none", "headwise"] = "none"
    ranks: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    is_scaled: bool = True

    def __post_init__(self) -> None:
        if self.proj_len < 1:
            raise ValueError(f"proj_len: expected at least 1; got {self.proj_len}")


def test_options_are_taken_as_they_are():
    assert make_config(Config, {}, "x") == Config()
    assert make_config(Config, {"proj_len": 8, "eps": 1}, "x") == Config(proj_len=8, eps=1.0)


def test_lists_become_tuples_because_toml_has_none():
    config = make_config(Config, {"ranks": [1, 2], "pairs": [[1, 2], [3, 4]]}, "x")
    assert config.ranks == (1, 2)
    assert config.pairs == ((1, 2), (3, 4))
    assert hash(config) == hash(Config(ranks=(1, 2), pairs=((1, 2), (3, 4))))


class Kind(Enum):
    SOFT = "soft"
    HARD = "hard"


@dataclass(frozen=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RichConfig(VariantConfig):
    kind: Kind = Kind.SOFT
    tags: frozenset[str] = frozenset()
    inner: Inner = Inner()
    dtype: torch.dtype = torch.float32
    copy: int = 8
    _size: int = 8
    half: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "half", self._size // 2)


def test_what_toml_cannot_say_is_made_of_what_it_can():
    made = make_config(RichConfig, {"kind": "hard", "tags": ["a"], "inner": {"depth": 3}, "_size": 4, "copy": 2}, "x")
    assert made == RichConfig(kind=Kind.HARD, tags=frozenset({"a"}), inner=Inner(3), _size=4, copy=2)
    assert made == make_config(RichConfig, {item.name: getattr(made, item.name) for item in option_fields(made)}, "x")
    for options, message in (
        ({"kind": "HARD"}, r"kind: expected one of soft, hard; got 'HARD'; did you mean 'hard'\?"),
        ({"inner": {"deep": 3}}, r"inner\.deep: .*got 3"),
        ({"inner": {"depth": 3.0}}, r"inner\.depth: .*integer; got 3\.0"),
        ({"half": 3}, r"unknown option 'half'.*options are kind, tags, inner, dtype, copy, _size\)"),
        ({"dtype": "float32"}, r"dtype: .*instance of dtype; got 'float32'"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_config(RichConfig, options, "x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"porj_len": 8}, r"unknown option 'porj_len'; did you mean 'proj_len'\?  \(options are proj_len, eps"),
        ({"proj_len": "8"}, r"proj_len: .*integer.*got '8'"),
        ({"proj_len": 8.0}, r"proj_len: .*integer.*got 8\.0"),
        ({"proj_len": True}, r"proj_len: .*integer.*got True"),
        ({"is_scaled": 1}, r"is_scaled: expected true or false; got 1"),
        ({"sharing": "head"}, r"sharing: expected one of none, headwise; got 'head'; did you mean 'headwise'\?"),
        ({"ranks": [1, "2"]}, r"ranks\.1: .*integer.*got '2'"),
        ({"ranks": 3}, r"ranks: expected a list; got 3"),
        ({"proj_len": 0}, r"^me: proj_len: expected at least 1; got 0$"),
    ],
)
def test_wrong_options_say_what_was_expected(options, message):
    with pytest.raises(ConfigError, match=message):
        make_config(Config, options, "me")


def test_all_wrong_options_are_reported_at_once():
    with pytest.raises(ConfigError, match="me: 3 problems") as refusal:
        make_config(Config, {"proj_len": "8", "sharing": 1, "colour": "red"}, "me")
    assert len(refusal.value.problems) == 3


def test_a_variant_without_options_says_so():
    with pytest.raises(ConfigError, match="it has no options"):
        make_config(VariantConfig, {"depth": 3}, "me")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ways(VariantConfig):
    """Options whose equal values have several orders, and nested ones of which the class alone tells them apart."""

    sizes: dict[str, Any] = field(default_factory=dict)
    part: Any = None


@dataclass(frozen=True)
class Left:
    width: int = 1


@dataclass(frozen=True)
class Right:
    width: int = 1


def test_equal_configs_have_equal_digests_in_every_process_and_others_have_not():
    names = frozenset({"a", "bb", "ccc", "dddd"})
    code = f"from attn_zoo.registry import config_digest; print(config_digest({names!r}))"  # without torch
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        ).stdout.strip()
        for seed in ("1", "2")  # by which the set has two orders
    }
    assert found == {config_digest(names)}
    assert config_digest(Ways(sizes={"a": 1, "b": {2}})) == config_digest(Ways(sizes={"b": {2}, "a": 1}))
    parts: list[Any] = [
        None,
        "None",
        1,
        1.0,
        True,
        "1",
        (1,),
        frozenset({1}),
        ("1",),
        ((1,), 2),
        (1, (2,)),
        Left(),
        Right(),
    ]
    parts += [{1: 2}, {"1": 2}, Left(width=2)]
    assert len({config_digest(Ways(part=part)) for part in parts}) == len(parts)
