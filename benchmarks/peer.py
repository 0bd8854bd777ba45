"""The peer: the loop that most people write around `transformers`, under bf16 autocast, on the very same batches."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from benchmarks.turns import Turns
from engine.config import RunConfig
from engine.data.loader import Loader
from engine.data.prepare import open_prepared


def main(folder: Path) -> None:
    """Train what `folder` holds for as long as there are turns. The text must be prepared already."""
    turns = Turns()
    run = RunConfig.model_validate_json((folder / "run.json").read_bytes())
    training = run.training
    rows, micro = training.global_batch, training.micro_batch
    loader = Loader(open_prepared(folder).train, seed=training.seed, global_batch=rows, micro_batch=micro)
    model = LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.float32, use_cache=False).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.lr, betas=training.betas, weight_decay=training.weight_decay, fused=True
    )
    turns.ready()
    step = 0
    while True:
        (batch,) = loader.step(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch.tokens_BT, labels=batch.labels_BT, shift_labels=batch.labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip or torch.inf)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        turns.done(loss.item())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
