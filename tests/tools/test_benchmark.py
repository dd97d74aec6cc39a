"""`longseq benchmark`: wrong results get no time, measurements are what they state, and the best launches win."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module

from longseq import kernels as operations
from longseq import mixers
from longseq.kernels import dispatch
from longseq.kernels.delta_rule.chunk import delta_rule_chunk
from longseq.kernels.launch_file import read_launches
from longseq.kernels.testing import list_variants
from longseq.kernels.triton_launch import Launch, fit_launches
from longseq.tasks import circumstances
from longseq.tasks.training.command import read_command
from longseq.tools.benchmark import kernels, models, peers, tune
from longseq.tools.benchmark import work as work_module
from longseq.tools.benchmark.gate import Gate
from longseq.tools.benchmark.measure import Outcome, Times, environment, time_in_turn
from longseq.tools.benchmark.report import find_device, make_result, to_markdown, write_result
from longseq.tools.benchmark.work import OWN, TABLE, TINY, Work, choose_work

CPU = torch.device("cpu")
DELTA = Work("delta_rule", {"B": 1, "T": 20, "H": 2, "K": 8, "V": 8}, "plain")


def run(verb: Any, name: str, *overrides: str) -> dict[str, Any]:
    with initialize_config_module("longseq.conf", version_base="1.3"):
        return verb.run(compose(f"benchmark_{name}", list(overrides)))


def wrong_delta_rule(*args: Any, **kwargs: Any) -> Any:
    o, state = delta_rule_chunk(*args, **kwargs)
    return 1.5 * o, state


@pytest.fixture
def triton_form(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces the delta rule's Triton form by a function that runs on the CPU."""

    def replace(function: Any) -> None:
        forms = (dispatch.Backend("torch", delta_rule_chunk), dispatch.Backend("triton", function))
        monkeypatch.setitem(dispatch._BACKENDS, "delta_rule", forms)

    return replace


def test_one_that_fails_does_not_end_the_others():
    def fail() -> None:
        raise RuntimeError("too\n  large")

    found = time_in_turn({"right": lambda: sum(range(1000)), "wrong": fail}, CPU, 0.001)
    assert found["wrong"] == (None, "RuntimeError: too large")
    times = found["right"].times
    assert times is not None
    assert 0 < times.low <= times.median <= times.high


def test_the_environment_is_changed_for_a_while(monkeypatch):
    monkeypatch.setenv("LONGSEQ_HELD", "before")
    monkeypatch.delenv("LONGSEQ_ABSENT", raising=False)
    with environment({"LONGSEQ_HELD": "a", "LONGSEQ_ABSENT": "b"}):
        assert (os.environ["LONGSEQ_HELD"], os.environ["LONGSEQ_ABSENT"]) == ("a", "b")
    assert os.environ["LONGSEQ_HELD"] == "before"
    assert "LONGSEQ_ABSENT" not in os.environ


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("work", TINY, ids=lambda work: work.op)
def test_the_torch_form_passes_the_gate(work, dtype):
    verdict = Gate(work, dtype, CPU).judge_backend("torch")
    assert verdict.passed, verdict.words


