"""ONNX, for onnxruntime without torch or longseq: one file, beside it the weights if they are more than it can hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from longseq.tools.export.graph import arrange, capture
from longseq.tools.export.metadata import encode
from longseq.tools.export.spec import FileSpec

__all__ = ["check", "find_beside", "is_own", "open_file", "optimize", "takes_no_rows", "write"]

# A protobuf message ends at 2 GiB; the graph around the weights takes some of it. Weights of more bytes lie beside it.
LARGEST_WEIGHTS = 2**31 - 64 * 2**20
OPSETS = range(18, 26)  # onnx does not convert RMSNormalization, which most models have, to opset 26
_PRODUCER = "longseq"


def check(module: nn.Module, opset: int) -> None:
    """Raise an error for exports that cannot succeed, before the work begins."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f'format=onnx needs {", ".join(missing)}: pip install "longseq[export]", or take format=torchscript or pt2'
        )
    if opset not in OPSETS:
        raise ValueError(
            f"opset={opset}: the exporter writes opset {OPSETS[0]} to {OPSETS[-1]}; 20 suits most runtimes"
        )


def write(module: nn.Module, example: tuple[Any, ...], path: Path, spec: FileSpec) -> Counter[str]:
    """Write `module` to `path`, with named inputs, outputs and open axes, and the metadata as its properties.

    Weights above LARGEST_WEIGHTS go to the file PATH.data, which runtimes find beside it by that name. Returns how
    often the file uses each operator.
    """
    import onnx
    import onnx_ir

    axes = [dict(open_axes) for open_axes in spec.inputs.values()]
    program = torch.onnx.export(
        capture(module, example, axes),
        example,
        dynamo=True,
        dynamic_shapes=arrange(axes, example),
        input_names=list(spec.inputs),
        output_names=list(spec.outputs),
        opset_version=spec.opset,
        custom_translation_table={
            torch.ops.aten.scalar_tensor.default: _number,
            torch.ops.aten.group_norm.default: _group_norm,
            torch.ops.aten.repeat_interleave.self_int: _repeat_interleave,
        },
        optimize=False,
        verbose=False,
    )
    assert program is not None
    optimize(program)
    weights = program.model.graph.initializers.values()
    if sum(value.const_value.nbytes for value in weights if value.const_value is not None) > LARGEST_WEIGHTS:
        onnx_ir.save(program.model, path, external_data=_weights_of(path).name)
        model = onnx.load(str(path), load_external_data=False)
    else:
        model = program.model_proto
    _check_model(model, spec)
    _clean(model)
    _tie_rows(model, spec)
    onnx.helper.set_model_props(model, encode({**spec.metadata, "opset": spec.opset}))
    model.producer_name = _PRODUCER
    onnx.save(model, str(path))
    return Counter(node.op_type for node in _nodes(model.graph))


def _number(s: float, dtype: int = 1) -> Any:
    """A number of the code, such as 2 π, beside a tensor of the ONNX type `dtype`.

    The exporter's own form rounds it to float32 first, where the tensor is float64, too: the angles of Hyena's filters
    were the farther off, the longer the text.
    """
    import onnx_ir
    from onnxscript import opset18

    if isinstance(s, bool | int | float):
        return opset18.Constant(value=onnx_ir.tensor(s, dtype=onnx_ir.DataType(dtype)))
    return opset18.Cast(s, to=dtype)  # an open size


def _group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    """A norm of groups of channels, with their size as a number where nothing but the rows is open.

    The exporter's own form leaves that size to the runtime, which cannot find it where there are no rows.
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


def _repeat_interleave(input: Any, repeats: int, dim: int | None = None, output_size: int | None = None) -> Any:
    """Each slice of an axis, such as the heads of keys that several queries share, several times in turn.

    The exporter's own form leaves the size of that axis to the runtime, which cannot find it where there are no rows.
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


def is_own(path: Path) -> bool:
    """True for a file of `write`: an ONNX file begins with its version and the name of its producer."""
    with path.open("rb") as file:
        return _PRODUCER.encode() in file.read(32)


def find_beside(module: nn.Module, path: Path) -> list[Path]:
    """The files that `write` makes beside `path`."""
    count = sum(tensor.numel() for tensor in module.state_dict().values())
    return [_weights_of(path)] if 4 * count > LARGEST_WEIGHTS else []


