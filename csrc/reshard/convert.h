// float32 <-> bfloat16 and float32 -> float8 e4m3, by their bits. Ties go to the even neighbour.
#pragma once

#include "../portable.h"

namespace mcore_rl {

// A NaN becomes 0x7fc0, whatever its sign and payload.
HOST_DEVICE uint16_t to_bfloat16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

HOST_DEVICE float to_float32(uint16_t bfloat16) {
  return bit_cast<float>(static_cast<uint32_t>(bfloat16) << 16);
}

HOST_DEVICE float to_float32(float value) { return value; }

// As torch does it (c10/util/Float8_e4m3fn.h, fp8e4m3fn_from_fp32_value): what would round to more
// than 448 is NaN, and so is infinity. A subnormal result is rounded by adding 2**14, whose last
// bit is worth 2**-9.
HOST_DEVICE uint8_t to_e4m3(float value) {
  constexpr uint32_t kTooLarge = 1087u << 20, kSmallestNormal = 121u << 23, kAdded = 141u << 23;
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = bits & 0x80000000u, magnitude = bits ^ sign;
  const float sum = bit_cast<float>(magnitude) + bit_cast<float>(kAdded);
  const uint32_t subnormal = bit_cast<uint32_t>(sum) - kAdded;
  const uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  const uint32_t finite = magnitude < kSmallestNormal ? subnormal : normal;
  return static_cast<uint8_t>((magnitude >= kTooLarge ? 0x7fu : finite) | (sign >> 24));
}

// The magnitude's bits order floats as integers do, infinity and NaN last.
HOST_DEVICE uint32_t magnitude_of(float value) { return bit_cast<uint32_t>(value) & 0x7fffffffu; }

// The scale of a block from its largest magnitude, as checkpoint/fp8.py has it: the largest is
// taken as bfloat16 holds it and becomes 448. NaN where that is infinite or NaN.
HOST_DEVICE float scale_of(uint32_t largest_magnitude) {
  const uint16_t largest = to_bfloat16(bit_cast<float>(largest_magnitude));
  if (largest >= 0x7f80u) return bit_cast<float>(0x7fc00000u);
  const float value = to_float32(largest);
  return value < 0x1p-110f ? 1.0f : value / 448.0f;
}

}  // namespace mcore_rl
