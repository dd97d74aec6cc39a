"""The check before every measurement: outputs and gradients are compared with float64. A wrong result is not timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from measure import one_line
from peers import Peer, Tensors
from report import is_emulated
from torch import Tensor
from work import Work

from longseq import kernels
from longseq.kernels.accuracy import Bar
from longseq.kernels.self_test_inputs import Inputs

# The multiple of our own tolerance that peers may reach. Peers round intermediate results: the check of peers only
# distinguishes another operation from another rounding.
PEER_FACTOR = 8

Function = Callable[[Tensors], tuple[Tensor, ...]]


class Verdict(NamedTuple):
    """The result of the check: whether the implementation may be timed, and why."""

    passed: bool
    words: str


class Gate:
    """The exact results of one call in float64, and the errors that the self-test allows."""

    def __init__(self, work: Work, dtype: torch.dtype, device: torch.device, gradients: bool = True) -> None:
        self.dtype, self.gradients = dtype, gradients
        self.inputs = work.make(dtype, device)  # the full size: smaller calls may launch other kernels
        self.options = options_of(self.inputs, work)
        generator = torch.Generator().manual_seed(1)
        outputs = call_op(self.inputs, self.options, "torch")(tensors_of(self.inputs))
        # Random weights: with regular ones, the two halves of a sum over time would cancel.
        self.weights = [
            torch.randn(y.shape, generator=generator, dtype=torch.float64).to(dtype).to(device) for y in outputs
        ]
        exact = self._run(call_op(self.inputs, self.options, "torch"), torch.float64)
        torch_result = self._run(call_op(self.inputs, self.options, "torch"), dtype)
        tokens = self.inputs.tokens
        self.bars = {name: Bar.of(x, torch_result[name].to(dtype), tokens, dtype) for name, x in exact.items()}

    def judge_backend(self, backend: str) -> Verdict:
        """Compare one of our backends."""
        # Triton's interpreter truncates where a GPU rounds.
        factor = 2 if is_emulated() and self.dtype != torch.float32 else 1
        return self._judge(call_op(self.inputs, self.options, backend), factor)

    def judge_peer(self, peer: Peer) -> Verdict:
        """Compare a peer, if it computes the same function."""
        if not peer.same:
            return Verdict(True, "another operation")

        def run(tensors: Tensors) -> tuple[Tensor, ...]:
            return (peer.restore(peer.run(peer.prepare(tensors), self.options)),)

        return self._judge(run, PEER_FACTOR)

    def _judge(self, function: Function, factor: float) -> Verdict:
        try:
            first, second = (self._run(function, self.dtype) for _ in range(2))
        except Exception as failure:
            return Verdict(False, f"fails: {one_line(failure)}")
        parts = {name: self.bars[name].find_worst(x).share / factor for name, x in first.items()}
        worst = max(parts, key=lambda name: parts[name])
        words = f"{worst} at {parts[worst]:.2f} of the allowed error"
        if not parts[worst] <= 1:
            return Verdict(False, f"WRONG: {words}")
        changed = [name for name, x in first.items() if not torch.equal(x, second[name])]
        return Verdict(True, f"right: {words}" + (f"; {', '.join(changed)} differ by run" if changed else ""))

    def _run(self, function: Function, dtype: torch.dtype) -> Tensors:
        """The outputs and the gradient of every tensor; without gradients, the outputs of a call that saves nothing."""
        leaves = {
            name: x.detach().to(dtype).requires_grad_(self.gradients) if x.is_floating_point() else x
            for name, x in tensors_of(self.inputs).items()
        }
        with torch.set_grad_enabled(self.gradients):
            outputs = function(leaves)
        named = {f"output {i}" if i else "output": y.detach() for i, y in enumerate(outputs)}
        if not self.gradients:
            return named
        wanted = {name: x for name, x in leaves.items() if x.requires_grad}
        weights = [weight.to(y.dtype) for weight, y in zip(self.weights, outputs, strict=True)]
        gradients = torch.autograd.grad(outputs, list(wanted.values()), weights)
        return named | {f"gradient of {name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}


def tensors_of(inputs: Inputs) -> Tensors:
    """The tensors of a call without an initial state, as in models."""
    return {**inputs.sequences, **inputs.parameters}


def options_of(inputs: Inputs, work: Work) -> dict[str, Any]:
    """The options of a call, and the state for operations that need an initial one."""
    state = {"initial_state": inputs.initial_state} if inputs.needs_state else {}
    return {**inputs.options, **work.options, **state}


def call_op(inputs: Inputs, options: Mapping[str, Any], backend: str) -> Function:
    """One of our operations as a function from its tensors to its outputs."""
    operation = getattr(kernels, inputs.op)

    def run(tensors: Tensors) -> tuple[Tensor, ...]:
        state = options.get("initial_state")
        given = dict(options)
        if isinstance(state, Tensor):
            given["initial_state"] = state.to(next(iter(tensors.values())).dtype)
        outputs = operation(**tensors, **given, backend=backend)
        return (outputs,) if isinstance(outputs, Tensor) else outputs[:-1]  # without the state, if there is one

    return run
