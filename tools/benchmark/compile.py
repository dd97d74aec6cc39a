"""`longseq benchmark compile`: compile every kernel of every operation for GPUs that need not be present.

The operations are called on tensors without values. They launch their kernels as usual, and Triton passes each launch
on in place of compiling it. So this module has no list of kernels or arguments. The calls are those of the self-tests,
at more widths, read forward.

Launches of one kernel with the same types, sizes and options differ in flags, such as a gate or packed sequences. Flags
hardly change the shared memory of a kernel, so that one of these launches is compiled; at the widths of the self-tests,
as many launches as are needed to include each value of each flag.

A row of the file is kept until its kernel, a function that the kernel calls, its arguments or Triton's version change.
Comments and docstrings do not count as changes.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.metadata
import io
import json
import multiprocessing
import os
import pkgutil
import re
import tempfile
import textwrap
import time
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from omegaconf import DictConfig

import longseq.kernels
from longseq.files import Kind, json_keys, replacing
from longseq.kernels import list_ops
from longseq.kernels.dispatch import backends, explain, list_local_ops, list_stepped_ops
from longseq.kernels.launch_file import LAUNCHES_VARIABLE
from longseq.kernels.self_test import SELF_TEST_VARIABLE, find_trial, list_calls
from longseq.kernels.token_choice.fused import list_calls as list_choice_calls
from longseq.kernels.triton_launch import UNFUSED
from longseq.tasks.training.command import CommandKeys, read_command
from longseq.tasks.training.options import Length, OneOf, Range
from longseq.tasks.training.processes import refuse_many
from longseq.tools.benchmark.measure import one_line
from longseq.tools.benchmark.report import check_output

# Widths of keys, values, slots and channels beside those of the self-tests: the widest that an operation takes is
# compiled, and one between. Likewise the states of a scan, and the tokens of an orthogonal recurrence's chunks.
WIDTHS = (128, 256, 512)
STATES = (16, 64)
CHUNKS = (1, 16, 64)
TENSOR_MEMORY = 512  # the columns of Blackwell's tensor memory
# Kernels without a self-test, which have lists of calls of their own.
UNTESTED = {"token_choice": list_choice_calls}
_COMPILED = Kind("compilations", lambda path: {"sources", "missing", "rows"} <= json_keys(path))
SECONDS = 20.0  # the interval between two writings of the file


class Launch(NamedTuple):
    """A kernel as an operation launches it on one family of GPUs."""

    op: str
    capability: tuple[int, int]
    call: str
    kernel: str  # module:name
    specialization: str  # the JSON from which Triton compiles it again
    key: str

    @property
    def head(self) -> dict[str, Any]:
        capability = ".".join(map(str, self.capability))
        return {"op": self.op, "kernel": self.kernel.split(":")[1], "capability": capability, "call": self.call}


class _SharedMemoryIsKnown(Exception):
    """Ends a compilation after its shared memory is known, if its code is not needed."""


def _capabilities() -> dict[str, tuple[int, int]]:
    """The families of GPUs whose shared memory is known, by name."""
    from longseq.tools.benchmark.absent_gpu import SHARED_MEMORY

    return {".".join(map(str, capability)): capability for capability in SHARED_MEMORY}


def list_compiled() -> list[str]:
    """The operations with Triton kernels, including those for one token."""
    names = [*list_ops(), *list_local_ops(), *(f"{op}_step" for op in list_stepped_ops())]
    return [*(op for op in names if "triton" in [backend.name for backend in backends(op)]), *UNTESTED]


@dataclass(frozen=True, kw_only=True)
class CompileKeys(CommandKeys):
    """The keys of `longseq benchmark compile`; conf/benchmark_compile.yaml documents them."""

    ops: Annotated[list[Annotated[str, OneOf(list_compiled)]], Length(1)] | None
    capabilities: Annotated[list[Annotated[str, OneOf(_capabilities)]], Length(1)]
    processes: Annotated[int | None, Range(1)]
    seconds: Annotated[float, Range(above=0)]
    output: str


def run(cfg: DictConfig) -> dict[str, Any]:
    """Compile what `benchmark_compile.yaml` selects, and write a row for each launch."""
    keys = read_command(CompileKeys, cfg)
    for name in (LAUNCHES_VARIABLE, "TRITON_INTERPRET"):
        if os.environ.get(name):
            raise ValueError(f"{name} is set, and other kernels than everybody's would be compiled: unset it")
    known, names = _capabilities(), keys.capabilities
    ops = list_compiled() if keys.ops is None else keys.ops
    file = check_output(keys.output, _COMPILED)
    refuse_many(keys.processes, "processes")
    processes = keys.processes or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update({"TRITON_CACHE_DIR": folder, SELF_TEST_VARIABLE: "0"})
        launches = record([known[name] for name in names], ops, processes)
        held = _read(file)
        done = {row["key"]: row for row in held["rows"]}
        for launch in launches:  # a kernel that has not changed may be that of another call now
            if launch.key in done:
                done[launch.key] |= launch.head
        todo = [launch for launch in launches if launch.key not in done]
        print(f"{len(launches)} launches, {len(todo)} to compile", flush=True)
        wanted = {launch.key for launch in launches}
        others = [row for row in held["rows"] if row["op"] not in ops or row["capability"] not in names]
        end, written = time.monotonic() + keys.seconds, time.monotonic()
        for row in compile_all(todo, processes, end):
            done[row["key"]] = row
            if fault := find_fault(row):
                print(f"{row['op']}: {row['kernel']} on {row['capability']}, {row['call']}: {fault}", flush=True)
            if time.monotonic() > written + SECONDS:
                _write(file, _result(done, launches, others, held["sources"], ops, names == list(known)))
                written = time.monotonic()
    rows = [*others, *(row for key, row in done.items() if key in wanted)]
    result = _result(done, launches, others, held["sources"], ops, names == list(known))
    _write(file, result)
    faulty = sum(find_fault(row) is not None for row in rows)
    missing = len(wanted - set(done))
    print(f"written: {file}; {len(rows)} rows, {faulty} with a fault, {missing} launches not compiled yet")
    return result


def find_fault(row: dict[str, Any]) -> str | None:
    """Why a kernel cannot be launched on its GPU, or None."""
    from longseq.tools.benchmark.absent_gpu import SHARED_MEMORY

    if row["error"] is not None:
        return row["error"]
    major, minor = map(int, row["capability"].split("."))
    limit = SHARED_MEMORY[major, minor]
    if row["shared"] > limit:
        return f"{row['shared']} bytes of shared memory, of {limit}"
    if row["tensor_memory"] > TENSOR_MEMORY:
        return f"{row['tensor_memory']} columns of tensor memory, of {TENSOR_MEMORY}"
    return None


def list_widths(op: str) -> Iterator[dict[str, int]]:
    """The widths for which an operation's kernels are compiled; those of its self-test come first."""
    own = find_trial(op).widths

    def resize(**sizes: int) -> dict[str, int]:
        return {name: sizes.get(name, value) for name, value in own.items()}

    fitting = [own, *(resize(K=width, V=width, M=width, D=width) for width in WIDTHS)]
    fitting = [widths for widths in fitting if not explain(op, device="cuda", sizes=widths)["triton"]]
    found = []
    for widths in (fitting[0], fitting[1 % len(fitting)], fitting[-1]):
        for states in STATES if "N" in own else (0,):
            for chunk in CHUNKS if "C" in own else (0,):
                found.append(widths | {name: x for name, x in (("N", states), ("C", chunk)) if name in own})
    for widths in {tuple(widths.values()): widths for widths in found}.values():
        if not explain(op, device="cuda", sizes=widths)["triton"]:  # the operation may refuse them together
            yield widths


