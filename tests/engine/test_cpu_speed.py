"""What makes a CPU fast: weights cast once a draw, and a fused head in tiles. Neither changes a distribution."""

import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode

from trl_repulse import ReinforceTrainer
from trl_repulse._trl import add_fused_lm_head, trl_utils
from trl_repulse.engine.trl_bridge import scored_in_small_tiles

from ..conftest import build_model


class Casts(TorchDispatchMode):
    """How often a tensor of some shape is made a bfloat16 one."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.count += result.dtype == torch.bfloat16 and result.shape == self.shape
        return result


@pytest.mark.trainer
@pytest.mark.parametrize(
    "extra", [{}, {"peft_config": LoraConfig(r=2, target_modules="all-linear")}], ids=["full", "lora"]
)
def test_weights_are_cast_once_a_draw(make, extra):
    """Frozen ones under an adapter too, of which autocast keeps no casts by itself."""
    trainer = make(ReinforceTrainer, "llama", extra=extra, bf16=True, max_completion_length=6, max_steps=1)
    weights = [p for name, p in trainer.model.named_parameters() if p.dim() == 2 and "lora" not in name]
    shape, counts = weights[-1].shape, []
    frozen = [p for p in trainer.model.parameters() if not p.requires_grad]
    draw = trainer._generate_single_turn

    def counted(*args, **kwargs):
        with Casts(shape) as casts:
            drawn = draw(*args, **kwargs)
        counts.append(casts.count)
        return drawn

    trainer._generate_single_turn = counted
    trainer.train()
    assert len(counts) == 1 and 0 < counts[0] <= sum(p.shape == shape for p in weights)
    assert bool(frozen) == bool(extra) and not any(p.requires_grad for p in frozen)


def scores(model, ids, tiles):
    model.zero_grad()
    with tiles:
        found = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
    (found.log_probs * torch.linspace(0.1, 1, found.log_probs.numel()).view_as(found.log_probs)).sum().backward()
    return found.log_probs.detach(), found.entropy.detach(), [p.grad.clone() for p in model.parameters()]


def test_tiles_change_nothing_but_rounding(monkeypatch):
    model = build_model("llama", 5000)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids = torch.randint(5000, (4, 12), generator=torch.Generator().manual_seed(0))
    sizes, apply = [], trl_utils._ChunkedLogProbFunction.apply
    monkeypatch.setattr(
        trl_utils._ChunkedLogProbFunction, "apply", lambda *args: sizes.append(args[5]) or apply(*args)
    )
    whole = scores(model, ids, scored_in_small_tiles(torch.device("meta"), 44))
    tiled = scores(model, ids, scored_in_small_tiles(torch.device("cpu"), 2**30))
    assert sizes == [32768, 2048] and trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE == 32768
    for one, other in zip([*whole[:2], *whole[2]], [*tiled[:2], *tiled[2]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
