"""The mixer of each layer of a hybrid."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from longseq.backbones.tokens import TokenBackbone
from longseq.mixers.pattern import expand_pattern, spell_pattern

D, A, M = "deltanet", "attention", "mamba"


@pytest.mark.parametrize(
    ("pattern", "names", "spelled"),
    [
        ("deltanet", (D, D, D, D), "deltanet"),
        ((D, A), (D, A, D, A), "deltanet+attention"),
        ("2xdeltanet+attention", (D, D, A, D), "2xdeltanet+attention"),
        ([D, D, A], (D, D, A, D), "2xdeltanet+attention"),
        ([A, D, D, M], (A, D, D, M), "attention+2xdeltanet+mamba"),
        ([D, A, A, D], (D, A, A, D), "deltanet+2xattention+deltanet"),
        ("deltanet+attention@3+mamba@0", (M, D, D, A), "deltanet+attention@3+mamba@0"),
        ("deltanet+mamba+attention@1", (D, A, D, M), "deltanet+mamba+attention@1"),
        (OmegaConf.create([D, M]), (D, M, D, M), "deltanet+mamba"),
    ],
    ids=str,
)
def test_every_form_names_each_layer(pattern: Any, names: tuple[str, ...], spelled: str) -> None:
    assert expand_pattern(pattern, 4) == names
    assert spell_pattern(pattern) == spelled
    assert expand_pattern(spelled, 4) == names
    assert spell_pattern(spelled) == spelled


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("3xdeltanet+2xattention", "names 5 layers in turn and the model has 4"),
        ("deltanet+attention@4", "names layer 4 and the model's layers are 0 to 3"),
        ("longhron+deltanet", "unknown mixer 'longhron': did you mean 'longhorn'"),
        ("attention@1", "leaves layers without a mixer"),
    ],
    ids=str,
)
def test_what_names_no_layers_is_refused(pattern: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand_pattern(pattern, 4)


def test_options_reach_the_mixers_that_they_name() -> None:
    arguments: dict[str, Any] = {"vocab_size": 11, "d_model": 16, "depth": 4, "mixer": "deltanet+attention"}
    options = {"attention": {"num_heads": 2}, "deltanet": {"head_dim": 4}}
    model = TokenBackbone(**arguments, mixer_options=options)
    assert [block.mixer.num_heads for block in model.blocks] == [4, 2, 4, 2]
    with pytest.raises(ValueError, match="mixer 'attention' has no option state_size"):
        TokenBackbone(**arguments, mixer_options={"attention": {"state_size": 2}})
