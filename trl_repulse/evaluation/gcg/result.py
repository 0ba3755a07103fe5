"""What an attack ends with."""

from dataclasses import dataclass
from typing import Literal


StopReason = Literal["num_steps", "early_stop", "stop_loss"]


@dataclass(frozen=True)
class GCGResult:
    """
    Result of an attack.

    Args:
        suffix (`str`):
            Text of the best suffix; after an early stop, of the one that caused it.
        suffix_ids (`list[int]`):
            Its tokens, which were attacked with.
        prompt_ids (`list[int]`):
            Tokens of the whole prompt with it.
        target_ids (`list[int]`):
            Tokens of the target.
        loss (`float`):
            Its loss, in nats; but for an early stop, the lowest of all steps: the mean negative log-probability of the target's tokens, or its
            mellowmax.
        initial_loss (`float`):
            Loss of the suffix that the attack began with.
        losses (`list[float]`):
            Lowest loss of each step's candidates.
        suffixes (`list[str]`):
            Suffix after each step.
        stop_reason (`str`):
            `"num_steps"`, `"early_stop"` or `"stop_loss"`.
        exact_match (`bool`):
            Whether greedy decoding gives the target.
        round_trip (`bool`):
            Whether the prompt's text with the suffix is tokenized to `prompt_ids`.
    """

    suffix: str
    suffix_ids: list[int]
    prompt_ids: list[int]
    target_ids: list[int]
    loss: float
    initial_loss: float
    losses: list[float]
    suffixes: list[str]
    stop_reason: StopReason
    exact_match: bool
    round_trip: bool
