"""Sampling and scoring that are the model's own, where padded or cached passes of an architecture are not."""

import copy
import time

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GPT2ForTokenClassification,
    MixtralConfig,
    ModernBertDecoderConfig,
    PersimmonConfig,
    Phi3Config,
    PhimoeConfig,
    set_seed,
)

from benchmarks.architectures import NAMES, TooLong, build, examine, limited, sweep
from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeTrainer
from trl_repulse.data._checks import check_prompt_lengths
from trl_repulse.engine.scoring import Layout, Wanted, token_log_probs
from trl_repulse.engine.units import EXTRA, OWN, Units
from trl_repulse.evaluation._generation import transformers_engine
from trl_repulse.evaluation.log_probs import completion_log_probs
from trl_repulse.generation import TransformersGenerator
from trl_repulse.generation._probe import Guard, Passes, holds, probe

from ..conftest import build_model, build_tokenizer


PROMPTS = ["the", "the cat", "the cat sat", "the dog ran ate fish"]
SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
SPECIAL = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
# What each architecture needs
GUARDS = {
    "minimax": Guard(sample_by_length=True),  # with its linear attention first
    "rwkv": Guard(score_by_length=True, sample_by_length=True, use_cache=False),
    "recurrent_gemma": Guard(score_by_length=True, sample_by_length=True),
    "mamba": Guard(),
    "bloom": Guard(),
}


def build_tiny(architecture, size):
    return build(architecture, size, reverse=architecture == "minimax").eval()


@pytest.fixture(params=["minimax", "rwkv", "recurrent_gemma"])
def faulty(request):
    return request.param


@torch.no_grad()
def alone(model, prompt, completion):
    """Log-probabilities (T, V) of each token to come, from one unpadded pass."""
    ids = torch.tensor([[*prompt, *completion]], device=model.device)
    return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(dim=-1).cpu()


@torch.no_grad()
def surprise(model, prompts, completions):
    """
    z of Σ −log p − entropy over draws, which is 0 in expectation if they follow the model.

    Draws of one prompt are scored in one pass: there is no padding before any.
    """
    rows, gaps = {}, []
    for prompt, completion in zip(prompts, completions, strict=True):
        rows.setdefault(tuple(prompt), []).append(completion)
    for prompt, drawn in rows.items():
        width = max(map(len, drawn))
        ids = torch.tensor([[*prompt, *row, *[0] * (width - len(row))] for row in drawn], device=model.device)
        log_p = model(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 : -1].float().log_softmax(dim=-1)
        chosen = log_p.gather(2, ids[:, len(prompt) :, None])[:, :, 0]
        counted = torch.arange(width) < torch.tensor([len(row) for row in drawn])[:, None]
        counted = counted.to(model.device)
        gaps.append(((-chosen + (log_p.exp() * log_p).sum(dim=-1)) * counted).sum(dim=1).double())
    gaps = torch.cat(gaps)
    return (gaps.mean() / (gaps.std() / len(gaps) ** 0.5)).item()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("architecture", GUARDS)
def test_what_is_found(tokenizer, architecture, training):
    assert probe(build_tiny(architecture, len(tokenizer)), training) == GUARDS[architecture]


def test_what_is_found_with_an_adapter(tokenizer):
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["key", "value"], init_lora_weights=False)
    assert probe(get_peft_model(build_tiny("rwkv", len(tokenizer)), config)) == GUARDS["rwkv"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ordinary_models_need_no_guard(tokenizer, architecture, dtype):
    assert probe(build_model(architecture, len(tokenizer)).to(dtype)) == Guard()
    assert probe(build_model(architecture, 50_000).to(dtype)) == Guard()


def test_nothing_is_disturbed(tokenizer):
    model = build_model("gpt2", len(tokenizer)).train()
    model.transformer.h[1].eval()
    modes, saved = [module.training for module in model.modules()], model.generation_config
    state = torch.get_rng_state()
    weights = {name: p.clone() for name, p in model.named_parameters()}
    probe(model)
    assert [module.training for module in model.modules()] == modes and model.generation_config is saved
    assert torch.equal(torch.get_rng_state(), state)
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[name]) and p.grad is None


# Draws


