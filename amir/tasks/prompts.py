"""From examples to prompts: shipped system prompts, the chat template, token ids, limits of length."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from ..config import SYSTEM_PROMPTS, RunConfig
from ..errors import ConfigError
from .task import Example


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
    """Prompts of the allowed length, the first `limit` of them; the others are refused, or left out and counted."""
    kept: list[Prompt] = []
    seen = too_long = too_short = 0
    for example in examples:
        if limit is not None and len(kept) >= limit:
            break
        seen += 1
        ids = prompt_ids(tokenizer, example, config)
        if max(ids) >= vocabulary:
            raise ConfigError(f"{name} prompt {seen} holds token {max(ids)}; the model's embeddings have {vocabulary}")
        if len(ids) > config.max_prompt_length and config.overlong_prompts == "refuse":
            raise ConfigError(
                f"max_prompt_length = {config.max_prompt_length}: {example.place or f'{name} prompt {seen}'} has "
                f"{len(ids)} tokens and overlong_prompts = 'refuse'; it begins {example.question[:60]!r}"
            )
        too_long += len(ids) > config.max_prompt_length
        too_short += len(ids) < config.min_prompt_length
        if config.min_prompt_length <= len(ids) <= config.max_prompt_length:
            kept.append(Prompt(example, ids))
    for count, what in ((too_long, "exceed max_prompt_length"), (too_short, "fall short of min_prompt_length")):
        if count:
            say(f"{count} of {seen} {name} prompts {what}, left out")
    return kept


def prompt_ids(tokenizer: Any, example: Example, config: RunConfig) -> list[int]:
    """The conversation as the chat template renders it, ready for the answer; without a template, its question."""
    messages = example.chat()
    if config.system_prompt is not None:
        if messages[0]["role"] == "system":
            raise ConfigError(f"system_prompt = {config.system_prompt!r}: the messages hold one already: {messages[0]}")
        text = SYSTEM_PROMPTS.get(config.system_prompt, config.system_prompt)
        messages = [{"role": "system", "content": text}, *messages]
    if tokenizer.chat_template is None:
        if len(messages) > 1:
            key = "system_prompt" if config.system_prompt is not None else "task.messages"
            raise ConfigError(f"{key}: the model has no chat template to put it in; set chat_template")
        ids = tokenizer(example.question)["input_ids"]
    else:
        ids = tokenizer(_rendered(tokenizer, messages), add_special_tokens=False)["input_ids"]
    if not ids:
        way = "the chat template renders" if tokenizer.chat_template is not None else "its question is"
        raise ConfigError(f"{example.place or 'task'}: {way} a prompt without any token")
    return ids


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"chat_template: {error}") from None


def refuse_foreign_tokenizer(tokenizer: Any, special: list[int], vocabulary: int) -> None:
    """ConfigError where the tokenizer's vocabulary, or a token that ends or pads a row, is none of the model's.

    Tokens added to a vocabulary may lie beyond the model's, as those of images do; a prompt that holds one is refused.
    """
    beyond = [token for token in special if token >= vocabulary]
    if tokenizer.vocab_size > vocabulary or beyond:
        what = f"its token {beyond[0]}" if beyond else f"its {tokenizer.vocab_size} tokens"
        raise ConfigError(
            f"model: its embeddings hold {vocabulary} tokens, but the tokenizer has {what}; expected the model's own "
            "tokenizer, or resized embeddings"
        )
