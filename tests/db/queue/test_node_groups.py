"""Nodes of one attempt: when they stop for each other, and whose end is the cause."""

import math

import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from db.clock import now
from db.database import Database
from db.queue import node_groups
from db.queue.node_groups import NodeOutcome
from db.tables import Run, RunNode, User
from tests.db.conftest import submit
from tests.db.queue.claims_made import add_workers, claim

LEASE = 60.0


@pytest.fixture
def runs(database: Database, ada: User) -> list[Run]:
    """Two runs in training on three nodes each."""
    workers = add_workers(database, 2, 2, 2)
    with database.writing() as session:
        made = [submit(session, ada, nodes=3) for _ in range(2)]
        for run, device in zip(made, (0, 1), strict=True):
            assert claim(session, workers[0], free_devices=range(device, 2)) == run
        return made


def change(session: Session, run: Run, number: int, **values: object) -> None:
    """Change a node of a run."""
    session.execute(
        update(RunNode).where(RunNode.run_id == run.id, RunNode.node == number).values(values)
    )


def test_a_node_stops_when_another_of_its_run_is_silent(
    database: Database, runs: list[Run]
) -> None:
    """Nodes of other runs do not count, nor one that has ended, nor any without a limit."""
    first, second = runs
    with database.writing() as session:
        change(session, second, 1, lease_expires_at=now() + 10.0)
        assert node_groups.stop_reason(session, first.id, 1, 0, LEASE) is None
        assert node_groups.stop_reason(session, second.id, 1, 1, LEASE) is None
        reason = node_groups.stop_reason(session, second.id, 1, 0, LEASE)
        assert reason == "node 1 (w1) has not reported for 50 s"
        assert node_groups.stop_reason(session, second.id, 1, 0, math.inf) is None
        change(session, second, 1, ended_at=now())
        assert node_groups.stop_reason(session, second.id, 1, 0, LEASE) is None


def test_the_first_node_waits_for_the_others_of_its_run(
    database: Database, runs: list[Run]
) -> None:
    """Each of them ends, or its lease does."""
    first, second = runs
    with database.writing() as session:
        change(session, first, 1, ended_at=now())
        assert not node_groups.others_have_ended(session, first.id, 1)
        change(session, first, 2, lease_expires_at=now() - 1.0)
        assert node_groups.others_have_ended(session, first.id, 1)
        assert not node_groups.others_have_ended(session, second.id, 1)


def test_the_cause_is_the_node_that_failed_by_itself(database: Database, runs: list[Run]) -> None:
    """A failure counts before a killed or lost node, and that before one that was stopped. Lost
    contact with other ranks is no cause.
    """
    first, second = runs
    with database.writing() as session:
        change(session, first, 1, lease_expires_at=now() - 1.0)
        change(session, first, 2, ended_at=now())
        lost = NodeOutcome("node 1 (w1) was lost", None, "infrastructure")
        assert node_groups.cause(session, first.id, 1) == lost

        for number, kind in ((1, node_groups.RANK), (2, None)):
            ending = NodeOutcome("its end", "Traceback", kind)
            node_groups.record_outcome(session, second.id, 1, number, ending)
        stopped = NodeOutcome("node 2 (w2): its end", "Traceback", None)
        assert node_groups.cause(session, second.id, 1) == stopped

        change(session, first, 1, ended_at=now())
        change(session, first, 2, ended_at=None, lease_expires_at=now() - 1.0)
        node_groups.record_outcome(session, first.id, 1, 1, NodeOutcome("ended", None, None))
        lost = NodeOutcome("node 2 (w2) was lost", None, "infrastructure")
        assert node_groups.cause(session, first.id, 1) == lost
        own = NodeOutcome("ValueError", "Traceback", "code")
        node_groups.record_outcome(session, first.id, 1, 2, own)
        failed = NodeOutcome("node 2 (w2): ValueError", "Traceback", "code")
        assert node_groups.cause(session, first.id, 1) == failed
