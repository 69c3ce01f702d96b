// The native CPU ops as one translation unit; kernels.cpp is compiled apart, once per
// kind of weight. Every entry point takes a pointer to one record of 8-byte fields.
#include "vec.cpp"

#include "weight.cpp"

#include "gemm.cpp"

#include "rows.cpp"

#include "attention.cpp"

#include "context.cpp"

#include "moe.cpp"

#include "stage.cpp"

#include "tail.cpp"

#include "step.cpp"

#include "draft.cpp"
