"""A Ray cluster: one agent, a Ray actor, for each device that is timed on, more where trainings share one.

Ray reaches nodes, starts agents, carries what they say and notices when one is gone. What each of them does next is
decided in `dispatch`. An agent holds what its cells need of a node's processors and GPUs, so that nothing else that
asks Ray for them runs beside a timing. Where any node offers a `timing_slot` (`ray start --resources`), timings go to
such nodes only.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attn_zoo
from attn_zoo.discovery.own_files import own_files
from attn_zoo.discovery.providers import tried_imports
from attn_zoo.errors import ConfigError, UnsupportedError, first_line
from attn_zoo.matrix.cell.tracking import VARIABLE
from attn_zoo.matrix.drive.engines.dispatch import Cluster, Dispatcher, Event, Machine, Place
from attn_zoo.matrix.drive.engines.node_agent import package_digest
from attn_zoo.matrix.drive.supervise import Lane
from attn_zoo.matrix.drive.worker_pool import Control, Settings

SLOT = "timing_slot"

CONNECT_S = 45.0
"""An address that does not answer by then is given up; Ray itself would go on trying for minutes."""

_PROBE_S = 10.0
_ANSWER_S, _LEAVE_S = 30.0, 5.0


class _RayCluster(Cluster):
    """Agents by Ray."""

    def __init__(self, ray: Any, settings: Settings) -> None:
        self._ray = ray
        self._actor = ray.remote(_actor())
        self._hellos: dict[Any, Any] = {}  # agents by the reference of their answer
        self._streams: list[tuple[Any, Any]] = []  # generator of answers, agent
        self._farewells: dict[Any, Any] = {}  # agents that are to end, likewise
        files, loaded = _sources(settings.variant_files)
        data_dir = str(settings.data_dir.resolve()) if settings.data_dir else None
        self._arguments = (str(Path(attn_zoo.__path__[0]).parent), ray.put(files), loaded, data_dir)
        self._package = package_digest()
        told = tried_imports()
        if VARIABLE in os.environ:
            told[VARIABLE] = os.environ[VARIABLE]
        self._runtime = {"env_vars": told} if told else None

    def machines(self) -> list[Machine]:
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        has_slots = any(SLOT in node["Resources"] for node in nodes)
        return [
            Machine(
                id=node["NodeID"],
                name=f"{node['NodeManagerHostname']} ({node['NodeID'][:6]})",
                num_cpus=node["Resources"].get("CPU", 0.0),
                num_gpus=node["Resources"].get("GPU", 0.0),
                may_time=not has_slots or SLOT in node["Resources"],
            )
            for node in nodes
        ]

    def start(self, machine: Machine, place: Place) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        num_cpus, num_gpus = place.share(machine)
        agent = self._actor.options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_concurrency=2,  # it can be asked to stop while it works
            max_restarts=0,
            max_task_retries=0,  # the dispatcher knows what is left to do
            runtime_env=self._runtime,
            scheduling_strategy=NodeAffinitySchedulingStrategy(machine.id, soft=False),
        ).remote(*self._arguments, place.room(machine), self._package)
        self._hellos[agent.hello.remote()] = agent
        return agent

    def give(self, agent: Any, turn: Mapping[str, Any]) -> None:
        self._streams.append((agent.work.options(num_returns="streaming").remote(turn), agent))

    def events(self, wait_s: float) -> Iterator[tuple[Any, Event]]:
        self.close(0)
        waiting = [*self._hellos, *(stream for stream, _ in self._streams)]
        if not waiting:
            time.sleep(wait_s)
            return
        if not self._ray.wait(waiting, num_returns=1, timeout=wait_s)[0]:
            return
        for one in self._ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]:
            if one in self._hellos:
                yield self._hellos.pop(one), self._answer(one)
                continue
            for stream, agent in self._streams:
                if stream is one:
                    try:
                        yield agent, self._answer(next(one))
                    except StopIteration:  # after "done"
                        self._streams = [pair for pair in self._streams if pair[0] is not one]
                    break

    def _answer(self, reference: Any) -> Event:
        try:
            event: Event = self._ray.get(reference, timeout=_ANSWER_S)
        except self._ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [""]
            reason = f"{type(error).__name__}: {lines[-1] or lines[0]}"
            return {"event": "lost", "reason": reason, "was_memory": "low on memory" in str(error)}
        return event

    def stop(self, agent: Any) -> None:
        agent.stop.remote()

    def end(self, agent: Any) -> None:
        is_ready = agent not in self._hellos.values()
        self._hellos = {reference: other for reference, other in self._hellos.items() if other is not agent}
        self._streams = [(stream, other) for stream, other in self._streams if other is not agent]
        if is_ready:
            self._farewells[agent.close.remote()] = agent
        else:
            self._ray.kill(agent)

    def close(self, wait_s: float = _LEAVE_S) -> None:
        """End agents that have tidied up, or had the time to."""
        if self._farewells:
            leaving = list(self._farewells)
            done = self._ray.wait(leaving, num_returns=len(leaving), timeout=wait_s)[0]
            for reference in done if wait_s == 0 else leaving:
                self._ray.kill(self._farewells.pop(reference))

    def wish(self, shares: Sequence[tuple[float, float]]) -> None:
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=[{"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus} for cpus, gpus in shares])

    def can_grow(self) -> bool:
        with suppress(Exception):  # Ray promises nothing of this
            from ray.autoscaler.v2.utils import is_autoscaler_v2
            from ray.experimental.internal_kv import _internal_kv_get

            if is_autoscaler_v2():
                return True
            report = json.loads(_internal_kv_get("__autoscaling_status"))["autoscaler_report"]
            # Without an autoscaler, each node is a type of its own.
            return any(name != f"node_{node}" for node, name in report["node_type_mapping"].items())
        return False


def _actor() -> type:
    """Return the class of agents: a local one, as Ray sends its code then, and nothing of this package is loaded first.

    Its processes must be set right before they load torch: Ray gives OpenMP as many threads as an actor has processors.
    """

    class Agent:
        def __init__(self, root: str, *arguments: Any) -> None:
            import sys

            import psutil

            if os.path.isdir(root):  # noqa: PTH112 - works from the source tree too, without an installed package
                sys.path.insert(0, root)

            if "OMP_NUM_THREADS" not in psutil.Process().environ():  # as it was started
                os.environ.pop("OMP_NUM_THREADS", None)
            from attn_zoo.matrix.drive.engines.node_agent import NodeAgent

            self._agent = NodeAgent(*arguments)

        def hello(self) -> Event:
            return self._agent.hello()

        def work(self, turn: Mapping[str, Any]) -> Iterator[Event]:
            yield from self._agent.work(turn)

        def stop(self) -> None:
            self._agent.stop()

        def close(self) -> None:
            self._agent.close()

    return Agent


def _sources(variant_files: Sequence[str]) -> tuple[dict[str, bytes], list[str]]:
    """Return what nodes need of plain files and of what these import from beside them, and which are to be loaded.

    Files of one name stay apart: each has a folder of its own.
    """
    files: dict[str, bytes] = {}
    loaded = []
    for index, path in enumerate(variant_files):
        source = Path(path).resolve()
        files |= {f"{index}/{name}": file.read_bytes() for name, file in own_files(source).items()}
        loaded.append(f"{index}/{source.name}")
    return files, loaded


class RayEngine:
    """Runs lanes on a Ray cluster.

    Args:
        address: of a running cluster; `"local"` starts one on this machine for the run.
        jobs: trainings at once on one GPU, or on the processors of one node.

    Raises:
        ConfigError: no address of a cluster.
        UnsupportedError: Ray is not installed, or cannot be loaded.
    """

    is_remote = True

    def __init__(self, address: str = "local", jobs: int = 1) -> None:
        if address.startswith("ray://"):
            text = f"expected HOST:PORT of a head node, seen from one of its nodes; got {address!r}, Ray's client"
            raise ConfigError("--address", [("", text)])
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere unless the user says so
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own is 15: what measures would wait for all others
        if address == "local" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
            # Else Ray writes one into the home folder, and clusters started there later ask for it.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        try:
            import ray

            self._ray: Any = ray
            _ = ray.init, ray.wait, ray.exceptions.RayError  # of a broken installation, some may be missing
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise _broken(error) from None
            raise UnsupportedError("ray", "the ray engine needs Ray: pip install 'attn-zoo[ray]'") from None
        except Exception as error:
            raise _broken(error) from None
        if address != "local":
            _probe(address)
        self.jobs, self._address = jobs, address

    def run(self, lanes: Sequence[Lane], settings: Settings, control: Control) -> None:
        """Run all lanes; arguments as in `LocalEngine.run`.

        Raises:
            UnsupportedError: the cluster cannot be reached, or none of its nodes be used.
        """
        if not lanes:
            return
        self._connect()
        try:
            cluster = _RayCluster(self._ray, settings)
            Dispatcher(cluster, lanes, settings, control, jobs=self.jobs).run()
            cluster.close()
        finally:
            self._ray.shutdown()

    def _connect(self) -> None:
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        if self._address == "local":
            # The path must be explicit: after an unclean stop Ray would look for the old cluster. Not in a thread, as
            # the kernel ends the processes of Ray with the thread that started them.
            is_main = threading.current_thread() is threading.main_thread()
            handler = signal.getsignal(signal.SIGTERM)
            self._ray.init(address="local", include_dashboard=False, **quiet)
            if is_main:
                signal.signal(signal.SIGTERM, handler)  # Ray took it
            return
        outcome: list[BaseException | None] = []

        def connect() -> None:
            try:
                self._ray.init(address=self._address, **quiet)
                outcome.append(None)
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=connect, daemon=True)  # it can be left behind
        thread.start()
        thread.join(CONNECT_S)
        if not outcome:
            hint = "is it a Ray cluster of the same version, and RAY_AUTH_TOKEN that of the cluster?"
            raise UnsupportedError("ray", f"{self._address} did not answer within {CONNECT_S:g} s: {hint}")
        if (error := outcome[0]) is not None:
            hint = ""
            if "Authentication" in repr(error.__cause__):
                hint = (
                    "; it wants its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN if ~/.ray/auth_token is another"
                )
            text = f"{self._address}: {type(error).__name__}: {first_line(error)}{hint}"
            raise UnsupportedError("ray", text) from None


def _broken(error: Exception) -> UnsupportedError:
    return UnsupportedError("ray", f"Ray is installed but cannot be loaded ({type(error).__name__}: {error})")


def _probe(address: str) -> None:
    """Raise `UnsupportedError` if nothing listens at HOST:PORT; other forms of an address are left to Ray."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise UnsupportedError("ray", f"nothing answers at {address}: {error}") from None
