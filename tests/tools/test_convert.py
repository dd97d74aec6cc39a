"""longseq convert: models of other libraries become ours and go back, with the same weights and logits."""

from __future__ import annotations

import json
import math
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fla_reference import Fla, load
from safetensors.torch import load_file, save_file
from torch import Tensor

import longseq
import longseq.tools.hugging_face.causal_lm  # noqa: F401  enters the classes in the tables of transformers
from longseq.backbones.tokens import TokenBackbone
from longseq.tasks.text.tokenizer import tokenizer_from_dict, train_tokenizer
from longseq.tokenizer_files import BYTES
from longseq.tools.cli import main
from longseq.tools.hugging_face.conversion import change_mixer, read_model, write_family
from longseq.tools.hugging_face.families import FAMILIES

TOKENS = torch.randint(3, 50, (2, 24), generator=torch.Generator().manual_seed(0))
SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 100.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 6, "rope_parameters": LLAMA3}),
    "llama biases": (
        "Llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2, "rope_parameters": YARN}
    ),
    "mistral window": ("Mistral", {"sliding_window": 7}),
    "ministral layers": (
        "Ministral",
        {"sliding_window": 7, "head_dim": 6, "layer_types": [*["sliding_attention"] * 2, "full_attention"]},
    ),
    "qwen3 windows": (
        "Qwen3", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    "olmo2": ("Olmo2", {}),
    "mamba": ("Mamba", {"state_size": 5, "use_mambapy": False}),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 6, "chunk_size": 8}),
    "mamba2 groups": ("Mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 2, "tie_word_embeddings": True}),
}  # fmt: skip


def call(monkeypatch: pytest.MonkeyPatch, command: str, **keys: Any) -> int:
    monkeypatch.setattr("sys.argv", ["longseq", command, *(f"{key}={value}" for key, value in keys.items())])
    try:
        return main()
    except SystemExit as leaving:
        return int(leaving.code or 0)


def convert(monkeypatch: pytest.MonkeyPatch, **keys: Any) -> int:
    return call(monkeypatch, "convert", **keys)


