"""What the client returns, as TypedDicts with the names of the schemas of /api/v1/docs.

A number is a float, or the text "NaN", "Infinity" or "-Infinity", which JSON lacks. Times are in
seconds since 1970, attempts count from 1, and SHA-256 digests are hexadecimal. Servers of other
versions may send more fields, or fewer. `make response-types` generates this file from the schemas
in app/: those that code of halfstep/ imports from here, and their parts.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypedDict

from halfstep.telemetry.plain_json import JsonObject


class AcceptedRequest(TypedDict):
    """A control request that the training applies at its next step."""

    id: int


class Action(TypedDict):
    """A new run that may fix the problem."""

    label: str
    address: str  # URL of the prefilled form of a new run
    step: int | None  # Step of the checkpoint to start from, if any
    settings: JsonObject  # Changed settings by path


class AdvisedFinding(TypedDict):
    """A finding with possible actions."""

    title: str
    text: str
    module: str | None  # Module that a fork may run in fp32
    before: int | None  # The first affected step, if known
    part: str  # Section of the run's page with the evidence; or empty
    cause: str  # Section in docs/reference/diagnosis.md; empty for general advice
    help: str  # URL of that section; or empty
    fix: str  # Code change to a script; or empty
    is_certain: bool  # False: other causes are not excluded
    is_certain_fault: bool  # Whether something is wrong, in contrast to a possible improvement
    actions: list[Action]  # Actions that are currently possible


class AlertRow(TypedDict):
    """An alert."""

    id: int
    rule_id: int | None
    run_id: int | None  # Null for a condition on the service
    subject: str  # Worker, project or host, for one on the service
    condition: str
    text: str
    content: JsonObject
    created_at: float
    resolved_at: float | None  # When the condition became false again
    read_at: float | None


class ArtifactFile(TypedDict):
    """A file that a run has logged."""

    id: int
    step: int
    size_bytes: int
    sha256: str
    path: str | None
    is_stored: bool
    name: str
    # Path on this server to download it from; null: only on the training machine.
    download_url: str | None


class ArtifactSummary(TypedDict):
    """A named artifact."""

    id: int
    project: str
    name: str
    type: str
    versions: int
    created_at: float


class ArtifactDetail(ArtifactSummary):
    """A named artifact with its versions, newest first."""

    items: list[VersionSummary]


class BulkResult(TypedDict):
    """Outcome of each run: each is in one of the two lists."""

    done: list[int]
    refused: list[RefusedRun]


class ChangedFile(TypedDict):
    """A file that differs between two versions."""

    path: str
    kind: str  # added, removed or changed
    size_before: int | None
    size_after: int | None


class ChannelRow(TypedDict):
    """A channel; of a URL only the host is shown."""

    id: int
    kind: str
    name: str
    target: str
    is_on: bool
    created_at: float


class CreatedChannel(ChannelRow):
    """A newly created channel."""

    secret: str  # Signing secret of a webhook. It is not shown again


class CheckRow(TypedDict):
    """An uploaded report in a list."""

    id: int
    script: str
    project: str
    author: str
    created_at: float
    torch: str  # Its version
    steps: int  # Number of checked steps
    faults: int  # Rows that are mistakes
    notes: int  # Other rows


class CheckContent(CheckRow):
    """An uploaded report."""

    report: JsonObject  # As `halfstep check --json` prints it
    sources: dict[str, str]  # Texts of the files that rows name


class CheckpointFileRow(TypedDict):
    """A file of a checkpoint."""

    id: int
    step: int
    size_bytes: int
    sha256: str
    path: str | None
    is_stored: bool
    attempt: int
    kind: str
    reason: str
    created_at: float
    # Path on this server to download it from; null: only on the training machine.
    download_url: str | None


class Claim(TypedDict):
    """A point that an agent has, or none."""

    state: Literal["run", "wait", "over"]  # wait: a point may be returned; over: no point is left
    number: int | None  # Number of the trial
    run: int | None
    watch_id: str | None  # Identifier of the watched run
    name: str
    project: str
    params: JsonObject  # By name of a setting
    config: JsonObject  # Of the run, with the point's settings
    lease_seconds: float


class Command(TypedDict):
    """A command line that a worker runs if it allows commands; without a shell."""

    line: str  # With placeholders: python train.py --lr {lr}
    folder: str  # On the worker, absolute; with git, within the repository
    git: str  # https://… or file://…, cloned by the worker
    commit: str  # With git: a hash, or its first digits
    patch: str  # With git: changes of the commit, by git diff
    venv: str  # Virtual environment on the worker; empty: the worker's own
    variables: dict[str, str]  # Environment variables, visible to all
    secrets: list[str]  # Names of secrets, which are passed as environment variables
    sources: dict[str, str]  # SHA-256 of its code, by path within the folder; the run names changes
    parameters: dict[str, Parameter]  # By placeholder; by default inferred from its value in config


class ComparedRun(TypedDict):
    """One run of a comparison."""

    label: str
    run: RunSummary
    device: str  # Device; empty until it has trained
    # run/step_ms, run/seconds, run/peak_memory_bytes, seconds, loss, and the last value of each
    # metric
    figures: dict[str, Figure]
    # The lowest loss, and the best value of each metric whose direction is known from the policy
    # for the best checkpoint or from its name
    best: dict[str, Figure]


class ComparedSeries(TypedDict):
    """Series of one run of several."""

    parent_step: int  # For a fork: step of its checkpoint, after which its own steps begin
    first: int
    last: int
    total: int  # Steps in the range
    points: int  # Points of the longest series
    bucket: int  # Steps per minimum and maximum; 1: raw
    x: list[int]  # Steps of all series without their own
    mean_x: list[int]  # Middles of buckets of all series without their own
    series: dict[str, Line]
    metrics: dict[str, Line]
    skips: Ticks
    nonfinite: Ticks  # Steps with a non-finite loss
    damaged: list[list[int]]  # First and last step of each damaged block, whose steps are left out
    examples: Examples | None  # Null if unknown


class CurveRange(TypedDict):
    """Steps over which the curves of all pairs are compared."""

    first: int
    last: int
    points: int  # Steps of which each of these runs has a value
    # Buckets of steps whose means are used, above 5,000 points; null: single points
    buckets: int | None


class DamageOfRuns(TypedDict):
    """All damage of some runs."""

    damage: list[DamagedPart]
    text: str  # All of it in words; empty if the runs are whole


class DamagedPart(TypedDict):
    """Steps, points of a metric, or a file of a run that cannot be read."""

    run: int
    # lost: only summaries are left; flush: metrics of unknown steps
    kind: Literal["steps", "lost", "metric", "flush", "checkpoint", "artifact"]
    name: str  # Metric or file; empty: steps
    first: int  # First step, or the step of a checkpoint
    last: int
    text: str


class DataWait(TypedDict):
    """Time that the latest steps waited for data."""

    steps: int  # Latest steps with a known wait, at most 100
    waited: int  # Steps that waited for a fifth of their time or more
    share: float  # Share of the time of all these steps
    is_real: bool  # Whether the wait is long enough to act on
    per_cent: int  # Share of the steps that waited


class DeletedRun(TypedDict):
    """A run in the trash."""

    id: int
    name: str
    owner: str
    status: Status
    stored_bytes: int  # Size of its checkpoints and artifacts on the server
    deleted_at: float
    erased_after: float  # Time of its erasure
    erasing: bool  # The erasure has begun: it can no longer be restored


class DeliveryRow(TypedDict):
    """A delivery of an alert or of a test through a channel."""

    id: int
    channel_id: int
    channel: str
    alert_id: int | None  # Null for a test
    run_id: int | None
    body: str
    attempts: int
    answer: str  # Response to the last attempt, at most 500 characters
    is_delivered: bool
    created_at: float
    tried_at: float | None
    due_at: float  # Time of the next attempt, if ended_at is null
    ended_at: float | None


class DiskSpace(TypedDict):
    """Size and free space of the data folder's file system."""

    total_bytes: int
    free_bytes: int


