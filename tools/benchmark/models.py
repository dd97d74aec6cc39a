"""`longseq benchmark models`: training and inference of image models, training and decoding of language models."""

from __future__ import annotations

import gc
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import timm
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch import Tensor, nn

import longseq  # noqa: F401  registers the image models
from longseq import mixers
from longseq.backbones.step_graph import StepGraph
from longseq.backbones.tokens import TokenBackbone, mlp_width
from longseq.kernels import list_ops, token_loss
from longseq.kernels.dispatch import backends
from longseq.kernels.self_test import CACHE_VARIABLE
from longseq.mixers.pattern import options_by_name
from longseq.parameters import count_parameters
from longseq.tools.benchmark.measure import Run, added_bytes, environment, one_line, time_in_turn, time_once
from longseq.tools.benchmark.report import check_output, find_device, make_result, to_markdown, write_result

NOTES = (
    "bfloat16 autocast over float32 weights; training is forward, backward and a step of fused AdamW, on random data "
    "that lies on the device. Speeds are those of the median step. Memory: weights, gradients, optimizer and the "
    "most that a step adds; of inference, what a call adds.",
    "First step: seconds of the first training step, from empty caches; the self-test and the compilation of kernels "
    "included where an earlier row had not done them.",
    "Decoding: tokens of all sequences a second, one step of the model a token after a prompt, with bfloat16 weights; "
    "graph: the step as a CUDA graph, for states that do not grow.",
)
COMPILED = "The models were compiled for training, and image models for inference too; decoding ran eager."
ON_CPU = "Measured on a CPU: speeds are relative to the first row of the same task and size."
LISTS = ("models", "mixers", "peers", "lengths", "decoding_batches")  # of the configuration, below image and text

Row = dict[str, Any]
Task = tuple[Row, Callable[[], Row]]  # what a row is about, and the function that measures the rest


def run(cfg: DictConfig) -> Row:
    """Measure what `benchmark_models.yaml` asks for; print the table and write it with its rows."""
    device = find_device(cfg.device)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    known = sorted({"auto", *(backend.name for op in list_ops() for backend in backends(op))})
    if config["backend"] not in known:
        raise ValueError(f"backend={config['backend']} is unknown: take {', '.join(known)}")
    if config["compile"] is not None and config["compile"] not in (modes := torch._inductor.list_mode_options()):
        raise ValueError(f"compile={config['compile']} is unknown: take null, {', '.join(sorted(modes))}")
    work = plan(config, device)
    check_output(cfg.output)
    notes = NOTES if config["compile"] is None else (*NOTES, COMPILED)
    rows: list[Row] = []
    result: Row = {}
    caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", CACHE_VARIABLE)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        environment({name: f"{folder}/{name}" for name in caches}),
    ):
        for head, measure in work:
            rows.append(_guard(head, device, measure))
            if device.type == "cuda":
                result = make_result("Whole models", rows, device, notes)
            else:
                result = make_result("Whole models", _relate(rows), device, (*notes, ON_CPU))
            write_result(result, cfg.output)  # after every row: a model that is too large takes no other with it
    Console().print(to_markdown(result), markup=False, highlight=False, soft_wrap=True)
    return result


def plan(config: Row, device: torch.device) -> list[Task]:
    """All that is to be measured. Raises ValueError for what does not exist, before anything is."""
    if config["image"] is None and config["text"] is None:
        raise ValueError("image=null text=null leaves nothing to measure: keep one")
    tasks: list[Task] = []
    for part, find in (("image", _plan_images), ("text", _plan_text)):
        if config[part] is None:
            continue
        for name in LISTS:
            if name in config[part] and not isinstance(config[part][name], list):
                raise ValueError(f"{part}.{name}={config[part][name]} is no list: write {part}.{name}=[...]")
        found = list(find(config, device))
        if not found:
            empty = " ".join(f"{part}.{name}=[]" for name, value in config[part].items() if value == [])
            raise ValueError(f"{empty} leaves nothing to measure: name something, or give {part}=null")
        tasks += found
    return tasks


def _plan_images(config: Row, device: torch.device) -> Iterator[Task]:
    for pixels, batch in _read_sizes(config["image"]["sizes"]):
        for head, make in image_models(config["image"], pixels, config["backend"]):
            head = {"task": "image", **head, "pixels": pixels, "batch": batch}
            yield head, partial(measure_image, make, pixels, batch, config, device)


def _plan_text(config: Row, device: torch.device) -> Iterator[Task]:
    for head, make in language_models(config["text"], config["backend"]):
        for tokens in config["text"]["lengths"]:
            yield {"task": "text", **head, "tokens": tokens}, partial(measure_training, make, tokens, config, device)
        for batch in config["text"]["decoding_batches"]:
            yield {"task": "decoding", **head, "batch": batch}, partial(measure_decoding, make, batch, config, device)


