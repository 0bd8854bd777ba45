"""Turn a user's wishes into numbers: a pure function of the spec and of facts about base, files and cluster.

It refuses what can't run, blames a field, and says what would work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from pydantic import ValidationError

from core import layouts
from core.errors import InvalidSpec
from core.presets import PRESETS
from core.remembering import remembered
from core.spec import DpoMethod, FullMethod, JobSpec, LoraAsk, LoraMethod, ModelAsk, ParallelAsk, TrainingAsk
from engine.config import (
    FAMILIES,
    SHARDED,
    Data,
    Dpo,
    EarlyStopping,
    Export,
    Lora,
    ModelShape,
    Operation,
    Parallel,
    Recompute,
    RunConfig,
    TokenizerSource,
    Training,
)
from engine.data.format import Format, ways_out
from engine.plan import budget, memory, search
from engine.plan.flops import model_flops
from engine.plan.memory import Memory
from engine.plan.recompute import ELEMENTS, FP32, OPERATIONS, Setting
from engine.plan.time import Step

if TYPE_CHECKING:
    from core.files import FileFacts

BYTES_VOCABULARY = 260
"""Entries of the tokenizer whose ids are bytes: 256, and four special tokens."""
DEFAULT_EPOCHS = 3.0
DEFAULT_DPO_EPOCHS = 1.0
DEFAULT_GLOBAL_BATCH = 16
DEFAULT_SEQ_LEN = 1024
CHECKPOINTS_IN_A_RUN = 10
MOST_STEPS_BETWEEN_CHECKPOINTS = 500
TOKENS_IN_A_MICRO_BATCH = 8192
"""At most so many where the size is ours to choose: enough to keep a device busy."""
MICRO_BATCHES_FOR_EACH_RANK = 4
"""Of a pipeline's ranks, at least, where their size is ours to choose: these then idle in less than a fifth of a step,
(p - 1) of its 4p + p - 1 turns (Narayanan et al. 2021, section 2.2)."""
SAID_OF_LOSERS = 4
"""Layouts that a refusal tells of."""
CHARACTERS_IN_A_TOKEN = 4
"""For estimates before anything is tokenised."""
LEARNING_RATES = {"scratch": 3e-4, "lora": 2e-4, "full": 2e-5, "dpo with lora": 1e-5, "dpo": 1e-6}
LARGEST_RATE = 10.0
"""As `training.lr` has it too."""
Objective = Literal["pretrain", "sft", "dpo"]
OBJECTIVES: dict[Format, Objective] = {
    "text": "pretrain",
    "chat": "sft",
    "completion": "sft",
    "preference": "dpo",
}
"""Of ids made by somebody else, their mask decides."""
Method = FullMethod | LoraMethod | DpoMethod

# Jobs of a sweep differ in what no size depends on.
_estimate = remembered(memory.estimate)
_parameters = remembered(memory.parameters)
_adapter_parameters = remembered(memory.adapter_parameters)
_model_flops = remembered(model_flops)


@dataclass(frozen=True)
class BaseFacts:
    """The model that a job starts from."""

    name: str
    shape: ModelShape
    folder_made_at: float | None = None
    """Of a folder that nobody registered yet; None: the model is in the database."""


@dataclass(frozen=True)
class ClusterFacts:
    """What the nodes offer."""

    device: Literal["cpu", "cuda"] = "cpu"
    largest_node: int | None = None
    """Slots of the largest node; None where none has registered yet."""
    slot_memory_bytes: int | None = None
    """Memory of a slot; None where it isn't known."""
    slot_peak_flops: float | None = None
    """FLOP/s of a slot in bf16; None where it isn't known."""
    rates: Mapping[str, Any] | None = None
    """What a slot does in a second, see `engine.plan.cluster.as_facts`; None where it isn't known."""


@dataclass(frozen=True)
class Resolution:
    """What was wished, as numbers."""

    run: RunConfig
    slots: int
    plan: dict[str, Any]
    """What the run is expected to cost."""
    shape: ModelShape
    packed: bool
    """Rows may hold several documents."""
    batch: int
    """Rows of a step, where there are as many as was estimated."""


