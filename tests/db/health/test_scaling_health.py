"""Loss-scale health, from tables of skips and from rows of both databases."""

import numpy as np
import pytest

from db.database import Database
from db.files import checkpoints
from db.health import scaling_health as health
from db.tables import Diagnosis, Run, Status, User, Worker
from db.telemetry import series
from halfstep.telemetry import scaling_health as page
from halfstep.telemetry.flags import NORM_OVERFLOW, NOT_STEPPED
from tests.db.conftest import claim, config, submit
from tests.db.telemetry.telemetry_made import make_steps, record
from tests.marks import looped
from tests.spool_made import checkpoint_of
from trainer.precision.scale_policies import CALIBRATED_AFTER

SEARCH = list(range(1, 7))  # the skips that lead from 2^24 down to 2^18


@looped(
    "attempts, skips, scale, word, part",
    [
        (6, SEARCH, 2.0**18, "calibrating", "6 of 6 steps (100 %) were skipped"),
        (20, SEARCH, 2.0**18, "calibrating", "25 consecutive steps without a skip"),
        (10, [], 2.0**16, "calibrating", "0 of 10 steps (0 %) were skipped"),
        (60, SEARCH, 2.0**18, "healthy", "at most 6 in a row, most recently 54 steps ago"),
        (60, [], 2.0**16, "healthy", "No step was skipped."),
        (1000, [400], 2.0**16, "healthy", "1 of 1,000 steps (0.1 %) was skipped, 600 steps ago"),
        (400, [*SEARCH, 320, 345, 370, 395], 2.0**19, "oscillating", "4 of the last 100 steps"),
        (5000, [4925, 4950, 4975, 5000], 2.0**19, "oscillating", "most recently the last one"),
        (400, [*SEARCH, *range(391, 401)], 2.0**8, "collapsing", "last 10 steps were all skipped"),
        (
            400,
            [*range(302, 401, 2), 301],
            64.0,
            "collapsing",
            "51 of the last 100 steps (51 %)",
        ),
        (400, [100], 0.5, "collapsing", "the scale is 0.5, below 1"),
        (40, list(range(1, 41)), 2.0**-24, "collapsing", "the scale is 2^-24, below 1"),
        (190, list(range(1, 191)), 2.0**30, "calibrating", "190 of 190 steps"),
        (600, list(range(50, 601)), 2.0**16, "dead", "0 of the last 500 steps changed"),
        (300, list(range(201, 301)), 0.0, "dead", "the scale is 0"),
    ],
)
def test_word_follows_from_the_skips(
    attempts: int, skips: list[int], scale: float, word: str, part: str
) -> None:
    """Each health has its pattern of skips, and a reason with the numbers."""
    found = health.judge(health.count(attempts, sorted(skips), scale))
    assert (found.word, part.lower() in found.reason.lower()) == (word, True), found.reason


def test_one_skip_per_growth_interval_is_healthy() -> None:
    """One skip per configured growth interval is healthy, unless the skips cost too much."""
    figures = health.count(400, [*SEARCH, 320, 345, 370, 395], 2.0**19)
    words = [health.judge(figures, growth_interval=each).word for each in (2000, 100, 25, 10, None)]
    assert words == ["oscillating", "oscillating", "healthy", "healthy", "oscillating"]
    few = health.count(70, [*SEARCH, 57, 61], 2.0**18)
    assert health.judge(few, growth_interval=25).word == "healthy"
    often = health.count(400, [*SEARCH, *range(310, 400, 9)], 2.0**19)
    assert health.judge(often, growth_interval=8).word == "oscillating"


def test_a_scale_set_by_hand_is_what_it_is_blamed_on() -> None:
    """Skips after a scale set by hand are attributed to it, and to no growth."""
    skips = [*SEARCH, 320, 345, 370, 399]
    found = health.judge(health.count(400, skips, 2.0**19, set_at=319))
    assert found.word == "oscillating"
    assert "the scale was set by hand 81 steps ago" in found.reason
    assert "most recently 1 step ago" in found.reason


def test_skips_of_a_new_scaler_are_not_skips_of_growth(database: Database, running: Run) -> None:
    """Skips after a new scaler replaced the old one are attributed to that, not to growth."""
    skips = [*SEARCH, 320, 321, 322, 399]
    found = health.judge(health.count(400, skips, 2.0**19, replaced_at=319))
    assert "a new scaler with another scale replaced the old one 81 steps ago" in found.reason
    with database.writing() as session:
        run = session.get_one(Run, running.id)
        run.step = 400
        content = {"step": 319, "count": 1, "scale_before": 1.0, "scale_after": 2.0}
        session.add(Diagnosis(run_id=run.id, kind="scaler_replaced", step=319, content=content))
    with database.reading() as session:
        run = session.get_one(Run, running.id)
        assert health.figures_of(session, [run])[run.id].steps_since_replaced == 81


