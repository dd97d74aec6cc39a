"""The tasks of lm-evaluation-harness, and the adapter through which it asks a model of ours."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import lm_eval.evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from longseq.tasks.lm.likelihood import Likelihood, Row, document_rows
from longseq.tools.harness.sets import sets_from
from longseq.tools.harness.workers import Workers


class Adapter(TemplateLM):
    """Answers the requests of lm-evaluation-harness with the models of `workers`.

    A context follows the token with which documents begin in training, or no token where the model reads bare prompts.
    An empty context is the start of a document.
    """

    def __init__(self, workers: Workers) -> None:
        super().__init__()
        self.workers = workers
        self.tokenizer = workers.first.tokenizer

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.separator

    @property
    def prefix_token_id(self) -> int:
        return self.tokenizer.start

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        start = [] if add_special_tokens is False or self.tokenizer.bare_prompts else [self.prefix_token_id]
        return start + self.tokenizer.encode(string).tolist()

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = []
        for texts, context, continuation in requests:
            if not continuation:  # the sum over no token would be a probability of 1
                raise ValueError(f"the continuation {texts[1]!r} has no token of its own")
            read = context or [self.prefix_token_id]
            rows.append(Row([*read, *continuation], len(read)))
        return [tuple(one) for one in self._score(rows)]  # type: ignore[misc]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        rows, owners = [], []
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            own = document_rows(self.workers.first.model, [self.prefix_token_id, *tokens])
            rows += own
            owners += [index] * len(own)
        sums = [0.0] * len(requests)
        for index, one in zip(owners, self._score(rows), strict=True):
            sums[index] += one.log_probability
        return sums

    def _score(self, rows: Sequence[Row]) -> list[Likelihood]:
        """The likelihood of each row. ValueError for one that is NaN or infinite."""
        found = self.workers.score(rows)
        if not all(math.isfinite(one.log_probability) for one in found):
            raise ValueError(f"log-probabilities are not finite with dtype={self.workers.dtype}")
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Greedy continuations, or drawn ones where a task says so, up to the first of its stop strings."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        found: dict[int, str] = {}
        for options, indices in groups.items():
            prompts = [requests[index].args[0] for index in indices]
            found |= dict(zip(indices, self.workers.write(prompts, _writing(json.loads(options))), strict=True))
        return [found[index] for index in range(len(requests))]


def _writing(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keys of `longseq generate` for the `generation_kwargs` of a task."""
    options: dict[str, Any] = dict(normalize_gen_kwargs(kwargs))
    drawn, temperature = options.pop("do_sample"), float(options.pop("temperature", 1.0))
    found: dict[str, Any] = {
        "stop": options.pop("until"),
        "max_new_tokens": options.pop("max_gen_toks"),
        "temperature": temperature if drawn else 0.0,
    }
    found |= {name: options.pop(name) for name in ("top_k", "top_p", "repetition_penalty") if name in options}
    if options.get("num_beams") == 1:
        del options["num_beams"]
    if options:
        raise ValueError(f"generation_kwargs of a task has {', '.join(sorted(options))}, which longseq does not have")
    return found


def load_tasks(
    names: Sequence[str], *, include: str | None = None, root: str | None = None, num_fewshot: int | None = None
) -> Any:
    """The tasks of names, groups, tags and YAML files, with their documents.

    `include` is a folder with YAML files of more tasks. `root` is the folder that holds the data sets; without it they
    come from the Hugging Face hub or its cache.
    """
    with _quiet(), sets_from(root):
        manager = TaskManager(include_path=include, include_defaults=not all(map(_stands_alone, names)))
        loaded: Any = manager.load(list(names))
    for task in loaded["tasks"].values():
        # As lm-evaluation-harness does: a task that fixes the number at 0 keeps it.
        if num_fewshot is not None and task.get_config("num_fewshot") != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)  # lm-evaluation-harness's own default
    return loaded


def _stands_alone(name: str) -> bool:
    """True for the YAML file of a task; a group names tasks that must be found in the list, which takes seconds."""
    return name.endswith((".yaml", ".yml")) and not any(
        line.startswith("group:") for line in Path(name).read_text(encoding="utf-8").splitlines()
    )


def evaluate(workers: Workers, loaded: Any, limit: int | None) -> dict[str, Any]:
    """The metrics of tasks and groups, in plain containers."""
    with _quiet():
        found: Any = lm_eval.evaluator.evaluate(Adapter(workers), loaded, limit=limit, log_samples=False)
    tasks, groups = {}, {}
    for name, values in found["results"].items():
        own = {"metrics": _metrics(values)}
        if name in loaded["tasks"]:
            own["samples"] = found["n-samples"][name]["effective"]
            own["num_fewshot"] = found["n-shot"].get(name, 0)
            own["version"] = found["versions"].get(name)
            tasks[name] = own
        elif own["metrics"]:
            groups[name] = own
    return {"tasks": tasks, "groups": groups}


def _metrics(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The metrics of a task; its own keys are `METRIC,FILTER` and `METRIC_stderr,FILTER`."""
    metrics = {}
    for key, value in values.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        error = values.get(f"{metric}_stderr,{filtered}")
        name = metric if filtered == "none" else f"{metric} ({filtered})"
        metrics[name] = {"value": value, "stderr": error if isinstance(error, float) else None}
    return metrics


@contextmanager
def _quiet() -> Iterator[None]:
    """The libraries print warnings only, and write nothing next to the user's sets."""
    disabled = logging.root.manager.disable
    logging.disable(logging.INFO)
    datasets.disable_progress_bars()
    datasets.disable_caching()
    try:
        yield
    finally:
        logging.disable(disabled)
        datasets.enable_progress_bars()
        datasets.enable_caching()
