"""The self-test of Triton kernels: before their first use on a GPU they are compared with float64 on small cases.

A wrong kernel would train a wrong model without an error, and which kernels are wrong depends on the GPU and on the
compiler. The first call of an operation's kernels on a GPU therefore runs the small cases of `TRIALS`, in the
direction, kind and precision of the call, packed if the call is packed, at widths that represent the call's (see
`_representative`). The GPU tests compare kernels at other sizes. Outputs, final states and all gradients are compared
with the torch form in float64 on the CPU. In each head and chunk the error may be three times that of the torch form in
the call's precision (see accuracy.py). The kernels of all cases are compiled first, side by side. Kernels that fail or
do not compile are refused: a warning says so, and `backend="auto"` takes the torch form.

A test that is passed holds for one kind of GPU, one version of Triton, one of torch, and one state of these sources and
tables. It is noted as a file of its own below `LONGSEQ_CACHE_DIR` (~/.cache/longseq), so that processes can write at
the same time. A failure holds in its process alone, because it may be temporary, such as a full disk.

LONGSEQ_SELF_TEST=0 trusts all kernels. Emulated kernels are not tested.
"""

import hashlib
import json
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from longseq.kernels.accuracy import Bar
from longseq.kernels.compile_ahead import compile_kernels, find_kernels
from longseq.kernels.self_test_cases import TRIALS, Case, Trial

if TYPE_CHECKING:
    from longseq.kernels.dispatch import Call

SELF_TEST_VARIABLE = "LONGSEQ_SELF_TEST"
CACHE_VARIABLE = "LONGSEQ_CACHE_DIR"

# By operation, precision, device and widths: None, or why the kernels are refused.
_VERDICTS: dict[tuple[object, ...], str | None] = {}
_LOCK = threading.Lock()
_log = logging.getLogger(__name__)
_THREAD = threading.local()


def failures(op: str, call: "Call") -> list[str]:
    """The reasons against an operation's Triton kernels for a call: none, or that they failed."""
    if not is_tested(call.device.type):
        return []
    widths = [_representative(call.sizes.get(name, size)) for name, size in find_trial(op).widths.items()]
    place, packed = (call.device.type, call.device.index), call.packed and not op.endswith("_step")
    failure = longseq_self_test_verdict(op, call.dtype, *place, call.reverse, call.mixed, packed, call.kind, *widths)
    return [] if failure is None else [failure]


def find_trial(op: str) -> Trial:
    """The trial of an operation or of its one-token form."""
    return TRIALS[op.removesuffix("_step")]


def is_tested(device_type: str) -> bool:
    """Whether kernels are self-tested on devices of this type."""
    return device_type == "cuda"


def is_testing() -> bool:
    """Whether this thread runs a self-test."""
    return getattr(_THREAD, "is_testing", False)


def _representative(size: int) -> int:
    """Return the width that is tested for this one: a power of two itself, else three quarters of the next power.

    Blocks of kernels are powers of two wide. For other widths kernels mask the columns past the end, and are compiled
    anew for that. Only comparisons decide, because torch.compile may hold a size as a symbol.
    """
    power = 1
    while power < size:
        power *= 2
    return power if power == size else 3 * power // 4


def longseq_self_test_verdict(
    op: str,
    dtype: torch.dtype,
    device_type: str,
    index: int | None,
    reverse: bool | str,
    mixed: bool,
    packed: bool,
    kind: str,
    *widths: int,
) -> str | None:
    """Return why the kernels are refused, or None. They are tested unless a verdict is known."""
    if device_type == "cuda":
        if not torch.cuda.is_available():
            return None
        index = torch.cuda.current_device() if index is None else index
    device = torch.device(device_type) if index is None else torch.device(device_type, index)
    sizes = dict(zip(find_trial(op).widths, widths, strict=True))
    test = _Test(op, dtype, device, reverse, mixed, packed, kind, sizes)
    key = (*test[:-1], *widths)
    if key in _VERDICTS:
        return _VERDICTS[key]
    if is_testing():
        return None  # a call of the self-test itself
    if _THREAD.__dict__.get("postponed") is not None:
        _THREAD.postponed[key] = test
        return None
    return _find_verdict(test, key)


