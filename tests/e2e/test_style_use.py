"""Each rule of the stylesheets applies to an element of some page."""

from pathlib import Path

from playwright.sync_api import Page

from db.database import Database
from db.runs import reports
from db.runs.reports import Content
from db.settings import Settings
from db.tables import User
from tests.e2e.test_access import EMPTY, FULL, UNFOLD, fill

#: Rules of states that the pages below are not in, or not for long: other tests bring these about.
OF_STATES = Path(__file__).with_name("rules_of_states.txt").read_text().splitlines()
#: Returns each rule's selector, without states of a moment and elements that CSS makes, with all
#: that it is nested in, and whether it chooses any element.
MATCHES = r"""(known) => {
    const MOMENT = new RegExp('::[\\w-]+(\\([^)]*\\))?|:(hover|focus|focus-visible|focus-within'
        + '|open|popover-open|fullscreen|disabled|checked|target|active|empty)(?![\\w-])'
        + '|\\[(open|hidden|aria-pressed|aria-selected|aria-sort)[^\\]]*\\]', 'g')
    const selectors = new Set()
    const collect = (rules, outer) => {
        for (const rule of rules) {
            const own = rule.selectorText
            const whole = own === undefined ? outer : !outer ? own : own.includes('&')
                ? own.replaceAll('&', `:is(${outer})`) : `:is(${outer}) ${own}`
            if (own !== undefined && rule.style.length) selectors.add(whole)
            if (rule.cssRules) collect(rule.cssRules, whole)
        }
    }
    for (const sheet of document.styleSheets) if (sheet.href) collect(sheet.cssRules, '')
    const matches = (selector) => {
        const usual = selector.replace(MOMENT, '').replace(/:(not|is)\(\s*\)/g, '')
        try { return document.querySelector(usual) !== null } catch { return true }
    }
    const unknown = [...selectors].filter((each) => !known.includes(each))
    return unknown.map((each) => [each, matches(each)])
}"""


def test_each_rule_applies_somewhere(
    settings: Settings, database: Database, ada: User, page: Page
) -> None:
    """A rule applies on a page with or without rows, unless it belongs to a state that other
    tests cover.
    """
    used: set[str] = set()
    seen: set[str] = set()

    def look(*paths: str) -> None:
        for path in paths:
            page.goto(path)
            if path.startswith("/compare"):
                page.wait_for_selector(".dots .axis")
                page.wait_for_selector(".values > span", state="attached")
            page.evaluate(UNFOLD)
            for selector, is_used in page.evaluate(MATCHES, sorted(used)):
                seen.add(selector)
                if is_used:
                    used.add(selector)

    look(*EMPTY)
    fill(settings, database, ada)
    with database.writing() as session:
        panel = "```panel\ntitle: Loss\nruns: 1\nmetrics: loss\n```"
        report = reports.create(session, ada, "", Content("Panels", panel, []))
    pages = (*FULL, f"/reports/{report.id}", "/runs/1?tab=media", "/runs?group=precision")
    look(*pages)
    if seen - used - {*OF_STATES}:
        look(*pages)  # a script may have been slow
    assert len(seen) > 600
    assert sorted(seen - used - {*OF_STATES}) == []
    assert sorted({*OF_STATES} - seen) == [], "rules that are no more"
