"""Findings and their texts, from made-up evidence and from rows of both databases."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from msgspec import convert

from db.database import Database
from db.health import advice_words, causes, findings, scaling_health
from db.health.advice_words import AdviceWords
from db.health.findings import Evidence
from db.health.losses import LostLosses, lost_losses
from db.queue import queue
from db.tables import (
    COMMAND,
    WATCH,
    Diagnosis,
    LatestMetric,
    Run,
    RunNode,
    ScalerEvent,
    Status,
    User,
    Worker,
)
from halfstep.diagnosis.defect import Defect
from halfstep.diagnosis.statements import text_of
from halfstep.telemetry.events import (
    KINDS,
    HistogramModule,
    LeftOut,
    Origin,
    Replay,
    ScaledClip,
    Schedule,
    ShadowStep,
    Shapes,
)
from tests.db.conftest import CPU, DIGITS, add_worker, claim, config, submit
from tests.db.health.findings_made import make_weights
from tests.db.telemetry.telemetry_made import (
    make_histogram,
    make_metric,
    make_module,
    make_replay,
    make_skip,
    make_steps,
    record,
    step_event,
)
from tests.marks import looped


def _health(word: str) -> scaling_health.ScalingHealth:
    return scaling_health.ScalingHealth(word, "Because.", scaling_health.count(100, [], 1.0))


def _lost(count: int) -> LostLosses | None:
    """Return applied steps with a NaN loss and finite gradients."""
    return LostLosses(count, last=40, has_nan=True, has_inf=False) if count else None


def _evidence(word: str, **changes: Any) -> Evidence:
    """Return evidence of a health, with fitting skips, scale and events."""
    events = changes.pop("events", ())
    skips = changes.get("skips", ())
    signs = causes.Signs(
        events=events,
        skips=skips,
        skipped=changes.pop("skipped", len(skips)),
        health=word,
        scale=changes.pop("scale", None),
        lost=_lost(changes.pop("lost_losses", 0)),
        is_costly=word == "oscillating",
        has_scaler=True,
    )
    return Evidence(health=_health(word), signs=signs, **changes)


def _skips(*names: str, loss_nonfinite: bool = False) -> list[ScalerEvent]:
    culprits = [{"name": name} for name in names]
    return [
        ScalerEvent(step=step, culprits=culprits, loss_nonfinite=loss_nonfinite)
        for step in (7, 8, 9)
    ]


def _replay(step: int, module: str | None = "model.head", **changes: Any) -> Replay:
    found = {"direction": "forward", "operation": "addmm", "dtype": "float16"}
    replay = step_event(make_replay(step, module=module, **found | changes))
    assert isinstance(replay, Replay)
    return replay


def _module(name: str, count: int, **changes: float) -> HistogramModule:
    return convert(make_module(name, -10, [count], **changes), HistogramModule)


MODULES = [_module("body", 90), _module("head", 10)]
SHAPES = {
    "event": "shapes",
    "step": 0,
    "share": 0.314,
    "count": 6,
    "layers": ["model.head (768 to 50257)", "model.body.1 (770 to 770)"],
    "batch_size": 50,
}
SINKING = [_module("body", 90, underflow=0.02), _module("head", 10)]
NO_GRAPH = LeftOut(step=1, diagnosis="CUDA graph", reason="the device is cpu, not cuda")
#: An overflow at the loss scale.
FITS = {"step": 7, "kind": "scale_too_large", "symptom": "gradient", "fits_below": 2.0**18}
LEFT_OUT = LeftOut(step=1, diagnosis="replay", reason="not with training.parallel fsdp")


@looped(
    "word, changes, titles",
    [
        ("healthy", {"scale": 2.0**16, "skips": _skips("head.bias")}, []),
        (
            "healthy",
            {"skips": [*_skips("head.bias"), *_skips("head.bias", loss_nonfinite=True)]},
            ["The loss of a skipped step was not finite"],
        ),
        (
            "collapsing",
            {"scale": 0.25, "skips": _skips("body.weight", "head.bias")},
            ["The loss scale is below 1"],
        ),
        (
            "healthy",
            {"lost_losses": 3},
            ["The loss is not finite, but its gradients are"],
        ),
        (
            "collapsing",
            {"skips": _skips("body.weight", "head.bias", loss_nonfinite=True)},
            ["The loss of a skipped step was not finite"],
        ),
        (
            "oscillating",
            {"skips": _skips("body.weight", "head.bias"), "modules": MODULES},
            ["Only the backward pass overflows"],
        ),
        (
            "oscillating",
            {"skips": _skips("head.weight", "head.bias"), "modules": MODULES},
            ["Only the backward pass overflows", "Only one module overflows"],
        ),
        ("healthy", {"modules": SINKING}, ["Gradients underflow"]),
        ("healthy", {"modules": MODULES, "has_bf16": True}, []),
        ("dead", {"has_bf16": True, "skipped": 250}, ["bf16 is available"]),
        ("dead", {"has_bf16": True}, []),
        (
            "healthy",
            {"variant": "fp16", "seconds": {"fp32": 2.0, "fp16": 3.0}},
            ["Mixed precision is slower here than fp32"],
        ),
        ("healthy", {"variant": "fp16", "seconds": {"fp32": 3.0, "fp16": 2.0}}, []),
        ("healthy", {"variant": "TF32", "seconds": {"fp32": 2.0, "TF32": 3.0}}, []),
        ("healthy", {"rates": {"recipe.learning_rate": 1.0}}, []),
        (
            "healthy",
            {"rates": {"recipe.learning_rate": 3e4}},
            ["The learning rate is far too large"],
        ),
        ("healthy", {"shapes": step_event(SHAPES)}, ["Shapes miss tensor cores"]),
        ("healthy", {"variant": "fp32", "seconds": {"fp32": 3.0}}, []),
        (
            "healthy",
            {"events": [Schedule(step=40, advanced=9, skipped=10)]},
            ["The learning-rate schedule advances in skipped steps"],
        ),
        (
            "healthy",
            {"left_out": [LEFT_OUT, NO_GRAPH]},
            ["The replay is not available", "The CUDA graph is not available"],
        ),
    ],
)
def test_evidence_leads_to_findings(word: str, changes: dict[str, Any], titles: list[str]) -> None:
    """Each problem has its finding, and a healthy run has none."""
    found = findings.find(_evidence(word, **changes))
    assert [each.title for each in found] == titles


def test_texts_hold_the_figures() -> None:
    """Finding texts contain the share, modules, ratio and sizes."""
    evidence = Evidence(
        health=_health("healthy"),
        modules=SINKING,
        shapes=convert(SHAPES, Shapes),
        variant="bf16",
        seconds={"fp32": 2.0, "bf16": 3.0},
    )
    underflow, slower, shapes = (each.text for each in findings.find(evidence))
    assert "1.8 % of the gradients" in underflow
    assert "the largest share is in body (2 %)" in underflow
    assert "The same run took 3 s, and 2 s in fp32: 1.5 times as long" in slower
    assert "Here 31.4 % of the weights are in layers with other sizes" in shapes
    assert "(768 to 50257), model.body.1 (770 to 770) and 4 more; the batch size is 50" in shapes


def test_a_diagnosis_that_failed_is_named(database: Database, running: Run) -> None:
    """A failed diagnosis is named with step and error, and says nothing about the training."""
    failure = {"diagnosis": "replay", "error": "OutOfMemoryError: no memory left"}
    event = {"event": "failed_diagnosis", "step": 7, **failure}
    record(database, running, make_steps([1.0] * 40), events=[event])
    with database.reading() as session:
        [found] = findings.of_run(session, session.get_one(Run, running.id))
    assert found.title == "The replay failed"
    assert found.text.startswith("At step 7: OutOfMemoryError: no memory left.")


def test_a_best_checkpoint_by_a_metric_that_was_never_logged_is_a_finding(
    database: Database, ada: User, worker: Worker
) -> None:
    """A best checkpoint by a never logged metric is reported once the run has ended."""
    with database.writing() as session:
        submit(session, ada, config=config() | {"checkpoints": {"keep_best": "val/none"}})
        run = claim(session, worker)
        assert run is not None
        queue.start(session, run.id, run.attempt)
    record(database, run, make_steps([1.0] * 40))
    with database.writing() as session:
        assert findings.of_run(session, session.get_one(Run, run.id)) == []
        queue.end(session, run.id, run.attempt, Status.FINISHED)
        [found] = findings.of_run(session, session.get_one(Run, run.id))
        assert "keep_best is val/none, but the run logged no metric" in found.text
        session.add(LatestMetric(run_id=run.id, name="val/none", step=9, value=0.5))
        assert findings.of_run(session, session.get_one(Run, run.id)) == []


def test_the_newest_count_of_a_schedule_is_shown(database: Database, running: Run) -> None:
    """A schedule's repeated reports are one finding with the latest numbers."""
    result = [
        {"event": "schedule", "step": step, "advanced": step - 1, "skipped": step}
        for step in (20, 40)
    ]
    record(database, running, make_steps([1.0] * 40), events=result)
    with database.reading() as session:
        [found] = findings.of_run(session, session.get_one(Run, running.id))
    assert found.text.startswith("The learning rate changed after 39 of 40 skips, up to step 40")


