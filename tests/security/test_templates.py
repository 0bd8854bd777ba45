"""A chat template is a program in the folder of a base: it must not reach out of Jinja's sandbox, nor run for ever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine import sandbox
from engine.tokenizer import TemplateRefused
from tests.engine.data import make

SECRET = "what-no-template-may-see"
TALK = [{"role": "user", "content": "hi"}]

ESCAPES = {
    "the classes of a text": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the same through a filter": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "the same by an index": "{{ ''['__class__']['__mro__'] }}",
    "the same in pieces": "{{ ''|attr(['__cl', 'ass__']|join)|attr('__base__') }}",
    "globals of a function of Jinja": "{{ lipsum.__globals__['os'].environ }}",
    "globals of a class of Jinja": "{{ cycler.__init__.__globals__.os.environ }}",
    "joiner": "{{ joiner.__init__.__globals__.os.environ }}",
    "our own functions": "{{ raise_exception.__globals__ }}{{ dict.__call__.__globals__ }}",
    "a bound method": "{{ strftime_now.__self__.backend }}{{ strftime_now.__func__.__globals__ }}",
    "our namespace": "{{ namespace().__init__.__globals__.json.codecs.builtins.open('/etc/passwd').read() }}",
    "underscored names in a namespace": "{% set ns = namespace(__class__='x') %}{{ ns }}",
    "format of a text": "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "format_map": "{{ '{a.__class__.__mro__}'.format_map({'a': ''}) }}",
    "format that is kept first": "{% set f = '{0.__class__.__mro__}'.format %}{{ f('') }}",
    "format through attr": "{{ ('{0.__class__.__mro__}'|attr('format'))('') }}",
    "format through map": "{{ ['{0.__class__.__mro__}']|map('format', '')|list }}",
    "an attribute through map": "{{ [''] | map(attribute='__class__') | list }}",
    "a generator's frame": "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "the template itself": "{{ self.__init__.__globals__ }}{{ self._TemplateReference__context.environment }}",
    "a loop": "{% for a in [1] %}{{ loop.__class__.__init__.__globals__ }}{% endfor %}",
    "a macro": "{% macro f() %}{% endmacro %}{{ f._func.__globals__ }}{{ f.__class__ }}",
    "another file": "{% include '/etc/passwd' %}",
    "a module": "{% import 'os' as os %}{{ os.environ }}",
    "an ancestor": "{% extends '/etc/passwd' %}",
    "the turns that are counted": "{{ environment.turn }}{{ turn.__globals__ }}{{ context }}",
    "an undefined's class": "{{ nothing.__class__.__init__.__globals__ }}",
}
"""Ways out of Jinja's sandbox that are known, among them those of CVE-2016-10745, CVE-2019-10906, CVE-2024-56326 and
CVE-2025-27516."""

CHANGES = {
    "a list that was given": "{{ messages.append(1) }}",
    "a message": "{{ messages[0].update({'role': 'system'}) }}{{ messages[0].pop('role') }}",
    "by setting": "{% set messages[0].role = 'system' %}",
}

ENDLESS = {
    "loops in loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "a range without end": "{% for a in range(10**9) %}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a loop that calls itself twice": "{% for n in [60] recursive %}{% if n %}{{ loop([n - 1]) }}{{ loop([n - 1]) }}"
    "{% endif %}{% endfor %}",
    "a call of a block": "{% macro f(n) %}{% if n %}{{ caller(n) }}{% endif %}{% endmacro %}"
    "{% macro g(n) %}{% call(m) f(n) %}{{ g(m - 1) }}{{ g(m - 1) }}{% endcall %}{% endmacro %}{{ g(40) }}",
    "a counter that is taken over": "{% set turn = 1 %}{% set environment = {'turn': 1} %}"
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a power of a power": "{{ 9 ** (9 ** 9) }}",
    "a long text": "{{ 'a' * 10 ** 12 }}",
    "a long list": "{{ (10 ** 12 * [0]) | length }}",
    "a number that is squared": "{% set ns = namespace(x=3) %}{% for a in range(30) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}",
    "long numbers from a text": "{% for a in range(1000) %}{% set x = ('f' * 900000) | int(base=16) %}{% endfor %}",
    "a loop that leaves all out": "{% for a in range(9999) %}{% for b in range(9999) if false %}{% endfor %}"
    "{% endfor %}",
    "sorting": "{% set x = [1] * 500000 %}{% for a in range(1000) %}{% set y = x | sort %}{% endfor %}",
    "sorting each of many": "{% set x = [[1] * 5000] * 100 %}{{ x | map('sort') | list | length }}",
    "a filter that leaves all out": "{% for a in range(1000) %}{% for b in ([1] * 99999) | select('none') %}"
    "{% endfor %}{% endfor %}",
    "looking for what is not there": "{% set x = [1] * 90000 %}{% for a in range(1000) %}{{ 2 in x }}{% endfor %}",
    "a text that doubles": "{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}",
    "a text that doubles by itself": "{% set ns = namespace(x='ab') %}{% for a in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "a list in a list": "{% set ns = namespace(x=[], y=[]) %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "a namespace in a namespace": "{% set ns = namespace() %}{% for a in range(60) %}"
    "{% set ns.x = namespace(x=ns.x, y=ns.x) %}{% endfor %}{{ ns }}",
    "slices": "{% set x = [1] * 90000 %}{% for a in range(1000) %}{% set y = x[1:] %}{% endfor %}",
    "a wide format": "{% for a in range(1000) %}{% set y = '%9000000d' % 1 %}{% endfor %}",
    "a method": "{% set x = 'a' * 900000 %}{% for a in range(1000) %}{% set y = x.replace('a', 'b') %}{% endfor %}",
    "the items that are written": "{% set x = [1] * 90000 %}{% for a in range(1000) %}{{ x }}{% endfor %}",
}


@pytest.mark.parametrize("attack", [*ESCAPES.values(), *CHANGES.values()], ids=[*ESCAPES, *CHANGES])
def test_a_template_gets_at_nothing_but_the_conversation(
    attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    assert SECRET in os.environ.values()
    messages = [dict(message) for message in TALK]
    try:
        base = make.llama(tmp_path, template=attack)
        shown = base.render(messages)
    except ValueError:
        shown = ""
    # What does render shows an empty place where there would be an object of Python's.
    for told in (SECRET, "<class", "<function", "<module", "<built-in", "root:", "codecs", "object at 0x"):
        assert told not in shown
    assert messages == TALK


@pytest.mark.parametrize("attack", ENDLESS.values(), ids=ENDLESS)
def test_a_template_ends(attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_TURNS", 2_000)
    with pytest.raises(TemplateRefused):
        make.llama(tmp_path, template=attack).render(TALK)


def test_turns_are_counted_for_each_rendering_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_TURNS", 100)
    base = make.llama(tmp_path, template="{% for a in range(messages | length) %}{% endfor %}x")
    assert [base.render(TALK * 99), base.render(TALK * 100)] == ["x", "x"]
    with pytest.raises(TemplateRefused, match="does not end within 100 turns"):
        base.render(TALK * 101)


def test_a_long_conversation_is_rendered_by_a_template_that_looks_through_it_for_each_message() -> None:
    program = sandbox.program(
        "{% for m in messages %}{% if m == messages[-1] and messages|length == 200 %}last {% endif %}"
        "{% set rest = messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list %}"
        "{{ m.content.split('y')[0] | trim | length }}{{ rest | length }},{% endfor %}{{ messages | tojson | length }}"
    )
    messages = [{"role": "user", "content": "x" * 2000} for _ in range(200)]
    shown = sandbox.run(program, messages=messages)
    # Each is equal to the last. In JSON each has 31 characters around its text, and between two is ", ".
    expected = "".join(f"last 2000{200 - index}," for index in range(200)) + str(200 * (2000 + 31) + 199 * 2 + 2)
    assert shown == expected
