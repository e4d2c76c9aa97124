"""The registry: names of variants and tasks, who provides them, and what was wrong with those that failed to load.

Four ways in, all ending in `register_attention`, `register_mixer` or `register_task`:
a module of `attn_zoo.variants` or `attn_zoo.tasks`; another package's entry point in the group `attn_zoo.variants` or
`attn_zoo.tasks`; a plain file (`load_file`, `--variant-file`); a class typed in a notebook, at a prompt or in a script.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from threading import RLock
from traceback import extract_tb
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic import Field as PydanticField

from attn_zoo.discovery.import_trial import IMPORT_TIMEOUT_S, is_trial
from attn_zoo.discovery.own_files import own_digest, own_files
from attn_zoo.discovery.plain_files import import_file, plain_file_at_work
from attn_zoo.discovery.providers import LoadFailure, discover, is_offered
from attn_zoo.errors import AttnZooError, ConfigError, UnknownNameError, UnsupportedError, suggestion
from attn_zoo.metadata import LINEAR_BACKWARD_RATIO, Capabilities, Complexity, Form, Reference, Shape
from attn_zoo.typed_code import has_changed, is_typed, write_typed

if TYPE_CHECKING:
    from attn_zoo.attention.context import BuildContext
    from attn_zoo.attention.contract import AbstractAttention, AbstractMixer

_Entry = TypeVar("_Entry")
_Class = TypeVar("_Class", bound=type)
_Config = TypeVar("_Config")


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantConfig:
    """Base of the options of a variant: only the paper's own knobs, with the paper's defaults.

    Subclasses are frozen dataclasses too. Unknown options and wrong types are errors; no value is coerced. Impossible
    values raise `ValueError` in `__post_init__`.

    Attributes:
        budget_error: error relative to exact attention that may be left at the last of `budgets`; 0 means rounding only
            (a random approximation needs more).
    """

    budget_error: ClassVar[float] = 0.0

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return the sets of options that conformance checks where the user gives none.

        Choose sizes so small that about 100 tokens already show the mechanism (several blocks, fewer compressed keys
        than tokens). The first set must keep every promise of the capabilities; the others may refuse more.
        """
        return ({},)

    @classmethod
    def budgets(cls, seq_len: int) -> tuple[dict[str, Any], ...]:
        """Return sets of options of growing budget, up to one under which `seq_len` tokens are treated exactly.

        Empty (the default) where no budget makes the mechanism equal to exact softmax attention.
        """
        del seq_len
        return ()

    def narrow(self, capabilities: Capabilities) -> Capabilities:
        """Return what the variant can do under these options: `capabilities`, or less (`dataclasses.replace`).

        Everybody asks here: the plan, the builder, the contract, the checks. The default takes nothing away.
        """
        return capabilities

    def claim(self, complexity: Complexity) -> Complexity:
        """Return what is claimed under these options: `complexity`, or with other exponents (`dataclasses.replace`)."""
        return complexity


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One registered mechanism.

    Args:
        name: what users type.
        config: class of its options.
        capabilities: what it can do.
        complexity: what it claims to cost.
        reference: where it comes from.
        attention: class that consumes heads `[B, H, L, D]`, or None for a variant that needs hidden states.
        mixer: makes the form that consumes hidden states `[B, L, E]`; None means the shared multi-head mixer around
            `attention`.
        learner: makes a model of its own that trains by itself, from ours around `mixer`, so that both may be compared
            step by step (an `AbstractLearner` of `attn_zoo.training.learner`); None means that only ours trains.
        provider: package, distribution or file that registered it.
        source: file that defines it, of a typed one a file with what it needs of all that was typed; or empty.
        no_source: why there is no such file, for people.
        digest: of the source as it was when it was registered, of a plain file with what it imports from beside it.
    """

    name: str
    config: type[VariantConfig]
    capabilities: Capabilities
    complexity: Complexity
    reference: Reference
    attention: type[AbstractAttention] | None = None
    mixer: Callable[[Any, BuildContext], AbstractMixer] | None = None
    learner: Callable[[Any], Any] | None = None
    provider: str = ""
    source: str = ""
    no_source: str = ""
    digest: str = ""

    @property
    def form(self) -> Form:
        """Form the variant is written in: `"mixer"` where it needs hidden states."""
        return "mixer" if self.attention is None else "attention"

    def capabilities_of(self, config: VariantConfig) -> Capabilities:
        """Return what the variant can do under these options.

        Raises:
            ConfigError: the config's `narrow` offers what the variant does not declare or no capabilities, or raises.
        """
        narrowed = self._ask(Capabilities, "narrow", lambda: config.narrow(self.capabilities))
        if narrowed is not self.capabilities and (wider := narrowed.widened(self.capabilities)):
            raise ConfigError(self.name, [("narrow", f"may only take away; it adds {', '.join(wider)}")])
        return narrowed

    def complexity_of(self, config: VariantConfig) -> Complexity:
        """Return what the variant claims to cost under these options.

        Raises:
            ConfigError: the config's `claim` gives something else, or raises.
        """
        return self._ask(Complexity, "claim", lambda: config.claim(self.complexity))

    @property
    def option_sets(self) -> tuple[dict[str, Any], ...]:
        """Sets of options that checks try: those its config names in `check_options`, else the defaults.

        Raises:
            ConfigError: it gives something else, or raises.
        """
        sets = self._ask(tuple, "check_options", lambda: tuple(self.config.check_options())) or ({},)
        if wrong := [each for each in sets if not isinstance(each, Mapping)]:
            raise ConfigError(self.name, [("check_options", f"expected dicts of options; got {wrong[0]!r} among them")])
        return sets

    def has_budget(self, config: VariantConfig, seq_len: int) -> bool:
        """Tell whether it is exact softmax attention under these options, or becomes it as some of them grow."""
        return self.capabilities_of(config).is_exact or bool(config.budgets(seq_len))

    def _ask(self, kind: type[_Config], method: str, ask: Callable[[], Any]) -> _Config:
        """Return what a method of the config says, which is the user's own code."""
        try:
            given = ask()
        except (ConfigError, UnsupportedError):
            raise
        except Exception as error:
            raise ConfigError(self.name, [(method, _raised(error))]) from error
        if not isinstance(given, kind):  # a return that was forgotten
            raise ConfigError(self.name, [(method, f"expected to return {kind.__name__}; got {given!r}")])
        return given

    def projection_flops(self, shape: Shape) -> int:
        """Return forward FLOPs of the linear maps between hidden states and what the mechanism acts on."""
        if shape.form == "attention":
            return 0
        if self.complexity.projection_flops is not None:
            return self.complexity.projection_flops(shape)
        return 0 if self.attention is None else shape.multi_head_flops

    def flops(self, shape: Shape) -> int | None:
        """Return forward FLOPs of a whole call in `shape.form`, projections included; None without a formula."""
        formula = self.complexity.flops
        return None if formula is None else formula(shape) + self.projection_flops(shape)

    def backward_ratio(self, shape: Shape) -> float | None:
        """Return FLOPs of the backward over those of the forward: projections have two products for one."""
        total, projections = self.flops(shape), self.projection_flops(shape)
        if not total:
            return None
        return (self.complexity.ratio(shape) * (total - projections) + LINEAR_BACKWARD_RATIO * projections) / total

    def min_bytes(self, shape: Shape, itemsize: int) -> int:
        """Return the bytes that one forward in `shape.form` must move at least, in a dtype of `itemsize` bytes."""
        own, formula = replace(shape, form=self.form), self.complexity.bytes
        weights = 0 if formula is None else formula(own, itemsize) - own.io_bytes(itemsize)
        if shape.form == "mixer":
            if self.complexity.projection_bytes is not None:
                weights += self.complexity.projection_bytes(shape, itemsize)
            elif self.attention is not None:
                weights += sum(shape.multi_head_params) * itemsize
        return shape.io_bytes(itemsize) + weights

    def step_bytes(self, shape: Shape, itemsize: int) -> int | None:
        """Return the least bytes that a token decoded after `key_len` others moves; None where no formula says."""
        of_state = self.complexity.step_bytes or self.complexity.state_bytes
        if of_state is None:
            return None
        return self.min_bytes(replace(shape, query_len=1, key_len=1), itemsize) + of_state(shape, itemsize)

    @property
    def backends(self) -> tuple[str, ...]:
        """The values of an option named `backend`, or nothing where there is no such choice."""
        hint = get_type_hints(self.config).get("backend")
        return tuple(get_args(hint)) if get_origin(hint) is Literal else ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Variant:
        """Return itself: it is frozen, and modules that carry it are copied (averaging of weights, for instance)."""
        return self


