"""The vLLM engine that TRL builds for a trainer: its precision, the models it samples from, and when their weights are pushed."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accelerate.utils import is_peft_model, set_seed
from transformers import AutoConfig, TrainerCallback

from ..generation import VLLMGenerator, _engine
from .second_model import Adapter, SecondModel


if TYPE_CHECKING:
    from peft import PeftConfig


class WeightsChanged(TrainerCallback):
    """Tells the vLLM engine when the policy's weights have changed; a second model's trainer tells of that one's."""

    def __init__(self, generator: VLLMGenerator):
        self._generator = generator

    def on_train_begin(self, args, state, control, **kwargs):
        self._generator.changed()  # a checkpoint may have been loaded

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._generator.changed("policy")


@contextlib.contextmanager
def engine_of(args: Any, model: Any, adapters: list["PeftConfig | None"]) -> Iterator[None]:
    """Context in which TRL builds its vLLM engine with the policy's precision and room for `adapters`."""
    if not args.use_vllm:
        yield
        return
    if args.bf16 or args.fp16:  # what autocast runs them in
        dtype = "bfloat16" if args.bf16 else "float16"
    elif isinstance(model, str):
        options = dict(args.model_init_kwargs or {})
        dtype = str(options.get("dtype") or options.get("torch_dtype") or "float32")
        if dtype == "auto":
            loading = {"trust_remote_code": args.trust_remote_code, **options}
            loading = {name: loading.get(name) for name in ("revision", "trust_remote_code")}
            dtype = str(AutoConfig.from_pretrained(model, **loading).dtype or "float32")
    else:
        dtype = str(model.dtype)
    if not isinstance(model, str) and is_peft_model(model):
        adapters = [*adapters, *model.peft_config.values()]
    with _engine.engine_options(dtype.removeprefix("torch."), [config for config in adapters if config is not None]):
        yield


def take_engine(trainer: Any) -> None:
    """Wraps TRL's vLLM engine so that it serves several models and receives weights only after they change."""
    if trainer.vllm_mode == "colocate":
        # The engine has set torch's seed, from which it samples, to the number of its group whatever `seed` is
        set_seed(trainer.args.seed + trainer.accelerator.process_index // trainer.vllm_tensor_parallel_size)
    models = {"policy": trainer.accelerator.unwrap_model(trainer.model)}
    trainer.vllm_generation = VLLMGenerator(
        models, trainer._tokenizer, engine=trainer.vllm_generation, sleep_level=trainer.args.vllm_sleep_level
    )
    trainer.add_callback(WeightsChanged(trainer.vllm_generation))


def serve_proposal(trainer: Any, proposal: SecondModel) -> None:
    """Lets the vLLM engine, or a second server, sample from the proposal too."""
    module, args, server = proposal.module, trainer.args, {}
    if args.proposal_vllm_server_base_url is not None:
        server = {"server_base_url": args.proposal_vllm_server_base_url, "group_port": args.proposal_vllm_group_port}
    served = (module.model, module.name) if isinstance(module, Adapter) else (module,)
    trainer.vllm_generation.add("proposal", *served, **server)
