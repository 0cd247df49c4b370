"""Points that Optuna suggests, recomputed from rows each time, and trials that its pruners end."""

import math
from collections.abc import Callable
from statistics import mean
from typing import Any

import optuna
import pytest

from app.sweeps import optuna_study, search_space
from app.sweeps.search_space import Space, grid, grid_size, guess, in_words
from db.sweeps.sweeps import COMPLETE, MAXIMIZE, MINIMIZE, OPEN
from db.tables import Sweep, Trial
from tests.marks import looped

SQUARE: Space = {
    "x": {"distribution": "uniform", "low": -5, "high": 5},
    "y": {"distribution": "uniform", "low": -5, "high": 5},
}


def read(given: dict[str, Any], kind: str = "random") -> Space:
    schema = {"properties": {path: guess(search) for path, search in given.items()}}
    space, errors = search_space.read(schema, given, kind)
    assert not errors
    return space


def search_points(
    space: Space, kind: str, runs: int, value: Callable[[dict[str, Any]], float] = lambda _: 0.0
) -> list[Trial]:
    """Draw this many points one after the other; each is the same if it is computed again."""
    trials: list[Trial] = []
    for number in range(1, runs + 1):
        point = optuna_study.suggest(space, kind, MINIMIZE, 7, trials)
        if number in (runs // 2, runs):
            assert point == optuna_study.suggest(space, kind, MINIMIZE, 7, trials)
        trials.append(Trial(number=number, params=point, state=COMPLETE, value=value(point)))
    return trials


@pytest.mark.parametrize("kind", ["tpe", "cmaes"])
def test_a_sampler_learns_from_rows(kind: str) -> None:
    """A study that is rebuilt for each point comes close to the lowest value."""
    trials = search_points(
        SQUARE, kind, 60, lambda point: (point["x"] - 1) ** 2 + (point["y"] - 2) ** 2
    )
    assert min(float(trial.value or 0) for trial in trials) < 0.1
    assert len({str(trial.params) for trial in trials}) == 60


def test_cmaes_continues_as_if_it_had_never_stopped() -> None:
    """CMA-ES suggests the same points, to the stored digits, after it is rebuilt from rows."""
    sampler = optuna.samplers.CmaEsSampler(seed=7, warn_independent_sampling=False)
    study, trials = optuna.create_study(sampler=sampler), list[Trial]()
    study.enqueue_trial(optuna_study.suggest(SQUARE, "cmaes", MINIMIZE, 7, []))
    for number in range(1, 31):
        asked = study.ask()
        point = {name: asked.suggest_float(name, -5, 5) for name in SQUARE}
        suggested = optuna_study.suggest(SQUARE, "cmaes", MINIMIZE, 7, trials)
        assert suggested == pytest.approx(point, rel=1e-5)
        value = (point["x"] - 1) ** 2 + (point["y"] - 2) ** 2
        study.tell(asked, value)
        trials.append(Trial(number=number, params=point, state=COMPLETE, value=value))


def test_open_trials_get_no_second_run() -> None:
    """Points that are suggested while other trials are open differ from those."""
    for kind in ("random", "tpe", "cmaes", "qmc"):
        trials: list[Trial] = []
        for number in range(1, 6):
            point = optuna_study.suggest(SQUARE, kind, MAXIMIZE, 1, trials)
            trials.append(Trial(number=number, params=point, state=OPEN, value=None))
        assert len({str(trial.params) for trial in trials}) == 5, kind


def test_a_quasi_random_sequence_is_even() -> None:
    """The first eight points of a quasi-random sequence have one in each eighth of the range."""
    space = read({"x": "uniform(0, 1)", "y": "uniform(0, 1)"})
    points = [trial.params for trial in search_points(space, "qmc", 8)]
    for name in space:
        assert sorted(int(8 * point[name]) for point in points) == [*range(8)]


def test_distributions_have_their_shapes() -> None:
    """Distributions that Optuna lacks are drawn by their quantiles."""
    space = read(
        {
            "normal": "normal(10, 2)",
            "lognormal": "lognormal(-7, 1)",
            "step": "uniform(0.05, 0.95) step 0.1",
            "size": "loguniform(8, 512) step 8",
            "layers": {"distribution": "normal", "mean": 6, "std": 2, "step": 1},
            "choice": {"values": ["a", "b"], "probabilities": [9, 1]},
        }
    )
    points = [trial.params for trial in search_points(space, "random", 200)]
    assert mean(point["normal"] for point in points) == pytest.approx(10, abs=0.5)
    assert mean(math.log(point["lognormal"]) for point in points) == pytest.approx(-7, abs=0.3)
    assert {point["step"] for point in points} <= {
        0.05,
        *(each / 10 for each in range(1, 10)),
        0.95,
    }
    assert all(type(point["size"]) is int and point["size"] % 8 == 0 for point in points)
    assert all(type(point["layers"]) is int for point in points)
    assert 0.8 < mean(point["choice"] == "a" for point in points) < 0.98


@looped("kind", ["random", "tpe", "cmaes", "qmc"])
def test_a_condition_is_on_another_setting(kind: str) -> None:
    """A conditional setting is searched only with the value that its condition requires."""
    space = read(
        {
            "momentum": "uniform(0, 1) when optimizer = sgd",
            "optimizer": "sgd, adam",
            "beta": {"values": [0.9, 0.99], "when": {"optimizer": "adam"}},
        }
    )
    assert [*space] == ["optimizer", "momentum", "beta"]
    assert in_words(space["momentum"]) == "uniform(0, 1) when optimizer = sgd"
    for trial in search_points(space, kind, 20, lambda point: point.get("momentum", 0.5)):
        names = {"momentum"} if trial.params["optimizer"] == "sgd" else {"beta"}
        assert trial.params.keys() == {"optimizer"} | names


def test_a_grid_has_each_point_once() -> None:
    """A grid has each point once, without settings whose condition is false."""
    given = {"optimizer": "sgd, adam", "momentum": "0.8, 0.9 when optimizer = sgd", "lr": [1, 2]}
    space = read(given, "grid")
    points = [*grid(space)]
    assert len(points) == grid_size(space) == 6
    assert points[0] == {"optimizer": "sgd", "lr": 1, "momentum": 0.8}
    assert {"optimizer": "adam", "lr": 2} in points


def prune(pruner: dict[str, Any], rows: list[list[float]], new: int) -> set[int]:
    """Return which trials are weak, where all but the last `new` ones are complete."""
    sweep = Sweep(id=1, goal=MINIMIZE, pruner={"first": 1, "factor": 3, "last": None} | pruner)
    trials, turn, since = [], 0, 0
    for number, values in enumerate(rows, 1):
        is_new = number > len(rows) - new
        since = turn if number == len(rows) - new + 1 else since
        reports = []
        for rung, value in enumerate(values, 1):
            turn += 1
            reports.append({"rung": rung, "value": value, "turn": turn})
        state, last = (OPEN, None) if is_new else (COMPLETE, values[-1])
        trials.append(Trial(number=number, params={}, state=state, value=last, reports=reports))
    return set(optuna_study.weak_trials(sweep, trials, since))


def test_the_median_of_complete_trials_decides() -> None:
    """From the sixth trial on the median of complete trials decides; equal values continue."""
    before = [[float(value)] * 3 for value in range(1, 6)]
    assert prune({"kind": "median"}, [*before, [4.0, 4.0]], 1) == {6}
    assert prune({"kind": "median"}, [*before, [3.0, 2.0]], 1) == set()
    assert prune({"kind": "median"}, [*before[:4], [9.0]], 1) == set()


def test_patience_ends() -> None:
    """A trial that does not improve for so many checks is pruned."""
    rule = {"kind": "patient", "patience": 2}
    assert prune(rule, [[3.0, 2.0, 2.5, 2.5, 2.5]], 1) == {1}
    assert prune(rule, [[3.0, 2.9, 2.8, 2.7, 2.6]], 1) == set()


def test_the_newest_of_several_values_decides() -> None:
    """A pruner uses a trial's newest value, whatever values came before."""
    assert prune({"kind": "patient", "patience": 2}, [[3.0, 2.0, 2.5, 2.5, 2.5, 1.0]], 1) == set()