@dataclass(frozen=True, slots=True)
class Origin:
    """Who registers something, and from which file.

    Args:
        provider: package, distribution or file, for messages.
        source: file that defines it.
        plain_file: that another process must load first; empty for what discovery finds there too.
        no_source: why there is no such file, for people.
        beside: the file that the plain file imports and that says it, if another; it may be imported anew by another
            such file.
        digest: of the plain file and of what it imports from beside it, else of the source; as they are now.
    """

    provider: str
    source: str = ""
    plain_file: str = ""
    no_source: str = ""
    beside: str = ""
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        source = Path(self.source)
        if self.plain_file:
            digest = own_digest(Path(self.plain_file))
        else:
            digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16] if source.is_file() else ""
        object.__setattr__(self, "digest", digest)


@dataclass
class Registry(Generic[_Entry]):
    """Names and entries of one kind, discovered on first use.

    Args:
        kind: word for messages, such as `"variant"`.
        see: where a user finds all names.
        discover: called once, before the first look-up; fills the registry and returns what failed to load.
    """

    kind: str
    see: str
    discover: Callable[[], list[LoadFailure]]
    failures: list[LoadFailure] = field(default_factory=list)
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _origins: dict[str, Origin] = field(default_factory=dict)
    _is_discovered: bool = False
    _lock: ClassVar[RLock] = RLock()  # one for all: what one registry discovers may ask another

    def _load(self) -> None:
        with self._lock:  # other threads wait for all of it
            if not self._is_discovered:
                self._is_discovered = True  # set first: a module being discovered may look names up itself
                try:
                    self.failures.extend(self.discover())
                except BaseException:
                    self._is_discovered = False  # the next look-up must fail as loudly, not find an empty registry
                    raise

    @property
    def names(self) -> tuple[str, ...]:
        """Return what is registered by now, without discovering more."""
        return tuple(self._entries)

    def _forget(self, name: str) -> None:
        del self._entries[name], self._origins[name]

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Forget what the block registered when it fails; what discovery found meanwhile stays."""
        before, was_discovered = set(self._entries), self._is_discovered
        try:
            yield
        except BaseException:
            for name in set(self._entries) - before:
                if was_discovered or self._origins[name].plain_file:
                    self._forget(name)
            raise

    def add(self, name: str, entry: _Entry, origin: Origin) -> None:
        """Register `entry`, which may be typed anew; a name that is taken is an error that names both providers."""
        plain_file, beside = origin.plain_file, origin.beside
        is_text = isinstance(name, str)  # users are not type-checked
        if not (is_text and name.replace("_", "a").isalnum() and name == name.lower() and name.isascii()):
            rule = f"{self.kind} name must be lower-case letters, digits and '_'; got {name!r}"
            raise ConfigError(origin.provider, [("", rule)])
        if plain_file and not is_trial():
            self._load()  # so that a name that is taken is refused here, where it can be changed
        other = self._origins.get(name, Origin(""))
        is_same = plain_file != "" and plain_file == other.plain_file
        # Typed anew, or a module of a notebook that was changed and reloaded.
        is_anew = (is_typed(plain_file) and is_typed(other.plain_file)) or (is_same and origin.digest != other.digest)
        is_anew = is_anew or (beside not in ("", other.plain_file) and beside == other.beside)
        if name in self._entries and not is_anew:
            whose = f"another class of {origin.provider}" if is_same else other.plain_file or other.provider
            how = _who_imports(plain_file, other.plain_file) or "choose another name"
            raise ConfigError(origin.provider, [("", f"{self.kind} {name!r} is already registered by {whose}; {how}")])
        self._entries[name], self._origins[name] = entry, origin

    def plain_file(self, name: str) -> str:
        """Return the plain file that another process must load to know `name`, or an empty string.

        Raises:
            ConfigError: it, or something it needs, was changed or typed anew since; or the file is gone.
        """
        origin = self._origins.get(name, Origin(""))
        file = origin.plain_file
        if has_changed(file):
            changed = "it, or something it needs, was changed or typed anew since"
            raise ConfigError(name, [("", f"{changed}: run the cell that registers it, after all of that")])
        if file and not Path(file).is_file():
            raise ConfigError(name, [("", f"{file}, which registers it, is gone: load it from where it is now")])
        if file and own_digest(Path(file)) != origin.digest:
            changed = f"{file}, or what it imports from beside it, was changed since it was loaded"
            raise ConfigError(name, [("", f"{changed}: load it again (attn_zoo.load_file)")])
        return file

    def remove(self, name: str) -> None:
        """Forget `name`."""
        self[name]
        self._forget(name)

    def remove_file(self, plain_file: str) -> None:
        """Forget what a plain file registered."""
        for name in [name for name, origin in self._origins.items() if origin.plain_file == plain_file]:
            self._forget(name)

    def __getitem__(self, name: str) -> _Entry:
        self._load()
        if not isinstance(name, str):
            raise ConfigError("", [("", f"expected the name of a {self.kind}, a text; got {name!r}")])
        if name not in self._entries:
            failed = ", ".join(sorted({failure.provider for failure in self.failures}))
            why = f", and why {failed} could not be loaded" if failed else ""
            by_file: dict[str, list[str]] = {}
            for each, origin in self._origins.items():
                by_file.setdefault(origin.plain_file, []).append(repr(each))
            see = f"{self.see} shows all {len(by_file.pop('', []))}{why}"
            see += "".join(f"; {Path(file).name} registers {', '.join(own)}" for file, own in by_file.items())
            if any(path.stem == name and str(path.resolve()) not in by_file for path in Path().glob("*.py")):
                see += f"; {name}.py here is not loaded: --variant-file {name}.py, in Python attn_zoo.load_file"
            raise UnknownNameError(self.kind, name, sorted(self._entries), see)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        self._load()
        return len(self._entries)


def _who_imports(file: str, other: str) -> str:
    """Return which of two plain files is enough, as it registers what the other does; empty where neither is."""
    for outer, inner in ((Path(file), Path(other)), (Path(other), Path(file))):
        if outer != inner and outer.is_file() and inner in own_files(outer).values():
            return f"{outer.name} imports {inner.name} and so registers it too: load {outer.name} alone"
    return ""


@contextmanager
def all_or_nothing() -> Iterator[None]:
    """Forget what the block registered when it fails: half a provider is none."""
    with variants.all_or_nothing(), tasks.all_or_nothing():
        yield


variants: Registry[Variant] = Registry(
    "variant", "attn-zoo list", lambda: discover("attn_zoo.variants", all_or_nothing)
)
tasks: Registry[Any] = Registry("task", "attn-zoo list tasks", lambda: discover("attn_zoo.tasks", all_or_nothing))


def load_file(path: Path | str, timeout_s: float | None = IMPORT_TIMEOUT_S) -> None:
    """Import a plain Python file so that it registers its variants or tasks, with what it imports from beside it.

    Loading it again does nothing, unless one of these files was changed since: then the new ones count.

    Args:
        path: of the file.
        timeout_s: how long the import may take, tried in a child process first; None for a process that is itself
            expendable, which then needs no trial.

    Raises:
        ConfigError: the file is missing, registers nothing, or raises, exits or hangs when imported.
    """
    import_file(path, partial(_something_or_nothing, Path(path).resolve()), timeout_s)


@contextmanager
def _something_or_nothing(path: Path) -> Iterator[None]:
    for registry in (variants, tasks):
        registry.remove_file(str(path))  # what it registered before it was changed
    before = variants.names, tasks.names
    from attn_zoo.discovery.global_state import changes, restored

    with all_or_nothing(), restored(has_generators=False) as settings:
        yield
        for name, how in changes(settings).items():
            text = f"its import changes {name}: {how}; others share the process: set it in a call, and put it back"
            raise ConfigError(path.name, [("", text)])
        if (variants.names, tasks.names) == before:
            how = "decorate a class with register_attention, register_mixer or register_task"
            raise ConfigError(path.name, [("", f"registers no variant and no task: {how}")])


def _origin(owner: Any, name: str, frame: FrameType) -> Origin:
    """Return where a class comes from that `frame` registers.

    Raises:
        ConfigError: it is no class.
    """
    if not isinstance(owner, type):
        provider = Path(plain_file_at_work()).name
        raise ConfigError(provider, [("", f"expected a class to be registered as {name!r}; got {owner!r}")])
    is_script = owner.__module__ == "__main__"  # another process must not run all of it
    if not is_script and getattr(sys.modules.get(owner.__module__), "__file__", None):
        source = inspect.getsourcefile(owner) or ""
        package, _, rest = owner.__module__.partition(".")
        if is_offered(package):
            return Origin(package, source)
        if not plain_file_at_work() and rest:
            how = "name it as an entry point of its package, or load a file that imports it (attn_zoo.load_file)"
            return Origin(package, source, no_source=f"only this process has imported {owner.__module__}: {how}")
        # A module that lies beside a notebook is a file to others.
        plain = plain_file_at_work() or source
        return Origin(Path(plain).name, plain, plain, beside="" if source == plain else source)
    try:
        source = write_typed(owner, frame, name)
    except ConfigError as error:
        text = f"{error.problems[0][1]}; write it to {name}.py and load that (attn_zoo.load_file)"
        return Origin(owner.__module__, no_source=text)
    return Origin(Path(source).name, source, source)


def register_attention(
    name: str,
    *,
    config: type[VariantConfig] = VariantConfig,
    capabilities: Capabilities,
    complexity: Complexity,
    reference: Reference,
    mixer: Callable[[Any, BuildContext], AbstractMixer] | None = None,
) -> Callable[[_Class], _Class]:
    """Register the decorated `AbstractAttention` subclass under `name`.

    Args:
        name: lower-case letters, digits and underscores.
        config: frozen dataclass of its options, derived from `VariantConfig`; none by default.
        capabilities: what it can do.
        complexity: what it claims to cost.
        reference: where it comes from.
        mixer: makes a form of its own for hidden states; by default the shared multi-head mixer is put around it.

    Raises:
        ConfigError: the name is taken or the class does not derive from `AbstractAttention`.
    """
    what = partial(Variant, config=config, capabilities=capabilities, complexity=complexity, reference=reference)
    return _register("AbstractAttention", name, lambda cls: partial(what, attention=cls, mixer=mixer))


def register_mixer(
    name: str,
    *,
    config: type[VariantConfig] = VariantConfig,
    capabilities: Capabilities,
    complexity: Complexity,
    reference: Reference,
    learner: Callable[[Any], Any] | None = None,
) -> Callable[[_Class], _Class]:
    """Register the decorated `AbstractMixer` subclass under `name`: for mechanisms that need hidden states.

    Args:
        name: as in `register_attention`, like what follows.
        config: frozen dataclass of its options.
        capabilities: what it can do.
        complexity: what it claims to cost.
        reference: where it comes from.
        learner: makes a whole model that trains by itself, for timed training steps; see `Variant`.

    Raises:
        ConfigError: the name is taken or the class does not derive from `AbstractMixer`.
    """
    what = partial(Variant, config=config, capabilities=capabilities, complexity=complexity, reference=reference)
    return _register("AbstractMixer", name, lambda cls: partial(what, mixer=cls, learner=learner))


def _register(
    base: Literal["AbstractAttention", "AbstractMixer"], name: str, describe: Callable[[_Class], Callable[..., Variant]]
) -> Callable[[_Class], _Class]:
    def decorate(cls: _Class) -> _Class:
        origin = _origin(cls, name, sys._getframe(1))
        root = _root(cls, base, name, origin.provider)
        said = {key: getattr(origin, key) for key in ("provider", "source", "no_source", "digest")}
        variant = describe(cls)(name=name, **said)
        if problems := _wrong_types(variant) or _problems(cls, root, variant.capabilities):
            raise ConfigError(origin.provider, problems)
        variants.add(name, variant, origin)
        cls.variant = variant  # type: ignore[attr-defined]
        return cls

    return decorate


def _root(cls: type, base: str, name: str, provider: str) -> type:
    """Return the ancestor of this name, which no module here may import: it needs torch, or is of a higher layer."""
    for ancestor in cls.__mro__:
        if ancestor.__name__ == base:
            return ancestor
    raise ConfigError(provider, [("", f"{cls.__name__} must derive from {base} to be registered as {name!r}")])


def _left_out(cls: type, root: type) -> list[tuple[str, str]]:
    """Return the methods that a class had to bring and has not."""
    names = sorted(getattr(cls, "__abstractmethods__", ()))
    return [
        (cls.__name__, f"expected a method {name}, which {root.__name__} leaves to it; it has none") for name in names
    ]


def _wrong_levels(cls: type, root: type) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the levels of a task, which nothing looks at before a level is asked for."""
    if "levels" not in inspect.get_annotations(root):
        return
    levels = getattr(cls, "levels", None)
    if not isinstance(levels, Mapping) or not levels:
        yield "levels", f"expected a dataclass for each level, by its name, and at least one; got {levels!r}"
        return
    for name, level in levels.items():
        if not isinstance(name, str):
            yield "levels", f"expected names of levels; got {name!r}"
        elif not is_dataclass(level) or isinstance(level, type):
            yield f"levels.{name}", f"expected an instance of a dataclass; got {level!r}"
        else:
            try:
                json.dumps(asdict(level), sort_keys=True)  # as the digest of its data will
            except (TypeError, ValueError) as error:
                yield f"levels.{name}", f"expected fields that JSON can hold; got {level!r}: {error}"


