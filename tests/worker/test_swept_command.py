"""A sweep of a command with a real worker."""

import pytest

from app.sweeps import sweep_submission
from app.sweeps.sweep_submission import SweepSubmission
from db.runs import runs
from db.sweeps import sweeps
from db.tables import ENDED, Status, Sweep
from tests.site import Site, until

CODE = """
import sys, halfstep
watch = halfstep.watch()
watch.log({"val/loss": float(sys.argv[1]) * int(sys.argv[2])})
"""


@pytest.mark.extended
def test_a_swept_command_finds_the_best_logged_value(site: Site) -> None:
    """Each point becomes arguments, integers as such, and the best one is reported."""
    line = f"python -c '{CODE}' {{lr}} {{batch}}"
    given = SweepSubmission.model_validate(
        {
            "command": {"line": line},
            "space": {"lr": "0.5, 0.25", "batch": "4, 2"},
            "metric": "val/loss",
            "at_once": 4,
        }
    )
    with site.database.writing() as session:
        sweep_submission.begin(session, site.owner, given)

    def is_over() -> bool:
        sweep_submission.submit_due(site.database)
        with site.database.reading() as session:
            sweep = session.get_one(Sweep, 1)
            return sweeps.tallies(session, [sweep])[1].open == 0

    with site.worker(HALFSTEP_ALLOW_COMMANDS="yes"):
        until(is_over)
    with site.database.reading() as session:
        rows = sweeps.trials(session, session.get_one(Sweep, 1), best_first=True, limit=9)
    assert rows[0][0].params == {"lr": 0.25, "batch": 2}
    assert [trial.value for trial, _run in rows] == [0.5, 1.0, 1.0, 2.0]


ENDLESS = """
import sys, time, halfstep
watch, rate, step = halfstep.watch(), float(sys.argv[1]), 0
while rate > 0 or step < 3:
    step += 1
    watch.log({"val/loss": rate * step}, step=step)
    time.sleep(0.05)
"""


def test_a_queued_command_is_pruned_by_its_values(site: Site) -> None:
    """The worker ends a command whose metric gets worse, without a failure, and runs the next
    point.
    """
    given = SweepSubmission.model_validate(
        {
            "command": {"line": f"python -c '{ENDLESS}' {{rate}}"},
            "space": {"rate": [1.0, -1.0]},
            "metric": "val/loss",
            "pruner": {"kind": "patient", "patience": 1},
        }
    )
    with site.database.writing() as session:
        sweep_submission.begin(session, site.owner, given)

    def is_over() -> bool:
        sweep_submission.submit_due(site.database)
        return site.run(2).status in ENDED if count_runs(site) == 2 else False

    with site.worker(HALFSTEP_ALLOW_COMMANDS="yes"):
        until(is_over)
    with site.database.reading() as session:
        trials = sweeps.all_trials(session, session.get_one(Sweep, 1))
        found = [(row.params["rate"], row.state, row.value) for row in trials]
        pruned = runs.statuses(session, 1)[-1]
    assert found[1] == (-1.0, "complete", -3.0)
    assert found[0][:2] == (1.0, "pruned")
    assert (pruned.status, pruned.failure_kind) == (Status.CANCELLED, "sweep")
    assert "had not improved for 1 checks" in (pruned.reason or "")


def count_runs(site: Site) -> int:
    with site.database.reading() as session:
        return runs.count(session)
