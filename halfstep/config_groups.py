"""Settings of a run: one class per group, one field with help text per setting.

Does not import torch.
"""

from types import NoneType
from typing import Annotated, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator

from halfstep.number_formats import number, power_of_two
from halfstep.telemetry.event_fields import NAME_CHARACTERS

Precision = Literal["fp16", "bf16", "fp32", "fp8"]
#: Range of normal powers of two in fp32, the scale's type. Below it, a scale or its reciprocal, by
#: which gradients are multiplied, would be 0 or infinite.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**127
MOST_STEPS = 10**9
#: Texts for null, where a setting may be null and is no text; the page shows it as "off".
OFF = ("", "off")


class Group(BaseModel):
    """A group of settings. Unknown fields, inf and NaN are errors.

    A field without a title has its name as one.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        field_title_generator=lambda name, _field: name.replace("_", " ").capitalize(),
    )

    @model_validator(mode="before")
    @classmethod
    def _read_words(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        kinds = {
            name: get_args(field.annotation) or (field.annotation,)
            for name, field in cls.model_fields.items()
        }
        words = {
            name
            for name, some in kinds.items()
            if any(kind is str or get_origin(kind) is Literal for kind in some)
        }
        read = {
            name: power_of_two(value) or value
            for name, value in values.items()
            if name in kinds and name not in words
        }
        off = {name: None for name in read if NoneType in kinds[name] and read[name] in OFF}
        return values | read | off


class Training(Group):
    """How the model is trained."""

    steps: int = Field(
        1000,
        ge=1,
        le=MOST_STEPS,
        description="Number of optimizer steps, including those that the scaler skips.",
    )
    epochs: Annotated[float, Field(gt=0, le=10**6)] | None = Field(
        None,
        description="Passes over the training data; overrides the number of steps. Empty: the "
        "number of steps applies.",
    )
    batch_size: int = Field(
        64,
        ge=1,
        le=2**24,
        description="Training examples in one forward pass on one device.",
    )
    accumulation_steps: int = Field(
        1,
        ge=1,
        le=2**16,
        description="Forward passes whose gradients are averaged into one optimizer step.",
    )
    max_grad_norm: Annotated[float, Field(gt=0, le=2.0**127)] | None = Field(
        1.0,
        title="Max gradient norm (clipping)",
        description="Clip each optimizer's unscaled gradients to this L2 norm. Empty: no clipping.",
    )
    max_grad_value: Annotated[float, Field(gt=0, le=2.0**127)] | None = Field(
        None,
        title="Max gradient value (clipping)",
        description="Clip each element of the unscaled gradients to ± this value, after clipping "
        "by norm. Empty: no clipping.",
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**32,
        description="Seed of initial weights, order of examples, dropout and augmentation.",
    )
    shuffle: bool = Field(
        True,
        description="Reshuffle the examples every epoch. Off: the dataset's order.",
    )
    schedule: Literal["constant", "cosine", "recipe"] = Field(
        "constant",
        title="Learning-rate schedule",
        description="After the warm-up: constant, or a cosine that falls to 0 at the last step. "
        "recipe: the recipe sets the rates itself.",
    )
    schedule_counts: Literal["attempted", "applied"] = Field(
        "attempted",
        description="attempted: skipped steps also advance the schedule. applied: they do not; the "
        "learning rate is computed on the device, which needs a fused optimizer.",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        le=MOST_STEPS,
        title="Warm-up steps",
        description="Steps over which the learning rate rises linearly from 0.",
    )
    fused: bool = Field(
        True,
        title="Fused optimizer",
        description="Update all weights in one kernel. Without it, PyTorch's scaler synchronizes "
        "host and device once per step.",
    )
    weights: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="bf16: in a bf16 run, keep weights and optimizer state in bf16. Halves their "
        "memory; small updates are lost to rounding.",
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        "nearest",
        description="Rounding of bf16 weights after each update. stochastic: rounds up or down at "
        "random, more likely to the nearer value, so that small updates add up; needs AdamW and "
        "torchao.",
    )
    fp8: Literal["tensorwise", "rowwise"] = Field(
        "tensorwise",
        title="fp8 scales",
        description="In an fp8 run: one scale per tensor, or one per row, which preserves small "
        "numbers better and is slower.",
    )
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        title="EMA decay",
        description="Decay of an exponential moving average of the weights, such as 0.999, which "
        "is also evaluated (ema/…) and saved. Empty: no average.",
    )
    compile: bool = Field(
        False,
        description="Run the networks through torch.compile: faster steps, minutes to start; "
        "results differ in the last bits.",
    )
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = Field(
        "default",
        description="Mode of torch.compile. reduce-overhead: CUDA graphs, for small batches. "
        "max-autotune: CUDA graphs, and minutes of kernel tuning.",
    )
    cuda_graph: bool = Field(
        False,
        title="CUDA graph (experimental)",
        description="Replay each step from a CUDA graph, after the first 100: for small networks, "
        "whose kernels the host queues too slowly. Every step must do the same; a recipe that "
        "cannot be captured trains without it, and its page says why. Learning rates are rounded "
        "to fp32.",
    )
    channels_last: bool = Field(
        False,
        description="Use the channels_last memory format for convolutions, which is faster on "
        "tensor cores. Results differ in the last bits.",
    )
    deterministic: bool = Field(
        True,
        description="Use only deterministic algorithms, so that a resumed run is bit-exact.",
    )
    tf32: bool = Field(
        False,
        title="TF32",
        description="Let CUDA round the inputs of fp32 matrix products and convolutions to TF32: "
        "up to 8 times as fast, with 10 mantissa bits instead of 23.",
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp",
        description="With several devices. ddp: each holds all weights, and gradients are "
        "averaged. fsdp: each holds a shard of weights, gradients and optimizer state, and gathers "
        "a block's weights to compute it: for networks that do not fit on one device.",
    )
    shard_casts: Literal["autocast", "policy"] = Field(
        "autocast",
        title="Dtype of gathered weights",
        description="With parallel fsdp in fp16 or bf16. autocast: weights are gathered in fp32, "
        "and each operation casts its inputs. policy: weights are cast before they are gathered, "
        "which halves traffic and memory of gathered weights; the whole network computes in that "
        "type, including norms. Gradients are averaged in fp32.",
    )
    unused_parameters: bool = Field(
        False,
        description="With several devices: allow steps in which parameters receive no gradient. "
        "Costs a graph traversal in each step.",
    )
    static_graph: bool = Field(
        False,
        description="With several devices: every step runs the same operations, which "
        "DistributedDataParallel learns in the first one. Parameters that are never used then cost "
        "nothing, and activation checkpoints may be re-entrant.",
    )
    device_memory_gib: Annotated[float, Field(gt=0, le=65536)] | None = Field(
        None,
        title="Device memory (GiB)",
        description="Wait for a worker whose devices all have at least this much memory. Empty: "
        "any worker.",
    )
    threads: int = Field(
        1,
        ge=1,
        le=1024,
        title="CPU threads",
        description="Threads for computation on the CPU. A different number changes the last bits "
        "of results.",
    )

    @model_validator(mode="after")
    def _rounding_is_of_bf16(self) -> Self:
        if self.rounding == "stochastic" and self.weights != "bf16":
            raise ValueError(
                f"rounding is stochastic, but weights is {self.weights}; set weights to bf16"
            )
        return self

    @model_validator(mode="after")
    def _a_cuda_graph_has_gradients_of_one_pass(self) -> Self:
        if self.compile and self.compile_mode != "default" and self.accumulation_steps > 1:
            raise ValueError(
                f"compile_mode {self.compile_mode} cannot be combined with accumulation_steps "
                f"{self.accumulation_steps}: a CUDA graph overwrites the gradients of the previous "
                "pass; allowed: default"
            )
        return self

    @model_validator(mode="after")
    def _shards_are_of_plain_networks(self) -> Self:
        if self.parallel != "fsdp":
            return self
        switches = ("compile", "channels_last", "static_graph", "unused_parameters")
        on = [name for name in switches if getattr(self, name)]
        on += ["rounding stochastic"] if self.rounding == "stochastic" else []
        if on:
            raise ValueError(
                f"parallel fsdp cannot be combined with {' or '.join(on)}; allowed: ddp"
            )
        return self

    @model_validator(mode="after")
    def _a_static_graph_is_the_same_in_every_pass(self) -> Self:
        if self.static_graph and self.accumulation_steps > 1:
            raise ValueError(
                f"static_graph cannot be combined with accumulation_steps "
                f"{self.accumulation_steps}: with a static graph, DistributedDataParallel averages "
                "gradients after every pass"
            )
        if self.static_graph and self.unused_parameters:
            raise ValueError(
                "static_graph cannot be combined with unused_parameters: with a static graph, the "
                "same parameters have no gradient in every step, and the first step shows which"
            )
        return self


#: Name of a module, or a shell-style pattern for several: model.blocks.*.norm
Pattern = Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS)]
Patterns = Annotated[list[Pattern], Field(max_length=32)]


class Modules(Group):
    """Modules with settings of their own, by name or a pattern such as *.norm."""

    fp32: Patterns = Field(
        [],
        title="In fp32",
        description="Modules that run in fp32 in an fp16, bf16 or fp8 run, including their "
        "submodules: model.head, model.blocks.*.norm. A replay reports such names.",
    )
    bf16: Patterns = Field(
        [],
        title="In bf16",
        description="Modules that run in bf16 in an fp16 or fp8 run, including their submodules; "
        "fp32 takes precedence.",
    )
    sharded: Patterns = Field(
        [],
        title="FSDP units",
        description="With training.parallel fsdp: modules whose weights are gathered together, "
        "such as model.blocks.*. Empty: the members of each outermost ModuleList or Sequential.",
    )
    checkpointed: Patterns = Field(
        [],
        title="Activation checkpoints",
        description="Modules that recompute their activations in the backward pass: less memory, "
        "about a third more time, bit-identical.",
    )


#: SHA-256 and name of a file in the server's store.
UPLOAD = r"^[0-9a-f]{64}/[A-Za-z0-9_][A-Za-z0-9._-]*\.(safetensors|pt)$"


class Weights(Group):
    """Initial weights, without another training's optimizer, scale or steps."""

    path: Annotated[str, Field(min_length=1, max_length=1000)] | None = Field(
        None,
        title="File or folder",
        description="Path on the worker, in a folder that its operator allows: .safetensors, .pt, "
        "or a Hugging Face folder. Empty: initialized by the recipe.",
    )
    upload: (
        Annotated[str, Field(pattern=UPLOAD, max_length=165, examples=["SHA-256/net.pt"])] | None
    ) = Field(
        None,
        title="Uploaded file",
        description="An uploaded .safetensors or .pt file, by SHA-256 and name.",
    )
    run: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None,
        title="From run",
        description="Number of the run from whose saved weights to start.",
    )
    step: Annotated[int, Field(ge=0, le=MOST_STEPS)] | None = Field(
        None,
        title="At step",
        description="Step of that run's checkpoint. Empty: the newest at submission.",
    )
    strict: bool = Field(
        True,
        description="Fail if weights are missing, unexpected or mismatched in shape. Off: load "
        "those that match.",
    )

    @model_validator(mode="after")
    def _weights_have_one_source(self) -> Self:
        sources = {"path": self.path, "upload": self.upload, "run": self.run}
        given = [f"{name} {value}" for name, value in sources.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}; allowed: one of {', '.join(sources)}")
        if self.step is not None and self.run is None:
            raise ValueError(f"step is {self.step}, but run is empty; set run, or leave step empty")
        return self


