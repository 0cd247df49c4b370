"""A Ray for tests over several machines: a head without devices, and nodes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.clusters.machines import Machine, machines
from tests.site import Site, until

RAY = Path(sys.executable).with_name("ray")
PORT = 6379
OBJECT_STORE_BYTES = 80_000_000  # the least that Ray takes


class Cluster:
    """Machines of a Ray cluster, of which the first is the head."""

    def __init__(self, made: list[Machine]) -> None:
        self.head, self.nodes = made[0], made[1:]

    @property
    def address(self) -> str:
        """The address of the cluster for other machines."""
        return f"ray://{self.head.address}:10001"

    def start(self, beside: str, **environment: str) -> None:
        head = f"--head --num-cpus=0 --port={PORT} --include-dashboard=false"
        self.head.start(_command(self.head, head, beside), **environment)
        until(lambda: _has_started(self.head))
        for node in self.nodes:
            node.start(_command(node, f"--address={self.head.address}:{PORT} --num-cpus=1"))
        until(lambda: all(map(_has_started, self.nodes)))

    def kill_head(self) -> None:
        """Kill the head's process, which has the cluster's state; its machine stays."""
        [process] = self._processes("gcs_server", [self.head])
        process.kill()

    @property
    def is_there(self) -> bool:
        """Return whether a process of Ray is still running on a node."""
        return bool(self._processes("raylet", self.nodes))

    def _processes(self, name: str, machines: list[Machine]) -> list[psutil.Process]:
        addresses = tuple(machine.address for machine in machines)
        return [
            process
            for process in psutil.process_iter(["name", "cmdline"])
            if process.info["name"] == name
            and any(word.endswith(addresses) for word in process.info["cmdline"] or ())
        ]


def _command(machine: Machine, words: str, beside: str = "sleep infinity") -> str:
    """Return a machine's command: a part of Ray with its own /tmp/ray.

    The machine outlives Ray's daemons.
    """
    own = machine.data / "ray"
    own.mkdir()
    options = f"--disable-usage-stats --object-store-memory={OBJECT_STORE_BYTES}"
    return (
        f"mkdir -p /tmp/ray; mount --bind {own} /tmp/ray; {RAY} start {words} {options} "
        f"--node-ip-address={machine.address} >{own}/out 2>&1; exec {beside}"
    )


def _has_started(machine: Machine) -> bool:
    path = machine.data / "ray" / "out"
    printed = path.read_text() if path.exists() else ""
    assert "Error: " not in printed, printed
    return "Ray runtime started" in printed


@contextmanager
def ray_cluster(
    site: Site, folder: Path, beside: str = "sleep infinity", **environment: str
) -> Iterator[Cluster]:
    """Start a head and two nodes.

    beside: another command for the head's machine, and its environment.
    """
    with machines(site, folder, 3) as made:
        cluster = Cluster(made)
        cluster.start(beside, **environment)
        yield cluster
