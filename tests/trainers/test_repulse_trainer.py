"""RePULSeTrainer as a user meets it: directions, passes, logs, files, resume, what would be uploaded."""

import itertools
import shutil
from collections import Counter

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer, TrainerCallback

from trl_repulse import (
    PPOTrainer,
    ReinforceTrainer,
    RePULSeGRPOTrainer,
    RePULSePPOTrainer,
    RePULSeTrainer,
    __version__,
)
from trl_repulse.engine.scoring import Wanted
from trl_repulse.engine.units import EXTRA, Units

from ..conftest import BAD, also_thorough, build_model, same_parameters
from ..engine.test_adapters import lora
from .test_repulse_ppo_trainer import KINDS


pytestmark = pytest.mark.trainer


def test_the_negative_term_does_the_work(make, evaluator):
    """With the same number of updates REINFORCE leaves more bad outputs: the direction above is not its alone."""
    ends = {}
    for alpha in (0.0, 4.0):
        trainer = make(max_steps=40, alpha=alpha, seed=3)
        trainer.train()
        ends[alpha] = evaluator.evaluate(trainer.model)
    assert ends[4.0].log_prob_bad < ends[0.0].log_prob_bad - 0.5


@pytest.mark.thorough
@pytest.mark.parametrize("trainer_cls", [RePULSeGRPOTrainer, RePULSePPOTrainer])
def test_vargrad_beside_other_losses(make, evaluator, trainer_cls):
    settings = {"learning_rate": 1e-5, "proposal_learning_rate": 1e-2, "proposal_loss": "vargrad"}
    trainer = make(trainer_cls, max_steps=25, **settings)
    start = evaluator.evaluate(trainer.proposal.module)
    trainer.train()
    assert evaluator.evaluate(trainer.proposal.module).log_prob_bad > start.log_prob_bad + 0.3


def test_schedules_move_geometrically(make):
    trainer = make(alpha=1.0, alpha_start=0.01, target_dist_beta=-4.0, target_dist_beta_start=-1.0, max_steps=3)
    seen = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            seen.append((trainer._negative.scheduled("alpha"), trainer._negative.scheduled("target_dist_beta")))

    trainer.add_callback(Watch())
    trainer.train()
    assert [a for a, _ in seen] == pytest.approx([0.01, 0.1, 1.0])
    assert [b for _, b in seen] == pytest.approx([-1.0, -2.0, -4.0])


@pytest.mark.parametrize("share", [True, False])
def test_no_redundant_passes(make, share):
    """On-policy: one policy pass over both sample sets, one proposal pass, one reference pass; nothing else."""
    trainer = make(max_steps=1, beta=0.1, share_prompts=share)
    models = {"policy": trainer.model, "reference": trainer.ref_model, "proposal": trainer.proposal.module}
    passes, rows = Counter(), Counter()

    def count(name):
        def hook(module, args, kwargs):
            if kwargs.get("fused_lm_head"):  # scoring; the others are generation
                passes[name] += 1
                rows[name] += len(kwargs["input_ids"])

        return hook

    for name, model in models.items():
        model.register_forward_pre_hook(count(name), with_kwargs=True)
    trainer.train()
    assert passes == {"policy": 1, "reference": 1, "proposal": 1}
    own, both = (4, 4) if share else (16, 32)  # of 4 prompts, each with 4 completions of each model
    assert rows == {"policy": both, "reference": own, "proposal": own}


def test_samples_come_from_the_proposal_and_not_from_the_policy(make, model_dirs, architecture):
    """TRL's patched forward stays bound to the model it was made for; a copy of a patched policy would sample it."""
    policy = AutoModelForCausalLM.from_pretrained(model_dirs[architecture])
    trainer = make(model=policy, extra={"processing_class": AutoTokenizer.from_pretrained(model_dirs[architecture])})
    head = torch.nn.Linear(trainer.proposal.module.config.hidden_size, 19)  # says " bad" whatever it reads
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(-100.0)[BAD] = 100.0
    trainer.proposal.module.lm_head = head.to(trainer.proposal.module.device)
    inputs = [row for row in trainer.train_dataset for _ in range(4)]
    trainer.model.train()
    batch = trainer._generate_and_score_completions(inputs)
    assert (batch["proposal_completion_ids"] == BAD).all()
    assert not (batch["completion_ids"] == BAD).all()
    units, wanted = Units.of(batch), Wanted((EXTRA,))
    log_q = trainer._scoring.score(trainer.proposal.engine, units, trainer.shape, wanted, gradient=False).log_p[EXTRA]
    assert log_q.abs().max() < 1e-3


