"""Host-side TMA descriptors of the Hopper kernels; two kinds, as in `moe.kernels.common.tiles`."""

from __future__ import annotations

import functools

from torch import Tensor

from moe.kernels.hopper.device import TensorDescriptor, gl


@functools.cache
def _layout(block: tuple[int, ...]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)


def _descriptor(t: Tensor, shape: list, strides: list, block: list) -> TensorDescriptor:
    """A descriptor without the checks of its constructor, which cost as much as a launch does.

    What they check holds here: `configs.addressable` for base and strides, tested blocks.
    """
    made = object.__new__(TensorDescriptor)
    made.__dict__ = {
        "base": t, "shape": shape, "strides": strides, "block_shape": block,
        "layout": _layout(tuple(block)), "padding": "zero", "round_f32_to_tf32": False,
    }  # fmt: skip
    return made


def plain(t: Tensor, block: list[int]) -> TensorDescriptor:
    """Reads outside give zeros, writes outside are dropped."""
    return _descriptor(t, list(t.shape), list(t.stride()), block)


def ragged(t: Tensor, block: list[int]) -> TensorDescriptor:
    """Descriptor whose bounds are a run of rows named at run time; see `ragged_descriptor` of
    `moe.kernels.common.tiles`.

    An access at (2^30, end, 2^30 - (end - start) + i, column) addresses row start + i and is cut
    off at `end`.
    """
    stride = t.stride(0)
    far = 0x7FFF0000
    block = [1, 1, *block]
    shape, strides = [far, far, 2**30, t.shape[1]], [2**34 - stride, stride, stride, 1]
    return _descriptor(t, shape, strides, block)
