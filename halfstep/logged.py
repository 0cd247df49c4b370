"""What a person logs, by its kind: numbers become metrics, all else files to be looked at."""

import csv
import io
import json
import numbers
import struct
import zlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.run_folder import slug

MOST_BYTES = 32 * 2**20  # of one file
MOST_BINS = 512


@dataclass(frozen=True)
class Histogram:
    """Counts of values by size. values: numbers of any shape; those not finite are left out."""

    values: Any
    bins: int = 64


@dataclass(frozen=True)
class Counts:
    """A histogram that somebody has counted already, in bins of one width."""

    lowest: float
    highest: float
    counts: list[float]


@dataclass(frozen=True)
class Audio:
    """A sound. samples: in −1 … 1, of shape (T,) or (T, channels); rate: samples a second."""

    samples: Any
    rate: int


def is_number(value: Any) -> bool:
    """Tell whether a value is one number, wherever it lies: on the host, or on a device.

    A tensor or an array of one number is that, whatever its shape.
    """
    if isinstance(value, numbers.Real):
        return True
    if not hasattr(value, "item"):
        return False
    shape = getattr(value, "shape", None) if hasattr(value, "reshape") else None
    is_one = isinstance(shape, tuple) and all(size == 1 for size in shape)
    return is_one or getattr(value, "ndim", None) == 0


def as_scalar(value: Any) -> Any:
    """Return one number without dimensions, where it lies."""
    return value.reshape(()) if getattr(value, "ndim", 0) else value


def file_of(name: str, value: Any) -> tuple[str, bytes]:
    """Return the name and bytes of the file that shows a value; raises as `as_file` does."""
    suffix, content = as_file(value)
    return f"{slug(name)[:80]}.{suffix}", content


def as_file(value: Any) -> tuple[str, bytes]:
    """Return the suffix and bytes of what shows this value.

    A text; an image, as a picture of Pillow, a figure of matplotlib, or an array or tensor of
    (H, W), (H, W, 3 or 4) or (3 or 4, H, W), uint8 or floats in 0 … 1; a table, as a list of
    dictionaries or something with `to_csv`; a Histogram; Audio. A tensor on a device is waited
    for. Raises TypeError for others, and ValueError for what is too large.
    """
    suffix, content = _as_file(value)
    if len(content) > MOST_BYTES:
        largest = f"{MOST_BYTES // 2**20} MiB"
        raise ValueError(f"it is {len(content) / 2**20:.1f} MiB as .{suffix}; allowed: {largest}")
    return suffix, content


def _as_file(value: Any) -> tuple[str, bytes]:
    if isinstance(value, str):
        return "txt", _encoded(value)
    if isinstance(value, Histogram):
        return "histogram.json", _histogram(value)
    if isinstance(value, Counts):
        return "histogram.json", json.dumps(asdict(value) | {"nonfinite": 0}).encode()
    if isinstance(value, Audio):
        return "wav", _wav(value)
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        return "csv", _csv(value)
    if hasattr(value, "to_csv"):  # pandas
        return "csv", _encoded(str(value.to_csv(index=False)))
    if hasattr(value, "savefig"):  # matplotlib
        return "png", _saved(value.savefig)
    if hasattr(value, "save") and hasattr(value, "mode"):  # Pillow
        return "png", _saved(value.save)
    if hasattr(value, "detach"):  # torch
        if value.ndim in (2, 3):
            is_float = value.is_floating_point()
            return "png", _png(_pixels(_host(value.float() if is_float else value)))
    elif isinstance(value, np.ndarray) and value.ndim in (2, 3):
        return "png", _png(_pixels(value))
    allowed = (
        "a number, a text, a picture, a figure, an array or tensor of pixels, a list of "
        "dictionaries, a Histogram or Audio"
    )
    raise TypeError(f"{_kind(value)} cannot be logged; allowed: {allowed}")


def _kind(value: Any) -> str:
    if hasattr(value, "detach"):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    return f"a value of type {type(value).__name__}"


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _host(tensor: Any) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array


def _saved(save: Any) -> bytes:
    file = io.BytesIO()
    save(file, format="PNG")
    return file.getvalue()


def _pixels(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return pixels of 8 bits, channels last, of those or of floats in 0 … 1."""
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        array = np.moveaxis(array, 0, 2)  # as torch has them
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    if np.issubdtype(array.dtype, np.floating):
        finite = np.nan_to_num(array.astype(np.float32), nan=0.0, posinf=1.0, neginf=0.0)
        return np.rint(np.clip(finite, 0, 1) * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise TypeError(f"an image is of {array.dtype}; allowed: uint8, bool, or floats in 0 … 1")
    return array


def _histogram(histogram: Histogram) -> bytes:
    values = histogram.values
    values = _host(values.float()) if hasattr(values, "detach") else np.asarray(values, np.float64)
    if not 1 <= histogram.bins <= MOST_BINS:
        raise ValueError(f"bins is {histogram.bins}; allowed: 1 to {MOST_BINS}")
    finite = values[np.isfinite(values)]
    counts, edges = np.histogram(finite, histogram.bins)
    told = {"lowest": float(edges[0]), "highest": float(edges[-1]), "counts": counts.tolist()}
    return json.dumps(told | {"nonfinite": int(values.size - finite.size)}).encode()


def _wav(audio: Audio) -> bytes:
    """Return a sound of 16 bits a sample, as RIFF has it."""
    samples = audio.samples
    samples = _host(samples.float()) if hasattr(samples, "detach") else np.asarray(samples)
    if samples.ndim not in (1, 2) or not 1 <= audio.rate <= 384_000:
        raise ValueError(
            f"a sound has shape {samples.shape} and rate {audio.rate}; "
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


def _csv(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows(rows)
    return _encoded(text.getvalue())


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """Return an image of 8 bits a channel: (H, W), (H, W, 3) or (H, W, 4)."""
    colours = {(2, 1): 0, (3, 1): 0, (3, 3): 2, (3, 4): 6}
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    if (pixels.ndim, channels) not in colours:
        raise TypeError(f"an image has shape {pixels.shape}; allowed: (H, W), (H, W, 3), (H, W, 4)")
    height, width = pixels.shape[:2]
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # each begins with its filter: none
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, colours[pixels.ndim, channels], 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
