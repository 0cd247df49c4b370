"""Parity over seeds: pairs of runs, and statements about them."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import delete, update
from starlette.testclient import TestClient

from db.database import Database
from db.tables import Run, RunNode, Status, User
from tests.app.compare.any_runs_made import train
from tests.app.compare.seeds_made import FP16, FP32, add_seed, two_precisions
from tests.app.compare.shared_links_made import open_link
from tests.app.conftest import start_run
from tests.db.telemetry.earlier_steps import as_rows
from tests.db.telemetry.telemetry_made import make_metric
from tests.marks import looped

pytestmark = pytest.mark.usefixtures("offered")


@pytest.fixture
def make(database: Database, ada: User) -> Callable[..., Run]:
    """Make a run of a precision and a seed with an accuracy."""

    def one(*values: Any, **options: Any) -> Run:
        return add_seed(database, ada, *values, **options)

    return one


def parity(script: TestClient, runs: str, **query: Any) -> dict[str, Any]:
    answer = script.get("/api/v1/comparison/parity", params={"runs": runs, **query})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def only(found: dict[str, Any]) -> dict[str, Any]:
    """Return the only group of a parity."""
    (group,) = found["groups"]
    return dict(group)


def reason(found: dict[str, Any]) -> str:
    """Return why the only group is unknown."""
    group = only(found)
    assert group["conclusion"] == "unknown"
    assert group["sentence"] == f"Unknown for {group['name']}: {group['result']['reason']}."
    assert group["result"]["interval"] is None
    return str(group["result"]["reason"])


def test_precisions_are_paired_by_seed(database: Database, ada: User, script: TestClient) -> None:
    """Precisions are compared with fp32 by seed, and the conclusion depends on the margin."""
    runs = two_precisions(database, ada)
    wide, narrow, none = (
        parity(script, runs, **({"margin": margin} if margin else {}))
        for margin in (0.02, 0.005, 0)
    )
    assert (wide["metric"], wide["is_low"]) == ("val/accuracy", False)
    assert (wide["setting"], wide["seed"]) == ("precision", "training.seed")
    assert (wide["reference"], only(wide)["name"]) == ("fp32", "fp16")
    assert [pair["seed"] for pair in only(wide)["pairs"]] == ["0", "1", "2", "3", "4"]
    assert only(wide)["pairs"][1] == {
        "seed": "1",
        "run": 2,
        "reference_run": 7,
        "value": FP16[1],
        "reference_value": FP32[1],
    }
    assert [only(each)["conclusion"] for each in (wide, narrow, none)] == [
        *("equivalent", "worse", "worse")
    ]
    result = only(wide)["result"]
    assert result["difference"] == pytest.approx(-0.0102)
    assert (
        result["interval"] == only(narrow)["result"]["interval"] == only(none)["result"]["interval"]
    )
    assert only(wide)["sentence"] == (
        "fp16 is equivalent to fp32 in val/accuracy within ±0.02 (5 seeds, two one-sided "
        "tests at 5 %): the difference is -0.0102, its 90 % interval -0.011 to -0.009402. "
        "Within the margin it is worse by 0.0102 ± 0.001039 (95 % confidence)."
    )
    assert only(narrow)["sentence"] == (
        "fp16 is worse than fp32 in val/accuracy by 0.0102 ± 0.001039 (5 seeds, 95 % confidence). "
        "The difference is larger than the margin of ±0.005."
    )
    assert "It is undecided" in only(parity(script, runs, margin=0.01))["sentence"]


def test_better_and_worse_follow_the_direction_of_the_metric(
    database: Database, ada: User, script: TestClient
) -> None:
    """A lower time is better; a metric of unknown direction is only lower or higher."""
    for lr, scale in ((0.1, 1.0), (0.2, 2.0)):
        for seed in range(3):
            train(database, ada, [3.0, scale * (1 + seed / 10)], lr=lr, seed=seed)
    found = {
        name: parity(script, "1,2,3,4,5,6", metric=name)
        for name in ("loss", "val/accuracy", "val/score")
    }
    assert [only(each)["conclusion"] for each in found.values()] == ["worse", "worse", "higher"]
    assert found["val/score"]["is_low"] is None
    assert (found["loss"]["setting"], found["loss"]["reference"]) == ("training.lr", "0.1")
    backwards = parity(script, "6,5,4,3,2,1", metric="loss")
    assert (backwards["reference"], only(backwards)["conclusion"]) == ("0.2", "better")


def test_not_decided_has_an_estimate_of_further_seeds(
    make: Callable[..., Run], script: TestClient
) -> None:
    """With a margin an undecided parity has an estimate of seeds; without one only worse counts."""
    for seed, (low, high) in enumerate(((0.9, 0.91), (0.93, 0.92), (0.89, 0.89))):
        make("bf16", seed, low)
        make("fp32", seed, high)
    group = only(parity(script, "1,2,3,4,5,6", margin=0.01))
    further = group["result"]["further"]
    assert group["conclusion"] == "undecided"
    assert 1 <= further["least"] <= further["about"] <= further["most"]
    assert f"About {further['about']} further seeds would decide" in group["sentence"]
    without = only(parity(script, "1,2,3,4,5,6"))
    assert (without["conclusion"], without["result"]["further"]) == ("undecided", None)
    assert (
        "needs a margin, the largest difference that does not matter: 0.009067 would be 1 %"
        in without["sentence"]
    )
    tiny = only(parity(script, "1,2,3,4,5,6", margin=1e-9))
    assert tiny["result"]["further"]["most"] is None
    assert "more than 1,000" in tiny["sentence"]


def test_each_precision_is_compared_with_fp32(
    make: Callable[..., Run], database: Database, script: TestClient
) -> None:
    """fp16 without a scaler and TF32 are groups of their own, each compared with fp32."""
    for seed in (0, 1):
        for precision, accuracy in (("fp32", 0.9), ("fp16", 0.8), ("bf16", 0.7)):
            make(precision, seed, accuracy + seed * (0.01 + accuracy / 100))
        bare = make("fp16", seed, 0.6)
        make("fp32", seed, 0.95 + seed / 100, tf32=True)
        with database.writing() as session:
            stored = session.get_one(Run, bare.id)
            stored.config = {**stored.config, "scaler": {"enabled": False, "init_scale": 2.0**24}}
    found = parity(script, ",".join(map(str, range(1, 11))))
    assert (found["reference"], found["reason"]) == ("fp32", "")
    assert [group["name"] for group in found["groups"]] == [
        *("fp16", "bf16", "fp16 without scaler", "TF32")
    ]
    assert {group["result"]["pairs"] for group in found["groups"]} == {2}


@pytest.mark.parametrize(
    ("status", "accuracy", "text"),
    [
        (None, 0.9, "not finished: run 3 (running)"),
        (Status.FAILED, 0.9, "not finished: run 3 (failed)"),
        (Status.CANCELLED, None, "not finished: run 3 (cancelled)"),
        (Status.FINISHED, None, "no finite val/accuracy: run 3 (finished)"),
        (Status.FINISHED, math.nan, "no finite val/accuracy: run 3 (finished)"),
        (Status.FINISHED, -math.inf, "no finite val/accuracy: run 3 (finished)"),
    ],
)
def test_a_run_without_a_result_is_not_left_out(
    make: Callable[..., Run],
    script: TestClient,
    status: Status | None,
    accuracy: float | None,
    text: str,
) -> None:
    """A failed or diverged run makes the parity unknown, since it may be the worst one; the rest is
    compared once the user removes it.
    """
    for precision, base in (("fp16", 0.9), ("fp32", 0.95)):
        for seed in range(3):
            if (precision, seed) == ("fp16", 2):
                make(precision, seed, accuracy, status=status)
            else:
                make(precision, seed, base + seed * (base - 0.8) / 10)
    assert reason(parity(script, "1,2,3,4,5,6")) == text
    assert only(parity(script, "1,2,4,5,6"))["result"]["pairs"] == 2


def test_runs_that_are_no_pairs_are_unknown(make: Callable[..., Run], script: TestClient) -> None:
    """Runs with no common seed, only one, several runs of a seed, no seed, or a single group have
    an unknown parity.
    """
    for precision, seed in (("fp16", 1), ("fp32", 2), ("fp32", 1), ("fp32", 1), ("fp16", 2)):
        make(precision, seed, 0.9)
    assert reason(parity(script, "1,2")) == "no run of fp16 has the seed of a run of fp32"
    assert reason(parity(script, "1,3")) == "1 pair; at least 2 are needed"
    several = reason(parity(script, "1,2,3,4,5"))
    assert several == "a group has several runs of seed 1; remove all but one"
    same = parity(script, "2,3")
    assert same["reason"] == "the runs differ in no setting but the seed"
    assert same["unpaired"] == [2, 3]
    make("fp16", None, 0.9)
    make("fp32", None, 0.9)
    alone = parity(script, "6,7")
    assert (alone["groups"], alone["seed"]) == ([], "")
    assert "neither the setting training.seed" in alone["reason"]
    assert reason(parity(script, "1,3,6,7")).startswith("1 pair")


def test_runs_that_differ_in_more_are_not_compared_by_themselves(
    make: Callable[..., Run], script: TestClient
) -> None:
    """Runs that also differ in another setting are not compared until the user chooses the setting;
    the sentence then names it. Values that are equal within each pair may differ between pairs.
    """
    for seed in range(3):
        make("fp16", seed, 0.9 + seed / 50, lr=0.1, depth=seed)
        make("fp32", seed, 0.95 + seed / 100, lr=0.2, depth=seed)
    runs = "1,2,3,4,5,6"
    found = parity(script, runs)
    assert reason(found) == "not comparable: runs of a pair also differ in training.lr"
    assert set(found["settings"]) == {"precision", "training.lr", "training.depth"}
    chosen = only(parity(script, runs, group="precision"))
    assert chosen["result"]["pairs"] == 3
    assert chosen["also_differ"] == ["training.lr"]
    assert chosen["sentence"].endswith("Runs of a pair also differ in training.lr.")
    by_rate = parity(script, runs, group="training.lr")
    assert (by_rate["reference"], only(by_rate)["name"]) == ("0.1", "0.2")
    assert only(by_rate)["also_differ"] == ["precision"]


def test_runs_of_other_length_or_origin_are_not_compared_by_themselves(
    make: Callable[..., Run], database: Database, script: TestClient
) -> None:
    """Runs with another number of steps, or that continue a checkpoint, are treated like runs that
    differ in a setting.
    """
    for seed in range(2):
        make("fp16", seed, 0.9 + seed / 50)
        make("fp32", seed, 0.95, steps=2 + seed)
    assert reason(parity(script, "1,2,3,4")) == (
        "not comparable: runs of a pair also differ in the number of their steps"
    )
    for seed in (5, 6):
        fork = make("fp16", seed, 0.9)
        make("fp32", seed, 0.9 + seed / 100)
        with database.writing() as session:
            session.get_one(Run, fork.id).parent_step = 0
    assert reason(parity(script, "5,6,7,8")) == (
        "not comparable: runs of a pair also differ in whether they continue a checkpoint"
    )


@pytest.mark.parametrize(
    ("column", "values", "text"),
    [
        ("parent_id", (3, 4), "their parent"),
        ("nodes", (1, 2), "their nodes or devices"),
        ("devices_per_node", (2, 4), "their nodes or devices"),
    ],
)
def test_runs_of_other_parents_or_sizes_are_not_compared_by_themselves(
    make: Callable[..., Run],
    database: Database,
    script: TestClient,
    column: str,
    values: Any,
    text: str,
) -> None:
    """Values equal in each pair may differ between pairs; a chosen setting is compared and
    named.
    """
    for seed in range(2):
        make("fp16", seed, 0.9 + seed / 50)
        make("fp32", seed, 0.95)

    def change(*of_runs: int) -> None:
        with database.writing() as session:
            for run_id, value in enumerate(of_runs, start=1):
                run = session.get_one(Run, run_id)
                run.parent_step = 0 if column == "parent_id" else None
                setattr(run, column, value)

    low, high = values
    change(low, low, high, high)
    assert only(parity(script, "1,2,3,4"))["also_differ"] == []
    change(low, low, low, high)
    assert reason(parity(script, "1,2,3,4")) == (
        f"not comparable: runs of a pair also differ in {text}"
    )
    chosen = only(parity(script, "1,2,3,4", group="precision"))
    assert (chosen["also_differ"], chosen["result"]["pairs"]) == ([text], 2)


def with_curves(
    make: Callable[..., Run], curves: dict[str, list[list[float]]], name: str = "val/loss"
) -> str:
    """Make runs with a curve for each precision and seed, at steps 10, 20, …; return their ids."""
    for precision, of_seeds in curves.items():
        for seed, values in enumerate(of_seeds):
            curve = [make_metric(10 * n, value, name) for n, value in enumerate(values, start=1)]
            make(precision, seed, None, curve=curve)
    return ",".join(map(str, range(1, 1 + sum(map(len, curves.values())))))


def test_curves_are_compared_over_the_steps_that_they_share(
    make: Callable[..., Run], script: TestClient
) -> None:
    """Curves are compared by their mean in the metric's unit, by the trapezoidal rule."""
    runs = with_curves(
        make,
        {
            "fp32": [[4.0, 2.0, 1.0, 0.5], [4.2, 2.0, 1.2, 0.5], [3.9, 2.1, 1.1]],
            "fp16": [[5.0, 3.0, 1.0], [5.1, 3.2, 1.2], [5.0, 3.1, 1.3]],
        },
    )
    found = parity(script, runs, metric="val/loss", value="area", margin=0.1)
    group = only(found)
    assert (found["value"], group["range"]) == (
        "area",
        {"first": 10, "last": 30, "points": 3, "buckets": None},
    )
    expected = [(4 + 2 * 2 + 1) / 4, (4.2 + 2 * 2 + 1.2) / 4, (3.9 + 2 * 2.1 + 1.1) / 4]
    assert [pair["reference_value"] for pair in group["pairs"]] == pytest.approx(expected)
    assert group["sentence"].startswith(
        "fp16 is worse than fp32 in mean val/loss over steps 10 to 30 (3 common points) by "
    )
    last = only(parity(script, runs, metric="val/loss", margin=0.1))
    assert (last["range"], last["conclusion"]) == (None, "undecided")


