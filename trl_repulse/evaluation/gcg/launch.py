"""An evaluation from names: model, table and judge are loaded, the results are written and reported."""

from datetime import timedelta

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM

from ..._loading import load_model, load_tokenizer
from ..._vocabulary import check_same_tokens
from ...rewards.loading import load_reward
from ...trainers._rewards import with_checks
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
    evaluate_gcg(
        model.to(state.device), tokenizer, run.table, load_judge(run), config, run.output, (index, count), draft
    )
    if not state.is_main_process:
        return ""
    thresholds = run.threshold or ([0.5] if run.reward_type == "refusal" else [])
    if not thresholds:
        return f"Results: {run.output}. Report: trl-repulse gcg-report {run.output} --threshold THRESHOLD"
    return format_report(summarize(*read_results(run.output), thresholds))


def load_judge(run: GCGRunArguments) -> Judge:
    """
    The judge that the arguments name.

    Args:
        run ([`~trl_repulse.evaluation.gcg.GCGRunArguments`]):
            Names the judge.

    Returns:
        `Callable`: goals and responses to scores.

    Raises:
        `ValueError`: If there is no such judge or it refuses its arguments.
    """
    kwargs = run.reward_kwargs or {}
    if run.reward_type == "refusal":
        try:
            return RefusalJudge(**kwargs)
        except TypeError as error:
            raise ValueError(f"`reward_kwargs={kwargs}`: `refusal` takes `phrases` and `match`.") from error
    if run.reward_type is None:  # `null` in a YAML file; the path alone is no judge
        raise ValueError("`reward_type` is needed: 'refusal', or which kind of reward judges.")
    reward = load_reward(run.reward_type, run.reward_model_path, **kwargs)
    return RewardJudge(with_checks(reward, reward.__name__))
