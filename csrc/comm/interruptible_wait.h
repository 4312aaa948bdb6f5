// A wait for a collective of a process group that hears Ctrl-C.
//
// Threads: any.
#pragma once

#include "comm/message.h"

namespace zero_ext {

// Waits in slices. Only for collectives on the host: gloo ends a group whose send or receive is
// waited for too shortly, and a device's collective is not waited for by the host.
// `meanwhile`: called between them, where it is not empty.
void wait_interruptibly(const Message& message, const Meanwhile& meanwhile = {});

}  // namespace zero_ext