def test_samples_follow_the_models_whatever_they_were_saved_with(make, model_dirs, tokenizer):
    policy = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
    policy.generation_config.suppress_tokens = [BAD, 12, 13, 14]
    policy.generation_config.typical_p = 0.2
    prompts = Dataset.from_dict({"prompt": ["the cat"]})
    settings = {"num_generations": 4000, "per_device_train_batch_size": 4000, "max_completion_length": 1}
    trainer = make(model=policy, dataset=prompts, extra={"processing_class": tokenizer}, **settings)
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": "the cat"}] * 4000)
    expected = (
        policy(input_ids=torch.tensor([tokenizer("the cat")["input_ids"]], device=policy.device))
        .logits[0, -1]
        .softmax(-1)
    )
    for name in ("completion_ids", "proposal_completion_ids"):
        share = torch.bincount(batch[name].flatten(), minlength=len(tokenizer)) / 4000
        torch.testing.assert_close(share, expected, atol=0.03, rtol=0)  # 4 standard deviations
    assert policy.generation_config.typical_p == 0.2


def test_only_the_policy_sees_clipped_and_transformed_rewards(make):
    """The target is made of the raw reward: the same weights, ESS and log Z with and without clip and transform."""
    settings = {"learning_rate": 0.0, "proposal_learning_rate": 0.0, "max_steps": 1}
    changed = {"reward_clip_range": (-0.5, 0.5), "reward_transform": "indicator", "reward_transform_threshold": -1.0}
    logs = []
    for extra in ({}, changed):
        trainer = make(**settings, **extra)
        trainer.train()
        logs.append(trainer.state.log_history[0])
    for name in ("reward", "proposal/reward", "proposal/log_z", "proposal/ess", "proposal/loss"):
        assert logs[0][name] == logs[1][name], name
    assert logs[0]["loss"] != logs[1]["loss"]
    assert logs[1]["return_transformed"] != logs[1]["reward"]


def test_completions_tables(make, capsys):
    trainer = make(log_completions=True, max_steps=1)
    trainer.train()
    assert len(trainer._logs["prompt"]) == len(trainer._tables.extra["prompt"]) == 16
    advantages = torch.tensor(list(trainer._logs["advantages"])).view(4, 4)
    rewards = torch.tensor(list(trainer._logs["rewards"]["word_reward"])).view(4, 4)
    torch.testing.assert_close(advantages, rewards - (rewards.sum(1, keepdim=True) - rewards) / 3)
    printed = capsys.readouterr().out
    assert printed.count("Step 1") >= 2 and "proposal" in printed


CARDS = {
    RePULSeTrainer: (
        "repulse",
        "zhao2025reducing",
        "2510.21184",
        f"TRL-RePULSe: {__version__}",
        "`target_dist_beta` | -2.0",
    ),
    PPOTrainer: ("ppo", "1707.06347", "schulman2017proximal", "`gae_lambda` | 0.95"),
    ReinforceTrainer: ("reinforce",),
    RePULSePPOTrainer: ("ppo",),
    RePULSeGRPOTrainer: ("grpo",),
}


@pytest.mark.parametrize("trainer_cls", [*list(CARDS)[:3], *also_thorough(*list(CARDS)[3:])])
def test_files(make, tmp_path, trainer_cls):
    trainer = make(trainer_cls, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model()
    out, (tag, *said) = tmp_path / "out", CARDS[trainer_cls]
    for folder in (out, out / "checkpoint-1", out / "checkpoint-2"):
        is_last = folder.name != "checkpoint-1"
        assert same_parameters(AutoModelForCausalLM.from_pretrained(folder), trainer.model) == is_last
        for name, second in trainer.second_models.items():
            auto_class = AutoModelForTokenClassification if name == "value" else AutoModelForCausalLM
            assert same_parameters(auto_class.from_pretrained(folder / name), second.module) == is_last
            assert (folder / name / "optimizer.safetensors").exists() == (folder != out)
            assert (folder / name / "README.md").exists() == (name == "proposal")
            assert not [path for path in (folder / name).iterdir() if path.suffix in (".pt", ".bin", ".pkl", ".pth")]
        if "proposal" in trainer.second_models:
            card = ModelCard.load(folder / "proposal" / "README.md")
            assert "Do not deploy" in card.text and "not-for-deployment" in card.data.tags
            AutoTokenizer.from_pretrained(folder / "proposal")
    card = ModelCard.load(out / "README.md")
    assert {"trl", "trl-repulse", tag} <= set(card.data.tags) and all(text in card.text for text in said)


def test_resume_continues_both_models_bit_for_bit(make, tmp_path, prompts):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "linear", "beta": 0.1}
    settings["dataset"] = concatenate_datasets([prompts] * 4)  # 4 updates an epoch
    checkpoint = tmp_path / "whole" / "checkpoint-2"

    def trained(output_dir, resume=None):
        trainer = make(**settings, output_dir=str(tmp_path / output_dir))
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model, trainer.proposal.module

    whole, resumed = trained("whole"), trained("resumed", str(checkpoint))
    assert all(same_parameters(one, other) for one, other in zip(whole, resumed, strict=True))
    # The second model's own state took part: without it the run ends elsewhere
    (checkpoint / "proposal" / "optimizer.json").unlink()
    assert not same_parameters(whole[1], trained("forgetful", str(checkpoint))[1])
    shutil.rmtree(checkpoint / "proposal")
    with pytest.raises(ValueError, match="holds no proposal"):
        trained("refused", str(checkpoint))


