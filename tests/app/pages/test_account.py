"""Password and tokens, and the page of workers."""

import pytest
from starlette.testclient import TestClient


def test_password_is_set_and_other_browsers_are_signed_out(
    browser: TestClient, stranger: TestClient
) -> None:
    """The browser that set it stays signed in; the password opens the door from then on."""
    before = dict(browser.cookies)
    assert browser.post("/account/password", data={"password": "a long secret"}).status_code == 303
    assert browser.get("/account").status_code == 200
    stranger.cookies.update(before)
    assert stranger.get("/account").status_code == 303
    form = {"name": "ada", "password": "a long secret"}
    assert stranger.post("/sign-in", data=form).headers["location"] == "/"


def test_short_password_is_refused(browser: TestClient) -> None:
    """The page says how long it has to be."""
    answer = browser.post("/account/password", data={"password": "short"})
    assert answer.status_code == 422
    assert "has 5 characters; 8 to 200 are allowed" in answer.text


def test_token_is_shown_once(browser: TestClient) -> None:
    """It stands on the page that made it and on no other; revoking takes it off the list."""
    page = browser.post("/account/tokens", data={"name": "ci"}).text
    token = page.partition('class="secret">')[2].partition("<")[0]
    assert token.startswith("hs_")
    later = browser.get("/account").text
    assert token not in later
    assert "<td>ci</td>" in later
    browser.post("/account/tokens/1/revocation")
    assert "<td>ci</td>" not in browser.get("/account").text


def test_workers_show_devices_and_versions(offered: None, browser: TestClient) -> None:
    """Who trains, on what, with which versions."""
    page = browser.get("/workers").text
    assert "7.45 GiB" in page
    assert "torch 2" in page


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_account_shows_when_a_token_was_last_used(
    browser: TestClient, script: TestClient, method: str
) -> None:
    """A token that nobody used says so; reading and writing both count as a use."""
    assert "<td>never</td>" in browser.get("/account").text
    script.request(method, "/api/tokens", json={"name": "x"} if method == "POST" else None)
    page = browser.get("/account").text
    assert page.count("<td>never</td>") == (1 if method == "POST" else 0)
