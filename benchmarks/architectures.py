"""Every causal language model of transformers, tiny: is what is sampled and scored the model's own?

    python -m benchmarks.architectures                  # all of them, about ten minutes on one core
    python -m benchmarks.architectures minimax rwkv

Each is built from its configuration with small sizes, where its fields allow. Of hybrids, whose layers differ in kind, a
second one has the layers in reverse order. Beside what the library finds at set-up and does about it, the table has what
it comes to, measured without the library's own comparison: the largest gap between scores of a batch of prompts of several
lengths and those of single unpadded rows, in held-out scoring and in the trainer (nats a token), and z of −log p − entropy,
summed over the tokens of a draw, which is 0 in expectation for draws from the model; and whether a prompt's completions share
its row and its cache in the trainer. In a further build every dropout and jitter of the configuration is on: after
`disable_dropout`, passes in training mode must agree, or be refused.
"""

import argparse
import contextlib
import inspect
import logging
import signal
import tempfile
import warnings
from collections import Counter
from typing import Any

import torch
from datasets import Dataset
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel, set_seed
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.conftest import build_tokenizer
from trl_repulse import ReinforceConfig, ReinforceTrainer
from trl_repulse.engine.preparation import check_noise
from trl_repulse.engine.trl_bridge import disable_dropout
from trl_repulse.engine.units import OWN, Units
from trl_repulse.evaluation._generation import transformers_engine
from trl_repulse.evaluation.log_probs import completion_log_probs
from trl_repulse.generation._probe import Guard, probe, probe_shared


NAMES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
PROMPTS = ("the", "the cat", "the cat sat", "the dog ran ate fish")
DRAWS = 150  # of each prompt
SECONDS = 45  # for one model
LARGEST = 30_000_000  # parameters: others have sizes that no field of the list below sets
# What a model may be off by: gaps of rounding, in float32; |z| of 4.5 comes by chance once in 150,000 draws
GAP, Z = 2e-3, 4.5

_SIZES = {
    32: "hidden_size d_model n_embd dim embed_dim emb_dim word_embed_proj_dim embedding_size model_dim decoder_hidden_size "
    "lru_width embedding_dim moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
    "shared_intermediate_size moe_shared_expert_intermediate_size intermediate_size_mlp",
    64: "intermediate_size ffn_dim n_inner d_ff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size inner_dim dff "
    "dense_intermediate_size block_ff_dim index_topk mamba_d_ssm",
    4: "num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers num_attention_heads n_head n_heads "
    "num_heads decoder_attention_heads encoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "mamba_n_heads mamba_num_heads n_mamba_heads linear_num_value_heads linear_num_heads zero_expert_num",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token top_k_experts moe_k moe_topk top_k "
    "linear_num_key_heads attn_layer_period expert_layer_period full_attention_interval sliding_window_pattern index_n_heads",
    8: "head_dim attention_head_dim qk_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim d_kv kv_channels rotary_dim "
    "linear_key_head_dim linear_value_head_dim linear_head_dim sliding_window attention_window_size window_size swa_window_size "
    "mamba_d_state state_size ssm_state_size d_state mamba_chunk_size chunk_size block_size index_head_dim hidden_size_per_layer_input",
    16: "kv_lora_rank q_lora_rank o_lora_rank mamba_d_head mamba_head_dim mamba_headdim",
    128: "max_position_embeddings n_positions n_ctx context_length max_seq_len max_sequence_length max_target_positions "
    "max_source_positions",
    1: "n_group num_expert_group topk_group first_k_dense_replace num_dense_layers mamba_n_groups n_groups mamba_ngroups "
    "attn_layer_offset expert_layer_offset",
    0: "num_kv_shared_layers",
}
FIELDS = {name: size for size, names in _SIZES.items() for name in names.split()}
LAYERS = {"zamba2": "layers_block_type"}
SPECIAL = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_LINEAR = ["linear_attention", "full_attention"] * 2
_CONV = ["conv", "full_attention"] * 2
_AS_MANY = {"num_key_value_heads": 4}
_START = {"decoder_start_token_id": 2}
# What the fields' names do not tell
EXTRA: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu"), _AS_MANY
    ),
    **dict.fromkeys(("bigbird_pegasus", "blenderbot", "marian", "trocr", "whisper", "xglm"), _START),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), {"head_dim": 8}),
    "bailing_hybrid": {"layer_group_size": 2, **_AS_MANY},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
        },
    },
    "deepseek_v2": {**_AS_MANY, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": _LINEAR},
    "hrm_text": {
        "num_layers_per_stack": 1,
        "num_hidden_layers": 8,
    },  # with more, its loops enlarge rounding a thousand times
    "kimi_linear": {"layer_types": _LINEAR, **_AS_MANY},
    "lfm2": {"layer_types": _CONV},
    "lfm2_moe": {"layer_types": _CONV},
    "longcat_flash": {"qk_head_dim": 16, **_AS_MANY},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 1,
    },
    "reformer": {
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (8, 16),
        "attn_layers": ["local", "lsh"] * 2,
        "num_buckets": 2,
    },
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"num_heads": 4, "hidden_size": 64, "embedding_dim": 64},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}


