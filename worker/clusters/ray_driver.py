"""The only process that connects to a Ray cluster; controlled by worker.clusters.ray.

    python -m worker.clusters.ray_driver ADDRESS NAMESPACE RESOURCE DATA

A run's actors are in a placement group, which Ray creates completely or not at all, each on another
node. Ray restarts none of them.
"""

import os
import sys
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from halfstep.process import close_to_others, end_with_parent
from worker.clusters import ray_pilot
from worker.clusters.placement import PilotStatus
from worker.clusters.ray_calls import Answer, Call, Cancel, Check, Devices, Log, Place, Poll

#: Timeout for the answer of a running actor.
ANSWER_SECONDS = 10.0
#: Prefixes of the placer's variables for pilots; the environment of a node's Ray takes precedence.
PASSED_ON = ("HALFSTEP_", "AWS_", "AZURE_", "GOOGLE_")


class Driver:
    """A connection to the cluster."""

    def __init__(self, address: str, namespace: str, resource: str, data: str) -> None:
        ray.init(address=address, namespace=namespace, log_to_driver=False)
        self._resource = resource
        self._environment = {
            name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)
        } | {"HALFSTEP_DATA": data}
        self._known: dict[str, Any] = {}  # actors by name: Ray forgets the names of dead ones

    def answer(self, call: Call) -> Any:
        """Return the value that a call answers."""
        match call:
            case Place():
                return self._place(call)
            case Poll():
                return self._poll(call.name, call.nodes, call.devices)
            case Cancel():
                return self._cancel(call.name, call.nodes)
            case Log():
                return self._log(call.name, call.nodes)
            case Devices():
                return self._devices()
            case Check():
                return self._check(call.command)

    def _place(self, call: Place) -> None:
        name, nodes, devices = call.name, call.nodes, call.devices
        group = _group(name)
        if group is None:
            bundles = [{self._resource: float(devices)}] * nodes
            group = ray.util.placement_group(
                bundles, strategy="STRICT_SPREAD", name=name, lifetime="detached"
            )
        for node in range(nodes):
            actor = f"{name}-{node}"
            self._known[actor] = (
                ray.remote(ray_pilot.Pilot)
                .options(
                    name=actor,
                    get_if_exists=True,
                    lifetime="detached",
                    max_restarts=0,
                    max_concurrency=4,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, node),
                    **self._resource_options(devices),
                )
                .remote(actor, call.command, self._environment)
            )

    def _poll(self, name: str, nodes: int, devices: int) -> PilotStatus:
        group = _group(name)
        if group is None:
            return PilotStatus("gone", "Ray has no such placement group")
        if not _is_made(group):
            return PilotStatus("waiting", f"Ray: {self._obstacle(nodes, devices)}")
        hosts, ends, missing = self._answers(name, nodes)
        if len(hosts) == nodes:
            return PilotStatus("running", f"Ray actors on {', '.join(sorted(hosts))}")
        if not hosts and not missing:
            ray.util.remove_placement_group(group)
            for node in range(nodes):
                self._known.pop(f"{name}-{node}", None)
            return PilotStatus("gone", f"Ray: {ends[0]}")
        if ends:  # the others wait a while for it, and end
            return PilotStatus("running", f"Ray: {ends[0]}")
        return PilotStatus("waiting", f"Ray starts {', '.join(missing)}")

    def _cancel(self, name: str, nodes: int) -> None:
        """End the run's workers by SIGTERM, and actors that have not started at once."""
        group = _group(name)
        if group is None:
            return
        if not _is_made(group):
            ray.util.remove_placement_group(group)
        for actor in self._actors(name, nodes).values():
            if actor is not None:
                actor.stop.remote()

    def _log(self, name: str, nodes: int) -> str:
        """Return the end of the workers' output, node by node."""
        texts = []
        for actor in filter(None, self._actors(name, nodes).values()):
            with suppress(RayActorError, GetTimeoutError):
                texts.append(str(ray.get(actor.log.remote(), timeout=ANSWER_SECONDS)))
        return "".join(texts)

    def _devices(self) -> list[float]:
        """Return the number of devices of each node that is up."""
        up = (node["Resources"] for node in ray.nodes() if node["Alive"])
        return [float(free.get(self._resource, 0)) for free in up]

    def _check(self, command: list[str]) -> list[str]:
        """Run a command on a node with a free device, and return its output lines."""
        options: dict[str, Any] = {"max_retries": 0, **self._resource_options(1)}
        task = ray.remote(ray_pilot.read_output).options(**options)
        return list(ray.get(task.remote(command, self._environment)))

    def _resource_options(self, devices: int) -> dict[str, Any]:
        own = {"GPU": "num_gpus", "CPU": "num_cpus"}
        if self._resource in own:
            return {"num_cpus": 0, own[self._resource]: devices}
        return {"num_cpus": 0, "resources": {self._resource: devices}}

    def _actors(self, name: str, nodes: int) -> dict[str, Any]:
        """Return a run's actors by name; None for one unknown to Ray."""
        actors = {}
        for node in range(nodes):
            actor = f"{name}-{node}"
            try:
                actors[actor] = self._known[actor] = ray.get_actor(actor)
            except ValueError:
                actors[actor] = self._known.get(actor)
        return actors

    def _answers(self, name: str, nodes: int) -> tuple[list[str], list[str], list[str]]:
        """Query each actor: return hosts of running ones, ends of others, and unresponsive ones."""
        hosts, ends, missing = [], [], []
        answers = {
            actor: handle and handle.poll.remote()
            for actor, handle in self._actors(name, nodes).items()
        }
        waited = [answered for answered in answers.values() if answered]
        if waited:
            ray.wait(waited, num_returns=len(waited), timeout=ANSWER_SECONDS)
        for actor, answer in answers.items():
            try:
                if answer is None:
                    ends.append(f"{actor} is gone")
                else:
                    hosts.append(str(ray.get(answer, timeout=0)))
            except RayActorError as error:
                ends.append(_end(actor, error))
            except GetTimeoutError:
                missing.append(actor)
        return hosts, ends, missing

    def _obstacle(self, nodes: int, devices: int) -> str:
        """Return why a placement group waits."""
        has = self._devices()
        request = f"{nodes} x {devices} {self._resource} on as many nodes"
        if (able := sum(free >= devices for free in has)) < nodes:
            return f"{request} are asked for, and {able or 'none'} of its nodes have as many"
        free = ray.available_resources().get(self._resource, 0)
        return f"{request} are asked for; {free:g} of {sum(has):g} {self._resource} are free"


def _group(name: str) -> PlacementGroup | None:
    try:
        group: PlacementGroup = ray.util.get_placement_group(name)
    except ValueError:
        return None
    return group


def _is_made(group: PlacementGroup) -> bool:
    """Return whether a group has had its devices: a group that loses a node is rescheduled."""
    return bool(ray.util.placement_group_table(group)["state"] != "PENDING")


def _end(actor: str, error: RayActorError) -> str:
    """Return how an actor ended: with its worker, or Ray's error."""
    if "ray.kill" in str(error):
        return f"the worker of {actor} has ended; its log is in placements/{actor}.log there"
    return f"{actor}: {' '.join(str(error).split())}"


def main() -> None:
    """Answer each line of stdin by a line on stdout."""
    # Ends with the placer, also during a call, which may never return.
    end_with_parent()
    close_to_others()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray prints too
    driver: Driver | None = None
    for line in sys.stdin:
        try:
            driver = driver or Driver(*sys.argv[1:])
            answer = Answer(driver.answer(msgspec.json.decode(line, type=Call)))
        except Exception as error:
            text = f"Ray: {type(error).__name__}: {' '.join(str(error).split())}"
            answer = Answer(error=text)
        answers.write(msgspec.json.encode(answer).decode() + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
