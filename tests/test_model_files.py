"""A policy has the weights of the files that were named, all of them; what cannot be so is refused with the file."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import RepositoryNotFoundError
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from amir.errors import ConfigError
from amir.policy.load import load_policy
from amir.policy.policy import Policy
from amir.policy.source import model_source
from amir.rollout.rollout import make_rollout
from tiny import model, padded, run_config, tokenizer

IDS = torch.arange(5, 15)[None]
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder; tests change copies of it."""
    folder = tmp_path_factory.mktemp("files") / "base"
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def base(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "base"))


def loaded(folder: Path | str, **changes: Any) -> Policy:
    return load_policy(run_config(model=str(folder), **changes))


def refusal(folder: Path | str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        loaded(folder, **changes)
    return str(refused.value)


def logits(made: Any) -> Tensor:
    with torch.no_grad():
        return made(IDS).logits


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


# ---- tensors that no module reads ----------------------------------------------------------------------------------


def biased(folder: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**model().config.to_dict() | {"attention_bias": True})).save_pretrained(folder)
    edit(folder / "config.json", attention_bias=False)


def deeper(folder: Path) -> None:
    edit(folder / "config.json", num_hidden_layers=1)


def with_value_head(folder: Path) -> None:
    rewrite(folder / "model.safetensors", lambda held: held | {"v_head.summary.weight": torch.ones(1, 32)})


def as_bin(folder: Path) -> None:
    with_value_head(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def as_shards(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    model().save_pretrained(folder, max_shard_size="20KB")
    deeper(folder)


UNREAD: dict[str, tuple[Change, str]] = {
    "biases": (biased, "model.layers.0.self_attn.k_proj.bias"),
    "a further layer": (deeper, "model.layers.1.input_layernorm.weight"),
    "a value head": (with_value_head, "v_head.summary.weight"),
    "a value head, saved by torch": (as_bin, "v_head.summary.weight"),
    "a further layer, in shards": (as_shards, "model.layers.1.input_layernorm.weight"),
}


@pytest.mark.parametrize("case", UNREAD)
def test_a_tensor_that_the_model_does_not_have_is_named(case: str, base: Path) -> None:
    change, key = UNREAD[case]
    change(base)
    assert f"its files have {key}" in refusal(base)


def test_two_sets_of_weights_are_refused_and_an_index_of_one_file_is_not(base: Path) -> None:
    index = base / "model.safetensors.index.json"
    names = dict.fromkeys(load_file(base / "model.safetensors"), "model.safetensors")
    index.write_text(json.dumps({"weight_map": names}))
    assert torch.equal(logits(loaded(base).base), logits(model()))
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}))
    assert "two sets of weights, model.safetensors and the shards of model.safetensors.index.json" in refusal(base)


def shards_of(folder: Path) -> list[Path]:
    """Saves the tiny model in shards instead of one file."""
    (folder / "model.safetensors").unlink()
    model().save_pretrained(folder, max_shard_size="20KB")
    return sorted(folder.glob("model-*.safetensors"))


def one_shard_more(folder: Path) -> None:
    save_file({"v_head.weight": torch.ones(3)}, folder / f"model-00009-of-{len(shards_of(folder)):05d}.safetensors")


