"""From examples to prompts: system prompt, chat template, token ids, and bounds of the length."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError

from ..config import SYSTEM_PROMPTS, RunConfig
from ..errors import ConfigError
from .task import Example, Task


@dataclass(frozen=True)
class Prompt:
    """An example and its prompt's token ids."""

    example: Example
    ids: list[int]


def encode_prompts(
    examples: Iterable[Example],
    tokenizer: Any,
    config: RunConfig,
    name: str,
    vocabulary: int,
    say: Callable[[str], None],
    limit: int | None = None,
) -> list[Prompt]:
    """The first `limit` prompts of the allowed length; others are dropped and counted, or refused if too long."""
    kept: list[Prompt] = []
    seen = too_long = too_short = 0
    for example in examples:
        if limit is not None and len(kept) >= limit:
            break
        seen += 1
        ids = prompt_ids(tokenizer, example, config)
        if max(ids) >= vocabulary:
            raise ConfigError(
                f"{name} prompt {seen} has the token {max(ids)}; the model's embeddings have {vocabulary} tokens. "
                "Use the model's own tokenizer, or remove special tokens that the model does not know"
            )
        if len(ids) > config.max_prompt_length and config.overlong_prompts == "refuse":
            raise ConfigError(
                f"max_prompt_length = {config.max_prompt_length}: {example.place or f'{name} prompt {seen}'} has "
                f"{len(ids)} tokens and overlong_prompts = 'refuse'; raise max_prompt_length, or set overlong_prompts: "
                f"drop. The prompt begins {example.question[:60]!r}"
            )
        too_long += len(ids) > config.max_prompt_length
        too_short += len(ids) < config.min_prompt_length
        if config.min_prompt_length <= len(ids) <= config.max_prompt_length:
            kept.append(Prompt(example, ids))
    bounds = (
        (too_long, f"longer than max_prompt_length = {config.max_prompt_length}"),
        (too_short, f"shorter than min_prompt_length = {config.min_prompt_length}"),
    )
    for count, reason in bounds:
        if count:
            say(f"dropped {count} of {seen} {name} prompts, which are {reason} tokens")
    return kept


def prompt_ids(tokenizer: Any, example: Example, config: RunConfig) -> list[int]:
    """Token ids of the conversation in the chat template with its generation prompt; without one, of the question."""
    messages = example.chat()
    if config.system_prompt is not None:
        if messages[0]["role"] == "system":
            raise ConfigError(
                f"system_prompt = {config.system_prompt!r}: the messages already begin with one "
                f"({messages[0]['content']!r:.60}); leave system_prompt out"
            )
        text = SYSTEM_PROMPTS.get(config.system_prompt, config.system_prompt)
        messages = [{"role": "system", "content": text}, *messages]
    if tokenizer.chat_template is None:
        if len(messages) > 1:
            key = "system_prompt" if config.system_prompt is not None else "task.messages"
            raise ConfigError(f"{key}: the model's tokenizer has no chat template, which it needs; set chat_template")
        ids = tokenizer(example.question)["input_ids"]
    else:
        ids = tokenizer(_rendered(tokenizer, messages), add_special_tokens=False)["input_ids"]
    if not ids:
        source = "the chat template" if tokenizer.chat_template is not None else "its question"
        raise ConfigError(f"{example.place or 'task'}: {source} gives a prompt of 0 tokens; expected at least 1")
    return ids


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"chat_template: it fails for {messages[-1]['content']!r:.60}: {error}; correct the template"
        ) from None


def fix_date(tokenizer: Any, date: datetime) -> None:
    """Makes this date the one that the tokenizer's chat template shows, so that a resumed run has the same prompts."""
    render = tokenizer.apply_chat_template

    def render_on_date(*arguments: Any, **options: Any) -> Any:
        template = options.pop("chat_template", None) or tokenizer.chat_template
        return render(*arguments, chat_template=_on_date(template, date), **options)

    tokenizer.apply_chat_template = render_on_date


def _on_date(template: Any, date: datetime) -> Any:
    """A chat template whose `strftime_now`, a function of Transformers, is a macro that formats this date."""
    if not isinstance(template, str) or "strftime_now" not in template:
        return template
    replacements = "".join(
        f".replace({json.dumps(code)}, {json.dumps(date.strftime(code), ensure_ascii=False)})" for code in DATE_CODES
    )
    return f"{{%- macro strftime_now(format) -%}}{{{{- format{replacements} -}}}}{{%- endmacro -%}}{template}"


DATE_CODES = [
    f"%{code}" for code in (*"aAwdbBmyYHIMSfzZjpUWcxXeFTDRGuVh", "-d", "-m", "-y", "-H", "-I", "-M", "-S", "-j")
]
"""What `strftime` replaces."""


def refuse_foreign_tokenizer(tokenizer: Any, special: list[int], vocabulary: int) -> None:
    """ConfigError if the tokenizer's vocabulary, or a token that ends or pads a row, exceeds the model's embeddings.

    Added tokens, such as those for images, may exceed them; a prompt that contains one is refused.
    """
    beyond = [token for token in special if token >= vocabulary]
    if tokenizer.vocab_size > vocabulary or beyond:
        excess = f"the token {beyond[0]}" if beyond else f"{tokenizer.vocab_size} tokens"
        raise ConfigError(
            f"model: its embeddings have {vocabulary} tokens, but the tokenizer has {excess}; expected the model's own "
            "tokenizer, or resized embeddings"
        )


def refuse_missing_prompts(train: list[Prompt], held_out: list[Prompt], task: Task, config: RunConfig) -> None:
    """ConfigError if no prompt is left to train on, or none to evaluate with where `eval_prompts` needs some."""
    if not train:
        raise ConfigError(
            f"max_prompt_length = {config.max_prompt_length}, min_prompt_length = {config.min_prompt_length}: no "
            f"training prompt is left of {len(task.train)} examples; set bounds that include their lengths, or use a "
            "task with training examples"
        )
    if config.eval_prompts and not held_out:
        raise ConfigError(
            f"eval_prompts = {config.eval_prompts}: the task has no held-out examples; set eval_prompts: 0"
        )
