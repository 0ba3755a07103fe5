"""Checks that models can be loaded, before any is."""

from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from transformers import AutoConfig, PretrainedConfig

from .trl_bridge import get_config_model_id


# Flags of the command line
_FLAGS = {"model": "model_name_or_path", "reward_funcs": "reward_model_path"}
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def check_loadable(args: Any, peft_config: Any, **models: Any) -> None:
    """
    Refuses paths and ids whose configuration or weights cannot be found, also of the reference for a KL penalty, and a policy whose
    context has no room for completions.

    `models` are as they were passed, or lists of them, by the names of their arguments. Models that are loaded already pass.
    """
    policy = models["model"]
    options = args.model_init_kwargs or {}
    loading = {"trust_remote_code": options.get("trust_remote_code", args.trust_remote_code)}
    revision = options.get("revision")
    for argument, given in models.items():
        for name in given if isinstance(given, list | tuple) else [given]:
            if isinstance(name, str):
                own: dict[str, Any] = {"revision": revision} if name == policy else {}
                flag = f" (`--{_FLAGS[argument]}` on the command line)" if argument in _FLAGS else ""
                config = _check(name, f"`{argument}={name!r}`{flag}", **loading, **own)
                if argument != "model" or config is None or {"config", "max_position_embeddings"} & set(options):
                    continue
                # How long prompts are is known once there is a tokenizer. XLNet's context of no limit is -1
                context = getattr(config.get_text_config(), "max_position_embeddings", None) or -1
                if args.max_completion_length is not None and 0 < context <= args.max_completion_length:
                    raise ValueError(
                        f"`max_completion_length={args.max_completion_length}` leaves no room for a prompt in the model's context of "
                        f"{context} tokens; lower it."
                    )
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
    """The model's configuration, if it can be loaded; `None` for an adapter."""
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
