"""Tails of rewards in [Inspect](https://inspect.aisi.org.uk): a scorer, metrics with intervals, a task, logs read as samples, and samples
written as logs for its viewer.

Needs `pip install trl-repulse[inspect]`. Inspect finds the names here by itself, as `trl_repulse/tail` and so on.
"""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from inspect_ai import Epochs, Task, task
from inspect_ai import log as logs
from inspect_ai import model as models
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model._generate_config import active_generate_config
from inspect_ai.scorer import Metric, SampleScore, Score, Scorer, Target, Value, metric, scorer
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver
from inspect_ai.viewer import TaskSamplesColumn, TaskSamplesView, ViewerConfig
from transformers import GenerationConfig

from ..data._checks import check_prompt_lengths
from ..data.loading import load_prompts
from ..generation.completions import tokenize
from ..generation.drawing import end_tokens
from ..rewards.loading import load_reward
from . import tails
from ._generation import as_function, evaluate_rewards, process_state
from .records import SampleSet, digest, plain_json


_VIEWED = "worst answers"  # name of the task of logs that are written here
# Settings of Inspect's that change no sample's distribution
_ELSEWHERE = ("max_connections", "max_retries", "timeout", "attempt_timeout", "seed", "adaptive_connections")


def _rewards(scores: list[SampleScore]) -> np.ndarray:
    """Rewards (P, N) of P prompts, Inspect's samples, with N completions, its epochs; all in one row where epochs failed."""
    rows: dict[Any, list[float]] = {}
    for each in scores:
        rows.setdefault(each.sample_id, []).append(each.score.as_float())
    if len({len(row) for row in rows.values()}) > 1:
        return np.array([[value for row in rows.values() for value in row]])
    return np.array(list(rows.values()))


def _metric(name: str, estimate: Callable[[np.ndarray], tails.Estimate]) -> Metric:
    """A metric of an estimate: `name`, and its finite ends as `name_low` and `name_high`. Arguments are checked before anything is drawn."""
    estimate(np.zeros((1, 1)))

    def compute(scores: list[SampleScore]) -> Value:
        result = estimate(_rewards(scores))
        ends = {f"{name}_low": result.low, f"{name}_high": result.high}
        return {name: result.value} | {key: end for key, end in ends.items() if np.isfinite(end)}

    return compute


@metric(scores="unreduced")
def prob_bad(threshold: float, confidence: float = 0.95) -> Metric:
    """P(reward < `threshold`) with an exact interval, as [`~trl_repulse.evaluation.tails.prob_below`]."""
    return _metric("prob_bad", lambda rewards: tails.prob_below(rewards, threshold, confidence))


@metric(scores="unreduced")
def cvar(level: float = 0.01, confidence: float = 0.95) -> Metric:
    """Mean of the lowest share `level` of the rewards with an interval, as [`~trl_repulse.evaluation.tails.cvar`]."""
    return _metric("cvar", lambda rewards: tails.cvar(rewards, level, confidence))


