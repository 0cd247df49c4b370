"""Events of a training in its spool: one class per event, with the bounds of every field.

An event is one JSON object; its field "event" has the tag of its class. halfstep.telemetry.
event_codec encodes and decodes them; decoding checks the bounds, so that nothing reaches the
database that a column or a page cannot hold. Unknown fields, as of a later version, are ignored.

`step` is the step to which the event belongs, from 1; 0: before the first. A field that is UNSET
is left out of the JSON.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, field

from halfstep.artifacts import names
from halfstep.diagnosis.defect import Defect
from halfstep.telemetry.event_fields import (
    TEXT_CHARACTERS,
    AlertLevel,
    ArtifactAlias,
    ArtifactName,
    Count,
    Direction,
    DType,
    ElapsedMs,
    FileKind,
    FileName,
    Name,
    Number,
    OptimizerName,
    Part,
    RequestId,
    Scale,
    Seconds,
    Sha256,
    SinceStep,
    StepNumber,
    Stream,
    Text,
    text,
    whole,
)
from halfstep.telemetry.plain_json import LARGEST_WHOLE, JsonObject

MOST_WORDS, PATH_CHARACTERS = 1000, 4096  # arguments of a command; one argument or folder
SOURCE_BYTES = 256_000  # of a stored source, patch or list of packages
EXPONENTS = (-1100, 1100)  # includes those of every float format
BINS = 4096
MOST_AXES = 100
MOST_TAGS = 50
PRECISION_ROWS = 10_000
PLAN_POINTS, PLAN_MODULES, PLAN_PATTERNS, PLAN_WEIGHTS = 200, 1000, 32, 8
MOST_DEFECTS = 20  # of a step
SAMPLE_SECONDS = 2.0  # from one sample of a device to the next
#: One event is one database row, which a page reads whole.
EVENT_BYTES = 16 * 2**20


def _in_folder(folder: str) -> Meta:
    pattern = rf"\A{folder}(/(?!\.{{1,2}}(/|\Z))[^/]+)+\Z"
    return Meta(pattern=pattern, description=f"a file in the run's folder {folder}")


class Event(Struct, frozen=True, kw_only=True, tag_field="event"):
    """Base class of all events."""

    @property
    def tag(self) -> str:
        """The event's kind: the field "event" of its JSON."""
        return str(self.__struct_config__.tag)


class StepEvent(Event, frozen=True, kw_only=True):
    """Base class of the events that belong to a step."""

    step: SinceStep


# ---- Scaler and metrics ----------------------------------------------------------------------


class Culprit(Part, frozen=True, kw_only=True):
    """A parameter whose gradient is not finite."""

    name: Text
    # Elements of the gradient. UNSET on a GPU: the replay counts them.
    inf: Count | UnsetType = UNSET
    nan: Count | UnsetType = UNSET


class Scaler(StepEvent, frozen=True, kw_only=True, tag="scaler"):
    """A change of the loss scale, or a skip of one optimizer."""

    step: StepNumber
    kind: Literal["skip", "growth", "backoff", "set"]  # set: by hand, before this step
    optimizer: OptimizerName | None  # the skipped one; else None
    scale_before: Scale
    scale_after: Scale
    culprits: list[Culprit] = []  # of a skip, in forward order
    loss_nonfinite: bool = False


class Metric(StepEvent, frozen=True, kw_only=True, tag="metric"):
    """A logged number."""

    name: Name
    value: Number
    elapsed_ms: ElapsedMs


class ScalerReplaced(StepEvent, frozen=True, kw_only=True, tag="scaler_replaced"):
    """A new scaler, whose state was not restored."""

    step: StepNumber
    scale_before: Scale  # of the scaler before
    scale_after: Scale
    count: Count  # replacements so far


class ScalerLeftBehind(StepEvent, frozen=True, kw_only=True, tag="scaler_left_behind"):
    """An optimizer whose state was loaded, with a new scaler whose state was not, and a skip."""

    step: StepNumber  # the first one with them
    optimizer: Text
    scale: Scale
    skipped: StepNumber  # the first skip after it


class RoundedState(StepEvent, frozen=True, kw_only=True, tag="rounded_state"):
    """Second moments that are 0 in a loaded state of Adam, where the first ones are not."""

    step: StepNumber  # the first one with them
    optimizer: Text
    count: Count  # elements
    of: Count  # with a first moment


