"""From examples to prompts: system prompt, chat template, token ids, and bounds of the length.

Each prompt is checked: it has the question and the system prompt, starts with at most one BOS, and does not end in EOS.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from jinja2 import TemplateError

from ..config import SYSTEM_PROMPTS, RunConfig
from ..errors import ConfigError
from .decoding import decode
from .task import Example, Task

SHOWN_CHARACTERS = 1_000
"""Characters at each end of a prompt that a message shows."""

TEMPLATE_ERRORS = (TemplateError, ArithmeticError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class Prompt:
    """An example and its prompt's token ids."""

    example: Example
    ids: list[int]
    text: str = ""
    """the text of the token ids, special tokens included: what the model sees"""

    def __str__(self) -> str:
        """Length and text for a message, without the middle of a long one."""
        text = self.text
        if len(text) > 2 * SHOWN_CHARACTERS:
            text = f"{text[:SHOWN_CHARACTERS]} ... {text[-SHOWN_CHARACTERS:]}"
        return f"{len(self.ids)} tokens: {text!r}"


def encode_prompts(
    examples: Iterable[Example],
    tokenizer: Any,
    config: RunConfig,
    name: str,
    vocabulary: int,
    log: Callable[[str], None],
    limit: int | None = None,
    eos_ids: Sequence[int] = (),
) -> list[Prompt]:
    """The first `limit` prompts of the allowed length; others are dropped and counted, or refused if too long.

    `eos_ids`: tokens that end a completion besides the tokenizer's own EOS.
    """
    encoded: list[Prompt] = []
    prefix = response_prefix(tokenizer)
    seen = too_long = too_short = 0
    for example in examples:
        if limit is not None and len(encoded) >= limit:
            break
        seen += 1
        ids = prompt_ids(tokenizer, example, config, eos_ids)
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
            encoded.append(Prompt(replace(example, response_prefix=prefix), ids, decode(tokenizer, ids)))
    bounds = (
        (too_long, f"longer than max_prompt_length = {config.max_prompt_length}"),
        (too_short, f"shorter than min_prompt_length = {config.min_prompt_length}"),
    )
    for count, reason in bounds:
        if count:
            log(f"dropped {count} of {seen} {name} prompts, which are {reason} tokens")
    return encoded


def describe_prompts(prompts: Sequence[Prompt], tokenizer: Any, config: RunConfig) -> list[str]:
    """Lines for the start of a run: what its prompts look like, and what about them may be unintended."""
    lines = [f"first prompt, {prompts[0]}"]
    if tokenizer.chat_template is None:
        lines.append(
            "the model's tokenizer has no chat template, so each prompt is the plain text of its question; set "
            "chat_template if this is a chat model"
        )
    if prefix := prompts[0].example.response_prefix:
        lines.append(
            f"the chat template begins each response with {prefix!r}; shipped rewards read it before the completion, "
            "and your own functions get it as response_prefixes"
        )
    if len(prompts) < config.prompts_per_step:
        lines.append(
            f"the task has {len(prompts)} training prompts and prompts_per_step = {config.prompts_per_step}, so a step "
            "samples some of them more than once; add rows, or lower prompts_per_step"
        )
    return lines


def prompt_ids(tokenizer: Any, example: Example, config: RunConfig, eos_ids: Sequence[int] = ()) -> list[int]:
    """Token ids of the conversation in the chat template with its generation prompt; without one, of the question."""
    messages = _with_system_prompt(example, config)
    place, templated = example.place or "task", tokenizer.chat_template is not None
    if templated:
        text = _rendered(tokenizer, messages)
        _refuse_lost_messages(text, messages, place)
    elif example.messages or len(messages) > 1:
        key = "task.messages" if example.messages else "system_prompt"
        raise ConfigError(f"{key}: the model's tokenizer has no chat template, which it needs; set chat_template")
    else:
        text = example.question
    ids = _without_repeated_bos(tokenizer(text, add_special_tokens=not templated)["input_ids"], tokenizer)
    if not ids:
        source = "the chat template" if templated else "its question"
        raise ConfigError(f"{place}: {source} gives a prompt of 0 tokens; expected at least 1")
    return _without_eos(ids, text, tokenizer, {*eos_ids, tokenizer.eos_token_id} - {None}, place)


def _with_system_prompt(example: Example, config: RunConfig) -> list[dict[str, str]]:
    messages = example.chat()
    if config.system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise ConfigError(
            f"system_prompt = {config.system_prompt!r}: the messages already begin with one "
            f"({messages[0]['content']!r:.60}); leave system_prompt out"
        )
    text = SYSTEM_PROMPTS.get(config.system_prompt, config.system_prompt)
    return [{"role": "system", "content": text}, *messages]


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TEMPLATE_ERRORS as error:
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


def _refuse_lost_messages(text: str, messages: list[dict[str, str]], place: str) -> None:
    """ConfigError if the system prompt or a message of the user is not in the rendered text, white space aside."""
    shown = _words(text)
    for message in messages:
        if message["role"] in ("system", "user") and _words(message["content"]) not in shown:
            what = "the system prompt" if message["role"] == "system" else "the user's message"
            raise ConfigError(
                f"{place}: the chat template leaves out {what} {message['content']!r:.60} (it gives {text!r:.120}); "
                "expected a chat_template that shows it"
            )


def _words(text: str) -> str:
    """The words of a text, except control words such as `/no_think`, which some templates read and do not show."""
    return " ".join(word for word in text.split() if not word.startswith("/"))


def _without_repeated_bos(ids: list[int], tokenizer: Any) -> list[int]:
    """Ids with one BOS at their start, where a template or a row and the tokenizer both add it."""
    while tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
        ids = ids[1:]
    return ids


def _without_eos(ids: list[int], text: str, tokenizer: Any, eos_ids: set[int], place: str) -> list[int]:
    """Ids without the EOS that some tokenizers append; ConfigError if the text itself ends in EOS."""
    for eos in sorted(eos_ids):
        ending = decode(tokenizer, [eos])
        if ending and (text.endswith(ending) or text.rstrip().endswith(ending)):
            raise ConfigError(
                f"{place}: its prompt ends in the end-of-sequence token {ending!r}, and a completion cannot follow "
                "that; expected a chat_template that ends with the beginning of the assistant's turn, or a question "
                "without this token"
            )
    length = len(ids)
    while length > 1 and ids[length - 1] in eos_ids:
        length -= 1
    return ids[:length]


def response_prefix(tokenizer: Any) -> str:
    """What the chat template writes of the assistant's response itself, such as "<think>\\n"; empty if nothing.

    It begins with a tag, and is what follows the turn's header in the generation prompt. The header is what the
    template writes before an earlier response.
    """
    question, response, last = "[first question]", "[first response]", "[last question]"
    if tokenizer.chat_template is None:
        return ""
    turns = zip(("user", "assistant", "user"), (question, response, last), strict=True)
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TEMPLATE_ERRORS:
        return ""
    before, shown, _ = text.partition(question)[2].partition(response)
    header = re.split(r"<(\w+)>(?=.*</\1>)", before, maxsplit=1, flags=re.DOTALL)[0] if shown else ""
    ending = text.rpartition(last)[2] if last in text else ""
    begun = _after_common_start(ending, header)
    tag = re.search(r"<[A-Za-z]\w*>", begun)
    return begun[tag.start() :] if tag else ""


def _after_common_start(text: str, other: str) -> str:
    """What follows in `text` the longest start that it shares with `other`."""
    for place, (first, second) in enumerate(zip(text, other, strict=False)):
        if first != second:
            return text[place:]
    return text[len(other) :]


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
