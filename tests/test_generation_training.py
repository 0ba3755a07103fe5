"""Training whose samples an engine draws, against training without one: the same draws, the same weights."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer, rloo_trainer

from trl_repulse import ReinforceTrainer, RePULSeGRPOTrainer, RePULSePPOTrainer, RePULSeTrainer
from trl_repulse.generation import _engine

from .vllm_double import LLM, build_engine


class DrawingLLM(LLM):
    """Draws as transformers does: the same tokens from the same weights and the same state of torch's generator."""

    def generate(self, prompts, sampling_params, use_tqdm, lora_request=None):
        assert self.awake and not self.stale_prefixes
        rows = [prompt["prompt_token_ids"] for prompt in prompts]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        size = {"max_new_tokens": sampling_params.max_tokens, "do_sample": True, "top_k": 0}
        size["temperature"] = getattr(sampling_params, "temperature", 1.0)
        drawn = self.model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **size)
        log_p = torch.stack(drawn.logits, 1).log_softmax(-1)
        outputs = []
        for row, tokens, values in zip(rows, drawn.sequences[:, width:].tolist(), log_p, strict=True):
            tokens = tokens[: tokens.index(1) + 1] if 1 in tokens else tokens
            said = [
                {t: SimpleNamespace(rank=1, logprob=value[t].item())} for t, value in zip(tokens, values, strict=False)
            ]
            outputs.append(
                SimpleNamespace(prompt_token_ids=row, outputs=[SimpleNamespace(token_ids=tokens, logprobs=said)])
            )
        return outputs


HOT = {"use_policy_as_proposal": True, "proposal_temperature": 2.0, "bad_reward_threshold": -1.0}
UNCORRECTED = {"vllm_importance_sampling_correction": False}  # TRL's correction rounds


@pytest.mark.trainer
@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize(
    ("trainer_cls", "method"),
    [
        *[(RePULSeTrainer, {}), (RePULSeTrainer, HOT), (ReinforceTrainer, {})],
        *[(RePULSePPOTrainer, UNCORRECTED), (RePULSePPOTrainer, HOT | UNCORRECTED), (RePULSeGRPOTrainer, UNCORRECTED)],
    ],
)
def test_with_the_same_draws_an_engine_changes_nothing(make, monkeypatch, tmp_path, trainer_cls, method, forgets):
    """Bit for bit: what training with an engine does otherwise than without is to draw other random numbers."""

    class Start(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            torch.manual_seed(7)

    def build(model, accelerator, *args, max_completion_length, **options):
        loaded = AutoModelForCausalLM.from_pretrained(
            model.name_or_path
        )  # TRL ties a copy's forward pass to the original
        engine = build_engine(loaded, monkeypatch, max_completion_length=max_completion_length)
        engine.model, engine.accelerator, engine.temperature = model, accelerator, 1.0
        engine.llm.__class__ = DrawingLLM
        return engine

    monkeypatch.setattr(vllm_generation, "LLM", None, raising=False)
    for module in (rloo_trainer, grpo_trainer):
        monkeypatch.setattr(module, "VLLMGeneration", build)
    monkeypatch.setattr(_engine, "check_vllm", lambda: None)
    if forgets:
        monkeypatch.setattr(_engine, "push_weights", lambda *args, **options: None)
    settings = {
        "model": "llama",
        "max_steps": 6,
        "max_completion_length": 4,
        "extra": {"callbacks": [Start()]},
    } | method
    plain = make(trainer_cls, output_dir=str(tmp_path / "plain"), **settings)
    plain.train()
    served = make(trainer_cls, output_dir=str(tmp_path / "served"), use_vllm=True, **settings)
    served.train()
    models = [(plain.model, served.model)]
    if trainer_cls is not ReinforceTrainer and plain.proposal is not None:
        models.append((plain.proposal.module, served.proposal.module))
    for ours, theirs in models:
        same = [torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)]
        assert not any(same) if forgets else all(same)
    if not forgets:
        logs = [[log["reward"] for log in trainer.state.log_history if "reward" in log] for trainer in (plain, served)]
        assert logs[0] == logs[1] and len(set(logs[0])) > 1