@pytest.mark.parametrize("intervals", [(20, 5), (5, 20), (8, 6), (7, 3)])
def test_curves_at_other_intervals_are_compared_at_their_common_steps(
    make: Callable[..., Run], script: TestClient, intervals: tuple[int, int]
) -> None:
    """Curves are compared at common steps, since a coarse convex curve has a larger area."""
    for precision, every in zip(("fp32", "fp16"), intervals, strict=True):
        for seed in range(3):
            noise = np.random.default_rng(seed).normal(scale=0.1, size=121)
            curve = [
                make_metric(step, 1 + 2 * math.exp(-step / 25) + noise[step], "val/loss")
                for step in range(every, 121, every)
            ]
            make(precision, seed, None, curve=curve)
    query = {"metric": "val/loss", "value": "area", "group": "precision", "margin": 0.01}
    group = only(parity(script, "1,2,3,4,5,6", **query))
    common = math.lcm(*intervals)
    assert group["range"]["first"] == common
    assert group["range"]["points"] == 120 // common
    assert [pair["value"] for pair in group["pairs"]] == pytest.approx(
        [pair["reference_value"] for pair in group["pairs"]]
    )
    assert group["result"]["difference"] == pytest.approx(0)


def test_areas_of_long_curves_name_their_buckets(
    make: Callable[..., Run], script: TestClient
) -> None:
    """The area of a long curve names its buckets and the number of recorded points."""
    for number, precision in enumerate(("fp32", "fp16") * 2):
        make(precision, number // 2, None, steps=6_000, loss=1 + number**2 / 100)
    group = only(parity(script, "1,2,3,4", metric="loss", value="area"))
    range_ = group["range"]
    assert (range_["first"], range_["last"], range_["points"]) == (1, 6_000, 6_000)
    assert 1 < range_["buckets"] < 5_000
    assert group["pairs"][0]["value"] == pytest.approx(1.01)
    assert f"(6,000 common points, as means of {range_['buckets']:,} buckets)" in group["sentence"]


def test_a_group_of_another_length_has_steps_of_its_own(
    make: Callable[..., Run], script: TestClient
) -> None:
    """A shorter group does not shorten the curves of the others."""
    runs = with_curves(
        make,
        {
            "fp32": [[4.0, 2.0, 1.0, 0.9], [4.2, 2.0, 1.2, 0.9]],
            "fp16": [[4.1, 2.0, 1.0], [4.4, 2.0, 1.2]],
            "bf16": [[4.0, 2.1, 1.5, 1.0], [4.2, 2.3, 1.6, 1.1]],
        },
    )
    groups = parity(script, runs, metric="val/loss", value="area")["groups"]
    assert [group["range"]["last"] for group in groups] == [30, 40]


@pytest.mark.parametrize(
    ("curve", "text"),
    [
        ([], "no curve of val/loss: run 3 (finished)"),
        ([math.nan, math.inf], "no finite val/loss: run 3 (finished)"),
        ([2.0, 1.0], "the curves of val/loss have 2 steps in common; at least 3 are needed"),
        (
            [3.0, math.nan, 1.0],
            "a NaN, infinite or unknown value in the curve of val/loss: run 3 (finished)",
        ),
    ],
)
def test_a_curve_without_an_area_is_unknown(
    make: Callable[..., Run], script: TestClient, curve: list[float], text: str
) -> None:
    """A curve without points, with one point or with a non-finite value has an unknown area."""
    whole = [4.0, 2.0, 1.0]
    runs = with_curves(make, {"fp32": [whole, whole], "fp16": [curve, whole]})
    assert reason(parity(script, runs, metric="val/loss", value="area")) == text


def test_times_to_a_target_are_compared(make: Callable[..., Run], script: TestClient) -> None:
    """Times are seconds from the start to the first point that reaches the target, and
    lower is better.
    """
    curves = {
        "fp32": [[0.5, 0.9, 0.8, 0.9], [0.5, 0.6, 0.9, 0.9], [0.9, 0.1]],
        "fp16": [[0.5, 0.6, 0.7, 0.9], [0.5, 0.6, 0.7, 0.8, 0.9], [0.5, 0.6, 0.95]],
    }
    runs = with_curves(make, curves, "val/acc")
    query = {"metric": "val/acc", "value": "time_to_target", "group": "precision"}
    found = parity(script, runs, target=0.9, **query)
    group = only(found)
    assert (found["is_low"], found["target"]) == (True, 0.9)
    pairs = [(pair["value"], pair["reference_value"]) for pair in group["pairs"]]
    assert pairs == [(0.2, 0.1), (0.25, 0.15), (0.15, 0.05)]
    reached = "all differences are equal (0.1), so their spread is unknown"
    assert group["sentence"].startswith(f"Unknown for fp16: {reached}")
    earlier = only(parity(script, runs, target=0.7, **query))
    assert [pair["value"] for pair in earlier["pairs"]] == [0.15, 0.15, 0.15]
    assert earlier["conclusion"] == "undecided"
    assert "fp16 minus fp32 is 0.05 ± " in earlier["sentence"]
    assert " in seconds until val/acc ≥ 0.7 (3 seeds" in earlier["sentence"]


def test_a_run_that_never_reaches_the_target_has_no_time(
    make: Callable[..., Run], script: TestClient, database: Database, browser: TestClient
) -> None:
    """A run that never reaches the target is named and not counted as a value; the time of an
    interrupted run is unknown too.
    """
    curves = {"fp32": [[0.5, 0.9], [0.5, 0.95]], "fp16": [[0.5, 0.9], [0.5, 0.6]]}
    runs = with_curves(make, curves, "val/acc")
    query: dict[str, Any] = {"metric": "val/acc", "value": "time_to_target", "target": 0.9}
    found = parity(script, runs, **query)
    assert reason(found) == "val/acc never reaches 0.9: run 4 (finished)"
    assert [pair["value"] for pair in only(found)["pairs"]] == [0.1, None]
    page = block(browser.get("/compare", params={"runs": runs, **query}).text)
    assert "Unknown for fp16: val/acc never reaches 0.9: run 4 (finished)." in page
    assert '<a href="/runs/4" title="Run 4">–</a>' in page
    assert "NaN" not in page
    with database.writing() as session:
        session.get_one(Run, 1).attempt = 2
    interrupted = "interrupted, so the time to target is unknown: run 1 (finished)"
    assert reason(parity(script, runs, **query)) == interrupted


def test_a_time_to_a_target_needs_a_target_and_a_direction(
    make: Callable[..., Run], script: TestClient, browser: TestClient
) -> None:
    """A missing target or an unknown direction is a reason in the parity, not an error."""
    runs = with_curves(make, {"fp32": [[1.0], [2.0]], "fp16": [[1.0], [2.0]]}, "val/score")
    query = {"metric": "val/score", "value": "time_to_target"}
    missing = parity(script, runs, **query)
    assert (missing["groups"], missing["reason"]) == ([], "the value time_to_target needs a target")
    assert "is unknown whether lower" in parity(script, runs, target=1, **query)["reason"]
    page = block(browser.get("/compare", params={"runs": runs, "target": "", **query}).text)
    assert "Unknown: the value time_to_target needs a target." in page
    assert '<option value="time_to_target" selected>Time to target</option>' in page


def test_times_on_different_devices_are_not_compared_by_themselves(
    make: Callable[..., Run], script: TestClient, database: Database
) -> None:
    """Times on different devices are not compared, other values are."""
    runs = with_curves(make, {"fp32": [[1.0], [2.0]], "fp16": [[1.5], [2.0]]})
    with database.writing() as session:
        session.execute(update(RunNode).where(RunNode.run_id == 3).values(devices=[7]))
    times = {"metric": "val/loss", "value": "time_to_target", "target": 3}
    also = "not comparable: runs of a pair also differ in their device"
    assert reason(parity(script, runs, **times)) == also
    assert only(parity(script, runs, metric="val/loss"))["also_differ"] == []
    with database.writing() as session:
        session.execute(delete(RunNode).where(RunNode.run_id == 3))
    also = "not comparable: runs of a pair also differ in possibly their device, which is unknown"
    assert reason(parity(script, runs, **times)) == also
    assert only(parity(script, runs, metric="val/loss"))["also_differ"] == []


def test_times_of_runs_that_stop_early_are_compared(
    make: Callable[..., Run], script: TestClient, browser: TestClient
) -> None:
    """The number of steps follows from the target; with another value it blocks the comparison,
    and the page offers to choose the setting."""
    for seed in range(2):
        for precision, last in (("fp32", 3), ("fp16", 2 + seed)):
            curve = [make_metric(step, 3.0 - step, "val/loss") for step in range(1, last + 1)]
            make(precision, seed, None, steps=last, curve=curve)
    times = {"metric": "val/loss", "value": "time_to_target", "target": 1.0}
    group = only(parity(script, "1,2,3,4", **times))
    assert (group["also_differ"], group["result"]["pairs"]) == ([], 2)
    for value in ("final", "area"):
        query = {"metric": "val/loss", "value": value}
        assert "the number of their steps" in reason(parity(script, "1,2,3,4", **query))
        found = block(browser.get("/compare", params={"runs": "1,2,3,4", **query}).text)
        assert '<option value="">Setting</option><option>precision</option>' in found
    found = block(browser.get("/compare", params={"runs": "1,2,3,4", **times}).text)
    assert 'name="group"' not in found


@pytest.mark.parametrize("intervals", [(20, 5), (5, 20), (20, 15)])
def test_times_at_other_intervals_are_not_compared_by_themselves(
    make: Callable[..., Run], script: TestClient, intervals: tuple[int, int]
) -> None:
    """Times of curves with other intervals are not compared: more points reach a target earlier."""
    for precision, every in zip(("fp32", "fp16"), intervals, strict=True):
        for seed in range(2):
            losses = {step: 100 - step + seed for step in range(every, 121, every)}
            curve = [make_metric(step, loss, "val/loss") for step, loss in losses.items()]
            make(precision, seed, None, curve=curve)
    times = {"metric": "val/loss", "value": "time_to_target", "target": 65}
    also = "the steps at which val/loss is recorded"
    expected = f"not comparable: runs of a pair also differ in {also}"
    assert reason(parity(script, "1,2,3,4", **times)) == expected
    chosen = only(parity(script, "1,2,3,4", group="precision", **times))
    assert (chosen["also_differ"], chosen["result"]["pairs"]) == ([also], 2)


@pytest.mark.parametrize("value", ["area", "time_to_target"])
def test_figures_and_metrics_without_a_curve_are_named(
    make: Callable[..., Run], script: TestClient, browser: TestClient, value: str
) -> None:
    """Figures of whole runs have no curve, and a metric that one run lacks is reported as such, not
    as a target never reached.
    """
    curve = [make_metric(step, step / 10, "val/accuracy") for step in range(1, 5)]
    for precision in ("fp32", "fp16"):
        for seed in range(2):
            make(precision, seed, None, curve=[] if (precision, seed) == ("fp16", 1) else curve)
    query = {"value": value, "target": 0.3}
    for metric in ("run/step_ms", "seconds"):
        found = parity(script, "1,2,3,4", metric=metric, **query)
        assert reason(found).startswith(f"no curve of {metric}: run 1 (finished)")
    found = parity(script, "1,2,3,4", metric="val/accuracy", **query)
    assert reason(found) == "no curve of val/accuracy: run 4 (finished)"
    page = block(browser.get("/compare", params={"runs": "1,2,3,4", **query}).text)
    assert re.findall('<option value="([^"]*)"[^>]* data-of="final"', page) == [
        *("run/step_ms", "run/seconds", "run/peak_memory_bytes", "seconds")
    ]
    assert '<option value="loss">Loss</option>' in page


def test_the_direction_is_known_before_the_first_evaluation(
    make: Callable[..., Run], script: TestClient
) -> None:
    """The direction follows from the metric's name, so the reason given is that the runs have not
    finished.
    """
    for seed in range(2):
        make("fp32", seed, None, status=None)
        make("fp16", seed, None, status=None)
    query = {"metric": "val/accuracy", "value": "time_to_target", "target": 0.5}
    found = parity(script, "1,2,3,4", **query)
    named = [f"run {number} (running)" for number in (1, 2, 3)]
    assert reason(found).startswith(f"not finished: {', '.join(named)}")
    assert parity(script, "1,2,3,4", metric="val/accuracy")["is_low"] is False


def test_a_metric_beyond_the_first_hundred_is_compared(
    make: Callable[..., Run], script: TestClient, browser: TestClient
) -> None:
    """The page has the parity and chart of a metric beyond the first hundred, without a warning."""
    for precision in ("fp32", "fp16"):
        for seed in range(2):
            curve = [make_metric(1, seed + number, f"m/{number:03}") for number in range(120)]
            make(precision, seed, None, curve=curve)
    found = parity(script, "1,2,3,4", metric="m/119")
    assert [pair["value"] for pair in only(found)["pairs"]] == [119.0, 120.0]
    page = browser.get("/compare", params={"runs": "1,2,3,4", "metric": "m/119"}).text
    assert '<option value="m/119" selected>' in block(page)
    assert "None of these runs has" not in page
    assert "The table has the 100 metrics" in page
    page = browser.get("/compare", params={"runs": "1,2,3,4", "draw": "m/119"}).text
    assert 'data-row="m/119"' in page
    assert "None of these runs has" not in page


@pytest.mark.parametrize("value", ["area", "time_to_target"])
def test_steps_that_are_being_converted_are_a_reason(
    make: Callable[..., Run], database: Database, script: TestClient, value: str
) -> None:
    """Groups with runs whose steps are being converted state it as the reason; other groups and
    last values are compared.
    """
    for precision in ("fp32", "fp16", "bf16"):
        for seed in range(2):
            make(precision, seed, None, steps=500, loss=1.0 + len(precision) / 10 + seed / 100)
    with database.reading() as session:
        run = session.get_one(Run, 3)
    as_rows(database, run)
    query: dict[str, Any] = {"metric": "loss", "value": value, "target": 1.5}
    groups = parity(script, "1,2,3,4,5,6", **query)["groups"]
    last = parity(script, "1,2,3,4,5,6", metric="loss")["groups"]
    expected = "the steps of a run are being converted after an upgrade"
    assert groups[0]["result"]["reason"] == expected
    assert not groups[1]["result"]["reason"].startswith("the ")
    assert [group["pairs"][0]["value"] for group in last] == pytest.approx([1.4, 1.4])


def grid(make: Callable[..., Run], rates: dict[str, list[float]]) -> str:
    """Make runs of each precision, learning rate and two seeds; return their ids."""
    count = 0
    for precision, own in rates.items():
        for rate in own:
            for seed in range(2):
                worse = rate * (0.1 + seed / 50) if precision == "fp16" else 0
                make(precision, seed, 0.9 - seed / 10 - worse, lr=rate, depth=seed)
                count += 1
    return ",".join(map(str, range(1, 1 + count)))


def test_runs_of_a_grid_are_paired_within_each_combination(
    make: Callable[..., Run], script: TestClient, browser: TestClient
) -> None:
    """Runs are paired only with runs that are equal in all other settings. Each combination has
    its own test, and settings that differ only between seeds make none.
    """
    runs = grid(make, {"fp16": [0.1, 0.5], "fp32": [0.1, 0.5]})
    found = parity(script, runs, margin=0.03)
    assert (found["setting"], found["paired_by"]) == (
        "precision",
        ["training.seed", "training.lr"],
    )
    assert [group["combination"] for group in found["groups"]] == [
        {"training.lr": "0.1"},
        {"training.lr": "0.5"},
    ]
    pairs = [
        [(pair["run"], pair["reference_run"]) for pair in group["pairs"]]
        for group in found["groups"]
    ]
    assert pairs == [[(1, 5), (2, 6)], [(3, 7), (4, 8)]]
    assert [group["conclusion"] for group in found["groups"]] == ["equivalent", "undecided"]
    assert [group["also_differ"] for group in found["groups"]] == [[], []]
    assert found["unpaired"] == []
    sentence = found["groups"][0]["sentence"]
    assert sentence.startswith("fp16 at training.lr 0.1 is equivalent to fp32 in val/accuracy")
    page = block(browser.get("/compare", params={"runs": runs}).text)
    assert "runs paired by <code>training.seed</code>, within each combination of" in page
    by_rate = parity(script, runs, group="training.lr")
    assert (by_rate["reference"], by_rate["paired_by"]) == ("0.1", ["training.seed", "precision"])
    assert [group["combination"] for group in by_rate["groups"]] == [
        {"precision": "fp16"},
        {"precision": "fp32"},
    ]


def test_runs_of_a_grid_without_a_partner_are_named(
    make: Callable[..., Run], script: TestClient, browser: TestClient
) -> None:
    """Runs of a combination that one of the groups lacks are listed as not paired."""
    runs = grid(make, {"fp16": [0.1, 0.5], "fp32": [0.1, 0.2]})
    found = parity(script, runs)
    assert only(found)["combination"] == {"training.lr": "0.1"}
    assert found["unpaired"] == [3, 4, 7, 8]
    assert "Not paired: runs 3, 4, 7, 8." in block(browser.get(f"/compare?runs={runs}").text)


def test_runs_of_a_grid_that_differ_in_more_are_not_comparable(
    make: Callable[..., Run], script: TestClient
) -> None:
    """Runs that also differ in another setting, such as a unique name, are not comparable."""
    for number, precision in enumerate(["fp16"] * 4 + ["fp32"] * 4):
        rate, seed = 0.1 + number // 2 % 2, number % 2
        make(precision, seed, 0.9 - number / 100, lr=rate, out=f"run-{number}")
    runs = ",".join(map(str, range(1, 9)))
    groups = parity(script, runs)["groups"]
    also = "not comparable: runs of a pair also differ in training.out"
    assert [group["result"]["reason"] for group in groups] == [also] * 2
    chosen = parity(script, runs, group="precision")
    assert [group["result"]["pairs"] for group in chosen["groups"]] == [2, 2]
    assert [group["also_differ"] for group in chosen["groups"]] == [["training.out"]] * 2


def test_runs_that_have_no_combination_in_common_are_unknown(
    make: Callable[..., Run], script: TestClient
) -> None:
    """Groups that share values of each setting, but no combination of them, are unknown."""
    for precision, settings in (("fp16", [(1, 1), (2, 2)]), ("fp32", [(1, 2), (2, 1)])):
        for width, depth in settings:
            for seed in range(2):
                make(precision, seed, 0.9, width=width, depth=depth)
    expected = "no run of fp16 has the training.seed, training.width, training.depth of a run of"
    assert reason(parity(script, "1,2,3,4,5,6,7,8")) == f"{expected} fp32"


def test_runs_of_several_settings_need_a_choice(
    make: Callable[..., Run], script: TestClient
) -> None:
    """If runs differ in several settings, the reason names them as the values to choose from."""
    for seed in range(2):
        make("fp32", seed, 0.9 + seed / 50, lr=0.1, depth=1)
        make("fp32", seed, 0.95, lr=0.2, depth=2)
    found = parity(script, "1,2,3,4")
    assert found["groups"] == []
    assert "choose the one to compare" in found["reason"]
    assert only(parity(script, "1,2,3,4", group="training.depth"))["name"] == "2"


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("scaler.init_scale", (1024.0, 65536.0)),
        ("modules.fp32", (["model.head"], [])),
        ("modules.bf16", ([], ["model.head"])),
    ],
)
def test_parts_of_a_mix_of_precisions_are_compared(
    make: Callable[..., Run], database: Database, script: TestClient, path: str, values: Any
) -> None:
    """Parts of a precision mix are compared within a precision; otherwise they belong to it."""
    group, name = path.split(".")
    for seed in range(2):
        for precision, value in zip(("fp16", "fp32"), values, strict=True):
            for own in ("fp16", precision):
                run = make(own, seed, 0.9 + seed / 50)
                with database.writing() as session:
                    config = session.get_one(Run, run.id).config
                    changed = config | {group: config.get(group, {}) | {name: value}}
                    session.get_one(Run, run.id).config = changed
    # Runs 1, 3 and 5, 7 are in fp16 and differ in the setting; 1, 4 and 5, 8 in both.
    by_itself = parity(script, "1,3,5,7")
    assert (by_itself["setting"], only(by_itself)["also_differ"]) == (path, [])
    by_precision = parity(script, "1,4,5,8")
    assert (by_precision["setting"], only(by_precision)["also_differ"]) == ("precision", [])
    assert set(by_precision["settings"]) == {"precision", path}
    chosen = only(parity(script, "1,4,5,8", group=path))
    assert chosen["also_differ"] == ["precision"]


