"""Pilots as Ray's detached actors, one a node, in a cluster that exists.

Who is connected to a Ray cluster ends a minute after its head. So this process never is: a child of
its own is (worker.clusters.ray_driver), which is started anew whenever it is gone.
"""

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from db.settings import Settings
from worker.clusters.cluster_check import Finding, told
from worker.clusters.placement import Look, Pilots, installation

ANSWER_SECONDS = 60.0
#: A node has to be free for a task that looks at it.
NODE_SECONDS = 300.0


class Ray:
    """The cluster that HALFSTEP_RAY_ADDRESS names."""

    name = "ray"

    def __init__(self, settings: Settings) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        self._settings = settings
        self._logs = settings.data / "placements"
        self._driver: subprocess.Popen[str] | None = None

    def place(self, pilots: Pilots) -> None:
        """Create a group of one actor a node, unless there is one."""
        self._ask("place", pilots, devices=pilots.devices, command=pilots.command)

    def look(self, pilots: Pilots) -> Look:
        """Ask which of the actors are up; what a run that is over held in Ray is given back."""
        return Look(**self._ask("look", pilots, devices=pilots.devices))

    def cancel(self, pilots: Pilots) -> None:
        """Have the actors send their workers SIGTERM; they end with these."""
        self._ask("cancel", pilots)

    def log(self, pilots: Pilots) -> str:
        """Return the end of what the workers printed, as long as their actors live."""
        return str(self._ask("log", pilots))

    def check(self) -> Iterator[Finding]:
        """Say how many devices the cluster has, and have a node say what is missing there."""
        address, resource = self._settings.ray_address, self._settings.ray_resource
        devices = self._call("devices")
        if not any(devices):
            text = f"{address} answers, and none of its {len(devices)} nodes has {resource}"
            yield Finding("ray", f"{text}: HALFSTEP_RAY_RESOURCE", is_fine=False)
            return
        has = ", ".join(f"{each:g}" for each in devices if each)
        yield Finding("ray", f"{address} answers; {resource} of its nodes: {has}")
        command = [sys.executable, "-m", "worker.clusters.cluster", "check", "--here", "--json"]
        yield from told(self._call("check", seconds=NODE_SECONDS, command=command))

    def close(self) -> None:
        """Let go of the cluster; what runs there goes on."""
        if self._driver is not None:
            self._driver.kill()
            self._driver.communicate()
            self._driver = None

    def _ask(self, call: str, pilots: Pilots, **words: Any) -> Any:
        return self._call(call, name=pilots.name, nodes=pilots.nodes, **words)

    def _call(self, call: str, seconds: float | None = None, **words: Any) -> Any:
        """Have the driver do something. Raises OSError if it cannot."""
        if self._driver is None:
            self._driver = self._start()
        driver = self._driver
        asking, answers = cast("IO[str]", driver.stdin), cast("IO[str]", driver.stdout)
        timer = threading.Timer(seconds or ANSWER_SECONDS, driver.kill)
        timer.start()
        try:
            asking.write(json.dumps({"call": call, **words}) + "\n")
            asking.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            self.close()
            text = f"Ray at {self._settings.ray_address} does not answer; its own words are in"
            raise ConnectionError(f"{text} {self._log}")
        answer = json.loads(line)
        if "error" in answer:
            self.close()
            raise OSError(answer["error"])
        return answer["value"]

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
                start_new_session=True,  # a Ctrl-C is the placer's
            )

    @property
    def _log(self) -> Path:
        return self._logs / "ray.log"
