"""A Ray of a test's own, over machines of its own: a head without devices, and nodes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.clusters.machines import Machine, machines
from tests.site import Site, until

RAY = Path(sys.executable).with_name("ray")
PORT = 6379
OBJECT_STORE_BYTES = 80_000_000  # the least that Ray takes


class Cluster:
    """Its machines; the first is the head's."""

    def __init__(self, made: list[Machine]) -> None:
        self.head, self.nodes = made[0], made[1:]

    @property
    def address(self) -> str:
        """Where it is reached from outside."""
        return f"ray://{self.head.address}:10001"

    def start(self) -> None:
        self.head.start(
            _start(self.head, f"--head --num-cpus=0 --port={PORT} --include-dashboard=false")
        )
        until(lambda: _has_started(self.head))
        for node in self.nodes:
            node.start(_start(node, f"--address={self.head.address}:{PORT} --num-cpus=1"))
        until(lambda: all(map(_has_started, self.nodes)))


def _start(machine: Machine, words: str) -> str:
    """Return what a machine is for: a part of Ray, which finds a /tmp/ray of its own."""
    own = machine.data / "ray"
    own.mkdir(exist_ok=True)
    options = f"--disable-usage-stats --object-store-memory={OBJECT_STORE_BYTES}"
    return (
        f"mkdir -p /tmp/ray; mount --bind {own} /tmp/ray; {RAY} start {words} {options} "
        f"--node-ip-address={machine.address} >{own}/out 2>&1; "
        "exec sleep infinity"  # which stays when Ray's daemons have gone
    )


def _has_started(machine: Machine) -> bool:
    path = machine.data / "ray" / "out"
    printed = path.read_text() if path.exists() else ""
    assert "Error: " not in printed, printed
    return "Ray runtime started" in printed


@contextmanager
def ray_cluster(site: Site, folder: Path, nodes: int = 2) -> Iterator[Cluster]:
    with machines(site, folder, nodes + 1) as made:
        cluster = Cluster(made)
        cluster.start()
        yield cluster
