"""Workers, tokens and the API description."""

from pathlib import Path

from starlette.testclient import TestClient

from db.database import Database


def test_workers_and_recipes_are_listed(offered: None, script: TestClient) -> None:
    """The API lists workers with devices, and recipes with schemas."""
    (worker,) = script.get("/api/v1/workers").json()["workers"]
    assert (worker["name"], worker["alive"]) == ("w1", True)
    assert worker["is_sandboxed"] is False  # not reported
    (recipe,) = script.get("/api/v1/recipes").json()
    assert recipe["schema"]["properties"]["precision"]["enum"] == ["fp16", "bf16", "fp32"]


def test_token_is_shown_once_and_works_until_revoked(
    browser: TestClient, script: TestClient, stranger: TestClient
) -> None:
    """A new token opens the API until it is revoked, and the list does not show it."""
    made = browser.post("/api/v1/tokens", json={"name": "ci"}).json()
    bearer = {"Authorization": f"Bearer {made['token']}"}
    assert stranger.get("/api/v1/runs", headers=bearer).status_code == 200
    assert made["token"] not in script.get("/api/v1/tokens").text
    assert script.delete(f"/api/v1/tokens/{made['id']}").status_code == 204
    assert stranger.get("/api/v1/runs", headers=bearer).status_code == 401


def test_a_token_needs_a_name_and_a_kind_that_there_is(browser: TestClient) -> None:
    """A token with an empty name or an unknown kind is refused under the name of the field."""
    assert "name" in browser.post("/api/v1/tokens", json={"name": " "}).json()["errors"]
    wrong = {"name": "ci", "kind": "root"}
    assert "kind" in browser.post("/api/v1/tokens", json=wrong).json()["errors"]


def test_docs_show_every_operation(browser: TestClient, database: Database) -> None:
    """The documentation page has every path of the OpenAPI description."""
    paths = browser.get("/api/v1/openapi.json").json()["paths"]
    page = browser.get("/api/v1/docs").text
    for path in paths:
        assert path in page


def test_the_reference_names_every_resource(browser: TestClient) -> None:
    """The first segment of each API path is in the table of docs/reference/client.md."""
    reference = (Path(__file__).parents[3] / "docs/reference/client.md").read_text()
    table = reference.partition("## HTTP API")[2].partition("\n## ")[0]
    paths = browser.get("/api/v1/openapi.json").json()["paths"]
    resources = {path.split("/")[3] for path in paths if path.startswith("/api/v1/")}
    assert sorted(each for each in resources if f"`/{each}`" not in table) == []
