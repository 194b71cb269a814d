"""The drop-ins beside the peers they stand in for, each run where it is installed; and what they refuse."""

import importlib.util
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from amir_kernels import linear_logprob, pair_logits
from amir_kernels.integrations import cce, liger, trl, verl

B, L, H, V = 4, 7, 16, 37


def head(dtype=torch.float32):
    """Peaked logits and tokens drawn from them."""
    hidden, weight = torch.randn(B, L, H, dtype=dtype), torch.randn(V, H, dtype=dtype)
    target = torch.distributions.Categorical(logits=(hidden @ weight.T).float()).sample()
    return hidden.requires_grad_(), weight.requires_grad_(), target


def error(ours, theirs):
    """Largest difference, each tensor's against its own size; shapes and dtypes must agree."""
    for a, b in zip(ours, theirs, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    return max(((a - b).abs().max() / (1e-3 + b.abs().max())).item() for a, b in zip(ours, theirs, strict=True))


def test_the_kernels_and_the_integrations_import_no_peer():
    code = (
        "import sys, amir_kernels\n"
        "assert not any(name.startswith('amir_kernels.integrations') for name in sys.modules)\n"
        "import amir_kernels.integrations.cce, amir_kernels.integrations.liger\n"
        "import amir_kernels.integrations.trl, amir_kernels.integrations.verl\n"
        "peers = {'trl', 'verl', 'liger_kernel', 'cut_cross_entropy', 'transformers'} & sys.modules.keys()\n"
        "assert not peers, peers\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- Liger ---------------------------------------------------------------------------------------------------------


LIGER_CASES = [
    {"loss_type": "grpo"},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15},
    {"loss_type": "bnpo", "delta": 1.4, "beta": 0.0},
    {"loss_type": "dr_grpo", "max_completion_length": 13},
    {},
    {"beta": 0.1, "use_bias_correction_kl": True, "chunk_size": 2},
    {"loss_type": "cispo", "epsilon_high": 1.3},
    {"loss_type": "sapo", "sapo_temperature_neg": 1.2},
    {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.0},
    {"loss_type": "vespo", "vespo_k_pos": 1.5, "beta": 0.0},
]


def liger_inputs():
    hidden, weight, target = head()
    mask = (torch.rand(B, L) > 0.25).long()
    mask[2] = 0  # a row without tokens
    bias = torch.randn(V, requires_grad=True)
    logits = (hidden @ weight.T + bias).detach() / 0.7
    logprobs = logits.log_softmax(-1).gather(-1, target[..., None])[..., 0]
    old, ref = (logprobs + 0.3 * torch.randn(B, L) for _ in range(2))
    return (hidden, weight, target, mask, torch.randn(B)), bias, old, ref


def liger_results(loss, inputs, bias, **call):
    value, metrics = loss(*inputs, bias=bias, **call)
    return [value, *metrics, *torch.autograd.grad(value, (*inputs[:2], bias))]


@pytest.mark.parametrize("options", LIGER_CASES, ids=str)
def test_liger_loss_metrics_and_gradients(options):
    peer = pytest.importorskip("liger_kernel.chunked_loss", reason="needs liger-kernel, of the extra `gpu`")
    inputs, bias, old, ref = liger_inputs()
    options = {"temperature": 0.7, "compiled": False} | options
    calls = [{"old_per_token_logps": old, "ref_per_token_logps": ref}, {"ref_per_token_logps": ref}]
    if options.get("loss_type") != "vespo":
        calls.append(calls[0] | {"vllm_is_ratio": torch.rand(B, 1) + 0.5})
    if options.get("loss_type") not in ("vespo", "luspo"):
        calls.append(calls[0] | {"vllm_is_ratio": torch.rand(B, L) + 0.5})
    calls.append(calls[0] | {"num_items_in_batch": 50})
    for call in calls:
        ours = liger_results(liger.FusedGRPOLoss(**options), inputs, bias, **call)
        theirs = liger_results(peer.LigerFusedLinearGRPOLoss(**options), inputs, bias, **call)
        assert error(ours, theirs) < 3e-5, call.keys()


def test_liger_reference_from_its_own_hidden_states():
    peer = pytest.importorskip("liger_kernel.chunked_loss", reason="needs liger-kernel, of the extra `gpu`")
    inputs, bias, old, _ = liger_inputs()
    reference = {"ref_input": torch.randn(B, L, H), "ref_weight": torch.randn(V, H), "ref_bias": torch.randn(V)}
    call = {"old_per_token_logps": old} | reference
    ours = liger_results(liger.FusedGRPOLoss(beta=0.1), inputs, bias, **call)
    theirs = liger_results(peer.LigerFusedLinearGRPOLoss(beta=0.1, compiled=False), inputs, bias, **call)
    assert error(ours, theirs) < 3e-5
    without = liger_results(liger.FusedGRPOLoss(beta=0.0), inputs, bias, **call)
    assert abs(ours[0] - without[0]) > 1e-3


def test_liger_cispo_counts_what_is_bounded_with_a_positive_advantage():
    """Half the ratios above the bound, and of these one in two with a positive advantage."""
    hidden, weight, target = head()
    old = linear_logprob(hidden, weight, target).detach()
    old[:, ::2] -= 1.0
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss = liger.FusedGRPOLoss(loss_type="cispo", epsilon_high=2.0, beta=0.0, use_ref_model=False)
    _, (clipped,) = loss(hidden, weight, target, torch.ones(B, L), advantages, old_per_token_logps=old)
    assert clipped == pytest.approx(0.5 * 4 / 7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_type": "ppo"}, "loss_type must be one of"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level must be one of"),
        ({"loss_type": "luspo"}, "padded width"),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, "padded width"),
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "Liger refuses it too"),
        ({"loss_type": "vespo", "use_bias_correction_kl": True}, "use_bias_correction_kl"),
        ({"loss_type": "cispo", "delta": 2.0, "epsilon_high": 5.0}, "delta"),
        ({"loss_type": "dr_grpo"}, "max_completion_length"),
        ({"use_ref_model": False}, "use_ref_model"),
    ],
)
def test_liger_refusals(options, words):
    with pytest.raises(ValueError, match=words):
        liger.FusedGRPOLoss(**options)


