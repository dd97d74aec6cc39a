"""Images, sequences, documents or tokens per second, the time that training waits for data, and the memory taken."""

import time
from functools import lru_cache
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.trainer.states import TrainerFn

from longseq.tasks.data.units import count_tokens, count_units
from longseq.tasks.training.callbacks.updates import updated
from longseq.tasks.training.logger import log_metrics
from longseq.tasks.training.memory import peak_memory

_KEY = "throughput"


class Throughput(Callback):
    """Logs `throughput/UNIT_per_second` (all devices) and `throughput/data_wait_ms` (per batch).

    `data_wait_ms` is how long the device had nothing to do because the next batch was not there. The processor launches
    work ahead of a GPU and then waits at the loader for a batch, while the GPU is still busy: this does not count.
    Of documents it also logs `throughput/tokens_per_second`. It logs a window of `log_every_n_steps` updates at a time;
    `unit` is that of `longseq.tasks.data.units`. The clock runs while a batch is loaded and trained on, not during
    validation and checkpoints. Each window waits for the device once. `rate` (units per second), `token_rate` and
    `data_wait_ms` are means over the whole run, including the time before a resume.

    After a validation it logs `throughput/val_UNIT_per_second` and `throughput/memory_gib` (see `peak_memory`), after
    the test `throughput/test_UNIT_per_second`. `evaluation_rate` is the rate of the last validation or test.

    If the module counts operations (`TrainedModule.count_flops`) and the device's peak is known, windows also log
    `throughput/mfu`: the model's operations per second, divided by the peak of the devices in the precision of the run.
    The operations per unit are those of the last batch of the window.
    """

    def __init__(self, unit: str = "images") -> None:
        self.unit = unit
        self._clock: _FetchClock | None = None
        self._window = _Window()
        self._run = _Window()
        self._evaluated = _Window()
        self._first_window_is_over = False
        self.evaluation_rate: float | None = None

    @property
    def rate(self) -> float | None:
        return self._run.rate

    @property
    def token_rate(self) -> float | None:
        return self._run.token_rate

    @property
    def data_wait_ms(self) -> float | None:
        return self._run.data_wait_ms

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._clock is None:
            # Lightning reports the loading of a batch to profilers, but not to callbacks.
            self._clock = _FetchClock(trainer.profiler)  # type: ignore[attr-defined]
            trainer.profiler = self._clock  # type: ignore[attr-defined]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[_KEY] = vars(self._run).copy()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Lightning calls this also before the test, for the best checkpoint.
        if trainer.state.fn == TrainerFn.FITTING:
            vars(self._run).update(checkpoint.get(_KEY, {}))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._clock is not None
        self._clock.device = pl_module.device

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._clock is not None
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._clock.end_batch()
        self._window.add(count_units(batch), count_tokens(batch) or 0)
        if not updated(trainer, batch_idx) or trainer.global_step % every:
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self._window.seconds, self._window.waited = self._clock.take()
        if trainer.world_size > 1:
            # as whole numbers: float32 would round many tokens
            sizes = torch.tensor([self._window.units, self._window.tokens], device=pl_module.device)
            self._window.units, self._window.tokens = trainer.strategy.reduce(sizes, reduce_op="sum").tolist()
        if trainer.logger is not None:
            measured = {
                f"throughput/{self.unit}_per_second": self._window.rate or 0.0,
                "throughput/data_wait_ms": self._window.data_wait_ms or 0.0,
            }
            if (tokens := self._window.token_rate) is not None:
                measured["throughput/tokens_per_second"] = tokens
            if (used := self._utilisation(trainer, pl_module, batch)) is not None:
                measured["throughput/mfu"] = used
            log_metrics(trainer.loggers, measured, trainer.global_step - 1)
        # The first window includes the start of the workers and of the kernels.
        if self._first_window_is_over:
            self._run.merge(self._window)
        self._first_window_is_over = True
        self._window = _Window()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluated = _Window()

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluated = _Window()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        assert self._clock is not None
        self._evaluated.add(count_units(batch), 0)
        self._evaluated.seconds += time.perf_counter() - self._clock.fetch_started

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.on_validation_batch_end(trainer, pl_module, outputs, batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_evaluation(trainer, pl_module, "val", trainer.global_step - 1)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_evaluation(trainer, pl_module, "test", trainer.global_step)

    def _log_evaluation(self, trainer: Trainer, module: LightningModule, stage: str, step: int) -> None:
        window = self._evaluated
        if module.device.type == "cuda":
            started = time.perf_counter()
            torch.cuda.synchronize(module.device)
            window.seconds += time.perf_counter() - started
        if trainer.world_size > 1:
            units = torch.tensor(window.units, device=module.device)
            window.units = int(trainer.strategy.reduce(units, reduce_op="sum"))
        self.evaluation_rate = window.rate
        if trainer.logger is not None and window.rate is not None:
            measured = {f"throughput/{stage}_{self.unit}_per_second": window.rate}
            if stage == "val" and (memory := peak_memory(module.device)) is not None:
                measured["throughput/memory_gib"] = memory / 2**30
            log_metrics(trainer.loggers, measured, step)

    def _utilisation(self, trainer: Trainer, module: Any, batch: Any) -> float | None:
        peak = peak_flops(module.device, str(trainer.precision), torch.get_float32_matmul_precision())
        rate, units = self._window.rate, count_units(batch)
        if peak is None or rate is None or not units:
            return None
        flops = module.count_flops(batch)
        return None if flops is None else rate * flops / units / (peak * trainer.world_size)


@lru_cache
def peak_flops(device: torch.device, precision: str, matmul_precision: str) -> float | None:
    """Operations per second of dense matrix products at best, None of a device that is not in the table.

    The table is Lightning's, to which the GPU that calls itself "NVIDIA H200" is unknown; its figures here are those of
    NVIDIA's data sheet, without sparsity. `matmul_precision` is torch's: float32 products may be TF32's.
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


class _Window:
    """Sums over consecutive batches."""

    def __init__(self) -> None:
        self.batches = 0
        self.units = 0
        self.tokens = 0
        self.seconds = 0.0
        self.waited = 0.0

    def add(self, units: int, tokens: int) -> None:
        self.batches += 1
        self.units += units
        self.tokens += tokens

    def merge(self, other: "_Window") -> None:
        self.batches += other.batches
        self.units += other.units
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.waited += other.waited

    @property
    def rate(self) -> float | None:
        return self.units / self.seconds if self.seconds > 0 else None

    @property
    def token_rate(self) -> float | None:
        """None for batches that are not of documents."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None

    @property
    def data_wait_ms(self) -> float | None:
        return 1000 * self.waited / self.batches if self.batches > 0 else None


class _FetchClock(Profiler):
    """Times batches, from the start of their loading, and forwards every call to the profiler that the user chose.

    Lightning tells when the loading of a batch starts and stops, and `end_batch` that its step is launched. On a CUDA
    `device` the times are those of events in its stream: the work of a batch, which the device does later, counts for
    this batch, also where another callback waits for it.
    """

    def __init__(self, inner: Profiler) -> None:
        super().__init__()
        self.inner = inner
        self.device = torch.device("cpu")
        self.fetch_started = time.perf_counter()
        self._loading: _Mark | None = None  # the start of the last loading
        self._loads: list[tuple[_Mark, _Mark]] = []
        self._batches: list[tuple[_Mark, _Mark]] = []

    def start(self, action_name: str) -> None:
        self.inner.start(action_name)
        if action_name.endswith(("train_dataloader_next", ".val_next", ".test_next")):
            self.fetch_started = time.perf_counter()
        if action_name.endswith("train_dataloader_next"):
            self._loading = _Mark(self.device)

    def stop(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next") and self._loading is not None:
            self._loads.append((self._loading, _Mark(self.device)))
        self.inner.stop(action_name)

    def end_batch(self) -> None:
        """The step of the batch that was loaded last is launched."""
        if self._loading is not None:
            self._batches.append((self._loading, _Mark(self.device)))

    def take(self) -> tuple[float, float]:
        """The seconds of loading and training since the last call, and those of loading alone.

        The device must be done with its work.
        """
        seconds = sum(start.until(end) for start, end in self._batches)
        waited = sum(start.until(end) for start, end in self._loads)
        self._batches.clear()
        self._loads.clear()
        return seconds, waited

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        self.inner.setup(stage, local_rank, log_dir)

    def teardown(self, stage: str | None) -> None:
        self.inner.teardown(stage)

    def summary(self) -> str:
        return self.inner.summary()

    def describe(self) -> None:
        self.inner.describe()


class _Mark:
    """A moment: of this process, or on a CUDA device when its stream comes to it."""

    def __init__(self, device: torch.device) -> None:
        self._time = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def until(self, other: "_Mark") -> float:
        """Seconds."""
        if self._event is None or other._event is None:
            return other._time - self._time
        return self._event.elapsed_time(other._event) / 1000
