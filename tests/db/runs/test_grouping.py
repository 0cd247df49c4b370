"""Groups of runs in one query on both databases."""

from typing import Any

import pytest

from db.database import Database
from db.runs import grouping, trash
from db.runs.grouping import Grouped, group_runs
from db.runs.run_filters import Has, InSweep, Term, Word
from db.tables import LatestMetric, Run, Status, Sweep, Trial, User
from halfstep.telemetry.flags import NONFINITE_LOSS
from tests.db.conftest import config, submit


@pytest.fixture
def some(database: Database, ada: User) -> None:
    """Six runs, of which the last one is in the trash."""
    rates, tags = [0.1, 0.1, 0.1, 0.2, None, 0.1], ["a, B", "b", "", "a", "a", "a"]
    losses = [1.0, 2.0, None, 5.0, 1e300, 9.0]
    with database.writing() as session:
        said: dict[str, Any] = {"name": "s", "recipe": "digits", "tags": "", "status": "running"}
        said |= {"metric": "loss", "goal": "minimise", "kind": "grid", "config": {}, "space": {}}
        numbers = {"seed": 0, "runs_total": 6, "at_once": 1, "priority": 0, "devices_per_node": 1}
        session.add(Sweep(id=7, owner_id=ada.id, **said, **numbers))
        for rate, each, loss in zip(rates, tags, losses, strict=True):
            training: dict[str, Any] = {} if rate is None else {"lr": rate, "decay": "Cosine"}
            run = submit(session, ada, config=config(**training), tags=each)
            run.loss, run.status, run.step = loss, Status.FINISHED, 10
            run.last_flags = NONFINITE_LOSS if loss is None else 0
            if loss is not None and rate is not None:
                session.add(
                    LatestMetric(run_id=run.id, name="val/accuracy", step=1, value=loss / 10)
                )
        session.get_one(Run, 4).status = Status.FAILED
        session.flush()
        for run_id in (2, 3):
            session.add(Trial(sweep_id=7, number=run_id, run_id=run_id, params={}, state="open"))
        trash.delete(session, 6, ada)


def by(database: Database, name: str, *names: str, **options: Any) -> Grouped:
    with database.reading() as session:
        return group_runs(session, name, names=names, **options)


def test_figures_of_a_group_are_counted_averaged_and_spread(database: Database, some: None) -> None:
    """A group's figures use finite values only; runs without the setting are one group."""
    found = by(database, "lr", "loss", "val/accuracy")
    assert [(each.value, each.runs, each.newest) for each in found.groups] == [
        (None, 1, 5),
        (0.2, 1, 4),
        (0.1, 3, 3),
    ]
    assert (found.total, found.path) == (3, "training.lr")
    last = found.groups[-1]
    assert last.statuses == {"diverged": 1, "finished": 2}
    loss = last.spreads["loss"]
    assert (loss.count, loss.mean, loss.lowest, loss.highest) == (2, 1.5, 1.0, 2.0)
    assert loss.deviation == pytest.approx(0.5**0.5)
    assert last.spreads["val/accuracy"].mean == pytest.approx(0.15)
    assert found.groups[0].spreads == {}  # 1e300, whose square is no number
    alone = found.groups[1]
    assert (alone.statuses, alone.spreads["loss"].deviation) == ({"failed": 1}, None)


def test_a_run_without_a_scaler_has_no_scale_to_average(database: Database, ada: User) -> None:
    """The scale of 1 that runs without a scaler record is not averaged."""
    with database.writing() as session:
        for precision, scale in (("fp16", 2.0**16), ("bf16", 1.0), ("fp32", 1.0)):
            submit(session, ada, config=config() | {"precision": precision}).scale = scale
    found = by(database, "recipe", "scale")
    scale_spread = found.groups[0].spreads["scale"]
    assert (scale_spread.count, scale_spread.mean) == (1, 2.0**16)
    groups = by(database, "precision", "scale").groups
    assert [each.value for each in groups if "scale" in each.spreads] == ["fp16"]


def test_by_columns_tags_and_texts_whatever_their_case(database: Database, some: None) -> None:
    """Runs are grouped by columns, tags and texts ignoring case; one with two tags is in both."""
    tags = [(each.value, each.runs) for each in by(database, "tag").groups]
    assert [(value and str(value).lower(), count) for value, count in tags] == [
        ("a", 3),
        (None, 1),
        ("b", 2),
    ]
    for name, value in (("recipe", "digits"), ("owner", "ada"), ("decay", "Cosine")):
        assert value in [each.value for each in by(database, name).groups]
    assert [each.value for each in by(database, "project").groups] == [None]
    assert [(each.value, each.runs) for each in by(database, "sweep").groups] == [(None, 3), (7, 2)]
    for term, newest in ((Term(InSweep(7)), 3), (Term(InSweep(), is_negated=True), 5)):
        assert by(database, "recipe", conditions=[term]).groups[0].newest == newest
    assert by(database, "nothing").groups[0].runs == 5


def test_small_groups_have_the_ids_of_their_runs(
    database: Database, some: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small groups list the ids of their runs, larger ones do not."""
    groups = by(database, "tag", "loss").groups
    assert [each.ids for each in groups] == [[1, 4, 5], [3], [1, 2]]
    assert [each.ids for each in by(database, "lr").groups] == [[5], [4], [1, 2, 3]]
    monkeypatch.setattr(grouping, "MOST_IDS", 2)
    assert [each.ids for each in by(database, "lr").groups] == [[5], [4], []]


def test_it_is_ordered_and_filtered_as_the_list_is(database: Database, some: None) -> None:
    """Groups can be sorted by a mean, a count or a common value, with nulls last."""
    for sort, values in (
        ("loss", [0.1, 0.2, None]),
        ("-loss", [0.2, 0.1, None]),
        ("-runs", [0.1, None, 0.2]),
        ("-lr", [0.2, 0.1, None]),
        ("lr", [0.1, 0.2, None]),
        ("id", [0.1, 0.2, None]),
        ("-name", [None, 0.2, 0.1]),
    ):
        found = by(database, "lr", "loss", sort=sort).groups
        assert [each.value for each in found] == values, sort
    lacking = [Term(Has("lr"), is_negated=True)]
    assert [each.runs for each in by(database, "lr", conditions=lacking).groups] == [1]
    assert by(database, "lr", conditions=[Term(Word("no such"))]) == Grouped([], 0, "training.lr")
