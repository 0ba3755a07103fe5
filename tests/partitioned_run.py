"""A process in which ZeRO-3 cuts models apart as they are loaded, and the check of causality runs on them."""

import os
import sys

import deepspeed
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from tests.distributed_support import free_port
from trl_repulse.models._deepspeed import gathered_by_layer, is_partitioned
from trl_repulse.models._model_checks import check_causal


def main(causal: str, bidirectional: str) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes minutes to build
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # what a launcher sets
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    ids = torch.tensor([[3, 4, 5]])
    expected = AutoModelForCausalLM.from_pretrained(causal)(input_ids=ids).logits
    config = HfDeepSpeedConfig(
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }
    )
    model = AutoModelForCausalLM.from_pretrained(causal)
    assert is_partitioned(model) and config.is_zero3()
    layers, whole = list(model.model.layers), []
    with gathered_by_layer(model), torch.no_grad():
        for layer in layers:  # behind the hook that gathers
            layer.register_forward_pre_hook(lambda *_: whole.append([count(each) > 0 for each in layers]))
        assert torch.equal(model(input_ids=ids).logits, expected)
    assert whole == [[True, False], [False, True]], whole
    assert count(model) == 0
    with gathered_by_layer(model):
        check_causal(model, "`model`")
    other = AutoModelForCausalLM.from_pretrained(bidirectional)
    try:
        with gathered_by_layer(other):
            check_causal(other, "`model`")
    except ValueError as error:
        print(error)
    assert count(other) == 0


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


if __name__ == "__main__":
    main(*sys.argv[1:])
