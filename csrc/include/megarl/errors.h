// What a launcher's status means.
#pragma once

namespace megarl::cuda {
const char* error_text(int status);
}  // namespace megarl::cuda
