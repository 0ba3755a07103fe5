"""Models that are not what they are passed as: the checks, and that trainers make them; beside each, the neighbour that is right."""

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    CLIPVisionConfig,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2ForTokenClassification,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeTrainer
from trl_repulse.models._loading import load_model
from trl_repulse.models._model_checks import check_causal, check_language_model, check_separate

from ..conftest import WORDS, build_model, build_tokenizer
from ..engine.test_adapters import lora


pytestmark = pytest.mark.trainer
V = 19
SIZES = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SPECIAL = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
TWO_PARTS = {"vocab_size": V, "d_model": 16, "decoder_start_token_id": 1, **SPECIAL}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
MODELS = {
    "bert": lambda **more: BertLMHeadModel(BertConfig(**SIZES, **more)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(d_kv=8, d_ff=32, num_layers=1, num_heads=2, **TWO_PARTS)),
    "bart": lambda: BartForConditionalGeneration(
        BartConfig(encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32, **HEADS, **TWO_PARTS)
    ),
    "masked": lambda: BertForMaskedLM(BertConfig(**SIZES)),
    "classifier": lambda: classifier(),
    "headless": lambda: gpt2().transformer,
}
MESSAGES = {
    "bert": "predicts tokens from those that come after them",
    **dict.fromkeys(("t5", "bart"), "is an encoder-decoder"),
    "masked": "is a BertForMaskedLM, which predicts no next token",
    "classifier": "is a GPT2ForSequenceClassification, which predicts no next token",
    "headless": "is a GPT2Model, which predicts no next token",
}


def gpt2(seed=0):
    return build_model("gpt2", V, seed)


