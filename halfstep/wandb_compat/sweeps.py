"""`wandb.sweep`, served by sweeps for agents; `wandb.agent` is halfstep.agent."""

from collections.abc import Callable, Mapping
from typing import Any

from halfstep import sweep_agent
from halfstep.wandb_compat.unsupported import Error, ignored

KINDS = {"grid": "grid", "random": "random", "bayes": "tpe"}
DISTRIBUTIONS = {
    "uniform": "uniform",
    "log_uniform_values": "loguniform",
    "int_uniform": "integers",
}
#: Entries of a configuration that are used, or need no message.
USED = {"method", "metric", "parameters", "name", "run_cap", "project", "entity", "description"}


def sweep(
    sweep: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    entity: str | None = None,
    project: str | None = None,
    prior_runs: Any = None,
) -> str:
    """Begin a sweep for agents, and return its number as text. Raises Error if it is refused."""
    config = dict(sweep() if callable(sweep) else sweep)
    ignored("sweep", {key: value for key, value in config.items() if key not in USED})
    ignored("sweep", {"prior_runs": prior_runs})
    space, fixed = _space(config.get("parameters") or {})
    metric = config.get("metric") or {}
    goal = str(metric.get("goal", ""))
    options: dict[str, Any] = {
        "kind": KINDS.get(str(config.get("method", "")), ""),
        "metric": str(metric.get("name", "loss")),
        "goal": goal and ("maximise" if goal.startswith("max") else "minimise"),
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


def _space(
    parameters: Mapping[str, Any], prefix: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the searched and the fixed settings of W&B's parameters; nested names have dots."""
    space: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    for name, rule in parameters.items():
        path = f"{prefix}{name}"
        if "parameters" in rule:
            inner, inner_fixed = _space(rule["parameters"], f"{path}.")
            space |= inner
            if inner_fixed:
                fixed[name] = inner_fixed
        elif "value" in rule:
            fixed[name] = rule["value"]
        elif "values" in rule:
            space[path] = list(rule["values"])
        else:
            space[path] = _distribution(path, rule)
    return space, fixed


def _distribution(name: str, rule: Mapping[str, Any]) -> dict[str, Any]:
    low, high = rule.get("min"), rule.get("max")
    whole = isinstance(low, int) and isinstance(high, int)
    chosen = str(rule.get("distribution") or ("int_uniform" if whole else "uniform"))
    if chosen not in DISTRIBUTIONS or low is None or high is None:
        allowed = "value, values, or min and max with " + ", ".join(DISTRIBUTIONS)
        raise Error(f"sweep(parameters={{{name!r}: {dict(rule)!r}}}); allowed: {allowed}")
    return {"distribution": DISTRIBUTIONS[chosen], "low": low, "high": high}
