// Memory for quantised activations.
#pragma once

#include <memory>

#include "kernels.h"

namespace eaglejax {

class QuantMemory {
 public:
  QuantMemory(int64_t rows, int64_t k)
      : levels_(new int8_t[rows * k]),
        scale_(new float[rows * (k / kGroup)]),
        scaled_sum_(new float[rows * (k / kGroup)]),
        view{levels_.get(), scale_.get(), scaled_sum_.get()} {}

 private:
  const std::unique_ptr<int8_t[]> levels_;
  const std::unique_ptr<float[]> scale_, scaled_sum_;

 public:
  const QuantRows view;
};

}  // namespace eaglejax
