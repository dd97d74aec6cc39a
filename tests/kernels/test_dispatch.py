"""Which backend runs, why others do not, and the messages for arguments that do not fit."""

import re
from functools import partial

import pytest
import torch
from cases import cases
from kernel_inputs import list_variants, make_inputs

from longseq.kernels import dispatch, explain, linear_attention, linear_attention_step, list_ops


@pytest.fixture
def scratch_op(monkeypatch):
    """An operation with a backend that wants an even K, and one that runs everything."""
    monkeypatch.setattr(dispatch, "_BACKENDS", {})
    monkeypatch.setattr(dispatch, "_KINDS", {})

    def even(call):
        return [f"K is {call.sizes['K']}, but must be even"] if call.sizes.get("K", 0) % 2 else []

    def no_gpu(call):
        return ["needs a GPU"] if call.device.type == "cpu" else []

    dispatch.register(
        "scratch",
        dispatch.Backend("picky", lambda: "picky", lambda call: no_gpu(call) + even(call)),
        dispatch.Backend("plain", lambda: "plain"),
    )
    return "scratch"


def call(device="cpu", **sizes):
    return dispatch.Call(torch.device(device), torch.float32, sizes=sizes)


def test_auto_takes_the_first_backend_without_reasons(scratch_op):
    assert dispatch.select(scratch_op, "auto", call("cuda", K=4))() == "picky"
    assert dispatch.select(scratch_op, "auto", call("cuda", K=5))() == "plain"


def test_a_named_backend_runs_or_is_refused_with_every_reason(scratch_op):
    assert dispatch.select(scratch_op, "plain", call("cuda", K=4))() == "plain"
    with pytest.raises(ValueError, match=r"'picky' of scratch cannot run: needs a GPU; K is 5, but must be even"):
        dispatch.select(scratch_op, "picky", call(K=5))


@pytest.mark.parametrize("op", list_ops())
def test_each_tensor_of_another_size_is_refused_by_name(op):
    for variant in list_variants(op):
        inputs = make_inputs(op, variant, tokens=4)
        for name, tensor in inputs.tensors.items():
            named = rf"^{op}: {re.escape(name)}"
            longer = torch.cat((tensor, tensor[:1]))
            with pytest.raises(ValueError, match=f"^{op}: "):
                inputs.replace({name: longer}).run()
            for other in (tensor[..., None, None], tensor.long()):
                with pytest.raises(ValueError, match=named):
                    inputs.replace({name: other}).run()


@pytest.mark.parametrize(("groups", "heads"), [(2, 3), (3, 2), (0, 2), (2, 0)])
def test_groups_that_do_not_divide_the_heads_are_refused(groups, heads):
    key, value = torch.zeros(1, 2, groups, 4), torch.zeros(1, 2, heads, 4)
    with pytest.raises(ValueError, match=f"q and k have {groups} heads, which do not divide the {heads} of v"):
        linear_attention(key, key, value)
    with pytest.raises(ValueError, match="do not divide"):
        linear_attention_step(key[:, 0], key[:, 0], value[:, 0], torch.zeros(1, heads, 4, 4))


@pytest.mark.parametrize("op", list_ops())
@cases("backend", ["torch", "reference"])
@cases("cu_seqlens", [[0.0, 4.0], [[0, 4]], [0], [1, 4], [0, 3], [0, 3, 1, 4]])
def test_wrong_segments_are_refused(op, backend, cu_seqlens):
    inputs = make_inputs(op, tokens=4, segments=max(len(cu_seqlens) - 1, 1))
    with pytest.raises(ValueError, match="cu_seqlens"):
        inputs.run(backend=backend, cu_seqlens=torch.tensor(cu_seqlens))


@pytest.mark.parametrize("op", list_ops())
def test_packed_input_has_one_row_and_one_state_per_segment(op):
    cu_seqlens = torch.tensor([0, 1, 4])
    with pytest.raises(ValueError, match=r"cu_seqlens needs a batch of 1, but .* has a batch of 2"):
        make_inputs(op, tokens=4).run(cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="must be 2 as in the segments of cu_seqlens"):
        make_inputs(op, tokens=4, segments=3).run(cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("bounds", [[0, 5, 3, 4], [0, 1, 2, 3], [1, 1, 2, 4]])
def test_a_switch_checks_segments_that_kernels_take_as_they_are(interpreted, monkeypatch, bounds):
    inputs = make_inputs("linear_attention", tokens=4, segments=3, dtype=torch.float32)
    run = partial(inputs.run, backend="triton", cu_seqlens=torch.tensor(bounds))
    monkeypatch.setenv("LONGSEQ_CHECK_CU_SEQLENS", "1")
    inputs.run(backend="triton", cu_seqlens=torch.tensor([0, 1, 1, 4]))
    with pytest.raises(ValueError, match="cu_seqlens"):
        run()


def test_triton_kernels_refuse_amd_gpus_which_torch_calls_cuda(monkeypatch):
    monkeypatch.setattr("longseq.kernels.devices.TRITON_IS_INSTALLED", True)
    names = [*list_ops(), *dispatch.list_ops("local"), *(f"{op}_step" for op in dispatch.list_stepped_ops())]
    names = [op for op in names if "triton" in explain(op)]
    assert len(names) > 20
    assert not any(explain(op, device="cuda")["triton"] for op in names)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    for op in names:
        assert explain(op, device="cuda")["triton"] == [
            "it runs on NVIDIA GPUs, and this torch is built for AMD's (use backend='torch')"
        ]
        assert not explain(op, device="cuda")["torch"]
