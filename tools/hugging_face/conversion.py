"""Token models of longseq and models of other libraries, one made of the other, with the same weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longseq import models
from longseq.backbones.likeness import find_difference
from longseq.backbones.tokens import TokenBackbone
from longseq.mixers.pattern import Pattern, expand_pattern, options_by_name
from longseq.model_card import model_card
from longseq.tokenizer_files import GENERATION_FILE, SOURCE_CONFIG, TOKENIZER_FILE, read_folder, tokenizer_files
from longseq.tools.hugging_face.families import FAMILIES
from longseq.tools.hugging_face.families.family import Family, Values, choose_layers, layers_of
from longseq.tools.hugging_face.families.rwkv import RWKV7, read_rwkv
from longseq.tools.hugging_face.weights import Weight, read_weights, write_weights

# Keys of a source's config.json, which is kept as SOURCE_CONFIG, that are not written back: they tell what is computed,
# or its type, as the family's own keys do.
COMPUTED = ("rope_parameters", "original_max_position_embeddings", "layer_types", "torch_dtype")

# Files of a tokenizer's vocabulary, in the forms that transformers reads. Ours is the first.
VOCABULARIES = (TOKENIZER_FILE, "tokenizer.model", "vocab.json")

# Files of the source that a converted model needs.
COPIED = (
    *VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION_FILE,
)

# Keys of a source's config.json with which transformers writes text where there is no generation_config.json.
GENERATION = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class TokenModel:
    """A token model whose weights are not read yet: the arguments of `TokenBackbone`, and the weights by name.

    `folder` is the source if it is a folder. `text` is as in `longseq.models.PretrainedModel`; its tokenizer may be
    None, as the files of a folder are copied.
    """

    arguments: Mapping[str, Any]
    weights: Mapping[str, Weight]
    folder: Path | None = None
    text: Mapping[str, Any] | None = None

    def backbone(self) -> TokenBackbone:
        """The model without values, on the meta device."""
        with torch.device("meta"):
            return TokenBackbone(**self.arguments)


def read_model(source: Path) -> TokenModel:
    """A token model from a folder of longseq, a checkpoint of `longseq train`, a folder of another library, or a `.pth`
    file of RWKV-LM.

    Raises:
        ValueError: our models cannot compute what the source does, or its weights do not fit.
    """
    if source.suffix == ".pth":
        arguments, found = read_rwkv(source)
        model = TokenModel(arguments, {})
        return replace(model, weights=_join(RWKV7, model.backbone(), found))
    if source.is_file():
        saved = models.read(source)
        weights = {name: Weight.of(tensor) for name, tensor in saved.state.items()}
        return _ours(saved.config, weights, None, saved.text)
    config = json.loads((source / models.CONFIG_FILE).read_text(encoding="utf-8"))
    if config.get("library_name") == "longseq":
        text = {"tokenizer": read_folder(source), "window": config.get("window")}
        return _ours(config, read_weights(source), source, text)
    family = FAMILIES.get(config["model_type"])
    if family is None:
        raise ValueError(f"model_type={config['model_type']} is unknown; longseq converts {', '.join(FAMILIES)}")
    text = {"tokenizer": None, "window": config.get("max_position_embeddings")}
    model = TokenModel(family.read_config(config), {}, source, text)
    return replace(model, weights=_join(family, model.backbone(), read_weights(source)))


def write_model(model: TokenModel, folder: Path, max_shard_size: int | str = "5GB") -> None:
    """Write a folder for `longseq.from_pretrained`, with the files of the source's tokenizer.

    Weights above `max_shard_size` are spread over files; memory holds the weights of one file at a time.
    """
    backbone = model.backbone()
    backbone.text = model.text
    config = models.describe(backbone)
    folder.mkdir(parents=True, exist_ok=True)
    _copy_files(model, folder, (*COPIED, SOURCE_CONFIG))
    if model.folder is not None:
        source = json.loads((model.folder / models.CONFIG_FILE).read_text(encoding="utf-8"))
        if source.get("library_name") != "longseq":
            shutil.copyfile(model.folder / models.CONFIG_FILE, folder / SOURCE_CONFIG)
    _write_generation(folder)
    write_weights(folder, model.weights, max_shard_size)
    card = model_card(backbone, config, {}, has_tokenizer=(folder / TOKENIZER_FILE).is_file())
    (folder / models.CARD_FILE).write_text(card, encoding="utf-8")
    _write_json(folder / models.CONFIG_FILE, config)


def _write_generation(folder: Path) -> None:
    """Write the generation_config.json of a source that had none: transformers takes the tokens of its config.json."""
    if (folder / GENERATION_FILE).is_file() or not (folder / SOURCE_CONFIG).is_file():
        return
    source = json.loads((folder / SOURCE_CONFIG).read_text(encoding="utf-8"))
    tokens = {key: source[key] for key in GENERATION if source.get(key) not in (None, -1)}  # some files have -1
    if tokens:
        _write_json(folder / GENERATION_FILE, tokens)


def write_family(model: TokenModel, family: Family, folder: Path) -> None:
    """Write a folder as another library saves a family of models, with the files of the source's tokenizer.

    Raises:
        ValueError: the family has no models that compute what this one does.
    """
    config = _config_of(model, family)
    weights = _split(family, model)
    former: dict[str, Any] = {}
    if model.folder is not None and (model.folder / SOURCE_CONFIG).is_file():
        source = json.loads((model.folder / SOURCE_CONFIG).read_text(encoding="utf-8"))
        if source.get("model_type") == family.model_type:
            former = {key: value for key, value in source.items() if key not in COMPUTED}
    dtype = str(model.weights["embedding.weight"].dtype).removeprefix("torch.")
    stated = {"model_type": family.model_type, "architectures": [family.architecture], "dtype": dtype}
    folder.mkdir(parents=True, exist_ok=True)
    _copy_files(model, folder, COPIED)
    write_weights(folder, weights)
    _write_json(folder / models.CONFIG_FILE, {**former, **config, **stated})


def change_mixer(model: TokenModel, pattern: Pattern, options: Mapping[str, Any], seed: int = 0) -> TokenModel:
    """The model with other mixers in place of attention, ready to be trained further.

    Embeddings, norms, MLPs and the head are kept, and so are the projections of queries, keys, values and outputs.
    Layers that the pattern leaves at their mixer stay as they are. New parameters are initialised as in a new model, in
    the type of the weights. `options` are the `mixer_options` of the new mixers (see `TokenBackbone`).

    Source: Gated Slot Attention (Zhang et al., 2024), section 4.2: GLA and RetNet with ReLU as feature map and without
    an output gate, GSA with grouped keys. SUPRA: Mercat et al., 2024.

    Raises:
        ValueError: a layer has parameters that have no place in the new mixer.
    """
    before, own = layers_of(model.arguments)
    after = expand_pattern(pattern, len(before))
    chosen = options_by_name(pattern, options)
    made: dict[str, dict[str, Any]] = {}
    for old, new in zip(before, after, strict=True):
        if old == new and not chosen[new]:
            made.setdefault(new, own[new])
            continue
        if old not in SOFTMAX or new not in CARRIED:
            raise ValueError(f"layers of {old} do not become {new}: attention becomes {', '.join(CARRIED)}")
        carried = {**CARRIED[new](own[old], model.arguments["d_model"]), **chosen[new]}
        if made.setdefault(new, carried) != carried:
            raise ValueError(f"mixer={pattern}: the layers of {new} would have different options")
    arguments = {**model.arguments, **choose_layers(after, made)}
    result = replace(model, arguments=arguments, weights={})
    return replace(result, weights=_carry(model, result.backbone(), seed))


def _gsa_options(attention: Values, d_model: int) -> dict[str, Any]:
    return {key: attention[key] for key in ("num_heads", "num_kv_heads", "head_dim")}


def _gla_options(attention: Values, d_model: int) -> dict[str, Any]:
    width = attention["num_heads"] * attention["head_dim"] / d_model
    heads = {key: attention[key] for key in ("num_heads", "num_kv_heads")}
    return {**heads, "expand_k": width, "expand_v": width, "feature_map": "relu", "output_gate": False}


def _delta_options(attention: Values, d_model: int) -> dict[str, Any]:
    """A new convolution would mix tokens at random before the kept projections are of use, so there is none."""
    if attention["num_kv_heads"] != attention["num_heads"]:
        raise ValueError("grouped keys do not become those of gated_deltanet, which has a key for each head")
    width = attention["num_heads"] * attention["head_dim"] / d_model
    heads = {"num_heads": attention["num_heads"], "expand_k": width, "expand_v": 1.0}
    return {**heads, "convolution_width": 0, "output_gate": False}


def _supra_options(attention: Values, d_model: int) -> dict[str, Any]:
    positions = {key: attention[key] for key in ("rotary_base", "rotary_scaling")} if attention["rotary"] else {}
    return {**_gsa_options(attention, d_model), **positions}


def _retnet_options(attention: Values, d_model: int) -> dict[str, Any]:
    return {**_supra_options(attention, d_model), "expand_v": 1.0, "feature_map": "relu", "output_gate": False}


def _attention_options(attention: Values, d_model: int) -> dict[str, Any]:
    return {key: value for key, value in attention.items() if key != "window"}


# Mixers that attention becomes, and their options. Their input projections begin with attention's rows: queries, keys
# and values.
CARRIED: dict[str, Callable[[Values, int], dict[str, Any]]] = {
    "gsa": _gsa_options,
    "gla": _gla_options,
    "retnet": _retnet_options,
    "supra": _supra_options,
    "gated_deltanet": _delta_options,
    "attention": _attention_options,
    "window_attention": _attention_options,
}
SOFTMAX = ("attention", "window_attention")


def _carry(model: TokenModel, backbone: TokenBackbone, seed: int) -> dict[str, Weight]:
    """The weights of `model` by the names of `backbone`, and initialised ones where it has more."""
    left = dict(model.weights)
    found: dict[str, Weight] = {}
    for name, tensor in backbone.state_dict().items():
        old, shape = left.pop(name, None), tuple(tensor.shape)
        if old is not None and old.shape == shape:
            found[name] = old
            continue
        if old is not None and not name.endswith("mixer.in_proj.weight"):
            raise ValueError(f"{name} has the shape {list(old.shape)}, and the new layers need {list(shape)}")
        dtype = model.weights["embedding.weight"].dtype if old is None else old.dtype
        found[name] = Weight(shape, dtype, _new_part(backbone, name, old, dtype, seed))
    if left:
        raise ValueError(f"the new layers have no place for {min(left)}")
    return found


def _new_part(
    backbone: TokenBackbone, name: str, old: Weight | None, dtype: torch.dtype, seed: int
) -> Callable[[], Tensor]:
    """Reads an initialised parameter of a mixer, which begins with the rows of `old`."""
    layer = int(name.split(".")[1])

    def read() -> Tensor:
        mixer = backbone.blocks[layer].mixer
        with torch.random.fork_rng([]):
            torch.manual_seed(seed + layer)
            mixer.to_empty(device="cpu")
            backbone.init_part(mixer)
        value = mixer.state_dict()[name.split(".", 3)[3]].detach().to(dtype).clone()
        mixer.to("meta")
        if old is not None:
            value[: old.shape[0]] = old.read()
        return value

    return read


def _ours(
    config: Values, weights: Mapping[str, Weight], folder: Path | None, text: Mapping[str, Any] | None
) -> TokenModel:
    if config["kind"] != "token":
        raise ValueError(f"kind={config['kind']} is not converted, only token models")
    with torch.device("meta"):
        backbone = models.build(config)
        state = {name: torch.empty(weight.shape) for name, weight in weights.items()}
    backbone.load_state_dict(state, assign=True)  # torch's error for weights that do not fit
    return TokenModel(models.describe(backbone)["model_args"], weights, folder, text)


def _spell(family: Family, backbone: TokenBackbone) -> dict[str, dict[str, int]]:
    """The family's weights that make up each of ours, one below the other, with their rows."""
    names = family.names([block.mixer for block in backbone.blocks])
    spelled = {}
    for name, tensor in backbone.state_dict().items():
        module, _, kind = name.rpartition(".")
        other = names.get(name, names.get(module))
        if other is None:
            raise ValueError(f"{family.architecture} has no place for {name}")
        suffix = "" if name in names else f".{kind}"
        parts = {other: tensor.shape[0]} if isinstance(other, str) else other
        spelled[name] = {part + suffix: rows for part, rows in parts.items()}
    return spelled


