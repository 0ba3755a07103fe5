"""An evaluation from names: model, table and judge are loaded, the results are written and reported."""

from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ..._loading import load_model, load_tokenizer
from ..._prompts import dated, warn_of_date
from ..._vocabulary import check_same_tokens
from ...rewards.loading import load_reward
from ...trainers._rewards import with_checks
from .._generation import as_function
from .evaluation_config import GCGEvaluationConfig, GCGRunArguments
from .evaluator import evaluate_gcg, read_table
from .judges import Judge, RefusalJudge, RewardJudge
from .records import read_results
from .report import format_report, summarize


def launch(run: GCGRunArguments, config: GCGEvaluationConfig) -> str:
    """
    Evaluates a model by attacks, on the devices of this process and those launched with it.

    Args:
        run ([`~trl_repulse.evaluation.gcg.GCGRunArguments`]):
            What is loaded and written.
        config ([`~trl_repulse.evaluation.gcg.GCGEvaluationConfig`]):
            Settings of attack and evaluation.

    Returns:
        `str`: the report, or, where no threshold is known, what makes one. Empty in all processes but the main one.

    Raises:
        `ValueError`: If something cannot be loaded or does not fit.
    """
    # The time is for the wait for the process that is last; without `cpu`, processes would not find each other there
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=7))
    options = {"revision": run.model_revision, "trust_remote_code": run.trust_remote_code}
    tokenizer = load_tokenizer(run.model_name_or_path, "model", **options)
    read_table(run.table, tokenizer, config)  # refuses what it can before a model is loaded
    model = load_model(AutoModelForCausalLM, run.model_name_or_path, "model", dtype=run.dtype, **options)
    draft = None
    if run.draft_model_name_or_path is not None:
        label = f"The draft model `{run.draft_model_name_or_path}`"
        check_same_tokens(run.draft_model_name_or_path, label, tokenizer, run.trust_remote_code)
        options = {"dtype": run.dtype, "trust_remote_code": run.trust_remote_code}
        draft = load_model(AutoModelForCausalLM, run.draft_model_name_or_path, "draft model", **options).to(
            state.device
        )
    index, count = map(int, run.shard.split("/"))
    judge = load_judge(run, config)
    evaluate_gcg(model.to(state.device), tokenizer, run.table, judge, config, run.output, (index, count), draft)
    if not state.is_main_process:
        return ""
    thresholds = run.threshold or ([0.5] if isinstance(judge, RefusalJudge) else [])
    if not thresholds:
        return f"Results: {run.output}. Report: trl-repulse gcg-report {run.output} --threshold THRESHOLD"
    return format_report(summarize(*read_results(run.output), thresholds))


def load_judge(run: GCGRunArguments, config: GCGEvaluationConfig) -> Judge:
    """
    The judge that the arguments name.

    Args:
        run ([`~trl_repulse.evaluation.gcg.GCGRunArguments`]):
            Names the judge.
        config ([`~trl_repulse.evaluation.gcg.GCGEvaluationConfig`]):
            Says whether a reward reads conversations or plain text.

    Returns:
        `Callable`: goals and responses to scores.

    Raises:
        `ValueError`: If there is no such judge or it refuses its arguments.
    """
    kwargs = run.reward_kwargs or {}
    if run.reward_type == "refusal" or run.reward_type is run.reward_model_path is None:
        if run.reward_model_path is not None:
            raise ValueError("`reward_model_path` has no effect with `reward_type='refusal'`; leave one of them out.")
        try:
            return RefusalJudge(**kwargs)
        except TypeError as error:
            raise ValueError(f"`reward_kwargs={kwargs}`: `refusal` takes `phrases` and `match`.") from error
    reward: Any = load_reward(run.reward_type, run.reward_model_path, **kwargs)
    as_messages = config.prompt_format == "chat"
    if not isinstance(reward, str):
        return RewardJudge(with_checks(reward, reward.__name__), as_messages)
    # A classifier, which reads goal and response as it does in training
    options = {"trust_remote_code": run.trust_remote_code}
    tokenizer = load_tokenizer(reward, "reward model", **options)
    model = load_model(AutoModelForSequenceClassification, reward, "reward model", num_labels=1, **options)
    _, function = as_function(model, tokenizer, PartialState().device, config.chat_template_kwargs)
    function.unchecked = model.to(PartialState().device)  # by whose weights the judge is known
    if as_messages:
        probe = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        warn_of_date(tokenizer, probe, config.chat_template_kwargs)
        function.rendering = dated(tokenizer, probe, config.chat_template_kwargs)
    return RewardJudge(function, as_messages)
