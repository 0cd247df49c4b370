"""Training loops whose authors had not seen the engine, and their diagnosis.

A case is a script with the cause in `# CAUSE` marks and its facts, measured by bare runs, in a
TOML file beside it. It is run bare, and once more by `halfstep check` in all its steps.
"""

import ast
import contextlib
import hashlib
import io
import logging
import os
import random
import re
import runpy
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import halfstep
from db.health import findings
from halfstep.check.report import Row
from halfstep.check.session import CheckedLoop, CheckedSteps
from halfstep.diagnosis.finding import Finding
from halfstep.session import run_start
from tests.diagnosis.remedies import list_offered
from tests.diagnosis.trial import open_recorded

FOLDER = Path(__file__).parent / "held_out"
HEALTHY = "none"
KEEPS_BF16 = "scaler_without_fp16"  # its fix is bf16, as the script has it
#: The kinds of rows that name each cause.
KINDS = {
    "overflow": {
        *("overflow", "loss_differs", "forward_overflow", "backward_overflow"),
        "validation_overflow",
    },
    "flushed": {
        "rounding",
        "loss_differs",
        "adam_eps_underflow",
        "validation_overflow",
        "state_rounded",
    },
    "undefined": {"undefined", "undefined_forward", "singular_gradient", "rejected"},
    "outside": {"nonfinite_input", "undefined", "nonfinite_inputs", "undefined_forward", "carried"},
    "carried": {
        *("carried", "overflow", "rounding", "undefined", "nonfinite_input"),
        *("forward_overflow", "undefined_forward", "nonfinite_inputs"),
        "gradients_not_cleared",  # in which they are carried
    },
    "silent": {
        *("loss_differs", "gradients_differ", "integers_differ", "stale_weight_cache"),
        *("kept_rounded", "update_lost"),
    },
    "underflow": {"gradients_underflow", "loss_not_scaled"},
    "update lost": {"update_lost"},
    "scale": {"scale_too_large", "scaler_not_restored", "backward_overflow"},
    "diverges": {
        *("overflow", "undefined", "scale_too_large", "nonfinite_without_scaler"),
        *("forward_overflow", "undefined_forward", "backward_overflow"),
        "gradients_edited_after_step",  # a clip without effect
    },
    "scaled gradients": {
        *("scaled_gradients_edited", "scaled_gradients_in_loss", "scaled_gradients_clipped"),
        *("scaled_gradients_compared", "gradients_not_scaled", "scaled_gradients_kept"),
    },
    "call order": {
        *("scaled_gradients_clipped", "scaler_call_order", "loss_not_scaled", "no_inf_checks"),
        *("step_outside_scaler", "gradients_not_cleared", "scaler_not_restored", "no_gradient"),
        *("step_left_out", "schedule_in_skipped_steps", "no_optimizer_step", "zero_gradients"),
        *("gradients_cleared_before_step", "gradients_edited_after_step"),
        "stale_weight_cache",
        *("scaled_gradients_edited", "no_half_operators", "scaler_without_fp16", "calls"),
        "scaled_by_another",
    },
}
#: Texts that a row of a cause that several kinds share must contain.
WORDS = {
    "carried": re.compile(
        "has not been finite since|held NaN when|may come from there|were already not finite"
    ),
    "diverges": re.compile("the training diverge[sd]|it has no effect"),
}
UNKNOWN = {"nonfinite_without_scaler", "nonfinite_buffers"}  # what is seen, not its cause
WITHOUT_LINE = {"underflow", "scale", "diverges", "call order"}


@dataclass(frozen=True)
class Case:
    """A script with its measured facts."""

    path: Path
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """The folder and name of the script."""
        return f"{self.path.parent.name}/{self.path.stem}"

    @property
    def cause(self) -> str:
        """A word of KINDS, or HEALTHY."""
        return str(self.facts["cause"])

    def marks(self) -> set[int]:
        """Return the lines of the statements that are marked as the cause."""
        source = self.path.read_text()
        marked = {n for n, line in enumerate(source.splitlines(), 1) if "# CAUSE" in line}
        spans = [
            (node.lineno, node.end_lineno or node.lineno)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.stmt) and not hasattr(node, "body")
        ]
        around = {n for a, b in spans if marked & set(range(a, b + 1)) for n in range(a, b + 1)}
        return marked | around


@dataclass(frozen=True)
class Ended:
    """A hash of what a script has trained, drawn and printed, and the exception that ended it."""

    state: str
    error: str


@dataclass(frozen=True)
class Judged:
    """How a case was diagnosed.

    named: right, partly (another line, or not first), wrong, silent, or for a healthy one false.
    """

    case: Case
    rows: list[Row]
    named: str
    harmful: set[str]  # remedies that the measured facts contradict
    is_same: bool


