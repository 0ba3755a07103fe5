"""What the configurations of all trainers say about sampling with vLLM, beyond TRL's own."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal


def without_secrets(settings: dict[str, Any]) -> dict[str, Any]:
    """
    Settings of a run as files and trackers may hold them. transformers' `to_dict` (5.23) hides only fields that are tokens.

    Args:
        settings (`dict`):
            What `to_dict` of a configuration gave.

    Returns:
        `dict`: the same without the token in `model_init_kwargs`, and without user info and query in the addresses of servers.
    """
    shown = dict(settings)
    if (shown.get("model_init_kwargs") or {}).get("token"):
        shown["model_init_kwargs"] = shown["model_init_kwargs"] | {"token": "<TOKEN>"}
    for name in ("vllm_server_base_url", "proposal_vllm_server_base_url"):
        if shown.get(name):
            shown[name] = re.sub(r"(?<=//)[^/?#]*@|[?#].*", "", shown[name])
    return shown


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

    def to_dict(self) -> dict[str, Any]:
        """As [`~transformers.TrainingArguments.to_dict`], which files and trackers are given, without secrets."""
        return without_secrets(super().to_dict())
