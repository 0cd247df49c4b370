"""The engine: launches supervisors as processes and adopts them after a restart.

They are forked from a fork server that has loaded their modules, or started as programs. A
supervisor is named after its run and attempt; it outlives the worker that launched it, and is
never launched twice.
"""

import hmac
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from halfstep.fork_server import Forked, ForkFailed, ForkServer, Request, current_umask
from halfstep.process import read_start_ticks

logger = logging.getLogger(__name__)


class AlreadyLaunched(RuntimeError):
    """This attempt has or had a supervisor: it is never started a second time."""


@dataclass(frozen=True)
class Handle:
    """A launched supervisor, distinguished by all fields from a later process with its pid."""

    pid: int
    started_ticks: int  # clock ticks since the machine's boot
    boot_id: str

    def as_dict(self) -> dict[str, object]:
        """Return the handle as JSON."""
        return asdict(self)


class SubprocessEngine:
    """Launches supervisors as processes, each in its own session."""

    def __init__(self, key: bytes, server: ForkServer | None = None) -> None:
        """key: signs handles, since a run can write to their folder.

        server: forks supervisors; None: they are started as programs.
        """
        self._key, self._server = key, server
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def launch(
        self,
        folder: Path,
        attempt: int,
        argv: list[str],
        env: dict[str, str],
        training: socket.socket | None = None,
    ) -> Handle:
        """Start the supervisor of an attempt. Raises AlreadyLaunched.

        training: passed to a forked supervisor, for the fork of its training.
        """
        folder.mkdir(parents=True, exist_ok=True)
        claim = folder / f"supervisor-{attempt}.json"
        log = folder / f"supervisor-{attempt}.log"
        try:
            claim.touch(exist_ok=False)
        except FileExistsError as error:
            raise AlreadyLaunched(f"{claim} exists: attempt {attempt} was launched") from error
        # A run without a sandbox may have made it a link.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        environment = {**os.environ, **env}
        with os.fdopen(os.open(log, flags, 0o600), "wb") as output:
            if forked := self._fork(argv, environment, output.fileno(), training):
                handle = self._write_handle(claim, folder, attempt, forked.pid)
                try:
                    forked.begin()
                    forked.release()
                    return handle
                except ForkFailed as error:
                    logger.warning("a supervisor starts without the fork server: %s", error)
            process = subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is handled by the worker
            )
        self._children[process.pid] = process
        return self._write_handle(claim, folder, attempt, process.pid)

    def _fork(
        self,
        argv: list[str],
        environment: dict[str, str],
        output: int,
        training: socket.socket | None,
    ) -> Forked | None:
        """Have a supervisor forked, which waits to begin; None without a fork server."""
        if self._server is None:
            return None
        request = Request(argv[2:], environment, str(Path.cwd()), current_umask())
        files = [output, output, *([training.fileno()] if training else [])]
        try:
            return Forked(self._server.connect(), request, files)
        except ForkFailed as error:
            logger.warning("a supervisor is started as a program: %s", error)
            if not self._server.is_ready:
                self.close()
            return None

    def _write_handle(self, claim: Path, folder: Path, attempt: int, pid: int) -> Handle:
        handle = Handle(pid, read_start_ticks(pid) or 0, _boot_id())
        signature = self._signature(folder, attempt, handle)
        claim.write_text(json.dumps(handle.as_dict() | {"signature": signature}))
        return handle

    def _signature(self, folder: Path, attempt: int, handle: Handle) -> str:
        content = json.dumps([str(folder.resolve()), attempt, handle.as_dict()], sort_keys=True)
        return hmac.digest(self._key, content.encode(), "sha256").hex()

    def adopt(self, folder: Path, attempt: int) -> Handle:
        """Return the supervisor that an earlier worker launched, dead or alive.

        A handle without this worker's signature is ignored: it may name any process.
        """
        try:
            content = json.loads((folder / f"supervisor-{attempt}.json").read_text())
            signature = content.pop("signature")
            handle = Handle(**content)
            if hmac.compare_digest(signature, self._signature(folder, attempt, handle)):
                return handle
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass  # it never came to a launch, or the run's recipe wrote over it
        return Handle(pid=0, started_ticks=0, boot_id="")

    def is_alive(self, handle: Handle) -> bool:
        """Return whether the supervisor runs."""
        if child := self._children.get(handle.pid):
            return child.poll() is None
        return handle.boot_id == _boot_id() and handle.started_ticks == read_start_ticks(handle.pid)

    def signal(self, handle: Handle, number: signal.Signals) -> None:
        """Send a signal to the supervisor, if it runs."""
        if self.is_alive(handle):
            os.kill(handle.pid, number)

    def close(self) -> None:
        """End the fork server; supervisors are not affected."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def release(self, handle: Handle) -> None:
        """Forget a supervisor that has ended."""
        self._children.pop(handle.pid, None)


def key_in(folder: Path) -> bytes:
    """Return this worker's key, created at the first call; a sandboxed run cannot read it."""
    path = folder / "supervisors.key"
    made = path.with_name(f".supervisors.key.{os.getpid()}")
    try:
        made.write_bytes(secrets.token_bytes(32))
        made.chmod(0o600)
        os.link(made, path)  # whole from the start
    except FileExistsError:
        pass
    finally:
        made.unlink(missing_ok=True)
    return path.read_bytes()


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
