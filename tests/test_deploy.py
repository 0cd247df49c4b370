"""Files of deploy/, parsed as by systemd and Prometheus."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr
from starlette.testclient import TestClient

from app.main import create_app
from db import variables
from db.database import Database
from db.files.backup import back_up
from db.files.object_store import open_store
from db.settings import Settings
from db.tables import Run, User
from tests.app.conftest import offered, running, submit  # noqa: F401 - fixtures

DEPLOY = Path(__file__).parents[1] / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
#: Labels that Prometheus adds.
ADDED = {"instance", "job", "le", "__name__"}


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_knows_each_line_of_a_unit(unit: Path, tmp_path: Path) -> None:
    """systemd knows each key and value of the units, and their command exists."""
    text = unit.read_text()
    [command] = re.findall(r"^ExecStart=/opt/halfstep/bin/halfstep (\w+)$", text, re.MULTILINE)
    assert command in ("server", "worker")
    copy = tmp_path / unit.name
    copy.write_text(text.replace("/opt/halfstep/bin/halfstep", "/bin/true"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_each_variable_of_units_and_containers_exists() -> None:
    """Each variable in units and containers exists, in comments too, or is documented for
    compose.
    """
    root = DEPLOY.parent
    files = [root / "docker-compose.yml", root / "Dockerfile", *DEPLOY.iterdir()]
    text = "\n".join(path.read_text() for path in files)
    names = {*re.findall(r"HALFSTEP_[A-Z_]+", text)} - {"HALFSTEP_NAME"}  # of any setting
    assert len(names) >= 7
    assert not variables.problems(dict.fromkeys(names, ""), Settings.model_fields)
    documented = (root / "docs" / "how-to" / "operations.md").read_text()
    own = set(re.findall(r"\$\{(\w+):", files[0].read_text())) - {"POSTGRES_PASSWORD"}
    assert own >= {"SERVER_MEMORY", "POSTGRES_IMAGE"}
    assert [name for name in own if f"`{name}`" not in documented] == []


def test_rules_and_panels_name_series_with_their_labels(
    database: Database,
    ada: User,
    running: Run,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Each series in a rule or panel exists, with its labels."""
    settings = Settings(data=tmp_path, metrics_token=SecretStr("a-long-random-text"))
    submit(database, ada)
    back_up(database, open_store(settings), tmp_path / "backup")
    app = create_app(settings, database)
    with TestClient(app, base_url="http://localhost") as client:
        client.get("/")
        answer = client.get("/metrics", headers={"authorization": "Bearer a-long-random-text"})
    labels: dict[str, dict[str, set[str]]] = {"up": {}}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            for label, value in {"": "", **sample.labels}.items():
                labels.setdefault(sample.name, {}).setdefault(label, set()).add(value)
    expressions = list(_expressions())
    assert len(expressions) > 20
    for expression in expressions:
        names = re.findall(r"\b(?:halfstep|process)_\w+|\bup\b", expression)
        assert names, expression
        known = set().union(ADDED, *(labels[name] for name in names))
        assert set(re.findall(r"\$labels\.(\w+)|{{(\w+)}}", expression)) <= {
            pair for name in known for pair in ((name, ""), ("", name))
        }
        for group in re.findall(r"\bby \(([^)]*)\)", expression):
            assert set(group.split(", ")) <= known, expression
        for name, matchers in re.findall(r"(\w+){(\w+[=!~]+\"[^}]*)}", expression):
            for label, values in re.findall(r"(\w+)[=!~]+\"([^\"]*)\"", matchers):
                exist = labels[name].get(label, set())
                is_free = label in ADDED or (name, label) == (
                    "halfstep_http_requests_total",
                    "status",
                )
                assert is_free or set(values.split("|")) <= exist, (expression, exist)


def _expressions() -> Iterator[str]:
    """Yield the expressions of rules with their texts, and of panels with their legends."""
    for group in yaml.safe_load((DEPLOY / "prometheus-alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield f"{rule['expr']} # {rule['annotations']['summary']}"
    for panel in json.loads((DEPLOY / "grafana.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield f"{target['expr']} # {target['legendFormat']}"