def save_peer(family: str, folder: Path, options: dict[str, Any], **saving: Any) -> Any:
    """A random model of transformers, saved; its logits."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    attention = {} if "Mamba" in family else {key: SMALL[key] for key in SMALL if "head" in key or "inter" in key}
    sizes = {key: SMALL[key] for key in SMALL if not ("head" in key or "inter" in key)}
    config = getattr(transformers, f"{family}Config")(**{**sizes, **attention, **options})
    peer = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    peer.save_pretrained(folder, **saving)
    return peer


def same_weights(one: Path, other: Path) -> bool:
    a, b = ({name: t for path in f.glob("*.safetensors") for name, t in load_file(path).items()} for f in (one, other))
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@torch.no_grad()
def logits(folder: Path) -> Tensor:
    return longseq.from_pretrained(folder)(TOKENS)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_a_transformer_becomes_ours_and_goes_back(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, options = PEERS[name]
    save_peer(family, tmp_path / "peer", options, max_shard_size="20KB")
    assert len(list((tmp_path / "peer").glob("*.safetensors"))) > 1
    # The file's class is not always that of the object: that of Mistral knows no kinds of layers.
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "peer").eval()
    with torch.no_grad():
        expected = peer(TOKENS).logits
    assert convert(monkeypatch, source=tmp_path / "peer", output=tmp_path / "ours") == 0
    torch.testing.assert_close(logits(tmp_path / "ours"), expected, rtol=1e-4, atol=1e-4)
    assert convert(monkeypatch, source=tmp_path / "ours", output=tmp_path / "back", format=family.lower()) == 0
    assert same_weights(tmp_path / "peer", tmp_path / "back")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(again) is type(peer)
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, expected)
    kept = json.loads((tmp_path / "back" / "config.json").read_text())
    assert kept["max_position_embeddings"] == 64, "keys that our models do not have return"


FLA: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deltanet": ("delta_net", "DeltaNet", {"num_heads": 2, "allow_neg_eigval": True, "intermediate_size": 40}),
    "deltanet without convolution": ("delta_net", "DeltaNet", {"num_heads": 4, "use_short_conv": False}),
    "deltanet elu": ("delta_net", "DeltaNet", {"num_heads": 2, "qk_activation": "elu", "norm_eps": 1e-3}),
    "gated_deltanet": ("gated_deltanet", "GatedDeltaNet", {"num_heads": 2, "head_dim": 12}),
    "gated_deltanet without gate": (
        "gated_deltanet", "GatedDeltaNet", {"num_heads": 2, "head_dim": 8, "expand_v": 1.5, "use_gate": False}
    ),
    "gated_deltanet of more values": (
        "gated_deltanet", "GatedDeltaNet", {"num_heads": 2, "num_v_heads": 6, "head_dim": 8, "expand_v": 1.0}
    ),
    "gated_deltanet of negative eigenvalues": (
        "gated_deltanet", "GatedDeltaNet", {"num_heads": 2, "head_dim": 12, "allow_neg_eigval": True}
    ),
    "delta_product": (
        "gated_deltaproduct", "GatedDeltaProduct",
        {"num_heads": 2, "head_dim": 12, "num_householder": 3, "use_forget_gate": True, "allow_neg_eigval": True},
    ),
    "comba": ("comba", "Comba", {"num_heads": 2, "head_dim": 12}),
    "kda": ("kda", "KDA", {"num_heads": 2, "head_dim": 16}),
    "kda of more values": ("kda", "KDA", {"num_heads": 2, "num_v_heads": 4, "head_dim": 12, "expand_v": 0.5}),
    "rwkv7": ("rwkv7", "RWKV7", {"head_dim": 16, "fuse_norm": False}),
    "rwkv7 without its first norm": (
        "rwkv7", "RWKV7",
        {"head_dim": 8, "fuse_norm": False, "norm_first": False, "norm_eps": 1e-3, "v_low_rank_dim": 3},
    ),
    "gla": ("gla", "GLA", {"num_heads": 2, "tie_word_embeddings": True}),
    "gla grouped": (
        "gla", "GLA", {"num_heads": 4, "num_kv_heads": 2, "feature_map": "relu", "use_output_gate": False}
    ),
    "gsa": ("gsa", "GSA", {"num_heads": 2, "num_slots": 6, "feature_map": "swish"}),
    "gsa grouped": ("gsa", "GSA", {"num_heads": 4, "num_kv_heads": 1, "num_slots": 6, "feature_map": "relu"}),
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("name", FLA)
def test_a_model_of_fla_becomes_ours_and_goes_back(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, family, options = FLA[name]
    load("fla.models")
    fla = Fla(monkeypatch)
    {
        "delta_net": fla.recur_deltanet,
        "gated_deltanet": fla.recur_gated_deltanet,
        "gated_deltaproduct": fla.recur_delta_product,
        "comba": fla.recur_comba,
        "kda": fla.recur_kda,
        "rwkv7": fla.recur_rwkv7,
        "gla": partial(fla.recur_gla, "gla"),
        "gsa": fla.recur_gsa,
    }[module]()
    mlp = load("fla.modules.mlp")
    monkeypatch.setattr(mlp, "swiglu", lambda gate, x: torch.nn.functional.silu(gate) * x)
    models = load("fla.models")
    torch.manual_seed(0)
    config = getattr(models, f"{family}Config")(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, fuse_swiglu=False, fuse_cross_entropy=False, **options
    )
    peer = getattr(models, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        expected = peer(TOKENS, use_cache=False).logits
    peer.save_pretrained(tmp_path / "peer")
    assert convert(monkeypatch, source=tmp_path / "peer", output=tmp_path / "ours") == 0
    torch.testing.assert_close(logits(tmp_path / "ours"), expected, rtol=1e-4, atol=1e-4)
    assert convert(monkeypatch, source=tmp_path / "ours", output=tmp_path / "back", format=module) == 0
    assert same_weights(tmp_path / "peer", tmp_path / "back")
    again = type(peer).from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        assert torch.equal(again(TOKENS, use_cache=False).logits, expected)


def rwkv_lm(depth: int, width: int, head: int, ranks: dict[str, int], hidden: int) -> dict[str, Tensor]:
    """Random weights of RWKV-7 with the names and shapes of RWKV-LM."""
    shapes: dict[str, tuple[int, ...]] = {"emb.weight": (50, width), "head.weight": (50, width)}
    norms = [
        "blocks.0.ln0",
        "ln_out",
        *(f"blocks.{i}.{name}" for i in range(depth) for name in ("ln1", "ln2", "att.ln_x")),
    ]
    shapes |= {f"{norm}.{kind}": (width,) for norm in norms for kind in ("weight", "bias")}
    for i in range(depth):
        att = f"blocks.{i}.att."
        vectors = [*(f"x_{part}" for part in "rwkvag"), "w0", "a0", "v0", "k_k", "k_a"]
        shapes |= {att + name: (1, 1, width) for name in vectors}
        shapes |= {f"{att}{part}1": (width, rank) for part, rank in ranks.items()}
        shapes |= {f"{att}{part}2": (rank, width) for part, rank in ranks.items()}
        shapes |= {f"{att}{name}.weight": (width, width) for name in ("receptance", "key", "value", "output")}
        shapes |= {f"{att}r_k": (width // head, head), f"blocks.{i}.ffn.x_k": (1, 1, width)}
        shapes |= {f"blocks.{i}.ffn.key.weight": (hidden, width), f"blocks.{i}.ffn.value.weight": (width, hidden)}
    draw = torch.Generator().manual_seed(0)
    return {name: 0.5 * torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def read_as_rwkv_lm(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The logits `[T, vocabulary]` of RWKV-7 for `tokens [T]`, by its formulas, one token after the other."""
    p = {name: weight.squeeze() for name, weight in weights.items()}
    depth = 1 + max(int(name.split(".")[1]) for name in p if name.startswith("blocks."))
    heads, size = weights["blocks.0.att.r_k"].shape
    width = heads * size

    def norm(name: str, x: Tensor, groups: int = 1, eps: float = 1e-5) -> Tensor:
        rows = x.view(groups, -1)
        rows = (rows - rows.mean(1, keepdim=True)) / (rows.var(1, keepdim=True, correction=0) + eps).sqrt()
        return rows.flatten() * p[f"{name}.weight"] + p[f"{name}.bias"]

    last = {(i, part): torch.zeros(width, dtype=torch.float64) for i in range(depth) for part in ("att", "ffn")}
    memory = torch.zeros(depth, heads, size, size, dtype=torch.float64)  # [value, key], as published
    logits = []
    for token in tokens:
        x = norm("blocks.0.ln0", p["emb.weight"][token])
        for i in range(depth):
            block = f"blocks.{i}."
            w = {
                name.removeprefix(f"{block}att."): weight
                for name, weight in p.items()
                if name.startswith(f"{block}att")
            }
            y = norm(f"{block}ln1", x)
            mixed = {part: y + w[f"x_{part}"] * (last[i, "att"] - y) for part in "rwkvag"}
            last[i, "att"] = y
            r, k, v = (w[f"{name}.weight"] @ mixed[name[0]] for name in ("receptance", "key", "value"))
            decay = (-math.exp(-0.5) * (w["w0"] + (mixed["w"] @ w["w1"]).tanh() @ w["w2"]).sigmoid()).exp()
            rate = (w["a0"] + mixed["a"] @ w["a1"] @ w["a2"]).sigmoid()
            gate = (mixed["g"] @ w["g1"]).sigmoid() @ w["g2"]
            if i == 0:
                values = v
            else:
                v = v + (values - v) * (w["v0"] + mixed["v"] @ w["v1"] @ w["v2"]).sigmoid()
            unit = (k * w["k_k"]).view(heads, size)
            unit = unit / unit.norm(dim=1, keepdim=True)
            r, k, v, decay, rate = (
                part.view(heads, size) for part in (r, k * (1 + (rate - 1) * w["k_a"]), v, decay, rate)
            )
            erased = torch.einsum("hvk,hk,hj->hvj", memory[i], unit, unit * rate)
            memory[i] = memory[i] * decay[:, None] - erased + torch.einsum("hv,hk->hvk", v, k)
            o = norm(f"{block}att.ln_x", torch.einsum("hvk,hk->hv", memory[i], r).flatten(), heads, 64e-5)
            o = o + ((r * k * w["r_k"]).sum(1, keepdim=True) * v).flatten()
            x = x + w["output.weight"] @ (o * gate)
            y = norm(f"{block}ln2", x)
            key = y + p[f"{block}ffn.x_k"] * (last[i, "ffn"] - y)
            last[i, "ffn"] = y
            x = x + p[f"{block}ffn.value.weight"] @ (p[f"{block}ffn.key.weight"] @ key).clamp(min=0) ** 2
        logits.append(p["head.weight"] @ norm("ln_out", x))
    return torch.stack(logits)


