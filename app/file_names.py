"""What a downloaded checkpoint is called, the same in its header and on the run's page."""

import re

from app.summary import RunSummary
from db.tables import Checkpoint, Run

SUFFIXES = {"checkpoint": ".pt", "weights": ".safetensors"}


def file_name(run: Run | RunSummary, row: Checkpoint) -> str:
    """Return a name that says the run and the step: digits-fp16-run12-step400.pt."""
    recipe = re.sub(r"[^A-Za-z0-9._-]+", "-", run.recipe).strip("-.") or "run"
    suffix = SUFFIXES.get(row.kind, "")
    return f"{recipe}-{run.precision}-run{run.id}-step{row.step}{suffix}"
