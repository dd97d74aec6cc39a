"""The model card, README.md, of a saved model."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from longseq.mixers.pattern import options_by_name
from longseq.parameters import count_parameters

# The splits in metrics.json, and their captions on the card.
SPLITS = {"test": "Test data, with the weights of this file", "val": "Validation data, at the moment they were chosen"}

# How transformers loads a model; the last line needs a tokenizer.
_LANGUAGE_MODEL = (
    "import longseq.tools.hugging_face.causal_lm",
    "from transformers import AutoModelForCausalLM, AutoTokenizer",
    "",
    'model = AutoModelForCausalLM.from_pretrained("FOLDER or OWNER/NAME")',
    'tokenizer = AutoTokenizer.from_pretrained("FOLDER or OWNER/NAME")',
)
_CLASSIFIER = (
    "import longseq.tools.hugging_face.sequence_classification",
    "from transformers import AutoModelForSequenceClassification, pipeline",
    "",
    'model = AutoModelForSequenceClassification.from_pretrained("FOLDER or OWNER/NAME")',
    'classify = pipeline("text-classification", "FOLDER or OWNER/NAME")',
)


def model_card(
    model: nn.Module, config: Mapping[str, Any], metrics: Mapping[str, Any], *, has_tokenizer: bool = True
) -> str:
    """The model card in Markdown, with the hub's front matter; `has_tokenizer` is False without tokenizer files."""
    lines = [*_front_matter(config), *_facts(model, config), *_usage(config, has_tokenizer), *_measured(metrics)]
    return "\n".join(lines).rstrip() + "\n"


def _front_matter(config: Mapping[str, Any]) -> Iterator[str]:
    arguments = config["model_args"]
    mixers = sorted(options_by_name(arguments["mixer"], None)) if "mixer" in arguments else []
    tags = ["longseq", *(["timm"] if "architecture" in config else []), *mixers]
    yield from ("---", "library_name: longseq", "tags:", *(f"- {tag}" for tag in tags))
    if config.get("num_classes"):
        yield "pipeline_tag: image-classification"
    elif config["kind"] == "document":
        yield "pipeline_tag: text-classification"
    elif "model_type" in config:
        yield "pipeline_tag: text-generation"
    yield from ("---", "")


def _facts(model: nn.Module, config: Mapping[str, Any]) -> Iterator[str]:
    arguments = config["model_args"]
    yield from (f"# {config.get('architecture', config['kind'])}", "", "| | |", "|---|---|")
    yield f"| parameters | {count_parameters(model):,} |"
    for key in ("mixer", "direction", "d_model", "embed_dim", "depth", "vocab_size", "num_classes"):
        if arguments.get(key) is not None:
            yield f"| {key} | {arguments[key]} |"
    if "pretrained_cfg" in config:
        yield f"| input | {' x '.join(map(str, config['pretrained_cfg']['input_size']))} |"
    yield from (f"| longseq | {config['longseq_version']} |", "")


def _usage(config: Mapping[str, Any], has_tokenizer: bool) -> Iterator[str]:
    yield from ("```python", "import longseq", "", 'model = longseq.from_pretrained("FOLDER or OWNER/NAME")', "```", "")
    if config["kind"] == "document" or "model_type" in config:
        loading = _CLASSIFIER if config["kind"] == "document" else _LANGUAGE_MODEL
        yield from (
            'transformers loads it, too (`pip install "longseq[text]"`):',
            "",
            "```python",
            *loading[: len(loading) if has_tokenizer else -1],
            "```",
            "",
        )
        if not has_tokenizer:
            yield from ("The folder has no tokenizer: the model reads numbers of tokens.", "")
        documents = config.get("documents") or {}
        if documents.get("preparation") is not None:
            yield (
                f"The texts of its training were prepared as `data.source={documents['source']}` does: so does "
                f"`longseq predict`, and texts for transformers need it before: {documents['preparation']}."
            )
            yield ""
    if "architecture" not in config:
        return
    yield from (
        "timm loads it, too, and prepares its images:",
        "",
        "```python",
        "import longseq, timm",
        "",
        'model = timm.create_model("hf-hub:OWNER/NAME", pretrained=True).eval()  # or "local-dir:FOLDER"',
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))",
        "```",
        "",
    )


def _measured(metrics: Mapping[str, Any]) -> Iterator[str]:
    for split, what in SPLITS.items():
        rows = {key: value for key, value in metrics.items() if key.startswith(f"{split}/") and _is_number(value)}
        if rows:
            yield from (f"{what}:", "", "| metric | value |", "|---|---|")
            yield from (f"| {key} | {value:.4g} |" for key, value in sorted(rows.items()))
            yield ""
    trained = [f"{metrics[key]} {key}" for key in ("epochs", "updates", "seconds") if _is_number(metrics.get(key))]
    if trained:
        yield f"Trained for {', '.join(trained)}."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
