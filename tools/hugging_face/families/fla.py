"""The delta family, GLA and GSA as the library flash-linear-attention saves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from longseq.tools.hugging_face.families.family import (
    MLP,
    SILU,
    Family,
    Names,
    Values,
    common_arguments,
    common_config,
    layers_of,
    mlp_width,
)

# What a mixer's options are in config.json, and back.
Options = Callable[[Values], dict[str, Any]]


def _read(values: Values, *, mixer: str, options: Options) -> dict[str, Any]:
    width, hidden = values["hidden_size"], values["intermediate_size"]
    if hidden is None:  # two thirds of the ratio, rounded up to a multiple of 256
        hidden = -(-int(width * (values["hidden_ratio"] or 4) * 2 / 3) // 256) * 256
    return {
        **common_arguments(values, eps="norm_eps"),
        "mixer": mixer,
        "mixer_options": {"norm_eps": values["norm_eps"], **options(values)},
        "mlp_ratio": hidden / width,
    }


def _write(arguments: Values, *, mixer: str, options: Options) -> dict[str, Any]:
    _, own = layers_of(arguments)
    return {
        **common_config(arguments, eps="norm_eps"),
        "hidden_act": "swish",
        "intermediate_size": mlp_width(arguments),
        **options({**own[mixer], "d_model": arguments["d_model"]}),
    }


def _family(
    model_type: str,
    architecture: str,
    mixer: str,
    *,
    read: Options,
    write: Options,
    names: Callable[[Any], Names],
    expected: Mapping[str, tuple[Any, ...]],
    **defaults: Any,
) -> Family:
    common = {"norm_eps": 1e-6, "tie_word_embeddings": False, "intermediate_size": None, "hidden_ratio": 4}
    return Family(
        model_type=model_type,
        architecture=architecture,
        arguments=partial(_read, mixer=mixer, options=read),
        config=partial(_write, mixer=mixer, options=write),
        mixers=(mixer,),
        mixer_names=names,
        block_names={"norm1": "attn_norm", "norm2": "mlp_norm", **MLP},
        defaults={**common, **defaults},
        expected={"hidden_act": SILU, "attn": (None,), "attnres_block_size": (None,), **expected},
        ends={"embedding": "model.embeddings", "norm": "model.norm", "head": "lm_head"},
    )


_FEATURE_MAPS = {"silu": "silu", "relu": "relu", "elu": "elu_plus_one", "identity": "identity"}
_SLOT_MAPS = {"swish": "silu", "relu": "relu"}


def _known(maps: Mapping[str, str], name: str, key: str) -> str:
    if name not in maps:
        raise ValueError(f"{key}={name} is not supported, only {', '.join(maps)}")
    return maps[name]


def _spelled(maps: Mapping[str, str], name: str) -> str:
    """The inverse of `_known`; a map that they do not have keeps its name, which `_known` then refuses."""
    return next((theirs for theirs, ours in maps.items() if ours == name), name)


def _read_delta(values: Values) -> dict[str, Any]:
    return {
        "num_heads": values["num_heads"],
        "convolution_width": values["conv_size"] if values["use_short_conv"] else 0,
        "feature_map": _known(_FEATURE_MAPS, values["qk_activation"], "qk_activation"),
        "negative_eigenvalues": values["allow_neg_eigval"],
    }


def _write_delta(options: Values) -> dict[str, Any]:
    return {
        **_write_convolution(options),
        "num_heads": options["num_heads"],
        "qk_activation": _spelled(_FEATURE_MAPS, options["feature_map"]),
        "allow_neg_eigval": options["negative_eigenvalues"],
    }


def _write_convolution(options: Values) -> dict[str, Any]:
    width = options["convolution_width"]
    return {"use_short_conv": width > 0, "conv_size": width or 4}


def _delta_names(mixer: Any) -> Names:
    width = mixer.d_model
    parts = {"attn.q_proj": width, "attn.k_proj": width, "attn.v_proj": width, "attn.b_proj": mixer.num_heads}
    return {
        "mixer.in_proj": parts,
        "mixer.convolution": {"attn.q_conv1d": width, "attn.k_conv1d": width, "attn.v_conv1d": width},
        "mixer.norm": "attn.o_norm",
        "mixer.out_proj": "attn.o_proj",
    }


def _read_heads(values: Values) -> dict[str, Any]:
    heads = values["num_heads"]
    return {
        "num_heads": heads,
        "num_value_heads": values["num_v_heads"] or heads,
        "expand_k": heads * values["head_dim"] / values["hidden_size"],
        "expand_v": values["expand_v"],
        "convolution_width": values["conv_size"] if values["use_short_conv"] else 0,
    }


def _write_heads(options: Values) -> dict[str, Any]:
    return {
        **_write_convolution(options),
        "num_heads": options["num_heads"],
        "num_v_heads": options["num_value_heads"],
        "head_dim": round(options["expand_k"] * options["d_model"] / options["num_heads"]),
        "expand_v": options["expand_v"],
    }


def _read_gated_delta(values: Values, *, gate: str = "use_gate") -> dict[str, Any]:
    return {**_read_heads(values), "output_gate": values[gate]}


def _write_gated_delta(options: Values, *, gate: str = "use_gate") -> dict[str, Any]:
    return {**_write_heads(options), gate: options["output_gate"]}


def _gated_delta_names(mixer: Any) -> Names:
    keys, values, heads, steps = mixer.key_width, mixer.value_width, mixer.num_value_heads, mixer.steps
    mixed = {"q": keys, "k": steps * keys, "v": steps * values}
    gates = {"attn.b_proj": steps * heads, "attn.a_proj": heads}
    return {
        "mixer.in_proj": {
            **{f"attn.{name}_proj": rows for name, rows in mixed.items()},
            **gates,
            **({"attn.g_proj": values} if mixer.output_gate else {}),
        },
        "mixer.convolution": {f"attn.{name}_conv1d": rows for name, rows in mixed.items()},
        "mixer.A_log": "attn.A_log",
        "mixer.dt_bias": "attn.dt_bias",
        "mixer.norm": "attn.o_norm",
        "mixer.out_proj": "attn.o_proj",
    }


def _with_negative(read: Options, write: Options) -> tuple[Options, Options]:
    """Options of a mixer with `negative_eigenvalues`."""
    return (
        lambda values: {**read(values), "negative_eigenvalues": values["allow_neg_eigval"]},
        lambda options: {**write(options), "allow_neg_eigval": options["negative_eigenvalues"]},
    )


def _read_product(values: Values) -> dict[str, Any]:
    return {**_read_gated_delta(values, gate="use_output_gate"), "steps": values["num_householder"]}


def _write_product(options: Values) -> dict[str, Any]:
    own = {"use_forget_gate": True, "num_householder": options["steps"]}
    return {**_write_gated_delta(options, gate="use_output_gate"), **own}


def _read_comba(values: Values) -> dict[str, Any]:
    return {**_read_gated_delta(values, gate="use_output_gate"), "correction": values["correction_factor"]}


def _write_comba(options: Values) -> dict[str, Any]:
    return {**_write_gated_delta(options, gate="use_output_gate"), "correction_factor": options["correction"]}


def _comba_names(mixer: Any) -> Names:
    return {**_gated_delta_names(mixer), "mixer.decay": "attn.decay", "mixer.D": "attn.D"}


def _read_kda(values: Values) -> dict[str, Any]:
    return {**_read_heads(values), "gate_bound": values["lower_bound"]}


def _write_kda(options: Values) -> dict[str, Any]:
    bound = options["gate_bound"]
    return {**_write_heads(options), "safe_gate": bound is not None, "lower_bound": bound}


def _kda_names(mixer: Any) -> Names:
    keys, heads, value = mixer.key_width, mixer.num_value_heads, mixer.value_dim
    mixed = {"q": keys, "k": keys, "v": heads * value}
    others = {"attn.b_proj": heads, "attn.f_proj.0": value, "attn.g_proj.0": value}
    return {
        "mixer.in_proj": {**{f"attn.{name}_proj": rows for name, rows in mixed.items()}, **others},
        "mixer.convolution": {f"attn.{name}_conv1d": rows for name, rows in mixed.items()},
        "mixer.decay_proj": "attn.f_proj.1",
        "mixer.gate_proj": "attn.g_proj.1",
        "mixer.A_log": "attn.A_log",
        "mixer.dt_bias": "attn.dt_bias",
        "mixer.norm": "attn.o_norm",
        "mixer.out_proj": "attn.o_proj",
    }


def _read_gla(values: Values) -> dict[str, Any]:
    return {
        "num_heads": values["num_heads"],
        "num_kv_heads": values["num_kv_heads"] or values["num_heads"],
        "expand_k": values["expand_k"],
        "expand_v": values["expand_v"],
        "feature_map": "identity" if values["feature_map"] is None else values["feature_map"],
        "output_gate": values["use_output_gate"],
    }


def _write_gla(options: Values) -> dict[str, Any]:
    same = ("num_heads", "num_kv_heads", "expand_k", "expand_v")
    return {
        **{key: options[key] for key in same},
        "feature_map": None if options["feature_map"] == "identity" else options["feature_map"],
        "use_output_gate": options["output_gate"],
        "fuse_norm": True,
    }


def _gla_names(mixer: Any) -> Names:
    names = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.g_proj", "attn.gk_proj.0")
    return {
        "mixer.in_proj": {name: rows for name, rows in zip(names, mixer.widths, strict=True) if rows},
        "mixer.decay_proj": "attn.gk_proj.1",
        "mixer.norm": "attn.g_norm_swish_gate" if mixer.output_gate else "attn.g_norm",
        "mixer.out_proj": "attn.o_proj",
    }


def _read_gsa(values: Values) -> dict[str, Any]:
    heads = values["num_heads"]
    return {
        "num_heads": heads,
        "num_kv_heads": values["num_kv_heads"] or heads,
        "num_slots": values["num_slots"] or values["hidden_size"] // heads,
        "gate_temperature": float(values["gate_logit_normalizer"]),
        "feature_map": _known(_SLOT_MAPS, values["feature_map"], "feature_map"),
        "norm_eps": 1e-5,  # fla's fused norm and projection has this eps, whatever config.json says
    }


def _write_gsa(options: Values) -> dict[str, Any]:
    return {
        "num_heads": options["num_heads"],
        "num_kv_heads": options["num_kv_heads"],
        "num_slots": options["num_slots"],
        "gate_logit_normalizer": options["gate_temperature"],
        "feature_map": _spelled(_SLOT_MAPS, options["feature_map"]),
    }


def _gsa_names(mixer: Any) -> Names:
    queries, keys = mixer.num_heads * mixer.head_dim, mixer.value_width
    parts = {"attn.q_proj": queries, "attn.k_proj": keys, "attn.v_proj": keys, "attn.f_proj": mixer.gate_width}
    return {"mixer.in_proj": parts, "mixer.norm": "attn.g_norm", "mixer.out_proj": "attn.o_proj"}


_GATED_DELTA, _PRODUCT, _KDA = (
    dict(zip(("read", "write"), _with_negative(*pair), strict=True))
    for pair in ((_read_gated_delta, _write_gated_delta), (_read_product, _write_product), (_read_kda, _write_kda))
)
_CONVOLVED: dict[str, Any] = {
    "num_v_heads": None,
    "expand_v": 2.0,
    "use_short_conv": True,
    "conv_size": 4,
    "allow_neg_eigval": False,
}

FLA = (
    _family(
        "delta_net",
        "DeltaNetForCausalLM",
        "deltanet",
        read=_read_delta,
        write=_write_delta,
        names=_delta_names,
        expected={
            "expand_k": (1,), "expand_v": (1,), "use_gate": (False,), "use_beta": (True,), "qk_norm": ("l2",),
            "use_output_norm": (True,),
        },
        use_short_conv=True,
        conv_size=4,
        qk_activation="silu",
        allow_neg_eigval=False,
    ),
    _family(
        "gated_deltanet",
        "GatedDeltaNetForCausalLM",
        "gated_deltanet",
        **_GATED_DELTA,
        names=_gated_delta_names,
        expected={"output_gate_activation": SILU},
        use_gate=True,
        **_CONVOLVED,
    ),
    _family(
        "gated_deltaproduct",
        "GatedDeltaProductForCausalLM",
        "delta_product",
        **_PRODUCT,
        names=_gated_delta_names,
        expected={"use_forget_gate": (True,)},
        use_forget_gate=False,
        use_output_gate=True,
        num_householder=1,
        **_CONVOLVED,
    ),
    _family(
        "comba",
        "CombaForCausalLM",
        "comba",
        read=_read_comba,
        write=_write_comba,
        names=_comba_names,
        expected={"use_output_correction": (True,), "use_inner_decay": (True,)},
        use_output_gate=True,
        correction_factor=1.0,
        **_CONVOLVED,
    ),
    _family(
        "kda",
        "KDAForCausalLM",
        "kda",
        **_KDA,
        names=_kda_names,
        expected={},
        lower_bound=None,
        **{**_CONVOLVED, "expand_v": 1.0},
    ),
    _family(
        "gla",
        "GLAForCausalLM",
        "gla",
        read=_read_gla,
        write=_write_gla,
        names=_gla_names,
        expected={
            "use_short_conv": (False,), "clamp_min": (None,), "use_gk": (True,), "use_gv": (False,),
            "elementwise_affine": (True,), "fuse_norm": (True,),
        },
        num_kv_heads=None,
        expand_k=0.5,
        expand_v=1.0,
        feature_map=None,
        use_output_gate=True,
    ),
    _family(
        "gsa",
        "GSAForCausalLM",
        "gsa",
        read=_read_gsa,
        write=_write_gsa,
        names=_gsa_names,
        expected={
            "use_short_conv": (False,), "clamp_min": (None,), "clamp_max": (None,), "elementwise_affine": (True,),
            "expand_k": (1,), "expand_v": (1,), "use_output_gate": (False,), "use_norm": (True,),
        },
        num_kv_heads=None,
        num_slots=64,
        gate_logit_normalizer=8,
        feature_map="swish",
    ),
)  # fmt: skip
