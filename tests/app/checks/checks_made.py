"""A check's report with a row of each class, and the source that its rows name."""

from typing import Any

from app.checks.checks import to_row
from db.database import Database
from db.runs import check_reports
from db.tables import User
from halfstep.check.report import Report, Row, as_content
from halfstep.telemetry.plain_json import JsonObject

SCRIPT = "train.py"
SOURCE = '''"""Trains a small model. <script>alert("docstring")</script>"""
import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    def forward(self, x):
        rms = x.pow(2).mean(-1, keepdim=True).sqrt()
        return self.weight * x / (rms + 1e-8)  # <b>not bold</b>


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = RMSNorm(width)
        self.wi = nn.Linear(width, 4 * width)
        self.wo = nn.Linear(4 * width, width)

    def forward(self, h):
        return h + self.wo(F.relu(self.wi(self.norm(h))).square())

{more}
TITLE = "<script>document.title = 'run'</script>"
for step, (x, y) in enumerate(loader):
    with torch.autocast("cuda", torch.float16):
        loss = F.cross_entropy(model(x).mT, y)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
'''.replace("{more}", "\n".join(f"SETTING_{number} = {number}" for number in range(40)))
ROUNDING, OVERFLOW, LOSS, CLIP = (
    next(number for number, line in enumerate(SOURCE.splitlines(), 1) if part in line)
    for part in ("1e-8", "square()", "cross_entropy", "clip_grad")
)


def row(kind: str, line: int, **changes: Any) -> Row:
    """Return a row of the script."""
    base: dict[str, Any] = {
        "is_fault": True,
        "title": kind,
        "text": f"{kind} in `x`.",
        "file": SCRIPT,
    }
    return Row(kind=kind, line=line, **base | changes)


def report(*rows: Row, **changes: Any) -> Report:
    """Return a report of 20 steps."""
    base: dict[str, Any] = {"script": SCRIPT, "torch": "2.9.0+cu128", "steps": 20}
    base |= {"unknown_operators": {}, "errors": []}
    return Report(rows=list(rows), **base | changes)


def full_report(**changes: Any) -> Report:
    """Return a report with an overflow, a rounding, a wrong loss, a wrong call and a note."""
    overflow = row(
        "overflow",
        OVERFLOW,
        title="Overflow of fp16",
        text=f"In step 17 `self.wo(F.relu(self.wi(self.norm(h))).square())` ({SCRIPT}:{OVERFLOW}, "
        "decoder.block.1) is 1.59e6, beyond fp16's 65,504; in fp32 this step's loss is 5.179 and "
        "all gradients are finite.",
        advice="Compute it in fp32: under torch.autocast(device, enabled=False), from .float() "
        "inputs. Or use bf16, which has the range.",
        source="self.wo(F.relu(self.wi(self.norm(h))).square())",
        operator="addmm",
        module="decoder.block.1.wo",
        symptom="loss",
        dtype="float16",
        value=1.59e6,
        limit=65504.0,
        loss_fp32=5.179,
        elements=(3, 4096),
        steps=[17, 18],
        count=2,
    )
    rounding = row(
        "rounding",
        ROUNDING,
        title="A value is rounded away in fp16",
        text="In step 1 `rms + 1e-8` is not finite in fp16: a value that is 1e-8 in fp32 becomes "
        "0 by rounding.",
        advice="Compute it in fp32.",
        source="rms + 1e-8",
        module="norm",
        symptom="loss",
        dtype="float16",
        value=1e-8,
        limit=65504.0,
        steps=[9],
        count=1,
    )
    loss = row(
        "loss_differs",
        LOSS,
        title="The loss is finite and wrong",
        text="In 20 steps the loss is far from its value in fp32.",
        source="F.cross_entropy(model(x).mT, y)",
        loss=1.417,
        loss_fp32=1.58,
        step=12,
        steps=list(range(1, 21)),
        count=20,
    )
    clip = row(
        "scaled_gradients_clipped",
        CLIP,
        title="Scaled gradients are clipped",
        text="clip_grad_norm_ is called before scaler.unscale_: the norm is <b>51,446</b>.",
        fix="scaler.unscale_(optimizer)\nclip_grad_norm_(model.parameters(), 1.0)",
        source="torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    )
    note = row(
        "gradients_underflow",
        LOSS,
        is_fault=False,
        title="Gradients underflow",
        text="In 20 steps gradients are 0 in half precision that are not 0 in fp32.",
        share=0.009,
        fits_below=2.0**17,
        steps=list(range(1, 21)),
        count=20,
    )
    return report(overflow, rounding, loss, clip, note, **changes)


def body(made: Report | None = None, **changes: Any) -> JsonObject:
    """Return the body of an upload."""
    content = as_content(full_report() if made is None else made)
    return {"report": content, "sources": {SCRIPT: SOURCE}, "project": ""} | changes


def add_check(database: Database, user: User, made: Report | None = None, **changes: Any) -> int:
    """Store a report with the source of its script; return its id."""
    made = full_report() if made is None else made
    row = to_row(made, changes.pop("sources", {SCRIPT: SOURCE}))
    with database.writing() as session:
        for name, value in {"project": "", "user_id": user.id, **changes}.items():
            setattr(row, name, value)
        return check_reports.add(session, row).id
