"""From a configuration to the objects of a run: data, backbone, task, callbacks, trainer."""

import inspect
import typing
from collections.abc import Mapping
from typing import Any

import timm
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from timm.models import is_model, model_entrypoint
from torch import nn

from longseq import mixers
from longseq.backbones.image import ImageBackbone, checkpoint_filter_fn
from longseq.mixers.pattern import options_by_name, spell_pattern
from longseq.tasks.image.data import ImageDataModule
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.mixing import BatchMixing
from longseq.tasks.image.module import ImageClassifier
from longseq.tasks.probe import build as probe
from longseq.tasks.probe.data import ProbeDataModule
from longseq.tasks.probe.info import ProbeInfo
from longseq.tasks.training import targets
from longseq.tasks.training.callbacks.clock import RunClock
from longseq.tasks.training.callbacks.ema import ExponentialMovingAverage
from longseq.tasks.training.callbacks.stop import StopTogether
from longseq.tasks.training.command import MARKS
from longseq.tasks.training.files import WholeCheckpoints
from longseq.tasks.training.module import TrainedModule

Config = Mapping[str, Any]
Info = DataInfo | ProbeInfo

TASKS = ("image", "probe")

# `${mixer_label:${mixer.name}}` names a run by its mixer, also where a hybrid's pattern is a list or a dictionary.
OmegaConf.register_new_resolver("mixer_label", spell_pattern, replace=True)


def plain(config: DictConfig | Config) -> dict[str, Any]:
    """The configuration as plain containers with every interpolation resolved, without the marks of its files."""
    if not isinstance(config, DictConfig):
        return dict(config)
    whole: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return {key: _without_marks(value) for key, value in whole.items() if key not in MARKS}


def _without_marks(section: Any) -> Any:
    return {key: value for key, value in section.items() if key not in MARKS} if isinstance(section, dict) else section


def task_name(config: Config) -> str:
    """The task of a configuration, one of TASKS."""
    name = config["task"]["name"]
    if name not in TASKS:
        raise ValueError(f"task.name={name} is unknown: choose one of {', '.join(TASKS)}")
    return name


def info_from_dict(config: Config, values: Config) -> Info:
    """What a checkpoint says of its data, as the task of its configuration describes it."""
    return ProbeInfo.from_dict(values) if task_name(config) == "probe" else DataInfo.from_dict(values)


def device_count(config: Config) -> int:
    """Processes of a run: devices x nodes, `auto` and -1 counted on this machine."""
    trainer = config["trainer"]
    devices = trainer.get("devices", 1)
    if devices in ("auto", -1, "-1"):
        cpu = trainer.get("accelerator") == "cpu"
        devices = 1 if cpu or not torch.cuda.is_available() else torch.cuda.device_count()
    elif isinstance(devices, str):
        # As in Lightning: "2" counts devices, "0,2" and "2," name them.
        devices = int(devices) if devices.isdigit() else len([part for part in devices.strip("[]").split(",") if part])
    elif not isinstance(devices, int):
        devices = len(devices)
    return int(devices) * int(trainer.get("num_nodes", 1))


def device_batch_size(config: Config) -> int:
    """What one device gets in one forward pass. ValueError if the effective batch does not divide."""
    effective = config["recipe"]["batch_size"]
    devices = device_count(config)
    accumulate = config["trainer"].get("accumulate_grad_batches", 1)
    parts = devices * accumulate
    if effective < parts or effective % parts:
        nearest = max(parts, round(effective / parts) * parts)
        raise ValueError(
            f"recipe.batch_size={effective} does not divide over {devices} device(s) x {accumulate} accumulated "
            f"batch(es): effective batch = per-device batch x devices x trainer.accumulate_grad_batches; "
            f"set recipe.batch_size={nearest}"
        )
    return effective // parts


def effective_learning_rate(config: Config) -> float:
    """The recipe's learning rate, scaled linearly from its reference batch size to the one used."""
    recipe = config["recipe"]
    reference = recipe.get("reference_batch_size")
    return recipe["learning_rate"] * (recipe["batch_size"] / reference if reference else 1.0)


def build_datamodule(config: DictConfig | Config) -> ImageDataModule | ProbeDataModule:
    """The data module, prepared and set up: its `info` tells what the model must know of the data."""
    config = plain(config)
    if task_name(config) == "probe":
        return probe.build_datamodule(config, device_batch_size(config))
    if "source" not in config["data"]:
        raise ValueError(f"data={config['data']['name']} is no image data: give task=probe with it")
    datamodule = ImageDataModule(
        **config["data"], batch_size=device_batch_size(config), seed=config["seed"], augment=config["recipe"]["augment"]
    )
    datamodule.prepare_data()
    datamodule.setup()
    return datamodule


