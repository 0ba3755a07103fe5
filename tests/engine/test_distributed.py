"""Two processes train what one trains: prompts whole on a process, or cut apart over processes and micro-batches.

Whatever the engine: plain data parallelism, DeepSpeed ZeRO-1, 2 and 3, FSDP2. GPUs are not run, several machines as one.
"""

import functools
import itertools
import json
import sys

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from peft import PeftModel
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel
from transformers.integrations import is_deepspeed_available

from examples.worlds import shop, two_tokens

from ..conftest import build_model
from ..distributed_run import ADAPTER_CLIP
from ..distributed_support import CONFIGS, launcher, run, run_forked, train
from ..rows_run import METHODS


pytestmark = [pytest.mark.distributed, pytest.mark.trainer, pytest.mark.thorough]

OWN_METRICS = ("loss", "grad_norm", "kl", "return")
METRICS = (*OWN_METRICS, "proposal/loss", "proposal/grad_norm", "proposal/ess", "proposal/log_z")
HOT_METRICS = (*OWN_METRICS, "negative/p_bad", "negative/ess", "negative/log_z")
PPO_METRICS = (*OWN_METRICS, "approx_kl", "value/loss", "value/grad_norm", "value/clip_fraction")
PPO_METRICS += ("value/explained_variance",)


needs_deepspeed = pytest.mark.skipif(
    not is_deepspeed_available(), reason="needs deepspeed: pip install -e '.[deepspeed]'"
)

ZERO = [needs_deepspeed, pytest.mark.slow]
CUT_APART = ["fsdp2", *(pytest.param(name, marks=needs_deepspeed) for name in ("zero2", "zero3"))]


@pytest.fixture(scope="module")
def launch(tmp_path_factory, tokenizer):
    @functools.cache
    def launch(processes, batch_size, accumulation, variant="leave one out", config=None, **kwargs):
        folder = tmp_path_factory.mktemp("run")
        build_model("gpt2", len(tokenizer), seed=2).eval().save_pretrained(folder / "reference")
        return train(folder, processes, batch_size, accumulation, variant, config, **kwargs)

    return launch


def result_of(command, folder):
    run_forked(command)
    return json.loads((folder / "result.json").read_text())


@needs_deepspeed
def test_the_check_of_causality_gathers_one_layer_at_a_time(tmp_path, model_dirs):
    config = BertConfig(
        vocab_size=19, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    BertLMHeadModel(config).save_pretrained(tmp_path)
    done = run([sys.executable, "-m", "tests.partitioned_run", model_dirs["llama"], str(tmp_path)])
    assert "`model` predicts tokens from those that come after them" in done.stdout


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "method"),
    [
        (4, 1, "leave one out"),
        (2, 2, "prefixes"),
        (2, 2, "REINFORCE++-baseline"),
        (2, 2, "hot"),
        (2, 2, "hot, threshold measured"),
    ],
)
def test_two_processes_equal_one(launch, batch_size, accumulation, method):
    metrics = {"hot": HOT_METRICS, "hot, threshold measured": HOT_METRICS[:4]}.get(method, METRICS)
    alone, together = launch(1, 8, 1, method), launch(2, batch_size, accumulation, method)
    assert_equal(alone, together, metrics)
    if method.endswith("measured"):
        found = [[row.get("negative/bad_reward_threshold") for row in each["logs"]] for each in (alone, together)]
        assert found[0] == found[1] and found[0][0] is None and found[0][-1] is not None


@pytest.mark.invariant
@pytest.mark.parametrize(
    ("config", "batch_size", "accumulation"),
    [
        pytest.param("zero2", 1, 4, marks=needs_deepspeed),
        pytest.param("zero3", 1, 4, marks=needs_deepspeed),
        ("fsdp2", 1, 4),
        pytest.param("zero1", 2, 2, marks=ZERO),
    ],
)
def test_two_processes_of_an_engine_equal_one(launch, config, batch_size, accumulation):
    assert_equal(launch(1, 8, 1), launch(2, batch_size, accumulation, config=config), METRICS)


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize("config", CUT_APART)
def test_models_cut_apart_train_what_whole_ones_train(launch, config):
    assert_equal(launch(1, 8, 1, "hot"), launch(2, 1, 4, "hot", config=config), HOT_METRICS)
    for method in ("PPO", *(["PPO, adapter"] if config == "fsdp2" else [])):  # of the policy
        assert_equal(launch(1, 8, 1, method), launch(2, 2, 2, method, config=config), PPO_METRICS)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sampled", "sampled, a prompt of one token"])
