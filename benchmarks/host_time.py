"""What a call costs the host before the device computes: time beside torch's own attention, and what it enqueues.

    python benchmarks/host_time.py                         every variant, on a GPU or, where there is none, on the CPU
    python benchmarks/host_time.py --profile bigbird full  and the functions in which these spend most of it
    python benchmarks/host_time.py --stand-in bigbird      a GPU's path of our Triton kernels without a GPU

On a GPU calls are enqueued and not waited for. On a CPU they have 16 tokens and one thread, so that there is next to
nothing to compute. With the stand-in, a driver for which Triton compiles as for an H100 and which launches nothing,
only torch's own kernels compute; a real driver adds a few microseconds a launch. Calls are replayed
(`kernels/replay.py`) unless ATTN_ZOO_REPLAY is 0, and counted as Python makes them.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import io
import os
import pstats
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from attn_zoo import BuildContext, UnsupportedError, build_attention, build_mixer, list_variants
from attn_zoo.console import print_table
from attn_zoo.kernels import cached_launch
from attn_zoo.kernels.cached_launch import CachedLaunch
from attn_zoo.kernels.gpu_replays import replays_on
from attn_zoo.registry import variants

TORCH = "torch"
ROUNDS, CALLS = 31, 20
QUEUE = 800  # launches that are not waited for: a GPU's queue holds about a thousand, and whoever fills it waits
NOTHING_RUNS = ("empty", "new_empty", "_unsafe_view", "detach", "lift_fresh", "is_same_size")

Call = Callable[[], Any]


class Enqueued(TorchDispatchMode):
    """Counts what is enqueued inside: our Triton launches, torch's operators that run something, and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.kernels: list[str] = []
        self.allocations: list[str] = []

    def __enter__(self) -> Self:
        real = CachedLaunch.__call__

        def launch(kernel: CachedLaunch, *tensors: Tensor | None) -> None:
            self.launches += 1
            real(kernel, *tensors)

        self._patch = patch.object(CachedLaunch, "__call__", launch)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not is_view and not name.startswith(NOTHING_RUNS):
            self.kernels.append(name)
        if not is_view and not any(each.alias_info is not None for each in func._schema.returns):
            self.allocations.append(name)
        return result


_NO_FUNCTION = 0


def _is_replayed() -> bool:
    return os.environ.get("ATTN_ZOO_REPLAY") != "0" and shutil.which(os.environ.get("CXX", "g++")) is not None


@contextmanager
def stand_in() -> Iterator[None]:
    """Let Triton compile for an H100 that is not there and launch nothing, and let calls on the CPU take its path."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compiler
    from triton.runtime import driver

    from attn_zoo.kernels import replay
    from attn_zoo.kernels.blocks import block_attention
    from attn_zoo.kernels.compress import attend, compression
    from attn_zoo.kernels.exact import few_keys_gradient

    class Driver:
        utils: Any = None
        launcher_cls = staticmethod(lambda source, metadata: lambda *given: None)  # noqa: ARG005

        def __init__(self) -> None:
            self.utils = self

        def load_binary(self, *_: object) -> tuple[int, ...]:
            return 1, _NO_FUNCTION, 0, 0, 1024  # module, function, registers, spills, most threads

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _: int) -> int:
            return 0

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

    # In the place of CUDA's launch: it returns its first argument, the function, which as an error means none.
    launch: Any = ctypes.PyDLL(None).labs
    launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    address = ctypes.cast(launch, ctypes.c_void_p).value
    assert address is not None
    with (
        patch.object(cached_launch, "_driver", lambda: launch),
        patch.object(replay, "_are_same", lambda *_: True),  # where nothing computes
        replay.replaying(addresses=(address, address)) if _is_replayed() else nullcontext(),
        patch.object(driver, "_active", Driver()),
        patch.object(compiler, "max_shared_mem", lambda _: 232448),
        patch.object(block_attention, "choose_path", lambda *_, **__: "triton"),
        patch.object(compression, "_choose", lambda *_: "triton"),
        patch.object(attend, "replays_on", lambda _: replay),
        patch.object(block_attention, "replays_on", lambda _: replay),
        patch.object(few_keys_gradient, "why_not", lambda *_: None),
    ):
        yield


def make_calls(name: str, sizes: argparse.Namespace) -> tuple[Call, Call]:
    """Return a call without a graph, and one with backward.

    Raises:
        UnsupportedError: the variant cannot be built so.
    """
    dtype, embed_dim = getattr(torch, sizes.dtype), sizes.num_heads * sizes.head_dim
    is_mixer = name != TORCH and variants[name].attention is None
    heads = (1, sizes.num_heads, sizes.seq_len, sizes.head_dim)
    shapes = [(1, sizes.seq_len, embed_dim)] if is_mixer else [heads] * 3
    inputs = [torch.randn(shape, device=sizes.device, dtype=dtype, requires_grad=True) for shape in shapes]
    plain = [x.detach() for x in inputs]
    upstream = torch.randn_like(plain[0])
    module: Any = scaled_dot_product_attention
    parameters: list[Tensor] = []
    if name != TORCH:
        build = BuildContext(embed_dim=embed_dim, num_heads=sizes.num_heads, max_seq_len=sizes.seq_len)
        module = (build_mixer if is_mixer else build_attention)(name, build).to(sizes.device, dtype)
        parameters = list(module.parameters())
    leaves = [*inputs, *parameters]

    def infer() -> None:
        with torch.no_grad():
            module(*plain)

    def train() -> None:
        torch.autograd.grad(module(*inputs), leaves, upstream)

    return infer, train


def seconds_of(call: Call, num_calls: int, device: str) -> float:
    """Return the host's seconds for one call, of several that are not waited for."""
    clock = time.perf_counter if device == "cuda" else time.thread_time  # a CPU's is not disturbed by others
    start = clock()
    for _ in range(num_calls):
        call()
    elapsed = (clock() - start) / num_calls
    if device == "cuda":
        torch.cuda.synchronize()
    return elapsed