class Scaler(Group):
    """Loss scaler, used only with fp16."""

    enabled: bool = Field(True, description="Scale the loss in fp16. bf16 and fp32 need no scaler.")
    init_scale: float = Field(
        2.0**16,
        ge=SMALLEST_SCALE,
        le=LARGEST_SCALE,
        title="Initial scale",
        description="Loss scale at step 1.",
    )
    growth_factor: float = Field(
        2.0,
        gt=1,
        le=2.0**24,
        description="Factor by which the scale grows.",
    )
    backoff_factor: float = Field(
        0.5,
        gt=0,
        lt=1,
        title="Back-off factor",
        description="Factor applied to the scale after a step with non-finite gradients.",
    )
    growth_interval: int = Field(
        2000,
        ge=1,
        lt=2**31,
        description="Consecutive steps without a skip after which the scale grows.",
    )
    # Beyond PyTorch's scaler, all off by default; see trainer/precision/scale_policies.py.
    floor: Annotated[float, Field(ge=SMALLEST_SCALE, le=LARGEST_SCALE)] | None = Field(
        None, description="The scale never falls below this. Empty: 2^-126."
    )
    ceiling: Annotated[float, Field(gt=0, le=LARGEST_SCALE)] | None = Field(
        None, description="The scale never grows beyond this. Empty: no ceiling."
    )
    hysteresis: int = Field(
        1,
        ge=1,
        le=1000,
        description="Number of skips before the scale backs off; reset when the scale grows. 1: "
        "immediately.",
    )
    tolerance: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Do not back off while the fraction of skipped steps since the last change of "
        "the scale is below this. 0: every skip counts.",
    )
    stop_after_skips: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = Field(
        None,
        title="Stop after … skips",
        description="Fail the run after this many consecutive skips, once it is calibrated. Empty: "
        "never.",
    )
    stop_at_floor: bool = Field(
        False,
        title="Stop at the floor",
        description="Fail the run when a step is skipped with the scale at its floor.",
    )
    restore_buffers: bool = Field(
        False,
        description="After a skipped step, restore buffers such as BatchNorm's running statistics. "
        "Costs a copy of them in every step.",
    )
    retry_in_fp32: bool = Field(
        False,
        description="Retry the batch of a skipped step in fp32. The host then waits for the device "
        "in every step.",
    )

    @model_validator(mode="after")
    def _scale_lies_between_floor_and_ceiling(self) -> Self:
        low, high = self.floor or 0.0, self.ceiling or LARGEST_SCALE
        if low > high:
            raise ValueError(
                f"floor is {number(low)} and ceiling is {number(high)}; "
                "floor must not exceed ceiling"
            )
        if not low <= self.init_scale <= high:
            raise ValueError(
                f"init_scale is {number(self.init_scale)}, not between floor {number(low)} and "
                f"ceiling {number(high)}"
            )
        if self.stop_at_floor and self.floor is None:
            raise ValueError("stop_at_floor is on, but floor is empty; set floor")
        return self


