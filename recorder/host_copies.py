"""Tensors on their way to the host: on CUDA without the training thread ever waiting for the device.

A copy to pageable memory, or `.item()`, makes the caller wait until the device has caught up. Here each copy goes to
pinned memory on a stream of its own: it waits for what the training stream has queued until then, the training stream
waits for nothing, and whoever reads the numbers later (the recorder's thread) waits for an event.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_streams: dict[torch.device, torch.cuda.Stream] = {}


class HostCopy:
    """Tensors as they are now, for another thread to read once they are on the host.

    tensors: all on one device. fresh: nobody else holds them, so that on the CPU they need no copy; otherwise they
    are cloned there, since training may change them in place.
    """

    def __init__(self, tensors: Sequence[Tensor], *, fresh: bool = False) -> None:
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._done: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._tensors, self._done = _to_pinned(tensors)
        else:
            # a device of another kind (MPS, say) copies as it can: .cpu() waits there
            kept = [tensor.detach().cpu() for tensor in tensors]
            self._tensors = (
                kept
                if fresh
                else [
                    copy.clone() if copy.data_ptr() == tensor.data_ptr() else copy
                    for copy, tensor in zip(kept, tensors, strict=True)
                ]
            )

    def arrays(self) -> list[np.ndarray]:
        """The tensors as numpy arrays, in order. Waits for the device where that is not there yet."""
        if self._done is not None:
            self._done.synchronize()  # without the GIL: training goes on
            self._done = None
        return [tensor.numpy() for tensor in self._tensors]


def _to_pinned(tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
    device = tensors[0].device
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    side = _streams[device]
    side.wait_stream(torch.cuda.current_stream(device))
    copies = []
    with torch.cuda.stream(side):
        for tensor in tensors:
            source = tensor.detach()
            copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            copy.copy_(source, non_blocking=True)
            # its memory is given out again only when the side stream has read it
            source.record_stream(side)
            copies.append(copy)
        done = torch.cuda.Event()
        done.record(side)
    return copies, done


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`, without waiting: what comes from the host goes through pinned memory."""
    if tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
