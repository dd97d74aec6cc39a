"""Mamba and Mamba-2 as the library transformers saves them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from longseq.tools.hugging_face.families.family import (
    SILU,
    Family,
    Names,
    Values,
    common_arguments,
    common_config,
    layers_of,
)

EPS = "layer_norm_epsilon"
_ENDS = {"embedding": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"}
_COMMON: Values = {EPS: 1e-5, "expand": 2, "conv_kernel": 4, "state_size": 16}
_EXPECTED = {"hidden_act": SILU, "use_bias": (False,), "use_conv_bias": (True,)}


def _read(values: Values, *, mixer: str) -> dict[str, Any]:
    sizes = {"expand": values["expand"], "state_size": values["state_size"], "convolution_width": values["conv_kernel"]}
    return {
        **common_arguments(values, eps=EPS),
        "mixer": mixer,
        "mixer_options": {**sizes, **(_read_mamba if mixer == "mamba" else _read_mamba2)(values)},
        "mlp": None,
    }


def _write(arguments: Values, *, mixer: str) -> dict[str, Any]:
    options = layers_of(arguments)[1][mixer]
    sizes = {"expand": options["expand"], "state_size": options["state_size"]}
    return {
        **common_config(arguments, eps=EPS),
        **sizes,
        "conv_kernel": options["convolution_width"],
        **(_write_mamba if mixer == "mamba" else _write_mamba2)(arguments, options),
    }


def _read_mamba(values: Values) -> dict[str, Any]:
    rank = values["time_step_rank"]
    return {"rate_rank": math.ceil(values["hidden_size"] / 16) if rank == "auto" else rank}


def _write_mamba(arguments: Values, options: Values) -> dict[str, Any]:
    return {"time_step_rank": options["rate_rank"], "intermediate_size": options["expand"] * arguments["d_model"]}


def _read_mamba2(values: Values) -> dict[str, Any]:
    limits = [limit["__float__"] if isinstance(limit, dict) else limit for limit in values["time_step_limit"]]
    if [float(limit) for limit in limits] != [0.0, math.inf]:
        raise ValueError(f"time_step_limit={limits} is not supported, only (0, inf)")
    return {"head_dim": values["head_dim"], "n_groups": values["n_groups"], "norm_eps": values[EPS]}


def _write_mamba2(arguments: Values, options: Values) -> dict[str, Any]:
    head_dim = options["head_dim"]
    heads = options["expand"] * arguments["d_model"] // head_dim
    return {"head_dim": head_dim, "num_heads": heads, "n_groups": options["n_groups"]}


def _mamba_names(mixer: Any) -> Names:
    return {
        **_same("in_proj", "x_proj", "out_proj", "A_log", "D"),
        "mixer.convolution": "mixer.conv1d",
        "mixer.rate_proj": "mixer.dt_proj",
        "mixer.rate_bias": "mixer.dt_proj.bias",
    }


def _mamba2_names(mixer: Any) -> Names:
    return {**_same("in_proj", "out_proj", "norm", "A_log", "D", "dt_bias"), "mixer.convolution": "mixer.conv1d"}


def _same(*names: str) -> dict[str, str]:
    return {f"mixer.{name}": f"mixer.{name}" for name in names}


MAMBAS = (
    Family(
        model_type="mamba",
        architecture="MambaForCausalLM",
        arguments=partial(_read, mixer="mamba"),
        config=partial(_write, mixer="mamba"),
        mixers=("mamba",),
        mixer_names=_mamba_names,
        block_names={"norm1": "norm"},
        defaults={**_COMMON, "tie_word_embeddings": True, "time_step_rank": "auto"},
        expected=_EXPECTED,
        layer="backbone.layers.{i}.",
        ends=_ENDS,
    ),
    Family(
        model_type="mamba2",
        architecture="Mamba2ForCausalLM",
        arguments=partial(_read, mixer="mamba2"),
        config=partial(_write, mixer="mamba2"),
        mixers=("mamba2",),
        mixer_names=_mamba2_names,
        block_names={"norm1": "norm"},
        defaults={
            **_COMMON, "tie_word_embeddings": False, "state_size": 128, "head_dim": 64, "n_groups": 8,
            "time_step_limit": (0.0, math.inf),
        },
        expected=_EXPECTED,
        layer="backbone.layers.{i}.",
        ends=_ENDS,
    ),
)  # fmt: skip
