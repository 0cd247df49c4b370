"""The statement on a run's health, for every cause of findings."""

import ast
import itertools
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import db.health
import halfstep.diagnosis
from db.database import Database
from db.health import findings, scaling_health
from db.health.health_statement import health_statement
from db.health.shadow_findings import cause_of
from db.tables import Run
from halfstep.diagnosis.defect import Defect, Kind, Site
from halfstep.diagnosis.finding import EXPLAINING, OF_VALIDATION, Finding
from halfstep.diagnosis.observations import EXPLAINING_SKIPS
from halfstep.diagnosis.statements import TITLES
from tests.db.telemetry.telemetry_made import make_events, make_skip, make_steps, record
from tests.diagnosis.registry import CAUSES, SHADOW_CAUSES
from tests.marks import looped

SEARCH = list(range(1, 7))
SKIPS = [*SEARCH, 320, 345, 370, 395]
#: Figures of each health, as arguments of count().
FIGURES = {
    "calibrating": (20, SEARCH, 2.0**18),
    "healthy": (400, SEARCH, 2.0**18),
    "oscillating": (400, SKIPS, 2.0**19),
    "collapsing": (400, [*SEARCH, *range(391, 401)], 2.0**8),
    "dead": (600, list(range(50, 601)), 2.0**16),
}
#: Growths by the recorded events: not known, none, and as many as skips.
GROWTHS = (None, [], [319, 344, 369, 394])
#: Words that name a reason; only a finding has the evidence for one.
BLAME = re.compile(r"because|cause|limit|too (large|high)|due to|search|grows|falls back", re.I)


def _titles() -> Iterator[tuple[str, str]]:
    """Yield title and cause of each finding in the source, without its figures."""
    packages = (db.health, halfstep.diagnosis)
    for path in chain.from_iterable(Path(str(p.__file__)).parent.glob("*.py") for p in packages):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Finding":
                named = {each.arg: each.value for each in call.keywords}
                cause = named.get("cause")
                title = ast.unparse(call.args[0])
                yield title, cause.value if isinstance(cause, ast.Constant) else ""
    for kind, title in TITLES.items():
        for node in ("", "MmBackward0"):
            defect = Defect(step=1, kind=kind, symptom="loss", site=Site(node=node))
            yield title, cause_of(defect)
    yield "Overflow of fp16 in a validation", OF_VALIDATION


FINDINGS = sorted(set(_titles()))


def test_every_cause_is_walked() -> None:
    """The catalogue has every finding in the source."""
    assert {cause for _title, cause in FINDINGS} >= {*CAUSES, *SHADOW_CAUSES}


@looped("word", FIGURES)
def test_no_statement_contradicts_a_finding(word: str) -> None:
    """In a statement only the first finding gives a cause, and no faulty run is healthy."""
    each = itertools.product(FINDINGS, (True, False), (True, False), GROWTHS)
    for (title, cause), is_certain, is_fault, growths in each:
        figures = scaling_health.count(*FIGURES[word], growths=growths)
        health = scaling_health.judge(figures)
        first = Finding(title, "", cause=cause, is_certain=is_certain, is_fault=is_fault)
        said = health_statement(health, [first])
        assert health.word == word
        whole = f"{said.title}. {said.text}"
        if first.is_certain_fault:
            assert said.tone != "good", whole
            assert "healthy" not in said.title.lower(), whole
        if grown := re.search(r"grew (\d+) times", said.text):
            assert int(grown[1]) == len(growths or ()), whole
        assert growths is not None or "grew" not in said.text, whole
        facts, *named = re.split(r"(?:Likely c|C)ause: ", said.text, maxsplit=1)
        assert not BLAME.search(facts), whole
        if named:
            assert (named, cause in EXPLAINING) == ([f"{title}."], True)
            assert ("Likely" in said.text) is not is_certain


@looped("kind", sorted(EXPLAINING_SKIPS - {"nonfinite_weight"}))
def test_each_measured_cause_of_skips_is_in_the_statement(kind: Kind) -> None:
    """A statement on skips names each measured cause, forward and backward."""
    health = scaling_health.judge(scaling_health.count(*FIGURES["collapsing"]))
    for node in ("", "MmBackward0"):
        site = Site(operator="mm", node=node)
        cause = cause_of(Defect(step=1, kind=kind, symptom="loss", site=site))
        said = health_statement(health, [Finding("Why", "", cause=cause)])
        assert said.text.endswith("Cause: Why."), node


def test_growths_are_those_of_the_events(database: Database, running: Run) -> None:
    """A statement mentions growths of the scale exactly if events recorded them."""
    skipped = [*SEARCH, 320, 345, 370, 395]
    steps = make_steps([1.0] * 400, skipped=skipped)
    steps["scale"] = 2.0**19
    record(database, running, steps, events=make_events(skipped))

    def reason() -> str:
        with database.reading() as session:
            judged = scaling_health.scaling_health(session, session.get_one(Run, running.id))
        assert judged is not None
        assert judged.word == "oscillating"
        return judged.reason

    assert "the scale did not grow in these steps" in reason()
    growths = [make_skip(step, kind="growth") for step in (200, 369, 394)]
    record(database, running, events=growths)
    assert "the scale grew 2 times in these steps" in reason()


def test_a_scale_is_not_blamed_for_a_loss_that_is_not_finite(
    database: Database, running: Run
) -> None:
    """For a non-finite loss the finding excludes the scale, and the statement names no cause."""
    skipped = [*SEARCH, 320, 345, 370, 395]
    steps = make_steps([1.0] * 400, skipped=skipped)
    steps["scale"] = 2.0**19
    rows = [event | {"loss_nonfinite": event["kind"] == "skip"} for event in make_events(skipped)]
    record(database, running, steps, events=rows)
    with database.reading() as session:
        run = session.get_one(Run, running.id)
        found = findings.of_run(session, run)
        judged = scaling_health.scaling_health(session, run)
    assert judged is not None
    assert "the loss scale is not the cause" in found[0].text
    said = health_statement(judged, found)
    assert said.title == "Frequent skips"
    assert "ikely cause" not in said.text
    assert not BLAME.search(judged.reason)