class Event(TypedDict):
    """A scaler event after a step: skip, growth, backoff or set."""

    id: int
    step: int
    kind: str
    optimizer: str
    scale_before: float | str | None
    scale_after: float | str | None
    loss_nonfinite: bool
    culprits: list[JsonObject]


class Examples(TypedDict):
    """Conversion of steps to examples."""

    before: int  # Examples of a fork's parents
    each: int  # Examples per step


class Figure(TypedDict):
    """A number; null is not measured yet."""

    value: float | str | None
    ratio: float | None  # In a group: to the fp32 run, or to the first run


class FullEnvironment(TypedDict):
    """An environment with the texts of source, diff and packages."""

    attempt: int
    worker: str | None
    host: str
    platform: str | None
    devices: list[JsonObject]
    versions: dict[str, str | None]  # python, torch, cuda, driver, …
    command: list[str]
    folder: str | None
    file: SourceFile | None
    git: Git | None  # Null if the folder is not in a repository
    has_other_source: bool  # Whether the worker's recipe file has changed since
    has_requirements: bool  # Whether the installed packages are recorded
    changed_sources: list[str]  # Files of a command that have changed since it was queued
    submit_command: str | None  # Command that queues a recipe's run again; null: of other runs
    source: str | None
    diff: str | None  # Of tracked files and untracked code, against the commit
    requirements: str | None  # Installed packages in pip's format, a line each


