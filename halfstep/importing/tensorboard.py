"""Import from TensorBoard: each folder with event files is one run.

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

from halfstep.importing.source import Damaged, Media, Point, SourceRun

PATTERN = "*tfevents*"
HPARAMS = "_hparams_/session_start_info"
SEARCHED = 100  # first events of a file, searched for hyperparameters


def runs(path: Path) -> Iterator[SourceRun | Damaged]:
    """Yield the runs at or below a folder, or that of one event file."""
    files = [path] if path.is_file() else sorted(path.rglob(PATTERN))
    by_folder: dict[Path, list[Path]] = {}
    for file in files:
        by_folder.setdefault(file.parent, []).append(file)
    for folder, own in by_folder.items():
        yield _source_run(folder, sorted(own, key=lambda file: file.name), path)


def _source_run(folder: Path, files: list[Path], root: Path) -> SourceRun:
    left_out: Counter[str] = Counter()
    started, config = _beginning(files[0])
    below = folder.relative_to(root).as_posix() if root.is_dir() else "."
    return SourceRun(
        # An event file's name contains time, host and process, and survives a move.
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
    plugins: dict[str, str] = {}  # by tag: only its first value has metadata
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
    """Return a scalar in the encoding of TensorFlow 1, TensorFlow 2 or PyTorch."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if plugin == "scalars" and value.HasField("tensor"):
        return float(tensor_util.make_ndarray(value.tensor).item())
    return None


def _media(value: Any, plugin: str) -> list[bytes]:
    """Return images and audio in the encoding of PyTorch, TensorFlow 1 or 2."""
    if value.HasField("image"):
        return [value.image.encoded_image_string]
    if value.HasField("audio"):
        return [value.audio.encoded_audio_string]
    if plugin == "images" and value.HasField("tensor"):
        return list(value.tensor.string_val[2:])  # after width and height
    if plugin == "audio" and value.HasField("tensor"):
        return list(value.tensor.string_val[::2])  # each followed by its label
    return []


def _beginning(file: Path) -> tuple[float | None, dict[str, Any]]:
    """Return the start time of an event file and its hyperparameters."""
    started = None
    try:
        for event, _ in zip(_events(file), range(SEARCHED), strict=False):
            started = event.wall_time if started is None else started
            for value in event.summary.value:
                if value.tag == HPARAMS:
                    content = value.metadata.plugin_data.content
                    hparams_data = plugin_data_pb2.HParamsPluginData.FromString(content)
                    hparams = hparams_data.session_start_info.hparams
                    return started, {name: _plain(hparam) for name, hparam in hparams.items()}
    except Damaged:  # reported by the pass over its points
        return started, {}
    return started, {}


def _plain(value: Any) -> object:
    kind = value.WhichOneof("kind")
    return getattr(value, kind) if kind in ("number_value", "string_value", "bool_value") else None


def _events(file: Path) -> Iterator[Any]:
    """Yield the events of a file; a truncated last event, left by a killed process, ends it."""
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
        except Exception as error:  # protobuf's, of a class that varies
            raise Damaged(f"{file} is damaged: {error}") from error
        yield event
