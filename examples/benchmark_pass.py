"""What a pass over several tokens costs in units of a pass over one: the price of verifying a draft on this machine.

    python examples/benchmark_pass.py TARGET                    # on a CPU in float32: plain and packed weights
    python examples/benchmark_pass.py TARGET --dtype bfloat16   # as a GPU decodes

A draft of K tokens pays when τ exceeds the factor at K + 1 and the draft's own share together. Widths and weights are
measured in turns.
"""

import argparse
import statistics
import time

import torch
from transformers import DynamicCache
from transformers.utils import logging

from modeling_domino.loading import load_target
from modeling_domino.packed_linear import pack_linears


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="Hub id, folder or .gguf file")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", help="the first accelerator, else the CPU, when absent")
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2, 5, 9, 17], help="widths, besides 1")
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args()


@torch.inference_mode()
def seconds(target, ids: torch.Tensor, cache: DynamicCache) -> float:
    """Of one pass over `ids`, which leaves the cache as it was."""
    started = time.perf_counter()
    target(ids, cache=cache)
    if ids.device.type != "cpu":
        torch.accelerator.synchronize(ids.device)
    elapsed = time.perf_counter() - started
    cache.crop(-ids.shape[1])
    return elapsed


@torch.inference_mode()
def main() -> None:
    options = parse_arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    targets = {"plain": load_target(options.target, dtype=options.dtype, device=options.device)[0]}
    device = targets["plain"].device
    if device.type == "cpu" and targets["plain"].dtype == torch.float32:
        targets["packed"] = load_target(options.target, dtype=options.dtype, device=options.device)[0]
        pack_linears(targets["packed"])
    torch.manual_seed(0)
    ids = torch.randint(targets["plain"].config.vocab_size, (1, options.context), device=device)
    caches = {name: target(ids, logits_to_keep=1).past_key_values for name, target in targets.items()}
    times: dict[tuple[str, int], list[float]] = {(name, n): [] for n in (1, *options.tokens) for name in targets}
    for _ in range(options.repeats + 1):
        for name, n in times:
            times[name, n].append(seconds(targets[name], ids[:, :n], caches[name]))
    median = {key: statistics.median(all_times[1:]) for key, all_times in times.items()}  # the first is a warm-up
    print(
        f"{options.context} tokens in the cache, {options.dtype}, {torch.get_num_threads()} threads on {device}, torch "
        f"{torch.__version__}, medians of {options.repeats}"
    )
    for name in targets:
        one = median[name, 1]
        factors = ", ".join(f"{n}: {median[name, n] / one:.2f}" for n in options.tokens)
        print(f"{name}: {1000 * one:.1f} ms over one token; times as long over {factors}")


if __name__ == "__main__":
    main()
