"""Layers compared with independent ones that have the same weights: those of transformers and of flash-linear-attention
(fla).

`pytest -m oracle`; the extra `oracle` installs both. fla's layers run on Triton, which a CPU does not have: here their
recurrences, norms and shifts are fla's own torch references; the others have none and are written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from fla_reference import Fla, heads_first, load
from torch import Tensor, nn
from torch.nn import functional
from transformers_reference import transformers_module

from longseq import mixers
from longseq.blocks.channel_mixing import ChannelMixing

pytestmark = pytest.mark.oracle

D_MODEL, TOKENS = 32, 23
Weights = dict[str, Tensor]


@dataclass
class Oracle:
    """A layer of ours and its peer.

    convert: from the peer's weights, or their gradients, to ours by name; what it leaves out is zero and not compared.
    run: from the peer and tokens `[B, T, D]` to its output.
    """

    ours: nn.Module
    peer: nn.Module
    convert: Callable[[Weights], Weights]
    run: Callable[[nn.Module, Tensor], Tensor]
    dtype: torch.dtype = torch.float32
    tolerance: float = 2e-6


ORACLES: dict[str, Callable[[pytest.MonkeyPatch], Oracle]] = {}


def oracle(make: Callable[[pytest.MonkeyPatch], Oracle]) -> Callable[[pytest.MonkeyPatch], Oracle]:
    ORACLES[make.__name__] = make
    return make


def transformers_layer(
    patch: pytest.MonkeyPatch, family: str, layer: str, *, double: bool = False, **options: Any
) -> tuple[ModuleType, Any, nn.Module]:
    """The module of a family of models, its configuration and one of its layers, which runs in torch alone."""
    name = "".join(part.capitalize() for part in family.split("_"))
    module = transformers_module(patch, family, double=double)
    config = getattr(load("transformers"), f"{name}Config")(hidden_size=D_MODEL, **options)
    return module, config, getattr(module, name + layer)(config, layer_idx=0)


def causal(window: int) -> Tensor:
    """The mask that is added to scores, `[1, 1, T, T]`: zero for a token and the `window` - 1 tokens before it."""
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    return torch.where((distance >= 0) & (distance < window), 0.0, -torch.inf)[None, None].double()


def attention_weights(p: Weights) -> Weights:
    converted = {"in_proj.weight": torch.cat([p[f"{part}_proj.weight"] for part in "qkv"])}
    converted["out_proj.weight"] = p["o_proj.weight"]
    if "q_proj.bias" in p:
        converted["in_proj.bias"] = torch.cat([p[f"{part}_proj.bias"] for part in "qkv"])
        converted["out_proj.bias"] = p["o_proj.bias"]
    return converted


def rotary_attention(monkeypatch: pytest.MonkeyPatch, family: str, window: int, **options: Any) -> Oracle:
    module, config, peer = transformers_layer(
        monkeypatch,
        family,
        "Attention",
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
        **options,
    )
    rotary = getattr(module, family.capitalize() + "RotaryEmbedding")(config)

    def run(peer: nn.Module, x: Tensor) -> Tensor:
        # In the type of the layer: transformers rounds its angles to float32 first.
        angles = torch.outer(torch.arange(TOKENS, dtype=x.dtype), config_frequencies(rotary)).repeat(1, 2)[None]
        return peer(x, position_embeddings=(angles.cos(), angles.sin()), attention_mask=causal(window))[0]

    chosen = {"num_heads": 4, "num_kv_heads": 2, "rotary": True}
    if family == "llama":
        ours = mixers.create("attention", D_MODEL, **chosen)
    else:
        ours = mixers.create("window_attention", D_MODEL, window=window, **chosen)
    return Oracle(ours, peer, attention_weights, run, dtype=torch.float64, tolerance=1e-12)


def config_frequencies(rotary: Any) -> Tensor:
    """The frequencies of a rotary embedding, checked against its own, in float64."""
    exact = 10000.0 ** (-torch.arange(len(rotary.inv_freq), dtype=torch.float64) / len(rotary.inv_freq))
    torch.testing.assert_close(rotary.inv_freq.double(), exact, rtol=1e-6, atol=0)
    return exact


@oracle
def llama(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    return rotary_attention(monkeypatch, "llama", TOKENS, attention_bias=True)


@oracle
def mistral(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    return rotary_attention(monkeypatch, "mistral", 7)


@oracle
def mamba(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    _, _, peer = transformers_layer(monkeypatch, "mamba", "Mixer", state_size=5, time_step_rank=3, num_hidden_layers=1)

    def convert(p: Weights) -> Weights:
        return {
            "in_proj.weight": p["in_proj.weight"],
            "convolution.weight": p["conv1d.weight"].squeeze(1),
            "convolution.bias": p["conv1d.bias"],
            "x_proj.weight": p["x_proj.weight"],
            "rate_proj.weight": p["dt_proj.weight"],
            "rate_bias": p["dt_proj.bias"],
            "A_log": p["A_log"],
            "D": p["D"],
            "out_proj.weight": p["out_proj.weight"],
        }

    ours = mixers.create("mamba", D_MODEL, state_size=5, rate_rank=3)
    return Oracle(ours, peer, convert, lambda peer, x: peer(x))


@oracle
def mamba2(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    _, _, peer = transformers_layer(
        monkeypatch, "mamba2", "Mixer", num_heads=4, head_dim=16, state_size=6, n_groups=2, expand=2,
        num_hidden_layers=1, chunk_size=8,
    )  # fmt: skip

    def convert(p: Weights) -> Weights:
        same = ("in_proj.weight", "A_log", "dt_bias", "D", "norm.weight", "out_proj.weight")
        return {
            **{name: p[name] for name in same},
            "convolution.weight": p["conv1d.weight"].squeeze(1),
            "convolution.bias": p["conv1d.bias"],
        }

    ours = mixers.create("mamba2", D_MODEL, head_dim=16, state_size=6, n_groups=2)
    return Oracle(ours, peer, convert, lambda peer, x: peer(x), tolerance=5e-6)


@oracle
def recurrent_gemma(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    _, _, peer = transformers_layer(
        monkeypatch, "recurrent_gemma", "RecurrentBlock", lru_width=48, num_attention_heads=4
    )
    for parameter in peer.rg_lru.parameters():
        nn.init.normal_(parameter, std=0.3)  # the layer alone leaves them as the memory is

    def convert(p: Weights) -> Weights:
        gates = [f"rg_lru.{gate}_gate" for gate in ("recurrent", "input")]
        return {
            "in_proj.weight": torch.cat([p["linear_x.weight"], p["linear_y.weight"]]),
            "in_proj.bias": torch.cat([p["linear_x.bias"], p["linear_y.bias"]]),
            "convolution.weight": p["conv_1d.weight"].squeeze(1),
            "convolution.bias": p["conv_1d.bias"],
            "decay": p["rg_lru.recurrent_param"],
            "gate_weight": torch.cat([p[f"{gate}_weight"] for gate in gates], -1),
            "gate_bias": torch.cat([p[f"{gate}_bias"] for gate in gates], -1),
            "out_proj.weight": p["linear_out.weight"],
            "out_proj.bias": p["linear_out.bias"],
        }

    def run(peer: nn.Module, x: Tensor) -> Tensor:
        # From position 1 on: at 0, the published code leaves out the root, as our docstring states.
        return peer(x, torch.arange(1, TOKENS + 1).expand(len(x), -1), None, use_cache=False)[0]

    ours = mixers.create("rg_lru", D_MODEL, width=48, num_heads=4)
    return Oracle(ours, peer, convert, run)


@oracle
def rwkv(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    """RWKV-4, whose keys are large here, so that its memory needs the exponent."""
    module = load("transformers.models.rwkv.modeling_rwkv")
    config = load("transformers").RwkvConfig(hidden_size=D_MODEL, num_hidden_layers=1, attention_hidden_size=D_MODEL)
    ours = mixers.create("rwkv4", D_MODEL)
    peer = module.RwkvSelfAttention(config)
    with torch.no_grad():
        peer.time_decay.copy_(ours.decay)
        peer.time_first.copy_(ours.bonus)
        peer.key.weight.mul_(20)
        for name in ("key", "value", "receptance"):
            getattr(peer, f"time_mix_{name}").fill_(0.5)

    def convert(p: Weights) -> Weights:
        parts = ("key", "value", "receptance")
        return {
            "mix": torch.cat([p[f"time_mix_{part}"].flatten(0, 1) for part in parts]),
            "decay": p["time_decay"],
            "bonus": p["time_first"],
            **{f"{part}.weight": p[f"{part}.weight"] for part in parts},
            "out_proj.weight": p["output.weight"],
        }

    return Oracle(ours, peer, convert, lambda peer, x: peer(x)[0])


def qwen_layer(monkeypatch: pytest.MonkeyPatch, value_heads: int) -> Oracle:
    """Gated DeltaNet, whose projections are sorted by heads of keys here."""
    _, _, peer = transformers_layer(
        monkeypatch, "qwen3_next", "GatedDeltaNet", double=True, linear_num_value_heads=value_heads,
        linear_num_key_heads=2, linear_key_head_dim=12, linear_value_head_dim=24, rms_norm_eps=1e-6,
        num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    values = 24 * value_heads // 2  # of a head of keys

    def convert(p: Weights) -> Weights:
        q, k, v, gate = p["in_proj_qkvz.weight"].unflatten(0, (2, -1)).split([12, 12, values, values], 1)
        beta, rate = p["in_proj_ba.weight"].unflatten(0, (2, 2, -1)).unbind(1)
        return {
            "in_proj.weight": torch.cat([x.flatten(0, 1) for x in (q, k, v, beta, rate, gate)]),
            "convolution.weight": p["conv1d.weight"].squeeze(1),
            **{name: p[name] for name in ("A_log", "dt_bias", "norm.weight", "out_proj.weight")},
        }

    ours = mixers.create("gated_deltanet", D_MODEL, num_heads=2, num_value_heads=value_heads, norm_eps=1e-6)
    return Oracle(ours, peer, convert, lambda peer, x: peer(x), dtype=torch.float64, tolerance=1e-12)


@oracle
def qwen3_next(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    return qwen_layer(monkeypatch, 2)


@oracle
def qwen3_next_with_more_values(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    return qwen_layer(monkeypatch, 4)


@oracle
def kimi_linear(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    _, _, peer = transformers_layer(
        monkeypatch, "kimi_linear", "DeltaAttention", double=True, linear_num_heads=2, linear_head_dim=24,
        rms_norm_eps=1e-5, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    for parameter in (peer.forget_gate.A_log, peer.forget_gate.dt_bias):
        nn.init.normal_(parameter)  # the layer alone leaves them as the memory is

    def convert(p: Weights) -> Weights:
        names = ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate.f_a_proj", "g_a_proj")
        return {
            **_projections(p, *names),
            "convolution.weight": p["conv1d.weight"].squeeze(1),
            "decay_proj.weight": p["forget_gate.f_b_proj.weight"],
            "gate_proj.weight": p["g_b_proj.weight"],
            "A_log": p["forget_gate.A_log"].flatten(),
            "dt_bias": p["forget_gate.dt_bias"].flatten(),
            "norm.weight": p["o_norm.weight"],
        }

    ours = mixers.create("kda", D_MODEL, num_heads=2, expand_k=1.5)
    return Oracle(ours, peer, convert, _run_fla, dtype=torch.float64, tolerance=1e-12)


def _run_fla(peer: nn.Module, x: Tensor) -> Tensor:
    y = peer(x)
    return y[0] if isinstance(y, tuple) else y


def _projections(p: Weights, *names: str) -> Weights:
    return {"in_proj.weight": torch.cat([p[f"{name}.weight"] for name in names]), "out_proj.weight": p["o_proj.weight"]}


def _taps(p: Weights) -> Tensor:
    return torch.cat([p[f"{part}_conv1d.weight"] for part in "qkv"]).squeeze(1)


@oracle
def fla_deltanet(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    fla = Fla(monkeypatch)
    fla.recur_deltanet()

    def convert(p: Weights) -> Weights:
        weights = _projections(p, "q_proj", "k_proj", "v_proj", "b_proj")
        return {**weights, "convolution.weight": _taps(p), "norm.weight": p["o_norm.weight"]}

    peer = fla.layer(D_MODEL, "delta_net", "DeltaNet", num_heads=2)
    return Oracle(mixers.create("deltanet", D_MODEL, num_heads=2), peer, convert, _run_fla)


@oracle
def fla_gated_deltanet(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    fla = Fla(monkeypatch)
    fla.recur_gated_deltanet()

    def convert(p: Weights) -> Weights:
        return {
            **_projections(p, "q_proj", "k_proj", "v_proj", "b_proj", "a_proj", "g_proj"),
            **{"convolution.weight": _taps(p), "norm.weight": p["o_norm.weight"]},
            **{name: p[name] for name in ("A_log", "dt_bias")},
        }

    peer = fla.layer(D_MODEL, "gated_deltanet", "GatedDeltaNet", num_heads=2, head_dim=12)
    return Oracle(mixers.create("gated_deltanet", D_MODEL, num_heads=2), peer, convert, _run_fla)


def _delta_family(p: Weights, *names: str, **own: str) -> Weights:
    """The weights of a layer of fla's delta family; `own` names those that ours calls otherwise."""
    return {
        **_projections(p, "q_proj", "k_proj", "v_proj", *names),
        **{"convolution.weight": _taps(p), "norm.weight": p["o_norm.weight"]},
        **{name: p[name] for name in ("A_log", "dt_bias")},
        **{name: p[theirs] for name, theirs in own.items()},
    }


