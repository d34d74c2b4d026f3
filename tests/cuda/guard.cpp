// A CPU build of torch has no guard for CUDA devices, which even fake tensors ask for: one that does nothing is enough.
#include <c10/core/impl/DeviceGuardImplInterface.h>

using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
namespace {
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}
