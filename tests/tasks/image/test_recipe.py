"""`recipe=auto` by the size of the set, `recipe=finetune` from trained weights, `recipe.learning_rate=find`."""

from __future__ import annotations

import shutil
from argparse import Namespace
from typing import Any

import pytest
import timm
import torch
import yaml
from omegaconf import DictConfig
from safetensors.torch import save_file
from timm.utils import CheckpointSaver, ModelEmaV3

import longseq
from longseq.tasks import registry, train
from longseq.tasks.image.config import DataInfo
from longseq.tasks.training.configuration import resolve

SMALL = ("data.img_size=16", "data.num_workers=0", "model.embed_dim=16", "model.depth=1", "mixer=attention")
QUIET = ("trainer=cpu", "callbacks.progress=null", "logger=csv")


@pytest.mark.parametrize(("images", "batch", "epochs"), [(270, 32, 300), (2_700, 64, 150)])
def test_a_recipe_fits_the_size_of_the_set(images, batch, epochs, compose_config):
    config, told = choose(compose_config("train", "data=image_folder", "output=run"), open_info(images))
    assert (config["recipe"]["batch_size"], config["recipe"]["epochs"]) == (batch, epochs)
    assert f"for {images:,} images: batch_size={batch}, epochs={epochs}, learning_rate=" in told


def test_a_large_set_has_the_recipe_of_imagenet(compose_config):
    info, words = open_info(1_281_167), ("scale=tiny", "output=run")
    config, _ = choose(compose_config("train", "data=image_folder", *words), info)
    vim, _ = choose(compose_config("train", "data=imagenet", *words), info)
    ours, theirs = config["recipe"], vim["recipe"]
    same = ("epochs", "batch_size", "learning_rate", "augment", "model", "loss")
    expected = {**theirs, "model": {"drop_path_rate": None}}  # which is 0
    assert [ours[key] for key in same] == [expected[key] for key in same]
    assert ours["optimizer"] == theirs["optimizer"]
    assert ours["schedule"]["warmup_epochs"] == theirs["schedule"]["warmup_epochs"]


def test_what_a_command_states_is_kept_and_the_rest_follows(compose_config):
    words = ("recipe.batch_size=128", "recipe.updates=70", "recipe.augment.mixing.cutmix=1.0")
    config, _ = choose(compose_config("train", "data=image_folder", "output=run", *words), open_info(1_000))
    recipe = config["recipe"]
    assert (recipe["batch_size"], recipe["updates"], recipe["epochs"]) == (128, 70, None)
    assert recipe["augment"]["mixing"]["cutmix"] == 1.0
    assert "recipe.batch_size" not in recipe["chosen"]
    assert "recipe.epochs" in recipe["chosen"]
    tuned, _ = choose(compose_config("train", "data=image_folder", "output=run", words[0], "init=x.ckpt"), open_info(9))
    assert tuned["recipe"]["learning_rate"] == 2e-4
    assert tuned["recipe"]["optimizer"]["layer_decay"] == 0.75


@pytest.mark.parametrize("epochs", ["auto", "null"])
@pytest.mark.parametrize(("updates", "warmup", "interval"), [(70, 0.5, 1), (7_000, 50.0, 20)])
def test_warmup_and_validations_follow_a_length_in_updates(epochs, updates, warmup, interval, compose_config):
    words = ("data=image_folder", "output=run", "recipe.batch_size=128", f"recipe.epochs={epochs}")
    config, _ = choose(compose_config("train", *words, f"recipe.updates={updates}"), open_info(1_000))
    recipe = config["recipe"]  # an epoch has 7 updates
    assert (recipe["epochs"], recipe["schedule"]["warmup_epochs"]) == (None, warmup)
    assert recipe["validate_every_epochs"] == interval


def test_the_chosen_batch_divides_over_devices_and_fits_few_images(compose_config):
    words = (
        "data=image_folder",
        "output=run",
        "trainer.devices=2",
        "trainer.accumulate_grad_batches=3",
        "trainer.accelerator=cpu",
    )
    for images, batch in ((20, 12), (300, 24), (40_000, 252)):
        config, _ = choose(compose_config("train", *words), open_info(images))
        assert config["recipe"]["batch_size"] == batch