def test_resume_without_a_proposal_is_refused(make, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    make(alpha=0.0, **saved, output_dir=str(tmp_path / "alone")).train()
    with pytest.raises(ValueError, match="`alpha=1.0` does not go on with"):
        make(max_steps=2).train(resume_from_checkpoint=str(tmp_path / "alone" / "checkpoint-1"))


ON_OTHERS = itertools.product([RePULSePPOTrainer, RePULSeGRPOTrainer], [*KINDS, "adapters"])


@pytest.mark.parametrize(
    ("trainer_cls", "kind"),
    [(RePULSeTrainer, "proposal"), (PPOTrainer, "value model")]
    + [pytest.param(*case, marks=pytest.mark.thorough) for case in ON_OTHERS],
)
def test_gradient_checkpointing_changes_nothing(make, trainer_cls, kind):
    ends = []
    for checkpointing in (False, True):
        extra = {"peft_config": lora(init_lora_weights=False)} if kind == "adapters" else {}
        trainer = make(trainer_cls, extra=extra, gradient_checkpointing=checkpointing, beta=0.1, **KINDS.get(kind, {}))
        trainer.train()
        modules = trainer.model, *(second.module for second in trainer.second_models.values())
        ends.append([p for module in modules for p in module.parameters()])
    torch.testing.assert_close(*ends, atol=1e-6, rtol=1e-5)


class FailsOnce(TrainerCallback):
    """Stops the first run in the middle of an update."""

    failed = False

    def on_substep_end(self, *args, **kwargs):
        if not self.failed:
            self.failed = True
            raise RuntimeError("out of memory")


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_run_after_one_that_failed_learns_from_its_own_samples(make, order):
    """Neither from the samples that waited for the policy's update, nor from their gradient."""
    halves = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 1}
    trainer = make(proposal_update_order=order, extra={"callbacks": [FailsOnce()]}, **halves)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    module, backward, step = trainer.proposal.module, trainer.proposal.backward, trainer.proposal.step
    of_losses, found = [], []

    def noting_backward(loss):
        of_losses.append(torch.autograd.grad(loss, [*module.parameters()], retain_graph=True))
        backward(loss)

    def noting_step():
        found.extend(p.grad.clone() for p in module.parameters())
        return step()

    trainer.proposal.backward, trainer.proposal.step = noting_backward, noting_step
    trainer.train()
    assert len(of_losses) == 2
    for gradient, *parts in zip(found, *of_losses, strict=True):
        torch.testing.assert_close(gradient, sum(parts))


def test_proposal_model_given(make, model_dirs, tokenizer):
    trainer = make(extra={"proposal_model": build_model("llama", len(tokenizer), seed=5)})
    assert type(trainer.proposal.module).__name__ == "LlamaForCausalLM"
    trainer.train()
    assert type(make(extra={"proposal_model": model_dirs["llama"]}).proposal.module).__name__ == "LlamaForCausalLM"


def test_refused_models(make, model_dirs, tokenizer):
    policy = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
    with pytest.raises(ValueError, match="is the policy itself"):
        make(model=policy, extra={"proposal_model": policy, "processing_class": tokenizer})
    with pytest.raises(ValueError, match="vocabulary of 30 tokens"):
        make(extra={"proposal_model": build_model("gpt2", 30)})
    with pytest.raises(ValueError, match="builds no proposal"):
        make(alpha=0.0, extra={"proposal_model": model_dirs["gpt2"]})
