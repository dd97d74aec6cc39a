"""Exported language models: they read on from their states as the model reads whole sequences, without longseq."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from export_programs import ENGINES, SUFFIXES, need_engine, need_operators
from hydra import compose, initialize_config_module
from loop_mixers import Mean
from representatives import REPRESENTATIVES
from torch import nn

from longseq import mixers
from longseq.backbones.tokens import TokenBackbone
from longseq.tasks import generate
from longseq.tasks.text.tokenizer import train_tokenizer
from longseq.tools.export import FORMATS, export_language_model, onnx_file, run, state_spec

PROGRAMS = Path(__file__).resolve().parents[2] / "docs" / "programs"
DATA: dict[str, Any] = {"vocab_size": 11, "separator": 10, "window": 64, "tokenizer": {"kind": "bytes"}}
OTHER_ROWS = r"cannot be reshaped|is invalid for input of size|expected [^\n]* to be equal|Guard failed|mismatch"
NO_ROOM = r"(?i)out of (bounds|range|data bounds)|must be within|invalid index"
PATTERNS = [*mixers.mixer_names(), "rwkv7+deltanet+rwkv7", "deltanet+attention+window_attention"]


def build(mixer: str = "deltanet", *, seed: int = 0, **options: Any) -> TokenBackbone:
    """A small model whose logits depend on earlier tokens: with fresh weights, they would hardly do."""
    torch.manual_seed(seed)
    names = mixer.split("+")
    window = {"window": 5} if names == ["window_attention"] else {"window_attention": {"window": 5}}
    choice: dict[str, Any] = {"mixer_options": window} if "window_attention" in names else {}
    choice |= {"mlp": "rwkv7"} if "rwkv7" in names else {}
    sizes = {"vocab_size": 11, "d_model": 16, "depth": len(names), "tie_embeddings": False}
    model = TokenBackbone(mixer=mixer, **{**sizes, **choice, **options})
    for module in model.modules():
        if type(module) is nn.Linear:  # not those in Hyena's filters, whose sines would multiply rounding errors
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    return model.eval()


def check_file(model: TokenBackbone, path: Path, format: str, **options: Any) -> Callable[..., Any]:
    report = export_language_model(model, path, format=format, data=DATA, batch_sizes=(1,), **options)
    assert [row.shape[0] for row in report.comparisons] == [1]
    assert all(row.passed and row.top1 == 1 for row in report.comparisons)
    return FORMATS[format].open_file(path)


# ONNX and pt2 take seconds: a scan, and delta rules with attention, whole and in windows.
# `test_a_program_without_longseq_continues_a_text_as_generate_does` has the orthogonal recurrence.
IN_ONNX = {"longhorn", PATTERNS[-1]}
# What is written as ONNX is a program of torch.export, too. These two have states that stay, and that grow.
IN_PT2 = {"hyena", "longhorn"}


@pytest.mark.slow
@pytest.mark.parametrize("mixer", PATTERNS)
def test_every_mixer_reads_token_by_token(mixer: str, tmp_path: Path, captured_once: None) -> None:
    model = build(mixer)
    tokens = torch.randint(11, (4, 12))
    with torch.no_grad():
        expected, _ = model(tokens)
        other, _ = model(tokens.flip(1))
    assert (expected[:, -1] - other[:, 0]).abs().max() > 0.01, "earlier tokens must count"
    states = state_spec(model, 80)
    for format, suffix in SUFFIXES.items():
        if mixer not in {"onnx": IN_ONNX, "pt2": IN_PT2}.get(format, PATTERNS):
            continue
        call = check_file(model, tmp_path / f"model{suffix}", format, max_length=80)
        values = [state.starts(4) for state in states]
        for index, token in enumerate(tokens.unbind(1)):
            logits, values = call(token, values)
            torch.testing.assert_close(logits, expected[:, index], atol=1e-3, rtol=0)
        assert [value.dtype for value in values] == [state.start.dtype for state in states]
        for rows, kept in ((4, 1), (1, 4)):
            with pytest.raises(Exception, match=OTHER_ROWS):
                call(tokens[:rows, 0], [state.starts(kept) for state in states])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_other_engines_read_token_by_token(engine: str, tmp_path: Path) -> None:
    model = build("longhorn+attention")
    call = check_file(model, tmp_path / f"model{need_engine(engine)}", engine, max_length=80)
    tokens, states = torch.randint(11, (40, 5)), state_spec(model, 80)  # more rows than an ExecuTorch program takes
    with torch.no_grad():
        expected, _ = model(tokens)
    values = [state.starts(40) for state in states]
    for index, token in enumerate(tokens.unbind(1)):
        logits, values = call(token, values)
        torch.testing.assert_close(logits, expected[:, index], atol=1e-3, rtol=0)
    if engine == "executorch":  # with one thread, OpenVINO loses this error
        for rows, kept in ((4, 1), (1, 4)):
            with pytest.raises(RuntimeError, match="failed with error"):
                call(tokens[:rows, 0], [state.starts(kept) for state in states])


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [*REPRESENTATIVES, PATTERNS[-1]])
def test_the_length_can_be_open(mixer: str, tmp_path: Path) -> None:
    model = build(mixer)
    tokens = torch.randint(11, (2, 140))
    with torch.no_grad():
        expected, _ = model(tokens)
    # In ONNX, tests/kernels/test_export.py exports operations so, with chunks, and
    # `test_an_onnx_file_names_its_inputs_and_outputs_and_where_it_is_from` a state that grows.
    call = check_file(model, tmp_path / "model.pt", "torchscript", dynamic_length=True, max_length=140)
    values = [state.starts(2) for state in state_spec(model, 140)]
    found = []
    for piece in tokens.split([5, 127, 2, 1, 5], dim=1):
        logits, values = call(piece, values)
        found.append(logits)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=1e-3, rtol=0)
    if mixer == "attention":  # whose cache has room for 140 tokens
        with pytest.raises(Exception, match=NO_ROOM):
            call(tokens[:, :1], values)


@pytest.mark.slow
def test_one_file_reads_the_prompt_and_another_goes_on(tmp_path: Path) -> None:
    model = build("attention+longhorn")
    for name, open_length in (("read", True), ("step", False)):
        export_language_model(
            model, tmp_path / f"{name}.pt", format="torchscript", dynamic_length=open_length, max_length=80
        )
    read, step = (torch.jit.load(str(tmp_path / f"{name}.pt")) for name in ("read", "step"))
    tokens = torch.randint(11, (2, 9))
    expected = [model(row[None])[0][0, -3:] for row in (tokens[0], tokens[1, 3:])]
    starts = [state.starts(1) for state in state_spec(model, 80)]
    prompts = [read(row[None], starts)[1] for row in (tokens[0, :6], tokens[1, 3:6])]  # of different lengths
    logits, values = read(tokens[:, 6:8], [torch.cat(rows) for rows in zip(*prompts, strict=True)])
    last, _ = step(tokens[:, 8], values)
    found = torch.cat((logits, last[:, None]), dim=1)
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "mixer", "domain", "opset", "runtime"),
    [("onnxruntime", "mamba2", "com.microsoft", 20, "1.25.1"), ("opset27", "kda+rg_lru", "", 27, "1.32.0")],
)
def test_recurrences_can_be_single_nodes(
    choice: str, mixer: str, domain: str, opset: int, runtime: str, tmp_path: Path
) -> None:
    """Decays of heads and of key channels; RG-LRU's decays of value channels stay a graph."""
    need_operators(choice)
    model = build(mixer, **({"mixer_options": {"head_dim": 8}} if mixer == "mamba2" else {}))  # heads share a key
    tokens = torch.randint(11, (3, 75))
    with torch.no_grad():
        expected, _ = model(tokens)
    path, values = tmp_path / "model.onnx", [state.starts(3) for state in state_spec(model)]
    reads = choice == "onnxruntime"
    call = check_file(model, path, "onnx", operators=choice, dynamic_length=reads)
    file = onnx.load(str(path))
    onnx.checker.check_model(file)
    assert {entry.domain: entry.version for entry in file.opset_import}[""] == opset
    facts = {entry.key: entry.value for entry in file.metadata_props}
    assert facts["onnxruntime"] == runtime
    nodes = json.loads(facts["operators"])
    assert nodes == {"LinearAttention": 1, "CausalConvWithState": 1 + mixer.count("+")}
    assert {(node.op_type, node.domain) for node in file.graph.node} >= {(name, domain) for name in nodes}
    found = []
    for piece in tokens.split([1, 70, 4], dim=1) if reads else tokens.unbind(1):
        logits, values = call(piece, values)
        found.append(logits if reads else logits.unsqueeze(1))
    torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=1e-3, rtol=0)