@cache
def cases(collection: str) -> list[Case]:
    """Return the cases of a folder."""
    return [
        Case(path.with_suffix(".py"), tomllib.loads(path.read_text()))
        for path in sorted((FOLDER / collection).glob("*.toml"))
    ]


def judge(case: Case) -> Judged:
    """Run a case bare and checked."""
    bare = run(case)
    loop = CheckedLoop(CheckedSteps(steps=0))
    checked = run(case, loop)
    report = loop.report()
    assert not report.errors, report.errors
    rows = report.rows
    faults = [row for row in rows if row.is_fault and row.kind != KEEPS_BF16]
    harmful = {word for row in faults for word in _contradicted(case, row)}
    return Judged(case, rows, named(case, rows), harmful, bare == checked)


def run(case: Case, loop: contextlib.AbstractContextManager[Any] | None = None) -> Ended:
    """Run a script unchanged, or within a checked loop."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    error, scope, printed = "", {}, io.StringIO()
    with (
        patch.dict(os.environ, HALFSTEP_MODE="disabled"),
        patch.object(sys, "argv", [str(case.path)]),
        patch.object(logging.root, "handlers", []),
        patch.dict(logging.root.manager.loggerDict),  # those of a run are not the next one's
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
        loop or contextlib.nullcontext(),
    ):
        warnings.simplefilter("ignore")
        try:
            scope = runpy.run_path(str(case.path), run_name="__main__")
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    torch.set_default_dtype(torch.float32)  # for the next one, where a script has set another
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    digest.update(printed.getvalue().encode())  # the numbers of models within functions
    for module in _modules(scope):
        for tensor in (*module.parameters(), *module.buffers()):
            digest.update(_bytes(tensor))
    return Ended(digest.hexdigest(), error)


def _modules(scope: dict[str, Any]) -> Iterator[nn.Module]:
    """Yield the modules among a script's globals, in the order of their names."""
    for _, value in sorted(scope.items()):
        members = value if isinstance(value, list | tuple) else [value]
        yield from (each for each in members if isinstance(each, nn.Module))


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return flat.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def judge_watched(case: Case) -> Judged:
    """Run a case bare and watched, and judge the findings of its run's page."""
    bare, handles = run(case), []
    with tempfile.TemporaryDirectory(prefix="halfstep-held-out-") as folder:

        def watch(*modules: nn.Module, **options: Any) -> Any:
            options = {"mode": "offline", "folder": folder, **options}
            handles.append(run_start.watch(*modules, **options))
            return handles[-1]

        with patch.object(halfstep, "watch", watch, create=True):
            watched = run(case)
        for handle in handles:
            handle.finish()
        rows = []
        for each in Path(folder).glob("*/run.json"):
            with open_recorded(each.parent) as (session, row):
                found = [each for each in findings.of_run(session, row) if each.cause]
                rows += [_row(case, each) for each in found]
    harmful = {word for row in rows for word in _contradicted(case, row)}
    return Judged(case, rows, named(case, rows), harmful, bare == watched)


def _row(case: Case, finding: Finding) -> Row:
    """Return a finding as a row. A likely cause that is another one is no statement."""
    row = Row(
        kind=finding.cause, is_fault=True, title=finding.title, text=finding.text, fix=finding.fix
    )
    is_statement = finding.is_certain_fault and finding.cause not in UNKNOWN
    return row if is_statement or _names(case, row) else replace(row, is_fault=False)


def named(case: Case, rows: list[Row]) -> str:
    """Return how the rows name the cause of a case."""
    faults = [row for row in rows if row.is_fault]
    if case.cause == HEALTHY:
        return "false" if faults else "right"
    if not faults:
        return "silent"
    fits = [_names(case, row) for row in faults]
    if fits[0] and (case.cause in WITHOUT_LINE or case.marks() & set(_lines(case, faults[0]))):
        return "right"
    return "partly" if any(fits) else "wrong"


def _names(case: Case, row: Row) -> bool:
    is_kind = row.kind in KINDS.get(case.cause, ())
    word = WORDS.get(case.cause)
    return is_kind and (word is None or bool(word.search(row.text)))


def _lines(case: Case, row: Row) -> Iterator[int]:
    """Yield the lines of the script that a row names."""
    if Path(row.file).name == case.path.name:
        yield row.line
    for number in re.findall(rf"\b{re.escape(case.path.name)}:(\d+)", row.text):
        yield int(number)


def _contradicted(case: Case, row: Row) -> Iterator[str]:
    """Yield remedies of a row that would not help by the measured facts."""
    remedies = list_offered(Finding(row.title, f"{row.text} {row.advice}", fix=row.fix))
    facts = {"fp32": "finite_in_fp32", "bf16": "finite_in_bf16"}
    facts |= {"smaller_scale": "smaller_scale_helps"}
    yield from (word for word, fact in facts.items() if word in remedies and not case.facts[fact])