def _their_shape(name: str, rows: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of `rows` rows of a weight of ours; torch's convolutions over channels have one input each."""
    rest = shape[1:]
    if name[:-1].endswith(".x_"):  # RWKV's shares of the token before
        return (1, 1, *rest) if ".attn." in name else rest
    return (rows, 1, *rest) if name.endswith("conv1d.weight") else (rows, *rest)


def _turned(family: Family, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    return {name: weight.mT if name.endswith(family.transposed) else weight for name, weight in weights.items()}


def _join(family: Family, backbone: TokenBackbone, theirs: Mapping[str, Weight]) -> dict[str, Weight]:
    """Our weights from a family's."""
    found: dict[str, Weight] = {}
    theirs = _turned(family, theirs)
    read: set[str] = set()
    wanted = backbone.state_dict()
    for name, parts in _spell(family, backbone).items():
        shape = tuple(wanted[name].shape)
        for part, rows in parts.items():
            expected = _their_shape(part, rows, shape)
            if _bare(theirs[part].shape) != _bare(expected):
                raise ValueError(f"{part} has the shape {list(theirs[part].shape)}, not {list(expected)}")
        weights = [theirs[part] for part in parts]
        found[name] = Weight(shape, weights[0].dtype, _joined(weights, shape))
        read |= parts.keys()
    for name in sorted(theirs.keys() - read):
        if name.endswith("rotary_emb.inv_freq"):  # computed from config.json
            continue
        tied = backbone.head is None and name == f"{family.ends['head']}.weight"
        if tied and torch.equal(theirs[name].read(), theirs[f"{family.ends['embedding']}.weight"].read()):
            continue
        raise ValueError(f"the model has no place for the weight {name}")
    return found


def _bare(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _joined(weights: list[Weight], shape: tuple[int, ...]) -> Callable[[], Tensor]:
    return lambda: torch.cat([weight.read().reshape(-1, *shape[1:]) for weight in weights])


def _split(family: Family, model: TokenModel) -> dict[str, Weight]:
    """The weights of a family, of ours."""
    found: dict[str, Weight] = {}
    for name, parts in _spell(family, model.backbone()).items():
        weight, start = model.weights[name], 0
        for part, rows in parts.items():
            shape = _their_shape(part, rows, weight.shape)
            found[part] = Weight(shape, weight.dtype, _rows(weight, start, rows, shape))
            start += rows
        assert start == weight.shape[0], name
    return _turned(family, found)


def _rows(weight: Weight, start: int, rows: int, shape: tuple[int, ...]) -> Callable[[], Tensor]:
    return lambda: weight.read()[start : start + rows].reshape(shape)


def _config_of(model: TokenModel, family: Family) -> dict[str, Any]:
    """The family's config.json of a model, if it means the same model."""
    own = models.describe(model.backbone())["model_args"]
    layers, _ = layers_of(own)
    if not set(layers) <= set(family.mixers):
        raise ValueError(f"{family.architecture} has only layers of {' and '.join(family.mixers)}")
    config = family.config(own)
    with torch.device("meta"):
        read = models.describe(TokenBackbone(**family.read_config(config)))["model_args"]
    if (found := find_difference(own, read, ignored=("share_directions", "merge"))) is not None:
        name, value, only = found
        raise ValueError(f"{family.architecture} has no model whose {name} is {value}, only {only}")
    return config


def _copy_files(model: TokenModel, folder: Path, names: tuple[str, ...]) -> None:
    if model.folder is None and model.text is not None:
        for name, text in tokenizer_files(model.text["tokenizer"]).items():
            (folder / name).write_text(text, encoding="utf-8")
    for name in names:
        if model.folder is not None and (model.folder / name).is_file():
            shutil.copyfile(model.folder / name, folder / name)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