@pytest.mark.parametrize("config", ["fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_models_cut_apart_draw_what_whole_ones_draw(launch, config, method):
    """
    A process that has finished its completions goes on for the others, of both models, with its own random numbers; all read
    prompts once, or none.
    """
    whole = launch(2, 4, 1, method, config="cpu_ddp")
    lengths = ("completions/max_length", "proposal/completions/max_length")
    assert all(log[name] == 6 for log in whole["logs"] for name in lengths)  # the first process draws two tokens
    assert_equal(whole, launch(2, 4, 1, method, config=config), (*METRICS, *lengths))


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.stem)
def test_configurations_of_the_launcher_are_read(path):
    config = load_config_from_file(str(path))
    assert config.mixed_precision == "no"  # the trainer's configuration decides; another one here would warn
    assert "MULTI_CPU" not in path.read_text().replace("`distributed_type: MULTI_CPU`", "")


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ("cpu_ddp", "checkpoints in a block"),
        ("cpu_ddp", "checkpoints, moving reference"),
        *(
            pytest.param("fsdp2", f"checkpoints{how}", marks=pytest.mark.slow)
            for how in (" in fp16", ", moving reference")
        ),
        *(pytest.param("zero3", f"checkpoints{how}", marks=ZERO) for how in (" in fp16", ", moving reference")),
        *(
            pytest.param("zero3_offload", f"checkpoints{how}", marks=ZERO) for how in ("", " in fp16")
        ),  # compiles an optimizer
    ],
)
def test_a_checkpoint_of_two_processes_resumes_both_models(tmp_path, tokenizer, config, method):
    """Four updates in one go, and two and two: the same two models, to the last bit.

    DeepSpeed's optimizer on the CPU keeps β^t as a running product, and takes a power once it has been resumed: 1e-6, but for
    the biases of keys, which attention does not depend on, so that their gradients are rounding errors that Adam scales up.
    """
    build_model("gpt2", len(tokenizer), seed=2).eval().save_pretrained(tmp_path / "reference")
    command = [*launcher(2, config), "-m", "tests.distributed_run", str(tmp_path), "4", "1", method]
    whole = result_of(command, tmp_path)["parameters"]
    resumed = result_of([*command, str(tmp_path / "run" / "checkpoint-2")], tmp_path)["parameters"]
    for name in ("policy", "proposal"):
        difference = (torch.tensor(resumed[name]) - torch.tensor(whole[name])).abs()
        if config == "zero3_offload":
            rounding = 1e-3 if "fp16" in method else 0.0  # of weights near 1
            assert difference[~_of_key_biases(tokenizer)].max() <= 1e-6 + rounding
        else:
            assert difference.max() == 0
    proposal = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "proposal")
    saved = torch.cat([p.detach().flatten() for p in proposal.parameters()])
    assert torch.equal(saved, torch.tensor(resumed["proposal"]))
    assert proposal.config.architectures == ["GPT2LMHeadModel"]


@pytest.mark.slow
def test_fsdp_may_checkpoint_the_activations_of_both_models(launch, tmp_path, tokenizer):
    """Its layers are wrapped for that, under other names; updates and files are the same, and runs resume."""
    build_model("gpt2", len(tokenizer), seed=2).eval().save_pretrained(tmp_path / "reference")
    command = [*launcher(2, "fsdp2"), "--fsdp_activation_checkpointing", "true", "-m", "tests.distributed_run"]
    command += [str(tmp_path), "4", "1"]
    result = result_of([*command, "leave one out"], tmp_path)
    assert result["wrapped"] == [True, True] and launch(2, 4, 1, config="fsdp2")["wrapped"] == [False, False]
    assert_equal(launch(1, 8, 1), result, METRICS)
    whole = result_of([*command, "checkpoints"], tmp_path)["parameters"]
    resumed = result_of([*command, "checkpoints", str(tmp_path / "run" / "checkpoint-2")], tmp_path)["parameters"]
    assert resumed == whole
    proposal = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "proposal")
    assert torch.equal(
        torch.cat([p.detach().flatten() for p in proposal.parameters()]), torch.tensor(whole["proposal"])
    )


