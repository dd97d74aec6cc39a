"""ONNX, for onnxruntime without torch or longseq: one file, with large weights in a second one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from longseq.kernels.dispatch import export_forms
from longseq.tools.export import operators
from longseq.tools.export.graph import arrange, capture
from longseq.tools.export.metadata import encode
from longseq.tools.export.spec import FileSpec

# Bytes of weights in the file: a protobuf message has at most 2 GiB, with the graph.
LARGEST_WEIGHTS = 2**31 - 64 * 2**20
# Rules of onnxscript.rewriter.rules.common that find something in our graphs.
RULES = (
    "collapse_slice", "collapse_slice2", "materialize_reshape_shape", "no_op_cast", "no_op_expand", "no_op_transpose",
    "reshape_reshape", "squeeze_reshape_1d", "transpose_transpose", "unsqueeze_unsqueeze",
)  # fmt: skip


def write(module: nn.Module, example: tuple[Any, ...], path: Path, spec: FileSpec) -> dict[str, Any]:
    """Write `module` to `path`, with named inputs, outputs and open axes, and the metadata as its properties.

    Returns what the file's metadata have beyond those of `spec`: the opset, and the operators with their runtime.
    Weights above LARGEST_WEIGHTS go to the file PATH.data, which runtimes find in the same folder.
    """
    import onnx
    import onnx_ir

    axes = [dict(open_axes) for open_axes in spec.inputs.values()]
    opset = 27 if spec.operators == "opset27" else spec.opset
    forms, translations = ({}, {}) if spec.operators == "standard" else (operators.FORMS, operators.TRANSLATIONS)
    with export_forms(forms):
        captured = capture(module, example, axes)
    program = torch.onnx.export(
        captured,
        example,
        dynamo=True,
        dynamic_shapes=arrange(axes, example),
        input_names=list(spec.inputs),
        output_names=list(spec.outputs),
        opset_version=min(opset, operators.LARGEST_OPSET),
        custom_translation_table={
            torch.ops.aten.scalar_tensor.default: _number,
            torch.ops.aten.softplus.default: _softplus,
            torch.ops.aten.group_norm.default: _group_norm,
            torch.ops.aten.scaled_dot_product_attention.default: _softmax_attention,
            torch.ops.aten.repeat_interleave.self_int: _repeat_interleave,
            **translations,
        },
        optimize=False,
        verbose=False,
    )
    assert program is not None
    optimize(program)
    weights = program.model.graph.initializers.values()
    if sum(value.const_value.nbytes for value in weights if value.const_value is not None) > LARGEST_WEIGHTS:
        onnx_ir.save(program.model, path, external_data=f"{path.name}.data")
        model = onnx.load(str(path), load_external_data=False)
    else:
        model = program.model_proto
    clean(model)
    _tie_rows(model, spec)
    facts: dict[str, Any] = {"opset": opset}
    if spec.operators != "standard":
        facts |= operators.finish(model, spec.operators)
    onnx.helper.set_model_props(model, encode({**spec.metadata, **facts}))
    model.producer_name = "longseq"
    onnx.save(model, str(path))
    return facts


def _number(s: float, dtype: int = 1) -> Any:
    """A number in the code, such as 2 π, used with a tensor of the ONNX type `dtype`.

    The exporter rounds it to float32 first, even if the tensor is float64: the angles of Hyena's filters would be the
    farther off, the longer the text.
    """
    import onnx_ir
    from onnxscript import opset18

    if isinstance(s, bool | int | float):
        return opset18.Constant(value=onnx_ir.tensor(s, dtype=onnx_ir.DataType(dtype)))
    return opset18.Cast(s, to=dtype)  # an open size


def _softplus(self: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """Softplus by operators that onnxruntime computes in vectors, which its own Softplus is not: a sixth of the time.

    log(1 + y) is log(u) + (y - (u - 1)) / u with the rounded sum u = 1 + y, also for a y that rounding loses.
    """
    from onnxscript import opset18 as op

    x = self if beta == 1 else op.Mul(self, op.CastLike(beta, self))
    one, y = op.CastLike(1.0, x), op.Exp(op.Neg(op.Abs(x)))
    u = op.Add(one, y)
    z = op.Add(op.Relu(x), op.Add(op.Log(u), op.Div(op.Sub(y, op.Sub(u, one)), u)))
    return z if beta == 1 else op.Div(z, op.CastLike(beta, z))


def _group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    """A norm of groups of channels, with their size as a number where only the batch is open.

    The exporter leaves that size to the runtime, which cannot compute it for an empty batch.
    """
    from onnxscript import opset18 as op

    channels, *others = input.shape[1:]
    is_known = all(isinstance(size, int) for size in others)
    size = math.prod((channels, *others)) // num_groups if is_known else -1
    groups = op.Reshape(input, op.Constant(value_ints=[0, num_groups, size]))
    one, zero = (op.CastLike(op.Constant(value_floats=[number] * num_groups), input) for number in (1.0, 0.0))
    y = op.Reshape(op.InstanceNormalization(groups, one, zero, epsilon=eps), op.Shape(input))
    shape = op.Constant(value_ints=[channels, *(1 for _ in others)])
    y = y if weight is None else op.Mul(y, op.Reshape(weight, shape))
    return y if bias is None else op.Add(y, op.Reshape(bias, shape))


def _softmax_attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *arguments: Any, **options: Any) -> Any:
    """Softmax attention without the exporter's test of all weights for NaN, which its finite masks cannot give."""
    import onnx_ir
    from onnxscript import opset18 as op
    from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention as standard

    if attn_mask is not None and attn_mask.dtype == onnx_ir.DataType.BOOL:
        unseen = op.Constant(value=onnx_ir.tensor(query.dtype.min, dtype=query.dtype))
        attn_mask = op.Where(attn_mask, op.CastLike(0.0, query), unseen)
    return standard(query, key, value, attn_mask, *arguments, **options)