def _relate(rows: list[Row]) -> list[Row]:
    """Speeds relative to those of the first row of the same task and size."""
    first: dict[Any, float] = {}
    related = []
    for row in rows:
        size = tuple(row.get(name) for name in ("task", "pixels", "tokens", "batch"))
        kept = {name: value for name, value in row.items() if not name.endswith("_s")}
        for name in (name for name in row if name.endswith("_per_s")):
            bar = first.setdefault((size, name), row[name])
            kept[f"{name.removesuffix('_per_s')}_of_first"] = round(row[name] / bar, 2)
        related.append(kept)
    return related


def _guard(head: Row, device: torch.device, measure: Callable[[], Row]) -> Row:
    """One row; a model that is refused or too large has a remark in place of figures."""
    try:
        return head | measure()
    except Exception as error:
        return head | {"remark": one_line(error)}
    finally:
        if device.type == "cuda":
            gc.collect()  # a model that goes while the next one is measured would lower the memory of that
            torch.cuda.empty_cache()


def _read_sizes(sizes: Any) -> list[tuple[int, int]]:
    """Pairs of an image's pixels and a batch's images."""
    try:
        return [(int(pixels), int(batch)) for pixels, batch in sizes]
    except (TypeError, ValueError):
        raise ValueError(f"image.sizes={sizes} is no list of pairs: give [[PIXELS, BATCH], ...]") from None


def image_models(image: Row, pixels: int, backend: str) -> Iterator[tuple[Row, Callable[[], nn.Module]]]:
    """Each of our models with each mixer, then the peers of timm."""
    _check_mixers(image["mixers"])
    if unknown := [name for name in (*image["models"], *image["peers"]) if not timm.is_model(name)]:
        raise ValueError(f"image.models and image.peers have {', '.join(unknown)}, which timm does not know")
    size = {"img_size": pixels, "num_classes": image["classes"]}
    for name in image["models"]:
        for mixer in image["mixers"]:
            options = {"mixer": mixer, "direction": image["direction"], "backend": backend}
            yield {"model": name, "mixer": mixer}, partial(timm.create_model, name, **size, **options)
    for name in image["peers"]:
        yield {"model": name}, partial(timm.create_model, name, **size)


def language_models(text: Row, backend: str) -> Iterator[tuple[Row, Callable[[], nn.Module]]]:
    """Our token model with each mixer, then the peers that are installed."""
    _check_mixers(text["mixers"])
    if unknown := set(text["peers"]) - {"llama"}:
        raise ValueError(f"text.peers has {', '.join(sorted(unknown))}: there is llama alone")
    size = {"vocab_size": text["vocabulary"], "d_model": text["d_model"], "depth": text["depth"]}
    size["recompute"] = text["recompute"]
    for mixer in text["mixers"]:
        yield {"model": "longseq", "mixer": mixer}, partial(TokenBackbone, mixer=mixer, backend=backend, **size)
    if "llama" in text["peers"] and importlib.util.find_spec("transformers") is not None:
        yield {"model": "transformers Llama, sdpa"}, partial(_Llama, text)


def _check_mixers(patterns: list[Any]) -> None:
    """Raise ValueError for a mixer that does not exist, before anything is measured."""
    for pattern in patterns:
        for name in options_by_name(pattern, None):
            mixers.get(name)


class _Llama(nn.Module):
    """transformers' Llama of the same size, called as our models are."""

    def __init__(self, text: Row) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

        width = text["d_model"]
        config = LlamaConfig(
            vocab_size=text["vocabulary"],
            hidden_size=width,
            intermediate_size=mlp_width(width),
            num_hidden_layers=text["depth"],
            num_attention_heads=max(1, width // 64),
            max_position_embeddings=max(text["lengths"]) + text["new_tokens"],
            tie_word_embeddings=True,
        )
        config._attn_implementation = "sdpa"  # an argument of the constructor that its signature does not have
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Any]:
        output = self.model(tokens, use_cache=not self.training)
        return output.logits, output.past_key_values

    def step(self, token: Tensor, state: Any) -> tuple[Tensor, Any]:
        output = self.model(token[:, None], past_key_values=state, use_cache=True)
        return output.logits[:, -1], output.past_key_values


def _autocast(device: torch.device) -> AbstractContextManager[None]:
    return torch.autocast(device.type, torch.bfloat16)


