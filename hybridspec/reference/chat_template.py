"""A model's chat template, rendered in a jinja2 sandbox: model folders are data, not code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hybridspec.errors import ModelError, PromptError


@dataclass(frozen=True)
class ChatTemplate:
    """A parsed template that turns a conversation into prompt text."""

    template: jinja2.Template

    @classmethod
    def parse(cls, text: str, *, source: Path) -> ChatTemplate:
        """Parse template text; `source` is the file that messages name.

        Raises:
            ModelError: the text is no jinja2 template.
        """
        try:
            return cls(_environment().from_string(text))
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"{source}: chat template line {error.lineno} is wrong ({error.message}); "
                "it must be a jinja2 template: download the file again or correct it"
            ) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        special_tokens: Mapping[str, str],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Return the prompt text.

        Raises:
            PromptError: the template refuses these messages or cannot handle them.
        """
        try:
            return self.template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **special_tokens,
            )
        except _TemplateRefusal as error:
            raise PromptError(
                f"the chat template refuses these messages: {error}; "
                "send the roles in an order that the model knows"
            ) from None
        except Exception as error:  # a template is foreign code: it can raise anything
            raise PromptError(
                f"the chat template cannot render these messages ({error}); "
                "every message needs a role and text: correct the messages"
            ) from None


class _TemplateRefusal(jinja2.TemplateError):
    """Raised by a template through `raise_exception(...)`."""


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(value: Any, indent: int | None = None) -> str:
    # jinja2's own filter escapes for HTML, which would change the prompt's tokens.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
