"""Compiled loops of the fused kernel: small matrix products over lanes of prompts.

Every matrix here is ``[rows, columns, LANES]``: one SIMD vector per entry, one prompt
per lane. A product of two such matrices is then a product per prompt in which every
scalar operation is a vector operation, whatever d_model is. One register tile
(`_tile`) does all products; layer norm, embedding and readout are loops over vectors.

LLVM does not find these vectors by itself (the loop over prompts would have to be
vectorised around the loops over positions), so a vector type is added to numba.
All compiled code stands in this one file because numba's cache watches only the file
of the function it caches.
"""

# numba hands an intrinsic its first argument itself.
# pyright: reportCallIssue=false, reportOptionalCall=false

from __future__ import annotations

import operator

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, register_model

VECTOR_BYTES = 64
TILE = 4  # a 4 x 4 tile of accumulators plus its operands fits 32 vector registers
# In products LLVM may fuse multiply and add; no flag here may assume finite numbers.
_FUSED = ("contract",)

BRANCH, POST, NONE = range(3)


def lanes_of(dtype) -> int:
    """Prompts per vector: 16 in float32, 8 in float64."""
    return VECTOR_BYTES // np.dtype(dtype).itemsize


class LaneVector(types.Type):
    """Numba type of one vector: the same number for `lanes_of(dtype)` prompts."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.lanes = VECTOR_BYTES * 8 // dtype.bitwidth
        super().__init__(name=f"LaneVector({dtype})")


def _ir_vector(vector: LaneVector) -> ir.VectorType:
    scalar = ir.FloatType() if vector.dtype == types.float32 else ir.DoubleType()
    return ir.VectorType(scalar, vector.lanes)


@register_model(LaneVector)
class _LaneVectorModel(PrimitiveModel):
    def __init__(self, manager, vector):
        super().__init__(manager, vector, _ir_vector(vector))


def _splat(builder, scalar, vector_type):
    one = builder.insert_element(
        ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0)
    )
    mask = ir.Constant(ir.VectorType(ir.IntType(32), vector_type.count), None)
    return builder.shuffle_vector(one, ir.Constant(vector_type, ir.Undefined), mask)


def _define_arithmetic(op, instruction: str) -> None:
    """Let numba code write ``vector op vector`` and ``vector op scalar``."""

    @infer_global(op)
    class _Template(AbstractTemplate):
        def generic(self, args, kws):
            if len(args) == 2 and isinstance(args[0], LaneVector):
                other = args[0] if isinstance(args[1], LaneVector) else args[0].dtype
                return signature(args[0], args[0], other)
            return None

    def lower(context, builder, sig, args):
        left, right = args
        if not isinstance(sig.args[1], LaneVector):
            right = _splat(builder, right, left.type)
        return getattr(builder, instruction)(left, right)

    lower_builtin(op, LaneVector, LaneVector)(lower)
    lower_builtin(op, LaneVector, types.Float)(lower)


for _op, _instruction in (
    (operator.add, "fadd"),
    (operator.iadd, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.imul, "fmul"),
):
    _define_arithmetic(_op, _instruction)


def _vector_pointer(context, builder, array, array_value, index, index_value):
    """Address of the vector that starts at ``array[index]`` (missing indices are 0)."""
    view = context.make_array(array)(context, builder, array_value)
    parts = [
        context.cast(builder, part, kind, types.intp)
        for part, kind in zip(cgutils.unpack_tuple(builder, index_value), index, strict=True)
    ]
    parts += [context.get_constant(types.intp, 0)] * (array.ndim - len(parts))
    pointer = cgutils.get_item_pointer(context, builder, array, view, parts, wraparound=False)
    return builder.bitcast(pointer, _ir_vector(LaneVector(array.dtype)).as_pointer())


@intrinsic
def _load(typingctx, array, index):
    """The vector ``array[*index, :LANES]``."""

    def codegen(context, builder, sig, args):
        pointer = _vector_pointer(context, builder, array, args[0], index, args[1])
        return builder.load(pointer, align=array.dtype.bitwidth // 8)

    return LaneVector(array.dtype)(array, index), codegen


@intrinsic
def _store(typingctx, array, index, value):
    """``array[*index, :LANES] = value``."""

    def codegen(context, builder, sig, args):
        pointer = _vector_pointer(context, builder, array, args[0], index, args[1])
        builder.store(args[2], pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, index, value), codegen


@intrinsic
def _fill(typingctx, scalar):
    """The vector that holds `scalar` in every lane."""
    vector = LaneVector(scalar)
    return vector(scalar), lambda context, builder, sig, args: _splat(
        builder, args[0], _ir_vector(vector)
    )


@intrinsic
def _inverse_sqrt(typingctx, vector):
    """``1 / sqrt(vector)``, correctly rounded twice."""

    def codegen(context, builder, sig, args):
        name = f"llvm.sqrt.v{vector.lanes}f{vector.dtype.bitwidth}"
        kind = ir.FunctionType(args[0].type, [args[0].type])
        root = cgutils.get_or_insert_function(builder.module, kind, name)
        one = _splat(builder, ir.Constant(args[0].type.element, 1.0), args[0].type)
        return builder.fdiv(one, builder.call(root, args))

    return vector(vector), codegen


@intrinsic
def _lane_sum(typingctx, vector):
    """Sum over lanes, in one fixed order (pairwise halves)."""

    def codegen(context, builder, sig, args):
        total, width = args[0], vector.lanes
        while width > 1:
            width //= 2
            halves = [
                builder.shuffle_vector(
                    total,
                    ir.Constant(total.type, ir.Undefined),
                    ir.Constant(
                        ir.VectorType(ir.IntType(32), width), list(range(start, start + width))
                    ),
                )
                for start in (0, width)
            ]
            total = builder.fadd(*halves)
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return vector.dtype(vector), codegen


@intrinsic
def _pointer(typingctx, array):
    """Address of the first entry."""

    def codegen(context, builder, sig, args):
        return context.make_array(array)(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def _claim(typingctx, counter):
    """Add one to ``counter[0]``, atomically; the value before."""

    def codegen(context, builder, sig, args):
        pointer = context.make_array(counter)(context, builder, args[0]).data
        one = ir.Constant(pointer.type.pointee, 1)
        return builder.atomic_rmw("add", pointer, one, "monotonic")

    return types.int64(counter), codegen


@intrinsic
def _tile(
    typingctx, out, out_row, out_col, x, x_row, x_col, y, y_row, y_col, depth, add, rows, cols
):
    """One register tile: ``out (+)= x y`` for `rows` x `cols` <= TILE x TILE entries.

    Pointers address the tile's first entries; strides count scalars. Each tile shape
    has its own straight-line code around one loop over `depth`.
    """
    vector_type = _ir_vector(LaneVector(out.dtype))
    align = out.dtype.bitwidth // 8

    def codegen(context, builder, sig, args):
        out, out_row, out_col, x, x_row, x_col, y, y_row, y_col, depth, add, rows, cols = args
        resuming = builder.icmp_signed("!=", add, ir.Constant(add.type, 0))

        def vector_at(base, *terms):
            for index, stride in terms:
                base = builder.gep(base, [builder.mul(index, stride)])
            return builder.bitcast(base, vector_type.as_pointer())

        def read(pointer):
            return builder.load(pointer, align=align)

        def emit(n_rows, n_cols):
            number = [ir.Constant(depth.type, i) for i in range(TILE)]
            cells = [(i, j) for i in range(n_rows) for j in range(n_cols)]
            target = {
                (i, j): vector_at(out, (number[i], out_row), (number[j], out_col)) for i, j in cells
            }
            total = {cell: cgutils.alloca_once(builder, vector_type) for cell in cells}
            with builder.if_else(resuming) as (resume, start):
                with resume:
                    for cell in cells:
                        builder.store(read(target[cell]), total[cell])
                with start:
                    for cell in cells:
                        builder.store(ir.Constant(vector_type, None), total[cell])
            with cgutils.for_range(builder, depth) as loop:
                step = loop.index
                xs = [read(vector_at(x, (step, x_col), (i, x_row))) for i in number[:n_rows]]
                ys = [read(vector_at(y, (step, y_row), (j, y_col))) for j in number[:n_cols]]
                for i, j in cells:
                    product = builder.fmul(xs[i], ys[j], flags=_FUSED)
                    old = builder.load(total[i, j])
                    builder.store(builder.fadd(old, product, flags=_FUSED), total[i, j])
            for cell in cells:
                builder.store(builder.load(total[cell]), target[cell], align=align)

        end = builder.append_basic_block("tile.end")
        shape = builder.add(builder.mul(rows, ir.Constant(rows.type, TILE + 1)), cols)
        switch = builder.switch(shape, end)
        for n_rows in range(1, TILE + 1):
            for n_cols in range(1, TILE + 1):
                block = builder.append_basic_block(f"tile.{n_rows}x{n_cols}")
                switch.add_case(ir.Constant(rows.type, n_rows * (TILE + 1) + n_cols), block)
                builder.position_at_end(block)
                emit(n_rows, n_cols)
                builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    p, n = types.CPointer(out.dtype), types.intp
    return types.void(p, n, n, p, n, n, p, n, n, n, n, n, n), codegen


@intrinsic
def _shift(typingctx, pointer, offset):
    """`pointer` moved by `offset` scalars."""
    return pointer(pointer, types.intp), lambda context, builder, sig, args: builder.gep(
        args[0], [args[1]]
    )


@njit(error_model="numpy")
def _tiles(out, out_row, out_col, x, x_row, x_col, y, y_row, y_col, rows, depth, cols, add):
    for i in range(0, rows, TILE):
        for j in range(0, cols, TILE):
            _tile(
                _shift(out, i * out_row + j * out_col), out_row, out_col,
                _shift(x, i * x_row), x_row, x_col,
                _shift(y, j * y_col), y_row, y_col,
                depth, add, min(TILE, rows - i), min(TILE, cols - j),
            )  # fmt: skip


# Products per prompt: ``out = x y`` or, with `add` = 1, ``out += x y``; `out` may not overlap
# an operand. An operand is transposed by swapping its strides: arrays stay contiguous, so that
# each of these compiles once. (`np.int64` keeps numba from compiling `_tiles` per literal.)


@njit(error_model="numpy")
def _product(out, x, y, add):
    """``x y``."""
    lanes = out.shape[2]
    _tiles(
        _pointer(out), out.shape[1] * lanes, lanes,
        _pointer(x), x.shape[1] * lanes, lanes,
        _pointer(y), y.shape[1] * lanes, lanes,
        out.shape[0], x.shape[1], out.shape[1], np.int64(add),
    )  # fmt: skip


@njit(error_model="numpy")
def _transposed_product(out, x, y, add):
    """``x' y``."""
    lanes = out.shape[2]
    _tiles(
        _pointer(out), out.shape[1] * lanes, lanes,
        _pointer(x), lanes, x.shape[1] * lanes,
        _pointer(y), y.shape[1] * lanes, lanes,
        out.shape[0], x.shape[0], out.shape[1], np.int64(add),
    )  # fmt: skip


