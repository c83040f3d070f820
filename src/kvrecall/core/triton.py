"""What kernels of all stages share: the overlap of launches, soft capping, rows in host memory, instructions of a warp.

* **Programmatic dependent launch** (NVIDIA): the launch of the next kernel in a chain overlaps with the end of the one before.
  The next kernel is allowed to start only at the end. Otherwise its programs would occupy multiprocessors and wait while the
  previous kernel still has programs to start.
* **Rows in host memory**: their addresses by one look-up in the block table of a sequence, reading and writing. Rows lie in the
  dtype of the model, or in eight bits with a scale per key and per value (`core.fp8`); the dtype of the pool says which: uint8
  is e4m3. Widening is arithmetic on bits, which GPUs without instructions for e4m3 do as well. Rows in eight bits are read 16
  numbers at a time, their two scales by one more access of eight bytes.
* **Instructions of a warp**: if a block has as many values as the program has threads, each thread has one value, in order:
  thread `l` of warp `w` has number `32 w + l`. PTX instructions of a warp can work on such blocks; Triton has no operations
  for them.

Dialect: capitals are sizes, `i_` indices, `o_` offsets, `p_` pointers, `m_` masks, `b_` blocks.
"""

# The values of compile-time constants are numbers only inside a kernel, and the compiler resolves loops over constants and
# tuples of values, which type checkers do not know.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvrecall.core import structs


@triton.jit
def begin(PDL: tl.constexpr):
    """Waits for the writes of the previous kernel. Writes of earlier kernels may be read before this call."""
    if PDL:
        gdc_wait()


@triton.jit
def end(PDL: tl.constexpr):
    """Allows the next kernel to start. After its `begin` it still sees all writes of this kernel."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def capped(b_logit, softcap):
    """softcap * tanh(b_logit / softcap)."""
    return softcap * (1.0 - 2.0 / (tl.exp(2.0 * b_logit / softcap) + 1.0))


BEHIND = tl.constexpr(8)
"""Bytes of a row's scales, behind the numbers of its block."""
FAR_BIAS = tl.constexpr(structs.FAR_BIAS)
"""In a kernel; also FAR of rows that all lie in one memory."""
THREADS = tl.constexpr(128)
"""Scales of R rows are loaded as a tile of so many numbers, so that no two warps load the same ones over the bus."""


