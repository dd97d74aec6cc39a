"""`delta_rule` compared with the torch forms of transformers and of flash-linear-attention (fla), in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fla_reference import in_float64, load
from torch import Tensor
from torch.nn import functional
from transformers_reference import transformers_module

from longseq.kernels import delta_rule

pytestmark = pytest.mark.oracle

BATCH, TOKENS, HEADS, KEYS, VALUES, STEPS = 2, 24, 2, 6, 5, 3
Inputs = dict[str, Tensor]


def in_micro_steps(x: Inputs) -> Inputs:
    """Gated DeltaProduct: a token decays the memory before its first step and reads it after its last one."""

    def pad(part: Tensor, place: int) -> Tensor:
        wide = part.new_zeros(BATCH, TOKENS, STEPS, *part.shape[2:])
        wide[:, :, place] = part
        return wide.flatten(1, 2)

    return {"q": pad(x["q"], STEPS - 1), "k": x["k"], "v": x["v"], "beta": x["beta"], "g": pad(x["g"], 0)}


# Our arguments for theirs, by the rule.
RULES: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "same": lambda x: x,
    "gdn2": lambda x: {
        "q": x["q"], "k": x["b"] * x["k"], "v": x["w"] * x["v"], "write_key": x["k"], "g": x["g"]
    },
    "comba": lambda x: {
        "q": x["q"], "k": x["p"], "v": x["v"], "beta": x["beta"], "write_key": x["k"], "g": x["g"],
        "read_before_decay": True,
    },
    "dplr": lambda x: {
        "q": x["q"], "k": -x["alpha"], "v": x["v"], "write_key": x["p"], "value_key": x["k"], "g": x["g"],
        "read_before_decay": True,
    },
    "product": in_micro_steps,
}  # fmt: skip
QWEN = "transformers.models.qwen3_next.modeling_qwen3_next.torch_{}_gated_delta_rule"
KIMI = "transformers.models.kimi_linear.modeling_kimi_linear.{}_kimi_delta_attention"
CHUNKS = {"chunk_size": 8}
# The rule, the function, its first arguments in order (G is a decay of each key channel) and its options.
PEERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "qwen3_next by tokens": ("same", QWEN.format("recurrent"), "q k v g beta", {}),
    "qwen3_next in chunks": ("same", QWEN.format("chunk"), "q k v g beta", CHUNKS),
    "kimi_linear by tokens": ("same", KIMI.format("recurrent"), "q k v G beta", {}),
    "kimi_linear in chunks": ("same", KIMI.format("chunk"), "q k v G beta", CHUNKS),
    "delta rule by tokens": ("same", "fla.ops.delta_rule.naive.delta_rule_recurrence", "q k v beta", {}),
    "gated by tokens": (
        "same", "fla.ops.gated_delta_rule.naive.naive_recurrent_gated_delta_rule", "q k v beta g", {}
    ),
    "gated in chunks": ("same", "fla.ops.gated_delta_rule.naive.naive_chunk_gated_delta_rule", "q k v g beta", CHUNKS),
    "kda by tokens": ("same", "fla.ops.kda.naive.naive_recurrent_kda", "q k v G beta", {}),
    "kda in chunks": ("same", "fla.ops.kda.naive.naive_chunk_kda", "q k v G beta", CHUNKS),
    "gdn2 by tokens": ("gdn2", "fla.ops.gdn2.naive.naive_recurrent_gdn2", "q k v G b w", {}),
    "gdn2 in chunks": ("gdn2", "fla.ops.gdn2.naive.naive_chunk_gdn2", "q k v G b w", CHUNKS),
    "comba in chunks": ("comba", "fla.ops.comba.naive.naive_chunk_comba", "q k v p g beta", CHUNKS),
    "dplr by tokens": ("dplr", "fla.ops.generalized_delta_rule.dplr.naive.dplr_recurrence", "q k v alpha p G", {}),
    "dplr in chunks": (
        "dplr", "fla.ops.generalized_delta_rule.dplr.naive.dplr_chunkwise", "q k v alpha p G", CHUNKS
    ),
    "product by tokens": (
        "product", "fla.ops.gated_delta_product.naive.naive_recurrent_gated_delta_product", "q k v g beta",
        {"scale": KEYS**-0.5, "num_householder": STEPS},
    ),
}  # fmt: skip
HEADS_FIRST = ("delta rule by tokens", "dplr by tokens", "dplr in chunks")


@pytest.fixture(autouse=True)
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def draw(names: list[str], steps: int) -> Inputs:
    """Random inputs: unit keys, and decays and strengths between 0 and 1."""
    torch.manual_seed(0)
    found = {}
    for name in names:
        shape = (BATCH, TOKENS * (steps if name in ("k", "v", "beta") else 1), HEADS)
        if name in ("q", "k", "p", "alpha"):
            found[name] = functional.normalize(torch.randn(*shape, KEYS), dim=-1)
        elif name in ("beta", "g"):
            found[name] = torch.rand(shape)
        else:
            found[name] = torch.rand(*shape, KEYS if name in ("G", "b") else VALUES)
        found[name] = -found[name] if name in ("g", "G", "alpha") else found[name]
    return {name: x.requires_grad_() for name, x in found.items()}


@pytest.mark.parametrize("name", PEERS)
def test_outputs_states_and_gradients_are_the_peers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, path, order, options = PEERS[name]
    module, _, function = path.rpartition(".")
    if module.startswith("transformers"):
        peer = getattr(transformers_module(monkeypatch, module.split(".")[2], double=True), function)
    else:
        peer = getattr(load(module), function)
        in_float64(monkeypatch, load(module))
    inputs = draw(order.split(), STEPS if rule == "product" else 1)
    memory = torch.randn(BATCH, HEADS, KEYS, VALUES, requires_grad=True)
    first = name in HEADS_FIRST
    theirs = [x.transpose(1, 2) if first else x for x in inputs.values()]
    expected, last = peer(*theirs, initial_state=memory, output_final_state=True, **options)
    call = RULES[rule]({key.replace("G", "g"): x for key, x in inputs.items()})
    o, state = delta_rule(**call, scale=KEYS**-0.5, initial_state=memory, output_final_state=True, backend="reference")
    o = o[:, STEPS - 1 :: STEPS] if rule == "product" else o
    expected = expected.transpose(1, 2) if first else expected
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(o), torch.randn_like(memory)
    ours, its = (
        torch.autograd.grad((a * weights[0]).sum() + (b * weights[1]).sum(), [*inputs.values(), memory])
        for a, b in ((o, state), (expected, last))
    )
    for key, gradient, other in zip([*inputs, "the first state"], ours, its, strict=True):
        torch.testing.assert_close(
            gradient, other, rtol=1e-11, atol=1e-11, msg=lambda words, key=key: f"{key}: {words}"
        )
