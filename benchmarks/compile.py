"""Compile every kernel of every operation for GPUs that need not be present.

python benchmarks/compile.py [--ops delta_rule ...] [--capabilities 8.6 ...]

The operations are called on tensors without values. They launch their kernels as usual, and Triton passes each launch
on in place of compiling it. So this module has no list of kernels or arguments. The calls are those of launch_cases.py,
and of the self-tests of one-token forms, at several widths, read forward.

Launches of one kernel with the same types, sizes and options differ in flags, such as a gate or packed sequences. Flags
hardly change the shared memory of a kernel, so that one of these launches is compiled; at the widths of the self-tests,
as many launches as are needed to include each value of each flag.

A row of the file is kept until its kernel, a function that the kernel calls, its arguments or Triton's version change.
Comments and docstrings do not count as changes.
"""

from __future__ import annotations

import argparse
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
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import absent_gpu
import torch
from launch_cases import list_cases
from measure import one_line

import longseq.kernels
from longseq.kernels import list_ops
from longseq.kernels.dispatch import backends, explain, list_stepped_ops
from longseq.kernels.self_test import SELF_TEST_VARIABLE, find_trial, list_calls

HERE = Path(__file__).parent
CAPABILITIES = {".".join(map(str, capability)): capability for capability in absent_gpu.SHARED_MEMORY}
# Widths of keys, values, slots and channels beside those of the self-tests: the widest that an operation takes is
# compiled, and one between. Likewise the states of a scan, and the tokens of an orthogonal recurrence's chunks.
WIDTHS = (128, 256, 512)
STATES = (16, 64)
CHUNKS = (1, 16, 64)
TENSOR_MEMORY = 512  # the columns of Blackwell's tensor memory
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


def list_compiled() -> list[str]:
    """The operations with Triton kernels, including those for one token."""
    names = [*list_ops(), *list_ops("local"), *(f"{op}_step" for op in list_stepped_ops())]
    return [op for op in names if "triton" in [backend.name for backend in backends(op)]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=list_compiled(), help="names of operations")
    parser.add_argument("--capabilities", nargs="+", default=list(CAPABILITIES), choices=list(CAPABILITIES))
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile at the same time")
    parser.add_argument("--seconds", type=float, default=7200, help="the next call compiles what is left")
    parser.add_argument("--output", type=Path, default=HERE / "compilations.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update({"TRITON_CACHE_DIR": folder, SELF_TEST_VARIABLE: "0"})
        launches = record([CAPABILITIES[name] for name in options.capabilities], options.ops, options.processes)
        held = json.loads(options.output.read_text())["rows"] if options.output.exists() else []
        done = {row["key"]: row for row in held}
        for launch in launches:  # a kernel that has not changed may be that of another call now
            if launch.key in done:
                done[launch.key] |= launch.head
        todo = [launch for launch in launches if launch.key not in done]
        print(f"{len(launches)} launches, {len(todo)} to compile", flush=True)
        chosen = {(op, name) for op in options.ops for name in options.capabilities}
        others = [row for row in held if row["op"] in list_compiled() and (row["op"], row["capability"]) not in chosen]
        end, written = time.monotonic() + options.seconds, time.monotonic()
        for row in compile_all(todo, options.processes, end):
            done[row["key"]] = row
            if fault := find_fault(row):
                print(f"{row['op']}: {row['kernel']} on {row['capability']}, {row['call']}: {fault}", flush=True)
            if time.monotonic() > written + SECONDS:
                write(options.output, others, launches, done)
                written = time.monotonic()
        write(options.output, others, launches, done)


def write(file: Path, others: list[dict[str, Any]], launches: list[Launch], done: dict[str, dict[str, Any]]) -> None:
    """Write the rows of these launches that are compiled, and other rows, as JSON with one row per line."""
    rows = [done[launch.key] for launch in launches if launch.key in done]
    head = {
        "what": "Kernels compiled for GPUs that were not there",
        "command": "python benchmarks/compile.py",
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton")},
        "missing": len(launches) - len(rows),
    }
    order = ("op", "kernel", "capability", "call", "key")
    rows = sorted([*others, *rows], key=lambda row: tuple(row[name] for name in order))
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    file.write_text(f'{json.dumps(head, indent=2)[:-2]},\n  "rows": [\n{lines}\n  ]\n}}\n', encoding="utf-8")


def find_fault(row: dict[str, Any]) -> str | None:
    """Why a kernel cannot be launched on its GPU, or None."""
    if row["error"] is not None:
        return row["error"]
    limit = absent_gpu.SHARED_MEMORY[CAPABILITIES[row["capability"]]]
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
    for place, widths in enumerate(list_widths(op)):
        sizes = " ".join(f"{name}={size}" for name, size in widths.items())
        for dtype in (torch.bfloat16, torch.float32):
            mixed = dtype != torch.float32 and bool(find_trial(op).mixed)
            cases = [case for case in list_cases(op, widths, dtype) if place == 0 or not case.bounds]
            for name, call in list_calls(op, dtype, widths, cases, mixed=mixed):
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
        if not data["options"]["enable_fp_fusion"]:
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


if __name__ == "__main__":
    main()