def test_liger_refusals_in_the_call():
    inputs, bias, *_ = liger_inputs()
    with pytest.raises(TypeError, match="unknown"):
        liger.FusedGRPOLoss(unknown=1)
    with pytest.raises(ValueError, match="ref_per_token_logps"):
        liger.FusedGRPOLoss()(*inputs, bias=bias)
    alone = {"beta": 0.0, "use_ref_model": False}
    with pytest.raises(ValueError, match="vllm_is_ratio"):
        liger.FusedGRPOLoss(loss_type="vespo", **alone)(*inputs, vllm_is_ratio=torch.ones(B))
    luspo = liger.FusedGRPOLoss(loss_type="luspo", importance_sampling_level="sequence", **alone)
    with pytest.raises(ValueError, match="vllm_is_ratio"):
        luspo(*inputs, vllm_is_ratio=torch.ones(B, L))


# ---- Cut Cross Entropy ---------------------------------------------------------------------------------------------


@pytest.fixture
def cut():
    """CCE's function on its torch back end, eager: its kernels want a GPU, and compiling it would take minutes."""
    peer = pytest.importorskip("cut_cross_entropy", reason="cut-cross-entropy is not installed")
    with torch.compiler.set_stance("force_eager"):
        yield lambda *tensors, **options: peer.linear_cross_entropy(*tensors, impl="torch_compile", **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_cce_loss_and_gradients(cut, reduction, shift, softcap):
    e, c, targets = head()
    targets[0, :3] = targets[1, -1] = targets[3] = -100
    options = {"reduction": reduction, "shift": shift, "softcap": softcap}
    upstream, results = torch.rand(B, L - shift), []
    for function in (cce.linear_cross_entropy, cut):
        loss = function(e, c, targets, **options)
        total = (loss * upstream).sum() if reduction == "none" else loss
        results.append([loss, *torch.autograd.grad(total, (e, c))])
    assert error(*results) < 1e-5


def test_cce_bias_and_longer_shift():
    """Of CCE's later versions: against logits."""
    e, c, targets = head()
    bias = torch.randn(V, requires_grad=True)
    targets[0, 4] = -100
    ours = cce.linear_cross_entropy(e, c, targets, bias=bias, shift=2)
    logits = e[:, :-2] @ c.T + bias
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 2:].flatten())
    ours, plain = ([loss, *torch.autograd.grad(loss, (e, c, bias))] for loss in (ours, plain))
    assert error(ours, plain) < 1e-5