class FurtherPairs(TypedDict):
    """Estimated number of further seeds; null: more than 1,000."""

    # Seeds that decide with a probability of 80 %, if the true difference and the standard
    # deviation are as measured
    about: int | None
    least: int | None  # With the lower limit of the 80 % interval of the standard deviation
    most: int | None  # With its upper limit


class Git(TypedDict):
    """State of the folder's git repository."""

    commit: str | None
    branch: str  # Empty: a detached HEAD
    remote: str  # URL of the remote, without credentials
    folder: str  # The working directory within the repository; empty: its root
    is_pushed: bool | None  # Whether a remote branch had the commit; null: unknown
    is_dirty: bool
    changed: list[str]  # Changed files, at most 50
    changed_count: int
    untracked: list[str]  # Untracked files, at most 50
    untracked_count: int
    is_cut: bool  # Whether only 256 kB of the diff are stored
    is_redacted: bool  # Whether secrets in the diff are hidden, so that it may not apply
    error: str | None  # Error of git, if it failed


class Interval(TypedDict):
    """A confidence interval."""

    low: float
    high: float


class Line(TypedDict):
    """Values and their steps.

    null is unknown; values that JSON lacks are "NaN", "Infinity" and "-Infinity".
    """

    x: list[int] | None  # Steps; null: those of the page
    y: list[float | str | None]
    mean_x: list[int] | None  # Middles of buckets; null: those of the page
    mean_y: list[float | str | None]  # Means of buckets; empty in a raw window
    nonfinite: Ticks | None  # Non-finite values of buckets, which y lacks; null if there are none


class LogLine(TypedDict):
    """A line of the training's output."""

    number: int
    attempt: int
    time: float
    stream: str
    text: str


class NamedRun(TypedDict):
    """A run that a queued run waits for."""

    id: int
    label: str  # Its name in the reason


class PairedTest(TypedDict):
    """Differences of the pairs: value - reference_value.

    In seconds for time_to_target, else in the unit of the metric. Numbers are null if they are not
    known.
    """

    pairs: int
    reason: str  # Why the conclusion is unknown; else empty
    difference: float | None  # Mean of the differences
    deviation: float | None  # Their standard deviation
    interval: Interval | None  # 95 % t-interval of the mean
    equivalence_interval: Interval | None  # 90 % t-interval: equivalent if it is within the margin
    further: FurtherPairs | None  # If the conclusion is undecided, with a margin


class Parameter(TypedDict):
    """Type and bounds of a placeholder's value."""

    type: Literal["number", "integer", "string", "boolean"]
    enum: list[str] | None  # Choices of a string
    minimum: float | None
    maximum: float | None
    default: str | int | float | bool | None
    description: str


class Parity(TypedDict):
    """Groups of runs compared with one of them, paired by seed."""

    metric: str
    value: Literal["final", "area", "time_to_target"]
    target: float | None  # In the unit of the metric
    margin: float | None  # In seconds for time_to_target, else as the metric
    is_low: bool | None  # Lower values are better, as times are; null if unknown
    setting: str  # Setting that the groups differ in
    seed: str  # Setting that the runs of a pair share
    paired_by: list[str]  # The seed, and in a grid the settings of the combinations
    settings: list[str]  # Settings that can be given as `group`
    reference: str  # Group: fp32, or that of the first run
    groups: list[ParityGroup]
    reason: str  # Why there are no groups; else empty
    unpaired: list[int]  # Ids of runs in no pair; all, if there are no groups


