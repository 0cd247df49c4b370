"""Capabilities of a machine whose recipe files change."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace
from sqlalchemy import select

from db.settings import Settings
from db.tables import AuditEvent, Status
from halfstep.machine_offer import MachineOffer, RecipeOffer
from tests.site import Site, halfstep, until
from worker import capabilities
from worker.capabilities import Capabilities
from worker.warm_start import WarmProcess

RECIPE = """
from trainer.recipes.digits import Digits

class Mine(Digits):
    name = "mine"
    title = "{title}"
"""


#: Ends the warm process that it is forked from, which takes it along.
ENDS_ITS_PARENT = """
import os, signal, sys
from trainer.recipes.digits import Digits

if sys.argv[0] == "trainer.probe":
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()

class Mine(Digits):
    name = "mine"
"""


@pytest.mark.extended
def test_a_probe_that_ends_with_the_warm_process_starts_as_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the warm process ends during a probe, recipes are probed by a new process."""
    (tmp_path / "mine.py").write_text(ENDS_ITS_PARENT)
    monkeypatch.setenv("HALFSTEP_RECIPES", f"{tmp_path / 'mine.py'}:Mine")
    settings = Settings(data=tmp_path)
    warm = WarmProcess(settings)
    offer = Capabilities(settings, warm).learn()
    warm.close()
    assert {"digits", "mine"} <= {each.name for each in offer.recipes if each.is_offered}


def test_a_recipe_that_is_added_changed_and_broken_is_offered_as_it_is(
    site: Site, tmp_path: Path
) -> None:
    """A running worker offers a recipe file that was added, changed or broken as it is."""
    file, kept = tmp_path / "mine.py", site.data / "recipes.json"
    file.write_text(RECIPE.format(title="First"))

    def list_offered() -> dict[str, str]:
        return {each["name"]: each.get("title", "") for each in site.recipes()}

    def told_of(name: str) -> dict[str, Any]:
        return next(each for each in site.recipes() if each["name"] == name)

    with site.worker():
        until(lambda: site.offers("digits"))
        assert not site.offers("mine")
        kept.write_text(json.dumps({"recipes": [{"reference": f"{file}:Mine"}]}))
        until(lambda: list_offered().get("mine") == "First")
        run = site.wait(site.submit(recipe="mine", steps=5))
        assert (run.status, run.recipe) == (Status.FINISHED, "mine")
        of_old = site.wait(site.submit(recipe=f"{file}:Mine", steps=5))
        assert of_old.status == Status.FINISHED
        before = told_of("mine")
        file.write_text(RECIPE.format(title="Second"))
        until(lambda: list_offered().get("mine") == "Second")
        assert before["source"] == str(file)
        assert told_of("mine")["sha256"] != before["sha256"]
        file.write_text("1 / 0\n")
        until(lambda: "mine" not in list_offered())
        result = told_of(f"{file}:Mine")
        assert (result["error"], result["place"]) == (
            "ZeroDivisionError: division by zero",
            "mine.py:1",
        )
        assert site.offers("digits")


@pytest.mark.extended
@pytest.mark.slow
def test_a_recipe_that_never_ends_loading_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A recipe that never finishes loading is killed, and the former capabilities stay."""
    file = tmp_path / "mine.py"
    file.write_text(RECIPE.format(title="First"))
    monkeypatch.setenv("HALFSTEP_RECIPES", f"{file}:Mine")
    here = Capabilities(Settings(data=tmp_path))
    assert "mine" in {each.name for each in here.learn().recipes}
    assert here.poll_changes() is None
    monkeypatch.setattr(capabilities, "LONGEST_SECONDS", 0.0)
    file.write_text("import time\ntime.sleep(600)\n")
    until(lambda: here.poll_changes() is None and "unchanged" in caplog.text)
    assert here.poll_changes() is None
    here.close()


@pytest.mark.extended
@pytest.mark.slow
def test_memory_of_recipes_is_measured_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recipes' memory is measured once, later; a recipe that fails the measurement has none."""
    monkeypatch.setattr(capabilities, "COUNTED_AFTER_SECONDS", 0.0)
    here = Capabilities(Settings(data=tmp_path))
    mlp = RecipeOffer(name="mlp", reference="mlp", sha256="1", schema={})
    broken = replace(mlp, name="broken", reference=f"{tmp_path}/none.py", sha256="2")
    here._offer, here._seen = MachineOffer(recipes=[mlp, broken]), here._file_states()
    found: list[Any] = []
    until(lambda: found.extend(filter(None, [here.poll_changes()])) or bool(found))
    assert found[0].recipes[0].memory.weight_bytes > 10**8
    assert found[0].recipes[1].memory is UNSET
    assert here.poll_changes() is None
    assert here._counter is None
    here.close()


@pytest.mark.extended
@pytest.mark.slow
def test_additions_and_removals_are_in_the_audit_log(site: Site, tmp_path: Path) -> None:
    """Each added or removed recipe is in the audit log once; a briefly broken file is not
    removed.
    """
    file = tmp_path / "mine.py"
    file.write_text(RECIPE.format(title="First"))
    known = {"HALFSTEP_DATA": str(site.data)}

    def audit_events() -> list[tuple[str, str, str]]:
        with site.database.reading() as session:
            rows = session.execute(
                select(AuditEvent.action, AuditEvent.detail, AuditEvent.address).order_by(
                    AuditEvent.id
                )
            )
            return [(row[0], row[1], row[2]) for row in rows]

    result = (f"by worker w1: {file}:Mine", "terminal")
    with site.worker():
        until(lambda: site.offers("digits"))
        assert audit_events() == []
        assert halfstep("recipe", "add", str(file), "--no-check", **known).returncode == 0
        until(lambda: site.offers("mine"))
        assert audit_events() == [("recipe offered", *result)]
        file.write_text("1 / 0\n")
        until(lambda: not site.offers("mine"))
        assert len(audit_events()) == 1
        assert halfstep("recipe", "remove", str(file), **known).returncode == 0
        until(lambda: len(audit_events()) == 2)
        assert audit_events()[1] == ("recipe withdrawn", *result)
    with site.worker():
        until(lambda: site.offers("digits"))
    assert len(audit_events()) == 2