def test_evidence_comes_from_the_rows(database: Database, running: Run) -> None:
    """A run's evidence has its skips, losses, newest histogram, scale and shapes."""
    losses = [1.0] * 40
    losses[30] = float("nan")
    skipped = range(32, 41)
    events = [make_skip(step, "body.bias", "head.bias") for step in skipped]
    histogram = make_histogram(20, make_module("body", -40, [1], underflow=1.0))
    record(
        database, running, make_steps(losses, skipped=skipped), events=[*events, histogram, SHAPES]
    )
    with database.reading() as session:
        found = findings.of_run(session, session.get_one(Run, running.id))
    assert [each.title for each in found] == [
        "Only the backward pass overflows",
        "The loss is not finite, but its gradients are",
        "Gradients underflow",
        "Shapes miss tensor cores",
    ]


@pytest.mark.parametrize("has_bf16", [True, False])
def test_group_and_worker_are_evidence_too(database: Database, ada: User, has_bf16: bool) -> None:
    """Precisions are compared by their group's times, and bf16 is suggested if supported."""
    worker = add_worker(database, "w1", [DIGITS], [CPU | {"bf16": has_bf16}])
    for precision, seconds in (("fp32", 2.0), ("fp16", 3.0)):
        with database.writing() as session:
            submit(session, ada, config=config(250, precision)).group_id = 1
            run = claim(session, worker)
            assert run is not None
        skipped = range(1, 251) if precision == "fp16" else ()  # dead
        took = make_metric(250, seconds, "run/seconds")
        record(database, run, make_steps([1.0] * 250, skipped=skipped), events=[took])
        with database.writing() as session:
            queue.end(session, run.id, 1, Status.FINISHED)
    with database.reading() as session:
        found = findings.of_run(session, session.get_one(Run, run.id))
    expected = ["bf16 is available"] if has_bf16 else []
    assert [each.title for each in found] == [
        *expected,
        "Mixed precision is slower here than fp32",
    ]