def _wrong_types(variant: Variant) -> list[tuple[str, str]]:
    """Return what is not of the type that it is read as, later and far from the file that said it."""
    problems = []
    config: Any = variant.config
    if not (isinstance(config, type) and issubclass(config, VariantConfig)):
        problems.append(("config", f"expected a class derived from VariantConfig; got {config!r}"))
    elif any("ClassVar" not in str(each) for each in inspect.get_annotations(config).values()) and (
        "__dataclass_fields__" not in vars(config)
    ):
        how = "@dataclass(frozen=True, kw_only=True, slots=True)"
        problems.append((config.__name__, f"expected {how} before it, without which it has no options"))
    else:
        try:
            get_type_hints(config)
        except Exception as error:  # whatever an annotation raises
            problems.append((config.__name__, _unreadable(error)))
    for name, kind in (("capabilities", Capabilities), ("complexity", Complexity), ("reference", Reference)):
        record: Any = getattr(variant, name)
        if not isinstance(record, kind):
            problems.append((name, f"expected {kind.__name__}(...); got {record!r}"))
            continue
        try:
            make_config(kind, {item.name: getattr(record, item.name) for item in fields(record)}, name)
        except ConfigError as error:
            problems += [(f"{name}.{path}", text) for path, text in error.problems]
    return problems


