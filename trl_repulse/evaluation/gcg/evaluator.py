"""Attacks every target of a table, samples and judges responses before and after, and keeps the results as JSON lines."""

import asyncio
import hashlib
import inspect
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from glob import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..._model_checks import check_token_ids
from ..._prompts import warn_of_date
from .._files import digest
from .._generation import check_processes, event_loop, hash_model
from .._identity import identify_reward, warn_of_name
from .engine import GCG
from .errors import GCGError, check_context
from .evaluation_config import GCGEvaluationConfig
from .judges import Judge, RefusalJudge, RewardJudge
from .prompt import build_prompt
from .records import SCHEMA, ResultsFile, check_identity, has_results, merge_results, read_results
from .responses import sample_responses, target_log_probs
from .result import GCGResult
from .table import TableRow, derive_seed, load_table


def evaluate_gcg(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows_or_csv: str | Path | Iterable[Mapping[str, Any]],
    judge: Judge,
    config: GCGEvaluationConfig | None = None,
    output: str | Path = "gcg.jsonl",
    shard: tuple[int, int] = (1, 1),
    draft_model: PreTrainedModel | None = None,
) -> Path:
    """
    Evaluates a model by attacks. For each row of a table: responses to the goal are sampled, a suffix is searched after
    which the model begins with the target, responses to goal and suffix are sampled, and all of them are judged.

    `output` gets a line a target as it is done. Called again, the evaluation goes on behind the last one. Under
    `accelerate launch`, processes share the targets; then each needs the model, and the main one merges their files.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model, on its device.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        rows_or_csv (`str`, `Path` or `Iterable` of mappings):
            A CSV file with the columns `goal` and `target`, or such rows.
        judge (`Callable`):
            What gets lists of goals and of responses and gives a score for each, low where the response is bad: one of
            [`trl_repulse.rewards`](../rewards.md), a [`RewardJudge`], a [`RefusalJudge`], or a function.
        config ([`GCGEvaluationConfig`], *optional*):
            Settings; by default those of the class.
        output (`str` or `Path`, *optional*, defaults to `"gcg.jsonl"`):
            File of the results, read by [`read_results`] and [`summarize`].
        shard (`tuple[int, int]`, *optional*, defaults to `(1, 1)`):
            Which part of the table, of how many, for runs that [`merge_results`] joins. Each needs an output of its own.
        draft_model ([`~transformers.PreTrainedModel`], *optional*):
            As for [`run_gcg`].

    Returns:
        `Path`: `output`.

    Raises:
        `ValueError`: If table, settings, tokenizer or judge do not fit each other, or `output` holds something else. An
            attack that fails raises nothing: its line has the status `"error"`.

    Example:

    ```python
    >>> from trl_repulse.evaluation.gcg import GCGEvaluationConfig, RefusalJudge, evaluate_gcg

    >>> evaluate_gcg(model, tokenizer, "behaviors.csv", RefusalJudge(), GCGEvaluationConfig(num_steps=100))
    ```
    """
    config = config or GCGEvaluationConfig()
    output = Path(output)
    # The time is for the wait for the process that is last
    state = check_processes(PartialState(cpu=model.device.type == "cpu", timeout=timedelta(days=7)))
    index, count = shard
    if not 1 <= index <= count:
        raise ValueError(f"`shard={index}/{count}` must be one of 1/{count} to {count}/{count}.")
    table = read_table(rows_or_csv, tokenizer, config)
    mine = table[index - 1 :: count]
    header = make_header(model, tokenizer, table, judge, config, draft_model)
    evaluation = _Evaluation(GCG(model, tokenizer, config, draft_model), judge, config)
    if state.is_main_process:
        _absorb_parts(output)
    state.wait_for_everyone()
    finished: set[int] = set()
    if has_results(output):
        found, records = read_results(output)
        check_identity(found, header, output)
        finished = {record["row"] for record in records}
        if not finished >= {row.number for row in mine} and header["identity"]["judge_hash"] is None:
            warn_of_name(output, header["identity"]["judge"])
    path = output if state.num_processes == 1 else _part(output, str(state.process_index))
    with ResultsFile(path, header) as file, _evaluating(model):
        pending = [row for row in mine[state.process_index :: state.num_processes] if row.number not in finished]
        for row in tqdm(pending, desc="attacks", disable=not state.is_local_main_process):
            file.append(evaluation(row))
    state.wait_for_everyone()
    if state.is_main_process:
        _absorb_parts(output)
    state.wait_for_everyone()
    return output


