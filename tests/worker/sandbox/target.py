"""A worker with secrets, attacked by runs of a malicious user.

The secrets are random texts, so a test finds one wherever the service may have put it.
"""

import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import pytest

from db.access import accounts
from db.database import Database
from db.queue import workers
from db.runs import environments
from db.tables import Run, RunEnvironment, User
from halfstep import sandbox
from tests.db.conftest import submit_command
from tests.site import SECONDS, Site, is_running, until

#: Programs that runs execute; they lie where every user can read them.
PROGRAMS = Path(__file__).with_name("attacks")
#: How the worker runs: as root, as another user without privileges, as root with run users.
ROOT, PLAIN, RUN_USERS = KINDS = ("root", "plain", "run_users")
DEVICES = 5  # one of them is the victim's


def attacked(kind: str, *marks: pytest.MarkDecorator) -> Any:
    """Parametrize a test by a kind of worker; one process attacks all workers of a kind."""
    return pytest.param(kind, marks=[pytest.mark.xdist_group(f"{kind} worker"), *marks])


def worker_kind(kind: str) -> pytest.MarkDecorator:
    """Attack this kind of worker in `make test`, and the others in `make test-all`."""
    others = [attacked(each, pytest.mark.extended) for each in KINDS if each != kind]
    return pytest.mark.parametrize("target", [attacked(kind), *others], indirect=True)


#: Ids of this process only; others have the adjacent ranges.
FIRST = 62000 + os.getpid() % 300 * 10
PLAIN_USER = FIRST + 9
RESULT = "RESULT "
#: A limit for what takes a few seconds; a service stopped by an attack takes forever.
PATIENCE = 180


