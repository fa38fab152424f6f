// Boxes of many tensors into one bucket of bytes and back; what for is in megarl/ops/pack.py.
#pragma once
#include "megarl/base.h"

namespace megarl {

// What a box becomes on its way from the tensor into the bucket; the way back undoes it.
enum class BoxCast : int64_t { kCopy = 0, kFloat32ToBFloat16 = 1, kBFloat16ToFloat32 = 2 };

// One row of the table. In the bucket the rows of a box lie one behind the other.
struct PackedBox {
  int64_t pointer;     // of the tensor's first element
  int64_t offset;      // of the first byte in the bucket; ascending from box to box
  int64_t row_stride;  // bytes from row to row of the tensor
  int64_t rows;        // > 0
  int64_t columns;     // > 0: elements of a row; bytes for a copy
  BoxCast cast;
  // log2 of the elements (bytes for a copy) of a unit, which one thread moves at once: units are
  // aligned on both sides, to 16 bytes or to their size where that is less. `columns` is a
  // multiple, unless there is but one row.
  int64_t unit_log2;
  int64_t tile_units;  // units a tile; fewer than 2^31 units a box
};
static_assert(sizeof(PackedBox) == 8 * sizeof(int64_t));

struct PackBoxes {
  const PackedBox* boxes;      // [num_boxes]
  const int64_t* first_tiles;  // [num_boxes + 1]: the first tile of each box, then num_tiles
  int64_t num_boxes, num_tiles;
  int64_t num_bytes;  // one past the last byte of the last box
  char* bucket;       // 16-byte aligned
  bool to_bucket;     // false: from the bucket into the tensors
};

namespace cpu {
int pack_boxes(const PackBoxes& args, ParallelFor run);
}  // namespace cpu

namespace cuda {
int pack_boxes(const PackBoxes& args, void* stream);
}  // namespace cuda

}  // namespace megarl
