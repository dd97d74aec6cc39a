"""An interrupted epoch continues bitwise: by the loader's own state, and through Lightning's checkpoints."""

import dataclasses
import functools
import zlib

import pytest
import torch
from image_data import image_data
from lightning.pytorch import Callback, LightningModule, Trainer

from longseq.tasks.image import sources

AUGMENT = {"crop": "padded", "padding": 1, "hflip": 0.5, "repeats": 3, "erasing": {"prob": 0.5, "mode": "pixel"}}
BATCH_SIZE = 64
BATCHES = 5  # of 323 training digits


@pytest.fixture(scope="module", autouse=True)
def few_digits():
    """A quarter of the training digits."""
    whole = sources.digits

    def few():
        splits = whole()
        train = dataclasses.replace(splits["train"], indices=splits["train"].indices[: BATCHES * BATCH_SIZE + 3])
        return {**splits, "train": train}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "digits", few)
        yield


def digits(num_workers=0, **options):
    options = {"batch_size": BATCH_SIZE, "augment": AUGMENT, "seed": 3} | options
    module = image_data(name="digits", source="digits", img_size=8, in_chans=1, num_workers=num_workers, **options)
    module.setup()
    return module


@pytest.mark.parametrize(("options", "name"), [({"seed": 4}, "seed"), ({"batch_size": 32}, "effective_batch_size")])
def test_another_order_of_samples_is_refused(options, name):
    state = digits().train_dataloader().state_dict()
    with pytest.raises(ValueError, match=rf"trained with {name}="):
        digits(**options).train_dataloader().load_state_dict(state)


def test_a_checkpoint_between_two_updates_goes_on_as_it_was_trained_only():
    state = digits().train_dataloader().state_dict() | {"batches": 3, "batch_size": 32, "accumulate": 2}
    with pytest.raises(ValueError, match="from within an update"):
        digits().train_dataloader().load_state_dict(state)


class Recorder(LightningModule):
    """Trains a linear model and records its batches."""

    def __init__(self, fail_at=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(64, 10)
        self.seen = []
        self.fail_at = fail_at

    def training_step(self, batch, batch_idx):
        images, targets = batch
        if self.fail_at == (self.current_epoch, batch_idx):
            raise RuntimeError("a step fails")
        self.seen.append((self.current_epoch, batch_idx, zlib.crc32(images.numpy().tobytes())))
        return torch.nn.functional.cross_entropy(self.layer(images.flatten(1)), targets)

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Interrupt(Callback):
    """Saves a checkpoint at one place and kills the run."""

    def __init__(self, hook, place, path):
        self.hook, self.place, self.path = hook, place, path

    def save(self, trainer):
        trainer.save_checkpoint(self.path)
        raise KeyboardInterrupt

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.hook == "batch" and (trainer.current_epoch, batch_idx) == self.place:
            self.save(trainer)

    def on_validation_end(self, trainer, module):
        if self.hook == "validation" and trainer.current_epoch == self.place[0]:
            self.save(trainer)

    def on_train_epoch_end(self, trainer, module):
        if self.hook == "epoch" and trainer.current_epoch == self.place[0]:
            self.save(trainer)

    def on_exception(self, trainer, module, exception):
        if self.hook == "failure":
            trainer.save_checkpoint(self.path)


def train(module, callbacks=(), checkpoint=None, num_workers=0, accumulate=1, **options):
    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        accumulate_grad_batches=accumulate,
        callbacks=list(callbacks),
    )
    trainer.fit(module, datamodule=digits(num_workers, **options), ckpt_path=checkpoint)
    return module


@functools.cache
def train_whole(accumulate):
    return train(Recorder(), accumulate=accumulate)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("hook", "place", "num_workers", "accumulate"),
    [
        ("batch", (1, 1), 2, 2),
        ("batch", (1, BATCHES - 1), 0, 1),
        ("validation", (1, 0), 0, 1),
        ("epoch", (0, 0), 0, 2),
        ("failure", (1, 2), 0, 1),
    ],
)
def test_lightning_resumes_exactly(hook, place, num_workers, accumulate, tmp_path):
    whole = train_whole(accumulate)
    path = tmp_path / "interrupted.ckpt"
    interrupted = Recorder(fail_at=place if hook == "failure" else None)
    with pytest.raises((SystemExit, KeyboardInterrupt, RuntimeError)):
        train(interrupted, [Interrupt(hook, place, path)], num_workers=num_workers, accumulate=accumulate)
    resumed = train(Recorder(), checkpoint=path, num_workers=num_workers, accumulate=accumulate)
    assert interrupted.seen + resumed.seen == whole.seen
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_effective_batch_may_be_accumulated_otherwise_after_a_resume(tmp_path):
    """After updates of 2 x 32 images, 4 x 16 images make an update: images of all epochs come once and in order."""
    path = tmp_path / "interrupted.ckpt"
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        train(Recorder(), [Interrupt("batch", (1, 3), path)], accumulate=2, batch_size=32)
    done = torch.load(path, weights_only=True)["global_step"]
    whole = train(Recorder(), accumulate=4, batch_size=16)
    resumed = train(Recorder(), checkpoint=path, accumulate=4, batch_size=16)
    assert resumed.seen == whole.seen[4 * done :]
    assert resumed.trainer.global_step == whole.trainer.global_step == 3 * BATCHES
    torch.testing.assert_close(resumed.layer.weight, whole.layer.weight, rtol=0, atol=1e-5)
