"""What a world runs for the tests of weights and adapters, apart from them: its ranks need not import transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine import lora, mesh, weights
from engine.config import Lora, Parallel
from engine.placement import placement_of
from engine.together import together
from tests.engine.net import nets


def there_and_back(folder: Path, parallel: Parallel) -> None:
    grid = mesh.build(parallel)
    weights.save(nets.loaded(folder, grid=grid), folder / "ours", torch.float32)
    grid.barrier()
    grid.close()


def written_where_a_piece_cannot_be(folder: Path) -> str:
    """What a rank raises; the second of many pieces has a folder in its place."""
    (folder / "piece-1.safetensors.part").mkdir(exist_ok=True)
    grid = mesh.build(Parallel(tensor=2))
    model = nets.decoder(nets.shape(), grid=grid)
    try:
        with together(grid):
            weights.write(model, folder, weights.whole_state(model), torch.float32, shard_bytes=4000)
    except Exception as error:
        return type(error).__name__
    finally:
        grid.close()
    return "nothing"


def weights_against_one_rank(changes: dict[str, Any], sequence: bool, recompute: str) -> tuple[float, float, int]:
    """Relative distance of the loss and of the worst gradient, and how many weights this rank holds."""
    shape = nets.shape(**changes)
    batch = nets.batch(packed=True)
    loss, expected = nets.trained(nets.uneven(nets.decoder(shape)), batch)
    grid = nets.grid(sequence=sequence)
    model = nets.uneven(nets.decoder(shape, grid=grid, recompute=recompute))
    got_loss, got = nets.trained(model, batch)
    grid.close()
    held = sum(parameter.numel() for parameter in model.parameters())
    return abs(got_loss / loss - 1), nets.apart(got, expected), held


def adapters_against_one_rank(
    sequence: bool, recompute: str, dropout: float, **changes: Any
) -> tuple[float, float, bool, dict[str, Tensor]]:
    by = Lora(rank=4, alpha=6.0, dropout=dropout)
    batch = nets.batch(packed=True)
    loss, expected = nets.trained(nets.adapted(nets.uneven(nets.decoder(nets.shape(**changes))), by), batch)
    grid = nets.grid(sequence=sequence)
    model = nets.adapted(nets.uneven(nets.decoder(nets.shape(**changes), grid=grid, recompute=recompute)), by)
    got_loss, got = nets.trained(model, batch)
    replicated = {
        name: got[name] for name, p in model.named_parameters() if name in got and placement_of(p).dim is None
    }
    grid.close()
    worst = max(nets.distance(got[name], expected[name]) for name in expected)
    return abs(got_loss / loss - 1), worst, got.keys() == expected.keys(), replicated


def adapter_read_where_one_rank_can_not(folder: Path, base: Path, parallel: Parallel) -> str:
    """Load an adapter, of which rank 1 finds a file that is none; what each rank raises."""
    grid = mesh.build(parallel)
    model = nets.adapted(nets.loaded(base, grid=grid))
    own = folder.with_name(f"rank-{grid.world_rank}")
    lora.save_adapter(model, nets.LORA, folder, base_name="base")
    grid.barrier()
    shutil.copytree(folder, own)
    if grid.world_rank == 1:
        (own / lora.WEIGHTS).write_bytes(b"none")
    try:
        lora.load_adapter(model, own)
    except Exception as error:
        return type(error).__name__
    finally:
        grid.close()
    return "nothing"


def adapter_saved(folder: Path, base: Path, parallel: Parallel) -> tuple[dict[str, Tensor], bool]:
    """Save an adapter; what its base is with the adapter merged in, and whether loading it gives back the same bits."""
    grid = mesh.build(parallel)
    model = nets.adapted(nets.loaded(base, grid=grid))
    lora.save_adapter(model, nets.LORA, folder, base_name="base")
    merged = dict(lora.merged_state(model, base))
    grid.barrier()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    lora.load_adapter(model, folder)
    same = all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    grid.close()
    return merged, same


def logits_of(changes: dict[str, Any]) -> Tensor:
    grid = nets.grid(sequence=False)
    logits = nets.decoder(nets.shape(**changes), grid=grid).logits(nets.batch().tokens_BT)
    grid.close()
    return logits
