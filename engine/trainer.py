"""The story of a run, as each rank lives it: meet, prepare, build, resume, step after step, export.

What it is made of is told elsewhere: the loss in `engine.model`, the update in `engine.optimizer`, what lasts in
`engine.checkpoint`.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import isfinite, prod
from pathlib import Path

import torch
import torch.distributed as dist

from engine import checkpoint, events, multiple_choice, reference
from engine.batch import Batch
from engine.checkpoint import Facts
from engine.config import EarlyStopping, RunConfig
from engine.counting import counted
from engine.course import Course
from engine.culprits import NonFinite, in_step, in_validation
from engine.data.loader import Loader
from engine.data.prepare import Prepared
from engine.data.rows import Rows
from engine.events import CheckpointSaved, Evaluated, Event, Finished, Log, Spike, Started, Step, Stopped
from engine.export import export
from engine.loss import SUMS, means
from engine.makings import blame, ready_data, ready_loader, ready_model, ready_optimizer
from engine.mesh import Mesh, build
from engine.model import Decoder, whole_shapes
from engine.outliers import Outliers
from engine.passes import Passes
from engine.plan import budget
from engine.progress import Reporter
from engine.rates import speeds
from engine.recovery import overlook, recover
from engine.replicas import Replicas
from engine.samples import samples
from engine.saving import Saved, Saver, Stage
from engine.schedule import learning_rate
from engine.spikes import Spikes
from engine.stop import StopWish
from engine.tokenizer import Tokenizer
from engine.whereabouts import Whereabouts

Emit = Callable[[Event], None]

CHECKPOINTS = "checkpoints"
PATIENCE = timedelta(days=1)
"""How long ranks wait for one another: one tokenises for all, and their launcher ends those whose peer is gone."""


def train(run: RunConfig, run_dir: Path, emit: Emit, wish: StopWish, whereabouts: Whereabouts | None = None) -> None:
    """Do all of `run`, and emit how it goes, up to `finished` or `stopped`; tell `whereabouts` where this rank is.

    Raises Stop where it is told to stop and has nothing to save, RunFailure or another error where it can't go on.
    """
    if whereabouts is not None:
        whereabouts.go_on("meeting")
    with blame("invalid_model"):
        mesh = build(run.parallel, run.device, timeout=PATIENCE, whereabouts=whereabouts)
    report = Reporter(emit, mesh.stopwatch.whereabouts)
    tokenizer, prepared = ready_data(run, run_dir, mesh, report)
    report("model", 0, 1, "models")
    with blame("invalid_model"):
        decoder = ready_model(run, run_dir, mesh, tokenizer)
    report("model", 1, 1, "models")
    work = Work(run, run_dir, mesh, emit, wish, tokenizer, prepared, decoder)
    work.refer(report)
    work.resume()
    wish.note()
    work.announce()
    with work.saver, settled():
        done = work.all_steps()
    work.tell_outliers()
    if not done:
        emit(Stopped(step=work.step))
    else:
        wish.heed()
        step = work.choose()
        counted = partial(report, "export", unit="folders")
        export(run, run_dir, decoder, tokenizer, prepared, report=counted, warn=work.warn, step=step)
        wish.note()
        emit(Finished(step=work.step, tokens=work.tokens, stopped_early=work.ends_early, exported_step=step))
    mesh.close()


@contextmanager
def settled() -> Iterator[None]:
    """What there is already is not searched for garbage meanwhile: it stays, hundreds of thousands of objects."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True)
class Agreed:
    """What the ranks know about a step before they take it."""

    labels: int
    """Of the global batch; pairs, where its loss is a mean over these."""
    stop: bool
    """Some rank was told to stop."""
    memory_bytes: int
    """Held by the rank that holds most."""
    saves: list[Stage]
    """How far each rank is with the save under way."""


