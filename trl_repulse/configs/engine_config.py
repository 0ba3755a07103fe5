"""Options of all trainers for sampling with vLLM, beyond TRL's own."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal


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


@dataclass
class EngineConfig:
    r"""
    Options for sampling with vLLM (`use_vllm=True`) that all trainers share; not a configuration by itself.

    Parameters:
        vllm_sleep_level (`int`, *optional*):
            What the engine does between samplings with `vllm_enable_sleep_mode=True`: keep its weights in main memory
            (1) or discard them (2). If `None`, 1 if LoRA adapters are pushed over a fixed base, else 2.
        vllm_logp_difference_threshold (`float`, *optional*, defaults to `0.1`):
            Mean difference, in nats a token, between the log-probabilities of engine and trainer above which a warning
            is given. Importance weights use only the trainer's.
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
        """Like [`~transformers.TrainingArguments.to_dict`], which files and trackers get, but without secrets."""
        return without_secrets(super().to_dict())