@pytest.mark.slow
def test_single_nodes_give_the_same_bits_for_one_token_as_for_many(tmp_path: Path) -> None:
    """Also with few heads, whose decays are softplus of one or two numbers a token."""
    need_operators("onnxruntime")
    model = build("mamba2+gated_deltanet+gla", mixer_options={"mamba2": {"head_dim": 16}})
    call = check_file(model, tmp_path / "model.onnx", "onnx", operators="onnxruntime", dynamic_length=True)
    tokens = torch.randint(11, (1, 75))
    starts = [state.starts(1) for state in state_spec(model)]
    whole, _ = call(tokens, starts)
    found, values = [], starts
    for token in tokens.split(1, dim=1):
        logits, values = call(token, values)
        found.append(logits)
    assert torch.equal(torch.cat(found, dim=1), whole)


@pytest.mark.slow
def test_a_file_reads_no_more_than_it_has_positions_for(tmp_path: Path, captured_once: None) -> None:
    """`test_the_length_can_be_open` has a cache that is full."""
    model = build("linear_attention", positions="learned", max_length=6)
    token = torch.zeros(1, dtype=torch.long)
    for format, suffix in SUFFIXES.items():
        path = tmp_path / f"model{suffix}"
        report = export_language_model(model, path, format=format, max_length=6, batch_sizes=(1,))
        assert report.metadata["max_length"] == 6
        call = FORMATS[format].open_file(path)
        values = [state.starts(1) for state in state_spec(model, 6)]
        for _ in range(6):
            _, values = call(token, values)
        with pytest.raises(Exception, match=NO_ROOM):
            call(token, values)