@pytest.mark.parametrize("by", ["generator", "engine"])
def test_draws_are_the_models_own(tokenizer, faulty, by):
    model = build_tiny(faulty, len(tokenizer))
    prompts = [ids for ids in tokenizer(PROMPTS)["input_ids"] for _ in range(500)]
    if by == "engine":
        drawn = transformers_engine(model, tokenizer, 4, 2000)(prompts, 0)
    else:
        torch.manual_seed(0)
        generator = TransformersGenerator({"policy": model}, tokenizer, max_completion_length=4, batch_size=2000)
        drawn = [row.token_ids for rows in generator.complete(PROMPTS, "policy", 500) for row in rows]
    assert abs(surprise(model, prompts, drawn)) < 4.5


def test_held_out_scores_are_the_models_own(tokenizer, faulty):
    model = build_tiny(faulty, len(tokenizer))
    prompts, completions = tokenizer(PROMPTS)["input_ids"], [[4, 12, 7], [5, 1], [16], [3, 9, 1]]
    scores, _ = completion_log_probs(model, prompts, completions)
    for value, prompt, completion in zip(scores, prompts, completions, strict=True):
        expected = alone(model, prompt, completion).gather(1, torch.tensor(completion)[:, None]).sum()
        assert value.item() == pytest.approx(expected.item(), abs=1e-4)


# Trainers


@pytest.fixture
def mixed():
    return Dataset.from_dict({"prompt": PROMPTS})


@pytest.fixture
def faulty_dir(tmp_path, tokenizer, faulty):
    build_tiny(faulty, len(tokenizer)).save_pretrained(tmp_path / faulty)
    tokenizer.save_pretrained(tmp_path / faulty)
    return str(tmp_path / faulty)


def check_scores(model, batch, name, scores):
    """Log-probabilities (U, n, T) of a batch against those of single unpadded rows."""
    for i, (prompt, mask) in enumerate(zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)):
        for j, completion in enumerate(batch[f"{name}_ids"][i]):
            length = int(batch[f"{name}_mask"][i, j].sum())
            row = completion[:length].tolist()
            expected = alone(model, prompt[mask == 1].tolist(), row).gather(1, torch.tensor(row)[:, None])[:, 0]
            assert scores[i, j, :length].tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def rows_of(batch, name):
    prompts = [p[m == 1].tolist() for p, m in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]
    ids, mask = batch[f"{name}_ids"], batch[f"{name}_mask"]
    drawn = [[row[m == 1].tolist() for row, m in zip(*unit, strict=True)] for unit in zip(ids, mask, strict=True)]
    pairs = [(prompt, row) for prompt, rows in zip(prompts, drawn, strict=True) for row in rows]
    return zip(*pairs, strict=True)


@pytest.mark.trainer
def test_trainers_draw_and_score_as_the_models_do(make, faulty_dir, mixed):
    """Policy and proposal, with prompts of several lengths in a batch."""
    settings = {"num_generations": 250, "per_device_train_batch_size": 1000, "max_completion_length": 4}
    trainer = make(model=faulty_dir, dataset=mixed, beta=0.1, **settings)
    trainer.model.train()
    torch.manual_seed(0)
    batch = trainer._generate_and_score_completions([row for row in mixed for _ in range(250)])
    models = {"completion": trainer.model, "proposal_completion": trainer.proposal.module}
    for name, model in models.items():
        assert abs(surprise(model, *rows_of(batch, name))) < 4.5
    few = {name: x[:, :3] if name.endswith(("completion_ids", "completion_mask")) else x for name, x in batch.items()}
    for scored in (*models.values(), trainer.ref_model):
        for gradient in (True, False):
            wanted = Wanted((OWN, EXTRA))
            scores = trainer._scoring.score(scored, Units.of(few), trainer.shape, wanted, gradient).log_p
            for name, found in zip(models, scores.values(), strict=True):
                check_scores(scored, few, name, found.detach())