def test_what_is_wrong_does_not_pass(triton_form):
    gate = Gate(DELTA, torch.bfloat16, CPU)
    triton_form(wrong_delta_rule)
    for judge in (gate, Gate(DELTA, torch.bfloat16, CPU, gradients=False)):
        verdict = judge.judge_backend("triton")
        assert not verdict.passed
        assert verdict.words.startswith("WRONG: ")
    assert verdict.words.startswith("WRONG: output at ")

    def nothing(*args: Any, **kwargs: Any) -> Any:
        o, state = delta_rule_chunk(*args, **kwargs)
        return o * torch.nan, state

    triton_form(nothing)
    assert not gate.judge_backend("triton").passed

    def crash(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("no\nsuch layout")

    triton_form(crash)
    assert gate.judge_backend("triton") == (False, "fails: TypeError: no such layout")


def fla_delta_rule(q, k, v, beta, scale):
    return operations.delta_rule(q, k, v, beta, scale=scale, output_final_state=True)


def fla_gated_delta_rule(q, k, v, g, beta, scale):
    return operations.delta_rule(q, k, v, beta, g=g, scale=scale, output_final_state=True)


def fla_linear_attention(q, k, v, scale, g=None, normalize=False):
    assert not normalize
    return operations.linear_attention(q, k, v, g=g, scale=scale, output_final_state=True)


def fla_gsa(q, k, v, s, g, scale):
    return operations.slot_attention(q, k, v, g, write=s, scale=scale, output_final_state=True)


def mamba_scan(u, delta, A, B, C):
    turned = (x.transpose(1, 2) for x in (u, delta, B, C))
    u, delta, B, C = turned
    return operations.selective_scan(u, delta, A, B, C)[0].transpose(1, 2)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the peers: functions with their arguments, layouts and results."""
    functions = {
        "fla.ops.delta_rule": {"chunk_delta_rule": fla_delta_rule},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": fla_gated_delta_rule},
        "fla.ops.linear_attn": {"chunk_linear_attn": fla_linear_attention},
        "fla.ops.simple_gla": {"chunk_simple_gla": fla_linear_attention},
        "fla.ops.gla": {"chunk_gla": fla_linear_attention},
        "fla.ops.gsa": {"chunk_gsa": fla_gsa},
        "mamba_ssm.ops.selective_scan_interface": {"selective_scan_fn": mamba_scan},
    }
    for name, held in functions.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            package = ".".join(parts[:depth])
            monkeypatch.setitem(sys.modules, package, sys.modules.get(package) or types.ModuleType(package))
        for function, value in held.items():
            setattr(sys.modules[name], function, value)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: object())


def names_of(work: Work) -> set[str]:
    """The tensors that its operation takes."""
    return set(work.make(torch.float32, CPU).arguments)


@pytest.mark.parametrize(("op", "variant"), [*peers._FLA, ("selective_scan", "plain")])
def test_peers_are_given_our_call_in_their_layout(installed, op, variant):
    work = next(work for work in TINY if work.op == op)._replace(variant=variant)
    same = [peer for peer in peers.find_peers(work, names_of(work), torch.device("cuda")) if peer.same]
    assert len(same) == 1
    verdict = Gate(work, torch.float32, CPU).judge_peer(same[0])
    assert verdict.passed, verdict.words


def test_peers_of_the_same_place_are_called_another_operation(installed):
    longhorn = next(work for work in TINY if work.op == "longhorn_scan")
    for work, name in ((DELTA, "sdpa"), (longhorn, "mamba")):
        found = peers.find_peers(work, names_of(work), torch.device("cuda"))
        (peer,) = (peer for peer in found if peer.name == name)
        assert Gate(work, torch.float32, CPU).judge_peer(peer) == (True, "another operation")
        leaves = peer.prepare(work.make(torch.float32, CPU).sequences)
        assert peer.restore(peer.run(leaves, {})).shape[0] == 1


def test_only_installed_peers_take_part():
    assert [peer.name for peer in peers.find_peers(DELTA, names_of(DELTA), CPU)] == ["sdpa"]
    wide = DELTA._replace(sizes={**DELTA.sizes, "K": 512})
    assert peers.find_peers(wide, names_of(wide), CPU) == []


@pytest.mark.parametrize("script", ["/opt/bin/longseq", "/opt/lib/longseq/__main__.py"])
def test_a_result_has_the_command_without_folders_of_this_machine(monkeypatch, script):
    monkeypatch.setattr(sys, "argv", [script, "benchmark", "kernels", "ops=[delta_rule]", "output=/home/me/rows.json"])
    assert make_result("rows", [], CPU)["command"] == "longseq benchmark kernels 'ops=[delta_rule]'"


def test_kernels_are_compared_then_timed(tmp_path, triton_form):
    triton_form(wrong_delta_rule)
    output = tmp_path / "deep" / "rows.json"
    result = run(
        kernels, "kernels", "seconds=0.001", f"output={output}", "ops=[delta_rule,short_convolution]", "device=cpu"
    )
    rows = {(row["op"], row["implementation"]): row for row in result["rows"]}
    assert set(rows) == {
        *(("delta_rule", name) for name in ("torch", "triton", "sdpa")),
        *(("short_convolution", name) for name in ("torch", "triton")),
    }
    assert rows["delta_rule", "torch"]["forward_of_torch"] == 1
    assert rows["delta_rule", "sdpa"]["both_of_torch"] > 0
    for refused, word in (("delta_rule", "WRONG: "), ("short_convolution", "refused: it runs on a CUDA device")):
        row = rows[refused, "triton"]
        assert row["verdict"].startswith(word)
        assert set(row) == {"op", "variant", "shape", "dtype", "implementation", "verdict", "measured"}
    assert json.loads(output.read_text()) == result
    table = output.with_suffix(".md").read_text()
    assert "times are relative to the torch form's" in table
    assert table.count("\n| ") == 1 + len(rows)


@pytest.mark.parametrize("op", ["delta_rule", "longhorn_scan"])
def test_what_a_first_call_imports_is_known_before(op, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # kernels are interpreted or not from their import on
    modules = kernels.find_modules(op)
    assert any(hasattr(importlib.import_module(name), f"{op}_triton") for name in modules)


@pytest.mark.slow
def test_every_operation_tells_its_sizes():
    for item in (*work_module.TABLE, *work_module.OWN, *work_module.TINY):
        assert set(work_module.list_sizes(item.op, item.variant)) == set(item.sizes), item.op
    for op in work_module.list_measured():
        for variant in list_variants(op):
            letters = work_module.list_sizes(op, variant)
            shape = {"op": op, "variant": variant, **dict.fromkeys(letters, 2)}
            assert work_module.choose_work([shape], None, torch.device("cpu"))[0].sizes == dict.fromkeys(letters, 2)
            with pytest.raises(ValueError, match=rf"Q=3, which {op} does not have: its sizes are B, T"):
                work_module.choose_work([{**shape, "Q": 3}], None, torch.device("cpu"))
            for letter in letters:
                lacking = {name: value for name, value in shape.items() if name != letter}
                with pytest.raises(ValueError, match=rf"a call of {op} without {letter}: give its sizes B, T"):
                    work_module.choose_work([lacking], None, torch.device("cpu"))


def test_shapes_can_be_chosen(tmp_path):
    shape = "{op: linear_attention, variant: head_gated, B: 1, T: 9, H: 1, K: 4, V: 2, options: {chunk_size: 4}}"
    result = run(
        kernels, "kernels", f"shapes=[{shape}]", "dtypes=[float32]", "backends=[torch,reference]", "peers=false",
        "seconds=0.001", "device=cpu", f"output={tmp_path}/rows.json",
    )  # fmt: skip
    assert [row["implementation"] for row in result["rows"]] == ["torch", "reference"]
    assert {row["shape"] for row in result["rows"]} == {"B=1 T=9 H=1 K=4 V=2 chunk_size=4"}
    assert all(row["verdict"].startswith("right: ") for row in result["rows"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["ops=[delta]"], "ops=['delta'] must be a list of at least 1, each entry one of convolved_features, "),
        (["shapes=[{op: delta}]"], "op='delta', which is no operation"),
        (["shapes=[{op: delta_rule, variant: fast, B: 1, T: 1}]"], "variant='fast': delta_rule takes one of plain"),
        (["shapes=[{op: delta_rule, B: 1, T: 0}]"], "T=0: sizes are whole numbers above 0 of B, T, H, K, V"),
        (["shapes=[{op: delta_rule, B: 1, H: 2, K: 4, V: 4}]"], "delta_rule without T: give its sizes B, T, H, K, V"),
        (["shapes=delta_rule"], "shapes=delta_rule must be a list of at least 1, each entry a dictionary or null"),
        (["shapes=[delta_rule]"], "shapes=['delta_rule'] must be a list of at least 1, each entry a dictionary"),
        (["ops=delta_rule"], "ops=delta_rule must be a list"),
        (["ops=[]"], "ops=[] must be a list of at least 1"),
        (["backends=[]"], "backends=[] must be a list of at least 1"),
        (["backends=[foo]"], "backends has 'foo': choose from reference, torch, triton"),
        (
            [
                "ops=[cumulative_softmax]",
                "shapes=[{op: cumulative_softmax, B: 1, T: 2, H: 1, M: 2}]",
                "backends=[triton]",
            ],
            "backends has 'triton': choose from reference, torch",
        ),
        (["dtypes=[int8]"], "each entry one of bfloat16, float16, float32"),
        (["dtypes=[float32,float64]"], "each entry one of bfloat16, float16, float32"),
        (["dtypes=[]"], "dtypes=[] must be a list of at least 1"),
        (["dtypes=null"], "dtypes=null must be a list"),
        (["device=abacus"], "device=abacus is unknown"),
        (["device=meta"], "device=meta is unknown"),
        (["device=cuda"], "device=cuda: torch sees no GPU here"),
        (["output=rows.txt"], "output=rows.txt is no name for JSON rows"),
    ],
)
def test_mistakes_are_one_line(overrides, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        run(kernels, "kernels", "ops=[short_convolution]", "seconds=0.001", *overrides)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir()), "nothing is measured"


def test_a_gpu_that_is_not_there_is_a_mistake(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="device=cuda:2: torch sees 2 GPUs here, counted from 0"):
        find_device("cuda:2")


@pytest.mark.slow
@pytest.mark.parametrize("work", [*TABLE, *OWN], ids=lambda work: f"{work.op}-{work.shape}")
def test_the_table_holds_calls_that_work(work):
    """At a few tokens of one row: the operation has the sizes and options, and peers accept its tensors."""
    few = work._replace(sizes={**work.sizes, "B": 1, "T": 3})
    keys = kernels.KernelsKeys(
        ops=None,
        shapes=None,
        dtypes=["float32"],
        backends=["torch"],
        peers=True,
        device="cpu",
        seconds=0.001,
        output="",
    )
    rows = {row["implementation"]: row for row in kernels.measure_work(few, torch.float32, CPU, keys, set())}
    assert rows.pop("torch")["verdict"].startswith("right: ")
    attention = {"delta_rule", "linear_attention", "orthogonal_recurrence", "variational_linear_attention"}
    assert {name: row["verdict"] for name, row in rows.items()} == (
        {"sdpa": "another operation"} if work.op in attention else {}
    )


def test_a_shape_that_fails_is_a_row_and_does_not_end_the_others(tmp_path, monkeypatch):
    def fail(work: Work, *_: object) -> None:
        raise RuntimeError(f"{work.op} has\nno peers")

    monkeypatch.setattr(kernels, "find_peers", fail)
    result = run(kernels, "kernels", "ops=[delta_rule,short_convolution]", "device=cpu", f"output={tmp_path}/rows.json")
    assert [(row["implementation"], row["verdict"]) for row in result["rows"]] == [
        ("all", f"not measured: RuntimeError: {op} has no peers") for op in ("delta_rule", "short_convolution")
    ]


def test_tables_are_chosen_by_device_and_operation():
    assert choose_work(None, None, CPU) == list(TINY)
    assert choose_work(None, ["delta_rule"], torch.device("cuda")) == [
        work for work in (*TABLE, *OWN) if work.op == "delta_rule"
    ]
    with pytest.raises(ValueError, match="no shape of ops"):
        choose_work(None, ["cumulative_softmax"], CPU)


SMALL_MODELS = (
    "image.models=[longseq_vit_tiny_patch16_224]",
    "image.mixers=[attention,deltanet]",
    "image.peers=[deit_tiny_patch16_224]",
    "image.sizes=[[32,2]]",
    "text.d_model=16",
    "text.depth=1",
    "text.vocabulary=20",
    "text.mixers=[attention,deltanet]",
    "text.lengths=[8]",
    "text.document_lengths=[3]",
    "text.step_tokens=16",
    "text.decoding_batches=[2]",
    "text.prompt=4",
    "text.new_tokens=2",
    "seconds=0.001",
    "device=cpu",
)


@pytest.mark.slow
def test_models_are_measured_beside_attention(tmp_path):
    result = run(models, "models", *SMALL_MODELS, f"output={tmp_path}/rows.json")
    image, text, packed, decoding = (
        [row for row in result["rows"] if row["task"] == task] for task in ("image", "text", "packed", "decoding")
    )
    assert [row.get("mixer") for row in image] == ["attention", "deltanet", None]
    assert image[0]["training_images_of_first"] == image[0]["inference_images_of_first"] == 1
    assert image[2]["inference_images_of_first"] > 0
    ours = [(row["mixer"], row["tokens"], row["batch"]) for row in text if "mixer" in row]  # Llama's row has no mixer
    assert ours == [("attention", 8, 2), ("deltanet", 8, 2)]
    assert len(text) == len(ours) + (importlib.util.find_spec("transformers") is not None)
    assert all(row["training_tokens_of_first"] > 0 for row in (*text, *packed))
    assert [(row["mixer"], row["document_tokens"], row["batch"]) for row in packed] == [
        ("attention", 3, 1),
        ("deltanet", 3, 1),
    ]
    assert all(row["decoding_tokens_of_first"] > 0 for row in decoding)
    assert all(row["generation_tokens_of_first"] > 0 for row in decoding if "mixer" in row)
    assert not any(name.endswith("_s") for row in result["rows"] for name in row), "speeds of a CPU"
    assert models.ON_CPU in (tmp_path / "rows.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["attention", "deltanet+window_attention"])
def test_generation_is_measured_for_as_long_as_it_takes(mixer, graphs_on_cpu, monkeypatch, tmp_path):
    """The room of a cache is used again and again; the tokens that are timed are not all of the first ones."""
    monkeypatch.setattr(models, "can_record", lambda model: True)
    small = [
        *SMALL_MODELS,
        "image=null",
        "text.lengths=[]",
        "text.document_lengths=[]",
        "text.peers=[]",
        "text.depth=2",
        "seconds=0.2",
    ]
    result = run(models, "models", *small, f"text.mixers=[{mixer}]", f"output={tmp_path}/rows.json")
    (row,) = result["rows"]
    assert "remark" not in row
    assert row["decoding_graph_tokens_of_first"] == row["generation_tokens_of_first"] == 1


@pytest.mark.slow
def test_a_model_that_fails_is_a_row_with_a_remark(tmp_path):
    result = run(models, "models", *SMALL_MODELS, "text=null", "image.sizes=[[8,2]]", f"output={tmp_path}/rows.json")
    assert all("Error" in row["remark"] for row in result["rows"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["image=null", "text=null"], "leaves nothing to measure"),
        (["image.mixers=[longhron]"], "did you mean 'longhorn'?"),
        (["image.peers=[diet_tiny]"], "diet_tiny, which timm does not know"),
        (
            ["image.sizes=[224]"],
            "image.sizes=[224] must be a list, each entry a list of 2: a whole number, a whole number of at least 1",
        ),
        (["image=null", "text.peers=[opt]"], "text.peers=['opt'] must be a list, each entry llama"),
        (["text.mixers=[longhron]"], "did you mean 'longhorn'?"),
        (["text=null", "image.sizes=[]"], "image.sizes=[] leaves nothing to measure"),
        (["image.sizes=[]"], "image.sizes=[] leaves nothing to measure: name something, or give image=null"),
        (["image=null", "text.mixers=[]", "text.peers=[]"], "text.mixers=[] text.peers=[] leaves nothing to measure"),
        (
            ["image=null", "text.lengths=[]", "text.document_lengths=[]", "text.decoding_batches=[]"],
            "text.lengths=[] text.document_lengths=[] text.decoding_batches=[] leaves nothing",
        ),
        (["image.mixers=deltanet"], "image.mixers=deltanet must be a list"),
        (["text.lengths=8"], "text.lengths=8 must be a list, each entry a whole number of at least 1"),
        (["text.sampling.top_p=2"], "top_p=2.0 must be above 0 and at most 1"),
        (["compile=fast"], "compile=fast must be one of default, "),
        (["backend=foo"], "backend=foo must be one of auto, reference, torch, triton"),
        (["device=cuda"], "device=cuda: torch sees no GPU here"),
    ],
)
def test_mistakes_about_models_are_one_line(overrides, words, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        run(models, "models", *SMALL_MODELS, *overrides, f"output={tmp_path}/rows.json")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir()), "nothing is measured"


@pytest.mark.slow
def test_a_result_says_what_was_not_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "measure_training", lambda *_: {})
    monkeypatch.setattr(models, "measure_decoding", lambda *_: {})
    for mode, said in (("null", False), ("default", True)):
        result = run(
            models, "models", *SMALL_MODELS, "image=null", f"compile={mode}", f"output={tmp_path}/{mode}.json"
        )  # fmt: skip
        assert any("decoding ran eager" in note for note in result["notes"]) == said


def examples_of(verb: str) -> list[list[str]]:
    """The overrides of the examples that the help of `longseq benchmark VERB` has."""
    with initialize_config_module("longseq.conf", version_base="1.3"):
        text = compose(f"benchmark_{verb}", return_hydra_config=True).hydra.help.template
    lines = [line.strip() for line in text.splitlines() if line.startswith(f"  longseq benchmark {verb}")]
    return [shlex.split(line)[3:] for line in lines]


@pytest.mark.parametrize("overrides", examples_of("models"), ids=" ".join)
def test_the_examples_of_the_help_are_models_that_exist(overrides):
    with initialize_config_module("longseq.conf", version_base="1.3"):
        config = compose("benchmark_models", overrides)
    plan = models.plan(read_command(models.ModelsKeys, config), CPU)
    for name in {row["mixer"] for row, _ in plan if "mixer" in row}:
        mixers.create(name, 64, backend=config.backend)


class FakeTrial:
    """A call whose time is a function of its launch, infinite where it is wrong."""

    def __init__(self, module: Any, shape: str, cost: Any) -> None:
        self.module, self.cost = module, cost
        self.work, self.dtype = types.SimpleNamespace(op="op", variant="plain", shape=shape), torch.bfloat16
        self.gradients = True
        self.places = tune.find_places({"delta_rule": module}, lambda: module.LAUNCHES[2, 64]["read"])
        self.best = self.judge()[0]

    def judge(self) -> tuple[float, str]:
        found = self.cost(self.module.LAUNCHES[2, 64]["read"])
        return found, "WRONG" if found == float("inf") else "right"


@pytest.fixture
def module() -> Any:
    start = {"read": Launch(64, 0, 4, 1), "other": Launch(64, 64, 4, 1)}
    return types.SimpleNamespace(LAUNCHES={(2, 64): start, (4, 64): dict(start)})


@pytest.fixture
def tables(module) -> Any:
    return {"delta_rule": module}


def test_a_call_names_the_launches_that_it_takes(module):
    other = types.SimpleNamespace(LAUNCHES={(4, 16): {"read": Launch(16, 0, 1, 1)}})
    table, tables = module.LAUNCHES, {"delta_rule": module, "other": other}

    def call() -> None:
        assert module.LAUNCHES[4, 64]["other"] == Launch(64, 64, 4, 1)
        assert other.LAUNCHES[4, 16]["read"].warps == 1
        assert "read" in module.LAUNCHES[4, 64]

    read = [tune.Place("delta_rule", 4, 64, "other"), tune.Place("other", 4, 16, "read")]
    assert tune.find_places(tables, call) == read
    assert module.LAUNCHES is table


def test_candidates_change_one_constant():
    found = set(tune.propose("read", Launch(64, 0, 4, 1)))
    assert found == {
        *(Launch(block, 0, 4, 1) for block in (32, 128)),
        *(Launch(64, 0, warps, 1) for warps in (2, 8)),
        Launch(64, 0, 4, 2),
        Launch(64, 0, 4, 1, 128),
    }


def test_walks_that_the_scans_cannot_take_are_no_candidates(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = tune.find_tables()["diagonal_scan"]
    forward, backward = module.Walk(8, 2, 16, 255), module.Walk(4, 4, 4, 255)
    assert {walk.tokens for walk in tune.propose("forward", forward)} == {8, 16}  # CHECKPOINT is the most
    assert {walk.tokens for walk in tune.propose("backward", backward)} == {2, 4}  # STACKED
    assert {walk.vector for walk in tune.propose("forward_crowded", forward)} == {1, 2, 4}
    assert {walk.entries for walk in tune.propose("backward_crowded", backward)} == {2, 4, 8}
    assert {walk.registers for walk in tune.propose("summarize", forward)} == {168, 255}


def test_the_fastest_right_launch_wins(module, tables):
    def cost(launch: Launch) -> float:
        if launch.warps > 8:
            return float("inf")  # would be the fastest, were it right
        return 10 / launch.warps + launch.block / 64 + launch.stages

    steps = list(tune.tune(tables, [FakeTrial(module, "shape", cost)]))
    assert module.LAUNCHES[2, 64] == {"read": Launch(16, 0, 8, 1), "other": Launch(64, 64, 4, 1)}
    assert module.LAUNCHES[4, 64]["read"] == Launch(64, 0, 4, 1)
    place, launch, _ = steps[-1]
    assert (place, launch) == (tune.Place("delta_rule", 2, 64, "read"), Launch(16, 0, 8, 1))
    wrong = [row for _, _, row in steps if row["launch"]["warps"] == 16]
    assert [(row["kept"], row["milliseconds"]) for row in wrong] == [(False, {"plain shape": None})] * len(wrong)
    assert wrong


def test_shapes_that_share_a_launch_decide_together(module, tables):
    trials = [
        FakeTrial(module, "gains", lambda launch: 0.8 if launch.warps == 8 else 1.0),
        FakeTrial(module, "loses", lambda launch: 2.0 if launch.warps == 8 else 1.0),
    ]
    list(tune.tune(tables, trials))
    assert module.LAUNCHES[2, 64]["read"].warps == 4


def test_only_the_kernels_that_are_asked_for_change(module, tables):
    trial = FakeTrial(module, "shape", lambda launch: 1 / launch.warps)
    assert list(tune.tune(tables, [trial], ["other"])) == []
    assert list(tune.tune(tables, [trial], None, trial.places)) == []


def fake_trials(monkeypatch: pytest.MonkeyPatch, module: Any, cost: Any) -> None:
    """`tune.run` on a table of ours, with calls whose times depend on their launch."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(tune, "find_tables", lambda: {"delta_rule": module})
    monkeypatch.setattr(tune, "tables_of", lambda op, tables: ["delta_rule"])
    monkeypatch.setattr(tune, "Trial", lambda tables, work, *rest: FakeTrial(module, work.shape, cost))


def row_of(**changes: Any) -> dict[str, Any]:
    place = {"op": "delta_rule", "capability": None, "bytes": 2, "width": 64, "kernel": "read"}
    return {**place, "launch": Launch(16, 0, 4, 1)._asdict(), "run": 0, **changes}


def test_winners_are_written_beside_those_of_other_gpus_and_kernels(monkeypatch, tmp_path, module):
    fake_trials(monkeypatch, module, lambda launch: 8 / launch.warps)
    monkeypatch.setattr(tune, "CHOICES", {"warps": (2, 4, 8)})
    file = tmp_path / "launches.json"
    kept = [row_of(capability=[8, 0]), row_of(kernel="other"), row_of(width=64, bytes=4)]
    gone = [row_of(), row_of(kernel="rest"), row_of(op="sum"), row_of(kernel="other", launch={"tokens": 4})]
    held = {"launches": [*gone, *kept], "rows": [*kept, *gone], "runs": [{"gpu": "A100"}]}
    file.write_text(json.dumps(held))
    run(tune, "tune", "device=cpu", f"output={file}")
    found = read_launches(file, "file", "remedy")
    best = row_of(launch=Launch(64, 0, 8, 1)._asdict(), run=1)
    assert found["launches"] == [*kept, best]
    assert found["rows"][: len(kept)] == kept
    assert [(row["kept"], row["run"]) for row in found["rows"][len(kept) :]] == [(True, 1), (False, 1), (True, 1)]
    assert [name for name in found["runs"] if "emulated" in name["gpu"]] == found["runs"][1:]
    assert {"gpu", "processor", "commit", "command", "versions", "date"} <= set(found["runs"][1])

    file.write_text(json.dumps({"capability": [8, 0], "launches": [], "rows": []}))
    with pytest.raises(ValueError, match=f"^output={file} holds no runs: name another file, or delete this one$"):
        run(tune, "tune", "device=cpu", f"output={file}")


@pytest.fixture
def real_tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tables of the emulated kernels, which change for one test; every call is faster than the one before."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = tune.find_tables()
    for module in found.values():
        monkeypatch.setattr(module, "LAUNCHES", copy.deepcopy(module.LAUNCHES))
    times = (1 / 2**count for count in itertools.count())

    def time_in_turn(runs: Any, *_: Any) -> Any:
        return {name: Outcome(Times(*[next(times)] * 3)) for name in runs}

    monkeypatch.setattr(tune, "time_in_turn", time_in_turn)
    return found


HEADS = {"B": 1, "T": 3, "H": 1, "K": 8}


@pytest.mark.parametrize(
    ("op", "sizes", "dtype", "gradients", "places"),
    [
        (
            "delta_rule", {**HEADS, "V": 8}, torch.float32, True,
            {
                ("delta_rule", 4, 64): {
                    "prepare", "advance", "read_out", "retreat", "differentiate_scores", "differentiate_inputs"
                }
            },
        ),
        ("delta_rule", {**HEADS, "V": 8}, torch.bfloat16, False, {("delta_rule", 2, 64): {"read_through"}}),
        (
            "slot_attention", {**HEADS, "V": 8, "M": 4}, torch.float32, False,
            {
                ("linear_attention", 4, 64): {
                    "decay_channels", "score", "score_by_level", "walk", "read", "read_channels",
                    "read_channels_by_level",
                }
            },
        ),
        (
            "variational_linear_attention", {**HEADS, "V": 8}, torch.float32, False,
            {
                ("delta_rule", 4, 64): {"prepare", "advance", "read_out"},
                ("recursive_least_squares", 4, 64): {"advance", "read_out"},
            },
        ),
        ("longhorn_pair", {"B": 1, "T": 3, "D": 4, "N": 3, "R": 2, "W": 2}, torch.float32, True,
         {("diagonal_scan", 4, 4): {"forward", "backward"}}),
        ("selective_scan", {"B": 1, "T": 3, "D": 4, "N": 16}, torch.bfloat16, False,
         {("diagonal_scan", 4, 16): {"forward_selective"}}),
    ],
)  # fmt: skip
def test_trials_of_the_real_kernels_find_their_places(real_tables, op, sizes, dtype, gradients, places):
    """Interpreted: the launches that a shape's calls read, from any table."""
    trial = tune.Trial(real_tables, Work(op, sizes, list_variants(op)[0]), dtype, CPU, 0.001, gradients)
    found: dict[Any, set[str]] = {}
    for place in trial.places:
        found.setdefault(place[:3], set()).add(place.kernel)
    assert found == places
    assert {place.op for place in trial.places} == set(tune.tables_of(op, real_tables))
    assert trial.best < float("inf")


@pytest.mark.slow
def test_operations_are_tuned_in_the_tables_that_their_calls_read(monkeypatch, tmp_path, real_tables):
    """Interpreted: each run extends the file, and the kernels use its launches."""
    monkeypatch.setattr(tune, "CHOICES", {"tokens": (2, 4, 8), "warps": (4, 8)})
    file = tmp_path / "deep" / "launches.json"
    fresh = {name: copy.deepcopy(module.LAUNCHES) for name, module in real_tables.items()}
    for op, sizes, *keys in (
        ("slot_attention", "H: 1, K: 4, V: 4, M: 4", "kernels=[score]"),
        ("longhorn_scan", "D: 2, N: 2", "kernels=[backward]"),
        ("variational_linear_attention", "H: 1, K: 4, V: 4", "kernels=[read_out]", "gradients=false"),
    ):
        shape = f"shapes=[{{op: {op}, B: 1, T: 2, {sizes}}}]"
        run(tune, "tune", f"op={op}", shape, "device=cpu", "dtypes=[float32]", f"output={file}", *keys)
    held = read_launches(file, "file", "remedy")
    assert [(row["op"], row["width"], row["kernel"], row["capability"], row["run"]) for row in held["launches"]] == [
        ("linear_attention", 64, "score", None, 0),
        ("diagonal_scan", 2, "backward", None, 1),
        ("delta_rule", 64, "read_out", None, 2),
        ("recursive_least_squares", 64, "read_out", None, 2),
    ]
    assert [row["launch"].get("tokens", row["launch"].get("warps")) for row in held["launches"]] == [8, 2, 8, 4]
    assert {row["gradients"] for row in held["rows"] if row["run"] == 2} == {False}
    assert all(row["kept"] for row in held["rows"])
    assert len(held["runs"]) == 3

    monkeypatch.setenv("LONGSEQ_LAUNCHES", str(file))
    for name, table in fresh.items():
        fit_launches(name, table)
        assert table == real_tables[name].LAUNCHES


@pytest.mark.slow
def test_a_candidate_that_crashes_is_left_out_when_the_run_is_repeated(monkeypatch, tmp_path, real_tables):
    """Interpreted, except the crash."""
    monkeypatch.setattr(tune, "CHOICES", {"warps": (2, 4, 8)})
    file, tried = tmp_path / "launches.json", []
    command = (
        "op=slot_attention",
        "shapes=[{op: slot_attention, B: 1, T: 2, H: 1, K: 4, V: 4, M: 4}]",
        "kernels=[score]",
    )
    entry, judge = real_tables["linear_attention"].LAUNCHES[4, 64], tune.Trial.judge

    def crash(self):
        tried.append(entry["score"].warps)
        if entry["score"].warps == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")
        return judge(self)

    monkeypatch.setattr(tune.Trial, "judge", crash)
    with pytest.raises(ValueError, match=r"the GPU failed at .*'warps': 2.*illegal memory access") as caught:
        run(tune, "tune", "device=cpu", "dtypes=[float32]", f"output={file}", *command)
    assert "\n" not in str(caught.value)
    assert tried == [2]
    assert json.loads(file.read_text())["trying"]["launch"]["warps"] == 2

    for _ in range(2):  # what a third run reads is what the second one wrote
        tried.clear()
        entry["score"] = entry["score"]._replace(warps=4)
        held = run(tune, "tune", "device=cpu", "dtypes=[float32]", f"output={file}", *command)
        assert tried == [8]
        crashes = [row["launch"]["warps"] for row in held["rows"] if row.get("verdicts") == [tune.CRASHED]]
        assert crashes == [2]
        assert "trying" not in json.loads(file.read_text())


def test_a_call_that_fails_cannot_be_tuned(triton_form, monkeypatch):
    triton_form(delta_rule_chunk)
    monkeypatch.setattr(tune, "find_places", lambda tables, call: [])
    monkeypatch.setattr(tune, "time_in_turn", lambda runs, device, seconds: {"call": Outcome(None, "OutOfMemoryError")})
    with pytest.raises(ValueError, match="K=8 V=8 cannot be tuned, as it fails at full size"):
        tune.Trial({}, DELTA, torch.float32, CPU, 0.001, True)


@pytest.mark.slow
def test_tuning_needs_a_gpu_and_a_table(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="device=cpu runs no Triton kernels"):
        run(tune, "tune", "device=cpu", f"output={tmp_path}/l.json")
    with pytest.raises(ValueError, match=r"^op=sum must be one of convolved_features, "):
        run(tune, "tune", "device=cpu", "op=sum", f"output={tmp_path}/l.json")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=r"^op=short_convolution launches no kernels of a table: choose one of delta_"):
        run(tune, "tune", "device=cpu", "op=short_convolution", f"output={tmp_path}/l.json")
    with pytest.raises(ValueError, match="gradients=some must be true or false"):
        run(tune, "tune", "device=cpu", "gradients=some", f"output={tmp_path}/l.json")
    with pytest.raises(ValueError, match="each entry one of bfloat16, float16, float32"):
        run(tune, "tune", "device=cpu", "dtypes=[float64]", f"output={tmp_path}/l.json")
    with pytest.raises(ValueError, match=r"dtypes=\[\] must be a list of at least 1"):
        run(tune, "tune", "device=cpu", "dtypes=[]", f"output={tmp_path}/l.json")
    with pytest.raises(ValueError, match=r"kernels has 'nonsense': choose from advance, advance_wide, "):
        run(tune, "tune", "device=cpu", "kernels=[prepare,nonsense]", f"output={tmp_path}/l.json")
    with pytest.raises(ValueError, match=r"kernels has 'prepare': choose from backward, backward_crowded, forward, "):
        run(tune, "tune", "device=cpu", "op=longhorn_pair", "kernels=[prepare]", f"output={tmp_path}/l.json")
    with pytest.raises(ValueError, match=r"shapes=delta_rule must be a list"):
        run(tune, "tune", "device=cpu", "shapes=delta_rule", f"output={tmp_path}/l.json")
    monkeypatch.setenv("LONGSEQ_LAUNCHES", str(tmp_path / "l.json"))
    with pytest.raises(ValueError, match="replaces the tables that tuning starts from: unset it"):
        run(tune, "tune", "device=cpu", f"output={tmp_path}/l.json")
    assert not list(tmp_path.iterdir()), "nothing is measured"


