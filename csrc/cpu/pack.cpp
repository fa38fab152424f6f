#include "megarl/pack.h"

#include <algorithm>

#include "simd.h"

namespace megarl::cpu {
namespace {

constexpr int64_t kGrainBytes = 1 << 16;

// Rows of one of the few sizes for which a call of memcpy costs more than the copy.
template <int kBytes>
void copy_rows(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * to_stride, from + r * from_stride, kBytes);
}

void copy_rows(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t rows,
               int64_t bytes) {
  switch (bytes) {
    case 1: return copy_rows<1>(from, from_stride, to, to_stride, rows);
    case 2: return copy_rows<2>(from, from_stride, to, to_stride, rows);
    case 4: return copy_rows<4>(from, from_stride, to, to_stride, rows);
    case 8: return copy_rows<8>(from, from_stride, to, to_stride, rows);
    case 16: return copy_rows<16>(from, from_stride, to, to_stride, rows);
    default:
      for (int64_t r = 0; r < rows; ++r)
        std::memcpy(to + r * to_stride, from + r * from_stride, static_cast<size_t>(bytes));
  }
}

}  // namespace

MEGARL_CLONES void narrow_rows(const char* from, int64_t from_stride, char* to, int64_t to_stride,
                               int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* x = reinterpret_cast<const float*>(from + r * from_stride);
    uint16_t* y = reinterpret_cast<uint16_t*>(to + r * to_stride);
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) y[i] = bf16_of(x[i]);
  }
}

MEGARL_CLONES void widen_rows(const char* from, int64_t from_stride, char* to, int64_t to_stride,
                              int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    const uint16_t* x = reinterpret_cast<const uint16_t*>(from + r * from_stride);
    float* y = reinterpret_cast<float*>(to + r * to_stride);
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) y[i] = float_of_bf16(x[i]);
  }
}

namespace {

// Elements of a box as the bucket has them, [row, row + rows) x [column, column + columns).
struct BoxMover {
  const PackBoxes& args;
  const PackedBox& box;
  int64_t in_tensor, in_bucket;  // bytes an element

  BoxMover(const PackBoxes& args, const PackedBox& box) : args(args), box(box) {
    const bool is_copy = box.cast == BoxCast::kCopy;
    const bool is_float = box.cast == BoxCast::kFloat32ToBFloat16;
    in_tensor = is_copy ? 1 : is_float ? 4 : 2;
    in_bucket = is_copy ? 1 : is_float ? 2 : 4;
  }

  void move(int64_t row, int64_t rows, int64_t column, int64_t columns) const {
    char* tensor =
        reinterpret_cast<char*>(box.pointer) + row * box.row_stride + column * in_tensor;
    char* bucket = args.bucket + box.offset + (row * box.columns + column) * in_bucket;
    const int64_t dense = box.columns * in_bucket;
    const char* from = args.to_bucket ? tensor : bucket;
    char* to = args.to_bucket ? bucket : tensor;
    const int64_t from_stride = args.to_bucket ? box.row_stride : dense;
    const int64_t to_stride = args.to_bucket ? dense : box.row_stride;
    if (box.cast == BoxCast::kCopy) {
      copy_rows(from, from_stride, to, to_stride, rows, columns);
    } else if ((box.cast == BoxCast::kFloat32ToBFloat16) == args.to_bucket) {
      narrow_rows(from, from_stride, to, to_stride, rows, columns);
    } else {
      widen_rows(from, from_stride, to, to_stride, rows, columns);
    }
  }

  // Elements [begin, end) in the bucket's order: part of a row, whole rows, part of a row.
  void move_range(int64_t begin, int64_t end) const {
    int64_t row = begin / box.columns;
    const int64_t column = begin % box.columns;
    if (column) {
      const int64_t columns = std::min(box.columns - column, end - begin);
      move(row++, 1, column, columns);
      begin += columns;
    }
    const int64_t rows = (end - begin) / box.columns, left = (end - begin) % box.columns;
    if (rows) move(row, rows, 0, box.columns);
    if (left) move(row + rows, 1, 0, left);
  }
};

}  // namespace

int pack_boxes(const PackBoxes& args, ParallelFor run) {
  if (args.num_boxes == 0) return 0;
  // By bytes of the bucket, whatever the sizes of the boxes. An element belongs to where it begins.
  parallel_for(run, args.num_bytes, kGrainBytes, [&](int64_t begin, int64_t end) {
    const PackedBox* last = args.boxes + args.num_boxes;
    const PackedBox* box =
        std::upper_bound(args.boxes, last, begin,
                         [](int64_t at, const PackedBox& other) { return at < other.offset; });
    if (box != args.boxes) --box;
    for (; box != last && box->offset < end; ++box) {
      const BoxMover mover(args, *box);
      auto element_at = [&](int64_t byte) {
        const int64_t bytes = std::max<int64_t>(byte - box->offset, 0);
        return std::min((bytes + mover.in_bucket - 1) / mover.in_bucket, box->rows * box->columns);
      };
      const int64_t from = element_at(begin), to = element_at(end);
      if (from < to) mover.move_range(from, to);
    }
  });
  return 0;
}

}  // namespace megarl::cpu