def build_backbone(config: DictConfig | Config, info: Info) -> nn.Module:
    """The model that `config.model` names: one of timm for images, a token model for a probe.

    Options that are null in `config.model` are left to the recipe (`recipe.model`) and then to the model. The weights
    are drawn from `config.seed`. ValueError for an unknown model, mixer, option or size.
    """
    config = plain(config)
    if isinstance(info, ProbeInfo):
        return probe.build_backbone(config, info, _mixer_options(config))
    options = {key: value for key, value in config["model"].items() if key not in ("name", "label")}
    name = config["model"]["name"]
    if not is_model(name):
        near = timm.list_models(f"*{name.split('_')[0]}*")[:3]
        raise ValueError(f"unknown model.name={name!r}: `timm.list_models()` lists them{_such_as(near)}")
    options = (config["recipe"].get("model") or {}) | {k: v for k, v in options.items() if v is not None}
    ours = name.startswith("longseq_")
    if ours:
        options |= {"mixer": config["mixer"]["name"], "mixer_options": _mixer_options(config)}
        options = _patches(info.img_size, overlapping=True) | options | {"img_size": info.img_size}
    else:
        options = _sizes(name, info.img_size) | options
    torch.manual_seed(config["seed"])
    try:
        return timm.create_model(name, num_classes=info.num_classes, in_chans=info.in_chans, **options)
    except TypeError as error:
        raise ValueError(f"model {name} does not take these options: {error}") from error


def initialize(backbone: nn.Module, trained: nn.Module) -> None:
    """Copy the weights of `trained`; positions are interpolated to the grid, the head of other classes stays new.

    ValueError where the two models differ in more.
    """
    state, wanted = trained.state_dict(), backbone.state_dict()
    if isinstance(backbone, ImageBackbone):
        state = checkpoint_filter_fn(state, backbone)
    head = tuple(f"{name}." for name, module in backbone.named_modules() if module is backbone.get_classifier())  # type: ignore[operator]
    kept = {
        key: value
        for key, value in state.items()
        if not (key.startswith(head) and key in wanted and value.shape != wanted[key].shape)
    }
    differing = sorted(key for key in wanted.keys() | kept.keys() if _shape(wanted, key) != _shape(kept, key))
    differing = [key for key in differing if not (key.startswith(head) and key not in kept)]
    if differing:
        raise ValueError(
            f"init: the checkpoint's model differs from the new one in {len(differing)} weights, {differing[0]} first; "
            f"repeat its model, mixer and scale"
        )
    backbone.load_state_dict(kept, strict=False)


def build_measurement(config: DictConfig | Config, backbone: nn.Module, info: Info) -> TrainedModule:
    """The Lightning module around a trained `backbone` that measures and cannot train: `config` builds nothing."""
    return _build_task(plain(config), backbone, info, None, None)


def build_task(config: DictConfig | Config, backbone: nn.Module, info: Info) -> TrainedModule:
    """The Lightning module around `backbone`; its checkpoints carry the configuration and the data's description."""
    config = plain(config)
    recipe = config["recipe"]
    warmup = recipe["schedule"].get("warmup_epochs", 0)
    if warmup >= recipe["epochs"] and not config["trainer"].get("fast_dev_run"):
        raise ValueError(
            f"recipe.schedule.warmup_epochs={warmup} must end before recipe.epochs={recipe['epochs']}; "
            f"set recipe.schedule.warmup_epochs=0 or more epochs"
        )
    return _build_task(
        config,
        backbone,
        info,
        targets.build(recipe["optimizer"], targets.OPTIMIZERS, "recipe.optimizer"),
        targets.build(recipe["schedule"], targets.SCHEDULES, "recipe.schedule"),
    )


def _build_task(config: Config, backbone: nn.Module, info: Info, optimizer: Any, schedule: Any) -> TrainedModule:
    recipe = config["recipe"]
    if isinstance(info, ProbeInfo):
        return probe.build_task(config, backbone, info, effective_learning_rate(config), optimizer, schedule)
    return ImageClassifier(
        backbone,
        num_classes=info.num_classes,
        optimizer=optimizer,
        schedule=schedule,
        learning_rate=effective_learning_rate(config),
        epochs=recipe["epochs"],
        mixing=BatchMixing(
            info.num_classes,
            seed=config["seed"],
            label_smoothing=recipe["loss"]["label_smoothing"],
            **recipe["augment"].get("mixing", {}),
        ),
        binary_cross_entropy=recipe["loss"].get("bce", False),
        seed=config["seed"],
        compile_mode=config.get("compile"),
        hyperparameters={"config": config, "data": info.to_dict()},
    )


