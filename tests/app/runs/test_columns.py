"""Columns of the list of runs."""

from app.runs.columns import chosen, usual
from db.tables import Run
from tests.app.conftest import CONFIG


def run(**training: object) -> Run:
    return Run(config=CONFIG | {"training": CONFIG["training"] | training})


def names(*some: Run, metrics: tuple[str, ...] = ()) -> list[str]:
    return [column.name for column in usual(some, metrics)]


def test_the_usual_columns_go_by_the_listed_runs() -> None:
    """Default columns are the metric that most runs have and a differing setting, but not the seed
    or the number of steps.
    """
    plain = names(run(), run())
    assert plain[:3] == ["name", "status", "step"]
    assert "learning_rate" not in plain
    shown = names(
        run(learning_rate=0.1, seed=1, batch_size=4),
        run(learning_rate=0.2, seed=2, batch_size=8),
        metrics=("val/accuracy", "loss", "loss", "val/accuracy", "val/accuracy"),
    )
    assert [name for name in shown if name not in plain] == ["val/accuracy", "learning_rate"]
    assert [column.label for column in chosen("lr,learning_rate")[1:]] == ["lr", "lr"]
    assert [*names(run(seed=1, steps=5), run(seed=2, steps=9))] == plain
    odd = names(run(), metrics=("a, b", "step"))  # a comma would be two columns
    assert [name for name in odd if name not in plain] == ["metrics.step"]


def test_settings_of_one_name_in_two_groups_have_no_default_column() -> None:
    """Settings that differ from each other but not between runs get no default column."""
    groups = {"checkpoints": {"every_steps": None}, "evaluation": {"every_steps": 100}}
    alike = [Run(config=CONFIG | groups) for _ in range(2)]
    other = Run(config=CONFIG | groups | {"evaluation": {"every_steps": 50}})
    for some in (alike, [*alike, other]):
        assert "every_steps" not in names(*some)


def test_a_switch_without_its_group_is_no_default_column() -> None:
    """No default column is named "enabled", which would not say what is enabled."""
    runs = [Run(config=CONFIG | {"scaler": {"enabled": value}}) for value in (True, False)]
    assert "enabled" not in names(*runs)