def test_runs_of_one_group_are_not_compared(make: Callable[..., Run], script: TestClient) -> None:
    """fp16 runs that differ in TF32, which only fp32 uses, are of one group and not compared."""
    for seed in range(2):
        for tf32 in (True, False):
            make("fp16", seed, 0.9 + seed / 50, tf32=tf32)
    found = parity(script, "1,2,3,4")
    assert (found["groups"], found["reason"]) == ([], "all runs are of the group fp16")


def test_scripts_are_paired_by_their_own_seed(
    database: Database, ada: User, script: TestClient
) -> None:
    """Scripts are paired by their only setting named seed; with several the parity is unknown."""
    configs = [{"args": {"seed": seed, "depth": depth}} for depth in (1, 2) for seed in (7, 8)]
    for config in configs:
        run = add_seed(database, ada, "fp16", 0, 0.5 + len(str(config)) / 1000)
        with database.writing() as session:
            stored = session.get_one(Run, run.id)
            stored.source, stored.recipe, stored.config = "watch", "", {}
            stored.script_config = config
    found = parity(script, "1,2,3,4")
    assert (found["seed"], found["setting"]) == ("args.seed", "args.depth")
    assert [pair["seed"] for pair in only(found)["pairs"]] == ["7", "8"]
    with database.writing() as session:
        for run_id in range(1, 5):
            stored = session.get_one(Run, run_id)
            stored.script_config = {**(stored.script_config or {}), "data": {"seed": run_id}}
    assert "nor exactly one setting called seed" in parity(script, "1,2,3,4")["reason"]


