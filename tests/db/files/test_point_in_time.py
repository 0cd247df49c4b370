"""Point-in-time recovery of PostgreSQL, by the commands in docs/how-to/operations.md."""

import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import select, text

from db.access import accounts
from db.database import Database
from db.runs import runs
from db.tables import Run
from tests.conftest import (
    postgresql_binaries,
    postgresql_control,
    postgresql_user,
    running_postgresql,
)

pytestmark = [pytest.mark.extended, pytest.mark.only_on("postgresql")]
DOCUMENT = Path(__file__).parents[3] / "docs" / "how-to" / "operations.md"
CONFIG = {"precision": "fp32", "training": {"steps": 1}}
BASE, MOMENT = "base-2026-11-28", "2026-11-29 17:19:42+00"


def test_the_run_before_the_time_is_there_and_the_one_after_it_is_not(tmp_path: Path) -> None:
    """A recovery has the runs before its time only, also after a crash; new runs get unused ids."""
    section = DOCUMENT.read_text().partition("## Point-in-time recovery")[2]
    archiving, backup, recovery, after = re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)
    with running_postgresql() as server:
        folder = Path(server.rpartition("=")[2])
        archive = folder / "archive"

        def execute(script: str) -> None:
            """Execute commands as PostgreSQL's user, with this test's folders."""
            script = script.replace("/archive", str(archive)).replace("main", "data")
            script = script.replace("/var/lib/postgresql/15", str(folder))
            environment = {"PATH": f"{postgresql_binaries()}:/usr/bin:/bin"}
            environment |= {"PGHOST": str(folder), "PGUSER": "halfstep"}
            command = ["bash", "-ec", script]
            subprocess.run(command, user=postgresql_user(), cwd=folder, env=environment, check=True)

        execute("mkdir /archive")
        execute(f"cat >> main/postgresql.conf <<'END'\n{archiving}END")
        postgresql_control(folder, "stop")
        postgresql_control(folder, "start")
        execute("createdb halfstep")
        url = server.format(name="halfstep")
        submit(url, "before the backup", migrates=True)
        execute(backup.replace("base-$(date +%F)", BASE))
        submit(url, "before the time")
        with_database = Database(url)
        with with_database.reading() as session:
            moment: datetime = session.scalars(text("SELECT clock_timestamp()")).one()
        with_database.dispose()
        submit(url, "after the time")
        postgresql_control(folder, "stop", "-m", "immediate")
        execute(recovery.replace(MOMENT, moment.astimezone(UTC).isoformat(sep=" ")))
        postgresql_control(folder, "start")
        psql, check = after.splitlines()
        assert check == "halfstep storage check"
        execute(psql)
        assert submit(url, "new") == 4712
        database = Database(url)
        with database.reading() as session:
            names = session.scalars(select(Run.name).order_by(Run.id)).all()
        database.dispose()
        assert names == ["before the backup", "before the time", "new"]
        shutil.rmtree(archive)


def submit(url: str, name: str, *, migrates: bool = False) -> int:
    """Queue a run, and return its number."""
    database = Database(url)
    if migrates:
        database.migrate()
    with database.writing() as session:
        owner = accounts.user_named(session, "ada")
        number = runs.submit(session, owner, Run(recipe="digits", name=name, config=CONFIG)).id
    database.dispose()
    return number
