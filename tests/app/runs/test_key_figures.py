"""Key figures of a run's page."""

import pytest

from app.runs.key_figures import key_figures, scaler_card
from db.database import Database
from db.tables import Run
from tests.db.telemetry.telemetry_made import (
    make_events,
    make_metric,
    make_skip,
    make_steps,
    record,
)


def test_the_scaler_card_counts_skips_and_culprits(database: Database, running: Run) -> None:
    """The scaler card has recent skips, skips in a row, and skips by overflowed parameter."""
    skipped = [2, 3, 4, 90]
    events = [*make_events(skipped[:-1]), make_skip(90, "model.0.bias", "model.2.bias")]
    record(database, running, make_steps([1.0] * 100, skipped=skipped), events=events)
    with database.reading() as session:
        card = scaler_card(session, session.get_one(Run, running.id))
    assert (card.recent, card.streak, card.seen, card.is_cut) == (4, 3, 4, False)
    assert [skip.step for skip in card.skips] == [90, 4, 3, 2]
    assert card.origins == [("model.2.bias", 1)]  # the last in forward order
    assert [skip.origin for skip in card.skips] == ["model.2.bias", "", "", ""]


def test_a_card_of_many_skips_says_that_it_covers_the_latest(
    database: Database, running: Run
) -> None:
    """A card of many skips says that it covers the latest, since longer sequences may exist."""
    skipped = range(1, 301)
    events = make_events(list(skipped))
    record(database, running, make_steps([1.0] * 300, skipped=skipped), events=events)
    with database.reading() as session:
        card = scaler_card(session, session.get_one(Run, running.id))
    assert (card.recent, card.streak, card.seen, card.is_cut) == (300, 300, 200, True)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["epoch", "learning rate", "step", "validation Dice"], "validation Dice"),
        (["Epoch", "value_loss"], "value_loss"),
        (["accuracy", "eval/wer"], "eval/wer"),
        (["iter", "run/seconds"], None),
        (["val/accuracy_0", "val/accuracy_1", "val/mean"], "val/mean"),
        (["eval/top1", "eval/top5"], "eval/top1"),
        ([f"val/accuracy_{number}" for number in range(10)], None),
    ],
)
def test_the_metric_of_the_tiles_stands_for_the_run(
    database: Database, running: Run, names: list[str], expected: str | None
) -> None:
    """The tile shows an evaluation metric rather than others, in any spelling, but no metric of a
    single class and no counter.
    """
    events = [make_metric(1, 0.5, name) for name in names]
    record(database, running, make_steps([1.0]), events=events)
    with database.reading() as session:
        metric = key_figures(session, session.get_one(Run, running.id)).metric
    assert (metric and metric.name) == expected


def test_the_scale_grows_no_more_after_the_last_step(database: Database, running: Run) -> None:
    """The note on the scale's next growth is shown only if the run reaches that step."""
    record(database, running, make_steps([1.0] * 10))
    notes = []
    for total in (100_000, 12):
        with database.writing() as session:
            run = session.get_one(Run, running.id)
            run.steps_total, run.precision = total, "fp16"
            run.config = run.config | {"scaler": {"growth_interval": 2000}}
            notes.append(key_figures(session, run).scale_note)
    assert notes == ["may grow after 2,000", ""]


def test_the_metric_of_the_tiles_is_a_loss_if_there_is_one(
    database: Database, running: Run
) -> None:
    """A tile has the metric with its step, and the gradient norm says whether it was clipped."""
    events = [make_metric(3, 0.9, "a/accuracy"), make_metric(2, 0.5, "val/loss")]
    record(database, running, make_steps([1.0] * 4), events=events)
    with database.reading() as session:
        figures = key_figures(session, session.get_one(Run, running.id))
    assert figures.metric is not None
    assert (figures.metric.name, figures.metric.value) == ("val/loss", 0.5)
    assert figures.metric.note == "step 2"
    assert figures.norm_note == "clipped to 3"
