"""An installation on a file system without locks, such as NFS without a lock daemon."""

import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from tests.halfstep.telemetry.folder_lock_made import no_locks_library
from tests.journeys.backup_made import SCRIPT
from tests.journeys.installation import Admin, Installation, until_some
from tests.site import SECONDS, answers, free_port, until

RECIPE = Path(__file__).parents[2] / "docs" / "how-to" / "recipe_template.py"
HALFSTEP = [sys.executable, "-m", "halfstep.cli.main"]


def test_without_flock_runs_train_and_files_arrive(tmp_path: Path) -> None:
    """Without file locks server and worker run, a second worker of the same name is refused, files
    of watched runs are stored, `halfstep link` finds the server's port, and a recipe can be added.
    """
    installation = Installation(tmp_path / "data", f"sqlite:///{tmp_path}/halfstep.db")
    port = free_port()
    lockless = {
        **os.environ,
        **installation.environment,
        "LD_PRELOAD": str(no_locks_library(tmp_path)),
        "PYTHONUNBUFFERED": "1",
    }

    def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = lockless | environment
        return subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS
        )

    up = subprocess.Popen([*HALFSTEP, "up"], env=lockless | {"HALFSTEP_PORT": str(port)})
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}"))
        until(lambda: f":{port}/" in run(*HALFSTEP, "link", "operator").stdout)
        [link] = re.findall(r"http://\S+", run(*HALFSTEP, "link", "operator").stdout)
        admin = Admin.sign_in(link)
        with closing(admin.browser), closing(admin.client) as client:
            until_some(client.recipes)
            second = run(*HALFSTEP, "worker")
            assert (second.returncode, "is already running here" in second.stderr) == (1, True)
            added = run(*HALFSTEP, "recipe", "add", str(RECIPE))
            assert added.returncode == 0, added.stderr
            digits = client.submit("digits", {"training": {"steps": 20}})["id"]
            assert client.wait(digits)["status"] == "finished"
            script = run(sys.executable, str(SCRIPT), "last.pt", **admin.environment)
            assert script.returncode == 0, script.stderr
            [watched] = until_some(lambda: client.runs("source:watch status:finished"))
            until(lambda: all(each["is_stored"] for each in client.artifacts(watched["id"])))
            assert not list((tmp_path / "data").rglob("incoming/*.owner"))
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(SECONDS)