def _problems(cls: Any, root: Any, can: Capabilities) -> list[tuple[str, str]]:
    """Return what could never be called: no direction, no method, and methods without a keyword of the contract."""
    problems = _left_out(cls, root)
    if not (can.bidirectional or can.causal):
        problems.append(("capabilities", "expected bidirectional or causal, without which nothing can be built"))
    wanted = [("forward", "key_padding_mask", "as every call gives it"), ("reference", "key_padding_mask", "likewise")]
    wanted += [("reference", "routing", "as route is overridden")] if cls.route is not root.route else []
    wanted += [(method, "carry", "as has_carry is declared") for method in ("forward", "reference") if can.has_carry]
    for method, keyword, why in wanted:
        function = getattr(cls, method)
        parameters = inspect.signature(function).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if function is not getattr(root, method) and keyword not in parameters and not takes_any:
            found = f"expected the keyword {keyword}, {why}; got ({', '.join(parameters)})"
            problems.append((f"{cls.__name__}.{method}", found))
    return problems


def register_task(name: str) -> Callable[[_Class], _Class]:
    """Register the decorated `AbstractTask` subclass (see `attn_zoo.tasks.abstract_task`) under `name`.

    Raises:
        ConfigError: the name is taken, or the class does not derive from `AbstractTask`, lacks a method of it or has
            `levels` of another type.
    """

    def decorate(cls: _Class) -> _Class:
        origin = _origin(cls, name, sys._getframe(1))
        root = _root(cls, "AbstractTask", name, origin.provider)
        if problems := [*_left_out(cls, root), *_wrong_levels(cls, root)]:
            raise ConfigError(origin.provider, problems)
        tasks.add(name, cls, origin)
        cls.name = name  # type: ignore[attr-defined]
        if origin.plain_file:
            # The digest of its data is of its version, which nobody raises who tries things out in a file.
            cls.version = f"{getattr(cls, 'version', 0)} of {origin.digest}"  # type: ignore[attr-defined]
        return cls

    return decorate


