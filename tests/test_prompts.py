"""Prompts: what the model sees is what was asked, and nothing is lost or added on the way there or back."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from amir.config import SYSTEM_PROMPTS, RewardSettings
from amir.config_reader import config_yaml, load_config
from amir.errors import ConfigError
from amir.policy.load import wrap_policy
from amir.rewards import Rewards
from amir.rollout.rollout import Rollout, make_rollout
from amir.run.directory import RunDirectory
from amir.tasks import Example, load_task
from amir.tasks.decoding import decode, decode_continuation
from amir.tasks.prompts import describe_prompts, encode_prompts, prompt_ids, response_prefix
from amir.trainer import Trainer
from test_trainer import Lines, rows
from tiny import EOS, Grader, model, policy, run_config

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
CHATML = "{% for m in messages %}<s>{{ m.role }}|{{ m.content }}</s>{% endfor %}"
CHATML_PROMPT = CHATML + "{% if add_generation_prompt %}<s>assistant|{% endif %}"


def characters(template: str | None = None, special: tuple[str, ...] = (), **settings: Any) -> PreTrainedTokenizerFast:
    """Characters as tokens that decode to themselves; `special` are further special tokens."""
    words = ["<pad>", "<eos>", "<bos>", *map(chr, range(32, 127)), *special]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    if added := settings.pop("adds", None):
        made.post_processor = processors.TemplateProcessing(single=added, special_tokens=[("<bos>", 2), ("<eos>", EOS)])
    names = {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>", "padding_side": "left"}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **names | settings)
    if special:
        fast.add_special_tokens({"additional_special_tokens": list(special)})
    fast.chat_template = template
    return fast


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_completion_keeps_special_tokens_and_leaves_out_the_end_alone() -> None:
    made = policy()
    made.tokenizer = characters(special=tuple(TAGS))
    text = "<think>a</think><answer>4</answer>"
    ids = ids_of(made.tokenizer, text)
    assert len(ids) == len(TAGS) + 2
    rollout = make_rollout(made, [[5]], [[*ids, EOS], [*ids, EOS, 0, 0], ids, [EOS], [0, 9, EOS]])
    assert rollout.texts == [text, text, text, "", "<pad>&"]
    assert rollout.truncated == [False, False, True, False, False]


def test_spaces_stay_where_they_were_sampled() -> None:
    tokenizer = characters(clean_up_tokenization_spaces=True)
    text = "it 's n't , is n't it ? yes . "
    assert decode(tokenizer, ids_of(tokenizer, text)) == text
    words = {"<unk>": 0, "\u2581": 1, "\u2581yes": 2, "no": 3, "\u2581\u2581": 4}
    for decoder in (
        decoders.Metaspace(),
        decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    ):
        made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        made.decoder = decoder
        pieces = PreTrainedTokenizerFast(tokenizer_object=made)
        for ids, expected in (([2, 2], " yes yes"), ([3, 2], "no yes"), ([4, 3], "  no"), ([], "")):
            assert decode_continuation(pieces, [2, 3], ids) == expected


def test_half_a_character_is_marked_and_the_rest_is_kept() -> None:
    alphabet = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(alphabet, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    pieces = PreTrainedTokenizerFast(tokenizer_object=made)
    ids = ids_of(pieces, "4 \u20ac")
    assert decode_continuation(pieces, ids, ids) == "4 \u20ac"
    assert decode_continuation(pieces, ids, ids[:-1]) == "4 \ufffd"
    assert decode_continuation(pieces, ids[:-1], ids[-1:]) in ("\ufffd", "\u20ac")


LEFT_OUT = {
    "a path": ("./template.jinja", {}, "the user's message"),
    "a slip": ("{% for m in messages %}{{ m.contents }}{% endfor %}=", {}, "the user's message"),
    "a part": ("{% for m in messages %}{{ m.content[:2] }}{% endfor %}=", {}, "the user's message"),
    "the system prompt": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}=",
        {"system_prompt": "Be brief."},
        "the system prompt 'Be brief.'",
    ),
    "the first of two": ("{{ messages[-1].content }}=", {"system_prompt": "Be brief."}, "the system prompt"),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_a_template_that_leaves_out_what_was_asked_is_refused(case: str) -> None:
    template, changes, words = LEFT_OUT[case]
    with pytest.raises(
        ConfigError, match=rf"rows, line 2: the chat template leaves out {words}.*expected a chat_templ"
    ):
        prompt_ids(characters(template), Example("2 + 2", "4", place="rows, line 2"), run_config(**changes))


@pytest.mark.parametrize(
    ("template", "system"),
    [
        (CHATML_PROMPT, "Be brief."),
        (CHATML_PROMPT.replace("m.content", "m.content | trim"), " Be brief. "),
        (CHATML_PROMPT.replace("m.content", "m.content.replace('/no_think', '')"), "Be brief. /no_think"),
    ],
)
def test_white_space_and_control_words_may_go(template: str, system: str) -> None:
    tokenizer = characters(template)
    ids = prompt_ids(tokenizer, Example(" 2 + 2 ", "4"), run_config(system_prompt=system))
    assert "2 + 2" in decode(tokenizer, ids)
    assert decode(tokenizer, ids).endswith("<s>assistant|")


def test_no_prompt_ends_in_eos() -> None:
    config, example = run_config(), Example("2+2", "4", place="rows, line 2")
    appending = characters(adds="<bos> $A <eos>")
    assert decode(appending, prompt_ids(appending, example, config)) == "<bos>2+2"
    appending.chat_template = CHATML_PROMPT
    assert decode(appending, prompt_ids(appending, example, config)).endswith("</s><s>assistant|")
    words = r"rows, line 2: its prompt ends in the end-of-sequence token '<eos>', and a completion cannot follow"
    for template in ("{{ messages[-1].content }}<eos>", "{{ messages[-1].content }}<eos>\n"):
        with pytest.raises(ConfigError, match=words):
            prompt_ids(characters(template), example, config)
    with pytest.raises(ConfigError, match=words):
        prompt_ids(characters(), Example("2+2<eos>", "4", place="rows, line 2"), config)
    with pytest.raises(ConfigError, match="ends in the end-of-sequence token '='"):
        prompt_ids(characters("{{ messages[-1].content }}="), example, config, eos_ids=[EOS, 3 + ord("=") - 32])
    inside = characters("{{ messages[-1].content }}<eos>=")
    assert decode(inside, prompt_ids(inside, example, config)) == "2+2<eos>="


def test_bos_stands_once() -> None:
    config = run_config()
    twice = characters("<bos><bos>{{ messages[-1].content }}=")
    assert decode(twice, prompt_ids(twice, Example("2+2", "4"), config)) == "<bos>2+2="
    adding = characters(adds="<bos> $A")
    for question in ("2+2", "<bos>2+2"):
        assert decode(adding, prompt_ids(adding, Example(question, "4"), config)) == "<bos>2+2"


def test_messages_need_a_template_and_a_question_does_not() -> None:
    chat = ({"role": "user", "content": "2+2"},)
    with pytest.raises(ConfigError, match=r"task.messages: the model's tokenizer has no chat template.*set chat_templ"):
        prompt_ids(characters(), Example("2+2", "4", chat), run_config())
    with pytest.raises(ConfigError, match=r"system_prompt: the model's tokenizer has no chat template"):
        prompt_ids(characters(), Example("2+2", "4"), run_config(system_prompt="Be brief."))
    assert decode(characters(), prompt_ids(characters(), Example("2+2", "4"), run_config())) == "2+2"


PREFIXES = {
    "nothing": (CHATML_PROMPT, ""),
    "a turn's own tag": (
        (
            "{% for m in messages %}<start_of_turn>{{ m.role }}|{{ m.content }}<end_of_turn>{% endfor %}"
            "{% if add_generation_prompt %}<start_of_turn>assistant|{% endif %}"
        ),
        "",
    ),
    "think": (CHATML_PROMPT.replace("assistant|", "assistant|<think>\n"), "<think>\n"),
    "think always": (CHATML + "<s>assistant|<think>", "<think>"),
    "think behind a plain header": ("{% for m in messages %}{{ m.content }}{% endfor %}=<think>", "<think>"),
    "answer": (CHATML_PROMPT.replace("assistant|", "assistant|<answer>"), "<answer>"),
    "no thinking": (
        CHATML_PROMPT.replace("assistant|", "assistant|<think>\n\n</think>\n\n"),
        "<think>\n\n</think>\n\n",
    ),
    "earlier thoughts kept": (
        (
            "{% for m in messages %}<s>{{ m.role }}|{% if m.role == 'assistant' %}<think>\n</think>{% endif %}"
            "{{ m.content }}</s>{% endfor %}<s>assistant|<think>\n\n"
        ),
        "<think>\n",
    ),
    "one turn only": ("{% if messages | length > 1 %}{{ 1 + 'x' }}{% endif %}{{ messages[0].content }}=", ""),
}


@pytest.mark.parametrize("case", PREFIXES)
def test_what_a_template_begins_the_response_with_is_known(case: str) -> None:
    template, expected = PREFIXES[case]
    assert response_prefix(characters(template)) == expected
    assert response_prefix(characters()) == ""


def test_rewards_read_what_the_prompt_opened(tmp_path: Path) -> None:
    sampled = "two and two</think><answer>\\boxed{4}</answer>"
    example = Example("2+2", "4", columns={"prompts": "mine"}, response_prefix="<think>")
    (tmp_path / "mine.py").write_text(
        "def opened(completions, response_prefixes, rows):\n"
        "    assert rows == [{'prompts': 'mine'}], rows\n"
        "    return [float(p == '<think>' and not c.startswith(p)) for p, c in zip(response_prefixes, completions)]\n"
        "def all_others(completions, **others):\n"
        "    return [float(sorted(others) == ['answers', 'completion_ids', 'prompts'])]\n"
    )
    settings = [RewardSettings(name=name) for name in ("strict_format", "soft_format", "xml_count")]
    settings += [RewardSettings(function=f"{tmp_path}/mine.py:{name}") for name in ("opened", "all_others")]
    with Rewards(settings, ["prompts"]) as rewards:
        values = [value for [value] in rewards([example], [sampled], [[1, 2]]).values]
        assert values == [1.0, 1.0, pytest.approx(0.1), 1.0, 1.0]
        assert len(rewards.notes) == 1
        assert "column 'prompts'" in rewards.notes[0]
        assert "keyword `rows`" in rewards.notes[0]
    with Rewards(settings[:1], ["prompts"]) as shipped:
        assert shipped.notes == []


class Fixed:
    """A sampler whose every completion is the same text and EOS."""

    def __init__(self, made: Any, text: str) -> None:
        self.made, self.text = made, text

    def sample(self, prompts: list[list[int]], group_size: int, max_new_tokens: int, seed: int) -> Rollout:
        ids = [*ids_of(self.made.tokenizer, self.text), EOS]
        return make_rollout(self.made, prompts, [ids] * (len(prompts) * group_size))


def test_a_run_shows_its_prompt_and_records_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amir.rewards.runner.Correctness", Grader)
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}<think>"
    config = run_config(
        rewards=[{"name": "strict_format"}], max_steps=1, prompts_per_step=20, num_generations=2, eval_prompts=0,
        task={"name": "arithmetic", "max_operand": 4, "held_out": 0.4}, system_prompt="Be brief.", max_prompt_length=90,
        max_completion_length=60,
    )  # fmt: skip
    made = wrap_policy(model(), characters(template), config)
    sampler = Fixed(made, "so</think><answer>4</answer>")
    run = Trainer(config, made, load_task(config.task), RunDirectory(tmp_path / "run", config), Lines(), sampler)
    run.train()
    run.directory.close()
    first = f"[Be brief.][{run.prompts[0].example.question}]<think>"
    shown = [line for line in run.display.messages if "first prompt" in line]
    assert shown == [f"first prompt, {len(run.prompts[0].ids)} tokens: {first!r}"]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert all(line in log for line in shown)
    assert "the chat template begins each response with '<think>'" in log
    assert f"the task has {len(run.prompts)} training prompts and prompts_per_step = 20" in log
    for row in rows(tmp_path / "run" / "completions" / "step-000001.jsonl"):
        assert row["prompt"] == f"[Be brief.][{row['question']}]<think>"
        assert row["response_prefix"] == "<think>"
        assert row["completion"] == "so</think><answer>4</answer>"
        assert row["reward"] == 1.0


def test_what_may_be_unintended_is_reported() -> None:
    config, tokenizer = run_config(prompts_per_step=1, max_prompt_length=5000), characters()
    [prompt] = encode_prompts([Example("9" * 3000, "4")], tokenizer, config, "training", 101, print)
    shown, plain = describe_prompts([prompt], tokenizer, config)
    assert shown.startswith("first prompt, 3000 tokens: '999")
    assert len(shown) < 2100
    assert "has no chat template, so each prompt is the plain text of its question; set chat_template" in plain
    templated = characters(CHATML_PROMPT)
    assert len(describe_prompts([prompt], templated, config)) == 1


def write_run(folder: Path, **changes: object) -> str:
    fields = {"model": "x", "task": {"name": "arithmetic"}}
    (folder / "run.yaml").write_text(yaml.safe_dump(fields | changes))
    return str(folder / "run.yaml")


def test_a_template_or_a_system_prompt_may_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chat.jinja").write_text(CHATML)
    Path("system.txt").write_text("Be brief.\nBe kind.\n", encoding="utf-8-sig")
    made = load_config(write_run(tmp_path, chat_template="chat.jinja", system_prompt="system.txt"))
    assert made.chat_template == CHATML
    assert made.system_prompt == "Be brief.\nBe kind.\n"
    Path("again.yaml").write_text(config_yaml(made))
    assert load_config("again.yaml") == made


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("chat_template", "./absent.jinja", "it is not a template, and no readable file has this path (No such file"),
        ("chat_template", "chatml", "expected a Jinja template, which has {{ }} or {% %}, or the path of a file"),
        ("chat_template", "", "it is not a template"),
        ("chat_template", "x" * 5000, "(File name too long)"),
        ("chat_template", "plain.txt", "the file is not a template; expected a Jinja template"),
        ("chat_template", "empty.txt", "the file is empty"),
        ("system_prompt", "absent.txt", "there is no such file; expected an existing file"),
        ("system_prompt", "thnk", "one word that resembles such a name; nearest: 'think'"),
        ("system_prompt", "Think", "one word that resembles such a name; nearest: 'think'"),
        ("system_prompt", "callibrated", "nearest: 'calibrated'"),
    ],
)
def test_what_is_neither_text_nor_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.txt").write_text("no template")
    Path("empty.txt").write_text("\n")
    with pytest.raises(ConfigError) as refused:
        load_config(write_run(tmp_path, **{key: value}))
    assert str(refused.value).startswith(f"{key} = ")
    assert words in str(refused.value)


@pytest.mark.parametrize("text", [*SYSTEM_PROMPTS, "Be brief.", "/no_think", "Pirate", "Think step by step"])
def test_a_system_prompt_may_be_any_text(tmp_path: Path, text: str) -> None:
    assert load_config(write_run(tmp_path, system_prompt=text)).system_prompt == text
