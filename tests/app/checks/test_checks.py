"""Uploaded checks: permissions to upload, read and delete them, their limits, and their page."""

import re
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import select
from starlette.testclient import TestClient

from app.checks import check_view
from app.checks.source_lines import html_of, lines_of, parts_of
from db.access import accounts, projects
from db.access.permissions import MAINTAINER, MEMBER, VIEWER
from db.database import Database
from db.runs import check_reports
from db.tables import AuditEvent, CheckReport, User
from halfstep.check.report import MOST_LINES, MOST_ROWS, as_content
from tests.app.auth.permissions_made import script_of
from tests.app.checks.checks_made import (
    OVERFLOW,
    SCRIPT,
    SOURCE,
    add_check,
    body,
    full_report,
    report,
    row,
)
from tests.marks import looped


@pytest.fixture
def people(database: Database, ada: User) -> dict[str, User]:
    """Users of the project vision, and one without a role in it."""
    roles = {"mel": MEMBER, "tom": MEMBER, "vic": VIEWER, "max": MAINTAINER, "out": None}
    with database.writing() as session:
        projects.make(session, "vision")
        people = {name: accounts.make_user(session, name) for name in roles}
        for name, role in roles.items():
            if role:
                projects.set_role(session, people[name], "vision", role)
    return people


@pytest.mark.sql
def test_members_upload_viewers_read_and_authors_or_maintainers_delete(
    app: FastAPI, database: Database, people: dict[str, User]
) -> None:
    """Members upload checks, viewers read and authors or maintainers delete them, all audited."""
    scripts = {name: script_of(app, database, user) for name, user in people.items()}
    new = body(project="vision")
    assert scripts["vic"].post("/api/v1/checks", json=new).status_code == 403
    assert scripts["out"].post("/api/v1/checks", json=new).status_code == 404
    answer = scripts["mel"].post("/api/v1/checks", json=new)
    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert (made["script"], made["faults"], made["notes"], made["steps"]) == (SCRIPT, 4, 1, 20)
    path = f"/api/v1/checks/{made['id']}"
    content = scripts["vic"].get(path).json()
    assert content == made | {"report": new["report"], "sources": {SCRIPT: SOURCE}}
    assert scripts["out"].get(path).status_code == 404
    assert scripts["vic"].get("/api/v1/checks?project=vision").json()["checks"] == [made]
    assert scripts["out"].get("/api/v1/checks").json()["total"] == 0
    assert scripts["out"].get("/api/v1/checks?project=vision").status_code == 404
    assert [scripts[name].delete(path).status_code for name in ("out", "vic", "tom")] == [
        *(404, 403, 403)
    ]
    assert scripts["mel"].delete(path).status_code == 204
    assert scripts["vic"].get(path).status_code == 404
    other = scripts["tom"].post("/api/v1/checks", json=new).json()["id"]
    assert scripts["max"].delete(f"/api/v1/checks/{other}").status_code == 204
    with database.reading() as session:
        in_order = select(AuditEvent.action, AuditEvent.detail).order_by(AuditEvent.id)
        events = [tuple(event) for event in session.execute(in_order)]
    assert events == [
        ("POST /api/v1/checks", "project vision"),
        (f"DELETE {path}", ""),
        ("POST /api/v1/checks", "project vision"),
        (f"DELETE /api/v1/checks/{other}", ""),
    ]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no report": ({"report": {"rows": []}}, "report"),
    "a wrong field": ({"report": as_content(report()) | {"steps": "20"}}, "report"),
    "steps below 0": ({"report": as_content(report(steps=-1))}, "report.steps"),
    "steps beyond a column": ({"report": as_content(report(steps=2**40))}, "report.steps"),
    "an integer beyond floats": ({"report": as_content(report()) | {"known": 10**400}}, "report"),
    "NUL in a text": ({"report": as_content(report(script="a\0"))}, "report"),
    "a long script": ({"report": as_content(report(script="a" * 201))}, "report.script"),
    "too many rows": (
        {"report": as_content(report(*[row("overflow", 1)] * (MOST_ROWS + 1)))},
        "report.rows",
    ),
    "too many lines": ({"sources": {SCRIPT: "\n" * MOST_LINES}}, "sources"),
    "too many files": ({"sources": {f"{n}.py": "" for n in range(101)}}, "sources"),
    "NUL in a source": ({"sources": {SCRIPT: "\0"}}, f"sources.{SCRIPT}"),
}