_OWN = "option_"


def make_config(config: type[_Config], options: Mapping[str, Any], source: str) -> _Config:
    """Return `config(**options)`, checked: all unknown options and wrong types are reported at once.

    Raises:
        ConfigError: one problem per wrong option, with near matches for unknown ones.
    """
    known = [item.name for item in option_fields(config)]
    # TOML has no tuples, and configs are frozen.
    given = {name: _frozen(value) for name, value in options.items()}
    try:
        model = _model_of(config)  # type: ignore[arg-type]
    except Exception as error:
        raise ConfigError(source, [(config.__name__, _unreadable(error))]) from error
    try:
        checked = _checked(model, given)
    except ValidationError as error:
        problems = []
        refused: dict[tuple[str, str], dict[str, Any]] = {}  # each type of a union says what it misses in one value
        for detail in error.errors(include_url=False):
            path = ".".join(str(part) for part in detail["loc"])
            if detail["type"] == "extra_forbidden":
                options_text = f"options are {', '.join(known)}" if known else "it has no options"
                problems.append(("", f"unknown option {path!r}{suggestion(path, known)}  ({options_text})"))
            else:
                place = str(detail["loc"][0]), repr(detail["input"])
                refused.setdefault(place, {})[path] = detail
        for (option, value), details in refused.items():
            path = option if len(details) > 1 else next(iter(details))
            problems.append((path, refusal(list(details.values()), value)))
        raise ConfigError(source, problems) from None
    try:
        return config(**{name: getattr(checked, _OWN + name) for name in given})
    except AttnZooError:
        raise
    except ValueError as error:  # from its own __post_init__, for people
        raise ConfigError(source, [("", str(error))]) from None
    except Exception as error:
        raise ConfigError(source, [("", _raised(error))]) from error