@looped(
    "query, field, text",
    [
        ({"metric": "val/lost"}, "metric", "no run has 'val/lost'; allowed: run/step_ms"),
        ({"metric": "x" * 201}, "metric", "at most 200 characters"),
        ({"margin": "0"}, "margin", "'0': allowed: more than 0"),
        ({"margin": "-1"}, "margin", "more than 0"),
        ({"margin": "nan"}, "margin", "allowed"),
        ({"margin": "inf"}, "margin", "allowed"),
        ({"margin": "1e200"}, "margin", "at most"),
        ({"margin": "few"}, "margin", "number"),
        ({"value": "mean"}, "value", "'mean': allowed: 'final', 'area' or 'time_to_target'"),
        ({"target": "nan"}, "target", "allowed"),
        ({"target": "-1e200"}, "target", "at least"),
        ({"group": "training.lr"}, "group", "no difference in 'training.lr'; allowed: precision"),
        ({"group": "training.seed"}, "group", "no difference in 'training.seed'"),
        ({"runs": "1,two"}, "runs", "'two' is not valid"),
        ({"runs": ",".join(map(str, range(1, 52)))}, "runs", "51 runs are given"),
    ],
)
def test_invalid_parameters_name_the_allowed_values(
    make: Callable[..., Run], script: TestClient, query: dict[str, str], field: str, text: str
) -> None:
    """An invalid parameter is answered with its field, value and allowed values."""
    for precision in ("fp16", "fp32"):
        make(precision, 1, 0.9)
    answer = script.get("/api/v1/comparison/parity", params={"runs": "1,2", **query})
    assert answer.status_code == 422
    assert text in answer.json()["errors"][field]


