"""Models that cannot be loaded are refused before any is, by the argument they were given as."""

from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from transformers import AutoConfig

from ._trl_bridge import get_config_model_id


# What the example scripts call them
_FLAGS = {"model": "model_name_or_path", "reward_funcs": "reward_model_path"}
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def check_loadable(args: Any, peft_config: Any, **models: Any) -> None:
    """
    Refuses models, by name, whose configuration or weights cannot be found, the reference that a KL penalty needs among them.

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
                _check(name, f"`{argument}={name!r}`{flag}", **loading, **own)
    if not isinstance(policy, str) and args.beta != 0 and peft_config is None and not is_peft_model(policy):
        name = get_config_model_id(policy.config)
        what = f"The reference model that `beta={args.beta:g}` needs, `{name}` by the policy's `name_or_path`,"
        _check(name, what, "save the policy and pass its path as `model`, or set `beta=0`", **loading)


def _check(
    name: str,
    what: str,
    remedy: str = "give the path of a saved model, or its id on the Hub (for a private or gated one, log in with `hf auth login`)",
    **options: Any,
) -> None:
    folder = Path(name)
    if (folder / "adapter_config.json").is_file():
        return
    try:
        AutoConfig.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"{what} cannot be loaded; {remedy}. ({' '.join(str(error).split())})") from error
    if folder.is_dir() and not any(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        raise ValueError(f"{what} cannot be loaded: the folder has no weights; {remedy}.")