class ParityGroup(TypedDict):
    """A group of runs compared with the reference."""

    name: str
    combination: dict[str, str]  # In a grid: values of the further settings that its runs share
    # lower or higher if it is unknown which is better
    conclusion: Literal["equivalent", "worse", "better", "lower", "higher", "undecided", "unknown"]
    sentence: str
    also_differ: list[str]  # What else differs between the runs of a pair
    range: CurveRange | None  # For area, if it is known
    result: PairedTest
    pairs: list[ParityPair]


class ParityPair(TypedDict):
    """Two runs with the same seed.

    Values are in seconds for time_to_target, else in the unit of the metric; null: NaN, none, or
    not read because the conclusion is unknown anyway.
    """

    seed: str
    run: int
    reference_run: int
    value: float | str | None
    reference_value: float | str | None


class PlanModule(TypedDict):
    """Modules of one type and role: what they cost, and the error that they cause alone."""

    role: str  # Name, with * for numbers; (loss): the loss function
    names: list[str]
    type: str
    errors: dict[str, float | str | None]  # By precision
    operations: float | str | None  # Share of the model's
    memory: float | str | None  # Share of the bytes of all results
    ms: float | str | None  # What fp32 adds to a forward pass; null: unknown


class PlanPoint(TypedDict):
    """A mix of precisions, and what was measured with it."""

    label: str  # In words
    precision: str  # fp16, bf16 or fp32
    fp32: list[str]  # Modules in fp32, by name or pattern
    bf16: list[str]  # Modules in bf16, by name or pattern
    is_loss_in_fp32: bool  # Needs a change of the loss function
    init_scale: float | str | None  # Loss scale of fp16; null: none
    error: float | str | None  # Error of the whole gradient, the worst of all batches
    by_weights: dict[str, float | str | None]  # The same by weights
    cosine: float | str | None  # The smallest of all batches
    is_within: bool  # Whether it is within the bounds
    time: float | str | None  # Time of a forward and a backward pass relative to fp32
    memory: float | str | None  # Memory of a forward pass's results relative to fp32
    ms: float | str | None  # Time by CUDA events; null: not measured
    config: JsonObject  # Settings of a run


class PrecisionDiff(TypedDict):
    """One batch in two precisions, compared module by module."""

    step: int
    dtype: str  # float16 or bfloat16
    reference: str  # float32 or float64
    scale: float | str | None
    loss: float | str | None
    reference_loss: float | str | None
    error: float | str | None  # Of the gradient of all parameters together
    cosine: float | str | None
    suggested_error: float | str | None  # The same with the suggested modules in fp32, if any
    suggestions: list[PrecisionSuggestion]
    remains: str  # What stays wrong with the suggested modules in fp32; else empty
    notes: list[str]
    # Modules by the error of the gradient that each causes alone, with their costs; empty: not
    # measured, as in a diff of a training
    causes: list[PlanModule]
    rows: list[PrecisionDiffRow]  # In order of the calls


class PrecisionDiffRow(TypedDict):
    """Errors of one module call or parameter against the reference."""

    name: str
    type: str  # The module's class; empty for the loss function
    call: int  # From 1; 0 for parameters
    direction: str  # forward, backward or parameter
    dtype: str  # Type of the first result in low precision
    elements: int
    error: float | str | None  # L2 norm of the difference over the reference's
    largest: float | str | None  # Largest difference over the reference's RMS
    cosine: float | str | None
    flushed: float | str | None  # Share of the elements that became 0
    saturated: float | str | None  # Share at the format's largest or beyond
    bits: float | str | None  # Effective bits of the mantissa
    local: float | str | None  # Error of the module's own operations; or null
    inherited: float | str | None  # Remaining error, inherited from its inputs; or null
    local_flushed: float | str | None
    local_saturated: float | str | None
    local_fp32: float | str | None  # Local error in fp32; null: not measured
    used_by: list[str]  # For parameters: modules that use it
    unknown: str | None  # Why the local error is unknown


