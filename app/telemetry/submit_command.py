"""The command that queues a recipe's run again, with the same settings."""

import json
import shlex

from sqlalchemy.orm import Session

from app.submission import config_schema
from app.telemetry import config_values
from db.tables import RECIPE, Run


def submit_command(session: Session, run: Run) -> str | None:
    """Return the shell command, from the same checkpoint if any; None for other runs."""
    if run.source != RECIPE:
        return None
    if run.parent_id is None:
        words = ["halfstep", "run", "submit", run.recipe]
        settings = config_values.settings_of(session, run)
        changed = {each.path: each.value for each in settings if each.is_changed}
    else:
        words = ["halfstep", "run", "fork", str(run.parent_id), "--step", str(run.parent_step)]
        parent = session.get(Run, run.parent_id)
        before = config_schema.flat(parent.config) if parent else []
        changed = dict(each for each in config_schema.flat(run.config) if each not in before)
    changed.pop("precision", None)
    words += ["--precision", run.precision, "--name", run.name]
    words += [word for tag in run.tags.split(",") if tag.strip() for word in ("--tag", tag.strip())]
    words += ["--project", run.project] if run.project else []
    if run.parent_id is None:
        words += ["--nodes", str(run.nodes)] if run.nodes > 1 else []
        words += ["--devices", str(run.devices_per_node)] if run.devices_per_node > 1 else []
        words += ["--preemptible"] if run.preemptible else []
    for path, value in changed.items():
        words += ["--set", f"{path}={_text(value)}"]
    return shlex.join(words)


def _text(value: object) -> str:
    """Return a value as --set reads it: JSON, or text that is not JSON."""
    if not isinstance(value, str) or not value:
        return json.dumps(value)
    try:
        json.loads(value)
    except ValueError:
        return value
    return json.dumps(value)
