"""Models that cannot be loaded are refused before any is, by the argument they were given as."""

from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from transformers import AutoConfig, PretrainedConfig

from .trl_bridge import get_config_model_id


# What the example scripts call them
_FLAGS = {"model": "model_name_or_path", "reward_funcs": "reward_model_path"}
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def check_loadable(args: Any, peft_config: Any, **models: Any) -> None:
    """
    Refuses models, by name, whose configuration or weights cannot be found, the reference that a KL penalty needs among them, and a
    policy whose context has no room for completions.

    `models` are as they were passed, or lists of them, by the names of their arguments, `model` first. What is no text passes.
    """
    policy = models["model"]
    options = args.model_init_kwargs or {}
    loading = {"trust_remote_code": options.get("trust_remote_code", args.trust_remote_code)}
    revision = options.get("revision")
    for argument, given in models.items():
        for name in given if isinstance(given, list | tuple) else [given]:
            if isinstance(name, str):
                own = {"revision": revision} if name == policy else {}
                flag = f" (`--{_FLAGS[argument]}` on the command line)" if argument in _FLAGS else ""
                config = _check(name, f"`{argument}={name!r}`{flag}", **loading, **own)
                if (
                    argument == "model"
                    and config is not None
                    and not {"config", "max_position_embeddings"} & set(options)
                ):
                    _check_room(config, args.max_completion_length)
    if not isinstance(policy, str) and args.beta != 0 and peft_config is None and not is_peft_model(policy):
        name = get_config_model_id(policy.config)
        what = f"The reference model that `beta={args.beta:g}` needs, `{name}` by the policy's `name_or_path`,"
        _check(name, what, "save the policy and pass its path as `model`, or set `beta=0`", **loading)


def _check(
    name: str,
    what: str,
    remedy: str = "give the path of a saved model, or its id on the Hub (for a private or gated one, log in with `hf auth login`)",
    **options: Any,
) -> PretrainedConfig | None:
    """The model's configuration; of an adapter there is none to be checked."""
    folder = Path(name)
    if (folder / "adapter_config.json").is_file():
        return None
    try:
        config = AutoConfig.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"{what} cannot be loaded; {remedy}. ({' '.join(str(error).split())})") from error
    if folder.is_dir() and not any(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        raise ValueError(f"{what} cannot be loaded: the folder has no weights; {remedy}.")
    return config


def _check_room(config: PretrainedConfig, max_completion_length: int | None) -> None:
    """Refuses completions that no prompt fits beside; how long the prompts are is known once there is a tokenizer."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or -1  # XLNet's, of no limit, is -1
    if max_completion_length is not None and 0 < context <= max_completion_length:
        raise ValueError(
            f"`max_completion_length={max_completion_length}` leaves no room for a prompt in the model's context of {context} tokens; "
            "lower it."
        )