def test_runs_of_other_projects_are_not_found(
    database: Database, ada: User, script: TestClient, stranger: TestClient
) -> None:
    """Invisible runs count as missing; a comparison of missing runs only is answered by 404."""
    start_run(database, ada)
    path = "/api/v1/comparison/parity"
    assert script.get(path, params={"runs": "2,3"}).status_code == 404
    assert stranger.get(path, params={"runs": "1"}).status_code == 401


def block(page: str) -> str:
    """Return the parity block of the page, as text with single spaces."""
    part = page.partition('<section id="parity"')[2].partition("</section>")[0]
    return " ".join(part.replace("&#39;", "'").split())


def test_the_page_shows_the_parity_of_runs_that_share_seeds(
    database: Database, ada: User, browser: TestClient, script: TestClient
) -> None:
    """The parity block has the API's sentence, the intervals, and a form that keeps the view."""
    runs = two_precisions(database, ada)
    sentence = only(parity(script, runs, margin=0.02))["sentence"]
    query = {"runs": runs, "margin": "0.02", "smooth": "0.5", "draw": ["loss", "lr"]}
    found = block(browser.get("/compare", params=query).text)
    assert f'<p data-conclusion="equivalent">{sentence}</p>' in found
    assert re.findall(r'type="hidden" name="(.*?)" value="(.*?)"', found) == [
        *(("runs", runs), ("smooth", "0.5"), ("draw", "loss"), ("draw", "lr"))
    ]
    assert re.search('name="margin" size="7" inputmode="decimal" pattern=".*?" value="0.02"', found)
    assert '<option value="val/accuracy" selected>' in found
    # In percent of the width: 0.02 takes 45 % on each side of zero.
    assert f'<rect x="5.0%" width="{95.0 - 5.0}%"' in found
    place = 50 + 45 * -0.0102 / 0.02
    assert float(re.findall(r'<circle cx="(.*?)%"', found)[0]) == pytest.approx(place)
    assert "← worse" in found
    assert found.count('<a href="/runs/') == 10
    empty = block(browser.get("/compare", params={"runs": runs, "margin": ""}).text)
    assert 'data-conclusion="worse"' in empty
    assert "<rect" not in empty


