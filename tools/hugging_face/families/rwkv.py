"""RWKV-7 as flash-linear-attention saves it, and as its authors' RWKV-LM does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from longseq.tools.hugging_face.families.family import (
    Family,
    Names,
    Values,
    common_arguments,
    common_config,
    layers_of,
    mlp_width,
)
from longseq.tools.hugging_face.weights import Weight

# Of fla's keys and weights, by our names.
_RANKS = {"decay": "decay", "rate": "a", "value": "v", "gate": "gate"}
_LOW_RANK = {"decay": "w", "rate": "a", "value": "v", "gate": "g"}


def _read(values: Values) -> dict[str, Any]:
    width, hidden = values["hidden_size"], values["intermediate_size"]
    if hidden is None:  # rounded up to a multiple of 32
        hidden = -(-int(width * (values["hidden_ratio"] or 4)) // 32) * 32
    heads = width // values["head_dim"] if values["head_dim"] else values["num_heads"]
    options = {f"{ours}_rank": values[f"{theirs}_low_rank_dim"] for ours, theirs in _RANKS.items()}
    return {
        **common_arguments(values, eps="norm_eps"),
        "mixer": "rwkv7",
        "mixer_options": {**options, "num_heads": heads, "norm_eps": width // heads * values["norm_eps"]},
        "mlp": "rwkv7",
        "mlp_ratio": hidden / width,
        "norm": "layer",
        "embedding_norm": values["norm_first"],
    }


def _write(arguments: Values) -> dict[str, Any]:
    options = layers_of(arguments)[1]["rwkv7"]
    return {
        **common_config(arguments, eps="norm_eps"),
        "hidden_act": "sqrelu",
        "intermediate_size": mlp_width(arguments),
        "norm_first": arguments["embedding_norm"],
        "num_heads": options["num_heads"],
        "head_dim": arguments["d_model"] // options["num_heads"],
        **{f"{theirs}_low_rank_dim": options[f"{ours}_rank"] for ours, theirs in _RANKS.items()},
    }


def _mixer_names(mixer: Any) -> Names:
    low_rank = {
        f"mixer.{ours}_{part}": f"attn.{theirs}_lora.lora.{name}"
        for ours, theirs in _LOW_RANK.items()
        for part, name in (("down", "0.weight"), ("up", "2.weight"), ("base", "2.bias"))
    }
    return {
        "mixer.mix": {f"attn.x_{part}": 1 for part in "rwkvag"},
        **low_rank,
        "mixer.receptance": "attn.r_proj",
        "mixer.key": "attn.k_proj",
        "mixer.value": "attn.v_proj",
        "mixer.out_proj": "attn.o_proj",
        "mixer.key_scale": "attn.k_k",
        "mixer.key_rate": "attn.k_a",
        "mixer.bonus": "attn.r_k",
        "mixer.norm": "attn.g_norm",
    }


# With fuse_norm, fla divides keys by √(‖k‖² + 1e-6), unlike RWKV-LM and ours: less than bfloat16 rounds.
RWKV7 = Family(
    model_type="rwkv7",
    architecture="RWKV7ForCausalLM",
    arguments=_read,
    config=_write,
    mixers=("rwkv7",),
    mixer_names=_mixer_names,
    block_names={
        "norm1": "attn_norm", "norm2": "ffn_norm", "mlp.mix": "ffn.x_k", "mlp.fc1": "ffn.key", "mlp.fc2": "ffn.value",
    },
    defaults={
        "norm_eps": 1e-5, "tie_word_embeddings": False, "intermediate_size": None, "hidden_ratio": 4, "head_dim": 64,
        "norm_first": True, "decay_low_rank_dim": 64, "a_low_rank_dim": 64, "v_low_rank_dim": 16,
        "gate_low_rank_dim": 128,
    },
    expected={"hidden_act": ("sqrelu",), "norm_bias": (True,), "attn": (None,)},
    transposed=("lora.0.weight", "lora.2.weight"),
    ends={
        "embedding": "model.embeddings", "embedding_norm": "model.layers.0.pre_norm", "norm": "model.norm",
        "head": "lm_head",
    },
)  # fmt: skip

# Patterns of RWKV-LM's names, and what they are in fla's; each takes the name that those before it have left.
_RENAMED = (
    (r"^emb\.", "model.embeddings."),
    (r"^head\.", "lm_head."),
    (r"^ln_out\.", "model.norm."),
    (r"^blocks\.", "model.layers."),
    (r"\.ln0\.", ".pre_norm."),
    (r"\.ln1\.", ".attn_norm."),
    (r"\.ln2\.", ".ffn_norm."),
    (r"\.att\.ln_x\.", ".attn.g_norm."),
    (r"\.att\.([rkvo])[a-z]+\.weight$", r".attn.\1_proj.weight"),
    (r"\.att\.([wavg])0$", r".attn.\1_lora.lora.2.bias"),
    (r"\.att\.([wavg])1$", r".attn.\1_lora.lora.0.weight"),
    (r"\.att\.([wavg])2$", r".attn.\1_lora.lora.2.weight"),
    (r"\.att\.", ".attn."),
)


def read_rwkv(file: Path) -> tuple[dict[str, Any], dict[str, Weight]]:
    """The arguments of `TokenBackbone` for a file of RWKV-LM, and its weights by the names of `RWKV7`."""
    found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    vocabulary, width = found["emb.weight"].shape
    matrices = {"decay": "0.att.w1", "a": "0.att.a1", "v": "1.att.v1", "gate": "0.att.g1"}
    ranks = {key: found.get(f"blocks.{name}") for key, name in matrices.items()}  # a model of one layer has no v
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": 1 + max(int(name.split(".")[1]) for name in found if name.startswith("blocks.")),
        "head_dim": found["blocks.0.att.r_k"].shape[1],
        "intermediate_size": found["blocks.0.ffn.key.weight"].shape[0],
        **{f"{key}_low_rank_dim": matrix.shape[1] for key, matrix in ranks.items() if matrix is not None},
    }
    arguments = RWKV7.read_config(sizes)
    arguments["mixer_options"]["norm_eps"] = 64e-5  # whatever the size of the heads
    weights = {}
    for name, tensor in found.items():
        if re.match(r"blocks\.0\.att\.v[012]$", name):  # the first layer of some files has them and ignores them
            continue
        for pattern, theirs in _RENAMED:
            name = re.sub(pattern, theirs, name)
        weights[name] = Weight.of(tensor.mT if name.endswith(RWKV7.transposed) else tensor)
    return arguments, weights
