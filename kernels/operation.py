"""Decorators that make a public function an operation, from the layouts of its tensors, its backends and its kernels.

The decorated function is a signature and a docstring, without a body. A call of it goes through four steps: its
arguments are bound to the signature; `judge` checks them and describes the call (`Call`); the first backend without a
reason against the call is chosen; the backend runs. The choice is remembered for calls of the same types and shapes.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from longseq.kernels import self_test
from longseq.kernels.checks import check_chunk_size, check_counter, check_parts, check_scale, check_tensors
from longseq.kernels.custom_op import is_exactly_tensor, is_watched
from longseq.kernels.devices import is_emulated, triton_reasons, width_reasons
from longseq.kernels.dispatch import (
    Backend,
    Call,
    backends,
    find_torch_form,
    is_exporting,
    is_recording,
    loop_reasons,
    no_reasons,
    register,
    select,
    unpacking_reasons,
)
from longseq.kernels.packing import Packing, check_tokens, is_checked, segment_bounds
from longseq.kernels.precision import call_dtype, is_mixed
from longseq.kernels.reading import Reverse, check_own_parameters, check_reverse, run_each_way
from longseq.kernels.recurrence import run_empty, run_tokens

Function = TypeVar("Function", bound=Callable[..., Any])

COUNTER = "int64"  # in place of a layout: an integer for each row of a state
TRITON_STEP_WIDTH = 512  # the largest dimension that one program of a step holds whole

MOST_REMEMBERED = 4096  # choices of backends, for each operation


# The dimensions of each tensor by its name, or those of the parts of a state.
Layouts = Mapping[str, str | Mapping[str, str]]
Tensors = dict[str, tuple[Tensor | None, str]]


@dataclass
class Recurrence:
    """The tensors that an operation over time takes, and its form for one token.

    Attributes:
        layouts: the dimensions of each tensor by its name, in the letters of `check_tensors`: "B T H K". A state of
            several parts has a dictionary of layouts. "B T H | B T H K" allows both. The one-token form has the same
            layouts without T. A layout with P is for a parameter with one row for each direction.
        values: the name of the tensor whose type the output has.
        mixed: tensors that may be float32 when values are in half precision.
        check: called with the operation's name and the arguments, of a sequence or of one token, before the tensors are
            checked.
        kind: called with the arguments; returns `Call.kind`.
        power_of_two: the chunk size must be a power of two, because chunks are split in halves.
    """

    layouts: Layouts
    values: str
    mixed: tuple[str, ...] = ()
    check: Callable[..., None] | None = None
    kind: Callable[..., str] | None = None
    power_of_two: bool = False

    def __post_init__(self) -> None:
        self.layouts_of_token = _of_one_token(self.layouts)

    def judge(self, op: str, *, cu_seqlens: Tensor | None, reverse: Reverse, **arguments: Any) -> Call:
        """Check a call and return the properties by which its backend is chosen."""
        chunk_size = arguments.get("chunk_size")
        if chunk_size is not None:
            check_chunk_size(op, chunk_size, power_of_two=self.power_of_two)
        tensors, sizes = self._check(op, self.layouts, arguments, cu_seqlens)
        check_reverse(op, reverse, sizes["B"], cu_seqlens)
        for name, (tensor, layout) in tensors.items():
            if tensor is not None and layout.startswith("P "):
                check_own_parameters(op, name, tensor, reverse)
        if chunk_size is not None:
            sizes = {**sizes, "C": chunk_size}
        values = arguments[self.values]
        return Call(
            values.device,
            call_dtype(values, *[tensor for tensor, _ in tensors.values()]),
            cu_seqlens is not None,
            is_exporting(),
            sizes,
            reverse=reverse,
            mixed=is_mixed(values, *[arguments[name] for name in self.mixed]),
            kind="" if self.kind is None else self.kind(**arguments),
        )

    def judge_step(self, op: str, **arguments: Any) -> Call:
        """Check a call of the form for one token and return the properties by which its backend is chosen."""
        tensors, sizes = self._check(op, self.layouts_of_token, arguments, None)
        present = {name: x for name, (x, _) in tensors.items() if x is not None}
        states = [x for name, x in present.items() if name.startswith("state")]
        dtype = next((x.dtype for x in states if x.dtype != torch.float32), torch.float32)
        wanted = torch.is_grad_enabled() and any([x.requires_grad for x in present.values()])
        return Call(states[0].device, dtype, exporting=is_exporting(), sizes=sizes, differentiated=wanted)

    def loop(
        self, step: Callable[..., tuple[Tensor, Any]], first: Callable[..., Any] | None = None
    ) -> Callable[..., tuple[Tensor, Any]]:
        """The backend `reference`: `step`, the one-token form in torch, at one token after another.

        `first(rows, dtype, **arguments)` makes the first state, where that is not zero. `count`, which `prepare` adds
        to some calls, is a sequence as well.
        """
        names = [name for name, layout in self.layouts.items() if isinstance(layout, str) and layout.startswith("B T")]
        parameters = {name: str(layout) for name, layout in self.layouts.items() if " | P " in layout}
        states: Any = self.layouts["initial_state"]

        def run(
            *, initial_state: Any, output_final_state: bool, cu_seqlens: Tensor | None, reverse: Reverse,
            chunk_size: Any = None, **options: Any,
        ) -> tuple[Tensor, Any]:  # fmt: skip
            sequences = {name: options.pop(name) for name in (*names, "count") if name in options}
            call = {"output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
            own = {name: options[name] for name in parameters if _fitting(options[name], parameters[name])[0] == "P"}
            if own:
                shared = {name: x for name, x in options.items() if name not in own}
                return run_each_way(run, own, sequences, initial_state=initial_state, reverse=reverse, **call, **shared)
            values = sequences[self.values]
            sizes: dict[str, int] = {}
            for name in names:
                if (x := sequences[name]) is not None:
                    sizes.update(zip(_fitting(x, str(self.layouts[name])).split(), x.shape, strict=True))

            def shape(layout: str) -> tuple[int, ...]:
                return tuple([sizes[dim] for dim in layout.split()[1:]])

            if first is not None:
                state_shape: Any = partial(first, **sequences, **options)
            else:
                state_shape = shape(states) if isinstance(states, str) else tuple(map(shape, states.values()))
            return run_tokens(
                lambda token, state: step(**dict(zip(sequences, token, strict=True)), state=state, **options),
                [*sequences.values()], initial_state=initial_state, output_dtype=values.dtype, reverse=reverse,
                state_shape=state_shape, **call,
            )  # fmt: skip

        return run

    def _check(
        self, op: str, layouts: Layouts, arguments: Mapping[str, Any], cu_seqlens: Tensor | None
    ) -> tuple[Tensors, dict[str, int]]:
        """Check a call; return its tensors with their layouts, and the size of each letter."""
        if "scale" in arguments:
            check_scale(op, arguments["scale"])
        if self.check is not None:
            self.check(op, **arguments)
        tensors, counters = _with_layouts(op, layouts, arguments)
        sizes = check_tensors(op, tensors, cu_seqlens, mask=arguments.get("mask"))
        for name, counter in counters.items():
            check_counter(op, name, counter, tensors[f"{name.partition('[')[0]}[0]"][0])
        return tensors, sizes


def _with_layouts(op: str, layouts: Layouts, arguments: Mapping[str, Any]) -> tuple[Tensors, dict[str, Tensor | None]]:
    """The tensors of a call with their layouts, and the counters of its state, by name."""
    named: Tensors = {}
    for name, layout in layouts.items():
        if isinstance(layout, str):
            named[name] = arguments[name], layout
        else:
            parts = check_parts(op, arguments[name], *layout, name=name)
            for i, (part, own) in enumerate(zip(parts, layout.values(), strict=True)):
                named[f"{name}[{i}]"] = part, own
    tensors = {name: (x, _fitting(x, layout)) for name, (x, layout) in named.items() if layout != COUNTER}
    return tensors, {name: x for name, (x, layout) in named.items() if layout == COUNTER}


def _fitting(tensor: Tensor | None, layout: str) -> str:
    """Of two layouts the one with the tensor's number of dimensions; the second if neither fits."""
    first, _, second = layout.partition(" | ")
    return first if not second or (tensor is not None and tensor.dim() == len(first.split())) else second


