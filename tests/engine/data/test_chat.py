"""What is learned of a conversation: the assistant's text and its end, as they stand in the whole, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.data.chat import Encoded, encode_chat, encode_choice, encode_completion
from engine.data.format import Chat, Choice, Completion, InvalidData, conversation
from engine.tokenizer import Tokenizer
from tests.engine.data import make


def learned(tokenizer: Tokenizer, encoded: Encoded) -> list[str]:
    """The runs of learned ids, as text."""
    runs: list[list[int]] = []
    before = False
    for identity, trained in zip(encoded.ids, encoded.trained, strict=True):
        if trained and not before:
            runs.append([])
        if trained:
            runs[-1].append(identity)
        before = trained
    # Some vocabularies drop the space that a text begins with, so a letter goes before.
    letter = tokenizer.encode("a")[-1]
    return [tokenizer.decode([letter, *run], skip_special=False).removeprefix("a") for run in runs]


def test_a_mask_counted_by_hand() -> None:
    # One id per byte: <|im_start|> is 258, <|im_end|> 259, a line end 10.
    encoded = encode_chat(Tokenizer.bytes(), make.talk("hi", "yo"))

    assert encoded.ids == [258, *b"user\nhi", 259, 10, 258, *b"assistant\nyo", 259, 10]
    #                      header and question: 1 + 7 + 1 + 1; header: 1 + 10; learned: y, o and the end token
    assert encoded.trained == [False] * 10 + [False] * 11 + [True] * 3 + [False]


def test_a_message_of_weight_0_is_read_but_not_learned() -> None:
    tokenizer = Tokenizer.bytes()
    encoded = encode_chat(tokenizer, make.talk("a", "!wrong", "b", "right", "c", "default"))

    assert learned(tokenizer, encoded) == ["right<|im_end|>", "default<|im_end|>"]
    assert b"wrong" in bytes(identity for identity in encoded.ids if identity < 256)


MARKED_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_mask_is_the_one_that_transformers_makes_of_a_marked_template(tmp_path: Path) -> None:
    ours = Tokenizer.train([f"hello {number} there\n" for number in range(300)], 400)
    ours.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(MARKED_CHATML)
    ours, theirs = Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    talks = [
        make.talk("hello there", "hello 1"),
        make.talk("hello", "  there \n", "there é", "\n12 hello\n\n", "x", "😀"),
        make.talk("assistant", "assistant", "user", "user"),
    ]

    for talk in talks:
        expected = theirs.apply_chat_template(
            list(talk.messages), return_dict=True, return_assistant_tokens_mask=True, tokenize=True
        )
        encoded = encode_chat(ours, talk)

        assert encoded.ids == expected["input_ids"]
        assert [int(each) for each in encoded.trained] == expected["assistant_masks"]


# Short forms of templates in the wild. Each says what is learned of ("hi", "yo", "so", "ok").
WILD = {
    "llama 2": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}",
        [" yo </s>", " ok </s>"],
    ),
    "roles in words, with a generation prompt": (
        "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        ["yo</s>", "ok</s>"],
    ),
    "roles in words, without a generation prompt": (
        "{{ bos_token }}{% for m in messages %}{{ m.role + ':\n' + m.content + eos_token }}{% endfor %}",
        ["yo</s>", "ok</s>"],
    ),
    "no end token at all": (
        "{{ bos_token }}{% for m in messages %}{{ m.role + ':\n' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}",
        ["yo\n", "ok\n</s>"],
    ),
    "an end token after the last turn only": (
        "{{ bos_token }}{% for m in messages %}{{ m.role + ':\n' + m.content }}{% if not loop.last %}\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}\nassistant:\n{% else %}{{ eos_token }}{% endif %}",
        ["yo", "ok</s>"],
    ),
    "no bos in the template": (
        "{% for m in messages %}{{ m.role + ':\n' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}",
        ["yo</s>", "ok</s>"],
    ),
    "text trimmed": (
        "{{ bos_token }}{% for m in messages %}{{ m.role + ':\n' + m.content | trim + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}",
        ["yo</s>", "ok</s>"],
    ),
    "a default system message": (
        "{{ bos_token }}{% if messages[0].role != 'system' %}Be good.\n{% endif %}"
        "{% for m in messages %}{{ m.role + ':\n' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}",
        ["yo</s>", "ok</s>"],
    ),
}


@pytest.mark.parametrize(("template", "expected"), WILD.values(), ids=WILD.keys())
def test_just_the_answers_are_learned_under(template: str, expected: list[str], tmp_path: Path) -> None:
    base = make.llama(tmp_path, template=template)
    talk = make.talk("hi", "yo", "so", "ok")
    encoded = encode_chat(base, talk)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    whole = theirs.apply_chat_template(list(talk.messages), return_dict=False)

    assert learned(base, encoded) == expected
    # BOS is id 1, and comes first: from the template, or else because the vocabulary begins texts with it. EOS is 2.
    begun = [] if whole[0] == 1 else [1]
    assert encoded.ids in ([*begun, *whole], [*begun, *whole, 2])
    assert encoded.ids.count(1) == (2 if "[INST]" in template else 1)


def test_a_token_that_an_answer_shares_with_what_asks_for_it_is_learned(tmp_path: Path) -> None:
    base = make.llama(tmp_path, template=WILD["roles in words, with a generation prompt"][0])

    # "▁the" is one piece of this vocabulary, so the space of "assistant: " is learned with the word.
    assert learned(base, encode_chat(base, make.talk("hi", "the"))) == [" the</s>"]


def test_an_answer_that_looks_like_a_header_is_learned_where_it_stands(tmp_path: Path) -> None:
    base = make.llama(tmp_path, template=WILD["roles in words, without a generation prompt"][0])

    assert learned(base, encode_chat(base, make.talk("assistant", "assistant", "user", "a"))) == [
        "assistant</s>",
        "a</s>",
    ]


def test_padding_with_the_end_token_takes_nothing_from_the_mask(tmp_path: Path) -> None:
    with_pad = make.llama(tmp_path / "a", template=WILD["text trimmed"][0], pad_token="</s>")
    without = make.llama(tmp_path / "b", template=WILD["text trimmed"][0])

    assert with_pad.pad_id == with_pad.eos_id
    assert encode_chat(with_pad, make.talk("hi", "yo")) == encode_chat(without, make.talk("hi", "yo"))


def test_what_looks_like_a_control_token_is_learned_as_text() -> None:
    tokenizer = Tokenizer.bytes()
    encoded = encode_chat(tokenizer, make.talk("<|im_end|>", "say <|im_end|>\n<|im_start|>user\n"))

    assert learned(tokenizer, encoded) == ["say <|im_end|>\n<|im_start|>user\n<|im_end|>"]
    assert [identity for identity in encoded.ids if identity > 255] == [258, 259, 258, 259]


def test_calls_are_learned_and_what_tools_say_is_not() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}
    talk = conversation(
        {
            "messages": [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "4"},
                {"role": "assistant", "content": "four"},
            ]
        }
    )
    tokenizer = Tokenizer.bytes()
    encoded = encode_chat(tokenizer, talk)

    assert learned(tokenizer, encoded) == [
        '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call><|im_end|>',
        "four<|im_end|>",
    ]
    text = tokenizer.decode(encoded.ids)
    assert "None" not in text
    assert "null" not in text


REWRITES = (
    "{{ bos_token }}{% for m in messages %}{{ m.role + ':\n' }}"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)


def test_a_template_that_rewrites_earlier_turns_is_refused_in_words(tmp_path: Path) -> None:
    base = make.llama(tmp_path, template=REWRITES)
    thinks = make.talk("a", "<think>x</think>b", "c", "<think>y</think>d")

    with pytest.raises(InvalidData, match=r"message 1 .*weight 0") as refused:
        encode_chat(base, thinks)
    assert refused.value.findings[0].line == 1
    # What it does not rewrite, or nobody learns, is fine.
    only_last = encode_chat(base, make.talk("a", "!<think>x</think>b", "c", "<think>y</think>d"))
    assert learned(base, only_last) == ["<think>y</think>d</s>"]
    assert learned(base, encode_chat(base, make.talk("a", "b", "c", "d"))) == ["b</s>", "d</s>"]


SPOILED = {
    "it refuses the roles": (
        "{% if messages[0].role == 'user' %}{{ raise_exception('no system, no talk') }}{% endif %}",
        make.talk("a", "b"),
        "no system, no talk",
    ),
    "it shows no tools": (
        "{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}",
        make.talk("a", "b", tools=[{"type": "function", "function": {"name": "f"}}]),
        "does not show tools",
    ),
    "it shows no answers": (
        "{% for m in messages %}{{ m.role + eos_token }}{% endfor %}",
        make.talk("a", "b"),
        "content of message 1",
    ),
    "it shows no calls": (
        "{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}",
        conversation(
            {
                "messages": [
                    {"role": "user", "content": "?"},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
                    },
                    {"role": "assistant", "content": "b"},
                ]
            }
        ),
        "tool_calls of message 1",
    ),
}


@pytest.mark.parametrize(("template", "talk", "says"), SPOILED.values(), ids=SPOILED.keys())
def test_what_a_template_would_lose_in_silence_is_refused(template: str, talk: Chat, says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=says):
        encode_chat(make.llama(tmp_path, template=template), talk)


def test_a_completion_is_learned_and_its_prompt_is_not(tmp_path: Path) -> None:
    base = make.llama(tmp_path)
    encoded = encode_completion(base, Completion(1, "the word:", " hello"))

    # As a sampler would send the prompt, with BOS; then the answer and EOS.
    assert encoded.ids[: sum(not each for each in encoded.trained)] == base.prompt("the word:")
    assert learned(base, encoded) == [" hello</s>"]
    assert encode_completion(Tokenizer.bytes(), Completion(1, "", "a")).trained == [True, True]


def test_a_long_conversation_is_learned_turn_by_turn() -> None:
    tokenizer = Tokenizer.bytes()
    turns: list[Any] = [f"{role}{number}" for number in range(30) for role in ("ask", "answer")]

    assert learned(tokenizer, encode_chat(tokenizer, make.talk(*turns))) == [
        f"answer{number}<|im_end|>" for number in range(30)
    ]


@pytest.mark.parametrize(
    ("question", "choice", "said"),
    [
        ("the hello:", "hello", " hello"),
        ("the hello: ", "hello", " hello"),
        ("the hello:", " hello", " hello"),
        ("the hello:\n", "the", "\nthe"),
    ],
)
def test_a_choice_is_what_transformers_reads_behind_its_question(
    tmp_path: Path, question: str, choice: str, said: str
) -> None:
    folder = make.llama_folder(tmp_path)
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    first, _ = encode_choice(ours, Choice(1, question, (choice, "other"), 0))

    assert first.ids == theirs("the hello:" + said)["input_ids"]
    assert first.trained == [place >= len(theirs("the hello:")["input_ids"]) for place in range(len(first.ids))]


@pytest.mark.parametrize("template", ["chatml", "plain"])
def test_a_choice_behind_a_conversation_counts_without_the_turns_end(template: str, tmp_path: Path) -> None:
    Tokenizer.bytes().save(tmp_path)
    tokenizer = Tokenizer.load(tmp_path, template=template)
    asked = conversation({"messages": [{"role": "user", "content": "yes or no?"}]}, training=False)
    encoded = encode_choice(tokenizer, Choice(1, asked, ("yes", "or no"), 0))

    shown = [tokenizer.decode(each.ids, skip_special=False) for each in encoded]
    before = {
        "chatml": "<|im_start|>user\nyes or no?<|im_end|>\n<|im_start|>assistant\n",
        "plain": "User: yes or no?\nAssistant: ",
    }[template]
    assert shown == [before + "yes", before + "or no"]
    # Of plain, the space before the answer is the assistant's too.
    gap = {"chatml": "", "plain": " "}[template]
    assert [learned(tokenizer, each) for each in encoded] == [[gap + "yes"], [gap + "or no"]]


def test_a_template_that_changes_a_choice_is_refused_with_the_line(tmp_path: Path) -> None:
    Tokenizer.bytes().save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content | upper }}]{% endfor %}")
    asked = conversation({"messages": [{"role": "user", "content": "q"}]}, training=False)

    with pytest.raises(InvalidData, match=r"line 7: .*template does not show"):
        encode_choice(Tokenizer.load(tmp_path), Choice(7, Chat(7, asked.messages, (False,)), ("a", "b"), 0))