def resolve(
    spec: JobSpec,
    *,
    base: BaseFacts | None,
    files: Mapping[str, FileFacts],
    cluster: ClusterFacts,
    now: datetime | None = None,
) -> Resolution:
    """The run that `spec` asks for. Raises InvalidSpec, whose `param` is the field to change.

    `now` is the date that its chat template may ask for, in all its attempts.
    """
    if spec.kind == "finetune" and base is None:
        _refuse("model.base", 'a fine-tune starts from a model: set "model": {"base": "<name>"}')
    data_format = _format(spec, files)
    objective = _objective(spec, files, data_format)
    method = _method(spec, data_format)
    tokenizer, vocab_size = _tokenizer(spec, files)
    shape = base.shape if base else _shape(spec.model, vocab_size, seq_len=spec.data.seq_len)
    _check_ids(spec, files, "model" if base else "tokenizer", vocab_size or shape.vocab_size)
    if base is None and spec.data.template != "base":
        _refuse("data.template", "a template shows conversations to a base, and there is none here; leave it out")
    lora = _lora(spec, method, shape)
    seq_len = _seq_len(spec, shape, data_format)
    if objective != "pretrain" and spec.data.overlong == "error":
        _check_lengths(spec, files, shape, seq_len)
    precision = spec.training.precision or ("bf16" if cluster.device == "cuda" else "fp32")
    wished = _recompute(spec)
    packed = _is_packed(spec, files, data_format)
    usual = wished or Recompute(operations=search.cheap(shape))
    is_cut = objective == "pretrain"
    rows = _rows(spec, files, seq_len, is_cut=is_cut, bytes_only=tokenizer.type == "bytes")
    choice = _Choice(spec, shape, lora, seq_len, precision, usual, cluster, packed, objective == "dpo")
    parallel, global_batch, micro_batch, recompute = choice.laid_out(wished)
    # A step has no more rows than there are. How many, where several examples share one, shows once they are tokenised.
    batch = min(global_batch, rows)
    length = _length(spec.training, method, batch=batch, seq_len=seq_len)
    # As the engine counts them: 1.1 epochs of 100 rows are 110 rows, and 110.00000000000001 to a float.
    steps = length.get("steps") or max(1, ceil(rows * length["epochs"] / batch - 1e-9))
    try:
        run = RunConfig(
            model=None if base else shape,
            base=Path("base") if base else None,
            tokenizer=tokenizer,
            objective=objective,
            lora=lora,
            dpo=_dpo(method),
            data=Data(
                train=tuple(
                    Path(f"data/train-{index}{_ending(files[id_])}") for index, id_ in enumerate(spec.data.train)
                ),
                validation=_validation(spec, files),
                evaluation=_evaluation(spec, files),
                format=data_format,
                seq_len=seq_len,
                packing=spec.data.packing,
                overlong=spec.data.overlong,
                template=None if spec.data.template == "base" else spec.data.template,
                now=now,
            ),
            training=_training(spec, _kind(base, method), length, steps, global_batch, micro_batch, precision),
            parallel=parallel,
            recompute=recompute,
            export=_export(spec, base, shape, tokenizer),
            device=cluster.device,
            stall_seconds=spec.training.stall_seconds,
            peak_flops_per_rank=cluster.slot_peak_flops if precision == "bf16" else None,
        )
    except ValidationError as error:
        raise _refused(error) from error
    try:
        micro_batches = global_batch // (micro_batch * parallel.data)
        choice = choice.replaying(recompute)
        needs = choice.needs(parallel, micro_batch=micro_batch, micro_batches=micro_batches)
    except ValueError as error:
        _refuse(_blamed(str(error), "recompute"), str(error))
    _check_memory(needs, cluster)
    replayed = budget.replayed(run, shape)
    plan = _plan(shape, lora, needs, steps, rows, batch, run, replayed)
    plan |= layouts.timed(run, shape, cluster, replayed=replayed, steps=steps, batch=batch)
    return Resolution(run, slots=parallel.ranks, plan=plan, shape=shape, packed=packed, batch=batch)


# The model and what it reads


def _method(spec: JobSpec, data_format: Format) -> Method:
    compares = data_format == "preference"
    if spec.method is None:
        return FullMethod() if spec.kind == "pretrain" else DpoMethod() if compares else LoraMethod()
    if compares and not isinstance(spec.method, DpoMethod):
        _refuse(
            "method.type",
            'these files are preference data, on which "dpo" alone trains; say that, or upload chat or completion '
            "examples",
        )
    if isinstance(spec.method, DpoMethod) and not compares:
        _refuse(
            "method.type",
            f"DPO compares two answers, and these files are {data_format} data; upload preference pairs, or choose "
            'another method: "lora" or "full"',
        )
    return spec.method


def _dpo(method: Method) -> Dpo:
    """As asked for; what it is where nothing is compared, nobody reads."""
    if not isinstance(method, DpoMethod):
        return Dpo()
    return Dpo(beta=method.beta, label_smoothing=method.label_smoothing, sft_coefficient=method.sft_coefficient)


def _adapters(method: Method) -> tuple[str, LoraAsk | None]:
    """The adapters that a method trains, and the path of their fields; None: it trains every weight."""
    match method:
        case DpoMethod():
            return "method.lora", method.lora
        case LoraMethod():
            return "method", method
        case FullMethod():
            return "method", None


def _kind(base: BaseFacts | None, method: Method) -> str:
    """Which of the `LEARNING_RATES` suits."""
    if base is None:
        return "scratch"
    return "dpo with lora" if isinstance(method, DpoMethod) and method.lora else method.type


