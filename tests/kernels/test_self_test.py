"""The self-test of Triton kernels: what it refuses, what it remembers, and what it does not affect."""

from __future__ import annotations

import ast
import itertools
import json
import warnings

import pytest
import torch
from kernel_inputs import list_variants, make_inputs, takes
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import CompilationError

from longseq import kernels
from longseq.kernels import dispatch, explain, list_ops, self_test
from longseq.kernels.operation import prepare_kernels
from longseq.kernels.short_convolution.chunk import short_convolution_chunk
from longseq.kernels.short_convolution.reference import short_convolution_step_torch

OP = "short_convolution"
SOURCE = "tl.dot(a, b)"
CPU = torch.device("cpu")
TRITON_OPS = [op for op in list_ops() if any(backend.name == "triton" for backend in dispatch.backends(op))]


def wrong_output(*args, **kwargs):
    y, state = short_convolution_chunk(*args, **kwargs)
    return 1.1 * y, state


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.1 * grad


def wrong_gradient(x, weight, *args, **kwargs):
    return short_convolution_chunk(x, WrongGradient.apply(weight), *args, **kwargs)


def nan_state(*args, **kwargs):
    y, state = short_convolution_chunk(*args, **kwargs)
    return y, state * torch.nan


def does_not_compile(*args, **kwargs):
    raise CompilationError(SOURCE, ast.parse(SOURCE).body[0], "unsupported\n  layout")