@njit(error_model="numpy")
def _product_transposed(out, x, y, add):
    """``x y'``."""
    lanes = out.shape[2]
    _tiles(
        _pointer(out), out.shape[1] * lanes, lanes,
        _pointer(x), x.shape[1] * lanes, lanes,
        _pointer(y), lanes, y.shape[1] * lanes,
        out.shape[0], x.shape[1], out.shape[1], np.int64(add),
    )  # fmt: skip


@njit(error_model="numpy")
def _normalize(branch, inverse_scale, eps, first):
    """Layer norm over d_model, in place, for rows from `first` on."""
    d_model = branch.shape[1]
    share = branch.dtype.type(1.0 / d_model)
    for n in range(first, branch.shape[0]):
        mean = _load(branch, (n, 0))
        for i in range(1, d_model):
            mean += _load(branch, (n, i))
        mean *= share
        variance = _fill(branch.dtype.type(0.0))
        for i in range(d_model):
            centred = _load(branch, (n, i)) - mean
            _store(branch, (n, i), centred)
            variance += centred * centred
        inverse = _inverse_sqrt(variance * share + _fill(eps))
        _store(inverse_scale, (n, 0), inverse)
        for i in range(d_model):
            _store(branch, (n, i), _load(branch, (n, i)) * inverse)


