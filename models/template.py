"""A model's chat template: messages in, the prompt text out, exactly as the model was trained to read it.

The template is text that came with the model, so it runs in Jinja's immutable sandbox and never touches files.
The set-up (trim_blocks, lstrip_blocks, raise_exception, strftime_now, tojson, loop controls) is that of transformers'
`apply_chat_template`, since templates are written against it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.errors import UserError


class ChatTemplate:
    """source: the Jinja text, or None for a model that has none (render then raises).

    bos_token and eos_token are the texts that a template may spell.  now is the clock of `strftime_now`.
    sha is the hex SHA-256 of the source, of the empty text if there is none.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str = "",
        eos_token: str = "",
        where: str = "chat template",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self.sha = hashlib.sha256((source or "").encode("utf-8")).hexdigest()
        self._where = where
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        try:
            self._template = None if source is None else environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"line {error.lineno} of the chat template: {error.message}",
                where=where,
                remedy="fetch the model's tokenizer_config.json or chat_template.jinja again",
            ) from error

    def render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt for messages [{"role": str, "content": str or text parts}, ...].

        Text parts ({"type": "text", "text": ...}) are joined.  Raises UserError that names the message for
        anything else, and for what the template itself refuses.
        """
        if self._template is None:
            raise UserError(
                "this model has no chat template", where=self._where, remedy="send a plain prompt to /v1/completions"
            )
        checked = [_checked(message, position) for position, message in enumerate(messages)]
        if not checked:
            raise UserError("messages is empty", where="messages", remedy="send at least one message")
        try:
            return self._template.render(messages=checked, add_generation_prompt=add_generation_prompt, **self._tokens)
        except jinja2.TemplateError as error:
            raise UserError(
                f"the chat template refuses these messages: {error.message}",
                where="messages",
                remedy="change roles or their order to what the model's template accepts",
            ) from error
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise UserError(
                f"the chat template failed on these messages: {error}",
                where="messages",
                remedy="change roles or their order to what the model's template accepts",
            ) from error


def _checked(message: object, position: int) -> dict[str, Any]:
    where = f"messages[{position}]"
    remedy = 'send {"role": "user", "content": "text"}'
    if not isinstance(message, dict):
        raise UserError(f"a message must be an object, not {type(message).__name__}", where=where, remedy=remedy)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise UserError(f"role must be a text, not {role!r}", where=f"{where}.role", remedy=remedy)
    if isinstance(content, list):
        parts = []
        for number, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise UserError(
                    f"content part of type {kind!r} is not supported, only text is",
                    where=f"{where}.content[{number}]",
                    remedy=remedy,
                )
            parts.append(part["text"])
        content = "".join(parts)
    if not isinstance(content, str):
        raise UserError(
            f"content must be a text, not {type(content).__name__}", where=f"{where}.content", remedy=remedy
        )
    return {**message, "content": content}


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own tojson escapes HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
