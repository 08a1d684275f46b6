"""Two gloo processes on the CPU: data parallel training equal to one process, sharded weights, a whole save."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import free_port, make_draft, make_target
from peft import get_peft_model
from safetensors.torch import load_file
from test_training import arguments, rows

from modeling_domino import DominoTrainer
from modeling_domino.adaptation import lora_config


TESTS = Path(__file__).parent


def train(output: str, processes: int, lora: bool = False) -> None:
    """Three steps of the same four rows, whatever the number of processes; half of the rows have no anchor."""
    target = make_target()
    args = arguments(
        output,
        max_steps=3,
        per_device_train_batch_size=4 // processes,
        num_anchors=5,
        learning_rate=0.1,
        optim="sgd",
        max_grad_norm=0.0,
        logging_steps=1,
        warmup_steps=0,
    )
    data = [*rows(8), *[{"input_ids": [3, 4, 5], "loss_mask": [0, 0, 1]}] * 8]
    draft = make_draft(target)
    if lora:
        torch.manual_seed(0)
        draft = get_peft_model(draft, lora_config(r=4))
    trainer = DominoTrainer(draft, target, args, train_dataset=data)
    assert trainer.args.world_size == processes
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def launch(script: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    result = subprocess.run(
        [*command, "--master_port", str(free_port()), str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("lora", [False, True], ids=["draft", "adapter"])
def test_two_processes_train_the_draft_of_one(tmp_path, lora):
    """
    Also when a process gets rows without any anchor, and from λ = 1 on, where the head has no gradient yet. By SGD:
    Adam's first steps are signs, and a gradient of nothing but rounding has either.
    """
    train(str(tmp_path / "1"), 1, lora)
    script = tmp_path / "run.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        f"from test_distributed import train; train({str(tmp_path / '2')!r}, 2, {lora})\n"
    )
    launch(script)
    results = {}
    for processes in (1, 2):
        output = tmp_path / str(processes)
        log = json.loads((output / "trainer_state.json").read_text())["log_history"]
        results[processes] = load_file(output / f"{'adapter_' * lora}model.safetensors"), log
    (one, one_log), (two, two_log) = results[1], results[2]
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=2e-5, rtol=1e-3, msg=name)
    for entry, other in zip(one_log, two_log, strict=True):
        for key in ("loss", "base_loss", "final_loss", "accept_len", "lambda_base", "acceptance_1"):
            if key in entry:
                assert other[key] == pytest.approx(entry[key], rel=1e-3, abs=1e-4), key


SHARDED = """
import sys; sys.path.insert(0, {tests!r})
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from conftest import *
from test_training import arguments, rows
from modeling_domino import DominoForSpeculativeDraft, DominoTrainer
dist.init_process_group("gloo")
target = make_target()
draft = make_draft(target).train()
trainer = DominoTrainer(draft, target, arguments({output!r}), train_dataset=rows())
trainer.state.max_steps, trainer.state.global_step = 4, 1
batch = trainer.data_collator(rows(4))
loss = trainer.compute_loss(draft, batch)
loss.backward()
expected = {{name: parameter.grad.clone() for name, parameter in draft.named_parameters()}}
draft.zero_grad()
for layer in draft.layers:
    fully_shard(layer)
fully_shard(draft)
for name, parameter in draft.named_parameters():
    assert isinstance(parameter, DTensor), name
    assert parameter.to_local().numel() < parameter.numel() or parameter.shape[0] == 1, name
sharded = trainer.compute_loss(draft, batch)
sharded.backward()
torch.testing.assert_close(sharded, loss, atol=1e-5, rtol=1e-5)
for name, parameter in draft.named_parameters():
    torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], atol=1e-5, rtol=1e-3, msg=name)
whole = get_model_state_dict(draft, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    plain = DominoForSpeculativeDraft(draft.config)
    for name, tensor in plain.state_dict().items():
        assert whole[name].shape == tensor.shape, name
    plain.save_pretrained({output!r}, state_dict=dict(whole))
    again = DominoForSpeculativeDraft.from_pretrained({output!r})
    assert all(torch.equal(value, whole[name]) for name, value in again.state_dict().items())
dist.barrier()
dist.destroy_process_group()
"""


def test_fully_sharded_weights_give_the_same_gradients_and_a_whole_checkpoint(tmp_path):
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED.format(tests=str(TESTS), output=str(tmp_path / "out")))
    launch(script)
    assert (tmp_path / "out" / "model.safetensors").exists()
