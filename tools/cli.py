"""The console script `longseq`: one verb, of one word or two, then Hydra overrides."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class Verb(NamedTuple):
    """A verb of the command line: where its `run(cfg)` lives and what it is for."""

    module: str
    summary: str
    example: str


VERBS = {
    "train": Verb("longseq.tasks.train", "train a model, watch it in TensorBoard, test it", "longseq train"),
    "evaluate": Verb(
        "longseq.tasks.evaluate",
        "measure a checkpoint on its data or on other data",
        "longseq evaluate checkpoint=FILE",
    ),
    "predict": Verb(
        "longseq.tasks.predict", "classify a folder of images", "longseq predict checkpoint=FILE input=FOLDER"
    ),
    "compare": Verb(
        "longseq.tasks.compare",
        "train models side by side: table and plot",
        "longseq compare mixers=[deltanet,mamba]",
    ),
    "describe": Verb(
        "longseq.tools.describe", "parameters, FLOPs and kernels of a model", "longseq describe mixer=mamba scale=small"
    ),
    "export": Verb(
        "longseq.tools.export",
        "write a checkpoint as ONNX, TorchScript or pt2",
        "longseq export checkpoint=FILE format=onnx",
    ),
    "benchmark kernels": Verb(
        "longseq.tools.benchmark.kernels",
        "compare operations with float64, then time them and their peers",
        "longseq benchmark kernels ops=[delta_rule]",
    ),
    "benchmark models": Verb(
        "longseq.tools.benchmark.models",
        "speed and memory of image and language models beside attention",
        "longseq benchmark models image.mixers=[longhorn] text=null",
    ),
    "benchmark tune": Verb(
        "longseq.tools.benchmark.tune",
        "find the best launches of Triton kernels on this GPU",
        "longseq benchmark tune op=delta_rule",
    ),
    "benchmark compile": Verb(
        "longseq.tools.benchmark.compile",
        "compile all Triton kernels for GPUs that need not be there",
        "longseq benchmark compile ops=[delta_rule]",
    ),
}

# Former verbs, and what says the same now.
FORMER = {"probe": "longseq compare task=probe"}

TRACEBACK_VARIABLE = "LONGSEQ_TRACEBACK"


def overview() -> str:
    """Return what `longseq` alone prints."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items())
    examples = "\n".join(f"  {verb.example}" for verb in VERBS.values())
    return (
        "longseq trains, evaluates and exports models with recurrent mixers in place of attention.\n\n"
        f"usage: longseq VERB [group=choice] [key=value] ...\n\nverbs:\n{verbs}\n\nexamples:\n{examples}\n"
        "  longseq train mixer=deltanet data=cifar10 data.root=FOLDER scale=tiny\n\n"
        "plugins=[my_module] in any command loads a module of yours that registers mixers, tasks, data or formats.\n"
        "`longseq VERB --help` lists the verb's groups and keys, `longseq VERB --cfg job` prints the configuration.\n"
        f"{TRACEBACK_VARIABLE}=1 shows the full traceback of an error."
    )


def main() -> int:
    """Run `longseq VERB overrides...`; returns the exit code."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"longseq {importlib.metadata.version('longseq')}")
        return 0
    words = 2 if " ".join(arguments[:2]) in VERBS else 1
    name = " ".join(arguments[:words])
    if name in FORMER:
        return _fail(f"`longseq {name}` is `{FORMER[name]}` now, with the same keys")
    if name not in VERBS:
        return _fail(f"unknown verb {name!r}: the verbs are {', '.join(VERBS)}; `longseq` alone explains them")
    try:
        _run_verb(name, arguments[words:])
    except Exception as error:
        if not _is_users(error) or os.environ.get(TRACEBACK_VARIABLE):
            raise
        return _fail(_one_line(error))
    return 0


def _run_verb(name: str, overrides: list[str]) -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from longseq import plugins
    from longseq.tools.groups import check_choices
    from longseq.tools.plugin_options import load_plugins

    overrides = load_plugins(overrides)
    run: Callable[..., Any] = importlib.import_module(VERBS[name].module).run
    command_line = sys.argv

    def task(cfg: Any) -> Any:
        # Lightning starts the other processes of a run by repeating the command line, which must hold the verb again.
        sys.argv = command_line
        try:
            plugins.check_loaded(cfg.plugins, "the configuration")  # a file that names a plug-in imports nothing
            check_choices(cfg, HydraConfig.get().runtime)
            return run(cfg)
        except Exception as error:
            if not _is_users(error) or os.environ.get(TRACEBACK_VARIABLE):
                raise
            _fail(_one_line(error))
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise  # one bad trial does not end a sweep: Hydra goes on and fails at the end
            # Leaving here and not through Hydra keeps Hydra's own lines about a failed job out of the message.
            raise SystemExit(2) from None

    # Hydra prints several lines about an error and exits by itself unless this is set.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = [f"{command_line[0]} {name}", *overrides]
    try:
        hydra.main(version_base="1.3", config_path="pkg://longseq.conf", config_name=name.replace(" ", "_"))(task)()
    finally:
        sys.argv = command_line


def _is_users(error: BaseException) -> bool:
    """Tell a mistake in the command or the data, which one line explains, from a defect, which needs its traceback."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    return isinstance(error, (ValueError, FileNotFoundError, HydraException, OmegaConfBaseException))


def _one_line(error: BaseException) -> str:
    from hydra.errors import InstantiationException
    from omegaconf.errors import InterpolationResolutionError

    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, InterpolationResolutionError):
        error = _raised_by_resolver(error) or error
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"no such file or folder: {error.filename}"
    # Hydra ends its message about a choice that does not exist with its search path, which is ours and not the user's.
    return " ".join(str(error).split("Config search path")[0].split())


def _raised_by_resolver(error: BaseException) -> ValueError | None:
    """The user's mistake that a resolver of ours found, which OmegaConf tells with the key that it was resolving."""
    origin = error.__context__
    while origin is not None and type(origin) is not ValueError:
        origin = origin.__context__
    return origin


def _fail(message: str) -> int:
    print(f"longseq: error: {message}", file=sys.stderr)
    return 2