class PrecisionPlan(TypedDict):
    """The fastest mixes of precisions within a bound of the gradient's error."""

    sentences: list[str]
    best: int  # Index of the best point
    points: list[PlanPoint]  # The Pareto front, the fastest first
    of_precision: dict[str, PlanPoint]  # The best of fp16 and bf16
    modules: list[PlanModule]  # The largest error first
    max_error: float | str | None
    min_cosine: float | str | None
    batches: int
    cost: str  # measured, by CUDA events, or counted operations
    device: str
    fp32_cost: float | str | None  # Assumed for counted operations; or null
    batch_deviation: float | str | None  # Of the batches' gradients; or null
    notes: list[str]


class PrecisionSuggestion(TypedDict):
    """A module that should stay in fp32."""

    name: str
    error: float | str | None  # The largest of its local errors; 0 if none is known
    evidence: list[str]


class PresetRow(TypedDict):
    """A saved preset."""

    id: int
    name: str
    recipe: str
    config: JsonObject  # Settings that differed from the recipe's defaults when it was saved
    project: str
    tags: list[str]
    priority: int
    preemptible: bool
    nodes: int
    devices_per_node: int
    saved_at: float


class ProjectRow(TypedDict):
    """A project with its limits and usage."""

    name: str
    viewers_download: bool
    devices: int | None
    queued: int | None
    stored_gib: float | None
    share: float
    devices_used: int
    queued_used: int
    stored_bytes: int


class PrunedRun(TypedDict):
    """Files and rows of one run that would be deleted."""

    run_id: int
    name: str
    steps: int  # Number of steps with deleted checkpoints
    stored_bytes: int
    log_lines: int
    samples: int


class RefusedRun(TypedDict):
    """A run for which the action failed."""

    id: int
    detail: str  # Reason, for display


class ReportRow(TypedDict):
    """A report in a list."""

    id: int
    title: str
    project: str
    version: int
    author: str
    editor: str  # Author of the last change
    created_at: float
    changed_at: float


class ReportContent(ReportRow):
    """A report."""

    # Markdown. Fenced blocks `panel` (runs, metrics, title, x, smoothing, y) and `runs` (runs,
    # columns, title) draw runs; see docs/how-to/reports.md
    text: str
    runs: list[int]  # Run ids of its panels, in order


class Rule(TypedDict):
    """A retention rule."""

    scope: str  # all: every project without a rule of its own; or in:PROJECT
    checkpoint_days: float | None  # 1 to 36,500, or null: never deleted
    log_days: float | None  # 1 to 36,500, or null: never deleted
    set_at: float


class RulePreview(TypedDict):
    """Preview of the deletions of a rule."""

    runs: int  # Examined runs with something to delete
    stored_bytes: int  # Of these runs
    largest: list[PrunedRun]
    not_looked_at: int  # Further runs with old files, which were not examined


class RuleRow(TypedDict):
    """A rule with its description."""

    id: int
    condition: str
    scope: str
    value: float | None
    metric: str
    run_id: int | None
    project: str
    channel_ids: list[int]
    is_on: bool
    created_at: float
    text: str


class RunComparison(TypedDict):
    """A comparison of runs, in the requested order."""

    runs: list[ComparedRun]
    # Settings that differ, by path, with the values in the order of runs
    differences: dict[str, list[Any]]
    missing: list[int]  # Ids of runs that do not exist


class RunHealth(TypedDict):
    """Loss-scale health: calibrating, healthy, oscillating, collapsing or dead."""

    word: str
    reason: str
    figures: JsonObject  # Numbers from which it is computed; see db/health/scaling_health.py


class RunLink(TypedDict):
    """A run that made or used a version."""

    id: int
    name: str


class RunList(TypedDict):
    """A page of runs."""

    runs: list[ListedRun]
    total: int  # Number of runs on all pages
    next: int | None  # `before` of the next page; null on the last
    notes: list[str]  # Names in filter, sort and values that no run has