def _of_key_biases(tokenizer):
    """Which parameters of the small GPT-2, all in one row, are biases of keys."""
    marks = []
    for name, parameter in build_model("gpt2", len(tokenizer)).named_parameters():
        mark = torch.zeros(parameter.numel(), dtype=torch.bool)
        if name.endswith("c_attn.bias"):
            mark[len(mark) // 3 : 2 * len(mark) // 3] = True
        marks.append(mark)
    return torch.cat(marks)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "precision"), [("zero2", None), ("zero2", "bfloat16"), ("zero3", None), ("zero3", "float16")]
)
def test_a_checkpoint_of_deepspeed_resumes_both_adapters(tmp_path, tokenizer, config, precision):
    """As above; in half precision the proposal's optimizer goes on from the float32 weights that were saved."""
    method = "adapters, checkpoints" + {None: "", "bfloat16": " in bf16", "float16": " in fp16"}[precision]
    build_model("gpt2", len(tokenizer), seed=2).eval().save_pretrained(tmp_path / "reference")
    command = [*launcher(2, config), "-m", "tests.distributed_run", str(tmp_path), "4", "1", method]
    folder, whole = tmp_path / "run", result_of(command, tmp_path)["parameters"]
    files = list((folder / "checkpoint-2").glob("global_step*/*model_states.pt"))
    names = {name for file in files for name in torch.load(file, weights_only=False)["module"]}
    assert any("default" in name for name in names)
    assert not any("proposal" in name for name in names)  # an upload of checkpoints would take it along
    for name, place in (("adapter", folder), ("proposal", folder / "proposal")):
        saved = PeftModel.from_pretrained(build_model("gpt2", len(tokenizer)), place)
        flat = torch.cat([p.detach().flatten() for key, p in saved.named_parameters() if "lora_" in key])
        flat = flat if precision is None else flat.to(getattr(torch, precision)).float()
        assert torch.equal(flat, torch.tensor(whole[name]))
    assert result_of([*command, str(folder / "checkpoint-2")], tmp_path)["parameters"] == whole