@looped("name", REFUSED)
def test_what_is_no_report_or_beyond_its_bounds_is_refused(browser: TestClient, name: str) -> None:
    """An invalid report, or one beyond its limits, is refused with the field and not stored."""
    changes, field = REFUSED[name]
    answer = browser.post("/api/v1/checks", json=body(**changes))
    assert answer.status_code == 422
    assert list(answer.json()["errors"]) == [field]
    assert browser.get("/api/v1/checks").json()["total"] == 0


def test_numbers_that_json_lacks_are_refused_as_numbers_and_kept_as_texts(
    browser: TestClient,
) -> None:
    """NaN and infinity are accepted as strings, as `halfstep check --json` writes them."""
    infinite = as_content(report(row("overflow", 1, value=float("inf"))))
    answer = browser.post("/api/v1/checks", json=body(report=infinite))
    assert answer.status_code == 201, answer.text
    path = f"/checks/{answer.json()['id']}"
    assert browser.get(f"/api/v1{path}").json()["report"]["rows"][0]["value"] == "Infinity"
    assert "∞ in fp32" in browser.get(path).text
    text = '{"report": {"script": "", "torch": "", "steps": 1e400, "rows": []}}'
    headers = {"content-type": "application/json", "X-CSRF-Token": browser.headers["X-CSRF-Token"]}
    answer = browser.post("/api/v1/checks", content=text, headers=headers)
    assert answer.status_code == 422


