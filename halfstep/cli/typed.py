"""An argparse parser that reports errors as JSON if asked to."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from halfstep.cli.application import is_text


class Parser(argparse.ArgumentParser):
    """Reads words; where they ask for JSON, what is wrong with them is told so too."""

    _words: Sequence[str] = ()

    def parse_args(self, words: Sequence[str] | None) -> argparse.Namespace:  # type: ignore[override]
        """Read what was typed; None: to this process."""
        self._words = sys.argv[1:] if words is None else words
        options = super().parse_args(self._words)
        for action in self._actions:  # words that are left to others these will look at
            if action.nargs != argparse.REMAINDER:
                self._check(action, getattr(options, action.dest, None))
        return options

    def _check(self, action: argparse.Action, value: Any) -> None:
        """Refuse bytes that no text has; a path may have them."""
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not is_text(text):
                wrong = f"{os.fsencode(text)!r} is not allowed; allowed: UTF-8"
                self.error(str(argparse.ArgumentError(action, wrong)))

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and exit with 2."""
        if "--json" in self._words:
            self.exit(2, json.dumps({"error": message}) + "\n")
        super().error(message)