def _find_verdict(test: "_Test", key: tuple[object, ...]) -> str | None:
    """The verdict about the kernels of a test, which runs unless another thread or process knows it."""
    untested = "their self-test has not run, and cannot {}: call the operation once before"
    # A backward pass must not wait for the test of another thread, whose own backward pass may wait for this one. Nor
    # for a test that begins now: the test's own backward pass would wait for this thread.
    inside_backward = torch._C._current_graph_task_id() != -1
    if not _LOCK.acquire(blocking=not inside_backward):
        return untested.format("inside a backward pass")
    try:
        if key in _VERDICTS:
            return _VERDICTS[key]
        is_known = _is_known(test)
        if not is_known and test.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            failure: str | None = untested.format("while a CUDA graph is captured")
        elif not is_known and inside_backward:
            failure = untested.format("inside a backward pass")
        else:
            failure = _VERDICTS[key] = None if is_known else _judge(test)
    finally:
        _LOCK.release()
    if failure is not None:
        warnings.warn(f"longseq refuses the Triton kernels of {test.op}, and backend='auto' runs torch: {failure}")
    return failure


@contextmanager
def all_at_once(device: torch.device) -> Iterator[None]:
    """See `longseq.kernels.operation.prepare_kernels`. Inside, all kernels count as right."""
    tests: dict[tuple[object, ...], _Test] = {}
    found: dict[Any, tuple[Any, str]] = {}
    _THREAD.postponed = tests
    try:
        with find_kernels(found):
            yield
    finally:
        _THREAD.postponed = None
    new = [test for test in tests.values() if not _is_known(test)]
    _run_in_own_thread(lambda: _compile([check for test in new for check in _list_checks(test)], device, found))
    for key, test in tests.items():
        _find_verdict(test, key)


def _is_known(test: "_Test") -> bool:
    """Whether the kernels count as right without a test: they have passed it, or it is turned off."""
    return os.environ.get(SELF_TEST_VARIABLE) == "0" or os.path.exists(test.file)


# torch.compile calls the function while it traces and takes the result as a constant of the graph, as with
# @torch.compiler.assume_constant_result, which would import the compiler together with this module. The result becomes
# a global of the traced module under the function's name, which therefore no other global may have.
longseq_self_test_verdict._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Test(NamedTuple):
    """The kernels that one verdict is about."""

    op: str
    dtype: torch.dtype
    device: torch.device
    reverse: bool | str  # each direction has kernels and a verdict of its own: most programs need one direction alone
    mixed: bool  # likewise gates in float32 beside inputs in half precision, as models have them
    packed: bool  # likewise packed sequences
    kind: str  # likewise calls with and without gates
    widths: dict[str, int]

    @property
    def record(self) -> dict[str, Any]:
        """Everything that a verdict depends on."""
        import triton

        gpu, capability = f"{self.device.type}, emulated", None
        if self.device.type == "cuda":
            gpu = torch.cuda.get_device_name(self.device)
            capability = "{}.{}".format(*torch.cuda.get_device_capability(self.device))
        call: dict[str, Any] = {"op": self.op, "dtype": str(self.dtype).removeprefix("torch."), "reverse": self.reverse}
        call |= {"mixed": self.mixed, "packed": self.packed, "kind": self.kind, "widths": self.widths}
        place = {"gpu": gpu, "capability": capability, "triton": triton.__version__, "torch": str(torch.__version__)}
        return {**call, **place, "sources": _hash_sources()}

    @property
    def file(self) -> Path:
        """The file that says that the test was passed; its name holds a digest of the record."""
        record = self.record
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
        widths = "-".join(f"{name}{size}" for name, size in self.widths.items())
        folder = os.environ.get(CACHE_VARIABLE) or os.path.expanduser("~/.cache/longseq")
        return Path(folder) / "self_test" / f"{self.op}-{record['dtype']}-{widths}-{digest}.json"