def _lora(spec: JobSpec, given: Method, shape: ModelShape) -> Lora | None:
    path, method = _adapters(given)
    if method is None:
        return None
    if spec.model.base is None:
        _refuse("method.type", 'LoRA adapts a model that is there: set "model": {"base": …}, or method.type "full"')
    said = None if method.targets == "all-linear" else tuple(dict.fromkeys(method.targets))
    lora = Lora(rank=method.rank, alpha=method.alpha, dropout=method.dropout, rslora=method.rslora, targets=said)
    try:
        return lora.model_copy(update={"targets": lora.targets_in(shape)})
    except ValueError as error:
        _refuse(f"{path}.targets", str(error).removeprefix("lora.targets: "))


def _format(spec: JobSpec, files: Mapping[str, FileFacts]) -> Format:
    found: Format | None = None
    for param, id_ in spec.examples():
        given = files[id_].format
        if given is None:
            _refuse(param, f"{id_} was not uploaded for training; upload it with the purpose fine-tune or pretrain")
        if given == "choice":
            _refuse(param, f"{id_} holds multiple-choice questions, which are not learned; name it in data.evaluation")
        if found is not None and given != found:
            _refuse(param, f"{id_} is {given} data, the files before it are {found}; train on one format at a time")
        found = given
    assert found is not None, "a spec names at least one training file"
    if spec.data.format not in {"auto", found}:
        _refuse("data.format", f'the files are {found} data, not {spec.data.format}; say "{found}" or "auto"')
    if spec.kind == "pretrain" and found not in {"text", "tokens"}:
        _refuse(
            "data.train",
            f'a pretrain reads text, and these files are {found} data; use kind "finetune", or upload plain text or '
            'lines of {"text": …}',
        )
    return found


def _objective(spec: JobSpec, files: Mapping[str, FileFacts], data_format: Format) -> Objective:
    if data_format != "tokens":
        return OBJECTIVES[data_format]
    masked = {files[id_].masked: (param, id_) for param, id_ in spec.examples()}
    if True in masked and spec.kind == "pretrain":
        _refuse("data.train", 'these ids say which of them are learned, and a pretrain learns all: use kind "finetune"')
    if len(masked) > 1:
        # Streams are cut into rows, and documents with a mask stand whole in one.
        (param, with_mask), (_, without) = masked[True], masked[False]
        _refuse(
            param,
            f"{with_mask} says which of its ids are learned, and {without} does not; give each a loss_mask, of ones "
            "where all is learned, or train on one kind at a time",
        )
    return "sft" if True in masked else "pretrain"


def _check_ids(spec: JobSpec, files: Mapping[str, FileFacts], whose: str, vocab_size: int) -> None:
    """A result's tokenizer must be able to read what its model writes, so its entries count and not the model's."""
    for param, id_ in spec.examples():
        largest = files[id_].max_id
        if largest is None:
            continue
        if spec.model.base is None and spec.tokenizer is None:
            _refuse(
                "tokenizer",
                f"{id_} is made of ids, and only the tokenizer that made them can read what is learned from them; "
                'upload its tokenizer.json with the purpose tokenizer and say {"file": "<id>"}, or {"type": "bytes"} '
                "where the ids are bytes",
            )
        if largest >= vocab_size:
            _refuse(
                param,
                f"{id_} has the id {largest}, and the {whose}'s vocabulary has {vocab_size} entries; the ids must be "
                f"made with the {'model' if whose == 'model' else 'job'}'s own tokenizer",
            )


def _tokenizer(spec: JobSpec, files: Mapping[str, FileFacts]) -> tuple[TokenizerSource, int | None]:
    """Where ids come from, and how many there are; None: as many as the base has."""
    ask = spec.tokenizer
    if spec.model.base is not None:
        if ask is not None and ask.from_ is None:
            _refuse("tokenizer", 'a base keeps its own tokenizer: leave this out, or say {"from": "base"}')
        return TokenizerSource(type="base"), None
    if ask is None or ask.type == "bytes":
        return TokenizerSource(type="bytes"), BYTES_VOCABULARY
    if ask.train is not None:
        if any(files[id_].format == "tokens" for id_ in spec.data.train):
            _refuse(
                "tokenizer.train",
                "there is no text in files of ids to train it on; upload the tokenizer that made them",
            )
        return TokenizerSource(type="train", vocab_size=ask.train.vocab_size), ask.train.vocab_size
    if ask.file is not None:
        size = files[ask.file].vocab_size
        if size is None:
            _refuse("tokenizer.file", f"{ask.file} is no tokenizer; upload a tokenizer.json with the purpose tokenizer")
        return TokenizerSource(type="file", path=Path("tokenizer.json")), size
    _refuse("tokenizer.from", 'there is no base to take it from; say {"train": {"vocab_size": …}} or {"type": "bytes"}')