def _of_one_token(layouts: Layouts) -> dict[str, str | Mapping[str, str]]:
    def cut(layout: Any) -> Any:
        if not isinstance(layout, str):
            return {part: cut(own) for part, own in layout.items()}
        both = [one for one in layout.split(" | ") if not one.startswith("P ")]
        return " | ".join([one.replace("B T", "B").replace("S ", "B ") for one in both])

    return {"state" if name == "initial_state" else name: cut(layout) for name, layout in layouts.items()}


def operation(
    judge: Callable[..., Call],
    *,
    torch: Callable[..., Any],
    triton: str | None = None,
    limits: Mapping[str, int] | None = None,
    reasons: Callable[[Call], list[str]] = no_reasons,
    reference: Callable[..., Any] | None = None,
    prepare: Callable[..., Mapping[str, Any]] | None = None,
) -> Callable[[Function], Function]:
    """Make an operation of a function without a body: the backends compute it.

    Args:
        judge: called with the operation's name and its arguments by keyword; checks them and describes the call.
        torch: the backend `torch`.
        triton: the module, in the package of the function, that has the function `<operation>_triton`. It is imported
            by the first call that runs it.
        limits: the largest sizes that the Triton kernels take, as in {"K V": 256}.
        reasons: finds further reasons against the Triton kernels.
        reference: the backend `reference`. Without it this is an operation on each token by itself.
        prepare: turns the arguments of the operation into those that backends take; by default they are the same.
    """

    def decorate(function: Function) -> Function:
        op = function.__name__
        forms = []
        if triton is not None:
            kernels = Later(f"{function.__module__}.{triton}", f"{op}_triton")

            def find_reasons(call: Call) -> list[str]:
                found = triton_reasons(call)
                for names, limit in (limits or {}).items():
                    found += width_reasons(call, limit, *names.split())
                return found + reasons(call)

            forms.append(Backend("triton", kernels, find_reasons))
        if reference is None:
            register(op, *forms, Backend("torch", torch), kind="local")
        else:
            chunked = Backend("torch", torch, unpacking_reasons)
            register(op, *forms, chunked, Backend("reference", reference, loop_reasons))
        return dispatched(op, function, judge, prepare)

    return decorate


