"""RePULSeGRPOTrainer's losses and gradients on recorded trajectories in which a tool wrote some of the tokens.

Reference values come from plain forward passes, one unpadded trajectory at a time, and loops over the tokens that the model wrote.
"""

import math
from dataclasses import replace

import pytest
import torch

from trl_repulse import RePULSeGRPOTrainer

from ..recorded import PROMPTS, N, assert_gradients, gradients, prepare, pushed, recorded, reduced, written
from ..trainers.test_ppo_math import HOT, OWN, TERM


pytestmark = [pytest.mark.trainer, pytest.mark.thorough]

TOOL = 15  # " ran": no model writes it, so that a trajectory shows whose its tokens are
POLICY = [
    [[12, 13, TOOL, 14, 1], [18, TOOL, TOOL, 1], [1], [17, 17, 11]],
    [[11, 16, TOOL, TOOL, 12], [TOOL, 17, 12], [18, 18, 18], [14, 1]],
]
PROPOSAL = [
    [[18, 13, TOOL, 18, 1], [18, 17], [13, TOOL, 14], [18, TOOL, TOOL, 18, 1]],
    [[11, 1], [18, TOOL, 1], [12, 18, 13], [TOOL, 16, 16, TOOL, 16]],
]
# What an environment may add to the proposal's prompts: of different lengths, and of some nothing
BEGUN = [["", " fish", " sat dog", ""], [" ate", "", "", " cat"]]
CASES = {
    "own": OWN,
    "hot": HOT,
    "hot, more": HOT | {"num_proposal_generations": 2 * N},
    "hot, Eq. 4": HOT | {"alpha_normalization": "none", "logprob_reduction": "sum"},
    "proposal": TERM,
    "proposal, Eq. 4": TERM | {"alpha_normalization": "none", "logprob_reduction": "sum"},
}


class Acting(recorded(RePULSeGRPOTrainer)):
    """Samples are the recorded ones; with `begun`, the proposal's environments have added to its prompts."""

    begun = False
    noise, noisy = 0.0, TOOL  # on log-probabilities of which tokens

    def _generate(self, prompts):
        seen, completions, texts = dict.fromkeys(PROMPTS, 0), [], list(prompts)
        others = self._draws_others()
        for i, prompt in enumerate(prompts):
            place = seen[prompt] % N
            completions.append((PROPOSAL if others else POLICY)[PROMPTS.index(prompt)][place])
            texts[i] += BEGUN[PROMPTS.index(prompt)][place] if others and self.begun else ""
            seen[prompt] += 1
        prompt_ids = [self.processing_class(text)["input_ids"] for text in texts]
        masks = [[int(token != TOOL) for token in completion] for completion in completions]
        answers = self.processing_class.batch_decode(completions, skip_special_tokens=True)
        return prompt_ids, completions, masks, answers, None, {}, None, []

    def _build_services(self):
        super()._build_services()
        score = self._scoring.score

        def noisy(model, units, *args, **options):
            scores = score(model, units, *args, **options)
            sets = units.sets()
            log_p = {name: x + self.noise * (sets[name].ids == self.noisy) for name, x in scores.log_p.items()}
            return replace(scores, log_p=log_p)

        self._scoring.score = noisy


@pytest.fixture
def run(tmp_path, tokenizer):
    """One update on the recorded trajectories; the trainer, the models, and all gradients."""

    def run(batch_size=8, accumulation=1, begun=False, noise=0.0, noisy=TOOL, architecture="gpt2", **kwargs):
        settings = {"max_completion_length": 5, "scale_rewards": "none", "beta": 0.3, "use_cpu": True} | kwargs
        given = Acting, architecture, batch_size, accumulation
        trainer, models, reference = prepare(tmp_path, tokenizer, *given, prompts=PROMPTS, **settings)
        trainer.begun, trainer.noise, trainer.noisy = begun, noise, noisy
        return trainer, models["policy"], models.get("proposal"), reference, gradients(trainer, models)

    return run


def grpo_loss(policy, reference, tokenizer, reward, args):
    loss, tokens = 0.0, sum(token != TOOL for group in POLICY for row in group for token in row)
    for prompt, group in zip(PROMPTS, POLICY, strict=True):
        rewards = reward([tokenizer.decode(c, skip_special_tokens=True) for c in group])
        for completion, r in zip(group, rewards, strict=True):
            log_p, own = written(policy, tokenizer, prompt, completion, tool=TOOL)
            gap = written(reference, tokenizer, prompt, completion, tool=TOOL)[0].detach() - log_p
            ratio = (log_p - log_p.detach()).exp()
            gain = (r - sum(rewards) / N) - args.beta * (gap.exp() - gap - 1)  # `use_bias_correction_kl`
            loss = loss - (gain * ratio * own).sum() / tokens
    return loss


