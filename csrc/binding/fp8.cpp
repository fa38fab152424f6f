#include "megarl/fp8.h"

#include "common.h"

namespace megarl::binding {
namespace {

void quantize_fp8_blocks(const Tensor& x, Tensor codes, Tensor scales) {
  STD_TORCH_CHECK(x.dim() == 2 && (x.size(1) <= 1 || x.stride(1) == 1), "x must be [R, C]");
  const int64_t rows = x.size(0), columns = x.size(1);
  const int64_t blocks =
      ((rows + kFp8Block - 1) / kFp8Block) * ((columns + kFp8Block - 1) / kFp8Block);
  run(device::quantize_fp8_blocks,
      QuantizeFp8Blocks{dtype_of(x), x.data_ptr(), x.stride(0), rows, columns,
                        data<uint8_t>(codes, rows * columns), data<float>(scales, blocks)},
      x);
}

}  // namespace

MEGARL_IMPL(m) { m.impl("quantize_fp8_blocks", TORCH_BOX(&quantize_fp8_blocks)); }

}  // namespace megarl::binding