@pytest.mark.slow
def test_a_run_repeats_what_it_chose_when_the_folder_has_grown(tmp_path, command_here, image_folder):
    shutil.copytree(image_folder, tmp_path / "images")
    words = ("train", "data=image_folder", "data.root=images", *SMALL, *QUIET, "recipe.epochs=1", "output=run")
    first = command_here(tmp_path, *words)
    assert first.returncode == 0, first.stderr
    assert "recipe auto for 24 images: batch_size=24, learning_rate=0.001, " in first.stdout
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["recipe"]
    assert (written["batch_size"], written["learning_rate"]) == (24, 1e-3)
    for number in range(20):
        shutil.copy(tmp_path / "images/train/class0/0.jpg", tmp_path / f"images/train/class0/new{number}.jpg")
    (tmp_path / "run" / "metrics.json").unlink()  # as if the run had been stopped
    other = command_here(tmp_path, *words, "resume=run/checkpoints/last.ckpt", "recipe.batch_size=12")
    assert other.returncode == 2
    assert "another configuration (recipe.batch_size: 24 there, 12 here)" in other.stderr
    again = command_here(tmp_path, *words, "resume=true")
    assert again.returncode == 0, again.stderr
    assert "continuing from run/checkpoints/last.ckpt" in again.stdout
    assert "the data have changed: train has 44 samples now, and had 24 when the model was trained" in again.stderr
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["recipe"] == written
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["hyper_parameters"]["config"]["recipe"] == written


@pytest.mark.slow
def test_a_learning_rate_is_found_and_recorded(tmp_path, command_here, tiny_overrides):
    search = ("recipe.learning_rate=find", "learning_rate_finder.num_training=20", "trainer.accumulate_grad_batches=2")
    words = ("train", *tiny_overrides, *QUIET, *search, "recipe.optimizer.layer_decay=0.5", "recipe.epochs=1")
    words += ("+trainer.limit_train_batches=4", "recipe.batch_size=32")
    done = command_here(tmp_path, *words, "hydra.run.dir=outputs/image/run")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "outputs" / "image" / "run"
    value = yaml.safe_load((run / "config.yaml").read_text())["recipe"]["learning_rate"]
    assert f"recipe.learning_rate={value:g}; the curve is in" in done.stdout
    heading, *rows = (run / "learning_rates.csv").read_text().splitlines()
    rates = [float(row.split(",")[0]) for row in rows]
    assert heading == "learning_rate,loss"
    assert len(rates) == 20
    assert rates == sorted(rates)
    assert any(value == pytest.approx(rate, rel=1e-2) for rate in rates)
    again = command_here(tmp_path, *words, "resume=true")
    assert "this run is finished: outputs/image/run" in again.stdout


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.slow
def test_timms_weights_are_tuned_with_a_new_head_for_other_classes(
    count, tmp_path, compose_config, image_folder, caplog
):
    options = {"depth": 1, "embed_dim": 24, "num_heads": 2}
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=count, **options)
    torch.nn.init.normal_(theirs.head.weight)
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    words = [f"+model.{key}={value}" for key, value in options.items()]
    data = ("data=image_folder", f"data.root={image_folder}", "data.num_workers=0", "data.img_size=32")
    model = ("model=timm", "model.name=vit_tiny_patch16_224", *words)
    config = ("recipe=finetune", f"init={tmp_path / 'weights.safetensors'}", f"output={tmp_path}")
    backbone = train.build(compose_config("train", *data, *model, *config, "trainer=cpu")).module.backbone
    for name in ("blocks.0.attn.qkv.weight", "cls_token"):
        assert torch.equal(backbone.state_dict()[name], theirs.state_dict()[name])
    assert backbone.patch_embed.proj.weight.shape[-1] == 4, "resampled from 16"
    assert backbone.head.weight.shape[0] == 3
    assert torch.equal(backbone.head.weight, theirs.head.weight) == (count == 3)
    assert ("the head is new: there are 3 classes, and the weights are of 5" in caplog.text) == (count == 5)
    other = compose_config("train", *data, "model=timm", "model.name=resnet10t", *config, "trainer=cpu")
    with pytest.raises(ValueError, match=r"init=.*weights.safetensors holds no weights of a resnet10t: ") as refused:
        train.build(other)
    assert len(str(refused.value)) < 400 + len(str(tmp_path))


