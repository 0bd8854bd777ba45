"""Text to ids and back, conversations to text: `tokenizers` and sandboxed Jinja, in the manner of `transformers`.

What a control token is, the template decides: one that it writes becomes its id, and the same characters in somebody's
text stay text. Which ids are trained is `engine.data.chat`'s business.
"""

from __future__ import annotations

import builtins
import json
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, cast

import jinja2
from tokenizers import AddedToken, Encoding, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from engine import sandbox

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
SPECIALS = (END_OF_TEXT, PAD, START_OF_TURN, END_OF_TURN)
"""Part of every tokenizer made here, so that a model made from text alone can learn to chat without new rows."""

_TOOLS_INTRO = (
    "You may call these functions. To call one, answer with a line of JSON that has its name and its arguments, "
    "between <tool_call> and </tool_call>."
)

CHATML = """\
{%- set ns = namespace(system='') %}
{%- if messages and messages[0].role in ['system', 'developer'] %}
    {%- set ns.system = messages[0].content %}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if ns.system %}
        {{- ns.system + '\\n\\n' }}
    {%- endif %}
    {{- 'TOOLS_INTRO' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (loop.first and tools and ns.system) %}
        {{- '<|im_start|>' + ('system' if message.role == 'developer' else message.role) + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {%- set called = {'name': call.function.name, 'arguments': call.function.arguments} %}
            {{- '<tool_call>' + called | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""".replace("TOOLS_INTRO", _TOOLS_INTRO)
"""For a tokenizer that has the two turn tokens and no template of its own."""