def _repeat_interleave(input: Any, repeats: int, dim: int | None = None, output_size: int | None = None) -> Any:
    """Each slice of an axis, such as the heads of keys that several queries share, several times in turn.

    The exporter leaves the size of that axis to the runtime, which cannot compute it for an empty batch.
    """
    from onnxscript import opset18 as op

    assert dim is not None, "no mixer repeats all numbers"
    assert isinstance(repeats, int), "no mixer repeats an open number of times"
    rank, axis = len(input.shape), dim % len(input.shape)
    size = input.shape[axis] * repeats if isinstance(input.shape[axis], int) else -1
    times = [repeats if place == axis + 1 else 1 for place in range(rank + 1)]
    repeated = op.Expand(op.Unsqueeze(input, op.Constant(value_ints=[axis + 1])), op.Constant(value_ints=times))
    sizes = [op.Shape(input, start=0, end=axis), op.Constant(value_ints=[size]), op.Shape(input, start=axis + 1)]
    return op.Reshape(repeated, op.Concat(*sizes, axis=0))


def optimize(program: Any) -> None:
    """The passes of the exporter's optimizer, with a few of its rules.

    One of the others compares all pairs of nodes: of 12 blocks it takes half of the export's time. Most nodes are sizes
    that can be computed now, results that nothing reads any more, and copies, which go first.
    """
    from onnx_ir.passes import common as passes
    from onnxscript import optimizer, rewriter
    from onnxscript.rewriter.rules import common as rules

    model = program.model
    optimizer.inline(model)
    optimizer.fold_constants(model)
    optimizer.remove_unused_nodes(model)
    passes.CommonSubexpressionEliminationPass()(model)
    chosen = [*rules.mul_by_1_rule.commute(), *(getattr(rules, f"{name}_rule") for name in RULES)]
    for _ in range(2):
        optimizer.fold_constants(model, onnx_shape_inference=True)
        rewriter.rewrite(model, chosen)
    for each in (
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    ):
        each(model)


def clean(model: Any) -> None:
    """Remove unused constants (onnxruntime would warn about them), and the exporter's notes on origins.

    Those notes are half of a small file, with source lines and paths of this machine.
    """
    used = {name for node in _nodes(model.graph) for name in node.input}
    used.update(output.name for output in model.graph.output)
    for graph in _graphs(model.graph):
        kept = [initializer for initializer in graph.initializer if initializer.name in used]
        del graph.initializer[:]
        graph.initializer.extend(kept)
        for item in (graph, *graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output):
            item.ClearField("metadata_props")


def _tie_rows(model: Any, spec: FileSpec) -> None:
    """Make the file fail for inputs with different batch sizes: some operators would repeat a single row.

    A zero is added to each row of the first input. The zeros lie in a vector that is reshaped to the smallest and to
    the largest batch size of the other inputs. (onnxruntime would remove a Reshape of the inputs themselves.)
    """
    from onnx import TensorProto, helper

    first, *others = [name for name, axes in spec.inputs.items() if axes.get(0) == "batch"] or [""]
    if not others:
        return
    sizes = [f"rows.of_{name}" for name in (first, *others)]
    nodes = [
        helper.make_node("Shape", [name], [size], start=0, end=1)
        for name, size in zip((first, *others), sizes, strict=True)
    ]
    zero = helper.make_tensor("rows.zero", TensorProto.INT64, [1], [0])
    nodes += [
        helper.make_node("Concat", sizes[1:], ["rows.all"], axis=0),
        helper.make_node("ReduceMin", ["rows.all"], ["rows.fewest"]),
        helper.make_node("ReduceMax", ["rows.all"], ["rows.most"]),
        helper.make_node("ConstantOfShape", [sizes[0]], ["rows.zeros"], value=zero),
        helper.make_node("Reshape", ["rows.zeros", "rows.fewest"], ["rows.checked"], allowzero=1),
        helper.make_node("Reshape", ["rows.checked", "rows.most"], ["rows.column"], allowzero=1),
    ]
    zeros = "rows.column"
    rank = next(len(each.type.tensor_type.shape.dim) for each in model.graph.input if each.name == first)
    if rank > 1:
        axes = helper.make_tensor("rows.axes", TensorProto.INT64, [rank - 1], list(range(1, rank)))
        model.graph.initializer.append(axes)
        nodes.append(helper.make_node("Unsqueeze", [zeros, axes.name], ["rows.wide"]))
        zeros = "rows.wide"
    for node in _nodes(model.graph):
        for place, name in enumerate(node.input):
            node.input[place] = "rows.tied" if name == first else name
    nodes.append(helper.make_node("Add", [first, zeros], ["rows.tied"]))
    for place, node in enumerate(nodes):
        model.graph.node.insert(place, node)


def _graphs(graph: Any) -> list[Any]:
    """The graph and its subgraphs (the bodies of Scan and If)."""
    inner = [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return [graph, *(found for body in inner for found in _graphs(body))]


def _nodes(graph: Any) -> list[Any]:
    return [node for found in _graphs(graph) for node in found.node]


def open_file(path: Path) -> Callable[..., Any]:
    """The file as a function of tensors and lists of tensors, run by onnxruntime on the CPU with torch's threads."""
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise ImportError("ONNX files need onnxruntime: pip install onnxruntime") from error

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [declared.name for declared in session.get_inputs()]

    def call(*arguments: Any) -> Any:
        values = [tensor.numpy() for tensor in tree_leaves(arguments)]
        first, *others = map(torch.from_numpy, session.run(None, dict(zip(names, values, strict=True))))
        return (first, others) if others else first

    return call
