"""Calls of DTensors: operands sharded by batch and heads are attended to shard by shard, and nothing travels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

BATCH_AND_HEADS = (0, 1)
"""Dimensions that may be sharded. Tokens are fp8attn.distributed.context_parallel_sdpa's."""


def is_dtensor(x: object) -> bool:
    """Whether x is a DTensor. Compared by name: importing its module takes long, and who has one has imported it."""
    return type(x).__name__ == "DTensor" and type(x).__module__.startswith("torch.distributed")


def attend_by_shards(
    function: Callable[..., Any], query: Any, key: Any, value: Any, attn_mask: Any, *, return_lse: bool, sinks: Any, **options: Any
) -> Any:
    """Attention of DTensors, by `function` on each rank's shards.

    Args:
        function: as fp8attn.sdpa.
        query, key, value: DTensors (B, H, S, D) of one mesh. Along every dimension of the mesh, each of them is sharded
            by batch or by heads, all three alike, or all are replicated. What has a batch or heads of 1 is replicated.
        attn_mask: None; a DTensor, sharded likewise where its size isn't 1; or a tensor that is the same on all ranks,
            whose size is 1 in every sharded dimension.
        sinks: None.

    Returns:
        out, or out and LSE, as DTensors sharded as query is.

    Raises:
        TypeError, ValueError: an argument isn't as above.
    """
    if sinks is not None:
        raise ValueError(f"sinks is a {type(sinks).__name__} and query a DTensor; it must be None: a rank has some of the heads")
    for name, x in (("key", key), ("value", value)):
        if not is_dtensor(x):
            raise TypeError(
                f"{name} is a {type(x).__name__} and query a DTensor; all three must be DTensors: call distribute_tensor with Replicate()"
            )
        if x.device_mesh != query.device_mesh:
            raise ValueError(f"{name} is on the mesh {x.device_mesh}; it must be on query's, {query.device_mesh}")
    dims = [_sharded_dim("query", query, i) for i in range(query.device_mesh.ndim)]
    for name, x in (("key", key), ("value", value)):
        _check_alike(name, x, dims)
    for i, dim in enumerate(dims):
        ranks = query.device_mesh.size(i)
        for name, heads in (("query", query.shape[1]), ("key", key.shape[1]), ("value", value.shape[1])):
            if dim == 1 and heads != 1 and query.shape[1] != key.shape[1] and heads % ranks:
                raise ValueError(f"{name} has {heads} heads; sharded by heads with grouped keys they must be a multiple of the mesh's {ranks} ranks")
    mask = _local_mask(attn_mask, query, dims)
    found = function(query.to_local(), key.to_local(), value.to_local(), mask, return_lse=return_lse, **options)
    shape = (*torch.broadcast_shapes(query.shape[:2], (key.shape[0], 1)), query.shape[2], value.shape[3])
    if return_lse:
        return _as_dtensor(found[0], query, shape), _as_dtensor(found[1], query, shape[:3])
    return _as_dtensor(found, query, shape)


def _sharded_dim(name: str, x: DTensor, mesh_dim: int) -> int | None:
    """The dimension of x that is sharded along a dimension of the mesh, or None if x is replicated."""
    placement = x.placements[mesh_dim]
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    if not placement.is_shard() or dim is None or dim % x.dim() not in BATCH_AND_HEADS:
        raise ValueError(
            f"{name} has the placement {placement} along dimension {mesh_dim} of the mesh; it must be Shard(0), Shard(1) or Replicate():"
            " redistribute it, or use fp8attn.distributed.context_parallel_sdpa for shards of tokens"
        )
    return dim % x.dim()


def _check_alike(name: str, x: DTensor, dims: list[int | None]) -> None:
    """Check that key or value is sharded as query is; or replicated, where its size is 1."""
    for i, dim in enumerate(dims):
        found = _sharded_dim(name, x, i)
        if found != dim and not (found is None and dim is not None and x.shape[dim] == 1):
            raise ValueError(f"{name} has the placement {x.placements[i]} along dimension {i} of the mesh; it must be query's, {_placement(dim)}")


def _placement(dim: int | None) -> str:
    return "Replicate()" if dim is None else f"Shard({dim})"


def _local_mask(attn_mask: Any, query: DTensor, dims: list[int | None]) -> Any:
    """attn_mask of this rank's shard."""
    if not isinstance(attn_mask, torch.Tensor):
        return attn_mask
    sizes = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    for i, dim in enumerate(dims):
        wanted = None if dim is None or sizes[dim] == 1 else dim - (4 - attn_mask.dim())
        if not is_dtensor(attn_mask):
            if wanted is not None:
                raise TypeError(
                    f"attn_mask is a {type(attn_mask).__name__} of shape {tuple(attn_mask.shape)}; it must be a DTensor, sharded as query is"
                )
            continue
        placement = attn_mask.placements[i]  # type: ignore[attr-defined]
        found = None if placement.is_replicate() else getattr(placement, "dim", -1)
        if found != wanted:
            raise ValueError(f"attn_mask has the placement {placement} along dimension {i} of the mesh; it must be {_placement(wanted)}")
    return attn_mask.to_local() if is_dtensor(attn_mask) else attn_mask  # type: ignore[attr-defined]


def _as_dtensor(x: torch.Tensor, query: DTensor, shape: tuple[int, ...]) -> DTensor:
    """A rank's result, sharded as query is. `shape`: of the whole."""
    from torch.distributed.tensor import DTensor

    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(x, query.device_mesh, query.placements, run_check=False, shape=torch.Size(shape), stride=stride)
