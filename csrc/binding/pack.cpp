#include "megarl/pack.h"

#include <vector>

#include "common.h"

namespace megarl::binding {
namespace {

// Of a table that megarl/ops/pack.py made; it holds raw pointers, which cannot be checked here.
PackBoxes boxes_of(const Tensor& boxes, const Tensor& first_tiles, int64_t num_tiles,
                   int64_t num_bytes, const Tensor& bucket, bool to_bucket) {
  constexpr int64_t kColumns = sizeof(PackedBox) / sizeof(int64_t);
  STD_TORCH_CHECK(boxes.dim() == 2 && boxes.size(1) == kColumns, "boxes must be [n, 8]");
  STD_TORCH_CHECK(boxes.device() == bucket.device() && first_tiles.device() == bucket.device(),
                  "the table and the bucket must be on one device");
  STD_TORCH_CHECK(bucket.numel() >= num_bytes, "a bucket of ", bucket.numel(), " bytes for ",
                  num_bytes);
  const int64_t num_boxes = boxes.size(0);
  return PackBoxes{
      reinterpret_cast<const PackedBox*>(data<int64_t>(boxes, num_boxes * kColumns)),
      data<int64_t>(first_tiles, num_boxes + 1), num_boxes, num_tiles, num_bytes,
      reinterpret_cast<char*>(data<uint8_t>(bucket, bucket.numel())), to_bucket};
}

void pack_boxes(std::vector<Tensor>, std::vector<int64_t>, std::vector<int64_t>,
                const Tensor& boxes, const Tensor& first_tiles, int64_t num_tiles,
                int64_t num_bytes, Tensor bucket) {
  run(device::pack_boxes, boxes_of(boxes, first_tiles, num_tiles, num_bytes, bucket, true), bucket);
}

void unpack_boxes(const Tensor& bucket, std::vector<int64_t>, std::vector<int64_t>,
                  const Tensor& boxes, const Tensor& first_tiles, int64_t num_tiles,
                  int64_t num_bytes, std::vector<Tensor>) {
  run(device::pack_boxes, boxes_of(boxes, first_tiles, num_tiles, num_bytes, bucket, false),
      bucket);
}

}  // namespace

MEGARL_IMPL(m) {
  m.impl("pack_boxes", TORCH_BOX(&pack_boxes));
  m.impl("unpack_boxes", TORCH_BOX(&unpack_boxes));
}

}  // namespace megarl::binding