# ---- Course of the training ------------------------------------------------------------------


class Resumed(StepEvent, frozen=True, kw_only=True, tag="resumed"):
    """The attempt continues after a step."""

    exact: bool  # its steps are bit-identical to those that it repeats
    notes: list[Text]  # why not


class Configured(Event, frozen=True, kw_only=True, tag="configured"):
    """Configuration that the script of a queued command has set; the last one counts."""

    config: JsonObject  # plain JSON of at most CONFIG_CHARACTERS


class Labels(Part, frozen=True, kw_only=True, omit_defaults=True):
    """Labels of a run, as its script knows them."""

    name: Name = ""
    note: Text = ""
    tags: Annotated[list[Name], Meta(max_length=MOST_TAGS)] = field(default_factory=list)


class Described(Event, frozen=True, kw_only=True, tag="described"):
    """What the script of a run reports of it besides its configuration; UNSET: as before.

    before: the labels that the script replaces. What a user has changed meanwhile stays.
    """

    name: Name | UnsetType = UNSET
    note: Text | UnsetType = UNSET  # Markdown
    tags: Annotated[list[Name], Meta(max_length=MOST_TAGS)] | UnsetType = UNSET
    before: Labels = Labels()
    step_metrics: (
        Annotated[
            dict[Name, Name],
            Meta(max_length=MOST_AXES, description=f"at most {MOST_AXES} names"),
        ]
        | UnsetType
    ) = UNSET  # x axes, by pattern of the metrics' names


class Alert(Event, frozen=True, kw_only=True, tag="alert"):
    """An alert to the owner of the run, which the script has sent."""

    title: Name
    text: Text
    level: AlertLevel


class Length(StepEvent, frozen=True, kw_only=True, tag="length"):
    """Number of steps of the run, computed from its epochs; step 0."""

    steps: StepNumber  # that the run will attempt


class Workload(StepEvent, frozen=True, kw_only=True, tag="workload"):
    """Work of a step, over all devices; step 0."""

    examples: Count  # per step
    tokens: Count | None  # per step
    flops: Number | None  # per step
    peak_flops: Number | None  # of these devices per second, in the run's precision
    device: Text


class Retry(StepEvent, frozen=True, kw_only=True, tag="retry"):
    """The second attempt, in fp32, at a skipped step."""

    step: StepNumber
    loss: Number
    grad_norm: Number
    applied: bool


class RequestDone(StepEvent, frozen=True, kw_only=True, tag="obeyed"):
    """A requested scale was set, or a requested replay was made."""

    request: RequestId


class Spike(StepEvent, frozen=True, kw_only=True, tag="spike"):
    """A sudden rise of the loss."""

    step: StepNumber
    loss: Number
    z: Number  # the rise in robust standard deviations
    # Step that the run was rolled back to for the spike; the event then follows the rollback.
    rolled_back_to: SinceStep | UnsetType = UNSET


class RolledBack(StepEvent, frozen=True, kw_only=True, tag="rolled_back"):
    """The run went back to `step` for a spike; earlier records of later steps no longer count."""

    from_step: StepNumber  # the last step before the rollback
    spike: StepNumber  # step of the spike
    loss: Number  # of the spike
    z: Number
    examples: Count  # left out from now on
    rollbacks: Count  # so far


class LeftOut(StepEvent, frozen=True, kw_only=True, tag="left_out"):
    """A configured diagnosis, or way to train, that this run cannot have."""

    diagnosis: Name
    reason: Text


class FailedDiagnosis(StepEvent, frozen=True, kw_only=True, tag="failed_diagnosis"):
    """A diagnosis that raised, and is no longer called."""

    diagnosis: Name
    error: Text


# ---- Files -----------------------------------------------------------------------------------


class CheckpointFile(Part, frozen=True, kw_only=True):
    """One file of a checkpoint."""

    #: "checkpoint"; of a sharded state also "shard.0", "shard.1", … and "shard.metadata";
    #: "weights", or "weights.<module>" of several modules; "ema", likewise, if averaged.
    kind: FileKind
    path: Annotated[str, _in_folder("checkpoints"), text(TEXT_CHARACTERS)]
    size_bytes: Count
    sha256: Sha256


