"""Ask constructors, without memory and in a child process, what they refuse: so that a plan can show it.

A constructor of somebody else may hang or crash. Then the plan simply knows less; the run will tell.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from attn_zoo.discovery.import_trial import ask_python, importable
from attn_zoo.discovery.providers import tried_imports
from attn_zoo.errors import UnsupportedError
from attn_zoo.matrix.kinds.all_kinds import kind_of
from attn_zoo.matrix.limits import die_with_parent
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.records import Cell
from attn_zoo.registry import load_file

TIMEOUT_S = 120.0


def probe(items: Sequence[PlannedCell], variant_files: Sequence[str]) -> list[PlannedCell]:
    """Return the items, those that a constructor refuses with the refusal; what takes too long stays as it was."""
    asked = [item.cell.to_dict() for item in items if item.refusal is None and kind_of(item.cell).is_probed(item.cell)]
    if not asked:
        return list(items)
    request = json.dumps({"cells": asked, "variant_files": list(variant_files)})
    environment = importable({**os.environ, **tried_imports()})
    arguments = ["-m", "attn_zoo.matrix.plan.probe", str(os.getpid())]
    try:
        said = ask_python(arguments, environment, TIMEOUT_S, request=request.encode()).stdout
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""  # by then, which counts
    refusals: dict[str, tuple[str, str]] = {}
    for line in said.decode("utf-8", "replace").splitlines():
        try:
            key, capability, reason = json.loads(line)
        except ValueError:
            continue  # something that a variant printed
        refusals[key] = (capability, reason)
    return [replace(item, refusal=refusals[item.cell.key]) if item.cell.key in refusals else item for item in items]


def main() -> None:
    """Build every module on the device that has no memory; print one JSON line for each refusal."""
    die_with_parent(int(sys.argv[1]))
    request = json.load(sys.stdin)
    for path in request["variant_files"]:
        load_file(path, None)
    for data in request["cells"]:
        cell = Cell.from_dict(data)
        try:
            kind_of(cell).build_on_meta(cell)
        except UnsupportedError as error:
            sys.stdout.write(json.dumps([cell.key, error.capability, error.reason]) + "\n")
            sys.stdout.flush()
        except Exception as error:
            # Not every constructor can do without memory; a real failure will show itself in the run.
            sys.stderr.write(f"{cell.id}: {error}\n")
    gc.freeze()  # or the end would look through all that was loaded


if __name__ == "__main__":
    main()
