"""Damaged steps and points are still reported after they were written again."""

from typing import Any

import pytest
from sqlalchemy import select, update

from db.database import Database
from db.tables import MetricBlock, MetricTail, Run, StepBlock
from db.telemetry import damage_search, step_block_writer, telemetry
from db.telemetry.damage import Damage
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record

pytestmark = pytest.mark.sql


def find_damage(database: Database) -> list[Damage]:
    with database.reading() as session:
        return damage_search.find_in_run(session.connection(), 1)


def record_flush(database: Database, run: Run, first: int, number: int, **changes: Any) -> None:
    record(database, run, make_steps([1.0] * number, first=first), **changes)


def damage_block(database: Database, table: type[Any], **its: int | str) -> None:
    with database.writing() as session:
        session.execute(update(table).filter_by(**its).values(data=b"x" * 40))


@pytest.mark.parametrize("way", ["joined", "sealed"])
def test_a_damaged_part_of_a_tail_is_named_after_it_was_joined(
    database: Database, running: Run, way: str
) -> None:
    """A damaged part of a tail is still reported after the tail was joined or sealed."""
    for first in (1, 301, 601):
        record_flush(database, running, first, 300)
    damage_block(database, StepBlock, first=301)
    if way == "joined":
        with database.writing() as session:
            step_block_writer.join_tail(session.connection(), 1)
    else:
        record_flush(database, running, 901, 9000)
    with database.reading() as session:
        firsts = session.scalars(select(StepBlock.first)).all()
    assert 301 not in firsts
    assert find_damage(database) == [Damage(1, "steps", 301, 600)]
    record_flush(database, running, 301, 300)  # recorded again
    assert find_damage(database) == []


def test_steps_after_a_rollback_are_no_loss(database: Database, running: Run) -> None:
    """Damaged steps that a rollback deletes are not reported."""
    for first in (1, 301, 601):
        record_flush(database, running, first, 300)
    damage_block(database, StepBlock, first=601)
    with database.writing() as session:
        step_block_writer.truncate(session.connection(), 1, after=300)
    assert find_damage(database) == []


def test_damaged_points_of_metrics_are_named_after_they_were_joined(
    database: Database, running: Run
) -> None:
    """Damaged points of metrics are reported after a join, in a tail without names."""
    record(database, running, events=[make_metric(step, 0.5) for step in range(20_000)])
    record(database, running, events=[make_metric(20_000, 0.5)])
    with database.reading() as session:
        block = session.scalars(select(MetricBlock).order_by(MetricBlock.first)).all()[-1]
    damage_block(database, MetricBlock, first=block.first)
    assert len(find_damage(database)) == 1
    for first in range(20_001, 40_000, 800):
        events = [make_metric(step, 0.5) for step in range(first, first + 800)]
        record(database, running, events=events)
    with database.reading() as session:
        assert not list(damage_search.find_in_blocks(session.connection()))
    [lost] = find_damage(database)
    assert (lost.kind, lost.name, lost.last) == ("metric", "val/accuracy", block.last)
    damage_block(database, MetricTail, run_id=1)
    with database.writing() as session:
        telemetry.truncate(session, 1, 1, after=39_000)
    assert {part.kind for part in find_damage(database)} == {"metric", "flush"}