@pytest.mark.slow
def test_what_timm_takes_in_part_is_refused_or_told(tmp_path, compose_config, image_folder):
    """Of some models timm loads whatever fits, and says nothing."""
    path = tmp_path / "weights.safetensors"
    data = ("data=image_folder", f"data.root={image_folder}", "data.num_workers=0", "data.img_size=32")

    def begin(*words):
        keys = ("model=timm", "recipe=finetune", f"init={path}", f"output={tmp_path}", "trainer=cpu")
        return train.build(compose_config("train", *data, *keys, *words)).module.backbone

    state = timm.create_model("dla46_c", num_classes=3).state_dict()
    save_file({key: value for key, value in state.items() if not key.startswith("level3.")}, path)
    with pytest.raises(ValueError, match=r"holds no weights of a dla46_c: level3\.\S+ is missing") as refused:
        begin("model.name=dla46_c")
    assert "\n" not in str(refused.value)
    save_file(timm.create_model("test_resnet", num_classes=0).state_dict(), path)
    with pytest.raises(ValueError, match=r"holds no weights of a dla46_c: base_layer\.0\.weight is missing"):
        begin("model.name=dla46_c")
    name, sizes = "vit_base_patch16_siglip_224", {"depth": 1, "embed_dim": 24, "num_heads": 2}
    words = (f"model.name={name}", *(f"+model.{key}={value}" for key, value in sizes.items()))
    theirs = timm.create_model(name, num_classes=3, img_size=32, patch_size=4, **sizes)
    save_file(theirs.state_dict(), path)
    for pooled in ((), ("+model.global_pool=avg",)):
        assert torch.equal(begin(*words, *pooled).blocks[0].attn.qkv.weight, theirs.blocks[0].attn.qkv.weight)


@pytest.mark.slow
def test_a_checkpoint_of_timms_train_is_tuned(tmp_path, compose_config, image_folder):
    """timm's saver writes `.pth.tar` files, with averaged weights beside the others; timm's loader takes them."""
    options = {"mixer": "attention", "patch_size": 4, "embed_dim": 16, "depth": 1, "img_size": 16, "num_classes": 3}
    theirs = timm.create_model("longseq_tiny_patch16_224", **options)
    average = ModelEmaV3(theirs)
    torch.nn.init.normal_(average.module.head.weight)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    arguments = Namespace(model="longseq_tiny_patch16_224")
    CheckpointSaver(
        theirs, optimizer, arguments, model_ema=average, checkpoint_dir=tmp_path, recovery_dir=tmp_path
    ).save_checkpoint(0, 50.0)
    path = tmp_path / "model_best.pth.tar"
    words = ("data=image_folder", f"data.root={image_folder}", *SMALL, "model.patch_size=4", f"init={path}")
    config = compose_config("train", *words, "recipe=finetune", f"output={tmp_path}", "trainer=cpu")
    backbone = train.build(config).module.backbone
    for name, value in average.module.state_dict().items():
        assert torch.equal(backbone.state_dict()[name], value), name
    built = timm.create_model("longseq_tiny_patch16_224", checkpoint_path=path, **options)
    built.save_pretrained(tmp_path / "saved")
    images = torch.randn(2, 3, 16, 16)
    same = longseq.from_pretrained(tmp_path / "saved")
    assert torch.equal(same(images), average.module.eval()(images))


@pytest.mark.slow
def test_our_weights_are_tuned_with_a_new_head_for_classes_of_other_names(tmp_path, compose_config, image_folder):
    shutil.copytree(image_folder, tmp_path / "others")
    for split in ("train", "val"):
        (tmp_path / "others" / split / "class2").rename(tmp_path / "others" / split / "class9")
    words = ("data=image_folder", *SMALL, "trainer=cpu", f"output={tmp_path}")
    first = train.build(compose_config("train", *words, f"data.root={image_folder}", "seed=1")).module.backbone
    first.save_pretrained(tmp_path / "model")
    tuned = {}
    for name, root in (("same", image_folder), ("other", tmp_path / "others")):
        given = (f"data.root={root}", "recipe=finetune", f"init={tmp_path / 'model'}", "recipe.freeze=body")
        module = train.build(compose_config("train", *words, *given)).module
        tuned[name] = module.backbone.state_dict()
        assert {key.split(".")[0] for key, p in module.backbone.named_parameters() if p.requires_grad} == {"head"}
        assert module.recipe.learning_rate == 1e-3, "a head alone learns faster"
    own = first.state_dict()
    heads = {key for key in own if key.startswith("head.")}
    assert all(torch.equal(own[key], tuned[name][key]) for name in tuned for key in own.keys() - heads)
    assert torch.equal(own["head.weight"], tuned["same"]["head.weight"])
    assert not torch.equal(own["head.weight"], tuned["other"]["head.weight"])


def open_info(images: int) -> DataInfo:
    channels = [0.5] * 3
    return DataInfo(["a", "b"], 2, 224, 3, channels, channels, "bicubic", 1.0, sizes={"train": images})


def choose(config: DictConfig, info: DataInfo) -> tuple[dict[str, Any], str | None]:
    return registry.choose(resolve(config), info)
