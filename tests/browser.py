"""Chromium, as tests, benchmarks and screenshots drive it.

Debian's headless shell draws what the desktop's program draws, with no desktop round it: the same
tests take three fifths of the processor's time. The program itself will do where the shell is not.
"""

import shutil

from playwright.sync_api import Browser, Page, Playwright

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")

#: How many points the chart of a run has drawn.
DRAWN = "Number(document.querySelector('[data-drawn]')?.dataset.drawn ?? 0)"


def launched(playwright: Playwright) -> Browser:
    """Start the system's own; playwright would bring another."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    return playwright.chromium.launch(executable_path=found, args=ARGUMENTS)


def open_tab(page: Page, name: str) -> None:
    """Show a tab of a run's page, by what is written on it."""
    page.get_by_role("tab", name=name, exact=True).click()
