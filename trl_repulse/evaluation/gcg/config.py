"""Settings of an attack."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from ..._prompts import check_template_variables


@dataclass
class GCGConfig:
    """
    Settings of one greedy coordinate gradient attack (GCG, Zou et al. 2023, arXiv 2307.15043).

    Args:
        num_steps (`int`, *optional*, defaults to `250`):
            Steps: one gradient and one search each.
        search_width (`int`, *optional*, defaults to `512`):
            Candidates drawn in a step.
        topk (`int`, *optional*, defaults to `256`):
            Tokens of steepest descent at each position, among which a candidate's new tokens are drawn.
        n_replace (`int`, *optional*, defaults to `1`):
            Positions a candidate changes.
        buffer_size (`int`, *optional*, defaults to `0`):
            Best suffixes kept. With 0 a step starts from the best candidate of the step before, even if that was worse
            than its predecessor; otherwise from the best suffix so far.
        mellowmax (`float`, *optional*):
            If set, the loss is the mellowmax of the target tokens' negative log-probabilities with this inverse
            temperature (Asadi and Littman 2017) instead of their mean.
        suffix_init (`str`, *optional*, defaults to `" x x x x x x x x x x"`):
            Suffix to start from. It follows the prompt directly: begin it with what sets it apart.
        micro_batch_size (`int`, *optional*):
            Candidates of one forward pass, halved when memory runs out; 64 on CPU and `search_width` elsewhere if unset.
        use_prefix_cache (`bool`, *optional*, defaults to `True`):
            Whether keys and values of what comes before the suffix are computed once. Results are the same up to
            rounding; models whose cache does not allow it are found out and run without.
        reuse_suffix_kv (`bool`, *optional*, defaults to `True`):
            Whether those of a candidate's unchanged first tokens are taken from the gradient's pass. Needs
            `use_prefix_cache`.
        filter_roundtrip (`str`, *optional*, defaults to `"context"`):
            Candidates that are dropped: those whose tokens are not what the tokenizer makes of the whole prompt's text
            (`"context"`), of the suffix's text alone (`"suffix"`, as nanogcg does), or none (`"off"`).
        allow_non_ascii (`bool`, *optional*, defaults to `False`):
            Whether tokens may be drawn that are not printable ASCII.
        forbid_special (`bool`, *optional*, defaults to `True`):
            Whether special tokens, those of the chat template among them, are never drawn.
        early_stop (`bool`, *optional*, defaults to `False`):
            Whether to stop once greedy decoding after the current suffix gives the target.
        stop_loss (`float`, *optional*):
            Loss, in nats, at which to stop.
        merge_swaps (`int`, *optional*, defaults to `0`):
            If above 1, each step also tries the best 2, 3, ... up to this many candidates merged into one. Not part of
            the published algorithm.
        screen_dtype (`str`, *optional*):
            `"bfloat16"` or `"float16"`: a copy of the model in this precision scores all candidates, and the model itself
            those that may be the best, with room for the copy's errors. The same strings as without, up to rare outliers
            among these; faster where the hardware multiplies in half precision faster than in the model's.
        probe_sampling_factor (`int`, *optional*, defaults to `16`):
            With a draft model: one of so many candidates is in the probe set (Zhao et al. 2024, arXiv 2403.01251).
        probe_reduction (`int`, *optional*, defaults to `8`):
            With a draft model: by this the share of candidates is divided that the model itself scores beside these.
        prompt_format (`str`, *optional*, defaults to `"chat"`):
            `"chat"` for the tokenizer's chat template, `"raw"` for plain text that the model continues.
        chat_template_kwargs (`dict` or `str`, *optional*):
            Further variables of the chat template, as in training; on the command line as JSON.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the candidates. The global random state is neither read nor changed.

    Raises:
        `ValueError`: If a value is out of range.
    """

    num_steps: int = field(default=250, metadata={"help": "Steps: one gradient and one search each."})
    search_width: int = field(default=512, metadata={"help": "Candidates drawn in a step."})
    topk: int = field(default=256, metadata={"help": "Tokens at each position that candidates draw from."})
    n_replace: int = field(default=1, metadata={"help": "Positions a candidate changes."})
    buffer_size: int = field(default=0, metadata={"help": "Best suffixes kept; 0 follows the last step's best."})
    mellowmax: float | None = field(
        default=None, metadata={"help": "Inverse temperature of the mellowmax over target tokens; unset, their mean."}
    )
    suffix_init: str = field(default=" x" * 10, metadata={"help": "Suffix to start from."})
    micro_batch_size: int | None = field(
        default=None, metadata={"help": "Candidates of one forward pass, halved when memory runs out."}
    )
    use_prefix_cache: bool = field(
        default=True, metadata={"help": "Whether what comes before the suffix is computed once."}
    )
    reuse_suffix_kv: bool = field(
        default=True, metadata={"help": "Whether a candidate's unchanged first tokens are not computed again."}
    )
    filter_roundtrip: Literal["context", "suffix", "off"] = field(
        default="context",
        metadata={"help": "Text whose tokens must be the candidate's: the whole prompt, the suffix alone, or none."},
    )
    allow_non_ascii: bool = field(default=False, metadata={"help": "Whether to draw tokens beyond printable ASCII."})
    forbid_special: bool = field(default=True, metadata={"help": "Whether special tokens are never drawn."})
    early_stop: bool = field(
        default=False, metadata={"help": "Whether to stop once greedy decoding gives the target."}
    )
    stop_loss: float | None = field(default=None, metadata={"help": "Loss at which to stop."})
    merge_swaps: int = field(
        default=0, metadata={"help": "Best candidates that are also tried merged into one; 0 for none."}
    )
    screen_dtype: Literal["bfloat16", "float16"] | None = field(
        default=None, metadata={"help": "Precision of a copy of the model that scores all candidates; unset, none."}
    )
    probe_sampling_factor: int = field(
        default=16, metadata={"help": "With a draft model: one of so many candidates is in the probe set."}
    )
    probe_reduction: int = field(
        default=8, metadata={"help": "With a draft model: divides the share of candidates the model itself scores."}
    )
    prompt_format: Literal["chat", "raw"] = field(
        default="chat", metadata={"help": "The tokenizer's chat template, or plain text that the model continues."}
    )
    chat_template_kwargs: dict | str | None = field(
        default=None,
        metadata={"help": 'Further variables of the chat template, such as `{"enable_thinking": false}`.'},
    )
    seed: int = field(default=0, metadata={"help": "Seed of the candidates."})

    def __post_init__(self):
        for name in (
            *("num_steps", "search_width", "topk", "n_replace"),
            *("probe_sampling_factor", "probe_reduction"),
        ):
            _at_least(name, getattr(self, name), 1)
        for name in ("buffer_size", "merge_swaps"):
            _at_least(name, getattr(self, name), 0)
        if self.micro_batch_size is not None:
            _at_least("micro_batch_size", self.micro_batch_size, 1)
        if self.mellowmax is not None and not self.mellowmax > 0:
            raise ValueError(f"`mellowmax={self.mellowmax}` must be above 0; leave it out for the mean.")
        if not self.suffix_init:
            raise ValueError("`suffix_init` is empty; give a text of as many tokens as the suffix shall have.")
        for name, allowed in (
            ("filter_roundtrip", ("context", "suffix", "off")),
            ("prompt_format", ("chat", "raw")),
            ("screen_dtype", (None, "bfloat16", "float16")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}={getattr(self, name)!r}` must be one of {', '.join(map(repr, allowed))}.")
        self.chat_template_kwargs = as_object("chat_template_kwargs", self.chat_template_kwargs)
        check_template_variables(self.chat_template_kwargs, ("tools",))
        if self.chat_template_kwargs and self.prompt_format == "raw":
            raise ValueError("`chat_template_kwargs` has no effect with `prompt_format='raw'`; leave one of them out.")


def as_object(name: str, value: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """A field's object, from JSON if it is text; refuses what is none."""
    given = value
    if isinstance(value, str):
        try:
            given = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"`{name}={value!r}` is not valid JSON ({error}).") from error
    if not isinstance(given, dict | None):
        raise ValueError(f'`{name}={given!r}` must be an object, such as {{"a_name": 300}}.')
    return given


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"`{name}={value}` must be at least {least}.")
