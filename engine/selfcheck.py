"""Whether an export is what it should be, tried on some of the training data from the files that were written.

Each check costs seconds and a layer's worth of memory, whatever the model. One that fails, or can't be carried out,
says so in words, and is no reason to withhold the export.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine import layerwise, weights
from engine.config import ModelShape, RunConfig
from engine.data.format import Chat, Format, InvalidData, Text, examples, read_chunks
from engine.data.judging import judge
from engine.data.prepare import Prepared
from engine.data.rows import Document, Row
from engine.lora import TARGETS
from engine.model import whole_shapes
from engine.tokenizer import Tokenizer, Tokens

BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}
"""How far logits of a merged model may be from those of base and adapter, as a share of the largest logit. What is
merged is rounded to its type, by at most 2^-24, 2^-11 and 2^-9 of each weight, and layers add that up: in bf16 to 4% in
a model of 30 layers."""
DOCUMENTS = 8
"""Of the training data, that are rendered and encoded again."""
ROWS, TOKENS = 2, 64
"""Beginnings of training documents that go through the model, and tokens of each."""
SCANNED = 256
"""Training rows whose turns are looked at."""


@dataclass(frozen=True)
class Check:
    """One claim about an export, and whether it holds."""

    name: str
    passed: bool
    figure: float | None
    """What was measured; None where it could not be."""
    message: str


@dataclass(frozen=True)
class Subject:
    """What is checked, and what it is held against."""

    run: RunConfig
    run_dir: Path
    folder: Path
    """The export."""
    shape: ModelShape
    prepared: Prepared
    went_on: Callable[[], object]
    """Called now and then, for whoever watches whether this goes on."""

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / ("model" if (self.folder / "model").is_dir() else "adapter")

    @property
    def base(self) -> Path | None:
        return None if self.run.base is None else self.run_dir / self.run.base


def checks_of(subject: Subject) -> Iterator[Check]:
    """Carry out every check that has a meaning for this run."""
    for name, check in _fitting(subject).items():
        subject.went_on()
        try:
            passed, figure, message = check(subject)
        except Exception as error:  # whatever is wrong with what was written must be told, and not stop the telling
            passed, figure, message = False, None, f"could not be carried out: {type(error).__name__}: {error}"
        # JSON has no word for what is not finite, and nothing is right that measures so.
        if figure is not None and not isfinite(figure):
            passed, figure = False, None
        yield Check(name, passed, figure, message)


Verdict = tuple[bool, float | None, str]


def _fitting(subject: Subject) -> Mapping[str, Callable[[Subject], Verdict]]:
    run, has_model = subject.run, (subject.folder / "model").is_dir()
    speaks = run.data.format in ("chat", "completion", "preference")
    fits = {
        "reads_back": (reads_back, not has_model or run.lora is None),
        "adapter_equals_merged": (adapter_equals_merged, has_model and run.lora is not None),
        "differs_from_base": (differs_from_base, has_model and run.base is not None),
        "gguf_equals_model": (gguf_equals_model, run.export.gguf),
        "turns_end": (turns_end, speaks and run.objective != "pretrain"),
        "template_round_trip": (template_round_trip, speaks),
    }
    return {name: check for name, (check, applies) in fits.items() if applies}


# ---- Weights --------------------------------------------------------------------------------------------------------


def reads_back(subject: Subject) -> Verdict:
    """The exported model, or the base under the exported adapter, read from its files, gives finite logits."""
    ids_BT = _beginnings(subject)
    if subject.base is not None and not (subject.folder / "model").is_dir():
        logits_BTV = _logits(subject, subject.base, ids_BT, adapter=subject.folder / "adapter")
    else:
        logits_BTV = _logits(subject, subject.folder / "model", ids_BT)
    loss = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()).item()
    finite = bool(logits_BTV.isfinite().all())
    said = "finite" if finite else "not finite: the weights are damaged, or training diverged"
    return finite, loss if finite else None, f"logits on {_told(ids_BT)} are {said}; mean loss over all {loss:.4f}"


def adapter_equals_merged(subject: Subject) -> Verdict:
    """The merged model gives the logits of base and adapter, up to the rounding of what is merged."""
    assert subject.base is not None
    assert subject.run.lora is not None
    ids_BT = _beginnings(subject)
    merged = _logits(subject, subject.folder / "model", ids_BT)
    apart = _logits(subject, subject.base, ids_BT, adapter=subject.folder / "adapter")
    dtype = weights.read_dtype(subject.folder / "model")
    difference, largest = (merged - apart).abs().max().item(), apart.abs().max().item()
    bound = BOUNDS[dtype] * largest
    kind = str(dtype).removeprefix("torch.")
    message = (
        f"largest difference between logits of the merged model and of base and adapter, on {_told(ids_BT)}: "
        f"{difference:.3g}, within {bound:.3g} for {kind}"
    )
    # Not a number is not within.
    if not difference <= bound:
        message = message.replace("within", "beyond") + "; use the adapter on its base, or export in fp32"
    return difference <= bound, difference, message


def differs_from_base(subject: Subject) -> Verdict:
    """Training changed some weight by more than the export's rounding."""
    assert subject.base is not None
    base_shape = weights.read_shape(subject.base)
    names = sorted(whole_shapes(subject.shape), key=lambda name: not _is_adapted(name))
    with (
        weights.Folder(subject.base, base_shape) as base,
        weights.Folder(subject.folder / "model", subject.shape) as ours,
    ):
        for name in names:
            subject.went_on()
            new = ours.whole(name)
            change = (new.float() - base.whole(name).to(new.dtype).float()).abs().max().item()
            if not isfinite(change):
                return False, None, f"{name} has entries that are not finite: the weights are damaged"
            if change:
                return True, change, f"{name} differs from the base's by up to {change:.3g}"
    return False, 0.0, f"all {len(names)} tensors are the base's, once rounded: train longer, or export in fp32"