class Target:
    """A data folder with secrets and a worker of one kind.

    public: a folder that every user can read, with the attacks' programs.  private: one for the
    worker's user only.
    """

    def __init__(self, kind: str, python: Path, database: Path) -> None:
        assert sandbox.is_supported(), "this kernel has no Landlock, which Linux 6.2 has"
        self.kind, self.python = kind, python
        self.user = PLAIN_USER if kind == PLAIN else 0
        self.folder = Path(tempfile.mkdtemp(dir="/var/lib", prefix="halfstep-attack-"))
        self.folder.chmod(0o755)
        self.public, self.private, self.home, data = (
            self.folder / name for name in ("public", "private", "home", "data")
        )
        for each, mode in ((self.public, 0o755), (self.private, 0o700), (self.home, 0o700)):
            each.mkdir()
            each.chmod(mode)
        data.mkdir(mode=0o700)
        own = shutil.copy(database, self.folder / "halfstep.db")
        own.chmod(0o600)
        url = f"sqlite:///{own}"
        self.database = Database(url)
        with self.database.writing() as session:
            ada, self.mallory = (accounts.user_named(session, name) for name in ("ada", "mallory"))
        self.site = Site(data, self.database, url, ada)
        self.secrets = {
            name: f"{name}-{secrets.token_hex(16)}"
            for name in ("key", "private", "environment", "source", "committed", "uncommitted")
        }
        self.key = self.write(data / "secrets.key", self.secrets["key"])
        self.canary = self.write(self.private / "canary.py", self.secrets["private"])
        for each in PROGRAMS.iterdir():
            if each.is_file():  # with a mode of its own: this process's umask may be private
                self.write(self.public / each.name, each.read_text(), mode=0o644)
        self.give(self.folder)

    def close(self) -> None:
        """Delete everything."""
        self.database.dispose()
        # Not by a recursive function: a run may have made folders in folders.
        subprocess.run(["rm", "-rf", self.folder], check=True)

    def write(self, path: Path, text: str, mode: int = 0o600) -> Path:
        """Write a file as the worker's user."""
        path.write_text(text)
        path.chmod(mode)
        self.give(path)
        return path

    def give(self, path: Path) -> None:
        """Make the worker's user the owner of a path and all below it."""
        for each in (path, *path.rglob("*")):
            os.chown(each, self.user, self.user, follow_symlinks=False)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of the worker."""
        result = {
            "HALFSTEP_SANDBOX": "yes",
            "HALFSTEP_ALLOW_COMMANDS": "yes",
            "HALFSTEP_CPU_DEVICES": str(DEVICES),
            "HALFSTEP_WORKER_NAME": "w1",
            "HOME": str(self.home),
            "XDG_STATE_HOME": str(self.home / "state"),
            "AWS_SECRET_ACCESS_KEY": self.secrets["environment"],
        }
        if self.kind == RUN_USERS:
            result["HALFSTEP_RUN_USERS"] = f"{FIRST}-{FIRST + DEVICES - 1}"
        return self.site.environment | result

    @contextmanager
    def run_worker(self) -> Iterator[None]:
        """Run the worker; afterwards end it and all that it has started."""
        variables = {**os.environ, **self.environment}
        variables.pop("LD_PRELOAD", None)
        user = self.user or None
        process = subprocess.Popen(
            [self.python, "-m", "worker.worker"],
            env=variables,
            cwd=self.public,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
        try:
            until(lambda: self.site.offers("digits"))
            self.worker = psutil.Process(process.pid)
            yield
        finally:
            (self.public / "gate").touch()
            process.terminate()
            try:
                process.wait(SECONDS)
            finally:
                self.kill_what_is_left()
                process.kill()
                process.wait()

    def kill_what_is_left(self) -> None:
        """Kill supervisors and runs of this worker that outlived it."""
        for each in self.processes():
            each.kill()

    def processes(self) -> list[psutil.Process]:
        """Return the live processes with this worker's folder in their environment."""
        mark, result = str(self.folder), []
        for each in psutil.process_iter():
            try:
                words = Path(f"/proc/{each.pid}/environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if mark in words and each.pid != os.getpid() and is_running(each):
                result.append(each)
        return result

    def submit(self, line: str, owner: User | None = None, **changes: Any) -> int:
        """Queue a command as Mallory."""
        with self.database.writing() as session:
            return submit_command(session, owner or self.mallory, line, **changes).id

    def attack(self, program: str, *words: str, plan: Any = None, **changes: Any) -> int:
        """Queue one of PROGRAMS. plan: its input, as JSON in the second argument."""
        path = self.public / f"plan-{secrets.token_hex(4)}.json"
        self.write(path, json.dumps(plan), mode=0o644)
        line = " ".join(["python", str(self.public / program), str(path), *words])
        return self.submit(line, **changes)

    def result(self, run_id: int) -> Any:
        """Wait for the line with a run's result; return it."""
        until(lambda: RESULT in self.site.log(run_id) or self._has_ended(run_id), PATIENCE)
        lines = self.site.log(run_id).splitlines()
        printed = [each for each in lines if each.startswith(RESULT)]
        assert printed, (self.site.run(run_id).error, lines)
        return json.loads(printed[-1].removeprefix(RESULT))

    def wait(self, *run_ids: int) -> None:
        """Wait for runs to end, with a shorter timeout than for trainings."""
        until(lambda: all(map(self._has_ended, run_ids)), PATIENCE)

    def _has_ended(self, run_id: int) -> bool:
        return self.site.run(run_id).ended_at is not None

    @cached_property
    def victim(self) -> dict[str, Any]:
        """Start a run of Ada's that lasts as long as the worker; return its pid and folders."""
        names = ("source", "committed", "uncommitted")
        plan = {name: self.secrets[name] for name in names} | {"gate": str(self.public / "gate")}
        own = self.write(self.private / "plan", json.dumps(plan))
        variables = {"PLAN": own.read_text()}
        line = f"python {self.public / 'victim'}"
        run_id = self.submit(line, owner=self.site.owner, variables=variables)
        result: dict[str, Any] = self.result(run_id)
        return result | {"pid": self._pid_outside(result["pid"])}

    def _pid_outside(self, pid: int) -> int:
        """Return a process's id outside of its namespace."""
        for process in self.processes():
            status = Path(f"/proc/{process.pid}/status").read_text()
            [line] = [each for each in status.splitlines() if each.startswith("NSpid:")]
            if int(line.split()[-1]) == pid:
                return process.pid
        raise LookupError(f"no process of the worker has the id {pid}")

    def list_exposed(self, run_ids: Iterator[int] | list[int] | range) -> dict[str, list[str]]:
        """Return the names of secrets that the service reveals of these runs, by run."""
        shown = {}
        for run_id in run_ids:
            text = self._read_shown(run_id)
            found = [name for name, secret in self.known_secrets.items() if secret in text]
            if found:
                shown[f"{run_id}: {self._line(run_id)}"] = found
        return shown

    @property
    def known_secrets(self) -> Mapping[str, str]:
        """Return texts that no run may reveal, by name."""
        shadow = Path("/etc/shadow")
        lines = shadow.read_text().splitlines()[:1] if os.access(shadow, os.R_OK) else []
        own = {name: text for name, text in self.secrets.items() if name != "private"}
        if self.kind == RUN_USERS:  # others have the worker's user, and read its files
            own["private"] = self.secrets["private"]
        return {
            **own,
            "database": "SQLite format 3",
            **({"shadow": lines[0]} if lines else {}),
        }

    def _line(self, run_id: int) -> str:
        command = self.site.run(run_id).command or {}
        return f"{command['line']} in {command['folder'] or 'work'}"

    def _read_shown(self, run_id: int) -> str:
        """Return everything that users can see of a run."""
        with self.database.reading() as session:
            run = session.get_one(Run, run_id)
            rows = session.query(RunEnvironment).where(RunEnvironment.run_id == run_id).all()
            texts = [text for row in rows for text in environments.texts(row) if text]
            contents = [json.dumps(row.content) for row in rows]
            said = [run.error or "", run.stop_reason or ""]
        return "\n".join([*texts, *contents, *said, self.site.log(run_id)])

    def snapshot(self, *further: str) -> dict[str, Any]:
        """Return content, owners and times of files that runs must not change."""
        places = [self.private, self.public, self.key, self.site.data, *map(Path, further)]
        found = {}
        for place in places:
            deep = place not in (self.key, self.site.data)
            for each in (place, *(sorted(place.rglob("*")) if deep else ())):
                if ".git" not in each.parts and each != self.public / "gate":
                    found[str(each)] = _state(each, is_own=deep or place == self.key)
        return found

    def difference(self, before: dict[str, Any], *further: str) -> dict[str, Any]:
        """Return what has changed since a snapshot."""
        after = self.snapshot(*further)
        paths = before.keys() | after.keys()
        changed = {each: (before.get(each), after.get(each)) for each in paths}
        plans = str(self.public / "plan-")
        return {
            path.removeprefix(str(self.folder)): _changes(*states)
            for path, states in sorted(changed.items())
            if states[0] != states[1] and not path.startswith(plans) and path != str(self.public)
        }

    def reports_sandbox(self) -> tuple[bool, dict[str, str]]:
        """Return the worker's page about its sandbox."""
        with self.database.reading() as session:
            [(row, _)] = workers.all_workers(session)
        return row.is_sandboxed, row.sandbox


def _changes(before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[str]:
    """Return the names of properties that differ between two states of a path."""
    if before is None or after is None:
        return ["made" if before is None else "deleted"]
    return [name for name in before if before[name] != after.get(name)]


def _state(path: Path, *, is_own: bool) -> dict[str, Any]:
    """Describe a file or folder; is_own: the service itself does not change it."""
    known = path.lstat()
    state: dict[str, Any] = {"mode": oct(known.st_mode), "owner": (known.st_uid, known.st_gid)}
    state["attributes"] = os.listxattr(path, follow_symlinks=False)
    if is_own and path.is_file():
        state["text"] = path.read_bytes()[:100]
        state["time"] = known.st_mtime_ns
    return state
