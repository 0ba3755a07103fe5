"""
Exact evaluation by enumeration, for short completions over a small vocabulary.

Legend: P prompts, S enumerated completions, T tokens of the longest completion, V vocabulary, A tokens that do not end a
completion, E = V - A tokens that do.
"""

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from trl_repulse.data._texts import check_added_tokens, completion_texts, joins
from trl_repulse.evaluation._generation import reward_of_model
from trl_repulse.models._adapters import in_mode
from trl_repulse.models._model_checks import check_causal, check_reward_model


MAX_ENUMERATED = 5_000_000  # prompts times completions
Reward = Callable[[list[str]], torch.Tensor]


def log_mean_exp(log_prob: torch.Tensor) -> float:
    """Log of the mean of probabilities, from their logs (P,)."""
    return log_prob.logsumexp(dim=0).item() - math.log(len(log_prob))


@dataclass(frozen=True)
class ExactReport:
    """
    Exact properties of a policy. Means are over prompts; log-probabilities are in nats.

    Args:
        expected_reward, expected_reward_per_prompt: Mean of E[r], and E[r] of each prompt.
        max_reward: Mean of the largest reward of any completion, which no policy can exceed.
        log_prob_bad, log_prob_bad_per_prompt: Log of the mean of P(bad), and log P(bad) of each prompt.
        entropy: Mean entropy of the completion, in nats.
        kl: Mean of KL(policy || reference), in nats; `None` without a reference.
    """

    expected_reward: float
    expected_reward_per_prompt: tuple[float, ...]
    max_reward: float
    log_prob_bad: float
    log_prob_bad_per_prompt: tuple[float, ...]
    entropy: float
    kl: float | None


@dataclass(frozen=True)
class ExactProposalReport:
    """
    Exact properties of a proposal q for the target σ ∝ p · exp(β · min(r, reward_cap)) of a policy p. Means are over
    prompts.

    Args:
        log_z: Mean of log Z = log E_p[exp(β · min(r, reward_cap))], in nats.
        kl_proposal_target: Mean of KL(q || σ), in nats: the gap of the lower bound of log Z from q.
        kl_target_proposal: Mean of KL(σ || q), in nats: the loss of contrastive twist learning.
        ess_fraction: Mean of 1 / E_q[(σ/q)²], in (0, 1]: effective samples per draw from q, for many draws.
        expected_reward, target_expected_reward: Means of E_q[r] and of E_σ[r].
        log_prob_bad, target_log_prob_bad: Logs of the means of q(bad) and of σ(bad).
    """

    log_z: float
    kl_proposal_target: float
    kl_target_proposal: float
    ess_fraction: float
    expected_reward: float
    log_prob_bad: float
    target_expected_reward: float
    target_log_prob_bad: float