def gguf_equals_model(subject: Subject) -> Verdict:
    """The GGUF file, read back, has the model's tensors and tokens, bit for bit."""
    from engine import gguf_file

    path = subject.folder / "gguf" / gguf_file.NAME
    count, wrong = gguf_file.differences(path, subject.folder / "model", went_on=subject.went_on)
    told = f"; others: {', '.join(wrong[:10])}" if wrong else ""
    return not wrong, float(len(wrong)), f"read back, {path.name} has the model's {count} tensors and its tokens{told}"


def _is_adapted(name: str) -> bool:
    return name.removesuffix(".weight").endswith(tuple(TARGETS.values()))


def _beginnings(subject: Subject) -> Tensor:
    """The beginnings of some training documents, all of one length."""
    longest = sorted(subject.prepared.train.first(DOCUMENTS), key=lambda document: -len(document.tokens))[:ROWS]
    length = min(TOKENS, *(len(document.tokens) for document in longest)) if longest[1:] else TOKENS
    return torch.from_numpy(np.stack([document.tokens[:length] for document in longest]).astype(np.int64))


def _logits(subject: Subject, folder: Path, ids_BT: Tensor, *, adapter: Path | None = None) -> Tensor:
    under = None
    if adapter is not None and subject.run.lora is not None:
        under = subject.run.lora, adapter
    with layerwise.opened(folder, subject.shape, adapter=under, went_on=subject.went_on) as decoder:
        return decoder.logits(ids_BT)


def _told(ids_BT: Tensor) -> str:
    return f"{ids_BT.numel()} training tokens"


# ---- Text -----------------------------------------------------------------------------------------------------------


def turns_end(subject: Subject) -> Verdict:
    """Each learned turn ends in a learned token at which generation will stop."""
    rows = subject.prepared.train
    folder = subject.tokenizer_folder
    ends = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    chosen = np.linspace(0, len(rows) - 1, min(SCANNED, len(rows)), dtype=np.int64).tolist()
    last = np.concatenate([_last_of_turns(rows.row(index)) for index in chosen])
    ended = int(np.isin(last, ends).sum())
    tokenizer = Tokenizer.load(folder)
    stops = ", ".join(sorted(filter(None, map(tokenizer.backend.id_to_token, ends))))
    message = (
        f"{ended} of {len(last)} learned turns, in {len(chosen)} rows, end in a learned token that stops ({stops})"
    )
    if ended < len(last):
        message += (
            "; after the others the model does not learn to stop: they were cut, or the template ends them otherwise"
        )
    return ended == len(last), ended / max(1, len(last)), message


def _last_of_turns(row: Row) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The last id of each run of learned ids of one document."""
    trained, documents = row.trained[: row.filled], row.documents[: row.filled]
    goes_on = np.append(trained[1:] & (documents[1:] == documents[:-1]), False)
    last: np.ndarray[tuple[int], np.dtype[np.int64]] = row.tokens[: row.filled][trained & ~goes_on]
    return last


def template_round_trip(subject: Subject) -> Verdict:
    """The exported tokenizer and template make of the training file the very ids that were trained on."""
    run = subject.run
    tokenizer = Tokenizer.load(subject.tokenizer_folder, now=run.data.now)
    kept: dict[tuple[int, int], list[Document]] = defaultdict(list)
    for document in subject.prepared.train.first(DOCUMENTS):
        kept[document.file, document.line].append(document)
    same, different = 0, []
    for (file, line), encoded in _encoded_anew(subject, tokenizer, set(kept)):
        ids = [document.tokens.tolist() for document in kept[file, line]]
        if encoded == ids:
            same += 1
        else:
            different.append(f"{run.data.train[file].name} line {line}")
    message = f"{same} of {len(kept)} training examples have the ids they were trained on, by the exported template"
    if different:
        message += f"; others: {', '.join(different)}"
    return same == len(kept), same / max(1, len(kept)), message


def _encoded_anew(
    subject: Subject, tokenizer: Tokenizer, wanted: set[tuple[int, int]]
) -> Iterator[tuple[tuple[int, int], list[list[int]]]]:
    data = subject.run.data
    format_: Format = data.format
    for file in sorted({file for file, _ in wanted}):
        last = max(line for number, line in wanted if number == file)
        for example in examples(read_chunks(subject.run_dir / data.train[file]), format_):
            if example.line > last:
                break
            if (file, example.line) not in wanted:
                continue
            assert not isinstance(example, Text)
            try:
                judged = judge(
                    tokenizer,
                    example,
                    capacity=data.seq_len + 1,
                    truncate=data.overlong == "truncate",
                    learns_all=subject.run.objective == "pretrain",
                )
            except InvalidData:
                yield (file, example.line), []
                continue
            ids = [part.ids for part in judged.parts]
            if (
                isinstance(example, Chat)
                and judged.fate == "kept"
                and not _as_others_encode(tokenizer, example, ids[0])
            ):
                ids = []
            yield (file, example.line), ids


def _as_others_encode(tokenizer: Tokenizer, chat: Chat, ids: list[int]) -> bool:
    """Whether who renders to text first and then encodes it, as servers do, comes to the same ids.

    They can't where somebody's text spells a control token, which is text in training.
    """
    if tokenizer.spells_control(json.dumps([chat.messages, chat.tools], ensure_ascii=False)):
        return True
    text = tokenizer.render(chat.messages, tools=chat.tools)
    plain = tokenizer.with_start(Tokens(tokenizer.backend.encode(text, add_special_tokens=False).ids, [])).ids
    # An end that the template doesn't write.
    return ids in (plain, [*plain, tokenizer.eos_id])