def proposal_terms(policy, proposal, tokenizer, reward, args, begun):
    """The negative term of the proposal's samples, and the proposal's loss."""
    term, loss = 0.0, 0.0
    for prompt, group, added in zip(PROMPTS, PROPOSAL, BEGUN, strict=True):
        prompts = [prompt + (text if begun else "") for text in added]
        ps = [written(policy, tokenizer, *pair, tool=TOOL) for pair in zip(prompts, group, strict=True)]
        qs = [written(proposal, tokenizer, *pair, tool=TOOL)[0] for pair in zip(prompts, group, strict=True)]
        rewards = reward([tokenizer.decode(c, skip_special_tokens=True) for c in group])
        w = [
            math.exp(log_p.sum().item() + args.target_dist_beta * r - log_q.sum().item())
            for (log_p, _), log_q, r in zip(ps, qs, rewards, strict=True)
        ]
        w = [x / sum(w) for x in w]
        alpha = args.alpha / N if args.alpha_normalization == "samples" else args.alpha
        for weight, score in zip(w, ps, strict=True):
            term = term + alpha * weight * reduced(*score, args) / len(PROMPTS)
        for i, (log_p, own) in enumerate(ps):
            for t in own.nonzero().flatten().tolist():
                prefix = []
                for (lp, _), lq in zip(ps, qs, strict=True):
                    psi = (lq[t] - lp[t]).item() if t < len(lp) else 0.0  # 0 at a tool's token
                    prefix.append(math.exp(lp[: t + 1].sum().item() + psi - lq[: t + 1].sum().item()))
                twist = qs[i][t] - log_p[t].detach()
                loss = loss - (w[i] - prefix[i] / sum(prefix)) * twist / own.sum() / N / len(PROMPTS)
    return term, loss


def check(found, tokenizer, reward, begun=False):
    trainer, policy, proposal, reference, grads = found
    args, loss = trainer.args, grpo_loss(policy, reference, tokenizer, reward, trainer.args)
    if proposal is None:
        draws = (args.num_proposal_generations or N) // N if args.draws_hot else 0
        drawn = [others * draws for others in PROPOSAL]
        loss = loss + pushed(policy, tokenizer, reward, args, drawn, POLICY, BEGUN if begun else None, TOOL)
    else:
        term, proposal_loss = proposal_terms(policy, proposal, tokenizer, reward, args, begun)
        loss = loss + term
        assert_gradients(proposal_loss, proposal, grads["proposal"])
    assert_gradients(loss, policy, grads["policy"])
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=2e-5)


@pytest.mark.parametrize("batches", [(8, 1), (2, 4)], ids=["whole", "cut"])
@pytest.mark.parametrize("case", CASES)
def test_what_the_model_wrote_counts(run, tokenizer, reward, case, batches):
    check(run(*batches, **CASES[case]), tokenizer, reward)


@pytest.mark.parametrize("case", ["hot", "hot, more", "proposal"])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_environments_that_begin_otherwise(run, tokenizer, reward, case, architecture):
    """A sample is scored behind the prompt that its environment began, and its rows still fit into one pass with the policy's."""
    settings = {"architecture": architecture, "batch_size": 4, "accumulation": 2}
    check(run(begun=True, **settings, **CASES[case]), tokenizer, reward, begun=True)


@pytest.mark.parametrize("case", ["hot", "proposal"])
def test_a_prompt_that_is_not_the_samples_would_be_noticed(run, tokenizer, reward, case):
    with pytest.raises(AssertionError):
        check(run(begun=True, **CASES[case]), tokenizer, reward, begun=False)


TIMES = ("time", "runtime", "per_second", "memory")


@pytest.mark.parametrize("case", ["own", "hot", "proposal"])
@pytest.mark.parametrize(("loss_type", "iterations"), [("dapo", 1), ("grpo", 2)])
def test_log_probabilities_of_tools_are_looked_at_nowhere(run, case, loss_type, iterations):
    """Whatever the models say of them: the same gradients and logs, to the last bit."""
    settings = CASES[case] | {"loss_type": loss_type, "num_iterations": iterations}
    one, other = run(**settings), run(noise=-3.0, **settings)
    for name in one[-1]:
        assert all(map(torch.equal, one[-1][name], other[-1][name]))
    logs = [
        {key: value for key, value in found[0].state.log_history[0].items() if not any(word in key for word in TIMES)}
        for found in (one, other)
    ]
    assert str(logs[0]) == str(logs[1])


def test_log_probabilities_of_the_model_are_looked_at(run):
    """The control: noise on tokens that it wrote."""
    one, other = run(**TERM), run(noise=-3.0, noisy=13, **TERM)
    for name in one[-1]:
        assert not all(map(torch.equal, one[-1][name], other[-1][name]))
