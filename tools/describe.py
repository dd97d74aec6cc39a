"""`longseq describe`: the parts of a model, its cost, and the kernels that it would use."""

from __future__ import annotations

import copy
import dataclasses
import json
import platform
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import timm
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from timm.optim import param_groups_weight_decay
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from longseq import mixers
from longseq.backbones.classifier import TextClassifier
from longseq.backbones.linear_text import LinearTextClassifier
from longseq.backbones.tokens import TokenBackbone
from longseq.blocks.channel_mixing import ChannelMixing
from longseq.blocks.positions import Layout
from longseq.kernels.dispatch import Call, explain_call, record_calls
from longseq.kernels.packing import Packing
from longseq.mixers.attention import SoftmaxAttention
from longseq.mixers.cards import find_growth
from longseq.parameters import count_parameters
from longseq.state import state_size, state_tensors
from longseq.tasks import registry
from longseq.tasks.commands import Describe
from longseq.tasks.experiment import choose, read_experiment, with_any_choice
from longseq.tasks.image.info import DataInfo
from longseq.tasks.report import quiet_libraries
from longseq.tasks.training import checkpoint
from longseq.tasks.training.configuration import resolve
from longseq.tasks.training.recipe import device_batch_size
from longseq.timm_models import model_name

__all__ = [
    "describe_document_model",
    "describe_image_model",
    "describe_token_model",
    "find_devices",
    "list_mixers",
    "list_models",
    "print_description",
    "print_mixers",
    "print_models",
    "run",
]

# The part of a model to which a parameter belongs, by a piece of its name; the first match counts.
PARTS = (
    ("mixers", (".mixer.", ".attn.")),
    ("mlp", (".mlp.",)),
    ("embedding", ("patch_embed", "pos_embed", "cls_token", "reg_token", "stem.", "embedding.", "positions.")),
    ("norms", ("norm",)),
)


@quiet_libraries()
def run(cfg: DictConfig) -> Any:
    """Print and return what `describe.yaml` selects: facts about a model, or a list."""
    keys = read_experiment({**resolve(cfg), "logger": None, "callbacks": {}}, Describe)
    if keys["list"] is None:
        model, data, recipe = _model_and_data(cfg)
        facts: Any = _describe(model, data, _device(keys["device"]), _precision(cfg))
        facts |= {} if recipe is None else {"recipe": recipe}
    else:
        facts = LISTS[keys["list"]].gather()
    if keys["format"] == "json":
        print(json.dumps(facts, indent=2))
    elif keys["list"] is None:
        print_description(facts, Console())
    else:
        LISTS[keys["list"]].show(facts, Console())
    return facts


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return str(torch.device(name))
    except RuntimeError:
        raise ValueError(f"device={name} is unknown: take auto, cpu, cuda or mps") from None


def _precision(cfg: DictConfig) -> torch.dtype:
    """The type in which the training of a configuration computes, and float32 for a checkpoint."""
    name = "" if cfg.checkpoint is not None else str(cfg.trainer.precision)
    kinds = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    return kinds.get(name.partition("-")[0], torch.float32)


def _model_and_data(cfg: DictConfig) -> tuple[nn.Module, dict[str, Any], str | None]:
    """The model of the checkpoint, or the initial model of a training, what it knows of its data, and the recipe that
    the training would choose for the data.
    """
    if cfg.checkpoint is not None:
        loaded = checkpoint.load(cfg.checkpoint, tasks=registry.names())
        return loaded.backbone, loaded.data, None
    # Without logger and callbacks: their paths are in a run folder, which this command does not have.
    config = read_experiment({**resolve(cfg), "logger": None, "callbacks": {}}, Describe)
    is_image = config["task"]["name"] in registry.like("image")
    ready = with_any_choice(config)
    info = _image_info(ready) if is_image else _info(ready, device_batch_size(ready))
    chosen, reason = choose(config, info) if info.sizes else (ready, None)
    model = registry.of(config).model
    model.outline(chosen, info)  # refuses sizes that no memory holds
    built = model.build(chosen, info)
    return built, info.to_dict(), reason


