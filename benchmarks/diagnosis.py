"""Share of causes that are named correctly, by Halfstep's findings and by today's tools.

    python -m benchmarks.diagnosis [--save] [--loops PART]

The benchmark trains each loop of the corpus of tests/diagnosis unwatched and watched, from the same
seeds. Each loop is registered with its cause: `right` counts loops whose first finding names it,
`partly` those where a later finding does, and `wrong` those with findings of other causes alone.
Among healthy loops, `right` counts those without a finding of a cause.

On the same loops of one process, it also counts what a user can read from other tools: torch's own
exceptions and warnings, torch.autograd.set_detect_anomaly, transformers' DebugUnderflowOverflow and
wandb.watch. For each tool, a function decides which causes its output names, by the generous rule
in its docstring: a tool that names the operation counts even if it suggests no remedy. The
last two need their packages in .venv-frameworks (`make test-frameworks`), or are "not installed".
"""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.report import report
from tests.diagnosis.corpus import LOOPS
from tests.diagnosis.registry import CAUSES, HEALTHY, Loop
from tests.diagnosis.unwatched import Unwatched, run

RIGHT_SHARE = 0.95
ROOT = Path(__file__).parents[1]
FRAMEWORKS = ROOT / ".venv-frameworks" / "bin" / "python"
MESSAGES, ANOMALY = "torch's messages", "detect_anomaly"
DEBUG, WANDB = "DebugUnderflowOverflow", "wandb.watch"
TOOLS = (MESSAGES, ANOMALY, DEBUG, WANDB)
PEERS = {DEBUG: "transformers", WANDB: "wandb"}


# ---- Causes named by other tools -----------------------------------------------------------------


def named_by_messages(text: str) -> set[str]:
    """Return the causes that torch's exceptions and warnings name.

    Rule: a message counts if it states the cause itself. "Attempting to unscale FP16 gradients" and
    "No inf checks were recorded" do; so does the warning that lr_scheduler.step() came before
    optimizer.step(), which is what a schedule in a skipped first step looks like; and that a tensor
    does not require grad.
    """
    says = {
        "fp16_gradients": r"Attempting to unscale FP16 gradients",
        "no_inf_checks": r"No inf checks were recorded",
        "schedule_in_skipped_steps": r"lr_scheduler\.step\(\)` before `optimizer\.step\(\)",
        "no_gradient": r"does not require grad and does not have a grad_fn",
    }
    return {cause for cause, pattern in says.items() if re.search(pattern, text)}


#: Backward nodes of products and casts, which overflow; no value makes their derivative NaN.
LINEAR = r"(Addmm|Mm|Bmm|Linear|Convolution|ConvolutionOverrideable|ToCopy|T|Mul)Backward"


def named_by_anomaly(text: str) -> set[str]:
    """Return the causes that anomaly mode names: its exception, and torch's messages as well.

    Rule: "Function 'SqrtBackward0' returned nan values" names a singular gradient; where the
    function is a product or a cast, an overflow of the backward pass.
    """
    named = named_by_messages(text)
    if found := re.search(r"Function '(\w+)' returned nan values", text):
        is_linear = re.fullmatch(rf"{LINEAR}\d*", found[1])
        named.add("backward_overflow" if is_linear else "singular_gradient")
    return named


def named_by_debug(text: str) -> set[str]:
    """Return the causes that transformers' hooks on modules' outputs name, which stop at the first.

    Rule: the first line "... has nans" or "... has infs" names the first number that is not finite.
    An output: the forward pass, which without a scaler is all there is to be named. An input of the
    first module of a batch: the inputs. A weight names nothing: that came by an earlier step.
    """
    found = re.search(r"^(input\[\d+\]|output\S*|\w+) has (nans|infs)$", text, re.MULTILINE)
    if not found:
        return set()
    if found[1].startswith("output"):
        return {"forward_overflow", "nonfinite_without_scaler"}
    return {"nonfinite_inputs"} if found[1].startswith("input") else set()


def named_by_wandb(text: str) -> set[str]:
    """Return the causes that wandb.watch's histograms name.

    Rule: a parameter that requires a gradient and has no chart of it names no_gradient; gradients
    whose histograms all lie in one bin at 0 name zero_gradients. Infinities and NaN are dropped
    before they are drawn, and gradients are times the loss scale, so nothing else can
    be determined.
    """
    charts = json.loads(text or "{}")
    if None in charts.values():
        return {"no_gradient"}
    drawn = [each for each in charts.values() if each is not None]
    return {"zero_gradients"} if drawn and all(each == [0.0, 0.0] for each in drawn) else set()