@njit(error_model="numpy")
def _normalize_backward(d_out, normalized, inverse_scale, gain, d_branch, first):
    """``d_branch = (g - mean(g) - z mean(g z)) / scale`` with ``g = gain d_out``, z normalized."""
    d_model = d_out.shape[1]
    share = d_out.dtype.type(1.0 / d_model)
    for n in range(first, d_out.shape[0]):
        mean = _fill(d_out.dtype.type(0.0))
        along = _fill(d_out.dtype.type(0.0))
        for i in range(d_model):
            g = _load(d_out, (n, i)) * gain[i]
            mean += g
            along += g * _load(normalized, (n, i))
        mean *= share
        along *= share
        inverse = _load(inverse_scale, (n, 0))
        for i in range(d_model):
            g = _load(d_out, (n, i)) * gain[i]
            _store(d_branch, (n, i), (g - mean - _load(normalized, (n, i)) * along) * inverse)


@njit(error_model="numpy")
def _affine_backward(d_out, normalized, d_gain, d_bias, first):
    for i in range(d_out.shape[1]):
        to_gain = _load(d_gain, (0, i))
        to_bias = _load(d_bias, (0, i))
        for n in range(first, d_out.shape[0]):
            to_gain += _load(d_out, (n, i)) * _load(normalized, (n, i))
            to_bias += _load(d_out, (n, i))
        _store(d_gain, (0, i), to_gain)
        _store(d_bias, (0, i), to_bias)