def _describe(model: nn.Module, data: Mapping[str, Any], device: str, dtype: torch.dtype) -> dict[str, Any]:
    if isinstance(model, TokenBackbone):
        tokens = data.get("window", data.get("longest"))  # of a text, or of a probe
        if tokens is None:
            raise ValueError("the checkpoint does not tell the length of its sequences: give one of `longseq train`")
        return describe_token_model(model, tokens, device, dtype) | _assumed(data)
    if isinstance(model, TextClassifier | LinearTextClassifier):
        return describe_document_model(model, data["window"], device, dtype) | _assumed(data)
    if "img_size" not in data:
        raise ValueError(f"longseq describe takes models of images, tokens and documents, not {type(model).__name__}")
    return describe_image_model(model, data, device)


def _assumed(data: Mapping[str, Any]) -> dict[str, Any]:
    """That the number of tokens is none that the model tells."""
    return {"tokens_are_assumed": True} if data.get("window_is_assumed") else {}


def _info(config: Mapping[str, Any], batch_size: int) -> Any:
    """What the model must know of the data, of which no batch is read."""
    return registry.of(config).data.from_config(config, batch_size=batch_size).info


def _image_info(config: Mapping[str, Any]) -> DataInfo:
    """What the model must know of the data; the data is opened only if the configuration does not name the classes."""
    data = config["data"]
    if data.get("num_classes") is None:
        try:
            return _info(config, batch_size=2)  # Mixup needs at least two images
        except (ValueError, OSError) as error:
            raise ValueError(f"{error} (to describe the model without the data, give ++data.num_classes=N)") from error
    classes = int(data["num_classes"])
    unseen = {"mean": [0.5], "std": [0.5], "interpolation": "bicubic", "crop_pct": 1.0, "in_chans": 3}
    named = {"class_names": [str(index) for index in range(classes)], "num_classes": classes}
    return DataInfo.from_dict({**unseen, **data, **named})


