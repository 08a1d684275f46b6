"""Cache of context hidden states on disk: what the target's tapped layers give for each row, computed once.

Training then needs no pass of the target, only its embeddings and head. Shards are safetensors files in the target's
dtype; a fingerprint ties them to the target's weights and to the tapped layers.
"""

import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from .target_domino import BorrowedTarget


MANIFEST = "features.json"


def feature_bytes(rows: Dataset | list[dict], target: PreTrainedModel, layer_ids: list[int]) -> int:
    """Size of the cache of `rows`: taps · H numbers for each token but a row's last, which no block sees."""
    hidden = target.config.get_text_config(decoder=True).hidden_size
    tokens = sum(len(row["input_ids"]) - 1 for row in rows)
    return tokens * len(layer_ids) * hidden * target.dtype.itemsize


def target_fingerprint(target: PreTrainedModel, layer_ids: list[int]) -> str:
    """Hash of the tapped layers and of a sample of every weight up to the last of them."""
    borrowed = BorrowedTarget(target)
    digest = hashlib.blake2b(json.dumps(list(layer_ids)).encode(), digest_size=16)
    for module in (borrowed.embedding, *borrowed.layers[: max(layer_ids) + 1]):
        _add_weights(digest, module)
    return digest.hexdigest()


def weights_fingerprint(model: torch.nn.Module) -> str:
    """Hash of a sample of every weight."""
    digest = hashlib.blake2b(digest_size=16)
    _add_weights(digest, model)
    return digest.hexdigest()


def _add_weights(digest, module: torch.nn.Module) -> None:
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
            flat = tensor.detach().flatten()
            sample = flat[:: max(1, flat.numel() // 256)].to("cpu", torch.float32)
            digest.update(name.encode() + sample.numpy().tobytes())


def rows_fingerprint(rows: Dataset | list[dict]) -> str:
    """Hash of the token ids of all rows, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(torch.as_tensor(row["input_ids"], dtype=torch.int64).numpy().tobytes() + b"|")
    return digest.hexdigest()


@torch.no_grad()
def write_features(
    rows: Dataset | list[dict],
    target: PreTrainedModel,
    layer_ids: list[int],
    folder: str | Path,
    *,
    batch_size: int = 8,
    shard_bytes: int = 1 << 30,
) -> None:
    """
    Runs the target once over every row. A run that dies goes on at the first missing shard.

    Args:
        rows: With `input_ids`.
        target: The model to draft for.
        layer_ids: Zero-based tapped layers.
        folder: Of the shards.
        batch_size: Rows per forward pass.
        shard_bytes: Rough size of a shard.

    Raises:
        OSError: The disk has too little room for what is still to be written.
        ValueError: The folder holds features of other rows, another target or other layers.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [len(row["input_ids"]) - 1 for row in rows]
    per_token = feature_bytes([{"input_ids": [0, 0]}], target, layer_ids)
    shards, size = [[]], 0
    for index, length in enumerate(lengths):
        if size > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(index)
        size += length * per_token
    manifest = {
        "fingerprint": target_fingerprint(target, layer_ids),
        "target": target.config.name_or_path,
        "revision": getattr(target.config, "_commit_hash", None),
        "target_layer_ids": list(layer_ids),
        "dtype": str(target.dtype).removeprefix("torch."),
        "rows": len(lengths),
        "rows_fingerprint": rows_fingerprint(rows),
        "tokens": sum(lengths),
        "shard_starts": [shard[0] for shard in shards],
    }
    path = folder / MANIFEST
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        for key, value in manifest.items():
            if before[key] != value:
                raise ValueError(
                    f"{folder} holds features with {key} {before[key]!r}, not {value!r}: choose another folder or "
                    "delete it."
                )
    else:
        path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    missing = [(n, shard) for n, shard in enumerate(shards) if not _shard(folder, n).exists()]
    needed = sum(lengths[i] for _, shard in missing for i in shard) * per_token
    if needed > (free := shutil.disk_usage(folder).free):
        raise OSError(f"{folder} needs {needed / 1e9:.1f} GB more, and its disk has {free / 1e9:.1f} GB left.")
    borrowed = BorrowedTarget(target)
    with tqdm(total=sum(len(shard) for _, shard in missing), desc="features", unit="row") as progress:
        for number, shard in missing:
            tensors = {}
            by_length = sorted(shard, key=lengths.__getitem__)
            for start in range(0, len(by_length), batch_size):
                batch = by_length[start : start + batch_size]
                ids = [torch.as_tensor(rows[i]["input_ids"]) for i in batch]
                input_ids = pad_sequence(ids, batch_first=True).to(target.device)
                mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True).to(target.device)
                with borrowed.tap(layer_ids) as taps:
                    target.get_decoder()(input_ids=input_ids, attention_mask=mask, use_cache=False)
                    states = taps.take().to("cpu", target.dtype)
                tensors |= {str(i): states[n, : lengths[i]].clone() for n, i in enumerate(batch)}
                progress.update(len(batch))
            unfinished = _shard(folder, number).with_suffix(".unfinished")
            save_file(tensors, unfinished)
            unfinished.rename(_shard(folder, number))


class RowsWithFeatures(Dataset):
    """
    Training rows that bring their cached `context_hidden_states`.

    Args:
        rows: The rows that the cache was written for.
        folder: Of the shards.
        target: The model to draft for.
        layer_ids: Tapped layers of the draft.

    Raises:
        ValueError: The cache is not finished, or was made from another target, other layers or other rows.
    """

    def __init__(self, rows: Dataset | list[dict], folder: str | Path, target: PreTrainedModel, layer_ids: list[int]):
        self.rows, self.folder = rows, Path(folder)
        self.manifest = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
        if self.manifest["target_layer_ids"] != list(layer_ids):
            raise ValueError(
                f"{folder} holds features of target layers {self.manifest['target_layer_ids']}, and the draft taps "
                f"{list(layer_ids)}: prepare features for these layers, or train a draft with the others."
            )
        if self.manifest["fingerprint"] != target_fingerprint(target, layer_ids):
            raise ValueError(
                f"{folder} holds features of another target ({self.manifest['target']!r}, revision "
                f"{self.manifest['revision']}), not of {target.config.name_or_path!r} as it was loaded now: load that "
                f"one in {self.manifest['dtype']}, or prepare features again."
            )
        if self.manifest["rows_fingerprint"] != rows_fingerprint(rows):
            raise ValueError(
                f"{folder} holds features of {self.manifest['rows']} other rows than the {len(rows)} of this data: "
                "delete it and prepare features again."
            )
        missing = [n for n in range(len(self.manifest["shard_starts"])) if not _shard(self.folder, n).exists()]
        if missing:
            raise ValueError(f"{folder} lacks shards {missing}: run the same `domino prepare` again to finish it.")
        self._open: dict[int, safe_open] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        starts = self.manifest["shard_starts"]
        number = sum(start <= index for start in starts) - 1
        if number not in self._open:
            self._open[number] = safe_open(_shard(self.folder, number), framework="pt")
        return {**self.rows[index], "context_hidden_states": self._open[number].get_tensor(str(index))}

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": {}}  # workers open their own files


def _shard(folder: Path, number: int) -> Path:
    return folder / f"features-{number:05d}.safetensors"


__all__ = [
    "RowsWithFeatures",
    "feature_bytes",
    "rows_fingerprint",
    "target_fingerprint",
    "weights_fingerprint",
    "write_features",
]