def record(
    capabilities: Iterable[tuple[int, int]], ops: list[str], processes: int, calls: Collection[str] | None = None
) -> list[Launch]:
    """The launches of operations on each family of GPUs, the widest first; of all calls, or of the calls with these
    names.

    Tables are adapted to a GPU at their import: each family has a process of its own.
    """
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        found = pool.map(_record, [(capability, ops, calls) for capability in capabilities], chunksize=1)
    launches = [launch for of_capability in found for launch in of_capability]
    return sorted(launches, key=lambda launch: -_width_of(launch.call))


def _width_of(call: str) -> int:
    return max(map(int, re.findall(r"[KVMD]=(\d+)", call)), default=0)


def _record(task: tuple[tuple[int, int], list[str], Collection[str] | None]) -> list[Launch]:
    capability, ops, calls = task
    from triton import knobs

    from longseq.tools.benchmark import absent_gpu

    absent_gpu.activate(capability)
    import_kernels()
    # Kernels are compiled or interpreted according to the environment at their import; calls check it when they are
    # made.
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    found: dict[Any, tuple[Any, ...]] = {}
    place: list[Any] = ["", "", False]

    def note(**launch: Any) -> bool:
        """Triton's hook before a compilation, which asks if another program handles the launch; the answer is yes."""
        kernel, specialization = launch["fn"].jit_function, launch["compile"]["specialization_data"]
        found.setdefault((kernel, launch["compile"]["key"]), (kernel, specialization, *place))
        return True

    knobs.runtime.jit_cache_hook = note
    knobs.language.default_fp_fusion = False  # the launches that want it set it themselves
    for op in ops:
        for name, in_trial, call in list_calls_at_widths(op):
            if calls is None or name in calls:
                place[:] = op, name, in_trial
                call()
    return _choose(capability, found.values())