def classifier(**more):
    sizes = {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return GPT2ForSequenceClassification(GPT2Config(**sizes | {"num_labels": 1, "pad_token_id": 0} | more))


def saved(folder, model, tokenizer=None):
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def with_path(model, folder, tokenizer):
    """A model as `from_pretrained` gives it: TRL looks there for its tokenizer."""
    model.config._name_or_path = saved(folder, model, tokenizer)
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_no_causal_language_model(tokenizer, tmp_path, kind):
    with pytest.raises(ValueError, match=f"^`model` {MESSAGES[kind]}"):
        check_causal(MODELS[kind](), "`model`")
    if kind != "bert":  # whose configuration does not show it
        with pytest.raises(ValueError, match=f"^`model` {MESSAGES[kind]}"):
            check_language_model(saved(tmp_path / "model", MODELS[kind](), tokenizer), "`model`")


@pytest.mark.parametrize(
    ("trainer_cls", "name"),
    [
        (RePULSeTrainer, "model"),
        (RePULSeTrainer, "proposal_model"),
        (ReinforceTrainer, "model"),
        (PPOTrainer, "model"),
    ],
)
@pytest.mark.parametrize("given", ["model", "path"])
def test_trainers_check_their_models(make, tokenizer, tmp_path, trainer_cls, name, given):
    model, extra = MODELS["bert"](), {"processing_class": tokenizer}
    if given == "path":
        model = saved(tmp_path / "model", model, tokenizer)
    if trainer_cls is PPOTrainer:
        extra["value_model"] = gpt2()
    if name == "proposal_model":
        extra["proposal_model"] = model
    with pytest.raises(ValueError, match=f"^`{name}` {MESSAGES['bert']}"):
        make(trainer_cls, model=model if name == "model" else gpt2(), extra=extra)


@pytest.mark.parametrize("name", ["model", "proposal_model"])
def test_a_path_is_refused_by_its_configuration(make, nothing_loaded, tokenizer, tmp_path, name):
    path = saved(tmp_path / "model", MODELS["t5"](), tokenizer)
    policy = path if name == "model" else gpt2()
    with pytest.raises(ValueError, match=f"^`{name}` {MESSAGES['t5']}"):
        make(model=policy, extra={"processing_class": tokenizer} | ({} if name == "model" else {name: path}))


@pytest.mark.parametrize("kind", ["bart", "classifier"])
def test_what_would_load_as_a_language_model(tokenizer, tmp_path, kind):
    """Their heads are the embeddings, so that no weight is missing."""
    path = saved(tmp_path / "model", MODELS[kind](), tokenizer)
    with pytest.raises(ValueError, match=f"^The policy `.*` {MESSAGES[kind]}"):
        load_model(AutoModelForCausalLM, path, "policy")
    backbone = saved(tmp_path / "backbone", gpt2().transformer, tokenizer)
    model = load_model(AutoModelForCausalLM, backbone, "policy")
    assert torch.equal(model.lm_head.weight, gpt2().lm_head.weight)


def test_the_check_leaves_no_trace(architecture):
    model = build_model(architecture, V)
    model.train()
    model.lm_head.eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    check_causal(model, "`model`")
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_decoder_with_an_encoders_name_is_a_policy(make, tokenizer):
    models = [MODELS["bert"](is_decoder=True) for _ in range(2)]
    make(model=models[0], extra={"processing_class": tokenizer, "proposal_model": models[1]}).train()


def test_a_model_that_reads_images_too_is_a_policy(make, tokenizer):
    language = LlamaConfig(**SIZES, max_position_embeddings=64, **SPECIAL)
    sizes = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    sight = CLIPVisionConfig(**sizes, image_size=28, patch_size=14)
    config = LlavaConfig(text_config=language, vision_config=sight, image_token_index=18)
    policy = LlavaForConditionalGeneration(config)
    make(model=policy, extra={"processing_class": tokenizer}).train()


@pytest.mark.parametrize("role", ["policy", "proposal", "reward"])
def test_models_without_weights(make, tokenizer, role):
    with torch.device("meta"):
        empty = classifier() if role == "reward" else gpt2()
    extra = {"processing_class": tokenizer} | ({"proposal_model": empty} if role == "proposal" else {})
    given = {"model": empty if role == "policy" else gpt2()} | ({"reward_funcs": empty} if role == "reward" else {})
    with pytest.raises(ValueError, match="has no weights .*'meta'.*load it with `from_pretrained`"):
        make(**given, extra=extra)


# Reward models


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("lm", "`reward_funcs=.*` is a GPT2LMHeadModel and no classifier"),
        ("headless", "has no weights for score.weight"),
        ("renamed", "has no weights for score.weight"),
    ],
)
def test_a_reward_model_without_a_trained_head(make, tokenizer, tmp_path, kind, message):
    path = saved(tmp_path / "reward", gpt2() if kind == "lm" else gpt2().transformer, tokenizer)
    config = tmp_path / "reward" / "config.json"
    if kind == "renamed":
        config.write_text(config.read_text().replace('"GPT2Model"', '"GPT2ForSequenceClassification"'))
    with pytest.raises(ValueError, match=message):
        make(reward_funcs=[path])


@pytest.mark.parametrize("trainer_cls", [RePULSeTrainer, PPOTrainer])
def test_a_reward_model_that_was_saved_as_one(make, tokenizer, tmp_path, trainer_cls):
    own = build_tokenizer([*WORDS[::-1], "more"])  # another tokenizer is fine
    model = classifier(vocab_size=len(own), pad_token_id=None)
    path = saved(tmp_path / "reward", model, own)
    given = [path]
    trainer = make(trainer_cls, reward_funcs=given)
    assert given == [path] and trainer.reward_func_names == ["reward"]
    assert torch.equal(trainer.reward_funcs[0].score.weight.cpu(), model.score.weight)
    assert trainer.reward_processing_classes[0].get_vocab() == own.get_vocab()
    trainer.train()


