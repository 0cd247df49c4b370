"""Training in a terminal: `halfstep recipe train`, which prints instead of recording."""

import inspect
import json
import math
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

import torch
from msgspec import UNSET

from halfstep.cli.live import EXIT_CODES, LEARNED_NOTHING
from halfstep.config_groups import RecipeConfig
from halfstep.diagnosis.defect import Defect
from halfstep.diagnosis.statements import text_of
from halfstep.number_formats import duration, number
from halfstep.number_formats import scale as scale_text
from halfstep.number_formats import size as size_text
from halfstep.recipe import RecipeError
from halfstep.run_config import ConfigError, RunConfig, config_schema, parse_config
from halfstep.session.nesting import flat
from halfstep.telemetry import events
from halfstep.telemetry.event_codec import fields_of
from halfstep.telemetry.events import Checkpoint, Event, Metric, Retry
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.plain_json import ENCODER, JsonObject
from halfstep.telemetry.spool import Steps
from trainer.checkpoints.checkpoint import CheckpointError
from trainer.checkpoints.weight_files import WeightsError
from trainer.diagnosis.source_locations import first_line
from trainer.distributed.ranks import join
from trainer.loop import train
from trainer.precision.scale_policies import RuleError
from trainer.probe import place_of
from trainer.registered_recipes import NotRegisteredError
from trainer.registry import (
    MissingRequirementError,
    UnknownRecipeError,
    file_of,
    list_recipes,
    load_recipe,
)
from trainer.setup import prepare_run

#: Path prefixes of our own code, which is hidden from users' tracebacks.
OURS = tuple(f"{Path(inspect.getfile(source)).parent}/" for source in (ConfigError, train))


def train_recipe(
    name: str,
    settings: Sequence[str],
    *,
    precision: str | None,
    device: str | None,
    checkpoints: Path | None,
    resume: Path | None,
    as_json: bool,
) -> None:
    """Train one recipe and print what happens; raise SystemExit unless it learned something."""
    file = file_of(name)

    def leave(code: int, text: str, trace: str = "") -> NoReturn:
        line = ENCODER.encode({"error": text}) if as_json else f"{trace}error: {text}"
        sys.stderr.write(f"{line}\n")
        sys.exit(code)

    try:
        recipe = load_recipe(name)
    except (UnknownRecipeError, NotRegisteredError) as error:
        leave(2, str(error))
    except (Exception, SystemExit) as error:  # any error of its file
        leave(1, _error_line(file, error))
    summary = _Ends()
    try:
        values = parse_assignments(settings)
        if precision:
            values["precision"] = precision
        config = parse_config(recipe, values)
        if config.lab.task != "train":
            raise ConfigError(
                f"lab.task is {config.lab.task}, which only workers support; allowed: train. Use "
                "`halfstep recipe plan` for a plan, or `halfstep submit` for a run that measures"
            )
        chosen = chosen_device(device)
        if checkpoints is not None:
            _prepare(checkpoints, resume)
        printer = _Printer(config)
        tell_steps = _print_steps_json if as_json else printer.steps
        with join(chosen) as (ranks, own_device):
            outcome = train(
                prepare_run(
                    recipe,
                    config,
                    device=own_device,
                    on_steps=_both(summary.steps, tell_steps),
                    on_event=_both(summary.event, _print_json if as_json else printer.event),
                    checkpoint_folder=checkpoints,
                    resume=resume,
                    ranks=ranks,
                )
            )
    except (ConfigError, RecipeError, CheckpointError, WeightsError) as error:
        leave(2, str(error))
    except RuleError as error:
        leave(EXIT_CODES["failed"], str(error))
    except (Exception, SystemExit) as error:  # any error of the recipe
        source = Path(inspect.getfile(recipe)).resolve()
        leave(
            EXIT_CODES["failed"], _error_line(source, error), _format_own_frames(str(source), error)
        )
    ended_as = summary.outcome
    if as_json:
        _print_json(_Ended(status=outcome.status, step=outcome.step, outcome=ended_as))
    else:
        printer.flush()
        _print(f"{ended_as or outcome.status} after {outcome.step} steps{summary.why}")
    if ended_as:
        sys.exit(LEARNED_NOTHING)


