"""The keys of the commands other than `longseq train`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from longseq.tasks.config import Command, Count, Keys, Positive, Share, Train, TrainerKeys, key

Weights = Literal["auto", "ema", "model"]
Precision = Literal["float32", "bfloat16", "float16"]
Names = Annotated[list[str], Field(min_length=1)]


class FromCheckpoint(Command):
    """The keys of a command that reads a checkpoint."""

    checkpoint: str = key(
        ..., "a FILE of `longseq train` or `export`, a FOLDER of save_pretrained, or hf-hub:OWNER/NAME"
    )
    weights: Weights = key("auto", "ema: the averaged weights; model: the others; auto: the averaged ones if any")


class Evaluate(FromCheckpoint):
    """The keys of `longseq evaluate`."""

    split: Literal["test", "val"] = key("test", "the split to measure")
    output: str | None = key(None, "a json file for the metrics; null: in the run folder")
    data: dict[str, Any] = key({}, "keys of data with other values than in training")
    trainer: TrainerKeys = key(..., "devices and precision")


class Predict(FromCheckpoint):
    """The keys of `longseq predict`."""

    input: str = key(..., "an image; a text, jsonl, csv, tsv or parquet; or a folder of these")
    output: str = key("predictions.csv", "FILE.csv or FILE.json", pattern=r"\.(csv|json)$")
    top_k: Count | None = key(None, "the number of classes to write; null: 5 of an image, all of a document")
    batch_size: Count = key(64, "the images or documents of a batch")
    num_workers: int = key(0, "processes that read images", ge=0)
    column: str | None = key(None, "of documents: the column of the text; null: as in training")
    truncation: Literal["none"] | None = key(None, "of documents: none reads them whole; null: as in training")
    segment: Count | None = key(None, "of documents: tokens in memory at once; null: as in training, or 8192")
    device: str = key("auto", "auto: the GPU if there is one; cpu, cuda, cuda:1, ...")


class Generate(FromCheckpoint):
    """The keys of `longseq generate`."""

    prompt: str | None = key(None, "the text to continue")
    input: str | None = key(None, "or a file with a prompt on each line")
    output: str | None = key(None, "a .jsonl file for the texts; null: they are printed")
    max_new_tokens: Count = key(256, "the most new tokens for a prompt")
    temperature: float = key(1.0, "divides the scores; 0 chooses the most probable token", ge=0)
    top_k: Count | None = key(None, "draw among the k most probable tokens")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = key(None, "draw among the fewest tokens of this probability")
    repetition_penalty: Positive = key(1.0, "above 1: tokens of the text become less probable")
    stop: list[str] = key([], "texts before which the output ends")
    end: bool = key(True, "end at an end-of-text token of the model")
    seed: int = key(0, "the seed of the draws", ge=0)
    batch_size: Count = key(64, "the prompts of a batch")
    device: str = key("auto", "auto: the GPU if there is one; cpu, cuda, cuda:1, ...")
    dtype: Precision = key("float32", "the type of the weights")
    cuda_graph: bool | None = key(None, "replay the step as a CUDA graph; null: where it pays")

    @model_validator(mode="after")
    def _begin_once(self) -> Generate:
        if (self.prompt is None) == (self.input is None):
            raise ValueError("give one of prompt=TEXT and input=FILE")
        return self


class HarnessData(Keys):
    """The keys of `data` of `longseq harness`."""

    root: str | None = key(None, "a folder with the sets of the tasks; null: the harness fetches them")


class Harness(FromCheckpoint):
    """The keys of `longseq harness`."""

    tasks: Names = key(..., "tasks of lm-evaluation-harness: [hellaswag,piqa]")
    include: str | None = key(None, "a folder with task files of your own")
    data: HarnessData = key(HarnessData(), "the sets of the tasks")
    num_fewshot: Annotated[int, Field(ge=0)] | None = key(None, "the examples before a question; null: the task's own")
    limit: Count | None = key(None, "the questions of each task; null: all")
    batch_size: Count = key(64, "the texts of a batch on each device")
    device: str = key("auto", "auto: the GPU if there is one; cpu, cuda, cuda:1, ...")
    devices: Count = key(1, "the number of GPUs, each with a part of the questions")
    dtype: Precision = key("float32", "the type of the weights")
    output: str | None = key(None, "a json file for the results; null: next to the checkpoint")


class Prepare(Command):
    """The keys of `longseq prepare`."""

    input: str | Names = key(..., "the text: jsonl, csv, tsv, parquet, a saved set, text files, a folder, or a list")
    whole_files: bool = key(False, "each file is a document, whatever its ending, as in a folder of source code")
    output: str = key(..., "the folder for the tokens")
    tokenizer: str = key("bytes", "bytes, a tokenizer.json or its folder, or train:SIZE", min_length=1)
    separator: str | None = key(None, "the token that ends a document; null: the tokenizer's end-of-text token")
    column: str = key("text", "the column of the text")
    prompt_column: str | None = key(None, "the column of prompts, which a model reads but is not trained on")
    validation: Share = key(0.01, "the share of the documents for validation")
    test: Share = key(0.01, "the share of the documents for the test")
    processes: Count | None = key(None, "processes that tokenize; null: one per core")


class ConvertMixer(Keys):
    """The keys of `mixer`."""

    name: str | Names | None = key(
        None, "mixer=gsa, gla, retnet, supra or a pattern replaces attention; null: the layers stay"
    )
    options: dict[str, Any] = key({}, "options of the new mixers; in a pattern below their names")


class Convert(Command):
    """The keys of `longseq convert`."""

    source: str = key(
        ..., "a folder of another library or of longseq, a checkpoint of `longseq train`, or a .pth of RWKV-LM"
    )
    output: str = key(..., "a new folder")
    mixer: ConvertMixer = key(ConvertMixer(), "the new mixer in place of attention")
    format: str = key(
        "longseq", "longseq, or for the way back llama, mistral, qwen3, olmo2, delta_net, gla, gsa, mamba, ..."
    )
    seed: int = key(0, "the seed of new parameters", ge=0)


class Export(FromCheckpoint):
    """The keys of `longseq export`."""

    format: str | None = key(None, "onnx, torchscript, pt2, executorch, openvino or a registered one; null: by output")
    output: str | None = key(None, "the file; null: next to the checkpoint")
    preprocess: bool = key(False, "of images: the file takes uint8 pixels and normalizes them")
    softmax: bool = key(False, "of images: the file gives probabilities")
    dynamic_resolution: bool = key(False, "of images: any size that the patches divide")
    dynamic_length: bool = key(False, "of language models: reads whole texts; false: one token and a state")
    max_length: Count = key(2048, "of language models with dynamic_length: the longest text")
    opset: int = key(20, "of ONNX", ge=18, le=25)
    operators: Literal["standard", "onnxruntime", "opset27"] = key(
        "standard",
        "of ONNX: onnxruntime writes recurrences as nodes of onnxruntime 1.25.1 and later, opset27 as nodes of ONNX's "
        "opset 27, for onnxruntime 1.32",
    )
    precision: Literal["float32", "float16", "int8"] = key(
        "float32", "of ONNX: float16 or int8 for linear layers; recurrences and states stay float32"
    )
    calibrate: str | None = key(
        None, "with int8, of images: a folder of training images, for fixed ranges of activations; null: by call"
    )
    allowed_drop: float = key(
        0.01, "with float16 or int8: how much worse task.metric may get on the validation data; then no file is kept"
    )
    batch_sizes: Annotated[list[Count], Field(min_length=1)] = key(
        [1, 3, 8], "batch sizes for the comparison with the model"
    )
    tolerance: Positive = key(1e-4, "the largest difference between the file and the model")
    latency: bool = key(True, "measure the time of a batch of one")


class Describe(Train):
    """The keys of `longseq describe` in addition to the keys of `longseq train`."""

    checkpoint: str | None = key(None, "describe the model of a checkpoint, not the configured one")
    list: Literal["mixers", "models"] | None = key(None, "print a list instead")
    device: str = key("auto", "auto, cpu or cuda: where kernels are chosen and speed is measured")
    format: Literal["text", "json"] = key("text", "how the facts are printed")
    output: None = key(None, "the facts are printed")  # type: ignore[assignment]


class Compare(Command):
    """The keys of `longseq compare` in addition to the keys of `longseq train`."""

    mixers: list[str] = key(["deltanet", "linear_attention"], "a row for each of these mixers")
    rows: dict[str, str] | None = key(None, "more rows: {NAME: 'OVERRIDE OVERRIDE'}")
    overrides: list[str] | None = key(None, "overrides of every run (of a file in the group comparison)")
    seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=1)] = key([0], "a run for each seed")
    sweep: dict[str, list[Any]] | None = key(None, "a setting for each combination of values: {KEY: [A, B]}")
    learning_rates: list[float] | None = key(None, "learning rates to try; validation chooses the best")
    rates_at: Annotated[float, Field(gt=0, le=1)] = key(
        1.0, "the part of a run's length at which learning rates are tried, with one seed; the best is trained in full"
    )
    parameters: Positive | None = key(None, "parameters of each model without embeddings, by the width of its MLP")
    jobs: Count | None = key(None, "runs at the same time; null: one on each GPU")
    report: str | None = key(None, "the metric of the table; null: the test metric of task.metric")
    plot: bool = key(True, "draw the results")
    output: str = key("outputs/${task.name}/comparison", "the folder of the runs, the table and the plot")


# The keys of each command, by the name of its file in conf.
_ALL = (Train, Evaluate, Predict, Generate, Harness, Prepare, Convert, Export, Describe, Compare)
COMMANDS: dict[str, type[Command]] = {keys.__name__.lower(): keys for keys in _ALL}
