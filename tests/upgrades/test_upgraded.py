"""Upgrades of earlier installations as operations.md says: stop, install, start.

Runs go on from their checkpoints, equal to those that the earlier version trained whole, to the bit
on a processor like that of the installation.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from tests import warm
from tests.marks import extended
from tests.site import answers, free_port, halfstep, until, up
from tests.upgrades.build import RECIPE, RECIPES, STEPS
from tests.upgrades.conftest import Old, upgrade_of

pytestmark = [pytest.mark.sql, pytest.mark.slow]

#: Names of runs are theirs; those of a sweep of 0503e20 have an earlier name of a setting.
RENAMED = {"name,verdict,val/verdict": "name,health,val/verdict"}


class Upgraded:
    """A running, upgraded installation and its API."""

    def __init__(self, old: Old, client: httpx2.Client) -> None:
        self.old, self.client = old, client

    def send(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.client.request(method, f"/api/v1{path}", json=body)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def run(self, name: str) -> dict[str, Any]:
        runs = self.send("GET", "/runs?limit=200")["runs"]
        [run] = [each for each in runs if each["name"] == name]
        return dict(run)

    def wait(self, name: str) -> None:
        path = f"/runs/{self.run(name)['id']}"

        def has_ended() -> bool:
            run = self.send("GET", path)
            assert run["status"] not in ("failed", "cancelled"), run
            return bool(run["status"] == "finished")

        until(has_ended)


@contextmanager
def upgrade(old: Old) -> Iterator[Upgraded]:
    """Start this version's server and worker in an old data folder."""
    environment = {
        **old.environment,
        "HALFSTEP_RECIPES": f"{RECIPE}:Own",
        "HALFSTEP_ALLOW_COMMANDS": "yes",
        "HALFSTEP_CPU_DEVICES": "2",
        "HALFSTEP_WORKER_NAME": "box",
    }
    with up(**environment) as (_process, link), sign_in(old, link.partition("/?")[0]) as site:
        until(lambda: len(site.send("GET", "/recipes")) >= len(RECIPES))
        yield site


@contextmanager
def serve(old: Old) -> Iterator[Upgraded]:
    """Start this version's server only, so that queued runs do not train."""
    port = str(free_port())
    environment = {**os.environ, **old.environment, "HALFSTEP_PORT": port}
    command = [sys.executable, "-m", "halfstep.cli.main", "server"]
    with warm.Popen(command, env=environment) as process:
        try:
            until(lambda: answers(f"http://127.0.0.1:{port}"))
            with sign_in(old, f"http://127.0.0.1:{port}") as site:
                yield site
        finally:
            process.terminate()


@contextmanager
def sign_in(old: Old, address: str) -> Iterator[Upgraded]:
    headers = {"Authorization": f"Bearer {old.readings['token']}"}
    with httpx2.Client(base_url=address, headers=headers, timeout=60) as client:
        yield Upgraded(old, client)


@pytest.mark.parametrize("recipes", [("gpt", "wgan-gp", "own"), *extended([(tuple(RECIPES),)])])
@upgrade_of("0503e20-sqlite")
def test_interrupted_runs_go_on_to_the_bit(old: Old, recipes: tuple[str, ...]) -> None:
    """Paused, stopped and killed runs end like uninterrupted ones of the old version.

    They are bit-equal wherever a run trained by this version is.
    """
    with upgrade(old) as site:
        names = [f"paused {recipe}" for recipe in recipes]
        for name in names:
            site.send("POST", f"/runs/{site.run(name)['id']}/resumption")
        for name in [*names, "stopped", "killed", "queued", "command"]:
            site.wait(name)
        until(lambda: not site.old.waits())
        wholes = {name: name.replace("paused", "whole") for name in names} | {
            "stopped": "whole gpt",
            "queued": "whole own",
        }
        # Another processor has other kernels, which round otherwise from the first step on.
        is_same_processor = _bits(site, "queued") == _bits(site, "whole own")
        for name, whole in wholes.items():
            ended, expected = _bits(site, name), _bits(site, whole)
            if is_same_processor:
                assert ended == expected
            for step, (loss, scale, rate) in expected["steps"].items():
                near = pytest.approx(loss, rel=0.02, abs=0.05)
                assert ended["steps"][step] == (near, scale, rate), (name, step)


def _bits(site: Upgraded, name: str) -> dict[str, Any]:
    """Return a training's results: digests of its last weights, and its steps."""
    run = site.run(name)
    checkpoints = site.send("GET", f"/runs/{run['id']}/checkpoints")
    files = checkpoints if isinstance(checkpoints, list) else checkpoints["checkpoints"]
    rows = site.old.steps(run["id"])
    # Norms are summed in another order since 58406ad5: their last bit may differ.
    steps = {row.step: (row.loss, row.scale, row.lr) for row in rows}
    weights = {
        each["kind"]: each["sha256"]
        for each in files
        if each["step"] == STEPS and each["kind"] != "checkpoint"
    }
    assert weights
    assert len(steps) == STEPS
    return {"weights": weights, "steps": steps}


@upgrade_of("0503e20-postgresql")
def test_what_users_saved_still_works(old: Old) -> None:
    """Saved views find the same runs, tokens and links open the same pages, runs are readable,
    and unsent watched runs are sent completely.
    """
    with serve(old) as site:
        views = {view["name"]: view for view in site.send("GET", "/views")}
        for name, found in old.readings["views"].items():
            query = {"filter": views[name]["filter"], "sort": views[name]["sort"], "limit": 200}
            runs = site.client.get("/api/v1/runs", params=query).json()["runs"]
            waiting = {"killed", "stopped", "command", "queued"}
            assert [run["name"] for run in runs if run["name"] not in waiting] == found
        for kind, token in old.readings["tokens"].items():
            headers = {"Authorization": f"Bearer {token}"}
            status = site.client.get("/api/v1/runs", headers=headers).status_code
            assert status == (403 if kind == "write" else 200), kind
        described = site.client.get("/api/v1/openapi.json").json()["paths"]
        readable = [
            path
            for path, operations in described.items()
            if path.startswith("/api/v1/runs/{run_id}") and "get" in operations
            if path.count("{") == 1 and not path.endswith("/live")
        ]
        assert len(readable) > 10
        until(lambda: not old.waits())
        runs = site.send("GET", "/runs?limit=200")["runs"]
        kinds = {each[name]: each["id"] for name in ("recipe", "status") for each in runs}
        for run_id in {*kinds.values()}:
            for path in readable:
                answer = site.client.get(path.replace("{run_id}", str(run_id)))
                assert answer.status_code in (200, 404, 422), f"{path}: {answer.text}"
        with httpx2.Client(base_url=site.client.base_url, follow_redirects=True) as stranger:
            origin = {"Origin": str(site.client.base_url).rstrip("/")}
            secret = {"secret": old.readings["link"]}
            shown = stranger.post("/shared", data=secret, headers=origin)
            assert "whole digits" in shown.text
        done = halfstep(
            "upload",
            str(old.offline),
            HALFSTEP_URL=str(site.client.base_url),
            HALFSTEP_TOKEN=old.readings["token"],
        )
        assert done.returncode == 0, done.stderr
        assert site.run("offline")["step"] == 30
        assert site.run("offline-killed")["step"] >= 30
        assert site.run("watched")["step"] == 30
