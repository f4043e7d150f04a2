"""The loop: the only place where steps are counted."""

import contextlib
import math
import signal
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Float

from attnorm.training import workdir as files
from attnorm.training.checkpoint import Checkpointer
from attnorm.training.config import ConfigError, TrainConfig, from_mapping
from attnorm.training.feed import Feed, batch_rows, eval_batch_rows
from attnorm.training.initial import check_source, with_models_of
from attnorm.training.mesh import ClusterError, batch_axes
from attnorm.training.metrics import Recorder, read_rows
from attnorm.training.profile import Profile
from attnorm.training.setup import Setup
from attnorm.training.state import TrainState, reset_optimizer
from attnorm.training.step import Metrics
from attnorm.training.task import Stage, Task
from attnorm.training.tasks import TASKS
from attnorm.training.throughput import Pace


class NonFiniteError(FloatingPointError):
    """A member's loss or gradient is infinite or NaN."""


def run(config: Mapping[str, Any], workdir: Path, profile_steps: tuple[int, int] | None = None) -> bool:
    """Trains what the config describes, from the newest checkpoint in the workdir if there is one.

    Rows of metrics and evaluations are on disk before the checkpoint of their step is; so a run that is killed at
    any moment continues from a checkpoint with all rows up to it, and later rows are dropped and written again.

    Args:
      config: the keys of :class:`TrainConfig`, and the task's in the section named after it.
      workdir: made where it does not exist; it must be empty, or from the same data and config, of which only the
        mesh may have changed.
      profile_steps: the first and last step of a trace that is written to the workdir.

    Returns:
      Whether the run is complete; False where Ctrl-C or SIGTERM ended it, after saving.

    Raises:
      ConfigError, WorkdirError: before anything is written; also WorkdirError and
      CheckpointError: a full disk, for example, after which the last complete checkpoint is intact.
      NonFiniteError: the state that gave a non-finite loss is never saved.
      ClusterError: another process of the run has ended. The last complete checkpoint is intact.
    """
    train_config, task = parse_config(config)
    workdir = Path(workdir)
    setup = Setup(train_config, task)
    facts = task.prepare(setup.members)
    _require_same_data(task.fingerprint)
    require_whole_parts(setup)
    if profile_steps and profile_steps[1] > setup.num_steps:
        raise ConfigError(
            f"profile_steps must be among the run's {setup.num_steps} steps, got "
            f"{profile_steps[0]}-{profile_steps[1]}"
        )
    if train_config.init_from and not any((workdir / files.CHECKPOINTS).glob("[0-9]*")):
        check_source(Path(train_config.init_from), setup.abstract_state())
    with contextlib.ExitStack() as stack:

        def claim():
            data = {"fingerprint": task.fingerprint, "facts": facts} if task.fingerprint else None
            stack.enter_context(files.claimed(workdir, config, task.outputs, data))
            if not (workdir / files.CHECKPOINTS).exists() and read_rows(workdir / files.METRICS):
                raise _lost_checkpoints(workdir)

        _on_main(claim)
        checkpointer = Checkpointer(
            workdir / files.CHECKPOINTS, train_config.keep_checkpoints, train_config.keep_period
        )
        stack.enter_context(contextlib.closing(checkpointer))
        stack.enter_context(_abandoning(checkpointer))
        profile = stack.enter_context(contextlib.closing(Profile(workdir / files.PROFILE, profile_steps)))
        try:
            return _Run(setup, facts, workdir, checkpointer, profile).finish()
        except OSError as error:
            raise files.WorkdirError(
                f"writing to {workdir} failed: {error.strerror}. What was saved is complete; the same command resumes."
            ) from error


def _lost_checkpoints(workdir: Path) -> files.WorkdirError:
    return files.WorkdirError(
        f"{workdir / files.CHECKPOINTS} holds no checkpoint, but {workdir / files.METRICS} has rows from after one. "
        f"Restore the checkpoints; or remove {workdir} or choose another --workdir to start again."
    )


def _on_main(action: Callable[[], None]) -> None:
    """Does it in the main process; an error there is one in all processes, so that none waits for it for ever."""
    error = None
    if jax.process_index() == 0:
        try:
            action()
        except (files.WorkdirError, OSError) as raised:
            error = raised
    if multihost_utils.broadcast_one_to_all(np.int32(error is not None)):
        raise error or files.WorkdirError("process 0 has stopped; its message says why")


