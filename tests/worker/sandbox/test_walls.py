"""Paths and processes of the service, which recipes and commands try to access."""

import json
from pathlib import Path
from typing import Any

import pytest

from db.queue import workers
from db.settings import Settings
from db.tables import Status
from halfstep import sandbox
from tests.db.conftest import submit_command
from tests.site import Site

#: Tries the listed accesses, and prints each result.
SPY = """
import json, os, signal
from pathlib import Path

def tried():
    wanted = json.loads(Path({wanted!r}).read_text())
    for each in ("environ", "mem", "maps", "fd/0"):
        wanted["read"] += [f"/proc/{{wanted['worker']}}/{{each}}"]
    seen = {{path: outcome(lambda: open(path, "rb").read(1)) for path in wanted["read"]}}
    seen |= {{f"write {{path}}": outcome(lambda: open(path, "ab")) for path in wanted["write"]}}
    seen["kill"] = outcome(lambda: os.kill(wanted["worker"], 0))
    run = str(os.environ.get("HALFSTEP_RUN") or wanted["run"])
    control, own = Path(wanted["data"], "runs", run), Path(wanted["data"], "scratch", run, "0")
    seen["link there"] = outcome(lambda: (control / "link").symlink_to("/etc/passwd"))
    seen["move there"] = outcome(lambda: Path(os.environ["TMPDIR"]).rename(control / "log"))
    seen["write job"] = outcome(lambda: open(control / "job-1.json", "ab"))
    seen["job"] = outcome(lambda: (control / "job-1.json").read_text())
    seen["link"] = outcome(lambda: (own / "link").symlink_to("/etc/passwd"))
    seen["mode"] = oct(own.stat().st_mode)
    print("SPIED " + json.dumps(seen), flush=True)

def outcome(attempt):
    try:
        attempt()
    except OSError as error:
        return type(error).__name__
    return "done"
"""
RECIPE = """
from trainer.recipes.digits import Digits

class Spy(Digits):
    name = "spy"

    def __init__(self, config, device):
        tried()
        super().__init__(config, device)
"""


def run_spy(site: Site, run_id: int) -> dict[str, str]:
    [said] = [line for line in site.log(run_id).splitlines() if line.startswith("SPIED ")]
    result: dict[str, str] = json.loads(said.removeprefix("SPIED "))
    return result


@pytest.mark.only_on("sqlite")
def test_runs_reach_nothing_that_the_service_knows(site: Site, tmp_path: Path) -> None:
    """A run reaches its own folder, but neither database, keys, other files nor the daemons'
    memory.
    """
    assert sandbox.is_supported(), "this kernel has no Landlock, which Linux 6.2 has"
    settings = Settings(data=site.data, database_url=site.url)
    settings.secrets_key.write_text("key")
    (tmp_path / "theirs.txt").write_text("anybody's")
    wanted = tmp_path / "wanted.json"
    spy = SPY.format(wanted=str(wanted))
    (tmp_path / "spy.py").write_text(spy + RECIPE)
    (tmp_path / "script.py").write_text(spy + "\ntried()\n")
    first = site.submit(steps=2)
    environment = {
        "HALFSTEP_RECIPES": f"{tmp_path / 'spy.py'}:Spy",
        "HALFSTEP_ALLOW_COMMANDS": "yes",
    }
    with site.worker(HALFSTEP_SANDBOX="yes", **environment) as worker:
        site.wait(first)
        other = site.data / "runs" / str(first)
        [checkpoint, *_] = (other / "checkpoints").glob("*.pt")
        private = [
            *(tmp_path / "halfstep.db", settings.secrets_key, checkpoint),
            *(other / "job-1.json", other / "supervisor-1.log", other / "control-1.json"),
        ]
        command = submit_of(site, f"python {tmp_path / 'script.py'}")
        plan: dict[str, Any] = {"read": [*map(str, private)], "worker": worker.pid}
        plan |= {"data": str(site.data), "run": command + 1}
        plan["write"] = [*map(str, private), str(site.data / "recipes.json")]
        wanted.write_text(json.dumps(plan))
        run = site.submit(steps=2, recipe="spy")
        config = {"recipe": {"text": f"/proc/{worker.pid}/environ"}, "training": {"steps": 2}}
        reader = site.wait(site.submit(recipe="gpt", config=config | {"precision": "fp32"}))
        for run_id in (command, run):
            ended = site.wait(run_id)
            assert ended.status == Status.FINISHED, ended.error
    assert reader.status == Status.FAILED
    assert f"recipe.text is '/proc/{worker.pid}/environ': runs may not read it" in (
        reader.error or ""
    )
    with site.database.reading() as session:
        [(row, _)] = workers.all_workers(session)
    assert row.is_sandboxed
    for run_id in (command, run):
        result = run_spy(site, run_id)
        assert (result.pop("job"), result.pop("link")) == ("done", "done")
        assert result.pop("mode") == "0o40700"
        assert "done" not in result.values(), result
        assert len(result) == 4 + 2 * len(private) + 5
        assert not (site.scratch(run_id) / "tmp").exists()


def submit_of(site: Site, line: str) -> int:
    with site.database.writing() as session:
        return submit_command(session, site.owner, line).id
