// The CUDA engine where there is none: it says why.
#include "mxflash/cuda.hpp"

#include "unit/support.hpp"

namespace mxflash {
namespace {

TEST(Cuda, SaysWhatIsMissing) {
  const Status status = cuda::available();
  if (status.ok()) GTEST_SKIP() << "there is a device";
  EXPECT_TRUE(test::refused_with(status, {"cuda: "}));
  EXPECT_EQ(status.error().kind, ErrorKind::unsupported);
}

}  // namespace
}  // namespace mxflash