def make_changing():
    runs = iter(range(1000))

    def changing(*args, **kwargs):
        y, state = short_convolution_chunk(*args, **kwargs)
        return y + 1e-6 * next(runs), state

    return changing


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """Replaces the convolution's Triton form by a function; results of earlier tests are forgotten, and go to a new
    folder.
    """
    monkeypatch.setenv(self_test.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv(self_test.SELF_TEST_VARIABLE, raising=False)
    monkeypatch.setattr(self_test, "_VERDICTS", {})
    monkeypatch.setattr(self_test, "is_tested", lambda device_type: True)
    monkeypatch.setattr(self_test, "TRIALS", {OP: self_test.Trial({"W": 4}, (self_test.Case("plain", 5),))})

    def replace(function):
        plain = dispatch.Backend("torch", short_convolution_chunk)
        monkeypatch.setitem(dispatch._BACKENDS, OP, (dispatch.Backend("triton", function), plain))

    return replace


@pytest.fixture
def tests_run(monkeypatch):
    """A list that grows with every test that runs."""
    runs, find_error = [], self_test._find_error

    def count(test):
        runs.append(test)
        return find_error(test)

    monkeypatch.setattr(self_test, "_find_error", count)
    return runs


def run(**options):
    return make_inputs(OP, tokens=6, dtype=torch.float32).run(**options)


def verdict_files(folder):
    return sorted(folder.glob("self_test/*.json"))


def test_a_right_kernel_runs_and_is_tested_once(kernel, tests_run, tmp_path):
    calls = []

    def right(*args, **kwargs):
        calls.append(args)
        return short_convolution_chunk(*args, **kwargs)

    kernel(right)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
        of_test = len(calls) - 1
        run()
    assert len(tests_run) == 1
    assert of_test == 2
    assert len(calls) == of_test + 2
    (file,) = verdict_files(tmp_path)
    found = json.loads(file.read_text())
    assert (found["op"], found["dtype"], found["widths"]) == (OP, "float32", {"W": 4})


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (wrong_output, "output of the case 'plain of 5 tokens' is off by"),
        (wrong_gradient, "gradient of weight of the case 'plain of 5 tokens' is off by"),
        (nan_state, "final_state of the case 'plain of 5 tokens' is off by nan"),
        (does_not_compile, "CompilationError: at 1:0: tl.dot(a, b) ^ unsupported layout"),
        (make_changing(), "differs from run to run"),
    ],
    ids=["output", "gradient", "nan", "compilation", "race"],
)
def test_a_wrong_kernel_is_refused_and_the_torch_form_runs(kernel, tests_run, tmp_path, function, words):
    kernel(function)
    with pytest.warns(UserWarning, match="longseq refuses the Triton kernels of short_convolution") as caught:
        actual = run()
    (message,) = [str(warning.message) for warning in caught]
    assert words in message
    torch.testing.assert_close(actual, run(backend="torch"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert words in explain(OP, sizes={"W": 4})["triton"][0]
        with pytest.raises(
            ValueError, match="backend 'triton' of short_convolution cannot run: their self-test failed"
        ):
            run(backend="triton")
    assert len(tests_run) == 1
    assert not verdict_files(tmp_path)


def test_each_precision_and_width_has_its_verdict(kernel, tests_run, tmp_path):
    kernel(short_convolution_chunk)
    for dtype in (torch.float32, torch.bfloat16):
        for width in (4, 5, 6, 8):
            assert explain(OP, dtype=dtype, sizes={"W": width})["triton"] == []
    assert [(test.dtype, test.widths["W"]) for test in tests_run] == [
        (dtype, width) for dtype in (torch.float32, torch.bfloat16) for width in (4, 6, 8)
    ]
    assert len(verdict_files(tmp_path)) == 6


def test_kernels_that_are_prepared_are_tested_after_the_calls(kernel, tests_run):
    kernel(wrong_output)
    with pytest.warns(UserWarning, match="refuses the Triton kernels of short_convolution"), prepare_kernels(CPU):
        inside, tests_inside = run(), len(tests_run)
    assert (tests_inside, len(tests_run)) == (0, 1)
    torch.testing.assert_close(run(), run(backend="torch"))
    assert not torch.equal(inside[0], run()[0])


# Gradients whose errors of 2 % the self-test cannot see: the torch form sums them in the parameter's precision, and
# three times its own error is more than 2 %. In training, parameters are float32, and then none of these remains.
COARSE = {
    ("add_norm", "centred_branch", "gradient of bias", torch.bfloat16),
    ("add_norm", "centred_branch", "gradient of weight", torch.bfloat16),
    ("longhorn_pair", "plain", "gradient of rate_offset", torch.bfloat16),
}


def answer_with(exact, plain, actual):
    """A check's stand-in for an operation: an exact form, a torch form and a kernel with known results."""

    def answer(inputs, backend):
        if backend == "triton":
            return actual
        return exact if next(iter(inputs.tensors.values())).dtype == torch.float64 else plain

    return answer


@pytest.mark.slow
@pytest.mark.parametrize("op", [*TRITON_OPS, *dispatch.list_ops("local")])
def test_kernels_that_are_wrong_by_two_percent_are_refused(op):
    generator = torch.Generator().manual_seed(0)
    unseen = set()
    for dtype in (torch.bfloat16, torch.float32):
        kinds = {}
        for case in self_test.TRIALS[op].cases:
            if case.has_gradient and not case.bounds:
                kinds.setdefault((case.variant, case.kind), case)
        for case in list(kinds.values())[:: 3 if op == "delta_rule" else 1]:  # whose variants are many
            test = self_test._Test(op, dtype, CPU, False, False, False, case.kind, self_test.TRIALS[op].widths)
            check = self_test._check_of_case(test, case)
            exact, plain = check.run("torch", dtype=torch.float64), check.run("torch")
            assert self_test._find_difference(check._replace(function=answer_with(exact, plain, plain)), CPU) is None
            for name, x in plain.items():
                if not exact[name].any() or not x.is_floating_point():
                    continue
                factors = [torch.full(x.shape, 1.02), 1 + 0.02 * torch.randn(x.shape, generator=generator)]
                if x.ndim > 3 and x.shape[1] == case.tokens:
                    factors.append(torch.ones(x.shape))
                    factors[-1][0, -64:, 1] = 1.02
                for factor in factors:
                    forms = [{name: y} for y in (exact[name], plain[name], (x * factor).to(x.dtype))]
                    if self_test._find_difference(check._replace(function=answer_with(*forms)), CPU) is None:
                        unseen.add((op, case.variant, name, dtype))
    assert unseen == {case for case in COARSE if case[0] == op}


def test_each_direction_has_its_verdict(kernel, tests_run, tmp_path):
    def wrong_backwards(*args, reverse, **kwargs):
        y, state = short_convolution_chunk(*args, reverse=reverse, **kwargs)
        return y + 1 if reverse else y, state

    kernel(wrong_backwards)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
    with pytest.warns(UserWarning, match="refuses the Triton kernels of short_convolution"):
        y, _ = run(reverse=True)
    assert torch.equal(y, run(reverse=True, backend="torch")[0])
    assert [test.reverse for test in tests_run] == [False, True]
    assert len(verdict_files(tmp_path)) == 1


def test_the_callers_modes_and_random_numbers_are_left_alone(kernel, tests_run):
    kernel(short_convolution_chunk)
    before = torch.random.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), FakeTensorMode():
        assert explain(OP)["triton"] == []
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(before, torch.random.get_rng_state())
    with torch.no_grad(), torch.device("meta"):
        assert explain(OP, dtype=torch.float16)["triton"] == []
    assert len(tests_run) == 2


def test_the_switch_turns_it_off(kernel, tests_run, monkeypatch, tmp_path):
    monkeypatch.setenv(self_test.SELF_TEST_VARIABLE, "0")
    kernel(wrong_output)
    assert explain(OP)["triton"] == []
    assert not tests_run
    assert not verdict_files(tmp_path)


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.parametrize("function", [short_convolution_chunk, wrong_output], ids=["right", "wrong"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.filterwarnings("ignore:longseq refuses")
@pytest.mark.slow
def test_torch_compile_tests_outside_of_its_graph(kernel, tests_run, function, dynamic):
    kernel(function)
    inputs = make_inputs(OP, tokens=6, dtype=torch.float32)
    assert not self_test._VERDICTS
    actual = compiled(inputs.run, dynamic=dynamic)()
    assert len(tests_run) == 1
    torch.testing.assert_close(actual, inputs.run(backend="torch"))
    assert bool(explain(OP)["triton"]) == (function is wrong_output)
    assert len(tests_run) == 1


def test_every_kernel_has_its_trial():
    for op in [*TRITON_OPS, *dispatch.list_ops("step"), *dispatch.list_ops("local")]:
        assert self_test.find_trial(op).cases
    for op, trial in self_test.TRIALS.items():
        assert set(trial.steps) <= set(list_variants(op))
        for case in trial.cases:
            assert case.variant in list_variants(op)
            assert case.tokens > 1
            assert all(takes(op, option) for option in case.options)


@pytest.mark.parametrize("right", [True, False])
def test_one_token_kernels_are_tested_too(kernel, tests_run, monkeypatch, right):
    function = short_convolution_step_torch
    if not right:

        def function(*args, **kwargs):
            y, state = short_convolution_step_torch(*args, **kwargs)
            return y, 1.1 * state

    plain = dispatch.Backend("torch", short_convolution_step_torch)
    monkeypatch.setitem(dispatch._BACKENDS, f"{OP}_step", (plain, dispatch.Backend("triton", function)))
    state, token = torch.ones(2, 3, 3), {"x": torch.ones(2, 3), "weight": torch.ones(3, 4)}
    with torch.no_grad():
        if right:
            kernels.short_convolution_step(**token, state=state, backend="triton")
        else:
            with pytest.warns(UserWarning, match="the Triton kernels of short_convolution_step"):
                assert "of the case 'plain in" in explain(f"{OP}_step", sizes={"W": 4})["triton"][0]
            with pytest.raises(ValueError, match="of short_convolution_step cannot run: their self-test failed"):
                kernels.short_convolution_step(**token, state=state, backend="triton")
    assert len(tests_run) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        *((op, {}) for op in (*TRITON_OPS, *dispatch.list_ops("step"), *dispatch.list_ops("local"))),
        ("delta_rule", {"K": 128, "V": 128}),
    ],
)
def test_the_kernels_pass_on_this_gpu(op, sizes, dtype, monkeypatch, tmp_path):
    assert_passes_on_this_gpu(op, sizes, dtype, monkeypatch, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        *(("delta_rule", {"K": width, "V": width}) for width in (48, 80)),
        *((op, {"K": 48, "V": 80}) for op in ("linear_attention", "convolved_features", "head_features")),
        *((op, {"K": 48}) for op in ("recursive_least_squares", "map_features")),
        *((op, {"K": 48, "V": 48}) for op in ("slot_attention", "variational_linear_attention")),
        ("orthogonal_recurrence", {"D": 48, "M": 48}),
    ],
)
def test_kernels_with_masked_columns_pass_on_this_gpu(op, sizes, monkeypatch, tmp_path):
    assert_passes_on_this_gpu(op, sizes, torch.bfloat16, monkeypatch, tmp_path)


