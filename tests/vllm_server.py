"""`vllm serve` on a CPU: weights arrive through a store instead of NCCL, which needs GPUs; all else is vLLM's and TRL's own.

`python -m tests.vllm_server MODEL ...` starts a server; [`let_cpu_push`] lets TRL's client push to it. A worker's process starts from
this module anew, and is changed with it.
"""

from typing import Any

import torch


class StoreGroup:
    """The part of vLLM's NCCL communicator that weights go through."""

    def __init__(self, init_info: Any, rank: int):
        from vllm.distributed.utils import StatelessProcessGroup

        info = init_info if isinstance(init_info, dict) else vars(init_info)
        host, port, world_size = info["master_address"], info["master_port"], info["world_size"]
        self.group = StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world_size)


def let_cpu_push(monkeypatch) -> None:
    """Has clients that connect from here on push through a store."""
    from trl.generation import vllm_client

    connect = vllm_client.VLLMClient.init_communicator
    # It asks for the kind of the device, and sets none without an index
    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", lambda self, device: connect(self, "cuda"))
    monkeypatch.setattr(vllm_client, "open_trainer_endpoint", lambda init_info: StoreGroup(init_info, 0))
    monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", send)


def send(iterator: Any, group: StoreGroup, src: int, post_iter_func: Any, **kwargs: Any) -> None:
    for item in iterator:
        group.group.broadcast(post_iter_func(item).detach().cpu().contiguous(), src)


def receive(iterator: Any, group: StoreGroup, src: int, post_unpack_func: Any, **kwargs: Any) -> None:
    for name, (shape, dtype) in iterator:
        tensor = group.group.broadcast(torch.empty(0), src)
        assert list(tensor.shape) == list(shape) and tensor.dtype == dtype
        post_unpack_func([(name, tensor)])


def let_cpu_receive() -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    nccl_engine.worker_init_process_group = lambda info, parallel: StoreGroup(info, parallel.rank + info.rank_offset)
    nccl_engine.packed_nccl_broadcast_consumer = receive


if __name__ in ("__main__", "__mp_main__"):
    let_cpu_receive()

if __name__ == "__main__":
    import importlib.metadata
    import sys

    import vllm
    from vllm.entrypoints.cli.main import main

    installed = importlib.metadata.version  # the CPU build's package may have another name
    importlib.metadata.version = lambda name: vllm.__version__ if name == "vllm" else installed(name)
    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    main()
