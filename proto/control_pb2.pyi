from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerId(_message.Message):
    __slots__ = ("node", "slot")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    node: str
    slot: int
    def __init__(self, node: _Optional[str] = ..., slot: _Optional[int] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("first_layer", "last_layer", "workers", "resident")
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    last_layer: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerId]
    resident: bool
    def __init__(self, first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerId, _Mapping]]] = ..., resident: _Optional[bool] = ...) -> None: ...

class Pipeline(_message.Message):
    __slots__ = ("nodes", "stages", "first_microbatch", "microbatches")
    NODES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    FIRST_MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    stages: _containers.RepeatedCompositeFieldContainer[Stage]
    first_microbatch: int
    microbatches: int
    def __init__(self, nodes: _Optional[_Iterable[str]] = ..., stages: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ..., first_microbatch: _Optional[int] = ..., microbatches: _Optional[int] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("hops", "first_microbatch", "microbatches")
    HOPS_FIELD_NUMBER: _ClassVar[int]
    FIRST_MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    hops: _containers.RepeatedCompositeFieldContainer[Stage]
    first_microbatch: int
    microbatches: int
    def __init__(self, hops: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ..., first_microbatch: _Optional[int] = ..., microbatches: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("generation", "pipelines", "schedule", "routes", "holds", "shadows")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PIPELINES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    SHADOWS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    pipelines: _containers.RepeatedCompositeFieldContainer[Pipeline]
    schedule: str
    routes: _containers.RepeatedCompositeFieldContainer[Route]
    holds: _containers.RepeatedCompositeFieldContainer[Stage]
    shadows: _containers.RepeatedCompositeFieldContainer[Stage]
    def __init__(self, generation: _Optional[int] = ..., pipelines: _Optional[_Iterable[_Union[Pipeline, _Mapping]]] = ..., schedule: _Optional[str] = ..., routes: _Optional[_Iterable[_Union[Route, _Mapping]]] = ..., holds: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ..., shadows: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ...) -> None: ...

class AgentMessage(_message.Message):
    __slots__ = ("incarnation", "register", "status", "report", "records", "log", "recorded", "clock", "examined", "job_told")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    EXAMINED_FIELD_NUMBER: _ClassVar[int]
    JOB_TOLD_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    register: Register
    status: NodeStatus
    report: bytes
    records: StepRecords
    log: LogLines
    recorded: Recorded
    clock: ClockRead
    examined: Examined
    job_told: JobTold
    def __init__(self, incarnation: _Optional[str] = ..., register: _Optional[_Union[Register, _Mapping]] = ..., status: _Optional[_Union[NodeStatus, _Mapping]] = ..., report: _Optional[bytes] = ..., records: _Optional[_Union[StepRecords, _Mapping]] = ..., log: _Optional[_Union[LogLines, _Mapping]] = ..., recorded: _Optional[_Union[Recorded, _Mapping]] = ..., clock: _Optional[_Union[ClockRead, _Mapping]] = ..., examined: _Optional[_Union[Examined, _Mapping]] = ..., job_told: _Optional[_Union[JobTold, _Mapping]] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("protocol", "newest_protocol", "node", "hostname", "address", "pid", "worker_slots", "device", "memory_per_worker_bytes", "status", "device_kind", "running", "versions", "acted_on", "boot", "code", "rack")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NEWEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    WORKER_SLOTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PER_WORKER_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_KIND_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    ACTED_ON_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    newest_protocol: int
    node: str
    hostname: str
    address: str
    pid: int
    worker_slots: int
    device: str
    memory_per_worker_bytes: int
    status: NodeStatus
    device_kind: str
    running: Assignment
    versions: Versions
    acted_on: Head
    boot: str
    code: CodePolicy
    rack: str
    def __init__(self, protocol: _Optional[int] = ..., newest_protocol: _Optional[int] = ..., node: _Optional[str] = ..., hostname: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., worker_slots: _Optional[int] = ..., device: _Optional[str] = ..., memory_per_worker_bytes: _Optional[int] = ..., status: _Optional[_Union[NodeStatus, _Mapping]] = ..., device_kind: _Optional[str] = ..., running: _Optional[_Union[Assignment, _Mapping]] = ..., versions: _Optional[_Union[Versions, _Mapping]] = ..., acted_on: _Optional[_Union[Head, _Mapping]] = ..., boot: _Optional[str] = ..., code: _Optional[_Union[CodePolicy, _Mapping]] = ..., rack: _Optional[str] = ...) -> None: ...

class CodePolicy(_message.Message):
    __slots__ = ("accepts", "allows")
    ACCEPTS_FIELD_NUMBER: _ClassVar[int]
    ALLOWS_FIELD_NUMBER: _ClassVar[int]
    accepts: bool
    allows: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, accepts: _Optional[bool] = ..., allows: _Optional[_Iterable[str]] = ...) -> None: ...

class Head(_message.Message):
    __slots__ = ("cluster", "history", "term", "begun_by", "sequence", "start")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BEGUN_BY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    history: str
    term: int
    begun_by: str
    sequence: int
    start: str
    def __init__(self, cluster: _Optional[str] = ..., history: _Optional[str] = ..., term: _Optional[int] = ..., begun_by: _Optional[str] = ..., sequence: _Optional[int] = ..., start: _Optional[str] = ...) -> None: ...

class Versions(_message.Message):
    __slots__ = ("oobleck", "python", "torch", "transformers", "cuda", "nccl", "driver", "engine")
    OOBLECK_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    TORCH_FIELD_NUMBER: _ClassVar[int]
    TRANSFORMERS_FIELD_NUMBER: _ClassVar[int]
    CUDA_FIELD_NUMBER: _ClassVar[int]
    NCCL_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    oobleck: str
    python: str
    torch: str
    transformers: str
    cuda: str
    nccl: str
    driver: str
    engine: str
    def __init__(self, oobleck: _Optional[str] = ..., python: _Optional[str] = ..., torch: _Optional[str] = ..., transformers: _Optional[str] = ..., cuda: _Optional[str] = ..., nccl: _Optional[str] = ..., driver: _Optional[str] = ..., engine: _Optional[str] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("job_id", "generation", "workers", "leaving", "trouble", "failed_starts", "ending", "sick", "concern")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    FAILED_STARTS_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    SICK_FIELD_NUMBER: _ClassVar[int]
    CONCERN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    generation: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    leaving: bool
    trouble: str
    failed_starts: int
    ending: bool
    sick: str
    concern: str
    def __init__(self, job_id: _Optional[str] = ..., generation: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., leaving: _Optional[bool] = ..., trouble: _Optional[str] = ..., failed_starts: _Optional[int] = ..., ending: _Optional[bool] = ..., sick: _Optional[str] = ..., concern: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("slot", "incarnation", "pid", "card", "generation", "also_entered", "committed_step", "stepped", "finished", "data", "peak_memory_bytes", "base_memory_bytes", "compute_steps", "compute_s", "rate", "hindrance", "up_s", "beats", "doing", "waiting")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ALSO_ENTERED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    STEPPED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BASE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_STEPS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    HINDRANCE_FIELD_NUMBER: _ClassVar[int]
    UP_S_FIELD_NUMBER: _ClassVar[int]
    BEATS_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    slot: int
    incarnation: str
    pid: int
    card: str
    generation: int
    also_entered: _containers.RepeatedScalarFieldContainer[int]
    committed_step: int
    stepped: int
    finished: bool
    data: str
    peak_memory_bytes: int
    base_memory_bytes: int
    compute_steps: int
    compute_s: float
    rate: float
    hindrance: str
    up_s: float
    beats: int
    doing: str
    waiting: bool
    def __init__(self, slot: _Optional[int] = ..., incarnation: _Optional[str] = ..., pid: _Optional[int] = ..., card: _Optional[str] = ..., generation: _Optional[int] = ..., also_entered: _Optional[_Iterable[int]] = ..., committed_step: _Optional[int] = ..., stepped: _Optional[int] = ..., finished: _Optional[bool] = ..., data: _Optional[str] = ..., peak_memory_bytes: _Optional[int] = ..., base_memory_bytes: _Optional[int] = ..., compute_steps: _Optional[int] = ..., compute_s: _Optional[float] = ..., rate: _Optional[float] = ..., hindrance: _Optional[str] = ..., up_s: _Optional[float] = ..., beats: _Optional[int] = ..., doing: _Optional[str] = ..., waiting: _Optional[bool] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("step", "loss", "samples", "seconds", "time")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss: float
    samples: int
    seconds: float
    time: float
    def __init__(self, step: _Optional[int] = ..., loss: _Optional[float] = ..., samples: _Optional[int] = ..., seconds: _Optional[float] = ..., time: _Optional[float] = ...) -> None: ...

class Recorded(_message.Message):
    __slots__ = ("job_id", "slot", "recording", "part", "more")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    slot: int
    recording: str
    part: int
    more: bool
    def __init__(self, job_id: _Optional[str] = ..., slot: _Optional[int] = ..., recording: _Optional[str] = ..., part: _Optional[int] = ..., more: _Optional[bool] = ...) -> None: ...

class ClockRead(_message.Message):
    __slots__ = ("number", "monotonic_ns", "boot")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MONOTONIC_NS_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    number: int
    monotonic_ns: int
    boot: str
    def __init__(self, number: _Optional[int] = ..., monotonic_ns: _Optional[int] = ..., boot: _Optional[str] = ...) -> None: ...

class Examined(_message.Message):
    __slots__ = ("number", "answer")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    number: int
    answer: bytes
    def __init__(self, number: _Optional[int] = ..., answer: _Optional[bytes] = ...) -> None: ...

class JobTold(_message.Message):
    __slots__ = ("number", "job")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    number: int
    job: str
    def __init__(self, number: _Optional[int] = ..., job: _Optional[str] = ...) -> None: ...

class StepRecords(_message.Message):
    __slots__ = ("job_id", "records", "restored_in")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_IN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    records: _containers.RepeatedCompositeFieldContainer[StepRecord]
    restored_in: int
    def __init__(self, job_id: _Optional[str] = ..., records: _Optional[_Iterable[_Union[StepRecord, _Mapping]]] = ..., restored_in: _Optional[int] = ...) -> None: ...

class StepRecord(_message.Message):
    __slots__ = ("step", "loss", "grad_norm", "tokens", "samples_digest", "generation", "step_seconds", "time", "skipped")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss: float
    grad_norm: float
    tokens: int
    samples_digest: str
    generation: int
    step_seconds: float
    time: float
    skipped: bool
    def __init__(self, step: _Optional[int] = ..., loss: _Optional[float] = ..., grad_norm: _Optional[float] = ..., tokens: _Optional[int] = ..., samples_digest: _Optional[str] = ..., generation: _Optional[int] = ..., step_seconds: _Optional[float] = ..., time: _Optional[float] = ..., skipped: _Optional[bool] = ...) -> None: ...

class LogLines(_message.Message):
    __slots__ = ("job_id", "slot", "lines", "dropped")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    slot: int
    lines: _containers.RepeatedScalarFieldContainer[str]
    dropped: int
    def __init__(self, job_id: _Optional[str] = ..., slot: _Optional[int] = ..., lines: _Optional[_Iterable[str]] = ..., dropped: _Optional[int] = ...) -> None: ...

class MasterMessage(_message.Message):
    __slots__ = ("welcome", "refused", "assignment", "ack", "record", "clock", "examine", "tell_job", "return_code")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    EXAMINE_FIELD_NUMBER: _ClassVar[int]
    TELL_JOB_FIELD_NUMBER: _ClassVar[int]
    RETURN_CODE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refused: Refused
    assignment: Assignment
    ack: Ack
    record: Record
    clock: ReadClock
    examine: Examine
    tell_job: TellJob
    return_code: ReturnCode
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., record: _Optional[_Union[Record, _Mapping]] = ..., clock: _Optional[_Union[ReadClock, _Mapping]] = ..., examine: _Optional[_Union[Examine, _Mapping]] = ..., tell_job: _Optional[_Union[TellJob, _Mapping]] = ..., return_code: _Optional[_Union[ReturnCode, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("detection", "protocol", "head", "addresses")
    DETECTION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    detection: Detection
    protocol: int
    head: Head
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, detection: _Optional[_Union[Detection, _Mapping]] = ..., protocol: _Optional[int] = ..., head: _Optional[_Union[Head, _Mapping]] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class Detection(_message.Message):
    __slots__ = ("heartbeat_s", "lease_s", "return_s", "ping_every_s", "ping_timeout_s", "answer_s", "longest_retry_s", "witness_window_s", "regroup_s", "longest_regroup_s", "hang_s", "stall_s", "lag_limit_s", "replacement_grace_s", "join_settle_s", "storage_s", "first_step_s", "fruitless_s", "start_timeout_s", "away_s", "profile_timeout_s", "meeting_s", "quarantine_s", "stand_by_s", "gpu_grace_s")
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    RETURN_S_FIELD_NUMBER: _ClassVar[int]
    PING_EVERY_S_FIELD_NUMBER: _ClassVar[int]
    PING_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    ANSWER_S_FIELD_NUMBER: _ClassVar[int]
    LONGEST_RETRY_S_FIELD_NUMBER: _ClassVar[int]
    WITNESS_WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    REGROUP_S_FIELD_NUMBER: _ClassVar[int]
    LONGEST_REGROUP_S_FIELD_NUMBER: _ClassVar[int]
    HANG_S_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    LAG_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    REPLACEMENT_GRACE_S_FIELD_NUMBER: _ClassVar[int]
    JOIN_SETTLE_S_FIELD_NUMBER: _ClassVar[int]
    STORAGE_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    FRUITLESS_S_FIELD_NUMBER: _ClassVar[int]
    START_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    AWAY_S_FIELD_NUMBER: _ClassVar[int]
    PROFILE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    MEETING_S_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_S_FIELD_NUMBER: _ClassVar[int]
    STAND_BY_S_FIELD_NUMBER: _ClassVar[int]
    GPU_GRACE_S_FIELD_NUMBER: _ClassVar[int]
    heartbeat_s: float
    lease_s: float
    return_s: float
    ping_every_s: float
    ping_timeout_s: float
    answer_s: float
    longest_retry_s: float
    witness_window_s: float
    regroup_s: float
    longest_regroup_s: float
    hang_s: float
    stall_s: float
    lag_limit_s: float
    replacement_grace_s: float
    join_settle_s: float
    storage_s: float
    first_step_s: float
    fruitless_s: float
    start_timeout_s: float
    away_s: float
    profile_timeout_s: float
    meeting_s: float
    quarantine_s: float
    stand_by_s: float
    gpu_grace_s: float
    def __init__(self, heartbeat_s: _Optional[float] = ..., lease_s: _Optional[float] = ..., return_s: _Optional[float] = ..., ping_every_s: _Optional[float] = ..., ping_timeout_s: _Optional[float] = ..., answer_s: _Optional[float] = ..., longest_retry_s: _Optional[float] = ..., witness_window_s: _Optional[float] = ..., regroup_s: _Optional[float] = ..., longest_regroup_s: _Optional[float] = ..., hang_s: _Optional[float] = ..., stall_s: _Optional[float] = ..., lag_limit_s: _Optional[float] = ..., replacement_grace_s: _Optional[float] = ..., join_settle_s: _Optional[float] = ..., storage_s: _Optional[float] = ..., first_step_s: _Optional[float] = ..., fruitless_s: _Optional[float] = ..., start_timeout_s: _Optional[float] = ..., away_s: _Optional[float] = ..., profile_timeout_s: _Optional[float] = ..., meeting_s: _Optional[float] = ..., quarantine_s: _Optional[float] = ..., stand_by_s: _Optional[float] = ..., gpu_grace_s: _Optional[float] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "temporary", "revoked")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEMPORARY_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    reason: str
    temporary: bool
    revoked: bool
    def __init__(self, reason: _Optional[str] = ..., temporary: _Optional[bool] = ..., revoked: _Optional[bool] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("version", "job_id", "job", "worker_incarnations", "save", "drained", "assign", "measure", "head")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    version: int
    job_id: str
    job: str
    worker_incarnations: _containers.RepeatedScalarFieldContainer[str]
    save: int
    drained: bool
    assign: bytes
    measure: bytes
    head: Head
    def __init__(self, version: _Optional[int] = ..., job_id: _Optional[str] = ..., job: _Optional[str] = ..., worker_incarnations: _Optional[_Iterable[str]] = ..., save: _Optional[int] = ..., drained: _Optional[bool] = ..., assign: _Optional[bytes] = ..., measure: _Optional[bytes] = ..., head: _Optional[_Union[Head, _Mapping]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("job_id", "through_step", "evaluated_step")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    THROUGH_STEP_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_STEP_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    through_step: int
    evaluated_step: int
    def __init__(self, job_id: _Optional[str] = ..., through_step: _Optional[int] = ..., evaluated_step: _Optional[int] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("job_id", "number", "first_step", "last_step")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    number: int
    first_step: int
    last_step: int
    def __init__(self, job_id: _Optional[str] = ..., number: _Optional[int] = ..., first_step: _Optional[int] = ..., last_step: _Optional[int] = ...) -> None: ...

class ReadClock(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Examine(_message.Message):
    __slots__ = ("number", "order")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    number: int
    order: bytes
    def __init__(self, number: _Optional[int] = ..., order: _Optional[bytes] = ...) -> None: ...

class TellJob(_message.Message):
    __slots__ = ("number", "job_id")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    number: int
    job_id: str
    def __init__(self, number: _Optional[int] = ..., job_id: _Optional[str] = ...) -> None: ...

class ReturnCode(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    def __init__(self, sha256: _Optional[str] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("request_id", "job", "profile", "profile_only")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_ONLY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    job: str
    profile: str
    profile_only: bool
    def __init__(self, request_id: _Optional[str] = ..., job: _Optional[str] = ..., profile: _Optional[str] = ..., profile_only: _Optional[bool] = ...) -> None: ...

class CodeChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class CodeReply(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    def __init__(self, sha256: _Optional[str] = ...) -> None: ...

class CodeRequest(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    def __init__(self, sha256: _Optional[str] = ...) -> None: ...

class ProfileReply(_message.Message):
    __slots__ = ("profile", "key")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    profile: str
    key: str
    def __init__(self, profile: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class PlanningReply(_message.Message):
    __slots__ = ("planning",)
    PLANNING_FIELD_NUMBER: _ClassVar[int]
    planning: bytes
    def __init__(self, planning: _Optional[bytes] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("job_id", "warning")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    warning: str
    def __init__(self, job_id: _Optional[str] = ..., warning: _Optional[str] = ...) -> None: ...

class JobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id", "job_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    job_id: str
    def __init__(self, request_id: _Optional[str] = ..., job_id: _Optional[str] = ...) -> None: ...

class AdoptRequest(_message.Message):
    __slots__ = ("request_id", "job_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    job_id: str
    def __init__(self, request_id: _Optional[str] = ..., job_id: _Optional[str] = ...) -> None: ...

class AdoptReply(_message.Message):
    __slots__ = ("lost",)
    LOST_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lost: _Optional[_Iterable[str]] = ...) -> None: ...

class CancelUnknownReply(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class HeldJob(_message.Message):
    __slots__ = ("job_id", "nodes", "committed_step", "generation", "since")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    nodes: _containers.RepeatedScalarFieldContainer[str]
    committed_step: int
    generation: int
    since: float
    def __init__(self, job_id: _Optional[str] = ..., nodes: _Optional[_Iterable[str]] = ..., committed_step: _Optional[int] = ..., generation: _Optional[int] = ..., since: _Optional[float] = ...) -> None: ...

class HeadStatus(_message.Message):
    __slots__ = ("head", "behind", "superseded", "held")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    head: Head
    behind: int
    superseded: str
    held: _containers.RepeatedCompositeFieldContainer[HeldJob]
    def __init__(self, head: _Optional[_Union[Head, _Mapping]] = ..., behind: _Optional[int] = ..., superseded: _Optional[str] = ..., held: _Optional[_Iterable[_Union[HeldJob, _Mapping]]] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("request_id", "job_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    job_id: str
    def __init__(self, request_id: _Optional[str] = ..., job_id: _Optional[str] = ...) -> None: ...

class SaveCheckpointReply(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class TimelineRequest(_message.Message):
    __slots__ = ("job_id", "steps")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    steps: int
    def __init__(self, job_id: _Optional[str] = ..., steps: _Optional[int] = ...) -> None: ...

class TimelineReply(_message.Message):
    __slots__ = ("trace",)
    TRACE_FIELD_NUMBER: _ClassVar[int]
    trace: str
    def __init__(self, trace: _Optional[str] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListJobsReply(_message.Message):
    __slots__ = ("jobs", "problem", "head")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    problem: str
    head: HeadStatus
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ..., problem: _Optional[str] = ..., head: _Optional[_Union[HeadStatus, _Mapping]] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job_id", "name", "state", "reason", "generation", "committed_step", "recorded_step", "steps", "loss", "tokens_per_s", "mfu", "submitted_at", "started_at", "finished_at", "plan", "can_lose", "eta_s", "reconfigurations", "policy", "plan_policy", "then", "directory", "profile", "checkpoint", "checkpoint_step", "checkpoint_path", "checkpoint_at", "outlook", "save_failure", "evaluation", "skipped_steps", "memory", "data_plane", "incidents", "last_incident", "last_incident_at", "slow_workers", "redo", "problem", "journal_cut_at", "last_step_age_s", "records_lost", "lost_records")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    RECORDED_STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MFU_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    CAN_LOSE_FIELD_NUMBER: _ClassVar[int]
    ETA_S_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURATIONS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PLAN_POLICY_FIELD_NUMBER: _ClassVar[int]
    THEN_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_PATH_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_AT_FIELD_NUMBER: _ClassVar[int]
    OUTLOOK_FIELD_NUMBER: _ClassVar[int]
    SAVE_FAILURE_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_STEPS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    DATA_PLANE_FIELD_NUMBER: _ClassVar[int]
    INCIDENTS_FIELD_NUMBER: _ClassVar[int]
    LAST_INCIDENT_FIELD_NUMBER: _ClassVar[int]
    LAST_INCIDENT_AT_FIELD_NUMBER: _ClassVar[int]
    SLOW_WORKERS_FIELD_NUMBER: _ClassVar[int]
    REDO_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_CUT_AT_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    RECORDS_LOST_FIELD_NUMBER: _ClassVar[int]
    LOST_RECORDS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    name: str
    state: str
    reason: str
    generation: int
    committed_step: int
    recorded_step: int
    steps: int
    loss: float
    tokens_per_s: float
    mfu: float
    submitted_at: float
    started_at: float
    finished_at: float
    plan: Plan
    can_lose: int
    eta_s: float
    reconfigurations: int
    policy: str
    plan_policy: str
    then: str
    directory: str
    profile: str
    checkpoint: str
    checkpoint_step: int
    checkpoint_path: str
    checkpoint_at: float
    outlook: Outlook
    save_failure: str
    evaluation: Evaluation
    skipped_steps: int
    memory: _containers.RepeatedCompositeFieldContainer[WorkerMemory]
    data_plane: str
    incidents: int
    last_incident: str
    last_incident_at: float
    slow_workers: _containers.RepeatedCompositeFieldContainer[WorkerId]
    redo: Redo
    problem: str
    journal_cut_at: float
    last_step_age_s: float
    records_lost: int
    lost_records: _containers.RepeatedCompositeFieldContainer[LostRecords]
    def __init__(self, job_id: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., generation: _Optional[int] = ..., committed_step: _Optional[int] = ..., recorded_step: _Optional[int] = ..., steps: _Optional[int] = ..., loss: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., mfu: _Optional[float] = ..., submitted_at: _Optional[float] = ..., started_at: _Optional[float] = ..., finished_at: _Optional[float] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., can_lose: _Optional[int] = ..., eta_s: _Optional[float] = ..., reconfigurations: _Optional[int] = ..., policy: _Optional[str] = ..., plan_policy: _Optional[str] = ..., then: _Optional[str] = ..., directory: _Optional[str] = ..., profile: _Optional[str] = ..., checkpoint: _Optional[str] = ..., checkpoint_step: _Optional[int] = ..., checkpoint_path: _Optional[str] = ..., checkpoint_at: _Optional[float] = ..., outlook: _Optional[_Union[Outlook, _Mapping]] = ..., save_failure: _Optional[str] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., skipped_steps: _Optional[int] = ..., memory: _Optional[_Iterable[_Union[WorkerMemory, _Mapping]]] = ..., data_plane: _Optional[str] = ..., incidents: _Optional[int] = ..., last_incident: _Optional[str] = ..., last_incident_at: _Optional[float] = ..., slow_workers: _Optional[_Iterable[_Union[WorkerId, _Mapping]]] = ..., redo: _Optional[_Union[Redo, _Mapping]] = ..., problem: _Optional[str] = ..., journal_cut_at: _Optional[float] = ..., last_step_age_s: _Optional[float] = ..., records_lost: _Optional[int] = ..., lost_records: _Optional[_Iterable[_Union[LostRecords, _Mapping]]] = ...) -> None: ...

class Outlook(_message.Message):
    __slots__ = ("losses_per_node_day", "next_loss_s", "prior_mtbf_s", "seen", "back_s")
    LOSSES_PER_NODE_DAY_FIELD_NUMBER: _ClassVar[int]
    NEXT_LOSS_S_FIELD_NUMBER: _ClassVar[int]
    PRIOR_MTBF_S_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    BACK_S_FIELD_NUMBER: _ClassVar[int]
    losses_per_node_day: float
    next_loss_s: float
    prior_mtbf_s: float
    seen: float
    back_s: float
    def __init__(self, losses_per_node_day: _Optional[float] = ..., next_loss_s: _Optional[float] = ..., prior_mtbf_s: _Optional[float] = ..., seen: _Optional[float] = ..., back_s: _Optional[float] = ...) -> None: ...

class LostRecords(_message.Message):
    __slots__ = ("first_step", "last_step", "why")
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    first_step: int
    last_step: int
    why: str
    def __init__(self, first_step: _Optional[int] = ..., last_step: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class Redo(_message.Message):
    __slots__ = ("first_step", "last_step", "committed_step")
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    first_step: int
    last_step: int
    committed_step: int
    def __init__(self, first_step: _Optional[int] = ..., last_step: _Optional[int] = ..., committed_step: _Optional[int] = ...) -> None: ...

class WorkerMemory(_message.Message):
    __slots__ = ("worker", "peak_bytes", "predicted_bytes")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerId
    peak_bytes: int
    predicted_bytes: int
    def __init__(self, worker: _Optional[_Union[WorkerId, _Mapping]] = ..., peak_bytes: _Optional[int] = ..., predicted_bytes: _Optional[int] = ...) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainNodesRequest(_message.Message):
    __slots__ = ("request_id", "nodes", "reason", "force")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    nodes: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    force: bool
    def __init__(self, request_id: _Optional[str] = ..., nodes: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class DrainNodesReply(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ...) -> None: ...

class UndrainNodeRequest(_message.Message):
    __slots__ = ("request_id", "node")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    node: str
    def __init__(self, request_id: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...

class ForgetNodeRequest(_message.Message):
    __slots__ = ("request_id", "node")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    node: str
    def __init__(self, request_id: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...

class NodeForgotten(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNodesReply(_message.Message):
    __slots__ = ("nodes", "problem", "head")
    NODES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    problem: str
    head: HeadStatus
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ..., problem: _Optional[str] = ..., head: _Optional[_Union[HeadStatus, _Mapping]] = ...) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("node", "state", "reason", "hostname", "address", "pid", "worker_slots", "device", "memory_per_worker_bytes", "job_id", "generation", "last_heard_s", "heard_before", "workers", "failures", "versions", "protocol", "code", "rack", "kept")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    WORKER_SLOTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PER_WORKER_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARD_S_FIELD_NUMBER: _ClassVar[int]
    HEARD_BEFORE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    node: str
    state: str
    reason: str
    hostname: str
    address: str
    pid: int
    worker_slots: int
    device: str
    memory_per_worker_bytes: int
    job_id: str
    generation: int
    last_heard_s: float
    heard_before: bool
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    failures: int
    versions: Versions
    protocol: int
    code: CodePolicy
    rack: str
    kept: str
    def __init__(self, node: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., hostname: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., worker_slots: _Optional[int] = ..., device: _Optional[str] = ..., memory_per_worker_bytes: _Optional[int] = ..., job_id: _Optional[str] = ..., generation: _Optional[int] = ..., last_heard_s: _Optional[float] = ..., heard_before: _Optional[bool] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., failures: _Optional[int] = ..., versions: _Optional[_Union[Versions, _Mapping]] = ..., protocol: _Optional[int] = ..., code: _Optional[_Union[CodePolicy, _Mapping]] = ..., rack: _Optional[str] = ..., kept: _Optional[str] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("job_id", "follow")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    follow: bool
    def __init__(self, job_id: _Optional[str] = ..., follow: _Optional[bool] = ...) -> None: ...

class EventRecord(_message.Message):
    __slots__ = ("json", "for_operators")
    JSON_FIELD_NUMBER: _ClassVar[int]
    FOR_OPERATORS_FIELD_NUMBER: _ClassVar[int]
    json: str
    for_operators: bool
    def __init__(self, json: _Optional[str] = ..., for_operators: _Optional[bool] = ...) -> None: ...

class MetricsRequest(_message.Message):
    __slots__ = ("job_id", "follow", "from_step", "evaluations")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    follow: bool
    from_step: int
    evaluations: bool
    def __init__(self, job_id: _Optional[str] = ..., follow: _Optional[bool] = ..., from_step: _Optional[int] = ..., evaluations: _Optional[bool] = ...) -> None: ...

class MetricsLines(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, json: _Optional[_Iterable[str]] = ...) -> None: ...

class LogsRequest(_message.Message):
    __slots__ = ("job_id", "follow", "node", "rank", "since")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    follow: bool
    node: str
    rank: int
    since: str
    def __init__(self, job_id: _Optional[str] = ..., follow: _Optional[bool] = ..., node: _Optional[str] = ..., rank: _Optional[int] = ..., since: _Optional[str] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("node", "slot", "line", "time")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    node: str
    slot: int
    line: str
    time: str
    def __init__(self, node: _Optional[str] = ..., slot: _Optional[int] = ..., line: _Optional[str] = ..., time: _Optional[str] = ...) -> None: ...

class ExamineRequest(_message.Message):
    __slots__ = ("nodes", "data", "checkpoints", "pairs")
    NODES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    data: _containers.RepeatedScalarFieldContainer[str]
    checkpoints: _containers.RepeatedScalarFieldContainer[str]
    pairs: bool
    def __init__(self, nodes: _Optional[_Iterable[str]] = ..., data: _Optional[_Iterable[str]] = ..., checkpoints: _Optional[_Iterable[str]] = ..., pairs: _Optional[bool] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("check", "level", "what", "fix", "node", "other", "figures")
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    CHECK_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    FIX_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    check: str
    level: str
    what: str
    fix: str
    node: str
    other: str
    figures: _containers.ScalarMap[str, float]
    def __init__(self, check: _Optional[str] = ..., level: _Optional[str] = ..., what: _Optional[str] = ..., fix: _Optional[str] = ..., node: _Optional[str] = ..., other: _Optional[str] = ..., figures: _Optional[_Mapping[str, float]] = ...) -> None: ...

class BackupRequest(_message.Message):
    __slots__ = ("no_output",)
    NO_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    no_output: bool
    def __init__(self, no_output: _Optional[bool] = ...) -> None: ...

class BackupPart(_message.Message):
    __slots__ = ("path", "data", "sha256", "summary")
    PATH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    path: str
    data: bytes
    sha256: str
    summary: bytes
    def __init__(self, path: _Optional[str] = ..., data: _Optional[bytes] = ..., sha256: _Optional[str] = ..., summary: _Optional[bytes] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("request", "name")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    request: str
    name: str
    def __init__(self, request: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: str
    def __init__(self, request: _Optional[str] = ...) -> None: ...

class TokenRequest(_message.Message):
    __slots__ = ("request", "role", "name", "ttl_s")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    request: str
    role: str
    name: str
    ttl_s: float
    def __init__(self, request: _Optional[str] = ..., role: _Optional[str] = ..., name: _Optional[str] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class CertificateReply(_message.Message):
    __slots__ = ("certificate", "authority")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    certificate: str
    authority: str
    def __init__(self, certificate: _Optional[str] = ..., authority: _Optional[str] = ...) -> None: ...

class ListCredentialsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCredentialsReply(_message.Message):
    __slots__ = ("tokens", "credentials")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenInfo]
    credentials: _containers.RepeatedCompositeFieldContainer[CredentialInfo]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenInfo, _Mapping]]] = ..., credentials: _Optional[_Iterable[_Union[CredentialInfo, _Mapping]]] = ...) -> None: ...

class TokenInfo(_message.Message):
    __slots__ = ("id", "role", "name", "expires_at", "by")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    id: str
    role: str
    name: str
    expires_at: float
    by: Holder
    def __init__(self, id: _Optional[str] = ..., role: _Optional[str] = ..., name: _Optional[str] = ..., expires_at: _Optional[float] = ..., by: _Optional[_Union[Holder, _Mapping]] = ...) -> None: ...

class CredentialInfo(_message.Message):
    __slots__ = ("role", "name", "expires_at", "revoked", "by")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    expires_at: float
    revoked: bool
    by: Holder
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., expires_at: _Optional[float] = ..., revoked: _Optional[bool] = ..., by: _Optional[_Union[Holder, _Mapping]] = ...) -> None: ...

class RevokeRequest(_message.Message):
    __slots__ = ("holder", "token_id")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    holder: Holder
    token_id: str
    def __init__(self, holder: _Optional[_Union[Holder, _Mapping]] = ..., token_id: _Optional[str] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("role", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class RevokeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