def test_states_tell_names_shapes_types_and_values_at_the_start() -> None:
    found = {state.name: state for state in state_spec(build("vla+lattice+attention+hyena", d_model=16), 32)}
    assert found["layers.0.memory"].shape == ("batch", 1, 16, 16)
    assert found["layers.2.key"].shape[:2] == ("batch", 32)
    assert found["layers.2.length"].dtype == "int64"
    assert found["layers.3.inputs"].shape == ("batch", "past", 1, 16)
    assert found["layers.3.inputs"].axes == {0: "batch", 1: "past"}
    model = build("vla+lattice")
    start = model.initial_state(3)
    told = [state.to_dict() for state in state_spec(model)]
    wanted = {"state.layers.0.inverse": start.layers[0].inverse, "state.layers.1.memory": start.layers[1].memory}
    for state in told:
        if state["input"] in wanted:
            row = np.frombuffer(base64.b64decode(state["start"]), state["dtype"]).reshape(1, *state["shape"][1:])
            np.testing.assert_array_equal(np.repeat(row, 3, 0), wanted.pop(state["input"]).detach().numpy())
        else:
            assert state["start"] == 0
    assert not wanted
    assert state_spec(build("abc"))[-1].to_dict()["start"] < -1e29, "a number, where all values are equal"