@pytest.mark.thorough
@pytest.mark.trainer
def test_trainers_learn_with_prompts_of_several_lengths(make, faulty_dir, mixed):
    """One update makes the parameters those of a batch of two micro-batches, of two lengths each."""
    changed = []
    for size, accumulation in ((16, 1), (8, 2)):
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation, "max_steps": 1}
        trainer = make(model=faulty_dir, dataset=mixed, optim="sgd", seed=3, **settings)
        trainer.train()
        changed.append([p.detach().clone() for p in trainer.model.parameters()])
    for one, other in zip(*changed, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.trainer
def test_ppo_draws_and_scores_as_the_models_do(tmp_path, make, faulty_dir, mixed, tokenizer):
    value = build_model("gpt2", len(tokenizer))
    settings = {"num_generations": 250, "per_device_train_batch_size": 1000, "max_completion_length": 4}
    trainer = make(PPOTrainer, faulty_dir, dataset=mixed, beta=0.1, extra={"value_model": value}, **settings)
    trainer.model.train()
    torch.manual_seed(0)
    batch = trainer._generate_and_score_completions([row for row in mixed for _ in range(250)])
    units = {name: batch[name] for name in ("prompt_ids", "prompt_mask")}
    units |= {name: batch[name].unsqueeze(1) for name in ("completion_ids", "completion_mask")}
    assert abs(surprise(trainer.model, *rows_of(units, "completion"))) < 4.5
    few = {name: x[::50] for name, x in units.items()}
    ids, mask = (torch.cat([few[f"prompt_{x}"], few[f"completion_{x}"][:, 0]], dim=1) for x in ("ids", "mask"))
    scores = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, few["completion_ids"].size(2))[0]
    check_scores(trainer.model, few, "completion", scores.detach()[:, None])
    scores = batch["ref_per_token_logps"][::50]
    check_scores(trainer.ref_model, few, "completion", scores[:, None])