def _weights_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def optimize(program: Any) -> None:
    """Run the exporter's optimizer, after passes that leave less for it to do.

    Its time grows with the square of the number of nodes. Most nodes are sizes that can be computed now, results that
    nothing reads any more, and copies. Without these, it takes a third of the time and finds the same graph.
    """
    from onnx_ir.passes.common import CommonSubexpressionEliminationPass
    from onnxscript import optimizer

    optimizer.inline(program.model)
    optimizer.fold_constants(program.model)
    optimizer.remove_unused_nodes(program.model)
    CommonSubexpressionEliminationPass()(program.model)
    program.optimize()


def _check_model(model: Any, spec: FileSpec) -> None:
    """Raise RuntimeError if the model is not as requested: the exporter fixes axes and opsets without an error."""
    for declared, (name, axes) in zip(model.graph.input, spec.inputs.items(), strict=True):
        if declared.name != name:
            raise RuntimeError(f"the file calls its input {name} {declared.name}")
        dimensions = declared.type.tensor_type.shape.dim
        for axis, open_axis in axes.items():
            if not dimensions[axis].dim_param:
                raise RuntimeError(f"the {open_axis} axis of {name} became the constant {dimensions[axis].dim_value}")
    versions = {entry.domain: entry.version for entry in model.opset_import}
    if versions.get("") != spec.opset:
        raise RuntimeError(f"the file has opset {versions.get('')}, not {spec.opset}")
    foreign = {node.domain for node in _nodes(model.graph)} - {"", "ai.onnx"}
    if foreign:
        raise RuntimeError(f"the file calls operators of {', '.join(sorted(foreign))}, which runtimes do not have")


def _clean(model: Any) -> None:
    """Remove constants that nothing reads (onnxruntime would warn about them), and the exporter's notes on origins.

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
    """Let the file refuse inputs of a batch with different numbers of rows: some operators would repeat a single row.

    A zero is added to each row of the first input. The zeros lie in a vector that is reshaped to the fewest and to the
    most rows of the others. (onnxruntime would remove a Reshape of the inputs themselves.)
    """
    from onnx import TensorProto, helper

    first, *others = [name for name, axes in spec.inputs.items() if axes.get(0) == "batch"] or [""]
    if not others:
        return
    names = ["rows.of_first", *(f"rows.of_{name}" for name in others)]
    nodes = [
        helper.make_node("Shape", [name], [rows], start=0, end=1)
        for name, rows in zip((first, *others), names, strict=True)
    ]
    zero = helper.make_tensor("rows.zero", TensorProto.INT64, [1], [0])
    nodes += [
        helper.make_node("Concat", names[1:], ["rows.of_all"], axis=0),
        helper.make_node("ReduceMin", ["rows.of_all"], ["rows.fewest"]),
        helper.make_node("ReduceMax", ["rows.of_all"], ["rows.most"]),
        helper.make_node("ConstantOfShape", [names[0]], ["rows.zeros"], value=zero),
    ]
    zeros = "rows.zeros"
    for number in ("rows.fewest", "rows.most"):
        tied = f"{number}.zeros"
        name = f"all_inputs_have_the_same_rows.{number}"  # which the runtime's error tells
        nodes.append(helper.make_node("Reshape", [zeros, number], [tied], name=name, allowzero=1))
        zeros = tied
    rank = next(len(each.type.tensor_type.shape.dim) for each in model.graph.input if each.name == first)
    if rank > 1:
        axes = helper.make_tensor("rows.axes", TensorProto.INT64, [rank - 1], list(range(1, rank)))
        model.graph.initializer.append(axes)
        nodes.append(helper.make_node("Unsqueeze", [zeros, axes.name], ["rows.column"]))
        zeros = "rows.column"
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


def takes_no_rows() -> bool:
    """Whether the runtime reads a batch of no rows: an older one ends the whole process."""
    from packaging.version import Version

    return Version(version("onnxruntime")) >= Version("1.24")


def open_file(path: Path) -> Callable[..., Any]:
    """The file as a function of tensors and lists of tensors, run by onnxruntime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [declared.name for declared in session.get_inputs()]

    def call(*arguments: Any) -> Any:
        values = [tensor.numpy() for tensor in tree_leaves(arguments)]
        first, *others = map(torch.from_numpy, session.run(None, dict(zip(names, values, strict=True))))
        return (first, others) if others else first

    return call
