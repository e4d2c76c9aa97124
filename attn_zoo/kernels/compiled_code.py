"""What torch's compiler must be told, or its code is wrong on some processors, or silently not taken.

Where it keeps its code: apart for each kind of processor. Its cache of graphs (seen in torch 2.13) holds C++ written
for one width of vectors, and its key does not name that. The key of the libraries compiled from it says
`-march=native`, whatever that was. So a processor with AVX2 that finds graphs of one with AVX-512, in a home that nodes
of a cluster share or on a virtual machine that was moved, computes wrong numbers (FlexAttention on a CPU was off by 3)
or crashes.

How wide its vectors are on a CPU: 256 bits at most. Code for 512 that transposes 16-bit numbers and makes them 32 bits
wide is wrong (seen in torch 2.13 with g++ 12): scores of keys as projections leave them were NaN, and so were gradients
of linear attention and Performer.

How many forms of one function it compiles: what is one more would run as it is written, and a record would still say
compiled.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

MAX_COMPILED = 256
"""Forms of one function: the shapes of a gate, the lengths of a task, all cells of a process. torch stops at 8."""

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_DECIDE = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
"""Lines of /proc/cpuinfo, on x86 and on ARM, that decide what `-march=native` means."""


def _instructions() -> str:
    """Return what this processor understands, as the system says it."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in first.splitlines() if line.partition("\t")[0].rstrip() in _DECIDE)


def keep_compiled_code_apart() -> None:
    """Have torch's compiler keep its code in a folder for this kind of processor, inside the one that the user names.

    Call it before anything is compiled. The choice goes on to the processes that this one starts.
    """
    capability = os.environ.get("ATEN_CPU_CAPABILITY", "")  # narrows what torch uses
    name = "cpu-" + hashlib.sha256(f"{_instructions()}\n{capability}".encode()).hexdigest()[:12]
    # Torch's own default, written out: the module that knows it takes two seconds to load.
    whole = Path(os.environ.get(_VARIABLE) or Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}"))
    if whole.name != name:
        os.environ[_VARIABLE] = str(whole / name)


def keep_vectors_short() -> None:
    """Have torch's compiler write vectors of 256 bits where it would take 512; call it before anything is compiled.

    A width that the user chose stays.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return
    from torch._inductor import config  # takes seconds to load, so only where something is compiled

    if config.cpp.simdlen is None:
        config.cpp.simdlen = 256


def short_vectors_for(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Do so inside, for what computes with numbers of 16 bits only; other code may be as wide as torch takes it."""
    if dtype.itemsize != 2 or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return nullcontext()
    from torch._inductor import config

    patched: AbstractContextManager[object] = config.patch({"cpp.simdlen": config.cpp.simdlen or 256})
    return patched


def allow_compilations() -> None:
    """Let one function be compiled in so many forms as a process may meet; one more is an error."""
    from torch._dynamo import config  # loads the compiler

    config.recompile_limit = max(config.recompile_limit, MAX_COMPILED)
    config.fail_on_recompile_limit_hit = True