class RunSummary(TypedDict):
    """Summary of a run."""

    id: int
    name: str
    source: str  # recipe, command or watch (trained elsewhere)
    project: str
    recipe: str  # Empty if the run has none
    precision: str  # Empty while unknown
    status: Status
    attempt: int
    owner: str
    tags: list[str]
    priority: int
    preemptible: bool  # Whether a waiting run of higher priority may take its devices
    nodes: int
    devices_per_node: int  # Devices on each node
    after_id: int | None  # Run whose end this one waits for
    parent_id: int | None  # Run from whose checkpoint it started
    parent_step: int | None
    group_id: int | None  # Comparison that it belongs to
    step: int  # Attempted steps
    own_steps: int  # Steps after its parent's checkpoint
    steps_total: int  # 0 if unknown
    applied: int  # Own steps not skipped, or retried in fp32
    skipped: int
    loss: float | str | None  # Last known value; null: unknown
    is_loss_nonfinite: bool  # Whether the last loss is NaN or infinite
    scale: float | str | None
    health: RunHealth | None  # Null without a loss scale
    is_scaled: bool  # Whether it has a loss scale
    steps_per_second: float | str | None  # Over the latest steps; after the end, over all steps
    examples_per_second: float | str | None  # Null if unknown
    tokens_per_second: float | str | None  # Null if the recipe has no tokens
    utilisation: float | str | None  # Model FLOPs per second divided by the peak of its devices
    data_wait: DataWait | None  # Null if unknown, and in lists
    workers: list[str]  # Worker of each node if there are several; empty in lists
    seconds: float | None  # From first start to end, without pauses
    seconds_left: float | None  # Estimate at the current speed
    waiting: str | None  # What a queued run waits for
    waiting_for: list[NamedRun]  # Runs named in `waiting`, in its order
    ahead: int | None  # Queued runs that start before this one
    silent_seconds: int  # Seconds since the last data of a watched run; 0 while it sends
    # Outcome in addition to the status; null if there is none
    outcome: Literal["no_updates", "diverged", "stopped", "pruned"] | None
    stored_bytes: int  # Size of its checkpoints and artifacts on the server
    damage: str  # What cannot be read of it, by the latest check; empty: nothing
    error: str | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    revision: int


class ListedRun(RunSummary):
    """A run with the requested columns."""

    values: dict[str, float | str | None]  # Values of its settings and metrics by name


class RunDetail(RunSummary):
    """A run with its configuration and history."""

    note: str  # Its note, in Markdown
    command: Command | None  # Null for recipes and watched runs
    config: JsonObject
    changed_settings: list[Setting]  # Settings that differ from their known defaults
    sweep_id: int | None  # Sweep that it belongs to
    statuses: list[StatusChange]


class SavedVersion(TypedDict):
    """A saved version: complete once its missing files are uploaded."""

    id: int
    version: str
    is_complete: bool
    missing: list[str]  # SHA-256 of the files to upload


class SavedView(TypedDict):
    """A saved view."""

    name: str
    filter: str  # Same syntax as the list of runs
    sort: str
    columns: str  # Comma-separated; empty: default columns
    group: str  # Column or setting; empty: not grouped
    id: int


class SeriesPage(TypedDict):
    """Series of one run, with a page of its metrics in order of name."""

    parent_step: int  # For a fork: step of its checkpoint, after which its own steps begin
    first: int
    last: int
    total: int  # Steps in the range
    points: int  # Points of the longest series
    bucket: int  # Steps per minimum and maximum; 1: raw
    x: list[int]  # Steps of all series without their own
    mean_x: list[int]  # Middles of buckets of all series without their own
    series: dict[str, Line]
    metrics: dict[str, Line]
    skips: Ticks
    nonfinite: Ticks  # Steps with a non-finite loss
    damaged: list[list[int]]  # First and last step of each damaged block, whose steps are left out
    metrics_total: int  # On all pages
    metrics_next: str | None  # `metric_after` of the next page; null on the last
    cursor: str  # Position for live updates
    resumptions: dict[str, int]  # By attempt, the last step before its own
    spikes: list[Spike]  # The latest 200 of the whole run


class Setting(TypedDict):
    """A field with its value and default."""

    path: str
    title: str
    value: Any
    default: Any
    has_default: bool
    is_changed: bool


class SourceFile(TypedDict):
    """The recipe's file, or a command's script."""

    path: str
    sha256: str
    size_bytes: int
    is_cut: bool  # Whether only the first 256 kB are stored


class Spike(TypedDict):
    """A sudden rise of the loss."""

    step: int
    loss: float | str
    z: float | str  # Robust standard deviations above the median before it
    rolled_back_to: int | None  # Step of the rollback, if any


Status: TypeAlias = Literal[
    "queued",
    "starting",
    "running",
    "pausing",
    "paused",
    "stopping",
    "unreachable",
    "finished",
    "failed",
    "cancelled",
]


