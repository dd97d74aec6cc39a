"""The console script `longseq`: a verb of one word or two, then Hydra overrides."""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from longseq.tools.environment import TRACEBACK, wants_traceback
from longseq.tools.terminal import is_unread, lead_nowhere, open_closed_streams, outlive_readers, require_reader
from longseq.version import installed_version


class Verb(NamedTuple):
    """A verb of the command line: the module of its `run(cfg)`, and its purpose.

    `tasks` are those that `task=NAME` may name for a verb that works for them alone.
    """

    module: str
    summary: str
    example: str
    tasks: tuple[str, ...] = ()


# A verb whose command for a task is one of its own: `longseq prepare task=image` is `longseq prepare image`.
BY_TASK = {("prepare", "image"): "prepare image"}

VERBS = {
    "train": Verb("longseq.tasks.train", "train a model, watch it in TensorBoard, test it", "longseq train"),
    "evaluate": Verb(
        "longseq.tasks.evaluate",
        "measure a checkpoint on its data or on other data",
        "longseq evaluate checkpoint=FILE",
    ),
    "predict": Verb(
        "longseq.tasks.predict", "classify images or documents", "longseq predict checkpoint=FILE input=FOLDER"
    ),
    "generate": Verb(
        "longseq.tasks.generate", "continue text with a language model", "longseq generate checkpoint=FILE prompt=TEXT"
    ),
    "prepare image": Verb(
        "longseq.tasks.image.prepare",
        "pack images into shards of a chosen size",
        "longseq prepare task=image input=FOLDER output=FOLDER size=256",
        ("image",),
    ),
    "prepare": Verb(
        "longseq.tasks.text.prepare", "turn text into tokens", "longseq prepare input=FOLDER output=FOLDER", ("lm",)
    ),
    "harness": Verb(
        "longseq.tools.harness",
        "measure a language model on the tasks of lm-evaluation-harness",
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
        "write a checkpoint as ONNX, TorchScript or pt2",
        "longseq export checkpoint=FILE format=onnx",
    ),
}

# Verbs whose key `mixer` names what a model becomes: it composes no file of the group `mixer`.
NAME_A_MIXER = ("convert",)
# The verb that trains a run for each value of its own keys, and so takes no sweep.
SWEEPS_ITSELF = "compare"
# The verb that prints as long as it works: without a file to write, it ends where a reader, as `head`, has enough.
STREAMED = "generate"
# The exit code where nobody has read all that was printed: that of programs which SIGPIPE ends.
UNREAD = 128 + 13
# Keys of each verb whose value is text as it stands.
TEXTS = {"generate": ("prompt",)}
# Keys of any verb whose value is a path: as it stands, too, where Hydra's grammar has no other meaning for it.
PATHS = (
    *("checkpoint", "input", "output", "source", "state", "save_state", "init", "resume", "root", "include"),
    *("tokenizer", "data.root", "data.train", "data.validation", "data.test", "data.tokenizer", "hydra.run.dir"),
)
# Keys whose value is a dictionary by names of classes, which may have letters that Hydra's grammar does not have.
TABLES = ("data.class_weights", "data.class_map")
# Those that are nothing but a path, also where the value looks like a number.
NAMES = ("checkpoint", "input", "output", "source", "save_state")
_NUMBER = re.compile(r"[+-]?[\d_]*\.?\d+(e[+-]?\d+)?|true|false|nan|[+-]?inf", re.IGNORECASE)
_QUOTED = re.compile(r"""'(\\.|[^'\\])*'|"(\\.|[^"\\])*\"""", re.DOTALL)
_PLAIN = re.compile(r"[\w./-]*", re.ASCII)