def _judge(test: _Test) -> str | None:
    """Run the test: the failure of the kernels, or None."""
    if test.device.type == "cuda":
        torch.cuda.synchronize(test.device)  # so that an error of earlier work is raised here and not in the test
    record, file = test.record, test.file
    sizes = "".join(f", {name}={size}" for name, size in test.widths.items())
    _log.info("compiling the kernels of %s (%s%s) and comparing them with float64", test.op, record["dtype"], sizes)
    error = _run_in_own_thread(lambda: _find_error(test))
    if error is not None:
        where = "{gpu} (capability {capability}) with Triton {triton} and torch {torch}".format_map(record)
        return f"their self-test failed on {where}: {error}"
    with suppress(OSError):  # where no folder can be written, the process alone knows
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=2), encoding="utf-8")
    return None


def _run_in_own_thread(find_error: Callable[[], str | None]) -> str | None:
    """Return the error of the kernels, or None.

    The test runs in a thread of its own. There autocast, gradients, inference mode, the stream and dispatch modes have
    their defaults, whatever the caller has set. The test has its own generators of random numbers.
    """
    outcome: list[str | Exception | None] = []

    def run() -> None:
        _THREAD.is_testing = True
        try:
            outcome.append(find_error())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="longseq self-test", daemon=True)
    thread.start()
    thread.join()
    (found,) = outcome
    if not isinstance(found, Exception):
        return found
    if isinstance(found, torch.OutOfMemoryError):
        raise found  # it does not concern the kernels
    text = f"{type(found).__name__}: {' '.join(str(found).split())}"
    return text if len(text) <= 300 else f"{text[:100]} ... {text[-200:]}"


def _find_error(test: _Test) -> str | None:
    """Compare every case with float64, and two runs with each other."""
    checks = list(_list_checks(test))
    _compile(checks, test.device, {})
    return next((error for check in checks if (error := _find_difference(check, test.device)) is not None), None)


def _compile(checks: Iterable["_Check"], device: torch.device, found: dict[Any, tuple[Any, str]]) -> None:
    """Compile the kernels of checks side by side, and those that are `found` already."""
    if device.type != "cuda":
        return  # elsewhere kernels are emulated
    torch.cuda.set_device(device)  # for this thread
    with find_kernels(found):
        for check in checks:
            with suppress(Exception):  # an error is raised again when the check runs, and reported there
                check.run("triton", device)
    compile_kernels(found, device)


