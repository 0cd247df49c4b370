"""`wandb.config` and `wandb.summary`: dictionaries with attribute access."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from halfstep.session.config_values import as_config
from halfstep.wandb_compat.unsupported import say_once, unraised


class Entries(MutableMapping[str, Any]):
    """Entries by name or attribute. on_change: called with the changed entries."""

    def __init__(self, on_change: Callable[[dict[str, Any]], None] = lambda changed: None) -> None:
        vars(self)["_entries"], vars(self)["_on_change"] = {}, on_change

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
        named.pop("allow_val_change", None)
        for each in given:
            if isinstance(each, bool):  # allow_val_change, given positionally
                continue
            self._change(entries_of(each))
        self._change(named)

    def setdefaults(self, given: Any) -> None:
        """Set the entries that are missing."""
        self._change({k: v for k, v in entries_of(given).items() if k not in self._entries})

    def _change(self, entries: Mapping[str, Any]) -> None:
        if entries:
            self._entries.update(entries)
            _safe(self._on_change)(dict(entries))


def _safe(on_change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    return unraised(on_change)


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