def step(
    recurrence: Recurrence, *, torch: Callable[..., Any], held: tuple[str, ...] = ()
) -> Callable[[Function], Function]:
    """Make the one-token form of an operation, called `<operation>_step`, of a function without a body.

    Its Triton kernel is `<operation>_step_triton` of the package's module `triton_step`. The kernel reads the state
    once and writes the next state once; it has no gradient. `held` names the dimensions that one program holds whole.
    """

    def reasons(call: Call) -> list[str]:
        found = triton_reasons(call)
        if call.dtype.itemsize == 2:
            found.append(f"it keeps states in float32, and this one is {call.dtype} (cast it, or use backend='torch')")
        if call.differentiated:
            found.append("it has no gradient, and an input requires one (use backend='torch', or torch.no_grad())")
        return found + width_reasons(call, TRITON_STEP_WIDTH, *held)

    def decorate(function: Function) -> Function:
        name = function.__name__
        kernel: Callable[..., Any] = Later(f"{function.__module__}.triton_step", f"{name}_triton")
        if not isinstance(recurrence.layouts["initial_state"], str):
            kernel = _with_parts(kernel)
        register(name, Backend("triton", kernel, reasons), Backend("torch", torch), kind="step")
        return dispatched(name, function, recurrence.judge_step)

    return decorate