class Checkpoint(StepEvent, frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint of the training was written."""

    reason: Name
    request: RequestId | UnsetType | None = UNSET  # the user's request that it answers
    # Only in checkpoints of Halfstep's own loop.
    write_seconds: Seconds | UnsetType = UNSET  # of the writer thread, to the last fsync
    stall_seconds: Seconds | UnsetType = UNSET  # for which the loop was blocked
    files: list[CheckpointFile]
    upload: bool | UnsetType = UNSET  # whether the uploader of a watched run sends the files

    @property
    def is_timed(self) -> bool:
        """Whether it was measured what the checkpoint cost."""
        return self.write_seconds is not UNSET and self.stall_seconds is not UNSET


class Artifact(StepEvent, frozen=True, kw_only=True, tag="artifact"):
    """A file that the training wrote."""

    name: FileName
    path: Annotated[str, _in_folder("artifacts"), text(TEXT_CHARACTERS)]
    size_bytes: Count
    sha256: Sha256


class ArtifactFile(Part, frozen=True, kw_only=True):
    """A file of an artifact's version."""

    #: Path within the version.
    name: Annotated[
        str,
        Meta(
            pattern=names.ENTRY,
            max_length=names.ENTRY_CHARACTERS,
            description=names.ENTRY_ALLOWED,
        ),
    ]
    path: Annotated[str, _in_folder("blobs"), text(TEXT_CHARACTERS)]
    size_bytes: Count
    sha256: Sha256


class SavedArtifact(Event, frozen=True, kw_only=True, tag="saved_artifact"):
    """A version of a named artifact, which the script saved."""

    name: ArtifactName
    type: ArtifactName
    digest: Sha256  # halfstep.artifacts.manifest.digest_of
    is_file: bool  # one file, saved by its path; else a folder
    aliases: Annotated[
        list[ArtifactAlias],
        Meta(max_length=names.MOST_ALIASES, description=f"at most {names.MOST_ALIASES} aliases"),
    ] = []
    files: Annotated[
        list[ArtifactFile],
        Meta(
            min_length=1, max_length=names.MOST_FILES, description=f"1 to {names.MOST_FILES} files"
        ),
    ]


class UsedArtifact(Event, frozen=True, kw_only=True, tag="used_artifact"):
    """A version of a named artifact, which the script used."""

    project: Text
    name: ArtifactName
    digest: Sha256


class LogPart(Event, frozen=True, kw_only=True, tag="log_part"):
    """A complete, compressed part of the log."""

    path: Annotated[str, _in_folder("log"), text(TEXT_CHARACTERS)]
    size_bytes: Count
    sha256: Sha256


class Weights(StepEvent, frozen=True, kw_only=True, tag="weights"):
    """Initial weights from a file; step 0. See trainer/checkpoints/initial_weights.py."""

    source: Text  # path of the file
    loaded: Count  # of `count` weights of the recipe's modules
    count: Count
    # The first names, and the number of all.
    missing: list[Text]
    unexpected: list[Text]
    mismatched: list[Text]
    missing_count: Count
    unexpected_count: Count
    mismatched_count: Count


# ---- Output and machine ----------------------------------------------------------------------


class Line(Event, frozen=True, kw_only=True, tag="line"):
    """A line that a watched script printed."""

    time: Number  # seconds since 1970
    stream: Stream
    text: Text | UnsetType = UNSET
    lines: Count | UnsetType = UNSET  # in place of text: number of lines that only the log has


class Sample(Event, frozen=True, kw_only=True, tag="sample"):
    """Utilization of a device or of the machine; None if it is not reported."""

    elapsed_ms: ElapsedMs
    #: -1: the machine; -2, -3, …: rank 1, 2, … of a distributed training.
    device: Annotated[int, whole(-10_000, 10_000)]
    utilization: Number | None  # 0 to 1
    memory_bytes: Count | None
    power_watts: Number | None
    temperature_celsius: Number | None
    # Of the machine itself only. Memory of the script with its child processes.
    process_memory_bytes: Count | UnsetType | None = UNSET
    # Read and written, sent and received, per second since the last sample.
    disk_bytes_per_second: Number | UnsetType | None = UNSET
    network_bytes_per_second: Number | UnsetType | None = UNSET


# ---- Measurements ----------------------------------------------------------------------------


class Shapes(StepEvent, frozen=True, kw_only=True, tag="shapes"):
    """Sizes unsuitable for tensor cores; step 0."""

    share: Number  # of the weights that are in such layers
    count: Count  # of such layers
    layers: list[Text]  # the largest, as text
    batch_size: Count | None  # None if suitable


class HistogramModule(Part, frozen=True, kw_only=True):
    """Exponents of one module's gradients, times the scale; see halfstep/watching/exponents.py."""

    name: Text
    lowest_exponent: Annotated[int, whole(*EXPONENTS)]  # of the first count
    # Elements by exponent, ascending.
    counts: Annotated[
        list[Count],
        Meta(
            max_length=BINS,
            description=f"at most {BINS} whole numbers from 0 to {LARGEST_WHOLE}",
        ),
    ]
    zeros: Count
    nonfinite: Count
    underflow: Number  # share of the elements that half precision rounds to 0
    near_overflow: Number  # share within a factor of its largest number


class Histogram(StepEvent, frozen=True, kw_only=True, tag="histogram"):
    """Exponents of the gradients by module."""

    step: StepNumber
    scale: Scale
    modules: list[HistogramModule]


class HeadroomModule(Part, frozen=True, kw_only=True):
    """Magnitudes of one module; see halfstep/watching/headroom.py."""

    name: Text
    activation: Number  # largest magnitude of its output, in dtype
    gradient: Number | None  # largest magnitude of the output's gradient, times the scale
    # The smallest magnitudes other than 0, if measured.
    smallest_activation: Number | UnsetType | None = UNSET
    smallest_gradient: Number | UnsetType | None = UNSET
    dtype: Text | UnsetType | None = UNSET  # of the output


class Headroom(StepEvent, frozen=True, kw_only=True, tag="headroom"):
    """Largest and smallest activations and gradients by module."""

    step: StepNumber
    scale: Scale
    modules: list[HeadroomModule]


class Fp8Module(Part, frozen=True, kw_only=True):
    """Ranges of one linear layer in fp8; see trainer/diagnosis/fp8_ranges.py."""

    name: Text
    # Largest magnitudes of the cast tensors.
    activation: Number | None
    weight: Number | None
    gradient: Number | None
    # Shares of the elements other than 0 that become 0.
    activation_underflow: Number | None
    weight_underflow: Number | None
    gradient_underflow: Number | None


class Fp8(StepEvent, frozen=True, kw_only=True, tag="fp8"):
    """Ranges of linear layers in fp8."""

    step: StepNumber
    modules: list[Fp8Module]


class LayerNorms(StepEvent, frozen=True, kw_only=True, tag="layer_norms"):
    """L2 norm of each layer's gradients, unscaled, before the clip."""

    step: StepNumber
    layers: list[Text]
    norms: list[Number]  # one per layer


class Uncalled(StepEvent, frozen=True, kw_only=True, tag="uncalled"):
    """Modules that a setting names and that the first step did not call."""

    step: StepNumber
    modules: list[Text]


class UpdatedModule(Part, frozen=True, kw_only=True):
    """bf16 weights of one module; see trainer/diagnosis/lost_updates.py."""

    name: Text
    wanted: Count  # weights with a gradient
    lost: Count  # of these, unchanged by the step
    saved: Count | UnsetType | None = UNSET  # changed only because of stochastic rounding


class Updates(StepEvent, frozen=True, kw_only=True, tag="updates"):
    """bf16 weights that a step did not change."""

    step: StepNumber
    modules: list[UpdatedModule]


_PrecisionTexts: TypeAlias = Annotated[
    list[Text], Meta(max_length=PRECISION_ROWS, description=f"at most {PRECISION_ROWS} texts")
]


class PrecisionRow(Part, frozen=True, kw_only=True):
    """Errors of one module call or parameter; see halfstep/precision_lab/report.py."""

    name: Text
    type: Text  # the module's class
    call: Count  # from 1: a module may be called several times; of a parameter 0
    #: Its results, the gradients of its inputs, or the gradient of a parameter.
    direction: Literal["forward", "backward", "parameter"]
    dtype: Text  # of the first result in low precision; of a parameter, of modules that use it
    elements: Count
    # Against the reference.
    error: Number  # L2 norm of the difference over that of the reference
    largest: Number  # largest difference over the reference's root mean square
    cosine: Number  # NaN where one of both is all zero or not finite
    flushed: Number  # share of the elements that became 0
    saturated: Number  # share at the largest number of the format or beyond
    bits: Number  # effective bits of the mantissa
    # Parts of the error; None if they are unknown.
    local: Number | None  # of the module's own operations on the reference's inputs
    inherited: Number | None  # the rest
    local_flushed: Number | None
    local_saturated: Number | None
    # Local error that stays if the module computes in fp32; None: not measured, as below the noise.
    local_fp32: Number | None
    used_by: _PrecisionTexts = field(default_factory=list)  # of a parameter: modules that use it
    unknown: Text | None = None  # why the local error is unknown


_PlanErrors: TypeAlias = Annotated[
    dict[Text, Number],
    Meta(max_length=PLAN_WEIGHTS, description=f"at most {PLAN_WEIGHTS} numbers"),
]
_PlanNumber: TypeAlias = Annotated[float, Meta(ge=0, description="a number of at least 0")]


class PlanModule(Part, frozen=True, kw_only=True):
    """Modules of one type and role: what they cost, and the error that they cause."""

    role: Text
    names: _PrecisionTexts
    type: Text
    errors: _PlanErrors
    operations: _PlanNumber
    memory: _PlanNumber
    ms: Number | None


class PrecisionDiff(StepEvent, frozen=True, kw_only=True, tag="precision_diff"):
    """One batch in two precisions, compared module by module, in the order of the calls."""

    dtype: Literal["float16", "bfloat16"]
    reference: Literal["float32", "float64"]
    scale: Scale
    loss: Number
    reference_loss: Number
    # Of the gradient of all parameters together.
    error: Number
    cosine: Number
    suggested: _PrecisionTexts  # modules that should stay in fp32
    suggested_error: Number | None = None  # `error` with these in fp32, measured
    notes: _PrecisionTexts = []
    #: Modules by the error of the gradient that each causes alone; empty: not measured.
    causes: Annotated[
        list[PlanModule],
        Meta(max_length=PLAN_MODULES, description=f"at most {PLAN_MODULES} modules"),
    ] = []
    rows: Annotated[
        list[PrecisionRow],
        Meta(max_length=PRECISION_ROWS, description=f"at most {PRECISION_ROWS} rows"),
    ]


_PlanPatterns: TypeAlias = Annotated[
    list[Text],
    Meta(max_length=PLAN_PATTERNS, description=f"at most {PLAN_PATTERNS} names or patterns"),
]


class PlanPoint(Part, frozen=True, kw_only=True):
    """A mix of precisions; see halfstep/precision_lab/plan_result.py."""

    precision: Literal["fp16", "bf16", "fp32"]
    fp32: _PlanPatterns
    bf16: _PlanPatterns
    is_loss_in_fp32: bool
    init_scale: _PlanNumber | None
    error: Number
    by_weights: _PlanErrors
    cosine: Number
    is_within: bool
    time: _PlanNumber
    memory: _PlanNumber
    ms: _PlanNumber | None


class PrecisionPlan(StepEvent, frozen=True, kw_only=True, tag="precision_plan"):
    """The fastest mixes of precisions within a bound of the gradient's error."""

    max_error: Number
    min_cosine: Number
    batches: Count
    cost: Literal["measured", "operations"]
    device: Text
    fp32_cost: _PlanNumber | None
    batch_deviation: Number | None
    points: Annotated[
        list[PlanPoint],
        Meta(min_length=1, max_length=PLAN_POINTS, description=f"1 to {PLAN_POINTS} points"),
    ]
    of_precision: Annotated[dict[Text, PlanPoint], Meta(max_length=2, description="at most 2")]
    modules: Annotated[
        list[PlanModule],
        Meta(max_length=PLAN_MODULES, description=f"at most {PLAN_MODULES} modules"),
    ]
    notes: _PrecisionTexts = []


class Precision(StepEvent, frozen=True, kw_only=True, tag="precision"):
    """dtype of most matrix products and convolutions of a watched loop."""

    dtype: DType


# ---- Evidence --------------------------------------------------------------------------------


class ReplayCulprit(Part, frozen=True, kw_only=True):
    """A parameter whose gradient is not finite in the replay."""

    optimizer: OptimizerName
    name: Text
    inf: Count  # elements
    nan: Count


class Replay(StepEvent, frozen=True, kw_only=True, tag="replay"):
    """A step attempted again to find its first value that is not finite."""

    step: StepNumber
    exact: bool  # repeated bit by bit
    notes: list[Text]  # why not
    requested: bool  # by a user
    scale: Scale
    found: bool  # the operation that made the first value that is not finite
    module: Text | None
    direction: Direction | None
    operation: Text | None
    # If backward; None since a replay measures a defect.
    kind: Literal["overflow", "singular", "hidden", "compiled"] | UnsetType | None = UNSET
    dtype: Text | None  # of the operation's result
    largest_input: Number | None  # magnitude
    limit: Number | None  # largest finite number of dtype
    loss_nonfinite: bool
    culprits: list[ReplayCulprit] | UnsetType = UNSET
    defect: Defect | UnsetType | None = UNSET  # the first one, measured with shadows


class NonfiniteBuffers(StepEvent, frozen=True, kw_only=True, tag="poison"):
    """Buffers with an inf or a NaN since the skip of that step; each is reported once."""

    step: StepNumber
    count: Count
    buffers: list[Text]  # the first of many
    # Seen after the last step of a watched script, which may not be where it happened.
    at_end: bool | UnsetType | None = UNSET


class Schedule(StepEvent, frozen=True, kw_only=True, tag="schedule"):
    """The learning-rate schedule advanced in skipped steps; see halfstep/evidence/schedule.py."""

    advanced: Count  # of the skipped steps, those in which the schedule advanced
    skipped: Count  # so far
    # Class whose steps were counted; None if only the rates show it.
    scheduler: Text | UnsetType | None = UNSET


class Origin(StepEvent, frozen=True, kw_only=True, tag="origin"):
    """First value that is not finite in an observed step, of scripts before the armed steps."""

    step: StepNumber
    scale: Scale
    direction: Direction
    # forward: "inputs", "weights" or "inside" of module, "outside" of all modules.
    # backward: "overflow" of half precision, "singular" gradient, "hidden" in an activation,
    # "elsewhere" than in this process's graph, "compiled" into one node, "unobserved" in a graph
    # with more nodes than are observed. forward, too: "unobserved" in a step that was not examined.
    kind: Literal[
        "overflow",
        "singular",
        "hidden",
        "compiled",
        "elsewhere",
        "unobserved",
        "inputs",
        "weights",
        "inside",
        "outside",
    ]
    operation: Text | None
    dtype: Text | None
    module: Text | None
    source: Text | None  # file, line and function
    # Of the module, if its output was the first; UNSET before version 0.1.
    largest_weight: Number | UnsetType | None = UNSET
    largest_input: Number | UnsetType | None = UNSET  # of its first input
    # That was NaN, and the module has several operations: one of them may not be defined.
    may_be_undefined: bool | UnsetType = UNSET


class ShadowStep(StepEvent, frozen=True, kw_only=True, tag="shadow_step"):
    """Defects of an armed step; see halfstep/shadow/armed_steps.py."""

    step: StepNumber
    armed: Count  # armed steps so far
    defects: Annotated[list[Defect], Meta(max_length=MOST_DEFECTS)]


class BadInput(Part, frozen=True, kw_only=True):
    """A variable of the loop."""

    name: Text
    inf: Count  # elements
    nan: Count


class BadInputs(StepEvent, frozen=True, kw_only=True, tag="bad_inputs"):
    """The loop's variables that are not finite at a nonfinite loss."""

    inputs: list[BadInput]


class FirstNonfinite(StepEvent, frozen=True, kw_only=True, tag="first_nonfinite"):
    """The first nonfinite step of a loop without a scaler."""

    step: StepNumber
    loss_nonfinite: bool
    culprits: list[Culprit]
    finite: Count  # finite steps before it


class DirectStep(StepEvent, frozen=True, kw_only=True, tag="direct_step"):
    """Steps of an optimizer without its scaler."""

    count: Count
    optimizer: Text
    is_scaled: bool  # its gradients were multiplied by the scale


class NotStepped(StepEvent, frozen=True, kw_only=True, tag="not_stepped"):
    """Updates of the scaler without a step."""

    step: StepNumber
    count: Count


class GradientsDropped(StepEvent, frozen=True, kw_only=True, tag="gradients_dropped"):
    """Gradients of scaled losses that the loop cleared without a step of any optimizer."""

    count: Count  # in a row, since the step before
    scale: Scale


class MixedScales(StepEvent, frozen=True, kw_only=True, tag="mixed_scales"):
    """Steps with gradients of passes between which an update has changed the loss scale."""

    count: Count
    optimizer: Text


class UnscaledLoss(StepEvent, frozen=True, kw_only=True, tag="unscaled_loss"):
    """Steps of a scaler with gradients of a loss that was not multiplied by the scale."""

    count: Count
    optimizer: Text


class ScaledClip(StepEvent, frozen=True, kw_only=True, tag="scaled_clip"):
    """Clips of gradients multiplied by the scale."""

    step: StepNumber
    count: Count
    optimizer: Text
    max_norm: Number | None


class BoundedNorms(StepEvent, frozen=True, kw_only=True, tag="bounded_norms"):
    """The norm times the scale had one value in all of the latest steps."""

    step: StepNumber
    steps: Count
    norm: Number


class Uncleared(StepEvent, frozen=True, kw_only=True, tag="uncleared"):
    """Backward passes before which the last skip's nonfinite gradients were not cleared."""

    step: StepNumber
    count: Count
    optimizer: Text


class AccumulatedGradients(StepEvent, frozen=True, kw_only=True, tag="accumulated_gradients"):
    """Steps that each applied gradients including those of the step before."""

    step: StepNumber
    steps: Count  # the latest ones
    optimizer: Text


class NoGradient(StepEvent, frozen=True, kw_only=True, tag="no_gradient"):
    """Parameters without a gradient so far."""

    optimizer: Text
    parameters: list[Text]  # the first of many
    count: Count
    of: Count  # parameters of the optimizer that require a gradient
    steps: Count


class OutsideOptimizers(StepEvent, frozen=True, kw_only=True, tag="outside_optimizers"):
    """Parameters that have gradients, and that no optimizer has that stepped so far."""

    count: Count  # 0: none of those that were reported before
    parameters: list[Text]  # the first of many


class NoStep(StepEvent, frozen=True, kw_only=True, tag="no_step"):
    """Backward passes without a step of any optimizer."""

    passes: Count
    is_by_hand: bool = False  # the loop changes its weights itself


class NoInfChecks(StepEvent, frozen=True, kw_only=True, tag="no_inf_checks"):
    """A scaler refused optimizers without gradients."""

    method: Text  # of the scaler
    optimizers: list[Text]
    error: Text


class CallOrder(StepEvent, frozen=True, kw_only=True, tag="call_order"):
    """A scaler rejected a call that came too early, too late or twice."""

    method: Text  # of the scaler
    error: Text


class Fp16Gradients(StepEvent, frozen=True, kw_only=True, tag="fp16_gradients"):
    """A scaler refused gradients of type float16."""

    count: Count
    parameters: list[Text]  # the first of many
    error: Text


class AdamEps(StepEvent, frozen=True, kw_only=True, tag="adam_eps"):
    """eps of an optimizer is 0 in the dtype of its parameters."""

    optimizer: Text
    eps: Number
    count: Count  # of such parameters


class NonfiniteGradients(StepEvent, frozen=True, kw_only=True, tag="nonfinite"):
    """Parameters of the first step without a scaler that has a nonfinite norm.

    Only within a process: halfstep.evidence turns it into FirstNonfinite.
    """

    culprits: list[Culprit]


#: Events that name files, which are sent or stored before the event is recorded.
FileEvent: TypeAlias = Artifact | Checkpoint | LogPart | SavedArtifact
#: What names one file: its path in the run's folder, size and SHA-256.
File: TypeAlias = Artifact | CheckpointFile | LogPart | ArtifactFile
#: Every class of an event, by its tag.
KINDS: dict[str, type[Event]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (
        *(Scaler, Metric, ScalerReplaced, ScalerLeftBehind, RoundedState),
        *(Resumed, Configured, Described, Alert),
        *(Length, Workload, Retry, RequestDone, Spike, RolledBack),
        *(LeftOut, FailedDiagnosis),
        *(Checkpoint, Artifact, SavedArtifact, UsedArtifact, LogPart, Weights, Line, Sample),
        *(
            Shapes,
            Histogram,
            Headroom,
            Fp8,
            LayerNorms,
            Uncalled,
            Updates,
            Precision,
            PrecisionDiff,
            PrecisionPlan,
        ),
        *(Replay, NonfiniteBuffers, Schedule, Origin, ShadowStep, BadInputs, FirstNonfinite),
        *(DirectStep, NotStepped, UnscaledLoss, ScaledClip, BoundedNorms, Uncleared),
        *(AccumulatedGradients, NoGradient, NoStep, NoInfChecks, CallOrder, Fp16Gradients),
        *(AdamEps, OutsideOptimizers, GradientsDropped, MixedScales),
    )
}