@pytest.mark.slow
def test_an_onnx_file_names_its_inputs_and_outputs_and_where_it_is_from(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    export_language_model(build("hyena"), path, data=DATA, dynamic_length=True, batch_sizes=(1,), opset=21)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.json"]
    file = onnx.load(str(path))
    facts = {entry.key: entry.value for entry in file.metadata_props}
    states = json.loads(facts["states"])
    assert [one.name for one in file.graph.input] == ["tokens", *(state["input"] for state in states)]
    assert [one.name for one in file.graph.output] == ["logits", *(state["output"] for state in states)]
    shapes = {
        one.name: [size.dim_param or size.dim_value for size in one.type.tensor_type.shape.dim]
        for one in file.graph.input
    }
    assert shapes == {"tokens": ["batch", "length"], **{state["input"]: state["shape"] for state in states}}
    assert json.loads(facts["tokenizer"]) == {"kind": "bytes"}
    assert (facts["vocab_size"], facts["separator"], facts["mixer"], facts["opset"]) == ("11", "10", "hyena", "21")
    assert "max_length" not in facts
    assert re.match(r"\d+\.\d+", facts["longseq_version"])


def test_weights_in_half_precision_and_tied_embeddings(tmp_path: Path) -> None:
    model = build(tie_embeddings=True, vocab_size=4000).bfloat16()
    report = export_language_model(model, tmp_path / "model.pt", format="torchscript", batch_sizes=(1,))
    assert report.size < 1.5 * 4 * sum(parameter.numel() for parameter in model.parameters())
    assert model.embedding.weight.dtype == torch.bfloat16


@pytest.mark.slow
def test_onnx_weights_beyond_a_protobuf_lie_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path = build("linear_attention"), tmp_path / "model.onnx"
    monkeypatch.setattr(onnx_file, "LARGEST_WEIGHTS", 1000)
    (tmp_path / "model.onnx.data").write_text("of an older export")
    report = export_language_model(model, path, format="onnx", data=DATA, batch_sizes=(1,), measure_latency=False)
    beside = tmp_path / "model.onnx.data"
    assert sorted(tmp_path.iterdir()) == [path, beside, tmp_path / "model.onnx.json"]
    assert report.beside == [beside]
    assert report.size == path.stat().st_size + beside.stat().st_size
    assert beside.stat().st_size >= 4 * model.head.weight.numel()
    monkeypatch.chdir("/")
    assert FORMATS["onnx"].open_file(path)(torch.tensor([1]), [state.starts(1) for state in state_spec(model)])
    report.print()
    assert f"its weights: {beside}; keep it in the folder of model.onnx" in capsys.readouterr().out


def save_model(folder: Path, mixer: str, tokenizer: Mapping[str, Any], vocab_size: int) -> TokenBackbone:
    """A model in a folder with its tokenizer."""
    model = build(mixer, vocab_size=vocab_size)
    model.text = {"tokenizer": tokenizer, "window": 64}
    model.save_pretrained(folder)
    return model


def compose_verb(verb: str, *words: str) -> Any:
    with initialize_config_module("longseq.conf", version_base="1.3"):
        return compose(verb, list(words))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixer", "tokenizer"), [("lattice", "bytes"), ("deltanet", "of special tokens, with one of its own in front")]
)
def test_a_program_without_longseq_continues_a_text_as_generate_does(
    mixer: str, tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if tokenizer == "bytes":
        kind, vocab_size = {"kind": "bytes"}, 257
    else:
        pytest.importorskip("tokenizers")
        learnt = train_tokenizer(["so it was, and so it is"] * 3, 270)
        # As that of Llama; most tokens that a model of random weights draws are special.
        kind, vocab_size = {**learnt.to_dict(), "start": "s"}, 2000
        rules = json.loads(kind["json"])
        flags = {"normalized": False, "rstrip": False, "lstrip": False, "single_word": False, "special": True}
        numbers = range(learnt.vocab_size, vocab_size)
        rules["added_tokens"] += [{"id": n, "content": f"<{n}>", **flags} for n in numbers]
        kind["json"] = json.dumps(rules)
    save_model(tmp_path / "model", mixer, kind, vocab_size)
    output = tmp_path / "step.onnx"
    words = (f"checkpoint={tmp_path / 'model'}", f"output={output}", "latency=false", "batch_sizes=[1]")
    if mixer == "deltanet":
        need_operators("onnxruntime")
        words += ("operators=onnxruntime",)
    report = run(compose_verb("export", *words, "max_length=90"))
    assert report.path == output
    assert ("operators" in report.metadata) == (mixer == "deltanet")
    prompt = "so été it"
    chosen = ("temperature=0", "max_new_tokens=40", "device=cpu")
    (wanted,) = generate.run(
        compose_verb("generate", f"checkpoint={tmp_path / 'model'}", f"prompt='{prompt}'", *chosen)
    )
    assert wanted["tokens"] > 5
    program = f"""
import sys
for name in ("torch", "longseq", "onnx"):
    sys.modules[name] = None
sys.path.insert(0, {str(PROGRAMS)!r})
from continue_text import continue_text
print(ascii(continue_text({str(output)!r}, {prompt!r}, 40)))
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == ascii(wanted["text"])


@pytest.mark.slow
@pytest.mark.usefixtures("own_mixers")
def test_a_mixer_that_loops_over_the_tokens_is_written_for_one_token(tmp_path: Path) -> None:
    """A loop of Python has the length of the traced tokens."""
    mixers.register("mean")(Mean)
    model = build("mean")
    with pytest.raises(RuntimeError, match="out of range"):
        export_language_model(model, tmp_path / "whole.pt", format="torchscript", data=DATA, dynamic_length=True)
    check_file(model, tmp_path / "step.pt", "torchscript")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step.pt", "step.pt.json"]


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"direction": "bidirectional"}, {}, "read forward"),
        ({}, {"data": {**DATA, "vocab_size": 12}}, "the text has 12 tokens and the model 11"),
        ({"mixer": "ttt", "mixer_options": {"chunk_size": 4}}, {}, "chunk_size must be 1"),
    ],
)
def test_models_and_texts_that_do_not_fit_are_refused(
    options: dict[str, Any], arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        export_language_model(build(**options), tmp_path / "model.onnx", **arguments)
