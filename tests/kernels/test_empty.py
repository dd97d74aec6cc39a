"""Calls without rows or tokens: empty results of the right shapes, states passed on, and gradients."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import gradients, make_inputs, results, takes

from longseq.kernels import list_ops, short_convolution, token_loss
from longseq.kernels.dispatch import backends, list_stepped_ops
from longseq.kernels.recurrence import each

LOCAL = list_ops("local")
FORMS = [(op, backend.name) for op in (*list_ops(), *LOCAL) for backend in backends(op)]


def make(op, *, batch=2, tokens=3, **options):
    return make_inputs(op, batch=batch, tokens=tokens, dtype=torch.float32, **options)


@pytest.mark.parametrize(("op", "backend"), FORMS)
def test_empty_calls_give_empty_results(interpreted, op, backend):
    expected = gradients(make(op), backend="torch")
    for shape, sizes in {"no rows": {"batch": 0}, "no tokens": {"tokens": 0}}.items():
        inputs = make(op, **sizes)
        actual = gradients(inputs, backend=backend)
        assert actual.keys() == expected.keys()
        assert actual["output"].numel() == 0
        for name, x in actual.items():
            assert (x.dtype, x.ndim) == (expected[name].dtype, expected[name].ndim), name
        for name, x in inputs.tensors.items():
            assert actual[f"gradient of {name}"].shape == x.shape, name
            if not name.startswith("initial_state"):
                assert not actual[f"gradient of {name}"].any(), name
        if op in list_ops():
            states = results(inputs.sequences, inputs.initial_state)
            for name in states.keys() - {"output"}:
                assert actual[name].shape == states[name].shape, name
                assert shape != "no tokens" or torch.equal(actual[name], states[name]), name


@pytest.mark.parametrize(("op", "backend"), [form for form in FORMS if takes(form[0], "cu_seqlens")])
def test_packed_sequences_without_a_token_pass_their_states_on(interpreted, op, backend):
    inputs = make(op, tokens=0, segments=2)
    output, state = inputs.run(backend=backend, cu_seqlens=torch.tensor([0, 0, 0]))
    assert output.shape[:2] == (1, 0)
    expected = results(output, inputs.initial_state)
    assert all(torch.equal(x, expected[name]) for name, x in results(output, state).items())


@pytest.mark.parametrize("op", list_ops())
def test_empty_calls_start_from_the_stated_state(op):
    inputs = make(op, tokens=0)
    if inputs.needs_state:
        return
    first = each(torch.zeros_like, inputs.initial_state) if inputs.absent_state is None else inputs.absent_state
    output, state = inputs.run(initial_state=None)
    expected = results(output, first)
    assert all(torch.equal(x, expected[name]) for name, x in results(output, state).items())


@pytest.mark.parametrize("op", list_stepped_ops())
def test_steps_without_rows(interpreted, op):
    inputs = make(op, tokens=1, batch=0)
    for backend in ("auto", "triton"):
        with torch.no_grad():
            output, state = inputs.step(0, inputs.initial_state, backend=backend)
        assert output.numel() == 0
        expected = results(output, inputs.initial_state)
        assert all(x.shape == expected[name].shape for name, x in results(output, state).items())


@pytest.mark.parametrize(
    ("weight", "rows", "reverse"), [((3, 1), 0, False), ((3, 4), 0, True), ((2, 3, 4), 0, "second_half")]
)
def test_convolutions_of_no_rows_with_a_state(weight, rows, reverse):
    x, taps = torch.randn(rows, 5, 3), torch.randn(weight)
    state = torch.zeros(rows, 3, weight[-1] - 1)
    y, last = short_convolution(x, taps, initial_state=state, output_final_state=True, reverse=reverse)
    assert y.shape == x.shape
    assert last.shape == state.shape


def test_the_loss_of_one_token():
    logits = torch.randn(7)
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(3))
    assert torch.equal(token_loss(logits, torch.tensor(3), backend="torch"), expected)