class Checkpoints(Group):
    """When checkpoints are saved, in addition to the end."""

    every_steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = Field(
        None,
        title="Every … steps",
        description="Steps between checkpoints. Empty: at the end only.",
    )
    keep_last: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = Field(
        None,
        title="Keep the last …",
        description="Delete older periodic checkpoints. Empty: keep all.",
    )
    keep_every_steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = Field(
        None,
        title="Keep every … steps",
        description="Also keep checkpoints whose step is a multiple of this.",
    )
    keep_best: Annotated[str, Field(max_length=NAME_CHARACTERS)] | None = Field(
        None,
        title="Keep the best by",
        description="Also keep the checkpoint with the best value of this metric, such as "
        "val/accuracy.",
    )
    best_is: Literal["highest", "lowest"] = Field(
        "highest",
        description="Whether a lower or a higher value of that metric is better.",
    )


class Evaluation(Group):
    """When the recipe is evaluated, in addition to the end."""

    every_steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = Field(
        None,
        title="Every … steps",
        description="Steps between evaluations. Empty: at the end only.",
    )
    at_start: bool = Field(
        False,
        title="At the start",
        description="Also evaluate the untrained model, before the first step.",
    )


class Diagnosis(Group):
    """Measurements that explain the loss scale. They do not affect training."""

    histogram_every_steps: int = Field(
        100,
        ge=0,
        le=MOST_STEPS,
        title="Histogram every … steps",
        description="Steps between histograms of gradient exponents. 0: none.",
    )
    layer_norms_every_steps: int = Field(
        50,
        ge=0,
        le=10**9,
        title="Layer norms every … steps",
        description="Steps between records of each layer's gradient norm, at most 2,000 in a run. "
        "0: none.",
    )
    norms_every_steps: int = Field(
        1,
        ge=1,
        le=MOST_STEPS,
        title="Gradient norms every … steps",
        description="Steps between gradient norms. A skip in between has no culprits. A clip "
        "computes them in any step.",
    )
    headroom_every_steps: int = Field(
        100,
        ge=0,
        le=MOST_STEPS,
        title="Headroom every … steps",
        description="Steps between measurements of each module's largest and smallest activation "
        "and gradient against fp16's limits; not for compiled networks. 0: none.",
    )
    updates_every_steps: int = Field(
        100,
        ge=0,
        le=MOST_STEPS,
        title="Updates every … steps",
        description="Steps between counts of updates lost to rounding in bf16 weights. 0: none.",
    )
    replay_skips: int = Field(
        3,
        ge=0,
        le=1000,
        title="Replayed skips",
        description="Replay the first skipped steps after calibration, at most this many, to find "
        "the module that overflowed. 0: none.",
    )