def build(name: str, size: int, noise: bool = False, reverse: bool = False) -> PreTrainedModel:
    """A tiny model, wide awake (large initial weights), with all its dropout and jitter on or as it comes."""
    config_cls = CONFIG_MAPPING[name]
    settings = _small(config_cls, size) | EXTRA.get(name, {})
    for part, part_cls in getattr(config_cls, "sub_configs", {}).items():
        if part in ("text_config", "decoder") and "Auto" not in part_cls.__name__:
            settings[part] = _small(part_cls, size) | EXTRA.get(part_cls.model_type, {})
    config = config_cls(**settings)
    if reverse:
        kinds = {LAYERS.get(name, "layer_types"): config.get_text_config().layer_types[::-1]}
        of_text = {"text_config": settings["text_config"] | kinds} if "text_config" in settings else kinds
        config = config_cls(**settings | of_text)
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    if noise:
        for field, value in list(vars(config).items()):
            if any(word in field for word in ("drop", "jitter", "noise")) and isinstance(value, int | float):
                if not isinstance(value, bool):
                    setattr(config, field, 0.2)
    with torch.device("meta"):  # without memory: parts whose size no field sets take up to 15 GiB
        count = sum(p.numel() for p in MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).parameters())
    if count > LARGEST:
        raise ValueError(f"it has {count} parameters with the sizes that are known here")
    set_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    if name == "rwkv":  # has weights of its own to start with, with which nothing shows
        with torch.no_grad():
            for key, p in model.named_parameters():
                if p.dim() > 1 and "embeddings" not in key:
                    p.normal_(std=0.4)
    return model


def _small(config_cls: type, size: int) -> dict[str, Any]:
    defaults = config_cls()
    names = {*inspect.signature(config_cls.__init__).parameters, *vars(defaults)}
    settings: dict[str, Any] = {"initializer_range": 0.3, "vocab_size": size}
    for name in names & {*FIELDS, *SPECIAL, "vocab_size_per_layer_input"}:
        with contextlib.suppress(Exception):  # of layers, each with its own
            value = getattr(defaults, name)
            if name in SPECIAL:
                settings[name] = SPECIAL[name]
            elif name == "vocab_size_per_layer_input":
                settings[name] = size
            elif isinstance(value, int) and not isinstance(value, bool) or name == "num_key_value_heads":
                settings[name] = FIELDS[name]
    return settings


def is_hybrid(model: PreTrainedModel) -> bool:
    """Whether layers are of several kinds, in an order that can be turned round."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    turned = bool(kinds) and len(set(kinds)) > 1 and kinds != kinds[::-1]
    return turned and model.config.model_type not in ("recurrent_gemma", "bamba", "jamba")  # which set it themselves


@torch.no_grad()
def alone(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Log-probabilities (T, V) from one unpadded pass."""
    ids = torch.tensor([[*prompt, *completion]])
    return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(dim=-1)


