"""Chat templates: the same text as transformers renders, the sandbox, and messages that are refused."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from models.errors import UserError
from models.store import load_reference
from models.template import ChatTemplate

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]


def test_the_tiny_template_renders_a_conversation(tiny_folder: Path) -> None:
    template = load_reference(str(tiny_folder)).template
    assert template.render(HI) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(HI, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_it_renders_what_transformers_renders(tiny_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = (
        "{{ bos_token }}{# note #}\n"
        "{% for message in messages %}\n"
        "    {% if message.role == 'tool' %}{% continue %}{% endif %}\n"
        "  [{{ message.role }}] {{ message | tojson }} {{ {'b': '<é>', 'a': [1]} | tojson(indent=2) }}\n"
        "    {% if loop.index == 3 %}{% break %}{% endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}go{{ eos_token }}{% endif %}"
    )
    messages = [{"role": role, "content": "a <b> 'c' é"} for role in ("system", "tool", "user", "assistant")]
    theirs = AutoTokenizer.from_pretrained(tiny_folder)
    ours = ChatTemplate(source, bos_token="<|im_start|>", eos_token="<|im_end|>")
    for prompt in (True, False):
        assert ours.render(messages, prompt) == theirs.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=prompt
        )


def test_text_parts_are_joined() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]) == "one two"


def test_strftime_now_uses_the_given_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render(HI) == "26 Jul 2024"


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([*HI, {"role": "user"}], "messages[1].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
    ],
)
def test_bad_messages_are_named(messages: list[Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        ChatTemplate("{{ messages }}").render(messages)
    assert caught.value.where == named


def test_what_the_template_refuses_reaches_the_user() -> None:
    with pytest.raises(UserError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(HI)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(UserError):
        ChatTemplate(source).render(HI)


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(UserError, match="line 2") as caught:
        ChatTemplate("{% for m in messages %}\n{% endif %}", where="chat_template.jinja")
    assert caught.value.where == "chat_template.jinja"


def test_no_template_says_what_to_do() -> None:
    with pytest.raises(UserError, match="no chat template") as caught:
        ChatTemplate(None).render(HI)
    assert "/v1/completions" in str(caught.value.remedy)


def test_the_digest_is_that_of_the_source() -> None:
    assert ChatTemplate("a").sha != ChatTemplate("b").sha
    assert len(ChatTemplate(None).sha) == 64
