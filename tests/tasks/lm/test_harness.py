"""`longseq harness`: tasks of lm-evaluation-harness from local sets, and the requests that they make of a model."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import datasets
import lm_eval.tasks
import pytest
import torch

from longseq.tasks.text.tokenizer import ByteTokenizer
from longseq.tasks.training import checkpoint
from longseq.tools import harness
from longseq.tools.harness import workers
from longseq.tools.harness.evaluation import Adapter, evaluate, load_tasks
from longseq.tools.harness.workers import Workers

OWN = Path(lm_eval.tasks.__file__).parent
# Files of tasks in place of their names, because the list of all tasks takes seconds.
PIQA, HELLASWAG = f"{OWN}/piqa/piqa.yaml", f"{OWN}/hellaswag/hellaswag.yaml"
GOALS = [
    {"goal": f"open box {number}", "sol1": "lift the lid", "sol2": "eat it" + " all" * number, "label": number % 2}
    for number in range(5)
]
STORIES = [
    {"activity_label": "Cooking", "ctx_a": "A cook stirs.", "ctx_b": f"she {number}", "label": str(number % 4),
     "endings": ["[title] adds salt.", "leaves  the room.", "sings", "la la la la"]}
    for number in range(5)
]  # fmt: skip


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """A folder with two saved sets, of which one has a configuration's folder."""
    root = tmp_path_factory.mktemp("sets")
    datasets.Dataset.from_list(GOALS).save_to_disk(root / "piqa" / "plain_text" / "validation")
    datasets.DatasetDict(validation=datasets.Dataset.from_list(STORIES)).save_to_disk(root / "Rowan" / "hellaswag")
    return root


def make_workers(trained, batch_size=64, devices=("cpu",), dtype="float64"):
    return Workers(str(trained.checkpoint), devices, weights="auto", dtype=dtype, batch_size=batch_size, modules=[])


def directly(model, context, continuation):
    """The log-probability of a text behind another, from the scores of the whole."""
    tokens = torch.tensor([[256, *context.encode(), *continuation.encode()]])
    with torch.no_grad():
        scores = model(tokens[:, :-1])[0][0].log_softmax(-1)
    own = scores.gather(1, tokens[0, 1:, None])[:, 0]
    return own[len(context.encode()) :].sum().item()


@pytest.mark.slow
def test_two_tasks_run_from_local_sets_and_give_what_is_computed_directly(trained, sets, compose_config, tmp_path):
    words = (f"checkpoint={trained.checkpoint}", f"tasks=['{PIQA}','{HELLASWAG}']", f"data.root={sets}", "device=cpu")
    found = [
        harness.run(compose_config("harness", *words, f"batch_size={size}", f"output={tmp_path / f'{size}.json'}"))
        for size in (1, 64)
    ]
    assert found[0]["tasks"] == found[1]["tasks"] == json.loads((tmp_path / "64.json").read_text())["tasks"]
    model = checkpoint.load(trained.checkpoint, tasks=("lm",)).backbone.eval()
    right, normed = 0, 0
    for row in GOALS:
        texts = [f" {row[key]}" for key in ("sol1", "sol2")]
        scores = [directly(model, f"Question: {row['goal']}\nAnswer:", text) for text in texts]
        right += scores.index(max(scores)) == row["label"]
        lengths = [score / len(text[1:]) for score, text in zip(scores, texts, strict=True)]
        normed += lengths.index(max(lengths)) == row["label"]
    metrics = found[0]["tasks"]["piqa"]["metrics"]
    assert (metrics["acc"]["value"], metrics["acc_norm"]["value"]) == (right / 5, normed / 5)
    assert found[0]["tasks"]["hellaswag"]["samples"] == 5
    limited = harness.run(compose_config("harness", *words, "limit=2", f"output={tmp_path / 'few.json'}"))
    assert limited["tasks"]["piqa"]["samples"] == 2
    assert not list(sets.rglob("cache-*")), "nothing is written beside the user's sets"