def test_run_that_has_not_begun_shows_nothing(database: Database, ada: User) -> None:
    """A run without a step has no finding in any precision."""
    with database.writing() as session:
        for precision in ("fp16", "bf16", "fp32"):
            run = submit(session, ada, config=config(precision=precision))
            assert findings.of_run(session, run) == []


@looped(
    "word, replays, offered",
    [
        ("healthy", [_replay(7), _replay(9), _replay(8, "model.body")], ("model.head", 7)),
        ("healthy", [_replay(7, direction="backward")], None),
        ("dead", [_replay(7, direction="backward")], ("model.head", 7)),
        ("dead", [_replay(7, direction="backward", defect=FITS)], None),
        ("dead", [_replay(7, "training_step"), _replay(8, exact=False)], None),
        ("dead", [_replay(7, None, found=False)], None),
    ],
)
def test_a_replayed_module_is_offered_to_a_fork(
    word: str, replays: list[Replay], offered: tuple[str, int] | None
) -> None:
    """A fork is offered with the module that most exact replays name, from before its first skip;
    for the backward pass only if the scale is unhealthy and no smaller one fits, because a scale at
    its limit overflows in a healthy run as well.
    """
    found = findings.find(Evidence(health=_health(word), replays=replays))
    offers = [(each.module, each.before) for each in found if each.module]
    assert offers == ([offered] if offered else [])


def test_one_module_that_overflows_is_offered_to_a_fork() -> None:
    """A fork is also offered for the only module whose parameters overflow, without a replay."""
    evidence = _evidence("oscillating", skips=_skips("head.weight"), modules=MODULES)
    assert [(f.module, f.before) for f in findings.find(evidence) if f.module] == [("head", 7)]


