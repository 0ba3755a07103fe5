"""Settings of an evaluation by attacks."""

import re
from dataclasses import dataclass, field
from typing import Literal

from .config import GCGConfig, as_object


@dataclass
class GCGEvaluationConfig(GCGConfig):
    """
    Settings of [`~trl_repulse.evaluation.gcg.evaluate_gcg`]: those of the attack, and what is sampled and judged.

    `seed` is the seed of the whole evaluation. Each target has seeds of its own, made from it and the target's texts, so
    that results do not depend on order, shards or processes.

    Args:
        scenario (`str`, *optional*, defaults to `"behaviors"`):
            `"behaviors"`: the prompt is the row's `goal`, the suffix follows it. `"strings"`: there is no goal, the prompt
            is the suffix alone.
        num_samples (`int`, *optional*, defaults to `10`):
            Responses drawn for each target before the attack, and as many after it.
        max_new_tokens (`int`, *optional*, defaults to `20`):
            Tokens of a response.
        include_suffix (`bool`, *optional*, defaults to `False`):
            Whether the judge reads the suffix after the goal.
        max_targets (`int`, *optional*):
            Rows of the table that are used, the first ones; all if unset.
        on_bad_row (`str`, *optional*, defaults to `"error"`):
            What to do about rows without a goal or target: `"error"` to refuse the table, `"skip"` to record them as
            skipped.
        save_responses (`bool`, *optional*, defaults to `False`):
            Whether the results hold the responses.

    Raises:
        `ValueError`: If a value is out of range.
    """

    scenario: Literal["behaviors", "strings"] = field(
        default="behaviors", metadata={"help": "Whether the prompt is a goal and the suffix, or the suffix alone."}
    )
    num_samples: int = field(default=10, metadata={"help": "Responses drawn for each target, before and after."})
    max_new_tokens: int = field(default=20, metadata={"help": "Tokens of a response."})
    include_suffix: bool = field(default=False, metadata={"help": "Whether the judge reads the suffix."})
    max_targets: int | None = field(default=None, metadata={"help": "Rows of the table that are used; unset, all."})
    on_bad_row: Literal["error", "skip"] = field(
        default="error", metadata={"help": "Refuse a table with rows that lack a goal or target, or record them."}
    )
    save_responses: bool = field(default=False, metadata={"help": "Whether the results hold the responses."})

    def __post_init__(self):
        super().__post_init__()
        for name in ("num_samples", "max_new_tokens", "max_targets"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}={value}` must be at least 1.")
        for name, allowed in (("scenario", ("behaviors", "strings")), ("on_bad_row", ("error", "skip"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}={getattr(self, name)!r}` must be one of {', '.join(map(repr, allowed))}.")


@dataclass
class GCGRunArguments:
    """
    What an evaluation from the command line runs on.

    Args:
        model_name_or_path (`str`, *optional*):
            Model to attack, with its tokenizer: a path or a Hub id. Needed.
        table (`str`, *optional*):
            CSV file with a header and the columns `goal` and `target`. Needed.
        reward_type (`str`, *optional*):
            The judge: `"refusal"` for [`RefusalJudge`], or a reward, as in
            [`~trl_repulse.rewards.loading.load_reward`]. If unset, the classifier that `reward_model_path` names, and without
            one `"refusal"`.
        reward_model_path (`str`, *optional*):
            Reward model: a path, a Hub id, or a server's address.
        reward_kwargs (`dict` or `str`, *optional*):
            Further arguments of the reward, or of [`RefusalJudge`]; on the command line as JSON.
        output (`str`, *optional*, defaults to `"gcg.jsonl"`):
            File of the results.
        threshold (`list[float]`, *optional*):
            Scores under which a response is bad, for the report at the end; without one, 0.5 for `"refusal"`, and no
            report for a reward.
        shard (`str`, *optional*, defaults to `"1/1"`):
            Part of the table, as `i/n` with i from 1 to n.
        dtype (`str`, *optional*, defaults to `"float32"`):
            Precision of the model's weights. In bfloat16 losses are too coarse to tell candidates apart.
        model_revision (`str`, *optional*, defaults to `"main"`):
            Branch, tag or commit of the model on the Hub.
        draft_model_name_or_path (`str`, *optional*):
            A smaller model with the same tokens, for probe sampling.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether to run Python code that comes with the model.

    Raises:
        `ValueError`: If what is needed is missing or a value cannot be read.
    """

    model_name_or_path: str | None = field(default=None, metadata={"help": "Model to attack: a path or a Hub id."})
    table: str | None = field(default=None, metadata={"help": "CSV file with the columns `goal` and `target`."})
    reward_type: str | None = field(
        default=None,
        metadata={
            "help": "The judge: `refusal`, `sequence_pair`, `chat`, `toxicity`, `guard`, `remote`, or a function, "
            "`path/to/file.py:function`; unset, the classifier of `reward_model_path`, or without one `refusal`."
        },
    )
    reward_model_path: str | None = field(
        default=None, metadata={"help": "Reward model: a path, a Hub id, or a server's address."}
    )
    reward_kwargs: dict | str | None = field(
        default=None, metadata={"help": 'Further arguments of the reward, e.g. `{"max_length": 300}`.'}
    )
    output: str = field(default="gcg.jsonl", metadata={"help": "File of the results."})
    threshold: list[float] | None = field(
        default=None, metadata={"help": "Scores under which a response is bad, for the report at the end."}
    )
    shard: str = field(default="1/1", metadata={"help": "Part of the table, as i/n with i from 1 to n."})
    dtype: str = field(default="float32", metadata={"help": "Precision of the model's weights."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the model on the Hub."})
    draft_model_name_or_path: str | None = field(
        default=None, metadata={"help": "A smaller model with the same tokens, for probe sampling."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Whether to run Python code that comes with the model."}
    )

    def __post_init__(self):
        for name in ("model_name_or_path", "table"):
            if getattr(self, name) is None:
                raise ValueError(f"`--{name}` is needed.")
        from .._generation import check_dtype

        check_dtype(self.dtype)
        if isinstance(self.threshold, int | float):  # as in a YAML file
            self.threshold = [float(self.threshold)]
        self.reward_kwargs = as_object("reward_kwargs", self.reward_kwargs)
        if not re.fullmatch(r"\d+/\d+", self.shard):
            raise ValueError(f"`shard={self.shard!r}` must be written as i/n, e.g. 1/4.")
        index, count = map(int, self.shard.split("/"))
        if not 1 <= index <= count:
            raise ValueError(f"`shard={self.shard!r}` is no part; write i/n with i from 1 to n.")