def _shape(ask: ModelAsk, vocab_size: int | None, *, seq_len: int | None) -> ModelShape:
    """The sizes of a model from scratch."""
    preset = PRESETS[ask.preset] if ask.preset else {}
    # What a preset has as usual follows the sizes said beside it, as without a preset.
    usual = _usual(preset) if preset else {}
    preset = {name: size for name, size in preset.items() if usual.get(name) != size}
    said = ask.model_dump(include=set(ModelShape.model_fields), exclude_none=True)
    sizes: dict[str, Any] = preset | said
    for name in ("num_layers", "hidden_size", "num_heads"):
        if name not in sizes:
            _refuse(f"model.{name}", f"a model from scratch needs {name}; or name a preset: {', '.join(PRESETS)}")
    hidden, heads = sizes["hidden_size"], sizes["num_heads"]
    if "head_dim" not in sizes:
        if hidden % (2 * heads):
            fits = [count for count in range(heads, 0, -1) if hidden % (2 * count) == 0]
            advice = f"try num_heads={fits[0]}" if fits else "try an even hidden_size"
            _refuse("model.num_heads", f"num_heads={heads} must divide hidden_size={hidden} into even parts; {advice}")
        sizes["head_dim"] = hidden // heads
    sizes = _usual(sizes) | sizes
    sizes.setdefault("max_seq_len", seq_len or DEFAULT_SEQ_LEN)
    if vocab_size is not None:
        if said.get("vocab_size", vocab_size) < vocab_size:
            _refuse(
                "model.vocab_size",
                f"vocab_size={said['vocab_size']} is smaller than the tokenizer's {vocab_size}; leave it out, or use at"
                f" least {vocab_size}",
            )
        sizes["vocab_size"] = said.get("vocab_size", vocab_size)
    try:
        return ModelShape.model_validate(sizes)
    except ValidationError as error:
        raise _refused(error, prefix="model") from error