def _with_parts(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A step whose state has several parts, from one that takes and returns them one after another."""

    def run(**arguments: Any) -> tuple[Tensor, Any]:
        flat = [part for x in arguments.values() for part in (x if isinstance(x, tuple) else (x,))]
        output, *after = kernel(*flat)
        return output, tuple(after)

    return run


_LATER: dict[tuple[str, str], "Later"] = {}


class Later:
    """A function that is imported at its first call, because importing this package must not import Triton."""

    def __init__(self, module: str, name: str) -> None:
        self.__name__ = name
        self.module = module
        self.function: Callable[..., Any] | None = None
        _LATER[module, name] = self

    def load(self) -> Callable[..., Any]:
        longseq_import_kernels(self.module, self.__name__)
        assert self.function is not None
        return self.function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.load()(*args, **kwargs)


def longseq_import_kernels(module: str, name: str) -> bool:
    """Import the function of a `Later`."""
    later = _LATER[module, name]
    if later.function is None:
        later.function = getattr(importlib.import_module(module), name)
    return True


# torch.compile cannot trace `import_module`: it calls this function while it traces (see `longseq_self_test_verdict`).
longseq_import_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


_REMEMBERED: dict[str, dict[Any, tuple[Callable[..., Any], tuple[Backend, ...]]]] = {}


def forget() -> None:
    """Forget all remembered choices of backends. Call it after changing anything that a choice depends on."""
    for remembered in _REMEMBERED.values():
        remembered.clear()


@contextmanager
def prepare_kernels(device: torch.device) -> Iterator[None]:
    """Compile the Triton kernels of all calls inside, and of their self-tests, side by side; then run the self-tests.

    Calls inside, backward passes included, launch no kernel that is not compiled yet: their results are meaningless.
    """
    try:
        with self_test.all_at_once(device):
            yield
    finally:
        forget()  # inside, all kernels counted as right


def dispatched(
    op: str, function: Function, judge: Callable[..., Call], prepare: Callable[..., Mapping[str, Any]] | None = None
) -> Function:
    """Return the public function of an operation: it checks a call, chooses a backend, and runs it.

    The choice is remembered, because the host takes longer to check a small call than a GPU to run it. The key is the
    types, shapes and devices of the tensors, the other arguments, and which of them are given by keyword. On devices
    where kernels take the self-test only the choice of the first backend is remembered: another one may have been
    chosen before the test had a verdict.
    """
    parameters = inspect.signature(function).parameters
    names, defaults = tuple(parameters), {name: parameter.default for name, parameter in parameters.items()}
    remembered, is_step = _REMEMBERED.setdefault(op, {}), op.endswith("_step")
    is_recurrent = "cu_seqlens" in names

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        given = {**dict(zip(names, args)), **kwargs} if args else kwargs  # noqa: B905
        return {**defaults, **given}

    def choose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        function(*args, **kwargs)  # raises Python's own TypeError for arguments that the signature does not have
        arguments = bind(args, kwargs)
        run, first = select(op, arguments.pop("backend"), judge(op, **arguments)), arguments[names[0]]
        if is_exporting() or first.numel():
            return run
        form = find_torch_form(op, run)  # an empty tensor launches no kernel
        return partial(run_empty, form) if is_recurrent and first.shape[0] == 0 else form

    def recall(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        first: Any = args[0] if args else kwargs.get(names[0])
        # Sizes of fake tensors may be symbols.
        if not is_exactly_tensor(first) or is_watched() or is_exporting() or is_recording():
            return choose(args, kwargs)
        parts = [
            (x.dtype, x.device, x.shape) if isinstance(x, Tensor) else _look(x) if isinstance(x, tuple) else x
            for x in (*args, *kwargs.values())
        ]
        key = (first.is_cpu and is_emulated(), is_step and _has_gradient(args, kwargs), *kwargs, *parts)
        try:
            run, among = remembered.get(key, (None, None))
        except TypeError:  # an argument without a hash, which no valid call has
            return choose(args, kwargs)
        if run is not None and among is backends(op):
            return run
        run, among = choose(args, kwargs), backends(op)
        is_final = run is among[0].function or not self_test.is_tested(first.device.type)
        if is_final and not self_test.is_testing():
            if len(remembered) >= MOST_REMEMBERED:
                remembered.clear()
            remembered[key] = run.load() if isinstance(run, Later) else run, among
        return run

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        packing = kwargs.get("cu_seqlens")
        if isinstance(packing, Packing):
            # The tensor of borders carries everything that the `Packing` has found (see `Packing.once`).
            check_tokens(packing, args[0] if args else kwargs[names[0]])
            kwargs["cu_seqlens"] = packing.cu_seqlens
        # torch.compile traces only the first condition.
        run = choose(args, kwargs) if torch.compiler.is_compiling() else recall(args, kwargs)
        arguments = bind(args, kwargs)
        del arguments["backend"]
        borders = arguments["cu_seqlens"] if is_recurrent else None
        if borders is not None and not torch.compiler.is_compiling() and is_checked() and not is_exporting():
            segment_bounds(borders, arguments[names[0]].shape[1])
        return run(**(arguments if prepare is None else prepare(**arguments)))

    return call  # type: ignore[return-value]


def _look(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """The properties of the parts of a state that a choice can depend on."""
    return tuple([(x.dtype, x.device, x.shape) if isinstance(x, Tensor) else x for x in parts])


def _has_gradient(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether gradients are recorded and an input requires one."""
    if not torch.is_grad_enabled():
        return False
    given = (*args, *kwargs.values())
    parts = [part for x in given if isinstance(x, tuple) for part in x]
    return any([x.requires_grad for x in (*given, *parts) if isinstance(x, Tensor)])
