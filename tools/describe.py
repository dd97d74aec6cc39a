"""`longseq describe`: the parts of a model, its cost, and the kernels that it would use."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import timm
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from torch import nn

from longseq import mixers
from longseq.parameters import count_parameters
from longseq.tasks import registry
from longseq.tasks.circumstances import choose_device
from longseq.tasks.commands import Describe
from longseq.tasks.image.config import DataInfo
from longseq.tasks.registry import choose, read_experiment, with_any_choice
from longseq.tasks.report import quiet_libraries
from longseq.tasks.training import checkpoint
from longseq.tasks.training.configuration import Config, resolve
from longseq.tasks.training.recipe import device_batch_size
from longseq.tools.export.file_model import FileModel
from longseq.tools.model_facts import describe_model

__all__ = ["describe_model", "find_devices", "list_mixers", "list_models", "print_description", "run"]


@quiet_libraries()
def run(cfg: DictConfig) -> Any:
    """Print and return facts about a model, or a list of mixers or models."""
    # Without logger and callbacks: their paths are in a run folder, which this command does not have.
    config = read_experiment({**resolve(cfg), "logger": None, "callbacks": {}}, Describe)
    if config["list"] is not None:
        gather, show = LISTS[config["list"]]
        facts: Any = gather()
    else:
        show = print_description
        model, data, recipe = _model_and_data(config)
        device = str(choose_device(config["device"]))
        described = model.architecture() if isinstance(model, FileModel) else model
        facts = {**describe_model(described, data, device, _precision(config)), "devices": find_devices()}
        if isinstance(model, FileModel):  # its kernels are those of its program
            facts |= {"operations": {}, "file": model.summary()}
        facts |= {} if recipe is None else {"recipe": recipe}
    if config["format"] == "json":
        print(json.dumps(facts, indent=2))
    else:
        show(facts, Console())
    return facts


def _precision(config: Config) -> torch.dtype:
    """The type in which a training with this configuration computes; float32 for a checkpoint."""
    name = "" if config["checkpoint"] is not None else str(config["trainer"].get("precision"))
    kinds = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    return kinds.get(name.partition("-")[0], torch.float32)


def _model_and_data(config: Config) -> tuple[nn.Module, dict[str, Any], str | None]:
    """The model of the checkpoint or a new one, the info of its data, and the recipe that the data would choose."""
    if config["checkpoint"] is not None:
        loaded = checkpoint.load(config["checkpoint"], tasks=registry.names())
        return loaded.backbone, loaded.data, None
    ready = with_any_choice(config)
    data = ready["data"]
    if config["task"]["name"] in registry.like("image") and data.get("num_classes") is not None:
        # The model can be described without images.
        classes = int(data["num_classes"])
        unseen = {"mean": [0.5], "std": [0.5], "interpolation": "bicubic", "crop_pct": 1.0, "in_chans": 3}
        info: Any = DataInfo.from_dict({**unseen, **data, "class_names": [str(index) for index in range(classes)]})
    else:
        info = registry.of(config).data.from_config(ready, batch_size=device_batch_size(ready)).info
    chosen, reason = choose(config, info) if info.sizes else (ready, None)
    return registry.of(config).model.build(chosen, info), info.to_dict(), reason


def find_devices() -> list[str]:
    """The devices that torch can use here, in words."""
    devices = [f"cpu: {platform.processor() or platform.machine()}, threads: {torch.get_num_threads()}"]
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


def _print_mixers(rows: list[dict[str, Any]], console: Console) -> None:
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


def _print_models(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table("name", "parameters")
    for row in rows:
        table.add_row(row["name"], f"{row['parameters']:,}")
    console.print(table)


# What `list=NAME` collects, and how it is printed.
LISTS: dict[str, tuple[Callable[[], Any], Callable[[Any, Console], None]]] = {
    "mixers": (list_mixers, _print_mixers),
    "models": (list_models, _print_models),
}


def print_description(facts: Mapping[str, Any], console: Console) -> None:
    """Print a description of a model: a table of figures, a table of kernels, the devices."""
    mixer = "" if facts["mixer"] is None else f", mixer {facts['mixer']}, {facts['direction']}"
    table = Table(title=f"{facts['model']}{mixer}", title_justify="left", show_header=False)
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


def _verdict(backend: str, against: list[str], judged: Mapping[str, Any]) -> str:
    if backend in judged["runs"]:
        return "runs" + (" in some layers; not: " + "; ".join(against) if against else "")
    return "cannot run: " + "; ".join(against) if against else "could run"


def _figures(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    parameters, decay, flops = facts["parameters"], facts["weight_decay"], facts["flops"]
    rows = []
    if "file" in facts:
        file = facts["file"]
        opset = f", opset {file['opset']}" if "opset" in file else ""
        nodes = "".join(f", {count} {name}" for name, count in file.get("operators", {}).items())
        rows.append(("file", f"{file['format']}{opset}{nodes}, {file['size'] / 2**20:.1f} MiB"))
    sample = "sequence"
    if "images" in facts:
        sample = "image"
        rows.append(("images", " x ".join(str(size) for size in facts["images"])))
    elif "classes" in facts:
        sample = "document"
    for name in ("vocabulary", "classes", "pooling", "tokens"):
        if facts.get(name) is not None:
            rows.append((name, str(facts[name])))
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