def parse_assignments(assignments: Sequence[str]) -> dict[str, object]:
    """Turn ["training.steps=100"] into {"training": {"steps": 100}}; values are JSON or text."""
    values: JsonObject = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        *groups, field = path.split(".")
        if not equals or "" in (*groups, field):
            raise ConfigError(f'--set {assignment}: write it as FIELD=VALUE, "training.steps=100"')
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        target = values
        for group in groups:
            target = target.setdefault(group, {})
            if not isinstance(target, dict):
                raise ConfigError(f"--set {assignment}: {group} is already set to {target!r}")
        target[field] = value
    return values


def _error_line(file: Path | None, error: BaseException) -> str:
    """Return an error of a recipe's code on one line, like `recipe check`: file, line, error."""
    place = place_of(file, error)
    return f"{place}: {first_line(error)}" if place else first_line(error)


def _format_own_frames(file: str, error: BaseException) -> str:
    """Return a traceback that begins at the recipe's file, without our own frames."""
    summary = traceback.TracebackException.from_exception(error)
    cause: traceback.TracebackException | None = summary
    while cause is not None:
        names = [frame.filename for frame in cause.stack]
        first = names.index(file) if file in names else 0
        own = [frame for frame in cause.stack[first:] if _is_its(frame.filename, file)]
        cause.stack = traceback.StackSummary.from_list(own)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "".join(summary.format())


def _is_its(name: str, file: str) -> bool:
    return name == file or not name.startswith(OURS)


class _Ended(Event, frozen=True, kw_only=True, tag="ended"):
    """The last line of `halfstep recipe train --json`."""

    status: str  # of the training: "finished", "cancelled", …
    step: int  # the last one
    outcome: str | None  # "no_updates" or "diverged" if the training learned nothing


class _LastStep(Event, frozen=True, kw_only=True, tag="steps"):
    """The last of the steps that arrived on the host together."""

    step: int
    loss: float
    scale: float
    grad_norm: float
    lr: float
    step_us: float  # mean of all these steps


class _Ends:
    """Determines how a run ended, in the terms of a server (db.runs.outcomes)."""

    def __init__(self) -> None:
        self._last: float | None = None  # last loss; None: no step was recorded
        self._is_applied = False

    def steps(self, records: Steps) -> None:
        self._last = float(records[-1]["loss"])
        self._is_applied |= bool((records["flags"] & SKIPPED == 0).any())

    def event(self, event: Event) -> None:
        if isinstance(event, Retry):
            self._is_applied |= event.applied

    @property
    def outcome(self) -> Literal["no_updates", "diverged"] | None:
        if self._last is None:
            return None
        if not self._is_applied:
            return "no_updates"
        return None if math.isfinite(self._last) else "diverged"

    @property
    def why(self) -> str:
        reasons = {"no_updates": ": all were skipped", "diverged": f": the loss is {self._last}"}
        return reasons.get(self.outcome or "", "")


def _both(first: Callable[[Any], None], second: Callable[[Any], None]) -> Callable[[object], None]:
    def call_both(argument: object) -> None:
        first(argument)
        second(argument)

    return call_both


def chosen_device(name: str | None) -> torch.device:
    """Return an available device, by default a GPU if there is one. Raises ConfigError."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    there = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    allowed = ["cpu", *["cuda"] * bool(there), *there]
    if name not in allowed:
        raise ConfigError(f'--device is "{name}"; allowed here: {", ".join(allowed)}')
    return torch.device(name)


def _prepare(folder: Path, resume: Path | None) -> None:
    """Create and test the folder of checkpoints before hours of training.

    Raises CheckpointError if it contains files of another run, which would be overwritten.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.NamedTemporaryFile(dir=folder).close()
    except OSError as error:
        text = f"--checkpoints is {folder}; allowed: a writable folder"
        raise CheckpointError(f"{text} ({error.strerror})") from error
    is_own = resume is not None and resume.resolve().parent == folder.resolve()
    if not is_own and (files := sorted([*folder.glob("step-*"), *folder.glob("artifacts/step-*")])):
        raise CheckpointError(
            f"--checkpoints is {folder}, which holds {files[0].relative_to(folder)} of another "
            "run; allowed: another folder, or --resume with a checkpoint in it"
        )


