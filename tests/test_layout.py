"""Completions that share a row with their prompt are scored, and trained on, as in rows of their own."""

import copy
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig
from transformers import GPT2Config, GPTNeoConfig, GPTNeoForCausalLM, HfArgumentParser, set_seed
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from benchmarks.architectures import build
from trl_repulse import (
    PPOTrainer,
    ReinforceTrainer,
    RePULSeConfig,
    RePULSeGRPOTrainer,
    RePULSePPOTrainer,
    RePULSeTrainer,
)
from trl_repulse.generation._prefill import prompts_read_once
from trl_repulse.models._layout import Layout, longest_row
from trl_repulse.trainers import _set_up
from trl_repulse.trainers import _trl_bridge as bridge
from trl_repulse.trainers._scoring import prepare_scoring, token_log_probs

from .conftest import DEVICE, USE_CPU, build_accelerator, build_tokenizer
from .distributed_support import with_fp16_on_cpu


VOCABULARY = 40
L, T, UNITS, N = 14, 6, 2, 4  # longer than the windows of the small models, which are 8 tokens


def batch():
    """Prompts with padding before one, completions that end early, are empty, or are not."""
    torch.manual_seed(0)
    prompts, completions = torch.randint(3, VOCABULARY, (UNITS, L)), torch.randint(3, VOCABULARY, (UNITS, N, T))
    prompt_mask, mask = torch.ones_like(prompts), torch.ones_like(completions)
    prompt_mask[0, :5] = 0
    mask[0, 1, 3:] = mask[1, 2, 1:] = mask[1, 3] = 0
    return tuple(x.to(DEVICE) for x in (prompts, prompt_mask, completions, mask))


def scores(model, count, gradient=True, temperature=None):
    """Log-probabilities (UNITS, N, T) with `count` completions in a row."""
    prompts, prompt_mask, completions, mask = batch()
    layout = Layout(L, T, count)
    rows = layout.rows(prompts, completions), layout.rows(prompt_mask, mask)
    with torch.set_grad_enabled(gradient):
        if temperature is not None:
            found = token_log_probs(model, build_accelerator(), *rows, layout, temperature=temperature).tempered
            return found.view(UNITS, N, T)
        return token_log_probs(model, build_accelerator(), *rows, layout).log_p.view(UNITS, N, T)


def scored(name, reverse=False):
    model = build(name, VOCABULARY, reverse=reverse).train().to(DEVICE)
    bridge.disable_dropout(model)
    bridge.add_fused_lm_head(model)
    prepare_scoring(model)
    return model


@torch.no_grad()
def alone(model, temperature=1.0):
    """The same, of each completion with its prompt by itself, without padding."""
    prompts, prompt_mask, completions, mask = batch()
    found = torch.zeros(UNITS, N, T, device=DEVICE)
    for unit in range(UNITS):
        for place in range(N):
            length = int(mask[unit, place].sum())
            prompt, completion = prompts[unit][prompt_mask[unit] == 1], completions[unit, place, :length]
            logits = model(input_ids=torch.cat([prompt, completion])[None], use_cache=False).logits[0]
            log_p = (logits[len(prompt) - 1 : len(prompt) + length - 1] / temperature).log_softmax(dim=-1)
            found[unit, place, :length] = log_p.gather(1, completion[:, None])[:, 0]
    return found


