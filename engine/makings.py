"""What a run is made of before its first step: tokenizer and rows, the model, and what updates it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from engine import lora, weights
from engine.config import ModelShape, RunConfig, Training
from engine.data.format import InvalidData
from engine.data.loader import Loader
from engine.data.prepare import Prepared, load_tokenizer, open_prepared, prepare, tokenizer_for
from engine.data.rows import Rows
from engine.events import ErrorCode
from engine.failure import RunFailure
from engine.mesh import Mesh
from engine.model import DTYPES, Decoder
from engine.optimizer import AnyOptimizer, Optimizer
from engine.plan import budget
from engine.preference import preference_loss
from engine.progress import Reporter
from engine.together import together
from engine.tokenizer import Tokenizer


def ready_data(
    run: RunConfig, run_dir: Path, mesh: Mesh, report: Reporter, *, into: Path | None = None
) -> tuple[Tokenizer, Prepared]:
    """Tokenizer and rows: rank 0 makes them in `into`, or in the run directory, and all open them."""
    with together(mesh):
        if mesh.world_rank == 0:
            with blame("invalid_model"):
                tokenizer = tokenizer_for(run, run_dir, report, into=into)
                shape = _shape(run, run_dir)
            with blame("invalid_data"):
                sizes = {"vocab_size": shape.vocab_size, "max_seq_len": shape.max_seq_len}
                prepare(run, run_dir, tokenizer, report, into=into, **sizes)
    return load_tokenizer(into or run_dir), open_prepared(into or run_dir)


def ready_loader(run: RunConfig, decoder: Decoder, rows: Rows) -> Loader:
    """What deals these rows out to this rank."""
    mesh = decoder.mesh
    return Loader(
        rows,
        seed=run.training.seed,
        global_batch=run.training.global_batch,
        micro_batch=run.training.micro_batch,
        data_rank=mesh.rank("data"),
        data_size=mesh.size("data"),
        window=decoder.shape.sliding_window,
        device=mesh.device,
    )


def ready_model(run: RunConfig, run_dir: Path, mesh: Mesh, tokenizer: Tokenizer) -> Decoder:
    """The model to train: of random weights, or of the base's, with adapters where the run asks for them."""
    base = None if run.base is None else run_dir / run.base
    shape = _shape(run, run_dir)
    if base is not None:
        run.check_shape(shape)
    if tokenizer.vocab_size > shape.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} entries and the model's vocab_size is {shape.vocab_size}; "
            f"use a tokenizer of at most {shape.vocab_size}"
        )
    if run.export.gguf:
        # Now, and not when all is trained. Few runs need what this imports.
        from engine import gguf_file

        gguf_file.check(shape, tokenizer)
    seed = run.training.seed
    decoder = Decoder(
        shape,
        mesh,
        recompute=budget.replayed(run, shape, rank=mesh.rank("pipeline")),
        dtype=DTYPES[run.training.precision],
        seed=seed if base is None else None,
    )
    decoder.dropout_seed = seed
    if base is not None:
        weights.load(decoder, base)
    if run.lora is not None:
        lora.adapt(decoder, run.lora, seed=seed)
    if run.objective == "dpo":
        decoder.criterion = partial(preference_loss, context=decoder.context, dpo=run.dpo)
    return decoder.train()


def _shape(run: RunConfig, run_dir: Path) -> ModelShape:
    """As the run says it, or as its base does."""
    if run.base is not None:
        return weights.read_shape(run_dir / run.base)
    assert run.model is not None
    return run.model


def ready_optimizer(decoder: Decoder, training: Training) -> AnyOptimizer:
    """What updates the decoder; its weights and gradients are shared out as its layout asks, among replicas."""
    mesh = decoder.mesh
    if mesh.parallel.is_shared_out:
        # What these import takes seconds and 50 MB, which other runs need not spend.
        from engine.sharding import share_out
        from engine.shares import ShareOptimizer

        share_out(decoder, weights=mesh.parallel.shard_weights)
        return ShareOptimizer(decoder, training=training)
    return Optimizer(decoder.named_parameters(), mesh, training=training, shard=mesh.parallel.shard_optimizer)


@contextmanager
def blame(code: ErrorCode) -> Iterator[None]:
    """A bad value met in this block is the run's failure, for the reason `code`."""
    try:
        yield
    except InvalidData:
        raise
    except ValueError as error:
        raise RunFailure(code, str(error)) from error
