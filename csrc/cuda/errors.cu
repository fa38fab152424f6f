#include "megarl/device.h"
#include "megarl/errors.h"

namespace megarl::cuda {

const char* error_text(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }

}  // namespace megarl::cuda