def list_calls_at_widths(op: str) -> Iterator[tuple[str, bool, Callable[[], Any]]]:
    """Calls of an operation, by name: in half precision with float32 gates, as in models, and in float32.

    The boolean is true for the widths of the self-test.
    """
    if op in UNTESTED:
        yield from ((name, True, call) for name, call in UNTESTED[op]())
        return
    for place, widths in enumerate(list_widths(op)):
        sizes = " ".join(f"{name}={size}" for name, size in widths.items())
        for dtype in (torch.bfloat16, torch.float32):
            mixed = dtype != torch.float32 and bool(find_trial(op).mixed)
            for packed, name, call in list_calls(op, dtype, widths, mixed=mixed):
                if place == 0 or not packed:
                    yield f"{str(dtype).removeprefix('torch.')} {sizes} {name}", place == 0, call


def import_kernels() -> None:
    """Import all modules with Triton kernels."""
    for module in pkgutil.walk_packages(longseq.kernels.__path__, "longseq.kernels."):
        if module.name.split(".")[-1].startswith("triton_"):
            importlib.import_module(module.name)


def _choose(capability: tuple[int, int], found: Iterable[tuple[Any, ...]]) -> list[Launch]:
    """Of launches that differ only in flags, as many as the module's docstring says, with the most flags first."""
    import triton

    described = []
    for kernel, specialization, op, call, in_trial in found:
        data = json.loads(specialization)
        if data["options"]["enable_fp_fusion"] == (kernel.fn.__name__ in UNFUSED):
            raise AssertionError(f"{op} launches {kernel.fn.__qualname__} without `launch_options`")
        base, flags = _describe(kernel, data)
        most = -sum(value is True for _, value in flags)
        described.append((most, base, flags if in_trial else [], kernel, specialization, op, call))
    seen: set[Any] = set()
    launches = []
    for _, base, flags, kernel, specialization, op, call in sorted(described, key=lambda item: item[0]):
        met = {(base, flag) for flag in flags} | {base}
        if met <= seen:
            continue
        seen |= met
        name = f"{kernel.fn.__module__}:{kernel.fn.__qualname__}"
        data = json.loads(specialization)
        del data["key"]  # it contains the line of the kernel in its file
        data["options"].pop("extern_libs", None)  # where this machine has libdevice, a part of Triton
        parts = json.dumps([data, hash_kernel(kernel), triton.__version__], sort_keys=True, default=str)
        key = hashlib.sha256(parts.encode()).hexdigest()[:16]
        launches.append(Launch(op, capability, call, name, specialization, key))
    return launches


def _describe(kernel: Any, data: dict[str, Any]) -> tuple[Any, list[tuple[str, Any]]]:
    """What determines the size of a compiled kernel, and its flags: boolean constants, and directions."""
    sizes, flags = [], []
    for (place, *_), value in zip(data["constant_keys"], data["constant_vals"], strict=True):
        name = kernel.arg_names[place]
        if isinstance(value, bool) or name == "REVERSE":
            flags.append((name, value))
        elif value is not None and name.isupper():
            sizes.append((name, str(value)))
    types = tuple(sorted({kind for kind in data["signature"].values() if kind.startswith("*")}))
    options = tuple(str(data["options"][name]) for name in ("num_warps", "num_stages", "maxnreg"))
    return (kernel.fn.__module__, kernel.fn.__qualname__, tuple(sizes), types, options), flags


