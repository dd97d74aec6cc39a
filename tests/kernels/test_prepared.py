"""What calls that are alike leave out: the choice of a backend with its checks, and Triton's look at all arguments."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from longseq.kernels import dispatch, self_test
from longseq.kernels.dispatch import remembered
from longseq.kernels.triton_launch import Prepared


class Kernel:
    """A stand-in for a kernel of Triton: what it was launched with, and what its compiled forms were."""

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
    assert len(kernel.slow) == 4  # begins of 16 bytes are alike
    assert len(kernel.fast) == 2 * len(calls) - 4


def test_what_was_not_launched_is_not_remembered():
    emulated, idle, x = Kernel(compiles=False), Kernel(), torch.zeros(4)
    for _ in range(2):
        prepare(idle, programs=0)(x, x)
    launch = prepare(emulated)
    launch(x, x)
    launch(x, x)
    assert len(emulated.slow) == 2
    assert not idle.slow + idle.fast + emulated.fast


@pytest.fixture
def asked(monkeypatch):
    """A choice that is remembered on the CPU, and the shapes that it was asked about."""
    asked = []
    preferred, other = dispatch.Backend("triton", lambda: "triton"), dispatch.Backend("torch", lambda: "torch")
    monkeypatch.setattr(dispatch, "REMEMBERED", ("cpu",))
    monkeypatch.setitem(dispatch._BACKENDS, "example", (preferred, other))

    @remembered("example")
    def choose(x, other_input, backend):
        asked.append(tuple(x.shape))
        if x.shape[0] > 4:
            raise ValueError("too many rows")
        return dispatch.backends("example")[0 if backend == "auto" else 1].function

    return choose, asked


def test_a_choice_is_made_once_for_calls_that_are_alike(asked):
    choose, shapes = asked
    x = torch.zeros(2, 3)
    for call in ((x, None), (x + 1, None), (x.T.contiguous().T, None), (x, x), (x, x.clone()), (x.half(), None)):
        assert choose(*call, "auto")() == "triton"
    assert len(shapes) == 3
    assert choose(x[:1], None, "auto")() == "triton"
    assert shapes[3:] == [(1, 3)]


def test_refusals_and_other_backends_are_asked_for_each_time(asked):
    choose, shapes = asked
    for _ in range(2):
        assert choose(torch.zeros(2), None, "torch")() == "torch"
        with pytest.raises(ValueError, match="too many rows"):
            choose(torch.zeros(5), None, "auto")
    assert len(shapes) == 4


def test_a_choice_is_not_remembered_where_it_may_be_another_one(asked, monkeypatch):
    choose, shapes = asked
    x = torch.zeros(2)
    thread = threading.Thread(target=lambda: (setattr(self_test._THREAD, "is_testing", True), choose(x, None, "auto")))
    thread.start()
    thread.join()
    with FakeTensorMode():
        choose(torch.zeros(2), None, "auto")
    monkeypatch.setattr(dispatch, "REMEMBERED", ("cuda",))
    choose(x, None, "auto")
    monkeypatch.setattr(dispatch, "REMEMBERED", ("cpu",))
    choose(x, None, "auto")
    assert len(shapes) == 4
    monkeypatch.setattr(dispatch, "MOST_REMEMBERED", 1)
    for rows in (1, 1, 2, 2, 1):
        choose(torch.zeros(rows), None, "auto")
    assert len(shapes) == 7


def test_sizes_that_are_symbols_are_not_remembered(asked):
    choose, shapes = asked
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.zeros(3, 8), symbolic_context=dynamic)
    for _ in range(2):
        assert choose(x, None, "auto")() == "triton"
    assert len(shapes) == 2


def test_a_remembered_choice_compiles_to_one_graph(asked):
    choose, _ = asked
    x = torch.zeros(2)
    choose(x, None, "auto")

    def double(x):
        return 2 * x if choose(x, None, "auto")() == "triton" else x

    torch._dynamo.reset()
    y = torch.compile(double, fullgraph=True, backend="eager")(x + 1)
    assert y.tolist() == [2, 2]