def test_a_loss_that_is_nan_from_the_first_step_on_is_no_overflow(
    database: Database, running: Run
) -> None:
    """A loss that is NaN from the first step on is attributed to neither scale nor precision."""
    losses, skipped = [math.nan] * 40, range(1, 41)
    skips = [make_skip(n, "body.bias", loss_nonfinite=True, scale_before=2.0**-n) for n in skipped]
    record(database, running, make_steps(losses, skipped=skipped), events=skips)
    with database.reading() as session:
        found = findings.of_run(session, session.get_one(Run, running.id))
    assert [each.title for each in found] == ["The loss is NaN from the first step on"]
    assert "in each of 40 steps, at every loss scale down to 2^-40" in found[0].text
    assert found[0].remedies == ("fp32",)
    for other in (1.0, math.inf):
        steps = make_steps([other, *losses[1:]], skipped=skipped)
        steps["scale"] = 0.5
        record(database, running, steps)
        with database.reading() as session:
            found = findings.of_run(session, session.get_one(Run, running.id))
        assert "The loss of a skipped step was not finite" in [each.title for each in found]


@looped("factor, titles", [(4.0, ["The scaler was not restored"]), (2.0, [])])
def test_a_scale_that_rises_at_a_resume_beyond_a_growth_was_not_restored(
    database: Database, running: Run, factor: float, titles: list[str]
) -> None:
    """A scaler that was not restored is found by the steps around the resume of an attempt."""
    steps = make_steps([1.0] * 40)
    steps["scale"][:20], steps["scale"][20:] = 1024.0, factor * 1024.0
    record(database, running, steps)
    with database.writing() as session:
        node = queue.node(session, running.id, 1)
        again = {"attempt": 2, "worker_id": node.worker_id, "devices": [0], "resumed_step": 20}
        session.merge(RunNode(run_id=running.id, node=0, lease_expires_at=0.0, **again))
    with database.reading() as session:
        found = findings.of_run(session, session.get_one(Run, running.id))
    assert [each.title for each in found] == titles


@looped(
    "norm, title",
    [
        (math.nan, "Gradients are not finite from step 20 on"),
        (1.0, "The loss is not finite from step 21 on"),
    ],
)
def test_the_first_step_that_is_not_finite_has_the_loss_or_gradients_before_it(
    database: Database, running: Run, norm: float, title: str
) -> None:
    """Without a scaler, gradients that are not finite break the loss of the next step."""
    with database.writing() as session:
        running = session.merge(running)
        running.config = config(precision="bf16")
    steps = make_steps([1.0] * 20 + [math.nan] * 20)
    steps["grad_norm"][19], steps["grad_norm"][20:], steps["scale"] = norm, math.nan, 1.0
    record(database, running, steps)
    with database.reading() as session:
        found = findings.of_run(session, session.get_one(Run, running.id))
    assert [each.title for each in found if "not finite from" in each.title] == [title]


@pytest.mark.slow
@pytest.mark.parametrize("source", [WATCH, COMMAND])
def test_a_message_to_a_script_names_the_remedy(
    database: Database, running: Run, source: str
) -> None:
    """Remedies for a script contain no recipe settings, replays or precision comparisons."""
    events: list[dict[str, Any]] = [make_skip(n, "body.bias") for n in range(1, 41)]
    sinking = make_histogram(20, make_module("body", -40, [1], underflow=1.0),
                             make_module("head", -40, [1]))  # fmt: skip
    poison = {"event": "poison", "step": 2, "count": 1, "buffers": ["body.running_mean"]}
    steps = make_steps([1.0] * 40, skipped=range(1, 41))
    steps["scale"] = 0.5
    record(database, running, steps, events=[*events, sinking, poison, headroom_of(body=60000.0)])

    def texts() -> str:
        with database.reading() as session:
            run = session.get_one(Run, running.id)
            return " ".join(each.text for each in findings.of_run(session, run))

    for words in ("Replay a skipped", "scaler.floor", "scaler.growth_interval", "modules.fp32"):
        assert words in texts()
    with database.writing() as session:
        session.get_one(Run, running.id).source = source
    for words in ("Replay", "scaler.floor", "scaler.", "modules.fp32", "training."):
        assert words not in texts().replace("scaler.get_scale()", "")
    assert "growth_interval of GradScaler" in texts()
    assert "torch.autocast(device, enabled=False)" in texts()


