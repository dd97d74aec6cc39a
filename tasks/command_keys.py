"""The keys of the commands that `longseq VERB --help` explains, without what the commands themselves import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from longseq.tasks.data.input_keys import InputKeys
from longseq.tasks.training.command import CHECKPOINT_NEEDED, CommandKeys, compile_modes, refuse_empty
from longseq.tasks.training.options import Length, OneOf, Range, Required

TASKS_NEEDED = Required("give tasks=[NAME,...], such as tasks=[hellaswag,piqa]: tasks of lm-evaluation-harness")


@dataclass(frozen=True, kw_only=True)
class FinderKeys:
    """The keys of `learning_rate_finder`, with the names of Lightning's `Tuner.lr_find`."""

    min_lr: Annotated[float, Range(above=0)] = 1e-6
    max_lr: Annotated[float, Range(above=0)] = 1.0
    num_training: Annotated[int, Range(20)] = 100

    def __post_init__(self) -> None:
        if self.min_lr >= self.max_lr:
            raise ValueError(
                f"learning_rate_finder.min_lr={self.min_lr:g} must be below learning_rate_finder.max_lr={self.max_lr:g}"
            )


@dataclass(frozen=True, kw_only=True)
class TrainKeys(CommandKeys):
    """The keys of `longseq train`: its own, and the configuration groups; conf/train.yaml documents them."""

    task: Mapping[str, Any]
    data: Mapping[str, Any]
    recipe: Mapping[str, Any]
    model: Mapping[str, Any]
    mixer: Mapping[str, Any]
    scale: Mapping[str, Any]
    trainer: Mapping[str, Any]
    callbacks: Mapping[str, Any]
    logger: Mapping[str, Any] | None = None
    seed: Annotated[int, Range(0, 2**32 - 1)]
    init: str | None
    learning_rate_finder: FinderKeys = field(default_factory=FinderKeys)
    resume: bool | str
    optimized_metric: str | None
    compile: Annotated[str | None, OneOf(compile_modes, such_as=("default", "reduce-overhead", "max-autotune"))]
    matmul_precision: Literal["highest", "high", "medium"]
    output: str | None


@dataclass(frozen=True, kw_only=True)
class EvaluateKeys(CommandKeys):
    """The keys of `longseq evaluate`; conf/evaluate.yaml documents them."""

    checkpoint: Annotated[str | None, CHECKPOINT_NEEDED]
    weights: Literal["auto", "ema", "model"]
    split: Literal["test", "val"]
    input: str | Annotated[list[str], Length(1)] | None
    output: str | None
    data: Mapping[str, Any]
    trainer: Mapping[str, Any]

    def __post_init__(self) -> None:
        refuse_empty(self, "input", "output")


@dataclass(frozen=True, kw_only=True)
class PredictKeys(InputKeys, CommandKeys):
    """The keys of `longseq predict`; conf/predict.yaml documents them."""

    checkpoint: Annotated[str | None, CHECKPOINT_NEEDED]
    input: Annotated[str | None, Required("give input=FILE or input=FOLDER: the file or files to classify")]
    output: str
    device: str
    weights: Literal["auto", "ema", "model"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.output.endswith((".csv", ".json")):
            raise ValueError(f"output={self.output} must end in .csv or .json")
        if self.saliency == "":
            raise ValueError("saliency= is empty: give saliency=FOLDER for the pictures, or leave it out")
        if self.saliency_class is not None and self.saliency is None:
            raise ValueError(f"saliency_class={self.saliency_class} draws nothing by itself: give saliency=FOLDER too")


@dataclass(frozen=True, kw_only=True)
class SetKeys:
    """The keys of `data` in `longseq harness`."""

    root: str | None


@dataclass(frozen=True, kw_only=True)
class HarnessKeys(CommandKeys):
    """The keys of `longseq harness`; conf/harness.yaml says what they mean."""

    checkpoint: Annotated[str | None, CHECKPOINT_NEEDED]
    weights: Literal["auto", "ema", "model"]
    tasks: Annotated[Annotated[list[str], Length(1)] | None, TASKS_NEEDED]
    include: str | None
    data: SetKeys
    num_fewshot: Annotated[int | None, Range(0)]
    limit: Annotated[int | None, Range(1)]
    batch_size: Annotated[int, Range(1)]
    device: str
    devices: Annotated[int, Range(1)]
    dtype: Literal["float32", "bfloat16", "float16"]
    output: str | None

    def __post_init__(self) -> None:
        refuse_empty(self, "include", "output")


@dataclass(frozen=True, kw_only=True)
class GenerateKeys(CommandKeys):
    """The keys of `longseq generate`; conf/generate.yaml says what they mean."""

    checkpoint: Annotated[str | None, CHECKPOINT_NEEDED]
    weights: Literal["auto", "ema", "model"]
    prompt: str | None
    input: str | None
    output: str | None
    max_new_tokens: Annotated[int, Range(1)]
    temperature: Annotated[float, Range(0)]
    top_k: Annotated[int | None, Range(1)]
    top_p: Annotated[float | None, Range(above=0, most=1)]
    repetition_penalty: Annotated[float, Range(above=0)]
    stop: Annotated[list[str], Length(0)]
    end: bool
    seed: Annotated[int, Range(0)]
    batch_size: Annotated[int, Range(1)]
    device: str
    dtype: Literal["float32", "bfloat16", "float16"]
    cuda_graph: bool | None
    state: str | None
    save_state: str | None

    def __post_init__(self) -> None:
        given = [name for name in ("prompt", "input", "state") if getattr(self, name) is not None]
        if len(given) != 1:
            told = " and ".join(f"{name}=" for name in given) or "none of them"
            raise ValueError(f"give one of prompt=TEXT, input=FILE and state=FILE; there is {told}")
        if self.temperature == 0:
            for name in ("top_k", "top_p"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(
                        f"{name}={value} has no effect: temperature=0 chooses the most probable token; leave one out"
                    )