@pytest.mark.parametrize("trainer_cls", [RePULSeTrainer, PPOTrainer])
def test_reward_models_that_are_none(make, tokenizer, tmp_path, trainer_cls):
    policy, two = gpt2(), with_path(classifier(num_labels=2), tmp_path / "two", tokenizer)
    extra = {"processing_class": tokenizer}
    for reward, message in (
        (policy, r"`reward_funcs\[0\]` (is a GPT2LMHeadModel and no classifier|and `model` share weights)"),
        ([lambda **_: [0.0], gpt2()], r"`reward_funcs\[1\]` is a GPT2LMHeadModel and no classifier"),
        (two, r"`reward_funcs\[0\]` has 2 labels, of which TRL reads the first"),
        (str(tmp_path / "two"), "head has the size of 2 labels"),
    ):
        with pytest.raises(ValueError, match=message):
            make(trainer_cls, model=policy, reward_funcs=reward, extra=extra)
    make(trainer_cls, model=policy, reward_funcs=with_path(classifier(), tmp_path / "one", tokenizer), extra=extra)


@pytest.mark.parametrize("adapters", [False, True])
def test_a_reward_model_with_the_policys_layers(make, tokenizer, tmp_path, adapters):
    policy, reward = gpt2(), with_path(classifier(), tmp_path / "reward", tokenizer)
    reward.transformer = policy.transformer
    extra = {"processing_class": tokenizer, "peft_config": lora("gpt2") if adapters else None}
    with pytest.raises(ValueError, match=r"`reward_funcs\[0\]` and `model` share weights \(`transformer.wte`\)"):
        make(ReinforceTrainer, model=policy, reward_funcs=reward, extra=extra)


# Weights that are shared


def same_body(policy):
    proposal = gpt2(1)
    proposal.transformer = policy.transformer
    return proposal


def tied(policy):
    proposal = gpt2(1)
    proposal.transformer.wte.weight = policy.transformer.wte.weight
    proposal.tie_weights()
    return proposal


def one_matrix(policy):
    proposal = gpt2(1)
    layer, own = (model.transformer.h[1].mlp.c_fc for model in (policy, proposal))
    own.weight = torch.nn.Parameter(layer.weight.detach())  # another parameter, where the first one lies
    return proposal


@pytest.mark.parametrize("share", [copy.copy, same_body, tied, one_matrix])
def test_a_proposal_with_the_policys_weights(make, tokenizer, share):
    policy = gpt2()
    with pytest.raises(ValueError, match="`proposal_model` and `model` share weights.*`copy.deepcopy`"):
        make(model=policy, extra={"processing_class": tokenizer, "proposal_model": share(policy)})


def test_copies_of_the_policy_are_proposals(make, tokenizer):
    policy = gpt2()
    extra = {"processing_class": tokenizer, "proposal_model": copy.deepcopy(policy)}
    make(model=policy, extra=extra).train()


def test_two_adapted_models_over_one_base(make, tokenizer):
    base = gpt2()
    policy, proposal = get_peft_model(base, lora("gpt2")), get_peft_model(base, lora("gpt2"))
    for own in (proposal, base):
        with pytest.raises(ValueError, match="`proposal_model` and `model` share weights.*leave it out"):
            make(model=policy, extra={"processing_class": tokenizer, "proposal_model": own})
    make(model=policy, extra={"processing_class": tokenizer}).train()  # two adapters over one base


@pytest.mark.parametrize("wrapped", ["by the user", "by the trainer"])
def test_frozen_weights_may_be_shared_by_models_of_their_own(make, tokenizer, wrapped):
    models = [gpt2(), gpt2(1)]
    for name, p in list(models[0].transformer.named_parameters()):
        layer, _, leaf = name.rpartition(".")
        setattr(models[1].transformer.get_submodule(layer), leaf, p)
    models[1].tie_weights()
    extra = {"processing_class": tokenizer}
    if wrapped == "by the user":
        models = [get_peft_model(model, lora("gpt2")) for model in models]
    else:
        extra["peft_config"] = lora("gpt2")
    make(model=models[0], extra=extra | {"proposal_model": models[1]}).train()


def test_where_weights_lie_is_all_that_is_compared():
    one, other = (torch.nn.Linear(2, 2) for _ in range(2))
    check_separate(one, "a", other, "b", (True, True), "")
    other.weight = torch.nn.Parameter(torch.empty(0))  # as ZeRO-3 leaves parameters
    one.weight = torch.nn.Parameter(torch.empty(0))
    check_separate(one, "a", other, "b", (True, True), "")