def test_a_replay_is_suggested_only_while_the_run_trains(database: Database, running: Run) -> None:
    """A replay is suggested only for a run in training."""
    steps = make_steps([1.0] * 40, skipped=range(1, 41))
    steps["scale"] = 0.5
    record(database, running, steps, events=[make_skip(n) for n in range(1, 41)])
    with database.writing() as session:
        queue.end(session, running.id, 1, Status.FINISHED)
    with database.reading() as session:
        found = findings.of_run(session, session.get_one(Run, running.id))
    assert "Replay" not in " ".join(each.text for each in found)


def test_poisoned_buffers_are_a_finding(database: Database, running: Run) -> None:
    """Poisoned buffers are reported by their earliest event, with the checkpoints after it."""
    events = [
        {"event": "poison", "step": step, "count": 60, "buffers": [f"model.{step}.running_mean"]}
        for step in (2, 4)
    ]
    record(database, running, make_steps([1.0] * 5, skipped=[2, 4]), events=events)
    with database.reading() as session:
        found = findings.of_run(session, session.get_one(Run, running.id))
    [text] = [each.text for each in found if each.title == "Buffers are not finite"]
    assert "After the skip at step 2: model.2.running_mean and 59 more." in text


@pytest.mark.parametrize(("lost", "is_told"), [(20, False), (90, True)])
def test_updates_that_round_away_are_a_finding(
    database: Database, running: Run, lost: int, *, is_told: bool
) -> None:
    """Lost updates above a share are reported with the module that loses most, by the newest
    count.
    """
    counted = [
        {"name": "body", "wanted": 100, "lost": lost - 5},
        {"name": "head", "wanted": 10, "lost": 8},
        {"name": "idle", "wanted": 0, "lost": 0},
    ]
    events = [
        {"event": "updates", "step": 10, "modules": [counted[2]]},
        {"event": "updates", "step": 20, "modules": counted},
    ]
    record(database, running, make_steps([1.0] * 40), events=events)
    with database.reading() as session:
        found = findings.of_run(session, session.get_one(Run, running.id))
    assert [each.title for each in found] == (["Updates round away"] if is_told else [])
    if is_told:
        assert "At step 20, 84.5 % of the weights" in found[0].text
        assert "the largest share is in body (85 %)" in found[0].text
    by_chance = [each | {"saved": 1} for each in counted]
    event = {"event": "updates", "step": 30, "modules": by_chance}
    record(database, running, events=[event])
    with database.reading() as session:
        assert not findings.of_run(session, session.get_one(Run, running.id))


def test_replays_of_the_first_skips_are_evidence(database: Database, running: Run) -> None:
    """Replays of the first skips are used, however many skips followed."""
    skips = range(30, 130)
    events = [*(make_skip(step, "body.bias", loss_nonfinite=True) for step in skips)]
    replay = make_replay(30, direction="forward")
    record(database, running, make_steps([1.0] * 130, skipped=skips), events=[*events, replay])
    with database.reading() as session:
        found = findings.of_run(session, session.get_one(Run, running.id))
    [offer] = [(each.title, each.before) for each in found if each.module]
    assert offer == ("model.head overflows", 30)


def test_settings_that_name_modules_in_vain_are_a_finding(database: Database, running: Run) -> None:
    """Patterns that match no used module are reported with what to name instead."""
    event = {"event": "uncalled", "step": 1, "modules": ["model.attention.out_proj"]}
    record(database, running, make_steps([1.0] * 40), events=[event])
    with database.reading() as session:
        [found] = findings.of_run(session, session.get_one(Run, running.id))
    assert found.title == "A setting names modules that are not called"
    assert found.text.startswith("model.attention.out_proj: modules.fp32")


