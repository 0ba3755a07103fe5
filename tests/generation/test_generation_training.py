"""Training whose samples an engine draws, against training without one: the same draws, the same weights."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from trl_repulse import ReinforceTrainer, RePULSeGRPOTrainer, RePULSePPOTrainer, RePULSeTrainer
from trl_repulse.engine.units import Drawing
from trl_repulse.generation import _engine
from trl_repulse.trainers import _grpo_loss as _rows

from ..vllm_double import LLM, build_engine


TOGETHER = Drawing.together


def apart(self, *args):
    """In place of `Drawing.together`: without an engine, extra samples are drawn in a call of their own."""
    return TOGETHER(self, *args) if self._trainer.use_vllm else contextlib.nullcontext()


class DrawingLLM(LLM):
    """Draws as transformers does: the same tokens from the same weights and the same state of torch's generator."""

    def draw(self, prompts, sampling_params, lora_request):
        rows = [prompt["prompt_token_ids"] for prompt in prompts]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.model.device)
        size = {"max_new_tokens": sampling_params.max_tokens, "do_sample": True, "top_k": 0}
        size["temperature"] = getattr(sampling_params, "temperature", 1.0)
        drawn = self.model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **size)
        log_p = torch.stack(drawn.logits, 1).log_softmax(-1)
        outputs = []
        for row, tokens, values in zip(rows, drawn.sequences[:, width:].tolist(), log_p, strict=True):
            tokens = tokens[: tokens.index(1) + 1] if 1 in tokens else tokens
            pairs = zip(tokens, values, strict=False)
            said = [{t: SimpleNamespace(rank=1, logprob=value[t].item())} for t, value in pairs]
            completion = SimpleNamespace(token_ids=tokens, logprobs=said)
            outputs.append(SimpleNamespace(prompt_token_ids=row, outputs=[completion]))
        return outputs


def serve_by(llm_class, monkeypatch, lora=False):
    """Trainers with `use_vllm=True` get TRL's engine around a double."""

    def build(model, accelerator, *args, max_completion_length, **options):
        # From the file, since TRL ties a copy's forward pass to the original
        loaded = AutoModelForCausalLM.from_pretrained(model.name_or_path).to(accelerator.device)
        engine = build_engine(loaded, monkeypatch, lora, max_completion_length=max_completion_length)
        engine.model, engine.accelerator, engine.temperature = model, accelerator, 1.0
        engine.llm.__class__ = llm_class
        return engine

    monkeypatch.setattr(vllm_generation, "LLM", None, raising=False)
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", build)
    monkeypatch.setattr(_engine, "check_vllm", lambda: None)


pytestmark = pytest.mark.usefixtures("lora_requests")
HOT = {"proposal": "hot_policy", "proposal_temperature": 2.0, "bad_reward_threshold": -1.0}
SERVED = {"model": "llama", "use_vllm": True, "max_completion_length": 3, "max_steps": 1}
UNCORRECTED = {"vllm_importance_sampling_correction": False}  # TRL's correction rounds


@pytest.mark.thorough
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

    serve_by(DrawingLLM, monkeypatch)
    # Without an engine, both sets in one call: other numbers
    monkeypatch.setattr(Drawing, "together", apart)
    if forgets:
        monkeypatch.setattr(_engine, "push_weights", lambda *args, **options: None)
    settings = {"model": "llama", "max_steps": 6, "max_completion_length": 4, "extra": {"callbacks": [Start()]}}
    settings |= method
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
    drawn_at_once = "proposal_temperature" in method or trainer_cls is ReinforceTrainer
    assert len(served.vllm_generation.llm.llm.calls) == (1 if drawn_at_once else 2) * 6
    if not forgets:
        logs = [[log["reward"] for log in trainer.state.log_history if "reward" in log] for trainer in (plain, served)]
        assert logs[0] == logs[1] and len(set(logs[0])) > 1