PLAIN = """\
{%- if tools %}
    {{- 'TOOLS_INTRO' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '\\n\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ['system', 'developer'] %}
        {{- message.content | trim + '\\n\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- 'Assistant:' }}
        {%- if message.content | trim %}
            {{- ' ' + message.content | trim }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set called = {'name': call.function.name, 'arguments': call.function.arguments} %}
            {{- '\\n<tool_call>' + called | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- eos_token + '\\n' }}
    {%- else %}
        {{- ('Tool' if message.role == 'tool' else 'User') + ': ' + message.content | trim + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:' }}
{%- endif %}
""".replace("TOOLS_INTRO", _TOOLS_INTRO)
"""For a tokenizer without turn tokens: roles in words, and the end-of-text token where the assistant stops."""

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_CONTEXT = 8
"""Ids that what follows is decoded with: some vocabularies drop a space that nothing stands before."""
_UNFINISHED = 3
"""Bytes that may be the beginning of a character."""
_GARBAGE = 32
"""Ids without the end of a character after which nobody waits for one any more."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Private-use characters, of which text has none in practice; drawn anew in each process, so that no file can name them.
_NONCE = "".join(chr(0xF0000 + secrets.randbelow(0xFFF0)) for _ in range(4))
_FIRST_ALIAS = 0x100000
_VEILS = "".join(chr(0xE000 + place) for place in range(0x1900))


class TemplateRefused(ValueError):
    """The chat template can't show this conversation; the text is the template's own reason."""


class InvalidTokenizer(ValueError):
    """There is no tokenizer that can be used there; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids, and the characters each stands for."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Tokenizer:
    """One vocabulary with its template. Made by `load`, `train` or `bytes`; unchanged afterwards."""

    def __init__(
        self,
        backend: Backend,
        *,
        roles: Mapping[str, str],
        templates: Mapping[str, str],
        controls: Iterable[str] = (),
        starts_text: bool | None = None,
        source: Path | None = None,
        template: str | None = None,
        now: datetime | None = None,
    ) -> None:
        """`roles` maps `bos_token` and its like to text; `templates` has `default`, or is empty for a named one.

        `template` names one that is used instead. `now` is what a template that asks for the date is told; None: the
        moment at which it asks.

        `controls` are control tokens that only a configuration file calls so; the roles are among them anyway.
        """
        self.backend = backend = _with_controls(backend, {*roles.values(), *controls})
        # Left in the file by whoever saved it after use; rows are cut and filled elsewhere, and never in silence.
        backend.no_truncation()
        backend.no_padding()
        self.source = source
        """Folder whose files are copied as they are by `save`; None writes new ones."""
        self.roles = dict(roles)
        self.specials = {
            token.content: identity for identity, token in backend.get_added_tokens_decoder().items() if token.special
        }
        """Control tokens and their ids."""
        self._ids = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._ids.values()) + 1
        """Rows that an embedding needs."""
        self.bos_id = self._id_of("bos_token")
        self.eos_id = self._id_of("eos_token")
        self.unk_id = self._id_of("unk_token")
        pad = self._id_of("pad_token")
        self.pad_id = next(identity for identity in (pad, self.eos_id, 0) if identity is not None)
        """What fills a row. May be an id that text uses too: padding is told by its place, never by its id."""
        self.start_ids = self._start(starts_text)
        """What every text begins with: BOS, or nothing."""
        self.now = now
        self.template_name = template or ("own" if templates else self._fitting())
        """own, chatml or plain."""
        if template is not None:
            templates = {}
            self._check_named(template)
        self.templates = dict(templates) or {"default": self._named(self.template_name)}
        self._marking = self._marking_backend()
        self._compiled = {name: _program(text) for name, text in self.templates.items()}
        self._read = {name for text in self.templates.values() for name in sandbox.variables(text)}

    # ---- Made ----

    @classmethod
    def load(cls, folder: Path, *, template: str | None = None, now: datetime | None = None) -> Self:
        """From a folder in Hugging Face layout."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidTokenizer(
                f"{folder.name} has no tokenizer.json; write one with transformers' AutoTokenizer.save_pretrained"
            )
        with _told("tokenizer.json can't be read: {}"):
            backend = Backend.from_file(str(path))
        config = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
        roles = {role: text for role in _ROLES if (text := _content(config.get(role))) is not None}
        by_id = {identity: text for text, identity in backend.get_vocab(with_added_tokens=True).items()}
        for name in ("generation_config.json", "config.json"):
            for role in ("bos_token", "eos_token"):
                identity = _json(folder / name).get(f"{role}_id")
                identity = identity[0] if isinstance(identity, list) and identity else identity
                if role not in roles and isinstance(identity, int) and identity in by_id:
                    roles[role] = by_id[identity]
        starts = config.get("add_bos_token")
        return cls(
            backend,
            roles=roles,
            templates=_templates(folder, config),
            controls=_controls(config),
            starts_text=starts if isinstance(starts, bool) else None,
            source=folder,
            template=template,
            now=now,
        )

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """From a lone `tokenizer.json`; the roles of its control tokens are told by their usual names."""
        with _told("the tokenizer file can't be read: {}; upload a tokenizer.json"):
            backend = Backend.from_file(str(path))
        vocab = backend.get_vocab(with_added_tokens=True)
        roles = {
            role: name for role, names in _USUAL.items() for name in reversed(names) if name in vocab
        }  # the first of the usual names is written last, and stays
        if "eos_token" not in roles:
            known = ", ".join(_USUAL["eos_token"])
            raise InvalidTokenizer(f"the tokenizer file has no end-of-text token; add one of {known}")
        return cls(backend, roles=roles, templates={})

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Byte-level BPE on `texts`, which are read once and not kept. Little text gives fewer entries than asked."""
        backend = _byte_level(models.BPE())
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
            initial_alphabet=alphabet,
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend, roles=_OWN_ROLES, templates={})

    @classmethod
    def bytes(cls) -> Self:
        """Ids 0 to 255 are the bytes; the control tokens follow."""
        backend = _byte_level(models.BPE(vocab=dict(_BYTES), merges=[]))
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
        return cls(backend, roles=_OWN_ROLES, templates={})

    def _id_of(self, role: str) -> int | None:
        text = self.roles.get(role)
        return None if text is None else self._ids.get(text)

    def _start(self, starts_text: bool | None) -> tuple[int, ...]:
        with _told(_UNCUT):
            bare = self.backend.encode("a", add_special_tokens=False).ids
            full = self.backend.encode("a", add_special_tokens=True).ids
        before = tuple(full[: next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)])
        if starts_text is None:
            return before
        return () if not starts_text or self.bos_id is None else (self.bos_id,)

    def _fitting(self) -> str:
        return "chatml" if {START_OF_TURN, END_OF_TURN} <= self.specials.keys() else "plain"

    def _check_named(self, name: str) -> None:
        lacking = sorted({START_OF_TURN, END_OF_TURN} - self.specials.keys())
        if name == "chatml" and lacking:
            raise InvalidTokenizer(
                f"the template chatml needs the control tokens {START_OF_TURN} and {END_OF_TURN}, and this vocabulary "
                f"has no {' and no '.join(lacking)}; use plain, or the base's own"
            )

    def _named(self, name: str) -> str:
        return ("{{- bos_token }}\n" if self.start_ids else "") + {"chatml": CHATML, "plain": PLAIN}[name]

    # ---- Text ----

    def encode(self, text: str, *, follows: bool = False) -> list[int]:
        """The ids of `text`; what looks like a control token is text too. `follows`: it goes on after other text."""
        return next(self.encode_all([(text, follows)]))

    def encode_all(self, pieces: Sequence[tuple[str, bool]]) -> Iterator[list[int]]:
        """As `encode` of each text and whether it follows other text, on all cores."""
        # Some vocabularies put a space before whatever comes first: a line end goes first, and its tokens go away.
        texts = ["\n" + text if follows and text else text for text, follows in pieces]
        for (text, follows), encoding in zip(pieces, self._cut_all(texts), strict=True):
            yield self._checked(self._after_line_end(text, encoding) if follows and text else encoding.ids)

    def _cut_all(self, texts: list[str]) -> Iterable[Encoding]:
        try:
            with _told(_UNCUT):
                return self._marking.encode_batch(texts, add_special_tokens=False)
        except InvalidTokenizer:
            # One by one, so that it is raised at the text that is to blame.
            return map(self._cut, texts)

    def _cut(self, text: str) -> Encoding:
        with _told(_UNCUT):
            return self._marking.encode(text, add_special_tokens=False)

    def _after_line_end(self, text: str, encoding: Encoding) -> list[int]:
        offsets = encoding.offsets
        first = next((at for at, (_, end) in enumerate(offsets) if end > 1), len(offsets))
        if first < len(offsets) and offsets[first][0] < 1:
            # The line end grew together with the text: a control token keeps it apart.
            return self._cut(self._barrier + text).ids[1:]
        return encoding.ids[first:]

    def prompt(self, text: str) -> list[int]:
        """The ids that ask a model to go on with `text`."""
        return [*self.start_ids, *self.encode(text)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text; bytes that are not whole characters become U+FFFD, and ids without a token nothing."""
        with _told("the vocabulary can't write these ids as text: {}"):
            return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def piece(self, identity: int) -> tuple[str, builtins.bytes]:
        """What one id stands for within a text: characters, U+FFFD for bytes that are none, and the bytes themselves.

        A control token stands for its name.
        """
        token = self.backend.id_to_token(identity)
        if token is None:
            return "", b""
        if identity in self._forbidden:
            return token, token.encode()
        if found := _BYTE_TOKEN.fullmatch(token):
            raw = bytes([int(found[1], 16)])
            return raw.decode(errors="replace"), raw
        # After another token: where a text begins, some vocabularies drop a space.
        text = self.decode([*self._letter, identity])[len(self.decode(self._letter)) :]
        if "\ufffd" in text and all(symbol in _BYTES for symbol in token):
            return text, bytes(_BYTES[symbol] for symbol in token)
        return text, text.encode()

    @cached_property
    def _letter(self) -> list[int]:
        return self.backend.encode("a", add_special_tokens=False).ids

    def stream(self, *, after: Sequence[int] = (), skip_special: bool = True) -> TextStream:
        """Decodes a growing text, which goes on after that of the ids `after`, if any."""
        return TextStream(self, after, skip_special=skip_special)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Where generation ends: EOS, and what the template puts after an assistant's text."""
        ends = [self.eos_id, self.turn_end_id]
        return tuple(dict.fromkeys(identity for identity in ends if identity is not None))

    @cached_property
    def turn_end_id(self) -> int | None:
        """The control token that the template ends an assistant's turn with; None where it ends with none."""
        question = {"role": "user", "content": "a"}
        try:
            asked = self.mark([question], add_generation_prompt=True)
            answered = self.mark([question, {"role": "assistant", "content": "b"}])
        except TemplateRefused:
            return None
        last = self.last_control(answered if not answered.startswith(asked) else answered[len(asked) :])
        return None if last is None else last[0]

    # ---- Conversations ----

    @property
    def chat_template(self) -> str:
        return self.templates["default"]

    def reads(self, variable: str) -> bool:
        """Whether the template looks at `variable`, such as `tools`."""
        return variable in self._read

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation as one text, as `transformers` renders it. Raises TemplateRefused."""
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        speaks_developer = "developer" in self.templates[name]
        try:
            return sandbox.run(
                self._compiled[name],
                messages=[_plain(message, speaks_developer) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=self._strftime_now,
                **self.roles,
            )
        except jinja2.TemplateError as refused:
            raise TemplateRefused(str(refused)) from refused
        except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError, RecursionError) as broken:
            raise TemplateRefused(f"{type(broken).__name__}: {broken}") from broken

    def _strftime_now(self, form: str) -> str:
        return (self.now or datetime.now()).strftime(form)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of a conversation, with one BOS where the vocabulary has texts begin with it."""
        marked = self.mark(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return self.with_start(self.encode_marked(marked)).ids

    def with_start(self, tokens: Tokens) -> Tokens:
        """`tokens` with what every text begins with, once."""
        count = len(self.start_ids)
        if not count or tuple(tokens.ids[:count]) == self.start_ids:
            return tokens
        return Tokens([*self.start_ids, *tokens.ids], [(0, 0)] * count + tokens.offsets)

    def mark(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """As `render`, with each control token that the template wrote, and no other, replaced by its alias."""
        spoken = json.dumps([list(messages), list(tools or ())], ensure_ascii=False)
        if not self.spells_control(spoken):
            text = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
            return self._control.sub(lambda found: self._alias_of[found[0]], text)
        # Veil what people wrote, so that it can be told from what the template wrote.
        veil = next(
            character for character in _VEILS if character not in spoken and character not in self.chat_template
        )
        text = self.render(
            [_veiled(message, self._control, veil) for message in messages],
            tools=[_veiled(tool, self._control, veil) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
        )
        text = re.sub(f"(?:{self._control.pattern})(?!{veil})", lambda found: self._alias_of[found[0]], text)
        return text.replace(veil, "")

    def spells_control(self, text: str) -> bool:
        """Whether the text has what looks like a control token."""
        return self._control.search(text) is not None

    def encode_marked(self, marked: str) -> Tokens:
        """The ids of a marked text. Offsets count its characters, an alias as its own length."""
        encoding = self._cut(marked)
        ids = [self._unaliased.get(identity, identity) for identity in encoding.ids]
        self._checked([identity for identity in encoding.ids if identity not in self._unaliased])
        return Tokens(ids, encoding.offsets)

    def last_control(self, marked: str) -> tuple[int, int] | None:
        """Id and end of the last control token in a marked text."""
        found = list(self._aliases.finditer(marked))
        return (self.specials[self._text_of[found[-1][0]]], found[-1].end()) if found else None

    def without_controls(self, marked: str) -> str:
        """The marked text without its aliases."""
        return self._aliases.sub("", marked)

    def control_spans(self, marked: str) -> list[tuple[int, int]]:
        """Start and end of each control token in a marked text."""
        return [found.span() for found in self._aliases.finditer(marked)]

    def _marking_backend(self) -> Backend:
        """A copy that reads control tokens as text and their aliases as control tokens."""
        texts = sorted(self.specials, key=lambda text: (-len(text), text))
        # The character that tells aliases apart comes first: two of them have no common beginning.
        self._alias_of = {text: chr(_FIRST_ALIAS + place) + _NONCE for place, text in enumerate(texts)}
        self._text_of = {alias: text for text, alias in self._alias_of.items()}
        self._barrier = chr(_FIRST_ALIAS + len(texts)) + _NONCE
        self._control = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._aliases = re.compile("|".join(map(re.escape, self._text_of)) or r"(?!)")
        flags = self.backend.get_added_tokens_decoder()
        backend = Backend.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        backend.add_tokens(
            [
                AddedToken(
                    alias,
                    single_word=False,
                    lstrip=flags[self.specials[text]].lstrip,
                    rstrip=flags[self.specials[text]].rstrip,
                    normalized=flags[self.specials[text]].normalized,
                    special=False,
                )
                for alias, text in self._text_of.items()
            ]
            + [AddedToken(self._barrier, normalized=False, special=False)]
        )
        vocab = backend.get_vocab(with_added_tokens=True)
        self._unaliased = {vocab[alias]: self.specials[text] for alias, text in self._text_of.items()}
        self._forbidden = frozenset(self.specials.values()) - {self.unk_id}
        return backend

    def _checked(self, ids: list[int]) -> list[int]:
        """`ids` of text. A vocabulary that has its control tokens among its words can't write them as text."""
        if not self._forbidden.isdisjoint(ids):
            named = next(self.backend.id_to_token(identity) for identity in ids if identity in self._forbidden)
            raise ValueError(f"the text spells the control token {named!r}, which this vocabulary can't write as text")
        return ids

    # ---- Kept ----

    def save(self, folder: Path) -> None:
        """Hugging Face layout: `transformers.AutoTokenizer` gives the same ids and renders the same conversations."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.source is not None:
            for name in _FILES:
                if (self.source / name).is_file():
                    shutil.copyfile(self.source / name, folder / name)
            if self.template_name == "own" and (self.source / "additional_chat_templates").is_dir():
                shutil.copytree(
                    self.source / "additional_chat_templates", folder / "additional_chat_templates", dirs_exist_ok=True
                )
            self._say_roles(folder)
        else:
            self.backend.save(str(folder / "tokenizer.json"))
            _write(folder / "tokenizer_config.json", json.dumps(self._config(), indent=2, ensure_ascii=False) + "\n")
        # Where the base keeps several templates in its configuration, a file would hide them.
        if len(self.templates) == 1 or (self.source is not None and (self.source / "chat_template.jinja").is_file()):
            _write(folder / "chat_template.jinja", self.chat_template)

    def _say_roles(self, folder: Path) -> None:
        """Write the roles that the source's files of the tokenizer leave to those of the model."""
        path = folder / "tokenizer_config.json"
        said = {**_json(folder / "special_tokens_map.json"), **_json(path)}
        left = {role: text for role, text in self.roles.items() if _content(said.get(role)) is None}
        if left or not path.is_file():
            config = (_json(path) if path.is_file() else self._config()) | left
            _write(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")

    def _config(self) -> dict[str, Any]:
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.roles,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 10**30,
        }


class TextStream:
    """Decodes one id at a time, holding back what is not yet a whole character."""

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = (), *, skip_special: bool = True) -> None:
        self._decode = partial(tokenizer.decode, skip_special=skip_special)
        self._ids = list(after[-_CONTEXT:])
        self._start = 0
        """Ids before it have been given out and are context no longer."""
        self._given = len(self._ids)
        """Ids before it have been given out."""
        self._ahead = 0
        """Characters of later ids that have been given out too."""

    def push(self, identity: int) -> str:
        """The text that `identity` completes; often some, sometimes none."""
        self._ids.append(identity)
        return self._advance(final=False)

    def finish(self) -> str:
        """What is left, as it stands."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        # Decoding from a little before the new ids keeps what depends on their neighbours, such as a leading space.
        pending = len(self._ids) - self._given
        shown = len(self._decode(self._ids[self._start : self._given])) + self._ahead
        now = self._decode(self._ids[self._start :])
        if now.endswith("\ufffd") and not final and pending <= _GARBAGE:
            # Bytes that may yet become a character stay back. Where more ids wait than one can have, they are the last.
            unfinished = min(_UNFINISHED, len(now) - len(now.rstrip("\ufffd")))
            text = now[shown : len(now) - unfinished] if pending > _UNFINISHED else ""
            self._ahead += len(text)
            return text
        if len(now) <= shown:
            return ""
        self._start, self._given, self._ahead = self._given, len(self._ids), 0
        return now[shown:]


_UNCUT = "the vocabulary can't cut this text: {}; use a base whose tokenizer.json does"


@contextmanager
def _told(words: str) -> Iterator[None]:
    """Whatever the library raises becomes an InvalidTokenizer of `words`, with its reason in their braces.

    It raises bare Exceptions, and panics, which are none: of an expression that goes back over a text too often, or of
    a table that is damaged. Whoever serves many must outlive them.
    """
    try:
        yield
    except BaseException as broken:
        if not isinstance(broken, Exception) and type(broken).__module__ != "pyo3_runtime":
            raise
        raise InvalidTokenizer(words.format(broken)) from broken


_OWN_ROLES = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": PAD}
_USUAL = {
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>", END_OF_TEXT),
    "eos_token": ("</s>", END_OF_TEXT, "<|end_of_text|>", "<eos>"),
    "unk_token": ("<unk>",),
    "pad_token": (PAD, "<pad>"),
}


def _with_controls(backend: Backend, controls: set[str]) -> Backend:
    """The same vocabulary with those of `controls` that it has marked as control tokens."""
    added = backend.get_added_tokens_decoder()
    vocab = backend.get_vocab(with_added_tokens=True)
    marked = {token.content for token in added.values() if token.special}
    missing = sorted(text for text in controls - marked if text in vocab)
    if not missing:
        return backend
    whole = json.loads(backend.to_str())
    known = {each["content"]: each for each in whole["added_tokens"]}
    for text in missing:
        if text not in known:
            known[text] = {"id": vocab[text], "content": text, "single_word": False, "lstrip": False, "rstrip": False}
            known[text]["normalized"] = False
        known[text]["special"] = True
    whole["added_tokens"] = sorted(known.values(), key=lambda each: int(each["id"]))
    return Backend.from_str(json.dumps(whole))


def _controls(config: Mapping[str, Any]) -> Iterator[str]:
    """Control tokens beyond the roles that a tokenizer_config.json names."""
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or ()
    for token in extra.values() if isinstance(extra, dict) else extra:
        if (text := _content(token)) is not None:
            yield text
    for token in (config.get("added_tokens_decoder") or {}).values():
        if token.get("special") and (text := _content(token)) is not None:
            yield text


def _byte_level(model: models.Model) -> Backend:
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_symbols() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}


_BYTES = {symbol: byte for byte, symbol in _byte_symbols().items()}


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as broken:
        raise InvalidTokenizer(f"{path.name} is not valid JSON: {broken}") from broken
    if not isinstance(value, dict):
        raise InvalidTokenizer(f"{path.name} must be a JSON object")
    return value


def _content(token: object) -> str | None:
    """The text of a token that is written as a string or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name, in the order of precedence that `transformers` has: files, then the configuration."""
    found = {"default": folder / "chat_template.jinja"}
    found |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    named: Any = {name: _template_file(path) for name, path in found.items() if path.is_file()}
    if not named and (kept := config.get("chat_template")) is not None:
        named = {"default": kept} if isinstance(kept, str) else kept
        if isinstance(kept, list) and all(isinstance(each, dict) for each in kept):
            named = {each.get("name"): each.get("template") for each in kept}
        if not isinstance(named, dict) or not all(isinstance(part, str) for part in (*named, *named.values())):
            raise InvalidTokenizer(
                "chat_template in tokenizer_config.json must be a string, or a list of objects with name and template"
            )
    if named and "default" not in named:
        raise InvalidTokenizer(
            f"none of the chat templates is called default, and there are {', '.join(sorted(named))}; call one so"
        )
    return cast(dict[str, str], named)


def _template_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as broken:
        raise InvalidTokenizer(f"{path.name} is not UTF-8: {broken}; save it as that") from broken


def _plain(message: Mapping[str, Any], speaks_developer: bool) -> dict[str, Any]:
    """A message as templates expect it: no None, older names for reasoning, and roles that they know."""
    plain = {name: value for name, value in message.items() if value is not None}
    plain.setdefault("content", "")
    if plain.get("role") == "developer" and not speaks_developer:
        plain["role"] = "system"
    if "reasoning_content" in plain:
        plain.setdefault("thinking", plain["reasoning_content"])
    return plain


def _veiled(value: Any, control: re.Pattern[str], veil: str) -> Any:
    """`value` with `veil` after whatever looks like a control token, in every text within it."""
    if isinstance(value, str):
        return control.sub(lambda found: found[0] + veil, value)
    if isinstance(value, Mapping):
        return {_veiled(name, control, veil): _veiled(part, control, veil) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_veiled(part, control, veil) for part in value]
    return value


def _program(text: str) -> jinja2.Template:
    try:
        return sandbox.program(text)
    except jinja2.TemplateError as broken:
        raise InvalidTokenizer(f"the chat template is not valid Jinja: {broken}") from broken


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="")