def test_starting_weights_that_do_not_fit_are_a_finding(database: Database, running: Run) -> None:
    """Initial weights that are missing, mismatched or unexpected are named, if there are any."""
    record(database, running, make_steps([1.0] * 40), events=[make_weights()])
    with database.reading() as session:
        assert findings.of_run(session, session.get_one(Run, running.id)) == []
    names = [f"model.{i}" for i in range(8)]
    event = make_weights(missing=names, mismatched=["model.head: 10 × 8, not 5 × 8"])
    record(database, running, events=[event])
    with database.reading() as session:
        [found] = findings.of_run(session, session.get_one(Run, running.id))
    assert found.title == "The initial weights match only in part"
    assert (
        "12 of the recipe's 14 weights are loaded from /data/models/net.safetensors" in found.text
    )
    assert "8 are missing there and initialized by the recipe (model.0, " in found.text
    assert "model.5 and 2 more)" in found.text
    assert (
        "1 are of another shape there and initialized by the recipe (model.head: 10" in found.text
    )
    assert "only there" not in found.text


def headroom_of(**activations: float | str) -> dict[str, Any]:
    """Return headroom of modules, one of them in fp32, one with a gradient near the limit."""
    modules = [
        {"name": name, "activation": each, "gradient": 60000.0, "dtype": "float16"}
        for name, each in activations.items()
    ]
    modules.append({"name": "norm", "activation": 1e6, "gradient": None, "dtype": "float32"})
    return {"event": "headroom", "step": 100, "scale": 1024.0, "modules": modules}


def test_little_headroom_is_the_first_warning(database: Database, running: Run) -> None:
    """Little headroom of fp16 outputs is a warning; gradients, which depend on the scale, do not
    count.
    """

    def found(**activations: float | str) -> list[findings.Finding]:
        record(database, running, make_steps([1.0] * 40), events=[headroom_of(**activations)])
        with database.reading() as session:
            return findings.of_run(session, session.get_one(Run, running.id))

    assert found(body=1000.0, head=2.0) == []
    [warning] = found(body=3820.0, head=2.0, over="Infinity")
    assert warning.title == "body has 4.1 powers of two of headroom"
    assert warning.module == "body"
    assert "In step 100 its largest activation was 3,820;" in warning.text


def test_headroom_of_a_run_in_bf16_is_no_finding(database: Database, ada: User) -> None:
    """Headroom of a bf16 run is no finding, since bf16 has fp32's exponents."""
    with database.writing() as session:
        run = submit(session, ada, config=config(precision="bf16"))
        look = Diagnosis(run_id=run.id, kind="headroom", step=100)
        look.content = headroom_of(body=60000.0)
        session.add(look)
        session.flush()
        assert findings.of_run(session, run) == []


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([1.0] * 9 + [math.nan, 1.0], "At step 11 it was finite"),
        ([1.0] * 9 + [math.nan], "whether other batches are finite"),
        ([1.0] * 9 + [math.nan, math.nan], "whether other batches are finite"),
    ],
)
def test_a_lost_loss_of_unknown_origin_says_what_later_steps_show(
    database: Database, running: Run, losses: list[float], words: str
) -> None:
    """A lost loss is attributed to its batch only if a later loss is finite."""
    skip = make_skip(10, "head.bias") | {"loss_nonfinite": True}
    record(database, running, make_steps(losses, skipped=[10]), events=[skip])
    with database.reading() as session:
        found = findings.of_run(session, session.get_one(Run, running.id))
    [text] = [each.text for each in found if each.part == "skipped"]
    assert words in text


@pytest.mark.only_on("sqlite")
def test_the_steps_of_a_diverged_run_are_not_counted(database: Database, running: Run) -> None:
    """Evidence of a diverged run takes as many SQLite instructions for ten times the steps."""
    counts = []
    for first, last in ((1, 1_000), (1_001, 10_000)):
        steps = make_steps([1.0] * (last - first + 1), first=first)
        steps["loss"] = steps["grad_norm"] = np.nan
        record(database, running, steps)
        with database.reading() as session:
            run = session.get_one(Run, running.id)
            counter = itertools.count()
            session.connection().connection.driver_connection.set_progress_handler(  # type: ignore
                lambda counter=counter: 0 * next(counter), 100
            )
            assert lost_losses(session, run) is None
        counts.append(next(counter))
    assert counts[0] > 5
    assert counts[1] < 2 * counts[0]


@pytest.mark.parametrize("lost", [0, 285])
def test_the_scale_is_excluded_only_if_no_step_with_such_a_loss_was_applied(lost: int) -> None:
    """The scale is excluded as a cause only if no step with a non-finite loss was applied."""
    skips = _skips("head.bias", loss_nonfinite=True)
    found = next(findings.find(_evidence("healthy", skips=skips, lost_losses=lost)))
    assert ("the loss scale is not the cause" in found.text) is (lost == 0)
    assert ("285 other steps" in found.text) is (lost == 285)