def test_a_copy_that_runs_the_weights_of_a_patched_model(make, tokenizer):
    policy, extra = gpt2(), {"processing_class": tokenizer}
    make(model=policy, extra=extra)
    with pytest.raises(ValueError, match="`proposal_model` computes with the weights of another model"):
        make(model=gpt2(3), extra=extra | {"proposal_model": copy.deepcopy(policy)})
    make(model=policy, extra=extra)


def test_a_value_model_with_the_policys_weights(make, tokenizer):
    policy, value = gpt2(), GPT2ForTokenClassification(GPT2Config(**gpt2().config.to_dict() | {"num_labels": 1}))
    extra = {"processing_class": tokenizer, "value_model": value}
    make(PPOTrainer, model=policy, extra=extra)
    value.transformer = policy.transformer
    with pytest.raises(ValueError, match="`value_model` and `model` share weights"):
        make(PPOTrainer, model=policy, extra=extra)


# Tokens


@pytest.mark.parametrize(("trainer_cls", "name"), [(RePULSeTrainer, "proposal_model"), (PPOTrainer, "value_model")])
def test_a_second_model_with_other_tokens_of_the_same_number(make, tmp_path, trainer_cls, name):
    permuted = saved(tmp_path / "permuted", gpt2(), build_tokenizer(WORDS[::-1]))
    message = f"`{name}` has a tokenizer of its own, with 'bad' for the policy's token 3, 'the'"
    with pytest.raises(ValueError, match=message):
        make(trainer_cls, extra={name: permuted})
    renamed = build_tokenizer()
    renamed.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    for own in (None, renamed):
        make(trainer_cls, extra={name: saved(tmp_path / f"own-{own is None}", gpt2(), own)})


def test_a_tokenizer_without_an_end(make):
    endless = build_tokenizer()
    endless.eos_token = None
    for end in (None, 1):
        policy = gpt2()
        policy.generation_config.eos_token_id = end
        with pytest.raises(ValueError, match=r"The tokenizer \(`processing_class`\) has no end token.*`eos_token`"):
            make(model=policy, extra={"processing_class": endless})


@pytest.mark.parametrize("trainer_cls", [RePULSeTrainer, PPOTrainer])
def test_a_tokenizer_with_more_tokens_than_the_model(make, trainer_cls):
    larger = build_tokenizer()
    larger.add_tokens([" zebra"])
    extra = {"processing_class": larger} | ({"value_model": gpt2()} if trainer_cls is PPOTrainer else {})
    make(trainer_cls, model=gpt2(), extra=extra).train()  # none that is met: Gemma 3 has such a token
    prompts = Dataset.from_dict({"prompt": ["the cat zebra"] * 4})
    message = "'the cat zebra', has the token 19, but the model has embeddings for 19 tokens"
    with pytest.raises(ValueError, match=message):
        make(trainer_cls, model=gpt2(), dataset=prompts, extra=extra).train()
    larger.add_special_tokens({"pad_token": "[PAD]"})
    message = r"pads with '\[PAD\]', its token 20.*`tokenizer.pad_token = tokenizer.eos_token`"
    with pytest.raises(ValueError, match=message):
        make(trainer_cls, model=gpt2(), extra=extra)


def test_trained_tokens_of_an_embedding_that_is_the_head(make):
    config = lora("gpt2", trainable_token_indices=[3, 4])
    with pytest.raises(ValueError, match="`trainable_token_indices`.*`tie_word_embeddings`"):
        make(extra={"peft_config": config})
    make(model="llama", extra={"peft_config": lora("llama", trainable_token_indices=[3, 4])}).train()


def test_a_quantized_proposal_without_an_adapter(make, model_dirs):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    proposal = AutoModelForCausalLM.from_pretrained(model_dirs["llama"], quantization_config=quantization)
    with pytest.raises(ValueError, match="`proposal_model` cannot be trained: .*Pass `proposal_peft_config`"):
        make(model="llama", extra={"proposal_model": proposal})
    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    make(model="llama", extra={"proposal_model": proposal, "proposal_peft_config": adapter})
