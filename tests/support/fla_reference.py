"""Layers of flash-linear-attention (fla) on a CPU, which its Triton kernels do not run on."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional


def load(module: str) -> Any:
    """A module of a peer; the test is skipped if the peer is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            # The suite has imported Triton in this mode (see tests/conftest.py), and fla creates kernels at its import.
            patch.setenv("TRITON_INTERPRET", "1")
        pytest.importorskip(module.partition(".")[0])
        return importlib.import_module(module)


class Wide:
    """torch whose float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def in_float64(patch: pytest.MonkeyPatch, module: Any) -> None:
    """Let a module that computes in float32 whatever its inputs are compute in float64."""
    patch.setattr(module, "torch", Wide())
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)


class Fla:
    """fla with torch references in place of its kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        norms = load("fla.modules.norm.layernorm")
        modules = load("fla.modules")

        def norm(m: Any, x: Tensor, residual: Tensor | None = None, prenorm: bool = False) -> Any:
            total = x if residual is None else x + residual
            y = norms.rms_norm_ref(total, m.weight, m.bias, eps=m.eps)
            return (y, total) if prenorm else y

        monkeypatch.setattr(modules.RMSNorm, "forward", norm)
        monkeypatch.setattr(
            modules.FusedRMSNormGated,
            "forward",
            lambda m, x, g: (
                norms.rms_norm_ref(x, m.weight, m.bias, eps=m.eps)
                * (g.sigmoid() if m.activation == "sigmoid" else functional.silu(g))
            ),
        )
        monkeypatch.setattr(
            modules.GroupNorm,
            "forward",
            lambda m, x: norms.group_norm_ref(x, m.weight, m.bias, num_groups=m.num_groups, eps=m.eps),
        )
        monkeypatch.setattr(modules.ShortConvolution, "forward", _convolve)

    def layer(self, width: int, module: str, name: str, **options: Any) -> nn.Module:
        return getattr(load(f"fla.layers.{module}"), name)(hidden_size=width, layer_idx=0, **options)

    def recur_by(self, module: str, names: tuple[str, ...], recurrence: Callable[..., tuple[Tensor, Any]]) -> None:
        """Replace a layer's kernels by a recurrence."""
        options = ("scale", "allow_neg_eigval")

        def run(**arguments: Any) -> tuple[Tensor, Any]:
            given = {name: value for name, value in arguments.items() if isinstance(value, Tensor) or name in options}
            return recurrence(**given)[0], None

        for name in names:
            self.patch.setattr(load(f"fla.layers.{module}"), name, run)

    def norm_and_project(self, module: str) -> None:
        """The fused norm and output projection of a layer."""
        norms = load("fla.modules.norm.layernorm")

        def run(x: Tensor, weight: Tensor, bias: Tensor, project: Tensor, offset: Tensor) -> Tensor:
            return functional.linear(norms.rms_norm_ref(x, weight, bias, eps=1e-5), project, offset)

        self.patch.setattr(load(f"fla.layers.{module}"), "rms_norm_linear", run)

    def recur_deltanet(self) -> None:
        reference = load("fla.ops.delta_rule.naive").delta_rule_recurrence

        def recurrence(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
            return heads_first(reference, _unit(q), _unit(k), v, beta)

        self.recur_by("delta_net", ("fused_recurrent_delta_rule", "chunk_delta_rule"), recurrence)

    def recur_gated_deltanet(self) -> None:
        reference = load("fla.ops.gated_delta_rule.naive").naive_recurrent_gated_delta_rule
        gate = load("fla.ops.gated_delta_rule.gate").naive_gdn_gate

        def recurrence(
            q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor,
            allow_neg_eigval: bool = False,
        ) -> tuple[Tensor, Tensor]:  # fmt: skip
            g = gate(g, A_log, dt_bias)
            q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
            beta = (2 if allow_neg_eigval else 1) * beta.sigmoid()
            return reference(_unit(q), _unit(k), v, beta, g, output_final_state=True)

        kernels = ("fused_recurrent_gated_delta_rule", "chunk_gated_delta_rule")
        self.recur_by("gated_deltanet", kernels, recurrence)
        layer = load("fla.layers.gated_deltanet").GatedDeltaNet
        self.patch.setattr(layer, "_use_fused_qkv_conv", lambda *_, **__: False)

    def recur_kda(self) -> None:
        reference = load("fla.ops.kda.naive").naive_recurrent_kda
        gate = load("fla.ops.kda.gate").naive_kda_gate

        def recurrence(
            q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor,
            allow_neg_eigval: bool = False,
        ) -> tuple[Tensor, Tensor]:  # fmt: skip
            beta = (2 if allow_neg_eigval else 1) * beta.sigmoid()
            return reference(_unit(q), _unit(k), v, gate(g, A_log, dt_bias), beta, output_final_state=True)

        self.recur_by("kda", ("fused_recurrent_kda", "chunk_kda"), recurrence)

    def recur_gdn2(self) -> None:
        reference = load("fla.ops.gdn2.naive").naive_recurrent_gdn2

        def recurrence(q: Tensor, k: Tensor, **others: Tensor) -> tuple[Tensor, Tensor]:
            return reference(_unit(q), _unit(k), **others, output_final_state=True)

        self.recur_by("gdn2", ("fused_recurrent_gdn2", "chunk_gdn2"), recurrence)

    def recur_comba(self) -> None:
        # The reference by token reads after the decay; the kernels and the reference in chunks read before it.
        reference = load("fla.ops.comba.naive").naive_chunk_comba

        def recurrence(q: Tensor, k: Tensor, p: Tensor, **others: Tensor) -> tuple[Tensor, Tensor]:
            return reference(_unit(q), _unit(k), p=_unit(p), **others, output_final_state=True)

        self.recur_by("comba", ("fused_recurrent_comba", "chunk_comba"), recurrence)

    def recur_delta_product(self) -> None:
        reference = load("fla.ops.gated_delta_product.naive").naive_recurrent_gated_delta_product

        def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, num_householder: int, **_: Any) -> Any:
            q, k = _unit(q), _unit(k)
            return reference(q, k, v, g, beta, q.shape[-1] ** -0.5, num_householder=num_householder)[0], None

        self.patch.setattr(load("fla.layers.gated_deltaproduct"), "chunk_gated_delta_product", run)

    def recur_rwkv7(self) -> None:
        """The recurrence and the small fused kernels of RWKV-7."""
        reference = load("fla.ops.generalized_delta_rule.dplr.naive").dplr_recurrence

        def run(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **_: Any) -> tuple[Tensor, None]:
            o, _ = heads_first(reference, r * r.shape[-1] ** 0.5, k, v, a, b, w)  # it scales the queries
            return o, None

        def correct(o: Tensor, r: Tensor, k: Tensor, weight: Tensor, v: Tensor, gate: Tensor) -> Tensor:
            return (o + ((r * k * weight).sum(-1, keepdim=True) * v).flatten(-2)) * gate

        layers = load("fla.layers.rwkv7")

        def shift(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
            return load("fla.modules.token_shift").token_shift_ref(x), None

        self.patch.setattr(load("fla.models.rwkv7.modeling_rwkv7"), "token_shift", shift)
        for name, function in {
            "chunk_rwkv7": run,
            "fused_mul_recurrent_rwkv7": lambda kk, a, **others: run(a=-kk, b=kk * a, **others),
            "token_shift": shift,
            "fused_addcmul_rwkv7": lambda x, delta, *amounts: [x + delta * amount for amount in amounts],
            "fused_k_rwkv7": lambda k, a, weight: k.addcmul(k * (a - 1), weight),
            "gate_output_correction": correct,
        }.items():
            self.patch.setattr(layers, name, function)

    def recur_mamba3(self) -> None:
        """Mamba-3 with a recurrence for the kernel of mamba_ssm; float64 stands for float32 in the layer."""

        layers, norms = load("fla.layers.mamba3"), load("fla.modules.norm.layernorm")
        self.patch.setattr(layers, "torch", Wide())
        self.patch.setattr(layers, "mamba3_siso_combined", _mamba3)
        norm = load("fla.modules.layernorm_gated").RMSNormGated
        self.patch.setattr(norm, "forward", lambda m, x: norms.rms_norm_ref(x, m.weight, m.bias, eps=m.eps))

    def recur_gla(self, module: str) -> None:
        reference = load("fla.ops.gla.naive").naive_recurrent_gla
        kernels = ("fused_recurrent_gla", "chunk_gla")
        self.recur_by(module, kernels, lambda **all: reference(**all, output_final_state=True))

    def recur_gsa(self) -> None:
        reference = load("fla.ops.gsa.naive").naive_recurrent_gsa
        kernels = ("fused_recurrent_gsa", "chunk_gsa")
        self.recur_by("gsa", kernels, lambda **all: reference(**all, output_final_state=True))
        self.norm_and_project("gsa")
        self.patch.setattr(load("fla.modules.feature_map"), "swish", functional.silu)


def _convolve(m: Any, x: Tensor, **options: Any) -> tuple[Tensor, None]:
    y = functional.conv1d(functional.pad(x.mT, (m.weight.shape[-1] - 1, 0)), m.weight, m.bias, groups=len(m.weight)).mT
    return (functional.silu(y) if m.activation else y), None


def _mamba3(
    Q: Tensor, K: Tensor, V: Tensor, ADT: Tensor, DT: Tensor, Trap: Tensor, Q_bias: Tensor, K_bias: Tensor,
    Angles: Tensor, D: Tensor, Z: Tensor, **_: Any,
) -> Tensor:  # fmt: skip
    """Mamba-3 with one input and one output, token by token: the arguments and the output of mamba_ssm's kernel.

    Q, K `[B, T, G, N]`, V, Z `[B, T, H, P]`; ADT, DT, Trap `[B, H, T]`; biases `[H, N]`; Angles `[B, T, H, S]`.
    """
    turns = (math.pi * Angles.tanh() * DT.mT.unsqueeze(-1)).cumsum(1)
    cos, sin, turned = turns.cos(), turns.sin(), 2 * turns.shape[-1]

    def turn(x: Tensor, bias: Tensor) -> Tensor:
        x = x.repeat_interleave(V.shape[2] // x.shape[2], 2) + bias
        even, odd = x[..., 0:turned:2], x[..., 1:turned:2]
        pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        return torch.cat((pairs, x[..., turned:]), -1)

    q, k = turn(Q, Q_bias), turn(K, K_bias)
    memory = before = torch.zeros_like(V[:, 0, :, :, None] * k[:, 0, :, None])
    outputs = []
    for t in range(V.shape[1]):
        decay, size, share = (x[:, :, t, None, None] for x in (ADT.exp(), DT, Trap.sigmoid()))
        write = V[:, t, :, :, None] * k[:, t, :, None]
        memory = decay * (memory + (1 - share) * size * before) + share * size * write
        before = write
        outputs.append((memory @ q[:, t, :, :, None]).squeeze(-1) + D[:, None] * V[:, t])
    return torch.stack(outputs, 1) * functional.silu(Z)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def heads_first(function: Callable[..., Any], *tensors: Tensor, **options: Any) -> tuple[Tensor, Any]:
    """Call a reference that wants `[B, H, T, D]`."""
    o, state = function(*(x.transpose(1, 2) for x in tensors), **options)
    return o.transpose(1, 2), state