@pytest.mark.parametrize(("depth", "head"), [(3, 8), (1, 16)])
def test_a_file_of_rwkv_lm_becomes_ours(depth: int, head: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = rwkv_lm(depth, 16, head, {"w": 3, "a": 4, "v": 5, "g": 6}, 40)
    torch.save(weights, tmp_path / "rwkv.pth")
    assert convert(monkeypatch, source=tmp_path / "rwkv.pth", output=tmp_path / "ours") == 0
    model = longseq.from_pretrained(tmp_path / "ours", dtype=torch.float64)
    with torch.no_grad():
        actual, state = model(TOKENS)
        expected = torch.stack([read_as_rwkv_lm(weights, row) for row in TOKENS])
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        step, _ = model.step(TOKENS[:, 0], state)
    longer = torch.cat((TOKENS[0], TOKENS[0, :1]))
    torch.testing.assert_close(step[0], read_as_rwkv_lm(weights, longer)[-1], rtol=1e-10, atol=1e-10)


OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "delta_net": ("deltanet", {"num_heads": 2, "feature_map": "relu"}),
    "gated_deltanet": ("gated_deltanet", {"num_heads": 2, "num_value_heads": 4, "expand_k": 1.25, "dt_max": 0.2}),
    "gated_deltaproduct": ("delta_product", {"num_heads": 2, "steps": 3, "convolution_width": 0}),
    "comba": ("comba", {"num_heads": 2, "correction": 0.02}),
    "kda": ("kda", {"num_heads": 2, "gate_bound": -5.0, "negative_eigenvalues": True}),
    "rwkv7": ("rwkv7", {"num_heads": 2, "norm_eps": 8e-5}),
    "gla": ("gla", {"num_heads": 4, "num_kv_heads": 2}),
    "gsa": ("gsa", {"num_heads": 4, "num_kv_heads": 2, "num_slots": 5}),
    "mamba": ("mamba", {"state_size": 3}),
    "mamba2": ("mamba2", {"head_dim": 8}),
}


