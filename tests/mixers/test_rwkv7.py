"""RWKV-7: the initial values of the published code, which depend on the layer's place in the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longseq import mixers


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_initial_values_are_the_published_ones(layer: int) -> None:
    width, size, layers = 12, 4, 3
    torch.manual_seed(0)
    mixer: Any = mixers.create("rwkv7", width, head_dim=size, value_rank=3, gate_rank=20)
    mixer.place_in_model(layer, layers)
    mixer.reset_parameters()
    depth, rest = layer / (layers - 1), 1 - layer / layers
    for n in range(width):
        share, line = n / width, n / (width - 1)
        bent = (n % size - 1.5) / 1.5 * abs((n % size - 1.5) / 1.5)
        expected = {
            "decay_base": -5.5 + 6 * line ** (1 + depth**0.3) + 2.5 * bent,
            "rate_base": -0.19 + 0.3 * bent + 0.4 * (line - 0.5),
            "key_scale": 0.71 - 0.1 * (line - 0.5),
            "key_rate": 1.02,
            "norm.weight": ((1 + layer) / layers) ** 0.7,
            "norm.bias": 0.0,
        }
        if layer:
            expected["value_base"] = 0.73 - 0.4 * (line - 0.5)
        found = {name: mixer.get_parameter(name)[n].item() for name in expected}
        assert found == pytest.approx(expected, abs=1e-6)
        mix = [1 - share ** (power * rest) for power in (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)]
        assert mixer.mix[:, n].tolist() == pytest.approx(mix, abs=1e-6)
    assert (mixer.bonus == -0.04).all()
    eye = torch.eye(width)
    for weight, gain in ((mixer.receptance.weight, 1.0), (mixer.key.weight, 0.1), (mixer.value.weight, 1.0)):
        torch.testing.assert_close(weight @ weight.T, gain**2 * eye)
    torch.testing.assert_close(mixer.gate_up.T @ mixer.gate_up, 0.01 * 20 / width * eye)
    zeros = [mixer.out_proj.weight, mixer.decay_down, mixer.rate_down, mixer.gate_down]
    if layer:
        torch.testing.assert_close(mixer.value_up @ mixer.value_up.T, 0.01 * torch.eye(3))
        zeros.append(mixer.value_down)
    assert not any(weight.any() for weight in zeros)
