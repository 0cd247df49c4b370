"""Trial of docker-compose.yml with buildah: `make image-test`.

Commands, environments, volumes and health checks are read from that file and from the images, so
the trial is what an engine would do. Run it in a network namespace of its own: the ports are
compose's, and PostgreSQL's is the default one.
"""

import fcntl
import hashlib
import json
import os
import pwd
import re
import secrets
import shlex
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import yaml

from tests.conftest import postgresql_binaries, postgresql_user
from tests.images.builder import BUILDAH, ROOT, buildah
from tests.site import until

SECONDS_OF = {"s": 1, "m": 60}
ENGINES_GRACE_SECONDS = 10.0  # what an engine gives a container without settings of its own


def compose() -> dict[str, Any]:
    """Read the file as compose does: an unset variable has its default.

    The password, which has none, is the trial's own.
    """
    given = {"POSTGRES_PASSWORD": secrets.token_hex(8)} | os.environ
    text = re.sub(
        r"\$\{(\w+):[-?]([^}]*)\}",
        lambda found: given.get(found[1]) or found[2],
        (ROOT / "docker-compose.yml").read_text(),
    )
    read: dict[str, Any] = yaml.safe_load(text)
    return read


SERVICES = compose()["services"]


class Service:
    """A compose service, in a container of its image."""

    def __init__(self, name: str, folder: Path) -> None:
        self.service = SERVICES[name]
        self.image = image_of(name)
        self.container = buildah("from", "--pull=never", f"localhost/halfstep-{name}")
        mounted = {folder / "hosts": "/etc/hosts"}
        for volume in self.service["volumes"]:
            source, target = volume.split(":")
            mounted[folder / source] = target
            # Or buildah would mount a volume of its own there too, now below, now above.
            buildah("config", f"--volume={target}-", self.container)
        environment = self.service["environment"]
        self.options = [
            f"--hostname={name}",
            "--no-hosts",  # buildah's own, which it would mount at the same place
            *(f"--env={key}={value}" for key, value in environment.items()),
            *(f"--volume={source}:{target}" for source, target in mounted.items()),
        ]
        self.log = folder / f"{name}.log"

    def execute(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as `docker compose exec` would."""
        return subprocess.run(
            self._command(*words), capture_output=True, text=True, check=False, timeout=120
        )

    @contextmanager
    def running(self) -> Iterator["Service"]:
        """Run a service's command until the end of the block, unless it is stopped before."""
        words = self.image["Entrypoint"] + shlex.split(self.service["command"])
        with self.log.open("w") as log:
            self.runner = psutil.Popen(
                self._command(*words), stdout=log, stderr=subprocess.STDOUT, text=True
            )
        try:
            yield self
        finally:
            with suppress(psutil.NoSuchProcess):  # it has been stopped
                for process in [*self.runner.children(recursive=True), self.runner]:
                    process.kill()
            self.runner.wait()
            buildah("rm", self.container)

    def is_healthy(self) -> bool:
        """Run the health check of a service's image."""
        kind, *words = self.image["Healthcheck"]["Test"]
        return self.execute(*(["sh", "-c"] if kind == "CMD-SHELL" else []), *words).returncode == 0

    def wait_until_healthy(self) -> None:
        until(lambda: self.runner.poll() is not None or self.is_healthy())
        assert self.runner.poll() is None, self.log.read_text()

    def stop(self) -> int:
        """Stop a service by a signal to its first process, as an engine does; return its exit
        code.
        """
        number = getattr(signal, self.image.get("StopSignal") or "SIGTERM")
        # buildah and its two helpers would not pass it on.
        first = self.runner.children()[0].children()[0].children()[0]
        grace = self.service.get("stop_grace_period")
        seconds = float(grace[:-1]) * SECONDS_OF[grace[-1]] if grace else ENGINES_GRACE_SECONDS
        first.send_signal(number)
        return int(self.runner.wait(seconds))

    def _command(self, *words: str) -> list[str]:
        return [*BUILDAH, "run", *self.options, self.container, "--", *words]


def image_of(name: str) -> dict[str, Any]:
    """Return an image's configuration."""
    result = json.loads(buildah("inspect", "--type", "image", f"localhost/halfstep-{name}"))
    config: dict[str, Any] = result["Docker"]["config"]
    return config


@contextmanager
def database(folder: Path) -> Iterator[None]:
    """Run Debian's PostgreSQL with the version and settings in compose's file."""
    service = SERVICES["database"]
    environment = service["environment"]
    user, password = environment["POSTGRES_USER"], environment["POSTGRES_PASSWORD"]
    owner = pwd.getpwnam(str(postgresql_user()))
    home = folder / "database"
    home.mkdir()
    (home / "password").write_text(password)
    os.chown(home, owner.pw_uid, -1)
    binaries = postgresql_binaries()
    there = {"user": owner.pw_name, "cwd": home, "check": True}
    answer = subprocess.check_output([f"{binaries}/postgres", "--version"], text=True)
    assert f" {service['image'].removeprefix('postgres:')}." in answer
    subprocess.run(
        [
            f"{binaries}/initdb",
            "-D",
            "data",
            "-U",
            user,
            "-A",
            "scram-sha-256",
            "--pwfile=password",
        ],
        stdout=subprocess.DEVNULL,
        **there,
    )
    process = subprocess.Popen(
        [f"{binaries}/postgres", "-D", "data", "-k", home], user=owner.pw_name, cwd=home
    )
    client = {**os.environ, "PGHOST": str(home), "PGPASSWORD": password}
    try:
        kind, *words = service["healthcheck"]["test"]
        assert kind == "CMD"
        until(lambda: subprocess.run(words, env=client, check=False).returncode == 0, seconds=60)
        subprocess.run(["createdb", "-U", user, environment["POSTGRES_DB"]], env=client, check=True)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Yield a folder for volumes that PostgreSQL's user may enter, unlike pytest's folders."""
    with tempfile.TemporaryDirectory(prefix="halfstep-images-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "hosts").write_text(f"127.0.0.1 localhost {' '.join(SERVICES)}\n")
        (folder / "data").mkdir()
        os.chown(folder / "data", 1000, 1000)  # as an engine does: like /data in the image
        yield folder


@pytest.fixture(scope="module")
def services(folder: Path) -> Iterator[dict[str, Service]]:
    """Healthy services: server, worker and PostgreSQL."""
    loopback = struct.pack("16sh14x", b"lo", 1)  # IFF_UP
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, loopback)  # SIOCSIFFLAGS
    with ExitStack() as stack:
        stack.enter_context(database(folder))
        found = {
            name: stack.enter_context(Service(name, folder).running())
            for name in SERVICES
            if name != "database"
        }
        for service in found.values():
            service.wait_until_healthy()
        yield found


def test_server_has_no_torch(services: dict[str, Service]) -> None:
    """The server lacks torch with its dependencies; the worker has both, and the server's
    commands.
    """
    look = "import importlib.util as u; print(*(u.find_spec(n) is not None for n in '{}'.split()))"
    for name, has in (("server", "False"), ("worker", "True")):
        result = services[name].execute("python", "-c", look.format("torch sklearn psutil app"))
        assert result.stdout.split() == [has, has, has, "True"]


def test_services_are_unprivileged(services: dict[str, Service]) -> None:
    """No service runs as root or can change its own code."""
    for service in services.values():
        result = service.execute("sh", "-c", "id -u; touch /opt/halfstep/x 2>/dev/null || echo no")
        assert result.stdout.split() == ["1000", "no"]


def test_nothing_of_this_machine_is_in_the_images(services: dict[str, Service]) -> None:
    """The images contain no trace of this machine's package index."""
    for service in services.values():
        result = service.execute("sh", "-c", "ls /opt; ls /etc/pip.conf; env | grep -c ^PIP_")
        assert result.stdout.split() == ["halfstep", "2"]


def test_health_checks_fail_when_unhealthy(services: dict[str, Service]) -> None:
    """Health checks fail with a wrong port and with another worker's name."""
    elsewhere = {"server": "HALFSTEP_PORT=8001", "worker": "HALFSTEP_WORKER_NAME=other"}
    for name, change in elsewhere.items():
        service = services[name]
        assert service.is_healthy()
        service.options.append(f"--env={change}")
        assert not service.is_healthy()
        service.options.pop()


def test_a_run_trains_and_its_checkpoint_is_whole(services: dict[str, Service]) -> None:
    """A user signs in with the documented command's link, submits digits, and downloads the
    files.
    """
    [documented] = re.findall(
        r"docker compose exec server (halfstep [\w ]+)", (ROOT / "docker-compose.yml").read_text()
    )
    result = services["server"].execute(*documented.split())
    link = re.search(r"(http://\S+)/\?token=(\S+)", result.stdout)
    assert link, result.stderr
    with httpx2.Client(base_url=link[1], follow_redirects=True) as browser:
        signed_in = browser.post("/", data={"token": link[2]}, headers={"Origin": link[1]})
        assert signed_in.url.path == "/runs"
        token = re.search(r'name="csrf_token" value="([^"]+)"', browser.get("/account").text)
        browser.headers["X-CSRF-Token"] = token[1]
        until(
            lambda: any(each["name"] == "digits" for each in browser.get("/api/v1/recipes").json())
        )
        config = {"precision": "fp16", "training": {"steps": 200}}
        submitted = browser.post("/api/v1/runs", json={"recipe": "digits", "config": config})
        assert submitted.status_code == 201, submitted.text
        run = f"/runs/{submitted.json()['id']}"
        until(lambda: browser.get(f"/api/v1{run}").json()["status"] in ("finished", "failed"))
        assert browser.get(f"/api/v1{run}").json()["status"] == "finished"
        files = browser.get(f"/api/v1{run}/checkpoints").json()["checkpoints"]
        assert {each["kind"] for each in files} == {"checkpoint", "weights"}
        for each in files:
            answer = browser.get(f"{run}/checkpoints/{each['id']}/download")
            assert answer.status_code == 200, answer.text
            assert hashlib.sha256(answer.content).hexdigest() == each["sha256"]
        for kind in ("csv", "parquet"):
            assert browser.get(f"/api/v1{run}/export/steps.{kind}").status_code == 200


def test_services_end_cleanly(services: dict[str, Service]) -> None:
    """Each service ends with 0 by the engine's signal, within compose's grace period."""
    for service in services.values():
        began = time.monotonic()
        assert service.stop() == 0, service.log.read_text()
        print(f"stopped in {time.monotonic() - began:.1f} s")
