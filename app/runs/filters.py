"""The filter language of the list: terms that must all match.

    sweep -status:failed since:7d tag:"lr 2" val/accuracy>0.9 batch_size=64

A bare term matches name, recipe, precision, tags, owner and project. Quotes keep spaces and make
the text literal ("" is a quote within them); "-" negates a term. A metric or setting with the name
of a column or key is metrics.loss or settings.status. db/runs/run_filters.py translates to SQL.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType

from sqlalchemy.orm import Session

from app.http.parameters import TYPED_CHARACTERS, flaw
from db.errors import Invalid
from db.runs import autocomplete
from db.runs.outcomes import OUTCOMES
from db.runs.run_filters import (
    COMPARISONS,
    METRICS,
    NUMBERS,
    ORDERS,
    SETTINGS,
    STATUS_GROUPS,
    SYNONYMS,
    TEXTS,
    Compared,
    Condition,
    Created,
    EndedAs,
    Filter,
    Has,
    InStatus,
    InSweep,
    NeedsAttention,
    Term,
    Text,
    Word,
)
from db.tables import COMMAND, LARGEST_ID, RECIPE, WATCH, Status
from db.telemetry.pyramid import STEP_SERIES
from halfstep.number_formats import power_of_two
from halfstep.run_labels import STATE_WORDS, STATES
from halfstep.suggestions import did_you_mean

MOST_WORDS = 20
SOURCES = (RECIPE, COMMAND, WATCH)
#: Suggested values of since and before.
TIMES = ("1h", "1d", "7d", "4w")
ATTENTION = "attention"
STATUSES = (*STATUS_GROUPS, *map(str, Status), *OUTCOMES, ATTENTION)
#: Keys that take a value after a colon, and the allowed values.
KEYS = MappingProxyType(
    {
        "status": ", ".join(STATUSES),
        "since": "7d, 12h, 30m, 2w ago or a date in UTC, 2026-11-01",
        "before": "7d, 12h, 30m, 2w ago or a date in UTC, 2026-11-01",
        "tag": "a whole tag",
        "precision": "fp16, bf16, fp32 or fp8",
        "recipe": "the name of a recipe",
        "owner": "a name, or me",
        "project": "the name of a project",
        "source": ", ".join(SOURCES),
        "name": "a part of a run's name",
        "sweep": "the number of a sweep",
        "has": "a setting or metric, tag, project, precision, recipe or sweep",
    }
)
#: Words of other filter languages; as texts they would match nothing without an explanation.
OPERATORS = ("OR", "AND", "NOT", "|", "||", "&&")
UNITS = MappingProxyType({"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0})

# Possessive, so that many quotes in a row are matched in one way instead of 2^n.
_WORD = re.compile(r'(?:"(?:[^"]|"")*+(?:"|\Z)|[^\s"])++')
_QUOTED = re.compile(r'"((?:[^"]|"")*+)"')
_SPLIT = re.compile(r'((?:"(?:[^"]|"")*+"|[^":<>=])*+)(>=|<=|:|>|<|=)(.*)', re.DOTALL)
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw])", re.ASCII)


@dataclass(frozen=True)
class Mistake:
    """An invalid term."""

    number: int  # position in the filter, from 1; 0 for the whole filter
    word: str
    message: str

    def __str__(self) -> str:
        position = f"word {self.number}, " if self.number else ""
        return f"{position}{self.word[:100]!r}: {self.message}"


@dataclass(frozen=True)
class Chip:
    """A term as the list shows it."""

    word: str
    key: str
    value: str
    without: str  # the filter without this term


class BadFilter(Invalid):
    """A filter is not allowed."""

    code = "invalid"

    def __init__(self, mistakes: list[Mistake]) -> None:
        self.mistakes = mistakes
        super().__init__({"filter": "; ".join(map(str, mistakes))})


class _Misread(Exception):
    """The reason why a term is invalid, with what is allowed."""


def read(text: str, *, me: str) -> Filter:
    """Parse a filter. me: name of the user.  Raises BadFilter with each invalid term."""
    if len(text) > TYPED_CHARACTERS:
        message = f"it has {len(text):,} characters; allowed: at most {TYPED_CHARACTERS}"
        raise BadFilter([Mistake(0, text, message)])
    words = _WORD.findall(text)
    if len(words) > MOST_WORDS:
        message = f"it has {len(words)} words; allowed: at most {MOST_WORDS}"
        raise BadFilter([Mistake(0, text, message)])
    terms, mistakes = [], []
    for number, word in enumerate(words, start=1):
        try:
            terms.append(_term(word, me))
        except _Misread as error:
            mistakes.append(Mistake(number, word, str(error)))
    if mistakes:
        raise BadFilter(mistakes)
    return terms


def chips(text: str, mistakes: Collection[Mistake] = ()) -> tuple[list[Chip], str]:
    """Return the terms of a filter that are valid, and the text of those that are not."""
    words = _WORD.findall(text)
    wrong = {mistake.number for mistake in mistakes}
    if 0 in wrong:
        return [], text
    valid = [word for number, word in enumerate(words, start=1) if number not in wrong]
    invalid = [word for number, word in enumerate(words, start=1) if number in wrong]
    return [
        Chip(word, *_parts_of_chip(word), " ".join((*valid[:position], *valid[position + 1 :])))
        for position, word in enumerate(valid)
    ], " ".join(invalid)


def _parts_of_chip(word: str) -> tuple[str, str]:
    is_negated = word.startswith("-") and len(word) > 1
    term = word[1:] if is_negated else word
    prefix = "not " if is_negated else ""
    if parts := _SPLIT.fullmatch(term):
        key, sign, value = map(_plain, parts.groups())
        shown = STATES.get(value, value).lower() if key == "status" else value
        return prefix + key, shown if sign == ":" else f"{sign} {value}"
    return prefix.strip(), _plain(term)


def notes(session: Session, terms: Filter, sort: str, shown: Iterable[str] = ()) -> list[str]:
    """Return notes on names that no setting or metric has.

    shown: names of columns, which are then empty.
    """
    name = sort.removeprefix("-")
    order = () if name in ORDERS or name in SYNONYMS else (name,)
    unknown = autocomplete.find_unknown(session, dict.fromkeys((*names(terms), *order, *shown)))
    vocabulary = autocomplete.vocabulary(session) if unknown else None
    allowed = (*NUMBERS, *vocabulary.settings, *vocabulary.metrics) if vocabulary else ()
    return [
        f"there is no column {name}: it is recorded by step, for charts and reports"
        if name in _BY_STEP
        else f"there is no setting or metric {name}{_suggestion(name, allowed)}"
        for name in unknown
    ]


def names(terms: Filter) -> Iterator[str]:
    """Yield the names in a filter that may be settings or metrics."""
    for term in terms:
        if isinstance(term.condition, Compared | Has) and term.condition.name not in _COLUMNS:
            yield term.condition.name


def quote(text: str) -> str:
    """Return a text quoted for a filter."""
    return '"{}"'.format(text.replace('"', '""')) if re.search(r'[\s"<>=:]', text) else text


def _term(word: str, me: str) -> Term:
    if wrong := flaw(word):
        raise _Misread(f"{wrong}; allowed: other text")
    if word.count('"') % 2:
        raise _Misread('its quote is not closed; allowed: "two words"')
    if word in OPERATORS:
        raise _Misread(
            f'terms are combined with AND, and {word} is not an operator; allowed: "{word}" as a '
            "text"
        )
    is_negated = word.startswith("-") and len(word) > 1
    term = word[1:] if is_negated else word
    if parts := _SPLIT.fullmatch(term):
        key, sign, value = parts.groups()
        return Term(_parse_condition(key, sign, value, me), is_negated)
    return Term(_bare(_plain(term)), is_negated)


def _plain(text: str) -> str:
    """Return a text without its quotes."""
    return _QUOTED.sub(lambda match: match[1].replace('""', '"'), text)


def _bare(text: str) -> Word:
    if not text.strip():
        raise _Misread("it is empty; allowed: a text to search for")
    return Word(text)


def _parse_condition(key: str, sign: str, value: str, me: str) -> Condition:
    key, value = _plain(key), _plain(value).strip()
    if not key:
        raise _Misread(f"there is nothing before {sign}; allowed: a key or a name, lr{sign}0.1")
    if key in KEYS:
        if sign not in (":", "="):
            raise _Misread(
                f"{key} is not compared by {sign}; allowed: {key}:…, {KEYS[key]}; of a metric or "
                f"setting {METRICS}{key}{sign}{value[:50]}, {SETTINGS}{key}{sign}{value[:50]}"
            )
        if not value:
            raise _Misread(f"it lacks a value; allowed: {KEYS[key]}")
        return _READERS[key](key, value, me)
    if sign == ":":
        raise _Misread(_explain_unknown_key(key, value))
    if not value:
        raise _Misread(f"it lacks a value; allowed: {key}{sign}0.5")
    return _comparison(SYNONYMS.get(key, key), sign, value)


def _explain_unknown_key(key: str, value: str) -> str:
    if key == "health":
        return "it is computed for listed runs only; allowed: status:attention, skipped>100"
    if key in NUMBERS or key in SYNONYMS:
        return f"{key} is a number; allowed: {', '.join(f'{key}{sign}…' for sign in COMPARISONS)}"
    question = _suggestion(key, KEYS)
    allowed = f"{' Allowed' if question else '; allowed'}: {', '.join(KEYS)}"
    return (
        f"there is no key {key[:50]}{question}{allowed}. A setting or metric is compared by "
        f"{key[:50]}={value[:50]}; a text with a colon is put in quotes"
    )


def _suggestion(word: str, allowed: Collection[str]) -> str:
    question = did_you_mean(word, allowed).strip()
    return question and f"; {question}"


def _status(_key: str, value: str, _me: str) -> Condition:
    typed = value.lower().replace(" ", "_")
    word = STATE_WORDS.get(typed, typed)
    if word in STATUS_GROUPS:
        return InStatus(STATUS_GROUPS[word])
    if word == ATTENTION:
        return NeedsAttention()
    if word not in STATUSES:
        allowed = ", ".join(STATUSES)
        raise _Misread(f"not a status; allowed: {allowed}{_suggestion(word, STATUSES)}")
    for outcome in OUTCOMES:
        if word == outcome:
            return EndedAs(outcome)
    return InStatus((Status(word),))


def _parse_created(key: str, value: str, _me: str) -> Condition:
    is_before = key == "before"
    if match := _DURATION.fullmatch(value):
        return Created(is_before, seconds_ago=float(match[1]) * UNITS[match[2]])
    try:
        moment = datetime.fromisoformat(value)
        return Created(
            is_before, (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        )
    except (ValueError, OverflowError):
        raise _Misread(f"not a time; allowed: {KEYS[key]}") from None


def _source(key: str, value: str, _me: str) -> Condition:
    if value.lower() not in SOURCES:
        allowed = ", ".join(SOURCES)
        raise _Misread(f"not a source; allowed: {allowed}{_suggestion(value, SOURCES)}")
    return Text(key, value)


def _owner(key: str, value: str, me: str) -> Condition:
    return Text(key, me if value == "me" else value)


def _sweep(_key: str, value: str, _me: str) -> Condition:
    if not (value.isascii() and value.isdecimal() and 0 < int(value[:12]) <= LARGEST_ID):
        raise _Misread(f"{value[:50]!r} is not a sweep; allowed: its number, sweep:3")
    return InSweep(int(value[:12]))


def _has(_key: str, value: str, _me: str) -> Condition:
    return InSweep() if value == "sweep" else Has(value)


def _text(key: str, value: str, _me: str) -> Condition:
    return Text(key, value)


_COLUMNS = {*NUMBERS, *TEXTS}
#: Names that charts and reports have besides those of metrics.
_BY_STEP = {*(series.name for series in STEP_SERIES), "examples_per_second"}
_READERS: dict[str, Callable[[str, str, str], Condition]] = {
    **dict.fromkeys(TEXTS, _text),
    "status": _status,
    "since": _parse_created,
    "before": _parse_created,
    "owner": _owner,
    "source": _source,
    "sweep": _sweep,
    "has": _has,
}


def _comparison(name: str, sign: str, value: str) -> Condition:
    number = _number(value)
    if number is None and name == "duration" and (match := _DURATION.fullmatch(value)):
        number = float(match[1]) * UNITS[match[2]]
    if number is None and (name in NUMBERS or sign != "="):
        example = "10, 0.5, 1e-3, 2^16" + (", 90m, 2h" if name == "duration" else "")
        raise _Misread(f"{value[:50]!r} is not a number; allowed: {example}")
    return Compared(name, sign, number, value)


def _number(text: str) -> float | None:
    try:
        number = power_of_two(text) or float(text)
    except ValueError:
        return None
    return None if math.isnan(number) else number
