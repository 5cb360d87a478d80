"""Context parallelism: attention of sequences that are sharded over the ranks of a torch.distributed group.

out = fp8attn.distributed.context_parallel_sdpa(q, k, v, group=group)  # each rank has a shard of the sequence
"""

from .agreement import Disagreement
from .context_parallel import context_parallel_sdpa
from .paged import PageShares, context_parallel_paged_sdpa, page_shard, page_share
from .sharding import shard, shard_lengths, unshard
from .varlen import context_parallel_varlen_sdpa

__all__ = [
    "Disagreement", "PageShares", "context_parallel_paged_sdpa", "context_parallel_sdpa", "context_parallel_varlen_sdpa", "page_shard",
    "page_share", "shard", "shard_lengths", "unshard",
]  # fmt: skip