def test_runs_that_share_no_seeds_have_no_such_block(
    make: Callable[..., Run], browser: TestClient
) -> None:
    """The parity block is missing for runs without common seeds, of one seed, or all equal."""
    for precision, seed in (("fp16", 0), ("fp32", 0), ("fp16", 1), ("fp16", 1), ("fp32", None)):
        make(precision, seed, 0.9)
    for runs in ("1", "1,2", "1,2,3", "3,4", "1,2,5"):
        page = browser.get(f"/compare?runs={runs}")
        assert (page.status_code, block(page.text)) == (200, "")
    make("fp32", 1, 0.9)
    assert 'href="#parity"' in browser.get("/compare?runs=1,2,3,6").text


def test_the_page_names_what_cannot_be_compared(
    make: Callable[..., Run], browser: TestClient
) -> None:
    """The parity block names settings to choose, a metric that no run has, and a bad margin."""
    for seed in range(2):
        make("fp32", seed, 0.9 + seed / 50, lr=0.1, name="<b>")
        make("fp32", seed, 0.95, lr=0.2, name="<i>")
    page = browser.get("/compare?runs=1,2,3,4&metric=<u>").text
    assert "differ in training.lr, training.name: choose the one" in block(page)
    assert '<option value="">Setting</option><option>training.lr</option>' in block(page)
    assert "None of these runs has &#39;&lt;u&gt;&#39;, so parity is shown" in page
    ignored = browser.get("/compare?runs=1,2,3,4&group=training.seed").text
    assert "These runs do not differ in &#39;training.seed&#39;, so parity is not shown" in ignored
    chosen = block(browser.get("/compare?runs=1,2,3,4&group=training.name").text)
    assert "Runs of a pair also differ in training.lr." in chosen
    assert "&lt;i&gt;" in chosen
    assert "<i>" not in chosen
    refused = browser.get("/compare?runs=1,2,3,4&margin=-1")
    assert refused.status_code == 422
    assert "margin: &#39;-1&#39;: allowed: more than 0" in refused.text


