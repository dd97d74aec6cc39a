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
from longseq.tools.harness.names import YAML, check_names, unknown_task
from longseq.tools.harness.sets import sets_from
from longseq.tools.harness.workers import Workers


class Adapter(TemplateLM):
    """Answers the requests of lm-evaluation-harness with the models of `workers`.

    A context is read behind the token with which documents begin in training, or behind none where the model reads bare
    prompts. An empty context is the start of a document.
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

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        for context, continuation in (request.args for request in requests):
            # Of these the library asks for the first token, which is not there.
            if not context and not self.tok_encode(continuation, add_special_tokens=False):
                raise _without_token(context, continuation)
        return super().loglikelihood(requests, disable_tqdm=True)  # the bar is ours

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        for texts, _, continuation in requests:
            if not continuation:  # without a word, the sum over no token would be a probability of 1
                raise _without_token(*texts)
        rows = []
        for _, context, continuation in requests:
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
        """The likelihood of each row. ValueError for one that is not finite, of which a task would choose a text."""
        found = self.workers.score(rows)
        if wrong := sum(not math.isfinite(one.log_probability) for one in found):
            reason = (
                "float16 holds no number above 65504: give dtype=bfloat16 or dtype=float32"
                if self.workers.dtype == "float16"
                else f"the model gives no numbers in dtype={self.workers.dtype}, most likely since its weights hold NaN"
            )
            raise ValueError(f"{wrong} of {len(found)} log-probabilities are not finite: {reason}")
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Greedy continuations, or drawn ones where a task says so, up to the first of its stop strings."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        found: dict[int, str] = {}
        for told, indices in groups.items():
            prompts = [requests[index].args[0] for index in indices]
            found |= dict(zip(indices, self.workers.write(prompts, _writing(json.loads(told))), strict=True))
        return [found[index] for index in range(len(requests))]


def _without_token(context: str, continuation: str) -> ValueError:
    return ValueError(
        f"a task asks for the probability of {continuation!r} behind {context[-40:]!r}, where the tokenizer has no "
        "token of its own for it: leave out this sample or choice, or give the task another target_delimiter, such as "
        "a blank"
    )


def _writing(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keys of `longseq generate` for the `generation_kwargs` of a task. ValueError for one that it has not."""
    options: dict[str, Any] = dict(normalize_gen_kwargs(kwargs))
    drawn, temperature = options.pop("do_sample"), float(options.pop("temperature", 1.0))
    found: dict[str, Any] = {
        "stop": options.pop("until"),
        "max_new_tokens": options.pop("max_gen_toks"),
        "temperature": temperature if drawn else 0.0,
    }
    found |= {name: options.pop(name) for name in ("top_k", "top_p", "repetition_penalty") if name in options}
    if options:
        raise ValueError(f"generation_kwargs of a task has {', '.join(sorted(options))}, which longseq does not know")
    return found


def load_tasks(
    names: Sequence[str], *, include: str | None = None, root: str | None = None, num_fewshot: int | None = None
) -> Any:
    """The tasks of names, groups, tags and YAML files, with their documents.

    `include` is a folder with YAML files of more tasks. `root` is the folder that holds the data sets; without it they
    come from the Hugging Face hub or its cache. ValueError, in one line, for what the user can mend.
    """
    check_names(names, include)
    with _quiet():
        manager = TaskManager(include_path=include, include_defaults=not all(map(_stands_alone, names)))
        for name in names:
            if not name.endswith(YAML) and name not in manager.task_index:
                raise ValueError(unknown_task(name, manager.all_tasks))
        loaded: Any = None
        with sets_from(root) as splits:
            try:
                loaded = manager.load(list(names))
            except IndexError as error:
                # A task that measures a split that is not there looks for its first document in an empty one.
                told = [text for one in splits if (text := one.complain())]
                if not told or "out of bounds for size 0" not in str(error):
                    raise
                raise ValueError(told[-1]) from error
    for name, task in loaded["tasks"].items():
        _prepare(name, task, num_fewshot)
    return loaded


def _stands_alone(name: str) -> bool:
    """True for the YAML file of a task; a group names tasks that must be found in the list, which takes seconds."""
    return name.endswith(YAML) and not any(
        line.startswith("group:") for line in Path(name).read_text(encoding="utf-8").splitlines()
    )


def _prepare(name: str, task: Any, num_fewshot: int | None) -> None:
    """Set the number of examples, as lm-evaluation-harness does: a task that fixes it at 0 keeps it."""
    if getattr(task, "UNSAFE_CODE", False):
        raise ValueError(f"tasks: {name} runs code that the model writes, which longseq harness does not do")
    if getattr(task, "MULTIMODAL", False):
        raise ValueError(f"tasks: {name} has images or sound, which language models do not read")
    own = task.get_config("num_fewshot")
    shots = own or 0 if num_fewshot is None or own == 0 else num_fewshot
    task.set_config(key="num_fewshot", value=shots)
    task.set_fewshot_seed(seed=1234)  # lm-evaluation-harness's own default
    if not shots:
        return
    count = len(task.fewshot_docs() or [])
    if not count:
        raise ValueError(f"tasks: {name} with num_fewshot={shots} takes examples of a split that its data set lacks")
    options = getattr(task, "fewshot_cfg", None)
    if isinstance(getattr(options, "sampler", ""), str):  # a sampler of the task's own may take an example twice
        # A sample is no example of its own; as lm-evaluation-harness tells whether it would be among them.
        own_split = options is not None and options.split == task.get_config("test_split")
        if shots > (most := count - own_split):
            others = " besides the sample itself" if own_split else ""
            raise ValueError(
                f"tasks: {name} has {most} examples{others}, fewer than num_fewshot={shots}: give at most {most}"
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
    """The libraries print no lines and bars, and write nothing beside the user's sets. What can be mended is raised."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    hidden, cached = datasets.are_progress_bars_disabled(), datasets.is_caching_enabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    datasets.disable_caching()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if not hidden:
            datasets.enable_progress_bars()
        if cached:
            datasets.enable_caching()
