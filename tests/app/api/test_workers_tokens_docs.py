"""Workers, tokens and the API's own description."""

from starlette.testclient import TestClient

from db.database import Database


def test_workers_and_recipes_are_listed(offered: None, script: TestClient) -> None:
    """A worker's devices and its recipes' schemas are there for scripts."""
    (worker,) = script.get("/api/v1/workers").json()["workers"]
    assert (worker["name"], worker["alive"]) == ("w1", True)
    (recipe,) = script.get("/api/v1/recipes").json()
    assert recipe["schema"]["properties"]["precision"]["enum"] == ["fp16", "bf16", "fp32"]


def test_token_is_shown_once_and_works_until_revoked(
    script: TestClient, stranger: TestClient
) -> None:
    """A new token opens the API; the list does not show it; revoked, it opens nothing."""
    made = script.post("/api/v1/tokens", json={"name": "ci"}).json()
    bearer = {"Authorization": f"Bearer {made['token']}"}
    assert stranger.get("/api/v1/runs", headers=bearer).status_code == 200
    assert made["token"] not in script.get("/api/v1/tokens").text
    assert script.delete(f"/api/v1/tokens/{made['id']}").status_code == 204
    assert stranger.get("/api/v1/runs", headers=bearer).status_code == 401


def test_a_token_needs_a_name(script: TestClient) -> None:
    """An empty name is refused under the field's own name."""
    assert "name" in script.post("/api/v1/tokens", json={"name": " "}).json()["errors"]


def test_docs_show_every_operation(browser: TestClient, database: Database) -> None:
    """The page for people has every path of the description for tools."""
    paths = browser.get("/api/v1/openapi.json").json()["paths"]
    page = browser.get("/api/v1/docs").text
    for path in paths:
        assert path in page