_TYPES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "frozen_set": "a list",
    "dict": "a table",
    "model": "a table",
    "dataclass": "a table",
}
_LIMITS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_SHOULD_BE = "Input should be "


def refusal(details: Sequence[Mapping[str, Any]], got: str) -> str:
    """Return our sentence for what pydantic says of one value: expected this, or that; got something else.

    Args:
        details: from `ValidationError.errors()`, one of each type that the value might have had.
        got: the value, as it is shown.
    """
    expected: list[str] = []
    named: list[str] = []
    for detail in details:
        context = detail.get("ctx", {})
        match detail["type"]:
            case "literal_error" | "enum":
                only = str(context["expected"])
                choices = [choice.strip("'") for choice in only.replace(" or ", ", ").split(", ")]
                named += choices
                expected.append(f"one of {', '.join(choices)}" if len(choices) > 1 else only)
            case kind if kind in _LIMITS:
                key, words = _LIMITS[kind]
                limit = context[key]
                expected.append(f"{words} {limit:g}" if isinstance(limit, float) else f"{words} {limit}")
            case kind if kind.removesuffix("_type") in _TYPES:
                expected.append(_TYPES[kind.removesuffix("_type")])
            case _ if detail["msg"].startswith(_SHOULD_BE):
                expected.append(detail["msg"].removeprefix(_SHOULD_BE))
            case _:
                return f"{detail['msg'][:1].lower()}{detail['msg'][1:]}; got {got}"
    value = details[0]["input"]
    hint = suggestion(value, named) if isinstance(value, str) else ""
    return f"expected {', or '.join(dict.fromkeys(expected))}; got {got}{hint}"


