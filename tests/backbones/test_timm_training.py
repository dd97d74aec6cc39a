"""What timm's train.py and validate.py call, in their order: they are in timm's repository and not in its wheel."""

from __future__ import annotations

import importlib
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import pytest
import timm
import torch
from image_data import write_digits
from sklearn.datasets import load_digits
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.models import load_checkpoint, resume_checkpoint, safe_model_name
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.utils import CheckpointSaver, ModelEmaV3, get_outdir
from torch import Tensor, nn
from torch.utils.data import DataLoader

# The arguments of a command, with the options of the model after --model-kwargs.
ARGUMENTS = Namespace(
    **{"model": "longseq_tiny_patch16_224", "num_classes": 2, "gp": "avgmax", "drop_path": 0.1, "img_size": 16},
    **{"opt": "adamw", "lr": 5e-3, "weight_decay": 0.05, "momentum": 0.9, "layer_decay": 0.7},
    **{"sched": "cosine", "epochs": 4, "warmup_epochs": 0, "min_lr": 0.0, "decay_epochs": 30, "decay_rate": 0.1},
    model_kwargs={
        **{"mixer": "deltanet", "img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "reg_tokens": 2},
    },
)
# Those that the script passes on without a value.
ABSENT = dict.fromkeys(("drop_block_rate", "bn_momentum", "bn_eps"))


class Run(NamedTuple):
    """The objects of a run of train.py."""

    model: nn.Module
    average: ModelEmaV3
    optimizer: torch.optim.Optimizer
    saver: CheckpointSaver


def build_model(**options: object) -> nn.Module:
    """The model, as both scripts make it."""
    given = {"pretrained": False, "in_chans": 3, "num_classes": ARGUMENTS.num_classes, "global_pool": ARGUMENTS.gp}
    return timm.create_model(ARGUMENTS.model, scriptable=False, **given, **ARGUMENTS.model_kwargs, **options)


def begin(folder: Path, resume: Path | None = None) -> tuple[Run, int]:
    """A new run, or one that goes on, and its first epoch."""
    importlib.import_module("longseq")  # --device-modules longseq
    torch.manual_seed(42)
    model = build_model(drop_rate=0.0, drop_path_rate=ARGUMENTS.drop_path, checkpoint_path="", **ABSENT)
    optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=ARGUMENTS))
    first = 0 if resume is None else resume_checkpoint(model, str(resume), optimizer=optimizer, log_info=False)
    average = ModelEmaV3(model, decay=0.5)
    if resume is not None:
        load_checkpoint(average.module, str(resume), use_ema=True)
    place = get_outdir(str(folder), safe_model_name(ARGUMENTS.model))
    saver = CheckpointSaver(
        model, optimizer, args=ARGUMENTS, model_ema=average, checkpoint_dir=place, recovery_dir=place, max_history=2
    )
    return Run(model, average, optimizer, saver), first


def train(run: Run, loader: DataLoader[tuple[Tensor, Tensor]], epochs: range) -> None:
    """Train these epochs, and save after each."""
    schedule, _ = create_scheduler_v2(run.optimizer, **scheduler_kwargs(ARGUMENTS), updates_per_epoch=len(loader))
    for epoch in epochs:
        schedule.step(epoch)
        torch.manual_seed(epoch)  # drop path
        run.model.train()
        for images, labels in loader:
            run.optimizer.zero_grad()
            nn.functional.cross_entropy(run.model(images), labels).backward()
            run.optimizer.step()
            run.average.update(run.model)
        run.saver.save_checkpoint(epoch, metric=measure(run.average.module, loader))


def measure(model: nn.Module, loader: DataLoader[tuple[Tensor, Tensor]]) -> float:
    """The accuracy in percent."""
    with torch.inference_mode():
        found = torch.cat([model.eval()(images).argmax(1) == labels for images, labels in loader])
    return 100 * float(found.float().mean())


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> DataLoader[tuple[Tensor, Tensor]]:
    """timm's loader of a folder of handwritten zeros and ones, in the order of the files."""
    root = tmp_path_factory.mktemp("images")
    for number, name in enumerate(("zero", "one")):
        write_digits(root / "train" / name, "", [i for i in range(320) if load_digits().target[i] == number])
    found = create_dataset("", root=str(root), split="train", is_training=False)
    config = resolve_data_config(vars(ARGUMENTS), model=build_model())
    assert config["input_size"] == (3, 16, 16)
    chosen = {key: config[key] for key in ("input_size", "interpolation", "mean", "std", "crop_pct")}
    return create_loader(found, batch_size=8, use_prefetcher=False, num_workers=0, device=torch.device("cpu"), **chosen)


@pytest.mark.slow
def test_train_resumes_and_validate_finds_the_same_accuracy(tmp_path: Path, loader: DataLoader) -> None:
    whole, _ = begin(tmp_path / "whole")
    scales = {round(group["lr_scale"], 3) for group in whole.optimizer.param_groups}
    assert scales == {1.0, 0.7, 0.49, 0.343}  # the head, two blocks, the patches
    train(whole, loader, range(4))

    stopped, _ = begin(tmp_path / "parts")
    train(stopped, loader, range(2))
    folder = tmp_path / "parts" / "longseq_tiny_patch16_224"
    resumed, first = begin(tmp_path / "parts", folder / "last.pth.tar")
    assert first == 2
    train(resumed, loader, range(first, 4))
    for wanted, found in ((whole.model, resumed.model), (whole.average.module, resumed.average.module)):
        weights = found.state_dict()
        assert all(torch.equal(value, weights[name]) for name, value in wanted.state_dict().items())

    best = measure(whole.average.module, loader)
    assert best > 90
    validated = build_model()
    load_checkpoint(validated, str(folder / "last.pth.tar"), use_ema=True)
    assert measure(validated, loader) == best
    without_average = build_model()
    load_checkpoint(without_average, str(folder / "last.pth.tar"), use_ema=False)
    head, averaged = (model.state_dict()["head.weight"] for model in (without_average, validated))
    assert torch.equal(head, resumed.model.state_dict()["head.weight"])
    assert not torch.equal(head, averaged)
