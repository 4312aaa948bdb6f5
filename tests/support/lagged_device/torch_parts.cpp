// The files that include torch's headers, compiled as one: most of the time goes to these headers.

#include "autocast.cpp"
#include "device.cpp"
#include "lccl.cpp"
#include "lccl_exchange.cpp"
#include "ops.cpp"
#include "shared_memory.cpp"
