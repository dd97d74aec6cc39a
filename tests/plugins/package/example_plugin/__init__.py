"""A plug-in of longseq with one of each: mixer, Dataset, generator, callback, file format and task."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import Dataset

from longseq import mixers
from longseq.mixers.linear_attention import LinearAttention
from longseq.tasks import image, registry
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


class Stripes(Dataset):
    """Images of 8 x 8 with vertical or horizontal stripes."""

    classes = ("vertical", "horizontal")

    def __init__(self, first: int, count: int) -> None:
        self.targets = np.arange(first, first + count) % 2
        self.lines = np.random.default_rng(first).integers(0, 256, (count, 8), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        label, columns = int(self.targets[index]), np.tile(self.lines[index], (8, 1))
        return columns.T if label else columns, label


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
