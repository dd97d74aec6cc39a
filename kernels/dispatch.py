"""The registry of operations and their backends: which one runs, and why the others do not."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from types import MappingProxyType
from typing import Any

import torch

from longseq.kernels import self_test


@dataclass(frozen=True)
class Call:
    """The properties of a call by which its backend is chosen: none is a value, which would wait for the GPU."""

    device: torch.device
    dtype: torch.dtype
    packed: bool = False  # called with cu_seqlens
    exporting: bool = False  # inside torch.export, torch.onnx.export or torch.jit.trace
    # By dimension name ("T", "K", ...); a size that is absent is not known.
    sizes: Mapping[str, int] = field(default_factory=dict)
    differentiated: bool = False  # an input requires a gradient; set for one-token forms only
    reverse: bool | str = False  # the operation's argument `reverse`
    mixed: bool = False  # gates or parameters are float32, other inputs half precision
    kind: str = ""  # names a variant that has kernels of its own, such as "gated"


def no_reasons(call: Call) -> list[str]:
    """Return no reason against a call: the backend runs everything."""
    return []


@dataclass(frozen=True)
class Backend:
    """One implementation of an operation. `function` takes the operation's arguments without `backend`."""

    name: str
    function: Callable[..., Any]
    reasons: Callable[[Call], list[str]] = no_reasons


# By operation, and by the name of its form for one token, `<op>_step`; the preferred one first.
_BACKENDS: dict[str, tuple[Backend, ...]] = {}
# "recurrence"; "step"; "local": on each token by itself, or on a whole image, without a state; "torch": torch's own
# kernels compute it, in one form or another.
_KINDS: dict[str, str] = {}


def register(op: str, *backends: Backend, kind: str = "recurrence") -> None:
    """Register an operation with its backends, the preferred one first."""
    assert op not in _BACKENDS, f"operation {op} is registered twice"
    _BACKENDS[op], _KINDS[op] = backends, kind


def backend_of_local(backend: str) -> str:
    """The backend for operations that compute each token by itself, in a layer whose recurrence runs on `backend`.

    They have no reference form: "reference" becomes "torch".
    """
    return "torch" if backend == "reference" else backend


def backend_of_step(backend: str) -> str:
    """The backend for the one-token steps of a layer whose operations run on `backend`.

    Steps have no reference form, and their Triton kernels have no gradient: both become "torch".
    """
    if backend == "reference" or (backend == "triton" and torch.is_grad_enabled()):
        return "torch"
    return backend


def list_ops(kind: str = "recurrence") -> tuple[str, ...]:
    """Names of the registered operations over time, or of another kind such as "local", sorted."""
    return tuple(sorted(op for op, own in _KINDS.items() if own == kind))


def list_stepped_ops() -> tuple[str, ...]:
    """Names of the registered operations with a form for one token, sorted."""
    return tuple(op for op in list_ops() if f"{op}_step" in _BACKENDS)


def backends(op: str) -> tuple[Backend, ...]:
    """The backends of an operation, or of its one-token form, in the order in which `backend="auto"` tries them."""
    if op not in _BACKENDS:
        raise ValueError(f"unknown operation {op!r}: choose one of {', '.join(list_ops())}")
    return _BACKENDS[op]


def explain(
    op: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    packed: bool = False,
    exporting: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, list[str]]:
    """For each backend of `op`, in order of preference, the reasons why it would refuse such a call.

    `backend="auto"` runs the first one whose list is empty. `sizes` maps dimension names to sizes, for example
    `{"T": 197, "K": 64}`; a backend that limits a size is silent about sizes that are not given.
    """
    return explain_call(op, Call(torch.device(device), dtype, packed, exporting, sizes or {}))


def explain_call(op: str, call: Call) -> dict[str, list[str]]:
    """`explain` for a whole `Call`, as `record_calls` collects it."""
    return {backend.name: _find_reasons(op, backend, call) for backend in backends(op)}