def overview() -> str:
    """The text that `longseq` alone prints."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items())
    examples = "\n".join(f"  {verb.example}" for verb in VERBS.values())
    return (
        "longseq trains, evaluates and exports models with recurrent mixers in place of attention.\n\n"
        f"usage: longseq VERB [group=choice] [key=value] ...\n\nverbs:\n{verbs}\n\nexamples:\n{examples}\n"
        "  longseq train mixer=deltanet data=cifar10 data.root=FOLDER scale=tiny\n\n"
        "plugins=[my_module] in any command loads a module of yours that registers mixers, tasks, data or formats.\n"
        "`longseq VERB --help` lists the verb's groups and keys, `longseq VERB --cfg job` prints the configuration.\n"
        f"{TRACEBACK}=1 shows the full traceback of an error."
    )


def _members(first: str) -> list[str]:
    """The second words of the verbs of two words that begin with `first`."""
    return [name.removeprefix(f"{first} ") for name in VERBS if name.startswith(f"{first} ")]


def _overview_of(first: str, members: list[str]) -> str:
    """The text that `longseq FIRST` alone prints, where FIRST is the first word of verbs of two words."""
    width = max(map(len, members))
    lines = "\n".join(f"  {name:<{width}}  {VERBS[f'{first} {name}'].summary}" for name in members)
    return (
        f"usage: longseq {first} {{{','.join(members)}}} [key=value] ...\n\n{lines}\n\n"
        f"`longseq {first} {members[0]} --help` lists the keys."
    )


def main() -> int:
    """Run `longseq VERB overrides...`; returns the exit code."""
    open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that the terminal does not have are escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    outlive_readers()
    code = 0
    try:
        code = _run()
    except SystemExit as leaving:  # of --help, too
        if leaving.code:
            raise
    # Another process than the first has no output of its own, and ends the run where its code is not 0.
    unread = is_unread() and os.environ.get("LOCAL_RANK", "0") == "0"
    return UNREAD if code == 0 and unread else code


def _run() -> int:
    """The command; returns the exit code."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"longseq {installed_version()}")
        return 0
    try:
        os.getcwd()
    except FileNotFoundError:
        return _fail("the working folder is not there any more: change to one that is")
    words = 2 if " ".join(arguments[:2]) in VERBS else 1
    name = " ".join(arguments[:words])
    if name not in VERBS and (members := _members(name)):
        if set(arguments[1:]) <= {"-h", "--help", "help"}:
            print(_overview_of(name, members))
            return 0
        return _fail(f"`longseq {name}` is followed by one of {', '.join(members)}, then key=value")
    if name not in VERBS:
        import difflib

        near = difflib.get_close_matches(name.lower(), VERBS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return _fail(f"unknown verb {name!r}: {hint}the verbs are {', '.join(VERBS)}; `longseq` alone explains them")
    # Imported here, so that `longseq` alone and `longseq --version` answer without Hydra.
    from longseq.tools import sweeps
    from longseq.tools.mistakes import check_arguments, explain, find_repeats, is_users
    from longseq.tools.plugin_options import load_plugins
    from longseq.tools.recorded import settings_of_record

    overrides = arguments[words:]
    for (verb, task), own in BY_TASK.items():
        if name == verb and f"task={task}" in overrides:
            name = own
    try:
        flags, overrides = check_arguments(name, quote_texts(name, overrides))
        # To a person who types: scripts add words to those that they always give.
        for remark in find_repeats(overrides) if sys.stderr.isatty() else ():
            print(f"longseq: warning: {remark}", file=sys.stderr)
        overrides = overrides_for_hydra(name, load_plugins(_take_task(name, overrides)))
        overrides = [*flags, *settings_of_record(name, flags), *sweeps.prepare(name, flags, overrides)]
        _run_verb(name, overrides)
    except KeyboardInterrupt:
        if wants_traceback():
            raise
        print("longseq: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if not is_users(error) or wants_traceback():
            raise
        return _fail(explain(error, name, overrides))
    return 0


def _take_task(name: str, overrides: list[str]) -> list[str]:
    """The overrides without `task=NAME` for a verb of few tasks. ValueError for another task."""
    tasks = VERBS[name].tasks
    if not tasks:
        return overrides
    for override in overrides:
        if override.startswith("task=") and override.removeprefix("task=") not in tasks:
            others = [task for (verb, task) in BY_TASK if verb == name]
            raise ValueError(f"{override}: longseq {name} works for task={' or task='.join([*tasks, *others])}")
    return [override for override in overrides if not override.startswith("task=")]


def _run_verb(name: str, overrides: list[str]) -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from longseq import plugins
    from longseq.tasks.training import runs  # noqa: F401  registers the resolver of hydra.run.dir
    from longseq.tools import key_help
    from longseq.tools.deferred_metrics import defer_torchmetrics
    from longseq.tools.groups import check_choices
    from longseq.tools.mistakes import explain, is_users
    from longseq.tools.sweeps import Trials

    key_help.register()
    if plugins.loaded():
        defer_torchmetrics()
    command_line, declared = sys.argv, plugins.loaded()
    trials = Trials(overrides)

    def task(cfg: Any) -> Any:
        # Lightning starts the other processes of a run with the same command line, which must contain the verb.
        sys.argv = command_line
        defer_torchmetrics()
        running = HydraConfig.get()
        trials.begin(running)
        try:
            if plugins.loaded() != declared:  # a launcher such as submitit runs this function in another process
                plugins.load(declared)
            plugins.check_loaded(cfg.plugins, "the configuration")  # a plug-in that only a file names is not imported
            check_choices(cfg, running.runtime)
            if name == STREAMED and cfg.output is None and cfg.save_state is None:
                require_reader()
            run: Callable[..., Any] = importlib.import_module(VERBS[name].module).run
            return run(cfg)
        except BrokenPipeError:
            # Who reads the output has enough of it, as `head` has. What is left of it goes nowhere.
            lead_nowhere(1)
            try:
                if name != STREAMED:
                    _fail(f"longseq {name} ended early, because nobody reads its output any more: a pipe is closed")
            except BrokenPipeError:
                lead_nowhere(2)
            raise SystemExit(UNREAD) from None
        except Exception as error:
            users = is_users(error) and not wants_traceback()
            told = explain(error, name, overrides) if users else f"{type(error).__name__}: {error}"
            line = trials.fail(error, told)
            if not users:
                raise
            if line is not None:
                (_warn if trials.survives(error) else _fail)(line)
            if trials.goes_on(error):
                return None  # one bad trial does not end a sweep, and Hydra would print more lines about it
            if trials.count:
                raise  # to a sweeper that counts failures itself
            # Exiting here and not through Hydra omits Hydra's own lines about a failed job.
            raise SystemExit(2) from None
        finally:
            # Hydra makes its folder before it is known whether anything is written there: not with output=ANOTHER.
            _remove_empty(Path(running.runtime.output_dir))

    # Otherwise Hydra prints several lines about an error and exits by itself.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = [f"{command_line[0]} {name}", *overrides]
    ended = False
    try:
        with kept_root_logger(), helps_of_text():
            hydra.main(version_base="1.3", config_path="pkg://longseq.conf", config_name=name.replace(" ", "_"))(task)()
        ended = True
    except Exception as error:
        # A sweeper also fails where it looks for the best of no trial.
        if not (trials.knows(error) or trials.has_none) or not is_users(error) or wants_traceback():
            raise
        raise SystemExit(2) from None  # its line was printed
    finally:
        sys.argv = command_line
        if trials.count:
            _remove_sweep(trials.folder)
        if (closing := trials.describe_failures()) is not None:
            # A search does without trials that diverged, as long as there is another.
            (_warn if ended and not trials.counted and not trials.has_none else _fail)(closing)
    if trials.failed and (trials.counted or trials.has_none):
        raise SystemExit(2)


@contextmanager
def kept_root_logger() -> Iterator[None]:
    """Give Python's root logger its handlers and its level back after a block in which Hydra configures logging."""
    import logging

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        for handler in root.handlers:
            if handler not in handlers:
                handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)


@contextmanager
def helps_of_text() -> Iterator[None]:
    """Let Hydra make its parser in any Python.

    The help of its --shell-completion is an object that becomes text when it is printed. From Python 3.14 on, argparse
    takes text alone there, and no command would begin.
    """
    import argparse

    add_argument = argparse.ArgumentParser.add_argument

    def add_described(self: argparse.ArgumentParser, *names: str, **options: Any) -> argparse.Action:
        if not isinstance(options.get("help", ""), str | None):
            options["help"] = "Install or uninstall shell completion"
        return add_argument(self, *names, **options)

    argparse.ArgumentParser.add_argument = add_described  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.add_argument = add_argument  # type: ignore[method-assign]


def quote_texts(name: str, arguments: list[str]) -> list[str]:
    """A verb's arguments, with texts such as prompts in Hydra's quotes, so that no character has a meaning there.

    Paths are put in quotes where Hydra could not read them: with accents, brackets, or ~, the home folder, which some
    shells leave to the program. A value that stands in quotes already is Hydra's own spelling, and stays.
    """
    quoted = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if value in ("", "null") or _QUOTED.fullmatch(value):
            quoted.append(argument)
        elif _is_text(name, key, value) or _is_table(key, value):
            quoted.append(f"{key}={_quote(value)}")
        elif key in PATHS and not _is_readable(key, value):
            quoted.append(f"{key}={_quote(os.path.expanduser(value))}")
        else:
            quoted.append(argument)
    return quoted


def _is_text(name: str, key: str, value: str) -> bool:
    """True for a text, for a name that looks like a number, and for a token such as [SEP] or </s>."""
    if key == "separator":
        return value[0] == "[" or not _is_grammatical(key, value)
    return key in TEXTS.get(name, ()) or (key in NAMES and _NUMBER.fullmatch(value) is not None)


def _is_table(key: str, value: str) -> bool:
    """True for a dictionary by names of classes that Hydra cannot read; `resolve` reads its text."""
    return key.lstrip("+") in TABLES and value[0] == "{" and not _is_grammatical(key, value)


def _is_readable(key: str, value: str) -> bool:
    """Whether Hydra can read the value; True, too, for what looks like a list or an interpolation with a mistake."""
    if _PLAIN.fullmatch(value) or value[0] in "[{'\"" or "${" in value:
        return True
    return _is_grammatical(key, value)


def _is_grammatical(key: str, value: str) -> bool:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(f"{key}={value}")
    except HydraException:
        return False
    return True


def _quote(text: str) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    # Of backslashes before an interpolation, OmegaConf takes every second one away.
    literal = re.sub(r"(\\*)\$\{", lambda found: f"{2 * found[1]}\\${{", text)
    return str(QuotedString(literal, Quote.single).with_quotes())


def overrides_for_hydra(name: str, overrides: list[str]) -> list[str]:
    """A verb's overrides as Hydra takes them."""
    return [_as_name(override) for override in overrides] if name in NAME_A_MIXER else overrides


def _as_name(override: str) -> str:
    """`mixer=NAME` as the key `mixer.name`, and options of mixers as keys that need not be there."""
    if override.startswith("mixer="):
        return f"mixer.name={override.removeprefix('mixer=')}"
    return f"++{override}" if override.startswith("mixer.options.") else override


def _remove_empty(folder: Path) -> None:
    """Remove a folder that Hydra made if nothing was written there, and the folders above it that are empty then."""
    here = Path.cwd()
    with suppress(OSError):  # another process of the run has been there
        while folder != here and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
            if here not in folder.parents:
                return
            folder = folder.parent


def _remove_sweep(folder: Path) -> None:
    """Remove the folder of a sweep if none of its trials has left anything but Hydra's note of the sweep."""
    note = folder / "multirun.yaml"
    if folder.is_dir() and [*folder.iterdir()] == [note]:
        note.unlink()
        _remove_empty(folder.absolute())


def _fail(message: str) -> int:
    print(f"longseq: error: {message}", file=sys.stderr)
    return 2


def _warn(message: str) -> None:
    print(f"longseq: warning: {message}", file=sys.stderr)
