"""A tiny training on digits, in this process and as a command, and generated data sets."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from forked import start_fork
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from PIL import Image

from longseq.tasks.lm import module as lm

TINY = (
    "mixer=attention",
    "trainer=cpu",
    "model.embed_dim=16",
    "model.depth=2",
    "recipe.epochs=2",
    "recipe.schedule.warmup_epochs=0",
    "recipe.batch_size=64",
    "recipe.learning_rate=2e-3",
)

Compose = Callable[..., DictConfig]
Command = Callable[..., subprocess.CompletedProcess[str]]


def compose_verb(verb: str, *overrides: str) -> DictConfig:
    with initialize_config_module("longseq.conf", version_base="1.3"):
        return compose(verb, list(overrides))


@pytest.fixture(scope="package", autouse=True)
def short_samples() -> Iterator[None]:
    """At its end, a run of a language model here writes a few tokens in place of hundreds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "_SAMPLE", 8)
        yield


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the address of a run on several processes: Lightning leaves it in the process that started them."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def tiny_overrides() -> tuple[str, ...]:
    """Overrides of `longseq train` for a training of seconds."""
    return TINY


@pytest.fixture
def tiny(tmp_path: Path) -> Compose:
    """The configuration of a tiny training that writes to tmp_path/run, with further overrides."""

    def make(*overrides: str) -> DictConfig:
        return compose_verb("train", *TINY, f"output={tmp_path / 'run'}", *overrides)

    return make


@pytest.fixture(scope="session")
def compose_config() -> Compose:
    """compose_config(VERB, *overrides): what the command would get."""
    return compose_verb


@pytest.fixture(scope="session")
def start() -> Callable[..., subprocess.Popen[str]]:
    """Starts `longseq` in a folder, in a process of its own."""

    def call(folder: Path, *arguments: str) -> subprocess.Popen[str]:
        return start_fork(arguments, folder)

    return call


@pytest.fixture(scope="session")
def command(start: Callable[..., subprocess.Popen[str]]) -> Command:
    """Runs `longseq` in a folder, in a process of its own."""

    def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = start(folder, *arguments)
        output, errors = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    return call


@pytest.fixture(scope="session")
def fashion_mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fashion_mnist(tmp_path_factory.mktemp("fashion_mnist"))


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("images"))


def write_fashion_mnist(root: Path, count: int = 64) -> Path:
    """Noise in the files of Fashion-MNIST."""
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part in ("train", "t10k"):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())
    return root


def write_folder(root: Path, *, classes: int = 3, train: int = 8, val: int = 4, side: int = 40) -> Path:
    """Noise in class folders, root/train and root/val."""
    random = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for label in range(classes):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 256, (side, side, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.jpg")
    return root