def test_cce_without_targets_that_count(cut):
    e, c, targets = head()
    ignored = torch.full_like(targets, -100)
    assert cce.linear_cross_entropy(e, c, ignored).isnan()
    assert cut(e, c, ignored).isnan()
    assert cce.linear_cross_entropy(e, c, ignored, reduction="sum") == 0


def test_cce_refusals():
    e, c, targets = head()
    with pytest.raises(ValueError, match="reduction must be one of"):
        cce.linear_cross_entropy(e, c, targets, reduction="median")
    for shift in (-1, L):
        with pytest.raises(ValueError, match="shift must lie in"):
            cce.linear_cross_entropy(e, c, targets, shift=shift)
    with pytest.raises(TypeError, match="impl"):
        cce.linear_cross_entropy(e, c, targets, impl="cce_exact")
    with pytest.raises(TypeError, match="positional"):
        cce.linear_cross_entropy(e, c, targets, -100)


# ---- verl ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verl_functional():
    """verl's file of the torch head by its path: importing verl itself needs ray."""
    spec = importlib.util.find_spec("verl")
    if spec is None:
        pytest.skip("verl is not installed")
    path = Path(spec.submodule_search_locations[0]) / "utils" / "experimental" / "torch_functional.py"
    spec = importlib.util.spec_from_file_location("verl_torch_functional", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flat", [False, True])
def test_verl_fused_linear_for_ppo(verl_functional, dtype, flat):
    hidden, weight, labels = head(dtype)
    upstream, results = torch.rand(2, B, L), []
    if flat:
        labels, upstream = labels.flatten().to(torch.int32), upstream.flatten(1)
    for module in (verl, verl_functional):
        states = hidden.flatten(0, 1) if flat else hidden
        logprob, entropy = module.FusedLinearForPPO(chunk_size=5)(states, weight, labels, 0.7)
        loss = (upstream[0] * logprob).sum() + (upstream[1] * entropy).sum()
        results.append([logprob, entropy, *torch.autograd.grad(loss, (hidden, weight))])
    assert error(*results) < (1e-5 if dtype == torch.float32 else 3e-2)


def test_verl_linear_cross_entropy(verl_functional):
    """verl's kernel needs a GPU; its torch head is the same function, so results are flat and float32 here."""
    hidden, weight, labels = head()
    upstream, results = torch.rand(2, B * L), []
    theirs = verl_functional.FusedLinearForPPO()(hidden, weight, labels, 0.7)
    for logprob, entropy in (
        verl.linear_cross_entropy(hidden, weight, labels, 0.7, "none", None),
        tuple(value.flatten() for value in theirs),
    ):
        loss = (upstream[0] * logprob).sum() + (upstream[1] * entropy).sum()
        results.append([logprob, entropy, *torch.autograd.grad(loss, (hidden, weight))])
    assert error(*results) < 1e-5
    for reduction, expected in (("sum", theirs[0].sum()), ("MEAN", theirs[0].mean())):
        logprob, entropy = verl.linear_cross_entropy(hidden, weight, labels.flatten(), 0.7, reduction)
        assert error([logprob, entropy], [expected, theirs[1].flatten()]) < 1e-5


def test_verl_refusals():
    hidden, weight, labels = head()
    with pytest.raises(ValueError, match="reduction must be one of"):
        verl.linear_cross_entropy(hidden, weight, labels, 1.0, "max")
    with pytest.raises(NotImplementedError, match="2 ranks"):
        verl.linear_cross_entropy(hidden, weight, labels, 1.0, "none", SimpleNamespace(size=lambda: 2))
    with pytest.raises(ValueError, match="impl_backend must be one of"):
        verl.FusedLinearForPPO(impl_backend="triton")
    with pytest.raises(ValueError, match="target must lie in"):
        verl.FusedLinearForPPO()(hidden, weight, labels + V)


# ---- TRL -----------------------------------------------------------------------------------------------------------


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


def train(peer, folder, trainer_class, steps=3, lora=None, **settings):
    """A trained trainer, the samples of each generation, and the logged losses."""
    import datasets
    from transformers import AutoModelForCausalLM

    from tiny import model, tokenizer

    model().save_pretrained(folder / "model")  # TRL loads its reference from where the policy came from
    samples = []

    def reward(prompts, completions, completion_ids, **columns):
        samples.append(completion_ids)
        return even_characters(prompts, completions, completion_ids, **columns)

    options = {
        "max_steps": steps,
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
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        reward_funcs=reward,
        args=peer.GRPOConfig(output_dir=str(folder), **options | settings),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["1+1", "2+22", "3+3", "4+4"]}),
        processing_class=tokenizer(),
        peft_config=lora,
    )
    trainer.train()
    return trainer, samples, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("lora", [False, True])