@contextlib.contextmanager
def _abandoning(checkpointer: Checkpointer) -> Iterator[None]:
    """Ends this process where another one has ended, without waiting for it to save."""
    if jax.process_count() == 1:
        yield
        return
    try:
        yield
    except KeyboardInterrupt:
        checkpointer.abandon()
        raise
    except jax.errors.JaxRuntimeError as error:
        checkpointer.abandon()
        raise ClusterError(
            f"a computation of all {jax.process_count()} processes failed in process {jax.process_index()}: "
            f"{str(error).splitlines()[0]}\nIf another process has ended, end the rest and start all of them "
            "again: the same command resumes from the last complete checkpoint."
        ) from error


def parse_config(config: Mapping[str, Any]) -> tuple[TrainConfig, Task]:
    """The loop's part of a config, and the task made from its own section.

    Raises:
      ConfigError: a key that is unknown, missing or out of range, by name.
    """
    name = config.get("task")
    if name not in TASKS:
        raise ConfigError(f"config.task must be one of {', '.join(TASKS)}, got {name!r}")
    if name not in config:
        raise ConfigError(f"config.{name}, the section of the task, is missing")
    train_config = from_mapping(TrainConfig, {key: value for key, value in config.items() if key != name})
    task_class = TASKS[name]
    return train_config, task_class(from_mapping(task_class.Config, config[name], f"config.{name}"))


def _require_same_data(fingerprint: str) -> None:
    """An error in every process if one has other data than the first: each would train on its own."""
    found = multihost_utils.process_allgather(np.uint32(zlib.crc32(fingerprint.encode())))
    others = np.flatnonzero(found != found[0])
    if others.size:
        raise ConfigError(
            f"the data of process {', '.join(map(str, others))} differ from those of process 0: every machine needs "
            "the same files"
        )


def require_whole_parts(setup: Setup) -> None:
    """Raises a ConfigError unless the parts that gradients are accumulated over divide the batches."""
    parts = setup.config.accumulation_steps
    for stage in setup.task.stages if parts > 1 else ():
        rows = batch_rows(setup.task, stage)
        if rows % parts:
            raise ConfigError(
                f"config.accumulation_steps must divide the {rows} rows of a batch at length {stage.length}, "
                f"got {parts}"
            )