def request(*arguments):
    return SimpleNamespace(args=arguments)


PAIRS = [("a question", " answer"), ("", "start"), ("a longer question than that", " é"), ("ends in a blank ", "word")]


def test_likelihoods_are_those_of_the_continuation_whatever_the_batch(trained):
    for size in (1, 2, 64):
        workers = make_workers(trained, size)
        adapter = Adapter(workers)
        wanted = [directly(workers.first.model, *pair) for pair in PAIRS]
        found = adapter.loglikelihood([request(*pair) for pair in PAIRS])
        # A blank at the end of a context belongs to the continuation, as in lm-evaluation-harness.
        wanted[3] = directly(workers.first.model, "ends in a blank", " word")
        assert [one for one, _ in found] == pytest.approx(wanted, rel=1e-9)
        texts = [context + text for context, text in PAIRS]
        rolling = adapter.loglikelihood_rolling([request(text) for text in texts])
        assert rolling == pytest.approx([directly(workers.first.model, "", text) for text in texts], rel=1e-9)


def test_log_probabilities_that_are_not_finite_are_refused(trained):
    adapter = Adapter(make_workers(trained))
    for parameter in adapter.workers.first.model.parameters():
        parameter.data.fill_(float("nan"))
    for ask in (
        lambda: adapter.loglikelihood([request("one", " text")]),
        lambda: adapter.loglikelihood_rolling([request("one text")]),
    ):
        with pytest.raises(ValueError, match="not finite"):
            ask()


def test_continuations_are_greedy_and_end_at_a_stop_string(trained):
    adapter = Adapter(make_workers(trained, 2))
    model = adapter.workers.first.model
    prompts = ["a", "some text", "état"]
    whole = []
    for prompt in prompts:
        start = torch.tensor([[256, *prompt.encode()]])
        whole.append(ByteTokenizer().decode(model.generate(start, 9, temperature=0)[0, start.shape[1] :].tolist()))
    kwargs = {"until": ["\n\n"], "max_gen_toks": 9, "do_sample": False, "num_beams": 1}
    found = adapter.generate_until([request(prompt, kwargs) for prompt in prompts])
    assert found == whole
    stop = {"until": [whole[0][1]], "max_gen_toks": 9}
    assert adapter.generate_until([request("a", stop)]) == [whole[0][: whole[0].index(whole[0][1])]]


@pytest.mark.slow
def test_several_processes_give_what_one_gives(trained, monkeypatch):
    def get_context(method):
        assert method == "spawn"
        return multiprocessing.get_context("fork")  # a new process imports for many seconds; no GPU is used here

    monkeypatch.setattr(workers, "get_context", get_context)
    requests = [request(*pair) for pair in PAIRS]
    alone = Adapter(make_workers(trained, 1)).loglikelihood(requests)
    with make_workers(trained, 1, devices=("cpu", "cpu")) as others:
        assert Adapter(others).loglikelihood(requests) == alone
        kwargs = {"until": ["\n\n"], "max_gen_toks": 3}
        assert len(Adapter(others).generate_until([request("a", kwargs), request("b", kwargs)])) == 2


YAML = """
task: own
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
output_type: loglikelihood
fewshot_split: test
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_a_task_of_ones_own_reads_a_local_file(tmp_path, trained, cache):
    rows, path = tmp_path / "rows.jsonl", tmp_path / "own.yaml"
    rows.write_text("".join(f'{{"question": "one and {i}?", "answer": " {i}"}}\n' for i in range(5)))
    path.write_text(YAML.replace("FILE", str(rows)))
    results = evaluate(make_workers(trained), load_tasks([str(path)], num_fewshot=4), None)["tasks"]["own"]
    assert results["metrics"].keys() >= {"acc", "perplexity"}
    assert results["num_fewshot"] == 4
