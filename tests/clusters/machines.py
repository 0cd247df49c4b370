"""Machines for tests: network namespaces on a bridge, each a host with its own processes.

Each has its own hostname, disk folder and process ids, so that it can be cut off or switched off as
a whole. Database and bucket are on the host that all of them reach over the bridge.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import make_url

from tests.site import GATED, SECONDS, Site

NET = "10.213.77"
PORT = 5432
LEASE_SECONDS = 12
WORKER = f"exec {sys.executable} -m worker.worker"


def can_make_machines() -> bool:
    """Return whether machines can be created here, which needs root and iproute2."""
    tried = subprocess.run(["ip", "netns", "list"], capture_output=True, check=False)
    return os.geteuid() == 0 and tried.returncode == 0


class Machine:
    """A host whose first process is its worker; with it all others end."""

    def __init__(self, site: Site, folder: Path, number: int) -> None:
        self.site, self.number = site, number
        self.name = f"m{number}"
        self.namespace = f"halfstep-{os.getpid()}-{number}"
        self.link = f"hs{os.getpid() % 100000}v{number}"
        self.data = folder / self.name
        self.data.mkdir()
        self.process: subprocess.Popen[bytes] | None = None

    def connect(self, bridge: str) -> None:
        ip("netns", "add", self.namespace)
        ip(
            "link",
            "add",
            self.link,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            self.namespace,
        )
        ip("link", "set", self.link, "master", bridge, "up")
        self.inside("addr", "add", f"{self.address}/24", "dev", "eth0")
        self.inside("link", "set", "eth0", "up")
        self.inside("link", "set", "lo", "up")

    @property
    def address(self) -> str:
        return f"{NET}.{10 + self.number}"

    def inside(self, *words: str) -> None:
        ip("-n", self.namespace, *words)

    def start(self, command: str = WORKER, **environment: str) -> None:
        """Start the machine with its worker, or with another command."""
        url = make_url(self.site.url).set(host=f"{NET}.1", port=PORT, query={})
        own = {
            **self.site.environment,
            "HALFSTEP_DATABASE_URL": url.render_as_string(hide_password=False),
            "HALFSTEP_DATA": str(self.data),
            "HALFSTEP_STORAGE_URL": f"file://{self.site.data / 'bucket'}",
            "HALFSTEP_RECIPES": GATED,
            "HALFSTEP_GATE": str(self.site.gate),
            "HALFSTEP_TEST_TRACE": str(self.site.data / "trace"),
            "HALFSTEP_LEASE_SECONDS": str(LEASE_SECONDS),
            **environment,
        }
        separate = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        first = f"hostname {self.name}; {command}"
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *separate, "sh", "-c", first],
            env={**os.environ, **own},
        )

    def cut(self) -> None:
        """Disconnect the machine from the network."""
        ip("link", "set", self.link, "down")

    def mend(self) -> None:
        ip("link", "set", self.link, "up")

    def switch_off(self) -> None:
        """End all processes of the machine at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(SECONDS)

    @property
    def is_on(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def remove(self) -> None:
        self.switch_off()
        ip("netns", "del", self.namespace)
        ip("link", "del", self.link, check=False)


def ip(*words: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert not (check and done.returncode), (words, done.stderr)


@contextmanager
def machines(site: Site, folder: Path, count: int) -> Iterator[list[Machine]]:
    """Yield hosts that reach the site's PostgreSQL over a bridge."""
    bridge = f"hs{os.getpid() % 100000}br"
    (site.data / "bucket").mkdir(exist_ok=True)
    ip("link", "add", bridge, "type", "bridge")
    made = [Machine(site, folder, number) for number in range(count)]
    try:
        ip("addr", "add", f"{NET}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for machine in made:
            machine.connect(bridge)
        path = f"{make_url(site.url).query['host']}/.s.PGSQL.5432"
        words = [sys.executable, "-m", "tests.clusters.forward", f"{NET}.1", str(PORT), path]
        with subprocess.Popen(words) as forward:
            try:
                yield made
            finally:
                forward.terminate()
    finally:
        for machine in made:
            machine.remove()
        ip("link", "del", bridge)
