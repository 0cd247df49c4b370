"""Result of a precision plan, for scripts, notebooks and the command."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, Literal

from halfstep.number_formats import number, percent
from halfstep.number_formats import scale as scale_text
from halfstep.precision_lab.suggestions import LOSS
from halfstep.telemetry.plain_json import JsonObject, json_safe

FP32_COST = 8.0
HTML_ROWS = 10
NAMES_SHOWN = 6
POINT_COLUMNS = ("Precision", "Modules", "Error", "Cosine", "Time", "Memory", "Loss scale")
MODULE_COLUMNS = ("Module", "Type", "Error", "Operations", "Memory")


@dataclass(frozen=True, kw_only=True)
class PlanPoint:
    """A mix of precisions, as a run can be configured, and what was measured with it."""

    precision: Literal["fp16", "bf16", "fp32"]
    fp32: list[str]  # names or patterns of modules
    bf16: list[str]
    is_loss_in_fp32: bool  # which needs a change of the loss function
    init_scale: float | None  # with fp16: the largest that was tried without an overflow
    error: float  # relative L2 error of the whole gradient, the worst of all batches
    by_weights: dict[str, float]  # the same error by the weights that it was measured with
    cosine: float  # the smallest of all batches
    is_within: bool  # the bounds
    time: float  # of a forward and a backward pass, relative to fp32
    memory: float  # of the results of a forward pass, relative to fp32
    ms: float | None  # of a forward and a backward pass; None: not measured

    @property
    def named(self) -> list[str]:
        """The modules of a precision of their own; (loss) for the loss function."""
        return [*self.fp32, *self.bf16, *([LOSS] if self.is_loss_in_fp32 else [])]

    @property
    def rank(self) -> tuple[float, ...]:
        """The order of preference: within the bounds, then time, fewest modules, least error."""
        if self.is_within:
            return 0, self.time, len(self.named), self.error
        return 1, self.error

    @property
    def config(self) -> dict[str, Any]:
        """The settings of a run. Those of the loss function are not among them."""
        config: JsonObject = {"precision": self.precision}
        modules = {"fp32": self.fp32, "bf16": self.bf16}
        if any(modules.values()):
            config["modules"] = {name: patterns for name, patterns in modules.items() if patterns}
        if self.init_scale is not None:
            config["scaler"] = {"init_scale": self.init_scale}
        if self.precision == "fp32":
            config["training"] = {"tf32": False}  # the reference has no TF32
        return config

    @property
    def modules(self) -> str:
        """The modules and their precisions, for a sentence: "a.norm in fp32"."""
        parts = [
            f"{shorten([_name_in_words(name) for name in names])} in {precision}"
            for names, precision in (
                ([*self.fp32, *([LOSS] if self.is_loss_in_fp32 else [])], "fp32"),
                (self.bf16, "bf16"),
            )
            if names
        ]
        return " and ".join(parts)

    def __str__(self) -> str:
        return (
            f"{self.precision} with {self.modules}"
            if self.named
            else f"{self.precision} everywhere"
        )


def _name_in_words(name: str) -> str:
    """Return the name of a module; one in a Sequential is a number, which needs the noun."""
    return f"module {name}" if name.isdigit() else name


@dataclass(frozen=True, kw_only=True)
class PlanModule:
    """A module, or several of one type and role: what they cost, and the error that they cause."""

    role: (
        str  # blocks.*.norm: a name with * for numbers. (loss): the loss function's own operations
    )
    names: list[str]
    type: str
    #: Relative error of the whole gradient if only their own operations are in low precision, by
    #: precision. Measured on the batch with the largest error.
    errors: dict[str, float]
    operations: float  # share of the model's
    memory: float  # share of the bytes of all results, in fp32
    ms: float | None  # what fp32 adds to a forward pass; None: not measured


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """The fastest mixes of precisions within a bound of the gradient's error."""

    max_error: float
    min_cosine: float
    batches: int
    #: What the times are: of CUDA events, or counted operations.
    cost: Literal["measured", "operations"]
    device: str
    #: How much longer an operation takes in fp32; None: times are measured.
    fp32_cost: float | None
    #: Standard deviation of the batches' gradients, relative to the length of their mean.
    batch_deviation: float | None
    points: list[PlanPoint]  # the Pareto front, the fastest first
    of_precision: dict[str, PlanPoint]  # the best of fp16 and of bf16
    modules: list[PlanModule]  # the largest error first
    notes: list[str] = field(default_factory=list)

    @property
    def best(self) -> PlanPoint:
        """The fastest point within the bounds; of equally fast ones that with fewest modules.

        Without any within the bounds the one of least error.
        """
        return min(self.points, key=lambda point: point.rank)

    def sentences(self) -> list[str]:
        """Return the result in words."""
        times = (
            f"measured on {self.device}"
            if self.cost == "measured"
            else f"predicted for a GPU by counted operations, not measured on {self.device}"
        )
        best = self.best
        where = f"on {self.device}" if self.cost == "measured" else "on a GPU, as predicted"
        lines = [
            f"Fastest within the bounds {where}: {best}."
            if best.is_within
            else f"No mix is within the bounds, fp32 included. Least error: {best}."
        ]
        for precision, point in self.of_precision.items():
            lines.append(f"{precision}: {_of_precision(point)}")
        lines += self.notes
        lines.append(
            f"Times, relative to fp32, are {times}; errors are those of the whole gradient, the "
            f"worst of {self.batches} batches."
        )
        if self.batch_deviation is not None:
            lines.append(
                f"For comparison, the standard deviation between gradients of different batches is "
                f"{number(self.batch_deviation)} of their mean's norm."
            )
        return lines

    def as_dict(self) -> JsonObject:
        """Return the plan as plain values, for JSON; best: the index of the best point.

        Numbers that are not finite are texts.
        """
        values = asdict(self)
        of_precision = values["of_precision"]
        for own, point in (
            *zip(values["points"], self.points, strict=True),
            *((of_precision[precision], point) for precision, point in self.of_precision.items()),
        ):
            own |= {"label": str(point), "config": point.config}
        best = self.points.index(self.best)
        plain: JsonObject = json_safe(values | {"best": best, "sentences": self.sentences()})
        return plain

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def __repr__(self) -> str:
        return f"<PrecisionPlan {self.best}: {len(self.points)} points>"

    def _repr_html_(self) -> str:
        """Return the sentences, the front and the modules as tables, for notebooks."""
        text = "".join(f"<p>{escape(line)}</p>" for line in self.sentences())
        points = _table(POINT_COLUMNS, [point_cells(point) for point in self.points])
        modules = _table(
            MODULE_COLUMNS,
            [module_cells(module) for module in self.modules[:HTML_ROWS]],
        )
        return text + points + modules


