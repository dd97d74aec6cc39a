"""What repeated launches of a kernel skip: Triton's inspection of all arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch
from cases import cases

from longseq import kernels
from longseq.kernels.triton_launch import Prepared


class Kernel:
    """A stand-in for a Triton kernel: it records launches, its own and of its compiled forms."""

    arg_names = ("x", "y", "rows", "scale", "WIDTH", "EVEN")

    def __init__(self, compiles: bool = True) -> None:
        self.compiles = compiles
        self.slow: list[tuple] = []
        self.fast: list[tuple] = []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.slow.append((grid, args, constants))
            return Compiled(self) if self.compiles else None

        return launch


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.fast.append((grid, args))


def prepare(kernel: Kernel, programs: int = 3) -> Prepared:
    return Prepared(kernel, torch.device("cpu"), programs, (5, 0.5), EVEN=True, WIDTH=16, num_warps=2)


def test_a_compiled_kernel_is_launched_with_all_arguments_in_their_places():
    kernel, x = Kernel(), torch.zeros(4)
    launch = prepare(kernel)
    for _ in range(3):
        launch(x, None)
    ((grid, args, constants),) = kernel.slow
    assert grid == (3, 1, 1)
    assert (args[0] is x, *args[1:]) == (True, None, 5, 0.5)
    assert constants == {"EVEN": True, "WIDTH": 16, "num_warps": 2}
    assert [(grid, *args[1:]) for grid, args in kernel.fast] == 2 * [((3, 1, 1), None, 5, 0.5, 16, True)]


def test_other_types_and_alignments_are_compiled_anew():
    kernel, x = Kernel(), torch.zeros(9)
    launch = prepare(kernel)
    calls = [(x, None), (x[1:], None), (x[4:], None), (x.half(), None), (x, x), (x[8:], x)]
    for call in 2 * calls:
        launch(*call)
    assert len(kernel.slow) == 4  # addresses that 16 divides are alike
    assert len(kernel.fast) == 2 * len(calls) - 4


def list_unguarded_launches(node: ast.AST) -> Iterator[ast.Call]:
    """Calls `kernel[grid](...)` that are not inside `with torch.cuda.device_of(...)`."""
    if isinstance(node, ast.With) and "device_of" in ast.unparse(node.items[0].context_expr):
        return
    match node:
        case ast.Call(func=ast.Subscript(value=ast.Name(id=name))) if not name.isupper():  # not of a table of functions
            yield node
    for child in ast.iter_child_nodes(node):
        yield from list_unguarded_launches(child)


@cases("file", sorted(Path(kernels.__path__[0]).rglob("triton_*.py")))
def test_kernels_run_on_the_gpu_of_their_tensors(file):
    # Triton launches on the current device, but the tensors may be on another. A prepared launch takes care of it.
    found = [call.lineno for call in list_unguarded_launches(ast.parse(file.read_text(encoding="utf-8")))]
    assert not found, f"{file.name}, lines {found}: launch with find_launch (see CONTRIBUTING.md)"
