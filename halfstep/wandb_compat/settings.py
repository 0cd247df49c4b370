"""`wandb.config` and `wandb.summary`: dictionaries with attribute access."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from halfstep.session.config_values import as_config
from halfstep.session.nesting import merge
from halfstep.session.notebook import is_notebook
from halfstep.telemetry.plain_json import safe_repr
from halfstep.wandb_compat.unsupported import Error, report_exceptions, say_once


class Entries(MutableMapping[str, Any]):
    """Entries by name or attribute. Raises Error for a change that is not allowed."""

    def __init__(
        self,
        on_change: Callable[[dict[str, Any]], None] = lambda changed: None,
        *,
        allow_val_change: bool | None = True,
        locked: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin without entries.

        on_change: called with the changed entries.  allow_val_change: of entries that are set; None
        reports a change.  locked: values that stay.
        """
        vars(self).update(_entries={}, _on_change=on_change, _locked=locked or {})
        vars(self)["_allow_val_change"] = allow_val_change

    def __getitem__(self, name: str) -> Any:
        return self._entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._change({name: value})

    def __delitem__(self, name: str) -> None:
        del self._entries[name]
        _safe(self._on_change)({})

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["_entries"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __repr__(self) -> str:
        return repr(self._entries)

    def as_dict(self) -> dict[str, Any]:
        """Return a copy."""
        return dict(self._entries)

    def update(self, *given: Any, **named: Any) -> None:
        """Set several entries from mappings, namespaces or keyword arguments."""
        allowed = [named.pop("allow_val_change", None), *(e for e in given if isinstance(e, bool))]
        is_allowed = next((choice for choice in allowed if choice is not None), None)
        for entry in given:
            if not isinstance(entry, bool):
                self._change(entries_of(entry), is_allowed)
        self._change(named, is_allowed)

    def setdefaults(self, given: Any) -> None:
        """Set the entries that are missing."""
        self._change({k: v for k, v in entries_of(given).items() if k not in self._entries})

    def _change(self, entries: Mapping[str, Any], is_allowed: bool | None = None) -> None:
        locked = {name: value for name, value in self._locked.items() if name in entries}
        entries = merge(given := entries, locked)
        for name in list_changed(given, entries):
            say_once(f"config.{name} stays as the sweep has set it")
        check_change(
            self._entries, entries, self._allow_val_change if is_allowed is None else is_allowed
        )
        if entries:
            self._entries.update(entries)
            _safe(self._on_change)(dict(entries))


def check_change(
    before: Mapping[str, Any], entries: Mapping[str, Any], is_allowed: bool | None
) -> None:
    """Report entries that replace others, or raise Error if that is not allowed.

    is_allowed: None: as `init` without allow_val_change; a notebook may change what it likes.
    """
    names = (
        []
        if is_allowed or (is_allowed is None and is_notebook())
        else list_changed(before, entries)
    )
    for name in names:
        if is_allowed is None:
            say_once(f"config.{name} is changed; init(allow_val_change=False) would refuse it")
            continue
        values = f"is {safe_repr(before[name])}, not {safe_repr(entries[name])}"
        raise Error(f"config.{name} {values}; allowed: a change with allow_val_change=True")


def list_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names of entries with another value."""
    both = [name for name in after if name in before]
    return [n for n in both if as_config({"": before[n]}) != as_config({"": after[n]})]


def _safe(on_change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    return report_exceptions(on_change)


def entries_of(given: Any) -> dict[str, Any]:
    """Return the entries of a mapping, namespace, dataclass or similar object."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {str(name): value for name, value in given.items()}
    config = as_config(given)
    if not isinstance(config, dict):
        say_once(f"a configuration of {type(given).__name__} is not supported: use a mapping")
        return {}
    return {name: getattr(given, name, value) for name, value in config.items()}
