"""Tensors in files, read one at a time and written as they come: a conversion holds one of them in memory, not a draft.

`safetensors.torch.save_file` wants all tensors at once, so the writer here lays out the same bytes from their shapes.
"""

import json
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


# Names of the safetensors format.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is read when asked for, every time anew."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> "StoredTensor":
        """One that is in memory already."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor)

    def to(self, dtype: torch.dtype) -> "StoredTensor":
        """The same in another float type, rounded when read."""
        return self if dtype == self.dtype else StoredTensor(dtype, self.shape, lambda: self.read().to(dtype))


def open_tensors(folder: str | Path) -> dict[str, StoredTensor]:
    """
    The tensors of a checkpoint folder by name: safetensors, else `pytorch_model.bin`, whole or in shards.

    Raises:
        FileNotFoundError: There are no weights, or a shard is missing.
        ValueError: A file is truncated, holds more than tensors, or is not what its index says.
    """
    folder = Path(folder)
    for stem, suffix, read_file in (
        ("model", ".safetensors", _open_safetensors),
        ("pytorch_model", ".bin", _open_pickle),
    ):
        if (folder / f"{stem}{suffix}").exists():
            return read_file(folder / f"{stem}{suffix}")
        index = folder / f"{stem}{suffix}.index.json"
        if index.exists():
            return _open_shards(index, read_file)
    raise FileNotFoundError(
        f"{folder} holds no weights: expected model.safetensors, its shards with an index, or pytorch_model.bin."
    )


def _open_shards(index: Path, read_file: Callable[[Path], dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    tensors = {}
    for shard in sorted(set(listed.values())):
        if not (index.parent / shard).exists():
            raise FileNotFoundError(f"{index} names {shard}, which is not there: copy the missing shard.")
        tensors |= read_file(index.parent / shard)
    if tensors.keys() != listed.keys():
        raise ValueError(
            f"{index} and its shards disagree about {sorted(tensors.keys() ^ listed.keys())}: copy the files again."
        )
    return tensors


def _open_safetensors(path: Path) -> dict[str, StoredTensor]:
    def read(name: str) -> Tensor:
        # Opened for each tensor: what one file handle has read stays mapped in memory until it is closed.
        with safe_open(path, "pt") as file:
            return file.get_tensor(name)

    try:
        with safe_open(path, "pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(DTYPES[part.get_dtype()], tuple(part.get_shape()), lambda name=name: read(name))
                for name, part in parts.items()
            }
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or damaged ({error}): copy it again.") from None
    except KeyError as error:
        raise ValueError(f"{path} holds tensors of type {error}, which is no draft's: is it quantised?") from None


def _open_pickle(path: Path) -> dict[str, StoredTensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors, and could run code when loaded, so it was not: "
            f"{str(error).splitlines()[0]}"
        ) from None
    except (RuntimeError, OSError) as error:  # a file of odd length cannot be mapped
        raise ValueError(f"{path} is truncated, damaged or older than torch 1.6 ({error}): copy it again.") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} is no plain dictionary of tensors: save the draft's `state_dict()` alone.")
    return {name: StoredTensor.of(tensor) for name, tensor in state.items()}


def write_safetensors(path: str | Path, tensors: dict[str, StoredTensor]) -> None:
    """Writes one file, reading one tensor after the other; for one dtype, byte for byte what `save_file` writes."""
    header: dict = {"__metadata__": {"format": "pt"}}
    end = 0
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    for name in names:
        stored = tensors[name]
        begin, end = end, end + stored.dtype.itemsize * torch.Size(stored.shape).numel()
        header[name] = {
            "dtype": DTYPE_NAMES[stored.dtype],
            "shape": list(stored.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            tensor = tensors[name].read()
            if (tensor.dtype, tuple(tensor.shape)) != (tensors[name].dtype, tensors[name].shape):
                raise ValueError(f"`{name}` changed while it was converted: start again.")
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        file.flush()
        os.fsync(file.fileno())


def refuse_existing(destination: str | Path, *, force: bool) -> None:
    """FileExistsError where `destination` exists and may not be replaced."""
    destination = Path(destination)
    if destination.exists() and not force:
        raise FileExistsError(f"{destination} exists: name another folder, or add `--force` to replace it.")
    if destination.exists() and not destination.is_dir():
        raise FileExistsError(f"{destination} is a file, not a folder: name another one.")


@contextmanager
def new_folder(destination: str | Path, *, force: bool) -> Iterator[Path]:
    """
    A folder to write into, which becomes `destination` when the block ends and vanishes when it fails.

    Raises:
        FileExistsError: `destination` exists and `force` is not set.
    """
    refuse_existing(destination, force=force)
    destination = Path(destination).absolute()
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.") as unfinished:
        folder, replaced = Path(unfinished, "new"), Path(unfinished, "replaced")
        folder.mkdir()
        yield folder
        if destination.exists():
            destination.rename(replaced)
        try:
            folder.rename(destination)
        except OSError:
            if replaced.exists():
                replaced.rename(destination)
            raise


def is_float(dtype: torch.dtype) -> bool:
    """Whether weights may be held in it as they are; eight-bit floats belong to a quantised file."""
    return dtype.is_floating_point and dtype.itemsize > 1


__all__ = ["StoredTensor", "is_float", "new_folder", "open_tensors", "refuse_existing", "write_safetensors"]
