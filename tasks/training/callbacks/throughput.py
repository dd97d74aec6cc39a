"""The duration of a run, its speed, waiting for data and peak memory, for loggers and in the lines that it prints."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import TrainerFn

from longseq.tasks.data.loader import count_tokens, count_units
from longseq.tasks.training.distributed import updated
from longseq.tasks.training.logger import log_metrics
from longseq.tasks.training.system import peak_memory

_log = logging.getLogger(__name__)


class RunClock(Timer):
    """Lightning's Timer, also for `trainer.max_time`, under a name of its own, so that a run may have another one."""


class Throughput(Callback):
    """Logs `throughput/UNIT_per_second` (all devices) and `throughput/data_wait_ms` (per batch).

    Each value is over a window of `log_every_n_steps` updates, and covers loading and training, not validation and
    checkpoints. `data_wait_ms` is how long the device was idle because the next batch was missing. For documents,
    windows also log `throughput/tokens_per_second`. `unit` is the unit of `longseq.tasks.data.loader.count_units`.
    `run` sums up the whole run, also before a resume, without the first window, in which workers and kernels start.

    If the module counts operations (`TrainedModule.count_flops`) and the device's peak is known, windows also log
    `throughput/mfu`: the model's operations per second, divided by the peak of the devices in the precision of the run.

    A run with a profiler (`trainer.profiler`) is not measured.
    """

    def __init__(self, unit: str = "images") -> None:
        self.unit = unit
        # Sums over batches: batches, units, tokens, seconds, and the seconds in which the device waited.
        self.run: Any = Counter()
        self._window: Any = Counter()
        self._is_first = self._measures = True
        self._clock = _FetchClock()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning reports the loading of a batch to profilers, but not to callbacks.
        owner: Any = trainer
        self._measures = isinstance(owner.profiler, PassThroughProfiler)
        if self._measures:
            owner.profiler = self._clock

    def state_dict(self) -> dict[str, Any]:
        return dict(self.run)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.run = Counter(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.device = pl_module.device

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._measures:
            return
        self._clock.end_batch()
        window = self._window
        window.update(batches=1, units=count_units(batch), tokens=count_tokens(batch))
        if not updated(trainer, batch_idx) or trainer.global_step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        window["seconds"], window["waited"] = self._clock.take()
        if trainer.world_size > 1:
            # as whole numbers: float32 would round many tokens
            sizes = torch.tensor([window["units"], window["tokens"]], device=pl_module.device)
            window["units"], window["tokens"] = trainer.strategy.reduce(sizes, reduce_op="sum").tolist()
        measured = self.rates(window)
        if trainer.loggers and (utilisation := self._utilisation(trainer, pl_module, batch)) is not None:
            measured["mfu"] = utilisation
        if (memory := peak_memory(pl_module.device)) is not None:
            measured["memory_gib"] = memory / 2**30
        found = {f"throughput/{name}": value for name, value in measured.items()}
        log_metrics(trainer.loggers, found, trainer.global_step - 1)
        if not self._is_first:
            self.run.update(window)
        self._is_first, self._window = False, Counter()

    def rates(self, window: Mapping[str, float]) -> dict[str, float]:
        """Units and, of documents, tokens per second, and the wait for data in milliseconds per batch."""
        if not window["seconds"]:
            return {}
        tokens = {"tokens_per_second": window["tokens"] / window["seconds"]} if window["tokens"] else {}
        rate = {f"{self.unit}_per_second": window["units"] / window["seconds"]}  # last, since units may be tokens
        return {**tokens, **rate, "data_wait_ms": 1000 * window["waited"] / window["batches"]}

    def _utilisation(self, trainer: Trainer, module: Any, batch: Any) -> float | None:
        peak = peak_flops(module.device, str(trainer.precision), torch.get_float32_matmul_precision())
        rate, units = self.rates(self._window).get(f"{self.unit}_per_second"), count_units(batch)
        if peak is None or rate is None or not units:
            return None
        flops = module.count_flops(batch)
        return None if flops is None else rate * flops / units / (peak * trainer.world_size)


@lru_cache
def peak_flops(device: torch.device, precision: str, matmul_precision: str) -> float | None:
    """Peak operations per second of dense matrix products, None for an unknown device.

    Lightning's table lacks the H200, whose figures are NVIDIA's. By `matmul_precision`, float32 products may be TF32.
    """
    if device.type != "cuda":
        return None
    kind = {"bf16": torch.bfloat16, "16": torch.float16}.get(precision.partition("-")[0], torch.float32)
    if torch.cuda.get_device_name(device) == "NVIDIA H200":
        if kind != torch.float32:
            return 989e12
        return 67e12 if matmul_precision == "highest" else 494e12
    flops = get_available_flops(device, kind)
    return None if flops is None else float(flops)


class _FetchClock(PassThroughProfiler):
    """Times batches, from the start of their loading; on a CUDA `device`, events in its stream give the times."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self._loading: Any = None  # the start and the end of the last loading
        self._loaded: Any = None
        self._batches: list[tuple[Any, Any, Any]] = []  # these, and the end of the batch

    def start(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self._loading = self._now()

    def stop(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self._loaded = self._now()

    def end_batch(self) -> None:
        if self._loading is not None:
            self._batches.append((self._loading, self._loaded, self._now()))

    def take(self) -> tuple[float, float]:
        """Seconds of loading and training since the last call, and of loading only. The device must be idle."""
        batches, self._batches = self._batches, []
        return sum(_seconds(start, end) for start, _, end in batches), sum(_seconds(*one[:2]) for one in batches)

    def _now(self) -> Any:
        """This moment, or on a CUDA device an event at which its stream reaches it."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def _seconds(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000


class TrainingProgress(Callback):
    """Prints a line after each epoch and each validation, and at least every `line_seconds`.

    It has losses and `metric`, the rate in `unit` (see `count_units`), peak memory and the time left.
    """

    def __init__(self, line_seconds: float = 60.0, metric: str = "val/top1", unit: str = "images") -> None:
        self.line_seconds, self.metric, self.unit = line_seconds, metric, unit
        self._printed_at = 0.0
        self._has_validated = False  # since the last line
        self._printed_update = -1
        self._epoch_began = 0.0
        self._units = 0  # in this epoch
        self._began = 0.0
        self._updates_before = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = self._printed_at = self._epoch_began = time.monotonic()  # a resumed epoch has no start
        self._updates_before = trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch_began, self._units = time.monotonic(), 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._units += count_units(batch) * trainer.world_size
        if time.monotonic() - self._printed_at >= self.line_seconds and not trainer.is_last_batch:
            self._print_line(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_validated = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if self._has_validated and not trainer.is_last_batch:
            self._print_line(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self._printed_update:  # a run may end within an epoch, after its validation
            self._print_line(trainer, pl_module)

    def _print_line(self, trainer: Trainer, module: LightningModule) -> None:
        now, last = time.monotonic(), getattr(module, "last_update", None)
        done, seconds = trainer.global_step - self._updates_before, now - self._epoch_began
        most = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else "∞"
        end = "" if last is None else f"/{last}"
        facts = [f"epoch {trainer.current_epoch + 1}/{most}", f"update {trainer.global_step}{end}"]
        names = ["train/loss", *(dict.fromkeys(["val/loss", self.metric]) if self._has_validated else ())]
        metrics = trainer.callback_metrics
        facts += [f"{name} {float(metrics[name]):.4f}" for name in names if name in metrics]
        if seconds > 0:
            facts.append(f"{self._units / seconds:.0f} {self.unit}/s")
        if (memory := peak_memory(module.device)) is not None:
            facts.append(f"{memory / 2**30:.2f} GiB")
        if last is not None and done > 0 and trainer.global_step < last:
            left = (now - self._began) / done * (last - trainer.global_step)  # at the mean pace since the start
            facts.append(f"{timedelta(seconds=round(left))} left")
        self._has_validated, self._printed_at, self._printed_update = False, now, trainer.global_step
        if trainer.is_global_zero:
            line = "  ".join(facts)
            print(line, file=sys.stderr, flush=True)
            _log.info(line)