@pytest.mark.thorough
@pytest.mark.trainer
@pytest.mark.parametrize("proposals", [None, 2])
def test_adapters_are_drawn_from_in_one_call(make, monkeypatch, proposals):
    """The policy's and the proposal's, each pushed once an update."""
    serve_by(LLM, monkeypatch, lora=True)
    drawn, rooms, options = [], [], _engine.engine_options

    def counted(dtype, adapters=(), **rest):
        rooms.append(len(adapters))
        return options(dtype, adapters, **rest)

    monkeypatch.setattr(_engine, "engine_options", counted)

    class Watch(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            drawn.append({name: [list(ids) for ids in logs["completion"]] for name, logs in logs_of.items()})

    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
    settings = {"use_vllm": True, "max_steps": 3, "max_completion_length": 4, "num_proposal_generations": proposals}
    trainer = make(model="llama", extra={"peft_config": config, "callbacks": [Watch()]}, **settings)
    logs_of = {"policy": trainer._logs, "proposal": trainer._tables.extra}
    trainer.train()
    n, m = 4, proposals or 4
    assert trainer.vllm_generation.llm.llm.calls == [16 + 16 // n * m] * 3
    pushes = trainer.vllm_generation.pushes
    assert pushes == {"base": 1, "policy": 3, "proposal": 3}
    last = 16 // n * m  # the table holds more draws than one
    by_prompt = [(one["policy"][::n], one["proposal"][-last:][::m]) for one in drawn]  # the double is greedy
    assert all(len(own) == len(other) == 16 // n for own, other in by_prompt)
    assert any(own != other for own, other in by_prompt)
    assert rooms == [2]


class MistakenLLM(DrawingLLM):
    """Says that tokens are likelier than they are: by 0.1 nats those of odd numbers, of others as much as `shift` says."""

    shift = 0.0

    def draw(self, prompts, sampling_params, lora_request):
        temperature = getattr(sampling_params, "temperature", 1.0)
        outputs = super().draw(prompts, sampling_params, lora_request)
        for output in outputs:
            ids, tokens = output.prompt_token_ids, output.outputs[0].token_ids
            with torch.no_grad():
                logits = self.model(torch.tensor([ids + tokens], device=self.model.device)).logits
            log_p = (logits[0, len(ids) - 1 : -1] / temperature).log_softmax(-1)
            for token, said, values in zip(tokens, output.outputs[0].logprobs, log_p, strict=True):
                said[token].logprob = values[token].item() + (0.1 if token % 2 else self.shift)
        return outputs


@pytest.mark.trainer
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("method", [{}, HOT | {"bad_reward_threshold": 0.5}], ids=["learned", "hot"])
def test_corrections_of_the_engine(make, monkeypatch, mode, method):
    """What it drew otherwise than its model is weighed down, of both sets, as TRL weighs the policy's own."""
    serve_by(MistakenLLM, monkeypatch)
    monkeypatch.setattr(MistakenLLM, "shift", -1.0)
    settings = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 2.0}
    trainer = make(RePULSeGRPOTrainer, **SERVED, **settings, **method)
    trainer.model.train()
    trainer.proposal and trainer.proposal.module.train()
    with torch.random.fork_rng():
        batch = trainer._generate_and_score_completions([{"prompt": "the cat"}] * 16)
    kinds = set()
    own = batch["importance_sampling_ratio"].unsqueeze(1)
    for name, found in (("", own), ("proposal_", batch["proposal_engine_ratio"])):
        ids, mask = (batch[f"{name}completion_{part}"].view(*found.shape[:2], -1) for part in ("ids", "mask"))
        expected = torch.where(ids % 2 == 1, -0.1, 1.0) * mask
        if name and trainer.proposal is None:  # of the hot samples, only what is bad is scored
            bad = batch["proposal_rewards"] < trainer.bad_reward_threshold
            assert bad.any() and not bad.all()
            expected = expected * bad.unsqueeze(2)
        if mode.startswith("sequence"):
            expected = expected.sum(dim=-1, keepdim=True)
        expected = expected.exp()
        cut = expected.clamp(max=2.0) if mode.endswith("truncate") else expected.masked_fill(expected > 2.0, 0.0)
        torch.testing.assert_close(found, cut, atol=1e-4, rtol=0)
        kinds |= set((cut != expected).flatten().tolist())
    assert kinds == {True, False}


@pytest.mark.trainer
def test_corrections_multiply_gradients(make, monkeypatch):
    """A ratio of 2 for all of the proposal's samples is twice the alpha, and a proposal that learns twice as fast."""
    serve_by(MistakenLLM, monkeypatch)
    monkeypatch.setattr(MistakenLLM, "shift", 0.1)
    ends = {}
    for name, ratio, alpha, rate in (("ratio", 2.0, 0.3, 0.5), ("twice", 1.0, 0.6, 1.0), ("once", 1.0, 0.3, 0.5)):
        monkeypatch.setattr(_rows, "engine_ratios", lambda log_q, *args, ratio=ratio: torch.full_like(log_q, ratio))
        plain = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
        trainer = make(RePULSeGRPOTrainer, **SERVED, **plain, alpha=alpha, proposal_learning_rate=rate)
        trainer.train()
        assert trainer.state.log_history[0]["proposal/sampling/importance_sampling_ratio/mean"] == ratio
        ends[name] = [p.detach().clone() for m in (trainer.model, trainer.proposal.module) for p in m.parameters()]
    for one, other in zip(ends["ratio"], ends["twice"], strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    pairs = zip(ends["ratio"], ends["once"], strict=True)
    assert not all(torch.allclose(one, other, atol=1e-6) for one, other in pairs)
