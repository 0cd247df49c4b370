"""`init(sync_tensorboard=True)`: what TensorBoard's writers write is logged to the run, too.

Both writers of event files, TensorBoard's (of `torch.utils.tensorboard`, Lightning and others) and
tensorboardX's, write each event by one method, which is wrapped. TensorFlow's writers do not use
it: their event files are imported afterwards.
"""

import io
import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.wandb_compat.media import Histogram
from halfstep.wandb_compat.unsupported import report_exceptions, say_once

if TYPE_CHECKING:
    from halfstep.wandb_compat.run import Run

#: Modules of the class EventFileWriter.
WRITERS = ("tensorboard.summary.writer.event_file_writer", "tensorboardX.event_file_writer")
_run: "Run | None" = None
_root = ""  # folder of the run's first writer


def record(run: "Run") -> None:
    """Log to a run what is written from now on."""
    global _run, _root
    _run, _root, is_any = run, "", False
    for name in WRITERS:
        try:
            writer = import_module(name).EventFileWriter
        except ImportError:
            continue
        is_any = True
        if not hasattr(writer.add_event, "__wrapped__"):
            writer.add_event = _record(writer.add_event)
    if "tensorflow" in sys.modules:
        imported = "`halfstep import tensorboard FOLDER` imports it"
        say_once(f"init(sync_tensorboard=True): what tf.summary writes is not logged; {imported}")
    if not is_any:
        say_once(
            "init(sync_tensorboard=True) is ignored: tensorboard and tensorboardX are not installed"
        )


def _record(add_event: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(add_event)
    def wrapper(writer: Any, event: Any, *arguments: Any, **named: Any) -> Any:
        if _run is not None and not _run.is_finished:
            _log(_run, event, _prefix(str(writer.get_logdir())))
        return add_event(writer, event, *arguments, **named)

    return wrapper


def _prefix(folder: str) -> str:
    """Return what the names of a writer's values begin with: nothing for those of the first.

    `add_scalars` has a writer for each of its names, in a folder below.
    """
    global _root
    _root = _root or folder
    if folder == _root:
        return ""
    below = os.path.relpath(folder, _root)
    return (Path(folder).name if below.startswith("..") else below) + "/"


@report_exceptions
def _log(run: "Run", event: Any, prefix: str) -> None:
    values: dict[str, Any] = {}
    for value in event.summary.value:
        plugin = value.metadata.plugin_data.plugin_name
        name = prefix + value.tag.removesuffix("/text_summary")
        if value.HasField("simple_value"):
            values[name] = value.simple_value
        elif value.HasField("image"):
            values[name] = _image(value.image.encoded_image_string)
        elif value.HasField("histo"):
            edges = [value.histo.min, *value.histo.bucket_limit]
            values[name] = Histogram(np_histogram=(value.histo.bucket, edges))
        elif plugin == "text":
            values[name] = value.tensor.string_val[0].decode(errors="replace")
        elif plugin == "scalars":
            values[name] = value.tensor.float_val[0]
        elif plugin != "hparams":
            say_once(f"{name} is not logged: its kind is {plugin or value.WhichOneof('value')}")
    if values:
        run.log_at(values, event.step)


def _image(content: bytes) -> Any:
    import PIL.Image

    return PIL.Image.open(io.BytesIO(content))
