"""Tails of rewards in the [LM Evaluation Harness](https://github.com/EleutherAI/lm-evaluation-harness): a task.

Needs `pip install trl-repulse[lm-eval]`.
"""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.model import LM, CachingLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from transformers import GenerationConfig

from ..data._checks import check_prompt_lengths
from ..data.loading import load_prompts
from ..generation.completions import tokenize
from ..rewards.loading import load_reward
from . import tails
from ._generation import as_function, evaluate_rewards, process_state
from .records import digest, readable


SAMPLING = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "until": []}
# Generation defaults that the harness sets itself, or that change no distribution
_KEPT = "bos_token_id eos_token_id pad_token_id max_length use_cache transformers_version _from_model_config".split()


def rewarded(
    reward: Callable[..., list[float | None]], resps: list[list[str]], docs: list[dict[str, Any]]
) -> list[list[float]]:
    """A filter of the harness: the rewards of all completions (`resps`) of each prompt (`docs`, rows of the data set). Raises `ValueError` if
    a completion has no finite reward."""
    rewards = []
    for completions, doc in zip(resps, docs, strict=True):
        columns = {name: [value] * len(completions) for name, value in doc.items()}
        named = {"reward": reward}
        values = evaluate_rewards(named, columns.pop("prompt"), completions, None, columns, len(completions))["reward"]
        if any(value is None or not np.isfinite(value) for value in values):
            raise ValueError(f"A completion of the prompt {doc['prompt']!r} has no finite reward; fix the reward.")
        rewards.append([float(value) for value in values])
    return rewards


class TailTask(ConfigurableTask):
    """The task of [`tail_task`]; it refuses to evaluate prompts otherwise than they are written, and samples otherwise than in training."""

    def build_all_requests(self, *args: Any, apply_chat_template: bool = False, **kwargs: Any) -> None:
        """The harness's step that makes requests. Raises `ValueError` unless prompts and model are read as in training."""
        messages = not isinstance(self.dataset["test"][0]["prompt"], str)
        if messages != bool(apply_chat_template):
            advice = "messages of a user; pass" if messages else "plain text; leave out"
            raise ValueError(f"The prompts are {advice} `apply_chat_template=True`.")
        kwargs["cache_requests"] = False  # else the harness gives the requests of any task of this name
        super().build_all_requests(*args, apply_chat_template=apply_chat_template, **kwargs)
        lm = _model_of_the_harness()
        if isinstance(lm, HFLM):
            self._as_trained(lm)
        elif lm is None:
            raise RuntimeError(
                "The harness's model was not found, so that its prompts and generation defaults cannot be checked; use lm-eval 0.4.13."
            )

    def _as_trained(self, lm: HFLM) -> None:
        """Makes requests put the model's own generation defaults aside. Refuses prompts that the model would not read as in training."""
        prompts = [request.doc["prompt"] for request in self.instances]
        texts, length = [request.args[0] for request in self.instances], self.config.generation_kwargs["max_gen_toks"]
        tokens = tokenize(lm.tokenizer, prompts)
        for text, own in zip(texts, tokens, strict=True):
            (given,) = lm.tok_batch_encode([text])[0].tolist()
            if given != own:
                raise ValueError(
                    f"The harness gives the model {text!r} as {given}, and training gives it {own}; leave out "
                    "`system_instruction` and `num_fewshot`, or if the first token differs, set the model's argument `add_bos_token`."
                )
        check_prompt_lengths(tokens, prompts, lm.config, length, lm.max_length, "the harness's `max_length`")
        defaults = lm.model.generation_config.to_dict()
        if defaults.get("max_new_tokens"):
            raise ValueError(
                f"The model's generation defaults have `max_new_tokens={defaults['max_new_tokens']}`, which the harness does not put aside; "
                "take it out of `generation_config.json`."
            )
        changed = [name for name in GenerationConfig().to_dict() if defaults.get(name) and name not in _KEPT]
        for request in self.instances:
            for name in changed:
                request.args[1].setdefault(name, 1 if name.startswith("num_") else None)  # off


def _model_of_the_harness() -> LM | None:
    """The model that the harness evaluates, `None` without. It tells no task (0.4.13): local variables `lm` of the callers are read."""
    frame = inspect.currentframe()
    while frame is not None:
        lm = frame.f_locals.get("lm")
        if isinstance(lm, LM | CachingLM):
            return lm.lm if isinstance(lm, CachingLM) else lm
        frame = frame.f_back
    return None


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

    Its metrics are `prob_bad`, P(reward < `threshold`), `cvar`, the mean of the lowest share `level` of the rewards, and the ends of their
    95 % intervals.

    Args:
        prompts (`str`):
            Prompts, as for [`~trl_repulse.data.load_prompts`]: plain text or, with `apply_chat_template=True`, one message of a user.
        threshold, reward_model_path, reward_type, reward_kwargs, num_samples, max_completion_length, split, prompt_column, level, trust_remote_code:
            As for [`~trl_repulse.evaluation.inspect.tail`].

    Returns:
        [`TailTask`]: for the `tasks` of `lm_eval.simple_evaluate`. Its `task_name` has the name of the prompts and depends on all arguments.

    Raises:
        `ValueError`: If prompts or reward cannot be loaded, or a prompt has several messages. During the evaluation by a model `hf`: if
            prompts leave no room for a completion, would be read otherwise than in training, or a generation default cannot be put aside.

    Example:

    ```python
    >>> import lm_eval
    >>> from trl_repulse.evaluation.lm_eval import tail_task

    >>> task = tail_task("held_out.jsonl", threshold=-5.0, reward_model_path="my/reward-model")
    >>> lm_eval.simple_evaluate("hf", {"pretrained": "out"}, tasks=[task])["results"]
    ```
    """
    arguments = list(locals().items())  # before any other name is set
    name = f"trl_repulse_tail_{Path(prompts).stem}_{digest(arguments)[:8]}"
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
    to_rewards = {"function": "custom", "filter_fn": partial(rewarded, reward)}
    return TailTask(
        config={
            "task": name,
            "custom_dataset": lambda **_: {"test": dataset},
            "test_split": "test",
            "doc_to_text": lambda doc: readable(doc["prompt"]),
            "doc_to_target": "",
            "output_type": "generate_until",
            "generation_kwargs": SAMPLING | {"max_gen_toks": max_completion_length},
            "repeats": num_samples,
            "filter_list": [{"name": "reward", "filter": [to_rewards]}],
            "process_results": lambda doc, results: dict.fromkeys(metrics, results[0]),  # the prompt's rewards
            "metric_list": [
                {"metric": name, "aggregation": aggregation, "higher_is_better": name.startswith("cvar")}
                for name, aggregation in metrics.items()
            ],
        }
    )