def gradients(model, count):
    model.zero_grad()
    torch.manual_seed(1)
    (scores(model, count) * torch.randn(UNITS, N, T).to(DEVICE)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# Learned, rotary and no positions; windows in all layers, in some, before and after the others; caps on scores and logits;
# several queries to a key; tied and untied heads; experts; norms of queries and keys; attention without a registry
ARCHITECTURES = [
    *("gpt2", "opt", "gptj", "codegen", "gpt_neox", "falcon", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"),
    *("gemma3_text", "phi", "cohere", "cohere2", "olmo2", "stablelm", "starcoder2", "mixtral", "qwen3_moe", "smollm3"),
]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_and_gradients_are_those_of_separate_rows(name, implementation):
    model = scored(name)
    if implementation == "eager":
        model.set_attn_implementation("eager")
    elif model.config._attn_implementation != "sdpa":
        pytest.skip("has no other implementation")
    expected, hot, each = alone(model), alone(model, 1.7), gradients(model, 1)
    close = {"atol": 1e-5 if USE_CPU else 2e-5, "rtol": 0}
    for count in (1, 2, 4):
        torch.testing.assert_close(scores(model, count, False), expected, **close)
        torch.testing.assert_close(scores(model, count, True, 1.7), hot, **close)
        if count == 1:
            continue
        found = gradients(model, count)
        assert found.keys() == each.keys()
        largest = max(gradient.abs().max() for gradient in each.values())
        for key, gradient in each.items():
            torch.testing.assert_close(found[key], gradient, atol=2e-5 * largest.item(), rtol=0)


def test_windows_come_before_and_after_the_other_layers():
    for reverse in (False, True):
        model = scored("gemma2", reverse)
        torch.testing.assert_close(scores(model, 4, False), alone(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("what", "query", "key"),
    [
        ("another completion", L + T, L + T - 1),
        ("a later token", L + 2, L + 3),
        ("padding of the prompt", L, 0),
        ("padding of a completion", L + 2 * T - 1, L + 2 * T - 1 - 1),
    ],
)
def test_one_wrong_entry_of_a_mask_shows(monkeypatch, what, query, key):
    spread = Layout._spread

    def wrong(self, mask, attention_mask):
        found = spread(self, mask, attention_mask)
        assert not found[0, 0, query, key]
        found[0, 0, query, key] = True
        return found

    model = scored("llama")
    expected = scores(model, 4, False)
    monkeypatch.setattr(Layout, "_spread", wrong)
    different = (scores(model, 4, False) - expected).abs() > 1e-5
    assert different.any() == ("padding of a completion" != what)  # whose own predictions count for nothing


def test_masks_by_hand():
    layout = Layout(2, 2, 2)
    attention_mask = torch.tensor([[0, 1, 1, 1, 1, 0]])  # the second completion has one token
    config = build("llama", VOCABULARY).config
    expected = torch.tensor(
        [
            [0, 0, 0, 0, 0, 0],
            [0, 1, 0, 0, 0, 0],
            [0, 1, 1, 0, 0, 0],
            [0, 1, 1, 1, 0, 0],
            [0, 1, 0, 0, 1, 0],
            [0, 1, 0, 0, 1, 0],
        ]
    ).bool()
    assert torch.equal(layout.masks(config, torch.float32, attention_mask)[0, 0], expected)
    assert layout.positions(attention_mask).tolist() == [[0, 0, 1, 2, 1, 1]]
    states = torch.arange(6.0).view(1, 6, 1)
    assert layout.predicting(states).squeeze(-1).tolist() == [[1, 2, 3], [1, 4, 5]]
    rows = layout.rows(torch.tensor([[7, 8]]), torch.tensor([[[1, 2], [3, 4], [5, 6], [9, 9]]]))
    assert rows.tolist() == [[7, 8, 1, 2, 3, 4], [7, 8, 5, 6, 9, 9]]


@pytest.mark.parametrize(
    ("prompt", "width", "completions", "hidden_size", "count"),
    [
        (
            128,
            20,
            10,
            64,
            10,
        ),  # measured: forward and backward take 0.26 of the time of separate rows, 5 in a row 0.38
        (512, 20, 20, 256, 20),  # 0.10
        (16, 100, 10, 64, 1),  # 3.3 with all in a row
        (16, 100, 10, 576, 1),  # 0.94 with 2 in a row, 1.14 with all: not worth it
        (32, 20, 7, 256, 7),
        (128, 20, 1, 64, 1),
    ],
)
def test_as_many_share_a_row_as_makes_it_cheapest(prompt, width, completions, hidden_size, count):
    assert Layout.cheapest(prompt, width, completions, hidden_size).count == count


def test_routers_count_a_prompt_once():
    """The balancing loss is over the tokens that are read, of which a prompt in separate rows has several copies."""
    prompts, prompt_mask, completions, mask = batch()
    model = scored("mixtral")

    def aux_loss(count):
        layout = Layout(L, T, count)
        rows = layout.rows(prompts, completions), layout.rows(prompt_mask, mask)
        return token_log_probs(model, build_accelerator(), *rows, layout, compute_aux_loss=True).aux_loss.item()

    def by_hand(copies):
        """Over the routers' logits of all completions' tokens, and of the prompts' as often as they are read."""
        layout = Layout(L, T, 1)
        ids, real = layout.rows(prompts, completions), layout.rows(prompt_mask, mask)
        with torch.no_grad():
            logits = model.model(
                input_ids=ids, attention_mask=real, position_ids=layout.positions(real), output_router_logits=True
            ).router_logits
        counted = real.bool().view(UNITS, N, L + T).clone()
        counted[:, copies:, :L] = False
        chosen = tuple(layer.view(UNITS, N, L + T, -1)[counted] for layer in logits)
        return load_balancing_loss_func(chosen, model.num_experts, model.num_experts_per_tok).item()

    assert aux_loss(4) == pytest.approx(by_hand(1), rel=1e-5) != pytest.approx(by_hand(4), rel=1e-4)
    assert aux_loss(1) == pytest.approx(by_hand(4), rel=1e-5)


UNEVEN = Dataset.from_dict({"prompt": ["the", "the cat", "the cat sat the dog", "a dog ate the fish the cat"]})
MODES = {
    "plain": {},
    "reference": {"beta": 0.1},
    "more proposals": {"num_proposal_generations": 8},
    "reused": {"num_iterations": 2, "max_steps": 4, "epsilon": 0.2},
    "in two micro-batches": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
    "cut apart": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
    "checkpointing": {"gradient_checkpointing": True},
    "dpg": {"proposal_loss": "dpg"},
    "sixo": {"proposal_loss": "sixo"},
    "vargrad": {"proposal_loss": "vargrad"},
    "after": {"proposal_update_order": "after"},
    "hot": {
        "proposal": "hot_policy",
        "proposal_temperature": 1.7,
        "bad_reward_threshold": 0.0,
        "potential": "indicator",
    },
    "own": {"proposal": "policy"},
    "adapters": {"beta": 0.1, "peft_config": LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear")},
    "eager": {"model_init_kwargs": {"attn_implementation": "eager"}},
}


def assert_the_same(together, apart):
    """Parameters of all models, and metrics."""
    assert together._guard.share_prompts and not apart._guard.share_prompts
    models = [
        [t.model, *(x.module for x in (getattr(t, "proposal", None), getattr(t, "value", None)) if x is not None)]
        for t in (together, apart)
    ]
    for one, other in zip(*models, strict=True):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-5)
    timings = ("time", "runtime", "per_second", "flos")
    for one, other in zip(together.state.log_history, apart.state.log_history, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            if one[key] is not None and not any(word in key for word in timings):
                assert one[key] == pytest.approx(other[key], rel=1e-3, abs=2e-5), key


def train(make, model, share, **kwargs):
    kwargs = copy.deepcopy(kwargs)  # PEFT writes into its configurations
    extra = {name: kwargs.pop(name) for name in ("peft_config", "processing_class") if name in kwargs}
    settings = {"max_completion_length": 4, "max_steps": 3, "optim": "sgd", "learning_rate": 0.3} | kwargs
    trainer = make(model=model, dataset=UNEVEN, extra=extra, share_prompts=share, **settings)
    trainer.train()
    return trainer


@pytest.mark.thorough
@pytest.mark.trainer
@pytest.mark.parametrize("mode", MODES)
def test_training_is_the_same(make, architecture, mode):
    """Both models' parameters and all metrics."""
    together, apart = (train(make, architecture, share, **MODES[mode]) for share in (True, False))
    assert_the_same(together, apart)


@pytest.mark.thorough
@pytest.mark.trainer
@pytest.mark.parametrize("trainer_cls", [RePULSePPOTrainer, RePULSeGRPOTrainer])
@pytest.mark.parametrize("mode", ["hot", "reference"])
def test_on_ppo_and_grpo_too(make, architecture, trainer_cls, mode):
    settings = MODES[mode] | {"trainer_cls": trainer_cls, "beta": 0.1, "steps_per_generation": 1}
    assert_the_same(*(train(make, architecture, share, **settings) for share in (True, False)))


@pytest.mark.trainer
def test_a_head_that_is_padded(make, tokenizer):
    """More tokens in the model than in the tokenizer."""
    runs = []
    for share in (True, False):
        model = build("llama", len(tokenizer) + 7)
        runs.append(train(make, model, share, processing_class=tokenizer))
    assert_the_same(*runs)


@pytest.mark.thorough
@pytest.mark.trainer
@pytest.mark.parametrize("proposal", ["learned", "hot_policy"])
def test_compiled_models_share_rows(make, request, proposal):
    """Policy and reference, which TRL compiles before we see it, agree; and end as models that are not compiled."""
    request.addfinalizer(torch.compiler.reset)
    compile = {"torch_compile": True, "torch_compile_backend": "eager"} | ({} if USE_CPU else {"tf32": False})
    settings = {"proposal": proposal, "bad_reward_threshold": -1.0, "beta": 0.1, "max_steps": 2}
    settings |= {"target_dist_beta": None} if proposal == "hot_policy" else {}
    compiled, plain = (train(make, "llama", share, **settings, **how) for share, how in ((True, compile), (False, {})))
    assert compiled._guard.share_prompts and compiled._guard.repeat_cache
    assert compiled.state.log_history[0]["kl"] == pytest.approx(0, abs=1e-5)
    for p, q in zip(compiled.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.trainer
def test_compiled_value_models_share_rows(make, request):
    request.addfinalizer(torch.compiler.reset)
    compile = {"torch_compile": True, "torch_compile_backend": "eager"} | ({} if USE_CPU else {"tf32": False})
    settings = {"trainer_cls": PPOTrainer, "beta": 0.1, "max_steps": 2}
    compiled, plain = (train(make, "llama", share, **settings, **how) for share, how in ((True, compile), (False, {})))
    for one, other in ((compiled.model, plain.model), (compiled.value.module, plain.value.module)):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-5)


@pytest.mark.trainer
def test_reinforce_too(make, architecture):
    runs = [train(make, architecture, share, trainer_cls=ReinforceTrainer, beta=0.1) for share in (True, False)]
    assert_the_same(*runs)


@pytest.mark.thorough
@pytest.mark.trainer
@pytest.mark.parametrize("kwargs", [{}, {"beta": 0.1, "num_iterations": 2}, {"per_device_train_batch_size": 4}])
def test_ppo_too(make, architecture, kwargs):
    """TRL shuffles its completions: those of a prompt share rows where a micro-batch has them all."""
    runs, rows = [], []
    for share in (True, False):
        settings = {"max_completion_length": 4, "max_steps": 2, "optim": "sgd", "learning_rate": 0.3} | kwargs
        trainer = make(
            PPOTrainer, architecture, dataset=UNEVEN, share_prompts=share, steps_per_generation=1, **settings
        )
        seen = []
        trainer.value.module.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        trainer.train()
        runs.append(trainer)
        rows.append(set(seen))
    assert [4 * count for count in rows[0]] == list(rows[1])
    assert_the_same(*runs)


@pytest.mark.trainer
def test_draws_are_the_same(make, architecture):
    """To the token, of the policy and of the proposal: a prompt's cache, repeated, and prompts read with each completion."""
    drawn = {}
    for share in (True, False):
        trainer = make(
            model=architecture,
            dataset=UNEVEN,
            share_prompts=share,
            max_completion_length=6,
            num_generations=50,
            per_device_train_batch_size=200,
        )
        assert trainer._guard.repeat_cache is share
        lengths = []
        hook = trainer.model.register_forward_pre_hook(
            lambda module, args, kwargs, seen=lengths: seen.append(kwargs["input_ids"].shape), with_kwargs=True
        )
        trainer.model.train()
        torch.manual_seed(0)
        batch = trainer._generate_and_score_completions([row for row in UNEVEN for _ in range(50)])
        hook.remove()
        assert ((4, 6) in lengths) is share and ((200, 7) in lengths) is not share
        drawn[share] = [batch["completion_ids"], batch["proposal_completion_ids"]]
    assert all(torch.equal(one, other) for one, other in zip(drawn[True], drawn[False], strict=True))
    assert len(drawn[True][0].flatten(0, 1).unique(dim=0)) > 100


@pytest.mark.trainer
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(make, precision, monkeypatch):
    """Under autocast to half precision both differ from float32 alike."""
    monkeypatch.setattr(Accelerator, "__init__", with_fp16_on_cpu)
    settings = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_completion_length": 4}
    runs = {}
    for share, half in ((True, True), (False, True), (False, False)):
        trainer = make(model="llama", dataset=UNEVEN, share_prompts=share, **settings, **{precision: half})
        torch.manual_seed(0)
        prompts = torch.tensor([[0, 0, 3, 4], [3, 4, 5, 6]])
        sample = {
            "prompt_ids": prompts,
            "prompt_mask": (prompts != 0).long(),
            "completion_ids": torch.randint(3, 19, (2, 4, 4)),
            "completion_mask": torch.ones(2, 4, 4, dtype=torch.long),
        }
        sample = {name: x.to(trainer.accelerator.device) for name, x in sample.items()}
        runs[share, half] = trainer._score(trainer.model, sample, gradient=False).log_p[0]
    exact = runs[False, False]
    errors = [(runs[share, True] - exact).abs().mean().item() for share in (True, False)]
    assert 0 < errors[0] < 2 * errors[1] and (runs[True, True] - exact).abs().max() < 0.2


@pytest.mark.thorough
@pytest.mark.trainer
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bloom", "takes no positions"),
        ("mamba", "takes no positions"),
        ("falcon_h1", "not read as each would be"),
        ("moshi", "not read as each would be"),
    ],
)
def test_models_that_cannot(make, name, why, monkeypatch):
    tokenizer = build_tokenizer()
    tokenizer.bos_token = "<unk>"
    model = build(name, len(tokenizer))

    def trainer(share):
        return make(RePULSeTrainer, model=model, extra={"processing_class": tokenizer}, share_prompts=share)

    said = []
    monkeypatch.setattr(_set_up.logger, "warning_once", said.append)
    assert not trainer("auto")._guard.share_prompts
    said = [text for text in said if "cannot read a prompt once" in text]
    for role, text in zip(("policy", "proposal"), said, strict=True):
        assert f"the {role}, " in text and why in text
    with pytest.raises(ValueError, match=f"cannot read a prompt once.*{why}.*`share_prompts=False`"):
        trainer(True)
    trainer(False).train()


def test_windows_inside_layers_limit_rows():
    """GPT-Neo's local layers go by places in a row, and their window is longer than the texts of the check."""
    config = GPTNeoConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["local", "global"], 1]],
        window_size=40,
        max_position_embeddings=64,
        initializer_range=0.3,
        intermediate_size=32,
    )
    set_seed(0)
    model = GPTNeoForCausalLM(config).train().to(DEVICE)
    bridge.disable_dropout(model)
    bridge.add_fused_lm_head(model)
    prepare_scoring(model)
    longest = longest_row(config)
    assert longest == 40 and longest_row(GPT2Config(n_positions=32)) == 32
    layout = Layout.cheapest(L, T, 4, 16, longest)
    assert layout.count == 4 and Layout.cheapest(L, T, 5, 16, longest).count == 1
    torch.testing.assert_close(scores(model, 4, False), alone(model), atol=1e-5, rtol=0)
    # One completion more is beyond the window: the limit is needed
    wide = Layout(L, T, 5)
    prompts, prompt_mask, completions, mask = batch()
    completions = torch.cat([completions, completions[:, :1]], dim=1)
    mask = torch.cat([mask, mask[:, :1]], dim=1)
    rows = wide.rows(prompts, completions), wide.rows(prompt_mask, mask)
    with torch.no_grad():
        found = token_log_probs(model, build_accelerator(), *rows, wide).log_p.view(UNITS, 5, T)
    assert (found[:, 4] - alone(model)[:, 0]).abs().max() > 1e-2


