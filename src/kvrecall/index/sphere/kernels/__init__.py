"""Triton kernels of the sphere index: encode, tables of a query, scan, rerank. `search` runs them one after another.

Dialect of all kernels: capitals are sizes, `i_` indices, `o_` offsets, `p_` pointers, `b_` blocks of values, `m_` masks.
"""
