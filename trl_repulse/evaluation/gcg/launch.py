"""An evaluation from the command line: loads model, table and judge, and reports the results."""

from typing import Any

from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ...data._prompts import dated, warn_of_date
from ...engine.reward_calls import with_checks
from ...models._loading import load_model, load_tokenizer
from ...models._vocabulary import check_same_tokens
from ...rewards.loading import load_reward
from .._generation import as_function, process_state
from .config import GCGEvaluationConfig, GCGRunArguments
from .evaluator import evaluate_gcg, read_table
from .judges import Judge, RefusalJudge, RewardJudge
from .records import read_results
from .report import format_report, summarize


def launch(run: GCGRunArguments, config: GCGEvaluationConfig) -> str:
    """
    Evaluates a model by attacks, on the devices of this process and those launched with it.

    Args:
        run ([`~trl_repulse.evaluation.gcg.GCGRunArguments`]):
            What to load and where to write.
        config ([`~trl_repulse.evaluation.gcg.GCGEvaluationConfig`]):
            Settings of attack and evaluation.

    Returns:
        `str`: the report or, without a threshold, the command that prints one. Empty in all processes but the main one.

    Raises:
        `ValueError`: If something cannot be loaded or does not fit.
    """
    state = process_state()
    options = {"revision": run.model_revision, "trust_remote_code": run.trust_remote_code}
    tokenizer = load_tokenizer(run.model_name_or_path, "model", **options)
    read_table(run.table, tokenizer, config)  # errors before a model is loaded
    model = load_model(AutoModelForCausalLM, run.model_name_or_path, "model", dtype=run.dtype, **options)
    draft = None
    if run.draft_model_name_or_path is not None:
        label = f"The draft model `{run.draft_model_name_or_path}`"
        check_same_tokens(run.draft_model_name_or_path, label, tokenizer, run.trust_remote_code)
        options = {"dtype": run.dtype, "trust_remote_code": run.trust_remote_code}
        draft = load_model(AutoModelForCausalLM, run.draft_model_name_or_path, "draft model", **options)
        draft = draft.to(state.device)
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
    The judge that the arguments name. A reward reads conversations if `config.prompt_format` is `"chat"`, else plain text.
    Raises `ValueError` if there is no such judge or it refuses its arguments.
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
    # A classifier, applied as in training
    options = {"trust_remote_code": run.trust_remote_code}
    tokenizer = load_tokenizer(reward, "reward model", **options)
    model = load_model(AutoModelForSequenceClassification, reward, "reward model", num_labels=1, **options)
    model = model.to(PartialState().device)
    _, function = as_function(model, tokenizer, model.device, config.chat_template_kwargs)
    function.unchecked = model  # its weights identify the judge
    if as_messages:
        probe = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        warn_of_date(tokenizer, probe, config.chat_template_kwargs)
        function.rendering = dated(tokenizer, probe, config.chat_template_kwargs)
    return RewardJudge(function, as_messages)
