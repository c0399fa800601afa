"""`.pt` files of strangers: only through torch's weights_only, mapped instead of read, one line where that fails."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

from recorder.importers.dump import DumpError


def load_torch(file: Path) -> Any:
    """What `torch.save` wrote: tensors, numbers, texts, lists and dicts; nothing else can be in it.

    Tensors lie in the mapped file, on the CPU whatever device they came from.

    Raises:
        DumpError: not such a file, cut off, with other objects in its pickle, or packed so that it could unfold to
            more than lies there.
    """
    import torch  # loaded only where a `.pt` file is read

    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        raise DumpError(file, "is no file of torch.save, or is cut off") from None
    # torch.save stores without compression; packed entries could unfold to any size
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size for entry in entries):
        raise DumpError(file, "has packed entries, which torch.save does not write")
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line or "nsupported" in line), "")
        raise DumpError(
            file, f"holds objects other than tensors, numbers, texts, lists and dicts: refused. {reason.strip()[:160]}"
        ) from None
    except Exception as error:  # torch raises nearly anything on bytes that are not its own
        line = next(iter(str(error).splitlines()), "")[:160]
        raise DumpError(file, f"torch cannot read it: {type(error).__name__}: {line}") from None


def stored(file: Path, name: str, tensor: Any) -> Any:
    """`tensor` as a numpy view, if it is whole numbers of which the file holds every element."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise DumpError(file, f"{name} is a {type(tensor).__name__}, expected a tensor of whole numbers")
    whole = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if tensor.dtype not in whole or tensor.layout != torch.strided:
        raise DumpError(file, f"{name} has dtype {tensor.dtype}, expected a tensor of whole numbers")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise DumpError(file, f"{name} declares shape {tuple(tensor.shape)} and stores less")
    return tensor.detach().numpy()
