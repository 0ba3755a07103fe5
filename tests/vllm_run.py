"""RePULSe in two processes, each with an engine of its own, or with servers; launched by `test_vllm` and `test_vllm_server`."""

import json
import sys

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer

from trl_repulse import RePULSeConfig, RePULSeTrainer

from .distributed_support import free_port, leave, start
from .vllm_server import let_cpu_push


def reward(completion_ids, **kwargs):
    return [float(len(set(ids))) - 3.0 * (5 in ids) for ids in completion_ids]


def server_options(urls: list[str]) -> dict:
    """Of one server for both models, or one for each."""
    if not urls:
        return {"vllm_mode": "colocate"}
    let_cpu_push(pytest.MonkeyPatch())
    ports = [free_port() for _ in urls]
    options = {"vllm_mode": "server", "vllm_server_base_url": urls[0], "vllm_group_port": ports[0]}
    if len(urls) == 2:
        options |= {"proposal_vllm_server_base_url": urls[1], "proposal_vllm_group_port": ports[1]}
    return options


def main(folder: str, kind: str, urls: str = "") -> None:
    servers = [url for url in urls.split(",") if url]
    args = RePULSeConfig(
        output_dir=f"{folder}/run",
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        max_steps=3,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=4,
        learning_rate=0.05,
        alpha=1.0,
        proposal="learned",
        target_dist_beta=-1.0,
        beta=0.0,
        use_vllm=True,
        vllm_max_model_length=32,
        vllm_gpu_memory_utilization=0.1,
        vllm_tensor_parallel_size=2 if kind == "one engine" else 1,
        **server_options(servers),
    )
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/model")
    adapters = LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear") if kind == "adapters" else None
    trainer = RePULSeTrainer(
        model=f"{folder}/model",
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(4, 12)]}),
        processing_class=tokenizer,
        peft_config=adapters,
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        sizes = {"world_size": trainer.accelerator.num_processes, "servers": len(servers)}
        if not servers:
            parallel = trainer.vllm_generation.llm.llm_engine.vllm_config.parallel_config
            sizes["engine"] = parallel.tensor_parallel_size
        print(json.dumps(sizes | {"logs": trainer.state.log_history[:-1]}))
    leave()


if __name__ == "__main__":
    start()
    main(*sys.argv[1:])