def _unreadable(error: Exception) -> str:
    return f"its annotations cannot be read: {_raised(error)}"


def _raised(error: Exception) -> str:
    """Return what an error of somebody else's code was, and where it was raised."""
    place = extract_tb(error.__traceback__)[-1]
    words = "".join(f": {line}" for line in str(error).splitlines()[:1])
    return f"{type(error).__name__}{words} ({Path(place.filename).name}:{place.lineno})"


def capabilities_of(name: str, options: Mapping[str, Any]) -> Capabilities:
    """Return what a variant can do under `options`.

    Raises:
        UnknownNameError: no such variant.
        ConfigError: an option is unknown or impossible.
    """
    variant = variants[name]
    return variant.capabilities_of(make_config(variant.config, options, name))


def option_fields(config: Any) -> list[Field[Any]]:
    """Return the fields of a config, or of its class, that can be given; those it works out itself are no options."""
    return [item for item in fields(config) if item.init]


def _checked(model: type[BaseModel], given: Mapping[str, Any]) -> BaseModel:
    """Return the options with their types.

    TOML has no enumerations, sets or dataclasses either: by the rules of JSON, as strict, a text, an array or a table
    stands for one.
    """
    try:
        return model.model_validate(given)
    except ValidationError as refusal:
        try:
            return model.model_validate_json(json.dumps(given))
        except TypeError:  # something that no file can say
            raise refusal from None
        except ValidationError as error:
            # Of a type that Python alone can give, the first one says more.
            raise refusal if any(one["type"] == "needs_python_object" for one in error.errors()) else error from None