class _Check(NamedTuple):
    """One case of a test."""

    name: str
    inputs: Any
    dtype: torch.dtype
    function: Any  # maps inputs and a backend to results by name

    def run(self, backend: str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Results by name, for inputs on a device, in their own precision or another."""
        tensors = {name: x.to(device) for name, x in self.inputs.arguments.items()}
        inputs = self.inputs.replace(tensors)
        return self.function(inputs if dtype is None else inputs.map(lambda x: x.to(dtype)), backend)


def _list_checks(test: _Test) -> Iterator[_Check]:
    trial = find_trial(test.op)
    if not test.op.endswith("_step"):
        for case in trial.cases:
            if case.kind == test.kind:
                yield _check_of_case(test, _read_as(test, case))
        return
    for variant in dict.fromkeys([*(case.variant for case in trial.cases), *trial.steps]):
        # The precision of a step's call is that of its state; the token may have another one.
        for dtype in (test.dtype, torch.bfloat16):
            yield _Check(f"{variant} in {dtype}", _make(test, Case(variant, 3), dtype), dtype, _take_steps)


def _read_as(test: _Test, case: Case) -> Case:
    """A case in the direction of the call, and packed if the call is packed."""
    if test.reverse:
        own = find_trial(test.op).own_parameters and test.reverse == "second_half"
        case = case._replace(options={**case.options, "reverse": test.reverse}, own_parameters=own)
    return case.packed() if test.packed else case


def list_calls(
    op: str, dtype: torch.dtype, widths: Mapping[str, int], cases: Iterable[Case], *, mixed: bool
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls on tensors without values, by name: the cases of an operation, or the self-test of its one-token form."""
    for case in cases:
        test = _Test(op, dtype, torch.device("meta"), False, mixed, bool(case.bounds), case.kind, dict(widths))
        check = _check_of_case(test, case)
        yield check.name, partial(check.run, "triton", "meta")
    if op.endswith("_step"):
        for check in _list_checks(_Test(op, dtype, torch.device("meta"), False, mixed, False, "", dict(widths))):
            yield check.name, partial(check.run, "triton", "meta")


def _make(test: _Test, case: Case, dtype: torch.dtype) -> Any:
    """A case's inputs, with float32 states as models keep them."""
    from longseq.kernels.self_test_inputs import make_inputs

    op, trial = test.op.removesuffix("_step"), find_trial(test.op)
    own = {"D": trial.channels if case.channels is None else case.channels, "H": case.heads}
    sizes = {**test.widths, **{name: size for name, size in own.items() if size is not None}}
    segments = len(case.bounds) - 1 if case.bounds else None
    inputs = make_inputs(
        *(op, case.variant),
        batch=case.rows,
        tokens=case.tokens,
        segments=segments,
        dtype=dtype,
        sizes=sizes,
        device="meta" if test.device.type == "meta" else "cpu",
    )
    wide = trial.mixed if test.mixed else ()
    narrow = trial.narrow if test.kind == "narrow" else ()

    def convert(name: str, x: Tensor) -> Tensor:
        if name.startswith("initial_state") or name in wide:
            return x.float()
        return x.bfloat16() if name in narrow else x

    inputs = inputs.replace({name: convert(name, x) for name, x in inputs.tensors.items()})
    return inputs.with_own_parameters() if case.own_parameters else inputs


def _take_steps(inputs: Any, backend: str) -> dict[str, Tensor]:
    from longseq.kernels.self_test_inputs import results

    with torch.no_grad():
        return results(*inputs.take_steps(backend=backend))


def _check_of_case(test: _Test, case: Case) -> _Check:
    from longseq.kernels.self_test_inputs import gradients, results

    options = {**case.options, **({"chunk_size": test.widths["C"]} if case.kind == "chunks" else {})}

    def call(inputs: Any, **options: Any) -> tuple[Tensor, Any]:
        if case.bounds:
            options["cu_seqlens"] = torch.tensor(case.bounds, device=next(iter(inputs.sequences.values())).device)
        if case.has_state:
            return inputs.run(**options)
        return inputs.run(initial_state=None, output_final_state=False, **options)[0], ()

    def run(inputs: Any, backend: str) -> dict[str, Tensor]:
        if case.has_gradient:
            return gradients(inputs, call, backend=backend, **options)
        with torch.no_grad():
            return results(*call(inputs, backend=backend, **options))

    return _Check(case.name, _make(test, case, test.dtype), case.options.get("dtype", test.dtype), run)


def _find_difference(check: _Check, device: torch.device) -> str | None:
    exact, torch_result = check.run("torch", dtype=torch.float64), check.run("torch")
    first, second = check.run("triton", device), check.run("triton", device)
    for name, value in exact.items():
        bar = Bar.of(value, torch_result[name], check.inputs.tokens, check.dtype)
        worst = bar.find_worst(first[name].cpu())
        if worst.share > 1:
            return f"{name} of the case {check.name!r} is off by {worst.error:.1e}, allowed {worst.allowed:.1e}"
        if not torch.equal(first[name], second[name]):
            return f"{name} of the case {check.name!r} differs from run to run"
    return None


def _hash_sources() -> str:
    """A digest of this folder: stricter than a version, which not every change raises."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
