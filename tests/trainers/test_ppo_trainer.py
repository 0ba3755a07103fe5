"""PPOTrainer as a user meets it: what learns, logs, files, resume, what takes no part, what is refused."""

import functools
import json

import pytest
import torch
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    CodeGenConfig,
    CodeGenForCausalLM,
    GPT2ForTokenClassification,
)

from examples.worlds import two_tokens
from trl_repulse import PPOTrainer
from trl_repulse.engine.scoring import Layout, prepare_scoring
from trl_repulse.engine.second_model import build_value_model, check_value_model, token_values

from ..conftest import DEVICE, build_accelerator, build_model, same_parameters
from ..recorded import build_reward_model


pytestmark = pytest.mark.trainer

EOS = 1


@pytest.fixture
def make(make):
    return functools.partial(make, PPOTrainer)


def copies(module):
    return [p.detach().clone() for p in module.parameters()]


def unchanged(start, module):
    return all(torch.equal(p, q) for p, q in zip(start, module.parameters(), strict=True))


def logged(trainer, name):
    return [log[name] for log in trainer.state.log_history if name in log]


# What learns


@pytest.mark.thorough
def test_reward_rises_in_the_embedded_world(make):
    trainer = make(
        two_tokens.policy_path(),
        two_tokens.reward_model_path(),
        two_tokens.load_prompts(),
        per_device_train_batch_size=64,
        num_generations=16,
        max_steps=40,
        learning_rate=1e-3,
        value_learning_rate=3e-3,
    )
    trainer.train()
    rewards = logged(trainer, "reward")
    assert sum(rewards[:5]) / 5 < 1.6
    assert sum(rewards[-5:]) / 5 > 2.8


@pytest.mark.thorough
def test_the_value_model_learns_what_the_prompts_are_worth(make):
    """A frozen policy, and a reward that a constant cannot explain."""

    def by_prompt(prompts, **kwargs):
        return [float(len(prompt.split())) for prompt in prompts]

    trainer = make(reward_funcs=by_prompt, learning_rate=0.0, value_learning_rate=1e-2, max_steps=40)
    policy = copies(trainer.model)
    trainer.train()
    explained, losses = logged(trainer, "value/explained_variance"), logged(trainer, "value/loss")
    assert max(explained[:3]) < 0.5 and min(explained[-3:]) > 0.9
    assert losses[-1] < 0.05 * losses[0]
    assert unchanged(policy, trainer.model)


def test_warm_up_trains_the_value_model_alone(make):
    trainer = make(value_warmup_steps=2, max_steps=2, weight_decay=0.1)
    policy, value = copies(trainer.model), copies(trainer.value.module)
    trainer.train()
    assert unchanged(policy, trainer.model)
    assert not unchanged(value, trainer.value.module)
    assert not trainer.optimizer.state  # no moments of gradients that were not followed
    after = make(value_warmup_steps=2, max_steps=3, weight_decay=0.1)
    after.train()
    assert not unchanged(policy, after.model)


def test_each_model_has_its_own_rate_and_clipping(make):
    trainer = make(value_learning_rate=1e-3, max_grad_norm=1e-3)
    trainer.train()
    assert logged(trainer, "value/learning_rate") == [1e-3] * 2 and logged(trainer, "learning_rate") == [1e-2] * 2
    frozen = make(value_learning_rate=0.0)
    value, policy = copies(frozen.value.module), copies(frozen.model)
    frozen.train()
    assert unchanged(value, frozen.value.module) and not unchanged(policy, frozen.model)
    assert make().value.learning_rate == 1e-2


def test_later_epochs_move_away_from_the_sampling_policy(make):
    trainer = make(num_iterations=3, max_steps=6, learning_rate=3e-2, value_learning_rate=3e-2, logging_steps=1)
    trainer.train()
    divergence, clipped = logged(trainer, "approx_kl"), logged(trainer, "value/clip_fraction")
    assert divergence[0] == pytest.approx(0, abs=1e-6) and divergence[3] == pytest.approx(0, abs=1e-6)
    assert divergence[1] > 1e-3 and clipped[0] == 0 and max(clipped) > 0
    assert max(logged(trainer, "clip_ratio/region_mean")) > 0


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_passes_over_the_policy(make, beta):
    """On-policy: the pass that carries the gradient, and one more where the KL penalty needs log-probabilities before."""
    trainer = make(max_steps=1, beta=beta)
    passes = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(1) if kwargs.get("fused_lm_head") else None, with_kwargs=True
    )
    trainer.train()
    assert len(passes) == (1 if beta == 0.0 else 2)
    assert trainer.beta == beta