def test_a_read_only_link_shows_it_without_links_to_runs(
    database: Database, ada: User, browser: TestClient, stranger: TestClient
) -> None:
    """A read-only link shows the parity without links to runs, and its holder can choose metric and
    margin.
    """
    runs = [int(run_id) for run_id in two_precisions(database, ada).split(",")]
    link = browser.post("/api/v1/links", json={"runs": runs, "days": 7})
    assert link.status_code == 201, link.text
    page = open_link(stranger, link.json()["address"].partition("#")[2])
    found = block(stranger.get(page, params={"margin": 0.02}).text)
    assert "fp16 is equivalent to fp32 in val/accuracy" in found
    assert "/runs/" not in found


def read_documented(pattern: str) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the rows of a table of docs/how-to/compare.md, and all quoted sentences."""
    text = (Path(__file__).parents[3] / "docs/how-to/compare.md").read_text()
    return re.findall(pattern, text, re.MULTILINE), re.findall(r"^> (.*)$", text, re.MULTILINE)


def test_the_worked_example_is_what_is_stated(make: Callable[..., Run], script: TestClient) -> None:
    """The runs of the table in docs/how-to/compare.md give the sentences that it states."""
    rows, quoted = read_documented(r"^\| (\d) \| (0\.\d{4}) \| (0\.\d{4}) \| (0\.\d{4}) \|$")
    assert len(rows) == 3
    for seed, *losses in rows:
        for precision, loss in zip(("fp32", "fp16", "bf16"), losses, strict=True):
            make(precision, int(seed), None, loss=float(loss))
    runs = ",".join(map(str, range(1, 10)))
    stated = [
        group["sentence"]
        for margin in (0.02, 0.001)
        for group in parity(script, runs, metric="loss", margin=margin)["groups"]
    ]
    assert quoted[:3] == [stated[0], stated[1], stated[3]]


def test_the_worked_example_of_curves_is_what_is_stated(
    make: Callable[..., Run], script: TestClient
) -> None:
    """The area and the times in the document follow from its table."""
    number = r" \| (\d\.\d+)"
    rows, quoted = read_documented(rf"^\| (\d) \| (\w+){number * 7} \|$")
    assert len(rows) == 9
    for seed, precision, *numbers in rows:
        *losses, seconds = map(float, numbers)
        curve = [
            make_metric(20 * n, loss, "val/loss")
            | ({"elapsed_ms": round(1000 * seconds)} if n == 4 else {})
            for n, loss in enumerate(losses, start=1)
        ]
        make(precision, int(seed), None, curve=curve)
    runs, metric = ",".join(map(str, range(1, 10))), {"metric": "val/loss"}
    timed: dict[str, Any] = metric | {"value": "time_to_target"}
    area = parity(script, runs, value="area", margin=0.02, **metric)["groups"]
    times = parity(script, runs, target=0.6, margin=0.5, **timed)["groups"]
    never = parity(script, runs, target=0.25, **timed)["groups"][:1]
    assert area[0]["pairs"][0]["reference_value"] == pytest.approx(0.7759, abs=5e-5)
    assert quoted[3:] == [group["sentence"] for group in (*area, *times, *never)]