def test_attention_that_takes_no_masks_is_refused_whatever_the_batch():
    model = build("llama", VOCABULARY)
    model.config._attn_implementation = "flash_attention_2"  # which takes no mask at all where nothing is padded
    with pytest.raises(ValueError, match="'flash_attention_2' takes no masks of pairs"):
        Layout(2, 2, 2).masks(model.config, torch.float32, torch.ones(1, 6, dtype=torch.long))


def test_beams_are_read_with_their_prompts(make):
    settings = {"generation_kwargs": {"num_beams": 2}, "max_steps": 1}
    trainer = make(ReinforceTrainer, **settings)
    assert trainer._guard.share_prompts and not trainer._guard.repeat_cache
    trainer.train()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_noise_does_not_hide_what_a_model_reads(make, dropout, tokenizer):
    """With dropout on, two passes in training mode differ by more than a wrong mask makes."""
    model = build("gpt_neo", len(tokenizer))  # with a window inside its layers, shorter than the texts of the check
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    extra = {"processing_class": tokenizer}
    trainer = make(ReinforceTrainer, model=model, extra=extra, disable_dropout=dropout == 0.0)
    assert not trainer._guard.share_prompts


@pytest.mark.parametrize(("share", "most"), [(False, 4), (True, 32)])
def test_passes_without_gradient_are_chunked(make, share, most):
    """In rows of a micro-batch, or in whole units where these share prompts: here one of 4 policy samples and 28 hot ones."""
    hot = MODES["hot"] | {"per_device_train_batch_size": 4, "num_proposal_generations": 28, "max_steps": 1}
    trainer = make(model="llama", dataset=UNEVEN, share_prompts=share, max_completion_length=4, **hot)
    sizes = []
    trainer.model.register_forward_hook(
        lambda module, args, output: sizes.append(len(output.log_probs)) if "log_probs" in output else None
    )
    trainer._guard = replace(trainer._guard, repeat_cache=False)
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": "the cat"}] * 4)
    sizes.clear()
    sets = ("completion", "proposal_completion")
    bad = {name: torch.ones(1, size, dtype=torch.bool) for name, size in zip(sets, (4, 28), strict=True)}
    trainer._score(trainer.model, batch, sets, gradient=False, tempered=(1.6, bad))
    assert max(sizes) == most and sum(sizes) == 32


def test_generate_is_put_back(architecture):
    model = scored("llama")
    with prompts_read_once(model), prompts_read_once(model):
        pass
    assert "generate" not in vars(model)
    model.generate = own = lambda *args, **kwargs: None
    with prompts_read_once(model):
        assert model.generate is not own
    assert model.generate is own


@pytest.mark.parametrize(("flag", "value"), [("true", True), ("False", False), ("auto", "auto")])
def test_flags(flag, value, tmp_path):
    parser = HfArgumentParser(RePULSeConfig)
    argv = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false", "--share_prompts", flag]
    argv += ["--bad_reward_threshold", "-1"]
    assert parser.parse_args_into_dataclasses(argv)[0].share_prompts is value or value == "auto"


@pytest.mark.parametrize("value", ["yes", None, 2, 0, 1])
def test_other_values_are_refused(value, tmp_path):
    from trl_repulse import PPOConfig, ReinforceConfig

    for config in (ReinforceConfig, RePULSeConfig, PPOConfig):
        with pytest.raises(ValueError, match="`share_prompts=.*` is not one of"):
            config(output_dir=str(tmp_path), use_cpu=True, bf16=False, share_prompts=value)