class Work:
    """The steps of a run, on one rank."""

    def __init__(
        self,
        run: RunConfig,
        run_dir: Path,
        mesh: Mesh,
        emit: Emit,
        wish: StopWish,
        tokenizer: Tokenizer,
        prepared: Prepared,
        decoder: Decoder,
    ) -> None:
        self.run, self.run_dir, self.mesh, self.emit, self.wish = run, run_dir, mesh, emit, wish
        self.tokenizer, self.prepared, self.decoder = tokenizer, prepared, decoder
        self.stopwatch = mesh.stopwatch
        training = run.training
        self.optimizer = ready_optimizer(decoder, training)
        self.passes = Passes(decoder)
        self.loader = self._loader(prepared.train)
        self.outliers = Outliers(self.loader, decoder.context, most=training.outliers)
        self.spikes = Spikes()
        self.replayed = budget.replayed_by_layer(run, decoder.shape)
        """Operations that are run again in backward, of each layer of the whole model."""
        self.step = 0
        """Steps done."""
        self.tokens = 0
        """Trained on so far, padding left out."""
        self.course = Course()
        """How the validation loss has gone."""
        self.recoveries = 0
        """Steps skipped or gone back from, since they were not finite."""
        self.saves: list[Path] = []
        """Checkpoints that the run could go back to, the newest last; on every rank the same."""
        self.replicas = Replicas(decoder, self.optimizer, mesh)
        self.saver = Saver(
            run_dir / CHECKPOINTS,
            self.optimizer,
            keep=training.keep_checkpoints,
            keep_best=training.keep_best,
            beside=self.keep_beside,
            saved=self.tell_saved,
        )
        # Adapters mean nothing without the very weights they were made on.
        self.base = checkpoint.fingerprint(run_dir / run.base) if run.lora is not None and run.base else None
        self.scale = None if run.lora is None else run.lora.scale

    @property
    def total_steps(self) -> int:
        """Those before the checkpoint that the run goes on from included."""
        return self.run.training.steps or self.loader.steps(self.run.training.epochs or 0)

    @property
    def is_at_rest(self) -> bool:
        """The validation loss has not become lower for as long as the run has patience."""
        early = self.run.training.early_stopping
        return early is not None and self.course.waited >= early.patience

    @property
    def held_out_files(self) -> list[Path]:
        """What validation rows were made of."""
        held_out = self.run.data.validation
        return [held_out] if isinstance(held_out, Path) else list(self.run.data.train)

    @property
    def ends_early(self) -> bool:
        """It is at rest, and has steps left that it does not take."""
        return self.is_at_rest and self.step < self.total_steps

    def refer(self, report: Reporter) -> None:
        """Under dpo, find how likely each answer is before anything is trained, which it is compared with."""
        if self.run.objective == "dpo":
            kept = None if self.run.resume is None else self.run_dir / self.run.resume
            reference.refer(self.run_dir, self.prepared, self.passes, self._loader, report, kept=kept)

    def resume(self) -> None:
        """Go on from the run's checkpoint, if it has one."""
        if self.run.resume is None:
            return
        self.saves = [self.run_dir / self.run.resume]
        facts = checkpoint.load(self.saves[-1], self.optimizer, base=self.base, scale=self.scale)
        self.step, self.tokens, self.wish.safe_step = facts.step, facts.tokens, facts.step
        self.course = facts.course
        self.loader.go_on(step=facts.step, rows=facts.rows)
        if facts.seed != self.run.training.seed:
            self.warn(
                f"training.seed is {self.run.training.seed}, and was {facts.seed} before the checkpoint: "
                "rows come in another order from here on"
            )

    def announce(self) -> None:
        """Emit what is about to be trained."""
        for note in self.prepared.notes:
            self.warn(note)
        train, validation = self.prepared.train, self.prepared.validation
        if len(train) < self.run.training.global_batch:
            self.warn(
                f"a step has {counted(len(train), 'row')}, as there are no more to train on, and not "
                f"training.global_batch={self.run.training.global_batch}"
            )
        trainable = count(self.optimizer.shapes)
        frozen = count(whole_shapes(self.decoder.shape)) if self.run.lora is not None else 0
        self.emit(
            Started(
                total_steps=self.total_steps,
                start_step=self.step,
                ranks=self.run.parallel.ranks,
                parameters=frozen + trainable,
                trainable_parameters=trainable,
                train_rows=len(train),
                train_tokens=train.tokens,
                validation_rows=0 if validation is None else len(validation),
                vocab_size=self.decoder.shape.vocab_size,
                device=device_name(self.mesh.device),
            )
        )

    def all_steps(self) -> bool:
        """Take the steps that are left, or those until the loss rests, validate and save in between.

        False where told to stop before.
        """
        training = self.run.training
        self.stopwatch.lap()
        while self.step < self.total_steps and not self.is_at_rest:
            self.stopwatch.whereabouts.go_on("step", step=self.step + 1)
            with self.stopwatch.span("data"):
                batches = self.loader.step(self.step)
            agreed = self.agree(batches)
            self.saver.advance(agreed.saves)
            if agreed.stop:
                self.save()
                self.await_save()
                return False
            try:
                self.take_step(batches, agreed)
            except NonFinite as trouble:
                if not recover(self, trouble):
                    continue
            if is_due(self.step, training.eval_every, self.total_steps) and not self.validate():
                continue
            is_best = training.keep_best and self.course.best_step == self.step
            if is_best or self.is_at_rest or is_due(self.step, training.checkpoint_every, self.total_steps):
                self.save()
            elif is_due(self.step, training.check_replicas_every, self.total_steps):
                self.replicas.check()
        self.await_save()
        return True

    def agree(self, batches: list[Batch]) -> Agreed:
        """Add up over all ranks what each must know before the step; one small exchange."""
        # Ranks that differ along other axes than data hold the same labels.
        counts = all(self.mesh.rank(axis) == 0 for axis in ("tensor", "context", "pipeline"))
        labels = sum(batch.num_terms for batch in batches) if counts else 0
        ranks = self.run.parallel.ranks
        facts = torch.zeros(2 + 2 * ranks, dtype=torch.int64)
        facts[0], facts[1] = labels, int(self.wish.wanted)
        # Each rank has a place of its own in these: a sum tells who said what.
        memory, saves = facts[2 : 2 + ranks], facts[2 + ranks :]
        memory[self.mesh.world_rank] = memory_bytes(self.mesh.device)
        saves[self.mesh.world_rank] = self.saver.stage
        if ranks > 1:
            # On the host, so that nobody waits for a device that is still at the last update.
            with self.mesh.exchange():
                dist.all_reduce(facts)
        labels, wishes = facts[:2].tolist()
        return Agreed(labels, wishes > 0, int(memory.max()), [Stage(stage) for stage in saves.tolist()])

    def take_step(self, batches: list[Batch], agreed: Agreed) -> None:
        """Train on one global batch."""
        number = self.step + 1
        lr = learning_rate(number, total_steps=self.total_steps, training=self.run.training)
        tally = self.outliers.tally(self.step)
        sums = self.passes.train(batches, labels=agreed.labels, tell=tally.add)
        norm = self.optimizer.sum_gradients()
        # The norm had the host wait for the device, so that the time of all before it can be read.
        spent = self.stopwatch.lap()
        summed, times = self.passes.over_ranks(torch.cat([sums, tally.sums]), list(spent.values()))
        told = means(summed[: len(sums)])
        loss = told["loss"]
        if not (isfinite(loss) and isfinite(norm)):
            # Nobody uses what was summed, and whoever looks for the rows needs its room.
            self.optimizer.drop_gradients()
            raise in_step(
                self.step,
                loss=loss,
                norm=norm,
                batches=batches,
                loader=self.loader,
                files=self.run.data.train,
                passes=self.passes,
                optimizer=self.optimizer,
            )
        self.optimizer.update(lr=lr, norm=norm)
        parts = {part: time / self.run.parallel.ranks for part, time in zip(spent, times, strict=True)}
        tokens, pairs = self.loader.tokens(self.step), self.loader.pairs(self.step)
        self.step, self.tokens = number, self.tokens + tokens
        if self.mesh.world_rank == 0:
            self.outliers.note(number, tally, summed[len(sums) :], loss=loss)
        self.emit(
            Step(
                step=number,
                **told,
                lr=lr,
                grad_norm=norm,
                tokens=self.tokens,
                memory_bytes=agreed.memory_bytes,
                **speeds(self.run, self.decoder.shape, tokens=tokens, pairs=pairs, replayed=self.replayed, parts=parts),
            )
        )
        if (usual := self.spikes.begins(loss)) is not None:
            self.emit(Spike(step=number, loss=loss, usual=usual))

    def warn(self, message: str) -> None:
        self.emit(Log(level="warning", message=message))

    def validate(self) -> bool:
        """Emit the loss over all validation rows, and how multiple-choice questions are answered, where there are any.

        False where the run went back instead.
        """
        try:
            with self.stopwatch.span("evaluation"):
                self._validate()
        except NonFinite as trouble:
            if not overlook(self, trouble):
                return False
        with self.stopwatch.span("evaluation"):
            self.tell_choices()
        return True

    def _validate(self) -> None:
        if self.prepared.validation is None:
            return
        loader = self._loader(self.prepared.validation)
        self.decoder.eval()
        sums, _ = self.passes.over_ranks(self.passes.evaluate(loader.sweep()))
        told = means(sums)
        loss = told["loss"]
        trouble = None
        if not isfinite(loss):
            trouble = in_validation(self.step, loss=loss, loader=loader, files=self.held_out_files, passes=self.passes)
        self.decoder.train()
        if trouble is not None:
            raise trouble
        early = self.run.training.early_stopping
        self.course = self.course.after(self.step, loss, min_delta=early.min_delta if early else 0.0)
        is_best = self.course.best_step == self.step
        self.emit(Evaluated(step=self.step, **told, tokens=int(sums[SUMS.index("labels")]), is_best=is_best))
        self.tell_samples(self.prepared.validation)
        if early is not None and self.ends_early:
            self.emit(Log(message=f"stopping early after step {self.step}: {at_rest(self.course, early)}"))

    def save(self) -> None:
        """Begin to save this step, unless the run already has a checkpoint of it, or will in a moment."""
        if self.step in (self.wish.safe_step, self.saver.step):
            return
        self.replicas.check()
        with self.stopwatch.span("checkpoint"):
            self.saver.begin(
                Facts(
                    self.step,
                    self.tokens,
                    self.loader.taken(self.step),
                    self.run.training.seed,
                    self.base,
                    self.scale,
                    self.course,
                )
            )

    def keep_beside(self, folder: Path) -> None:
        """Write what a run that goes on needs besides the tensors."""
        self.tokenizer.save(folder / "tokenizer")
        if self.run.objective == "dpo":
            reference.keep(self.run_dir, folder)

    def await_save(self) -> None:
        """Return once the save under way, if there is one, is published."""
        with self.stopwatch.span("checkpoint"):
            self.saver.wait()

    def tell_saved(self, saved: Saved) -> None:
        """A checkpoint is published: the run can go on from it."""
        self.wish.safe_step = saved.facts.step
        self.saves = [*self.saves, saved.path][-self.run.training.keep_checkpoints :]
        self.emit(
            CheckpointSaved(
                step=saved.facts.step,
                path=str(saved.path.relative_to(self.run_dir)),
                bytes=checkpoint.size_of(saved.path),
                seconds=saved.seconds,
                blocked_seconds=saved.blocked_seconds,
                best_step=saved.facts.course.best_step if self.run.training.keep_best else None,
            )
        )

    def tell_samples(self, rows: Rows) -> None:
        """Emit what the model says to some of the prompts in these rows, where the run asks for it."""
        if most := self.run.training.samples:
            self.decoder.eval()
            said = samples(self.decoder, self.tokenizer, rows, most=most, files=self.held_out_files)
            self.decoder.train()
            self.emit(events.Samples(step=self.step, samples=said))

    def tell_choices(self) -> None:
        """Emit how the model answers the run's multiple-choice questions, where it has any."""
        if (questions := self.prepared.questions) is None:
            return
        found_C = multiple_choice.log_likelihoods(
            questions, self.passes, self._loader(questions.rows), lambda sums: self.passes.over_ranks(sums)[0]
        )
        if lines := multiple_choice.unanswered(questions, found_C):
            self.warn(
                f"at step {self.step} the log-probability of choices of {len(lines)} multiple-choice questions is not "
                f"finite, such as in line {lines[0]}; these questions count as answered wrong"
            )
        self.emit(multiple_choice.answered(questions, found_C, step=self.step))

    def tell_outliers(self) -> None:
        """Emit which training documents are learned worst, where that was watched."""
        if documents := self.outliers.worst(self.run.data.train):
            since = self.outliers.since_step
            self.emit(events.Outliers(step=self.step, since_step=since, documents=documents))

    def choose(self) -> int:
        """Take the weights to export, those of the best step where the run asks for them; the step they are of."""
        best = self.course.best_step
        if self.run.export.checkpoint == "last" or best in (None, self.step):
            return self.step
        # Where this attempt saved it, or where an earlier one's were brought to.
        folders = [self.run_dir / CHECKPOINTS]
        folders += [] if self.run.resume is None else [(self.run_dir / self.run.resume).parent]
        found = next((path for folder in folders if (path := checkpoint.folder_of(folder, best)).is_dir()), None)
        if found is None:
            self.warn(f"the checkpoint of the best step, {best}, is not there; the last step's weights are exported")
            return self.step
        return checkpoint.load(found, self.optimizer, base=self.base, scale=self.scale).step

    def _loader(self, rows: Rows) -> Loader:
        return ready_loader(self.run, self.decoder, rows)


def is_due(step: int, every: int | None, total_steps: int) -> bool:
    """Whether what happens every so many steps, and after the last, happens after `step`."""
    return step == total_steps or (every is not None and step % every == 0)


def at_rest(course: Course, early: EarlyStopping) -> str:
    """Why no more steps are taken, in words."""
    by = f" by more than {early.min_delta:g}" if early.min_delta else ""
    return (
        f"the last {course.waited} validation losses were not lower{by} than {course.mark:.4f}; the lowest was "
        f"{course.best_loss:.4f}, after step {course.best_step} (training.early_stopping)"
    )


def count(shapes: Mapping[str, Sequence[int]]) -> int:
    """Elements of the global tensors, each counted once."""
    return sum(map(prod, shapes.values()))


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def memory_bytes(device: torch.device) -> int:
    """The most that this rank has held so far: of the device's memory, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Kilobytes, except on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
