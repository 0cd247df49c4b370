"""Limits of runs that are configured, and those of them that this machine has."""

import logging
from dataclasses import dataclass, field

from db.settings import Settings
from worker.sandbox import cgroup_limits, run_users, sandbox

logger = logging.getLogger(__name__)


@dataclass
class AvailableLimits:
    """The state of the configured limits."""

    #: Why each limit is unavailable, or "" if it is available; `sandbox` only if it is ineffective.
    obstacles: dict[str, str] = field(default_factory=dict)
    #: Environment of supervisors, which disables the unavailable limits.
    without: dict[str, str] = field(default_factory=dict)


def available_limits(settings: Settings, devices: int, recipe_files: set[str]) -> AvailableLimits:
    """Check the configured limits, and log those that are unavailable."""
    limits = AvailableLimits()
    reasons = limits.obstacles
    if settings.sandbox and (reason := sandbox.namespaces_obstacle(settings)):
        reasons["namespaces"] = reason
        limits.without["HALFSTEP_SANDBOX_NAMESPACES"] = "no"
        settings = settings.model_copy(update={"sandbox_namespaces": False})
    if settings.run_users:
        reasons["users"] = run_users.obstacle(settings, devices)
    if reasons.get("users"):
        limits.without["HALFSTEP_RUN_USERS"] = ""
        settings = settings.model_copy(update={"run_users": ""})
    if settings.run_users and settings.run_processes:
        reasons["processes"] = ""
    asked = cgroup_limits.list_limits(settings)
    why = cgroup_limits.obstacle(settings) if asked else ""
    for name in asked:
        reasons[name.removeprefix("run_").removesuffix("_gib")] = why
        if why:
            limits.without[f"HALFSTEP_{name}".upper()] = "0"
    for name, reason in reasons.items():
        if reason:
            logger.warning("runs start without a configured limit, %s: %s", name, reason)
    if settings.sandbox and (reason := sandbox.obstacle(settings, recipe_files)):
        logger.warning("the sandbox is ineffective: %s", reason)
        reasons["sandbox"] = reason
    return limits