# ---- Others' runs -------------------------------------------------------------------------------


def messages(loop: Loop) -> set[str]:
    """Train a loop unchanged."""
    ended = run(loop, Unwatched())
    return named_by_messages("\n".join([ended.error, *ended.warnings]))


def anomaly(loop: Loop) -> set[str]:
    """Train a loop under anomaly mode."""
    with torch.autograd.set_detect_anomaly(True):
        ended = run(loop, Unwatched())
    return named_by_anomaly("\n".join([ended.error, *ended.warnings]))


def debug(loop: Loop) -> set[str]:
    """Train a loop whose watched modules transformers debugs."""
    from transformers.debug_utils import DebugUnderflowOverflow

    def watch(*modules: nn.Module) -> None:
        for module in modules:
            DebugUnderflowOverflow(module)

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run(loop, Unwatched(watch))
    return named_by_debug(printed.getvalue())


def wandb_watch(loop: Loop) -> set[str]:
    """Train a loop whose modules wandb watches, and that logs its loss at each backward pass."""
    import wandb

    names: list[str] = []

    def watch(*modules: nn.Module) -> None:
        for module in modules:
            names.extend(name for name, p in module.named_parameters() if p.requires_grad)
        run_.watch(list(modules), log="all", log_freq=1)

    with tempfile.TemporaryDirectory() as folder:
        settings = wandb.Settings(
            silent=True, console="off", x_disable_meta=True, x_disable_stats=True
        )
        run_ = wandb.init(mode="offline", dir=folder, settings=settings)
        backward = torch.Tensor.backward

        def log(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            backward(self, *args, **kwargs)  # type: ignore[no-untyped-call]
            run_.log({"loss": self.detach().float().mean().item()})

        with patch.object(torch.Tensor, "backward", log):
            run(loop, Unwatched(watch))
        shown = dict(run_.summary)
        drawn = {name: _range(_chart(shown, name)) for name in names}
        run_.unwatch()
        run_.finish()
    return named_by_wandb(json.dumps(drawn))


def _chart(shown: dict[str, Any], name: str) -> Any:
    """Return a parameter's histogram; a process's later graphs have numbers in their names."""
    pattern = re.compile(rf"gradients/(graph_\d+)?{re.escape(name)}")
    return next((shown[key] for key in shown if pattern.fullmatch(key)), None)


def _range(histogram: Any) -> list[float] | None:
    """Return the range of a wandb histogram, or None if there is no histogram."""
    if histogram is None:
        return None
    drawn = dict(histogram)
    bins = [float(each) for each in drawn["bins"]]
    filled = [number for number, value in enumerate(drawn["values"]) if value]
    return [bins[filled[0]], bins[filled[-1] + 1]] if filled else [bins[0], bins[-1]]


RUNS: dict[str, Callable[[Loop], set[str]]] = {
    MESSAGES: messages,
    ANOMALY: anomaly,
    DEBUG: debug,
    WANDB: wandb_watch,
}


def named(tool: str, loops: list[Loop]) -> dict[str, list[str]]:
    """Return a tool's named causes by loop; an error of the tool names nothing."""
    found: dict[str, list[str]] = {}
    for loop in loops:
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                found[loop.name] = sorted(RUNS[tool](loop))
            except Exception as error:
                print(f"{tool}: {loop.name}: {type(error).__name__}: {error}", file=sys.stdout)
                found[loop.name] = []
    return found


def peers(loops: list[Loop], part: str) -> dict[str, dict[str, list[str]]]:
    """Return the causes that other tools name, if they are installed in .venv-frameworks."""
    if not FRAMEWORKS.exists():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "named.json"
        command = [str(FRAMEWORKS), "-m", "benchmarks.diagnosis", "--loops", part]
        subprocess.run([*command, "--peers", str(path)], cwd=ROOT, check=True)
        result: dict[str, dict[str, list[str]]] = json.loads(path.read_text())
    return result


# ---- The table ----------------------------------------------------------------------------------


@dataclass
class Row:
    """Results of the loops of a cause."""

    loops: int = 0
    named: Counter[str] = field(default_factory=Counter)
    harmful: int = 0
    contradictory: int = 0
    different: int = 0
    read: Counter[str] = field(default_factory=Counter)
    readable: int = 0  # loops that other tools were tried on


def ours(loop: Loop, row: Row) -> None:
    """Try a loop, and count its result."""
    from tests.diagnosis import remedies, trial

    tried = trial.attempt(loop)
    row.loops += 1
    row.named[tried.named] += 1
    row.harmful += any(remedies.list_offered(each) & loop.harmful for each in tried.findings)
    row.contradictory += bool(remedies.contradictions(tried.findings))
    row.different += not tried.is_same


def read_off(row: Row, tool: str, loop: Loop, causes: list[str]) -> None:
    """Count whether a tool's output names a loop's cause, or any cause of a healthy one."""
    is_right = not causes if loop.is_healthy else bool({loop.cause, *loop.accepts} & {*causes})
    row.read[tool] += is_right


def lines(rows: dict[str, Row], tools: dict[str, dict[str, list[str]]]) -> Iterator[list[Any]]:
    """Yield the table's rows: causes, their total, and the healthy loops."""
    whole = Row()
    for cause in CAUSES:
        for name in ("loops", "harmful", "contradictory", "different", "readable"):
            setattr(whole, name, getattr(whole, name) + getattr(rows[cause], name))
        whole.named += rows[cause].named
        whole.read += rows[cause].read
    for name, row in {
        **{c: rows[c] for c in CAUSES},
        "all causes": whole,
        HEALTHY: rows[HEALTHY],
    }.items():
        yield [
            name,
            row.loops,
            *(row.named[kind] for kind in ("right", "partly", "wrong", "none")),
            row.harmful,
            row.contradictory,
            row.different,
            *(f"{row.read[t]} of {row.readable}" if t in tools else "not installed" for t in TOOLS),
        ]


def main() -> None:
    """Try all loops, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--loops", default="", help="only those whose name or cause holds this")
    parser.add_argument("--peers", type=Path, help="write what the tools installed here name")
    options = parser.parse_known_args()[0]
    os.environ["HALFSTEP_MODE"] = "offline"
    torch.set_num_threads(1)
    loops = [each for each in LOOPS.values() if options.loops in f"{each.name} {each.cause}"]
    alone = [each for each in loops if each.processes == 1]
    if options.peers:
        here = [tool for tool, package in PEERS.items() if find_spec(package)]
        options.peers.write_text(json.dumps({tool: named(tool, alone) for tool in here}))
        return
    rows = {cause: Row() for cause in (*CAUSES, HEALTHY)}
    for loop in loops:
        ours(loop, rows[loop.cause])
    tools = {tool: named(tool, alone) for tool in (MESSAGES, ANOMALY)}
    tools |= peers(loops, options.loops)
    for loop in alone:
        rows[loop.cause].readable += 1
        for tool, found in tools.items():
            read_off(rows[loop.cause], tool, loop, found[loop.name])
    table = list(lines(rows, tools))
    caused = [rows[cause] for cause in CAUSES]
    count, right = sum(row.loops for row in caused), sum(row.named["right"] for row in caused)
    harmful = sum(row.harmful + row.contradictory for row in rows.values())
    false = rows[HEALTHY].named["wrong"]
    different = sum(row.different for row in rows.values())
    best = max(tools, key=lambda tool: sum(row.read[tool] for row in caused))
    readable = sum(row.readable for row in caused)
    report(
        "diagnosis",
        f"right cause first in ≥ {RIGHT_SHARE:.0%}; harmful or contradictory remedies, false "
        "findings on healthy loops, and weights that differ: 0",
        (
            *("cause", "loops", "right first", "partly", "wrong", "none"),
            *("harmful", "contradictory", "bits differ", *TOOLS),
        ),
        table,
        measured=f"{right} of {count} right first; {harmful} harmful or contradictory; {false} of "
        f"{rows[HEALTHY].loops} healthy loops with a false finding; {different} differ",
        peer=f"{best} {sum(row.read[best] for row in caused)} of {readable}",
        passed=count > 0 and right >= RIGHT_SHARE * count and not (harmful or false or different),
    )


if __name__ == "__main__":
    main()
