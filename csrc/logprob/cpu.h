#pragma once

#include "logprob.h"

namespace mcore_rl {

void logprob_forward_cpu(const LogitTile& tile, const Sums& sums, int num_threads);
void logprob_backward_cpu(const LogitTile& tile, const Gradients& of, int num_threads);

}  // namespace mcore_rl