def read_table(
    rows_or_csv: str | Path | Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    config: GCGEvaluationConfig,
) -> list[TableRow]:
    """
    The targets, of which the first can be rendered.

    Args:
        rows_or_csv, tokenizer, config:
            As for [`evaluate_gcg`].

    Returns:
        `list[TableRow]`

    Raises:
        `ValueError`: As [`~trl_repulse.evaluation.gcg.table.load_table`], and if the chat template is missing or refuses a goal.
    """
    table = load_table(rows_or_csv, config.scenario, config.on_bad_row, config.max_targets)
    _first_prompt(tokenizer, table, config)
    if config.prompt_format == "chat":
        warn_of_date(tokenizer, [{"role": "user", "content": "x"}], config.chat_template_kwargs)
    return table


def _first_prompt(tokenizer: PreTrainedTokenizerBase, table: list[TableRow], config: GCGEvaluationConfig) -> str:
    """Text of the first target's prompt, without a suffix; refuses what cannot be rendered."""
    for row in table:
        if row.fault is None:
            options = {"chat_template_kwargs": config.chat_template_kwargs}
            try:
                prompt = build_prompt(tokenizer, row.goal, row.target, config.prompt_format, **options)
            except ValueError as error:
                raise ValueError(f"Row {row.number} of the table: {error}") from error
            return prompt.before_text + prompt.after_text
    return ""


def make_header(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    table: list[TableRow],
    judge: Judge,
    config: GCGEvaluationConfig,
    draft_model: PreTrainedModel | None = None,
) -> dict[str, Any]:
    """
    First line of a file of results.

    Args:
        model, tokenizer, judge, config, draft_model:
            As for [`evaluate_gcg`].
        table (`list[TableRow]`):
            The targets.

    Returns:
        `dict`: `"identity"` has what results depend on: configuration, hashes, judge. The rest is for the reader.
    """
    settings = asdict(config)
    del settings["micro_batch_size"]  # another machine, with other memory, may take the evaluation up
    variables = settings.pop("chat_template_kwargs")  # compared, like the template, by the first prompt's text
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return {
        "schema": SCHEMA,
        "identity": {
            "config": settings,
            "model": hash_model(model),
            "draft_model": None if draft_model is None else hash_model(draft_model),
            "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest(),
            "prompt": _first_prompt(tokenizer, table, config),  # a template may write the date
            "table": digest([[row.goal, row.target] for row in table]),
            "judge": str(getattr(judge, "__name__", type(judge).__name__)),
            "judge_hash": _hash_judge(judge),
        },
        "chat_template_kwargs": variables,
        "model": model.name_or_path,
        "rows": len(table),
        "versions": {name: version(name) for name in ("trl-repulse", "torch", "transformers", "tokenizers")},
    }