class Data(Group):
    """How a recipe's dataset is read. Does not affect training."""

    workers: int = Field(
        2,
        ge=0,
        le=256,
        description="Processes per device that read and decode examples ahead. 0: the training "
        "process reads between steps. Recipes whose data are on the device use none.",
    )
    prefetch: int = Field(
        2,
        ge=1,
        le=1024,
        title="Batches ahead",
        description="Batches that each worker prefetches into host memory.",
    )
    pin: bool = Field(
        True,
        title="Pinned memory",
        description="Put batches into pinned memory, so that copies to a GPU overlap with "
        "computation.",
    )
    wait_seconds: float = Field(
        60.0,
        gt=0,
        le=10**6,
        title="Max wait (seconds)",
        description="A run that waits longer for a batch logs the stacks of its data workers, and "
        "continues to wait.",
    )


class Spike(Group):
    """Detection of sudden rises of the loss, and rollback after them."""

    threshold: Annotated[float, Field(gt=1, le=10**6)] | None = Field(
        10.0,
        description="A loss above the whole window is a spike if it is at least this many robust "
        "standard deviations above the window's median. Empty: no detection.",
    )
    window_steps: int = Field(
        100,
        ge=16,
        le=10_000,
        title="Window",
        description="Number of previous steps that a step is compared with.",
    )
    rollback: bool = Field(
        False,
        description="Roll back to the last periodic checkpoint before a spike, and continue "
        "without the examples of the steps in between.",
    )
    check_every_steps: int = Field(
        50,
        ge=1,
        le=MOST_STEPS,
        title="Check every … steps",
        description="With rollback: steps between checks for a spike, in which the host waits for "
        "the device. Each checkpoint is preceded by a check, too.",
    )
    max_rollbacks: int = Field(3, ge=1, le=1000, description="Limit for the whole run.")
    afterwards: Literal["continue", "fail"] = Field(
        "continue",
        title="After the last rollback",
        description="Action at a spike once the maximum number of rollbacks is reached.",
    )

    @model_validator(mode="after")
    def _a_rollback_needs_a_threshold(self) -> Self:
        if self.rollback and self.threshold is None:
            raise ValueError("rollback is on, but threshold is empty; set threshold")
        return self


