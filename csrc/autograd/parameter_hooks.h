// Hooks on the AccumulateGrad node of each parameter, which report its gradients.
//
// Owner: the nodes; they hold the listener weakly.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "autograd/backward_listener.h"
#include "core/torch_internals.h"

namespace zero_ext {

// The listener hears of each gradient of parameter i before and after it arrives. The parameter may
// be frozen. The hooks live as long as the node that is returned.
[[nodiscard]] NodePtr hook_parameter(const at::Tensor& parameter, int64_t i,
                                     const std::weak_ptr<BackwardListener>& listener);

}  // namespace zero_ext
