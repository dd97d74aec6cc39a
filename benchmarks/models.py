"""Time training and inference of whole models on random data, and measure their memory.

python benchmarks/models.py image [--models NAME ...] [--mixers NAME ...] [--sizes 224x256 ...]
python benchmarks/models.py text [--mixers NAME ...] [--lengths 2048 ...] [--decoding-batches 1 64]

Our models, with each mixer, are timed in one process with models of timm and, if it is installed, of transformers.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import timm
import torch
from measure import Run, add_cache_argument, added_bytes, compiled_kernels, one_line, time_in_turn, time_once
from report import add_common_arguments, make_result, to_markdown, write_result
from torch import Tensor, nn

import longseq  # noqa: F401  registers the image models
from longseq.backbones.generation import Continuation, StepGraph, can_record
from longseq.backbones.sampling import Sampling, TokenSampler
from longseq.backbones.tokens import TokenBackbone, TokenState, mlp_width
from longseq.kernels import token_loss
from longseq.kernels.packing import Packing
from longseq.mixers.attention import KeyValueCache
from longseq.parameters import count_parameters
from longseq.tasks.lm.writer import draw_tokens

NOTES = (
    "bfloat16 autocast over float32 weights; training is forward, backward and a step of fused AdamW, on random data "
    "that lies on the device. Speeds are those of the median step. Memory: weights, gradients, optimizer and the "
    "most that a step adds; of inference, what a call adds.",
    "First step: seconds of the first training step, from empty caches; the self-test and the compilation of kernels "
    "included where an earlier row had not done them.",
    "Decoding: tokens of all sequences a second, one step of the model a token after a prompt, with bfloat16 weights; "
    "graph: the step as a CUDA graph. Generation: each token is also drawn and read by the host; on a "
    "GPU the graph holds both. Keys and values of attention have room for the prompt and the new tokens.",
)
COMPILED = "The models were compiled for training, and image models for inference too; decoding ran eager."
ON_CPU = "Measured on a CPU: speeds are relative to the first row of the same task and size."

Row = dict[str, Any]
Task = tuple[Row, Callable[[], Row]]  # the head of a row, and the function that measures the rest


def read_options(words: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line, or of these words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="task", required=True)
    image = kinds.add_parser("image", help="image classifiers")
    image.add_argument("--models", nargs="*", default=[f"longseq_vit_{size}_patch16_224" for size in ("tiny", "small")])
    image.add_argument("--mixers", nargs="+", default=["attention", "longhorn", "deltanet"])
    image.add_argument("--direction", default="bidirectional", help="as model.direction of `longseq train`")
    image.add_argument("--peers", nargs="*", default=["deit_tiny_patch16_224", "deit_small_patch16_224"])
    image.add_argument("--sizes", nargs="+", type=_read_size, default=["224x256", "512x64", "1024x16"])
    image.add_argument("--classes", type=int, default=1000)
    text = kinds.add_parser("text", help="language models")
    text.add_argument("--mixers", nargs="*", default=["attention", "deltanet", "gsa", "longhorn", "vla"])
    text.add_argument("--peers", nargs="*", default=["llama"], choices=["llama"])
    for name, size in (("d-model", 1024), ("depth", 24), ("vocabulary", 32000)):
        text.add_argument(f"--{name}", type=int, default=size)
    text.add_argument("--lengths", nargs="*", type=int, default=[2048, 8192, 32768], help="tokens of a sequence")
    text.add_argument("--document-lengths", nargs="*", type=int, default=[], help="tokens of packed documents")
    text.add_argument("--step-tokens", type=int, default=32768, help="tokens of a training step")
    text.add_argument("--recompute", default="none", help="as model.recompute of `longseq train`")
    text.add_argument("--decoding-batches", nargs="*", type=int, default=[1, 64], help="sequences that are decoded")
    text.add_argument("--prompt", type=int, default=512, help="tokens before those that are decoded")
    text.add_argument("--new-tokens", type=int, default=64)
    text.add_argument("--top-p", type=float, help="draw from the most likely tokens of this probability")
    for kind in (image, text):
        kind.add_argument("--backend", default="auto", help="kernels of our mixers: auto, triton, torch, reference")
        kind.add_argument("--compile", help="mode of torch.compile, such as default; not for decoding")
        add_common_arguments(kind, seconds=5, output="models.json")
        add_cache_argument(kind)
    return parser.parse_args(words)


def _read_size(text: str) -> tuple[int, int]:
    """The side of an image in pixels and the images of a batch, from "224x256"."""
    pixels, batch = map(int, text.split("x"))
    return pixels, batch


def main() -> None:
    keys = read_options()
    device, rows = keys.device, []
    notes = NOTES if keys.compile is None else (*NOTES, COMPILED)
    with compiled_kernels(keys.cache):
        for head, measure in plan(keys):
            rows.append(_guard(head, device, measure))
            if device.type == "cuda":
                result = make_result("Whole models", rows, device, notes)
            else:
                result = make_result("Whole models", _relate(rows), device, (*notes, ON_CPU))
            write_result(result, keys.output)  # after every row: a model that is too large loses no other row
    print(to_markdown(result))


def plan(keys: argparse.Namespace) -> Iterator[Task]:
    """All measurements."""
    device = keys.device
    if keys.task == "image":
        for pixels, batch in keys.sizes:
            for head, make in image_models(keys, pixels):
                head = {"task": "image", **head, "pixels": pixels, "batch": batch}
                yield head, partial(measure_image, make, pixels, batch, keys, device)
        return
    for head, make in language_models(keys):
        for tokens in keys.lengths:
            yield {"task": "text", **head, "tokens": tokens}, partial(measure_training, make, tokens, keys, device)
        for tokens in keys.document_lengths if "mixer" in head else ():
            packed = {"task": "packed", **head, "document_tokens": tokens}
            yield packed, partial(measure_training, make, tokens, keys, device, packed=True)
        for batch in keys.decoding_batches:
            yield {"task": "decoding", **head, "batch": batch}, partial(measure_decoding, make, batch, keys, device)


def _guard(head: Row, device: torch.device, measure: Callable[[], Row]) -> Row:
    """One row; a model that is refused or too large has a remark in place of figures."""
    try:
        return head | measure()
    except Exception as error:
        return head | {"remark": one_line(error)}
    finally:
        if device.type == "cuda":
            gc.collect()  # a model that is freed while the next one is measured would distort its memory
            torch.cuda.empty_cache()


def _relate(rows: list[Row]) -> list[Row]:
    """Add speeds relative to that of the first row of the same task and size."""
    first: dict[Any, float] = {}
    related = []
    for row in rows:
        size = tuple(row.get(name) for name in ("task", "pixels", "tokens", "document_tokens", "batch"))
        kept = {name: value for name, value in row.items() if not name.endswith("_s")}
        for name in (name for name in row if name.endswith("_per_s")):
            bar = first.setdefault((size, name), row[name])
            kept[f"{name.removesuffix('_per_s')}_of_first"] = round(row[name] / bar, 2)
        related.append(kept)
    return related


def image_models(keys: argparse.Namespace, pixels: int) -> Iterator[tuple[Row, Callable[[], nn.Module]]]:
    """Each of our models with each mixer, then the peers in timm."""
    size: Row = {"img_size": pixels, "num_classes": keys.classes}
    for name in keys.models:
        for mixer in keys.mixers:
            options = {"mixer": mixer, "direction": keys.direction, "backend": keys.backend}
            yield {"model": name, "mixer": mixer}, partial(timm.create_model, name, **size, **options)
    for name in keys.peers:
        yield {"model": name}, partial(timm.create_model, name, **size)


def language_models(keys: argparse.Namespace) -> Iterator[tuple[Row, Callable[[], nn.Module]]]:
    """Our token model with each mixer, then the installed peers."""
    size: Row = {"vocab_size": keys.vocabulary, "d_model": keys.d_model, "depth": keys.depth}
    size |= {"recompute": keys.recompute, "backend": keys.backend}
    for mixer in keys.mixers:
        yield {"model": "longseq", "mixer": mixer}, partial(TokenBackbone, mixer=mixer, **size)
    if "llama" in keys.peers and importlib.util.find_spec("transformers") is not None:
        yield {"model": "transformers Llama, sdpa"}, partial(_Llama, keys)


class _Llama(nn.Module):
    """transformers' Llama of the same size, called as our models are."""

    def __init__(self, text: argparse.Namespace) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

        from longseq.tools.hugging_face.cache import CACHE_NAME

        width = text.d_model
        config = LlamaConfig(
            vocab_size=text.vocabulary,
            hidden_size=width,
            intermediate_size=mlp_width(width),
            num_hidden_layers=text.depth,
            num_attention_heads=max(1, width // 64),
            max_position_embeddings=max(text.lengths) + text.new_tokens,
            tie_word_embeddings=True,
        )
        config._attn_implementation = "sdpa"  # the constructor accepts it, though its signature does not name it
        self.model = LlamaForCausalLM(config)
        self.cache_name = CACHE_NAME

    def forward(self, tokens: Tensor) -> tuple[Tensor, Any]:
        output = self.model(tokens, use_cache=not self.training)
        return output.logits, output.get(self.cache_name)

    def step(self, token: Tensor, state: Any) -> tuple[Tensor, Any]:
        output = self.model(token[:, None], **{self.cache_name: state}, use_cache=True)
        return output.logits[:, -1], output.get(self.cache_name)


def _autocast(device: torch.device) -> AbstractContextManager[None]:
    return torch.autocast(device.type, torch.bfloat16)


def build_model(
    make: Callable[[], nn.Module], mode: str | None, device: torch.device
) -> tuple[nn.Module, Callable[..., Any]]:
    """The model, and its callable, which is compiled if there is a mode of torch.compile."""
    with torch.device(device):
        torch.manual_seed(0)
        model = make()
    if mode is None:
        return model.to(device), model
    torch.compiler.reset()  # compilations of earlier models would count towards the limit of recompilations
    return model.to(device), torch.compile(model, mode=mode)


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


def _measure_step(step: Run, units: int, unit: str, before: int, keys: argparse.Namespace, device: torch.device) -> Row:
    """The first step, the speed of the others, and memory; `before` is the memory in use before the model was built."""
    first = round(time_once(step, device), 2)
    row: Row = {"first_step_s": first} if keys.cache is None else {}
    row[f"training_{unit}_per_s"] = _rate(step, units, keys, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        there = torch.cuda.memory_allocated(device) - before
        row["training_gib"] = round((there + added_bytes(step, device)) / 2**30, 2)
    return row


def _rate(step: Run, units: int, keys: argparse.Namespace, device: torch.device) -> float:
    times, failure = time_in_turn({"step": step}, device, keys.seconds)["step"]
    if times is None:
        raise RuntimeError(failure)
    rate = 1e3 * units / times.median
    return round(rate) if rate >= 100 else round(rate, 2)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def measure_image(
    make: Callable[[], nn.Module], pixels: int, batch: int, keys: argparse.Namespace, device: torch.device
) -> Row:
    """Training and inference of an image classifier."""
    before = _allocated(device)
    model, called = build_model(make, keys.compile, device)
    images = torch.randn(batch, 3, pixels, pixels, device=device)
    labels = torch.randint(keys.classes, (batch,), device=device)
    model.train()
    step = training_step(model, lambda: nn.functional.cross_entropy(called(images), labels), device)
    row = {"parameters": count_parameters(model), **_measure_step(step, batch, "images", before, keys, device)}
    model.eval()

    def infer() -> Tensor:
        with torch.inference_mode(), _autocast(device):
            return called(images)

    row["inference_images_per_s"] = _rate(infer, batch, keys, device)
    if device.type == "cuda":
        row["inference_gib"] = round(added_bytes(infer, device) / 2**30, 2)
    return row


def measure_training(
    make: Callable[[], nn.Module], tokens: int, keys: argparse.Namespace, device: torch.device, *, packed: bool = False
) -> Row:
    """Training of a language model; the number of sequences follows from a step's tokens.

    With `packed` they are documents of this length, end to end in one row, with what is left over as a shorter one.
    """
    before = _allocated(device)
    model, called = build_model(make, keys.compile, device)
    batch, length = (1, keys.step_tokens) if packed else (max(1, keys.step_tokens // tokens), tokens)
    read = torch.randint(keys.vocabulary, (batch, length + 1), device=device)
    borders = torch.tensor([*range(0, length, tokens), length], dtype=torch.int32, device=device)
    model.train()

    def loss() -> Tensor:
        # As in a training, each batch brings its own borders.
        options = {"cu_seqlens": Packing(borders, length, max_seqlen=tokens)} if packed else {}
        logits, _ = called(read[:, :-1], **options)
        return token_loss(logits, read[:, 1:]).mean()

    step = training_step(model, loss, device)
    head = {"parameters": count_parameters(model), "batch": batch}
    return head | _measure_step(step, batch * length, "tokens", before, keys, device)


@torch.inference_mode()
def measure_decoding(make: Callable[[], nn.Module], batch: int, keys: argparse.Namespace, device: torch.device) -> Row:
    """Decoding token by token after a prompt."""
    before = _allocated(device)
    model, _ = build_model(make, None, device)
    model.to(torch.bfloat16).eval()
    prompt = torch.randint(keys.vocabulary, (batch, keys.prompt), device=device)
    token = prompt[:, -1].clone()
    start, logits = _read_prompt(model, prompt, keys.new_tokens)

    def decode() -> None:
        state = start
        for _ in range(keys.new_tokens):
            _, state = model.step(token, state)
        if hasattr(start, "crop"):  # transformers' cache is modified in place: it holds the new tokens now
            start.crop(-keys.new_tokens)

    row: Row = {"parameters": count_parameters(model)}
    row["decoding_tokens_per_s"] = _rate(decode, batch * keys.new_tokens, keys, device)
    if device.type == "cuda":
        row["decoding_gib"] = round((_allocated(device) - before + added_bytes(decode, device)) / 2**30, 2)
    if isinstance(model, TokenBackbone):
        row |= _measure_generation(model, start, logits, token, keys, device)
    return row


def _read_prompt(model: nn.Module, prompt: Tensor, new_tokens: int) -> tuple[Any, Tensor]:
    """The state after a prompt, with room for new tokens, and the scores `[B, V]` of the next one."""
    if not isinstance(model, TokenBackbone):
        logits, state = model(prompt)
        return state, logits[:, -1].clone()
    features, state = model.forward_features(prompt, max_length=prompt.shape[1] + new_tokens)
    return state, model.forward_head(features[:, -1])


def _measure_generation(
    model: TokenBackbone,
    start: TokenState,
    logits: Tensor,
    token: Tensor,
    keys: argparse.Namespace,
    device: torch.device,
) -> Row:
    """The step as a CUDA graph, where one can record it; and the step with the choice of the token."""
    row: Row = {}
    count, rows = keys.new_tokens, token.shape[0]
    in_graph = can_record(model)
    try:
        if in_graph:
            graph = StepGraph(model, start)

            def replay() -> None:
                for _ in range(count):
                    graph(token)
                _rewind(graph, count)

            row["decoding_graph_tokens_per_s"] = _rate(replay, rows * count, keys, device)
        seen = torch.zeros(rows, keys.vocabulary, dtype=torch.bool, device=device)
        sampler = TokenSampler(Sampling(top_p=keys.top_p), torch.arange(rows, device=device), seen=seen)
        recorded = None
        if in_graph:
            recorded = Continuation(model, start, logits, sampler, cuda_graph=True)
            recorded.draw()  # from here on, each draw is one replay

        def write() -> None:
            # Without a graph each run starts again: states that grow are not larger in the next one.
            writing = recorded or Continuation(model, start, logits, sampler)
            for _ in draw_tokens(writing, count):
                pass
            if writing.graph is not None:
                _rewind(writing.graph, count)

        row["generation_tokens_per_s"] = _rate(write, rows * count, keys, device)
        sampler.check()
    except RuntimeError as error:
        if not in_graph:
            raise
        row["remark"] = f"no graph: {one_line(error)}"
    return row


def _rewind(graph: StepGraph, tokens: int) -> None:
    """Make room for the same number of tokens again; the other states go on."""
    for block, layer in zip(graph.model.blocks, graph.state.layers, strict=True):
        own = block.mixer_state(layer)
        if isinstance(own, KeyValueCache):
            own.length.sub_(tokens)
    if graph.room is not None:
        graph.room += tokens


if __name__ == "__main__":
    main()