@torch.no_grad()
def z_of_draws(model: PreTrainedModel, prompts: list[list[int]], completions: list[list[int]]) -> float:
    """z of −log p − entropy, from full passes of draws of one prompt and one length, without padding."""
    groups: dict[tuple, list[list[int]]] = {}
    for prompt, completion in zip(prompts, completions, strict=True):
        groups.setdefault((tuple(prompt), len(completion)), []).append(completion)
    gaps = []
    for (prompt, _), drawn in groups.items():
        ids = torch.tensor([[*prompt, *completion] for completion in drawn])
        log_p = model(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 : -1].float().log_softmax(dim=-1)
        chosen = log_p.gather(2, ids[:, len(prompt) :, None])[:, :, 0]
        gaps.append((-chosen + (log_p.exp() * log_p).sum(dim=-1)).sum(dim=-1).double())
    gap = torch.cat(gaps)
    return (gap.mean() / (gap.std() / len(gap) ** 0.5)).item()


def gap_of_scores(model: PreTrainedModel, prompts, completions, scores) -> float:
    """Largest difference a token between scores of sequences and those of single passes."""
    gaps = []
    for prompt, completion, score in zip(prompts, completions, scores, strict=True):
        chosen = alone(model, prompt, completion).gather(1, torch.tensor(completion)[:, None])
        gaps.append(abs(float(score) - chosen.sum().item()) / len(completion))
    return max(gaps)


