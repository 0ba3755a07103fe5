"""What we rely on in TRL and transformers: an upgrade that moves it fails here; and what makes a CPU fast without changing a distribution."""

import copy
import inspect
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import transformers.trainer
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from trl import GRPOTrainer

from trl_repulse import ReinforceTrainer
from trl_repulse._trl import add_fused_lm_head, trl_utils
from trl_repulse.engine import trl_bridge as bridge
from trl_repulse.engine.scoring import Layout, prepare_scoring, sampler_log_probs, takes_bias, token_log_probs
from trl_repulse.engine.trl_bridge import scored_in_small_tiles
from trl_repulse.generation.drawing import Sampler

from ..conftest import DEVICE, build_accelerator, build_model


def test_what_grpo_makes_of_a_batch():
    """The names that PPO reads from and writes into GRPO's batch, and where its loss looks for the KL coefficient."""
    made, used = (
        inspect.getsource(inspect.unwrap(method))
        for method in (GRPOTrainer._generate_and_score_completions, GRPOTrainer._compute_loss)
    )
    written = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch")
    assert all(f'"{name}": {name},' in made for name in written)
    for name in ("old_per_token_logps", "ref_per_token_logps", "tool_mask"):
        assert f'output["{name}"] = {name}' in made
    assert 'self._logs["advantages"].extend(all_process_advantages.tolist())' in made
    assert "self._calculate_rewards(inputs, prompts, completions, completion_ids_list)" in made
    assert "if advantages.dim() == 1:" in used and "per_token_loss1 = coef_1 * advantages" in used
    assert used.count("if self.beta != 0.0:") == 3 and used.count("self.beta") == 4
    assert 'inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes' in used
    assert "self.current_gradient_accumulation_steps / self.args.steps_per_generation" in used


def test_the_kl_coefficient_comes_back_after_an_error():
    trainer = SimpleNamespace(beta=0.3)
    with pytest.raises(RuntimeError), bridge.without_kl(trainer):
        assert trainer.beta == 0.0
        raise RuntimeError
    assert trainer.beta == 0.3