def compile_all(launches: list[Launch], processes: int, end: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of launches as they are compiled, until the time is over."""
    with multiprocessing.get_context("fork").Pool(processes, import_kernels) as pool:
        for row in pool.imap_unordered(compile_launch, launches, chunksize=1):
            yield row
            if time.monotonic() > end:
                return


def compile_launch(launch: Launch, *, is_whole: bool = True) -> dict[str, Any]:
    """The row of a launch: what its kernel needs of a GPU. A whole compilation also tells registers and spills."""
    from triton import knobs
    from triton.backends.nvidia import compiler

    from longseq.tools.benchmark import absent_gpu

    absent_gpu.activate(launch.capability)
    module, name = launch.kernel.split(":")
    kernel = getattr(importlib.import_module(module), name)
    figures: dict[str, Any] = {"shared": 0, "tensor_memory": 0, "registers": None, "spilled": None, "error": None}
    to_module = compiler.llvm.to_module

    def note(module: Any, context: Any) -> Any:
        """Triton's hook after it has allocated memory and before the rest of the work."""
        figures["shared"] = module.get_int_attr("ttg.shared") or 0
        figures["tensor_memory"] = module.get_int_attr("ttg.tensor_memory_size") or 0
        if not is_whole:
            raise _SharedMemoryIsKnown
        return to_module(module, context)

    said = io.StringIO()
    compiler.llvm.to_module = note
    try:
        with knobs.nvidia.scope(), contextlib.redirect_stdout(said):
            knobs.nvidia.dump_ptxas_log = True
            kernel.preload(launch.specialization)
        used = re.search(r"Used (\d+) registers", said.getvalue())
        figures["registers"] = int(used[1]) if used else None
        figures["spilled"] = sum(map(int, re.findall(r"(\d+) bytes spill stores", said.getvalue())))
    except _SharedMemoryIsKnown:
        pass
    except Exception as error:
        figures["error"] = f"{type(error).__name__}: {one_line(error)}"[:300]
    finally:
        compiler.llvm.to_module = to_module
    return {**launch.head, **figures, "key": launch.key}


@lru_cache(None)
def hash_kernel(kernel: Any) -> str:
    """A digest of a kernel's source, and of all our functions and constants that it uses."""
    from triton.runtime.jit import JITFunction

    seen: dict[str, str] = {}
    waiting = [kernel]
    while waiting:
        function = waiting.pop()
        name = f"{function.fn.__module__}:{function.fn.__qualname__}"
        if name in seen or not name.startswith("longseq."):
            continue
        source = strip(textwrap.dedent(function.src))
        seen[name] = source
        for used in {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}:
            value: Any = function.fn.__globals__.get(used)
            if isinstance(value, JITFunction):
                waiting.append(value)
            elif hasattr(value, "value"):  # a tl.constexpr
                seen[f"{name}.{used}"] = repr(value.value)
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:16]


def hash_sources() -> dict[str, str]:
    """For each folder of kernels, a digest of its Triton modules and of the modules that they share, and of the
    compiled calls.
    """
    folder = Path(longseq.kernels.__file__).parent
    shared = _hash_files([*sorted(folder.glob("triton_*.py")), folder / "self_test_cases.py", Path(__file__)])
    files: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*/triton_*.py")):
        files.setdefault(file.parent.name, []).append(file)
    return {"": shared, **{name: _hash_files(found) for name, found in files.items()}}


def _hash_files(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(strip(file.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()[:16]


def strip(source: str) -> str:
    """A source without comments, docstrings and empty lines."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for row in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[row] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _result(
    done: dict[str, dict[str, Any]],
    launches: list[Launch],
    others: list[dict[str, Any]],
    sources: dict[str, str],
    ops: list[str],
    is_everywhere: bool,
) -> dict[str, Any]:
    """The content of the file; with a hash of the sources if the whole table was recorded and compiled."""
    rows = [done[launch.key] for launch in launches if launch.key in done]
    is_whole = is_everywhere and ops == list_compiled()
    return {
        "what": "Kernels compiled for GPUs that were not there",
        "command": "longseq benchmark compile output=benchmarks/compilations.json",
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton")},
        "sources": hash_sources() if is_whole else sources,
        "missing": len(launches) - len(rows),
        "rows": [*others, *rows],
    }


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"rows": [], "sources": {}}


def _write(file: Path, result: dict[str, Any]) -> None:
    """Write JSON with one row per line."""
    head = json.dumps({name: value for name, value in result.items() if name != "rows"}, indent=2)
    rows = sorted(
        result["rows"], key=lambda row: (row["op"], row["kernel"], row["capability"], row["call"], row["key"])
    )
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as part:
        part.write_text(f'{head[:-2]},\n  "rows": [\n{lines}\n  ]\n}}\n', encoding="utf-8")
