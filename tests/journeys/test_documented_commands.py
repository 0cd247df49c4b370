"""The commands of operations.md, clusters.md and teams.md run as written."""

import re
import shlex
from pathlib import Path

import pytest

from db.access import accounts, projects
from db.database import Database
from tests.db.conftest import make_watched
from tests.halfstep.cli.test_documented_commands import ROOT, list_documented
from tests.journeys.installation import Installation, until_some
from tests.site import halfstep

DOCUMENTS = {f"docs/how-to/{name}.md" for name in ("operations", "clusters", "teams")}
#: Commands that do not end, or need other machines or a script, and the tests that run them.
ELSEWHERE = {
    "up": "tests/app/test_commands.py",
    "server": "tests/faults/kills_made.py",
    "worker": "tests/journeys/test_no_locks.py",
    "worker --only RUN": "tests/worker/clusters/test_ray.py",
    "worker --check": "tests/app/test_commands.py",
    "placer": "tests/clusters",
    "agent": "tests/halfstep/test_sweep_agent.py",
    "check --upload": "tests/halfstep/check/test_upload.py",
    "upload": "tests/halfstep/telemetry/test_uploader.py",
    "recipe add": "tests/journeys/test_no_locks.py",
}
#: What is typed for a documented command, in this order; {0} is a folder.
TYPED = (
    ("settings", "settings"),
    ("link NAME", "link operator"),
    ("link", "link operator"),
    ("user add NAME", "user add bob"),
    ("user add carol --role member --project vision", ""),
    ("user list", ""),
    ("user role carol maintainer --project vision", ""),
    ('user subject ada "https://id.example.org/realms/lab 1234"', ""),
    ("user change carol deactivate", ""),
    ("user token RUN", "user token 5"),
    ("user", "user list"),
    ("cluster check", ""),
    ("projects", "projects list"),
    ("run submit gpt --nodes 3 --devices 2", ""),
    ("run submit gpt --nodes 3 --devices 2 --set training.parallel=fsdp", ""),
    ("run list", ""),
    ("run show", "run show 1"),
    ("run move 3 4 --project vision", ""),
    ("sweep move", "sweep move 1 --project vision"),
    ("query", "query 'SELECT count(*) FROM runs'"),
    ("download", "download 1 {0}/files"),
    ("workers drain NAME", "workers drain {1}"),
    ("workers undrain NAME", "workers undrain {1}"),
    (
        "retention list|preview|add|remove",
        "retention preview --all --logs 30; retention add --all --logs 30 --yes; "
        "retention list; retention remove --all",
    ),
    ("migrate --check", ""),
    ("migrate --sql", ""),
    ("storage check", ""),
    ("storage check --deep", ""),
    ("storage check --deep --mend", ""),
    ("storage runs", ""),
    ("backup FOLDER", "backup {0}/first"),
    ("backup", "backup {0}/other"),
    ("backup FOLDER --previous EARLIER --verify", "backup {0}/next --previous {0}/first --verify"),
    ("restore FOLDER", "restore {0}/next"),
    ("rebuild RUN", "rebuild 1"),
    (
        "storage prune --checkpoints DAYS --logs DAYS",
        "storage prune --checkpoints 30 --logs 30 --yes",
    ),
)


def type_of(documented: str) -> re.Pattern[str]:
    """Return a pattern of a documented command, with capitals for any word and more options."""
    words = [
        r"\S+" if word.isupper() else re.escape(word) if "|" not in word else f"({word})"
        for word in documented.split()
    ]
    return re.compile(" ".join(words) + r"( .*)?")


@pytest.mark.only_on("postgresql")  # `migrate --sql` prints no SQL of SQLite
def test_each_command_for_operators_runs_as_written(
    tmp_path: Path, database: Database, database_url: str
) -> None:
    """Every documented command is run here, or listed with the test that runs it."""
    documented = {
        re.sub(r"\s+(#.*)?", " ", line.removeprefix("halfstep ")).strip()
        for name, line in list_documented()
        if name in DOCUMENTS
    }
    assert documented == {*ELSEWHERE, *(command for command, _ in TYPED)}
    assert all((ROOT / path).exists() for path in ELSEWHERE.values())
    installation = Installation(tmp_path / "data", database_url)
    with installation.running() as admin:
        until_some(admin.client.recipes)
        short = {"training": {"steps": 20}}
        admin.client.submit("digits", short)
        sweep = admin.client.begin_sweep(
            "digits", {"recipe.learning_rate": [0.1]}, short, kind="grid"
        )
        admin.client.wait_for_sweep(sweep["id"])
        for run_id in (3, 4):
            assert admin.client.submit("digits", short)["id"] == run_id
            admin.client.wait(run_id)
        with database.writing() as session:
            projects.make(session, "vision")
            owner = accounts.user_named(session, "ada")
            assert make_watched(session, owner).run_id == 5
        [worker] = admin.client.workers()
        other = {
            "HALFSTEP_DATA": str(tmp_path / "other"),
            "HALFSTEP_DATABASE_URL": f"sqlite:///{tmp_path / 'other.db'}",
        }
        failed = []
        for command, line in TYPED:
            for each in (line or command).format(tmp_path, worker["name"]).split("; "):
                assert type_of(command).fullmatch(each)
                environment = installation.environment | admin.environment
                ended = halfstep(
                    *shlex.split(each),
                    **environment | (other if command.startswith("restore") else {}),
                )
                if ended.returncode != (command == "cluster check"):  # one machine is no cluster
                    failed.append((each, ended.stdout, ended.stderr))
    assert failed == []
