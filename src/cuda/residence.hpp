// Where the memory of a call lies: on the current device, or the call is refused. A kernel that follows another pointer
// ends the process's use of the device. Needs one; nothing waits, and a stream may be capturing: then an address that
// the runtime does not know is taken, since the graph may allocate it.
#pragma once

#include "mxflash/cuda.hpp"

namespace mxflash::cuda {

/// The call has been checked otherwise: what has elements has an address.
Status check_residence(const ForwardCall& call, const Execution& execution);
Status check_residence(const BackwardCall& call, const Recipe& recipe, const Execution& execution);

}  // namespace mxflash::cuda