@pytest.mark.parametrize(
    ("origin", "sentence"),
    [
        ({}, ""),
        (
            {"direction": "forward", "kind": "inside", "dtype": "float16", "module": "head"},
            "At step 9 head had the first non-finite output, in float16. ",
        ),
        (
            {"operation": "SqrtBackward0", "kind": "singular", "source": "train.py:7"},
            "At step 9 SqrtBackward0, at train.py:7 had the first non-finite gradient. ",
        ),
    ],
)
def test_what_an_earlier_version_saw_first_is_quoted_without_a_cause(
    origin: dict[str, Any], sentence: str
) -> None:
    """Earlier versions' reports of a first non-finite value are quoted without a cause."""
    event = {"step": 9, "scale": 2.0, "direction": "backward", "kind": "unobserved"}
    event |= dict.fromkeys(("operation", "module", "dtype", "source")) | origin
    skips = _skips("head.bias", loss_nonfinite=True)
    signs = causes.Signs(events=[convert(event, Origin)], skips=skips, has_scaler=True)
    [found] = causes.named(signs, advice_words.SCRIPT)
    assert sentence in found.text
    assert ("first non-finite" in found.text) is bool(origin)
    assert not found.is_certain
    assert found.cause == found.fix == ""


@pytest.mark.parametrize(
    ("source", "rate", "losses", "is_found"),
    [
        (WATCH, 30.0, [16.0] * 50 + [44_225.0] * 50, True),
        (COMMAND, 0.2, [2.3] * 50 + [4.7] * 50, True),
        (WATCH, 30.0, [16.0] * 50 + [31.0] * 50, False),  # less than twice as large
        (WATCH, 0.1, [16.0] * 50 + [44_225.0] * 50, False),  # a usual rate
        (WATCH, 30.0, [16.0] * 49 + [44_225.0] * 50, False),  # too few steps
        (WATCH, 30.0, [-4.0] * 50 + [-1.0] * 50, False),  # negative losses: less than its size
        (WATCH, 30.0, [-4.0] * 50 + [9.0] * 50, True),
        (WATCH, 30.0, [math.nan] + [9.0] * 99, False),  # unknown at the start
    ],
)
def test_a_scripts_learning_rate_is_named_if_its_loss_rose(
    database: Database,
    running: Run,
    source: str,
    rate: float,
    losses: list[float],
    is_found: bool,
) -> None:
    """A script's learning rate is suspected if its loss rose, although its settings are unknown."""
    steps = make_steps(losses)
    steps["lr"] = rate
    record(database, running, steps)
    with database.writing() as session:
        run = session.get_one(Run, running.id)
        run.source = source
        found = [each.title for each in findings.of_run(session, run)]
    assert ("The learning rate is too high" in found) is is_found


@pytest.mark.parametrize("words", [advice_words.SCRIPT, advice_words.RECIPE])
def test_an_operator_that_was_not_observed_is_found_by_a_check(words: AdviceWords) -> None:
    """For an unobserved operator a script's finding suggests a check, a recipe's a replay."""
    signs = causes.Signs(skips=_skips("head.bias", loss_nonfinite=True), has_scaler=True)
    [found] = causes.named(signs, words)
    assert ("halfstep check" in found.text) is (words is advice_words.SCRIPT)


@pytest.mark.parametrize(
    ("scale", "loss_nonfinite", "cause"),
    [
        (2.0**-30, False, "singular_gradient"),
        (2.0**-10, False, "backward_overflow"),
        (2.0**-30, True, ""),
    ],
)
def test_gradients_lost_far_below_a_scale_of_1_are_no_overflow(
    scale: float, loss_nonfinite: bool, cause: str
) -> None:
    """Skips far below a scale of 1 are no overflow, also in a compiled region."""
    skips = _skips("head.bias", loss_nonfinite=loss_nonfinite)
    skips[-1].scale_before = scale
    evidence = _evidence("collapsing", skips=skips, scale=scale)
    assert next(findings.find(evidence)).cause == cause