@scorer(metrics=[cvar()])
def reward(
    reward_model_path: str | None = None,
    reward_type: str | None = None,
    reward_kwargs: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> Scorer:
    """
    Scores a completion by a reward, which is the score's value. Raises `ValueError` if the reward cannot be loaded, or gives a completion
    no finite number.

    Args:
        reward_model_path, reward_type, reward_kwargs:
            The reward, as for [`~trl_repulse.rewards.loading.load_reward`]; `reward_kwargs` are its further arguments.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether to run Python code that comes with the reward model.
    """
    loaded = load_reward(reward_type, reward_model_path, **(reward_kwargs or {}))
    name, function = as_function(loaded, None, process_state().device, trust_remote_code=trust_remote_code)

    async def score(state: TaskState, target: Target) -> Score:
        prompt, completion = _prompt(state), state.output.completion
        columns = {key: [value] for key, value in (state.metadata.get("columns") or {}).items()}
        (value,) = evaluate_rewards({name: function}, [prompt], [completion], None, columns, 1)[name]
        if value is None or not np.isfinite(value):
            raise ValueError(f"The reward '{name}' gave {value} for the completion {completion!r}; fix the reward.")
        return Score(value=float(value), answer=completion)

    return score


def _prompt(state: TaskState) -> str | list[dict[str, Any]]:
    """The prompt as rewards take it: plain text, or messages where the dataset had messages."""
    given = state.input
    return given if isinstance(given, str) else [{"role": each.role, "content": each.text} for each in given]


@solver
def as_trained() -> Solver:
    """Lets a Hugging Face model that Inspect has loaded read prompts and draw tokens as in training; others are left as they are. Its own
    generation defaults, such as a repetition penalty, have no effect, and completions end at the tokenizer's end token too. Raises
    `ValueError` if Inspect gives the model other tokens than training does, or the prompt leaves no room for a completion."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        api: Any = models.get_model().api
        tokenizer = getattr(api, "tokenizer", None)
        if not hasattr(api, "hf_chat") or tokenizer is None:
            return state
        text = api.hf_chat(state.messages, [])
        inspect_ids = tokenizer(text, **api.tokenizer_call_args)["input_ids"]
        (trained_ids,) = tokenize(tokenizer, [_prompt(state)])
        length = models.get_model().config.merge(active_generate_config()).max_tokens or api.max_tokens()
        check_prompt_lengths([trained_ids], [_prompt(state)], api.model.config, length)
        if list(inspect_ids) != list(trained_ids):
            raise ValueError(
                f"Inspect gives the model {text!r}, which is not what training gives it. For prompts of plain text pass "
                """`-M 'chat_template="{{ messages[0].content }}"'`; if only the first token differs, pass """
                """`-M 'tokenizer_call_args={"add_special_tokens": false}'`."""
            )
        end = end_tokens(api.model, tokenizer)
        api.model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=tokenizer.pad_token_id)
        return state

    return solve


@task
def tail(
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
) -> Task:
    """
    The held-out evaluation of `trl-repulse evaluate`: completions at temperature 1 from all tokens, their rewards, and the tail's.

    Args:
        prompts, split, prompt_column: Prompts, as for [`~trl_repulse.data.load_prompts`].
        threshold (`float`): Reward under which an output is bad.
        reward_model_path, reward_type, reward_kwargs, trust_remote_code: As for [`reward`].
        num_samples (`int`, *optional*, defaults to `16`): Completions of each prompt: Inspect's epochs.
        max_completion_length (`int`, *optional*, defaults to `256`): Tokens of a completion.
        level (`float`, *optional*, defaults to `0.01`): Level of the CVaR.
    """
    rows: Any = load_prompts(prompts, split, column=prompt_column)
    samples = [_sample(number, dict(row)) for number, row in enumerate(rows)]
    return Task(
        dataset=MemoryDataset(samples, name=Path(prompts).stem),
        solver=[as_trained(), generate()],
        scorer=reward(reward_model_path, reward_type, reward_kwargs, trust_remote_code),
        metrics=[prob_bad(threshold), cvar(level)],
        epochs=Epochs(num_samples, "mean"),
        config=models.GenerateConfig(temperature=1.0, top_p=1.0, top_k=0, max_tokens=max_completion_length),
    )


_ROLES = {"user": models.ChatMessageUser, "assistant": models.ChatMessageAssistant, "system": models.ChatMessageSystem}


def _sample(number: int, row: dict[str, Any]) -> Sample:
    """Inspect's sample of a row, whose other columns become metadata. Raises `ValueError` for a role that is not in [`_ROLES`]."""
    prompt = row.pop("prompt")
    if not isinstance(prompt, str):
        if unknown := {each["role"] for each in prompt} - set(_ROLES):
            raise ValueError(
                f"Prompt {number} has a message of the role {min(unknown)!r}, which Inspect's task does not take."
            )
        prompt = _messages(prompt)
    return Sample(input=prompt, id=number, metadata={"columns": row})


def _messages(prompt: str | list[dict[str, Any]]) -> list[models.ChatMessage]:
    """A prompt as messages of Inspect; those of a tool are shown as a user's."""
    rows = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [_ROLES.get(each["role"], models.ChatMessageUser)(content=each.get("content") or "") for each in rows]


def write_inspect_log(
    path: str | Path, samples: Mapping[str, SampleSet], threshold: float | None = None, column: str = "reward"
) -> None:
    """
    Writes samples as a log that `inspect view` shows: the worst answers first, those of several models or attacks side by side.

    A sample of the log is a prompt with one answer of each set, its worst, its second worst and so on. The answers are assistant messages
    and the values of one scorer a set, with rewards, log-probabilities (nats) and lengths as metadata. Raises `ValueError` if an answer has
    no finite reward.

    Args:
        path (`str` or `Path`): The `.eval` file to write.
        samples (`Mapping[str, SampleSet]`):
            Sets of the same prompts by name, or what [`~trl_repulse.evaluation.attacks.run_attacks`] returned.
        threshold (`float`, *optional*): Reward under which an answer is bad, for P(bad) of each set with its interval.
        column (`str`, *optional*, defaults to `"reward"`): Column of the rewards.
    """
    # Attacks have several prompts of a behaviour, side by side
    behaviours = min(len(sample_set.prompts) for sample_set in samples.values())
    rows: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    metrics: dict[str, dict[str, float]] = {}
    for name, sample_set in samples.items():
        rewards = sample_set.column(column).reshape(behaviours, -1)  # refuses what is not finite
        ids = [x for x in ("prompt_ids", "completion_ids") if x in sample_set.table.column_names]
        answers, size = sample_set.table.drop_columns(ids).to_pylist(), rewards.shape[1]
        for answer in answers:
            answer["reward"] = answer[column]
            if messages := answer.pop("messages", None):
                answer["prompt"] = json.loads(messages)
        for prompt, order in enumerate(rewards.argsort(axis=1, kind="stable").tolist()):
            for rank, place in enumerate(order):
                rows.setdefault((prompt, rank), {})[name] = answers[prompt * size + place]
        metrics[name] = {"mean": float(rewards.mean())}
        if threshold is not None:
            bad = tails.prob_below(rewards, threshold)
            metrics[name] |= {"P(bad)": bad.value, "low": bad.low, "high": bad.high}  # short: the viewer cuts names
    write_answers(path, list(rows.values()), metrics)


def write_answers(
    path: str | Path, rows: list[dict[str, dict[str, Any]]], metrics: Mapping[str, Mapping[str, float]]
) -> None:
    """Writes a log as [`write_inspect_log`] of answers by name, one or several a row. An answer has `prompt`, a text or messages, `completion`
    and `reward`; the rest is metadata. `metrics` are those of each name."""
    rows = sorted(rows, key=lambda row: min(each["reward"] for each in row.values()))
    model, now = " and ".join(metrics), datetime.now(UTC).isoformat(timespec="seconds")
    columns = [TaskSamplesColumn(id=name) for name in ("sampleId", "input", "answer")]
    columns += [TaskSamplesColumn.score(name) for name in metrics]
    columns += [TaskSamplesColumn(id=x, visible=False) for x in ("sampleStatus", "target", "tokens", "duration")]
    scores = []
    for name, own in metrics.items():
        values = {key: logs.EvalMetric(name=key, value=value) for key, value in own.items()}
        scores.append(logs.EvalScore(name=name, scorer=name, metrics=values))
    log = logs.EvalLog(
        status="success",
        eval=logs.EvalSpec(
            created=now,
            task=_VIEWED,
            dataset=logs.EvalDataset(samples=len(rows)),
            model=model,
            config=logs.EvalConfig(),
            # What a model wrote is shown as plain text: no links, no images
            viewer=ViewerConfig(trust_content=False, task_samples_view=TaskSamplesView(name=_VIEWED, columns=columns)),
        ),
        stats=logs.EvalStats(started_at=now, completed_at=now),
        results=logs.EvalResults(total_samples=len(rows), completed_samples=len(rows), scores=scores),
        samples=[_shown(number, row, model) for number, row in enumerate(rows, 1)],
    )
    logs.write_eval_log(log, str(path))


def write_training_log(path: str | Path, output_dir: str | Path) -> None:
    """Writes the completions that a run with `log_completions=True` has stored in its folder `output_dir` to the `.eval` file `path`, as
    [`write_inspect_log`]. Those without a reward are left out. Raises `ValueError` if there are none."""
    rows = []
    for file in sorted(Path(output_dir).glob("completions/*.parquet")):
        table = pq.read_table(file)
        # With one reward function its column is the reward, and the first behind the texts
        name = "reward" if "reward" in table.column_names else table.column_names[3]
        for row in table.to_pylist():
            reward, text = row[name], row["completion"]
            if reward is not None and np.isfinite(reward):
                text = text if isinstance(text, str) else "\n\n".join(each.get("content") or "" for each in text)
                rows.append({"policy": row | {"completion": text, "reward": float(reward)}})
    if not rows:
        raise ValueError(f"`{output_dir}` has no stored completions; train with `log_completions=True`.")
    write_answers(path, rows, {"policy": {"mean": float(np.mean([row["policy"]["reward"] for row in rows]))}})


def _shown(number: int, row: dict[str, dict[str, Any]], model: str) -> logs.EvalSample:
    """A row of answers as a sample of a log."""
    worst = min(row.values(), key=lambda answer: answer["reward"])
    prompt = _messages(worst["prompt"])
    scores, answers = {}, []
    for name, answer in row.items():
        text = answer["completion"]
        scores[name] = Score(
            value=float(f"{answer['reward']:.3f}"),  # the metadata has the exact reward
            answer=text,
            metadata=plain_json({key: value for key, value in answer.items() if key != "completion"}),
        )
        label = f"{name}, reward {answer['reward']:.3g}:\n\n" if len(row) > 1 else ""
        answers.append(models.ChatMessageAssistant(content=label + text))
    return logs.EvalSample(
        id=number,
        epoch=1,
        input=worst["prompt"] if isinstance(worst["prompt"], str) else prompt,
        target="",
        messages=[*prompt, *answers],
        output=models.ModelOutput.from_content(model, worst["completion"]),
        scores=scores,
    )


def load_inspect_log(path: str | Path) -> SampleSet:
    """
    Reads the completions and scores of a finished `.eval` log as held-out samples, for [`~trl_repulse.evaluation.report.tail_report`].

    A sample of the log is a prompt, and an epoch a completion. Each scorer that gives numbers has a column `"rewards/NAME"`; if there is
    only one, it is `"reward"` too. Raises `ValueError` if it is no finished log, samples are missing or failed, or no scorer gives numbers.
    """
    path = Path(path).expanduser()
    try:
        log: logs.EvalLog = logs.read_eval_log(str(path))
    except Exception as error:  # of zip files, JSON and Inspect's checks
        raise ValueError(
            f"`{path}` cannot be read as a log of Inspect ({type(error).__name__}: {error}); name a finished log."
        ) from error
    if log.eval.task == _VIEWED:
        raise ValueError(f"`{path}` was written for `inspect view`; name the folder of samples that it shows.")
    samples, epochs = sorted(log.samples or [], key=lambda sample: sample.epoch), log.eval.config.epochs or 1
    rows: dict[Any, list[Any]] = {}
    for sample in samples:
        rows.setdefault(sample.id, []).append(sample)
    if failed := [f"sample {each.id}, epoch {each.epoch}: {each.error.message}" for each in samples if each.error]:
        shown = " ".join("; ".join(failed[:3]).split())
        raise ValueError(
            f"`{path}` has {len(failed)} failed samples ({shown}); correct the cause, and run `inspect eval-retry`."
        )
    if log.status != "success" or any(len(row) != epochs for row in rows.values()) or not rows:
        raise ValueError(
            f"`{path}` has the status '{log.status}' and {len(samples)} samples; finish it with `inspect eval-retry`."
        )
    ordered = [sample for row in rows.values() for sample in row]
    values = {name: [_number(sample, name) for sample in ordered] for name in ordered[0].scores or {}}
    rewards = {f"rewards/{name}": numbers for name, numbers in values.items() if None not in numbers}
    if not rewards:
        raise ValueError(
            f"`{path}` has no scorer that gives every sample a number; add one, such as `trl_repulse/reward`."
        )
    if len(rewards) == 1:
        rewards["reward"] = next(iter(rewards.values()))
    table = pa.table(
        {
            "prompt_index": pa.array(np.repeat(np.arange(len(rows)), epochs), pa.int32()),
            "sample_index": pa.array(np.tile(np.arange(epochs), len(rows)), pa.int32()),
            "prompt": [
                sample.input if isinstance(sample.input, str) else "\n".join(m.text for m in sample.input)
                for sample in ordered
            ],
            "completion": [sample.output.completion for sample in ordered],
            **rewards,
        }
    )
    inputs = [row[0].input for row in rows.values()]
    # Without the random ids of messages
    inputs = [prompt if isinstance(prompt, str) else [[part.role, part.text] for part in prompt] for prompt in inputs]
    drawn = log.plan.config.merge(log.eval.model_generate_config).model_dump(exclude_none=True)
    settings = {"num_samples": epochs} | {name: value for name, value in drawn.items() if name not in _ELSEWHERE}
    header = {
        "model": {"name": log.eval.model, "weights": digest([log.eval.model, log.eval.model_args])},
        "reference": None,
        "rewards": {scored_by.name: scored_by.options or {} for scored_by in log.eval.scorers or []},
        "prompts": {"count": len(rows), "sha256": digest(inputs)},
        "settings": plain_json(settings),
        "versions": {"inspect_ai": log.eval.packages.get("inspect_ai")},
    }
    return SampleSet(path, header, table)


def _number(sample: Any, name: str) -> float | None:
    """A scorer's value of a sample; `None` if it is no number."""
    score = (sample.scores or {}).get(name)
    value = None if score is None else score.value
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
