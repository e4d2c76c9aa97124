"""The machine and software of a run: what decides whether two results may be compared, and nothing about a person.

No path, user or host name leaves this file; the host name is hashed so that equal machines can be told apart.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import psutil
import torch

from attn_zoo.measure import energy
from attn_zoo.records import Environment

PACKAGES = (
    "attn-zoo",
    "torch",
    "numpy",
    "scipy",
    "pandas",
    "triton",
    "xformers",
    "flash-attn",
    "flash-linear-attention",
    "datasets",
    "ray",
)
"""Packages whose versions are recorded where they are installed, read from their metadata: nothing is imported."""

MEASURING_VARIABLES = {
    # Threads that spin long while they wait lose their core to any other process and are late at every barrier.
    # BigBird, two cores, H=8, D=64, forward and backward at 4096 tokens in ms, one run each, idle and with one core
    # busy elsewhere: 286 and 5575 at 100 000 rounds; 265 and 1263 at 10 000; 337 and 617 at 1 000. Left alone it is
    # erratic when busy (962 in one run, 13 412 in another). Sleeping at once (OMP_WAIT_POLICY=passive) took 1214
    # instead of 624 at 8192 tokens on an idle machine.
    "GOMP_SPINCOUNT": "10000",
    # Torch asks for huge pages. Memory touched for the first time otherwise costs a fault every 4 KiB, which is no
    # property of a mechanism and grows where tensors leave the cache: without it BigBird took 1.1 times as long from
    # 16 384 tokens on, 1.16 times forward at 131 072, and the same at 8192 (two cores, in turns).
    "THP_MEM_ALLOC_ENABLE": "1",
    # What is freed stays in the process, as on a GPU in torch's allocator. Else large tensors are given back to the
    # system and touched for the first time in every call, which on a virtual machine can cost more than to compute them
    # (2.5 ms for 2 MiB, seen on one whose host takes free memory back). There BigBird took 1.14 times as long without,
    # 1.25 times with backward at 65 536 tokens, and torch's kernel at 8192 the same. Before memory is measured, what is
    # free is given back.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
"""What processes that measure on a CPU are started with; see `measuring_variables`."""

_THREAD_VARIABLES = frozenset({"OMP_NUM_THREADS", "MKL_NUM_THREADS"})
"""Either decides torch's threads, so that where one is set the other is left alone too."""

_VARIABLES = frozenset(
    {
        *MEASURING_VARIABLES,
        "OMP_NUM_THREADS",
        "OMP_PROC_BIND",
        "OMP_PLACES",
        "OMP_WAIT_POLICY",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_LAUNCH_BLOCKING",
        "ATEN_CPU_CAPABILITY",
        "ATTN_ZOO_REPLAY",
        "CUDA_MODULE_LOADING",
        "CUBLAS_WORKSPACE_CONFIG",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    }
)
_PREFIXES = ("MKL_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_", "MALLOC_", "NVIDIA_TF32_")
_CGROUPS = Path("/sys/fs/cgroup")
_MAX_VALUE_LEN = 100
_GIT_TIMEOUT_S = 5.0


def _bound_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _container_share() -> float:
    """Return how many processors' time this container may have, infinity where nothing limits it."""
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):  # versions 2 and 1
        try:
            words = " ".join((_CGROUPS / name).read_text() for name in names).split()
        except OSError:
            continue
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):  # else "max", or -1
            return int(words[0]) / int(words[1])
    return math.inf


def num_cores() -> int:
    """Return the processors that this process may use: those it is bound to, as far as its container's share goes.

    With more threads than that, the kernel stops them all for a part of every tenth of a second.
    """
    return max(1, int(min(_bound_cores(), _container_share())))


def measuring_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of processes that measure: what `environ` leaves open is chosen here.

    OpenMP counts the processors that a process is bound to and does not know a container's share.
    """
    is_open = num_cores() < _bound_cores() and not _THREAD_VARIABLES & set(environ)
    threads = dict.fromkeys(_THREAD_VARIABLES, str(num_cores())) if is_open else {}
    return {**MEASURING_VARIABLES, **threads, **environ}


def _threads() -> int:
    """Return the threads of torch in a process that measures, which this one may not be."""
    is_open = not _THREAD_VARIABLES & set(os.environ)
    return min(torch.get_num_threads(), num_cores()) if is_open else torch.get_num_threads()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(names, "") or platform.processor() or platform.machine()


def _driver() -> str | None:
    """Return the version of the NVIDIA driver, from the kernel module or else from NVML."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        words = []
    numbers = [word for word in words if word[0].isdigit() and "." in word]
    return numbers[0] if numbers else energy.driver_version()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    versions["torch"] = str(torch.__version__)  # with the local part, which tells a CPU build from a CUDA one
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    if torch.cuda.is_available() and (cudnn := cudnn_version()) is not None:
        versions["cudnn"] = cudnn
    return versions


def cudnn_version() -> str | None:
    """Return cuDNN's version, torch's words where it refuses the one it finds, or None where there is none."""
    try:
        version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # another copy comes first on the library path
        return str(error).partition(". ")[0]
    return None if version is None else str(version)


def _git(folder: Path, *command: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _commit(folder: Path) -> tuple[str, bool]:
    """Return the commit of the sources in `folder` and whether they differ from it.

    An installed copy may lie inside somebody else's checkout (a virtual environment in a project): only sources that
    git tracks have a commit.
    """
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return "", False
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return "", False
    return commit, bool(_git(folder, "status", "--porcelain", "--", "."))


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables on the allow-list, without values that look like paths or are long."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name in _VARIABLES or name.startswith(_PREFIXES))
        and not ("/" in value or "\\" in value or value.startswith("~"))
        and len(value) <= _MAX_VALUE_LEN
    }


def hashed_host() -> str:
    """Return what stands for the name of this machine in records."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]


def capture_environment() -> Environment:
    """Describe this machine and the software in this process. Takes a fraction of a second; call it once for a run."""
    commit, is_dirty = _commit(Path(__file__).resolve().parent.parent)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    gpu = None if device is None else torch.cuda.get_device_properties(device)
    return Environment(
        host=hashed_host(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_name(),
        num_cores=num_cores(),
        memory_bytes=psutil.virtual_memory().total,
        threads=_threads(),
        gpu=None if gpu is None else gpu.name,
        gpu_memory_bytes=None if gpu is None else gpu.total_memory,
        gpu_power_limit_w=None if device is None else energy.power_limit_w(device),
        driver=None if gpu is None else _driver(),
        versions=_versions(),
        commit=commit,
        is_dirty=is_dirty,
        variables=_variables(measuring_variables(os.environ)),
    )