# The value model's start


def test_values_start_at_zero_or_at_the_reward_models_scores(model_dirs, tokenizer, architecture, tmp_path):
    kwargs = {"device_map": None}
    ids = torch.randint(3, len(tokenizer), (2, 6))
    policy = AutoModelForCausalLM.from_pretrained(model_dirs[architecture])
    for source in (model_dirs[architecture], policy):
        value = build_value_model(source, kwargs)
        assert value(input_ids=ids).logits.abs().max() == 0
        for p, q in zip(value.base_model.parameters(), policy.base_model.parameters(), strict=True):
            assert torch.equal(p, q) and p.data_ptr() != q.data_ptr()
    scorer = build_reward_model(architecture, len(tokenizer), seed=3).eval()
    scorer.save_pretrained(tmp_path)
    for source in (scorer, str(tmp_path)):
        value = build_value_model(source, kwargs)
        assert value.base_model is not scorer.base_model
        torch.testing.assert_close(value(input_ids=ids).logits[:, -1], scorer(input_ids=ids).logits)
    value.save_pretrained(tmp_path / "again")
    again = build_value_model(str(tmp_path / "again"), kwargs)
    assert type(again) is type(value) and same_parameters(again, value)
    assert build_value_model(value, kwargs) is value


def test_values_do_not_depend_on_padding(trainerless_value, tokenizer):
    value, accelerator = trainerless_value
    prepare_scoring(value)
    ids = torch.randint(3, len(tokenizer), (2, 5), device=DEVICE)
    with torch.no_grad():
        expected = value(input_ids=ids).logits[:, 1:-1, 0]  # before each of the last three tokens
        for padding in (0, 4):
            mask = (torch.arange(padding + 5, device=DEVICE) >= padding).long().expand(2, -1)
            padded = torch.cat([ids.new_zeros(2, padding), ids], dim=1)
            values = token_values(value, accelerator, padded, mask, Layout(padding + 2, 3, 1))
            torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)
        unpositioned = value(input_ids=padded, attention_mask=mask).logits[:, -4:-1, 0]
        assert (unpositioned - expected).abs().max() > 1e-2  # the trap


@pytest.fixture
def trainerless_value(tokenizer):
    value = build_value_model(build_reward_model("gpt2", len(tokenizer), seed=3), {})
    return value.to(DEVICE), build_accelerator()


def test_refused_value_models(make, model_dirs, tokenizer, tmp_path):
    policy = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
    with pytest.raises(ValueError, match="vocabulary of 30 tokens"):
        make(extra={"value_model": build_model("gpt2", 30)})
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    encoder = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), num_labels=1, **shape))
    with pytest.raises(ValueError, match="reads tokens to the right"):
        check_value_model(build_value_model(encoder, {}), policy)
    encoder.classifier = torch.nn.Sequential(encoder.classifier)
    with pytest.raises(ValueError, match="one linear layer"):
        build_value_model(encoder, {})
    several = GPT2ForTokenClassification(policy.config)
    with pytest.raises(ValueError, match="has 2 labels"):
        build_value_model(several, {})
    tiny = {"n_embd": 16, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "n_positions": 32}
    with pytest.raises(ValueError, match="no token classifier for"):
        build_value_model(CodeGenForCausalLM(CodeGenConfig(vocab_size=len(tokenizer), **tiny)), {})


# What takes part


def test_samples_without_a_reward_take_no_part(make):
    def partial(completions, **kwargs):
        return [None if i % 2 else float(len(c)) for i, c in enumerate(completions)]

    def nothing(completions, **kwargs):
        return [None] * len(completions)

    trainer = make(reward_funcs=partial, beta=0.1)
    trainer.model.train()
    batch = trainer._generate_and_score_completions([row for row in trainer.train_dataset for _ in range(4)])
    assert (batch["credit_mask"][1::2] == 0).all() and (batch["advantages"][1::2] == 0).all()
    assert (batch["credit_mask"][::2, 0] == 1).all() and (batch["advantages"][::2, 0] != 0).all()
    assert batch["num_items_in_batch"] == batch["completion_mask"][::2].sum()
    trainer.train()
    assert all(
        torch.isfinite(p).all() for module in (trainer.model, trainer.value.module) for p in module.parameters()
    )

    trainer = make(reward_funcs=nothing, weight_decay=0.0)
    policy, value = copies(trainer.model), copies(trainer.value.module)
    trainer.train()  # no reward at all: no push at all
    assert unchanged(policy, trainer.model) and unchanged(value, trainer.value.module)


