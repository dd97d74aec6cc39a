"""Recurrences and short convolutions as single nodes of an ONNX file, in place of the graphs of their chunks.

onnxruntime has the operators LinearAttention and CausalConvWithState in a domain of its own, and opset 27 of ONNX has
the same two. Calls that they cannot express keep the standard form: decays of value channels, write keys other than
the read keys, value keys, reads before the decay. So do convolutions that begin without a state, where Conv is faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from longseq.kernels.linear_attention.reference import repeat_keys
from longseq.kernels.reading import Reverse, turn
from longseq.kernels.recurrence import Sequences, run_padded, run_recurrence

DOMAIN = "com.microsoft"
# The first version of onnxruntime that runs the operators, by choice.
FIRST_RUNTIME: Mapping[str, str] = MappingProxyType({"onnxruntime": "1.25.1", "opset27": "1.32.0"})
# torch writes opsets up to 25. Its operators are the same in 27: only Range changed, which now takes half precision.
LARGEST_OPSET = 25
RULES = {(False, False): "linear", (True, False): "gated", (False, True): "delta", (True, True): "gated_delta"}

# Computes an operation from its arguments by keyword.
Function = Callable[..., Any]


def finish(model: Any, choice: str) -> dict[str, Any]:
    """Give the operators of a model (a protobuf) their domain, and its opset. Returns facts for the metadata."""
    nodes = [node for node in model.graph.node if node.domain == DOMAIN]
    if choice == "opset27":
        for node in nodes:
            node.domain = ""
        del model.opset_import[:]
        model.opset_import.add(domain="", version=27)
    return {
        "operators": dict(Counter(node.op_type for node in nodes)),
        "operators_domain": DOMAIN if choice == "onnxruntime" else "ai.onnx",
        "onnxruntime": FIRST_RUNTIME[choice],
    }


def _attention(inputs: Sequences, state: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """A node LinearAttention from q, k [B, T, H, K], v [B, T, H, V], g [B, T, H] or [B, T, H, K], beta [B, T, H].

    Returns o [B, T, H, V] and the final state [B, H, K, V].
    """
    q, _, v, g, beta = inputs
    batch, tokens, heads, keys = q.shape
    values = v.shape[3]
    rule = RULES[g is not None, beta is not None]
    attributes = {"update_rule": rule, "scale": scale, "q_num_heads": heads, "kv_num_heads": heads}
    q, k, v, g, beta = (None if x is None else x.flatten(2) for x in inputs)
    shapes = (batch, tokens, heads * values), (batch, heads, keys, values)
    o, final = _node("LinearAttention", (q, k, v, state, g, beta), attributes, *shapes)
    return o.unflatten(2, (heads, values)), final


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None
) -> tuple[Tensor, Tensor]:
    """A node CausalConvWithState from x [B, T, D], weight [D, W], bias [D] and state [B, D, W - 1].

    Returns y [B, T, D] and the final state.
    """
    batch, tokens, channels = x.shape
    inputs, attributes = (x.mT, weight.unsqueeze(1), bias, state), {"activation": activation or "none"}
    shapes = (batch, channels, tokens), (batch, channels, weight.shape[1] - 1)
    y, final = _node("CausalConvWithState", inputs, attributes, *shapes)
    return y.mT, final


def _node(name: str, inputs: Any, attributes: dict[str, Any], *shapes: Any) -> Any:
    operator, dtypes = f"{DOMAIN}::{name}", [torch.float32] * len(shapes)
    return torch.onnx.ops.symbolic_multi_out(operator, inputs, attributes, dtypes=dtypes, shapes=shapes, version=1)


def _inputs(arguments: Mapping[str, Any]) -> list[Tensor | None] | None:
    """q, k, v, g and beta of a linear attention or a delta rule; None if LinearAttention cannot express it."""
    if any(arguments.get(name) is not None for name in ("g_value", "write_key", "value_key")):
        return None
    if arguments.get("read_before_decay") and arguments["g"] is not None:
        return None
    v = arguments["v"]
    return [*repeat_keys(arguments["q"], arguments["k"], v), v, arguments["g"], arguments.get("beta")]


def _attend(standard: Function, **arguments: Any) -> Any:
    inputs = _inputs(arguments)
    if inputs is None:
        return standard(**arguments)
    start, q, v = arguments["initial_state"], arguments["q"], arguments["v"]

    def core(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        turned = [None if x is None else _turn(x, arguments["reverse"]) for x in sequences]
        o, final = _attention(turned, None if start is None else state, arguments["scale"])
        return _turn(o, arguments["reverse"]), final

    return run_recurrence(
        core,
        inputs,
        start,
        (v.shape[2], q.shape[3], v.shape[3]),
        output_dtype=v.dtype,
        output_final_state=arguments["output_final_state"],
        cu_seqlens=None,
        unpack=run_padded,
    )


def _turn(x: Tensor, reverse: Reverse) -> Tensor:
    """`longseq.kernels.reading.turn`, of half of the rows as a single node, too."""
    if reverse != "second_half":
        return turn(x, reverse)
    # How many of a row's first tokens change their order: one does not.
    turned = torch.cat([torch.full((x.shape[0] // 2,), count) for count in (1, x.shape[1])])
    return torch.onnx.ops.symbolic(
        "ReverseSequence", (x, turned), {"batch_axis": 0, "time_axis": 1}, dtype=x.dtype, shape=x.shape
    )


def _attend_step(standard: Function, **arguments: Any) -> Any:
    inputs = _inputs(arguments)
    if inputs is None:
        return standard(**arguments)
    token = [None if x is None else x.unsqueeze(1) for x in inputs]
    o, state = _attention(token, arguments["state"], arguments["scale"])
    return o.squeeze(1), state


def _convolve(standard: Function, **arguments: Any) -> Any:
    if arguments["initial_state"] is None or arguments["mask"] is not None or arguments["reverse"]:
        return standard(**arguments)
    y, final = _convolution(*(arguments[name] for name in ("x", "weight", "bias", "initial_state", "activation")))
    return y, final if arguments["output_final_state"] else None


def _convolve_step(
    _: Function, x: Tensor, weight: Tensor, state: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    y, state = _convolution(x.unsqueeze(1), weight, bias, state, activation)
    return y.squeeze(1), state


def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """log(1 + exp x) in float64, so that a token's decay has the same bits in any company.

    onnxruntime computes logarithms of float32 four at a time, and rounds those of the last numbers differently.
    """
    from onnxscript import DOUBLE
    from onnxscript import opset18 as op

    assert beta == 1, "no mixer scales softplus"
    powers = op.Exp(op.Cast(x, to=DOUBLE.dtype))
    y = op.CastLike(op.Log(op.Add(powers, op.CastLike(1.0, powers))), x)
    return op.Where(op.Greater(x, op.CastLike(threshold, x)), x, y)


# For `longseq.kernels.dispatch.export_forms`.
FORMS: Mapping[str, Function] = MappingProxyType(
    {
        "linear_attention": _attend,
        "linear_attention_step": _attend_step,
        "delta_rule": _attend,
        "delta_rule_step": _attend_step,
        "short_convolution": _convolve,
        "short_convolution_step": _convolve_step,
    }
)
# For the exporter, in place of its own.
TRANSLATIONS: Mapping[Any, Function] = MappingProxyType({torch.ops.aten.softplus.default: _softplus})
