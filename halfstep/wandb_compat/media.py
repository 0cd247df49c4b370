"""Images, tables, histograms, videos, documents and figures of W&B, as artifacts of a run."""

import wave
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from halfstep import figures
from halfstep.session import logged_values
from halfstep.session.images import picture, pixels
from halfstep.session.logged_values import Counts
from halfstep.wandb_compat.unsupported import report_ignored, say_once

BINS = 64
MOST_BINS = 512
MOST_PATH = 4096  # characters


class Image:
    """An image: from Pillow, an array (H, W) or (H, W, C), a tensor (C, H, W), a figure, or a file.

    Values from 0 to 1, or from -1 to 1, are scaled to 0 to 255; a batch is shown as a grid.
    """

    def __init__(
        self,
        data_or_path: Any,
        mode: str | None = None,
        caption: str | None = None,
        grouping: int | None = None,
        classes: Any = None,
        boxes: Any = None,
        masks: Any = None,
        file_type: str | None = None,
        normalize: bool = True,
        **further: object,
    ) -> None:
        further |= {"classes": classes, "boxes": boxes, "masks": masks}
        report_ignored("Image", further)
        self.caption, self._mode, self._normalize = caption, mode, normalize
        self._data = data_or_path

    def to_loggable(self) -> Any:
        """Return a loggable value: a Pillow image, or an array of uint8."""
        data = self._data
        if isinstance(data, Image):
            return data.to_loggable()
        if isinstance(data, str | Path):
            import PIL.Image

            with PIL.Image.open(data) as image:
                image.load()
                return self._in_mode(image)
        if (figure := logged_values.figure_of(data)) is not None:
            figure.canvas.draw()
            return np.asarray(figure.canvas.buffer_rgba(), np.uint8)
        if hasattr(data, "save") and hasattr(data, "mode"):
            return self._in_mode(data)
        is_tensor = hasattr(data, "detach")
        if is_tensor:
            data = data.detach().cpu()
            data = (data.float() if data.is_floating_point() else data).numpy()
        array = np.asarray(data)
        if is_tensor and array.ndim in (3, 4):
            array = np.moveaxis(array, -3, -1)
        return pixels(array, is_spread=self._normalize)

    def _in_mode(self, image: Any) -> Any:
        converted = picture(image)
        return converted.convert(self._mode) if self._mode else converted


class Table:
    """Rows of named columns."""

    def __init__(
        self,
        columns: Sequence[str] | None = None,
        data: Any = None,
        rows: Any = None,
        dataframe: Any = None,
        dtype: Any = None,
        optional: Any = True,
        allow_mixed_types: bool = False,
        log_mode: str | None = None,
        **further: object,
    ) -> None:
        report_ignored("Table", further)
        if dataframe is None and hasattr(data, "to_dict"):  # pandas
            dataframe = data
        if dataframe is not None:
            columns, data = list(dataframe.columns), dataframe.to_numpy().tolist()
        given = data if data is not None else rows
        self.data: list[list[Any]] = [list(row) for row in given] if given is not None else []
        widest = max(map(len, self.data), default=0)
        names = columns if columns is not None else [str(i + 1) for i in range(widest)]
        self.columns: list[str] = [str(name) for name in names]

    def add_data(self, *values: Any) -> None:
        """Add a row."""
        self.data.append(list(values))

    add_row = add_data

    def add_column(self, name: str, data: Iterable[Any], optional: bool = False) -> None:
        """Add a column."""
        values = list(data)
        self.data = self.data or [[] for _ in values]
        for row, value in zip(self.data, values, strict=False):
            row.append(value)
        self.columns.append(name)

    def get_column(self, name: str, convert_to: str | None = None) -> Any:
        """Return a column as a list, or with "numpy" as an array."""
        at = self.columns.index(name)
        values = [row[at] for row in self.data]
        return np.array(values) if convert_to == "numpy" else values

    def to_loggable(self) -> list[dict[str, Any]]:
        """Return a loggable value: a list of dictionaries."""
        rows = [
            {name: _cell(value) for name, value in zip(self.columns, row, strict=False)}
            for row in self.data
        ]
        return rows or [dict.fromkeys(self.columns or ["empty"], "")]


class Histogram:
    """A histogram of values, or from counts and edges in the format of numpy.histogram."""

    def __init__(
        self, sequence: Any = None, np_histogram: Any = None, num_bins: int = BINS
    ) -> None:
        if np_histogram is not None:
            counts, edges = np_histogram[:2]
        else:
            if hasattr(sequence, "detach"):
                sequence = sequence.detach().float().cpu().numpy()
            values = np.asarray(sequence, np.float64).ravel()
            values = values[np.isfinite(values)]
            counts, edges = np.histogram(values, bins=max(1, min(num_bins, MOST_BINS)))
        self.histogram = np.asarray(counts).tolist()
        self.bins = np.asarray(edges).tolist()

    def to_loggable(self) -> Counts | list[dict[str, Any]]:
        """Return a loggable value; bins of unequal width become a table with one row per bin."""
        widths = np.diff(self.bins)
        is_drawn = 1 <= len(widths) <= MOST_BINS and 0 < widths[0] < np.inf
        if is_drawn and np.allclose(widths, widths[0], atol=0.0):
            return Counts(self.bins[0], self.bins[-1], self.histogram)
        edges = zip(self.bins, self.bins[1:], self.histogram, strict=False)
        return [{"from": low, "to": high, "count": count} for low, high, count in edges]


