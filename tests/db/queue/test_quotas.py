"""Limits of projects and users, and the order of runs by usage."""

import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from db.access import accounts, projects
from db.database import Database
from db.errors import Invalid, OverQuota
from db.health import findings
from db.queue import pending_reasons, quotas
from db.runs import runs
from db.tables import Run, Status, User, Worker
from tests.db.conftest import submit
from tests.db.queue.claims_made import add_workers, claim, finish, nodes
from tests.site import until


def make(session: Session, *names: str, **limits: Any) -> None:
    """Make projects with these limits."""
    for name in names:
        quotas.set_limits(projects.get_or_create(session, name), limits)


def why(session: Session, run: Run, **limits: int) -> str:
    return pending_reasons.reason(run, pending_reasons.Queue.read(session), **limits).text


def test_a_project_trains_on_so_many_devices(database: Database, ada: User) -> None:
    """A project's device limit counts nodes times devices; later runs pass one above it."""
    one, two = add_workers(database, 4, 4)
    with database.writing() as session:
        make(session, "vision", devices=5)
        node_group = submit(session, ada, project="vision", nodes=2, devices_per_node=2)
        too_large = submit(session, ada, project="vision", devices_per_node=2)
        last, over = (submit(session, ada, project="vision") for _ in range(2))
        other = submit(session, ada)
        assert [claim(session, one) for _ in range(3)] == [node_group, other, last]
        assert claim(session, two) is None
        assert why(session, over) == "project vision uses 5 devices, the limit"
        finish(session, last)
        said = "project vision uses 4 of at most 5 devices, and the run needs 2"
        assert why(session, too_large) == said
        assert claim(session, two) == over
        finish(session, node_group)
        assert claim(session, two) == too_large


def test_a_user_trains_on_so_many_devices(database: Database, ada: User) -> None:
    """A user's device limit lets others pass, and a waiting run above it gets no reservation."""
    one, two = add_workers(database, 2, 2)
    most = {"devices_per_user": 3, "reserve_after_seconds": 0.0}
    with database.writing() as session:
        first = submit(session, ada, devices_per_node=2)
        node_group = submit(session, ada, nodes=2)
        small = submit(session, ada)
        bobs = submit(session, accounts.user_named(session, "bob"))
        assert claim(session, one, **most) == first
        assert claim(session, two, **most) == small
        assert why(session, node_group, devices_per_user=3) == (
            "its owner uses 3 devices, the limit"
        )
        assert claim(session, two, **most) == bobs
        assert node_group.reservation is None


@pytest.mark.only_on("postgresql")
def test_two_claims_at_once_keep_to_a_projects_limit(database: Database, ada: User) -> None:
    """Of two concurrent claims at a project's limit the second waits, and gets none."""
    one, two = add_workers(database, 1, 1)
    taken: list[Run | None] = []
    waits = select(func.count()).where(text("wait_event_type = 'Lock'"))
    waits = waits.select_from(text("pg_stat_activity"))
    with database.writing() as session:
        make(session, "vision", devices=1)
        submit(session, ada, project="vision")
        submit(session, ada, project="vision")

    def claim_another() -> None:
        with database.writing() as session:
            taken.append(claim(session, two))

    def waits_or_is_done() -> bool:
        with database.reading() as session:
            return not other.is_alive() or bool(session.scalar(waits))

    other = threading.Thread(target=claim_another)
    with database.writing() as session:
        assert claim(session, one) is not None
        other.start()
        until(waits_or_is_done)
    other.join()
    assert taken == [None]


@pytest.mark.sql
def test_the_project_with_the_least_for_its_share_goes_first(database: Database, ada: User) -> None:
    """At equal priority projects take turns by share, and positions agree with the claims."""
    (worker,) = add_workers(database, 9)
    with database.writing() as session:
        make(session, "large", share=3.0)
        make(session, "small")
        large = [submit(session, ada, project="large") for _ in range(8)]
        small = [submit(session, ada, project="small") for _ in range(8)]
        urgent = submit(session, ada, project="large", priority=1)
        places = pending_reasons.Queue.read(session).places
        assert why(session, small[0]).startswith("1 run is ahead: ")
        taken = [claim(session, worker) for _ in range(9)]
        assert [run and run.id for run in taken] == sorted(places, key=places.__getitem__)[:9]
        assert taken[0] == urgent
        assert (len({*large} & {*taken}), len({*small} & {*taken})) == (6, 2)


