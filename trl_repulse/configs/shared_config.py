"""What the configurations of all trainers share: their options for rewards, scoring and vLLM, and how fields are declared."""

import copy
import inspect
import re
import warnings
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from ._checks import check_shared, own_precision, parse_objects


# TRL (1.16) sets and reads what transformers (5.24) has renamed, at each update. Way out: a TRL that uses the new names.
warnings.filterwarnings("ignore", r"`(is_)?gradient_checkpointing\w*` is deprecated", FutureWarning)


def option(default: Any, help: str) -> Any:
    """A field with a default and a text for the command line, where the class's docstring has no entry for it."""
    return field(default=default, metadata={"help": help})


def documented(cls: type) -> type:
    """Class decorator above `dataclass`. The fields that the class declares get their command-line help from its docstring: an entry is a
    line `name (type):`, indented by four spaces, with its text below, indented by eight. Others are skipped."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    for name, text in re.findall(r"^    (\w+) \(.+\):\n((?:        .*\n?)+)", doc, re.MULTILINE):
        if name in inspect.get_annotations(cls):
            text = re.sub(r"\[`[~\w.]*?(\w+)`\]", r"`\1`", " ".join(text.split()))  # links
            text = re.sub(r'`"(\w+)"`', r"`\1`", text).replace("%", "%%")  # argparse formats it
            declared = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
            declared.metadata = MappingProxyType({**declared.metadata, "help": text})
    return cls


@dataclass
class WholePrompts:
    """Mixin before [`~trl.GRPOConfig`]: [`own_precision`], and evaluation batches that split no prompt's completions."""

    per_device_eval_batch_size: int | None = option(
        None,
        "Completions of one evaluation pass on each device. If unset, `per_device_train_batch_size`, or 8 if that is less, in whole "
        "prompts: a multiple of `num_generations_eval`, or of `num_generations`.",
    )

    def __post_init__(self):
        if self.per_device_eval_batch_size is None:
            drawn = max(self.num_generations_eval or self.num_generations or 1, 1)
            self.per_device_eval_batch_size = max(max(self.per_device_train_batch_size, 8) // drawn, 1) * drawn
        texts = (name for name in self._VALID_DICT_FIELDS if str(getattr(self, name)).startswith("{"))
        parse_objects(copy.copy(self), *texts)  # transformers' error names no field
        with own_precision(self):
            super().__post_init__()


def without_secrets(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run (from `to_dict`) for files and trackers: without the token in `model_init_kwargs`, and without
    user info and query in server addresses. transformers' `to_dict` (5.23) hides only fields that are tokens."""
    shown = dict(settings)
    if (shown.get("model_init_kwargs") or {}).get("token"):
        shown["model_init_kwargs"] = shown["model_init_kwargs"] | {"token": "<TOKEN>"}
    for name in ("vllm_server_base_url", "proposal_vllm_server_base_url"):
        if shown.get(name):
            shown[name] = re.sub(r"(?<=//)[^/?#]*@|[?#].*", "", shown[name])
    return shown


@documented
@dataclass
class SharedConfig(WholePrompts):
    r"""
    Options for rewards, scoring and vLLM that all trainers share; not a configuration by itself.

    Parameters:
        > Parameters that control the rewards

        reward_transform (`str`, *optional*):
            Transform of the reward the policy maximises: `"exponential"` (r - a*exp(b*r)) or `"indicator"` (r - a*1[r
            < threshold]). It acts before the KL penalty; the target distribution, the logged `reward` and evaluations
            use the raw reward.
        reward_transform_alpha (`float`, *optional*, defaults to `1.0`):
            The reward transform's a, at least 0.
        reward_transform_beta (`float`, *optional*, defaults to `-1.0`):
            The exponential reward transform's b, below 0.
        reward_transform_threshold (`float`, *optional*):
            The indicator reward transform's threshold, in units of reward.
        bad_reward_threshold (`float`, *optional*):
            Reward under which a completion counts as bad, for logging, the negative data and the indicator potential.
            If unset, the hot policy measures it. It takes about the 2 % quantile of the first 500 rewards (of a tenth
            of all, but at least 50, if a run draws fewer than 5,000), and pushes nothing down until then.
        save_negatives (`bool`, *optional*, defaults to `False`):
            Whether to append each sampled completion with a reward under `bad_reward_threshold` to
            `output_dir/negatives.jsonl`.

        > Parameters that control the scoring

        disable_dropout (`bool`, *optional*, defaults to `True`):
            Whether to disable dropout in the models. Dropout makes log-probabilities noisy.
        share_prompts (`str` or `bool`, *optional*, defaults to `"auto"`):
            Whether completions of a prompt are scored in common rows, which read it once. `"auto"`: if a check at
            set-up finds that the models support it, else with a warning not. `True`: an error if they do not. `False`:
            never. The number of completions in a row is chosen to make the pass cheapest.

        > Parameters that control vLLM (`use_vllm=True`)

        vllm_sleep_level (`int`, *optional*):
            With `vllm_enable_sleep_mode`, what the engine does between samplings: keep its weights in main memory (1)
            or discard them (2). If `None`, 1 if LoRA adapters are pushed over a fixed base, else 2.
    """

    reward_transform: Literal["exponential", "indicator"] | None = None
    reward_transform_alpha: float = 1.0
    reward_transform_beta: float = -1.0
    reward_transform_threshold: float | None = None
    bad_reward_threshold: float | None = None
    save_negatives: bool = False

    disable_dropout: bool = True
    share_prompts: Literal["auto", True, False, "true", "false"] = "auto"

    vllm_sleep_level: Literal[1, 2] | None = None

    def check(self) -> None:
        """Refuses values that do not fit, with a `ValueError`; a trainer calls it again, since fields may have been changed."""
        check_shared(self)

    def to_dict(self) -> dict[str, Any]:
        """Like [`~transformers.TrainingArguments.to_dict`], which files and trackers get, but without secrets."""
        return without_secrets(super().to_dict())