@pytest.mark.trainer
def test_values_are_the_models_own(make, tokenizer, mixed):
    """Of a causal value model whose state, a running sum, reads padding."""
    set_seed(0)
    config = build_model("gpt2", len(tokenizer)).config
    config.num_labels = 1
    value = GPT2ForTokenClassification(config)
    torch.nn.init.normal_(value.classifier.weight)

    def add_state(module, args, output):
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.cumsum(dim=1) / 4

    value.transformer.register_forward_hook(add_state)
    trainer = make(PPOTrainer, dataset=mixed, extra={"value_model": value})
    batch = trainer._generate_and_score_completions([row for row in mixed for _ in range(4)])
    rows = zip(
        *(batch[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")), strict=True
    )
    for (prompt, prompt_mask, completion, mask), found in zip(rows, batch["old_values"], strict=True):
        prompt, completion = prompt[prompt_mask == 1], completion[mask == 1]
        with torch.no_grad():
            expected = value(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1, 0]
        assert found[: len(completion)].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    trainer.train()


def reinforce(make, tokenizer, architecture, dataset, **settings):
    model = build_tiny(architecture, len(tokenizer))
    return make(ReinforceTrainer, model, dataset=dataset, extra={"processing_class": tokenizer}, **settings)


@pytest.mark.trainer
def test_several_processes_refuse_what_they_cannot_score(make, tokenizer, mixed, monkeypatch):
    trainer = reinforce(make, tokenizer, "rwkv", mixed)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    ids, mask = torch.tensor([[0, 3, 4], [5, 6, 7]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    with pytest.raises(ValueError, match="use prompts of one length, or one process"):
        trainer._scoring.by_length(lambda ids, mask: (ids,), ids, mask)
    padded = torch.tensor([[0, 3, 4], [0, 6, 7]]), torch.tensor([[0, 1, 1], [0, 1, 1]])
    assert trainer._scoring.by_length(lambda ids, mask: (ids,), *padded)[0].tolist() == [[3, 4], [6, 7]]
    trainer._guard = Guard()
    assert trainer._scoring.by_length(lambda ids, mask: (ids,), ids, mask)[0] is ids


@pytest.mark.trainer
def test_models_that_share_weights_refuse_what_they_cannot_sample(make, tokenizer, mixed, monkeypatch):
    trainer = reinforce(make, tokenizer, "minimax", mixed)
    monkeypatch.setattr(trainer._scoring, "passes_together", True)
    with pytest.raises(ValueError, match="use prompts of one length, or launch without ZeRO-3 and FSDP"):
        trainer._generate_single_turn([[3], [3, 12]], None, {}, 1)


@pytest.mark.trainer
def test_without_a_cache_nothing_is_grouped(make, tokenizer, mixed):
    trainer = reinforce(make, tokenizer, "minimax", mixed, generation_kwargs={"use_cache": False})
    assert not trainer._guard.sample_by_length and trainer.generation_config.use_cache is False


def test_what_disagrees_with_itself_is_refused(tokenizer):
    """Rows of a batch that see each other, and a model that generates otherwise than it scores."""
    model = build_model("llama", len(tokenizer))
    hook = model.lm_head.register_forward_hook(lambda module, args, output: output + output.mean(dim=0))
    with pytest.raises(ValueError, match="^LlamaForCausalLM predicts something else for a text in a batch"):
        probe(model)
    hook.remove()
    model.lm_head.register_forward_hook(lambda module, args, output: output * (1 + (output.size(1) == 1)))
    assert probe(model, samples=False) == Guard()
    with pytest.raises(ValueError, match="^LlamaForCausalLM generates from another distribution"):
        probe(model)


# Noise


def build_noisy(architecture, size, **noise):
    set_seed(0)
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    sizes = SHAPE | SPECIAL | {"vocab_size": size, "initializer_range": 0.4}
    configs = {"falcon": FalconConfig, "persimmon": PersimmonConfig, "mixtral": MixtralConfig, "phimoe": PhimoeConfig}
    config = configs[architecture](**sizes, **(experts if architecture in ("mixtral", "phimoe") else {}), **noise)
    return AutoModelForCausalLM.from_config(config)


def passes_agree(model):
    ids = torch.tensor([[3, 12, 4, 7]], device=model.device)
    return torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.trainer
@pytest.mark.parametrize(
    ("trainer_cls", "architecture", "field"),
    [
        (RePULSeTrainer, "falcon", "hidden_dropout"),
        (ReinforceTrainer, "persimmon", "attention_dropout"),
        (PPOTrainer, "falcon", "hidden_dropout"),
    ],
)
def test_noise_from_the_configuration_is_refused_by_name(make, tokenizer, trainer_cls, architecture, field):
    model = build_noisy(architecture, len(tokenizer), **{field: 0.2})
    model.config.name_or_path = ""
    extra = {"processing_class": tokenizer}
    if trainer_cls is PPOTrainer:
        extra["value_model"] = build_model("gpt2", len(tokenizer))
    message = f"passes of the policy, {type(model).__name__}, differ .* set `{field}` to 0"
    with pytest.raises(ValueError, match=message):
        make(trainer_cls, model, extra=extra)
    assert getattr(model.config, field) == 0.2
    setattr(model.config, field, 0.0)
    make(trainer_cls, model, extra=extra)


@pytest.mark.trainer
def test_noise_of_proposal_and_value_model_is_refused(make, tokenizer):
    quiet, noisy = (build_noisy("falcon", len(tokenizer), hidden_dropout=p) for p in (0.0, 0.2))
    with pytest.raises(ValueError, match="passes of the proposal, Falcon.* set `hidden_dropout` to 0"):
        make(model=quiet, extra={"proposal_model": noisy, "processing_class": tokenizer})
    quiet = build_noisy("falcon", len(tokenizer))
    with pytest.raises(ValueError, match="passes of the value model, Falcon.* set `hidden_dropout` to 0"):
        make(PPOTrainer, quiet, extra={"value_model": noisy, "processing_class": tokenizer})


@pytest.mark.trainer
@pytest.mark.parametrize("architecture", ["mixtral", "phimoe"])
def test_jitter_of_routers_is_off(make, tokenizer, architecture):
    name = "router_jitter_noise"
    model = build_noisy(architecture, len(tokenizer), **{name: 0.3}).train()
    assert not passes_agree(model)  # the control
    trainer = make(model=model, extra={"processing_class": tokenizer})
    for each in (trainer.model, trainer.proposal.module):
        assert passes_agree(each.train())
    assert getattr(model.config, name) == 0.3  # what is saved stays as it is


@pytest.mark.trainer
def test_dropout_of_adapters_is_off(make):
    config = LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.5, init_lora_weights=False)
    trainer = make(extra={"peft_config": config})
    trainer.model.train()
    assert passes_agree(trainer.model) and passes_agree(trainer.proposal.module)


@pytest.mark.trainer
def test_dropout_that_is_wanted_stays(make):
    assert not passes_agree(make(ReinforceTrainer, disable_dropout=False).model.train())


# Heads


@pytest.mark.trainer
def test_scores_are_those_of_the_models_own_head(make, tokenizer, mixed):
    """TRL's fused head takes the last hidden states for what the last layer reads; here a layer comes between."""
    set_seed(0)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token = "<unk>"
    shape = SHAPE | SPECIAL | {"vocab_size": len(tokenizer), "initializer_range": 0.3, "bos_token_id": 2}
    config = ModernBertDecoderConfig(**shape | {"cls_token_id": 2, "sep_token_id": 1, "local_attention": 8})
    model = AutoModelForCausalLM.from_config(config)
    for trainer_cls in (ReinforceTrainer, PPOTrainer):
        extra = {"processing_class": tokenizer}
        if trainer_cls is PPOTrainer:
            extra["value_model"] = build_model("gpt2", len(tokenizer))
        trainer = make(trainer_cls, copy.deepcopy(model), dataset=mixed, extra=extra)
        ids, mask = torch.tensor([[0, 3, 12, 4, 7, 1], [5, 4, 11, 12, 9, 0]]), torch.ones(2, 6, dtype=torch.long)
        mask[0, 0] = mask[1, -1] = 0
        ids, mask = ids.to(trainer.accelerator.device), mask.to(trainer.accelerator.device)
        with torch.no_grad():
            if trainer_cls is PPOTrainer:
                found, entropy, _ = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, mask, 3, compute_entropy=True
                )
            else:
                found, entropy, *_ = token_log_probs(trainer.model, trainer.accelerator, ids, mask, Layout(3, 3, 1))
        for row, prompt, completion in ((0, [3, 12], [4, 7, 1]), (1, [5, 4, 11], [12, 9])):
            log_p = alone(model, prompt, completion)
            expected = log_p.gather(1, torch.tensor(completion)[:, None])[:, 0]
            length = len(completion)
            assert found[row, :length].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
            surprise = -(log_p.exp() * log_p).sum(dim=-1)
            assert entropy[row, :length].tolist() == pytest.approx(surprise.tolist(), abs=1e-4)


# What a batch's longest row, or float64, changes


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}


@pytest.fixture(scope="module")
def phi3():
    set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 40, "pad_token_id": 0, "initializer_range": 0.4}
    return AutoModelForCausalLM.from_config(
        Phi3Config(**sizes, max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=LONGROPE)
    )


