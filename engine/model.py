"""The decoder: embedding, layers, final norm and output, in any layout of a mesh, under Hugging Face's names.

Which text it sees is `engine.batch`'s, how weights come and go `engine.weights`', and in which order the stages of a
pipeline run `engine.passes`' business.

B rows, T tokens, S tokens of this rank, D features, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from engine import alibi
from engine.attention import Attention, Cache, Frame, Segment, views
from engine.batch import Batch
from engine.comm import TensorAxis, gather_dim, start_gather_tokens
from engine.config import ModelShape, Operation
from engine.context import ContextAxis
from engine.dropout import Draw, Dropout
from engine.ledger import Ledger
from engine.linear import ColumnLinear, PositionEmbedding, VocabEmbedding
from engine.loss import Criterion, LossParts, vocab_loss
from engine.mesh import ENDS, Mesh, alone
from engine.mlp import MLP
from engine.norm import NORMS
from engine.placement import place, placement_of
from engine.plan.passing import CHUNK_LOGITS
from engine.plan.stages import Stage, chunks
from engine.rope import Rope

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""By the names that a run has for them."""


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        shape: ModelShape,
        number: int,
        axis: TensorAxis,
        *,
        ledger: Ledger,
        unfused: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.ledger = ledger
        norm = partial(NORMS[shape.family.norm], shape.hidden_size, shape.norm_eps, axis, dtype=dtype, device=device)
        self.input_layernorm = norm()
        self.self_attn = Attention(shape, number, axis, ledger=ledger, unfused=unfused, dtype=dtype, device=device)
        self.post_attention_layernorm = norm()
        self.mlp = MLP(shape, axis, ledger=ledger, dtype=dtype, device=device)
        rate = shape.hidden_dropout if "branches" in shape.family.drops else 0.0
        self._mixed = Dropout(rate, f"model.layers.{number}.self_attn", ledger)
        self._inner = Dropout(rate, f"model.layers.{number}.mlp", ledger)

    def forward(self, x_BSD: Tensor, frame: Frame) -> Tensor:
        """B S D to B S D."""
        return self.ledger.layer(self._sublayers, x_BSD, frame)

    def _sublayers(self, x_BSD: Tensor, frame: Frame) -> Tensor:
        normed_BSD = self.ledger.output("norm", self.input_layernorm, x_BSD)
        x_BSD = x_BSD + self._mixed(self.self_attn(normed_BSD, frame), frame.draw)
        normed_BSD = self.ledger.output("norm", self.post_attention_layernorm, x_BSD)
        return x_BSD + self._inner(self.mlp(normed_BSD, frame.draw), frame.draw)


