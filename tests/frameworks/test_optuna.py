"""Optuna with `halfstep.optuna.watch`, compared with the unwatched study."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.reference import Training, assert_true, read_written

optuna = pytest.importorskip("optuna")
import halfstep.optuna  # noqa: E402


def run_study(folder: Path | None) -> tuple[Any, list[Training]]:
    """Run three trials: one completes, one is pruned after an epoch, and one raises."""
    trainings: list[Training] = []

    def objective(trial: Any) -> float:
        rate = trial.suggest_float("rate", 1e-3, 1e-1, log=True)
        training = Training(rate)
        trainings.append(training)
        if folder:
            halfstep.watch(training.net)
        training.epoch()
        if trial.number == 1:
            raise optuna.TrialPruned
        if trial.number == 2:
            raise KeyError("broken")
        return training.epoch()

    study = optuna.create_study(study_name="it", sampler=optuna.samplers.TPESampler(seed=0))
    watched = halfstep.optuna.watch(objective, folder=folder) if folder else objective
    study.optimize(watched, n_trials=3, catch=KeyError)
    return study, trainings


def test_each_trial_is_a_run(tmp_path: Path) -> None:
    """A trial's parameters, state, value and steps are recorded, and its results are unchanged."""
    bare, without = run_study(None)
    study, trainings = run_study(tmp_path / "runs")
    assert [(t.params, t.values) for t in study.trials] == [
        (t.params, t.values) for t in bare.trials
    ]
    assert all(each.equals(other) for each, other in zip(trainings, without, strict=True))
    states, statuses = ["complete", "pruned", "fail"], ["finished", "finished", "failed"]
    for i, (trial, training) in enumerate(zip(study.trials, trainings, strict=True)):
        place = tmp_path / "runs" / f"it-{i}"
        run = json.loads((place / "run.json").read_text())
        about = {"study": "it", "trial": i, "state": states[i]}
        assert run["config"] == {**trial.params, "optuna": about}
        assert run["tags"] == ["it"]
        outcome = json.loads((place / "outcome-1.json").read_text())
        assert outcome["status"] == statuses[i]
        assert_true(place, training.scaler)
        values = [e["value"] for e in read_written(place)[1] if e.get("name") == "value"]
        assert values == (trial.values or [])
    assert "KeyError: 'broken'" in outcome["error"]


def test_values_of_several_objectives_have_names(tmp_path: Path) -> None:
    """Values of several objectives are value_0 and value_1; watch's arguments are passed on."""
    study = optuna.create_study(study_name="it", directions=["minimize", "maximize"])

    def objective(trial: Any) -> tuple[float, float]:
        Training(1e-2).epoch()
        return trial.suggest_int("n", 3, 3), 4.0

    watched = halfstep.optuna.watch(objective, folder=tmp_path, config={"batch": 8}, name="mine")
    study.optimize(watched, n_trials=1)
    run = json.loads((tmp_path / "mine" / "run.json").read_text())
    assert (run["config"]["batch"], run["config"]["n"]) == (8, 3)
    events = read_written(tmp_path)[1]
    metrics = {e["name"]: e["value"] for e in events if e["event"] == "metric"}
    assert metrics == {"value_0": 3.0, "value_1": 4.0}


def test_a_second_thread_is_not_watched(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With n_jobs=2 the second trial runs unwatched, with a message."""
    both = threading.Barrier(2, timeout=60)

    def objective(trial: Any) -> float:
        both.wait()
        return float(trial.number)

    study = optuna.create_study(study_name="it")
    watched = halfstep.optuna.watch(objective, folder=tmp_path, console=False)
    study.optimize(watched, n_trials=2, n_jobs=2)
    assert sorted(trial.value for trial in study.trials) == [0.0, 1.0]
    assert len(list(tmp_path.glob("*/run.json"))) == 1
    assert "is not watched: another trial is running in this process" in capfd.readouterr().err