def assert_passes_on_this_gpu(op, sizes, dtype, monkeypatch, tmp_path):
    monkeypatch.setenv(self_test.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv(self_test.SELF_TEST_VARIABLE, raising=False)
    monkeypatch.setattr(self_test, "_VERDICTS", {})
    trial = self_test.find_trial(op)
    kinds = {case.kind for case in trial.cases}
    ways = [(False, False)]
    if op.endswith("_step"):
        if dtype != torch.float32:
            pytest.skip("the states of one-token kernels are float32")
        kinds = {""}
    elif takes(op, "reverse"):
        ways = [(way, packed) for way in (False, True, "second_half") for packed in (False, way != "second_half")]
    for (reverse, packed), kind in itertools.product(dict.fromkeys(ways), sorted(kinds)):
        for mixed in (False, True) if trial.mixed and dtype != torch.float32 else (False,):
            options = {"sizes": sizes, "reverse": reverse, "mixed": mixed, "packed": packed, "kind": kind}
            assert self_test.failures(op, dispatch.Call(torch.device("cuda"), dtype, **options)) == []
    assert len(verdict_files(tmp_path)) >= len(kinds)


@pytest.mark.gpu
def test_a_captured_graph_is_not_broken_by_an_untested_kernel(monkeypatch, tmp_path):
    inputs = make_inputs(OP, dtype=torch.float32, device="cuda")
    inputs.run(backend="torch")
    monkeypatch.setenv(self_test.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv(self_test.SELF_TEST_VARIABLE, raising=False)
    monkeypatch.setattr(self_test, "_VERDICTS", {})
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(UserWarning, match="while a CUDA graph is captured"), torch.cuda.graph(graph):
        output, _ = inputs.run()
    graph.replay()
    torch.testing.assert_close(output, inputs.run(backend="torch")[0])
    assert explain(OP, device="cuda", sizes={"W": 4})["triton"] == []
