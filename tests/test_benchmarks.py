"""Shared parts of benchmarks, and the measurements of the most important one."""

from pathlib import Path

import pytest
import torch

from benchmarks import many_names, synthetic, telemetry_cost
from db.database import Database
from db.runs import runs
from halfstep.telemetry.spool import SpoolReader
from tests.spool_made import events_of

pytestmark = pytest.mark.slow

TOLD = {"headroom": "headroom", "layer norms": "layer_norms", "histogram": "histogram"}


def test_the_run_that_benchmarks_record_takes_steps(database: Database) -> None:
    """As long as claims and records match its expectations; several may run at once."""
    run_id, _ = synthetic.start_run(database), synthetic.start_run(database)
    for flush in synthetic.flushes(1000, 500):
        synthetic.record(database, run_id, flush)
    with database.reading() as session:
        run = runs.get(session, run_id)
    assert (run.step, run.skipped) == (1000, 2)


@pytest.mark.extended
def test_many_names_are_sent_and_every_address_answers(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark of many metric names, with few of them."""
    monkeypatch.setattr(many_names, "NAMES", 20)
    _seconds, _wait, edits, answers = many_names.measure(database)
    assert edits > 0
    assert answers.keys() == many_names.ASKED.keys()


@pytest.mark.usefixtures("nothing_compiled")
def test_telemetrys_cost_is_that_of_each_diagnosis_and_no_bit_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy runs its measurement in every turn, and all end with the same weights."""
    turns = 2
    monkeypatch.setattr(telemetry_cost, "WARM_UP_TURNS", 1)
    _, measured, costs = telemetry_cost.measure(
        "fp32", torch.device("cpu"), tmp_path, turns=turns, seconds=1000
    )
    assert measured == turns
    assert list(costs) == ["telemetry", *TOLD, "all"]
    assert all(cost.is_same for cost in costs.values())
    all_turns = turns + telemetry_cost.WARM_UP_TURNS
    for name in costs:
        result = [each["event"] for each in events_of(SpoolReader(tmp_path / name).poll())]
        looks = TOLD.values() if name == "all" else [TOLD[name]] if name in TOLD else []
        per_turn = {"layer_norms": telemetry_cost.TURN_STEPS}
        assert {kind: result.count(kind) for kind in set(result)} == {
            kind: all_turns * per_turn.get(kind, 1) for kind in looks
        }
