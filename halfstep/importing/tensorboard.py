"""Runs as TensorBoard has them: each folder with event files is one.

Read with the package `tensorboard` (the extra `tensorboard`), without TensorFlow.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2
from tensorboard.compat.tensorflow_stub import errors
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.util import tensor_util

from halfstep.importing.source import Damaged, Found, Media, Point

PATTERN = "*tfevents*"
HPARAMS = "_hparams_/session_start_info"
SEARCHED = 100  # events at a file's beginning among which hyperparameters stand


def runs(path: Path) -> Iterator[Found | Damaged]:
    """Yield the runs at or below a folder, or that of one event file."""
    files = [path] if path.is_file() else sorted(path.rglob(PATTERN))
    by_folder: dict[Path, list[Path]] = {}
    for file in files:
        by_folder.setdefault(file.parent, []).append(file)
    for folder, own in by_folder.items():
        yield _found(folder, sorted(own, key=lambda file: file.name), path)


def _found(folder: Path, files: list[Path], root: Path) -> Found:
    left_out: Counter[str] = Counter()
    started, config = _beginning(files[0])
    below = folder.relative_to(root).as_posix() if root.is_dir() else "."
    return Found(
        # The name of an event file has time, host and process in it, and stays if it is moved.
        identity=f"tensorboard:{folder.name}/{files[0].name}",
        fingerprint=" ".join(f"{file.name}:{file.stat().st_size}" for file in files),
        name=below if below != "." else folder.resolve().name,
        config=config,
        started=started,
        points=lambda: _points(files, left_out),
        left_out=left_out,
    )


def _points(files: list[Path], left_out: "Counter[str]") -> Iterator[Point | Media]:
    left_out.clear()
    plugins: dict[str, str] = {}  # by tag: only its first value says
    for file in files:
        for event in _events(file):
            for value in event.summary.value:
                plugin = plugins.setdefault(value.tag, value.metadata.plugin_data.plugin_name)
                number, media = _number(value, plugin), _media(value, plugin)
                if number is not None:
                    yield Point(value.tag, event.step, event.wall_time, number)
                for content in media:
                    yield Media(value.tag, event.step, event.wall_time, content)
                if number is None and not media and plugin != "hparams":
                    left_out[plugin or str(value.WhichOneof("value"))] += 1


def _number(value: Any, plugin: str) -> float | None:
    """Return a scalar, as TensorFlow 1 or 2 and PyTorch write it."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if plugin == "scalars" and value.HasField("tensor"):
        return float(tensor_util.make_ndarray(value.tensor).item())
    return None


def _media(value: Any, plugin: str) -> list[bytes]:
    """Return pictures and sounds, as PyTorch and TensorFlow 1 or 2 write them."""
    if value.HasField("image"):
        return [value.image.encoded_image_string]
    if value.HasField("audio"):
        return [value.audio.encoded_audio_string]
    if plugin == "images" and value.HasField("tensor"):
        return list(value.tensor.string_val[2:])  # after width and height
    if plugin == "audio" and value.HasField("tensor"):
        return list(value.tensor.string_val[::2])  # each with its label
    return []


def _beginning(file: Path) -> tuple[float | None, dict[str, Any]]:
    """Return when a file was begun, and the hyperparameters that it begins with, if any."""
    started = None
    try:
        for event, _ in zip(_events(file), range(SEARCHED), strict=False):
            started = event.wall_time if started is None else started
            for value in event.summary.value:
                if value.tag == HPARAMS:
                    content = value.metadata.plugin_data.content
                    told = plugin_data_pb2.HParamsPluginData.FromString(content)
                    hparams = told.session_start_info.hparams
                    return started, {name: _plain(each) for name, each in hparams.items()}
    except Damaged:  # told by the pass over its points
        return started, {}
    return started, {}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("kind")
    return getattr(value, kind) if kind in ("number_value", "string_value", "bool_value") else None


def _events(file: Path) -> Iterator[Any]:
    """Yield what a file holds; one that breaks off in the midst of an event, killed, just ends."""
    reader = PyRecordReader_New(str(file))
    while True:
        try:
            reader.GetNext()
            event = event_pb2.Event.FromString(reader.record())
        except errors.OutOfRangeError:
            return
        except errors.DataLossError as error:
            if "truncated" in error.message:
                return
            raise Damaged(f"{file} is damaged: {error.message}") from error
        except Exception as error:  # protobuf's own, whatever its implementation calls it
            raise Damaged(f"{file} is damaged: {error}") from error
        yield event