def test_scores_do_not_depend_on_padding(tokenizer, architecture):
    model = build_model(architecture, len(tokenizer)).eval().to(DEVICE)
    add_fused_lm_head(model)
    ids = torch.randint(3, len(tokenizer), (2, 5), device=DEVICE)

    def padded(padding):
        mask = (torch.arange(padding + 5, device=DEVICE) >= padding).long().expand(2, -1)
        return torch.cat([torch.zeros(2, padding, dtype=torch.long, device=DEVICE), ids], dim=1), mask

    with torch.no_grad():
        expected = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        if architecture == "gpt2":  # the defect that makes the hook necessary; if this fails, the hook can go
            input_ids, mask = padded(3)
            labels = input_ids.masked_fill(mask == 0, -100)
            wrong = model(input_ids=input_ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
            assert (wrong[:, -3:] - expected[:, -3:]).abs().max() > 1e-2
        prepare_scoring(model)
        for padding in (0, 3):
            for width in (1, 3):
                log_p, *_ = token_log_probs(
                    model, build_accelerator(), *padded(padding), Layout(padding + 5 - width, width, 1)
                )
                torch.testing.assert_close(log_p, expected[:, -width:], atol=1e-5, rtol=0)


def test_only_the_scored_tokens_reach_the_head(tokenizer, architecture):
    model = build_model(architecture, len(tokenizer)).eval().to(DEVICE)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    prepare_scoring(model)
    rows = []
    model.base_model.register_forward_hook(lambda module, args, output: rows.append(output.last_hidden_state.shape[1]))
    ids = torch.randint(3, len(tokenizer), (2, 9), device=DEVICE)
    mask = torch.ones_like(ids)
    log_p, entropy, *_ = token_log_probs(model, build_accelerator(), ids, mask, Layout(6, 3, 1))
    assert log_p.shape == entropy.shape == (2, 3)
    assert model(input_ids=ids, attention_mask=mask).logits.shape[1] == 9  # an ordinary pass is left alone
    assert rows == [4, 9]


def test_copies_run_their_own_weights(tokenizer, architecture):
    model = build_model(architecture, len(tokenizer)).eval().to(DEVICE)
    add_fused_lm_head(model)
    copied, trap = bridge.copy_unpatched(model), copy.deepcopy(model)
    ids = torch.tensor([[4, 5, 6]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        for other in (copied, trap):
            for p in other.parameters():
                p.zero_()
        assert copied(input_ids=ids).logits.abs().max() == 0
        assert torch.equal(trap(input_ids=ids).logits, expected)  # the trap: zeroed, and yet it answers
    assert bridge.copy_unpatched("path") == "path"


def test_sampling_from_restores_after_an_error():
    metrics = {"train": defaultdict(list, reward=[1.0])}
    model = SimpleNamespace(training=True)
    config = SimpleNamespace(temperature=1.0)
    trainer = SimpleNamespace(
        model=model, model_wrapped="policy", _metrics=metrics, use_vllm=False, generation_config=config
    )
    with bridge.sampling_from(trainer, None, "proposal", 4):
        assert trainer.model_wrapped == "policy" and config.temperature == 1.0
    with pytest.raises(RuntimeError), bridge.sampling_from(trainer, "engine", "proposal", 4, Sampler(1.7)):
        assert trainer.model_wrapped == "engine" and config.temperature == 1.7
        trainer._metrics["train"]["reward"].append(-5.0)
        trainer._metrics["train"]["num_tokens"] = [7]
        raise RuntimeError
    assert trainer.model_wrapped == "policy" and config.temperature == 1.0
    assert dict(trainer._metrics["train"]) == {"reward": [1.0], "num_tokens": [7], "proposal/reward": [-5.0]}


def test_withheld_from_uploads(monkeypatch):
    uploads = []

    class Api:
        def upload_folder(self, **kwargs):
            uploads.append(kwargs)

        def whoami(self):
            return "me"

    monkeypatch.setattr(transformers.trainer, "hf_api", Api)
    with bridge.withheld_from_uploads(["proposal/*"]):
        api = transformers.trainer.hf_api()
        api.upload_folder(folder_path="x", ignore_patterns=["_*"])
        api.upload_folder(folder_path="x", ignore_patterns="_*")
        api.upload_folder(folder_path="x")
        assert api.whoami() == "me"
    assert [upload["ignore_patterns"] for upload in uploads] == [["_*", "proposal/*"]] * 2 + [["proposal/*"]]
    assert transformers.trainer.hf_api is Api
    kept = filter_repo_objects(["config.json", "proposal/a/b.json"], ignore_patterns=["proposal/*"])
    assert list(kept) == ["config.json"]


@pytest.mark.parametrize("temperature, biased", [(1.0, False), (1.7, False), (1.0, True), (1.7, True)])
def test_scores_by_another_sampler(tokenizer, architecture, temperature, biased):
    model = build_model(architecture, len(tokenizer)).eval().to(DEVICE)
    if biased and not takes_bias(model):
        pytest.skip("the head has a bias of its own")
    bias = torch.linspace(-2, 3, model.config.get_text_config().vocab_size, device=DEVICE) if biased else None
    add_fused_lm_head(model)
    prepare_scoring(model)
    ids = torch.randint(3, len(tokenizer), (2, 5), device=DEVICE)
    input_ids = torch.cat([ids.new_zeros(2, 3), ids, ids.new_zeros(2, 1)], dim=1)
    mask = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 0], device=DEVICE).expand(2, -1)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1] / temperature + (bias if biased else 0)
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)[:, -3:]
    expected = torch.cat([expected, expected.new_zeros(2, 1)], dim=1)
    inputs, sampler = (model, build_accelerator(), input_ids, mask, Layout(5, 4, 1)), Sampler(temperature, bias)
    one_pass = token_log_probs(*inputs, sampler=sampler)
    for found in (one_pass.by_sampler, sampler_log_probs(*inputs, sampler)):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert not found.requires_grad
    assert one_pass.log_p.requires_grad and token_log_probs(*inputs).by_sampler is None


# What makes a CPU fast: weights cast once a draw, and a fused head in tiles


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