def test_an_operation_without_a_shape_is_told_how_to_give_one(monkeypatch):
    monkeypatch.setattr(work_module, "TABLE", ())
    monkeypatch.setattr(work_module, "OWN", ())
    words = "name some in shapes=[...], such as shapes=[{op: recursive_least_squares, B: 1, T: 40, H: 2, K: 16}]"
    with pytest.raises(ValueError, match=re.escape(words)):
        tune.choose_shapes("recursive_least_squares", None, torch.device("cuda"))
    shape = {"op": "recursive_least_squares", "B": 1, "T": 2, "H": 1, "K": 4}
    assert len(tune.choose_shapes("recursive_least_squares", [shape], torch.device("cuda"))) == 1


def test_kernels_that_no_shape_launches_leave_no_file(monkeypatch, tmp_path, module):
    fake_trials(monkeypatch, module, lambda launch: 1.0)
    with pytest.raises(ValueError, match=r"kernels=\['other'\]: no shape that was tried launches any of them"):
        run(tune, "tune", "device=cpu", "kernels=[other]", f"output={tmp_path}/l.json")
    assert not (tmp_path / "l.json").exists()


def test_the_page_of_kernels_and_help_name_the_operations_that_can_be_tuned(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # kernels are interpreted or not from their import on
    named = ", ".join(tune.list_tuned(tune.find_tables()))
    with initialize_config_module("longseq.conf", version_base="1.3"):
        text = compose("benchmark_tune", return_hydra_config=True).hydra.help.template
    kernels = (Path(__file__).parents[2] / "docs" / "pages" / "kernels.md").read_text()
    for page in (text, kernels):
        assert named in " ".join(page.replace("`", "").split())


def test_results_are_tables_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(circumstances.COMMIT_VARIABLE, "0123abc 2026-01-02T03:04:05+00:00")
    rows = [{"op": "a", "forward_ms": 0.5, "quantiles": [1, 2]}, {"op": "b|c", "right": True}]
    result = make_result("Speed", rows, CPU, ["one note"])
    table = to_markdown(result)
    assert "| op | forward ms | right |" in table
    assert "| a | 0.5 |  |" in table
    assert "| b\\|c |  | yes |" in table
    assert "- one note" in table
    file = write_result(result, str(tmp_path / "rows.json"))
    kept = json.loads(file.read_text())["rows"]
    assert [{key: value for key, value in row.items() if key != "measured"} for row in kept] == rows
    for row in kept:
        assert row["measured"]["processor"]
        assert row["measured"]["commit"] == "0123abc 2026-01-02T03:04:05+00:00"
        assert {"torch", "python"} <= set(row["measured"]["versions"])


def test_a_cell_of_seeds_has_their_mean_their_spread_and_each_value():
    result = make_result(
        "Accuracy", [{"mixer": "a", "top1": {"0": 0.9, "1": 0.8}}, {"mixer": "b", "top1": {"0": 1.0}}], CPU
    )
    table = to_markdown(result)
    assert "| a | 0.850 ± 0.071 (0.9, 0.8) |" in table
    assert "| b | 1.0 |" in table


def test_rows_of_several_machines_say_which_is_whose(monkeypatch):
    result = make_result("Speed", [{"op": "a"}], CPU)
    monkeypatch.setenv("GIT_COMMIT", "abcdef0 2026-01-01T00:00:00+00:00")
    result["rows"] += make_result("Speed", [{"op": "b"}], CPU)["rows"]
    table = to_markdown(result)
    assert "| a | a |" in table
    assert "| b | b |" in table
    assert table.count("- Measured ") == 2
    assert "commit abcdef0;" in table


def test_the_commit_is_this_ones_and_never_that_of_a_project_around_an_installed_package(tmp_path, monkeypatch):
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(circumstances, "__file__", str(tmp_path / "circumstances.py"))
    assert circumstances.find_commit() is None


@pytest.mark.slow
def test_files_measures_each_part_of_training_from_them(tmp_path, monkeypatch):
    from longseq.tools.benchmark import files

    monkeypatch.setattr(files, "COPIES", 400)
    small = ["device=cpu", "pictures=20", "picture_size=[24,32]", "img_size=16", "batch=4", "num_workers=0"]
    small += ["models=[longseq_vit_tiny_patch16_224]", "mixers=[attention]", "seconds=0.02", "repeats=[3]"]
    result = run(files, "files", *small, "decodes=[cpu]", f"output={tmp_path}/f.json")
    parts = [(row["part"], row.get("decode")) for row in result["rows"]]
    assert parts == [("step", None), *((part, "cpu") for part in ("decode", "augment", "loader", "whole"))]
    assert all(row["images_per_s"] > 0 for row in result["rows"])
    (whole,) = [row for row in result["rows"] if row["part"] == "whole"]
    whole_speed, step_speed = whole["images_per_s"], whole["step_per_s"]  # rounded, which is much of a slow machine's
    assert (whole_speed - 0.5) / (step_speed + 0.5) - 1e-3 <= whole["of_step"]
    assert whole["of_step"] <= (whole_speed + 0.5) / (step_speed - 0.5) + 1e-3
    assert "32 x 24" in (tmp_path / "f.md").read_text()
    late = run(files, "files", *small, "budget=0.001", f"output={tmp_path}/g.json")
    assert {row["failure"] for row in late["rows"]} == {"no time left in the budget"}
