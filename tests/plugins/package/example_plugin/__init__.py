"""A plug-in of longseq with one of each: mixer, data source, generator, callback, file format and task."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
from lightning.pytorch import Callback
from torch import Tensor

from longseq import mixers
from longseq.mixers.linear_attention import LinearAttention
from longseq.tasks import image, registry
from longseq.tasks.image.sources import ArraySource, Split, Splits, register_source
from longseq.tasks.probe import generators
from longseq.tasks.training import targets
from longseq.tools.export import register_format, torchscript_file


@mixers.register("scaled_attention")
class ScaledAttention(LinearAttention):
    """Linear attention whose output is multiplied by `gain`."""

    def __init__(self, d_model: int, *, num_heads: int | None = None, gain: float = 0.5, backend: str = "auto") -> None:
        super().__init__(d_model, num_heads=num_heads, backend=backend)
        self.gain = gain

    def project_out(self, y: Tensor) -> Tensor:
        return self.gain * super().project_out(y)


@register_source("stripes")
def stripes(root: str | None, *, download: bool, val_fraction: float, split_seed: int) -> Splits:
    """Images of 8 x 8 with horizontal or vertical stripes."""
    random = np.random.default_rng(split_seed)
    targets = np.arange(96) % 2
    lines = random.integers(0, 256, (96, 8, 1), dtype=np.uint8).repeat(8, axis=2)
    source = ArraySource(
        np.where(targets[:, None, None], lines, lines.mT), targets, ["vertical", "horizontal"], "stripes"
    )
    parts = np.split(np.arange(96), [64, 80])
    return Splits(*(Split(source, part) for part in parts))


@generators.register("parity")
def parity(random: np.random.Generator, samples: int, *, vocab_size: int = 2, tokens: int = 8) -> generators.Samples:
    """Bits; the label of each is the parity of the bits so far."""
    bits = random.integers(0, 2, (samples, tokens))
    return generators.Samples(bits, bits.cumsum(axis=1) % 2)


@targets.register("callback")
class NoteEnd(Callback):
    """Writes a file at the end of training."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_fit_end(self, trainer, pl_module) -> None:
        if trainer.is_global_zero:
            Path(trainer.default_root_dir, self.name).write_text(f"{trainer.world_size} of {trainer.global_step}")


register_format(
    "renamed", ".renamed", SimpleNamespace(write=torchscript_file.write, open_file=torchscript_file.open_file)
)
registry.register("stripes", image.task)