class Video:
    """A video: a file, frames (T, C, H, W), or a batch of them, of which the first is shown."""

    def __init__(
        self,
        data_or_path: Any,
        caption: str | None = None,
        fps: float | None = None,
        format: str | None = None,  # noqa: A002 - W&B's name for it
        **further: object,
    ) -> None:
        report_ignored("Video", further)
        self.caption, self._data, self._fps = caption, data_or_path, fps

    def to_loggable(self) -> logged_values.Video:
        """Return a loggable value."""
        data = self._data
        if getattr(data, "ndim", 0) == 5:
            data = data[0]
        return logged_values.Video(data, self._fps or 4.0)


class Audio:
    """An audio clip: an array of (samples,) or (samples, channels), or a WAV file."""

    def __init__(
        self,
        data_or_path: Any,
        sample_rate: int | None = None,
        caption: str | None = None,
        **further: object,
    ) -> None:
        report_ignored("Audio", further)
        self._value, self._rate, self.caption = data_or_path, sample_rate, caption

    def to_loggable(self) -> logged_values.Audio:
        """Return a loggable value. Raises ValueError, OSError and wave.Error."""
        if isinstance(self._value, str | Path):
            return _read_wave(Path(self._value))
        if not self._rate:
            raise ValueError("its sample_rate is missing")
        samples = np.asarray(self._value)
        if samples.dtype.kind == "f":
            return logged_values.Audio(samples / max(np.abs(samples).max(initial=0), 1), self._rate)
        return logged_values.Audio(samples / np.iinfo(samples.dtype).max, self._rate)


def _read_wave(path: Path) -> logged_values.Audio:
    with wave.open(str(path)) as file:
        if file.getsampwidth() != 2:
            raise ValueError(f"{path} has samples of {8 * file.getsampwidth()} bits; allowed: 16")
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
        return logged_values.Audio(samples.reshape(-1, file.getnchannels()), file.getframerate())


class Html:
    """A document: its text, the path of a file, or an open file."""

    def __init__(
        self,
        data: Any,
        inject: bool = True,
        data_is_not_path: bool = False,
        caption: str | None = None,
        **further: object,
    ) -> None:
        report_ignored("Html", further)
        self.caption = caption
        self._data = data.read() if hasattr(data, "read") else data
        self._is_text = data_is_not_path or hasattr(data, "read")

    def to_loggable(self) -> logged_values.Html:
        """Return a loggable value. Raises TypeError for an object, such as an animation."""
        if not isinstance(self._data, str | Path):
            kind = type(self._data).__name__
            raise TypeError(f"a document is of type {kind}; allowed: text, a path or a file")
        is_file = not self._is_text and len(str(self._data)) < MOST_PATH
        is_file = is_file and Path(self._data).is_file()
        return logged_values.Html(Path(self._data) if is_file else f"{self._data}\n")


class Plotly:
    """A figure of Plotly."""

    def __init__(self, val: Any) -> None:
        self._figure = val

    def to_loggable(self) -> Any:
        """Return the figure."""
        return self._figure


class Object3D:
    """A cloud of points: an array (N, 3), (N, 4) with categories, or (N, 6) with colors.

    Of a dictionary, as W&B has it for scenes, its "points" are shown.
    """

    def __init__(self, data_or_path: object, caption: str | None = None, **further: object) -> None:
        self._data, self._title = data_or_path, caption
        report_ignored("Object3D", further)

    @classmethod
    def from_numpy(cls, data: object) -> Self:
        """Return a cloud of points."""
        return cls(data)

    @classmethod
    def from_point_cloud(
        cls, points: object, boxes: object = (), vectors: object = None, point_cloud_type: str = ""
    ) -> Self:
        """Return a cloud of points."""
        return cls({"points": points, "boxes": boxes, "vectors": vectors})

    @classmethod
    def from_file(cls, data_or_path: object, file_type: str | None = None) -> Self:
        """Return an object that is not shown, with a message."""
        return cls(data_or_path)

    def to_loggable(self) -> figures.Plot:
        """Return a loggable value. Raises ValueError for a file, such as a mesh."""
        data = self._data
        if isinstance(data, str | Path) or hasattr(data, "read"):
            name = getattr(data, "name", data)
            more = "a mesh is shown as a figure of Plotly, and save() keeps the file"
            raise ValueError(f"{name} is a file; allowed: an array of points; {more}")
        if isinstance(data, dict):
            for name in ("boxes", "vectors"):
                if len(data.get(name) or ()):
                    say_once(f"Object3D: the {name} are not shown")
            data = data["points"]
        return figures.points(data, self._title or "")


def _cell(value: Any) -> Any:
    if isinstance(value, Image):
        return value.to_loggable()
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