# The list of each thread that records calls. The dictionary is empty unless calls are recorded, so that torch.compile
# need not trace the look-up of the thread.
_RECORDS: dict[int, list[tuple[str, str, Call]]] = {}


@contextmanager
def record_calls() -> Iterator[list[tuple[str, str, Call]]]:
    """Collect the calls of operations that this thread makes inside: the name, the backend asked for, and the `Call`.

    It is meant for layers on torch's meta device. Inside, the torch backend runs whatever backend a call names. Calls
    that one operation makes of another are not collected.
    """
    calls = _RECORDS[threading.get_ident()] = []
    try:
        yield calls
    finally:
        del _RECORDS[threading.get_ident()]


def is_recording() -> bool:
    """Whether this thread has a `record_calls` open."""
    return bool(_RECORDS) and threading.get_ident() in _RECORDS


def _without_record(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        records = _RECORDS.pop(thread)
        try:
            return run(*args, **kwargs)
        finally:
            _RECORDS[thread] = records

    return call


# What exports trace in place of operations, by operation or step.
_EXPORT_FORMS: ContextVar[Mapping[str, Callable[..., Any]]] = ContextVar("export forms", default=MappingProxyType({}))


@contextmanager
def export_forms(forms: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, exports trace `forms[op](function, **arguments)` where the backend's `function` would compute `op`."""
    token = _EXPORT_FORMS.set(forms)
    try:
        yield
    finally:
        _EXPORT_FORMS.reset(token)


def _find_reasons(op: str, backend: Backend, call: Call) -> list[str]:
    """The backend's own reasons, or else the reasons of the self-test that Triton kernels must pass."""
    reasons = backend.reasons(call)
    return reasons if reasons or backend.name != "triton" else self_test.failures(op, call)


def select(op: str, name: str, call: Call) -> Callable[..., Any]:
    """The function of the backend called `name`, or for "auto" of the first one without a reason against the call.

    Raises ValueError with every reason when the named backend, or each backend, refuses the call.
    """
    candidates = backends(op)
    if is_recording():
        _RECORDS[threading.get_ident()].append((op, name, call))
        return _without_record(next(backend.function for backend in candidates if backend.name == "torch"))
    if name != "auto":
        candidates = tuple(backend for backend in candidates if backend.name == name)
        if not candidates:
            present = ", ".join(backend.name for backend in backends(op))
            raise ValueError(f"{op} has no backend {name!r}: choose one of auto, {present}")
    refusals = []
    for backend in candidates:
        reasons = _find_reasons(op, backend, call)
        if not reasons:
            form = _EXPORT_FORMS.get().get(op) if call.exporting else None
            return backend.function if form is None else partial(form, backend.function)
        refusals.append(f"backend {backend.name!r} of {op} cannot run: {'; '.join(reasons)}")
    raise ValueError(". ".join(refusals))


def find_torch_form(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the torch form of an operation if `function` is its Triton form, else `function` itself."""
    named = {backend.name: backend.function for backend in backends(op)}
    return named["torch"] if function is named.get("triton") else function


def is_exporting() -> bool:
    """True inside torch.export, torch.onnx.export and torch.jit.trace."""
    # torch's `is_exporting` is also true under torch.compile, up to torch 2.11 at least. By default (strict=False)
    # exports do not trace with Dynamo.
    exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    return exporting or torch.jit.is_tracing()


def loop_reasons(call: Call) -> list[str]:
    """The reasons against a backend that loops over time in Python."""
    if call.exporting:
        return ["its Python loop over time would fix an exported graph to one length (use backend='torch')"]
    return []


def unpacking_reasons(call: Call) -> list[str]:
    """The reasons against a backend that reads the values of cu_seqlens on the host."""
    if call.exporting and call.packed:
        return ["cu_seqlens holds lengths that an exported graph cannot follow (export with a padded batch)"]
    return []
