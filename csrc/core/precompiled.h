// Torch's headers that many files include. No file includes this one: setup.py compiles it once,
// and gives the result to the files that include headers of torch. Each of them still includes
// what it uses, and compiles without this, too.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/Work.hpp>
