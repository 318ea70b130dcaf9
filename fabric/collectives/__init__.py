"""The collectives over collections of tensors and numbers.

``base`` says which leaves travel, and in which buffer; ``reduce_ops`` names the reductions and refuses those without
meaning; ``autograd`` knows the gradients. On these stand ``reductions``, ``gathering``, ``exchange`` (rows and copies
of tensors), ``messages`` (any object, as bytes) and ``meeting``.
"""

from fabric.collectives.exchange import all_to_all, broadcast
from fabric.collectives.gathering import all_gather, all_gather_ragged
from fabric.collectives.meeting import barrier, new_group
from fabric.collectives.messages import gather, recv, scatter, send
from fabric.collectives.reduce_ops import parse_reduce_op
from fabric.collectives.reductions import all_reduce, reduce_scatter

__all__ = [
    "all_gather",
    "all_gather_ragged",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "new_group",
    "parse_reduce_op",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
]
