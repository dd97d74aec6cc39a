"""The console script `longseq`: a verb, then Hydra's overrides.

One function prints any exception: one line with its type, message and key, and exit code 2. `--traceback` shows the
rest.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from traceback import clear_frames
from typing import Any, NamedTuple

from longseq.version import installed_version


class Verb(NamedTuple):
    """A verb of the command line: the module of its `run(cfg)`, its purpose, and an example."""

    module: str
    summary: str
    example: str


VERBS = {
    "train": Verb("longseq.tasks.train", "train a model, watch it in TensorBoard, test it", "longseq train"),
    "evaluate": Verb(
        "longseq.tasks.evaluate", "measure a checkpoint on its data or other data", "longseq evaluate checkpoint=FILE"
    ),
    "predict": Verb(
        "longseq.tasks.predict", "classify images or documents", "longseq predict checkpoint=FILE input=FOLDER"
    ),
    "generate": Verb(
        "longseq.tasks.generate", "continue text with a language model", "longseq generate checkpoint=FILE prompt=TEXT"
    ),
    "prepare": Verb(
        "longseq.tasks.text.prepare", "turn text into tokens", "longseq prepare input=FOLDER output=FOLDER"
    ),
    "harness": Verb(
        "longseq.tools.harness",
        "measure a language model on tasks of lm-evaluation-harness",
        "longseq harness checkpoint=FILE tasks=[hellaswag,piqa] data.root=FOLDER",
    ),
    "convert": Verb(
        "longseq.tools.hugging_face.convert",
        "turn a model of another library into ours, or ours into theirs",
        "longseq convert source=FOLDER output=FOLDER",
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
        "write a checkpoint as ONNX, TorchScript, pt2, ExecuTorch or OpenVINO",
        "longseq export checkpoint=FILE format=onnx",
    ),
}

# Keys whose value is plain text: the program adds the quotes that Hydra's grammar needs.
_TEXTS = ("prompt", "separator")
_PATHS = (
    *("checkpoint", "input", "output", "source", "init", "resume", "include", "tokenizer"),
    *("data.root", "data.train", "data.validation", "data.test", "data.tokenizer", "hydra.run.dir"),
)
_QUOTED = re.compile(r"""'(\\.|[^'\\])*'|"(\\.|[^"\\])*\"""", re.DOTALL)  # Hydra's own spelling stays
_TRACEBACK = re.compile(r"(Original )?Traceback .*\n(  .*\n)*")  # in an error from a data worker
_TABLES = ("data.class_weights", "data.class_map")


class Printed(Exception):
    """The error of a trial, which has been printed."""


def overview() -> str:
    """The text that `longseq` prints without arguments."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items())
    examples = "\n".join(f"  {verb.example}" for verb in VERBS.values())
    return (
        "longseq trains, evaluates and exports models with recurrent mixers in place of attention.\n\n"
        f"usage: longseq VERB [group=choice] [key=value] ...\n\nverbs:\n{verbs}\n\nexamples:\n{examples}\n\n"
        "`longseq VERB --help` lists groups and keys, `longseq VERB --cfg job` prints the configuration.\n"
        "plugins=[my_module] loads a module of yours that registers mixers, tasks, data or formats.\n"
        "--traceback shows the full traceback of an error."
    )


def main() -> int:
    """Run `longseq VERB overrides...`; returns the exit code."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--traceback"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"longseq {installed_version()}")
        return 0
    forget_rank()
    try:
        _run_verb(_find_verb(arguments), arguments[1:])
    except KeyboardInterrupt:
        print("longseq: interrupted", file=sys.stderr)
        return 130
    except Printed:
        return 2
    except Exception as error:
        if "--traceback" in sys.argv:
            raise
        print(f"longseq: error: {explain(error)}", file=sys.stderr)
        return 2
    return 0


def forget_rank() -> None:
    """Remove a rank that another job left in the environment, without the number of its processes.

    Lightning would take this process, which is the only one, for a later one, and write neither metrics nor a model.
    """
    if not {"WORLD_SIZE", "SLURM_NTASKS", "JSM_NAMESPACE_SIZE"} & os.environ.keys():
        for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
            os.environ.pop(name, None)


def explain(error: BaseException) -> str:
    """An exception in one line: its type, its message, and the nearest name where it is about an unknown one."""
    from hydra.errors import MissingConfigException

    from longseq.tasks.config import nearest, unknown_key

    text = " ".join(_TRACEBACK.sub("", str(error)).split())
    cause: Any = error.__cause__ or error
    key = getattr(cause, "full_key", None)
    if isinstance(error, MissingConfigException):
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        known = list(error.options or [])
        near = nearest(name, known)
        return f"{group}={name} is unknown: " + (
            f"did you mean {near}?" if near else f"choose one of {', '.join(known)}"
        )
    if key and "not in struct" in str(cause):
        parent, _, name = str(key).rpartition(".")
        return unknown_key(name, [str(one) for one in cause.parent_node or []], parent)
    return text if type(error) is ValueError and text else f"{type(error).__name__}: {text}"