def test_a_damaged_event_costs_only_its_own_finding(database: Database, running: Run) -> None:
    """An unreadable event is left out, and all other findings are shown."""
    record(database, running, make_steps([1.0] * 40), events=[make_weights(missing=["head"])])
    with database.writing() as session:
        for kind in KINDS:
            if not session.query(Diagnosis).filter_by(run_id=running.id, kind=kind).count():
                damaged = {"step": "first", "modules": 7}
                session.add(Diagnosis(run_id=running.id, kind=kind, step=3, content=damaged))
        session.flush()
        [found] = findings.of_run(session, session.get_one(Run, running.id))
    assert found.title == "The initial weights match only in part"


def test_replays_of_ordinary_skips_accuse_no_healthy_scale() -> None:
    """Replays of ordinary skips after growths report nothing about a healthy scale."""
    defects = [
        convert(
            {
                "step": step,
                "kind": "scale_too_large",
                "symptom": "gradient",
                "scale": 2.0**19,
                "fits_below": 2.0**18,
            },
            Defect,
        )
        for step in (57, 91, 1062, 1077, 1139)
    ]
    armed = [ShadowStep(step=each.step, armed=1, defects=[each]) for each in defects]
    skips = _skips("head.bias")
    assert not list(findings.find(_evidence("healthy", events=armed, skips=skips)))
    found = list(findings.find(_evidence("oscillating", events=armed, skips=skips)))
    assert found[0].title == "The loss scale is too large and does not fall"
    assert text_of(defects[0]).count("step 57") == 1
    assert text_of(defects[0]).endswith("They fit at a scale of 2^18 or less.")


def test_a_clip_of_scaled_gradients_is_told_once_with_its_line() -> None:
    """A clip of scaled gradients is one finding, with its count and an armed step's line."""
    clip = ScaledClip(step=60, optimizer="SGD", count=60, max_norm=1.0)
    site = {"file": "/home/a/train.py", "line": 31, "source": "clip_grad_norm_(params, 1.0)"}
    edit = {"step": 4, "kind": "scaled_gradients_edited", "symptom": "gradient", "scale": 2.0**16}
    defect = convert(edit | {"site": site}, Defect)
    armed = ShadowStep(step=4, armed=1, defects=[defect])
    [found] = findings.find(_evidence("healthy", events=[clip, armed]))
    assert found.cause == "scaled_gradients_clipped"
    assert "clipped at least 60 times" in found.text
    assert found.text.endswith("saw it in `clip_grad_norm_(params, 1.0)` (train.py:31).")


def test_a_validation_that_overflows_explains_its_metric_and_no_skip() -> None:
    """An overflow in a validation is a separate finding, and hides none about skips."""
    overflow = {"step": 8, "kind": "overflow", "symptom": "validation", "dtype": "float16"}
    armed = ShadowStep(step=8, armed=1, defects=[convert(overflow, Defect)])
    skips = _skips("head", loss_nonfinite=True)
    before = list(findings.find(_evidence("collapsing", skips=skips)))
    lost = {"skips": skips, "lost_metrics": [("val/loss", 8)]}
    found = list(findings.find(_evidence("collapsing", events=[armed], **lost)))
    added = [finding for finding in found if finding not in before]
    assert [finding.title for finding in added] == ["Overflow of fp16 in a validation"]
    assert [finding for finding in found if finding not in added] == before
    assert "metric_nonfinite" in {f.cause for f in findings.find(_evidence("collapsing", **lost))}


def test_a_learning_rate_that_is_far_too_large_explains_what_is_not_finite() -> None:
    """Next to a far too large learning rate no finding suggests a precision."""
    overflow = {"step": 8, "kind": "overflow", "symptom": "loss", "dtype": "float16"}
    defect = convert(overflow | {"helps": ["fp32", "bf16"]}, Defect)
    armed = ShadowStep(step=8, armed=1, defects=[defect])
    signs = {"events": [armed], "skips": _skips("head", loss_nonfinite=True), "has_bf16": True}
    lost = [("val/loss", 8)]
    assert len(list(findings.find(_evidence("collapsing", lost_metrics=lost, **signs)))) > 1
    rates = {"recipe.learning_rate": 1000.0}
    [found] = findings.find(_evidence("collapsing", lost_metrics=lost, rates=rates, **signs))
    assert found.title == "The learning rate is far too large"