class PrecisionLab(Group):
    """What a run measures instead of training."""

    task: Literal["train", "precision_plan", "precision_diff"] = Field(
        "train",
        description="precision_plan: search for the fastest mix of precisions within the bounds. "
        "precision_diff: compare one batch in this precision and in fp32, module by module. Both "
        "only measure and do not train.",
    )
    checkpoints: Annotated[
        list[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,9}$")]], Field(max_length=3)
    ] = Field(
        [],
        description="Steps of the parent run's checkpoints to measure with, such as 100, 200. "
        "Empty: the one that the run starts from.",
    )
    fresh_weights: bool = Field(
        True,
        description="Also plan with the recipe's initial weights.",
    )
    batches: int = Field(
        2,
        ge=1,
        le=4,
        description="Number of batches that a plan measures with each set of weights.",
    )
    max_error: float = Field(
        0.1,
        ge=0,
        le=10,
        description="Largest relative L2 error of the whole gradient against fp32 in a plan.",
    )
    min_cosine: float = Field(
        0.99,
        ge=-1,
        le=1,
        description="Smallest cosine similarity of the whole gradient with that of fp32 in a plan.",
    )


class RecipeConfig(Group):
    """Base class of a recipe's own fields."""

    model_config = ConfigDict(field_title_generator=None)

    learning_rate: float = Field(
        1e-3,
        gt=0,
        le=1e6,
        title="Learning rate",
        description="Peak learning rate of the optimizer.",
    )
