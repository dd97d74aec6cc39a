"""Llama, Mistral, Ministral, Qwen3 and OLMo 2 as the library transformers saves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from longseq.tools.hugging_face.families.family import (
    MLP,
    SILU,
    Family,
    Names,
    Values,
    choose_layers,
    common_arguments,
    common_config,
    layers_of,
    mlp_width,
    read_rotary,
)

FULL, SLIDING = "full_attention", "sliding_attention"

# The window of Ministral by default.
_MINISTRAL_WINDOW = 4096

# What transformers reads for all of these families: its masks ask `is_causal`, its caches of keys the other two.
_EXPECTED = {"hidden_act": SILU, "is_causal": (True,), "attention_chunk_size": (None,), "kv_sharing_modes": (None,)}

# Llama and OLMo 2 have no windows, and yet their caches would drop what is outside of one.
_NO_WINDOW = {"sliding_window": (None,)}

# The window of each layer, None for a layer that sees all earlier tokens; and the keys of config.json that tell them.
Windows = Sequence[int | None]


def _layer_types(values: Values) -> Sequence[str] | None:
    """The types of the layers, None if config.json does not tell them. ValueError for types that we do not have."""
    types = values.get("layer_types")
    if types is None:
        return None
    if strange := set(types) - {FULL, SLIDING}:
        raise ValueError(f"layers of the type {min(strange)} are not supported")
    if len(types) != values["num_hidden_layers"]:
        raise ValueError(f"layer_types has {len(types)} layers, and num_hidden_layers={values['num_hidden_layers']}")
    return types


def _no_windows(values: Values) -> Windows:
    if SLIDING in (_layer_types(values) or ()):
        raise ValueError(f"layers of the type {SLIDING} are not supported for model_type={values['model_type']}")
    return [None] * values["num_hidden_layers"]


def _sliding_window(values: Values) -> int | None:
    """The window that config.json states; some files have 7.0."""
    window = values["sliding_window"]
    return None if window is None else int(window)


def _windows_of(values: Values, window: int | None, types: Sequence[str]) -> Windows:
    """The windows of layers by the types in config.json, or by `types` if it has none."""
    given = _layer_types(values)
    if window is None and SLIDING in (given or ()):
        raise ValueError(f"layer_types has layers of the type {SLIDING}, and no sliding_window is in use")
    return [window if kind == SLIDING else None for kind in (types if given is None else given)]


def _types_of(windows: Windows) -> dict[str, Any]:
    return {
        "sliding_window": next((window for window in windows if window is not None), None),
        "layer_types": [SLIDING if window else FULL for window in windows],
    }


def _mistral_windows(values: Values) -> Windows:
    return _windows_of(values, _sliding_window(values), [SLIDING] * values["num_hidden_layers"])


def _write_mistral_windows(windows: Windows) -> dict[str, Any]:
    # With layer_types transformers takes the file for one of Ministral, which not all of its versions have. Those that
    # have it save such a model as Ministral.
    return _types_of(windows) if len(set(windows)) > 1 else {"sliding_window": windows[0]}


def _write_ministral_windows(windows: Windows) -> dict[str, Any]:
    types = _types_of(windows)
    # transformers asks for a window also where no layer has one.
    return {**types, "sliding_window": types["sliding_window"] or _MINISTRAL_WINDOW}


def _qwen_windows(values: Values) -> Windows:
    depth, first = values["num_hidden_layers"], values["max_window_layers"]
    window = _sliding_window(values) if values["use_sliding_window"] else None
    return _windows_of(values, window, [FULL if index < first else SLIDING for index in range(depth)])


def _write_qwen_windows(windows: Windows) -> dict[str, Any]:
    return {
        **_types_of(windows),
        "use_sliding_window": any(windows),
        "max_window_layers": 0 if any(windows) else len(windows),
    }


def _read_transformer(
    values: Values, *, qk_norm: str, norm_order: str, windows: Callable[[Values], Windows]
) -> dict[str, Any]:
    heads, width = values["num_attention_heads"], values["hidden_size"]
    attention = {
        "num_heads": heads,
        "num_kv_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or width // heads,
        "qkv_bias": values["attention_bias"],
        "out_bias": values["attention_bias"],
        "qk_norm": qk_norm,
        **({} if qk_norm == "none" else {"norm_eps": values["rms_norm_eps"]}),
        **read_rotary(values),
    }
    spans = windows(values)
    layers = ["attention" if span is None else "window_attention" for span in spans]
    window = next((span for span in spans if span is not None), None)
    return {
        **common_arguments(values, eps="rms_norm_eps"),
        **choose_layers(layers, {"attention": attention, "window_attention": {**attention, "window": window}}),
        "mlp_ratio": values["intermediate_size"] / width,
        "mlp_bias": values["mlp_bias"],
        "norm_order": norm_order,
    }


def _write_transformer(
    arguments: Values, *, windows: Callable[[Windows], dict[str, Any]], lacks: Sequence[str]
) -> dict[str, Any]:
    layers, options = layers_of(arguments)
    attention = options[layers[0]]
    config = {
        **common_config(arguments, eps="rms_norm_eps"),
        "intermediate_size": mlp_width(arguments),
        "mlp_bias": arguments["mlp_bias"],
        "num_attention_heads": attention["num_heads"],
        "num_key_value_heads": attention["num_kv_heads"],
        "head_dim": attention["head_dim"],
        "attention_bias": attention["qkv_bias"],
        "rope_theta": attention["rotary_base"],
        "rope_scaling": attention["rotary_scaling"],
        **windows([options[name].get("window") for name in layers]),
    }
    return {key: value for key, value in config.items() if key not in lacks}


def _attention_names(mixer: Any) -> Names:
    queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    return {
        "mixer.in_proj": {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys},
        "mixer.out_proj": "self_attn.o_proj",
        "mixer.q_norm": "self_attn.q_norm",
        "mixer.k_norm": "self_attn.k_norm",
    }


def _transformer(
    model_type: str,
    architecture: str,
    *,
    eps: float,
    qk_norm: str = "none",
    norm_order: str = "pre",
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    read_windows: Callable[[Values], Windows] = _no_windows,
    write_windows: Callable[[Windows], dict[str, Any]] = lambda windows: {},
    lacks: Sequence[str] = (),
    expected: Mapping[str, tuple[Any, ...]] | None = None,
    **defaults: Any,
) -> Family:
    """A transformer of the library transformers; `lacks` are keys that its config.json does not have."""
    common = {"rms_norm_eps": eps, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}
    return Family(
        model_type=model_type,
        architecture=architecture,
        arguments=partial(_read_transformer, qk_norm=qk_norm, norm_order=norm_order, windows=read_windows),
        config=partial(_write_transformer, windows=write_windows, lacks=lacks),
        mixers=("attention", "window_attention"),
        mixer_names=_attention_names,
        block_names={"norm1": norms[0], "norm2": norms[1], **MLP},
        defaults={**common, **defaults},
        expected={**_EXPECTED, **(expected or {})},
    )


TRANSFORMERS = (
    _transformer("llama", "LlamaForCausalLM", eps=1e-6, expected=_NO_WINDOW),
    _transformer(
        "mistral",
        "MistralForCausalLM",
        eps=1e-6,
        read_windows=_mistral_windows,
        write_windows=_write_mistral_windows,
        lacks=("attention_bias", "mlp_bias"),
        sliding_window=4096,
    ),
    _transformer(
        "ministral",
        "MinistralForCausalLM",
        eps=1e-6,
        read_windows=_mistral_windows,
        write_windows=_write_ministral_windows,
        lacks=("attention_bias", "mlp_bias"),
        sliding_window=_MINISTRAL_WINDOW,
    ),
    _transformer(
        "qwen3",
        "Qwen3ForCausalLM",
        eps=1e-6,
        qk_norm="head",
        read_windows=_qwen_windows,
        write_windows=_write_qwen_windows,
        lacks=("mlp_bias",),
        head_dim=128,
        use_sliding_window=False,
        sliding_window=4096,
        max_window_layers=28,
    ),
    _transformer(
        "olmo2",
        "Olmo2ForCausalLM",
        eps=1e-5,
        qk_norm="all",
        norm_order="post",
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        lacks=("mlp_bias", "head_dim"),
        expected=_NO_WINDOW,
    ),
)
