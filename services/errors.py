"""Every error that crosses a boundary, in one tree.

A user's fault or a passing condition is raised as one of these, travels back along the token path as an
:class:`ErrorInfo`, and leaves the gateway as an HTTP status in OpenAI's shape. A broken invariant is an ``assert``.

    ExpertMeshError
    |-- StartupError            a role cannot start; the process exits with ``exit_code``
    |   |-- ConfigError         an option is unknown, malformed or contradicts another
    |   |   |-- ProgramMissing  a program of others that a command runs is not on PATH
    |   |   |-- RayMissing      Ray is to place the processes, and is not installed
    |   |   |-- VllmMissing     vLLM is to be measured beside this server, and is not there
    |   |   `-- WorkerExtraMissing  torch, or what else the extra `worker` installs, is not there
    |   |-- CheckpointError     the model folder is incomplete, damaged or has tensors that do not belong to it
    |   |   `-- UnsupportedModel    the architecture or a feature of it is not implemented
    |   |-- RayUnavailable      no Ray cluster answers, or one of another version
    |   |-- PortInUse           another process listens on the address
    |   |-- FingerprintMismatch another model is served in this namespace
    |   `-- VersionMismatch     members of this namespace live that read no version which this release writes
    |-- BenchFailed             what `expertmesh bench` measures ended, or answers something else than was asked for
    |-- UnreadableMessage       bytes from Redis that are no message of a kind and version that this release knows
    |-- StaleLeader             another scheduler was elected; this one changed nothing
    |-- StaleTable              the epoch of a routing table is not above those in use; nothing was published
    |-- PrometheusUnavailable   it does not answer, or something else answers there
    |-- QueryFailed             Prometheus refuses a query
    |-- KubernetesUnavailable   the API server does not answer, or refuses; its last answer grows stale
    |   |-- KubernetesForbidden the account may not look
    |   `-- WatchExpired        it no longer has the version from which to watch: list again
    |-- FabricError             two workers do not get along; the calls go to another replica
    |   |-- WireError           the peer sent bytes that are no frame, or a frame larger than allowed
    |   |-- ProtocolMismatch    the peer speaks another version, or serves rows of another width or dtype
    |   |-- SecretMismatch      the peer does not know this cluster's secret
    |   |-- SeatLost            the connection broke, or the peer fell silent
    |   |-- SeatLeaving         the expert worker is draining
    |   |-- SeatFull            the expert worker has as many connections as it takes
    |   |-- LaneFailed          no lane next to a connection could be made; rows go over the connection
    |   |-- CallFailed          the expert worker could not compute a call
    |   |-- WeightsMismatch     weights that another worker gave are not those of the checkpoint
    |   |-- BadAnswer           the answer has another shape, or NaN where another replica has none
    |   |-- LockstepBroken      a rank in lock-step died or fell behind: all ranks start again
    |   `-- LockstepLeft        another rank left in order, and this one therefore has to
    `-- RequestError            one request fails; nothing else does
        |-- InvalidRequest      400
        |   |-- UnsupportedParameter
        |   `-- ContextLengthExceeded
        |-- Unauthorized        401
        |-- Forbidden           403  (without keys: the request names another host than this machine)
        |-- NotFound            404
        |   `-- ModelNotFound
        |-- MethodNotAllowed    405
        |-- RequestTimedOut     408  (its head or body took too long to come)
        |-- Conflict            409  (Idempotency-Key reused for another body)
        |-- BodyTooLarge        413
        |-- WrongContentType    415
        |-- TooManyRequests     429
        |   |-- QueueFull
        |   |-- RateLimited
        |   |-- ConcurrencyLimited
        |   `-- WorkLimited         too much of this key is under way in this gateway
        |-- HeadTooLarge        431
        |-- InternalError       500
        `-- Unavailable         503
            |-- QueueUnavailable    Redis is away
            |-- Overloaded          this process has as much under way as it can hold
            |-- NotReady            no worker serves the model yet
            |-- Draining            this process is shutting down
            |-- DeadlineExceeded
            |-- ExpertUnavailable   no replica of a shard group is alive; the attempt is given up
            `-- AttemptsExhausted   moved to the dead-letter list
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import msgspec

MAX_RETRY_AFTER_S = 120
"""OpenAI's clients refuse to wait longer than this, in seconds."""


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error on the wire. ``code`` names the class, so the receiver can raise the same type."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class ExpertMeshError(Exception):
    """Root of the tree. ``hint`` says what to do and is appended to the message."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = f"{message} {hint}" if hint else message
        super().__init__(self.message)


class StartupError(ExpertMeshError):
    """A role cannot start. The process prints the message, without a traceback, and exits."""

    code = "startup_error"
    exit_code: ClassVar[int] = 1


class ConfigError(StartupError):
    code = "config_error"
    exit_code = 2


class ProgramMissing(ConfigError):
    code = "program_missing"


class VllmMissing(ConfigError):
    """``python`` is the interpreter that was asked for it."""

    code = "vllm_missing"

    def __init__(self, python: str, why: str) -> None:
        super().__init__(
            f"vLLM is not installed in {python}: {why}.",
            hint="Name the Python that has it: --vllm /path/to/venv/bin/python.",
        )


class OutOfMemory(ConfigError):
    code = "out_of_memory"


class UnfitDevice(ConfigError):
    code = "unfit_device"


class RayMissing(ConfigError):
    """The command needs Ray."""

    code = "ray_missing"

    def __init__(self) -> None:
        super().__init__("The Python package ray is not installed.", hint="Run `pip install 'expertmesh[ray]'`.")


class WorkerExtraMissing(ConfigError):
    """``package`` is not installed, one of those that attention and expert workers need."""

    code = "worker_extra_missing"
    packages: ClassVar = frozenset({"numpy", "safetensors", "torch"})

    def __init__(self, package: str) -> None:
        super().__init__(
            f"The Python package {package} is not installed.", hint="Run `pip install 'expertmesh[worker]'`."
        )


class TracingExtraMissing(ConfigError):
    """Traces are asked for, and OpenTelemetry is not installed."""

    code = "tracing_extra_missing"

    def __init__(self, package: str) -> None:
        super().__init__(
            f"Traces are asked for, but the Python package {package} is not installed.",
            hint="Run `pip install 'expertmesh[tracing]'`, or leave out --otlp-endpoint and --trace-*.",
        )


class CheckpointError(StartupError):
    code = "checkpoint_error"
    exit_code = 3


class UnsupportedModel(CheckpointError):
    code = "unsupported_model"


class PortInUse(StartupError):
    code = "port_in_use"
    exit_code = 4


class RayUnavailable(StartupError):
    code = "ray_unavailable"


class FingerprintMismatch(StartupError):
    code = "fingerprint_mismatch"
    exit_code = 5


class VersionMismatch(StartupError):
    code = "version_mismatch"
    exit_code = 6


class BenchFailed(ExpertMeshError):
    code = "bench_failed"


class UnreadableMessage(ExpertMeshError):
    code = "unreadable_message"


class StaleLeader(ExpertMeshError):
    code = "stale_leader"


class StaleTable(ExpertMeshError):
    code = "stale_table"


class PrometheusUnavailable(ExpertMeshError):
    code = "prometheus_unavailable"


class QueryFailed(ExpertMeshError):
    code = "query_failed"


class KubernetesUnavailable(ExpertMeshError):
    code = "kubernetes_unavailable"


class KubernetesForbidden(KubernetesUnavailable):
    code = "kubernetes_forbidden"


class WatchExpired(KubernetesUnavailable):
    code = "watch_expired"


class FabricError(ExpertMeshError):
    """A failure between two workers. No client sees it: the link resends the call or raises ExpertUnavailable."""

    code = "fabric_error"


class WireError(FabricError):
    code = "wire_error"


class ProtocolMismatch(FabricError):
    code = "protocol_mismatch"


class SecretMismatch(FabricError):
    code = "secret_mismatch"


class SeatLost(FabricError):
    code = "seat_lost"


class SeatLeaving(FabricError):
    code = "seat_leaving"


class SeatFull(FabricError):
    code = "seat_full"


class LaneFailed(FabricError):
    code = "lane_failed"


class CallFailed(FabricError):
    code = "call_failed"


class WeightsMismatch(FabricError):
    code = "weights_mismatch"


class BadAnswer(FabricError):
    code = "bad_answer"


class LockstepBroken(FabricError):
    code = "lockstep_broken"


class LockstepLeft(FabricError):
    code = "lockstep_left"


class RequestError(ExpertMeshError):
    """One request fails. ``status`` is HTTP's; ``kind`` is OpenAI's ``error.type``; ``retryable``: waiting may help."""

    code = "request_error"
    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.param = param
        self.retry_after_s = retry_after_s

    def info(self) -> ErrorInfo:
        """Return the error in the form in which it travels along the token path."""
        return ErrorInfo(code=self.code, message=self.message, param=self.param, retry_after_s=self.retry_after_s)


class InvalidRequest(RequestError):
    code = "invalid_request"
    status = 400
    kind = "invalid_request_error"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class Unauthorized(RequestError):
    code = "invalid_api_key"
    status = 401
    kind = "authentication_error"


class Forbidden(RequestError):
    code = "forbidden"
    status = 403
    kind = "permission_error"


class NotFound(RequestError):
    code = "not_found"
    status = 404
    kind = "not_found_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(RequestError):
    code = "method_not_allowed"
    status = 405
    kind = "invalid_request_error"


class RequestTimedOut(RequestError):
    code = "request_timeout"
    status = 408
    kind = "timeout_error"


class Conflict(RequestError):
    code = "idempotency_conflict"
    status = 409
    kind = "conflict_error"


class BodyTooLarge(RequestError):
    code = "body_too_large"
    status = 413
    kind = "invalid_request_error"


class WrongContentType(RequestError):
    code = "wrong_content_type"
    status = 415
    kind = "invalid_request_error"


class TooManyRequests(RequestError):
    code = "too_many_requests"
    status = 429
    kind = "rate_limit_error"
    retryable = True


class QueueFull(TooManyRequests):
    code = "queue_full"


class RateLimited(TooManyRequests):
    code = "rate_limit_exceeded"


class ConcurrencyLimited(TooManyRequests):
    code = "concurrency_limit_exceeded"


class WorkLimited(TooManyRequests):
    code = "work_limit_exceeded"


class HeadTooLarge(RequestError):
    code = "head_too_large"
    status = 431
    kind = "invalid_request_error"


class InternalError(RequestError):
    code = "internal_error"


class Unavailable(RequestError):
    code = "unavailable"
    status = 503
    kind = "service_unavailable_error"
    retryable = True


class QueueUnavailable(Unavailable):
    code = "queue_unavailable"


class Overloaded(Unavailable):
    code = "overloaded"


class NotReady(Unavailable):
    code = "not_ready"


class Draining(Unavailable):
    code = "draining"


class DeadlineExceeded(Unavailable):
    code = "deadline_exceeded"


class ExpertUnavailable(Unavailable):
    code = "expert_unavailable"


class AttemptsExhausted(Unavailable):
    code = "attempts_exhausted"
    retryable = False


def _subclasses(root: type[RequestError]) -> Iterator[type[RequestError]]:
    yield root
    for child in root.__subclasses__():
        yield from _subclasses(child)


def error_from_info(info: ErrorInfo) -> RequestError:
    """Return the typed error that ``info`` describes; an unknown code becomes :class:`InternalError`."""
    by_code = {error.code: error for error in _subclasses(RequestError)}
    error = by_code.get(info.code, InternalError)
    return error(info.message, param=info.param, retry_after_s=info.retry_after_s)