class _Trunk(nn.Module):
    """What stands under `model.` in Hugging Face's names, as far as these stages have it."""

    def __init__(
        self,
        shape: ModelShape,
        axis: TensorAxis,
        stages: Sequence[Stage],
        *,
        ledger: Ledger,
        unfused: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
        size, family = shape.hidden_size, shape.family
        norm = partial(NORMS[family.norm], size, shape.norm_eps, axis, dtype=dtype, device=device)
        self.embed_tokens: VocabEmbedding | None = None
        if first or (last and shape.tie_embeddings):
            self.embed_tokens = VocabEmbedding(shape.vocab_size, size, axis, dtype=dtype, device=device)
        if self.embed_tokens is not None and shape.tie_embeddings and not (first and last):
            # Both ends of a pipeline hold a tied embedding, and each has the gradient of its own use of it.
            weight = self.embed_tokens.weight
            place(weight, replace(placement_of(weight), copy=int(last), partial=ENDS))
        self.embed_positions: PositionEmbedding | None = None
        if first and family.positions == "learned":
            self.embed_positions = PositionEmbedding(shape.max_seq_len, size, axis, dtype=dtype, device=device)
        self.embed_norm = norm() if first and family.embed_norm else None
        rate = shape.hidden_dropout if "embedding" in family.drops else 0.0
        self._dropout = Dropout(rate, "model.embed_tokens", ledger)
        # By global number, so that a rank that holds only some layers keeps their names.
        self.layers = nn.ModuleDict(
            {
                str(number): Layer(shape, number, axis, ledger=ledger, unfused=unfused, dtype=dtype, device=device)
                for stage in stages
                for number in stage.layers
            }
        )
        self.norm = norm() if last else None

    def embedded(self, tokens_BT: Tensor, positions_BS: Tensor, draw: Draw | None) -> Tensor:
        """What the first layer reads, B S D, of all tokens' ids and of this rank's tokens' positions."""
        assert self.embed_tokens is not None, "only the first stage embeds"
        x_BSD = cast(Tensor, self.embed_tokens(tokens_BT))
        if self.embed_positions is not None:
            x_BSD = x_BSD + self.embed_positions(positions_BS)
        if self.embed_norm is not None:
            x_BSD = self.embed_norm(x_BSD)
        return self._dropout(x_BSD, draw)


@dataclass(frozen=True)
class Extension:
    """What one of several texts gets in a pass."""

    ids: Sequence[int]
    """Its next tokens; one at least."""
    cache: Cache
    """The text so far."""
    every: bool = False
    """The logits of each of the tokens are wanted, and not only of the last."""


class Decoder(nn.Module):
    """A decoder-only transformer; each rank holds the layers of its stages, and of each matrix its piece.

    `named_parameters()` have Hugging Face's names, a tied output layer none of its own; `placement_of` tells where each
    lies in the global tensor. Raises ValueError where `shape` can't be cut over the tensor or the pipeline axis.
    """

    def __init__(
        self,
        shape: ModelShape,
        mesh: Mesh,
        *,
        recompute: Collection[Operation] = (),
        unfused: bool = False,
        dtype: torch.dtype = torch.float32,
        seed: int | None = None,
        chunk_logits: int = CHUNK_LOGITS,
    ) -> None:
        """`recompute` are the operations to replay; `seed` None leaves matrices at zero, for weights to be loaded.

        `unfused` takes the papers' attention core also where nothing is dropped.
        """
        super().__init__()
        mesh.parallel.check(shape, seq_len=mesh.parallel.row_unit)
        self.shape, self.mesh, self.axis, self.context = shape, mesh, TensorAxis.of(mesh), ContextAxis.of(mesh)
        self.dtype, self.device, self.chunk_logits = dtype, mesh.device, chunk_logits
        self.ledger = Ledger(recompute)
        self.criterion: Criterion = vocab_loss
        """What the last stage makes of its output."""
        self.dropout_seed = 0
        """What dropout masks are drawn from, besides the batch's step and rows."""
        self.stages = chunks(shape, mesh.parallel, rank=mesh.rank("pipeline"))
        """Those of this rank, in the order in which a token goes through them; `run` takes their numbers here."""
        # What replicas share out is made on the host, and put on the device a layer at a time: it need not have room.
        made_on = torch.device("cpu") if mesh.parallel.is_shared_out else mesh.device
        self.model = _Trunk(
            shape, self.axis, self.stages, ledger=self.ledger, unfused=unfused, dtype=dtype, device=made_on
        )
        self.lm_head: ColumnLinear | None = None
        if self.stages[-1].last and not shape.tie_embeddings:
            self.lm_head = ColumnLinear(shape.hidden_size, shape.vocab_size, self.axis, dtype=dtype, device=made_on)
        self.piece_of: Callable[[nn.Parameter], Tensor] = nn.Parameter.detach
        """A parameter as this rank holds it; replicas that share it out gather it, and call it together."""
        positions = shape.family.positions
        self._rope = Rope(shape, mesh.device) if positions == "rope" else None
        self._slopes_H = alibi.slopes(shape.num_heads, self.axis, mesh.device) if positions == "alibi" else None
        if seed is not None:
            self._draw_weights(seed)

    @property
    def output_weight(self) -> nn.Parameter:
        """The output matrix's piece, vocabulary first; the embedding's where they are tied. Only on the last stage."""
        layer = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert layer is not None
        return layer.weight

    def loss(self, batch: Batch) -> LossParts:
        """Summed loss of the batch's labels, as `run` has it, where one stage is the whole model."""
        parts = self.run(0, batch)
        assert isinstance(parts, LossParts), "a pipeline's stages are run in turns"
        return parts

    def run(
        self, chunk: int, batch: Batch, hidden_BSD: Tensor | None = None, *, scale: float | None = None
    ) -> Tensor | LossParts:
        """This rank's stage number `chunk`: from ids, or the stage before's hidden states, to hidden states or loss.

        The loss is the sum over the labels that this context rank has, the same on every tensor rank; `scale` is what
        the caller will multiply it by, if that is known. Raises ValueError
        where T can't be shared over the context axis, or under sequence parallelism.
        """
        stage = self.stages[chunk]
        places_T = self.context.places(batch.tokens_BT.shape[1], self.device)
        own = batch if self.context.size == 1 else batch.at(places_T)
        between = self.axis.tokens(len(places_T))
        frame = self._frame(batch, own, places_T, between)
        if stage.first:
            hidden_BSD = self.model.embedded(own.tokens_BT, own.positions_BT[:, between], frame.draw)
        assert hidden_BSD is not None
        hidden_BSD = self._through(stage, hidden_BSD, frame)
        if not stage.last:
            return hidden_BSD
        return self.criterion(
            hidden_BSD, self.output_weight, own, self.axis, scale=scale, chunk_logits=self.chunk_logits
        )

    def hidden_size(self, batch: Batch) -> tuple[int, int, int]:
        """B S D of what passes between stages for this batch."""
        rows, tokens = batch.tokens_BT.shape
        between = self.axis.tokens(sum(map(len, self.context.runs(tokens))))
        return rows, between.stop - between.start, self.shape.hidden_size

    def _through(self, stage: Stage, hidden_BSD: Tensor, frame: Frame) -> Tensor:
        """The stage's layers, and in the last one the norm: B S D to B S D."""
        for number in stage.layers:
            hidden_BSD = self.model.layers[str(number)](hidden_BSD, frame)
        if not stage.last:
            return hidden_BSD
        assert self.model.norm is not None
        return cast(Tensor, self.model.norm(hidden_BSD))

    def _frame(self, batch: Batch, own: Batch, places_T: Tensor, between: slice) -> Frame:
        """What all layers of this rank need to know of a batch, of which it has `own`, the tokens at `places_T`."""
        num_tokens = batch.tokens_BT.shape[1]
        rows_B = batch.rows_B
        if rows_B is None:
            rows_B = torch.arange(batch.tokens_BT.shape[0], device=self.device)
        return Frame(
            views(
                self.context.runs(num_tokens),
                self.dtype,
                self.device,
                window=self.shape.sliding_window,
                documents_BW=batch.documents_BT,
                slopes_H=self._slopes_H,
            ),
            angles=self._angles(own.positions_BT, furthest=batch.positions_BT.max()),
            context=self.context if self.context.size > 1 else None,
            draw=Draw(self.dropout_seed, batch.step, rows_B, places_T, places_T[between]) if self.training else None,
        )

    @torch.no_grad()
    def logits(self, tokens_BT: Tensor, cache: Cache | None = None, *, last_only: bool = False) -> Tensor:
        """fp32 logits over the true vocabulary, B T V, of rows that are one document each.

        With `last_only`, those of the last token. With a `cache`, the tokens follow those it holds, and it then holds
        them too. All tensor ranks call it together, and each gets all logits. Raises ValueError beyond the capacity,
        beyond the positions that were learned, and where the model is spread over a pipeline.
        """
        self._check_whole()
        past = 0 if cache is None else cache.length
        rows, tokens = tokens_BT.shape
        own = self.axis.tokens(tokens)
        if self.model.embed_positions is not None and past + tokens > self.shape.max_seq_len:
            raise ValueError(f"{past + tokens} tokens are more than the model's {self.shape.max_seq_len} positions")
        positions_BT = torch.arange(past, past + tokens, device=self.device).expand(rows, -1)
        sees = partial(views, window=self.shape.sliding_window, slopes_H=self._slopes_H)
        frame = Frame(
            sees([range(past, past + tokens)], self.dtype, self.device),
            angles=self._angles(positions_BT),
            cache=cache,
        )
        hidden_BSD = self.model.embedded(tokens_BT, positions_BT[:, own], frame.draw)
        hidden_BSD = self._through(self.stages[0], hidden_BSD, frame)
        if cache is not None:
            cache.length += tokens
        hidden_BTD = start_gather_tokens(hidden_BSD, self.axis).wait()
        if last_only:
            hidden_BTD = hidden_BTD[:, -1:]
        logits_BTV = gather_dim(hidden_BTD @ self.output_weight.t(), 2, self.axis)
        return logits_BTV[..., : self.shape.vocab_size].float()

    @torch.no_grad()
    def extend(self, texts: Sequence[Extension]) -> list[Tensor]:
        """Let several texts go on in one pass, each from where it is; the fp32 logits N V of each.

        Texts of different lengths share the pass without padding: their tokens lie side by side in one row, and only
        attention tells them apart. Raises as `logits` does.
        """
        self._check_whole()
        runs, segments, picked, at = [], [], [], 0
        for text in texts:
            run = range(text.cache.length, text.cache.length + len(text.ids))
            if self.model.embed_positions is not None and run.stop > self.shape.max_seq_len:
                raise ValueError(f"{run.stop} tokens are more than the model's {self.shape.max_seq_len} positions")
            (view,) = views([run], self.dtype, self.device, window=self.shape.sliding_window, slopes_H=self._slopes_H)
            tokens = slice(at, at + len(run))
            at = tokens.stop
            runs.append(run)
            segments.append(Segment(tokens, view, text.cache))
            picked.append(range(tokens.start if text.every else tokens.stop - 1, tokens.stop))
        ids_BT = torch.tensor([[identity for text in texts for identity in text.ids]], device=self.device)
        positions_BT = torch.tensor([[place for run in runs for place in run]], device=self.device)
        own = self.axis.tokens(at)
        frame = Frame((), angles=self._angles(positions_BT), segments=tuple(segments))
        hidden_BSD = self.model.embedded(ids_BT, positions_BT[:, own], frame.draw)
        hidden_BSD = self._through(self.stages[0], hidden_BSD, frame)
        for text in texts:
            text.cache.length += len(text.ids)
        hidden_BTD = start_gather_tokens(hidden_BSD, self.axis).wait()
        hidden_ND = hidden_BTD[0, [place for places in picked for place in places]]
        logits_NV = gather_dim(hidden_ND @ self.output_weight.t(), 1, self.axis)[:, : self.shape.vocab_size].float()
        return list(torch.split(logits_NV, [len(places) for places in picked]))

    def _check_whole(self) -> None:
        if len(self.stages) > 1 or not (self.stages[0].first and self.stages[0].last):
            raise ValueError("a pipeline's stages give losses and no logits; load the model with parallel.pipeline=1")

    def cache(self, *, rows: int, tokens: int) -> Cache:
        """An empty cache for `logits`, or with one row for `extend`, with room for `tokens` in each of `rows`."""
        return Cache(self.shape, self.axis, rows=rows, tokens=tokens, dtype=self.dtype, device=self.device)

    def _angles(self, positions_BT: Tensor, *, furthest: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        return None if self._rope is None else self._rope.angles(positions_BT, self.dtype, furthest=furthest)

    @torch.no_grad()
    def _draw_weights(self, seed: int) -> None:
        """Normal weights; those that write into the residual are smaller by sqrt(2 layers) (Radford et al. 2019)."""
        into_residual = (2 * self.shape.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue
            std = self.shape.init_std * (into_residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)
            placement = placement_of(parameter)
            whole = torch.empty(placement.shape).normal_(0, std, generator=generator_of(seed, name))
            placement.true_part(parameter).copy_(placement.piece(whole))


def whole_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and global shape of each parameter of the whole model, in the model's order. Nothing is allocated."""
    whole = Decoder(shape, alone(torch.device("meta")))
    return {name: placement_of(parameter).shape for name, parameter in whole.named_parameters()}


def generator_of(seed: int, name: str) -> torch.Generator:
    """A host generator for one named tensor: drawn whole and then cut, a tensor is the same in every layout."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
