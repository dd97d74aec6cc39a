"""Single layers of transformers become mixers of ours and go back: the same weights, outputs and steps."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save
from torch import Tensor, nn
from transformers_reference import transformers_module

from longseq import mixers
from longseq.tools.hugging_face.layers import read_layer, write_layer

# Keys of different widths than the model, and values of different widths than the keys where they can be.
QWEN = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 6, "linear_value_head_dim": 5}
KIMI = {"linear_num_heads": 3, "linear_head_dim": 16}
LAYERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "kimi_linear": ("kimi_linear", "KimiLinearDeltaAttention", "KimiLinearConfig", KIMI),
    "qwen3_next": ("qwen3_next", "Qwen3NextGatedDeltaNet", "Qwen3NextConfig", QWEN),
    "qwen3_next as many values": (
        "qwen3_next", "Qwen3NextGatedDeltaNet", "Qwen3NextConfig", {**QWEN, "linear_num_value_heads": 2}
    ),
    "qwen3_5": ("qwen3_5", "Qwen3_5GatedDeltaNet", "Qwen3_5TextConfig", QWEN),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", "Qwen3_5MoeTextConfig", QWEN),
}  # fmt: skip


def make(patch: pytest.MonkeyPatch, name: str) -> tuple[dict[str, Any], nn.Module]:
    """A config.json and a layer with random weights that computes in float64."""
    family, layer, config, options = LAYERS[name]
    module = transformers_module(patch, family, double=True)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "layer_types": ["linear_attention"], "rms_norm_eps": 1e-3}
    made = getattr(transformers, config)(**sizes, linear_conv_kernel_dim=3, **options)
    torch.manual_seed(0)
    peer = getattr(module, layer)(made, layer_idx=0).double()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return json.loads(made.to_json_string(use_diff=False)), peer


def files_of_kimi(config: dict[str, Any], weights: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and names of Kimi-Linear-48B-A3B."""
    sizes = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
    sizes["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    published = {key: value for key, value in config.items() if key not in sizes.values()}
    published["linear_attn_config"] = {key: config[name] for key, name in sizes.items()}
    found = {name.removeprefix("forget_gate."): weight for name, weight in weights.items()}
    for part, taps in zip("qkv", found.pop("conv1d.weight").chunk(3), strict=True):
        found[f"{part}_conv1d.weight"] = taps
    return published, found


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_becomes_ours_and_goes_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, peer = make(monkeypatch, name)
    weights = dict(peer.state_dict())
    mixer = read_layer(config, weights)
    x = torch.randn(2, 70, 32, dtype=torch.float64)
    with torch.no_grad():
        expected = peer(x)
        y, _ = mixer(x)
        _, state = mixer(x[:, :69])
        step, _ = mixer.step(x[:, 69], state)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(step, expected[:, 69], rtol=1e-11, atol=1e-11)
    back = write_layer(config, mixer)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[key], weights[key]) for key in weights)
    assert save(back), "no two share their memory"
    if name == "kimi_linear":
        same = read_layer(*files_of_kimi(config, weights)).state_dict()
        assert all(torch.equal(same[key], weight) for key, weight in mixer.state_dict().items())
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.zero_()
        assert torch.equal(peer(x), expected), "ours are copies"


def test_other_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config, peer = make(monkeypatch, "kimi_linear")
    weights = dict(peer.state_dict())
    for changes, words in (
        ({"model_type": "llama"}, "model_type=llama"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"linear_num_heads": 2}, r"q_proj.weight has the shape \[48, 32\], not \[32, 32\]"),
    ):
        with pytest.raises(ValueError, match=words):
            read_layer({**config, **changes}, weights)
    with pytest.raises(ValueError, match=r"no place for the weight g_b_proj\.bias"):
        read_layer(config, {**weights, "g_b_proj.bias": torch.zeros(48)})
    sizes: dict[str, Any] = {"num_heads": 3, "expand_k": 1.5, "convolution_width": 3, "norm_eps": 1e-3}
    with pytest.raises(ValueError, match=r"no layer whose gate_bound is -5\.0, only None"):
        write_layer(config, mixers.create("kda", 32, gate_bound=-5.0, **sizes))
