"""Layers equal their formulas, written here one token at a time, with the parameters by name only."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq import mixers

D_MODEL, TOKENS = 8, 21  # after 20 tokens VLA refreshes its inverse
Weights = dict[str, Tensor]
Options = dict[str, Any]

# compared with a loop over tokens in files of their own
ELSEWHERE = {"attention", "based", "hyena", "window_attention"}

MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "relu": lambda x: x.clamp_min(0),
    "relu_squared": lambda x: x.clamp_min(0) ** 2,
    "elu_plus_one": lambda x: torch.where(x > 0, x + 1, x.exp()),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "softplus": lambda x: (1 + x.exp()).log(),
    "softmax": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
    "identity": lambda x: x,
}
silu, elu_plus_one, sigmoid, softplus = (MAPS[name] for name in ("silu", "elu_plus_one", "sigmoid", "softplus"))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def project(p: Weights, layer: str, x: Tensor) -> Tensor:
    return x @ p[f"{layer}.weight"].T


def cut(x: Tensor, *widths: int) -> list[Tensor]:
    return list(x.split(widths, dim=-1))


def heads(number: int, *parts: Tensor) -> list[Tensor]:
    return [part.unflatten(-1, (number, -1)) for part in parts]


def convolve(x: Tensor, taps: Tensor, bias: Tensor | None = None) -> Tensor:
    """The last tap is that of the token itself."""
    y = torch.zeros_like(x) if bias is None else bias.repeat(len(x), 1)
    for t in range(len(x)):
        for back in range(min(taps.shape[1], t + 1)):
            y[t] += taps[:, -1 - back] * x[t - back]
    return y


def normed(p: Weights, x: Tensor, o: Options) -> Tensor:
    return x / ((x**2).mean(-1, keepdim=True) + o.get("norm_eps", 1e-5)).sqrt() * p["norm.weight"]


def outer(k: Tensor, v: Tensor) -> Tensor:
    return k.unsqueeze(-1) * v.unsqueeze(-2)


def read(S: Tensor, q: Tensor) -> Tensor:
    """Sᵀ q of each head."""
    return (S * q.unsqueeze(-1)).sum(-2)


def delta_features(p: Weights, mixed: Tensor, H: int, keys: int, o: Options) -> list[Tensor]:
    if o.get("convolution_width", 4):
        mixed = convolve(mixed, p["convolution.weight"])
    q, k, v = heads(H, *cut(mixed, keys, keys, mixed.shape[-1] - 2 * keys))
    q, k = (MAPS[o.get("feature_map", "silu")](x) for x in (q, k))
    power = {"l1": 1, "l2": 2}[o.get("key_norm", "l2")]
    q, k = (x / ((x.abs() ** power).sum(-1, keepdim=True) ** (2 / power) + 1e-6).sqrt() for x in (q, k))
    return [q, k, silu(v)]


def deltanet(p: Weights, x: Tensor, o: Options) -> Tensor:
    H = o.get("num_heads", 1)
    mixed, beta = cut(project(p, "in_proj", x), 3 * D_MODEL, H)
    q, k, v = delta_features(p, mixed, H, D_MODEL, o)
    beta = (2 if o.get("negative_eigenvalues") else 1) * sigmoid(beta).unsqueeze(-1)
    S, y = zeros(H, D_MODEL // H, D_MODEL // H), []
    for t in range(TOKENS):
        S = S + outer(beta[t] * k[t], v[t] - read(S, k[t]))
        y.append(normed(p, read(S, q[t]) / math.sqrt(D_MODEL // H), o).flatten())
    return torch.stack(y)


def gated_deltanet(p: Weights, x: Tensor, o: Options) -> Tensor:
    H, keys, gated = o.get("num_heads", 1), int(o.get("expand_k", 0.75) * D_MODEL), o.get("output_gate", True)
    values = int(o.get("expand_v", 2) * keys)
    mixed, beta, rate, gate = cut(project(p, "in_proj", x), 2 * keys + values, H, H, values if gated else 0)
    q, k, v = delta_features(p, mixed, H, keys, o)
    decay = (-p["A_log"].exp() * softplus(rate + p["dt_bias"])).exp()
    S, y = zeros(H, keys // H, values // H), []
    for t in range(TOKENS):
        S = decay[t, :, None, None] * S
        strength = (2 if o.get("negative_eigenvalues") else 1) * sigmoid(beta[t]).unsqueeze(-1)
        S = S + outer(strength * k[t], v[t] - read(S, k[t]))
        y.append(normed(p, read(S, q[t]) / math.sqrt(keys // H), o).flatten() * (silu(gate[t]) if gated else 1))
    return torch.stack(y)


def unit(x: Tensor) -> Tensor:
    return x / ((x**2).sum(-1, keepdim=True) + 1e-6).sqrt()


def comba(p: Weights, x: Tensor, o: Options) -> Tensor:
    H, keys = o.get("num_heads", 1), int(0.75 * D_MODEL)
    mixed, beta, rate, gate = cut(project(p, "in_proj", x), 4 * keys, H, H, 2 * keys)
    q, k, v = heads(H, *cut(silu(convolve(mixed, p["convolution.weight"])), keys, keys, 2 * keys))
    share = sigmoid(p["decay"]).unsqueeze(-1)
    q = unit(q - p["D"].unsqueeze(-1) * share * k)
    erase = unit(share * k)
    decay = (-p["A_log"].exp() * softplus(rate + p["dt_bias"])).exp()
    strength = sigmoid(beta) * ((1 + decay) if o.get("negative_eigenvalues") else 1)
    S, y = zeros(H, keys // H, 2 * keys // H), []
    for t in range(TOKENS):
        error = v[t] - read(S, erase[t])
        S = decay[t, :, None, None] * S + outer(strength[t].unsqueeze(-1) * unit(k[t]), error)
        y.append(normed(p, read(S, q[t]) / math.sqrt(keys // H), o).flatten() * sigmoid(gate[t]))
    return torch.stack(y)


def delta_product(p: Weights, x: Tensor, o: Options) -> Tensor:
    H, n, keys = o.get("num_heads", 1), o.get("steps", 2), int(0.75 * D_MODEL)
    mixed, beta, rate, gate = cut(project(p, "in_proj", x), keys + 3 * n * keys, n * H, H, 2 * keys)
    q, k, v = cut(silu(convolve(mixed, p["convolution.weight"])), keys, n * keys, 2 * n * keys)
    q, k, v = (part.reshape(TOKENS, -1, H, part.shape[-1] // m // H) for part, m in ((q, 1), (k, n), (v, n)))
    decay = (-p["A_log"].exp() * softplus(rate + p["dt_bias"])).exp()
    strength = (2 if o.get("negative_eigenvalues", True) else 1) * sigmoid(beta).view(TOKENS, n, H, 1)
    S, y = zeros(H, keys // H, 2 * keys // H), []
    for t in range(TOKENS):
        S = decay[t, :, None, None] * S
        for i in range(n):
            S = S + outer(strength[t, i] * unit(k[t, i]), v[t, i] - read(S, unit(k[t, i])))
        y.append(normed(p, read(S, unit(q[t, 0])) / math.sqrt(keys // H), o).flatten() * silu(gate[t]))
    return torch.stack(y)


def kda(p: Weights, x: Tensor, o: Options) -> Tensor:
    return channel_gated_delta_rule(p, x, o, strengths=1)


def gdn2(p: Weights, x: Tensor, o: Options) -> Tensor:
    return channel_gated_delta_rule(p, x, o, strengths=2)


def channel_gated_delta_rule(p: Weights, x: Tensor, o: Options, strengths: int) -> Tensor:
    H = o.get("num_heads", 1)
    keys, most = int(o.get("expand_k", 1) * D_MODEL), 2 if o.get("negative_eigenvalues") else 1
    K, V = keys // H, int(o.get("expand_v", 1) * keys // H)
    widths = [H] if strengths == 1 else [H * K, H * V]
    full = o.get("output_gate") == "full"
    mixed, *logits, low, gate = cut(project(p, "in_proj", x), 2 * keys + H * V, *widths, V, H * V if full else V)
    q, k, v = delta_features(p, mixed, H, keys, o)
    erase, write = (most * sigmoid(logits[0]), sigmoid(logits[-1]) * (most if strengths == 1 else 1))
    erase, write = erase.view(TOKENS, H, -1), write.view(TOKENS, H, -1)
    z, slope = (project(p, "decay_proj", low) + p["dt_bias"]).view(TOKENS, H, K), p["A_log"].exp().unsqueeze(-1)
    bound = o.get("gate_bound")
    decay = (-slope * softplus(z) if bound is None else bound * sigmoid(slope * z)).exp()
    gate = sigmoid(gate if full else project(p, "gate_proj", gate) + p["gate_proj.bias"])
    S, y = zeros(H, K, V), []
    for t in range(TOKENS):
        S = decay[t].unsqueeze(-1) * S
        S = S + outer(k[t], write[t] * v[t] - read(S, erase[t] * k[t]))
        y.append(normed(p, read(S, q[t]) / math.sqrt(K), o).flatten() * gate[t])
    return torch.stack(y)


def gla(p: Weights, x: Tensor, o: Options) -> Tensor:
    H, keys, values = o.get("num_heads", 4), int(o.get("expand_k", 0.5) * D_MODEL), int(o.get("expand_v", 1) * D_MODEL)
    gates = values * o.get("output_gate", True)
    q, k, v, gate, low = cut(project(p, "in_proj", x), keys, keys, values, gates, o.get("gate_rank", 16))
    kept = sigmoid(project(p, "decay_proj", low) + p["decay_proj.bias"]) ** (1 / o.get("gate_temperature", 16))
    q, k = (MAPS[o.get("feature_map", "identity")](part) for part in (q, k))
    q, k, v, kept = heads(H, q, k, v, kept)
    S, y = zeros(H, keys // H, values // H), []
    for t in range(TOKENS):
        S = kept[t].unsqueeze(-1) * S + outer(k[t], v[t])
        y.append(normed(p, read(S, q[t]) / math.sqrt(keys // H), o).flatten() * (silu(gate[t]) if gates else 1))
    return torch.stack(y)


def mamba3(p: Weights, x: Tensor, o: Options) -> Tensor:
    P, N, G, inner = o["head_dim"], o["state_size"], o.get("n_groups", 1), o.get("expand", 2) * D_MODEL
    H = inner // P
    z, u, b, c, dt, rate, mix, angle = cut(project(p, "in_proj", x), inner, inner, G * N, G * N, H, H, H, N // 4)
    step, kept, angle = softplus(dt + p["dt_bias"]), sigmoid(mix), torch.tanh(angle)
    rate = softplus(rate) if o.get("rate") == "softplus" else torch.where(rate < 0, 1 / (1 - rate), 1 + rate)
    (u,) = heads(H, u)
    S, phase, y = zeros(H, N, P), zeros(H, N // 4), []
    last = zeros(H, N), zeros(H, P)
    for t in range(TOKENS):
        phase = phase + math.pi * angle[t] * step[t].unsqueeze(-1)
        sides = []
        for name, part in (("B", b), ("C", c)):
            rows = part[t].view(G, N)
            rows = rows / ((rows**2).mean(-1, keepdim=True) + 1e-5).sqrt() * p[f"{name}_norm.weight"]
            rows = rows.repeat_interleave(H // G, 0) + p[f"{name}_bias"]
            pairs = torch.view_as_complex(rows[:, : N // 4 * 2].reshape(H, -1, 2)) * torch.polar(phase / phase, phase)
            sides.append(torch.cat((torch.view_as_real(pairs).flatten(1), rows[:, N // 4 * 2 :]), 1))
        key, query = sides
        size = step[t].view(H, 1, 1)
        alpha, half = (-rate[t].clamp(min=1e-4) * step[t]).exp().view(H, 1, 1), kept[t].view(H, 1, 1)
        S = alpha * S + (1 - half) * size * alpha * outer(*last) + half * size * outer(key, u[t])
        last = key, u[t]
        y.append((read(S, query) + p["D"].unsqueeze(-1) * u[t]).flatten() * silu(z[t]))
    return torch.stack(y)


def rwkv6(p: Weights, x: Tensor, o: Options) -> Tensor:
    H = o.get("num_heads", 1)
    S, last, y = zeros(H, D_MODEL // H, D_MODEL // H), zeros(D_MODEL), []
    for token in x:
        change = last - token
        low = torch.tanh(project(p, "shift_down", token + change * p["shift_base"])).unflatten(0, (5, -1))
        amounts = [base + part @ up for base, part, up in zip(p["shift_bases"], low, p["shift_up"], strict=True)]
        w, k, v, r, g = (token + change * amount for amount in amounts)
        w = (-(p["decay_base"] + project(p, "decay_up", project(p, "decay_down", w).tanh())).exp()).exp()
        k, v, r = (project(p, name, part) for name, part in (("key", k), ("value", v), ("receptance", r)))
        w, k, v, r = heads(H, w, k, v, r)
        out = read(S + p["bonus"].unsqueeze(-1) * outer(k, v), r)
        S = w.unsqueeze(-1) * S + outer(k, v)
        out = out - out.mean(-1, keepdim=True)
        out = out / ((out**2).mean(-1, keepdim=True) + o.get("norm_eps", 64e-5)).sqrt()
        y.append((out.flatten() * p["norm.weight"] + p["norm.bias"]) * silu(project(p, "gate", g)))
        last = token
    return torch.stack(y)


def rwkv7(p: Weights, x: Tensor, o: Options) -> Tensor:
    """`x [T, D]`, or `[T, 2 D]` with the values of the first layer, in a layer that mixes its own with them."""
    H = o.get("num_heads", 1)
    S, last, y = zeros(H, D_MODEL // H, D_MODEL // H), zeros(D_MODEL), []
    for row in x:
        token, first = row[:D_MODEL], row[D_MODEL:]
        for_r, for_w, for_k, for_v, for_a, for_g = (token + amount * (last - token) for amount in p["mix"])
        r, k, v = project(p, "receptance", for_r), project(p, "key", for_k), project(p, "value", for_v)
        w = p["decay_base"] + torch.tanh(for_w @ p["decay_down"]) @ p["decay_up"]
        w = torch.exp(-math.exp(-0.5) * sigmoid(w))
        a = sigmoid(p["rate_base"] + for_a @ p["rate_down"] @ p["rate_up"])
        if len(first):
            v = v + (first - v) * sigmoid(p["value_base"] + for_v @ p["value_down"] @ p["value_up"])
        written = k * (1 + (a - 1) * p["key_rate"])
        if o.get("negative_eigenvalues"):
            a = a * (1 + w)
        r, unit, v, a, w, written = heads(H, r, k * p["key_scale"], v, a, w, written)
        unit = unit / (unit**2).sum(-1, keepdim=True).sqrt()
        S = w.unsqueeze(-1) * S - outer(a * unit, read(S, unit)) + outer(written, v)
        out = read(S, r)
        out = out - out.mean(-1, keepdim=True)
        out = out / ((out**2).mean(-1, keepdim=True) + o.get("norm_eps", 64e-5)).sqrt()
        out = out.flatten() * p["norm.weight"] + p["norm.bias"]
        out = out + ((r * written * p["bonus"]).sum(-1, keepdim=True) * v).flatten()
        y.append(out * (sigmoid(for_g @ p["gate_down"]) @ p["gate_up"]))
        last = token
    return torch.stack(y)


def rg_lru(p: Weights, x: Tensor, o: Options) -> Tensor:
    H = o.get("num_heads", 16)
    width = o.get("width", H * max(1, round(4 * D_MODEL / (3 * H))))
    x, branch = cut(project(p, "in_proj", x) + p["in_proj.bias"], width, width)
    x = convolve(x, p["convolution.weight"], p["convolution.bias"])
    h, y = zeros(width), []
    for token in x:
        gates = torch.einsum("hi,hij->hj", token.view(H, -1), p["gate_weight"]) + p["gate_bias"]
        r, i = (sigmoid(gate).flatten() for gate in gates.chunk(2, -1))
        a = sigmoid(-p["decay"]) ** (8 * r)
        h = a * h + (1 - a**2).sqrt() * i * token
        y.append(h)
    return torch.stack(y) * branch / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (branch + 0.044715 * branch**3)))


def hgrn2(p: Weights, x: Tensor, o: Options) -> Tensor:
    H, b = o.get("num_heads", 1), o.get("lower_bound", 0.0)
    q, f, v = heads(H, *project(p, "in_proj", x).chunk(3, -1))
    f = b + (1 - b) * sigmoid(f)
    S, y = zeros(H, D_MODEL // H, D_MODEL // H), []
    for t in range(TOKENS):
        S = f[t].unsqueeze(-1) * S + outer(1 - f[t], v[t])
        y.append(normed(p, read(S, silu(q[t])).flatten() / math.sqrt(D_MODEL // H), o))
    return torch.stack(y)


def retnet(p: Weights, x: Tensor, o: Options) -> Tensor:
    H, values = o.get("num_heads", 1), int(o.get("expand_v", 2) * D_MODEL)
    gates = values * o.get("output_gate", True)
    q, k, v, gate = cut(project(p, "in_proj", x), D_MODEL, D_MODEL, values, gates)
    q, k = (MAPS[o.get("feature_map", "identity")](part) for part in (q, k))
    q, k, v = heads(H, q, k, v)
    half = D_MODEL // H // 2
    slow = o.get("rotary_base", 10000) ** (-torch.arange(half, dtype=torch.float64) / half)
    S, y = zeros(H, 2 * half, values // H), []
    for t in range(TOKENS):
        turn = torch.exp(1j * t * slow)
        turned = (torch.complex(part[t, :, :half], part[t, :, half:]) * turn for part in (q, k))
        q_t, k_t = (torch.cat((pair.real, pair.imag), -1) for pair in turned)
        S = torch.stack([(1 - 2.0 ** (-5 - h)) * S[h] for h in range(H)]) + outer(k_t, v[t])
        y.append(normed(p, read(S, q_t) / math.sqrt(2 * half), o).flatten() * (silu(gate[t]) if gates else 1))
    return torch.stack(y)


def supra(p: Weights, x: Tensor, o: Options) -> Tensor:
    H = o.get("num_heads", 1)
    G = o.get("num_kv_heads", H)
    D = o.get("head_dim", D_MODEL // H)
    q, k, v = cut(project(p, "in_proj", x), H * D, G * D, G * D)
    own = "key_map" if G < H else "query_map"
    q = (project(p, "query_map", q) + p["query_map.bias"]).clamp_min(0).unflatten(-1, (H, D))
    k = (project(p, own, k) + p[f"{own}.bias"]).clamp_min(0).unflatten(-1, (G, D))
    v = v.unflatten(-1, (G, D))
    exponents = {1: [8], 2: [4, 8], 3: [4, 8, 2], 4: [2, 4, 6, 8]}[H]
    slow = o.get("rotary_base", 10000) ** (-torch.arange(D // 2, dtype=torch.float64) / (D // 2))
    S, y = zeros(H, D, D), []
    for t in range(TOKENS):
        heads_of_t = []
        for h, exponent in enumerate(exponents):
            turn = torch.exp(1j * t * slow)
            turned = [torch.complex(part[: D // 2], part[D // 2 :]) * turn for part in (q[t, h], k[t, h * G // H])]
            q_t, k_t = (torch.cat((pair.real, pair.imag)) for pair in turned)
            S[h] = math.exp(-(2.0**-exponent)) * S[h] + outer(k_t, v[t, h * G // H])
            o_t = S[h].T @ q_t / math.sqrt(D)
            o_t = o_t - o_t.mean()
            heads_of_t.append(o_t / ((o_t**2).mean() + o.get("norm_eps", 1e-5)).sqrt())
        y.append(torch.cat(heads_of_t))
    return torch.stack(y)


def rwkv4(p: Weights, x: Tensor, o: Options) -> Tensor:
    w, u = p["decay"].exp(), p["bonus"]
    a, b, last, y = zeros(D_MODEL), zeros(D_MODEL), zeros(D_MODEL), []
    for t in range(TOKENS):
        mixed = p["mix"] * x[t] + (1 - p["mix"]) * last
        k, v, r = (project(p, name, part) for name, part in zip(("key", "value", "receptance"), mixed, strict=True))
        average = (a + (u + k).exp() * v) / (b + (u + k).exp())
        y.append(sigmoid(r) * average)
        a, b, last = (-w).exp() * a + k.exp() * v, (-w).exp() * b + k.exp(), x[t]
    return torch.stack(y)


def mamba2(p: Weights, x: Tensor, o: Options) -> Tensor:
    inner, N, G, P = o.get("expand", 2) * D_MODEL, o.get("state_size", 128), o.get("n_groups", 1), o["head_dim"]
    H = inner // P
    z, mixed, rate = cut(project(p, "in_proj", x), inner, inner + 2 * G * N, H)
    mixed = silu(convolve(mixed, p["convolution.weight"], p["convolution.bias"]))
    u, B, C = cut(mixed, inner, G * N, G * N)
    (u,), (B, C) = heads(H, u), (part.repeat_interleave(H // G, 1) for part in heads(G, B, C))
    step = softplus(rate + p["dt_bias"]).unsqueeze(-1)
    decay = (-step * p["A_log"].exp().unsqueeze(-1)).exp()
    S, y = zeros(H, N, P), []
    for t in range(TOKENS):
        S = decay[t].unsqueeze(-1) * S + outer(B[t], step[t] * u[t])
        gated = (read(S, C[t]) + p["D"].unsqueeze(-1) * u[t]).flatten() * silu(z[t])
        groups = {"norm.weight": p["norm.weight"].view(G, -1)}
        y.append(normed(groups, gated.view(G, -1), o).flatten())
    return torch.stack(y)


def selective(p: Weights, x: Tensor, o: Options, learn: Callable[..., Tensor]) -> Tensor:
    """Mamba's layer; `learn` computes the memory `[I, N]` after a token from the one before it."""
    N = o.get("state_size", 16)
    x, z = project(p, "in_proj", x).chunk(2, -1)
    x = silu(convolve(x, p["convolution.weight"], p["convolution.bias"]))
    low, k, q = cut(project(p, "x_proj", x), o.get("rate_rank", 1), N, N)
    rate = project(p, "rate_proj", low) + (p["rate_bias"] if "rate_bias" in p else p["rate_proj.bias"])
    S, y = zeros(x.shape[-1], N), []
    for t in range(TOKENS):
        S = learn(S, x[t], rate[t], k[t])
        y.append((S @ q[t] + p["D"] * x[t]) * silu(z[t]))
    return torch.stack(y)


