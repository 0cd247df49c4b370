"""Removes likely secrets from recorded commands, source texts and configurations."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

HIDDEN = "***"
WORDS = {"token", "secret", "password", "passwd", "pwd", "passphrase", "credential", "credentials"}
KEYS = {"api", "access", "private", "secret", "auth"}  # words that make a "key" secret
FOLDERS = ("PWD", "OLDPWD")  # variables of the shell, whose names denote no password
SHORTEST = 8  # minimum length of secrets to hide in texts: shorter ones would match by chance
#: A name, an assignment, and a literal that could be a secret: no phrases, and no <|marks|>.
ASSIGNED = re.compile(
    r"""([A-Za-z_][\w-]{0,99})(["']?\]?(?:\s*:\s*str)?\s*[:=]\s*)(["'])([\w+/=.-]{8,})\3"""
)
IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def command(words: Sequence[str], *secrets: str | None) -> list[str]:
    """Return a command line without its secrets.

    Hidden are `--token X`, `api_key=X`, credentials in URLs, and the given secrets.
    """
    shown, is_value = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if is_value and not word.startswith("-"):
            shown.append(HIDDEN)
        elif equals and is_secret(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(IN_URL.sub(HIDDEN, word))
        is_value = not equals and word.startswith("-") and is_secret(word)
    return [str(without(word, *secrets)) for word in shown]


def source(text: str, *secrets: str | None) -> str:
    """Return a program's text without its secrets.

    Hidden are the given secrets, credentials in URLs, and literals assigned to a secret's name:
    `api_key = "…"`, `os.environ["HF_TOKEN"] = "…"`.
    """

    def hide(match: re.Match[str]) -> str:
        name, between, quote, _value = match.groups()
        return f"{name}{between}{quote}{HIDDEN}{quote}" if is_secret(name) else match[0]

    return ASSIGNED.sub(hide, IN_URL.sub(HIDDEN, str(without(text, *secrets))))


def without(value: Any, *secrets: str | None) -> Any:
    """Return plain JSON with the given secrets hidden in every text."""
    if isinstance(value, dict):
        return {key: without(item, *secrets) for key, item in value.items()}
    if isinstance(value, list):
        return [without(item, *secrets) for item in value]
    if isinstance(value, str):
        for secret in secrets:
            if secret and len(secret) >= SHORTEST:
                value = value.replace(secret, HIDDEN)
    return value


def values(environment: Mapping[str, str]) -> list[str]:
    """Return the values of the variables whose names denote a secret."""
    return [
        value
        for name, value in environment.items()
        if is_secret(name) and len(value) >= SHORTEST and name not in FOLDERS
    ]


def is_secret(name: str) -> bool:
    """Return whether a name denotes a secret, in any spelling: --apiKey, hf.api-key."""
    parts = re.findall(r"[a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name).lower())
    return bool(
        WORDS & {*parts}
        or any(first in KEYS and second == "key" for first, second in pairwise(parts))
        or any(part.removesuffix("key") in KEYS for part in parts if part.endswith("key"))
    )