@cache
def _model_of(config: type) -> type[BaseModel]:
    """Return a model of the same fields that checks types: strict dataclasses refuse plain options."""
    hints = get_type_hints(config)
    # Under names of our own, as a model has methods, and takes what begins with "_" for private.
    shape: dict[str, Any] = {_OWN + item.name: (hints[item.name], _field(item)) for item in option_fields(config)}
    rules = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)
    return create_model(config.__name__, __config__=rules, **shape)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _field(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return PydanticField(default_factory=item.default_factory, alias=item.name)
    return PydanticField(default=... if item.default is MISSING else item.default, alias=item.name)


def config_digest(config: object) -> str:
    """Return 16 hexadecimal digits that are equal for configs that are written alike, in every process.

    Numbers of another type are written otherwise: 1 is not 1.0.
    """
    return hashlib.sha256(_spelled(config).encode()).hexdigest()[:16]


def _spelled(value: Any) -> str:
    """Return what `repr` says, in an order of its own where equal values may have several: that of a set is a draw."""
    if is_dataclass(value) and not isinstance(value, type):
        value = type(value).__qualname__, [(item.name, getattr(value, item.name)) for item in fields(value)]
    if isinstance(value, Mapping):
        return f"{{{','.join(sorted(f'{_spelled(key)}:{_spelled(value[key])}' for key in value))}}}"
    if isinstance(value, AbstractSet):
        return f"{{{','.join(sorted(map(_spelled, value)))}}}"
    if isinstance(value, list | tuple):
        return f"({','.join(map(_spelled, value))})"
    return repr(value)
