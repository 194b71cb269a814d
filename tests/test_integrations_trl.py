"""The drop-in for TRL: its fused head beside TRL's own, and trainers with and without it."""

from copy import deepcopy

import pytest
import torch

from amir_kernels import pair_logits
from amir_kernels.integrations import trl
from dropins import V, error


@pytest.fixture
def peer(monkeypatch):
    """TRL itself, without its telemetry."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    pytest.importorskip("datasets")
    return pytest.importorskip("trl", reason="needs the extra `bench`")


def causal_model(family):
    import transformers

    sizes = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = {
        "llama": lambda: transformers.LlamaConfig(**sizes, **heads),
        "gemma2": lambda: transformers.Gemma2Config(**sizes, **heads, head_dim=8, final_logit_softcapping=5.0),
        "granite": lambda: transformers.GraniteConfig(**sizes, **heads, logits_scaling=8.0),
        "cohere": lambda: transformers.CohereConfig(**sizes, **heads, logit_scale=0.25),
        "falcon": lambda: transformers.FalconConfig(
            vocab_size=V, hidden_size=32, num_hidden_layers=1, num_attention_heads=4
        ),
    }[family]()
    made = transformers.AutoModelForCausalLM.from_config(config)
    made.get_output_embeddings().weight.data *= 50  # a forgotten cap or scale must show
    return made


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere"])
def test_trl_fused_head_equals_its_own(peer, family):
    ours = causal_model(family)
    theirs = deepcopy(ours)
    arguments = {"temperature": 0.7, "outputs": ("log_probs", "entropy")}
    trl.add_fused_lm_head(ours, **arguments)
    peer.trainer.utils.add_fused_lm_head(theirs, **arguments)
    ids = torch.randint(V, (3, 9))
    labels = ids.clone()
    labels[:, :4] = labels[1, 6:] = -100
    attention_mask = torch.ones(3, 9, dtype=torch.long)
    for call in ({"labels": labels}, {"shift_labels": labels}, {"labels": labels, "num_items_in_batch": 50}):
        results = []
        for model in (ours, theirs):
            out = model(input_ids=ids, attention_mask=attention_mask, fused_lm_head=True, **call)
            total = out.loss + 0.3 * out.entropy.square().sum()
            gradients = torch.autograd.grad(total, list(model.parameters()))
            results.append([out.log_probs, out.entropy, out.label_mask.float(), out.loss, *gradients])
        assert error(*results) < 1e-4
    assert error([ours(ids).logits], [theirs(ids).logits]) == 0
    assert error([ours(ids, labels=ids).loss], [theirs(ids, labels=ids).loss]) == 0


def test_trl_fused_head_in_float32(peer):
    """A bfloat16 model with a float32 head, under autocast: only with cast_lm_head_to_fp32 is the head not rounded."""
    model = causal_model("llama")
    model.model.to(torch.bfloat16)
    ids = torch.randint(V, (3, 9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(ids).last_hidden_state[:, :-1].float()
    logits = hidden @ model.lm_head.weight.T
    exact = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    for cast in (True, False):
        patched = deepcopy(model)
        trl.add_fused_lm_head(patched, cast_lm_head_to_fp32=cast)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = patched(input_ids=ids, labels=ids, fused_lm_head=True)
        assert got.entropy is None
        assert ((got.log_probs - exact).abs().max() < 1e-5) == cast


def even_characters(prompts, completions, completion_ids, **_):
    return [sum(token % 2 for token in ids) / 5 for ids in completion_ids]


def make_trainer(peer, folder, trainer_class, model, reward=even_characters, lora=None, **settings):
    import datasets

    from tiny import tokenizer

    options = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 5,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "beta": 0.04,
        "temperature": 0.8,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    return trainer_class(
        model=model,
        reward_funcs=reward,
        args=peer.GRPOConfig(output_dir=str(folder), **options | settings),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["1+1", "2+22", "3+3", "4+4"]}),
        processing_class=tokenizer(),
        peft_config=lora,
    )


def train(peer, folder, trainer_class, steps=3, model_dtype=torch.float32, tied=None, **settings):
    """A trained trainer, the samples of each generation, and the logged losses."""
    from transformers import AutoModelForCausalLM

    from tiny import model

    made = model().to(model_dtype)
    if tied is not None:
        made.config.tie_word_embeddings = tied
        if tied:
            made.tie_weights()
        else:
            made.lm_head.weight = torch.nn.Parameter(made.lm_head.weight.detach().clone())
    made.save_pretrained(folder / "model")  # TRL loads its reference from where the policy came from
    samples = []

    def reward(prompts, completions, completion_ids, **columns):
        samples.append(completion_ids)
        return even_characters(prompts, completions, completion_ids, **columns)

    policy = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=model_dtype)
    trainer = make_trainer(peer, folder, trainer_class, policy, reward, max_steps=steps, **settings)
    trainer.train()
    return trainer, samples, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("adapter", [None, {}, {"modules_to_save": ["lm_head"]}])
def test_trl_three_steps_give_the_same_losses_and_samples(peer, tmp_path, adapter):
    """With LoRA the reference is the policy without its adapter."""
    settings = {"entropy_coef": 0.01, "gradient_accumulation_steps": 2}
    if adapter is not None:
        settings["lora"] = pytest.importorskip("peft").LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **adapter)
    _, our_samples, ours = train(peer, tmp_path, trl.grpo_trainer(), **settings)
    _, their_samples, theirs = train(peer, tmp_path, peer.GRPOTrainer, **settings)
    assert our_samples == their_samples
    assert len(ours) == len(theirs) == 3
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4
    assert min(map(abs, theirs)) > 1e-3


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_trl_trains_a_lora_on_the_head(peer, tmp_path):
    """TRL refuses one. A step of plain SGD moves it by the gradient of the loss from the model's own logits."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    settings = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    settings |= {"loss_type": "grpo", "beta": 0.0, "lora": lora}
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        train(peer, tmp_path, peer.GRPOTrainer, steps=1, **settings)
    seen = {}

    class Recorded(trl.grpo_trainer()):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            if not seen:
                trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
                gain = logprobs_of(self.model, inputs, 0.8) * inputs["advantages"][:, None]
                mask = inputs["completion_mask"]
                plain = -((gain * mask).sum(1) / mask.sum(1)).mean()
                wanted = torch.autograd.grad(plain, list(trained.values()))
                seen.update({k: (p.detach().clone(), g) for (k, p), g in zip(trained.items(), wanted, strict=True)})
            return loss

    trainer, _, _ = train(peer, tmp_path, Recorded, steps=1, **settings)
    after = dict(trainer.model.named_parameters())
    assert any("lm_head.lora_A" in name for name in seen)
    for name, (before, gradient) in seen.items():
        moved = (before - after[name].detach()) / 0.1
        assert (moved - gradient).norm() < 1e-3 * gradient.norm(), name
        assert gradient.norm() > 0
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        train(peer, tmp_path, trl.grpo_trainer(), steps=1, cast_lm_head_to_fp32=True, **settings)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("tied", "adapter"), [(False, None), (True, None), (False, {}), (False, {"modules_to_save": ["lm_head"]})]
)
def test_trl_float32_head_trains_as_trls_own_does(peer, tmp_path, tied, adapter):
    """TRL gives the head a forward of its own; a bfloat16 model whose head and log-probs are float32.

    TRL 1.16 itself fails with an adapter on a model with a tied head.
    """
    settings = {"cast_lm_head_to_fp32": True, "steps": 2, "model_dtype": torch.bfloat16, "tied": tied}
    if adapter is not None:
        settings["lora"] = pytest.importorskip("peft").LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **adapter)
    ours, our_samples, our_losses = train(peer, tmp_path, trl.grpo_trainer(), **settings)
    _, their_samples, their_losses = train(peer, tmp_path, peer.GRPOTrainer, **settings)
    assert our_samples == their_samples
    assert our_losses == pytest.approx(their_losses, abs=1e-4)
    base = ours.model.get_base_model() if adapter is not None else ours.model
    head = base.get_output_embeddings()
    assert head.weight.dtype == torch.float32
    assert "forward" in vars(head)  # TRL samples by it, so it stays
    assert base.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert (head.weight is base.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("adapter", [False, True])
def test_trl_float32_head_has_the_gradients_of_trls_own(peer, tmp_path, tied, adapter):
    """One loss of the same tokens; with an adapter on a tied head TRL fails, which the drop-in names."""
    from tiny import model

    given, grads = None, {}
    for name, trainer_class in (("ours", trl.grpo_trainer()), ("theirs", peer.GRPOTrainer)):
        torch.manual_seed(0)
        made = model().to(torch.bfloat16)
        if not tied:
            made.config.tie_word_embeddings = False
            made.lm_head.weight = torch.nn.Parameter(made.lm_head.weight.detach().clone())
        lora = pytest.importorskip("peft").LoraConfig(r=4, init_lora_weights=False) if adapter else None
        options = {"cast_lm_head_to_fp32": True, "beta": 0.0, "lora": lora}
        if tied and adapter:
            expected = (
                (ValueError, r"tied to its input embeddings; untie them") if name == "ours" else (Exception, None)
            )
            with pytest.raises(expected[0], match=expected[1]):
                make_trainer(peer, tmp_path, trainer_class, made, **options)
            continue
        trainer = make_trainer(peer, tmp_path, trainer_class, made, **options)
        trainer.current_gradient_accumulation_steps = 1
        if given is None:
            ids, mask = torch.randint(3, 101, (4, 9)), torch.ones(4, 9, dtype=torch.long)
            given = {"prompt_ids": ids[:, :4], "completion_ids": ids[:, 4:], "num_items_in_batch": torch.tensor(20)}
            given |= {"prompt_mask": mask[:, :4], "completion_mask": mask[:, 4:], "advantages": torch.randn(4)}
        trainer._compute_loss(trainer.model, dict(given)).backward()
        grads[name] = {k: p.grad.float() for k, p in trainer.model.named_parameters() if p.grad is not None}
    for name, theirs in grads.get("theirs", {}).items():
        assert (grads["ours"][name] - theirs).norm() < 0.02 * theirs.norm(), name
    assert (tied and adapter) or grads["ours"].keys() == grads["theirs"].keys() != set()


class Work:
    """Peak of the bytes allocated and flops of the products, custom ops included, from torch's profiler."""

    def __enter__(self):
        self.profile = torch.profiler.profile(profile_memory=True, with_flops=True)
        self.profile.__enter__()
        return self

    def __exit__(self, *error):
        self.profile.__exit__(*error)
        events = sorted(self.profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        alive = torch.tensor([event.nbytes() for event in events if event.name() == "[memory]"]).cumsum(0)
        self.peak = int(alive.max())
        self.flops = sum(event.flops or 0 for event in self.profile.events())


def test_trl_memory_is_no_higher_and_dead_rows_cost_less(peer, tmp_path):
    """A micro-batch of 8 completions of a model that is mostly head, of which 0 or 6 are in dead groups, or padding."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=20_000, **sizes)
    work = {}
    for name, trainer_class in (("ours", trl.grpo_trainer()), ("theirs", peer.GRPOTrainer)):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        model.lm_head.weight.requires_grad_(False)
        trainer = make_trainer(peer, tmp_path, trainer_class, model, beta=0.0)
        for case, live, length in (("all live", 8, 64), ("dead", 2, 64), ("padding", 8, 16)):
            ids = torch.randint(3, 20_000, (8, 80))
            mask = (torch.arange(64) < length).long().expand(8, 64)
            inputs = {"prompt_ids": ids[:, :16], "completion_ids": ids[:, 16:], "completion_mask": mask}
            inputs |= {"prompt_mask": torch.ones(8, 16, dtype=torch.long), "num_items_in_batch": mask.sum()}
            inputs["advantages"] = torch.randn(8) * (torch.arange(8) < live)
            for _ in range(2):  # the first warms caches up
                trainer.current_gradient_accumulation_steps = 1
                with Work() as done:
                    trainer._compute_loss(model, dict(inputs)).backward()
                model.zero_grad()
            work[name, case] = done
    for case in ("all live", "dead", "padding"):
        ours, theirs = work["ours", case], work["theirs", case]
        assert ours.peak <= theirs.peak, (case, ours.peak, theirs.peak)
        assert ours.flops <= theirs.flops * (1.01 if case == "all live" else 0.7), (case, ours.flops, theirs.flops)
    assert work["theirs", "dead"].flops == work["theirs", "all live"].flops


@pytest.fixture
def spy(monkeypatch):
    """What went through the op: (with gradient, the head it used, the temperature)."""
    seen = []

    def watch(name):
        op = getattr(trl, name)

        def watched(hidden, weight, target, **options):
            seen.append((torch.is_grad_enabled(), weight.data_ptr(), options["temperature"]))
            return op(hidden, weight, target, **options)

        monkeypatch.setattr(trl, name, watched)

    watch("linear_logprob")
    watch("linear_logprob_entropy")
    return seen


def test_trl_old_reference_and_new_go_through_the_op(peer, spy, tmp_path):
    """Two optimizer steps per generation, so that TRL computes old log-probs; a full model, so that it has a copy."""
    original = peer.trainer.grpo_trainer.add_fused_lm_head
    trainer, _, _ = train(peer, tmp_path, trl.grpo_trainer(), steps=2, steps_per_generation=2)
    policy, reference = (m.get_output_embeddings().weight.data_ptr() for m in (trainer.model, trainer.ref_model))
    old, ref, new = (False, policy, 0.8), (False, reference, 0.8), (True, policy, 0.8)
    assert spy == [old, old, ref, ref, new, new]
    assert peer.trainer.grpo_trainer.add_fused_lm_head is original


def test_trl_a_broken_op_changes_the_losses(peer, monkeypatch, tmp_path):
    _, _, right = train(peer, tmp_path, trl.grpo_trainer(), steps=2)
    op = trl.linear_logprob
    monkeypatch.setattr(trl, "linear_logprob", lambda *tensors, **options: 0.9 * op(*tensors, **options))
    _, _, wrong = train(peer, tmp_path, trl.grpo_trainer(), steps=2)
    assert max(abs(a - b) for a, b in zip(right, wrong, strict=True)) > 1e-3


def logprobs_of(model, batch, temperature):
    """Per-token log-probs of the completions from the model's own logits."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logits = model(input_ids=ids, attention_mask=seen).logits[:, :-1] / temperature
    picked = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return picked[:, -batch["completion_ids"].shape[1] :]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("ref_free", [False, True])
def test_trl_pair_term_has_the_gradient_of_all_pairs(peer, tmp_path, micro_batches, ref_free):
    """One step of plain SGD with and without the term: the weights differ by its gradient, formed here pair by pair."""
    from tiny import model

    batches = []
    options = {"lambda_reg": 0.5, "beta_dpo": 0.7, "reward_margin": 0.1, "ref_free": ref_free}

    class Recorded(trl.grpo_trainer(**options)):
        def _generate_and_score_completions(self, inputs):
            batches.append(super()._generate_and_score_completions(inputs))
            return batches[-1]

    settings = {
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": 8 // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "steps": 1,
    }
    with_pairs, samples, _ = train(peer, tmp_path, Recorded, **settings)
    without, same_samples, _ = train(peer, tmp_path, trl.grpo_trainer(), **settings)
    assert samples == same_samples

    start, (batch,) = model(), batches
    mask = batch["completion_mask"]
    scores = (logprobs_of(start, batch, 0.8) * mask).sum(1) / mask.sum(1)
    rewards = torch.tensor(even_characters(None, None, samples[0]))
    logit = pair_logits(
        scores - (0 if ref_free else scores.detach()), rewards, 4, beta_dpo=0.7, reward_margin=0.1
    ).logit
    preference = -torch.nn.functional.logsigmoid(logit).mean()
    expected = torch.autograd.grad(preference, list(start.parameters()))
    log = next(entry for entry in with_pairs.state.log_history if "preference/pairs" in entry)
    assert log["preference/pairs"] == len(logit) > 3
    assert log["preference/loss"] == pytest.approx(preference.item(), abs=1e-5)
    both = zip(without.model.parameters(), with_pairs.model.parameters(), strict=True)
    got = [(plain - paired) / (0.1 * 0.5) for plain, paired in both]
    norm = torch.cat([gradient.flatten() for gradient in expected]).norm()
    assert all((a - b).norm() < 1e-3 * norm for a, b in zip(got, expected, strict=True))


def test_trl_refusals(peer, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"model type 'falcon' .*; or use TRL's own head"):
        trl.add_fused_lm_head(causal_model("falcon"))
    with pytest.raises(ValueError, match=r"outputs must be one of .*, got 'is_top1'"):
        trl.add_fused_lm_head(causal_model("llama"), outputs=("log_probs", "is_top1"))
    routed = causal_model("llama")
    trl.add_fused_lm_head(routed)
    ids = torch.randint(V, (1, 5))
    with pytest.raises(ValueError, match=r"output_router_logits=True is not supported.*; use TRL's own head"):
        routed(input_ids=ids, labels=ids, fused_lm_head=True, output_router_logits=True)
    with pytest.raises(TypeError, match="lambda_rg"):
        trl.grpo_trainer(lambda_rg=0.1)
    for settings, words in (
        ({"num_iterations": 2}, "num_iterations=2, .*; set num_iterations=1"),
        ({"steps_per_generation": 2}, "steps_per_generation=2, .*the same number"),
        ({"beta": 0.0}, "beta=0.0; set beta in GRPOConfig, or ref_free=True"),
    ):
        with pytest.raises(ValueError, match=words):
            train(peer, tmp_path, trl.grpo_trainer(lambda_reg=0.1), **settings)
    monkeypatch.setattr(peer, "__version__", "1.17.0")
    for call in (lambda: trl.add_fused_lm_head(causal_model("llama")), trl.grpo_trainer):
        with pytest.raises(ValueError, match=r"TRL 1\.17\.0 is not supported: .*; install trl==1\.16\."):
            call()