def test_skips_in_a_row_are_called_so() -> None:
    """Several skips in a row by one bad batch are not called repeated."""
    for attempts in (400, 383):
        found = health.judge(health.count(attempts, [*SEARCH, *range(380, 384)], 2.0**15))
        assert found.word == "oscillating"
        assert found.reason.endswith("; they were consecutive.")


def test_search_ends_as_the_trainer_has_it() -> None:
    """Page and trainer agree on when a run is calibrated."""
    assert page.CALIBRATED_AFTER == CALIBRATED_AFTER


def test_figures_come_from_the_rows(database: Database, running: Run) -> None:
    """Figures count skips of their window, but the last skip at any distance."""
    record(database, running, make_steps([1.0] * 1100, skipped=[40, 90, 91, 92]))
    with database.reading() as session:
        run = session.get_one(Run, running.id)
        found = health.figures_of(session, [run])[run.id]
    assert (found.attempts, found.skips_1000, found.longest_streak) == (1100, 0, 0)
    assert (found.steps_since_skip, found.seconds_since_skip) == (1008, 5.04)

    record(database, running, make_steps([np.nan] * 50, first=1101, skipped=range(1120, 1151)))
    with database.reading() as session:
        run = session.get_one(Run, running.id)
        found = health.figures_of(session, [run])[run.id]
        judged = health.scaling_health(session, run)
    assert (found.skips_100, found.streak, found.applied_500) == (31, 31, 469)
    assert judged is not None
    assert judged.word == "collapsing"


def test_a_fork_is_judged_by_its_own_steps(
    database: Database, running: Run, ada: User, worker: Worker
) -> None:
    """A fork's health and shares exclude its parent's steps."""
    file = {"kind": "checkpoint", "size_bytes": 1, "sha256": "aa"}
    event = {"step": 4000, "reason": "interval", "request": None, "files": [file]}
    with database.writing() as session:
        checkpoints.publish(session, running.id, 1, checkpoint_of(event), ["key"])
        submit(session, ada, config=config(9000), parent_id=running.id, parent_step=4000)
        fork = claim(session, worker)
        assert fork is not None
    skipped = range(4001, 4007)
    losses = [float(step) for step in range(4001, 4011)]
    record(database, fork, make_steps(losses, first=4001, skipped=skipped))
    with database.reading() as session:
        run = session.get_one(Run, fork.id)
        judged = health.scaling_health(session, run)
        line = series.sparklines(session, [run])[run.id]
    assert judged is not None
    assert judged.word == "calibrating"
    assert "6 of 10 steps (60 %) were skipped" in judged.reason
    assert (judged.figures.attempts, judged.figures.steps_since_skip) == (10, 4)
    assert (run.own_steps, line) == (10, losses)


@pytest.mark.parametrize(
    ("precision", "scaler"), [("bf16", {}), ("fp32", {}), ("fp16", {"enabled": False})]
)
def test_a_run_without_a_scaler_has_no_scaling_health(
    database: Database, ada: User, precision: str, scaler: dict[str, bool]
) -> None:
    """bf16, fp32 and fp16 without a scaler have no scaling health."""
    with database.writing() as session:
        run = submit(session, ada, config=config(precision=precision) | {"scaler": scaler})
        run.step = 10
        assert health.scaling_health(session, run) is None


@pytest.mark.parametrize(
    ("norm", "flags", "is_dead"),
    [
        (np.nan, 0, True),
        (np.inf, 0, True),
        (1.0, 0, False),
        (np.inf, NORM_OVERFLOW, False),
        (np.nan, NOT_STEPPED, False),
    ],
)
def test_weights_are_lost_by_gradients_that_are_not_finite(
    database: Database, running: Run, norm: float, flags: int, is_dead: bool
) -> None:
    """Only applied steps with non-finite gradients lose the weights, not a non-finite loss."""
    steps = make_steps([1.0] * 39 + [np.nan])
    steps["grad_norm"][-1], steps["flags"][-1] = norm, flags
    record(database, running, steps)
    with database.reading() as session:
        judged = health.scaling_health(session, session.get_one(Run, running.id))
    assert judged is not None
    assert (judged.word == "dead") is is_dead, judged.reason


@pytest.mark.parametrize(
    ("status", "end"), [(Status.FINISHED, "the end"), (Status.PAUSED, "the pause")]
)
def test_skips_of_a_run_that_does_not_train_are_before_its_end(
    database: Database, running: Run, status: Status, end: str
) -> None:
    """Skips of an ended run are described relative to its end, everywhere."""
    record(database, running, make_steps([1.0] * 60, skipped=SEARCH))
    with database.writing() as session:
        run = session.get_one(Run, running.id)
        assert " ago" in getattr(health.scaling_health(session, run), "reason", "")
        run.status = status
        reason = getattr(health.scaling_health(session, run), "reason", "")
    assert (" ago" in reason, f" before {end}" in reason) == (False, True)