def point_cells(point: PlanPoint) -> tuple[str, ...]:
    """Return the cells of a point's row; see POINT_COLUMNS."""
    return (
        point.precision,
        point.modules or "–",
        number(point.error),
        number(point.cosine, 6),
        number(point.time, 3),
        number(point.memory, 3),
        scale_text(point.init_scale),
    )


def module_cells(module: PlanModule) -> tuple[str, ...]:
    """Return the cells of a module's row."""
    errors = ", ".join(f"{number(error)} {name}" for name, error in module.errors.items())
    shares = map(percent, (module.operations, module.memory))
    count = f" × {len(module.names)}" if len(module.names) > 1 else ""
    return module.role, f"{module.type}{count}", errors, *shares


def shorten(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _of_precision(point: PlanPoint) -> str:
    numbers = f"gradient error {number(point.error)}, cosine {number(point.cosine, 6)}"
    if len(point.by_weights) > 1:
        of = (f"{number(error)} with {weights}" for weights, error in point.by_weights.items())
        numbers += f"; {', '.join(of)}"
    if not point.is_within:
        what = f"with {point.modules}" if point.named else "everywhere"
        return f"no mix is within the bounds; the best is {what}: {numbers}."
    if not point.named:
        return f"everywhere ({numbers})."
    change = (
        f" {LOSS} is the loss function: convert what it gets by .float(), outside of autocast."
        if point.is_loss_in_fp32
        else ""
    )
    return f"with {point.modules} ({numbers}).{change}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