class StatusChange(TypedDict):
    """When and why a run changed status."""

    attempt: int
    status: Status
    reason: str | None
    # infrastructure, code, settings (a value is wrong, or a required file or device is missing),
    # rule (of its configuration) or null
    failure_kind: str | None
    time: float


class Storage(TypedDict):
    """Storage used by runs; `stored_bytes` in the list of runs has the amount of each run."""

    disk: DiskSpace | None  # Null if files are in a bucket
    stored_bytes: int  # Checkpoints and artifacts of all runs
    trash_bytes: int  # Files of runs in the trash, not included in stored_bytes
    trash_runs: int


class SweepSummary(TypedDict):
    """A sweep with its progress."""

    id: int
    name: str
    owner: str
    project: str
    source: str  # recipe, command or script (run by agents)
    recipe: str
    kind: str
    pruner: JsonObject | None  # Rule that ends weak runs early
    space: dict[str, str]  # Searches by path of a setting
    metric: str
    goal: str
    seed: int
    status: str  # running, paused, finished, cancelled or failed
    error: str | None
    runs_total: int
    at_once: int
    submitted: int
    open: int  # Runs that are queued or train
    waiting: int  # Failed points that are to be run again
    complete: int
    pruned: int  # Ended early by its pruner
    failed: int
    best: float | str | None
    created_at: float


class SweepDetail(SweepSummary):
    """A sweep with its common configuration and its best run."""

    command: Command | None  # Instead of a recipe
    config: JsonObject
    best_trial: SweepTrial | None
    metrics: list[str]  # Logged by its newest runs
    warning: str  # About a metric that no run has logged, or empty


class SweepTrial(TypedDict):
    """A trial of a sweep."""

    number: int
    run_id: int
    name: str
    status: Status
    params: JsonObject  # By path of a setting
    state: str  # open, complete, pruned, or failed: without a finite value
    value: float | str | None  # The metric's last value; for an open trial, the value so far


class Ticks(TypedDict):
    """Steps with an event; buckets with counts if there are more than points."""

    steps: list[int]  # Steps, or first steps of buckets
    counts: list[int]
    total: int  # Exact number in the range
    before: int  # Number before the range


class Uploaded(TypedDict):
    """A file that runs can start from; unused ones are deleted after a day."""

    upload: str  # Value for `weights.upload` of a configuration
    size_bytes: int
    sha256: str


class VersionDiff(TypedDict):
    """The files that differ between two versions."""

    before: str
    after: str
    changes: list[ChangedFile]


class VersionFile(TypedDict):
    """A file of a version."""

    path: str
    size_bytes: int
    sha256: str


class VersionSummary(TypedDict):
    """A version of an artifact."""

    id: int
    version: str  # v0, v1, …
    digest: str  # SHA-256 of its list of files
    size_bytes: int
    files: int
    is_file: bool  # Whether it is a single file instead of a folder
    aliases: list[str]
    created_at: float
    is_complete: bool  # Whether all of its files are uploaded
    made_by: list[RunLink]
    used_by: list[RunLink]


class VersionDetail(VersionSummary):
    """A version with its artifact and its files."""

    artifact: ArtifactSummary
    entries: list[VersionFile]


class WorkerState(TypedDict):
    """A worker with its capabilities."""

    id: int
    name: str
    host: str
    alive: bool
    outdated: bool  # Whether it has another version than the server; recipes are not used
    devices: list[JsonObject]
    recipes: list[JsonObject]
    offers_commands: bool  # Whether it runs command lines
    is_sandboxed: bool  # Whether the sandbox passed the worker's check at its start
    # State of the requested isolation (users, memory, processes, cpus): '' or why it is not active;
    # sandbox, if it failed: the path a run could write, or the error
    sandbox: dict[str, str]
    drained_at: float | None  # Time since which it claims no runs
    drain_stops: bool  # Whether the drain also stops its runs
    only_run_id: int | None  # The run that a cluster started it for
    placement: str | None  # The cluster that it requests workers from
    versions: JsonObject
    # Memory (proportional set size) of the process that its trainings are forked from; null without
    # such a process
    warm_memory_bytes: int | None
    started_at: float
    seen_at: float
    stopped_at: float | None  # Null unless the worker was stopped