class _Printer:
    """Prints a line whenever the ring is drained."""

    def __init__(self, config: RunConfig) -> None:
        self._steps = config.training.steps
        self._last_steps: dict[str, int] = {}  # the latest step of each metric
        # Metrics of every step: the latest one is printed with the line.
        self._held: dict[str, Metric] = {}
        self._line: tuple[int, str] | None = None  # a step's, after events of earlier steps

    def event(self, event: Event) -> None:
        if isinstance(event, Metric):
            name, step = event.name, event.step
            before, self._last_steps[name] = self._last_steps.get(name), step
            if before == step - 1:
                self._held[name] = event
                return
        if isinstance(event, events.LayerNorms):
            return  # not printed
        if self._line and getattr(event, "step", math.inf) >= self._line[0]:
            self._print_line()
        print_event(event)

    def _print_line(self) -> None:
        if self._line:
            _print(self._line[1])
            self._line = None

    def flush(self) -> None:
        """Print the pending line and metrics."""
        self._print_line()
        for event in self._held.values():
            print_event(event)
        self._held.clear()

    def steps(self, records: Steps) -> None:
        self.flush()
        last = records[-1]
        self._line = (
            int(last["step"]),
            f"step {last['step']:>6}/{self._steps}  loss {number(last['loss']):<10}"
            f" scale {scale_text(last['scale']):<10} grad norm {number(last['grad_norm']):<10}"
            f" lr {number(last['lr'])}  {duration(records['step_us'].mean() / 1e6)}/step",
        )


def _print_steps_json(records: Steps) -> None:
    """Print the last drained step as JSON; step_us: mean of all drained steps."""
    last = records[-1]
    values = {name: last[name].item() for name in ("step", "loss", "scale", "grad_norm", "lr")}
    _print_json(_LastStep(**values, step_us=records["step_us"].mean().item()))


def _print_json(event: Event) -> None:
    """Print an event as one JSON object; floats that JSON lacks become text: "NaN"."""
    _print(ENCODER.encode(fields_of(event)))


def print_event(event: Event) -> None:
    """Print an event on a line of its own."""
    match event:
        case events.Scaler(kind="skip", step=step, culprits=culprits):
            where = ", ".join(map(_culprit, culprits))
            _print(f"step {step:>6}  skipped: gradients not finite in {where}")
        case events.Scaler(kind=kind, step=step):
            before, after = scale_text(event.scale_before), scale_text(event.scale_after)
            _print(f"step {step:>6}  {kind}: {before} → {after}")
        case events.Replay(step=step, defect=Defect() as defect):
            _print(f"step {step:>6}  replayed: {text_of(defect)}")
        case events.Replay(step=step):
            _print(f"step {step:>6}  replayed: everything is finite {'; '.join(event.notes)}")
        case events.NonfiniteBuffers(step=step, buffers=names):
            _print(f"step {step:>6}  left an inf or NaN in {', '.join(names)}")
        case events.Shapes(layers=layers):
            _print(
                f"misses tensor cores, with sizes other than multiples of 8: {', '.join(layers)}"
            )
        case events.Retry(step=step, applied=applied, loss=loss):
            _print(
                f"step {step:>6}  {'retried' if applied else 'not finite'} in fp32: "
                f"loss {number(loss)}"
            )
        case events.Spike(step=step, loss=loss, z=z) if event.rolled_back_to is UNSET:
            _print(f"step {step:>6}  the loss rose to {number(loss)}, z {number(z)}")
        case events.RolledBack(step=step, from_step=now, examples=examples):
            _print(
                f"step {now:>6}  rolled back to step {step}, continuing without {examples} examples"
            )
        case events.Artifact(step=step, path=path, size_bytes=size):
            _print(f"step {step:>6}  saved {path} ({size} bytes)")
        case Metric(name="run/seconds", value=value):
            _print(f"Total execution time = {value:.3f} sec")  # the AMP recipe's own two lines
        case Metric(name="run/peak_memory_bytes", value=value):
            _print(f"Max memory used by tensors = {value:.0f} bytes")
        case Metric(name=name, value=value, step=step):
            _print(f"step {step:>6}  {name} {number(value)}")
        case Checkpoint(files=files, step=step):
            for file in files:
                _print(f"step {step:>6}  saved {file.path} ({size_text(file.size_bytes)})")
            if seconds := event.write_seconds:
                rate = size_text(sum(file.size_bytes for file in files) / seconds)
                _print(
                    f"step {step:>6}  written in {duration(seconds)}, {rate}/s; training paused "
                    f"for {duration(event.stall_seconds or 0.0)}"
                )
        case events.Weights(source=source, loaded=loaded, count=count):
            _print(f"started from {source}: {loaded} of {count} weights")
            lists = (event.missing, event.unexpected, event.mismatched)
            for title, names in zip(("missing", "unexpected", "mismatched"), lists, strict=True):
                if names:
                    _print(f"  {title}: {', '.join(names)}")
        case events.Resumed(step=step, notes=notes):
            _print(f"resumed after step {step}: {'; '.join(notes) or 'bit-exactly'}")


