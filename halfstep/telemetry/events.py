"""Schema of spool events: a table of each event's fields, used by the writer and the reader.

It excludes values that the database or a page cannot hold: a number beyond a column's range, a
text that PostgreSQL rejects, a file outside the run's folder. Fields that are not in the table
are accepted if they are plain JSON.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

#: Largest integer that a float, and thus JavaScript, represents exactly.
LARGEST_WHOLE = 2**53
LARGEST_ID = 2**31 - 1  # of a database row
LARGEST_FLAGS = 2**31 - 1
LARGEST_SECONDS = 10**9
LARGEST_FLOAT = 1.7976931348623157e308
#: Name of a metric or optimizer: PostgreSQL indexes at most 2,704 bytes, 4 per character.
NAME_CHARACTERS = 200
MOST_WORDS, PATH_CHARACTERS = 1000, 4096  # arguments of a command; one argument or folder
TEXT_CHARACTERS = 100_000  # of a note, which may quote two texts of a configuration
DEPTH = 20  # nested lists and objects
EXPONENTS = (-1100, 1100)  # includes those of every float format
BINS = 4096
#: Configuration of a script as JSON: a page shows all of it.
CONFIG_CHARACTERS = 100_000
#: One event is one database row, which a page reads whole.
EVENT_BYTES = 16 * 2**20

#: Their representation in JSON, see halfstep.telemetry.spool.
NONFINITE = ("NaN", "Infinity", "-Infinity")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.[A-Za-z0-9]{1,16}")
FILE_KIND = re.compile(r"checkpoint|shard\.[a-z0-9]{1,20}|(weights|ema)(\.[^.\0]{1,100})?")
FILE_KINDS = "checkpoint, shard.<rank>, weights, weights.<module>, ema or ema.<module>"
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Plain:
    """Rule for a single value."""

    allowed: str  # description of the allowed values, for messages
    holds: Callable[[Any], bool]
    is_needed: bool = True


@dataclass(frozen=True)
class Listed:
    """Rule for a list of values, or of objects with these fields."""

    each: "Rule"
    is_needed: bool = True


Rule: TypeAlias = "Plain | Listed | Mapping[str, Rule]"


def problem_of(event: Any) -> str | None:
    """Return why an event cannot be recorded, with field and value; None if it can."""
    if not isinstance(event, dict):
        return f"an event is {shown(event)}; allowed: an object"
    kind = event.get("event")
    if not isinstance(kind, str) or kind not in EVENTS:
        return f"event is {shown(kind)}; allowed: {', '.join(EVENTS)}"
    fields = {name: value for name, value in event.items() if name != "event"}
    wrong = _problem(fields, EVENTS[kind], "") or _wrong_folder(event)
    return wrong and f"{_called(event)}: {wrong}"


def problem_of_steps(steps: NDArray[np.void]) -> str | None:
    """Return why records of STEP_DTYPE cannot be recorded; None if they can."""
    for name, low, high in (
        ("step", 1, LARGEST_WHOLE),
        ("elapsed_ms", -LARGEST_WHOLE, LARGEST_WHOLE),
        ("flags", 0, LARGEST_FLAGS),
    ):
        values = steps[name]
        wrong = (values < low) | (values > high)
        if wrong.any():
            value = int(values[wrong][0])
            return f"steps: {name} is {value}; allowed: {_whole(low, high).allowed}"
    return None


def shown(value: Any) -> str:
    """Return the repr of a value for a message, at most 200 characters; does not raise."""
    try:
        text = repr(value)
    except Exception:  # an int of too many digits, a list too deep, a user's class
        text = f"of type {type(value).__name__}"
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= 200 else f"{text[:200]}…"


def cleaned(text: str) -> str:
    """Escape NUL and lone surrogates, which databases or UTF-8 cannot store."""
    text = text if text.isascii() else text.encode(errors="backslashreplace").decode()
    return text.replace("\0", "\\x00")


def _problem(value: Any, rule: Rule, path: str) -> str | None:
    if isinstance(rule, Plain):
        return None if rule.holds(value) else f"{path} is {shown(value)}; allowed: {rule.allowed}"
    if isinstance(rule, Listed):
        if not isinstance(value, list | tuple):
            return f"{path} is {shown(value)}; allowed: a list"
        for i, each in enumerate(value):
            if not _holds(rule.each, each) and (wrong := _problem(each, rule.each, f"{path}.{i}")):
                return wrong
        return None
    if not isinstance(value, dict):
        return f"{path} is {shown(value)}; allowed: an object"
    prefix = f"{path}." if path else ""
    for name, inner in rule.items():
        if name not in value:
            if isinstance(inner, Mapping) or inner.is_needed:
                return f"{prefix}{name} is missing"
            continue
        each = value[name]
        if not _holds(inner, each) and (wrong := _problem(each, inner, f"{prefix}{name}")):
            return wrong
    further = {name: value[name] for name in value.keys() - rule.keys()}
    return _unplain(further) if further else None


def _holds(rule: Rule, value: Any) -> bool:
    """Return whether a plain value is valid: a fast path, because nearly all values are."""
    return isinstance(rule, Plain) and rule.holds(value)


def _first(problems: Iterable[str | None]) -> str | None:
    return next(filter(None, problems), None)


def _called(event: dict[str, Any]) -> str:
    name, step = event.get("name"), event.get("step")
    words = [event["event"], shown(name) if name is not None else ""]
    return " ".join(filter(None, words)) + (f" at step {shown(step)}" if step is not None else "")


def _wrong_folder(event: dict[str, Any]) -> str | None:
    """Return a message for a file outside its folder; None if there is none."""
    if event["event"] == "artifact":
        root, paths = "artifacts", [event["path"]]
    elif event["event"] == "log_part":
        root, paths = "log", [event["path"]]
    else:
        root, paths = "checkpoints", [file["path"] for file in event.get("files", ())]
    for path in paths:
        folder, *parts = path.split("/")
        if folder != root or not parts or any(part in ("", ".", "..") for part in parts):
            return f"path is {shown(path)}; allowed: a file in the run's folder {root}"
    return None


def _unplain(value: Any, path: str = "", depth: int = 0) -> str | None:
    """Return where a value is not JSON that every database and browser can represent; else None."""
    if depth > DEPTH:
        return f"{path} is nested; allowed: at most {DEPTH} lists or objects within each other"
    if isinstance(value, dict):
        if unclean := [name for name in value if not (isinstance(name, str) and _is_clean(name))]:
            return f"a field is named {shown(unclean[0])}; allowed: {CLEAN}"
        below = f"{path}." if path else ""
        return _first(_unplain(each, f"{below}{name}", depth + 1) for name, each in value.items())
    if isinstance(value, list | tuple):
        return _first(_unplain(each, path, depth + 1) for each in value)
    if isinstance(value, str):
        return None if _is_clean(value) else f"{path} is {shown(value)}; allowed: {CLEAN}"
    is_plain = value is None or isinstance(value, float | bool) or WHOLE.holds(value)
    return None if is_plain else f"{path} is {shown(value)}; allowed: {WHOLE.allowed}"


CLEAN = "text without NUL and lone surrogates"
SURROGATE = re.compile("[\ud800-\udfff]")


def _is_clean(text: str) -> bool:
    return "\0" not in text and (text.isascii() or not SURROGATE.search(text))


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return value in NONFINITE
    if isinstance(value, float):
        return True
    return isinstance(value, int) and -LARGEST_FLOAT <= value <= LARGEST_FLOAT


def _is_scale(value: Any) -> bool:
    """Return whether the value is a number other than NaN, which SQLite stores as NULL."""
    return _is_number(value) and not math.isnan(float(value))


def _is_count_list(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) > BINS:
        return False
    if not set(map(type, value)) <= {int}:
        return False
    return not value or (min(value) >= 0 and max(value) <= LARGEST_WHOLE)


def _whole(low: int, high: int) -> Plain:
    return Plain(
        f"a whole number from {low} to {high}",
        lambda value: (
            isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        ),
    )


def _text(most: int, least: int = 0) -> Plain:
    return Plain(
        f"{CLEAN}, of {least} to {most} characters",
        lambda value: isinstance(value, str) and least <= len(value) <= most and _is_clean(value),
    )


def _one_of(*words: str) -> Plain:
    return Plain(f"one of {', '.join(words)}", lambda value: value in words)


def _like(pattern: re.Pattern[str], allowed: str) -> Plain:
    return Plain(allowed, lambda v: isinstance(v, str) and pattern.fullmatch(v) is not None)


def _or_nothing(rule: Plain, *, is_needed: bool = True) -> Plain:
    allowed = f"{rule.allowed}, or nothing"
    return Plain(allowed, lambda value: value is None or rule.holds(value), is_needed)


def _is_config(value: Any) -> bool:
    if not isinstance(value, dict) or _unplain(value):
        return False
    return len(json.dumps(value)) <= CONFIG_CHARACTERS


WHOLE = _whole(-LARGEST_WHOLE, LARGEST_WHOLE)
COUNT = _whole(0, LARGEST_WHOLE)
STEP = _whole(1, LARGEST_WHOLE)
SINCE = COUNT  # a step; 0: before the first
ELAPSED = WHOLE  # negative if a clock was set back
ID = _whole(1, LARGEST_ID)
NUMBER = Plain("a number", _is_number)
SECONDS = Plain(
    f"a number from 0 to {LARGEST_SECONDS}",
    lambda value: (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 <= value <= LARGEST_SECONDS
    ),
)
SCALE = Plain("a number that is not NaN", _is_scale)
YES_OR_NO = Plain("true or false", lambda value: isinstance(value, bool))
NAME = _text(NAME_CHARACTERS, least=1)
WORDS = _text(TEXT_CHARACTERS)
FILE: Mapping[str, Rule] = {
    "path": WORDS,
    "size_bytes": COUNT,
    "sha256": _like(SHA256, "64 hexadecimal digits"),
}
COUNTED = {"name": WORDS, "inf": COUNT, "nan": COUNT}
CULPRIT: Mapping[str, Rule] = {
    "name": WORDS,
    "inf": Plain(COUNT.allowed, COUNT.holds, is_needed=False),
    "nan": Plain(COUNT.allowed, COUNT.holds, is_needed=False),
}
MODULE: Mapping[str, Rule] = {
    "name": WORDS,
    "lowest_exponent": _whole(*EXPONENTS),
    "counts": Plain(f"at most {BINS} whole numbers from 0 to {LARGEST_WHOLE}", _is_count_list),
    "zeros": COUNT,
    "nonfinite": COUNT,
    "underflow": NUMBER,
    "near_overflow": NUMBER,
}

#: Fields by event kind; halfstep.telemetry.spool describes them.
EVENTS: Mapping[str, Mapping[str, Rule]] = {
    "scaler": {
        "kind": _one_of("skip", "growth", "backoff", "set"),
        "step": STEP,
        "optimizer": _or_nothing(_text(NAME_CHARACTERS)),
        "scale_before": SCALE,
        "scale_after": SCALE,
        "culprits": Listed(CULPRIT, is_needed=False),
        "loss_nonfinite": Plain("true or false", YES_OR_NO.holds, is_needed=False),
    },
    "metric": {"step": SINCE, "name": NAME, "value": NUMBER, "elapsed_ms": ELAPSED},
    "checkpoint": {
        "step": SINCE,
        "reason": NAME,
        "request": _or_nothing(ID, is_needed=False),
        # Only in checkpoints of Halfstep's own loop; scripts and earlier versions have neither.
        "write_seconds": Plain(SECONDS.allowed, SECONDS.holds, is_needed=False),
        "stall_seconds": Plain(SECONDS.allowed, SECONDS.holds, is_needed=False),
        "files": Listed({"kind": _like(FILE_KIND, FILE_KINDS), **FILE}),
    },
    "resumed": {"step": SINCE, "exact": YES_OR_NO, "notes": Listed(WORDS)},
    "configured": {
        "config": Plain(
            f"an object of plain JSON, of at most {CONFIG_CHARACTERS:,} characters", _is_config
        )
    },
    "length": {"step": SINCE, "steps": STEP},
    "artifact": {
        "step": SINCE,
        "name": _like(FILE_NAME, "a plain file name with a suffix"),
        **FILE,
    },
    "obeyed": {"step": SINCE, "request": ID},
    "shapes": {
        "step": SINCE,
        "share": NUMBER,
        "count": COUNT,
        "layers": Listed(WORDS),
        "batch_size": _or_nothing(COUNT),
    },
    "workload": {
        "step": SINCE,
        "examples": COUNT,
        "tokens": _or_nothing(COUNT),
        "flops": _or_nothing(NUMBER),
        "peak_flops": _or_nothing(NUMBER),
        "device": WORDS,
    },
    "retry": {"step": STEP, "loss": NUMBER, "grad_norm": NUMBER, "applied": YES_OR_NO},
    "histogram": {"step": STEP, "scale": SCALE, "modules": Listed(MODULE)},
    "replay": {
        "step": STEP,
        "exact": YES_OR_NO,
        "notes": Listed(WORDS),
        "requested": YES_OR_NO,
        "scale": SCALE,
        "found": YES_OR_NO,
        "module": _or_nothing(WORDS),
        "direction": _or_nothing(_one_of("forward", "backward")),
        "operation": _or_nothing(WORDS),
        "kind": _or_nothing(_one_of("overflow", "singular", "hidden", "compiled"), is_needed=False),
        "dtype": _or_nothing(WORDS),
        "largest_input": _or_nothing(NUMBER),
        "limit": _or_nothing(NUMBER),
        "loss_nonfinite": YES_OR_NO,
        "culprits": Listed({"optimizer": _text(NAME_CHARACTERS), **COUNTED}, is_needed=False),
    },
    "headroom": {
        "step": STEP,
        "scale": SCALE,
        "modules": Listed(
            {
                "name": WORDS,
                "activation": NUMBER,
                "gradient": _or_nothing(NUMBER),
                "smallest_activation": _or_nothing(NUMBER, is_needed=False),
                "smallest_gradient": _or_nothing(NUMBER, is_needed=False),
                "dtype": _or_nothing(WORDS, is_needed=False),
            }
        ),
    },
    "fp8": {
        "step": STEP,
        "modules": Listed(
            {
                "name": WORDS,
                **{
                    field: _or_nothing(NUMBER)
                    for kind in ("activation", "weight", "gradient")
                    for field in (kind, f"{kind}_underflow")
                },
            }
        ),
    },
    "layer_norms": {"step": STEP, "layers": Listed(WORDS), "norms": Listed(NUMBER)},
    "spike": {
        "step": STEP,
        "loss": NUMBER,
        "z": NUMBER,
        "rolled_back_to": Plain(SINCE.allowed, SINCE.holds, is_needed=False),
    },
    "rolled_back": {
        "step": SINCE,
        "from_step": STEP,
        "spike": STEP,
        "loss": NUMBER,
        "z": NUMBER,
        "examples": COUNT,
        "rollbacks": COUNT,
    },
    "weights": {
        "step": SINCE,
        "source": WORDS,
        "loaded": COUNT,
        "count": COUNT,
        **{name: Listed(WORDS) for name in ("missing", "unexpected", "mismatched")},
        **{f"{name}_count": COUNT for name in ("missing", "unexpected", "mismatched")},
    },
    "uncalled": {"step": STEP, "modules": Listed(WORDS)},
    "updates": {
        "step": STEP,
        "modules": Listed(
            {
                "name": WORDS,
                "wanted": COUNT,
                "lost": COUNT,
                "saved": _or_nothing(COUNT, is_needed=False),
            }
        ),
    },
    "poison": {
        "step": STEP,
        "count": COUNT,
        "buffers": Listed(WORDS),
        "at_end": _or_nothing(YES_OR_NO, is_needed=False),
    },
    "schedule": {
        "step": SINCE,
        "advanced": COUNT,
        "skipped": COUNT,
        "scheduler": _or_nothing(WORDS, is_needed=False),
    },
    "precision": {
        "step": SINCE,
        "dtype": _one_of("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    },
    "origin": {
        "step": STEP,
        "scale": SCALE,
        "direction": _one_of("forward", "backward"),
        "kind": _one_of(
            *("overflow", "singular", "hidden", "compiled", "elsewhere", "unobserved"),
            *("inputs", "weights", "inside", "outside"),
        ),
        **{name: _or_nothing(WORDS) for name in ("operation", "dtype", "module", "source")},
    },
    "bad_inputs": {"step": SINCE, "inputs": Listed(COUNTED)},
    "first_nonfinite": {
        "step": STEP,
        "loss_nonfinite": YES_OR_NO,
        "culprits": Listed(CULPRIT),
        "finite": COUNT,
    },
    "direct_step": {"step": SINCE, "count": COUNT, "optimizer": WORDS, "is_scaled": YES_OR_NO},
    "not_stepped": {"step": STEP, "count": COUNT},
    "scaled_clip": {
        "step": STEP,
        "count": COUNT,
        "optimizer": WORDS,
        "max_norm": _or_nothing(NUMBER),
    },
    "bounded_norms": {"step": STEP, "steps": COUNT, "norm": NUMBER},
    "uncleared": {"step": STEP, "count": COUNT, "optimizer": WORDS},
    "accumulated_gradients": {"step": STEP, "steps": COUNT, "optimizer": WORDS},
    "scaler_replaced": {"step": STEP, "scale_before": SCALE, "scale_after": SCALE, "count": COUNT},
    "no_gradient": {
        "step": SINCE,
        "optimizer": WORDS,
        "parameters": Listed(WORDS),
        "count": COUNT,
        "of": COUNT,
        "steps": COUNT,
    },
    "no_step": {"step": SINCE, "passes": COUNT},
    "no_inf_checks": {
        "step": SINCE,
        "method": WORDS,
        "optimizers": Listed(WORDS),
        "error": WORDS,
    },
    "fp16_gradients": {"step": SINCE, "count": COUNT, "parameters": Listed(WORDS), "error": WORDS},
    "adam_eps": {"step": SINCE, "optimizer": WORDS, "eps": NUMBER, "count": COUNT},
    "line": {
        "time": NUMBER,
        "stream": _one_of("stdout", "stderr", "halfstep"),
        "text": Plain(WORDS.allowed, WORDS.holds, is_needed=False),
        "lines": Plain(COUNT.allowed, COUNT.holds, is_needed=False),
    },
    "log_part": FILE,
    "sample": {
        "elapsed_ms": ELAPSED,
        "device": _whole(-1, 10_000),
        "utilization": _or_nothing(NUMBER),
        "memory_bytes": _or_nothing(COUNT),
        "power_watts": _or_nothing(NUMBER),
        "temperature_celsius": _or_nothing(NUMBER),
    },
    "left_out": {"step": SINCE, "diagnosis": NAME, "reason": WORDS},
    "failed_diagnosis": {"step": SINCE, "diagnosis": NAME, "error": WORDS},
}
