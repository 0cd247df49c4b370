"""HALFSTEP_* variables of the environment: one that is unknown or was renamed is an error."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

PREFIX = "HALFSTEP_"
#: Variable in which an operator names others.
ALLOWING = f"{PREFIX}OTHER_VARIABLES"
#: Settings with another name since 0.1.0.
RENAMED = {
    "ALERTS_PRIVATE": "ALERTS_ALLOW_PRIVATE_ADDRESSES",
    "BIN_DAYS": "TRASH_DAYS",
    "COMMANDS": "ALLOW_COMMANDS",
    "GANG_PATIENCE": "RESERVE_AFTER_SECONDS",
    "INTERFACE": "NETWORK_INTERFACE",
    "KEPT_CHECKOUTS": "MAX_CACHED_CHECKOUTS",
    "PASSWORDS": "PASSWORD_LOGIN",
    "PLACED_AT_ONCE": "MAX_PENDING_PILOTS",
    "WALLS": "SANDBOX",
    "WEIGHTS": "WEIGHTS_DIRS",
}
#: Settings that have no effect any more, and why.
RETIRED = {
    "FREEZE_AFTER_DAYS": "the database stores steps in compressed blocks, and no files of steps",
}
#: Not settings of server and worker: of clients, watched scripts and recipes.
OF_SCRIPTS = {"URL", "TOKEN", "MODE", "CONSOLE", "SYSTEM", "GIT", "CODE", "CACHE", "RECIPES"}
OF_SCRIPTS |= {"EMULATE_FP8"}
#: Set for the processes of runs.
OF_RUNS = {"ATTEMPT", "CONTROL_FOLDER", "ISOLATION", "PARENT_PID", "PARENT_RUN", "PRIVATE_PATHS"}
OF_RUNS |= {"RUN", "RUN_FOLDER", "SECRETS", "SWEEP_POINT"}
DEFERRED = "DEFERRED_"  # begins the names of secrets
#: Set by Kubernetes in each pod for a service whose name begins with "halfstep".
OF_SERVICES = re.compile(
    r"HALFSTEP_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
IN_POD = "KUBERNETES_SERVICE_HOST"


def problems(environment: Mapping[str, str], settings: Iterable[str]) -> dict[str, str]:
    """Return what is wrong with the names of variables, by variable. settings: their names."""
    known = {name.upper() for name in settings} | OF_SCRIPTS | OF_RUNS
    named = f"{environment.get(ALLOWING, '')},{environment.get(f'{PREFIX}RUN_ENVIRONMENT', '')}"
    allowed = [name.strip() for name in named.split(",") if name.strip()]
    found = {}
    for variable in environment:
        name = variable.upper().removeprefix(PREFIX)
        if not variable.upper().startswith(PREFIX) or name in known:
            continue
        if name in RENAMED:
            found[variable] = f"renamed to {PREFIX}{RENAMED[name]}; set that instead"
        elif name in RETIRED:
            found[variable] = f"retired: {RETIRED[name]}. Unset it"
        elif not (name.startswith(DEFERRED) or _is_allowed(variable, allowed, environment)):
            near = get_close_matches(name, [*known, *RENAMED], n=1)
            hint = f"did you mean {PREFIX}{RENAMED.get(near[0], near[0])}? " if near else ""
            found[variable] = (
                f"unknown; {hint}Unset it, or name it in {ALLOWING} if it belongs to another tool"
            )
    return found


def _is_allowed(variable: str, allowed: list[str], environment: Mapping[str, str]) -> bool:
    if IN_POD in environment and OF_SERVICES.fullmatch(variable):
        return True
    beginnings = tuple(name.removesuffix("*") for name in allowed if name.endswith("*"))
    return variable in allowed or variable.startswith(beginnings)
