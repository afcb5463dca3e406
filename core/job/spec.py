"""The job: model, data, length of training, and the number of losses to survive.

Owns the types and their checks; `oobleck.core.job.file` parses them from a file.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from msgspec import Meta

from oobleck.core.ids import check_name
from oobleck.core.job.checks import MOST, MOST_PATH, Count, NotNegative, check_paths, check_place
from oobleck.core.job.code import NO_ARGUMENTS, Code, Json, check_code
from oobleck.core.job.model import AnyModel, ModelSpec, OwnModelSpec
from oobleck.core.job.optimization import OptimizerSpec, ScheduleSpec
from oobleck.core.redact import redact
from oobleck.core.schedules import Schedule
from oobleck.core.units import parse_seconds

Precision = Literal["fp32", "bf16", "fp8", "fp64"]
#: Recipes of float8 products, by torchao's names.
Float8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
Products = Literal["highest", "high", "medium"]
Recompute = Literal["none", "layer"]
#: Sizes of factors in float8 are multiples of this.
FLOAT8_MULTIPLE = 16
GradientSums = Literal["full", "bf16"]
OnStateLost = Literal["fail", "restart"]
RecoveryPolicy = Literal[
    "auto", "templates", "reroute", "normalise", "shadow", "uneven", "morph", "wait", "stay"
]
#: Policies by which other nodes that hold the same layers answer a loss.
OF_SEVERAL_HOLDERS: frozenset[RecoveryPolicy] = frozenset(
    {"reroute", "normalise", "shadow", "stay"}
)
Shadows = Literal["auto", "none"]
TransportName = Literal["auto", "tcp"]
DataPlane = Literal["auto", "sealed", "clear"]
#: Programs that `track` may name.
Tracker = Literal["tensorboard", "wandb", "mlflow"]
TRACKERS: tuple[Tracker, ...] = get_args(Tracker)


def fit_float8(*sizes: int) -> bool:
    """Return whether factors of these sizes multiply in float8."""
    return not any(size % FLOAT8_MULTIPLE for size in sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Source of samples: text files, one flat file of token ids, or the user's data set."""

    text: tuple[str, ...] = ()
    tokens: str | None = None
    #: Type of the ids in `tokens`; None: the metadata file beside it has it.
    dtype: Literal["uint8", "uint16", "uint32"] | None = None
    #: Path of a tokenizer.json for `text`; None: every byte is a token.
    tokenizer: str | None = None
    #: Separator after every document of `text`: a token of the tokenizer, or any text for bytes.
    #: None: the tokenizer's end-of-text token, and none for bytes. Empty: none.
    separator: str | None = None
    #: Field that holds the text in files of JSON lines.
    field: str = "text"
    #: Directory on every node for tokenised texts; None: one in the home directory.
    cache: str | None = None
    #: Map-style data set: the result of an entry point of oobleck.data, or of a function.
    plugin: str | None = None
    python: str | None = None
    #: Directory on every node that holds the function's module; None: it is installed.
    path: str | None = None
    #: Arguments of the function.
    arguments: Json = NO_ARGUMENTS
    #: Processes of each worker that read its samples; 0: a thread does.
    workers: Annotated[int, Meta(ge=0, le=64)] = 0

    def __post_init__(self) -> None:
        check_code(plugin=self.plugin, python=self.python, path=self.path)
        own = self.code is not None
        if (bool(self.text), self.tokens is not None, own).count(True) != 1:
            raise ValueError(
                "data: give exactly one of text (paths or globs), tokens (a file), and plugin or "
                "python (a data set of your own)"
            )
        check_paths("text", self.text)
        for name in ("tokens", "tokenizer", "cache", "path"):
            check_paths(name, [getattr(self, name)])
        for name in ("tokenizer", "separator", "cache"):
            if not self.text and getattr(self, name) is not None:
                what = "a data set of your own gives" if own else "a tokens file holds"
                raise ValueError(f"{name}: goes with text; {what} samples already, so leave it out")
        if not own and self.arguments != NO_ARGUMENTS:
            raise ValueError("arguments: are those of plugin or python; leave them out")
        if not own and self.workers:
            raise ValueError(
                "workers: read the samples of plugin or python; text and tokens need none, so "
                "leave it out"
            )

    @property
    def code(self) -> Code | None:
        """Code that makes the data set; None where it is files of tokens."""
        name = self.plugin or self.python
        if name is None:
            return None
        group = "oobleck.data" if self.plugin else None
        return Code(name=name, group=group, path=self.path, arguments=self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    steps: Annotated[int, Meta(ge=1, le=10**9)]
    #: Samples per step over all pipelines.
    global_batch: Annotated[int, Meta(ge=1, le=1 << 17)]
    #: Samples per micro-batch.
    microbatch: Count = 1
    seed: Annotated[int, Meta(ge=0, le=MOST)] = 0
    precision: Precision = "fp32"
    #: Scales of products in float8, in fp8 jobs.
    fp8_recipe: Float8Recipe = "tensorwise"
    #: Precision of float32 matrix products, by torch's names.
    float32_matmul: Products = "highest"
    #: Type of gradients on their way to be summed: as trained, or rounded.
    gradient_sums: GradientSums = "full"
    #: layer: keep only each layer's input between forward and backward, and recompute the rest.
    recompute: Recompute = "none"
    #: True: layers go through torch's compiler: the blocks of a built-in model, and those of a
    #: user's as far as they can.
    compile: bool = False
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    #: Order of compute in a pipeline; auto: the fastest whose memory fits.
    pipeline_schedule: Literal["auto", Schedule] = "auto"
    #: Largest global gradient norm; None: no clipping.
    clip: Annotated[float, Meta(gt=0)] | None = 1.0
    #: Consecutive steps skipped for a loss or gradients that are not finite, after which the job
    #: fails; None: it never does.
    max_skipped_steps: Count | None = 100

    def __post_init__(self) -> None:
        check_paths("path", [self.optimizer.path])
        if self.fp8_recipe != "tensorwise" and self.precision != "fp8":
            raise ValueError(
                f"fp8_recipe: {self.fp8_recipe} scales products in float8, and precision is "
                f"{self.precision}; set precision to fp8, or leave the recipe out"
            )
        if self.gradient_sums == "bf16" and self.precision == "fp64":
            raise ValueError(
                "gradient_sums: bf16 rounds gradients to 8 bits, and precision is fp64; leave it "
                "out, or choose precision fp32 or bf16"
            )
        if self.schedule.min_lr > self.optimizer.lr:
            raise ValueError(
                f"min_lr: {self.schedule.min_lr} is above the optimizer's lr "
                f"({self.optimizer.lr}), from which the rate falls; lower it"
            )
        if self.global_batch % self.microbatch:
            raise ValueError(
                f"microbatch: {self.microbatch} does not divide global_batch "
                f"({self.global_batch}); choose a divisor of it"
            )

    @property
    def narrow(self) -> bool:
        """True if layers compute in bfloat16, some products perhaps in float8."""
        return self.precision in ("bf16", "fp8")

    @property
    def wanted_schedule(self) -> Schedule | None:
        """Schedule that the job asks for; None: planning chooses."""
        return None if self.pipeline_schedule == "auto" else self.pipeline_schedule

    @property
    def microbatches(self) -> int:
        """Micro-batches per step over all pipelines."""
        return self.global_batch // self.microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSpec:
    """Settings of periodic evaluation: the loss on samples that are not trained on."""

    #: After every so many steps, and after the last one.
    every: Count
    #: The share of the job's data that is kept out of training for it.
    fraction: Annotated[float, Meta(gt=0, lt=1)] | None = None
    #: Or data of its own.
    data: DataSpec | None = None
    #: Most samples per evaluation; every evaluation uses the same ones.
    samples: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024

    def __post_init__(self) -> None:
        if (self.fraction is None) == (self.data is None):
            raise ValueError(
                "evaluation: give exactly one of fraction (of the data) and data (of its own)"
            )

    def due(self, step: int, steps: int) -> bool:
        """Return whether the state after `step` of `steps` is evaluated."""
        return step > 0 and (step % self.every == 0 or step == steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceSpec:
    """Resources of each worker that the plan may use, and limits on the shape of pipelines."""

    #: Budget for state and activations of one worker; None: what its node reports.
    memory_per_worker_bytes: Count | None = None
    #: Lower bound for the nodes of one pipeline, above what memory asks for.
    min_nodes_per_pipeline: Count = 1
    #: auto: NCCL where every worker has a GPU to itself, and TCP elsewhere; tcp: always that.
    transport: TransportName = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """Settings of checkpoints: where and when the training state is saved, and whether an existing
    checkpoint is resumed."""

    #: Directory or fsspec URL, the same place on all nodes.
    path: str
    #: Steps between two checkpoints; auto: as often as the cost of a save and the rate of losses
    #: that workers do not survive make best.
    every: Count | Literal["auto"] = 100
    #: Newest checkpoints that stay.
    keep: Count = 3
    #: A job whose path holds checkpoints goes on from the newest valid one (auto), must find one
    #: (require), or must find none (never).
    resume: Literal["auto", "never", "require"] = "auto"
    #: True: the state after the last step is saved, whatever `every` is.
    at_end: bool = True

    def __post_init__(self) -> None:
        check_place("path", self.path, "a directory or an fsspec URL")

    def why_not_reportable(self) -> str:
        """Return why the path of a checkpoint cannot be sent to the master; empty: it can.

        Called for new jobs only; jobs in a journal are accepted whatever their path.
        """
        shown = redact(self.path)
        if not shown.isprintable():
            return "has characters that a table cannot show, such as a no-break space"
        if len(shown) > MOST_PATH:
            return f"is longer than {MOST_PATH} characters where its secrets are hidden"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySpec:
    """Settings of recovery from a loss; see `oobleck.planner.recovery.policies`."""

    #: Preferred answer to losses, where it applies; auto: the one that is expected to commit most
    #: steps until the next loss.
    policy: RecoveryPolicy = "auto"
    #: Mean time between losses of one node that is expected before any is seen, as 30d or 12h.
    mtbf: str = "30d"
    #: auto: where too few nodes hold a layer for fault_tolerance, and there is memory, further
    #: nodes hold it (`oobleck.planner.search.shadows`).
    shadows: Shadows = "auto"

    def __post_init__(self) -> None:
        try:
            self.mtbf_s  # noqa: B018  # raises ValueError
        except ValueError as error:
            raise ValueError(f"mtbf: {error}") from error
        if self.policy == "shadow" and self.shadows == "none":
            raise ValueError(
                "policy: shadow needs shadows; set shadows to auto, or policy to reroute"
            )

    @property
    def mtbf_s(self) -> float:
        return parse_seconds(self.mtbf)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Training run, as its job file describes it."""

    name: str
    model: AnyModel
    data: DataSpec
    training: TrainingSpec
    #: None: no evaluation.
    evaluation: EvaluationSpec | None = None
    #: Node losses at a time that must not cost more than the step in flight.
    fault_tolerance: NotNegative = 1
    resources: ResourceSpec = field(default_factory=ResourceSpec)
    #: Directory for the final weights, the same on all nodes; None: they are not saved.
    output: str | None = None
    #: None: the training state is never saved.
    checkpoint: CheckpointSpec | None = None
    #: Source of the times and bytes for planning: `measure` (or a stored measurement), `estimate`,
    #: or the path of a profile file.
    profile: str = "measure"
    #: True: nodes with another major.minor of torch than the majority may take part.
    allow_mixed_versions: bool = False
    #: When no worker holds the state any more and there is no checkpoint: end the job (fail), or
    #: begin anew at step 1 (restart).
    on_state_lost: OnStateLost = "fail"
    recovery: RecoverySpec = field(default_factory=RecoverySpec)
    #: Encryption of links between workers; auto: sealed except where the link stays on the host.
    data_plane: DataPlane = "auto"
    #: Programs that the head node keeps a copy of metrics and events for.
    track: tuple[Tracker, ...] = ()
    #: A wheel that has the job's functions: its path, or its hash as `sha256:HEX` where the master
    #: has it. None: they are on the nodes.
    code: str | None = None

    def __post_init__(self) -> None:
        check_name(self.name, "job")
        check_place("profile", self.profile, "measure, estimate or a profile file's path")
        check_paths("output", [self.output])
        check_paths("code", [self.code])
        if len(set(self.track)) < len(self.track):
            raise ValueError("track: names a program twice; name it once")
        policy = self.recovery.policy
        if policy in OF_SEVERAL_HOLDERS and self.fault_tolerance == 0:
            raise ValueError(
                f"policy: {policy} needs other nodes that hold the same layers; set "
                "fault_tolerance to 1 or more, or policy to auto"
            )
        least = self.resources.min_nodes_per_pipeline
        if self.model.known and least > self.model.layer_count:
            parts = " (embedding, blocks and head)" if isinstance(self.model, ModelSpec) else ""
            raise ValueError(
                f"min_nodes_per_pipeline: {least} nodes are more "
                f"than the {self.model.layer_count} layers{parts} that a pipeline spreads over "
                "them; lower it"
            )
        self._check_data()
        if self.training.compile and isinstance(self.model, ModelSpec) and self.model.dropout:
            raise ValueError(
                f"compile: dropout ({self.model.dropout}) of a built-in model draws by sample, "
                "which compiled code cannot; set dropout to 0, or leave compile out"
            )
        hidden = self.model.hidden if isinstance(self.model, ModelSpec) else 0
        if self.training.precision == "fp8" and not fit_float8(hidden):
            raise ValueError(
                f"precision: fp8 multiplies matrices whose sizes are multiples of "
                f"{FLOAT8_MULTIPLE}, and the model has {hidden} hidden units; choose such a "
                "number, or set precision to bf16"
            )
        if self.training.microbatches < self.fault_tolerance + 1:
            raise ValueError(
                f"global_batch: {self.training.global_batch} samples in micro-batches of "
                f"{self.training.microbatch} are {self.training.microbatches} micro-batches, too "
                f"few for the {self.fault_tolerance + 1} pipelines that fault_tolerance "
                f"{self.fault_tolerance} needs; enlarge global_batch, lower microbatch, or lower "
                f"fault_tolerance to {self.training.microbatches - 1}"
            )

    def _check_data(self) -> None:
        """Raise ValueError where the model cannot take this data."""
        built_in = isinstance(self.model, ModelSpec)
        evaluated = self.evaluation.data if self.evaluation else None
        for data in (self.data, evaluated):
            if data is None:
                continue
            if built_in and data.code is not None:
                raise ValueError(
                    "data: a data set of your own goes with a model of your own (model.python or "
                    "model.plugin); give text or tokens"
                )
            if self.model.labelled and data.code is None:
                raise ValueError(
                    "data: a model of that architecture learns from labels, and text and tokens "
                    "have none but the next token; give a data set of (inputs, labels) as "
                    "data.python or data.plugin"
                )
            if not built_in and data.code is None and not self.model.reads_tokens:
                raise ValueError(
                    "data: text and tokens are cut into rows of model.sequence_length; give that, "
                    "or a data set of your own (data.python or data.plugin)"
                )

    def seals_links(self, *, on_loopback: bool) -> bool:
        """Return whether a worker wants its links sealed. `on_loopback`: others reach it only on
        loopback."""
        return self.data_plane == "sealed" or (self.data_plane == "auto" and not on_loopback)

    @property
    def functions(self) -> tuple[Code, ...]:
        """Functions of the user's that the job names."""
        named = [self.data.code, self.training.optimizer.code]
        if isinstance(self.model, OwnModelSpec) and self.model.architecture is None:
            named.append(self.model.code)
        if self.evaluation is not None and self.evaluation.data is not None:
            named.append(self.evaluation.data.code)
        return tuple(code for code in named if code is not None)

    @property
    def profile_path(self) -> str | None:
        """Path of the profile file that the job names; None: it names none."""
        return None if self.profile in ("measure", "estimate") else self.profile