def shards_of_another_save(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    shards_of(folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").write_bytes(whole)


def a_tensor_in_two_shards(folder: Path) -> None:
    for shard in shards_of(folder)[-2:]:
        rewrite(shard, lambda held: held | {"model.norm.weight": torch.full((32,), float(len(held)))})


def integers_by_torch(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    torch.save({key: (10 * t).to(torch.int8) for key, t in held.items()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def eight_bits(folder: Path) -> None:
    rewrite(folder / "model.safetensors", lambda held: {k: t.to(torch.float8_e4m3fn) for k, t in held.items()})


MIXED: dict[str, tuple[Change, str]] = {
    "one shard more": (
        one_shard_more,
        r"model-00009-of-00006\.safetensors is not among the files that the weights are",
    ),
    "shards of another save": (
        shards_of_another_save,
        r"model-00001-of-.* is not among .* \(model\.safetensors\); exp",
    ),
    "no index": (
        lambda folder: (shards_of(folder), (folder / "model.safetensors.index.json").unlink()),
        "restore their",
    ),
    "a tensor in two shards": (a_tensor_in_two_shards, "00005.* and .*00006.* both have model.norm.weight, with other"),
    "integers, saved by torch": (
        integers_by_torch,
        "embed_tokens.weight has values of type int8, as of a quantized mod",
    ),
    "floats of 8 bits": (eight_bits, "embed_tokens.weight has values of type F8_E4M3, as of a quantized model"),
    "an index of another kind": (
        lambda folder: (shards_of(folder), (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')),
        "no weight_map, which names the file of each tensor, in .*index.json",
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_files_that_are_no_one_set_of_weights_are_refused(case: str, base: Path) -> None:
    change, words = MIXED[case]
    change(base)
    assert re.search(words, refusal(base))


def test_shards_are_read_and_what_is_beside_the_weights_is_reported(base: Path) -> None:
    before = logits(loaded(base).model)
    held = load_file(base / "model.safetensors")
    torch.save({key: t + 1 for key, t in held.items()}, base / "pytorch_model.bin")
    policy = loaded(base)
    assert torch.equal(logits(policy.model), before)
    assert policy.notes == [
        f"model = {str(base)!r}: its weights are those of model.safetensors; pytorch_model.bin is not read"
    ]
    (base / "pytorch_model.bin").unlink()
    shards_of(base)
    assert torch.equal(logits(loaded(base).model), before)
    (base / "model.safetensors.index.json").unlink()
    for shard in base.glob("model-*"):
        shard.unlink()
    torch.save(held, base / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(logits(loaded(base).model), before)


def test_a_head_that_the_files_untie_is_untied_in_what_is_saved(base: Path, tmp_path: Path) -> None:
    head = torch.randn(101, 32)
    rewrite(base / "model.safetensors", lambda held: held | {"lm_head.weight": head})
    made = loaded(base, lora=None)
    assert (torch.equal(made.support.weight, head), made.support.tied) == (True, False)
    made.base.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False


# ---- an adapter as the model, and adapters to continue from ---------------------------------------------------------


def adapter(base: Path, folder: Path, **settings: Any) -> Any:
    """Saves an adapter whose tensors are all random; returns its model."""
    made = AutoModelForCausalLM.from_pretrained(base)
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | settings
    made = get_peft_model(made, LoraConfig(**chosen)).eval()
    for parameter in (p for p in made.parameters() if p.requires_grad):
        parameter.data = parameter.data + 0.3 * torch.randn(parameter.shape)
    made.save_pretrained(str(folder))
    return made


def continued(base: Path, folder: Path, **changes: Any) -> Policy:
    return loaded(base, lora={"r": 4, "alpha": 8, "adapter": str(folder)}, **changes)


def refused_adapter(base: Path, folder: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError, match=r"lora\.adapter = ") as refused:
        continued(base, folder, **changes)
    return str(refused.value)


@pytest.mark.parametrize("beside", ["alone", "beside a model"])
def test_an_adapter_as_model_is_refused(beside: str, base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter" if beside == "alone" else base
    adapter(base, folder)
    told = refusal(folder)
    assert f"model = {str(folder)!r}: it " in told
    assert "lora.adapter" in told
    assert ("set model to its base model" in told) == (beside == "alone")


PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank-stabilized": {"use_rslora": True},
    "weight-decomposed": {"use_dora": True},
    "ranks by pattern": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}},
    "on embeddings and head": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "whole modules too": {"modules_to_save": ["norm"]},
    "biases too": {"target_modules": ["q_proj"], "lora_bias": True},
}


@pytest.mark.parametrize("kind", PLAIN)
def test_a_saved_adapter_is_used_whole_and_is_its_own_reference(kind: str, base: Path, tmp_path: Path) -> None:
    made = adapter(base, tmp_path / "adapter", **PLAIN[kind])
    policy = continued(base, tmp_path / "adapter", beta=0.1)
    torch.testing.assert_close(logits(policy.model), logits(made), rtol=0, atol=0)
    for parameter in policy.trainable().values():
        parameter.data += 0.1
    with policy.reference():
        torch.testing.assert_close(logits(policy.model), logits(made), rtol=0, atol=0)
    assert policy.notes == []


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def without(key: str) -> Change:
    return lambda folder: rewrite(
        folder / "adapter_model.safetensors", lambda held: {k: t for k, t in held.items() if k != key}
    )


def plus(key: str, tensor: Tensor) -> Change:
    return lambda folder: rewrite(folder / "adapter_model.safetensors", lambda held: held | {key: tensor})


OTHER_ADAPTERS: dict[str, tuple[dict[str, Any], Change, str]] = {
    "a tensor is missing": ({}, without(KEY), "a tensor of the adapter is missing in its file: "),
    "a layer too many": (
        {},
        plus(KEY.replace("layers.0", "layers.2"), torch.ones(4, 32)),
        "its file has a tensor that this model's adapter does not have: ",
    ),
    "another shape": ({}, plus(KEY, torch.ones(4, 16)), "size mismatch"),
    "embeddings of its own": (
        {},
        plus("base_model.model.model.embed_tokens.weight", torch.ones(101, 32)),
        "its file has a tensor of the base model, with other values than the run's model: ",
    ),
    "a whole module is missing": (
        {"modules_to_save": ["norm"]},
        without("base_model.model.model.norm.weight"),
        "base_model.model.model.norm.weight",
    ),
    "an initialization that changes the base": (
        {},
        lambda folder: edit(folder / "adapter_config.json", init_lora_weights="pissa"),
        "init_lora_weights = 'pissa' changes the base model's weights",
    ),
    "another rank": ({"r": 8}, lambda folder: None, "it has r = 8 and alpha = 8, and the run has lora.r = 4"),
    "of a later release": (
        {},
        lambda folder: edit(folder / "adapter_config.json", peft_type="LORA_OF_TOMORROW"),
        "LORA_OF_TOMORROW",
    ),
    "a rank in words": ({}, lambda folder: edit(folder / "adapter_config.json", r="four"), "r = four"),
    "no weights": ({}, lambda folder: (folder / "adapter_model.safetensors").unlink(), "cannot be loaded ("),
    "not a number": ({}, plus(KEY, torch.full((4, 32), torch.nan)), f"{KEY} has NaN or infinity in float32; expected"),
    "integers": ({}, plus(KEY, torch.ones(4, 32, dtype=torch.int8)), f"{KEY} has values of type int8, as of a quan"),
    "no settings": (
        {},
        lambda folder: (folder / "adapter_config.json").unlink(),
        "found the files README.md, adapter_model.safetensors",
    ),
}


@pytest.mark.parametrize("case", OTHER_ADAPTERS)
def test_an_adapter_that_does_not_fit_is_refused(case: str, base: Path, tmp_path: Path) -> None:
    settings, change, words = OTHER_ADAPTERS[case]
    adapter(base, tmp_path / "adapter", **settings)
    change(tmp_path / "adapter")
    assert words in refused_adapter(base, tmp_path / "adapter")


@pytest.mark.parametrize(
    "settings", [{"layer_replication": [[0, 2], [1, 2]]}, {"bias": "all"}], ids=lambda one: min(one)
)
def test_an_adapter_of_which_a_model_can_have_one_is_continued_without_a_reference(
    settings: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    made = adapter(base, tmp_path / "adapter", **settings)
    assert f"it has {min(settings)} = " in refused_adapter(base, tmp_path / "adapter", beta=0.1)
    policy = continued(base, tmp_path / "adapter", ref_free=True)
    assert torch.equal(logits(policy.model), logits(made))


def test_the_reference_has_the_adapter_that_was_loaded_whatever_its_file_calls_the_tensors(
    base: Path, tmp_path: Path
) -> None:
    made = adapter(base, tmp_path / "adapter")
    named = {"lora_A.weight": "lora_A.default.weight", "lora_B.weight": "lora_B.default.weight"}
    rewrite(
        tmp_path / "adapter" / "adapter_model.safetensors",
        lambda held: {f"{k.rpartition('lora_')[0]}{named[k[-13:]]}": t for k, t in held.items()},
    )
    policy = continued(base, tmp_path / "adapter", beta=0.1)
    for parameter in policy.trainable().values():
        parameter.data += 0.1
    with policy.reference():
        assert torch.equal(logits(policy.model), logits(made))


def test_an_adapter_may_repeat_the_weights_of_its_base(base: Path, tmp_path: Path) -> None:
    made = adapter(base, tmp_path / "adapter")
    embeddings = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    plus("base_model.model.model.embed_tokens.weight", embeddings)(tmp_path / "adapter")
    assert torch.equal(logits(continued(base, tmp_path / "adapter").model), logits(made))


def test_an_adapter_of_another_base_is_refused_or_a_note_says_that_it_may_be(base: Path, tmp_path: Path) -> None:
    adapter(base, tmp_path / "adapter")
    other = shutil.copytree(base, tmp_path / "other")
    assert continued(other, tmp_path / "adapter").notes == []
    rewrite(other / "model.safetensors", lambda held: {k: t + 1 for k, t in held.items()})
    assert f"it was made for the base model {str(base)!r}, whose weights differ" in refused_adapter(
        other, tmp_path / "adapter"
    )
    edit(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path="someone/else")
    policy = continued(base, tmp_path / "adapter")
    assert len(policy.notes) == 1
    assert "it was made for the base model 'someone/else', and the run's model is" in policy.notes[0]
    assert policy.model.peft_config["default"].base_model_name_or_path == str(base)


# ---- weights that are saved quantized -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """The folders of a model and of the same model, saved in so many bits by a run of another dtype."""
    pytest.importorskip("bitsandbytes", reason="needs the extra `gpu`")
    from transformers import BitsAndBytesConfig

    root = tmp_path_factory.mktemp("quantized")
    torch.manual_seed(0)
    sizes = model().config.to_dict() | {"hidden_size": 64, "intermediate_size": 128}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(root / "base")
    tokenizer().save_pretrained(root / "base")

    def make(bits: str) -> tuple[Path, Path]:
        settings = {"8bit": {"load_in_8bit": True}, "4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}[bits]
        if bits == "4bit":
            settings |= {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
        if not (root / bits).exists():
            made = AutoModelForCausalLM.from_pretrained(
                root / "base", quantization_config=BitsAndBytesConfig(**settings), device_map={"": "cpu"}
            )
            made.save_pretrained(root / bits)
            tokenizer().save_pretrained(root / bits)
        return root / "base", root / bits

    return make


def gradients_of(made: Policy) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    for parameter in made.trainable().values():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    rollout = make_rollout(made, [[5, 6, 7]], [[8, 9, 10, 1], [11, 12, 13, 14]])
    made.logprobs(padded(rollout)).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in made.trainable().values()])


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_folder_in_few_bits_trains_like_its_model_quantized_by_the_run(bits: str, quantized: Any) -> None:
    base, folder = quantized(bits)
    right = gradients_of(loaded(base, quantization=bits))
    for setting in (None, bits):
        found = gradients_of(loaded(folder, quantization=setting))
        assert float((found - right).norm() / right.norm()) < 1e-4


def test_a_folder_in_few_bits_is_refused_where_it_cannot_be_trained(quantized: Any, monkeypatch: Any) -> None:
    _, folder = quantized("4bit")
    assert "its weights are saved quantized (4bit), and lora = None trains every weight" in refusal(folder, lora=None)
    assert "quantization = '8bit': model = " in refusal(folder, quantization="8bit")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "(4bit): the package bitsandbytes is not installed" in refusal(folder)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors", "of_tomorrow", "bitsandbytes"])
def test_other_quantized_weights_are_refused(method: str, base: Path) -> None:
    edit(base / "config.json", quantization_config={"quant_method": method, "bits": 4})
    assert f"its weights are saved quantized ({method}); expected unquantized weights" in refusal(base)


# ---- damaged and foreign files --------------------------------------------------------------------------------------

PAGE, POINTER = "<!DOCTYPE html><html></html>", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
CONTENTS = {
    "a web page": (PAGE, "a web page instead of the content"),
    "a pointer": (POINTER, "a Git LFS pointer instead of the content (run `git lfs pull`)"),
    "nothing": ("", "no content"),
}
FILES = ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "config.json"]
FILES += ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "added_tokens.json"]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", FILES)
def test_a_file_with_other_content_is_named(name: str, content: str, base: Path) -> None:
    if "index" in name or name.endswith(".bin"):
        (base / "model.safetensors").unlink()
    text, words = CONTENTS[content]
    (base / name).write_text(text)
    assert f"cannot be loaded ({words} in {base / name}); expected a folder with config.json" in refusal(base)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_with_other_content_is_named(name: str, content: str, base: Path, tmp_path: Path) -> None:
    adapter(base, tmp_path / "adapter")
    if name.endswith(".bin"):
        (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    text, words = CONTENTS[content]
    (tmp_path / "adapter" / name).write_text(text)
    assert f"cannot be loaded ({words} in {tmp_path / 'adapter' / name})" in refused_adapter(base, tmp_path / "adapter")


def cut(name: str) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


def cut_bin(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    cut("pytorch_model.bin")(folder)


def config(**changes: Any) -> Change:
    return lambda folder: edit(folder / "config.json", **changes)


LATER = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a"]]}}
DAMAGED: dict[str, tuple[Change, str]] = {
    "weights cut short": (cut("model.safetensors"), "model.safetensors)"),
    "weights of torch cut short": (cut_bin, "no complete file of torch.save in "),
    "settings cut short": (cut("config.json"), "config.json)"),
    "tokenizer cut short": (cut("tokenizer.json"), "tokenizer.json)"),
    "tokenizer of a later release": (
        lambda folder: edit(folder / "tokenizer.json", **LATER),
        "while reading the tokenizer's files: chat_template.jinja, tokenizer.json, tokenizer_config.json)",
    ),
    "settings in a list": (lambda folder: (folder / "config.json").write_text("[]"), "a JSON list instead of an obj"),
    "words for a number": (config(num_attention_heads="4"), "num_attention_heads"),
    "no heads": (config(num_attention_heads=0), "cannot be loaded ("),
    "a negative size": (config(hidden_size=-32), "cannot be loaded ("),
    "an unknown activation": (config(hidden_act="of_tomorrow"), "of_tomorrow"),
    "an unknown type": (config(model_type="of_tomorrow"), "of_tomorrow"),
    "an unknown dtype": (config(dtype="of_tomorrow"), "cannot be loaded ("),
    "a rope of tomorrow": (config(rope_parameters={"rope_type": "of_tomorrow"}), "of_tomorrow"),
    "a token in words": (config(eos_token_id="end"), "eos_token_id"),
    "more layers": (config(num_hidden_layers=3), "model.layers.2.input_layernorm.weight is missing"),
    "an untied head that is not there": (config(tie_word_embeddings=False), "lm_head.weight is missing"),
}


def weights(change: Callable[[Tensor], Tensor]) -> Change:
    name = "model.layers.1.mlp.up_proj.weight"
    return lambda folder: rewrite(folder / "model.safetensors", lambda held: held | {name: change(held[name])})


DAMAGED |= {
    "weights that are not numbers": (weights(lambda t: t * torch.nan), "up_proj.weight has NaN or infinity"),
    "weights as integers": (weights(lambda t: t.to(torch.int8)), "up_proj.weight has values of type I8, as of a quan"),
    "an end in words": (
        lambda folder: edit(folder / "generation_config.json", eos_token_id="end"),
        "its generation_config.json names 'end' as an end-of-sequence token; expected token ids",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_refused_with_the_file(case: str, base: Path) -> None:
    change, words = DAMAGED[case]
    change(base)
    told = refusal(base)
    assert f"model = {str(base)!r}: " in told or "model: its generation_config.json" in told
    assert words in told


def test_a_folder_without_a_model_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "optimizer.pt").touch()
    (tmp_path / "model.gguf").touch()
    assert "weights, or a hub name; found the files model.gguf, optimizer.pt" in refusal(tmp_path)
    assert "found a file" in refusal(tmp_path / "model.gguf")
    assert "found nothing at that path" in refusal(tmp_path / "absent")


def test_custom_code_is_never_run_and_nothing_is_asked(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    (base / "own.py").write_text("raise SystemExit('custom code ran')\n")
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Tokenizer", None]}
    edit(base / "config.json", auto_map=names)
    (note,) = loaded(base).notes
    assert "its config.json names custom code (AutoConfig, AutoModelForCausalLM, AutoTokenizer), which is not r" in note
    edit(base / "config.json", model_type="own")
    assert "it needs custom code from its repository (auto_map), which is never run" in refusal(base)


# ---- names on the hub -----------------------------------------------------------------------------------------------


def test_a_name_that_cannot_be_looked_up_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unreachable(self: HfApi, name: str, **options: Any) -> None:
        asked.append(name)
        raise httpx2.ConnectError("no route")

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert "not in the hub's cache on this machine, and the hub cannot be reached (ConnectError: no route)" in (
        refusal("someone/else")
    )
    refs = tmp_path / "models--someone--else" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr("amir.policy.source.find_adapter_config_file", lambda *a, **k: None)
    source = model_source("someone/else")
    assert source.arguments == {"revision": "0" * 40, "local_files_only": True}
    assert asked == ["someone/else"] * 2


def test_a_name_that_the_hub_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(self: HfApi, name: str, **options: Any) -> None:
        response = httpx2.Response(404, request=httpx2.Request("GET", "https://hub.invalid"))
        raise RepositoryNotFoundError("404: not found", response=response)

    monkeypatch.setattr(HfApi, "model_info", unknown)
    assert "no model of that name on the hub that this machine may read" in refusal("someone/else")
    assert "no such folder" in refusal("not a name")


def test_the_commit_of_a_hub_model_is_recorded_in_its_adapter() -> None:
    from amir.policy.load import wrap_policy

    made = wrap_policy(model(), tokenizer(), run_config(), "1" * 40)
    assert made.model.peft_config["default"].revision == made.revision == "1" * 40
    assert isinstance(made.model, PeftModel)
