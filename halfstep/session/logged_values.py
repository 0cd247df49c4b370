"""Conversion of logged values: numbers become metrics, all others files."""

import csv
import io
import json
import numbers
import struct
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep import figures
from halfstep.figures import Plot
from halfstep.number_formats import size as size_text
from halfstep.session.images import picture, pixels, png
from halfstep.telemetry.run_folder import slug

MOST_BYTES = 32 * 2**20  # per file
MOST_BINS = 512
MOST_IMAGES = 200  # in one table
VIDEOS = ("mp4", "webm", "ogg", "gif")
NO_NUMBERS = set("USMmc")  # kinds of numpy's dtypes


@dataclass(frozen=True)
class Histogram:
    """Histogram of values: numbers of any shape, of which nonfinite ones are left out."""

    values: Any
    bins: int = 64


@dataclass(frozen=True)
class Counts:
    """Histogram that is already counted, in bins of equal width."""

    lowest: float
    highest: float
    counts: list[float]


@dataclass(frozen=True)
class Audio:
    """Audio clip."""

    samples: Any  # in −1 … 1, shape (T,) or (T, channels)
    rate: int  # samples per second


@dataclass(frozen=True)
class Video:
    """Video: the path of a file (mp4, webm, ogg or gif), or frames.

    frames: uint8 of shape (T, C, H, W) or (T, H, W, C); they become a GIF, which needs Pillow.
    """

    data: Any
    frames_per_second: float = 4.0


@dataclass(frozen=True)
class Html:
    """A document, shown without scripts: its text, or the path of a file."""

    data: str | Path


def is_number(value: object) -> bool:
    """Return True if a value is one number, on the host or a device.

    Tensors and arrays of one element count, whatever their shape, but not numpy's texts, dates and
    complex numbers.
    """
    if getattr(getattr(value, "dtype", None), "kind", "") in NO_NUMBERS:
        return False
    if isinstance(value, numbers.Real | Decimal):
        return True
    if not hasattr(value, "item"):
        return False
    shape = getattr(value, "shape", None) if hasattr(value, "reshape") else None
    is_one = isinstance(shape, tuple) and all(size == 1 for size in shape)
    return is_one or getattr(value, "ndim", None) == 0


def as_scalar(value: Any) -> Any:
    """Reshape a tensor or array of one element to 0 dimensions, on its device."""
    return value.reshape(()) if getattr(value, "ndim", 0) else value


def files_of(name: str, value: Any) -> list[tuple[str, bytes]]:
    """Return the names and bytes of a value's files; raises as `as_file` does.

    Images in the cells of a table are files of their own, which the cells name.
    """
    value = _unwrap(value)
    stem = slug(name)[:80]
    files: list[tuple[str, bytes]] = []
    if _is_table(value) and any(_is_image(cell) for row in value for cell in row.values()):
        table = [dict(row) for row in value]
        columns = list(dict.fromkeys(column for row in table for column in row))
        for number, row in enumerate(table, 1):
            for column, cell in row.items():
                if not _is_image(cell):
                    continue
                if len(files) == MOST_IMAGES:
                    raise ValueError(f"it has more than {MOST_IMAGES} images; allowed: fewer")
                row[column] = f"{stem}.cell-{number}-{columns.index(column) + 1}.png"
                files.append((row[column], as_file(cell)[1]))
        value = table
    suffix, content = as_file(value)
    return [*files, (f"{stem}.{suffix}", content)]


def _unwrap(value: Any) -> object:
    """Return the content of an `Image`, `Table` or `Histogram` of halfstep.wandb_compat."""
    if _is_table(value):
        return [{name: _unwrap(cell) for name, cell in row.items()} for row in value]
    convert = getattr(value, "to_loggable", None)
    return convert() if callable(convert) else value


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _is_image(cell: object) -> bool:
    """Return whether a cell holds pixels: a Pillow image, a figure, or an array or tensor."""
    is_object = hasattr(cell, "savefig") or (hasattr(cell, "save") and hasattr(cell, "mode"))
    return is_object or getattr(cell, "ndim", 0) in (2, 3, 4)


def as_file(value: object) -> tuple[str, bytes]:
    """Convert a value to a file; return its suffix and bytes.

    Allowed are: text; an image, as a Pillow image, a matplotlib figure, or an array or tensor of
    (H, W), (H, W, 1, 3 or 4) or (1, 3 or 4, H, W), or a batch of these, in uint8, uint16, bool, or
    numbers in 0 … 1, −1 … 1 or 0 … 255; a table, as a list of dictionaries or an object with
    `to_csv`; a Histogram; a Plot or a figure of Plotly; Audio, Video or Html. A tensor on a device
    is waited for. Raises TypeError for other values, OSError for a file that cannot be read, and
    ValueError for one that is too large or pixels in none of these ranges.
    """
    suffix, content = _as_file(value)
    if len(content) > MOST_BYTES:
        largest = f"{MOST_BYTES // 2**20} MiB"
        raise ValueError(f"it is {size_text(len(content))} as .{suffix}; allowed: {largest}")
    return suffix, content


