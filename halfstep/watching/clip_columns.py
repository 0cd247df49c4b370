"""Columns of a row whose gradients its clips have had. This module imports torch."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from halfstep.recording.gradients import Gradients
from halfstep.recording.reader import Reader
from halfstep.recording.row import Clip
from halfstep.watching.current_step import ClipOfStep, CurrentStep

CLIPS_KNOWN = 8  # different clips of a step


class Clipped(NamedTuple):
    """Gradients that a clip has had."""

    ids: list[int]  # of their parameters
    columns: list[int]  # of their norms, from the layout's first; empty if they are not all known
    optimizers: set[int]  # ids of those that have them


class ClipColumns:
    """Clips of the rows of one layout, by which the clipped norms are computed."""

    def __init__(self, known: Mapping[int, Gradients]) -> None:
        """known: gradients of the layout, by optimizer."""
        self._known = known
        self._clipped: list[Clipped] = []
        self.usual: tuple[ClipOfStep, Clipped] | None = None  # the only clip of the last row
        self.has_clips = False  # the last row had clips

    def forget(self) -> None:
        """Forget whose gradients the clips have had: optimizers have others now."""
        self._clipped.clear()
        self.usual = None

    def note(self, number: int, row: CurrentStep, reader: Reader) -> None:
        """Pass on those clips of a row whose gradients it has all."""
        clips: list[Clip] = []
        self.usual = None
        for clip in row.clips.values():
            known = next((clipped for clipped in self._clipped if clipped.ids == clip.ids), None)
            if known is None:
                known = self._find(clip.ids, clip.parameters)
                self._clipped = [known, *self._clipped[: CLIPS_KNOWN - 1]]
            if known.columns and known.optimizers <= row.measured.keys():
                clips.append(Clip(known.columns, clip.max_norm))
                self.usual = (clip._replace(parameters=()), known) if len(row.clips) == 1 else None
        reader.clips(number, clips)
        self.has_clips = bool(clips)

    def _find(self, ids: list[int], parameters: Sequence[Tensor]) -> Clipped:
        """Return where the norms of clipped gradients are; none unless all are here and whole."""
        column = 0
        places: dict[int, tuple[int, int] | None] = {}  # column and optimizer, by parameter
        for identity, gradients in self._known.items():
            for parameter in gradients.parameters:
                is_shared = id(parameter) in places
                places[id(parameter)] = None if is_shared else (column, identity)
                column += 1
        having = [p for p in parameters if p.grad is not None or id(p) in places]
        found = [places.get(id(p)) for p in having]
        if None in found or any(hasattr(p, "to_local") for p in having):
            return Clipped(ids, [], set())
        columns, optimizers = zip(*(entry for entry in found if entry), strict=True)
        return Clipped(ids, list(columns), set(optimizers))