@triton.jit
def row_offset(
    p_table, b_id, m_id, i_kv, HEADS, BLOCK: tl.constexpr, D: tl.constexpr, SCALES: tl.constexpr = 0, NEAR=0, FAR=FAR_BIAS
):  # fmt: skip
    """Offsets in elements, int64, of the rows `[2, D]` of tokens b_id >= 0 of one KV head.

    table int32 `[W]`: the blocks of the sequence, `[HEADS, BLOCK, 2, D]` each, with SCALES more elements per row behind them;
    see `core.structs.HostTable`. m_id: mask; the other entries get the offset of some row of the layer. NEAR, FAR: see
    `core.structs.Pool`.
    """
    b_block = tl.load(p_table + b_id // BLOCK, mask=m_id, other=0).to(tl.int64)
    b_offset = ((b_block * HEADS + i_kv) * BLOCK + tl.where(m_id, b_id % BLOCK, 0)) * (2 * D)
    if SCALES > 0:
        b_offset += b_block * HEADS * (BLOCK * SCALES)
    return b_offset + far_offset(b_block, NEAR, FAR)


@triton.jit
def far_offset(b_block, NEAR, FAR):
    """What is added to the offset of a row of a block; see `core.structs.Pool`."""
    return tl.where(b_block >= NEAR, FAR - FAR_BIAS, 0)


@triton.jit
def scale_pointer(p_pool, p_table, b_id, m_id, i_kv, HEADS, BLOCK: tl.constexpr, D: tl.constexpr):
    """Pointers to the scales fp32 `[2]` of rows in eight bits, as `row_offset`."""
    b_block = tl.load(p_table + b_id // BLOCK, mask=m_id, other=0).to(tl.int64)
    b_row = i_kv * BLOCK + tl.where(m_id, b_id % BLOCK, 0)
    o_byte = (b_block * HEADS * (2 * D + 8) + HEADS * (2 * D)) * BLOCK + b_row * 8
    return p_pool.to(tl.pointer_type(tl.float32), bitcast=True) + o_byte // 4


@triton.jit
def widened(b_code):
    """e4m3 in uint8 -> fp32, by way of fp16, whose exponent has one bit more and another bias."""
    b_half = ((b_code & 0x80).to(tl.int16) << 8) | ((b_code & 0x7F).to(tl.int16) << 7)
    return b_half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def load_rows(
    p_pool, p_table, b_id, m_id, m_read, i_kv, HEADS, p_like, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, NEAR=0,
    FAR=FAR_BIAS,
):  # fmt: skip
    """K and V `[R, BD]`, in the dtype of p_like, of tokens b_id `[R]` of one KV head; 0 where not m_read.

    pool `[blocks, HEADS, BLOCK, 2, D]`; table, m_id, NEAR, FAR: see `row_offset`. m_read `[R]`: entries whose rows are read.
    """
    R: tl.constexpr = b_id.shape[0]
    o_d = tl.arange(0, BD)
    m_row = m_read[:, None] & (o_d < D)[None, :]
    if p_pool.dtype.element_ty == tl.uint8:  # which lie on the host
        X: tl.constexpr = max(2, THREADS // R)
        p_row = p_pool + row_offset(p_table, b_id, m_id, i_kv, HEADS, BLOCK, D, BEHIND)[:, None] + o_d[None, :]
        p_scale = scale_pointer(p_pool, p_table, b_id, m_id, i_kv, HEADS, BLOCK, D)
        o_x = tl.arange(0, X)
        b_scale = tl.load(p_scale[:, None] + (o_x // (X // 2))[None, :], mask=m_read[:, None], other=0.0)  # [R, X]
        b_key, b_value = tl.load(p_row, mask=m_row, other=0), tl.load(p_row + D, mask=m_row, other=0)
        b_key_scale = tl.sum(tl.where((o_x == 0)[None, :], b_scale, 0.0), 1)
        b_value_scale = tl.sum(tl.where((o_x == X // 2)[None, :], b_scale, 0.0), 1)
        b_k = (widened(b_key) * b_key_scale[:, None]).to(p_like.dtype.element_ty)
        b_v = (widened(b_value) * b_value_scale[:, None]).to(p_like.dtype.element_ty)
    else:
        p_row = p_pool + row_offset(p_table, b_id, m_id, i_kv, HEADS, BLOCK, D, 0, NEAR, FAR)[:, None] + o_d[None, :]
        b_k = tl.load(p_row, mask=m_row, other=0.0)
        b_v = tl.load(p_row + D, mask=m_row, other=0.0)
    return b_k, b_v


@triton.jit
def load_row(p_pool, p_table, i_id, i_kv, HEADS, p_like, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """K and V `[BD]` of one token in eight bits, as `load_rows`; for programs of one warp."""
    o_d = tl.arange(0, BD)
    p_row = p_pool + row_offset(p_table, i_id, i_id >= 0, i_kv, HEADS, BLOCK, D, BEHIND) + o_d
    p_scale = scale_pointer(p_pool, p_table, i_id, i_id >= 0, i_kv, HEADS, BLOCK, D)
    b_key, b_value = tl.load(p_row, mask=o_d < D, other=0), tl.load(p_row + D, mask=o_d < D, other=0)
    b_k = (widened(b_key) * tl.load(p_scale)).to(p_like.dtype.element_ty)
    b_v = (widened(b_value) * tl.load(p_scale + 1)).to(p_like.dtype.element_ty)
    return b_k, b_v


@triton.jit
def load_keys(p_pool, p_table, b_id, m_id, i_kv, HEADS, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Keys fp32 `[R, BD]` of tokens b_id `[R]` of one KV head, 0 where not m_id; as `load_rows`."""
    R: tl.constexpr = b_id.shape[0]
    o_d = tl.arange(0, BD)
    m_row = m_id[:, None] & (o_d < D)[None, :]
    if p_pool.dtype.element_ty == tl.uint8:
        X: tl.constexpr = max(1, THREADS // R)
        p_row = p_pool + row_offset(p_table, b_id, m_id, i_kv, HEADS, BLOCK, D, BEHIND)[:, None] + o_d[None, :]
        p_scale = scale_pointer(p_pool, p_table, b_id, m_id, i_kv, HEADS, BLOCK, D)
        o_x = tl.zeros([X], tl.int32)
        b_scale = tl.load(p_scale[:, None] + o_x[None, :], mask=m_id[:, None], other=0.0)  # [R, X]
        b_number = tl.load(p_row, mask=m_row, other=0)
        b_key = widened(b_number) * tl.sum(tl.where((tl.arange(0, X) == 0)[None, :], b_scale, 0.0), 1)[:, None]
    else:
        p_row = p_pool + row_offset(p_table, b_id, m_id, i_kv, HEADS, BLOCK, D)[:, None] + o_d[None, :]
        b_key = tl.load(p_row, mask=m_row, other=0.0).to(tl.float32)
    return b_key


@triton.jit
def quantised(b_x):
    """Codes uint8 `[R, BD]` and scales fp32 `[R, 1]` of keys or values fp32 `[R, BD]`, padded with 0; see
    `core.fp8.quantised`."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_size = b_bits & 0x7FFFFFFF
    b_largest = tl.max(b_size, 1)[:, None]
    b_part = (b_largest.to(tl.float32, bitcast=True) * (1 / 448)).to(tl.int32, bitcast=True)
    b_scale = tl.maximum(b_part + 0x80 & -0x100, 27 << 23)  # 16 bits of fraction, and at least 2^-100
    inverse = tl.div_rn(1.0, b_scale.to(tl.float32, bitcast=True))
    b_scale = tl.where(b_largest < 0x7F800000, b_scale, 0x7FC00000).to(tl.float32, bitcast=True)
    b_code = e4m3(b_size.to(tl.float32, bitcast=True) * inverse)
    return (tl.minimum(b_code, 0x7F) | ((b_bits >> 24) & 0x80)).to(tl.uint8), b_scale


@triton.jit
def e4m3(b_own):
    """Codes int32 of numbers fp32 >= 0, rounded to even; of what is too large, codes above 126."""
    b_word = b_own.to(tl.int32, bitcast=True)
    b_normal = (b_word + 0x7FFFF + ((b_word >> 20) & 1) >> 20) - (120 << 3)  # three bits of fraction, ties to even
    # The smallest numbers are multiples of 2^-9. Multiplying by 512 is exact, so it may be joined with the addition.
    b_small = (b_own * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    return tl.where(b_word < 121 << 23, b_small, b_normal)


@triton.jit
def store_half(p_pool, o_row, p_scale, b_x, BYTES: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Stores a key or a value `[BD]` at an offset of the pool; BYTES: in eight bits, with its scale."""
    o_d = tl.arange(0, BD)
    if BYTES:
        b_code, b_scale = quantised(b_x.to(tl.float32)[None, :])
        tl.store(p_pool + o_row + o_d[None, :], b_code, mask=(o_d < D)[None, :])
        tl.store(p_scale + tl.zeros([1, 1], tl.int32), b_scale)
    else:
        tl.store(p_pool + o_row + o_d, b_x, mask=o_d < D)


@triton.jit
def store_row(p_pool, p_table, number, m_store, i_kv, HEADS, b_k, b_v, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Stores key and value `[BD]`, 0 behind D, of token `number` of one KV head; table, m_store: see `row_offset`."""
    if p_pool.dtype.element_ty == tl.uint8:
        o_row = row_offset(p_table, number, m_store, i_kv, HEADS, BLOCK, D, BEHIND)
        p_scale = scale_pointer(p_pool, p_table, number, m_store, i_kv, HEADS, BLOCK, D)
        store_half(p_pool, o_row, p_scale, b_k, True, D, BD)
        store_half(p_pool, o_row + D, p_scale + 1, b_v, True, D, BD)
    else:
        o_row = row_offset(p_table, number, m_store, i_kv, HEADS, BLOCK, D)
        store_half(p_pool, o_row, p_pool, b_k, False, D, BD)
        store_half(p_pool, o_row + D, p_pool, b_v, False, D, BD)


@triton.jit
def as_stored(b_x, p_pool):
    """Keys or values `[R, BD]`, padded with 0, as they are read back from a pool."""
    if p_pool.dtype.element_ty == tl.uint8:
        b_code, b_scale = quantised(b_x.to(tl.float32))
        b_back = (widened(b_code) * b_scale).to(b_x.dtype)
    else:
        b_back = b_x
    return b_back


ADD = "redux.sync.add.s32 $0, $1, 0xffffffff;"
PAIR = "cvt.rz.relu.f16x2.f32 $0, $2, $1;"
LARGER = "max.f16x2 $0, $1, $2;"
PRODUCT = "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};"
PLANES, PLANE_NAMES = 5, range(5)


def _bits(source: str, count: int, into: list[str]) -> str:
    """Words of 32 bits: bit i of the number of every thread, for i < count."""
    taken = "".join(f"and.b32 t, {source}, {1 << i}; setp.ne.b32 p{i}, t, 0; " for i in range(count))
    voted = "".join(f"vote.sync.ballot.b32 {into[i]}, p{i}, 0xffffffff; " for i in range(count))
    return f".reg .pred p<{count}>; .reg .b32 t; {taken}{voted}"


BITS = "{ " + _bits("$5", PLANES, [f"${i}" for i in PLANE_NAMES]) + "}"


def _equal(count: int) -> str:
    """How many threads have the number that this thread counts, of `count` bits; of six bits, also that number plus 32."""
    outs = count - 4
    matched = "".join(f"xor.b32 b{i}, b{i}, ${outs + 1 + i}; " for i in range(5))
    matched += "".join(f"and.b32 b0, b0, b{i}; " for i in range(1, 5))
    if count == 5:
        counted = "popc.b32 $0, b0; "
    else:
        counted = "and.b32 b1, b0, b5; popc.b32 $1, b1; not.b32 b5, b5; and.b32 b1, b0, b5; popc.b32 $0, b1; "
    votes = _bits(f"${outs}", count, [f"b{i}" for i in range(count)])
    return "{ " + f".reg .b32 b<{count}>; " + votes + matched + counted + "}"


EQUAL, EQUAL_64 = _equal(5), _equal(6)


@triton.constexpr_function
def _asm(name):
    """The instruction of that name, because a kernel may not read globals of this module."""
    return {
        "add": ADD, "pair": PAIR, "larger": LARGER, "product": PRODUCT, "bits": BITS, "equal": EQUAL, "equal_64": EQUAL_64,
    }[name]  # fmt: skip


@triton.constexpr_function
def exchanging(mask):
    """The instruction of `exchanged`."""
    return f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, 0xffffffff;"


@triton.constexpr_function
def sharing(i):
    """The instruction of `of_four`."""
    return f"shfl.sync.idx.b32 $0, $1, {i}, 0x1c1f, 0xffffffff;"


@triton.jit
def exchanged(b_x, MASK: tl.constexpr):
    """int32 of the thread whose number in the warp differs by the bit MASK."""
    return tl.inline_asm_elementwise(exchanging(MASK), "=r,r", [b_x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def of_four(b_x, i: tl.constexpr):
    """int32 of thread i of every four neighbouring threads."""
    return tl.inline_asm_elementwise(sharing(i), "=r,r", [b_x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def sum_of_warp(b_x):
    """fp32 sum over the warp, equal in all threads."""
    for i in tl.static_range(5):
        b_x += exchanged(b_x.to(tl.int32, bitcast=True), 16 >> i).to(tl.float32, bitcast=True)
    return b_x


@triton.jit
def count_of_warp(b_x):
    """int32 sum over the warp."""
    return tl.inline_asm_elementwise(_asm("add"), "=r,r", [b_x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def bits_of_warp(b_x):
    """The lower five bits of int32 numbers: word i, int32, has bit i of thread l's number at bit l."""
    return tl.inline_asm_elementwise(
        _asm("bits"), "=r,=r,=r,=r,=r,r", [b_x], dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def pair(b_low, b_high):
    """Two fp32 as fp16 in the halves of an int32, rounded towards 0, negative ones as 0."""
    return tl.inline_asm_elementwise(_asm("pair"), "=r,f,f", [b_low, b_high], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def larger(b_x, b_y):
    """The larger fp16 in each half."""
    return tl.inline_asm_elementwise(_asm("larger"), "=r,r,r", [b_x, b_y], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def product(b_low, b_high, b_column, b_even, b_odd):
    """Adds the number of common bits of rows and columns: 16 rows and 8 columns of 128 bits per warp (`mma.m16n8k128`).

    Thread 4 g + t has bits 32 t .. 32 t + 31 of rows g (low) and g + 8 (high) and of column g, and gets columns 2 t and 2 t + 1
    of row g, then of row g + 8. even, odd: the initial sums of these columns.
    """
    return tl.inline_asm_elementwise(
        _asm("product"), "=r,=r,=r,=r,r,r,r,r,r,r,r", [b_low, b_high, b_column, b_even[0], b_odd[0], b_even[1], b_odd[1]],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def masks_of(b_lane):
    """Masks for `equal`, which counts the number of each thread, 0..31."""
    return (
        (b_lane & 1) - 1, ((b_lane >> 1) & 1) - 1, ((b_lane >> 2) & 1) - 1, ((b_lane >> 3) & 1) - 1, ((b_lane >> 4) & 1) - 1,
    )  # fmt: skip


@triton.jit
def equal(b_x, b_masks):
    """How many threads of the warp have the number 0..31 that this thread counts."""
    return tl.inline_asm_elementwise(
        _asm("equal"), "=r,r,r,r,r,r,r", [b_x, b_masks[0], b_masks[1], b_masks[2], b_masks[3], b_masks[4]], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def equal_64(b_x, b_masks):
    """As `equal`, for numbers 0..63: how many threads have the number, and how many have it plus 32."""
    return tl.inline_asm_elementwise(
        _asm("equal_64"), "=r,=r,r,r,r,r,r,r", [b_x, b_masks[0], b_masks[1], b_masks[2], b_masks[3], b_masks[4]],
        dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
