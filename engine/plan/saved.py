"""Bytes that autograd saves of one micro-batch in one stage of a pipeline, from forward to backward, to the byte.

What a layer saves is `engine.plan.recompute`'s business; here is what stands around the layers, and what all of them
share.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from engine.config import Operation
from engine.plan.recompute import FP32, Setting, cost
from engine.plan.stages import Stage

ID = 8
"""Bytes of a token's id."""


@dataclass(frozen=True)
class Saved:
    """Of one pass."""

    layers: int
    ends: int
    """What the embedding, the last norm and the loss save."""
    frame: int
    """Rotary angles, and what is added to scores: the same for all layers."""

    @property
    def total(self) -> int:
        return self.layers + self.ends + self.frame


@dataclass(frozen=True)
class Layers:
    """What a layer keeps, worked out once for all ranks and stages of a setting."""

    setting: Setting
    _known: dict[tuple[frozenset[Operation], bool], int] = field(default_factory=dict)

    def keep(self, operations: frozenset[Operation], *, reached: bool = True) -> int:
        """Bytes of one layer that replays these. `reached` is `Setting.reached`."""
        asked = operations, reached
        if asked not in self._known:
            self._known[asked] = cost(replace(self.setting, reached=reached), operations).saved
        return self._known[asked]


def by_pass(layers: Layers, stage: Stage, operations: frozenset[Operation]) -> Saved:
    """What one micro-batch leaves in `stage` where `operations` are replayed."""
    setting = layers.setting
    kept = len(stage.layers) * layers.keep(operations)
    if setting.lora is not None and 0 in stage.layers:
        # Nothing learns below the first layer, and so its input needs no gradient.
        kept += layers.keep(operations, reached=False) - layers.keep(operations)
    return Saved(kept, ends(setting, stage, operations), frame(setting, stage, operations))


def ends(setting: Setting, stage: Stage, operations: Collection[Operation]) -> int:
    """What is saved outside the layers of a stage."""
    return stage.first * _embedded(setting, operations) + stage.last * _judged(setting)


def _embedded(setting: Setting, operations: Collection[Operation]) -> int:
    shape, parallel = setting.shape, setting.parallel
    if setting.lora is not None:
        return 0
    # Ids within the rank's part of the vocabulary, and with several parts which are not in it.
    saved = setting.tokens * (ID + (parallel.tensor > 1))
    if shape.family.positions == "learned":
        saved += ID * setting.own_tokens
    if shape.family.embed_norm:
        saved += normed(setting)
    # Where whole layers are replayed, masks within them are kept, if anything is.
    replays_masks = "dropout" in operations and "layer" not in operations
    if shape.hidden_dropout and "embedding" in shape.family.drops and not replays_masks:
        saved += setting.own_tokens * shape.hidden_size
    return saved


def _judged(setting: Setting) -> int:
    """What the last norm keeps, and the loss's gradient, which is made with the loss."""
    shape, parallel = setting.shape, setting.parallel
    saved = normed(setting) + setting.element * setting.own_tokens * shape.hidden_size
    if parallel.is_shared_out and setting.lora is None:
        # That of the output's weight has no buffer to be added to.
        saved += FP32 * -(-shape.vocab_size // parallel.tensor) * shape.hidden_size
    return saved


def normed(setting: Setting) -> int:
    """What a norm over the tokens keeps: its input and one or two statistics."""
    statistics = 2 if setting.shape.family.norm == "layer" else 1
    return setting.own_tokens * (setting.element * setting.shape.hidden_size + FP32 * statistics)


def frame(setting: Setting, stage: Stage, operations: Collection[Operation]) -> int:
    """What all layers of a pass share, as long as one of them holds it."""
    lora, shape = setting.lora, setting.shape
    if not stage.layers:
        return 0
    # The first layer's attention saves nothing where neither its input nor an adapter in it learns.
    adapted = set(lora.targets_in(shape)) if lora is not None else set()
    reached = lora is None or stage.layers != range(1)
    attends = reached or not adapted.isdisjoint({"q", "k", "v"})
    holds = "layer" in operations or (attends and "attention_core" in operations)
    turned = holds or reached or not adapted.isdisjoint({"q", "k"})
    # What makes whole scores keeps what became of them instead.
    masked = holds or (attends and not shape.attention_dropout)
    return turned * angles(setting) + masked * masks(setting)


def angles(setting: Setting) -> int:
    """Bytes of cosines and sines of rotary positions."""
    rotary = setting.shape.family.positions == "rope"
    return rotary * setting.element * setting.tokens * setting.shape.head_dim


def masks(setting: Setting) -> int:
    """Bytes of what is added to the scores of one pass, for all its layers: a number for each query and key.

    Each row has its own where documents are packed into it, and each head under ALiBi.
    """
    if not setting.has_mask:
        return 0
    shape = setting.shape
    heads = shape.num_heads // setting.parallel.tensor if shape.family.positions == "alibi" else 1
    return setting.element * heads * (setting.scores if setting.packed else setting.scores // setting.micro_batch)
