"""Every operation in torch.export and ONNX, at other sizes than the exported ones; tests of the tools trace mixers."""

import pytest
import torch
from kernel_inputs import assert_equal_up_to_rounding, list_variants, make_inputs, results
from torch.utils._pytree import tree_leaves

from longseq.kernels import list_ops
from longseq.tools.export import onnx_file

# the variants that lead to graphs of their own
GRAPHS = ("plain", "gated", "head_gated", "channel_gated", "value_gated", "write", "channel_added_before")
CASES = [(op, variant) for op in list_ops() for variant in list_variants(op) if variant in GRAPHS]
# Of a fixed length, the loop over chunks is unrolled.
FIXED = [("linear_attention", "channel_gated"), ("linear_attention", "value_gated")]
# The gated forms have all parts of the plain ones; gates of channels contain those of heads. Slot attention is linear
# attention with gates of value channels, then with gates of channels; vla is least squares and a delta rule, convolved
# features are a convolution.
IN_OTHERS = [
    ("delta_rule", "plain"),
    ("delta_rule", "gated"),
    ("linear_attention", "head_gated"),
    ("orthogonal_recurrence", "plain"),
    ("slot_attention", "plain"),
    ("slot_attention", "write"),
    ("convolved_features", "plain"),
    ("variational_linear_attention", "plain"),
]
# The graph of a chunk has parts for each of its halves: chunks are small where others here have the default size.
SMALL_CHUNKS = [*FIXED, ("delta_rule", "channel_added_before")]
SIZES = [(1, 1), (3, 64), (2, 70), (1, 129)]


class Call(torch.nn.Module):
    """An operation with all its tensors as one list: torch 2.9 cannot call programs that take `*tensors`."""

    def __init__(self, inputs, **options):
        super().__init__()
        self.inputs, self.options = inputs, options

    def forward(self, tensors):
        return self.inputs.replace(dict(zip(self.inputs.arguments, tensors, strict=True))).run(**self.options)


def draw(op, variant, batch, tokens):
    inputs = make_inputs(op, variant, batch=batch, tokens=tokens, dtype=torch.float32)
    return inputs, list(inputs.arguments.values())


def dynamic_axes(inputs, names, over_time):
    sequence = {0: names[0], 1: names[1]} if over_time else {0: names[0]}
    states = inputs.arguments.keys() - inputs.sequences.keys() - inputs.parameters.keys()
    return [*(sequence for _ in inputs.sequences), *({} for _ in inputs.parameters), *({0: names[0]} for _ in states)]


def check(run, op, variant, sizes):
    for batch, tokens in sizes:
        inputs, tensors = draw(op, variant, batch, tokens)
        expected = results(*inputs.run())
        for actual, (name, value) in zip(tree_leaves(run(tensors)), expected.items(), strict=True):
            assert_equal_up_to_rounding(torch.as_tensor(actual), value, f"{name} at B={batch}, T={tokens}")


@pytest.mark.slow
@pytest.mark.parametrize(("op", "variant"), [case for case in CASES if case not in IN_OTHERS])
def test_torch_export_and_the_onnx_file_made_of_it(op, variant):
    over_time = (op, variant) not in FIXED
    tokens = 70 if over_time else 5  # three small chunks, the last not full
    inputs, tensors = draw(op, variant, 2, tokens)
    axes = dynamic_axes(inputs, (torch.export.Dim.DYNAMIC,) * 2, over_time)
    call = Call(inputs, chunk_size=2) if (op, variant) in SMALL_CHUNKS else Call(inputs)
    with torch.no_grad():
        program = torch.export.export(call, (tensors,), dynamic_shapes=(axes,))
    operators = [node.target for node in program.graph.nodes if node.op == "call_function"]
    foreign = [target for target in operators if getattr(target, "namespace", "aten") not in ("aten", "higher_order")]
    assert not foreign
    module = program.module()
    sizes = SIZES if over_time else [(1, tokens), (5, tokens)]
    check(module, op, variant, sizes)

    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    converted = torch.onnx.export(program, (tensors,), dynamo=True, optimize=False, verbose=False)
    assert converted is not None
    onnx_file.optimize(converted)
    assert {node.domain for node in converted.model.graph.all_nodes()} <= {""}
    for declared, wanted in zip(converted.model.graph.inputs, axes, strict=True):
        assert declared.shape is not None
        assert all(not isinstance(declared.shape[axis], int) for axis in wanted), f"{declared.name} became fixed"
    session = onnxruntime.InferenceSession(converted.model_proto.SerializeToString())
    names = [declared.name for declared in session.get_inputs()]

    def run(x):
        return session.run(None, {name: tensor.numpy() for name, tensor in zip(names, x, strict=True)})

    check(run, op, variant, sizes)
