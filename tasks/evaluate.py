"""`longseq evaluate`: measure a checkpoint on its own data or on other data of the same classes."""

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from longseq.tasks import assemble
from longseq.tasks.image.data import ImageDataModule
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.sources import first_line
from longseq.tasks.probe.build import build_datamodule as probe_data
from longseq.tasks.probe.data import ProbeDataModule
from longseq.tasks.probe.info import ProbeInfo
from longseq.tasks.report import per_class_accuracy, print_rows, quiet_libraries, shorten
from longseq.tasks.training import checkpoint as checkpoints
from longseq.tasks.training import processes
from longseq.tasks.training.callbacks.stop import StopTogether, stoppable
from longseq.tasks.training.callbacks.unreadable import UnreadableImages
from longseq.tasks.training.files import write_text

# Images at a time where data.eval_batch_size does not say.
EVALUATION_BATCH = 64


def run(cfg: DictConfig) -> dict[str, float]:
    """Measure `cfg.checkpoint` on `cfg.split`; prints the metrics, writes them as json and returns them."""
    quiet_libraries()
    processes.follow_parent()
    config = assemble.plain(cfg)
    split, checkpoint = config["split"], config["checkpoint"]
    if split not in ("test", "val"):
        raise ValueError(f"split={split!r} is unknown: choose test or val")
    if checkpoint is None:
        raise ValueError("give checkpoint=FILE, such as outputs/image/RUN/checkpoints/best.ckpt")
    changes = {key: value for key, value in config["data"].items() if value is not None}
    loaded = _load(config, changes.get("img_size"))
    info = assemble.info_from_dict(loaded.config, loaded.data)
    trained = loaded.config | {"trainer": config["trainer"]}
    datamodule: ImageDataModule | ProbeDataModule
    if isinstance(info, ProbeInfo):
        trained["data"] = _changed_probe(loaded.config["data"], changes)
        datamodule = probe_data(trained, EVALUATION_BATCH)
        if split == "val":  # the trainer tests on it, under the names of its own slices
            trained["data"] |= {"test": trained["data"]["validation"]}
        _check_vocabulary(datamodule.info, info)
    else:
        datamodule = _datamodule(loaded.config, changes, split, info)
        _check_classes(datamodule.info, info, checkpoint, mapped="class_map" in changes)
    task = assemble.build_measurement(trained, loaded.backbone, info)
    trainer = assemble.build_trainer(config, [StopTogether(), UnreadableImages()])
    datamodule.trainer = trainer
    loader = datamodule.test_dataloader() if split == "test" else datamodule.val_dataloader()
    datamodule.test_dataloader = lambda: loader  # type: ignore[method-assign]
    with stoppable():
        (tested,) = trainer.test(task, datamodule=datamodule, verbose=False)
    metrics = {key.replace("test/", f"{split}/"): float(value) for key, value in tested.items()}
    output = config["output"] or _beside(Path(checkpoint)) / f"evaluation_{split}.json"
    _report(metrics, task, info, split, Path(output))
    return metrics


def _load(config: dict[str, Any], img_size: int | None) -> checkpoints.Loaded:
    """The trained model, made to take images of another size where one is asked for."""
    path, weights = config["checkpoint"], config["weights"]
    loaded = checkpoints.load(path, weights=weights, tasks=assemble.TASKS)
    if img_size in (None, loaded.data.get("img_size")) or loaded.task_name != "image":
        return loaded
    if not isinstance(img_size, int) or img_size < 1:
        raise ValueError(f"data.img_size={img_size} must be a number of pixels")
    loaded = checkpoints.load(path, weights=weights, any_resolution=True)
    try:
        with torch.inference_mode():
            loaded.backbone(torch.zeros(1, loaded.data["in_chans"], img_size, img_size))
    except (AssertionError, RuntimeError, ValueError) as error:
        name = loaded.config["model"]["name"]
        raise ValueError(f"data.img_size={img_size} does not suit this {name}: {first_line(error)}") from error
    return loaded


def _datamodule(trained: dict[str, Any], changes: dict[str, Any], split: str, info: DataInfo) -> ImageDataModule:
    own = trained["data"]
    datamodule = ImageDataModule(**(own | changes), batch_size=EVALUATION_BATCH, seed=trained["seed"])
    foreign = datamodule.source != own["source"] or _absolute(datamodule.root) != _absolute(own.get("root"))
    datamodule.setup_evaluation(split, info.class_names, foreign=foreign)
    return datamodule


def _changed_probe(own: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    if unknown := sorted(set(changes) - set(own)):
        raise ValueError(f"data.{unknown[0]} is no key of a probe: it has {', '.join(own)}")
    options = changes.get("options", {})
    return own | changes | {"options": own["options"] | options if isinstance(options, dict) else options}


def _check_vocabulary(found: ProbeInfo, trained: ProbeInfo) -> None:
    if found.vocab_size > trained.vocab_size:
        raise ValueError(
            f"the data has {found.vocab_size} tokens, the model {trained.vocab_size}: give data with as many"
        )


def _absolute(root: str | None) -> Path | None:
    return None if root is None else Path(root).expanduser().resolve()


def _check_classes(found: DataInfo, trained: DataInfo, checkpoint: str, *, mapped: bool) -> None:
    if mapped:
        if found.num_classes > trained.num_classes:
            raise ValueError(f"data.class_map numbers {found.num_classes} classes, the model has {trained.num_classes}")
    elif found.class_names != trained.class_names:
        extra = sorted(set(found.class_names) ^ set(trained.class_names))[:3]
        raise ValueError(
            f"the data's {found.num_classes} classes are not the {trained.num_classes} of {checkpoint} (they differ in "
            f"{', '.join(extra) or 'their order'}); give data with the same class folders, or data.class_map"
        )


def _beside(checkpoint: Path) -> Path:
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == "checkpoints" else folder


@rank_zero_only
def _report(metrics: dict[str, float], task: Any, info: assemble.Info, split: str, output: Path) -> None:
    written: dict[str, Any] = dict(metrics)
    rows = [(key, f"{value:.4f}") for key, value in metrics.items()]
    if isinstance(info, DataInfo):
        images = int(task.confusion_matrix.sum())
        written = {f"{split}/images": images, **metrics, "per_class": per_class_accuracy(task.confusion_matrix, info)}
        rows.insert(0, (f"{split}/images", str(images)))
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, json.dumps(written, indent=2) + "\n")
    print_rows([*rows, ("written", shorten(output))])