def build_callbacks(config: DictConfig | Config) -> list[Callback]:
    """The callbacks of `config.callbacks` that are not null, behind those that every run or its recipe has."""
    config = plain(config)
    callbacks: list[Callback] = [StopTogether(), RunClock()]
    if config["recipe"].get("ema"):
        callbacks.append(ExponentialMovingAverage(**config["recipe"]["ema"]))
    callbacks += [
        targets.build(options, targets.CALLBACKS, f"callbacks.{name}")
        for name, options in config["callbacks"].items()
        if options
    ]
    if config["trainer"].get("enable_progress_bar") is False:
        callbacks = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
    return callbacks


def build_trainer(config: DictConfig | Config, callbacks: list[Callback] | None = None) -> Trainer:
    """The Trainer of `config.trainer` with the configured logger, writing below `config.output`."""
    config = plain(config)
    logger = targets.build(config["logger"], targets.LOGGERS, "logger") if config.get("logger") else False
    # The data module shards by itself, without padding; a first validation before training would only cost time.
    fixed: dict[str, Any] = {"use_distributed_sampler": False, "num_sanity_val_steps": 0, "enable_model_summary": False}
    try:
        return Trainer(
            **config["trainer"],
            **fixed,
            callbacks=callbacks or [],
            logger=logger,
            plugins=[WholeCheckpoints()],
            default_root_dir=config.get("output"),
        )
    except (TypeError, MisconfigurationException) as error:
        raise ValueError(f"the trainer cannot be built: {error}; see trainer=..., or trainer=cpu") from error


def _mixer_options(config: Config) -> dict[str, Any]:
    """The options of `config.mixer`, those of the scale where they are not set; for a hybrid by the mixers' names."""
    chosen = options_by_name(config["mixer"]["name"], config["mixer"].get("options"))
    usual = config["scale"].get("mixer") or {}
    filled = {name: _fill_in(name, options, usual) for name, options in chosen.items()}
    return filled if len(filled) > 1 else next(iter(filled.values()))


def _fill_in(name: str, chosen: dict[str, Any], usual: Config) -> dict[str, Any]:
    known = mixers.options(name)
    unset = {key: value for key, value in usual.items() if key in known and chosen.get(key) is None}
    # A number of heads that was asked for says how wide they are.
    return chosen | (unset if chosen.get("num_heads") is None else {})


def _sizes(name: str, img_size: int) -> dict[str, int]:
    """What a timm model of a fixed image size takes to fit `img_size`; its architecture stays from 128 pixels on."""
    taken = _constructor_defaults(name)
    if not timm.get_pretrained_cfg(name).fixed_input_size or "img_size" not in taken:  # type: ignore[union-attr]
        return {}
    # ViT and its kin have one patch grid, of 16 pixels by default; pyramids such as Swin shrink by themselves.
    small = img_size < 128 and taken.get("patch_size") == 16
    return (_patches(img_size, overlapping=False) if small else {}) | {"img_size": img_size}


def _constructor_defaults(name: str) -> dict[str, Any]:
    """The options of a timm model's constructor, through its base classes."""
    defaults: dict[str, Any] = {}
    made = typing.get_type_hints(model_entrypoint(name)).get("return")
    for cls in getattr(made, "__mro__", ()):
        for key, parameter in inspect.signature(cls.__init__).parameters.items():
            defaults.setdefault(key, parameter.default)
        if cls is nn.Module or "kwargs" not in inspect.signature(cls.__init__).parameters:
            break
    return defaults


def _patches(img_size: int, *, overlapping: bool) -> dict[str, int]:
    """The usual patches for images of a size: 16 pixels from 128 on, else 4; for the 8 of digits, 9 that overlap."""
    if img_size >= 128:
        return {"patch_size": 16}
    if img_size > 8:
        return {"patch_size": 4}
    return {"patch_size": 6, "stride": 1} if overlapping else {"patch_size": 2}


def _shape(state: Mapping[str, torch.Tensor], key: str) -> torch.Size | None:
    return state[key].shape if key in state else None


def _such_as(names: list[str]) -> str:
    return f", such as {', '.join(names)}" if names else ""
