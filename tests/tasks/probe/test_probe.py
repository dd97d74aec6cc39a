"""`longseq train task=probe`, and `longseq evaluate` on its checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_probe import TINY

import longseq.conf
from longseq import mixers, plugins
from longseq.tasks import evaluate, train
from longseq.tasks.probe import generators
from longseq.tasks.probe.data import MixtureSampler, ProbeDataModule, SliceSampler
from longseq.tasks.probe.module import ProbeTask
from longseq.tasks.training.checkpoint import load
from longseq.tasks.training.configuration import resolve


def make(compose_config: Any, folder: Path, *overrides: str) -> Any:
    return compose_config("train", *TINY, f"output={folder}", *overrides)


def read(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


@pytest.mark.slow
def test_a_run_leaves_what_an_image_run_leaves(compose_config, tmp_path):
    value = train.run(make(compose_config, tmp_path / "run", "mixer=linear_attention", "trainer.log_every_n_steps=4"))
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert value == metrics["val/accuracy"]
    assert {"test/accuracy", "test/sequence_accuracy", "test/loss", "sequences_per_second"} <= metrics.keys()
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))
    loaded = load(tmp_path / "run" / "checkpoints" / "best.ckpt", tasks=("probe",))
    assert loaded.task_name == "probe"
    assert loaded.data["generator"] == "mqar"
    assert loaded.backbone(torch.zeros(1, 5, dtype=torch.long))[0].shape == (1, 5, 16)

    evaluated = evaluate.run(evaluation(compose_config, tmp_path / "run"))
    assert {key: evaluated[key] for key in ("test/accuracy", "test/loss")} == pytest.approx(
        {key: metrics[key] for key in ("test/accuracy", "test/loss")}
    )
    longer = "data.test=[{tokens: 32, samples: 20}, {tokens: 64, pairs: 3, samples: 30}]"
    extrapolated = evaluate.run(evaluation(compose_config, tmp_path / "run", longer))
    assert {"test/accuracy", "test/accuracy_32", "test/accuracy_64x3"} <= extrapolated.keys()
    mean = (20 * 2 * extrapolated["test/accuracy_32"] + 30 * 3 * extrapolated["test/accuracy_64x3"]) / (40 + 90)
    assert extrapolated["test/accuracy"] == pytest.approx(mean)
    other = "data.validation=[{samples: 5, name: few}, {samples: 6, name: more}, {samples: 7, name: most}]"
    validated = evaluate.run(evaluation(compose_config, tmp_path / "run", longer, other, "split=val"))
    names = {"val/accuracy_few", "val/accuracy_more", "val/accuracy_most"}
    assert {key for key in validated if "accuracy_" in key.replace("sequence_accuracy", "")} == names


def evaluation(compose_config: Any, run: Path, *overrides: str) -> Any:
    return compose_config("evaluate", f"checkpoint={run / 'checkpoints' / 'best.ckpt'}", "trainer=cpu", *overrides)


@pytest.mark.slow
def test_a_mixer_learns_to_recall_and_training_stops_there(compose_config, tmp_path):
    words = ("mixer=deltanet", "data.train=[{samples: 4000}]", "recipe.learning_rate=1e-2", "recipe.epochs=20")
    words += ("model.depth=2", "model.d_model=32", "model.mlp=none", "callbacks.early_stopping.stopping_threshold=0.95")
    train.run(make(compose_config, tmp_path, *words))
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["test/accuracy"] > 0.9
    assert metrics["epochs"] < 20, "training stops where the probe is solved"


@pytest.mark.parametrize(
    ("data", "overrides"),
    [
        ("regbench", ["data.options.strings=[2,3]", "data.options.string_length=[1,5]"]),
        ("mad_compression", ["mixer=hybrid", "mixer.name=deltanet+attention"]),
        ("mqar_mixture", ["data.options.vocab_size=600", "model.direction=bidirectional"]),
    ],
)
@pytest.mark.slow
def test_every_kind_of_probe_takes_a_step(data, overrides, compose_config, tmp_path):
    slices = [] if data == "mqar_mixture" else ["data.train=[{samples: 8}]", "data.test=[{samples: 4}]"]
    small = [
        f"data.{split}.{index}.samples=4" for split, count in (("train", 5), ("test", 7)) for index in range(count)
    ]
    config = compose_config(
        "train",
        "task=probe",
        f"data={data}",
        "trainer=cpu",
        "data.validation=[{samples: 4}]",
        *(slices or small),
        *overrides,
        "recipe.batch_size=4",
        "model.d_model=16",
        "trainer.fast_dev_run=true",
        f"output={tmp_path}",
    )
    value = train.run(config)
    assert value is not None
    assert 0 <= value <= 1


INTERRUPTIBLE = ("mixer=linear_attention", "model.dropout=0.2", "callbacks.checkpoint.every_n_train_steps=3",
                 "callbacks.early_stopping=null", "data.train=[{samples: 512}, {samples: 256, tokens: 12}]",
                 "trainer.accumulate_grad_batches=2", "recipe.batch_size=32", "recipe.epochs=3")  # fmt: skip


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_the_weights_of_an_uninterrupted_one(compose_config, tmp_path, monkeypatch):
    """In the middle of the second epoch, with two slices, accumulation and dropout."""
    train.run(make(compose_config, tmp_path / "whole", *INTERRUPTIBLE))
    cut = tmp_path / "cut"

    def stop(self: ProbeTask, *arguments: Any) -> None:
        if self.global_step == 41:
            raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(ProbeTask, "on_train_batch_end", stop)
        with pytest.raises(InterruptedError):
            train.run(make(compose_config, cut, *INTERRUPTIBLE))
    assert read(cut / "checkpoints" / "last.ckpt")["global_step"] in (39, 40, 41)
    train.run(make(compose_config, cut, *INTERRUPTIBLE, "resume=true"))
    one, other = (read(folder / "checkpoints" / "last.ckpt") for folder in (tmp_path / "whole", cut))
    assert one["global_step"] == other["global_step"] == 72
    for name, value in one["state_dict"].items():
        assert torch.equal(value, other["state_dict"][name]), name


PRESETS = sorted(
    path.stem
    for path in (Path(longseq.conf.__file__).parent / "data").glob("*.yaml")
    if any(word in path.read_text() for word in ("generator: ", "- mad_recall"))
)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_generated(preset, compose_config, tmp_path):
    config = resolve(compose_config("train", "task=probe", f"data={preset}", f"output={tmp_path}"))
    for split in ("train", "validation", "test"):
        config["data"][split] = [described | {"samples": 3} for described in config["data"][split]]
    config["recipe"]["batch_size"] = 3
    datamodule = ProbeDataModule.from_config(config, 3)
    assert datamodule.info.sizes["test"] == 3 * len(config["data"]["test"])
    for batches in (datamodule.train_dataloader(), datamodule.val_dataloader(), datamodule.test_dataloader()):
        for tokens, targets in batches:
            assert 0 <= int(tokens.min()) <= int(tokens.max()) < datamodule.info.vocab_size
            assert tokens.shape[1] <= datamodule.info.longest
            assert int(targets.answers.max()) < datamodule.info.vocab_size


def test_batches_cover_every_slice_and_every_rank():
    whole = list(MixtureSampler([10, 7], 2, seed=0))
    assert len(whole) == 5 + 3
    assert sorted(row for batch in whole if batch.slice_index == 0 for row in batch.rows) == list(range(10))
    assert {batch.slice_index for batch in whole[:5]} == {0, 1}, "slices are mixed"
    for index in range(4):
        ranks = [list(MixtureSampler([10, 7], 1, seed=0, rank=rank, world_size=2))[index] for rank in (0, 1)]
        assert ranks[0].slice_index == ranks[1].slice_index
        assert not set(ranks[0].rows) & set(ranks[1].rows)
    shares = [list(MixtureSampler([10, 7], 1, seed=0, rank=rank, world_size=2)) for rank in (0, 1)]
    turns = list(MixtureSampler([10, 7], 1, seed=0, accumulate=2))
    assert len(turns) == 2 * len(whole)
    for index, (pick, *spread) in enumerate(zip(whole, turns[::2], turns[1::2], *shares, strict=True)):
        assert {one.slice_index for one in spread} == {pick.slice_index}
        assert [list(one.rows) for one in spread] == [[pick.rows[0]], [pick.rows[1]]] * 2, index
    later = MixtureSampler([10, 7], 2, seed=0)
    later.start = 3
    assert [list(batch.rows) for batch in later] == [list(batch.rows) for batch in whole[3:]]
    later.set_epoch(1)
    assert [list(batch.rows) for batch in later] != [list(batch.rows) for batch in whole[3:]]
    measured = [list(SliceSampler([5, 3], 2, rank=rank, world_size=2)) for rank in (0, 1)]
    assert [len(batches) for batches in measured] == [len(SliceSampler([5, 3], 2, world_size=2))] * 2
    seen = [(batch.slice_index, row) for batches in measured for batch in batches for row in batch.rows]
    assert sorted(seen) == [(0, row) for row in range(5)] + [(1, row) for row in range(3)]
    with pytest.raises(ValueError, match="an update needs 8 samples of a slice of 7"):
        MixtureSampler([10, 7], 8, seed=0)


def test_scores_are_those_of_the_places_asked_about(compose_config, tmp_path):
    datamodule, task = train.build(make(compose_config, tmp_path))
    assert isinstance(task, ProbeTask)
    backbone = task.backbone.eval()
    tokens, targets = next(iter(datamodule.val_dataloader()))
    expected = backbone(tokens)[0]
    scores = task(tokens, targets.places)
    for row in range(len(tokens)):
        torch.testing.assert_close(scores[row], expected[row, targets.places[row]])


OWN = """
from longseq.mixers import register as register_mixer
from longseq.mixers.linear_attention import LinearAttention
from longseq.tasks.probe.generators import Samples, register