def mamba(p: Weights, x: Tensor, o: Options) -> Tensor:
    def learn(S: Tensor, x: Tensor, rate: Tensor, B: Tensor) -> Tensor:
        step = softplus(rate)
        return (-step.unsqueeze(-1) * p["A_log"].exp()).exp() * S + outer(step * x, B)

    return selective(p, x, o, learn)


def longhorn(p: Weights, x: Tensor, o: Options) -> Tensor:
    def learn(S: Tensor, x: Tensor, rate: Tensor, k: Tensor) -> Tensor:
        strength = sigmoid(rate) / (1 + sigmoid(rate) * (k @ k))
        return (1 - outer(strength, k**2)) * S + outer(strength * x, k)

    return selective(p, x, o, learn)


def longhorn_exact(p: Weights, x: Tensor, o: Options) -> Tensor:
    def learn(S: Tensor, x: Tensor, rate: Tensor, k: Tensor) -> Tensor:
        beta = sigmoid(rate).repeat_interleave(len(x) // len(rate))
        strength = beta / (1 + beta * (k @ k))
        return S + outer(strength * (x - S @ k), k)

    return selective(p, x, o, learn)


def linear_attention(p: Weights, x: Tensor, o: Options) -> Tensor:
    H = o.get("num_heads", 1)
    q, k, v = heads(H, *project(p, "in_proj", x).chunk(3, -1))
    S, z, y = zeros(H, D_MODEL // H, D_MODEL // H), zeros(H, D_MODEL // H), []
    for t in range(TOKENS):
        query, key = elu_plus_one(q[t]), elu_plus_one(k[t])
        S, z = S + outer(key, v[t]), z + key
        total = (z * query).sum(-1, keepdim=True).clamp_min(o.get("eps", 1e-6))
        y.append((read(S, query) / (total if o.get("normalizer", True) else 1)).flatten())
    return torch.stack(y)


def slots(
    p: Weights, x: Tensor, o: Options, write: Callable[[Tensor], tuple[Tensor, Tensor]], silu_values: bool = False
) -> Tensor:
    """The layer of GSA; `write` computes the decays and write strengths of slots, `[T, H, M]`, from logits."""
    H, M = o.get("num_heads", 4), o.get("num_slots", 64)
    if o.get("data_dependent_gate", True):
        mixed, logits = cut(project(p, "in_proj", x), 3 * D_MODEL, H * M)
    else:
        mixed, logits = project(p, "in_proj", x), p["gate.logits"].flatten().repeat(TOKENS, 1)
    kept, taken = write(logits.unflatten(-1, (H, M)))
    q, k, v = heads(H, *mixed.chunk(3, -1))
    q, k = (MAPS[o.get("feature_map", "silu")](part) for part in (q, k))
    v = MAPS["silu" if silu_values else o.get("feature_map", "silu")](v)
    keys, values, y = zeros(H, M, D_MODEL // H), zeros(H, M, D_MODEL // H), []
    for t in range(TOKENS):
        keys = kept[t].unsqueeze(-1) * keys + outer(taken[t], k[t])
        values = kept[t].unsqueeze(-1) * values + outer(taken[t], v[t])
        score = o.get("scale", 1) * read(keys.mT, q[t])
        y.append(normed(p, silu(read(values, MAPS[o.get("activation", "softmax")](score)).flatten()), o))
    return torch.stack(y)


def gsa(p: Weights, x: Tensor, o: Options) -> Tensor:
    def write(logits: Tensor) -> tuple[Tensor, Tensor]:
        kept = sigmoid(logits) ** (1 / o.get("gate_temperature", 8))
        return kept, 1 - kept

    return slots(p, x, o, write, silu_values=True)


def abc(p: Weights, x: Tensor, o: Options) -> Tensor:
    def write(logits: Tensor) -> tuple[Tensor, Tensor]:
        taken = logits.exp() / logits.exp().cumsum(0)
        return 1 - taken if o.get("renormalize", True) else torch.ones_like(taken), taken

    return slots(p, x, o, write)


def compression(p: Weights, x: Tensor, o: Options, learn: Callable[..., Tensor]) -> Tensor:
    """Lattice's layer; `learn` computes a head's memory `[D, M]` after a token from the one before it."""
    H, forgets = o.get("num_heads", 1), "forget_bias" in p
    M = o.get("num_slots", D_MODEL // H)
    shared, v, gate, rates = cut(project(p, "in_proj", x), H * M, D_MODEL, D_MODEL, (1 + forgets) * H)
    q, k = (convolve(shared, p[f"{name}_convolution.weight"]) for name in ("query", "key"))
    q, k, v = heads(H, q, k, v)
    gamma = MAPS[o.get("gamma_activation", "sigmoid")](rates[:, :H])
    kept = sigmoid(rates[:, H:] + p["forget_bias"]) if forgets else torch.ones_like(gamma)
    S, y = p["slots"], []
    for t in range(TOKENS):
        S = torch.stack([learn(S[h], k[t, h], v[t, h], gamma[t, h], kept[t, h]) for h in range(H)])
        y.append(read(S.mT, q[t]).flatten() * gate[t] * (1 + torch.erf(gate[t] / math.sqrt(2))) / 2)
    return torch.stack(y)


def away_from(s: Tensor, x: Tensor) -> Tensor:
    """The component of x that is orthogonal to s."""
    return x - s * (s @ x) / (s @ s)


def lattice(p: Weights, x: Tensor, o: Options) -> Tensor:
    def learn(S: Tensor, k: Tensor, v: Tensor, gamma: Tensor, kept: Tensor) -> Tensor:
        k = k / (k @ k + 1e-6).sqrt() if o.get("normalize_key") else k
        units, columns = S / S.norm(dim=0), []
        for i, s in enumerate(S.unbind(1)):
            h, c = {"decode": (units @ k - v, k[i]), "encode": (v, units[:, i] @ v - k[i]), "similarity": (-v, k[i])}[
                o.get("objective", "decode")
            ]
            s_new = kept * s - gamma * c * away_from(s, h) / s.norm()
            columns.append(s_new / s_new.norm() if o.get("normalize", True) else s_new)
        return torch.stack(columns, 1)

    return compression(p, x, o, learn)


def ttt(p: Weights, x: Tensor, o: Options) -> Tensor:
    def learn(S: Tensor, k: Tensor, v: Tensor, gamma: Tensor, kept: Tensor) -> Tensor:
        z = S @ k
        return S - gamma * outer(away_from(z, z / z.norm() - v), k) / z.norm()

    return compression(p, x, o, learn)


def vla(p: Weights, x: Tensor, o: Options) -> Tensor:
    H = o.get("num_heads", 1)
    K = D_MODEL // H
    mixed, one = project(p, "in_proj", x), torch.eye(K, dtype=torch.float64)
    if o.get("convolution_width"):
        mixed = convolve(mixed, p["convolution.weight"])
    q, k, v = heads(H, *mixed.chunk(3, -1))
    y = torch.zeros_like(v)
    for h in range(H):
        S, A, z = zeros(K, K), one / o.get("lambda0", 0.1), zeros(K)
        for t in range(TOKENS):
            key, query = elu_plus_one(k[t, h]), elu_plus_one(q[t, h])
            place = key / key.norm() if o.get("normalize_key", True) else key
            if o.get("update_penalty", True):
                u = p["penalty"][h] @ k[t, h]
                u = u / (u @ u + 1e-6).sqrt() / (math.sqrt(K) if o.get("scale_penalty", True) else 1)
                A = A - outer(A @ u, A @ u) / (1 + u @ A @ u)
                period = o.get("refresh_period", 20)
                A = A + o.get("refresh", 1e-3) * one if period and (t + 1) % period == 0 else A
            alpha = A @ place
            alpha = alpha / alpha.norm() if o.get("normalize_alpha", True) else alpha
            S, z = S + outer(alpha, v[t, h] - S.T @ place), z + key
            total = (z @ query).clamp_min(o.get("eps", 1e-4)) if o.get("normalizer", True) else 1
            y[t, h] = S.T @ query / total
    return y.flatten(1)


Layer = Callable[[Weights, Tensor, Options], Tensor]
ONE_KEY: list[Options] = [{"feature_map": "relu"}, {"feature_map": "elu_plus_one"}, {"feature_map": "identity"},
                          {"key_norm": "l1"}, {"convolution_width": 0}, {"convolution_width": 2}]  # fmt: skip
SLOTS: list[Options] = [
    {"num_slots": 3, **option}
    for option in ({}, {"feature_map": "relu"}, {"feature_map": "relu_squared"}, {"feature_map": "identity"},
                   {"activation": "identity"}, {"activation": "silu"}, {"activation": "relu"},
                   {"activation": "relu_squared"}, {"num_heads": 2, "scale": 0.3}, {"norm_eps": 1.0})
]  # fmt: skip
SCANS: list[Options] = [{}, {"state_size": 3, "rate_rank": 2}, {"expand": 3, "convolution_width": 2}]
CASES: dict[Layer, list[Options]] = {
    abc: [{}, *SLOTS, {"num_slots": 3, "renormalize": False}],
    comba: [{}, {"num_heads": 2}, {"negative_eigenvalues": True}],
    delta_product: [{}, {"num_heads": 2, "steps": 3}, {"steps": 1, "negative_eigenvalues": False}],
    deltanet: [{}, *ONE_KEY, {"num_heads": 2}, {"negative_eigenvalues": True}, {"norm_eps": 1.0}],
    gated_deltanet: [{}, *ONE_KEY, {"num_heads": 2}, {"expand_k": 0.5, "expand_v": 1.0}, {"output_gate": False},
                     {"norm_eps": 1.0}, {"negative_eigenvalues": True}],
    gdn2: [{}, {"num_heads": 2, "expand_v": 2.0}, {"gate_bound": -5.0, "negative_eigenvalues": True}],
    gla: [{}, {"num_heads": 2, "expand_k": 1.0, "expand_v": 2.0}, {"gate_rank": 3, "gate_temperature": 1.0},
          {"norm_eps": 1.0}, {"feature_map": "relu", "output_gate": False}],
    gsa: [{}, *SLOTS, {"num_slots": 3, "data_dependent_gate": False}, {"num_slots": 3, "gate_temperature": 2.0}],
    hgrn2: [{}, {"num_heads": 2, "lower_bound": 0.3}, {"norm_eps": 1.0}],
    kda: [{}, {"num_heads": 2, "expand_k": 0.5, "expand_v": 2.0}, {"gate_bound": -5.0, "output_gate": "full"},
          {"negative_eigenvalues": True, "convolution_width": 0}],
    lattice: [{}, {"num_heads": 2, "num_slots": 3}, {"objective": "encode"}, {"objective": "similarity"},
              {"forget_gate": False}, {"normalize": False}, {"normalize": False, "objective": "encode"},
              {"normalize": False, "objective": "similarity"}, {"normalize_key": True},
              {"gamma_activation": "softplus", "convolution_width": 2}],
    linear_attention: [{}, {"num_heads": 2}, {"normalizer": False}, {"eps": 30.0}],
    longhorn: SCANS,
    longhorn_exact: [*SCANS, {"head_dim": 4}],
    mamba: SCANS,
    mamba2: [{"head_dim": 16}, {"head_dim": 4, "state_size": 3}, {"head_dim": 4, "state_size": 3, "n_groups": 2},
             {"head_dim": 8, "expand": 3, "convolution_width": 2}, {"head_dim": 16, "norm_eps": 1.0}],
    mamba3: [{"head_dim": 16, "state_size": 8}, {"head_dim": 4, "state_size": 12, "n_groups": 2},
             {"head_dim": 8, "expand": 3, "state_size": 8, "rate": "softplus"}],
    retnet: [{}, {"num_heads": 2}, {"expand_v": 1.0, "rotary_base": 10.0}, {"norm_eps": 1.0},
             {"feature_map": "relu", "output_gate": False}],
    rg_lru: [{}, {"num_heads": 2}, {"width": 32, "num_heads": 4}, {"convolution_width": 2}],
    rwkv4: [{}],
    rwkv6: [{}, {"num_heads": 2}, {"shift_rank": 3, "decay_rank": 5}, {"norm_eps": 1.0}],
    rwkv7: [{}, {"num_heads": 2, "negative_eigenvalues": True}, {"decay_rank": 3, "rate_rank": 4, "gate_rank": 5},
            {"norm_eps": 1.0}],
    supra: [{}, {"num_heads": 2}, {"num_heads": 4, "num_kv_heads": 2}, {"num_heads": 3, "head_dim": 6},
            {"rotary_base": 10.0}, {"norm_eps": 1.0}],
    ttt: [{}, {"num_heads": 2}, {"gamma_activation": "softplus", "convolution_width": 2}],
    vla: [{}, {"num_heads": 2}, {"convolution_width": 4}, {"lambda0": 1.0}, {"refresh_period": 3, "refresh": 0.5},
          {"refresh_period": None}, {"eps": 30.0}, {"scale_penalty": False}, {"update_penalty": False},
          {"normalize_key": False, "lambda0": 10.0}, {"normalize_alpha": False, "lambda0": 1.0},
          {"normalizer": False}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "options"),
    [(layer, options) for layer, choices in CASES.items() for options in choices],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_the_layer_is_its_formula(layer: Layer, options: Options) -> None:
    torch.manual_seed(0)
    mixer = mixers.create(layer.__name__, D_MODEL, **options).double()
    with torch.no_grad():
        for parameter in mixer.parameters():  # norms and biases too: their initial values hide mistakes
            parameter.normal_(std=0.5)
        for first_slots in mixer.buffers():
            first_slots.copy_(torch.linalg.qr(first_slots).Q)  # unit columns to float64
    x = torch.randn(TOKENS, D_MODEL, dtype=torch.float64)
    weights = dict(mixer.state_dict())
    expected = project(weights, "out_proj", layer(weights, x, options)) + weights.get("out_proj.bias", 0)
    same = {"rtol": 1e-9, "atol": 1e-9 * expected.abs().max().item()}
    torch.testing.assert_close(mixer(x[None])[0][0], expected, **same)
    state, steps = mixer.initial_state(1, dtype=x.dtype), []
    for token in x:
        y, state = mixer.step(token[None], state)
        steps.append(y)
    torch.testing.assert_close(torch.cat(steps), expected, **same)


def test_rwkv7_reads_the_values_of_the_first_layer() -> None:
    torch.manual_seed(0)
    first, second = (mixers.create("rwkv7", D_MODEL, num_heads=2, value_rank=3).double() for _ in range(2))
    for layer, mixer in enumerate((first, second)):
        mixer.place_in_model(layer, 2)
        for parameter in mixer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(TOKENS, D_MODEL, dtype=torch.float64)
    y, values = first(x[None])[0][0].split(D_MODEL, dim=-1)
    p = dict(first.state_dict())
    torch.testing.assert_close(y, project(p, "out_proj", rwkv7(p, x, {"num_heads": 2})))
    before = torch.cat((zeros(1, D_MODEL), x[:-1]))
    torch.testing.assert_close(values, project(p, "value", x + p["mix"][3] * (before - x)))
    wide, p = torch.cat((x, values), dim=-1), dict(second.state_dict())
    expected = project(p, "out_proj", rwkv7(p, wide, {"num_heads": 2}))
    torch.testing.assert_close(second(wide[None])[0][0], expected)
    state, steps = second.initial_state(1, dtype=x.dtype), []
    for token in wide:
        step, state = second.step(token[None], state)
        steps.append(step)
    torch.testing.assert_close(torch.cat(steps), expected)


def test_no_mixer_is_left_out() -> None:
    assert {layer.__name__ for layer in CASES} | ELSEWHERE == set(mixers.mixer_names())
