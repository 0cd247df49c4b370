"""Blocks of metrics return what a plain list would, whatever is logged, repeated or rolled back."""

import math
from collections.abc import Iterator, Sequence
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, func, select, text, update

from db.database import Database
from db.queue import queue
from db.tables import LatestMetric, MetricBlock, MetricTail, Run, Status, User, Worker
from db.telemetry import (
    block_codec,
    damage,
    damage_search,
    metric_block_writer,
    metric_blocks,
    metric_points,
    series,
    telemetry,
    windows,
)
from db.telemetry.metric_blocks import Point
from db.telemetry.metric_points import MetricPoints
from db.telemetry.pyramid import END, SIZES
from db.telemetry.series import Cursor
from db.telemetry.summaries import Points, Summaries, merge
from halfstep.telemetry import events
from tests.db.conftest import claim, submit
from tests.db.telemetry.dying_database import dying_database
from tests.db.telemetry.telemetry_made import forget, make_metric, read_logged_points
from tests.forkserver import FORKSERVER, IN_ONE_PROCESS

#: A function-scoped database may serve every example: each begins with a run of its own.
anyhow = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
NAMES = ["a", "b", "c/d", "\N{SNOWMAN}" * 100]
#: (name, step): (elapsed_ms, value)
Plain = dict[tuple[str, int], tuple[int, float]]
values = st.floats(width=64) | st.sampled_from([math.nan, math.inf, -math.inf, 0.1, 1e-300])
#: How far a flush or a rollback goes back from the last step.
back = st.sampled_from([0, 1, 7, 100, 1000, 20_000])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seal and join blocks often."""
    _make_small(monkeypatch.setattr)


@pytest.fixture
def other(database: Database, ada: User, running: Run, worker: Worker) -> Run:
    """Another run in its first attempt."""
    with database.writing() as session:
        submit(session, ada)
        run = claim(session, worker)
        assert run is not None
        queue.start(session, run.id, run.attempt)
        return run


def _make_small(change: Any) -> None:
    for name, value in (
        ("BLOCK_POINTS", 256),
        ("NAME_POINTS", 70),
        ("LEAST_POINTS", 300),
        ("JOINED_ROWS", 4),
        ("ENDED_POINTS", 20),
    ):
        change(metric_block_writer, name, value)


@st.composite
def flushes(draw: st.DrawFn, first: int) -> list[tuple[str, int, int, float]]:
    """Draw points from a step on, dense or sparse, with a few odd values."""
    number = draw(st.sampled_from([1, 3, 40, 300, 900]))
    stride = draw(st.sampled_from([1, 1, 2, 50, 3000, 2**30]))
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    points = [
        (name, first + stride * n, n * 7, math.sin(n + index))
        for index, name in enumerate(names)
        for n in range(number)
    ]
    for at in draw(st.lists(st.integers(0, len(points) - 1), max_size=4)):
        points[at] = (*points[at][:3], draw(values))
    return points


def log(database: Database, run: Run, points: Sequence[tuple[str, int, int, float]]) -> None:
    rows: list[events.StepEvent] = [
        events.Metric(name=name, step=step, elapsed_ms=elapsed_ms, value=value)
        for name, step, elapsed_ms, value in points
    ]
    with database.writing() as session:
        telemetry.record(session, run.id, run.attempt, telemetry.Flush(events=rows))


def roll_back(database: Database, run: Run, after: int) -> None:
    with database.writing() as session:
        telemetry.truncate(session, run.id, run.attempt, after=after)


class _PlainSource:
    """A source with all points of a metric in memory, as plain rows."""

    series = metric_blocks.SERIES

    def __init__(self, key: dict[str, Any], points: Points) -> None:
        self.key, self.points = key, points

    def read_points(self, _connection: Connection, ranges: Sequence[tuple[int, int]]) -> Points:
        step = self.points.step
        within = [(step >= first) & (step <= last) for first, last in ranges]
        return self.points[np.any(within, axis=0)]

    def read_buckets(
        self, _connection: Connection, ranges: Sequence[tuple[int, int, int]]
    ) -> dict[int, Summaries]:
        found, parts = {}, Summaries.of(self.points)
        for size in SIZES:
            parts = merge(parts, size)
            at = parts.start // size
            mine = [(at >= low) & (at <= high) for each, low, high in ranges if each == size]
            if mine:
                found[size] = parts[np.any(mine, axis=0)]
        return found


def _plain_lines(
    run_id: int, expected: Plain, span: tuple[int | None, int | None], most: int
) -> Iterator[tuple[str, Any]]:
    low, high = windows._limits(*span)
    nowhere: Any = None
    for name in sorted({name for name, _ in expected}):
        rows = sorted((step, *rest) for (each, step), rest in expected.items() if each == name)
        rows = [row for row in rows if low <= row[0] <= high]
        if not rows:
            continue
        step, elapsed_ms, value = (np.array(column) for column in zip(*rows, strict=True))
        points = Points(step, elapsed_ms, np.zeros_like(step), value[:, None])
        source: Any = _PlainSource({"run_id": run_id, "name": name}, points)
        ends = (int(step[0]), int(step[-1]))
        if len(step) <= 2 * most:
            stretch = windows._drawn(source, ends, points, most)
        else:
            stretch = windows._long(nowhere, source, ends, most)
        yield name, dict(stretch.lines())["value"]


def _check(database: Database, run: Run, expected: Plain, spans: Sequence[Any]) -> None:
    """Compare all readers with a plain list."""
    points = [Point(name, step, *rest) for (name, step), rest in sorted(expected.items())]
    last: dict[str, Point] = {point.name: point for point in points}
    with database.reading() as session:
        connection = session.connection()
        assert repr(read_logged_points(session, run.id)) == repr(points)
        assert metric_blocks.count(connection, run.id) == len(points)
        for span in spans:
            for most in (32, 100):
                lines = windows.metrics_of_runs(
                    session, [run.id], first=span[0], last=span[1], most=most
                )[run.id]
                plain = dict(_plain_lines(run.id, expected, span, most))
                assert repr(lines) == repr(plain)
        rows = session.execute(select(LatestMetric.name, LatestMetric.step, LatestMetric.value))
        known = {
            name: (step, math.nan if value is None else value + 0.0) for name, step, value in rows
        }
        assert repr(sorted(known.items())) == repr(
            # SQLite's REAL stores -0.0 as 0.0.
            sorted((name, (point.step, point.value + 0.0)) for name, point in last.items())
        )
        for measured in windows.measure(session, run.id):
            mine = np.array([point.value for point in points if point.name == measured.name])
            finite = mine[np.isfinite(mine)]
            ends = (finite.min(), finite.max()) if len(finite) else (None, None)
            assert (measured.low, measured.high, measured.points) == (*ends, len(mine))
        for point in points[:: max(1, len(points) // 5)]:
            its = metric_blocks.points_at(connection, run.id, point.name, [point.step])
            assert repr(list(metric_blocks.to_points(point.name, its))) == repr([point])
            later = [each for each in points if each.name == point.name and each.step >= point.step]
            finite_later = [each.value for each in later if math.isfinite(each.value)]
            first = metric_blocks.first_finite(connection, run.id, point.name, point.step)
            assert first == next(iter(finite_later), None)
            third = metric_blocks.first_finite(connection, run.id, point.name, point.step, number=3)
            assert third == (finite_later[2] if len(finite_later) > 2 else None)
        latest = max((point.elapsed_ms for point in points), default=None)
        assert metric_blocks.last_elapsed_ms(connection, run.id) == latest


@pytest.mark.sql
@pytest.mark.slow
@given(data=st.data())
@anyhow
def test_blocks_have_what_a_list_would_have(
    database: Database, running: Run, data: st.DataObject
) -> None:
    """After any flushes, repetitions, rollbacks and ends, charts equal those of a plain list."""
    forget(database, running)
    expected: Plain = {}
    latest: list[tuple[str, int, int, float]] = []
    for _ in range(data.draw(st.integers(1, 9))):
        last = max((step for _, step in expected), default=0)
        kinds = ["next", "next", "next", "next", "other", "again", "rollback", "end"]
        kind = data.draw(st.sampled_from(kinds))
        if kind == "rollback":
            after = max(0, last - data.draw(back))
            roll_back(database, running, after)
            expected = {key: row for key, row in expected.items() if key[1] <= after}
            continue
        if kind == "end":
            with database.writing() as session:
                metric_block_writer.end_tail(session.connection(), running.id)
            continue
        if kind != "again" or not latest:
            gap = data.draw(st.sampled_from([1, 1, 1, 70, 9000]))
            before = data.draw(back) if kind == "other" else -gap
            latest = data.draw(flushes(max(0, last - before)))
        log(database, running, latest)
        expected |= {(name, step): rest for name, step, *rest in latest}  # type: ignore[misc]
    expected = {key: (row[0], row[1]) for key, row in expected.items()}
    steps = sorted({step for _, step in expected}) or [0]
    edge = st.sampled_from(steps) | st.integers(0, steps[-1])
    drawn = data.draw(st.lists(st.tuples(edge, edge), max_size=4))
    _check(database, running, expected, [(None, None), *(sorted(pair) for pair in drawn)])
    _check_blocks(database, running)
    with database.writing() as session:
        rows = select(MetricBlock).order_by(MetricBlock.name, MetricBlock.first)
        before = repr([_content(row) for row in session.scalars(rows)])
        session.execute(update(MetricBlock).values(lows=b"", low=None, high=None, size=0))
        session.expire_all()
        metric_block_writer.rebuild(session.connection(), running.id)
        rebuilt = repr([_content(row) for row in session.scalars(rows)])
    _check(database, running, expected, [(None, None)])
    assert len(rebuilt) == len(before)


def _content(row: MetricBlock) -> tuple[Any, ...]:
    return tuple(getattr(row, column.name) for column in MetricBlock.__table__.columns)


def _check_blocks(database: Database, run: Run) -> None:
    """Check that blocks of a metric do not overlap, and precede the tail."""
    with database.reading() as session:
        connection = session.connection()
        for source in metric_blocks.sources(connection, [run.id]):
            end = -END
            for head in source.heads:
                assert end < head.first <= head.last
                assert head.points <= 256
                end = head.last
            assert not len(source.tail) or source.tail.step[0] > end


def test_the_same_points_give_the_same_blocks(database: Database, running: Run) -> None:
    """The same points make the same blocks, in any flushes and with repetitions."""
    points = [("a", step, step, step / 7) for step in range(3000)]
    found = []
    for size in (1, 700):
        forget(database, running)
        for at in range(0, 3000, 50 * size):
            log(database, running, points[at : at + 50 * size])
        log(database, running, points[100:400])
        with database.writing() as session:
            connection = session.connection()
            metric_block_writer.end_tail(connection, running.id, is_live=False)
            rows = session.scalars(select(MetricBlock).order_by(MetricBlock.first))
            found.append([_content(row) for row in rows])
    assert found[0] == found[1]
    assert len(found[0]) == 12


def test_a_flush_is_one_row_and_a_short_run_ends_as_one(database: Database, running: Run) -> None:
    """A flush is one row for all names, and so is a short run that has ended."""
    for step in range(1, 4):
        log(database, running, [(name, step, step, 0.5) for name in NAMES])
    with database.writing() as session:
        count = select(func.count()).select_from(MetricTail)
        assert session.scalar(count) == 3
        queue.end(session, running.id, 1, Status.FINISHED)
        assert session.scalar(count) == 1
        assert session.scalar(select(func.count()).select_from(MetricBlock)) == 0
        assert len(read_logged_points(session)) == 12


def test_points_take_little_more_than_their_noise(
    database: Database, running: Run, other: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points take little space: a short run is one row, and SQLite pages of blocks are full."""
    monkeypatch.undo()
    noise = np.random.default_rng(0).standard_normal((1536, 40))
    short = [(f"m{n}", step, step, noise[step, n]) for n in range(20) for step in range(300)]
    log(database, other, short)
    with database.writing() as session:
        queue.end(session, other.id, other.attempt, Status.FINISHED)
        tail = select(MetricTail.points, func.length(MetricTail.data))
        [(points, size)] = session.execute(tail.where(MetricTail.run_id == other.id))
        assert size < 7.2 * points == 7.2 * len(short)
        assert session.scalar(select(func.count()).select_from(MetricBlock)) == 0
    monkeypatch.setattr(metric_block_writer, "LEAST_POINTS", 4096)
    for first in range(0, 1536, 128):
        steps = range(first, first + 128)
        values = noise.astype(np.float32).tolist()
        log(database, running, [(f"m{n}", s, s, values[s][n]) for n in range(40) for s in steps])
    if database.engine.dialect.name == "sqlite":
        with database.reading() as session:
            pages = "SELECT sum(pgsize), sum(payload) FROM dbstat WHERE name = 'metric_blocks'"
            size, content = session.execute(text(pages)).one()
            assert size < 1.25 * content


