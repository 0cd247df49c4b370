"""Database tables. Columns have the same names in JSON, in JavaScript and on pages.

Times are seconds since the epoch by the database's clock; `elapsed_ms` counts from the run's first
start by the training machine's clock. NaN is stored as NULL on both databases, since SQLite has no
NaN; infinities are stored unchanged. All names are imported from here, not from the modules.
"""

from db.tables.access import (
    CONTROL,
    FULL,
    ONE_RUN,
    READ,
    SENDING,
    SUBMIT,
    TOKENS,
    WRITE,
    ApiToken,
    AuditEvent,
    LoginAttempts,
    Membership,
    Project,
    Secret,
    SharedLink,
    SharedRun,
    SignInLink,
    SignInSession,
    User,
)
from db.tables.alerts import IS_DUE, IS_OPEN, Alert, AlertEvaluation, AlertRule, Channel, Delivery
from db.tables.artifacts import (
    MADE,
    USED,
    ArtifactAlias,
    ArtifactCollection,
    ArtifactEntry,
    ArtifactLink,
    ArtifactVersion,
    Blob,
)
from db.tables.base import LARGEST_COUNT, LARGEST_ID, CleanText, OfProject, OfRun, Table, clean
from db.tables.checks import CheckReport
from db.tables.reports import Report, ReportImage
from db.tables.runs import (
    ACTIVE,
    COMMAND,
    ENDED,
    IN_TRASH,
    LISTED,
    NOT_DELETED,
    PRECISION_DIFF,
    PRECISION_PLAN,
    RECIPE,
    TRAIN,
    WATCH,
    ControlRequest,
    Run,
    RunConfigValue,
    RunEnvironment,
    RunStatus,
    Status,
    Sweep,
    Trial,
    WatchedAttempt,
)
from db.tables.saved import (
    Backup,
    ChartPreferences,
    Note,
    Preset,
    RetentionRule,
    SavedView,
    Upload,
)
from db.tables.telemetry import (
    FLAGGED,
    HOST,
    IN_TAIL,
    IS_NOT_STEPPED,
    Artifact,
    CheckpointFile,
    Diagnosis,
    FrozenSteps,
    LatestMetric,
    LogLine,
    LossCurve,
    Metric,
    MetricBlock,
    MetricBucket,
    MetricTail,
    ScalerEvent,
    Step,
    StepBlock,
    StepBucket,
    StepConversion,
    SystemSample,
)
from db.tables.workers import IN_USE, Placement, RunNode, Worker