@pytest.mark.slow
@pytest.mark.parametrize("config", ["fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_the_example_runs_where_models_are_cut_apart(tmp_path, config):
    """With exact evaluation, in which all processes take part where they need one another."""
    command = [*launcher(2, config), "-m", "tests.distributed_example", "examples/repulse.py"]
    command += [*two_tokens.flags("repulse"), "--use_cpu", "true", "--max_steps", "5", "--max_completion_length", "1"]
    run_forked([*command, "--per_device_train_batch_size", "64", "--output_dir", str(tmp_path)])
    assert json.loads((tmp_path / "results.json").read_text())["policy_updates"] == 5
    assert (tmp_path / "proposal" / "model.safetensors").exists()
    assert len((tmp_path / "completions" / "before_after.md").read_text().splitlines()) == 12


@pytest.mark.invariant
@pytest.mark.parametrize(
    ("config", "batch_size", "accumulation", "method"),
    [
        (None, 2, 2, "adapters, checkpointed"),
        (None, 4, 1, "adapters, after"),
        pytest.param("zero2", 2, 2, "adapters, clipped", marks=needs_deepspeed),
        pytest.param("zero3", 2, 2, "adapters, clipped", marks=needs_deepspeed),
        pytest.param("zero2", 4, 1, "adapters, after", marks=ZERO),
        pytest.param("zero3", 4, 1, "adapters, checkpointed", marks=ZERO),
    ],
)
def test_two_processes_of_two_adapters_equal_one(launch, config, batch_size, accumulation, method):
    """One base, and one engine that has the policy's adapter alone; each adapter is clipped by its own norm."""
    alone = launch(1, 8, 1, method)
    assert_equal(alone, launch(2, batch_size, accumulation, method, config=config), METRICS)
    if method == "adapters, clipped":
        bound = ADAPTER_CLIP
        assert all(log[name] > 2 * bound for log in alone["logs"] for name in ("grad_norm", "proposal/grad_norm"))


def assert_equal(alone, together, metrics):
    assert set(metrics) <= set(alone["logs"][0])
    for name, expected in alone["parameters"].items():
        actual = torch.tensor(together["parameters"][name])
        torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    for one, two in zip(alone["logs"], together["logs"], strict=True):
        expected = {name: one[name] for name in metrics if name in one}
        assert {name: two[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


# In each: how one process trains, how two do, and what is compared
@pytest.mark.parametrize(
    ("config", "method", "one", "two"),
    [
        ("cpu_ddp", "reused", (2, 2), (2, 1)),
        pytest.param("zero2", "reused", (2, 2), (2, 1), marks=ZERO),
        pytest.param("cpu_ddp", "iterable", (8, 1), (4, 1), marks=pytest.mark.slow),
        pytest.param("cpu_ddp", "checkpointed", (8, 1), (4, 1), marks=pytest.mark.slow),
    ],
)
def test_settings_of_training_hold_for_both_models(launch, config, method, one, two):
    """`num_iterations` with `steps_per_generation`, an iterable data set, gradient checkpointing (equal to none)."""
    alone = launch(1, *one, "leave one out" if method == "checkpointed" else method)
    assert_equal(alone, launch(2, *two, method, config=config), METRICS)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_weights_in_parts_are_gathered_again_for_what_is_recomputed(launch, config):
    together = launch(2, 4, 1, "checkpointed", config=config)
    assert_equal(launch(1, 8, 1, "leave one out"), together, METRICS)


@pytest.mark.parametrize("config", ["cpu_ddp", pytest.param("zero2", marks=ZERO)])
def test_two_processes_evaluate_what_one_evaluates(launch, config):
    alone, together = launch(1, 8, 1, "evaluated"), launch(2, 4, 1, "evaluated", config=config)
    assert len(alone["evaluations"]) == len(together["evaluations"]) == 3
    for one, two in zip(alone["evaluations"], together["evaluations"], strict=True):
        expected = {name: value for name, value in one.items() if "runtime" not in name and "per_second" not in name}
        assert {"eval_loss", "eval_kl", "eval_proposal/log_z", "eval_proposal/reward"} <= set(expected)
        assert {name: two[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "precision"),
    [
        *itertools.product(("cpu_ddp", "fsdp2"), ("bf16", "fp16")),
        *(pytest.param("zero2", name, marks=needs_deepspeed) for name in ("fp16", "adapters, fp16")),
        *(pytest.param("zero3", name, marks=needs_deepspeed) for name in ("bf16", "fp16", "adapters, fp16")),
    ],
)
def test_both_models_train_in_half_precision(launch, config, precision):
    """As one process does, to the format's precision, and not as in float32."""
    rel, error = (1e-4, 0.15) if precision == "bf16" else (1e-6, 0.02)
    exact = launch(1, 8, 1, "adapters" if precision.startswith("adapters") else "leave one out")
    alone, together = launch(1, 8, 1, precision), launch(2, 4, 1, precision, config=config)
    for name in ("loss", "proposal/loss", "grad_norm", "proposal/grad_norm"):
        assert together["logs"][0][name] != pytest.approx(exact["logs"][0][name], rel=rel)
        for one, two in zip(alone["logs"], together["logs"], strict=True):
            assert two[name] == pytest.approx(one[name], rel=error, abs=1e-3)


@needs_deepspeed
@pytest.mark.slow
def test_several_machines_train_and_resume_both_models(launch, tmp_path, tokenizer):
    """Two launchers, each with a process and a rank as on a machine of its own, that meet by address and share a folder."""
    build_model("gpt2", len(tokenizer), seed=2).eval().save_pretrained(tmp_path / "reference")
    run_on_two = functools.partial(train, tmp_path, 2, 4, 1, config="multi_node_zero3", machines=2)
    assert_equal(launch(1, 8, 1), run_on_two("leave one out"), METRICS)
    whole = run_on_two("checkpoints")["parameters"]
    assert run_on_two("checkpoints", checkpoint=tmp_path / "run" / "checkpoint-2")["parameters"] == whole


def test_a_process_that_fails_is_noticed(tmp_path):
    command = [*launcher(2, None), "-m", "tests.distributed_run", str(tmp_path), "4", "1", "no such method"]
    with pytest.raises(AssertionError, match="KeyError: 'no such method'"):
        run_forked(command)


def test_the_comparison_can_fail(launch):
    plain, normalized = launch(1, 8, 1), launch(1, 8, 1, "REINFORCE++-baseline")
    assert plain["logs"][0]["loss"] != pytest.approx(normalized["logs"][0]["loss"], rel=1e-4)


@pytest.mark.slow
def test_groups_normalised_within_a_process_would_be_noticed(launch):
    """Each of two processes holds two of a prompt's four completions; the mistake compares these with one another alone."""
    alone = launch(1, 4, 1)
    assert_equal(alone, launch(2, 2, 1), METRICS)
    with pytest.raises(AssertionError):
        assert_equal(alone, launch(2, 2, 1, "within a process"), METRICS)


def test_two_processes_of_ppo_equal_one(launch):
    """Whitening, explained variance and both losses run over all processes' tokens, of which each has its own number."""
    alone = launch(1, 8, 1, "PPO")
    assert alone["logs"][1]["value/clip_fraction"] > 0
    assert_equal(alone, launch(2, 2, 2, "PPO"), PPO_METRICS)


@pytest.mark.parametrize(
    "config", ["cpu_ddp", pytest.param("fsdp2", marks=pytest.mark.slow), pytest.param("zero3", marks=ZERO)]
)
def test_tails_are_reported_by_two_processes(launch, config):
    """Held-out completions, an odd number of them, shared by the processes: each is rewarded once, by its prompt."""
    tails = launch(2, 4, 1, "tails", config=config)["tails"]
    assert [(update, samples) for update, samples, _ in tails] == [(2, 9), (3, 9)]
    assert all(10 < mean < 10.5 for *_, mean in tails)


@pytest.mark.parametrize("method", ["hot", pytest.param("proposal", marks=pytest.mark.slow)])
def test_agents_act_in_two_processes(tmp_path, method):
    """Where the episodes of one of them begin with words of their own: both end with the same weights."""
    shop.build_policy(tmp_path / "policy", steps=120, batch_size=32)
    command = [*launcher(2, "cpu_ddp"), "-m", "tests.acting_run", str(tmp_path), str(tmp_path / "policy"), method]
    result = result_of(command, tmp_path)
    assert result["world_size"] == 2 and len(set(result["weights"])) == 1
    first = result["log"][0]
    assert first["tools/call_frequency"] > 0.5 and first["proposal/tools/call_frequency"] > 0
    assert first["proposal/bad_fraction"] > 0


@pytest.mark.parametrize("config", [pytest.param("fsdp2", marks=pytest.mark.slow), pytest.param("zero3", marks=ZERO)])
def test_agents_are_refused_where_processes_would_wait_for_each_other(tmp_path, config):
    shop.build_policy(tmp_path / "policy", steps=1, batch_size=2)
    done = run_forked([*launcher(2, config), "-m", "tests.acting_run", str(tmp_path), str(tmp_path / "policy"), "hot"])
    assert "different numbers of turns" in done.stdout and not (tmp_path / "result.json").exists()


# RePULSe on PPO and GRPO, between whose processes a prompt is cut apart
NAMES = ("loss", "proposal/loss", "proposal/ess", "proposal/log_z", "negative/ess", "negative/p_bad", "value/loss")


@pytest.fixture(scope="module")
def launch_rows(tmp_path_factory):
    @functools.cache
    def launch(processes, config=None):
        folder = tmp_path_factory.mktemp("run")
        run_forked([*launcher(processes, config), "-m", "tests.rows_run", str(folder), str(12 // processes)])
        return torch.load(folder / "found.pt", weights_only=False)

    return launch


@pytest.mark.invariant
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "config",
    [
        None,
        *(pytest.param(name, marks=ZERO) for name in ("zero2", "zero3")),
        pytest.param("fsdp2", marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_what_one_trains(launch_rows, config, method):
    alone = launch_rows(1)
    one, log, processes, _, shared = alone[method]
    two, other_log, other_processes, engines, others_shared = launch_rows(2, config)[method]
    assert (processes, other_processes, engines) == (1, 2, {config})
    assert min(shared) > 1 and min(others_shared) > 1
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p, q, atol=2e-6, rtol=1e-5)
    assert sum(name in log for name in NAMES) > 1
    for name in NAMES:
        assert log.get(name) == pytest.approx(other_log.get(name), abs=1e-4)
    other = next(each for each in METHODS if each != method)
    assert any(not torch.allclose(p, q) for p, q in zip(one, alone[other][0], strict=False))  # the control
