"""Names of downloaded files, the same in headers and on the run's page."""

import re

from app.runs.summary import RunSummary
from db.tables import RECIPE, Artifact, CheckpointFile, Run


def file_name(run: Run | RunSummary, row: CheckpointFile) -> str:
    """Return a name with run and step: digits-fp16-run12-step400.pt.

    For watched runs and commands it includes the file's own name, since the format is unknown.
    """
    if run.source != RECIPE:
        own = (row.path or "").rpartition("/")[2]
        return f"{_stem(run, row)}-{without_specials(own)[-100:]}"
    if row.kind == "checkpoint":
        return f"{_stem(run, row)}.pt"
    if row.kind.startswith("shard."):
        return f"{_stem(run, row)}-{without_specials(row.kind)}.distcp"
    parts = [part for part in row.kind.split(".", 1) if part != "weights"]
    ending = "".join(f"-{without_specials(part)}" for part in parts)
    return f"{_stem(run, row)}{ending}.safetensors"


def artifact_name(run: Run | RunSummary, row: Artifact) -> str:
    """Return a name with run, step and artifact: …-step400-samples.txt."""
    return f"{_stem(run, row)}-{without_specials(row.name)}"


def log_name(run: Run | RunSummary) -> str:
    """Return a name with the run: digits-fp16-run12-log.txt.gz."""
    return f"{_stem_of_run(run)}-log.txt.gz"


def _stem(run: Run | RunSummary, row: CheckpointFile | Artifact) -> str:
    return f"{_stem_of_run(run)}-step{row.step}"


def _stem_of_run(run: Run | RunSummary) -> str:
    if run.source != RECIPE:
        return f"{without_specials(run.name).strip('-.')[:60] or 'run'}-run{run.id}"
    recipe = without_specials(run.recipe).strip("-.") or "run"
    return f"{recipe}-{run.precision}-run{run.id}"


def without_specials(name: str) -> str:
    """Return a name with '-' for characters that a header would have to quote."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)
