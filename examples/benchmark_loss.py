"""Peak memory and time of the chunked two-term loss against the naive form, side by side.

    python examples/benchmark_loss.py                        # Qwen3-0.6B's head, 64 anchors of 16 predictions
    python examples/benchmark_loss.py --anchors 256 --chunk-size 1024 --device cuda --dtype bfloat16

Each form runs in processes of its own, in turn, so that neither inherits the other's memory.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch
from torch.nn import functional as F

from modeling_domino.losses import two_term_loss


def naive(hidden_states, features, w2, head, labels, weights, lambda_base, normalizer, chunk_size):
    """All logits of both heads at once, as the formula is written."""
    base = head(hidden_states)
    final = base + F.linear(features, w2)
    terms = [
        (F.cross_entropy(logits.float(), labels, reduction="none") * weights).sum() / normalizer
        for logits in (base, final)
    ]
    return (1 - lambda_base) * terms[1] + lambda_base * terms[0]


def chunked(*arguments):
    return two_term_loss(*arguments[:-1], chunk_size=arguments[-1]).loss


def resident_bytes(field: str) -> int:
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def measure(options: argparse.Namespace) -> dict:
    """Peak memory above what inputs and weights take, and seconds of one forward and backward pass."""
    torch.manual_seed(0)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    positions = options.anchors * options.predictions
    head = torch.nn.Linear(options.hidden, options.vocabulary, bias=False, device=device, dtype=dtype)
    head.requires_grad_(False)
    shapes = ((positions, options.hidden), (positions, options.rank), (options.vocabulary, options.rank))
    inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    labels = torch.randint(0, options.vocabulary, (positions,), device=device)
    weights = torch.rand(positions, device=device)
    form = {"naive": naive, "chunked": chunked}[options.form]
    seconds = []
    before = torch.accelerator.memory_allocated() if device.type != "cpu" else resident_bytes("VmRSS")
    for _ in range(options.repeats):
        for tensor in inputs:
            tensor.grad = None
        started = time.perf_counter()
        loss = form(*inputs, head, labels, weights, 0.5, weights.sum(), options.chunk_size)
        loss.backward()
        value = loss.item()
        seconds.append(time.perf_counter() - started)
    peak = torch.accelerator.max_memory_allocated() if device.type != "cpu" else resident_bytes("VmHWM")
    return {"bytes": peak - before, "seconds": min(seconds), "loss": value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--predictions", type=int, default=16, help="per anchor")
    parser.add_argument("--chunk-size", type=int, default=128, help="positions whose logits are alive at once")
    parser.add_argument("--repeats", type=int, default=2, help="passes of a process, the fastest of which counts")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each form, in turn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--form", choices=("naive", "chunked"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.form:
        print(json.dumps(measure(options)))
        return
    results: dict[str, list[dict]] = {"naive": [], "chunked": []}
    for _ in range(options.rounds):
        for form, measured in results.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--form", form]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            measured.append(json.loads(run.stdout.splitlines()[-1]))
    typical = {
        form: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for form, runs in results.items()
    }
    for form, numbers in typical.items():
        print(f"{form:8} {numbers['bytes'] / 1e6:8.0f} MB  {numbers['seconds']:6.2f} s  loss {numbers['loss']:.4f}")
    ratio = {key: typical["chunked"][key] / typical["naive"][key] for key in ("bytes", "seconds")}
    print(
        f"chunked / naive: memory {ratio['bytes']:.2f}, time {ratio['seconds']:.2f} (medians of {options.rounds} "
        f"processes, {options.anchors} x {options.predictions} positions, vocabulary {options.vocabulary}, chunks of "
        f"{options.chunk_size}, {options.dtype} on {options.device}, {torch.get_num_threads()} threads)"
    )


if __name__ == "__main__":
    main()
