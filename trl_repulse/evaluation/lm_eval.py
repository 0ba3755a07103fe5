"""
Tails of rewards in the [LM Evaluation Harness](https://github.com/EleutherAI/lm-evaluation-harness): a task, and the filter it uses.

Needs `pip install trl-repulse[lm-eval]`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from lm_eval.api.filter import Filter
from lm_eval.api.registry import register_filter
from lm_eval.api.task import ConfigurableTask

from ..data.loading import load_prompts
from ..rewards.loading import load_reward
from . import tails
from ._generation import as_function, process_state


# Of the model's own generation defaults those are put aside that the harness's models know by these names
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "until": []}


@register_filter("trl_repulse_reward")
class RewardFilter(Filter):
    """
    Turns all completions of each prompt into their rewards.

    Args:
        reward (`Callable`):
            Reward function, as TRL's trainers take it.
    """

    def __init__(self, reward: Callable[..., list[float | None]], **kwargs: Any):
        super().__init__(**kwargs)
        self.reward = reward

    def apply(self, resps: list[list[str]], docs: list[dict[str, Any]]) -> list[list[float]]:
        """
        Rewards of the completions.

        Raises:
            `ValueError`: If a completion has no finite reward.
        """
        rewards = []
        for completions, doc in zip(resps, docs, strict=True):
            columns = {name: [value] * len(completions) for name, value in doc.items() if name != "prompt"}
            prompts, answers = [doc["prompt"]] * len(completions), completions
            if not isinstance(doc["prompt"], str):
                answers = [[{"role": "assistant", "content": text}] for text in completions]
            found = self.reward(prompts=prompts, completions=answers, **columns)
            if any(value is None or not np.isfinite(value) for value in found):
                raise ValueError(f"A completion of the prompt {doc['prompt']!r} has no finite reward; fix the reward.")
            rewards.append([float(value) for value in found])
        return rewards


class TailTask(ConfigurableTask):
    """The task of [`tail_task`]; it refuses to evaluate prompts otherwise than they are written."""

    def build_all_requests(self, *args: Any, apply_chat_template: bool = False, **kwargs: Any) -> None:
        messages = not isinstance(self.dataset["test"][0]["prompt"], str)
        if messages != bool(apply_chat_template):
            found = "messages of a user; pass" if messages else "plain text; leave out"
            raise ValueError(f"The prompts are {found} `apply_chat_template=True`.")
        super().build_all_requests(*args, apply_chat_template=apply_chat_template, **kwargs)


def tail_task(
    prompts: str,
    threshold: float,
    reward_model_path: str | None = None,
    reward_type: str | None = None,
    reward_kwargs: dict[str, Any] | None = None,
    num_samples: int = 16,
    max_completion_length: int = 256,
    split: str = "train",
    prompt_column: str = "prompt",
    level: float = 0.01,
    trust_remote_code: bool = False,
) -> TailTask:
    """
    The held-out evaluation of `trl-repulse evaluate` as a task of the harness.

    Its metrics are `prob_bad`, P(reward < `threshold`), `cvar`, and the ends of their 95 % intervals.

    Args:
        prompts, split, prompt_column:
            Prompts, as for [`~trl_repulse.data.load_prompts`]: plain text or, with `apply_chat_template=True`, one message of a user.
        threshold (`float`):
            Reward under which an output is bad.
        reward_model_path, reward_type, reward_kwargs:
            The reward, as for [`~trl_repulse.rewards.load_reward`]; `reward_kwargs` are its further arguments.
        num_samples (`int`, *optional*, defaults to `16`):
            Completions of each prompt.
        max_completion_length (`int`, *optional*, defaults to `256`):
            Tokens of a completion.
        level (`float`, *optional*, defaults to `0.01`):
            Level of the CVaR.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether to run Python code that comes with the reward model.

    Returns:
        [`TailTask`]: for the `tasks` of `lm_eval.simple_evaluate`.

    Raises:
        `ValueError`: If prompts or reward cannot be loaded, or a prompt has several messages.

    Example:

    ```python
    >>> import lm_eval
    >>> from trl_repulse.evaluation.lm_eval import tail_task

    >>> task = tail_task("held_out.jsonl", threshold=-5.0, reward_model_path="my/reward-model")
    >>> lm_eval.simple_evaluate("hf", {"pretrained": "out"}, tasks=[task])["results"]
    ```
    """
    dataset: Any = load_prompts(prompts, split, column=prompt_column)
    for number, prompt in enumerate(dataset["prompt"]):
        if not isinstance(prompt, str) and [each["role"] for each in prompt] != ["user"]:
            raise ValueError(
                f"Prompt {number} has messages other than one of a user, which the harness's tasks do not take."
            )
    loaded = load_reward(reward_type, reward_model_path, **(reward_kwargs or {}))
    _, reward = as_function(loaded, None, process_state().device, trust_remote_code=trust_remote_code)
    estimates: dict[str, Callable[[np.ndarray], tails.Estimate]] = {
        "prob_bad": lambda rewards: tails.prob_below(rewards, threshold),
        "cvar": lambda rewards: tails.cvar(rewards, level),
    }
    for estimate in estimates.values():
        estimate(np.zeros((1, 1)))  # refuses arguments out of range before anything is drawn
    metrics = {
        name + end: lambda rows, estimate=estimate, part=part: getattr(estimate(np.array(rows)), part)
        for name, estimate in estimates.items()
        for end, part in {"": "value", "_low": "low", "_high": "high"}.items()
    }
    return TailTask(
        config={
            "task": "trl_repulse_tail",
            "custom_dataset": lambda **_: {"test": dataset},
            "test_split": "test",
            "doc_to_text": lambda doc: (
                doc["prompt"] if isinstance(doc["prompt"], str) else doc["prompt"][0]["content"]
            ),
            "doc_to_target": "",
            "output_type": "generate_until",
            "generation_kwargs": SAMPLING | {"max_gen_toks": max_completion_length},
            "repeats": num_samples,
            "filter_list": [{"name": "reward", "filter": [{"function": "trl_repulse_reward", "reward": reward}]}],
            "process_results": lambda doc, results: dict.fromkeys(metrics, results[0]),
            "metric_list": [
                {"metric": name, "aggregation": aggregation, "higher_is_better": name.startswith("cvar")}
                for name, aggregation in metrics.items()
            ],
        }
    )
