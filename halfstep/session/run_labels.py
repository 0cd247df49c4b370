"""The labels of a run, as its script knows them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import UNSET, UnsetType, structs

from halfstep.telemetry.event_fields import NAME_CHARACTERS
from halfstep.telemetry.events import MOST_TAGS, Described, Labels
from halfstep.telemetry.run_folder import read_description


class RunLabels:
    """Name, note and tags of a run, of which a script may change some."""

    def __init__(self, folder: Path | None) -> None:
        """folder: of the run; None if nothing is recorded."""
        run = read_description(folder) if folder else None
        self._known = Labels(name=run.name, tags=run.tags[:MOST_TAGS]) if run else Labels()

    def change(
        self,
        name: str | UnsetType,
        note: str | UnsetType,
        tags: Sequence[str] | UnsetType,
        step_metrics: Mapping[str, str] | UnsetType,
    ) -> Described:
        """Return the event of a change, which says what the script knew before."""
        described = Described(
            name=name if name is UNSET else name[:NAME_CHARACTERS],
            note=note,
            tags=tags if tags is UNSET else [tag[:NAME_CHARACTERS] for tag in tags[:MOST_TAGS]],
            before=self._known,
            step_metrics=step_metrics if step_metrics is UNSET else dict(step_metrics),
        )
        changed = {
            label: value
            for label in ("name", "note", "tags")
            if (value := getattr(described, label)) is not UNSET
        }
        self._known = structs.replace(self._known, **changed)
        return described