def describe_image_model(model: nn.Module, data: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Facts about an image classifier, as dictionaries, lists and numbers.

    `data` has img_size and in_chans; kernels are judged for `device`. FLOPs are those of one image's forward pass, a
    multiply-add counts as two; state sizes are the numbers that are kept for one image.
    """
    size = data["img_size"]
    height, width = (size, size) if isinstance(size, int) else size
    tokens = _count_tokens(model, height, width)
    return {
        "model": model_name(model),
        "mixer": getattr(model, "mixer_name", None),
        "direction": getattr(model, "direction", None),
        "images": [data["in_chans"], height, width],
        "classes": getattr(model, "num_classes", data.get("num_classes")),
        "tokens": tokens,
        "parameters": _count_parts(model),
        "weight_decay": _count_decayed(model),
        "flops": _count_flops(model, data["in_chans"], height, width),
        "state": _describe_states(model),
        "operations": _judge_operations(model, device, tokens),
        "device": device,
        "devices": find_devices(),
    }


def describe_token_model(
    model: TokenBackbone, tokens: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Facts about a language model or a probe's model, as dictionaries, lists and numbers.

    FLOPs are those of a forward pass over one sequence of `tokens` tokens, a multiply-add counts as two; state sizes
    are the numbers that are kept for one sequence. Kernels are judged for `device`, and attention over packed rows also
    for `dtype`.
    """
    return {
        "model": model_name(model),
        "mixer": model.mixer_name,
        "direction": model.direction,
        "vocabulary": model.vocab_size,
        **_describe_reading(model, tokens, device, dtype),
    }


def describe_document_model(
    model: TextClassifier | LinearTextClassifier, tokens: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Facts about a classifier of documents, as dictionaries, lists and numbers.

    FLOPs are those of a forward pass over one document of `tokens` tokens, a multiply-add counts as two; of a linear
    model at most, and its vocabulary is that of n-grams. State sizes are the numbers that are kept for one document.
    Kernels are judged for `device`, and attention over packed rows also for `dtype`.
    """
    is_linear = isinstance(model, LinearTextClassifier)
    either: Any = model  # its parts are those of its kind
    return {
        "model": model_name(model),
        "mixer": None if is_linear else either.body.mixer_name,
        "direction": None if is_linear else either.body.direction,
        "pooling": None if is_linear else either.pooling.kind,
        "vocabulary": len(either.inverse_frequency) if is_linear else either.body.vocab_size,
        "classes": model.num_classes,
        **_describe_reading(model, tokens, device, dtype),
    }


def _describe_reading(model: Any, tokens: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """The facts about a model that depend on the number of tokens it reads, and on the device."""
    return {
        "tokens": tokens,
        "parameters": _count_parts(model),
        "weight_decay": _count_decayed(model),
        "flops": {"forward": model.flops(tokens), "source": "analytic"},
        "state": _describe_states(model),
        "operations": _judge_operations(model, device, tokens, dtype),
        "device": device,
        "devices": find_devices(),
    }


def _count_tokens(model: nn.Module, height: int, width: int) -> int | None:
    """The length of the sequence that the blocks read; None for models without sequences."""
    grid = getattr(getattr(model, "patch_embed", None), "dynamic_feat_size", None)
    if grid is None:
        return None
    rows, columns = grid((height, width))
    prefix: Any = getattr(model, "num_prefix_tokens", 0)
    return rows * columns + prefix


def _count_parts(model: nn.Module) -> dict[str, Any]:
    classifier: Any = getattr(model, "get_classifier", nn.Identity)()
    head = {id(parameter) for parameter in classifier.parameters()}
    parts = dict.fromkeys((*dict(PARTS), "head", "other"), 0)
    for name, parameter in model.named_parameters():
        parts["head" if id(parameter) in head else _part_of(name)] += parameter.numel()
    return {
        "total": count_parameters(model),
        "trainable": count_parameters(model, trainable=True),
        "parts": {name: count for name, count in parts.items() if count},
    }


def _part_of(name: str) -> str:
    return next((part for part, pieces in PARTS if any(piece in name for piece in pieces)), "other")


def _count_decayed(model: nn.Module) -> dict[str, int]:
    """The numbers of parameters with and without weight decay: vectors, and those that the model names, have none."""
    exempt: Any = getattr(model, "no_weight_decay", set)()
    counts = {"with": 0, "without": 0}
    for group in param_groups_weight_decay(model, weight_decay=1.0, no_weight_decay_list=exempt):
        counts["with" if group["weight_decay"] else "without"] += sum(p.numel() for p in group["params"])
    return counts


def _count_flops(model: nn.Module, channels: int, height: int, width: int) -> dict[str, Any]:
    """The model's own count; for other models of timm, the matrix products that torch counts in a pass without data."""
    analytic: Any = getattr(model, "flops", None)
    if analytic is not None:
        return {"forward": analytic((height, width)), "source": "analytic"}
    empty = copy.deepcopy(model).to("meta").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        empty(torch.empty(1, channels, height, width, device="meta"))
    return {"forward": counter.get_total_flops(), "source": "counted by torch"}


def _describe_states(model: nn.Module) -> list[dict[str, Any]]:
    """For each mixing layer and MLP with a state: its readings, and the numbers that they keep for one sequence.

    `growth` counts those that each token adds.
    """
    states = []
    for name, reading in mixers.named_readings(model):
        mixer = reading.readers[0]
        if mixer.supports_noncausal and not getattr(mixer, "causal", False):
            continue  # every token sees all
        empty = copy.deepcopy(mixer).to("meta")
        with torch.no_grad():
            state, growth = mixer.initial_state(1), find_growth(empty)
        states.append(
            {
                "layer": name,
                "readings": len(reading.orders),
                "numbers": len(reading.orders) * state_size(state),
                "growth": len(reading.orders) * growth,
                "tensors": {field: list(tensor.shape[1:]) for field, tensor in state_tensors(state)},
            }
        )
    for name, part in model.named_modules():
        if isinstance(part, ChannelMixing):
            shift = part.initial_state(1)
            tensors = {"shift": list(shift.shape[1:])}
            states.append({"layer": name, "readings": 1, "numbers": shift.numel(), "growth": 0, "tensors": tensors})
    return states


def _judge_operations(
    model: nn.Module, device: str, tokens: int | None, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """For each operation that the mixing layers call: the backend that runs, and the reasons against the others.

    Layers that call one operation with other arguments may have other backends; then some reasons hold only for some
    layers.
    """
    judged: dict[str, Any] = {}
    for op, requested, call in [*_find_calls(model), *_find_packed_calls(model, dtype)]:
        sizes = call.sizes if tokens is None or "T" not in call.sizes else {**call.sizes, "T": tokens}
        reasons = explain_call(op, dataclasses.replace(call, device=torch.device(device), sizes=sizes))
        able = [backend for backend, against in reasons.items() if not against and requested in ("auto", backend)]
        found = judged.setdefault(op, {"requested": requested, "runs": [], "backends": {name: [] for name in reasons}})
        found["runs"] = list(dict.fromkeys([*found["runs"], *able[:1]]))
        for name, against in reasons.items():
            found["backends"][name] = list(dict.fromkeys([*found["backends"][name], *against]))
    return dict(sorted(judged.items()))


def _find_calls(model: nn.Module) -> list[tuple[str, str, Call]]:
    """The calls of operations in a pass through each mixing layer, without data, over a few tokens."""
    with record_calls() as calls, torch.no_grad():
        for _, reading in mixers.named_readings(model):
            empty = copy.deepcopy(reading).to("meta").eval()
            x = torch.empty(1, 4, empty.readers[0].d_model, device="meta")
            empty(
                x,
                layout=None if isinstance(model, TokenBackbone | TextClassifier) else Layout(2, 2, None),
                output_final_state=False,
            )
    return calls


def _find_packed_calls(model: nn.Module, dtype: torch.dtype) -> list[tuple[str, str, Call]]:
    """The calls of softmax attention over packed rows, an operation; over other rows it calls a function of torch."""
    if not isinstance(model, TokenBackbone | TextClassifier):
        return []
    with record_calls() as calls, torch.no_grad():
        for _, reading in mixers.named_readings(model):
            if any(isinstance(reader, SoftmaxAttention) for reader in reading.readers):
                x = torch.empty(1, 4, reading.readers[0].d_model, device="meta", dtype=dtype)
                packing = Packing(torch.tensor([0, 4]), device="meta")
                empty = copy.deepcopy(reading).to("meta", dtype).eval()
                empty(x, cu_seqlens=packing, output_final_state=False)
    return calls


def find_devices() -> list[str]:
    """The devices that torch can use here, in words."""
    threads = torch.get_num_threads()
    devices = [f"cpu: {platform.processor() or platform.machine()}, {threads} thread{'s' * (threads != 1)}"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        devices.append("mps: Apple GPU")
    return devices


def list_mixers() -> list[dict[str, Any]]:
    """The cards of the mixers (see `longseq.mixers.MixerCard`) and their options with defaults, as dictionaries and
    lists.
    """
    return [{**dataclasses.asdict(card), "options": mixers.options(card.name)} for card in mixers.list_mixers()]


def list_models() -> list[dict[str, Any]]:
    """The image models that longseq registers with timm, without timm's own."""
    with torch.device("meta"):
        return [
            {"name": name, "parameters": count_parameters(timm.create_model(name))}
            for name in timm.list_models("longseq_*")
        ]


def print_mixers(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the result of `list_mixers` without the options: the cost of a layer, and the kernels with their mixers."""
    table = Table(title="one layer of d_model=256; FLOPs a token over 1,024 tokens", title_justify="left")
    for heading in ("mixer", "state", "/token", "weights", "FLOPs", "source"):
        figure = heading not in ("mixer", "source")
        table.add_column(heading, justify="right" if figure else "left", no_wrap=heading != "source")
    for row in rows:
        costs = (f"{row['parameters'] / 1e6:.2f} M", _scaled(row["flops_per_token"]))
        table.add_row(row["name"], f"{row['state_size']:,}", f"{row['state_growth']:,}", *costs, row["paper"])
    console.print(table)
    kernels = Table(title="kernels", title_justify="left")
    for heading in ("operation", "backends, in order", "mixers"):
        kernels.add_column(heading)
    for op, backends in sorted({op: names for row in rows for op, names in row["backends"].items()}.items()):
        kernels.add_row(op, ", ".join(backends), ", ".join(row["name"] for row in rows if op in row["backends"]))
    console.print(kernels)
    console.print("state: numbers kept for a sequence, and added by each token; options: format=json", highlight=False)


def print_models(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the result of `list_models`."""
    table = Table()
    table.add_column("name", overflow="fold")
    table.add_column("parameters", justify="right")
    for row in rows:
        table.add_row(row["name"], f"{row['parameters']:,}")
    console.print(table)


class List(NamedTuple):
    """The function that collects `list=NAME`, and the one that prints it."""

    gather: Callable[[], list[dict[str, Any]]]
    show: Callable[[list[dict[str, Any]], Console], None]


LISTS: Mapping[str, List] = MappingProxyType(
    {"mixers": List(list_mixers, print_mixers), "models": List(list_models, print_models)}
)


def print_description(facts: Mapping[str, Any], console: Console) -> None:
    """Print a description of a model: a table of figures, a table of kernels, the devices."""
    table = Table(title=_title(facts), title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for row in _figures(facts):
        table.add_row(*row)
    console.print(table)
    if facts["operations"]:
        kernels = Table(title=f"kernels on {facts['device']}", title_justify="left")
        for heading in ("operation", "backend", "verdict"):
            kernels.add_column(heading)
        for op, judged in facts["operations"].items():
            for backend, against in judged["backends"].items():
                kernels.add_row(op, backend, _verdict(backend, against, judged))
        console.print(kernels)
    console.print("devices: " + "; ".join(facts["devices"]), highlight=False)
    if "recipe" in facts:
        console.print(facts["recipe"], highlight=False, soft_wrap=True)


def _title(facts: Mapping[str, Any]) -> str:
    mixer = "" if facts["mixer"] is None else f", mixer {facts['mixer']}, {facts['direction']}"
    return f"{facts['model']}{mixer}"


def _verdict(backend: str, against: list[str], judged: Mapping[str, Any]) -> str:
    if backend in judged["runs"]:
        return "runs" + (" in some layers; not: " + "; ".join(against) if against else "")
    return "cannot run: " + "; ".join(against) if against else "could run"


def _figures(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    parameters, decay, flops = facts["parameters"], facts["weight_decay"], facts["flops"]
    if "images" in facts:
        channels, height, width = facts["images"]
        sample, rows = "image", [("images", f"{channels} x {height} x {width}"), ("classes", str(facts["classes"]))]
    else:
        sample, rows = "sequence", [("vocabulary", f"{facts['vocabulary']:,}")]
        if "classes" in facts:
            sample = "document"
            rows.append(("classes", str(facts["classes"])))
        if facts.get("pooling") is not None:
            rows.append(("pooling", facts["pooling"]))
    if facts["tokens"] is not None:
        told = " (assumed: the model does not tell a length)" if facts.get("tokens_are_assumed") else ""
        rows.append(("tokens", f"{facts['tokens']}{told}"))
    rows.append(("parameters", f"{parameters['total']:,}"))
    if parameters["trainable"] != parameters["total"]:
        rows.append(("  trainable", f"{parameters['trainable']:,}"))
    rows += [(f"  {name}", f"{count:,}") for name, count in parameters["parts"].items()]
    rows.append(("without weight decay", f"{decay['without']:,}"))
    rows.append((f"FLOPs of one {sample}", f"{_scaled(flops['forward'])}, forward ({flops['source']})"))
    layers = Counter(
        (state["numbers"], state["growth"], state["readings"], _shapes(state["tensors"])) for state in facts["state"]
    )
    for (numbers, growth, readings, tensors), count in layers.items():
        more = f", and {growth:,} more with each token" if growth else ""
        rows.append(("state", f"{count} layers, each {numbers:,} numbers = {readings} x ({tensors}){more}"))
    return rows


def _scaled(count: int) -> str:
    return f"{count / 1e9:,.2f} G" if count >= 1e9 else f"{count / 1e6:,.2f} M"


def _shapes(tensors: Mapping[str, list[int]]) -> str:
    return " + ".join(f"{name} {' x '.join(map(str, shape))}".rstrip() for name, shape in tensors.items())
