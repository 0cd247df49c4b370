"""Build small installations of earlier versions: `python -m tests.upgrades.build COMMIT…`.

Each is installed from this repository's history into an environment of its own, with the libraries
of this one, and used by its commands and its API: it trains, pauses, watches, saves and is stopped.
The remaining data folder, `installations/COMMIT-DATABASE.tar.xz`, is what a user has before an
upgrade.
"""

import json
import lzma
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests.conftest import postgresql_binaries, postgresql_user, running_postgresql
from tests.site import free_port
from tests.swept import execute

HERE = Path(__file__).parent
INSTALLATIONS = HERE / "installations"
SCRIPT, RECIPE = HERE / "watched_script.py", HERE / "own_recipe.py"
FIRST = "0503e20"
#: Names of `spike` settings, tokens and conditions, now and in FIRST.
OLD = {
    "rollback": "rewind",
    "max_rollbacks": "most_rewinds",
    "check_every_steps": "look_every_steps",
    "continue": "go on",
    "control": "steer",
    "no_updates": "unapplied",
    "health": "verdict",
}
#: Small configurations: at most some tens of kilobytes a checkpoint.
RECIPES: dict[str, dict[str, Any]] = {
    "digits": {"recipe": {"width": 16, "dropout": 0.1, "shift_pixels": 1}},
    "erfnet": {
        "recipe": {"height": 16, "width": 16, "channels": 4, "blocks": 1, "dilations": 0},
        "training": {"batch_size": 2},
    },
    "gpt": {
        "recipe": {"layers": 1, "width": 16, "heads": 2, "context": 16, "dropout": 0.1},
        "training": {"batch_size": 4},
    },
    "mlp": {"recipe": {"width": 16, "layers": 2}},
    "wgan-gp": {"recipe": {"width": 8, "noise": 4}},
    "own": {"recipe": {"width": 16, "rewind": 5, "misshapen": False, "afterwards": "go on"}},
}
STEPS, EVERY = 60, 20


