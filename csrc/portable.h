// What lets one header serve the C++ compiler and nvcc.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__ __forceinline__
#define UNROLLED _Pragma("unroll")
#else
#define HOST_DEVICE inline
#define UNROLLED
#endif

// On x86-64 a loop is compiled for several instruction sets and chosen when the module is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define VECTORIZED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORIZED
#endif

namespace mcore_rl {

template <typename To, typename From>
HOST_DEVICE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace mcore_rl