def _find_verb(arguments: list[str]) -> str:
    """The verb; `task=lm` of `longseq prepare`, its only task, is removed from the arguments."""
    verb = arguments[0]
    if verb not in VERBS:
        from longseq.tasks.config import unknown_key

        raise ValueError(unknown_key(verb, list(VERBS)))
    if verb == "prepare":
        arguments[:] = [one for one in arguments if one != "task=lm"]
    return verb


def _run_verb(verb: str, arguments: list[str]) -> None:
    """Let Hydra compose the configuration and call `run(cfg)` of the verb's module."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from longseq import plugins
    from longseq.tasks.training import runs  # noqa: F401  registers the resolver of hydra.run.dir
    from longseq.tasks.training.words import complete
    from longseq.tools.deferred_metrics import defer_torchmetrics
    from longseq.tools.groups import load_plugins
    from longseq.tools.key_help import register

    defer_torchmetrics()
    words = [quote(verb, argument) for argument in flags_first(arguments)]
    load_plugins(words)
    register()
    if verb in ("train", "describe"):
        words = complete(verb, words)
    command_line, declared = sys.argv, plugins.loaded()

    def task(cfg: Any) -> Any:
        # Lightning starts the other processes of a run with the same command line, which must contain the verb.
        sys.argv = command_line
        plugins.load(declared)  # a launcher such as submitit runs this function in another process
        try:
            plugins.check_loaded(cfg.plugins, "the configuration")  # a plug-in that only a file names is not imported
            return importlib.import_module(VERBS[verb].module).run(cfg)
        except Exception as error:
            if "--traceback" in sys.argv:
                raise
            print(f"longseq: error: {explain(error)}", file=sys.stderr)
            clear_frames(error.__traceback__)  # ends data workers; while Python exits, each would take 5 s
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise Printed from error  # a sweep goes on with its other trials
            raise SystemExit(2) from error
        finally:
            remove_empty(Path(HydraConfig.get().runtime.output_dir))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # or Hydra prints an error itself, and exits
    sys.argv = [f"{command_line[0]} {verb}", *overrides_for_hydra(verb, words)]
    try:
        hydra.main(version_base="1.3", config_path="pkg://longseq.conf", config_name=verb)(task)()
    finally:
        sys.argv = command_line


def flags_first(arguments: list[str]) -> list[str]:
    """The arguments with Hydra's flags before the overrides, as argparse needs them."""
    with_value = ("-c", "--cfg", "-i", "--info", "-p", "--package", "-cp", "-cn", "-cd", "--experimental-rerun")
    flags: list[str] = []
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        (flags if word.startswith("-") else overrides).append(word)
        if rest and (word in with_value or re.fullmatch("--config-(path|name|dir)", word)):
            flags.append(rest.pop(0))
    return [*flags, *overrides]


def remove_empty(folder: Path) -> None:
    """Remove a folder below the working folder, and those above it, as far as they are empty.

    Hydra makes the folder of a run before anything is written there.
    """
    with suppress(OSError):
        while Path.cwd() in folder.parents:
            folder.rmdir()
            folder = folder.parent


def overrides_for_hydra(verb: str, words: list[str]) -> list[str]:
    """The words of a command as Hydra takes them."""
    if verb == "convert":  # its mixer is a name and no file
        words = [re.sub("^mixer=", "mixer.name=", re.sub(r"^mixer\.options\.", "++mixer.options.", w)) for w in words]
    if verb == "train" and any(
        word.startswith(("--config-name", "-cn")) for word in words
    ):  # the config.yaml of a run: no settings of Hydra
        none = ("hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null", "hydra.run.dir=.")
        return [*words, *none, "hydra.job.name=train"]
    if verb == "train":  # the run folder is Hydra's; the trials of a sweep have folders below it
        sweeps = {"-m", "--multirun"} & {*words} or any(word.startswith("hparams_search=") for word in words)
        folder = "hydra.sweep.dir=" if sweeps else "hydra.run.dir="
        words = [re.sub("^(output|hydra.run.dir)=", folder, word) for word in words]
    return words


def quote(verb: str, word: str) -> str:
    """A word of a command, with its value in Hydra's quotes if it is a text, or a path that Hydra cannot read."""
    key, equals, value = word.partition("=")
    if not equals or value in ("", "null") or _QUOTED.fullmatch(value):
        return word
    if key in _PATHS:
        value = os.path.expanduser(value)
    is_text = key in _TEXTS or (key in (*_PATHS, *_TABLES) and not _is_grammatical(f"{key}={value}"))
    if not is_text:
        return f"{key}={value}"
    from hydra.core.override_parser.types import Quote, QuotedString

    # Of backslashes before an interpolation, OmegaConf takes every second one away.
    literal = re.sub(r"(\\*)\$\{", lambda found: f"{2 * found[1]}\\${{", value)
    return f"{key}={QuotedString(literal, Quote.single).with_quotes()}"


def _is_grammatical(word: str) -> bool:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    return True