def count(call: Call) -> Enqueued:
    with Enqueued() as enqueued:
        call()
    return enqueued


def most_calls(enqueued: Enqueued) -> int:
    """Return how many such calls are not waited for."""
    return max(1, min(CALLS, QUEUE // (enqueued.launches + len(enqueued.kernels))))


def show(names: Sequence[str], sizes: argparse.Namespace) -> dict[str, tuple[Call, int]]:
    """Print the table; return the calls with backward by name, and how many of each are not waited for."""
    calls: dict[str, tuple[Call, Call]] = {}
    for name in names if sizes.stand_in else (TORCH, *names):
        try:
            calls[name] = make_calls(name, sizes)
            for call in calls[name]:
                call(), call(), call()  # the first compiles, the second may be recorded
        except UnsupportedError as error:
            calls.pop(name, None)
            print(f"{name}: {error.reason}")
    counts = {(name, kind): count(call) for name, pair in calls.items() for kind, call in enumerate(pair)}
    num_calls = {key: most_calls(enqueued) for key, enqueued in counts.items()}
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in counts}
    for _ in range(ROUNDS):  # in turns: the machine's speed changes
        for name, kind in counts:
            seconds[name, kind].append(seconds_of(calls[name][kind], num_calls[name, kind], sizes.device))
    rows = []
    for name in calls:
        row = [name]
        for kind in (0, 1):
            times, enqueued = seconds[name, kind], counts[name, kind]
            beside = zip(times, seconds.get((TORCH, kind), []), strict=not sizes.stand_in)
            ratios = [ours / theirs for ours, theirs in beside]
            what = f"{enqueued.launches} + {len(enqueued.kernels)}, {len(enqueued.allocations)}"
            row += [f"{median(times) * 1e6:.0f}", f"{median(ratios):.1f}" if ratios else "-", what]
        rows.append(row)
    where = "stand-in" if sizes.stand_in else sizes.device
    what = f"{sizes.seq_len} tokens, H = {sizes.num_heads}, D = {sizes.head_dim}, {sizes.dtype}, {where}"
    print_table(f"Host time of a forward, then with backward: {what}", ["", *["us", "of torch", "enqueued"] * 2], rows)
    print("of torch: median of ratios by round. enqueued: Triton launches + torch's operators, allocations.")
    return {name: (pair[1], num_calls[name, 1]) for name, pair in calls.items()}


def print_profile(name: str, call: Call, num_calls: int, device: str) -> None:
    profile, text = cProfile.Profile(), io.StringIO()

    def profiled() -> None:
        with profile:
            call()

    for _ in range(ROUNDS):  # waits for the device between them, which no profile shows as a function's time
        seconds_of(profiled, num_calls, device)
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(15)
    print(f"\n{name}, with backward, {ROUNDS * num_calls} calls\n    ncalls{text.getvalue().partition('ncalls')[2]}")


def main() -> None:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="variant", help="by default all")
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--stand-in", action="store_true", help="Triton's launches without a GPU; on the CPU")
    parser.add_argument("--profile", action="store_true", help="of each, with backward")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--num-heads", type=int)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype")
    sizes = parser.parse_args()
    if sizes.stand_in:
        sizes.device = "cpu"
    is_gpu_path = sizes.stand_in or sizes.device == "cuda"
    sizes.seq_len = sizes.seq_len or (4096 if sizes.device == "cuda" else 1024 if sizes.stand_in else 16)
    sizes.num_heads = sizes.num_heads or (8 if is_gpu_path else 2)
    sizes.dtype = sizes.dtype or ("bfloat16" if is_gpu_path else "float32")
    unknown = set(sizes.names) - set(variants)
    if unknown:
        parser.error(f"no such variant: {', '.join(sorted(unknown))}; there are {', '.join(list_variants())}")
    torch.set_num_threads(1)
    replays = replays_on(sizes.device)
    if replays and (reason := replays.prepare()) is not None:
        print(f"calls are not replayed: {reason}")
    with stand_in() if sizes.stand_in else nullcontext():
        calls = show(sizes.names or list(list_variants()), sizes)
        if sizes.profile:
            for name, (call, num_calls) in calls.items():
                print_profile(name, call, num_calls, sizes.device)


if __name__ == "__main__":
    main()