@pytest.mark.sql
def test_a_gang_is_ahead_by_its_projects_use(database: Database, ada: User) -> None:
    """A reservation for a less used project's run excludes runs of other projects."""
    one, two, _three = up = add_workers(database, 2, 2, 1)
    with database.writing() as session:
        make(session, "large", "small")
        held = [submit(session, ada, project="large", devices_per_node=each) for each in (2, 2, 1)]
        assert [claim(session, each) for each in up] == held
        many = [submit(session, ada, project="large") for _ in range(3)]
        node_group = submit(session, ada, project="small", nodes=2, devices_per_node=2)
        assert claim(session, one) is None
        finish(session, held[1])
        assert claim(session, two, reserve_after_seconds=0.0) is None
        assert why(session, many[0]).startswith(f"devices are reserved for run {node_group.id}")
        finish(session, held[0])
        assert claim(session, two, reserve_after_seconds=0.0) == node_group
        assert len(nodes(session, node_group)) == 2


@pytest.mark.slow
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    others=st.lists(st.sampled_from("abc"), min_size=1, max_size=12),
    share=st.sampled_from([0.01, 1.0, 100.0]),
    ends=st.lists(st.integers(0, 1), min_size=13, max_size=13),
)
def test_a_project_without_use_does_not_wait_for_ever(
    database: Database,
    ada: User,
    worker: Worker,
    others: list[str],
    share: float,
    ends: list[int],
) -> None:
    """A run of a project without use is claimed at the latest after the runs that waited before
    it, however small its share and however many runs other projects add.
    """
    with database.writing() as session:
        make(session, *"abc")
        make(session, "starved", share=share)
        for project in others:
            submit(session, ada, project=project)
        waits = submit(session, ada, project="starved")
        training: list[Run] = []
        taken: Run | None = None
        for claims in range(len(others) + 1):
            taken = claim(session, worker, free_devices=range(2))
            assert taken is not None
            if taken == waits:
                break
            submit(session, ada, project=taken.project)
            training.append(taken)
            if len(training) == 2:
                finish(session, training.pop(ends[claims]))
        assert taken == waits
        session.rollback()


def test_runs_beyond_a_quota_are_not_queued(database: Database, ada: User) -> None:
    """Submissions beyond the quota of a project, a user or stored bytes are rejected, and
    exceeded storage is a finding.
    """
    with database.writing() as session:
        make(session, "vision", queued=2, stored_gib=1)
        run = submit(session, ada, project="vision")
        quotas.check_submission(session, ada, "vision")
        quotas.allow(session, queued_per_user=1)
        with pytest.raises(OverQuota, match="owner: ada has 1 run in the queue"):
            quotas.check_submission(session, ada, "")
        quotas.allow(session, queued_per_user=0)
        submit(session, ada, project="vision")
        with pytest.raises(OverQuota, match="project: project vision has 2 runs in the queue"):
            quotas.check_submission(session, ada, "vision")
        run.stored_bytes = 3 * 2**29
        runs.set_status(session, run, Status.RUNNING)
        with pytest.raises(
            OverQuota, match=r"vision stores 1\.5 GiB, more than its limit of 1 GiB"
        ):
            quotas.check_submission(session, ada, "vision")
        (found,) = findings.of_run(session, run)
        assert found.text.startswith("Project vision stores 1.5 GiB")
        assert quotas.read_usage(session, ["vision"])["vision"] == {
            **{"devices_used": 0, "queued_used": 1, "stored_bytes": 3 * 2**29},
        }
        quotas.check_submission(session, ada, "")


@pytest.mark.parametrize(
    ("name", "value"),
    [("devices", "1.5"), ("queued", -1), ("stored_gib", "nan"), ("share", 0), ("share", ""),
     ("devices", "many")],
)  # fmt: skip
def test_a_limit_is_a_number_within_bounds(database: Database, name: str, value: Any) -> None:
    """An invalid limit is rejected with field, value and allowed values."""
    with database.writing() as session:
        with pytest.raises(Invalid, match=rf"{name}: '{value}' is not valid; allowed: a "):
            make(session, "vision", **{name: value})
        assert projects.get(session, "vision").devices is None