@pytest.mark.parametrize("masked", [False, True])
def test_truncated_completions(make, masked):
    """They keep the reward of the text as it is, or take no part if the user masks them."""
    trainer = make(mask_truncated_completions=masked, whiten_advantages=False, gae_lambda=1.0)
    trainer.model.train()
    batch = trainer._generate_and_score_completions([row for row in trainer.train_dataset for _ in range(4)])
    rewards = torch.tensor(list(trainer._logs["rewards"]["word_reward"]), device=batch["returns"].device)
    truncated = batch["completion_ids"][:, -1] > EOS  # neither the end nor padding after it
    assert truncated.any()
    if masked:
        assert (batch["credit_mask"][truncated] == 0).all()
    else:
        torch.testing.assert_close(batch["returns"][truncated, -1], rewards[truncated])


# Logs


def test_logs(make):
    trainer = make(
        beta=0.1, bad_reward_threshold=-1.0, reward_transform="indicator", reward_transform_threshold=-1.0, max_steps=1
    )
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["kl"] == pytest.approx(0, abs=1e-6)  # the policy is its own reference before the first update
    assert log["return"] == pytest.approx(log["reward"], abs=1e-5)
    assert log["reward_transformed"] == pytest.approx(log["reward"] - log["bad_fraction"], abs=1e-5)
    assert "frac_reward_zero_std" not in log


def test_completions_table_and_negative_data(make, tmp_path, capsys):
    trainer = make(
        log_completions=True, max_steps=1, whiten_advantages=False, save_negatives=True, bad_reward_threshold=-1.0
    )
    trainer.train()
    rewards = torch.tensor(list(trainer._logs["rewards"]["word_reward"]))
    advantages = torch.tensor(list(trainer._logs["advantages"]))
    lengths = torch.tensor([2.0] * 16)  # of values that are 0: λ^k of the reward, averaged over the tokens
    assert len(advantages) == 16
    full = torch.tensor([len(c.split()) == 2 for c in trainer._logs["completion"]])
    torch.testing.assert_close(advantages[full], (rewards * (1 + 0.95) / lengths)[full])
    rows = [json.loads(line) for line in (tmp_path / "out" / "negatives.jsonl").read_text().splitlines()]
    assert len(rows) == (rewards < -1).sum() > 0
    assert all(row["reward"] < -1 and "bad" in row["completion"] and row["source"] == "policy" for row in rows)
    capsys.readouterr()


# Value adapters


def test_a_value_adapter_begins_as_the_seed_says(make):
    extra = {"value_peft_config": LoraConfig(target_modules=["c_attn"], r=2)}
    one, other, third = (make(extra=extra, seed=seed).value.module for seed in (0, 0, 1))
    assert same_parameters(one, other) and not same_parameters(one, third)


def test_a_value_adapter_goes_on_from_its_folder(make, tmp_path):
    extra = {"value_peft_config": LoraConfig(target_modules=["c_attn"], r=2)}
    trainer = make(extra=extra)
    trainer.train()
    trainer.save_model(tmp_path / "run")
    folder = str(tmp_path / "run" / "value")
    for peft_config in (extra, {}):
        going_on = make(extra={"value_model": folder} | peft_config)
        assert same_parameters(going_on.value.module, trainer.value.module)
        start = {name: p.clone() for name, p in going_on.value.module.named_parameters()}
        going_on.train()
        changed = {name for name, p in going_on.value.module.named_parameters() if not torch.equal(p, start[name])}
        assert changed and all("lora_" in name or "classifier" in name for name in changed)
    config = LoraConfig(target_modules=["c_attn"], r=2, task_type="CAUSAL_LM")
    trainer = make(extra={"peft_config": config})
    trainer.save_model(tmp_path / "policy")
    with pytest.raises(ValueError, match="is the folder of an adapter that gives no values"):
        make(extra={"value_model": str(tmp_path / "policy")})
