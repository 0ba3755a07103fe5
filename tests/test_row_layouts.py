"""Completions of a prompt that TRL cuts apart: micro-batches sorted by prompt, rows that neighbours share, passes counted in tokens."""

import pytest
import torch
from datasets import Dataset

from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeGRPOTrainer, RePULSePPOTrainer, RePULSeTrainer
from trl_repulse.trainers import _row_layouts
from trl_repulse.trainers._row_layouts import by_prompt

from .test_shared_prompts import assert_the_same


LENGTH, WIDTH = 8, 2  # tokens of a prompt and of a completion
PROMPTS = Dataset.from_dict(
    {"prompt": [f"{first} cat sat a dog ate the fish" for first in ("the", "a", "cat", "dog")]}
)
HOT = {"proposal": "hot_policy", "bad_reward_threshold": 0.0, "potential": "indicator", "target_dist_beta": None}
METHODS = {
    "PPO": (PPOTrainer, {}),
    "RePULSe on PPO": (RePULSePPOTrainer, HOT),
    "RePULSe on PPO, learned": (RePULSePPOTrainer, {}),
    "RePULSe on GRPO": (RePULSeGRPOTrainer, HOT),
    "RePULSe on GRPO, own": (RePULSeGRPOTrainer, {"proposal": "policy"}),
    "RePULSe, cut apart": (RePULSeTrainer, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}),
    "REINFORCE, cut apart": (ReinforceTrainer, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}),
}
SETTINGS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "beta": 0.1,
    "max_completion_length": WIDTH,
    "optim": "sgd",
    "learning_rate": 0.3,
}


def build(make, method, **kwargs):
    trainer_cls, settings = METHODS[method]
    return make(trainer_cls, model="llama", **({"dataset": PROMPTS} | SETTINGS | settings | kwargs))


def watch(trainer):
    """Passes of the policy: whether with gradient, and the shape of the rows."""
    seen = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((torch.is_grad_enabled(), *kwargs["input_ids"].shape)),
        with_kwargs=True,
        prepend=True,
    )
    return seen


def test_rows_of_a_prompt_come_together():
    ids = torch.tensor([[5, 6], [0, 6], [5, 6], [7, 8], [0, 6], [7, 8]])
    rows = {
        "prompt_ids": ids,
        "prompt_mask": (ids != 0).long(),
        "rewards": torch.arange(6.0),
        "num_items_in_batch": torch.tensor(9),
        "nothing": None,
    }
    batches = [{k: x[i : i + 2] if k in list(rows)[:3] else x for k, x in rows.items()} for i in (0, 2, 4)]
    found = by_prompt(batches)
    assert [batch["rewards"].tolist() for batch in found] == [[1, 4], [0, 2], [3, 5]]
    for batch in found:
        assert (
            torch.equal(batch["prompt_ids"], ids[batch["rewards"].long()])
            and len(batch["prompt_ids"].unique(dim=0)) == 1
        )
        assert batch["num_items_in_batch"] == 9 and batch["nothing"] is None


@pytest.mark.trainer
@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_is_read_once(make, method, monkeypatch):
    """In a micro-batch, though TRL shuffles completions; updates and metrics are those of separate rows, and of rows not sorted."""
    together = build(make, method, share_prompts=True)
    seen = watch(together)
    together.train()
    per_batch = together.args.per_device_train_batch_size
    rows = [shape for gradient, *shape in seen if gradient]
    assert len(rows) == 2 * together.args.gradient_accumulation_steps
    assert all(count == 1 and (length - LENGTH) // WIDTH >= per_batch for count, length in rows)
    assert_the_same(together, build_and_train(make, method, share_prompts=False))

    monkeypatch.setattr(_row_layouts, "by_prompt", lambda batches: batches)
    shuffled = build(make, method, share_prompts=True)
    seen = watch(shuffled)
    shuffled.train()
    assert max(count for gradient, count, _ in seen if gradient) > 1  # the control
    for p, q in zip(together.model.parameters(), shuffled.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-5)


def build_and_train(make, method, **kwargs):
    trainer = build(make, method, **kwargs)
    trainer.train()
    return trainer


@pytest.mark.trainer
@pytest.mark.parametrize("method", ["PPO", "RePULSe on GRPO"])
@pytest.mark.parametrize(
    "prompts",
    [[0, 1, 2, 3], [0, 0, 1, 2], [0, 0, 0, 1], [0] * 4],
    ids=["all different", "one twice", "one three times", "one"],
)
def test_passes_without_gradient_are_counted_in_tokens(make, method, prompts):
    """Each reads no more tokens than a micro-batch in separate rows, and none reads a completion in a row of its own."""
    trainer = build(make, method, dataset=PROMPTS.select(prompts), share_prompts=True, max_steps=1)
    seen = []
    trainer.ref_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True, prepend=True
    )
    trainer.train()
    assert sum(rows * (length - LENGTH) // WIDTH for rows, length in seen) == 16
    assert all(length >= LENGTH + 4 * WIDTH and rows * length <= 4 * (LENGTH + WIDTH) for rows, length in seen)
    assert len(seen) == 2  # in place of 4


@pytest.mark.trainer
def test_a_small_micro_batch_reads_no_more_completions_than_it_has(make):
    trainer = build(make, "PPO", per_device_train_batch_size=2, gradient_accumulation_steps=8, max_steps=1)
    seen = watch(trainer)
    trainer.train()
    scored = [(count, length) for _, count, length in seen if length > LENGTH]
    assert set(scored) == {(1, LENGTH + 2 * WIDTH)}


@pytest.mark.trainer
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("PPO", {"steps_per_generation": 8, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}),
        ("RePULSe on GRPO", {"steps_per_generation": 4, "gradient_accumulation_steps": 2}),
        ("RePULSe on GRPO", {"loss_type": "bnpo"}),
        ("RePULSe on GRPO", {"top_entropy_quantile": 0.5}),
        (
            "RePULSe on GRPO",
            {
                "alpha": 0.0,
                "proposal": "policy",
                "bad_reward_threshold": None,
                "potential": "tilted",
                "target_dist_beta": -2.0,
            },
        ),
    ],
)
def test_trls_shuffle_stays(make, method, settings, monkeypatch):
    """Where micro-batches go to different updates, where each has a mean or a quantile of its own, and where the trainer is TRL's."""
    monkeypatch.setattr(_row_layouts, "by_prompt", lambda batches: pytest.fail("sorted"))
    build(make, method, **settings).train()