def fields_help(name: str | None) -> str:
    """Return all fields of a recipe, or those of every recipe; exit with a sentence on an error."""
    try:
        return _help_of(name) if name else _help_of_all()
    except (ConfigError, UnknownRecipeError, MissingRequirementError, RecipeError) as error:
        code, text = 2, str(error)
    except (Exception, SystemExit) as error:  # any error of its file
        code, text = 1, _error_line(file_of(name or ""), error)
    sys.stderr.write(f"error: {text}\n")
    sys.exit(code)


def _help_of(name: str) -> str:
    """Return all fields of a recipe with its defaults."""
    recipe = load_recipe(name)
    groups = config_schema(recipe)["properties"]
    text = f"recipe {recipe.name}: {recipe.description}\n"
    text += f"  precision = {json.dumps(groups['precision']['default'])}\n"
    return text + _groups_help({"recipe": groups["recipe"], **groups})


def _help_of_all() -> str:
    """Return every recipe with its fields and defaults, then the shared fields."""
    text, shared = "", config_schema(_AnyRecipe)["properties"]
    for name in list_recipes():
        try:
            recipe = load_recipe(name)
            groups = config_schema(recipe)["properties"]
        except MissingRequirementError as error:
            text += f"{error}\n\n"
            continue
        except (Exception, SystemExit) as error:  # any error of its file
            text += f"recipe {name} cannot be loaded: {_error_line(file_of(name), error)}\n\n"
            continue
        text += f"recipe {name}: {recipe.description}\n" + _group_help("recipe", groups["recipe"])
        own = ", ".join(_format_assignments(recipe.defaults)) or "none"
        text += textwrap.indent(f"own defaults: {own}\n\n", "  ")
    text += "fields of every recipe (defaults may differ, see above, or NAME --help):\n"
    return text + _groups_help({name: shared[name] for name in shared if name != "recipe"})


def _format_assignments(defaults: Mapping[str, object]) -> Iterator[str]:
    """Yield a recipe's overrides in the format of --set: training.max_grad_norm=null."""
    for path, value in flat(defaults).items():
        yield f"{path}={value if isinstance(value, str) else json.dumps(value)}"


def _groups_help(groups: Mapping[str, Any]) -> str:
    return "".join(_group_help(n, group) for n, group in groups.items() if "properties" in group)


class _AnyRecipe:
    """A recipe without fields and defaults of its own."""

    name: ClassVar = "any"
    Config: ClassVar = RecipeConfig
    defaults: ClassVar[JsonObject] = {}


def _group_help(prefix: str, group: dict[str, Any]) -> str:
    text = ""
    for name, field in group["properties"].items():
        text += f"  {prefix}.{name} = {json.dumps(field.get('default'))}\n"
        if words := field.get("description"):
            text += textwrap.indent(textwrap.fill(words, 72), " " * 6) + "\n"
    return text


def _culprit(culprit: events.Culprit) -> str:
    is_counted = culprit.inf is not UNSET
    return culprit.name + (f" ({culprit.inf} inf, {culprit.nan} NaN)" if is_counted else "")


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
