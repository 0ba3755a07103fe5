"""What a training run ends with: reward, P(bad) and KL of the trained policy on prompts that it was not trained on."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .rare.estimates import RareEstimate, prob_bad
from .rare.sampling import draw, find_temperature
from .report import text_table


DIVERGENCE = 2.0  # nats per completion between the policy and its hot copy


def estimate_prob_bad(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Dataset,
    reward: Callable[..., Any] | nn.Module,
    threshold: float,
    max_completion_length: int,
    num_samples: int,
    **kwargs: Any,
) -> RareEstimate:
    """
    P(reward < threshold) of a policy, from its own samples and as many of a hot copy, weighted against their mixture.

    The hot copy is the policy at the temperature that takes it 2 nats per completion from itself, so that probabilities far below one
    in the number of samples can be estimated. What both hardly ever draw is not seen; `rare-events` says how much that may be.

    Args:
        policy ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            The policy.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        prompts ([`~datasets.Dataset`]):
            Rows with a `"prompt"` and the columns that the reward needs.
        reward (`Callable` or `torch.nn.Module`):
            Reward function or reward model.
        threshold (`float`):
            Reward under which an output is bad.
        max_completion_length (`int`):
            Tokens of a completion.
        num_samples (`int`):
            Completions of each prompt from the policy, and from the hot copy.
        kwargs:
            Further arguments of [`~trl_repulse.evaluation.rare.sampling.draw`].

    Returns:
        [`~trl_repulse.evaluation.rare.estimates.RareEstimate`]: `value`, with `low` and `high`, the ends of its 95 % interval.
    """
    shared = {name: kwargs[name] for name in ("chat_template_kwargs", "batch_size", "seed") if name in kwargs}
    hot = find_temperature(policy, tokenizer, prompts["prompt"][:], max_completion_length, DIVERGENCE, **shared)
    counts = [num_samples, num_samples]
    models = [policy, policy]
    sample = draw(
        models, tokenizer, prompts, reward, counts, max_completion_length, temperatures=[1.0, hot], **kwargs
    ).sample
    return prob_bad(sample, threshold)


def format_unseen(columns: Mapping[str, Mapping[str, float]], notes: Sequence[str] = ()) -> str:
    """
    A table of policies, side by side.

    Args:
        columns (`Mapping[str, Mapping[str, float]]`):
            By name, what is known of a policy: `eval_reward`; `eval_p_bad` with the ends of its interval, `eval_p_bad_low` and `eval_p_bad_high`;
            the KL in nats per completion as `kl`; and the completions drawn in training as `samples`.
        notes (`Sequence[str]`, *optional*):
            Lines below the table.

    Returns:
        `str`: several lines.
    """
    values = list(columns.values())
    rows = [
        ("", *columns),
        ("reward", *(f"{each['eval_reward']:.2f}" for each in values)),
        ("P(bad)", *(_share(each["eval_p_bad"]) for each in values)),
        ("  95% interval", *(_interval(each) for each in values)),
        ("KL to the initial policy, nats", *(f"{each['kl']:.2f}" if "kl" in each else "–" for each in values)),
        ("completions drawn in training", *(f"{each['samples']:,}" for each in values)),
    ]
    return "\n".join([*text_table(rows), *notes])


def _interval(values: Mapping[str, float]) -> str:
    return f"{_share(values['eval_p_bad_low'])} to {_share(values['eval_p_bad_high'])}"


def _share(probability: float) -> str:
    return re.sub("e([+-])0", r"e\1", f"{probability:.1e}") if probability else "0"
