"""What the configurations of all trainers say about sampling with vLLM, beyond TRL's own."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class EngineConfig:
    r"""
    Parameters of sampling with vLLM (`use_vllm=True`) that all trainers here share; not a configuration by itself.

    Parameters:
        vllm_sleep_level (`int`, *optional*):
            With `vllm_enable_sleep_mode=True`, what the engine does between samplings: keep its weights in main memory (1)
            or drop them (2). If `None`, 1 where LoRA adapters are pushed over a base that stays, and 2 elsewhere.
        vllm_logp_difference_threshold (`float`, *optional*, defaults to `0.1`):
            Mean distance, in nats a token, between the engine's log-probabilities of what it sampled and the trainer's
            own, from which on a warning is given. Only the trainer's enter importance weights.
    """

    vllm_sleep_level: Literal[1, 2] | None = field(
        default=None,
        metadata={
            "help": "With `vllm_enable_sleep_mode`, what the engine does between samplings: keep its weights in main "
            "memory (1) or drop them (2). If `None`, 1 where adapters are pushed and 2 elsewhere."
        },
    )
    vllm_logp_difference_threshold: float = field(
        default=0.1,
        metadata={
            "help": "Mean distance (nats a token) between vLLM's log-probabilities and the trainer's own, from which on "
            "a warning is given."
        },
    )
