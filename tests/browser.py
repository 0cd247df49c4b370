"""Chromium for tests, benchmarks and screenshots.

Debian's headless shell renders like the desktop program, in three fifths of the CPU time. Without
it the desktop program is used.
"""

import re
import shutil

from playwright.sync_api import Browser, Page, Playwright

from tests.site import until

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")

#: How many points the loss panel of a run has drawn.
DRAWN = "Number(document.querySelector('[data-drawn]')?.dataset.drawn ?? 0)"


def launch(playwright: Playwright) -> Browser:
    """Start the system's Chromium instead of playwright's."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    return playwright.chromium.launch(executable_path=found, args=ARGUMENTS)


#: The status of a run on its page.
STATUS = ".pill .status"
#: The lines of all panels of a run that have been drawn, as Plotly has them.
LINES = "[...document.querySelectorAll('[data-plot]')].flatMap((plot) => plot.data ?? [])"


def wait_until(page: Page, expression: str, argument: object = None) -> None:
    """Wait until a JavaScript expression, or a function of the argument, is true.

    playwright's own wait evaluates a string within the page, which its policy forbids.
    """
    until(lambda: page.evaluate(expression, argument))


def open_menu(page: Page) -> None:
    """Open the menu of further actions on a run's page."""
    page.get_by_role("button", name="More actions").click()


def open_tab(page: Page, name: str) -> None:
    """Open a tab of a run's page by its label."""
    page.get_by_role("tab", name=re.compile(rf"^{re.escape(name)}( \d+)?$")).click()