@register("shifted")
def shifted(random, samples, *, vocab_size: int = 16, tokens: int = 12, offset: int = -1, span=(-2, 2)):
    drawn = random.integers(0, 16, (samples, tokens))
    return Samples(drawn, (drawn + offset) % 16)

@register_mixer("negative")
class Negative(LinearAttention):
    def __init__(self, d_model, *, gain: float = -4.0, backend="auto"):
        super().__init__(d_model, backend=backend)
        self.gain = gain
"""


@pytest.mark.slow
def test_a_generator_of_a_plug_in_is_a_choice_of_data(command_here, tmp_path, monkeypatch):
    (tmp_path / "shifting.py").write_text(OWN)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr(plugins, "_LOADED", dict(plugins._LOADED))
    for registered in (generators.GENERATORS, mixers.registry._REGISTRY):
        for name in ("shifted", "negative"):
            monkeypatch.setitem(registered, name, None)
            del registered[name]
    words = [word for word in TINY if "options" not in word and word != "data=mqar"]
    started = (tmp_path, "train", "plugins=[shifting]", *words, "recipe.epochs=1", "output=run")
    own = ("data=shifted", "data.options.offset=-2", "data.options.span=[3,-5]")
    trained = command_here(*started, *own, "mixer=negative", "mixer.options.gain=-2.5")
    assert trained.returncode == 0, trained.stderr
    config = read(tmp_path / "run" / "checkpoints" / "best.ckpt")["hyper_parameters"]["config"]
    assert config["data"]["options"] == {"vocab_size": 16, "tokens": 12, "offset": -2, "span": [3, -5]}
    assert config["mixer"]["name"] == "negative"
    assert config["mixer"]["options"]["gain"] == -2.5