def _as_file(value: Any) -> tuple[str, bytes]:
    if isinstance(value, str):
        return "txt", _encode(value)
    if isinstance(value, Histogram):
        return "histogram.json", _histogram(value)
    if isinstance(value, Counts):
        return "histogram.json", json.dumps(asdict(value) | {"nonfinite": 0}).encode()
    if isinstance(value, Plot):
        return "plot.json", value.encode()
    if isinstance(value, Audio):
        return "wav", _wav(value)
    if isinstance(value, Video):
        return _video(value)
    if isinstance(value, Html):
        is_path = isinstance(value.data, Path) or value.data.endswith((".html", ".htm"))
        return "html", Path(value.data).read_bytes() if is_path else _encode(str(value.data))
    if hasattr(value, "to_plotly_json"):
        return "plot.json", figures.of_plotly(value).encode()
    if _is_table(value):
        return "csv", _csv(value)
    if hasattr(value, "to_csv"):  # pandas
        return "csv", _encode(str(value.to_csv(index=False)))
    if (figure := figure_of(value)) is not None:
        return "png", _save(figure.savefig)
    if hasattr(value, "save") and hasattr(value, "mode"):  # Pillow
        return "png", _save(picture(value).save)
    if hasattr(value, "detach"):  # torch
        if value.ndim in (2, 3, 4):
            is_float = value.is_floating_point()
            return "png", png(pixels(_host(value.float() if is_float else value)))
    elif isinstance(value, np.ndarray) and value.ndim in (2, 3, 4):
        return "png", png(pixels(value))
    allowed = (
        "a number, a text, a picture, a figure, an array or tensor of pixels, a list of "
        "dictionaries, a Histogram, a Plot, Audio, Video or Html"
    )
    raise TypeError(f"{_kind(value)} cannot be logged; allowed: {allowed}")


def figure_of(value: object) -> Any:
    """Return matplotlib's figure for a figure, for axes or for `pyplot`; None for other values."""
    if hasattr(value, "gcf"):  # pyplot
        return value.gcf()
    if hasattr(value, "savefig"):
        return value
    return value.get_figure() if hasattr(value, "get_figure") else None


def _kind(value: Any) -> str:
    if hasattr(value, "detach"):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    return f"a value of type {type(value).__name__}"


def _encode(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _host(tensor: Any) -> NDArray[np.generic]:
    array: NDArray[np.generic] = tensor.detach().cpu().numpy()
    return array


def _save(save: Any) -> bytes:
    file = io.BytesIO()
    save(file, format="PNG")
    return file.getvalue()


def _histogram(histogram: Histogram) -> bytes:
    values = histogram.values
    values = _host(values.float()) if hasattr(values, "detach") else np.asarray(values, np.float64)
    if not 1 <= histogram.bins <= MOST_BINS:
        raise ValueError(f"bins is {histogram.bins}; allowed: 1 to {MOST_BINS}")
    finite = values[np.isfinite(values)]
    counts, edges = np.histogram(finite, histogram.bins)
    content = {"lowest": float(edges[0]), "highest": float(edges[-1]), "counts": counts.tolist()}
    return json.dumps(content | {"nonfinite": int(values.size - finite.size)}).encode()


def _video(video: Video) -> tuple[str, bytes]:
    if isinstance(video.data, str | Path):
        suffix = Path(video.data).suffix.lower().removeprefix(".")
        if suffix not in VIDEOS:
            raise ValueError(f"a video is a file .{suffix}; allowed: {', '.join(VIDEOS)}")
        return suffix, Path(video.data).read_bytes()
    frames = _host(video.data) if hasattr(video.data, "detach") else np.asarray(video.data)
    if frames.ndim != 4 or frames.dtype != np.uint8:
        given = f"{frames.shape} in {frames.dtype}"
        raise ValueError(f"a video has frames {given}; allowed: (T, C, H, W) in uint8")
    if frames.shape[1] in (1, 3) and frames.shape[3] not in (1, 3):
        frames = np.moveaxis(frames, 1, -1)
    try:
        import PIL.Image
    except ImportError as error:
        raise ValueError("frames of a video need Pillow: pip install pillow") from error
    images = [PIL.Image.fromarray(frame.squeeze()) for frame in frames]
    file = io.BytesIO()
    milliseconds = 1000 / max(video.frames_per_second, 0.1)
    more = {"save_all": True, "append_images": images[1:], "loop": 0}
    images[0].save(file, format="GIF", duration=milliseconds, **more)
    return "gif", file.getvalue()


def _wav(audio: Audio) -> bytes:
    """Encode audio as a WAV file with 16 bits per sample."""
    samples = audio.samples
    samples = _host(samples.float()) if hasattr(samples, "detach") else np.asarray(samples)
    if samples.ndim not in (1, 2) or not 1 <= audio.rate <= 384_000:
        raise ValueError(
            f"audio has shape {samples.shape} and rate {audio.rate}; "
            "allowed: (T,) or (T, channels), and 1 to 384,000"
        )
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    data = np.rint(np.clip(np.nan_to_num(samples), -1, 1) * 32767).astype("<i2").tobytes()
    frame = channels * 2  # bytes
    form = struct.pack("<HHIIHH", 1, channels, audio.rate, audio.rate * frame, frame, 16)
    chunks = b"WAVE" + _chunk(b"fmt ", form) + _chunk(b"data", data)
    return _chunk(b"RIFF", chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack("<I", len(content)) + content


def _csv(rows: list[dict[str, object]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows(rows)
    return _encode(text.getvalue())