def test_many_names_are_sealed_some_at_a_time(
    database: Database, running: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One flush seals blocks of few names, so that other writers wait briefly."""
    monkeypatch.setattr(metric_block_writer, "MOST_NAMES", 3)
    monkeypatch.setattr(metric_block_writer, "MOST_POINTS", 500)
    expected: Plain = {}
    for step in range(0, 200, 20):
        points = [(f"m{n}", step + i, step, float(n)) for n in range(8) for i in range(20)]
        log(database, running, points)
        expected |= {(name, at): (elapsed, value) for name, at, elapsed, value in points}
    _check(database, running, expected, [(None, None), (30, 90)])


def test_a_live_reader_gets_each_point_once(database: Database, running: Run) -> None:
    """A live reader gets each point once by its cursor, and is told if it missed some."""
    seen: list[Point] = []
    cursor = Cursor()
    for step in range(30):
        log(database, running, [("a", step, step, 0.5), ("b", step, step, 1.5)])
        with database.reading() as session:
            changes = series.changes(session, running.id, cursor, metrics=["a"])
            assert changes is not None
            assert changes.has_all_metrics
            assert series.changes(session, running.id, changes.cursor) is None
        seen += changes.metrics
        cursor = Cursor.parse(str(changes.cursor))
    assert [point.step for point in seen if point.name == "a"] == list(range(30))
    for first in range(30, 2000, 200):  # its earlier flushes get into blocks
        log(database, running, [("a", first + n, n, 0.5) for n in range(200)])
    with database.reading() as session:
        changes = series.changes(session, running.id, cursor)
        assert changes is not None
        assert not changes.has_all_metrics
        assert changes.metrics[-1].step == 2029


def test_a_backlog_of_flushes_comes_in_pages(database: Database, running: Run) -> None:
    """A page of a backlog has whole flushes up to a number of points."""
    for step in range(3):
        log(database, running, [("a", 10 * step + n, n, 0.5) for n in range(10)])
    seen, pages, cursor = list[int](), 0, Cursor()
    with database.reading() as session:
        while changes := series.changes(session, running.id, cursor, most=8):
            seen += [point.step for point in changes.metrics]
            cursor, pages = changes.cursor, pages + 1
    assert seen == list(range(30))
    assert pages == 3


def test_pages_of_points_are_in_order_of_name_and_step(database: Database, running: Run) -> None:
    """Pages of points are in order of name and step, whether in blocks or not, with a cursor."""
    for first in range(0, 900, 90):
        log(database, running, [(n, first + i, i, 0.5) for n in ("b-1", "a") for i in range(90)])
    found, after = list[Point](), ""
    with database.reading() as session:
        while True:
            page = series.metrics(session, running.id, after=after, limit=100)
            found += page.rows
            assert page.total == 1800
            if page.next is None:
                break
            after = page.next
    assert [(p.name, p.step) for p in found] == [(n, i) for n in ("a", "b-1") for i in range(900)]


def test_a_damaged_block_costs_its_points(
    database: Database, running: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged block loses its own points only, is logged, and is found by a deep check."""
    damage._log.cache_clear()  # each is logged once in a process
    for first in range(0, 3000, 100):
        log(database, running, [("a", first + i, i, float(first + i)) for i in range(100)])
    with database.writing() as session:
        first = session.scalars(select(MetricBlock.first).order_by(MetricBlock.first)).all()[1]
        its = MetricBlock.first == first
        session.execute(update(MetricBlock).where(its).values(data=b"x" * 40))
    with database.reading() as session:
        lost = [point.step for point in read_logged_points(session)]
        [damaged] = damage_search.find_in_run(session.connection(), running.id)
        line = windows.metrics_of_runs(session, [running.id])[running.id]["a"]
    assert (damaged.name, damaged.first) == ("a", first)
    assert len(lost) == 3000 - 256
    assert len(line.x) == len(lost)
    assert "a at steps 256 to 511 of run 1 cannot be read" in caplog.text
    with database.writing() as session:
        session.execute(update(MetricTail).values(data=b"y" * 40))
    with database.reading() as session:
        kinds = {part.kind for part in damage_search.find_in_run(session.connection(), running.id)}
        assert kinds == {"flush", "metric"}
        assert max(point.step for point in read_logged_points(session)) < 2999


def test_damaged_summaries_are_computed(database: Database, running: Run) -> None:
    """Damaged summaries are computed from the points of their block."""
    points = [("a", step, step, math.sin(step)) for step in range(4000)]
    for first in range(0, 4000, 100):
        log(database, running, points[first : first + 100])
    with database.reading() as session:
        before = windows.metrics_of_runs(session, [running.id], most=40)[running.id]
    with database.writing() as session:
        session.execute(update(MetricBlock).where(MetricBlock.size > 0).values(lows=b"x" * 40))
    with database.reading() as session:
        assert windows.metrics_of_runs(session, [running.id], most=40)[running.id] == before


def _log_until(url: str, run_id: int, point: int) -> None:
    """Log metrics in a process that is killed at a statement."""
    _make_small(setattr)
    database = dying_database(url, point)
    with database.reading() as session:
        run = session.get_one(Run, run_id)
        last = metric_blocks.last_points(session.connection(), run_id)
    first = max((step for step, _ in last.values()), default=-1) + 1
    for at in range(first, first + 4000, 50):
        log(database, run, [(name, at + i, i, float(at)) for name in ("a", "b") for i in range(50)])


@IN_ONE_PROCESS
@pytest.mark.slow
def test_a_kill_at_any_statement_loses_nothing(
    database: Database, database_url: str, running: Run
) -> None:
    """After a kill at any statement each flush is stored as a whole or not at all."""
    database.dispose()
    for point in (3, 11, 27, 53):
        child = FORKSERVER.Process(target=_log_until, args=(database_url, running.id, point))
        child.start()
        child.join()
        with database.reading() as session:
            found = read_logged_points(session, running.id)
        steps = [point.step for point in found if point.name == "a"]
        assert steps == list(range(len(steps)))
        assert steps == [point.step for point in found if point.name == "b"]
        assert len(steps) % 50 == 0
    assert len(steps) > 300


@pytest.mark.sql
def test_readers_see_whole_flushes_while_blocks_are_sealed(
    database: Database, running: Run
) -> None:
    """While blocks are sealed, a reader sees all points of some moment."""
    problems: list[Any] = []

    def read() -> None:
        while len(problems) < 1:
            with database.reading() as session:
                found = read_logged_points(session, running.id, "a")
            if [point.step for point in found] != list(range(len(found))) or len(found) % 40:
                problems.append(found)
            if len(found) == 1600:
                return

    readers = [Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for first in range(0, 1600, 40):
        log(database, running, [("a", first + i, i, 0.5) for i in range(40)])
    for reader in readers:
        reader.join()
    assert problems == []


@pytest.mark.sql
def test_two_runs_are_logged_at_once(database: Database, running: Run, other: Run) -> None:
    """Two runs logged at once have separate blocks."""

    def write(run: Run) -> None:
        for first in range(0, 1500, 50):
            log(database, run, [("a", first + i, i, float(run.id)) for i in range(50)])

    writers = [Thread(target=write, args=(run,)) for run in (running, other)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    with database.reading() as session:
        for run in (running, other):
            points = read_logged_points(session, run.id)
            assert [(point.step, point.value) for point in points] == [
                (step, run.id) for step in range(1500)
            ]


def test_a_tail_row_is_the_same_after_encoding() -> None:
    """A tail row is unchanged by encoding, compressed or not; of two rows the later counts."""
    rows = [
        events.Metric(name=n, step=s, elapsed_ms=s, value=0.1 * s) for n in "ba" for s in (2, 1)
    ]
    points = MetricPoints.of(rows)
    later = MetricPoints.of([events.Metric(name="a", step=2, elapsed_ms=9, value=math.inf)])
    for is_compressed in (True, False):
        parts = [each.encode(is_compressed=is_compressed) for each in (points, later)]
        joined = MetricPoints.join(parts)
        found = {name: metric_points.columns_of(some) for name, some in joined.by_name()}
        assert found["b"]["value"].tolist() == [0.1, 0.2]
        assert found["a"]["value"].tolist() == [0.1, math.inf]
        assert MetricPoints.join(parts, ["a"]).names == ["a"]
        assert all(map(block_codec.is_intact, parts))
    with pytest.raises(block_codec.Damaged, match="its format is"):
        MetricPoints.join([block_codec.add_checksum(9, b"")])
    assert make_metric(1, 0.5)["value"] == 0.5
