"""Variants that misbehave on purpose, loaded by `--variant-file`. Up to 800 tokens, so in the gate, all are exact."""

import ctypes
import os
import signal
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_zoo.attention import AbstractAttention, BuildContext
from attn_zoo.attention.oracle import attention_weights
from attn_zoo.errors import UnsupportedError
from attn_zoo.measure import capture
from attn_zoo.metadata import Capabilities, Complexity, Reference
from attn_zoo.registry import register_attention

GATE_LEN = 800


def register(name: str, capabilities: Capabilities | None = None):
    """Register under `name` with harmless claims."""
    return register_attention(
        name,
        capabilities=capabilities
        or Capabilities(bidirectional=True, causal=True, cross_attention=True, key_padding_mask=True, is_exact=True),
        complexity=Complexity(
            time="B H L S D", memory="B H L S", time_exponent=2, memory_exponent=2, sequential_ops="1", max_path="1"
        ),
        reference=Reference(title="Misbehaviour", authors="Tests", year=2026, url="https://example.org"),
    )


def leave_behind() -> None:
    """Start a process that is no child of ours and not in our session."""
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(120)
        os._exit(0)
    os.waitpid(child, 0)


class Plain(AbstractAttention):
    """Plain softmax attention that calls `misbehave` on long inputs."""

    def misbehave(self) -> None:
        """Do nothing."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        if query.shape[-2] > GATE_LEN:
            self.misbehave()
        weights = attention_weights(query, key, is_causal=self.build.is_causal, key_padding_mask=key_padding_mask)
        if key_padding_mask is not None:
            value = value.masked_fill(key_padding_mask[:, None, :, None], 0.0)
        return torch.dropout(weights, self.build.dropout_p, self.training) @ value


@register("fake_ok")
class Fine(Plain):
    """Never misbehaves."""


@register("fake_segfault")
class Segfault(Plain):
    """Reads address 0."""

    def misbehave(self) -> None:
        os.write(1, b"about to read address 0\n")
        ctypes.string_at(0)


@register("fake_abort")
class Abort(Plain):
    """Aborts as a failed assertion in C would."""

    def misbehave(self) -> None:
        os.abort()


@register("fake_hang")
class Hang(Plain):
    """Ignores the polite signal, leaves two processes behind, one of them in a session of its own, and sleeps."""

    def misbehave(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            time.sleep(120)
            os._exit(0)
        leave_behind()
        time.sleep(120)


@register("fake_exit")
class Exit(Plain):
    """Calls sys.exit."""

    def misbehave(self) -> None:
        sys.exit(3)


@register("fake_hard_exit")
class HardExit(Plain):
    """Ends the process as if all were well."""

    def misbehave(self) -> None:
        os._exit(0)


@register("fake_memory_error")
class MemoryFailure(Plain):
    """Asks the host for more memory than there is."""

    def misbehave(self) -> None:
        torch.ones(2**42)


@register("fake_device_memory")
class DeviceMemory(Plain):
    """Raises what CUDA's allocator raises."""

    def misbehave(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


@register("fake_killed")
class Killed(Plain):
    """Is killed from outside, small as it is."""

    def misbehave(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@register("fake_terminated")
class Terminated(Plain):
    """Is asked to end from outside, as a batch system asks all processes of a job."""

    def misbehave(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


@register("fake_bug")
class Bug(Plain):
    """Raises an ordinary exception with control characters in it."""

    def misbehave(self) -> None:
        raise KeyError("\x1b[31mscores")


@register("fake_nan")
class NotANumber(Plain):
    """Returns NaN, always: the gate must see it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        return query * float("nan")


@register("fake_capture")
class Capture(Plain):
    """Leaves the process as the capture of a CUDA graph does that fails."""

    def misbehave(self) -> None:
        capture._num_failed += 1


@register("fake_slow")
class Slow(Plain):
    """Takes a tenth of a second."""

    def misbehave(self) -> None:
        time.sleep(0.1)


@register("fake_waits")
class Waits(Plain):
    """Goes on when it may."""

    def misbehave(self) -> None:
        while not Path(os.environ["FAKE_MARK"]).exists():
            time.sleep(0.02)


@register("fake_loud")
class Loud(Plain):
    """Writes to the standard streams and reads from them, which must not disturb the supervisor."""

    def misbehave(self) -> None:
        sys.stdout.write('{"event": "done", "record": {}}\n')
        os.write(1, b"not json\n")
        assert sys.stdin.read() == ""


@register("fake_half_character")
class HalfCharacter(Plain):
    """Raises text that no file can hold, as a name of a file that is no Unicode has it."""

    def misbehave(self) -> None:
        raise ValueError("\udcff")


@register("fake_scribbler")
class Scribbler(Plain):
    """Writes to every pipe that the process has, one of which is for the answers."""

    answer = b'{"event": "done", "records": [], "verdicts": {}}\n\xff\n'

    def misbehave(self) -> None:
        for descriptor in range(3, 64):
            with suppress(OSError):
                if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                    os.write(descriptor, self.answer)


@register("fake_forger")
class Forger(Scribbler):
    """Answers with what looks like a record."""

    answer = b'{"event": "done", "records": [{"cell": 1}], "verdicts": {}}\n'


@register("fake_lost")
class Lost(Plain):
    """Says that it is at a cell that there is not."""

    def misbehave(self) -> None:
        os.pwrite(int(sys.argv[2]), b"\xff\xff\xff\xff", 0)


class Meddler(Plain):
    """Changes what the process has one of, from the third long call on: warmed up, it meddles with its neighbours."""

    num_calls = 0

    def misbehave(self) -> None:
        self.num_calls += 1
        if self.num_calls > 2:
            self.meddle()

    def meddle(self) -> None:
        """Do nothing."""


@register("fake_threads")
class Threads(Meddler):
    """Takes more threads than the cell says."""

    def meddle(self) -> None:
        torch.set_num_threads(2)


@register("fake_no_grad")
class NoGrad(Meddler):
    """Switches gradients off for whoever comes next."""

    def meddle(self) -> None:
        torch.set_grad_enabled(False)


@register("fake_double")
class Double(Meddler):
    """Changes the default dtype."""

    def meddle(self) -> None:
        torch.set_default_dtype(torch.float64)


@register("fake_chatty")
class Chatty(Plain):
    """Prints 8 MiB in each call."""

    def misbehave(self) -> None:
        sys.stdout.write(("x" * 1023 + "\n") * 2**13)


@register("fake_daemon")
class Daemon(Plain):
    """Leaves a process behind, in a session of its own, that nobody asked for."""

    num_calls = 0

    def misbehave(self) -> None:
        self.num_calls += 1
        if self.num_calls == 1:
            leave_behind()


@register("fake_picky")
class Picky(Plain):
    """Refuses long sequences when it is built."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        if build.max_seq_len > GATE_LEN:
            raise UnsupportedError("max_seq_len", f"at most {GATE_LEN} tokens")
        super().__init__(config, build)


@register("fake_bad_constructor")
class BadConstructor(Plain):
    """Aborts when it is built."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        os.abort()


@register("fake_modest", Capabilities(bidirectional=True, causal=False, cross_attention=False, key_padding_mask=False))
class Modest(Plain):
    """Declares that it can do little."""