@pytest.mark.parametrize("family", OWN)
@pytest.mark.slow
def test_a_model_of_ours_becomes_another_library_s(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixer, options = OWN[family]
    torch.manual_seed(0)
    mlp: dict[str, Any] = {"mlp_ratio": 1.25, "tie_embeddings": False}
    if family.startswith("mamba"):
        mlp = {"mlp": None, "mlp_ratio": 3.0}
    if family == "rwkv7":
        mlp |= {"mlp": "rwkv7", "norm": "layer"}
    model = TokenBackbone(vocab_size=50, d_model=16, mixer=mixer, mixer_options=options, dropout=0.1, **mlp).eval()
    model.save_pretrained(tmp_path / "ours")
    assert convert(monkeypatch, source=tmp_path / "ours", output=tmp_path / "theirs", format=family) == 0
    assert convert(monkeypatch, source=tmp_path / "theirs", output=tmp_path / "again") == 0
    assert same_weights(tmp_path / "ours", tmp_path / "again")
    assert torch.equal(logits(tmp_path / "ours"), logits(tmp_path / "again"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers saves a Llama, written without it."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    model = TokenBackbone(
        vocab_size=50, d_model=32, depth=2, mixer="attention", mlp_ratio=1.25, norm_eps=1e-6, tie_embeddings=False,
        mixer_options={"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rotary": True, "qkv_bias": False,
                       "out_bias": False},
    )  # fmt: skip
    model.save_pretrained(folder / "ours")
    with pytest.MonkeyPatch.context() as patch:
        assert convert(patch, source=folder / "ours", output=folder / "llama", format="llama") == 0
    (folder / "llama" / "tokenizer.json").write_text("{}")
    return folder / "llama"


def edited(folder: Path, target: Path, **changes: Any) -> Path:
    """A copy of a folder whose config.json has other values."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


@pytest.mark.parametrize("mixer", ["gsa", "retnet", "supra", "window_attention"])
@pytest.mark.slow
def test_attention_becomes_another_mixer(
    mixer: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As section 4.2 of the paper of GSA: what attention has is kept, and what it has not is new."""
    assert convert(monkeypatch, source=llama, output=tmp_path / "kept") == 0
    assert convert(monkeypatch, source=llama, output=tmp_path / "new", mixer=mixer) == 0
    assert (tmp_path / "new" / "tokenizer.json").read_text() == "{}"
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("kept", "new"))
    for key, weight in before.items():
        assert torch.equal(after[key][: weight.shape[0]], weight), key
    model = longseq.from_pretrained(tmp_path / "new")
    first = model.blocks[0].mixer
    assert (first.num_heads, first.num_kv_heads) == (4, 2)
    if mixer in ("gla", "retnet"):
        assert (first.feature_map, first.output_gate) == ("relu", False)
        assert first.in_proj.out_features == (4 + 2 + 2) * 6 + (16 if mixer == "gla" else 0)
    if mixer == "retnet":
        assert after.keys() - before.keys() == {f"blocks.{i}.mixer.norm.weight" for i in range(2)}
    if mixer == "supra":
        added = ("query_map.weight", "query_map.bias", "key_map.weight", "key_map.bias")
        assert after.keys() - before.keys() == {f"blocks.{i}.mixer.{name}" for i in range(2) for name in added}
        assert first.in_proj.out_features == (4 + 2 + 2) * 6
    assert logits(tmp_path / "new").isfinite().all()
    random = torch.get_rng_state()
    assert convert(monkeypatch, source=llama, output=tmp_path / "again", mixer=mixer) == 0
    assert same_weights(tmp_path / "new", tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.slow
def test_attention_becomes_gated_deltanet(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only with a key for each head: other rows would stand in the places of keys and values."""
    assert convert(monkeypatch, source=llama, output=tmp_path / "grouped", mixer="gated_deltanet") == 2
    torch.manual_seed(0)
    options = {"rotary": True, "qkv_bias": False, "out_bias": False, "num_heads": 4}
    model = TokenBackbone(vocab_size=99, d_model=32, depth=2, mixer="attention", mixer_options=options)
    model.save_pretrained(tmp_path / "ours")
    assert convert(monkeypatch, source=tmp_path / "ours", output=tmp_path / "new", mixer="gated_deltanet") == 0
    after = load_file(tmp_path / "new" / "model.safetensors")
    for key, weight in model.state_dict().items():
        assert torch.equal(after[key][: weight.shape[0]], weight), key
    assert logits(tmp_path / "new").isfinite().all()


@pytest.mark.slow
def test_half_precision_stays_half(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = edited(llama, tmp_path / "half")
    weights = {name: x.bfloat16() for name, x in load_file(source / "model.safetensors").items()}
    save_file(weights, source / "model.safetensors")
    assert convert(monkeypatch, source=source, output=tmp_path / "ours") == 0
    assert convert(monkeypatch, source=tmp_path / "ours", output=tmp_path / "back", format="llama") == 0
    assert same_weights(source, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    assert convert(monkeypatch, source=source, output=tmp_path / "gsa", mixer="gsa") == 0
    assert {x.dtype for x in load_file(tmp_path / "gsa" / "model.safetensors").values()} == {torch.bfloat16}


# What our models would compute differently, each in a config.json.
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"model_type": "gpt2"}, "model_type=gpt2"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act=gelu"),
    "dynamic angles": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'rope_type': 'dynamic'"),
    "angles that were added": ({"rope_scaling": {"type": "su"}, "rope_parameters": {"rope_type": "default"}}, "'su'"),
    "part of a head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "another size": ({"intermediate_size": 48}, "mlp.gate_proj.weight has the shape [40, 32], not [48, 32]"),
    "a missing weight": ({"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias"),
    "a layer too many": ({"num_hidden_layers": 1}, "no place for the weight model.layers.1.input_layernorm.weight"),
    "another tied head": ({"tie_word_embeddings": True}, "no place for the weight lm_head.weight"),
    "sees what follows": ({"is_causal": False}, "is_causal=False"),
    "sees what follows, unsaid": ({"model_type": "qwen3", "is_causal": None}, "is_causal=None"),
    "chunks": ({"attention_chunk_size": 4}, "attention_chunk_size=4"),
    "shared keys": ({"model_type": "olmo2", "kv_sharing_modes": ["own", "reuse"]}, "kv_sharing_modes="),
    "a window of the cache": ({"sliding_window": 5}, "sliding_window=5"),
    "windows of the cache": (
        {"model_type": "olmo2", "layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"
    ),
    "layers without a window": (
        {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"
    ),
    "single layers": ({"per_layer_config": {"1": {"sliding_window": 3}}}, "per_layer_config"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "other weights": ({"transformers_weights": "other.safetensors"}, "transformers_weights"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_what_our_models_would_compute_differently_is_refused(name: str, llama: Path, tmp_path: Path) -> None:
    changes, words = CONFIGS[name]
    with pytest.raises((KeyError, ValueError), match=re.escape(words)):
        read_model(edited(llama, tmp_path / "source", **changes))


@pytest.mark.slow
def test_shards_are_all_there(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = load_file(llama / "model.safetensors")
    source = edited(llama, tmp_path / "source")
    (source / "model.safetensors").unlink()
    places = {}
    for number, names in enumerate((sorted(weights)[::2], sorted(weights)[1::2]), 1):
        stale = {sorted(weights)[0]: torch.zeros(1)} if number == 2 else {}  # the index names another file for it
        save_file({name: weights[name] for name in names} | stale, source / f"part{number}.safetensors")
        places |= dict.fromkeys(names, f"part{number}.safetensors")
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert convert(monkeypatch, source=source, output=tmp_path / "whole") == 0
    assert convert(monkeypatch, source=llama, output=tmp_path / "one") == 0
    assert same_weights(tmp_path / "whole", tmp_path / "one")

    index.write_text(json.dumps({"weight_map": {**places, "more": "part1.safetensors"}}))
    with pytest.raises(ValueError, match="and its shards differ in more"):
        read_model(source)


def test_models_that_do_not_become_another_are_refused(llama: Path, tmp_path: Path) -> None:
    model, out = read_model(llama), tmp_path / "out"
    with pytest.raises(ValueError, match="layers of attention do not become mamba"):
        change_mixer(model, "mamba", {})
    with pytest.raises(ValueError, match="has only layers of attention and window_attention"):
        write_family(change_mixer(model, "gsa", {}), FAMILIES["llama"], out)
    rotary = {"vocab_size": 9, "d_model": 16, "mixer": "attention", "mixer_options": {"rotary": True}}
    TokenBackbone(**rotary, norm="layer").save_pretrained(tmp_path / "layer")
    with pytest.raises(ValueError, match="whose norm is layer, only rms"):
        write_family(read_model(tmp_path / "layer"), FAMILIES["llama"], out)
    TokenBackbone(vocab_size=9, d_model=16, mixer="attention").save_pretrained(tmp_path / "biased")
    with pytest.raises(ValueError, match="whose rotary of attention is False, only True"):
        write_family(read_model(tmp_path / "biased"), FAMILIES["llama"], out)
    with pytest.raises(ValueError, match=r"no place for blocks\.0\.mixer\.in_proj\.bias"):
        change_mixer(read_model(tmp_path / "biased"), "gsa", {})


def test_every_end_token_of_a_model_ends_its_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat model ends a text by the separator or by the end of a turn, as generation_config.json lists them."""
    values = train_tokenizer(["so it was, and so it is"] * 3, 270).to_dict()
    peer = save_peer("Llama", tmp_path / "source", {"vocab_size": 270, "eos_token_id": 256})
    (tmp_path / "source" / "tokenizer.json").write_text(values["json"])
    prompt = tokenizer_from_dict(values).encode("so").tolist()

    def write(ends: list[int]) -> list[int]:
        whole = peer.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=ends)
        return whole[0, len(prompt) :].tolist()

    end = write([269])[8]
    wanted = write([269, end])
    assert wanted[-1] == end
    peer.generation_config.eos_token_id = [269, end]
    peer.generation_config.save_pretrained(tmp_path / "source")
    assert convert(monkeypatch, source=tmp_path / "source", output=tmp_path / "ours") == 0
    longseq.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "saved")
    keys = {"prompt": "so", "temperature": 0, "max_new_tokens": 20, "device": "cpu", "output": tmp_path / "text.jsonl"}
    for name in ("ours", "saved"):
        for at_end, expected in (("true", (len(wanted) - 1, "end")), ("false", (20, "length"))):
            assert call(monkeypatch, "generate", checkpoint=tmp_path / name, end=at_end, **keys) == 0
            written = json.loads((tmp_path / "text.jsonl").read_text())
            assert (written["tokens"], written["reason"]) == expected
    config = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert end in config["eos_token_id"]


def test_a_tokenizer_and_its_window_come_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = {"qkv_bias": False, "out_bias": False, "rotary": True}
    model = TokenBackbone(vocab_size=257, d_model=16, mixer="attention", mixer_options=bare)
    model.text = {"tokenizer": BYTES, "window": 64}
    model.save_pretrained(tmp_path / "ours")
    assert convert(monkeypatch, source=tmp_path / "ours", output=tmp_path / "gsa", mixer="gsa") == 0
    assert longseq.from_pretrained(tmp_path / "gsa").text == {"tokenizer": BYTES, "window": 64}
    assert convert(monkeypatch, source=tmp_path / "ours", output=tmp_path / "theirs", format="llama") == 0
    assert (tmp_path / "theirs" / "tokenizer_config.json").is_file()