@njit(error_model="numpy")
def _leave_block(normalized, gain, bias, residual, add_residual, target, first):
    """``target = gain normalized + bias``, plus the residual stream if asked for."""
    for n in range(first, target.shape[0]):
        for i in range(target.shape[1]):
            value = _load(normalized, (n, i)) * gain[i] + _fill(bias[i])
            if add_residual:
                value += _load(residual, (n, i))
            _store(target, (n, i), value)


@njit(error_model="numpy")
def _copy(source, target, first):
    for n in range(first, source.shape[0]):
        for i in range(source.shape[1]):
            _store(target, (n, i), _load(source, (n, i)))


@njit(error_model="numpy")
def _sum_lanes(total, target):
    """Write the sum over lanes of ``total [rows, columns, LANES]`` to the flat `target`."""
    for r in range(total.shape[0]):
        for c in range(total.shape[1]):
            target[r * total.shape[1] + c] = _lane_sum(_load(total, (r, c)))


@njit(error_model="numpy")
def _repeat(weights, target):
    """Copy the flat `weights` into every lane, so that they multiply like any matrix."""
    for r in range(target.shape[0]):
        for c in range(target.shape[1]):
            _store(target, (r, c), _fill(weights[r * target.shape[1] + c]))


@njit(error_model="numpy")
def _empty(shape, like):
    """Matrices ``[*shape, LANES]``, aligned so that no vector splits a cache line."""
    lanes = VECTOR_BYTES // like.itemsize
    size = lanes
    for axis in shape:
        size *= axis
    raw = np.empty(size + lanes, like.dtype)
    skip = (-(raw.ctypes.data // like.itemsize)) % lanes
    return raw[skip : skip + size].reshape((*shape, lanes))


@njit(error_model="numpy")
def _zeros(shape, like):
    """`_empty`, filled with zeros."""
    matrices = _empty(shape, like)
    matrices.reshape(-1)[:] = 0
    return matrices


@njit(error_model="numpy")
def _one_model(theta, gradient, x, y, targets, weight, predictions, config, eps):
    """Loss of one model; fills `predictions` and, unless it is empty, `gradient`.

    The sum over heads of ``Q A_h S B_h`` is ``Q G``, so heads cost nothing per position.
    With heads stacked, ``a[i, (h, j)]`` and ``b[(h, k), l]``:
    ``left[i, (h, k)] = sum_j a[i, (h, j)] S[j, k]`` and ``G = left b``. Backward:
    ``d_left = dG b'``, ``dS = sum_ih a' d_left``, ``da = d_left S'``, ``db = left' dG``.
    """
    n_layers, n_heads, d_model, normalization, affine, query_only, exclude_query = config
    n_rows, padded = x.shape[1], x.shape[2]
    n_features = x.shape[0] + 2
    lanes = VECTOR_BYTES // theta.itemsize
    zero = theta.dtype.type(0.0)
    keys = n_rows - exclude_query
    first_read = (n_rows - 1) * query_only
    stacked = n_heads * d_model
    head_size = stacked * d_model

    # Where each parameter starts in `theta` and `gradient`.
    layer_start = (n_features + 1) * d_model
    layer_size = 3 * head_size + 2 * d_model * affine
    readout_start = layer_start + n_layers * layer_size
    bias_u = readout_start + (n_rows - first_read) * d_model

    # The first feature is the constant 1, so b_E joins the first row of W_E.
    embed = _empty((n_features, d_model), theta)
    _repeat(theta[: n_features * d_model], embed)
    for i in range(d_model):
        constant = _load(embed, (0, i)) + _fill(theta[n_features * d_model + i])
        _store(embed, (0, i), constant)
    readout = theta[readout_start:bias_u].reshape(n_rows - first_read, d_model)
    a = _empty((n_layers, stacked, d_model), theta)  # row (i, h)
    b = _empty((n_layers, stacked, d_model), theta)
    gain = np.ones((n_layers, d_model), theta.dtype)
    bias = np.zeros((n_layers, d_model), theta.dtype)
    for layer in range(n_layers):
        start = layer_start + layer * layer_size
        w_q = theta[start : start + head_size].reshape(n_heads, d_model, d_model)
        w_k = theta[start + head_size : start + 2 * head_size].reshape(n_heads, d_model, d_model)
        for h in range(n_heads):
            for i in range(d_model):
                for j in range(d_model):
                    entry = zero
                    for k in range(d_model):
                        entry += w_q[h, i, k] * w_k[h, j, k]
                    _store(a[layer], (i * n_heads + h, j), _fill(entry))
        start += 2 * head_size
        _repeat(theta[start : start + head_size], b[layer])
        if affine:
            start += head_size
            gain[layer] = theta[start : start + d_model]
            bias[layer] = theta[start + d_model : start + 2 * d_model]

    features = _zeros((n_rows, n_features), theta)
    residual = _empty((n_layers + 1, n_rows, d_model), theta)
    normalized = _empty((n_layers, n_rows, d_model), theta)
    inverse_scale = _empty((n_layers, n_rows, 1), theta)
    gram = _empty((n_layers, d_model, d_model), theta)
    left = _empty((n_layers, d_model, stacked), theta)
    left_rows = left.reshape(n_layers, stacked, d_model, lanes)
    state = _empty((n_layers, d_model, d_model), theta)

    backward = gradient.size > 0
    d_residual = _empty((n_rows, d_model), theta)
    d_branch = _empty((n_rows, d_model), theta)
    d_state = _empty((d_model, d_model), theta)
    d_left = _empty((d_model, stacked), theta)
    d_left_rows = d_left.reshape(stacked, d_model, lanes)
    d_gram = _empty((d_model, d_model), theta)
    d_embed = _zeros((n_features, d_model), theta)
    d_readout = _zeros((n_rows - first_read, d_model), theta)
    d_a = _zeros((n_layers, stacked, d_model), theta)
    d_b = _zeros((n_layers, stacked, d_model), theta)
    d_gain = _zeros((n_layers, 1, d_model), theta)
    d_bias = _zeros((n_layers, 1, d_model), theta)
    d_bias_u = _fill(zero)
    loss = _fill(zero)

    for n in range(n_rows):
        _store(features, (n, 0), _fill(theta.dtype.type(1.0)))  # y of the query row stays 0

    for block in range(0, padded, lanes):
        for n in range(n_rows):
            for j in range(n_features - 2):
                _store(features, (n, 1 + j), _load(x, (j, n, block)))
            if n < n_rows - 1:
                _store(features, (n, n_features - 1), _load(y, (n, block)))
        _product(residual[0], features, embed, 0)

        for layer in range(n_layers):
            first = first_read if layer == n_layers - 1 else 0
            stream, after, branch = residual[layer], residual[layer + 1], normalized[layer]
            context = stream[:keys]
            _transposed_product(gram[layer], context, context, 0)
            _product(left_rows[layer], a[layer], gram[layer], 0)
            _product(state[layer], left[layer], b[layer], 0)
            if normalization != BRANCH:
                _copy(stream, branch, first)
            _product(branch[first:], stream[first:], state[layer], 1 * (normalization != BRANCH))
            if normalization == NONE:
                _copy(branch, after, first)
            else:
                _normalize(branch, inverse_scale[layer], eps, first)
                _leave_block(
                    branch, gain[layer], bias[layer], stream, normalization == BRANCH, after, first
                )

        final = residual[n_layers]
        prediction = _fill(theta[bias_u])
        for n in range(first_read, n_rows):
            read = _load(final, (n, 0)) * readout[n - first_read, 0]
            for i in range(1, d_model):
                read += _load(final, (n, i)) * readout[n - first_read, i]
            prediction += read
        _store(predictions, (block,), prediction)
        if not backward:
            continue

        error = prediction - _load(targets, (block,))
        d_prediction = error * _load(weight, (block,))
        loss += error * d_prediction
        d_prediction += d_prediction
        d_bias_u += d_prediction
        for n in range(n_rows):
            for i in range(d_model):
                if n < first_read:
                    _store(d_residual, (n, i), _fill(zero))
                else:
                    m = n - first_read
                    _store(d_residual, (n, i), d_prediction * readout[m, i])
                    total = _load(d_readout, (m, i)) + d_prediction * _load(final, (n, i))
                    _store(d_readout, (m, i), total)

        for layer in range(n_layers - 1, -1, -1):
            first = first_read if layer == n_layers - 1 else 0
            stream = residual[layer]
            context = stream[:keys]
            if normalization == NONE:
                _copy(d_residual, d_branch, first)
            else:
                if affine:
                    _affine_backward(
                        d_residual, normalized[layer], d_gain[layer], d_bias[layer], first
                    )
                _normalize_backward(
                    d_residual, normalized[layer], inverse_scale[layer], gain[layer], d_branch,
                    first,
                )  # fmt: skip
                if normalization == POST:
                    _copy(d_branch, d_residual, first)
            out = d_branch[first:]
            _transposed_product(d_state, stream[first:], out, 0)
            _product_transposed(d_residual[first:], out, state[layer], 1)
            _product_transposed(d_left, d_state, b[layer], 0)
            _transposed_product(d_b[layer], left[layer], d_state, 1)
            _product(d_a[layer], d_left_rows, gram[layer], 1)
            _transposed_product(d_gram, a[layer], d_left_rows, 0)
            for i in range(d_model):
                for j in range(i + 1):
                    both = _load(d_gram, (i, j)) + _load(d_gram, (j, i))
                    _store(d_gram, (i, j), both)
                    _store(d_gram, (j, i), both)
            _product(d_residual[:keys], context, d_gram, 1)
        _transposed_product(d_embed, features, d_residual, 1)

    if backward:
        _sum_lanes(d_embed, gradient)
        gradient[n_features * d_model : layer_start] = gradient[:d_model]
        scalar_a = np.empty(stacked * d_model, theta.dtype)
        for layer in range(n_layers):
            start = layer_start + layer * layer_size
            _sum_lanes(d_a[layer], scalar_a)
            per_head = scalar_a.reshape(d_model, n_heads, d_model)
            w_q = theta[start : start + head_size].reshape(n_heads, d_model, d_model)
            d_q = gradient[start : start + head_size].reshape(n_heads, d_model, d_model)
            start += head_size
            w_k = theta[start : start + head_size].reshape(n_heads, d_model, d_model)
            d_k = gradient[start : start + head_size].reshape(n_heads, d_model, d_model)
            for h in range(n_heads):
                for i in range(d_model):
                    for k in range(d_model):
                        to_q, to_k = zero, zero
                        for j in range(d_model):
                            to_q += per_head[i, h, j] * w_k[h, j, k]
                            to_k += per_head[j, h, i] * w_q[h, j, k]
                        d_q[h, i, k] = to_q
                        d_k[h, i, k] = to_k
            start += head_size
            _sum_lanes(d_b[layer], gradient[start : start + head_size])
            if affine:
                start += head_size
                _sum_lanes(d_gain[layer], gradient[start : start + d_model])
                _sum_lanes(d_bias[layer], gradient[start + d_model : start + 2 * d_model])
        _sum_lanes(d_readout, gradient[readout_start:bias_u])
        gradient[bias_u] = _lane_sum(d_bias_u)
    return _lane_sum(loss)


def run_models(
    theta, gradient, x, y, targets, weight, group, predictions, losses, config, eps, next_model
):
    """`_one_model` for the rows of `theta` that no other thread has claimed.

    Models share nothing but their prompts, so who computes which changes no result.
    """
    m = _claim(next_model)
    while m < theta.shape[0]:
        g = group[m]
        losses[m] = _one_model(
            theta[m], gradient[m], x[g], y[g], targets[g], weight, predictions[m], config, eps
        )
        m = _claim(next_model)
