"""The installed peers of our operations, in their own layouts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from work import Work

Tensors = dict[str, Tensor]


class Peer(NamedTuple):
    """Another implementation: of the same operation, then compared with ours, or of one for the same purpose."""

    name: str
    same: bool
    run: Callable[[Tensors, Mapping[str, Any]], Tensor]  # takes the result of `prepare` and the operation's options
    prepare: Callable[[Tensors], Tensors] = dict  # from our tensors to the peer's
    restore: Callable[[Tensor], Tensor] = lambda output: output  # to our layout
    modules: tuple[str, ...] = ()  # imported before a first call is timed, for peers that compile in it


def find_peers(work: Work, tensors: Iterable[str], device: torch.device) -> list[Peer]:
    """The peers of a call with tensors of these names.

    Peers that are not installed, or do not have the operation, are left out.
    """
    peers = []
    widest = max(work.sizes.get(name, 0) for name in "KV")
    if {"q", "k", "v"} <= set(tensors) and widest <= 256:
        peers.append(Peer("sdpa", False, _attend, _heads_first))
    if device.type == "cuda" and importlib.util.find_spec("fla") is not None:
        found = _FLA.get((work.op, work.variant))
        peers += [] if found is None else [Peer("fla", True, found, modules=("fla.ops",))]
    if device.type == "cuda" and importlib.util.find_spec("mamba_ssm") is not None and work.op.endswith("_scan"):
        same = work.op == "selective_scan"
        peers.append(Peer("mamba", same, _scan, _channels_first, lambda output: output.transpose(1, 2)))
    return peers


def _heads_first(tensors: Tensors) -> Tensors:
    return {name: tensors[name].transpose(1, 2).contiguous() for name in ("q", "k", "v")}


def _attend(tensors: Tensors, options: Mapping[str, Any]) -> Tensor:
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _channels_first(tensors: Tensors) -> Tensors:
    """Mamba's arguments, with Longhorn's sizes and other decays."""
    x = tensors["x"]
    if "delta" in tensors:
        rate, decay, key, query = (tensors[name] for name in ("delta", "A", "B", "C"))
    else:
        rate, key, query = (tensors[name] for name in ("beta", "k", "q"))
        decay = -torch.ones(x.shape[2], key.shape[2], device=x.device)
    moved = {name: t.transpose(1, 2).contiguous() for name, t in {"u": x, "delta": rate, "B": key, "C": query}.items()}
    return {**moved, "A": decay.float()}


def _scan(tensors: Tensors, options: Mapping[str, Any]) -> Tensor:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    return selective_scan_fn(**tensors)


def _fla_delta_rule(tensors: Tensors, options: Mapping[str, Any]) -> Tensor:
    from fla.ops.delta_rule import chunk_delta_rule

    return chunk_delta_rule(**tensors, scale=options["scale"])[0]


def _fla_gated_delta_rule(tensors: Tensors, options: Mapping[str, Any]) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(**tensors, scale=options["scale"])[0]


def _fla_kda(tensors: Tensors, options: Mapping[str, Any]) -> Tensor:
    from fla.ops.kda import chunk_kda

    return chunk_kda(**tensors, scale=options["scale"])[0]


def _fla_rwkv7(tensors: Tensors, options: Mapping[str, Any]) -> Tensor:
    from fla.ops.rwkv7 import chunk_rwkv7

    q, k, v, write_key, value_key, g = (tensors[name] for name in ("q", "k", "v", "write_key", "value_key", "g"))
    return chunk_rwkv7(r=q, w=g, k=value_key, v=v, a=-k, b=write_key, scale=options["scale"])[0]


def _fla_linear_attention(tensors: Tensors, options: Mapping[str, Any]) -> Tensor:
    from fla.ops.linear_attn import chunk_linear_attn

    return chunk_linear_attn(**tensors, scale=options["scale"], normalize=False)[0]


def _fla_simple_gla(tensors: Tensors, options: Mapping[str, Any]) -> Tensor:
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(**tensors, scale=options["scale"])[0]


def _fla_gla(tensors: Tensors, options: Mapping[str, Any]) -> Tensor:
    from fla.ops.gla import chunk_gla

    return chunk_gla(**tensors, scale=options["scale"])[0]


def _fla_gsa(tensors: Tensors, options: Mapping[str, Any]) -> Tensor:
    from fla.ops.gsa import chunk_gsa

    write = 1 - tensors["g"].float().exp()  # our operation derives this from g; in fla, the layer computes it
    return chunk_gsa(**tensors, s=write.to(tensors["g"].dtype), scale=options["scale"])[0]


_FLA: dict[tuple[str, str], Callable[[Tensors, Mapping[str, Any]], Tensor]] = {
    ("delta_rule", "plain"): _fla_delta_rule,
    ("delta_rule", "gated"): _fla_gated_delta_rule,
    ("delta_rule", "channel"): _fla_kda,
    ("delta_rule", "channel_added_before"): _fla_rwkv7,
    ("linear_attention", "plain"): _fla_linear_attention,
    ("linear_attention", "head_gated"): _fla_simple_gla,
    ("linear_attention", "channel_gated"): _fla_gla,
    ("linear_attention", "extreme_channel_decay"): _fla_gla,
    ("slot_attention", "plain"): _fla_gsa,
}