class _Run:
    def __init__(self, setup: Setup, facts: str, workdir: Path, checkpointer: Checkpointer, profile: Profile):
        self.setup = setup
        self.facts = facts
        self.config = setup.config
        self.task = setup.task
        self.members = setup.members
        self.num_steps = setup.num_steps
        self.workdir = workdir
        self.checkpointer = checkpointer
        self.profile = profile
        self.is_main = jax.process_index() == 0

    def finish(self) -> bool:
        restored_step = self.checkpointer.latest_step() or 0
        _on_main(lambda: self._require_all_rows(restored_step))
        if restored_step == self.num_steps:
            if self.is_main:
                print(
                    f"{self.workdir} is finished ({self.num_steps} steps); rewriting its report", flush=True
                )
                print(self._report(read_rows(self.workdir / files.EVALUATIONS)), flush=True)
            return True
        recorder = Recorder(self.workdir, restored_step, self.num_steps, self.is_main)
        with contextlib.closing(recorder), _interruption() as interrupted:
            abstract = self.setup.abstract_state()
            recorder.progress.print(self._facts(abstract))
            if self.facts:
                recorder.progress.print(self.facts)
            undivided = "".join(
                self._undivided(rows, "an evaluation batch") for rows in eval_batch_rows(self.task)
            )
            recorder.progress.print(f"compiling the evaluation{undivided}")
            # Before the first step: what does not fit, or is wrong, would else be known after the last.
            evaluate = self.setup.evaluate().lower(abstract).compile()
            if restored_step:
                state = self.checkpointer.restore(restored_step, like=abstract)
                recorder.progress.print(f"resuming after step {restored_step}")
                if (self.profile.first_step or math.inf) <= restored_step:
                    recorder.progress.print(f"no trace: step {self.profile.first_step} is done")
            else:
                state = self.setup.init_state()
                if self.config.init_from:
                    state = with_models_of(Path(self.config.init_from), state, self.config)
            return self._train(state, restored_step, evaluate, recorder, interrupted)

    def _train(
        self,
        state: TrainState,
        restored_step: int,
        evaluate: Callable[[TrainState], Metrics],
        recorder: Recorder,
        interrupted: Callable[[int], bool],
    ) -> bool:
        stage = unrecorded = None
        compiled_in = 0  # the last step that had to wait for a compilation
        self.pace = Pace(restored_step)
        for step in range(restored_step + 1, self.num_steps + 1):
            if stage is None or step > stage.end:
                stage = next(stage for stage in self.task.stages if step <= stage.end)
                if 0 < stage.first_step == step - 1 and self.config.optimizer.reset_optimizer:
                    state = reset_optimizer(state, self.setup.optimizer)
                train_step, compiled_in = self.setup.train_step(stage), step
                feed = Feed(self.task, stage, step - 1, self.setup.mesh)
                rows = batch_rows(self.task, stage) // self.config.accumulation_steps
                recorder.progress.print(
                    f"stage {stage.index + 1} of {len(self.task.stages)}: length {stage.length}, "
                    f"steps {step}-{stage.end}; compiling{self._undivided(rows, 'a batch')}"
                )
            with self.pace.waiting():
                batch = feed.next()
            self.profile.before(step)
            state, metrics = train_step(state, batch)
            self.profile.after(step, metrics)
            # One step behind, so that the device has its next step while this one is read.
            if unrecorded:
                self._record(*unrecorded, recorder)
            unrecorded = (step, stage, metrics, step == compiled_in)
            stops = interrupted(step)
            evaluates = self._is_evaluated(step, stage)
            saves = stops or self._is_saved(step, stage)
            if evaluates or saves:
                self._record(*unrecorded, recorder)
                unrecorded = None
            if evaluates:
                self._evaluate(step, stage, evaluate(state), recorder)
            if saves:
                recorder.sync()
                self.checkpointer.save(step, state)
            if stops and step < self.num_steps:
                self.checkpointer.wait()
                recorder.progress.print(
                    f"interrupted after step {step} of {self.num_steps}; everything is saved"
                )
                return False
        self.checkpointer.wait()
        return True

    def _is_logged(self, step: int, stage: Stage) -> bool:
        return step == stage.first_step + 1 or step % self.config.log_every == 0

    def _is_evaluated(self, step: int, stage: Stage) -> bool:
        return step == stage.end or (self.config.eval_every > 0 and step % self.config.eval_every == 0)

    def _is_saved(self, step: int, stage: Stage) -> bool:
        return step == stage.end or step % self.config.checkpoint_every == 0

    def _steps(self, is_due: Callable[[int, Stage], bool], last: int) -> list[int]:
        return [
            step
            for stage in self.task.stages
            for step in range(stage.first_step + 1, min(stage.end, last) + 1)
            if is_due(step, stage)
        ]

    def _require_all_rows(self, restored_step: int) -> None:
        if restored_step < self.num_steps:
            self._require_rows(files.METRICS, self._is_logged, restored_step)
        self._require_rows(files.EVALUATIONS, self._is_evaluated, restored_step)
        if not restored_step:
            self._require_no_checkpoint_was_lost()

    def _require_rows(self, name: str, is_due: Callable[[int, Stage], bool], restored_step: int) -> None:
        """Rows are on disk before the checkpoint is, so where one is missing, something else removed it."""
        path = self.workdir / name
        kept = {row["step"] for row in read_rows(path)}
        for step in self._steps(is_due, restored_step):
            if step not in kept:
                raise files.WorkdirError(
                    f"{path} lacks the row of step {step}, which was there when step {restored_step} was saved. "
                    "Restore the file, or choose another --workdir."
                )

    def _require_no_checkpoint_was_lost(self) -> None:
        """The second save begins when the first is complete: later rows without a checkpoint mean that one is lost."""
        rows = read_rows(self.workdir / files.METRICS) + read_rows(self.workdir / files.EVALUATIONS)
        last = max((row["step"] for row in rows), default=0)
        if len(self._steps(self._is_saved, last - 1)) > 1:
            raise _lost_checkpoints(self.workdir)

    def _record(self, step: int, stage: Stage, metrics: Metrics, compiled: bool, recorder: Recorder) -> None:
        metrics = jax.device_get(metrics)
        self._require_finite(step, metrics)
        message = None
        if self._is_logged(step, stage):
            row: dict[str, float] = {"step": step, "stage": stage.index, "length": stage.length}
            row["learning_rate"] = float(metrics["learning_rate"])
            for name in ("loss", "gradient_norm"):
                row.update(self._by_member(name, metrics[name]))
            row.update(
                self.pace.measure(
                    step,
                    len(self.members) * self.task.tokens_per_step(stage),
                    len(self.members) * self.task.flops_per_step(stage),
                )
            )
            recorder.add_metrics(row)
            message = f"length {stage.length}  loss {min(metrics['loss']):.4g} to {max(metrics['loss']):.4g}"
        if compiled:
            recorder.progress.restart_clock(step)
            self.pace.restart(step)
        recorder.progress.step(step, message)

    def _require_finite(self, step: int, metrics: Metrics) -> None:
        for name in ("loss", "gradient_norm"):
            for member, value in zip(self.members, metrics[name], strict=True):
                if not math.isfinite(value):
                    self.checkpointer.wait()
                    last = self.checkpointer.latest_step()
                    raise NonFiniteError(
                        f"{name} of {member.label} is {value} at step {step}. Last good checkpoint: "
                        f"{f'step {last}' if last else 'none'} in {self.workdir}. The same command would repeat "
                        "this; a lower config.optimizer.learning_rate or clip_norm, or a longer warm-up, in a new "
                        "workdir, may not."
                    )

    def _evaluate(self, step: int, stage: Stage, metrics: Metrics, recorder: Recorder) -> None:
        row: dict[str, float] = {"step": step, "length": stage.length, "is_end_of_stage": step == stage.end}
        for name, values in jax.device_get(metrics).items():
            row.update(self._by_member(name, values))
        recorder.add_evaluation(row)
        if self.is_main and step == stage.end:
            recorder.progress.print(self._report(recorder.evaluations))
        recorder.progress.restart_clock(step)
        self.pace.restart(step)

    def _report(self, evaluations: Sequence[Mapping[str, Any]]) -> str:
        rows = [row for row in evaluations if row["is_end_of_stage"]]
        return self.task.report(self.workdir, self.members, rows)

    def _by_member(self, name: str, values: Float[Array, "M"]) -> dict[str, float]:
        return {f"{name}/{member.label}": float(x) for member, x in zip(self.members, values, strict=True)}

    def _undivided(self, rows: int, batch: str) -> str:
        sizes = self.setup.mesh.shape
        if batch_axes(rows, self.setup.mesh) or sizes["data"] * sizes["fsdp"] == 1:
            return ""
        return (
            f"\nthe {rows} rows of {batch} are no multiple of mesh data x fsdp = "
            f"{sizes['data'] * sizes['fsdp']}: every device computes all of them"
        )

    def _facts(self, state: TrainState) -> str:
        stage = self.task.stages[0]
        num_members = len(self.members)
        num_params = sum(x.size for x in jax.tree.leaves(state.params)) // num_members
        return (
            f"{jax.device_count()} x {jax.devices()[0].device_kind} in {jax.process_count()} process(es), "
            f"mesh {dict(self.setup.mesh.shape)}; {num_members} models of {num_params:,} parameters; "
            f"{self.num_steps} steps, each of {num_members} x {self.task.tokens_per_step(stage):,} tokens and "
            f"{num_members * self.task.flops_per_step(stage) / 1e9:.3g} GFLOP"
        )


@contextlib.contextmanager
def _interruption() -> Iterator[Callable[[int], bool]]:
    """Yields a function of the step that says whether Ctrl-C or SIGTERM asked the run to save and end.

    A second Ctrl-C ends it at once.
    """
    if jax.process_count() > 1:
        # JAX agrees with the other processes on the step at which all of them stop. Ctrl-C ends this one at once.
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield multihost_utils.reached_preemption_sync_point
        finally:
            signal.signal(signal.SIGINT, previous)
        return
    requested: list[int] = []

    def request(signum, frame):
        if requested:
            raise KeyboardInterrupt
        requested.append(signum)
        print("\ninterrupted: saving after this step (once more to end at once)", file=sys.stderr, flush=True)

    handlers = {signum: signal.signal(signum, request) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda step: bool(requested)
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
