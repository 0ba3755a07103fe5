"""Prompts drawn by their estimated contribution to P(bad): the gradient stays unbiased."""

import numpy as np
import torch

from benchmarks.held_out.prompts import DrawnPromptsTrainer, PromptDraws
from trl_repulse import RePULSeConfig
from trl_repulse.embedded import load_prompts, policy_path, reward_model_path


def test_mean_over_draws_is_uniform():
    draws, random = PromptDraws(12, 0, floor=0.2, prior=0.3), np.random.default_rng(1)
    w = np.array([[0.0, 0.5, 0, 0], [0, 0, 0, 0], [1.5, 0.1, 0, 0]])
    draws.observe(np.array([3, 5, 11]), np.ones(3), w)
    probabilities = draws.probabilities()
    assert np.isclose(probabilities.sum(), 1) and probabilities.min() >= 0.2 / 12
    assert probabilities[11] > probabilities[0] > probabilities[3] > probabilities[5]
    gradients = random.normal(size=(12, 3)) + 1  # one a prompt
    found, drawn = [], np.zeros(12)
    for _ in range(40_000):
        prompts, counts = draws.draw(4)
        found.append((counts[:, None] * gradients[prompts]).mean(axis=0))
        np.add.at(drawn, prompts, 1)
    error = np.std(found, axis=0) / len(found) ** 0.5
    assert np.allclose(drawn / 160_000, probabilities, atol=3e-3)
    assert (np.abs(np.mean(found, axis=0) - gradients.mean(axis=0)) < 4 * error).all()


def test_loss_is_linear_in_the_weights(tmp_path):
    args = RePULSeConfig(
        output_dir=str(tmp_path), bad_reward_threshold=-1.0, max_completion_length=6, use_cpu=True, bf16=False, beta=0.2,
        num_generations=4, per_device_train_batch_size=8, report_to="none", save_strategy="no",
    )  # fmt: skip
    trainer = DrawnPromptsTrainer(
        model=policy_path(), reward_funcs=reward_model_path(), args=args, train_dataset=load_prompts(), drawn={"floor": 0.5, "prior": 0.3}
    )
    trainer.model.train()
    inputs = [{"prompt": "unused"}] * 8
    batch = trainer._generate_and_score_completions(inputs)

    def gradient(*weights: float) -> torch.Tensor:
        trainer.model.zero_grad()
        trainer._compute_loss(trainer.model, batch | {"prompt_weight": torch.tensor(weights)}).backward()
        return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])

    first, second, both = gradient(1.0, 0.0), gradient(0.0, 1.0), gradient(1.7, 0.6)
    assert first.norm() > 0 and second.norm() > 0
    assert torch.allclose(both, 1.7 * first + 0.6 * second, atol=1e-5)
    # With weights of 1 it is the package's own
    negative = super(type(trainer), trainer).build_negative_term()
    negative.choice = trainer._negative.choice
    own, trainer._negative = gradient(1.0, 1.0), negative
    assert torch.allclose(own, gradient(1.0, 1.0), atol=1e-6)