def build_model(
    make: Callable[[], nn.Module], config: Row, device: torch.device
) -> tuple[nn.Module, Callable[..., Any]]:
    """The model, and what is called: the model compiled if that is asked for."""
    with torch.device(device):
        torch.manual_seed(0)
        model = make()
    if config["compile"] is None:
        return model.to(device), model
    torch.compiler.reset()  # blocks of earlier models would count against the limit of recompilations
    return model.to(device), torch.compile(model, mode=config["compile"])


def training_step(model: nn.Module, loss: Callable[[], Tensor], device: torch.device) -> Run:
    """One training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step() -> None:
        with _autocast(device):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _measure_step(step: Run, units: int, unit: str, before: int, config: Row, device: torch.device) -> Row:
    """The first step, the speed of the others, and memory; `before` are the bytes there before the model was built."""
    row: Row = {"first_step_s": round(time_once(step, device), 2)}
    row[f"training_{unit}_per_s"] = _rate(step, units, config, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        there = torch.cuda.memory_allocated(device) - before
        row["training_gib"] = round((there + added_bytes(step, device)) / 2**30, 2)
    return row


def _rate(step: Run, units: int, config: Row, device: torch.device) -> float:
    times, failure = time_in_turn({"step": step}, device, config["seconds"])["step"]
    if times is None:
        raise RuntimeError(failure)
    rate = 1e3 * units / times.median
    return round(rate) if rate >= 100 else round(rate, 2)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def measure_image(make: Callable[[], nn.Module], pixels: int, batch: int, config: Row, device: torch.device) -> Row:
    """Training and inference of an image classifier."""
    before = _allocated(device)
    model, called = build_model(make, config, device)
    images = torch.randn(batch, 3, pixels, pixels, device=device)
    labels = torch.randint(config["image"]["classes"], (batch,), device=device)
    model.train()
    step = training_step(model, lambda: nn.functional.cross_entropy(called(images), labels), device)
    row = {"parameters": count_parameters(model), **_measure_step(step, batch, "images", before, config, device)}
    model.eval()

    def infer() -> Tensor:
        with torch.inference_mode(), _autocast(device):
            return called(images)

    row["inference_images_per_s"] = _rate(infer, batch, config, device)
    if device.type == "cuda":
        row["inference_gib"] = round(added_bytes(infer, device) / 2**30, 2)
    return row


def measure_training(make: Callable[[], nn.Module], tokens: int, config: Row, device: torch.device) -> Row:
    """Training of a language model, with as many sequences as a step's tokens hold."""
    before = _allocated(device)
    model, called = build_model(make, config, device)
    text = config["text"]
    batch = max(1, text["step_tokens"] // tokens)
    read = torch.randint(text["vocabulary"], (batch, tokens + 1), device=device)
    model.train()

    def loss() -> Tensor:
        logits, _ = called(read[:, :-1])
        return token_loss(logits, read[:, 1:]).mean()

    step = training_step(model, loss, device)
    head = {"parameters": count_parameters(model), "batch": batch}
    return head | _measure_step(step, batch * tokens, "tokens", before, config, device)


@torch.inference_mode()
def measure_decoding(make: Callable[[], nn.Module], batch: int, config: Row, device: torch.device) -> Row:
    """Token by token after a prompt."""
    before = _allocated(device)
    model, _ = build_model(make, {**config, "compile": None}, device)
    model.to(torch.bfloat16).eval()
    text, step = config["text"], getattr(model, "step")  # noqa: B009  of modules, the checker knows tensors alone
    prompt = torch.randint(text["vocabulary"], (batch, text["prompt"]), device=device)
    token = prompt[:, -1].clone()
    _, start = model(prompt)

    def decode() -> None:
        state = start
        for _ in range(text["new_tokens"]):
            _, state = step(token, state)
        if hasattr(start, "crop"):  # transformers' cache, which is no value: it holds the new tokens now
            start.crop(-text["new_tokens"])

    row: Row = {"parameters": count_parameters(model)}
    row["decoding_tokens_per_s"] = _rate(decode, batch * text["new_tokens"], config, device)
    if device.type == "cuda":
        row["decoding_gib"] = round((_allocated(device) - before + added_bytes(decode, device)) / 2**30, 2)
        row |= _measure_graph(model, start, token, config, device)
    return row


def _measure_graph(model: nn.Module, start: Any, token: Tensor, config: Row, device: torch.device) -> Row:
    """The step as a CUDA graph, for models whose state does not grow."""
    layers = [layer for layer in model.modules() if isinstance(layer, mixers.Mixer)]
    if not isinstance(model, TokenBackbone) or any(layer.growing_state for layer in layers):
        return {}
    try:
        graph = StepGraph(model, start)
    except RuntimeError as error:
        return {"remark": f"no graph: {one_line(error)}"}
    return {"decoding_graph_tokens_per_s": _rate(lambda: graph(token), token.shape[0], config, device)}
