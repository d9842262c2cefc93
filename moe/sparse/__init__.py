"""Sparse matrices (COO, CSR, CSC, BCSR), their products, and an MoE layer made of those products.

The routing matrix of a batch is one of them: `routing_csr` and `routing_csc` share its arrays. The
kernels are in `moe.kernels` (`spmm`, `sddmm`, `block_products`). What is not here: the grouped
products that the layer uses by default, which `docs/sparse.md` compares with these.
"""

from moe.sparse.formats import BCSR, COO, CSC, CSR, from_torch
from moe.sparse.matmul import matmul, sdd, spmm
from moe.sparse.pattern import Pattern
from moe.sparse.products import gather, sddmm
from moe.sparse.routing import routing_csc, routing_csr

__all__ = [
    "BCSR",
    "COO",
    "CSC",
    "CSR",
    "Pattern",
    "from_torch",
    "gather",
    "matmul",
    "routing_csc",
    "routing_csr",
    "sdd",
    "sddmm",
    "spmm",
]
