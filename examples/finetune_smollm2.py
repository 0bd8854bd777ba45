"""Fine-tune SmolLM2-135M on word problems with LoRA, and see that it learned, is whole, answers and stops.

The held-out loss before and after is asked of the service; what comes down is loaded with `transformers` and `peft`;
the chat goes through the unmodified `openai` client. The data is examples/word_problems.py, or two files of yours:
--data rows.jsonl --held-out others.jsonl. It needs what `make dev` installs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import held_out
import word_problems
from scene import Scene, parser, scene, with_files
from service import Failed
from showing import as_script, console, fetch, quote, run, seconds, series

NAME = "finetune_smollm2"
SEQ_LEN = 512
TRAINED, HELD_OUT = 400, 24
LOWER_BY = 0.05
"""Nats a token by which the held-out loss of a real model must have fallen."""
SAME_LOGITS = 1e-3
"""How far the merged model may be from base and adapter."""
SAME_LOSS = 1e-3
"""How far the loss that is asked for here may be from the one that the job tells: they are sums of the same terms."""
ANSWER_TOKENS = 200


@dataclass(frozen=True)
class Learned:
    """What the example found."""

    before: float
    """Held-out loss of the base, in nats a learned token."""
    after: float
    """Of what was made of it."""
    job_says: float
    """The job's own last validation loss."""
    difference: float
    """Of the merged model's logits from those of base and adapter, at most."""
    answer: str
    finish_reason: str
    seconds: float
    """That the job took."""


def main(arguments: Sequence[str] | None = None) -> Learned:
    made = parser(__doc__, steps=50, short_steps=10)
    told = with_files(
        made,
        arguments,
        data="training rows, with --held-out (default: word problems of our own)",
        held_out="rows that are not trained on",
    )
    with scene(NAME, told) as there:
        return learn(there, told.data, told.held_out)


def learn(there: Scene, data: Path | None, others: Path | None) -> Learned:
    client = there.client
    if data is not None and others is not None:
        train, validation = there.send(data), there.send(others)
    else:
        train = there.upload("problems.jsonl", word_problems.conversations(there.share(TRAINED), seed=1))
        validation = there.upload("held-out.jsonl", word_problems.conversations(there.share(HELD_OUT), seed=2))
    rows = held_out.rows(client, validation, there.base, seq_len=SEQ_LEN)
    before = held_out.loss(client, there.base, rows)
    console.print(f"held-out loss of {there.base}: [bold]{before:.3f}[/] nats a token, {len(rows)} rows")

    job = run(client, spec(there, train, validation))
    after = held_out.loss(client, job["model"], rows)
    (*_, job_says) = series(client, job, "validation_loss")
    console.print(
        f"held-out loss of {job['model']}: [bold]{after:.3f}[/] nats a token, {before - after:.3f} less "
        f"(the job itself says {job_says:.3f})",
        soft_wrap=True,
    )
    if not after < before - (0 if there.is_rehearsal else LOWER_BY):
        raise Failed(f"it did not learn: the held-out loss was {before:.3f} and is {after:.3f}")
    if abs(after - job_says) > SAME_LOSS:
        raise Failed(f"the job says that its held-out loss is {job_says:.4f}, and the service {after:.4f}")

    result = there.folder / "result"
    count = fetch(client, job, result)
    question = word_problems.problems(1, seed=3)[0].question
    difference, expected = reload(there.base_folder, result, question)
    answer, finish_reason = ask(client, job["model"], question)
    quote("/v1/chat/completions", question, answer)
    if answer != expected:
        raise Failed(f"transformers says something else with the same weights: {expected!r}")
    if finish_reason != "stop" and not there.is_rehearsal:
        raise Failed(f"the answer does not stop by itself: finish_reason is {finish_reason}")
    console.print(
        f"\n[bold green]ok[/] {job['progress']['step']} LoRA steps in {seconds(job):.0f} s: held-out loss "
        f"{before:.3f} → {after:.3f} nats a token; {count} files verified in {result}; merged and adapter differ by "
        f"{difference:.1e} in the logits; the answer ended with {finish_reason}",
        soft_wrap=True,
    )
    return Learned(before, after, job_says, difference, answer, finish_reason, seconds(job))


def spec(there: Scene, train: str, validation: str) -> dict[str, Any]:
    return {
        "kind": "finetune",
        "name": "word-problems",
        "model": {"base": there.base},
        "data": {"train": [train], "validation": validation, "seq_len": SEQ_LEN},
        "method": {"type": "lora", "rank": 16, "alpha": 32},
        "training": {
            "steps": there.steps,
            "global_batch": 1,
            "lr": 1e-2 if there.is_rehearsal else 5e-4,
            "precision": "fp32",
            "checkpoint_every": there.steps,
        },
    }


@torch.inference_mode()
def reload(base: Path, result: Path, question: str) -> tuple[float, str]:
    """How far the two forms of the result differ, and what `transformers` answers from the merged one."""
    tokenizer: Any = AutoTokenizer.from_pretrained(result / "model")
    merged = AutoModelForCausalLM.from_pretrained(result / "model", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), result / "adapter"
    )
    messages = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    difference = (merged(**asked).logits - adapted(**asked).logits).abs().max().item()
    if difference > SAME_LOGITS:
        raise Failed(f"merged model and adapter differ by {difference:.1e} in the logits")
    whole = merged.generate(**asked, do_sample=False, max_new_tokens=ANSWER_TOKENS, pad_token_id=tokenizer.eos_token_id)
    answer: str = tokenizer.decode(whole[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return difference, answer


def ask(client: Any, model: str, question: str) -> tuple[str, str]:
    """The likeliest answer and why it ended, through the `openai` client."""
    key = client.http.headers["authorization"].removeprefix("Bearer ")
    with openai.OpenAI(base_url=f"{client.http.base_url}v1", api_key=key) as sdk:
        answered = sdk.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=ANSWER_TOKENS,
        )
    (choice,) = answered.choices
    return choice.message.content or "", choice.finish_reason


if __name__ == "__main__":
    as_script(main)