def until(condition: Callable[[], bool], pause: float = 0.05) -> None:
    """Wait for a condition that other processes fulfil."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(pause)


class Installation:
    """An earlier version, installed and started in a folder."""

    def __init__(self, python: Path, root: Path, url: str, old: dict[str, str]) -> None:
        self.python, self.root, self.old = python, root, old
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self.environment = {
            **{name: text for name, text in os.environ.items() if "HALFSTEP" not in name},
            "HALFSTEP_DATA": str(root / "data"),
            "HALFSTEP_DATABASE_URL": url,
            "HALFSTEP_PORT": str(self.port),
            "HALFSTEP_RECIPES": f"{RECIPE}:Own",
            "HALFSTEP_ALLOW_COMMANDS": "yes",
            "HALFSTEP_CPU_DEVICES": "2",
            "HALFSTEP_WORKER_NAME": "box",
            "HOME": str(root),
            "XDG_STATE_HOME": str(root / "state"),
            "OMP_NUM_THREADS": "1",
        }
        self.client = httpx2.Client(base_url=self.base, headers={"Origin": self.base}, timeout=60)
        self.token = ""

    def name_of(self, name: str) -> str:
        """Return this version's name of something."""
        return self.old.get(name, name)

    def halfstep(self, *words: str) -> str:
        """Run a command of this version."""
        command = [self.python.with_name("halfstep"), *words]
        done = subprocess.run(
            command, env=self.environment, cwd=self.root, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def up(self) -> Iterator[subprocess.Popen[str]]:
        """Run server and worker."""
        with (self.root / "up.log").open("a") as log:
            process = subprocess.Popen(
                [self.python.with_name("halfstep"), "up"],
                env=self.environment,
                cwd=self.root,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        try:
            until(self._is_up)
            yield process
        finally:
            process.terminate()
            process.wait(60)

    def _is_up(self) -> bool:
        try:
            return self.client.get("/healthz").status_code == 200
        except httpx2.TransportError:
            return False

    def sign_in(self) -> None:
        """Sign in like a browser, and create the token for other requests."""
        link = re.search(r"http://\S+", self.halfstep("link", "operator"))
        assert link
        token = link.group().partition("token=")[2]
        self.client.post("/", data={"token": token, "next": "/runs"})
        page = self.client.get("/account").text
        found = re.search(r'name="csrf_token" value="([^"]+)"', page)
        assert found, page
        self.client.headers["X-CSRF-Token"] = found.group(1)
        wanted = {"name": "script", "kind": "full", "days": None}
        self.token = self.send("POST", "/tokens", wanted)["token"]

    def send(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request to the API; return its response."""
        answer = self.client.request(method, f"/api/v1{path}", json=body)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def read(self, path: str) -> Any:
        """Return the API's response for a path."""
        return self.send("GET", path)

    def submit(self, name: str, recipe: str, **changes: Any) -> int:
        """Queue a run of a recipe; return its number."""
        config = {
            "precision": "fp16",
            **RECIPES[recipe],
            "checkpoints": {"every_steps": EVERY, "keep_last": 1},
            "evaluation": {"every_steps": EVERY},
            **changes,
        }
        config["training"] = {
            "steps": STEPS,
            "deterministic": True,
            "threads": 1,
            **config.get("training", {}),
        }
        wanted = {"recipe": recipe, "name": name, "config": config, "tags": "rewind-lab"}
        return int(self.send("POST", "/runs", wanted)["id"])

    def wait(self, run: int, *statuses: str) -> None:
        """Wait until a run has one of these statuses."""
        wanted = statuses or ("finished",)

        def is_there() -> bool:
            status = self.read(f"/runs/{run}")["status"]
            assert status not in {"failed", "cancelled"} - {*wanted}, f"{run}: {status}"
            return status in wanted

        until(is_there)

    def has_file(self, run: int, pattern: str) -> bool:
        """Return whether a training has written a file, since 0.1.0 in data/scratch."""
        folders = (f"runs/{run}", f"scratch/{run}/0")
        return any(any((self.root / "data").glob(f"{folder}/{pattern}")) for folder in folders)

    def stop_in_midst(self, run: int) -> list[int]:
        """Stop a run's training and supervisor as soon as it trains."""
        folder = self.root / "data" / "runs" / str(run)
        until(lambda: self.has_file(run, "spool/*"), pause=0.002)
        supervisor = int(json.loads((folder / "supervisor-1.json").read_text())["pid"])
        log = (folder / "supervisor-1.log").read_text()
        if forked := re.findall(r"process (\d+)$", log, re.MULTILINE):
            training = int(forked[0])
        else:
            training = psutil.Process(supervisor).children()[0].pid
        os.kill(training, signal.SIGSTOP)
        return [training, supervisor]

    def pause(self, run: int) -> None:
        """Pause a run during its training."""
        [training, _supervisor] = self.stop_in_midst(run)
        while self.read(f"/runs/{run}")["step"] < STEPS / 10:
            os.kill(training, signal.SIGCONT)
            time.sleep(0.01)
            os.kill(training, signal.SIGSTOP)
            time.sleep(0.3)  # what it has made is recorded
        self.send("POST", f"/runs/{run}/pause")
        time.sleep(1.5)  # the request reaches the training's folder
        os.kill(training, signal.SIGCONT)
        self.wait(run, "paused")
        step = self.read(f"/runs/{run}")["step"]
        assert 0 < step < STEPS, f"{run} paused at {step}: try again"

    def watch(self, steps: int, name: str, mode: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a watched script."""
        environment = {**self.environment, "HALFSTEP_URL": self.base, "HALFSTEP_TOKEN": self.token}
        command = [self.python, SCRIPT, str(steps), name, mode, *words]
        with (self.root / "script.log").open("a") as log:
            return subprocess.Popen(
                command, env=environment, cwd=self.root, stdout=log, stderr=subprocess.STDOUT
            )


def fill(site: Installation) -> dict[str, Any]:
    """Use an installation as users do; return what its API returns for saved objects."""
    with site.up() as up:
        site.sign_in()
        links = _make_rows(site)
        train(site)
        sweep(site)
        links["link"] = site.send("POST", "/links", {"runs": [1, 2], "days": 90})["address"]
        site.send("PUT", "/notes", {"note": "before the go on", "runs": "1,2"})
        site.send("PATCH", "/runs/1", {"note": "A **note** on a rewind."})
        _watch(site)
        trashed = site.submit("trashed", "digits", training={"steps": 10})
        site.wait(trashed)
        site.send("DELETE", f"/runs/{trashed}")
        readings = {**links, "views": {view["name"]: _found(site, view) for view in _views(site)}}
        _leave_midway(site, up)
    return {**readings, "token": site.token}


def _make_rows(site: Installation) -> dict[str, Any]:
    site.send("POST", "/projects", {"name": "rewind-lab"})
    tokens = {
        kind: site.send("POST", "/tokens", {"name": kind, "kind": site.name_of(kind)})["token"]
        for kind in ("read", "submit", "control", "write")
    }
    site.send("PUT", "/secrets/REWIND_KEY", {"value": "go on and on"})
    health = site.name_of("health")
    site.send(
        "POST",
        "/views",
        {"name": "by tag", "filter": "tag:rewind-lab", "sort": "-id", "columns": "", "group": ""},
    )
    site.send(
        "POST",
        "/views",
        {"name": "by metric", "filter": "val/verdict>0", "sort": "-val/verdict"}
        | {"columns": f"name,{health},val/verdict", "group": ""},
    )
    spike = f"spike.{site.name_of('max_rollbacks')}"
    site.send(
        "POST",
        "/views",
        {"name": "by setting", "filter": f"{spike}=2", "columns": f"name,{spike},rewind"}
        | {"sort": spike, "group": ""},
    )
    site.send(
        "POST",
        "/views",
        {"name": "by state", "filter": f"-status:{site.name_of('no_updates')}", "group": "rewind"},
    )
    site.send("POST", "/alerts/rules", {"condition": site.name_of("no_updates"), "scope": "mine"})
    site.send(
        "POST",
        "/alerts/rules",
        {"condition": "metric_above", "scope": "mine", "metric": "val/verdict", "value": 0.5},
    )
    return {"tokens": tokens}


def _spike(site: Installation) -> dict[str, Any]:
    values = {"rollback": True, "max_rollbacks": 2, "check_every_steps": 5}
    named = {site.name_of(name): value for name, value in values.items()}
    return {
        "threshold": 1000.0,
        "window_steps": 16,
        **named,
        "afterwards": site.name_of("continue"),
    }


def train(site: Installation) -> None:
    """Train each recipe twice with one seed: uninterrupted, and with a pause."""
    until(lambda: len(site.read("/recipes")) >= len(RECIPES))
    config = {"spike": _spike(site), "checkpoints": {"every_steps": EVERY}}
    site.send("POST", "/presets", {"name": "spiky", "recipe": "digits", "config": config})
    for recipe in RECIPES:
        more = {"spike": _spike(site)} if recipe in ("digits", "gpt", "own") else {}
        if recipe == "digits":
            more["training"] = {"ema_decay": 0.9}
        site.wait(site.submit(f"whole {recipe}", recipe, **more))
        site.pause(site.submit(f"paused {recipe}", recipe, **more))


def sweep(site: Installation) -> None:
    """Run and pause a sweep over settings, one of which was renamed later."""
    space = {
        f"spike.{site.name_of('max_rollbacks')}": [1, 2, 3],
        "recipe.rewind": [7],
        "recipe.width": [16],
    }
    wanted = {"recipe": "own", "space": space, "name": "sweep", "at_once": 1}
    wanted["config"] = {
        "training": {"steps": 10},
        "spike": _spike(site),
        "checkpoints": {"every_steps": 5, "keep_last": 1},
    }
    number = site.send("POST", "/sweeps", wanted)["id"]
    until(lambda: site.read(f"/sweeps/{number}")["complete"] >= 1)
    site.send("POST", f"/sweeps/{number}/pause")
    until(lambda: site.read(f"/sweeps/{number}")["open"] == 0)


def _watch(site: Installation) -> None:
    assert site.watch(30, "watched", "auto").wait(120) == 0
    until(lambda: any(run["name"] == "watched" for run in site.read("/runs")["runs"]))
    assert site.watch(30, "offline", "offline").wait(120) == 0
    killed = site.watch(30, "offline-killed", "offline", "hang")
    folder = site.root / "offline" / "offline-killed"
    until(lambda: folder.exists() and "30 steps made" in (site.root / "script.log").read_text())
    time.sleep(2)
    killed.kill()
    killed.wait()


def _leave_midway(site: Installation, up: subprocess.Popen[str]) -> None:
    """Leave a run for the stop to interrupt, one to be killed, and a queue."""
    killed = site.submit("killed", "digits", training={"steps": 1000})
    [training, supervisor] = site.stop_in_midst(killed)
    os.kill(training, signal.SIGCONT)
    until(lambda: site.read(f"/runs/{killed}")["step"] > 2 * EVERY)
    os.kill(training, signal.SIGSTOP)
    stopped = site.submit("stopped", "gpt")
    [held, _] = site.stop_in_midst(stopped)
    line = "python -c 'print(\"{rewind}\", {lr})'"
    parameters = {"rewind": {"type": "string"}, "lr": {"type": "number"}}
    command = {"line": line, "parameters": parameters}
    wanted = {"command": command, "name": "command", "config": {"rewind": "go on", "lr": 0.1}}
    site.send("POST", "/runs", wanted)
    site.submit("queued", "own", spike=_spike(site))
    os.kill(supervisor, signal.SIGSTOP)
    others = [each.pid for each in psutil.Process(up.pid).children(recursive=True)]
    up.terminate()
    time.sleep(2)
    os.kill(held, signal.SIGCONT)
    until(lambda: site.has_file(stopped, "outcome-1.json"))
    time.sleep(2)
    for pid in (up.pid, *others, training, supervisor):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _views(site: Installation) -> list[dict[str, Any]]:
    views: list[dict[str, Any]] = site.read("/views")
    return views


def _found(site: Installation, view: dict[str, Any]) -> list[str]:
    parameters = {"filter": view["filter"], "sort": view["sort"], "limit": 200}
    answer = site.client.get("/api/v1/runs", params=parameters)
    assert answer.is_success, answer.text
    return [run["name"] for run in answer.json()["runs"]]


def install(commit: str, folder: Path) -> Path:
    """Check a commit out and install it without its libraries; return its Python."""
    subprocess.run(["git", "worktree", "add", "--detach", folder, commit], check=True)
    environment = folder / ".venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    libraries = environment / "lib" / version / "site-packages" / "zz_libraries.pth"
    libraries.write_text(sysconfig.get_paths()["purelib"])
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--editable", folder / "halfstep", "--editable", folder], check=True)
    return python


def pack(root: Path, path: Path) -> None:
    """Pack an installation's data, without its logs."""
    with tarfile.open(path, "w:xz") as archive:
        for name in ("data", "offline", "readings.json", "dump.sql"):
            if (root / name).exists():
                archive.add(root / name, name)


def build_on_sqlite(commit: str, python: Path, root: Path) -> None:
    """Build an installation with its database in the data folder."""
    _build(commit, python, root, "")


def build_on_postgresql(commit: str, python: Path, root: Path) -> None:
    """Build an installation with a private PostgreSQL server, and dump it."""
    with running_postgresql() as server:
        folder = server.partition("host=")[2]
        execute(server, "CREATE DATABASE old")
        _build(commit, python, root, server.format(name="old"))
        program = [f"{postgresql_binaries()}/pg_dump", "-h", folder, "-U", "halfstep", "old"]
        dump = subprocess.run(
            [*program, "--no-owner"], user=postgresql_user(), check=True, capture_output=True
        )
        (root / "dump.sql").write_bytes(dump.stdout)


def _build(commit: str, python: Path, root: Path, url: str) -> None:
    site = Installation(python, root, url, OLD if commit == FIRST else {})
    readings = fill(site)
    (root / "readings.json").write_text(json.dumps(readings, indent=1))


def upgrade(commit: str, python: Path, root: Path) -> None:
    """Upgrade an installation's SQLite database by a later version, and pack it only."""
    with tarfile.open(INSTALLATIONS / f"{FIRST}-sqlite.tar.xz") as archive:
        archive.extractall(root, filter="data")
    Installation(python, root, "", {}).halfstep("migrate")
    with lzma.open(INSTALLATIONS / f"{FIRST}-upgraded-by-{commit}.db.xz", "wb") as file:
        file.write((root / "data" / "halfstep.db").read_bytes())


BUILDERS: dict[str, Callable[[str, Path, Path], None]] = {
    "sqlite": build_on_sqlite,
    "postgresql": build_on_postgresql,
}


def main(commits: list[str]) -> None:
    """Build the installations of these commits."""
    INSTALLATIONS.mkdir(exist_ok=True)
    for commit in commits:
        with tempfile.TemporaryDirectory(prefix=f"halfstep-{commit}-") as text:
            folder = Path(text) / "source"
            python = install(commit, folder)
            try:
                for kind, build in BUILDERS.items():
                    root = Path(text) / kind
                    (root / "data").mkdir(parents=True)
                    build(commit, python, root)
                    pack(root, INSTALLATIONS / f"{commit}-{kind}.tar.xz")
                if commit != FIRST:
                    upgrade(commit, python, Path(text) / "upgraded")
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", folder], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