LOW_RANK = {
    "decay_proj.weight": "f_proj.1.weight",
    "gate_proj.weight": "g_proj.1.weight",
    "gate_proj.bias": "g_proj.1.bias",
}


@oracle
def fla_kda(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    fla = Fla(monkeypatch)
    fla.recur_kda()
    peer = fla.layer(D_MODEL, "kda", "KimiDeltaAttention", num_heads=2, head_dim=16)
    ours = mixers.create("kda", D_MODEL, num_heads=2)
    return Oracle(ours, peer, lambda p: _delta_family(p, "b_proj", "f_proj.0", "g_proj.0", **LOW_RANK), _run_fla)


@oracle
def fla_gdn2(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    fla = Fla(monkeypatch)
    fla.recur_gdn2()
    names = ("b_proj", "w_proj", "f_proj.0", "g_proj.0")
    peer = fla.layer(D_MODEL, "gdn2", "GatedDeltaNet2", num_heads=2, head_dim=16)
    ours = mixers.create("gdn2", D_MODEL, num_heads=2)
    return Oracle(ours, peer, lambda p: _delta_family(p, *names, **LOW_RANK), _run_fla)


@oracle
def fla_comba(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    fla = Fla(monkeypatch)
    fla.recur_comba()
    peer = fla.layer(D_MODEL, "comba", "Comba", num_heads=2, head_dim=12)
    ours, names = mixers.create("comba", D_MODEL, num_heads=2), ("b_proj", "a_proj", "g_proj")
    return Oracle(ours, peer, lambda p: _delta_family(p, *names, decay="decay", D="D"), _run_fla)


@oracle
def fla_delta_product(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    fla = Fla(monkeypatch)
    fla.recur_delta_product()
    peer = fla.layer(D_MODEL, "gated_deltaproduct", "GatedDeltaProduct", num_heads=2, head_dim=12)
    ours = mixers.create("delta_product", D_MODEL, num_heads=2)
    return Oracle(ours, peer, lambda p: _delta_family(p, "b_proj", "a_proj", "g_proj"), _run_fla)


@oracle
def fla_mamba3(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    fla = Fla(monkeypatch)
    fla.recur_mamba3()
    peer = fla.layer(D_MODEL, "mamba3", "Mamba3", head_dim=16, state_size=12, n_groups=2)

    def convert(p: Weights) -> Weights:
        return {name: value.squeeze(1) if name in ("B_bias", "C_bias") else value for name, value in p.items()}

    def run(peer: Any, x: Tensor) -> Tensor:
        return peer.cuda_kernels_forward(x)[0]  # `forward` only adds a check for a GPU, caches and padding

    ours = mixers.create("mamba3", D_MODEL, head_dim=16, state_size=12, n_groups=2, rate="softplus")
    return Oracle(ours, peer, convert, run, dtype=torch.float64, tolerance=1e-12)


@oracle
def fla_gla(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    fla = Fla(monkeypatch)
    fla.recur_gla("gla")

    def convert(p: Weights) -> Weights:
        return {
            **_projections(p, "q_proj", "k_proj", "v_proj", "g_proj", "gk_proj.0"),
            "decay_proj.weight": p["gk_proj.1.weight"],
            "decay_proj.bias": p["gk_proj.1.bias"],
            "norm.weight": p["g_norm_swish_gate.weight"],
        }

    peer = fla.layer(D_MODEL, "gla", "GatedLinearAttention", num_heads=2)
    return Oracle(mixers.create("gla", D_MODEL, num_heads=2), peer, convert, _run_fla)


@oracle
def fla_hgrn2(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    fla = Fla(monkeypatch)
    fla.recur_gla("hgrn2")
    fla.norm_and_project("hgrn2")
    monkeypatch.setattr(load("fla.layers.hgrn2"), "swish", functional.silu)

    def convert(p: Weights) -> Weights:
        return {**_projections(p, "q_proj", "f_proj", "i_proj"), "norm.weight": p["g_norm.weight"]}

    peer = fla.layer(D_MODEL, "hgrn2", "HGRN2Attention", num_heads=2, expand_ratio=16)
    return Oracle(mixers.create("hgrn2", D_MODEL, num_heads=2), peer, convert, _run_fla)


def _slots(p: Weights) -> Weights:
    return {**_projections(p, "q_proj", "k_proj", "v_proj", "f_proj"), "norm.weight": p["g_norm.weight"]}


@oracle
def fla_gsa(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    fla = Fla(monkeypatch)
    fla.recur_gsa()
    peer = fla.layer(D_MODEL, "gsa", "GatedSlotAttention", num_heads=2, num_slots=6, feature_map="relu")
    ours = mixers.create("gsa", D_MODEL, num_heads=2, num_slots=6, feature_map="relu")
    return Oracle(ours, peer, _slots, _run_fla)


class AbcLayer(nn.Module):
    """ABC's recurrence in the layer of GSA: fla has it in another layer, with an output gate and rotary positions."""

    def __init__(self, heads: int, slots: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D_MODEL, D_MODEL, bias=False) for _ in range(4))
        self.f_proj = nn.Linear(D_MODEL, heads * slots, bias=False)
        self.g_norm = nn.RMSNorm(D_MODEL, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        projected = [functional.silu(layer(x)) for layer in (self.q_proj, self.k_proj, self.v_proj)]
        tensors = [part.unflatten(-1, (self.heads, -1)) for part in (*projected, self.f_proj(x))]
        reference = load("fla.ops.abc.naive").naive_recurrent_abc
        o, _ = heads_first(lambda *tensors: reference(*tensors, scale=1.0, output_final_state=True), *tensors)
        return self.o_proj(self.g_norm(functional.silu(o.flatten(-2))))


@oracle
def fla_abc(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    load("fla.ops.abc.naive")
    peer = AbcLayer(2, 6)
    return Oracle(mixers.create("abc", D_MODEL, num_heads=2, num_slots=6), peer, _slots, _run_fla)


@oracle
def fla_retnet(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    fla = Fla(monkeypatch)
    reference = load("fla.ops.retention.naive").naive_retention
    rotary = load("fla.modules.rotary.ops")

    def turn(m: Any, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        angle = torch.outer(torch.arange(TOKENS), m._compute_inv_freq())
        return tuple(rotary.rotary_embedding_ref(x, angle.cos(), angle.sin()) for x in tensors)

    monkeypatch.setattr(rotary.RotaryEmbedding, "forward", turn)
    kernels = ("fused_recurrent_retention", "chunk_retention")
    fla.recur_by(
        "multiscale_retention", kernels, lambda q, k, v: heads_first(lambda *x: (reference(*x), None), q, k, v)
    )

    def convert(p: Weights) -> Weights:
        weights = _projections(p, "q_proj", "k_proj", "v_proj", "g_proj")
        return {**weights, "norm.weight": p["g_norm_swish_gate.weight"]}

    peer = fla.layer(D_MODEL, "multiscale_retention", "MultiScaleRetention", num_heads=2)
    return Oracle(mixers.create("retnet", D_MODEL, num_heads=2), peer, convert, _run_fla)


@oracle
def fla_linear_attention(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    fla = Fla(monkeypatch)
    reference = load("fla.ops.linear_attn.naive").naive_recurrent_linear_attn
    kernels = ("fused_recurrent_linear_attn", "chunk_linear_attn")
    fla.recur_by("linear_attn", kernels, lambda **all: (reference(**all, normalize=True)[0], None))
    peer = fla.layer(D_MODEL,
        "linear_attn", "LinearAttention", num_heads=2, feature_map="elu", output_norm="identity",
        do_feature_map_norm=True,
    )  # fmt: skip
    ours = mixers.create("linear_attention", D_MODEL, num_heads=2)
    return Oracle(ours, peer, lambda p: _projections(p, "q_proj", "k_proj", "v_proj"), _run_fla)


@oracle
def fla_based(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    layer = load("fla.layers.based").BasedLinearAttention
    peer = layer(D_MODEL, feature_dim=5, num_key_value_heads=2, num_heads=2)
    ours = mixers.create("based", D_MODEL, feature_dim=5, num_heads=2)

    def convert(p: Weights) -> Weights:
        return _projections(p, "q_proj", "k_proj", "v_proj")

    return Oracle(ours, peer, convert, lambda peer, x: peer.forward_reference(x))


@oracle
def fla_rwkv6(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    fla = Fla(monkeypatch)
    reference = load("fla.ops.rwkv6.recurrent_naive").naive_recurrent_rwkv6
    monkeypatch.setattr(load("fla.layers.rwkv6"), "token_shift", load("fla.modules.token_shift").token_shift_ref)

    def recurrence(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return heads_first(lambda *tensors: reference(*tensors, u, scale=scale, output_final_state=True), r, k, v, w)

    fla.recur_by("rwkv6", ("fused_recurrent_rwkv6", "chunk_rwkv6"), recurrence)

    def convert(p: Weights) -> Weights:
        order = torch.tensor([1, 2, 3, 0, 4])  # r, w, k, v, g there; w, k, v, r, g here
        rank = p["x_proj.0.linear.weight"].unflatten(0, (5, -1))[order]
        return {
            "shift_base": p["x_proj.0.mu"],
            "shift_bases": p["x_bias"][order],
            "shift_down.weight": rank.flatten(0, 1),
            "shift_up": p["x_proj.2.weight"].view(D_MODEL, 5, -1).permute(1, 2, 0)[order],
            "decay_base": p["w_proj.linear.lora.2.bias"],
            "decay_down.weight": p["w_proj.linear.lora.0.weight"],
            "decay_up.weight": p["w_proj.linear.lora.2.weight"],
            **{
                f"{ours}.weight": p[f"{theirs}_proj.linear.weight"]
                for ours, theirs in (("key", "k"), ("value", "v"), ("receptance", "r"), ("gate", "g"))
            },
            "bonus": p["bonus"],
            "norm.weight": p["g_norm.weight"],
            "norm.bias": p["g_norm.bias"],
            "out_proj.weight": p["o_proj.weight"],
        }

    sizes = {"proj_low_rank_dim": 3, "gate_low_rank_dim": 4}
    with pytest.warns(UserWarning, match="RWKV"):
        peer: Any = fla.layer(D_MODEL, "rwkv6", "RWKV6Attention", num_heads=2, expand_k=1.0, norm_eps=64e-5, **sizes)
    peer.gate_fn = functional.silu
    ours = mixers.create("rwkv6", D_MODEL, num_heads=2, shift_rank=3, decay_rank=4)
    return Oracle(ours, peer, convert, _run_fla)


class TwoLayers(nn.Module):
    """RWKV-7's first layer, whose values enter the second, with a residual around each."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> tuple[Tensor]:
        if isinstance(self.first, mixers.Mixer):
            y, values = self.first(x)[0].split(D_MODEL, dim=-1)
            return (x + y + self.second(torch.cat((x + y, values), dim=-1))[0],)
        y, _, _, values = self.first(x)
        return (x + y + self.second(x + y, v_first=values)[0],)


@oracle
def fla_rwkv7(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    fla = Fla(monkeypatch)
    fla.recur_rwkv7()
    ranks = {"decay": 3, "rate": 4, "gate": 6, "value": 5}
    ours = [
        mixers.create("rwkv7", D_MODEL, num_heads=2, **{f"{name}_rank": ranks[name] for name in ranks})
        for _ in range(2)
    ]
    sizes = {
        f"{name}_low_rank_dim": ranks[own]
        for name, own in (("decay", "decay"), ("a", "rate"), ("gate", "gate"), ("v", "value"))
    }
    peers = []
    for index, mixer in enumerate(ours):
        mixer.place_in_model(index, 2)
        with pytest.warns(UserWarning, match="RWKV"):
            peers.append(
                load("fla.layers.rwkv7").RWKV7Attention(
                    hidden_size=D_MODEL, head_dim=D_MODEL // 2, norm_eps=64e-5 / (D_MODEL // 2), layer_idx=index,
                    num_hidden_layers=2, **sizes,
                )
            )  # fmt: skip

    def convert_layer(p: Weights) -> Weights:
        named = {
            "receptance.weight": "r_proj",
            "key.weight": "k_proj",
            "value.weight": "v_proj",
            "out_proj.weight": "o_proj",
        }
        low_rank = {"decay": "w", "rate": "a", "value": "v", "gate": "g"}
        weights = {
            "mix": torch.cat([p[f"x_{part}"] for part in "rwkvag"]).squeeze(1),
            **{"key_scale": p["k_k"], "key_rate": p["k_a"], "bonus": p["r_k"]},
            **{name: p[f"{theirs}.weight"] for name, theirs in named.items()},
            **{f"norm.{part}": p[f"g_norm.{part}"] for part in ("weight", "bias")},
        }
        for name, theirs in low_rank.items():
            if f"{theirs}_lora.lora.0.weight" in p:
                weights[f"{name}_down"] = p[f"{theirs}_lora.lora.0.weight"].T
                weights[f"{name}_up"] = p[f"{theirs}_lora.lora.2.weight"].T
            if f"{theirs}_lora.lora.2.bias" in p:
                weights[f"{name}_base"] = p[f"{theirs}_lora.lora.2.bias"]
        return weights

    def convert(p: Weights) -> Weights:
        converted = {}
        for layer in ("first.", "second."):
            own = convert_layer(
                {name.removeprefix(layer): value for name, value in p.items() if name.startswith(layer)}
            )
            converted |= {layer + name: value for name, value in own.items()}
        return converted

    return Oracle(TwoLayers(*ours), TwoLayers(*peers), convert, _run_fla, tolerance=5e-6)


@pytest.fixture(params=ORACLES)
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Oracle:
    """An oracle whose peer has random weights, also of norms and biases, and whose layer of ours has the same."""
    torch.manual_seed(0)
    made = ORACLES[request.param](monkeypatch)
    made.ours.to(made.dtype).eval()
    made.peer.to(made.dtype).eval()
    with torch.no_grad():
        for parameter in made.peer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    converted = made.convert(dict(made.peer.named_parameters()))
    wanted = made.ours.state_dict()
    assert converted.keys() <= wanted.keys()
    made.ours.load_state_dict({name: converted.get(name, torch.zeros_like(value)) for name, value in wanted.items()})
    return made


def tokens(dtype: torch.dtype) -> Tensor:
    return torch.randn(2, TOKENS, D_MODEL, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    assert actual.shape == expected.shape, name
    error = ((actual - expected).norm() / expected.norm()).item()
    assert math.isfinite(error), name
    assert error <= tolerance, f"{name}: {error:.1e} of the peer's"


def test_output_and_gradients_are_the_peers(pair: Oracle) -> None:
    x, its_x = (tokens(pair.dtype).requires_grad_() for _ in range(2))
    y, expected = pair.ours(x)[0], pair.run(pair.peer, its_x)
    assert_near(y, expected, pair.tolerance, "output")
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    assert x.grad is not None
    assert its_x.grad is not None
    assert_near(x.grad, its_x.grad, 5 * pair.tolerance, "gradient of x")
    gradients = {name: value.grad for name, value in pair.peer.named_parameters() if value.grad is not None}
    ours = dict(pair.ours.named_parameters())
    for name, gradient in pair.convert(gradients).items():
        own = ours[name].grad
        assert own is not None, name
        assert_near(own, gradient, 5 * pair.tolerance, f"gradient of {name}")


def test_the_channel_mixing_is_that_of_transformers() -> None:
    module = load("transformers.models.rwkv.modeling_rwkv")
    peer = module.RwkvFeedForward(load("transformers").RwkvConfig(hidden_size=D_MODEL, intermediate_size=48)).double()
    with torch.no_grad():
        peer.time_mix_key.uniform_()
        peer.time_mix_receptance.uniform_()
    ours = ChannelMixing(D_MODEL, 48).double()
    p = dict(peer.named_parameters())
    mix = torch.cat([p["time_mix_key"], p["time_mix_receptance"]]).squeeze(1)
    weights = {"fc1": p["key.weight"], "fc2": p["value.weight"], "receptance": p["receptance.weight"]}
    ours.load_state_dict({"mix": mix, **{f"{name}.weight": weight for name, weight in weights.items()}})
    x = torch.randn(2, TOKENS, D_MODEL, dtype=torch.float64, requires_grad=True)
    expected, y = peer(x)[0], ours(x)[0]
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), x) for out in (y, expected)))
    with torch.no_grad():
        memory = [torch.randn(2, D_MODEL, 1, dtype=torch.float64)]
        y, state = ours(x, memory[0].clone())
        torch.testing.assert_close(y, peer(x, state=memory)[0])  # it writes its last token into the state
    torch.testing.assert_close(state, memory[0])
