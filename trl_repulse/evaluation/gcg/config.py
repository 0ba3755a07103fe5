"""Settings of an attack, of an evaluation by attacks, and of its command."""

import re
from dataclasses import dataclass
from typing import Literal

from ...configs._checks import check_choices, parse_objects, require_at_least
from ...configs.shared_config import documented
from ...data._prompts import check_template_variables


@documented
@dataclass
class GCGConfig:
    """
    Settings of one greedy coordinate gradient attack (GCG, Zou et al. 2023, arXiv 2307.15043). Raises `ValueError` if a value is out of
    range.

    Args:
        num_steps (`int`, *optional*, defaults to `250`):
            Steps, each with one gradient and one search.
        search_width (`int`, *optional*, defaults to `512`):
            Candidates drawn in a step.
        topk (`int`, *optional*, defaults to `256`):
            Tokens of steepest descent at each position, from which a candidate's new tokens are drawn.
        n_replace (`int`, *optional*, defaults to `1`):
            Positions that a candidate changes.
        buffer_size (`int`, *optional*, defaults to `0`):
            Best suffixes kept; a step starts from the best of them, or with 0 from the last step's best, even if it is worse.
        suffix_init (`str`, *optional*, defaults to `" x x x x x x x x x x"`):
            Initial suffix. It follows the prompt directly; begin it with a separator.
        micro_batch_size (`int`, *optional*):
            Candidates of one forward pass, halved when memory runs out. If unset, 64 on CPU and `search_width` elsewhere.
        use_prefix_cache (`bool`, *optional*, defaults to `True`):
            Whether to compute the keys and values before the suffix, and of a candidate's unchanged first tokens, only
            once, if the model's cache allows it.
        filter_roundtrip (`str`, *optional*, defaults to `"context"`):
            Text from which the tokenizer must give a candidate back: `"context"`, the whole prompt; `"suffix"`, as in nanogcg;
            `"off"`, none.
        prompt_format (`str`, *optional*, defaults to `"chat"`):
            `"chat"` for the tokenizer's chat template, `"raw"` for plain text that the model continues.
        chat_template_kwargs (`dict` or `str`, *optional*):
            Variables for the chat template, such as `{"enable_thinking": false}`; on the command line as JSON.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the candidates. The global random state is not used.
    """

    num_steps: int = 250
    search_width: int = 512
    topk: int = 256
    n_replace: int = 1
    buffer_size: int = 0
    suffix_init: str = " x" * 10
    micro_batch_size: int | None = None
    use_prefix_cache: bool = True
    filter_roundtrip: Literal["context", "suffix", "off"] = "context"
    prompt_format: Literal["chat", "raw"] = "chat"
    chat_template_kwargs: dict | str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        require_at_least(self, 1, "num_steps", "search_width", "topk", "n_replace", "micro_batch_size")
        require_at_least(self, 0, "buffer_size")
        if not self.suffix_init:
            raise ValueError("`suffix_init` is empty; give a text of as many tokens as the suffix shall have.")
        parse_objects(self, "chat_template_kwargs")
        check_template_variables(self.chat_template_kwargs, allowed=("tools",))
        if self.chat_template_kwargs and self.prompt_format == "raw":
            raise ValueError("`chat_template_kwargs` has no effect with `prompt_format='raw'`; leave one of them out.")


@documented
@dataclass
class GCGEvaluationConfig(GCGConfig):
    """
    Settings of [`~trl_repulse.evaluation.gcg.evaluate_gcg`]: those of the attack, and what is sampled and judged.

    Each target has its own seeds, made from `seed` and its texts: results do not depend on order, shards or processes. Raises `ValueError`
    if a value is out of range.

    Args:
        scenario (`str`, *optional*, defaults to `"behaviors"`):
            What the prompt is: the row's `goal` and the suffix (`"behaviors"`), or the suffix alone (`"strings"`).
        num_samples (`int`, *optional*, defaults to `10`):
            Responses drawn for each target before the attack, and as many after it.
        max_new_tokens (`int`, *optional*, defaults to `20`):
            Tokens of a response.
        include_suffix (`bool`, *optional*, defaults to `False`):
            Whether the judge reads the suffix after the goal.
        max_targets (`int`, *optional*):
            Number of rows used, from the top of the table; all if unset.
        save_responses (`bool`, *optional*, defaults to `False`):
            Whether the results hold the responses.
    """

    scenario: Literal["behaviors", "strings"] = "behaviors"
    num_samples: int = 10
    max_new_tokens: int = 20
    include_suffix: bool = False
    max_targets: int | None = None
    save_responses: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 1, "num_samples", "max_new_tokens", "max_targets")


@documented
@dataclass
class GCGRunArguments:
    """
    Arguments of an evaluation from the command line. Raises `ValueError` if a required argument is missing or a value cannot be read.

    Args:
        model_name_or_path (`str`, *optional*):
            Model to attack, with its tokenizer: a path or a Hub id. Required.
        table (`str`, *optional*):
            CSV file with a header and the columns `goal` and `target`. Required.
        reward_type (`str`, *optional*):
            The judge: `"refusal"`, `"sequence_pair"`, `"chat"`, `"toxicity"`, `"guard"`, `"remote"`, or a function,
            `path/to/file.py:function`, as in [`~trl_repulse.rewards.loading.load_reward`]. If unset, the classifier
            `reward_model_path`, or `"refusal"` without one.
        reward_model_path (`str`, *optional*):
            Reward model: a path, a Hub id, or a server's address.
        reward_kwargs (`dict` or `str`, *optional*):
            Further arguments of the reward or of [`RefusalJudge`]; on the command line as JSON.
        output (`str`, *optional*, defaults to `"gcg"`):
            Folder of the results.
        threshold (`list[float]`, *optional*):
            Scores below which a response is bad, for the report. If unset, 0.5 for `"refusal"`, and no report for a reward.
        shard (`str`, *optional*, defaults to `"1/1"`):
            Part of the table, as `i/n` with i from 1 to n.
        dtype (`str`, *optional*, defaults to `"float32"`):
            Precision of the model's weights. In bfloat16, losses are too coarse to tell candidates apart.
        model_revision (`str`, *optional*, defaults to `"main"`):
            Branch, tag or commit of the model on the Hub.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether to run Python code that comes with the model.
    """

    model_name_or_path: str | None = None
    table: str | None = None
    reward_type: str | None = None
    reward_model_path: str | None = None
    reward_kwargs: dict | str | None = None
    output: str = "gcg"
    threshold: list[float] | None = None
    shard: str = "1/1"
    dtype: str = "float32"
    model_revision: str = "main"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name in ("model_name_or_path", "table"):
            if getattr(self, name) is None:
                raise ValueError(f"`--{name}` is needed.")
        from .._generation import check_dtype

        check_dtype(self.dtype)
        parse_objects(self, "reward_kwargs")
        if not re.fullmatch(r"\d+/\d+", self.shard):
            raise ValueError(f"`shard={self.shard!r}` must be written as i/n, e.g. 1/4.")
        index, count = map(int, self.shard.split("/"))
        if not 1 <= index <= count:
            raise ValueError(f"`shard={self.shard!r}` is no part; write i/n with i from 1 to n.")