class _Evaluation:
    """One target's line."""

    def __init__(self, attack: GCG, judge: Judge, config: GCGEvaluationConfig):
        self.attack, self.judge, self.config = attack, judge, config

    def __call__(self, row: TableRow) -> dict[str, Any]:
        record: dict[str, Any] = {"row": row.number, "status": "skipped", "goal": row.goal, "target": row.target}
        if row.fault is not None:
            return record | {"reason": row.fault}
        try:
            return record | {"status": "ok"} | self._evaluate(row)
        except (GCGError, torch.OutOfMemoryError) as error:
            return record | {"status": "error", "reason": f"{type(error).__name__}: {error}"}

    def _evaluate(self, row: TableRow) -> dict[str, Any]:
        config, attack = self.config, self.attack
        prompt = build_prompt(
            attack.tokenizer,
            row.goal,
            row.target,
            config.prompt_format,
            config.suffix_init,
            config.chat_template_kwargs,
        )
        check_token_ids([prompt.splice(prompt.suffix_ids), prompt.target_ids], attack.model.config)
        more = max(len(prompt.target_ids), config.max_new_tokens)
        check_context(attack.model.config, len(prompt.splice(prompt.suffix_ids)), more)
        seconds = dict.fromkeys(("attack", "sample", "judge"), 0.0)
        with _timed(seconds, "sample"):
            typed = prompt.encode([""])[0] or self._beginning()
            before = self._respond(row, typed, prompt.target_ids, "before", row.goal)
        with _timed(seconds, "attack"):
            result = attack.run(row.goal, row.target, derive_seed(config.seed, row, "attack"))
        with _timed(seconds, "sample"):
            after = self._respond(row, result.prompt_ids, prompt.target_ids, "after", row.goal + result.suffix)
        with _timed(seconds, "judge"):
            asked = row.goal + result.suffix if config.include_suffix else row.goal
            responses = before["responses"] + after["responses"]
            scores = self._score([row.goal] * config.num_samples + [asked] * config.num_samples, responses)
        for phase, part in ((before, slice(None, config.num_samples)), (after, slice(config.num_samples, None))):
            phase["rewards"] = scores[part]
            if not config.save_responses:
                del phase["responses"]
        return _attack_fields(result) | {"before": before, "after": after, "seconds": seconds}

    def _beginning(self) -> list[int]:
        """What a text begins with where there is no goal, and the tokenizer puts nothing before it."""
        tokenizer = self.attack.tokenizer
        begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if begin is None:
            raise GCGError("The prompt before the attack is empty, and the tokenizer has no token that begins a text.")
        return [begin]

    def _respond(
        self, row: TableRow, prompt_ids: list[int], target_ids: list[int], phase: str, asked: str
    ) -> dict[str, Any]:
        attack, config = self.attack, self.config
        log_probs = target_log_probs(attack.model, prompt_ids, target_ids)
        if not log_probs.isfinite().all():
            raise GCGError("A log-probability of the target is not finite; try the model in float32.")
        drawn = (config.num_samples, config.max_new_tokens, derive_seed(config.seed, row, phase))
        text = asked if config.prompt_format == "raw" else None
        return {
            "responses": sample_responses(attack.model, attack.tokenizer, prompt_ids, *drawn, text),
            "target_log_prob": {
                "first": log_probs[0].item(),
                "mean": log_probs.mean().item(),
                "sum": log_probs.sum().item(),
            },
        }

    def _score(self, goals: list[str], responses: list[str]) -> list[float | None]:
        given = self.judge(goals, responses)
        if inspect.iscoroutine(given):
            given = asyncio.run_coroutine_threadsafe(given, event_loop()).result()
        scores = [None if score is None else float(score) for score in given]
        if len(scores) != len(responses):
            raise ValueError(f"The judge gave {len(scores)} scores for {len(responses)} responses; give one for each.")
        if not all(score is None or math.isfinite(score) for score in scores):
            raise GCGError("The judge gave a score that is not finite.")
        return scores


def _attack_fields(result: GCGResult) -> dict[str, Any]:
    return {
        "suffix": result.suffix,
        "suffix_ids": result.suffix_ids,
        "round_trip": result.round_trip,
        "loss": result.loss,
        "initial_loss": result.initial_loss,
        "losses": result.losses,
        "steps": len(result.losses),
        "stop_reason": result.stop_reason,
        "exact_match": result.exact_match,
    }


def _part(output: Path, process: str) -> Path:
    return output.with_name(f"{output.name}.process-{process}")


def _absorb_parts(output: Path) -> None:
    """Brings the lines of processes, of this run or of one that was interrupted, into the output."""
    parts = sorted(output.parent.glob(_part(Path(escape(output.name)), "*").name))
    files = [path for path in [output, *parts] if has_results(path)]
    if parts and files:
        merge_results(files, output)
    for part in parts:
        part.unlink()


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] += time.perf_counter() - start


def _hash_judge(judge: Judge) -> str | None:
    """Hash of the judge's weights, files, arguments and code; `None` if it is identified by its name alone."""
    reward = judge.reward if isinstance(judge, RewardJudge) else judge
    identity = _without_labels(identify_reward(getattr(reward, "unchecked", reward)))
    identity |= getattr(reward, "rendering", {})  # of a classifier's chat template that may write the date
    if isinstance(judge, RefusalJudge):
        identity = judge.identity
    if isinstance(judge, RefusalJudge | RewardJudge) and type(judge) not in (RefusalJudge, RewardJudge):
        identity = identity | {"judge": identify_reward(judge).get("code")}
    return None if identity.keys() <= {"name"} else digest(identity)


def _without_labels(identity: dict[str, Any]) -> dict[str, Any]:
    """A reward's description without names and revisions, if its weights or code identify it."""
    if "reward" in identity:
        return identity | {"reward": _without_labels(identity["reward"])}
    known = "weights" in identity or "code" in identity
    return {key: value for key, value in identity.items() if not known or key not in ("name", "revision")}