def _expectation(log_prob: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """E[values] per prompt, (P,), from log_prob and values (P, S); completions of probability 0 count 0."""
    return torch.where(log_prob == -torch.inf, 0.0, log_prob.exp() * values).sum(dim=1)


class ExactEvaluator:
    """
    Enumerates every completion of up to T tokens, and computes exactly what sampling can only estimate.

    A completion ends with an eos token or at T tokens: `[eos]`, `[a, eos]`, ..., and all of T tokens. Its reward is that of
    prompt and completion as text, without special tokens. Rewards and the reference's log-probabilities are computed once.
    Models run in their own precision, the rest in float64 and log space. Prompts are not padded.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the policy; its length is V. Without `eos_token_ids` it must have an eos token.
        prompts (`Sequence[str]`): P plain-text prompts.
        reward (`Callable[[list[str]], torch.Tensor]` or `torch.nn.Module`):
            A function from texts (prompt + completion) to one reward each, or a sequence-classification model.
        bad_token_ids (`Sequence[int]`): Tokens that make a completion bad, anywhere in it.
        max_completion_length (`int`): T, from 1 to 3.
        reward_tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer of the reward model; required if `reward` is a module.
        reference_model ([`~transformers.PreTrainedModel`], *optional*):
            Causal language model for `kl`, for instance the initial policy.
        eos_token_ids (`Collection[int]`, *optional*):
            Tokens that end a completion, as a trainer's `eos_token_ids`; if unset, only the tokenizer's.
        batch_size (`int`, *optional*, defaults to `512`): Sequences per forward pass.
        device (`torch.device` or `str`, *optional*, defaults to `"cpu"`):
            Device of the results. Models stay on their own.

    Attributes:
        completion_ids (`torch.Tensor` of shape `(S, T)`): The completions; -1 after the end.
        bad (`torch.Tensor` of shape `(S,)`): Whether a completion is bad.
        rewards (`torch.Tensor` of shape `(P, S)`): Reward of every completion of every prompt.

    Raises:
        ValueError: If an argument is out of range, or if P times S exceeds 5,000,000.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[str],
        reward: Reward | nn.Module,
        bad_token_ids: Sequence[int],
        max_completion_length: int,
        *,
        reward_tokenizer: PreTrainedTokenizerBase | None = None,
        reference_model: nn.Module | None = None,
        eos_token_ids: Collection[int] | None = None,
        batch_size: int = 512,
        device: torch.device | str = "cpu",
    ) -> None:
        if max_completion_length not in (1, 2, 3):
            raise ValueError(f"max_completion_length is {max_completion_length}; set 1, 2 or 3, or use sampling.")
        if eos_token_ids is None:
            eos_token_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        if not eos_token_ids:
            raise ValueError("The tokenizer has no eos token; set tokenizer.eos_token.")
        if isinstance(reward, nn.Module):
            if reward_tokenizer is None:
                raise ValueError("The reward is a model; pass its tokenizer as reward_tokenizer.")
            check_reward_model(reward, "`reward`")
            reward = reward_of_model(reward, reward_tokenizer)
        self.vocab_size = len(tokenizer)
        for name, tokens in (("bad_token_ids", bad_token_ids), ("eos_token_ids", eos_token_ids)):
            unknown = [token for token in tokens if not 0 <= token < self.vocab_size]
            if unknown:
                raise ValueError(
                    f"{name} has {unknown[0]}, but the tokenizer's ids are 0 to {self.vocab_size - 1}; use its own."
                )
        self._eos = sorted(set(eos_token_ids))  # (E,)
        live = self.vocab_size - len(self._eos)
        count = live ** (max_completion_length - 1) * self.vocab_size
        count += len(self._eos) * sum(live**depth for depth in range(max_completion_length - 1))
        if count * len(prompts) > MAX_ENUMERATED:
            raise ValueError(
                f"{len(prompts)} prompts times {count} completions exceed {MAX_ENUMERATED} sequences; pass fewer prompts, "
                "set a smaller max_completion_length, or evaluate by sampling."
            )
        self.max_completion_length = max_completion_length
        self.batch_size = batch_size
        self.device = torch.device(device)
        if isinstance(prompts, str) or not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError(
                "Exact evaluation needs a list of plain-text prompts; evaluate conversations by sampling."
            )
        self._prompts = list(prompts)
        prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        if not prompt_ids or not all(prompt_ids):
            raise ValueError("Pass at least one prompt, and prompts of at least one token.")
        check_added_tokens(tokenizer, self._prompts, prompt_ids)
        self._prompt_ids = list(map(torch.tensor, prompt_ids))
        self._live = torch.tensor([token for token in range(self.vocab_size) if token not in self._eos])  # (A,)
        self.completion_ids = self._enumerate()
        self.bad = torch.isin(self.completion_ids, torch.tensor(list(bad_token_ids))).any(dim=1).to(self.device)
        self.rewards = self._score(tokenizer, reward)
        self._reference_log_probs = None if reference_model is None else self.log_probs(reference_model)

    def _prefixes(self, length: int) -> torch.Tensor:
        """All beginnings of `length` tokens without an eos, (A^length, length), in lexicographic order."""
        return torch.tensor(list(itertools.product(self._live.tolist(), repeat=length)), dtype=torch.long)

    def _enumerate(self) -> torch.Tensor:
        """All completions, (S, T), in the order of `log_probs`: shorter ones first, then lexicographic."""
        length = self.max_completion_length
        begun = [prefix for depth in range(length - 1) for prefix in self._prefixes(depth).tolist()]
        rows = [[*prefix, eos] for prefix in begun for eos in self._eos]
        rows += [[*prefix, last] for prefix in self._prefixes(length - 1).tolist() for last in range(self.vocab_size)]
        return torch.tensor([row + [-1] * (length - len(row)) for row in rows])

    def _score(self, tokenizer: PreTrainedTokenizerBase, reward: Reward) -> torch.Tensor:
        """Reward of every completion of every prompt, (P, S); equal texts are scored once."""
        ids = [[token for token in row if token >= 0] for row in self.completion_ids.tolist()]
        decoded: list[str] = []
        rewards = []
        for prompt, prompt_ids in zip(self._prompts, self._prompt_ids, strict=True):
            if not decoded or not joins(tokenizer):
                prompts = [prompt] * len(ids)
                decoded = completion_texts(tokenizer, prompts, [prompt_ids.tolist()] * len(ids), ids)
                place = {completion: index for index, completion in enumerate(dict.fromkeys(decoded))}
                index = torch.tensor([place[completion] for completion in decoded])  # (S,)
            texts, of_prompt = [prompt + completion for completion in place], []
            for start in range(0, len(texts), self.batch_size):
                batch = texts[start : start + self.batch_size]
                values = torch.as_tensor(reward(batch)).detach().to("cpu", torch.float64)
                if values.shape != (len(batch),):
                    shape = tuple(values.shape)
                    raise ValueError(
                        f"{len(batch)} texts got rewards of shape {shape}; return one finite number a text."
                    )
                if not values.isfinite().all():
                    worst = int((~values.isfinite()).nonzero()[0])
                    raise ValueError(
                        f"The reward of {batch[worst]!r} is {values[worst].item()}; return one finite number a text."
                    )
                of_prompt.append(values)
            rewards.append(torch.cat(of_prompt)[index])
        return torch.stack(rewards).to(self.device)

    def log_probs(self, model: nn.Module) -> torch.Tensor:
        """
        Log-probability of every completion under a causal language model over the tokenizer's vocabulary, (P, S), in
        nats, float64, without gradient; they sum to one over the completions of a prompt. The model's training mode is
        restored. Raises `ValueError` if its vocabulary has another size, or it is not causal.
        """
        length, results, device = self.max_completion_length, [], next(model.parameters()).device
        config = getattr(model, "config", None)  # any module that returns logits is accepted
        if config is not None:
            check_causal(model, "The model")
            self._check_size(config.get_text_config().vocab_size)
        with in_mode(model, training=False):
            for prompt in self._prompt_ids:
                blocks = []
                for prefix in self._prefixes(length - 1).split(self.batch_size):  # (B, T - 1)
                    ids = torch.cat([prompt.expand(len(prefix), -1), prefix], dim=1).to(device)
                    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -length:]
                    self._check_size(logits.shape[-1])
                    blocks.append(logits.to(self.device, torch.float64).log_softmax(dim=-1))
                results.append(self._chain(torch.cat(blocks)))
        return torch.stack(results)

    def _check_size(self, size: int) -> None:
        if size != self.vocab_size:
            sizes = f"The model has {size} logits, the tokenizer {self.vocab_size} tokens"
            raise ValueError(f"{sizes}; resize the model's embeddings to the tokenizer.")

    def _chain(self, conditional: torch.Tensor) -> torch.Tensor:
        """Chain rule down the tree: log-probability of every completion, (S,), from `conditional`, (A^(T-1), T, V)."""
        length, ended = self.max_completion_length, []
        node = conditional.new_zeros(1)  # log-probability of every prefix of `depth` tokens, (A^depth,)
        for depth in range(length - 1):
            # Rows with the same first `depth` tokens are equal here
            joint = node[:, None] + conditional[:: len(self._live) ** (length - 1 - depth), depth]  # (A^depth, V)
            ended.append(joint[:, self._eos].flatten())
            node = joint[:, self._live.to(self.device)].flatten()
        return torch.cat([*ended, (node[:, None] + conditional[:, -1]).flatten()])

    def _log_prob_bad(self, log_prob: torch.Tensor) -> torch.Tensor:
        """log P(bad) per prompt, (P,); -inf without bad completions."""
        return log_prob.masked_fill(~self.bad, -torch.inf).logsumexp(dim=1)

    def evaluate(self, policy: nn.Module) -> ExactReport:
        """The exact properties of a policy, a causal language model."""
        log_prob = self.log_probs(policy)
        expected_reward = _expectation(log_prob, self.rewards)
        bad = self._log_prob_bad(log_prob)
        kl = None
        if self._reference_log_probs is not None:
            kl = _expectation(log_prob, log_prob - self._reference_log_probs).mean().item()
        return ExactReport(
            expected_reward=expected_reward.mean().item(),
            expected_reward_per_prompt=tuple(expected_reward.tolist()),
            max_reward=self.rewards.amax(dim=1).mean().item(),
            log_prob_bad=log_mean_exp(bad),
            log_prob_bad_per_prompt=tuple(bad.tolist()),
            entropy=-_expectation(log_prob, log_prob).mean().item(),
            kl=kl,
        )

    def evaluate_proposal(
        self, proposal: nn.Module, policy: nn.Module, beta: float, reward_cap: float = math.inf
    ) -> ExactProposalReport:
        """
        The exact properties of a proposal against the target that it is trained for.

        Args:
            proposal, policy ([`~transformers.PreTrainedModel`]):
                Causal language models q, and p, the base of the target.
            beta (`float`): β of the target, `target_dist_beta`: negative to seek low rewards.
            reward_cap (`float`, *optional*, defaults to `inf`): In the target, rewards above this count as this.
        """
        log_q = self.log_probs(proposal)
        log_target = self.log_probs(policy) + beta * self.rewards.clamp(max=reward_cap)
        log_z = log_target.logsumexp(dim=1)  # (P,)
        log_target = log_target - log_z[:, None]
        second_moment = torch.where(log_target == -torch.inf, -torch.inf, 2 * log_target - log_q).logsumexp(dim=1)
        return ExactProposalReport(
            log_z=log_z.mean().item(),
            kl_proposal_target=_expectation(log_q, log_q - log_target).mean().item(),
            kl_target_proposal=_expectation(log_target, log_target - log_q).mean().item(),
            ess_fraction=(-second_moment).exp().mean().item(),
            expected_reward=_expectation(log_q, self.rewards).mean().item(),
            log_prob_bad=log_mean_exp(self._log_prob_bad(log_q)),
            target_expected_reward=_expectation(log_target, self.rewards).mean().item(),
            target_log_prob_bad=log_mean_exp(self._log_prob_bad(log_target)),
        )
