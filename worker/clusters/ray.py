"""Pilots as Ray's detached actors, one per node, in an existing cluster.

A process that is connected to a Ray cluster is ended a minute after its head. So this process never
connects: a child does (worker.clusters.ray_driver), which is started again whenever it has ended.
"""

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar, cast

import msgspec

from db.settings import Settings
from worker.clusters.cluster_check import Finding, findings_of_node
from worker.clusters.placement import Pilots, PilotStatus, installation
from worker.clusters.ray_calls import Answer, Call, Cancel, Check, Devices, Log, Place, Poll

ANSWER_SECONDS = 60.0
#: Timeout of a task on a node, which has to be free.
NODE_SECONDS = 300.0
T = TypeVar("T")


class Ray:
    """The cluster of HALFSTEP_RAY_ADDRESS."""

    name = "ray"

    def __init__(self, settings: Settings) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        self._settings = settings
        self._logs = settings.data / "placements"
        self._driver: subprocess.Popen[str] | None = None

    def place(self, pilots: Pilots) -> None:
        """Create a placement group with one actor per node, unless it exists."""
        self._call(
            Place(
                name=pilots.name,
                nodes=pilots.nodes,
                devices=pilots.devices,
                command=pilots.command,
            ),
            type(None),
        )

    def poll(self, pilots: Pilots) -> PilotStatus:
        """Return the state of the actors; resources of an ended run are released."""
        call = Poll(name=pilots.name, nodes=pilots.nodes, devices=pilots.devices)
        return self._call(call, PilotStatus)

    def cancel(self, pilots: Pilots) -> None:
        """Request the actors to send SIGTERM to their workers, with which they end."""
        self._call(Cancel(name=pilots.name, nodes=pilots.nodes), type(None))

    def log(self, pilots: Pilots) -> str:
        """Return the end of the workers' output, as long as their actors are alive."""
        return self._call(Log(name=pilots.name, nodes=pilots.nodes), str)

    def check(self) -> Iterator[Finding]:
        """Report the number of devices, and run the check on one node."""
        address, resource = self._settings.ray_address, self._settings.ray_resource
        devices = self._call(Devices(), list[float])
        if not any(devices):
            text = f"{address} answers, and none of its {len(devices)} nodes has {resource}"
            yield Finding("ray", f"{text}: HALFSTEP_RAY_RESOURCE", is_fine=False)
            return
        has = ", ".join(f"{device:g}" for device in devices if device)
        yield Finding("ray", f"{address} answers; {resource} of its nodes: {has}")
        command = [sys.executable, "-m", "worker.clusters.cluster", "check", "--here", "--json"]
        yield from findings_of_node(self._call(Check(command), list[str], NODE_SECONDS))

    def close(self) -> None:
        """Disconnect; actors continue."""
        if self._driver is not None:
            self._driver.kill()
            self._driver.communicate()
            self._driver = None

    def _call(self, call: Call, kind: type[T], seconds: float | None = None) -> T:
        """Call the driver and return its answer. Raises OSError if it fails."""
        if self._driver is None:
            self._driver = self._start()
        driver = self._driver
        asking, answers = cast("IO[str]", driver.stdin), cast("IO[str]", driver.stdout)
        timer = threading.Timer(seconds or ANSWER_SECONDS, driver.kill)
        timer.start()
        try:
            asking.write(msgspec.json.encode(call).decode() + "\n")
            asking.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            self.close()
            text = f"Ray at {self._settings.ray_address} does not answer; its messages are in"
            raise ConnectionError(f"{text} {self._log}")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error:
            self.close()
            raise OSError(answer.error)
        return msgspec.convert(answer.value, kind)

    def _start(self) -> "subprocess.Popen[str]":
        settings = self._settings
        self._logs.mkdir(parents=True, exist_ok=True)
        known = installation(settings).replace(" ", "-")
        words = [settings.ray_address, known, settings.ray_resource, str(settings.data)]
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "worker.clusters.ray_driver", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is handled by the placer
            )

    @property
    def _log(self) -> Path:
        return self._logs / "ray.log"