def measure_held_out(model: PreTrainedModel, tokenizer: Any) -> tuple[float, float]:
    """z of held-out draws, and the gap of scores."""
    prompts = [ids for ids in tokenizer(list(PROMPTS))["input_ids"] for _ in range(DRAWS)]
    guard = probe_shared(model)
    drawn = transformers_engine(model, tokenizer, 3, len(prompts), guard=guard)(prompts, 0)
    chosen = slice(None, None, DRAWS // 4)
    scores = completion_log_probs(model, prompts[chosen], drawn[chosen], guard=guard)[0]
    return z_of_draws(model, prompts, drawn), gap_of_scores(model, prompts[chosen], drawn[chosen], scores)


def measure_trainer(model: PreTrainedModel, tokenizer: Any) -> tuple[float, float, str]:
    """The same of a trainer's draws and scores, and what completions of a prompt share there."""
    with tempfile.TemporaryDirectory() as folder:
        args = ReinforceConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            gradient_checkpointing=False,
            max_completion_length=3,
            num_generations=DRAWS,
            per_device_train_batch_size=DRAWS * len(PROMPTS),
            beta=0.0,
        )
        rows = [{"prompt": prompt} for prompt in PROMPTS]
        trainer = ReinforceTrainer(
            model,
            lambda completions, **_: [0.0] * len(completions),
            args,
            Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        trainer.model.train()
        torch.manual_seed(1)
        batch = trainer._generate_and_score_completions([row for row in rows for _ in range(DRAWS)])
        prompts = [p[m == 1].tolist() for p, m in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]
        prompts = [prompt for prompt in prompts for _ in range(DRAWS)]
        ids, mask = batch["completion_ids"].flatten(0, 1), batch["completion_mask"].flatten(0, 1)
        drawn = [row[m == 1].tolist() for row, m in zip(ids, mask, strict=True)]
        few = {name: x[:, :4] if name.startswith("completion_") else x for name, x in batch.items()}
        scores = (
            trainer._scoring.score(trainer.model, Units.of(few), trainer.shape)
            .log_p[OWN]
            .detach()
            .sum(dim=-1)
            .flatten()
        )
        model.eval()
        places = [i * DRAWS + j for i in range(len(PROMPTS)) for j in range(4)]
        gap = gap_of_scores(model, [prompts[i] for i in places], [drawn[i] for i in places], scores)
        shared = ["row"] * trainer._guard.share_prompts + ["cache"] * trainer._guard.repeat_cache
        return z_of_draws(model, prompts, drawn), gap, ", ".join(shared)


def measure_noise(name: str, size: int) -> str:
    """What becomes of dropout and jitter that are on."""
    model = build(name, size, noise=True).train()
    ids = torch.tensor([[3, 12, 4, 7], [5, 6, 9, 11]])

    def agree() -> bool:
        with torch.no_grad():
            return torch.equal(*(model(input_ids=ids).logits.nan_to_num() for _ in range(2)))

    if agree():
        return "none"
    disable_dropout(model)
    try:
        check_noise(model, "policy")
    except ValueError as error:
        return "refused: " + str(error).partition("; ")[2].partition(" in the model's")[0].replace("`", "")
    return "off" if agree() else "**left**"


def examine(name: str, tokenizer: Any, reverse: bool = False) -> dict[str, Any]:
    """One architecture's line."""
    model = build(name, len(tokenizer), reverse=reverse).eval()
    line: dict[str, Any] = {"name": name + " (layers reversed)" * reverse, "hybrid": is_hybrid(model)}
    with torch.no_grad():
        if not model(input_ids=torch.tensor([[3, 4, 5]])).logits.isfinite().all():
            raise ValueError("its logits are not finite")
    try:
        guard = probe(model)
    except ValueError as error:
        return line | {"result": "refused", "how": str(error).partition(", ")[0], "noise": ""}
    how = ["scored by length"] * guard.score_by_length + ["sampled by length"] * guard.sample_by_length
    how += ["no cache"] * (not guard.use_cache)
    line |= {"result": "agrees" if guard == Guard() else "guarded", "how": ", ".join(how)}
    line["noise"] = ""
    if not reverse:
        try:
            line["noise"] = measure_noise(name, len(tokenizer))
        except ValueError:
            line["noise"] = "cannot be on"
    try:
        *found, line["shared"] = *measure_held_out(model, tokenizer), *measure_trainer(model, tokenizer)
    except Exception as error:
        return line | {"result": "fails", "how": f"{type(error).__name__}: {error}"[:100]}
    line |= dict(zip(("z", "gap", "trainer z", "trainer gap"), found, strict=True))
    if max(map(abs, found[::2])) > Z or max(found[1::2]) > GAP or "left" in line["noise"]:
        line["result"] = "**disagrees**"
    return line


class TooLong(BaseException):
    """A model's time is over. This is not an `Exception`, because the check at set-up catches those as answers of the model."""


@contextlib.contextmanager
def limited(seconds: int):
    """Ends what takes too long."""

    def stop(*_: Any) -> None:
        raise TooLong(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def sweep(names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Lines of all architectures, printed as they come."""
    tokenizer, lines = build_tokenizer(), []
    tokenizer.bos_token = "<unk>"  # which strict configurations must have
    for name in names:
        reverse = False
        for _ in range(2):
            try:
                with limited(SECONDS):
                    line = examine(name, tokenizer, reverse)
            except (Exception, TooLong) as error:  # the configuration may not allow small sizes
                reason = f"{type(error).__name__}: {error}".replace("\n", " ")
                named = name + " (layers reversed)" * reverse
                line = {"name": named, "result": "not built", "how": reason[:100], "noise": ""}
            lines.append(line)
            numbers = [f"{line[key]:.1e}" if key in line else "" for key in ("z", "gap", "trainer z", "trainer gap")]
            cells = [line["name"], line["result"], line["how"], *numbers, line["noise"], line.get("shared", "")]
            print("| " + " | ".join(cells) + " |", flush=True)
            if reverse or not line.get("hybrid"):
                break
            reverse = True
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=NAMES)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print("| architecture | result | how | z | gap | trainer's z | trainer's gap | noise | shared |\n|" + "---|" * 9)
    lines = sweep(tuple(arguments.names))
    print("\n" + ", ".join(f"{count} {result}" for result, count in Counter(line["result"] for line in lines).items()))
    rows, caches = (sum(what in line.get("shared", "") for line in lines) for what in ("row", "cache"))
    print(f"{rows} share rows, {caches} the cache")


if __name__ == "__main__":
    main()