def test_trl_three_steps_give_the_same_losses_and_samples(peer, tmp_path, lora):
    """With LoRA the reference is the policy without its adapter."""
    settings = {"entropy_coef": 0.01, "gradient_accumulation_steps": 2}
    if lora:
        settings["lora"] = pytest.importorskip("peft").LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    _, our_samples, ours = train(peer, tmp_path, trl.grpo_trainer(), **settings)
    _, their_samples, theirs = train(peer, tmp_path, peer.GRPOTrainer, **settings)
    assert our_samples == their_samples
    assert len(ours) == len(theirs) == 3
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4
    assert min(map(abs, theirs)) > 1e-3


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
    with pytest.raises(ValueError, match="falcon"):
        trl.add_fused_lm_head(causal_model("falcon"))
    with pytest.raises(ValueError, match="outputs must be one of"):
        trl.add_fused_lm_head(causal_model("llama"), outputs=("log_probs", "is_top1"))
    routed = causal_model("llama")
    trl.add_fused_lm_head(routed)
    ids = torch.randint(V, (1, 5))
    with pytest.raises(ValueError, match="output_router_logits"):
        routed(input_ids=ids, labels=ids, fused_lm_head=True, output_router_logits=True)
    with pytest.raises(TypeError, match="lambda_rg"):
        trl.grpo_trainer(lambda_rg=0.1)
    for settings, words in (
        ({"num_iterations": 2}, "num_iterations=2"),
        ({"steps_per_generation": 2}, "steps_per_generation=2"),
        ({"beta": 0.0}, "ref_free=True"),
    ):
        with pytest.raises(ValueError, match=words):
            train(peer, tmp_path, trl.grpo_trainer(lambda_reg=0.1), **settings)
    monkeypatch.setattr(peer, "__version__", "1.17.0")
    for call in (lambda: trl.add_fused_lm_head(causal_model("llama")), trl.grpo_trainer):
        with pytest.raises(ValueError, match=r"TRL 1\.17\.0 is not covered"):
            call()
