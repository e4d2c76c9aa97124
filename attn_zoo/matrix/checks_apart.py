"""Check a variant in a process of its own, which it may crash, end or fill with text: what was found is told."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

from attn_zoo.conformance.check import CheckResult
from attn_zoo.conformance.runner import find_checks, run_checks
from attn_zoo.discovery.import_trial import ask_python, importable
from attn_zoo.discovery.providers import tried_imports
from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.matrix.cell.log import be_patient, last_lines, private_streams
from attn_zoo.matrix.limits import die_with_parent, num_oom_kills
from attn_zoo.matrix.plan.schema import plain_problems
from attn_zoo.registry import load_file, variants

_RAISED = {error.__name__: error for error in (ConfigError, UnsupportedError)}
"""What the other process may raise before a check begins."""


def run_checks_apart(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    device: str = "cpu",
    checks: Iterable[str] | None = None,
    around: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> tuple[list[CheckResult], str]:
    """Return what `run_checks` finds, and the last lines that were printed meanwhile.

    A check during which the process ends has failed; those after it are errors, as they were not made.

    Raises:
        UnknownNameError, ConfigError, UnsupportedError: as `run_checks` does; or an option is not as a file has it.
    """
    if problems := plain_problems(dict(options or {}), "options"):
        raise ConfigError(name, problems)
    selected = find_checks(checks)
    variants[name]  # an unknown name is no finding
    file = variants.plain_file(name)
    request = {
        "name": name,
        "options": None if options is None else dict(options),
        "device": device,
        "checks": [check.name for check in selected],
        "variant_files": [file] if file else [],
    }
    found: list[CheckResult] = []
    num_heard, kills = 0, num_oom_kills()
    with ExitStack() as current:

        def hear(said: bytes) -> None:
            nonlocal num_heard
            lines = said.split(b"\n")[:-1]  # after the last one is what is not whole yet
            for line in lines[num_heard:]:
                ((event, content),) = json.loads(line).items()
                current.close()
                if event == "begins":
                    current.enter_context(around(content))
                elif event == "found":
                    found.append(CheckResult(**content))
                else:
                    kind, fields = content
                    raise _RAISED[kind](**fields)
            num_heard = len(lines)

        arguments = ["-X", "faulthandler", "-m", "attn_zoo.matrix.checks_apart", str(os.getpid())]
        environment = importable({**os.environ, **tried_imports()})
        child = ask_python(arguments, environment, math.inf, request=json.dumps(request).encode(), hear=hear)
    if len(found) < len(selected):
        is_memory = kills is not None and kills != num_oom_kills()
        found.append(_ended(selected[len(found)].name, child.returncode, is_memory))
        not_made = f"not made: the process had ended in {found[-1].check}"
        found += [CheckResult(check=each.name, outcome="error", message=not_made) for each in selected[len(found) :]]
    return found, last_lines(child.stderr)


def _ended(check: str, exit_code: int, is_memory: bool) -> CheckResult:
    if exit_code == -signal.SIGKILL:  # nobody does that to itself
        why = "killed by the operating system, which had no memory left" if is_memory else "killed from outside"
        return CheckResult(check=check, outcome="error", message=f"the process was {why}")
    names = {item.value: item.name for item in signal.Signals}
    how = f"with exit code {exit_code}" if exit_code >= 0 else f"by {names.get(-exit_code, f'signal {-exit_code}')}"
    return CheckResult(check=check, outcome="failed", message=f"ends the process, {how}")


def main() -> None:
    """Answer one request: one JSON line when a check begins, and one when it has found something."""
    die_with_parent(int(sys.argv[1]))
    orders, answers = private_streams()
    be_patient()
    request = json.load(orders)

    def say(event: str, content: object) -> None:
        print(json.dumps({event: content}), file=answers, flush=True)

    @contextmanager
    def around(place: str) -> Iterator[None]:
        say("begins", place)
        yield

    for path in request.pop("variant_files"):
        load_file(path, None)
    list(variants)
    sys.stdout.flush()
    os.lseek(2, 0, os.SEEK_SET)  # what was printed so far was seen where the variant was loaded before
    os.ftruncate(2, 0)
    try:
        run_checks(**request, around=around, tell=lambda result: say("found", asdict(result)))
    except tuple(_RAISED.values()) as error:
        say("raised", (type(error).__name__, vars(error)))
    sys.stdout.flush()
    os._exit(0)  # taking a loaded torch apart takes a fifth of a second, and nothing here needs it


if __name__ == "__main__":
    main()
