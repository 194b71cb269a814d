"""The model card of a run's result: what was trained, on what, how well, with which versions, and how to load it."""

import json
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from amir_kernels import __version__

from ..config import SYSTEM_PROMPTS, RunConfig
from .machine import versions

LOAD = """\
from {library} import {model_class}
from transformers import AutoTokenizer

folder = "."  # the folder of this file
model = {model_class}.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = {inputs}
sampling = {{"do_sample": True, "temperature": {temperature}, "top_k": 0, "top_p": 1.0}}
output = model.generate(**inputs, max_new_tokens={tokens}, **sampling)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
"""


def model_card(config: RunConfig, tokenizer: Any, base: str, revision: str | None, run: Path) -> str:
    """README.md for the result of the run in `run`; `base` is the folder or hub name of the model it trained."""
    kind = "every weight" if config.lora is None else f"a LoRA adapter (r = {config.lora.r})"
    at = f" at commit {revision}" if revision else ""
    changed = config.model_dump(mode="json", exclude_defaults=True)
    settings = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True)
    parts = [
        f"---\n{_metadata(config, base, revision)}\n---",
        f"# {run.resolve().name}",
        f"AMIR-GRPO trained {kind} of `{config.model}` (`{base}`{at}).",
        f"## Data\n\n{_data(config)}",
        f"## Results\n\n{_results(run)}",
        f"## Loading\n\n```python\n{_loading(config, tokenizer)}```",
        f"## Settings\n\nThose that differ from their defaults:\n\n```yaml\n{settings}```",
        f"## Versions\n\n{_versions()}",
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(config: RunConfig, base: str, revision: str | None) -> str:
    """What the model hub reads. A base model in a folder has no name there."""
    data = ModelCardData(
        base_model=base if revision else None,
        library_name="transformers" if config.lora is None else "peft",
        pipeline_tag="text-generation",
        tags=["amir-grpo", "grpo", *([] if config.lora is None else ["lora"])],
    )
    return data.to_yaml()


def _data(config: RunConfig) -> str:
    task = ", ".join(f"{key} {value!r}" for key, value in config.task.model_dump(exclude_defaults=True).items())
    rewards = ", ".join(f"`{reward.label}` (weight {reward.weight:g})" for reward in config.rewards)
    return f"Task: {task}.\n\nRewards: {rewards}."


def _results(run: Path) -> str:
    """The first and last steps and evaluations, as a table."""
    table = ["| after step | | reward | success |", "| --- | --- | --- | --- |"]
    for name, file in (("training", "metrics.jsonl"), ("held out", "evaluations.jsonl")):
        rows = _rows(run / file)
        for row in rows[:1] + rows[1:][-1:]:
            values = (row.get(key) for key in ("reward", "success"))
            shown = " | ".join("–" if value is None else f"{value:.3f}" for value in values)
            table.append(f"| {row['step']} | {name} | {shown} |")
    return "\n".join(table)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _loading(config: RunConfig, tokenizer: Any) -> str:
    text = SYSTEM_PROMPTS.get(config.system_prompt or "", config.system_prompt)
    messages = [{"role": "system", "content": text}] if text else []
    messages.append({"role": "user", "content": "..."})
    inputs = 'tokenizer("...", return_tensors="pt")'
    if tokenizer.chat_template is not None:
        options = 'add_generation_prompt=True, return_dict=True, return_tensors="pt"'
        inputs = f"tokenizer.apply_chat_template({messages!r}, {options})"
    return LOAD.format(
        library="transformers" if config.lora is None else "peft",
        model_class="AutoModelForCausalLM" if config.lora is None else "AutoPeftModelForCausalLM",
        inputs=inputs,
        tokens=config.max_completion_length,
        temperature=config.temperature,
    )


def _versions() -> str:
    return ", ".join(f"{name} {version}" for name, version in (versions() | {"amir-grpo": __version__}).items())
