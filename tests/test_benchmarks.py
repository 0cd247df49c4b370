"""What several benchmarks begin with: a run that they record."""

from benchmarks import synthetic
from db import runs
from db.database import Database


def test_the_run_that_benchmarks_record_takes_steps(database: Database) -> None:
    """As long as claims and records are what they expect; several may go on at once."""
    run_id, _ = synthetic.start_run(database), synthetic.start_run(database)
    for flush in synthetic.flushes(1000, 500):
        synthetic.record(database, run_id, flush)
    with database.reading() as session:
        run = runs.get(session, run_id)
    assert (run.step, run.skipped) == (1000, 2)
