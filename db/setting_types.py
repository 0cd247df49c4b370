"""Types of settings that are checked by more than a pattern or a range."""

import re
import shlex
from ipaddress import ip_network
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

#: A label of RFC 1123, as in names of Kubernetes objects.
KUBERNETES_NAME = r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"
#: Limit of users reserved for runs.
MOST_USERS = 10_000


def required_by(setting: str, value: str | None = None) -> AfterValidator:
    """Return the check that a setting is set if an earlier one has a value, by default any."""

    def check(own: object, info: ValidationInfo) -> object:
        other = info.data.get(setting)
        if not own and (other if value is None else other == value):
            suffix = "" if value is None else f"={value}"
            raise _error(f"required by HALFSTEP_{setting.upper()}{suffix}")
        return own

    return AfterValidator(check)


def _check_proxies(text: str) -> str:
    for part in filter(None, map(str.strip, text.split(","))):
        try:
            ip_network(part)
        except ValueError as error:
            allowed = "allowed: addresses or networks, as 10.0.0.0/8"
            raise _error(f"{part!r} is not valid; {allowed}") from error
    return text


def _check_public_url(text: str) -> str:
    if text and not re.fullmatch(r"https?://[^/?#\s]+(/[\w.~-]+)*/?", text):
        raise _error("allowed: http:// or https://, a host, and an optional path of plain names")
    return text


def _check_users(text: str) -> str:
    first, _, last = text.partition("-")
    if text and not 0 <= int(last) - int(first) < MOST_USERS:
        raise _error(f"allowed: FIRST-LAST, at most {MOST_USERS} users")
    return text


def _check_options(text: str) -> str:
    try:
        shlex.split(text)
    except ValueError as error:
        raise _error(f"{error}; allowed: shell syntax") from error
    return text


def _error(message: str) -> PydanticCustomError:
    return PydanticCustomError("setting", "{message}", {"message": message})


#: Addresses or networks, separated by commas.
Proxies: TypeAlias = Annotated[str, AfterValidator(_check_proxies)]
PublicUrl: TypeAlias = Annotated[str, AfterValidator(_check_public_url)]
#: Range of user ids: FIRST-LAST.
Users: TypeAlias = Annotated[
    str, Field(pattern=r"^([1-9]\d{0,8}-[1-9]\d{0,8})?$"), AfterValidator(_check_users)
]
#: Options of a program, in shell syntax.
Options: TypeAlias = Annotated[str, Field(max_length=2000), AfterValidator(_check_options)]
KubernetesName: TypeAlias = Annotated[str, Field(pattern=KUBERNETES_NAME)]
OptionalKubernetesName: TypeAlias = Annotated[str, Field(pattern=f"{KUBERNETES_NAME}|^$")]