@pytest.mark.sql
def test_a_project_has_a_limit_of_checks_and_takes_them_along(
    browser: TestClient, database: Database, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks above a project's limit are refused; renaming keeps them, deletion does not."""
    monkeypatch.setattr(check_reports, "MOST", 1)
    with database.writing() as session:
        projects.make(session, "vision")
    assert browser.post("/api/v1/checks", json=body(project="vision")).status_code == 201
    answer = browser.post("/api/v1/checks", json=body(project="vision"))
    assert answer.status_code == 422
    assert "1 checks, the maximum" in answer.json()["errors"]["project"]
    with database.writing() as session:
        projects.rename(session, "vision", "sight")
        assert session.scalars(select(CheckReport.project)).all() == ["sight"]
    with database.writing() as session:
        projects.delete_empty(session, "sight")
        assert session.scalars(select(CheckReport.id)).all() == []


def test_a_page_escapes_what_it_shows(browser: TestClient, database: Database, ada: User) -> None:
    """Source, findings and names in a check are escaped on its page."""
    hostile = "<script>alert(1)</script>`<b>`"
    every = {"title": hostile, "text": hostile, "advice": hostile, "fix": hostile}
    every |= {"file": hostile, "source": hostile, "module": hostile, "operator": hostile}
    made = report(row(hostile, 1, **every, dtype=hostile), script=hostile, errors=[hostile])
    check_id = add_check(database, ada, made, sources={hostile: f"x = '{hostile}'  # {hostile}"})
    text = browser.get(f"/checks/{check_id}").text
    assert "<script>alert" not in text
    assert "<b>`" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;<code>&lt;b&gt;</code>" in text
    assert "<script>alert" not in browser.get("/checks").text


def test_a_row_names_the_steps_in_which_it_was_seen(
    browser: TestClient, database: Database, ada: User
) -> None:
    """A row names the first of many steps, and a single line is not called "1 lines"."""
    every = [*range(1, 21)]
    seen = row("overflow", 1, steps=[3], count=1), row("rounding", 1, steps=every, count=20)
    check_id = add_check(database, ada, report(*seen), sources={SCRIPT: "x = 1"})
    text = browser.get(f"/checks/{check_id}").text
    assert "step 3 of 20" in text
    assert "20 of 20 steps, the first ones 1, 2, 3, 4, 5<" in text
    assert "1 lines" not in text


def test_a_check_without_mistakes_has_its_figures(
    browser: TestClient, database: Database, ada: User
) -> None:
    page = browser.get(f"/checks/{add_check(database, ada, report())}").text
    assert "<b>No line loses precision in 20 steps</b>." in page
    assert 'class="health good"' in page
    assert page.count('class="fact') >= 3
    assert "source-lines" not in page


def test_a_headline_counts_lines_by_what_is_wrong_with_them(
    browser: TestClient, database: Database, ada: User
) -> None:
    """The headline counts lines that lose precision, then nonfinite ones, then wrong calls."""
    losses = [row("overflow", 3), row("rounding", 3), row("rounding", 4)]
    undefined, call = row("undefined", 5), row("scaled_gradients_edited", 6)
    note = row("gradients_underflow", 7, is_fault=False)
    headlines = [
        (
            [*losses, undefined, call, note],
            "2 lines lose precision in 20 steps</b>, 1 line is nonfinite in every precision, "
            "1 mistake in the order of calls, 1 note.",
        ),
        (
            [undefined, call],
            "1 line is nonfinite in every precision in 20 steps</b>, 1 mistake in the order of "
            "calls.",
        ),
        ([call, call], "2 mistakes in the order of calls in 20 steps</b>."),
        ([note], "No line loses precision in 20 steps</b>, 1 note."),
    ]
    for rows, headline in headlines:
        made = report(*rows)
        assert headline in browser.get(f"/checks/{add_check(database, ada, made)}").text


def test_a_check_with_a_baseline_counts_what_is_known(
    browser: TestClient, database: Database, ada: User
) -> None:
    page = browser.get(f"/checks/{add_check(database, ada, full_report(known=3))}").text
    assert "5 new, 3 known from the baseline" in page


def test_lines_without_an_uploaded_source_are_shown_by_their_expression(
    browser: TestClient, database: Database, ada: User
) -> None:
    """Findings beyond the source, and those of sources that were not uploaded, show their
    expression; findings without a line are listed.
    """
    nowhere = row("no_half_operators", 0, file="", title="Nothing runs in half precision")
    beyond = row("overflow", 10**6, source="beyond(x)")
    made = report(*full_report().rows, beyond, nowhere)
    for sources in ({}, {SCRIPT: SOURCE}):
        check_id = add_check(database, ada, made, sources=sources)
        page = re.sub(r"</?span[^>]*>", "", browser.get(f"/checks/{check_id}").text)
        assert f'id="L{OVERFLOW}"' in page
        assert "self.wo(F.relu(self.wi(self.norm(h))).square())</code>" in page
        assert "beyond(x)</code>" in page
        assert "Without a line" in page
        assert ("source not uploaded" in page) == (not sources)


def test_a_finding_has_the_values_of_both_precisions() -> None:
    """An overflow's finding has both precisions' values, and the largest loss scale without it."""
    view = check_view.view_of(full_report(), {SCRIPT: SOURCE})
    shown = {
        each.row.kind: (each.half, each.fp32, str(each.fits), each.tone)
        for line in view.marked
        for each in line.findings
    }
    assert shown == {
        "rounding": ("0", "1e-8", "any scale", "bad"),
        "overflow": ("∞", "1.59e6", "no scale", "bad"),
        "loss_differs": ("1.417", "1.58", "any scale", "bad"),
        "gradients_underflow": ("0.9 % is 0", "", "2<sup>17</sup>", "note"),
        "scaled_gradients_clipped": ("", "", "", "warn"),
    }
    assert [(tile.label, re.sub("<.*?>", "", str(tile.value))) for tile in view.tiles] == [
        ("Loss in step 12", "1.417 in fp32 1.58"),
        ("Lose precision", "3"),
        ("Order of AMP calls", "1"),
        ("Nonfinite steps", "3"),
        ("Largest scale that fits", "217"),
        ("Gradient lost", "0.9 %"),
    ]


def test_an_underflow_of_whole_parameters_is_counted() -> None:
    """An underflow of whole parameters is counted without a share of the norm, often near 0."""
    underflow = row("gradients_underflow", 7, elements=(2, 4))
    view = check_view.view_of(report(underflow), {SCRIPT: SOURCE})
    [found] = [each for line in view.marked for each in line.findings]
    assert found.half == "0 in 2 of 4 parameters"
    assert ("Parameters", "2 of 4") in found.evidence
    assert "Gradient lost" not in [tile.label for tile in view.tiles]


def test_one_line_is_not_called_lines() -> None:
    """The unit of the tile agrees with its count."""
    view = check_view.view_of(report(row("overflow", OVERFLOW)), {SCRIPT: SOURCE})
    assert ("1", "line") in [(tile.value, tile.unit) for tile in view.tiles]


def test_a_source_has_the_lines_of_python_also_with_an_error_in_it() -> None:
    """A source with a syntax error is shown with all its lines, coloured up to the error."""
    lines = lines_of('import a\r\nb = """one\rtwo"""\fc\nif (:\n')
    assert lines == ["import a", 'b = """one', 'two"""\fc', "if (:"]
    parts = parts_of(lines)
    html = [str(html_of(line, parts.get(at, []), ["one"])) for at, line in enumerate(lines, 1)]
    assert html[0] == '<span class="keyword">import</span> a'
    assert '<span class="string marked">one</span>' in html[1]
    assert html[2].startswith('<span class="string">two&#34;&#34;&#34;</span>')