def _usual(sizes: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that follow from `sizes` where they are not said."""
    hidden = sizes["hidden_size"]
    # SwiGLU has three matrices where others have two: 8/3 of the width keeps the parameters of the usual 4.
    gated = FAMILIES[sizes.get("architecture", "llama")].mlp == "swiglu"
    ffn = -(-8 * hidden // 3 // 64) * 64 if gated else 4 * hidden
    return {"num_kv_heads": sizes["num_heads"], "ffn_hidden_size": ffn}


def _seq_len(spec: JobSpec, shape: ModelShape, data_format: Format) -> int:
    asked = spec.data.seq_len
    if asked is not None and asked > shape.max_seq_len:
        _refuse(
            "data.seq_len", f"seq_len={asked} is longer than the model's {shape.max_seq_len} tokens; use at most that"
        )
    return asked or usual_seq_len(shape.max_seq_len, data_format)


def _check_lengths(spec: JobSpec, files: Mapping[str, FileFacts], shape: ModelShape, seq_len: int) -> None:
    """Of ids the lengths are known; how long other examples are shows once the base's tokenizer has read them."""
    for param, id_ in spec.examples():
        longest = files[id_].longest
        if longest is not None and longest["tokens"] > seq_len + 1:
            _refuse(
                param,
                f"the document {longest['line']} of {id_} has {longest['tokens']} ids, and a row of "
                f"data.seq_len={seq_len} takes {seq_len + 1}; {ways_out(longest['tokens'], shape.max_seq_len)}",
            )


def usual_seq_len(most: int, data_format: Format) -> int:
    """Tokens of a row where nobody says how many, of a model that takes `most`."""
    # Both answers of a pair share a row.
    answers = 2 if data_format == "preference" else 1
    return min(most, DEFAULT_SEQ_LEN * answers)


def _validation(spec: JobSpec, files: Mapping[str, FileFacts]) -> Path | float | None:
    wish = spec.data.validation
    if isinstance(wish, str):
        return Path(f"data/validation{_ending(files[wish])}")
    used = [files[id_] for id_ in spec.data.train]
    # Of text the rows are held out, which nobody counts before a tokenizer reads it.
    counted = all(file.format not in ("text", "tokens") for file in used)
    if wish is not None and counted and sum(file.examples for file in used) < 2:
        _refuse(
            "data.validation",
            f"of a single example no share of {wish:g} can be held out; add examples, name a file, or leave it out",
        )
    return wish


def _evaluation(spec: JobSpec, files: Mapping[str, FileFacts]) -> Path | None:
    id_ = spec.data.evaluation
    if id_ is None:
        return None
    given = files[id_].format
    if given is None:
        _refuse("data.evaluation", f"{id_} was not judged on upload; upload it with the purpose fine-tune")
    if given != "choice":
        _refuse(
            "data.evaluation",
            f'{id_} is {given} data, and what is asked here are lines of {{"question", "choices", "answer"}}; data '
            "that is held out goes into data.validation",
        )
    return Path("data/evaluation.jsonl")


_ENDINGS = {"parquet": ".parquet", "megatron": ".tar"}


def _ending(file: FileFacts) -> str:
    if file.container is not None:
        return _ENDINGS[file.container]
    return ".txt" if file.is_plain_text else ".jsonl"


def _recompute(spec: JobSpec) -> Recompute | None:
    """As asked for; None: as little as memory allows."""
    if spec.recompute == "auto":
        return None
    try:
        return Recompute.model_validate(spec.recompute.model_dump())
    except ValidationError as error:
        raise _refused(error, prefix="recompute") from error


# Ranks


@dataclass(frozen=True)
class _Choice:
    """What a layout depends on."""

    spec: JobSpec
    shape: ModelShape
    lora: Lora | None
    seq_len: int
    precision: Literal["bf16", "fp32"]
    recompute: Recompute
    cluster: ClusterFacts
    packed: bool
    """Rows hold several documents."""
    compares: bool
    """Answers in pairs."""
    _known: dict[tuple[Parallel, int, int], Memory] = field(default_factory=dict)
    """What was estimated before: the layout that is chosen was one of the candidates."""

    def replaying(self, recompute: Recompute) -> _Choice:
        """The same, with something else replayed."""
        return self if recompute == self.recompute else replace(self, recompute=recompute, _known={})

    def laid_out(self, wished: Recompute | None) -> tuple[Parallel, int, int, Recompute]:
        """Ranks of each axis, rows of a step and of a pass, and what is replayed where nothing is `wished`."""
        if (searched := self._searched(wished)) is not None:
            parallel, global_batch, micro_batch = searched
        else:
            parallel = self.parallel()
            global_batch, micro_batch = self.batch(parallel)
        if wished is not None or self.cluster.slot_memory_bytes is None:
            return parallel, global_batch, micro_batch, self.recompute
        return parallel, global_batch, micro_batch, self._least(parallel, micro_batch, global_batch)

    def _least(self, parallel: Parallel, micro_batch: int, global_batch: int) -> Recompute:
        """What costs least to replay of what fits; where nothing does, the usual, of which it is said what it lacks.

        Less than the usual where that fits as large a pass; more where not even the usual one fits.
        """
        assert self.cluster.slot_memory_bytes is not None
        count = global_batch // (micro_batch * parallel.data)
        setting = Setting(
            self.shape, self.seq_len, micro_batch, ELEMENTS[self.precision], parallel, self.lora,
            packed=self.packed, on_cuda=self.cluster.device == "cuda",
        )  # fmt: skip
        options = [
            Recompute(mode="none"),
            *search.affordable(setting, count, self.cluster.slot_memory_bytes, compares=self.compares),
            *map(search.as_recompute, search.levels(self.shape)[1:]),
        ]
        fits = (
            recompute
            for recompute in options
            if self.replaying(recompute)._fits(parallel, micro_batch=micro_batch, micro_batches=count)
        )
        return next(fits, self.recompute)

    def _searched(self, wished: Recompute | None) -> tuple[Parallel, int, int] | None:
        """The fastest layout that fits, where one is to be chosen and it is known how fast the nodes are."""
        resources, training = self.spec.resources, self.spec.training
        ranks, most = resources.gpus or 1, self.cluster.largest_node
        if self.spec.parallel != "auto" or resources.nodes > 1 or (most is not None and ranks > most):
            return None
        if wished is not None and wished.mode == "budget":
            return None
        micro_batch = None if training.micro_batch == "auto" else training.micro_batch
        unit = ranks * (micro_batch or 1)
        global_batch = training.global_batch or -(-DEFAULT_GLOBAL_BATCH // unit) * unit
        wishes = search.Wishes(
            recompute=wished,
            micro_batch=micro_batch,
            largest_micro_batch=max(1, TOKENS_IN_A_MICRO_BATCH // self.seq_len),
            fixed={"pipeline": 1} if training.samples else {},
        )
        step = Step(self.shape, self.seq_len, global_batch, self.precision, self.lora, self.packed, self.compares)
        found = layouts.found(step, self.cluster, ranks=ranks, wishes=wishes, explain=False)
        if found is None:
            return None
        if not found.best:
            said = "; ".join(loser.why for loser in found.losers[:SAID_OF_LOSERS])
            _refuse(
                "resources", f"no layout of {ranks} slots fits: {said}; use more slots, or a smaller batch or model"
            )
        best = found.best[0].layout
        return best.parallel, global_batch, best.micro_batch

    def parallel(self) -> Parallel:
        resources = self.spec.resources
        if resources.nodes > 1:
            _refuse("resources.nodes", "one job on several nodes is not in this version; use 1 node")
        if self.spec.parallel == "auto":
            chosen = self._automatic(resources.gpus or 1)
        else:
            chosen = self._as_said(self.spec.parallel, resources.gpus)
        self._check_node(chosen)
        try:
            chosen.check(self.shape, seq_len=self.seq_len)
        except ValueError as error:
            _refuse(_blamed(str(error), "parallel"), str(error))
        return chosen

    def _automatic(self, gpus: int) -> Parallel:
        """As little tensor parallelism as memory allows: replicas exchange least."""
        fitting = [tensor for tensor in range(1, gpus + 1) if gpus % tensor == 0 and self._splits(tensor)]
        for tensor in fitting[:-1]:
            candidate = Parallel(tensor=tensor, sequence=self._sequence(tensor), data=gpus // tensor)
            wish = self.spec.training.micro_batch
            if self._fits(candidate, micro_batch=1 if wish == "auto" else wish):
                return candidate
        tensor = fitting[-1]
        return Parallel(tensor=tensor, sequence=self._sequence(tensor), data=gpus // tensor)

    def _as_said(self, ask: ParallelAsk, gpus: int | None) -> Parallel:
        # Of one replica. An axis of one rank is not worth a word, unless it is the only one.
        axes = {"tensor": ask.tensor, "pipeline": ask.pipeline, "context": ask.context}
        axes = {axis: size for axis, size in axes.items() if size > 1 or axis == "tensor"}
        each = prod(axes.values())
        if gpus is not None and gpus % each:
            said = " x ".join(f"parallel.{axis}={size}" for axis, size in axes.items())
            _refuse("resources.gpus", f"gpus={gpus} is no multiple of {said}; use {_near(gpus, each)}")
        data = ask.data or (gpus or each) // each
        if gpus is not None and each * data != gpus:
            said = " x ".join(f"{axis}={size}" for axis, size in {**axes, "data": data}.items())
            _refuse(
                "resources.gpus",
                f"gpus={gpus}, but parallel needs {said} = {each * data}; make them equal, or leave gpus out",
            )
        as_it_is = ("tensor", "sequence", "pipeline", "virtual", "stages", "context", *SHARDED)
        return Parallel(data=data, **{name: getattr(ask, name) for name in as_it_is})

    def _check_node(self, chosen: Parallel) -> None:
        largest = self.cluster.largest_node
        if largest is not None and chosen.ranks > largest:
            param = "resources.gpus" if self.spec.parallel == "auto" else "parallel"
            _refuse(
                param,
                f"needs {chosen.ranks} slots; the largest node has {largest}: lower {_axes(chosen)} to at most "
                f"{largest}, or add a larger node",
            )

    def batch(self, parallel: Parallel) -> tuple[int, int]:
        """Rows of a step over all ranks, and rows of one forward pass."""
        ask, data = self.spec.training, parallel.data
        unit = data * (1 if ask.micro_batch == "auto" else ask.micro_batch)
        global_batch = ask.global_batch or -(-DEFAULT_GLOBAL_BATCH // unit) * unit
        if global_batch % unit:
            of = (
                f"parallel.data={data}" if ask.micro_batch == "auto" else f"micro_batch={ask.micro_batch} x data={data}"
            )
            _refuse(
                "training.global_batch",
                f"global_batch={global_batch} must be a multiple of {of}; use {_near(global_batch, unit)}",
            )
        if ask.micro_batch != "auto":
            return global_batch, ask.micro_batch
        share = global_batch // data
        most = max(1, TOKENS_IN_A_MICRO_BATCH // self.seq_len)
        if parallel.pipeline > 1:
            most = max(1, min(most, share // (MICRO_BATCHES_FOR_EACH_RANK * parallel.pipeline)))
        sizes = [size for size in range(min(share, most), 0, -1) if share % size == 0]
        fits = (size for size in sizes if self._fits(parallel, micro_batch=size, micro_batches=share // size))
        return global_batch, next(fits, 1)

    def needs(self, parallel: Parallel, *, micro_batch: int, micro_batches: int) -> Memory:
        """`micro_batches`: of a step, of one replica."""
        asked = (parallel, micro_batch, micro_batches)
        if asked not in self._known:
            self._known[asked] = _estimate(
                self.shape,
                seq_len=self.seq_len,
                micro_batch=micro_batch,
                precision=self.precision,
                parallel=parallel,
                recompute=self.recompute,
                lora=self.lora,
                micro_batches=micro_batches,
                packed=self.packed,
                on_host=self.cluster.device == "cpu",
                compares=self.compares,
            )
        return self._known[asked]

    def _splits(self, tensor: int) -> bool:
        try:
            Parallel(tensor=tensor).check(self.shape, seq_len=self.seq_len)
        except ValueError:
            return False
        return True

    def _sequence(self, tensor: int) -> bool:
        return tensor > 1 and self.seq_len % tensor == 0

    def _fits(self, parallel: Parallel, *, micro_batch: int, micro_batches: int = 1) -> bool:
        try:
            needs = self.needs(parallel, micro_batch=micro_batch, micro_batches=micro_batches)
            return _has_room(self.cluster, needs)
        except ValueError:
            # However much is recomputed, activations are beyond the budget.
            return False


def _axes(parallel: Parallel) -> str:
    sizes = {"tensor": 2, "pipeline": parallel.pipeline, "context": parallel.context, "data": 2}
    return " x ".join(axis for axis, size in sizes.items() if size > 1)


# Length


def _length(ask: TrainingAsk, method: Method, *, batch: int, seq_len: int) -> dict[str, Any]:
    """The one of `steps` and `epochs` that the run gets; a step has `batch` rows."""
    if ask.steps is not None:
        return {"steps": ask.steps}
    if ask.tokens is not None:
        return {"steps": ceil(ask.tokens / (batch * seq_len))}
    return {"epochs": ask.epochs or (DEFAULT_DPO_EPOCHS if isinstance(method, DpoMethod) else DEFAULT_EPOCHS)}


def _is_packed(spec: JobSpec, files: Mapping[str, FileFacts], data_format: Format) -> bool:
    """Whether rows may hold several documents; both answers of a preference are."""
    documents = sum(files[id_].examples for id_ in spec.data.train)
    return data_format == "preference" or (spec.data.packing and documents > 1)


def _rows(spec: JobSpec, files: Mapping[str, FileFacts], seq_len: int, *, is_cut: bool, bytes_only: bool) -> int:
    """About how many rows the training files fill, and exactly where each example has its own.

    `is_cut`: they are one stream, cut into rows.
    """
    used = [files[id_] for id_ in spec.data.train]
    of_a_token = 1 if bytes_only else CHARACTERS_IN_A_TOKEN
    tokens = sum(file.characters / of_a_token if file.tokens is None else file.tokens for file in used)
    rows = max(1, ceil(tokens / seq_len))
    examples = sum(file.examples for file in used)
    if is_cut:
        # Unless they are packed, each document begins a row.
        rows = rows if spec.data.packing else max(rows, examples)
        return rows - _held(rows, spec.data.validation)
    # Each example stands whole in a row: there are no more rows than examples, and these are what is held out.
    left = examples - _held(examples, spec.data.validation)
    return max(1, min(left, round(rows * left / examples))) if spec.data.packing else left


def _held(count: int, wish: str | float | None) -> int:
    """Of so many, those that are held out; one at least is trained on."""
    return min(count - 1, max(1, round(count * wish))) if isinstance(wish, float) else 0


def _training(
    spec: JobSpec,
    kind: str,
    length: dict[str, Any],
    steps: int,
    global_batch: int,
    micro_batch: int,
    precision: Literal["bf16", "fp32"],
) -> Training:
    ask = spec.training
    keep_best = ask.keep_best or spec.artifacts.checkpoint == "best"
    for param, asked in (
        ("artifacts.checkpoint", spec.artifacts.checkpoint == "best"),
        ("training.keep_best", ask.keep_best),
        ("training.early_stopping", ask.early_stopping is not None),
    ):
        if asked and spec.data.validation is None:
            _refuse(param, "it goes by the validation loss; set data.validation to a file or a share, such as 0.05")
    checkpoint_every = ask.checkpoint_every or max(
        1, min(MOST_STEPS_BETWEEN_CHECKPOINTS, steps // CHECKPOINTS_IN_A_RUN)
    )
    return Training(
        **length,
        global_batch=global_batch,
        micro_batch=micro_batch,
        lr=_rate(ask, LEARNING_RATES[kind]),
        min_lr_ratio=ask.min_lr_ratio,
        schedule=ask.schedule,
        warmup=ask.warmup,
        decay=ask.decay,
        weight_decay=ask.weight_decay,
        betas=ask.betas,
        clip=ask.clip,
        precision=precision,
        seed=ask.seed,
        eval_every=ask.eval_every or (checkpoint_every if keep_best or ask.early_stopping else None),
        checkpoint_every=checkpoint_every,
        keep_checkpoints=ask.keep_checkpoints,
        keep_best=keep_best,
        early_stopping=EarlyStopping(**ask.early_stopping.model_dump()) if ask.early_stopping else None,
        outliers=ask.outliers,
        samples=ask.samples,
        non_finite=ask.non_finite,
        max_recoveries=ask.max_recoveries,
        roll_back_checkpoints=ask.roll_back_checkpoints,
        check_replicas_every=ask.check_replicas_every,
    )


def _rate(ask: TrainingAsk, usual: float) -> float:
    """As it is said, or a multiple of the usual one."""
    rate = ask.lr or usual * (ask.lr_multiplier or 1)
    if rate > LARGEST_RATE:
        _refuse(
            "training.lr_multiplier",
            f"{ask.lr_multiplier:g} times the default rate, {usual:g}, is above {LARGEST_RATE:g}; use at most "
            f"{LARGEST_RATE / usual:g}",
        )
    if rate == 0:
        _refuse(
            "training.lr_multiplier",
            f"{ask.lr_multiplier:g} times the default rate, {usual:g}, is too small for a number; use at least 1e-300",
        )
    return rate


# Cost


def _has_room(cluster: ClusterFacts, needs: Memory) -> bool:
    available = cluster.slot_memory_bytes
    return available is None or needs.fits(available)


def _check_memory(needs: Memory, cluster: ClusterFacts) -> None:
    if _has_room(cluster, needs):
        return
    fewer_tokens = "lower training.micro_batch or data.seq_len"
    advice: dict[memory.Item, str] = {
        "activations": f"{fewer_tokens}, or set recompute to full",
        "recomputed": fewer_tokens,
        "logits": fewer_tokens,
        "working": fewer_tokens,
        "pipeline": fewer_tokens,
        "reference": fewer_tokens,
        "batches": "lower training.global_batch or data.seq_len",
        "gathered": f"{fewer_tokens}, or leave parallel.shard_weights and shard_gradients out",
        "parameters": "raise parallel.tensor or parallel.pipeline, or parallel.data with shard_weights",
        "adapters": "lower lora's rank, or raise parallel.tensor",
        "gradients": "raise parallel.tensor or parallel.pipeline, or parallel.data with shard_gradients, or use method"
        " lora",
        "snapshot": "raise parallel.tensor, use method lora, or raise parallel.data with shard_optimizer",
        "optimizer": "raise parallel.tensor, use method lora, or raise parallel.data with shard_optimizer",
    }
    _refuse(
        "resources",
        f"each rank needs about {search.as_size(needs.total)}, "
        f"{search.as_size(needs.of(needs.largest))} of it {needs.largest}; "
        f"a slot has {search.as_size(cluster.slot_memory_bytes or 0)}, of which {memory.MARGIN:.0%} stay free:"
        f" {advice[needs.largest]}",
    )


def _plan(
    shape: ModelShape,
    lora: Lora | None,
    needs: Memory,
    steps: int,
    rows: int,
    batch: int,
    run: RunConfig,
    replayed: frozenset[Operation],
) -> dict[str, Any]:
    parameters = _parameters(shape)
    adapters = _adapter_parameters(shape, lora) if lora else None
    return {
        "parameters": parameters + (adapters or 0),
        "trainable_parameters": parameters if adapters is None else adapters,
        "ranks": run.parallel.ranks,
        "bytes_per_rank": needs.itemised(),
        "bytes_by_phase": needs.by_phase(),
        "recomputed": [operation for operation in OPERATIONS if operation in replayed],
        "estimated_rows": rows,
        "estimated_steps": steps,
        "estimated_tokens": steps * batch * run.data.seq_len,
        "estimated_epochs": steps * batch / rows,
        "flops_per_step": _flops(shape, lora, batch, run.data.seq_len),
        **_disk(parameters, adapters, run),
    }


def _flops(shape: ModelShape, lora: Lora | None, batch: int, seq_len: int) -> int:
    """Of a step whose rows are one document each; packed rows need less."""
    tokens = batch * seq_len
    seen = min(seq_len, shape.sliding_window or seq_len)
    return _model_flops(shape, tokens=tokens, pairs=tokens * seen, lora=lora)


def _disk(parameters: int, adapters: int | None, run: RunConfig) -> dict[str, int]:
    """Bytes of a checkpoint (master and two moments, in fp32, of what trains), of the result, and of all at once."""
    checkpoint = 3 * FP32 * (parameters if adapters is None else adapters)
    dtype = run.export.dtype if run.export.dtype != "keep" or run.base is not None else run.training.precision
    # What a base keeps its weights in shows once it is read; fp32 is the most.
    models = (adapters is None or run.export.merged) + run.export.gguf
    result = models * parameters * ELEMENTS.get(dtype, FP32) + (adapters or 0) * FP32
    # The oldest goes once the newest is whole.
    kept = run.training.keep_checkpoints + 1 + run.training.keep_best
    return {"checkpoint_bytes": checkpoint, "result_bytes": result, "disk_bytes": kept * checkpoint + result}


# Refusing


def _export(spec: JobSpec, base: BaseFacts | None, shape: ModelShape, tokenizer: TokenizerSource) -> Export:
    export = Export(
        dtype=spec.artifacts.dtype,
        merged=spec.artifacts.merged,
        checkpoint=spec.artifacts.checkpoint,
        gguf=spec.artifacts.gguf,
        base_name=base.name if base else None,
    )
    try:
        export.check(shape)
    except ValueError as error:
        _refuse("artifacts.gguf", str(error))
    if export.gguf and tokenizer.type == "bytes":
        _refuse("artifacts.gguf", 'bytes alone are no vocabulary for it; set "tokenizer": {"train": {"vocab_size": …}}')
    return export


def _refuse(param: str, message: str) -> NoReturn:
    raise InvalidSpec(message if message.startswith(param) else f"{param}: {message}", param=param)


def _refused(error: ValidationError, *, prefix: str = "") -> InvalidSpec:
    """What the run's own types refuse, in their words."""
    first = error.errors()[0]
    path = ".".join(filter(None, (prefix, *map(str, first["loc"]))))
    message = first["msg"].removeprefix("Value error, ")
    return InvalidSpec(message, param=_blamed(message, path, prefix))


def _blamed(message: str, otherwise: str, prefix: str = "") -> str:
    """The field that a message of the run's types begins with, such as `parallel.tensor=3 must …`.

    A shape's own messages begin with its field, and `prefix` says where in the spec the shape stands.
    """
    word = next(_words(message), "")
    if prefix and word.split(".")[0] in ModelShape.model_fields:
        return f"{prefix}.{word}"
    return word if "." in word and word.replace(".", "").replace("_", "").isalpha() else otherwise


def _words(message: str) -> Iterator[str]:
    yield from message.replace("=", " ").split()


def _near(value: int, unit: int) -> str:
    """The multiples of `unit` next to `value`."""
    below, above = value - value % unit, value - value % unit + unit
    return f"{below} or {above}" if below else f"{above}"
