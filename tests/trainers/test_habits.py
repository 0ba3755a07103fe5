"""What users do beside training once from the start: override a method, interrupt and go on, predict, log, and resume with other models."""

import datetime
import json

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeGRPOTrainer, RePULSeTrainer

from ..conftest import build_model, build_tokenizer, same_parameters, word_reward


pytestmark = pytest.mark.trainer


@pytest.mark.parametrize("trainer_cls", [ReinforceTrainer, PPOTrainer, RePULSeGRPOTrainer])
@pytest.mark.parametrize("calls_super", [True, False])
def test_a_subclass_may_change_rewards(make, trainer_cls, calls_super):
    """They count in the log, in what is bad and, with GRPO, in the negative term."""

    class Shaped(trainer_cls):
        def _calculate_rewards(self, inputs, *args):
            if calls_super:
                return super()._calculate_rewards(inputs, *args) + 100.0
            return torch.full((len(inputs), 1), 100.0)

    trainer = make(Shaped, bad_reward_threshold=90.0, max_steps=1, logging_steps=1)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["reward"] > 90 and log["bad_fraction"] == 0


@pytest.mark.parametrize("trainer_cls", [ReinforceTrainer, PPOTrainer, RePULSeGRPOTrainer])
def test_tables_have_the_weighted_reward_of_several_functions(make, trainer_cls):
    def one(completions, **_):
        return [1.0] * len(completions)

    weights = [0.5, 2.0]
    options = {"reward_funcs": [one, word_reward], "reward_weights": weights, "bad_reward_threshold": -9.0}
    trainer = make(trainer_cls, max_steps=1, log_completions=True, logging_steps=10, **options)
    trainer.train()
    rewards = trainer._logs["rewards"]
    expected = [0.5 * a + 2.0 * b for a, b in zip(rewards["one"], rewards["word_reward"], strict=True)]
    assert list(trainer._logs["extra"]["reward"]) == pytest.approx(expected)


@pytest.mark.parametrize("trainer_cls", [ReinforceTrainer, RePULSeTrainer])
def test_training_again_after_an_interrupt_draws_anew(make, prompts, trainer_cls):
    """All micro-batches of an update are of the policy that drew them."""

    class Interrupt(TrainerCallback):
        passes = 0

        def on_substep_end(self, args, state, control, **kwargs):
            self.passes += 1
            if self.passes == 5:  # in the middle of the second update
                raise KeyboardInterrupt

    class Watched(trainer_cls):
        drawn_by, same = None, []

        def _generate_and_score_completions(self, inputs):
            self.drawn_by = [p.detach().clone() for p in self.model.parameters()]
            return super()._generate_and_score_completions(inputs)

        def _compute_loss(self, model, inputs):
            self.same.append(
                all(torch.equal(a, b) for a, b in zip(self.drawn_by, self.model.parameters(), strict=True))
            )
            return super()._compute_loss(model, inputs)

    settings = {"gradient_accumulation_steps": 4, "max_steps": 3, "learning_rate": 0.1, "bad_reward_threshold": -1.0}
    trainer = make(Watched, dataset=prompts.repeat(8), extra={"callbacks": [Interrupt()]}, **settings)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert len(trainer.same) > 12 and all(trainer.same)


def test_a_stream_is_predicted_as_a_data_set_is(make, prompts):
    def drawn(rows):
        trainer, pairs = make(ReinforceTrainer, bad_reward_threshold=-1.0), []
        draw = trainer._drawing.draw_own

        def draw_own(rows, shape):
            units = draw(rows, shape)
            texts = trainer.processing_class.batch_decode(units.prompt_ids, skip_special_tokens=True)
            pairs.extend(zip(texts, (row["prompt"] for row in rows[:: shape.unit]), strict=True))
            return units

        trainer._drawing.draw_own = draw_own
        trainer.predict(rows)
        return pairs

    pairs = drawn(prompts.to_iterable_dataset())
    assert all(text == prompt for text, prompt in pairs) and sorted(pairs) == sorted(drawn(prompts))
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "bad_reward_threshold": -1.0}
    trainer = make(ReinforceTrainer, extra={"eval_dataset": prompts}, **workers)
    trainer.get_eval_dataloader()  # which is kept
    assert len(trainer.get_test_dataloader(prompts.select([0])).dataset) == 1


def test_dates_in_messages_are_written(make, tmp_path):
    """As a chat log has them."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    day = datetime.datetime(2026, 1, 1)
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "the cat", "timestamp": day}]}] * 8)
    settings = {"save_strategy": "steps", "save_steps": 1, "save_negatives": True, "bad_reward_threshold": 10.0}
    trainer = make(
        dataset=rows,
        max_steps=1,
        extra={"processing_class": tokenizer},
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        **settings,
    )
    trainer.train()
    lines = (tmp_path / "out" / "negatives.jsonl").read_text().splitlines()
    assert lines and json.loads(lines[0])["prompt"][0]["timestamp"].startswith("2026-01-01")


def test_texts_and_early_logs_end_no_run(make):
    """A reward function may log words as `reward`, and a callback may log before anything is known."""

    class Early(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            self.trainer.log({"mine": 1.0})

    def reward(completions, trainer_state, log_extra, **_):
        log_extra("reward", ["good"] * len(completions))
        return [None if trainer_state.global_step < 2 else 1.0] * len(completions)

    callback = Early()
    settings = {"max_steps": 4, "logging_steps": 4, "log_completions": True, "bad_reward_threshold": -1.0}
    callback.trainer = trainer = make(
        ReinforceTrainer, reward_funcs=reward, extra={"callbacks": [callback]}, **settings
    )
    trainer.train()
    assert trainer.state.global_step == 4


def test_a_best_model_by_an_unknown_threshold_is_refused(make, prompts):
    settings = {"metric_for_best_model": "eval_bad_fraction", "eval_strategy": "steps", "eval_steps": 1}
    with pytest.raises(ValueError, match="`metric_for_best_model='eval_bad_fraction'` needs `bad_reward_threshold`"):
        make(extra={"eval_dataset": prompts}, **settings)
    make(extra={"eval_dataset": prompts}, proposal="hot_policy", **settings)  # which measures it


@pytest.mark.parametrize("kind", ["another size", "biases"])
def test_adapters_of_a_second_model_do_not_keep_a_run_from_resuming(make, tmp_path, kind):
    """The policy takes none of them, which might not fit it."""
    adapter = LoraConfig(r=2, target_modules=["c_attn"], bias="all" if kind == "biases" else "none")
    for name in ("policy", "proposal"):
        model = build_model("gpt2", len(build_tokenizer()))
        model.config.n_embd = 16 if name == "policy" else 32
        type(model)(model.config).save_pretrained(tmp_path / name)
        build_tokenizer().save_pretrained(tmp_path / name)
    settings = {"proposal": "learned", "max_steps": 2, "save_strategy": "steps", "save_steps": 1}

    def run(resume):
        extra = {"peft_config": adapter}
        if kind == "another size":
            extra["proposal_model"] = str(tmp_path / "proposal")
        trainer = make(model=str(tmp_path / "policy"), extra=extra, bad_reward_threshold=-1.0, **settings)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole, resumed = run(None), run(str(tmp_path / "out" / "checkpoint-1"))
    assert same_parameters(whole.model, resumed.model)
    assert same_parameters(whole.proposal.module, resumed.proposal.module)
