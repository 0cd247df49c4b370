"""`wandb.sweep`, served by sweeps for agents; `wandb.agent` is halfstep.agent."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from halfstep import sweep_agent
from halfstep.telemetry.plain_json import JsonObject
from halfstep.wandb_compat.unsupported import Error, report_ignored

KINDS = {"grid": "grid", "random": "random", "bayes": "tpe"}
#: Distributions by W&B's names, without "q_" and "_values".
DISTRIBUTIONS = {
    "uniform": "uniform",
    "int_uniform": "integers",
    "log_uniform": "loguniform",
    "inv_log_uniform": "loguniform",
    "normal": "normal",
    "log_normal": "lognormal",
}
#: Entries of a configuration that are used, or need no message.
USED = {"method", "metric", "parameters", "name", "run_cap", "project", "entity", "description"}
USED |= {"early_terminate"}
METRIC = {"name", "goal"}


def sweep(
    sweep: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    entity: str | None = None,
    project: str | None = None,
    prior_runs: Any = None,
) -> str:
    """Begin a sweep for agents, and return its number as text. Raises Error if it is refused."""
    config = dict(sweep() if callable(sweep) else sweep)
    report_ignored("sweep", {key: value for key, value in config.items() if key not in USED})
    report_ignored("sweep", {"prior_runs": prior_runs})
    space, fixed = _space(config.get("parameters") or {})
    metric = config.get("metric") or {}
    report_ignored("sweep", {f"metric.{key}": metric[key] for key in metric.keys() - METRIC})
    goal = str(metric.get("goal", ""))
    options: JsonObject = {
        "kind": KINDS.get(str(config.get("method", "")), ""),
        "pruner": _pruner(config.get("early_terminate")),
        "metric": str(metric.get("name", "loss")),
        "goal": goal and ("maximize" if goal.startswith("max") else "minimize"),
        "runs": config.get("run_cap"),
        "name": str(config.get("name") or ""),
        "project": project or config.get("project"),
    }
    if not options["kind"]:
        raise Error(f"sweep(method={config.get('method')!r}); allowed: {', '.join(KINDS)}")
    try:
        begun = sweep_agent.with_client(
            lambda client: client.begin_agent_sweep(space, fixed, **options), None, None
        )
    except Exception as error:
        raise Error(f"sweep() failed: {error}") from error
    return str(begun["id"])


def _pruner(rule: Mapping[str, Any] | None) -> JsonObject | None:
    """Return the pruner of W&B's early_terminate, whose iterations are values of the metric."""
    if not rule:
        return None
    if rule.get("type") != "hyperband":
        raise Error(f"sweep(early_terminate={dict(rule)!r}); allowed: type hyperband")
    factor, most = int(rule.get("eta", 3)), rule.get("max_iter")
    first = int(rule.get("min_iter", 1))
    if most is not None:
        first = max(int(most) // factor ** int(rule.get("s", 1)), 1)
    return {"kind": "hyperband", "first": first, "factor": factor}


def _space(parameters: Mapping[str, Any], prefix: str = "") -> tuple[JsonObject, JsonObject]:
    """Return the searched and the fixed settings of W&B's parameters; nested names have dots."""
    space: JsonObject = {}
    fixed: JsonObject = {}
    for name, rule in parameters.items():
        path = f"{prefix}{name}"
        if "parameters" in rule:
            inner, inner_fixed = _space(rule["parameters"], f"{path}.")
            space |= inner
            if inner_fixed:
                fixed[name] = inner_fixed
        elif "value" in rule:
            fixed[name] = rule["value"]
        elif "probabilities" in rule:
            values = {"values": list(rule["values"]), "probabilities": list(rule["probabilities"])}
            space[path] = values
        elif "values" in rule:
            space[path] = list(rule["values"])
        else:
            space[path] = _distribution(path, rule)
    return space, fixed


def _distribution(name: str, rule: Mapping[str, Any]) -> JsonObject:
    """Return a distribution. Of log_uniform the bounds are exponents, of …_values the values."""
    low, high = rule.get("min"), rule.get("max")
    whole = isinstance(low, int) and isinstance(high, int)
    given = str(rule.get("distribution") or ("int_uniform" if whole else "uniform"))
    base = given.removeprefix("q_").removesuffix("_values")
    kind = DISTRIBUTIONS.get(base, "")
    step = {"step": rule.get("q", 1)} if given.startswith("q_") else {}
    if kind in ("normal", "lognormal"):
        mean, std = rule.get("mu", 0.0), rule.get("sigma", 1.0)
        return {"distribution": kind, "mean": mean, "std": std} | step
    if not kind or low is None or high is None:
        allowed = "value, values, or a distribution with min and max, or mu and sigma: "
        allowed += ", ".join(DISTRIBUTIONS)
        raise Error(f"sweep(parameters={{{name!r}: {dict(rule)!r}}}); allowed: {allowed}")
    if given in ("log_uniform", "q_log_uniform"):
        low, high = math.exp(low), math.exp(high)
    elif given == "inv_log_uniform":
        low, high = math.exp(-high), math.exp(-low)
    return {"distribution": kind, "low": low, "high": high} | step