@pytest.mark.parametrize(
    ("lengths", "refused"), [((4, 12), False), ((4, 13), True), ((4, 20), True), ((17, 20), False), ((16, 20), True)]
)
def test_lengths_on_both_sides_of_longrope_are_refused(phi3, lengths, refused):
    prompts = [[5] * length for length in lengths]
    if not refused:
        check_prompt_lengths(prompts, prompts, phi3.config, 4)
        return
    with pytest.raises(ValueError, match=r"more than 16 tokens \(longrope\).*lower `max_completion_length`"):
        check_prompt_lengths(prompts, prompts, phi3.config, 4)


@torch.no_grad()
@pytest.mark.parametrize("initializer_range", [0.002, 0.02, 0.4])
def test_float64_is_compared_in_float32(initializer_range):
    set_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "n_layer": 2, "n_head": 2, "initializer_range": initializer_range}
    model = AutoModelForCausalLM.from_config(BloomConfig(**sizes)).double().eval()
    passes = Passes(model, lambda ids, mask: model(input_ids=ids).logits.float().log_softmax(-1))
    found, expected = passes.together()
    assert passes.agree(lambda: (found * (1 + 2**-23), expected))  # BLOOM's softmax is in float32
    assert not passes.agree(lambda: (found * 1.001, expected))


# Tiny models of other architectures: what is sampled and scored is their own, or they are refused


@pytest.mark.thorough
@pytest.mark.trainer
@pytest.mark.parametrize(
    ("name", "reverse", "expected"),
    [
        ("minimax", True, ("guarded", "sampled by length")),
        ("rwkv", False, ("guarded", "scored by length, sampled by length, no cache")),
        ("recurrent_gemma", False, ("guarded", "scored by length, sampled by length")),
        ("nemotron_h", False, ("guarded", "no cache")),
        ("bart", False, ("guarded", "scored by length, sampled by length")),
        ("falcon_h1", False, ("agrees", "")),
        ("roberta", False, ("refused", "RobertaForCausalLM predicts something else for a text in a batch")),
    ],
)
def test_nothing_disagrees(name, reverse, expected):
    tokenizer = build_tokenizer()
    tokenizer.bos_token = "<unk>"
    line = examine(name, tokenizer, reverse)
    assert line["result"] == expected[0] and line["how"].startswith(expected[1])
    assert line["noise"] in ("", "none", "off")


@pytest.mark.trainer
def test_no_check_takes_the_limit_for_an_answer():
    with pytest.raises(TooLong), limited(1):
        holds(lambda: time.sleep(30))


@pytest.mark.slow
@pytest.mark.trainer
def test_no_architecture_disagrees():
    """Every third; `python -m benchmarks.architectures` takes all."""
    lines = sweep(NAMES[::3])
    results = [line["result"] for line in lines]
    assert not [line for line in lines if line["result"] == "**disagrees**"]
    assert sum(result in ("agrees", "guarded") for result in results) > 45
