"""What timm's readers of streams cannot read: of WebDataset shards they pass over it, of others they stop at it."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from timm.data.readers import reader_wds

from longseq.tasks.data.batch import Failure
from longseq.tasks.data.labels import name_some
from longseq.tasks.image.decoding import first_line

_log = logging.getLogger(__name__)

_END = 1024  # bytes of zeros, at least, with which a tar file ends


@dataclass
class PassedOver:
    """What the reader of a process could not read: the failures since they were last taken, and how many samples."""

    failures: list[Failure] = field(default_factory=list)
    samples: int = 0

    def take(self) -> list[Failure]:
        taken, self.failures = self.failures, []
        return taken


def note_failures(reader: Any, passed: PassedOver) -> None:
    """Let timm's reader of shards note in `passed` what it cannot read; it would write a line into the log alone.

    Called in the process that reads, before its first sample. Other readers stay as they are.
    """
    module: Any = reader_wds
    if not isinstance(reader, reader_wds.ReaderWds) or reader.ds is not None:
        return
    decode, handle = module._decode, module.log_and_continue
    fatal = (TypeError, reader_wds.WdsTargetKeyError)  # errors of the configuration, at which timm stops, too

    def decode_or_note(sample: Mapping[str, Any], **options: Any) -> Any:
        try:
            return decode(sample, **options)
        except fatal:
            raise
        except Exception as error:  # what a decoder raises for damaged bytes is not one kind
            passed.samples += 1
            passed.failures.append(_failure(sample, reader.input_key.split(";"), error))
            return None

    def note(error: Exception) -> bool:
        if isinstance(error, fatal):
            raise error
        passed.failures.append(_failure_of_shard(error))
        return True

    # The reader takes both from its module when it builds its pipeline, and offers no other way to replace them.
    module._decode, module.log_and_continue = decode_or_note, note
    try:
        reader._lazy_init()
    finally:
        module._decode, module.log_and_continue = decode, handle


def _failure_of_shard(error: Exception) -> Failure:
    """Where a shard broke off. webdataset adds its path to the error, as the last argument or in the message."""
    reason, *rest = map(str, error.args or [type(error).__name__])
    reason, _, opened = reason.partition(" @ ")
    named = re.search(r"name='([^']+)'", opened)
    shard = named[1] if named else rest[-1] if rest else "a shard"
    return Failure(os.path.basename(shard), first_line(ValueError(reason)))


def leave_encoded(reader: Any) -> Callable[[Any], Any]:
    """Let a Hugging Face stream give its images as they are stored; returns the function that decodes one.

    The library decodes them within its iterator, which an image that cannot be read ends. Called once in the process
    that reads, before its first sample. Images of other readers are decoded already.
    """
    # timm's module cannot be imported where `datasets` is not installed, but whoever has such a reader has imported it.
    module: Any = sys.modules.get("timm.data.readers.reader_hfids")
    if module is not None and isinstance(reader, module.ReaderHfids):
        reader._lazy_init()
        stream: Any = reader.ds
        feature: Any = (stream.features or {}).get("image")
        if type(feature).__name__ == "Image" and feature.decode:
            reader.ds = stream.cast_column("image", type(feature)(mode=feature.mode, decode=False))
            return feature.decode_example
    return lambda image: image


def _failure(sample: Mapping[str, Any], images: Sequence[str], error: Exception) -> Failure:
    """Why a sample could not be read. A class that is absent or no number stops the run, as in folders."""
    name = f"{os.path.basename(str(sample.get('__url__', '')))}/{sample.get('__key__')}"
    endings = [key for key in sample if not key.startswith("__")]
    if not set(images) & set(endings):
        return Failure(name, f"it has no image, but {name_some(endings) or 'nothing'}")
    if isinstance(error, KeyError):
        return Failure(name, f"it has no {error.args[0]}, the number of its class", stops=True)
    label = sample.get("cls", b"0")
    text = label.decode(errors="replace") if isinstance(label, bytes) else str(label)
    try:
        int(text)
    except ValueError:
        return Failure(name, f"its cls is {text.strip()!r}, which is no number of a class", stops=True)
    return Failure(name, first_line(error))


def file_sizes(reader: Any, split: str) -> list[int]:
    """The bytes of each file of a stream; empty where they are not all here, or the reader is another one."""
    if isinstance(reader, reader_wds.ReaderWds):
        paths = _shards_of(reader)
    else:
        files = getattr(getattr(getattr(reader, "builder", None), "config", None), "data_files", None) or {}
        paths = [str(path) for path in files.get(split, [])]
    try:
        return [os.path.getsize(path) for path in paths]
    except OSError:  # of another machine
        return []


def _shards_of(reader: Any) -> list[str]:
    return [os.path.join(reader.root, name) for name in reader.split_info.filenames]


def check_shards(reader: Any, split: str, on_error: str) -> None:
    """Raise ValueError for local shards of a split that do not exist, and tell of those that are cut off."""
    local = [path for path in _shards_of(reader) if "://" not in path and not path.startswith("pipe:")]
    if absent := [path for path in local if not os.path.isfile(path)]:
        raise ValueError(f"the split {split} has shards that do not exist: {name_some(absent)}")
    tell_cut_off(local, on_error)


def tell_cut_off(archives: Sequence[str], on_error: str = "skip") -> None:
    """Warn of tar files without the end that a tar file has, and with on_error="raise" refuse them.

    Where a file is cut off between two samples, its readers find nothing wrong.
    """
    with ThreadPoolExecutor(16) as pool:
        ended = list(pool.map(_ends, archives))
    cut = [path for path, has_end in zip(archives, ended, strict=True) if not has_end]
    if not cut:
        return
    told = f"{name_some(cut)} does not end as a tar file ends: it may be cut off, and samples be missing"
    if on_error == "raise":
        raise ValueError(f"{told}; replace it, or read it as it is with data.on_error=skip")
    _log.warning(told)


def _ends(path: str) -> bool:
    """Whether a file ends with zeros as a tar file does; True for one that is compressed, or cannot be opened."""
    if not path.lower().endswith(".tar"):
        return True
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END))
            return size >= _END and not any(file.read())
    except OSError:
        return True
